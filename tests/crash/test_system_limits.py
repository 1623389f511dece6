"""The system says no, in its own words: a file size limit, a quota, no address space, no `fallocate`, signals all the time."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from crash import faults, many_queues
from crash.children import ended, in_child
from crash.faults import check_fault
from crash.harness import SMALL, Promise, batch_columns, check_store, do_step, no_thread_warnings
from crash.imitate import rows_seen
from crash.workloads import WORKLOADS, Bases
from messagestore import BatchRequest, Message, MessageStore, StoreFullError
from messagestore.files import disk as disk_module
from messagestore.files.disk import Disk
from messagestore.inspect.verify import verify

pytestmark = [no_thread_warnings, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def limited(kind: int, size: int) -> None:
    resource.setrlimit(kind, (size, resource.RLIM_INFINITY))


# ---- no room


@pytest.mark.parametrize("batches", [False, True], ids=["puts", "batches"])
def test_a_file_size_limit_is_a_full_disk(root: Path, batches: bool) -> None:
    """EFBIG (`ulimit -f`): the append is refused and leaves nothing; with a higher limit the same writer goes on."""
    with MessageStore.open(root, SMALL) as store:
        do_step(store, ("put", 0, "single", 0), Promise())

    bodies = [f"put/{number}/" + "x" * 2000 for number in range(1, 30)]

    def work() -> None:
        with MessageStore.open(root, SMALL) as store:

            def append(number: int) -> None:
                if batches:
                    request = BatchRequest(app_id="app-1", version=number, version_source="user")
                    store.append_batch(batch_columns("app-1", number, 20), request)
                else:
                    assert store.put_message(Message("t", bodies[number].encode(), queue_id=0)).is_ok

            limited(resource.RLIMIT_FSIZE, 8 * 1024)
            done = 0
            try:
                while done < 20:
                    append(done)
                    done += 1
            except StoreFullError as error:
                assert error.errno == errno.EFBIG
            assert 0 < done < 20
            limited(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
            append(done)
            append(done + 1)
            topic, count = ("topic-app-1", 20 * (done + 2)) if batches else ("t", done + 2)
            assert sum(store.max_offset(topic, queue_id) for queue_id in range(4)) == count

    assert ended(in_child(work))
    rows = dict.fromkeys((("app-1", number) for number in range(len(rows_seen(root)))), 20)
    assert bool(rows) is batches
    check_store(root, Promise(["put/0/"], ["put/0/", *bodies], set(rows), set(rows), rows))


@pytest.mark.parametrize("name", ["single puts", "roll-over"])
def test_a_quota_is_a_full_disk(scratch: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """EDQUOT in some writes of a workload: undone, and tried again with success; nothing lost, twice or by half."""
    monkeypatch.setitem(faults.FAULTS, "EDQUOT", errno.EDQUOT)
    workload, root = WORKLOADS[name], scratch / "store"
    base, failed, ends = Bases(root)[workload.base], 0, []
    for at in range(2, 60, 9):
        ended, operation, verdict = check_fault(base, workload, root, "EDQUOT", at)
        assert verdict.ok, f"{operation}: {verdict}"
        failed += operation is not None
        if operation is not None and faults.is_before_commit(operation):
            ends.append(ended)
    assert failed > 2
    assert set(ends) <= {"closed"}


def test_without_fallocate_nothing_is_made_and_nothing_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`preallocate` where the system cannot (glibc writes zeros instead; other libraries refuse): an error that names the
    file. Without `preallocate` the store goes on.
    """

    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refused)
        with MessageStore.open(root, SMALL.replace(preallocate=True)) as store:
            with pytest.raises(OSError, match="spark/new-") as caught:
                store.put_message(Message("t", b"x", queue_id=0))
            assert caught.value.errno == errno.EOPNOTSUPP
        assert not list(root.glob("commitlog/*"))
        assert not list(root.glob("spark/new-*"))
    with MessageStore.open(root, SMALL) as store:
        assert store.put_message(Message("t", b"y", queue_id=0)).queue_offset == 0
    assert verify(root).ok


def test_a_batch_for_thousands_of_queues_takes_two_syncs_and_few_descriptors(scratch: Path) -> None:
    """`make crash` does it with 10,000."""
    verdict = many_queues.one_batch(scratch, 700)
    assert verdict.ok, str(verdict)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT DONE HERE: becoming another user needs root")
def test_a_user_without_rights_changes_nothing_and_is_told(scratch: Path) -> None:
    """EACCES: a store of root's, opened by nobody, for writing and for reading; and a folder that nobody may write to."""
    root, free = scratch / "store", scratch / "free"
    with MessageStore.open(root, SMALL) as store:
        do_step(store, ("put", 0, "single", 0), Promise())
    free.mkdir()
    for folder in (scratch, root, free):
        folder.chmod(0o755)
    before = {path: path.stat().st_mtime_ns for path in scratch.rglob("*")}

    def work() -> None:
        os.setgid(65534)
        os.setuid(65534)
        for folder, allowed in ((root, "readable"), (free, "writable")):
            with pytest.raises(PermissionError) as caught:
                MessageStore.open(folder, SMALL)
            assert "this process runs as" in str(caught.value)
            assert f"make the store {allowed} for a group that both are in" in str(caught.value)
        with pytest.raises(PermissionError):
            MessageStore.open_read_only(root, SMALL).max_offset("single", 0)

    assert ended(in_child(work))
    assert {path: path.stat().st_mtime_ns for path in scratch.rglob("*")} == before
    check_store(root, Promise(puts=["put/0/"], maybe_puts=["put/0/"]))


# ---- no memory


_READ_IN_LITTLE_ROOM = """
import resource, sys
from pathlib import Path
from messagestore import MessageStore

def used():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

bodies = [bytes([65 + number]) * 3_000_000 for number in range(12)]
outcomes = set()
with MessageStore.open_read_only(sys.argv[1]) as reader:
    for room in (0, 1 << 20, 8 << 20, 1 << 30):
        try:
            resource.setrlimit(resource.RLIMIT_AS, (used() + room, resource.RLIM_INFINITY))
            found = [body for table in reader.read("big", 0, 0) for body in table.column("body").to_pylist()]
            outcomes.add("right" if found == bodies else "wrong")
        except MemoryError:
            outcomes.add("no memory")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [m.body for m in reader.get_message("big", 0, 0, 32).messages] == bodies
print(*sorted(outcomes), sep=", ")
"""


def test_a_reader_without_address_space_says_so_and_goes_on_later(root: Path) -> None:
    """RLIMIT_AS, in steps: each read is right, or a MemoryError; never a signal, fewer messages, or other bytes.

    The process is a new one: one that has run other tests has memory to spare that counts as used.
    """
    config = SMALL.replace(
        mapped_file_size_commit_log=1 << 24, max_message_size=1 << 22, mapped_file_size_consume_queue=20 * 100
    )
    with MessageStore.open(root, config) as store:
        for number in range(12):
            store.put_message(Message("big", bytes([65 + number]) * 3_000_000, queue_id=0))

    done = subprocess.run(
        [sys.executable, "-c", _READ_IN_LITTLE_ROOM, root], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "no memory, right"


# ---- signals


def test_signals_all_the_time_disturb_nothing(tmp_path: Path) -> None:
    """EINTR: a timer interrupts whatever the system does, 5 000 times a second."""
    root, ticks, promise = tmp_path / "store", [], Promise()
    before = signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        with MessageStore.open(root, SMALL) as store:
            for number in range(6):
                do_step(store, ("put", number, "single", number % 2), promise)
                do_step(store, ("batch", "app-1", number, 30, "SYNC_FLUSH"), promise)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(ticks) > 10
    check_store(root, promise)


def test_a_signal_while_an_append_is_undone_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EINTR from `fallocate`, which is called through ctypes: Python does not try that again by itself."""
    disk, calls = Disk(), []
    file = disk.open_new(tmp_path / "file", 0)
    disk.pwrite(file, b"\xff" * 10_000, 0)
    real = disk_module._libc

    def interrupted(*arguments: object) -> int:
        calls.append(arguments)
        if len(calls) < 3:
            disk_module.ctypes.set_errno(errno.EINTR)
            return -1
        return int(real.fallocate(*arguments))

    monkeypatch.setattr(disk_module, "_libc", SimpleNamespace(fallocate=interrupted))
    disk.punch(file, 100, 9_000)
    assert (tmp_path / "file").read_bytes() == b"\xff" * 100 + bytes(9_000) + b"\xff" * 900
    assert len(calls) == 3
