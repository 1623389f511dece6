"""Makes the stores of tests/golden/earlier with the release that is checked out: what it wrote, every later one opens.

    cd tests && ../.venv/bin/python golden/make_earlier.py FOLDER

`stream` and `foreach` need Spark. Each zip holds a folder `store`, for Spark a folder `checkpoint`, and `expected.json`.
PROVENANCE.md says from which commit the files in the tree are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import spark_runs
from messagestore import ASYNC_FLUSH, BatchRequest, Message, MessageStore, StoreConfig
from messagestore.spi import LOCAL_STORES, ColumnTexts, Write, encode, store_host_of
from messagestore.write.log_writer import LogWriter
from small import SMALL, SMALL_ASYNC, bodies, columns

_DATE = (2026, 1, 1, 0, 0, 0)
QUERY = "5b0f3b1c-6a52-4f0e-9d39-7f6f0d3c9c11"


def fill(root: Path, config: StoreConfig, *, dies: bool) -> None:
    """Puts, a Spark query's batches, a user's batches; over several segments, queue files and index files."""
    with MessageStore.open(root, config) as store:
        for number, body in enumerate(bodies(60, size=200)):
            store.put_message(Message("t", body, queue_id=number % 2, keys=[f"k{number}"], tags=f"tag{number % 3}"))
        for version in range(4):
            store.append_batch(
                columns(bodies(40, start=1000 + 40 * version), topic="orders"), _request(config, "orders", version)
            )
        for version in (3, 9):
            store.append_batch(
                columns(bodies(5, start=5000 + version), topic="users"), _request(config, "loader", version, "user")
            )
        store.put_message(Message("t", b"last", queue_id=0, keys=["last"]))
        if dies:
            store.flush()
            with mock.patch.object(LogWriter, "check_locks", _die_at_the_seal()):
                store.append_batch(columns(bodies(40, start=1160), topic="orders"), _request(config, "orders", 4))


def _request(config: StoreConfig, app_id: str, version: int, source: str = "spark") -> BatchRequest:
    return BatchRequest(
        app_id=app_id,
        version=version,
        version_source=source,
        query_id=QUERY if source == "spark" else None,
        flush_disk_type=config.flush_disk_type,
    )


def _die_at_the_seal() -> Callable[..., None]:
    """SIGKILL at the second look at the locks: the batch's data are written, the first eight bytes are not."""
    looks = iter(range(2))

    def check(writer: LogWriter, *, often: bool = False) -> None:
        if next(looks):
            os.kill(os.getpid(), signal.SIGKILL)

    return check


def closed(folder: Path) -> None:
    fill(folder / "store", SMALL, dies=False)


def killed(folder: Path) -> None:
    _in_child(lambda: fill(folder / "store", SMALL, dies=True))


def killed_async(folder: Path) -> None:
    _in_child(lambda: fill(folder / "store", SMALL_ASYNC, dies=True))


def staged(folder: Path) -> dict[str, list[list[object]]]:
    """A query's batches 0 to 2, and what the tasks of two attempts left: of batch 2 again, and of batch 3."""
    with MessageStore.open(folder / "store", SMALL) as store:
        for version in range(3):
            rows = columns(bodies(40, start=1000 + 40 * version), topic="orders")
            store.append_batch(rows, _request(SMALL, "orders", version))
    (folder / "staging").mkdir()
    options = {"staging_ttl_s": 3600.0, "staging_dir": str(folder / "staging")}
    writer = LOCAL_STORES.writer(str(folder / "store"), SMALL, **options)  # type: ignore[arg-type]
    store_id, host = writer.prepare().store_id, store_host_of(SMALL)
    found: dict[str, list[list[object]]] = {}
    for version in (2, 3):
        rows = columns(bodies(40, start=1000 + 40 * version), topic="orders")
        for number, part in enumerate((rows.slice(25, 15), rows.slice(0, 25))):
            with writer.stage(Write("0", f"{version}/{number}"), store_id) as file:
                file.write(encode(ColumnTexts(part), limits=SMALL, store_host=host, born_host=host))
                done = file.finish()
            found.setdefault(str(version), []).append([Path(done.path).name, done.size, done.crc, done.row_count])
    return found


def stream(folder: Path) -> None:
    """A query that was stopped after its last commit was lost, and 300 messages that it has not read."""
    _spark(folder, "copy")


def foreach(folder: Path) -> None:
    """The same through foreachBatch."""
    _spark(folder, "copy_foreach")


def _spark(folder: Path, job: str) -> None:
    root, checkpoint = folder / "store", folder / "checkpoint"
    small = {"mapped_file_size_commit_log": 1 << 17, "mapped_file_size_consume_queue": 20 * 64}
    spark_runs.fill(str(root), 1000, **small, max_hash_slot_num=64, max_index_num=200)  # type: ignore[arg-type]
    program = (
        "import sys, job\n"
        "spark = job.session('local[2]')\n"
        f"job.{job}(spark, sys.argv[1], sys.argv[2], 'messagestore')\n"
        "spark.stop()\n"
    )
    script = folder / "program.py"
    script.write_text(program)
    done = spark_runs.run_job(str(script), root, checkpoint, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    script.unlink()
    shutil.rmtree(folder / "spark-warehouse", ignore_errors=True)
    newest = max((p for p in (checkpoint / "commits").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    newest.unlink()
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    with MessageStore.open(root) as store:
        store.append_batch(columns([b"%d" % n for n in range(1000, 1300)], topic="flights", queues=4))


def _in_child(run: Callable[[], None]) -> None:
    if (pid := os.fork()) == 0:
        run()
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def contents(root: Path) -> dict[str, dict[str, list[str]]]:
    """Topic -> queue id -> bodies, as the release that wrote them shows them."""
    with MessageStore.open_read_only(root) as store:
        return {
            topic: {
                str(queue_id): [
                    body.decode()
                    for batch in store.read(topic, queue_id, 0, columns=("body",))
                    for body in batch.column("body").to_pylist()
                ]
                for queue_id in queue_ids
            }
            for topic, queue_ids in store.topics().items()
            if not topic.startswith("rmq_sys_")
        }


STORES: dict[str, Callable[[Path], object]] = {
    "closed": closed,
    "killed": killed,
    "killed-async": killed_async,
    "staged": staged,
    "stream": stream,
    "foreach": foreach,
}


def make(name: str, target: Path) -> str:
    """One store, as a zip; its line for PROVENANCE.md."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = STORES[name](folder)
        expected = {
            "contents": contents(folder / "store"),
            "flush": ASYNC_FLUSH if "async" in name else "SYNC_FLUSH",
            "staged": files or {},
        }
        (folder / "expected.json").write_text(json.dumps(expected, indent=1))
        with zipfile.ZipFile(target / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                info = zipfile.ZipInfo(str(path.relative_to(folder)), _DATE)
                archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = (target / f"{name}.zip").read_bytes()
    return f"| `earlier/{name}.zip` | {len(data)} | `{hashlib.sha256(data).hexdigest()}` |"


if __name__ == "__main__":
    for each in sys.argv[2:] or STORES:
        print(make(each, Path(sys.argv[1])))
