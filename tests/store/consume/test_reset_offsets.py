"""`reset_offsets`: a consumer group is moved to another place, all of its queues in one step, and only without consumers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from crash.memdisk import MemDisk, MemRecordingDisk
from messagestore import (
    ConfigError,
    Consumer,
    Message,
    MessageStore,
    OffsetReset,
    StoreLockedError,
    UnknownTopicError,
    reset_offsets,
)
from messagestore.consume.progress import GroupProgress
from messagestore.files.disk import Disk
from messagestore.read.view import StoreView
from small import SMALL


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with five messages in each of two queues."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        for number in range(10):
            store.put_message(Message("t", b"%d" % number, queue_id=number % 2))
    return tmp_path / "s"


def committed(root: Path, group: str = "g") -> dict[tuple[str, int], int]:
    with progress(root, group) as group_progress:
        return group_progress.committed(["t"])


@contextlib.contextmanager
def progress(root: Path, group: str, disk: Disk | None = None) -> Iterator[GroupProgress]:
    with contextlib.closing(StoreView(str(root), SMALL, disk or Disk())) as view:
        yield GroupProgress(view, group)


def test_a_dry_run_says_where_the_group_would_go_and_changes_nothing(root: Path) -> None:
    assert reset_offsets(root, "g", "latest", ["t"]) == [OffsetReset("t", 0, None, 5), OffsetReset("t", 1, None, 5)]
    assert committed(root) == {}
    assert not (root / "spark" / "consumers.lock").exists()


def test_a_topic_that_was_created_and_has_no_message_has_its_queues(root: Path) -> None:
    """It was said not to be in the store, though `topics` lists it."""
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("created", 2)
    for to in ("latest", "earliest", 3):
        resets = reset_offsets(root, "g", to, ["created"], execute=True)
        assert [(reset.queue_id, reset.offset) for reset in resets] == [(0, 0), (1, 0)]
    with pytest.raises(UnknownTopicError, match=r"Its topics are: created, t"):
        reset_offsets(root, "g", "latest", ["other"])


def test_each_place_is_reached_and_limited_to_what_the_queue_has(root: Path) -> None:
    with MessageStore.open_read_only(root) as store:
        third = store.get_message("t", 0, 2).messages[0].store_timestamp_ms
        by_time = [store.queue_offset_by_time("t", queue_id, third) for queue_id in (0, 1)]
    at = datetime.fromtimestamp(third / 1000, UTC)
    for to, wanted in (("latest", [5, 5]), ("earliest", [0, 0]), (3, [3, 3]), (99, [5, 5]), (at, by_time)):
        reset_offsets(root, "g", to, ["t"], execute=True)
        assert committed(root) == {("t", 0): wanted[0], ("t", 1): wanted[1]}


def test_without_topics_it_is_those_of_the_group_and_a_consumer_goes_on_there(root: Path) -> None:
    with pytest.raises(ConfigError, match="found no offsets in this store"):
        reset_offsets(root, "g", "earliest", execute=True)
    reset_offsets(root, "g", "latest", ["t"], execute=True)
    assert [reset.committed for reset in reset_offsets(root, "g", 4, execute=True)] == [5, 5]
    with Consumer(root, "g", "t", consumer_timeout=1.0) as consumer:
        assert sorted(message.body for message in consumer) == [b"8", b"9"]


def test_a_topic_that_the_group_waits_for_does_not_hinder_the_others(root: Path) -> None:
    """A consumer that begins at the end writes down a place in a topic that nobody has made yet. Every reset was refused then."""
    with Consumer(root, "g", ["t", "later"], start="latest") as consumer:
        assert consumer.poll() == {}
    assert reset_offsets(root, "g", 3, execute=True) == [OffsetReset("t", 0, 5, 3), OffsetReset("t", 1, 5, 3)]
    assert committed(root) == {("t", 0): 3, ("t", 1): 3}
    with pytest.raises(UnknownTopicError, match="'later'"):
        reset_offsets(root, "g", 3, ["later"])


def test_a_group_with_a_consumer_is_not_reset_under_it(root: Path) -> None:
    """The consumer would commit its own place over the reset a moment later."""
    with Consumer(root, "g", "t") as consumer:
        assert consumer.poll(5.0)
        consumer.commit()
        before = committed(root)
        with pytest.raises(StoreLockedError, match="Stop the group's consumers first"):
            reset_offsets(root, "g", "earliest", ["t"], execute=True)
        assert committed(root) == before
        assert reset_offsets(root, "g", "earliest", ["t"])  # who only looks disturbs nobody
    reset_offsets(root, "g", "earliest", ["t"], execute=True)
    assert set(committed(root).values()) == {0}


@pytest.mark.parametrize("to", ["soon", -1, 1.5, None, True, datetime(2026, 1, 1)])  # noqa: DTZ001 - without a zone
def test_a_place_that_is_none_is_refused(root: Path, to: object) -> None:
    with pytest.raises(ConfigError, match="allowed is 'earliest', 'latest', an offset from 0 on, or a datetime"):
        reset_offsets(root, "g", to, ["t"], execute=True)  # type: ignore[arg-type]
    assert committed(root) == {}


def test_a_time_in_milliseconds_is_no_offset(root: Path) -> None:
    """The group went to the end of all queues, and skipped what it had not read."""
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    with pytest.raises(ConfigError, match=f"found {now_ms}, which is more likely a time in milliseconds"):
        reset_offsets(root, "g", now_ms, ["t"], execute=True)
    assert committed(root) == {}


def test_an_unknown_topic_is_refused_with_those_that_are_there(root: Path) -> None:
    with pytest.raises(UnknownTopicError, match="t"):
        reset_offsets(root, "g", "latest", ["t", "nope"], execute=True)
    assert committed(root) == {}


def test_a_reset_that_is_killed_moves_all_queues_or_none(tmp_path: Path) -> None:
    root = tmp_path / "mem"
    disk = MemDisk(root)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        for number in range(10):
            store.put_message(Message("t", b"%d" % number, queue_id=number % 2))
    (root / "spark").mkdir(parents=True, exist_ok=True)  # locks are on the real disk
    with progress(root, "g", disk) as group_progress:
        group_progress.commit({("t", 0): 5, ("t", 1): 5})

    recording = MemRecordingDisk(root, disk.content())
    reset_offsets(root, "g", "earliest", execute=True, disk=recording)
    counts = {5: 0, 0: 0}
    for cut in range(recording.position + 1):
        after = MemDisk(root, recording.image(cut, "all").folder)
        with progress(root, "g", after) as group_progress:
            places = set(group_progress.committed(["t"]).values())
        assert places in ({5}, {0}), (cut, places)
        counts[places.pop()] += 1
    assert min(counts.values()) > 0
