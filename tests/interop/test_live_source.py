"""The source and the command line beside brokers that run: `rocketmq://`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import StructType

from http_list import ListServer
from interop import java_build
from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS
from interop.live import await_route, broker, create_topic, put, soon
from interop.real_broker import NameServer
from messagestore import BrokerError, StoreWentBackwardsError
from messagestore.spi import STORES, Location, brokers_of
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source.cluster import ClusterBatchReader, ClusterStreamReader
from pyspark_messagestore.source.schema import Projection
from stream_steps import again

FIELDS = ("brokerName", "queueId", "queueOffset", "body")
SCHEMA = Projection.of(
    StructType().add("brokerName", "string").add("queueId", "integer").add("queueOffset", "long").add("body", "binary")
)


@pytest.fixture
def names(memory: Path) -> Iterator[NameServer]:
    need(NEWEST, java_build.tools_classpath)
    with NameServer(NEWEST, memory / "names") as server:
        yield server


def bodies(word: str, count: int) -> list[bytes]:
    return [b"%s %d" % (word.encode(), number) for number in range(count)]


class Query:
    """A stream that is started again before each step, as Spark would after a kill."""

    def __init__(self, names: NameServer, **options: str) -> None:
        self.options = {"path": f"rocketmq://{names}", "subscribe": "t", "startingOffsets": "earliest", **options}
        self.start: Any = None
        self.rows: list[tuple[Any, ...]] = []

    def reader(self) -> ClusterStreamReader:
        return ClusterStreamReader(source_options(self.options), SCHEMA, STORES)

    def run(self, steps: int = 1_000_000) -> int:
        """Read what there is, in so many steps at most; returns how many messages came."""
        reader, before = self.reader(), len(self.rows)
        try:
            self.start = self.start or again(reader.initialOffset())
            for _ in range(steps):
                end = again(reader.latestOffset(self.start, reader.getDefaultReadLimit()))
                if end == self.start:
                    break
                for partition in reader.partitions(self.start, end):
                    for rows in reader.read(partition):
                        self.rows += zip(*(rows[name].to_pylist() for name in FIELDS), strict=True)
                self.start = end
        finally:
            reader.stop()
        COUNTS.messages += len(self.rows) - before
        return len(self.rows) - before

    def check(self, *wanted: bytes) -> None:
        """Each message once, and the numbers of each queue without a gap."""
        assert sorted(body for *_, body in self.rows) == sorted(wanted)
        queues: dict[tuple[str, int], list[int]] = {}
        for name, queue_id, number, _ in self.rows:
            queues.setdefault((name, queue_id), []).append(number)
        assert all(numbers == [*range(len(numbers))] for numbers in queues.values())


def test_two_brokers_one_of_which_is_killed_and_comes_back(memory: Path, names: NameServer) -> None:
    """The query waits for the broker, and reads on: each message once."""
    with broker(NEWEST, memory, names) as a, broker(NEWEST, memory, names, "broker-b") as b:
        create_topic(names, [a, b], "t")
        first, second = bodies("first", 300), bodies("second", 500)
        put(names, "t", first)
        put(names, "t", second, "broker-b")
        query = Query(names, maxOffsetsPerTrigger="130", retryTimeout="90s")
        assert query.run() == 800
        query.check(*first, *second)

        options = {name: value for name, value in query.options.items() if name != "maxOffsetsPerTrigger"}
        with ListServer() as lists:  # its first name server is down
            lists.text = f"127.0.0.1:1;{names}\n"
            batch = ClusterBatchReader(source_options({**options, "path": f"rocketmq+{lists.url}"}), SCHEMA, STORES)
            assert sum(rows.num_rows for part in batch.partitions() for rows in batch.read(part)) == 800

        third = bodies("third", 100)
        put(names, "t", third)
        assert b.process is not None
        b.process.kill()
        b.process.wait()
        with b:
            assert query.run() == 100
            fourth = bodies("fourth", 10)
            soon(lambda: put(names, "t", fourth, "broker-b"), lambda _: True)
            assert query.run() == 10
        query.check(*first, *second, *third, *fourth)
        COUNTS.stores += 2


def test_a_slave_is_read_while_the_master_is_down(memory: Path, names: NameServer) -> None:
    """A query that begins now gets all that the slave has, one that was running goes on, and both when it is back."""
    master = broker(NEWEST, memory, names)
    slave = broker(NEWEST, memory, names, broker_id=1, more="slaveReadEnable=true\n")
    first, second = bodies("first", 200), bodies("second", 50)
    query, late = Query(names), Query(names)
    with slave:
        with master:
            create_topic(names, [master], "t")
            put(names, "t", first)
            assert query.run() == 200
            follower = STORES.reader(Location.of(f"rocketmq://{names}/broker-a").reached_by(read_from="slave"))
            # The slave, not its master, which is asked for some seconds when the slave is slow to answer
            soon(lambda: follower.ends(["t"]), lambda ends: sum(ends.queues.values()) == 200 and not ends.recovered)
            # Every minute, a slave takes over its master's topics, without which it answers no pull
            topics = memory / "broker-a-1" / "store" / "config" / "topics.json"
            soon(lambda: json.loads(topics.read_bytes()), lambda found: "t" in found["topicConfigTable"])
            follower.close()
            assert master.process is not None
            master.process.kill()
            master.process.wait()
        assert late.run() == 200
        assert query.run() == 0
        with master:
            soon(lambda: put(names, "t", second), lambda _: True)
            for one in (query, late):
                total = soon(lambda one=one: (one.run(), len(one.rows))[1], lambda count: count == 250)
                assert total == 250
                one.check(*first, *second)
    COUNTS.stores += 2


def test_a_broker_that_is_older_than_the_checkpoint(memory: Path, names: NameServer) -> None:
    """A broker that was restored from a copy has other messages under the same numbers: the query is refused."""
    query = Query(names, retryTimeout="90s")
    a = broker(NEWEST, memory, names)
    store, copy = memory / "broker-a-0" / "store", memory / "copy"
    with a:
        create_topic(names, [a], "t")
        put(names, "t", bodies("before", 20))
        assert query.run() == 20
        a.stop()
    shutil.copytree(store, copy)
    with a:
        soon(lambda: put(names, "t", bodies("lost", 20)), lambda _: True)
        assert query.run() == 20
    shutil.rmtree(store)
    copy.rename(store)
    with a:
        await_route(names, [a], "t")
        with pytest.raises(StoreWentBackwardsError, match="broker-a"):
            query.run()
        soon(lambda: put(names, "t", bodies("after", 60)), lambda _: True)
        with pytest.raises(StoreWentBackwardsError, match="broker-a"):
            query.run()
    COUNTS.stores += 1


def test_a_topic_that_was_deleted_and_made_again(memory: Path, names: NameServer) -> None:
    query = Query(names)
    with broker(NEWEST, memory, names) as a:
        create_topic(names, [a], "t")
        put(names, "t", bodies("before", 20))
        assert query.run() == 20
        names.mqadmin("deleteTopic", "-c", "DefaultCluster", "-t", "t")
        create_topic(names, [a], "t")
        put(names, "t", bodies("after", 60))
        with pytest.raises(StoreWentBackwardsError, match="broker-a"):
            query.run()
    COUNTS.stores += 1


def test_consumer_progress_while_the_broker_runs(memory: Path, names: NameServer) -> None:
    """mqadmin shows the lag of a query, although the broker keeps all offsets itself."""
    query = Query(names, consumerGroup="spark-flights", maxOffsetsPerTrigger="8")
    with broker(NEWEST, memory, names) as a:
        create_topic(names, [a], "t")
        create_topic(names, [a], "%RETRY%spark-flights", 1)
        put(names, "t", bodies("x", 12))
        assert query.run() == 12
        put(names, "t", bodies("y", 4))
        text = soon(
            lambda: names.mqadmin("consumerProgress", "-g", "spark-flights"), lambda text: "Diff Total: 4" in text
        )
        rows = [line.split() for line in text.splitlines() if line.startswith("t ")]
        assert sorted((row[1], int(row[2]), int(row[3]), int(row[4])) for row in rows) == [
            ("broker-a", 0, 8, 6),
            ("broker-a", 1, 8, 6),
        ]
    COUNTS.stores += 1


def test_a_put_ends_the_wait_of_a_reader(memory: Path, names: NameServer) -> None:
    """The broker keeps a pull of each queue: an idle reader asks only now and then, and each message ends its wait."""
    with broker(NEWEST, memory, names) as a:
        create_topic(names, [a], "t", 4)
        store = STORES.reader(Location.of(f"rocketmq://{names}"))
        found = store.ends(["t"], store.ends(["t"]))
        for number in range(100):
            sender = threading.Thread(target=put, args=(names, "t", [b"%d" % number] * (1 + number % 4)))
            sender.start()
            wanted = sum(found.queues.values()) + 1 + number % 4
            while sum(found.queues.values()) < wanted:
                store.await_change(60)
                found = store.ends(["t"], found)
            sender.join()
            COUNTS.messages += 1 + number % 4
        waiter = threading.Thread(target=store.await_change, args=(600,), daemon=True)
        waiter.start()
        store.close()
        waiter.join(60)
        assert not waiter.is_alive()
    COUNTS.stores += 1


ACL = """\
authenticationEnabled=true
authenticationProvider=org.apache.rocketmq.auth.authentication.provider.DefaultAuthenticationProvider
authenticationMetadataProvider=org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider
initAuthenticationUser={"username":"rocketmq","password":"12345678"}
innerClientAuthenticationCredentials={"accessKey":"rocketmq","secretKey":"12345678"}
authorizationEnabled=true
authorizationProvider=org.apache.rocketmq.auth.authorization.provider.DefaultAuthorizationProvider
authorizationMetadataProvider=org.apache.rocketmq.auth.authorization.provider.LocalAuthorizationMetadataProvider
"""


def test_a_consumers_permission_is_enough(memory: Path, names: NameServer) -> None:
    """ACL 2.0: a user who may subscribe to the topic reads it; without a key, or with a wrong one, the refusal is told."""
    home = memory / "names" / "conf"
    home.mkdir(exist_ok=True)
    (home / "tools.yml").write_text("accessKey: rocketmq\nsecretKey: 12345678\n")
    own, wrong = memory / "spark.yml", memory / "wrong.yml"
    own.write_text("accessKey: spark\nsecretKey: 87654321\n")
    wrong.write_text("accessKey: spark\nsecretKey: 11111111\n")
    with broker(NEWEST, memory, names, more=ACL) as a:
        create_topic(names, [a], "t", credentials=home / "tools.yml")
        put(names, "t", bodies("x", 40), credentials=home / "tools.yml")
        address = ("-b", f"127.0.0.1:{a.port}")
        made = names.mqadmin("createUser", *address, "-u", "spark", "-p", "87654321", "-t", "Normal")
        assert "success" in made, made
        allowed = ("-s", "User:spark", "-r", "Topic:t,Group:TOOLS_CONSUMER", "-a", "Sub,Get", "-d", "Allow")
        made = names.mqadmin("createAcl", *address, *allowed)
        assert "success" in made, made

        query = Query(names, credentialsFile=str(own))
        assert query.run() == 40
        query.check(*bodies("x", 40))
        assert query.run() == 0
        for options in ({}, {"credentialsFile": str(wrong)}):
            with pytest.raises(BrokerError, match=r"broker-a.*16 NO_PERMISSION"):
                Query(names, **options).run()
    COUNTS.stores += 1


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyspark_messagestore.command", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_the_command_line_asks_a_broker(memory: Path, names: NameServer) -> None:
    with broker(NEWEST, memory, names) as a:
        create_topic(names, [a], "t")
        put(names, "t", bodies("x", 6))
        path = f"rocketmq://{names}"
        shown = run("get", path, "t", "--json")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.count('"queueOffset"') == 6
        assert "x 5" in run("tail", path, "t", "--count", "3").stdout
        rows = [json.loads(line) for line in run("offsets", path, "t", "--json").stdout.splitlines()]
        assert [(row["queueId"], row["minOffset"], row["maxOffset"]) for row in rows] == [(0, 0, 3), (1, 0, 3)]
        topics = [json.loads(line) for line in run("topics", path, "--json").stdout.splitlines()]
        assert [row["messages"] for row in topics if row["topic"] == "t"] == [6]
        assert Query(names, consumerGroup="spark", maxOffsetsPerTrigger="4").run() == 6
        put(names, "t", bodies("y", 3))
        behind = [json.loads(line) for line in run("lag", path, "--group", "spark", "--json").stdout.splitlines()]
        assert sum(row["lag"] for row in behind) > 0
        assert all(row["lag"] == row["maxOffset"] - row["committedOffset"] for row in behind)
        put(names, "t", [b"with a key"], properties={"KEYS": "k other", "UNIQ_KEY": "ID1"})
        refused = run("verify", path)
        assert refused.returncode != 0
        assert "needs the store's files" in refused.stderr
        with broker(NEWEST, memory, names, "broker-b"):
            location = Location.of(path)
            soon(lambda: brokers_of(location), lambda parts: len(parts) == 2)
            for address in (path, str(location.of_broker("broker-a"))):
                assert run("get", address, "t").stdout.count("x ") == 6
            rows = [json.loads(line) for line in run("topics", path, "--json").stdout.splitlines()]
            assert {row["brokerName"] for row in rows} == {"broker-a", "broker-b"}
            found = [
                json.loads(line)
                for line in run("find", path, "--topic", "t", "--key", "k", "--json").stdout.splitlines()
            ]
            assert [(row["brokerName"], row["body"]) for row in found] == [("broker-a", "with a key")]
            assert len(run("find", path, "--topic", "t", "--unique-key", "ID1").stdout.splitlines()) == 1
    COUNTS.stores += 1
