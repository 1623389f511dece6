"""Message contents that resemble something else: zeros, magics, the store's own records, colliding hashes.

A store must not interpret what a user sends. Any put of the harness whose number is at least `FROM`, and any batch of
an app whose name begins with `APP`, has such contents in its body, keys, tags and properties; they are the same for the
same number. Bodies still begin with the sender, so that the judge can count them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

import reference

FROM = 1_000_000
"""Puts with this number or a higher one are hostile."""
APP = "hostile"
BATCH_TOPIC = "rmq_sys_spark_sink"
BATCH_BODY = b'{"messagestore":1,"app":'
ENCODING = "latin-1"
"""The encoding of the harness's bodies: every byte is a character."""

_SECTOR_SIZE = 512
_PROPERTIES_AT_MOST = 2000


def _forged(number: int) -> bytes:
    """Return a whole, correct record of the BATCH topic, with a place that may be the true one."""
    body = BATCH_BODY + b'"app-1","version":%d,"end":%d}' % (number, 1 << 40)
    return reference.encode(
        topic=BATCH_TOPIC,
        body=body,
        properties=[("KEYS", "app-1")],
        physical_offset=91 * number,
        queue_offset=number % 7,
        store_ms=1 << 41,
    )


def _bodies(number: int) -> tuple[bytes, ...]:
    return (
        bytes(3 * _SECTOR_SIZE),
        BATCH_BODY * 5,
        BATCH_TOPIC.encode() + b"\x00\x00",
        reference.V1.to_bytes(4, "big") * 40,
        b"\x00\x00\x00\x80" + reference.V2.to_bytes(4, "big") + bytes(80),
        b"\x00\x00\x10\x00" + reference.BLANK.to_bytes(4, "big"),
        _forged(number),
        _forged(number)[8:],
        b"\x01\x02__CRC32#\x010000000000\x02",
        b"plumless" if number % 2 else b"buckeroo",  # both have the same CRC-32
        b"",
    )


_VALUES = (
    "\0" * _SECTOR_SIZE,
    "\0" * (2 * _SECTOR_SIZE - 1),
    "\0" * 1500,
    "x" + "\0" * 1100 + "x",
    BATCH_BODY.decode(),
    BATCH_TOPIC,
    "__CRC32#",
    "\u06a3\u0660\u07a7",
    "a",
)
_COLLIDING = ("AaAa", "AaBB", "BBAa", "BBBB")
"""Strings with the same Java hash."""


def is_hostile(text: str) -> bool:
    """Whether a body is that of a hostile put."""
    return text.startswith("put/") and int(text.split("/", 2)[1]) >= FROM


def tail(number: int) -> str:
    """Return what follows in the body, with one character for each byte."""
    choices = _bodies(number)
    return choices[number % len(choices)].decode(ENCODING)


def keys(number: int) -> tuple[str, ...]:
    """Return keys that collide with those of others, and one that is the message's own."""
    return (_COLLIDING[number % 4], f"h{number}", "\0" * (number % 3 * 300 + 1))


def tags(number: int) -> str:
    """Return tags with one hash, or tags of zeros."""
    return "\0" * 600 if number % 5 == 4 else _COLLIDING[number // 2 % 4]


def properties(number: int) -> dict[str, str]:
    """Return two properties with values from `_VALUES`."""
    first, second = _VALUES[number % len(_VALUES)], _VALUES[(number * 5 + 3) % len(_VALUES)]
    return {"padded": first, BATCH_TOPIC: second[: _PROPERTIES_AT_MOST - len(first)] or "-"}


def texts(number: int) -> dict[str, Any]:
    """Return keys, tags and properties of a message, as `Message` takes them."""
    return {"keys": keys(number), "tags": tags(number), "properties": properties(number)}


def columns(numbers: Sequence[int]) -> dict[str, pa.Array]:
    """Return the same for many messages, as columns."""
    return {
        "keys": pa.array([list(keys(number)) for number in numbers]),
        "tags": pa.array([tags(number) for number in numbers]),
        "properties": pa.array(
            [list(properties(number).items()) for number in numbers], pa.map_(pa.string(), pa.string())
        ),
    }
