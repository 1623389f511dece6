"""Steps of the tests in which a real broker and our writers share a store."""

from __future__ import annotations

from pathlib import Path

from crash.harness import APP, SMALL, Promise, batch_columns, check_store
from interop.java_store import Driver, JavaStore, java_config, single
from messagestore import BatchRequest, MessageStore

CONFIG = java_config(SMALL)


def java_store(java: Driver, root: Path, **settings: object) -> JavaStore:
    """A store of RocketMQ with the sizes of ours; it is not open yet."""
    return JavaStore(java, root, {**CONFIG, **settings})


def append_batch(store: MessageStore, version: int, rows: int = 5) -> str:
    """A SYNC_FLUSH batch of a Spark query; what became of it."""
    request = BatchRequest(app_id=APP, version=version, version_source="spark", flush_disk_type="SYNC_FLUSH")
    return store.append_batch(batch_columns(APP, version, rows), request).status


def java_puts(java: JavaStore, topic: str, bodies: list[str], **fields: object) -> list[int]:
    """Put one by one; where they are."""
    found = java.put([single(topic, body.encode(), **fields) for body in bodies])
    assert all(each["ok"] for each in found)
    java.dispatched()
    return [each["physicalOffset"] for each in found]


def check(root: Path, versions: int = 0) -> None:
    """Everything holds; the batches so far are there once, and known."""
    rows = {(APP, version): 5 for version in range(versions)}
    puts = [f"put/{number}/" for number in range(4)]
    check_store(root, Promise(rows=rows, batches=set(rows), maybe_puts=puts), SMALL)
