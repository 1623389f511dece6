"""Filters that Spark passes on: less is read, and what Spark's own filter would keep is there."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.types import StructType

from messagestore import ConfigError, MessageStore
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source import pushdown
from pyspark_messagestore.source.readers import BatchReader, FilteringReader
from pyspark_messagestore.source.schema import core_schema
from stream_steps import SMALL, add, tables


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = str(tmp_path / "store")
    for topic in ("t", "u"):
        add(path, 40, topic=topic, tags=["UA" if i % 2 else "AA" for i in range(40)])
    return path


def reader(root: str, *filters, row_format: str = "rocketmq", **options: str) -> FilteringReader:
    given = {"path": root, "subscribePattern": ".*", "filterPushdown": "true", "rowFormat": row_format, **options}
    source = MessageStoreDataSource(given)
    found = source.reader(source.schema())
    assert isinstance(found, FilteringReader)
    assert list(found.pushFilters(list(filters))) == list(filters)
    return found


def count(found: FilteringReader) -> int:
    return sum(each.num_rows for each in tables(found, found.partitions()))


def col(filter_type, name: str, value=None):
    return filter_type((name,)) if value is None else filter_type((name,), value)


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([col(EqualTo, "topic", "t")], 40),
        ([col(In, "topic", ("t", "x", None))], 40),
        ([col(EqualTo, "topic", "t"), col(EqualTo, "topic", "u")], 0),
        ([col(EqualTo, "queueId", 2)], 20),
        ([col(In, "queueId", (1, 3)), col(EqualTo, "topic", "u")], 20),
        ([col(EqualTo, "queueOffset", 3)], 8),
        ([col(GreaterThan, "queueOffset", 7)], 24),
        ([col(GreaterThanOrEqual, "queueOffset", 8), col(LessThan, "queueOffset", 9)], 16),
        ([col(LessThanOrEqual, "queueOffset", -1)], 0),
        ([col(EqualTo, "tags", "UA")], 40),
        ([col(In, "tags", ("UA", "AA")), col(IsNotNull, "tags")], 80),
        ([col(EqualTo, "tags", "none")], 0),
        ([Not(col(EqualTo, "topic", "t"))], 80),
        ([col(StringStartsWith, "topic", "t"), col(EqualTo, "body", b"x")], 80),
        ([EqualTo(("properties", "topic"), "t")], 80),
    ],
)
def test_what_filters_leave(root: str, filters: list, left: int) -> None:
    """At least what Spark's own filter keeps; as little as the queues can tell."""
    assert count(reader(root, *filters)) == left


def test_kafkas_names(root: str) -> None:
    found = [col(EqualTo, "partition", 2), col(LessThan, "offset", 3), col(EqualTo, "topic", "u")]
    assert count(reader(root, *found, row_format="kafka")) in (3, 4)
    assert count(reader(root, col(EqualTo, "queueId", 2), row_format="kafka")) == 80


def test_a_column_that_is_made_from_another_one_narrows_nothing(root: str) -> None:
    """`timestampType = 1` is true for every message, and left only the messages of queue 1."""
    assert count(reader(root, col(EqualTo, "timestampType", 1), row_format="kafka")) == 80
    given = {"path": root, "subscribePattern": ".*", "filterPushdown": "true", "brokerName": "broker-a"}
    found = MessageStoreDataSource(given).reader(StructType().add("brokerName", "string").add("topic", "string"))
    assert isinstance(found, FilteringReader)
    found.pushFilters([col(EqualTo, "brokerName", "broker-a"), col(EqualTo, "topic", "u")])
    assert count(found) == 40


def test_tags_of_a_filter_and_of_the_option(root: str) -> None:
    assert count(reader(root, col(EqualTo, "tags", "UA"), tags="UA || BB")) == 40
    assert count(reader(root, col(EqualTo, "tags", "UA"), tags="AA")) == 0


def test_store_times_with_a_margin_for_clocks(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushdown, "CLOCK_MARGIN_MS", 0)
    time.sleep(0.01)
    add(root, 8)
    with MessageStore.open(root, SMALL) as store:
        ms = store.get_message("t", 0, 10).messages[0].store_timestamp_ms
    when = datetime.fromtimestamp(ms / 1000, UTC)
    assert count(reader(root, col(GreaterThanOrEqual, "storeTimestamp", when))) == 8
    assert count(reader(root, col(EqualTo, "storeTimestamp", when))) == 8
    assert count(reader(root, col(LessThan, "storeTimestamp", when))) == 88
    assert count(reader(root, col(LessThan, "storeTimestamp", datetime.fromtimestamp(ms / 1000 - 0.002, UTC)))) == 80
    assert count(reader(root, col(GreaterThan, "storeTimestamp", when.replace(tzinfo=None)))) == 88
    monkeypatch.undo()
    assert count(reader(root, col(GreaterThan, "storeTimestamp", when))) == 88


def test_filters_come_only_when_asked_for(root: str) -> None:
    """Merely having the method makes Spark refuse every read while its own setting is off."""
    source = MessageStoreDataSource({"path": root, "subscribe": "t"})
    assert type(source.reader(core_schema())) is BatchReader
    assert "pushFilters" not in vars(BatchReader)
    with pytest.raises(ConfigError, match="option filterPushdown: is for batch reads"):
        MessageStoreDataSource({"path": root, "subscribe": "t", "filterPushdown": "true"}).streamReader(
            core_schema()
        ).initialOffset()
    with pytest.raises(ConfigError, match="option filterPushdown: found 'yes'; allowed is true or false"):
        source_options({"path": root, "subscribe": "t", "filterPushdown": "yes"})
