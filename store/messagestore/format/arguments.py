"""Checks of what users pass to the public functions.

Each error names the argument, the value that was found, and what is allowed. The functions return the value in the type
that the rest of the store expects: numpy's integers become an int, and a bool is no number.
"""

import math
import operator
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from messagestore.errors import ConfigError
from messagestore.signal_handlers import pass_on

T = TypeVar("T")
_URL = re.compile(r"[A-Za-z][\w+.-]*://")
"""It would be a relative path, and an empty store would be made there."""


def whole_number(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return a whole number within its bounds, both included.

    Raises
    ------
    ConfigError
        It is no whole number, or out of its bounds.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        pass_on(error)
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        bounds = "" if least is None else f", {least} or more" if most is None else f" from {least} to {most}"
        raise refused(name, value, f"a whole number{bounds}")
    return number


def seconds(name: str, value: object) -> float:
    """Return a time in seconds, 0 or more.

    Raises
    ------
    ConfigError
        It is no number, or below 0.
    """
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        pass_on(error)
        number = math.nan
    if not number >= 0:
        raise refused(name, value, "a number of seconds, 0 or more")
    return number


def text(name: str, value: object) -> str:
    """Return text that is not empty and can be written as UTF-8.

    Raises
    ------
    ConfigError
    """
    if not isinstance(value, str) or not value or not _is_utf8(value):
        raise refused(name, value, "text that is not empty")
    return value


def path(name: str, value: object) -> str:
    """Return the path of a folder as text.

    Raises
    ------
    ConfigError
        It is no text and no `os.PathLike` of text, or it is empty, contains a zero byte, or is a URL.
    """
    folder = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(folder, str) or not folder or "\0" in folder:
        raise refused(name, value, "the path of a folder")
    if _URL.match(folder):
        allowed = (
            "the path of a folder on this host, because this needs the store's files: run it on the host of the store. "
            "Spark reads and writes a store by its URL, and some commands of `messagestore` read it"
        )
        raise refused(name, value, allowed)
    return folder


def one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    """Return a word that is one of the allowed ones.

    Raises
    ------
    ConfigError
    """
    if not isinstance(value, str) or value not in allowed:
        raise refused(name, value, " or ".join(map(repr, allowed)))
    return value


def true_or_false(name: str, value: object) -> bool:
    """Return a bool.

    Raises
    ------
    ConfigError
    """
    if not isinstance(value, bool):
        raise refused(name, value, "True or False")
    return value


def instance(name: str, value: object, kind: type[T] | tuple[type[T], ...]) -> T:
    """Return an object of a class, or of one of several classes.

    Raises
    ------
    ConfigError
    """
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        fault = f"{name}: found {type(value).__name__}; allowed is {' or '.join(cls.__name__ for cls in kinds)}"
        raise ConfigError(fault, key=name, value=value)
    return value


def function(name: str, value: object) -> None:
    """Check that a value can be called.

    Raises
    ------
    ConfigError
    """
    if not callable(value):
        raise refused(name, value, "a function")


def names(name: str, value: object, allowed: Collection[str]) -> tuple[str, ...]:
    """Return a list of names, each of which is one of the allowed ones and given once.

    Raises
    ------
    ConfigError
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise refused(name, value, f"a list with some of {', '.join(allowed)}")
    for item in value:
        if not isinstance(item, str) or item not in allowed:
            raise ConfigError(f"{name}: found {item!r:.80}; allowed are {', '.join(allowed)}", key=name, value=value)
    for item in value:
        if value.count(item) > 1:
            raise ConfigError(f"{name}: found {item!r} more than once; allowed is once", key=name, value=value)
    if not value:
        raise ConfigError(f"{name}: found none; give at least one of {', '.join(allowed)}", key=name, value=value)
    return tuple(value)


def refused(name: str, value: object, allowed: str) -> ConfigError:
    """Return the error for a value that is not allowed."""
    return ConfigError(f"{name}: found {repr(value)[:80]}; allowed is {allowed}", key=name, value=value)


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def tags(value: object) -> tuple[str, ...] | None:
    """Tags of which a message is to have one, also as RocketMQ writes them, `"UA || AA"`; None: all messages.

    Raises
    ------
    ConfigError
        The argument names no tag, or `*` beside tags.
    """
    allowed = "one tag, several with ' || ' between them, a list of tags, or '*' alone for all messages"
    words = value.split("||") if isinstance(value, str) else value
    if words is None:
        return None
    if not isinstance(words, Iterable) or isinstance(words, Mapping):
        raise refused("tags", value, allowed)
    named = tuple(dict.fromkeys(text("tags", word).strip() for word in words))
    if named == ("*",):
        return None
    if not named or not all(named) or "*" in named:
        raise refused("tags", value, allowed)
    return named
