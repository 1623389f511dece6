"""What a store on another host costs: the processor time of all processes, beside the same query on a local store.

Three places of one store take turns in each round: its folder, its server by HTTP, and its server by HTTPS with a
certificate and a token. Client and server are on this machine, so their processor time is added. A query is measured
between the ends of its first and its last micro-batch. The ratio is local over remote: 0.9 means that the remote query
needs a ninth more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Rounds, Settings, title
from benchmarks.process_tree import Meter

BATCHES = 3
_START_S = 60.0


@contextlib.contextmanager
def server(root: Path, folder: Path, *, tls: bool) -> Iterator[tuple[str, dict[str, str], int]]:
    """A server of a store; its URL, the options that a client needs, and its process id."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pyspark_messagestore.command", "serve", str(root), "--create"]
    command += ["--listen", "127.0.0.1:0"]
    options: dict[str, str] = {}
    if tls:
        words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=benchmark"
        words += f" -addext subjectAltName=IP:127.0.0.1 -keyout {folder}/key.pem -out {folder}/cert.pem"
        subprocess.run(words.split(), check=True, capture_output=True)
        token = secrets.token_urlsafe(32)
        (folder / "token").write_text(token)
        (folder / "tokens").write_text(f"benchmark write {hashlib.sha256(token.encode()).hexdigest()}\n")
        command += ["--cert-file", f"{folder}/cert.pem", "--key-file", f"{folder}/key.pem"]
        command += ["--token-file", f"{folder}/tokens"]
        options = {"tokenFile": f"{folder}/token", "caFile": f"{folder}/cert.pem"}
    log = folder / "log"
    with log.open("wb") as words_of_it:
        process = subprocess.Popen(command, stdout=words_of_it, stderr=words_of_it)
    try:
        yield _url(process, log), options, process.pid
    finally:
        process.terminate()
        process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL that a server says when it is ready."""
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and process.poll() is None:
        for word in log.read_text(errors="replace").split():
            if word.startswith(("http://", "https://")):
                return word.rstrip(".,;")
        time.sleep(0.02)
    raise RuntimeError(f"the server does not start: {log.read_text(errors='replace')[-2000:]}")


def cpu_ns(writer: Any, rows: int, path: str | None, pids: list[int]) -> float:
    """The processor time of all processes for a row, from the end of the first micro-batch to that of the last."""
    query = writer.start(path) if path else writer.start()
    meter: Meter | None = None
    try:
        while True:
            done = sum(1 for progress in query.recentProgress if progress["numInputRows"] >= rows)
            if done and meter is None:
                meter, first = Meter([os.getpid(), *pids]), done
            if meter is not None and done >= first + BATCHES:
                meter.sample()
                return 1e9 * meter.cpu_s / ((done - first) * rows)
            if not query.isActive:
                raise RuntimeError(str(query.exception()))
            time.sleep(0.05)
    finally:
        query.stop()


def run(settings: Settings) -> None:
    """Measure source and sink in Spark."""
    from benchmarks import messages
    from benchmarks.spark_streams import FOUR, MESSAGES, session
    from messagestore import MessageColumns, MessageStore

    title("processor time of all processes, by folder and by URL")
    spark, rounds, folder = session(), Rounds(), settings.folder
    read = folder / "read"
    batch = messages.table(settings.rows)
    with MessageStore.open(read) as store:
        store.create_topic("flights", messages.QUEUE_COUNT)
        for _ in range(BATCHES + 3):
            store.append_batch(MessageColumns.from_arrow(batch, topic="flights"))

    def source(name: str, path: str, options: dict[str, str], pids: list[int]) -> None:
        rows = spark.readStream.format("messagestore").schema(FOUR).options(**options).option("subscribe", "flights")
        rows = rows.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", settings.rows).load(path)
        made = rows.writeStream.format("noop").option("checkpointLocation", str(folder / f"of-{name}"))
        rounds.add(name.rpartition("-")[0], cpu_ns(made, settings.rows, None, pids))

    def sink(name: str, path: str, options: dict[str, str], pids: list[int]) -> None:
        rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", settings.rows)
        made = rows.option("numPartitions", 2).load().selectExpr(*MESSAGES).writeStream.format("messagestore")
        made = (
            made.options(**options).option("topic", "flights").option("checkpointLocation", str(folder / f"of-{name}"))
        )
        rounds.add(name.rpartition("-")[0], cpu_ns(made, settings.rows, path, pids))

    for number in range(settings.rounds):
        source(f"afar.source.local-{number}", str(read), {}, [])
        sink(f"afar.sink.local-{number}", str(folder / f"local-{number}"), {}, [])
        shutil.rmtree(folder / f"local-{number}")
        for kind, tls in (("http", False), ("https", True)):
            with server(read, folder / f"{kind}-read-{number}", tls=tls) as (url, options, pid):
                source(f"afar.source.{kind}-{number}", url, options, [pid])
            written = folder / f"{kind}-{number}"
            with server(written, folder / f"{kind}-write-{number}", tls=tls) as (url, options, pid):
                sink(f"afar.sink.{kind}-{number}", url, options, [pid])
            shutil.rmtree(written)

    for what, goals in (("source", (0.88, 0.70)), ("sink", (0.95, 0.80))):
        rounds.report(f"afar.{what}.local", "ns/row", lower_is_better=True)
        for kind, goal in zip(("http", "https"), goals, strict=True):
            name = f"afar.{what}.{kind}"
            rounds.report(name, "ns/row", floor=f"afar.{what}.local", lower_is_better=True)
            ratios = [a / b for a, b in zip(rounds.values[f"afar.{what}.local"], rounds.values[name], strict=True)]
            for ratio in ratios:
                rounds.add(f"{name}.local_over_this", ratio)
            rounds.report(f"{name}.local_over_this", "ratio", goal=goal)
    spark.stop()
