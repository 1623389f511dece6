"""The place of a stream: how far it has read.

A stream offset is a dict that Spark keeps and compares as JSON text, so its form is canonical: its keys are sorted.

    {"formatVersion": 1, "last": {"crc": .., "position": .., "size": .., "storeTimestamp": ..}, "physicalOffset": ..,
     "queues": {"flights": {"0": 1200, "1": 1190}}, "storeId": ".."}

These fields are in the first offsets of a query only:

    "initial": true                       the query begins here
    "undecided": true                     nobody could say where. Spark does not keep such an offset
    "begin": {"formatVersion": 1, ..}     in the end of the first micro-batch: the offset at which this batch begins

These fields are there only if the query uses the options:

    "pattern": ".."                       subscribePattern
    "started": ".."                       the option that says where the query began, as one text
    "until": {"asked": "..", "nowMs": .., "queues": {..}}     the option that says where the query ends; when the query
                                          began, and how far its queues reached at that time (if `latest` is asked for)

Nothing here opens a store.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from messagestore import ConfigError
from messagestore.spi import LastRecord, Queues

FORMAT_VERSION = 1
_MOST = (1 << 63) - 1
_MOST_QUEUE_ID = (1 << 31) - 1


def _last_to_json(last: LastRecord) -> dict[str, int]:
    assert last.store_timestamp_ms is not None  # the follower keeps no other one
    return {
        "crc": last.crc,
        "position": last.position,
        "size": last.size,
        "storeTimestamp": last.store_timestamp_ms,
    }


def _last_from_json(fields: Mapping[str, Any]) -> LastRecord:
    return LastRecord(*(_number(fields[name]) for name in ("position", "size", "crc", "storeTimestamp")))


def _queues_to_json(queues: Queues, topics: Iterable[str] = ()) -> dict[str, dict[str, int]]:
    by_topic: dict[str, dict[str, int]] = {topic: {} for topic in topics}
    for (topic, queue_id), offset in queues.items():
        by_topic.setdefault(topic, {})[str(queue_id)] = offset
    return {topic: dict(sorted(by_topic[topic].items())) for topic in sorted(by_topic)}


def _queues_from_json(fields: Mapping[str, Mapping[str, Any]]) -> Queues:
    return {
        (topic, _number(queue_id, _MOST_QUEUE_ID)): _number(offset)
        for topic, queues in fields.items()
        for queue_id, offset in queues.items()
    }


def _number(value: Any, most: int = _MOST) -> int:
    """A number of a store: not negative, and not larger than its field."""
    number = int(value)
    if not 0 <= number <= most:
        raise ValueError("a number that no store has")
    return number


@dataclass(frozen=True)
class Until:
    """The end of a stream that ends, as it was fixed when the query began.

    Parameters
    ----------
    asked : str
        What the option asks for. If a restarted query asks for something else, its end is fixed anew.
    now_ms : int
        The time at which the end was fixed; relative times refer to it.
    queues : dict
        The ends of all queues at that time.
    """

    asked: str
    now_ms: int
    queues: Queues


@dataclass(frozen=True)
class StreamOffset:
    """How far a stream has read.

    Parameters
    ----------
    store_id : str
        The store's id; empty for a store without one.
    topics : tuple of str
        The subscribed topics; some may have no queue yet.
    queues : dict
        The next queue offset of each queue.
    physical_offset : int
        The end of the last record that is covered.
    last : LastRecord | None
        That record.
    pattern : str | None
        The option `subscribePattern`.
    started : str
        The option that says where the query began, as one text; empty if none was given.
    until : Until | None
        Where the query ends, if it ends.
    initial : bool
        A new query begins here.
    undecided : bool
        The query begins here, but where the options say could not be found out. No end of a micro-batch is planned
        from such an offset.
    begin : StreamOffset | None
        In the end of the first micro-batch: where this batch begins.
    """

    store_id: str = ""
    topics: tuple[str, ...] = ()
    queues: Queues = field(default_factory=dict)
    physical_offset: int = 0
    last: LastRecord | None = None
    pattern: str | None = None
    started: str = ""
    until: Until | None = None
    initial: bool = False
    undecided: bool = False
    begin: StreamOffset | None = None

    @property
    def beginning(self) -> StreamOffset | None:
        """Where the first micro-batch begins, if this is its end; None: it begins where the one before it ends.

        The checkpoint does not have the beginning. As long as the first micro-batch is not done, Spark asks the source
        for it again, and the answer may be another one by then.
        """
        return self if self.initial else self.begin

    def to_json(self) -> dict[str, Any]:
        """The form that Spark receives: always the same text for the same offset."""
        # Spark compares the texts of two offsets, so the fields have one order: the alphabetical one.
        fields: dict[str, Any] = {}
        if self.begin is not None:
            fields["begin"] = self.begin.to_json()
        fields["formatVersion"] = FORMAT_VERSION
        if self.initial:
            fields["initial"] = True
        fields["last"] = None if self.last is None else _last_to_json(self.last)
        if self.pattern is not None:
            fields["pattern"] = self.pattern
        fields["physicalOffset"] = self.physical_offset
        fields["queues"] = _queues_to_json(self.queues, self.topics)
        if self.started:
            fields["started"] = self.started
        fields["storeId"] = self.store_id
        if self.undecided:
            fields["undecided"] = True

        if self.until is not None:
            until = self.until
            fields["until"] = {
                "asked": until.asked,
                "nowMs": until.now_ms,
                "queues": _queues_to_json(until.queues),
            }

        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> StreamOffset:
        """Read an offset that Spark has kept.

        Raises
        ------
        ConfigError
            The offset belongs to another source, or to a newer release.
        """
        try:
            version = fields["formatVersion"]
            if version != FORMAT_VERSION:
                raise ValueError(f"format version {version}")

            last, until, begin = fields["last"], fields.get("until"), fields.get("begin")
            return cls(
                store_id=str(fields["storeId"]),
                topics=tuple(sorted(fields["queues"])),
                queues=_queues_from_json(fields["queues"]),
                physical_offset=_number(fields["physicalOffset"]),
                last=None if last is None else _last_from_json(last),
                pattern=None if fields.get("pattern") is None else str(fields["pattern"]),
                started=str(fields.get("started", "")),
                until=None
                if until is None
                else Until(str(until["asked"]), _number(until["nowMs"]), _queues_from_json(until["queues"])),
                initial=bool(fields.get("initial", False)),
                undecided=bool(fields.get("undecided", False)),
                begin=None if begin is None else cls.from_json(begin),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"checkpoint: found the offset {reprlib.repr(fields)} ({error}); allowed are offsets that "
                f"this source wrote, of format version {FORMAT_VERSION}. Use this query's checkpoint, or a new one",
                key="checkpointLocation",
            ) from None
