"""Bugs planted where writers that stay attached learn what others wrote."""

from __future__ import annotations

from typing import Any

from crash import concurrency
from crash.planting import Mutant, many, patched, without
from messagestore.log.log_end import LogEnd
from messagestore.writer.clean_end import CleanEnd
from messagestore.writer.log_writer import LogWriter


def knows_its_own_queues(real: Any) -> Any:
    def write(clean: CleanEnd, end: LogEnd) -> None:
        clean._files.others_named = False
        real(clean, end)

    return write


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the last writer to close forgets the queues of the others",
        patched(CleanEnd, "_write_journal", knows_its_own_queues),
        "turns",
        many(concurrency.turns),
    ),
    Mutant(
        "a writer that has given the lock back writes on",
        without(LogWriter, "give_turn"),
        "turns",
        many(concurrency.turns),
    ),
)
