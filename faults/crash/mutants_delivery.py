"""Bugs planted where delayed messages are delivered."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from crash import deliveries
from crash.judge import Verdict
from crash.planting import Ground, Mutant, patched, without
from messagestore import ASYNC_FLUSH
from messagestore.broker import delivery
from messagestore.broker.delivery import Delivery
from messagestore.writer.store_clock import StoreClock

_CASES, _HISTORIES = 600, 120


def killed_deliveries(ground: Ground) -> Iterator[Verdict]:
    """Every few operations of all stories."""
    found = deliveries.cases(ground.folder / "deliveries", ground.chance.randrange(1000), (0, 5))
    return (verdict for _, verdict, _ in itertools.islice(found, _CASES))


def numbers_that_go_back(ground: Ground) -> Iterator[Verdict]:
    """Histories in which the numbers of the delayed messages' queues go back."""
    found = deliveries.histories(ground.folder / "backwards", ground.chance.randrange(1000), (0, 1))
    return (verdict for _, verdict, _ in itertools.islice(found, _HISTORIES))


def _as_stored(real: Any) -> Any:
    """Store times alone say when a message is due."""
    return lambda self, units, codes, now_ms: codes


def _first_level(real: Any) -> Any:
    """A deliverer takes over the progress of one level, as one that knows no other level might."""

    def progress(self: Delivery) -> Any:
        return {level: offset for level, offset in real(self).items() if level == 1}

    return progress


def _old_progress(real: Any) -> Any:
    """The BATCH record of a delivery holds the progress before it."""

    def append(self: Delivery, chunks: Any, after: dict[int, int]) -> Any:
        return real(self, chunks, self._progress())

    return append


def _file_first(real: Any) -> Any:
    """`delayOffset.json` is written before the delivery is in the log."""

    def append(self: Delivery, chunks: Any, after: dict[int, int]) -> Any:
        self._file.save(after)
        return real(self, chunks, after)

    return append


def _log_only(real: Any) -> Any:
    """What a broker has delivered since does not count."""

    def progress(self: Delivery) -> Any:
        self._of_broker = {}
        return real(self)

    return progress


MUTANTS = (
    Mutant("a delivery holds the progress before it", patched(Delivery, "_append", _old_progress), "killed deliveries", killed_deliveries),
    Mutant("delayOffset.json runs ahead of the log", patched(Delivery, "_append", _file_first), "killed deliveries", killed_deliveries),
    Mutant("a broker's deliveries do not count", patched(Delivery, "_progress", _log_only), "a broker in between", killed_deliveries),
    Mutant("recovery leaves delayOffset.json behind the log", without(Delivery, "follow"), "a broker in between", killed_deliveries),
    Mutant("a deliverer forgets levels that it does not know", patched(Delivery, "_progress", _first_level), "numbers that go back", numbers_that_go_back),
    Mutant("delayed messages wait for a clock that was set back", patched(Delivery, "_since_put", _as_stored), "numbers that go back", numbers_that_go_back),
    Mutant("the next process does not know when records were put", without(StoreClock, "save"), "numbers that go back", numbers_that_go_back),
    Mutant("a delivery is not synced before delayOffset.json", lambda: mock.patch.object(delivery, "OwnRequest", functools.partial(delivery.OwnRequest, flush_disk_type=ASYNC_FLUSH)), "power cuts", killed_deliveries),
)  # fmt: skip
