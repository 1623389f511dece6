"""Who holds a store, how it was left, and what it contains: what `messagestore status` says."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

from messagestore.errors import CorruptionError
from messagestore.files.recoveries import read_recoveries
from messagestore.files.state import State, boot_hash
from messagestore.files.writer_lock import broker_waits, probe_attached, probe_java, probe_writer
from messagestore.format.message import BATCH_TOPIC
from messagestore.inspect.queues import Places, by_topic, places_of
from messagestore.log.batch_search import batches_from, read_batch
from messagestore.log.condition import Left, Traces, look
from messagestore.log.walk import Walk
from messagestore.read.view import StoreView

_TRIES = 100
_LEFT_OPEN = {
    Left.IDLE: "idle",
    Left.IN_FLIGHT: "killed",
    Left.RECOVERING: "recovering",
    Left.RESTARTED: "restarted",
    Left.UNREADABLE: "unreadable",
    Left.BROKER: "broker",
}


def status_of(view: StoreView, looked: Looked | None = None) -> dict[str, Any]:
    """Everything that `status` shows, for JSON. `faults` lists what could not be read, in words."""
    files, paths = view.files, view.files.paths
    faults: list[str] = []
    looked = looked or Looked(view)
    standing, queues = looked.standing, looked.places(faults)
    batches = queues.get((BATCH_TOPIC, 0), (0, 0, 0))
    shown_end = max((end for _, _, end in queues.values()), default=files.commit_log.min_offset)

    return {
        "root": paths.root,
        "storeId": view.store_id or None,
        "brokerName": broker_name(view, faults),
        **standing,
        "unproven": unproven(view),
        **behind(view),
        "diskUsed": disk_used(view),
        "commitLog": {
            "segments": len(files.commit_log.offsets),
            "segmentSize": files.commit_log.segment_size,
            "minOffset": files.commit_log.min_offset,
            "maxOffset": view.known_end if view.known_end is not None else shown_end,
            "bytesOnDisk": disk_size(paths.commit_log),
        },
        "consumeQueues": {"queues": len(queues), "bytesOnDisk": disk_size(paths.consume_queue)},
        "index": {"files": len(files.disk.names(paths.index)), "bytesOnDisk": disk_size(paths.index)},
        "topics": by_topic(view, queues),
        "messages": sum(high - low for (topic, _), (low, high, _) in queues.items() if topic != BATCH_TOPIC),
        "batches": batches[1] - batches[0],
        "lastBatch": _last_batch(view, batches[1], faults),
        "recoveries": _recoveries(view, faults),
        "faults": faults,
    }


def _recoveries(view: StoreView, faults: list[str]) -> list[dict[str, Any]]:
    """The reports of the last recoveries that mended something, the newest first."""
    try:
        return read_recoveries(view.files.disk, view.files.paths.recoveries)[::-1]
    except CorruptionError as error:
        faults.append(str(error))
        return []


def broker_name(view: StoreView, faults: list[str]) -> str | None:
    """The name of the broker that wrote the store; what could not be read is added to `faults`, in words."""
    try:
        return view.broker_name or None
    except CorruptionError as error:
        faults.append(str(error))
        return None


def _standing(view: StoreView) -> dict[str, Any]:
    """Who holds the store and how it was left: `abort`, `state` and the locks, all at one moment.

    A writer changes `state` before its first byte and after its last, both under the writer lock. So if neither `abort`
    nor `state` has changed while the locks were examined, all three belong together. They also do if the lock was held,
    and the same writer had the store open before and after: one at work changes `state` faster than anybody looks.
    """
    for _ in range(_TRIES):
        traces = look(view.files)
        held = _holders(view)
        again = look(view.files, traces.promise)
        if traces == again or (held["writer"] is not None and _is_at_work(traces, again)):
            break
    return {
        "heldBy": held,
        "abort": {"present": traces.abort is not None, "ours": traces.ours, "content": traces.abort},
        "state": _state(traces.state if view.store_id else None),
        "left": _left(traces, held),
    }


def _is_at_work(before: Traces, after: Traces) -> bool:
    """Whether the same writer of ours had the store open at two moments."""
    states = before.state, after.state
    return (
        before.abort == after.abort
        and before.condition.ours_open
        and after.condition.ours_open
        and all(state is not None and not state.recovering and not state.poisoned for state in states)
        and len({(state.writer_pid, state.boot_hash) for state in states if state is not None}) == 1
    )


def _holders(view: StoreView) -> dict[str, Any]:
    root = view.files.paths.root
    broker = probe_java(root)
    return {
        "broker": None if broker is None else broker.words,
        "brokerPid": broker.pid if broker is not None and broker.pid > 0 else None,
        "brokerWaits": broker_waits(root),
        "writer": probe_writer(view.files.paths.writer_lock),
        "server": probe_writer(view.files.paths.serve_lock),
        "attached": broker is None and probe_attached(root),
    }


def _left(traces: Traces, held: dict[str, Any]) -> str:
    """How the store was left, in one word. `messagestore status` says what each means, and what to do about it."""
    left, condition, state = traces.left, traces.condition, traces.state
    if condition.closed:
        return "closed"
    if held["broker"] is not None or held["writer"] is not None:
        return "open"
    if condition.ours_open and state is not None and state.poisoned:
        return "poisoned"
    return "attached" if left is Left.IDLE and held["attached"] else _LEFT_OPEN[left]


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


class Looked:
    """What several views of a store show, looked for once."""

    def __init__(self, view: StoreView) -> None:
        self._view = view

    @cached_property
    def standing(self) -> dict[str, Any]:
        """Who holds the store, and how it was left."""
        return _standing(self._view)

    def places(self, faults: list[str]) -> Places:
        """Where each queue begins and ends. What could not be read is added to `faults`, in words."""
        places, more = self._places
        faults += more
        return places

    @cached_property
    def _places(self) -> tuple[Places, list[str]]:
        faults: list[str] = []
        return places_of(self._view, faults), faults


def _last_batch(view: StoreView, end: int, faults: list[str]) -> dict[str, Any] | None:
    try:
        if view.tail is None:
            batches = list(batches_from(view.files, end - 1, end)) if end else []
        else:  # the units in the queue's files were never synced
            units = view.units(BATCH_TOPIC, 0, max(0, end - 1), end)
            last = read_batch(view.files.commit_log, int(units["physical_offset"][0])) if len(units) else None
            batches = [] if last is None else [last]
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


def unproven(view: StoreView) -> dict[str, Any] | None:
    """What a reader does not show, because no writer has recovered the store since the machine was started."""
    tail = view.tail
    if tail is None or tail.complete:
        return None
    return {"records": tail.hidden_count, "begin": tail.end, "end": tail.hidden_end, "more": tail.limited}


def behind(view: StoreView) -> dict[str, int | None]:
    """How many bytes at the end of the log no reader sees yet, and how many no sync has covered, by the files.

    What another process has in memory cannot be seen: it may have synced a moment ago, or have puts in its
    pool (`transientStorePoolEnable`), unless nothing is in flight. None: the files do not say, as after a broker.
    """
    files = view.files
    state = files.state_file.read() if view.store_id else None
    if state is None or view.known_end is None:
        return {"dispatchBehind": None, "flushBehind": None, "poolBehind": None}
    end = state.visible_end
    if not state.idle:
        files.commit_log.load()
        for run in Walk(files.commit_log, end, few=True):
            end = run.end
        state = files.state_file.read() or state  # what was dispatched during the walk is not behind
    return {
        "dispatchBehind": max(0, end - state.visible_end),
        "flushBehind": max(0, end - state.flushed_end),
        "poolBehind": 0 if state.idle else None,
    }


def disk_used(view: StoreView) -> dict[str, int]:
    """How full the disk is under the log and under the queues, in percent."""
    paths = view.files.paths
    folders = {"commitlog": paths.commit_log, "consumequeue": paths.consume_queue}
    return {name: view.files.disk.used_percent(path) for name, path in folders.items() if view.files.disk.exists(path)}


def disk_size(folder: str) -> int:
    """The bytes that the files of a folder occupy on the disk; sparse files occupy less than their size."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name), follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue  # retention has just deleted it
    return total
