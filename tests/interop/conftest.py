"""The JVMs of the interop tests, why they cannot run where they cannot, and the first and last line of `make interop`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from interop import java_build, java_store, share
from interop.java_store import COUNTS, VERSIONS_USED, Driver

HERE = Path(__file__).resolve().parent
_TOTALS = java_store.Counts()
_VERSIONS: set[str] = set()
TOGETHER = {
    "test_kafka_bridges.py": "one run of a Kafka broker",
    "test_kafka_drop_in.py": "one run of Kafka's jobs beside ours",
    "test_kafka_jobs.py": "one run of a job with every step",
    "test_live_forms.py": "brokers of all forms",
    "test_live_spark.py": "a Spark",
    "test_names.py": "the names of each version",
    "test_sent_back.py": "one run of a broker",
}
"""Files whose tests share what one process starts."""
_STARTED_S = time.monotonic()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All tests of this folder are marked `java`; with CHANGED, those run that are about a change."""
    mine = [item for item in items if HERE in Path(item.path).parents]
    for item in mine:
        item.add_marker(pytest.mark.java)
    names = share.left_out({item.path.name for item in mine})
    others = [item for item in mine if item.path.name in names]
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=others)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each test to whoever is free, except those that stay together."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(nodeid.partition("::")[0].rpartition("/")[2], nodeid)

    return Scheduling(config, log)


def need(version: str, jars: Callable[[str], str] = java_build.classpath) -> None:
    """Skip, aloud, where the driver cannot be built, or other jars cannot be had; in CI that is a failure."""
    try:
        jars(version)
    except java_build.CannotBuild as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"in CI the Java store must run: {error}", pytrace=False)
        pytest.skip(f"no Java store: {error}")


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Driver]]:
    """The JVM of a version of RocketMQ, started when first asked for; one for all tests of this process."""
    folder, started = tmp_path_factory.mktemp("java"), dict[str, Driver]()

    def driver(version: str) -> Driver:
        need(version)
        if version not in started or started[version].process.poll() is not None:
            started[version] = Driver(version, folder)
        return started[version]

    yield driver
    for each in started.values():
        each.stop()


@pytest.fixture
def java(drivers: Callable[[str], Driver]) -> Driver:
    """The newest RocketMQ."""
    return drivers(java_build.NEWEST)


@pytest.fixture(params=java_build.VERSIONS)
def each_java(request: pytest.FixtureRequest, drivers: Callable[[str], Driver]) -> Driver:
    """Every version in turn."""
    return drivers(request.param)


@pytest.fixture
def own_java(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """JVMs for one test, which may kill them."""
    need(java_build.NEWEST)
    started: list[Driver] = []

    def driver(version: str = java_build.NEWEST) -> Driver:
        started.append(Driver(version, tmp_path / "java"))
        return started[-1]

    yield driver
    for each in started:
        each.stop()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where syncs cost nothing; a temporary one where there is none."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    with tempfile.TemporaryDirectory(prefix="messagestore-interop-", dir=where) as folder:
        yield Path(folder)


@pytest.fixture
def root(memory: Path) -> Path:
    return memory / "store"


def pytest_report_header() -> str:
    return f"interop: {share.in_words()}"


# ---- the closing line


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist hands its numbers to the one process that prints."""
    if share.CHANGED and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # no test is about what has changed
    output = getattr(session.config, "workeroutput", None)
    if output is None:
        _TOTALS.add(vars(COUNTS))
        _VERSIONS.update(VERSIONS_USED)
    else:
        output["interop"] = {"counts": vars(COUNTS), "versions": sorted(VERSIONS_USED)}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    found = getattr(node, "workeroutput", {}).get("interop")
    if found:
        _TOTALS.add(found["counts"])
        _VERSIONS.update(found["versions"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _TOTALS.stores:
        terminalreporter.write_line(
            f"interop: {_TOTALS.stores} stores opened by RocketMQ {' and '.join(sorted(_VERSIONS))}; "
            f"{_TOTALS.recipes} random stores of a broker; "
            f"{_TOTALS.messages} messages compared, {_TOTALS.keys} keys looked up, "
            f"{_TOTALS.renumbered} queues with other numbers than their records; "
            f"{time.monotonic() - _STARTED_S:.0f} s"
        )
