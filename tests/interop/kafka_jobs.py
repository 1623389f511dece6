"""Small jobs for Spark's connector for Kafka, each about one thing that a job may rely on.

    python kafka_jobs.py PLAN    how long each job took; what it found is in the file that PLAN names

PLAN is a file with JSON. Its `targets` say how the jobs are connected: the format and the options of the connection.
Everything else is the same code for every format, but for the creation of topics. `test_kafka_jobs.py` says what each
job finds.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 # Spark's own habit
from pyspark.sql.streaming import StreamingQuery

PARTITIONS = 3
WRITTEN = "key binary, value binary, headers array<struct<key:string,value:binary>>, partition int"
Error = dict[str, str]


class Place:
    """A broker or a store with topics that belong to one job.

    Parameters
    ----------
    spark : SparkSession
    target : dict
        `format`; `options` of the connection; `folder` for checkpoints.
    name : str
        The job's name, with which the names of its topics begin.
    """

    def __init__(self, spark: SparkSession, target: dict[str, Any], name: str) -> None:
        self.spark, self.format, self.options = spark, target["format"], target["options"]
        self.name, self.folder = name, f"{target['folder']}/{name}"

    def topic(self, name: str = "a") -> str:
        return f"{self.name}-{name}"

    def create(self, name: str = "a", count: int = PARTITIONS) -> None:
        """Create a topic, or give it more partitions."""
        if self.format == "kafka":
            jvm = self.spark.sparkContext._jvm
            admin = _admin(jvm, self.options["kafka.bootstrap.servers"])
            if self.topic(name) in admin.listTopics().names().get():
                more = jvm.org.apache.kafka.clients.admin.NewPartitions.increaseTo(count)
                admin.createPartitions(jvm.java.util.Collections.singletonMap(self.topic(name), more)).all().get()
            else:
                empty = jvm.java.util.Optional.empty()
                number = jvm.java.util.Optional.of(jvm.java.lang.Integer.valueOf(count))
                made = jvm.org.apache.kafka.clients.admin.NewTopic(self.topic(name), number, empty)
                made.configs(jvm.java.util.Collections.singletonMap("message.timestamp.type", "LogAppendTime"))
                admin.createTopics(jvm.java.util.Collections.singleton(made)).all().get()
            admin.close()
            return
        from messagestore import MessageStore

        with MessageStore.open(self.options["path"]) as store:
            if self.topic(name) in store.topics():
                store.alter_topic(self.topic(name), read_queue_nums=count, write_queue_nums=count)
            else:
                store.create_topic(self.topic(name), count)

    def write(self, rows: DataFrame, name: str | None = "a", **options: str) -> None:
        given = {} if name is None else {"topic": self.topic(name)}
        rows.write.format(self.format).options(**{**self.options, **given, **options}).mode("append").save()

    def rows(self, rows: list[tuple[Any, ...]], schema: str = WRITTEN) -> DataFrame:
        return self.spark.createDataFrame(rows, schema).coalesce(1)

    def fill(self, values: range, name: str = "a", partitions: int = PARTITIONS) -> None:
        """Write numbers, to the partitions in turn."""
        self.write(self.rows([(None, b"%d" % value, None, value % partitions) for value in values]), name)

    def filled(self, count: int, name: str = "a") -> None:
        """A topic with so many numbers."""
        self.create(name)
        self.fill(range(count), name)

    def read(self, **options: Any) -> list[int]:
        """A batch read: the numbers that it finds."""
        frame = self.spark.read.format(self.format).options(**self.options, **self._asked(options)).load()
        return sorted(int(row[0]) for row in frame.selectExpr("string(value)").collect())

    def stream(self, **options: Any) -> DataFrame:
        return self.spark.readStream.format(self.format).options(**self.options, **self._asked(options)).load()

    def _asked(self, options: dict[str, Any]) -> dict[str, str]:
        given = {name: each if isinstance(each, str) else json.dumps(each) for name, each in options.items()}
        if not {"subscribe", "subscribePattern", "assign"} & options.keys():
            given["subscribe"] = self.topic()
        return {name: each for name, each in given.items() if each}

    def run(self, checkpoint: str = "query", **options: Any) -> list[list[int]]:
        """A query until it has read what is there: the numbers that each micro-batch finds."""
        with self.running(checkpoint, **options) as (query, found):
            query.awaitTermination()
        return found

    @contextmanager
    def running(
        self, checkpoint: str = "query", *, now: bool = True, **options: Any
    ) -> Iterator[tuple[StreamingQuery, list[list[int]]]]:
        """A query that runs, and what it has found so far. `now`: it ends when it has read what is there."""
        found: list[list[int]] = []

        def each(rows: DataFrame, _batch_id: int) -> None:
            numbers = sorted(int(row[0]) for row in rows.selectExpr("string(value)").collect())
            if numbers:
                found.append(numbers)

        writer = self.stream(**options).writeStream.foreachBatch(each)
        writer = writer.option("checkpointLocation", f"{self.folder}-{checkpoint}")
        query = (writer.trigger(availableNow=True) if now else writer.trigger(processingTime="0 seconds")).start()
        try:
            yield query, found
        finally:
            query.stop()


def _admin(jvm: Any, servers: str) -> Any:
    properties = jvm.java.util.Properties()
    properties.put("bootstrap.servers", servers)
    return jvm.org.apache.kafka.clients.admin.Admin.create(properties)


def tried(action: Callable[[], Any]) -> Any:
    """What an action finds, or the error that a user would see."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 # what a user would see is the result
        return _error(error)


def _error(error: Exception) -> Error:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = [line for line in lines if "Error: " in line or "Exception: " in line]
    line = (said or lines[:1])[-1]
    return {"error": line[max(line.find("messagestore.errors."), 0) :][:600]}


JOBS: dict[str, Callable[[Place], Any]] = {}


def job(action: Callable[[Place], Any]) -> Callable[[Place], Any]:
    JOBS[action.__name__] = action
    return action


# ---- which topics and partitions


@job
def pattern_without_a_match_in_a_batch(at: Place) -> Any:
    return at.read(subscribePattern=f"{at.name}-.*")


@job
def pattern_without_a_match_in_a_stream(at: Place) -> Any:
    """The topic comes later, between two runs."""
    before = at.run(subscribePattern=f"{at.name}-.*", startingOffsets="earliest")
    at.filled(5)
    return before, at.run(subscribePattern=f"{at.name}-.*", startingOffsets="earliest")


@job
def pattern_gets_a_topic(at: Place) -> Any:
    at.filled(3)
    before = at.run(subscribePattern=f"{at.name}-.*", startingOffsets="earliest")
    at.filled(5, "b")
    return before, at.run(subscribePattern=f"{at.name}-.*", startingOffsets="earliest")


@job
def pattern_of_a_part_of_a_name(at: Place) -> Any:
    at.filled(3)
    return at.read(subscribePattern=f"{at.name[:-1]}")


@job
def names_with_blanks_and_twice(at: Place) -> Any:
    at.filled(3)
    return at.read(subscribe=f" {at.topic()} ,{at.topic()},")


@job
def a_topic_that_is_not_there_in_a_batch(at: Place) -> Any:
    return at.read()


@job
def assign_a_missing_partition_in_a_batch(at: Place) -> Any:
    at.filled(6)
    return at.read(assign={at.topic(): [0, 7]})


@job
def assign_a_missing_partition_in_a_stream(at: Place) -> Any:
    at.filled(6)
    return at.run(assign={at.topic(): [0, 7]}, startingOffsets="earliest")


@job
def assign_an_empty_list(at: Place) -> Any:
    at.filled(6)
    return at.read(assign={at.topic(): []}), at.run(assign={at.topic(): []}, startingOffsets="earliest")


@job
def assign_an_empty_list_beside_another(at: Place) -> Any:
    at.filled(6)
    at.filled(3, "b")
    return at.read(assign={at.topic(): [], at.topic("b"): [0, 1]})


@job
def assign_nothing(at: Place) -> Any:
    at.filled(6)
    return at.read(assign={})


@job
def assign_a_partition_that_comes_later(at: Place) -> Any:
    at.filled(6)
    before = at.run(assign={at.topic(): [0, 3]}, startingOffsets="earliest")
    at.create(count=4)
    at.write(at.rows([(None, b"6", None, 3)]))
    return before, at.run(assign={at.topic(): [0, 3]}, startingOffsets="earliest")


@job
def two_ways_to_subscribe(at: Place) -> Any:
    at.filled(3)
    return at.read(subscribe=at.topic(), subscribePattern=".*")


@job
def no_way_to_subscribe(at: Place) -> Any:
    return at.read(subscribe="")


@job
def a_topic_that_joins(at: Place) -> Any:
    at.filled(3)
    at.filled(5, "b")
    before = at.run(startingOffsets="latest")
    return before, at.run(subscribe=f"{at.topic()},{at.topic('b')}", startingOffsets="latest")


@job
def a_topic_that_leaves(at: Place) -> Any:
    at.filled(3)
    at.filled(5, "b")
    before = at.run(subscribe=f"{at.topic()},{at.topic('b')}", startingOffsets="earliest")
    at.fill(range(3, 6))
    return before, tried(lambda: at.run(startingOffsets="earliest"))


@job
def a_topic_that_leaves_without_failOnDataLoss(at: Place) -> Any:  # noqa: N802 # an option
    at.filled(3)
    at.filled(5, "b")
    before = at.run(subscribe=f"{at.topic()},{at.topic('b')}", startingOffsets="earliest")
    at.fill(range(3, 6))
    return before, at.run(startingOffsets="earliest", failOnDataLoss="false")


@job
def a_partition_that_leaves_assign(at: Place) -> Any:
    at.filled(6)
    before = at.run(assign={at.topic(): [0, 1]}, startingOffsets="earliest")
    at.fill(range(6, 9))
    return before, tried(lambda: at.run(assign={at.topic(): [0]}, startingOffsets="earliest"))


@job
def checkpoints_that_were_swapped(at: Place) -> Any:
    at.filled(3)
    at.filled(5, "b")
    at.run("first", startingOffsets="earliest")
    at.run("second", subscribe=at.topic("b"), startingOffsets="earliest")
    at.fill(range(3, 6))
    return tried(lambda: at.run("second", startingOffsets="earliest"))


@job
def a_topic_gets_partitions(at: Place) -> Any:
    at.filled(6)
    before = at.run(startingOffsets="latest")
    at.create(count=5)
    at.fill(range(10), partitions=5)
    return before, at.run(startingOffsets="latest")


# ---- where a read begins and ends


@job
def words_in_capitals(at: Place) -> Any:
    at.filled(6)
    return at.read(startingOffsets="EARLIEST", endingOffsets="Latest"), at.run(startingOffsets=" Earliest ")


@job
def a_batch_from_the_latest(at: Place) -> Any:
    at.filled(6)
    return at.read(startingOffsets="latest")


@job
def a_batch_to_the_earliest(at: Place) -> Any:
    at.filled(6)
    return at.read(endingOffsets="earliest")


@job
def a_partition_that_is_not_listed(at: Place) -> Any:
    at.filled(6)
    return at.read(startingOffsets={at.topic(): {"0": 1}})


@job
def a_partition_that_is_listed_and_not_there(at: Place) -> Any:
    at.filled(6)
    return at.read(startingOffsets={at.topic(): {"0": 1, "1": 0, "2": 0, "7": 0}})


@job
def a_topic_that_is_listed_and_not_read(at: Place) -> Any:
    at.filled(6)
    at.filled(6, "b")
    listed = {str(number): 1 for number in range(PARTITIONS)}
    return at.read(startingOffsets={at.topic(): listed, at.topic("b"): listed})


def _at(offset: int, at: Place) -> dict[str, dict[str, int]]:
    return {at.topic(): {str(number): offset for number in range(PARTITIONS)}}


@job
def a_batch_from_beyond_the_end(at: Place) -> Any:
    at.filled(6)
    return at.read(startingOffsets=_at(5, at))


@job
def a_batch_from_beyond_the_end_without_failOnDataLoss(at: Place) -> Any:  # noqa: N802 # an option
    at.filled(6)
    return at.read(startingOffsets=_at(5, at), failOnDataLoss="false")


@job
def a_stream_from_beyond_the_end(at: Place) -> Any:
    """The offsets are there later, between two runs."""
    at.filled(6)
    before = tried(lambda: at.run(startingOffsets=_at(5, at)))
    at.fill(range(6, 21))
    return before, tried(lambda: at.run(startingOffsets=_at(5, at)))


@job
def a_stream_from_beyond_the_end_without_failOnDataLoss(at: Place) -> Any:  # noqa: N802 # an option
    at.filled(6)
    before = tried(lambda: at.run(startingOffsets=_at(5, at), failOnDataLoss="false"))
    at.fill(range(6, 21))
    return before, tried(lambda: at.run(startingOffsets=_at(5, at), failOnDataLoss="false"))


@job
def a_batch_that_ends_before_it_begins(at: Place) -> Any:
    at.filled(6)
    return at.read(startingOffsets=_at(2, at), endingOffsets=_at(1, at))


@job
def a_stream_with_an_end(at: Place) -> Any:
    at.filled(6)
    return at.run(startingOffsets="earliest", endingOffsets=_at(1, at))


@job
def a_time_with_an_empty_partition(at: Place) -> Any:
    at.create()
    at.write(at.rows([(None, b"0", None, 0), (None, b"1", None, 1)]))
    return [tried(partial(each, startingTimestamp="1")) for each in (at.read, at.run)]


@job
def a_time_with_an_empty_partition_and_the_latest(at: Place) -> Any:
    at.create()
    at.write(at.rows([(None, b"0", None, 0), (None, b"1", None, 1)]))
    latest = {"startingTimestamp": "1", "startingOffsetsByTimestampStrategy": "latest"}
    return [tried(partial(each, **latest)) for each in (at.read, at.run)]


@job
def a_time_of_minus_one(at: Place) -> Any:
    at.filled(6)
    before = tried(lambda: at.run(startingTimestamp="-1"))
    at.fill(range(6, 9))
    return before, tried(lambda: at.run(startingTimestamp="-1")), tried(lambda: at.read(startingTimestamp="-1"))


@job
def a_time_of_minus_two(at: Place) -> Any:
    at.filled(6)
    return tried(lambda: at.run(startingTimestamp="-2")), tried(lambda: at.read(startingTimestamp="-2"))


@job
def a_time_of_minus_one_by_partition(at: Place) -> Any:
    at.filled(6)
    return tried(lambda: at.read(startingOffsetsByTimestamp=_at(-1, at)))


# ---- limits


@job
def the_first_batch_does_not_wait_for_others(at: Place) -> Any:
    """What is there when a run begins is read at once, then messages wait."""
    at.filled(3)
    asked = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "100", "maxTriggerDelay": "15m"}
    runs = []
    for first in (3, 6):
        with at.running(now=False, **asked) as (query, found):
            query.processAllAvailable()
            at.fill(range(first, first + 3))
            query.processAllAvailable()
            runs.append(found)
    return runs


@job
def enough_messages_do_not_wait(at: Place) -> Any:
    at.filled(3)
    asked = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "4", "maxTriggerDelay": "15m"}
    with at.running(now=False, **asked) as (query, found):
        query.processAllAvailable()
        for first in (3, 5):
            at.fill(range(first, first + 2))
            query.processAllAvailable()
    return found


@job
def available_now_does_not_wait(at: Place) -> Any:
    at.filled(3)
    asked = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "100"}
    return at.run(**asked), at.fill(range(3, 6)), at.run(**asked)


@job
def fewer_than_the_partitions(at: Place) -> Any:
    at.filled(9)
    found = at.run(startingOffsets="earliest", maxOffsetsPerTrigger="1")
    return [len(each) for each in found], sorted(number for each in found for number in each)


@job
def as_many_as_the_partitions(at: Place) -> Any:
    at.filled(9)
    return at.run(startingOffsets="earliest", maxOffsetsPerTrigger="3")


@job
def a_limit_of_zero(at: Place) -> Any:
    at.filled(3)
    return at.run(maxOffsetsPerTrigger="0", startingOffsets="earliest")


@job
def more_at_least_than_at_most(at: Place) -> Any:
    at.filled(3)
    return at.run(minOffsetsPerTrigger="5", maxOffsetsPerTrigger="4")


@job
def delays_as_spark_writes_them(at: Place) -> Any:
    at.filled(3)
    asked = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "1"}
    found = [at.run(each, maxTriggerDelay=each, **asked) for each in ("1000", "10min", "5M", "100us")]
    return found, tried(lambda: at.run(maxTriggerDelay="soon", **asked))


# ---- options


@job
def an_option_that_is_unknown(at: Place) -> Any:
    at.filled(3)
    return at.read(failOnDataLos="false")


@job
def an_option_in_other_letters(at: Place) -> Any:
    at.filled(3)
    return at.read(STARTINGOFFSETS=_at(1, at), FAILONDATALOSS="TRUE")


@job
def limits_in_a_batch(at: Place) -> Any:
    at.filled(3)
    return at.read(maxOffsetsPerTrigger="1")


@job
def options_of_the_source_in_the_sink(at: Place) -> Any:
    at.create()
    at.write(at.rows([(None, b"0", None, 0)]), startingOffsets="earliest", subscribe="x")
    return at.read()


@job
def a_schema_of_the_user(at: Place) -> Any:
    at.filled(3)
    reader = at.spark.read.format(at.format).options(**at.options, subscribe=at.topic())
    return sorted(row[0].decode() for row in reader.schema("value binary").load().collect())


@job
def a_table_in_sql(at: Place) -> Any:
    at.filled(3)
    given = ", ".join(f"'{name}' '{value}'" for name, value in {**at.options, "subscribe": at.topic()}.items())
    name = f"{at.name}_{at.format}".replace("-", "_")
    at.spark.sql(f"CREATE TEMPORARY VIEW {name} USING {at.format} OPTIONS ({given})")
    view = [row[0] for row in at.spark.sql(f"SELECT count(*) FROM {name}").collect()]
    at.spark.sql(f"CREATE TABLE {name}_t USING {at.format} OPTIONS ({given})")
    return view, tried(lambda: [row[0] for row in at.spark.sql(f"SELECT count(*) FROM {name}_t").collect()])


# ---- rows


def _written(at: Place, *rows: tuple[Any, ...]) -> Any:
    at.create()
    at.write(at.rows(list(rows)))
    reader = at.spark.read.format(at.format).options(**at.options, subscribe=at.topic(), includeHeaders="true")
    found = reader.load().selectExpr("length(key)", "string(value)", "size(headers)").collect()
    return sorted(list(map(str, row)) for row in found)


@job
def a_large_key(at: Place) -> Any:
    return _written(at, (b"k" * 32_000, b"v", None, 0))


@job
def a_larger_key(at: Place) -> Any:
    return _written(at, (b"k" * 32_768, b"v", None, 0))


@job
def a_large_header(at: Place) -> Any:
    return _written(at, (b"k", b"v", [("h", b"x" * 32_768)], 0))


@job
def large_headers_together(at: Place) -> Any:
    return _written(at, (b"k", b"v", [("a", b"x" * 20_000), ("b", b"x" * 20_000)], 0))


@job
def a_key_with_a_separator(at: Place) -> Any:
    return _written(at, (b"a\x01b", b"v", None, 0))


@job
def a_header_without_a_name(at: Place) -> Any:
    return _written(at, (b"k", b"v", [("", b"x")], 0))


@job
def a_value_above_the_limit(at: Place) -> Any:
    """Kafka's producer has a limit of 1 MiB, and the store one of 4 MiB."""
    return [list(map(len, row)) for row in _written(at, (b"k", b"v" * 2_000_000, None, 0))]


@job
def partitions_that_are_null_for_some_rows(at: Place) -> Any:
    return _written(at, (b"k", b"v", None, None), (b"k", b"w", None, 1))


@job
def a_partition_below_zero(at: Place) -> Any:
    return _written(at, (b"k", b"v", None, -1))


@job
def columns_of_other_types(at: Place) -> Any:
    at.create()
    frames = {
        "value": at.rows([(1,)], "value int"),
        "partition": at.rows([("0", "v")], "partition string, value string"),
        "a long partition": at.rows([(0, "v")], "partition long, value string"),
        "headers": at.rows([("v", {"a": "b"})], "value string, headers map<string,string>"),
    }
    return {name: tried(partial(at.write, frame)) for name, frame in frames.items()}


@job
def a_topic_that_is_null(at: Place) -> Any:
    at.create()
    at.write(at.rows([(at.topic(), "v"), (None, "w")], "topic string, value string"), None)


# ---- streams


@job
def a_join_of_two_streams(at: Place) -> Any:
    at.filled(6)
    at.filled(4, "b")
    left = at.stream(startingOffsets="earliest").selectExpr("value AS l")
    right = at.stream(subscribe=at.topic("b"), startingOffsets="earliest").selectExpr("value AS r")
    found: list[int] = []
    writer = left.join(right, F.expr("l = r")).writeStream.option("checkpointLocation", f"{at.folder}-join")
    writer = writer.foreachBatch(lambda rows, _: found.extend(int(row["l"]) for row in rows.collect()))
    writer.trigger(availableNow=True).start().awaitTermination()
    return sorted(found)


@job
def windows_with_a_watermark(at: Place) -> Any:
    at.filled(6)
    rows = at.stream(startingOffsets="earliest").withWatermark("timestamp", "1 minute")
    found: list[int] = []
    writer = rows.groupBy(F.window("timestamp", "1 day")).count().writeStream.outputMode("update")
    writer = writer.foreachBatch(lambda rows, _: found.extend(row["count"] for row in rows.collect()))
    writer = writer.option("checkpointLocation", f"{at.folder}-windows").trigger(availableNow=True)
    writer.start().awaitTermination()
    return sum(found)


@job
def metrics_of_a_source(at: Place) -> Any:
    at.filled(6)
    with at.running(startingOffsets="earliest") as (query, _):
        query.awaitTermination()
    return sorted(query.recentProgress[0]["sources"][0]["metrics"])


@job
def a_trigger_once(at: Place) -> Any:
    at.filled(6)
    found: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = at.stream(startingOffsets="earliest", maxOffsetsPerTrigger="2").writeStream.trigger(once=True)
    writer = writer.foreachBatch(lambda rows, _: found.append(rows.count()))
    writer.option("checkpointLocation", f"{at.folder}-once").start().awaitTermination()
    return found


_STALLS = ("failed to connect back", "has passed since batch creation")
"""On a busy machine, Spark may give up on a Python process, and Kafka's producer on a partition of Kafka's broker."""


def found_by(name: str, spark: SparkSession, target: dict[str, Any]) -> Any:
    """What a job finds. After a stall that has nothing to do with it, it begins again, with a topic of its own."""
    found: Any = None
    for attempt in range(4):
        place = Place(spark, target, name.replace("_", "-") + (f"-{attempt}" if attempt else ""))
        found = tried(partial(JOBS[name], place))
        if not any(words in json.dumps(found) for words in _STALLS):
            break
    return found


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]")
    for name, value in plan["settings"].items():
        builder = builder.config(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spark = builder.getOrCreate()
        results: dict[str, Any] = {}
        asked = plan.get("jobs") or JOBS
        for target, where in plan["targets"].items():
            results[target] = {}
            for name in asked:
                began_s = time.monotonic()
                results[target][name] = found_by(name, spark, where)
                print(f"{time.monotonic() - began_s:6.1f} {target} {name}", flush=True)
        spark.stop()
    Path(plan["result"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
