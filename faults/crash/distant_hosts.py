"""The host of a store that Spark reaches by a URL, and what may happen to its server, its disk and its store.

kill, stop, drain   the server ends at once, sleeps for a while, or ends in its own time, and is started again
next release        it is drained, and the next release of it is started, which also speaks the client's protocol
far release         the same with a release that does not
full disk           nothing has room until somebody makes some
broker              a process holds the lock of a RocketMQ broker until it is ended
another store       the server is killed, and serves a store with the same topics that is no copy, until it is put right
older copy          the server is killed, and from now on serves what a backup from before the case had
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers import ports

from crash import rotations
from crash.rotations import Secrets
from messagestore import Message, MessageStore, StoreConfig, backup
from messagestore.files.disk import Disk
from messagestore.files.staging_files import sweep
from messagestore.log.store_files import Paths
from messagestore.spi import LOCAL_STORES
from processes import Java
from spark_faults.processes import Process

ROWS, QUEUES = 120, 3
DELAYS_MS = (1_000, 2_000)
_SMALL = StoreConfig(
    mapped_file_size_commit_log=1 << 20, max_hash_slot_num=100, max_index_num=400, message_delay_level="1s 2s"
)
_STOPPED_S = 1.5
_START_S = 120.0
_RELEASES = {"next release": "1-2", "far release": "2-3"}


class Host:
    """The store's host.

    Parameters
    ----------
    folder : Path
        For the server's files.
    disk : Path
        For the store, on the disk that fills up.
    """

    def __init__(self, folder: Path, disk: Path) -> None:
        self.folder = folder
        self.root, self.log = disk / "store", folder / "serve.log"
        self.port = ports.reserve()
        (folder / "secrets").mkdir()
        self.secrets = Secrets(folder / "secrets", self.port)
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self._release = ""
        self._broker: Java | None = None
        self._ballast, self._backup = disk / "ballast", disk / "backup"
        self._own, self._other = disk / "own", disk / "other"
        filled(self.root)
        (folder / "store.properties").write_text("lockTimeout=2s\n")

    @property
    def store_id(self) -> str:
        """The id of the store that is there now."""
        with contextlib.closing(LOCAL_STORES.reader(str(self.root))) as store:
            return store.describe().store_id

    def start(self) -> None:
        """Start the server, and wait until it is ready."""
        module = ["crash.another_release", self._release] if self._release else ["pyspark_messagestore.command"]
        command = [sys.executable, "-m", *module, "serve", str(self.root), "--listen", f"127.0.0.1:{self.port}"]
        command += ["--drain", "5s", "--store-config", str(self.folder / "store.properties"), *self.secrets.arguments]
        with self.log.open("ab") as log:
            environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

        until_s = time.monotonic() + _START_S
        while True:
            if rotations.ready(self.port):
                return
            ended = self._process.poll()
            if ended is not None or time.monotonic() > until_s:
                raise AssertionError(f"the server does not start ({ended}): {self.log.read_text()[-8000:]}")
            time.sleep(0.02)

    # ---- faults

    def before(self, kind: str) -> None:
        """What must be there before a fault can happen."""
        if kind == "older copy":
            shutil.rmtree(self._backup, ignore_errors=True)
            backup.back_up(str(self.root), str(self._backup))
        elif kind == "another store":
            filled(self._other)

    def act(self, kind: str) -> None:
        """Do what a fault says; what takes time goes on in a thread."""
        if kind in ("kill", "another store", "older copy"):
            self.kill()
            self._later({"kill": self.start, "another store": self._swap, "older copy": self._restore}[kind])
        elif kind == "drain" or kind in _RELEASES:
            self._release = _RELEASES.get(kind, self._release)
            self._signal(signal.SIGTERM)
            self._later(self._again)
        elif kind == "stop":
            self._signal(signal.SIGSTOP)
            self._later(self._go_on)
        elif kind == "full disk":
            self._fill()
        elif kind == "broker":
            self._later(self._lock)
        else:
            self.secrets.act(kind)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the server."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _later(self, call: Callable[[], None]) -> None:
        thread = threading.Thread(target=call, name="the store's host")
        thread.start()
        self._threads.append(thread)

    def _again(self) -> None:
        code = self._ended()
        assert code == 0, f"the server drained and ended with {code}: {self.log.read_text()[-8000:]}"
        self.start()

    def _ended(self) -> int:
        """The exit code of a server that ends in its own time; if it does not, it is killed and says where it was."""
        assert self._process is not None
        try:
            return self._process.wait(_START_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGABRT)
            return self._process.wait(_START_S)

    def _go_on(self) -> None:
        time.sleep(_STOPPED_S)
        self._signal(signal.SIGCONT)

    def _fill(self) -> None:
        """Leave no block free."""
        size = 1 << 30
        with self._ballast.open("wb") as file:
            while size >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
                except OSError:
                    size //= 2

    def _lock(self) -> None:
        """Start a broker again and again, as an administrator would, until it has the store."""
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s:
            broker = Java(self.root)
            if broker.word() == "locked":
                self._broker = broker
                return
            broker.stop()
        raise AssertionError("a broker could not take over the store")

    def _swap(self) -> None:
        self.root.rename(self._own)
        self._other.rename(self.root)
        self.start()

    def _restore(self) -> None:
        shutil.rmtree(self.root)
        with Process().running():
            backup.restore(str(self._backup), str(self.root))
        self.start()

    # ---- the end of a fault

    def settle(self) -> None:
        """Wait until what a fault began is over."""
        while self._threads:
            self._threads.pop().join()

    def heal(self) -> None:
        """Put right what makes requests fail, if anything does."""
        self.settle()
        self._ballast.unlink(missing_ok=True)
        self.secrets.heal()
        if self._broker is not None:
            self._broker.stop()
            self._broker = None
        if self._own.exists():
            self.kill()
            shutil.rmtree(self.root)
            self._own.rename(self.root)
            self.start()
        elif self._release:
            self._release = ""
            self._signal(signal.SIGTERM)
            self._again()

    def end(self) -> int:
        """End the server in its own time; return its exit code."""
        self.heal()
        self._signal(signal.SIGTERM)
        return self._ended()

    # ---- other writers of this host

    def deliver(self, *, all_of_them: bool = False) -> None:
        """Deliver what is due, as `messagestore deliver` does beside the server; or wait until all was delivered."""
        with Process().running(), MessageStore.open(self.root) as store:
            while True:
                delivered = store.deliver_delayed()
                if not delivered.count and (not all_of_them or delivered.next_due_ms is None):
                    return
                time.sleep(0 if delivered.count else 0.1)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic, while the server is attached to the store."""
        with Process().running(), MessageStore.open(self.root) as store:
            store.delete_topic(topic)

    def orphans(self) -> list[str]:
        """What is left of staged files after they have been swept."""
        folder = Paths(str(self.root)).staging
        sweep(folder, -1.0, Disk())
        return sorted(os.listdir(folder))


def filled(root: Path) -> None:
    """Make a store with the topic that queries read."""
    with Process().running(), MessageStore.open(root, _SMALL) as store:
        store.create_topic("in", QUEUES)
        for number in range(ROWS):
            body = f"{number % QUEUES}/{number}".encode()
            store.put_message(Message("in", body, queue_id=number % QUEUES))
