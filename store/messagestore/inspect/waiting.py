"""What waits in a store, and since when: delayed messages, open half messages, staged files; and how fast it fills.

These are the figures by which `messagestore status` and a monitoring system judge whether somebody has forgotten
something.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from messagestore.broker.delivery import delivered_so_far
from messagestore.broker.open_halves import OpenHalves
from messagestore.format.layout import LEAST_TAGS_CODE
from messagestore.format.message import BATCH_TOPIC
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.log.batch_journal import BatchJournal
from messagestore.read.view import StoreView

_SPAN_MS = 600_000
"""The growth of a log is measured over this time or longer, if the log is that old."""


def delayed(view: StoreView, journal: BatchJournal) -> dict[str, Any]:
    """How many delayed messages wait, and when the first of them is due (`nextDueMs`, None if none waits).

    Raises
    ------
    CorruptionError
        The progress of deliveries, or a queue, cannot be read.
    """
    queue_ids = view.queue_ids(SCHEDULE_TOPIC)
    progress = delivered_so_far(view.files, journal) if queue_ids else {}
    count, due_ms = 0, []
    for queue_id in queue_ids:
        first = max(progress.get(queue_id + 1, 0), view.min_offset(SCHEDULE_TOPIC, queue_id))
        end = view.max_offset(SCHEDULE_TOPIC, queue_id)
        if first < end:
            count += end - first
            codes = view.units(SCHEDULE_TOPIC, queue_id, first, first + 1)["tags_code"].tolist()
            due_ms += [
                code for code in codes if code >= LEAST_TAGS_CODE
            ]  # another one names a place in a broker's file
    return {"messages": count, "nextDueMs": min(due_ms, default=None)}


def open_halves(view: StoreView) -> dict[str, Any]:
    """How many half messages are open, and when the oldest of them was made (`oldestMs`, None if none is open)."""
    halves = OpenHalves(view)
    halves.refresh()
    oldest = min((half.born_timestamp_ms for half in halves.by_offset.values()), default=None)
    return {"messages": len(halves.by_offset), "oldestMs": oldest}


def staged(folder: str) -> dict[str, Any]:
    """The staged files that wait for a commit, or for the next sweep because nobody will commit them, their bytes, and
    when the oldest of them was written to (`oldestMs`, None if there is none).
    """
    sizes, times_ms = [], []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                sizes.append(status.st_size)
                times_ms.append(status.st_mtime_ns // 1_000_000)
    return {"files": len(sizes), "bytes": sum(sizes), "oldestMs": min(times_ms, default=None)}


def newest_ms(view: StoreView, ends: dict[tuple[str, int], int]) -> int | None:
    """When the last message was stored.

    Parameters
    ----------
    ends : dict of (str, int) to int
        The queue offset behind the last message of each queue; the last message in the log is one of these.
    """
    newest = (-1, 0)
    for (topic, queue_id), end in ends.items():
        if topic != BATCH_TOPIC and end > 0:
            units = view.units(topic, queue_id, end - 1, end)
            if len(units):
                newest = max(newest, (int(units["physical_offset"][0]), int(units["size"][0])))
    head = view.healed(lambda: view.files.commit_log.head(newest[0])) if newest[0] >= 0 else None
    return None if head is None else int(head["store_timestamp_ms"])


def growth(view: StoreView, end: int, now_ms: int) -> dict[str, int] | None:
    """The bytes that were appended lately, and in how many milliseconds: since the newest segment was begun that is ten
    minutes old, or else since the log's first message. None: the log is empty.
    """
    log = view.files.commit_log

    def look() -> dict[str, int] | None:
        for start in reversed(log.offsets):
            head = log.head(start)
            if head is None:
                continue
            span_ms = now_ms - int(head["store_timestamp_ms"])
            if span_ms >= _SPAN_MS or start == log.min_offset:
                return {"bytes": max(0, end - start), "ms": max(0, span_ms)}
        return None

    return view.healed(look)
