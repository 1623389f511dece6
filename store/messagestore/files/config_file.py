"""Reads and writes the broker's small JSON files in `config/`.

RocketMQ writes them with fastjson: with tabs, without blanks, and with numbers as keys without quotes (`{0:250}`),
which is not JSON. This module reads and writes this form, and keeps the fields that it does not know. A file is
replaced as a whole. If a file cannot be read, the `.bak` that a broker leaves beside it is read; only the broker writes
that.

    {"dataVersion":{"counter":..,"stateVersion":..,"timestamp":..},"<table>":{...}, <others>}

A broker with configManagerVersion=v2 (RocketMQ 5.3) keeps its topics, groups and offsets in a RocksDB, `config/rdb`.
The files are then missing, or old: a group in none of them may well have messages to read.

Threads: one. Processes: before it saves, a process takes a lock and loads, to keep what another process wrote.
Source: RocketMQ `common/ConfigManager.java`, `remoting/.../DataVersion.java`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from messagestore.errors import ConfigError, CorruptionError
from messagestore.files.disk import Disk, replace_file
from messagestore.files.store_root import known_root
from messagestore.format.json_text import bounded_json, check_values
from messagestore.signal_handlers import pass_on

T = TypeVar("T")

MAX_SIZE = 32 * 1024 * 1024
MAX_VALUES = 2_000_000
"""The most bytes and the most values that are read: enough for the offsets of 60 groups in 32 000 queues each."""

# A whole string, which is kept unchanged, or a number in the place of a key. A string without an end goes to the end of
# the text, and nothing is tried twice, so this takes time in proportion to the text.
_UNQUOTED_KEY = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|([{,]\s*+)(-?\d++)(?=\s*:)', re.DOTALL)
_HINT_WITH_BACKUP = "Restore it from a copy. If you move it away instead, its .bak counts, which may be older."
_NOT_AS_IT_SHOULD_BE = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)


def why_in_rocksdb(disk: Disk, root: str) -> str | None:
    """Why the tables of a store's topics, groups and offsets are not in files, and what to do; None if they are."""
    folder = os.path.join(root, "config", "rdb")
    if not disk.exists(os.path.join(folder, "CURRENT")):  # every RocksDB has this file
        return None
    return (
        f"{folder}: found the tables of topics, consumer groups and offsets in RocksDB (configManagerVersion=v2), "
        f"which only the broker reads and writes. Use the broker and mqadmin instead. If the broker has left "
        f"configManagerVersion=v2 for good, move this folder away"
    )


class ConfigFile:
    """One file of `config/`, with one table in it.

    Parameters
    ----------
    disk : Disk
    root : str
        The store.
    name : str
        The name of the file in `config/`.
    table : str
        The field that holds the table.
    via : str
        The name in `spark/` under which a new file is created before it gets its own.
    meaning, hint : str
        For errors: what the file is, and what to do if it is damaged.
    only_in_files : bool
        Refuse to load a table that a broker keeps in RocksDB.
    """

    def __init__(
        self,
        disk: Disk,
        root: str,
        name: str,
        table: str,
        *,
        via: str,
        meaning: str,
        hint: str,
        only_in_files: bool = False,
    ) -> None:
        self.disk = disk
        self.root = root
        known_root(os.path.abspath(root))
        self.path = os.path.join(root, "config", name)
        self._table = table
        self._via = os.path.join(root, "spark", via)
        self._meaning, self._hint = meaning, hint
        self._only_in_files = only_in_files

        self._data_version: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        self.damage: CorruptionError | None = None
        """What is wrong with the file, if the last `load` could not read it and took its `.bak`."""

    def load(self, parse: Callable[[dict[str, Any]], T]) -> T:
        """Return the result of `parse` for the table in the file.

        If the file is missing, empty or unreadable, its `.bak` is read instead.

        Parameters
        ----------
        parse : function of a dict
            If it raises `ValueError`, `TypeError`, `AttributeError` or `OverflowError`, the file counts as unreadable.
            If there is no file, it gets an empty table.

        Raises
        ------
        CorruptionError
            There is a file, but neither it nor its `.bak` can be read.
        ConfigError
            The table is in RocksDB (`only_in_files`).
        """
        self._data_version, self._others, self.damage = {}, {}, None
        elsewhere = why_in_rocksdb(self.disk, self.root) if self._only_in_files else None
        if elsewhere is not None:
            raise ConfigError(elsewhere, key="configManagerVersion", value="v2")

        unreadable: tuple[str, str] | None = None
        for path in (self.path, self.path + ".bak"):
            try:
                data = self.disk.read(path, MAX_SIZE)
            except (FileNotFoundError, NotADirectoryError) as error:
                pass_on(error)
                continue
            except CorruptionError as error:
                unreadable = unreadable or (path, f"{error.found}; allowed is {error.expected}")
                continue

            if not data.strip():
                continue

            try:
                result = self._taken(data, parse)
            except _NOT_AS_IT_SHOULD_BE as error:
                unreadable = unreadable or (path, f"{error} in {data[:40]!r}")
                continue
            self.damage = self._damage(unreadable, _HINT_WITH_BACKUP)
            return result

        damage = self._damage(unreadable, self._hint)
        if damage is not None:
            raise damage
        return parse({})

    def _damage(self, unreadable: tuple[str, str] | None, hint: str) -> CorruptionError | None:
        return unreadable and CorruptionError(unreadable[0], 0, self._meaning, unreadable[1], hint=hint)

    def _taken(self, data: bytes, parse: Callable[[dict[str, Any]], T]) -> T:
        fields = parsed(data.decode("utf-8"))
        table = fields.pop(self._table, None)
        if table is None:
            table = {}
        if not isinstance(table, dict):
            raise ValueError(f"{self._table} is no JSON object")
        version = dict(fields.pop("dataVersion", None) or {})
        version["counter"] = int(version.get("counter", 0))
        result = parse(table)
        self._data_version, self._others = version, fields
        return result

    def save(self, table: Mapping[Any, Any], **derived: Any) -> None:
        """Replace the file: write this table, the next version, and everything else that the last `load` found in it.

        Parameters
        ----------
        derived : other fields of the root
            Fields that are replaced together with the table.
        """
        version = {"stateVersion": 0, **self._data_version}
        version["counter"] = version.get("counter", 0) + 1
        version["timestamp"] = self.disk.time_ns() // 1_000_000
        text = written({**self._others, **derived, "dataVersion": version, self._table: dict(table)})
        folder = os.path.dirname(self.path)
        if not self.disk.is_folder(folder):
            self.disk.mkdir(folder)
        if not self.disk.exists(self.path):  # the folder may be there because a process made it, and died before it
            self.disk.fsync_dir(self.root)  # synced the folder's name
        replace_file(self.disk, self.path, text.encode("utf-8"), via=self._via)
        self._data_version = version


# ---- the text


def parsed(text: str) -> dict[str, Any]:
    """Return the fields of a file that fastjson wrote; numbers as keys become text.

    Raises
    ------
    ValueError
        The text is not a JSON object even after this change, or has more values or levels than are read.
    """
    check_values(text, MAX_VALUES)
    fields = bounded_json(_UNQUOTED_KEY.sub(_quoted_key, text), MAX_VALUES)
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    return fields


def _quoted_key(match: re.Match[str]) -> str:
    return match[0] if match[2] is None else f'{match[1]}"{match[2]}"'


def written(value: Any, indent: str = "\n") -> str:
    """Return JSON text as fastjson's PrettyFormat lays it out: tabs, `"key":value`, sorted keys.

    As in fastjson, integer keys get neither quotes nor lines of their own. A tuple stands for a Java Set, on one line.
    """
    inner = indent + "\t"
    if isinstance(value, dict) and value:
        if all(type(key) is int for key in value):
            return "{" + ",".join(f"{key}:{written(item, inner)}" for key, item in sorted(value.items())) + indent + "}"
        rows = ",".join(f"{inner}{_text(str(key))}:{written(item, inner)}" for key, item in sorted(value.items()))
        return "{" + rows + indent + "}"
    if isinstance(value, tuple):
        return "[" + ",".join(written(item, inner) for item in value) + "]"
    if isinstance(value, list) and value:
        return "[" + ",".join(inner + written(item, inner) for item in value) + indent + "]"
    return _text(value)


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # A lone surrogate (an escape in the file that was read) has no UTF-8 form, so it stays an escape.
    return text if not any("\ud800" <= c <= "\udfff" for c in text) else json.dumps(value)
