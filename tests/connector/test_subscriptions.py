"""Which topics and queues a query reads: by name, by pattern, queue by queue; those that come later, too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from crash.imitate import Broker
from messagestore import ConfigError, NotAStoreError, OffsetOutOfRangeError, StoreWentBackwardsError, UnknownTopicError
from pyspark_messagestore.options import source_options
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
        ("assign", "{}"),
        ("assign", '{"t": []}'),
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


def test_a_pattern_without_a_match(root: str) -> None:
    with pytest.raises(UnknownTopicError, match="No topic matches this subscribePattern"):
        planned_first(stream(root, subscribePattern="gates"))
    with pytest.raises(UnknownTopicError, match="gate-a, gate-b, other"):
        batch(root, subscribePattern="gates").partitions()
    waiting = stream(root, subscribePattern="late.*", onMissingTopic="wait")
    start = begun(waiting)
    add(root, 2, topic="later", queues=1)
    assert step(waiting, start, ALL)[0] == [(0, 0), (0, 1)]


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
    found, _ = step(stream(root, subscribePattern="gate-new"), start, ALL)
    assert 0 < len(found) < 1000
    assert found[-1] == (0, 999)


def test_assigned_queues_and_no_others(root: str) -> None:
    reader = stream(root, assign='{"gate-a": [3, 1], "gate-b": [0]}', startingOffsets="earliest")
    found, end = step(reader, begun(reader), ALL)
    assert sorted(found) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (3, 0), (3, 1)]
    assert end["queues"] == {"gate-a": {"1": 2, "3": 2}, "gate-b": {"0": 4}}
    add(root, 4, topic="gate-a")
    assert step(reader, end, ALL)[0] == [(1, 2), (3, 2)]
    whole = batch(root, assign='{"gate-a": [2]}')
    assert rows(whole, whole.partitions()) == [(2, 0), (2, 1), (2, 2)]


def test_an_assigned_queue_that_does_not_exist(root: str) -> None:
    with pytest.raises(ConfigError, match=r"option assign: queue 4 of gate-a does not exist\. Its queues are \[0, 1"):
        planned_first(stream(root, assign='{"gate-a": [0, 4]}'))
    with pytest.raises(UnknownTopicError, match=r"messagestore topic create \S+ gate-x"):
        planned_first(stream(root, assign='{"gate-x": [0]}'))


def test_an_assigned_queue_without_messages_is_read_when_they_come(root: str) -> None:
    add(root, 1, topic="sparse", queues=8)
    reader = stream(root, assign='{"sparse": [6]}')
    start = begun(reader)
    assert start["queues"] == {"sparse": {"6": 0}}
    assert step(reader, start, ALL) == ([], start)
    add(root, 8, topic="sparse", queues=8)
    assert step(reader, start, ALL)[0] == [(6, 0)]


def test_other_assigned_queues_after_a_restart(root: str) -> None:
    """A queue that is assigned anew begins at its first message; one that was left out continues where it was."""
    reader = stream(root, assign='{"gate-a": [0, 1]}')
    start = begun(reader)
    add(root, 8, topic="gate-a")
    found, middle = step(stream(root, assign='{"gate-a": [1, 2]}'), start, ALL)
    assert found == [(1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]
    found, _ = step(stream(root, assign='{"gate-a": [0, 1, 2]}'), middle, ALL)
    assert found == [(0, 2), (0, 3)]


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


def test_a_limit_holds_over_topics_of_a_pattern(root: str) -> None:
    reader = stream(root, subscribePattern=".*", startingOffsets="earliest", maxOffsetsPerTrigger="5")
    found, _ = finished(reader, begun(reader))
    assert [len(each) for each in found] == [5, 5, 5, 5, 4]
