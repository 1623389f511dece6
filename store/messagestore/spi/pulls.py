"""Messages of one queue of a broker, by PULL_MESSAGE: many requests under way, and each message exactly once.

The body of an answer is records of the CommitLog, byte for byte, so the caller decodes and checks them as he does those
of a file. A request is for exact queue offsets. What an answer leaves out because the broker limits its size is asked
for again. The records of a range must have its queue offsets, one after the other: anything else is an error. While the
caller decodes, the broker prepares what comes next, also that of the next queue.

    range  |--- asked ---|--- asked ---|--- asked ---|          all under way
           |== answer ==.|                                      the broker gave less
                        |-|                                     so the rest is asked for
    next range          |--- asked ---|                         as soon as all of this one is
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import (
    BrokerError,
    CorruptionError,
    OffsetOutOfRangeError,
    StoreError,
    StoreUnavailableError,
    StoreWentBackwardsError,
)
from messagestore.format.gathered import Gathered
from messagestore.format.inner_batch import single_records
from messagestore.format.layout import SYS_FLAG_INNER_BATCH
from messagestore.format.record_scan import chains, heads
from messagestore.remoting import Answer, Call, codes
from messagestore.remoting.client import refused
from messagestore.remoting.replicas import Replicas, Request
from messagestore.spi.interface import Queue, Range

SUBSCRIPTION_FLAG = 4
"""`sysFlag`: the request says what it subscribes to. Without COMMIT_OFFSET (1) and SUSPEND (2), a pull changes nothing,
and is answered at once (RocketMQ common/sysflag/PullSysFlag.java).
"""
GROUP = "TOOLS_CONSUMER"
"""The consumer group that pulls name if the user gives none. Every broker has this group, which RocketMQ's tools use.
So nothing is created, and nothing is committed.
"""
ANSWERS = frozenset({codes.SUCCESS, codes.PULL_NOT_FOUND, codes.PULL_RETRY_IMMEDIATELY, codes.PULL_OFFSET_MOVED})

_UNDER_WAY, _MOST_UNDER_WAY = 16, 128
"""How many requests are under way, and how many if their answers are small. Each is answered with 256 KiB at most,
unless a broker is told otherwise.
"""
_SIZE_UNDER_WAY = 4 * 1024 * 1024
"""How many bytes of answers are asked for ahead: a broker needs as long for them as decoding a block takes here."""
_MOST_MESSAGES = 1024
_LEVEL_ANSWERS = 64
"""After so many full answers, the next requests ask for more."""


@dataclass(frozen=True, slots=True)
class Records:
    """Records as they stand in answers, one after the other.

    Parameters
    ----------
    data : uint8[m]
    positions : int64[n]
    sizes : int32[n]
    queue_offsets, physical_offsets : int64[n]
    store_timestamps_ms : int64[n]
    """

    data: NDArray[np.uint8]
    positions: NDArray[np.int64]
    sizes: NDArray[np.int32]
    queue_offsets: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    store_timestamps_ms: NDArray[np.int64]

    @classmethod
    def of(cls, bodies: list[bytes | memoryview], path: str) -> Records:
        """The records in the bodies of some answers.

        Raises
        ------
        CorruptionError
            The bodies do not consist of whole records.
        """
        data = np.concatenate([np.frombuffer(body, np.uint8) for body in bodies] or [np.empty(0, np.uint8)])
        ends = np.cumsum(np.fromiter(map(len, bodies), np.int64, len(bodies)))
        positions, stops = chains(data, ends)
        head = heads(data, positions)
        for body in np.flatnonzero(stops != ends)[:1].tolist():
            count = int(np.searchsorted(positions, stops[body]))
            raise CorruptionError(
                path,
                int(head["physical_offset"][count - 1]) if count else 0,
                "an answer that consists of whole records",
                f"{ends[body] - stops[body]} bytes behind record {count} that are no record",
            )

        if (head["sys_flag"] & SYS_FLAG_INNER_BATCH).any():
            return cls._of_inner_batches(data, positions, head, path)
        return cls(
            data,
            positions,
            head["total_size"].astype(np.int32),
            head["queue_offset"].astype(np.int64),
            head["physical_offset"].astype(np.int64),
            head["store_timestamp_ms"].astype(np.int64),
        )

    @classmethod
    def _of_inner_batches(
        cls, data: NDArray[np.uint8], positions: NDArray[np.int64], head: NDArray[np.void], path: str
    ) -> Records:
        """A record for each message of a batch that the broker keeps as one.

        A request for a message in the middle of a batch is answered with all of it, so messages may come twice here.
        """
        singles: list[bytes] = []
        numbers: list[int] = []
        owners: list[int] = []
        for row, (position, size) in enumerate(zip(positions.tolist(), head["total_size"].tolist(), strict=True)):
            place = int(head["physical_offset"][row])
            records = single_records(data[position : position + size].tobytes(), path, place)
            first = int(head["queue_offset"][row])
            singles += records
            numbers += range(first, first + len(records))
            owners += [row] * len(records)

        queue_offsets, rows = np.unique(np.array(numbers, np.int64), return_index=True)
        chosen = [singles[row] for row in rows.tolist()]
        sizes = np.fromiter(map(len, chosen), np.int32, len(chosen))
        of_rows = np.array(owners, np.int64)[rows]
        return cls(
            np.frombuffer(b"".join(chosen), np.uint8),
            np.cumsum(sizes, dtype=np.int64) - sizes,
            sizes,
            queue_offsets,
            head["physical_offset"][of_rows].astype(np.int64),
            head["store_timestamp_ms"][of_rows].astype(np.int64),
        )

    def rows(self, first: int, last: int) -> Records:
        """Some of the records, by their position among these."""
        some = slice(first, last)
        return Records(
            self.data,
            self.positions[some],
            self.sizes[some],
            self.queue_offsets[some],
            self.physical_offsets[some],
            self.store_timestamps_ms[some],
        )


def tell_progress(ask: Callable[[list[Request]], object], group: str, offsets: Mapping[Queue, int]) -> None:
    """Tell a broker how far a group has read; `ask` sends requests, and raises `BrokerError` if one is refused."""
    requests: list[Request] = [
        (
            codes.UPDATE_CONSUMER_OFFSET,
            {"consumerGroup": group, "topic": topic, "queueId": queue_id, "commitOffset": offset},
        )
        for (topic, queue_id), offset in offsets.items()
    ]
    try:
        ask(requests)
    except BrokerError as error:
        if error.code != codes.SUBSCRIPTION_GROUP_NOT_EXIST:
            raise
        # A broker makes a group when the group pulls, if it may (autoCreateSubscriptionGroup).
        queue, offset = next(iter(offsets.items()))
        ask([(codes.PULL_MESSAGE, pull_fields(*queue, offset, 1, group))])
        ask(requests)


def pull_fields(topic: str, queue_id: int, queue_offset: int, most: int, group: str = GROUP) -> dict[str, object]:
    """The header of a request for at most so many messages from an offset on."""
    return {
        "consumerGroup": group,
        "topic": topic,
        "queueId": queue_id,
        "queueOffset": queue_offset,
        "maxMsgNums": most,
        "sysFlag": SUBSCRIPTION_FLAG,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subscription": "*",
        "subVersion": 0,
        "expressionType": "TAG",
    }


class _Asked:
    """A request that is under way, and the queue offsets that it is for."""

    __slots__ = ("call", "end", "most", "start")

    def __init__(self, start: int, end: int, call: Call) -> None:
        self.start, self.end, self.call = start, end, call
        self.most = end - start


class Pull:
    """Pulls one range of a queue.

    Parameters
    ----------
    replicas : Replicas
    span : Range
        `end` is at most the end of the queue.
    path : str
        What errors say.
    group : str
    check : function
        Called after a connection broke, before a message of the next one is returned.
    """

    def __init__(
        self, replicas: Replicas, span: Range, path: str, group: str, check: Callable[[], None] | None = None
    ) -> None:
        self._replicas, self._span, self._path, self._group = replicas, span, path, group
        self._check = check
        self._name = f"{span.topic}/{span.queue_id}"
        self._asked: deque[_Asked] = deque()
        self._next = span.start  # the first message that was not asked for
        self._most, self._level = 32, 0
        self._answer_size = 1
        self.following: Pull | None = None
        """What is read behind this range. It is asked for as soon as all of this range is."""
        self._patience = replicas.patience()

    def blocks(self, max_rows: int, max_size: int) -> Iterator[Gathered]:
        """The messages of the range in order, as blocks.

        Raises
        ------
        OffsetOutOfRangeError
            Retention has deleted the next message.
        StoreWentBackwardsError
            The queue ends before the range.
        CorruptionError
            The broker has other messages than those that were asked for.
        """
        self._patience.progressed()  # the ranges before this one may have taken long
        position, bodies, size = self._span.start, list[bytes | memoryview](), 0
        first = position
        while position < self._span.end:
            answer, wanted = self._answer(position)
            behind = answer.number("nextBeginOffset")
            if answer.code != codes.SUCCESS or not len(answer.body) or behind <= position:
                if bodies:
                    yield from self._checked(first, position, bodies)
                    bodies = []
                if not self._is_lagging(position, answer):
                    raise self._missing(position, answer)
                first = position
                continue

            bodies.append(answer.body)
            size += len(answer.body)
            position = self._advance(position, min(behind, wanted))
            if position - first >= max_rows or size >= max_size:
                yield from self._checked(first, position, bodies)
                first, bodies, size = position, [], 0
        if bodies:
            yield from self._checked(first, position, bodies)

    # ---- requests

    def ask_ahead(self) -> None:
        """Send the first requests, and do not wait. If nobody is there, `blocks` says so."""
        with contextlib.suppress(StoreError):
            self._fill(self._replicas.address(), self._span.start)

    def _answer(self, position: int) -> tuple[Answer, int]:
        """The answer to the request for `position`, and the end of what it was for."""
        while True:
            address, failure = "", StoreError()
            try:
                address = self._replicas.address()
                self._fill(address, position)
                asked = self._asked[0]
                answer = asked.call.answer()
                if answer.code in ANSWERS:
                    if answer.code == codes.SUCCESS:  # a slave that answers without the message is no progress
                        self._patience.progressed()
                        self._answer_size = max(1, len(answer.body))
                    self._asked.popleft()
                    return answer, asked.end
                failure = refused(answer, self._replicas.name)
                if not self._replicas.may_answer_later(answer.code):
                    raise failure
                if answer.code == codes.GO_AWAY:
                    self._replicas.client.drop(address)
            except StoreUnavailableError as error:
                failure = error

            self._ask_again(position)
            # A slave without slaveReadEnable is always busy.
            asks_another = isinstance(failure, StoreUnavailableError) or self._replicas.is_slave
            if not (address and asks_another and self._replicas.gave_no_answer(address)):
                self._patience.wait(failure)
            if self._check is not None and isinstance(failure, StoreUnavailableError):
                self._check()

    def _fill(self, address: str, position: int) -> None:
        """Send requests until enough are under way, for this range and then for those behind it."""
        self._next = max(self._next, position)
        left = max(_UNDER_WAY, min(_MOST_UNDER_WAY, _SIZE_UNDER_WAY // self._answer_size))
        pull: Pull | None = self
        while pull is not None:
            left = pull._ask(address, left)
            pull = pull.following if left > 0 and pull._next >= pull._span.end else None

    def _ask(self, address: str, most: int) -> int:
        """Send requests for this range until so many are under way; how many more may be."""
        while len(self._asked) < most and self._next < self._span.end:
            end = min(self._span.end, self._next + self._most)
            self._asked.append(self._sent(address, self._next, end))
            self._next = end
        return most - len(self._asked)

    def _ask_again(self, position: int) -> None:
        """Want no answer to what is under way, which the connection drops then, and begin anew at a message."""
        self._asked.clear()
        self._next = position
        pull = self.following
        while pull is not None and pull._asked:
            pull._asked.clear()
            pull._next = pull._span.start
            pull = pull.following

    def _sent(self, address: str, start: int, end: int) -> _Asked:
        fields = pull_fields(self._span.topic, self._span.queue_id, start, end - start, self._group)
        return _Asked(start, end, self._replicas.send(address, (codes.PULL_MESSAGE, fields)))

    def _advance(self, start: int, behind: int) -> int:
        """Where to go on behind an answer. What it left out is asked for at once."""
        wanted = self._asked[0].start if self._asked else self._next
        if behind < wanted:  # the broker's limit: the next requests are for as much as that allows
            self._most, self._level = max(1, behind - start), 0
            try:
                self._asked.appendleft(self._sent(self._replicas.address(), behind, wanted))
            except StoreUnavailableError:
                self._ask_again(behind)
        else:
            self._level += 1
            if self._level >= _LEVEL_ANSWERS:
                self._most, self._level = min(_MOST_MESSAGES, 2 * self._most), 0
        return behind

    # ---- what an answer says

    def _is_lagging(self, position: int, answer: Answer) -> bool:
        """Whether a slave does not have the message yet. Then this waits a little, and all is asked for again."""
        if not self._replicas.is_slave or position < int(answer.fields.get("maxOffset", 0)):
            return False
        self._ask_again(position)
        self._patience.wait(
            StoreUnavailableError(
                f"{self._path}: the slave {answer.address} does not have message {position} of {self._name} yet, and "
                f"the master does not answer"
            )
        )
        return True

    def _missing(self, position: int, answer: Answer) -> StoreError:
        """The error for an answer without messages."""
        begin, end = answer.number("minOffset"), answer.number("maxOffset")
        if position >= end:
            return StoreWentBackwardsError(
                f"{self._path}: {self._name} ends at {end} now, but message {position} was there when this read was "
                f"planned: the broker lost its tail, or the topic was created again. Restart the query"
            )
        if position < begin:
            return self._deleted(position, begin, end)
        behind = answer.number("nextBeginOffset")
        if position < behind <= end:  # the log was deleted, but not yet what leads to it
            return self._deleted(position, behind, end)
        return CorruptionError(
            self._path, 0, f"message {position} of {self._name}", f"the answer {codes.answer_name(answer.code)}"
        )

    def _deleted(self, position: int, begin: int, end: int) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            f"{self._name}: message {position} is gone, because retention has deleted it; the queue holds {begin} to "
            f"{end}",
            topic=self._span.topic,
            queue_id=self._span.queue_id,
            queue_offset=position,
            min=begin,
            max=end,
        )

    def _checked(self, first: int, end: int, bodies: list[bytes | memoryview]) -> Iterator[Gathered]:
        """A block, if it has the messages `first..end`; otherwise those before the first fault, and then the error."""
        records = Records.of(bodies, f"{self._path} {self._name}")
        if len(records.sizes) and int(records.queue_offsets[0]) < first:  # an inner batch that began before
            records = records.rows(int(np.searchsorted(records.queue_offsets, first)), len(records.sizes))
        records = records.rows(0, end - first) if self._is_batch(records, end) else records

        numbers = np.arange(first, first + len(records.sizes), dtype=np.int64)
        wrong = np.flatnonzero(records.queue_offsets != numbers)
        count = int(wrong[0]) if len(wrong) else len(numbers)
        if count:
            good = records.rows(0, count)
            yield Gathered(
                self._span.topic,
                self._span.queue_id,
                first,
                first + count,
                good.queue_offsets,
                good.physical_offsets,
                good.sizes,
                good.data,
                good.positions,
                f"{self._path} {self._name}",
            )

        if count == end - first and not len(wrong):
            return
        missing = first + count
        has = int(records.queue_offsets[count]) if count < len(records.sizes) else None
        begin, queue_end = self._bounds()
        begin = self._first_in_log(begin, queue_end)
        if missing < begin:
            raise self._deleted(missing, begin, queue_end)
        raise CorruptionError(
            f"{self._path} {self._name}",
            int(records.physical_offsets[count]) if has is not None else 0,
            f"message {missing}",
            "the end of the answer" if has is None else f"message {has}",
            hint="The broker returned other messages than it was asked for, and they were not read. Was the topic "
            "deleted and created again?",
        )

    @staticmethod
    def _is_batch(records: Records, end: int) -> bool:
        """Whether the last record is an inner batch of which only a part was asked for."""
        return (
            len(records.sizes) > 0
            and int(records.queue_offsets[-1]) >= end
            and len(np.unique(records.physical_offsets)) < len(records.sizes)
        )

    def _first_in_log(self, begin: int, end: int) -> int:
        """The first message of the queue that the log has. Retention deletes the log first, and then what leads to it:
        until then, the broker answers a pull for a message that is gone with the first one that is there. If that is
        more than some hundred messages further on, the broker says only from where to ask again.
        """
        while True:
            fields = pull_fields(self._span.topic, self._span.queue_id, begin, 1, self._group)
            (answer,) = self._replicas.asked([(codes.PULL_MESSAGE, fields)], {codes.PULL_MESSAGE: ANSWERS})
            if answer.code == codes.SUCCESS and len(answer.body):
                return max(begin, int(Records.of([answer.body], self._path).queue_offsets[0]))
            behind = answer.number("nextBeginOffset")
            if not begin < behind <= end:
                return begin
            begin = behind

    def _bounds(self) -> tuple[int, int]:
        fields = {"topic": self._span.topic, "queueId": self._span.queue_id}
        answers = self._replicas.asked([(codes.GET_MIN_OFFSET, fields), (codes.GET_MAX_OFFSET, fields)])
        return answers[0].number("offset"), answers[1].number("offset")
