"""Runs scripts of steps in a process that dies, and checks what it promised and what must hold afterwards.

What was acknowledged is kept outside the store. After a death, the store is opened as the next process would open it,
checked, given the batches again as Spark would, checked again, closed, verified, and opened and closed once more
without a change to any byte of RocketMQ's files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from crash import hostile
from crash.simdisk import Killed
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    BatchRequest,
    BatchResult,
    GetMessageStatus,
    Message,
    MessageBatch,
    MessageColumns,
    MessageStore,
    PutMessageResult,
    StoreConfig,
    StorePoisonedError,
)
from messagestore import session as attached_store
from messagestore.batches.append import Chunks, append_batch
from messagestore.batches.staging import StagedChunks, StagingWriter
from messagestore.files.disk import Disk
from messagestore.format.record_columns import Rows, encode
from messagestore.inspect.verify import verify
from small import SMALL as SIZES

APP = "app-1"
SMALL = SIZES.replace(sync_flush_timeout=5000, clean_interval="1h", attach_timeout="1h")
ROOMY = SMALL.replace(mapped_file_size_commit_log=256 * 1024)
Step = tuple[object, ...]


@dataclass
class Promise:
    """What the dead process had promised, and what else it may have left."""

    puts: list[str] = field(default_factory=list)
    maybe_puts: list[str] = field(default_factory=list)
    batches: set[tuple[str, int]] = field(default_factory=set)
    maybe_batches: set[tuple[str, int]] = field(default_factory=set)
    rows: dict[tuple[str, int], int] = field(default_factory=dict)
    uncommitted: list[str] = field(default_factory=list)
    """Puts that returned and are only in the memory of the process; what commits makes them accepted."""
    accepted: set[str | tuple[str, int]] = field(default_factory=set)
    """Puts and batches that returned; ASYNC ones are promised once the clean end has moved past them."""
    expired: set[bytes] = field(default_factory=set)
    """Bodies that retention was asked to delete: they may be there or not."""


def payload(app: str, version: int, row: int) -> bytes:
    """Return a body that says where it is from: about 60 bytes, more for a hostile app."""
    begin = f"{app}/{version}/{row}/"
    if app.startswith(hostile.APP):
        return (begin + hostile.tail(97 * version + row)).encode(hostile.ENCODING)
    return begin.encode() + b"." * 40


def put_text(number: int) -> str:
    """Return the body of a put, with one character for each byte."""
    return f"put/{number}/" + (hostile.tail(number) if number >= hostile.FROM else "")


def put_message(number: int, topic: str, queue_id: int) -> Message:
    """Return the message of a put."""
    body = put_text(number).encode(hostile.ENCODING)
    if number < hostile.FROM:
        return Message(topic, body, queue_id=queue_id, keys=[f"p{number}"])
    return Message(topic, body, queue_id=queue_id, **hostile.texts(number))


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder in memory (`/dev/shm`), where syncs cost nothing, or a temporary one if there is none."""
    folder = Path(tempfile.mkdtemp(prefix="messagestore-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@lru_cache(512)
def batch_columns(app: str, version: int, row_count: int, queues: int = 3) -> MessageColumns:
    """The rows of one version of an app: the same each time."""
    rows = np.arange(row_count)
    texts: dict[str, pa.Array] = {
        "keys": pa.array([f"k{version}-{i}" for i in rows]),
        "tags": pa.array(["t"] * row_count),
    }
    if app.startswith(hostile.APP):
        texts = hostile.columns([97 * version + int(i) for i in rows])
        texts["keys"] = pa.array([[f"k{version}-{i}", *own] for i, own in enumerate(texts["keys"].to_pylist())])

    table = pa.record_batch(
        {
            "body": pa.array([payload(app, version, int(i)) for i in rows], pa.binary()),
            "queue_id": pa.array(rows % queues, pa.int32()),
            **texts,
        }
    )
    return MessageColumns.from_arrow(table, topic=f"topic-{app}")


def _dies_without_finalizers(store: MessageStore) -> None:
    """Do what the end of a killed process does for a store that it had open: nothing."""


MessageStore.__del__ = _dies_without_finalizers  # type: ignore[method-assign]


def run_steps(root: Path, steps: Iterable[Step], disk: Disk, promise: Promise, config: StoreConfig = SMALL) -> None:
    """Run the steps; `Killed` ends them. Promises are recorded the moment they are made."""
    store: MessageStore | None = None
    for step in steps:
        if step == ("open",):
            store = MessageStore.open(root, config, disk=disk)
        else:
            assert store is not None
            do_step(store, step, promise, config)


def do_step(store: MessageStore, step: Step, promise: Promise, config: StoreConfig = SMALL) -> None:
    """Run one step in an open store; record its promise the moment it is made, and what it may leave before that."""
    puts: list[str] = []
    results: list[PutMessageResult] = []
    match step:
        case ("close",):
            store.close()
        case ("put", int(number), str(topic), int(queue_id)):
            puts = [put_text(number)]
            promise.maybe_puts += puts
            results = [store.put_message(put_message(number, topic, queue_id))]
        case ("puts", int(number), int(count), str(topic), int(queue_id)):
            puts = [put_text(number + i) for i in range(count)]
            promise.maybe_puts += puts
            messages = [put_message(number + i, topic, queue_id) for i in range(count)]
            results = [store.put_messages(MessageBatch.from_messages(messages))]
        case ("big_put", int(number), int(size)):
            puts = [f"put/{number}/" + "x" * size]
            promise.maybe_puts += puts
            results = [store.put_message(Message("big", puts[0].encode(), queue_id=0))]
        case (("batch" | "replay" | "commit") as how, str(app), int(version), int(rows), str(flush)):
            promise.rows[(app, version)] = rows
            promise.maybe_batches.add((app, version))
            if how == "batch":
                request = BatchRequest(app_id=app, version=version, version_source="spark", flush_disk_type=flush)
                store.append_batch(batch_columns(app, version, rows), request)
            elif how == "replay":  # as "batch", but faster
                append_encoded(store, app, version, rows, flush)
            else:
                commit_staged(store, app, version, rows, flush)
            promise.accepted.add((app, version))
            if flush == SYNC_FLUSH:
                promise.batches.add((app, version))
        case ("group", int(number), int(count), str(topic), int(threads)):
            puts = [f"put/{number + i}/" for i in range(count)]
            puts = [body for body in puts if body not in promise.accepted]  # a second try: only those that failed
            promise.maybe_puts += puts
            put_side_by_side(store, puts, topic, threads, promise, config)
        case ("futures", int(number), int(count), str(topic), int(queue_id)):
            numbers = [number + i for i in range(count) if put_text(number + i) not in promise.accepted]
            promise.maybe_puts += [put_text(each) for each in numbers]
            put_in_flight(store, numbers, topic, queue_id, promise, config)
        case ("oneway", int(number), int(count), str(topic), int(queue_id)):
            promise.maybe_puts += [put_text(number + i) for i in range(count)]
            for i in range(count):
                store.put_message_oneway(put_message(number + i, topic, queue_id))
        case ("flush",):
            store.flush()
        case ("topic", str(topic), int(queue_count)):
            store.create_topic(topic, queue_count)
        case ("expire", int(count)):
            log = store.writer.log
            end = min(log.min_offset + count * log.segment_size, log.segment_of(store.writer.end.physical_offset - 1))
            promise.expired |= bodies_below(store, end)
            store.delete_expired_files(before_offset=end)
        case ("clean",):
            store.flush()
            store.writer.finish()
            store.writer.clean_end.move()
        case _:
            raise ValueError(f"unknown step {step}")
    assert all(result.is_ok for result in results)
    if any(not result.committed for result in results):
        promise.uncommitted += puts
        return
    if results or step[0] in (
        "close",
        "clean",
        "batch",
        "replay",
        "commit",
        "flush",
    ):  # what was put before is committed
        promise.accepted.update(promise.uncommitted)
        promise.uncommitted.clear()
    promise.accepted.update(puts)
    if config.flush_disk_type == SYNC_FLUSH:
        promise.puts += [body for body in puts if body not in promise.puts]
    if step in (("close",), ("clean",)):  # makes everything before it durable
        promise.puts += [body for body in promise.maybe_puts if body in promise.accepted and body not in promise.puts]
        promise.batches |= promise.maybe_batches & promise.accepted


def bodies_below(store: MessageStore, physical_offset: int) -> set[bytes]:
    """Return the bodies of the messages that lie below a place in the log."""
    found: set[bytes] = set()
    for topic, queue_ids in store.topics().items():
        for queue_id in queue_ids:
            begin = store.min_offset(topic, queue_id)
            for batch in store.read(topic, queue_id, begin, columns=("body", "physical_offset")):
                places = batch.column("physical_offset").to_pylist()
                bodies = batch.column("body").to_pylist()
                found |= {body for body, place in zip(bodies, places, strict=True) if place < physical_offset}
    return found


def put_side_by_side(
    store: MessageStore, puts: Sequence[str], topic: str, threads: int, promise: Promise, config: StoreConfig
) -> None:
    """Put from several threads at once, which share syncs."""

    def put(body: str) -> None:
        assert store.put_message(Message(topic, body.encode(), queue_id=0)).is_ok
        promise.accepted.add(body)
        if config.flush_disk_type == SYNC_FLUSH:
            promise.puts.append(body)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(put, body) for body in puts]:
            done.result()


def put_in_flight(
    store: MessageStore, numbers: Sequence[int], topic: str, queue_id: int, promise: Promise, config: StoreConfig
) -> None:
    """Put without waiting, then wait for all; what was acknowledged is promised also if another put failed."""
    futures = [(each, store.put_message_async(put_message(each, topic, queue_id))) for each in numbers]
    errors = []
    for each, future in futures:
        error = future.exception()
        if error is not None:
            errors.append(error)
        elif future.result().is_ok:
            promise.accepted.add(put_text(each))
            if config.flush_disk_type == SYNC_FLUSH:
                promise.puts.append(put_text(each))
    if errors:
        raise errors[0]


def append_encoded(store: MessageStore, app: str, version: int, row_count: int, flush: str) -> str:
    """Append one batch that was encoded before; return its status."""
    writer = store.writer
    chunk = encoded(app, version, row_count, writer.files.config, writer.files.store_host)
    chunk = replace(chunk, data=chunk.data.copy())  # it is stamped in place
    request = BatchRequest(app_id=app, version=version, version_source="spark", flush_disk_type=flush)
    return append_batch(writer, Chunks([chunk]), request).status


@lru_cache(1024)
def encoded(app: str, version: int, row_count: int, config: StoreConfig, host: bytes) -> Rows:
    """Return the records of a batch as a task stages them."""
    columns = batch_columns(app, version, row_count)
    return encode(columns, limits=config, store_host=host, born_host=host)


def commit_staged(
    store: MessageStore, app: str, version: int, rows: int, flush: str, staging: str | None = None
) -> BatchResult:
    """Commit as Spark's sink does: two tasks stage their rows, the driver appends. Staging needs a real folder."""
    writer, columns = store.writer, batch_columns(app, version, rows)
    hosts = {"store_host": writer.files.store_host, "born_host": writer.files.store_host}
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with contextlib.nullcontext(staging) if staging else tempfile.TemporaryDirectory(dir=shared) as folder:
        staged = []
        for start, count in ((0, rows // 2), (rows // 2, rows - rows // 2)):
            with StagingWriter(folder) as writing:
                writing.write(encode(columns.slice(start, count), limits=writer.files.config, **hosts))
                staged.append(writing.finish())
        request = BatchRequest(app_id=app, version=version, version_source="spark", flush_disk_type=flush)
        with store._attached.writing(f"batch {version} of {app}") as locked:
            return append_batch(locked, StagedChunks(folder, staged), request)


def die(root: Path) -> None:
    """Let the process die: the system releases its locks, and nothing is cleaned up."""
    store = attached_store._stores.pop(os.path.realpath(root), None)
    if store is not None:
        store._drop()


def run_until_killed(
    root: Path, steps: Iterable[Step], disk: Disk, config: StoreConfig = SMALL, promise: Promise | None = None
) -> Promise:
    """Run steps on a disk that kills at some operation; return what was promised until then."""
    promise = promise or Promise()
    try:
        run_steps(root, steps, disk, promise, config)
    except (Killed, StorePoisonedError):
        pass  # the flush thread may be the one that dies: the caller then learns that the writer is poisoned
    finally:
        die(root)
    return promise


def all_messages(store: MessageStore) -> dict[tuple[str, int], list[bytes]]:
    """Return the bodies of every queue, in order, read one message at a time."""
    found: dict[tuple[str, int], list[bytes]] = {}
    for topic, queue_ids in store.topics().items():
        if topic.startswith("rmq_sys"):
            continue

        for queue_id in queue_ids:
            bodies: list[bytes] = []
            offset = 0

            while True:
                result = store.get_message(topic, queue_id, offset, 100)
                if result.status is not GetMessageStatus.FOUND:
                    break
                assert [m.queue_offset for m in result.messages] == list(range(offset, offset + len(result.messages)))
                bodies += [m.body for m in result.messages]
                offset = result.next_begin_offset

            found[(topic, queue_id)] = bodies
    return found


def check_content(store: MessageStore, promise: Promise, *, all_batches: bool = False) -> None:
    """Check that nothing promised is lost, nothing is duplicated, and batches are whole and in order."""
    queues = all_messages(store)
    bodies = [body for found in queues.values() for body in found]
    assert max(Counter(bodies).values(), default=1) == 1, "a message is there twice"

    texts = {body.decode(hostile.ENCODING) for body in bodies}
    puts = {text for text in texts if text.startswith("put/")}
    assert set(promise.puts) <= puts, f"lost puts: {sorted(set(promise.puts) - puts)[:5]}"
    assert puts <= set(promise.maybe_puts), f"puts nobody made: {sorted(puts - set(promise.maybe_puts))[:5]}"

    wanted = promise.maybe_batches if all_batches else promise.batches
    for key, row_count in promise.rows.items():
        rows = {payload(*key, row) for row in range(row_count)}
        count = len(rows & set(bodies))
        assert count in (0, row_count), f"batch {key}: {count} of {row_count} rows"
        assert count == row_count or key not in wanted or row_count == 0, f"batch {key} is lost"

    for key, found in queues.items():
        order = [tuple(int(n) for n in body.split(b"/")[1:3]) for body in found if not body.startswith(b"put/")]
        assert order == sorted(order), f"{key}: out of order"


def tree_hash(root: Path) -> dict[str, str]:
    """Return the hash of each of RocketMQ's files that holds messages or is derived from them."""
    hashes = {}
    for folder in ("commitlog", "consumequeue", "index"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file():
                hashes[str(path.relative_to(root))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def check_store(root: Path, promise: Promise, config: StoreConfig = SMALL) -> None:
    """Open as the next process, check, replay, check, close, verify, then open and close again without a change."""
    with MessageStore.open(root, config) as store:
        check_content(store, promise)

        for app, version in sorted(promise.rows):
            flush = ASYNC_FLUSH if (app, version) not in promise.batches else SYNC_FLUSH
            request = BatchRequest(app_id=app, version=version, version_source="spark", flush_disk_type=flush)
            store.append_batch(batch_columns(app, version, promise.rows[(app, version)]), request)
        check_content(store, promise, all_batches=True)

        for version_rows in promise.rows.items():
            (app, version), row_count = version_rows
            if row_count:
                hits = store.query_message(f"topic-{app}", f"k{version}-{row_count - 1}")
                assert payload(app, version, row_count - 1) in [m.body for m in hits], "a key is not found"

    assert not (root / "abort").exists()
    report = verify(root)
    assert report.ok, report.findings[:3]

    before = tree_hash(root)
    with MessageStore.open(root, config) as store:
        pass
    assert tree_hash(root) == before, "opening again changed bytes"


def count_operations(
    make: Callable[[Path], Disk], base: Path | None, scratch: Path, steps: Iterable[Step], config: StoreConfig = SMALL
) -> int:
    """Return how many operations the steps take if nothing kills them."""
    root = fresh(base, scratch)
    disk = make(root)
    run_until_killed(root, steps, disk, config)
    return len(disk.operations)  # type: ignore[attr-defined]


def fresh(base: Path | None, scratch: Path) -> Path:
    """Create a copy of `base` at `scratch` (an empty folder if there is no base)."""
    if scratch.exists():
        shutil.rmtree(scratch)
    if base is None:
        scratch.mkdir()
    else:
        shutil.copytree(base, scratch)
    return scratch


def make_base(root: Path, steps: Iterable[Step], config: StoreConfig = SMALL) -> Promise:
    """Create a store with contents, closed cleanly or left by a killed process, as the steps say."""
    root.mkdir()
    return run_until_killed(root, steps, Disk(), config)


def spread(count: int, most: int) -> Iterator[int]:
    """Yield at most `most` numbers of 0 to count - 1, evenly spread, including both ends."""
    if count <= most:
        yield from range(count)
    else:
        yield from sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


no_thread_warnings = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
