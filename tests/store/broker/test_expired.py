"""Timer messages of a broker keep their segments until the broker has delivered them."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from crash.imitate import Broker
from messagestore import MessageStore
from messagestore.broker.expired import ROCKSDB_HALF_TOPIC
from messagestore.files.timer_progress import TIMER_TOPIC, TimerProgress, read_timer_progress
from messagestore.format.config import StoreConfig
from messagestore.inspect import operator
from small import SMALL, stop_periodic

SEGMENT = SMALL.mapped_file_size_commit_log
DUE_MS = 1_795_170_000_000
"""When the first timer message is due; the others follow by the second."""
TIMERS = 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of a broker: a timer message for every four messages, so several of each in every segment."""
    root = tmp_path / "store"
    root.mkdir()
    broker = Broker(root, SMALL)
    for number in range(4 * TIMERS):
        if number % 4 == 0:
            due_ms = DUE_MS + 1000 * (number // 4)
            fields = [("TIMER_OUT_MS", f"{due_ms}"), ("REAL_TOPIC", "t"), ("TIMER_DELIVER_MS", f"{due_ms + 450}")]
            # what looks like a time in a body makes a message wait at most for longer
            broker.put(TIMER_TOPIC, b"TIMER_OUT_MS\x010\x02", 0, properties=fields)
        broker.put("t", b"." * 1000, 0)
    (root / "abort").unlink()
    return root


def checked(root: Path, read_ms: int, queue_offset: int) -> None:
    """How far a broker says that it has come."""
    path = root / "config" / "timercheck"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack(">qqqq", read_ms, 5200, queue_offset, queue_offset).ljust(4096, b"\0"))


def places(root: Path) -> list[int]:
    """The physical offset of each timer message."""
    with MessageStore.open_read_only(root, SMALL) as store:
        return [found.physical_offset for found in store.get_message(TIMER_TOPIC, 0, 0, TIMERS).messages]


def gc(root: Path, config: StoreConfig = SMALL, **asked: object) -> tuple[int, str, tuple[str, ...]]:
    """Where the log begins afterwards, why the next segment stays, and who loses something."""
    with MessageStore.open(root, config) as store:
        store.writer.clean_end.move()
        found = store.delete_expired_files(**{"reserved_hours": 0, **asked})
    return found.min_offset, found.kept, found.unread_groups


@pytest.mark.parametrize(
    ("read_ms", "queue_offset", "first"),
    [
        (0, 0, 0),
        (DUE_MS + 900_000, 0, 0),  # the broker has not even taken them into its wheel
        (DUE_MS, TIMERS, 0),
        (DUE_MS + 1, TIMERS, 1),
        (DUE_MS + 8000, TIMERS, 8),
        (DUE_MS + 900_000, 9, 9),
        (DUE_MS + 5000, 9, 5),
        (DUE_MS + 900_000, TIMERS, None),
    ],
    ids=["nothing", "not taken", "due now", "first delivered", "some", "taken in part", "both", "all"],
)
def test_timer_messages_that_were_not_delivered_keep_their_segments(
    root: Path, read_ms: int, queue_offset: int, first: int | None
) -> None:
    checked(root, read_ms, queue_offset)
    where = places(root)
    told = operator.expired(str(root), SMALL, reserved_hours=0)
    begin, kept, unread = gc(root)
    if first is None:
        assert begin > where[-1] - 2 * SEGMENT
        assert TIMER_TOPIC not in kept
    else:
        assert f"timer message {first} of {TIMER_TOPIC} is not delivered yet" in kept
        assert begin == where[first] // SEGMENT * SEGMENT
        assert (told.min_offset, told.kept) == (begin, kept)
    assert unread == ()


@pytest.mark.parametrize("left", [None, b"", b"\0" * 23])
def test_without_a_brokers_progress_every_timer_message_waits(root: Path, left: bytes | None) -> None:
    if left is not None:
        (root / "config").mkdir()
        (root / "config" / "timercheck").write_bytes(left)
    with MessageStore.open_read_only(root, SMALL) as store:
        assert read_timer_progress(store.view.files.disk, str(root)) == TimerProgress()
    assert gc(root)[0] == 0


def test_timers_in_rocksdb_are_known_to_the_broker_alone(root: Path) -> None:
    checked(root, DUE_MS + 900_000, TIMERS)
    assert gc(root, SMALL.replace(broker_settings=(("timerRocksDBEnable", "true"),)))[0] == 0
    assert gc(root)[0] > 0


def test_whoever_deletes_timer_messages_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the name of their topic, as for a consumer group that nobody uses; or because the disk is full."""
    begin, _, unread = gc(root, ignored_groups=[TIMER_TOPIC], before_offset=2 * SEGMENT)
    assert (begin, unread) == (2 * SEGMENT, ())
    begin, _, unread = gc(root, at_once=True)
    assert begin > 2 * SEGMENT
    assert unread == (TIMER_TOPIC,)
    assert "segments were deleted although timer message" in caplog.text


def test_retention_by_itself_leaves_timer_messages_alone(root: Path) -> None:
    config = SMALL.replace(file_reserved_time=0, clean_resource_interval=0, delete_when=";".join(map(str, range(24))))
    with MessageStore.open(root, config) as store:
        stop_periodic(store)
        store.writer.clean_end.move()
        time.sleep(0.01)  # a segment that was written to in this millisecond has not expired
        found = store._attached.services.retention.run_if_due()
    assert found is not None
    assert found.segments == ()
    assert f"timer message 0 of {TIMER_TOPIC}" in found.kept


def test_half_messages_in_a_brokers_database_keep_their_segments(tmp_path: Path) -> None:
    """RocketMQ 5.5's transRocksDBEnable: which of them are open is not in the log."""
    root = tmp_path / "store"
    root.mkdir()
    broker = Broker(root, SMALL)
    for number in range(60):
        broker.put("t", b"." * 1000, 0)
        if number == 30:
            place = broker.put(ROCKSDB_HALF_TOPIC, b"half", 0)
    (root / "abort").unlink()
    begin, kept, _ = gc(root)
    assert begin == place // SEGMENT * SEGMENT > 0
    assert f"half message 0 of {ROCKSDB_HALF_TOPIC} may be open" in kept
    assert gc(root, ignored_groups=[ROCKSDB_HALF_TOPIC])[0] > place
