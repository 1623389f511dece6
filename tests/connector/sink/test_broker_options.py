"""What the options say that only brokers have, and which options of a store brokers refuse."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import StructType

from messagestore import ConfigError
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.options.table import sink_options
from pyspark_messagestore.sink import brokers

URL = "rocketmq://127.0.0.1:9876"


@pytest.mark.parametrize(
    ("given", "accepts"), [({}, True), ({"onUnconfirmed": "count"}, True), ({"onUnconfirmed": "fail"}, False)]
)
def test_what_the_options_of_brokers_say(tmp_path: Path, given: dict[str, str], accepts: bool) -> None:
    options = {"path": URL, "producerGroup": "own", "lookupDir": str(tmp_path), **given}
    source = MessageStoreDataSource(options)  # with a column of topics, no broker is asked yet
    sink = source.writer(StructType().add("topic", "string").add("body", "string"), overwrite=False).sink
    assert sink.lookup_dir == str(tmp_path)
    with contextlib.closing(sink._producer()) as producer:
        assert (producer._group, producer._accepts_unconfirmed) == ("own", accepts)


def test_a_look_up_needs_a_folder() -> None:
    """A checkpoint on a mounted file system has one; a batch write that only its own job repeats needs none."""
    options = sink_options({"path": URL, "topic": "t"})
    assert brokers._lookup_dir(options, "/data/checkpoint", streaming=True) == "/data/checkpoint/messagestore-lookups"
    assert brokers._lookup_dir(options, None, streaming=False) == ""
    for checkpoint in (None, "s3a://bucket/checkpoint"):
        with pytest.raises(ConfigError, match="option lookupDir: is missing"):
            brokers._lookup_dir(options, checkpoint, streaming=True)


@pytest.mark.parametrize("option", ["storeConfig", "stagingDir", "flushDiskType", "deadLetterTopic"])
def test_options_of_a_store_are_refused_with_brokers(option: str) -> None:
    value = {"flushDiskType": "SYNC_FLUSH"}.get(option, "value")
    with pytest.raises(ConfigError, match=f"option {option}: found together with {URL}"):
        sink_options({"path": URL, "topic": "t", option: value})


@pytest.mark.parametrize("option", ["lookupDir", "producerGroup", "credentialsFile"])
def test_options_of_brokers_are_refused_with_a_store(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"option {option}: found together with {tmp_path}"):
        sink_options({"path": str(tmp_path), "topic": "t", option: "/data" if option == "lookupDir" else "g"})


def test_what_an_earlier_attempt_wrote_is_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt may have been killed after it had named its file and before it synced the folder. Without the file,
    a third attempt would look for the rows of the second behind them.
    """
    queue_ends = {brokers.SendQueue("broker-a", 0): 7}
    monkeypatch.setattr(brokers, "_sync", killed)
    with pytest.raises(InterruptedError):
        brokers.Ends(str(tmp_path), brokers.Batch("app", 3)).write("t", 1, queue_ends)
    synced: list[Path] = []
    monkeypatch.setattr(brokers, "_sync", synced.append)
    ends = brokers.Ends(str(tmp_path), brokers.Batch("app", 3))
    assert ends.of("t", 1) == queue_ends
    assert set(synced) == {tmp_path, *(path for path in tmp_path.iterdir())}
    assert ends.of("t", 2) is None


def killed(folder: Path) -> None:
    raise InterruptedError(f"before {folder} was synced")
