"""The first micro-batch: Spark asks again and again where it begins until it is done, and only the first answer counts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from messagestore import ConfigError, MessageStore, OffsetOutOfRangeError, StoreWentBackwardsError
from messagestore.files.consumer_offsets import publish_offsets
from stream_steps import ALL, SMALL, add, again, begun, finished, planned_first, retain, rows, step, stream

NEW = [(queue, number) for queue in range(4) for number in (3, 4)]


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A store with three messages in each of four queues."""
    path = str(tmp_path / "store")
    add(path, 12)
    return path


def planned(root: str, **options: str) -> Any:
    """The end of the first micro-batch of a query; two messages came to each queue after it had begun."""
    reader = stream(root, **options)
    start = begun(reader)
    add(root, 8)
    return again(reader.latestOffset(start, reader.getDefaultReadLimit()))


def replanned(root: str, end: Any, **options: str) -> list[tuple[int, int]]:
    """What a restarted query reads in its first micro-batch, whose end is planned already: Spark asks where it begins."""
    reader = stream(root, **options)
    return rows(reader, reader.partitions(begun(reader), end))


@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": "latest"},
        {"startingTimestamp": "-0s"},
        {"startingOffsets": "committed", "consumerGroup": "g"},
        {"startingOffsets": "latest", "maxOffsetsPerTrigger": "8"},
        {"startingOffsets": "latest", "endingOffsets": '{"t": {"*": 5}}'},
    ],
    ids=["latest", "a time ago", "committed", "with a limit", "with an end"],
)
def test_messages_are_read_that_came_before_the_first_batch_was_killed(root: str, options: dict[str, str]) -> None:
    """It used to begin where the options say after the restart, beyond its end, and nothing of it was ever read."""
    publish_offsets(root, "g", {("t", queue): 3 for queue in range(4)})
    end = planned(root, **options)
    for _ in range(2):  # it may be killed again
        add(root, 4)
        publish_offsets(root, "g", {("t", queue): 6 for queue in range(4)})
        assert replanned(root, end, **options) == NEW
    found, last = step(stream(root, **options), end, ALL)
    assert found == ([] if "endingOffsets" in options else [(queue, number) for queue in range(4) for number in (5, 6)])
    assert last["queues"] == {"t": dict.fromkeys("0123", 5 if "endingOffsets" in options else 7)}


def test_messages_that_come_while_spark_writes_its_plan_are_read(root: str) -> None:
    """Without any kill: Spark asks before it plans the end, and once more when the plan is written."""
    reader = stream(root, startingOffsets="latest")
    start = begun(reader)
    add(root, 8)
    reader.prepareForTriggerAvailableNow()
    end = again(reader.latestOffset(start, ALL))
    add(root, 4)
    assert rows(reader, reader.partitions(begun(reader), end)) == NEW
    assert step(reader, end) == ([], end), "AvailableNow ends there"


def test_a_group_that_goes_back_adds_nothing_to_the_first_batch(root: str) -> None:
    """The batch has the same rows whenever it runs, so a sink that holds it knows it."""
    options = {"startingOffsets": "committed", "consumerGroup": "g"}
    publish_offsets(root, "g", {("t", queue): 3 for queue in range(4)})
    end = planned(root, **options)
    publish_offsets(root, "g", {("t", queue): 0 for queue in range(4)})
    assert replanned(root, end, **options) == NEW


def test_a_first_batch_without_messages_stays_without(root: str) -> None:
    """Its end is its beginning. The next one is planned from there, and its end needs no answer from anybody."""
    options = {"startingOffsets": "committed", "consumerGroup": "g"}
    publish_offsets(root, "g", {("t", queue): 3 for queue in range(4)})
    reader = stream(root, **options)
    start = begun(reader)
    end = again(reader.latestOffset(start, ALL))
    assert end == start
    publish_offsets(root, "g", {("t", queue): 1 for queue in range(4)})
    add(root, 8)
    assert replanned(root, end, **options) == []
    found, last = finished(stream(root, **options), end)
    assert found == [NEW]
    assert replanned(root, last, **options) == NEW


def unpublish(root: str) -> None:
    (Path(root) / "config" / "consumerOffset.json").unlink()


def add_a_queue(root: str) -> None:
    with MessageStore.open(root, SMALL) as store:
        store.alter_topic("t", write_queue_nums=5, read_queue_nums=5)
    add(root, 5, queues=5)


@pytest.mark.parametrize(
    ("options", "change", "match"),
    [
        ({"startingOffsets": "committed", "consumerGroup": "g"}, unpublish, "consumer group g has not read queue 0"),
        ({"startingOffsets": '{"t": {"0": 3, "1": 3, "2": 3, "3": 3}}'}, add_a_queue, "queue 4 of t is not listed"),
        (
            {"startingTimestamp": "-300ms", "startingOffsetsByTimestampStrategy": "error"},
            lambda root: time.sleep(0.3),
            "queue 0 of t has no message that was stored at",
        ),
        (
            {"subscribePattern": "t.*", "startingOffsets": '{"t": {"*": -1}}'},
            lambda root: add(root, 4, "t2"),
            "topic t2",
        ),
    ],
    ids=["the group is gone", "a queue is new", "the time has passed", "a topic is new"],
)
def test_a_batch_is_read_again_although_its_beginning_cannot_be_found_any_more(
    root: str, options: dict[str, str], change: Callable[[str], None], match: str
) -> None:
    """The restart failed with an error about options that are for new queries, and kept failing.

    A new query still gets the error.
    """
    publish_offsets(root, "g", {("t", queue): 3 for queue in range(4)})
    if "startingTimestamp" in options:
        time.sleep(0.3)
        add(root, 4)
    reader = stream(root, **options)
    start = begun(reader)
    add(root, 4)
    end = again(reader.latestOffset(start, ALL))
    taken = rows(reader, reader.partitions(start, end))
    assert len(taken) == (8 if "startingTimestamp" in options else 4)
    change(root)
    assert replanned(root, end, **options) == taken
    with pytest.raises(ConfigError, match=match):
        planned_first(stream(root, **options))


def test_a_beginning_that_is_found_at_the_second_try_counts(root: str) -> None:
    """The answer that nobody could give is never kept: the end says where its batch begins, and so does an empty one."""
    options = {"startingOffsets": "committed", "consumerGroup": "g"}
    for count in (0, 8):
        reader = stream(root, **options)
        unknown = begun(reader)
        assert unknown["undecided"]
        assert unknown["queues"] == {"t": {}}
        publish_offsets(root, "g", {("t", queue): 3 for queue in range(4)})
        if count:
            add(root, count)
        end = again(reader.latestOffset(unknown, ALL))
        assert "undecided" not in json.dumps(end)
        assert end.get("begin", end)["queues"] == {"t": dict.fromkeys("0123", 3)}
        assert replanned(root, end, **options) == (NEW if count else [])
        unpublish(root)


def test_queues_and_topics_that_appear_before_the_first_batch_are_read_from_their_first_message(root: str) -> None:
    for options in ({"subscribe": "t,u", "onMissingTopic": "wait"}, {"subscribePattern": "[a-z]"}):
        topic = "u" if "subscribe" in options else "v"
        reader = stream(root, startingOffsets="latest", **options)
        start = begun(reader)
        with MessageStore.open(root, SMALL) as store:
            count = len(store.topics()["t"]) + 1
            store.alter_topic("t", write_queue_nums=count, read_queue_nums=count)
        add(root, 4, topic=topic)
        add(root, count, queues=count)
        end = again(reader.latestOffset(start, ALL))
        taken = rows(reader, reader.partitions(start, end))
        add(root, 4, topic=topic)
        add(root, count, queues=count)
        assert len(taken) == 4 + count
        assert replanned(root, end, startingOffsets="latest", **options) == taken
        assert len(step(stream(root, **options), end, ALL)[0]) == 4 + count


def test_a_store_that_appears_after_the_query_began(tmp_path: Path) -> None:
    root, options = str(tmp_path / "later"), {"startingOffsets": "latest", "onMissingTopic": "wait"}
    reader = stream(root, **options)
    start = begun(reader)
    assert reader.latestOffset(start, ALL) == start
    add(root, 4)
    reader = stream(root, **options)
    end = again(reader.latestOffset(start, ALL))
    add(root, 4)
    assert replanned(root, end, **options) == [(queue, 0) for queue in range(4)]


def test_messages_of_the_first_batch_that_retention_deleted_are_told(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error, or a gap that is counted; it used to be passed over."""
    reader = stream(root, startingOffsets="latest")
    start = begun(reader)
    add(root, 2000, size=100)
    end = again(reader.latestOffset(start, ALL))
    retain(root, 2)
    with pytest.raises(OffsetOutOfRangeError, match=r"t/0: offset 3 was requested, but the queue holds"):
        replanned(root, end, startingOffsets="latest")
    found = replanned(root, end, startingOffsets="latest", failOnDataLoss="false")
    assert 0 < len(found) < 2000
    gone = sum(int(text.split()[-1]) for text in map(_before, caplog.messages) if text)
    assert gone + len(found) == 2000


def _before(message: str) -> str:
    return message.partition(" messages, ")[0] if "retention has deleted" in message else ""


def test_a_log_that_was_made_again_under_the_first_batch_is_noticed(root: str) -> None:
    """The beginning is proven like any other start."""
    end = planned(root, startingOffsets="latest")
    forged = {**end, "last": None, "physicalOffset": 1 << 40}
    assert replanned(root, forged, startingOffsets="latest") == NEW
    forged["begin"] = {**end["begin"], "last": {**end["begin"]["last"], "crc": 1}}
    with pytest.raises(StoreWentBackwardsError, match="is not the one that this query has read"):
        replanned(root, forged, startingOffsets="latest")


def test_only_the_first_offsets_say_where_the_query_began(root: str) -> None:
    reader = stream(root, startingOffsets="latest")
    start = begun(reader)
    add(root, 8)
    end = again(reader.latestOffset(start, ALL))
    add(root, 8)
    last = again(reader.latestOffset(end, ALL))
    assert [sorted(each.keys() & {"initial", "begin"}) for each in (start, end, last)] == [["initial"], ["begin"], []]
    assert end["begin"]["queues"] == start["queues"]
    assert reader.latestOffset(last, ALL) == last
    assert json.dumps(end) == json.dumps(end, sort_keys=True)


def test_a_changed_option_is_told_and_does_not_move_the_first_batch(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    end = planned(root, startingOffsets="latest")
    assert replanned(root, end, startingOffsets="earliest") == NEW
    assert "option startingOffsets has changed since this query began" in caplog.text
    with MessageStore.open_read_only(root) as store:
        assert store.max_offset("t", 0) == 5
