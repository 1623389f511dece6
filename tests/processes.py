"""Processes of the tests that begin with the store imported: 30 ms each instead of 500."""

from __future__ import annotations

import math
import multiprocessing
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from messagestore.files.disk import Disk
from messagestore.files.writer_lock import BREAK_MARGIN_S

# Each process is forked from one that only imported these: it has no store, no lock and no thread of the test's own
# process, as one that Spark starts.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["messagestore", "messagestore.inspect.verify", "hypothesis", "pytest"])


# ---- a broker that starts

# RandomAccessFile(file, "rw") in the constructor, then FileChannel.tryLock(0, 1, false): a POSIX write lock on byte 0.
AS_JAVA = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
if sys.argv[2] == "constructor":
    print("opened", flush=True)
    sys.stdin.readline()
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, 0)
except OSError as error:
    print("refused", error.errno, flush=True)
    sys.exit()
file.write(b"lock")
file.flush()
print("locked", flush=True)
sys.stdin.readline()
"""


class Java:
    """Another process that opens and locks the file `lock` as a broker does."""

    def __init__(self, root: Path, step: str = "start") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", AS_JAVA, str(root / "lock"), step], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self.process.pid

    def word(self, timeout_s: float = 60) -> str:
        """What it says next; "waits" when it says nothing for a while."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        return self.process.stdout.readline().decode().strip() if ready else "waits"

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def starting_broker(root: Path, step: str = "start") -> Iterator[Java]:
    java = Java(root, step)
    try:
        yield java
    finally:
        java.stop()


class PatienceDisk(Disk):
    """The disk of a machine whose kernel lets a broker through when the test wants it.

    Parameters
    ----------
    overrun_s : float
        For so long a broker may wait before the writer takes itself for overrun.
    """

    def __init__(self, overrun_s: float = math.inf) -> None:
        self.overrun_s = overrun_s

    def lease_break_time_s(self, path: str = "") -> float:
        return BREAK_MARGIN_S + self.overrun_s


# ---- a process that opens, puts and closes all the time

# Arguments: the store, and a file that ends the process. A JSON line for each put, and for each refusal.
SHORT_SESSIONS = """
import json, os, sys, time
from messagestore import Message, MessageStore, StoreConfig, StoreLockedError
root, stop = sys.argv[1:]
number = 0
while not os.path.exists(stop):
    body = f"short/{number}"
    try:
        with MessageStore.open(root, StoreConfig(lock_timeout="200ms")) as store:
            store.put_message(Message("short", body.encode(), queue_id=0))
        print(json.dumps(["put", body]), flush=True)
        number += 1
    except StoreLockedError as error:
        print(json.dumps(["refused", str(error)]), flush=True)
    time.sleep(0.02)
"""
