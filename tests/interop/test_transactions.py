"""Half messages of ours under a real broker with a real producer, and its half messages under us."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import ports

from interop.conftest import need
from interop.java_build import NEWEST, tools_classpath
from interop.java_store import COUNTS, Driver
from interop.real_broker import BROKERS, RealBroker
from interop.share import part
from messagestore import CheckReport, LocalTransactionState, Message, MessageExt, MessageStore, StoreConfig
from messagestore.inspect.verify import verify

HALF, OP, DISCARDED = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC"
COMMIT, ROLLBACK, UNKNOW = LocalTransactionState
SOON_S = 30.0
FAST = "transactionCheckInterval=2000\ntransactionTimeOut=100\ntransactionOpBatchInterval=100\n"
SLOW = FAST.replace("TimeOut=100", "TimeOut=600000")
OLD_MS = 700_000
SHORT = ("5.0.0", "4.9.7")
"""These do not write the transaction id into a half message; it is in the UNIQ_KEY."""
REAL, NO_REAL = {"REAL_TOPIC", "REAL_QID"}, "5.5.0"
"""This one leaves out of a committed message where its half message said that it belongs."""


def messages(root: Path, topic: str) -> list[MessageExt]:
    with MessageStore.open_read_only(root) as store:
        found = store.get_message(topic, 0, 0, 1000).messages
    COUNTS.messages += len(found)
    return found


def bodies(root: Path, topic: str) -> list[str]:
    return [message.body.decode() for message in messages(root, topic)]


def ended_by(root: Path) -> list[int]:
    """The half messages that the op messages end; since 5.1 a broker's op message may end several of them."""
    return [int(number) for body in bodies(root, OP) for number in body.split(",") if number]


def soon(look: Callable[[], Any], wanted: Any) -> None:
    """Wait until something is as it should be."""
    until_s = time.monotonic() + SOON_S
    while (found := look()) != wanted:
        assert time.monotonic() < until_s, (found, wanted)
        time.sleep(0.1)


class Producer:
    """RocketMQ's own client, as a producer of group `payments` for topic `orders`."""

    def __init__(self, java: Driver, broker: RealBroker) -> None:
        self._java, self._broker = java, broker

    def __call__(self, action: str, **fields: Any) -> Any:
        return self._java.call("transactions", action=action, group="payments", **fields)


@contextmanager
def producer(java: Driver, broker: RealBroker, **answers: str) -> Iterator[Producer]:
    found = Producer(java, broker)
    found("start", broker=f"127.0.0.1:{broker.port}", names=ports.reserve(), topic="orders", answers=answers)
    try:
        yield found
    finally:
        found("stop")


@pytest.fixture(params=[BROKERS[0], *part(BROKERS[1:], 4)])
def version(request: pytest.FixtureRequest) -> str:
    """Of the broker: the newest one, and each day another older one. The producer is the newest one that we can drive."""
    need(request.param, tools_classpath)
    return str(request.param)


def prepared(store: MessageStore, body: str, *, age_ms: int = 0) -> str:
    """The id of a half message that was made some time ago."""
    born_ms = time.time_ns() // 1_000_000 - age_ms
    message = Message("orders", body.encode(), queue_id=0, flag=7, tags="eu", born_timestamp_ms=born_ms)
    return store.half_message(message, "payments").message_id


def test_a_broker_takes_our_half_messages_over(memory: Path, drivers: Callable[[str], Driver], version: str) -> None:
    """What we ended, it leaves alone, also what one batch of ours ended; what is open, its client ends, or it checks back
    with a live producer. The first half message is open, so the broker reads all of our op messages."""
    root, java = memory / "store", drivers(NEWEST)
    broker = RealBroker(version, memory / "broker", root, more=SLOW)
    config = StoreConfig.load(broker.conf)
    answers = {"checked and committed": "COMMIT_MESSAGE", "put back by us": "COMMIT_MESSAGE"}
    answers["checked and rolled back"] = "ROLLBACK_MESSAGE"
    with MessageStore.open(root, config) as store:
        store.create_topic("orders", 1)
        old = ("put back by us", "committed by us", "rolled back by us")
        ids = [prepared(store, body, age_ms=OLD_MS) for body in old]
        many = [f"committed in a batch/{number}" for number in range(40)]  # a broker reads 32 op messages at a time
        for body in many:
            prepared(store, body, age_ms=OLD_MS)
        report = store.check_halves(lambda message: COMMIT if message.body.decode() in many else UNKNOW)
        assert (report.checked, report.committed) == (43, 40)
        store.find_half(ids[1]).commit()
        store.find_half(ids[2]).rollback()
        for body in (body for body in answers if body not in old):
            prepared(store, body, age_ms=OLD_MS)
        for body in ("ended by its client", "rolled back by its client"):
            prepared(store, body)  # a broker would check it while its client ends it, and count that as two
        left = {half.physical_offset: half for half in store.open_halves()}
        known = {m.body.decode(): left[m.physical_offset] for m in map(store.look_message_by_offset, left) if m}
    COUNTS.stores += 1
    assert len(known) == 5
    with broker, producer(java, broker, **answers) as client:
        for body, commit in (("ended by its client", True), ("rolled back by its client", False)):
            half = known[body]
            client(
                "end",
                commit=commit,
                physicalOffset=half.physical_offset,
                queueOffset=half.queue_offset,
                transactionId=half.transaction_id,
            )
        wanted = {"committed by us", "ended by its client", "checked and committed", "put back by us", *many}
        soon(lambda: set(bodies(root, "orders")), wanted)
        time.sleep(3.0)  # another round
        asked = client("asked")
    assert set(asked) == set(answers), asked
    assert Counter(bodies(root, "orders")) == dict.fromkeys(wanted, 1)
    COUNTS.stores += 1
    with MessageStore.open(root, config) as store:
        assert store.open_halves() == []
        assert store.check_halves(lambda message: COMMIT) == CheckReport()
    assert verify(root).ok
    by = {message.body.decode(): message for message in messages(root, "orders")}
    ours, theirs = by["committed by us"], by["ended by its client"]
    names = ("sys_flag", "flag", "tags", "properties", "reconsume_times", "born_host", "store_host")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    same = {"TAGS", "TRAN_MSG", "PGROUP", "REAL_TOPIC", "REAL_QID", "UNIQ_KEY", "__transactionId__"}
    assert set(theirs.system_properties) - {"WAIT"} == same - (REAL if version == NO_REAL else set())
    assert set(ours.system_properties) == {*same, "TRANSACTION_CHECK_TIMES"}


def test_we_take_a_brokers_half_messages_over(memory: Path, drivers: Callable[[str], Driver], version: str) -> None:
    """And give the store back: the broker asks for none of them again."""
    root, java = memory / "store", drivers(NEWEST)
    broker = RealBroker(version, memory / "broker", root, more=SLOW)
    config = StoreConfig.load(broker.conf)
    with MessageStore.open(root, config) as store:
        store.create_topic("orders", 1)
    states = {
        "committed": "COMMIT_MESSAGE", "rolled back": "ROLLBACK_MESSAGE",
        "left, to commit": "UNKNOW", "left, to roll back": "UNKNOW", "left, to check": "UNKNOW",
    }  # fmt: skip
    with broker, producer(java, broker) as client:
        sent = client(
            "send",
            topic="orders",
            messages=[{"body": body, "state": state, "keys": body[:4], "flag": 3} for body, state in states.items()],
        )
        assert {one["status"] for one in sent} == {"SEND_OK"}
        soon(lambda: bodies(root, "orders"), ["committed"])
        soon(lambda: sorted(ended_by(root)), [0, 1])  # threads of the broker end them, in any order
    COUNTS.stores += 1
    ids = dict(zip(states, [one["transactionId"] for one in sent], strict=True))
    theirs = messages(root, HALF)[0]
    with MessageStore.open(root, config) as store:
        assert [half.transaction_id for half in store.open_halves()] == [ids[body] for body in list(states)[2:]]
        prepared(store, "ours").encode()
        ours = store.look_message_by_id(store.open_halves()[-1].message_id)
        assert ours is not None
        more = {"KEYS", "CLUSTER", "WAIT", "MSG_REGION", "TRACE_ON"}  # a client and its broker may add these
        mine = set(ours.system_properties) - {"TAGS"}
        assert set(theirs.system_properties) - more == mine - ({"__transactionId__"} if version in SHORT else set())
        assert (theirs.sys_flag & 0xC, ours.sys_flag & 0xC) == (0, 0)
        store.find_half(ids["left, to commit"]).commit()
        store.find_half(ids["left, to roll back"]).rollback()
    checked: list[str] = []

    def check(message: MessageExt) -> LocalTransactionState:
        checked.append(message.body.decode())
        return COMMIT if "check" in checked[-1] else ROLLBACK

    time.sleep(0.2)
    with MessageStore.open(root, config.replace(transaction_time_out=100)) as store:
        assert store.check_halves(check) == CheckReport(checked=2, committed=1, rolled_back=1)
    assert checked == ["left, to check", "ours"]
    wanted = {"committed", "left, to commit", "left, to check"}
    assert Counter(bodies(root, "orders")) == dict.fromkeys(wanted, 1)
    by = {message.body.decode(): message for message in messages(root, "orders")}
    mine, broker_s = by["left, to commit"], by["committed"]
    names = ("sys_flag", "flag", "properties", "reconsume_times", "store_host")
    assert [getattr(mine, name) for name in names] == [getattr(broker_s, name) for name in names]
    left_out = REAL if version == NO_REAL else set()
    assert set(mine.system_properties) - left_out == set(broker_s.system_properties)
    ops = messages(root, OP)
    assert (ops[0].tags, ops[0].sys_flag, ops[0].flag) == (ops[-1].tags, ops[-1].sys_flag, ops[-1].flag)
    again = RealBroker(version, memory / "again", root, more=FAST)
    with again, producer(java, again) as client:
        time.sleep(5.0)  # two rounds
        assert client("asked") == []
    COUNTS.stores += 1
    assert Counter(bodies(root, "orders")) == dict.fromkeys(wanted, 1)
    with MessageStore.open(root, config) as store:
        assert store.open_halves() == []
    assert verify(root).ok


def test_a_broker_and_we_discard_each_others_half_messages(memory: Path, drivers: Callable[[str], Driver]) -> None:
    """Either counts the checks of the other; a half message that a killed broker put back is one half message."""
    need(NEWEST)
    root, java = memory / "store", drivers(NEWEST)
    broker = RealBroker(NEWEST, memory / "broker", root, more=FAST + "transactionCheckMax=5\n")
    config = StoreConfig.load(broker.conf)
    assert config.transaction_check_max == 5
    with MessageStore.open(root, config) as store:
        store.create_topic("orders", 1)
        prepared(store, "worn out by both")
        time.sleep(0.2)
        assert store.check_halves(lambda message: UNKNOW).checked == 1
    with broker, producer(java, broker) as client:
        soon(lambda: bodies(root, DISCARDED), ["worn out by both"])
        asked = client("asked")  # as often as the producer was there in time
        assert set(asked) == {"worn out by both"}
        assert len(asked) <= 4
        client("send", topic="orders", messages=[{"body": "of a broker that is killed", "state": "UNKNOW"}])
        soon(lambda: "of a broker that is killed" in client("asked"), True)
        assert broker.process is not None
        broker.process.kill()
        broker.process.wait()
    COUNTS.stores += 1
    seen: list[str] = []

    def check(message: MessageExt) -> LocalTransactionState:
        seen.append(message.body.decode())
        return UNKNOW

    with MessageStore.open(root, config) as store:
        for _ in range(6):
            store.check_halves(check)
        assert store.open_halves() == []
    assert "worn out by both" not in seen
    assert bodies(root, "orders") == []
    assert seen.count("of a broker that is killed") <= 4
    assert Counter(bodies(root, DISCARDED)) == {"worn out by both": 1, "of a broker that is killed": 1}
    assert verify(root).ok


def test_a_broker_is_killed_between_a_commit_and_its_op_message(memory: Path, drivers: Callable[[str], Driver]) -> None:
    """It would ask the producer again, and commit the message twice. We do not."""
    need(NEWEST)
    root, java = memory / "store", drivers(NEWEST)
    late = SLOW.replace("OpBatchInterval=100", "OpBatchInterval=600000")
    broker = RealBroker(NEWEST, memory / "broker", root, more=late)
    config = StoreConfig.load(broker.conf)
    with MessageStore.open(root, config) as store:
        store.create_topic("orders", 1)
    with broker, producer(java, broker) as client:
        sent = client(
            "send",
            topic="orders",
            messages=[{"body": body, "state": "COMMIT_MESSAGE"} for body in ("checked by us", "committed by us")],
        )
        soon(lambda: sorted(bodies(root, "orders")), ["checked by us", "committed by us"])
        assert broker.process is not None
        broker.process.kill()
        broker.process.wait()
    COUNTS.stores += 1
    assert bodies(root, OP) == []
    asked: list[bytes] = []

    def check(message: MessageExt) -> LocalTransactionState:
        asked.append(message.body)
        return COMMIT

    with MessageStore.open(root, config.replace(transaction_time_out=0)) as store:
        store.find_half(sent[1]["transactionId"]).commit()
        assert store.check_halves(check) == CheckReport()
        assert store.open_halves() == []
    assert asked == []
    assert sorted(bodies(root, "orders")) == ["checked by us", "committed by us"]
    assert ended_by(root) == [1, 0]
    assert verify(root).ok
