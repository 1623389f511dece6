"""A consumer group goes on in a real broker where our consumer has left it, and the other way round."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS, Driver
from interop.real_broker import RealBroker
from interop.test_sent_back import GROUP, clients
from interop.test_transactions import soon
from messagestore import Consumer, Message, MessageStore, StoreConfig
from messagestore.batches.progress import Move
from messagestore.files.consumer_offsets import PROGRESS_GROUP, ConsumerOffsets
from messagestore.files.disk import Disk
from messagestore.format.message import BATCH_TOPIC


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


@pytest.mark.parametrize("left", ["closed", "killed"])
def test_a_broker_goes_on_where_a_pipe_has_left_its_group(
    left: str, drivers: Callable[[str], Driver], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The pipe moved its group with its results, and was killed before the table was written, or was closed.

    The broker keeps the row that says which batches are settled, so the pipe goes on behind it exactly once.
    """
    need(NEWEST)
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path_factory.mktemp("groups")
    with tempfile.TemporaryDirectory(prefix="messagestore-interop-", dir=where) as folder:
        root, java = Path(folder) / "store", drivers(NEWEST)
        broker = RealBroker(NEWEST, Path(folder) / "broker", root)
        config = StoreConfig.load(broker.conf)
        put(root, config, *(f"{number}" for number in range(6)))
        assert piped(root, config, 2) == ["0", "1"]
        if left == "killed":
            died = os.fork()
            if not died:
                Move.finish = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
                piped(root, config, 1)
            assert os.waitstatus_to_exitcode(os.waitpid(died, 0)[1]) == -signal.SIGKILL
            with MessageStore.open(root, config):
                pass
        else:
            assert piped(root, config, 1) == ["2"]
        with broker, clients(java, broker) as client:
            soon(lambda: sorted(one["body"] for one in client("received")), ["3", "4", "5"])
        table = ConsumerOffsets(Disk(), str(root))
        table.load()
        assert table.get(BATCH_TOPIC, PROGRESS_GROUP) == {0: 2}
        put(root, config, "6", "7")
        assert piped(root, config, 500) == ["6", "7"]
        with MessageStore.open_read_only(root, config) as store:
            bodies = [message.body for message in store.get_message("results", 0, 0, 32).messages]
        assert bodies == [b"0", b"1", b"2", b"6", b"7"]
        COUNTS.stores += 1


def piped(root: Path, config: StoreConfig, most: int) -> list[str]:
    """What our pipe reads, and appends with its group's progress."""
    with MessageStore.open(root, config) as store, Consumer(root, GROUP, "orders", config=config) as consumer:
        found = [message.body for messages in consumer.poll(0, most).values() for message in messages]
        rows = pa.table({"body": found})
        store.append_batch(rows, topic="results", queue_id=0, progress=consumer.positions())
    return [body.decode() for body in found]
