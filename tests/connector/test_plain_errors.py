"""Errors without a trace of Python, where Spark shows them; the trace stays where a program of the user's sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from messagestore import ConfigError
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.plain_errors import plain_errors

HIDE = "SPARK_HIDE_TRACEBACK"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIDE, "")


@pytest.mark.parametrize(("process", "hidden"), [("pyspark.daemon", "1"), ("my_pyspark.job", ""), (None, "")])
def test_a_trace_is_hidden_in_sparks_processes_only(
    monkeypatch: pytest.MonkeyPatch, process: str | None, hidden: str
) -> None:
    """Spark's workers of the user's own functions inherit the variable of the user's program."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None if process is None else ModuleSpec(process, None))
    with pytest.raises(ConfigError, match="option topics: no such option"):
        MessageStoreDataSource({"topics": "t"})
    assert os.environ[HIDE] == hidden


def test_the_trace_of_a_bug_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    @plain_errors("read")
    class Reader:
        def read(self) -> None:
            raise KeyError("bug")

    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("pyspark.daemon", None))
    with pytest.raises(KeyError, match="bug"):
        Reader().read()
    assert os.environ[HIDE] == ""


def test_a_program_that_runs_as_a_module_is_a_users(tmp_path) -> None:
    (tmp_path / "job.py").write_text("from pyspark_messagestore.plain_errors import in_sparks_process as f; print(f())")
    done = subprocess.run([sys.executable, "-m", "job"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
