"""The puts of an open session: single messages, and messages side by side.

A put is appended by the writer, and then waits for its sync, or for nobody. `Puts` is what a session and its half
messages share; it knows no half messages, no batches and no reads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa

from messagestore.broker import retries
from messagestore.errors import (
    AppendMessageStatus,
    MessageIllegalError,
    PutMessageStatus,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StorePoisonedError,
    note_statuses,
)
from messagestore.files.subscription_groups import SubscriptionGroupConfig, SubscriptionGroups
from messagestore.files.topics import DEFAULT_QUEUE_NUMS, PERM_READ_WRITE, TopicConfig
from messagestore.format import arguments, javahash, record, record_columns, record_encode, rerouting
from messagestore.format.config import ASYNC_FLUSH
from messagestore.format.hosts import offset_message_id
from messagestore.format.layout import SYS_FLAG_TRANSACTION_MASK, SYS_FLAG_TRANSACTION_ROLLBACK
from messagestore.format.message import (
    ANY_QUEUE,
    MAX_GROUP_TOPIC_SIZE,
    RETRY_PREFIX,
    Message,
    PutMessageResult,
    check_delay_level,
    check_queue_id,
    check_topic,
)
from messagestore.format.properties import check_keys
from messagestore.format.record_columns import MessageColumns
from messagestore.format.rows import SCHEDULE_TOPIC, Row
from messagestore.format.unique_key import new_unique_key
from messagestore.log.refusals import check_writable_topic
from messagestore.message_batch import MessageBatch
from messagestore.read.view import StoreView
from messagestore.session import AttachedStore
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.pending_puts import OnewayPut, PutFuture, in_doubt
from messagestore.writer.statistics import clock

_STORED = (PutMessageStatus.PUT_OK, AppendMessageStatus.PUT_OK)
_NO_PROPERTIES: list[tuple[str, str]] = []
_Put = TypeVar("_Put", "Message", "MessageBatch")


def _note_failure(error: BaseException) -> None:
    """Give an error of a put RocketMQ's statuses, if the operating system raised it and nobody did before."""
    unknown = PutMessageStatus.UNKNOWN_ERROR
    if isinstance(error, OSError) and getattr(error, "put_status", unknown) is unknown:
        note_statuses(error, unknown, AppendMessageStatus.UNKNOWN_ERROR)


def _stamped(columns: MessageColumns, now_ms: int) -> MessageColumns:
    """The messages, with a UNIQ_KEY for each that has none."""
    unique_keys = [None] * columns.row_count if columns.unique_key is None else columns.unique_key.to_pylist()
    keys = [new_unique_key(now_ms) if key is None else key for key in unique_keys]
    return replace(columns, unique_key=pa.array(keys, pa.string()))


class Puts:
    """Puts into a store through one session.

    Parameters
    ----------
    attached : AttachedStore
    writer : LogWriter
        The session's writer.

    Threads: any thread may put.
    """

    def __init__(self, attached: AttachedStore, writer: LogWriter) -> None:
        self._attached = attached
        self._writer: LogWriter | None = writer
        self._statistics = attached.statistics
        self._turns: dict[str, int] = {}

    @property
    def writer(self) -> LogWriter:
        """The session's writer.

        Raises
        ------
        StoreClosedError
        """
        writer = self._writer
        if writer is None:
            raise StoreClosedError("the store is closed. Open it again")
        return writer

    def close(self) -> LogWriter:
        """Refuse more puts, let go of the writer, and return it."""
        writer, self._writer = self.writer, None
        return writer

    def create_view(self) -> StoreView:
        """A reader of its own."""
        return StoreView(self._attached.paths.root, self._attached.config, self._attached.disk)

    # ---- topics and groups

    @contextmanager
    def configuring(self) -> Iterator[LogWriter]:
        """The writer, if it may change a file of `config/`: a broker that came in between has these files in memory."""
        self.writer.check_usable()  # before the mutex, which nobody releases in a forked child
        writer = self.writer
        with writer.mutex:
            writer.check_turn()
            writer.check_usable()
            writer.check_locks()
            yield writer

    def groups(self) -> SubscriptionGroups:
        """The table of consumer groups, as it is on the disk now."""
        files = self.writer.files
        groups = SubscriptionGroups(files.disk, files.paths.root)
        groups.load()
        return groups

    def create_topic(
        self,
        topic: str,
        queue_nums: int = DEFAULT_QUEUE_NUMS,
        *,
        read_queue_nums: int | None = None,
        perm: int = PERM_READ_WRITE,
        order: bool = False,
        attributes: Mapping[str, str] | None = None,
    ) -> TopicConfig:
        """Create a topic unless it exists, and return it."""
        check_topic(topic)

        with self.configuring() as writer:
            topics = writer.files.topics
            config = topics.get(topic)
            if config is None:
                config = topics.create(
                    topic,
                    queue_nums,
                    read_queue_nums=read_queue_nums,
                    perm=perm,
                    order=order,
                    attributes=attributes,
                )
                topics.save_or_drop()
            return config

    def create_own_topic(self, topic: str, queue_nums: int) -> TopicConfig:
        """Create a topic that may be a broker's own, unless it exists."""
        with self.writer.mutex:
            topics = self.writer.files.topics
            config = topics.get(topic)
            if config is None:
                config = topics.create(topic, queue_nums)
                topics.save_or_drop()
            return config

    def choose_queue(self, message: Message) -> int:
        """The queue of a message; a missing topic is created."""
        topic = check_topic(message.topic)
        config = self.writer.files.topics.get(topic)
        queue_id = self._queue_id(topic, message, DEFAULT_QUEUE_NUMS if config is None else config.write_queue_nums)
        if config is None:
            self.create_topic(topic)
        return queue_id

    def check_queue(self, topic: str, queue_id: int | None) -> int:
        """The topic's queue count; the topic is made when it is missing."""
        topics = self.writer.files.topics
        config = topics.get(topic)
        if config is None:
            if queue_id is not None:
                check_queue_id(queue_id, queue_count=DEFAULT_QUEUE_NUMS)
            config = self.create_topic(topic)
        else:
            check_writable_topic(self.writer.files, topic)
        if queue_id is not None:
            check_queue_id(queue_id, queue_count=config.write_queue_nums)
        return config.write_queue_nums

    def _queue_id(self, topic: str, message: Message, count: int) -> int:
        check_writable_topic(self.writer.files, topic)
        if message.queue_id is not None:
            if type(message.queue_id) is int and message.queue_id == ANY_QUEUE and count:
                return random.randrange(count)
            return check_queue_id(message.queue_id, queue_count=count)
        if message.keys:
            check_keys(message.keys)
            return javahash.queue_of_key(message.keys[0], count)
        turn = self._turns[topic] = self._turns.get(topic, time.time_ns() % count) + 1
        return turn % count

    # ---- putting

    def put_message(self, message: Message) -> PutMessageResult:
        """Append one message, and wait for its sync unless it says otherwise."""
        began_s = clock()
        try:
            result = self._flushed(self._append_message(message), wait=message.wait_store_msg_ok)
        except BaseException as error:
            self._put_failed(began_s, error)
            raise
        self._statistics.put_ended(began_s, result.status)
        return result

    def put_message_async(self, message: Message) -> PutFuture:
        """Append one message; the Future has its result, or its error."""
        return self._put_async(self._append_message, message)

    def put_message_oneway(self, message: Message) -> None:
        """Append one message, and count how the put ends. Nobody waits, and nothing is raised."""
        self._put_oneway(self._append_message, message)

    def put_messages(self, batch: MessageBatch) -> PutMessageResult:
        """Append messages side by side, and wait for their sync."""
        return self._put(lambda: self._append_side_by_side(batch), wait=True)

    def put_messages_async(self, batch: MessageBatch) -> PutFuture:
        """Append messages side by side; the Future has their result, or their error."""
        return self._put_async(self._append_side_by_side, batch)

    def put_messages_oneway(self, batch: MessageBatch) -> None:
        """Append messages side by side, and count how the put ends. Nobody waits, and nothing is raised."""
        self._put_oneway(self._append_side_by_side, batch)

    def put_again(self, message: Message, unique_key: str, kept: Sequence[tuple[str, str]]) -> PutMessageResult:
        """Put a message that a consumer has sent back, with its unique key and the properties that it keeps."""
        return self._put(lambda: self._append_message(message, unique_key, kept), wait=True)

    def put_encoded(
        self, data: bytearray, topic: str, queue_id: int, tags: str | None, keys: Sequence[str], *, wait: bool
    ) -> PutMessageResult:
        """Append an encoded record that fits, and drain the pool up to it."""

        def append() -> PutMessageResult:
            config = self.writer.files.config
            put, held_s = self.writer.append(
                data,
                topic,
                queue_id,
                javahash.tags_code(tags) if tags else 0,
                [javahash.index_hash(topic, key) for key in keys],
                property_crc=config.enabled_append_prop_crc,
                flush_disk_type=config.flush_disk_type,
            )
            try:
                self.writer.pool_drain.run(put.end)
            except StoreFullError as error:
                raise self._kept_in_memory(error, put) from error
            except StorePoisonedError as error:
                raise in_doubt(error, put.physical_offset) from error
            return self._result(put, held_s)

        return self._put(append, wait=wait)

    def _kept_in_memory(self, error: StoreFullError, put: Row) -> StoreFullError:
        """The error for a put that is among those in the pool for which the disk has no room."""
        message_id = offset_message_id(self.writer.files.store_host, put.physical_offset)
        kept = StoreFullError(
            f"{error}. This put is among them, with the message id {message_id}: it counts as soon as they are "
            "written, so do not put it again",
            path=error.path,
            needed=error.needed,
            free=error.free,
        )
        kept.errno = error.errno
        note_statuses(kept, PutMessageStatus.SERVICE_NOT_AVAILABLE, AppendMessageStatus.PUT_OK)
        return kept

    def _put(self, append: Callable[[], PutMessageResult], *, wait: bool) -> PutMessageResult:
        """Append, wait for the sync if `wait` says so, and count how the put ends."""
        began_s = clock()
        try:
            result = self._flushed(append(), wait=wait)
        except BaseException as error:
            self._put_failed(began_s, error)
            raise
        self._statistics.put_ended(began_s, result.status)
        return result

    def _put_async(self, append: Callable[[_Put], PutMessageResult], put: _Put) -> PutFuture:
        future = PutFuture(self._attached.statistics)
        try:
            self._end_later(self._append_with_room(append, put), put, future)
        except Exception as error:  # noqa: BLE001 - the Future raises it
            _note_failure(error)
            if not future.done():
                future.set_exception(error)
        return future

    def _put_oneway(self, append: Callable[[_Put], PutMessageResult], put: _Put) -> None:
        counted = OnewayPut(self._attached.statistics)
        try:
            self._end_later(self._append_with_room(append, put), put, counted)
        except (StoreError, OSError) as error:
            _note_failure(error)
            counted.set_exception(error)

    def _put_failed(self, began_s: float, error: BaseException) -> None:
        """Give an error of a put RocketMQ's statuses, and count the put."""
        _note_failure(error)
        self._statistics.put_failed(began_s, error)

    def _append_with_room(self, append: Callable[[_Put], PutMessageResult], put: _Put) -> PutMessageResult:
        """Append what nobody waits for, as soon as there is room for one more in flight."""
        flush = self._attached.flush
        if flush is not None:
            flush.promised.await_room(self._attached.config.put_in_flight_size)
        return append(put)

    def _end_later(self, result: PutMessageResult, put: Message | MessageBatch, future: PutFuture | OnewayPut) -> None:
        """Complete the Future of a put that was appended: now, or when it is synced."""
        flush, config = self._attached.flush, self._attached.config
        wait = put.wait_store_msg_ok if isinstance(put, Message) else True
        if flush is None or not wait or config.flush_disk_type == ASYNC_FLUSH:
            future.set_result(self._flushed(result, wait=False))
        else:
            flush.promise(result, future, config.sync_flush_timeout / 1000)

    def _flushed(self, result: PutMessageResult, *, wait: bool) -> PutMessageResult:
        """The result of a put when its sync is done, or with `wait` False when its sync was asked for."""
        config, flush = self._attached.config, self._attached.flush
        end = result.physical_offset + result.size
        try:
            if flush is None:  # the store was closed for a broker after the append, and made durable
                self.wait_for(end, 0.0)
            elif config.flush_disk_type == ASYNC_FLUSH:
                if result.committed:  # otherwise the thread of the pool wakes it
                    flush.wake()
            elif not wait:
                flush.request(end)
            elif not self.wait_for(end, config.sync_flush_timeout / 1000):
                return result._replace(status=PutMessageStatus.FLUSH_DISK_TIMEOUT)
        except StorePoisonedError as error:
            raise in_doubt(error, result.physical_offset) from error
        return result

    def wait_for(self, end: int, timeout_s: float) -> bool:
        """Wait until everything below `end` is synced; False if it takes longer."""
        flush = self._attached.flush
        if flush is not None:
            return flush.wait(end, timeout_s)
        with self._attached.mutex:  # until the store is closed
            if self.writer.synced_end < end:
                self.writer.check_usable()
        return True

    # ---- appending

    def _append_message(
        self, message: Message, unique_key: str | None = None, extra: Sequence[tuple[str, str]] | None = None
    ) -> PutMessageResult:
        """Append a message, which is not synced yet; the result says PUT_OK.

        `extra`: reserved properties; None: those that a broker stamps.
        """
        writer = self.writer
        arguments.instance("message", message, Message)
        arguments.true_or_false("wait_store_msg_ok", message.wait_store_msg_ok)

        files = writer.files
        config = files.config
        topic = check_topic(message.topic)
        queue_nums = DEFAULT_QUEUE_NUMS
        if topic.startswith(RETRY_PREFIX) and extra is None:
            group = topic.removeprefix(RETRY_PREFIX)
            settings = self.groups().get(group) or SubscriptionGroupConfig(group)
            message, nums, extra = retries.put_to_retry_topic(message, settings, record.stamps(config))
            topic, queue_nums = message.topic, nums or queue_nums

        topic_config = files.topics.get(topic)
        queue_id = self._queue_id(topic, message, queue_nums if topic_config is None else topic_config.write_queue_nums)

        level, waiting = check_delay_level(message.delay_time_level), _NO_PROPERTIES
        if unique_key is None and (level or config.stamp_uniq_key):
            unique_key = new_unique_key(writer.files.disk.time_ns() // 1_000_000)
        if level:
            level = min(level, len(config.delays_ms))

        message = message if topic_config is None else topic_config.flagged(message)
        if level:
            waiting = rerouting.waiting_properties(level, topic, queue_id)
            if record.is_half(message.sys_flag):
                waiting = waiting[:1]  # as in RocketMQ: a transaction that is not committed goes where it came for
            else:
                message, queue_id = replace(message, topic=SCHEDULE_TOPIC), level - 1

        data, tags_code, key_hashes = record_encode.encode_one(
            message,
            queue_id=queue_id,
            store_host=files.store_host,
            limits=config,
            property_crc=config.enabled_append_prop_crc,
            unique_key=unique_key,
            extra_properties=[*(record.stamps(config) if extra is None else extra), *waiting],
        )

        self.writer.check_fits(len(data) + (MAX_GROUP_TOPIC_SIZE if level else 0))
        if topic_config is None:
            self.create_topic(topic, queue_nums)  # only now: a message that is refused must not create a topic

        topic = message.topic
        if topic == SCHEDULE_TOPIC:
            tags_code = config.delays_ms[queue_id]
        rolled_back = message.sys_flag & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_ROLLBACK
        put, held_s = writer.append(
            data,
            topic,
            queue_id,
            tags_code,
            () if rolled_back else key_hashes,
            property_crc=config.enabled_append_prop_crc,
            flush_disk_type=config.flush_disk_type,
            half=record.is_half(message.sys_flag),
        )
        return self._result(put, held_s)

    def _result(self, put: Row, held_s: float) -> PutMessageResult:
        """The result of a put that is not synced yet; it says PUT_OK."""
        place, writer = put.physical_offset, self.writer
        values = (
            *_STORED,
            place,
            put.size,
            put.queue_offset,
            offset_message_id(writer.files.store_host, place),
            1,  # message
            put.store_timestamp_ms,
            put.queue_id,
            held_s * 1000,
            writer.pool is None or writer.pool_drain.end >= put.end,  # committed
        )
        return tuple.__new__(PutMessageResult, values)  # at a third of what the call of the class costs

    def _append_side_by_side(self, batch: MessageBatch) -> PutMessageResult:
        """Append a batch, which is not synced yet; the result says PUT_OK."""
        writer, config = self.writer, self.writer.files.config
        arguments.instance("batch", batch, MessageBatch)
        if not batch.columns.row_count:
            raise MessageIllegalError("batch: found no message; give at least one", field="batch")

        levels = batch.columns.delay_time_level
        if levels is not None and levels.any():  # as in RocketMQ
            raise MessageIllegalError(
                "batch: found a delay level; allowed is none. Use append_batch", field="delay_time_level"
            )

        columns = batch.columns
        if config.stamp_uniq_key:
            columns = _stamped(columns, writer.files.disk.time_ns() // 1_000_000)
        chunk = record_columns.encode(
            columns,
            limits=config,
            store_host=writer.files.store_host,
            born_host=self.born_host,
            with_digest=False,
            multi_tag_topics=writer.files.topics.with_multi_tags,
        )
        if len(chunk.run_topics) != 1:
            raise MessageIllegalError(
                "batch: found several topics or queues; allowed is one. Use append_batch", field="batch"
            )

        topic, queue_id = check_topic(chunk.run_topics[0]), int(chunk.run_queue_ids[0])
        if topic.startswith(RETRY_PREFIX):  # as in RocketMQ
            raise MessageIllegalError(
                f"batch: found the retry topic {topic}; allowed are other topics. Use send_back, or put_message",
                field="topic",
            )
        self.check_queue(topic, queue_id)

        size = chunk.end
        if size > config.max_message_size:
            raise MessageIllegalError(
                f"batch: found {size} bytes of records; allowed are {config.max_message_size} (maxMessageSize). Use "
                f"append_batch",
                field="batch",
                size=size,
                limit=config.max_message_size,
            )
        self.writer.check_fits(size)

        rows, held_s = writer.append_side_by_side(chunk, topic, queue_id, config.flush_disk_type)
        ids = ",".join(offset_message_id(writer.files.store_host, at) for at in rows.physical_offsets.tolist())
        return PutMessageResult(
            status=PutMessageStatus.PUT_OK,
            append_status=AppendMessageStatus.PUT_OK,
            physical_offset=rows.physical_offset,
            size=size,
            queue_offset=int(rows.queue_offsets[0]),
            message_id=ids,
            message_count=rows.row_count,
            store_timestamp_ms=int(rows.store_timestamps_ms[0]),
            queue_id=queue_id,
            page_cache_ms=held_s * 1000,
        )

    @property
    def born_host(self) -> bytes:
        """The host that messages side by side are from."""
        return self.writer.files.store_host[:-4] + bytes(4)
