"""Source and sink beside brokers in other forms: controller mode, DLedger, queues in RocksDB, and batch queues."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from benchmarks.peers import ports

from interop import java_build
from interop.cluster_clients import Clients, message
from interop.conftest import need
from interop.java_build import LEGACY, NEWEST
from interop.java_store import COUNTS, Driver
from interop.live import BATCH_QUEUES, ROCKSDB, broker, create_topic, dledger, put, soon
from interop.real_broker import NameServer, RealBroker
from interop.sender import rows, sent, sink_of
from interop.test_live_source import Query, bodies
from messagestore.remoting import Client, codes

GET_BROKER_HA_STATUS = 907
"""The request for which of its slaves a master knows to be in step."""
CONTROLLER = """\
enableControllerInNamesrv=true
controllerDLegerGroup=controllers
controllerDLegerPeers=n0-127.0.0.1:{port}
controllerDLegerSelfId=n0
controllerStorePath={folder}
scanNotActiveBrokerInterval=1000
"""
REPLICA = """\
enableControllerMode=true
controllerAddr=127.0.0.1:{port}
allAckInSyncStateSet=true
slaveReadEnable=true
controllerHeartBeatTimeoutMills=10000
brokerHeartbeatInterval=500
syncBrokerMetadataPeriod=500
syncControllerMetadataPeriod=1000
"""


@dataclass
class Forms:
    """A name server with a controller, and a broker of each form."""

    names: NameServer
    replicas: list[RealBroker]
    dledger: RealBroker
    rocksdb: RealBroker
    folder: Path


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forms]:
    for version in (NEWEST, LEGACY):
        need(version, java_build.tools_classpath)
    folder, port = tmp_path_factory.mktemp("forms"), ports.reserve()
    more = REPLICA.format(port=port)
    with contextlib.ExitStack() as stack:
        names = NameServer(NEWEST, folder / "names", more=CONTROLLER.format(port=port, folder=folder / "controller"))
        stack.enter_context(names)
        made = Forms(
            names,
            [broker(NEWEST, folder / str(number), names, more=more) for number in range(2)],
            broker(LEGACY, folder, names, "broker-d", more=dledger("broker-d")),
            broker(NEWEST, folder, names, "broker-r", more=ROCKSDB),
            folder,
        )
        for one in (*made.replicas, made.dledger, made.rocksdb):
            stack.enter_context(one)
        yield made
    COUNTS.stores += 4


def master(names: NameServer) -> str | None:
    """The address of the replica that the controller has chosen; None: there is none now."""
    with contextlib.closing(Client(str(names))) as client:
        chosen = client.brokers().get("broker-a")
        return None if chosen is None else chosen.master


def topic_on_all(forms: Forms, topic: str) -> None:
    """Make a topic on the brokers of each form, and wait until both replicas have it.

    The one that is not the master asks for topics every ten seconds. If it becomes the master before it knows the
    topic, as it may on a busy machine, the topic is gone and made again.
    """
    with contextlib.closing(Client(str(forms.names))) as client:

        def made() -> bool:
            create_topic(forms.names, [chosen_of(forms), forms.dledger, forms.rocksdb], topic)
            addresses = [f"127.0.0.1:{one.port}" for one in forms.replicas]
            return all(client.request(address, codes.GET_TOPIC_CONFIG, {"topic": topic}) for address in addresses)

        soon(made, bool)


def chosen_of(forms: Forms) -> RealBroker:
    """The replica that the controller has chosen."""
    address = soon(lambda: master(forms.names), bool)
    return next(one for one in forms.replicas if address == f"127.0.0.1:{one.port}")


def await_slave(forms: Forms) -> None:
    """Wait until the slave has all that its master has, so that the controller can choose it."""
    address = f"127.0.0.1:{chosen_of(forms).port}"
    with contextlib.closing(Client(str(forms.names))) as client:
        soon(
            lambda: json.loads(bytes(client.request(address, GET_BROKER_HA_STATUS, {}).body)),
            lambda status: status["inSyncSlaveNums"],
        )


def test_a_topic_with_batch_queues(forms: Forms, drivers: Callable[[str], Driver], tmp_path: Path) -> None:
    """Each message of a batch is a row with the number that RocketMQ's consumers show, also if a step ends within a
    batch and the query is killed there. The sink writes such topics, too.

    On a broker without a slave: the slaves of RocketMQ 5.3.3 take none of their master's topics over if one has an
    attribute ("only add attribute is supported while creating topic. key: ueue.type").
    """
    names = forms.names
    with broker(NEWEST, tmp_path, names, "broker-b") as alone, Clients(drivers(NEWEST), names) as clients:
        create_topic(names, [alone], "batched", attributes=BATCH_QUEUES)
        producer, count = clients.producer(), 0
        for size in range(1, 21):
            some = [message(body, tags="x", keys=f"k{size}") for body in bodies(f"batch {size}", size)]
            producer.send("batched", some, batch=True)
            count += size
        producer.send("batched", [message(b"single")])

        query = Query(names, subscribe="batched", maxOffsetsPerTrigger="17")
        soon(lambda: query.run(steps=1), lambda _: len(query.rows) == count + 1)
        sink = sink_of({"path": f"rocketmq://{names}", "topic": "batched", "lookupDir": str(tmp_path)})
        batches = rows(1, 300)
        assert (sent(sink, 1, *batches).repeated, sent(sink, 1, *batches).repeated) == (0, 300)
        soon(query.run, lambda _: len(query.rows) == count + 301)
        received = clients.push("batched", "of-batches").received(count + 301)
    of_java = [(one["queueId"], one["queueOffset"], one["body"]) for one in received]
    assert sorted(row[1:] for row in query.rows) == sorted(of_java)
    query.check(*(body for *_, body in of_java))


def test_a_topic_on_brokers_of_every_form(forms: Forms, drivers: Callable[[str], Driver], tmp_path: Path) -> None:
    """One query reads it, and one sink writes it, while each broker is killed once: every row is there once.

    The broker with a controller comes back as its other replica, and the other two on what they had stored.
    """
    names = forms.names
    topic_on_all(forms, "t")
    assert (forms.folder / "broker-d-0" / "store" / "dledger-n0").is_dir()
    assert (forms.folder / "broker-r-0" / "store" / "consumequeue" / "IDENTITY").is_file()

    def read(query: Query, count: int) -> None:
        soon(query.run, lambda _: len(query.rows) >= count)

    def write(batch_id: int) -> list[bytes]:
        """A micro-batch that Spark sends twice, because its first task died when all was sent."""
        batches = rows(batch_id, 900)
        assert sent(sink, batch_id, *batches).repeated == 0
        assert sent(sink, batch_id, *batches).repeated == 900
        return [body for batch in batches for body in batch["body"].to_pylist()]

    with Clients(drivers(NEWEST), names) as clients:
        query = Query(names, retryTimeout="90s")
        sink = sink_of({"path": f"rocketmq://{names}", "topic": "t", "retryTimeout": "90s", "lookupDir": str(tmp_path)})
        wanted = bodies("a", 100) + bodies("d", 100) + bodies("r", 100)
        for name in "adr":
            put(names, "t", bodies(name, 100), f"broker-{name}")
        wanted += write(1)
        read(query, 1200)
        query.check(*wanted)
        assert {name for name, *_ in query.rows} == {"broker-a", "broker-d", "broker-r"}

        await_slave(forms)
        chosen = chosen_of(forms)
        for one in (chosen, forms.dledger, forms.rocksdb):
            one.kill()
        for one in (forms.dledger, forms.rocksdb):
            one.begin()
        wanted += write(2)
        assert chosen_of(forms) is not chosen
        read(query, 2100)
        query.check(*wanted)
        received = clients.push("t").received(2100)
        assert sorted(one["body"] for one in received) == sorted(wanted)
