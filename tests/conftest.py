"""Two ways to run the random tests: `quick`, the same cases every time, and `deep`, many new ones.

    make test ARGS="tests/property --hypothesis-profile=deep"

Neither has a deadline: a test that is slow on a busy machine is not wrong.

Ctrl-C has its usual effect in the processes that the tests start, also where a shell has started the tests in the
background and let them ignore it.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import crash.harness  # noqa: F401 - tests drop stores as a killed process does; `test_dropped_stores` has its own
from messagestore.format import kernel

LONGEST_FILES = (
    "connector/spark/test_bad_input.py",
    "connector/spark/test_modes.py",
    "connector/spark/test_servers.py",
    "examples/test_flights.py",
    "connector/spark/test_readme_spark.py",
    "connector/spark/test_pipelines.py",
    "connector/spark/test_notebook.py",
    "bench/test_curves.py",
    "interop/test_hand_over.py",
    "interop/test_kafka_jobs.py",
    "interop/test_kafka_drop_in.py",
    "interop/test_kafka_bridges.py",
    "interop/test_crash_hand_over.py",
    "interop/test_we_read_java.py",
    "interop/test_java_reads_ours.py",
    "interop/test_same_bytes.py",
    "interop/test_broker_stores.py",
    "interop/test_live_job.py",
    "interop/test_live_kills.py",
    "interop/test_live_source.py",
    "interop/test_live_forms.py",
    "interop/test_live_changes.py",
    "interop/test_live_sink.py",
    "interop/test_live_messages.py",
    "interop/test_topic_deletion.py",
    "interop/test_timers.py",
    "interop/test_mqadmin.py",
    "interop/test_delayed_messages.py",
    "interop/test_transactions.py",
)
"""Each has tests that take a minute or more; the longest of `make test` and of `make interop` come first."""

settings.register_profile(
    "quick", max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # once the folders have set their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, then those that start Spark, then those with the most tests.

    The processes of `make test` take one file after the other, and those of `make interop` one test. If the last is
    long, the others wait for it.
    """
    folder = Path(__file__).parent
    ranks = {folder / name: rank for rank, name in enumerate(LONGEST_FILES)}
    gone = [str(path) for path in ranks if not path.exists()]
    if gone:
        raise pytest.UsageError(f"{__file__}: LONGEST_FILES names files that do not exist: {gone}. Correct the list")

    with_spark = {item.path for item in items if item.get_closest_marker("spark")}
    counts = Counter(item.path for item in items)
    items.sort(
        key=lambda item: (
            ranks.get(item.path, len(ranks)),
            item.path not in with_spark,
            -counts[item.path],
            str(item.path),
        )
    )


def pytest_report_header() -> str:
    """Which of the two codecs is tested."""
    return (
        f"no compiled kernel: {kernel.why_not}"
        if kernel.lib is None
        else f"compiled kernel, CRC-32 by {kernel.lib.CRC32_METHOD}"
    )
