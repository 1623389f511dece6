"""Messages of many queues as one frame: what `scan` gives.

bounds -> the ranges of each queue -> units -> records (a thread reads ahead) -> rows (`decoding`) -> the filter

Which queues there are, and where they end, is decided once, when the scan is made. What the bounds leave out is not
read: offsets and times are ranges of units, tags are compared with the hashes in the units, and keys are found by the
index. Tags, keys and times are then compared in the records themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from messagestore.errors import ConfigError
from messagestore.format import arguments
from messagestore.format.frame_columns import FRAME_COLUMNS, FrameProjection
from messagestore.format.gathered import Gathered
from messagestore.format.message import check_readable_queue, is_ordinary_topic
from messagestore.read import queue_records
from messagestore.read.ahead import Ahead
from messagestore.read.decoding import Decoder
from messagestore.read.query import find_keys, offset_behind_time, runs_of
from messagestore.read.queue_records import READ_BYTES, READ_ROWS
from messagestore.read.view import StoreView

Bound: TypeAlias = int | datetime | Mapping[tuple[str, int], int] | None
"""Where a scan begins or ends: a queue offset, a store time, or a queue offset for each of some queues."""
CLOCK_MARGIN_MS = 3_600_000
"""By how much the store times of a queue may go back without a scan by time missing a message: a clock that was set."""
_READ_AHEAD = 2
_FEW_ROWS = 4096
"""Batches with fewer rows are combined where a scan leaves out messages."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAMES = tuple(column.name for column in FRAME_COLUMNS)
_CORE = tuple(column.name for column in FRAME_COLUMNS if column.core)
_BOUNDS = "a queue offset, a datetime with a time zone, or a dict of (topic, queue id) to a queue offset"
_NO_TIME_MS = (-(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scan reads, checked.

    Parameters
    ----------
    topics : tuple of str
    pattern : re.Pattern | None
        Also the topics whose whole name matches it, except retry, dead letter and system topics.
    start, end : Bound
        A `datetime` is a store time. None: the first message of each queue that is left, and the visible end.
    tags, keys : tuple of str | None
    projection : FrameProjection
        The columns that are given.
    read : FrameProjection
        The same, and those that the filter needs.
    filter : pc.Expression | None
    """

    topics: tuple[str, ...]
    pattern: re.Pattern[str] | None
    start: Bound
    end: Bound
    tags: tuple[str, ...] | None
    keys: tuple[str, ...] | None
    projection: FrameProjection
    read: FrameProjection
    filter: pc.Expression | None

    @classmethod
    def of(
        cls,
        topics: str | re.Pattern[str] | Sequence[str],
        start: Bound = None,
        end: Bound = None,
        tags: str | Sequence[str] | None = None,
        keys: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,
    ) -> Scan:
        """The scan that somebody asks for.

        Raises
        ------
        ConfigError
            An argument is none of what is allowed.
        MessageIllegalError
            A topic cannot be the name of a folder.
        """
        pattern = topics if isinstance(topics, re.Pattern) else None
        named = () if isinstance(topics, re.Pattern) else _texts("topics", topics)

        for topic in named:
            check_readable_queue(topic, 0)
        bounds = _bound("start", start), _bound("end", end)
        for name, bound in zip(("start", "end"), bounds, strict=True):
            if isinstance(bound, Mapping) and pattern is None and (others := {topic for topic, _ in bound} - {*named}):
                raise ConfigError(
                    f"{name}: found an offset in {', '.join(sorted(others))}; allowed are the topics that are read: "
                    f"{', '.join(named)}",
                    key=name,
                    value=bound,
                )
        names = _CORE if columns is None else arguments.names("columns", columns, _NAMES)

        if filter is not None:
            arguments.instance("filter", filter, pc.Expression)
        also = [name for name in _asked_by(filter) if name not in names]

        return cls(
            named,
            pattern,
            *bounds,
            arguments.tags(tags),
            None if keys is None else _texts("keys", keys),
            FrameProjection.named(names),
            FrameProjection.named([*names, *also]),
            filter,
        )

    @property
    def leaves_out(self) -> bool:
        """Whether messages between the ends of the ranges may be left out."""
        return self.tags is not None or self.keys is not None or self.filter is not None

    def reader(self, view: StoreView) -> pa.RecordBatchReader:
        """The rows. The view belongs to them from now on, and is closed behind the last one."""
        try:
            ranges = list(self._ranges(view))
            read = self.read.of_broker(view.broker_name) if self.read.names_broker else self.read
        except BaseException:
            view.close()
            raise
        return pa.RecordBatchReader.from_batches(self.projection.arrow_schema, self._batches(view, ranges, read))

    # ---- which ranges

    def _ranges(self, view: StoreView) -> Iterator[tuple[str, int, int, int]]:
        """What is read: topic, queue id, first queue offset, and the one behind the last.

        The view loads how far the log is visible once, so all queues end at the same moment.
        """
        view.refresh()
        topics = self.topics
        if self.pattern is not None:
            matching = [name for name in view.topics() if is_ordinary_topic(name) and self.pattern.fullmatch(name)]
            topics = tuple(sorted(matching))

        for topic in topics:
            queue_ids = view.queue_ids(topic)
            numbers = None if self.keys is None else find_keys(view, topic, self.keys)
            for queue_id in queue_ids:
                first, end = self._bounds(view, topic, queue_id)
                if numbers is None:
                    runs: Iterable[tuple[int, int]] = [(first, end)]
                else:
                    wanted = np.array(numbers.get(queue_id, []), np.int64)
                    runs = runs_of(wanted[(wanted >= first) & (wanted < end)])
                yield from ((topic, queue_id, *run) for run in runs if run[0] < run[1])

    def _bounds(self, view: StoreView, topic: str, queue_id: int) -> tuple[int, int]:
        last = view.max_offset(topic, queue_id)
        first, end = self.start, self.end

        if isinstance(first, Mapping):
            first = first.get((topic, queue_id))
        if isinstance(end, Mapping):
            end = end.get((topic, queue_id))

        if first is None:
            first = view.min_offset(topic, queue_id)
        elif isinstance(first, datetime):
            first = offset_behind_time(view, topic, queue_id, _first_ms(first) - 1 - CLOCK_MARGIN_MS)

        if end is None:
            end = last
        elif isinstance(end, datetime):
            end = offset_behind_time(view, topic, queue_id, _first_ms(end) - 1 + CLOCK_MARGIN_MS)
        return first, min(end, last)

    @property
    def _stored_ms(self) -> tuple[int, int] | None:
        """The store times that are asked for; None: all."""
        least, most = _NO_TIME_MS
        if isinstance(self.start, datetime):
            least = _first_ms(self.start)
        if isinstance(self.end, datetime):
            most = _first_ms(self.end)
        return None if (least, most) == _NO_TIME_MS else (least, most)

    # ---- rows

    def _batches(
        self, view: StoreView, ranges: Sequence[tuple[str, int, int, int]], read: FrameProjection
    ) -> Iterator[pa.RecordBatch]:
        try:
            decoder = Decoder(read, tags=self.tags, keys=self.keys, stored_ms=self._stored_ms)
            with Ahead(_parts(view, ranges, decoder.tags_codes), _READ_AHEAD) as parts:
                rows = self._filtered(_decoded(decoder, parts))
                yield from _one_at_least(self.projection.arrow_schema, combined(rows) if self.leaves_out else rows)
        finally:
            view.close()

    def _filtered(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        names = self.projection.arrow_schema.names
        for batch in batches:
            rows = batch if self.filter is None else batch.filter(self.filter)
            if rows.num_rows:
                yield rows if rows.schema.names == names else rows.select(names)


def _parts(
    view: StoreView, ranges: Iterable[tuple[str, int, int, int]], tags_codes: frozenset[int] | None
) -> Iterator[Gathered]:
    for topic, queue_id, first, end in ranges:
        yield from queue_records.blocks(view, topic, queue_id, first, end, READ_ROWS, READ_BYTES, tags_codes)


def _decoded(decoder: Decoder, parts: Iterator[Gathered]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        decoded_parts = decoder.decoded(part)
        del part  # so that the next part can use its memory
        for messages in decoded_parts:
            yield from decoder.rows(messages)


def _one_at_least(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches, or an empty one: Polars makes no frame of none."""
    first = next(batches, None)
    yield pa.record_batch([pa.array([], field.type) for field in schema], schema) if first is None else first
    yield from batches


def combined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, in batches that are not small because other messages were left out."""
    kept: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        kept.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _FEW_ROWS or size >= READ_BYTES:
            yield pa.concat_batches(kept) if len(kept) > 1 else kept[0]
            kept, rows, size = [], 0, 0
    if kept:
        yield pa.concat_batches(kept)


def _first_ms(time: datetime) -> int:
    """The first millisecond since 1970 that is not before a time."""
    return -((_EPOCH - time) // timedelta(milliseconds=1))


def _texts(name: str, value: object) -> tuple[str, ...]:
    """One text or several."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence | set | frozenset) or not texts:
        raise arguments.refused(name, value, "text, or a list with at least one")
    return tuple(dict.fromkeys(arguments.text(name, text) for text in texts))


def _bound(name: str, value: object) -> Bound:
    if value is None:
        return None

    if isinstance(value, datetime):
        if value.tzinfo is None or value.utcoffset() is None:
            raise ConfigError(
                f"{name}: found {value} without a time zone; allowed is one with a time zone, such as "
                f"datetime(2026, 1, 31, tzinfo=UTC)",
                key=name,
                value=value,
            )
        return value

    if isinstance(value, Mapping):
        for key, offset in value.items():
            if not (isinstance(key, tuple) and len(key) == 2):
                raise arguments.refused(name, key, _BOUNDS)
            check_readable_queue(*key)
            arguments.whole_number(name, offset, 0)
        return dict(value)

    if isinstance(value, str | float | bool):
        raise arguments.refused(name, value, _BOUNDS)
    return arguments.whole_number(name, value, 0)


def _asked_by(filter: pc.Expression | None) -> list[str]:
    """The columns that an expression uses. Arrow does not list them, but it refuses to filter when one is missing.

    Raises
    ------
    ConfigError
        The expression uses other columns, or compares what cannot be compared.
    """
    if filter is None:
        return []
    whole = FrameProjection.named(_NAMES).arrow_schema.empty_table()
    try:
        whole.filter(filter)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        why = str(error).split(" in topic:")[0]  # Arrow goes on with the schema
        raise ConfigError(
            f"filter: found {filter}, which cannot be used: {why}. The columns are {', '.join(_NAMES)}",
            key="filter",
            value=filter,
        ) from error
    used = []
    for name in _NAMES:
        try:
            whole.drop_columns([name]).filter(filter)
        except pa.ArrowInvalid:
            used.append(name)
    return used
