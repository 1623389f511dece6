"""What does Spark see under the name `messagestore`?

The class that Spark's discovery finds. It checks what the user gave as early as it can, and hands on.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from messagestore import ConfigError
from messagestore.spi import LOCAL_STORES, Stores
from pyspark_messagestore.columns import prepare
from pyspark_messagestore.options import SinkOptions, check_names, sink_options, source_options
from pyspark_messagestore.schema import Projection, core_schema
from pyspark_messagestore.sink import BatchWriter, Sink, StreamWriter
from pyspark_messagestore.source import BatchReader, StreamReader


class MessageStoreDataSource(DataSource):
    """A RocketMQ-format message store as a source and a sink of Spark.

    Read a stream, and a batch:

        df = spark.readStream.format("messagestore").option("subscribe", "flights").load("/data/store")
        df = spark.read.format("messagestore").option("subscribe", "flights").load("/data/store")

    Write a stream, a stream through foreachBatch, and a batch:

        (df.writeStream.format("messagestore").option("topic", "flights")
           .option("checkpointLocation", "/data/ckpt").start("/data/store"))
        (df.writeStream.foreachBatch(MessageStoreSink("/data/store", topic="flights", app_id="mine"))
           .option("checkpointLocation", "/data/ckpt").start())
        df.write.format("messagestore").mode("append").option("topic", "flights").save("/data/store")

    Columns read: topic, queueId, queueOffset, body, tags, keys, properties, bornTimestamp, storeTimestamp, msgId; a
    schema with some of them reads only these. Columns written: body (value), topic, tags, keys (key), properties
    (headers), queueId (partition), shardingKey, bornTimestamp, flag. Options: connector/README.md.

    A micro-batch is in the store once and whole, or not at all. Append only.
    """

    stores: Stores = LOCAL_STORES
    """Opens the stores that are read and written; another one is put here for stores that are elsewhere."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        check_names(options)

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "messagestore"

    def schema(self) -> StructType:
        """The core columns. Asked for when reading without a schema."""
        source_options(self.options)
        return core_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        options = source_options(self.options)
        for name, value in (
            ("maxOffsetsPerTrigger", options.max_offsets_per_trigger),
            ("consumerGroup", options.consumer_group),
        ):
            if value is not None:
                raise ConfigError(
                    f"option {name}: is for streams, and this is a batch read; leave it out", key=name, value=value
                )
        return BatchReader(options, Projection.of(schema), self.stores)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 # Spark's name
        """For `spark.readStream`."""
        return StreamReader(source_options(self.options), Projection.of(schema), self.stores)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For `df.write`."""
        options = sink_options(self.options)
        if overwrite:
            raise ConfigError(
                'mode overwrite: a message log only grows, nothing in it is replaced; use .mode("append")', key="mode"
            )
        if options.txn_app_id is not None and options.txn_version is None:
            raise ConfigError(
                "option txnAppId: found without txnVersion; allowed is both or neither for a batch write",
                key="txnAppId",
            )
        return BatchWriter(self._sink(options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 # Spark's name
        """For `df.writeStream`."""
        options = sink_options(self.options)
        if overwrite:
            raise ConfigError(
                'outputMode complete: a message log only grows, nothing in it is replaced; use outputMode "append", or '
                "foreachBatch with MessageStoreSink",
                key="outputMode",
            )
        for name, value in (("txnVersion", options.txn_version), ("txnVersionSource", options.txn_version_source)):
            if value is not None:
                raise ConfigError(
                    f"option {name}: a stream's version is Spark's batch id; leave it out (txnAppId alone is allowed)",
                    key=name,
                    value=value,
                )
        return StreamWriter(self._sink(options, schema))

    def _sink(self, options: SinkOptions, schema: StructType) -> Sink:
        columns = [(column.name, column.dataType.simpleString()) for column in schema.fields]
        return Sink.plan(options, prepare(columns, options.topic), self.stores)


DefaultSource = MessageStoreDataSource
