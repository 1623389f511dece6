"""Hosts and offset message ids."""

from __future__ import annotations

import pytest
from hypothesis import given

import reference
import strategies
import vectors
from messagestore.errors import MessageIllegalError
from messagestore.format.hosts import offset_message_id, pack_host, parse_offset_message_id, unpack_host


def test_the_known_message_id() -> None:
    """The id a Java broker gave for a record at 135 on 10.1.2.3:10911."""
    host, offset, text = vectors.OFFSET_MESSAGE_ID
    assert offset_message_id(pack_host(host), offset) == text
    assert parse_offset_message_id(text) == (host, offset)
    assert parse_offset_message_id(text.lower()) == (host, offset)


@given(strategies.hosts, strategies.offsets)
def test_hosts_and_ids_come_back(host: str, offset: int) -> None:
    """Whatever the host, its bytes and its id give it back, and agree with the oracle."""
    packed = pack_host(host)
    assert packed == reference.host(host)
    assert unpack_host(packed) == reference.host_text(packed)
    assert pack_host(unpack_host(packed)) == packed
    text = offset_message_id(packed, offset)
    assert text == reference.message_id(host, offset)
    assert parse_offset_message_id(text) == (unpack_host(packed), offset)


@pytest.mark.parametrize(
    "host",
    ["", "localhost:1", "1.2.3.4", "1.2.3:1", "1.2.3.4:65536", "1.2.3.4:-1", "1.2.3.4:", "::1:80", "[1.2.3.4]:1",
     "[::g]:1", "256.1.1.1:1", " 1.2.3.4:1", "1.2.3.4:1\n", "[fe80::1%eth0]:1"],
)  # fmt: skip
def test_what_is_no_host_is_refused(host: str) -> None:
    """Names are not looked up, and nothing is guessed."""
    with pytest.raises(MessageIllegalError, match="ip:port") as caught:
        pack_host(host)
    assert caught.value.field == "host"


@pytest.mark.parametrize("size", [0, 7, 9, 19, 21])
def test_a_host_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="allowed are 8 or 20"):
        unpack_host(b"\0" * size)


def test_a_port_is_shown_as_it_is_stored() -> None:
    """Four bytes hold more than a port; a foreign record may use them."""
    assert unpack_host(b"\x01\x02\x03\x04\xff\xff\xff\xff") == "1.2.3.4:-1"


@pytest.mark.parametrize(
    "text", ["", "0A", "G" * 32, "0" * 31, "0" * 33, "0" * 55, "0" * 16 + "F" * 16, "0" * 30 + " 0"]
)
def test_what_is_no_message_id_is_refused(text: str) -> None:
    """Wrong length, no hex, or a negative offset."""
    with pytest.raises(MessageIllegalError, match="32"):
        parse_offset_message_id(text)
