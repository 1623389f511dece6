"""How far streaming queries are behind the stores that they read, after each micro-batch.

Spark leaves the metrics of a Python source empty and names it by the address of a Java object
(`PythonMicroBatchStream@4bed74ed`): neither can be set from Python. The offsets in its progress are ours, so a listener
finds the sources by their offsets, and computes what Kafka's source reports.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from messagestore import ConfigError, NotAStoreError, StoreError
from messagestore.spi import STORES, Location, Queues, Range, Stores
from pyspark_messagestore.source.offsets import StreamOffset

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceLag:
    """How far one source of a query is behind the end of its store, when a micro-batch was done.

    Parameters
    ----------
    query_id, run_id : str
    query_name : str | None
    batch_id : int
    source : int
        The number of the source in the query's progress, from 0.
    store_id : str
        The store that it reads; empty for a store without an id.
    path : str | None
        Where the store is, if the listener was given its path.
    behind : dict of (topic, queue id) to int
        How many messages of each queue were there and not read.
    bytes_behind : int | None
        About how many bytes their records have; None if the listener does not know the path.
    """

    query_id: str
    run_id: str
    query_name: str | None
    batch_id: int
    source: int
    store_id: str
    path: str | None
    behind: dict[tuple[str, int], int]
    bytes_behind: int | None

    @property
    def topics(self) -> list[str]:
        """The topics that are read, in alphabetical order."""
        return sorted({topic for topic, _ in self.behind})

    @property
    def description(self) -> str:
        """Path or id of the store, and the topics."""
        return f"messagestore {self.path or self.store_id or 'without an id'}: {', '.join(self.topics) or 'no topic'}"

    @property
    def records_behind(self) -> int:
        """How many messages of all queues were not read."""
        return sum(self.behind.values())

    @property
    def metrics(self) -> dict[str, str]:
        """The metrics under the names, and in the form, of Spark's Kafka source."""
        counts = list(self.behind.values())
        if not counts:
            return {}

        values = {
            "minOffsetsBehindLatest": str(min(counts)),
            "maxOffsetsBehindLatest": str(max(counts)),
            "avgOffsetsBehindLatest": str(sum(counts) / len(counts)),
        }

        if self.bytes_behind is not None:
            values["estimatedTotalBytesBehindLatest"] = str(self.bytes_behind)
        return values


def lags_of(
    progress: Any, paths: Mapping[str, str | Location] | None = None, stores: Stores = STORES
) -> list[SourceLag]:
    """How far the sources of a query are behind, from its progress; sources of other formats are left out.

    Parameters
    ----------
    progress : StreamingQueryProgress
        As a listener receives it, or `query.lastProgress`.
    paths : mapping of str to str or Location, optional
        The path of each store, or the URL of its server, by its id. With it, bytes are estimated.

    Returns
    -------
    list of SourceLag
        A source whose latest offset Spark did not report has no entry.
    """
    lags = []
    for number, source in enumerate(progress["sources"]):
        latest, end = _offset(source["latestOffset"]), _offset(source["endOffset"])
        if latest is None or end is None:
            continue

        behind = {queue: max(0, last - end.queues.get(queue, 0)) for queue, last in sorted(latest.queues.items())}
        store_id = end.store_id or latest.store_id
        path = (paths or {}).get(store_id)

        lags.append(
            SourceLag(
                query_id=str(progress["id"]),
                run_id=str(progress["runId"]),
                query_name=progress["name"],
                batch_id=progress["batchId"],
                source=number,
                store_id=store_id,
                path=None if path is None else str(path),
                behind=behind,
                bytes_behind=None if path is None else _bytes_behind(path, end.queues, behind, stores),
            )
        )
    return lags


def _offset(text: str | Mapping[str, Any] | None) -> StreamOffset | None:
    """An offset of our source; None for another source's, and for none."""
    try:
        fields = json.loads(text) if isinstance(text, str) else text
        return StreamOffset.from_json(fields) if isinstance(fields, Mapping) else None
    except (ValueError, ConfigError):
        return None


def _bytes_behind(path: str | Location, ends: Queues, behind: dict[tuple[str, int], int], stores: Stores) -> int | None:
    """About how many bytes the messages behind have; None if the store cannot be read at this moment."""
    ranges = [Range(*queue, ends.get(queue, 0), ends.get(queue, 0) + n) for queue, n in behind.items() if n]
    location = path if isinstance(path, Location) else Location.of(path)
    try:
        with contextlib.closing(stores.reader(location)) as store:
            begins = store.begins((range_.topic, range_.queue_id) for range_ in ranges)
            # What retention has deleted is not read any more, so it does not count.
            left = [
                replace(range_, start=max(range_.start, begins.get((range_.topic, range_.queue_id), 0)))
                for range_ in ranges
            ]
            left = [range_ for range_ in left if range_.count > 0]
            return round(sum(range_.count * size for range_, size in zip(left, store.mean_sizes(left), strict=True)))
    except (StoreError, OSError) as error:
        _log.warning("%s: the bytes behind the latest offset cannot be estimated: %s", path, error)
        return None


class MessageStoreListener(StreamingQueryListener):
    """Says after each micro-batch how far a query is behind the stores that it reads.

    It logs one line for each source (at INFO, logger `pyspark_messagestore.monitoring.listener`), keeps the last lag of
    each query in `latest`, and calls `on_lag`, which a subclass may override to send the numbers elsewhere. It works on
    classic Spark and on Connect, where it runs in the client.

    Parameters
    ----------
    roots : str
        The root folders of the stores whose bytes are to be estimated, or the URLs of their servers. This process must
        see the folders. Without one, messages are counted, and bytes are not. A copy of the whole folder has the id of
        the original: of the two, the one that is named first counts. A restored backup has an id of its own.
    token_file, ca_file, cert_file, key_file : str, optional
        How servers are reached, as the options `tokenFile`, `caFile`, `certFile` and `keyFile` of the source; without
        one, the variable `MESSAGESTORE_TOKEN_FILE` (and so on) of the environment counts.
    retry_timeout_s : float
        For how long a server that does not answer is asked again. It is short, because Spark waits for its listeners:
        bytes that cannot be estimated now are None, and are estimated after the next micro-batch.

    Attributes
    ----------
    latest : dict of str to list of SourceLag
        By query id; an entry goes when its query ends.

    Examples
    --------
    >>> from pyspark.sql import SparkSession
    >>> from pyspark_messagestore import MessageStoreListener
    >>> spark = SparkSession.builder.getOrCreate()
    >>> class Lags(MessageStoreListener):
    ...     def on_lag(self, lag):
    ...         print(lag.description, lag.metrics)
    >>> listener = Lags("/data/store")
    >>> spark.streams.addListener(listener)
    >>> spark.streams.removeListener(listener)
    """

    def __init__(
        self,
        *roots: str,
        token_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        retry_timeout_s: float = 1.0,
        stores: Stores = STORES,
    ) -> None:
        self.roots = roots
        self._locations = {
            root: Location.of(root).reached(
                retry_timeout_s, token_file=token_file, ca_file=ca_file, cert_file=cert_file, key_file=key_file
            )
            for root in roots
        }

        self.latest: dict[str, list[SourceLag]] = {}
        self._stores = stores
        self._by_id: dict[str, Location] = {}
        self._by_ancestor: dict[str, Location] = {}
        self._found: set[str] = set()
        self._told: dict[str, str] = {}

    def on_lag(self, lag: SourceLag) -> None:
        """Do something with the lag of one source. It is called after each micro-batch; the base class does nothing."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 # Spark's name
        """Do nothing."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Do nothing: nothing was read since the last progress."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Compute the lag of each source of ours."""
        if len(self._found) < len(self.roots):
            self._find_stores()
        lags = lags_of(event.progress, {**self._by_ancestor, **self._by_id}, self._stores)
        if lags:
            self.latest[str(event.progress.id)] = lags
        for lag in lags:
            _log.info("query %s, batch %d, %s: %s", lag.query_id, lag.batch_id, lag.description, lag.metrics)
            self.on_lag(lag)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Forget the query."""
        self.latest.pop(str(event.id), None)

    def _find_stores(self) -> None:
        """Find out which stores are at the paths; one that does not exist yet is looked for again.

        A query that read a store before it was copied has its id in its offsets. The store itself comes first, if its
        path was given, and then the copy.
        """
        for path, location in self._locations.items():
            if path in self._found:
                continue
            try:
                with contextlib.closing(self._stores.reader(location)) as store:
                    here = store.describe([])
            except NotAStoreError:
                continue
            except (StoreError, OSError) as error:
                self._tell(path, error)
                continue
            self._by_ancestor |= dict.fromkeys({*here.ancestors} - {""}, location)
            if here.store_id:  # the store of a broker has one when a writer of ours has opened it
                self._by_id.setdefault(here.store_id, location)
                self._found.add(path)

    def _tell(self, path: str, error: Exception) -> None:
        """Log why a store cannot be read; the same reason once."""
        if self._told.get(path) != type(error).__name__:
            self._told[path] = type(error).__name__
            _log.warning("%s: the bytes behind the latest offset cannot be estimated: %s", path, error)
