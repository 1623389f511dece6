"""Readers beside writers, writers beside writers, interrupts, and what a log may hold that nobody should have written.

Where a race can be laid out, it is: a disk calls back before each operation of a writer, of a recovery, of a detach, and
the other side looks, or acts, just then. Where it cannot, real processes are killed at random times.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crash.harness import (
    APP,
    SMALL,
    Promise,
    all_messages,
    batch_columns,
    check_store,
    die,
    do_step,
    fresh,
    no_thread_warnings,
    payload,
)
from crash.imitate import (
    Broker,
    Process,
    another_boot,
    commit,
    dispatch,
    file_bytes,
    kill_when,
    log_sync,
    log_write,
    overwrite,
    put,
    read_slot,
    remake_queue,
    rows_seen,
    seen,
    units,
    walk,
)
from crash.simdisk import FailDisk, KillDisk, Killed, Operation, RecordingDisk
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    BatchRequest,
    CorruptionError,
    MessageStore,
    StoreConfig,
    StoreError,
    StoreLockedError,
    StorePoisonedError,
)
from messagestore.files.disk import Disk
from messagestore.inspect.verify import verify
from messagestore.read import queue_records
from messagestore.read.view import StoreView
from small import ClockDisk

pytestmark = no_thread_warnings

Start = Callable[..., Process]


@pytest.fixture
def config() -> StoreConfig:
    return SMALL


# ---- a reader looks at every moment


class Watched(KillDisk):
    """Calls back before each operation."""

    def __init__(self, watch: Callable[[Operation], None], kill_at: int | None = None) -> None:
        super().__init__(kill_at, half_writes=True)
        self.watch = watch
        self.before = self._look
        self._inside = False

    def _look(self, operation: Operation) -> None:
        if not self._inside and not self.dead:
            self._inside = True
            try:
                self.watch(operation)
            finally:
                self._inside = False


class Watcher:
    """A long-lived reader: at each look it sees whole batches, in order, never less than before, and finds their keys."""

    def __init__(self, root: Path, rows: dict[int, int], queues: int = 3) -> None:
        self.view = StoreView(root, SMALL)
        self.reader = MessageStore.open_read_only(root, SMALL)
        self.queues = [(f"topic-{APP}", queue_id) for queue_id in range(queues)]
        self.rows = rows
        self.seen = 0
        self.looks = 0

    def look(self, operation: Operation | None = None) -> None:
        try:
            self._look()
        except BaseException as error:
            error.add_note(f"before {operation}")
            raise

    def _look(self) -> None:
        ends = self.view.max_offsets(self.queues)
        total = sum(ends.values())
        wholes = list(itertools.accumulate(self.rows[v] for v in sorted(self.rows)))
        assert total in (0, *wholes), f"a part of a batch: {ends}"
        assert total >= self.seen, f"saw {self.seen} messages, now {total}"
        self.looks += 1
        if total > self.seen or self.looks % 5 == 0:
            bodies = [
                body
                for (topic, queue_id), end in ends.items()
                for part in queue_records.read(self.view, topic, queue_id, 0, end, ("body",))
                for body in part.column("body").to_pylist()
            ]
            versions = wholes.index(total) + 1 if total else 0
            assert sorted(bodies) == sorted(
                payload(APP, v, row) for v in range(versions) for row in range(self.rows[v])
            )
            for version in range(versions):
                hits = self.reader.query_message(f"topic-{APP}", f"k{version}-0")
                assert [m.body for m in hits] == [payload(APP, version, 0)], f"key of version {version}"
        self.seen = total


@pytest.mark.parametrize("flush", [SYNC_FLUSH, ASYNC_FLUSH])
def test_a_reader_looks_before_each_operation(root: Path, process: Start, flush: str) -> None:
    """Batches, segments that roll, a clean end that moves, a detach: at each moment a reader sees whole batches."""
    rows = {0: 6, 1: 9, 2: 100, 3: 5}
    process(root).batch(rows=6)
    process(root).detach()
    watcher = Watcher(root, rows)
    p = process(root, Watched(watcher.look))
    for version in (1, 2, 3):
        p.batch(version=version, rows=rows[version], flush=flush)
        watcher.look()
        assert watcher.seen == sum(rows[v] for v in range(version + 1))
    p.detach()
    watcher.look()
    assert watcher.looks > 50


@pytest.mark.parametrize("when", [log_write, dispatch], ids=["not sealed", "half dispatched"])
def test_a_reader_looks_while_another_recovers(root: Path, process: Start, when: Callable[[Operation], bool]) -> None:
    """A writer died amid a batch; while the next one recovers, and detaches, a reader misses nothing it has seen."""
    rows = {0: 40, 1: 40, 2: 30, 3: 5}
    disk = KillDisk(half_writes=True)
    p = process(root, disk)
    p.batch(rows=40)
    p.batch(version=1, rows=40)
    kill_when(disk, when, nth=2)
    with pytest.raises(Killed):
        p.batch(version=2, rows=30)
    p.die()
    watcher = Watcher(root, rows)
    watcher.look()
    assert watcher.seen == 80
    q = process(root, Watched(watcher.look))
    q.batch(version=2, rows=30)
    q.batch(version=3, rows=5)
    q.detach()
    watcher.look()
    assert watcher.seen == 115


def test_a_reader_looks_while_a_broker_appends(root: Path, process: Start) -> None:
    """A broker writes record, then unit, the unit in two halves: a reader sees message after message, and no torn one."""
    process(root).batch()
    process(root).detach()
    broker = Broker(root)
    with MessageStore.open_read_only(root, SMALL) as reader:
        for number in range(40):
            place = broker.put("java", f"j{number}/".encode() + b"x" * 700, unit=False)
            size = broker.end - place
            assert reader.max_offset("java", 0) == number
            for torn in ((place, 0, 0), (0, size, 0)):  # the first half is there, or the second one
                broker.unit("java", 0, number, *torn[:2])
                assert reader.max_offset("java", 0) == number
            broker.unit("java", 0, number, place, size)
            assert reader.max_offset("java", 0) == number + 1
            assert reader.get_message("java", 0, number).messages[0].body.startswith(f"j{number}/".encode())


def test_a_reader_thread_beside_sessions(root: Path) -> None:
    """Sessions come and go, puts and batches in between, and a thread reads all the time."""
    rows = dict.fromkeys(range(12), 5)
    with MessageStore.open(root, SMALL) as store:
        commit(store.writer)
    watcher = Watcher(root, rows)
    stop, failures = threading.Event(), []

    def reading() -> None:
        try:
            while not stop.is_set():
                watcher.look()
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    thread = threading.Thread(target=reading)
    thread.start()
    for version in range(1, 12):
        with MessageStore.open(root, SMALL) as store:
            put(store, f"put/{version}/")
            commit(store.writer, version=version)
            if version % 4 == 0:
                store.writer.clean_end.move()
    stop.set()
    thread.join()
    assert not failures, failures[0]
    watcher.look()
    assert watcher.seen == 60


# ---- writers beside writers


def in_child(work: Callable[[], None]) -> int:
    """The pid of a forked child that works and ends; 0 is its exit code when nothing was raised."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def commits(root: Path, app: str, last: int, flush: str) -> None:
    """What a sink does after a restart: from the first batch on, whatever is known."""
    p = Process(root, SMALL.replace(lock_timeout="20s"))
    for version in range(last + 1):
        p.batch(app, version, 7 + version % 5, flush)
    p.detach()


@pytest.mark.parametrize("flush", [SYNC_FLUSH, ASYNC_FLUSH])
def test_processes_take_turns_and_die(root: Path, flush: str) -> None:
    """Two sinks in processes of their own, killed at random times and started again, and a reader beside them."""
    chance = random.Random(7)
    reader: MessageStore | None = None
    before: dict[tuple[str, int], int] = {}
    for _ in range(6):
        children = [in_child(lambda app=app: commits(root, app, 7, flush)) for app in ("p", "q")]
        deadline = time.monotonic() + chance.uniform(0.02, 0.25)
        while time.monotonic() < deadline:
            if reader is None and (root / "commitlog").exists():
                reader = MessageStore.open_read_only(root, SMALL)  # type: ignore[assignment]
            if reader is not None:
                for topic, queue_ids in reader.topics().items():
                    for queue_id in queue_ids:
                        end = reader.max_offset(topic, queue_id)
                        assert end >= before.get((topic, queue_id), 0)
                        before[(topic, queue_id)] = end
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    last = [in_child(lambda app=app: commits(root, app, 7, flush)) for app in ("p", "q")]
    assert [os.waitpid(pid, 0)[1] for pid in last] == [0, 0]
    if reader is not None:
        reader.close()
    rows = {(app, version): 7 + version % 5 for app in ("p", "q") for version in range(8)}
    check_store(root, Promise(batches=set(rows), maybe_batches=set(rows), rows=rows))


@pytest.mark.parametrize("seed", range(3))
def test_turns_of_all_kinds(seed: int, root: Path, process: Start) -> None:
    """Three processes, batches of all sizes, sessions, kills and detaches in any order: caching never goes wrong."""
    chance = random.Random(seed)
    processes: list[Process] = [process(root) for _ in range(3)]
    versions = [0, 0, 0]
    rows: dict[tuple[str, int], int] = {}
    puts: list[str] = []
    for _ in range(50):
        who = chance.randrange(3)
        p, app = processes[who], f"app{who}"
        match chance.choice(("batch", "batch", "batch", "async", "session", "die", "detach", "clean")):
            case "batch" | "async" as kind:
                count = chance.choice((0, 1, 5, 20, 90))
                assert (
                    p.batch(app, versions[who], count, ASYNC_FLUSH if kind == "async" else SYNC_FLUSH).status
                    == "appended"
                )
                rows[(app, versions[who])] = count
                versions[who] += 1
            case "session":
                with contextlib.suppress(StoreLockedError), p.session() as store:
                    for _ in range(chance.randrange(4)):
                        body = f"put/{len(puts)}/"
                        put(store, body, queue_id=chance.randrange(3))
                        puts.append(body)
            case "die":
                p.die()
                processes[who] = process(root)
            case "detach":
                p.detach()
            case "clean":
                with p.store.writing("clean") as writer:
                    writer.clean_end.move()
        if versions[who] and chance.random() < 0.3:
            version = chance.randrange(versions[who])
            assert processes[who].batch(app, version, rows[(app, version)]).status == "known"
    for p in processes:
        p.detach()
    assert not (root / "abort").exists()
    check_store(root, Promise(puts=puts, maybe_puts=puts, batches=set(rows), maybe_batches=set(rows), rows=rows))


def test_two_that_detach_at_once_leave_no_abort(root: Path, process: Start) -> None:
    """Each of them must not believe the other one is still there: the last one removes `abort`."""
    for version in range(10):
        p, q = process(root), process(root)
        p.batch("p", version)
        q.batch("q", version)
        threads = [threading.Thread(target=one.detach) for one in (p, q)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not (root / "abort").exists()


def test_a_batch_of_another_process_is_synced_before_c_passes_it(root: Path, scratch: Path, process: Start) -> None:
    """Q dispatched and did not sync its queues and index; P moves C past Q's batch: then they must be on the disk."""
    root.mkdir()
    disk = RecordingDisk(root)
    p, q = process(root, disk), process(root, disk)
    p.batch("p", 0)
    q.batch("q", 0, 9)
    with p.store.writing("clean") as writer:
        writer.clean_end.move()
    assert read_slot(root)["clean_end"] == walk(root)[1]
    target = disk.image(disk.position, "strict").build(scratch / "image")
    with another_boot():
        with MessageStore.open(target, SMALL) as store:
            assert len(store.query_message("topic-q", "k0-8")) == 1
        assert rows_seen(target, "q") == {0: 9}


def test_a_segment_another_process_made_has_its_name_synced(root: Path, scratch: Path, process: Start) -> None:
    """Q dies between publishing an ASYNC batch that opened a segment, and moving C; P acknowledges a SYNC batch in it."""
    root.mkdir()
    disk = RecordingDisk(root)
    p, q = process(root, disk), process(root, disk)
    p.batch("p", 0)
    q.batch("q", 0)
    kill_when(disk, log_sync)
    with pytest.raises((Killed, StorePoisonedError)):
        q.batch("q", 1, 90, ASYNC_FLUSH)
    q.die()
    disk.revive()
    assert p.batch("p", 1).status == "appended"
    sealed = max(i for i, o in enumerate(disk.operations) if log_write(o) and o.detail.startswith("8 bytes"))
    cut = next(i for i, o in enumerate(disk.operations) if i > sealed and log_sync(o)) + 1
    target = disk.image(cut, "strict").build(scratch / "image")
    with another_boot():
        with MessageStore.open(target, SMALL):
            pass
        assert rows_seen(target, "p") == {0: 5, 1: 5}


def test_known_in_sync_flush_means_on_the_disk(root: Path, scratch: Path, process: Start) -> None:
    """A batch was appended in ASYNC_FLUSH; the replay asks for SYNC_FLUSH and is told "known": it must be durable then."""
    root.mkdir()
    disk = RecordingDisk(root)
    p = process(root, disk, flush_interval_commit_log=3_600_000)
    p.batch(version=0)
    p.batch(version=1, flush=ASYNC_FLUSH)
    assert p.batch(version=1).status == "known"
    target = disk.image(disk.position, "strict").build(scratch / "image")
    with another_boot():
        with MessageStore.open(target, SMALL):
            pass
        assert rows_seen(target) == {0: 5, 1: 5}


def test_a_flush_that_fails_while_others_write_is_remembered(root: Path, process: Start) -> None:
    """P's flush thread fails when Q has the turn: `state` says so in turn, and Q's next commit writes everything again."""
    disk = FailDisk()
    p = process(root, disk, flush_interval_commit_log=50, flush_commit_log_least_pages=0)
    q = process(root)
    q.batch("q", 0)
    with p.store.writing("arming") as writer:
        commit(writer, "p", 0, 5, ASYNC_FLUSH)
        disk.fail_at = len(disk.operations)
    deadline = time.monotonic() + 120
    while not read_slot(root)["flags"] & 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert read_slot(root)["flags"] & 1, disk.operations[-3:]
    report = q.store.report
    q.batch("q", 1)
    assert q.store.report is not report, "not recovered"
    assert not read_slot(root)["flags"] & 1
    assert rows_seen(root, "p") == {0: 5}


def test_a_lock_file_that_was_removed_stops_its_holder(root: Path, process: Start) -> None:
    """Somebody deletes `spark/writer.lock` as "stale", and another process gets a lock of its own: never two writers."""
    store = process(root).session()
    put(store, "put/0/")
    (root / "spark" / "writer.lock").unlink()
    other = process(root).session()
    put(other, "put/1/")
    time.sleep(0.05)  # single puts do not look at the lock files each time
    for work in (lambda: put(store, "put/2/"), lambda: commit(store.writer)):
        with pytest.raises(StorePoisonedError):
            work()
    put(other, "put/3/")
    store.close()
    other.close()
    assert seen(root)[("single", 0)] == ["put/0/", "put/1/", "put/3/"]
    report = verify(root)
    assert report.ok, report.findings[:2]


# ---- interrupts, and errors that are no I/O errors


class Interrupting(KillDisk):
    """Raises something in operation n: before it, or just after it was done."""

    def __init__(self, at: int, error: type[BaseException], after: bool) -> None:
        super().__init__()
        self.at, self.error = at + after, error
        self.raised: Operation | None = None
        if after:
            self.after = self._interrupt
        else:
            self.before = self._interrupt

    def _interrupt(self, operation: Operation) -> None:
        if len(self.operations) == self.at and self.raised is None:
            self.raised = operation
            raise self.error


STEPS = [
    ("puts", 10, 4, "single", 0),
    ("put", 20, "single", 1),
    ("batch", APP, 1, 8, SYNC_FLUSH),
    ("put", 21, "single", 0),
    ("batch", APP, 2, 90, ASYNC_FLUSH),
]


def interrupted(base: Path, scratch: Path, at: int, error: type[BaseException], after: bool) -> Operation | None:
    """The steps, each tried again after an interrupt; then everything is checked. In what it was raised."""
    root, promise = fresh(base, scratch / "store"), Promise(puts=["put/0/"], maybe_puts=["put/0/"])
    disk = Interrupting(at, error, after)
    try:
        store = MessageStore.open(root, SMALL, disk=disk)
        for step in STEPS:
            for _ in range(2):
                try:
                    do_step(store, step, promise)
                    break
                except (error, StoreError, OSError):
                    continue
        store.close()
    except (error, StoreError, OSError):
        pass
    finally:
        die(root)
    promise.maybe_puts = sorted({*promise.maybe_puts})
    try:
        with MessageStore.open(root, SMALL) as again:
            twice = [body for found in all_messages(again).values() for body in found if body.startswith(b"put/")]
        if len(set(twice)) == len(twice):  # a put that was tried a second time may be there twice
            check_store(root, promise)
    except BaseException as found:
        found.add_note(f"{error.__name__} {'after' if after else 'before'} operation {at}: {disk.raised}")
        raise
    return disk.raised


@pytest.fixture(scope="module")
def one_put(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base") / "store"
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")
        store.append_batch(batch_columns(APP, 0, 3), BatchRequest(app_id=APP, version=0, version_source="spark"))
    return root


def test_an_interrupt_anywhere(one_put: Path, scratch: Path) -> None:
    """Ctrl-C, or a MemoryError, in some of the operations: the process goes on as far as it may, the next one checks."""
    for at in range(3, 110, 7):
        error = KeyboardInterrupt if at % 2 else MemoryError
        interrupted(one_put, scratch, at, error, after=at % 3 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_in_every_operation(error: type[BaseException], after: bool, one_put: Path, scratch: Path) -> None:
    """The same in operation 0, 1, 2, ..."""
    for at in itertools.count():
        if interrupted(one_put, scratch, at, error, after) is None:
            break
    assert at > 50


def test_an_interrupted_put_leaves_nothing_that_comes_back(root: Path, process: Start) -> None:
    """Ctrl-C hits after the last of several records was written and before its head; smaller puts follow at that place."""
    p = process(root, disk := KillDisk())
    store = p.session()
    put(store, "put/0/")

    def interrupting(operation: Operation) -> None:
        if log_write(operation):
            disk.after = None
            raise KeyboardInterrupt

    disk.after = interrupting
    with pytest.raises(KeyboardInterrupt):
        do_step(store, ("puts", 10, 5, "single", 0), Promise())
    with pytest.raises(StorePoisonedError):
        put(store, "put/1/")
    store.close()
    q = process(root).session()
    put(q, "put/1/")
    end = q.writer.end.physical_offset
    assert not any(file_bytes(root, end, 1 << 14))
    q.close()
    assert seen(root)[("single", 0)] == ["put/0/", "put/1/"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_files_that_cannot_be_opened(number: int, root: Path, process: Start) -> None:
    """The nth open of a file fails, for want of descriptors: nothing is acknowledged that is not there, nothing is damaged."""

    class Few(Disk):
        fail_at, count = -1, 0

        def open(self, path, *, writable=False):  # type: ignore[no-untyped-def]
            self.count += 1
            if self.count == self.fail_at:
                raise OSError(number, os.strerror(number), str(path))
            return super().open(path, writable=writable)

    rows: dict[tuple[str, int], int] = {}
    for n in range(1, 60, 3):
        disk = Few()
        disk.fail_at = n
        p = process(root, disk)
        for attempt in range(3):
            try:
                p.batch("p", n, 5, version_source="user")
                rows[("p", n)] = 5
                break
            except (StoreError, OSError) as error:
                assert not isinstance(error, CorruptionError), error
                assert attempt < 2, error
        with contextlib.suppress(StoreError, OSError):
            p.detach()
    assert rows_seen(root, "p") == {version: 5 for _, version in rows}
    with MessageStore.open(root, SMALL):
        pass
    report = verify(root)
    assert report.ok, report.findings[:2]


class BadReads(Disk):
    """The nth read fails."""

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at, self.count = fail_at, 0

    def _read(self) -> None:
        self.count += 1
        if self.count == self.fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def pread(self, *arguments: Any) -> bytes:
        self._read()
        return super().pread(*arguments)

    def pread_into(self, *arguments: Any) -> int:
        self._read()
        return super().pread_into(*arguments)

    def data_ranges(self, *arguments: Any) -> Iterator[tuple[int, int]]:
        self._read()
        return super().data_ranges(*arguments)


def test_reads_that_fail(root: Path, scratch: Path, process: Start) -> None:
    """A read fails in recovery, or in a reader: that is an error, and neither the log's end nor an empty queue."""
    p = process(root)
    p.batch()
    p.detach()
    p.batch(version=1, rows=90)
    p.batch(version=2, rows=9)
    p.die()
    rows = {(APP, 0): 5, (APP, 1): 90, (APP, 2): 9}
    promise = Promise(batches=set(rows), maybe_batches=set(rows), rows=rows)
    counting = BadReads()
    q = process(fresh(root, scratch / "copy"), counting)
    q.batch(version=3)
    q.die()
    assert counting.count > 100
    for n in range(1, counting.count + 1, 13):
        copy = fresh(root, scratch / "copy")
        q = process(copy, BadReads(n))
        with contextlib.suppress(OSError, StorePoisonedError):
            q.batch(version=3)
        q.die()
        with contextlib.suppress(OSError), MessageStore.open_read_only(copy, SMALL, disk=BadReads(n)) as reader:
            assert reader.max_offset(f"topic-{APP}", 0) >= 35
        check_store(copy, Promise(**{**vars(promise), "rows": {**rows, (APP, 3): 5}}))


# ---- what a log may hold


@pytest.mark.parametrize("topic", ["../../evil", "..", "a/b", "täg", "x" * 127 + "/"])
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "a broker's"])
def test_a_topic_in_the_log_is_no_path(root: Path, scratch: Path, process: Start, topic: str, ours: bool) -> None:
    """A record whose topic is a path: nothing is made outside of the store, and it is no message. A topic that nobody may
    put and that can be the name of a folder is one, in a broker's store."""
    p = process(root)
    p.batch()
    if ours:
        p.die()
    else:
        p.detach()
    token = (root / "abort").read_bytes() if ours else b""
    broker = Broker(root)
    before = {path for path in scratch.rglob("*") if root not in path.parents}
    size = len(topic.encode())
    data = broker.encoded("x" * size, b"body", 0, 0, None).replace(b"x" * size, topic.encode())
    overwrite(root, broker.end, data)
    if ours:
        (root / "abort").write_bytes(token)
    with contextlib.suppress(CorruptionError), MessageStore.open(root, SMALL):
        pass
    assert {path for path in scratch.rglob("*") if root not in path.parents} == before
    names = {f"topic-{APP}", "rmq_sys_spark_sink"} | ({topic} if topic == "täg" and not ours else set())
    assert {path.name for path in (root / "consumequeue").iterdir()} == names
    assert rows_seen(root) == {0: 5}


@pytest.mark.parametrize("kind", ["closed with a tail", "crashed", "crashed with a tail"])
def test_recovery_of_a_broker_s_store_killed_anywhere(root: Path, scratch: Path, process: Start, kind: str) -> None:
    """A broker left a tail, or units behind; recovery dies at each operation: the next one ends with the same bytes. Old
    records that happen to follow the last one are kept, as RocketMQ keeps them."""
    with process(root).session() as store:
        put(store, "put/0/")
        commit(store.writer)
    broker = Broker(root)
    places = [broker.put("java", f"old{n}".encode(), unit=n < 6) for n in range(8)]
    if "tail" in kind:
        overwrite(root, places[4] + 89, b"?")
        remake_queue(root, "java", 0, units(root, "java", 0)[:4])
        broker = Broker(root)
        broker.now_ms += 1000
        broker.put("java", b"new0")
        broker.put("java", b"new!", unit="closed" in kind)
    if "closed" in kind:
        broker.close()
    tail = ["old0", "old1", "old2", "old3", "new0", "new!", "old6", "old7"]
    wanted = tail if "tail" in kind else [f"old{n}" for n in range(8)]

    def bytes_of(store: Path) -> dict[str, bytes]:
        files = [
            path for folder in ("commitlog", "consumequeue") for path in (store / folder).rglob("*") if path.is_file()
        ]
        return {str(path.relative_to(store)): path.read_bytes() for path in files}

    whole = fresh(root, scratch / "whole")
    with MessageStore.open(whole, SMALL):
        pass
    assert seen(whole)[("java", 0)] == wanted
    for at in itertools.count():
        copy = fresh(root, scratch / "copy")
        disk = KillDisk(at, half_writes=True)
        p = process(copy, disk)
        with contextlib.suppress(Killed, StorePoisonedError):
            p.session().close()
        p.die()
        assert seen(copy)[("java", 0)] == wanted[: len(seen(copy)[("java", 0)])]
        with MessageStore.open(copy, SMALL):
            pass
        assert bytes_of(copy) == bytes_of(whole), f"killed in {disk.killed_in}"
        assert seen(copy)[("java", 0)] == wanted
        if not disk.dead:
            break
    assert at > 5


def test_power_cuts_in_the_recovery_of_a_broker_s_store(root: Path, scratch: Path, process: Start) -> None:
    """A broker crashed; power goes while we recover: its messages stay, whatever survives of what we did."""
    with process(root).session() as store:
        put(store, "put/0/")
    broker = Broker(root)
    for number in range(8):
        broker.put("java", f"j{number}".encode(), unit=number < 5)
    disk = RecordingDisk(root)
    p = process(root, disk)
    with p.session() as store:
        commit(store.writer)
    for cut in range(0, disk.position + 1, 6):
        for number, image in enumerate(disk.images(cut, ("strict", "one missing", "random"), limit=1, random_count=1)):
            target = image.build(scratch / f"{cut}-{number}")
            with another_boot():
                with MessageStore.open(target, SMALL):
                    pass
                assert seen(target)[("java", 0)] == [f"j{n}" for n in range(8)], image
            shutil.rmtree(target)


def test_clocks_that_jump(root: Path, process: Start) -> None:
    """The clock goes to 1970, to 2100 and back: store times go down once, when it comes back from 2100; nothing is lost."""
    disk = ClockDisk()
    p = process(root, disk)
    for version, second in enumerate((1_700_000_000, 0, -5, 4_102_444_800, 1_700_000_000, 1)):
        disk.now_ms = second * 1000
        p.batch(version=version)
    p.die()
    with MessageStore.open(root, SMALL, disk=disk) as store:
        put(store, "put/0/")
    times = [record["store_timestamp_ms"] for record in walk(root)[0]]
    falls = [(before, after) for before, after in itertools.pairwise(times) if after < before]
    assert falls == [(4_102_444_800_000, 1_700_000_000_000)]
    assert rows_seen(root) == dict.fromkeys(range(6), 5)
    report = verify(root)
    assert report.ok, report.findings[:2]
