"""How often the source and the sink ask a store: each call is a round trip if the store is on another host."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from messagestore import MessageColumns, MessageStore
from messagestore.serve.hosted import Hosted
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from messagestore.spi import LOCAL_STORES, STORES
from pyspark_messagestore.options.table import sink_options, source_options
from pyspark_messagestore.options.values import MOST
from pyspark_messagestore.sink.columns import prepare
from pyspark_messagestore.sink.writers import Sink, StreamWriter
from pyspark_messagestore.source.readers import StreamReader
from pyspark_messagestore.source.schema import Projection, core_schema
from sink_tasks import staged
from stream_steps import SMALL

TOPICS = 10
CONFIG = SMALL.replace(
    mapped_file_size_commit_log=1 << 24, max_message_size=1 << 20, mapped_file_size_consume_queue=400
)


class CountedReader:
    """A reader whose calls are counted; the elements of `gather` belong to its one call."""

    def __init__(self, store: Any, calls: Counter[str]) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._calls[name] += 1
            return method(*arguments, **options)

        return call

    def close(self) -> None:
        self._store.close()


class CountedStores:
    """Stores whose readers count."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def reader(self, *arguments: Any, **options: Any) -> CountedReader:
        return CountedReader(LOCAL_STORES.reader(*arguments, **options), self.calls)


@pytest.fixture(scope="module", params=[1000, pytest.param(10_000, marks=pytest.mark.slow)])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten topics with many queues, and three messages in each queue."""
    path, count = str(tmp_path_factory.mktemp("many") / "store"), request.param // TOPICS
    with MessageStore.open(path, CONFIG) as store:
        for topic in range(TOPICS):
            store.create_topic(f"t{topic}", count)
        for batch in range(3):
            for topic in range(TOPICS):
                ids = pa.array(range(count), pa.int32())
                rows = pa.record_batch({"body": [f"{batch}"] * count, "queue_id": ids})
                store.append_batch(MessageColumns.from_arrow(rows, topic=f"t{topic}"))
    return path


def reader(root: str, stores: CountedStores, **options: str) -> StreamReader:
    given = {"path": root, "subscribe": ",".join(f"t{topic}" for topic in range(TOPICS)), **options}
    if "subscribePattern" in options:
        del given["subscribe"]
    return StreamReader(source_options(given), Projection.of(core_schema("rocketmq")), stores)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": "earliest"},
        {"startingOffsets": "earliest", "subscribePattern": "t[0-9]", "maxBytesPerTrigger": "1m"},
        {"startingTimestamp": "1", "endingTimestamp": "4000000000000", "maxBytesPerPartition": "100k"},
    ],
    ids=["all", "pattern and limit", "times"],
)
def test_a_query_over_many_queues_is_restarted_with_few_calls(root: str, options: dict[str, str]) -> None:
    """Each question takes all queues at once: ten thousand round trips of a millisecond would be ten seconds."""
    stores = CountedStores()
    limit = ReadMaxRows(MOST) if "maxBytesPerTrigger" in options else ReadAllAvailable()

    begun = reader(root, stores, **options)
    start = begun.initialOffset()
    end = begun.latestOffset(start, limit)
    begun.stop()
    assert 0 < sum(stores.calls.values()) <= 20, stores.calls

    stores.calls.clear()
    restarted = reader(root, stores, **options)
    planned = restarted.partitions(start, end)
    restarted.latestOffset(end, limit)
    assert 0 < sum(stores.calls.values()) <= 20, stores.calls

    stores.calls.clear()
    assert sum(batch.num_rows for partition in planned[:2] for batch in restarted.read(partition)) > 0
    assert stores.calls == {"gather": len(planned[:2])}
    restarted.stop()


def requests_of(server: Server) -> Counter[str]:
    """How often a server was asked, by verb, when it has counted all that it has answered."""
    idle, service = server.service._idle, server.service
    with idle:
        assert idle.wait_for(lambda: not service._active, timeout=60)
    lines = server.service.counters.text().decode().splitlines()
    counted = [line for line in lines if line.startswith("messagestore_serve_requests_total{")]
    return Counter({line.split('"')[1]: int(line.rsplit(" ", 1)[1]) for line in counted})


def test_a_task_sends_a_server_one_request(root: str) -> None:
    """It asks for the bytes of its ranges, which name the store in which they were planned, and for nothing before."""
    server = Server(Service(Hosted(root, CONFIG)))
    server.start()
    try:
        given = {"path": server.url, "subscribe": "t0,t1", "startingOffsets": "earliest"}
        driver = StreamReader(source_options(given), Projection.of(core_schema("rocketmq")), STORES)
        start = driver.initialOffset()
        planned = driver.partitions(start, driver.latestOffset(start, ReadAllAvailable()))[:3]

        before = requests_of(server)
        assert sum(batch.num_rows for partition in planned for batch in driver.read(partition)) > 0
        assert requests_of(server) - before == {"gather": len(planned)}
        driver.stop()
    finally:
        server.stop()


def test_a_task_of_the_sink_asks_once_and_stages(root: str, context: SimpleNamespace) -> None:
    """What it asks for has the queue counts of all topics of its rows."""
    server = Server(Service(Hosted(root, CONFIG)))
    server.start()
    try:
        parsed = sink_options({"path": server.url})
        writer = StreamWriter(Sink.plan(parsed, prepare([("topic", "string"), ("body", "string")], None), STORES))
        rows = pa.record_batch({"topic": [f"t{topic}" for topic in range(TOPICS)], "body": ["x"] * TOPICS})

        before = requests_of(server)
        messages = staged(writer.sink, context, 0, rows, rows)
        assert requests_of(server) - before == {"writer/describe": 2, "stage": 2}
        writer.abort(messages, 0)
    finally:
        server.stop()
