"""A table in `config/` whose rows are loaded, changed, and merged into the file as it is when they are saved.

Threads: one. Processes: whoever saves holds a lock against other processes of this project.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from messagestore.files.config_file import ConfigFile

K = TypeVar("K")
V = TypeVar("V")


class ConfigTable(ABC, Generic[K, V]):
    """The rows of one file of `config/`, by their keys.

    Parameters
    ----------
    file : ConfigFile
    """

    writes_what_is_there: bool = True
    """Whether `save` writes rows that the file has already: what another process wrote may not be on the disk yet."""

    def __init__(self, file: ConfigFile) -> None:
        self._file = file
        self.path = file.path
        self._rows: dict[K, V] = {}
        self._changed: dict[K, V] = {}
        self._removed: set[K] = set()

    def load(self) -> dict[K, V]:
        """Read the file, or its `.bak` if the file is missing, empty or unreadable. Unsaved changes are dropped.

        Raises
        ------
        CorruptionError
            There is a file, but none that can be read.
        ConfigError
            The broker keeps the table in RocksDB.
        """
        self._changed, self._removed = {}, set()
        return self._read()

    def _read(self) -> dict[K, V]:
        self._rows = {}
        self._rows = self._file.load(self._parsed)
        return self._rows

    def save(self) -> None:
        """Write what was changed or removed since `load` or the last `save`; the rest of the file stays as it is now.

        The caller holds the lock. Without changes, nothing is written. If this fails, the changes remain to be saved.

        Raises
        ------
        CorruptionError
            The file is damaged; its `.bak` may count for readers, but it may be older, and does not replace the file.
        """
        if not self._changed and not self._removed:
            return
        self._read()
        if self._file.damage is not None:
            raise self._file.damage
        rows = self._merged(self._rows, self._changed)
        rows = {key: row for key, row in rows.items() if key not in self._removed}
        if self.writes_what_is_there or rows != self._rows:
            self._file.save({key: self._fields(row) for key, row in rows.items()}, **self._derived(rows))
        self._rows, self._changed, self._removed = rows, {}, set()  # only now: what could not be saved is not there

    def save_or_drop(self) -> None:
        """Save. If that fails, drop the changes, so that no later `save` writes what the caller was told has failed."""
        try:
            self.save()
        except BaseException:
            self._changed, self._removed = {}, set()
            raise

    def _remove(self, key: K) -> None:
        """Take a row away; `save` writes the table without it."""
        self._rows.pop(key, None)
        self._changed.pop(key, None)
        self._removed.add(key)

    # ---- what the tables differ in

    @abstractmethod
    def _parsed(self, table: dict[str, Any]) -> dict[K, V]:
        """The rows in a file. `ConfigFile.load` says which errors a wrong table may raise."""

    def _merged(self, rows: dict[K, V], changed: dict[K, V]) -> dict[K, V]:
        """The rows of the file with those that were changed, in a new dict."""
        return rows | changed

    def _fields(self, row: V) -> Any:
        """A row as the file has it."""
        return row

    def _derived(self, rows: dict[K, V]) -> dict[str, Any]:  # noqa: ARG002 - for those that override it
        """Fields of the file beside the table that follow from the rows."""
        return {}
