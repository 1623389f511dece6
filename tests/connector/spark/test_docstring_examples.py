"""The examples in the docstrings of the data source, of the sink and of the listener run, and print what they show."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from pyspark_messagestore import MessageStoreDataSource, MessageStoreListener, MessageStoreSink


@pytest.mark.parametrize("kind", [MessageStoreDataSource, MessageStoreListener, MessageStoreSink])
def test_an_example_prints_what_it_shows(
    kind: type, spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    (example,) = [test for test in doctest.DocTestFinder().find(kind, globs={}) if test.examples]
    shown: list[str] = []
    results = doctest.DocTestRunner().run(example, out=shown.append)
    assert results.failed == 0, "".join(shown)
    assert results.attempted
