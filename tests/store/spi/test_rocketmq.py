"""The store of a running broker: each message once, at its own offset, or an error that says what the broker did."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from isal.isal_zlib import crc32

from fake_broker import NAME, Broker
from http_list import ListServer
from messagestore import (
    BrokerError,
    ConfigError,
    CorruptionError,
    OffsetOutOfRangeError,
    StoreClosedError,
    StoreConfig,
    StoreUnavailableError,
    StoreWentBackwardsError,
    UnknownTopicError,
)
from messagestore.format.record import decode_message
from messagestore.remoting import codes
from messagestore.remoting.frames import Frame
from messagestore.spi import STORES, Ends, LastRecord, Location, PlannedRead, Range, StoreReader, brokers_of
from remoting_peer import answer

QUEUE = ("t", 0)


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    for number in range(200):
        broker.put("t", 0, b"%d" % number, 1_700_000_000_000 + 10 * (number // 3))
    broker.put("t", 1, b"other")
    with broker.serve():
        yield broker


@pytest.fixture
def store(broker: Broker) -> Iterator[StoreReader]:
    store = STORES.reader(at(broker))
    yield store
    store.close()


def at(broker: Broker, name: str = "", **settings: object) -> Location:
    location = Location.of(f"rocketmq://{broker.address}" + (f"/{name}" if name else ""))
    return location.reached_by(retry_timeout_s=60.0, **settings)


def bodies(store: StoreReader, start: int = 0, end: int = 200, **more: object) -> list[bytes]:
    return list(rows_of(store, start, end, **more))


def rows_of(store: StoreReader, start: int = 0, end: int = 200, **more: object) -> Iterator[bytes]:
    for block in store.gather([Range("t", 0, start, end)], **more):
        yield from block.decoded(["body"])["body"].to_pylist()


def pulls(broker: Broker) -> list[Frame]:
    return [frame for frame in broker.asked if frame.code == codes.PULL_MESSAGE]


# ---- what there is


def test_ends_and_begins(broker: Broker, store: StoreReader) -> None:
    broker.begins[QUEUE] = 7
    found = store.ends(["t", "missing"])
    assert found.queues == {QUEUE: 200, ("t", 1): 1}
    assert store.begins(found.queues) == {QUEUE: 7, ("t", 1): 0}
    assert store.ends(["t", "missing"], found) is found
    assert store.describe(["t", "missing"], queues=True).queue_ids == {"t": [0, 1]}
    assert store.broker_name() == NAME


def test_what_a_broker_gets_is_seen(broker: Broker, store: StoreReader) -> None:
    before = store.ends(["t"])
    broker.put("t", 0, b"new")
    broker.put("t", 2, b"in a new queue")
    for _ in range(100):  # the broker, and the name server, are asked again after a while
        found = store.ends(["t"], before)
        if ("t", 2) in found.queues:
            break
        store.await_change(1)
    assert found.queues == {QUEUE: 201, ("t", 1): 1, ("t", 2): 1}
    assert found.instance == before.instance


def test_places_are_those_of_the_log(broker: Broker, store: StoreReader) -> None:
    places = store.places({QUEUE: 200, ("t", 1): 1, ("t", 9): 3})
    assert set(places) == {QUEUE, ("t", 1)}
    place = places[QUEUE]
    assert broker.log[place.physical_offset] == broker.queues[QUEUE][199]
    assert place.size == len(broker.queues[QUEUE][199])


@pytest.mark.parametrize(
    "time_ms", [0, 1_699_999_999_999, 1_700_000_000_000, 1_700_000_000_335, 1_700_000_000_660, 1 << 42]
)
def test_a_time_is_found_exactly(store: StoreReader, time_ms: int) -> None:
    """Brokers of different versions give different neighbours of a time; the fake one is always wrong."""
    times = [1_700_000_000_000 + 10 * (number // 3) for number in range(200)]
    wanted = next((number for number, stored in enumerate(times) if stored > time_ms), 200)
    assert store.seek({QUEUE: time_ms}) == {QUEUE: wanted}


def test_a_place_in_the_log_is_found_exactly(broker: Broker, store: StoreReader) -> None:
    place = store.places({QUEUE: 150})[QUEUE]
    assert store.seek({QUEUE: None}, physical_offset=place.physical_offset) == {QUEUE: 149}
    assert store.seek({QUEUE: None}, physical_offset=place.physical_offset + 1) == {QUEUE: 150}
    assert store.seek({QUEUE: 1_700_000_000_000}, physical_offset=place.physical_offset) == {QUEUE: 3}
    assert store.seek({QUEUE: None}) == {QUEUE: 200}


# ---- reading


def test_every_message_is_read_once(broker: Broker, store: StoreReader) -> None:
    assert bodies(store) == [b"%d" % number for number in range(200)]
    assert bodies(store, 5, 6) == [b"5"]
    assert bodies(store, 33, 170, max_rows=10) == [b"%d" % number for number in range(33, 170)]
    assert all(frame.fields["sysFlag"] == "4" for frame in pulls(broker)), "no pull commits, and none is suspended"


@pytest.mark.parametrize("most", [1, 3, 32])
def test_a_broker_that_gives_less_than_it_was_asked_for(
    broker: Broker, store: StoreReader, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("fake_broker.MOST_MESSAGES", most)
    assert bodies(store) == [b"%d" % number for number in range(200)]


def test_compressed_and_damaged_records_are_checked_by_who_reads(broker: Broker, store: StoreReader) -> None:
    record = bytearray(broker.queues[QUEUE][50])
    record[record.index(b"50")] ^= 1
    broker.queues[QUEUE][50] = bytes(record)
    with pytest.raises(CorruptionError):
        bodies(store)


def test_a_hole_is_an_error_and_no_row_behind_it_is_read(broker: Broker, store: StoreReader) -> None:
    del broker.queues[QUEUE][100]
    broker.put("t", 0, b"so that it is as long", number=199)
    rows: list[bytes] = []
    with pytest.raises(CorruptionError, match=r"message 100.*message 101"):
        rows.extend(rows_of(store))
    assert rows == [b"%d" % number for number in range(100)]


def test_a_double_is_an_error(broker: Broker, store: StoreReader) -> None:
    broker.queues[QUEUE].insert(100, broker.queues[QUEUE][99])
    with pytest.raises(CorruptionError, match=r"message 100.*message 99"):
        bodies(store)


def test_a_message_of_another_queue_is_an_error(broker: Broker, store: StoreReader) -> None:
    other = Broker()
    for number in range(200):
        other.put("t", 1, b"%d" % number)
    broker.queues[QUEUE] = other.queues["t", 1]
    with pytest.raises(CorruptionError):
        bodies(store)


def test_an_answer_that_is_cut_is_an_error(broker: Broker, store: StoreReader) -> None:
    def cut(request: Frame) -> bytes | None:
        if request.code != codes.PULL_MESSAGE:
            return None
        fields = {"minOffset": "0", "maxOffset": "200", "nextBeginOffset": "2"}
        return answer(request, fields=fields, body=(broker.queues[QUEUE][0] + broker.queues[QUEUE][1])[:-1])

    broker.fault = cut
    with pytest.raises(CorruptionError, match="whole records"):
        bodies(store)


def test_messages_that_retention_deleted(broker: Broker, store: StoreReader) -> None:
    broker.begins[QUEUE] = 20
    with pytest.raises(OffsetOutOfRangeError, match="retention has deleted it") as caught:
        bodies(store, 10)
    assert (caught.value.queue_offset, caught.value.min) == (10, 20)
    assert bodies(store, 20) == [b"%d" % number for number in range(20, 200)]


def test_retention_while_a_range_is_read(broker: Broker, store: StoreReader) -> None:
    """All messages before the gap are returned, and the error says where the next one is."""

    def delete(request: Frame) -> None:
        if request.code == codes.PULL_MESSAGE and int(request.fields["queueOffset"]) >= 64:
            broker.begins[QUEUE] = 150

    broker.fault = delete
    rows: list[bytes] = []
    with pytest.raises(OffsetOutOfRangeError) as caught:
        rows.extend(rows_of(store))
    assert rows == [b"%d" % number for number in range(64)]
    assert (caught.value.queue_offset, caught.value.min) == (64, 150)


@pytest.mark.parametrize("scanned", [200, 100])
def test_retention_that_has_not_reached_the_queue_yet(broker: Broker, store: StoreReader, scanned: int) -> None:
    """The log goes first. Until the queue's beginning is told anew, a broker answers with the first message it has.

    It looks at so many messages for that, and otherwise says where to ask again.
    """

    def skips(request: Frame) -> bytes | None:
        offset = int(request.fields["queueOffset"]) if request.code == codes.PULL_MESSAGE else 150
        if 64 <= offset < 150:
            deleted.append(offset)
        if not deleted or offset >= 150:
            return None
        fields = {"minOffset": "0", "maxOffset": "200", "nextBeginOffset": "151"}
        if offset + scanned < 150:
            return answer(request, codes.PULL_RETRY_IMMEDIATELY, fields | {"nextBeginOffset": str(offset + scanned)})
        return answer(request, codes.SUCCESS, fields, broker.queues[QUEUE][150])

    deleted: list[int] = []
    rows: list[bytes] = []
    broker.fault = skips
    with pytest.raises(OffsetOutOfRangeError) as caught:
        rows.extend(rows_of(store))
    assert rows == [b"%d" % number for number in range(64)]
    assert (caught.value.queue_offset, caught.value.min) == (64, 150)


def test_a_queue_that_is_shorter_than_planned(broker: Broker, store: StoreReader) -> None:
    del broker.queues[QUEUE][150:]
    with pytest.raises(StoreWentBackwardsError, match="t/0 ends at 150 now, but message 150 was there"):
        bodies(store)


@pytest.mark.parametrize("every", [2, 3, 7])
def test_connections_that_break_lose_and_double_nothing(broker: Broker, store: StoreReader, every: int) -> None:
    count = 0

    def broken(request: Frame) -> bytes | None:
        nonlocal count
        count += request.code == codes.PULL_MESSAGE
        return b"" if request.code == codes.PULL_MESSAGE and count % every == 0 else None

    broker.fault = broken
    assert bodies(store) == [b"%d" % number for number in range(200)]
    assert count > every


def of_queues(store: StoreReader, ends: dict[int, int], **more: object) -> Iterator[tuple[int, list[bytes]]]:
    """The blocks of some queues, read one after the other."""
    for block in store.gather([Range("t", queue_id, 0, end) for queue_id, end in ends.items()], **more):
        yield block.queue_id, block.decoded(["body"])["body"].to_pylist()


def test_the_next_queues_are_asked_for_while_one_is_read(broker: Broker, store: StoreReader) -> None:
    """So many requests, and no more, are under way; each queue keeps its order."""
    for queue_id in range(1, 300):
        broker.queues.pop(("t", queue_id), None)
        broker.put("t", queue_id, b"of %d" % queue_id)
    ends = {queue_id: 40 if queue_id == 0 else 1 for queue_id in range(300)}
    blocks = of_queues(store, ends)
    assert next(blocks) == (0, [b"%d" % number for number in range(40)])
    until_s = time.monotonic() + 30
    while ("1" not in (asked := {frame.fields["queueId"] for frame in pulls(broker)})) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert "1" in asked
    assert len(pulls(broker)) <= 128 + 2
    assert list(blocks) == [(queue_id, [b"of %d" % queue_id]) for queue_id in range(1, 300)]
    assert len(pulls(broker)) == 2 + 299


@pytest.mark.parametrize("every", [2, 3, 7])
def test_connections_that_break_while_several_queues_are_read(broker: Broker, store: StoreReader, every: int) -> None:
    """What was asked for ahead is asked for again, once."""
    for queue_id in range(1, 12):
        for number in range(len(broker.queues.get(("t", queue_id), [])), 70):
            broker.put("t", queue_id, b"%d/%d" % (queue_id, number))
    count = 0

    def broken(request: Frame) -> bytes | None:
        nonlocal count
        count += request.code == codes.PULL_MESSAGE
        return b"" if request.code == codes.PULL_MESSAGE and count % every == 0 else None

    broker.fault = broken
    found = dict[int, list[bytes]]()
    for queue_id, some in of_queues(store, dict.fromkeys(range(12), 70), max_rows=33):
        found.setdefault(queue_id, []).extend(some)
    assert found[0] == [b"%d" % number for number in range(70)]
    assert found[1] == [b"other", *(b"1/%d" % number for number in range(1, 70))]
    for queue_id in range(2, 12):
        assert found[queue_id] == [b"%d/%d" % (queue_id, number) for number in range(70)]


def test_a_busy_broker_is_asked_again(broker: Broker, store: StoreReader) -> None:
    count = 0

    def busy(request: Frame) -> bytes | None:
        nonlocal count
        count += 1
        return answer(request, codes.SYSTEM_BUSY, remark="[PCBUSY]") if count % 3 == 0 else None

    broker.fault = busy
    assert bodies(store) == [b"%d" % number for number in range(200)]


def test_a_refusal_names_the_broker(broker: Broker, store: StoreReader) -> None:
    def refuse(request: Frame) -> bytes | None:
        pull = request.code == codes.PULL_MESSAGE
        return answer(request, codes.NO_PERMISSION, remark="the group is not allowed") if pull else None

    broker.fault = refuse
    with pytest.raises(BrokerError, match=r"broker broker-a .* 16 NO_PERMISSION: the group is not allowed"):
        bodies(store)


# ---- whether it is still the same log


def planned(store: StoreReader, end: int = 200) -> PlannedRead:
    place = store.places({QUEUE: end})[QUEUE]
    return PlannedRead("", place.end, store.prove_last(place.physical_offset, place.size, with_time=True))


def test_the_last_record_is_recognised(broker: Broker, store: StoreReader) -> None:
    place = store.places({QUEUE: 200})[QUEUE]
    last = store.prove_last(place.physical_offset, place.size, with_time=True)
    assert last is not None
    assert last.store_timestamp_ms == 1_700_000_000_660
    assert last.is_there(store.prove_last(place.physical_offset, place.size))
    store.ends(["t"])
    assert store.prove_last(broker.log_size, 100) == LastRecord(broker.log_size, 100, -1), "the log ends before"


def test_a_record_that_retention_deleted_is_no_fault(broker: Broker, store: StoreReader) -> None:
    place = store.places({QUEUE: 100})[QUEUE]
    store.ends(["t"])
    del broker.log[place.physical_offset]
    broker.begins[QUEUE] = 100
    assert store.prove_last(place.physical_offset, place.size) is None


@pytest.mark.parametrize("change", ["body", "time", "host"])
def test_another_record_at_the_same_place(broker: Broker, store: StoreReader, change: str) -> None:
    """A master that lost its tail and went on, or another cluster under the same name."""
    plan = planned(store)
    assert plan.last is not None
    other = Broker(log_size=plan.last.position)
    other.queues[QUEUE] = broker.queues[QUEUE][:199]
    other.put(
        "t", 0, b"200" if change == "body" else b"199", 1_700_000_000_661 if change == "time" else 1_700_000_000_660
    )
    record = other.log[plan.last.position]
    if change == "host":
        record = record.replace(b"\x7f\0\0\1\0\0*\x9f", b"\x7f\0\0\2\0\0*\x9f")
    assert record != broker.log[plan.last.position]
    broker.log[plan.last.position] = broker.queues[QUEUE][199] = record
    with pytest.raises(StoreWentBackwardsError, match="has changed since this micro-batch was planned"):
        bodies(store, planned=plan)


def test_the_plan_is_compared_again_after_a_connection_broke(broker: Broker, store: StoreReader) -> None:
    """Another broker may be at the address by then."""
    plan = planned(store)
    assert plan.last is not None
    broken = False

    def swap(request: Frame) -> bytes | None:
        nonlocal broken
        if request.code == codes.PULL_MESSAGE and int(request.fields["queueOffset"]) == 64 and not broken:
            broken = True
            broker.log[plan.last.position] = b"another record"
            return b""
        return None

    broker.fault = swap
    with pytest.raises(StoreWentBackwardsError, match="has changed"):
        bodies(store, planned=plan)
    assert broken


def test_a_queue_that_shrinks_is_counted(broker: Broker, store: StoreReader) -> None:
    before = store.ends(["t"])
    del broker.queues[QUEUE][100:]
    found = before
    while found is before:
        store.await_change(1)
        found = store.ends(["t"], before)
    assert found.shrunk_since(before) == {QUEUE}
    assert found.queues[QUEUE] == 100


# ---- groups, and what cannot be


def test_progress_is_published_and_read(broker: Broker, store: StoreReader) -> None:
    store.publish_progress("spark", {QUEUE: 150, ("t", 1): 1})
    assert broker.groups == {("spark", "t", 0): 150, ("spark", "t", 1): 1}


def test_a_group_that_the_broker_does_not_have_is_made_by_a_pull(broker: Broker, store: StoreReader) -> None:
    """A broker makes groups when they pull, and refuses their offsets before that."""

    def unknown(request: Frame) -> bytes | None:
        is_offset = request.code == codes.UPDATE_CONSUMER_OFFSET
        has_pulled = any(frame.fields["consumerGroup"] == "spark" for frame in pulls(broker))
        return answer(request, codes.SUBSCRIPTION_GROUP_NOT_EXIST) if is_offset and not has_pulled else None

    broker.fault = unknown
    store.publish_progress("spark", {QUEUE: 150})
    assert broker.groups == {("spark", "t", 0): 150}


def test_brokers_are_stores(broker: Broker) -> None:
    location = at(broker)
    assert list(brokers_of(location, ["t"])) == [NAME]
    assert brokers_of(location, ["missing"]) == {}
    one = brokers_of(location)[NAME]
    assert (str(one), one.broker, one.name_servers) == (f"{location}/{NAME}", NAME, broker.address)
    assert one.settings == location.settings


def test_a_broker_that_nobody_knows(broker: Broker) -> None:
    store = STORES.reader(at(broker, "broker-z").reached_by(retry_timeout_s=0.2))
    with pytest.raises(StoreUnavailableError, match=r"broker broker-z: the name servers .* do not know it"):
        store.begins([QUEUE])
    store.close()


def test_a_broker_takes_no_batches(broker: Broker) -> None:
    with pytest.raises(ConfigError, match="address of RocketMQ brokers"):
        STORES.writer(at(broker), StoreConfig(), staging_ttl_s=1.0)


def test_a_reader_that_is_closed(store: StoreReader) -> None:
    store.close()
    with pytest.raises(StoreClosedError, match="this reader is closed"):
        store.ends(["t"])


# ---- addresses


@pytest.mark.parametrize(
    "text",
    [
        "rocketmq://a:1",
        "rocketmq://a:1;b:2",
        "rocketmq://[::1]:9876;b:2/broker-a",
        "RocketMQ://a:1/",
        "rocketmq://a:1/b_1.x",
        "rocketmq://http:1",
    ],
)
def test_addresses_of_brokers(text: str) -> None:
    location = Location.of(text)
    assert location.is_cluster
    assert location.is_remote
    assert str(location).lower() == text.lower().rstrip("/")


@pytest.mark.parametrize(
    "text",
    [
        "rocketmq://",
        "rocketmq://a",
        "rocketmq://a:1,b:2",
        "rocketmq://a:1;b",
        "rocketmq://u:p@a:1/x y",
        "rocketmq:a:1",
        "rocketmq://a:1/x/y",
    ],
)
def test_what_is_no_address_of_brokers(text: str) -> None:
    with pytest.raises(ConfigError, match="rocketmq://host:port;host:port"):
        Location.of(text)


def test_a_server_that_lists_name_servers_is_named() -> None:
    with pytest.raises(ConfigError, match=r"allowed is rocketmq\+http://jmenv:8080/rocketmq/nsaddr"):
        Location.of("rocketmq://http://jmenv:8080/rocketmq/nsaddr")


@pytest.mark.parametrize(
    ("text", "name_servers", "broker", "of_broker"),
    [
        ("rocketmq+http://jmenv:8080", "http://jmenv:8080/rocketmq/nsaddr", "", "jmenv:8080/rocketmq/nsaddr#b-1"),
        ("ROCKETMQ+HTTP://jmenv:8080/", "http://jmenv:8080/rocketmq/nsaddr", "", "jmenv:8080/rocketmq/nsaddr#b-1"),
        ("rocketmq+http://[::1]:80/x/y#broker-a", "http://[::1]:80/x/y", "broker-a", "[::1]:80/x/y#b-1"),
    ],
)
def test_addresses_of_a_list_of_name_servers(text: str, name_servers: str, broker: str, of_broker: str) -> None:
    location = Location.of(text)
    assert (location.is_cluster, location.name_servers, location.broker) == (True, name_servers, broker)
    one = location.of_broker("b-1")
    assert (str(one), one.broker, one.name_servers) == (f"rocketmq+http://{of_broker}", "b-1", name_servers)
    assert Location.of(str(one)) == one
    assert one.of_broker("b-2").broker == "b-2"


@pytest.mark.parametrize(
    "text",
    [
        "rocketmq+http://",
        "rocketmq+http:jmenv",
        "rocketmq+ftp://jmenv/x",
        "rocketmq+http://u:p@jmenv/x",
        "rocketmq+http://jmenv/x?nofix=1",
        "rocketmq+http://jmenv/x#a/b",
        "rocketmq+http://jmenv:99999/x",
        "rocketmq+http://a:1;b:2",
    ],
)
def test_what_is_no_list_of_name_servers(text: str) -> None:
    with pytest.raises(ConfigError, match=r"rocketmq\+http://host:port/rocketmq/nsaddr"):
        Location.of(text)


def test_brokers_are_found_by_a_list_of_name_servers(broker: Broker) -> None:
    """What is asked of a cluster is the same, whoever says where its name servers are."""
    with ListServer() as lists:
        lists.text = broker.address
        location = Location.of(f"rocketmq+{lists.url}")
        (one,) = brokers_of(location, ["t"]).values()
        assert one.broker == NAME
        with contextlib.closing(STORES.reader(location)) as store:
            assert bodies(store) == [b"%d" % number for number in range(200)]
        broker.others.append(Broker(name="broker-b"))
        with broker.others[0].serve(), pytest.raises(ConfigError, match=rf"as in rocketmq\+{lists.url}#{NAME}"):
            STORES.reader(location)


def test_a_view_of_the_files_of_a_store_is_refused(store: StoreReader) -> None:
    """In words, and not as a method that is missing."""
    with pytest.raises(ConfigError, match=r"nothing here shows the view status there\. Give the folder of a store"):
        store.view("status")


def test_how_far_the_queues_of_a_broker_reach(broker: Broker, store: StoreReader) -> None:
    broker.begins["t", 0] = 30
    rows, faults = store.offsets(["t"], 1_700_000_000_000 + 10 * 50)
    assert faults == []
    assert [tuple(row.values()) for row in rows] == [
        ("t", 0, 30, 200, 170, 150, 1_700_000_000_500),
        ("t", 1, 0, 1, 1, 1, None),
    ]
    with pytest.raises(UnknownTopicError, match="'missing' is not in the store"):
        store.offsets(["missing"])
    ((topic,), _) = store.view("topics")
    assert (topic["topic"], topic["queues"], topic["perm"], topic["messages"]) == ("t", 2, 6, 171)


def test_how_far_a_reader_of_a_broker_is_behind(broker: Broker, store: StoreReader) -> None:
    """One that is in the middle, one whose messages retention has deleted, and one that is behind the end."""
    store.publish_progress("g", {QUEUE: 120})
    rows, faults = store.group_lag("g")
    size = len(broker.queues[QUEUE][150])
    assert [(row["queueId"], row["committedOffset"], row["lag"], row["lagBytes"]) for row in rows] == [
        (0, 120, 80, 80 * size),
        (1, None, 1, len(broker.queues["t", 1][0])),
    ]
    assert rows[0]["oldestUnread"] == 1_700_000_000_000 + 10 * 40
    assert faults == []
    assert store.group_lag("nobody") == ([], [])

    broker.begins[QUEUE] = 130
    rows, faults = store.lag({QUEUE: 120})
    assert rows[0]["lag"] == 80 and faults == ["t/0: retention has deleted 10 messages that were not read"]
    rows, (fault,) = store.lag({QUEUE: 300})
    assert rows[0]["beyond"] == 100
    assert fault.startswith("t/0: the reader is at 300, but the queue ends at 200")


def test_the_topics_of_a_broker_that_is_down_are_waited_for(broker: Broker) -> None:
    """A query that begins meanwhile would otherwise be told that its topic does not exist."""
    left = [3]

    def forgets(request: Frame) -> bytes | None:
        if request.code == codes.GET_BROKER_CLUSTER_INFO and left[0]:
            left[0] -= 1
            return answer(request, body=b'{"brokerAddrTable":{}}')
        if request.code == codes.GET_ROUTEINFO_BY_TOPIC and left[0]:
            return answer(request, codes.TOPIC_NOT_EXIST)
        return None

    broker.fault = forgets
    store = STORES.reader(at(broker, NAME))
    assert store.describe(["t"], queues=True).queue_ids == {"t": [0, 1]}
    assert left == [0]
    store.ends(["t"])
    store.close()

    left[0] = 3  # what the reader before knew of the brokers does not count
    store = STORES.reader(at(broker, NAME))
    assert store.ends(["t"]).queues == {QUEUE: 200, ("t", 1): 1}
    store.close()

    broker.fault, left[0] = forgets, 1000
    store = STORES.reader(Location.of(f"rocketmq://{broker.address}/{NAME}").reached_by(retry_timeout_s=0.3))
    with pytest.raises(StoreUnavailableError, match="do not know broker broker-a"):
        store.describe(["t"])
    store.close()


# ---- waiting


def looks(broker: Broker) -> list[Frame]:
    return [frame for frame in broker.asked if frame.code == codes.GET_MAX_OFFSET]


def awaited(broker: Broker, is_good: Callable[[], object]) -> None:
    """Wait for something that the broker has got; another thread serves it."""
    until_s = time.monotonic() + 30
    while not is_good():
        assert time.monotonic() < until_s, broker.asked[-5:]
        time.sleep(0.001)


def armed(broker: Broker, store: StoreReader) -> Ends:
    """The ends of a reader that waits now."""
    found = store.ends(["t"], store.ends(["t"]))
    while len(broker.kept) < 2:
        store.await_change(0.01)
        found = store.ends(["t"], found)
    return found


def test_a_reader_that_waits_asks_nothing(broker: Broker, store: StoreReader) -> None:
    """The broker keeps one pull for each queue, so nobody asks again and again whether there is something new."""
    found = armed(broker, store)
    assert {(frame.fields["queueId"], frame.fields["queueOffset"]) for _, frame in broker.kept} == {
        ("0", "200"),
        ("1", "1"),
    }
    assert {(frame.fields["sysFlag"], frame.fields["maxMsgNums"]) for _, frame in broker.kept} == {("6", "1")}
    asked = len(broker.asked)
    for _ in range(200):
        assert store.ends(["t"], found) is found
        store.await_change(0.001)
    assert len(broker.asked) == asked


def test_a_message_ends_the_wait(broker: Broker, store: StoreReader) -> None:
    found = armed(broker, store)
    for number in range(20):
        queue_id = number % 2
        threading.Timer(0.005, broker.put, ("t", queue_id, b"new")).start()
        while (now := store.ends(["t"], found)) is found:
            store.await_change(60)
        assert now.queues["t", queue_id] == found.queues["t", queue_id] + 1
        found = now


def test_the_requests_of_other_queues_stay_with_the_broker(broker: Broker, store: StoreReader) -> None:
    found = armed(broker, store)
    others = [frame.opaque for _, frame in broker.kept if frame.fields["queueId"] == "1"]
    broker.put("t", 0, b"new")
    store.await_change(60)
    store.ends(["t"], found)
    awaited(broker, lambda: len(broker.kept) == 2)
    assert [frame.opaque for _, frame in broker.kept if frame.fields["queueId"] == "1"] == others


def test_closing_a_reader_ends_its_wait(broker: Broker, store: StoreReader) -> None:
    """A query that is stopped does not wait for the broker's answer."""
    armed(broker, store)
    thread = threading.Thread(target=store.await_change, args=(600,), daemon=True)
    thread.start()
    store.close()
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(StoreClosedError):
        store.ends(["t"])


def test_a_broker_that_goes_ends_the_wait(broker: Broker, store: StoreReader) -> None:
    """It is met as it is without a wait: the next look asks for it until it is back."""
    found = armed(broker, store)
    (connection,) = {connection for connection, _ in broker.kept}
    broker.kept.clear()
    connection.shutdown(socket.SHUT_RDWR)
    store.await_change(600)
    broker.put("t", 0, b"meanwhile")
    now = store.ends(["t"], found)
    assert now.queues[QUEUE] == 201
    assert now.instance == found.instance
    awaited(broker, lambda: len(broker.kept) == 2)


def test_a_broker_that_answers_without_a_message_gets_the_request_again(broker: Broker, store: StoreReader) -> None:
    """It keeps a request for fifteen seconds; this one answers when the test says so."""
    found = armed(broker, store)
    sent_s = time.monotonic()
    while time.monotonic() - sent_s < 0.2:  # sooner, it would seem to keep none
        store.await_change(0.01)
    opaques = {frame.opaque for _, frame in broker.kept}
    broker.answer_kept(lambda _: True, "t", 0)
    store.await_change(600)
    assert store.ends(["t"], found) is found
    awaited(broker, lambda: len(broker.kept) == 2)
    assert len({frame.opaque for _, frame in broker.kept} & opaques) == 1


def test_a_broker_that_keeps_no_requests_is_asked_now_and_then(broker: Broker, store: StoreReader) -> None:
    """A broker with longPollingEnable=false, or a slave that does not answer consumers: as often as without a wait."""
    broker.keeps = False
    found = store.ends(["t"], store.ends(["t"]))
    begun_s, before = time.monotonic(), len(looks(broker))
    for _ in range(300):
        found = store.ends(["t"], found)
        store.await_change(0.002)
    assert len(looks(broker)) - before < 10 + 40 * (time.monotonic() - begun_s)  # two queues, ten times a second
    broker.put("t", 0, b"new")
    now = found
    while now is found:
        store.await_change(1)
        now = store.ends(["t"], found)
    assert now.queues[QUEUE] == 201


def test_a_message_that_comes_while_the_ends_are_asked_for(broker: Broker, store: StoreReader) -> None:
    """Its answer is newer than the end that was said just before, and is no sign that the broker keeps nothing."""
    found = armed(broker, store)

    def put(request: Frame) -> None:
        if request.code == codes.PULL_MESSAGE and request.fields["maxMsgNums"] == "2":
            broker.fault = None
            broker.put("t", 0, b"behind the end that was said")

    broker.fault = put
    broker.put("t", 1, b"new")
    store.await_change(600)
    between = store.ends(["t"], found)
    assert between.queues == {QUEUE: 200, ("t", 1): 2}
    store.await_change(600)
    assert store.ends(["t"], between).queues == {QUEUE: 201, ("t", 1): 2}


def both_woken(store: StoreReader, ends: Ends) -> None:
    """Wait until what the broker said about new messages in both queues has arrived."""
    until_s = time.monotonic() + 30
    while len(store._waits.woken) < 2:
        assert time.monotonic() < until_s
        store._waits.is_quiet(ends.queues)


def asked_now(broker: Broker) -> list[Frame]:
    """What was asked since the last look into `asked`, without the requests that the broker keeps."""
    return [frame for frame in broker.asked if int(frame.fields.get("sysFlag", "0")) != 6]


def test_what_a_step_asks_again_comes_with_the_look_at_the_ends(broker: Broker, store: StoreReader) -> None:
    """One request for each queue says how far it reaches, and what stands before its old end and its new one."""
    found = armed(broker, store)
    store.places(found.queues)
    for queue_id in (0, 1):
        broker.put("t", queue_id, b"new")
    both_woken(store, found)
    broker.asked.clear()
    now = store.ends(["t"], found)
    assert now.queues == {QUEUE: 201, ("t", 1): 2}
    assert [(frame.code, frame.fields["queueOffset"], frame.fields["maxMsgNums"]) for frame in asked_now(broker)] == [
        (codes.PULL_MESSAGE, "199", "2"),
        (codes.PULL_MESSAGE, "0", "2"),
    ]

    for offsets in ({QUEUE: 200, ("t", 1): 1}, {QUEUE: 201, ("t", 1): 2}):
        for (topic, queue_id), place in store.places(offsets).items():
            record = broker.queues[topic, queue_id][offsets[topic, queue_id] - 1]
            assert broker.log[place.physical_offset] == record
            last = store.prove_last(place.physical_offset, len(record), with_time=True)
            assert last is not None
            assert (last.crc, last.store_timestamp_ms) == (crc32(record), decode_message(record).store_timestamp_ms)
    assert store.begins(now.queues) == dict.fromkeys(now.queues, 0)
    assert len(asked_now(broker)) == 2


@pytest.mark.parametrize("changed", [0, 1])
def test_each_look_at_new_messages_recognises_queue_and_log(broker: Broker, store: StoreReader, changed: int) -> None:
    """The topic was made again and has more messages than before, or the log was cut and goes on: nobody said so."""
    found = armed(broker, store)
    place = store.places(found.queues)["t", 1]
    last = store.prove_last(place.physical_offset, place.size)
    assert last is not None
    if changed:
        broker.log[place.physical_offset] = b"another record"
    queue = broker.queues["t", changed]
    broker.put("t", changed, b"again", number=len(queue) - 1)
    del queue[-2]
    for queue_id in (0, 1):
        broker.put("t", queue_id, b"new")
    both_woken(store, found)
    now = store.ends(["t"], found)
    offset = found.queues["t", changed]
    assert store.places({("t", changed): offset})["t", changed].ends_behind(last.position + last.size)
    assert last.is_there(store.prove_last(last.position, last.size)) == (not changed)
    assert now.queues == {QUEUE: 201, ("t", 1): 2}


def test_the_newest_record_is_compared_though_its_queue_has_no_new_message(broker: Broker, store: StoreReader) -> None:
    found = armed(broker, store)
    place = store.places(found.queues)["t", 1]  # the newest of all
    last = store.prove_last(place.physical_offset, place.size)
    assert last is not None
    broker.put("t", 0, b"new")
    while store.ends(["t"], found) is found:
        store.await_change(60)
    assert last.is_there(store.prove_last(last.position, last.size))

    broker.log[place.physical_offset] = b"another record"
    broker.put("t", 0, b"newer")
    while (now := store.ends(["t"], found)).queues[QUEUE] < 202:
        store.await_change(60)
    assert now.queues["t", 1] == 1
    assert not last.is_there(store.prove_last(last.position, last.size))


def test_all_is_asked_for_again_after_a_connection_broke(broker: Broker, store: StoreReader) -> None:
    """Another broker may be at the address by then: nothing that the one before said counts any more."""
    found = armed(broker, store)
    place = store.places(found.queues)[QUEUE]
    last = store.prove_last(place.physical_offset, place.size)
    assert last is not None
    for queue_id in (0, 1):
        broker.put("t", queue_id, b"new")
    both_woken(store, found)
    broker.log[place.physical_offset] = b"another record"
    breaks = [b""]
    broker.fault = lambda request: breaks.pop() if request.fields.get("maxMsgNums") == "2" and breaks else None
    broker.asked.clear()
    assert store.ends(["t"], found).queues == {QUEUE: 201, ("t", 1): 2}
    assert len(looks(broker)) == 2
    assert not last.is_there(store.prove_last(last.position, last.size))


def test_a_broker_of_which_the_name_servers_keep_only_the_name_is_waited_for(
    broker: Broker, store: StoreReader
) -> None:
    """One that was killed and comes back has no address for a moment. It was an IndexError, which ended a copy."""
    assert store.ends(["t"]).queues[QUEUE] == 200
    breaks, gone = [True], [True, True]

    def fault(request: Frame) -> bytes | None:
        if request.code == codes.PULL_MESSAGE and breaks:
            breaks.pop()
            return b""
        if request.code == codes.GET_BROKER_CLUSTER_INFO and not breaks and gone:
            gone.pop()
            row = {"brokerName": NAME, "cluster": "c", "brokerAddrs": {}}
            return answer(request, body=json.dumps({"brokerAddrTable": {NAME: row}}).encode())
        return None

    broker.fault = fault
    assert bodies(store) == [b"%d" % number for number in range(200)]
    assert not breaks
    assert not gone
