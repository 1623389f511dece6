"""Which half messages are open, and how far a broker need not look for them again.

    half queue   | 0 | 1 | 2 | 3 | 4 | 5 |        op queue   | "1," | "0,3," |
                           ^                                          ^
                           the first open one                         the first op that ends one behind it

A half message is open while no op message names its queue offset, and while it was not put back: a broker writes no op
message for a half message that it puts back, but the same message with more checks comes behind it. Both places are
kept as a broker keeps them, in `config/consumerOffset.json` in the name of `CID_RMQ_SYS_TRANS`. So neither a broker nor
this project reads the two queues from their beginnings. The file may be older than the queues; then a little more is
read. If a place in it is beyond the end of its queue, the queues have lost messages, and both are read from their
beginnings.

Source: RocketMQ broker/transaction/queue/TransactionalMessageServiceImpl.java (check, fillOpRemoveMap).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from functools import partial

from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.files.disk import Disk
from messagestore.format.config import StoreConfig
from messagestore.format.half_records import GROUP, HALF_TOPIC, OP_TOPIC, QUEUE_ID, OpenHalf, ended_offsets
from messagestore.format.message import MessageExt
from messagestore.read import query
from messagestore.read.view import StoreView

_UNITS = 1024
_IN_PARTS = -1
"""The generation of what an exception of a signal handler may have left in parts: the next look begins anew."""


def progress_of(root: str, config: StoreConfig, disk: Disk) -> tuple[int, int]:
    """From which half message and which op message on somebody has to look, in a store that is opened for this."""
    with contextlib.closing(StoreView(root, config, disk)) as view:
        halves = OpenHalves(view)
        halves.refresh()
        return halves.progress()


class OpenHalves:
    """The open half messages of one store. They take about a kilobyte of memory each, and their bodies none.

    Parameters
    ----------
    view : StoreView
        It is used by nobody else.

    Threads: one thread at a time.
    """

    def __init__(self, view: StoreView) -> None:
        self.view = view
        self.by_offset: dict[int, OpenHalf] = {}
        """The open half messages by their queue offsets, in ascending order."""
        self._by_transaction: dict[str, list[int]] = {}
        self._by_first: dict[int, int] = {}  # the first queue offset of half messages that a broker put back
        self._half_end = self._op_end = 0  # what has been read
        self._generation = _IN_PARTS
        self._op_begin = 0
        self._op_last: deque[int] = deque()
        """The highest queue offset that each op message from `_op_begin` on ends."""
        self.saved = (0, 0)
        """What the file says: of half messages, and of op messages. Whoever writes the file changes this."""

    # ---- following the store

    def refresh(self) -> None:
        """Read what was appended to both queues since the last call; at the first call, all that may matter."""
        view = self.view
        view.refresh()
        op_end = view.max_offset(OP_TOPIC, QUEUE_ID)  # first: no op message may come before its half message
        half_end = view.max_offset(HALF_TOPIC, QUEUE_ID)
        if view.generation != self._generation or half_end < self._half_end or op_end < self._op_end:
            self._begin(half_end, op_end)

        self._generation = _IN_PARTS
        ended: dict[int, int] = {}
        for op in self._messages(OP_TOPIC, self._op_end, op_end):
            self._take_op(op, ended)
        for message in self._messages(HALF_TOPIC, self._half_end, half_end):
            self._take_half(OpenHalf.of(message), ended)
        self._half_end, self._op_end = half_end, op_end
        for half in self._deleted():
            self._end(half.queue_offset)
        self._generation = view.generation

    def _deleted(self) -> list[OpenHalf]:
        """The open half messages whose segments retention has deleted."""
        low = self.view.files.commit_log.min_offset
        return list(itertools.takewhile(lambda half: half.physical_offset < low, self.by_offset.values()))

    def _begin(self, half_end: int, op_end: int) -> None:
        table = ConsumerOffsets(self.view.files.disk, self.view.files.paths.root)
        table.load()
        self.saved = (self._in_file(table, HALF_TOPIC), self._in_file(table, OP_TOPIC))
        self._half_end, self._op_begin = self.saved
        if self.saved[0] > half_end or self.saved[1] > op_end:  # another log's: what it counts may be open
            self._half_end = self._op_begin = 0
        self._half_end = max(self.view.min_offset(HALF_TOPIC, QUEUE_ID), self._half_end)
        self._op_begin = self._op_end = max(self.view.min_offset(OP_TOPIC, QUEUE_ID), self._op_begin)
        self._op_last.clear()
        for index in (self.by_offset, self._by_transaction, self._by_first):
            index.clear()

    def _in_file(self, table: ConsumerOffsets, topic: str) -> int:
        return max(table.get(topic, GROUP).get(QUEUE_ID, 0), 0)

    def _messages(self, topic: str, start: int, end: int) -> Iterator[MessageExt]:
        """The messages of a queue that are left, one after the other."""
        for first in range(start, end, _UNITS):
            units = self.view.units(topic, QUEUE_ID, first, min(first + _UNITS, end))
            for number, unit in enumerate(units, first):
                message = query.looked_up(
                    self.view, partial(query.message_of, self.view, topic, QUEUE_ID, number, unit)
                )
                if message is not None:
                    yield message
                elif topic == OP_TOPIC:
                    self._op_last.append(-1)

    def _take_op(self, op: MessageExt, ended: dict[int, int]) -> None:
        offsets = ended_offsets(op)
        number = self._op_begin + len(self._op_last)
        self._op_last.append(max(offsets, default=-1))
        for offset in offsets:
            self._end(offset)
            ended[offset] = number
            later = self._by_first.get(offset)
            if later is not None:
                self._end(later)

    def _take_half(self, half: OpenHalf, ended: dict[int, int]) -> None:
        first = half.first_queue_offset
        for earlier in self.of_transaction(half.transaction_id) if half.check_times and half.transaction_id else ():
            # A broker puts a half message back before it ends the earlier one; it was killed in between.
            if earlier.check_times < half.check_times:
                self._end(earlier.queue_offset)
        if half.queue_offset in ended:
            return
        if first is not None and first in ended:
            op = ended[first] - self._op_begin  # it is needed for as long as this half message is looked at
            self._op_last[op] = max(self._op_last[op], half.queue_offset)
            return
        self.by_offset[half.queue_offset] = half
        self._by_transaction.setdefault(half.transaction_id, []).append(half.queue_offset)
        if first is not None:
            self._by_first[first] = half.queue_offset

    def _end(self, offset: int) -> None:
        half = self.by_offset.pop(offset, None)
        if half is None:
            return
        others = self._by_transaction[half.transaction_id]
        others.remove(offset)
        if not others:
            del self._by_transaction[half.transaction_id]
        if half.first_queue_offset is not None:
            self._by_first.pop(half.first_queue_offset, None)

    # ---- what is open

    def of_transaction(self, transaction_id: str) -> list[OpenHalf]:
        """The open half messages with a UNIQ_KEY, the oldest first: several, if a producer has sent one twice."""
        return [self.by_offset[offset] for offset in self._by_transaction.get(transaction_id, ())]

    def progress(self) -> tuple[int, int]:
        """The queue offsets from which a broker has to look: of half messages, and of op messages."""
        first = next(iter(self.by_offset), self._half_end)
        generation, self._generation = self._generation, _IN_PARTS
        while self._op_last and self._op_last[0] < first:
            self._op_last.popleft()
            self._op_begin += 1
        self._generation = generation
        return first, self._op_begin

    def saved_is_ahead(self) -> bool:
        """Whether the file names places that the queues have not reached: they have lost their last messages."""
        return self.saved[0] > self._half_end or self.saved[1] > self._op_end
