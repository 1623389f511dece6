"""Bugs planted in what keeps a store cheap: how its workers end, and what recovery leaves out."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from crash import brokers, dumps
from crash.planting import Mutant, many, patched
from messagestore.spi import local_operator
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


MUTANTS = (
    Mutant(
        "dump ends where retention took a segment",
        patched(local_operator, "_behind_deleted", stops_at_a_gap),
        "concurrency: dumps",
        many(dumps.dumps),
    ),
    Mutant(
        "dump passes over a segment that retention took",
        patched(local_operator, "_behind_deleted", tells_no_gap),
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
