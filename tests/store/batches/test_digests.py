"""A batch that comes again: its own rows are known, other rows are refused, however much they look alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from crash.digests import HOST, LOOKALIKES, after_changes, columns_of, request
from messagestore import BatchConflictError, BatchRequest, CorruptionError, MessageColumns, MessageStore
from messagestore.batches import staging
from messagestore.batches.append import APPENDED, KNOWN, SKIPPED, Chunks, append_batch
from messagestore.batches.staging import StagedChunks, StagedFile, StagingWriter
from messagestore.format.config import StoreConfig
from messagestore.format.record_columns import Rows, encode
from small import SMALL, bodies, columns


def chunk(rows: MessageColumns) -> Rows:
    return encode(rows, limits=StoreConfig(), store_host=HOST, born_host=HOST)


@pytest.fixture
def store(tmp_path: Path) -> MessageStore:
    with MessageStore.open(tmp_path / "store", SMALL.replace(max_message_size=1 << 20)) as found:
        yield found


@pytest.mark.parametrize("name", LOOKALIKES)
def test_rows_that_look_alike_are_refused(name: str, store: MessageStore) -> None:
    """Tags Aa and BB, bodies of one CRC, rows that swapped their queues; each batch itself is known in any order."""
    rows, others = map(columns_of, LOOKALIKES[name])
    for first, second in ((rows, others), (others, rows)):
        app = BatchRequest(app_id=f"app-{first is rows}", version=0)
        assert store.append_batch(first, app).status == APPENDED
        parts = [first.slice(row, 1) for row in reversed(range(first.row_count))]
        assert store.append_batch(parts, app).status == KNOWN
        with pytest.raises(BatchConflictError, match=f"came again with {second.row_count} rows"):
            store.append_batch(second, app)
        assert store.append_batch(second, replace(app, on_replay_mismatch="skip")).status == SKIPPED


def test_a_batch_is_known_under_other_settings(tmp_path: Path) -> None:
    """What the store stamps is not the user's, and who may write now does not matter to a batch that is there."""
    verdict = after_changes(tmp_path)
    assert verdict.ok, verdict


def test_a_replay_without_rows(store: MessageStore) -> None:
    """No rows have the digest 0."""
    assert store.append_batch([], request(0)).status == APPENDED
    assert append_batch(store.writer, Chunks([chunk(columns(bodies(0)))]), request(0)).status == KNOWN
    assert store.append_batch([], request(0)).status == KNOWN
    with pytest.raises(BatchConflictError, match="with 0 rows"):
        store.append_batch(columns_of([{}]), request(0))


def staged(folder: Path, *chunks: Rows) -> StagedFile:
    with StagingWriter(str(folder)) as writer:
        for one in chunks:
            writer.write(one)
        return writer.finish()


def test_a_staging_file_of_a_newer_release_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(staging, "FORMAT", "messagestore-staging-9")
        file = staged(tmp_path, chunk(columns(bodies(4))))
    with pytest.raises(CorruptionError, match=r"messagestore-staging-9.*Use one release on the driver"):
        StagedChunks(str(tmp_path), [file]).open()
