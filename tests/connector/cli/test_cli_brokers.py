"""Commands that ask RocketMQ's brokers: `find`, `topics`, `offsets`, `lag`, `get` and `tail` with the address of name
servers.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_runs import TIMEOUT_S, error, finish, lines, objects, read_lines, run, start
from fake_broker import NAME, Broker
from http_list import ListServer

HOUR_MS = 3_600_000
TIME_MS = 1_700_000_000_000


@pytest.fixture
def broker() -> Iterator[Broker]:
    """Two brokers, of which the first is the name server."""
    broker, other = Broker(), Broker(name="broker-b")
    for number in range(6):
        broker.put("t", number % 2, b"a%d" % number, TIME_MS + number, keys=["k1", f"k{number}"])
    for number in range(3):
        other.put("t", 0, b"b%d" % number, TIME_MS + 10 + number, keys=["k1"], unique_key=f"U{number}")
    other.put("only-b", 0, b"x")
    with other.serve(), broker.serve():
        broker.others.append(other)
        yield broker


def path(broker: Broker, name: str = "") -> str:
    return f"rocketmq://{broker.address}" + (f"/{name}" if name else "")


def test_a_server_that_lists_name_servers(broker: Broker) -> None:
    """Each command takes its URL, also with the name of one broker. Those that need files say what to use instead."""
    with ListServer() as lists:
        lists.text = f"{broker.address}\n"
        address = f"rocketmq+{lists.url}"
        found = objects(run("get", address, "t", "--count", 20, "--json"))
        assert Counter(row["brokerName"] for row in found) == {NAME: 6, "broker-b": 3}
        found = objects(run("get", f"{address}#broker-b", "t", "--count", 1, "--json"))
        assert [row["body"] for row in found] == ["b0"]
        assert "use RocketMQ's mqadmin" in error("groups", address, code=2)


# ---- find


def test_a_key_is_found_on_every_broker(broker: Broker) -> None:
    """In the order of store times, each message with its broker. Other keys with the same hash are left out."""
    found = objects(run("find", path(broker), "--topic", "t", "--key", "k1", "--json"))
    assert [(row["brokerName"], row["body"]) for row in found] == [
        *((NAME, f"a{number}") for number in range(6)),
        *(("broker-b", f"b{number}") for number in range(3)),
    ]
    assert [row["body"] for row in objects(run("find", path(broker), "--topic", "t", "--key", "k3", "--json"))] == [
        "a3"
    ]
    (line,) = lines(run("find", path(broker), "--topic", "t", "--unique-key", "U1"))
    assert line.startswith("broker-b  t/0 @1")
    found = objects(run("find", path(broker, NAME), "--topic", "t", "--key", "k1", "--count", 2, "--json"))
    assert [row["body"] for row in found] == ["a4", "a5"]


def test_times_bound_what_is_found(broker: Broker) -> None:
    bounds = ["--from", TIME_MS + 2, "--to", TIME_MS + 11]
    found = objects(run("find", path(broker), "--topic", "t", "--key", "k1", *bounds, "--json"))
    assert [row["body"] for row in found] == ["a2", "a3", "a4", "a5", "b0", "b1"]


def test_more_messages_than_a_broker_shows_at_once(broker: Broker) -> None:
    """A broker shows 64. Older ones are asked for, until there are none; another key with the same hash hides nothing."""
    for number in range(300):
        broker.put("t", 0, b"n%d" % number, TIME_MS + HOUR_MS + 50 * number, keys=["z1" if number % 3 == 0 else "z2"])
    found = objects(run("find", path(broker), "--topic", "t", "--key", "z1", "--count", 1000, "--json"))
    assert [row["body"] for row in found] == [f"n{number}" for number in range(0, 300, 3)]
    found = objects(run("find", path(broker), "--topic", "t", "--key", "z1", "--count", 5, "--json"))
    assert [row["body"] for row in found] == [f"n{number}" for number in range(285, 300, 3)]


def test_more_messages_in_a_second_than_a_broker_shows(broker: Broker) -> None:
    """What the index cannot show is said, and the messages before and behind that second are found all the same."""
    for word, count, time_ms in (("sooner", 3, HOUR_MS // 2), ("n", 100, HOUR_MS), ("later", 3, 2 * HOUR_MS)):
        for number in range(count):
            broker.put("t", 0, b"%s%d" % (word.encode(), number), TIME_MS + time_ms, keys=["z"])
    done = run("find", path(broker), "--topic", "t", "--key", "z", "--count", 1000, "--json", code=1)
    assert "the broker shows 64 messages with this key, and no more, of the second" in done.stderr
    found = [row["body"] for row in map(json.loads, done.stdout.splitlines())]
    assert len(found) == 3 + 64 + 3
    assert (found[0], found[-1]) == ("sooner0", "later2")


def test_what_is_not_found(broker: Broker) -> None:
    assert run("find", path(broker), "--topic", "t", "--key", "absent", code=1).stderr == "no message found\n"
    assert "there is no topic 'missing'" in error(
        "find", path(broker), "--topic", "missing", "--key", "k1", "--retry-timeout", "100ms", code=2
    )
    assert "It is on the brokers broker-b, not on broker-a" in error(
        "find", path(broker, NAME), "--topic", "only-b", "--key", "k", code=2
    )
    for wrong in (["--key", "k"], ["--topic", "t", "--key", "k", "--store-config", "x"]):
        assert "They find messages of a topic by key: give --topic" in error("find", path(broker), *wrong, code=2)


# ---- get and tail


def test_get_shows_the_queues_of_every_broker(broker: Broker) -> None:
    rows = objects(run("get", path(broker), "t", "--json"))
    assert [(row["brokerName"], row["queueId"], row["body"]) for row in rows] == [
        *((NAME, 0, f"a{number}") for number in (0, 2, 4)),
        *((NAME, 1, f"a{number}") for number in (1, 3, 5)),
        *(("broker-b", 0, f"b{number}") for number in range(3)),
    ]
    assert [line.split()[0] for line in lines(run("get", path(broker), "t", 0, "--count", 1))] == [NAME, "broker-b"]
    assert [row["body"] for row in objects(run("get", path(broker), "t", 1, "--json"))] == ["a1", "a3", "a5"]
    last = run("get", path(broker), "t", 0, "--offset", 2, "--json")
    assert [row["body"] for row in objects(last)] == ["a4", "b2"]
    assert [row["body"] for row in objects(run("get", path(broker, "broker-b"), "t", "--json"))] == ["b0", "b1", "b2"]
    assert (
        f"{NAME}: t/1: no message at 7. The queue holds 0 to 2"
        in run("get", path(broker), "t", 1, "--offset", 7, code=1).stderr
    )
    assert "t: the topic has no queue 5. Its queues are 0, 1" in error("get", path(broker), "t", 5, code=2)
    assert "there is no topic 'missing'" in error("get", path(broker), "missing", code=2)


def test_tail_shows_the_newest_messages_of_all_brokers(broker: Broker) -> None:
    """In the order of store times."""
    rows = objects(run("tail", path(broker), "t", "--json", "--count", 5))
    assert [(row["brokerName"], row["body"]) for row in rows] == [
        (NAME, "a4"),
        (NAME, "a5"),
        *(("broker-b", f"b{number}") for number in range(3)),
    ]
    rows = objects(run("tail", path(broker), "t", "only-b", "--json", "--from", "earliest"))
    assert sorted(row["body"] for row in rows) == sorted(
        [*(f"a{n}" for n in range(6)), *(f"b{n}" for n in range(3)), "x"]
    )
    times_ms = [row["storeTimestamp"] for row in rows if row["topic"] == "t"]
    assert times_ms == sorted(times_ms)
    assert len(objects(run("tail", path(broker), "--json", "--count", 100))) == 10
    assert [row["body"] for row in objects(run("tail", path(broker, NAME), "--json", "--count", 2))] == ["a4", "a5"]
    assert "there is no topic 'missing'" in error("tail", path(broker), "t", "missing", code=2)


def test_tail_follows_all_brokers_and_those_that_come(broker: Broker) -> None:
    """A topic that no broker has yet is waited for, and a broker that comes is read from its first message."""
    third = Broker(name="broker-c")
    third.put("t", 0, b"c0")
    third.put("t", 0, b"c1")
    process = start("tail", path(broker), "t", "later", "--follow", "--json", "--from", "latest", "--count", 5)
    assert process.stderr is not None
    assert process.stderr.readline() == "these topics do not exist yet: later\n"
    until_s = time.monotonic() + TIMEOUT_S
    while not (broker.kept and broker.others[0].kept):  # it has skipped what there was, and waits at all brokers
        assert process.poll() is None
        assert time.monotonic() < until_s
        time.sleep(0.01)
    broker.put("t", 1, b"new a")
    (first,) = read_lines(process, 1)
    broker.others[0].put("t", 0, b"new b")
    (second,) = read_lines(process, 1)
    broker.others[0].put("later", 0, b"new topic")
    (later,) = read_lines(process, 1)
    with third.serve():
        broker.others.append(third)
        stdout, _ = finish(process)
    rows = [json.loads(line) for line in (first, second, later, *stdout.splitlines())]
    assert [(row["brokerName"], row["body"]) for row in rows] == [
        (NAME, "new a"),
        ("broker-b", "new b"),
        ("broker-b", "new topic"),
        ("broker-c", "c0"),
        ("broker-c", "c1"),
    ]


# ---- the brokers of a cluster


def test_each_row_names_its_broker(broker: Broker) -> None:
    topics = objects(run("topics", path(broker), "--json"))
    assert [(row["brokerName"], row["topic"], row["messages"]) for row in topics] == [
        (NAME, "t", 6),
        ("broker-b", "only-b", 1),
        ("broker-b", "t", 3),
    ]
    assert lines(run("topics", path(broker)))[1].split()[:3] == [NAME, "t", "6"]
    offsets = objects(run("offsets", path(broker), "--json"))
    assert [(row["brokerName"], row["topic"], row["queueId"], row["maxOffset"]) for row in offsets] == [
        (NAME, "t", 0, 3),
        (NAME, "t", 1, 3),
        ("broker-b", "only-b", 0, 1),
        ("broker-b", "t", 0, 3),
    ]
    head, *rows = [line.split() for line in lines(run("offsets", path(broker), "t"))]
    assert head == ["broker", "topic", "queue", "min", "max", "messages"]
    assert [row[0] for row in rows] == [NAME, NAME, "broker-b"]
    one = objects(run("offsets", path(broker, "broker-b"), "--json"))
    assert {row["brokerName"] for row in one} == {"broker-b"}


def test_a_topic_that_only_some_brokers_have(broker: Broker) -> None:
    rows = objects(run("offsets", path(broker), "only-b", "t", "--json"))
    assert [(row["brokerName"], row["topic"]) for row in rows] == [
        (NAME, "t"),
        (NAME, "t"),
        ("broker-b", "only-b"),
        ("broker-b", "t"),
    ]
    assert "there is no topic 'missing'" in error("offsets", path(broker), "missing", code=2)
    assert "topic 'only-b' is not in the store" in error("offsets", path(broker, NAME), "only-b", code=2)


def test_the_lag_of_a_group(broker: Broker) -> None:
    broker.groups["g", "t", 0] = 1
    broker.others[0].groups["g", "t", 0] = 3
    rows = objects(run("lag", path(broker), "--group", "g", "--json"))
    assert [(row["brokerName"], row["queueId"], row["lag"]) for row in rows] == [
        (NAME, 0, 2),
        (NAME, 1, 3),
        ("broker-b", 0, 0),
    ]
    assert "5 messages" in run("lag", path(broker), "--group", "g").stdout


def checkpoint(folder: Path, offset: object) -> Path:
    """The checkpoint of a query with one batch that is done."""
    (folder / "offsets").mkdir(parents=True)
    (folder / "commits").mkdir()
    (folder / "metadata").write_text('{"id":"q"}')
    (folder / "offsets" / "0").write_text("\n".join(["v1", "{}", json.dumps(offset)]))
    (folder / "commits" / "0").write_text('v1\n{"nextBatchWatermarkMs":0}')
    return folder


def of_queues(*ends: int) -> dict[str, object]:
    from pyspark_messagestore.source.offsets import StreamOffset

    queues = {("t", queue_id): end for queue_id, end in enumerate(ends)}
    return StreamOffset(topics=frozenset({"t"}), queues=queues, physical_offset=1 << 40).to_json()


def test_the_lag_of_a_query_over_a_cluster(broker: Broker, tmp_path: Path) -> None:
    offset = {"brokers": {NAME: of_queues(3, 1), "broker-b": of_queues(2)}, "formatVersion": 2}
    folder = checkpoint(tmp_path / "checkpoint", offset)
    rows = objects(run("lag", path(broker), "--checkpoint", folder, "--json"))
    assert [(row["brokerName"], row["queueId"], row["committedOffset"], row["lag"]) for row in rows] == [
        (NAME, 0, 3, 0),
        (NAME, 1, 1, 2),
        ("broker-b", 0, 2, 1),
    ]
    one = objects(run("lag", path(broker, "broker-b"), "--checkpoint", folder, "--json"))
    assert [(row["brokerName"], row["lag"]) for row in one] == [("broker-b", 1)]
    head = lines(run("lag", path(broker), "--checkpoint", folder))[0].split()
    assert head[:2] == ["broker", "topic"]

    broker.others.clear()
    assert "do not know broker-b" in error("lag", path(broker), "--checkpoint", folder, code=2)


def test_the_lag_of_a_query_over_one_broker(broker: Broker, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint", of_queues(3, 1))
    rows = objects(run("lag", path(broker, NAME), "--checkpoint", folder, "--json"))
    assert [(row["brokerName"], row["queueId"], row["lag"]) for row in rows] == [(NAME, 0, 0), (NAME, 1, 2)]
    assert f"Give the broker that the query reads, as in {path(broker, NAME)}" in error(
        "lag", path(broker), "--checkpoint", folder, code=2
    )
