"""The source over a cluster: the queues of a topic lie on several brokers, and each broker is a store of its own.

Each broker has a reader of its own, which does all that the reader of one store does. Here they are put together: which
brokers there are, how a limit is shared, and the offset of the whole.

    {"brokers": {"broker-a": {"formatVersion": 1, ..}, "broker-b": {..}}, "formatVersion": 2}

Each reader waits for its own broker only, so all brokers are asked at the same time, in threads. A reader is used by
one thread at a time.

A broker that is added while a query runs is read from its first message. If one goes away, its reader waits for it, for
as long as `retryTimeout`. The whole query waits: rows of the others would move watermarks past its rows, and Spark
would drop these then.
"""

from __future__ import annotations

import itertools
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from messagestore import ConfigError, UnknownTopicError
from messagestore.spi import Location, Stores, brokers_of
from pyspark_messagestore.options.source_options import SourceOptions
from pyspark_messagestore.options.values import MOST
from pyspark_messagestore.plain_errors import plain_errors
from pyspark_messagestore.source.limits import MinOffsets
from pyspark_messagestore.source.offsets import StreamOffset
from pyspark_messagestore.source.planning import RangesPartition
from pyspark_messagestore.source.readers import BatchReader, StreamReader, unknown_start
from pyspark_messagestore.source.reading import read_ranges
from pyspark_messagestore.source.schema import Projection

FORMAT_VERSION = 2
LOOK_INTERVAL_S = 5.0
"""How often a query looks for new brokers."""

_MOST_AT_ONCE = 32
"""How many brokers are asked at the same time."""

_Answer = TypeVar("_Answer")
Offset = dict[str, Any]
Brokers = Callable[[SourceOptions], dict[str, Location]]


def brokers_to_read(options: SourceOptions) -> dict[str, Location]:
    """The stores of the brokers that have a topic that is read, by the names of the brokers.

    Raises
    ------
    UnknownTopicError
        A topic has been on no broker for as long as `retryTimeout`, unless the query shall wait for it.
    """
    location, subscription = options.location, options.subscription
    if subscription.pattern is not None:
        return brokers_of(location)
    if options.on_missing_topic != "wait":
        for topic in subscription.named:
            if not brokers_of(location, [topic], waits=True):
                raise UnknownTopicError(
                    topic,
                    None,
                    f"No broker of {location} has had it for {location.settings.retry_timeout_s:g} s. Start the broker "
                    f"that has it, create it with RocketMQ's mqadmin updateTopic, or set "
                    f"onMissingTopic=wait for a stream that begins before its topic",
                )
    return brokers_of(location, subscription.named)


def _of_broker(options: SourceOptions, location: Location) -> SourceOptions:
    """The options of one broker. That a topic is missing there is no fault, and limits are those of all brokers."""
    return replace(
        options,
        path=location,
        on_missing_topic="wait",
        max_offsets_per_trigger=None,
        max_bytes_per_trigger=None,
        min_offsets_per_trigger=None,
    )


def _on_broker(partitions: list[InputPartition], location: Location) -> list[InputPartition]:
    """Partitions, with the store that their tasks open."""
    for partition in partitions:
        assert isinstance(partition, RangesPartition)
        partition.location = location
    return partitions


class _BrokerThreads:
    """Asks several brokers at the same time. Its threads run from the first question until `close`."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def answers(self, names: Iterable[str], ask: Callable[[str], _Answer]) -> dict[str, _Answer]:
        """What each broker answers, in the order of the names. The caller's thread asks one of them.

        All have answered, or failed, when this returns or raises: nobody else uses their readers then.
        """
        wanted = [*names]
        if not wanted:
            return {}
        *others, last = wanted
        if others and self._threads is None:
            self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, "broker")
        futures = {name: self._threads.submit(ask, name) for name in others} if self._threads is not None else {}
        try:
            answer = ask(last)
        finally:
            wait(futures.values())
        return {**{name: future.result() for name, future in futures.items()}, last: answer}

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


@plain_errors("partitions")
class ClusterBatchReader(DataSourceReader):
    """The reader of `spark.read` over several brokers."""

    def __init__(
        self, options: SourceOptions, projection: Projection, stores: Stores, brokers: Brokers = brokers_to_read
    ) -> None:
        self.options, self.projection, self.stores, self.brokers = options, projection, stores, brokers

    def partitions(self) -> list[InputPartition]:
        """Plan the ranges of all brokers, on the driver."""
        locations, at_once = self.brokers(self.options), _BrokerThreads()

        def planned(name: str) -> list[InputPartition]:
            location = locations[name]
            reader = BatchReader(_of_broker(self.options, location), self.projection, self.stores)
            return _on_broker(reader.partitions(), location)

        try:
            return [*itertools.chain.from_iterable(at_once.answers(locations, planned).values())]
        finally:
            at_once.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, in a task."""
        return read_ranges(self.options, partition, self.projection, self.stores)


@plain_errors(
    "initialOffset", "prepareForTriggerAvailableNow", "reportLatestOffset", "latestOffset", "partitions", "commit"
)
class ClusterStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of `readStream` over several brokers. The driver keeps one as long as the query runs."""

    def __init__(
        self, options: SourceOptions, projection: Projection, stores: Stores, brokers: Brokers = brokers_to_read
    ) -> None:
        self.options, self.projection, self.stores, self.brokers = options, projection, stores, brokers
        self._readers: dict[str, StreamReader] = {}
        self._at_once = _BrokerThreads()
        self._firsts: dict[str, Offset] = {}
        self._looked_s: float | None = None
        self._is_bounded = False
        self._min_offsets = MinOffsets(options.min_offsets_per_trigger, options.max_trigger_delay)

    def __getstate__(self) -> dict[str, Any]:
        """What tasks need; connections stay on the driver."""
        return {"options": self.options, "projection": self.projection, "stores": self.stores}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc] # a copy begins like a new object

    # ---- the brokers

    def _look(self) -> None:
        """Make readers for the brokers that were not read yet."""
        now_s = time.monotonic()
        if self._looked_s is not None and (self._is_bounded or now_s - self._looked_s < LOOK_INTERVAL_S):
            return
        for name in self.brokers(self.options):
            self._reader(name)
        self._looked_s = now_s

    def _reader(self, name: str) -> StreamReader:
        if name not in self._readers:
            location = self.options.path.of_broker(name)
            self._readers[name] = StreamReader(_of_broker(self.options, location), self.projection, self.stores)
        return self._readers[name]

    def _joined(self, offsets: Mapping[str, Offset]) -> Offset:
        return {"brokers": dict(sorted(offsets.items())), "formatVersion": FORMAT_VERSION}

    def _first_of(self, name: str) -> Offset:
        """The start in a broker that is new to a query: the first messages that it has. It is the same in one run."""
        if name not in self._firsts:
            follower = self._readers[name].follower
            begins = follower.store.begins(follower.ends())
            self._firsts[name] = replace(unknown_start(self.options), queues=begins).to_json()
        return self._firsts[name]

    # ---- offsets

    def initialOffset(self) -> Offset:  # noqa: N802 # Spark's name
        """Where a new query begins, on each broker."""
        self._look()
        return self._joined(self._at_once.answers(self._readers, lambda name: self._readers[name].initialOffset()))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Say whether there are limits; `latestOffset` applies them."""
        options = self.options
        limits = (options.max_offsets_per_trigger, options.max_bytes_per_trigger, options.min_offsets_per_trigger)
        return ReadAllAvailable() if limits == (None, None, None) else ReadMaxRows(limits[0] or MOST)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Let the query end at what is visible now."""
        self._look()
        self._is_bounded = True
        self._at_once.answers(self._readers, lambda name: self._readers[name].prepareForTriggerAvailableNow())

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """How far the brokers reach, for Spark's progress."""
        return self._joined(
            self._at_once.answers(self._readers, lambda name: self._readers[name].reportLatestOffset() or {})
        )

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 # Spark's name
        """How far the next micro-batch reads; `start` itself if there is nothing new."""
        self._look()
        before = _brokers_in(start)
        for name in before:
            self._reader(name)
        firsts = self._at_once.answers(self._readers.keys() - before.keys(), self._first_of)
        starts = {name: before.get(name) or firsts[name] for name in self._readers}

        limits: Mapping[str, ReadLimit] = dict.fromkeys(self._readers, ReadAllAvailable())
        if isinstance(limit, ReadMaxRows):
            counts = self._at_once.answers(self._readers, lambda name: self._backlog(name, starts[name]))
            if self._min_offsets.waits(start, sum(counts.values()), ends_soon=self._is_bounded):
                return start
            limits = self._shared(counts, limit.max_rows)

        answers = self._at_once.answers(
            limits, lambda name: self._readers[name].latestOffset(starts[name], limits[name])
        )
        ends = {name: answers[name] if name in answers else before.get(name) for name in starts}
        offsets = {
            name: end for name, end in ends.items() if end is not None and (name in before or end != starts[name])
        }
        return start if offsets == before else self._joined(offsets)

    def _backlog(self, name: str, start: Offset) -> int:
        """How many messages are behind a start on a broker, as far as is known without a look at them."""
        offset, reader = StreamOffset.from_json(start), self._readers[name]
        ends = reader.follower.ends() if reader.target is None else reader.target
        return sum(max(0, end - offset.queues.get(queue, 0)) for queue, end in ends.items())

    def _shared(self, counts: Mapping[str, int], most_rows: int) -> dict[str, ReadLimit]:
        """The limit of each broker, in proportion to what it has. A broker without a share is left out."""
        total, most_size = sum(counts.values()), self.options.max_bytes_per_trigger
        limits: dict[str, ReadLimit] = {}
        left = min(most_rows, total)
        for name, count in sorted(counts.items(), key=lambda item: item[1]):
            rows = min(left, -(-count * min(most_rows, total) // total)) if total else 0
            left -= rows
            if rows or not count:
                limits[name] = ReadMaxRows(max(1, rows))
            size = None if most_size is None or not total else max(1, most_size * count // total)
            reader = self._readers[name]
            reader.options = replace(reader.options, max_bytes_per_trigger=size)
        return limits

    # ---- ranges

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The pieces of one micro-batch; each call returns the same rows."""
        unknown = unknown_start(self.options).to_json()
        finishes = _brokers_in(end)
        begins = {name: _brokers_in(start).get(name) or unknown for name in finishes}
        read = [name for name in finishes if begins[name] != finishes[name]]
        for name in read:
            self._reader(name)

        def planned(name: str) -> list[InputPartition]:
            partitions = self._readers[name].partitions(begins[name], finishes[name])
            return _on_broker(partitions, self.options.location.of_broker(name))

        return [*itertools.chain.from_iterable(self._at_once.answers(read, planned).values())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, in a task."""
        return read_ranges(self.options, partition, self.projection, self.stores)

    def commit(self, end: Offset) -> None:
        """Do nothing: Spark does not call it for the last batch, so nothing may depend on it."""

    def stop(self) -> None:
        """Close the connections."""
        self._at_once.close()
        for reader in self._readers.values():
            reader.stop()
        self._readers.clear()
        self._looked_s = None


def _brokers_in(offset: Offset) -> dict[str, Offset]:
    """The offsets of the brokers in an offset of a cluster.

    Raises
    ------
    ConfigError
        It is the offset of something else.
    """
    brokers = offset.get("brokers")
    if offset.get("formatVersion") != FORMAT_VERSION or not isinstance(brokers, dict):
        raise ConfigError(
            f"checkpoint: found the offset {reprlib.repr(offset)}; allowed are offsets of a query that reads "
            f"RocketMQ's brokers, of format version {FORMAT_VERSION}. Use this query's checkpoint, or a new one",
            key="checkpointLocation",
        )
    return brokers
