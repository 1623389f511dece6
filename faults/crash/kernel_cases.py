"""What the compiled kernel is given to break: columns with hostile contents, and arguments that lie about their sizes.

`difference` compares the kernel with the scalar codec. `abused` calls its functions with arguments that do not fit
together, which may end in an error and in nothing else: the sanitizers see each byte that it touches wrongly.

    python -m crash.kernel_cases SEED COUNT             as the mode `fuzz` starts it, with a kernel that has sanitizers
    python -m crash.kernel_cases SEED COUNT reading     only what reads records
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from crash.kernel_reading_cases import abuse_notes, differences_in_reading
from messagestore.errors import MessageIllegalError
from messagestore.format import kernel, record_encode
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host
from messagestore.format.message import NO_PROPERTIES, Message
from messagestore.format.message_columns import ColumnTexts, MessageColumns
from messagestore.format.properties import RESERVED_PROPERTIES
from messagestore.format.record_columns import stamp_rows
from messagestore.format.record_encode import encode, encode_one, stamp_one
from messagestore.format.rows import Rows

HOSTS = ["10.1.2.3:10911", "[2001:db8::2]:10911"]
_NUMBERS = (0, 1, -1, 7, 8, 88, 91, 2**15, 2**31 - 1, -(2**31), 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), -8)


# ---- both codecs


def outcome(columns: MessageColumns, lib: Any, **options: Any) -> Any:
    """The rows with their places stamped, as plain values; or the error."""
    limits = StoreConfig(
        enabled_append_prop_crc=options["crc"],
        max_message_size=options.get("limit", 1 << 20),
        stamp_cluster="cluster" in options,
        broker_cluster_name=options.get("cluster", "DefaultCluster"),
    )
    hosts = {"store_host": pack_host(options["store"]), "born_host": pack_host(options["born"])}

    with mock.patch.object(kernel, "lib", lib):
        try:
            rows = encode(columns, limits=limits, first_row=100, **hosts)
        except MessageIllegalError as error:
            return str(error), error.row, error.field

        bare = rows.data.tobytes()
        if rows.row_count:
            rows = rows.numbered({(run.topic, run.queue_id): 7 for run in rows.runs()}).at(1 << 40, 1795170401381)
            stamp_rows(rows)
    return bare, *(_plain(getattr(rows, name)) for name in Rows.__slots__)


def _plain(value: Any) -> Any:
    return (value.tolist(), str(value.dtype)) if isinstance(value, np.ndarray) else value


def both(columns: MessageColumns, **options: Any) -> tuple[Any, Any]:
    """What the kernel makes of the columns, and what the scalar codec does."""
    options = {"crc": False, "store": HOSTS[0], "born": HOSTS[0]} | options
    return outcome(columns, kernel.lib, **options), outcome(columns, None, **options)


# ---- hostile columns

NASTY = [
    "",
    " ",
    "a b",
    "\x00",
    "\x01",
    "a\x02b",
    "KEYS",
    "__CRC32#",
    "k",
    "UNIQ_KEY",
    "é中",
    "😀",
    "\U0010ffff",
    "x" * 9,
    "x" * 70,
]
NASTY_BYTES = [text.encode() for text in NASTY] + [
    b"\xff",
    b"\xed\xa0\x80",
    b"abcdefg\xc3",
    b"\xf4\x90\x80\x80",
    b"\xc0\x80",
]


class Hostile:
    """Columns of every type, with contents that codecs get wrong; legal ones with `legal`."""

    def __init__(self, chance: random.Random, n: int, *, legal: bool) -> None:
        self.chance, self.n, self.legal = chance, n, legal

    def text(self, *, null: float = 0.0) -> bytes | None:
        if self.chance.random() < null:
            return None
        if self.legal or self.chance.random() < 0.97:
            size = self.chance.choice((1, 3, 7, 8, 9, 16, 40))
            return "".join(self.chance.choice("abcXYZ09_-\x00é中😀\uffff\U00010000") for _ in range(size)).encode()
        return self.chance.choice(NASTY_BYTES)

    def array(self, values: list[bytes | None], *, dictionary: bool = True) -> pa.Array:
        """The values in one of Arrow's types, perhaps as a part of a longer array."""
        before = self.chance.choice((0, 0, 1, 5, 9))
        after = self.chance.choice((0, 3))
        array = pa.array([b"before"] * before + values + [None] * after, pa.binary())
        kinds = [pa.binary(), pa.large_binary(), pa.binary_view()]
        try:
            array.cast(pa.string())
            kinds += [pa.string(), pa.large_string()]
        except pa.ArrowInvalid:
            pass
        array = array.cast(self.chance.choice(kinds))
        if dictionary and self.chance.random() < 0.2 and not pa.types.is_binary_view(array.type):
            array = array.dictionary_encode()
        return array.slice(before, len(values))

    def lists(self, most: int, *, null: float = 0.1) -> tuple[np.ndarray, list[bool]]:
        counts = [self.chance.choice((0, 1, 1, 1, 2, most)) for _ in range(self.n)]
        return np.concatenate([[0], np.cumsum(counts)]), [self.chance.random() < null for _ in counts]

    def keys(self) -> pa.Array:
        if self.chance.random() < 0.3:
            return self.array([self.text(null=0.2) for _ in range(self.n)])
        offsets, nulls = self.lists(3)
        none = 0.0 if self.legal else 0.01
        items = self.array([self.text(null=none) for _ in range(int(offsets[-1]))], dictionary=False)
        large = self.chance.random() < 0.5
        kind = pa.large_list(items.type) if large else pa.list_(items.type)
        return self._lists(kind, offsets.astype(np.int64 if large else np.int32), nulls, [items])

    def properties(self) -> pa.Array:
        offsets, nulls = self.lists(self.chance.choice((3, 20, 40)))
        names = [f"name {i % 50}".encode() for i in range(int(offsets[-1]))]
        for i in range(len(names)):
            if self.chance.random() < 0.02:
                names[i] = self.text() + b"" if self.legal else self.chance.choice([*NASTY_BYTES, names[i - 1]])
        values = [self.text() for _ in names]
        columns = [self.array(names, dictionary=False), self.array(values, dictionary=False)]
        kind = pa.map_(columns[0].type, columns[1].type)
        entries = pa.StructArray.from_arrays(columns, fields=[kind.key_field, kind.item_field])
        return self._lists(kind, offsets.astype(np.int32), nulls, [entries])

    def _lists(self, kind: pa.DataType, offsets: np.ndarray, nulls: list[bool], children: list[pa.Array]) -> pa.Array:
        bits = pa.py_buffer(np.packbits(~np.array(nulls, np.bool_), bitorder="little"))
        return pa.Array.from_buffers(kind, self.n, [bits, pa.py_buffer(offsets)], children=children)

    def columns(self) -> MessageColumns:
        chance, n = self.chance, self.n
        bodies = [chance.randbytes(chance.choice((0, 1, 15, 16, 17, 63, 64, 65, 100, 300))) for _ in range(n)]
        if n and not self.legal and chance.random() < 0.1:
            bodies[chance.randrange(n)] = chance.choice([None, bytes(301)])

        names = ["T", "%RETRY%" + "t" * 150, "other-topic"]
        if not self.legal and chance.random() < 0.1:
            names.append(chance.choice(["", "a b", "x" * 128, None, "rmq_sys_spark_sink", "TBW102"]))
        topics = pa.array([chance.choice(names) for _ in range(n)], pa.string())

        queues = np.array([chance.randrange(chance.choice((1, 4))) for _ in range(n)], np.int32)
        if n and not self.legal and chance.random() < 0.1:
            queues[chance.randrange(n)] = chance.choice([-1, 65536, 2**31 - 1, -(2**31)])

        optional = {
            "keys": self.keys,
            "properties": self.properties,
            "tags": lambda: self.array([self.text(null=0.3) for _ in range(n)]),
            "unique_key": lambda: self.array([self.text(null=0.3) for _ in range(n)]),
            "sharding_key": lambda: self.array([self.text(null=0.3) for _ in range(n)]),
            "flag": lambda: np.array([chance.randrange(-(2**31), 2**31) for _ in range(n)], np.int32),
            "given": lambda: {
                "queue_id": pa.array([chance.choice([None, 3]) for _ in range(n)], pa.int32()),
                "born_timestamp": pa.array([chance.choice([None, -5, 2**60]) for _ in range(n)], pa.int64()),
                "unique_key": self.array([self.text(null=0.3) for _ in range(n)]),
            },
        }

        return MessageColumns(
            topic=chance.choice([topics, topics.dictionary_encode(), "T"]),
            queue_id=queues,
            body=self.array(bodies, dictionary=False),
            born_timestamp_ms=np.array([chance.randrange(-(2**63), 2**63) for _ in range(n)], np.int64),
            **{name: make() for name, make in optional.items() if chance.random() < 0.6},
        )


def difference(seed: int, *, legal: bool) -> tuple[Any, Any]:
    """What both codecs make of one batch of hostile columns."""
    chance = random.Random(seed)
    n = chance.choice((0, 1, 2, 9, 40))
    columns = Hostile(chance, n, legal=legal).columns()
    start = chance.choice((0, 0, 1))
    options = {"crc": chance.random() < 0.5, "store": chance.choice(HOSTS), "born": chance.choice(HOSTS), "limit": 300}
    if seed % 2:
        options["cluster"] = "größe-中"
    return both(columns.slice(start, n), **options)


# ---- one message


class Odd(str):
    """A text that is no plain `str`."""

    __slots__ = ()


def _odd(chance: random.Random, value: Any) -> Any:
    """The value, or one of another type or size."""
    wild = [
        None,
        True,
        7,
        -(2**31),
        2**31,
        2**63,
        -(2**63),
        1.5,
        b"bytes",
        "text",
        Odd("odd"),
        "\ud800",
        ("a",),
        {"a": "b"},
    ]

    return chance.choice(wild) if chance.random() < 0.03 else value


def hostile_message(chance: random.Random, *, legal: bool) -> tuple[Message, dict[str, Any]]:
    """A message, and the other arguments of `encode_one`."""
    odd = (lambda value: value) if legal else (lambda value: _odd(chance, value))

    def word() -> Any:
        if not legal and chance.random() < 0.05:
            return chance.choice([*NASTY, "\ud800", Odd("odd"), "x" * 40_000])
        size = chance.choice((1, 3, 7, 8, 9, 16, 40))
        return "".join(chance.choice("abcXYZ09_-\x00é中😀\uffff\U00010000") for _ in range(size))

    body = chance.randbytes(chance.choice((0, 1, 15, 16, 17, 64, 100, 300, 301, 70_000)))
    body = chance.choice((body, body, bytearray(body), memoryview(body), np.frombuffer(body, np.uint8)))
    if not legal and chance.random() < 0.05:
        body = memoryview(bytes(8))[::2]
    keys: Any = [odd(word()) for _ in range(chance.choice((0, 1, 1, 2, 33)))]
    properties: Any = {word(): odd(word()) for _ in range(chance.choice((1, 2, 20, 70)))}
    message = Message(
        odd(chance.choice(("T", "T", "%RETRY%" + "t" * 150, "é" if not legal else "t"))),
        odd(body),
        None,
        odd(chance.choice((keys, tuple(keys)))),
        odd(chance.choice((None, word()))),
        odd(chance.choice((NO_PROPERTIES, NO_PROPERTIES, properties, MappingProxyType(properties)))),
        odd(chance.choice((0, 1, -(2**31), 2**31 - 1))),
        odd(chance.choice((0, -5, 1795170401381, 2**63 - 1))),
        odd(chance.choice(HOSTS)),
        odd(chance.choice((0, 1, 4, 8, 12, 0x30, -1))),
        odd(chance.choice((0, 16))),
        chance.random() < 0.7,
        odd(chance.choice((0, 2**40, -1))),
    )
    extra = [(word(), "" if chance.random() < 0.1 else word()) for _ in range(chance.choice((0, 0, 1, 3)))]
    options = {
        "queue_id": chance.choice((0, 7, 2**31 - 1)),
        "store_host": pack_host(chance.choice(HOSTS)),
        "limits": StoreConfig(
            max_message_size=chance.choice((300, 1 << 20)), auto_message_version_on_topic_len=chance.random() < 0.9
        ),
        "property_crc": chance.random() < 0.5,
        "unique_key": odd(chance.choice((None, word()))),
        "extra_properties": chance.choice((extra, tuple(extra))),
    }
    return message, options


def difference_of_message(seed: int, *, legal: bool) -> tuple[Any, Any]:
    """What both codecs make of one message: the stamped record and what goes with it, or the error."""
    chance = random.Random(seed)
    message, options = hostile_message(chance, legal=legal)

    def made(lib: Any) -> Any:
        with mock.patch.object(kernel, "lib", lib), mock.patch("time.time_ns", return_value=10**18):
            try:
                record, tags_code, key_hashes = encode_one(message, **options)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other one raises the same
                return type(error), str(error)
            bare = bytes(record)
            stamp_one(record, 7, 1 << 40, 1795170401381, options["property_crc"])
        return bare, bytes(record), tags_code, list(key_hashes)

    return made(kernel.lib), made(None)


# ---- arguments that lie


def _number(chance: random.Random, around: int) -> int:
    return chance.choice(
        (chance.choice(_NUMBERS), around, around + 1, around - 1, chance.randrange(-2, 2 * around + 3))
    )


def _numbers(chance: random.Random, count: int, around: int, kind: Any = np.int64) -> np.ndarray:
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    wild = [min(max(_number(chance, around), low), high) for _ in range(count)]
    tame = sorted(chance.randrange(around + 1) for _ in range(count))
    return np.array([chance.choice((a, b, b, b)) for a, b in zip(wild, tame, strict=True)], kind)


def _alone(buffer: Any) -> Any:
    """A copy of a buffer with memory of its own, so that the sanitizer sees what lies beside it touched."""
    return None if buffer is None else np.frombuffer(buffer, np.uint8).copy()


def abuse_ranges(lib: kernel.Kernel, chance: random.Random) -> None:
    size, n = chance.choice((0, 1, 15, 16, 64, 200)), chance.choice((0, 1, 2, 9))
    data = np.frombuffer(chance.randbytes(size), np.uint8).copy()
    starts, ends = _numbers(chance, n, size), _numbers(chance, n, size)
    if chance.random() < 0.6:
        starts, ends = np.minimum(starts, ends), np.maximum(starts, ends)

    out = np.empty(max(0, n + chance.choice((0, 0, 0, 1, -1))), np.uint32)
    before = np.zeros(chance.choice((1, n, n + 1)), np.int32)

    match chance.randrange(4):
        case 0:
            lib.crcs_of_ranges(data, starts, ends, out)
        case 1:
            lib.java_hashes(data, starts, ends, before, out)
        case 2:
            lib.xxh3_of_ranges(data, starts, ends, np.empty(len(out), np.uint64))
        case _:
            lib.index_hashes(data, starts, ends, before, out)


def abuse_stamp(lib: kernel.Kernel, chance: random.Random) -> None:
    n = chance.choice((0, 1, 2, 5))
    data = np.zeros(max(0, 100 * n + chance.choice((0, 0, 1, -1, -10))), np.uint8)
    starts = np.arange(n) * 100
    for _ in range(chance.choice((0, 1, 2)) if n else 0):
        starts[chance.randrange(n)] = _number(chance, 100 * n)
    places = np.zeros(n + chance.choice((0, 0, 0, 1)), np.int64)
    lib.stamp(data, starts, places[:n], places, 5, chance.choice((56, 68, 83, 84, -1, 2**62)), chance.random() < 0.7)


_FIRST_FIELDS = 20
"""Where the fields of the digest are in a batch; the tuples before them are columns."""


def abuse_encode(lib: kernel.Kernel, chance: random.Random) -> None:
    n = chance.choice((0, 1, 2, 9))
    columns = Hostile(chance, n, legal=chance.random() < 0.7).columns()
    host = pack_host(chance.choice(HOSTS))
    with_digest = chance.random() < 0.7
    batch = list(record_encode._batch(ColumnTexts(columns), StoreConfig(stamp_cluster=n > 1), host, host, with_digest))
    for i, value in enumerate(batch):
        if isinstance(value, tuple) and i < _FIRST_FIELDS:
            batch[i] = (*map(_alone, value[:3]), *value[3:])
        elif isinstance(value, tuple):
            batch[i] = tuple((number, *map(_alone, parts)) for number, *parts in value)
        elif isinstance(value, bytes | np.ndarray):
            batch[i] = _alone(value)
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        _lie(batch, chance)
    size, keys = 0, 0
    found = lib.encode_size(tuple(batch))
    if found is not None:
        size, keys = found
    if size > 1 << 22 or keys > 1 << 16 or chance.random() < 0.2:
        size, keys = chance.randrange(4000), chance.randrange(20)
    order = None if chance.random() < 0.5 else np.array(chance.sample(range(n), n), np.int64)
    if order is not None and n and chance.random() < 0.3:
        order[chance.randrange(n)] = _number(chance, n)
    for _ in range(chance.choice((0, 0, 1))):
        _lie(batch, chance)  # the columns change between the two calls
    lib.encode(
        tuple(batch), order, np.empty(size, np.uint8), np.empty(n + 1, np.int64), np.empty(n, np.int64),
        np.empty(keys, np.int32), np.empty(n, np.int32),
    )  # fmt: skip


def _lie(batch: list[Any], chance: random.Random) -> None:
    i = chance.randrange(len(batch))
    value = batch[i]
    if isinstance(value, tuple) and i >= _FIRST_FIELDS:
        batch[i] = _wrong_fields(list(value), chance)
    elif isinstance(value, tuple):
        parts = list(value)
        k = chance.randrange(len(parts))
        if k == 1 and parts[1] is not None:
            kind = np.int64 if parts[5] else np.int32
            parts[1] = _numbers(chance, len(parts[1]) // np.dtype(kind).itemsize, 40, kind).view(np.uint8)
        elif k in (0, 1, 2):
            parts[k] = _cut(parts[k], chance)
        elif k != 5:
            parts[k] = min(max(_number(chance, parts[k]), -(2**63)), 2**63 - 1)
        batch[i] = tuple(parts)
    elif isinstance(value, np.ndarray):
        if chance.random() < 0.5 and len(value):
            value = value.copy()
            value[chance.randrange(len(value))] = chance.randrange(256)
            batch[i] = value
        else:
            batch[i] = _cut(value, chance)
    elif isinstance(value, int):
        batch[i] = min(max(_number(chance, value), -(2**63)), 2**63 - 1)
    elif value is None:
        batch[i] = chance.choice((None, (None, None, None, 0, _number(chance, 3) % 2**62, False)))


def _wrong_fields(fields: list[Any], chance: random.Random) -> Any:
    if not fields or chance.random() < 0.2:
        return chance.choice(((None,), (1,), ((),), tuple(fields * 9), fields))
    k = chance.randrange(len(fields))
    number, values, present = fields[k]
    match chance.randrange(3):
        case 0:
            number = min(max(_number(chance, number), -(2**63)), 2**63 - 1)
        case 1:
            values = _cut(np.ascontiguousarray(values).view(np.uint8), chance)
        case _:
            present = _cut(present, chance)
    fields[k] = (number, values, present)
    return tuple(fields)


def _cut(value: Any, chance: random.Random) -> Any:
    if value is None:
        return np.zeros(chance.randrange(3), np.uint8)
    return value[: chance.randrange(len(value) + 1)].copy()


def abuse_index(lib: kernel.Kernel, chance: random.Random) -> None:
    n, slot_count = chance.choice((0, 1, 2, 40)), chance.choice((1, 7, 1013, 1014, 1015, 5000))
    hashes = _numbers(chance, n, 2**31 - 1, np.int32)

    pages = (slot_count - 1 + 10) // 1024 + 1
    bases = np.arange(pages) * 1024 - 10
    slots = np.array([_number(chance, 50) % 2**32 for _ in range(slot_count)], np.uint64).astype(">u4")

    for _ in range(chance.choice((0, 0, 1, 2))):
        match chance.randrange(5):
            case 0:
                bases[:1] = _number(chance, slot_count)
            case 1:
                slots = slots[: chance.randrange(len(slots) + 1)].copy()
            case 2:
                slot_count = _number(chance, slot_count)
            case 3:
                pages = max(0, pages + chance.choice((1, -1)))
            case _:
                bases = bases[:-1].copy()

    lib.index_pages(hashes, slot_count, np.zeros(pages, np.bool_))
    first = chance.choice((0, n // 2, _number(chance, n)))
    entries = np.empty(20 * max(0, n - n // 2 + chance.choice((0, 0, 1, -1))), np.uint8)
    places, times = _numbers(chance, n, 2**40), _numbers(chance, chance.choice((n, 1)), 2**40)

    number, begin_ms = chance.choice((1, 5, 45, _number(chance, 2**31))), _number(chance, 2**40)

    chosen, of_pages = None, bases
    if chance.random() < 0.5:
        of_pages = chance.choice((None, bases))
        chosen = np.unique(_numbers(chance, n, 5000, np.int32)) if chance.random() < 0.3 else np.unique(hashes % 5000)
        slots = slots[: max(0, len(chosen) + chance.choice((0, 0, 0, 1, -1)))].copy()

    lib.index_put(hashes, first, places, times, slot_count, number, begin_ms, of_pages, chosen, slots, entries)


def abuse_parts(lib: kernel.Kernel, chance: random.Random) -> None:
    """Parts of a file that are outside of the buffer, or that the file does not have."""
    size, n = chance.choice((0, 1, 16, 200)), chance.choice((0, 1, 2, 9))
    positions, starts, ends = _numbers(chance, n, 100), _numbers(chance, n, size), _numbers(chance, n, size)
    if chance.random() < 0.6:
        starts, ends = np.minimum(starts, ends), np.maximum(starts, ends)
    positions = positions[: max(0, n + chance.choice((0, 0, 0, -1)))].copy()
    with tempfile.TemporaryFile() as file:
        file.write(bytes(150))
        file.flush()
        fd = chance.choice((file.fileno(), file.fileno(), -1))
        move = chance.choice((lib.pread_parts, lib.pwrite_parts))
        done = move(fd, np.zeros(size, np.uint8), np.minimum(positions, 1 << 20), starts, ends)
        if not 0 <= done <= n:
            raise AssertionError(f"{done} of {n} parts")


def abuse_message(lib: kernel.Kernel, chance: random.Random) -> None:
    """One message whose arguments are of other types and sizes; the record that comes of it is stamped."""
    message, options = hostile_message(chance, legal=chance.random() < 0.5)
    arguments: list[Any] = [
        message.body, b"\x01T", 0, 5, 3, message.flag, message.sys_flag, message.born_timestamp_ms,
        pack_host(chance.choice(HOSTS)), options["store_host"], message.reconsume_times,
        message.prepared_transaction_offset, message.keys, options["unique_key"], message.tags, True,
        chance.choice(({}, message.properties)), options["extra_properties"],
        chance.choice((None, RESERVED_PROPERTIES)), 1 << 20, True,
    ]  # fmt: skip
    wild = [
        None,
        -1,
        2**31,
        2**63,
        1.5,
        b"",
        bytes(9),
        bytes(300),
        "text",
        (1,),
        [("a",)],
        [None],
        {1: 2},
        frozenset(),
        True,
    ]
    for _ in range(chance.choice((0, 1, 2))):
        arguments[chance.randrange(len(arguments))] = chance.choice(wild)
    found = lib.encode_message(*arguments[: chance.choice((21, 21, 21, 21, 20, 0))])
    data = found[0] if found is not None else bytearray(chance.choice((0, 50, 75, 90, 91, 100)))
    if chance.random() < 0.3:
        data = bytearray(_cut(np.frombuffer(data, np.uint8), chance))
    places: list[Any] = [data, 7, 1 << 40, 5, chance.random() < 0.5]
    if chance.random() < 0.3:
        places[chance.randrange(5)] = chance.choice(wild)
    lib.stamp_message(*places)


ABUSES: tuple[Callable[[kernel.Kernel, random.Random], None], ...] = (
    abuse_ranges,
    abuse_stamp,
    abuse_encode,
    abuse_message,
    abuse_index,
    abuse_parts,
    abuse_notes,
    differences_in_reading,
)
"""One for each function of the kernel, or for several."""
OF_READING = (abuse_notes, differences_in_reading, differences_in_reading, differences_in_reading)


def abused(lib: kernel.Kernel, seed: int, abuses: Sequence[Callable[[kernel.Kernel, random.Random], None]]) -> None:
    """Call one function with arguments that do not fit together; all but the errors of arguments is raised."""
    chance = random.Random(seed)
    try:
        chance.choice(abuses)(lib, chance)
    except (ValueError, TypeError, OverflowError):
        pass


def main(seed: int, count: int, *, reading: bool = False) -> None:
    lib = kernel.lib
    assert lib is not None, kernel.why_not
    for number in range(seed * 1_000_000, seed * 1_000_000 + count):
        print(number, file=sys.stderr)
        if number % 8 or reading:
            abused(lib, number, OF_READING if reading else ABUSES)
            continue
        compared = difference_of_message if number % 16 else difference
        by_kernel, by_rows = compared(number, legal=number % 3 == 0)
        if by_kernel != by_rows:
            raise AssertionError(f"the codecs differ at {number}:\n{by_kernel}\n{by_rows}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), reading=sys.argv[3:] == ["reading"])
