"""What `messagestore status` and `messagestore groups` find out about a store, without a lock and without a write."""

from __future__ import annotations

import os
from typing import Any

from messagestore import ConfigError, CorruptionError
from messagestore.spi import (
    BATCH_TOPIC,
    ConsumerOffsets,
    State,
    StoreView,
    batches_from,
    boot_hash,
    probe_attached,
    probe_java,
    probe_writer,
    read_batch,
)
from pyspark_messagestore import cli_output as out

_MOST_QUEUES_SHOWN = 16
_TRIES = 100


def status_of(view: StoreView) -> dict[str, Any]:
    """Everything that is shown, for JSON. `faults` lists what could not be read, in words."""
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
    """Who holds the store and how it was left: `abort`, `state` and the locks as they were at one moment.

    A writer changes `state` before its first byte and after its last, both under the writer lock. So when neither
    `abort` nor `state` has changed while the locks were looked at, they belong together.
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
    """(topic, queue id) -> min offset, max offset, and the physical offset behind its last message."""
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
        else:  # the queue's own units were not synced
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
    """What a reader does not show of a store that no writer has recovered since the machine was started."""
    tail = view.tail
    if tail is None or tail.complete:
        return None
    return {"records": tail.hidden_count, "begin": tail.end, "end": tail.hidden_end, "more": tail.limited}


def _disk_size(folder: str) -> int:
    """Bytes that the files of a folder take on the disk; sparse files take less than their size."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name), follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue  # deleted by retention just now
    return total


# ---- consumer groups


def groups_of(view: StoreView) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each queue of the topics that groups have read, and what could not be read, in words.

    A queue without an offset was never read by the group: all that is in it is lag. As in mqadmin consumerProgress lag
    is below 0 where a group was further than the queue is now (it was made again, or the log was cut).
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


def group_table(rows: list[dict[str, Any]]) -> None:
    """Show it."""
    columns = [("group", False), ("topic", False), ("queue", True), ("committed", True), ("max", True), ("lag", True)]
    cells = [["-" if value is None else str(value) for value in row.values()] for row in rows]
    out.table(columns, cells)


# ---- for a person


def status_lines(found: dict[str, Any]) -> None:
    """Show it."""
    log, queues, index = found["commitLog"], found["consumeQueues"], found["index"]
    segments = f"{out.count_words(log['segments'], 'segment')} of {out.size_words(log['segmentSize'])}"
    rows = [
        ("store", found["root"]),
        ("id", found["storeId"] or "none: this project has not written it"),
        ("held by", _holder_words(found["heldBy"])),
        ("left", _LEFT_WORDS[found["left"]]),
    ]
    if found["state"] is not None:
        rows.append(("state", _state_words(found["state"])))
    rows += [
        ("log", f"{log['minOffset']} to {log['maxOffset']}, {segments}, {out.size_words(log['bytesOnDisk'])} on disk"),
        ("queues", f"{queues['queues']:,}, {out.size_words(queues['bytesOnDisk'])} on disk"),
        ("index", f"{out.count_words(index['files'], 'file')}, {out.size_words(index['bytesOnDisk'])} on disk"),
        ("messages", f"{found['messages']:,} in {out.count_words(len(found['topics']), 'topic')}"),
    ]
    hidden = found["unproven"]
    if hidden is not None:
        count = out.count_words(hidden["records"], "record") + (" and more" if hidden["more"] else "")
        rows.append(("not shown", f"{count} behind {hidden['begin']}, not proven to stay: run `messagestore recover`"))
    last = found["lastBatch"]
    if last is not None:
        about = f"{last['app']} version {last['version']}, {out.count_words(last['rows'], 'row')}"
        rows.append(("batches", f"{found['batches']:,}, the last: {about}"))
    out.facts(rows)
    if found["topics"]:
        out.line()
        columns = [("topic", False), ("messages", True), ("queues", False)]
        out.table(columns, [(row["topic"], f"{row['messages']:,}", _queue_words(row)) for row in found["topics"]])


def _holder_words(held: dict[str, Any]) -> str:
    if held["broker"] is not None:
        return str(held["broker"])
    if held["writer"] is not None:
        return f"a writer, {held['writer']}"
    return "nobody; a writer is attached and keeps brokers out" if held["attached"] else "nobody"


_LEFT_WORDS = {
    "closed": "closed cleanly",
    "open": "open, somebody is at work",
    "attached": "open, idle: nothing is in flight",
    "idle": "idle, nothing in flight: the last writer ended without closing the store, as Spark's workers do; the next "
    "writer goes on, and before a broker starts run `messagestore recover`",
    "killed": "by a writer that was killed in the middle of a write: the next writer, or `messagestore recover`, "
    "repairs it; what was acknowledged is safe",
    "recovering": "by a recovery that was killed: the next writer, or `messagestore recover`, starts it again",
    "poisoned": "by a writer whose sync failed: check the disk, then run `messagestore recover`",
    "restarted": "open when the machine went down: the next writer, or `messagestore recover`, checks what is left",
    "broker": "by a broker that was killed: `messagestore recover` repairs it, or the broker itself",
    "unknown": "open, and nothing says by whom: run `messagestore recover`",
}
"""What `left` means, and what to do about it."""


def _state_words(state: dict[str, Any]) -> str:
    words = [f"visible up to {state['visibleEnd']}", f"clean up to {state['cleanEnd']}"]
    if state["inFlight"] is not None:
        words.append(f"in flight from {state['inFlight']}")
    words += [word for word, name in (("ASYNC_FLUSH", "asyncFlush"), ("poisoned", "poisoned")) if state[name]]
    words.append(
        f"written by pid {state['writerPid']}" + ("" if state["thisBoot"] else " before the machine was started")
    )
    return ", ".join(words)


def _queue_words(row: dict[str, Any]) -> str:
    """`0: 0-12  1: 0-7`, and how many more there are."""
    parts = [f"{queue}: {q['minOffset']}-{q['maxOffset']}" for queue, q in row["queues"].items()]
    more = len(parts) - _MOST_QUEUES_SHOWN
    parts = parts[:_MOST_QUEUES_SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return "  ".join(parts) or "none yet"
