"""A worker of Spark's daemon that commits, without a JVM: a line with a store's path for each batch, answered by "done".

Its name begins with `pyspark`: the daemon imports no other module as its worker. `Daemon` plays the JVM.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
SECRET = "secret"
STAYS = "WORKER_STAYS_IN_ITS_GROUP"
"""The name of an environment variable: a bug that is planted in the worker."""
_version = 0


def main(infile: IO[bytes], outfile: IO[bytes]) -> None:
    """What the daemon calls for each commit; at the end of the input it ends as Spark's own workers do."""
    global _version  # noqa: PLW0603 - the batches of this worker
    from crash.harness import encoded
    from messagestore import BatchRequest
    from messagestore.batches.append import Chunks, append_batch
    from messagestore.session import attached_store, detach_at_the_end
    from pyspark_messagestore.sink.writers import in_worker
    from small import SMALL

    if STAYS in os.environ:
        os.setpgid = lambda *_: None
    root = infile.readline().decode().strip()
    if not root:
        sys.exit(-1)
    if in_worker():
        detach_at_the_end()
    with attached_store(root, SMALL).writing("a batch") as writer:
        chunk = encoded("app", _version, 5, SMALL, writer.files.store_host)
        append_batch(writer, Chunks([chunk]), BatchRequest(app_id="app", version=_version))
    _version += 1
    outfile.write(b"done\n")
    outfile.flush()


class Daemon:
    """`pyspark.daemon` and one worker, used as `PythonWorkerFactory` uses them."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("faults", "tests")),
            "PYTHON_WORKER_FACTORY_SECRET": SECRET,
            "SPARK_REUSE_WORKER": "1",
        }
        command = [sys.executable, "-m", "pyspark.daemon", "pyspark_commits"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdout is not None
        (port,) = struct.unpack(">i", self.process.stdout.read(4))
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.file = self.socket.makefile("rwb")
        (self.worker,) = struct.unpack(">i", self.file.read(4))
        self.file.write(struct.pack(">i", len(SECRET)) + SECRET.encode())
        self.file.flush()
        assert self.file.read(6)[4:] == b"ok"

    def commit(self, root: Path) -> None:
        self.file.write(f"{root}\n".encode())
        self.file.flush()
        assert self.file.readline() == b"done\n"

    def application_ends(self) -> None:
        """Idle workers lose their socket, and the daemon gets SIGTERM."""
        self._close()
        self.process.terminate()
        self._wait()

    def jvm_is_killed(self) -> None:
        """Sockets and pipes are closed at once."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._close()
        self._wait()

    def idles(self) -> None:
        """A worker that idled for a minute loses its socket; the daemon stays."""
        self._close()
        while Path(f"/proc/{self.worker}").exists():
            time.sleep(0.01)

    def kill_worker(self) -> None:
        """As when a query is stopped amid a commit: the daemon is told to kill the worker."""
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack(">i", self.worker))
        self.process.stdin.flush()

    def _close(self) -> None:
        self.file.close()
        self.socket.close()

    def _wait(self) -> None:
        """Until the daemon is gone, and its worker, too: it holds the pipe that was the daemon's output."""
        assert self.process.stdout is not None
        self.process.stdout.read()
        self.process.wait()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.worker, self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()
