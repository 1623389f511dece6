"""Frames of the remoting protocol as bytes: one request or one answer each. Big-endian; no socket is used here.

    4    size of what follows
    1    how the header is written: 0 JSON, 1 ROCKETMQ
    3    size of the header
    n    header: code, language, version, opaque, flag, remark, and the fields of the request
    m    body

RocketMQ remoting/protocol/RemotingCommand.java, RocketMQSerializable.java.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from messagestore.errors import ProtocolError
from messagestore.format.json_text import bounded_json
from messagestore.remoting.settings import JSON, ROCKETMQ

SIZE_BYTES = 4
FRAME_LIMIT = 64 * 1024 * 1024
"""A frame may have this many bytes. A broker refuses larger ones, too, unless it is told otherwise (16 MiB)."""
MOST_VALUES = 100_000
"""The largest number of values in a JSON header."""
VERSION = 479
"""The version that requests name: that of 5.3.3 (`MQVersion`). Older brokers take any."""
ANSWER_FLAG, ONEWAY_FLAG = 1, 2
_PYTHON, _LANGUAGES = 3, ("JAVA", "CPP", "DOTNET", "PYTHON")
_TYPES = {JSON: 0, ROCKETMQ: 1}
_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Frame:
    """One request or answer.

    Parameters
    ----------
    code : int
        Of a request, what is asked for; of an answer, what became of it.
    opaque : int
        The number by which an answer belongs to a request.
    fields : dict of str to str
        The header's fields (`extFields`).
    body : bytes or memoryview
    flag : int
    remark : str
        The text of an answer, for people.
    """

    code: int
    opaque: int
    fields: dict[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""
    flag: int = 0
    remark: str = ""

    @property
    def is_answer(self) -> bool:
        """Whether it answers a request."""
        return bool(self.flag & ANSWER_FLAG)


def texts_of(fields: Mapping[str, object]) -> dict[str, str]:
    """Header fields as the texts that travel: Java's words for booleans, and nothing for None."""
    texts = {}
    for name, value in fields.items():
        if value is not None:
            texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return texts


def packed(frame: Frame, serialization: str = JSON) -> list[bytes | memoryview]:
    """A frame as pieces to send, one after the other: the header, then the body as it is."""
    header = _rocketmq_header(frame) if serialization == ROCKETMQ else _json_header(frame)
    size = SIZE_BYTES + len(header) + len(frame.body)
    mark = (_TYPES[serialization] << 24 | len(header)).to_bytes(4, "big")
    head = size.to_bytes(SIZE_BYTES, "big") + mark + header
    return [head, frame.body] if len(frame.body) else [head]


def unpacked(data: bytes | bytearray | memoryview) -> Frame:
    """The frame in the bytes that follow its size. The body is a view of these bytes.

    Raises
    ------
    ProtocolError
        It is no frame.
    """
    view = memoryview(data)
    try:
        kind, size = view[0], int.from_bytes(view[1:4], "big")
        header, body = view[4 : 4 + size], view[4 + size :]
        if len(header) != size:
            raise ValueError(f"a header of {size} bytes in a frame of {len(view)}")
        if kind == _TYPES[JSON]:
            return _of_json(header, body)
        if kind == _TYPES[ROCKETMQ]:
            return _of_rocketmq(header, body)
        raise ValueError(f"header type {kind}")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ProtocolError(
            f"remoting: found a frame that cannot be read ({error}); allowed are frames of RocketMQ's remoting "
            f"protocol, with a JSON or ROCKETMQ header. Is the address that of a name server or a broker?"
        ) from None


def _json_header(frame: Frame) -> bytes:
    fields: dict[str, object] = {
        "code": frame.code,
        "language": "PYTHON",
        "version": VERSION,
        "opaque": frame.opaque,
        "flag": frame.flag,
        "serializeTypeCurrentRPC": JSON,
    }
    if frame.remark:
        fields["remark"] = frame.remark
    if frame.fields:
        fields["extFields"] = frame.fields
    return _encoded(fields).encode()


def _of_json(header: memoryview, body: memoryview) -> Frame:
    fields = bounded_json(str(header, "utf-8"), MOST_VALUES)
    texts = {name: str(value) for name, value in (fields.get("extFields") or {}).items() if value is not None}
    return Frame(
        int(fields["code"]), int(fields["opaque"]), texts, body, int(fields["flag"]), str(fields.get("remark") or "")
    )


def _rocketmq_header(frame: Frame) -> bytes:
    remark = frame.remark.encode()
    pairs = bytearray()
    for name, value in frame.fields.items():
        key, text = name.encode(), value.encode()
        pairs += len(key).to_bytes(2, "big") + key + len(text).to_bytes(4, "big") + text
    return b"".join(
        (
            frame.code.to_bytes(2, "big", signed=True),
            _PYTHON.to_bytes(1, "big"),
            VERSION.to_bytes(2, "big"),
            frame.opaque.to_bytes(4, "big", signed=True),
            frame.flag.to_bytes(4, "big"),
            len(remark).to_bytes(4, "big"),
            remark,
            len(pairs).to_bytes(4, "big"),
            bytes(pairs),
        )
    )


def _of_rocketmq(header: memoryview, body: memoryview) -> Frame:
    parts = _Parts(header)
    code = parts.number(2)
    parts.number(3)  # language and version
    opaque, flag = parts.number(4), parts.number(4)
    remark = parts.text(parts.number(4))
    fields: dict[str, str] = {}
    if parts.left:
        parts.number(4)
        while parts.left:
            name = parts.text(parts.number(2))
            fields[name] = parts.text(parts.number(4))
    return Frame(code, opaque, fields, body, flag, remark)


class _Parts:
    """Numbers and texts of a header, one after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._position = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._position

    def number(self, size: int) -> int:
        return int.from_bytes(self._taken(size), "big", signed=True)

    def text(self, size: int) -> str:
        return str(self._taken(size), "utf-8")

    def _taken(self, size: int) -> memoryview:
        if not 0 <= size <= self.left:
            raise ValueError(f"a field of {size} bytes where {self.left} are left")
        self._position += size
        return self._data[self._position - size : self._position]
