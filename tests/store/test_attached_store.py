"""Turns among processes: who may write, who waits, who recovers, who tidies up."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest

from crash.harness import die, tree_hash
from messagestore import (
    BatchRequest,
    ConfigError,
    CorruptionError,
    Message,
    MessageStore,
    NotAStoreError,
    PutMessageStatus,
    StoreClosedError,
    StoreConfig,
    StoreLockedError,
    StorePoisonedError,
)
from messagestore.batches.append import Chunks, append_batch
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.disk import Disk
from messagestore.files.state import State, StateFile
from messagestore.format.record_columns import Rows, encode
from messagestore.inspect import operator
from messagestore.inspect.verify import verify
from messagestore.session import attached_store
from messagestore.spi import LOCAL_STORES
from processes import CONTEXT, Java, PatienceDisk, starting_broker
from small import SMALL, SMALL_ASYNC, SMALL_POOL, bodies, columns, filled, read_all

CONFIG = SMALL.replace(
    mapped_file_size_commit_log=1 << 18, max_index_num=20_000, lock_timeout="20s", clean_interval="1h"
)


def append(
    root: Path, app: str, version: int, count: int = 10, config: StoreConfig = CONFIG, disk: Disk | None = None
) -> str:
    """One commit, as the sink makes it."""
    store = attached_store(root, config, disk)
    with store.writing(f"test {app}", config=config) as writer:
        rows = columns(bodies(count, start=1000 * version), topic=app)
        chunk = encode(rows, limits=config, store_host=writer.files.store_host, born_host=bytes(8))
        return append_batch(writer, Chunks([chunk]), BatchRequest(app, version, "spark")).status


def commits(root: str, app: str, count: int, pipe: Connection) -> None:
    """A process that commits `count` batches, one lock each."""
    for version in range(count):
        append(Path(root), app, version)
    attached_store(root).detach()
    pipe.send("done")


def test_four_processes_take_turns(tmp_path: Path) -> None:
    """Four processes, ten commits each on per-commit locks: all there, once, in order, and the store is closed
    cleanly.
    """
    root = tmp_path / "s"
    filled(root, 2, CONFIG)
    pipes, processes = [], []
    for number in range(4):
        mine, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=commits, args=(str(root), f"app{number}", 10, theirs))
        process.start()
        pipes.append(mine)
        processes.append(process)
    for pipe, process in zip(pipes, processes, strict=True):
        assert pipe.poll(60) and pipe.recv() == "done"
        process.join()
    with MessageStore.open_read_only(root) as store:
        for number in range(4):
            found = read_all(store, f"app{number}", 0)
            assert found == [b for v in range(10) for b in bodies(10, start=1000 * v)[::2]]
    assert not (root / "abort").exists()
    report = verify(root)
    assert report.ok, report.findings[:3]
    assert report.batch_count == 40


def test_catching_up_does_not_recover(tmp_path: Path) -> None:
    """Another process committed in between: this one follows heads to V instead of walking the log again."""
    root = tmp_path / "s"
    append(root, "mine", 0)
    store = attached_store(root)
    writer, report = store.writer, store.report
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=commits, args=(str(root), "other", 1, theirs))
    process.start()
    assert mine.poll(240) and mine.recv() == "done"
    process.join()
    assert append(root, "mine", 1) == "appended"
    assert append(root, "other", 0) == "known"
    assert store.writer is writer and store.report is report
    store.detach()
    assert verify(root).ok


def test_a_session_keeps_others_out(tmp_path: Path) -> None:
    """Another process waits for lockTimeout, then is told who holds the store."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL):
        code = f"from messagestore import MessageStore, StoreConfig\nMessageStore.open({str(root)!r}, StoreConfig(lock_timeout='200ms'))"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
        last = process.stderr.strip().splitlines()[-1]
        assert process.returncode == 1
        assert "StoreLockedError" in last and f"pid {os.getpid()}" in last and "a session" in last


def test_a_session_and_commits_of_one_process(tmp_path: Path) -> None:
    """Threads of one process share the locks: a commit goes through while a session is open."""
    root = tmp_path / "s"
    with MessageStore.open(root, CONFIG) as store:
        store.put_message(Message("t", b"before", queue_id=0))
        assert append(root, "app", 0) == "appended"
        store.put_message(Message("t", b"behind", queue_id=0))
        assert read_all(store) == [b"before", b"behind"]
        assert len(read_all(store, "app")) == 5
    assert verify(root).ok


def test_a_thread_waits_for_another_no_longer_than_its_lock_timeout(tmp_path: Path) -> None:
    """A long commit of one thread, and one more each that commits, opens a session and aborts: the error says who holds
    the store. One that waits long enough gets its turn, and has used up its time for other processes.
    """
    root = tmp_path / "s"
    store, entered, leave = attached_store(root, CONFIG), threading.Event(), threading.Event()
    impatient = CONFIG.replace(lock_timeout="200ms")

    def long_commit() -> None:
        with store.writing("batch 7 of app slow", config=CONFIG):
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=long_commit)
    thread.start()
    assert entered.wait(60)
    expected = rf"another thread of this process, pid {os.getpid()} \(batch 7 of app slow\) after 0\.2 s"
    try:
        begin_s = time.monotonic()
        with pytest.raises(StoreLockedError, match=expected), store.writing("another", config=impatient):
            pass
        with pytest.raises(StoreLockedError, match=expected):
            MessageStore.open(root, impatient)
        with pytest.raises(StoreLockedError, match=expected), store.writing("abort", 0.2, config=CONFIG):
            pass
        with pytest.raises(StoreLockedError, match="after 0 s"), store.writing("one try", 0, config=CONFIG):
            pass
        assert time.monotonic() - begin_s >= 0.6
    finally:
        timer = threading.Timer(0.1, leave.set)
        timer.start()
        with store.writing("patient", 60, config=CONFIG), store.writing("within", 0, config=CONFIG):
            pass
        thread.join()
        timer.join()
    store.detach()


def test_detach_after_the_time_out(tmp_path: Path) -> None:
    """attachTimeout after the last commit: C is at the end, `abort` is gone, a broker could start."""
    root = tmp_path / "s"
    append(root, "app", 0, config=CONFIG.replace(attach_timeout="100ms"))
    assert (root / "abort").exists()
    store = attached_store(root)
    deadline = time.monotonic() + 120
    while store.attached and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not store.attached and not (root / "abort").exists()
    state = StateFile(Disk(), str(root / "spark" / "state")).read()
    assert state is not None and state.clean and state.clean_end == state.visible_end


def test_abort_stays_while_another_is_attached(tmp_path: Path) -> None:
    """The first to go leaves `abort` to the last."""
    root = tmp_path / "s"
    append(root, "app", 0)
    code = (
        "import sys; from messagestore import Message, MessageStore, StoreConfig\n"
        f"with MessageStore.open({str(root)!r}) as store: store.put_message(Message('t', b'x', queue_id=0))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    assert (root / "abort").exists()
    attached_store(root).detach()
    assert not (root / "abort").exists()
    assert verify(root).ok


def test_abort_goes_with_the_last_process_though_others_deleted_what_it_knew_of_the_log(tmp_path: Path) -> None:
    """It could not follow from its own end on, and left `abort` for good: a broker would rebuild what is not missing."""
    root = tmp_path / "s"
    append(root, "app", 0, config=SMALL)
    code = (
        "import sys; from messagestore import Message, MessageStore, StoreConfig\n"
        f"with MessageStore.open({str(root)!r}) as store:\n"
        "    for _ in range(40): store.put_message(Message('t', bytes(2000), queue_id=0))\n"
        "    assert store.delete_expired_files(before_offset=40_000, at_once=True).min_offset > 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    assert (root / "abort").exists()
    attached_store(root).detach()
    assert not (root / "abort").exists()
    assert verify(root).ok
    state = StateFile(Disk(), str(root / "spark" / "state")).read()
    assert state is not None and state.clean and state.clean_end == state.visible_end
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None and store.report.reason == "clean"
        assert store.max_offset("t", 0) == 40


def test_a_killed_committer_is_recovered_by_one_that_stayed_attached(tmp_path: Path) -> None:
    """In flight in `state`: the process that was attached all the time does not trust its cache."""
    root = tmp_path / "s"
    append(root, "mine", 0)
    store = attached_store(root)
    before = store.report
    code = (
        "import os, signal; from messagestore import Message, MessageStore\n"
        f"store = MessageStore.open({str(root)!r})\n"
        "store.put_message(Message('t', b'killed behind this', queue_id=0))\n"
        "store.writer.log.write(store.writer.end.physical_offset, b'\\0\\0\\0\\x70\\xda\\xa3\\x20\\xa7half')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run([sys.executable, "-c", code], timeout=240, check=False)
    assert process.returncode == -signal.SIGKILL
    assert append(root, "mine", 1) == "appended"
    assert store.report is not before and store.report is not None and store.report.reason == "a writer crashed"
    store.detach()
    with MessageStore.open_read_only(root) as reader:
        assert read_all(reader) == [b"killed behind this"]
    assert verify(root).ok


def test_a_forked_child_starts_anew(tmp_path: Path) -> None:
    """The child of a fork neither holds nor drops its parent's locks, and cannot write with its parent's store."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL.replace(lock_timeout="100ms")) as store:
        store.put_message(Message("t", b"parent", queue_id=0))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                MessageStore.open(root, SMALL.replace(lock_timeout="100ms"))
            except StoreLockedError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        store.put_message(Message("t", b"still here", queue_id=0))
        assert read_all(store) == [b"parent", b"still here"]


def test_a_failed_open_lets_go(tmp_path: Path) -> None:
    """An open that is refused leaves no lock behind."""
    root = filled(tmp_path / "s", 4)
    stray = root / "commitlog" / "x"
    stray.write_text("x")
    with pytest.raises(CorruptionError, match="20 digits"):
        MessageStore.open(root, SMALL)
    stray.unlink()
    with MessageStore.open(root, SMALL) as store:
        assert len(read_all(store)) == 2


def test_writing_without_a_session_is_recoverable(tmp_path: Path) -> None:
    """A committer that is gone without detaching (Spark kills idle workers): the next one finds all."""
    root = tmp_path / "s"
    append(root, "app", 0)
    die(root)
    assert append(root, "app", 0) == "known"
    assert append(root, "app", 1) == "appended"
    attached_store(root).detach()
    assert verify(root).ok


# ---- a broker starts


def wait_until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def state_of(root: Path) -> State:
    state = StateFile(Disk(), str(root / "spark" / "state")).read()
    assert state is not None
    return state


def test_an_idle_writer_makes_way_for_a_broker(tmp_path: Path) -> None:
    """Between two commits: the store is closed as in a detach, and then the broker's constructor goes on. The next
    commit says who has the store; when the broker is gone, commits go on."""
    root = tmp_path / "s"
    append(root, "app", 0)
    store = attached_store(root)
    with starting_broker(root) as java:
        assert java.word() == "locked"
        deadline = time.monotonic() + 120
        while store.attached and time.monotonic() < deadline:
            time.sleep(0.01)  # the lease goes first: the broker may be quicker than the rest of the detach
        assert not store.attached and not (root / "abort").exists()
        assert state_of(root).clean and state_of(root).clean_end == state_of(root).visible_end
        with pytest.raises(StoreLockedError, match=f"pid {java.pid}"):
            append(root, "app", 1)
    assert append(root, "app", 0) == "known"
    assert append(root, "app", 1) == "appended"
    store.detach()
    assert verify(root).ok


@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC, SMALL_POOL], ids=["SYNC_FLUSH", "ASYNC_FLUSH", "pool"])
def test_a_session_makes_way_for_a_broker(tmp_path: Path, config: StoreConfig) -> None:
    """What was acknowledged is on the disk before the broker goes on; the next put says so, and closing is no error."""
    root = tmp_path / "s"
    with MessageStore.open(root, config) as store:
        for body in bodies(5):
            store.put_message(Message("t", body, queue_id=0))
        with starting_broker(root) as java:
            assert java.word() == "locked"
            assert not (root / "abort").exists()
            assert state_of(root).clean
            size = (root / "commitlog" / f"{0:020d}").read_bytes()
            with pytest.raises(
                StoreLockedError, match=r"broker that is starting waits.*is on the disk.*Open the store again"
            ):
                store.put_message(Message("t", b"too late", queue_id=0))
            with pytest.raises(StoreLockedError):
                store.append_batch(columns(bodies(3)), BatchRequest())
            store.flush()
            assert read_all(store) == bodies(5)
            assert (root / "commitlog" / f"{0:020d}").read_bytes() == size
    with MessageStore.open(root, config) as store:
        store.put_message(Message("t", b"after", queue_id=0))
        assert read_all(store) == [*bodies(5), b"after"]
    assert verify(root).ok


@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC], ids=["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_puts_of_many_threads_when_a_broker_comes(tmp_path: Path, config: StoreConfig) -> None:
    """Each put is acknowledged and there, or refused and not there."""
    root = tmp_path / "s"
    acknowledged: list[bytes] = []
    refused: list[str] = []

    def put(name: int) -> None:
        for number in range(100_000):
            body = b"%d/%d" % (name, number)
            try:
                assert store.put_message(Message("t", body, queue_id=name)).status is PutMessageStatus.PUT_OK
            except StoreLockedError as error:
                refused.append(str(error))
                return
            acknowledged.append(body)

    with MessageStore.open(root, config) as store:
        threads = [threading.Thread(target=put, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(acknowledged) > 50, "no put went through")
        with starting_broker(root) as java:
            assert java.word() == "locked"
            for thread in threads:
                thread.join(20)
    assert len(refused) == 4
    with MessageStore.open_read_only(root, config) as view:
        found = [body for name in range(4) for body in read_all(view, "t", name)]
    assert sorted(found) == sorted(acknowledged)
    assert verify(root).ok


def test_a_broker_that_comes_amid_a_batch_waits_for_its_end(tmp_path: Path) -> None:
    """A batch that was begun is finished."""
    root = tmp_path / "s"
    append(root, "app", 0)
    store, chances = attached_store(root), iter([True])
    with contextlib.ExitStack() as stack:

        class Slow(Chunks):
            def read(self, index: int, *, with_data: bool) -> Rows:
                if with_data and next(chances, False):
                    java = stack.enter_context(starting_broker(root))
                    assert java.word(0.5) == "waits"
                    javas.append(java)
                return super().read(index, with_data=with_data)

        javas: list[Java] = []
        with store.writing("a batch") as writer:
            rows = columns(bodies(10, start=1000), topic="app")
            chunk = encode(rows, limits=CONFIG, store_host=writer.files.store_host, born_host=bytes(8))
            assert append_batch(writer, Slow([chunk]), BatchRequest("app", 1, "spark")).status == "appended"
        assert javas[0].word() == "locked"
        assert not (root / "abort").exists()
    assert append(root, "app", 1) == "known"
    store.detach()
    assert verify(root).batch_count == 2


def test_a_broker_gets_in_beside_writers_that_come_and_go(tmp_path: Path) -> None:
    """Four processes commit all the time: none of them keeps it out."""
    root = tmp_path / "s"
    filled(root, 2, CONFIG)
    pipes = []
    for number in range(4):
        mine, theirs = CONTEXT.Pipe()
        CONTEXT.Process(target=commits_until_refused, args=(str(root), f"app{number}", theirs), daemon=True).start()
        pipes.append(mine)
    for pipe in pipes:
        assert pipe.poll(60) and pipe.recv() == "committing"
    with starting_broker(root) as java:
        assert java.word() == "locked"
        ends = [pipe.recv() if pipe.poll(60) else None for pipe in pipes]
    with MessageStore.open_read_only(root) as store:
        for number, (count, error) in enumerate(ends):
            assert "lock: " in error
            assert len(read_all(store, f"app{number}", 0)) == 5 * count > 0
    assert verify(root).ok


def commits_until_refused(root: str, app: str, pipe: Connection) -> None:
    """A process that commits until a broker is there; how often, and what it was told."""
    version = 0
    while True:
        try:
            append(Path(root), app, version)
        except StoreLockedError as error:
            pipe.send((version, str(error)))
            return
        version += 1
        if version == 1:
            pipe.send("committing")


def test_a_writer_beside_a_broker_that_reads_the_store_is_refused(tmp_path: Path) -> None:
    """Before its lock, which it takes last: nothing is changed meanwhile, and the broker's start is not disturbed."""
    root = filled(tmp_path / "s", 4)
    before = tree_hash(root)
    with starting_broker(root, "constructor") as java:
        assert java.word() == "opened"
        for _ in range(3):
            with pytest.raises(StoreLockedError, match=f"pid {java.pid}"):
                MessageStore.open(root, SMALL)
            with pytest.raises(StoreLockedError, match=f"pid {java.pid}"):
                append(root, "app", 0)
        assert tree_hash(root) == before
        java.go_on()
        assert java.word() == "locked"


def test_a_writer_that_let_a_broker_wait_for_too_long_recovers(tmp_path: Path) -> None:
    """Stopped for longer than the kernel's patience: what the broker did is not known. Nothing more is written, `abort`
    stays, and the next writer recovers."""
    root, disk = tmp_path / "s", PatienceDisk()
    append(root, "app", 0, disk=disk)
    store = attached_store(root, disk=disk)
    with store.mutex:  # as a process that stands still
        disk.overrun_s = 0.3
        with starting_broker(root) as java:
            assert java.word(0.8) == "waits"
        state = state_of(root)
    wait_until(lambda: not store.attached, "it stays attached")
    assert (root / "abort").exists() and state_of(root) == state
    assert append(root, "app", 1, disk=disk) == "appended"
    assert store.report is not None and store.report.reason == "not closed, nothing in flight"
    store.detach()
    assert verify(root).ok


def test_a_session_cannot_write_behind_a_lock_file_that_was_replaced(tmp_path: Path) -> None:
    """Another thread's commit has opened the store anew: what the session knew of its end is old."""
    root = tmp_path / "s"
    with MessageStore.open(root, CONFIG) as session:
        session.put_message(Message("t", b"x", queue_id=0))
        (root / "lock").rename(root / "old")
        append(root, "app", 0)
        with pytest.raises(StoreClosedError, match="has closed the store"):
            session.put_message(Message("t", b"y", queue_id=0))
    assert append(root, "app", 1) == "appended"
    attached_store(root).detach()
    (root / "old").unlink()
    assert verify(root).ok


FORBIDDING = [
    ("brokerRole=SLAVE", "Write to the master's store"),
    ("duplicationEnable=true", "Write to a store without this setting"),
    ("enableDLegerCommitLog=true", "Send the messages to the broker"),
    ("enableControllerMode=true", "Send the messages to the broker"),
    ("storeType=defaultRocksDB", "Send the messages to the broker"),
    ("rocksdbCQDoubleWriteEnable=true", "Turn it off in the broker"),
    ("configManagerVersion=v2", "Send the messages to the broker"),
    ("transRocksDBEnable=true", "Send the messages to the broker"),
    ("messageStorePlugIn=org.apache.rocketmq.tieredstore.TieredMessageStore", "Send the messages to the broker"),
    ("forceVerifyPropCRC=true", "Set enabledAppendPropCRC=true"),
    ("storePathCommitLog=/nowhere/commitlog", "symbolic link"),
]


@pytest.mark.parametrize(("line", "remedy"), FORBIDDING, ids=[line for line, _ in FORBIDDING])
def test_a_brokers_settings_that_forbid_to_write(tmp_path: Path, line: str, remedy: str) -> None:
    """Refused by name, with what to do; nothing is changed, and nothing made. Reading goes on."""
    root, conf = filled(tmp_path / "s", 4), tmp_path / "broker.conf"
    conf.write_text(f"brokerId=0\n{line}\n")
    config, before = StoreConfig.load(conf), tree_hash(root)
    for path in (root, tmp_path / "new"):
        with pytest.raises(ConfigError, match=f"cannot be written with {line}: .*{remedy}") as caught:
            MessageStore.open(path, config)
        assert caught.value.key == line.partition("=")[0]
        with pytest.raises(ConfigError, match="cannot be written with"):
            append(path, "app", 0, config=config)
    assert tree_hash(root) == before and not (tmp_path / "new").exists()
    with MessageStore.open_read_only(root, config) as store:
        assert len(read_all(store)) == 2


@pytest.mark.parametrize(
    "lines",
    [
        "brokerRole=SYNC_MASTER",
        "messageStorePlugIn=\ntransRocksDBEnable=true ",
        "brokerRole=async_master\nstoreType=default\nduplicationEnable=false\nenableControllerMode=false",
        "forceVerifyPropCRC=true\nenabledAppendPropCRC=true",
        "storePathCommitLog={root}/commitlog",
        "storePathRootDir={root}\nstorePathCommitLog={root}/commitlog",
        "storePathRootDir=/another/store\nstorePathCommitLog=/another/log",
    ],
)
def test_a_brokers_settings_that_allow_to_write(tmp_path: Path, lines: str) -> None:
    """Those of a master; and of another store, when the file is only taken for its sizes."""
    root, conf = tmp_path / "s", tmp_path / "broker.conf"
    conf.write_text(f"brokerId=0\nmappedFileSizeCommitLog=65536\n{lines.format(root=root)}\n")
    with MessageStore.open(root, StoreConfig.load(conf)) as store:
        assert store.put_message(Message("t", b"x", queue_id=0)).is_ok
    assert (root / "commitlog" / f"{0:020d}").stat().st_size == 65536


def test_the_sizes_of_a_brokers_store_without_messages_are_not_guessed(tmp_path: Path) -> None:
    """No file says how large a segment is: asked for, and nothing made; the broker's own file answers."""
    root, conf = tmp_path / "s", tmp_path / "broker.conf"
    for name in ("commitlog", "consumequeue", "index", "config"):
        (root / name).mkdir(parents=True)
    (root / "config" / "topics.json").write_text("{}")
    before = sorted(root.rglob("*"))
    for config in (None, StoreConfig(lock_timeout="1s"), StoreConfig(mapped_file_size_commit_log=65536)):
        with pytest.raises(
            ConfigError, match=r"a broker created this store.*broker\.conf.*mappedFileSizeCon|mappedFileSizeCom"
        ):
            MessageStore.open(root, config)
    assert sorted(root.rglob("*")) == before
    conf.write_text("brokerId=0\nmappedFileSizeCommitLog=65536\n")
    with MessageStore.open(root, StoreConfig.load(conf)) as store:
        assert store.put_message(Message("t", b"x", queue_id=0)).is_ok
    assert (root / "commitlog" / f"{0:020d}").stat().st_size == 65536
    assert (root / "consumequeue" / "t" / "0" / f"{0:020d}").stat().st_size == 6_000_000
    with MessageStore.open(root) as store:
        assert read_all(store) == [b"x"]


@pytest.mark.parametrize(
    "form",
    [
        "consumequeue/CURRENT",
        "consumequeue_rocksdb/CURRENT",
        "config/rdb/CURRENT",
        "batchconsumequeue/t/0/0",
        "consumequeue/%LMQ%x/0/0",
    ],
)
def test_a_writer_that_is_refused_creates_nothing(tmp_path: Path, form: str) -> None:
    """RocksDB queues, topics and groups in RocksDB, BatchConsumeQueues, light queues: no `spark/`, no lock file."""
    root = tmp_path / "s"
    (root / form).parent.mkdir(parents=True)
    (root / form).write_bytes(b"MANIFEST-000005\n")
    (root / "commitlog").mkdir()
    before = tree_hash(root)
    for _ in range(2):
        with pytest.raises(NotAStoreError, match="only"):
            MessageStore.open(root, SMALL)
        with pytest.raises(NotAStoreError, match="only"):
            append(root, "app", 0)
    assert tree_hash(root) == before
    assert sorted(path.name for path in root.iterdir()) == sorted({"commitlog", form.split("/", maxsplit=1)[0]})


def test_groups_that_a_broker_keeps_in_rocksdb_are_not_taken_for_none(tmp_path: Path) -> None:
    """configManagerVersion=v2: what a group has not read is not deleted, and `groups` does not say that there is none.
    The files of an earlier time do not count. Messages are read."""
    root = filled(tmp_path / "s", 4)
    publish_offsets(str(root), "delays", {("t", 0): 1})
    (root / "config" / "rdb").mkdir()
    assert operator.groups(str(root))[0]
    (root / "config" / "rdb" / "CURRENT").write_text("MANIFEST-000005\n")
    before = tree_hash(root)
    for look in (
        lambda: operator.groups(str(root)),
        lambda: operator.group_settings(str(root)),
        lambda: LOCAL_STORES.reader(str(root)).group_lag("delays"),
        lambda: operator.expired(str(root), at_once=True),
        lambda: publish_offsets(str(root), "delays", {("t", 0): 2}),
    ):
        with pytest.raises(ConfigError, match=r"config/rdb: found .*configManagerVersion=v2.*mqadmin"):
            look()
    with pytest.raises(NotAStoreError, match=r"configManagerVersion=v2.*Messages can be read"):
        MessageStore.open(root)
    with contextlib.closing(LOCAL_STORES.reader(str(root))) as reader:
        assert any("configManagerVersion=v2" in fault for fault in reader.view("figures")[1])
        rows, faults = reader.view("topics")  # topics.json has the permissions of an earlier time
        assert [(row["topic"], row["messages"], row["perm"]) for row in rows] == [("t", 4, None)]
        assert any("configManagerVersion=v2" in fault for fault in faults)
    with MessageStore.open_read_only(root) as store:
        assert len(read_all(store)) == 2
    assert tree_hash(root) == before


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("epochFileCheckpoint", "enableControllerMode"),
        ("brokerIdentity", "enableControllerMode"),
        ("dledger-n0/data/00000000000000000000", "enableDLegerCommitLog"),
    ],
)
def test_a_store_of_a_group_that_elects_its_master_is_refused(tmp_path: Path, name: str, says: str) -> None:
    """No broker's file is given that would say so; the broker's other files do. It can be read."""
    root = tmp_path / "s"
    append(root, "app", 0)
    attached_store(root).detach()
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"1-0")
    before = tree_hash(root)
    with pytest.raises(NotAStoreError, match=says):
        MessageStore.open(root, SMALL)
    assert tree_hash(root) == before
    with MessageStore.open_read_only(root, SMALL) as view:
        assert view.topics()


# ---- a worker of Spark ends


WORKER = """
import os, signal, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from messagestore.session import attached_store, detach_at_the_end
from store.test_attached_store import append
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, and so inherited, where the tests run below `nohup`
{before}
detach_at_the_end()
append(Path({root!r}), "app", 0)
assert os.path.exists({root!r} + "/abort")
{end}
time.sleep(3600)
"""


def worker_that_ends(root: Path, end: str, before: str = "") -> int:
    code = WORKER.format(path=sys.path, root=str(root), before=before, end=end)
    return subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("os.kill(os.getpid(), signal.SIGHUP)", 129),
        ("os._exit(3)", 3),
    ],
)
def test_a_worker_that_is_ended_closes_the_store(tmp_path: Path, end: str, status: int) -> None:
    """By a signal, or by `os._exit`, as Spark's daemon does: Python's own end of a program does not come."""
    root = tmp_path / "s"
    assert worker_that_ends(root, end) == status
    assert not (root / "abort").exists()
    assert state_of(root).clean
    assert append(root, "app", 0) == "known"


def test_a_worker_without_a_store_ends_by_the_signal(tmp_path: Path) -> None:
    """Nothing to close: it ends as without a handler."""
    end = f"attached_store({str(tmp_path / 's')!r}).detach(); os.kill(os.getpid(), signal.SIGTERM)"
    assert worker_that_ends(tmp_path / "s", end) == -signal.SIGTERM


def test_a_worker_that_is_ended_amid_an_append_does_not_wait_for_it(tmp_path: Path) -> None:
    """The thread that the signal interrupts holds the locks: the process ends soon, and the next writer recovers."""
    root = tmp_path / "s"
    end = (
        f"with attached_store({str(root)!r}).writing('x') as writer:\n"
        "    with writer.mutex:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(3600)"
    )
    assert worker_that_ends(root, end) == 143
    assert (root / "abort").exists()
    assert append(root, "app", 1) == "appended"
    attached_store(root).detach()
    assert verify(root).ok


def test_a_handler_of_the_users_is_left_alone(tmp_path: Path) -> None:
    """Whoever handles the signal decides what it does."""
    root = tmp_path / "s"
    before = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    assert worker_that_ends(root, "os.kill(os.getpid(), signal.SIGTERM)", before) == 5
    assert not (root / "abort").exists()  # at the end of a Python program


def test_a_store_whose_own_folder_is_removed_under_an_attached_process_is_no_store(tmp_path: Path) -> None:
    """What should only be a StoreError came as FileNotFoundError."""
    MessageStore.open(tmp_path, SMALL).close()
    with attached_store(tmp_path).writing("query"):
        pass
    shutil.rmtree(tmp_path / "spark")
    with pytest.raises(
        NotAStoreError, match="found no such folder; this process had the store open when it was removed"
    ):
        MessageStore.open(tmp_path, SMALL)


@pytest.mark.parametrize("name", ["spark", "spark/state"])
@pytest.mark.parametrize(
    "call",
    [
        MessageStore.close,
        lambda store: store.put_message(Message("gates", b"C3", queue_id=0)),
        lambda store: store.append_batch(columns([b"D7"], topic="gates")),
    ],
    ids=["close", "put", "batch"],
)
@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC], ids=["sync", "async"])
def test_a_session_says_that_the_stores_own_files_were_removed(
    tmp_path: Path, config: StoreConfig, call: Callable[[MessageStore], object], name: str
) -> None:
    """`close` and the batch raised a bare FileReplaced, which names neither the store nor what to do."""
    store = MessageStore.open(tmp_path, config)
    assert store.put_message(Message("gates", b"B12", queue_id=0)).queue_offset == 0
    removed = tmp_path / name
    if removed.is_dir():
        until_s = time.monotonic() + 60
        while removed.exists():  # the flush thread may be making a file in it
            assert time.monotonic() < until_s
            shutil.rmtree(removed, ignore_errors=True)
    else:
        removed.unlink()
    with pytest.raises(StorePoisonedError, match=r"(spark|a lock file was removed).* open it again"), store:
        call(store)

    with MessageStore.open(tmp_path, config) as again:
        assert read_all(again, "gates")[0] == b"B12"


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EROFS, "is mounted read-only"), (errno.EACCES, "this user may not create files there")]
)
def test_a_place_that_cannot_be_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    root = filled(tmp_path / "s", 2)
    refused = OSError(number, os.strerror(number), str(root / "spark"))
    monkeypatch.setattr("messagestore.store_locks.attach", mock.Mock(side_effect=refused))
    with pytest.raises(OSError, match="spark") as raised:
        MessageStore.open(root, SMALL)
    assert words in "".join(raised.value.__notes__)
