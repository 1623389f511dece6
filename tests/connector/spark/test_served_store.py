"""Spark reads and writes a store only through its server: source, sink, stream copy, views, `MessageStoreSink`, TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messagestore.serve.access import Tokens
from messagestore.serve.certificates import Certificates
from messagestore.serve.hosted import Hosted
from messagestore.serve.limits import Limits
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from pyspark_messagestore import MessageStoreSink
from small import SMALL, filled
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
