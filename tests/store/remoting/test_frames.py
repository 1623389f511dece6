"""Frames of the remoting protocol: what we write is what RocketMQ reads, and nothing else is read as a frame."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore import ProtocolError
from messagestore.remoting.frames import ANSWER_FLAG, Frame, packed, texts_of, unpacked
from messagestore.remoting.settings import SERIALIZATIONS

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
FRAMES = st.builds(
    Frame,
    code=st.integers(0, 2000),
    opaque=st.integers(0, (1 << 31) - 1),
    fields=st.dictionaries(NAMES, st.text(st.characters(codec="utf-8"), max_size=40), max_size=5),
    body=st.binary(max_size=100),
    flag=st.integers(0, 3),
    remark=st.text(st.characters(codec="utf-8"), max_size=40),
)

# RocketMQ 5.3.3's RemotingCommand.encode() of: code 30, LanguageCode JAVA, version 479, opaque 7, flag 1, remark "ok",
# one field offset=5, body "xy", serialized as ROCKETMQ.
JAVA_ROCKETMQ = bytes.fromhex(
    "0000002a" "01000024" "001e" "00" "01df" "00000007" "00000001" "00000002" "6f6b" "0000000d"
    "0006" "6f6666736574" "00000001" "35" "7879"
)  # fmt: skip


@pytest.mark.parametrize("serialization", SERIALIZATIONS)
@given(frame=FRAMES)
def test_a_frame_is_read_as_it_was_written(serialization: str, frame: Frame) -> None:
    data = b"".join(packed(frame, serialization))
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    again = unpacked(data[4:])
    assert (again.code, again.opaque, again.fields, again.flag, again.remark) == (
        frame.code,
        frame.opaque,
        frame.fields,
        frame.flag,
        frame.remark,
    )
    assert bytes(again.body) == frame.body


def test_the_rocketmq_header_is_javas() -> None:
    size = int.from_bytes(JAVA_ROCKETMQ[:4], "big")
    assert size == len(JAVA_ROCKETMQ) - 4
    frame = unpacked(JAVA_ROCKETMQ[4:])
    assert (frame.code, frame.opaque, frame.flag, frame.remark) == (30, 7, ANSWER_FLAG, "ok")
    assert frame.fields == {"offset": "5"}
    assert bytes(frame.body) == b"xy"

    ours = b"".join(packed(frame, "ROCKETMQ"))
    assert ours[:10] + b"\0" + ours[11:] == JAVA_ROCKETMQ, "only the language differs"


def test_the_json_header_has_javas_names() -> None:
    data = b"".join(packed(Frame(30, 7, {"queueId": "0"})))
    header = json.loads(data[8:])
    assert header == {
        "code": 30,
        "language": "PYTHON",
        "version": 479,
        "opaque": 7,
        "flag": 0,
        "serializeTypeCurrentRPC": "JSON",
        "extFields": {"queueId": "0"},
    }


@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_a_header_that_is_cut_is_an_error(serialization: str) -> None:
    data = b"".join(packed(Frame(30, 7, {"queueId": "0"}, remark="words"), serialization))[4:]
    for size in range(len(data)):
        with pytest.raises(ProtocolError, match="a frame that cannot be read"):
            unpacked(data[:size])


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request", b"\x02\0\0\0", b"\0\0\0\x02[]", b"\0\0\0\x04null"])
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="Is the address that of a name server or a broker"):
        unpacked(data)


@given(data=st.binary(max_size=80))
def test_hostile_bytes_are_a_frame_or_an_error(data: bytes) -> None:
    try:
        unpacked(data)
    except ProtocolError:
        return


def test_a_size_that_runs_back_is_an_error() -> None:
    """A negative size of a text must not move the reader back into what it has read."""
    data = bytearray(JAVA_ROCKETMQ[4:])
    data[4 + 13 : 4 + 17] = (-2).to_bytes(4, "big", signed=True)
    with pytest.raises(ProtocolError):
        unpacked(data)


def test_values_are_written_as_java_reads_them() -> None:
    assert texts_of({"a": 5, "b": True, "c": None, "d": "x", "e": False}) == {
        "a": "5",
        "b": "true",
        "d": "x",
        "e": "false",
    }
