"""How far a consumer has come, for a batch that moves its group with its results (`append_batch(progress=...)`).

Threads: that of the consumer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from messagestore.errors import ConfigError

Queue = tuple[str, int]


class Reader(Protocol):
    """The consumer that has the queues (`Commits`)."""

    group: str

    def held(self, root: str, offsets: Mapping[Queue, int]) -> AbstractContextManager[None]:
        """Keep the queues; refuses those that another worker of the group has, and another store."""

    def may_move(self, queue: Queue, offset: int) -> bool:
        """Whether the group is where the consumer knows it."""

    def moved(self, offsets: Mapping[Queue, int]) -> None:
        """The group is at these offsets now."""


class Positions:
    """The next offsets of a consumer's group, as they were when `Consumer.positions` was called.

    A batch takes them only from the worker that has the queues, and only if the group is still where this worker began
    or committed last. So a worker that lost its queues moves nothing, and neither does one whose group was reset.

    Attributes
    ----------
    offsets : dict of group to dict of (topic, queue id) to int
    """

    def __init__(self, reader: Reader, offsets: Mapping[Queue, int]) -> None:
        self._reader = reader
        self._offsets = dict(offsets)
        if not offsets:
            raise ConfigError(
                "positions: found no message that was handed out since the last commit; allowed is at least one. "
                "Poll first, or append the batch without progress",
                key="progress",
            )

    def __repr__(self) -> str:
        return f"Positions({dict(self.offsets)!r})"

    @property
    def offsets(self) -> Mapping[str, Mapping[Queue, int]]:
        """The next offsets, by group."""
        return {self._reader.group: dict(self._offsets)}

    def held(self, root: str) -> AbstractContextManager[None]:
        """Keep the queues until the batch is appended to the store at `root`.

        Raises
        ------
        StoreLockedError
            Another worker of the group has a queue, or may have it.
        StoreWentBackwardsError
            The messages that were handed out are gone.
        ConfigError
            The consumer reads another store, or a batch or a commit has moved the group there already.
        StoreClosedError
            The consumer is closed, or another thread uses it.
        """
        return self._reader.held(root, self._offsets)

    def allows(self, queue: Queue, offset: int) -> bool:
        """Whether the group is where the consumer knows it."""
        return self._reader.may_move(queue, offset)

    def moved(self) -> None:
        """The batch is in the log."""
        self._reader.moved(self._offsets)
