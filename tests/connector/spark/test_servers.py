"""One checkpoint, and several servers: classic Spark, Spark Connect, and a server that dies under a stream."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import spark_runs
from messagestore import MessageStore
from messagestore.spi import LOCAL_STORES
from spark_runs import bodies, closed, fill, in_order, run_job


def _jvms(pid: int) -> Iterator[int]:
    """The JVMs that a process has started."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                if Path(f"/proc/{child}/comm").read_text().strip() == "java":
                    yield child
            yield from _jvms(child)


def _copied(root: str) -> int:
    with MessageStore.open_read_only(root) as store:
        return sum(store.max_offset("copy", queue_id) for queue_id in store.topics().get("copy", []))


@pytest.mark.slow  # the quick form is the last test: there and back, by way of a server that is killed
def test_a_checkpoint_moves_between_classic_spark_and_connect(tmp_path, connect_port):
    """There and back: each goes on where the other one ended, as the same query and the same app."""
    root = str(tmp_path / "store")
    for number, master in enumerate(["local[2]", "remote", "local[2]"]):
        fill(root, 600, first=600 * number)
        done = run_job("job.py", master, root, tmp_path / "checkpoint", cwd=tmp_path)
        assert '{"done": true}' in done.stdout, done.stderr[-4000:]
        assert bodies(root, "copy") == bodies(root, "flights")
    assert sum(bodies(root, "copy").values()) == 1800
    assert in_order(root, "copy")
    with contextlib.closing(LOCAL_STORES.reader(str(root))) as store:
        assert len(store.view("apps")[0]) == 1, "it was one app"


def kill_a_connect_server_under_a_stream(tmp_path: Path, count: int) -> str:
    """The root of a store of `count` messages, of which some are copied: the JVM was killed, and its client.

    The client would try for minutes to reach its server again, so it is ended, too.
    """
    root = str(tmp_path / "store")
    fill(root, count)
    command = [sys.executable, str(spark_runs.HERE / "job.py"), "remote", root, str(tmp_path / "checkpoint")]
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen(
            command, env={**os.environ, **spark_runs.environment()}, cwd=tmp_path, stdout=log, stderr=log
        ) as client,
    ):
        try:
            until_s = time.monotonic() + 240
            while _copied(root) < 500:
                assert client.poll() is None, (tmp_path / "log").read_text()[-4000:]
                assert time.monotonic() < until_s, "the stream has not begun"
                time.sleep(0.05)
            for jvm in list(_jvms(client.pid)):
                os.kill(jvm, signal.SIGKILL)
        finally:
            client.kill()
    assert _copied(root) < count
    return root


def go_on(root: str, tmp_path: Path, master: str) -> None:
    """Run the job to its end: every message is in the copy, in order, and the store is closed."""
    done = run_job("job.py", master, root, tmp_path / "checkpoint", cwd=tmp_path)
    assert '{"done": true}' in done.stdout, done.stderr[-4000:]
    assert bodies(root, "copy") == bodies(root, "flights")
    assert in_order(root, "copy")
    assert closed(root), "the stream left the store open"


@pytest.mark.slow
def test_a_connect_server_is_killed_under_a_stream_and_started_again(tmp_path, connect_port):
    """The query of the next server goes on at the checkpoint; every message is there once."""
    root = kill_a_connect_server_under_a_stream(tmp_path, 10_000)
    go_on(root, tmp_path, "remote")
    assert sum(bodies(root, "copy").values()) == 10_000


def test_a_checkpoint_outlives_its_connect_server_and_comes_back_to_another(tmp_path, connect_port):
    """A Connect server is killed under a stream; classic Spark goes on at its checkpoint, then another Connect server.

    Each goes on where the other one ended, as the same query and the same app; every message is there once.
    """
    root = kill_a_connect_server_under_a_stream(tmp_path, 5_000)
    go_on(root, tmp_path, "local[2]")
    fill(root, 600, first=5_000)
    go_on(root, tmp_path, "remote")
    assert sum(bodies(root, "copy").values()) == 5_600
    with contextlib.closing(LOCAL_STORES.reader(root)) as store:
        assert len(store.view("apps")[0]) == 1, "it was one app"
