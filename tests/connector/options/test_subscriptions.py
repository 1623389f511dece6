"""Which topics and queues a query reads: by name, by pattern, queue by queue; those that come later, too."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from crash.imitate import Broker
from messagestore import (
    ConfigError,
    Message,
    MessageStore,
    NotAStoreError,
    OffsetOutOfRangeError,
    StoreWentBackwardsError,
    UnknownTopicError,
)
from pyspark_messagestore.options.table import source_options
from stream_steps import ALL, SMALL, add, again, batch, begun, finished, planned_first, retain, rows, step, stream


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = str(tmp_path / "store")
    add(path, 8, topic="gate-a")
    add(path, 8, topic="gate-b", queues=2)
    add(path, 8, topic="other")
    return path


def topics_of(offset: dict) -> dict[str, int]:
    return {topic: sum(queues.values()) for topic, queues in offset["queues"].items()}


def refused(**options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        source_options({"path": "/s", **options})
    return str(caught.value)


def test_exactly_one_subscription() -> None:
    assert "exactly one of subscribe, subscribePattern and assign" in refused()
    assert "option assign: found beside subscribe." in refused(subscribe="a", assign='{"a": [0]}')
    assert "option subscribePattern: found beside subscribe." in refused(topic="a", subscribePattern="a.*")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("subscribePattern", "("),
        ("subscribePattern", ""),
        ("subscribePattern", "a{99999999999999999999}"),
        ("assign", "t"),
        ("assign", '{"t": [-1]}'),
        ("assign", '{"t": [true]}'),
        ("assign", '{"t": ["0"]}'),
        ("assign", '{"a/b": [0]}'),
        ("assign", '["t"]'),
        ("assign", '{"t": [0], "t": [1]}'),
    ],
)
def test_wrong_values(name: str, value: str) -> None:
    assert refused(**{name: value}).startswith(f"option {name}: found {value!r}; allowed is ")


def test_a_pattern_reads_the_topics_whose_whole_name_matches(root: str) -> None:
    reader = stream(root, subscribePattern="gate-.", startingOffsets="earliest")
    found, end = step(reader, begun(reader), ALL)
    assert len(found) == 16
    assert topics_of(end) == {"gate-a": 8, "gate-b": 8}
    assert topics_of(begun(stream(root, subscribePattern="gate|.*-b"))) == {"gate-b": 8}


def test_a_topic_that_is_created_later_is_read_from_its_first_message(root: str) -> None:
    """While the query runs, and while it does not."""
    reader = stream(root, subscribePattern="gate-.*")
    start = begun(reader)
    assert step(reader, start, ALL) == ([], start)
    add(root, 6, topic="gate-c", queues=3)
    found, start = step(reader, start, ALL)
    assert found == [(queue, number) for queue in range(3) for number in range(2)]
    reader.stop()
    add(root, 3, topic="gate-d", queues=1)
    add(root, 3, topic="no-gate", queues=1)
    found, end = step(stream(root, subscribePattern="gate-.*"), start, ALL)
    assert found == [(0, 0), (0, 1), (0, 2)]
    assert topics_of(end) == {"gate-a": 8, "gate-b": 8, "gate-c": 6, "gate-d": 3}


def test_a_pattern_follows_many_queues_in_the_log(tmp_path: Path) -> None:
    """With more than a few queues, new topics are found in the log itself."""
    root = str(tmp_path / "store")
    add(root, 60, topic="gate-a", queues=30)
    reader = stream(root, subscribePattern="gate-.*")
    start = begun(reader)
    for name in ("gate-b", "other", "%RETRY%gate-g"):
        add(root, 2, topic=name, queues=2)
    found, end = step(reader, start, ALL)
    assert found == [(0, 0), (1, 0)]
    assert topics_of(end) == {"gate-a": 60, "gate-b": 2}


def test_a_pattern_never_matches_retry_dead_letter_and_system_topics(root: str) -> None:
    broker = Broker(Path(root), SMALL)
    for topic in ("%RETRY%g", "%DLQ%g", "SCHEDULE_TOPIC_XXXX", "rmq_sys_trace"):
        broker.put(topic, b"x", 0)
    broker.close()
    reader = stream(root, subscribePattern=".*", startingOffsets="earliest")
    assert topics_of(step(reader, begun(reader), ALL)[1]) == {"gate-a": 8, "gate-b": 8, "other": 8}
    named = stream(root, subscribe="%RETRY%g,SCHEDULE_TOPIC_XXXX", startingOffsets="earliest")
    assert len(step(named, begun(named), ALL)[0]) == 2
    assigned = batch(root, assign='{"%DLQ%g": [0]}')
    assert rows(assigned, assigned.partitions()) == [(0, 0)]


def test_a_pattern_without_a_match_waits_for_a_topic(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """As with Kafka: it used to be an error. The topics that are there are named once."""
    reader = stream(root, subscribePattern="late.*", startingOffsets="earliest")
    start = begun(reader)
    assert step(reader, start, ALL) == ([], start)
    assert caplog.text.count("no topic matches 'late.*', so nothing is read yet. The store has gate-a, gate-b, ot") == 1
    add(root, 2, topic="later", queues=1)
    assert step(reader, start, ALL)[0] == [(0, 0), (0, 1)]
    whole = batch(root, subscribePattern="gates")
    assert rows(whole, whole.partitions()) == []


def test_messages_of_a_new_topic_that_are_gone_are_counted(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """The topic is new to the query: what retention took of it was never read."""
    start = begun(stream(root, subscribePattern="gate-.*"))
    add(root, 1000, topic="gate-new", queues=1, size=200)
    retain(root, 2)
    with pytest.raises(OffsetOutOfRangeError, match="gate-new/0: offset 0 was requested"):
        step(stream(root, subscribePattern="gate-.*"), start, ALL)
    found, _ = step(stream(root, subscribePattern="gate-.*", failOnDataLoss="false"), start, ALL)
    assert found[-1] == (0, 999)
    assert f"retention has deleted {1000 - len(found)} messages, 0 to" in caplog.text


def test_another_pattern_after_a_restart_begins_at_what_is_there(root: str) -> None:
    """The topic was not subscribed before: nothing of it counts as lost."""
    start = begun(stream(root, subscribePattern="other"))
    add(root, 1000, topic="gate-new", queues=1, size=200)
    retain(root, 2)
    found, _ = step(stream(root, subscribePattern="other|gate-new"), start, ALL)
    assert 0 < len(found) < 1000
    assert found[-1] == (0, 999)


def test_a_topic_that_is_added_after_all_of_it_was_deleted(root: str) -> None:
    """Nothing of it is read, but where it ends counts as reached: the query stopped, as if the log had been cut."""
    start = begun(stream(root, subscribe="other"))
    add(root, 100, topic="gate-new", queues=1, size=200)
    add(root, 1000, topic="unread", queues=1, size=200)
    retain(root, 2)
    options = {"subscribe": "other,gate-new"}
    found, end = step(stream(root, **options), start, ALL)
    assert (found, end["queues"]["gate-new"]) == ([], {"0": 100})
    assert step(stream(root, **options), end, ALL) == ([], end)
    add(root, 2, topic="gate-new", queues=1)
    assert step(stream(root, **options), end, ALL)[0] == [(0, 100), (0, 101)]


def test_all_messages_that_are_left_to_read_are_deleted(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """The gap is told once, and nobody says that the topic was made again."""
    add(root, 100, topic="gate-new", queues=1, size=200)
    options = {"subscribe": "gate-new", "startingOffsets": "earliest", "failOnDataLoss": "false"}
    reader = stream(root, **options, maxOffsetsPerTrigger="10")
    _, end = step(reader, begun(reader))
    add(root, 1000, topic="unread", queues=1, size=200)
    retain(root, 2)
    found, end = step(reader, end)
    assert (found, end["queues"]["gate-new"]) == ([], {"0": 100})
    assert step(reader, end) == ([], end)
    add(root, 2, topic="gate-new", queues=1)
    assert step(stream(root, **options), end, ALL)[0] == [(0, 100), (0, 101)]
    assert [record.getMessage().partition(".")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "gate-new/0: retention has deleted 90 messages, 10 to 99"
    ]


def test_assigned_queues_and_no_others(root: str) -> None:
    reader = stream(root, assign='{"gate-a": [3, 1], "gate-b": [0]}', startingOffsets="earliest")
    found, end = step(reader, begun(reader), ALL)
    assert sorted(found) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (3, 0), (3, 1)]
    assert end["queues"] == {"gate-a": {"1": 2, "3": 2}, "gate-b": {"0": 4}}
    add(root, 4, topic="gate-a")
    assert step(reader, end, ALL)[0] == [(1, 2), (3, 2)]
    whole = batch(root, assign='{"gate-a": [2]}')
    assert rows(whole, whole.partitions()) == [(2, 0), (2, 1), (2, 2)]


def test_an_assigned_queue_that_does_not_exist_is_read_when_it_comes(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As with Kafka: it used to be an error. A topic that does not exist is one there, too."""
    reader = stream(root, assign='{"gate-b": [0, 2]}', startingOffsets="earliest")
    found, end = step(reader, begun(reader), ALL)
    assert found == [(0, number) for number in range(4)]
    assert (
        caplog.text.count("queue 2 of gate-b does not exist, so nothing of it is read yet. Its queues are [0, 1]") == 1
    )
    with MessageStore.open(root, SMALL) as store:
        store.alter_topic("gate-b", read_queue_nums=3, write_queue_nums=3)
        store.put_message(Message("gate-b", b"x", queue_id=2))
    assert step(reader, end, ALL)[0] == [(2, 0)]
    with pytest.raises(UnknownTopicError, match=r"messagestore topic create \S+ gate-x"):
        planned_first(stream(root, assign='{"gate-x": [0]}'))


@pytest.mark.parametrize("assigned", ["{}", '{"gate-a": []}'])
def test_nothing_is_assigned(root: str, assigned: str) -> None:
    """As with Kafka, where a program may have left nothing: it used to be an error."""
    whole = batch(root, assign=assigned)
    assert rows(whole, whole.partitions()) == []
    reader = stream(root, assign=assigned, startingOffsets="earliest")
    start = begun(reader)
    assert step(reader, start, ALL) == ([], start)
    mixed = batch(root, assign='{"gate-a": [], "gate-b": [1]}')
    assert len(rows(mixed, mixed.partitions())) == 4


def test_an_assigned_queue_without_messages_is_read_when_they_come(root: str) -> None:
    add(root, 1, topic="sparse", queues=8)
    reader = stream(root, assign='{"sparse": [6]}')
    start = begun(reader)
    assert start["queues"] == {"sparse": {"6": 0}}
    assert step(reader, start, ALL) == ([], start)
    add(root, 8, topic="sparse", queues=8)
    assert step(reader, start, ALL)[0] == [(6, 0)]


def test_a_queue_that_is_assigned_anew_begins_at_its_first_message(root: str) -> None:
    start = begun(stream(root, assign='{"gate-a": [0, 1]}'))
    add(root, 8, topic="gate-a")
    found, _ = step(stream(root, assign='{"gate-a": [0, 1, 2]}'), start, ALL)
    assert found == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]


LEFT: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "a topic of several": (
        {"subscribe": "gate-a,gate-b"},
        {"subscribe": "gate-a"},
        "option subscribe: leaves out gate-b, which",
    ),
    "another query's checkpoint": (
        {"subscribe": "other"},
        {"subscribe": "gate-a"},
        "option subscribe: leaves out other, which",
    ),
    "another pattern": (
        {"subscribePattern": "gate-.*"},
        {"subscribePattern": ".*-a"},
        "option subscribePattern: leaves out gate-b, which",
    ),
    "a queue": (
        {"assign": '{"gate-a": [0, 1]}'},
        {"assign": '{"gate-a": [0]}'},
        "option assign: leaves out gate-a/1, which",
    ),
    "queues instead of topics": (
        {"subscribe": "gate-a"},
        {"assign": '{"gate-a": [0]}'},
        "option assign: leaves out gate-a/1, gate-a/2, gate-a/3, which",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_a_topic_that_leaves_a_query_is_data_loss(root: str, case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its messages used to be left out, and two queries with each other's checkpoints read everything twice."""
    before, after, fault = LEFT[case]
    reader = stream(root, **before, startingOffsets="earliest")
    start = begun(reader)
    _, end = step(reader, start, ALL)
    for offset in (start, end):  # with the first micro-batch still to be done, and after it
        with pytest.raises(ConfigError, match=fault):
            step(stream(root, **after), offset, ALL)
    with pytest.raises(ConfigError, match=fault):  # a micro-batch that was planned before
        stream(root, **after).partitions(start, end)

    for topic in ("gate-a", "gate-b", "other"):
        add(root, 4, topic=topic, queues=2 if topic == "gate-b" else 4)
    lenient = stream(root, **after, failOnDataLoss="false")
    found, later = step(lenient, end, ALL)
    assert found
    assert f"{fault} this query has read before. With failOnDataLoss=false the query continues without" in caplog.text
    add(root, 4, topic="gate-a")
    assert step(stream(root, **after), later, ALL)[0], "the next run has nothing to complain about"


def test_an_assigned_queue_that_was_made_again(root: str) -> None:
    """Deleted and created again under the query: an error, or all of its new messages."""
    strict, lenient = (
        stream(root, assign='{"gate-b": [1]}', failOnDataLoss=value, startingOffsets="earliest")
        for value in ("true", "false")
    )
    starts = [step(reader, begun(reader), ALL)[1] for reader in (strict, lenient)]
    broker = Broker(Path(root), SMALL)
    shutil.rmtree(Path(root) / "consumequeue" / "gate-b")
    broker.next["gate-b", 1] = 0
    for number in range(6):
        broker.put("gate-b", b"again %d" % number, 1)
    broker.close()
    with pytest.raises(StoreWentBackwardsError, match="gate-b/1 was created again"):
        step(strict, starts[0], ALL)
    assert step(lenient, starts[1], ALL)[0] == [(1, number) for number in range(6)]


def test_a_query_begins_before_its_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It waits, says so once, and reads from the first message; a second run goes on."""
    root = str(tmp_path / "store")
    with pytest.raises(NotAStoreError):
        planned_first(stream(root))
    reader = stream(root, onMissingTopic="wait")
    reader.prepareForTriggerAvailableNow()
    start = begun(reader)
    assert start["queues"] == {"t": {}}
    assert step(reader, start, ALL) == ([], start)
    assert caplog.text.count("With onMissingTopic=wait the query waits for it") == 1
    add(root, 2, topic="early")
    reader = stream(root, onMissingTopic="wait")
    assert step(reader, start, ALL)[1]["queues"] == {"t": {}}
    with pytest.raises(UnknownTopicError):
        step(stream(root), start, ALL)
    add(root, 8)
    found, end = step(reader, start, ALL)
    assert len(found) == 8
    assert step(stream(root), end, ALL) == ([], end)
    shutil.rmtree(root)
    with pytest.raises(NotAStoreError):
        step(stream(root, onMissingTopic="wait"), end, ALL)


def test_a_first_micro_batch_without_rows_ends_before_its_store(tmp_path: Path) -> None:
    """Spark plans it, although it begins where it ends; the query used to fail instead of waiting."""
    root = str(tmp_path / "store")
    reader = stream(root, onMissingTopic="wait", startingOffsets="latest")
    start = begun(reader)
    assert again(reader.latestOffset(start, ALL)) == start
    assert reader.partitions(start, start) == []
    restarted = stream(root, onMissingTopic="wait", startingOffsets="latest")
    assert restarted.partitions(begun(restarted), start) == []
    with pytest.raises(NotAStoreError):
        stream(root).partitions(start, start)
    add(root, 8)
    restarted = stream(root, onMissingTopic="wait", startingOffsets="latest")
    assert restarted.partitions(begun(restarted), start) == []
    found, end = step(restarted, start, ALL)
    assert len(found) == 8
    shutil.rmtree(root)
    with pytest.raises(NotAStoreError):
        stream(root, onMissingTopic="wait").partitions(end, end)


def test_waiting_is_not_for_a_store_that_cannot_be_read(root: str) -> None:
    """Its queues are in RocksDB: this will not change by itself."""
    (Path(root) / "consumequeue" / "CURRENT").write_text("MANIFEST-000001")
    with pytest.raises(NotAStoreError, match="RocksDB"):
        planned_first(stream(root, subscribe="gate-a", onMissingTopic="wait"))


def test_a_missing_topic_says_how_to_create_it(root: str) -> None:
    with pytest.raises(UnknownTopicError, match=f"Create it with `messagestore topic create {root} gatec`"):
        planned_first(stream(root, subscribe="gatec"))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["pattern", "assign"])
def test_five_thousand_queues_in_one_query(tmp_path: Path, by: str) -> None:
    """Every message of every queue once, with limits and without; nothing costs more than a moment when it is idle."""
    root = str(tmp_path / "store")
    topics = [f"t{number}" for number in range(5)]
    for topic in topics:
        add(root, 2000, topic=topic, queues=1000)
    assigned = json.dumps({topic: list(range(1000)) for topic in topics})
    asked = {"subscribePattern": "t."} if by == "pattern" else {"assign": assigned}

    reader = stream(root, startingOffsets="earliest", **asked)
    found, end = step(reader, begun(reader), ALL)
    assert len(found) == 10_000
    assert sum(map(len, end["queues"].values())) == 5000
    assert set(topics_of(end).values()) == {2000}
    begun_s = time.thread_time()
    for _ in range(100):
        assert reader.latestOffset(end, ALL) == end
    assert (time.thread_time() - begun_s) / 100 < 0.01

    add(root, 1000, topic="t3", queues=1000)
    found, end = step(reader, end, ALL)
    assert sorted(found) == [(queue, 2) for queue in range(1000)]
    add(root, 1000, topic="t4", queues=1000)
    steps, _ = finished(stream(root, maxOffsetsPerTrigger="700", **asked), end)
    assert [len(each) for each in steps] == [700, 300]


def test_a_limit_holds_over_topics_of_a_pattern(root: str) -> None:
    reader = stream(root, subscribePattern=".*", startingOffsets="earliest", maxOffsetsPerTrigger="5")
    found, _ = finished(reader, begun(reader))
    assert [len(each) for each in found] == [5, 5, 5, 5, 4]


def test_a_planned_batch_with_a_queue_that_is_not_named_any_more_says_so(root: str) -> None:
    """It said that the log was cut, restored, or not recovered yet."""
    reader = stream(root, assign='{"gate-b": [0, 1]}', startingOffsets="earliest")
    start = begun(reader)
    end = again(reader.latestOffset(start, ALL))
    fewer = stream(root, assign='{"gate-b": [0]}', startingOffsets="earliest")
    with pytest.raises(ConfigError, match="option assign: leaves out gate-b/1, which this query has read before"):
        fewer.partitions(start, end)
    going_on = stream(root, assign='{"gate-b": [0]}', startingOffsets="earliest", failOnDataLoss="false")
    assert rows(going_on, going_on.partitions(start, end)) == [(0, number) for number in range(4)]
    assert going_on.follower.checked, "nothing is wrong with the log"
