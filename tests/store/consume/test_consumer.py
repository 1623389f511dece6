"""A consumer hands out each message at least once, in order, and its group's progress never runs ahead."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from crash.imitate import Broker
from crash.interrupts import Interrupter
from messagestore import (
    ConfigError,
    ConsumedMessage,
    Consumer,
    CorruptionError,
    Message,
    MessageIllegalError,
    MessageStore,
    NotAStoreError,
    OffsetOutOfRangeError,
    StoreClosedError,
    StoreLockedError,
    StoreWentBackwardsError,
)
from messagestore.consume.queue_reader import QueueReader
from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.files.disk import Disk
from messagestore.format.gathered import Gathered
from messagestore.read import queue_records
from messagestore.read.view import StoreView
from small import SMALL, ClockDisk

T0, T1 = ("t", 0), ("t", 1)
BROKER = (
    "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX, 1); print(1, flush=True); "
    "sys.stdin.read()"
)
FIELDS = (
    *("topic", "queue_id", "queue_offset", "body", "tags", "keys", "properties", "system_properties"),
    *("born_timestamp_ms", "store_timestamp_ms", "message_id", "reconsume_times", "physical_offset"),
)


def put(root: Path, count: int, *, first: int = 0, queue_id: int = 0, topic: str = "t", **fields: Any) -> None:
    with MessageStore.open(root, SMALL) as store:
        for number in range(first, first + count):
            store.put_message(Message(topic, b"%d" % number, queue_id=queue_id, **fields))


def consumer(root: Path, **given: Any) -> Consumer:
    return Consumer(
        root, given.pop("group", "g"), given.pop("topics", () if "pattern" in given else "t"), config=SMALL, **given
    )


def polled(reader: Consumer) -> list[ConsumedMessage]:
    return [message for messages in reader.poll().values() for message in messages]


def bodies(found: dict[tuple[str, int], list[ConsumedMessage]]) -> dict[tuple[str, int], list[int]]:
    return {queue: [int(message.body) for message in messages] for queue, messages in found.items()}


def progress(root: Path, topic: str = "t") -> dict[int, int]:
    table = ConsumerOffsets(Disk(), str(root))
    table.load()
    return table.get(topic, "g")


# ---- handing out


def test_messages_come_in_order_and_queues_take_turns(tmp_path: Path) -> None:
    put(tmp_path, 5)
    put(tmp_path, 5, queue_id=1)
    with consumer(tmp_path) as reader:
        assert reader.assignment() == {T0, T1}
        assert bodies(reader.poll(max_records=3)) == {T0: [0, 1, 2]}
        assert bodies(reader.poll(max_records=3)) == {T1: [0, 1, 2]}
        assert bodies(reader.poll()) == {T0: [3, 4], T1: [3, 4]}
        assert reader.poll(0.01) == {}
        put(tmp_path, 1, first=5)
        assert bodies(reader.poll(10)) == {T0: [5]}


def test_an_iteration_hands_out_one_by_one_and_ends_when_nothing_comes(tmp_path: Path) -> None:
    put(tmp_path, 20)
    put(tmp_path, 20, queue_id=1)
    with consumer(tmp_path, consumer_timeout=0.01) as reader:
        for message in reader:
            assert reader.position(message.queue) == message.queue_offset + 1
            if message.queue_offset == 7 and message.queue == T0:
                break
        reader.commit()
        assert progress(tmp_path)[0] == 8
        left = [int(message.body) for message in reader if message.queue == T0]
        assert left == list(range(8, 20))


def test_a_topic_and_a_queue_that_come_later_are_read_from_their_first_message(tmp_path: Path) -> None:
    put(tmp_path, 1, topic="other")
    with (
        consumer(tmp_path, start="latest") as reader,
        consumer(tmp_path, pattern="t|u.*", group="wide", start="latest") as wide,
    ):
        assert reader.poll() == wide.poll() == {}
        put(tmp_path, 2)
        assert bodies(reader.poll(10)) == bodies(wide.poll(10)) == {T0: [0, 1]}
        put(tmp_path, 2, queue_id=1)
        put(tmp_path, 1, topic="under")
        assert bodies(reader.poll(10)) == {T1: [0, 1]}
        assert bodies(wide.poll(10)) == {T1: [0, 1], ("under", 0): [0]}


@pytest.mark.parametrize("then", ["poll", "commit", "a commit by itself"])
def test_a_deleted_topic_of_a_pattern_keeps_no_other_one_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, then: str
) -> None:
    """Nobody can close and open each consumer when a topic ends. What is made again under the name is read anew."""
    put(tmp_path, 3)
    put(tmp_path, 2, topic="under")
    revoked: list[tuple[str, int]] = []
    by_itself = {"auto_commit": True, "auto_commit_interval": 0} if then == "a commit by itself" else {}
    with consumer(
        tmp_path, pattern="t|u.*", on_revoked=lambda _, queues: revoked.extend(queues), **by_itself
    ) as reader:
        assert bodies(reader.poll(10)) == {T0: [0, 1, 2], ("under", 0): [0, 1]}
        with MessageStore.open(tmp_path, SMALL) as store:
            store.delete_topic("under")
        if then == "commit":
            reader.commit()
        else:
            assert reader.poll(0) == {}
        assert progress(tmp_path) == ({} if then == "poll" else {0: 3})
        assert revoked == [("under", 0)]
        assert reader.assignment() == {T0}
        assert "reads under no more: deleted since it was found by the pattern" in caplog.text

        put(tmp_path, 1, first=3)
        put(tmp_path, 4, topic="under")
        found: dict[tuple[str, int], list[int]] = {}
        while len(found) < 2:
            found |= bodies(reader.poll(10))
        assert found == {T0: [3], ("under", 0): [0, 1, 2, 3]}
        reader.commit()
    assert (progress(tmp_path), progress(tmp_path, "under")) == ({0: 4}, {0: 4})


def test_fields_are_those_of_the_message(tmp_path: Path) -> None:
    put(tmp_path, 3, tags="a", keys=["k1", "k2"], properties={"gate": "C3"})
    with consumer(tmp_path) as reader, MessageStore.open_read_only(tmp_path, SMALL) as store:
        (found,) = reader.poll().values()
        wanted = store.get_message("t", 0, 0).messages
        assert [message.message_ext for message in found] == wanted
        for message, same in zip(found, wanted, strict=True):
            for name in FIELDS:
                assert getattr(message, name) == getattr(same, name), name
            assert message.origin_topic == "t"


@pytest.mark.parametrize("tags", ["a || Aa", ["a", "Aa"]])
def test_other_tags_are_not_handed_out_and_count_as_read(tmp_path: Path, tags: str | list[str]) -> None:
    """`BB` has the hash of `Aa`."""
    with MessageStore.open(tmp_path, SMALL) as store:
        for number, tag in enumerate(["a", "b", "BB", "Aa", None, "b", "BB", "b"]):
            store.put_message(Message("t", b"%d" % number, queue_id=0, tags=tag))
    with consumer(tmp_path, tags=tags) as reader:
        assert bodies(reader.poll(max_records=1)) == {T0: [0]}
        assert reader.position(T0) == 1
        assert bodies(reader.poll()) == {T0: [3]}
        assert reader.poll() == {}
        reader.commit()
    assert progress(tmp_path) == {0: 8}


def test_a_compressed_body_is_handed_out_plain(tmp_path: Path) -> None:
    import zlib

    with MessageStore.open(tmp_path, SMALL) as store:
        store.put_message(Message("t", b"plain", queue_id=0))
        store.put_message(Message("t", zlib.compress(b"packed"), queue_id=0, sys_flag=0x1))
    with consumer(tmp_path) as reader:
        assert [message.body for message in reader.poll()[T0]] == [b"plain", b"packed"]


# ---- where it begins


def test_the_group_continues_where_it_committed(tmp_path: Path) -> None:
    put(tmp_path, 10)
    with consumer(tmp_path) as reader:
        assert reader.committed(T0) is None
        reader.poll(max_records=4)
        reader.commit()
        assert reader.committed(T0) == 4 == progress(tmp_path)[0]
        reader.poll(max_records=3)
    starts: tuple[str | int, ...] = ("earliest", "latest", "committed", 0)
    for start in starts:
        with consumer(tmp_path, start=start) as reader:
            assert reader.position(T0) == 4


def test_a_group_begins_where_start_says(tmp_path: Path) -> None:
    put(tmp_path, 3)
    with MessageStore.open_read_only(tmp_path, SMALL) as store:
        stored_ms = store.get_message("t", 0, 1).messages[0].store_timestamp_ms
        wanted = store.queue_offset_by_time("t", 0, stored_ms)
    with Consumer(tmp_path, "latest", "t", start="latest", config=SMALL) as reader:
        assert reader.position(T0) == 3
    for number, at in enumerate((stored_ms, datetime.fromtimestamp(stored_ms / 1000, UTC))):
        with Consumer(tmp_path, f"time{number}", "t", start=at, config=SMALL) as reader:
            assert reader.position(T0) == wanted
    with pytest.raises(ConfigError, match="group 'g' has no progress in 't'; allowed"):
        consumer(tmp_path, start="committed")


@pytest.mark.parametrize("before", ["a message", "a topic without messages", "nothing"])
@pytest.mark.parametrize("start", ["latest", "committed", "now"])
def test_a_queue_that_is_made_while_the_group_is_away_is_read_from_its_first_message(
    tmp_path: Path, before: str, start: str
) -> None:
    """A queue is made when its first message is put, and the group began behind it: the message was skipped."""
    with MessageStore.open(tmp_path, SMALL) as store:
        if before == "a message":
            store.put_message(Message("t", b"old", queue_id=0))
        elif before == "a topic without messages":
            store.create_topic("t", 4)

    def now() -> datetime:
        return datetime.now(UTC) + timedelta(seconds=1)  # behind all that is there

    with consumer(tmp_path, start=now() if start == "now" else "latest") as reader:
        assert polled(reader) == []
    with MessageStore.open(tmp_path, SMALL) as store:
        for queue_id in range(4):
            store.put_message(Message("t", b"%d" % queue_id, queue_id=queue_id))
    with consumer(tmp_path, start=now() if start == "now" else start) as reader:
        assert sorted(message.body for message in polled(reader)) == [b"%d" % queue_id for queue_id in range(4)]


@pytest.mark.parametrize("before", ["a topic", "none"])
def test_a_topic_of_a_pattern_that_is_made_while_the_group_is_away_is_read_from_its_first_message(
    tmp_path: Path, before: str
) -> None:
    put(tmp_path, 2, topic="t" if before == "a topic" else "other")
    with consumer(tmp_path, pattern="t.*", start="latest") as reader:
        assert reader.poll() == {}
    put(tmp_path, 2, topic="tt")
    with consumer(tmp_path, pattern="t.*", start="latest") as reader:
        assert bodies(reader.poll(10)) == {("tt", 0): [0, 1]}


def test_a_topic_that_is_made_again_is_read_from_its_first_message_by_who_began_at_its_end(tmp_path: Path) -> None:
    """The consumer remembered where it had begun in the topic that was deleted, and passed over as many new messages."""
    put(tmp_path, 3)
    with consumer(tmp_path, pattern="t", start="latest") as reader:
        assert reader.poll() == {}
        with MessageStore.open(tmp_path, SMALL) as store:
            store.delete_topic("t")
        assert reader.poll() == {}
        put(tmp_path, 5)
        assert bodies(reader.poll(10)) == {T0: [0, 1, 2, 3, 4]}


def test_two_workers_of_a_pattern_begin_at_one_place(tmp_path: Path) -> None:
    """Each gets one of the topics, and neither reads what was there before."""
    for topic in ("t0", "t1"):
        put(tmp_path, 2, topic=topic)
    with (
        consumer(tmp_path, pattern="t.*", start="latest") as first,
        consumer(tmp_path, pattern="t.*", start="latest") as second,
    ):
        until_s = time.monotonic() + 60
        while not second.assignment() and time.monotonic() < until_s:
            assert first.poll() == second.poll() == {}
        assert second.poll() == {}


def test_workers_that_come_while_queues_are_made_skip_none_with_latest(tmp_path: Path) -> None:
    """A worker found a new queue that no other one had yet, and began behind its messages."""
    with MessageStore.open(tmp_path, SMALL) as store, contextlib.ExitStack() as workers:
        for queue_id in range(4):
            store.put_message(Message("t", b"old", queue_id=queue_id))
        readers = [workers.enter_context(consumer(tmp_path, start="latest"))]
        for queue_id in range(4, 8):
            store.put_message(Message("t", b"%d" % queue_id, queue_id=queue_id))
            readers.append(workers.enter_context(consumer(tmp_path, start="latest")))
        found: list[bytes] = []
        until_s = time.monotonic() + 60
        while len(found) < 4 and time.monotonic() < until_s:
            for reader in readers:
                found += [message.body for message in polled(reader)]
                reader.commit()
    assert sorted(found) == [b"%d" % queue_id for queue_id in range(4, 8)]


def test_two_workers_begin_at_one_place(tmp_path: Path) -> None:
    """The first one begins in all queues, also in those that the second one gets: not at their first messages."""
    with MessageStore.open(tmp_path, SMALL) as store:
        for queue_id in range(4):
            store.put_message(Message("t", b"old", queue_id=queue_id))
        with consumer(tmp_path, start="latest") as first:
            for queue_id in range(4):
                store.put_message(Message("t", b"new", queue_id=queue_id))
            with consumer(tmp_path, start="latest") as second:
                first.pause()
                found: list[ConsumedMessage] = []
                until_s = time.monotonic() + 60
                while len(second.assignment()) < 2 and time.monotonic() < until_s:
                    found += [*polled(first), *polled(second)]
                first.resume()
                while len(found) < 4 and time.monotonic() < until_s:
                    found += [*polled(first), *polled(second)]
                assert [message.body for message in found] == [b"new"] * 4


def test_a_time_is_the_beginning_in_queues_that_are_made_later_too(tmp_path: Path) -> None:
    clock = ClockDisk(1_700_000_000_000)
    with MessageStore.open(tmp_path, SMALL, disk=clock) as store:
        store.put_message(Message("t", b"early", queue_id=0))
        with consumer(tmp_path, start=clock.now_ms + 1000) as reader:
            store.put_message(Message("t", b"early", queue_id=1))
            assert polled(reader) == []
            clock.now_ms += 1000
            for queue_id in (0, 1, 2):
                store.put_message(Message("t", b"late", queue_id=queue_id))
            assert [message.body for message in polled(reader)] == [b"late"] * 3


def test_a_worker_that_died_before_its_first_commit_skips_nothing_with_latest(tmp_path: Path) -> None:
    """Its successor would have begun at the end of that later moment."""
    put(tmp_path, 3)
    first = consumer(tmp_path, start="latest")
    put(tmp_path, 2, first=3)
    assert bodies(first.poll()) == {T0: [3, 4]}
    first.close()  # without a commit, as if it had died
    with consumer(tmp_path, start="latest") as reader:
        assert bodies(reader.poll()) == {T0: [3, 4]}


# ---- progress


def test_a_commit_covers_what_was_handed_out_and_not_what_was_read_ahead(tmp_path: Path) -> None:
    put(tmp_path, 10)
    with consumer(tmp_path) as reader:
        reader.commit()
        assert progress(tmp_path) == {0: 0}
        messages = reader.poll(max_records=5)[T0]
        reader.commit(messages[1])
        assert progress(tmp_path) == {0: 2}
        reader.commit(messages[:4])
        reader.commit(messages[:2])  # another thread was slower; the group does not go back
        assert progress(tmp_path) == {0: 4}
        reader.commit()
        assert progress(tmp_path) == {0: 5}


def test_after_a_seek_back_the_group_goes_back_with_the_next_commit(tmp_path: Path) -> None:
    put(tmp_path, 10)
    with consumer(tmp_path) as reader:
        late = reader.poll()[T0][-1]
        reader.commit()
        reader.seek(T0, 3)
        assert progress(tmp_path) == {0: 10}
        with pytest.raises(ConfigError, match=r"found message 9 of t/0; allowed are messages .* below its position 3"):
            reader.commit(late)
        reader.commit()
        assert progress(tmp_path) == {0: 3}
        assert bodies(reader.poll(max_records=2)) == {T0: [3, 4]}
        reader.seek_to_end(T0)
        assert reader.poll() == {}
        reader.seek_to_beginning()
        assert reader.position(T0) == 0


def test_a_commit_whose_sync_failed_is_written_again(tmp_path: Path) -> None:
    """The file had the offsets already, so the second commit returned without a sync."""

    class Failing(Disk):
        fails = False
        synced = 0

        def fsync_dir(self, path: Any) -> None:
            if self.fails and str(path).endswith("config"):
                raise OSError(5, "Input/output error")
            self.synced += 1
            super().fsync_dir(path)

    put(tmp_path, 3)
    disk = Failing()
    with consumer(tmp_path, disk=disk) as reader:
        reader.poll()
        disk.fails = True
        with pytest.raises(OSError, match="Input/output"):
            reader.commit()
        disk.fails, disk.synced = False, 0
        reader.commit()
        assert disk.synced
        assert progress(tmp_path) == {0: 3}


def test_auto_commit_leaves_out_what_the_caller_has_only_just_got(tmp_path: Path) -> None:
    put(tmp_path, 10)
    with consumer(tmp_path, auto_commit=True, auto_commit_interval=0) as reader:
        reader.poll(max_records=4)
        assert progress(tmp_path) in ({}, {0: 0})
        reader.poll(max_records=4)
        assert progress(tmp_path) == {0: 4}
    assert progress(tmp_path) == {0: 8}
    with contextlib.suppress(ZeroDivisionError), consumer(tmp_path, auto_commit=True) as reader:
        reader.poll()
        raise ZeroDivisionError  # what was handed out last was not processed
    assert progress(tmp_path) == {0: 8}


def test_beside_a_broker_it_reads_and_does_not_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, 3)
    command = [sys.executable, "-c", BROKER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as broker:
        assert broker.stdin and broker.stdout and broker.stdout.readline()
        with consumer(tmp_path, auto_commit=True, auto_commit_interval=0) as reader:
            assert bodies(reader.poll()) == {T0: [0, 1, 2]}
            with pytest.raises(StoreLockedError, match="keeps the consumer offsets in memory and overwrites"):
                reader.commit()
            assert reader.poll() == reader.poll() == {}
        broker.stdin.close()
    assert progress(tmp_path) == {}
    assert caplog.text.count("the progress of consumer group g is not written") == 1


# ---- what goes wrong below it


def expired(root: Path) -> int:
    """Delete all but the last segment; the first message that is left."""
    with MessageStore.open(root, SMALL) as store:
        store.delete_expired_files(before_offset=1 << 40, at_once=True)
        return store.min_offset("t", 0)


def test_messages_that_retention_has_deleted_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 300, properties={"fill": "." * 200})
    with consumer(tmp_path) as reader:
        reader.poll(max_records=1)
        reader.seek(T0, 1)
        low = expired(tmp_path)
        assert low > 1
        assert reader.poll(1, max_records=1)[T0][0].queue_offset == low
        assert "retention has deleted their segments" in caplog.text


def test_a_consumer_that_is_opened_says_what_retention_has_deleted_of_its_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 300, properties={"fill": "." * 200})
    with consumer(tmp_path) as reader:
        reader.poll(max_records=5)
        reader.commit()
    low = expired(tmp_path)
    with consumer(tmp_path) as reader:
        assert reader.poll(1, max_records=1)[T0][0].queue_offset == low > 5
    assert f"continues at {low} in t/0: {low - 5} messages from 5 on are gone" in caplog.text


def test_a_damaged_message_is_an_error_until_it_is_passed(tmp_path: Path) -> None:
    put(tmp_path, 3)
    with consumer(tmp_path) as reader:
        (found,) = reader.poll().values()
        place = found[1].physical_offset
        with open(tmp_path / "commitlog" / f"{0:020}", "r+b") as file:
            file.seek(place + 88)
            file.write(b"!")
        reader.seek(T0, 0)
        with pytest.raises(CorruptionError):
            reader.poll()
        assert reader.position(T0) == 0
        reader.seek(T0, 2)
        assert bodies(reader.poll()) == {T0: [2]}


@pytest.mark.parametrize("how", ["a damaged message", "Ctrl-C", "Ctrl-C, orderly"])
def test_a_poll_that_fails_hands_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """It has taken the messages of one queue when another one fails. They come again, and are not committed before."""
    root = tmp_path / "s"
    put(root, 3)
    put(root, 2, queue_id=1)
    fetch, failing = QueueReader.fetch, True

    def fails(reader: QueueReader, cursor: Any, end_seen: int) -> bool:
        if failing and cursor.queue == T1:
            raise CorruptionError("x", 0, "a message", "another") if how == "a damaged message" else KeyboardInterrupt
        return fetch(reader, cursor, end_seen)

    monkeypatch.setattr(QueueReader, "fetch", fails)
    with consumer(root, orderly="orderly" in how) as reader:
        for _ in range(4):  # whichever queue comes first
            with pytest.raises((CorruptionError, KeyboardInterrupt)):
                reader.poll()
            assert (reader.position(T0), reader.position(T1)) == (0, 0)
        reader.commit()
        assert progress(root).get(0, 0) == 0
        failing = False
        seen: dict[tuple[str, int], list[int]] = {}
        while found := bodies(reader.poll()):
            for queue, numbers in found.items():
                seen.setdefault(queue, []).extend(numbers)
            reader.commit()
        assert seen == {T0: [0, 1, 2], T1: [0, 1]}


def test_an_orderly_queue_goes_on_after_a_commit_that_a_signal_handler_has_ended(tmp_path: Path) -> None:
    """Wherever it raises, the next commit lets the message go that holds the queue."""
    put(tmp_path, 2)
    lines = Interrupter()
    with consumer(tmp_path, group="lines", orderly=True) as reader, lines.armed():
        reader.poll()
        reader.commit()
    for line in sorted(line for line in lines.hits if line[0] == "cursor"):
        with consumer(tmp_path, group=f"g{line[1]}", orderly=True) as reader:
            with contextlib.suppress(KeyError), Interrupter(line, error=KeyError).armed():
                reader.poll()
                reader.commit()
            seen = []
            for _ in range(3):
                seen += bodies(reader.poll()).get(T0, [])
                reader.commit()
            assert seen in ([0, 1], [1]), line


@pytest.mark.parametrize("how", ["poll", "orderly", "iteration"])
def test_a_message_comes_again_that_nobody_got_because_a_signal_handler_raised(tmp_path: Path, how: str) -> None:
    """Wherever it raises within a call, also after the message was taken, the next call hands the message out."""
    put(tmp_path, 4)

    def take(reader: Consumer) -> int:
        return int(next(reader).body) if how == "iteration" else bodies(reader.poll(max_records=1))[T0][0]

    def took(interrupter: Interrupter, group: str) -> list[int]:
        with consumer(tmp_path, group=group, orderly=how == "orderly", consumer_timeout=0) as reader:
            seen = [take(reader)]
            reader.commit()
            with contextlib.suppress(interrupter.error), interrupter.armed():
                seen.append(take(reader))
                reader.commit()
                seen.append(take(reader))
            while len(seen) < 4:
                reader.commit()
                seen.append(take(reader))
            return seen

    lines = Interrupter()
    assert took(lines, "lines") == [0, 1, 2, 3]
    for line in sorted(lines.hits):
        if line[0] in {"commits", "consumer", "cursor"}:
            assert took(Interrupter(line, error=KeyError), f"{line[0]}-{line[1]}") == [0, 1, 2, 3], line


def test_a_queue_that_was_made_again_while_it_was_read_is_refused(tmp_path: Path) -> None:
    put(tmp_path, 5)
    with consumer(tmp_path) as reader:
        reader.poll()
        broker = Broker(tmp_path, SMALL)
        broker.delete_topic("t")
        for number in range(8):
            broker.put("t", b"%d" % number)
        broker.close()
        with pytest.raises(StoreWentBackwardsError, match="t/0: consumer group g was at 5"):
            reader.commit()
        with pytest.raises(StoreWentBackwardsError, match="t/0: consumer group g was at 5"):
            reader.poll()
    assert progress(tmp_path) == {}


@pytest.mark.parametrize("handed_out", [True, False])
def test_messages_that_took_the_places_of_lost_ones_are_not_committed(tmp_path: Path, handed_out: bool) -> None:
    """The end of the log was lost, and what is put instead is as long as what was there."""
    put(tmp_path, 10)
    with MessageStore.open_read_only(tmp_path) as store:
        cut = store.get_message("t", 0, 5).messages[0].physical_offset
    with consumer(tmp_path) as before:
        before.poll()
        before.commit()
    with consumer(tmp_path) as reader:
        if handed_out:
            reader.seek(T0, 0)
            reader.poll()
        log = tmp_path / "commitlog" / f"{0:020d}"
        length = log.stat().st_size
        os.truncate(log, cut)
        os.truncate(log, length)
        MessageStore.open(tmp_path, SMALL, accept_loss=True).close()
        put(tmp_path, 6, first=5)
        with pytest.raises(StoreWentBackwardsError, match="t/0: consumer group g was at 10"):
            reader.commit() if handed_out else reader.poll()


@pytest.mark.parametrize("sought", [True, False], ids=["sought", "committed"])
@pytest.mark.parametrize("count", [4, 8], ids=["shorter", "longer"])
def test_a_queue_that_was_made_again_before_a_message_was_handed_out_is_refused(
    tmp_path: Path, sought: bool, count: int
) -> None:
    """No message that was handed out showed it, and the group skipped the first ones of the new queue."""
    put(tmp_path, 5)
    if not sought:
        with consumer(tmp_path) as reader:
            reader.poll(max_records=3)
            reader.commit()
    with consumer(tmp_path) as reader:
        if sought:
            reader.seek(T0, 3)
        with MessageStore.open(tmp_path, SMALL) as store:
            store.delete_topic("t")
        put(tmp_path, count)
        if sought:
            with pytest.raises(StoreWentBackwardsError, match="t/0: consumer group g was at 3"):
                reader.commit()
        with pytest.raises(StoreWentBackwardsError, match="t/0: consumer group g was at 3"):
            reader.poll()
    assert progress(tmp_path) == {}


def test_a_message_of_a_deleted_topic_commits_none_of_the_topic_that_was_made_again(tmp_path: Path) -> None:
    """Who works on old messages while new ones are handed out moved the group past new ones that nobody was done with."""
    put(tmp_path, 3)
    with consumer(tmp_path, pattern="t") as reader:
        old = reader.poll()[T0]
        with MessageStore.open(tmp_path, SMALL) as store:
            store.delete_topic("t")
        assert reader.poll() == {}
        put(tmp_path, 5)
        new = reader.poll(10)[T0]
        for commit in (reader.commit, reader.positions):
            with pytest.raises(StoreWentBackwardsError, match="t/0: message 2 is another one"):
                commit(old)
        assert progress(tmp_path) == {}
        reader.commit(new[0])
        assert progress(tmp_path) == {0: 1}


def test_a_topic_that_is_made_again_with_as_many_other_queues_is_read_on(tmp_path: Path) -> None:
    """Queues that are gone, and of which nothing was handed out, are no share of the worker any more."""
    revoked: list[tuple[str, int]] = []
    with MessageStore.open(tmp_path, SMALL) as store:
        store.put_message(Message("t", b"0", queue_id=0))
        with consumer(tmp_path, on_revoked=lambda _, queues: revoked.extend(queues)) as reader:
            assert reader.assignment() == {T0}
            store.delete_topic("t")
            store.put_message(Message("t", b"1", queue_id=1))
            assert bodies(reader.poll(timeout=1)) == {T1: [1]}
            assert (reader.assignment(), revoked) == ({T1}, [T0])


def test_a_topic_that_is_deleted_and_made_again_between_two_looks_ends_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has the error, and does not end as if there were nothing more to wait for."""
    put(tmp_path, 5)
    blocks = queue_records.blocks

    def deleted(view: StoreView, *args: Any) -> Iterator[Gathered]:
        monkeypatch.setattr(queue_records, "blocks", blocks)
        broker = Broker(tmp_path, SMALL)
        broker.delete_topic("t")
        broker.close()
        return queue_records.blocks(view, args[0], args[1], 0, 0, *args[4:])

    with consumer(tmp_path) as reader:
        monkeypatch.setattr(queue_records, "blocks", deleted)
        assert reader.poll(0) == {}
        put(tmp_path, 2)
        assert bodies(reader.poll()) == {T0: [0, 1]}


# ---- the object


def test_close_ends_a_poll_of_another_thread(tmp_path: Path) -> None:
    put(tmp_path, 1, topic="other")
    reader = consumer(tmp_path)
    failed: list[StoreClosedError] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            reader.poll(None)
        except StoreClosedError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    reader.close()
    reader.close()
    thread.join(30)
    assert len(failed) == 1


def test_a_forked_child_needs_a_consumer_of_its_own(tmp_path: Path) -> None:
    put(tmp_path, 1)
    with consumer(tmp_path) as reader:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                reader.poll()
            except StoreClosedError:
                reader.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert bodies(reader.poll()) == {T0: [0]}


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"root": ""}, ConfigError, "root: found ''; allowed is the path of a folder"),
    ({"root": 7}, ConfigError, "root: found 7"),
    ({"root": "/proc/nothing"}, NotAStoreError, "nothing"),
    ({"group": ""}, MessageIllegalError, "group: found empty text"),
    ({"group": "a b"}, MessageIllegalError, "allowed are the characters"),
    ({"group": None}, MessageIllegalError, "group: found NoneType"),
    ({"group": "CID_RMQ_SYS_TRANS"}, MessageIllegalError, "belong to the broker"),
    ({"group": "g" * 249}, MessageIllegalError, "found 249 bytes; allowed are at most 248 for a group that consumes"),
    ({"topics": ()}, ConfigError, "give one or several names of topics, or a pattern"),
    ({"topics": ""}, ConfigError, "give one or several names of topics, or a pattern"),
    ({"topics": None}, ConfigError, "give one or several names of topics, or a pattern"),
    ({"topics": 3}, ConfigError, "give one or several names of topics, or a pattern"),
    ({"topics": ["t", "t"]}, ConfigError, "give each topic once"),
    ({"topics": ["a/b"]}, MessageIllegalError, "the name of a folder"),
    ({"topics": [3]}, MessageIllegalError, "topic: found int"),
    ({"pattern": "t"}, ConfigError, "pattern: found topics, too; give one of them"),
    ({"topics": (), "pattern": "("}, ConfigError, r"pattern: found '\(', which is no regular expression"),
    ({"topics": (), "pattern": 3}, ConfigError, "pattern: found 3"),
    ({"start": "first"}, ConfigError, "start: found 'first'; allowed is 'earliest', 'latest'"),
    ({"start": -1}, ConfigError, "start: found -1"),
    ({"start": 1.5}, ConfigError, "start: found 1.5"),
    ({"start": datetime(2026, 1, 1)}, ConfigError, "a datetime with a time zone"),  # noqa: DTZ001
    ({"tags": []}, ConfigError, "tags: found"),
    ({"tags": [3]}, ConfigError, "tags: found 3"),
    ({"tags": 3}, ConfigError, "tags: found 3"),
    ({"auto_commit": "yes"}, ConfigError, "auto_commit: found 'yes'; allowed is True or False"),
    ({"auto_commit_interval": -1}, ConfigError, "auto_commit_interval: found -1"),
    ({"consumer_timeout": "1s"}, ConfigError, "consumer_timeout: found '1s'"),
    ({"config": {}}, ConfigError, "config: found dict; allowed is StoreConfig"),
]


@pytest.mark.parametrize(("given", "kind", "sentence"), WRONG)
def test_a_wrong_argument_has_its_sentence(
    tmp_path: Path, given: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    put(tmp_path, 1)
    with pytest.raises(kind, match=sentence):
        Consumer(**{"root": tmp_path, "group": "g", "topics": "t", "config": SMALL} | given)


WRONG_CALLS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("poll", (-1,), ConfigError, "timeout: found -1"),
    ("poll", ("1",), ConfigError, "timeout: found '1'"),
    ("poll", (0, 0), ConfigError, "max_records: found 0"),
    ("poll", (0, True), ConfigError, "max_records: found True"),
    ("seek", (T0, 4), OffsetOutOfRangeError, "t/0: found offset 4; allowed is 0, the first message, to 3"),
    ("seek", (T0, -1), OffsetOutOfRangeError, "t/0: found offset -1"),
    ("seek", (T0, "0"), ConfigError, "offset: found '0'"),
    ("seek", (("u", 0), 0), ConfigError, "queue: found u/0; allowed are the queues that this consumer reads: t/0"),
    ("seek", ("t", 0), ConfigError, r"queue: found 't'; allowed is a topic and a queue id, such as \('flights', 0\)"),
    ("position", ("t",), ConfigError, "queue: found 't'"),
    ("position", (("t", "0"),), MessageIllegalError, "queue id"),
    ("pause", (("t", 9),), ConfigError, "queue: found t/9"),
    ("resume", (0,), ConfigError, "queue: found 0"),
    ("committed", (("t", -1),), MessageIllegalError, "queue id"),
    (
        "commit",
        ({T0: 3},),
        ConfigError,
        r"messages: found \{\('t', 0\): 3\}; allowed .* call `seek`, and then `commit`",
    ),
    ("commit", (3,), ConfigError, "messages: found 3; allowed is a message that `poll` returned"),
    ("commit", ([b"body"],), ConfigError, "messages: found b'body'; allowed is a message that `poll` returned"),
    ("commit", ("t",), ConfigError, "messages: found 't'; allowed is a message that `poll` returned"),
    ("positions", (3,), ConfigError, "messages: found 3; allowed is a message that `poll` returned"),
    ("positions", ([],), ConfigError, "found no message that was handed out since the last commit.*Poll first"),
    ("__reduce__", (), TypeError, "cannot be pickled"),
]


@pytest.mark.parametrize(("name", "given", "kind", "sentence"), WRONG_CALLS)
def test_a_wrong_call_has_its_sentence(
    tmp_path: Path, name: str, given: tuple[Any, ...], kind: type[Exception], sentence: str
) -> None:
    put(tmp_path, 3)
    with consumer(tmp_path) as reader:
        with pytest.raises(kind, match=sentence):
            getattr(reader, name)(*given)
        assert bodies(reader.poll()) == {T0: [0, 1, 2]}
    if name != "__reduce__":
        with pytest.raises(StoreClosedError, match=r"the consumer is closed\. Open another one"):
            getattr(reader, name)(*(given if name != "poll" else ()))


def test_pause_holds_a_queue(tmp_path: Path) -> None:
    put(tmp_path, 3)
    put(tmp_path, 3, queue_id=1)
    with consumer(tmp_path) as reader:
        reader.poll(max_records=1)
        reader.pause(T0)
        assert reader.paused() == {T0}
        assert bodies(reader.poll()) == {T1: [0, 1, 2]}
        reader.resume()
        assert bodies(reader.poll()) == {T0: [1, 2]}


def test_two_threads_at_once_are_refused(tmp_path: Path) -> None:
    put(tmp_path, 1, topic="other")
    with consumer(tmp_path) as reader:
        with reader._used():
            failed: list[StoreClosedError] = []

            def use() -> None:
                try:
                    reader.assignment()
                except StoreClosedError as error:
                    failed.append(error)

            thread = threading.Thread(target=use)
            thread.start()
            thread.join(30)
        assert "another thread uses this consumer" in str(failed[0])
