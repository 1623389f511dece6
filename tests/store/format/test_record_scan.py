"""The chain of records in a stretch of the log."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import reference
from messagestore.format import layout, record, record_scan
from messagestore.format.record_scan import HEAD_DTYPE, chain, chains, crcs_of_ranges, heads, is_head, scan

PLACE = 4096
"""Physical offset of the first record of a log made here."""
MAGIC = layout.MAGIC_V1.to_bytes(4, "big", signed=True)
HOSTS = ("127.0.0.1:1", "[2001:db8::1]:2")


def log_of(bodies: list[bytes], *, crc: bool = False, hosts: tuple[str, ...] = HOSTS[:1]) -> tuple[NDArray, list[int]]:
    """Records back to back, and where each begins; hosts by turns."""
    data, starts = b"", []
    for i, body in enumerate(bodies):
        starts.append(len(data))
        data += reference.encode(
            topic="TopicA" if i % 5 else "%RETRY%" + "t" * 150,
            body=body,
            properties=[("KEYS", f"k{i}"), ("TAGS", "t")] if i % 3 else [],
            queue_id=i,
            queue_offset=i,
            physical_offset=PLACE + len(data),
            born_ms=i,
            store_ms=1000 + i,
            born_host=hosts[i % len(hosts)],
            store_host=hosts[i // 2 % len(hosts)],
            reconsume_times=i,
            prepared_offset=2 * i,
            with_crc=crc,
        )
    return np.frombuffer(data, np.uint8).copy(), starts


def bodies_of(count: int, size: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randrange(size)) for _ in range(count)]


LOGS = {
    "small": log_of(bodies_of(40, 100)),
    "hosts": log_of(bodies_of(40, 100), hosts=HOSTS),
    "crc": log_of(bodies_of(40, 100), crc=True, hosts=HOSTS),
    "magic in every body": log_of([MAGIC * (i % 7) for i in range(40)]),
    "records in a body": log_of([LOG.tobytes() for LOG in [log_of(bodies_of(3, 50, i))[0] for i in range(20)]]),
    "large": log_of(bodies_of(20, 4000), crc=True),
    "one large, then small": log_of([b"x" * 5000, *bodies_of(20, 50)]),
    "one small, then large": log_of([b"", *bodies_of(10, 9000)]),
}
logs = pytest.mark.parametrize("log", LOGS.values(), ids=LOGS.keys())


def scanned(data: NDArray, *, left: int | None = None, **more: bool) -> tuple[list[int], NDArray, record_scan.ScanEnd]:
    starts, found, end = scan(data, PLACE, file_bytes_left=len(data) + 8 if left is None else left, **more)
    return starts.tolist(), found, end


# ---- heads


@logs
def test_heads_are_what_the_oracle_reads(log: tuple[NDArray, list[int]]) -> None:
    """Whatever the hosts: every field behind them is right; the address of an IPv6 host is 0."""
    data, starts = log
    found = heads(data, np.array(starts))
    assert found.dtype == HEAD_DTYPE
    assert found.dtype["queue_offset"].isnative
    for head, start in zip(found, starts, strict=True):
        size = int(head["total_size"])
        wanted = reference.decode(data[start : start + size].tobytes())
        assert size == wanted["size"]
        for name in ("body_crc", "queue_id", "flag", "queue_offset", "physical_offset", "sys_flag", "born_timestamp_ms",
                     "store_timestamp_ms", "reconsume_times", "prepared_transaction_offset"):  # fmt: skip
            assert head[name] == wanted[name], name
        assert head["body_size"] == len(wanted["body"])
        for side, bit in (("born", 0x10), ("store", 0x20)):
            host = reference.host(wanted[f"{side}_host"])
            plain = struct.unpack(">Ii", host) if not wanted["sys_flag"] & bit else (0, 0)
            assert (head[f"{side}_ip"], head[f"{side}_port"]) == plain
        assert is_head(head, PLACE + start)
        assert not is_head(head, PLACE + start + 1)


def test_a_head_cut_behind_an_ipv6_host() -> None:
    """88 bytes of a record with IPv6 hosts: what is cut off reads as 0, nothing raises."""
    data, _ = log_of([b"body"], hosts=HOSTS[1:])
    head = heads(data[:88], np.zeros(1, np.int64))[0]
    assert head["store_timestamp_ms"] == 1000
    assert head["body_size"] == 0
    assert heads(data[:112], np.zeros(1, np.int64))["body_size"].tolist() == [4]


@pytest.mark.parametrize(
    ("name", "value"), [("magic", 0), ("body_size", -1), ("body_size", 1 << 20), ("total_size", 90)]
)
def test_what_is_no_head(name: str, value: int) -> None:
    data, _ = LOGS["small"]
    head = heads(data, np.zeros(1, np.int64))
    head[name] = value
    assert not is_head(head[0], PLACE)


# ---- whole logs


@logs
@pytest.mark.parametrize("verify", [True, False])
def test_whole_logs(log: tuple[NDArray, list[int]], verify: bool) -> None:
    """Every record is found, and the scan ends where the data do: used up, zero, or cut."""
    data, starts = log
    found, head, end = scanned(data, verify_body_crc=verify)
    assert found == starts
    assert head["queue_id"].tolist() == list(range(len(starts)))
    assert (end.reason, end.position) == ("end", len(data))
    zeros = np.concatenate([data, np.zeros(300, np.uint8)])
    found, _, end = scanned(zeros, left=len(zeros), verify_body_crc=verify)
    assert found == starts
    assert (end.reason, end.position) == ("zero", len(data))
    for cut in (1, 30, len(data) - starts[-1] - 1):
        found, _, end = scanned(data[: len(data) - cut], left=len(data) + 8, verify_body_crc=verify)
        assert found == starts[:-1]
        assert (end.reason, end.position) == ("end", starts[-1])


@logs
@pytest.mark.parametrize("size", [91, 200, 1000, 6000])
def test_logs_of_several_blocks(log: tuple[NDArray, list[int]], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that end with a block, cross its end, or are larger than it."""
    monkeypatch.setattr(record_scan, "_BLOCK_SIZE", size)
    data, starts = log
    found, head, end = scanned(data)
    assert found == starts
    assert head["queue_id"].tolist() == list(range(len(starts)))
    assert (end.reason, end.position) == ("end", len(data))
    for row in (0, len(starts) // 2, len(starts) - 1):
        broken = data.copy()
        broken[starts[row] + 35] ^= 1
        found, _, end = scanned(broken)
        assert found == starts[:row]
        assert (end.reason, end.position) == ("position", starts[row])
        assert scanned(data[: starts[row] + 50], left=len(data) + 8)[0] == starts[:row]


@logs
def test_the_end_of_the_file(log: tuple[NDArray, list[int]]) -> None:
    """A BLANK fills the file exactly; a record never ends nearer than 8 bytes to its end."""
    data, starts = log
    for left in (8, 9, 1000):
        full = np.concatenate(
            [data, np.frombuffer(struct.pack(">iI", left, 0xCBD43194), np.uint8), np.zeros(left - 8, np.uint8)]
        )
        found, _, end = scanned(full, left=len(full))
        assert found == starts
        assert (end.reason, end.position) == ("blank", len(data))
        _, _, end = scanned(full, left=len(full) + 1)
        assert (end.reason, end.position) == ("size", len(data))
    for left in (0, 1, 7):
        found, _, end = scanned(data, left=len(data) + left)
        assert found == starts[:-1]
        assert (end.reason, end.position) == ("size", starts[-1])


def test_every_cut() -> None:
    """Cut anywhere, the records before the cut are found and the rest is to be read on."""
    data, starts = log_of(bodies_of(4, 60), crc=True, hosts=HOSTS)
    ends = [*starts[1:], len(data)]
    for size in range(len(data) + 1):
        found, _, end = scanned(data[:size], left=len(data) + 8)
        whole = sum(e <= size for e in ends)
        assert found == starts[:whole]
        assert (end.reason, end.position) == ("end", ([*starts, len(data)])[whole])


# ---- damage


@logs
def test_every_kind_of_damage(log: tuple[NDArray, list[int]]) -> None:
    """A flipped bit ends the chain at its record, or is one that no check covers; nothing else is lost or found."""
    data, starts = log
    rng = random.Random(7)
    for _ in range(150):
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        broken = data.copy()
        broken[at] ^= 1 << bit
        found, _, end = scanned(broken)
        row = int(np.searchsorted(starts, at, "right")) - 1
        if end.reason == "end" and end.position == len(data):
            assert found == starts
        else:
            assert found == starts[:row]
            assert end.position == starts[row]


@pytest.mark.parametrize(
    ("position", "junk", "reason"),
    [
        (0, b"\0\0\0\0", "zero"),
        (0, b"\xff\xff\xff\xff", "size"),
        (0, b"\x7f\xff\xff\xff", "size"),
        (0, b"\0\0\0\x57", "size"),
        (0, b"\0\0\0\x80", "length"),
        (3, b"\x60", "length"),
        (4, b"\0", "magic"),
        (4, struct.pack(">I", 0xCBD43194), "size"),
        (7, b"\xab", "length"),  # V2: another length of the topic's length
        (8, b"\0\0\0\0", "body_crc"),
        (35, b"\1", "position"),
        (39, b"\x30", "length"),
        (84, b"\xff\xff\xff\xff", "length"),
        (84, b"\0\0\0\0", "length"),
        (88, b"#", "body_crc"),
        (93, b"\xff", "length"),
        (100, b"\xff\xff", "length"),
        (27, b"\x09", "property_crc"),
        (-2, b"x", "property_crc"),
        (-1, b"x", "property_crc"),
    ],
)
@pytest.mark.parametrize("walk", [False, True], ids=["arrays", "walk"])
def test_why_a_chain_ends(position: int, junk: bytes, reason: str, walk: bool) -> None:
    """One field after the other is made to lie, in the second of three records, for both ways to follow the chain."""

    def made(body: bytes, place: int) -> bytes:
        return reference.encode(topic="TopicA", body=body, physical_offset=place, with_crc=True)

    first = made(b"x" * (2000 if walk else 20), PLACE)
    second = bytearray(made(b"hello", PLACE + len(first)))
    third = made(b"x", PLACE + len(first) + len(second))
    second[position : position + len(junk) or None] = junk
    data = np.frombuffer(first + bytes(second) + third, np.uint8)
    starts, _, end = scanned(data)
    assert starts == [0]
    assert (end.reason, end.position) == (reason, len(first))
    assert end.expected
    assert end.found


def test_damage_of_bodies_is_passed_over_without_verifying() -> None:
    data, starts = log_of([b"hello"] * 3, crc=True)
    data[starts[1] + 88] ^= 1
    assert scanned(data, verify_body_crc=False)[0] == starts
    assert scanned(data)[2].reason == "body_crc"


@given(st.binary(max_size=300), st.integers(-10, 400), st.booleans())
def test_garbage_never_raises(junk: bytes, left: int, verify: bool) -> None:
    starts, found, end = scan(np.frombuffer(junk, np.uint8), PLACE, file_bytes_left=left, verify_body_crc=verify)
    assert len(starts) == len(found) == 0
    assert end.position == 0


@given(st.data())
def test_records_overwritten_by_records(data: st.DataObject) -> None:
    """Pieces of logs in any order: what is found is a chain of records that the oracle reads, from 0 on."""
    source = LOGS["crc"][0].tobytes()[:2500]
    junk = bytearray(source)
    for _ in range(data.draw(st.integers(1, 3))):
        to, at = data.draw(st.integers(0, len(source) - 1)), data.draw(st.integers(0, len(source) - 1))
        size = data.draw(st.integers(1, 400))
        junk[to : to + size] = source[at : at + size]
    starts, found, _ = scanned(np.frombuffer(bytes(junk), np.uint8))
    place = 0
    for start, size in zip(starts, found["total_size"].tolist(), strict=True):
        assert start == place
        place += size
        piece = bytes(junk[start:place])
        assert record.decode_message(piece, physical_offset=PLACE + start).physical_offset == PLACE + start
        assert reference.decode(piece)["size"] == size


@given(st.data())
def test_the_chains_of_several_pieces(data: st.DataObject) -> None:
    """As each piece alone, whatever is damaged."""
    pieces = []
    for sizes in data.draw(st.lists(st.lists(st.integers(0, 40), max_size=5), max_size=6)):
        piece = bytearray(log_of([b"x" * size for size in sizes])[0].tobytes()) if sizes else bytearray()
        if piece and data.draw(st.booleans()):
            piece[data.draw(st.integers(0, len(piece) - 1))] = data.draw(st.integers(0, 255))
        pieces.append(bytes(piece[: data.draw(st.integers(0, len(piece)))] if data.draw(st.booleans()) else piece))

    wanted, stops, begin = list[int](), list[int](), 0
    for piece in pieces:
        starts = chain(np.frombuffer(piece, np.uint8)).tolist()
        wanted += [begin + start for start in starts]
        size = int.from_bytes(piece[starts[-1] : starts[-1] + 4], "big") if starts else 0
        stops.append(begin + (starts[-1] + size if starts else 0))
        begin += len(piece)
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    found, found_stops = chains(np.frombuffer(b"".join(pieces), np.uint8), ends)
    assert (found.tolist(), found_stops.tolist()) == (wanted, stops)


def test_offsets_beyond_32_bits() -> None:
    """A log far from its origin."""
    place = (1 << 53) + 12345
    data = np.frombuffer(reference.encode(topic="T", body=b"x", physical_offset=place), np.uint8)
    starts, found, _ = scan(data, place, file_bytes_left=1 << 40)
    assert starts.tolist() == [0]
    assert found["physical_offset"].tolist() == [place]


# ---- checksums


@pytest.mark.parametrize("size", [0, 1, 50, 5000, 20_000])
def test_crcs(size: int) -> None:
    values = [(b"%d" % i) * (size // 2) for i in range(23)]
    ends = np.cumsum([len(value) for value in values])
    starts = np.concatenate([[0], ends[:-1]])
    ranges = crcs_of_ranges(np.frombuffer(b"".join(values), np.uint8), starts, ends)
    assert ranges.tolist() == [record.crc32(value) for value in values]


def test_crcs_of_nothing() -> None:
    assert crcs_of_ranges(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)).tolist() == []


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_property_crc_digits(crcs: list[int]) -> None:
    digits = record_scan.property_crc_digits(np.array(crcs, np.uint32))
    assert [bytes(row) for row in digits] == [record.crc_digits(crc) for crc in crcs]
