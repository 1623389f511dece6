"""Bugs planted where writers that stay attached take in what others wrote."""

from __future__ import annotations

from typing import Any

from crash import concurrency
from crash.planting import Mutant, many, patched, without
from messagestore.write.log_writer import LogEnd, LogWriter


def knows_its_own_queues(real: Any) -> Any:
    def write(writer: LogWriter, end: LogEnd) -> None:
        writer.files.others_named = False
        real(writer, end)

    return write


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the last writer to close forgets the queues of the others",
        patched(LogWriter, "_write_journal", knows_its_own_queues),
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
