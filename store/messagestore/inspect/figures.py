"""The numbers that a monitoring system asks for, and the batches of each app."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from messagestore.errors import ConfigError, CorruptionError, MessageIllegalError, StorePermissionError
from messagestore.files.counters import read_counters
from messagestore.format.message import BATCH_TOPIC
from messagestore.inspect import waiting
from messagestore.inspect.lag import Ends, lag_rows
from messagestore.inspect.standing import Looked, behind, broker_name, disk_size, disk_used, unproven
from messagestore.log.batch_journal import JournalEntry
from messagestore.log.remembered import corrected
from messagestore.read.group_offsets import group_offsets
from messagestore.read.view import StoreView
from messagestore.writer.catching_up import journal_of


def figures_of(view: StoreView, looked: Looked | None = None) -> dict[str, Any]:
    """The numbers that a monitoring system asks for, all of them from the store's files. `faults` lists what could not
    be read, in words.

    No process counts them, so they are right whoever wrote the store, and however that ended.
    """
    faults: list[str] = []
    files, now_ms = view.files, view.files.disk.time_ns() // 1_000_000
    looked = looked or Looked(view)
    queues = looked.places(faults)
    log = files.commit_log
    begin = view.healed(lambda: log.head(log.min_offset) if len(log.offsets) else None)

    topics: dict[str, dict[str, Any]] = {}
    for (topic, _), (low, high, end) in queues.items():
        if topic != BATCH_TOPIC:
            row = topics.setdefault(topic, {"topic": topic, "messagesIn": 0, "messages": 0, "end": 0})
            row["messagesIn"] += high
            row["messages"] += high - low
            row["end"] = max(row["end"], end)  # behind its newest message: a topic that begins anew has another one

    own = {queue: place for queue, place in queues.items() if queue[0] != BATCH_TOPIC and place[1]}
    newest = max(own, key=lambda queue: own[queue][2], default=None)  # the last message in the log is this queue's
    ends = {queue: (low, high) for queue, (low, high, _) in queues.items()}
    log_end = max((end for _, _, end in queues.values()), default=files.commit_log.min_offset)

    journal = journal_of(files, view.max_offset(BATCH_TOPIC, 0))
    apps = [_app_figures(view, app_id, journal.entries(app_id)) for app_id in journal.app_ids()]

    return {
        "root": files.paths.root,
        "storeId": view.store_id,
        "brokerName": broker_name(view, faults),
        "left": looked.standing["left"],
        "brokerWaits": looked.standing["heldBy"]["brokerWaits"],
        "unproven": unproven(view),
        "nowMs": now_ms,
        "newestMs": waiting.newest_ms(view, {} if newest is None else {newest: own[newest][1]}),
        "growth": waiting.growth(view, log_end, now_ms),
        "delayed": _readable(lambda: waiting.delayed(view, journal), faults),
        "openHalves": _readable(lambda: waiting.open_halves(view), faults),
        "storageSize": disk_size(files.paths.commit_log),
        **behind(view),
        "diskUsed": disk_used(view),
        "diskFree": files.disk.free(files.paths.root),
        "reserveTimeMs": None if begin is None else max(0, now_ms - int(begin["store_timestamp_ms"])),
        "topics": list(topics.values()),
        "groups": _group_figures(view, ends, now_ms, faults),
        "batches": queues.get((BATCH_TOPIC, 0), (0, 0, 0))[1],
        "apps": apps,
        "staging": waiting.staged(files.paths.staging),
        "counters": _counters(view, faults),
        "faults": list(dict.fromkeys(faults)),
    }


def _app_figures(view: StoreView, app_id: str, entries: list[JournalEntry]) -> dict[str, Any]:
    batches = [entry for entry in entries if not entry.start]
    last = max(batches, key=lambda entry: entry.version, default=None)
    head = None if last is None else view.healed(lambda: view.files.commit_log.head(last.physical_offset))
    return {
        "app": app_id,
        "lastVersion": None if last is None else last.version,
        "lastRows": None if last is None or last.row_count < 0 else last.row_count,
        "publishedMs": None if head is None else int(head["born_timestamp_ms"]),  # also of a record that was restated
    }


def _group_figures(
    view: StoreView, ends: Mapping[tuple[str, int], tuple[int, int]], now_ms: int, faults: list[str]
) -> list[dict[str, Any]]:
    """The lag of each group and topic: messages, bytes, and for how long the oldest message waits."""
    try:
        table = group_offsets(view)
    except (ConfigError, CorruptionError) as error:  # its broker keeps them elsewhere, or the table is damaged
        faults.append(str(error))
        return []
    figures, known = [], Ends(view, ends)
    for group, topics in table.topics_read(view.topics().__contains__).items():
        for topic in topics:
            committed = table.get(topic, group)
            try:
                # One of them stays: it shows whether there can be such a topic.
                gone = sorted(committed.keys() - set(known.queue_ids(topic)))[1:]
            except (ConfigError, CorruptionError, MessageIllegalError):
                gone = []
            beyond = sum(max(committed.pop(queue_id), 0) for queue_id in gone)
            queues = {(topic, queue_id): offset for queue_id, offset in committed.items()}
            rows, wrong, _ = lag_rows(known, queues, [topic])  # if a queue is gone, the group's place is wrong
            faults += wrong
            oldest = min((row["oldestUnread"] for row in rows if row["oldestUnread"] is not None), default=None)
            figures.append(
                {
                    "group": group,
                    "topic": topic,
                    "lag": sum(row["lag"] for row in rows),
                    "lagBytes": sum(row["lagBytes"] for row in rows),
                    "beyond": sum(row["beyond"] for row in rows) + (0 if wrong else beyond),
                    "deleted": sum(_deleted(row) for row in rows),
                    "latencyMs": 0 if oldest is None else max(0, now_ms - oldest),
                }
            )
    return figures


def _deleted(row: dict[str, Any]) -> int:
    """How many messages of a queue retention has deleted before a reader read them."""
    if row["committedOffset"] is None:
        return 0
    low: int = row["minOffset"]
    return max(0, low - corrected(row["committedOffset"], low, row["maxOffset"]))


def _counters(view: StoreView, faults: list[str]) -> dict[str, int]:
    try:
        return read_counters(view.files.disk, view.files.paths.counters)
    except CorruptionError as error:
        faults.append(str(error))
        return {}


def _readable(look: Callable[[], dict[str, Any]], faults: list[str]) -> dict[str, Any] | None:
    """What a look finds; None, and a fault, if it cannot be read."""
    try:
        return look()
    except (ConfigError, CorruptionError, MessageIllegalError, StorePermissionError) as error:
        faults.append(str(error))
        return None


def apps_of(view: StoreView) -> list[dict[str, Any]]:
    """One row for each app, for JSON: its query, the versions that the store knows, and the next version."""
    journal = journal_of(view.files, view.max_offset(BATCH_TOPIC, 0))
    rows = []
    for app_id in journal.app_ids():
        entries = journal.entries(app_id)
        batches = sorted((entry for entry in entries if not entry.start), key=lambda entry: entry.version)
        last = batches[-1] if batches else None
        query_ids = journal.query_ids(app_id)

        rows.append(
            {
                "app": app_id,
                "queryId": query_ids[-1] if query_ids else None,
                "firstVersion": batches[0].version if batches else None,
                "lastVersion": None if last is None else last.version,
                "lastRows": None if last is None else last.row_count,
                "lastTopics": None if last is None else list(last.topics),
                "nextVersion": max(entry.version for entry in entries) + 1,
                "replacedQueryIds": sorted(journal.replaced(app_id)),
            }
        )
    return rows


def batches_of(view: StoreView) -> list[dict[str, Any]]:
    """One row for each batch that the store knows."""
    journal = journal_of(view.files, view.max_offset(BATCH_TOPIC, 0))

    return [
        {
            "app": app_id,
            "version": entry.version,
            "versionSource": entry.version_source,
            "queryId": entry.query_id,
            "rows": None if entry.row_count < 0 else entry.row_count,
            "topics": list(entry.topics),
            "physicalOffset": entry.physical_offset,
            "endPhysicalOffset": entry.end,
        }
        for app_id in journal.app_ids()
        for entry in sorted(journal.entries(app_id), key=lambda entry: entry.version)
        if not entry.start
    ]
