"""A broker with a slave: whom the reader asks, and what it takes for lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from fake_broker import Broker
from messagestore import StoreUnavailableError
from messagestore.remoting import codes
from messagestore.remoting.frames import Frame
from messagestore.spi import STORES, Location, Range, StoreReader
from remoting_peer import Peer, answer

QUEUE = ("t", 0)


class Pair:
    """A master with 100 messages, its slave with the first 80, and a name server."""

    def __init__(self, stack: ExitStack) -> None:
        self.master, self.slave = Broker(), Broker()
        for number in range(100):
            for broker in (self.master, self.slave)[: 2 if number < 80 else 1]:
                broker.put("t", 0, b"%d" % number)
        self.slave_peer = stack.enter_context(self.slave.serve())
        self.master_peer: Peer = stack.enter_context(self.master.serve())
        self.master.slave = self.slave
        self.names = Broker(name="names", others=[self.master])
        stack.enter_context(self.names.serve())
        self.stack = stack

    def reader(self, **settings: object) -> StoreReader:
        location = Location.of(f"rocketmq://{self.names.address}/broker-a")
        reader = STORES.reader(location.reached_by(**{"retry_timeout_s": 5.0, **settings}))
        self.stack.callback(reader.close)
        return reader


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def pulls(broker: Broker) -> int:
    return sum(frame.code == codes.PULL_MESSAGE for frame in broker.asked)


def rows(reader: StoreReader, end: int, start: int = 0) -> Iterator[bytes]:
    for block in reader.gather([Range("t", 0, start, end)]):
        yield from block.decoded(["body"])["body"].to_pylist()


def test_the_master_is_asked(pair: Pair) -> None:
    reader = pair.reader()
    ends = reader.ends(["t"])
    assert (ends.queues, ends.recovered) == ({QUEUE: 100}, True)
    assert len(list(rows(reader, 100))) == 100
    assert not pair.slave.asked


def test_a_slave_is_asked_if_the_reader_is_told_so(pair: Pair) -> None:
    """What it does not have yet is not lost."""
    reader = pair.reader(read_from="slave")
    ends = reader.ends(["t"])
    assert (ends.queues, ends.recovered) == ({QUEUE: 80}, False)
    assert len(list(rows(reader, 80))) == 80
    assert not pair.master.asked
    place = next(iter(pair.reader().places({QUEUE: 100}).values()))
    assert reader.prove_last(place.physical_offset, place.size) is None


def test_a_slave_goes_on_for_a_master_that_dies(pair: Pair) -> None:
    """In the middle of a range, too: each message once, up to the slave's end."""
    count = 0

    def dying(request: Frame) -> bytes | None:
        nonlocal count
        count += request.code == codes.PULL_MESSAGE
        if count < 2:
            return None
        pair.master_peer.stop_listening()
        return b""

    reader = pair.reader()
    pair.master.fault = dying
    assert list(rows(reader, 80)) == [b"%d" % number for number in range(80)]
    assert pulls(pair.slave)
    ends = reader.ends(["t"])
    assert (ends.queues, ends.recovered) == ({QUEUE: 80}, False)
    assert not ends.shrinks, "that a slave has less is no loss"


def test_what_the_slave_does_not_have_is_waited_for(pair: Pair) -> None:
    """If the master does not come back in time, that is an error, and no row is made up."""
    pair.master_peer.stop_listening()
    read: list[bytes] = []
    with pytest.raises(StoreUnavailableError, match="does not have message 80 of t/0 yet"):
        read.extend(rows(pair.reader(retry_timeout_s=0.3), 100))
    assert read == [b"%d" % number for number in range(80)]


def test_what_the_slave_gets_meanwhile_is_read(pair: Pair) -> None:
    pair.master_peer.stop_listening()
    asked = 0

    def getting(request: Frame) -> None:
        nonlocal asked
        if request.code == codes.PULL_MESSAGE and int(request.fields["queueOffset"]) >= 80:
            asked += 1
            if asked == 3:
                for number in range(80, 100):
                    pair.slave.put("t", 0, b"%d" % number)

    pair.slave.fault = getting
    assert list(rows(pair.reader(), 100)) == [b"%d" % number for number in range(100)]


def test_a_slave_that_answers_nobody_leaves_the_master(pair: Pair) -> None:
    """Without slaveReadEnable, a slave says that it is busy, for ever."""
    pair.slave.fault = lambda request: answer(request, codes.SYSTEM_BUSY, remark="[REJECTREQUEST]system busy")
    reader = pair.reader(read_from="slave", retry_timeout_s=60.0)
    assert reader.ends(["t"]).queues == {QUEUE: 100}
    assert len(list(rows(reader, 100))) == 100


def test_a_slave_that_does_not_know_the_topic_yet_leaves_the_master(pair: Pair) -> None:
    pair.slave.fault = lambda request: answer(request, codes.TOPIC_NOT_EXIST)
    reader = pair.reader(read_from="slave", retry_timeout_s=60.0)
    assert len(list(rows(reader, 100))) == 100
