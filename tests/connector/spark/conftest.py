"""What the Spark tests share: one classic session for all of them."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import spark_runs

CONNECT_PORT = 15002


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are marked `spark`, and skipped, with the reason, where Spark cannot run."""
    mine = [item for item in items if spark_runs.HERE in Path(item.path).parents]
    reason = spark_runs.why_not() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.spark)
        item.add_marker(pytest.mark.filterwarnings("default::ResourceWarning"))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def kill_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says which process is to be killed where (killing.py); known to all of Spark's processes."""
    return tmp_path_factory.mktemp("kill") / "plan"


@pytest.fixture(scope="session")
def spark(kill_plan: Path) -> Iterator[object]:
    """A classic session, `local[2]` with tasks that may be tried four times."""
    trace = kill_plan.with_name("trace")  # see tracing.py
    os.environ.update(MESSAGESTORE_KILL_PLAN=str(kill_plan), MESSAGESTORE_TRACE=str(trace))
    sys.path.insert(0, str(spark_runs.HERE))
    warehouse = {"spark.sql.warehouse.dir": str(kill_plan.parent / "warehouse")}
    with spark_runs.session("local[2,4]", **warehouse) as session:
        yield session


@pytest.fixture(scope="module")
def connect_port() -> Iterator[None]:
    """Spark Connect has one port on a machine: one test at a time, when the server of the last one is gone."""
    with open(
        Path(tempfile.gettempdir(), f"messagestore-tests-connect-{os.getuid()}.lock"), "w", encoding="ascii"
    ) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        deadline_s = time.monotonic() + 240
        while True:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("", CONNECT_PORT))
                    break
                except OSError:
                    assert time.monotonic() < deadline_s, f"port {CONNECT_PORT} of Spark Connect is in use"
            time.sleep(0.1)
        yield


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "store")
