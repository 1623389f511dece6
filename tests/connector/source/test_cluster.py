"""A topic whose queues lie on several brokers, as one source: each message once, whatever comes, goes and is restarted."""

from __future__ import annotations

import pickle
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType

import tls_files
from fake_broker import Broker
from messagestore import ConfigError, StoreUnavailableError, StoreWentBackwardsError, UnknownTopicError
from messagestore.remoting import codes
from messagestore.remoting.frames import Frame
from messagestore.spi import STORES
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source import cluster
from pyspark_messagestore.source.cluster import ClusterBatchReader, ClusterStreamReader, _BrokerThreads
from pyspark_messagestore.source.offsets import StreamOffset
from pyspark_messagestore.source.schema import Projection
from remoting_peer import Peer, answer
from stream_steps import ALL, again

ROW = Projection.of(StructType().add("brokerName", "string").add("queueId", "integer").add("queueOffset", "long"))
Row = tuple[str, int, int]


class Cluster:
    """Two brokers with two queues each; the first one is also the name server."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.a, self.b = Broker(), Broker(name="broker-b")
        self.a.others.append(self.b)
        self.put(10)
        self.peers: dict[str, Peer] = {broker.name: stack.enter_context(broker.serve()) for broker in (self.a, self.b)}

    def put(self, count: int, *brokers: Broker) -> None:
        for number in range(count):
            for broker in brokers or (self.a, self.b):
                broker.put("t", number % 2, b"x")

    def all(self) -> set[Row]:
        return {
            (broker.name, queue_id, number)
            for broker in (self.a, *self.a.others)
            for (topic, queue_id), records in broker.queues.items()
            if topic == "t"
            for number in range(len(records))
        }

    def is_all(self, offset: Any) -> bool:
        """Whether an offset of the query is behind everything."""
        ends = {name: StreamOffset.from_json(one).queues for name, one in offset["brokers"].items()}
        return ends == {
            broker.name: {queue: len(records) for queue, records in broker.queues.items() if queue[0] == "t"}
            for broker in (self.a, *self.a.others)
        }

    @property
    def path(self) -> str:
        return f"rocketmq://{self.a.address}"

    def stream(self, **options: str) -> ClusterStreamReader:
        parsed = source_options({"path": self.path, "subscribe": "t", "retryTimeout": "5s", **options})
        parsed.check_stream()
        return self.stopped(ClusterStreamReader(parsed, ROW, STORES))

    def stopped(self, reader: ClusterStreamReader) -> ClusterStreamReader:
        """The same reader, which is stopped at the end of the test."""
        self.stack.callback(reader.stop)
        return reader


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(cluster, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr("messagestore.spi.rocketmq.LOOK_S", 0.0)
    monkeypatch.setattr("messagestore.remoting.client.ROUTE_S", 0.0)
    with ExitStack() as stack:
        yield Cluster(stack)


def read(reader: ClusterStreamReader | ClusterBatchReader, partitions: list[Any]) -> list[Row]:
    """What the tasks read, each with a copy of its own."""
    found: list[Row] = []
    for partition in partitions:
        copy = pickle.loads(pickle.dumps(reader))
        for rows in copy.read(pickle.loads(pickle.dumps(partition))):
            found += zip(*(rows[name].to_pylist() for name in ("brokerName", "queueId", "queueOffset")), strict=True)
    return found


def step(reader: ClusterStreamReader, start: Any) -> tuple[list[Row], Any]:
    end = again(reader.latestOffset(start, reader.getDefaultReadLimit()))
    return ([], end) if end == start else (read(reader, reader.partitions(start, end)), end)


def finished(two: Cluster, reader: ClusterStreamReader, start: Any) -> tuple[list[Row], Any]:
    """All micro-batches until nothing is new; each is planned once more by a query that was started again."""
    rows: list[Row] = []
    looks = 0
    while True:
        some, end = step(reader, start)
        if end != start:
            other = two.stopped(ClusterStreamReader(reader.options, ROW, STORES))
            assert read(other, other.partitions(start, end)) == some
            rows, start = rows + some, end
        elif two.is_all(end) or looks == 20:
            return rows, end
        else:  # a broker has said that there is something new, and its words are on their way
            looks += 1
            time.sleep(0.02)


def once(rows: list[Row], wanted: set[Row]) -> None:
    assert len(rows) == len(set(rows)), "a message came twice"
    assert set(rows) == wanted


def test_a_batch_read_covers_all_brokers(two: Cluster) -> None:
    options = source_options({"path": two.path, "subscribe": "t"})
    reader = ClusterBatchReader(options, ROW, STORES)
    once(read(reader, reader.partitions()), two.all())


@pytest.mark.parametrize("limits", [{}, {"maxOffsetsPerTrigger": "3"}, {"maxBytesPerTrigger": "400"}])
def test_each_message_comes_once(two: Cluster, limits: dict[str, str]) -> None:
    reader = two.stream(startingOffsets="earliest", **limits)
    rows, end = finished(two, reader, again(reader.initialOffset()))
    two.put(7)
    more, end = finished(two, reader, end)
    once(rows + more, two.all())

    two.put(5, two.b)
    restarted = two.stream(startingOffsets="earliest", **limits)
    last, _ = finished(two, restarted, end)
    once(rows + more + last, two.all())


def test_a_micro_batch_asks_brokers_little(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question goes over the network: none is asked twice in a step, and no task connects anew."""
    monkeypatch.setattr("messagestore.remoting.client.ROUTE_S", 5.0)
    monkeypatch.setattr(cluster, "LOOK_INTERVAL_S", 5.0)
    reader = two.stream(startingOffsets="earliest")
    rows, start = finished(two, reader, again(reader.initialOffset()))
    two.put(2)
    more, start = finished(two, reader, start)
    once(rows + more, two.all())

    before = {name: peer.connection_count for name, peer in two.peers.items()}
    two.put(2)
    for of_broker in reader._readers.values():
        waits = of_broker.follower.store._waits
        while len(waits.woken) < 2:  # what the broker said is on its way
            waits.is_quiet(of_broker.follower.seen)
    for broker in (two.a, two.b):
        broker.asked.clear()
    rows, _ = step(reader, start)
    assert {name: peer.connection_count for name, peer in two.peers.items()} == before
    assert [row for row in rows if row[0] == "broker-b"] == [("broker-b", 0, 6), ("broker-b", 1, 6)]
    counts = Counter(frame.code for frame in two.b.asked)
    assert counts[codes.VIEW_MESSAGE_BY_ID] == 1, "the last record of the plan, by the task"
    # For each queue: the last message of before with the new one, the row, and a pull that is kept
    assert counts[codes.PULL_MESSAGE] == 3 * 2
    assert counts.total() == counts[codes.VIEW_MESSAGE_BY_ID] + counts[codes.PULL_MESSAGE]


def test_a_limit_is_one_limit_for_all_brokers(two: Cluster) -> None:
    two.put(20, two.a)
    reader = two.stream(startingOffsets="earliest", maxOffsetsPerTrigger="6")
    start, sizes = again(reader.initialOffset()), []
    while True:
        rows, end = step(reader, start)
        if end == start:
            break
        sizes.append(len(rows))
        start = end
    assert sum(sizes) == 40
    assert max(sizes) <= 6
    assert len(sizes) <= 9, "a limit is used, too"


def test_few_messages_wait_for_more(two: Cluster) -> None:
    reader = two.stream(startingOffsets="earliest", minOffsetsPerTrigger="8", maxTriggerDelay="1h")
    _, end = finished(two, reader, again(reader.initialOffset()))
    two.put(3)
    assert step(reader, end) == ([], end)
    two.put(1)
    assert len(finished(two, reader, end)[0]) == 8


def test_a_new_query_begins_at_the_latest_messages(two: Cluster) -> None:
    reader = two.stream()
    start = again(reader.initialOffset())
    two.put(2)
    rows, _ = finished(two, reader, start)
    # Spark asks again before the first micro-batch; the first answer of a run counts
    assert sorted(rows) == sorted({("broker-a", 0, 5), ("broker-a", 1, 5), ("broker-b", 0, 5), ("broker-b", 1, 5)})


def test_a_new_broker_is_read_from_its_first_message(two: Cluster) -> None:
    reader = two.stream(startingOffsets="earliest")
    rows, end = finished(two, reader, again(reader.initialOffset()))
    new = Broker(name="broker-c")
    two.put(6, new)
    two.stack.enter_context(new.serve())
    two.a.others.append(new)
    more, _ = finished(two, reader, end)
    assert {name for name, _, _ in more} == {"broker-c"}
    once(rows + more, two.all())


def test_a_new_broker_whose_batch_is_planned_again(two: Cluster) -> None:
    """The offset at which the first batch of a new broker begins is in the end of this batch."""
    reader = two.stream(startingOffsets="latest")
    start = again(reader.initialOffset())
    new = Broker(name="broker-c", begins={("t", 0): 2})
    two.put(6, new)
    two.stack.enter_context(new.serve())
    two.a.others.append(new)
    end = again(reader.latestOffset(start, ALL))
    rows = read(reader, reader.partitions(start, end))
    two.put(6, new)
    other = two.stream(startingOffsets="latest")
    assert read(other, other.partitions(start, end)) == rows
    assert ("broker-c", 0, 2) in rows


def test_a_query_waits_for_a_broker_that_is_down_and_then_fails(two: Cluster) -> None:
    reader = two.stream(startingOffsets="earliest", retryTimeout="300ms")
    _, end = finished(two, reader, again(reader.initialOffset()))
    two.peers["broker-b"].__exit__(None, None, None)
    two.put(1, two.a)
    with pytest.raises(StoreUnavailableError, match=two.b.address):
        reader.latestOffset(end, ALL)


def test_a_broker_that_lost_its_tail(two: Cluster) -> None:
    """The query is refused, and with failOnDataLoss=false it goes on at what is newer."""
    reader = two.stream(startingOffsets="earliest")
    _, end = finished(two, reader, again(reader.initialOffset()))

    lost = two.b.queues["t", 1][3:]
    del two.b.queues["t", 1][3:]
    for place in [place for place, record in two.b.log.items() if record in lost]:
        del two.b.log[place]
    restarted = two.stream(startingOffsets="earliest")
    with pytest.raises(StoreWentBackwardsError, match=r"broker-b.*below the checkpoint"):
        restarted.latestOffset(end, ALL)


def test_available_now_ends_at_what_was_visible(two: Cluster) -> None:
    reader = two.stream(startingOffsets="earliest", maxOffsetsPerTrigger="7")
    start = again(reader.initialOffset())
    wanted = two.all()
    reader.prepareForTriggerAvailableNow()
    two.put(4)
    rows: list[Row] = []
    while True:
        some, end = step(reader, start)
        if end == start:
            break
        rows, start = rows + some, end
    once(rows, wanted)


def test_progress_is_published_on_each_broker(two: Cluster) -> None:
    reader = two.stream(startingOffsets="earliest", consumerGroup="spark")
    finished(two, reader, again(reader.initialOffset()))
    for broker in (two.a, two.b):
        assert broker.groups == {("spark", "t", 0): 5, ("spark", "t", 1): 5}
        pulls = [frame for frame in broker.asked if "queueOffset" in frame.fields]
        assert pulls
        assert {frame.fields["consumerGroup"] for frame in pulls} == {"spark"}


def test_an_unknown_topic_is_refused(two: Cluster) -> None:
    reader = two.stream(subscribe="t,missing", retryTimeout="300ms")
    with pytest.raises(UnknownTopicError, match=r"No broker of rocketmq://.* has had it for 0\.3 s"):
        reader.initialOffset()


class Forgetful:
    """Brokers that the name server does not know until their topics were asked for some times, as after a kill."""

    def __init__(self, forgotten: dict[str, int], *, brokers: bool) -> None:
        self.forgotten, self.brokers = forgotten, brokers
        self.asked = 0

    def __call__(self, request: Frame) -> bytes | None:
        left = self.forgotten.get("t", 0)
        if request.code == codes.GET_BROKER_CLUSTER_INFO and self.brokers and left:
            return answer(request, body=b'{"brokerAddrTable":{}}')
        if request.code != codes.GET_ROUTEINFO_BY_TOPIC or not left:
            return None
        self.asked += 1
        self.forgotten["t"] = left - 1
        return answer(request, codes.TOPIC_NOT_EXIST)


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("brokers", [True, False])
def test_a_topic_that_no_name_server_knows_for_a_moment(two: Cluster, is_new: bool, brokers: bool) -> None:
    """All brokers were killed, or the name server was started again: a query waits, whether it runs or begins."""
    rows: list[Row] = []
    start: Any = None
    if not is_new:
        reader = two.stream(startingOffsets="earliest")
        rows, start = finished(two, reader, again(reader.initialOffset()))
        two.put(4)
    forgetful = two.a.fault = Forgetful({"t": 4}, brokers=brokers)
    if is_new:
        reader = two.stream(startingOffsets="earliest")
        start = again(reader.initialOffset())
    more, _ = finished(two, reader, start)
    assert forgetful.asked == 4
    once(rows + more, two.all())


@pytest.mark.parametrize("restarted", [True, False])
def test_a_topic_that_was_deleted_under_a_query(two: Cluster, restarted: bool) -> None:
    """It is waited for, and the query then fails with a sentence that names it."""
    reader = two.stream(startingOffsets="earliest", retryTimeout="300ms")
    _, start = finished(two, reader, again(reader.initialOffset()))
    if restarted:
        reader = two.stream(startingOffsets="earliest", retryTimeout="300ms")
    for broker in (two.a, two.b):
        broker.queues.clear()
    with pytest.raises(UnknownTopicError, match="there is no topic 't'"):
        reader.latestOffset(start, reader.getDefaultReadLimit())


def test_a_topic_on_one_broker_only(two: Cluster) -> None:
    two.b.put("u", 0, b"x")
    reader = two.stream(subscribe="t,u", startingOffsets="earliest")
    rows, _ = finished(two, reader, again(reader.initialOffset()))
    assert len(rows) == 21


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"assign": '{"t": [0]}', "subscribe": ""}, "positions by queue"),
        ({"startingOffsets": '{"t": {"0": 5, "1": 5}}'}, "positions by queue"),
        ({"keys": "k"}, "needs the files"),
        ({"tokenFile": "x"}, "Brokers know no tokens"),
    ],
)
def test_options_that_brokers_cannot_have(two: Cluster, options: dict[str, str], words: str) -> None:
    options = {"path": two.path, "subscribe": "t"} | options
    with pytest.raises(ConfigError, match=words):
        source_options({name: value for name, value in options.items() if value})


@pytest.mark.parametrize("name", ["credentialsFile", "useTLS", "checkHostName", "readFrom"])
def test_options_for_brokers_without_a_broker(name: str) -> None:
    value = {"credentialsFile": "x", "readFrom": "slave"}.get(name, "true")
    with pytest.raises(ConfigError, match=f"option {name}: found together with"):
        source_options({"path": "store", "subscribe": "t", name: value})


def test_the_checkpoint_of_another_source(two: Cluster) -> None:
    reader = two.stream()
    with pytest.raises(ConfigError, match="offsets of a query that reads RocketMQ's brokers"):
        reader.latestOffset({"formatVersion": 1, "queues": {}}, ALL)


# ---- how brokers are reached


def test_requests_are_signed(two: Cluster, tmp_path: Path) -> None:
    """The driver's and the tasks'."""
    secret = tmp_path / "tools.yml"
    secret.write_text("accessKey: spark\nsecretKey: 12345678\n")
    reader = two.stream(startingOffsets="earliest", credentialsFile=str(secret))
    once(finished(two, reader, again(reader.initialOffset()))[0], two.all())
    assert {frame.fields.get("AccessKey") for broker in (two.a, two.b) for frame in broker.asked} == {"spark"}


def test_connections_are_encrypted(tmp_path: Path) -> None:
    """With a certificate that names another host, which is refused unless names do not count."""
    certificate = tls_files.certificate(tmp_path, "broker", "DNS:broker.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    broker = Broker()
    broker.put("t", 0, b"x")
    with broker.serve(context), ExitStack() as stack:
        options = {"path": f"rocketmq://{broker.address}", "subscribe": "t", "retryTimeout": "1s", "useTLS": "true"}
        options |= {"caFile": certificate[0], "startingOffsets": "earliest", "checkHostName": "false"}
        reader = ClusterStreamReader(source_options(options), ROW, STORES)
        stack.callback(reader.stop)
        assert step(reader, again(reader.initialOffset()))[0] == [("broker-a", 0, 0)]
        strict = ClusterStreamReader(source_options(options | {"checkHostName": "true"}), ROW, STORES)
        stack.callback(strict.stop)
        with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            strict.initialOffset()


def test_a_slave_is_read_if_the_query_says_so(two: Cluster) -> None:
    slave = Broker()
    two.put(4, slave)
    two.stack.enter_context(slave.serve())
    two.a.slave = slave
    reader = two.stream(startingOffsets="earliest", readFrom="slave")
    rows, _ = finished(two, reader, again(reader.initialOffset()))
    assert sum(name == "broker-a" for name, _, _ in rows) == 4, "the slave has less than the master"
    assert sum(name == "broker-b" for name, _, _ in rows) == 10, "there is no slave"


@pytest.mark.parametrize("limits", [{}, {"maxOffsetsPerTrigger": "100"}])
def test_brokers_are_asked_at_the_same_time(two: Cluster, limits: dict[str, str]) -> None:
    """No broker answers how far its queues reach before all have been asked: a step waits for the slowest one only."""
    meeting = threading.Barrier(2, timeout=30)
    met = {two.a.name: False, two.b.name: False}

    def waits_for_others(broker: Broker) -> Callable[[Frame], bytes | None]:
        def fault(request: Frame) -> None:
            if request.code == codes.GET_MAX_OFFSET and not met[broker.name]:
                met[broker.name] = True
                meeting.wait()

        return fault

    def together(ask: Callable[[], Any]) -> Any:
        met.update(dict.fromkeys(met, False))
        answer = ask()
        assert all(met.values())
        return answer

    for broker in (two.a, two.b):
        broker.fault = waits_for_others(broker)
    start = again(together(two.stream(startingOffsets="earliest", **limits).initialOffset))
    reader = two.stream(**limits)  # one that knows nothing yet, so that it asks
    assert two.is_all(again(together(lambda: reader.latestOffset(start, reader.getDefaultReadLimit()))))

    options = source_options({"path": two.path, "subscribe": "t", "retryTimeout": "5s"})
    assert len(together(ClusterBatchReader(options, ROW, STORES).partitions)) == 2


def test_an_error_of_one_broker_waits_for_the_answers_of_the_others() -> None:
    """Its readers may be used again when a step has failed."""
    at_once, log, may_end = _BrokerThreads(), list[str](), threading.Event()

    def ask(name: str) -> str:
        if name != "slow":
            may_end.set()
            raise StoreUnavailableError(name)
        assert may_end.wait(30)
        log.append(name)
        return name

    for names in (["slow", "fails"], ["fails", "slow"], ["fails", "slow", "fails too"]):
        may_end.clear()
        with pytest.raises(StoreUnavailableError, match="fails"):
            at_once.answers(names, ask)
    at_once.close()
    assert log == ["slow"] * 3
    assert at_once.answers([], ask) == {}
