"""`messagestore copy`: each message of other stores is in the archive once, and what is missing is told."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_runs import error, finish, lines, objects, read_lines, run, start
from fake_broker import NAME, Broker
from messagestore import Message, MessageStore
from pyspark_messagestore.cli import copying
from remoting_peer import answer

TIME_MS = 1_700_000_000_000
OTHER = "broker-b"


@pytest.fixture
def broker() -> Iterator[Broker]:
    """Two brokers, of which the first is the name server."""
    broker, other = Broker(), Broker(name=OTHER)
    for number in range(60):
        broker.put("t", number % 2, b"a%d" % number, TIME_MS + number, keys=["k", f"k{number}"], tags="x")
    for number in range(5):
        other.put("t", 0, b"b%d" % number, TIME_MS + number, properties={"p": "v"})
    other.put("only-b", 0, b"x")
    with other.serve(), broker.serve():
        broker.others.append(other)
        yield broker


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def path(broker: Broker, name: str = "") -> str:
    return f"rocketmq://{broker.address}" + (f"/{name}" if name else "")


def copied(archive: Path, topic: str = "t") -> dict[tuple[str, int], list[tuple[int, str]]]:
    """What an archive has, by broker and queue of the origin: queue offset there, and body."""
    found: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for row in objects(run("get", archive, topic, "--count", 100_000, "--json")):
        own = row["properties"]
        assert int(own["originQueueId"]) == row["queueId"]
        found.setdefault((own["originBroker"], row["queueId"]), []).append((int(own["originQueueOffset"]), row["body"]))
    return found


def there(*brokers: Broker, topic: str = "t", first: int = 0) -> dict[tuple[str, int], list[tuple[int, str]]]:
    """What brokers have, in the same form."""
    from messagestore.format.record import decode_message

    found = {}
    for one in brokers:
        for (name, queue_id), records in one.queues.items():
            rows = [(number, decode_message(each).body.decode()) for number, each in enumerate(records)][first:]
            if name == topic and rows:
                found[one.name, queue_id] = rows
    return found


def totals(rows: list[dict[str, Any]]) -> tuple[int, int]:
    return sum(row["messages"] for row in rows), sum(row["lost"] for row in rows)


# ---- each message once


def test_each_message_of_each_broker_comes_once(broker: Broker, archive: Path) -> None:
    """A second run copies what is new, and nothing else."""
    first = run("copy", path(broker), "t,only-b", archive, "--json")
    assert f"created a new store in {archive}" in first.stderr
    assert totals(objects(first)) == (66, 0)
    assert copied(archive) == there(broker, *broker.others)
    assert copied(archive, "only-b") == {(OTHER, 0): [(0, "x")]}
    assert objects(run("copy", path(broker), "t,only-b", archive, "--json")) == []

    broker.put("t", 1, b"new")
    broker.put("t", 2, b"in a new queue")
    head, *rows = [line.split() for line in lines(run("copy", path(broker), "t", archive))]
    assert head == ["broker", "topic", "messages", "copied", "size", "lost"]
    assert [row[:3] for row in rows] == [[NAME, "t", "2"], [OTHER, "t", "0"]]
    assert copied(archive) == there(broker, *broker.others)
    run("verify", archive)
    (found,) = objects(run("find", archive, "--topic", "t", "--key", "k7", "--json"))
    assert (found["body"], found["tags"], found["bornTimestamp"]) == ("a7", "x", TIME_MS + 7)
    assert found["properties"]["originStoreTimestamp"] == str(TIME_MS + 7)


def test_a_batch_has_a_bound(broker: Broker, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long messages behind short ones, too: the share of a queue counts in bytes, and not by what was seen before."""
    monkeypatch.setattr(copying, "BATCH_SIZE", 4000)
    monkeypatch.setattr("fake_broker.MOST_MESSAGES", 3)
    for number in range(40):
        broker.put("t", 0, b"%d " % number + b"long" * 300)
    rows = objects(run("copy", path(broker, NAME), "t", archive, "--json"))
    assert totals(rows) == (100, 0)
    assert max(row["bytes"] for row in rows) <= 4000 + 2 * 3 * 1400
    assert copied(archive) == there(broker)


@pytest.mark.parametrize(("start", "first"), [("latest", 3), (str(TIME_MS + 2), 2), ("earliest", 0)])
def test_where_a_copy_begins(broker: Broker, archive: Path, start: str, first: int) -> None:
    """The beginning is in the archive at once: a second run goes on there, whatever it is given."""
    (other,) = broker.others
    del other.queues["t", 0][3:]
    done = run("copy", path(broker, OTHER), "t", archive, "--from", start)
    assert f"{OTHER}: t is copied from message {first} on" in done.stderr
    other.put("t", 0, b"later")
    again = run("copy", path(broker, OTHER), "t", archive, "--from", "latest", "--json")
    assert "copied from" not in again.stderr
    assert copied(archive) == there(other, first=first)


def test_a_broker_that_comes_later_is_copied_from_its_first_message(broker: Broker, archive: Path) -> None:
    others, broker.others = broker.others, []
    run("copy", path(broker), "t", archive, "--from", "latest")
    broker.others = others
    done = run("copy", path(broker), "t", archive, "--from", "latest")
    assert f"{OTHER}: t is copied from message 0 on" in done.stderr
    assert copied(archive) == there(*others)


def test_both_brokers_begin_where_it_says(broker: Broker, archive: Path) -> None:
    run("copy", path(broker), "t", archive, "--from", "latest")
    broker.put("t", 0, b"new a")
    broker.others[0].put("t", 0, b"new b")
    run("copy", path(broker), "t", archive)
    assert copied(archive) == {(NAME, 0): [(30, "new a")], (OTHER, 0): [(5, "new b")]}


def test_other_stores_are_copied_too(tmp_path: Path, archive: Path) -> None:
    """A folder, and a copy of a copy: the properties say where a message was first."""
    with MessageStore.open(tmp_path / "one") as store:
        for number in range(20):
            store.put_message(Message("t", b"%d" % number, queue_id=number % 3))
        name = store.view.broker_name or store.store_id
    run("copy", tmp_path / "one", "t", archive)
    run("copy", tmp_path / "one", "t", archive)
    run("copy", archive, "t", tmp_path / "again")
    wanted = {(name, queue): [(n // 3, str(n)) for n in range(20) if n % 3 == queue] for queue in range(3)}
    assert copied(archive) == wanted
    assert copied(tmp_path / "again") == wanted


# ---- following


def test_messages_come_as_they_arrive(broker: Broker, archive: Path) -> None:
    process = start("copy", path(broker), "t", archive, "--follow", "--json")
    found = 0
    while found < 65:
        found += json.loads(*read_lines(process, 1))["messages"]
    broker.put("t", 1, b"new")
    broker.others[0].put("t", 1, b"in a new queue")
    read_lines(process, 2)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert copied(archive) == there(broker, *broker.others)
    assert not (archive / "abort").exists()


@pytest.mark.slow
def test_a_copy_that_is_killed_goes_on_where_it_was(broker: Broker, archive: Path) -> None:
    """At random moments, while messages come: each is there once, in the order of its queue."""
    rng = random.Random(20261126)
    for number in range(2000):
        broker.put("t", number % 4, b"c%d" % number)
    program = (
        "import sys; from pyspark_messagestore.cli import copying; copying.BATCH_SIZE = 1500; "
        "from pyspark_messagestore.cli.main import app; app(sys.argv[1:])"
    )
    for turn in range(8):
        process = start_program(program, "copy", path(broker), "t", archive, "--follow", "--json")
        read_lines(process, rng.randrange(1, 4))
        time.sleep(rng.random() / 50)
        process.kill()
        finish(process, -signal.SIGKILL)
        for number in range(200):
            broker.put("t", number % 4, b"d%d-%d" % (turn, number))
    run("copy", path(broker), "t", archive)
    assert copied(archive) == there(broker, *broker.others)
    run("verify", archive)


def start_program(program: str, *arguments: object) -> Any:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# ---- what is gone


def test_retention_overtook_the_copy(broker: Broker, archive: Path) -> None:
    run("copy", path(broker, NAME), "t", archive)
    for number in range(10):
        broker.put("t", 0, b"n%d" % number)
    broker.begins["t", 0] = 36
    fault = error("copy", path(broker, NAME), "t", archive, code=2)
    assert (
        f"{NAME}: t/0 was copied up to 30, but the queue holds 36 to 40: retention has deleted 6 messages before they "
        "were copied. Give --accept-loss to go on behind them" in fault
    )
    done = run("copy", path(broker, NAME), "t", archive, "--accept-loss", "--json")
    assert totals(objects(done)) == (4, 6)
    assert f"{NAME}: 6 messages of t/0 were not copied: 30 to 35 are gone, because retention has deleted" in done.stderr
    wanted = there(broker)
    wanted[NAME, 0] = wanted[NAME, 0][:30] + wanted[NAME, 0][36:]
    assert copied(archive) == wanted
    assert objects(run("copy", path(broker, NAME), "t", archive, "--json")) == []


def test_retention_overtakes_a_pull(broker: Broker, archive: Path) -> None:
    """The messages go between the look at the queue and the request for them."""
    pulled = []

    def overtake(request: Any) -> bytes | None:
        if request.code == 11 and request.fields["queueId"] == "0" and int(request.fields["maxMsgNums"]) > 1:
            pulled.append(request)
            broker.begins["t", 0] = 11
        return None

    broker.fault = overtake
    fault = run("copy", path(broker, NAME), "t", archive, "--from", str(TIME_MS + 8), code=2).stderr
    assert pulled
    assert "t/0 was copied up to 4, but the queue holds 11 to 30: retention has deleted 7 messages" in fault
    broker.begins.clear()
    done = run("copy", path(broker, NAME), "t", archive, "--accept-loss", "--json")
    assert totals(objects(done)) == (19 + 26, 7)
    assert "7 messages of t/0 were not copied: 4 to 10 are gone" in done.stderr
    assert [number for number, _ in copied(archive)[NAME, 0]] == [*range(11, 30)]


def test_a_log_that_is_deleted_before_what_leads_to_it(broker: Broker, archive: Path) -> None:
    """The broker still says that the queue begins below. The gap is told once, and not asked for again and again."""
    del broker.queues["t", 1]

    def deleted(request: Any) -> bytes | None:
        if request.code != 11 or int(request.fields["queueOffset"]) >= 17:
            return None
        fields = {"minOffset": "0", "maxOffset": "30", "nextBeginOffset": "17"}
        return answer(request, 21, fields)

    broker.fault = deleted
    run("copy", path(broker, NAME), "t", archive, code=2)
    done = run("copy", path(broker, NAME), "t", archive, "--accept-loss", "--json")
    assert totals(objects(done)) == (13, 17)
    assert [number for number, _ in copied(archive)[NAME, 0]] == [*range(17, 30)]


def test_a_topic_that_has_had_no_message(tmp_path: Path, archive: Path) -> None:
    """Its beginning is written all the same: the first message comes after it, also with `--from latest`."""
    with MessageStore.open(tmp_path / "one") as store:
        store.create_topic("t", 2)
    run("copy", tmp_path / "one", "t", archive, "--from", "latest")
    with MessageStore.open(tmp_path / "one") as store:
        store.put_message(Message("t", b"first", queue_id=1))
    (row,) = objects(run("copy", tmp_path / "one", "t", archive, "--from", "latest", "--json"))
    assert row["messages"] == 1


def lose_tail(broker: Broker, count: int) -> None:
    """The broker lost its last messages, and has others in their place."""
    for _ in range(count):
        broker.queues["t", 1].pop()
    size = sum(len(each) for records in broker.queues.values() for each in records)
    broker.log = {place: data for place, data in broker.log.items() if place < size - 100}
    broker.log_size = max(broker.log) + len(broker.log[max(broker.log)])
    for number in range(count + 2):
        broker.put("t", 1, b"other%d" % number, TIME_MS + 100_000)


def test_a_broker_that_lost_its_tail(broker: Broker, archive: Path) -> None:
    """Other messages have the numbers of those that were copied."""
    run("copy", path(broker, NAME), "t", archive)
    before = copied(archive)
    lose_tail(broker, 2)
    fault = error("copy", path(broker, NAME), "t", archive, code=2)
    assert "is not the one that this copy has read" in fault
    assert "Give --accept-loss to go on with the first newer message" in fault
    assert copied(archive) == before
    done = run("copy", path(broker, NAME), "t", archive, "--accept-loss", "--json")
    assert "The copy goes on with the first newer message" in done.stderr
    assert [body for _, body in copied(archive)[NAME, 1]][-4:] == ["other0", "other1", "other2", "other3"]
    assert copied(archive)[NAME, 0] == before[NAME, 0]
    assert objects(run("copy", path(broker, NAME), "t", archive, "--json")) == []


def test_a_topic_that_was_made_again(broker: Broker, archive: Path) -> None:
    run("copy", path(broker, NAME), "t", archive)
    broker.queues["t", 0].clear()
    for number in range(3):
        broker.put("t", 0, b"again%d" % number, TIME_MS + 100_000)
    assert "t/0 ends at 3, but this copy has read up to 30" in error("copy", path(broker, NAME), "t", archive, code=2)
    run("copy", path(broker, NAME), "t", archive, "--accept-loss")
    assert [body for _, body in copied(archive)[NAME, 0]][-4:] == ["a58", "again0", "again1", "again2"]
    assert objects(run("copy", path(broker, NAME), "t", archive, "--json")) == []


def bodies(archive: Path) -> list[str]:
    return [row["body"] for row in objects(run("get", archive, "t", "--count", 100, "--json"))]


def test_a_topic_that_was_made_again_with_as_many_messages(tmp_path: Path, archive: Path) -> None:
    """The numbers alone show nothing."""
    origin = tmp_path / "origin"
    for number in range(3):
        run("put", origin, "t", f"old{number}", "--queue", "0")
    run("copy", origin, "t", archive)
    run("topic", "delete", origin, "t", "--yes")
    for number in range(3):
        run("put", origin, "t", f"new{number}", "--queue", "0")

    for _ in range(2):
        assert "message 2 is not the one that this copy has read" in error("copy", origin, "t", archive, code=2)
    run("copy", origin, "t", archive, "--accept-loss")
    assert bodies(archive) == ["old0", "old1", "old2", "new0", "new1", "new2"]


def test_an_origin_that_is_restored_goes_on_where_it_was(tmp_path: Path, archive: Path) -> None:
    """Its id is another one; so is its name when it gets one. Its messages are the same."""
    origin, restored = tmp_path / "origin", tmp_path / "restored"
    run("put", origin, "t", "first")
    run("copy", origin, "t", archive)
    run("backup", origin, tmp_path / "backup")
    run("restore", tmp_path / "backup", restored)
    run("put", restored, "t", "second")
    run("copy", restored, "t", archive)
    run("config", restored, "set", "brokerName=broker-r")
    run("put", restored, "t", "third")
    run("copy", restored, "t", archive)
    assert sorted(bodies(archive)) == ["first", "second", "third"]

    run("put", origin, "t", "of the old one")
    assert "is not the one that this copy has read" in error("copy", origin, "t", archive, code=2)


def test_another_cluster_behind_the_same_name(broker: Broker, archive: Path) -> None:
    run("copy", path(broker, NAME), "t", archive)
    another = Broker()
    for number in range(200):
        another.put("t", number % 2, b"z%d" % number, TIME_MS + number, properties={"other": "cluster"})
    with another.serve():
        assert "is not the one that this copy has read" in error("copy", path(another), "t", archive, code=2)
    assert copied(archive) == there(broker)


# ---- what is refused


def test_what_cannot_be_copied(broker: Broker, archive: Path, tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "one") as store:
        store.put_message(Message("t", b"x"))
    for arguments, code, words in (
        ([path(broker), "missing", archive], 2, "there is no topic 'missing'"),
        ([tmp_path / "one", "missing", archive], 2, "topic 'missing' is not in the store"),
        ([path(broker), ",", archive], 2, "topic"),
        ([path(broker), "t,rmq_sys_wheel_timer", archive], 2, "rmq_sys_wheel_timer"),
        ([path(broker), "t", path(broker)], 2, "this command needs the store's files"),
        ([tmp_path / "one", "t", tmp_path / "one"], 2, "which is the store that is copied; allowed is another folder"),
        ([path(broker), "t", archive, "--from", "soon"], 2, "--from: found 'soon'"),
        ([tmp_path / "no", "t", archive], 2, "found no message store"),
    ):
        assert words in error("copy", *arguments, code=code)
    assert not os.path.exists(archive)


def test_a_broker_that_goes_away_while_it_is_copied(broker: Broker, archive: Path) -> None:
    """What was copied stays, and the next run goes on."""
    broker.fault = lambda request: answer(request, 2) if request.code == 11 else None
    run("copy", path(broker, NAME), "t", archive, "--retry-timeout", "200ms", code=2)
    broker.fault = None
    run("copy", path(broker, NAME), "t", archive)
    assert copied(archive) == there(broker)
