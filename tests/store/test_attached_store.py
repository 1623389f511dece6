"""Turns among processes: who may write, who waits, who recovers, who tidies up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from crash.harness import die
from messagestore import BatchRequest, CorruptionError, Message, MessageStore, StoreConfig, StoreLockedError
from messagestore.attached_store import attached_store
from messagestore.mapped_file import Disk
from messagestore.record_columns import encode
from messagestore.state import StateFile
from messagestore.transaction import Chunks, append_batch
from messagestore.verify import verify
from processes import CONTEXT
from small import SMALL, bodies, columns, filled, read_all

CONFIG = SMALL.replace(
    mapped_file_size_commit_log=1 << 18, max_index_num=20_000, lock_timeout="20s", clean_interval="1h"
)


def append(root: Path, app: str, version: int, count: int = 10, config: StoreConfig = CONFIG) -> str:
    """One commit, as the sink makes it."""
    store = attached_store(root, config)
    with store.writing(f"test {app}") as writer:
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
    assert mine.poll(60) and mine.recv() == "done"
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
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
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


def test_detach_after_the_time_out(tmp_path: Path) -> None:
    """attachTimeout after the last commit: C is at the end, `abort` is gone, a broker could start."""
    root = tmp_path / "s"
    append(root, "app", 0, config=CONFIG.replace(attach_timeout="100ms"))
    assert (root / "abort").exists()
    store = attached_store(root)
    deadline = time.monotonic() + 10
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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert (root / "abort").exists()
    attached_store(root).detach()
    assert not (root / "abort").exists()
    assert verify(root).ok


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
    process = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
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
