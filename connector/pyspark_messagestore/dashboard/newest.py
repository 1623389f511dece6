"""The messages of a topic that pass a filter, the newest first, some bytes at a time.

The log is in the order of time, so a search goes back through one span of it after the other. A binary search finds
where the queues stood at each end of a span, and only the topic's own messages in between are read.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from messagestore import ConfigError, MessageExt
from messagestore.spi import SYS_FLAG_COMPRESSED, Gathered, Queue, Range, StoreReader
from pyspark_messagestore.dashboard.stored import Stored, json_value

_FIRST_SPAN = 1 << 20
_LEAST_SPAN = 1 << 12


@dataclass(frozen=True)
class Filter:
    """Which messages are shown. What is empty asks for nothing.

    Parameters
    ----------
    tag, key : str
        The whole tag; one of the keys.
    property : str
        NAME, or NAME=VALUE, of the sender's properties.
    text : str
        What the body contains, in any case of letters.
    """

    tag: str = ""
    key: str = ""
    property: str = ""
    text: str = ""

    @classmethod
    def of(cls, asked: Mapping[str, str]) -> Filter:
        """The filter of an address."""
        return cls(*(asked.get(name, "").strip() for name in ("tag", "key", "property", "text")))

    def __bool__(self) -> bool:
        return bool(self.tag or self.key or self.property or self.text)

    def passes(self, fields: Mapping[str, Any]) -> bool:
        """Whether a message passes. It sees what the page would show, so that what is masked cannot be guessed."""
        if (self.tag and fields["tags"] != self.tag) or (self.key and self.key not in fields["keys"]):
            return False
        if self.property:
            name, equals, value = self.property.partition("=")
            has = fields["properties"].get(name)
            if has is None or (equals and has != value):
                return False
        if not self.text:
            return True
        wanted, decoded = self.text.casefold(), fields.get("decoded")
        body = fields["body"]
        if body is None:  # it is not UTF-8, or hidden
            body = base64.b64decode(fields.get("bodyBase64", "")).decode("utf-8", "replace")
        return wanted in body.casefold() or (decoded is not None and wanted in str(decoded).casefold())


@dataclass
class Found:
    """Messages of a topic, the newest first, and how far the search went back.

    Parameters
    ----------
    messages : list of dict
        As `listed`.
    searched : int
        Bytes of records that were read.
    count : int
        Messages that were read.
    go_on : int | None
        The physical offset at which the search can go on; None: it has reached the beginning.
    back_to_ms : int | None
        The store time of the oldest message that was read.
    """

    messages: list[dict[str, Any]]
    searched: int = 0
    count: int = 0
    go_on: int | None = None
    back_to_ms: int | None = None


def newest(
    stored: Stored,
    store: StoreReader,
    queues: Sequence[Queue],
    wanted: Filter,
    names: Sequence[str],
    *,
    before: int | None,
    low: int,
    high: int,
    most: int,
    most_size: int,
) -> Found:
    """Look for messages backwards from a place in the log.

    Parameters
    ----------
    queues : sequence of (str, int)
        Of one topic.
    names : sequence of str
        The fields of JSON bodies that the list shows.
    before : int | None
        A physical offset: only what lies below it. None: from the end.
    low, high : int
        Where the log begins and ends, in bytes.
    most, most_size : int
        Stop when so many messages were found, or so many bytes of records were read.
    """
    if not queues:
        return Found([])

    upper_at = high if before is None else min(before, high)
    upper = store.ends([queues[0][0]]).queues if before is None else _stood_at(store, queues, upper_at)
    if not wanted and len(queues) > most + 1:
        queues = _latest(store, queues, upper, low, most + 1)
    begins = store.begins(queues)

    found, span = Found([]), _FIRST_SPAN
    while upper_at > low and any(upper[queue] > begins[queue] for queue in queues):
        if len(found.messages) >= most or found.searched >= most_size:
            found.go_on = upper_at
            break

        lower_at = max(low, upper_at - span)
        lower = _stood_at(store, queues, lower_at) if lower_at > low else begins
        firsts = {queue: max(lower[queue], begins[queue]) for queue in queues}
        ranges = [Range(*queue, firsts[queue], upper[queue]) for queue in queues if upper[queue] > firsts[queue]]
        size = sum(int(sizes.sum()) for sizes in store.sizes(ranges)) if ranges else 0
        if size > max(most_size - found.searched, 1) and span > _LEAST_SPAN:
            span //= 4  # there are more bytes in it than may still be read
            continue

        found.go_on = _take(stored, store, ranges, wanted, names, found, most)
        found.searched += size
        stored.reads.read(size)
        if found.go_on is not None:
            break

        upper, upper_at = lower, lower_at
        if size < _FIRST_SPAN // 4:
            span *= 4  # the topic has few messages here
    return found


def _latest(
    store: StoreReader, queues: Sequence[Queue], upper: Mapping[Queue, int], low: int, count: int
) -> Sequence[Queue]:
    """The `count` queues with the latest last messages, because the latest `count` messages of all lie in no more
    queues. All queues, if fewer have messages.
    """
    places = store.places({queue: upper[queue] for queue in queues if upper[queue]})
    filled = [queue for queue, place in places.items() if place.physical_offset >= low]
    return sorted(filled, key=lambda queue: -places[queue].physical_offset)[:count] if len(filled) > count else queues


def _take(
    stored: Stored,
    store: StoreReader,
    ranges: Sequence[Range],
    wanted: Filter,
    names: Sequence[str],
    found: Found,
    most: int,
) -> int | None:
    """Add the messages of a span that pass; the place of the last one if there is no room for the rest."""
    pages = list(store.gather(ranges)) if ranges else []
    places = np.sort(np.concatenate([page.physical_offsets for page in pages])) if pages else np.empty(0, np.int64)
    room = most - len(found.messages)
    least = int(places[-room]) if not wanted and room < len(places) else 0  # without a filter, older ones have no room
    for place, number, message in sorted(_read(pages, least), key=lambda row: -row[0]):
        found.count += 1
        found.back_to_ms = message.store_timestamp_ms
        fields = listed(stored, message, number, wanted, names)
        if fields is not None:
            found.messages.append(fields)
            if len(found.messages) >= most and place != places[0]:
                return place
    return None


def _read(pages: Sequence[Gathered], least: int) -> Iterator[tuple[int, int, MessageExt]]:
    """The place, the number and the message of each record at a physical offset or above."""
    for page in pages:
        first = int(np.searchsorted(page.physical_offsets, least))
        some = page.rows(first, len(page.physical_offsets))
        yield from zip(some.physical_offsets.tolist(), some.queue_offsets.tolist(), some.messages(), strict=True)


def _stood_at(store: StoreReader, queues: Sequence[Queue], physical_offset: int) -> dict[Queue, int]:
    """The number of each queue's first message at a physical offset or above."""
    return dict(store.seek(dict.fromkeys(queues), physical_offset=physical_offset))


def listed(
    stored: Stored, message: MessageExt, number: int, wanted: Filter, names: Sequence[str]
) -> dict[str, Any] | None:
    """A message as a list shows it: `Stored.fields`, and `cells` with some fields of its body; None: it does not pass.

    Filter and cells see a compressed body decompressed. The list has it as it is stored, so that it stays small.
    """
    fields = stored.fields(message, number)
    looks_into_body = bool(wanted.text or names) and message.sys_flag & SYS_FLAG_COMPRESSED
    readable = stored.fields(message, number, plain=True) if looks_into_body else fields
    return fields | {"cells": cells(readable, names)} if wanted.passes(readable) else None


def columns_of(asked: Mapping[str, str]) -> list[str]:
    """The fields of JSON bodies that a list shows as columns: `columns=price,to.city`.

    Raises
    ------
    ConfigError
        There are more than twelve.
    """
    names = [name.strip() for name in asked.get("columns", "").split(",") if name.strip()]
    if len(names) > 12:
        raise ConfigError(f"columns: found {len(names)} names; allowed are 12 at most", key="columns")
    return names


def cells(fields: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The values of some fields of a JSON body as text; empty where there is none. A dot goes into an object."""
    if not names:
        return []
    body = fields.get("decoded")
    if body is None:
        body = json_value(fields["body"])

    texts = []
    for name in names:
        value = body
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        texts.append("" if value is None else str(value)[:200])
    return texts
