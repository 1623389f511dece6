"""Hosts: how a record and a message id hold an address and a port.

A host is 4 or 16 address bytes in network order and a 4-byte port: 8 bytes for IPv4, 20 for IPv6. The offset message id
is a store host followed by the record's physical offset, in upper-case hex: 32 or 56 characters.

Source: RocketMQ `common/message/MessageDecoder.java`.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from messagestore.errors import MessageIllegalError
from messagestore.format.layout import IPV6_EXTRA_SIZE

_PORT_SIZE = 4
_OFFSET_SIZE = 8
HOST_V4_SIZE = 8
"""The size of an IPv4 host in bytes."""
HOST_V6_SIZE = HOST_V4_SIZE + IPV6_EXTRA_SIZE
"""The size of an IPv6 host in bytes."""

_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<v4>[0-9.]+)):(?P<port>[0-9]{1,5})", re.ASCII)


@lru_cache(maxsize=1024)
def pack_host(host: object) -> bytes:
    """The bytes of `ip:port` (8) or `[ip]:port` (20).

    Raises
    ------
    MessageIllegalError
        The text is neither, or the port is above 65535. Host names are not looked up.
    """
    match = _HOST.fullmatch(host) if isinstance(host, str) else None
    try:
        if match is None or int(match["port"]) > 0xFFFF:
            raise ValueError(host)
        address = ipaddress.IPv4Address(match["v4"]) if match["v4"] else ipaddress.IPv6Address(match["v6"])
    except ValueError:
        raise MessageIllegalError(
            f"host: found {repr(host)[:80]}; allowed is ip:port, or [ip]:port for IPv6, with a port up to 65535",
            field="host",
        ) from None
    return address.packed + int(match["port"]).to_bytes(_PORT_SIZE, "big")


@lru_cache(maxsize=1024)
def unpack_host(host: bytes) -> str:
    """`ip:port` or `[ip]:port` from 8 or 20 bytes. The port is shown as it is stored, a signed int32.

    Raises
    ------
    ValueError
        There are neither 8 nor 20 bytes.
    """
    if len(host) not in (HOST_V4_SIZE, HOST_V6_SIZE):
        raise ValueError(f"host: found {len(host)} bytes; allowed are {HOST_V4_SIZE} or {HOST_V6_SIZE}")
    port = int.from_bytes(host[-_PORT_SIZE:], "big", signed=True)
    if len(host) == HOST_V4_SIZE:
        return f"{ipaddress.IPv4Address(host[:-_PORT_SIZE])}:{port}"
    return f"[{ipaddress.IPv6Address(host[:-_PORT_SIZE])}]:{port}"


def offset_message_id(store_host: bytes, physical_offset: int) -> str:
    """The offset message id: a packed store host and the record's physical offset, in upper-case hex."""
    return (store_host + physical_offset.to_bytes(_OFFSET_SIZE, "big", signed=True)).hex().upper()


def parse_offset_message_id(text: object) -> tuple[str, int]:
    """The store host (`ip:port`) and the physical offset of an offset message id.

    Raises
    ------
    MessageIllegalError
        The id does not have 32 or 56 hex characters, or its offset is negative.
    """
    sizes = {2 * (size + _OFFSET_SIZE) for size in (HOST_V4_SIZE, HOST_V6_SIZE)}
    data = b""
    if isinstance(text, str) and len(text) in sizes and re.fullmatch("[0-9a-fA-F]+", text):
        data = bytes.fromhex(text)
    physical_offset = int.from_bytes(data[-_OFFSET_SIZE:], "big", signed=True)
    if not data or physical_offset < 0:
        raise MessageIllegalError(
            f"offset message id: found {repr(text)[:80]}; allowed are 32 (IPv4) or 56 (IPv6) hex characters, which are "
            "the store host and the physical offset",
            field="offset_message_id",
        )
    return unpack_host(data[:-_OFFSET_SIZE]), physical_offset
