"""Spark sends batches again: which versions are known, refused or appended."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from crash.harness import APP, no_thread_warnings, payload
from crash.imitate import (
    commit,
)
from messagestore import (
    BatchConflictError,
    BatchRequest,
    LostBatchesError,
    MessageColumns,
    VersionRegressionError,
)
from sequences import Start, filled, reopened

pytestmark = no_thread_warnings


def test_a_replay_in_other_partitions_is_the_same_batch(root: Path) -> None:
    """The rows come in another order and in other chunks, and are routed to other queues."""
    bodies = [payload(APP, 0, row) for row in range(10)]

    def columns(part: list[bytes], queue_id: int) -> MessageColumns:
        table = pa.record_batch({"body": pa.array(part, pa.binary()), "keys": pa.array([b[:9].decode() for b in part])})
        return MessageColumns.from_arrow(table, topic="t", queue_id=queue_id)

    request = BatchRequest(app_id=APP, version=0, version_source="spark")
    with reopened(root) as store:
        assert store.append_batch([columns(bodies[:5], 0), columns(bodies[5:], 1)], request).status == "appended"
    with reopened(root) as store:
        other = bodies[::-1]
        parts = [columns(other[:2], 2), columns(other[2:3], 0), columns(other[3:], 1)]
        assert store.append_batch(parts, request).status == "known"


def test_a_replay_of_an_old_version_is_compared_and_not_skipped(root: Path, process: Start) -> None:
    """The checkpoint was restored several batches back. Each old version has a digest of its own, also after the
    journal is lost.
    """
    filled(root, process, versions=11)
    p = process(root)
    assert p.batch(version=8).status == "known"
    with pytest.raises(BatchConflictError):
        p.batch(version=8, rows=6)
    (root / "spark" / "journal").unlink()
    p.detach()
    q = process(root)
    assert q.batch(version=7).status == "known"
    with pytest.raises(BatchConflictError):
        q.batch(version=7, rows=4)


def test_gaps_between_versions_of_the_user_are_no_loss(root: Path) -> None:
    """A `foreachBatch` that skips empty batches, or takes the day as its version, leaves gaps. Gaps in Spark's own
    versions are a loss.
    """
    with reopened(root) as store:
        for version in (10, 20, 30):
            assert commit(store.writer, "days", version, version_source="user").status == "appended"
        with pytest.raises(VersionRegressionError):
            commit(store.writer, "days", 15, version_source="user")
        with pytest.raises(LostBatchesError):
            commit(store.writer, "spark", 5, on_lost_batches="continue")  # an app that was never here
        assert commit(store.writer, "spark", 0).status == "appended"
        with pytest.raises(LostBatchesError):
            commit(store.writer, "spark", 7)
        assert commit(store.writer, "spark", 7, on_lost_batches="continue").status == "appended"


def test_an_unknown_version_below_the_last_is_not_appended_behind_it(root: Path, process: Start) -> None:
    """A version is known, or it is unknown and not above the last, or it is above the last plus one: the rules hold in
    this order.
    """
    p = process(root)
    for version in range(6):
        p.batch(version=version)
    p.batch(version=8, on_lost_batches="continue")
    p.batch(version=9)
    for version in (6, 7):
        with pytest.raises(VersionRegressionError):
            p.batch(version=version)
        assert p.batch(version=version, on_version_regression="skip").status == "skipped"
    assert p.batch(version=3).status == "known"
    assert p.batch(version=9).status == "known"
    assert p.batch(version=10, rows=0).status == "appended"
    assert p.batch(version=10, rows=0).status == "known"
    with pytest.raises(LostBatchesError):
        p.batch(version=12)
