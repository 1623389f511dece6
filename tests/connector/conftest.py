"""A store for the sink, and Spark's view of a task."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from messagestore.session import attached_store


@pytest.fixture
def root(tmp_path: Path):
    path = tmp_path / "store"
    yield str(path)
    attached_store(path).detach()


@pytest.fixture
def context(monkeypatch):
    """Spark's TaskContext, as the sink sees it."""
    from pyspark_messagestore.sink import writers as sink_module

    state = SimpleNamespace(partition=0, properties={"sql.streaming.queryId": "q1", "streaming.sql.batchId": "0"})

    def local_property(name: str) -> str | None:
        return state.properties.get(name)

    task = SimpleNamespace(partitionId=lambda: state.partition, getLocalProperty=local_property)
    monkeypatch.setattr(sink_module.TaskContext, "get", staticmethod(lambda: task))
    return state
