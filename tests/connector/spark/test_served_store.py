"""Spark reads and writes a store only through its server: source, sink, stream copy, views, `MessageStoreSink`, TLS."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import ports

from messagestore import Message, MessageStore
from messagestore.serve import rereading
from messagestore.serve.access import Tokens
from messagestore.serve.certificates import Certificates
from messagestore.serve.hosted import Hosted
from messagestore.serve.lifecycle import ServedStore
from messagestore.serve.limits import Limits
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from pyspark_messagestore import MessageStoreSink
from small import SMALL, filled
from spark_faults.ledger import visible
from tls_files import certificate, replace, token_line


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of a store with 60 messages; its folder is nowhere in what Spark is told."""
    filled(tmp_path / "store", 60)
    server = Server(Service(Hosted(str(tmp_path / "store"), SMALL), Limits(streams=16)))
    server.start()
    yield server.url
    server.stop()


def read(spark: Any, url: str, topic: str) -> list[bytes]:
    frame = spark.read.format("messagestore").option("subscribe", topic).load(url)
    return sorted(bytes(row.body) for row in frame.select("body").collect())


def test_batches_are_written_and_read(spark: Any, url: str) -> None:
    frame = spark.range(500).selectExpr("CAST(id AS STRING) AS body", "CAST(id % 3 AS STRING) AS tags")
    write = frame.repartition(3).write.format("messagestore").mode("append").option("topic", "b")
    for _ in range(2):  # the second one is known
        write.option("txnAppId", "app").option("txnVersion", 0).save(url)
    assert read(spark, url, "b") == sorted(str(number).encode() for number in range(500))
    assert len(read(spark, url, "t")) == 60
    tagged = spark.read.format("messagestore").option("subscribe", "b").load(url).where("tags = '1'")
    assert tagged.count() == 167
    topics = spark.read.format("messagestore").option("view", "topics").load(url).collect()
    assert {row.topic: row.messages for row in topics} == {"t": 60, "b": 500}


def test_a_stream_copies_a_topic_exactly_once(spark: Any, url: str, tmp_path: Path) -> None:
    """Twice with the same checkpoint: the second run finds nothing new."""
    for _ in range(2):
        stream = (
            spark.readStream.format("messagestore")
            .option("subscribe", "t")
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", 25)
            .load(url)
            .select("body")
            .writeStream.format("messagestore")
            .option("topic", "copy")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(url)
        )
        stream.awaitTermination()
    assert read(spark, url, "copy") == read(spark, url, "t")


def test_the_sink_of_foreach_batch_writes_to_a_server(spark: Any, url: str, tmp_path: Path) -> None:
    (
        spark.readStream.format("messagestore")
        .option("subscribe", "t")
        .option("startingOffsets", "earliest")
        .load(url)
        .select("body")
        .writeStream.foreachBatch(MessageStoreSink(url, topic="f", app_id="each"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )
    assert read(spark, url, "f") == read(spark, url, "t")


def test_a_stream_over_https_with_a_token(spark: Any, tmp_path: Path) -> None:
    """Source, sink and `MessageStoreSink`. The token is in a file, so Spark's plan does not show it."""
    filled(tmp_path / "store", 60)
    cert, key = certificate(tmp_path, "server")
    tokens = replace(tmp_path / "tokens", token_line("spark", "write", "the-token"))
    given = {"tokenFile": replace(tmp_path / "token", "the-token"), "caFile": cert, "retryTimeout": "20s"}
    service = Service(Hosted(str(tmp_path / "store"), SMALL), Limits(streams=16), Tokens(tokens))
    server = Server(service, certificates=Certificates(cert, key))
    server.start()
    try:
        rows = spark.readStream.format("messagestore").option("subscribe", "t").option("startingOffsets", "earliest")
        rows = rows.options(**given).load(server.url).select("body")
        sink = rows.writeStream.format("messagestore").option("topic", "copy").options(**given)
        each = rows.writeStream.foreachBatch(MessageStoreSink(server.url, topic="each", app_id="each", **given))
        for name, query in (("sink", sink), ("each", each)):
            writer = query.option("checkpointLocation", str(tmp_path / name)).trigger(availableNow=True)
            (writer.start(server.url) if name == "sink" else writer.start()).awaitTermination()
        frames = [
            spark.read.format("messagestore").option("subscribe", topic).options(**given).load(server.url)
            for topic in ("t", "copy", "each")
        ]
        found = [sorted(bytes(row.body) for row in frame.select("body").collect()) for frame in frames]
        assert len(found[0]) == 60 and found[0] == found[1] == found[2]
        assert "the-token" not in frames[0]._jdf.queryExecution().toString()
        with pytest.raises(Exception, match="asks for a token, and the request has none"):
            spark.read.format("messagestore").option("subscribe", "t").option("caFile", cert).load(server.url).count()
    finally:
        server.stop()


def test_a_server_and_all_secrets_are_replaced_under_a_running_query(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Drained and started again, a new token, a new certificate, and all of it again: the query never fails.

    How long it wrote nothing because of this is in the report of the test (`--junit-xml`).
    """
    monkeypatch.setattr(rereading, "LOOK_S", 0.0)
    root = str(filled(tmp_path / "store", 20))
    certs = [certificate(tmp_path, f"server-{number}") for number in range(3)]
    trusted, tokens, token = tmp_path / "ca.pem", tmp_path / "tokens", tmp_path / "token"
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def trust(*numbers: int) -> None:
        replace(trusted, *(Path(certs[number][0]).read_text() for number in numbers))

    def show(number: int) -> None:
        replace(key, Path(certs[number][1]).read_text())
        replace(cert, Path(certs[number][0]).read_text())

    def accept(*numbers: int) -> None:
        replace(tokens, *(token_line("spark", "write", f"token-{number}") for number in numbers))

    port = ports.reserve()  # the retries of a client to a port that is free for all could get that very port

    def start() -> ServedStore:
        served = ServedStore(
            root, SMALL, port=port, cert_file=str(cert), key_file=str(key), token_file=str(tokens), limits=Limits()
        )
        served.start()
        return served

    trust(0), show(0), accept(0), replace(token, "token-0")
    served = start()
    options = {"tokenFile": str(token), "caFile": str(trusted), "retryTimeout": "120s"}
    rows = spark.readStream.format("messagestore").option("subscribe", "t").option("startingOffsets", "earliest")
    query = (
        rows.options(**options)
        .load(served.url)
        .select("body")
        .writeStream.format("messagestore")
        .options(topic="copy", checkpointLocation=str(tmp_path / "checkpoint"), **options)
        .trigger(processingTime="0 seconds")
        .start(served.url)
    )
    sent, runs = 20, {query.runId}

    def copied() -> bool:
        assert query.exception() is None, query.exception()
        return sum(map(len, visible(root, "copy").values())) == sent

    try:
        until(copied)
        for number in range(1, 3):
            accept(number - 1, number)
            trust(number - 1, number)
            replace(token, f"token-{number}")
            show(number)
            begin_s = time.monotonic()
            assert served.stop(60.0)
            with MessageStore.open(root, SMALL) as store:  # what the query finds when the server is there again
                for index in range(10):
                    store.put_message(Message("t", f"{number}/{index}".encode(), queue_id=0))
            sent += 10
            served = start()
            accept(number)
            trust(number)
            until(copied)
            record_property(f"pause {number} in seconds", round(time.monotonic() - begin_s, 2))
        assert query.isActive and {query.runId} == runs
    finally:
        query.stop()
        served.stop()
    bodies = [sorted(body for queue in visible(root, topic).values() for body in queue) for topic in ("t", "copy")]
    assert bodies[0] == bodies[1] and len(bodies[0]) == sent


def until(fact: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
