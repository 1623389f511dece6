"""The embedded databases of the race: SQLite as the table, LevelDB and RocksDB as LSM trees, and Python's memory."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Taken, timed

GROUP = 10_000
"""Rows of a transaction, or of a write batch."""
Row = tuple[int, bytes, str, str]
"""Queue, body, key and tag of a message."""


def _one_by_one(put: Callable[[Any], Any], given: list[Any]) -> Taken:
    def run() -> None:
        for each in given:
            put(each)

    return timed(run)[0]


class Sqlite:
    """A table with an index on the key; WAL, synchronous=FULL."""

    def __init__(self, folder: Path, rows: list[Row]) -> None:
        folder.mkdir(parents=True)
        self.rows, self.next = rows, 0
        self.db = sqlite3.connect(folder / "messages.db", isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute(
            "CREATE TABLE message (id INTEGER PRIMARY KEY, queue_id INTEGER, body BLOB, message_key TEXT, tag TEXT)"
        )
        self.db.execute("CREATE INDEX by_key ON message (message_key)")

    _PUT = "INSERT INTO message (queue_id, body, message_key, tag) VALUES (?, ?, ?, ?)"

    def append(self) -> Taken:
        def append() -> None:
            for at in range(0, len(self.rows), GROUP):
                self.db.execute("BEGIN")
                self.db.executemany(self._PUT, self.rows[at : at + GROUP])
                self.db.execute("COMMIT")

        return timed(append)[0]

    def read(self) -> Taken:
        if not self.db.execute("SELECT 1 FROM message LIMIT 1").fetchone():
            self.append()

        def read() -> int:
            query = "SELECT id, queue_id, body, message_key, tag FROM message ORDER BY id LIMIT ?"
            return sum(1 for _ in self.db.execute(query, (len(self.rows),)))

        taken, count = timed(read)
        if count != len(self.rows):
            raise AssertionError(f"read {count} rows of {len(self.rows)}")
        return taken

    def put(self, count: int) -> Taken:
        rows = [self.rows[number % len(self.rows)] for number in range(count)]
        return _one_by_one(lambda row: self.db.execute(self._PUT, row), rows)

    def close(self) -> None:
        self.db.close()


class _Lsm(ABC):
    """Keys of queue and number, values of body, key and tag. There is no index of the messages' keys."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows, self.count = rows, 0

    def _pairs(self, rows: list[Row]) -> list[tuple[bytes, bytes]]:
        """The rows under numbers that have not been used."""
        first, self.count = self.count, self.count + len(rows)
        return [
            (
                queue_id.to_bytes(4, "big") + (first + number).to_bytes(8, "big"),
                b"\0".join((body, key.encode(), tag.encode())),
            )
            for number, (queue_id, body, key, tag) in enumerate(rows)
        ]

    def append(self) -> Taken:
        pairs = self._pairs(self.rows)

        def append() -> None:
            for at in range(0, len(pairs), GROUP):
                self._write(pairs[at : at + GROUP])

        return timed(append)[0]

    def read(self) -> Taken:
        if not self.count:
            self.append()
        taken, count = timed(self._scan)
        if count != self.count:
            raise AssertionError(f"read {count} pairs of {self.count}")
        return taken

    def put(self, count: int, *, sync: bool) -> Taken:
        return _one_by_one(self._putter(sync=sync), self._pairs([self.rows[n % len(self.rows)] for n in range(count)]))

    @abstractmethod
    def _write(self, pairs: list[tuple[bytes, bytes]]) -> None:
        """Write one batch, synced."""

    @abstractmethod
    def _scan(self) -> int:
        """Read all pairs; how many there are."""

    @abstractmethod
    def _putter(self, *, sync: bool) -> Callable[[tuple[bytes, bytes]], None]:
        """What puts one pair."""


class RocksDb(_Lsm):
    """RocksDB by rocksdict."""

    def __init__(self, folder: Path, rows: list[Row]) -> None:
        import rocksdict

        super().__init__(rows)
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        self.rocksdict = rocksdict
        self.db = rocksdict.Rdict(str(folder), options)
        self.sync, self.lazy = rocksdict.WriteOptions(), rocksdict.WriteOptions()
        self.sync.sync = True

    def _write(self, pairs: list[tuple[bytes, bytes]]) -> None:
        batch = self.rocksdict.WriteBatch(raw_mode=True)
        for name, value in pairs:
            batch.put(name, value)
        self.db.write(batch, self.sync)

    def _scan(self) -> int:
        return sum(1 for _ in self.db.items())

    def _putter(self, *, sync: bool) -> Callable[[tuple[bytes, bytes]], None]:
        options = self.sync if sync else self.lazy
        return lambda pair: self.db.put(*pair, write_opt=options)

    def close(self) -> None:
        self.db.close()


class LevelDb(_Lsm):
    """LevelDB by plyvel."""

    def __init__(self, folder: Path, rows: list[Row]) -> None:
        import plyvel

        super().__init__(rows)
        self.db = plyvel.DB(str(folder), create_if_missing=True)

    def _write(self, pairs: list[tuple[bytes, bytes]]) -> None:
        with self.db.write_batch(sync=True) as batch:
            for name, value in pairs:
                batch.put(name, value)

    def _scan(self) -> int:
        with self.db.iterator(verify_checksums=True) as pairs:
            return sum(1 for _ in pairs)

    def _putter(self, *, sync: bool) -> Callable[[tuple[bytes, bytes]], None]:
        return lambda pair: self.db.put(*pair, sync=sync)

    def close(self) -> None:
        self.db.close()


class Memory:
    """A list for each queue, and a dict of the messages' keys: what Python objects cost, and nothing else."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self._forget()

    def _forget(self) -> None:
        self.queues: dict[int, list[Row]] = defaultdict(list)
        self.by_key: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def _put(self, row: Row) -> None:
        queue = self.queues[row[0]]
        self.by_key[row[2]].append((row[0], len(queue)))
        queue.append(row)

    def append(self) -> Taken:
        self._forget()  # or the rounds would fill the machine
        return _one_by_one(self._put, self.rows)

    def read(self) -> Taken:
        if not self.queues:
            self.append()
        taken, count = timed(lambda: sum(1 for queue in self.queues.values() for _ in queue))
        if count != len(self.rows):
            raise AssertionError(f"read {count} rows of {len(self.rows)}")
        return taken

    def put(self, count: int) -> Taken:
        self._forget()
        return _one_by_one(self._put, [self.rows[number % len(self.rows)] for number in range(count)])

    def close(self) -> None:
        self._forget()
