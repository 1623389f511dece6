"""Bugs planted where the ends of queues are sealed and compared."""

from __future__ import annotations

from typing import Any
from unittest import mock

from crash import replays
from crash.mutants_identity import replayed
from crash.planting import Mutant, patched, without
from messagestore.log import dispatch
from messagestore.log.sealed_ends import SealedEnds
from messagestore.read import sight
from messagestore.writer import queue_numbers
from messagestore.writer.queue_numbers import QueueNumbers

__all__ = ["MUTANTS", "replays"]


def quick_looks(real: Any) -> Any:
    """`recover` checks only the last units."""

    def fault_of(files: Any, ends: Any, key: Any, *, thorough: bool = False) -> Any:
        return real(files, ends, key)

    return fault_of


def from_the_file(numbers: QueueNumbers, key: tuple[str, int]) -> None:
    """The writer trusts the queue's file."""
    files = numbers._files
    numbers.sealed_ends().ask(key, files.queue(*key).end())


MUTANTS: tuple[Mutant, ...] = (
    Mutant("a writer does not compare a queue with its seal", lambda: mock.patch.object(QueueNumbers, "_check_sound", from_the_file), "replays", replayed("zeros from here on")),
    Mutant("a reader does not compare a queue with its seal", without(sight, "fault_of"), "replays", replayed("unit of zeros", "zeros from here on")),
    Mutant("a reader of a closed store lists the folders that are there", without(sight.Sealed, "other_queues", []), "replays", replayed("folder missing")),
    Mutant("the ends of queues are not written", without(SealedEnds, "write"), "replays", replayed("zeros from here on", ":older", anew=True)),
    Mutant("recover looks at the last unit of each queue only", patched(queue_numbers, "fault_of", quick_looks), "replays", replayed(":bit")),
    Mutant("a damaged queue is made again on top of its files", without(dispatch, "remove_files"), "replays", replayed("closed:consumequeue"), case=84),
)  # fmt: skip
