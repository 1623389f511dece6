"""Records to columns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import reference
from messagestore.errors import ChecksumError, CorruptionError, MagicError, TornRecordError
from messagestore.format import record, record_decode
from messagestore.format.record_decode import COLUMNS, Expected, decode

ALL = list(COLUMNS)
HOSTS = ("127.0.0.1:1234", "[2001:db8::1]:80", "10.0.0.2:65535")
PLACE = 1 << 40


def records(count: int = 30, *, crc: bool = False, hosts: tuple[str, ...] = HOSTS) -> list[bytes]:
    """Records that differ in every field."""
    kinds = [
        [("KEYS", "k1 k2"), ("UNIQ_KEY", "U1"), ("TAGS", "中文")],
        [("a", "1"), ("TAGS", "t"), ("b", "2")],
        [],
        [("KEYS", "k"), ("DELAY", "3")],
    ]
    found, place = [], PLACE
    for i in range(count):
        found.append(
            reference.encode(
                topic=("TopicA", "%RETRY%" + "t" * 140, "B")[i % 3],
                body=b"body%d" % i * (i % 7),
                properties=kinds[i % 4],
                queue_id=i % 5,
                flag=i - 3,
                queue_offset=100 + i,
                physical_offset=place,
                sys_flag=i % 2,
                born_ms=i,
                born_host=hosts[i % len(hosts)],
                store_ms=1000 * i,
                store_host=hosts[i // 2 % len(hosts)],
                reconsume_times=i % 3,
                prepared_offset=7 * i,
                with_crc=crc,
            )
        )
        place += len(found[-1])
    return found


def laid_out(pieces: list[bytes], order: list[int] | None = None) -> tuple[NDArray, NDArray, NDArray]:
    """Data with junk between the records; starts and sizes in the order given."""
    data, starts = b"", []
    for piece in pieces:
        data += b"\xda\xa3\x20"
        starts.append(len(data))
        data += piece
    rows = range(len(pieces)) if order is None else order
    return (
        np.frombuffer(data + b"\xff", np.uint8),
        np.array([starts[i] for i in rows], np.int64),
        np.array([len(pieces[i]) for i in rows], np.int32),
    )


def as_row(piece: bytes) -> dict:
    """What a record must become: the scalar decoder's message, which the oracle has confirmed."""
    message = dataclasses.asdict(record.decode_message(piece))
    message["keys"] = list(message["keys"])
    message["message_id"] = message["unique_key"] or message["offset_message_id"]
    return message


def as_rows(batch: pa.RecordBatch) -> list[dict]:
    found = batch.to_pylist()
    for row in found:
        for name in ("properties", "system_properties"):
            if name in row:
                row[name] = dict(row[name])
    return found


@pytest.mark.parametrize("crc", [False, True], ids=["", "crc"])
@pytest.mark.parametrize("hosts", [HOSTS, HOSTS[:1], HOSTS[1:2]], ids=["both", "v4", "v6"])
def test_every_column_of_every_row(crc: bool, hosts: tuple[str, ...]) -> None:
    """As the scalar decoder reads them, in any order, wherever the records lie."""
    pieces = records(crc=crc, hosts=hosts)
    for order in (None, list(reversed(range(len(pieces)))), [3, 3, 0]):
        data, starts, sizes = laid_out(pieces, order)
        batch = decode(data, starts, sizes, ALL)
        batch.validate(full=True)
        assert as_rows(batch) == [as_row(pieces[i]) for i in (order or range(len(pieces)))]


@pytest.mark.parametrize("name", ALL)
def test_each_column_alone(name: str) -> None:
    """What is not asked for is not there; types are those of the table."""
    pieces = records()
    data, starts, sizes = laid_out(pieces)
    for verify in (True, False):
        batch = decode(data, starts, sizes, [name], verify_body_crc=verify)
        assert batch.schema == pa.schema([(name, COLUMNS[name])])
        assert [row[name] for row in as_rows(batch)] == [as_row(piece)[name] for piece in pieces]


def test_no_rows_and_no_columns() -> None:
    data, starts, sizes = laid_out(records(2))
    empty = decode(data, starts[:0], sizes[:0], ALL)
    assert empty.num_rows == 0
    assert empty.schema.names == ALL
    assert decode(np.empty(0, np.uint8), starts[:0], sizes[:0], ALL).num_rows == 0
    assert decode(data, starts, sizes, []).num_columns == 0


def test_unknown_columns() -> None:
    data, starts, sizes = laid_out(records(1))
    with pytest.raises(ValueError, match="'colour': no such column; allowed are topic"):
        decode(data, starts, sizes, ["topic", "colour"])


def test_the_result_does_not_share_memory_with_the_data() -> None:
    """The caller's buffer may be used again."""
    pieces = records()
    data, starts, sizes = laid_out(pieces)
    buffer = data.copy()
    batch = decode(buffer, starts, sizes, ALL)
    buffer[:] = 0xFF
    assert as_rows(batch) == [as_row(piece) for piece in pieces]


def test_message_ids_all_none_and_some() -> None:
    """UNIQ_KEY where there is one."""
    pieces = records(4)
    for rows in ([0, 0], [1, 2], [0, 1, 0]):
        data, starts, sizes = laid_out(pieces, rows)
        assert decode(data, starts, sizes, ["message_id"]).column(0).to_pylist() == [
            as_row(pieces[i])["message_id"] for i in rows
        ]


def test_topics_and_properties_that_are_not_utf8() -> None:
    """A foreign record: bytes that are no text become U+FFFD, as in the scalar decoder."""
    piece = bytearray(reference.encode(topic="TopicA", body=b"", properties=[("KEYS", "ab"), ("TAGS", "cd")]))
    piece[piece.index(b"TopicA")] = 0xFF
    piece[piece.index(b"cd")] = 0xFE
    pieces = [bytes(piece), reference.encode(topic="T", body=b"x", properties=[("TAGS", "é")]), bytes(piece)]
    data, starts, sizes = laid_out(pieces)
    assert as_rows(decode(data, starts, sizes, ALL)) == [as_row(p) for p in pieces]
    assert decode(data, starts, sizes, ["topic"]).column(0).to_pylist() == ["\ufffdopicA", "T", "\ufffdopicA"]


def test_more_rows_than_are_decoded_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks are one batch; what is wrong in a later block is named by its own place."""
    monkeypatch.setattr(record_decode, "BLOCK_ROWS", 4)
    for count in (4, 5, 11):
        pieces = records(count)
        data, starts, sizes = laid_out(pieces)
        assert as_rows(decode(data, starts, sizes, ALL)) == [as_row(piece) for piece in pieces]
    pieces = queue(11)
    data, starts, sizes = laid_out(pieces)
    assert decode(data, starts, sizes, ["body"], expected=expected_of(pieces)).num_rows == 11
    data = data.copy()
    data[starts[9] + 88] ^= 1
    with pytest.raises(ChecksumError) as caught:
        decode(data, starts, sizes, ["body"], expected=expected_of(pieces))
    assert caught.value.physical_offset == reference.decode(pieces[9])["physical_offset"]


# ---- what was promised


def expected_of(pieces: list[bytes], **changes: object) -> Expected:
    fields = [reference.decode(piece) for piece in pieces]
    promised = {
        "topic": fields[0]["topic"],
        "queue_id": fields[0]["queue_id"],
        "queue_offsets": np.array([f["queue_offset"] for f in fields]),
        "physical_offsets": np.array([f["physical_offset"] for f in fields]),
    }
    return Expected(**(promised | changes))


def queue(count: int = 5) -> list[bytes]:
    found, place = [], PLACE
    for i in range(count):
        found.append(
            reference.encode(topic="TopicA", queue_id=3, queue_offset=i, physical_offset=place, body=b"b%d" % i)
        )
        place += len(found[-1])
    return found


def test_records_that_are_what_units_promised() -> None:
    pieces = queue()
    data, starts, sizes = laid_out(pieces)
    assert decode(data, starts, sizes, ["body"], expected=expected_of(pieces)).num_rows == 5


@pytest.mark.parametrize("count", [1, 5, 11])
def test_promised_records_give_the_same_columns(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known beforehand is not read again: the columns are those of records nobody promised."""
    monkeypatch.setattr(record_decode, "BLOCK_ROWS", 4)
    pieces = queue(count)
    data, starts, sizes = laid_out(pieces)
    found = decode(data, starts, sizes, ALL, expected=expected_of(pieces))
    assert found.equals(decode(data, starts, sizes, ALL))
    found.validate(full=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"topic": "TopicB"}, "of TopicB/3"),
        ({"topic": "TopicAB"}, "of TopicAB/3"),
        ({"queue_id": 4}, "of TopicA/4"),
        ({"queue_offsets": np.array([0, 1, 7, 3, 4])}, "message 7 of TopicA/3"),
        ({"physical_offsets": np.arange(5) + PLACE}, "PHYSICALOFFSET"),
    ],
)
def test_another_record_than_promised(changes: dict, says: str) -> None:
    """A whole record, but of another topic, queue, number or place."""
    pieces = queue()
    data, starts, sizes = laid_out(pieces)
    with pytest.raises(MagicError) as caught:
        decode(data, starts, sizes, ["body"], expected=expected_of(pieces, **changes), path="commitlog")
    assert says in caught.value.expected
    assert caught.value.path == "commitlog"


# ---- damage


def damaged(change: object, row: int = 2) -> tuple[NDArray, NDArray, NDArray, int]:
    pieces = queue()
    data, starts, sizes = laid_out(pieces)
    data = data.copy()
    change(data[starts[row] : starts[row] + sizes[row]])
    return data, starts, sizes, reference.decode(pieces[row])["physical_offset"]


def put(position: int, value: int) -> object:
    def change(view: NDArray) -> None:
        view[position] = value

    return change


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (put(88, 0), ChecksumError),
        (put(8, 0x7F), ChecksumError),
        (put(4, 0), MagicError),
        (put(0, 1), TornRecordError),
        (put(3, 95), TornRecordError),
        (put(84, 0x80), TornRecordError),
        (put(87, 200), TornRecordError),
        (put(90, 0xFF), TornRecordError),
        (put(90, 3), TornRecordError),
        (put(98, 1), TornRecordError),
        (put(39, 0x30), TornRecordError),
    ],
)
@pytest.mark.parametrize("promised", [True, False])
def test_the_first_bad_record_is_named(change: object, kind: type, promised: bool) -> None:
    """By its place in the log: what the units say, else what it says itself."""
    data, starts, sizes, place = damaged(change)
    expected = expected_of(queue()) if promised else None
    with pytest.raises(kind) as caught:
        decode(data, starts, sizes, ["queue_offset"], expected=expected, path="p")
    assert type(caught.value) is kind
    assert caught.value.physical_offset == place


def test_bodies_are_not_checked_when_not_wanted() -> None:
    data, starts, sizes, _ = damaged(put(88, 0))
    assert decode(data, starts, sizes, ["body"], verify_body_crc=False).column(0)[2].as_py() == b"\x002"


def test_property_crcs_are_checked() -> None:
    """A flipped bit of a head, which the body's CRC does not cover."""
    pieces = records(5, crc=True)
    data, starts, sizes = laid_out(pieces)
    data = data.copy()
    data[starts[3] + 40] ^= 1
    with pytest.raises(ChecksumError) as caught:
        decode(data, starts, sizes, ["queue_offset"])
    assert caught.value.physical_offset == reference.decode(pieces[3])["physical_offset"]


@pytest.mark.parametrize(("start", "size"), [(-1, 90), (0, 1 << 20), (0, 0), (0, -5), (1 << 40, 100), (3, 87)])
def test_units_that_point_nowhere(start: int, size: int) -> None:
    """Before the data, behind them, or at nothing: an error, not garbage."""
    data, starts, sizes = laid_out(queue())
    starts, sizes = starts.copy(), sizes.copy()
    starts[1], sizes[1] = start, size
    with pytest.raises(CorruptionError):
        decode(data, starts, sizes, ["body"])


def test_units_with_another_size() -> None:
    """One byte short, one byte more: not the record's TOTALSIZE."""
    for change in (-1, 1):
        data, starts, sizes = laid_out(queue())
        sizes[4] += change
        with pytest.raises(TornRecordError):
            decode(data, starts, sizes, ["queue_id"])


@settings(max_examples=60)
@given(st.data())
def test_junk_over_records(data: st.DataObject) -> None:
    """Columns as the scalar decoder reads every row, or an error because it refuses one: no third."""
    pieces = records(6, crc=data.draw(st.booleans()))
    buffer, starts, sizes = laid_out(pieces)
    buffer = buffer.copy()
    at = data.draw(st.integers(0, len(buffer) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=6))
    buffer[at : at + len(junk)] = np.frombuffer(junk, np.uint8)[: len(buffer) - at]
    verify = data.draw(st.booleans())
    try:
        wanted = [
            record.decode_message(buffer[a : a + n].tobytes(), verify=verify)
            for a, n in zip(starts, sizes, strict=True)
        ]
        refused = any(message.size != n for message, n in zip(wanted, sizes, strict=True))
    except CorruptionError:
        refused = True
    if refused:
        with pytest.raises(CorruptionError):
            decode(buffer, starts, sizes, ALL, verify_body_crc=verify)
    else:
        batch = decode(buffer, starts, sizes, ALL, verify_body_crc=verify)
        batch.validate(full=True)
        assert [row["body"] for row in as_rows(batch)] == [message.body for message in wanted]
        assert [row["properties"] for row in as_rows(batch)] == [message.properties for message in wanted]
