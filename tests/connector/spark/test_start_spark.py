"""The walks of docs/start that need Spark, typed as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

import spark_runs
import walks

ONLY_FASTER = ("SPARK_HOME", "JDK_JAVA_OPTIONS", "SPARK_LOCAL_IP")
"""Of the tests' environment; nothing that says which Python is to be used."""


@pytest.mark.parametrize("name", ["kafka-job", "delta-job"])
def test_a_reader_gets_to_the_end(tmp_path: Path, name: str) -> None:
    faster = {key: value for key, value in spark_runs.environment().items() if key in ONLY_FASTER}
    walks.follow(walks.START / f"{name}.md", tmp_path, **faster)
