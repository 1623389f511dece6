"""Bad input, and what the user must be told: run on classic Spark and on Connect.

python cases.py FOLDER NAME...     these on Connect; one line of JSON each
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from crash.imitate import Broker
from spark_runs import bodies, fill

Case = Callable[[object, str], None]
CASES: dict[str, tuple[Case, str]] = {}
"""Name -> what to do with a session and a store of 100 messages in topic `flights`, and the last line of the error."""

ON_CONNECT = (
    "unknown_option",  # a read, while Spark plans it
    "missing_topic_of_a_stream",  # a stream, as it begins
    "store_removed_under_a_query",  # ... and as it runs
    "wrong_column_type",  # a write, while Spark plans it
    "null_body",  # ... in a task
    "second_sink_with_the_same_app_id",  # ... in the commit
    "a_disk_the_executor_cannot_see",  # ... between the two
    "column_of_kafka",  # Spark's own error, before ours
)
"""One case for each place in which an error begins its way to the client; the other cases take one of these ways."""

CANNOT_MOUNT = "a small disk cannot be mounted here (not root?)"


def case(expected: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[function.__name__] = (function, expected)
        return function

    return register


def stream_in(df, root: str, **options: str) -> None:
    writer = df.writeStream.format("messagestore").option("checkpointLocation", root + "-checkpoint")
    writer.options(**{"topic": "flights", **options}).trigger(availableNow=True).start(root).awaitTermination()


def read(spark, root: str, **options: str):
    return spark.read.format("messagestore").options(**{"subscribe": "flights", **options}).load(root)


def read_stream(spark, root: str, **options: str):
    given = {"subscribe": "flights", "startingOffsets": "earliest", **options}
    return spark.readStream.format("messagestore").options(**given).load(root)


def write(df, root: str, **options: str) -> None:
    df.write.format("messagestore").mode("append").options(**{"topic": "flights", **options}).save(root)


@case(r"ConfigError: option startingoffset: no such option\. Did you mean startingOffsets\?")
def unknown_option(spark, root):
    read(spark, root, startingOffset="earliest").count()


@case(
    r"ConfigError: option keys: is for batch reads, but this is a stream\. Filter its rows instead, as in \.where\(.*\)"
)
def keys_in_a_stream(spark, root):
    stream_in(read_stream(spark, root, keys="N14228"), root)


@case(
    r"ConfigError: option startingOffsets: found -1 \(latest\), but a batch read that begins at the latest message reads nothing\..*"
)
def the_latest_offset_of_each_queue_in_a_batch_read(spark, root):
    read(spark, root, startingOffsets='{"flights": {"*": -1}}').count()


@case(r"ConfigError: option flushDiskType: found 'FAST'; allowed is SYNC_FLUSH or ASYNC_FLUSH")
def wrong_option(spark, root):
    write(spark.range(1).selectExpr("'x' body"), root, flushDiskType="FAST")


@case(
    r"ConfigError: readUpTo: found flushed, but nothing in \S+ says what is on the disk: a Java broker wrote the store "
    r"last, or spark/state is lost\. Read up to visible, or run `messagestore recover` when no broker is running"
)
def flushed_in_a_brokers_store(spark, root):
    Broker(Path(root))
    read(spark, root, readUpTo="flushed").count()


@case(
    r"UnknownTopicError: topic 'fights' is not in the store\. Its topics are: flights\. Create it with `messagestore topic "
    r"create \S+ fights`, or set onMissingTopic=wait for a stream that begins before its topic"
)
def missing_topic(spark, root):
    read(spark, root, subscribe="fights").count()


@case(
    r"UnknownTopicError: topic 'fights' is not in the store\. Its topics are: flights\. Create it with `messagestore topic "
    r"create \S+ fights`, or set onMissingTopic=wait for a stream that begins before its topic"
)
def missing_topic_of_a_stream(spark, root):
    stream_in(read_stream(spark, root, subscribe="fights").select("body"), root, topic="copy")


@case(r"ConfigError: option startingOffsets: found latest, but a batch read .*, or a startingTimestamp")
def batch_from_the_latest(spark, root):
    read(spark, root, startingOffsets="latest").count()


@case(r"ConfigError: option kafka.bootstrap.servers: is for a Kafka broker, .*")
def option_of_kafka(spark, root):
    read(spark, root, **{"kafka.bootstrap.servers": "localhost:9092"}).count()


@case(r"ConfigError: column body: found type bigint; allowed is binary or string")
def wrong_column_type(spark, root):
    write(spark.range(1).selectExpr("id body"), root)


@case(
    r"ConfigError: column price: no such column; allowed are .*\. Drop the column, put its value into the body or the properties, or set unknownColumns to properties or ignore"
)
def unknown_column(spark, root):
    write(spark.range(1).selectExpr("'x' body", "1 price"), root)


@case(r"MessageIllegalError: partition 1, row 99999: body: .*null.*\. Nothing of this batch was written")
def null_body(spark, root):
    df = spark.range(0, 200_000, 1, 2).selectExpr("if(id = 199999, null, 'x') body", "array('k') keys")
    write(df, root)


@case(r"MessageIllegalError: partition 0, row 12345: body: .*2001.*2000.*\. Nothing of this batch was written")
def oversized_body(spark, root):
    df = spark.range(0, 100_000, 1, 1).selectExpr("if(id = 12345, repeat('x', 2001), 'x') body")
    write(df, root, maxMessageSize="2000")


@case(r"MessageIllegalError: partition 0, row 3: .*key.*\. Nothing of this batch was written")
def key_with_a_blank(spark, root):
    write(spark.range(0, 10, 1, 1).selectExpr("'x' body", "array(if(id = 3, 'a b', 'c')) keys"), root)


@case(r"ConfigError: mode overwrite: a message log only grows.*")
def overwrite(spark, root):
    df = spark.range(1).selectExpr("'x' body")
    df.write.format("messagestore").mode("overwrite").option("topic", "flights").save(root)


@case(r"ConfigError: outputMode complete: a message log only grows.*")
def complete_mode(spark, root):
    df = read_stream(spark, root).groupBy("queueId").count().selectExpr("cast(count as string) body")
    writer = df.writeStream.format("messagestore").outputMode("complete").option("topic", "counts")
    writer.option("checkpointLocation", root + "-c").trigger(availableNow=True).start(root).awaitTermination()


@case(
    r"StoreLockedError: .*locked by a RocketMQ broker, pid .*Nothing of this batch was written\. Stop that process, or write to another store"
)
def held_by_a_broker(spark, root):
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1, 0);"
        "print('held', flush=True); time.sleep(120)"
    )
    with subprocess.Popen([sys.executable, "-c", code, root + "/lock"], stdout=subprocess.PIPE, text=True) as broker:
        try:
            assert broker.stdout.readline()
            write(spark.range(1).selectExpr("'x' body"), root)
        finally:
            broker.kill()


@case(r"BatchConflictError: app 'mine': version 0 is in the store with 5 rows .*, and came again with 6 rows .*")
def second_query_with_the_same_app_id(spark, root):
    for rows in (5, 6):
        write(spark.range(rows).selectExpr("'x' body"), root, topic="other", txnAppId="mine", txnVersion="0")


@case(
    r"QueryConflictError: app 'mine': found version 0 of query .*, but the batches .* are of query .* txnAppId .* of its own.*"
)
def second_stream_with_the_same_app_id(spark, root):
    for name, most in (("first", "100"), ("second", "50")):
        df = read_stream(spark, root, maxOffsetsPerTrigger=most).select("body")
        stream_in(df, root, topic="copy", txnAppId="mine", checkpointLocation=f"{root}-{name}")


@case(
    r"BatchConflictError: app 'mine': version 0 .* rows for topic other, and came again with rows for topic another\. .*"
)
def second_sink_with_the_same_app_id(spark, root):
    for topic in ("other", "another"):
        write(spark.range(5).selectExpr("'x' body"), root, topic=topic, txnAppId="mine", txnVersion="0")


@case(
    r"NotAStoreError: .*host .* found no store there, .*executors and driver see the same store, on one disk or by one URL.*"
)
def a_disk_the_executor_cannot_see(spark, root):
    hidden = root + "-hidden"

    def hide(batches):
        for batch in batches:
            if os.path.exists(root):
                os.rename(root, hidden)  # between the plan, on the driver, and the first byte of the task
            yield batch

    try:
        write(spark.range(0, 5, 1, 1).selectExpr("'x' body").mapInArrow(hide, "body string"), root)
    finally:
        os.rename(hidden, root)


@case(
    r"StoreFullError: .*this batch needs about \d+ bytes, but \d+ are free\. Nothing of it was written\. Make room and try again"
)
def a_full_disk(spark, root):
    disk = root + "-disk"
    os.mkdir(disk)
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        raise OSError(CANNOT_MOUNT)
    try:
        fill(disk + "/store", 100)
        # the staged rows fit, their second copy in the log does not
        write(spark.range(0, 4000, 1, 2).selectExpr("repeat('x', 1000) body"), disk + "/store")
    finally:
        try:
            assert sum(bodies(disk + "/store", "flights").values()) == 100
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)


@case(r"NotAStoreError: .* found no message store .*\. Give the store's root folder")
def not_a_store(spark, root):
    read(spark, os.path.dirname(root)).count()


@case(
    r"ConfigError: option path: found 'dbfs:/x'; allowed is the path of a folder .* \(no ~, and no URI such as .*\), "
    r"or rocketmq://host:port;host:port with name servers of RocketMQ, "
    r"or rocketmq\+http://host:port/rocketmq/nsaddr with a server that lists them"
)
def path_of_databricks(spark, root):
    write(spark.range(1).selectExpr("'x' body"), "dbfs:/x")


@case(r"NotAStoreError: \S+-file/store: \S+-file is a file; allowed is a folder. Give another path")
def path_below_a_file(spark, root):
    Path(f"{root}-file").touch()
    write(spark.range(1).selectExpr("'x' body"), f"{root}-file/store")


@case(r"NotAStoreError: \S+-copy: found no message store .*\. Give the store's root folder")
def store_removed_under_a_query(spark, root):
    copy = f"{root}-copy"
    shutil.copytree(root, copy)
    writer = read_stream(spark, copy).writeStream.format("noop").option("checkpointLocation", f"{root}-checkpoint")
    query = writer.start()
    query.processAllAvailable()
    shutil.rmtree(copy)
    query.awaitTermination(60)


@case(r"\[UNRESOLVED_COLUMN\.WITH_SUGGESTION\] .* `value` cannot be resolved. Did you mean .*`body`.*")
def column_of_kafka(spark, root):
    read(spark, root).select("value").collect()


@case(r'\[UNSUPPORTED_DATA_SOURCE_SAVE_MODE\] .*"ErrorIfExists" mode.*"Append".*')
def no_mode(spark, root):
    spark.range(1).selectExpr("'x' body").write.format("messagestore").option("topic", "flights").save(root)


@case(r"ConfigError: schema: column body: found type string; allowed is binary")
def wrong_schema(spark, root):
    spark.read.format("messagestore").schema("body string").option("subscribe", "flights").load(root).count()


def told(spark, root: str, name: str) -> tuple[str, bool, bool]:
    """What the error of a case says, whether its first three lines say it, and whether the store is as it was."""
    fill(root, 100)
    before = bodies(root, "flights")
    function, _ = CASES[name]
    text = "no error"
    try:
        function(spark, root)
    except Exception as error:  # noqa: BLE001 # whatever Spark makes of it is what the user sees
        text = str(error)
    line = last_line(text)
    return line, any(line in each for each in text.splitlines()[:3]), bodies(root, "flights") == before


def last_line(text: str) -> str:
    """What Python's error says, before Spark's own words; without such an error, Spark's own first line."""
    found = re.findall(r"messagestore\.errors\.(\w+Error: .*)|^\s*((?:\S+: )*\w*Error: .*)", text, re.MULTILINE)
    return "".join(found[-1]).strip() if found else text.splitlines()[0][:2000]


def main() -> None:
    warnings.simplefilter("ignore")
    import connect_checks
    from pyspark.sql import SparkSession

    folder, names = Path(sys.argv[1]), sys.argv[2:]
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    for name in names:
        if name in CASES:
            print("CASE", json.dumps([name, *told(spark, str(folder / name / "store"), name)]), flush=True)
        else:
            connect_checks.CHECKS[name](spark, folder / "checks" / name)
            print("CHECK", name, flush=True)
    print('{"done": true}')
    spark.stop()


if __name__ == "__main__":
    main()
