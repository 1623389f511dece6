"""The data source as Spark's discovery and planner see it; no session is started."""

from __future__ import annotations

import inspect
import pkgutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import CaseInsensitiveDict, DataSource
from pyspark.sql.types import StructType

import pyspark_messagestore
from messagestore import ConfigError, NotAStoreError
from messagestore.session import attached_store
from pyspark_messagestore import DefaultSource, MessageStoreDataSource, MessageStoreSink
from pyspark_messagestore.source.readers import BatchReader, StreamReader

BODIES = StructType().add("body", "string")


def source(**options: str) -> MessageStoreDataSource:
    return DefaultSource(options=CaseInsensitiveDict(options))


def test_discovery() -> None:
    """Spark looks for DefaultSource in every module named pyspark_*; the name is the format's."""
    assert "pyspark_messagestore" in {module.name for module in pkgutil.iter_modules()}
    assert inspect.isclass(DefaultSource)
    assert issubclass(DefaultSource, DataSource)
    assert DefaultSource.name() == MessageStoreDataSource.name() == "messagestore"
    assert type(source()) is MessageStoreDataSource
    assert MessageStoreSink.__module__ == "pyspark_messagestore.sink.writers"
    with pytest.raises(AttributeError):
        pyspark_messagestore.Nothing  # noqa: B018 # the access is what is tested


def test_without_pyspark_the_package_is_there_and_the_source_is_not() -> None:
    """A machine without Spark imports the package for the command line; Spark's discovery finds nothing."""
    code = (
        "import sys; sys.modules['pyspark'] = None\n"
        "import pyspark_messagestore as p; print(p.__version__, hasattr(p, 'DefaultSource'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [pyspark_messagestore.__version__, "False"]


def test_unknown_options_are_refused_at_once() -> None:
    """An error of __init__ always reaches the user."""
    with pytest.raises(ConfigError, match="Did you mean subscribe"):
        source(subscrib="x")


def test_readers(tmp_path: Path) -> None:
    data = source(path=str(tmp_path), subscribe="t")
    assert data.schema().names[:4] == ["topic", "queueId", "queueOffset", "body"]
    assert isinstance(data.reader(data.schema()), BatchReader)
    assert isinstance(data.streamReader(data.schema()), StreamReader)
    with pytest.raises(ConfigError, match="option subscribe"):
        source(path=str(tmp_path)).schema()
    with pytest.raises(ConfigError, match="maxOffsetsPerTrigger: is for streams"):
        source(path=str(tmp_path), subscribe="t", maxOffsetsPerTrigger="1").reader(data.schema())


def test_writers(tmp_path: Path) -> None:
    """What cannot be is refused when a write is planned. The store is made when the first batch is committed."""
    path = str(tmp_path / "store")
    for options, match in [
        ({"txnVersion": "1"}, "both or neither"),
        ({"txnVersion": "1", "txnAppId": "a"}, "the version of a stream is Spark's batch id"),
    ]:
        with pytest.raises(ConfigError, match=match):
            source(path=path, topic="t", **options).streamWriter(BODIES, False)
    with pytest.raises(ConfigError, match="both or neither"):
        source(path=path, topic="t", txnAppId="a").writer(BODIES, False)
    with pytest.raises(ConfigError, match="mode overwrite"):
        source(path=path, topic="t").writer(BODIES, True)
    with pytest.raises(ConfigError, match="outputMode complete"):
        source(path=path, topic="t").streamWriter(BODIES, True)
    with pytest.raises(ConfigError, match="topic: found neither"):
        source(path=path).writer(BODIES, False)
    assert not Path(path).exists()
    writer = source(path=path, topic="t").writer(BODIES, False)
    assert writer.sink.store_id == ""
    assert not Path(path).exists()
    writer.commit([])
    assert len(source(path=path, topic="t").writer(BODIES, False).sink.store_id) == 32
    attached_store(path).detach()


def test_a_folder_with_something_else(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    with pytest.raises(NotAStoreError, match="a new store needs a missing or empty folder"):
        source(path=str(tmp_path), topic="t").writer(BODIES, False)


def test_a_store_that_a_broker_holds(tmp_path: Path) -> None:
    """A Java broker's lock is a write lock on byte 0 of `lock`: refused when the write is planned."""
    path = tmp_path / "store"
    source(path=str(path), topic="t").writer(BODIES, False).commit([])
    attached_store(str(path)).detach()
    holder = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1, 0);"
        "print('held', flush=True); time.sleep(60)"
    )
    broker = subprocess.Popen([sys.executable, "-c", holder, str(path / "lock")], stdout=subprocess.PIPE, text=True)
    try:
        assert broker.stdout is not None
        assert broker.stdout.readline() == "held\n"
        with pytest.raises(
            RuntimeError,
            match=rf"locked by a RocketMQ broker, pid {broker.pid} .* on {socket.gethostname()}\. Nothing of this batch was written\. Stop that process",
        ):
            source(path=str(path), topic="t").writer(BODIES, False)
    finally:
        broker.kill()
        broker.wait()
        broker.stdout.close()
