"""Bodies that a RocketMQ client compressed: SYSFLAG says whether, and how.

Java's LZ4 bodies are LZ4 frames. Bodies of old clients, which name no method, are zlib's.

Source: RocketMQ common/sysflag/MessageSysFlag.java, common/compression/.
"""

from __future__ import annotations

import zlib

import pyarrow as pa

from messagestore.format.layout import SYS_FLAG_COMPRESSED, SYS_FLAG_COMPRESSION_MASK, SYS_FLAG_COMPRESSION_SHIFT

MAX_PLAIN_SIZE = 64 * 1024 * 1024
"""The largest body after decompression. Clients compress bodies of at most `maxMessageSize` (4 MiB unless set)."""
_ZLIB, _LZ4, _ZSTD = "zlib", "lz4", "zstd"
_METHODS = {0: _ZLIB, 1: _LZ4, 2: _ZSTD, 3: _ZLIB}


def plain_body(body: bytes, sys_flag: int) -> bytes:
    """The body of a message without compression.

    Raises
    ------
    ValueError
        The body is damaged, too large without compression, or compressed by an unknown method; the text says which.
    """
    if not sys_flag & SYS_FLAG_COMPRESSED:
        return body

    number = (sys_flag & SYS_FLAG_COMPRESSION_MASK) >> SYS_FLAG_COMPRESSION_SHIFT
    method = _METHODS.get(number)
    if method is None:
        raise ValueError(f"the method of compression {number} in SYSFLAG is unknown")

    try:
        plain = _zlib_plain(body) if method == _ZLIB else _stream_plain(body, method)
    except (OSError, zlib.error) as error:
        raise ValueError(f"{method} cannot decompress it ({error})") from None

    if len(plain) > MAX_PLAIN_SIZE:
        raise ValueError(f"it has more than {MAX_PLAIN_SIZE} bytes without compression")
    return plain


def _zlib_plain(body: bytes) -> bytes:
    stream = zlib.decompressobj()
    plain = stream.decompress(body, MAX_PLAIN_SIZE + 1)
    if not stream.eof and len(plain) <= MAX_PLAIN_SIZE:
        raise OSError("the end is missing")
    return plain


def _stream_plain(body: bytes, method: str) -> bytes:
    if not body:
        raise OSError("the body is empty")
    with pa.input_stream(pa.py_buffer(body), compression=method) as stream:
        plain: bytes = stream.read(MAX_PLAIN_SIZE + 1)
    return plain
