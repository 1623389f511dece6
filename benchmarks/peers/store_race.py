"""The part of the race without Spark: `python -m benchmarks.peers.store_race PLAN FOUND`.

Batches, reading, single puts, and the bytes alone. The Python stores run in this process; RocketMQ's and ActiveMQ's
have a JVM each, which runs as long as the race does.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import Floors, Taken, settle, timed
from benchmarks.messages import QUEUE_COUNT, TAGS, TOPIC, sliced
from benchmarks.peers.contestants import STORE_PARTS, of
from benchmarks.peers.databases import GROUP, LevelDb, Memory, RocksDb, Row, Sqlite
from benchmarks.peers.jvms import KahaDb, RocketMq
from benchmarks.peers.plan import Found, Plan
from benchmarks.peers.rows import table
from benchmarks.store_put import put_in_flight
from benchmarks.store_read import FOUR, TEN
from messagestore import ASYNC_FLUSH, SYNC_FLUSH, BatchRequest, Message, MessageColumns, MessageStore, StoreConfig
from messagestore.read_only_store import CHUNK_ROWS

SIZE = 224
"""The approximate size of a record of these messages, in bytes."""
THREADS = 64


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
        shares = [self._messages(count // threads) for _ in range(threads)]
        return _by_threads(shares, store.put_message)

    def put_in_flight(self, name: str, flush: str, count: int, in_flight: int) -> Taken:
        return put_in_flight(self.store(name, flush_disk_type=flush), self._messages(count), in_flight)

    def _messages(self, count: int) -> list[Message]:
        def message(number: int) -> Message:
            body, key = self.bodies[number % len(self.bodies)], f"ord-{number * 7919 % 1_000_000}"
            return Message(TOPIC, body, keys=[key], tags=TAGS[number % len(TAGS)], queue_id=number % QUEUE_COUNT)

        return [message(number) for number in range(count)]

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


def _rows(ours: Ours) -> list[Row]:
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
        few = max(GROUP, plan.rows // 5)  # enough for a slow store
        rows = _rows(ours) if needed & {"append", "read", "put"} else []
        made: dict[str, Any] = {}

        def peer(name: str) -> Any:
            """A peer, when it is needed first."""
            if name not in made:
                kind, _, use = name.partition("/")
                makers: dict[str, Callable[[], Any]] = {
                    "java": lambda: RocketMq(folder / "java", plan.classpaths["rocketmq"], bodies),
                    "kahadb": lambda: KahaDb(folder / "kahadb", plan.classpaths["kahadb"], bodies),
                    "sqlite": lambda: Sqlite(folder / f"sqlite-{use}", rows),
                    "rocksdb": lambda: RocksDb(folder / f"rocksdb-{use}", rows),
                    "leveldb": lambda: LevelDb(folder / f"leveldb-{use}", rows),
                    "memory": lambda: Memory(rows),
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
            "append/leveldb": (plan.rows, lambda: peer("leveldb/append").append()),
            "append/kahadb": (few, lambda: peer("kahadb").append("append", few)),
            "append/memory": (plan.rows, lambda: peer("memory/append").append()),
            "read/ours_4": (plan.rows, lambda: ours.read(FOUR)),
            "read/ours_10": (plan.rows, lambda: ours.read(TEN)),
            "read/java": (plan.rows, lambda: peer("java").read(plan.rows)),
            "read/sqlite": (plan.rows, lambda: peer("sqlite/read").read()),
            "read/rocksdb": (plan.rows, lambda: peer("rocksdb/read").read()),
            "read/leveldb": (plan.rows, lambda: peer("leveldb/read").read()),
            "read/kahadb": (few, lambda: peer("kahadb").read(few)),
            "read/memory": (plan.rows, lambda: peer("memory/read").read()),
            "put/ours_async": (lazy, lambda: ours.put("put-async", ASYNC_FLUSH, lazy, 1)),
            "put/java_async": (lazy, lambda: peer("java").put("pa", "ASYNC_FLUSH", lazy, 1)),
            "put/rocksdb_async": (lazy, lambda: peer("rocksdb/put").put(lazy, sync=False)),
            "put/leveldb_async": (lazy, lambda: peer("leveldb/put").put(lazy, sync=False)),
            "put/kahadb_async": (lazy, lambda: peer("kahadb").put("put-async", "never", lazy)),
            "put/memory_async": (lazy, lambda: peer("memory/put").put(lazy)),
            "put/ours_sync": (synced, lambda: ours.put("put-sync", SYNC_FLUSH, synced, 1)),
            "put/java_sync": (synced, lambda: peer("java").put("ps", "SYNC_FLUSH", synced, 1)),
            "put/sqlite_sync": (synced, lambda: peer("sqlite/put").put(synced)),
            "put/rocksdb_sync": (synced, lambda: peer("rocksdb/put").put(synced, sync=True)),
            "put/leveldb_sync": (synced, lambda: peer("leveldb/put").put(synced, sync=True)),
            "put/kahadb_sync": (synced, lambda: peer("kahadb").put("put-sync", "always", synced)),
            "put/ours_sync_64": (many, lambda: ours.put("put-sync", SYNC_FLUSH, many, THREADS)),
            "put/ours_in_flight_64": (many, lambda: ours.put_in_flight("put-sync", SYNC_FLUSH, many, THREADS)),
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
