"""How do I put messages into a store and get them out again, without Spark?

    with MessageStore.open("/data/store") as store:
        store.put_message(Message("flights", b"...", keys=["N14228"], tags="UA"))
        store.get_message("flights", 0, queue_offset=10)
    with MessageStore.open_read_only("/data/store") as view:
        view.get_message("flights", 0, 0)

This module is a facade: it checks arguments and passes on.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import pyarrow as pa

from messagestore.errors import ConfigError, MessageIllegalError, StoreClosedError, StorePoisonedError
from messagestore.files.mapped_file import Disk
from messagestore.files.topics import TopicConfig
from messagestore.format import javahash, record, record_columns
from messagestore.format.arrow_bytes import list_array
from messagestore.format.config import ASYNC_FLUSH, StoreConfig
from messagestore.format.hosts import offset_message_id, parse_offset_message_id
from messagestore.format.layout import BLANK, SYS_FLAG_TRANSACTION_MASK, SYS_FLAG_TRANSACTION_ROLLBACK
from messagestore.format.message import (
    AppendMessageStatus,
    GetMessageResult,
    Message,
    MessageExt,
    PutMessageResult,
    PutMessageStatus,
    check_queue_id,
    check_topic,
)
from messagestore.format.properties import check_keys, check_properties, check_tags
from messagestore.format.record_columns import EncodedRecords, MessageColumns
from messagestore.log.batch_record import SOURCE_SPARK
from messagestore.log.store_files import check_simple_topic
from messagestore.read import query
from messagestore.read.view import StoreView
from messagestore.recovery.recover import RecoveryReport
from messagestore.session import attached_store
from messagestore.write.log_writer import LogWriter
from messagestore.write.transaction import BatchRequest, BatchResult, Chunks, append_batch

DEFAULT_QUEUE_NUMS = 8
CHUNK_ROWS = 65_536
_ENCODERS = 2


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Messages for one topic and queue that go into the log side by side (RocketMQ MessageExtBatch).

    At most `maxMessageSize` bytes of records; larger batches, and batches for several queues, go through
    `MessageStore.append_batch`.
    """

    columns: MessageColumns

    @classmethod
    def from_arrow(cls, batch: pa.RecordBatch | pa.Table, *, topic: str, queue_id: int = 0) -> MessageBatch:
        """From columns named as the sink's: body, tags, keys, properties, flag, born_timestamp_ms."""
        return cls(MessageColumns.from_arrow(batch, topic=topic, queue_id=queue_id))

    @classmethod
    def from_messages(cls, messages: Sequence[Message]) -> MessageBatch:
        """From messages that all name the same topic and queue (None: queue 0).

        As in RocketMQ, what says how a message travels is the batch's, not each message's: `born_host`, `sys_flag`,
        `reconsume_times`, `wait_store_msg_ok` and `prepared_transaction_offset` must be those of a new message. So a
        batch has no transaction.

        Raises
        ------
        MessageIllegalError
            There is no message, or one of them cannot be stored so; `row` says which.
        """
        if not messages:
            raise MessageIllegalError("batch: found no message; give at least one", field="batch")
        first, now_ms = messages[0], time.time_ns() // 1_000_000
        for row, message in enumerate(messages):
            _check_of_batch(message, first, row)
        times = [now_ms if m.born_timestamp_ms is None else m.born_timestamp_ms for m in messages]
        columns = {
            "body": list_array([memoryview(m.body).tobytes() for m in messages], pa.binary()),
            "tags": list_array([m.tags for m in messages], pa.string()),
            "keys": list_array([list(m.keys) or None for m in messages], pa.list_(pa.string())),
            "properties": list_array(
                [list(m.properties.items()) or None for m in messages], pa.map_(pa.string(), pa.string())
            ),
            "flag": list_array([m.flag for m in messages], pa.int32()),
            "born_timestamp_ms": list_array(times, pa.int64()),
        }
        return cls.from_arrow(pa.record_batch(columns), topic=first.topic, queue_id=first.queue_id or 0)


_OF_THE_BATCH = ("born_host", "sys_flag", "reconsume_times", "wait_store_msg_ok", "prepared_transaction_offset")
_NEW = Message("new", b"")


def _check_of_batch(message: Message, first: Message, row: int) -> None:
    """Refuse a message that a batch that begins with `first` cannot hold."""
    for name in ("topic", "queue_id"):
        found, wanted = getattr(message, name), getattr(first, name)
        if found != wanted:
            fault = f"{name}: found {found!r}; the first message's is {wanted!r}; use append_batch for several"
            raise MessageIllegalError(fault, field=name, row=row)
    for name in _OF_THE_BATCH:
        found, wanted = getattr(message, name), getattr(_NEW, name)
        if found != wanted:
            fault = f"{name}: found {found!r}; allowed in a batch is {wanted!r}; put the message by itself"
            raise MessageIllegalError(fault, field=name, row=row)
    record.size_of_body(message.body, row)
    check_keys(message.keys, row)
    check_tags(message.tags, row)
    check_properties(message.properties, row)
    error = record.bad_number(message, first.queue_id or 0, row)
    if error is not None:
        raise error


class ReadOnlyStore:
    """A store that is only read; it may be live, ours or a Java broker's. Made by `MessageStore.open_read_only`."""

    def __init__(self, view: StoreView) -> None:
        self._view: StoreView | None = view

    @property
    def view(self) -> StoreView:
        """What is visible.

        Raises
        ------
        StoreClosedError
        """
        if self._view is None:
            raise StoreClosedError("the store is closed; open it again")
        return self._view

    @property
    def store_id(self) -> str:
        """The store's id; empty for a store this project never wrote."""
        return self.view.store_id

    def topics(self) -> dict[str, list[int]]:
        """Topic -> queue ids."""
        return self.view.topics()

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Number the next message of a queue gets, as far as is visible."""
        self.view.refresh()
        return self.view.max_offset(topic, queue_id)

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Number of the first message of a queue that is still there."""
        self.view.refresh()
        return self.view.min_offset(topic, queue_id)

    def get_message(self, topic: str, queue_id: int, queue_offset: int, max_count: int = 32) -> GetMessageResult:
        """Messages from `queue_offset` on, with RocketMQ's status; bodies are as stored."""
        return query.get_message(self.view, topic, queue_id, queue_offset, max_count)

    def get_batch(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_count: int = CHUNK_ROWS,
        columns: Sequence[str] = ("topic", "queue_id", "queue_offset", "body"),
    ) -> pa.RecordBatch | None:
        """As `get_message`, to Arrow; None where nothing is found."""
        return query.get_batch(self.view, topic, queue_id, queue_offset, max_count, columns)

    def query_message(
        self, topic: str, key: str, max_count: int | None = None, begin_ms: int = 0, end_ms: int = 1 << 62
    ) -> list[MessageExt]:
        """The newest messages with a key, oldest first; at most `max_count`, without it `maxMsgsNumBatch`."""
        return query.query_message(self.view, topic, key, max_count, begin_ms, end_ms)

    def look_message_by_offset(self, physical_offset: int) -> MessageExt | None:
        """The message whose record begins at a physical offset."""
        return query.look_message_by_offset(self.view, physical_offset)

    def look_message_by_id(self, message_id: str) -> MessageExt | None:
        """The message with an offset message id."""
        return query.look_message_by_offset(self.view, parse_offset_message_id(message_id)[1])

    def queue_offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, boundary: str = query.LOWER) -> int:
        """Queue offset for a store time (RocketMQ getOffsetInQueueByTime)."""
        return query.queue_offset_by_time(self.view, topic, queue_id, timestamp_ms, boundary)

    def read(
        self,
        topic: str,
        queue_id: int,
        start: int,
        end: int | None = None,
        columns: Sequence[str] = ("queue_offset", "body"),
    ) -> Iterator[pa.RecordBatch]:
        """Messages `start..end` of a queue as record batches; without `end` all that is visible now."""
        high = self.max_offset(topic, queue_id)
        yield from self.view.read(topic, queue_id, start, high if end is None else min(end, high), columns)

    def close(self) -> None:
        """Let go of all files; a second time does nothing."""
        if self._view is not None:
            self._view.close()
            self._view = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MessageStore(ReadOnlyStore):
    """A session: the one writer of a store until it is closed, and a reader that sees what it wrote.

    Threads: puts from any number of threads; in SYNC_FLUSH they share syncs.
    """

    def __init__(self, root: str | os.PathLike[str], config: StoreConfig, disk: Disk | None = None) -> None:
        self._attached = attached_store(root, config, disk)
        self._writer: LogWriter | None = self._attached.open_session("a session (MessageStore.open)")
        self._read_mutex = threading.Lock()
        self._turns: dict[str, int] = {}
        self._closed = False
        self.report: RecoveryReport | None = self._attached.report
        self._session_view: StoreView | None = None
        super().__init__(None)  # type: ignore[arg-type] # the view is made when first asked for

    @classmethod
    def open(
        cls, root: str | os.PathLike[str], config: StoreConfig | None = None, *, disk: Disk | None = None
    ) -> MessageStore:
        """Open for writing; a missing or empty folder becomes a store.

        Raises
        ------
        StoreLockedError
            A broker, or another writer, holds the store.
        NotAStoreError
            The folder holds something else.
        CorruptionError
            What was stored is damaged; nothing was changed.
        """
        return cls(root, config or StoreConfig(), disk)

    @staticmethod
    def open_read_only(
        root: str | os.PathLike[str], config: StoreConfig | None = None, *, disk: Disk | None = None
    ) -> ReadOnlyStore:
        """Open for reading; works beside any writer, ours or a Java broker. Nothing is ever written."""
        return ReadOnlyStore(StoreView(root, config, disk))

    @property
    def writer(self) -> LogWriter:
        """The session's writer.

        Raises
        ------
        StoreClosedError
        """
        if self._closed or self._writer is None:
            raise StoreClosedError("the store is closed; open it again")
        return self._writer

    @property
    def view(self) -> StoreView:
        """What is visible; everything put before is published first."""
        writer = self.writer
        if writer.pending and self._attached.config.flush_disk_type == ASYNC_FLUSH:
            writer.drain()
        if self._view is None:
            self._view = StoreView(self._attached.paths.root, self._attached.config, self._attached.disk)
        return self._view

    # ---- topics

    def create_topic(self, topic: str, queue_nums: int = DEFAULT_QUEUE_NUMS) -> TopicConfig:
        """Make a topic in `config/topics.json`; one that exists is returned as it is."""
        check_topic(topic)
        with self.writer.mutex:
            topics = self.writer.files.topics
            found = topics.get(topic)
            if found is None:
                found = topics.create(topic, queue_nums)
                topics.save()
            return found

    # ---- puts

    def put_message(self, message: Message) -> PutMessageResult:
        """Append one message.

        In SYNC_FLUSH it is durable and visible when this returns (`FLUSH_DISK_TIMEOUT`: stored, the sync is late). In
        ASYNC_FLUSH it is visible within a moment and durable within `flushIntervalCommitLog` or so.

        Raises
        ------
        MessageIllegalError
            The message cannot be stored; nothing was written.
        StoreFullError, StorePoisonedError
        """
        writer = self.writer
        config = writer.files.config
        topic = check_topic(message.topic)
        known = writer.files.topics.get(topic)
        queue_id = self._queue_id(topic, message, DEFAULT_QUEUE_NUMS if known is None else known.write_queue_nums)
        data = record.encode_message(
            message,
            queue_id=queue_id,
            store_host=writer.files.store_host,
            limits=config,
            property_crc=config.enabled_append_prop_crc,
        )
        self._check_fits(len(data))
        if known is None:
            self.create_topic(topic)  # not before: a message that is refused makes no topic
        rolled_back = message.sys_flag & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_ROLLBACK
        put = writer.append(
            data,
            topic,
            queue_id,
            javahash.tags_code(message.tags) if message.tags else 0,
            [] if rolled_back else [javahash.index_hash(topic, key) for key in message.keys],
            property_crc=config.enabled_append_prop_crc,
            flush_disk_type=config.flush_disk_type,
            half=record.is_half(message.sys_flag),
        )
        status = self._await_flush(put.physical_offset + put.size, wait=message.wait_store_msg_ok)
        return PutMessageResult(
            status=status,
            append_status=AppendMessageStatus.PUT_OK,
            physical_offset=put.physical_offset,
            size=put.size,
            queue_offset=put.queue_offset,
            message_id=offset_message_id(writer.files.store_host, put.physical_offset),
            message_count=1,
            store_timestamp_ms=put.store_timestamp_ms,
            queue_id=queue_id,
        )

    def put_messages(self, batch: MessageBatch) -> PutMessageResult:
        """Append a batch for one topic and queue: side by side in one segment, with one store time.

        Raises
        ------
        MessageIllegalError
            A message cannot be stored, or the batch is larger than `maxMessageSize`; nothing was written.
        """
        writer, config = self.writer, self.writer.files.config
        if not batch.columns.row_count:
            raise MessageIllegalError("batch: found no message; give at least one", field="batch")
        chunk = record_columns.encode(
            batch.columns, limits=config, store_host=writer.files.store_host, born_host=self._born_host()
        )
        if len(chunk.run_topics) != 1:
            raise MessageIllegalError("batch: found several topics or queues; use append_batch", field="batch")
        topic, queue_id = check_topic(chunk.run_topics[0]), int(chunk.run_queue_ids[0])
        self._check_queue(topic, queue_id)
        size = int(chunk.starts[-1])
        if size > config.max_message_size:
            raise MessageIllegalError(
                f"batch: found {size} bytes of records; allowed are {config.max_message_size} (maxMessageSize); use "
                f"append_batch",
                field="batch",
                size=size,
                limit=config.max_message_size,
            )
        self._check_fits(size)
        put = writer.append_side_by_side(chunk, topic, queue_id, config.flush_disk_type)
        status = self._await_flush(put.physical_offset + size, wait=True)
        ids = ",".join(
            offset_message_id(writer.files.store_host, put.physical_offset + s) for s in chunk.starts[:-1].tolist()
        )
        return PutMessageResult(
            status=status,
            append_status=AppendMessageStatus.PUT_OK,
            physical_offset=put.physical_offset,
            size=size,
            queue_offset=put.queue_offset,
            message_id=ids,
            message_count=chunk.row_count,
            store_timestamp_ms=put.store_timestamp_ms,
            queue_id=queue_id,
        )

    def start_batches(self, app_id: str, version: int) -> BatchResult:
        """Say once that an app goes on with a version; the versions below it are not in this store and never will be.

        It appends an empty BATCH record, so it holds as long as the log does.

        Parameters
        ----------
        app_id : str
        version : int
            The next version, above those that are in the store; at least 1: version 0 needs no start.

        Raises
        ------
        ConfigError
            The version is 0 or less.
        VersionRegressionError
            The app has a batch of this version or a later one.
        """
        if version < 1:
            raise ConfigError(
                f"start version: found {version}; allowed is 1 or more: an app begins with version 0 by itself",
                key="version",
                value=version,
            )
        request = BatchRequest(app_id=app_id, version=version - 1, version_source=SOURCE_SPARK, start=True)
        return append_batch(self.writer, Chunks(), request)

    def append_batch(
        self, columns: MessageColumns | Iterable[MessageColumns], request: BatchRequest | None = None
    ) -> BatchResult:
        """Append messages for any topics and queues as one batch: it is in the log once and whole, or not at all.

        Parameters
        ----------
        columns : MessageColumns or several
            Queue ids must be given.
        request : BatchRequest | None
            With `app_id` and `version` the batch is exactly-once: given again, it is recognised.

        Raises
        ------
        BatchConflictError, VersionRegressionError, LostBatchesError, MessageIllegalError, StoreFullError,
        StorePoisonedError
        """
        writer, config = self.writer, self.writer.files.config
        parts = [columns] if isinstance(columns, MessageColumns) else columns
        pieces = [part.slice(start, CHUNK_ROWS) for part in parts for start in range(0, part.row_count, CHUNK_ROWS)]
        first_rows = itertools.accumulate((piece.row_count for piece in pieces), initial=0)

        def encode(piece: MessageColumns, first_row: int) -> EncodedRecords:
            hosts = {"store_host": writer.files.store_host, "born_host": self._born_host()}
            return record_columns.encode(piece, limits=config, first_row=first_row, **hosts)

        if len(pieces) > 1:
            with ThreadPoolExecutor(_ENCODERS) as pool:  # most of encoding is Arrow's and numpy's, without the GIL
                chunks = Chunks(pool.map(encode, pieces, first_rows))
        else:
            chunks = Chunks(map(encode, pieces, first_rows))
        return append_batch(writer, chunks, request or BatchRequest(flush_disk_type=config.flush_disk_type))

    def flush(self) -> None:
        """Make everything put so far durable and visible."""
        self._await(self.writer.end.physical_offset, 3600.0)

    def _await_flush(self, end: int, *, wait: bool) -> PutMessageStatus:
        config = self.writer.files.config
        flush = self._attached.flush
        if flush is None:  # the store was closed for a broker after the append, and made durable
            self._await(end, 0.0)
        elif config.flush_disk_type == ASYNC_FLUSH:
            flush.wake()
        elif not wait:
            flush.request(end)
        elif not self._await(end, config.sync_flush_timeout / 1000):
            return PutMessageStatus.FLUSH_DISK_TIMEOUT
        return PutMessageStatus.PUT_OK

    def _await(self, end: int, timeout_s: float) -> bool:
        flush = self._attached.flush
        if flush is not None:
            return flush.wait(end, timeout_s)
        with self._attached.mutex:  # until the store is closed
            if self.writer.synced_end < end:
                self.writer.check_usable()
        return True

    def _born_host(self) -> bytes:
        return self.writer.files.store_host[:-4] + bytes(4)

    def _check_fits(self, size: int) -> None:
        room = self.writer.log.segment_size - BLANK.size
        if size > room:
            raise MessageIllegalError(
                f"record: found {size} bytes; a segment has room for {room} (mappedFileSizeCommitLog)",
                field="body",
                size=size,
                limit=room,
            )

    def _queue_id(self, topic: str, message: Message, count: int) -> int:
        check_simple_topic(self.writer.files, topic)
        if message.queue_id is not None:
            return check_queue_id(message.queue_id, queue_count=count)
        if message.keys:
            check_keys(message.keys)
            return javahash.queue_of_key(message.keys[0], count)
        turn = self._turns[topic] = self._turns.get(topic, time.time_ns() % count) + 1
        return turn % count

    def _check_queue(self, topic: str, queue_id: int | None) -> int:
        """The topic's queue count; the topic is made when it is missing."""
        topics = self.writer.files.topics
        config = topics.get(topic)
        if config is None:
            if queue_id is not None:
                check_queue_id(queue_id, queue_count=DEFAULT_QUEUE_NUMS)
            config = self.create_topic(topic)
        else:
            check_simple_topic(self.writer.files, topic)
        if queue_id is not None:
            check_queue_id(queue_id, queue_count=config.write_queue_nums)
        return config.write_queue_nums

    def close(self) -> None:
        """Publish and sync what is pending, move the clean end, remove `abort`, let others in; a second time does
        nothing.

        Raises
        ------
        StorePoisonedError
            A sync failed in the background, or a put was interrupted, and nobody has been told: what was put in
            ASYNC_FLUSH may not be there.
        """
        if self._closed:
            return
        self._closed = True
        if self._view is not None:
            self._view.close()
            self._view = None
        writer, self._writer = self._writer, None
        if writer is None:
            return
        self._attached.close_session(writer)
        if writer.poison_reason is not None and not writer.told:
            writer.check_usable()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StorePoisonedError as poisoned:
            if error is None:
                raise
            error.add_note(f"{poisoned}")  # a Ctrl-C stays one
