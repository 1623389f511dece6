"""Staging files: hand encoded records from Spark tasks to the process that commits.

    | data | columns | data | columns | ... | places and CRCs of all of these | name of the format, number of chunks |

Each task attempt writes one file of encoded records under a random name; the commit message carries its name, its size,
the CRC-32 of its table (the places and CRCs, and what follows them), and what is needed to recognise its rows in a
batch that is in the log already. FORMAT.md describes the file. It is not synced: a replay writes it again, and only
what the writer copies into the log counts.

The files are opened when the batch turns out to be new. The writer compares the CRC of the table, and those of the
columns of each chunk, before it writes anything of a batch. The data of a large file are read once, block by block,
when they go into the log. Their CRC is compared when the last block of a chunk was read; if it is wrong, the writer
takes back what it wrote, and the batch is not in the log.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.batches.plan import Contents, contents_of
from messagestore.errors import ChecksumError, CorruptionError, StoreError
from messagestore.files.disk import Disk, File
from messagestore.files.staging_files import Write, finished, no_write, path_of, remove
from messagestore.format import record
from messagestore.format.arrow_bytes import array_of, list_array, numpy_of
from messagestore.format.rows import Rows
from messagestore.signal_handlers import pass_on

FORMAT = "messagestore-staging-1"
_END = struct.Struct("<24sq")
_PLACES = struct.Struct("<8q")
_ALIGNED_SIZE = 8
"""Data and columns begin at multiples of this, so that numbers in the columns do."""
_BUFFER_SIZE = 64 * 1024
_NOT_ITS_TASKS = "This is not the file that its task wrote. Spark's retry writes the batch again."
_KEPT_SIZE = 4 * 1024 * 1024
"""Files of this size in total are read as a whole, and stay in memory."""
_KEPT_COLUMNS_SIZE = 32 * 1024 * 1024
"""Columns of this size in total stay in memory until the batch is in the log; others are read three times."""

SCHEMA = pa.schema(
    [
        pa.field("starts", pa.list_(pa.int64()), nullable=False),
        pa.field("run_topics", pa.list_(pa.string()), nullable=False),
        pa.field("run_queue_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("run_counts", pa.list_(pa.int32()), nullable=False),
        pa.field("tags_codes", pa.list_(pa.int64()), nullable=False),
        pa.field("key_hashes", pa.list_(pa.int32()), nullable=False),
        pa.field("key_counts", pa.list_(pa.int32()), nullable=False),
        pa.field("store_timestamp_position", pa.int32(), nullable=False),
        pa.field("property_crc", pa.bool_(), nullable=False),
        pa.field("digest", pa.uint64(), nullable=False),
        pa.field("real_topics", pa.list_(pa.string()), nullable=False),
        pa.field("real_queue_ids", pa.list_(pa.int32()), nullable=False),
    ],
    metadata={"format": FORMAT},
)
_INT32S, _INT64S, _TEXTS = map(pa.list_, (pa.int32(), pa.int64(), pa.string()))
_OFFSETS = struct.Struct("=2i")
"""The offsets of a list column with one row."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A finished staging file. All values are plain, so that a commit message can carry them.

    Parameters
    ----------
    name : str
        The name of the file in the staging folder.
    size : int
        The size of the file in bytes.
    crc : int
        The CRC-32 of the table at the end of the file, which holds the CRCs of everything else.
    row_count : int
    digest : int
        The digest of the rows.
    topics : tuple of str
        The topics of the rows, and those to which delayed rows go when they are due, in order.
    """

    name: str
    size: int
    crc: int
    row_count: int
    digest: int
    topics: tuple[str, ...]

    @property
    def contents(self) -> Contents:
        """What a batch in the log is compared with."""
        return Contents(self.row_count, self.digest, frozenset(self.topics))


class _Part(NamedTuple):
    """Bytes of a file, and their CRC-32."""

    position: int
    size: int
    crc: int


class StagingWriter:
    """Writes one staging file, and deletes it if it is not finished.

    Parameters
    ----------
    folder : str
        `spark/staging` of the store, or another folder that tasks and driver can access; created if it is missing.
    disk : Disk | None
    write : Write | None
        The write that the file belongs to: it decides who deletes the file when the attempt, or its driver, dies.
    client : str
        For whom a server writes the file.

    Raises
    ------
    ConfigError
        The write cannot be part of a file's name.
    """

    def __init__(self, folder: str, disk: Disk | None = None, *, write: Write | None = None, client: str = "") -> None:
        self.disk = disk or Disk()
        self.disk.mkdir(folder)  # a copy of a store may have come without its empty folders
        self.path = (write or no_write()).path(folder, client)
        self._file = self.disk.open_new(self.path, 0)
        self._waiting = bytearray()
        self._size = 0
        self._table = bytearray()
        self._contents = Contents()
        self._finished = False

    def write(self, chunk: Rows, data_crc: int | None = None) -> None:
        """Append one chunk. `data_crc` is the CRC-32 of its records, if it is known."""
        arrays = [
            _one_list(chunk.starts, _INT64S),
            _list_of(chunk.run_topics),
            _one_list(chunk.run_queue_ids, _INT32S),
            _one_list(chunk.run_counts, _INT32S),
            _one_list(chunk.tags_codes, _INT64S),
            _one_list(chunk.key_hashes, _INT32S),
            _one_list(chunk.key_counts, _INT32S),
            list_array([chunk.store_timestamp_position], pa.int32()),
            list_array([chunk.property_crc], pa.bool_()),
            list_array([chunk.digest], pa.uint64()),
            _list_of([topic for topic, _ in chunk.real_queues]),
            _one_list(np.array([queue_id for _, queue_id in chunk.real_queues], np.int32), _INT32S),
        ]

        columns = memoryview(pa.record_batch(arrays, schema=SCHEMA).serialize())
        self._table += _PLACES.pack(*self._put(chunk.data.data, data_crc), 0, *self._put(columns), 0)
        self._contents += contents_of(chunk)

    def _put(self, data: memoryview | bytes, crc: int | None = None) -> _Part:
        """Append bytes. Small parts are written together."""
        part = _Part(self._size, len(data), record.crc32(data) if crc is None else crc)
        if len(data) >= _BUFFER_SIZE:
            self._flush()
            self.disk.pwrite(self._file, data, self._size)
            self._size += len(data)
        else:
            self._waiting += data
            self._size += len(data)

        padding = bytes(-self._size % _ALIGNED_SIZE)
        self._waiting += padding
        self._size += len(padding)
        if len(self._waiting) >= _BUFFER_SIZE:
            self._flush()
        return part

    def _flush(self) -> None:
        if self._waiting:
            self.disk.pwrite(self._file, self._waiting, self._size - len(self._waiting))
            self._waiting = bytearray()

    def finish(self) -> StagedFile:
        """Complete and close the file."""
        end = self._put(bytes(self._table) + _END.pack(FORMAT.encode(), len(self._table) // _PLACES.size))
        self._flush()
        self._file.close()
        path = finished(self.path)
        try:
            self.disk.rename(self.path, path)
        except FileNotFoundError as error:
            pass_on(error)
            raise StoreError(
                f"{self.path}: this file of rows that wait for their batch was removed while it was written, so "
                "nothing of this batch was appended. Either another driver runs the same query, on this checkpoint or "
                "a copy of it, and has removed what it took for the rest of a dead one: let one driver run a query. Or "
                "stagingTtl is shorter than the pauses of a task: let it be longer than a batch takes"
            ) from error
        self.path = path
        self._finished = True

        contents = self._contents
        return StagedFile(
            os.path.basename(path),
            self._size,
            end.crc,
            contents.row_count,
            contents.digest,
            tuple(sorted(contents.topics)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self._file.close()
            remove([self.path], self.disk)


def _one_list(values: NDArray[Any], kind: pa.ListType) -> pa.Array:
    items = array_of(values)
    return _list_with(items if items.type == kind.value_type else items.cast(kind.value_type), kind)


def _list_of(texts: list[str]) -> pa.Array:
    items = [text.encode() for text in texts]
    offsets = np.zeros(len(items) + 1, np.int32)
    np.cumsum([len(item) for item in items], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(items))]
    return _list_with(pa.Array.from_buffers(pa.string(), len(items), buffers), _TEXTS)


def _list_with(items: pa.Array, kind: pa.ListType) -> pa.Array:
    """A column of one row, a list of these items; Arrow's own ways of making one cost several times as much."""
    offsets = pa.py_buffer(_OFFSETS.pack(0, len(items)))
    return pa.Array.from_buffers(kind, 1, [None, offsets], children=[items])


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Where a chunk is; `whole` is its file, if that stays in memory."""

    path: str
    data: _Part
    columns: _Part
    whole: memoryview | None


class _Promise:
    """What the rows of a file must be, according to its `StagedFile`, and those chunks that were not looked at yet."""

    def __init__(self, path: str, staged: StagedFile, chunk_count: int) -> None:
        self.path, self.promised = path, staged.contents
        self._found, self._left = Contents(), chunk_count
        self.check()

    def take(self, rows: Rows) -> None:
        self._found += contents_of(rows)
        self._left -= 1
        self.check()

    def check(self) -> None:
        """Compare, once every chunk was looked at."""
        if not self._left and self._found != self.promised:
            raise CorruptionError(self.path, 0, f"{self.promised}", f"{self._found}", hint=_NOT_ITS_TASKS)


class StagedChunks:
    """The chunks of several staging files, in the given order (by partition), for `append.append_batch`.

    The files are opened by `open`, or by the first question about a chunk. `contents` does not open them.

    Parameters
    ----------
    folder : str
        The staging folder.
    files : iterable of StagedFile
    disk : Disk | None

    Raises
    ------
    ConfigError
        A name is not that of a staging file.
    ChecksumError, CorruptionError
        When the files are opened, or a chunk is read: a file is missing, or is not what its task wrote. For the data of
        a large file, this is raised when they are read.
    """

    def __init__(self, folder: str, files: Iterable[StagedFile], disk: Disk | None = None) -> None:
        self.disk = disk or Disk()
        self._files = [(path_of(folder, staged.name), staged) for staged in files]
        self._opened: list[_Chunk] | None = None
        self._promises: dict[int, _Promise] = {}
        """The promise to which each chunk belongs whose columns were not read yet."""
        self._open: File | None = None
        self._kept: dict[int, Rows] = {}
        self._kept_room = _KEPT_COLUMNS_SIZE
        self._latest: tuple[int, Rows] | None = None
        """The chunk whose columns were read last, if there is no room to keep them."""
        self._buffer = [np.empty(0, np.uint8)]

    @property
    def contents(self) -> Contents:
        """What the tasks have written, by their own words. No file is opened."""
        return sum((staged.contents for _, staged in self._files), Contents())

    def open(self) -> list[_Chunk]:
        """Open all files, and compare their tables. A second call does nothing."""
        if self._opened is None:
            room, opened = _KEPT_SIZE, list[_Chunk]()
            for path, staged in self._files:
                chunks = _chunks_of(self.disk, path, staged, keep=staged.size <= room)
                if chunks and chunks[0].whole is not None:
                    room -= staged.size
                promise = _Promise(path, staged, len(chunks))
                self._promises.update(dict.fromkeys(range(len(opened), len(opened) + len(chunks)), promise))
                opened += chunks
            self._opened = opened
        return self._opened

    def __len__(self) -> int:
        return len(self.open())

    def read(self, index: int, *, with_data: bool) -> Rows:
        """Chunk `index`."""
        chunk, rows = self.open()[index], self._kept.get(index)
        if rows is None and self._latest is not None and self._latest[0] == index:
            rows = self._latest[1]
        if rows is None:
            rows = self._read_columns(chunk)
            promise = self._promises.pop(index, None)
            if promise is not None:
                promise.take(rows)
            if chunk.columns.size <= self._kept_room:
                self._kept_room -= chunk.columns.size
                self._kept[index] = rows
            else:
                self._latest = index, rows
        if not with_data:
            return rows
        if chunk.whole is not None:  # the rows are stamped, and the chunk may be read again
            return replace(rows, data=np.frombuffer(_part_of(chunk, chunk.data), np.uint8).copy())
        return replace(rows, stored=self._stored(chunk))

    def _stored(self, chunk: _Chunk) -> _Stored:
        return _Stored(self.disk, self._file(chunk.path), 0, chunk.data.size, _Data(chunk.data), self._buffer)

    def _read_columns(self, chunk: _Chunk) -> Rows:
        if chunk.whole is not None:
            columns: memoryview | bytes = _part_of(chunk, chunk.columns)
        else:
            columns = self.disk.pread(self._file(chunk.path), chunk.columns.size, chunk.columns.position)
            _compare(chunk.path, chunk.columns, len(columns), record.crc32(columns))
        rows = _rows_of(pa.ipc.read_record_batch(pa.py_buffer(columns), SCHEMA))
        if rows.end != chunk.data.size:
            expected = f"records of {chunk.data.size} bytes"
            raise CorruptionError(chunk.path, chunk.columns.position, expected, f"{rows.end}", hint=_NOT_ITS_TASKS)
        return rows

    def _file(self, path: str) -> File:
        if self._open is None or self._open.path != path:
            self._open = _opened(self.disk, path)
        return self._open


class _Data:
    """The data of a chunk in a large file, which are read once, in order, and compared with their CRC."""

    __slots__ = ("_crc", "_done", "part")

    def __init__(self, part: _Part) -> None:
        self.part = part
        self._done = self._crc = 0

    def take(self, path: str, begin: int, block: memoryview) -> None:
        """Note that a block was read."""
        if begin != self._done:
            raise ValueError(f"found a block at {begin}; allowed is {self._done}, where the one before ended")
        self._crc = record.crc32(block, self._crc)
        self._done += len(block)
        if self._done == self.part.size:
            _compare(path, self.part, self._done, self._crc)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Bytes `start` to `end - 1` of a chunk's data, which come into memory block by block: see `Stored`.

    `buffer` has one array as its only item, which all chunks share: new memory costs page faults.
    """

    disk: Disk
    file: File
    start: int
    end: int
    data: _Data
    buffer: list[NDArray[np.uint8]]

    def part(self, begin: int, end: int) -> _Stored:
        return replace(self, start=self.start + begin, end=self.start + end)

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        size = end - begin
        if not 0 <= begin <= end <= self.end - self.start:
            raise ValueError(f"found bytes {begin} to {end}; allowed is 0 to {self.end - self.start}")
        if len(self.buffer[0]) < size:
            self.buffer[0] = np.empty(size, np.uint8)
        block = self.buffer[0][:size]
        position = self.data.part.position + self.start + begin
        done = self.disk.pread_into(self.file, block.data, position)
        if done != size:
            raise CorruptionError(self.file.path, position, f"{size} bytes", f"{done}", hint=_NOT_ITS_TASKS)
        self.data.take(self.file.path, self.start + begin, block.data)
        return block


def _opened(disk: Disk, path: str) -> File:
    try:
        return disk.open(path)
    except FileNotFoundError as error:
        pass_on(error)
        hint = (
            "Let one driver run a query. Where the path is a folder, let tasks and driver also see the same "
            "stagingDir, and stagingTtl be longer than a batch takes."
        )
        raise CorruptionError(path, 0, "a staging file", "no file", hint=hint) from None


def _chunks_of(disk: Disk, path: str, staged: StagedFile, *, keep: bool) -> list[_Chunk]:
    """The chunks of a file, after a check that its table is the one that its task wrote; with `keep`, also its data."""
    with _opened(disk, path) as file:
        size = disk.length(file)
        whole = memoryview(disk.pread(file, size, 0)) if keep and size == staged.size else None
        end = disk.pread(file, _END.size, size - _END.size) if size >= _END.size else b""
        count = _END.unpack(end)[1] if len(end) == _END.size else 0
        table_size = _END.size + count * _PLACES.size
        if not 0 <= table_size <= size:
            # The count is damaged; the CRC below refuses what is read.
            table_size = min(_END.size, size)
        table = disk.pread(file, table_size, size - table_size)

    if (size, record.crc32(table)) != (staged.size, staged.crc):
        expected = f"{staged.size} bytes with CRC-32 {staged.crc:08x} at the end"
        end_found = f"{size} bytes with {record.crc32(table):08x}"
        raise ChecksumError(path, 0, expected, end_found, hint=_NOT_ITS_TASKS)

    name = _END.unpack_from(table, table_size - _END.size)[0].rstrip(b"\0").decode(errors="replace")
    if name != FORMAT:
        hint = (
            "Use one release on the driver and on all executors, and write the batch again. Nothing of it was written."
        )
        raise CorruptionError(path, 0, FORMAT, name, hint=hint)

    chunks = []
    for places in _PLACES.iter_unpack(table[: -_END.size]):
        chunks.append(_Chunk(path, _Part(*places[:3]), _Part(*places[4:7]), whole))
        for part in (chunks[-1].data, chunks[-1].columns) if whole is not None else ():
            _compare(path, part, part.size, record.crc32(_part_of(chunks[-1], part)))
    return chunks


def _part_of(chunk: _Chunk, part: _Part) -> memoryview:
    assert chunk.whole is not None
    return chunk.whole[part.position : part.position + part.size]


def _compare(path: str, part: _Part, size: int, crc: int) -> None:
    if (size, crc) != (part.size, part.crc):
        expected = f"{part.size} bytes with CRC-32 {part.crc:08x}"
        raise ChecksumError(path, part.position, expected, f"{size} bytes with {crc:08x}", hint=_NOT_ITS_TASKS)


_SCALARS = [
    field.name for field in SCHEMA if not pa.types.is_list(field.type) or pa.types.is_string(field.type.value_type)
]
_LISTS = [field.name for field in SCHEMA if field.name not in _SCALARS]


def _rows_of(row: pa.RecordBatch) -> Rows:
    """The rows of a chunk, without their data."""
    columns = dict(zip(row.schema.names, row.columns, strict=True))
    scalars: dict[str, Any] = {name: columns[name][0].as_py() for name in _SCALARS}
    # A column has one list, so its values are those of the list. Asking for them by row takes three times as long.
    arrays: dict[str, Any] = {name: numpy_of(columns[name].values) for name in _LISTS}

    real_queues = tuple(zip(scalars.pop("real_topics"), arrays.pop("real_queue_ids").tolist(), strict=True))
    return Rows.unplaced(**arrays, **scalars, real_queues=real_queues)
