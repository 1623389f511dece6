"""A driver of the fake Spark in a process of its own, which can be killed or stopped in the middle of a request."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from multiprocessing.connection import Pipe, wait
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StructField, StructType

from messagestore.spi import connections
from processes import CONTEXT
from pyspark_messagestore.datasource import MessageStoreDataSource
from spark_faults.fake_spark import WRITTEN, Checkpoint, Driver, QueryFailedError
from spark_faults.processes import Process, connect

ANSWER_TIMEOUT_S = 1.0
"""How long the client waits here for a silent server; a user's waits for a minute."""
_ENDS_S = 120.0


LEVELS = 2
"""Delay levels that rows have."""


def level_of(body: bytes) -> int:
    """The delay level of a row, by its number: most have none."""
    number = int(body.rpartition(b"/")[2])
    return number // 3 % 5 if number // 3 % 5 <= LEVELS else 0


class DistantDriver(Driver):
    """A driver that uses the connector's own stores, and delays some rows."""

    kind = MessageStoreDataSource
    written = StructType([*WRITTEN.fields, StructField("delayTimeLevel", IntegerType())])

    def _columns(self, bodies: list[bytes]) -> pa.RecordBatch:
        levels = pa.array(map(level_of, bodies), pa.int32())
        return super()._columns(bodies).append_column("delayTimeLevel", levels)


class DriverProcess:
    """A driver that runs a query in another process. Its checkpoint is a file, written before it goes on.

    Parameters
    ----------
    folder : Path
        For its files.
    checkpoint : Checkpoint
    source, sink : dict of str to str
        Options.
    label : str
        What it puts before every body.
    """

    def __init__(
        self, folder: Path, checkpoint: Checkpoint, source: dict[str, str], sink: dict[str, str], label: str
    ) -> None:
        self._checkpoint, self._said = folder / "checkpoint", folder / "said"
        _save(self._checkpoint, checkpoint)
        self._said.unlink(missing_ok=True)
        self._noticed, self._notice = Pipe(duplex=False)
        self._process = CONTEXT.Process(
            target=_run, args=(str(self._checkpoint), str(self._said), source, sink, label), name="a driver"
        )
        self._process.start()

    def act(self, kind: str) -> None:
        """Kill or stop it; another thread may do so."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended, and what it sent last is still on its way
            os.kill(self._process.pid, signal.SIGKILL if kind == "driver killed" else signal.SIGSTOP)
            self._notice.send(kind)

    def wait(self) -> Checkpoint:
        """Wait until it has ended, or until somebody has stopped it; return its checkpoint."""
        assert wait([self._process.sentinel, self._noticed], _ENDS_S), "the driver does not end"
        if self._noticed.poll() and self._noticed.recv() == "driver killed":
            self._process.join()
        checkpoint: Checkpoint = pickle.loads(self._checkpoint.read_bytes())
        return checkpoint

    def go_on(self) -> str:
        """Let it go on, until it ends; return with which error, in words, or nothing."""
        assert self._process.pid is not None
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGCONT)
            self._process.join(_ENDS_S)
            assert self._process.exitcode == 0, f"the driver that was stopped ended with {self._process.exitcode}"
        return self._said.read_text() if self._said.exists() else ""

    def end(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.join()
        self._noticed.close()
        self._notice.close()


def _run(path: str, said: str, source: dict[str, str], sink: dict[str, str], label: str) -> None:
    """What the process does."""
    checkpoint = pickle.loads(Path(path).read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        connect(patch)
        patch.setattr(connections, "ANSWER_TIMEOUT_S", ANSWER_TIMEOUT_S)
        driver = DistantDriver(checkpoint, source, sink, label, lambda _kind: Process())
        try:
            for _ in driver.batches():
                _save(Path(path), checkpoint)
        except QueryFailedError as error:
            Path(said).write_text(repr(error.__cause__))
        finally:
            driver.die()


def _save(path: Path, checkpoint: Checkpoint) -> None:
    new = path.with_name("checkpoint.new")
    new.write_bytes(pickle.dumps(checkpoint))
    new.replace(path)
