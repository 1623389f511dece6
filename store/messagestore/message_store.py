"""The library's public classes: `MessageStore` writes and reads a store, `ReadOnlyStore` only reads it.

Examples
--------
>>> from messagestore import Message, MessageStore
>>> with MessageStore.open("store") as store:
...     result = store.put_message(Message("flights", b"EWR to IAH", queue_id=0, keys=["N14228"], tags="UA"))
...     result.status.name, result.queue_offset
('PUT_OK', 0)
>>> with MessageStore.open_read_only("store") as store:
...     [message.body for message in store.get_message("flights", 0, queue_offset=0).messages]
[b'EWR to IAH']

The classes check their arguments and pass the work on: putting is in `puts`, batches are in `batches`, and reading is
in `read`.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import pyarrow as pa

from messagestore.batches.append import (
    BatchRequest,
    BatchResult,
    Chunks,
    StoredBatch,
    append_batch,
    last_batch,
)
from messagestore.batches.encoding import encoded
from messagestore.batches.progress import ClaimedProgress, ProgressToMove
from messagestore.broker import retries
from messagestore.broker.delivery import Delivered
from messagestore.broker.expired import ExpiredFiles, asked_for
from messagestore.broker.half_checks import Check, CheckReport, HalfChecks
from messagestore.broker.halves import HalfMessage, HalfMessages
from messagestore.broker.topic_deletion import DeletedTopic, delete_topic
from messagestore.errors import (
    ConfigError,
    MessageIllegalError,
    NotAStoreError,
    PutMessageStatus,
    StoreClosedError,
    StoreError,
    StoreFullError,
)
from messagestore.files.disk import Disk
from messagestore.files.store_settings import read_settings
from messagestore.files.subscription_groups import SubscriptionGroupConfig
from messagestore.files.topics import DEFAULT_QUEUE_NUMS, PERM_READ_WRITE, TopicConfig
from messagestore.format import arguments
from messagestore.format.batch_record import SOURCE_SPARK, check_app_id
from messagestore.format.config import ASYNC_FLUSH, StoreConfig
from messagestore.format.half_records import OpenHalf
from messagestore.format.message import (
    Message,
    MessageExt,
    PutMessageResult,
    check_group,
    check_retrying_group,
    check_topic,
)
from messagestore.format.message_columns import ArrowStream, columns_of
from messagestore.format.record_columns import MessageColumns
from messagestore.format.record_decode import COLUMNS
from messagestore.format.unique_key import new_unique_key
from messagestore.log.store_files import Paths, looks_like_store
from messagestore.message_batch import MessageBatch
from messagestore.puts import Puts
from messagestore.read.log_follower import Listener, LogFollower, follow_messages
from messagestore.read.view import StoreView
from messagestore.read_only_store import ReadOnlyStore
from messagestore.recovery.report import RecoveryReport
from messagestore.session import AttachedStore, Session, attached_store
from messagestore.shared_settings import CHANGEABLE, stored_with
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.states import Health
from messagestore.writer.statistics import StoreStats

_RETENTION_TURN_S = 1.0
"""After this time, a turn deletes no further file: other writers wait."""
_log = logging.getLogger(__name__)


def _settings(config: StoreConfig | None) -> StoreConfig | None:
    return None if config is None else arguments.instance("config", config, StoreConfig)


class MessageStore(ReadOnlyStore):
    """A store that is open for writing and reading. `MessageStore.open` creates it.

    The object is a session: until it is closed, no other process can write to the store. A second writer waits for
    `lockTimeout` and then raises `StoreLockedError`, which names this process. Readers are never blocked. The session's
    own reads see everything that it has put.

    Any number of threads may put messages; with SYNC_FLUSH, puts that wait at the same time share one sync. A put gets
    the next offset of its queue, so offsets have no gaps. Reads follow the rules of `ReadOnlyStore`: one thread at a
    time.

    The store copies what it is given: a message or batch may be changed as soon as a put returns.

    Attributes
    ----------
    report : RecoveryReport | None
        What recovery found and did when this process opened the store.

    Raises
    ------
    StoreClosedError
        By every method, after `close`.
    StoreLockedError
        By every put, after a Java broker was started on the store. What was acknowledged before is on the disk.
    StorePoisonedError
        By every put, after a sync failed. Reopen the store; recovery checks what is there.

    Examples
    --------
    >>> from messagestore import Message, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     for number in range(3):
    ...         result = store.put_message(Message("delays", b"UA%d" % number, queue_id=0, keys=["N14228"], tags="UA"))
    ...     print(result.status.name, result.queue_offset)
    ...     print([message.body for message in store.query_message("delays", key="N14228")])
    PUT_OK 2
    [b'UA0', b'UA1', b'UA2']
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: StoreConfig | None,
        disk: Disk | None = None,
        *,
        accept_loss: bool = False,
    ) -> None:
        self._attached = attached_store(root, config, disk)
        self._session: Session | None = self._attached.open_session(
            "a session (MessageStore.open)", config=self._attached.settings(config), accept_loss=accept_loss
        )
        try:
            self._puts = Puts(self._attached, self._session.writer)
            self._followers: list[LogFollower] = []
            self.report: RecoveryReport | None = self._attached.report
            super().__init__(None, self._attached.statistics)
            self._closed = False
        except BaseException:  # of a signal handler
            self._attached.close_session(self._session)
            raise

    @cached_property
    def _half_messages(self) -> HalfMessages:
        return HalfMessages(self._puts)

    @cached_property
    def _half_checks(self) -> HalfChecks:
        return HalfChecks(lambda: nullcontext(self._half_messages))

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        config: StoreConfig | None = None,
        *,
        disk: Disk | None = None,
        accept_loss: bool = False,
    ) -> MessageStore:
        """Open a store for writing and reading. A missing or empty folder becomes a new store.

        If the last writer did not close the store, this call recovers it first: it checks the log above the last clean
        end, cuts off what a crash left unfinished, and repairs queues and index. `report` says what was done.

        Parameters
        ----------
        root : path
            The store's root folder.
        config : StoreConfig | None
            The settings; None: the defaults, or those of the sessions that this process has open. All sessions of a
            process share their settings. File sizes and index slots count only while the store has no files; after
            that, those of the store count.
        disk : Disk | None
            For tests: the object through which all system calls on files go.
        accept_loss : bool
            If the end of the log is proven to be lost (which otherwise raises `CorruptionError`), continue without the
            messages that were there. `report.lost` says how many they are. New messages get their queue offsets.

        Raises
        ------
        StoreLockedError
            A broker, or another writer, holds the store.
        NotAStoreError
            The folder holds something else.
        ConfigError
            A setting does not allow writing to this store, or a session of this process is open with another value.
        CorruptionError
            Stored bytes are damaged. Nothing was changed.
        StorePermissionError
            This user may not use a file of the store.
        """
        arguments.true_or_false("accept_loss", accept_loss)
        return cls(arguments.path("root", root), _settings(config), disk, accept_loss=accept_loss)

    @staticmethod
    def open_read_only(
        root: str | os.PathLike[str], config: StoreConfig | None = None, *, disk: Disk | None = None
    ) -> ReadOnlyStore:
        """Open a store for reading. No lock is taken, nothing is written, and any writer or broker may be at work.

        Parameters
        ----------
        root : path
            The store's root folder.
        config : StoreConfig | None
            The settings; None: the defaults. Only `max_hash_slot_num`, `max_index_num`, `max_msgs_num_batch`,
            `proven_tail_size`, `fail_on_unproven` and `read_up_to` matter to a reader.
        disk : Disk | None
            For tests.

        Raises
        ------
        NotAStoreError
            The folder is missing or holds no store, or its queues are in RocksDB.
        NotRecoveredError
            With `fail_on_unproven`: the machine was restarted, and the store must be recovered before all of it can be
            read.
        """
        return ReadOnlyStore(StoreView(arguments.path("root", root), _settings(config), disk))

    @property
    def writer(self) -> LogWriter:
        """The internal writer. It is no part of the stable interface.

        Raises
        ------
        StoreClosedError
        """
        return self._puts.writer

    @property
    def view(self) -> StoreView:
        """The internal reader, which sees everything that was put. It is no part of the stable interface."""
        self._publish_own()
        if self._view is None:
            self._view = self._puts.create_view()
        return self._view

    def _publish_own(self) -> None:
        """Make visible what was put with ASYNC_FLUSH so far: a session sees its own puts."""
        writer = self.writer
        if writer.pending and self._attached.config.flush_disk_type == ASYNC_FLUSH:
            writer.pool_drain.run()
            writer.publish()

    def _is_closed(self) -> bool:
        return self._closed

    def check_queues(self) -> str | None:
        """Compare all ConsumeQueues with what they held when the store was closed, and rebuild those that are damaged.

        `messagestore recover` calls this. Other writers check each queue when they first append to it.

        Returns
        -------
        str | None
            What was rebuilt, in one line; None if nothing was.

        Raises
        ------
        CorruptionError
            The log does not give what a queue had.
        """
        return self.writer.numbers.check_queues()

    # ---- retention

    def delete_expired_files(
        self,
        *,
        reserved_hours: float | None = None,
        before_ms: int | None = None,
        before_offset: int | None = None,
        ignored_groups: Collection[str] = (),
        at_once: bool = False,
    ) -> ExpiredFiles:
        """Delete the oldest segments of the log, and the queue and index files that lead only to them.

        A segment must meet all conditions that are given; without any, it must be older than `fileReservedTime` (72
        hours unless it is set). The first segment that stays ends the search. The segment that is written to and
        everything above the clean end always stay; what a consumer group has not read stays unless `ignored_groups` or
        `at_once` says otherwise.

        Parameters
        ----------
        reserved_hours : float | None
            The segment was last written to at least so long ago.
        before_ms : int | None
            All of its messages were stored before this time, in milliseconds since 1970.
        before_offset : int | None
            It ends at or below this physical offset.
        ignored_groups : collection of str
            Consumer groups that do not count, for example because nobody uses them any more.
        at_once : bool
            Delete all that can be deleted up to `before_offset`, however old it is, and whoever has not read it.

        Raises
        ------
        ConfigError
            An argument is not allowed, or a topic is compacted.
        CorruptionError
            What must be read before anything is deleted is damaged.
        StorePoisonedError
            A sync failed.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     result = store.put_message(Message("gates", b"B12", queue_id=0))
        ...     expired = store.delete_expired_files(reserved_hours=24)
        >>> len(expired.segments), expired.kept
        (0, 'it is the last one, to which the store writes')
        """
        expiry = asked_for(
            self._attached.config,
            self._attached.disk.time_ns() // 1_000_000,
            reserved_hours=reserved_hours,
            before_ms=before_ms,
            before_offset=before_offset,
            ignored_groups=ignored_groups,
            at_once=at_once,
        )

        self.writer.check_usable()
        services = self._attached.services
        assert services is not None
        return services.retention.run(expiry)

    # ---- topics

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
        """Create a topic in `config/topics.json`.

        Putting a message to a topic that does not exist also creates it, with 8 queues.

        Parameters
        ----------
        topic : str
            1 to 127 characters of `%|a-zA-Z0-9_-`.
        queue_nums : int
            The number of queues that producers write, 1 to 65 536.
        read_queue_nums : int | None
            The number of queues that consumers read; None: `queue_nums`.
        perm : int
            What clients may do: 2 write, 4 read, 6 both. Without 2, puts and batches are refused; what was accepted
            before, such as a delayed message that becomes due, still arrives. This project's readers ignore it, because
            whoever may read the files can read the messages.
        order : bool
            RocketMQ's flag for topics whose queues must not move to another broker.
        attributes : mapping of str to str, optional
            RocketMQ's topic attributes, for example `{"message.type": "FIFO"}`.

        Returns
        -------
        TopicConfig
            The topic's settings. A topic that exists already is returned unchanged, whatever the arguments say.

        Raises
        ------
        MessageIllegalError
            The name is not legal, or is reserved for a broker.
        ConfigError
            A number is not allowed.

        Examples
        --------
        >>> from messagestore import MessageStore
        >>> with MessageStore.open("store") as store:
        ...     store.create_topic("flights", queue_nums=4).write_queue_nums
        4
        """
        return self._puts.create_topic(
            topic, queue_nums, read_queue_nums=read_queue_nums, perm=perm, order=order, attributes=attributes
        )

    def alter_topic(
        self,
        topic: str,
        *,
        read_queue_nums: int | None = None,
        write_queue_nums: int | None = None,
        perm: int | None = None,
        order: bool | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> TopicConfig:
        """Change settings of a topic in `config/topics.json`; what is None, or not named, stays as it is.

        Fewer queues to write is RocketMQ's way to retire queues: producers leave them, and consumers read what is left.
        No message is deleted or moved.

        Parameters
        ----------
        topic : str
        read_queue_nums, write_queue_nums : int | None
            The numbers of queues that consumers read and producers write, 1 to 65 536.
        perm, order, attributes
            As for `create_topic`.

        Returns
        -------
        TopicConfig
            The settings as they are now.

        Raises
        ------
        UnknownTopicError
            The topic has no settings in the store. `create_topic` gives it some.
        MessageIllegalError
            The name is reserved for a broker.
        ConfigError
            A number is not allowed.

        Examples
        --------
        >>> from messagestore import MessageStore
        >>> with MessageStore.open("store") as store:
        ...     _ = store.create_topic("flights", queue_nums=4)
        ...     store.alter_topic("flights", write_queue_nums=8, read_queue_nums=8).write_queue_nums
        8
        """
        check_topic(topic)
        with self._puts.configuring() as writer:
            topics = writer.files.topics
            topics.alter(
                topic,
                read_queue_nums=read_queue_nums,
                write_queue_nums=write_queue_nums,
                perm=perm,
                order=order,
                attributes=attributes,
            )
            topics.save_or_drop()

            topic_config = topics.get(topic)
            assert topic_config is not None
            return topic_config

    def delete_topic(self, topic: str) -> DeletedTopic:
        """Delete a topic with its queues, and what consumer groups have read of it, as a broker's `deleteTopic` does.

        Its messages are in no queue any more. Their records stay in the log until `delete_expired_files` takes their
        segments, so the disk gets no room, and a message id still finds them. If a topic of that name is made again,
        its queues begin at 0. Delayed and half messages of the topic that are still to come make it again.

        Whoever has read the topic, such as a streaming query, meets a queue that went back: it must begin anew.

        Parameters
        ----------
        topic : str
            A topic that users may have. A name with settings in `config/topics.json`, with queues, or with offsets of a
            consumer group.

        Returns
        -------
        DeletedTopic
            What went.

        Raises
        ------
        UnknownTopicError
            The store has no such topic.
        MessageIllegalError
            The name is reserved for a broker.
        CorruptionError
            A file that has to be changed is damaged. Nothing was changed.
        StoreLockedError
            A broker waits for the store, or another process writes the offsets of consumer groups. Nothing was changed.
        StoreFullError
            The disk has no room for the small files. Make room, and delete the topic again.
        StorePoisonedError
            A sync failed.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     _ = store.put_message(Message("flights", b"JFK to MIA", queue_id=0))
        ...     store.delete_topic("flights").queue_count, store.topics()
        (1, {})
        """
        check_topic(topic)
        with self._puts.configuring() as writer:
            return delete_topic(writer, topic)

    def topic_config(self, topic: str) -> TopicConfig | None:
        """The settings of a topic in `config/topics.json`; None if it has none."""
        return self.writer.files.topics.get(arguments.text("topic", topic))

    def create_group(
        self,
        group: str,
        *,
        retry_max_times: int | None = None,
        retry_queue_nums: int | None = None,
        consume_enable: bool | None = None,
    ) -> SubscriptionGroupConfig:
        """Give a consumer group settings in `config/subscriptionGroup.json`.

        A group needs none: without settings it has RocketMQ's, 16 retries, one retry queue and `consumeEnable`.

        Parameters
        ----------
        group : str
            1 to 255 characters of `%|a-zA-Z0-9_-`.
        retry_max_times : int | None
            A message that was sent back so many times goes to the group's dead-letter topic; 0: at once.
        retry_queue_nums : int | None
            The number of queues of the group's retry topic, when it is created. With 0, nothing can be sent back.
        consume_enable : bool | None
            Whether a broker gives messages to the group. This project's own readers ignore it.

        Returns
        -------
        SubscriptionGroupConfig
            The group's settings. Those of a group that has settings already are returned unchanged.

        Raises
        ------
        MessageIllegalError
            The name is not legal, or is one of the broker's own.
        ConfigError
            A value is not allowed.
        CorruptionError
            The file is damaged; it is left unchanged.

        Examples
        --------
        >>> from messagestore import MessageStore
        >>> with MessageStore.open("store") as store:
        ...     store.create_group("boards", retry_max_times=3).retry_max_times
        3
        """
        check_group(group)
        with self._puts.configuring():
            groups = self._puts.groups()
            settings = groups.get(group)
            if settings is None:
                settings = groups.create(
                    group,
                    retry_max_times=retry_max_times,
                    retry_queue_nums=retry_queue_nums,
                    consume_enable=consume_enable,
                )
                groups.save_or_drop()
            return settings

    def alter_group(
        self,
        group: str,
        *,
        retry_max_times: int | None = None,
        retry_queue_nums: int | None = None,
        consume_enable: bool | None = None,
    ) -> SubscriptionGroupConfig:
        """Change settings of a consumer group in `config/subscriptionGroup.json`; what is None stays as it is.

        A retry topic that exists keeps the number of its queues; `alter_topic` changes it.

        Parameters
        ----------
        group : str
        retry_max_times, retry_queue_nums, consume_enable
            As for `create_group`.

        Returns
        -------
        SubscriptionGroupConfig
            The settings as they are now.

        Raises
        ------
        ConfigError
            The group has no settings in the store, or a value is not allowed.
        CorruptionError
            The file is damaged; it is left unchanged.

        Examples
        --------
        >>> from messagestore import MessageStore
        >>> with MessageStore.open("store") as store:
        ...     _ = store.create_group("boards")
        ...     store.alter_group("boards", consume_enable=False).consume_enable
        False
        """
        with self._puts.configuring():
            groups = self._puts.groups()
            altered = groups.alter(
                arguments.text("group", group),
                retry_max_times=retry_max_times,
                retry_queue_nums=retry_queue_nums,
                consume_enable=consume_enable,
            )
            groups.save_or_drop()
            return altered

    def group_config(self, group: str) -> SubscriptionGroupConfig | None:
        """The settings of a consumer group in `config/subscriptionGroup.json`, read now; None if it has none.

        Raises
        ------
        CorruptionError
            The file cannot be read.
        """
        return self._puts.groups().get(arguments.text("group", group))

    def alter_config(self, **changes: int) -> StoreConfig:
        """Change settings of the open store, for all sessions of this process; the next put follows them.

        Parameters
        ----------
        **changes
            `max_message_size`, `max_msgs_num_batch`, `put_in_flight_size` or `sync_flush_timeout`.

        Returns
        -------
        StoreConfig
            All settings as they are now.

        Raises
        ------
        ConfigError
            The setting is another one, or the value is not allowed. Nothing was changed.

        Examples
        --------
        >>> from messagestore import MessageStore
        >>> with MessageStore.open("store") as store:
        ...     store.alter_config(max_message_size=1024).max_message_size
        1024
        """
        _ = self.writer  # raises an error if the store is closed
        for name, value in changes.items():
            if name not in CHANGEABLE:
                fault = f"{name}: found a setting that cannot be changed while the store is open"
                raise ConfigError(f"{fault}; allowed are {', '.join(CHANGEABLE)}", key=name, value=value)
        return self._attached.alter(**changes)

    # ---- puts

    def put_message(self, message: Message) -> PutMessageResult:
        """Append one message.

        With SYNC_FLUSH the message is on the disk and visible to readers when this call returns; if the disk has just
        become full, it is visible when there is room again. With ASYNC_FLUSH it is visible to other processes a moment
        later, and on the disk after about `flushIntervalCommitLog` milliseconds. With `transientStorePoolEnable` it is
        in the memory of this process first, which the result says (`committed`).

        Parameters
        ----------
        message : Message
            If its `queue_id` is None, the hash of the first key chooses the queue; messages without keys go to the
            queues in turn. A topic that does not exist is created with 8 queues. With a `delay_time_level`, the message
            waits in SCHEDULE_TOPIC_XXXX until it is due, and has a UNIQ_KEY; other messages get one with the setting
            `stampUniqKey`. A message to a retry topic `%RETRY%group` whose `reconsume_times` exceed the group's
            `retryMaxTimes` goes to the dead-letter topic `%DLQ%group` instead, as by a broker.

        Returns
        -------
        PutMessageResult
            Where the message is (a delayed one: where it waits). The status `FLUSH_DISK_TIMEOUT` means: it is stored,
            but its sync takes longer than `syncFlushTimeout` milliseconds.

        Raises
        ------
        MessageIllegalError
            The message cannot be stored. Nothing was written.
        StoreFullError
            The disk is full. Nothing was written, and the store can still be used.
        StorePoisonedError
            A sync failed, now or earlier.
        StoreLockedError
            A broker has been started on this store.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     result = store.put_message(Message("flights", b"JFK to MIA", queue_id=2, tags="AA"))
        ...     result.is_ok, result.queue_id, result.queue_offset
        (True, 2, 0)
        """
        return self._puts.put_message(message)

    def put_message_async(self, message: Message) -> Future[PutMessageResult]:
        """Append one message, and return at once with a Future of the result (RocketMQ's asyncPutMessage).

        The message is appended when this returns, in the order of the calls. The Future completes when `put_message`
        would return: with SYNC_FLUSH when the message is on the disk and visible, together with all others that share
        the sync. Thousands may be in flight. If `putInFlightSize` bytes are, this call waits until some of them are
        synced.

        Parameters
        ----------
        message : Message
            As for `put_message`.

        Returns
        -------
        Future of PutMessageResult
            It never raises from this call: the Future has every error that `put_message` raises, with RocketMQ's
            statuses. It cannot be cancelled. A function that is given to `add_done_callback` runs in a thread of the
            store, which completes all Futures, so it must be short and must not wait for another Future. It may put
            messages and close the store.
            When the store is closed, all Futures complete.

        Raises
        ------
        KeyboardInterrupt
            While the call waits. Whether the message was appended is then unknown.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     futures = [store.put_message_async(Message("gates", b"B%d" % n, queue_id=0)) for n in range(100)]
        ...     results = [future.result() for future in futures]
        >>> results[-1].status.name, results[-1].queue_offset
        ('PUT_OK', 99)
        """
        return self._puts.put_message_async(message)

    def put_message_oneway(self, message: Message) -> None:
        """Append one message, without waiting for its sync and without a result.

        No failure is raised: `oneway_counts` says how the one-way puts ended. Use it for messages that may be lost.

        Parameters
        ----------
        message : Message
            As for `put_message`.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     store.put_message_oneway(Message("gates", b"B12"))
        ...     store.put_message_oneway(Message("no blanks, please", b"B12"))
        >>> sorted((status.name, count) for status, count in store.oneway_counts().items())
        [('MESSAGE_ILLEGAL', 1), ('PUT_OK', 1)]
        """
        self._puts.put_message_oneway(message)

    def oneway_counts(self) -> dict[PutMessageStatus, int]:
        """How many one-way puts of this process ended with each status. Those in flight are counted when they end."""
        return self._attached.statistics.oneway_counts()

    def stats(self) -> StoreStats:
        """What this process has put into the store and read from it, and how far dispatch and syncs are behind.

        The counts are those of all sessions of the process, also after `close`. A program that wants rates calls this
        twice. Counting takes no lock that a put could wait for.

        Returns
        -------
        StoreStats
        """
        writer = self._attached.writer
        if writer is None:
            return self._statistics.stats(disk_used={})
        files = writer.files
        visible, synced = writer.state.visible_end, writer.synced_end  # before the end, which only grows
        end, committed = writer.end.physical_offset, writer.pool_drain.end
        folders = {"commitlog": files.paths.commit_log, "consumequeue": files.paths.consume_queue}
        disk_used = {name: files.disk.used_percent(path) for name, path in folders.items() if files.disk.exists(path)}
        return self._statistics.stats(
            dispatch_behind=max(0, committed - visible),
            flush_behind=max(0, committed - synced),
            pool_behind=max(0, end - committed),
            disk_used=disk_used,
        )

    def put_messages(self, batch: MessageBatch) -> PutMessageResult:
        """Append messages for one topic and queue, side by side in one segment and with one store time.

        If the process is killed, all messages of the batch are in the log, or none. A power cut before this call
        returns may leave the first messages without the others, as in RocketMQ; `append_batch` prevents that, too.
        Durability and visibility are those of `put_message`.

        Parameters
        ----------
        batch : MessageBatch

        Returns
        -------
        PutMessageResult
            `physical_offset`, `queue_offset` and `queue_id` are those of the first message; `message_id` joins the ids
            of all messages with commas.

        Raises
        ------
        MessageIllegalError
            A message cannot be stored, or the records have more than `maxMessageSize` bytes. Nothing was written.
        StoreFullError, StorePoisonedError, StoreLockedError
            As for `put_message`.
        """
        return self._puts.put_messages(batch)

    def put_messages_async(self, batch: MessageBatch) -> Future[PutMessageResult]:
        """Append a batch as `put_messages` does, and return at once with a Future, as `put_message_async` does."""
        return self._puts.put_messages_async(batch)

    def put_messages_oneway(self, batch: MessageBatch) -> None:
        """Append a batch as `put_messages` does, without a result, as `put_message_oneway` does; it counts as one."""
        self._puts.put_messages_oneway(batch)

    def add_arriving_listener(self, listener: Listener) -> LogFollower:
        """Call a function for each message that arrives from now on, in the order of the log.

        A thread of its own calls it, after the message is visible. So it can neither delay nor fail a put: while it is
        slow it falls behind, and what it raises is logged. Retention does not wait for it: what is deleted before it
        was called for is left out, and a warning says so. `close` waits until it has got everything, but not for longer
        than 30 seconds. A listener that puts messages has to expect `StoreClosedError` meanwhile.

        Parameters
        ----------
        listener : callable
            Called with topic, queue id, queue offset, tags code, store time in milliseconds, and a dict of all
            properties, those of RocketMQ (KEYS, TAGS) included. RocketMQ's listeners get the offset after the message
            instead of the message's own. Half messages and rollbacks are in no queue, so it is not called for them.

        Returns
        -------
        LogFollower
            Its `close` removes the listener.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     _ = store.add_arriving_listener(lambda *arrived: print(*arrived[:3], arrived[5]))
        ...     _ = store.put_message(Message("landings", b"UA1545", queue_id=0, tags="UA"))
        landings 0 0 {'TAGS': 'UA'}
        """
        arguments.function("listener", listener)
        return self._start_follower(lambda *place: follow_messages(*place, listener=listener))

    def add_dispatcher(
        self,
        dispatch: Callable[[pa.RecordBatch], None],
        columns: Sequence[str] = ("topic", "queue_id", "queue_offset", "physical_offset", "size", "store_timestamp_ms"),
    ) -> LogFollower:
        """Hand every record that is appended from now on to a function, as Arrow batches in the order of the log.

        It comes after queue and index (RocketMQ: CommitLogDispatcher), in a thread of its own, as a listener does.

        Parameters
        ----------
        dispatch : callable
            Called with one batch after the other. It gets all records, those without a unit included: half messages,
            rollbacks (`sys_flag` says so) and the store's own.
        columns : sequence of str
            The columns to decode, as in `get_batch`.

        Returns
        -------
        LogFollower
            Its `close` removes the dispatcher; its `position` says how far the log was handed over.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     _ = store.add_dispatcher(lambda batch: print(batch.to_pylist()), columns=["topic", "body"])
        ...     _ = store.put_message(Message("takeoffs", b"UA1545", queue_id=0))
        [{'topic': 'takeoffs', 'body': b'UA1545'}]
        """
        arguments.function("dispatch", dispatch)
        names = arguments.names("columns", columns, COLUMNS)
        return self._start_follower(lambda *place: LogFollower(*place, columns=names, dispatch=dispatch))

    def _start_follower(self, follow: Callable[[str, StoreConfig, Disk, int], LogFollower]) -> LogFollower:
        self.writer.check_usable()
        self.view.refresh()
        attached = self._attached
        follower = follow(attached.paths.root, attached.config, attached.disk, self.view.known_end or 0)
        self._followers.append(follower)
        return follower

    # ---- half messages

    def half_message(
        self, message: Message, producer_group: str, *, check_immunity_s: int | None = None
    ) -> HalfMessage:
        """Prepare a message: it is stored, and nobody who reads its topic sees it before it is committed.

        Use it to send a message exactly if a change somewhere else happens, such as in a database: prepare the message,
        make the change, and commit the message; or roll it back. If the program dies in between, the half message stays
        open, and `check_halves` finds out later whether the change has happened. These are RocketMQ's transactions. A
        broker that takes the store over goes on with them: it asks a live producer of the group, every half minute, and
        discards a half message after `transactionCheckMax` checks (15).

        This is not Spark's exactly-once: see `append_batch`.

        Parameters
        ----------
        message : Message
            As for `put_message`.
        producer_group : str
            The group of producers that knows whether the change has happened. A broker asks it.
        check_immunity_s : int | None
            For how many seconds after it was made the half message is not checked. None: `transactionTimeOut`, 6
            seconds.

        Returns
        -------
        HalfMessage
            The half message, which is as durable as `put_message` makes a message. Commit it or roll it back; or use it
            in a `with` statement, which commits it at its end.

        Raises
        ------
        ConfigError
            `rejectTransactionMessage` is true, or the time is not a whole number.
        MessageIllegalError
            The message or the group cannot be stored. Nothing was written.
        StoreFullError, StorePoisonedError, StoreLockedError
            As for `put_message`. With `transientStorePoolEnable`, a `StoreFullError` may say that the half message is
            in the memory of this process, with its message id: it is open when there is room, and must not be prepared
            again.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     half = store.half_message(Message("orders", b"44 is paid", queue_id=0), "payments")
        ...     half.commit().queue_offset
        0
        """
        arguments.instance("message", message, Message)
        return self._half_messages.prepare(message, producer_group, check_immunity_s)

    def find_half(self, message_id: str) -> HalfMessage:
        """Find a half message again, to commit it or to roll it back.

        Parameters
        ----------
        message_id : str
            Its message id, also one from before it was put back for a check, or its UNIQ_KEY (`transaction_id`).

        Raises
        ------
        HalfMessageEndedError
            The store has no such half message.
        MessageIllegalError
            Several open half messages have this UNIQ_KEY, because a producer has sent one message several times.
        StoreFullError
            Earlier puts are to be published first, and the disk has no room for that.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     message_id = store.half_message(Message("orders", b"45 is paid"), "payments").message_id
        >>> with MessageStore.open("store") as store:
        ...     store.find_half(message_id).rollback()
        """
        return self._half_messages.find(message_id)

    def open_halves(self) -> list[OpenHalf]:
        """The half messages that have neither been committed nor rolled back, the oldest first."""
        return self._half_messages.open_halves()

    def check_halves(self, check: Check) -> CheckReport:
        """Ask about the half messages whose producers have not said how they end: one round of checks.

        A half message is due `transactionTimeOut` milliseconds after it was made. It is put back into its queue with
        one more check (a broker sees the same), and then handed to `check`. One that was checked `transactionCheckMax`
        times, or that is older than `fileReservedTime`, is moved to the topic `TRANS_CHECK_MAX_TIME_TOPIC` instead.
        Call this again and again, as a broker does, or let a thread do it (`start_checking_halves`).

        Parameters
        ----------
        check : callable
            It gets the message as a `MessageExt`, with its own topic and queue, and returns a
            `LocalTransactionState`: COMMIT_MESSAGE, ROLLBACK_MESSAGE, or UNKNOW to be asked again. The producer's group
            is in `system_properties["PGROUP"]`. No lock is held while it runs. If it raises, the half message stays
            open, and the report has the exception.

        Returns
        -------
        CheckReport

        Raises
        ------
        ConfigError
            `check` cannot be called.
        StoreFullError, StorePoisonedError, StoreLockedError
            As for `put_message`. What the report would have counted is in the log.

        Examples
        --------
        >>> from messagestore import LocalTransactionState, Message, MessageStore, StoreConfig
        >>> def was_paid(message):
        ...     return LocalTransactionState.COMMIT_MESSAGE if b"46" in message.body else LocalTransactionState.UNKNOW
        >>> with MessageStore.open("store", StoreConfig(transaction_time_out=0)) as store:
        ...     half = store.half_message(Message("orders", b"46 is paid", born_timestamp_ms=0), "payments")
        ...     report = store.check_halves(was_paid)
        ...     report.checked, report.committed, report.open
        (1, 1, 0)
        """
        return self._half_checks.check(check)

    def start_checking_halves(self, check: Check) -> None:
        """Do what `check_halves` does in a thread of its own, every `transactionCheckInterval` milliseconds.

        The thread ends when the session is closed, which waits for a check that is running, but not for longer than 30
        seconds. What fails is logged, and is tried again in the next round. A second call replaces the check.

        Parameters
        ----------
        check : callable
            As for `check_halves`.

        Examples
        --------
        >>> from messagestore import LocalTransactionState, Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     store.start_checking_halves(lambda message: LocalTransactionState.UNKNOW)
        """
        self._half_checks.start(check)

    # ---- batches

    def start_batches(self, app_id: str, version: int) -> BatchResult:
        """Let an app continue with a version, although the versions below it are not in this store.

        Use it for a sink that is added to a running query, or after batches were lost for good. It appends an empty
        BATCH record, so it is remembered as long as the log is.

        Parameters
        ----------
        app_id : str
        version : int
            The version of the app's next batch: at least 1, and above those that are in the store. An app that begins
            with version 0 needs no start.

        Raises
        ------
        ConfigError
            The version is no whole number, or is 0 or less.
        MessageIllegalError
            The app id is not allowed.
        VersionRegressionError
            The store holds a batch of the app with this version or a later one.

        Examples
        --------
        >>> from messagestore import MessageStore
        >>> with MessageStore.open("store") as store:
        ...     store.start_batches("audit", 17).status
        'appended'
        """
        check_app_id(app_id)
        version = arguments.whole_number("start version", version, 1, (1 << 63) - 1)  # apps begin with 0 by themselves
        request = BatchRequest(app_id=app_id, version=version - 1, version_source=SOURCE_SPARK, start=True)
        return append_batch(self.writer, Chunks(), request)

    def last_batch(self, app_id: str) -> StoredBatch | None:
        """Return an app's last batch, with the origin that it was appended with; None if the store has none.

        A program that copies rows from elsewhere is exactly-once with it: it gives each batch the next version, and the
        place after its rows as `origin`. When it starts, it continues at the origin of the last batch.

        Parameters
        ----------
        app_id : str

        Raises
        ------
        MessageIllegalError
            The app id is not allowed.
        LostBatchesError
            Retention has deleted the batch's own record, so its origin is gone.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from messagestore import BatchRequest, MessageColumns, MessageStore
        >>> lines = ["B12", "C3", "D7"]
        >>> def copy_next_line(store):
        ...     last = store.last_batch("copy")
        ...     version, line = (0, 0) if last is None else (last.version + 1, last.origin["line"])
        ...     rows = MessageColumns.from_arrow(
        ...         pa.record_batch({"body": lines[line : line + 1]}), topic="gates", queue_id=0
        ...     )
        ...     store.append_batch(rows, BatchRequest(app_id="copy", version=version, origin={"line": line + 1}))
        >>> with MessageStore.open("store") as store:
        ...     copy_next_line(store)
        >>> with MessageStore.open("store") as store:  # after whatever happened
        ...     copy_next_line(store)
        ...     store.last_batch("copy").version, store.last_batch("copy").origin
        (1, {'line': 2})
        """
        return last_batch(self.writer, app_id)

    def append_batch(
        self,
        columns: MessageColumns | pa.RecordBatch | pa.Table | ArrowStream | Iterable[Any],
        request: BatchRequest | None = None,
        *,
        topic: str | None = None,
        queue_id: int | None = None,
        progress: ProgressToMove | Mapping[str, Mapping[tuple[str, int], int]] | None = None,
    ) -> BatchResult:
        """Append messages for any topics and queues as one batch, which is in the log completely or not at all.

        This holds whatever is killed and when. Readers see the whole batch from the moment at which this call returns,
        and no part of it before. Within a queue, the messages keep the order of the rows.

        Parameters
        ----------
        columns : MessageColumns, pa.RecordBatch, pa.Table, ArrowStream, or iterable of these
            The messages. An `ArrowStream` is a frame of another library that has `__arrow_c_stream__`, such as pandas
            or Polars. Columns of a frame are taken by their names, as in `MessageColumns.from_arrow`: `body`, `topic`,
            `queue_id`, and others. Rows without a queue get one: by the hash of `sharding_key`, else of the first key,
            else the queues take turns. All parts are held in memory, encoded, until the batch is appended.
        request : BatchRequest | None
            An `app_id` and a `version` make the batch exactly-once: if it is appended a second time, the store
            recognises it and writes nothing. None: a batch that nothing recognises.
        topic, queue_id : str | None, int | None
            One topic, or one queue, for all rows of all frames; it takes precedence over a column. `MessageColumns`
            have their own, so these must be None then.
        progress : Positions, dict of group to dict of (topic, queue id) to int, or None
            What this batch is the result of: `Consumer.positions()`, or the next offsets of consumer groups. Results
            and progress count from the same moment, so a program that reads and appends in this way does each message
            exactly once, whatever is killed. The batch is then synced, whatever `flushDiskType` says. If the batch is
            already known, it has moved the progress before, and nothing is moved.

        Returns
        -------
        BatchResult
            Whether the batch was appended or already known, and where it is.

        Raises
        ------
        MessageIllegalError
            A message, topic or queue id is not allowed, or a column of a frame is unknown, is missing, or has a type
            that cannot be stored. Nothing was written.
        ConfigError
            An argument is none of what is allowed. Nothing was written.
        BatchConflictError, QueryConflictError
            The store holds this batch with other rows, or the app's batches are another query's. Nothing was written.
        VersionRegressionError, LostBatchesError
            The version is too low, or batches before it are missing. Nothing was written.
        ProgressConflictError
            The group of `progress` is elsewhere than where its consumer began. Nothing was written.
        OffsetOutOfRangeError
            `progress` would move a group behind the end of a queue. Nothing was written.
        StoreLockedError
            A worker of the group has a queue of `progress`, and it is not the one that gives it. Nothing was written.
        StoreFullError
            The disk is full. Nothing of the batch is in the log.
        StorePoisonedError
            A sync failed. Whether the batch is in the log is decided when the store is opened next; append it again
            then, with the same `app_id` and `version`.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from messagestore import BatchRequest, MessageStore
        >>> gates = pa.table({"body": ["B12", "C3"], "topic": ["gates", "gates"], "queue_id": [0, 1]})
        >>> with MessageStore.open("store") as store:
        ...     first = store.append_batch(gates, BatchRequest(app_id="gates-of-the-day", version=0))
        ...     again = store.append_batch(gates, BatchRequest(app_id="gates-of-the-day", version=0))
        ...     first.status, again.status, store.max_offset("gates", 0)
        ('appended', 'known', 1)
        """
        writer = self.writer
        parts = columns_of(columns, topic, queue_id)
        if progress is None or isinstance(progress, ProgressToMove):
            to_move = progress
        else:
            to_move = ClaimedProgress(writer.files.paths.root, writer.files.disk, progress)

        if request is not None:
            arguments.instance("request", request, BatchRequest)
        elif progress is None:
            request = BatchRequest(flush_disk_type=writer.files.config.flush_disk_type)
        else:
            request = BatchRequest()

        chunks = encoded(writer.files, parts, born_host=self._puts.born_host, new_queue_nums=request.write_queue_nums)
        return append_batch(writer, chunks, request, progress=to_move)

    def send_back(
        self, message: MessageExt, group: str, delay_level: int | None = None, *, reason: str | None = None
    ) -> PutMessageResult:
        """Send back a message that a consumer could not process, as a RocketMQ consumer does, so that it comes again.

        The message waits at delay level 3 + its `reconsume_times`, and is then delivered to the group's retry topic
        `%RETRY%group`, which RocketMQ's consumers read as well, with `reconsume_times` one higher. RETRY_TOPIC names
        its first topic, and ORIGIN_MESSAGE_ID its first offset message id. After the group's `retryMaxTimes`
        (`config/subscriptionGroup.json`; 16 by default), it goes to the dead-letter topic `%DLQ%group` at once.

        Parameters
        ----------
        message : MessageExt
            A message that was read from this store.
        group : str
            The consumer group.
        delay_level : int | None
            Another level to wait at. None or 0: the usual one. Below 0: to the dead-letter topic at once.
        reason : str | None
            Why it could not be processed: the user's property DEAD_LETTER_REASON of a message that goes to the
            dead-letter topic.

        Returns
        -------
        PutMessageResult
            Where the message waits, or is among the dead letters.

        Raises
        ------
        MessageIllegalError
            The group's name is not legal, the level is no whole number, or the store has no such message. Nothing was
            written.
        ConfigError
            The group has no retry queues (`retryQueueNums`); RocketMQ would drop the message.
        StoreFullError, StorePoisonedError, StoreLockedError
            As for `put_message`.

        Examples
        --------
        >>> from messagestore import Message, MessageStore
        >>> with MessageStore.open("store") as store:
        ...     _ = store.put_message(Message("gates", b"B12", queue_id=0))
        ...     message = store.get_message("gates", 0, 0).messages[0]
        ...     waits = store.send_back(message, "boards")
        ...     dead = store.send_back(message, "boards", delay_level=-1)
        ...     waits.queue_id, store.topics()["%DLQ%boards"]
        (2, [0])
        """
        arguments.instance("message", message, MessageExt)
        check_retrying_group(group)
        if delay_level is not None and (type(delay_level) is not int or not -(1 << 31) <= delay_level < 1 << 31):
            text = f"delay level: found {delay_level!r}; allowed is None, or a whole number"
            raise MessageIllegalError(text, field="delay_time_level")

        stored = self.look_message_by_offset(message.physical_offset)
        if stored is None or (stored.topic, stored.queue_id, stored.body) != (
            message.topic,
            message.queue_id,
            message.body,
        ):
            raise MessageIllegalError(
                f"message: found no such message at physical offset {message.physical_offset} of this store. Send back "
                "messages that were read from it",
                field="message",
            )

        settings = self.group_config(group) or SubscriptionGroupConfig(group)
        again, queue_nums, kept = retries.sent_back(stored, settings, delay_level, reason)
        assert queue_nums is not None

        topic_config = self.create_topic(again.topic, queue_nums)
        again = replace(again, queue_id=random.randrange(max(1, min(queue_nums, topic_config.write_queue_nums))))
        unique_key = stored.unique_key or new_unique_key(self.writer.files.disk.time_ns() // 1_000_000)
        return self._puts.put_again(again, unique_key, kept)

    def deliver_delayed(self) -> Delivered:
        """Deliver delayed messages that are due to their topics and queues, as one batch.

        Each message is delivered once, whatever is killed and when, as long as only this project delivers. A call
        delivers at most 16,384 messages; call it until its `count` is 0, and again at `next_due_ms` or a second later.
        `messagestore.deliver_delayed` does the same in turns with other writers.

        Returns
        -------
        Delivered

        Raises
        ------
        CorruptionError
            A message that is due is damaged. It stays, and holds back those behind it in its level.
        StoreFullError
            The disk is full. Nothing was delivered.
        StorePoisonedError
            A sync failed. Whether the messages were delivered is decided when the store is opened next.

        Examples
        --------
        >>> import time
        >>> from messagestore import Message, MessageStore, StoreConfig
        >>> with MessageStore.open("store", StoreConfig(message_delay_level="1s 5s")) as store:
        ...     _ = store.put_message(Message("gates", b"B12", queue_id=0, delay_time_level=1))
        ...     time.sleep(1.1)
        ...     store.deliver_delayed().count, store.get_message("gates", 0, 0).messages[0].body
        (1, b'B12')
        """
        writer, services = self.writer, self._attached.services
        writer.check_usable()
        if services is None:
            raise StoreClosedError("the store is closed. Open it again")
        self._publish_own()
        return services.delivery.deliver()

    def flush(self) -> None:
        """Wait until everything that was put so far is on the disk and visible to readers.

        Raises
        ------
        StorePoisonedError
            A sync failed, now or earlier.
        """
        self._puts.wait_for(self.writer.end.physical_offset, 3600.0)
        self.writer.check_dispatched()

    def close(self) -> None:
        """Sync and publish what is pending, mark the store as closed, and let other writers in.

        A second call does nothing. After a clean close, the next writer or broker has nothing to recover. While another
        session of this process is open, puts that wait (ASYNC_FLUSH, TransientStorePool) stay with that session.

        Raises
        ------
        StoreFullError
            The disk has no room. If only the TransientStorePool has some of the puts, the store stays open: make room
            and call `close` again. All other puts are synced, and become visible when the store is opened again.
        StorePoisonedError
            A sync failed in the background, or a put was interrupted, and no call has reported it yet. Messages that
            were put with ASYNC_FLUSH may be missing.
        """
        session = self._session
        if session is None:
            return
        failed: StoreError | None = None
        try:
            self._attached.empty_pool(session)
        except StoreFullError:
            raise  # nothing is given up yet
        except StoreError as error:
            failed = error  # it is raised when the store is closed
        if self._closed:
            return  # another thread has closed it meanwhile
        self._closed, self._session = True, None

        try:
            writer = self._puts.close()
            for part in ("_half_checks", "_half_messages"):  # those that were used
                if part in self.__dict__:
                    getattr(self, part).close()
            super().close()
        finally:
            flush = self._attached.flush
            self._attached.close_session(session)
        if flush is not None and flush is not self._attached.flush:
            flush.promised.join()

        followers, self._followers = self._followers, []
        for follower in followers:
            if writer.health is Health.SOUND:
                follower.finish(writer.end.physical_offset)
            else:
                follower.close()

        if failed is not None:
            raise failed
        if writer.health is Health.POISONED:
            writer.check_usable()

    def __del__(self) -> None:
        """Let other writers in if the session was never closed, and warn, as Python does for a file."""
        session = None if getattr(self, "_closed", True) else self._session
        if session is None or session.writer is not self._attached.writer or session.writer.pid != os.getpid():
            return  # it is closed, for a broker or at the end of the process, or it is the parent's
        warnings.warn(
            f"{self._attached.paths.root}: a MessageStore was dropped and not closed, so no other process could write. "
            "Close it, or use it in a with statement",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )
        work = partial(_close_dropped, self._attached, session, self._followers)
        with suppress(RuntimeError):  # the interpreter ends, and closes the store in any case
            threading.Thread(target=work, name="messagestore-close", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StoreError as failed:
            if error is None:
                raise
            error.add_note(f"{failed}")  # the caller's own exception goes on: Ctrl-C, or a put that was refused


def _close_dropped(attached: AttachedStore, session: Session, followers: list[LogFollower]) -> None:
    """Close the session of a store that was dropped.

    A thread of its own does this: the one in which Python dropped the store may hold any lock, and may be at any place
    in an append.
    """
    for follower in followers:
        follower.close()
    try:
        attached.close_session(session)
    except (StoreError, OSError) as error:
        _log.warning("%s: a store that was dropped could not be closed: %s", attached.paths.root, error)


def deliver_delayed(
    root: str | os.PathLike[str],
    config: StoreConfig | None = None,
    *,
    timeout_s: float | None = None,
    disk: Disk | None = None,
) -> Delivered:
    """Deliver delayed messages that are due, in a store that other processes write to in turns.

    The call holds the store for one batch, as the commit of a Spark query does. Several processes may deliver: each
    message is delivered once. `messagestore deliver` calls this in a loop.

    Parameters
    ----------
    root : path
        The store's root folder.
    config : StoreConfig | None
        The settings; None: the defaults, or those of the sessions that this process has open.
    timeout_s : float | None
        How long to wait for another writer; None: the setting `lockTimeout`.
    disk : Disk | None
        For tests.

    Returns
    -------
    Delivered

    Raises
    ------
    StoreLockedError
        A broker, which delivers by itself, or another writer holds the store.
    CorruptionError, StoreFullError, StorePoisonedError
        As for `MessageStore.deliver_delayed`.

    Examples
    --------
    >>> from messagestore import Message, MessageStore, deliver_delayed
    >>> with MessageStore.open("store") as store:
    ...     _ = store.put_message(Message("gates", b"B12", queue_id=0, delay_time_level=3))
    >>> deliver_delayed("store").count
    0
    """
    store = attached_store(arguments.path("root", root), _settings(config), disk)
    with store.writing("delivering delayed messages", timeout_s, config=store.settings(config)):
        assert store.services is not None
        return store.services.delivery.deliver()


def delete_expired_files(
    root: str | os.PathLike[str],
    config: StoreConfig | None = None,
    *,
    reserved_hours: float | None = None,
    before_ms: int | None = None,
    before_offset: int | None = None,
    ignored_groups: Collection[str] = (),
    at_once: bool = False,
    timeout_s: float | None = None,
    disk: Disk | None = None,
) -> ExpiredFiles:
    """Delete the oldest segments of a store that other processes write to in turns, as the method of that name does.

    `messagestore gc --delete` calls this. Unlike a session, the call deletes what was asked for, and nothing else.

    Parameters
    ----------
    root : path
        The store's root folder.
    config : StoreConfig | None
        The settings; None: the store's own, or those of the sessions that this process has open.
    reserved_hours, before_ms, before_offset, ignored_groups, at_once
        As for `MessageStore.delete_expired_files`.
    timeout_s : float | None
        How long to wait for another writer; None: the setting `lockTimeout`.
    disk : Disk | None
        For tests.

    Returns
    -------
    ExpiredFiles

    Raises
    ------
    StoreLockedError
        A broker or another writer holds the store.
    ConfigError, CorruptionError, StorePoisonedError
        As for `MessageStore.delete_expired_files`.

    Examples
    --------
    >>> from messagestore import MessageStore, delete_expired_files
    >>> MessageStore.open("store").close()
    >>> delete_expired_files("store", reserved_hours=24).segments
    ()
    """
    store = attached_store(arguments.path("root", root), _settings(config), disk)
    with store.writing("deleting expired files", timeout_s, config=store.settings(config)):
        expiry = asked_for(
            store.config,
            store.disk.time_ns() // 1_000_000,
            reserved_hours=reserved_hours,
            before_ms=before_ms,
            before_offset=before_offset,
            ignored_groups=ignored_groups,
            at_once=at_once,
        )
        assert store.services is not None
        return store.services.retention.run(expiry)


def run_retention(
    root: str | os.PathLike[str],
    config: StoreConfig | None = None,
    *,
    timeout_s: float | None = None,
    disk: Disk | None = None,
) -> ExpiredFiles | None:
    """Delete what the store's own settings let expire, in a store that other processes write to in turns.

    It deletes what a session would have deleted by now: segments older than `fileReservedTime` hours after the hour
    `deleteWhen`, and older ones at any hour from a disk that is getting full. Call it every `cleanResourceInterval`
    milliseconds; a call that comes earlier does nothing. The call holds the store for a second or two at most, and the
    next one continues. `messagestore run` calls this in a loop.

    Parameters
    ----------
    root : path
        The store's root folder.
    config : StoreConfig | None
        The settings; None: the store's own, or those of the sessions that this process has open.
    timeout_s : float | None
        How long to wait for another writer; None: the setting `lockTimeout`.
    disk : Disk | None
        For tests.

    Returns
    -------
    ExpiredFiles | None
        None: `fileReservedTime` is not set, so nothing expires, or it is too early to look again.

    Raises
    ------
    StoreLockedError
        A broker or another writer holds the store.
    ConfigError, CorruptionError, StorePoisonedError
        As for `MessageStore.delete_expired_files`.

    Examples
    --------
    >>> from messagestore import MessageStore, StoreConfig, run_retention
    >>> MessageStore.open("store").close()
    >>> run_retention("store") is None
    True
    >>> run_retention("store", StoreConfig(file_reserved_time=168)).segments
    ()
    """
    store = attached_store(arguments.path("root", root), _settings(config), disk)
    with store.writing("deleting expired files", timeout_s, config=store.settings(config)):
        assert store.services is not None
        return store.services.retention.run_if_due(limit_s=_RETENTION_TURN_S)


def check_halves(
    root: str | os.PathLike[str],
    check: Check,
    config: StoreConfig | None = None,
    *,
    stopping: Callable[[], bool] = lambda: False,
    timeout_s: float | None = None,
    disk: Disk | None = None,
) -> CheckReport:
    """Ask how half messages end, in a store that other processes write to in turns: one round of checks.

    The call does what `MessageStore.check_halves` does, and does not hold the store while `check` runs. Several
    processes may check. Call it every `transactionCheckInterval` milliseconds. `messagestore run` calls this in a loop.

    Parameters
    ----------
    root : path
        The store's root folder.
    check : callable
        As for `MessageStore.check_halves`.
    config : StoreConfig | None
        The settings; None: the store's own, or those of the sessions that this process has open.
    stopping : callable
        Whether to end early. Half messages that were put back already are handed to `check` first: at most 100.
    timeout_s : float | None
        How long to wait for another writer, each time that the store is needed; None: the setting `lockTimeout`.
    disk : Disk | None
        For tests.

    Returns
    -------
    CheckReport

    Raises
    ------
    StoreLockedError
        A broker or another writer holds the store. Half messages that were asked about and not ended stay open, and
        are asked about in a later round.
    ConfigError, StoreFullError, StorePoisonedError
        As for `MessageStore.check_halves`.

    Examples
    --------
    >>> from messagestore import LocalTransactionState, Message, MessageStore, StoreConfig, check_halves
    >>> settings = StoreConfig(transaction_time_out=0)
    >>> with MessageStore.open("store", settings) as store:
    ...     half = store.half_message(Message("orders", b"46 is paid", born_timestamp_ms=0), "payments")
    >>> report = check_halves("store", lambda message: LocalTransactionState.COMMIT_MESSAGE, settings)
    >>> report.checked, report.committed, report.open
    (1, 1, 0)
    """
    store = attached_store(arguments.path("root", root), _settings(config), disk)

    @contextmanager
    def turn() -> Iterator[HalfMessages]:
        with store.writing("checking half messages", timeout_s, config=store.settings(config)) as writer:
            halves = HalfMessages(Puts(store, writer))
            try:
                yield halves
            finally:
                halves.close()

    return HalfChecks(turn).check(check, lambda pause_s: stopping())  # noqa: ARG005


def stored_config(root: str | os.PathLike[str], *, disk: Disk | None = None) -> StoreConfig:
    """The settings that live with a store, which count for every program that gives none.

    Parameters
    ----------
    root : path
        The store's root folder.
    disk : Disk | None
        For tests.

    Returns
    -------
    StoreConfig
        The settings in its `given` are the store's; all others are the defaults.

    Raises
    ------
    NotAStoreError
        There is no store.
    CorruptionError
        The file with the settings is damaged.

    Examples
    --------
    >>> from messagestore import MessageStore, alter_stored_config, stored_config
    >>> MessageStore.open("store").close()
    >>> _ = alter_stored_config("store", {"fileReservedTime": 168})
    >>> stored_config("store").file_reserved_time
    168
    """
    paths = Paths(arguments.path("root", root))
    disk = disk or Disk()
    _check_store(disk, paths)
    return read_settings(disk, paths.settings)


def alter_stored_config(
    root: str | os.PathLike[str],
    changes: Mapping[str, object],
    *,
    timeout_s: float | None = None,
    disk: Disk | None = None,
) -> StoreConfig:
    """Change the settings that live with a store, in turns with its writers.

    They count for every program that gives none, from the next time on that it opens the store; Spark's queries take
    them with their next batch. The settings are written whole or not at all, and are on the disk when this returns.
    `messagestore config ROOT set` and `unset` call this.

    Parameters
    ----------
    root : path
        The store's root folder.
    changes : mapping of str to object
        RocketMQ's keys, with values as in `StoreConfig.from_mapping`; None takes a setting away.
    timeout_s : float | None
        How long to wait for another writer; None: the setting `lockTimeout`.
    disk : Disk | None
        For tests.

    Returns
    -------
    StoreConfig
        As `stored_config` returns it.

    Raises
    ------
    NotAStoreError
        There is no store.
    ConfigError
        A key is no setting, or one that is fixed in a store, or a value is not allowed. Nothing was changed.
    StoreLockedError
        A broker or another writer holds the store. Nothing was changed.
    """
    path = arguments.path("root", root)
    attached = attached_store(path, None, disk)
    _check_store(attached.disk, attached.paths)
    stored_with(read_settings(attached.disk, attached.paths.settings), changes)  # before anybody has to wait
    return attached.alter_stored(changes, timeout_s)


def _check_store(disk: Disk, paths: Paths) -> None:
    if not looks_like_store(disk, paths):
        raise NotAStoreError(
            f"{paths.root}: found no message store (no commitlog folder). Give the store's root folder", path=paths.root
        )
