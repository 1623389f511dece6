"""A consumer group goes on in a real broker where our consumer has left it, and the other way round."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS, Driver
from interop.real_broker import RealBroker
from interop.test_sent_back import GROUP, clients
from interop.test_transactions import soon
from messagestore import Consumer, Message, MessageStore, StoreConfig


def put(root: Path, config: StoreConfig, *bodies: str) -> None:
    with MessageStore.open(root, config) as store:
        store.create_topic("orders", 1)
        for body in bodies:
            store.put_message(Message("orders", body.encode(), queue_id=0))


def consumed(root: Path, config: StoreConfig, most: int = 500) -> list[str]:
    """What our consumer gets and commits."""
    with Consumer(root, GROUP, "orders", config=config) as consumer:
        found = [message.body.decode() for messages in consumer.poll(0, most).values() for message in messages]
        consumer.commit()
    COUNTS.messages += len(found)
    return found


def test_a_group_goes_on_in_a_broker_and_back(
    drivers: Callable[[str], Driver], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Neither side hands out again what the other has committed, nor leaves anything out."""
    need(NEWEST)
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path_factory.mktemp("groups")
    with tempfile.TemporaryDirectory(prefix="messagestore-interop-", dir=where) as folder:
        root, java = Path(folder) / "store", drivers(NEWEST)
        broker = RealBroker(NEWEST, Path(folder) / "broker", root)
        config = StoreConfig.load(broker.conf)
        put(root, config, *(f"{number}" for number in range(6)))
        assert consumed(root, config, 3) == ["0", "1", "2"]
        with broker, clients(java, broker) as client:
            soon(lambda: sorted(one["body"] for one in client("received")), ["3", "4", "5"])
        put(root, config, "6", "7")
        assert consumed(root, config) == ["6", "7"]
        COUNTS.stores += 1
