"""Timer messages of a real broker, and our retention between its stop and its next start."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from interop.conftest import need
from interop.java_build import NEWEST, tools_classpath
from interop.java_store import COUNTS, Driver
from interop.real_broker import RealBroker
from interop.share import part
from interop.test_sent_back import clients
from messagestore import Message, MessageStore, StoreConfig
from messagestore.files.timer_progress import TIMER_TOPIC, read_timer_progress
from messagestore.inspect.verify import verify

WHEEL = "timerWheelEnable=true\n"
TIMERS = 42
WAIT_S = 40
SOON_S = 60.0


def bodies(root: Path) -> Counter[str]:
    with MessageStore.open_read_only(root) as store:
        found = store.get_message("orders", 0, 0, 1000).messages
    COUNTS.messages += len(found)
    return Counter(message.body.decode() for message in found)


def soon(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.2)


def segments(root: Path) -> int:
    return len(list((root / "commitlog").iterdir()))


def filled(root: Path, config: StoreConfig) -> None:
    """A segment more, so that what lies before can be deleted."""
    with MessageStore.open(root, config) as store:
        for number in range(20):
            store.put_message(Message("filler", bytes(60_000), queue_id=0, keys=[f"k{number}"]))


@pytest.mark.parametrize("version", part(["5.5.0", NEWEST], 2))
def test_a_broker_delivers_each_timer_message_that_our_retention_met(
    memory: Path, drivers: Callable[[str], Driver], version: str
) -> None:
    """`gc --reserved 0 --delete` keeps their segments while they wait, and deletes them when they are delivered."""
    need(version, tools_classpath)
    root, java = memory / "store", drivers(NEWEST)
    broker = RealBroker(version, memory / "broker", root, more=WHEEL)
    config = StoreConfig.load(broker.conf).replace(file_reserved_time=-1)
    with MessageStore.open(root, config) as store:
        store.create_topic("orders", 1)
    filled(root, config)
    with broker, clients(java, broker) as client:
        due_ms = time.time_ns() // 1_000_000 + WAIT_S * 1000
        given = [{"body": f"timer/{n}", "deliverMs": due_ms + 1000 * (n % 5)} for n in range(TIMERS)]
        assert client("send", topic="orders", messages=given) == ["SEND_OK"] * TIMERS
        # the broker has taken them into its wheel, which leads to their records
        soon(lambda: progress(root) >= TIMERS)
    COUNTS.stores += 1
    filled(root, config)
    with MessageStore.open(root, config) as store:
        before = segments(root)
        deleted = store.delete_expired_files(reserved_hours=0)
        assert f"timer message 0 of {TIMER_TOPIC} is not delivered yet" in deleted.kept
        assert 0 < len(deleted.segments) < before - 1
        assert store.max_offset("orders", 0) == 0
    with broker:
        soon(lambda: bodies(root) == {f"timer/{n}": 1 for n in range(TIMERS)})
        soon(lambda: reads_behind(root, due_ms + 5000))
    COUNTS.stores += 1
    filled(root, config)
    with MessageStore.open(root, config) as store:
        deleted = store.delete_expired_files(reserved_hours=0)
        assert TIMER_TOPIC not in deleted.kept
        assert store.min_offset(TIMER_TOPIC, 0) == TIMERS
    assert verify(root).ok


def progress(root: Path) -> int:
    """How many timer messages the broker has taken into its wheel."""
    with MessageStore.open_read_only(root) as store:
        return read_timer_progress(store.view.files.disk, str(root)).queue_offset


def reads_behind(root: Path, time_ms: int) -> bool:
    """Whether the broker has noted that its wheel was read up to a time."""
    with MessageStore.open_read_only(root) as store:
        return read_timer_progress(store.view.files.disk, str(root)).read_ms >= time_ms
