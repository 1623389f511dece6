"""The data source `messagestore`: the class behind the one that Spark's discovery finds.

It checks the user's options as early as it can, and passes the work on to `source` and `sink`.
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

from messagestore import ConfigError, StoreError
from messagestore.spi import ERROR, STORES, Stores
from pyspark_messagestore.options.sink_options import SinkOptions
from pyspark_messagestore.options.source_options import MESSAGES
from pyspark_messagestore.options.table import check_names, sink_options, source_options
from pyspark_messagestore.plain_errors import plain_errors
from pyspark_messagestore.sink.brokers import BrokerSink
from pyspark_messagestore.sink.columns import prepare
from pyspark_messagestore.sink.writers import BatchWriter, Sink, StreamWriter
from pyspark_messagestore.source.cluster import ClusterBatchReader, ClusterStreamReader
from pyspark_messagestore.source.readers import BatchReader, FilteringReader, RefusedStream, StreamReader
from pyspark_messagestore.source.schema import Projection, core_schema
from pyspark_messagestore.source.views import VIEWS, ViewReader


@plain_errors("__init__", "schema", "reader", "writer", "streamWriter")
class MessageStoreDataSource(DataSource):
    """A message store in RocketMQ's file format, as a source and a sink of Spark.

    Use it by its name, `format("messagestore")`, with `spark.read`, `spark.readStream`, `df.write` and
    `df.writeStream`. connector/README.md lists all options and columns.

    **Reading.** A DataFrame has the columns topic, queueId, queueOffset, body, tags, keys, properties, bornTimestamp,
    storeTimestamp and msgId; a schema that names some of them reads only those. A stream gets each message once, in
    order within its queue, also across restarts. A batch that is being written is not seen.

    **Writing.** The sink takes the columns body (or value), topic, tags, keys (or key), properties (or headers),
    queueId (or partition), shardingKey, bornTimestamp and flag. It appends only. A micro-batch is in the store once and
    completely, or not at all, even if any process is killed at any time. The same is true of a batch write with the
    options `txnAppId` and `txnVersion`; without them, a batch write that runs again writes its rows again. Rows of one
    Spark partition that go to the same queue keep their order.

    Parameters
    ----------
    options : mapping of str to str
        The user's options; Spark passes them in.

    Raises
    ------
    ConfigError
        An option is unknown, missing or wrong. The message says what is allowed.

    See Also
    --------
    MessageStoreSink : The sink for `foreachBatch`.

    Examples
    --------
    >>> import tempfile
    >>> from pyspark.sql import SparkSession
    >>> spark = SparkSession.builder.getOrCreate()
    >>> folder = tempfile.mkdtemp()  # of your own; tasks and driver must see it
    >>> gates = spark.createDataFrame([("B12", "UA"), ("C3", "AA")], "body string, tags string")
    >>> gates.write.format("messagestore").mode("append").option("topic", "gates").save(f"{folder}/store")

    Copy the topic to another one as a stream:

    >>> stream = spark.readStream.format("messagestore").option("subscribe", "gates")
    >>> query = (
    ...     stream.option("startingOffsets", "earliest")
    ...     .load(f"{folder}/store")
    ...     .writeStream.format("messagestore")
    ...     .option("topic", "gates-copy")
    ...     .option("checkpointLocation", f"{folder}/checkpoint")
    ...     .trigger(availableNow=True)
    ...     .start(f"{folder}/store")
    ... )
    >>> query.awaitTermination()

    Read the copy:

    >>> copy = spark.read.format("messagestore").option("subscribe", "gates-copy").load(f"{folder}/store")
    >>> copy.selectExpr("string(body) AS body", "tags").orderBy("body").collect()
    [Row(body='B12', tags='UA'), Row(body='C3', tags='AA')]
    """

    stores: Stores = STORES
    """Opens the stores that are read and written."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        check_names(options)

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "messagestore"

    def schema(self) -> StructType:
        """The columns that a read without a schema has."""
        options = source_options(self.options)
        if options.contents != MESSAGES:
            return VIEWS[options.contents]
        wanted = (
            ("headers", options.include_headers),
            (ERROR, options.bad_records == "keep"),
            ("sysFlag", not options.decompress),
        )
        extra = [name for name, asked in wanted if asked]
        return core_schema(options.row_format, *extra)

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader for `spark.read`."""
        options = source_options(self.options)
        options.check_batch()
        if options.contents != MESSAGES:
            return ViewReader(options, schema, self.stores)
        if options.path.is_cluster and not options.path.broker:
            return ClusterBatchReader(options, Projection.of(schema, options.row_format), self.stores)
        kind = FilteringReader if options.filter_pushdown else BatchReader
        return kind(options, Projection.of(schema, options.row_format), self.stores)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 # Spark's name
        """The reader for `spark.readStream`. If the options are wrong, its calls say so: see `RefusedStream`."""
        try:
            return self._stream_reader(schema)
        except StoreError as error:
            return RefusedStream(error)

    def _stream_reader(self, schema: StructType) -> StreamReader | ClusterStreamReader:
        options = source_options(self.options)
        options.check_stream()
        if options.path.is_cluster and not options.path.broker:
            return ClusterStreamReader(options, Projection.of(schema, options.row_format), self.stores)
        return StreamReader(options, Projection.of(schema, options.row_format), self.stores)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """The writer for `df.write`."""
        options = sink_options(self.options)
        if overwrite:
            raise ConfigError(
                'mode overwrite: a message log only grows, and nothing in it is replaced. Use .mode("append")',
                key="mode",
            )

        if options.txn_app_id is not None and options.txn_version is None:
            raise ConfigError(
                "option txnAppId: found without txnVersion; allowed is both or neither for a batch write",
                key="txnAppId",
            )

        return BatchWriter(self._sink(options, schema, streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 # Spark's name
        """The writer for `df.writeStream`."""
        options = sink_options(self.options)
        # Spark asks for outputMode complete in this way.
        if overwrite:
            raise ConfigError(
                "outputMode complete: a message log only grows, and nothing in it is replaced. Use outputMode "
                '"append", or foreachBatch with MessageStoreSink',
                key="outputMode",
            )

        for name, value in (("txnVersion", options.txn_version), ("txnVersionSource", options.txn_version_source)):
            if value is not None:
                raise ConfigError(
                    f"option {name}: is for batch writes, but the version of a stream is Spark's batch id. Leave it "
                    f"out (txnAppId alone is allowed)",
                    key=name,
                    value=value,
                )

        return StreamWriter(self._sink(options, schema, streaming=True))

    def _sink(self, options: SinkOptions, schema: StructType, *, streaming: bool) -> Sink | BrokerSink:
        columns = [(column.name, column.dataType.simpleString()) for column in schema.fields]
        mapping = prepare(columns, options.topic, options.unknown_columns, options.row_format)
        if options.path.is_cluster:
            checkpoint = next((text for key, text in self.options.items() if key.lower() == "checkpointlocation"), None)
            return BrokerSink.plan(options, mapping, checkpoint, streaming=streaming)
        return Sink.plan(options, mapping, self.stores)
