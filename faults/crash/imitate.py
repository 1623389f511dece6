"""Imitates a Java broker through files, and also other processes and other boots.

The imitations use only `struct` and `tests/reference.py`, so that no Java is needed and no code is shared with the
store: a broker that opens a store, appends, closes or dies. The module also provides other processes (as objects with
their own locks), other boots, and what a reader sees.
"""

from __future__ import annotations

import binascii
import contextlib
import itertools
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reference
from crash.harness import APP, SMALL, all_messages, batch_columns
from crash.simdisk import KillDisk, Operation
from messagestore import SYNC_FLUSH, BatchRequest, BatchResult, Message, MessageStore, PutMessageResult, StoreConfig
from messagestore import session as attached_store
from messagestore.batches.append import Chunks, append_batch
from messagestore.files import state
from messagestore.files.disk import Disk
from messagestore.format import record_columns
from messagestore.session import AttachedStore
from messagestore.writer.log_writer import LogWriter

BROKER_PID = "4711"

# ---- the log, as every reader of the format sees it


def segments(root: Path) -> list[Path]:
    return sorted((root / "commitlog").glob("*"))


def record_at(root: Path, physical_offset: int) -> bytes | None:
    """Return the bytes of the valid record (or BLANK) at a place, by the rules of checkMessageAndReturnSize."""
    for path in segments(root):
        first, size = int(path.name), path.stat().st_size
        if first <= physical_offset < first + size:
            data = path.read_bytes()[physical_offset - first :]
            break
    else:
        return None

    total, magic = struct.unpack_from(">iI", data.ljust(8, b"\0"))
    if magic == reference.BLANK and total == len(data):
        return data
    if magic not in (reference.V1, reference.V2) or not 91 <= total <= len(data) - 8:
        return None

    try:
        found = reference.decode(data[:total])
    except (struct.error, UnicodeDecodeError, AssertionError):
        return None

    if found["physical_offset"] != physical_offset or (
        found["body"] and reference.body_crc(found["body"]) != found["body_crc"]
    ):
        return None
    return data[:total]


def walk(root: Path, start: int = 0) -> tuple[list[dict], int]:
    """Return all records from a place on, and where the log ends."""
    records, position = [], start
    while (data := record_at(root, position)) is not None:
        if struct.unpack_from(">I", data, 4)[0] == reference.BLANK:
            if not any(int(path.name) == position + len(data) for path in segments(root)):
                break
        else:
            records.append(reference.decode(data))
        position += len(data)
    return records, position


def units(root: Path, topic: str, queue_id: int) -> list[tuple[int, int, int]]:
    """Return all units of a queue up to the first zero one."""
    data = b"".join(p.read_bytes() for p in sorted((root / "consumequeue" / topic / str(queue_id)).glob("*")))
    found = []
    for place, size, tags_code in struct.iter_unpack(">qiq", data):
        if size <= 0:
            break
        found.append((place, size, tags_code))
    return found


def file_bytes(root: Path, physical_offset: int, size: int) -> bytes:
    for path in segments(root):
        first = int(path.name)
        if first <= physical_offset < first + path.stat().st_size:
            return path.read_bytes()[physical_offset - first :][:size]
    return b""


def overwrite(root: Path, physical_offset: int, data: bytes) -> None:
    """Write bytes into the log, as damage or as another process's append."""
    for path in segments(root):
        first = int(path.name)
        if first <= physical_offset < first + path.stat().st_size:
            with open(path, "r+b") as file:
                file.seek(physical_offset - first)
                file.write(data)
            return
    raise ValueError(f"no segment holds {physical_offset}")


def flip(root: Path, physical_offset: int, bit: int = 1) -> None:
    overwrite(root, physical_offset, bytes([file_bytes(root, physical_offset, 1)[0] ^ bit]))


# ---- a Java broker


class Broker:
    """A broker that opened the store: it took the log's end from the files, and truncates without zeroing.

    Parameters
    ----------
    root : Path
    end : int | None
        Where it thinks the log ends; None: the end that it finds from the first segment on.
    starts : bool
        False: it has only loaded the store; `start` follows.
    """

    def __init__(self, root: Path, config: StoreConfig = SMALL, end: int | None = None, *, starts: bool = True) -> None:
        self.root = root
        self.config = config
        records, found = walk(root)
        self.end = found if end is None else end
        self.next: dict[tuple[str, int], int] = {}
        self.now_ms = time.time_ns() // 1_000_000
        for record in records:
            if record["physical_offset"] < self.end:
                self.next[(record["topic"], record["queue_id"])] = record["queue_offset"] + 1
                self.now_ms = max(self.now_ms, record["store_timestamp_ms"])
        if starts:
            self.start()

    def start(self) -> None:
        """Begin to write."""
        (self.root / "abort").write_text(BROKER_PID)

    def put(
        self,
        topic: str,
        body: bytes,
        queue_id: int = 0,
        *,
        unit: bool = True,
        store_ms: int | None = None,
        sys_flag: int = 0,
        **fields: Any,
    ) -> int:
        """Append one message and its unit; return its place. PREPARED and ROLLBACK have number 0 and no unit."""
        half = sys_flag & 0xC in (0x4, 0xC)
        number = 0 if half else self.next.get((topic, queue_id), 0)
        fields["sys_flag"] = sys_flag

        data = self.encoded(topic, body, queue_id, number, store_ms, **fields)

        size = self.config.mapped_file_size_commit_log
        left = size - self.end % size
        if len(data) + 8 > left:
            overwrite(self.root, self.end, struct.pack(">iI", left, reference.BLANK))
            self.end += left
            data = self.encoded(topic, body, queue_id, number, store_ms, **fields)

        path = self.root / "commitlog" / f"{self.end // size * size:020d}"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes(size))
        overwrite(self.root, self.end, data)

        if not half:
            if unit:
                self.unit(topic, queue_id, number, self.end, len(data))
            self.next[(topic, queue_id)] = number + 1
        self.end += len(data)
        return self.end - len(data)

    def delete_topic(self, topic: str) -> None:
        """Delete the topic's queues; its records stay in the log, and its numbers begin at 0 again."""
        shutil.rmtree(self.root / "consumequeue" / topic)
        self.next = {key: number for key, number in self.next.items() if key[0] != topic}

    def recover(self) -> None:
        """Recover after a kill: records from the checkpoint's segment on get units by RocketMQ's rules.

        A queue ignores what is not after the record of its last unit. Of the rest, it drops a record whose number it
        has passed, unless that is 0, and puts every other record after its last unit, whatever its number. Therefore
        the records of a deleted topic come back.
        """
        found = walk(self.root)[0]
        checkpoint_ms = min(read_checkpoint(self.root)[:2]) - 3000
        times = {record["physical_offset"]: record["store_timestamp_ms"] for record in reversed(found)}
        starts = [int(path.name) for path in segments(self.root)]
        start = max((at for at in starts if 0 < times.get(at, 0) <= checkpoint_ms), default=0)

        there = {
            (path.parent.name, int(path.name)): units(self.root, path.parent.name, int(path.name))
            for path in (self.root / "consumequeue").glob("*/*")
        }
        for record in found:
            known = there.setdefault((record["topic"], record["queue_id"]), [])
            number, at = record["queue_offset"], record["physical_offset"]
            if record["sys_flag"] & 0xC in (0x4, 0xC) or at < start or (known and at <= known[-1][0]):
                continue

            if number and number < len(known):
                continue
            tags = reference.java_hash(record["all_properties"].get("TAGS", ""))
            self.unit(record["topic"], record["queue_id"], len(known), at, record["size"], tags)
            known.append((at, record["size"], tags))

        self.next = {key: len(known) for key, known in there.items()}

    def encoded(
        self, topic: str, body: bytes, queue_id: int, number: int, store_ms: int | None, **fields: Any
    ) -> bytes:
        now = self.now_ms if store_ms is None else store_ms
        return reference.encode(
            topic=topic,
            body=body,
            queue_id=queue_id,
            queue_offset=number,
            physical_offset=self.end,
            store_ms=now,
            born_ms=now,
            **fields,
        )

    def unit(self, topic: str, queue_id: int, number: int, physical_offset: int, size: int, tags_code: int = 0) -> None:
        file_size = self.config.mapped_file_size_consume_queue
        start = number * 20 // file_size * file_size
        path = self.root / "consumequeue" / topic / str(queue_id) / f"{start:020d}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(file_size))
        with open(path, "r+b") as file:
            file.seek(number * 20 - start)
            file.write(reference.unit(physical_offset, size, tags_code))

    def checkpoint(self, store_ms: int | None = None) -> None:
        """Write what its flush threads write from time to time."""
        write_checkpoint(self.root, self.now_ms if store_ms is None else store_ms)

    def close(self) -> None:
        """Shut down cleanly."""
        self.checkpoint()
        (self.root / "abort").unlink()


def write_checkpoint(root: Path, physic_ms: int, logics_ms: int | None = None) -> None:
    data = struct.pack(">qqq", physic_ms, physic_ms if logics_ms is None else logics_ms, physic_ms)
    (root / "checkpoint").write_bytes(data.ljust(4096, b"\0"))


def read_checkpoint(root: Path) -> tuple[int, int, int, int, int]:
    if not (root / "checkpoint").exists():
        return 0, 0, 0, 0, 0
    return struct.unpack_from(">qqqqq", (root / "checkpoint").read_bytes())


def remake_queue(
    root: Path, topic: str, queue_id: int, wanted: list[tuple[int, int, int]], config: StoreConfig = SMALL
) -> None:
    """Create a queue with these units and nothing else."""
    size = config.mapped_file_size_consume_queue
    folder = root / "consumequeue" / topic / str(queue_id)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*"):
        path.unlink()
    data = b"".join(reference.unit(*unit) for unit in wanted)
    for start in range(0, len(data), size):
        (folder / f"{start:020d}").write_bytes(data[start : start + size].ljust(size, b"\0"))


# ---- our own state, read without the store's code


def read_slot(root: Path) -> dict[str, int]:
    """Return the slot of `spark/state` that counts."""
    data, best = (root / "spark" / "state").read_bytes(), None
    names = (
        "counter", "in_flight", "visible_end", "clean_end", "anchor_position", "anchor_size", "anchor_crc", "boot_hash",
        "flags", "writer_pid",
    )  # fmt: skip
    for position in (0, 512):
        *values, crc = struct.unpack_from(">qqqqqiIIIiI", data, position)
        if crc == binascii.crc32(data[position : position + 60]) and (best is None or values[0] > best["counter"]):
            best = dict(zip(names, values, strict=True))
    assert best is not None
    return best


# ---- processes and boots


class Process:
    """Another process, as far as the store can tell: it has its own locks, descriptors and caches."""

    def __init__(self, root: Path, config: StoreConfig = SMALL, disk: Disk | None = None) -> None:
        self.root = root
        self.store = AttachedStore(os.path.realpath(root), config, disk or Disk())

    def batch(
        self, app: str = APP, version: int = 0, rows: int = 5, flush: str = SYNC_FLUSH, **options: str
    ) -> BatchResult:
        """Commit once, as Spark's sink does."""
        with self.store.writing(f"{app} {version}") as writer:
            return commit(writer, app, version, rows, flush, **options)

    def syncs_late(self) -> bool:
        """Let the flush thread sync after the process has released the writer lock, when the clean end is due.

        Returns
        -------
        bool
            Whether the small files that all writers share are unchanged.
        """
        writer, flush = self.store.writer, self.store.flush
        if writer is None or flush is None:
            return True
        files = [self.root / name for name in ("spark/state", "spark/journal", "checkpoint")]
        before = [file.read_bytes() if file.exists() else b"" for file in files]
        writer.clean_end.moved_s -= 3600
        flush._flush()
        return [file.read_bytes() if file.exists() else b"" for file in files] == before

    def session(self) -> MessageStore:
        """Open a session in this process."""
        path = os.path.realpath(self.root)
        attached_store._stores[path] = self.store
        try:
            return MessageStore.open(self.root, self.store.config, disk=self.store.disk)
        finally:
            attached_store._stores.pop(path, None)

    def detach(self) -> None:
        self.store.detach()

    def die(self) -> None:
        """Let the process die; nothing is cleaned up."""
        self.store._drop()


def commit(
    writer: LogWriter, app: str = APP, version: int = 0, rows: int = 5, flush: str = SYNC_FLUSH, **options: str
) -> BatchResult:
    """Append the rows of one version of an app."""
    host = writer.files.store_host
    chunk = record_columns.encode(
        batch_columns(app, version, rows), limits=writer.files.config, store_host=host, born_host=host
    )
    fields = {"version_source": "spark", **options}
    request = BatchRequest(app_id=app, version=version, flush_disk_type=flush, **fields)  # type: ignore[arg-type]
    return append_batch(writer, Chunks([chunk]), request)


def put(store: MessageStore, body: str, topic: str = "single", queue_id: int = 0) -> PutMessageResult:
    return store.put_message(Message(topic, body.encode(), queue_id=queue_id))


@contextlib.contextmanager
def another_boot(value: int = 77) -> Iterator[None]:
    """Pretend that the machine was restarted: what was only in the page cache may be lost."""
    before = state.boot_hash()
    state._boot_hash = value
    try:
        yield
    finally:
        state._boot_hash = before


def seen(root: Path, config: StoreConfig = SMALL) -> dict[tuple[str, int], list[str]]:
    """Return what a reader that starts now sees."""
    with MessageStore.open_read_only(root, config) as store:
        found = all_messages(store)  # type: ignore[arg-type]
    return {key: [body.decode() for body in bodies] for key, bodies in found.items() if bodies}


def rows_seen(root: Path, app: str = APP, config: StoreConfig = SMALL) -> dict[int, int]:
    """Return version -> how many of its rows a reader sees."""
    counts: dict[int, int] = {}
    for (topic, _), bodies in seen(root, config).items():
        if topic == f"topic-{app}":
            for body in bodies:
                version = int(body.split("/")[1])
                counts[version] = counts.get(version, 0) + 1
    return counts


def kill_when(disk: KillDisk, when: Callable[[Operation], bool], *, nth: int = 1) -> None:
    """Let the process die in the nth operation of a kind."""
    earlier, count = disk.before, itertools.count(1)

    def dying(operation: Operation) -> None:
        if earlier is not None:
            earlier(operation)
        if not disk.dead and when(operation) and next(count) == nth:
            disk.kill_at = len(disk.operations)

    disk.before = dying


def log_sync(operation: Operation) -> bool:
    return operation.name == "fdatasync" and "/commitlog/" in operation.path


def log_write(operation: Operation) -> bool:
    return operation.name == "pwrite" and "/commitlog/" in operation.path


def seal(operation: Operation) -> bool:
    """Whether the operation writes the first eight bytes of a BATCH record, which are written last."""
    return log_write(operation) and operation.detail.startswith("8 bytes")


def dispatch(operation: Operation) -> bool:
    return "/consumequeue" in operation.path or "/consumequeue" in operation.detail
