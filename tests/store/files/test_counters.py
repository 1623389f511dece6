"""spark/counters: what leaves no trace in the log, kept over the short lives of Spark's workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import zlib
from pathlib import Path

import pytest

from messagestore import BatchRequest, CorruptionError, MessageStore
from messagestore.batches.staging import StagingWriter
from messagestore.files.counters import NAMES, count, read_counters
from messagestore.files.disk import Disk
from messagestore.inspect.verify import verify
from messagestore.spi import LOCAL_STORES, encode
from messagestore.spi import local as local_stores
from small import SMALL, bodies, columns, filled

ZERO = dict.fromkeys(NAMES, 0)


@pytest.fixture
def spark(tmp_path: Path) -> Path:
    (tmp_path / "spark").mkdir()
    return tmp_path / "spark"


def counted(spark: Path) -> dict[str, int]:
    return read_counters(Disk(), str(spark / "counters"))


def test_counts_add_up(spark: Path) -> None:
    assert counted(spark) == ZERO
    count(Disk(), str(spark), knownBatches=1)
    count(Disk(), str(spark), orphansDeleted=7)
    count(Disk(), str(spark), knownBatches=1)
    assert counted(spark) == {**ZERO, "knownBatches": 2, "orphansDeleted": 7}


def test_the_file_byte_by_byte(spark: Path) -> None:
    count(Disk(), str(spark), knownBatches=3, orphansDeleted=12)
    others = b'{"counters": {"knownBatches": 3, "orphansDeleted": 12, "skippedBatches": 0}, "formatVersion": 1}'
    assert (spark / "counters").read_bytes() == (
        b'{"counters": {"knownBatches": 3, "orphansDeleted": 12, "skippedBatches": 0}, "crc": %d, "formatVersion": 1}'
        % zlib.crc32(others)
    )
    assert sorted(path.name for path in spark.iterdir()) == ["counters", "counters.lock"]


def test_every_flipped_bit_is_damage(spark: Path) -> None:
    count(Disk(), str(spark), knownBatches=3)
    data = (spark / "counters").read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (spark / "counters").write_bytes(flipped)
        try:
            assert counted(spark)["knownBatches"] == 3  # a blank that became another
        except CorruptionError as error:
            assert "delete it, and counting begins anew" in str(error)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"counters": 5}', b"\xff", b'{"counters": {"a": 1e999}}', b"9" * 99_999]
)
def test_a_damaged_file_begins_anew(spark: Path, data: bytes) -> None:
    (spark / "counters").write_bytes(data)
    with pytest.raises(CorruptionError):
        counted(spark)
    count(Disk(), str(spark), skippedBatches=1)
    assert counted(spark) == {**ZERO, "skippedBatches": 1}


def _count_many(spark: str) -> None:
    for _ in range(20):
        count(Disk(), spark, knownBatches=1)


def test_processes_that_count_at_once_lose_nothing(spark: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_count_many, args=(str(spark),)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert counted(spark)["knownBatches"] == 60


def commit(root: Path, version: int, start: int, dead_letter_topic: str = "", **request: str) -> str:
    """One micro-batch, as a worker of Spark commits it."""
    writer = LOCAL_STORES.writer(str(root), SMALL, staging_ttl_s=3600)
    described = writer.prepare()
    staging = writer.stage(local_stores.Write("0", f"{version}-{start}"), described.store_id)
    assert isinstance(staging, StagingWriter)
    with staging:
        staging.write(
            encode(
                columns(bodies(4, start=start)),
                limits=described.config,
                store_host=b"\x7f\0\0\1\0\0\x2a\x9f",
                born_host=b"\x7f\0\0\1\0\0\0\0",
                first_row=0,
            )
        )
        file = staging.finish()
    return writer.commit(
        [file],
        BatchRequest("copy", version, "spark", "q1", **request),
        described.store_id,
        dead_letter_topic=dead_letter_topic,
    ).result.status


def test_replays_are_counted_and_ordinary_batches_are_not(tmp_path: Path) -> None:
    """A batch that Spark sends again leaves nothing in the log; the file says that it came."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL):
        pass
    assert [commit(root, version, 4 * version) for version in (0, 1)] == ["appended", "appended"]
    assert not (root / "spark" / "counters").exists()
    assert commit(root, 1, 4) == "known"
    assert commit(root, 1, 9, on_replay_mismatch="skip") == "skipped"
    assert counted(root / "spark") == {**ZERO, "knownBatches": 1, "skippedBatches": 1}
    with contextlib.closing(LOCAL_STORES.reader(str(root), SMALL)) as store:
        (figures,), _ = store.view("figures")
    assert figures["counters"]["knownBatches"] == 1
    assert verify(root, SMALL).ok


def test_topics_of_dead_letters_are_known(tmp_path: Path) -> None:
    """Also if whoever appended the batch was killed before it counted; the batch is sent again then."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL):
        pass
    assert [commit(root, version, 4 * version, "dead") for version in (0, 1)] == ["appended", "appended"]
    assert counted(root / "spark") == {**ZERO, "deadLetters:dead": 2}
    (root / "spark" / "counters").unlink()
    assert commit(root, 1, 4, "dead") == "known"
    assert counted(root / "spark") == {**ZERO, "knownBatches": 1, "deadLetters:dead": 1}


def test_orphans_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a writer that is dead, found when the next batch begins."""
    root = filled(tmp_path / "s", 2)
    (root / "spark" / "staging").mkdir(exist_ok=True)
    for number in range(3):
        (root / "spark" / "staging" / f"{number}.staged").write_bytes(b"x")
    monkeypatch.setattr(local_stores, "_last_sweep_s", {})
    LOCAL_STORES.writer(str(root), SMALL, staging_ttl_s=0).prepare()
    assert counted(root / "spark") == {**ZERO, "orphansDeleted": 3}


def test_a_commit_does_not_fail_because_nothing_can_be_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL):
        pass
    commit(root, 0, 0)
    (root / "spark" / "counters").mkdir()
    assert commit(root, 0, 0) == "known"
    assert "knownBatches was not counted" in caplog.text
