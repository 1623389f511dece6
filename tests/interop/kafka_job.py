"""A job that was written for Spark's connector for Kafka, and is run against whatever format it is given.

    python kafka_job.py PLAN    one line of JSON: what each step found

PLAN is a file with JSON. Its `targets` say how the same job is connected: the format, the options of the connection,
and what a write in `foreachBatch` needs in addition. Everything else is the same code for every format. The targets in
`on_connect` are done afterwards by another process, through Spark Connect; the session of this one is the server.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 # Spark's own habit
from pyspark.sql.streaming import StreamingQuery

WRITTEN = "key binary, value binary, headers array<struct<key:string,value:binary>>, partition int"
ROWS: list[tuple[bytes | None, bytes, list[tuple[str, bytes]] | None, int]] = [
    (b"N14228", b"EWR to IAH", [("carrier", b"UA")], 0),
    (b"N619AA", b"JFK to MIA", [("b", b"1"), ("a", b"2")], 1),
    (None, b"no key", None, 2),
    (b"N804JB", b"", [("carrier", "Zürich".encode())], 0),
    (b"N668DN", bytes(range(256)), [], 1),
    ("schlüssel".encode(), b"\xff\xfe", [("x" * 200, b"y" * 2000)], 2),
    (b"N14228", b"IAH to EWR", [("carrier", b"UA")], 0),
    (b"k" * 300, b"v" * 100_000, None, 1),
]
"""What a store can hold as well as a broker: keys are UTF-8 without blanks, and so on."""


class Job:
    """The steps, for one format.

    Parameters
    ----------
    spark : SparkSession
    target : dict
        `format`; `options` of the connection; `in_foreach`, options of a write in foreachBatch; `topic`, the prefix of
        the names of topics; `folder` for checkpoints; `dead_letters`, options that keep rows which cannot be stored.
    """

    def __init__(self, spark: SparkSession, target: dict[str, Any]) -> None:
        self.spark, self.format, self.options = spark, target["format"], target["options"]
        self.in_foreach, self.prefix, self.folder = target["in_foreach"], target["topic"], target["folder"]
        self.dead_letters = target["dead_letters"]

    # ---- what every Kafka job has

    def topic(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def write(self, rows: DataFrame, topic: str | None, **options: str) -> None:
        given = {} if topic is None else {"topic": self.topic(topic)}
        _append(rows, self.format, {**self.options, **given, **options})

    def read(self, **options: str) -> DataFrame:
        return self.spark.read.format(self.format).options(**self.options, **options).load()

    def stream(self, topic: str, **options: str) -> DataFrame:
        reader = self.spark.readStream.format(self.format).options(**self.options)
        return reader.option("subscribe", self.topic(topic)).options(**options).load()

    def start(self, rows: DataFrame, topic: str) -> StreamingQuery:
        writer = rows.writeStream.format(self.format).options(**self.options)
        writer = writer.option("topic", self.topic(topic)).option("checkpointLocation", f"{self.folder}/{topic}")
        return writer.trigger(availableNow=True).start()

    def rows(self, rows: Iterable[tuple[Any, ...]], schema: str = WRITTEN) -> DataFrame:
        return self.spark.createDataFrame(list(rows), schema).coalesce(1)

    def found(self, topic: str, **options: str) -> list[dict[str, Any]]:
        """All rows of a topic, in the order of partition and offset."""
        read = self.read(subscribe=self.topic(topic), includeHeaders="true", **options)
        return self.shown(read.drop("timestamp").collect())

    def shown(self, rows: Iterable[Row]) -> list[dict[str, Any]]:
        """Rows as JSON can hold them; the prefix of the topic is left out."""
        plain = [row.asDict(recursive=True) for row in rows]
        for row in plain:
            row["topic"] = row["topic"].removeprefix(f"{self.prefix}-")
        return sorted((_json(row) for row in plain), key=lambda row: (row["topic"], row["partition"], row["offset"]))

    # ---- the steps

    def steps(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        names = ["batch", "schemas", "positions", "times", "topics", "copied", "restarted", "foreach", "deduplicated"]
        for name in [*names, "counted", "by_key", "column_topic", "progress"]:
            yield name, getattr(self, name)

    def batch(self) -> Any:
        """A batch write with a column `partition`, and what a batch read gives back."""
        before = time.time()
        self.write(self.rows(ROWS), "batch", includeHeaders="true")
        times = self.read(subscribe=self.topic("batch")).selectExpr("double(timestamp)").collect()
        assert all(before - 1 <= row[0] <= time.time() + 1 for row in times), (before, times)
        return self.found("batch")

    def schemas(self) -> Any:
        """The columns and types of reads and streams, with headers and without."""
        topic = self.topic("batch")
        reader = self.spark.readStream.format(self.format).options(**self.options, subscribe=topic)
        frames = [self.read(subscribe=topic), self.read(subscribe=topic, includeHeaders="true")]
        frames += [reader.load(), reader.option("includeHeaders", "true").load()]
        return [[(field.name, field.dataType.simpleString()) for field in frame.schema.fields] for frame in frames]

    def positions(self) -> Any:
        """Starting and ending offsets as JSON; `assign`; `minPartitions`."""
        topic = self.topic("batch")
        starts = {topic: {"0": 1, "1": -2, "2": 2}}
        ends = {topic: {"0": 2, "1": -1, "2": 2}}
        bounded = self.found("batch", startingOffsets=json.dumps(starts), endingOffsets=json.dumps(ends))
        assigned = self.read(assign=json.dumps({topic: [0, 2]}), includeHeaders="true", minPartitions="4")
        return bounded, self.shown(assigned.drop("timestamp").collect())

    def times(self) -> Any:
        """A batch read from a time on, and up to it."""
        time.sleep(0.05)
        between = str(int(time.time() * 1000))
        time.sleep(0.05)
        self.write(self.rows([(b"later", b"%d" % number, None, number) for number in range(3)]), "batch")
        by_queue = json.dumps({self.topic("batch"): {str(number): int(between) for number in range(3)}})
        return [
            self.found("batch", startingTimestamp=between),
            self.found("batch", startingOffsetsByTimestamp=by_queue),
            self.found("batch", endingTimestamp=between),
            self.found("batch", endingOffsetsByTimestamp=by_queue),
        ]

    def topics(self) -> Any:
        """`subscribePattern`, and `subscribe` with several topics."""
        self.write(self.rows([(b"k", b"other", None, 0)]), "batch2")
        pattern = f"{self.prefix}-batch.*"
        lists = f"{self.topic('batch')},{self.topic('batch2')}"
        select = ("topic", "partition", "offset", "value")
        by_pattern = self.read(subscribePattern=pattern).select(*select).collect()
        return self.shown(by_pattern), self.shown(self.read(subscribe=lists).select(*select).collect())

    def copied(self) -> Any:
        """A stream with limits from topic to topic: what was read is written as it is."""
        limited = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "4", "includeHeaders": "true"}
        query = self.start(self.stream("batch", **limited), "copied")
        query.awaitTermination()
        batches = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
        return len(batches) > 1, sum(batches), self.found("copied")

    def restarted(self) -> Any:
        """The same query from its checkpoint gets what is new, and nothing twice."""
        self.write(self.rows([(b"after", b"%d" % number, None, number) for number in range(3)]), "batch")
        rows = self.stream("batch", startingOffsets="earliest", includeHeaders="true")
        self.start(rows, "copied").awaitTermination()
        self.start(rows, "copied").awaitTermination()
        return self.found("copied")

    def foreach(self) -> Any:
        """foreachBatch that looks at the rows, and writes some of them. On Connect, the server runs the function."""
        seen, format_, in_foreach = f"{self.folder}/seen", self.format, self.in_foreach
        options = {**self.options, "topic": self.topic("foreach")}

        def each(rows: DataFrame, batch_id: int) -> None:
            _note(seen, [batch_id, rows.count()])
            extra = {name: value.format(batch_id=batch_id) for name, value in in_foreach.items()}
            _append(rows.where("key = 'N14228'").select("key", "value", "partition"), format_, {**options, **extra})

        writer = self.stream("batch", startingOffsets=json.dumps({self.topic("batch"): {"0": 0, "1": -2, "2": -1}}))
        writer = writer.writeStream.foreachBatch(each).option("checkpointLocation", f"{self.folder}/foreach")
        writer.trigger(availableNow=True).start().awaitTermination()
        return _noted(seen), self.found("foreach")

    def deduplicated(self) -> Any:
        """Stateful: each value once, within a watermark on Kafka's timestamp, also across a restart."""
        twice = [(b"%d" % (number % 5), b"%d" % (number % 5), None, number % 3) for number in range(20)]
        for _ in range(2):
            self.write(self.rows(twice), "twice")
            rows = self.stream("twice", startingOffsets="earliest").withWatermark("timestamp", "1 hour")
            self.start(rows.dropDuplicatesWithinWatermark(["value"]).select("key", "value"), "once").awaitTermination()
        return sorted(row["value"] for row in self.found("once"))

    def counted(self) -> Any:
        """An aggregation in complete mode."""
        seen = f"{self.folder}/counts"

        def each(rows: DataFrame, _batch_id: int) -> None:
            _note(seen, sorted([row["value"].decode(), row["count"]] for row in rows.collect()))

        counts = self.stream("twice", startingOffsets="earliest").groupBy("value").count()
        writer = counts.writeStream.outputMode("complete").foreachBatch(each)
        writer = writer.option("checkpointLocation", f"{self.folder}/counted").trigger(availableNow=True)
        writer.start().awaitTermination()
        return _noted(seen)[-1]

    def by_key(self) -> Any:
        """Without a column `partition`, the rows of a key are in one partition, in their order."""
        rows = [(f"key-{number % 7}", f"{number}") for number in range(70)]
        self.write(self.rows(rows, "key string, value string"), "by_key")
        places: dict[str, set[int]] = {}
        orders: dict[str, list[str]] = {}
        for row in self.read(subscribe=self.topic("by_key")).orderBy("partition", "offset").collect():
            key = row["key"].decode()
            places.setdefault(key, set()).add(row["partition"])
            orders.setdefault(key, []).append(row["value"].decode())
        return {key: len(each) for key, each in places.items()}, orders

    def column_topic(self) -> Any:
        """A column `topic` says where each row goes; the option takes precedence over it."""
        rows = [(self.topic(name), b"v") for name in ("left", "right", "left")]
        schema = "topic string, value binary"
        frame = self.rows(rows, schema).withColumn("partition", F.lit(0))
        self.write(frame, None)
        self.write(frame, "forced")
        return [[row["value"] for row in self.found(name)] for name in ("left", "right", "forced")]

    def progress(self) -> Any:
        """A query that runs, and gets what is written meanwhile; it began at the latest messages."""
        seen = f"{self.folder}/got"

        def each(rows: DataFrame, _batch_id: int) -> None:
            for row in rows.select("value").collect():
                _note(seen, row["value"].decode())

        writer = self.stream("live").writeStream.foreachBatch(each)
        query = writer.option("checkpointLocation", f"{self.folder}/live").start()
        query.processAllAvailable()
        for number in range(3):
            self.write(self.rows([(None, b"%d" % number, None, 0)]), "live")
            query.processAllAvailable()
        progress = [each for each in query.recentProgress if each.numInputRows]
        query.stop()
        return (
            _noted(seen),
            sum(each.numInputRows for each in progress),
            [len(each["sources"]) for each in progress[:1]],
        )


def _append(rows: DataFrame, format_: str, options: dict[str, str]) -> None:
    rows.write.format(format_).options(**options).mode("append").save()


def _note(path: str, found: Any) -> None:
    """Keep what a function of foreachBatch found, for the program that started the query."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def _noted(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def hostile(job: Job, rows: dict[str, Any]) -> dict[str, Any]:
    """Writes each of some rows that a store cannot hold, beside a good one: nothing, or the error; and what is there."""
    frames = {}
    for name, (key, value, headers) in rows.items():
        bad = (_bytes(key), _bytes(value), None if headers is None else [(k, _bytes(v)) for k, v in headers], 0)
        frames[name] = job.rows([bad, (b"good", name.encode(), None, 0)])
    errors = {name: _tried(partial(job.write, frame, "hostile")) for name, frame in frames.items()}
    there = job.found("hostile")
    if job.dead_letters:
        for frame in frames.values():
            job.write(frame, "hostile", **job.dead_letters)
    dead = job.shown(job.read(subscribe=job.topic("dead"), includeHeaders="true").drop("timestamp").collect())
    return {"errors": errors, "rows": there, "kept": job.found("hostile"), "dead": dead}


def options(job: Job, given: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Reads a topic with each of some options: the number of rows, or the error."""
    return {name: _tried(lambda each=each: len(job.found("batch", **each))) for name, each in given.items()}


def differences(job: Job) -> dict[str, Any]:
    """What a Kafka job may do and a store does not: the result, or the error."""
    rows = job.rows([(b"k", b"v", None, 0)])

    def without_mode() -> None:
        given = {**job.options, "topic": job.topic("other")}
        rows.write.format(job.format).options(**given).save()

    def updates() -> None:
        counts = job.stream("twice", startingOffsets="earliest").groupBy("value").count().select("value")
        writer = counts.writeStream.format(job.format).options(**job.options).outputMode("update")
        writer = writer.option("topic", job.topic("other")).option("checkpointLocation", f"{job.folder}/update")
        writer.trigger(availableNow=True).start().awaitTermination()

    def in_foreach() -> None:
        format_, given = job.format, {**job.options, "topic": job.topic("other")}
        writer = job.stream("batch", startingOffsets="earliest").select("value").writeStream
        writer = writer.foreachBatch(lambda each, _: _append(each, format_, given))
        writer = writer.option("checkpointLocation", f"{job.folder}/plain")
        writer.trigger(availableNow=True).start().awaitTermination()

    def end_offset() -> Any:
        query = job.start(job.stream("batch2", startingOffsets="earliest"), "other")
        query.awaitTermination()
        names = json.loads(query.recentProgress[0]["sources"][0]["endOffset"])
        return [name for name in ("queues", job.topic("batch2")) if name in names]

    def continuous() -> None:
        rows = job.stream("batch2").select("key", "value").writeStream.format(job.format).options(**job.options)
        rows = rows.option("topic", job.topic("other")).option("checkpointLocation", f"{job.folder}/continuous")
        query = rows.trigger(continuous="1 second").start()
        query.stop()

    def matched() -> list[str]:
        rows = job.read(subscribePattern=f"{job.prefix}-\\p{{Alpha}}+2").select("topic").distinct().collect()
        return [row["topic"] for row in rows]

    def partitions_of_keys() -> list[int]:
        rows = job.read(subscribe=job.topic("by_key")).select("key", "partition").distinct().collect()
        return [partition for _, partition in sorted(tuple(row) for row in rows)]

    return {
        "continuous": _tried(continuous),
        "a pattern of Java": _tried(matched),
        "a topic that does not exist": _tried(partial(job.write, rows, "unknown")),
        "partitions of keys": _tried(partitions_of_keys),
        "no mode": _tried(without_mode),
        "update": _tried(updates),
        "foreachBatch": _tried(in_foreach),
        "another column": _tried(partial(job.write, rows.withColumn("body", F.lit("b")), "other")),
        "a missing partition": _tried(partial(job.write, rows.withColumn("partition", F.lit(99)), "other")),
        "a topic with a dot": _tried(partial(job.write, rows, "a.b")),
        "a limit in a batch": _tried(lambda: len(job.found("batch2", maxOffsetsPerTrigger="1"))),
        "a time to come": _tried(lambda: len(job.found("batch2", startingTimestamp="99999999999999"))),
        "end offset": _tried(end_offset),
        "timestampType": job.found("created")[0]["timestampType"],
    }


def _tried(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:  # noqa: BLE001 # what a user would see is the result
        lines = [line.strip() for line in str(error).splitlines()] or [""]
        said = [line for line in lines if "Error: " in line or "Exception: " in line]
        line = (said or lines[:1])[-1]
        return {"error": line[max(line.find("messagestore.errors."), 0) :][:600]}


def _json(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode() if len(value) < 1000 else f"{len(value)} bytes, CRC {zlib.crc32(value)}"
    if isinstance(value, dict):
        return {name: _json(each) for name, each in value.items()}
    return [_json(each) for each in value] if isinstance(value, list) else value


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("latin-1")


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder
    if "remote" in plan:
        builder = builder.remote(plan["remote"])
    else:
        builder = builder.master("local[2]")
        for name, value in {**plan["settings"], **(SERVER if plan["on_connect"] else {})}.items():
            builder = builder.config(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spark = builder.getOrCreate()
        results: dict[str, Any] = {}
        for name, target in plan["targets"].items():
            Path(target["folder"]).mkdir(exist_ok=True)
            job = Job(spark, target)
            results[name] = {step: run() for step, run in job.steps()}
            results[name]["hostile"] = hostile(job, plan["hostile"])
            results[name]["options"] = options(job, plan["options"])
            job.write(job.rows([(b"k", b"v", None, 0)]), "created")
            results[name]["differences"] = differences(job)
        if plan["on_connect"]:
            results |= on_connect(spark, plan)
        spark.stop()
    Path(plan["result"]).write_text(json.dumps(results))


SERVER = {"spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin", "spark.connect.grpc.binding.port": "0"}
"""Settings of a classic session that is a server of Spark Connect, too, at a free port."""


def on_connect(spark: SparkSession, plan: dict[str, Any]) -> dict[str, Any]:
    """Run the job in another process, through this session as its server, and return its results.

    Not beside the job of this session: Spark then fails now and then with "Task not serializable".
    """
    services = spark.sparkContext._jvm.org.apache.spark.sql.connect.service
    server = getattr(getattr(services, "SparkConnectService$"), "MODULE$")  # a Scala object
    path, result = Path(sys.argv[1] + ".connect"), Path(plan["result"] + ".connect")
    nothing: dict[str, Any] = {"on_connect": {}, "hostile": {}, "options": {}}  # these errors are the same there
    theirs = {**nothing, "targets": plan["on_connect"], "remote": f"sc://127.0.0.1:{server.localPort()}"}
    path.write_text(json.dumps({**plan, **theirs, "result": str(result)}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    subprocess.run([sys.executable, __file__, str(path)], env=environment, check=True)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


if __name__ == "__main__":
    main()
