"""Property strings, and what may be in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
import strategies
from messagestore.errors import MessageIllegalError
from messagestore.format import properties
from messagestore.format.layout import PROPERTY_CRC_NAME


@given(strategies.property_maps)
def test_what_is_allowed_comes_back(pairs: dict[str, str]) -> None:
    """Everything the check lets through survives the way through bytes."""
    properties.check_properties(pairs)
    data = properties.encode_properties(pairs.items())
    assert data == reference.properties_text(list(pairs.items()))
    assert properties.decode_properties(data) == pairs


@given(strategies.property_bytes)
def test_any_bytes_are_read_as_java_reads_them(data: bytes) -> None:
    assert properties.decode_properties(data) == reference.properties_of(data)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", {}),
        (b"a\x01b\x02", {"a": "b"}),
        (b"a\x01b", {"a": "b"}),  # no last separator
        (b"a\x01b\x02a\x01c\x02", {"a": "c"}),  # the later one counts
        (b"a\x01\x02b\x01c\x02", {"b": "c"}),  # empty value
        (b"\x01x\x02b\x01c\x02", {"b": "c"}),  # empty name
        (b"ab\x02\x02b\x01c\x02", {"b": "c"}),  # no separator within
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),  # only the first 0x01 separates
        (b"a\x01\xff\x02", {"a": "\ufffd"}),
    ],
)
def test_java_rules(data: bytes, wanted: dict[str, str]) -> None:
    assert properties.decode_properties(data) == wanted


@given(strategies.any_text, strategies.any_text)
def test_the_check_lets_through_what_survives_and_nothing_else(name: str, value: str) -> None:
    """Refused, or the same after a way through bytes: no third."""
    try:
        survives = properties.decode_properties(properties.encode_properties([(name, value)])) == {name: value}
    except UnicodeEncodeError:
        survives = False
    # Java would keep a value with 0x01 in it; that it is refused, too, leaves no doubt about what separates.
    if survives and name not in properties.RESERVED_PROPERTIES and "\x01" not in value:
        properties.check_properties({name: value})
    else:
        with pytest.raises(MessageIllegalError):
            properties.check_properties({name: value})


@pytest.mark.parametrize("value", ["", "a\x01", "\x02", "\ud800", None, 7, b"x"])
def test_bad_texts_are_refused_everywhere(value: object) -> None:
    """As name, value, key and tag."""
    for check in (
        lambda: properties.check_properties({value: "x"}),
        lambda: properties.check_properties({"x": value}),
        lambda: properties.check_keys([value]),
        lambda: properties.check_tags(value) if value is not None else properties.check_keys([None]),
    ):
        with pytest.raises(MessageIllegalError):
            check()


def test_reserved_names_are_refused_with_advice() -> None:
    assert PROPERTY_CRC_NAME == properties.PROPERTY_CRC
    for name in properties.RESERVED_PROPERTIES:
        with pytest.raises(MessageIllegalError, match="RocketMQ"):
            properties.check_properties({"mine": "x", name: "y"})
    with pytest.raises(MessageIllegalError, match="Use `keys`"):
        properties.check_properties({"KEYS": "y"})


def test_errors_name_the_row() -> None:
    for check in (properties.check_keys, properties.check_properties):
        with pytest.raises(MessageIllegalError, match=r"^row 41: ") as caught:
            check(["a b"] if check is properties.check_keys else {"": ""}, 41)
        assert caught.value.row == 41
    with pytest.raises(MessageIllegalError, match=r"^row 0: "):
        properties.check_tags("", 0)


@given(st.lists(strategies.keys, max_size=4))
def test_legal_keys(keys: list[str]) -> None:
    properties.check_keys(keys)


def test_keys_are_a_list_of_words() -> None:
    """A text is a sequence of texts, too; and a blank would make two keys of one."""
    with pytest.raises(MessageIllegalError, match="list"):
        properties.check_keys("abc")
    with pytest.raises(MessageIllegalError, match="blank"):
        properties.check_keys(["a", "b c"])
    properties.check_keys(["tab\tis", "no\u00a0blank"])


def test_no_tag_is_no_fault() -> None:
    properties.check_tags(None)
    properties.check_tags("A || B")
