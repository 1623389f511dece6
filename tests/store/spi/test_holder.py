"""A query that reads the folder of a running broker publishes its progress through that broker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_broker import Broker, answer
from messagestore import BrokerError, Message, MessageStore, StoreUnavailableError
from messagestore.remoting import codes
from messagestore.remoting.frames import Frame
from messagestore.spi import LOCAL_STORES, StoreReader
from small import SMALL

LOCK = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX, 1); print(1, flush=True); sys.stdin.read()"
OFFSETS = {("t", 0): 3, ("t", 1): 0}


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    with broker.serve():
        yield broker


@pytest.fixture
def root(tmp_path: Path, broker: Broker) -> Iterator[Path]:
    """A store of which the broker has the log; another process has its lock, as a broker has it."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL.replace(listen_port=int(broker.address.rpartition(":")[2]))) as store:
        for body in (b"one", b"two", b"three"):
            place = store.put_message(Message("t", body, queue_id=0)).physical_offset
            record = store.writer.log.record_bytes(place)
            assert record is not None
            broker.log[place] = record
    command = [sys.executable, "-c", LOCK, str(root / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        yield root
        holder.communicate()


@pytest.fixture
def reader(root: Path) -> Iterator[StoreReader]:
    reader = LOCAL_STORES.reader(str(root))
    reader.ends(["t"])
    yield reader
    reader.close()


def test_the_broker_notes_how_far_a_group_has_read(broker: Broker, root: Path, reader: StoreReader) -> None:
    reader.publish_progress("g", OFFSETS)
    assert broker.groups == {("g", "t", 0): 3, ("g", "t", 1): 0}
    assert not (root / "config" / "consumerOffset.json").exists()
    (shown,) = (frame for frame in broker.asked if frame.code == codes.VIEW_MESSAGE_BY_ID)
    assert int(shown.fields["offset"]) == max(broker.log)


def test_a_group_that_the_broker_does_not_have_is_made_by_a_pull(broker: Broker, reader: StoreReader) -> None:
    def unknown(request: Frame) -> bytes | None:
        has_pulled = any(frame.code == codes.PULL_MESSAGE for frame in broker.asked)
        is_offset = request.code == codes.UPDATE_CONSUMER_OFFSET
        return answer(request, codes.SUBSCRIPTION_GROUP_NOT_EXIST) if is_offset and not has_pulled else None

    broker.fault = unknown
    reader.publish_progress("g", OFFSETS)
    assert broker.groups == {("g", "t", 0): 3, ("g", "t", 1): 0}


@pytest.mark.parametrize("bytes_there", [b"", b"a record of another log"])
def test_another_broker_at_the_address_is_told_nothing(broker: Broker, reader: StoreReader, bytes_there: bytes) -> None:
    """It may have a topic and a group of the same name."""
    place = max(broker.log)
    if bytes_there:
        broker.log[place] = bytes_there
    else:
        del broker.log[place]
    with pytest.raises(StoreUnavailableError, match=rf"stored at {broker.address}\. Another broker listens there now"):
        reader.publish_progress("g", OFFSETS)
    assert not broker.groups


def test_a_broker_that_refuses_is_named(broker: Broker, reader: StoreReader) -> None:
    broker.fault = lambda request: (
        answer(request, codes.NO_PERMISSION, remark="not yours")
        if request.code == codes.UPDATE_CONSUMER_OFFSET
        else None
    )
    with pytest.raises(BrokerError, match=rf"{broker.address} answered .*: not yours"):
        reader.publish_progress("g", OFFSETS)


def test_a_group_that_begins_is_told_too(broker: Broker, reader: StoreReader) -> None:
    """A query publishes its starting offsets before it has read anything."""
    reader.publish_progress("g", {("t", 0): 0})
    assert broker.groups == {("g", "t", 0): 0}


def test_without_a_message_nobody_knows_where_the_broker_listens(broker: Broker, reader: StoreReader) -> None:
    """Without any that there ever was, there is nothing to tell."""
    reader.publish_progress("g", {("t", 2): 0})
    with pytest.raises(StoreUnavailableError, match="No message of these queues is left"):
        reader.publish_progress("g", {("t", 2): 7})
    assert not broker.asked


def test_a_broker_that_does_not_answer_is_named(root: Path, broker: Broker, reader: StoreReader) -> None:
    broker.fault = lambda _: b""
    with pytest.raises(StoreUnavailableError, match=rf"{root}: .* holds the store.* stored at {broker.address}\. "):
        reader.publish_progress("g", OFFSETS)
