"""Kinds of option values: how the text of a value is parsed, and what is allowed, in words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from messagestore.spi import BROKER_NAME_WORDS, duration_s, is_broker_name

MOST = (1 << 63) - 1
"""The largest number that fits into 64 bits."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value. `parse` raises ValueError, KeyError, TypeError or AttributeError for a text that is wrong.

    Parameters
    ----------
    parse : callable
    allowed : str
        What is allowed, in words.
    values : tuple of str
        All values, if there are only a few.
    """

    parse: Callable[[str], Any]
    allowed: str
    values: tuple[str, ...] = ()


def whole(least: int, most: int) -> Kind:
    """A whole number between two limits, both of which are allowed."""

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError
        return value

    return Kind(parse, f"a whole number from {least} to {most}")


def choice(*values: str) -> Kind:
    """One of some words, in any case."""
    by_name = {value.lower(): value for value in values}
    return Kind(lambda text: by_name[text.lower()], " or ".join(values), values)


def parsed_json(text: str) -> Any:
    """A value written as JSON. A name that occurs twice is a ValueError; `json.loads` would drop the first value."""
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _broker_name(text: str) -> str:
    if not is_broker_name(text):
        raise ValueError
    return text


def _store_path(text: str) -> str:
    path = re.sub(r"^file:(//(localhost)?(?=/))?", "", text.strip())
    if not path or "\0" in path or path.startswith("~") or re.match(r"[A-Za-z][\w+.-]*:", path):
        raise ValueError
    return os.path.abspath(path)


def _size(text: str) -> int:
    """A size as Spark writes it: 65536, 512k, 64m, 1g."""
    match = re.fullmatch(r"\s*([0-9]+)\s*(?:([kmgt]?)b?)\s*", text.lower())
    if match is None:
        raise ValueError
    size = int(match[1]) << 10 * " kmgt".index(match[2] or " ")
    if not 1 <= size <= MOST:
        raise ValueError
    return size


BOOLEAN = Kind(lambda text: {"true": True, "false": False}[text.strip().lower()], "true or false", ("true", "false"))
SIZE = Kind(_size, "a number of bytes from 1, such as 1048576, 512k, 64m or 1g")
DURATION = Kind(lambda text: duration_s("", text), "a duration such as 500ms, 30s, 2m, 24h")
TEXT = Kind(_text, "a text that is not empty")
BROKER_NAME = Kind(_broker_name, BROKER_NAME_WORDS)
PATH = Kind(
    _store_path,
    "the path of a folder on a local or mounted file system, written out (no ~, and no URI such as s3: or dbfs:)",
)


SOURCE, SINK = "source", "sink"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of one side.

    Parameters
    ----------
    side : str
        "source" or "sink".
    name : str
    kind : Kind
    default : str | None
        The default as text, or None.
    meaning : str
        One sentence, for the documents.
    aliases : tuple of str
    shown : str
        How the documents show the default, if not as `default`.
    attribute : str
        The attribute of `SourceOptions` or `SinkOptions`, if it is not named as the option.
    """

    side: str
    name: str
    kind: Kind
    default: str | None = None
    meaning: str = ""
    aliases: tuple[str, ...] = ()
    shown: str = ""
    attribute: str = ""

    @property
    def field(self) -> str:
        """The attribute of `SourceOptions` or `SinkOptions`."""
        return self.attribute or re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()
