"""The sink: brings each micro-batch of Spark into the store, once and completely.

    tasks    Arrow batches -> messages with queues -> records -> one staging file per attempt; its name goes to the
    driver   commit: files in the order of the partitions -> one append to the store -> files deleted
             abort:  files deleted, once the writer lock is held; the log is never changed

The store itself recognises a batch that it holds already, by its journal; the sink keeps nothing between batches.
Files that a killed task left in staging are deleted after `stagingTtl`.

The commit of the first batch creates the store. Until then only the staging folder is created, and only for a batch
that an empty store accepts. The tasks of a later batch refuse it and leave the folder as it was: usually the disk is
not mounted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from messagestore import (
    BatchRequest,
    BatchResult,
    ConfigError,
    CorruptionError,
    LostBatchesError,
    MessageIllegalError,
    NotAStoreError,
    StoreConfig,
    StoreError,
)
from messagestore.spi import (
    APPENDED,
    SOURCE_SPARK,
    SOURCE_USER,
    Description,
    PlannedWrite,
    Rows,
    StagedFile,
    Staging,
    Stores,
    StoreWriter,
    Write,
    driver_token,
    encode,
    no_history,
    store_host_of,
)
from pyspark_messagestore.options.sink_options import SinkOptions
from pyspark_messagestore.options.table import sink_options
from pyspark_messagestore.plain_errors import plain_errors
from pyspark_messagestore.sink.brokers import BrokerSink, SentMessage
from pyspark_messagestore.sink.columns import Mapper, Mapping
from pyspark_messagestore.sink.dead_letters import DeadLetters
from pyspark_messagestore.sink.unique_keys import UniqueKeys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)

CHUNK_ROWS = 65_536
CHUNK_SIZE = 16 * 1024 * 1024

_written_to: dict[tuple[str, str], str] = {}
"""The store to which this process wrote a batch, by path and app id. It is used only for the text of an error."""


@dataclass
class StagedMessage(WriterCommitMessage):
    """The commit message of one task. All values are plain.

    Parameters
    ----------
    partition_id : int
    file : StagedFile | None
        The staged file; None if the task had no rows.
    query_id, batch_id : str | None
        The ids of the streaming query and of its batch, which the task received from Spark.
    store_id : str
        The id of the store at the path when the write was planned; empty if there was no store.
    host : str
        The host on which the task ran, for errors.
    dead_letters : int
        The number of rows that went to the dead-letter topic.
    dead_letter : str
        The error of the first of them.
    """

    partition_id: int
    file: StagedFile | None
    query_id: str | None
    batch_id: str | None
    store_id: str
    host: str
    dead_letters: int = 0
    dead_letter: str = ""


@dataclass(frozen=True)
class Sink:
    """The part that tasks, commit and abort share. It is small, since it is pickled into every task.

    Parameters
    ----------
    options : SinkOptions
    config : StoreConfig
        The settings, which the driver has read, so that tasks do not need the file.
    mapping : Mapping
    stores : Stores
        Opens the store.
    store_id : str
        The id of the store at the path when the write was planned; empty if there was no store.
    driver, write_id : str
        Parts of the names of staging files: the driver's process, and an id that no other planned write has. By the id,
        a batch without an app id is recognised, too.
    log_end : int
        Where the log ended when the write was planned.
    """

    options: SinkOptions
    config: StoreConfig
    mapping: Mapping
    stores: Stores
    store_id: str = ""
    driver: str = field(default_factory=driver_token)
    write_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    log_end: int = 0

    @classmethod
    def plan(cls, options: SinkOptions, mapping: Mapping, stores: Stores) -> Sink:
        """Plan a write, on the driver. If there is no store, nothing is created, since the batch may be refused.

        Raises
        ------
        StoreLockedError
            A broker holds the store.
        NotAStoreError
            The path holds something else, or a store in a form that cannot be written.
        ConfigError
            A setting of the store's broker forbids writing.
        LostBatchesError
            There is no store, and the batch is not the first one of its app.
        """
        sink = cls(options, options.config(), mapping, stores)
        description = sink._store().prepare()
        sink = replace(sink, config=description.config, store_id=description.store_id, log_end=description.log_end)
        if not description.exists and options.txn_version_source == SOURCE_SPARK:
            sink._check_first(options.txn_app_id, options.txn_version)
        return sink

    def _store(self) -> StoreWriter:
        """A writer for the store, on the driver or in a task."""
        return self.stores.writer(
            self.options.location,
            self.config,
            staging_ttl_s=self.options.staging_ttl,
            staging_dir=self.options.staging_dir,
            ends_abruptly=in_worker(),
        )

    # ---- tasks

    def stage(self, batches: Iterator[pa.RecordBatch], *, streaming: bool = False) -> StagedMessage:
        """Encode all rows into one staging file, in a task."""
        context = TaskContext.get()
        assert context is not None
        # Both are None outside a stream, and in foreachBatch on Spark Connect.
        query_id = context.getLocalProperty("sql.streaming.queryId")
        batch_id = context.getLocalProperty("streaming.sql.batchId")
        partition_id = context.partitionId()

        store = self._store()
        named = [name for name in (self.options.topic, self.options.dead_letter_topic) if name is not None]
        topics = store.describe(None if self.options.topic is None else named)  # None: each row names its topic
        self._check_can_begin(topics, query_id, batch_id)

        staged: StagedFile | None = None
        writer: Staging | None = None

        keys = self._unique_keys(query_id, batch_id, partition_id)
        mapper = self._mapper(topics.queue_counts, f"{batch_id}/{partition_id}", keys)
        host = store_host_of(self.config)
        encoding = functools.partial(
            encode,
            limits=topics.config,
            store_host=host,
            born_host=host[:-4] + bytes(4),
            multi_tag_topics=topics.multi_tag_topics,
        )

        letters = self._dead_letters(mapper, self._version(batch_id), encoding)
        write = Write(self.driver, self.write_id)
        if streaming and query_id and batch_id:  # one planned write for all batches of a run
            run_id = context.getLocalProperty("spark.jobGroup.id")
            write = Write(self.driver, f"{query_id}/{run_id}", int(batch_id))

        row = 0
        try:
            for batch in gathered(batches):
                # A task without rows makes no file.
                if writer is None:
                    writer = store.stage(write, self.store_id)
                try:
                    messages = mapper.messages(batch, row)
                    rows = [encoding(messages, first_row=row)]
                except MessageIllegalError:
                    if letters is None:
                        raise
                    rows = list(letters.encoded(batch, row))

                for chunk in rows:
                    writer.write(chunk)
                row += batch.num_rows

            if writer is not None:
                staged = writer.finish()
        except MessageIllegalError as error:
            raise _named(error, partition_id) from None
        finally:
            if writer is not None:
                writer.__exit__(None, None, None)  # deletes a file that was not finished

        return StagedMessage(
            partition_id=partition_id,
            file=staged,
            query_id=query_id,
            batch_id=batch_id,
            store_id=self.store_id,
            host=socket.gethostname(),
            dead_letters=0 if letters is None else letters.count,
            dead_letter="" if letters is None or letters.first is None else str(letters.first),
        )

    def _mapper(self, queue_counts: dict[str, int], seed: str, unique_keys: UniqueKeys | None) -> Mapper:
        def queue_count(name: str) -> int:
            count = queue_counts.get(name, self.options.write_queue_nums)
            return max(1, count)  # the commit refuses a topic without a queue to write, unless it knows the batch

        return Mapper(self.mapping, self.options.topic, self.options.queue_selector, queue_count, seed, unique_keys)

    def _unique_keys(self, query_id: str | None, batch_id: str | None, partition_id: int) -> UniqueKeys | None:
        options = self.options
        if not options.uniq_key:
            return None
        return UniqueKeys(options.txn_app_id or query_id, self._version(batch_id), partition_id)

    def _version(self, batch_id: str | None) -> int | None:
        version = self.options.txn_version
        return version if version is not None or batch_id is None else int(batch_id)

    def _dead_letters(self, mapper: Mapper, version: int | None, encoding: Callable[..., Rows]) -> DeadLetters | None:
        topic = self.options.dead_letter_topic
        return None if topic is None else DeadLetters(mapper, topic, self.config, encoding, version=version)

    def _check_can_begin(self, description: Description, query_id: str | None, batch_id: str | None) -> None:
        """Refuse, in a task, a batch that no empty store accepts, before anything is created for it."""
        options = self.options
        if self.store_id or description.exists:
            return
        stream_batch_id = None if batch_id is None else int(batch_id)
        version = stream_batch_id if options.txn_version is None else options.txn_version
        if options.txn_version_source == SOURCE_SPARK or stream_batch_id:
            self._check_first(options.txn_app_id or query_id, version)

    def _check_first(self, app_id: str | None, version: int | None) -> None:
        """Refuse all but the first batch of an app, if there is no store."""
        if app_id is None or not version:
            return

        root = str(self.options.path)
        before = _written_to.get((root, app_id))
        earlier = f" (an earlier batch of this query went to store {before})" if before is not None else ""
        raise LostBatchesError(
            f"app {app_id!r}: found version {version}, but no store at {root}{earlier}. Causes: the disk is not "
            "mounted; the folder was deleted or replaced; the sink was added to a running query. "
            f"{no_history(app_id, version, root)}",
            app_id=app_id,
            version=version,
        )

    # ---- the driver

    def commit(self, messages: list[WriterCommitMessage | None], batch_id: int | None) -> BatchResult:
        """Append the batch. The store contains all of it, once, when this returns.

        Parameters
        ----------
        messages : list of StagedMessage
        batch_id : int | None
            The stream's batch id; None: a batch write.
        """
        staged = self._checked(messages, batch_id)
        files = [message.file for message in staged if message.file is not None]
        request = self._request(staged, batch_id)
        sink = self._planned(staged)
        sink._check_store(request)

        is_only_commit = batch_id is None and request.query_id is None  # of its job, so its worker may be killed next
        topic = self.options.dead_letter_topic if any(message.dead_letters for message in staged) else None
        result = sink._commit(files, request, closing=is_only_commit and in_worker(), dead_letter_topic=topic or "")
        sink._warn_of_dead_letters(staged, result)
        return result

    def _warn_of_dead_letters(self, staged: list[StagedMessage], result: BatchResult) -> None:
        """Count the dead letters of a batch that was appended now; one that is known had its warning before."""
        count = sum(message.dead_letters for message in staged)
        if count and result.status == APPENDED:
            _log.warning(
                "%s: %d rows of this batch cannot be stored and went to topic %s. The first one: %s",
                self.options.path,
                count,
                self.options.dead_letter_topic,
                next(message.dead_letter for message in staged if message.dead_letters),
            )

    def _planned(self, staged: list[StagedMessage]) -> Sink:
        """The same sink for the store that the tasks saw."""
        return replace(self, store_id=next((m.store_id for m in staged if m.store_id), ""))

    def _check_store(self, request: BatchRequest) -> None:
        """Check, before anything is locked, that only the first batch of an app creates a store."""
        first_only = request.version_source == SOURCE_SPARK or request.stream_batch_id
        if not self.store_id and first_only and not self._store().describe().exists:
            self._check_first(request.app_id, request.version)

    def _commit(
        self, files: list[StagedFile], request: BatchRequest, *, closing: bool, dead_letter_topic: str
    ) -> BatchResult:
        key, store = (str(self.options.path), request.app_id or ""), self._store()

        try:
            committed = store.commit(
                files,
                request,
                self.store_id,
                planned=PlannedWrite(self.write_id, self.log_end),
                closing=closing,
                dead_letter_topic=dead_letter_topic,
            )
        except LostBatchesError as error:
            store_now, store_before = store.describe().store_id, _written_to.get(key)
            if store_before in (None, store_now):
                raise
            raise LostBatchesError(
                f"{error}. An earlier batch of this query went to store {store_before}, but this is store {store_now}",
                app_id=error.app_id,
                version=error.version,
            ) from None

        _written_to[key] = committed.store_id
        return committed.result

    def _checked(self, messages: list[WriterCommitMessage | None], batch_id: int | None) -> list[StagedMessage]:
        """The messages in the order of the partitions, after a check that they are those of this batch and store."""
        staged = sorted((m for m in messages if isinstance(m, StagedMessage)), key=lambda m: m.partition_id)

        wrong = ""
        if len(staged) != len(messages):
            wrong = f"{len(messages) - len(staged)} tasks left no message"
        elif len({m.partition_id for m in staged}) != len(staged):
            wrong = "two messages are of one partition"
        elif batch_id is not None and any(m.batch_id not in (None, str(batch_id)) for m in staged):
            wrong = f"a message is of another batch than {batch_id}"
        elif len({m.query_id for m in staged}) > 1:
            wrong = "the messages are of several queries"

        if wrong:
            raise CorruptionError(
                str(self.options.path),
                0,
                "one message of each task of this batch",
                wrong,
                hint="Write the batch again.",
            )

        stores = sorted({self.store_id, *(m.store_id for m in staged)} - {"", self.store_id})
        if stores and (self.store_id or len(stores) > 1):
            planned = self.store_id or stores[0]
            raise NotAStoreError(
                f"{self.options.path}: tasks found another store, {stores[-1]}, but the write was planned for store "
                f"{planned}. Let executors and driver see the same store, and write the batch again",
                path=str(self.options.path),
            )
        return staged

    def _request(self, staged: list[StagedMessage], batch_id: int | None) -> BatchRequest:
        options = self.options
        # Spark tells the query id to tasks only, and they pass it on.
        query_id = next((m.query_id for m in staged if m.query_id), None)

        app_id = options.txn_app_id
        if batch_id is not None:
            app_id = app_id or query_id
            if app_id is None:
                raise ConfigError(
                    "option txnAppId: Spark gave no query id to the tasks. Give a txnAppId", key="txnAppId"
                )

        version = options.txn_version if options.txn_version is not None else batch_id
        from_spark = batch_id is not None or options.txn_version_source == SOURCE_SPARK

        return BatchRequest(
            app_id=app_id,
            version=version or 0,
            version_source=SOURCE_SPARK if from_spark else SOURCE_USER,
            query_id=query_id,
            stream_batch_id=next((int(m.batch_id) for m in staged if m.batch_id), batch_id),
            flush_disk_type=options.flush_disk_type or self.config.flush_disk_type,
            on_replay_mismatch=options.on_replay_mismatch,
            on_version_regression=options.on_version_regression,
            on_lost_batches=options.on_lost_batches,
            on_new_query=options.on_new_query,
            topic=options.topic,
            on_new_topic=options.on_new_topic,
            auto_create_topic=options.auto_create_topic,
            write_queue_nums=options.write_queue_nums,
        )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the staging files of a batch that Spark gave up, under the writer lock.

        While the lock is held, no commit reads them. If the commit succeeded before, its bytes are in the log and stay
        there. If the lock cannot be acquired, the files are left for the sweep.
        """
        names = [m.file.name for m in messages if isinstance(m, StagedMessage) and m.file is not None]
        with contextlib.suppress(StoreError, OSError):  # only the error that led here is reported
            self._store().abort(names, self.store_id)


def in_worker() -> bool:
    """Whether this process is a Python worker of Spark, which does not end as a Python program does."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


def gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches combined to about `CHUNK_ROWS` rows or `CHUNK_SIZE` bytes; Spark's have at most 10 000 rows.

    What has more bytes is divided, so that a task holds only a part of it a second time, as records.
    """
    kept: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in itertools.chain.from_iterable(map(_divided, batches)):
        if not batch.num_rows:
            continue
        if kept and (rows + batch.num_rows > CHUNK_ROWS or size + batch.nbytes > CHUNK_SIZE):
            yield _one(kept)
            kept, rows, size = [], 0, 0

        kept.append(batch)
        rows += batch.num_rows
        size += batch.nbytes

    if kept:
        yield _one(kept)


def _divided(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.nbytes <= CHUNK_SIZE or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _divided(batch.slice(0, half))
    yield from _divided(batch.slice(half))


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _named(error: MessageIllegalError, partition_id: int) -> MessageIllegalError:
    """The same error, which names the partition in addition to the row."""
    place = f"partition {partition_id}" + (f", row {error.row}" if error.row is not None else "")
    named = MessageIllegalError(
        f"{place}: {error.reason}. Nothing of this batch was written",
        field=error.field,
        size=error.size,
        limit=error.limit,
    )
    named.row = error.row
    return named


@plain_errors("write", "commit")
class StreamWriter(DataSourceStreamArrowWriter):
    """The sink of `writeStream.format("messagestore")`."""

    def __init__(self, sink: Sink | BrokerSink) -> None:
        self.sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage | SentMessage:
        """Stage the rows of one partition, in a task."""
        return self.sink.stage(iterator, streaming=True)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 # Spark's name
        """Append the batch, on the driver, after all tasks are done."""
        self.sink.commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Delete the staging files, on the driver, after a task or the commit failed.

        This runs in another process than the commit.
        """
        self.sink.abort(messages)


@plain_errors("write", "commit")
class BatchWriter(DataSourceArrowWriter):
    """The sink of `df.write.format("messagestore")`."""

    def __init__(self, sink: Sink | BrokerSink) -> None:
        self.sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage | SentMessage:
        """Stage the rows of one partition, in a task."""
        context = TaskContext.get()
        # Spark sets the query id in foreachBatch, too, but not on Spark Connect.
        in_stream = context is not None and context.getLocalProperty("sql.streaming.queryId") is not None
        if in_stream and self.sink.options.txn_app_id is None:
            raise ConfigError(
                "option txnAppId: is missing in foreachBatch, where a batch may come again. Give txnAppId and "
                "txnVersion (the batch id), or use MessageStoreSink",
                key="txnAppId",
            )

        return self.sink.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Append the batch, on the driver, after all tasks are done."""
        self.sink.commit(messages, None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the staging files, on the driver, after a task or the commit failed."""
        self.sink.abort(messages)


@dataclass
class MessageStoreSink:
    """The sink for `foreachBatch`. It is exactly once, on classic Spark and on Spark Connect.

    Pass it to `foreachBatch`, or call it from a function of your own. Such a function must call it for every batch,
    including empty ones, because a missing batch is an error. If your function leaves batches out, give
    `txnVersionSource="user"`. Always set a checkpoint location: without one, the next run is another query.

    Parameters
    ----------
    path : path
        The store's root folder, which the first batch creates.
    topic : str | None
        The topic of all rows; None: the DataFrame has a column `topic`.
    app_id : str
        The app that the batches belong to (`txnAppId`). Use one app id for each query and topic, and keep it over
        restarts. A second topic, or another query (a new checkpoint), under a known app id is an error.
    options : dict
        Other options of the sink, as keywords: `flushDiskType="ASYNC_FLUSH"` or `flush_disk_type="ASYNC_FLUSH"`.

    Raises
    ------
    ConfigError
        `app_id` is empty, or an option is unknown or has a value that is not allowed.
    BatchConflictError, QueryConflictError, VersionRegressionError, LostBatchesError
        When the sink is called: the store holds this batch with other rows, the app belongs to another query, or
        batches are missing. Nothing was written. Spark wraps the error in an error of its own.

    Examples
    --------
    >>> import tempfile
    >>> from pyspark.sql import SparkSession
    >>> from pyspark_messagestore import MessageStoreSink
    >>> spark = SparkSession.builder.getOrCreate()
    >>> folder = tempfile.mkdtemp()  # of your own; tasks and driver must see it
    >>> gates = spark.createDataFrame([("B12",), ("C3",)], "body string")
    >>> gates.write.format("messagestore").mode("append").option("topic", "gates").save(f"{folder}/store")
    >>> stream = spark.readStream.format("messagestore").option("subscribe", "gates")
    >>> query = (
    ...     stream.option("startingOffsets", "earliest")
    ...     .load(f"{folder}/store")
    ...     .writeStream.foreachBatch(MessageStoreSink(f"{folder}/store", topic="gates-copy", app_id="gates-copy"))
    ...     .option("checkpointLocation", f"{folder}/checkpoint")
    ...     .trigger(availableNow=True)
    ...     .start()
    ... )
    >>> query.awaitTermination()
    >>> spark.read.format("messagestore").option("subscribe", "gates-copy").load(f"{folder}/store").count()
    2
    """

    path: str
    topic: str | None
    app_id: str
    options: dict[str, str] = field(default_factory=dict)

    def __init__(self, path: str | os.PathLike[str], *, app_id: str, topic: str | None = None, **options: Any) -> None:
        named: dict[str, object] = {"app_id": app_id, "topic": "" if topic is None else topic}
        for name, value in named.items():
            if not isinstance(value, str):
                raise ConfigError(f"{name}: found {value!r:.80}; allowed is text", key=name, value=value)
        if not app_id:
            raise ConfigError("app_id: found empty text. Give a name that stays the same over restarts", key="app_id")

        given_path: object = path
        if not isinstance(given_path, str | os.PathLike):
            raise ConfigError(f"path: found {path!r:.80}; allowed is the path of a folder", key="path", value=path)

        folder = str(path)
        self.path, self.topic, self.app_id = folder, topic, app_id

        self.options = {_camel(name): _as_text(value) for name, value in options.items()}
        for name in self.options:
            if name.lower() in ("txnappid", "txnversion"):
                raise ConfigError(f"option {name}: MessageStoreSink sets it. Leave it out", key=name)

        # The result is not used: a wrong option is refused here, and not by the first batch.
        checked = {"txnVersionSource": SOURCE_SPARK, **self.options, "path": folder, "txnAppId": app_id}
        sink_options({**checked, "txnVersion": "0"} | ({} if topic is None else {"topic": topic}))

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Write one micro-batch. Spark calls this with the rows and the number of the batch."""
        options = {"txnVersionSource": SOURCE_SPARK, **self.options}
        writer = df.write.format("messagestore").mode("append").options(**options)
        if self.topic is not None:
            writer = writer.option("topic", self.topic)
        writer.option("txnAppId", self.app_id).option("txnVersion", str(batch_id)).save(self.path)


def _camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
