"""Who takes part in the race, and what each of them promises."""

from __future__ import annotations

from dataclasses import dataclass

PADDED, RANDOM = "padded", "random"
BODIES = (PADDED, RANDOM)
"""Bodies of 100 bytes: a number and letters, which compress well; or random bytes, which do not."""

SYNCED = "on the disk (synced)"
CACHED = "in the page cache"
MEMORY = "in the memory of the process"
NOTHING = "nothing: the rows are dropped"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One line of a table.

    Parameters
    ----------
    part : str
        The part of the race, which is a table.
    name : str
        The key in the JSON.
    words : str
        The name in the table.
    when_done : str
        Where the rows are when the call returns.
    delivery : str
        What a replay, or a kill, does to a row.
    needs : tuple of str
        The tools without which it is left out (`tools.TOOLS`).
    ours : bool
    """

    part: str
    name: str
    words: str
    when_done: str
    delivery: str
    needs: tuple[str, ...] = ()
    ours: bool = False


_ONCE = "exactly once"
_AT_LEAST = "at least once"
_LOSES = "a power cut may take the last ones"
_ATOMIC = "a transaction is there or not"


def _c(part: str, name: str, words: str, when_done: str, delivery: str, *needs: str, ours: bool = False) -> Contestant:
    return Contestant(part, name, words, when_done, delivery, needs, ours)


_BATCHES = "batches of {} messages until dispatched"
CONTESTANTS: tuple[Contestant, ...] = (
    _c("sink", "dropping", "floor: rows dropped in a Python sink", NOTHING, "-", "spark"),
    _c("sink", "noop", "floor: Spark's own noop sink", NOTHING, "-", "spark"),
    _c("sink", "ours_index_on", "**this project**, SYNC_FLUSH, key index on", SYNCED, _ONCE, "spark", ours=True),
    _c("sink", "ours_index_off", "**this project**, SYNC_FLUSH, key index off", SYNCED, _ONCE, "spark", ours=True),
    _c("sink", "parquet", "Parquet files", CACHED, f"{_ONCE}, if read through Spark's list of files", "spark"),
    _c("sink", "delta", "Delta Lake", CACHED, _ONCE, "spark", "delta"),
    _c("sink", "kafka", "Kafka, acks=all, as it comes", CACHED, _AT_LEAST, "spark", "kafka"),
    _c("sink", "kafka_tuned", "Kafka, acks=all, batch.size, linger, lz4", CACHED, _AT_LEAST, "spark", "kafka"),
    _c("source", "ready", "floor: a ready-made Arrow source, two columns", "-", "-", "spark"),
    _c("source", "ours_4", "**this project**, four columns", "-", "checksums checked", "spark", ours=True),
    _c("source", "ours_10", "**this project**, ten columns", "-", "checksums checked", "spark", ours=True),
    _c("source", "parquet_4", "Parquet files, four columns", "-", "no checksums", "spark"),
    _c("source", "parquet_10", "Parquet files, ten columns", "-", "no checksums", "spark"),
    _c("source", "delta_4", "Delta Lake, four columns", "-", "no checksums", "spark", "delta"),
    _c("source", "delta_10", "Delta Lake, ten columns", "-", "no checksums", "spark", "delta"),
    _c("source", "kafka", "Kafka, four columns", "-", "checksums checked", "spark", "kafka"),
    _c("append", "ours_sync", "**this project**, SYNC_FLUSH, one batch until visible", SYNCED, _ONCE, ours=True),
    _c("append", "ours_sync_off", "**this project**, the same, key index off", SYNCED, _ONCE, ours=True),
    _c("append", "ours_async", "**this project**, ASYNC_FLUSH, one batch until visible", CACHED, _ONCE, ours=True),
    _c("append", "java_500", f"RocketMQ, ASYNC_FLUSH, {_BATCHES.format('500')}", CACHED, _AT_LEAST, "rocketmq"),
    _c("append", "java_10000", f"RocketMQ, ASYNC_FLUSH, {_BATCHES.format('10,000')}", CACHED, _AT_LEAST, "rocketmq"),
    _c(
        "append", "java_sync_10000", f"RocketMQ, SYNC_FLUSH, {_BATCHES.format('10,000')}", SYNCED, _AT_LEAST, "rocketmq"
    ),
    _c("append", "sqlite", "SQLite, WAL, synchronous=FULL, 10,000 rows a transaction", SYNCED, _ATOMIC),
    _c("append", "rocksdb", "RocksDB, sync, 10,000 rows a write batch, no key index", SYNCED, _ATOMIC, "rocksdb"),
    _c("append", "leveldb", "LevelDB, sync, 10,000 rows a write batch, no key index", SYNCED, _ATOMIC, "leveldb"),
    _c("append", "kahadb", "ActiveMQ's KahaDB, 10,000 messages a transaction, no key index", SYNCED, _ATOMIC, "kahadb"),
    _c("append", "memory", "Python's memory: a list for each queue, a dict of keys", MEMORY, "all is lost at the end"),
    _c("read", "ours_4", "**this project**, four columns", "-", "checksums checked", ours=True),
    _c("read", "ours_10", "**this project**, ten columns", "-", "checksums checked", ours=True),
    _c("read", "java", "RocketMQ, getMessage and decode", "-", "checksums checked", "rocketmq"),
    _c("read", "sqlite", "SQLite, one SELECT of all columns", "-", "no checksums"),
    _c("read", "rocksdb", "RocksDB, one scan of keys and values", "-", "checksums checked", "rocksdb"),
    _c("read", "leveldb", "LevelDB, one scan of keys and values", "-", "checksums checked", "leveldb"),
    _c("read", "kahadb", "ActiveMQ's KahaDB, recover and decode", "-", "no checksums", "kahadb"),
    _c("read", "memory", "Python's memory, the objects that are there", "-", "no checksums"),
    _c("put", "ours_async", "**this project**, ASYNC_FLUSH, one thread", CACHED, _LOSES, ours=True),
    _c("put", "java_async", "RocketMQ, ASYNC_FLUSH, one thread", CACHED, _LOSES, "rocketmq"),
    _c("put", "rocksdb_async", "RocksDB, one thread", CACHED, _LOSES, "rocksdb"),
    _c("put", "leveldb_async", "LevelDB, one thread", CACHED, _LOSES, "leveldb"),
    _c("put", "kahadb_async", "ActiveMQ's KahaDB, journalDiskSyncStrategy=never, one thread", CACHED, _LOSES, "kahadb"),
    _c("put", "memory_async", "Python's memory, one thread", MEMORY, "all is lost at the end"),
    _c("put", "ours_sync", "**this project**, SYNC_FLUSH, one thread", SYNCED, "kept", ours=True),
    _c("put", "java_sync", "RocketMQ, SYNC_FLUSH, one thread", SYNCED, "kept", "rocketmq"),
    _c("put", "sqlite_sync", "SQLite, WAL, synchronous=FULL, one thread", SYNCED, "kept"),
    _c("put", "rocksdb_sync", "RocksDB, sync, one thread", SYNCED, "kept", "rocksdb"),
    _c("put", "leveldb_sync", "LevelDB, sync, one thread", SYNCED, "kept", "leveldb"),
    _c("put", "kahadb_sync", "ActiveMQ's KahaDB, journalDiskSyncStrategy=always, one thread", SYNCED, "kept", "kahadb"),
    _c("put", "ours_sync_64", "**this project**, SYNC_FLUSH, 64 threads", SYNCED, "kept", ours=True),
    _c("put", "ours_in_flight_64", "**this project**, SYNC_FLUSH, one thread, 64 in flight", SYNCED, "kept", ours=True),
    _c("put", "java_sync_64", "RocketMQ, SYNC_FLUSH, 64 threads", SYNCED, "kept", "rocketmq"),
    _c("floors", "memcpy", "copied within memory", "-", "-"),
    _c("floors", "pwrite", "written to a new file", CACHED, "-"),
    _c("floors", "fdatasync", "written to a new file, and synced once", SYNCED, "-"),
)

TITLES = {
    "sink": "Spark writes a stream",
    "source": "Spark reads a stream",
    "append": "A store takes batches, without Spark",
    "read": "A store is read from the page cache, without Spark",
    "put": "A store takes single messages, without Spark",
    "floors": "The bytes alone (224 for each row, as in the log)",
}
BASES = {"sink": "dropping", "source": "ready", "append": "ours_sync", "read": "ours_4", "put": None, "floors": None}
"""The contestant that the others of a part are compared with, round by round."""
SPARK_PARTS, STORE_PARTS = ("sink", "source"), ("append", "read", "put", "floors")


def of(part: str) -> list[Contestant]:
    """The contestants of a part, in the order of its table."""
    return [each for each in CONTESTANTS if each.part == part]
