"""Scans a stretch of the log: where its records are, which are whole, and why the chain ends.

A scan trusts no byte: a record counts only if its place, magic, sizes, sum of lengths and CRCs agree. The compiled
kernel follows the chain start + TOTALSIZE == next start and checks each record. Without the kernel, the chain is
followed first, and then each check is one comparison over all records. The chain ends before the first record that
fails one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from messagestore.format import kernel
from messagestore.format.arrow_bytes import unaligned
from messagestore.format.layout import (
    BLANK,
    CRC_MASK,
    IPV6_EXTRA_SIZE,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PROPERTIES_LENGTH_SIZE,
    PROPERTY_CRC_NAME,
    PROPERTY_CRC_SIZE,
    RECORD_HEAD,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    TOPIC_LENGTH_SIZES,
)

HEAD_DTYPE = RECORD_HEAD.dtype.newbyteorder("=")
"""The dtype of `heads`: the fields of RECORD_HEAD in native byte order."""
HOST_FLAGS = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
MIN_RECORD_SIZE = RECORD_HEAD.size + TOPIC_LENGTH_SIZES[MAGIC_V1] + PROPERTIES_LENGTH_SIZE
"""The size of a V1 record with IPv4 hosts, no body, no topic and no properties."""
PROPERTY_CRC_BEGIN = PROPERTY_CRC_NAME.encode() + b"\x01"
PROPERTY_CRC_DIGITS = PROPERTY_CRC_SIZE - len(PROPERTY_CRC_BEGIN) - 1

MAGIC_POSITION = RECORD_HEAD.offset("magic")
_BEHIND_BORN_HOST: tuple[str, ...] = ("store_timestamp_ms", "store_ip", "store_port")
_BEHIND_HOSTS: tuple[str, ...] = ("reconsume_times", "prepared_transaction_offset", "body_size")
_HOST_FIELDS = {SYS_FLAG_BORN_HOST_V6: ("born_ip", "born_port"), SYS_FLAG_STORE_HOST_V6: ("store_ip", "store_port")}
_BLOCK_SIZE = 1 << 21
"""The number of bytes scanned at once: each record is examined several times and stays in the CPU's cache meanwhile."""
_MAGICS_AS_READ = tuple(int(np.array(magic, ">i4").view("=i4")) for magic in (MAGIC_V1, MAGIC_V2))
FIRST_MAGIC_BYTE = (MAGIC_V1 & 0xFFFFFFFF) >> 24


@dataclass(frozen=True, slots=True)
class ScanEnd:
    """Why a scan stopped.

    Parameters
    ----------
    reason : str
        "end": the data are used up, or end within a record; continue reading at `position`. "zero": TOTALSIZE is 0.
        "blank": a BLANK record fills the rest of the file. Anything else is the fault of the record there: "magic",
        "size", "position" (the record belongs to another place), "length" (its lengths do not add up), "body_crc",
        "property_crc".
    position : int
        The position in the data behind the last valid record.
    expected, found : str
        What should be there and what is, in words.
    """

    reason: str
    position: int
    expected: str
    found: str


# ---- heads


def heads(data: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.void]:
    """The heads of the records at `starts`, unchecked.

    Parameters
    ----------
    data : uint8[m]
    starts : int64[n]
        Each start is followed by at least the 88 bytes of a head.

    Returns
    -------
    structured[n]
        Of `HEAD_DTYPE`. It is also correct for IPv6 hosts, whose address and port are 0.
    """
    if kernel.lib is not None:
        in_c: NDArray[np.void] = np.empty(len(starts), HEAD_DTYPE)
        kernel.lib.heads(np.ascontiguousarray(data), np.ascontiguousarray(starts, np.int64), in_c)
        return in_c
    raw = unaligned(data, f"V{RECORD_HEAD.size}")[starts]
    record_heads: NDArray[np.void] = raw.view(RECORD_HEAD.dtype).astype(HEAD_DTYPE)
    rows = np.flatnonzero(record_heads["sys_flag"] & HOST_FLAGS)
    if len(rows):
        _correct_for_ipv6(data, starts, record_heads, rows)
    return record_heads


def _correct_for_ipv6(
    data: NDArray[np.uint8], starts: NDArray[np.int64], record_heads: NDArray[np.void], rows: NDArray[np.int64]
) -> None:
    """Correct the fields behind the host in the rows with an IPv6 host."""
    flags = record_heads["sys_flag"][rows]
    behind_born = np.where(flags & SYS_FLAG_BORN_HOST_V6, IPV6_EXTRA_SIZE, 0)
    behind_both = behind_born + np.where(flags & SYS_FLAG_STORE_HOST_V6, IPV6_EXTRA_SIZE, 0)
    for names, moved in ((_BEHIND_BORN_HOST, behind_born), (_BEHIND_HOSTS, behind_both)):
        for name in names:
            items = unaligned(data, RECORD_HEAD.dtype[name])
            at = starts[rows] + RECORD_HEAD.offset(name) + moved
            inside = at < len(items)  # a head that the end of the data cuts off reads as 0
            record_heads[name][rows] = np.where(inside, items[np.where(inside, at, 0)], 0)
    for flag, names in _HOST_FIELDS.items():
        cleared = rows[(flags & flag) != 0]
        for name in names:
            record_heads[name][cleared] = 0


def head_sizes(record_heads: NDArray[np.void]) -> NDArray[np.int64]:
    """The number of bytes before the body of each record: 88, 100 or 112."""
    flags = record_heads["sys_flag"]
    extra = ((flags & SYS_FLAG_BORN_HOST_V6) != 0).astype(np.int64) + ((flags & SYS_FLAG_STORE_HOST_V6) != 0)
    sizes: NDArray[np.int64] = RECORD_HEAD.size + IPV6_EXTRA_SIZE * extra
    return sizes


def is_head(head: Any, physical_offset: int) -> bool:
    """Whether one item of `heads` can be the head of the record at `physical_offset`: magic, sizes and place agree."""
    if int(head["magic"]) not in TOPIC_LENGTH_SIZES or int(head["physical_offset"]) != physical_offset:
        return False
    body_size = int(head["body_size"])
    extra = sum(IPV6_EXTRA_SIZE for flag in _HOST_FIELDS if int(head["sys_flag"]) & flag)
    return body_size >= 0 and MIN_RECORD_SIZE + extra + body_size <= int(head["total_size"])


# ---- the parts behind the head


@dataclass(frozen=True, slots=True)
class Parts:
    """The positions of the parts of n records in the data (int64[n]); all are within their record."""

    body_starts: NDArray[np.int64]
    body_ends: NDArray[np.int64]
    topic_starts: NDArray[np.int64]
    topic_ends: NDArray[np.int64]
    property_starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def parts(data: NDArray[np.uint8], starts: NDArray[np.int64], record_heads: NDArray[np.void]) -> tuple[int, Parts]:
    """Locate the parts of each record, as far as the lengths add up.

    Parameters
    ----------
    data : uint8[m]
    starts : int64[n]
        Records that are completely in the data, according to their TOTALSIZE.
    record_heads : structured[n]
        Their heads.

    Returns
    -------
    count : int
        The number of records from the first on whose lengths add up.
    parts : Parts
        The parts of these records.
    """
    body_sizes, flags = record_heads["body_size"], record_heads["sys_flag"]
    wide = np.flatnonzero(record_heads["magic"] == MAGIC_V2)
    length_sizes: Any = TOPIC_LENGTH_SIZES[MAGIC_V1]
    if len(wide):
        length_sizes = np.full(len(starts), length_sizes)
        length_sizes[wide] = TOPIC_LENGTH_SIZES[MAGIC_V2]

    body_starts = starts + (head_sizes(record_heads) if (flags & HOST_FLAGS).any() else RECORD_HEAD.size)
    ends = starts + record_heads["total_size"]
    body_ends = body_starts + body_sizes
    topic_starts = body_ends + length_sizes

    # Each length is read only where the ones before it stay inside the record, so that no index leaves the data.
    count = leading((body_sizes >= 0) & (topic_starts + PROPERTIES_LENGTH_SIZE <= ends))
    topic_starts = topic_starts[:count]

    topic_sizes: NDArray[Any] = data[body_ends[:count]].view(np.int8)
    wide = wide[wide < count]
    if len(wide):
        topic_sizes = topic_sizes.astype(np.int64)
        topic_sizes[wide] = unaligned(data, ">i2")[body_ends[wide]]

    topic_ends = topic_starts + topic_sizes
    property_starts = topic_ends + PROPERTIES_LENGTH_SIZE
    count = leading((topic_sizes >= 0) & (property_starts <= ends[:count]))
    property_starts = property_starts[:count]
    property_sizes = unaligned(data, ">i2")[topic_ends[:count]] if count else np.empty(0, np.int16)
    count = leading(property_starts + property_sizes == ends[:count])

    return count, Parts(
        body_starts[:count],
        body_ends[:count],
        topic_starts[:count],
        topic_ends[:count],
        property_starts[:count],
        ends[:count],
    )


def leading(good: NDArray[np.bool_]) -> int:
    """The number of items from the first on that are true."""
    return len(good) if good.all() else int(good.argmin())


# ---- checksums


def crcs_of_ranges(data: NDArray[np.uint8], starts: NDArray[Any], ends: NDArray[Any]) -> NDArray[np.uint32]:
    """CRC-32 (all 32 bits) of each range of `data`: uint32[n]."""
    starts, ends = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(ends, np.int64)
    crcs = np.empty(len(starts), np.uint32)
    if kernel.lib is not None:
        kernel.lib.crcs_of_ranges(data, starts, ends, crcs)
    else:
        view = data.data
        crcs[:] = [crc32(view[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return crcs


def property_crc_rows(
    data: NDArray[np.uint8], property_starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The rows whose record ends in a `__CRC32#` property."""
    if not len(ends):
        return np.empty(0, np.int64)
    at = ends - PROPERTY_CRC_SIZE  # this stays within the record: no record is that small
    first = np.frombuffer(PROPERTY_CRC_BEGIN, np.uint64, 1)[0]
    rows = np.flatnonzero(unaligned(data, np.uint64)[at] == first)
    if len(rows):
        at = at[rows]
        rows = rows[(at >= property_starts[rows]) & (data[at + len(PROPERTY_CRC_BEGIN) - 1] == PROPERTY_CRC_BEGIN[-1])]
    return rows


def property_crc_digits(crcs: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """The ten ASCII digits of each CRC (top bit cleared), the last one first: uint8[n, 10]."""
    rest = crcs & np.uint32(CRC_MASK)
    digits = np.empty((len(crcs), PROPERTY_CRC_DIGITS), np.uint8)
    ten = np.uint32(10)
    for column in range(PROPERTY_CRC_DIGITS):
        higher = rest // ten
        digits[:, column] = rest - higher * ten
        rest = higher
    digits += np.uint8(ord("0"))
    return digits


def bad_body_crcs(data: NDArray[np.uint8], record_heads: NDArray[np.void], where: Parts) -> NDArray[np.bool_]:
    """True where BODYCRC is not the CRC of the body. An empty body has none."""
    crcs = crcs_of_ranges(data, where.body_starts, where.body_ends) & np.uint32(CRC_MASK)
    bad: NDArray[np.bool_] = (crcs.view(np.int32) != record_heads["body_crc"]) & (record_heads["body_size"] != 0)
    return bad


def bad_property_crcs(data: NDArray[np.uint8], starts: NDArray[np.int64], where: Parts) -> NDArray[np.bool_]:
    """True where a record has a `__CRC32#` that is not the CRC of the bytes before it."""
    bad = np.zeros(len(starts), np.bool_)
    rows = property_crc_rows(data, where.property_starts, where.ends)
    if len(rows):
        ends = where.ends[rows]
        at = ends - PROPERTY_CRC_SIZE
        digits = property_crc_digits(crcs_of_ranges(data, starts[rows], at)).view(f"V{PROPERTY_CRC_DIGITS}")[:, 0]
        stored = unaligned(data, f"V{PROPERTY_CRC_DIGITS}")[at + len(PROPERTY_CRC_BEGIN)]
        bad[rows] = (digits != stored) | (data[ends - 1] != 0x02)
    return bad


# ---- the chain


def scan(
    data: NDArray[np.uint8], physical_offset: int, *, file_bytes_left: int, verify_body_crc: bool = True
) -> tuple[NDArray[np.int64], NDArray[np.void], ScanEnd]:
    """The chain of valid records from `data[0]` on.

    Parameters
    ----------
    data : uint8[m]
        Bytes of one segment.
    physical_offset : int
        The physical offset of `data[0]`.
    file_bytes_left : int
        The number of bytes from `data[0]` to the end of the segment. Every record ends at least 8 bytes before it.
    verify_body_crc : bool
        Check BODYCRC, and `__CRC32#` if it is present.

    Returns
    -------
    starts : int64[n]
        Where each record begins in `data`.
    heads : structured[n]
        The heads of these records, as from `heads`.
    end : ScanEnd
        Why there is no further record. Garbage never raises an error, and no size that it contains is allocated.
    """
    usable = min(len(data), max(file_bytes_left - BLANK.size, 0))
    if kernel.lib is not None:
        starts = np.empty(usable // MIN_RECORD_SIZE, np.int64)
        starts = starts[
            : kernel.lib.scan(np.ascontiguousarray(data), usable, physical_offset, verify_body_crc, starts)
        ].copy()
        record_heads = heads(data, starts)
    else:
        starts, record_heads = _by_arrays(data[:usable], physical_offset, verify_body_crc)
    position = int(starts[-1]) + int(record_heads["total_size"][-1]) if len(starts) else 0
    return starts, record_heads, _why(data, position, physical_offset, file_bytes_left)


def _by_arrays(
    data: NDArray[np.uint8], physical_offset: int, verify_body_crc: bool
) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """The starts and heads of the valid records that follow one another from `data[0]` on and are completely in
    `data`.
    """
    all_starts, all_heads = [np.empty(0, np.int64)], [np.empty(0, HEAD_DTYPE)]
    position, size = 0, _BLOCK_SIZE

    while position < len(data):
        block = data[position : position + size]
        starts, record_heads = _valid(block, physical_offset + position, verify_body_crc)
        if len(starts):
            all_starts.append(starts + position)
            all_heads.append(record_heads)
            position += int(starts[-1]) + int(record_heads["total_size"][-1])
            size = _BLOCK_SIZE
        else:
            size = _total_size(block)
            if not len(block) < size <= len(data) - position:
                break  # otherwise the record is larger than the block
    return np.concatenate(all_starts), np.concatenate(all_heads)


def _valid(
    data: NDArray[np.uint8], physical_offset: int, verify_body_crc: bool
) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """The starts and heads of the valid records of one block."""
    starts = chain(data)
    record_heads = heads(data, starts)
    count = leading(record_heads["physical_offset"] == starts + physical_offset)
    count, where = parts(data, starts[:count], record_heads[:count])
    if verify_body_crc:
        bad = bad_body_crcs(data, record_heads[:count], where) | bad_property_crcs(data, starts[:count], where)
        count = leading(~bad)
    return starts[:count], record_heads[:count]


def _total_size(data: NDArray[np.uint8]) -> int:
    """The TOTALSIZE at `data[0]`, unchecked; 0 if `data` is too short."""
    sizes = unaligned(data, RECORD_HEAD.dtype["total_size"])
    return int(sizes[0]) if len(sizes) else 0


def chain(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The starts of records that follow one another from 0 on, completely in `data`, by magic and TOTALSIZE only."""
    view = data.data
    starts = []
    start, last = 0, len(data) - MIN_RECORD_SIZE
    while start <= last:
        size = int.from_bytes(view[start : start + 4], "big", signed=True)
        if size < MIN_RECORD_SIZE or start + size > len(data):
            break
        starts.append(start)
        start += size

    linked = np.array(starts, np.int64)
    if not len(linked):
        return linked
    magic = unaligned(data, np.int32)[linked + MAGIC_POSITION]
    return linked[: leading((magic == _MAGICS_AS_READ[0]) | (magic == _MAGICS_AS_READ[1]))]


def chains(data: NDArray[np.uint8], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The starts of records in several pieces, which follow one another: `chain` of each piece, all at once.

    Parameters
    ----------
    data : uint8[m]
    ends : int64[k]
        Where each piece ends in `data`. The first one begins at 0, and the others behind the one before.

    Returns
    -------
    tuple of (int64[n], int64[k])
        The starts in their order, and where the last record of each piece ends.
    """
    stops = np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)]
    if len(ends) == 1:  # a step for one record of all pieces would cost ten times as much as one of `chain`
        only = chain(data[: ends[0]])
        if len(only):
            stops[0] = only[-1] + _total_size(data[only[-1] :])
        return only, stops
    if len(data) < MIN_RECORD_SIZE:
        return np.empty(0, np.int64), stops
    words = unaligned(data, RECORD_HEAD.dtype["total_size"])
    steps, on = [np.empty(0, np.int64)], np.arange(len(ends))
    while True:  # a step takes the next record of each piece that has one
        on = on[ends[on] - stops[on] >= MIN_RECORD_SIZE]
        if not len(on):
            return np.sort(np.concatenate(steps)), stops
        starts = stops[on]
        sizes, magic = words[starts].astype(np.int64), words[starts + MAGIC_POSITION]
        good = (sizes >= MIN_RECORD_SIZE) & (sizes <= ends[on] - starts)
        good &= (magic == MAGIC_V1) | (magic == MAGIC_V2)
        on, starts = on[good], starts[good]
        stops[on] = starts + sizes[good]
        steps.append(starts)


def _why(data: NDArray[np.uint8], position: int, physical_offset: int, file_bytes_left: int) -> ScanEnd:
    """What there is at the place where the chain ends."""
    rest = data[position:]
    left = file_bytes_left - position
    read_on = ScanEnd("end", position, "a record", f"{len(rest)} bytes of it")

    # The order of the checks is that of the bytes: each one needs more of the record than the one before it.
    field = np.dtype(RECORD_HEAD.dtype["total_size"])
    if len(rest) < field.itemsize:
        return read_on
    size = int(unaligned(rest, field)[0])
    if size == 0:
        return ScanEnd("zero", position, "a record", "TOTALSIZE 0")

    if len(rest) < BLANK.size:
        return read_on
    magic = int(unaligned(rest, field)[MAGIC_POSITION])
    if magic == MAGIC_BLANK:
        if size == left:
            return ScanEnd("blank", position, "a record", "BLANK")
        return ScanEnd("size", position, f"a BLANK of {left} bytes", f"one of {size}")

    if magic not in TOPIC_LENGTH_SIZES:
        magics = " or ".join(f"{value & 0xFFFFFFFF:#x}" for value in TOPIC_LENGTH_SIZES)
        return ScanEnd("magic", position, f"magic {magics}", f"{magic & 0xFFFFFFFF:#x}")
    if not MIN_RECORD_SIZE <= size <= left - BLANK.size:
        return ScanEnd("size", position, f"TOTALSIZE of {MIN_RECORD_SIZE} to {left - BLANK.size}", str(size))

    if len(rest) < RECORD_HEAD.size:
        return read_on
    own = np.zeros(1, np.int64)
    head = heads(rest, own)
    if int(head["physical_offset"][0]) != physical_offset + position:
        wanted = f"PHYSICALOFFSET {physical_offset + position}"
        return ScanEnd("position", position, wanted, str(int(head["physical_offset"][0])))

    if len(rest) < size:
        return read_on
    count, where = parts(rest, own, head)
    if not count:
        return ScanEnd("length", position, f"lengths that add up to TOTALSIZE {size}", "others")

    if bad_body_crcs(rest, head, where)[0]:
        crc = int(crcs_of_ranges(rest, where.body_starts, where.body_ends)[0]) & CRC_MASK
        return ScanEnd("body_crc", position, f"BODYCRC {crc:08x}", f"{int(head['body_crc'][0]) & 0xFFFFFFFF:08x}")
    return ScanEnd("property_crc", position, f"the CRC of the record in {PROPERTY_CRC_NAME}", "another")
