"""New messages as they come, as server-sent events. Each store that somebody follows has one thread.

The thread waits for a change of the store, and then reads for each reader what is new. Each reader has a short list of
events that wait. Events for which a slow reader has no room are counted, and the count is its next event.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from messagestore import ConfigError
from messagestore.spi import Queue, Range, StoreReader
from pyspark_messagestore.dashboard.newest import Filter, columns_of, listed
from pyspark_messagestore.dashboard.reads import Reads
from pyspark_messagestore.dashboard.stored import Stored
from pyspark_messagestore.words import count_words, error_words, shown

MOST_STREAMS = 32
MOST_WAITING = 200
"""The most events that wait for one reader. Further ones are only counted."""
MOST_READ, MOST_READ_SIZE = 1000, 16 << 20
"""The most messages of one queue, and bytes of all queues, that are read at a time: the newest. The rest is counted."""
PAUSE_S, MOST_PAUSE_S, _PAUSES = 0.1, 1.0, 4
"""How long the thread rests between two looks: four times as long as a look took, within these limits."""
WAIT_S = 15.0
SHARE = 4
"""All streams together may read this fraction (1 / SHARE) of what pages may read in a second, on top of it."""


class FullError(Exception):
    """No more streams are given out."""


class _Reader:
    """One open stream. The thread of its store adds events, and the loop of the server takes them."""

    def __init__(self, asked: Mapping[str, str]) -> None:
        self.topic = asked.get("topic", "").strip()
        queue = asked.get("queue", "").strip()
        if not self.topic or (queue and not (queue.isascii() and queue.isdecimal() and len(queue) < 11)):
            raise ConfigError("events: the address must say ?topic=..., and queue=NUMBER or none", key="topic")
        self.queue = int(queue) if queue else None
        self.filter, self.columns = Filter.of(asked), columns_of(asked)
        self.places: dict[Queue, int] | None = None
        self.store_id, self.failed = "", False
        self.read_s = 0.0
        """When messages were last read for it."""
        self.ended = False
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self._dropped = 0
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()

    def add(self, kind: str, *events: dict[str, Any], dropped: int = 0) -> None:
        """Called by the thread of the store."""
        with self._lock:
            room = max(0, MOST_WAITING - len(self._waiting))
            self._waiting += [(kind, event) for event in events[:room]]
            self._dropped += dropped + len(events[room:])
        self.wake()

    def wake(self) -> None:
        """Have `take` look. Called by any thread; the loop may have ended in the meantime."""
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:
            self.ended = True

    async def take(self) -> list[tuple[str, dict[str, Any]]]:
        """The events that wait; none after `WAIT_S` seconds without one."""
        try:
            await asyncio.wait_for(self._ready.wait(), WAIT_S)
        except TimeoutError:
            return []
        self._ready.clear()
        with self._lock:
            events = list(self._waiting)
            if self._dropped:
                events.append(("dropped", {"count": self._dropped}))
            self._waiting.clear()
            self._dropped = 0
        return events


class _Stream(StreamingResponse):
    """The events of a reader, which is removed when the answer ends, even if it ends before it begins."""

    def __init__(self, events: AsyncIterator[str], gone: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._gone()


class Tails:
    """All open streams.

    Parameters
    ----------
    read_limit : int
        What pages may read in a second; 0: as much as anybody asks for.
    """

    def __init__(self, read_limit: int = 0) -> None:
        self._lock = threading.Lock()
        self._reads = Reads(-(-read_limit // SHARE))
        self._readers: dict[str, list[_Reader]] = {}
        self._ended = False

    def stream(self, stored: Stored, asked: Mapping[str, str], *, empty: bool = False) -> StreamingResponse:
        """Events from now on, as an answer; `empty`: only its headers count.

        Raises
        ------
        ConfigError
            The address does not say what is followed.
        FullError
            `MOST_STREAMS` streams are open, or the server ends.
        """
        reader = _Reader(asked)
        reader.ended = empty
        with self._lock:
            if self._ended:
                raise FullError("The dashboard ends.")
            if sum(map(len, self._readers.values())) >= MOST_STREAMS:
                raise FullError(f"{MOST_STREAMS} live lists are open. Close one, or look again later.")
            readers = self._readers.get(stored.name)
            if readers is not None:  # also an empty list: its thread has not looked yet
                readers.append(reader)
            else:
                self._readers[stored.name] = [reader]
                threading.Thread(target=self._watch, args=(stored,), name="dashboard-tail", daemon=True).start()
        return _Stream(_events(reader), lambda: self._gone(stored, reader))

    def end(self) -> None:
        """End all streams, and give out no more."""
        with self._lock:
            self._ended = True
            readers = [reader for readers_of_store in self._readers.values() for reader in readers_of_store]
        for reader in readers:
            reader.ended = True
            reader.wake()

    def _gone(self, stored: Stored, reader: _Reader) -> None:
        with self._lock:
            self._readers[stored.name].remove(reader)

    def _following(self, stored: Stored) -> list[_Reader]:
        """Who follows a store. With nobody left, the caller must end: the next reader starts another thread."""
        with self._lock:
            readers = list(self._readers[stored.name])
            if not readers:
                del self._readers[stored.name]
            return readers

    def _watch(self, stored: Stored) -> None:
        """Read what is new while somebody follows the store."""
        pause = threading.Event()
        while True:
            try:
                with stored.opened() as store:
                    while readers := self._following(stored):
                        begin_s = time.monotonic()
                        # Who waits for long comes first.
                        for reader in sorted(readers, key=lambda waiting: waiting.read_s):
                            _look(stored, store, reader, self._reads)
                        took_s = time.monotonic() - begin_s
                        store.await_change(1.0)
                        # A writer at full rate changes the store all the time. Pages share the interpreter with this
                        # thread, and each of their system calls waits for it while it works.
                        pause.wait(min(MOST_PAUSE_S, max(PAUSE_S, _PAUSES * took_s)))
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the thread goes on for those who follow
                readers = self._following(stored)
                if not readers:
                    return
                for reader in readers:
                    reader.failed = True
                    reader.add("fault", {"sentence": shown(error_words(error))})
                pause.wait(2.0)


async def _events(reader: _Reader) -> AsyncIterator[str]:
    yield "retry: 3000\n\n"
    while not reader.ended:
        events = await reader.take()
        texts = [f"event: {kind}\ndata: {json.dumps(event)}\n\n" for kind, event in events]
        yield "".join(texts) or ": still here\n\n"


def _look(stored: Stored, store: StoreReader, reader: _Reader, reads: Reads) -> None:
    """Give a reader what is new for it, or leave that for a later look if the streams have read as much as they may."""
    ends = {
        queue: end
        for queue, end in store.ends([reader.topic]).queues.items()
        if reader.queue is None or queue[1] == reader.queue
    }
    known, reader.store_id = reader.store_id, store.describe([]).store_id
    if reader.places is None or (known and known != reader.store_id):  # another store is here now
        reader.places, reader.failed = ends, False
        reader.add("begin", {})
        return
    if reader.failed:
        reader.failed = False
        reader.add("again", {})
    places = {queue: min(reader.places.get(queue, 0), end) for queue, end in ends.items()}
    grown = [queue for queue, end in ends.items() if end > places[queue]]
    new = [Range(*queue, max(places[queue], ends[queue] - MOST_READ), ends[queue]) for queue in grown]
    if new and reads.wait_s:
        reader.places = places
        return
    reader.places = ends
    if not new:
        return
    reader.read_s = time.monotonic()
    ranges = _newest(store, new)
    found = []
    for page in store.gather(ranges):
        for number, message in zip(page.queue_offsets.tolist(), page.messages(), strict=True):
            reads.read(message.size)
            fields = listed(stored, message, number, reader.filter, reader.columns)
            if fields is not None:
                found.append((fields["physicalOffset"], _row(fields)))
    found.sort(key=lambda each: each[0])
    left_out = sum(each.start - places[each.topic, each.queue_id] for each in ranges)
    reader.add("message", *(row for _, row in found), dropped=left_out)


def _newest(store: StoreReader, ranges: Sequence[Range]) -> list[Range]:
    """The ends of ranges that have room in `MOST_READ_SIZE` bytes together, with a message of each at least."""
    last = []
    for of_queue, sizes in zip(ranges, store.sizes(ranges), strict=True):
        counted = np.cumsum(np.asarray(sizes)[::-1])
        count = max(1, int(np.searchsorted(counted, MOST_READ_SIZE // len(ranges), side="right")))
        last.append(Range(of_queue.topic, of_queue.queue_id, max(of_queue.start, of_queue.end - count), of_queue.end))
    return last


def _row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a row of the list shows, and where its message is."""
    body = fields.get("decoded")
    text = fields["body"] if body is None else json.dumps(body, ensure_ascii=False)
    if "bodyHidden" in fields and body is None:
        text = "hidden"
    return {
        "topic": fields["topic"],
        "queueId": fields["queueId"],
        "queueOffset": fields["queueOffset"],
        "storeTimestamp": fields["storeTimestamp"],
        "size": fields["size"],
        "place": shown(f"{fields['topic']}/{fields['queueId']} @{fields['queueOffset']}"),
        "tags": shown(fields["tags"] or ""),
        "keys": shown(", ".join(fields["keys"])),
        "cells": [shown(cell) for cell in fields["cells"]],
        "body": count_words(fields["bodySize"], "byte") if text is None else shown(text[:200]),
    }
