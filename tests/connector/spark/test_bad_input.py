"""The first three lines of each error say what is wrong, on classic Spark and on Connect; nothing of the batch is in the log.

On Connect, one case for each way that an error takes to the client is quick; the rest is for `make test-deep`.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

import spark_runs

sys.path.insert(0, str(spark_runs.HERE))
cases = pytest.importorskip("cases")
connect_checks = pytest.importorskip("connect_checks")


def check(name: str, line: str, early: bool, untouched: bool) -> None:
    if cases.CANNOT_MOUNT in line:
        pytest.skip(cases.CANNOT_MOUNT)
    assert re.search(cases.CASES[name][1] + "$", line), line
    assert early
    assert untouched


@pytest.mark.parametrize("name", list(cases.CASES))
def test_classic(spark, root, name: str) -> None:
    check(name, *cases.told(spark, root, name))


@pytest.mark.parametrize("name", list(connect_checks.CHECKS))
def test_checks_on_classic(spark, tmp_path, name: str) -> None:
    connect_checks.CHECKS[name](spark, tmp_path)


@pytest.fixture(scope="module")
def on_connect(request: pytest.FixtureRequest, tmp_path_factory, connect_port) -> str:
    """The chosen cases and checks on Connect, in one process."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and "on_connect" in item.fixturenames
    ]
    folder = tmp_path_factory.mktemp("connect")
    done = spark_runs.run_job("cases.py", folder, *names, cwd=folder, timeout_s=1800)
    return done.stdout + done.stderr[-3000:]


def slow_but(names: object, quick: object) -> list[object]:
    """The names as parameters; those that are not in `quick` are marked `slow`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but(cases.CASES, cases.ON_CONNECT))
def test_connect(on_connect: str, name: str) -> None:
    found = [json.loads(line[5:]) for line in on_connect.splitlines() if line.startswith("CASE ")]
    told = {case: rest for case, *rest in found}
    assert name in told, on_connect[-3000:]
    check(name, *told[name])


# `every_option` is sixty jobs. On classic Spark they show what each option does, and the other checks that options and
# columns reach the store by way of Connect.
@pytest.mark.parametrize("name", slow_but(connect_checks.CHECKS, connect_checks.CHECKS.keys() - {"every_option"}))
def test_checks_on_connect(on_connect: str, name: str) -> None:
    assert f"CHECK {name}" in on_connect, on_connect[-3000:]
