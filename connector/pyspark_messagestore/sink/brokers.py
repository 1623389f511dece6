"""The sink for running brokers: tasks send the rows of each micro-batch to the queues of a cluster.

    driver   plan: the topic is there, may be written, and the folder for look-ups is there
    tasks    Arrow batches -> messages with queues and keys -> what is stored already is left out -> requests
    driver   commit: what look-ups of earlier batches needed is deleted

A broker knows no batches: rows are visible as they are sent, and what a failed attempt has sent stays. So the sink is
at least once, with a look-up before a repeat. Before a task sends the first row to a topic, it writes into `lookupDir`
where the topic's queues end. A later attempt finds that file, reads the queues from there on, and leaves out the rows
whose UNIQ_KEYs it finds. The key says app, batch, partition and row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from messagestore import BatchConflictError, ConfigError, MessageIllegalError, StoreConfig
from messagestore.spi import (
    ColumnTexts,
    Location,
    Producer,
    SendQueue,
    Target,
    encode,
    is_ordinary_topic,
    keys_and_crcs,
    store_host_of,
)
from pyspark_messagestore.options.sink_options import SinkOptions
from pyspark_messagestore.sink.columns import Mapper, Mapping
from pyspark_messagestore.sink.unique_keys import UniqueKeys

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
_SUFFIX = ".json"


@dataclass
class SentMessage(WriterCommitMessage):
    """The commit message of one task. All values are plain.

    Parameters
    ----------
    query_id, batch_id : str | None
        As the task received them from Spark.
    rows : int
        How many rows the brokers have, with those that an earlier attempt had sent.
    repeated : int
        How many of these an earlier attempt had sent.
    unconfirmed : int
        How many rows brokers stored without waiting for their disk or their slave to the end.
    """

    query_id: str | None
    batch_id: str | None
    rows: int
    repeated: int
    unconfirmed: int


@dataclass(frozen=True)
class BrokerSink:
    """The part that tasks, commit and abort share. It is small, since it is pickled into every task.

    Parameters
    ----------
    options : SinkOptions
    mapping : Mapping
    lookup_dir : str
        The folder for look-ups; empty: there is none, since nothing but this job can repeat the batch.
    write_id : str
        An id that no other planned write has. By it, a batch without an app id is recognised.
    """

    options: SinkOptions
    mapping: Mapping
    lookup_dir: str = ""
    write_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def plan(cls, options: SinkOptions, mapping: Mapping, checkpoint: str | None, *, streaming: bool) -> BrokerSink:
        """Plan a write, on the driver.

        Parameters
        ----------
        checkpoint : str | None
            The option `checkpointLocation`.

        Raises
        ------
        UnknownTopicError
            No broker has the topic.
        BrokerError
            A broker refuses: the client lacks a right.
        ConfigError
            There is no folder for look-ups, or a queue id does not say which broker is meant.
        """
        folder = _lookup_dir(options, checkpoint, streaming=streaming)
        sink = cls(options, mapping, folder)
        if folder:
            os.makedirs(folder, exist_ok=True)
        if options.topic is not None:
            with contextlib.closing(sink._producer()) as producer:
                sink.checked_target(producer, options.topic, rights=True)
        return sink

    def _producer(self) -> Producer:
        options = self.options
        return Producer(
            options.location,
            options.producer_group or "messagestore",
            accepts_unconfirmed=options.on_unconfirmed != "fail",
        )

    def checked_target(self, producer: Producer, topic: str, *, rights: bool) -> Target:
        """The queues for the rows of a topic, if they can have these rows; with `rights`, if the brokers allow it."""
        target = producer.target(topic)
        brokers = sorted({queue.broker for queue in target.queues})
        if len(brokers) > 1 and "queueId" in self.mapping.names and self.options.queue_selector == "auto":
            raise ConfigError(
                f"column queueId: found together with topic {topic}, which has queues with the same ids on the brokers "
                f"{', '.join(brokers)}. Drop the column, set queueSelector to keys or roundRobin, or write one broker, "
                f"as in {self.options.location.of_broker(brokers[0])}",
                key="queueId",
            )
        if rights:
            producer.check_rights(topic, target.queues)
        return target

    # ---- tasks

    def stage(self, batches: Iterator[pa.RecordBatch], *, streaming: bool = False) -> SentMessage:  # noqa: ARG002
        """Send the rows of one partition, in a task. Brokers have all of them when it returns."""
        context = TaskContext.get()
        assert context is not None
        query_id = context.getLocalProperty("sql.streaming.queryId")
        batch_id = context.getLocalProperty("streaming.sql.batchId")

        batch = self._batch(query_id, batch_id)
        with contextlib.closing(self._producer()) as producer:
            task = _Task(self, producer, batch, context.partitionId())
            task.send(batches)
            sent = producer.sent
            return SentMessage(query_id, batch_id, sent.rows + task.repeated, task.repeated, sent.unconfirmed)

    def _batch(self, query_id: str | None, batch_id: str | None) -> Batch:
        options = self.options
        app_id = options.txn_app_id or query_id
        version = options.txn_version
        if version is None and batch_id is not None:
            version = int(batch_id)
        if app_id is None or version is None:
            return Batch(self.write_id, 0)
        return Batch(app_id, version)

    # ---- the driver

    def commit(self, messages: list[WriterCommitMessage | None], batch_id: int | None) -> None:
        """Forget what look-ups of earlier batches needed. The rows are with the brokers already.

        Parameters
        ----------
        messages : list of SentMessage
        batch_id : int | None
            The stream's batch id; None: a batch write.
        """
        sent = [message for message in messages if isinstance(message, SentMessage)]
        unconfirmed = sum(message.unconfirmed for message in sent)
        if unconfirmed:
            _log.warning(
                "%s: brokers stored %d rows of this batch without waiting for their disk or their slave to the end "
                "(FLUSH_DISK_TIMEOUT, FLUSH_SLAVE_TIMEOUT or SLAVE_NOT_AVAILABLE)",
                self.options.path,
                unconfirmed,
            )
        repeated = sum(message.repeated for message in sent)
        if repeated:
            _log.info("%s: an earlier attempt had sent %d rows of this batch", self.options.path, repeated)

        if self.lookup_dir:
            query_id = next((message.query_id for message in sent if message.query_id), None)
            stream_batch = next((message.batch_id for message in sent if message.batch_id), None)
            stream_batch = stream_batch if batch_id is None else str(batch_id)
            batch = self._batch(query_id, stream_batch)
            # Spark may send this batch again until it has written its own commit, but no earlier one.
            Ends(self.lookup_dir, batch).forget(with_own=batch.app_id == self.write_id)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave what was sent: a broker deletes no message. A later attempt looks it up."""


@dataclass(frozen=True)
class Batch:
    """Which batch is sent: its app, and its number."""

    app_id: str
    version: int


class _Task:
    """The rows of one partition on their way to brokers."""

    def __init__(self, sink: BrokerSink, producer: Producer, batch: Batch, partition_id: int) -> None:
        options = sink.options
        self._sink, self._producer, self._partition_id = sink, producer, partition_id
        self._ends = Ends(sink.lookup_dir, batch)
        self._config = StoreConfig()
        if options.max_message_size is not None:
            self._config = self._config.replace(max_message_size=options.max_message_size)
        self._host = store_host_of(self._config)
        self._keys = UniqueKeys(batch.app_id, batch.version, partition_id)
        self._targets: dict[str, Target] = {}
        self._stored = keys_and_crcs(None)
        seed = f"{batch.version}/{partition_id}"
        self._mapper = Mapper(sink.mapping, options.topic, options.queue_selector, self._queue_count, seed, self._keys)
        self.repeated = 0

    def _queue_count(self, topic: str) -> int:
        """The number of a topic's queues, over all brokers. The first call for a topic gets ready to send to it."""
        if not is_ordinary_topic(topic):
            raise MessageIllegalError(
                f"topic: found {topic!r:.200}; allowed is a topic that is neither RocketMQ's own nor one of retries "
                f"or dead letters: their messages mean something to brokers and cannot be sent in batches",
                field="topic",
            )
        if topic not in self._targets:
            self._targets[topic] = self._opened(topic)
        return len(self._targets[topic].queues)

    def _opened(self, topic: str) -> Target:
        target = self._sink.checked_target(self._producer, topic, rights=self._sink.options.topic is None)
        if not self._sink.lookup_dir:
            return target
        earlier_ends = self._ends.of(topic, self._partition_id)
        if earlier_ends is None:
            earlier_ends = self._ends.write(topic, self._partition_id, target.places)
            if earlier_ends is None:
                return target

        # An earlier attempt was here. A queue that it did not know has nothing of it before its own beginning.
        places = dict.fromkeys(target.queues, 0) | earlier_ends
        places = {queue: max(place, self._producer.begin(topic, queue)) for queue, place in places.items()}
        stored = self._producer.stored(topic, places, self._keys.prefix)
        self._stored = pa.concat_tables([self._stored, stored]).combine_chunks()
        return target

    def send(self, batches: Iterator[pa.RecordBatch]) -> None:
        row = 0
        for batch in batches:
            try:
                messages = self._mapper.messages(batch, row)
                if messages.columns.delay_time_level is not None:
                    _check_delays(messages, row)
                rows = self._encoded(messages, row)
            except MessageIllegalError as error:
                raise _named(error, self._partition_id, row) from None

            if self._stored.num_rows:
                self._check_same(rows)
                is_left = pc.invert(pc.is_in(messages.columns.unique_key, value_set=self._stored_keys))
                left = messages.columns.of_rows(is_left.to_numpy(zero_copy_only=False))
                self.repeated += batch.num_rows - left.row_count
                rows = self._encoded(left, row) if left.row_count else None
            if rows is not None:
                self._producer.send(rows, self._targets)
            row += batch.num_rows

    @property
    def _stored_keys(self) -> pa.Array:
        return self._stored["unique_key"].combine_chunks()

    def _encoded(self, messages: Any, first_row: int) -> Any:
        return encode(
            messages,
            limits=self._config,
            store_host=self._host,
            born_host=self._host[:-4] + bytes(4),
            first_row=first_row,
            with_digest=False,
        )

    def _check_same(self, rows: Any) -> None:
        """Refuse a batch whose rows are not those that an earlier attempt has sent under the same numbers."""
        task_rows = keys_and_crcs(rows)
        places = pc.index_in(task_rows["unique_key"], value_set=self._stored_keys)
        is_stored = pc.is_valid(places)
        sent = self._stored["body_crc"].take(places.filter(is_stored))
        differs = pc.not_equal(task_rows["body_crc"].filter(is_stored), sent)
        if pc.any(differs).as_py():
            key = task_rows["unique_key"].filter(is_stored).filter(differs)[0].as_py()
            raise BatchConflictError(
                f"{self._sink.options.path}: partition {self._partition_id} was sent before with other rows: the body "
                f"of the message with UNIQ_KEY {key} is another one. Rows must come in the same order when Spark "
                f"repeats a task: sort within the partitions, or write the rows to a store or a table first, and send "
                f"them from there",
                app_id=self._ends.batch.app_id,
                version=self._ends.batch.version,
            )


def _check_delays(messages: ColumnTexts, first_row: int) -> None:
    levels = messages.columns.delay_time_level
    assert levels is not None
    delayed = levels.nonzero()[0]
    if len(delayed):
        error = MessageIllegalError(
            f"delayTimeLevel: found {int(levels[delayed[0]])}; allowed is 0 with brokers: a "
            f"delayed message is in another queue until it is due, where it cannot be looked up before a repeat. Send "
            f"it with a producer of RocketMQ, or write it to a store",
            field="delayTimeLevel",
        )
        error.row = first_row + int(delayed[0])
        raise error


def _named(error: MessageIllegalError, partition_id: int, first_row: int) -> MessageIllegalError:
    """The same error, which names the partition, and what of it was sent."""
    place = f"partition {partition_id}" + (f", row {error.row}" if error.row is not None else "")
    sent = f"The {first_row} rows before were sent" if first_row else "No row of the partition was sent"
    named = MessageIllegalError(
        f"{place}: {error.reason}. {sent}", field=error.field, size=error.size, limit=error.limit
    )
    named.row = error.row
    return named


# ---- where queues ended before a batch


def _lookup_dir(options: SinkOptions, checkpoint: str | None, *, streaming: bool) -> str:
    """The folder for look-ups; empty if there is none and none is needed."""
    if options.lookup_dir is not None:
        return os.path.abspath(options.lookup_dir)
    if streaming and checkpoint is not None:
        with contextlib.suppress(ConfigError):  # it is on no file system that is mounted here
            return os.path.join(Location.of(checkpoint), "messagestore-lookups")
    if streaming or options.txn_app_id is not None:
        raise ConfigError(
            f"option lookupDir: is missing, and {checkpoint or 'no checkpointLocation'} is no folder that can be used "
            f"instead. Give a folder that the driver and all executors see, and that outlives restarts of the query: "
            f"there, tasks write where the queues ended, so that a repeated batch is looked up",
            key="lookupDir",
        )
    return ""


class Ends:
    """Where the queues of topics ended before the tasks of a batch sent their first rows: a file for each.

    Parameters
    ----------
    folder : str
        `lookupDir`.
    batch : Batch
    """

    def __init__(self, folder: str, batch: Batch) -> None:
        self.batch = batch
        self._root = Path(folder)
        self._folder = self._root / hashlib.sha256(batch.app_id.encode()).hexdigest()[:32]

    def _path(self, topic: str, partition_id: int) -> Path:
        return self._folder / f"{self.batch.version}-{partition_id}-{topic}{_SUFFIX}"

    def of(self, topic: str, partition_id: int) -> dict[SendQueue, int] | None:
        """What an earlier attempt has written; None: there was none.

        Raises
        ------
        ConfigError
            The folder is missing, or the file cannot be read.
        """
        if not self._root.is_dir():
            raise ConfigError(
                f"option lookupDir: found no folder {self._root} on host {socket.gethostname()}; allowed is a folder "
                f"that the driver and all executors see",
                key="lookupDir",
                value=str(self._root),
            )
        path = self._path(topic, partition_id)
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        self._sync_names()  # an attempt that was killed may have given the file its name and not synced it
        try:
            data = json.loads(text)
            if data["formatVersion"] != FORMAT_VERSION:
                raise ValueError(f"format version {data['formatVersion']}")
            return {SendQueue(str(broker), int(queue)): int(end) for broker, queue, end in data["ends"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: found a file that cannot be read ({error!r}); allowed is what an earlier attempt of this "
                f"batch wrote. Rows that it sent cannot be looked up: delete the file to send all of them",
                key="lookupDir",
                value=str(path),
            ) from None

    def write(self, topic: str, partition_id: int, ends: dict[SendQueue, int]) -> dict[SendQueue, int] | None:
        """Write where the queues end, durably.

        Returns
        -------
        dict | None
            The ends that another attempt has written meanwhile, which count; None: there was none.
        """
        path = self._path(topic, partition_id)
        self._folder.mkdir(exist_ok=True)
        rows = [[queue.broker, queue.queue_id, end] for queue, end in ends.items()]
        data = {"formatVersion": FORMAT_VERSION, "app": self.batch.app_id, "topic": topic, "ends": rows}

        temporary = self._folder / f".{uuid.uuid4().hex}"
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                json.dump(data, file)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        except FileExistsError:
            return self.of(topic, partition_id)
        finally:
            temporary.unlink(missing_ok=True)
        self._sync_names()
        return None

    def _sync_names(self) -> None:
        for folder in (self._folder, self._root):
            _sync(folder)

    def forget(self, *, with_own: bool) -> None:
        """Delete the files of earlier batches, and with `with_own` those of this one."""
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            version = path.name.partition("-")[0]
            if version.isdigit() and (int(version) < self.batch.version or with_own):
                path.unlink(missing_ok=True)
        if with_own:
            with contextlib.suppress(OSError):  # a task that Spark gave up still writes there
                self._folder.rmdir()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
