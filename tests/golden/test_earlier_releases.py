"""Stores and Spark checkpoints that an earlier release wrote still open, and go on. PROVENANCE.md says which release."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

import spark_runs
from crash.imitate import another_boot
from golden.make_earlier import QUERY, contents
from messagestore import BatchRequest, Message, MessageStore, VersionRegressionError
from messagestore.verify.verify import verify
from messagestore.write.transaction import APPENDED, KNOWN
from small import SMALL, bodies, columns

HERE = Path(__file__).resolve().parent
ROW = re.compile(r"^\| `earlier/([\w.-]+)\.zip` \| (\d+) \| `([0-9a-f]{64})` \|$", re.MULTILINE)
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
    assert set(rows) == {*STORES, "stream", "foreach"}


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
