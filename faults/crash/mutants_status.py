"""Mutants of what `messagestore status` shows an operator about a store whose writer has ended."""

from __future__ import annotations

from typing import Any

from crash.planting import Mutant, kills, patched
from messagestore.files.state import State
from messagestore.writer.log_writer import LogWriter


def nothing_is_ever_in_flight(_: Any) -> Any:
    """A store is idle whatever `state` says."""
    return property(lambda state: True)


def begins_in_silence(_: Any) -> Any:
    """`abort` is created, but `state` does not record from where on bytes may be unfinished."""
    return lambda writer, _physical_offset, _flush_disk_type: writer.ensure_abort()


MUTANTS = (
    Mutant(
        "status says idle while a batch is in flight",
        patched(State, "nothing_in_flight", nothing_is_ever_in_flight),
        "kills",
        kills("Spark commits"),
    ),
    Mutant(
        "an append begins without a word in state",
        patched(LogWriter, "begin", begins_in_silence),
        "kills",
        kills("Spark commits"),
    ),
)
