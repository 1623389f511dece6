"""The compiled kernel reads records exactly as the scalar codec does: the same columns, or the same error.

The scalar codec is in Python and has one record in its hands at a time; the tests of `test_record.py` compare it with
the oracle. What the kernel makes of the same bytes is compared with it here: random and hostile records, every byte of
a record changed, every cut, and lengths that lead out of every buffer.
"""

from __future__ import annotations

import io
import random
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from both_codecs import (
    ALL,
    HOSTS,
    INT64,
    PLACE,
    both,
    chain,
    compare_scans,
    laid_out,
    promised,
    queue,
    raw,
)
from messagestore.errors import TornRecordError
from messagestore.format import kernel, record_decode
from messagestore.format.record_decode import Expected, decode
from messagestore.format.record_scan import heads

pytestmark = pytest.mark.skipif(kernel.lib is None, reason=f"no compiled kernel: {kernel.why_not}")


@pytest.mark.parametrize("seed", range(60))
def test_random_records(seed: int) -> None:
    """All columns at once, one alone, and some; whole and damaged, promised and not."""
    chance = random.Random(seed)
    pieces = chain(chance, chance.choice((1, 2, 30)))
    data, starts, sizes = laid_out(pieces, between=chance.choice((b"", b"", b"\x01\x01\x01")))
    assert both(data, starts, sizes)[0] == "given"
    for name in ALL:
        assert both(data, starts, sizes, [name])[0] == "given", name
    some = chance.sample(ALL, 5)
    order = np.array([chance.randrange(len(pieces)) for _ in range(7)])
    assert both(data, starts[order], sizes[order], some, verify_body_crc=False)[0] == "given"
    for _ in range(30):
        broken = data.copy()
        for _ in range(chance.choice((1, 1, 3))):
            broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        both(broken, starts, sizes, some, verify_body_crc=chance.random() < 0.7)
        both(broken, starts, sizes, some, expected=promised(pieces, queue_id=chance.choice((0, 3))))


@pytest.mark.parametrize("seed", range(10))
def test_promised_records(seed: int) -> None:
    """The queue's own records are given, and every other promise is refused with the same words."""
    chance = random.Random(seed)
    pieces = queue(chance, 9)
    data, starts, sizes = laid_out(pieces)
    whole = promised(pieces)
    assert both(data, starts, sizes, expected=whole)[0] == "given"
    assert both(data, starts, sizes, expected=promised(pieces, renumbered=True))[0] == "given"
    for topic, queue_id in (("TopicB", 3), ("Topic", 3), ("TopicA\x00", 3), ("", 3), ("t\udcff", 3), ("TopicA", 4)):
        for value in (queue_id, queue_id + 2**32):
            assert both(data, starts, sizes, expected=promised(pieces, topic, value))[0] != "given"
    for row in (0, 4, 8):
        numbers, places = whole.queue_offsets.copy(), whole.physical_offsets.copy()
        numbers[row] += 1
        places[row] -= 1
        free = np.arange(9) == row
        assert both(data, starts, sizes, expected=Expected("TopicA", 3, numbers, whole.physical_offsets))[0] != "given"
        assert both(data, starts, sizes, expected=Expected("TopicA", 3, whole.queue_offsets, places))[0] != "given"
        found = both(data, starts, sizes, expected=Expected("TopicA", 3, numbers, whole.physical_offsets, free))
        assert found[1].column("queue_offset").to_pylist() == numbers.tolist()
        assert (
            both(data, starts, sizes, expected=Expected("TopicA", 3, numbers, whole.physical_offsets, ~free))[0]
            != "given"
        )


@pytest.mark.parametrize("ways", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("hosts", [HOSTS[:1], HOSTS[1:2]], ids=["v4", "v6"])
def test_every_byte_of_a_record_changed(crc: bool, hosts: tuple[str, ...], ways: int) -> None:
    """Between two whole records; with the highest and the lowest bit, and to zero and ones: in one of these ways, or all."""
    properties = b"KEYS\x01k1 k2\x02UNIQ_KEY\x01U\x02TAGS\x01t\x02own\x01v\x02"
    pieces = [
        raw(b"TopicA", b"body", properties, crc=crc, queue_id=3, queue_offset=i, physical_offset=PLACE + 300 * i,
            born_host=hosts[0], store_host=hosts[0])
        for i in range(3)
    ]  # fmt: skip
    data, starts, sizes = laid_out(pieces)
    whole = promised(pieces)
    for at in range(int(starts[1]), int(starts[1] + sizes[1])):
        for value in random.Random(at).sample((data[at] ^ 1, data[at] ^ 0x80, 0x00, 0xFF, 0x7F), ways):
            broken = data.copy()
            broken[at] = value
            both(broken, starts, sizes, verify_body_crc=False)
            both(broken, starts, sizes, expected=whole)
            compare_scans(broken, PLACE - 300, True)


@pytest.mark.parametrize("hosts", [HOSTS[:1], HOSTS[1:2]], ids=["v4", "v6"])
def test_every_cut(hosts: tuple[str, ...]) -> None:
    """The data end anywhere within the record, in a buffer that ends there, too; and so may the unit's size."""
    piece = raw(
        b"TopicA", b"body", b"TAGS\x01t\x02", crc=True, physical_offset=PLACE, born_host=hosts[0], store_host=hosts[0]
    )
    zero = np.zeros(1, np.int64)
    for size in range(len(piece) + 1):
        data = np.frombuffer(piece[:size], np.uint8).copy()
        for told in (size, len(piece)):
            found = both(data, zero, np.array([told], np.int32))
            assert (found[0] == "given") == (size == len(piece))
        both(np.frombuffer(piece, np.uint8), zero, np.array([size], np.int32))
        compare_scans(data, PLACE, True)


@pytest.mark.parametrize("value", [v for v in INT64 if -(2**31) <= v < 2**31] + [88, 90, 91, 2**15, 2**16, 2**30])
def test_lengths_that_lead_anywhere(value: int) -> None:
    """TOTALSIZE, BODYLEN, the flags that move the fields, and the unit's size, at the ends of what 32 bits hold."""
    pieces = queue(random.Random(5), 3)
    data, starts, sizes = laid_out(pieces)
    head = (
        88
        + 12 * (struct.unpack_from(">i", pieces[1], 36)[0] >> 4 & 1)
        + 12 * (struct.unpack_from(">i", pieces[1], 36)[0] >> 5 & 1)
    )
    for at in (0, 4, 8, 36, 84, head - 4, head, head + 20):
        broken = data.copy()
        broken[starts[1] + at : starts[1] + at + 4] = np.frombuffer(struct.pack(">i", value), np.uint8)
        both(broken, starts, sizes)
        both(broken, starts, sizes, verify_body_crc=False)
        told = sizes.copy()
        told[1] = value
        both(broken, starts, told, verify_body_crc=False)
        compare_scans(broken, PLACE, False)


@pytest.mark.parametrize("start", INT64)
@pytest.mark.parametrize("size", [0, 1, -1, 91, 2**31 - 1, -(2**31)])
def test_units_that_point_out_of_the_buffer(start: int, size: int) -> None:
    """Nothing is read there: the units are refused."""
    data, starts, sizes = laid_out(queue(random.Random(6), 3))
    starts[1], sizes[1] = start, size
    assert both(data, starts, sizes)[0] != "given"
    assert both(data[:0], starts[1:2], sizes[1:2])[0] is TornRecordError


def test_records_that_overlap() -> None:
    """A record in the body of another one: each is read for itself, and neither reaches out of the buffer."""
    inner = raw(b"TopicA", b"inner", b"TAGS\x01t\x02", physical_offset=PLACE)
    outer = raw(b"TopicA", b"<" + inner + b">", b"", physical_offset=PLACE)
    data = np.frombuffer(outer, np.uint8)
    starts = np.array([0, outer.index(inner), 0], np.int64)
    sizes = np.array([len(outer), len(inner), len(outer)], np.int32)
    assert both(data, starts, sizes)[0] == "given"
    sizes[1] += 1
    assert both(data, starts, sizes)[0] is TornRecordError


def test_topics_that_are_not_utf8_and_look_alike() -> None:
    """A unit of a topic that contains U+FFFD does not promise a record whose topic only reads like it."""
    pieces = [raw(topic, b"", b"", physical_offset=PLACE) for topic in (b"\xffa", "\ufffda".encode())]
    data, starts, sizes = laid_out(pieces)
    for row, is_given in ((0, False), (1, True)):
        expected = promised(pieces[row : row + 1], "\ufffda", 0)
        found = both(data, starts[row : row + 1], sizes[row : row + 1], expected=expected)
        assert (found[0] == "given") == is_given


def test_the_first_bad_record_is_named_whatever_is_wrong_with_later_ones() -> None:
    pieces = queue(random.Random(7), 5)
    data, starts, sizes = laid_out(pieces)
    broken = data.copy()
    broken[starts[3] + 4] ^= 1  # the frame of a later record,
    broken[starts[1] + 88 + 24] ^= 1  # and the body of an earlier one
    assert both(broken, starts, sizes, expected=promised(pieces))[2] == PLACE + starts[1]


@given(st.data())
def test_any_messages(data: st.DataObject) -> None:
    """Legal messages of any kind, and properties of any bytes."""
    texts = data.draw(st.lists(strategies.property_bytes, min_size=1, max_size=5))
    bodies = [data.draw(strategies.bodies) for _ in texts]
    pieces = [
        raw(b"T", body, text, physical_offset=i) for i, (body, text) in enumerate(zip(bodies, texts, strict=True))
    ]
    assert both(*laid_out(pieces), data.draw(st.lists(st.sampled_from(ALL), unique=True)))[0] == "given"


def test_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_decode, "BLOCK_ROWS", 4)
    chance = random.Random(8)
    data, starts, sizes = laid_out(chain(chance, 11))
    assert both(data, starts, sizes)[1].num_rows == 11


# ---- scans


@pytest.mark.parametrize("seed", range(40))
def test_scans(seed: int) -> None:
    """Chains of random records, whole, cut, damaged, near the end of the file, and of another place."""
    chance = random.Random(seed)
    pieces = chain(chance, 20)
    data = laid_out(pieces)[0]
    assert len(compare_scans(data, PLACE, True)) == 20
    assert compare_scans(data, PLACE + 1, True) == []
    for _ in range(40):
        broken = data[: chance.randrange(len(data) + 1)].copy() if chance.random() < 0.3 else data.copy()
        if len(broken):
            broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        left = chance.choice((None, 0, 7, 8, len(broken), len(broken) + 1, 2**40, -5))
        compare_scans(broken, PLACE, chance.random() < 0.5, left)


@given(st.binary(max_size=400), st.sampled_from(INT64))
def test_scans_of_garbage(junk: bytes, place: int) -> None:
    head = np.frombuffer(struct.pack(">iI", max(len(junk), 91), 0xDAA320A7) + junk, np.uint8)
    compare_scans(head, place, True)
    with mock.patch.object(kernel, "lib", None):
        wanted = heads(head, np.zeros(1, np.int64)).tobytes() if len(head) >= 88 else b""
    assert (heads(head, np.zeros(1, np.int64)).tobytes() if len(head) >= 88 else b"") == wanted


def test_heads_outside_the_data() -> None:
    for start in (-1, 13, 2**63 - 1, -(2**63)):
        with pytest.raises((ValueError, IndexError)):
            heads(np.zeros(100, np.uint8), np.array([0, start], np.int64))


def broker_logs() -> Iterator[tuple[str, bytes]]:
    for path in sorted((Path(__file__).parents[2] / "golden").glob("*.zip")):
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as stored:
            logs = [name for name in stored.namelist() if "commitlog/" in name and name.rstrip("/")[-20:].isdigit()]
            for name in logs:
                yield f"{path.stem} {name}", stored.read(name)


def test_records_that_brokers_wrote() -> None:
    """Every segment of every broker in tests/golden, scanned and decoded."""
    count = 0
    for name, log in broker_logs():
        data, place = np.frombuffer(log, np.uint8), int(name[-20:])
        starts = np.array(compare_scans(data, place, True, len(data)), np.int64)
        found = both(data, starts, heads(data, starts)["total_size"].astype(np.int32))
        assert found[0] == "given", name
        count += len(starts)
    assert count > 100


# ---- notes that do not fit


def test_notes_that_do_not_fit_are_refused() -> None:
    """The kernel compares its notes with the data again: bytes and notes may have changed since it made them."""
    chance, lib = random.Random(9), kernel.lib
    data, starts, sizes = laid_out(chain(chance, 6))

    none = np.empty(0, np.int64)
    rows = np.empty(6, record_decode._ROW)
    good, body, topic = lib.frame(data, starts, sizes, rows, True, b"", 0, none, none, none)
    assert good == 6
    offsets, out = np.empty(7, np.int32), np.empty(body, np.uint8)
    lib.fill_values(data, rows, none, record_decode._WHICH["body"], offsets, out, none)

    for name in rows.dtype.names:
        for value in INT64:
            wrong = rows.copy()
            if name not in ("start", "topic", "properties") and not -(2**31) <= value < 2**31:
                continue
            wrong[name][3] = value

            texts, totals = np.empty((6, 8), np.int32), np.empty(15, np.int64)
            lib.measure(data, wrong.copy(), texts, record_decode._RESERVED, 7, totals)

            for which in range(8):
                noted = texts if which >= 5 else none
                room = np.empty(1 << 14, np.uint8)
                with pytest.raises(ValueError, match="do not fit"):
                    lib.fill_values(data, wrong, noted, which, offsets, room, none)
            for position, behind, width in ((0, 0, 4), (20, 0, 8), (56, 1, 8), (76, 2, 8)):
                try:
                    lib.fill_numbers(data, wrong, position, behind, width, np.empty(6 * width, np.uint8))
                except ValueError:
                    assert name in ("start", "sys_flag")

    for short in (body - 1, body + 1, 0):
        with pytest.raises(ValueError, match="do not fit"):
            lib.fill_values(data, rows, none, 0, offsets, np.empty(short, np.uint8), none)

    with pytest.raises(ValueError, match="offsets: found 24 bytes"):
        lib.fill_values(data, rows, none, 0, offsets[:6], out, none)
    with pytest.raises(ValueError, match="rows: found 287 bytes"):
        lib.fill_values(data, rows.view(np.uint8)[1:], none, 0, offsets, out, none)
    with pytest.raises(ValueError, match="texts: found 0 bytes"):
        lib.fill_values(data, rows, none, 5, offsets, out, none)
    with pytest.raises(ValueError, match="usable: found 200000"):
        lib.scan(data, 200_000, PLACE, True, np.empty(9, np.int64))

    assert lib.scan(data, len(data), PLACE, True, np.empty(4, np.int64)) == 4
    assert topic >= 0


def test_more_than_32_bits_can_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of 2 GiB in one column are refused, and not cut."""
    monkeypatch.setattr(record_decode, "MAX_SMALL", 50)
    data, starts, sizes = laid_out([raw(b"T", b"x" * 30, b"", physical_offset=0)] * 2)
    with pytest.raises(ValueError, match="body: found 60 bytes for one array; allowed are 50"):
        decode(data, starts, sizes, ["body"])


def test_a_large_property_string_of_ones_that_nobody_needs() -> None:
    """Tens of thousands of names in a row take a moment, not minutes."""
    text = b"a\x01b\x02" * 8000
    data, starts, sizes = laid_out([raw(b"T", b"", text, physical_offset=0)] * 20)
    assert both(data, starts, sizes)[1].column("properties").to_pylist() == [[("a", "b")]] * 20


def test_columns_do_not_change_with_the_data() -> None:
    data, starts, sizes = laid_out(chain(random.Random(10), 20))
    buffer = data.copy()
    batch = decode(buffer, starts, sizes, ALL)
    wanted = pa.RecordBatch.from_pydict(decode(data, starts, sizes, ALL).to_pydict(), schema=batch.schema)
    buffer[:] = 0xFF
    assert batch.equals(wanted)
