"""Gathered records to the rows of a frame: damaged records, what was asked for, compressed bodies, columns.

records -> decode (a bad record is an error, is skipped, or becomes a row with `_error`)
        -> only the messages with the tags, keys and store times that were asked for -> plain bodies -> columns

Spark's source and `scan` both read with this decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from messagestore.errors import CorruptionError
from messagestore.format.arrow_bytes import numpy_of
from messagestore.format.compression import plain_body
from messagestore.format.frame_columns import ERROR, FrameProjection
from messagestore.format.gathered import Gathered
from messagestore.format.javahash import java_hashes
from messagestore.format.layout import SYS_FLAG_COMPRESSED
from messagestore.format.record_decode import COLUMNS

_PLAIN_SIZE = 64 * 1024 * 1024
"""A batch ends when the bodies that were decompressed for it have this many bytes."""

_log = logging.getLogger(__name__)


class _Decoded(NamedTuple):
    """Some messages of one queue: decoded columns, and where the records are."""

    rows: pa.RecordBatch
    part: str
    path: str
    queue_offsets: np.ndarray[tuple[int], np.dtype[np.int64]]
    physical_offsets: np.ndarray[tuple[int], np.dtype[np.int64]]
    bad: bool = False

    def take(self, mask: pa.Array) -> _Decoded:
        chosen = numpy_of(pc.fill_null(mask, False).cast(pa.uint8())).astype(np.bool_)
        if chosen.all():
            return self
        return self._replace(
            rows=self.rows.filter(pa.array(chosen)),
            queue_offsets=self.queue_offsets[chosen],
            physical_offsets=self.physical_offsets[chosen],
        )


class Decoder:
    """Makes the rows of a frame of the records of some ranges.

    Parameters
    ----------
    projection : FrameProjection
    tags, keys : sequence of str | None
        Only messages with one of these tags, and with one of these keys or unique keys; None: all.
    stored_ms : (int, int) | None
        Only messages with a store time from the first of these on and below the second, in ms since 1970; None: all.
    bad_records : str
        What becomes of a record that cannot be read: "fail", "skip", or "keep" a row that has an `_error`.
    verify_body_crc, decompress : bool

    Attributes
    ----------
    tags_codes : frozenset of int | None
        The hashes of the tags that are asked for, by which the store leaves out other messages.
    """

    def __init__(
        self,
        projection: FrameProjection,
        *,
        tags: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        stored_ms: tuple[int, int] | None = None,
        bad_records: str = "fail",
        verify_body_crc: bool = True,
        decompress: bool = True,
    ) -> None:
        self._projection = projection
        self._policy = bad_records
        self._verify = verify_body_crc
        self._tags = None if tags is None else pa.array(tags, pa.string())
        self._keys = None if keys is None else pa.array(keys, pa.string())
        self._stored_ms = stored_ms
        self._decompresses = decompress and "body" in projection.stored
        self.tags_codes = None if self._tags is None else frozenset(java_hashes(self._tags).tolist())

        # Units and the index have only hashes of tags and keys, so the tags and keys themselves are compared.
        needed = [*projection.stored]
        needed += ["tags"] if self._tags is not None else []
        needed += ["keys", "unique_key"] if self._keys is not None else []
        needed += ["store_timestamp_ms"] if stored_ms is not None else []
        needed += ["sys_flag"] if self._decompresses else []
        self._columns = tuple(dict.fromkeys(needed))
        self._bad_count = 0

    def decoded(self, part: Gathered) -> list[_Decoded]:
        """The columns of gathered records. Good and bad records are in different parts.

        Raises
        ------
        CorruptionError
            A record is bad, and that is to be an error.
        """
        count = len(part.sizes)
        if not count:
            return []
        try:
            rows = part.decoded(self._columns, verify_body_crc=self._verify)
        except CorruptionError as error:
            if self._policy == "fail":
                raise
            if count > 1:  # halves, until the bad records are found
                return [*self.decoded(part.rows(0, count // 2)), *self.decoded(part.rows(count // 2, count))]
            return self._bad(part, error)
        return [self._of(part, rows)]

    @staticmethod
    def _of(part: Gathered, rows: pa.RecordBatch, *, bad: bool = False) -> _Decoded:
        name = f"{part.topic}/{part.queue_id}"
        return _Decoded(rows, name, part.path, part.queue_offsets, part.physical_offsets, bad)

    def _bad(self, part: Gathered, error: CorruptionError) -> list[_Decoded]:
        """What becomes of one bad record. Only what its unit says is known."""
        self._count_bad(f"message {part.queue_offsets[0]} of {part.topic}/{part.queue_id}", error)
        if self._policy == "skip":
            return []

        row = {
            "topic": part.topic,
            "queue_id": part.queue_id,
            "queue_offset": int(part.queue_offsets[0]),
            "physical_offset": int(part.physical_offsets[0]),
            "size": int(part.sizes[0]),
        }

        arrays = {name: pa.array([row.get(name)], COLUMNS[name]) for name in self._columns}
        arrays[ERROR] = pa.array([str(error)], pa.string())
        return [self._of(part, pa.RecordBatch.from_pydict(arrays), bad=True)]

    def _count_bad(self, message: str, error: Exception) -> None:
        self._bad_count += 1
        if self._bad_count == 1:
            _log.warning("badRecords=%s: the first bad record is %s: %s", self._policy, message, error)

    def rows(self, messages: _Decoded) -> Iterator[pa.RecordBatch]:
        """The rows of decoded messages."""
        if messages.bad:
            yield self._projection.converted(messages.rows)
            return

        if self._tags is not None:
            messages = messages.take(pc.is_in(messages.rows["tags"], value_set=self._tags))
        if self._keys is not None:
            messages = messages.take(self._has_key(messages.rows))
        if self._stored_ms is not None:
            first_ms, end_ms = self._stored_ms
            times_ms = numpy_of(messages.rows["store_timestamp_ms"])
            messages = messages.take(pa.array((times_ms >= first_ms) & (times_ms < end_ms)))

        for rows in self._plain(messages) if self._decompresses else (messages.rows,):
            if rows.num_rows:
                yield self._projection.converted(rows)

    def _has_key(self, rows: pa.RecordBatch) -> pa.Array:
        """The rows with one of the keys, or with one of them as unique key."""
        keys = rows["keys"]
        hits = pc.is_in(keys.flatten(), value_set=self._keys)
        owners = pc.list_parent_indices(keys).filter(hits)
        by_key = np.zeros(rows.num_rows, np.bool_)
        by_key[numpy_of(owners)] = True
        return pc.or_(pa.array(by_key), pc.is_in(rows["unique_key"], value_set=self._keys))

    def _plain(self, messages: _Decoded) -> Iterator[pa.RecordBatch]:
        """The rows with plain bodies. A loop over the compressed ones: each is a stream of its own."""
        rows = messages.rows
        packed = np.flatnonzero(numpy_of(rows["sys_flag"]) & SYS_FLAG_COMPRESSED)
        if not len(packed):
            yield rows
            return

        flags, bodies = rows["sys_flag"], rows["body"]
        first, size = 0, 0
        plain: dict[int, bytes | None] = {}
        faults: dict[int, str] = {}

        for row in packed.tolist():
            try:
                body = plain_body(bodies[row].as_py(), flags[row].as_py())
            except ValueError as error:
                faults[row - first] = self._fault(messages, row, error)
                plain[row - first] = None
                continue

            plain[row - first] = body
            size += len(body)
            if size >= _PLAIN_SIZE:
                yield self._with_bodies(rows.slice(first, row + 1 - first), plain, faults)
                first, size, plain, faults = row + 1, 0, {}, {}

        if first < rows.num_rows:
            yield self._with_bodies(rows.slice(first), plain, faults)

    def _fault(self, messages: _Decoded, row: int, error: ValueError) -> str:
        message = f"message {messages.queue_offsets[row]} of {messages.part}"
        fault = CorruptionError(
            messages.path,
            int(messages.physical_offsets[row]),
            f"a compressed body of {message}",
            f"one that cannot be read: {error}",
            hint="Set decompress=false to read bodies as they are stored, or badRecords to skip or keep. Both are "
            "options of Spark's source.",
        )

        if self._policy == "fail":
            raise fault
        self._count_bad(message, fault)
        return str(fault)

    def _with_bodies(
        self, rows: pa.RecordBatch, plain: dict[int, bytes | None], faults: dict[int, str]
    ) -> pa.RecordBatch:
        bodies = rows["body"].to_pylist()
        for row, body in plain.items():
            bodies[row] = body
        rows = rows.set_column(rows.schema.get_field_index("body"), "body", pa.array(bodies, pa.binary()))

        if not faults:
            return rows

        if self._policy == "skip":
            good = np.ones(rows.num_rows, np.bool_)
            good[list(faults)] = False
            return rows.filter(pa.array(good))

        errors = pa.array([faults.get(row) for row in range(rows.num_rows)], pa.string())
        return rows.append_column(ERROR, errors)

    def close(self) -> None:
        """Say how many bad records there were."""
        if self._bad_count:
            what = "left out" if self._policy == "skip" else "kept with their error"
            _log.warning("badRecords=%s: %d bad records of this partition were %s", self._policy, self._bad_count, what)
