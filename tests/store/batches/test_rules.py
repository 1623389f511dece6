"""Which batches a store accepts: lost stores, second sinks, second queries, takeovers, and where an app goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from messagestore import (
    BatchConflictError,
    BatchRequest,
    BatchResult,
    ConfigError,
    LostBatchesError,
    MessageStore,
    QueryConflictError,
    VersionRegressionError,
)
from messagestore.inspect.verify import verify
from messagestore.log.batch_search import read_batch
from messagestore.log.store_files import Paths
from small import SMALL, bodies, columns, read_all


def append(store: MessageStore, version: int, query: str | None = "q1", topic: str = "t", **options: object) -> str:
    """Four rows as one batch of app `app`; what became of it."""
    given = {"version_source": "spark", "rows": bodies(4, start=10 * version), **options}
    rows = columns(given.pop("rows"), topic=topic)  # type: ignore[arg-type]
    return store.append_batch(rows, BatchRequest("app", version, query_id=query, **given)).status  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "s"


# ---- the store is gone, or is older than the checkpoint


@pytest.mark.parametrize("lost", ["fail", "continue"])
@pytest.mark.parametrize("version", [1, 2, 7])
def test_a_stream_that_goes_on_in_an_empty_store(root: Path, version: int, lost: str) -> None:
    """The disk is not mounted, or the folder was deleted: nothing is written, with onLostBatches=continue, too."""
    with MessageStore.open(root, SMALL) as store:
        with pytest.raises(LostBatchesError) as caught:
            append(store, version, on_lost_batches=lost)
        assert store.writer.end.physical_offset == 0
        text = str(caught.value)
        assert f"app 'app': found version {version} (query q1) in store {store.store_id}" in text
    assert f"`messagestore batches start {root} app {version}`" in text
    assert (caught.value.app_id, caught.value.version) == ("app", version)


def test_versions_of_the_user_begin_anywhere(root: Path) -> None:
    """They only have to grow. In a stream that has had batches before they are refused, too: the store may be gone."""
    with MessageStore.open(root, SMALL) as store:
        assert append(store, 20260101, None, version_source="user") == "appended"
        rows = columns(bodies(4))
        first = BatchRequest("late", 3, query_id="q1", stream_batch_id=0)
        assert store.append_batch(rows, first).status == "appended"
        with pytest.raises(LostBatchesError, match="app 'later': found version 3"):
            store.append_batch(rows, BatchRequest("later", 3, query_id="q1", stream_batch_id=3))


def test_an_older_backup_is_restored_under_a_stream(root: Path, tmp_path: Path) -> None:
    """The batches between the backup and the checkpoint are named; once they are written again the stream goes on."""
    with MessageStore.open(root, SMALL) as store:
        append(store, 0)
    shutil.copytree(root, tmp_path / "backup")
    with MessageStore.open(root, SMALL) as store:
        append(store, 1)
        append(store, 2)
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "backup", root)
    with MessageStore.open(root, SMALL) as store:
        with pytest.raises(
            LostBatchesError,
            match=r"found version 3, but the last one in the store is 0 \(query q1\): "
            "versions 1 to 2 are not in the store",
        ):
            append(store, 3)
        with pytest.raises(LostBatchesError, match="version 1 is not in the store"):
            append(store, 2)
        for version in (1, 2, 3):
            assert append(store, version) == "appended"


# ---- messagestore batches start


def test_an_app_is_told_where_to_begin(root: Path) -> None:
    """Once, durably; the version after it is the only one that is accepted, and those before it are refused."""
    with MessageStore.open(root, SMALL) as store:
        assert store.start_batches("app", 7).status == "appended"
        assert store.start_batches("app", 7).status == "known"
    with MessageStore.open(root, SMALL) as store:
        assert store.start_batches("app", 7).status == "known"
        for version in (0, 6):
            with pytest.raises(VersionRegressionError, match="allowed is version 7"):
                append(store, version)
        with pytest.raises(LostBatchesError, match="version 7 is not in the store"):
            append(store, 8)
        assert append(store, 7) == "appended"
        assert append(store, 7) == "known"
        assert append(store, 8) == "appended"
        assert len(read_all(store)) == 4
    assert verify(root).ok


def test_a_start_is_in_the_log(root: Path) -> None:
    """With journal and index of batches gone it still holds."""
    with MessageStore.open(root, SMALL) as store:
        result = store.start_batches("app", 7)
        batch = read_batch(store.writer.log, result.physical_offset)
        assert batch is not None
        assert (batch.version, batch.start, batch.row_count, batch.end) == (6, True, 0, result.end)
    Path(Paths(root).journal).unlink()
    with MessageStore.open(root, SMALL) as store:
        with pytest.raises(VersionRegressionError):
            append(store, 6)
        assert append(store, 7) == "appended"


def test_a_start_passes_over_a_gap_once(root: Path) -> None:
    """An app with batches goes on at a later version; the next gap is an error again. Below its last: refused."""
    with MessageStore.open(root, SMALL) as store:
        append(store, 0)
        store.start_batches("app", 5)
        assert append(store, 5) == "appended"
        with pytest.raises(LostBatchesError):
            append(store, 7)
        with pytest.raises(
            VersionRegressionError, match="found start version 5, but the store has its batches up to version 5"
        ):
            store.start_batches("app", 5)
        with pytest.raises(QueryConflictError):
            append(store, 6, "q2")
    with MessageStore.open(root, SMALL) as store, pytest.raises(ConfigError, match="start version: found 0"):
        store.start_batches("other", 0)


# ---- two sinks under one app id


def test_the_same_rows_for_a_second_topic(root: Path) -> None:
    """They were dropped as already known: 530 orders, and none in the second topic."""
    with MessageStore.open(root, SMALL) as store:
        append(store, 0, topic="orders")
        for mismatch in ("fail", "skip"):
            with pytest.raises(
                BatchConflictError, match="rows for topic orders, and came again with rows for topic audit"
            ):
                append(store, 0, topic="audit", on_replay_mismatch=mismatch)
        assert append(store, 0, topic="orders") == "known"
        assert "audit" not in store.topics()


def test_a_replay_of_several_topics(root: Path) -> None:
    """With a topic column the set of topics counts, in any order."""
    with MessageStore.open(root, SMALL) as store:
        parts = [columns(bodies(2), topic="a"), columns(bodies(2, start=2), topic="b")]
        request = BatchRequest("app", 0, "spark", "q1")
        assert store.append_batch(parts, request).status == "appended"
        assert store.append_batch(parts[::-1], request).status == "known"
        with pytest.raises(BatchConflictError, match="rows for topics a, b, and came again with rows for topic a"):
            store.append_batch([columns(bodies(4), topic="a")], request)


def test_the_topics_of_a_batch_that_retention_took(root: Path) -> None:
    """Its BATCH record cannot be read any more; the journal remembers where its rows went."""
    with MessageStore.open(root, SMALL) as store:
        for version in range(40):
            append(store, version)
    segments = sorted((root / "commitlog").iterdir())
    assert len(segments) > 2
    segments[0].unlink()
    with MessageStore.open(root, SMALL) as store:
        assert append(store, 0) == "known"
        with pytest.raises(BatchConflictError, match="rows for topic t, and came again with rows for topic audit"):
            append(store, 0, topic="audit")


# ---- two queries under one app id


def test_a_second_query_with_equal_rows(root: Path) -> None:
    """A new checkpoint under a known app id was dropped as already known."""
    with MessageStore.open(root, SMALL) as store:
        append(store, 0)
        append(store, 1)
        for version in (0, 1, 2):
            with pytest.raises(QueryConflictError, match=r"of query q2, but the batches .* are of query q1"):
                append(store, version, "q2")
        assert append(store, 2) == "appended"


def taken_over(root: Path) -> None:
    """An app of query q1, which q2 takes over."""
    with MessageStore.open(root, SMALL) as store:
        for version in range(3):
            append(store, version)
        for status in ("appended", "known"):
            assert append(store, 0, "q2", rows=bodies(4, start=50), on_new_query="continue") == status
        assert append(store, 1, "q2") == "appended"


def check_taken_over(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        for option in ("fail", "continue"):
            for version in (0, 2, 3):
                with pytest.raises(QueryConflictError, match="query q1, which query q2 has replaced"):
                    append(store, version, on_new_query=option)
        assert append(store, 1, "q2") == "known"
        assert append(store, 2, "q2") == "appended"
        assert append(store, 0, "q3", on_new_query="continue") == "appended"
        for query in ("q1", "q2"):
            with pytest.raises(QueryConflictError, match="has replaced"):
                append(store, 3, query, on_new_query="continue")
    assert verify(root).ok


def test_a_takeover_is_for_good(root: Path) -> None:
    """The new query counts from 0; the one it replaced is refused, whatever it says, and after a restart, too."""
    taken_over(root)
    check_taken_over(root)


def test_a_takeover_without_the_journal(root: Path) -> None:
    """It is in the log: a journal that is lost, or older than it, changes nothing."""
    taken_over(root)
    Path(Paths(root).journal).unlink()
    check_taken_over(root)


def test_a_takeover_and_an_older_journal(root: Path, tmp_path: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        append(store, 0)
    journal = Path(Paths(root).journal).read_bytes()
    with MessageStore.open(root, SMALL) as store:
        append(store, 1)
        append(store, 2)
        append(store, 0, "q2", rows=bodies(4, start=50), on_new_query="continue")
        append(store, 1, "q2")
    Path(Paths(root).journal).write_bytes(journal)
    check_taken_over(root)


def test_a_takeover_that_begins_in_the_middle(root: Path) -> None:
    """A query that has written elsewhere before: its first batches are not here."""
    with MessageStore.open(root, SMALL) as store:
        append(store, 0)
        with pytest.raises(LostBatchesError, match="query q2 begins with version 5; allowed is version 0"):
            append(store, 5, "q2", on_new_query="continue")
        assert append(store, 1) == "appended"


def test_the_batch_record_names_who_was_replaced(root: Path) -> None:
    """Only then: other records have the bytes they always had."""
    with MessageStore.open(root, SMALL) as store:
        append(store, 0)
        rows = columns(bodies(4))
        results: list[BatchResult] = []
        for version in (0, 1):
            request = BatchRequest("app", version, "spark", "q2", on_new_query="continue")
            results.append(store.append_batch(rows, request))
        texts = [store.look_message_by_offset(result.physical_offset).body for result in results]
        assert [b"replaces" in text for text in texts] == [True, False]
        assert b'"start"' not in texts[0] + texts[1]
        batch = read_batch(store.writer.log, results[0].physical_offset)
        assert batch is not None
        assert batch.replaces == ("q1",)


def test_a_query_that_is_not_known_goes_on_at_the_end(root: Path) -> None:
    """foreachBatch on Connect has no query id: a checkpoint may move there and back, but only with its last version."""
    with MessageStore.open(root, SMALL) as store:
        for version in (0, 1):
            append(store, version)
        assert append(store, 1, None) == "known"
        assert append(store, 2, None) == "appended"
        assert append(store, 2, None) == "known"
        assert append(store, 2) == "known"
        assert append(store, 3) == "appended"
        for version, query in ((1, None), (2, "q1")):
            with pytest.raises(QueryConflictError, match="cannot tell whether this is a replay or another query"):
                append(store, version, query)
        assert append(store, 2, None) == "known"
        with pytest.raises(QueryConflictError):
            append(store, 4, "q2")


def test_a_query_takes_up_batches_without_a_query(root: Path) -> None:
    """What Connect's foreachBatch began, a classic query goes on with; then it is that query's."""
    with MessageStore.open(root, SMALL) as store:
        append(store, 0, None)
        append(store, 1, None)
        assert append(store, 0, None) == "known"
        with pytest.raises(QueryConflictError):
            append(store, 0, "q1")
        assert append(store, 2, "q1") == "appended"
        with pytest.raises(QueryConflictError, match="are of query q1"):
            append(store, 3, "q2")


def test_a_takeover_leaves_other_apps_alone(root: Path) -> None:
    """A takeover of one app leaves the others alone."""
    with MessageStore.open(root, SMALL) as store:
        append(store, 0)
        for app in ("other", "app2"):
            rows = columns(bodies(4))
            assert store.append_batch(rows, BatchRequest(app, 0, "spark", "q1")).status == "appended"
        append(store, 0, "q2", rows=bodies(4, start=50), on_new_query="continue")
        for app in ("other", "app2"):
            assert store.append_batch(columns(bodies(4)), BatchRequest(app, 0, "spark", "q1")).status == "known"
            assert store.append_batch(columns(bodies(4)), BatchRequest(app, 1, "spark", "q1")).status == "appended"


def test_a_version_without_an_app_is_refused() -> None:
    """It looks like exactly-once, and a batch that came again would be appended again."""
    with pytest.raises(ConfigError, match=r"version: found 1 without app_id.*Give the app"):
        BatchRequest(version=1)
    assert BatchRequest().version == 0
