"""A Spark job from topic to topic of two brokers that run: the job of the live demo, `examples/12_live/enrich.py`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

import spark_runs
from interop import java_build
from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS
from interop.live import broker, create_topic, soon
from interop.real_broker import NameServer
from interop.sender import sent, sink_of
from interop.test_live_sink import Ends, sent_bodies

ROWS = 10_000
SPARK_S = 900
"""Within which a driver starts and works also on a machine that has much else to do."""
JOB = spark_runs.ROOT / "examples" / "12_live" / "enrich.py"
CARRIERS = {"UA": "United Air Lines Inc.", "B6": "JetBlue Airways", "AA": "American Airlines Inc."}

pytestmark = pytest.mark.spark


@pytest.fixture
def names(memory: Path) -> Iterator[NameServer]:
    need(NEWEST, java_build.tools_classpath)
    reason = spark_runs.why_not()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"in CI Spark must run: {reason}", pytrace=False)
        pytest.skip(reason)
    with NameServer(NEWEST, memory / "names") as server:
        yield server


class Job:
    """The driver, with its JVM, in a process group of its own."""

    def __init__(self, names: NameServer, folder: Path) -> None:
        self.log = folder / f"job-{time.monotonic_ns()}.log"
        command = [sys.executable, str(JOB), str(names), str(folder), "--to-end"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
                env={**os.environ, **spark_runs.environment()},
            )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def drive(names: NameServer, folder: Path, is_far: Callable[[], bool]) -> int | None:
    """Run a driver until it has come far enough, and kill it; return its exit status, None if it was at work.

    Spark ends a query if a new Python process has not connected within ten seconds, which may happen on a machine that
    has much else to do. Such a driver is started again.
    """
    while True:
        with Job(names, folder) as job:
            soon(lambda job=job: job.process.poll() is not None or is_far(), bool, wait_s=SPARK_S)
            status = job.process.poll()
        words = job.log.read_text(errors="replace")
        if not status:
            return status
        assert "Python worker failed to connect back" in words, words[-3000:]


def test_a_driver_that_is_killed_twice_between_two_topics(names: NameServer, memory: Path) -> None:
    """SIGKILL to the driver amid micro-batches, twice; each row is in the other topic once, whatever was sent before."""
    with broker(NEWEST, memory, names) as a, broker(NEWEST, memory, names, "broker-b") as b:
        create_topic(names, [a, b], "flights")
        create_topic(names, [a, b], "flights-named")
        flights = [{"id": number, "carrier": [*CARRIERS][number % 3], "dest": "IAH"} for number in range(ROWS)]
        rows = pa.record_batch({"body": [json.dumps(flight).encode() for flight in flights]})
        given = {"path": f"rocketmq://{names}", "topic": "flights", "lookupDir": str(memory / "lookups")}
        sent(sink_of(given, (("body", "binary"),)), 0, rows)

        ends, kills = Ends(names), []
        for share in (0.25, 0.6):

            def is_far(count: float = ROWS * share) -> bool:
                return ends.count("flights-named") > count

            assert drive(names, memory, is_far) is None
            kills.append(ends.count("flights-named"))
        assert drive(names, memory, lambda: False) == 0
        assert max(kills) < ROWS, "each driver was killed before it had done everything"

        soon(lambda: ends.count("flights-named"), lambda count: count >= ROWS)
        found = [json.loads(body) for body in sent_bodies(names, "broker-a", "broker-b", topic="flights-named")]
    COUNTS.stores += 2
    COUNTS.messages += ROWS
    assert Counter(flight["id"] for flight in found) == Counter(range(ROWS))
    assert all(flight["airline"] == CARRIERS[flight["carrier"]] for flight in found)
