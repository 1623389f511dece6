"""Power cuts, failing disks and full disks, at every operation: nothing acknowledged is lost, nothing is there in half.

Power cuts: a workload runs once on a disk that records it; the folder is then built as a power cut at any time may have
left it (`crash.power_cut`), and another boot looks at it: first a reader that comes before any writer, then the next
writer, with everything that `harness.check_store` asks for. In ASYNC_FLUSH only the newest batches and puts may be gone.

Failing disks: operation n fails, for n = 0, 1, 2, ... The process lives on: it must not acknowledge what is not safe, not
sync again what failed to sync, and stay of use where the disk was only full.

Some cuts and operations here, all of them in the tests that are marked `slow`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from crash.harness import (
    SMALL,
    Promise,
    Step,
    all_messages,
    check_store,
    die,
    do_step,
    fresh,
    make_base,
    no_thread_warnings,
    payload,
    run_steps,
    spread,
)
from crash.imitate import Process, another_boot, dispatch, kill_when, log_write, overwrite, seal
from crash.simdisk import MODES, Image, KillDisk, Killed, Operation, RecordingDisk
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    CorruptionError,
    Message,
    MessageStore,
    StoreConfig,
    StoreError,
    StorePoisonedError,
)

pytestmark = no_thread_warnings

ASYNC = SMALL.replace(flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=20)
FILLED: list[Step] = [
    ("open",),
    ("put", 0, "single", 0),
    ("put", 1, "single", 1),
    ("batch", "app-1", 0, 30, SYNC_FLUSH),
    ("put", 2, "single", 0),
    ("close",),
]


def batch(version: int, rows: int, flush: str = SYNC_FLUSH, app: str = "app-1") -> Step:
    return ("batch", app, version, rows, flush)


def put(number: int, queue_id: int = 0, topic: str = "single") -> Step:
    return ("put", number, topic, queue_id)


@dataclass(frozen=True)
class Workload:
    """What a process does between its open and its close."""

    steps: tuple[Step, ...]
    config: StoreConfig = SMALL

    @property
    def all_steps(self) -> list[Step]:
        return [("open",), *self.steps, ("close",)]


WORKLOADS = {
    "single puts": Workload((put(10), put(11, 1), put(12), put(13, 0, "new"))),
    "puts side by side": Workload((("puts", 10, 5, "single", 0), ("puts", 20, 3, "new", 1))),
    "async puts": Workload((put(10), put(11, 1), put(12), ("puts", 20, 4, "new", 1), put(13)), ASYNC),
    "async puts over segments": Workload(tuple(("big_put", 100 + i, 5000) for i in range(6)), ASYNC),
    "batches": Workload((batch(1, 20), batch(2, 20))),
    "async batches": Workload((batch(1, 8, ASYNC_FLUSH), batch(2, 8, ASYNC_FLUSH), batch(3, 8, ASYNC_FLUSH))),
    "async, then sync": Workload((batch(1, 10, ASYNC_FLUSH), batch(2, 10), batch(3, 10, ASYNC_FLUSH))),
    "async roll-over": Workload((batch(1, 60, ASYNC_FLUSH), batch(2, 10, ASYNC_FLUSH))),
    "empty batch": Workload((batch(1, 0), batch(2, 5))),
    "roll-over": Workload((batch(1, 250), put(12))),
    "roll-over by puts": Workload(tuple(("big_put", 100 + i, 5000) for i in range(5))),
    "first batch of a topic": Workload((batch(0, 40, app="other"),)),
    "clean end moves": Workload((put(10), batch(1, 10), ("clean",), batch(2, 10), ("clean",), put(11))),
    "clean end moves, async": Workload((batch(1, 10, ASYNC_FLUSH), ("clean",), batch(2, 10, ASYNC_FLUSH))),
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Promise]:
    """A store that was closed, with puts and a batch in it."""
    root = tmp_path_factory.mktemp("base") / "store"
    return root, make_base(root, FILLED)


def copy_of(promise: Promise) -> Promise:
    return Promise(
        list(promise.puts),
        list(promise.maybe_puts),
        set(promise.batches),
        set(promise.maybe_batches),
        dict(promise.rows),
    )


# ---- what was done, and when it was promised


@dataclass
class Recorded:
    """A workload that ran through on a disk that records it."""

    disk: RecordingDisk
    promises: list[tuple[int, Promise]] = field(default_factory=list)
    """With each promise how many operations had been done when it was made."""

    def promised(self, cut: int) -> Promise:
        """What had been promised by then; what may be there is everything."""
        last = copy_of(self.promises[-1][1])
        for position, promise in self.promises:
            if position <= cut:
                last.puts, last.batches = promise.puts, promise.batches
        return last


def record(
    base: Path | None, promise: Promise, workload: Workload, folder: Path, disk: RecordingDisk | None = None
) -> Recorded:
    root = fresh(base, folder)
    run = Recorded(disk or RecordingDisk(root))
    own = copy_of(promise)

    def noted() -> Iterator[Step]:
        for step in workload.all_steps:
            run.promises.append((run.disk.position, copy_of(own)))
            yield step

    try:
        run_steps(root, noted(), run.disk, own, workload.config)
    except (Killed, StorePoisonedError):
        pass
    finally:
        die(root)
    run.promises.append((run.disk.position, copy_of(own)))
    return run


# ---- what must hold


def in_log_order(steps: Sequence[Step]) -> list[list[bytes]]:
    """Bodies of each put and batch, in the order of the log: each is there whole, or not at all."""
    found: list[list[bytes]] = []
    for step in steps:
        match step:
            case ("put", int(number), *_):
                found.append([f"put/{number}/".encode()])
            case ("puts", int(number), int(count), *_):
                found += [[f"put/{number + i}/".encode()] for i in range(count)]
            case ("big_put", int(number), int(size)):
                found.append([(f"put/{number}/" + "x" * size).encode()])
            case ("batch", str(app), int(version), int(rows), _):
                if rows:
                    found.append([payload(app, version, row) for row in range(rows)])
    return found


def check_prefix(bodies: set[bytes], steps: Sequence[Step], who: str) -> int:
    """What is there is a prefix of what was done, and of each batch everything or nothing; how many are there."""
    present = []
    for whole in in_log_order(steps):
        count = len(bodies & set(whole))
        assert count in (0, len(whole)), f"{who}: {count} of {len(whole)} rows of {whole[0]!r}"
        present.append(count > 0)
    kept = sum(present)
    assert all(present[:kept]), f"{who}: not a prefix: {present}"
    return kept


def bodies_of(store: MessageStore) -> set[bytes]:
    return {body for found in all_messages(store).values() for body in found}


def check_reader(root: Path, steps: Sequence[Step], config: StoreConfig) -> int:
    """A reader that comes before any writer sees a prefix of whole batches; each key of what it sees is found."""
    with MessageStore.open_read_only(root, config) as reader:
        found = bodies_of(reader)  # type: ignore[arg-type]
        kept = check_prefix(found, steps, "reader")
        for step in steps:
            match step:
                case ("batch", str(app), int(version), int(rows), _) if rows and payload(app, version, 0) in found:
                    hits = reader.query_message(f"topic-{app}", f"k{version}-{rows - 1}")
                    assert [m.body for m in hits] == [payload(app, version, rows - 1)], "reader: a key is not found"
        return kept


def check_image(image: Image, promise: Promise, steps: Sequence[Step], target: Path, config: StoreConfig) -> None:
    """Another boot finds this: a reader first, then the next writer."""
    shutil.rmtree(target, ignore_errors=True)
    image.build(target)
    try:
        with another_boot():
            seen = check_reader(target, steps, config)
            with MessageStore.open(target, config) as store:
                kept = check_prefix(bodies_of(store), steps, "recovery")
            assert seen <= kept, "a reader saw what recovery did not keep"
            check_store(target, promise, config)
    except BaseException as error:
        error.add_note(str(image))
        raise


def check_cuts(
    base: Path | None,
    promise: Promise,
    workload: Workload,
    scratch: Path,
    *,
    cuts: int | None,
    limit: int,
    modes: Sequence[str] = MODES,
) -> int:
    """Images of a workload: `cuts` of its operations (None: all), at most `limit` of each mode; how many there were."""
    run = record(base, promise, workload, scratch / "recorded")
    steps = [*FILLED, *workload.steps] if base is not None else list(workload.steps)
    places = range(run.disk.position + 1) if cuts is None else spread(run.disk.position + 1, cuts)
    count = 0
    for cut in places:
        for image in run.disk.images(cut, modes, limit=limit, random_count=limit):
            if not (base is None and cut == 0):
                check_image(image, run.promised(cut), steps, scratch / "image", workload.config)
                count += 1
    return count


SOME_MODES = ("strict", "one missing", "random")


@pytest.mark.parametrize("name", WORKLOADS)
def test_power_cuts(name: str, filled: tuple[Path, Promise], scratch: Path) -> None:
    """Power goes while a process adds to a closed store; whatever survives, the next boot finds what was promised."""
    base, promise = filled
    assert check_cuts(base, promise, WORKLOADS[name], scratch, cuts=5, limit=1, modes=SOME_MODES) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_all_power_cuts(name: str, filled: tuple[Path, Promise], scratch: Path) -> None:
    """The same at every operation, with every kind of image."""
    base, promise = filled
    assert check_cuts(base, promise, WORKLOADS[name], scratch, cuts=None, limit=2) > 50


# ---- what a lost sector does to one record


def many_puts(shape: str) -> list[Message]:
    """Records of ever other sizes, so that sectors end everywhere in them."""
    if shape == "keys and tags":
        return [
            Message(
                "topicname",
                b"b" * (i % 50),
                0,
                keys=[f"key{i}", "second"],
                tags="tag",
                properties={f"p{i}": "v" * (i + 1)},
            )
            for i in range(60)
        ]
    if shape == "no properties":
        return [Message("topicname" * (1 + i % 9), b"b" * (i % 50), 0) for i in range(90)]
    return [Message("topicname", b"b", 0, properties={"a": "x" * 1500, "b": "y" * (70 * i + 1)}) for i in range(12)]


@pytest.mark.parametrize("shape", ["keys and tags", "no properties", "large properties"])
def test_a_lost_sector_tears_no_message(shape: str, scratch: Path) -> None:
    """ASYNC puts, and one sector of the log is lost, wherever it ends: what is left are whole messages, not a byte of one."""
    config = ASYNC.replace(mapped_file_size_commit_log=1 << 18, flush_interval_commit_log=3_600_000)
    root, wanted = scratch / "store", many_puts(shape)
    store = MessageStore.open(root, config)
    ends = [0]
    for message in wanted:
        result = store.put_message(message)
        ends.append(result.physical_offset + result.size)
    store.writer.drain()
    die(root)
    for sector in range(ends[-1] // 512 + 1):
        copy = fresh(root, scratch / "copy")
        overwrite(copy, sector * 512, bytes(min(512, ends[-1] - sector * 512)))
        with another_boot():
            recovered = MessageStore.open(copy, config)
            found = [m for topic in recovered.topics() for m in recovered.get_message(topic, 0, 0, 1000).messages]
            found.sort(key=lambda m: m.physical_offset)
            recovered.close()
        whole = sum(end <= sector * 512 for end in ends[1:])
        assert whole <= len(found) <= whole + 1  # a part of a record that was zero before is not lost
        for message, put_message in zip(found, wanted, strict=False):
            assert (message.topic, message.body, message.keys) == (
                put_message.topic,
                put_message.body,
                tuple(put_message.keys),
            )
            assert (message.tags, message.properties) == (put_message.tags, dict(put_message.properties))


def test_a_lost_sector_of_a_batch_record(scratch: Path) -> None:
    """ASYNC batches of ever other sizes, and one sector of the log is lost: whole batches are left, and nobody refuses."""
    config = ASYNC.replace(mapped_file_size_commit_log=1 << 18, flush_interval_commit_log=3_600_000)
    root, promise = scratch / "store", Promise()
    steps = [batch(version, 1 + version % 3, ASYNC_FLUSH, app="a" * (1 + version * 3)) for version in range(14)]
    store = MessageStore.open(root, config)
    for step in steps:
        do_step(store, (*step[:2], 0, *step[3:]), promise, config)
    end = store.writer.end.physical_offset
    die(root)
    for sector in range(end // 512 + 1):
        copy = fresh(root, scratch / "copy")
        overwrite(copy, sector * 512, bytes(min(512, end - sector * 512)))
        with another_boot(), MessageStore.open(copy, config) as recovered:
            check_prefix(bodies_of(recovered), [(*step[:2], 0, *step[3:]) for step in steps], "recovery")


# ---- power cuts in recovery


@pytest.fixture(scope="module")
def torn(
    tmp_path_factory: pytest.TempPathFactory, filled: tuple[Path, Promise]
) -> dict[str, tuple[Path, Promise, list[Step]]]:
    """Stores that recovery has work with."""
    base, promise = filled
    made: dict[str, tuple[Path, Promise, list[Step]]] = {}

    def make(name: str, steps: list[Step], when: Callable[[Operation], bool], nth: int = 1) -> None:
        root = fresh(base, tmp_path_factory.mktemp("torn") / "store")
        disk = KillDisk(half_writes=True)
        kill_when(disk, when, nth=nth)
        own = copy_of(promise)
        with contextlib.suppress(Killed, StorePoisonedError):
            run_steps(root, [("open",), *steps, ("close",)], disk, own)
        die(root)
        assert disk.dead
        made[name] = root, own, [*FILLED, *steps]

    make("sealed, not dispatched", [put(10), batch(1, 40)], dispatch, 3)
    make("half dispatched, over segments", [batch(1, 150)], dispatch, 8)
    make("not sealed", [put(10), batch(1, 60)], seal)
    make("torn put", [put(10), ("big_put", 11, 3000)], lambda o: log_write(o) and o.detail.startswith("31"))
    make("async", [batch(1, 20, ASYNC_FLUSH), batch(2, 20, ASYNC_FLUSH)], dispatch, 6)
    return made


TORN = ("sealed, not dispatched", "half dispatched, over segments", "not sealed", "torn put", "async")


def check_recovery_cuts(
    case: tuple[Path, Promise, list[Step]], scratch: Path, cuts: int | None, limit: int, modes: Sequence[str]
) -> None:
    base, promise, steps = case
    run = record(base, promise, Workload(()), scratch / "recorded")
    places = range(run.disk.position + 1) if cuts is None else spread(run.disk.position + 1, cuts)
    for cut in places:
        for image in run.disk.images(cut, modes, limit=limit, random_count=limit):
            check_image(image, promise, steps, scratch / "image", SMALL)


@pytest.mark.parametrize("name", TORN)
def test_power_cuts_in_recovery(name: str, torn: dict[str, tuple[Path, Promise, list[Step]]], scratch: Path) -> None:
    """A process died; power goes while the next one recovers, or just after."""
    check_recovery_cuts(torn[name], scratch, 4, 1, SOME_MODES)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORN)
def test_all_power_cuts_in_recovery(
    name: str, torn: dict[str, tuple[Path, Promise, list[Step]]], scratch: Path
) -> None:
    """The same at every operation of the recovery."""
    check_recovery_cuts(torn[name], scratch, None, 2, MODES)


@pytest.mark.parametrize("name", ["async batches", "roll-over"])
def test_power_cuts_twice(name: str, filled: tuple[Path, Promise], scratch: Path) -> None:
    """Power goes in a workload, and again in the recovery of what was left: as if it had gone once."""
    base, promise = filled
    workload = WORKLOADS[name]
    run = record(base, promise, workload, scratch / "first")
    steps = [*FILLED, *workload.steps]
    for cut in spread(run.disk.position + 1, 4):
        image = next(iter(run.disk.images(cut, ("random",), random_count=1, seed=cut)))
        after = run.promised(cut)
        with another_boot(1):
            shutil.rmtree(scratch / "left", ignore_errors=True)
            second = record(image.build(scratch / "left"), after, Workload(()), scratch / "second")
        for again in spread(second.disk.position + 1, 3):
            for other in second.disk.images(again, ("strict", "random"), random_count=1):
                check_image(other, after, steps, scratch / "image", workload.config)


def test_power_cuts_while_a_store_is_made(scratch: Path) -> None:
    """Power goes while the first process makes the store: the folder can be opened, or is free for another try."""
    workload = Workload((put(0), batch(0, 5)))
    root = scratch / "recorded"
    run = record(None, Promise(), workload, root)
    for cut in spread(run.disk.position + 1, 12):
        for image in run.disk.images(cut, ("strict", "all", "random"), random_count=1):
            target = image.build(scratch / f"{cut}-{image.label[:6]}")
            with another_boot():
                check_store(target, run.promised(cut), SMALL)


# ---- two processes on one store


def test_power_cuts_with_two_writers(scratch: Path) -> None:
    """Two processes take turns; one moves the clean end past what the other has not synced, then power goes."""
    root = scratch / "store"
    root.mkdir()
    disk = RecordingDisk(root)
    p, q = Process(root, SMALL, disk), Process(root, SMALL, disk)
    rows: dict[tuple[str, int], int] = {}
    done: list[tuple[int, dict[tuple[str, int], int]]] = []
    for version in range(3):
        for one, app, count in ((p, "p", 5), (q, "q", 8)):
            one.batch(app, version, count)
            rows[(app, version)] = count
            done.append((disk.position, dict(rows)))
        with (p if version % 2 else q).store.writing("clean") as writer:
            writer.move_clean()
        done.append((disk.position, dict(rows)))
    for position, acknowledged in done:
        for number, image in enumerate(
            disk.images(position, ("strict", "one missing", "random"), limit=2, random_count=2)
        ):
            target = image.build(scratch / f"{position}-{number}")
            with another_boot():
                check_store(target, Promise(batches=set(acknowledged), maybe_batches=set(rows), rows=rows), SMALL)
            shutil.rmtree(target)
    p.die()
    q.die()


# ---- disks that fail


class Faulty(RecordingDisk):
    """One operation fails; whoever syncs again what failed to sync is found out.

    Parameters
    ----------
    sticky : bool
        It goes on failing, for all operations of its kind.
    """

    sticky = False

    def _attempt(self, operation: Operation, *arguments: Any) -> Any:
        failed = [o for o in self.operations if o.detail.endswith("failed")]
        if failed and operation.name == failed[0].name and operation.name in ("fdatasync", "fsync_dir", "syncfs"):
            assert "/new-" in operation.path or operation.path != failed[0].path, f"synced again: {operation}"
        if self.sticky and failed and operation.name == failed[0].name:
            self.fail_at = len(self.operations)
        return super()._attempt(operation, *arguments)


def run_failing(root: Path, steps: Sequence[Step], disk: Faulty, promise: Promise, config: StoreConfig) -> str:
    """A process that goes on after an error: each step is tried a second time. How it ended.

    After `StorePoisonedError` nothing may work any more until the store is opened again.
    """
    try:
        store = MessageStore.open(root, config, disk=disk)
    except (StoreError, OSError):
        return "not opened"
    for step in steps:
        for _ in range(2):
            try:
                do_step(store, step, promise, config)
                break
            except StorePoisonedError:
                for other in (put(999), batch(99, 1), ("clean",)):
                    with pytest.raises(StorePoisonedError):
                        do_step(store, other, Promise(), config)
                with contextlib.suppress(StoreError, OSError):
                    store.close()
                return "poisoned"
            except (StoreError, OSError) as error:
                assert not isinstance(error, CorruptionError), error
    try:
        do_step(store, ("close",), promise, config)
    except (StoreError, OSError):
        return "not closed"
    return "closed"


FAULTS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
ROOM_TAKERS = ("pwrite", "open_new", "mkdir", "rename")


def check_fault(
    base: Path, promise: Promise, workload: Workload, scratch: Path, at: int, error_number: int, *, sticky: bool = False
) -> tuple[str, Operation | None]:
    """Operation `at` fails. How the process ended, and what failed (None: there are not so many operations)."""
    root = fresh(base, scratch / "store")
    disk = Faulty(root, at, error_number, half_writes=True)
    disk.sticky = sticky
    own = copy_of(promise)
    ended = run_failing(root, workload.steps, disk, own, workload.config)
    die(root)
    failed = next((o for o in disk.operations if o.detail.endswith("failed")), None)
    # A step that failed twice leaves a hole in the row: it is not asked about.
    steps = [*FILLED, *(step for step in workload.steps if any(accepted(own, step)))]
    try:
        images = [disk.image(disk.position, mode) for mode in ("strict", "all")]
        for image in images:
            check_image(image, own, steps, scratch / "image", workload.config)
        check_store(root, own, workload.config)
        if error_number == errno.ENOSPC and not sticky and failed is not None and is_before_commit(failed):
            assert ended == "closed", "a full disk before the commit point, and the process is of no use any more"
    except BaseException as error:
        error.add_note(f"operation {at} failed: {failed}; the process ended: {ended}")
        raise
    return ended, failed


def accepted(promise: Promise, step: Step) -> Iterator[bool]:
    """Whether a step returned, as far as it left something."""
    for whole in in_log_order([step]):
        name = whole[0].decode()
        key = (name.split("/")[0], int(name.split("/")[1]))
        yield name in promise.accepted or key in promise.accepted


def is_before_commit(operation: Operation) -> bool:
    """Whether nothing is promised yet, or can be done again, when there is no room for this."""
    if operation.name not in ROOM_TAKERS or seal(operation):
        return False
    return "/commitlog/" in operation.path or re.search("/spark/new-([0-9a-f]{32}|abort)$", operation.path) is not None


def fault_points(base: Path, promise: Promise, workload: Workload, scratch: Path) -> list[Operation]:
    """The operations of the workload when nothing fails, without those of open and close."""
    root = fresh(base, scratch / "store")
    disk = Faulty(root)
    assert run_failing(root, workload.steps, disk, copy_of(promise), workload.config) == "closed"
    die(root)
    return disk.operations


def kinds_of(operations: Sequence[Operation], kind: str) -> dict[str, list[int]]:
    """Operations by what they are for (the kind of file, and what is done to it)."""
    found: dict[str, list[int]] = {}
    for at, operation in enumerate(operations):
        if kind == "EIO" or operation.name in ROOM_TAKERS:
            where = (
                (operation.detail or operation.path).split("/store/")[-1]
                if operation.name == "rename"
                else operation.path
            )
            where = re.sub("[0-9a-f]{17,}", "*", where.split("/store/")[-1])
            found.setdefault(f"{operation.name} {where} {seal(operation)}", []).append(at)
    return found


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", ["single puts", "async, then sync", "roll-over"])
def test_faults(name: str, kind: str, filled: tuple[Path, Promise], scratch: Path) -> None:
    """The disk fails once, or is full once, in an operation; here some kinds of operations are tried."""
    base, promise = filled
    groups = list(kinds_of(fault_points(base, promise, WORKLOADS[name], scratch), kind).values())
    for number in spread(len(groups), 5):
        check_fault(base, promise, WORKLOADS[name], scratch, groups[number][len(groups[number]) // 2], FAULTS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_all_faults(name: str, kind: str, sticky: bool, filled: tuple[Path, Promise], scratch: Path) -> None:
    """The same at operation 0, 1, 2, ... until a process gets through; of many writes of one kind some."""
    base, promise = filled
    points = {
        at
        for group in kinds_of(fault_points(base, promise, WORKLOADS[name], scratch), kind).values()
        for at in group[:12]
    }
    for at in itertools.count():
        if at in points or at > max(points):
            _, failed = check_fault(base, promise, WORKLOADS[name], scratch, at, FAULTS[kind], sticky=sticky)
            if failed is None:
                break
    assert at > 20
