"""Where a consumer is in one queue, and what it hands out of it next.

Threads: that of the consumer.
"""

from __future__ import annotations

import math
import time
from typing import TypeAlias

from messagestore.consume.messages import Block, ConsumedMessage
from messagestore.consume.progress import Queue

Mark: TypeAlias = "tuple[int, int, list[ConsumedMessage], int, ConsumedMessage | None, ConsumedMessage | None, float]"
"""What a hand-out changes in a cursor."""
Place: TypeAlias = "tuple[int, int]"
"""The physical offset of a message, and when it was stored."""


class Cursor:
    """Where a consumer is in one queue.

    Attributes
    ----------
    position : int
        The number of the next message to hand out.
    floor : int
        Up to here the group's progress is written, so that less need not be; -1: not known, beyond the queue's end, or
        sought back.
    last : ConsumedMessage | None
        The last message that was handed out since the last seek.
    before : tuple of int | None
        Until then: the number and the place of the message before the position; None: there is none.
    bases : tuple of int
        Where the group may be in the table if nobody but this consumer has moved it; -1: it has no progress.
    held : ConsumedMessage | None
        In an orderly consumer: the message that is not done yet. Until `held_until_s` it is not handed out again;
        infinity: the caller has it.
    ready : list of ConsumedMessage
        Messages of the block that was read, from `next_row` on not handed out yet.
    gone : bool
        The queue is no longer this worker's.
    """

    __slots__ = (
        "bases",
        "before",
        "end",
        "floor",
        "gone",
        "held",
        "held_until_s",
        "last",
        "next_row",
        "paused",
        "position",
        "queue",
        "ready",
    )

    def __init__(self, queue: Queue, position: int, floor: int) -> None:
        self.queue = queue
        self.position = self.end = position
        self.floor = floor if floor <= position else -1  # beyond the queue's end: what is read now is new
        self.bases: tuple[int, ...] = (floor, position)  # two, if what the group has lies beyond the queue's end
        self.last: ConsumedMessage | None = None
        self.before: tuple[int, Place] | None = None
        self.ready: list[ConsumedMessage] = []
        self.next_row = 0
        self.paused = self.gone = False
        self.held: ConsumedMessage | None = None
        self.held_until_s = math.inf

    def take_one(self) -> list[ConsumedMessage]:
        """Hand out one message, unless the one before holds the queue; one that failed comes again when it is due."""
        if self.held is None:
            taken = self.take(1)
            self.held = taken[0] if taken else None
        elif time.monotonic() < self.held_until_s:
            return []
        self.held_until_s = math.inf
        return [] if self.held is None else [self.held]

    @property
    def failed(self) -> ConsumedMessage | None:
        """The message that failed and holds the queue."""
        return self.held if self.held_until_s < math.inf else None

    @property
    def done(self) -> int:
        """Where the group may be: a message that failed is not done."""
        return self.position if self.failed is None else self.failed.queue_offset

    def let_go(self) -> None:
        """Take a message that the caller has as done, unless it failed."""
        if self.held_until_s == math.inf:
            self.held = None

    def give(self, block: Block) -> None:
        """Have the messages of a block handed out, and then continue behind it."""
        self.ready, self.next_row, self.end = block.messages(), 0, block.end
        if not self.ready:
            self.position = self.end

    def take(self, most: int) -> list[ConsumedMessage]:
        """Hand out messages, and move the position behind them."""
        taken = self.ready[self.next_row : self.next_row + most]
        if taken:
            self.last = taken[-1]
            self.next_row += len(taken)
            self.position = self.last.queue_offset + 1
            if self.next_row == len(self.ready):
                self.ready, self.next_row, self.position = [], 0, self.end
        return taken

    def mark(self) -> Mark:
        """What the next hand-out changes."""
        return self.position, self.end, self.ready, self.next_row, self.last, self.held, self.held_until_s

    def go_back(self, mark: Mark) -> None:
        """Go back to where the cursor was: nobody got what was handed out since."""
        self.position, self.end, self.ready, self.next_row, self.last, self.held, self.held_until_s = mark

    def committed(self, offset: int) -> None:
        """The group is at an offset now."""
        if self.held is not None and self.held.queue_offset < offset:
            self.held = None  # first: with this floor, no later commit would come here
        self.floor, self.bases = offset, (offset,)

    def seek(self, position: int) -> None:
        """Continue at another message."""
        if position < self.floor:
            self.floor = -1
        self.position, self.ready, self.next_row, self.last, self.held = position, [], 0, None, None
