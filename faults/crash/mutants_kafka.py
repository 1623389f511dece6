"""Bugs planted where the source follows Spark's connector for Kafka: a job from there would lose rows, fail or wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from crash.judge import Verdict
from crash.mutants_readers import story
from crash.planting import Mutant, patched, without
from crash.surprises import CONFIG
from messagestore import ConfigError, Message, MessageStore
from messagestore.spi import STORES
from pyspark_messagestore.options.positions import Asked
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source.follower import Follower
from pyspark_messagestore.source.readers import StreamReader
from pyspark_messagestore.source.schema import Projection

_COLUMNS = Projection.of(StructType().add("body", "binary"))


def _put(root: Path, *topics: str, queue_id: int = 0) -> None:
    with MessageStore.open(root, CONFIG) as store:
        for topic in topics:
            store.create_topic(topic, 3)
            store.put_message(Message(topic, b"m", queue_id=queue_id))


def _stream(root: Path, **options: str) -> StreamReader:
    given = {"path": str(root), "startingOffsets": "earliest", "failOnDataLoss": "true", **options}
    return StreamReader(source_options(given), _COLUMNS, STORES)


def _count(reader: StreamReader, start: Any, end: Any) -> int:
    return sum(batch.num_rows for part in reader.partitions(start, end) for batch in reader.read(part))


def a_topic_leaves(folder: Path) -> Verdict:
    """A restarted query names one topic less: its messages must not be left out in silence."""
    verdict, root = Verdict(), folder / "store"
    _put(root, "t", "u")
    reader = _stream(root, subscribe="t,u")
    end = json.loads(json.dumps(reader.latestOffset(reader.initialOffset(), ReadAllAvailable())))
    _put(root, "t", "u")
    try:
        restarted = _stream(root, subscribe="t")
        restarted.latestOffset(end, ReadAllAvailable())
        verdict.lost.append("topic u left the query, and nobody was told")
    except ConfigError:
        pass
    return verdict


def a_run_begins(folder: Path) -> Verdict:
    """What is there when a run begins is read at once, however many messages a batch shall have at least."""
    verdict, root = Verdict(), folder / "store"
    _put(root, "t")
    reader = _stream(root, subscribe="t", minOffsetsPerTrigger="100")
    start = json.loads(json.dumps(reader.initialOffset()))
    if reader.latestOffset(start, reader.getDefaultReadLimit()) == start:
        verdict.lost.append("a message that was there when the query began waits for 99 others")
    return verdict


def a_queue_is_late(folder: Path) -> Verdict:
    """A queue that the end of a stream does not list gets its first message: the stream goes on."""
    verdict, root = Verdict(), folder / "store"
    _put(root, "t")
    reader = _stream(root, subscribe="t", endingOffsets='{"t": {"0": 9}}')
    start = json.loads(json.dumps(reader.initialOffset()))
    _put(root, "t", queue_id=2)
    try:
        end = json.loads(json.dumps(reader.latestOffset(start, ReadAllAvailable())))
        if _count(reader, start, end) != 1:
            verdict.misread.append("the stream has read a queue that its end does not list")
    except ConfigError as error:
        verdict.lost.append(f"the stream fails at the first message of a queue: {error}")
    return verdict


def _every_look_waits(real: Any) -> Any:
    def is_delayed(reader: StreamReader, *given: Any) -> bool:
        reader._min_offsets.has_looked = True
        found: bool = real(reader, *given)
        return found

    return is_delayed


MUTANTS = (
    Mutant("a topic that leaves a query is passed over", without(Follower, "check_left"), "a topic leaves", story(a_topic_leaves)),
    Mutant("what is there when a run begins waits for others", patched(StreamReader, "_is_delayed", _every_look_waits), "a run begins", story(a_run_begins)),
    Mutant("a queue with its first message after the end was fixed must be listed", without(Asked, "covers", True), "a late queue", story(a_queue_is_late)),
)  # fmt: skip
