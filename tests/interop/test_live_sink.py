"""The sink beside brokers that run, and RocketMQ's own consumers of what it sends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from interop import java_build
from interop.cluster_clients import Clients
from interop.conftest import HERE, need
from interop.java_build import LEGACY, NEWEST
from interop.java_store import COUNTS, Driver
from interop.live import broker, create_topic, soon
from interop.real_broker import NameServer
from interop.sender import COLUMNS, rows, sent, sink_of
from interop.test_live_source import ACL
from messagestore import BatchConflictError, BrokerError, ConfigError, MessageIllegalError, UnknownTopicError
from messagestore.remoting import Client, QueueData, codes
from messagestore.spi import STORES, Location, Range

ROWS = 20_000
BATCHES = 3


@pytest.fixture
def names(memory: Path) -> Iterator[NameServer]:
    need(NEWEST, java_build.tools_classpath)
    with NameServer(NEWEST, memory / "names") as server:
        yield server


def options(names: NameServer, memory: Path, **more: str) -> dict[str, str]:
    return {"path": f"rocketmq://{names}", "topic": "t", "lookupDir": str(memory / "lookups"), **more}


def bodies(*batches: pa.RecordBatch) -> list[bytes]:
    return [body for batch in batches for body in batch["body"].to_pylist()]


class Ends:
    """How many messages the queues of a topic have."""

    def __init__(self, names: NameServer) -> None:
        self._client = Client(str(names))

    def count(self, topic: str = "t") -> int:
        try:
            return self._count(topic)
        finally:
            self._client.close()

    def _count(self, topic: str) -> int:
        route = self._client.route(topic)
        return sum(
            self._client.request(
                str(route.brokers[name].master), codes.GET_MAX_OFFSET, {"topic": topic, "queueId": queue_id}
            ).number("offset")
            for name, data in route.queues.items()
            for queue_id in range(data.write_queue_nums)
        )


def begun(given: dict[str, str], batch_id: int) -> subprocess.Popen[bytes]:
    """A process that sends a batch."""
    command = [sys.executable, "-m", "interop.sender", json.dumps(given), str(batch_id), str(ROWS)]
    search = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": search}, stdout=subprocess.PIPE)


def is_past(ends: Ends, count: int, process: subprocess.Popen[bytes]) -> Callable[[], bool]:
    return lambda: process.poll() is not None or ends.count() > count


@pytest.mark.parametrize("version", [NEWEST, LEGACY])
def test_a_push_consumer_gets_every_field_that_was_written(
    names: NameServer, memory: Path, drivers: Callable[[str], Driver], version: str
) -> None:
    need(version, java_build.tools_classpath)
    columns = (*COLUMNS, ("queueId", "int"), ("bornTimestamp", "bigint"), ("flag", "int"))
    batch = rows(0, 300)[0]
    large = b"x" * 200_000
    own = {
        "queueId": pa.array([number % 3 for number in range(300)], pa.int32()),
        "bornTimestamp": pa.array([1_700_000_000_000 + number // 100 for number in range(300)], pa.int64()),
        "flag": pa.array(range(300), pa.int32()),
    }
    for name, column in own.items():
        batch = batch.append_column(name, column)
    whole = [*bodies(batch)]
    whole[7] = large
    batch = batch.set_column(0, "body", pa.array(whole, pa.binary()))

    with broker(version, memory, names) as one, Clients(drivers(NEWEST), names) as clients:
        create_topic(names, [one], "t", 3)
        message = sent(sink_of(options(names, memory), columns), 0, batch)
        assert (message.rows, message.repeated) == (300, 0)
        received = clients.push("t").received(300)
    COUNTS.stores += 1
    COUNTS.messages += 300

    assert len(received) == 300
    by_queue: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for one_message in sorted(received, key=lambda each: each["queueOffset"]):
        number = one_message["flag"]
        by_queue[one_message["queueId"]].append(number)
        assert one_message["body"] == whole[number]
        assert one_message["bornTimestamp"] == 1_700_000_000_000 + number // 100
        assert one_message["tags"] == ("even" if number % 2 == 0 else None)
        assert one_message["keys"] == f"0/{number}"
        assert one_message["properties"]["number"] == str(number)
        assert one_message["properties"]["UNIQ_KEY"] == one_message["msgId"]
        assert one_message["sysFlag"] == 0 and one_message["reconsumeTimes"] == 0
    assert by_queue == {queue: [*range(queue, 300, 3)] for queue in range(3)}


def test_a_sender_that_is_killed_in_the_middle_of_batches(
    names: NameServer, memory: Path, drivers: Callable[[str], Driver]
) -> None:
    """Each batch is sent again as often as its process was killed: no row is missing, and none is there twice."""
    with (
        broker(NEWEST, memory, names) as a,
        broker(NEWEST, memory, names, "broker-b") as b,
        Clients(drivers(NEWEST), names) as clients,
    ):
        create_topic(names, [a, b], "t", 4)
        given, ends, kills = options(names, memory), Ends(names), 0
        for batch_id in range(BATCHES):
            for target in (batch_id * ROWS + 100, batch_id * ROWS + ROWS // 2):
                process = begun(given, batch_id)
                soon(is_past(ends, target, process), bool)
                kills += process.poll() is None
                process.kill()
                process.communicate()
            output, _ = begun(given, batch_id).communicate(timeout=120)
            told = json.loads(output)
            assert told["rows"] == ROWS

        assert kills >= BATCHES
        assert ends.count() == BATCHES * ROWS
        received = Counter(one["body"] for one in clients.push("t").received(BATCHES * ROWS))
    COUNTS.stores += 2
    COUNTS.messages += BATCHES * ROWS
    assert received == Counter(body for batch_id in range(BATCHES) for body in bodies(*rows(batch_id, ROWS)))


def test_a_broker_that_is_killed_and_comes_back_under_the_sink(names: NameServer, memory: Path) -> None:
    """The sink waits for it, looks up what it stored of the request that had no answer, and goes on."""
    a, b = broker(NEWEST, memory, names), broker(NEWEST, memory, names, "broker-b")
    with a, b:
        create_topic(names, [a, b], "t", 2)
        ends = Ends(names)
        process = begun(options(names, memory, retryTimeout="120s"), 0)
        soon(is_past(ends, ROWS // 4, process), bool)
        is_killed_meanwhile = process.poll() is None
        b.kill()
        b.begin().wait()
        output, _ = process.communicate(timeout=180)
        assert is_killed_meanwhile
        assert json.loads(output) == {"rows": ROWS, "repeated": 0}
        soon(ends.count, lambda count: count == ROWS)
        found = sent_bodies(names, "broker-a", "broker-b")
    COUNTS.stores += 2
    COUNTS.messages += ROWS
    assert Counter(found) == Counter(bodies(*rows(0, ROWS)))


def sent_bodies(names: NameServer, *brokers: str, topic: str = "t") -> list[bytes]:
    """The bodies of all messages of a topic, as the source reads them."""
    found: list[bytes] = []
    for name in brokers:
        reader = STORES.reader(Location.of(f"rocketmq://{names}/{name}"))
        for (_, queue_id), end in reader.ends([topic]).queues.items():
            for part in reader.gather([Range(topic, queue_id, 0, end)]):
                found += part.decoded(["body"])["body"].to_pylist()
        reader.close()
    return found


def test_a_batch_that_comes_again_with_other_rows(names: NameServer, memory: Path) -> None:
    with broker(NEWEST, memory, names) as one:
        create_topic(names, [one], "t")
        sink = sink_of(options(names, memory))
        assert sent(sink, 5, *rows(5, 1200)).repeated == 0
        soon(Ends(names).count, lambda count: count == 1200)
        again = sent(sink, 5, *rows(5, 1500))
        assert (again.rows, again.repeated) == (1500, 1200)
        with pytest.raises(BatchConflictError, match="was sent before with other rows"):
            sent(sink, 5, *rows(6, 1200))
        assert Ends(names).count() == 1500

        sink.commit([again], 5)
        assert len([*(memory / "lookups").rglob("*.json")]) == 1, "Spark may send it again"
        sink.commit([sent(sink, 6, *rows(6, 10))], 6)
        assert [path.name for path in (memory / "lookups").rglob("*.json")] == ["6-0-t.json"]
    COUNTS.stores += 1


def perms(client: Client) -> list[QueueData]:
    """What each broker says about the topic, by way of the name server."""
    try:
        return [*client.route("t", fresh=True).queues.values()]
    finally:
        client.close()


def test_what_is_refused_before_the_first_row(names: NameServer, memory: Path) -> None:
    with broker(NEWEST, memory, names) as a, broker(NEWEST, memory, names, "broker-b") as b:
        create_topic(names, [a, b], "t")
        given = options(names, memory)
        with pytest.raises(UnknownTopicError, match="missing"):
            sink_of({**given, "topic": "missing", "retryTimeout": "1s"})
        with pytest.raises(ConfigError, match="column queueId: found together with topic t, which has queues"):
            sink_of(given, (("body", "binary"), ("queueId", "int")))
        only_a = {**given, "path": f"{given['path']}/broker-a"}
        sink_of(only_a, (("body", "binary"), ("queueId", "int")))
        batch = pa.record_batch({"body": [b"x"], "delayTimeLevel": pa.array([3], pa.int32())})
        with pytest.raises(MessageIllegalError, match="row 0: delayTimeLevel: found 3"):
            sent(sink_of(given, (("body", "binary"), ("delayTimeLevel", "int"))), 0, batch)
        topics = pa.record_batch({"body": [b"x"], "topic": ["%RETRY%g"]})
        by_column = {key: value for key, value in given.items() if key != "topic"}
        sink = sink_of(by_column, (("body", "binary"), ("topic", "string")))
        with pytest.raises(MessageIllegalError, match="topic: found '%RETRY%g'"):
            sent(sink, 0, topics)

        names.mqadmin("updateTopicPerm", "-c", "DefaultCluster", "-t", "t", "-p", "4")
        soon(lambda: Client(str(names)), lambda client: not any(data.is_writable for data in perms(client)))
        with pytest.raises(ConfigError, match=r"found no queue .* broker-a gives no permission to write it \(perm 4\)"):
            sink_of(given)
        assert Ends(names).count() == 0
    COUNTS.stores += 1


def test_a_user_needs_the_rights_to_publish_and_to_look_up(memory: Path, names: NameServer) -> None:
    """ACL 2.0: a user with both sends, and one who lacks either is refused before the first row."""
    home = memory / "names" / "conf"
    home.mkdir(exist_ok=True)
    (home / "tools.yml").write_text("accessKey: rocketmq\nsecretKey: 12345678\n")
    with broker(NEWEST, memory, names, more=ACL) as a:
        create_topic(names, [a], "t", credentials=home / "tools.yml")
        address = ("-b", f"127.0.0.1:{a.port}")
        users = {"both": "Pub,Sub,Get", "publisher": "Pub,Get", "subscriber": "Sub,Get"}
        for user, actions in users.items():
            (memory / f"{user}.yml").write_text(f"accessKey: {user}\nsecretKey: 87654321\n")
            made = names.mqadmin("createUser", *address, "-u", user, "-p", "87654321", "-t", "Normal")
            assert "success" in made, made
            for resource, action in (("Topic:t", actions), ("Group:TOOLS_CONSUMER", "Sub")):
                allowed = ("-s", f"User:{user}", "-r", resource, "-a", action, "-d", "Allow")
                made = names.mqadmin("createAcl", *address, *allowed)
                assert "success" in made, made

        given = options(names, memory)
        sink = sink_of({**given, "credentialsFile": str(memory / "both.yml")})
        assert sent(sink, 0, *rows(0, 700)).rows == 700
        assert sent(sink, 0, *rows(0, 700)).repeated == 700
        for user in ("publisher", "subscriber"):
            with pytest.raises(BrokerError, match=r"broker-a .* answered 16 NO_PERMISSION"):
                sink_of({**given, "credentialsFile": str(memory / f"{user}.yml")})
        with pytest.raises(BrokerError, match=r"broker-a .* answered 16 NO_PERMISSION"):
            sink_of(given)
    COUNTS.stores += 1
