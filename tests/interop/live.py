"""A NameServer and brokers that run, and the few requests with which tests fill them."""

from __future__ import annotations

import contextlib
import struct
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.peers import ports

from interop.real_broker import NameServer, RealBroker
from messagestore.remoting import Client, RemotingSettings, codes

WAIT_S = 90
MORE = """\
brokerName={name}
brokerId={broker_id}
brokerRole={role}
autoCreateTopicEnable=false
mappedFileSizeConsumeQueue=600000
"""
ROCKSDB = "storeType=defaultRocksDB\n"
"""A broker whose queues are in RocksDB."""
_DLEDGER = """\
enableDLegerCommitLog=true
dLegerGroup={name}
dLegerPeers=n0-127.0.0.1:{port}
dLegerSelfId=n0
"""
BATCH_QUEUES = "+queue.type=BatchCQ"
"""The attribute of a topic in which a producer's batch is one record."""
_ELEMENT = struct.Struct(">iiiii")
_Value = TypeVar("_Value")


def dledger(name: str) -> str:
    """The lines of a broker that is a DLedger group of its own."""
    return _DLEDGER.format(name=name, port=ports.reserve())


def soon(ask: Callable[[], _Value], is_good: Callable[[_Value], object], wait_s: float = WAIT_S) -> _Value:
    """The first answer that is good; what is asked for comes about in its own time."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            value = ask()
            if is_good(value):
                return value
            fault: object = value
        except Exception as error:  # noqa: BLE001 - it is told when the time is over
            fault = error
        assert time.monotonic() < until_s, fault
        time.sleep(0.2)


def broker(
    version: str, folder: Path, names: NameServer, name: str = "broker-a", *, broker_id: int = 0, more: str = ""
) -> RealBroker:
    """A broker, which is not started yet, and which the end of its `with` kills. With an id, it is a slave."""
    role = "SLAVE" if broker_id else "ASYNC_MASTER"
    own = folder / f"{name}-{broker_id}"
    conf = MORE.format(name=name, broker_id=broker_id, role=role)
    made = RealBroker(version, own, own / "store", names, more=conf + more)
    made.is_killed = True
    return made


def create_topic(
    names: NameServer,
    brokers: Sequence[RealBroker],
    topic: str,
    queues: int = 2,
    *,
    credentials: Path | str = "",
    attributes: str = "",
) -> None:
    """A topic on some brokers, which their name server knows when this returns.

    The request is that of mqadmin's `updateTopic`, without a JVM for each.
    """
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
        "attributes": attributes or None,
    }
    with contextlib.closing(Client(str(names), RemotingSettings(credentials_file=str(credentials)))) as client:
        for one in brokers:
            address = f"127.0.0.1:{one.port}"
            soon(
                lambda address=address: client.request(address, codes.UPDATE_AND_CREATE_TOPIC, fields),
                lambda answer: answer.code == codes.SUCCESS,
            )
    await_route(names, brokers, topic)


def await_route(names: NameServer, brokers: Sequence[RealBroker], topic: str) -> None:
    """Wait until the name server knows that a topic is on some brokers, which have just been started."""
    with contextlib.closing(Client(str(names))) as client:
        soon(lambda: client.route(topic, fresh=True), lambda route: len(route.queues) == len(brokers))


def put(
    names: NameServer,
    topic: str,
    bodies: Sequence[bytes],
    name: str = "broker-a",
    *,
    queues: int = 2,
    credentials: Path | str = "",
    properties: Mapping[str, str] | None = None,
) -> None:
    """Send messages to the queues of one broker by turns, one after the other; without properties, every other one
    has a tag.
    """
    with contextlib.closing(Client(str(names), RemotingSettings(credentials_file=str(credentials)))) as client:
        address = client.route(topic).brokers[name].master
        assert address is not None
        for number, body in enumerate(bodies):
            now_ms = time.time_ns() // 1_000_000
            fields = {
                "a": "tests",
                "b": topic,
                "c": "TBW102",
                "d": queues,
                "e": number % queues,
                "f": 0,
                "g": now_ms,
                "h": 0,
            }
            tagged = {"TAGS": "even"} if number % 2 == 0 else {}
            texts = [f"{key}\x01{value}\x02" for key, value in (properties or tagged).items()]
            fields |= {"i": "".join(texts), "j": 0, "k": False, "m": False}
            client.request(address, codes.SEND_MESSAGE_V2, fields, body, broker=name)


def put_batches(names: NameServer, topic: str, queues: Mapping[int, Sequence[bytes]], name: str, size: int) -> None:
    """Send the messages of each queue of one broker as batches, as RocketMQ's producer does."""
    with contextlib.closing(Client(str(names))) as client:
        address = client.route(topic).brokers[name].master
        assert address is not None
        for queue_id, bodies in queues.items():
            for first in range(0, len(bodies), size):
                elements = [
                    _ELEMENT.pack(_ELEMENT.size + len(body) + 2, 0, 0, 0, len(body)) + body + bytes(2)
                    for body in bodies[first : first + size]
                ]
                fields = {"a": "tests", "b": topic, "c": "TBW102", "d": 4, "e": queue_id, "f": 0, "h": 0, "j": 0}
                fields |= {"g": time.time_ns() // 1_000_000, "k": False, "m": True}
                fields["i"] = f"UNIQ_KEY\x01{uuid.uuid4().hex.upper()}\x02"
                client.request(address, codes.SEND_BATCH_MESSAGE, fields, b"".join(elements), broker=name)
