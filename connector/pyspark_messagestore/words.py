"""Values as people read and write them: text that is safe to show, sizes, times, and messages as JSON.

The command line and the dashboard share these, so that both say the same.
"""

from __future__ import annotations

import base64
import re
import shlex
import time
import unicodedata
from datetime import UTC, datetime
from typing import Any

from messagestore import ConfigError, ExpiredFiles, MessageExt, StoreError
from messagestore.spi import duration_s

_LATEST_MS = 253_402_300_799_999  # the end of the year 9999


def shown(text: str) -> str:
    """Text that is safe on a terminal: control, format, private and unassigned characters are escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(c) if _is_hidden(c) else c for c in text)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character)[0] == "C" or (unicodedata.category(character)[0] == "Z" and character != " ")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def quoted(word: str) -> str:
    """A word for a shell. What `shown` escapes is written as `$'...'`, which bash and zsh turn back."""
    if shown(word) == word:
        return shlex.quote(word)
    return "$'" + "".join(_typed_character(c) for c in word) + "'"


def command_line(*words: object, **options: object) -> str:
    """A command of `messagestore` for a shell. Options come first if a word could be taken for one."""
    asked = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    command, *others = words
    looks_like_one = any(str(word).startswith("-") for word in others)
    ordered = [command, *asked, "--", *others] if looks_like_one else [*words, *asked]
    return " ".join(["messagestore", *(quoted(str(word)) for word in ordered)])


def _typed_character(character: str) -> str:
    if _is_hidden(character):  # a name of a file that is no UTF-8 has its bytes as surrogates
        of_name = "\udc80" <= character <= "\udcff"
        data = character.encode("utf-8", "surrogateescape" if of_name else "surrogatepass")
        return "".join(f"\\{byte:03o}" for byte in data)
    return f"\\{character}" if character in "\\'" else character


def shown_bytes(data: bytes, most: int | None = None) -> str:
    """A body as text if it is UTF-8, otherwise as hex. `most` limits the characters; a note then counts the rest."""
    part = data if most is None else data[: 4 * most]
    try:
        text = part.decode("utf-8")
    except UnicodeDecodeError as error:
        if len(part) < len(data) and error.start > len(part) - 4:  # cut within a character
            text = part[: error.start].decode("utf-8")
        else:
            text = "0x" + part.hex()
    text = shown(text)
    if most is not None and (len(text) > most or len(part) < len(data)):
        text = f"{text[:most]}... ({len(data)} bytes; --json shows all)"
    return text


def size_words(size: int) -> str:
    """`1536` -> `1.5 KiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def count_words(count: int, one: str) -> str:
    """`1, "record"` -> `1 record`, `2, "record"` -> `2 records`."""
    many = one if one.endswith("s") else one + ("es" if one.endswith("ch") else "s")
    return f"{count:,} {one if count == 1 else many}"


def error_words(error: Exception) -> str:
    """What an error says. Those of the system begin with their number, and end with the path."""
    if isinstance(error, OSError) and not isinstance(error, StoreError):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    return str(error)


def time_words(timestamp_ms: int) -> str:
    """A time in UTC; a number that is not a valid time is returned unchanged."""
    if not 0 <= timestamp_ms <= _LATEST_MS:
        return str(timestamp_ms)
    moment = datetime.fromtimestamp(timestamp_ms // 1000, UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{timestamp_ms % 1000:03d}Z"


def time_ms(option: str, text: str) -> int:
    """A time that a user gave, in milliseconds since 1970.

    Raises
    ------
    ConfigError
        The text is neither a number, nor an ISO time, nor a duration before now.
    """
    if re.fullmatch(r"\d+", text):
        return int(text)

    try:
        if text.startswith("-"):
            return max(0, int((time.time() - duration_s(option, text[1:])) * 1000))
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{option}: found {text!r}; allowed are milliseconds since 1970, a time such as 2026-01-31T12:00:00Z, and "
            "a time before now such as -10m",
            key=option,
            value=text,
        ) from None

    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def message_fields(message: MessageExt) -> dict[str, Any]:
    """A message for JSON: `body` as text if it is UTF-8, otherwise null and `bodyBase64`."""
    try:
        body: dict[str, Any] = {"body": message.body.decode("utf-8")}
    except UnicodeDecodeError:
        body = {"body": None, "bodyBase64": base64.b64encode(message.body).decode("ascii")}

    return {
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "physicalOffset": message.physical_offset,
        "size": message.size,
        "tags": message.tags,
        "keys": list(message.keys),
        "properties": message.properties,
        "systemProperties": message.system_properties,
        "msgId": message.message_id,
        "bornTimestamp": message.born_timestamp_ms,
        "storeTimestamp": message.store_timestamp_ms,
        "bornHost": message.born_host,
        "storeHost": message.store_host,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "bodyCrc": message.body_crc,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        **body,
    }


def expired_fields(expired: ExpiredFiles, *, done: bool) -> dict[str, Any]:
    """What retention deletes, or has deleted, for JSON."""
    return {
        "deleted": done,
        "segments": list(expired.segments),
        "size": expired.size,
        "messages": expired.message_count,
        "queueFiles": expired.queue_file_count,
        "indexFiles": expired.index_file_count if done else None,
        "minOffset": expired.min_offset,
        "kept": expired.kept or None,
        "restated": [{"app": app_id, "version": version} for app_id, version in expired.restated],
        "unreadGroups": list(expired.unread_groups),
    }
