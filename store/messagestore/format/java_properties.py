r"""The lines of a properties file, and the values in them, as Java reads them.

    key=value     key: value     key value     \# no comment     a=one \
                                                                   line

A value keeps the blanks at its end. RocketMQ takes them off a text, but not off a number or a boolean: `72 ` is no
number to it, so the setting keeps its default, and `true ` is false.

Source: java.util.Properties.load; RocketMQ common/MixAll.java (properties2Object).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_LINE_END = re.compile("\r\n|\r|\n")
_BLANKS = " \t\f"
_KEY = re.compile(r"(?:\\.|[^\\=: \t\f])*", re.DOTALL)
_SEPARATOR = re.compile(r"[ \t\f]*[=:]?[ \t\f]*")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_TRIMMED = "".join(map(chr, range(ord(" ") + 1)))
_RANGES = {"int": 1 << 31, "long": 1 << 63}
_WHOLE = re.compile("[+-]?[0-9]+")


class Property(NamedTuple):
    """One property: the number of its first line, its key and its value, and the blanks, `=` or `:` between them."""

    number: int
    key: str
    value: str
    separator: str


def properties_of(text: str) -> Iterator[Property]:
    """Return each property in a text, in their order.

    Parameters
    ----------
    text : str
        Java takes each byte of the file for one character (ISO 8859-1).
    """
    lines = _LINE_END.split(text)
    number = 0
    while number < len(lines):
        first, line = number + 1, lines[number].lstrip(_BLANKS)
        number += 1
        if not line or line[0] in "#!":
            continue
        while _goes_on(line):
            line = line[:-1] + (lines[number].lstrip(_BLANKS) if number < len(lines) else "")
            number += 1
        key = _KEY.match(line)
        assert key is not None  # it matches nothing as well
        separator = _SEPARATOR.match(line, key.end())
        assert separator is not None
        yield Property(first, _unescaped(key[0]), _unescaped(line[separator.end() :]), separator[0].strip(_BLANKS))


def _goes_on(line: str) -> bool:
    """Whether the next line belongs to this one: it ends with an odd number of backslashes."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _unescaped(text: str) -> str:
    def character(escape: re.Match[str]) -> str:
        escaped = escape[1]
        return chr(int(escaped[1:], 16)) if len(escaped) > 1 else _ESCAPED.get(escaped, escaped)

    return _ESCAPE.sub(character, text) if "\\" in text else text


def value_of(kind: str, text: str) -> str | None:
    """Return the value of a setting as a Java program takes it from a text; None if it keeps its default.

    Parameters
    ----------
    kind : str
        The Java type of the setting: "int", "long", "boolean", "String", ...
    """
    if kind in _RANGES:
        whole = _WHOLE.fullmatch(text) is not None and -_RANGES[kind] <= int(text) < _RANGES[kind]
        return str(int(text)) if whole else None
    if kind == "boolean":
        return str(text.lower() == "true").lower()
    return text.strip(_TRIMMED)
