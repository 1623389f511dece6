"""The part of the race without Spark: `python -m benchmarks.peers.store_race PLAN FOUND`.

Batches, reading, single puts, and the bytes alone. The Python stores run in this process, RocketMQ's in a JVM that runs
as long as the race does.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import Floors, Taken, settle, timed
from benchmarks.messages import QUEUE_COUNT, TAGS, TOPIC, sliced
from benchmarks.peers.contestants import STORE_PARTS, of
from benchmarks.peers.plan import Found, Plan
from benchmarks.peers.rows import table
from benchmarks.store_read import FOUR, TEN
from messagestore import ASYNC_FLUSH, SYNC_FLUSH, BatchRequest, Message, MessageColumns, MessageStore, StoreConfig
from messagestore.message_store import CHUNK_ROWS

SIZE = 224
"""The approximate size of a record of these messages, in bytes."""
GROUP = 10_000
THREADS = 64
_FLAGS = (
    "-Xms1g",
    "-Xmx3g",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
)
Measure = Callable[[], tuple[int, float, float]]


class Ours:
    """Stores of this project, by their settings."""

    def __init__(self, folder: Path, plan: Plan, bodies: str) -> None:
        self.folder, self.plan = folder, plan
        self.batch = table(plan.rows, bodies)
        self.bodies: list[bytes] = self.batch.column("body").slice(0, 10_000).to_pylist()
        self.stores: dict[str, MessageStore] = {}
        self.versions: dict[str, int] = {}

    def store(self, name: str, **settings: Any) -> MessageStore:
        if name not in self.stores:
            self.stores[name] = MessageStore.open(self.folder / name, StoreConfig(**settings))
        return self.stores[name]

    def append(self, name: str, flush: str, *, index: bool = True) -> Taken:
        store = self.store(name, flush_disk_type=flush, message_index_enable=index)
        version = self.versions[name] = self.versions.get(name, -1) + 1
        parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(self.batch, CHUNK_ROWS))
        request = BatchRequest(app_id="race", version=version, flush_disk_type=flush)
        taken, _ = timed(store.append_batch, parts, request)
        return taken

    def read(self, columns: tuple[str, ...]) -> Taken:
        if not (self.folder / "read").exists():
            self.append("read", SYNC_FLUSH)
            self.stores.pop("read").close()
        with MessageStore.open_read_only(self.folder / "read") as reader:

            def read() -> int:
                ends = [(queue_id, reader.max_offset(TOPIC, queue_id)) for queue_id in range(QUEUE_COUNT)]
                found = (reader.read(TOPIC, queue_id, 0, end, columns=columns) for queue_id, end in ends)
                return sum(batch.num_rows for batches in found for batch in batches)

            taken, count = timed(read)
        if count != self.plan.rows:
            raise AssertionError(f"read {count} messages, {self.plan.rows} are there")
        return taken

    def put(self, name: str, flush: str, count: int, threads: int) -> Taken:
        store = self.store(name, flush_disk_type=flush)

        def message(number: int) -> Message:
            body, key = self.bodies[number % len(self.bodies)], f"ord-{number * 7919 % 1_000_000}"
            return Message(TOPIC, body, keys=[key], tags=TAGS[number % len(TAGS)], queue_id=number % QUEUE_COUNT)

        shares = [[message(number) for number in range(count // threads)] for _ in range(threads)]
        return _by_threads(shares, store.put_message)

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


def _by_threads(shares: list[list[Any]], put: Callable[[Any], Any]) -> Taken:
    """Put each share by a thread of its own; one share: by this one."""

    def put_all(share: Iterable[Any]) -> None:
        for each in share:
            put(each)

    def run() -> None:
        if len(shares) == 1:
            return put_all(shares[0])
        threads = [threading.Thread(target=put_all, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return None

    return timed(run)[0]


class Java:
    """RocketMQ's store, in a JVM of its own (`StoreRace.java`)."""

    def __init__(self, folder: Path, classpath: str, bodies: str) -> None:
        folder.mkdir(parents=True)
        self.folder, self.bodies, self.opened = folder, bodies, set[str]()
        self.log = folder / "java.log"
        source = str(Path(__file__).with_name("StoreRace.java"))
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                ["java", *_FLAGS, f"-Duser.home={folder}", "-cp", classpath, source],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                text=True,
                env={**os.environ, "HOME": str(folder)},
            )

    def call(self, op: str, **arguments: Any) -> Taken:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the JVM ended"}
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}; end of its log: {self.log.read_text(errors='replace')[-1500:]}")
        return Taken(answer.get("wall_s", 0.0), answer.get("cpu_s", 0.0))

    def store(self, name: str, flush: str) -> str:
        if name not in self.opened:
            self.call("open", store=name, root=str(self.folder / name), flush=flush)
            self.opened.add(name)
        return name

    def append(self, name: str, flush: str, count: int, batch: int) -> Taken:
        self.store(name, flush)
        return self.call("append", store=name, count=count, batch=batch, bodies=self.bodies)

    def read(self, count: int) -> Taken:
        if "read" not in self.opened:
            self.append("read", "ASYNC_FLUSH", count, GROUP)
        return self.call("read", store="read", count=count)

    def put(self, name: str, flush: str, count: int, threads: int) -> Taken:
        self.store(name, flush)
        return self.call("put", store=name, count=count, threads=threads, bodies=self.bodies)

    def close(self) -> None:
        try:
            for name in self.opened:
                self.call("close", store=name)
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()


class Sqlite:
    """A table with an index on the key; WAL, synchronous=FULL."""

    def __init__(self, folder: Path, rows: list[tuple[Any, ...]]) -> None:
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
        return _by_threads([rows], lambda row: self.db.execute(self._PUT, row))

    def close(self) -> None:
        self.db.close()


class RocksDb:
    """Keys of queue and number, values of body, key and tag."""

    def __init__(self, folder: Path, rows: list[tuple[Any, ...]]) -> None:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        self.rocksdict, self.rows, self.count = rocksdict, rows, 0
        self.db = rocksdict.Rdict(str(folder), options)
        self.sync, self.lazy = rocksdict.WriteOptions(), rocksdict.WriteOptions()
        self.sync.sync = True

    def _pairs(self, rows: list[tuple[Any, ...]]) -> list[tuple[bytes, bytes]]:
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
                batch = self.rocksdict.WriteBatch(raw_mode=True)
                for name, value in pairs[at : at + GROUP]:
                    batch.put(name, value)
                self.db.write(batch, self.sync)

        return timed(append)[0]

    def read(self) -> Taken:
        if not self.count:
            self.append()
        taken, count = timed(lambda: sum(1 for _ in self.db.items()))
        if count != self.count:
            raise AssertionError(f"read {count} pairs of {self.count}")
        return taken

    def put(self, count: int, *, sync: bool) -> Taken:
        options = self.sync if sync else self.lazy
        pairs = self._pairs([self.rows[number % len(self.rows)] for number in range(count)])
        return _by_threads([pairs], lambda pair: self.db.put(*pair, write_opt=options))

    def close(self) -> None:
        self.db.close()


def _rows(ours: Ours) -> list[tuple[Any, ...]]:
    """The batch as Python values."""
    columns = [ours.batch.column(name).to_pylist() for name in ("queue_id", "body", "keys", "tags")]
    return [(queue_id, body, keys[0], tag) for queue_id, body, keys, tag in zip(*columns, strict=True)]


def race(plan: Plan, bodies: str, found: Found) -> None:
    """Run all parts with one kind of bodies."""
    folder, needed = Path(plan.folder, bodies), set(plan.parts)
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        ours = Ours(folder, plan, bodies)
        stack.callback(ours.close)
        rows = _rows(ours) if needed & {"append", "read", "put"} else []
        made: dict[str, Any] = {}

        def peer(name: str) -> Any:
            """A peer, when it is needed first."""
            if name not in made:
                kind, _, use = name.partition("/")
                makers: dict[str, Callable[[], Any]] = {
                    "java": lambda: Java(folder / "java", plan.classpaths["rocketmq"], bodies),
                    "sqlite": lambda: Sqlite(folder / f"sqlite-{use}", rows),
                    "rocksdb": lambda: RocksDb(folder / f"rocksdb-{use}", rows),
                }
                made[name] = makers[kind]()
                stack.callback(made[name].close)
            return made[name]

        floors = Floors(folder, SIZE * plan.rows) if "floors" in needed else None
        lazy, synced = 20 * plan.puts, plan.puts
        many = max(1, 4 * synced // THREADS) * THREADS
        figures: dict[str, tuple[int, Callable[[], Taken]]] = {
            "append/ours_sync": (plan.rows, lambda: ours.append("sync", SYNC_FLUSH)),
            "append/ours_sync_off": (plan.rows, lambda: ours.append("sync-off", SYNC_FLUSH, index=False)),
            "append/ours_async": (plan.rows, lambda: ours.append("async", ASYNC_FLUSH)),
            "append/java_500": (plan.rows, lambda: peer("java").append("a500", "ASYNC_FLUSH", plan.rows, 500)),
            "append/java_10000": (plan.rows, lambda: peer("java").append("a10000", "ASYNC_FLUSH", plan.rows, GROUP)),
            "append/java_sync_10000": (
                plan.rows,
                lambda: peer("java").append("s10000", "SYNC_FLUSH", plan.rows, GROUP),
            ),
            "append/sqlite": (plan.rows, lambda: peer("sqlite/append").append()),
            "append/rocksdb": (plan.rows, lambda: peer("rocksdb/append").append()),
            "read/ours_4": (plan.rows, lambda: ours.read(FOUR)),
            "read/ours_10": (plan.rows, lambda: ours.read(TEN)),
            "read/java": (plan.rows, lambda: peer("java").read(plan.rows)),
            "read/sqlite": (plan.rows, lambda: peer("sqlite/read").read()),
            "read/rocksdb": (plan.rows, lambda: peer("rocksdb/read").read()),
            "put/ours_async": (lazy, lambda: ours.put("put-async", ASYNC_FLUSH, lazy, 1)),
            "put/java_async": (lazy, lambda: peer("java").put("pa", "ASYNC_FLUSH", lazy, 1)),
            "put/rocksdb_async": (lazy, lambda: peer("rocksdb/put").put(lazy, sync=False)),
            "put/ours_sync": (synced, lambda: ours.put("put-sync", SYNC_FLUSH, synced, 1)),
            "put/java_sync": (synced, lambda: peer("java").put("ps", "SYNC_FLUSH", synced, 1)),
            "put/sqlite_sync": (synced, lambda: peer("sqlite/put").put(synced)),
            "put/rocksdb_sync": (synced, lambda: peer("rocksdb/put").put(synced, sync=True)),
            "put/ours_sync_64": (many, lambda: ours.put("put-sync", SYNC_FLUSH, many, THREADS)),
            "put/java_sync_64": (many, lambda: peer("java").put("ps", "SYNC_FLUSH", many, THREADS)),
            **{
                f"floors/{name}": (plan.rows, lambda name=name: getattr(floors, name)())  # type: ignore[misc]
                for name in ("memcpy", "pwrite", "fdatasync")
            },
        }
        for part in (part for part in STORE_PARTS if part in needed):
            contestants = [each for each in of(part) if not set(each.needs) & set(plan.missing)]

            def once(contestant: Any) -> tuple[int, float, float]:
                if plan.rounds > 1:  # one round only shows that everybody runs
                    settle(folder, 2 * SIZE * plan.rows)
                rows_, measure = figures[f"{contestant.part}/{contestant.name}"]
                taken = measure()
                return rows_, taken.wall_s, taken.cpu_s

            print(f"  {part}, {bodies} bodies", file=sys.stderr, flush=True)
            found.take_turns(contestants, bodies, plan.rounds, once)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plan, found = Plan.read(Path(sys.argv[1])), Found()
    for bodies in plan.bodies:
        race(plan, bodies, found)
    found.write(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
