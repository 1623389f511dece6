"""A store that is open for reading: messages by offset, key, time and place, and what arrives."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from messagestore.broker.open_halves import OpenHalves
from messagestore.errors import (
    OffsetOutOfRangeError,
    StoreClosedError,
    StoreWentBackwardsError,
)
from messagestore.format import arguments
from messagestore.format.half_records import OpenHalf
from messagestore.format.hosts import parse_offset_message_id
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.format.message import (
    GetMessageResult,
    MessageExt,
    check_readable_queue,
)
from messagestore.format.record_decode import COLUMNS
from messagestore.read import query, queue_records
from messagestore.read.scan import Bound, Scan
from messagestore.read.view import StoreView
from messagestore.writer.statistics import Statistics, StoreStats, clock

CHUNK_ROWS = 65_536
"""How many rows a read returns at most, and a batch encodes at once, unless the caller says otherwise."""


class ReadOnlyStore:
    """A store that is open for reading only. `MessageStore.open_read_only` creates it.

    The store may be in use, by a writer of this project in any process or by a Java broker. Reading takes no lock,
    never waits for a writer, and writes nothing. Each call sees what is visible at that moment; of a batch it sees
    every message or none. Within a queue, messages come in the order of their queue offsets, each once.

    Use one object from one thread at a time. Several threads need an object each. Only `close` may be called by another
    thread: a `wait` or `follow` that is going on then ends with `StoreClosedError`, within about a tenth of a second.
    What a call returns belongs to the caller and stays valid after `close`.

    As in RocketMQ's store, a topic or queue that does not exist is an empty one, and never an error: both of its
    offsets are 0, `get_message` answers NO_MESSAGE_IN_QUEUE, `get_batch` None, `query_message` and `read` find nothing,
    and `wait` and `follow` wait for its first message. `topics` says which topics exist.

    Raises
    ------
    StoreClosedError
        By every method, after `close`.
    CorruptionError
        By every method that reads messages, if stored bytes are damaged. The error names the file and the offset.
    StoreWentBackwardsError, NotAStoreError
        By every method that reads messages, if the store was cut, or if another folder took its place.

    Examples
    --------
    >>> from messagestore import Message, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     for carrier in ("UA", "AA", "B6"):
    ...         _ = store.put_message(Message("flights", carrier.encode(), queue_id=0, tags=carrier))
    >>> with MessageStore.open_read_only("store") as store:
    ...     print(store.topics()["flights"], store.min_offset("flights", 0), store.max_offset("flights", 0))
    ...     for batch in store.read("flights", 0, start=1, columns=["queue_offset", "tags"]):
    ...         print(batch.to_pylist())
    [0] 0 3
    [{'queue_offset': 1, 'tags': 'AA'}, {'queue_offset': 2, 'tags': 'B6'}]
    """

    def __init__(self, view: StoreView | None, statistics: Statistics | None = None) -> None:
        self._view = view
        """None: the store is closed. `MessageStore` makes the view when it is first needed."""
        self._halves: OpenHalves | None = None
        self._statistics = statistics or Statistics()

    @property
    def view(self) -> StoreView:
        """The internal reader. It is no part of the stable interface.

        Raises
        ------
        StoreClosedError
        """
        if self._view is None:
            raise StoreClosedError("the store is closed. Open it again")
        return self._view

    @property
    def store_id(self) -> str:
        """The id of the store, in hex; empty if this project has never written to it."""
        return self.view.store_id

    @property
    def broker_name(self) -> str:
        """The name of the broker whose store this is; empty if no writer gave one (`StoreConfig.broker_name`).

        Raises
        ------
        CorruptionError
            `spark/broker.json` is damaged.
        """
        return self.view.broker_name

    def topics(self) -> dict[str, list[int]]:
        """The topics of the store, and the ids of the queues that each topic has on disk, in ascending order."""
        return self.view.topics()

    def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the queue offset of the last visible message: the offset that the next message will get.

        A topic or queue that does not exist has the maximum offset 0.

        Raises
        ------
        MessageIllegalError
            The topic cannot be the name of a folder, or the queue id is below 0.
        """
        check_readable_queue(topic, queue_id)
        self.view.refresh()
        return self.view.max_offset(topic, queue_id)

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The queue offset of the first message that retention has not deleted; equal to `max_offset` if none is left.

        A topic or queue that does not exist has the minimum offset 0.

        Raises
        ------
        MessageIllegalError
            The topic cannot be the name of a folder, or the queue id is below 0.
        """
        check_readable_queue(topic, queue_id)
        self.view.refresh()
        return self.view.min_offset(topic, queue_id)

    def get_message(self, topic: str, queue_id: int, queue_offset: int, max_count: int = 32) -> GetMessageResult:
        """Read messages of a queue, from `queue_offset` on, in order.

        Parameters
        ----------
        topic : str
        queue_id : int
        queue_offset : int
            The queue offset of the first message to read, from 0.
        max_count : int
            The largest number of messages to return. As in RocketMQ, values below 1 count as 1.

        Returns
        -------
        GetMessageResult
            RocketMQ's status, the messages, and the offset to continue with. An offset that the queue does not hold is
            a status, not an error. Bodies are as stored: a body that a RocketMQ client compressed stays compressed.

        Raises
        ------
        MessageIllegalError
            The topic cannot be the name of a folder, or the queue id is not a whole number from 0.
        ConfigError
            A number is not a whole number.
        CorruptionError
            A message is damaged.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     _ = store.put_message(Message("flights", b"EWR to IAH", queue_id=0))
        ...     found = store.get_message("flights", 0, queue_offset=0)
        ...     ahead = store.get_message("flights", 0, queue_offset=found.next_begin_offset)
        >>> found.status.name, found.messages[0].body, found.next_begin_offset
        ('FOUND', b'EWR to IAH', 1)
        >>> ahead.status.name, ahead.messages
        ('OFFSET_OVERFLOW_ONE', [])
        """
        check_readable_queue(topic, queue_id)
        queue_offset = arguments.whole_number("queue_offset", queue_offset)
        max_count = arguments.whole_number("max_count", max_count)
        began_s = clock()
        result = query.get_message(self.view, topic, queue_id, queue_offset, max_count)
        self._statistics.got(began_s, len(result.messages))
        return result

    def get_batch(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_count: int = CHUNK_ROWS,
        columns: Sequence[str] = ("topic", "queue_id", "queue_offset", "body"),
    ) -> pa.RecordBatch | None:
        """Read messages of a queue into one Arrow record batch.

        Parameters
        ----------
        topic : str
        queue_id : int
        queue_offset : int
            The queue offset of the first message to read, from 0.
        max_count : int
            The largest number of rows. A batch ends earlier at the end of the queue, at 16 384 rows, or at 16 MiB of
            records; it has at least one row.
        columns : sequence of str
            The columns to decode, in this order: topic, queue_id, queue_offset, body, tags, keys, properties,
            born_timestamp_ms, store_timestamp_ms, message_id, unique_key, offset_message_id, physical_offset, size,
            flag, sys_flag, body_crc, reconsume_times, born_host, store_host, prepared_transaction_offset,
            system_properties.

        Returns
        -------
        pa.RecordBatch | None
            Rows in the order of their queue offsets, in memory of their own; None if the queue does not hold
            `queue_offset` (the status of `get_message` says why).

        Raises
        ------
        CorruptionError
            A message is damaged.
        OffsetOutOfRangeError
            Retention deleted the message while it was being read.
        ConfigError
            A column is unknown, or a number is not a whole number.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     for gate in (b"B12", b"C3"):
        ...         _ = store.put_message(Message("gates", gate, queue_id=0))
        ...     batch = store.get_batch("gates", 0, queue_offset=0, columns=["queue_offset", "body"])
        ...     batch.to_pydict(), store.get_batch("gates", 0, queue_offset=2)
        ({'queue_offset': [0, 1], 'body': [b'B12', b'C3']}, None)
        """
        check_readable_queue(topic, queue_id)
        queue_offset = arguments.whole_number("queue_offset", queue_offset)
        max_count = arguments.whole_number("max_count", max_count)
        columns = arguments.names("columns", columns, COLUMNS)
        began_s = clock()
        batch = query.get_batch(self.view, topic, queue_id, queue_offset, max_count, columns)
        self._statistics.got(began_s, 0 if batch is None else batch.num_rows)
        return batch

    def stats(self) -> StoreStats:
        """What was read through this object; a `MessageStore` also counts what its process has put.

        Returns
        -------
        StoreStats
        """
        return self._statistics.stats(disk_used={})

    def query_message(
        self, topic: str, key: str, max_count: int | None = None, begin_ms: int = 0, end_ms: int | None = None
    ) -> list[MessageExt]:
        """Find messages by key.

        The index answers most of the query. The parts of the log that it does not cover are read from end to end, so a
        store without an index gives the same answer, slowly.

        Parameters
        ----------
        topic : str
        key : str
            One of the message's keys, or its unique key.
        max_count : int | None
            The largest number of messages to return; None: the setting `maxMsgsNumBatch` (64).
        begin_ms, end_ms : int
            Only messages that were stored within these times, both included, in milliseconds since 1970. An `end_ms` of
            None sets no upper limit.

        Returns
        -------
        list of MessageExt
            The newest matches, in the order of the log: the oldest of them first. A topic that does not exist has none.

        Raises
        ------
        ConfigError
            `key` is empty, `max_count` is below 1, or a number is not a whole number.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     for gate in (b"B12", b"C3"):
        ...         _ = store.put_message(Message("gates", gate, keys=["UA1545"]))
        ...     [message.body for message in store.query_message("gates", key="UA1545")]
        [b'B12', b'C3']
        """
        check_readable_queue(topic, 0)
        arguments.text("key", key)
        most = None if max_count is None else arguments.whole_number("max_count", max_count, 1)
        begin = arguments.whole_number("begin_ms", begin_ms)
        end = query.NO_END_MS if end_ms is None else arguments.whole_number("end_ms", end_ms)
        return query.query_message(self.view, topic, key, most, begin, end)

    def look_message_by_offset(self, physical_offset: int) -> MessageExt | None:
        """The message whose record begins at a physical offset, in bytes from the log's origin.

        Returns
        -------
        MessageExt | None
            None if no visible record begins there.

        Raises
        ------
        ConfigError
            The offset is not a whole number.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     result = store.put_message(Message("gates", b"B12"))
        ...     store.look_message_by_offset(result.physical_offset).body
        b'B12'
        """
        return query.look_message_by_offset(self.view, arguments.whole_number("physical_offset", physical_offset))

    def look_message_by_id(self, message_id: str) -> MessageExt | None:
        """The message with an offset message id, as `PutMessageResult.message_id` gives it.

        Returns
        -------
        MessageExt | None
            None if no visible record begins at the offset that the id names.

        Raises
        ------
        MessageIllegalError
            The text is no offset message id: 32 hex characters, or 56 with an IPv6 address.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     result = store.put_message(Message("gates", b"B12"))
        ...     store.look_message_by_id(result.message_id).body
        b'B12'
        """
        return query.look_message_by_offset(self.view, parse_offset_message_id(message_id)[1])

    def queue_offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, boundary: str = query.LOWER) -> int:
        """Find a queue offset by store time (RocketMQ's getOffsetInQueueByTime).

        Parameters
        ----------
        topic : str
        queue_id : int
        timestamp_ms : int
            Milliseconds since 1970.
        boundary : str
            "lower": the first message that was stored at this time or later; the queue's maximum offset if there is
            none. "upper": the last message that was stored at this time or earlier; the queue's minimum offset if there
            is none. Both are 0 if the topic or queue does not exist.

        Raises
        ------
        ConfigError
            The time is not a whole number, or the boundary is another word.

        Notes
        -----
        The search is binary. Where store times go back, because a clock was set back by more than an hour (a broker's:
        by more than 10 s), it may find an earlier message, or a later one.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     result = store.put_message(Message("gates", b"B12", queue_id=0))
        ...     stored_ms = result.store_timestamp_ms
        ...     [store.queue_offset_by_time("gates", 0, time_ms) for time_ms in (stored_ms, stored_ms + 1)]
        [0, 1]
        """
        check_readable_queue(topic, queue_id)
        time_ms = arguments.whole_number("timestamp_ms", timestamp_ms)
        arguments.one_of("boundary", boundary, (query.LOWER, query.UPPER))
        return query.queue_offset_by_time(self.view, topic, queue_id, time_ms, boundary)

    def open_halves(self) -> list[OpenHalf]:
        """The half messages that have neither been committed nor rolled back, the oldest first.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     _ = store.half_message(Message("orders", b"43 is paid"), "payments")
        >>> with MessageStore.open_read_only("store") as store:
        ...     [(half.topic, half.producer_group, half.check_times) for half in store.open_halves()]
        [('orders', 'payments', 0)]
        """
        if self._halves is None:
            self._halves = OpenHalves(self.view)
        self._halves.refresh()
        return list(self._halves.by_offset.values())

    def read(
        self,
        topic: str,
        queue_id: int,
        start: int,
        end: int | None = None,
        columns: Sequence[str] = ("queue_offset", "body"),
    ) -> Iterator[pa.RecordBatch]:
        """Read a range of a queue as Arrow record batches, in order, each message once.

        A thread reads ahead, so memory use is a few batches of at most 16 384 rows and 16 MiB of records (a larger
        record makes a batch of its own).

        Parameters
        ----------
        topic : str
        queue_id : int
        start : int
            The queue offset of the first message.
        end : int | None
            One past the last message; None, or a number beyond it: the end that is visible when iteration begins.
        columns : sequence of str
            The columns to decode, as in `get_batch`.

        Yields
        ------
        pa.RecordBatch
            In memory of its own.

        Raises
        ------
        OffsetOutOfRangeError
            `start` is negative, or retention has deleted the next message. All messages before it were given; `min` is
            the first one left. A `start` beyond the end is no error: nothing is read.
        StoreWentBackwardsError
            A message that was visible is gone: the queue was deleted, or the store was restored.
        CorruptionError
            A message is damaged.
        ConfigError
            A column is unknown, or a number is not a whole number. This error comes from the call itself, all others
            come from the iteration.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     for gate in (b"B12", b"C3", b"D7"):
        ...         _ = store.put_message(Message("gates", gate, queue_id=0))
        ...     for batch in store.read("gates", 0, start=1):
        ...         print(batch.to_pydict())
        {'queue_offset': [1, 2], 'body': [b'C3', b'D7']}
        """
        check_readable_queue(topic, queue_id)
        start = arguments.whole_number("start", start)
        end = None if end is None else arguments.whole_number("end", end)
        return self._read(topic, queue_id, start, end, arguments.names("columns", columns, COLUMNS))

    def _read(
        self, topic: str, queue_id: int, start: int, end: int | None, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        self.view.refresh()
        low, high = self.view.min_offset(topic, queue_id), self.view.max_offset(topic, queue_id)
        if start < 0:
            raise OffsetOutOfRangeError(
                f"{topic}/{queue_id}: found start {start}; the queue holds {low} to {high}",
                topic=topic,
                queue_id=queue_id,
                queue_offset=start,
                min=low,
                max=high,
            )
        yield from queue_records.read(
            self.view, topic, queue_id, start, high if end is None else min(end, high), columns
        )

    def scan(
        self,
        topics: str | re.Pattern[str] | Sequence[str],
        *,
        start: Bound = None,
        end: Bound = None,
        tags: str | Sequence[str] | None = None,
        keys: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,
    ) -> pa.RecordBatchReader:
        """Read whole topics as one frame, for Polars, DuckDB, pandas, or whatever else reads Arrow.

        What is visible when this is called is read: of each batch all messages or none, also across queues. What the
        bounds leave out is not read from the disk, except as far as they are compared with it. Memory use is some
        batches of at most 16,384 rows and 16 MiB of records, however long the topics are.

        Parameters
        ----------
        topics : str, re.Pattern, or sequence of str
            One topic, several, or those whose whole name matches a pattern, except retry, dead letter and system
            topics. A topic that does not exist is an empty one.
        start, end : int, datetime, or mapping of (str, int) to int, optional
            The first message of each queue, and one past the last. A number is a queue offset; a mapping has one for
            each (topic, queue id), and leaves other queues whole. A `datetime`, which needs a time zone, is a store
            time: messages that were stored from `start` on and before `end`. None: the first message that is left, and
            the end that is visible now.
        tags : str or sequence of str, optional
            Only messages with one of these tags.
        keys : str or sequence of str, optional
            Only messages with one of these keys, or with one as unique key. The index finds them.
        columns : sequence of str, optional
            The columns, in this order; nothing else is decoded. They have the names and types of Spark's source: topic,
            queueId, queueOffset, body, tags, keys, properties, bornTimestamp, storeTimestamp, msgId, which are the
            default; and offsetMsgId, commitLogOffset, storeSize, flag, sysFlag, bodyCrc, reconsumeTimes, bornHost,
            storeHost, preparedTransactionOffset, systemProperties, brokerName. Times are Arrow timestamps.
        filter : pyarrow.compute.Expression, optional
            Only rows for which it is true. It may use columns that are not given. It saves no reading: use the bounds,
            tags and keys for that.

        Returns
        -------
        pa.RecordBatchReader
            The rows, topic by topic, queue by queue, in the order of queue offsets. Compressed bodies are
            decompressed. The reader has files and a thread of its own: it may be read by any one thread, beside other
            scans of this store, and after the store is closed.

        Raises
        ------
        ConfigError, MessageIllegalError
            An argument is none of what is allowed. These come from the call itself, those that follow from reading.
        OffsetOutOfRangeError
            Retention has deleted the next message, perhaps since this was called. All messages before it were given.
        StoreWentBackwardsError
            A message that was visible is gone: the queue was deleted, or the store was restored.
        CorruptionError
            A message is damaged, or a compressed body cannot be read.

        Notes
        -----
        A message whose store time lies more than an hour before that of a message ahead of it in its queue, because a
        clock was set back, may be missed by bounds in time.

        Examples
        --------
        >>> import pyarrow.compute as pc
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     for carrier in ("UA", "AA", "UA"):
        ...         _ = store.put_message(Message("arrivals", carrier.encode(), queue_id=0, tags=carrier))
        ...     frame = store.scan("arrivals", tags="UA", columns=["queueOffset", "body"])
        ...     late = store.scan("arrivals", columns=["body"], filter=pc.field("queueOffset") >= 1)
        >>> frame.read_all().to_pydict()
        {'queueOffset': [0, 2], 'body': [b'UA', b'UA']}
        >>> late.read_pandas()["body"].tolist()
        [b'AA', b'UA']
        """
        wanted = Scan.of(topics, start, end, tags, keys, columns, filter)
        view = self.view
        view.check_place()
        own = StoreView(view.files.paths.root, view.files.config, view.files.disk, view.tail)
        try:
            view.check_place()  # so the same folder was opened
        except BaseException:
            own.close()
            raise
        return wanted.reader(own)

    def wait(self, topic: str, queue_id: int, queue_offset: int, timeout: float | None = None) -> bool:
        """Wait until a queue has a message at `queue_offset`.

        A message that another process of this project puts ends the wait at once; while a broker writes the store, the
        queue is looked at every few milliseconds.

        Parameters
        ----------
        topic : str
            It need not exist yet.
        queue_id : int
        queue_offset : int
        timeout : float | None
            The longest wait in seconds; None: no limit.

        Returns
        -------
        bool
            True if the message is there; False after `timeout`. A message that retention has deleted since then counts
            as there.

        Raises
        ------
        MessageIllegalError
            The topic cannot be the name of a folder, or the queue id is below 0.
        ConfigError
            A number is not what is allowed.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     _ = store.put_message(Message("boarding", b"UA1545", queue_id=0))
        ...     print(store.wait("boarding", 0, 0), store.wait("boarding", 0, 1, timeout=0.01))
        True False
        """
        check_readable_queue(topic, queue_id)
        queue_offset = arguments.whole_number("queue_offset", queue_offset, 0)
        timeout_s = math.inf if timeout is None else arguments.seconds("timeout", timeout)
        with self._until_closed():
            self.view.await_change(0)
            return self._wait(topic, queue_id, queue_offset, timeout_s) > queue_offset

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Give whatever fails because another thread closes the store the error that says so."""
        try:
            yield
        except StoreClosedError:
            raise
        except Exception as error:
            if not self._is_closed():
                raise
            raise StoreClosedError("the store was closed by another thread. Open it again") from error

    def _is_closed(self) -> bool:
        return self._view is None

    def _wait(self, topic: str, queue_id: int, queue_offset: int, timeout_s: float, least: int = 0) -> int:
        """The queue's end, as soon as it is above `queue_offset` or below `least`, and at the latest in `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while least <= (end := self.max_offset(topic, queue_id)) <= queue_offset:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            self.view.await_change(left_s)
        return end

    def follow(
        self,
        topic: str,
        queue_id: int,
        start: int,
        columns: Sequence[str] = ("queue_offset", "body"),
        timeout: float | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read a queue as `read` does, and then the messages that arrive.

        Parameters
        ----------
        topic : str
            It need not exist yet.
        queue_id : int
        start : int
            The queue offset of the first message.
        columns : sequence of str
            The columns to decode, as in `get_batch`.
        timeout : float | None
            End when no message has arrived for this many seconds; None: never end.

        Yields
        ------
        pa.RecordBatch
            What is there when it is asked for: one message, or up to 16 384.

        Raises
        ------
        StoreWentBackwardsError
            As in `read`; and the queue was made again, so that its numbers mean other messages than those given.
        OffsetOutOfRangeError, CorruptionError, ConfigError
            As in `read`.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     for gate in (b"A1", b"A2"):
        ...         _ = store.put_message(Message("doors", gate, queue_id=0))
        ...     for batch in store.follow("doors", 0, start=0, timeout=0.01):
        ...         print(batch["body"].to_pylist())
        [b'A1', b'A2']
        """
        check_readable_queue(topic, queue_id)
        start = arguments.whole_number("start", start)
        timeout_s = math.inf if timeout is None else arguments.seconds("timeout", timeout)
        return self._follow(topic, queue_id, start, arguments.names("columns", columns, COLUMNS), timeout_s)

    def _follow(
        self, topic: str, queue_id: int, start: int, columns: Sequence[str], timeout_s: float
    ) -> Iterator[pa.RecordBatch]:
        with self._until_closed():
            position, place = start, self._place_before(topic, queue_id, start)
            with_place = list(dict.fromkeys([*columns, "physical_offset"]))
            self.view.await_change(0)
            while True:
                for batch in self._read(topic, queue_id, position, None, with_place):
                    self._check_continues(topic, queue_id, position, place)
                    position += batch.num_rows
                    place = batch["physical_offset"][-1].as_py()
                    yield batch.select(list(columns))
                reached = position if position > start else 0  # the first message may be one that is still to come
                end = self._wait(topic, queue_id, position, timeout_s, least=reached)
                if end < reached:
                    raise StoreWentBackwardsError(
                        f"{topic}/{queue_id}: messages up to {position} were there, and now the queue ends at {end}. "
                        f"It was deleted, or the store was restored"
                    )
                if end <= position:
                    return

    def _check_continues(self, topic: str, queue_id: int, position: int, place: int) -> None:
        """Refuse what was read at `position` if the message before it is no longer the one that was there, at `place`.

        The queue may have been made again, and may have grown past `position` since the last look.
        """
        if place >= 0 and self._place_before(topic, queue_id, position) not in (place, -1):
            raise StoreWentBackwardsError(
                f"{topic}/{queue_id}: message {position - 1} was there, and is another one now. The queue was made "
                f"again, and its numbers began again below it. Follow it from its first message: "
                f"{self.min_offset(topic, queue_id)}"
            )

    def _place_before(self, topic: str, queue_id: int, position: int) -> int:
        """The physical offset of the message before `position`, also of one that retention has deleted; -1: unknown."""
        if not 0 < position <= self.view.max_offset(topic, queue_id):
            return -1
        units = self.view.units(topic, queue_id, position - 1, position)
        if not len(units) or int(units["size"][0]) == FILLER_UNIT_SIZE:
            return -1
        return int(units["physical_offset"][0])

    def close(self) -> None:
        """Close all files. A second call does nothing."""
        view, self._view = self._view, None
        if view is not None:
            view.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "an open store cannot be pickled or copied. Send its path, and open the store there, with "
            "MessageStore.open_read_only to read it"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
