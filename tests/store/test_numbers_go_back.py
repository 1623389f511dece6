"""What remembers a queue offset, beside every way in which the numbers of a queue go back: `log/remembered.py`."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from crash.harness import die
from crash.imitate import Broker, another_boot
from messagestore import (
    ASYNC_FLUSH,
    Consumer,
    Message,
    MessageStore,
    NotAStoreError,
    ReadOnlyStore,
    StoreWentBackwardsError,
)
from messagestore.files.consumer_offsets import PROGRESS_GROUP, ConsumerOffsets, publish_offsets
from messagestore.files.delay_offsets import DelayOffsets
from messagestore.files.disk import Disk
from messagestore.format.half_records import GROUP as HALF_GROUP
from messagestore.format.half_records import HALF_TOPIC, OP_TOPIC
from messagestore.format.layout import FILLER_UNIT_SIZE, UNIT
from messagestore.format.message import BATCH_TOPIC
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.inspect import operator
from messagestore.inspect.verify import verify
from messagestore.log.remembered import ANSWERS, Answer, Memory, WayBack, corrected
from messagestore.read.queue_ends import QueueEnds
from messagestore.spi import LOCAL_STORES
from numbers_back import BEHIND_THE_GROUP, CONFIG, EVERY_WAY, MORE, READ, History
from small import read_all


def test_each_memory_has_an_answer_for_each_way() -> None:
    brokers = {Memory.DELIVERY, Memory.DELAY_OFFSETS, Memory.HALVES, Memory.SETTLED}  # nobody can delete their topics
    assert set(ANSWERS) == set(itertools.product(Memory, WayBack)) - {(memory, WayBack.DELETED) for memory in brokers}
    assert set(ANSWERS.values()) == set(Answer)


@pytest.mark.parametrize(
    ("offset", "begin", "end", "wanted"),
    [(0, 0, 0, 0), (3, 0, 5, 3), (5, 0, 5, 5), (6, 0, 5, 0), (6, 2, 5, 5), (1, 2, 5, 1), (7, 0, 0, 0)],
)
def test_where_reading_goes_on(offset: int, begin: int, end: int, wanted: int) -> None:
    assert corrected(offset, begin, end) == wanted


# ---- the queue itself


def remember_nothing(history: History, store: MessageStore) -> None:
    store.flush()


@pytest.mark.parametrize("kind", ["plain", "delayed", "half"])
@pytest.mark.parametrize("left", ["closed", "killed"])
def test_a_queue_without_messages_that_is_rebuilt_numbers_on(tmp_path: Path, kind: str, left: str) -> None:
    """Its numbers began at 0 again, and a follower that had read 12 messages skipped the new ones."""
    done = {"plain": remember_nothing, "delayed": delivered_by_us, "half": commit_all}[kind]
    history = History(tmp_path / "s", kind, done)
    history.expire()
    if left == "killed":
        with history.open() as store:
            history.fill(store, 1)
            store.flush()
            history.root = shutil.copytree(history.root, tmp_path / "killed")
    file = max((history.root / "consumequeue" / history.queue[0] / "0").iterdir())
    was = file.read_bytes()
    shutil.rmtree(history.root / "consumequeue")
    for _ in range(2):
        with history.open() as store:
            assert not [note for note in store.report.notes if "number" in note]
            assert store.min_offset(*history.queue) == store.max_offset(*history.queue) == READ
        assert verify(history.root, CONFIG).findings == []
    unit, at = UNIT.size, (READ - 1) % (len(was) // UNIT.size) * UNIT.size
    assert file.read_bytes()[at:] == was[at:]
    assert file.read_bytes()[:unit] == UNIT.struct.pack(0, FILLER_UNIT_SIZE, 0)
    with history.open() as store:
        history.put(store, 1)
        assert (store.min_offset(*history.queue), store.max_offset(*history.queue)) == (READ, READ + 1)
    assert verify(history.root, CONFIG).findings == []


@pytest.mark.parametrize("lost", ["t", "t/0", "t/0/*", "*"])
@pytest.mark.parametrize("left", ["closed", "open", "killed", "killed async", "rebooted"])
def test_a_reader_says_0_of_a_missing_queue_and_the_next_put_gets_12(tmp_path: Path, lost: str, left: str) -> None:
    """The seal has the number of a queue that has neither files nor messages. Whoever asks gets it from there."""
    history = History(tmp_path / "s", "plain", remember_nothing)
    if left == "killed async":
        history.config = CONFIG.replace(flush_disk_type=ASYNC_FLUSH)
    history.expire()
    with contextlib.ExitStack() as until_the_end:
        if left != "closed":
            history.fill(until_the_end.enter_context(history.open()), 1)
        if left.startswith("killed"):
            die(history.root)
        if left == "rebooted":
            die(history.root)
            until_the_end.enter_context(another_boot())
        for path in [*(history.root / "consumequeue").glob(lost)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

        with MessageStore.open_read_only(history.root, history.config) as reader:
            assert (reader.min_offset("t", 0), reader.max_offset("t", 0)) == (READ, READ)
            assert reader.get_message("t", 0, READ).next_begin_offset == READ
            assert QueueEnds(reader.view, ["t"]).look() in ({("t", 0): READ}, {})
            assert reader.max_offset("t", 1) == reader.max_offset("other", 0) == 0
            with history.open() as store:
                assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (READ, READ)
                history.put(store, 1)
                assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (READ, READ + 1)
            assert (reader.min_offset("t", 0), reader.max_offset("t", 0)) == (READ, READ + 1)
    if left != "open":
        die(history.root)
        assert verify(history.root, CONFIG).findings == []


@pytest.mark.parametrize("lost", ["t", "t/0", "t/0/*"])
def test_recover_leaves_a_queue_without_messages_missing(tmp_path: Path, lost: str) -> None:
    """A look at all queues found nothing wrong with it. It is made again, and keeps its number."""
    history = History(tmp_path / "s", "plain", remember_nothing)
    history.expire()
    for path in [*(history.root / "consumequeue").glob(lost)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with history.open() as store:  # as `messagestore recover` does
        found = [store.report.rebuilt, store.check_queues()]
        assert [bool(found[0]), bool(found[1])] == [lost != "t/0/*", lost == "t/0/*"]
        assert "t/0" in (found[0] or found[1])
    assert len([*(history.root / "consumequeue" / "t" / "0").iterdir()]) == 1
    (history.root / "spark" / "ends").unlink()  # the queue's own file has its number now
    with history.open() as store:
        assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (READ, READ)
    assert verify(history.root, CONFIG).findings == []


@pytest.mark.parametrize("lost", ["t", "t/0", "*"])
@pytest.mark.parametrize("who", ["recover", "put"])
def test_recover_finds_the_same_queue_damaged_each_time(tmp_path: Path, lost: str, who: str) -> None:
    """The CRC of its seal covered units whose records retention had deleted, so that nothing could make them again."""
    history = History(tmp_path / "s", "plain", remember_nothing)
    history.expire()
    with history.open() as store:
        history.put(store, 2)
    for path in [*(history.root / "consumequeue").glob(lost)]:
        shutil.rmtree(path)
    with history.open() as store:
        if who == "recover":
            assert (store.report.rebuilt or store.check_queues() or "").count("t/0") >= 1 or lost == "*"
        else:
            history.put(store, 1)
    for _ in range(2):
        with history.open() as store:
            assert (store.report.rebuilt, store.check_queues()) == (None, None)
    with history.open() as store:
        assert store.min_offset("t", 0) == READ
        assert store.max_offset("t", 0) == READ + 2 + (who == "put")
    assert verify(history.root, CONFIG).findings == []


@pytest.mark.parametrize("lost", ["spark/ends", "spark"])
def test_recovery_says_which_queues_begin_again(tmp_path: Path, lost: str) -> None:
    """Nobody was told that numbers had gone back."""
    history = History(tmp_path / "s", "plain", remember_nothing)
    history.expire()
    shutil.rmtree(history.root / "consumequeue")
    path = history.root / lost
    if lost == "spark":
        Broker(history.root, CONFIG).close()  # the seals may be older than what it wrote
    else:
        path.unlink()
    with history.open() as store:
        notes = [note for note in store.report.notes if note.startswith("t/0: ")]
        assert store.max_offset("t", 0) == 0
    named = f"spark/ends names {READ}" if lost == "spark" else "nothing tells the number of the last one"
    assert len(notes) == 1
    assert named in notes[0]


@EVERY_WAY
def test_a_follower_that_saw_nothing_of_it_skips_no_message(tmp_path: Path, way: WayBack) -> None:
    """When it looked again, the queue had grown past the number that it had reached."""
    history = History(tmp_path / "s", "plain", remember_nothing)
    found: list[tuple[ReadOnlyStore, Iterator[Any]]] = []

    def follow(history: History, store: MessageStore) -> None:
        view = MessageStore.open_read_only(history.root, CONFIG)
        found.append((view, view.follow("t", 0, 0, columns=["body"], timeout=30)))
        assert next(found[0][1]).num_rows == READ

    history.remember = follow
    history.back(way)
    with history.open() as store:
        history.put(store, MORE)
        with found[0][0], pytest.raises(StoreWentBackwardsError):
            next(found[0][1])


@EVERY_WAY
def test_a_follower_that_waits_at_the_end_skips_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: WayBack
) -> None:
    """It had given nothing that it could compare, and began to give when the queue had grown past its number."""
    history = History(tmp_path / "s", "plain", remember_nothing)
    waits, goes_on, real = threading.Event(), threading.Event(), ReadOnlyStore._wait

    def wait(reader: ReadOnlyStore, *given: Any, **named: Any) -> int:
        waits.set()
        assert goes_on.wait(120)
        return real(reader, *given, **named)

    with ThreadPoolExecutor(1) as pool:
        found: list[tuple[ReadOnlyStore, Future[Any]]] = []

        def follow(history: History, store: MessageStore) -> None:
            view = MessageStore.open_read_only(history.root, CONFIG)
            monkeypatch.setattr(ReadOnlyStore, "_wait", wait)
            found.append((view, pool.submit(next, view.follow("t", 0, READ, columns=["body"], timeout=30))))
            assert waits.wait(120)

        history.remember = follow
        history.back(way)
        with history.open() as store:
            history.put(store, READ + MORE)
            goes_on.set()
            with found[0][0], pytest.raises(StoreWentBackwardsError):
                found[0][1].result(120)


# ---- delayed messages


def deliver_all(store: MessageStore) -> None:
    while store.deliver_delayed().count:
        pass


def delivered_by_us(history: History, store: MessageStore) -> None:
    history.disk.now_ms += 1_000
    deliver_all(store)
    assert store.max_offset("t", 0) == READ


def delivered_by_a_broker(history: History, store: MessageStore) -> None:
    history.disk.now_ms += 1_000
    for message in store.get_message(SCHEDULE_TOPIC, 0, 0, READ).messages:
        store.put_message(Message("t", message.body, queue_id=0))
    DelayOffsets(Disk(), str(history.root)).save({1: READ})
    services = store._attached.services
    assert services is not None
    delivery = services.delivery
    delivery._of_broker = None


@BEHIND_THE_GROUP
@pytest.mark.parametrize("memory", [Memory.DELIVERY, Memory.DELAY_OFFSETS], ids=lambda memory: memory.name)
def test_each_delayed_message_is_delivered_once(tmp_path: Path, memory: Memory, way: WayBack) -> None:
    """They were never due: the progress said 12, and the new messages have the numbers from 0 or 5 on."""
    assert ANSWERS[memory, way] in (Answer.PLACE, Answer.LOWERED)
    ours = memory is Memory.DELIVERY
    history = History(tmp_path / "s", "delayed", delivered_by_us if ours else delivered_by_a_broker)
    file = tmp_path / "s" / "config" / "delayOffset.json"
    history.back(way)
    if ours:
        file.unlink(missing_ok=True)
    with history.open() as store:
        assert ours or DelayOffsets(Disk(), str(history.root)).load()[1] <= store.max_offset(SCHEDULE_TOPIC, 0)
        history.put(store, MORE // 2)
    with (
        history.open() as store
    ):  # another session, which sees a queue that is as long as what was delivered, or longer
        history.put(store, MORE // 2)
        history.disk.now_ms += 1_000
        deliver_all(store)
        queue = (SCHEDULE_TOPIC, 0)
        first = store.min_offset(*queue)
        waiting = [m.body for m in store.get_message(*queue, first, 100).messages]
        found = Counter(read_all(store))
    assert len(waiting) >= MORE
    assert {body: found[body] for body in waiting} == dict.fromkeys(waiting, 1)
    assert DelayOffsets(Disk(), str(history.root)).load() == {1: first + len(waiting)}
    report = verify(history.root, CONFIG)
    assert report.ok, report


@BEHIND_THE_GROUP
@pytest.mark.parametrize("kind", ["plain", "delayed"])
def test_retention_keeps_what_was_not_read_or_delivered(tmp_path: Path, kind: str, way: WayBack) -> None:
    """It asked the same number, and deleted new messages as if they had been read."""
    assert ANSWERS[Memory.RETENTION, way] is Answer.KEPT
    history = History(tmp_path / "s", kind, remember_group if kind == "plain" else delivered_by_a_broker)
    history.back(way)
    with history.open() as store:
        history.put(store, MORE)
        history.fill(store, 3)
        store.flush()
        first = store.max_offset(*history.queue) - MORE
        result = store.delete_expired_files(before_offset=1 << 40)
        assert "has not read" in result.kept, result
        assert store.min_offset(*history.queue) <= first


# ---- consumer groups


def remember_group(history: History, store: MessageStore) -> None:
    store.flush()
    publish_offsets(str(history.root), "g", {history.queue: READ})


def place_of_group(history: History) -> int:
    table = ConsumerOffsets(Disk(), str(history.root))
    table.load()
    return table.get("t", "g")[0]


@BEHIND_THE_GROUP
def test_a_group_skips_nothing(tmp_path: Path, way: WayBack) -> None:
    """Its place would have been that of other messages as soon as the queue had grown to it again."""
    assert ANSWERS[Memory.GROUP, way] is Answer.LOWERED
    history = History(tmp_path / "s", "plain", remember_group)
    end = history.back(way)
    with history.open() as store:
        begin = store.min_offset("t", 0) if end else 0
        history.put(store, 1)
        assert place_of_group(history) == corrected(READ, begin, end) <= end
        history.put(store, MORE)
    assert place_of_group(history) == corrected(READ, begin, end)


@EVERY_WAY
@pytest.mark.parametrize("grown", [0, MORE])
def test_a_consumer_skips_nothing(tmp_path: Path, way: WayBack, grown: int) -> None:
    """An open one would have published a place of another log, and one that is opened would have begun behind it."""
    assert ANSWERS[Memory.CONSUMER, way] is Answer.CORRECTED
    history = History(tmp_path / "s", "plain", remember_group)
    open_one: list[Consumer] = []

    def read_with_a_consumer(history: History, store: MessageStore) -> None:
        remember_group(history, store)
        consumer = Consumer(history.root, "open", "t", config=CONFIG)
        assert [message.queue_offset for message in consumer.poll()[history.queue]] == list(range(READ))
        open_one.append(consumer)

    history.remember = read_with_a_consumer
    end = history.back(way)
    with history.open() as store:
        begin = store.min_offset("t", 0) if end else 0
        put = history.put(store, grown)
    wanted = corrected(READ, begin, end)
    for consumer in open_one:
        with contextlib.suppress(NotAStoreError):  # a folder that was put in place of the one that was opened
            with pytest.raises(StoreWentBackwardsError):
                consumer.commit()
            with pytest.raises(StoreWentBackwardsError):
                consumer.poll()
        consumer.close()
    with Consumer(history.root, "g", "t", config=CONFIG) as consumer:
        if ("t", 0) in consumer.assignment():
            assert consumer.position(("t", 0)) == wanted
        found = [message.body for messages in consumer.poll().values() for message in messages]
        assert found[len(found) - grown :] == put
        consumer.commit()
    assert not grown or place_of_group(history) == end + grown
    table = ConsumerOffsets(Disk(), str(history.root))
    table.load()
    assert table.get("t", "open") == {}


@BEHIND_THE_GROUP
def test_the_lag_of_a_group_is_neither_negative_nor_silently_zero(tmp_path: Path, way: WayBack) -> None:
    assert ANSWERS[Memory.GROUP_LAG, way] is Answer.COUNTED
    history = History(tmp_path / "s", "plain", remember_group)
    end = history.back(way)
    with history.open():
        pass
    root = str(history.root)
    (row,), faults = operator.groups(root, CONFIG)
    reader = LOCAL_STORES.reader(root, CONFIG)
    (of_lag,), remarks = reader.group_lag("g")
    assert not faults and f"the reader is at {READ}, but the queue ends at {end}" in remarks[0]
    assert (row["lag"], row["beyond"]) == (of_lag["lag"], of_lag["beyond"]) == (end, READ - end)
    (figures,) = reader.view("figures")[0][0]["groups"]
    assert (figures["lag"], figures["beyond"]) == (end, READ - end)
    with history.open() as store:
        history.put(store, MORE)
    (of_lag,), remarks = reader.group_lag("g")
    assert (of_lag["lag"], of_lag["beyond"], remarks) == (end + MORE, 0, [])
    reader.close()


@BEHIND_THE_GROUP
def test_the_progress_of_a_new_batch_counts(tmp_path: Path, way: WayBack) -> None:
    """The BATCH queue began again below what the table called settled, and pending progress was overlooked."""
    assert ANSWERS[Memory.SETTLED, way] is Answer.LOWERED

    def settle(history: History, store: MessageStore) -> None:
        store.flush()
        publish_offsets(str(history.root), PROGRESS_GROUP, {(BATCH_TOPIC, 0): READ}, own=True)

    history = History(tmp_path / "s", "plain", settle)
    history.back(way)
    with MessageStore.open_read_only(history.root, CONFIG) as view:
        end = view.max_offset(BATCH_TOPIC, 0) if BATCH_TOPIC in view.topics() else 0
    assert end < READ
    with history.open() as store:
        history.put(store, 1)
        store.append_batch(pa.table({"body": [b"."]}), topic="out", queue_id=0, progress={"g": {("t", 0): 1}})
    table = ConsumerOffsets(Disk(), str(history.root))
    table.load()
    assert (table.settled, table.get("t", "g")) == (end + 1, {0: 1})


# ---- half messages


def commit_all(history: History, store: MessageStore) -> None:
    for half in store.open_halves():
        store.find_half(half.message_id).commit()
    store.flush()
    publish_offsets(str(history.root), HALF_GROUP, {(HALF_TOPIC, 0): READ, (OP_TOPIC, 0): READ}, own=True)


@BEHIND_THE_GROUP
def test_each_half_message_can_be_ended(tmp_path: Path, way: WayBack) -> None:
    """Those that are new, and those whose op messages are gone."""
    assert ANSWERS[Memory.HALVES, way] is Answer.READ_AGAIN
    history = History(tmp_path / "s", "half", commit_all)
    history.back(way)
    with history.open() as store:
        there = {half.message_id for half in store.open_halves()}
        committed = Counter(read_all(store)) if "t" in store.topics() else Counter()
        history.put(store, MORE)
        halves = store.open_halves()
        assert there <= {half.message_id for half in halves}
        queue = (HALF_TOPIC, 0)
        waiting = [m.body for m in store.get_message(*queue, store.min_offset(*queue), 100).messages]
        assert len(halves) >= MORE
        for half in halves:
            store.find_half(half.message_id).commit()
        found = Counter(read_all(store))
    assert {body: found[body] for body in waiting} == dict.fromkeys(waiting, 1)
    assert all(found[body] == 1 for body in committed)


# ---- a topic that was deleted here


def test_what_a_group_had_read_of_a_deleted_topic_is_forgotten(tmp_path: Path) -> None:
    """Nothing of the new topic counts as read, and nothing of it is kept for the group before it reads."""
    for memory in (Memory.GROUP, Memory.COMMITTED, Memory.GROUP_LAG, Memory.RETENTION):
        assert ANSWERS[memory, WayBack.DELETED] is Answer.FORGOTTEN
    history = History(tmp_path / "s", "plain", remember_group)
    end = history.back(WayBack.DELETED)
    table = ConsumerOffsets(Disk(), str(history.root))
    table.load()
    assert table.get("t", "g") == {}
    assert operator.groups(str(history.root), CONFIG) == ([], [])
    with history.open() as store:
        history.put(store, MORE)
        history.fill(store, 3)
        store.flush()
        store.delete_expired_files(before_offset=1 << 40)
        assert store.min_offset("t", 0) == store.max_offset("t", 0) == end + MORE
    with Consumer(history.root, "g", "t", config=CONFIG) as consumer:
        assert consumer.position(("t", 0)) == end + MORE
