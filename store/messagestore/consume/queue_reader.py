"""What comes next in a queue, and whether it is still the queue that was read.

Threads: that of the consumer.
"""

from __future__ import annotations

import logging

from messagestore.consume.cursor import Cursor, Place
from messagestore.consume.messages import Block, ConsumedMessage, Returns
from messagestore.consume.progress import Queue
from messagestore.errors import OffsetOutOfRangeError, StoreWentBackwardsError
from messagestore.format.javahash import java_hash
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.read import queue_records
from messagestore.read.view import StoreView

_BLOCK_ROWS = 4096
_BLOCK_BYTES = 1024 * 1024
_log = logging.getLogger(__name__)


class QueueReader:
    """Reads blocks of messages for cursors.

    Parameters
    ----------
    view : StoreView
    group : str
        The consumer group, for errors and warnings.
    tags : frozenset of str | None
        The tags to hand out; None: all messages.
    returns : Returns
        The consumer, which takes messages back.
    """

    def __init__(self, view: StoreView, group: str, tags: frozenset[str] | None, returns: Returns) -> None:
        self._view = view
        self._group = group
        self._tags = tags
        self._codes = None if tags is None else frozenset(map(java_hash, tags))
        self._returns = returns

    def fetch(self, cursor: Cursor, end_seen: int) -> bool:
        """Read the next block of a queue; whether there is one.

        Parameters
        ----------
        cursor : Cursor
            It gets the block.
        end_seen : int
            Where the queue ended at the last look.

        Raises
        ------
        StoreWentBackwardsError
            As for `check_continues`.
        CorruptionError
            A message is damaged.
        """
        view, queue = self._view, cursor.queue
        if end_seen == cursor.position:
            return False
        end = self.check_continues(cursor)
        if end_seen < cursor.position:
            return False
        try:
            blocks = queue_records.blocks(view, *queue, cursor.position, end, _BLOCK_ROWS, _BLOCK_BYTES, self._codes)
            gathered = next(blocks, None)
        except OffsetOutOfRangeError as error:
            _log.warning(
                "%s: consumer group %s continues at %d: %s", view.files.paths.root, self._group, error.min, error
            )
            self.seek(cursor, error.min)
            return False
        self.check_continues(cursor)  # again, because the queue may have been made again while it was read
        if gathered is None:  # the topic was deleted meanwhile, and may come back
            return False
        cursor.give(Block(gathered, self._tags, self._returns))
        return True

    def seek(self, cursor: Cursor, position: int) -> None:
        """Continue at another message of a queue."""
        cursor.seek(position)
        self.recognise(cursor)

    def recognise(self, cursor: Cursor) -> None:
        """Remember the place of the message before the position: until one is handed out, it shows that the queue is
        still the one that was there.
        """
        place = self._place(cursor.queue, cursor.position - 1) if cursor.position else None
        cursor.before = None if place is None else (cursor.position - 1, place)

    def _place(self, queue: Queue, number: int) -> Place | None:
        """The place of a message; None if retention has deleted it, or it is not there yet.

        The store time belongs to it: where a log was cut (`recover --accept-loss`), another message may begin.
        """
        units = self._view.units(*queue, number, number + 1)
        if not len(units) or int(units["size"][0]) == FILLER_UNIT_SIZE:
            return None
        physical_offset = int(units["physical_offset"][0])
        stored_ms = self._view.stored_ms(physical_offset)
        return None if stored_ms is None else (physical_offset, stored_ms)

    def check_continues(self, cursor: Cursor) -> int:
        """Refuse a queue that has another message in the place of the last one that was handed out; return its end."""
        end = self._view.max_offset(*cursor.queue)
        if end < cursor.position:
            raise self.went_back(cursor, end)
        last, message = cursor.before, cursor.last
        if message is not None:
            last = message.queue_offset, (message.physical_offset, message.store_timestamp_ms)
        if last is not None and self._place(cursor.queue, last[0]) not in (last[1], None):
            raise self.went_back(cursor, end)
        return end

    def check_still_there(self, message: ConsumedMessage) -> None:
        """Refuse a message if another one is in its place: nobody has processed that one, and a commit would count for
        it.
        """
        topic, queue_id = message.queue
        place = self._place(message.queue, message.queue_offset)
        if place not in ((message.physical_offset, message.store_timestamp_ms), None):
            raise StoreWentBackwardsError(
                f"{topic}/{queue_id}: message {message.queue_offset} is another one than the one that was handed out. "
                f"The queue was made again, or the store was restored. Nothing was committed"
            )

    def went_back(self, cursor: Cursor, end: int) -> StoreWentBackwardsError:
        """The error for a queue that ends at `end`, and is not the one that was read."""
        topic, queue_id = cursor.queue
        return StoreWentBackwardsError(
            f"{topic}/{queue_id}: consumer group {self._group} was at {cursor.position}, and the messages before it "
            f"are gone or are others; the queue ends at {end}. It was made again, or the store was restored. Close "
            f"this consumer and open another one, which continues where the group is, or begins with `seek`"
        )
