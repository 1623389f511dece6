"""The stories of `torture.py`, in Spark: `python -m benchmarks.peers.torture_stories PART PLAN FOUND`.

The input of a query is a folder of files with ten rows each; the rows of file n are the numbers 10n to 10n+9. A
micro-batch is one file, unless a story says otherwise. What a crash leaves is made as follows: the part `killed` kills
its own JVM and itself while each query has a task that is done and one that is not. A driver that dies between the
sink's commit and Spark's leaves a checkpoint without the last file in `commits`, so that file is deleted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.peers import kafka_broker
from benchmarks.peers.spark_race import session
from benchmarks.peers.torture import STORIES

ROWS = 10
"""Rows of a file."""
CORES = 12
"""Enough for a task of each query that waits, and for others beside them."""
_PATIENCE_S = 180
APP = "torture"


class Target:
    """One sink and one story: an input, a checkpoint, and what is written to.

    Parameters
    ----------
    plan : dict
    spark : SparkSession
    name : str
        A name of `torture.TARGETS`.
    story : str
    """

    def __init__(self, plan: dict[str, Any], spark: Any, name: str, story: str) -> None:
        self.plan, self.spark, self.name = plan, spark, name
        self.folder = Path(plan["folder"], story, name)
        self.input, self.checkpoint, self.path = (self.folder / each for each in ("input", "checkpoint", "target"))
        self.topic = f"{story}-{name}".replace("_", "-")
        self.error = ""
        if name == "kafka" and not self.folder.exists():
            kafka_broker.create_topic(spark._jvm, plan["servers"], self.topic)
        self.input.mkdir(parents=True, exist_ok=True)

    # ---- input

    def files(self, first: int, count: int, of: str = "input") -> None:
        """Add files to an input."""
        for number in range(first, first + count):
            self.file(number, range(ROWS * number, ROWS * (number + 1)), of)

    def file(self, number: int, rows: range, of: str = "input") -> None:
        """Write one file, or replace it; its time says that it comes after those with a smaller number."""
        path = self.folder / of / f"{number:03}.csv"
        path.parent.mkdir(exist_ok=True)
        made = path.with_name(f".{number}")
        made.write_text("".join(f"{row}\n" for row in rows))
        os.utime(made, (1_700_000_000 + number, 1_700_000_000 + number))
        made.replace(path)

    def expected(self) -> Counter[int]:
        """The rows of all inputs, as they are now."""
        files = [path for path in self.folder.glob("*/*.csv") if path.parent.name.startswith("input")]
        return Counter(int(row) for path in files for row in path.read_text().split())

    # ---- the query

    def start(self, *, files: int = 1, of: str = "input", checkpoint: str = "checkpoint", hold: str = "") -> Any:
        """Start the query; it ends when it has written everything there is."""
        rows = self.spark.readStream.schema("id long").option("maxFilesPerTrigger", files).csv(str(self.folder / of))
        if hold:
            rows = rows.where(holding(hold)("id"))
        rows = rows.selectExpr("string(id) value")

        kind, _, app = self.name.partition("_")
        if app and kind == "delta":
            writer = rows.writeStream.foreachBatch(self._to_delta)
        else:
            writer = rows.writeStream.format({"ours": "messagestore"}.get(kind, kind))

        if kind == "kafka":
            writer = writer.option("kafka.bootstrap.servers", self.plan["servers"]).option("topic", self.topic)
        else:
            writer = writer.option("path", str(self.path))

        if kind == "ours":
            writer = writer.option("topic", "torture")
            if app:
                writer = writer.option("txnAppId", APP)

        writer = writer.option("checkpointLocation", str(self.folder / checkpoint))
        return writer.trigger(availableNow=True).start()

    def run(self, **options: Any) -> None:
        """Run the query to its end, and keep the error that it ends with."""
        try:
            self.start(**options).awaitTermination()
        except Exception as error:  # what a user would see is the result
            names = re.findall(r"\b(\w+(?:Error|Exception)): ", str(error))
            self.error = next((name for name in names if name.startswith(("Query", "Batch", "Lost"))), "")
            if not self.error:
                raise

    def forget(self, batch: int) -> None:
        """Leave the checkpoint as a driver does that dies after the sink's commit of a batch."""
        for name in (f"{batch}", f".{batch}.crc"):
            (self.checkpoint / "commits" / name).unlink()

    def _to_delta(self, rows: Any, batch_id: int) -> None:
        writer = rows.write.format("delta").mode("append").option("txnAppId", APP).option("txnVersion", batch_id)
        writer.save(str(self.path))

    # ---- what is there

    def rows(self) -> Counter[int]:
        """The rows of the target."""
        kind = self.name.partition("_")[0]
        if kind == "ours":
            found = self.spark.read.format("messagestore").option("subscribe", "torture").load(str(self.path))
        elif kind == "kafka":
            found = self.spark.read.format("kafka").option("kafka.bootstrap.servers", self.plan["servers"])
            found = found.option("subscribe", self.topic).load()
        else:
            found = self.spark.read.format(kind).load(str(self.path))
        return Counter(
            int(row[0]) for row in found.selectExpr(f"string({'body' if kind == 'ours' else 'value'})").collect()
        )

    def verdict(self) -> str:
        """What became of the rows of the input. A row that an error has kept out is not lost."""
        try:
            wanted, there = self.expected(), self.rows()
        except Exception as error:
            if self.name == "parquet" and "_spark_metadata" in str(error):  # its own list of batches has a gap
                return "**cannot be read any more**"
            raise
        lost, doubled = wanted - there, Counter({row: count - 1 for row, count in there.items() if count > 1})
        parts = [f"**lost {lost.total()}**"] if lost and not self.error else []
        parts += [f"**doubled {doubled.total()}**"] if doubled else []
        gone = len(there.keys() - wanted.keys()) if not self.error else 0
        parts += [f"**kept {gone} replaced rows**"] if gone else []
        if not self.error:
            return ", ".join(parts) or "right"
        return ", ".join([f"error (`{self.error}`)", *parts])


def holding(flag: str) -> Any:
    """A condition that all rows fulfil; those of the sixth file wait as long as there is a flag."""
    from pyspark.sql.functions import udf

    def held(row: int) -> bool:
        while row >= 5 * ROWS and os.path.exists(flag):
            time.sleep(0.1)
        return True

    return udf(held, "boolean", useArrow=False)


# ---- the stories


def killed_in_a_task(target: Target) -> None:
    target.run(files=2)


def killed_before_spark_notes(target: Target) -> None:
    target.files(0, 3)
    target.run()
    target.forget(2)
    target.files(3, 1)
    target.run()


def other_rows(target: Target) -> None:
    """Five of the ten rows of the last batch are other ones when it comes again."""
    target.files(0, 3)
    target.run()
    target.forget(2)
    target.file(2, range(25, 35))
    target.run()


def rolled_back(target: Target, files: int = 1) -> None:
    target.files(0, 2)
    target.run()
    shutil.copytree(target.checkpoint, target.folder / "backup")
    target.files(2, 2)
    target.run()
    shutil.rmtree(target.checkpoint)
    (target.folder / "backup").rename(target.checkpoint)
    target.files(4, 2)
    target.run(files=files)


def rolled_back_cut_otherwise(target: Target) -> None:
    rolled_back(target, files=2)


def new_checkpoint(target: Target, files: int = 1) -> None:
    target.files(0, 4)
    target.run()
    shutil.rmtree(target.checkpoint)
    target.files(4, 2)
    target.run(files=files)


def new_checkpoint_cut_otherwise(target: Target) -> None:
    new_checkpoint(target, files=2)


def two_queries(target: Target) -> None:
    target.files(0, 3)
    target.run()
    target.files(10, 3, of="input2")
    target.run(of="input2", checkpoint="checkpoint2")


def older_target(target: Target) -> None:
    target.files(0, 2)
    target.run()
    shutil.copytree(target.path, target.folder / "backup")
    target.files(2, 2)
    target.run()
    shutil.rmtree(target.path)
    (target.folder / "backup").rename(target.path)
    target.files(4, 1)
    target.run()


def kill(plan: dict[str, Any], spark: Any) -> None:
    """Start the queries of the first story, and kill the JVM and this process in the middle of the third batch."""
    flag = Path(plan["folder"], "hold")
    flag.touch()
    for name in plan["targets"]:
        target = Target(plan, spark, name, "killed_in_a_task")
        target.files(0, 6)
        target.start(files=2, hold=str(flag))

    deadline, tracker = time.monotonic() + _PATIENCE_S, spark.sparkContext.statusTracker()
    while time.monotonic() < deadline:
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        if [(s.numTasks, s.numCompletedTasks) for s in stages if s] == [(2, 1)] * len(plan["targets"]):
            break
        time.sleep(0.5)
    else:
        raise SystemExit("the queries did not come to their third batch")

    # The JVM goes first: this process could not kill it afterwards.
    os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    part, told, answered = sys.argv[1:]
    plan = json.loads(Path(told).read_text())
    Path(plan["folder"]).mkdir(exist_ok=True)
    spark = session(plan["folder"], plan["classpaths"], CORES)
    if part == "killed":
        kill(plan, spark)
    Path(plan["folder"], "hold").unlink()
    found: dict[str, dict[str, str]] = {}
    for story in STORIES:
        print(f"  {story}", file=sys.stderr, flush=True)
        for name in plan["targets"]:
            if story == "older_target" and name == "kafka":
                found.setdefault(story, {})[name] = "not tried"  # a topic cannot be restored with its offsets
                continue
            target = Target(plan, spark, name, story)
            globals()[story](target)
            found.setdefault(story, {})[name] = target.verdict()
            print(f"    {name}: {found[story][name]}", file=sys.stderr, flush=True)
    spark.stop()
    Path(answered).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
