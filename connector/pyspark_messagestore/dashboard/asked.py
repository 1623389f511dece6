"""What stands behind the question mark of an address."""

from __future__ import annotations

from collections.abc import Mapping

from messagestore import ConfigError

Asked = Mapping[str, str]
MOST_COUNT = 500
"""The most rows of a table; a link leads to the next ones."""


def given(asked: Asked, name: str) -> str:
    """A value that the address must have.

    Raises
    ------
    ConfigError
        It has none.
    """
    value = asked.get(name, "")
    if not value.strip():
        raise ConfigError(f"{name}: found nothing; the address must say which one, as in ?{name}=...", key=name)
    return value


def number(asked: Asked, name: str, default: int, *, least: int = 0, most: int = (1 << 63) - 1) -> int:
    """A number of the address, or the default.

    Raises
    ------
    ConfigError
        It is no number, or out of range.
    """
    text = asked.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigError(
            f"{name}: found {text!r:.60}; allowed is a number from {least} to {most}", key=name, value=text
        )
    return int(text)
