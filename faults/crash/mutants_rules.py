"""Mutants of the rules that decide which batches a store accepts: from whom, for which topics, and after which others.

Histories of a fake Spark (`spark_faults`) find them. In these histories the store is not mounted, an older backup is
restored, a second sink writes another topic, and a second query takes an app over.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from crash.judge import Verdict
from crash.planting import Ground, Mutant, Planted, Search, patched, without
from messagestore.batches import rules as batch_rules
from messagestore.format import batch_record
from messagestore.log.batch_journal import BatchJournal

_HISTORIES = 60


def histories(*kinds: str) -> Search:
    """Run histories with only these actions."""

    def search(ground: Ground) -> Iterator[Verdict]:
        from spark_faults.histories import History
        from spark_faults.processes import connect

        numbers = random.Random(ground.chance.random())
        with pytest.MonkeyPatch.context() as patches:
            connect(patches)
            for _ in range(_HISTORIES):
                verdict = Verdict()
                history = History(Path(tempfile.mkdtemp(dir=ground.folder)), numbers.getrandbits(48), Counter())
                history.kinds = kinds
                try:
                    history.run()
                except Exception as error:  # noqa: BLE001 - whatever it is, the history did not end as it must
                    verdict.misread.append(f"{type(error).__name__}: {error}")
                yield verdict

    return search


def in_sink(name: str, make: Callable[[Any], Any]) -> Planted:
    """Patch a method of the sink, which is imported when the bug is planted, because PySpark may not be installed."""

    def planted() -> AbstractContextManager[object]:
        from pyspark_messagestore.sink.writers import Sink

        return mock.patch.object(Sink, name, make(getattr(Sink, name)))

    return planted


@contextlib.contextmanager
def first_batches_unchecked() -> Iterator[None]:
    """A stream may begin with any batch, whether or not there is a store."""
    from pyspark_messagestore.sink.writers import Sink

    with mock.patch.object(Sink, "_check_first"), mock.patch.object(batch_rules, "_check_first"):
        yield


def made_when_planned(real: Any) -> Any:
    """The store is created before anybody knows which batch is to be written."""

    def plan(options: Any, mapping: Any, stores: Any) -> Any:
        from spark_faults.processes import current

        with current().store(options.path, options.config()).writing("making the store"):
            pass
        return real(options, mapping, stores)

    return plan


def as_the_users(real: Any) -> Any:
    """Spark's batch id in foreachBatch counts as a version of the user, which only has to increase."""

    def request(sink: Any, staged: Any, batch_id: int | None) -> Any:
        found = real(sink, staged, batch_id)
        return found if batch_id is not None else replace(found, version_source="user")

    return request


def without_replaces(real: Any) -> Any:
    """Only the process that wrote a takeover remembers it; it is not in the log."""
    return lambda batch, size=0: real(replace(batch, replaces=()), size)


@contextlib.contextmanager
def beginning_forgotten() -> Iterator[None]:
    """The end of the first micro-batch does not keep where it begins, so Spark's newest answer counts."""
    from pyspark_messagestore.source.offsets import StreamOffset

    with mock.patch.object(StreamOffset, "beginning", None):
        yield


@contextlib.contextmanager
def beginning_asked_for() -> Iterator[None]:
    """A first micro-batch that is planned fails if nobody can say any more where the query would begin."""
    from pyspark_messagestore.source.readers import StreamReader

    with mock.patch.object(StreamReader, "initialOffset", lambda reader: reader._begin().to_json()):
        yield


MUTANTS = (
    Mutant(
        "an error about where to begin stops a planned batch",
        beginning_asked_for,
        "spark: first batch again",
        histories("first_batch_again"),
    ),
    Mutant(
        "a stream forgets where its first batch begins",
        beginning_forgotten,
        "spark: first batch again",
        histories("first_batch_again"),
    ),
    Mutant(
        "destination topics are not compared",
        without(batch_rules, "_check_topics"),
        "spark: second topic",
        histories("second_topic"),
    ),
    Mutant("a stream may begin with any batch", first_batches_unchecked, "spark: unmounted", histories("unmounted")),
    Mutant(
        "a refused batch leaves a store behind",
        in_sink("plan", made_when_planned),
        "spark: unmounted",
        histories("unmounted"),
    ),
    Mutant(
        "a gap is accepted in foreachBatch",
        in_sink("_request", as_the_users),
        "spark: older backup",
        histories("older_backup"),
    ),
    Mutant(
        "a replaced query is let in again",
        without(BatchJournal, "replaced", frozenset()),
        "spark: taken over",
        histories("taken_over"),
    ),
    Mutant(
        "another query passes for the app's own",
        without(batch_rules, "_replaced_by", ()),
        "spark: taken over",
        histories("taken_over"),
    ),
    Mutant(
        "a takeover is not in the log",
        patched(batch_record, "body", without_replaces),
        "spark: taken over",
        histories("taken_over"),
    ),
)
