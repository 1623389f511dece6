"""A log that changes under a query, under each option that says what, how much and how far is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from crash.imitate import Broker
from messagestore import OffsetOutOfRangeError, StoreWentBackwardsError
from stream_steps import SMALL, add, batch, begun, finished, retain, rows, step, stream

OPTIONS = {
    "pattern": {"subscribePattern": "t|u.*"},
    "assigned": {"assign": '{"t": [0, 1, 2, 3]}'},
    "waiting": {"onMissingTopic": "wait"},
    "from a time": {"startingTimestamp": "-1h"},
    "to an offset": {"endingOffsets": '{"t": {"*": 400}}'},
    "to a time": {"endingTimestamp": "2999-01-01T00:00:00Z"},
    "bytes": {"maxBytesPerTrigger": "4k"},
    "both limits": {"maxBytesPerTrigger": "4k", "maxOffsetsPerTrigger": "15"},
    "partitions": {"maxRecordsPerPartition": "7", "maxBytesPerPartition": "1k"},
    "tags": {"tags": "UA"},
    "bad records": {"badRecords": "skip"},
}
LIMITS = {"maxOffsetsPerTrigger": "30"}


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = str(tmp_path / "store")
    grow(path, 80)
    return path


def grow(root: str, count: int) -> None:
    add(root, count, size=100, tags=["UA"] * count)


def given(name: str, **more: str) -> dict[str, str]:
    start = {} if name == "from a time" else {"startingOffsets": "earliest"}
    return {**start, **LIMITS, **OPTIONS[name], **more}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_message_once_over_restarts(root: str, name: str) -> None:
    """Every micro-batch is planned again by a reader that was started anew, while the store grows."""
    reader = stream(root, **given(name))
    first, start = step(reader, begun(reader))
    grow(root, 40)
    others, end = finished(stream(root, **given(name)), start)
    found = first + [row for each in others for row in each]
    assert sorted(found) == [(queue, number) for queue in range(4) for number in range(30)]
    assert step(stream(root, **given(name)), end) == ([], end)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_restored_backup(root: str, tmp_path: Path, name: str) -> None:
    """What came after the backup is gone: an error, or each newer message once."""
    backup = tmp_path / "backup"
    shutil.copytree(root, backup)
    grow(root, 40)
    strict, lenient = (stream(root, **given(name, failOnDataLoss=value)) for value in ("true", "false"))
    _, end = finished(strict, begun(strict))
    shutil.rmtree(root)
    shutil.copytree(backup, root)
    grow(root, 60)
    for reader in (strict, stream(root, **given(name))):
        with pytest.raises(StoreWentBackwardsError):
            step(reader, end)
    found, _ = finished(lenient, end)
    again = [row for each in found for row in each]
    assert sorted(again) == [(queue, number) for queue in range(4) for number in range(20, 35)]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_topic_made_again(root: str, name: str) -> None:
    """As long as before: an error, or its new messages, of which none has a tag."""
    strict, lenient = (stream(root, **given(name, failOnDataLoss=value)) for value in ("true", "false"))
    _, end = finished(strict, begun(strict))
    _, other = finished(lenient, begun(lenient))
    broker = Broker(Path(root), SMALL)
    shutil.rmtree(Path(root) / "consumequeue" / "t")
    for queue_id in range(4):
        broker.next["t", queue_id] = 0
        for number in range(20):
            broker.put("t", b"again %d" % number, queue_id)
    broker.close()
    for reader in (strict, stream(root, **given(name))):
        with pytest.raises(StoreWentBackwardsError):
            step(reader, end)
    found, _ = finished(lenient, other)
    wanted = [] if name == "tags" else [(queue, n) for queue in range(4) for n in range(20)]
    assert sorted(row for each in found for row in each) == wanted


@pytest.mark.parametrize("name", OPTIONS)
def test_retention_between_planning_and_reading(root: str, name: str) -> None:
    grow(root, 1200)
    options = {**given(name), "maxOffsetsPerTrigger": "900", "maxBytesPerTrigger": "1g"}
    strict, lenient = (stream(root, **{**options, "failOnDataLoss": value}) for value in ("true", "false"))
    start = begun(strict)
    end = strict.latestOffset(start, strict.getDefaultReadLimit())
    planned = [reader.partitions(start, end) for reader in (strict, lenient)]
    retain(root, 2)
    with pytest.raises(OffsetOutOfRangeError):
        rows(strict, planned[0])
    left = rows(lenient, planned[1])
    assert len(left) == len(set(left)) < 900
    assert left


def test_a_backup_restored_after_a_batch_read_by_key_was_planned(root: str, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(root, backup)
    add(root, 40, keys=[["same"]] * 40)
    reader = batch(root, keys="same")
    planned = reader.partitions()
    shutil.rmtree(root)
    shutil.copytree(backup, root)
    grow(root, 60)
    with pytest.raises(StoreWentBackwardsError):
        rows(reader, planned)
