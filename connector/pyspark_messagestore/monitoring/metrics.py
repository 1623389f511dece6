"""The figures of a store for Prometheus: RocketMQ 5's names where it has one, and names with `spark_` for the rest.

Everything is read from the store's files, or asked of its server, and from Spark's checkpoints, when somebody asks.
Nothing is counted by the processes that write, which Spark ends and starts as it likes. A program that keeps a session
open may add what this session has counted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from messagestore import MessageStore, StoreConfig, StoreError, StoreStats
from messagestore.spi import STORES, Location, StoreReader
from pyspark_messagestore.checkpoint.spark_checkpoint import read_progress, stream_offset
from pyspark_messagestore.monitoring.health import UNRECOVERED, dead_letter_topics, deleted_unread, ids_of
from pyspark_messagestore.source.same_log import place_now

_SYSTEM_PREFIX = "rmq_sys_"

_log = logging.getLogger(__name__)


class StoreCollector(Collector):
    """Reads the figures of one store, and of the queries that read it, whenever Prometheus asks.

    Parameters
    ----------
    path : str | Location
        The store: a folder, which may not exist yet, or the URL of its server.
    checkpoints : sequence of str
        The checkpointLocations of queries that read the store.
    config : StoreConfig, optional
    session : MessageStore, optional
        A session of this process, whose counts are added.
    """

    def __init__(
        self,
        path: str | Location,
        checkpoints: Sequence[str] = (),
        config: StoreConfig | None = None,
        session: MessageStore | None = None,
    ) -> None:
        self.path = str(path)
        self.location = path if isinstance(path, Location) else Location.of(path)
        self.checkpoints = list(checkpoints)
        self.config = config
        self.session = session
        self._lock = threading.Lock()  # several scrapes at once read one after the other

    def describe(self) -> Iterator[Metric]:
        """Nothing: which metrics there are depends on the store."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All metrics. A store that cannot be read gives `spark_store_up` 0, and a line in the log."""
        up = GaugeMetricFamily("spark_store_up", "Whether the store could be read without a fault.", labels=["store"])
        metrics: list[Metric] = []
        with self._lock:
            try:
                config = (self.config or StoreConfig()).replace(message_index_enable=False)
                with contextlib.closing(STORES.reader(self.location, config)) as store:
                    metrics, faults = self._of_store(store)
                    metrics += self._of_queries(store)
            except (StoreError, OSError) as error:
                faults = [str(error)]

        for fault in faults:
            _log.warning("%s: %s", self.path, fault)
        up.add_metric([self.path], 0 if faults else 1)
        yield up
        yield from metrics

    def _of_store(self, reader: StoreReader) -> tuple[list[Metric], list[str]]:
        (read,), faults = reader.view("figures")
        store = self.path

        size = GaugeMetricFamily("rocketmq_storage_size", "Bytes of the log on the disk.", labels=["store"])
        size.add_metric([store], read["storageSize"])

        counted = None if self.session is None else self.session.stats()
        flush = GaugeMetricFamily(
            "rocketmq_storage_flush_behind_bytes", "Bytes of the log that no sync has covered.", labels=["store"]
        )
        dispatch = GaugeMetricFamily(
            "rocketmq_storage_dispatch_behind_bytes", "Bytes of the log that no reader sees yet.", labels=["store"]
        )
        behind = (read["dispatchBehind"], read["flushBehind"])
        if counted is not None and counted.dispatch_behind is not None:
            behind = (counted.dispatch_behind, counted.flush_behind)
        for family, value in zip((dispatch, flush), behind, strict=True):
            if value is not None:
                family.add_metric([store], value)

        pool = GaugeMetricFamily(
            "spark_pool_behind_bytes", "Bytes of puts that are only in the session's memory.", labels=["store"]
        )
        if counted is not None and counted.pool_behind is not None:
            pool.add_metric([store], counted.pool_behind)

        used = GaugeMetricFamily(
            "spark_disk_used_ratio", "How full the disk is under a folder.", labels=["store", "folder"]
        )
        for folder, percent in read["diskUsed"].items():
            used.add_metric([store, folder], percent / 100)

        reserve = GaugeMetricFamily(
            "rocketmq_storage_message_reserve_time", "Age of the oldest message, in milliseconds.", labels=["store"]
        )
        if read["reserveTimeMs"] is not None:
            reserve.add_metric([store], read["reserveTimeMs"])

        incoming = CounterMetricFamily(
            "rocketmq_messages_in", "Messages that the store ever got.", labels=["store", "topic", "is_system"]
        )
        number = GaugeMetricFamily("rocketmq_topic_number", "Topics with queues.", labels=["store"])
        number.add_metric([store], len(read["topics"]))
        for row in read["topics"]:
            incoming.add_metric([store, row["topic"], _is_system(row["topic"])], row["messagesIn"])

        letters = CounterMetricFamily(
            "spark_dead_letters", "Messages that topics ever got into which Spark puts dead letters.", labels=["store"]
        )
        of_spark = dead_letter_topics(read["counters"])
        letters.add_metric([store], sum(row["messagesIn"] for row in read["topics"] if row["topic"] in of_spark))

        metrics: list[Metric] = [size, dispatch, flush, pool, reserve, used, incoming, number, letters]
        metrics += [*_waiting(store, read), *_groups(store, read["groups"]), *_batches(store, read)]
        if counted is not None:
            metrics += _session(store, counted)
        if read["brokerName"] is not None:
            _name_node(metrics, read["brokerName"])
        return metrics, faults

    def _of_queries(self, store: StoreReader) -> list[Metric]:
        labels = ["store", "query_id", "source", "topic"]
        lag = GaugeMetricFamily("spark_query_lag_messages", "Messages that a query has not read.", labels=labels)
        size = GaugeMetricFamily("spark_query_lag_bytes", "Bytes of the records of these messages.", labels=labels)
        oldest = GaugeMetricFamily(
            "spark_query_lag_latency_seconds", "For how long the oldest of them waits.", labels=labels
        )
        deleted = GaugeMetricFamily(
            "spark_query_deleted_messages", "Of these messages, those that retention has deleted.", labels=labels
        )
        refused = GaugeMetricFamily(
            "spark_query_refused",
            "Whether a query refuses the store, because it is not the one that it has read.",
            labels=["store", "query_id"],
        )
        done = GaugeMetricFamily(
            "spark_query_last_batch", "The newest batch of a query that is done.", labels=["store", "query_id"]
        )
        planned = GaugeMetricFamily(
            "spark_query_planned_seconds",
            "How long ago the batch of a query was planned that is not done; 0: none is planned.",
            labels=["store", "query_id"],
        )
        now_s, own = time.time(), ids_of(store) if self.checkpoints else set()

        for folder in self.checkpoints:
            progress = read_progress(folder)
            waiting = next((batch for batch in progress.batches if not batch.committed), None)
            since_ms = None if waiting is None else waiting.planned_at_ms
            planned.add_metric(
                [self.path, progress.query_id], 0 if since_ms is None else max(0.0, now_s - since_ms / 1000)
            )

            batch = progress.committed
            if batch is None:
                continue
            done.add_metric([self.path, progress.query_id], batch.batch_id)
            is_refused = False

            for source, fields in enumerate(batch.offsets):
                offset = stream_offset(fields)
                if offset is None:
                    continue
                place, faults = place_now(store, offset)
                if offset.store_id not in own:
                    faults = ["it reads another one", *faults]
                is_refused = is_refused or bool(faults)
                for fault in faults:
                    _log.warning("%s: the query of %s refuses this store: %s", self.path, folder, fault)
                rows, _ = store.lag(place, offset.topics)

                rows_by_topic: dict[str, list[dict[str, Any]]] = {}
                for row in rows:
                    rows_by_topic.setdefault(row["topic"], []).append(row)

                for topic, some in sorted(rows_by_topic.items()):
                    values = [self.path, progress.query_id, str(source), topic]
                    lag.add_metric(values, sum(row["lag"] for row in some))
                    size.add_metric(values, sum(row["lagBytes"] for row in some))
                    deleted.add_metric(values, sum(map(deleted_unread, some)))
                    unread_ms = [row["oldestUnread"] for row in some if row["oldestUnread"] is not None]
                    oldest.add_metric(values, max(0.0, now_s - min(unread_ms) / 1000) if unread_ms else 0)
            refused.add_metric([self.path, progress.query_id], is_refused)

        return [lag, size, oldest, deleted, refused, done, planned]


def _name_node(metrics: list[Metric], broker_name: str) -> None:
    """Give RocketMQ's metrics the labels by which RocketMQ's dashboards tell brokers apart.

    Source: RocketMQ broker/metrics/BrokerMetricsManager.java (LABEL_NODE_TYPE, LABEL_NODE_ID).
    """
    node = {"node_type": "broker", "node_id": broker_name}
    for family in metrics:
        if family.name.startswith("rocketmq_"):
            family.samples = [sample._replace(labels={**sample.labels, **node}) for sample in family.samples]


def _waiting(store: str, read: dict[str, Any]) -> Iterator[Metric]:
    """How the store was left, and what waits in it."""
    left = GaugeMetricFamily("spark_store_left", "How the store was left: 1 for one word.", labels=["store", "left"])
    for word in ("closed", "open", "attached", "idle", *UNRECOVERED):
        left.add_metric([store, word], read["left"] == word)
    yield left

    now_ms, delayed, halves = read["nowMs"], read["delayed"], read["openHalves"]
    hidden, staged_ms = read["unproven"], read["staging"]["oldestMs"]
    due_ms = None if delayed is None else delayed["nextDueMs"]
    half_ms = None if halves is None else halves["oldestMs"]
    for name, meaning, value in (
        (
            "spark_newest_message_timestamp_seconds",
            "When the last message was stored, in seconds since 1970.",
            None if read["newestMs"] is None else read["newestMs"] / 1000,
        ),
        ("spark_broker_waits", "1: a broker waits until the writers let the store go.", int(read["brokerWaits"])),
        (
            "spark_unproven_messages",
            "Messages that readers do not show until a recovery.",
            0 if hidden is None else hidden["records"],
        ),
        ("spark_delayed_messages", "Delayed messages that wait.", None if delayed is None else delayed["messages"]),
        (
            "spark_delayed_overdue_seconds",
            "How long ago the first of them was due; 0: none is due.",
            None if delayed is None else _seconds_ago(due_ms, now_ms),
        ),
        ("spark_open_halves", "Half messages that are open.", None if halves is None else halves["messages"]),
        (
            "spark_open_halves_oldest_seconds",
            "How long ago the oldest of them was made.",
            None if halves is None else _seconds_ago(half_ms, now_ms),
        ),
        (
            "spark_staging_oldest_seconds",
            "How long ago anybody wrote to the oldest staging file; 0: there is none.",
            _seconds_ago(staged_ms, now_ms),
        ),
    ):
        family = GaugeMetricFamily(name, meaning, labels=["store"])
        if value is not None:
            family.add_metric([store], value)
        yield family


def _seconds_ago(time_ms: int | None, now_ms: int) -> float:
    return 0.0 if time_ms is None else max(0, now_ms - time_ms) / 1000


def _is_system(topic: str) -> str:
    return str(topic.startswith(_SYSTEM_PREFIX)).lower()


def _session(store: str, counted: StoreStats) -> Iterator[Metric]:
    """What a session of this process has put and read."""
    size = CounterMetricFamily(
        "rocketmq_throughput_in", "Bytes that this process has put.", labels=["store", "topic", "is_system"]
    )
    for topic, (_, put_size) in counted.topics.items():
        size.add_metric([store, topic, _is_system(topic)], put_size)
    yield size

    rates = GaugeMetricFamily(
        "spark_put_tps",
        "Messages that this process puts in a second, over the last seconds.",
        labels=["store", "seconds"],
    )
    for seconds, rate in counted.put_tps.items():
        rates.add_metric([store, str(seconds)], rate)
    yield rates

    puts = CounterMetricFamily("spark_puts", "Puts of this process that have ended.", labels=["store", "status"])
    for status, count in counted.put_statuses.items():
        puts.add_metric([store, status.name], count)
    yield puts

    times = GaugeMetricFamily(
        "spark_put_times", "How many of these puts took how long, in RocketMQ's buckets.", labels=["store", "time"]
    )
    for name, count in counted.put_times.items():
        times.add_metric([store, name], count)
    yield times

    gets = CounterMetricFamily(
        "spark_gets", "Reads of this process by get_message and get_batch.", labels=["store", "found"]
    )
    gets.add_metric([store, "true"], counted.gets_found)
    gets.add_metric([store, "false"], counted.gets_missed)
    yield gets

    got = CounterMetricFamily("spark_messages_got", "Messages that these reads returned.", labels=["store"])
    got.add_metric([store], counted.messages_got)
    yield got


def _groups(store: str, rows: list[dict[str, object]]) -> list[Metric]:
    labels = ["store", "consumer_group", "topic"]
    lag = GaugeMetricFamily("rocketmq_consumer_lag_messages", "Messages that a group has not consumed.", labels=labels)
    latency = GaugeMetricFamily(
        "rocketmq_consumer_lag_latency", "For how long the oldest of them waits, in milliseconds.", labels=labels
    )
    beyond = GaugeMetricFamily(
        "spark_consumer_beyond_messages",
        "By how many messages a group's places are beyond the ends of its queues: their numbers went back.",
        labels=labels,
    )
    deleted = GaugeMetricFamily(
        "spark_consumer_deleted_messages",
        "Messages that retention has deleted before a group read them.",
        labels=labels,
    )
    number = GaugeMetricFamily("rocketmq_consumer_group_number", "Groups with offsets.", labels=["store"])
    number.add_metric([store], len({row["group"] for row in rows}))

    for row in rows:
        values = [store, str(row["group"]), str(row["topic"])]
        lag.add_metric(values, float(str(row["lag"])))
        latency.add_metric(values, float(str(row["latencyMs"])))
        beyond.add_metric(values, float(str(row["beyond"])))
        deleted.add_metric(values, float(str(row["deleted"])))
    return [lag, latency, beyond, deleted, number]


def _batches(store: str, read: dict[str, object]) -> list[Metric]:
    total = CounterMetricFamily("spark_batches", "BATCH records that the store ever got.", labels=["store"])
    staged = GaugeMetricFamily(
        "spark_staging_files", "Staging files that wait for a commit, or that nobody will commit.", labels=["store"]
    )
    size = GaugeMetricFamily("spark_staging_bytes", "Bytes of these files.", labels=["store"])
    version = GaugeMetricFamily("spark_batch_last_version", "The newest batch of an app.", labels=["store", "app"])
    rows = GaugeMetricFamily("spark_batch_last_rows", "Rows of the newest batch of an app.", labels=["store", "app"])
    published = GaugeMetricFamily(
        "spark_batch_published_timestamp_seconds",
        "When the newest batch of an app was published, in seconds since 1970.",
        labels=["store", "app"],
    )

    total.add_metric([store], float(str(read["batches"])))

    staging, apps = read["staging"], read["apps"]
    assert isinstance(staging, dict)
    assert isinstance(apps, list)
    staged.add_metric([store], staging["files"])
    size.add_metric([store], staging["bytes"])

    for app in apps:
        for family, value, unit in (
            (version, app["lastVersion"], 1),
            (rows, app["lastRows"], 1),
            (published, app["publishedMs"], 1000),
        ):
            if value is not None:
                family.add_metric([store, app["app"]], value / unit)
    return [total, version, rows, published, staged, size, *_counters(store, read["counters"])]


def _counters(store: str, counters: object) -> Iterator[Metric]:
    """What leaves no trace in the log, as the writers have counted it."""
    assert isinstance(counters, dict)
    for name, field, meaning in (
        ("spark_known_batches", "knownBatches", "Replays of batches that the store held, with the same rows."),
        ("spark_skipped_batches", "skippedBatches", "Batches that an option of the sink said to skip."),
        ("spark_orphans_deleted", "orphansDeleted", "Staging files that nobody would have committed."),
    ):
        family = CounterMetricFamily(name, meaning, labels=["store"])
        if field in counters:
            family.add_metric([store], counters[field])
        yield family


def registry_of(
    path: str | Location,
    checkpoints: Sequence[str] = (),
    config: StoreConfig | None = None,
    session: MessageStore | None = None,
) -> CollectorRegistry:
    """A registry with the metrics of one store, for an endpoint of this process or of another framework."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(path, checkpoints, config, session))
    return registry
