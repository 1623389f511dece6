"""The kernel against the scalar codec: the same bytes, the same numbers, and the same rows refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from messagestore.errors import MessageIllegalError
from messagestore.format import kernel
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host
from messagestore.format.message_columns import MessageColumns
from messagestore.format.record_columns import stamp_rows
from messagestore.format.record_encode import encode
from messagestore.format.rows import Rows

pytestmark = pytest.mark.skipif(kernel.lib is None, reason=f"no compiled kernel: {kernel.why_not}")

HOSTS = ["10.1.2.3:10911", "[2001:db8::2]:10911"]
TEXT_MAP = pa.map_(pa.string(), pa.string())


def outcome(columns: MessageColumns, lib: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The rows with their places stamped, as plain values; or the error."""
    limits = StoreConfig(enabled_append_prop_crc=options["crc"], max_message_size=options.get("limit", 1 << 20))
    hosts = {"store_host": pack_host(options["store"]), "born_host": pack_host(options["born"])}
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "lib", lib)
        try:
            rows = encode(columns, limits=limits, first_row=100, **hosts)
        except MessageIllegalError as error:
            return str(error), error.row, error.field
        bare = rows.data.tobytes()
        if rows.row_count:
            stamp_rows(rows.numbered({(run.topic, run.queue_id): 7 for run in rows.runs()}).at(1 << 40, 1795170401381))
    return bare, *(_plain(getattr(rows, name)) for name in Rows.__slots__)


def _plain(value: Any) -> Any:
    return (value.tolist(), str(value.dtype)) if isinstance(value, np.ndarray) else value


def both(columns: MessageColumns, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """What both codecs make of the columns, which is the same."""
    options = {"crc": False, "store": HOSTS[0], "born": HOSTS[0]} | options
    by_kernel = outcome(columns, kernel.lib, monkeypatch, **options)
    assert by_kernel == outcome(columns, None, monkeypatch, **options)
    return by_kernel


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
            },
        }
        return MessageColumns(
            topic=chance.choice([topics, topics.dictionary_encode(), "T"]),
            queue_id=queues,
            body=self.array(bodies, dictionary=False),
            born_timestamp_ms=np.array([chance.randrange(-(2**63), 2**63) for _ in range(n)], np.int64),
            **{name: make() for name, make in optional.items() if chance.random() < 0.6},
        )


@pytest.mark.parametrize("seed", range(150))
def test_hostile_batches_are_the_same_by_both_codecs(seed, monkeypatch):
    """NULs, empty and broken texts, characters of four bytes, nulls, parts of arrays, large and dictionary types,
    lists with nulls, names that are reserved or there twice, V2 topics, IPv6 hosts, with and without property CRC.
    """
    chance = random.Random(seed)
    n = chance.choice((0, 1, 2, 9, 40))
    columns = Hostile(chance, n, legal=seed % 3 == 0).columns()
    start = chance.choice((0, 0, 1))
    options = {"crc": chance.random() < 0.5, "store": chance.choice(HOSTS), "born": chance.choice(HOSTS), "limit": 300}
    found = both(columns.slice(start, n), monkeypatch, **options)
    if seed % 3 == 0:
        assert len(found) > 3, found  # no error


words = st.one_of(strategies.texts, st.sampled_from(NASTY), strategies.any_text.filter(lambda text: not _lone(text)))


def _lone(text: str) -> bool:
    return any(0xD800 <= ord(character) < 0xE000 for character in text)


@given(
    rows=st.lists(
        st.tuples(
            strategies.bodies,
            st.none() | st.lists(words, max_size=3),
            st.none() | words,
            st.none() | words,
            st.none() | st.lists(st.tuples(words, words), max_size=3),
        ),
        max_size=6,
    ),
    crc=st.booleans(),
    hosts=st.tuples(st.sampled_from(HOSTS), st.sampled_from(HOSTS)),
)
def test_any_texts_are_the_same_by_both_codecs(rows, crc, hosts):
    body, keys, tags, unique_key, properties = zip(*rows, strict=True) if rows else [()] * 5
    columns = MessageColumns(
        topic="T",
        queue_id=np.arange(len(rows), dtype=np.int32) % 2,
        body=pa.array(body, pa.binary()),
        keys=pa.array(keys, pa.list_(pa.string())),
        tags=pa.array(tags, pa.string()),
        unique_key=pa.array(unique_key, pa.string()),
        properties=pa.array(properties, TEXT_MAP),
        born_timestamp_ms=np.zeros(len(rows), np.int64),
    )
    with pytest.MonkeyPatch.context() as patch:
        both(columns, patch, crc=crc, store=hosts[0], born=hosts[1])


def test_a_hundred_thousand_rows_are_the_same_by_both_codecs(monkeypatch):
    n = 100_000
    chance = np.random.default_rng(7)
    numbers = chance.integers(0, 1 << 40, n).tolist()
    columns = MessageColumns(
        topic=pa.array([("one", "two")[number % 2] for number in numbers]),
        queue_id=chance.integers(0, 200, n).astype(np.int32),
        body=pa.array([b"body %d" % number for number in numbers], pa.large_binary()),
        keys=pa.array([f"key-{number}" for number in numbers]),
        tags=pa.array([f"tag{number % 7}" for number in numbers]).dictionary_encode(),
        born_timestamp_ms=np.array(numbers),
    )
    found = both(columns, monkeypatch, crc=True)
    assert len(found[0]) > 100 * n


@pytest.mark.parametrize(
    ("names", "legal"),
    [
        ([f"n{i}" for i in range(17)], True),
        ([*(f"n{i}" for i in range(17)), "n3"], False),
        ([f"n{i}" for i in range(3000)], True),
        ([*(f"n{i}" for i in range(3000)), "n2999"], False),
        (["Aa", "BB"], True),  # of one hash
        (["Aa", "BB", "Aa"], False),
        ([f"{a}{b}{c}{d}{e}" for a in ("Aa", "BB") for b in ("Aa", "BB") for c in ("Aa", "BB") for d in ("Aa", "BB") for e in ("Aa", "BB")], True),
    ],
    ids=["17", "17 and one again", "3000", "3000 and one again", "one hash", "one hash, one again", "32 of one hash"],
)  # fmt: skip
def test_names_that_a_row_has_twice(names, legal, monkeypatch):
    """The row before has the same names, so that what is remembered of it must not hide the second one."""
    rows = [[(name, "v") for name in names[:16]], [(name, "v") for name in names]]
    columns = MessageColumns(
        "T", np.zeros(2, np.int32), pa.array([b"", b""]), properties=pa.array(rows, TEXT_MAP), born_timestamp_ms=np.zeros(2, np.int64)
    )  # fmt: skip
    found = both(columns, monkeypatch)
    assert (len(found) > 3) == legal


def test_columns_whose_offsets_lead_outside_are_refused():
    """Arrow trusts its offsets; the kernel reads no byte outside the buffer."""
    for offsets in ([0, 5], [-1, 2], [3, 1], [0, 2**31 - 1]):
        memory = np.array([0, 4], np.int32)
        body = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(memory), pa.py_buffer(b"abcd")])
        memory[:] = offsets  # behind the back of Arrow, which looks only once
        with pytest.raises(ValueError, match="row 0: its offsets lead outside the column"):
            encode(
                MessageColumns("T", np.zeros(1, np.int32), body),
                limits=StoreConfig(), store_host=pack_host(HOSTS[0]), born_host=pack_host(HOSTS[0]),
            )  # fmt: skip


@pytest.mark.parametrize(
    ("starts", "position", "message"),
    [
        ([0, 50], 56, "record 0: found 0 to 50"),
        ([0, 150], 56, "record 1: found 150 to 200"),
        ([-1, 100], 56, "record 0: found -1 to 100"),
        ([100, 0], 56, "record 0: found 100 to 0"),
        ([0, 100], 84, "store_timestamp_position: found 84"),
        ([0, 100], -1, "store_timestamp_position: found -1"),
    ],
)
def test_stamping_outside_the_data_is_refused(starts, position, message):
    data, two = np.zeros(200, np.uint8), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match=message):
        kernel.lib.stamp(data, np.array(starts, np.int64), two, two, 0, position, True)
    assert not data.any()
