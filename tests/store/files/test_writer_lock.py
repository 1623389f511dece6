"""Who may write: Java's lock file, our own, and forked children."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernel import refuse_leases
from messagestore import Message, MessageStore
from messagestore.errors import NotAStoreError, StoreClosedError, StoreFullError, StoreLockedError
from messagestore.files import writer_lock
from messagestore.files.disk import Disk
from messagestore.files.writer_lock import Attachment, Holder, WriterLock, attach, probe_java
from messagestore.inspect.verify import verify
from processes import PatienceDisk, starting_broker


@contextmanager
def java_broker(root: Path) -> Iterator[tuple[str, int]]:
    """A broker that starts: its first word ("waits": it is kept out by a lease), and its pid."""
    with starting_broker(root) as java:
        yield java.word(1.0 if leases_held() else 20), java.pid


def await_fact(fact: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def leases_held() -> bool:
    """Whether an attachment of this process holds a lease."""
    return any(isinstance(lock, Attachment) and lock.leased for lock in writer_lock._live)


def java_can_lock(root: Path) -> bool:
    with java_broker(root) as (word, _):
        return word == "locked"


@contextmanager
def forked(run: Callable[[], str]) -> Iterator[tuple[str, int]]:
    """A child that runs `run`, then lives on until the block ends; what `run` returned, and its pid."""
    answer_read, answer_write = os.pipe()
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(answer_read)
            os.close(go_write)
            try:
                answer = run()
            except BaseException as error:  # noqa: BLE001 - told to the parent
                answer = f"{type(error).__name__}: {error}"
            os.write(answer_write, answer.encode() or b"-")
            os.read(go_read, 1)
            status = 0
        finally:
            os._exit(status)
    os.close(answer_write)
    os.close(go_read)
    try:
        ready, _, _ = select.select([answer_read], [], [], 20)
        yield os.read(answer_read, 10_000).decode() if ready else "no answer", pid
    finally:
        os.close(go_write)
        os.waitpid(pid, 0)
        os.close(answer_read)


@pytest.fixture(params=["leases", "no leases"], autouse=True)
def leases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test with leases, and as on a file system that has none."""
    if request.param == "no leases":
        refuse_leases(monkeypatch)
    return request.param == "leases"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "spark").mkdir()
    return tmp_path


@pytest.fixture
def lock_path(root: Path) -> str:
    return str(root / "spark" / "writer.lock")


def attached(root: Path, disk: Disk | None = None) -> Attachment:
    return attach(str(root), disk or Disk())


# ---- against a Java broker


def test_attaching_keeps_java_out_until_detached(root: Path):
    """A broker's start fails while any Python writer is attached."""
    first, second = attached(root), attached(root)
    assert not java_can_lock(root)
    first.detach()
    assert not java_can_lock(root)
    second.detach()
    assert java_can_lock(root)


def test_java_keeps_us_out_and_is_named(root: Path):
    """The error says that it is a broker, its pid, and what to do."""
    attached(root).detach()
    with java_broker(root) as (word, pid):
        assert word == "locked"
        with pytest.raises(StoreLockedError, match=rf"pid {pid} \(.*\) on .*\. Stop it") as caught:
            attached(root)
        assert caught.value.path == str(root / "lock")
        program = Path(f"/proc/{pid}/comm").read_text().strip()
        assert caught.value.holder == f"a RocketMQ broker, pid {pid} ({program}) on {socket.gethostname()}"
        assert probe_java(str(root)) == Holder(pid)
    attached(root).detach()


def test_a_reader_sees_a_live_broker_only(root: Path):
    """No file, our own shared locks, and a broker that ended show nothing."""
    assert probe_java(str(root)) is None
    assert probe_java(str(root / "missing")) is None
    mine = attached(root)
    assert probe_java(str(root)) is None
    with forked(lambda: str(probe_java(str(root)))) as (answer, _):
        assert answer == "None"
    mine.detach()
    with java_broker(root):
        assert probe_java(str(root)) is not None
    assert probe_java(str(root)) is None


def test_probing_does_not_drop_our_lock(root: Path):
    """A POSIX lock would go when any descriptor of the file is closed; ours stays."""
    mine = attached(root)
    probe_java(str(root))
    (root / "lock").read_bytes()
    assert not java_can_lock(root)
    mine.detach()


def test_probing_reads_only(root: Path):
    """The source never writes: no lock file appears, and a read-only one is enough."""
    assert probe_java(str(root)) is None
    assert not (root / "lock").exists()
    (root / "lock").write_bytes(b"lock")
    (root / "lock").chmod(0o400)
    assert probe_java(str(root)) is None
    assert (root / "lock").read_bytes() == b"lock"


@pytest.mark.parametrize(
    ("pid", "words"),
    [
        (os.getpid(), f"a RocketMQ broker, pid {os.getpid()} ({Path('/proc/self/comm').read_text().strip()}) on "),
        (1 << 30, f"a RocketMQ broker, pid {1 << 30} on "),
        (0, "another pid namespace (a container) on "),
        (-1, "that the kernel does not name"),
    ],
    ids=["this process", "gone", "in a container", "not named"],
)
def test_a_holder_is_a_sentence_wherever_it_is_shown(pid: int, words: str):
    """The sink said `held by Holder(pid=4711)`. The kernel shows 0 for a process in another container."""
    assert words in f"{Holder(pid)}"
    assert socket.gethostname() in str(Holder(pid))
    assert Holder(pid).words == str(Holder(pid))


def test_alone_counts_every_other_writer(root: Path):
    """In this process or another: the last one to leave removes `abort`."""
    mine = attached(root)
    assert mine.alone()
    other = attached(root)
    assert not mine.alone()
    other.detach()
    assert mine.alone()

    kept = []

    def attach_in_child() -> str:
        kept.append(attached(root))
        return "attached"

    with forked(attach_in_child) as (answer, _):
        assert answer == "attached"
        assert not mine.alone()
    assert mine.alone()
    mine.detach()
    with pytest.raises(StoreClosedError):
        mine.alone()


def test_a_removed_or_replaced_lock_file_is_noticed(root: Path):
    """A lock on a file that has no name any more protects nothing."""
    mine = attached(root)
    assert mine.intact()
    (root / "lock").rename(root / "elsewhere")
    assert not mine.intact()
    (root / "lock").write_bytes(b"")
    assert not mine.intact()
    mine.detach()
    assert not mine.intact()


def test_detaching_twice_and_forgetting(root: Path):
    """A second detach does nothing; an attachment that nobody holds any more is let go."""
    mine = attached(root)
    assert mine.attached
    mine.detach()
    mine.detach()
    assert not mine.attached
    other = attached(root)
    del other
    gc.collect()
    assert java_can_lock(root)


def test_the_lock_file_is_kept_and_private(root: Path):
    """Java's content stays; a file we make is for its owner only."""
    attached(root).detach()
    assert (root / "lock").stat().st_mode & 0o777 == 0o600
    (root / "lock").write_bytes(b"lock")
    attached(root).detach()
    assert (root / "lock").read_bytes() == b"lock"


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder"])
def test_anything_but_a_file_is_refused(root: Path, lock_path: str, kind: str):
    """A link could lead anywhere; opening a FIFO could hang."""
    for path in (str(root / "lock"), lock_path):
        if kind == "link":
            (root / "target").write_bytes(b"")
            os.symlink(root / "target", path)
        elif kind == "dangling":
            os.symlink(root / "nowhere", path)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            os.mkdir(path)
    with pytest.raises(NotAStoreError):
        attached(root)
    with pytest.raises(NotAStoreError):
        WriterLock(lock_path).acquire(0, description="")
    assert not (root / "nowhere").exists()


def test_a_missing_store_is_an_error(tmp_path: Path):
    """Attaching makes the lock file, never the folder."""
    with pytest.raises(FileNotFoundError):
        attached(tmp_path / "missing")


# ---- against a Java broker that starts


needs_leases = pytest.mark.parametrize("leases", ["leases"], indirect=True)


@needs_leases
def test_a_broker_that_starts_waits_for_every_writer(root: Path):
    """Its constructor stands still until the last one has let go; then its lock is free as well."""
    first, second = attached(root), attached(root)
    assert not first.broker_waits()
    with starting_broker(root) as java:
        await_fact(lambda: first.broker_waits() and second.broker_waits())
        assert java.word(0.3) == "waits"
        assert first.intact() and not first.overrun()
        first.detach()
        assert not first.broker_waits()
        assert java.word(0.3) == "waits"
        second.detach()
        assert java.word() == "locked"


@needs_leases
def test_a_broker_that_has_not_locked_yet_is_seen(root: Path):
    """From its constructor on: it reads and cuts the files before it takes its lock."""
    attached(root).detach()
    with starting_broker(root, "constructor") as java:
        assert java.word() == "opened"
        with pytest.raises(
            StoreLockedError, match=rf"pid {java.pid} \(.*\) on .* has it open for writing.*Stop the broker"
        ) as caught:
            attached(root)
        assert caught.value.path == str(root / "lock")
        assert f"pid {java.pid}" in caught.value.holder
        java.go_on()
        assert java.word() == "locked"  # who was refused is not in its way
    attached(root).detach()


@needs_leases
def test_nobody_attaches_before_a_broker_that_waits(root: Path):
    """Else writers that come and go would keep it out for ever."""
    mine = attached(root)
    with starting_broker(root) as java:
        await_fact(mine.broker_waits)
        assert java.word(0.3) == "waits"
        with pytest.raises(
            StoreLockedError, match="a process that this user cannot see has it open for writing, or waits"
        ):
            attached(root)
        mine.detach()
        assert java.word() == "locked"


@needs_leases
def test_writers_and_readers_do_not_disturb_leases(root: Path):
    """Other writers that come and go, in this process and others, probes, and whoever only reads the file."""
    mine = attached(root)
    attached(root).detach()
    probe_java(str(root))
    (root / "lock").read_bytes()
    with forked(lambda: attached(root).detach() or "done") as (answer, _):
        assert answer == "done"
    assert not mine.broker_waits()
    assert not java_can_lock(root)
    mine.detach()


@needs_leases
def test_a_lease_goes_with_its_process(root: Path):
    """Killed: no broker waits for the dead; a child that lives on does not keep one waiting."""

    def hold() -> str:
        mine = attached(root)
        globals()["kept"] = mine
        return str(mine.leased)

    with forked(hold) as (answer, pid):
        assert answer == "True"
        with starting_broker(root) as java:
            assert java.word(0.3) == "waits"
            os.kill(pid, 9)
            assert java.word() == "locked"


@needs_leases
def test_a_broker_that_waited_for_too_long_has_gone_past_the_lease(root: Path):
    """The kernel lets it through after a while: what it does then, this writer cannot know."""
    disk = PatienceDisk()
    mine = attached(root, disk)
    with starting_broker(root):
        while not mine.broker_waits():
            time.sleep(0.01)
        assert mine.intact()
        disk.overrun_s = 0.001
        time.sleep(0.01)
        assert mine.overrun() and not mine.intact()
    mine.detach()


@needs_leases
def test_detaching_when_the_kernel_has_taken_the_lease_away(root: Path):
    """Nothing is left to give back, and that is no error."""
    mine = attached(root)
    fcntl.fcntl(mine._open().fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)
    mine.detach()
    assert not mine.attached
    assert java_can_lock(root)


def test_the_kernels_patience_is_read(tmp_path: Path):
    """0 is for ever; a system that does not say it has the usual one."""
    for text, wanted in (("45\n", 45), ("0\n", float("inf")), ("", 45)):
        (tmp_path / "time").write_text(text)
        assert Disk().lease_break_time_s(str(tmp_path / "time")) == wanted
    assert Disk().lease_break_time_s() > 0


@needs_leases
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES, errno.ENOLCK])
def test_without_leases_a_warning_says_what_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
):
    """A network file system, or a file of another owner: the lock alone keeps brokers out; said once."""
    refuse_leases(monkeypatch, number)
    with caplog.at_level(logging.WARNING):
        mine, other = attached(root), attached(root)
    assert not mine.leased and not mine.broker_waits() and mine.intact()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "gives no lease" in caplog.text and "Do not start a broker" in caplog.text
    other.detach()
    assert not java_can_lock(root)
    mine.detach()
    assert java_can_lock(root)


# ---- among ourselves


def test_one_writer_at_a_time(lock_path: str):
    """A second lock on the file waits in vain, also in the same process; after release it gets it."""
    first, second = WriterLock(lock_path), WriterLock(lock_path)
    first.acquire(0, description="the first")
    assert first.held
    start = time.monotonic()
    with pytest.raises(StoreLockedError) as caught:
        second.acquire(0.05, description="the second")
    assert 0.05 <= time.monotonic() - start < 60
    assert not second.held
    assert caught.value.path == lock_path
    assert caught.value.holder == f"pid {os.getpid()} on {socket.gethostname()} (the first)"
    assert caught.value.holder in str(caught.value)
    first.release()
    assert not first.held
    second.acquire(0, description="the second")
    second.close()


def test_waiting_ends_when_the_holder_lets_go(lock_path: str):
    """Well before the timeout."""
    first, second = WriterLock(lock_path), WriterLock(lock_path)
    first.acquire(0, description="")
    timer = threading.Timer(0.05, first.release)
    start = time.monotonic()
    timer.start()
    second.acquire(240, description="")
    assert time.monotonic() - start < 120
    timer.join()
    second.close()
    first.close()


def test_a_killed_holder_leaves_nothing_behind(lock_path: str):
    """The kernel lets go of what a dead process held; its name in the file does not matter."""

    def hold() -> str:
        lock = WriterLock(lock_path)
        lock.acquire(0, description="to be killed")
        globals()["kept"] = lock
        return str(lock.held)

    mine = WriterLock(lock_path)
    with forked(hold) as (answer, pid):
        assert answer == "True"
        with pytest.raises(StoreLockedError, match=f"pid {pid} on .*to be killed"):
            mine.acquire(0, description="")
        os.kill(pid, 9)
        mine.acquire(20, description="")
    assert mine.held
    mine.close()


def test_acquire_and_release_are_idempotent(lock_path: str):
    """A holder may ask again; who does not hold may release."""
    lock = WriterLock(lock_path)
    lock.release()
    lock.acquire(0, description="")
    lock.acquire(0, description="")
    lock.release()
    lock.release()
    assert not lock.held
    lock.close()
    lock.close()
    lock.acquire(0, description="")
    lock.close()


@pytest.mark.parametrize(
    "description", ["", "query 7, batch 3", 'quotes " and\nlines', "x" * 5000, "😀" * 300, "\ud800" * 200]
)
def test_the_holders_name_is_one_line_of_json(lock_path: str, description: str):
    """Always 512 bytes, so that a longer name of before does not show through; a long one is cut."""
    lock = WriterLock(lock_path)
    lock.acquire(0, description="z" * 400)
    lock.release()
    lock.acquire(0, description=description)
    data = Path(lock_path).read_bytes()
    assert len(data) == 512
    assert data.count(b"\n") == 1
    note = json.loads(data)
    assert note["pid"] == os.getpid()
    assert description.startswith(note["description"])
    assert len(note["description"]) == len(description) or len(data.rstrip()) > 480
    lock.close()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xff", b'{"pid":3}', b"[" * 512])
def test_a_holder_without_a_name(lock_path: str, text: bytes, monkeypatch: pytest.MonkeyPatch):
    """Whatever is in the file, the timeout is what is reported, and the kernel names the process."""
    first, second = WriterLock(lock_path), WriterLock(lock_path)
    first.acquire(0, description="")
    Path(lock_path).write_bytes(text)
    with pytest.raises(StoreLockedError, match=rf"locked by pid {os.getpid()} \(.+\) on "):
        second.acquire(0, description="")
    monkeypatch.setattr(writer_lock, "_lockers", lambda *_: [])
    with pytest.raises(StoreLockedError, match="an unknown process"):
        second.acquire(0, description="")
    first.close()


def test_a_holder_that_has_left_its_name_is_not_looked_for_among_all_processes(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
):
    """Status and the dashboard ask for it again and again, and the files of all processes take milliseconds."""
    lock = WriterLock(lock_path)
    lock.acquire(0, description="query 1")
    real, listed = os.listdir, []
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or real(path))
    assert "query 1" in lock.holder()
    assert listed == [f"/proc/{os.getpid()}/fd"]
    lock.close()


def test_a_full_disk_does_not_cost_the_lock(lock_path: str, monkeypatch: pytest.MonkeyPatch):
    """The name is only for messages."""

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    lock = WriterLock(lock_path)
    monkeypatch.setattr(os, "pwrite", full)
    lock.acquire(0, description="")
    assert lock.held
    lock.close()


def test_a_removed_lock_file_is_made_again(lock_path: str):
    """Somebody tidied up: two writers must not hold locks on two files."""
    first, second = WriterLock(lock_path), WriterLock(lock_path)
    first.acquire(0, description="")
    first.release()
    os.unlink(lock_path)
    second.acquire(0, description="")
    with pytest.raises(StoreLockedError):
        first.acquire(0.01, description="")
    second.close()
    first.acquire(0, description="")
    first.close()


def test_a_hundred_turns_of_four_processes(root: Path, lock_path: str):
    """A counter that is read and written under the lock misses nothing."""
    counter = root / "counter"
    counter.write_text("0")

    def count() -> str:
        lock = WriterLock(lock_path)
        for _ in range(25):
            lock.acquire(30, description="")
            counter.write_text(str(int(counter.read_text()) + 1))
            lock.release()
        return "done"

    with forked(count) as a, forked(count) as b, forked(count) as c:
        assert count() == "done"
        assert [a[0], b[0], c[0]] == ["done"] * 3
    assert counter.read_text() == "100"


# ---- forked children


def test_a_child_that_closes_does_not_drop_the_parents_locks(root: Path, lock_path: str):
    """An unlock in the child would: the descriptors are one description."""
    mine, lock = attached(root), WriterLock(lock_path)
    lock.acquire(0, description="")

    def leave() -> str:
        answer = f"{lock.held} {mine.attached}"
        lock.release()
        lock.close()
        mine.detach()
        return answer

    with forked(leave) as (answer, _):
        assert answer == "False False"
        assert not java_can_lock(root)
        with pytest.raises(StoreLockedError):
            WriterLock(lock_path).acquire(0, description="")
    assert not java_can_lock(root)
    with pytest.raises(StoreLockedError):
        WriterLock(lock_path).acquire(0, description="")
    assert lock.held
    assert mine.intact()
    lock.close()
    mine.detach()


def test_a_child_cannot_use_the_parents_locks(root: Path, lock_path: str):
    """What the parent cached is not the child's: it opens the store itself."""
    mine, lock = attached(root), WriterLock(lock_path)
    lock.acquire(0, description="")
    lock.release()
    with forked(lambda: lock.acquire(0, description="") or "acquired") as (answer, _):
        assert answer.startswith("StoreClosedError")
    with forked(lambda: str(mine.alone())) as (answer, _):
        assert answer.startswith("StoreClosedError")
    lock.acquire(0, description="")
    lock.close()
    mine.detach()


def test_a_child_may_open_locks_of_its_own(lock_path: str):
    """New objects work after a fork, and wait for the parent like any other process."""
    lock = WriterLock(lock_path)
    lock.acquire(0, description="")

    def wait() -> str:
        own = WriterLock(lock_path)
        own.acquire(20, description="")
        return str(own.held)

    timer = threading.Timer(0.1, lock.release)
    timer.start()
    with forked(wait) as (answer, _):
        assert answer == "True"
    timer.join()


def test_a_dead_parents_locks_do_not_live_on_in_its_child(root: Path, lock_path: str):
    """A writer forks a helper and is killed: neither Java nor the next writer waits for the helper."""
    helper = root / "helper"

    def hold_and_fork() -> str:
        mine, lock = attached(root), WriterLock(lock_path)
        lock.acquire(0, description="")
        globals()["kept"] = (mine, lock)
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        helper.write_text(str(pid))
        return "held"

    with forked(hold_and_fork) as (answer, pid):
        assert answer == "held"
        os.kill(pid, 9)
    try:
        os.kill(int(helper.read_text()), 0)  # it lives
        lock = WriterLock(lock_path)
        lock.acquire(20, description="")
        lock.close()
        assert java_can_lock(root)
    finally:
        os.kill(int(helper.read_text()), 9)


def test_a_started_program_does_not_inherit_the_locks(root: Path, lock_path: str):
    """subprocess and exec: descriptors close on exec."""
    mine, lock = attached(root), WriterLock(lock_path)
    lock.acquire(0, description="")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as program:
        lock.close()
        mine.detach()
        WriterLock(lock_path).acquire(0, description="")
        assert java_can_lock(root)
        assert program.stdin is not None
        program.stdin.close()
        program.wait()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_these_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    """One sentence with the cause and the remedy, for writers and for those who only ask."""
    with closing_attachment(tmp_path):
        pass  # the lock file is there

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writer_lock.fcntl, "fcntl", refuse)
    calls = (
        lambda: attach(str(tmp_path), Disk()),
        lambda: WriterLock(str(tmp_path / "writer.lock")).acquire(0, description="x"),
        lambda: probe_java(str(tmp_path)),
    )
    for call in calls:
        with pytest.raises(NotAStoreError, match=r"lock: the file system gives no open file description locks .*ext4"):
            call()


def test_another_error_of_a_lock_call_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is not taken for a file system without locks."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(writer_lock.fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match="Input/output error") as caught:
        attach(str(tmp_path), Disk())
    assert caught.value.filename == str(tmp_path / "lock")


@contextmanager
def closing_attachment(root: Path) -> Iterator[Attachment]:
    attachment = attach(str(root), Disk())
    try:
        yield attachment
    finally:
        attachment.detach()


def test_a_shared_lock_is_not_said_to_be_the_last_writers(lock_path: str) -> None:
    """The name in the file is that of a session which has ended: it is not to be stopped."""
    before = WriterLock(lock_path)
    before.acquire(0, description="a session of yesterday")
    before.close()
    with open(lock_path, "rb") as file:
        fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
        with pytest.raises(
            StoreLockedError, match="with a shared lock, which no writer of this project takes"
        ) as caught:
            WriterLock(lock_path).acquire(0, description="")
        assert "yesterday" not in str(caught.value)
        assert f"pid {os.getpid()} (" in caught.value.holder


def test_a_holder_that_the_kernel_does_not_show_is_not_named_as_one(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in another container, or another user's: the file names the last writer, which may be another one."""
    first = WriterLock(lock_path)
    first.acquire(0, description="the first")
    monkeypatch.setattr(writer_lock, "_lockers", lambda *_: [])
    with pytest.raises(
        StoreLockedError, match="a process that this user cannot see; the last writer was pid"
    ) as caught:
        WriterLock(lock_path).acquire(0, description="")
    assert "Stop the process that holds it" in str(caught.value)
    first.close()


@pytest.mark.parametrize("kind", ["broker", "writers", "nobody"])
def test_who_may_not_read_the_lock_file_learns_from_the_kernels_list(lock_path: str, kind: str) -> None:
    """Readers ask whether a writer or a broker is at work; the lock files are not theirs to read."""
    Path(lock_path).touch()
    with open(lock_path, "r+b") as file:
        if kind != "nobody":
            lock = fcntl.F_WRLCK if kind == "broker" else fcntl.F_RDLCK
            fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", lock, os.SEEK_SET, 0, 1, 0))
        for asked in (fcntl.F_RDLCK, fcntl.F_WRLCK):
            known, listed = writer_lock._probe(lock_path, asked), writer_lock._listed(lock_path, asked)
            assert (known is None) == (listed is None)
            assert (listed is not None) == (kind == "broker" or (kind == "writers" and asked == fcntl.F_WRLCK))


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="NOT DONE HERE: needs root and unshare")
@pytest.mark.parametrize("within", [[], ["unshare", "--pid", "--fork", "--mount-proc"]], ids=["host", "container"])
def test_a_reader_that_may_not_read_the_lock_file_takes_a_writer_for_dead(
    request: pytest.FixtureRequest, within: list[str]
) -> None:
    """It would show what is not published yet. The kernel lists the lock to everybody, also in other containers."""
    folder = Path(tempfile.mkdtemp())  # `tmp_path` is below a folder of this user's
    request.addfinalizer(lambda: shutil.rmtree(folder))
    folder.chmod(0o755)
    lock_path = str(folder / "writer.lock")
    writer = WriterLock(lock_path)
    writer.acquire(0, description="at work")
    os.chmod(lock_path, 0o600)
    asks = (  # the imports come before it is another user, who may not see the packages
        "import encodings.ascii, os; from messagestore.files import writer_lock\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"assert not os.access({lock_path!r}, os.R_OK)\n"
        f"print(*(writer_lock.is_writing({lock_path!r}, pid) for pid in ({os.getpid()}, 1)))"
    )

    def asked() -> str:
        command = [*within, sys.executable, "-c", asks]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if "unshare: " in done.stderr:
            pytest.skip(f"NOT DONE HERE: {done.stderr.strip()}")
        return done.stdout.strip() or done.stderr

    assert asked() == "True True"
    writer.close()
    assert asked() == "False False"


KILLED = """
import os, signal, sys
from messagestore import Message, MessageStore

made, survived = os.mknod, int(sys.argv[2])

def mknod(*args, **options):
    global survived
    made(*args, **options)
    survived -= 1
    if survived < 0:
        os.kill(os.getpid(), signal.SIGKILL)

os.mknod = mknod
with MessageStore.open(sys.argv[1]) as store:
    store.put_message(Message("t", b"x", queue_id=0))
"""


def test_a_kill_while_a_lock_file_is_made_keeps_nobody_out(tmp_path: Path):
    """It has its name then, but not yet its group and mode. Each lock file of a new store in turn."""
    for survived in range(10):
        root = tmp_path / str(survived)
        process = subprocess.run([sys.executable, "-c", KILLED, root, str(survived)], timeout=120, check=False)
        with MessageStore.open(root) as store:
            store.put_message(Message("t", b"y", queue_id=0))
            assert store.max_offset("t", 0) == (2 if process.returncode == 0 else 1)
        assert verify(str(root)).ok
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert survived >= 2, "no lock file was made"


@pytest.mark.parametrize("names_left", range(5))
def test_a_store_is_not_made_on_a_file_system_without_an_inode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_left: int
) -> None:
    """The files for the locks raised a bare OSError, and so did the search for what a full disk has kept."""
    names = iter(range(names_left))

    def limited(real: Callable[..., None]) -> Callable[..., None]:
        def make(path: str, *arguments: int, **folder: int) -> None:
            if next(names, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(path, *arguments, **folder)

        return make

    with monkeypatch.context() as patch:
        patch.setattr(os, "mknod", limited(os.mknod))
        patch.setattr(os, "mkdir", limited(os.mkdir))
        with pytest.raises(StoreFullError, match="no room for another file"):
            MessageStore.open(tmp_path / "store")

    with MessageStore.open(tmp_path / "store") as store:
        assert store.put_message(Message("gates", b"B12", queue_id=0)).queue_offset == 0


def test_what_is_kept_does_not_hide_that_this_process_may_write_no_larger_file(
    lock_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small `ulimit -f`, a store that had to be recovered raised a bare OSError instead of the StoreFullError."""
    lock = WriterLock(lock_path)
    lock.keep_room(1 << 18)

    def too_large(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", too_large)
        assert lock.give_room_up() == 0
    assert lock.give_room_up() > 0
    lock.close()
