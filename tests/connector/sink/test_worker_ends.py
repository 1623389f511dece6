"""How the worker that commits a stream ends, with Spark's own daemon and without a JVM."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from messagestore.files.disk import Disk
from messagestore.files.state import StateFile
from messagestore.inspect.verify import verify
from pyspark_commits import Daemon


@pytest.mark.parametrize("end", ["application_ends", "jvm_is_killed", "idles"])
def test_a_stream_that_stopped_a_moment_after_its_last_commit_leaves_a_closed_store(tmp_path: Path, end: str) -> None:
    """The worker is still attached then: a broker that starts next would recover instead of going on."""
    root = tmp_path / "s"
    with Daemon() as daemon:
        daemon.commit(root)
        daemon.commit(root)
        assert (root / "abort").exists()
        getattr(daemon, end)()
        assert not (root / "abort").exists()
    state = StateFile(Disk(), str(root / "spark" / "state")).read()
    assert state is not None
    assert state.clean
    assert verify(root).ok


def test_a_worker_that_the_daemon_kills_is_gone_at_once(tmp_path: Path) -> None:
    """A worker that has left the daemon's process group is still ended by the daemon, which knows its number."""
    root = tmp_path / "s"
    with Daemon() as daemon:
        daemon.commit(root)
        start_s = time.monotonic()
        daemon.kill_worker()
        assert daemon.file.read() == b""
        assert time.monotonic() - start_s < 60
        assert (root / "abort").exists()
    assert verify(root).ok
