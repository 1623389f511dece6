"""Staging files of earlier releases, which their tasks may have left to a driver of this one.

They are Arrow IPC files with one row per chunk, and the CRC-32 in the commit message is that of the whole file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.errors import ChecksumError, CorruptionError
from messagestore.files.mapped_file import Disk, File
from messagestore.format import record

FORMATS = (b"messagestore-staging-1", b"messagestore-staging-2")
_MAGIC = b"ARROW1"
_READ_SIZE = 256 * 1024


@dataclass(frozen=True, slots=True)
class EarlierChunk:
    """One chunk of a file that was checked."""

    path: str
    number: int

    def columns(self) -> pa.RecordBatch:
        """The columns, `data` among them. Each call reads them anew."""
        with pa.OSFile(self.path) as source:
            return pa.ipc.open_file(source).get_batch(self.number)


def data_of(columns: pa.RecordBatch) -> NDArray[np.uint8]:
    """The records, in memory that may be changed."""
    _, offsets, values = columns.column("data").buffers()
    begin, end = np.frombuffer(offsets, np.int64, 2).tolist()
    return np.frombuffer(values, np.uint8)[begin:end].copy()


def earlier_chunks(disk: Disk, file: File, size: int, crc: int, hint: str) -> list[EarlierChunk] | None:
    """The chunks of a file of an earlier release; None if it is of a later one.

    Raises
    ------
    ChecksumError
        The file has another size or CRC-32 than its task said.
    CorruptionError
        It has another format.
    """
    if disk.pread(file, len(_MAGIC), 0) != _MAGIC:
        return None
    done = found = 0
    buffer = memoryview(bytearray(_READ_SIZE))
    while count := disk.pread_into(file, buffer, done):
        found = record.crc32(buffer[:count], found)
        done += count
    if (done, found) != (size, crc):
        expected = f"{size} bytes with CRC-32 {crc:08x}"
        raise ChecksumError(file.path, 0, expected, f"{done} bytes with {found:08x}", hint=hint)
    with pa.OSFile(file.path) as source:
        reader = pa.ipc.open_file(source)
        metadata: dict[bytes, Any] = reader.schema.metadata or {}
        if metadata.get(b"format") not in FORMATS:
            raise CorruptionError(file.path, 0, "a staging file", f"an Arrow file with metadata {metadata}", hint=hint)
        return [EarlierChunk(file.path, number) for number in range(reader.num_record_batches)]
