"""The examples in the docstrings of the data source and of `MessageStoreSink` run, and print what they show."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from pyspark_messagestore import MessageStoreDataSource, MessageStoreSink


@pytest.mark.parametrize("kind", [MessageStoreDataSource, MessageStoreSink])
def test_an_example_prints_what_it_shows(
    kind: type, spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    (example,) = [test for test in doctest.DocTestFinder().find(kind, globs={}) if test.examples]
    shown: list[str] = []
    results = doctest.DocTestRunner().run(example, out=shown.append)
    assert results.failed == 0, "".join(shown)
    assert results.attempted
