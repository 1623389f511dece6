"""A real broker, with its own `broker.conf`, and writers of ours on its store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from interop.conftest import need
from interop.java_build import NEWEST, tools_classpath
from interop.java_store import COUNTS, Driver
from interop.real_broker import RealBroker
from interop.test_sent_back import clients
from messagestore import ConfigError, Message, MessageStore, NotAStoreError, StoreConfig, StoreLockedError
from messagestore.inspect import operator
from messagestore.inspect.verify import verify
from processes import SHORT_SESSIONS


@pytest.fixture
def broker(memory: Path) -> RealBroker:
    need(NEWEST)
    return RealBroker(NEWEST, memory / "broker", memory / "store")


def bodies(root: Path, topic: str) -> list[str]:
    with MessageStore.open_read_only(root) as store:
        found = store.get_message(topic, 0, 0, 100_000).messages
    COUNTS.messages += len(found)
    return [message.body.decode() for message in found]


def test_a_store_that_a_broker_made_takes_its_sizes_from_the_brokers_file(broker: RealBroker, root: Path) -> None:
    """A broker without messages leaves no file that says how large a segment is. With sizes of ours it would not start
    again; they are taken from its own file, or asked for."""
    with broker, pytest.raises(StoreLockedError, match="RocketMQ broker"):
        MessageStore.open(root, StoreConfig.load(broker.conf))
    COUNTS.stores += 1
    assert not list((root / "commitlog").iterdir())
    with pytest.raises(ConfigError, match=r"a broker created this store.*broker\.conf"):
        MessageStore.open(root)
    assert not (root / "spark").exists()
    with MessageStore.open(root, StoreConfig.load(broker.conf)) as store:
        for number in range(3):
            store.put_message(Message("t", f"ours/{number}".encode(), queue_id=0, keys=[f"k{number}"]))
    with broker:
        assert bodies(root, "t") == ["ours/0", "ours/1", "ours/2"]
    COUNTS.stores += 1
    with MessageStore.open(root) as store:
        store.put_message(Message("t", b"ours/3", queue_id=0))
    assert bodies(root, "t") == ["ours/0", "ours/1", "ours/2", "ours/3"]
    assert verify(root).ok


def test_a_broker_that_keeps_its_topics_and_groups_in_rocksdb(
    memory: Path, root: Path, drivers: Callable[[str], Driver]
) -> None:
    """configManagerVersion=v2: refused by its own file, and by what it leaves on the disk. Its messages are read."""
    need(NEWEST, tools_classpath)
    v2 = RealBroker(NEWEST, memory / "broker", root, more="configManagerVersion=v2\n")
    with v2, clients(drivers(NEWEST), v2) as client:
        assert client("send", topic="orders", messages=[{"body": "theirs"}]) == ["SEND_OK"]
    COUNTS.stores += 1
    with pytest.raises(ConfigError, match="cannot be written with configManagerVersion=v2"):
        MessageStore.open(root, StoreConfig.load(v2.conf))
    with pytest.raises(NotAStoreError, match=r"config/rdb: found .*configManagerVersion=v2"):
        MessageStore.open(root)
    with pytest.raises(ConfigError, match="configManagerVersion=v2"):
        operator.groups(str(root))
    with MessageStore.open_read_only(root) as store:
        assert [m.body for each in range(4) for m in store.get_message("orders", each, 0).messages] == [b"theirs"]


def test_short_sessions_beside_real_starts(broker: RealBroker, root: Path) -> None:
    """A process opens, puts and closes all the time while a broker starts and stops: a put is refused by name, or it is
    there, once."""
    with MessageStore.open(root, StoreConfig.load(broker.conf)) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    told, stop = root.parent / "told", root.parent / "stop"
    with open(told, "w") as out:
        writer = subprocess.Popen([sys.executable, "-c", SHORT_SESSIONS, str(root), str(stop)], stdout=out)
    try:
        for _ in range(2):
            time.sleep(1.0)
            with broker:
                time.sleep(0.5)
            COUNTS.stores += 1
        time.sleep(1.0)
    finally:
        stop.touch()
        writer.wait(20)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    acknowledged = [line[1] for line in lines if line[0] == "put"]
    refused = [line for line in lines if line[0] == "refused"]
    assert len(acknowledged) > 10 and len(refused) > 10
    assert bodies(root, "short") == acknowledged
    with broker:
        assert bodies(root, "short") == acknowledged
    COUNTS.stores += 1
    with MessageStore.open(root):
        pass
    assert verify(root).ok
