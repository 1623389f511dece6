"""A real broker with RocketMQ's own clients, and us: messages that are sent back, and what a broker stamps on a put.

One run of a broker is the subject of all tests.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from benchmarks.peers import ports

from crash.imitate import walk
from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS, Driver
from interop.real_broker import RealBroker
from interop.test_transactions import messages, soon
from messagestore import Message, MessageBatch, MessageExt, MessageStore, StoreConfig
from messagestore.inspect.verify import verify

GROUP, RETRY, DEAD = "billing", "%RETRY%billing", "%DLQ%billing"
SOON = "messageDelayLevel=1s 1s 1s 1s 1s 1s\n"
FIELDS = ("tags", "keys", "properties", "reconsume_times", "sys_flag", "flag", "store_host")
BODIES = ("ours at level 2", "ours at level 3", "theirs", "dead")
OF_CLIENTS = {"MSG_REGION", "TRACE_ON", "WAIT", "RECONSUME_TIME", "MIN_OFFSET", "MAX_OFFSET", "CONSUME_START_TIME"}
"""Properties that RocketMQ's clients, or what it does for its own tracing, add."""


class Ran(NamedTuple):
    """What a broker and its clients have left: the store, what the consumer got, our records and the broker's."""

    root: Path
    config: StoreConfig
    first: dict[str, MessageExt]
    received: list[dict[str, Any]]
    ours: list[dict[str, Any]]
    theirs: list[dict[str, Any]]


@contextmanager
def clients(java: Driver, broker: RealBroker, **failures: int) -> Iterator[Callable[..., Any]]:
    """RocketMQ's producer, and its consumer of `orders` in the group; a message fails as often as it is told."""

    def act(action: str, **fields: Any) -> Any:
        return java.call("clients", action=action, group=GROUP, **fields)

    place = {"broker": f"127.0.0.1:{broker.port}", "names": ports.reserve()}
    act("start", topic="orders", failures=failures, maxReconsumeTimes=2, **place)
    try:
        yield act
    finally:
        act("stop")


def prepare(root: Path, config: StoreConfig) -> tuple[dict[str, MessageExt], list[dict[str, Any]]]:
    """Put what we put, before the broker starts: messages that we send back, and such as the producer sends later."""
    with MessageStore.open(root, config) as store:
        for topic in ("orders", "t"):
            store.create_topic(topic, 1)
        store.create_topic("closed", 1, perm=4)
        store.create_topic("typed", 1, attributes={"message.type": "NORMAL", "+later": "x"})
        store.create_group(GROUP, retry_max_times=2)
    path = root / "config" / "topics.json"
    table = json.loads(path.read_text())
    table["topicConfigTable"]["t"]["topicFilterType"] = "MULTI_TAG"
    path.write_text(json.dumps(table))

    def message(topic: str, body: str, **more: Any) -> Message:
        return Message(topic, body.encode(), queue_id=0, keys=["k"], tags="eu", properties={"own": "1"}, **more)

    with MessageStore.open(root, config) as store:
        begin = store.writer.end.physical_offset
        store.put_messages(MessageBatch.from_messages([message("t", "0"), message("t", "1")]))
        store.put_message(message("t", "0"))
        store.put_message(message(RETRY, "spent", reconsume_times=3, delay_time_level=2))
        ours = [record for record in walk(root)[0] if record["physical_offset"] >= begin]
        for body in BODIES:
            store.put_message(message("orders", body))
        first = {each.body.decode(): each for each in store.get_message("orders", 0, 0).messages}
        store.send_back(first["ours at level 3"], GROUP)
        store.send_back(first["ours at level 2"], GROUP, delay_level=2)
    return first, ours


@pytest.fixture(scope="module")
def ran(drivers: Callable[[str], Driver], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    need(NEWEST)
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path_factory.mktemp("ran")
    with tempfile.TemporaryDirectory(prefix="messagestore-interop-", dir=where) as folder:
        root, java = Path(folder) / "store", drivers(NEWEST)
        broker = RealBroker(NEWEST, Path(folder) / "broker", root, more=SOON)
        config = StoreConfig.load(broker.conf).replace(stamp_cluster=True, stamp_uniq_key=True)
        first, ours = prepare(root, config)
        given = [{"body": f"{number}", "keys": "k", "tags": "eu", "own": "1"} for number in range(2)]
        sent = len(walk(root)[0])
        with broker, clients(java, broker, theirs=1, dead=9) as client:
            for topic, what, batch in (
                ("t", given, True),
                ("t", given[:1], False),
                (RETRY, [{**given[0], "body": "spent", "reconsumeTimes": "3", "delay": 2}], False),
                ("closed", given[:1], False),
                ("typed", [{**given[0], "delay": 1}], False),
            ):
                assert client("send", topic=topic, messages=what, batch=batch) == ["SEND_OK"]
            soon(lambda: len(client("received")), 9)
            soon(lambda: len(messages(root, DEAD)), 3)
            received = client("received")
        COUNTS.stores += 1
        theirs = [r for r in walk(root)[0][sent:] if r["body"] in (b"0", b"1", b"spent")]
        yield Ran(root, config, first, received, ours, theirs)


def same(ours: MessageExt, theirs: MessageExt) -> None:
    """All but what is a message's own."""
    for name in FIELDS:
        assert getattr(ours, name) == getattr(theirs, name), name
    own = {"UNIQ_KEY", "ORIGIN_MESSAGE_ID"}
    pairs = [{k: v for k, v in m.system_properties.items() if k not in OF_CLIENTS | own} for m in (ours, theirs)]
    assert pairs[0] == pairs[1]
    assert own <= ours.system_properties.keys() & theirs.system_properties.keys()


def test_a_java_consumer_gets_what_we_send_back(ran: Ran) -> None:
    """Through the delay level and the retry topic, as often as it fails, with its first topic and message id."""
    times: dict[str, list[int]] = {}
    for one in ran.received:
        times.setdefault(one["body"], []).append(one["reconsumeTimes"])
        assert (one["topic"], one["tags"], one["keys"]) == ("orders", "eu", "k")
        assert one["properties"]["own"] == "1"
        if one["reconsumeTimes"]:
            assert one["properties"]["ORIGIN_MESSAGE_ID"] == ran.first[one["body"]].offset_message_id
    assert {body: sorted(found) for body, found in times.items()} == {
        "ours at level 2": [0, 1],
        "ours at level 3": [0, 1],
        "theirs": [0, 1],
        "dead": [0, 1, 2],
    }


def test_what_we_send_back_is_what_a_broker_makes_of_it(ran: Ran) -> None:
    """In the retry topic and among the dead letters."""
    with MessageStore.open(ran.root, ran.config) as store:
        retried = {message.body.decode(): message for message in messages(ran.root, RETRY)}
        same(retried["ours at level 3"], retried["theirs"])
        assert retried["ours at level 2"].system_properties["DELAY"] == "2"
        store.send_back(retried["dead"], GROUP)
        theirs, ours = (m for m in store.get_message(DEAD, 0, 0).messages if m.body == b"dead")
        assert theirs.reconsume_times == 3
        same(ours, theirs)
    assert verify(ran.root, ran.config).ok


def test_a_broker_and_we_stamp_the_same_on_a_put(ran: Ran) -> None:
    """CLUSTER, behind all others in a batch; the flag MULTI_TAGS; and a dead letter after the last retry."""
    assert [(r["topic"], r["body"]) for r in ran.ours] == [("t", b"0"), ("t", b"1"), ("t", b"0"), (DEAD, b"spent")]
    for index, (one, other) in enumerate(zip(ran.ours, ran.theirs, strict=False)):
        for name in ("topic", "queue_id", "body", "flag", "sys_flag", "reconsume_times"):
            assert one[name] == other[name], name
        assert one["sys_flag"] == (2 if one["topic"] == "t" else 0)
        names = [[name for name in r["all_properties"] if name not in OF_CLIENTS] for r in (one, other)]
        if index < 2:  # of a batch
            assert names[0][-1] == names[1][-1] == "CLUSTER"
        assert sorted(names[0]) == sorted(names[1])
        for name in set(names[0]) - {"UNIQ_KEY"}:
            assert one["all_properties"][name] == other["all_properties"][name], name
        assert one["all_properties"]["CLUSTER"] == "DefaultCluster"


def test_a_broker_does_not_look_at_permission_and_type_of_a_topic_when_it_takes_a_message(ran: Ran) -> None:
    """Its producers and its proxy do. It keeps attributes that nobody knows, as we do."""
    assert [message.body for message in messages(ran.root, "closed")] == [b"0"]
    table = json.loads((ran.root / "config" / "topics.json").read_text())["topicConfigTable"]
    assert table["typed"]["attributes"] == {"message.type": "NORMAL", "+later": "x"}
    assert len([record for record in ran.theirs if record["all_properties"].get("REAL_TOPIC") == "typed"]) >= 1
