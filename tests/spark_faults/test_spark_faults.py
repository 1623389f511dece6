"""Histories of a fake Spark; the harness is tried on a sink that is wrong. All cells on a real Spark: `make crash`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from messagestore import VersionRegressionError
from messagestore.batches import append as transaction
from messagestore.batches import rules as batch_rules
from messagestore.log.batch_journal import BatchJournal
from pyspark_messagestore.sink import writers as sink
from spark_faults import runner
from spark_faults.histories import History
from spark_faults.processes import connect

COUNT = 10


def test_random_histories() -> None:
    """Whatever is killed and when: each row once, in order per queue, and no error but the right one."""
    tally = runner.histories(COUNT, seed=8)
    assert tally["histories"] == COUNT
    seen = {name.partition(" at ")[0] for name in tally}
    assert {"killed", "driver killed", "a commit sleeps", "commits", "refused with BatchConflictError"} <= seen


def test_a_history_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that a failure prints does the same again."""
    connect(monkeypatch)
    stories = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        history = History(tmp_path / name, 4_711, Counter())
        history.run()
        stories.append([line for line in history.story if str(tmp_path) not in line])
    assert stories[0] == stories[1]


def forgets_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal knows no batch: a replay is written a second time."""
    monkeypatch.setattr(BatchJournal, "find", lambda *_: None)
    monkeypatch.setattr(BatchJournal, "last", lambda *_: None)


def knows_by_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known version is skipped, whatever its rows: as other sinks do."""
    monkeypatch.setattr(
        batch_rules,
        "_known",
        lambda _, entry, *__: batch_rules.BatchResult(
            batch_rules.KNOWN, entry.physical_offset, entry.end, entry.row_count
        ),
    )


def loses_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last task's file is left out."""
    checked = sink.Sink._checked
    monkeypatch.setattr(
        sink.Sink, "_checked", lambda *given: checked(*given)[:1] if len(given[1]) > 1 else checked(*given)
    )


def forgets_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files come in any order."""
    checked = sink.Sink._checked
    monkeypatch.setattr(sink.Sink, "_checked", lambda *given: checked(*given)[::-1])


def takes_a_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version is appended."""
    check = transaction._check_journal

    def lenient(*given: object) -> object:
        try:
            return check(*given)  # type: ignore[arg-type]
        except VersionRegressionError:
            return batch_rules.Decision()

    monkeypatch.setattr(transaction, "_check_journal", lenient)


@pytest.mark.parametrize(
    "planted", [forgets_batches, knows_by_number_alone, loses_a_message, forgets_the_order, takes_a_regression]
)
def test_a_planted_bug_is_found(planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The histories are not blind; what is found is told with the actions that it takes."""
    planted(monkeypatch)
    command = r"again: PYTHONPATH=faults:tests .venv/bin/python -m spark_faults --only \d+ --actions (\d(,\d)*)?\n"
    with pytest.raises(AssertionError, match=command):
        runner.histories(60, seed=1)
