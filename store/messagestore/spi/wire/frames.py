"""Frames: a JSON head, and raw buffers behind it. They make up the streams of `gather`, `stage` and `commit`.

    | u32 size | JSON head, `size` bytes | buffer | buffer | ...

The size is little-endian. The head names its buffers in their order: `"buffers": [["data", 4096], ["sizes", 80]]`. A
buffer whose content nothing else protects has its CRC-32 there, too: `["data", 4096, 305419896]`. The last frame of a
stream has `done` or `error` in its head. A stream that ends without one was cut, and nothing may be concluded from it.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import ProtocolError
from messagestore.format.json_text import bounded_json
from messagestore.format.record import crc32

_SIZE = struct.Struct("<I")
HEAD_SIZE = _SIZE.size
"""The bytes in front of a head."""
MOST_VALUES = 2_000_000
"""How many values a JSON text may have."""
BLOCK = 256 * 1024
"""How many bytes TLS sends, or anybody receives, at a time: a time-out counts for each time."""
LAST_CHUNK = memoryview(b"0\r\n\r\n")
"""The end of an HTTP body in chunks."""
_TOGETHER = 64 * 1024
_MOST_BUFFERS = 16

Buffer = memoryview
"""Raw bytes."""


class Frame(NamedTuple):
    """A head, and its buffers by name. Each buffer is `uint8[n]`, which may be written to; `crcs` has the CRC-32 of
    those that came with one.
    """

    head: dict[str, Any]
    buffers: dict[str, NDArray[np.uint8]]
    crcs: dict[str, int]


class _Announced(NamedTuple):
    """What a head says of a buffer."""

    size: int
    crc: int | None


def packed(
    head: dict[str, Any], buffers: Sequence[tuple[str, Any]] = (), *, with_crcs: bool = False
) -> list[memoryview]:
    """The bytes of a frame, in pieces that can be sent one after the other; the buffers are not copied."""
    views = [(name, memoryview(data).cast("B") if len(data) else memoryview(b"")) for name, data in buffers]
    if with_crcs:
        head = {**head, "buffers": [[name, len(view), crc32(view)] for name, view in views]}
    elif views:
        head = {**head, "buffers": [[name, len(view)] for name, view in views]}
    text = json.dumps(head, separators=(",", ":")).encode("utf-8")
    return [memoryview(_SIZE.pack(len(text)) + text), *(view for _, view in views if len(view))]


def as_chunk(pieces: Sequence[memoryview]) -> list[memoryview]:
    """A frame as a chunk of an HTTP body."""
    return [memoryview(b"%x\r\n" % sum(map(len, pieces))), *pieces, memoryview(b"\r\n")]


def send(sock: socket.socket, pieces: Iterable[memoryview]) -> None:
    """Send the pieces of a frame.

    The socket's time-out counts for each `BLOCK` bytes: who takes a large piece slowly is not silent. `sendall` would
    count it for all that it is given, and small calls cost more. So does `send` with TLS, which gets blocks.

    Raises
    ------
    TimeoutError
        The receiver has taken less than a block in this time.
    """
    most = BLOCK if isinstance(sock, ssl.SSLSocket) else None
    timeout_s, since_s, taken = sock.gettimeout(), time.monotonic(), 0
    for left in _together(pieces):
        while len(left):
            count = sock.send(left[:most])
            left, taken = left[count:], taken + count  # noqa: PLW2901
            if taken >= BLOCK:
                since_s, taken = time.monotonic(), 0
            elif timeout_s is not None and time.monotonic() - since_s > timeout_s:
                raise TimeoutError(f"only {taken:,} bytes were taken in {timeout_s:g} s")


def _together(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The pieces, but small ones that follow each other as one, since each that is sent wakes the receiver."""
    together = bytearray()
    for piece in pieces:
        if len(together) + len(piece) <= _TOGETHER:
            together += piece
            continue
        if together:
            yield memoryview(together)
            together = bytearray()
        yield piece
    if together:
        yield memoryview(together)


def read(take: Callable[[memoryview], None], head_limit: int, limit: int, room: Callable[[int], None]) -> Frame:
    """Read a frame.

    Parameters
    ----------
    take : function
        Fills a memoryview with the next bytes, or raises.
    head_limit, limit : int
        The largest head, and the largest sum of head and buffers.
    room : function
        Called with the size of the buffers before memory is taken for them.

    Raises
    ------
    ProtocolError
        A size is over its limit, or the head is not what a head must be.
    """
    start = bytearray(HEAD_SIZE)
    take(memoryview(start))
    (size,) = _SIZE.unpack(start)
    if not 2 <= size <= head_limit:
        raise ProtocolError(f"frame: found a head of {size:,} bytes; allowed are 2 to {head_limit:,}")

    text = bytearray(size)
    take(memoryview(text))
    head, announced = parsed_head(text)

    total = sum(buffer.size for buffer in announced.values())
    if size + total > limit:
        raise ProtocolError(
            f"frame: found {size + total:,} bytes; allowed are {limit:,}. If this is one large message, start the "
            f"server with a larger --frame; otherwise send fewer messages at a time"
        )
    room(total)

    buffers, crcs = {}, {}
    for name, (count, wanted) in announced.items():
        buffers[name] = buffer = np.empty(count, np.uint8)
        if wanted is None:
            if count:
                take(buffer.data)
        else:
            crcs[name] = crc = _taken(take, buffer)
            if crc != wanted:
                raise ProtocolError(
                    f"frame: the CRC of the buffer {name!r} is {crc:08x}, and its head says {wanted:08x}. It was "
                    "changed on its way; send it again"
                )
    return Frame(head, buffers, crcs)


def _taken(take: Callable[[memoryview], None], buffer: NDArray[np.uint8]) -> int:
    """Fill a buffer; returns its CRC-32, computed block by block while the block is in the processor's cache."""
    crc = 0
    for start in range(0, len(buffer), BLOCK):
        block = buffer[start : start + BLOCK].data
        take(block)
        crc = crc32(block, crc)
    return crc


def parsed_head(text: bytes | bytearray) -> tuple[dict[str, Any], dict[str, _Announced]]:
    """A head without its buffers, and what it says of these by name.

    Raises
    ------
    ProtocolError
        The text is not JSON, or not that of a head.
    """
    try:
        head = bounded_json(text.decode("utf-8"), MOST_VALUES)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"frame: the head is not JSON that is read: {error}") from error
    if not isinstance(head, dict):
        raise ProtocolError("frame: found a head that is not a JSON object")

    named = head.pop("buffers", [])
    announced = {}
    try:
        for name, count, *crcs in named:
            are_numbers = all(type(value) is int and value >= 0 for value in (count, *crcs))
            if not isinstance(name, str) or len(crcs) > 1 or not are_numbers:
                raise ValueError
            announced[name] = _Announced(count, crcs[0] if crcs else None)
    except (TypeError, ValueError) as error:
        raise ProtocolError("frame: `buffers` must be a list of names with sizes") from error

    if len(announced) != len(named) or len(announced) > _MOST_BUFFERS:
        raise ProtocolError(f"frame: found {len(named)} buffers; allowed are {_MOST_BUFFERS} with different names")
    return head, announced


def numbers(frame: Frame, name: str, dtype: str) -> NDArray[Any]:
    """A buffer as numbers of one little-endian type.

    Raises
    ------
    ProtocolError
        The buffer is missing, or is not a whole number of them.
    """
    buffer = frame.buffers.get(name)
    if buffer is None:
        raise ProtocolError(f"frame: the buffer {name!r} is missing")
    kind = np.dtype(dtype)
    if len(buffer) % kind.itemsize:
        raise ProtocolError(
            f"frame: the buffer {name!r} has {len(buffer)} bytes; allowed are multiples of {kind.itemsize}"
        )
    return buffer.view(kind).astype(kind.newbyteorder("="), copy=False)
