"""What topics there are, how far their queues reach, and the segments of the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from messagestore.errors import CorruptionError, StoreError, StorePermissionError, UnknownTopicError
from messagestore.files.config_file import why_in_rocksdb
from messagestore.format.message import BATCH_TOPIC, is_ordinary_topic
from messagestore.read.query import queue_offset_by_time
from messagestore.read.view import StoreView

Places = dict[tuple[str, int], tuple[int, int, int]]
"""The minimum offset, the maximum offset, and the physical offset after the last message, of each queue."""


@contextlib.contextmanager
def telling(faults: list[str], *more: type[StoreError]) -> Iterator[None]:
    """Add to `faults`, in words, that a file is damaged or that this user may not read it, so that a look goes on with
    what else there is.

    Parameters
    ----------
    more : type of StoreError
        What else is told in this way.
    """
    kinds: tuple[type[StoreError], ...] = (CorruptionError, StorePermissionError, *more)
    try:
        yield
    except kinds as error:
        faults.append(str(error))


def places_of(view: StoreView, faults: list[str], *, in_log: bool = True) -> Places:
    """Where each queue begins and ends; what could not be read is added to `faults`, in words.

    Parameters
    ----------
    in_log : bool
        Whether the physical offsets are looked for too; otherwise they are 0.
    """
    ends_of_queues: Places = {}
    for topic, ids in sorted(view.topics().items()):
        for queue_id in ids:
            with telling(faults):
                low, high = view.bounds(topic, queue_id)
                end = 0
                if in_log:
                    last = view.units(topic, queue_id, max(low, high - 1), high)
                    end = int((last["physical_offset"] + last["size"]).max(initial=0))
                ends_of_queues[(topic, queue_id)] = (low, high, end)
    return ends_of_queues


def by_topic(view: StoreView, places: Places) -> list[dict[str, Any]]:
    """The queues of each topic that has some or was created."""
    topics: dict[str, dict[str, Any]] = {}
    for name in view.files.topics.names:
        topics[name] = {"topic": name, "messages": 0, "queues": {}}

    for (topic, queue_id), (low, high, _) in places.items():
        if topic != BATCH_TOPIC:
            row = topics.setdefault(topic, {"topic": topic, "messages": 0, "queues": {}})
            row["messages"] += high - low
            row["queues"][str(queue_id)] = {"minOffset": low, "maxOffset": high}

    for name, row in topics.items():
        config = view.files.topics.get(name)
        row["writeQueueNums"] = config.write_queue_nums if config is not None else None
    return [topics[name] for name in sorted(topics)]


def topics_of(view: StoreView, places: Places, faults: list[str]) -> list[dict[str, Any]]:
    """One row for each topic that has settings or queues; what could not be read is added to `faults`, in words.

    The settings are None for a topic that has queues and no settings: a writer or a broker takes its defaults then.
    They are also None if the broker keeps them in RocksDB, because `topics.json` has those of an earlier time.
    """
    elsewhere = why_in_rocksdb(view.files.disk, view.files.paths.root)
    faults += [elsewhere] if elsewhere is not None else []

    rows = []
    for row in by_topic(view, places):
        config = view.files.topics.get(row["topic"]) if elsewhere is None else None
        rows.append(
            {
                "topic": row["topic"],
                "writeQueueNums": None if config is None else config.write_queue_nums,
                "readQueueNums": None if config is None else config.read_queue_nums,
                "perm": None if config is None else config.perm,
                "order": None if config is None else config.order,
                "topicFilterType": None if config is None else config.topic_filter_type,
                "topicSysFlag": None if config is None else config.topic_sys_flag,
                "attributes": None if config is None else config.attributes,
                "queues": len(row["queues"]),
                "messages": row["messages"],
            }
        )
    return rows


def offsets_of(view: StoreView, topics: Sequence[str], at_ms: int | None) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each queue of some topics (none: of all but the store's own), and what could not be read, in words.

    A topic that was created and got no message yet has its queues, from 0 to 0. `offset` is that of the first message
    that was stored at `at_ms` or later, and `storeTimestamp` its store time.
    """
    one = len(topics) == 1  # one folder is read in place of all
    queue_ids_by_topic = {topics[0]: view.queue_ids(topics[0])} if one else view.topics()
    for topic in topics:
        if not queue_ids_by_topic.get(topic) and view.files.topics.get(topic) is None:
            raise UnknownTopicError(topic, {*view.topics(), *view.files.topics.names} - {BATCH_TOPIC})

    rows: list[dict[str, Any]] = []
    faults: list[str] = []

    without_name = {*queue_ids_by_topic, *filter(is_ordinary_topic, view.files.topics.names)} - {BATCH_TOPIC}
    for topic in dict.fromkeys(topics) or sorted(without_name):
        created = view.files.topics.get(topic)
        ids = queue_ids_by_topic.get(topic) or range(created.write_queue_nums if created is not None else 0)
        for queue_id in ids:
            with telling(faults):
                low, high = view.bounds(topic, queue_id)
                row = {
                    "topic": topic,
                    "queueId": queue_id,
                    "minOffset": low,
                    "maxOffset": high,
                    "messages": high - low,
                }

                if at_ms is not None:
                    offset = queue_offset_by_time(view, topic, queue_id, at_ms)
                    time_ms = store_time(view, topic, queue_id, offset) if offset < high else None
                    row |= {"offset": offset, "storeTimestamp": time_ms}
                rows.append(row)
    return rows, faults


def store_time(view: StoreView, topic: str, queue_id: int, offset: int) -> int | None:
    """When the message at a queue offset below the queue's end was stored; None if its record is gone."""
    units = view.units(topic, queue_id, offset, offset + 1)
    head = view.healed(lambda: view.files.commit_log.head(int(units["physical_offset"][0]))) if len(units) else None
    return None if head is None else int(head["store_timestamp_ms"])


def queue_rows(places: Places) -> list[dict[str, Any]]:
    """One row for each queue of all topics but the store's own."""
    return [
        {"topic": topic, "queueId": queue_id, "minOffset": low, "maxOffset": high, "messages": high - low}
        for (topic, queue_id), (low, high, _) in places.items()
        if topic != BATCH_TOPIC
    ]


def segments_of(view: StoreView) -> list[dict[str, Any]]:
    """One row for each segment of the log."""
    log = view.files.commit_log
    log.load()

    def row(start: int) -> dict[str, Any]:
        head = log.head(start)
        return {
            "file": log.path(start),
            "firstPhysicalOffset": start,
            "endPhysicalOffset": start + log.segment_size,
            "firstStoreTimestamp": None if head is None else int(head["store_timestamp_ms"]),
        }

    return view.healed(lambda: [row(start) for start in log.offsets])
