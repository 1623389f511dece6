"""Bugs planted in what keeps a store cheap: how its workers end, what recovery leaves out, and many queues at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from crash import brokers, dumps, many_queues
from crash.judge import Verdict
from crash.planting import Ground, Mutant, many, patched
from messagestore.files.unsynced import WrittenFiles
from messagestore.inspect import records
from messagestore.log import dispatch
from pyspark_commits import STAYS


def stops_at_a_gap(_: Any) -> Any:
    """A deleted segment ends the command."""

    def raised(_view: Any, _position: int, error: FileNotFoundError, _tell: Any) -> int:
        raise error

    return raised


def tells_no_gap(_: Any) -> Any:
    """What retention deleted is skipped without a message."""

    def silent(view: Any, _position: int, _error: FileNotFoundError, _tell: Any) -> int:
        view.refresh()
        first: int = view.files.commit_log.min_offset
        return first

    return silent


def looks_at_open_files_only(_: Any) -> Any:
    """A written file that the pool has closed is not compared with its path."""

    def check(written: WrittenFiles, paths: Iterable[str] | None = None, *, often: bool = False) -> None:
        for path in list(written.files if paths is None else paths):
            if path in written.files and (path in written.held or written.pool.has_open(path)):  # type: ignore[union-attr]
                written.opened(path, often=often)

    return check


def forgets_what_waited(_: Any) -> Any:
    """Of the pieces that waited for one another, only the last one gets its units."""
    return lambda pieces: pieces[-1]


def batch_for_many_queues(ground: Ground) -> Iterator[Verdict]:
    """More queues than files may be open."""
    yield many_queues.one_batch(ground.folder, 700)


MUTANTS = (
    Mutant(
        "a piece of a batch does not wait for the next one",
        lambda: mock.patch.object(dispatch, "_LONG_RUN", 0),
        "errors: many queues",
        batch_for_many_queues,
    ),
    Mutant(
        "pieces of a batch that waited are left out of the queues",
        patched(dispatch, "together", forgets_what_waited),
        "errors: many queues",
        batch_for_many_queues,
    ),
    Mutant(
        "a queue's file that is closed is not compared with its path",
        patched(WrittenFiles, "check", looks_at_open_files_only),
        "errors: many queues",
        batch_for_many_queues,
    ),
    Mutant(
        "dump ends where retention took a segment",
        patched(records, "_behind_deleted", stops_at_a_gap),
        "concurrency: dumps",
        many(dumps.dumps),
    ),
    Mutant(
        "dump passes over a segment that retention took",
        patched(records, "_behind_deleted", tells_no_gap),
        "concurrency: dumps",
        many(dumps.dumps),
    ),
    Mutant(
        "a worker stays in the process group that Spark's daemon ends",
        lambda: mock.patch.dict(os.environ, {STAYS: "1"}),
        "concurrency: ends",
        many(brokers.daemon_ends),
    ),
)
