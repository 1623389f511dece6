"""A topic that we delete is gone for a real broker, the others are whole, and either side may make it again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from cli_runs import run
from interop import java_build
from interop.cluster_clients import Client as ClusterClient
from interop.cluster_clients import Clients, message
from interop.conftest import need
from interop.java_build import LEGACY, NEWEST
from interop.java_store import COUNTS, Driver
from interop.live import await_route, broker, create_topic, soon
from interop.real_broker import NameServer, RealBroker
from interop.share import part
from messagestore import Consumer, Message, MessageStore, StoreConfig
from messagestore.inspect.verify import verify
from messagestore.remoting import Client, codes
from messagestore.remoting.routes import json_of

GONE, KEPT, OURS = "gone", "kept", "ours"


@pytest.fixture
def names(memory: Path) -> Iterator[NameServer]:
    need(NEWEST, java_build.tools_classpath)
    with NameServer(NEWEST, memory / "names") as server:
        yield server


def put(root: Path, config: StoreConfig, topic: str, texts: Iterable[str]) -> None:
    with MessageStore.open(root, config) as store:
        store.create_topic(topic, 2)
        for number, text in enumerate(texts):
            store.put_message(Message(topic, text.encode(), queue_id=number % 2, keys=[text]))


def bodies(root: Path, topic: str) -> list[str]:
    """What a topic has. RocketMQ's producer sends again what a slow broker has not answered, so it may be there twice."""
    with MessageStore.open_read_only(root) as store:
        found = {m.body.decode() for queue_id in (0, 1) for m in store.get_message(topic, queue_id, 0, 100).messages}
    COUNTS.messages += len(found)
    return sorted(found)


def consumed(root: Path, config: StoreConfig, topic: str) -> list[str]:
    """What our consumer gets and commits."""
    with Consumer(root, OURS, topic, config=config) as consumer:
        found = {message.body.decode() for messages in consumer.poll().values() for message in messages}
        consumer.commit()
    return sorted(found)


class Asked:
    """What a broker says of a topic."""

    def __init__(self, names: NameServer, one: RealBroker) -> None:
        self._client, self._address = Client(str(names)), f"127.0.0.1:{one.port}"

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def knows(self, topic: str) -> bool:
        accepted = {codes.SUCCESS, codes.TOPIC_NOT_EXIST}
        answer = self._client.request(self._address, codes.GET_TOPIC_STATS_INFO, {"topic": topic}, accepts=accepted)
        return answer.code == codes.SUCCESS

    def ends(self, topic: str) -> list[int]:
        return [
            self._client.request(self._address, codes.GET_MAX_OFFSET, {"topic": topic, "queueId": queue_id}).number(
                "offset"
            )
            for queue_id in (0, 1)
        ]

    def progress(self, topic: str, group: str) -> dict[int, int]:
        """Where a group is in the queues of a topic."""
        answer = self._client.request(self._address, codes.GET_ALL_CONSUMER_OFFSET, {})
        table = json_of(answer)["offsetTable"].get(f"{topic}@{group}", {})
        return {int(queue_id): offset for queue_id, offset in table.items()}


def await_bodies(consumer: ClusterClient, wanted: list[str]) -> None:
    """Wait until RocketMQ's consumer has got these messages, of which some may come twice, and no other one."""
    soon(lambda: len({each["body"] for each in consumer.take()}), lambda count: count >= len(wanted))
    found = {each["body"].decode() for each in consumer.messages}
    COUNTS.messages += len(found)
    assert sorted(found) == wanted


def delete_and_die(root: Path, topic: str) -> None:
    """Delete a topic in a process that is killed behind the deletion, and closes nothing."""
    died = os.fork()
    if not died:
        with contextlib.suppress(BaseException):
            MessageStore.open(root).delete_topic(topic)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(died, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("version", part([NEWEST, LEGACY], 2))
def test_a_broker_knows_nothing_of_a_topic_that_we_deleted(
    version: str, names: NameServer, memory: Path, drivers: Callable[[str], Driver]
) -> None:
    """`messagestore topic delete`, then a broker; the topic is made again by the broker, deleted again, and made by us.

    Neither side shows a message of an earlier life, and groups of both begin anew in it. The other topic keeps its
    messages, and the groups their places in it.
    """
    need(version, java_build.tools_classpath)
    one = broker(version, memory, names)
    one.is_killed = False
    root = memory / "broker-a-0" / "store"
    config = StoreConfig.load(one.conf)
    kept = [f"kept{number}" for number in range(7)]
    put(root, config, GONE, [f"first{number}" for number in range(6)])
    put(root, config, KEPT, kept)
    assert (len(consumed(root, config, GONE)), len(consumed(root, config, KEPT))) == (6, 7)
    run("topic", "delete", root, GONE, "--yes")

    with one, Asked(names, one) as asked, Clients(drivers(NEWEST), names) as clients:
        COUNTS.stores += 1
        await_route(names, [one], KEPT)
        assert (asked.knows(GONE), asked.knows(KEPT)) == (False, True)
        assert (asked.ends(GONE), asked.ends(KEPT)) == ([0, 0], [4, 3])
        assert (asked.progress(GONE, OURS), asked.progress(KEPT, OURS)) == ({}, {0: 4, 1: 3})

        create_topic(names, [one], GONE)
        clients.producer().send(GONE, [message(b"second%d" % number) for number in range(5)])
        second = [f"second{number}" for number in range(5)]
        await_bodies(clients.push(GONE, "pushed"), second)
        await_bodies(clients.push(KEPT, "pushed-kept"), kept)

    assert (bodies(root, GONE), bodies(root, KEPT)) == (second, kept)
    assert (consumed(root, config, GONE), consumed(root, config, KEPT)) == (second, [])
    run("topic", "delete", root, GONE, "--yes")
    third = [f"third{number}" for number in range(3)]
    put(root, config, GONE, third)

    with one, Asked(names, one) as asked, Clients(drivers(NEWEST), names) as clients:
        COUNTS.stores += 1
        await_route(names, [one], GONE)
        assert (asked.ends(GONE), asked.ends(KEPT)) == ([2, 1], [4, 3])
        assert (asked.progress(GONE, "pushed"), asked.progress(KEPT, "pushed-kept")) == ({}, {0: 4, 1: 3})
        await_bodies(clients.push(GONE, "pushed"), third)

    assert (bodies(root, GONE), bodies(root, KEPT)) == (third, kept)
    with MessageStore.open(root):
        pass
    assert verify(root).ok


@pytest.mark.parametrize("recovers", [True, False], ids=["recovered", "left as it was"])
def test_a_broker_after_a_deletion_whose_process_was_killed(recovers: bool, names: NameServer, memory: Path) -> None:
    """With `messagestore recover` in between, the topic stays deleted.

    Without, the broker's recovery makes the queues of what the newest segments hold, as after a deletion of its own; the
    topic's settings are gone nevertheless, so no client gets a message. The other topic is whole in both cases.
    """
    one = broker(NEWEST, memory, names)
    one.is_killed = False
    root = memory / "broker-a-0" / "store"
    config = StoreConfig.load(one.conf)
    first, kept = [f"first{number}" for number in range(6)], ["kept0", "kept1", "kept2"]
    put(root, config, GONE, first)
    put(root, config, KEPT, kept)
    delete_and_die(root, GONE)
    assert bodies(root, GONE) == []
    if recovers:
        run("recover", root)

    with one, Asked(names, one) as asked:
        COUNTS.stores += 1
        await_route(names, [one], KEPT)
        assert (asked.knows(GONE), asked.knows(KEPT)) == (False, True)
        assert (asked.ends(GONE), asked.ends(KEPT)) == ([0, 0] if recovers else [3, 3], [2, 1])

    assert (bodies(root, GONE), bodies(root, KEPT)) == ([] if recovers else first, kept)
    with MessageStore.open(root):
        pass
    assert verify(root).ok
