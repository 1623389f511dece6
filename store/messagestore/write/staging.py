"""Staging files, which bring encoded records from Spark's tasks to the one writer.

Each task attempt writes one Arrow IPC file of encoded records under a random name; the commit message carries its path,
size and CRC-32. The file has one row per chunk; FORMAT.md lists its columns. The files are not synced: a replay
writes them again, and only what the writer copies into the log counts.

The writer checks the CRC of each whole file before it writes anything of a batch, and then reads one chunk at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.errors import ChecksumError, CorruptionError
from messagestore.files.mapped_file import Disk, File
from messagestore.files.staging_files import Write, finished, no_write, remove
from messagestore.format import record
from messagestore.format.arrow_bytes import array_of, list_array, numpy_of
from messagestore.format.rows import Rows

FORMAT = "messagestore-staging-2"
_BUFFER_SIZE = 64 * 1024
_READ_SIZE = 256 * 1024
"""It stays in the CPU's cache while its CRC is computed."""
_ARROW_MAGIC = b"ARROW1"
_NOT_ITS_TASKS = "This is not the file that its task wrote. Spark's retry writes the batch again."
_KEPT_SIZE = 4 * 1024 * 1024

SCHEMA = pa.schema(
    [
        pa.field("data", pa.large_binary(), nullable=False),
        pa.field("starts", pa.list_(pa.int64()), nullable=False),
        pa.field("run_topics", pa.list_(pa.string()), nullable=False),
        pa.field("run_queue_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("run_counts", pa.list_(pa.int32()), nullable=False),
        pa.field("tags_codes", pa.list_(pa.int64()), nullable=False),
        pa.field("key_hashes", pa.list_(pa.int32()), nullable=False),
        pa.field("key_counts", pa.list_(pa.int32()), nullable=False),
        pa.field("store_timestamp_position", pa.int32(), nullable=False),
        pa.field("property_crc", pa.bool_(), nullable=False),
        pa.field("row_hash_sum", pa.uint64(), nullable=False),
        pa.field("real_topics", pa.list_(pa.string()), nullable=False),
        pa.field("real_queue_ids", pa.list_(pa.int32()), nullable=False),
    ],
    metadata={"format": FORMAT},
)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A finished staging file. All values are plain, so that a commit message can carry them.

    Parameters
    ----------
    path : str
    size : int
        The size of the file in bytes.
    crc : int
        The CRC-32 of the whole file.
    row_count : int
    """

    path: str
    size: int
    crc: int
    row_count: int


class _CrcSink:
    """The sink that Arrow writes to. It appends to a file and computes the CRC."""

    def __init__(self, disk: Disk, file: File) -> None:
        self.disk, self.file = disk, file
        self.size = self.crc = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.disk.pwrite(self.file, view, self.size)
        self.crc = record.crc32(view, self.crc)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Do nothing, since `write` keeps nothing back."""

    def close(self) -> None:
        self.closed = True

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


class StagingWriter:
    """Writes one staging file, and deletes it if it is not finished.

    Parameters
    ----------
    folder : str
        `spark/staging` of the store, or another folder that tasks and driver can access; created if it is missing.
    disk : Disk | None
    write : Write | None
        The write that the file belongs to: it decides who deletes the file when the attempt, or its driver, dies.
    """

    def __init__(self, folder: str, disk: Disk | None = None, *, write: Write | None = None) -> None:
        self.disk = disk or Disk()
        self.disk.mkdir(folder)  # a copy of a store may have come without its empty folders
        self.path = (write or no_write()).path(folder)
        self._file = self.disk.open_new(self.path, 0)
        self._sink = _CrcSink(self.disk, self._file)
        # Arrow writes many small parts; what is larger than the buffer goes to the file at once.
        self._buffered = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _BUFFER_SIZE)
        self._writer = pa.ipc.new_file(self._buffered, SCHEMA)
        self._row_count = 0
        self._finished = False

    def write(self, chunk: Rows) -> None:
        """Append one chunk."""
        arrays: list[pa.Array] = [
            _one_binary(chunk.data),
            _one_list(chunk.starts, pa.int64()),
            _list_of(chunk.run_topics),
        ]
        arrays += [_one_list(chunk.run_queue_ids, pa.int32()), _one_list(chunk.run_counts, pa.int32())]
        arrays += [_one_list(chunk.tags_codes, pa.int64()), _one_list(chunk.key_hashes, pa.int32())]
        arrays += [_one_list(chunk.key_counts, pa.int32())]
        arrays += [
            list_array([chunk.store_timestamp_position], pa.int32()),
            list_array([chunk.property_crc], pa.bool_()),
        ]
        arrays += [list_array([chunk.row_hash_sum], pa.uint64())]
        arrays += [_list_of([topic for topic, _ in chunk.real_queues])]
        arrays += [_one_list(np.array([queue_id for _, queue_id in chunk.real_queues], np.int32), pa.int32())]
        self._writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self._row_count += chunk.row_count

    def finish(self) -> StagedFile:
        """Complete and close the file."""
        self._writer.close()
        self._buffered.close()
        self._file.close()
        path = finished(self.path)
        self.disk.rename(self.path, path)
        self.path = path
        self._finished = True
        return StagedFile(self.path, self._sink.size, self._sink.crc, self._row_count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self._file.close()
            remove([self.path], self.disk)


def _one_binary(data: NDArray[np.uint8]) -> pa.Array:
    offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(data)])


def _one_list(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(array_of(np.array([0, len(values)], np.int32)), array_of(values).cast(kind))


def _list_of(texts: list[str]) -> pa.Array:
    return list_array([texts], pa.list_(pa.string()))


class StagedChunks:
    """The chunks of several staging files, in the given order (by partition), for `transaction.append_batch`.

    Raises
    ------
    ChecksumError
        A file is not what its task wrote.
    """

    def __init__(self, files: Iterable[StagedFile], disk: Disk | None = None) -> None:
        self.disk = disk or Disk()
        self._places: list[tuple[str, int]] = []
        self._open: tuple[str, pa.RecordBatchFileReader] | None = None
        self._data_of: tuple[str, File, list[tuple[int, int]]] | None = None
        self._kept: dict[str, pa.RecordBatchFileReader] = {}
        self._latest: tuple[int, Rows] | None = None
        """The number of the chunk that was read last, and its rows without data: a chunk is read several times."""
        self._buffer = [np.empty(0, np.uint8)]
        room = _KEPT_SIZE
        for staged in files:
            data = _checked(self.disk, staged, keep=staged.size <= room)
            with pa.OSFile(staged.path) if data is None else pa.BufferReader(data) as source:
                reader = pa.ipc.open_file(source)
                if (reader.schema.metadata or {}).get(b"format") != FORMAT.encode():
                    raise CorruptionError(
                        staged.path,
                        0,
                        FORMAT,
                        str(reader.schema.metadata),
                        hint="Spark's retry writes the batch again.",
                    )
                self._places += [(staged.path, i) for i in range(reader.num_record_batches)]
            if data is not None:  # the file is small: it stays in memory and is not read again
                room -= staged.size
                self._kept[staged.path] = pa.ipc.open_file(pa.py_buffer(data))

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int, *, with_data: bool) -> Rows:
        """Chunk `index`."""
        path, number = self._places[index]
        if self._latest is None or self._latest[0] != index:
            self._latest = (index, _rows_of(self._reader(path).get_batch(number)))
        rows = self._latest[1]
        return replace(rows, **self._data(path, number)) if with_data else rows

    def _reader(self, path: str) -> pa.RecordBatchFileReader:
        """What reads the columns of a file except its data."""
        if path in self._kept:
            return self._kept[path]
        if self._open is None or self._open[0] != path:
            others = pa.ipc.IpcReadOptions(included_fields=list(range(1, len(SCHEMA))))
            self._open = (path, pa.ipc.open_file(pa.OSFile(path), options=others))
        return self._open[1]

    def _data(self, path: str, number: int) -> dict[str, Any]:
        """The records of a chunk: where they are, or those of a small file themselves."""
        if path in self._kept:
            _, offsets, values = self._kept[path].get_batch(number).column("data").buffers()
            begin, end = np.frombuffer(offsets, np.int64, 2).tolist()
            return {"data": np.frombuffer(values, np.uint8)[begin:end].copy()}  # Arrow's own must not be changed
        if self._data_of is None or self._data_of[0] != path:
            file = self.disk.open(path)
            self._data_of = (path, file, _data_places(self.disk, file))
        _, file, places = self._data_of
        return {"stored": _Stored(self.disk, file, *places[number], self._buffer)}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A part of a staging file, which comes into memory block by block: see `Stored`.

    `buffer` has one array as its only item, which all chunks share: new memory costs page faults.
    """

    disk: Disk
    file: File
    position: int
    size: int
    buffer: list[NDArray[np.uint8]]

    def part(self, begin: int, end: int) -> _Stored:
        return replace(self, position=self.position + begin, size=end - begin)

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        size = end - begin
        if not 0 <= begin <= end <= self.size:
            raise ValueError(f"found bytes {begin} to {end}; allowed is 0 to {self.size}")
        if len(self.buffer[0]) < size:
            self.buffer[0] = np.empty(size, np.uint8)
        block = self.buffer[0][:size]
        done = self.disk.pread_into(self.file, block.data, self.position + begin)
        if done != size:
            at = self.position + begin
            raise CorruptionError(self.file.path, at, f"{size} bytes", f"{done}", hint=_NOT_ITS_TASKS)
        return block


def _data_places(disk: Disk, file: File) -> list[tuple[int, int]]:
    """Position and size of the `data` of each chunk in a file whose CRC was checked.

    Arrow would read them into new memory. Its footer lists the record batches; the metadata of each lists its buffers,
    and the third one holds the bytes of the first column (behind its validity and its offsets).
    """
    end = disk.length(file) - len(_ARROW_MAGIC) - 4
    (size,) = struct.unpack("<i", disk.pread(file, 4, end))
    footer = _Flat(disk.pread(file, size, end - size))
    places = []
    for block in footer.items(footer.field(footer.root, 3), 24):
        offset, metadata_size = struct.unpack_from("<qi", footer.data, block)
        batch = _Flat(disk.pread(file, metadata_size, offset)[8:])  # behind its own size
        header = batch.table(batch.field(batch.root, 2))
        position, size = struct.unpack_from("<qq", batch.data, batch.items(batch.field(header, 2), 16)[2])
        places.append((offset + metadata_size + position, size))
    return places


class _Flat:
    """The few things that `_data_places` needs of a flatbuffer: tables and vectors, by their positions."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.root = self.table(0)

    def table(self, position: int) -> int:
        """What the offset at a position leads to."""
        return position + int(struct.unpack_from("<I", self.data, position)[0])

    def field(self, table: int, number: int) -> int:
        """Where a field of a table is."""
        vtable = table - int(struct.unpack_from("<i", self.data, table)[0])
        return table + int(struct.unpack_from("<H", self.data, vtable + 4 + 2 * number)[0])

    def items(self, position: int, size: int) -> range:
        """Where the items of a vector of structures are."""
        vector = self.table(position)
        count = int(struct.unpack_from("<I", self.data, vector)[0])
        return range(vector + 4, vector + 4 + count * size, size)


def _rows_of(row: pa.RecordBatch) -> Rows:
    """The rows of a chunk, without their data."""
    return Rows.unplaced(
        _values(row, "starts"),
        store_timestamp_position=row.column("store_timestamp_position")[0].as_py(),
        run_topics=row.column("run_topics")[0].as_py(),
        run_queue_ids=_values(row, "run_queue_ids"),
        run_counts=_values(row, "run_counts"),
        tags_codes=_values(row, "tags_codes"),
        key_hashes=_values(row, "key_hashes"),
        key_counts=_values(row, "key_counts"),
        row_hash_sum=row.column("row_hash_sum")[0].as_py(),
        property_crc=row.column("property_crc")[0].as_py(),
        real_queues=tuple(
            zip(row.column("real_topics")[0].as_py(), _values(row, "real_queue_ids").tolist(), strict=True)
        ),
    )


def _values(row: pa.RecordBatch, name: str) -> NDArray[Any]:
    return numpy_of(row.column(name).flatten())


def _checked(disk: Disk, staged: StagedFile, *, keep: bool) -> memoryview | None:
    """Read a whole file and compare its CRC; its bytes, if they are to be kept."""
    try:
        file = disk.open(staged.path)
    except FileNotFoundError:
        raise CorruptionError(
            staged.path,
            0,
            f"a staging file of {staged.size} bytes",
            "no file",
            hint="Let tasks and driver see the same stagingDir.",
        ) from None
    crc, size = 0, 0
    wanted = staged.size + 1  # one more: the file may have grown
    buffer = memoryview(bytearray(wanted if keep else min(_READ_SIZE, wanted)))
    while count := disk.pread_into(file, buffer, size):
        crc = record.crc32(buffer[:count], crc)
        size += count
        if keep:
            break
    if (size, crc) != (staged.size, staged.crc):
        expected = f"{staged.size} bytes with CRC-32 {staged.crc:08x}"
        raise ChecksumError(staged.path, 0, expected, f"{size} bytes with {crc:08x}", hint=_NOT_ITS_TASKS)
    return buffer[:size] if keep else None
