"""Finds out who holds a store on this host, how it was left and what it contains, without a lock and without a write.

The results consist of numbers, text, lists and dicts, and `messagestore status --json` writes them unchanged.
"""

from __future__ import annotations

import os
from typing import Any

from messagestore.errors import ConfigError, CorruptionError
from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.files.state import State, boot_hash
from messagestore.files.writer_lock import probe_attached, probe_java, probe_writer
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.batch_record import read_batch
from messagestore.log.batch_search import batches_from
from messagestore.read.view import StoreView
from messagestore.write.catching_up import journal_of

_TRIES = 100


def status_of(view: StoreView) -> dict[str, Any]:
    """Everything that `status` shows, for JSON. `faults` lists what could not be read, in words."""
    files, paths = view.files, view.files.paths
    faults: list[str] = []
    standing = _standing(view)
    queues = _queues(view, faults)
    batches = queues.get((BATCH_TOPIC, 0), (0, 0, 0))
    shown_end = max((end for _, _, end in queues.values()), default=files.commit_log.min_offset)
    return {
        "root": paths.root,
        "storeId": view.store_id or None,
        **standing,
        "unproven": _unproven(view),
        "commitLog": {
            "segments": len(files.commit_log.files.offsets),
            "segmentSize": files.commit_log.segment_size,
            "minOffset": files.commit_log.min_offset,
            "maxOffset": view.visible.end if view.visible.end is not None else shown_end,
            "bytesOnDisk": _disk_size(paths.commit_log),
        },
        "consumeQueues": {"queues": len(queues), "bytesOnDisk": _disk_size(paths.consume_queue)},
        "index": {"files": len(files.disk.names(paths.index)), "bytesOnDisk": _disk_size(paths.index)},
        "topics": _topics(view, queues),
        "messages": sum(high - low for (topic, _), (low, high, _) in queues.items() if topic != BATCH_TOPIC),
        "batches": batches[1] - batches[0],
        "lastBatch": _last_batch(view, batches[1], faults),
        "faults": faults,
    }


def _standing(view: StoreView) -> dict[str, Any]:
    """Who holds the store and how it was left: `abort`, `state` and the locks, all at one moment.

    A writer changes `state` before its first byte and after its last, both under the writer lock. So if neither `abort`
    nor `state` has changed while the locks were examined, all three belong together.
    """
    for _ in range(_TRIES):
        before = view.files.read_abort(), view.files.state_file.read() if view.store_id else None
        held = _holders(view)
        if before == (view.files.read_abort(), view.files.state_file.read() if view.store_id else None):
            break
    text, state = before
    ours = text is not None and text == view.files.abort_token
    return {
        "heldBy": held,
        "abort": {"present": text is not None, "ours": ours, "content": text},
        "state": _state(state),
        "left": _left(text is not None, ours, held, state),
    }


def _holders(view: StoreView) -> dict[str, Any]:
    root = view.files.paths.root
    broker = probe_java(root)
    return {
        "broker": None if broker is None else broker.words,
        "brokerPid": broker.pid if broker is not None and broker.pid > 0 else None,
        "writer": probe_writer(view.files.paths.writer_lock),
        "attached": broker is None and probe_attached(root),
    }


def _left(abort: bool, ours: bool, held: dict[str, Any], state: State | None) -> str:
    """How the store was left, in one word of `_LEFT_WORDS`."""
    if not abort:
        return "closed"
    if held["broker"] is not None or held["writer"] is not None:
        return "open"
    if not ours:
        return "broker"
    if state is None:
        return "unknown"
    if state.poisoned:
        return "poisoned"
    if state.boot_hash != boot_hash():
        return "restarted"
    if state.recovering:
        return "recovering"
    if not state.idle:
        return "killed"
    return "attached" if held["attached"] else "idle"


def _state(state: State | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {
        "counter": state.counter,
        "visibleEnd": state.visible_end,
        "cleanEnd": state.clean_end,
        "inFlight": state.in_flight if state.in_flight >= 0 else None,
        "poisoned": state.poisoned,
        "asyncFlush": state.asynchronous,
        "clean": state.clean,
        "writerPid": state.writer_pid,
        "thisBoot": state.boot_hash == boot_hash(),
    }


def _queues(view: StoreView, faults: list[str]) -> dict[tuple[str, int], tuple[int, int, int]]:
    """The minimum offset, the maximum offset, and the physical offset after the last message, of each queue."""
    found: dict[tuple[str, int], tuple[int, int, int]] = {}
    for topic, ids in sorted(view.topics().items()):
        for queue_id in ids:
            try:
                low, high = view.min_offset(topic, queue_id), view.max_offset(topic, queue_id)
                last = view.units(topic, queue_id, max(low, high - 1), high)
                ends = last["physical_offset"] + last["size"]
                found[(topic, queue_id)] = (low, high, int(ends.max(initial=0)))
            except CorruptionError as error:
                faults.append(str(error))
    return found


def _topics(view: StoreView, queues: dict[tuple[str, int], tuple[int, int, int]]) -> list[dict[str, Any]]:
    topics: dict[str, dict[str, Any]] = {}
    for name in view.files.topics.names:
        topics[name] = {"topic": name, "messages": 0, "queues": {}}
    for (topic, queue_id), (low, high, _) in queues.items():
        if topic != BATCH_TOPIC:
            row = topics.setdefault(topic, {"topic": topic, "messages": 0, "queues": {}})
            row["messages"] += high - low
            row["queues"][str(queue_id)] = {"minOffset": low, "maxOffset": high}
    for name, row in topics.items():
        config = view.files.topics.get(name)
        row["writeQueueNums"] = config.write_queue_nums if config is not None else None
    return [topics[name] for name in sorted(topics)]


def _last_batch(view: StoreView, end: int, faults: list[str]) -> dict[str, Any] | None:
    try:
        if view.tail is None:
            batches = list(batches_from(view.files, end - 1, end)) if end else []
        else:  # the units in the queue's files were never synced
            units = view.units(BATCH_TOPIC, 0, max(0, end - 1), end)
            found = read_batch(view.files.commit_log, int(units["physical_offset"][0])) if len(units) else None
            batches = [] if found is None else [found]
    except CorruptionError as error:
        faults.append(str(error))
        return None
    for batch in batches:
        return {
            "app": batch.app_id,
            "version": batch.version,
            "physicalOffset": batch.physical_offset,
            "end": batch.end,
            "rows": batch.row_count,
        }
    return None


def _unproven(view: StoreView) -> dict[str, Any] | None:
    """What a reader does not show, because no writer has recovered the store since the machine was started."""
    tail = view.tail
    if tail is None or tail.complete:
        return None
    return {"records": tail.hidden_count, "begin": tail.end, "end": tail.hidden_end, "more": tail.limited}


def _disk_size(folder: str) -> int:
    """The bytes that the files of a folder occupy on the disk; sparse files occupy less than their size."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name), follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue  # retention has just deleted it
    return total


# ---- consumer groups


def groups_of(view: StoreView) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each queue of the topics that groups have read, and what could not be read, in words.

    If a queue has no committed offset, the group never read it, and all of its messages are lag. As in mqadmin
    consumerProgress, the lag is below 0 if the group had read further than the queue's end is now, because the queue
    was created again or the log was cut.
    """
    offsets = ConsumerOffsets(view.files.disk, view.files.paths.root)
    offsets.load()
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for group in offsets.groups:
        for topic in offsets.topics(group):
            committed = offsets.get(topic, group)
            try:
                ids = sorted({*committed, *view.queue_ids(topic)})
                ends = {
                    queue_id: (view.min_offset(topic, queue_id), view.max_offset(topic, queue_id)) for queue_id in ids
                }
            except (ConfigError, CorruptionError) as error:
                faults.append(str(error))
                continue
            for queue_id, (low, high) in ends.items():
                offset = committed.get(queue_id)
                rows.append(
                    {
                        "group": group,
                        "topic": topic,
                        "queueId": queue_id,
                        "committedOffset": offset,
                        "maxOffset": high,
                        "lag": high - (low if offset is None else offset),
                    }
                )
    return rows, list(dict.fromkeys(faults))


# ---- batches


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
                "lastTopics": None if last is None or last.topics is None else list(last.topics),
                "nextVersion": max(entry.version for entry in entries) + 1,
                "replacedQueryIds": sorted(journal.replaced(app_id)),
            }
        )
    return rows
