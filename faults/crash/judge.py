"""Judges a store after a crash: the next process must find everything that was promised, and nothing else.

`judge` examines one image in memory as the next processes would: a reader that comes first; the next writer, which
recovers; the batches again, as Spark would replay them; close; another open. In between and at the end, the checker
that shares no code with the store (`crash.checker`) examines every byte, and the messages are counted from their
bodies.

Faults are counted as `lost` (promised but missing), `duplicated` (stored twice), or `misread` (half a batch, wrong
order, damage that nobody reports, or anything else that the checker finds).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crash import checker, hostile
from crash.harness import Promise, Step, append_encoded, die, payload
from crash.imitate import another_boot
from crash.memdisk import MemDisk, Tree
from crash.power_cut import Folder
from crash.simdisk import RecordingDisk
from crash.workloads import prefix_faults
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    LostBatchesError,
    MessageStore,
    ReadOnlyStore,
    StoreConfig,
    StoreError,
)
from messagestore.batches.append import APPENDED, KNOWN
from messagestore.files.state import State, StateFile
from messagestore.inspect.verify import verify
from messagestore.recovery.report import RecoveryReport


@dataclass
class Verdict:
    """What is wrong with the result; usually nothing."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    misread: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.misread)

    def __str__(self) -> str:
        return "; ".join(
            f"{kind}: {'; '.join(map(str, found[:3]))}{' ...' if len(found) > 3 else ''}"
            for kind, found in vars(self).items()
            if found
        )


@dataclass(frozen=True)
class Crash:
    """What one crash left, and what must be there.

    Parameters
    ----------
    content : Folder
    promise : Promise
        `puts` and `batches`: what must be there; after a kill, everything that was accepted.
    steps : sequence of Step
        Everything that was done since the store was created, in order; what is there is a prefix of it.
    config : StoreConfig
    power_cut : bool
        The next process runs in another boot. False: the process was killed, and the page cache is intact.
    left : (RecordingDisk, int, Promise) | None
        For a kill: the disk, how many operations had been done, and what a power cut at this point must leave.
    flushed_end : int
        What readers with `readUpTo=flushed` had seen: the log must reach at least this far.
    """

    content: Folder
    promise: Promise
    steps: Sequence[Step]
    config: StoreConfig
    power_cut: bool = True
    left: tuple[RecordingDisk, int, Promise] | None = None
    flushed_end: int = 0


def judge(crash: Crash, root: Path, *, thorough: bool = False, briefly: bool = False) -> Verdict:
    """Do everything that the next processes do; return what the checkers report.

    Parameters
    ----------
    crash : Crash
    root : Path
        The path that the store sees; only lock files really exist there.
    thorough : bool
        Also check with the store's own reading and `verify`, which is slower.
    briefly : bool
        Skip the last open, which must not change a byte.
    """
    verdict = Verdict()
    disk = MemDisk(root, crash.content)
    with another_boot() if crash.power_cut else contextlib.nullcontext():
        try:
            _next_processes(crash, root, disk, verdict, thorough)
            if not briefly:
                _open_again(crash, root, disk, verdict)
        except (StoreError, OSError, AssertionError) as error:
            verdict.misread.append(f"{type(error).__name__}: {error}")
        finally:
            die(root)
    return verdict


def _next_processes(crash: Crash, root: Path, disk: MemDisk, verdict: Verdict, thorough: bool) -> None:
    if not crash.power_cut and "spark/state" in disk.tree():
        note_faults(verdict, checker.check(disk.tree(), settled=False), "before recovery")

    seen = _reader(crash, root, disk, verdict) if thorough and "commitlog/" in disk.tree() else None
    config = crash.config
    before, state = disk.tree(), _idle_state(disk, root)

    with MessageStore.open(root, config, disk=disk) as store:
        if state is not None and store.report is not None:
            _nothing_was_in_flight(state, store.report, before, disk, verdict)
        if store.writer.end.physical_offset < crash.flushed_end:
            verdict.lost.append(f"flushed up to {crash.flushed_end}, and {store.writer.end.physical_offset} is left")
        found = checker.check(disk.tree())
        note_faults(verdict, found, "after recovery")
        note_content(verdict, found.bodies, found.queues, crash.promise, crash.steps)
        _note_texts(store, crash, verdict)

        if seen is not None:
            _note_reader(seen, found, crash.promise, verdict)
        if thorough:
            _same_by_reading(store, found.queues, crash.promise, verdict)
        if _replay(store, crash.promise, disk, verdict, set(found.bodies)):
            found = checker.check(disk.tree())
            note_faults(verdict, found, "after replay")
            note_content(verdict, found.bodies, found.queues, crash.promise, (), everything=True)

    closed = disk.tree()
    note_faults(verdict, checker.check(closed), "after close")
    if "abort" in closed:
        verdict.misread.append("abort is there after close")

    if thorough:
        report = verify(root, disk=disk)
        if not report.ok:
            verdict.misread.append(f"verify: {report.findings[:3]}")


def _note_texts(store: MessageStore, crash: Crash, verdict: Verdict) -> None:
    """Check that hostile puts show the keys, tags and properties that were put.

    Only after a power cut, and only in a put that was ASYNC or not acknowledged, may there be zeros instead: no CRC
    covers them, and nothing else proves that they were lost.
    """
    if not any(hostile.is_hostile(text) for text in crash.promise.maybe_puts):
        return
    durable = set(crash.promise.puts)
    for topic, queue_ids in store.topics().items():
        for queue_id in queue_ids:
            for message in store.get_message(topic, queue_id, 0, 1000).messages:
                body = message.body.decode(hostile.ENCODING)
                if hostile.is_hostile(body) and (not crash.power_cut or body in durable):
                    found = {"keys": message.keys, "tags": message.tags, "properties": dict(message.properties)}
                    if found != hostile.texts(int(body.split("/")[1])):
                        verdict.misread.append(f"{body[:14]}: other keys, tags or properties than were put")


def _idle_state(disk: MemDisk, root: Path) -> State | None:
    """Return what `messagestore status` calls "idle, nothing in flight"."""
    if not disk.exists(f"{root}/abort"):
        return None
    state = StateFile(disk, f"{root}/spark/state").read()
    return state if state is not None and state.idle else None


def _nothing_was_in_flight(state: State, report: RecoveryReport, before: Tree, disk: MemDisk, verdict: Verdict) -> None:
    """Check that recovery has nothing to repair where `state` says that nothing was in flight."""
    changed = [path for path in differing(before, disk.tree()) if path.startswith(("commitlog/", "consumequeue/"))]
    if changed or report.zeroed_bytes or report.end != state.visible_end:
        verdict.misread.append(
            f"state says idle up to {state.visible_end}; recovery ended at {report.end}, cut {report.zeroed_bytes} "
            f"bytes, changed {changed}"
        )


def _open_again(crash: Crash, root: Path, disk: MemDisk, verdict: Verdict) -> None:
    closed = disk.tree()
    with MessageStore.open(root, crash.config, disk=disk):
        pass
    changed = [path for path in differing(closed, disk.tree()) if not path.startswith("spark/")]
    if changed:
        verdict.misread.append(f"opening again changed {changed}")


def _reader(crash: Crash, root: Path, disk: MemDisk, verdict: Verdict) -> set[bytes]:
    """Read before any writer comes: the reader sees a prefix of what was done."""
    before = disk.tree()
    with MessageStore.open_read_only(root, crash.config, disk=disk) as reader:
        bodies: set[bytes] = set()
        for topic, queue_ids in reader.topics().items():
            if topic != checker.BATCH_TOPIC:
                for queue_id in queue_ids:
                    bodies |= set(_left_in(reader, topic, queue_id, crash.promise))
    verdict.misread += [f"reader: {fault}" for fault in prefix_faults(bodies, crash.steps, crash.promise.expired)[1]]
    if disk.tree() != before:
        verdict.misread.append("a reader changed bytes")
    return bodies


def _note_reader(seen: set[bytes], found: checker.Checked, promise: Promise, verdict: Verdict) -> None:
    """Check that a reader before recovery saw a part of what recovery keeps, with every acknowledged SYNC_FLUSH batch.

    The record of an ASYNC_FLUSH batch does not show that a replay in SYNC_FLUSH made it durable.
    """
    gone = seen - set(found.bodies)
    verdict.lost += sorted(f"{body[:40]!r}, which a reader saw before recovery" for body in gone)
    for _, batch, rows in found.batches:
        promised = batch["flush"] == SYNC_FLUSH and (batch["app"], batch["version"]) in promise.batches
        if promised and not {row.body for row in rows} - promise.expired <= seen:
            verdict.lost.append(f"batch {batch['app'], batch['version']}, for a reader that came before recovery")


def read_queue(store: object, topic: str, queue_id: int, begin: int = 0) -> list[bytes]:
    """Return the bodies of a queue by the store's own reading, from its first message on."""
    found: list[bytes] = []
    for table in store.read(topic, queue_id, begin, columns=("body",)):  # type: ignore[attr-defined]
        found += table.column("body").to_pylist()
    return found


def _left_in(store: ReadOnlyStore, topic: str, queue_id: int, promise: Promise) -> list[bytes]:
    """Return the bodies of a queue. Where retention was at work, they begin where the store says that it begins."""
    return read_queue(store, topic, queue_id, store.min_offset(topic, queue_id) if promise.expired else 0)


def _same_by_reading(
    store: MessageStore, queues: dict[tuple[str, int], list[bytes]], promise: Promise, verdict: Verdict
) -> None:
    for (topic, queue_id), bodies in queues.items():
        if _left_in(store, topic, queue_id, promise) != bodies:
            verdict.misread.append(f"{topic}/{queue_id}: the store reads other messages than are in its log")


def _replay(store: MessageStore, promise: Promise, disk: MemDisk, verdict: Verdict, bodies: set[bytes]) -> bool:
    """Send the batches again, as Spark would; return whether anything was appended."""
    appended = False
    for app in sorted({app for app, _ in promise.rows}):
        versions = sorted(version for name, version in promise.rows if name == app)
        there = [v for v in versions if _is_known(promise, app, v, bodies)]
        # A retention that failed half-way may have taken the rows of a batch that the store rightly knows.
        unsure = {v for v in versions if v not in there and payload(app, v, 0) in promise.expired}
        lost = [v for v in versions if promise.rows[(app, v)] and v not in there and v not in unsure]
        if lost and there and max(there) < min(lost):
            _gap_is_told(store, app, versions[-1] + 1, disk, verdict)
        for version in [v for v in versions if v not in there[:-1]]:  # Spark rewrites its last batch, not all of them
            row_count = promise.rows[(app, version)]
            flush = SYNC_FLUSH if (app, version) in promise.batches else ASYNC_FLUSH
            status = append_encoded(store, app, version, row_count, flush)
            if row_count and version not in unsure and status != (KNOWN if version in there else APPENDED):
                wrong = verdict.duplicated if version in there else verdict.lost
                wrong.append(f"batch {(app, version)}: is {'' if version in there else 'not '}there, and was {status}")
            appended |= status == APPENDED
    return appended


def _is_known(promise: Promise, app: str, version: int, bodies: set[bytes]) -> bool:
    """Whether the store must know a batch: its rows are there, or retention has deleted them."""
    rows = {payload(app, version, row) for row in range(promise.rows[(app, version)])}
    return bool(rows & bodies) or bool(rows & promise.expired and (app, version) in promise.batches)


def _gap_is_told(store: MessageStore, app: str, version: int, disk: MemDisk, verdict: Verdict) -> None:
    """If batches are missing (ASYNC_FLUSH) and Spark continues after them, it gets an error and nothing is written."""
    before = disk.tree()
    try:
        append_encoded(store, app, version, 1, ASYNC_FLUSH)
        verdict.lost.append(f"{app}: version {version} was appended over a gap")
    except LostBatchesError:
        if disk.tree() != before:
            verdict.misread.append("a refused batch changed bytes")


# ---- what must hold


def note_faults(verdict: Verdict, found: checker.Checked, when: str) -> None:
    """Note what the checker found."""
    verdict.misread += [f"{when}: {fault}" for fault in found.faults]


def note_content(
    verdict: Verdict,
    bodies: Sequence[bytes],
    queues: dict[tuple[str, int], list[bytes]],
    promise: Promise,
    steps: Sequence[Step],
    *,
    everything: bool = False,
) -> int:
    """Check that nothing promised is lost or duplicated, and that batches and order are intact.

    The result says how much is there.
    """
    verdict.duplicated += [repr(body) for body, count in Counter(bodies).items() if count > 1]

    there = set(bodies)
    texts = {body.decode(hostile.ENCODING) for body in there if body.startswith(b"put/")}
    gone = {body.decode(hostile.ENCODING) for body in promise.expired}
    verdict.lost += sorted(text[:40] for text in set(promise.puts) - texts - gone)
    verdict.misread += sorted(f"{text[:40]}, that nobody put" for text in texts - set(promise.maybe_puts))

    wanted = promise.maybe_batches if everything else promise.batches
    for (app, version), row_count in promise.rows.items():
        rows = {payload(app, version, row) for row in range(row_count)} - promise.expired
        count = len(rows & there)
        if count not in (0, len(rows)):
            verdict.misread.append(f"batch {(app, version)}: {count} of {row_count} rows")
        elif count < len(rows) and (app, version) in wanted:
            verdict.lost.append(f"batch {(app, version)}")

    for key, found in queues.items():
        order = [tuple(int(n) for n in body.split(b"/")[1:3]) for body in found if not body.startswith(b"put/")]
        if order != sorted(order):
            verdict.misread.append(f"{key}: out of order")

    kept, faults = prefix_faults(there, steps, promise.expired)
    verdict.misread += faults
    return kept


def differing(one: Tree, other: Tree) -> Iterator[str]:
    """Yield the paths that differ."""
    yield from sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def killed(promise: Promise) -> Promise:
    """Return what must exist if the process was only killed: everything that returned, in ASYNC_FLUSH, too."""
    return Promise(
        puts=[body for body in promise.maybe_puts if body in promise.accepted],
        maybe_puts=promise.maybe_puts,
        batches={key for key in promise.maybe_batches if key in promise.accepted},
        maybe_batches=promise.maybe_batches,
        rows=promise.rows,
        accepted=promise.accepted,
        expired=promise.expired,
    )
