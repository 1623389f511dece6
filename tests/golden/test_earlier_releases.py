"""Stores and Spark checkpoints that an earlier release wrote still open, and go on. PROVENANCE.md says which release."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import spark_runs
from crash.imitate import another_boot
from golden.make_earlier import QUERY, contents
from messagestore import BatchConflictError, BatchRequest, ChecksumError, Message, MessageStore, VersionRegressionError
from messagestore.format.layout import EARLIER_DIGEST_NAME
from messagestore.spi import LOCAL_STORES, ColumnTexts, StagedFile, Write, encode, store_host_of
from messagestore.verify.verify import verify
from messagestore.write.transaction import APPENDED, KNOWN
from small import SMALL, bodies, columns

HERE = Path(__file__).resolve().parent
ROW = re.compile(r"^\| `earlier/([\w.-]+)\.zip` \| (\d+) \| `([0-9a-f]{64})` \|$", re.MULTILINE)
STAGED = ("staged", "staged-3")
STORES = ("closed", "killed", "killed-async")


def unpack(name: str, folder: Path) -> tuple[Path, dict]:
    with zipfile.ZipFile(HERE / "earlier" / f"{name}.zip") as archive:
        archive.extractall(folder)
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return folder / "store", expected


def of_orders(version: int, flush: str, app_id: str = "orders") -> tuple[object, BatchRequest]:
    """A batch as the earlier release wrote it."""
    rows = columns(bodies(40, start=1000 + 40 * version), topic="orders")
    return rows, BatchRequest(
        app_id=app_id, version=version, version_source="spark", query_id=QUERY, flush_disk_type=flush
    )


def test_provenance() -> None:
    """Each file is listed, with the hash it has: nothing was made again by a later release."""
    rows = {name: (int(size), sha) for name, size, sha in ROW.findall((HERE / "PROVENANCE.md").read_text("utf-8"))}
    found = {path.stem: path.read_bytes() for path in (HERE / "earlier").glob("*.zip")}
    assert rows == {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in found.items()}
    assert set(rows) == {*STORES, *STAGED, "stream", "foreach"}


@pytest.mark.parametrize("other_boot", [False, True])
@pytest.mark.parametrize("name", STORES)
def test_what_it_wrote_is_there(name: str, other_boot: bool, tmp_path: Path) -> None:
    """Every acknowledged message, in order, after a writer of this release has taken over; nothing else."""
    root, expected = unpack(name, tmp_path)
    with another_boot() if other_boot else nullcontext(), MessageStore.open(root, SMALL) as store:
        assert [m.body for m in store.query_message("t", "last")] == [b"last"]
    assert sum(len(found) for queues in expected["contents"].values() for found in queues.values()) == 61 + 4 * 40 + 10
    assert contents(root) == expected["contents"]
    assert verify(root, SMALL).findings == []


@pytest.mark.parametrize("name", STORES)
def test_its_batches_are_known_and_the_next_one_is_not(name: str, tmp_path: Path) -> None:
    """A replay of each batch of the earlier release is recognised; the query goes on behind the last one."""
    root, expected = unpack(name, tmp_path)
    flush = expected["flush"]
    with MessageStore.open(root, SMALL.replace(flush_disk_type=flush)) as store:
        for version in range(4):
            assert store.append_batch(*of_orders(version, flush)).status == KNOWN
        user = BatchRequest(app_id="loader", version=9, flush_disk_type=flush)
        assert store.append_batch(columns(bodies(5, start=5009), topic="users"), user).status == KNOWN
        with pytest.raises(VersionRegressionError):
            store.append_batch(
                columns(bodies(5), topic="users"), BatchRequest(app_id="loader", version=4, flush_disk_type=flush)
            )
        assert store.append_batch(*of_orders(4, flush)).status == APPENDED
        assert store.append_batch(*of_orders(4, flush)).status == KNOWN
        put = store.put_message(Message("t", b"new", queue_id=1, keys=["new"]))
        assert put.queue_offset == len(expected["contents"]["t"]["1"])
    with MessageStore.open(root, SMALL) as store:
        assert store.append_batch(*of_orders(4, flush)).status == KNOWN
    found = contents(root)
    assert [len(found["orders"][queue]) for queue in "01"] == [100, 100]
    assert found["t"] == {"0": expected["contents"]["t"]["0"], "1": [*expected["contents"]["t"]["1"], "new"]}
    assert verify(root, SMALL).findings == []


def committed(root: Path, version: int, flush: str = "SYNC_FLUSH", *, rows: object = None, old: object = ()) -> str:
    """Stage a batch as tasks of this release do, beside files that are there, and commit it."""
    writer = LOCAL_STORES.writer(str(root), SMALL.replace(flush_disk_type=flush), staging_ttl_s=3600.0)
    given, request = of_orders(version, flush)
    store_id, host, files = writer.prepare().store_id, store_host_of(SMALL), list(old)  # type: ignore[call-overload]
    with writer.stage(Write("0", str(version)), store_id) as file:
        digests = writer.digests_of("orders", version)
        texts = ColumnTexts(given if rows is None else rows)  # type: ignore[arg-type]
        file.write(encode(texts, limits=SMALL, store_host=host, born_host=host, digests=digests))
        files.append(file.finish())
    return writer.commit(files, request, store_id, closing=True).result.status


@pytest.mark.parametrize("name", STORES)
def test_its_batches_are_known_when_tasks_send_them_again(name: str, tmp_path: Path) -> None:
    """Its digest is computed beside this release's, also for a batch below the first one that this release appended."""
    root, expected = unpack(name, tmp_path)
    flush = expected["flush"]
    assert [committed(root, version, flush) for version in (3, 1, 4, 2, 4)] == [KNOWN, KNOWN, APPENDED, KNOWN, KNOWN]
    for version in (3, 4):
        with pytest.raises(BatchConflictError, match=f"version {version} is in the store with 40 rows"):
            committed(root, version, flush, rows=columns(bodies(40), topic="orders"))
    found = contents(root)
    assert [len(found["orders"][queue]) for queue in "01"] == [100, 100]
    assert verify(root, SMALL).findings == []


@pytest.mark.parametrize(
    "lost",
    [
        ("spark/journal",),
        ("spark/journal", "spark/store.json"),
        ("spark",),
        ("spark", "consumequeue/rmq_sys_spark_sink"),
    ],
    ids="+".join,
)
def test_its_batches_are_known_when_our_small_files_are_lost(lost: tuple[str, ...], tmp_path: Path) -> None:
    """Then nothing tells tasks which digest a batch has, and they compute both."""
    root, _ = unpack("staged", tmp_path)
    for name in lost:
        shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()
    assert [committed(root, version) for version in (2, 0, 3, 1, 3)] == [KNOWN, KNOWN, APPENDED, KNOWN, KNOWN]
    assert verify(root, SMALL).findings == []


def staged_by_it(name: str, tmp_path: Path, version: int) -> tuple[Path, list[StagedFile]]:
    root, expected = unpack(name, tmp_path)
    return root, [
        StagedFile(str(tmp_path / "staging" / name), size, crc, count)
        for name, size, crc, count in expected["staged"][str(version)]
    ]


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize(("version", "status"), [(2, KNOWN), (3, APPENDED)])
def test_what_its_tasks_staged_is_committed(name: str, version: int, status: str, tmp_path: Path) -> None:
    """The driver is upgraded between a task and the commit. The batch keeps the digest that the tasks computed."""
    root, files = staged_by_it(name, tmp_path, version)
    _, request = of_orders(version, "SYNC_FLUSH")
    writer = LOCAL_STORES.writer(str(root), SMALL, staging_ttl_s=3600.0)
    assert writer.commit(files, request, writer.describe().store_id, closing=True).result.status == status
    with MessageStore.open(root, SMALL) as store:
        entry = store.writer.journal.find("orders", version)
        assert entry is not None and entry.digest_name == EARLIER_DIGEST_NAME
        assert store.append_batch(*of_orders(version, "SYNC_FLUSH")).status == KNOWN
    assert committed(root, version) == KNOWN
    with pytest.raises(BatchConflictError, match="came again with 40 rows"):
        committed(root, version, rows=columns(bodies(40), topic="orders"))
    assert len(contents(root)["orders"]["0"]) == 20 * (version + 1)
    assert verify(root, SMALL).findings == []


@pytest.mark.parametrize("name", STAGED)
def test_tasks_of_two_releases_stage_one_batch(name: str, tmp_path: Path) -> None:
    """A part of the executors is upgraded: the digest that all of them computed counts."""
    root, (_, first) = staged_by_it(name, tmp_path, 3)
    rest = of_orders(3, "SYNC_FLUSH")[0].slice(25, 15)  # type: ignore[attr-defined]
    again = tmp_path / "again"
    shutil.copyfile(first.path, again)
    assert committed(root, 3, rows=rest, old=[first]) == APPENDED
    assert committed(root, 3, rows=rest, old=[replace(first, path=str(again))]) == KNOWN
    assert committed(root, 3) == KNOWN
    assert verify(root, SMALL).findings == []


def test_a_damaged_file_of_its_tasks_is_refused(tmp_path: Path) -> None:
    """The CRC-32 of the whole file is compared before anything is written."""
    root, files = staged_by_it("staged", tmp_path, 3)
    data = bytearray(Path(files[1].path).read_bytes())
    for position in (7, 300, len(data) // 2, len(data) - 1):
        Path(files[1].path).write_bytes(data[:position] + bytes([data[position] ^ 8]) + data[position + 1 :])
        with pytest.raises(ChecksumError, match="not the file that its task wrote"):
            committed(root, 3, old=files)
    Path(files[1].path).write_bytes(data)
    assert len(contents(root)["orders"]["0"]) == 60


@pytest.mark.spark
@pytest.mark.parametrize(("name", "job"), [("stream", "copy"), ("foreach", "copy_foreach")])
def test_its_spark_checkpoint_goes_on(name: str, job: str, tmp_path: Path) -> None:
    """The last batch is replayed and recognised, and the messages that came since are copied: each once, none lost."""
    root, _ = unpack(name, tmp_path)
    if reason := spark_runs.why_not():
        pytest.skip(reason)
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, job\n"
        "spark = job.session('local[2]')\n"
        f"job.{job}(spark, sys.argv[1], sys.argv[2], 'messagestore')\n"
        "spark.stop()\n"
    )
    before = spark_runs.bodies(str(root), "copy")
    assert sum(before.values()) == 1000
    done = spark_runs.run_job(str(script), root, tmp_path / "checkpoint", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = spark_runs.bodies(str(root), "copy")
    assert found == dict.fromkeys((str(number) for number in range(1300)), 1)
