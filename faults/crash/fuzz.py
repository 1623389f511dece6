"""The mode `fuzz` of `make crash`: hostile bytes for everything that reads bytes.

They may lead only to errors of the store's own kinds, soon, and without much memory.

Inputs are valid files with bytes flipped, lengths and offsets replaced by harmful numbers, parts removed, doubled or
swapped; and meaningless bytes. They go to the readers of segments, records, units, index files, `state`, the journal,
`store.json`, `topics.json`, the store checkpoint and staging files. Every 200th input goes into a whole store, which is
then read, verified and opened. A list of named cases follows: links, FIFOs, topics that point outside the root,
decompression bombs. The compiled kernel is built with sanitizers and gets arguments that lie (`kernel_cases`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import struct
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from crash import turns
from crash.broker_logs import CASES as LEFT_BY_BROKERS
from crash.clocks import CASES as CLOCKS
from crash.counts import Counts, again
from crash.faults import quiet_threads
from crash.flips import TINY, Sample, _tree, make_samples
from crash.group_settings import GROUP_SETTINGS
from crash.harness import SMALL, batch_columns, die, scratch_folder
from crash.hostile_files import HOSTILE_FILES
from crash.judge import Verdict, read_queue
from crash.kernels import sanitized
from crash.memdisk import MemDisk
from crash.mutations import MOST_EDITS, mutated
from crash.renumbered import CASES as RENUMBERED
from crash.sessions import CASES as SESSIONS
from crash.strangers import CASES as STRANGERS
from messagestore import Message, MessageBatch, MessageIllegalError, MessageStore, StoreError
from messagestore.batches.staging import StagedChunks, StagingWriter
from messagestore.errors import CorruptionError
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files import index_check
from messagestore.files.checkpoint import StoreCheckpoint
from messagestore.files.disk import FilePool
from messagestore.files.index_file import IndexService
from messagestore.files.state import State
from messagestore.files.topics import Topics
from messagestore.format import record, record_columns
from messagestore.format.batch_record import parse as parse_batch
from messagestore.format.record_scan import scan
from messagestore.inspect.verify import verify
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.store_files import Identity

QUICK_COUNT = 100_000
KERNEL = "the kernel with sanitizers"
_KERNEL_COUNT = 5000
_SLOW_S = 5.0
_MEMORY = 256 << 20
_LONG_AGO: tuple[type[BaseException], ...] = (StoreError, OSError)


# ---- readers


class Target:
    """Something that reads bytes.

    Parameters
    ----------
    name : str
    seeds : list of bytes
        Valid inputs.
    read : callable
    weight : int
        How often it is chosen, relative to the others.
    """

    def __init__(self, name: str, seeds: list[bytes], read: Callable[[bytes], object], weight: int) -> None:
        self.name, self.seeds, self.read, self.weight = name, seeds, read, weight


def targets(samples: dict[str, Sample], folder: Path) -> list[Target]:
    trees = [_tree(samples[name]) for name in ("batches", "killed", "puts")]

    def of(prefix: str) -> list[bytes]:
        return [data for tree in trees for path, data in tree.items() if path.startswith(prefix)]

    logs = [data[: samples[name].end + 100] for name in ("batches", "killed", "puts") for data in of_one(samples[name])]
    records = [one for data in logs for one in split_records(data)]
    batches = [one for one in records if b'{"messagestore"' in one]
    memory = MemDisk(folder / "memory")
    return [
        Target("records", records, _read_record, 35),
        Target("segments", logs, _read_segment, 10),
        Target("BATCH records", batches, _read_batch, 10),
        Target("state slots", [d[i : i + 80] for d in of("spark/state") for i in (0, 512)], State.from_bytes, 10),
        Target("journals", of("spark/journal"), BatchJournal.from_bytes, 10),
        Target("checkpoints", of("checkpoint"), partial(_read_small, memory, "checkpoint", _read_checkpoint), 4),
        Target(
            "store.json", of("spark/store.json"), partial(_read_small, memory, "spark/store.json", _read_identity), 6
        ),
        Target(
            "topics.json", of("config/topics.json"), partial(_read_small, memory, "config/topics.json", _read_topics), 6
        ),
        Target("index files", of("index/"), partial(_read_small, memory, "index/20260101000000000", _read_index), 6),
        Target("staging files", [staged_bytes(folder)], partial(_read_staged, folder), 3),
    ]


def of_one(sample: Sample) -> list[bytes]:
    return [data for path, data in _tree(sample).items() if path.startswith("commitlog/")]


def split_records(log: bytes) -> list[bytes]:
    found, at = [], 0
    while at + 4 <= len(log) and (size := struct.unpack_from(">i", log, at)[0]) > 0:
        found.append(log[at : at + size])
        at += size
    return found


def _read_record(data: bytes) -> None:
    message = record.decode_message(data, physical_offset=int.from_bytes(data[28:36], "big", signed=True))
    assert len(message.body) <= len(data)


def _read_segment(data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    starts, heads, _ = scan(array, 0, file_bytes_left=len(data))
    if len(starts):
        sizes = heads["total_size"].astype(np.int32)
        record_columns.decode(array, starts, sizes, record_columns.COLUMNS, path="fuzz")


def _read_batch(data: bytes) -> None:
    parse_batch(data, int.from_bytes(data[28:36], "big", signed=True))


def _read_small(disk: MemDisk, name: str, read: Callable[[MemDisk, str], object], data: bytes) -> None:
    disk.put_file(name, data)
    read(disk, f"{disk.root}/{name}")


def _read_checkpoint(disk: MemDisk, path: str) -> StoreCheckpoint:
    return store_checkpoint.read(disk, path)


def _read_identity(disk: MemDisk, path: str) -> Identity | None:
    return Identity.read(disk, path)


def _read_topics(disk: MemDisk, path: str) -> None:
    topics = Topics(disk, disk.root)
    topics.load()
    topics.get("topic-app-1")
    topics.is_simple_queue("single")


def _read_index(disk: MemDisk, path: str) -> None:
    index = IndexService(
        os.path.dirname(path), FilePool(disk, 8), f"{disk.root}/spark",
        slot_count=TINY.max_hash_slot_num, max_entry_count=TINY.max_index_num,
    )  # fmt: skip
    index.load()
    index.search("topic-app-1", "k0-0", 32, 0, 1 << 62)
    index_check.unreachable(index.files)
    index_check.wrong_headers(index.files)


def staged_bytes(folder: Path) -> bytes:
    with StagingWriter(str(folder)) as writing:
        host = b"\x7f\0\0\1\0\0\0\0"
        writing.write(
            record_columns.encode(batch_columns("app-1", 0, 5), limits=SMALL, store_host=host, born_host=host)
        )
        staged = writing.finish()
    path = folder / staged.name
    data = path.read_bytes()
    path.unlink()
    staged_of["file"] = staged
    return data


def _read_staged(folder: Path, data: bytes) -> None:
    """Read a staging file that is not what its task wrote: CRCs show that, for small files and for large ones."""
    staged = replace(staged_of["file"], size=len(data))
    (folder / staged.name).write_bytes(data)
    for kept in (0, 1 << 20):
        with mock.patch("messagestore.batches.staging._KEPT_SIZE", kept):
            chunks = StagedChunks(str(folder), [staged])
            for index in range(len(chunks)):
                rows = chunks.read(index, with_data=True)
                found = b"".join(record_columns.stamped(rows.at(0, 0)))
                assert staged_of.setdefault("records", zlib.crc32(found)) == zlib.crc32(found), (
                    "other records were read"
                )


def _damaged_staging(folder: Path) -> None:
    """A bit is flipped in each part of a staging file: what is read all the same is what the task wrote."""
    data = staged_bytes(folder)
    _read_staged(folder, data)
    for place in range(0, len(data), 13):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        with contextlib.suppress(CorruptionError):
            _read_staged(folder, bytes(flipped))


staged_of: dict[str, Any] = {}


# ---- whole stores


def _whole_store(sample: Sample, root: Path, chance: random.Random, most_edits: int) -> None:
    """Replace some file of a store, then read, verify, and open the store for writing."""
    disk = MemDisk(root, sample.content)
    paths = sorted(path for path in _tree(sample) if not path.startswith("spark/writer"))
    for _ in range(chance.choice((1, 1, 2))):
        path = chance.choice(paths)
        disk.put_file(path, mutated(bytes(disk.node(path)), chance, most_edits))
    try:
        for look in (_read_all, lambda root, sample, disk: verify(root, disk=disk), _open):
            try:
                look(root, sample, disk)
            except _LONG_AGO:
                continue
    finally:
        die(root)


def _read_all(root: Path, sample: Sample, disk: MemDisk) -> None:
    with MessageStore.open_read_only(root, sample.config, disk=disk) as reader:
        for topic, queue_ids in reader.topics().items():
            for queue_id in queue_ids:
                read_queue(reader, topic, queue_id)
            reader.query_message(topic, "k0-0")


def _open(root: Path, sample: Sample, disk: MemDisk) -> None:
    with MessageStore.open(root, sample.config, disk=disk):
        pass


# ---- named cases


def _climbing_topics(folder: Path) -> None:
    with MessageStore.open(folder / "climb", SMALL) as store:
        for topic in ("../../etc", "/abs", "", ".", "..", "a/b", "a\0b", "a\nb", "x" * 128, "tópico", "a b"):
            try:
                store.put_message(Message(topic, b"x"))
            except MessageIllegalError:
                continue
            raise AssertionError(f"topic {topic!r} was taken")
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith("climb")) == ["climb"]


TOPICS_OF_A_BROKER = (
    "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC",
    "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", "TBW102", "rmq_sys_wheel_timer", "rmq_sys_spark_sink",
    "rmq_sys_REVIVE_LOG_c", "%LMQ%a",
)  # fmt: skip


def _topics_of_a_broker(folder: Path) -> None:
    """Put a user's message in a topic on which a broker acts: it is always refused, and the store opens again."""
    root = folder / "reserved"
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("plain", b"x"))
        for topic in TOPICS_OF_A_BROKER:
            columns = batch_columns.__wrapped__("app-1", 0, 5)  # its own: those that are kept are everybody's
            columns.topic = topic
            ways: dict[str, Callable[[], object]] = {
                "a put": partial(store.put_message, Message(topic, b"x")),
                "put_messages": partial(store.put_messages, MessageBatch.from_messages([Message(topic, b"x")])),
                "append_batch": partial(store.append_batch, columns),
                "create_topic": partial(store.create_topic, topic),
            }
            for way, call in ways.items():
                try:
                    call()
                except MessageIllegalError:
                    continue
                raise AssertionError(f"topic {topic!r} was taken by {way}")
    with MessageStore.open(root, SMALL) as store:
        assert sorted(store.topics()) == ["plain"]


def _strange_files(folder: Path) -> None:
    """Put a link, a FIFO or a folder where a file must be: it is refused, and not followed."""
    secret = folder / "secret"
    secret.write_bytes(b"not for you")
    for number, name in enumerate(
        ("commitlog/00000000000000000000", "spark/state", "spark/store.json", "lock", "checkpoint")
    ):
        for kind in ("link", "fifo", "folder"):
            root = folder / f"strange-{number}-{kind}"
            with MessageStore.open(root, SMALL) as store:
                store.put_message(Message("t", b"x", queue_id=0))
            (root / name).unlink()
            if kind == "link":
                (root / name).symlink_to(secret)
            elif kind == "fifo":
                os.mkfifo(root / name)
            else:
                (root / name).mkdir()
            try:
                with MessageStore.open(root, SMALL) as store:
                    store.put_message(Message("t", b"y", queue_id=0))
            except _LONG_AGO:
                pass
            die(root)
            assert secret.read_bytes() == b"not for you", f"{name}: a link was followed"
            if name != "lock":  # it holds no data, and `verify` ignores it
                assert verify_says(root), f"{name} {kind}: verify found nothing"


def verify_says(root: Path) -> bool:
    try:
        report = verify(root)
    except _LONG_AGO:
        return True
    return not report.ok


def _bombs(folder: Path) -> None:
    """Read a body from a broker's log that would inflate to a gibibyte: it is not inflated beyond the limit."""
    import reference

    root = folder / "bomb"
    with MessageStore.open(root, SMALL.replace(mapped_file_size_commit_log=1 << 22)):
        pass
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1024)) + packer.flush()
    data = reference.encode(topic="bomb", body=bomb, sys_flag=0x1 | 0x300, store_ms=1, born_ms=1)
    (root / "commitlog").mkdir(exist_ok=True)
    (root / "commitlog" / ("0" * 20)).write_bytes(data.ljust(1 << 22, b"\0"))
    (root / "consumequeue" / "bomb" / "0").mkdir(parents=True)
    (root / "consumequeue" / "bomb" / "0" / ("0" * 20)).write_bytes(reference.unit(0, len(data), 0).ljust(320, b"\0"))
    tracemalloc.start()
    try:
        with MessageStore.open_read_only(root, SMALL) as reader:
            try:
                for message in reader.get_message("bomb", 0, 0, 10).messages:
                    assert len(message.body) <= 64 << 20
            except _LONG_AGO:
                pass
            try:
                read_queue(reader, "bomb", 0)
            except _LONG_AGO:
                pass
        assert tracemalloc.get_traced_memory()[1] < _MEMORY, "a bomb was inflated"
    finally:
        tracemalloc.stop()


NAMED = {
    "climbing topics": _climbing_topics,
    "topics of a broker": _topics_of_a_broker,
    "links, FIFOs and folders": _strange_files,
    "a decompression bomb": _bombs,
    "damaged staging files": _damaged_staging,
    **STRANGERS,
    **SESSIONS,
    **CLOCKS,
    **RENUMBERED,
    **LEFT_BY_BROKERS,
    **GROUP_SETTINGS,
    **HOSTILE_FILES,
}


# ---- the mode of `make crash`


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run `QUICK_COUNT` inputs, or as many as the seconds allow; a case is an input's number, or one of `NAMED`.

    An input that fails is shown again with fewer edits: `17;edits 2`.
    """
    counts, until_s = Counts(), time.monotonic() + seconds
    with scratch_folder() as folder, quiet_threads():
        ground = Ground(seed, targets(make_samples(folder / "store"), folder), make_samples(folder / "whole"), folder)
        _read_staged(folder, ground.chosen[-1].seeds[0])

        begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        if case and case not in NAMED and case != KERNEL:
            number, _, words = case.partition(";")
            _one(ground, int(number), counts, int(words.removeprefix("edits")) if words else None)

        for number in itertools.count(part[0], part[1]):
            if case or (number >= QUICK_COUNT // turns.share if quick else time.monotonic() > until_s):
                break
            _one(ground, number, counts)

        if not case and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin > _MEMORY >> 10:
            counts.fail("more than 256 MiB of memory were used", again("fuzz", seed, ""))

        if part[0] == part[1] - 1 and case in ("", KERNEL):
            count = _KERNEL_COUNT if quick else _KERNEL_COUNT * 20
            counts.add(sanitized(folder, seed, count, again("fuzz", seed, KERNEL)))

        for number, (name, look) in enumerate(NAMED.items()):
            if name == case if case else number % part[1] == part[0]:
                _named(name, look, Path(tempfile.mkdtemp(dir=folder)), counts, seed)
    return counts


@dataclass(frozen=True)
class Ground:
    """The source of the inputs, and their readers."""

    seed: int
    chosen: list[Target]
    samples: dict[str, Sample]
    folder: Path

    def read(self, number: int, most_edits: int = MOST_EDITS) -> tuple[str, Verdict]:
        """Read one input; return who read it, and what is wrong."""
        chance, verdict, name = random.Random(f"{self.seed} {number}"), Verdict(), "whole store"
        began_s = time.perf_counter()

        try:
            if number % 200 == 0:
                sample = self.samples[chance.choice(("batches", "killed", "puts"))]
                _whole_store(sample, self.folder / "whole", chance, most_edits)
            else:
                target = chance.choices(self.chosen, [target.weight for target in self.chosen])[0]
                name = target.name
                if chance.random() < 0.02:
                    data = chance.randbytes(chance.randrange(300))
                else:
                    data = mutated(chance.choice(target.seeds), chance, most_edits)
                target.read(data)
        except _LONG_AGO:
            pass
        except Exception as error:  # noqa: BLE001 - whatever else comes is what is looked for
            verdict.misread.append(f"{type(error).__name__}: {error}")

        took_s = time.perf_counter() - began_s
        if took_s > _SLOW_S:
            verdict.misread.append(f"took {took_s:.1f} s")
        return name, verdict


def _one(ground: Ground, number: int, counts: Counts, edits: int | None = None) -> None:
    name, verdict = ground.read(number, MOST_EDITS if edits is None else edits)
    if not verdict.ok and edits is None:
        edits = next(count for count in range(MOST_EDITS + 1) if not ground.read(number, count)[1].ok)
        verdict = ground.read(number, edits)[1]
    key = f"{number}{'' if edits is None else f';edits {edits}'}"
    counts.take("fuzz inputs", verdict, f"{name}, input {key}", again("fuzz", ground.seed, key))


def _named(name: str, look: Callable[[Path], None], folder: Path, counts: Counts, seed: int) -> None:
    verdict = Verdict()
    try:
        look(folder)
    except (AssertionError, StoreError, OSError) as error:
        verdict.misread.append(f"{type(error).__name__}: {error}")
    counts.take("hostile stores", verdict, name, again("fuzz", seed, name))
