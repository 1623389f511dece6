"""A batch that comes again: its own rows are known, other rows are refused, however much they look alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crash.digests import HOST, LOOKALIKES, after_changes, append_as_earlier, columns_of, request
from messagestore import BatchConflictError, BatchRequest, CorruptionError, MessageColumns, MessageStore
from messagestore.format.config import StoreConfig
from messagestore.format.layout import DIGEST_NAME, EARLIER_DIGEST_NAME
from messagestore.format.record_columns import Rows, encode
from messagestore.log.batch_search import read_batch
from messagestore.verify.verify import verify
from messagestore.write import batch_plan, staging
from messagestore.write.staging import StagedChunks, StagedFile, StagingWriter
from messagestore.write.transaction import APPENDED, KNOWN, SKIPPED, Chunks, append_batch
from small import SMALL, bodies, columns, read_all

BOTH = (DIGEST_NAME, EARLIER_DIGEST_NAME)


def chunk(rows: MessageColumns, *digests: str) -> Rows:
    return encode(rows, limits=StoreConfig(), store_host=HOST, born_host=HOST, digests=digests)


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


def test_a_batch_record_names_its_digest(store: MessageStore) -> None:
    found = store.append_batch(columns_of([{}]), request(0))
    batch = read_batch(store.writer.log, found.physical_offset)
    assert batch is not None and batch.digest_name == DIGEST_NAME
    append_as_earlier(store, columns_of([{}]), request(1))
    entry = store.writer.journal.find("app", 1)
    batch = read_batch(store.writer.log, entry.physical_offset)
    assert batch is not None and (batch.digest_name, batch.digest) == (EARLIER_DIGEST_NAME, entry.digest)


def test_the_record_says_more_than_a_journal_that_an_earlier_release_wrote(store: MessageStore) -> None:
    """It took this release's digest for its own. While the record is there, it says which digest it has."""
    rows = columns_of([{"body": b"1"}, {"body": b"2"}])
    store.append_batch(rows, request(0))
    entry = store.writer.journal.find("app", 0)
    store.writer.journal.remember("app", replace(entry, digest_name=EARLIER_DIGEST_NAME))
    assert store.append_batch(rows, request(0)).status == KNOWN


def test_a_batch_of_an_earlier_release_that_retention_restated(tmp_path: Path) -> None:
    """The record that repeats it has its digest and the name of that, so the batch is known without the journal, too."""
    root, rows = tmp_path / "store", columns(bodies(30))
    with MessageStore.open(root, SMALL) as store:
        append_as_earlier(store, rows, request(0))
        for version in range(12):
            store.append_batch(columns(bodies(60)), BatchRequest(app_id="other", version=version))
        assert ("app", 0) in store.delete_expired_files(before_ms=1 << 62, at_once=True).restated
        assert store.append_batch(rows, request(0)).status == KNOWN
    (root / "spark" / "journal").unlink()
    with MessageStore.open(root, SMALL) as store:
        entry = store.writer.journal.find("app", 0)
        assert entry is not None and entry.digest_name == EARLIER_DIGEST_NAME
        assert store.append_batch(rows, request(0)).status == KNOWN
        with pytest.raises(BatchConflictError, match="came again with 30 rows"):
            store.append_batch(columns(bodies(30, start=1)), request(0))


def test_a_replay_without_rows(store: MessageStore) -> None:
    """No rows have the digest 0, whichever it is."""
    assert store.append_batch([], request(0)).status == APPENDED
    assert append_batch(store.writer, Chunks([chunk(columns(bodies(0)), *BOTH)]), request(0)).status == KNOWN
    assert store.append_batch([], request(0)).status == KNOWN
    with pytest.raises(BatchConflictError, match="with 0 rows"):
        store.append_batch(columns_of([{}]), request(0))


# ---- digests of other releases


def of_a_newer_release(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> MessageColumns:
    """Version 0 in the store, with a digest that this release does not know."""
    rows = columns(bodies(6))
    with monkeypatch.context() as patch:
        patch.setattr(batch_plan, "_DIGESTS", ("rowsum-9",))
        append_batch(store.writer, Chunks([replace(chunk(rows), digests={"rowsum-9": 7})]), request(0))
    return rows


def test_a_digest_of_a_newer_release_is_refused_by_name(
    store: MessageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can tell whether the rows are the same: nothing is written, and nothing that is there is lost."""
    rows = of_a_newer_release(store, monkeypatch)
    end = store.writer.end.physical_offset
    for again in (rows, columns(bodies(6, start=50))):
        with pytest.raises(BatchConflictError, match=r"with the digest rowsum-9, .* Use one release, the newest"):
            store.append_batch(again, request(0))
    with pytest.raises(BatchConflictError, match=r"is in the store with 6 rows .* came again with 5 rows"):
        store.append_batch(rows.slice(0, 5), request(0))
    assert store.append_batch(rows, replace(request(0), on_replay_mismatch="skip")).status == SKIPPED
    assert store.writer.end.physical_offset == end
    assert store.append_batch(columns(bodies(4, start=6)), request(1)).status == APPENDED
    store.close()
    with MessageStore.open(tmp_path / "store", SMALL) as again:
        with pytest.raises(BatchConflictError, match="rowsum-9"):
            again.append_batch(rows, request(0))
        assert again.append_batch(columns(bodies(4, start=6)), request(1)).status == KNOWN
        assert sorted(read_all(again) + read_all(again, queue_id=1)) == bodies(10)
    assert verify(tmp_path / "store", SMALL).findings == []


def test_a_replay_without_the_digest_that_is_needed(store: MessageStore) -> None:
    """Tasks of an earlier release send a batch of this one again, or the other way round."""
    rows = columns_of([{"body": b"1"}])
    append_as_earlier(store, rows, request(0))
    store.append_batch(rows, request(1))
    for version, digest in ((0, DIGEST_NAME), (1, EARLIER_DIGEST_NAME)):
        with pytest.raises(BatchConflictError, match=f"as many rows and the digest {digest}, .* another release"):
            append_batch(store.writer, Chunks([chunk(rows, digest)]), request(version))


def test_chunks_without_a_common_digest_are_refused(store: MessageStore) -> None:
    rows = columns(bodies(4))
    chunks = Chunks([chunk(rows, DIGEST_NAME), chunk(rows, EARLIER_DIGEST_NAME)])
    end = store.writer.end.physical_offset
    with pytest.raises(CorruptionError, match=r"rows that all have the digest.*rowsum-1; rowsum-2"):
        append_batch(store.writer, chunks, request(0))
    assert store.writer.end.physical_offset == end
    chunks[1] = chunk(rows, *BOTH)
    assert append_batch(store.writer, chunks, request(0)).status == APPENDED


# ---- staging files


def staged(folder: Path, *chunks: Rows) -> StagedFile:
    with StagingWriter(str(folder)) as writer:
        for one in chunks:
            writer.write(one)
        return writer.finish()


@pytest.mark.parametrize("kept", [True, False])
def test_staging_files_of_both_names(kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one digest or with two, read whole or in blocks."""
    if not kept:
        monkeypatch.setattr(staging, "_KEPT_SIZE", 0)
    rows = columns(bodies(30))
    written = [chunk(rows, *names) for names in (BOTH, (DIGEST_NAME,), BOTH)]
    chunks = StagedChunks([staged(tmp_path, *written[:2]), staged(tmp_path, written[2])])
    for index, one in enumerate(written):
        found = chunks.read(index, with_data=False)
        assert found.digests == one.digests and len(one.digests) == (1 if index == 1 else 2)
        assert np.array_equal(found.starts, one.starts)


def test_a_staging_file_of_a_newer_release_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(staging, "FORMAT", "messagestore-staging-9")
        file = staged(tmp_path, chunk(columns(bodies(4)), DIGEST_NAME))
    with pytest.raises(CorruptionError, match=r"messagestore-staging-9.*Use one release on the driver"):
        StagedChunks([file])


def test_rows_with_a_digest_of_a_newer_release_are_refused_by_name(store: MessageStore, tmp_path: Path) -> None:
    """Its tasks staged the rows: this release cannot say of a replay whether it has the same ones."""
    file = staged(tmp_path, replace(chunk(columns(bodies(4))), digests={"rowsum-9": 7}))
    end = store.writer.end
    with pytest.raises(CorruptionError, match=r"the digest rowsum-2 or rowsum-1.*rowsum-9"):
        append_batch(store.writer, StagedChunks([file]), request(0))
    assert store.writer.end == end
    store.append_batch(columns(bodies(4)), request(0))
    with pytest.raises(BatchConflictError, match="as many rows and the digest rowsum-9"):
        append_batch(store.writer, StagedChunks([file]), request(0))
