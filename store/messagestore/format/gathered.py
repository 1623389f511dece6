"""Consecutive messages of one queue as bytes: the records that a range of its units points to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.format import record
from messagestore.format.message import MessageExt
from messagestore.format.record_decode import Expected, decode


@dataclass(frozen=True, slots=True)
class Gathered:
    """Messages of one queue, in order: their units, and the bytes of their records.

    Parameters
    ----------
    topic : str
    queue_id : int
    start, end : int
        The number of the first message that was looked at, and the number after that of the last.
    queue_offsets : int64[n]
        The numbers of the messages: all from `start` to `end`, unless the caller asked for some tags only.
    physical_offsets, sizes : int64[n], int32[n]
        The units.
    data : uint8[m]
        The records, possibly with bytes of other records in between.
    positions : int64[n]
        Where each record begins in `data`.
    path : str
        The path of the log, for errors.
    renumbered : bool[n] or None
        The messages whose record may contain another number than the number of its unit, because a broker restored a
        topic that had been deleted. None: no record may contain another number.
    """

    topic: str
    queue_id: int
    start: int
    end: int
    queue_offsets: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int32]
    data: NDArray[np.uint8]
    positions: NDArray[np.int64]
    path: str
    renumbered: NDArray[np.bool_] | None = None

    def rows(self, first: int, last: int) -> Gathered:
        """Some of the messages, by their position among these."""
        some = slice(first, last)
        return replace(
            self,
            queue_offsets=self.queue_offsets[some],
            physical_offsets=self.physical_offsets[some],
            sizes=self.sizes[some],
            positions=self.positions[some],
            renumbered=None if self.renumbered is None else self.renumbered[some],
        )

    def decoded(self, columns: Sequence[str], *, verify_body_crc: bool = True) -> pa.RecordBatch:
        """Some columns of the messages; nothing else is decoded. Every record is checked against its unit and CRCs.

        Parameters
        ----------
        columns : sequence of str
            Names in `record_columns.COLUMNS`.
        verify_body_crc : bool
            Check the CRCs, too.

        Raises
        ------
        CorruptionError
            A record is not the one that its unit describes, or a CRC does not match.
        """
        expected = Expected(self.topic, self.queue_id, self.queue_offsets, self.physical_offsets, self.renumbered)
        return decode(
            self.data,
            self.positions,
            self.sizes,
            columns,
            verify_body_crc=verify_body_crc,
            expected=expected,
            path=self.path,
        )

    def messages(self) -> Iterator[MessageExt]:
        """The messages one by one, in a readable form; the CRCs of each message are checked.

        Raises
        ------
        CorruptionError
            A record is damaged, or belongs to another place.
        """
        columns = (self.physical_offsets, self.positions, self.sizes)
        for place, position, size in zip(*(column.tolist() for column in columns), strict=True):
            data = self.data[position : position + size].tobytes()
            yield record.decode_message(data, path=self.path, physical_offset=place)
