"""Puts in an interpreter that starts no thread any more: Python 3.12 and later, once the main thread has ended."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from messagestore import BatchRequest, Message, MessageStore, StoreConfig
from messagestore.format.config import ASYNC_FLUSH
from messagestore.inspect.verify import verify
from small import SMALL, SMALL_ASYNC, bodies, columns, read_all


@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC], ids=["sync", "async"])
def test_a_session_works_without_any_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: StoreConfig
) -> None:
    """The caller does what the flush thread would do; a put with SYNC_FLUSH is on the disk when it returns."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    root = tmp_path / "s"
    with MessageStore.open(root, config) as store:
        for count in range(60):
            put = store.put_message(Message("t", b"%d" % count * 200, queue_id=0, keys=["k"]))
            assert put.is_ok
            if config is SMALL:
                assert store.writer.synced_end >= put.physical_offset + put.size
        assert store.put_message_async(Message("t", b"x", queue_id=0)).result(60).queue_offset == 60
        store.put_message_oneway(Message("t", b"y", queue_id=0))
        request = BatchRequest("app", 0, flush_disk_type=ASYNC_FLUSH)
        assert store.append_batch(columns(bodies(10), queues=1, topic="u"), request).status == "appended"
        store.flush()
        assert len(read_all(store)) == 62
        assert len(read_all(store, "u")) == 10
    assert verify(root).ok
    assert not (root / "abort").exists()
