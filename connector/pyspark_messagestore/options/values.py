"""Kinds of option values: how the text of a value is parsed, and what is allowed, in words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from messagestore.spi import BROKER_NAME_WORDS, Location, duration_s, is_broker_name, location_words

MOST = (1 << 63) - 1
"""The largest number that fits into 64 bits."""

ROCKETMQ, KAFKA = "rocketmq", "kafka"
"""The row formats."""


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
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError
    return unique


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _broker_name(text: str) -> str:
    if not is_broker_name(text):
        raise ValueError
    return text


def _folder(text: str) -> str:
    return os.fspath(Location.of(text))


def _size(text: str) -> int:
    """A size as Spark writes it: 65536, 512k, 64m, 1g."""
    match = re.fullmatch(r"\s*([0-9]+)\s*(?:([kmgt]?)b?)\s*", text.lower())
    if match is None:
        raise ValueError
    size = int(match[1]) << 10 * " kmgt".index(match[2] or " ")
    if not 1 <= size <= MOST:
        raise ValueError
    return size


_SPARKS_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _sparks_duration(text: str) -> float:
    """A duration as Spark's own options have it: a number without a unit is in milliseconds, unlike in `DURATION`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|min|m|h|d)?", text.strip().lower())
    if match is None:
        raise ValueError
    return float(match[1]) * _SPARKS_UNITS_S[match[2] or "ms"]


BOOLEAN = Kind(lambda text: {"true": True, "false": False}[text.strip().lower()], "true or false", ("true", "false"))
SIZE = Kind(_size, "a number of bytes from 1, such as 1048576, 512k, 64m or 1g")
DURATION = Kind(lambda text: duration_s("", text), "a duration such as 500ms, 30s, 2m, 24h")
SPARK_DURATION = Kind(_sparks_duration, "a duration such as 500ms, 30s, 2m, 24h; a number alone is in milliseconds")
TEXT = Kind(_text, "a text that is not empty")
BROKER_NAME = Kind(_broker_name, BROKER_NAME_WORDS)
PATH = Kind(
    _folder,
    "the path of a folder on a local or mounted file system, written out (no ~, and no URI such as s3: or dbfs:)",
)
LOCATION = Kind(Location.of, location_words())
