"""Where a read begins and ends: by offset, by time, and where a consumer group has read to."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from messagestore import ConfigError, MessageStore, OffsetOutOfRangeError
from messagestore.files.consumer_offsets import publish_offsets
from pyspark_messagestore.options.positions import EARLIEST, EVERY_QUEUE, LATEST, Committed, Moment
from pyspark_messagestore.options.table import source_options
from stream_steps import ALL, SMALL, add, batch, begun, finished, planned_first, retain, rows, step, stream

READ = {"path": "/s", "subscribe": "t"}


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Three batches of 8 messages in 4 queues, stored at different times."""
    path = str(tmp_path / "store")
    for _ in range(3):
        add(path, 8)
        time.sleep(0.02)
    return path


def time_of(root: str, number: int, queue_id: int = 0) -> int:
    """When a message was stored."""
    with MessageStore.open(root, SMALL) as store:
        return store.get_message("t", queue_id, number).messages[0].store_timestamp_ms


def iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat()


def queues_of(offset: dict) -> list[int]:
    return list(offset["queues"]["t"].values())


# ---- how they are written


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("1700000000123", Moment(1700000000123)),
        ("0", Moment(0)),
        ("2023-11-14T22:13:20Z", Moment(1700000000000)),
        ("2023-11-14T23:13:20.000001+01:00", Moment(1700000000001)),
        ("-10m", Moment(600_000, relative=True)),
        (" -1.5h ", Moment(5_400_000, relative=True)),
        ("-500ms", Moment(500, relative=True)),
    ],
)
def test_times(text: str, moment: Moment) -> None:
    assert source_options({**READ, "startingTimestamp": text}).starting_timestamp == moment
    assert source_options({**READ, "endingTimestamp": text}).ending_timestamp == moment
    by_queue = source_options({**READ, "endingOffsetsByTimestamp": json.dumps({"t": {"*": text, "1": 5}})})
    assert by_queue.ending_offsets_by_timestamp == {"t": {EVERY_QUEUE: moment, 1: Moment(5)}}


@pytest.mark.parametrize(
    "text",
    [
        *("", "now", "-3", "10m", "-10", "-10 minutes", "2023-11-14", "2023-11-14T22:13:20", "1e3", "9" * 19, "-m"),
        *("1969-12-31T23:59:59Z", "1700000000.5"),
    ],
)
def test_texts_that_are_no_times(text: str) -> None:
    """A time without a time zone is one of them: it could mean several moments."""
    for name in ("startingTimestamp", "endingTimestamp"):
        with pytest.raises(ConfigError, match=f"option {name}: found .*; allowed is milliseconds since 1970"):
            source_options({**READ, name: text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("startingOffsetsByTimestamp", '{"t": 5}'),
        ("startingOffsetsByTimestamp", '{"t": {"0": -3}}'),
        ("endingOffsetsByTimestamp", '{"t": {"0": -2}}'),
        ("endingTimestamp", "-2"),
        ("startingOffsetsByTimestamp", '{"t": {"0": true}}'),
        ("startingOffsetsByTimestamp", "-10m"),
        ("startingOffsetsByTimestampStrategy", "newest"),
        ("endingOffsets", "earliest"),
        ("endingOffsets", '{"t": {"0": -2}}'),
        ("endingOffsetsByTimestamp", "[]"),
        ("startingOffsets", "committed:error"),
        ("onMissingTopic", "ignore"),
        ("startingOffsets", '{"t": {"0": 5, "0": 3}}'),
        ("startingOffsets", '{"t": {"0": 5, "00": 3}}'),
        ("startingOffsets", '{"t": {"*": 5}, "t": {"*": 3}}'),
        ("startingOffsets", '{"t": {"a": {"0": 5}, "b": {"0": 3}}}'),
        ("startingOffsetsByTimestamp", '{"t": {"0": 5, "0": 3}}'),
        ("endingOffsets", '{"t": {"0": 5, "0": 3}}'),
    ],
)
def test_wrong_values(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        source_options({**READ, "consumerGroup": "g", name: value})
    assert str(caught.value).startswith(f"option {name}: found {value!r}; allowed is ")


def test_times_that_are_kafkas_special_numbers(root: str) -> None:
    """-1 is the latest message, and -2 the earliest: both used to be errors."""
    every = [(queue, number) for queue in range(4) for number in range(6)]
    for asked in ({"startingTimestamp": "-2"}, {"startingOffsetsByTimestamp": '{"t": {"*": -2}}'}):
        for ending in ({"endingTimestamp": "-1"}, {"endingOffsetsByTimestamp": '{"t": {"0": -1, "*": " -1 "}}'}):
            whole = batch(root, **asked, **ending)
            assert rows(whole, whole.partitions()) == every
            reader = stream(root, **asked, **ending)
            start = begun(reader)
            add(root, 4)
            found, end = step(reader, start, ALL)
            assert found == every, "the latest message is the one that was there when the query began"
            assert step(reader, end, ALL) == ([], end)
            every += [(queue, len(every) // 4) for queue in range(4)]
            every.sort()
    for asked in ({"startingTimestamp": "-1"}, {"startingOffsetsByTimestamp": '{"t": {"*": -1}}'}):
        whole = batch(root, **asked)
        assert rows(whole, whole.partitions()) == []
        reader = stream(root, **asked)
        start = begun(reader)
        assert step(reader, start, ALL) == ([], start)
        add(root, 4)
        assert len(step(reader, start, ALL)[0]) == 4


def test_precedence_is_kafkas() -> None:
    """A time for all queues, then times by queue, then offsets."""
    given = {"startingOffsets": "earliest", "endingOffsets": "latest"}
    found = source_options({**READ, **given})
    assert found.starting is not None
    assert (found.starting.option, found.starting.wanted) == ("startingOffsets", EARLIEST)
    given |= {"startingOffsetsByTimestamp": '{"t": {"*": 1}}', "endingOffsetsByTimestamp": '{"t": {"*": 1}}'}
    found = source_options({**READ, **given})
    assert found.starting is not None
    assert found.ending is not None
    assert (found.starting.option, found.ending.option) == ("startingOffsetsByTimestamp", "endingOffsetsByTimestamp")
    found = source_options({**READ, **given, "startingTimestamp": "5", "endingTimestamp": "-0s"})
    assert found.starting is not None
    assert found.ending is not None
    assert (found.starting.wanted, found.ending.wanted) == (Moment(5), Moment(0, relative=True))


def test_committed_needs_a_group() -> None:
    with pytest.raises(ConfigError, match="option startingOffsets: found committed without consumerGroup"):
        source_options({**READ, "startingOffsets": "committed"})
    found = source_options({**READ, "startingOffsets": "committed:LATEST", "consumerGroup": "g"})
    assert found.starting_offsets == Committed(LATEST)


# ---- the beginning


def test_a_stream_begins_at_a_time(root: str) -> None:
    """The first message of the time counts, to the millisecond; each way of writing it finds the same."""
    ms = time_of(root, 2)
    for text in (str(ms), iso(ms)):
        assert queues_of(begun(stream(root, startingTimestamp=text))) == [2, 2, 2, 2]
    assert queues_of(begun(stream(root, startingTimestamp=str(ms + 1)))) == [4, 4, 4, 4]
    assert queues_of(begun(stream(root, startingTimestamp=str(ms - 1)))) == [2, 2, 2, 2]
    assert queues_of(begun(stream(root, startingTimestamp="0"))) == [0, 0, 0, 0]
    assert queues_of(begun(stream(root, startingTimestamp="-1h"))) == [0, 0, 0, 0]
    reader = stream(root, startingTimestamp=str(ms))
    found, end = step(reader, begun(reader), ALL)
    assert found == [(queue, number) for queue in range(4) for number in range(2, 6)]
    assert queues_of(end) == [6, 6, 6, 6]


def test_a_time_for_each_queue(root: str) -> None:
    asked = json.dumps({"t": {"0": time_of(root, 2), "3": iso(time_of(root, 4)), "*": "-1d"}})
    assert queues_of(begun(stream(root, startingOffsetsByTimestamp=asked))) == [2, 0, 0, 4]
    with pytest.raises(ConfigError, match="option startingOffsetsByTimestamp: queue 1 of t is not listed"):
        planned_first(stream(root, startingOffsetsByTimestamp='{"t": {"0": 5}}'))


@pytest.mark.parametrize(("strategy", "first"), [("latest", 6), ("earliest", 0), ("error", None)])
def test_no_message_is_as_young(root: str, strategy: str, first: int | None) -> None:
    given = {"startingTimestamp": "-0s", "startingOffsetsByTimestampStrategy": strategy}
    time.sleep(0.01)
    if first is not None:
        assert queues_of(begun(stream(root, **given))) == [first] * 4
        return
    with pytest.raises(ConfigError, match="option startingTimestamp: queue 0 of t has no message that was stored at"):
        planned_first(stream(root, **given))


def test_a_time_below_what_retention_left(root: str) -> None:
    """Nothing was asked for by number, so nothing is lost."""
    ms = time_of(root, 0)
    add(root, 2000, size=100)
    retain(root, 2)
    reader = batch(root, startingTimestamp=str(ms))
    assert 0 < len(rows(reader, reader.partitions())) < 2024


def test_a_query_begins_where_its_group_has_read_to(root: str) -> None:
    publish_offsets(root, "g", {("t", 0): 2, ("t", 1): 3, ("t", 2): 6})
    given = {"consumerGroup": "g"}
    assert queues_of(begun(stream(root, startingOffsets="committed:earliest", **given))) == [2, 3, 6, 0]
    assert queues_of(begun(stream(root, startingOffsets="committed:latest", **given))) == [2, 3, 6, 6]
    with pytest.raises(ConfigError, match=r"consumer group g has not read queue 3 of t\. Give committed:earliest or"):
        planned_first(stream(root, startingOffsets="committed", **given))
    publish_offsets(root, "g", {("t", 3): 1})
    assert queues_of(begun(stream(root, startingOffsets="committed", **given))) == [2, 3, 6, 1]
    publish_offsets(root, "g", {("t", 3): 9})
    with pytest.raises(OffsetOutOfRangeError, match="t/3: offset 9 was requested"):
        planned_first(stream(root, startingOffsets="committed", **given))
    assert queues_of(begun(stream(root, startingOffsets="committed", failOnDataLoss="false", **given))) == [2, 3, 6, 0]


def test_a_batch_read_cannot_begin_at_the_latest_message_of_a_queue(root: str) -> None:
    """As in Kafka's connector; it used to read nothing of that queue."""
    for asked in ('{"t": {"*": -1}}', '{"t": {"0": 1, "1": -1, "*": -2}}'):
        with pytest.raises(ConfigError, match=r"startingOffsets: found -1 \(latest\), but a batch read"):
            batch(root, startingOffsets=asked)


def test_a_batch_read_cannot_begin_at_the_latest_message(root: str) -> None:
    """It would read nothing, whatever happened to the store."""
    with pytest.raises(ConfigError, match="option startingOffsets: found latest, but a batch read"):
        batch(root, startingOffsets="latest")
    assert batch(root, startingOffsets="latest", startingTimestamp="0").partitions()


def test_a_changed_beginning_is_ignored_and_said_once(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """A restarted query continues at its checkpoint."""
    first = stream(root, startingOffsets="earliest", maxOffsetsPerTrigger="5")
    start = step(first, begun(first))[1]
    same = stream(root, startingOffsets="earliest")
    start = step(same, start, ALL)[1]
    assert caplog.text == ""
    other = stream(root, startingTimestamp="-10m")
    for _ in range(2):
        add(root, 4)
        found, start = step(other, start, ALL)
        assert len(found) == 4
    assert caplog.text.count("option startingTimestamp has changed since this query began") == 1


# ---- the end


def test_a_batch_read_ends_at_offsets(root: str) -> None:
    reader = batch(root, startingOffsets='{"t": {"*": 1}}', endingOffsets='{"t": {"0": 3, "1": 1, "*": -1}}')
    found = rows(reader, reader.partitions())
    assert [number for queue, number in found if queue == 0] == [1, 2]
    assert [number for queue, number in found if queue == 1] == []
    assert [number for queue, number in found if queue == 3] == [1, 2, 3, 4, 5]


def test_a_batch_read_between_two_times(root: str) -> None:
    """The end does not count: two reads that meet share nothing."""
    first, second = time_of(root, 2), time_of(root, 4)
    reader = batch(root, startingTimestamp=str(first), endingTimestamp=str(second))
    assert rows(reader, reader.partitions()) == [(queue, number) for queue in range(4) for number in (2, 3)]
    reader = batch(root, endingTimestamp=iso(first))
    assert rows(reader, reader.partitions()) == [(queue, number) for queue in range(4) for number in (0, 1)]
    reader = batch(root, endingOffsetsByTimestamp=json.dumps({"t": {"1": first, "*": 0}}))
    assert rows(reader, reader.partitions()) == [(1, 0), (1, 1)]
    reader = batch(root, startingTimestamp=str(second), endingTimestamp=str(first))
    assert reader.partitions() == []


def test_queues_that_never_had_a_message_may_be_listed(tmp_path: Path) -> None:
    """A job from Kafka lists all partitions; a queue has no file before its first message."""
    root = str(tmp_path / "store")
    add(root, 4, queues=2)
    with MessageStore.open(root, SMALL) as store:
        store.alter_topic("t", write_queue_nums=4, read_queue_nums=4)
    late = batch(root, startingOffsets='{"t": {"0": 1, "1": -2, "2": 0, "3": -2}}')
    assert sorted(rows(late, late.partitions())) == [(0, 1), (1, 0), (1, 1)]
    early = batch(root, endingOffsets='{"t": {"0": 1, "1": -1, "2": 0, "3": -1}}')
    assert sorted(rows(early, early.partitions())) == [(0, 0), (1, 0), (1, 1)]
    for queue_id, name, fault, match in (
        (4, "startingOffsets", ConfigError, "queue 4 of t does not exist"),
        (4, "endingOffsets", ConfigError, "queue 4 of t does not exist"),
        (3, "startingOffsets", OffsetOutOfRangeError, "t/3: offset 7 was requested, but the queue holds 0 to 0"),
        (3, "endingOffsets", OffsetOutOfRangeError, "t/3: offset 7 was requested, but the queue holds 0 to 0"),
    ):
        with pytest.raises(fault, match=match):
            batch(root, **{name: json.dumps({"t": {"0": 1, "1": 1, str(queue_id): 7}})}).partitions()
    options = {
        "startingOffsets": '{"t": {"0": 2, "1": 2, "3": -1}}',
        "endingOffsets": '{"t": {"0": 9, "1": 2, "3": 1}}',
    }
    reader = stream(root, **options)
    start = begun(reader)
    assert start["queues"] == {"t": {"0": 2, "1": 2}}
    add(root, 8, queues=4)
    with pytest.raises(ConfigError, match="queue 2 of t is not listed"):
        planned_first(reader)
    options["endingOffsets"] = '{"t": {"0": 9, "1": 2, "2": -1, "3": 1}}'
    assert sorted(step(stream(root, **options), start, ALL)[0]) == [(0, 2), (0, 3), (2, 0), (2, 1), (3, 0)]


def test_ends_that_cannot_be(root: str) -> None:
    with pytest.raises(
        ConfigError, match="option endingOffsets: queue 0 of t would end at 2, but the read begins at 3"
    ):
        batch(root, startingOffsets='{"t": {"*": 3}}', endingOffsets='{"t": {"*": 2}}').partitions()
    with pytest.raises(OffsetOutOfRangeError, match="t/0: offset 7 was requested, but the queue holds 0 to 6"):
        batch(root, endingOffsets='{"t": {"*": 7}}').partitions()
    lenient = batch(root, endingOffsets='{"t": {"*": 7}}', failOnDataLoss="false")
    assert len(rows(lenient, lenient.partitions())) == 24
    with pytest.raises(ConfigError, match="option endingOffsets: queue 1 of t is not listed"):
        batch(root, endingOffsets='{"t": {"0": 7}}').partitions()
    reader = stream(root, startingOffsets="latest", endingOffsets='{"t": {"*": 2}}')
    start = begun(reader)  # no error yet: a restarted query, too, asks where it would begin now
    with pytest.raises(ConfigError, match="would end at 2"):
        reader.latestOffset(start, ALL)


def test_a_replay_in_a_stream_ends(root: str) -> None:
    """In small steps, each restarted; what is stored meanwhile is beyond the end."""
    first, last = time_of(root, 2), time_of(root, 4)
    reader = stream(
        root, startingTimestamp=str(first), endingTimestamp=str(last), maxOffsetsPerTrigger="3", minPartitions="2"
    )
    start = begun(reader)
    add(root, 40)
    found, end = finished(reader, start)
    assert sorted(row for each in found for row in each) == [(queue, number) for queue in range(4) for number in (2, 3)]
    reader.prepareForTriggerAvailableNow()
    assert step(reader, end) == ([], end)


def test_a_stream_to_an_end_that_is_still_to_come(root: str) -> None:
    """An offset that the queue has not reached, and a time that is not over."""
    by_offset = stream(root, startingOffsets="latest", endingOffsets='{"t": {"*": 8}}')
    by_time = stream(root, startingOffsets="latest", endingTimestamp=str(int(time.time() * 1000) + 400))
    one, two = begun(by_offset), begun(by_time)
    add(root, 4)
    first, two = step(by_time, two, ALL)
    assert len(first) == 4
    time.sleep(0.5)
    add(root, 16)
    assert step(by_time, two, ALL) == ([], two)
    assert step(by_offset, one, ALL)[0] == [(queue, number) for queue in range(4) for number in (6, 7)]


def test_the_end_of_a_replay_stays_after_a_restart(root: str) -> None:
    """`latest` and a time ago mean the moment when the query began, until the option is changed."""
    for asked in ({"endingOffsets": "latest"}, {"endingTimestamp": "-0s"}):
        reader = stream(root, startingOffsets="earliest", maxOffsetsPerTrigger="10", **asked)
        start = begun(reader)
        before = sum(queues_of(begun(stream(root))))
        time.sleep(0.01)
        taken, start = step(reader, start)
        add(root, 8)
        found, end = finished(stream(root, maxOffsetsPerTrigger="10", **asked), start)
        assert len(taken) + sum(map(len, found)) == before
        assert sum(queues_of(end)) == before
        other = stream(root, endingOffsets='{"t": {"0": 7, "*": 6}}')
        found, later = step(other, end, ALL)
        assert found == ([(0, 6)] if before == 24 else [])
        assert len(step(stream(root), later, ALL)[0]) == 8 - len(found)


def test_a_new_queue_is_beyond_an_end_that_was_the_latest(root: str) -> None:
    add(root, 4, topic="u", queues=8)
    reader = stream(root, subscribe="u", startingOffsets="earliest", endingOffsets="latest")
    start = begun(reader)
    add(root, 8, topic="u", queues=8)
    found, end = step(reader, start, ALL)
    assert found == [(queue, 0) for queue in range(4)]
    assert step(reader, end, ALL) == ([], end)


@pytest.mark.parametrize("option", ["endingOffsets", "endingOffsetsByTimestamp"])
def test_a_queue_that_an_end_does_not_list_and_that_has_messages_later(
    root: str, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream used to fail at the first message of a queue that had none, and thus was not listed."""
    add(root, 2, topic="u", queues=8)
    end = 9 if option == "endingOffsets" else 9_999_999_999_999
    asked = {"subscribe": "u", option: json.dumps({"u": {"0": end, "1": end}})}
    reader = stream(root, startingOffsets="earliest", **asked)
    found, middle = step(reader, begun(reader), ALL)
    assert found == [(0, 0), (1, 0)]
    add(root, 8, topic="u", queues=8)
    for each in (reader, stream(root, **asked)):
        found, later = step(each, middle, ALL)
        assert found == [(0, 1), (1, 1)]
    assert f"u/7 had no message when this query began, and option {option} does not list it" in caplog.text
    rest, _ = step(stream(root, subscribe="u"), later, ALL)
    assert rest == [(queue, 0) for queue in range(2, 8)], "without an end, they are read from their first message"
    with pytest.raises(ConfigError, match=f"option {option}: queue 2 of u is not listed"):
        planned_first(stream(root, startingOffsets="earliest", **asked))


def test_a_replay_goes_on_after_retention(root: str) -> None:
    """Messages before its end are deleted while it runs: an error, or a gap; never a message beyond the end."""
    add(root, 2000, size=100)
    reader = stream(root, startingOffsets="earliest", endingOffsets='{"t": {"*": 400}}', maxOffsetsPerTrigger="100")
    _, middle = step(reader, begun(reader))
    retain(root, 3)
    with pytest.raises(OffsetOutOfRangeError):
        step(stream(root, endingOffsets='{"t": {"*": 400}}'), middle, ALL)
    lenient = stream(root, endingOffsets='{"t": {"*": 400}}', failOnDataLoss="false")
    found, end = step(lenient, middle, ALL)
    assert found
    assert {number for _, number in found} <= set(range(400))
    assert queues_of(end) == [400] * 4
