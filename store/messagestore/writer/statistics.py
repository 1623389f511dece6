"""What a process has put into a store and read from it (RocketMQ's StoreStatsService).

Each thread counts its own puts and gets, so counting takes no lock and waits for nobody; whoever asks adds up what the
threads have. The messages of each topic are counted where they are appended, under the writer's mutex.

A put that ends is counted once, with its time and its status, whichever form it has and whichever thread ends it. What
is in the log is counted by topic as soon as it is there, also if its sync fails later.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import NamedTuple

from messagestore.errors import PutMessageStatus

_BUCKETS_MS = (0, 1, 10, 50, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 10_000)
"""Where each of RocketMQ's buckets begins."""
_BUCKET_NAMES = (
    "<=0ms", "0~10ms", "10~50ms", "50~100ms", "100~200ms", "200~500ms", "500ms~1s", "1~2s", "2~3s", "3~4s", "4~5s",
    "5~10s", "10s~",
)  # fmt: skip
_FINE_BUCKETS_MS = tuple(
    accumulate(
        chain.from_iterable(
            repeat(step, count) for step, count in ((1, 20), (2, 15), (5, 10), (10, 10), (50, 6), (100, 5), (1000, 9))
        )
    )
)
"""Where each of the buckets ends from which RocketMQ takes percentiles."""
_MILLISECOND_S = 0.001
_MOST_MS = _FINE_BUCKETS_MS[-1]
_OK = PutMessageStatus.PUT_OK
_WINDOWS_S = (10, 60, 600)
"""The times over which RocketMQ takes rates."""
_SAMPLE_S = 1.0
clock = time.monotonic
"""In seconds: what times of puts are measured with."""


class TopicStats(NamedTuple):
    """What a process has put into one topic.

    Parameters
    ----------
    messages : int
    size : int
        The size of their records, in bytes.
    """

    messages: int
    size: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What this process has put into a store and read from it since it first opened it.

    `MessageStore.stats` returns it, and another call returns newer numbers: other rates than `put_tps` are differences
    of two calls. Nothing of it is in the store's files.

    Parameters
    ----------
    since_ms : int
        When the process began to count, in milliseconds since 1970.
    put_times : dict
        How many puts took how long, in RocketMQ's buckets ("0~10ms"). A put is one call, also for a batch, and its time
        ends when its caller may go on: with SYNC_FLUSH, after its sync. Puts that failed count, too.
    put_statuses : dict
        How many puts ended with each status. The table in `messagestore.errors` says what each means.
    put_longest_ms : int
    put_p99_ms : float
        The time that 99 % of the puts did not exceed, estimated as RocketMQ does.
    topics : dict
        The messages of each topic that are in the log, and their bytes; those of batches as well (`append_batch` and
        Spark), and the store's own. A delayed message counts for SCHEDULE_TOPIC_XXXX, and again for its own topic when
        it is delivered.
    put_tps : dict
        How many of these messages were put in a second: seconds -> the mean over the last 10, 60 and 600 seconds, or
        since the process began to count if that is later (RocketMQ's getPutTps).
    gets_found, gets_missed : int
        How many calls of `get_message` and `get_batch` found messages, and found none.
    messages_got : int
        How many messages they returned.
    get_longest_ms : int
    dispatch_behind, flush_behind : int | None
        The bytes at the end of the log that readers do not see yet, and that no sync has covered. None: the store is
        not open for writing.
    pool_behind : int | None
        The bytes in the TransientStorePool, which are not in the log's files yet. They do not count in the other two.
    disk_used : dict
        How full the disk is, in percent, under the log and under the queues.

    Examples
    --------
    >>> from messagestore import Message, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     for number in range(3):
    ...         _ = store.put_message(Message("flights", b"%d" % number, queue_id=0))
    ...     found = store.stats()
    >>> sum(found.put_times.values()), found.put_failed, found.topics["flights"].messages
    (3, 0, 3)
    """

    since_ms: int
    put_times: Mapping[str, int]
    put_statuses: Mapping[PutMessageStatus, int]
    put_longest_ms: int
    put_p99_ms: float
    topics: Mapping[str, TopicStats]
    put_tps: Mapping[int, float]
    gets_found: int
    gets_missed: int
    messages_got: int
    get_longest_ms: int
    dispatch_behind: int | None
    flush_behind: int | None
    pool_behind: int | None
    disk_used: Mapping[str, int]

    @property
    def put_messages(self) -> int:
        """All messages that were put."""
        return sum(topic.messages for topic in self.topics.values())

    @property
    def put_size(self) -> int:
        """The bytes of their records."""
        return sum(topic.size for topic in self.topics.values())

    @property
    def put_failed(self) -> int:
        """How many puts raised an error, or would have. A sync that takes too long is no failure."""
        stored = (PutMessageStatus.PUT_OK, PutMessageStatus.FLUSH_DISK_TIMEOUT)
        return sum(count for status, count in self.put_statuses.items() if status not in stored)


class _Counts:
    """What one thread has counted, or all threads together that have ended."""

    __slots__ = (
        "gets_found", "gets_missed", "longest_get_ms", "longest_put_ms", "messages_got", "not_ok", "oneway",
        "quick_puts", "slow_puts", "thread",
    )  # fmt: skip

    def __init__(self, thread: threading.Thread | None = None) -> None:
        self.thread = thread
        self.quick_puts = 0
        """Puts that took less than a millisecond."""
        self.slow_puts: defaultdict[int, int] = defaultdict(int)
        """Other puts, by their time in milliseconds; those that took longer than `_MOST_MS` together."""
        self.not_ok: defaultdict[PutMessageStatus, int] = defaultdict(int)
        self.oneway: defaultdict[PutMessageStatus, int] = defaultdict(int)
        self.longest_put_ms = self.longest_get_ms = 0
        self.gets_found = self.gets_missed = self.messages_got = 0

    def add(self, other: _Counts) -> None:
        """Add what another thread has counted, which may go on counting."""
        for mine, others in (
            (self.slow_puts, other.slow_puts),
            (self.not_ok, other.not_ok),
            (self.oneway, other.oneway),
        ):
            for key, count in others.copy().items():
                mine[key] += count  # type: ignore[index]

        self.quick_puts += other.quick_puts
        self.longest_put_ms = max(self.longest_put_ms, other.longest_put_ms)
        self.longest_get_ms = max(self.longest_get_ms, other.longest_get_ms)
        self.gets_found += other.gets_found
        self.gets_missed += other.gets_missed
        self.messages_got += other.messages_got


class Statistics:
    """Counts the puts and gets of one process in one store.

    Threads: any thread may call every method.
    """

    def __init__(self) -> None:
        self._since_ms = time.time_ns() // 1_000_000
        self._own = threading.local()
        self._mutex = threading.Lock()
        self._by_thread: tuple[_Counts, list[_Counts]] = (_Counts(), [])
        """The counts of all threads that have ended, added up; and those of each other thread."""
        self._topics: list[dict[str, list[int]]] = [{}]
        """What writers have appended, one after the other. Each changes its own dictionary, under its mutex."""
        self._samples = deque([(clock(), 0)], maxlen=_WINDOWS_S[-1] + 2)
        """How many messages had been put at which time, once a second at most."""

    def forget_threads(self) -> None:
        """Replace the lock in a forked child, where the thread that held it does not exist."""
        self._mutex = threading.Lock()

    # ---- counting

    def _counts(self) -> _Counts:
        try:
            return self._own.counts  # type: ignore[no-any-return]
        except AttributeError:
            return self._new_counts()

    def _new_counts(self) -> _Counts:
        """Counts for the calling thread. Those of threads that have ended are added up, so that they are not kept."""
        counts = _Counts(threading.current_thread())
        with self._mutex:
            ended, running = self._by_thread
            total, alive = _Counts(), [counts]
            total.add(ended)
            for other in running:
                if other.thread is not None and other.thread.is_alive():
                    alive.append(other)
                else:
                    total.add(other)
            self._by_thread = total, alive  # at once: a reader finds each count in one of them
        self._own.counts = counts
        return counts

    def put_ended(self, began_s: float, status: PutMessageStatus) -> None:
        """Count a put that began at `began_s` and has ended now."""
        taken_s = clock() - began_s
        try:
            counts = self._own.counts
        except AttributeError:
            counts = self._new_counts()

        if taken_s < _MILLISECOND_S:
            counts.quick_puts += 1
        else:
            ms = int(taken_s * 1000)
            if ms > _MOST_MS:
                counts.longest_put_ms = max(counts.longest_put_ms, ms)
                ms = _MOST_MS + 1
            counts.slow_puts[ms] += 1

        if status is not _OK:
            counts.not_ok[status] += 1

    def put_failed(self, began_s: float, error: BaseException) -> None:
        """Count a put that has raised an error. One that Ctrl-C has interrupted has no status of its own."""
        self.put_ended(began_s, status_of(error))

    def oneway_ended(self, began_s: float, status: PutMessageStatus) -> None:
        """Count a one-way put that began at `began_s` and has ended now."""
        self.put_ended(began_s, status)
        self._counts().oneway[status] += 1

    def topics_of_writer(self) -> dict[str, list[int]]:
        """Where a new writer counts what it appends, under its mutex: topic -> messages and bytes.

        Those of earlier writers are added up; the last one may still be in an append.
        """
        with self._mutex:
            *ended, last = self._topics
            total: dict[str, list[int]] = {}
            for topics in ended:
                _add_topics(total, topics)
            topics_of_writer: dict[str, list[int]] = {}
            self._topics = [total, last, topics_of_writer]
        return topics_of_writer

    def got(self, began_s: float, messages: int) -> None:
        """Count a get that began at `began_s` and has returned so many messages."""
        ms = int((clock() - began_s) * 1000)
        counts = self._counts()
        if messages:
            counts.gets_found += 1
            counts.messages_got += messages
        else:
            counts.gets_missed += 1
        counts.longest_get_ms = max(counts.longest_get_ms, ms)

    def sample(self) -> None:
        """Note how many messages have been put, unless that was done within the last second.

        Whoever watches a store calls this, and no put does.
        """
        now_s = clock()
        if now_s - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now_s, self._put_messages()))

    def _put_messages(self) -> int:
        return sum(messages for topics in self._topics for messages, _ in topics.copy().values())

    # ---- the result

    def _put_tps(self) -> dict[int, float]:
        """The rates over the last windows. Between two samples, a second or many apart, the rate counts as even."""
        samples = [*self._samples.copy(), (clock(), self._put_messages())]
        now_s, total = samples[-1]
        rates = {}
        for window_s in _WINDOWS_S:
            begin_s = max(now_s - window_s, samples[0][0])
            after = min(bisect_right(samples, begin_s, key=_time_of), len(samples) - 1)
            (before_s, before), (after_s, put) = samples[max(after - 1, 0)], samples[after]
            share = (begin_s - before_s) / (after_s - before_s) if after_s > before_s else 0.0
            taken_s = now_s - begin_s
            rates[window_s] = (total - before - share * (put - before)) / taken_s if taken_s > 0 else 0.0
        return rates

    def _total(self) -> _Counts:
        ended, running = self._by_thread
        total = _Counts()
        for counts in (ended, *running):
            total.add(counts)
        return total

    def oneway_counts(self) -> dict[PutMessageStatus, int]:
        """How many one-way puts have ended with each status."""
        return dict(self._total().oneway)

    def stats(
        self,
        *,
        dispatch_behind: int | None = None,
        flush_behind: int | None = None,
        pool_behind: int | None = None,
        disk_used: Mapping[str, int],
    ) -> StoreStats:
        """All counts, with what only a writer knows."""
        self.sample()
        total = self._total()

        topics: dict[str, list[int]] = {}
        for of_writer in self._topics:
            _add_topics(topics, of_writer)

        times = dict.fromkeys(_BUCKET_NAMES, 0)
        put_times = {0: total.quick_puts, **total.slow_puts}
        for ms, count in put_times.items():
            times[_BUCKET_NAMES[bisect_right(_BUCKETS_MS, ms) - 1]] += count
        ok = {_OK: sum(put_times.values()) - sum(total.not_ok.values())}
        longest_ms = max(put_times)

        return StoreStats(
            since_ms=self._since_ms,
            put_times=times,
            put_statuses={status: count for status, count in (ok | dict(total.not_ok)).items() if count},
            put_longest_ms=total.longest_put_ms if longest_ms > _MOST_MS else longest_ms,
            put_p99_ms=percentile_ms(put_times, 0.99),
            topics={topic: TopicStats(*counts) for topic, counts in topics.items()},
            put_tps=self._put_tps(),
            gets_found=total.gets_found,
            gets_missed=total.gets_missed,
            messages_got=total.messages_got,
            get_longest_ms=total.longest_get_ms,
            dispatch_behind=dispatch_behind,
            flush_behind=flush_behind,
            pool_behind=pool_behind,
            disk_used=disk_used,
        )


def _time_of(sample: tuple[float, int]) -> float:
    return sample[0]


def _add_topics(total: dict[str, list[int]], topics: dict[str, list[int]]) -> None:
    for topic, (messages, size) in topics.copy().items():
        before = total.get(topic, (0, 0))
        total[topic] = [before[0] + messages, before[1] + size]


def status_of(error: BaseException) -> PutMessageStatus:
    """RocketMQ's status for an error of a put."""
    return getattr(error, "put_status", PutMessageStatus.UNKNOWN_ERROR)


def percentile_ms(times: Mapping[int, int], share: float) -> float:
    """The time that a share of the puts did not exceed, as RocketMQ's findPutMessageEntireTimePX estimates it.

    Puts that took longer than 10 s count as 10 s, where RocketMQ has 292 million years.
    """
    buckets = [0] * len(_FINE_BUCKETS_MS)
    for ms, count in times.items():
        buckets[min(bisect_left(_FINE_BUCKETS_MS, ms), len(buckets) - 1)] += count
    wanted, passed, begin = int(sum(buckets) * share), 0, 0
    for end, count in zip(_FINE_BUCKETS_MS, buckets, strict=True):
        if wanted <= passed + count:
            return begin + ((end - begin) * (wanted - passed) / count if count else 0)
        passed, begin = passed + count, end
    return float(_MOST_MS)
