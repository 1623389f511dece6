"""How far a query is behind, from the progress that Spark gives to listeners."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from messagestore import BatchRequest, Message, MessageColumns, MessageStore
from pyspark_messagestore.monitoring.listener import MessageStoreListener, SourceLag, lags_of
from pyspark_messagestore.source.offsets import StreamOffset
from small import SMALL, filled
from tls_files import certificate, replace, token_line


def offset(store_id: str, **topics: list[int]) -> str:
    queues = {(topic, queue_id): end for topic, ends in topics.items() for queue_id, end in enumerate(ends)}
    return json.dumps(StreamOffset(store_id, tuple(topics), queues).to_json())


def progress(*sources: dict[str, Any]) -> dict[str, Any]:
    return {"id": "q", "runId": "r", "name": "copy", "batchId": 7, "sources": list(sources)}


def test_metrics_have_kafkas_names_and_form() -> None:
    """Text, as in `sources[].metrics` of Spark's Kafka source; a queue that was not read yet counts whole."""
    source = {"endOffset": offset("s", t=[5, 2]), "latestOffset": offset("s", t=[5, 9], u=[2])}
    (lag,) = lags_of(progress(source))
    assert lag.metrics == {
        "minOffsetsBehindLatest": "0",
        "maxOffsetsBehindLatest": "7",
        "avgOffsetsBehindLatest": "3.0",
    }
    assert (lag.records_behind, lag.topics, lag.description) == (9, ["t", "u"], "messagestore s: t, u")
    assert (lag.query_id, lag.run_id, lag.query_name, lag.batch_id) == ("q", "r", "copy", 7)


def test_other_sources_are_left_out() -> None:
    """Another format's offsets, none at all, a newer form of ours: none of these stops the listener."""
    ours = {"endOffset": offset("s", t=[1]), "latestOffset": offset("s", t=[3])}
    others = [
        {"endOffset": "17", "latestOffset": "18"},
        {"endOffset": '{"t":{"0":5}}', "latestOffset": '{"t":{"0":5}}'},
        {"endOffset": None, "latestOffset": None},
        {"endOffset": offset("s", t=[1]), "latestOffset": None},
        {"endOffset": '{"formatVersion":99}', "latestOffset": "no JSON"},
    ]
    assert [(lag.source, lag.records_behind) for lag in lags_of(progress(*others, ours))] == [(5, 2)]
    assert lags_of(progress(*others)) == []
    assert lags_of(progress({"endOffset": offset("s"), "latestOffset": offset("s")}))[0].metrics == {}


def test_bytes_are_estimated_where_the_store_can_be_seen(tmp_path: Path) -> None:
    """By the store's id, also if the path became a store only after the listener was made."""
    told: list[SourceLag] = []

    class Lags(MessageStoreListener):
        def on_lag(self, lag: SourceLag) -> None:
            told.append(lag)

    root = tmp_path / "store"
    listener = Lags(str(root))
    event = SimpleNamespace(progress=None)

    def report(store_id: str) -> SourceLag:
        source = {"endOffset": offset(store_id, t=[1, 5]), "latestOffset": offset(store_id, t=[5, 5])}
        event.progress = type("Progress", (dict,), {"id": "q"})(progress(source))
        listener.onQueryProgress(event)
        return told[-1]

    assert (report("a" * 32).path, told[-1].bytes_behind) == (None, None)
    filled(root, 10)
    with MessageStore.open_read_only(root, SMALL) as store:
        size = sum(message.size for message in store.get_message("t", 0, 1, 10).messages)
        store_id = store.store_id
    lag = report(store_id)
    assert (lag.path, lag.bytes_behind) == (str(root), size)
    assert lag.metrics["estimatedTotalBytesBehindLatest"] == str(size)
    assert lag.description == f"messagestore {root}: t"
    assert listener.latest == {"q": [lag]}
    listener.onQueryTerminated(SimpleNamespace(id="q"))
    assert listener.latest == {}


@pytest.mark.parametrize("copy_first", [False, True])
def test_a_store_and_its_copy_are_told_apart(tmp_path: Path, copy_first: bool) -> None:
    """The copy names the store that it was made of as its ancestor: it counts for that one only where the store itself
    is not there. A third path, whose store comes later, is still looked for."""
    root, copy, later = tmp_path / "store", tmp_path / "copy", tmp_path / "later"
    with MessageStore.open(root, SMALL) as store:  # a copy knows its ancestor by the records of its batches
        rows = MessageColumns.from_arrow(pa.record_batch({"body": ["x"] * 10}), topic="t", queue_id=0)
        store.append_batch(rows, BatchRequest("app", 0))
    shutil.copytree(root, copy)
    shutil.rmtree(copy / "spark")  # so that the copy gets an id of its own
    filled(copy, 30)
    ids = {}
    for path in (root, copy):
        with MessageStore.open_read_only(path, SMALL) as store:
            ids[path] = store.store_id
    assert ids[root] != ids[copy]

    def paths(listener: MessageStoreListener) -> list[str | None]:
        sources = [{"endOffset": offset(i, t=[1]), "latestOffset": offset(i, t=[5])} for i in ids.values()]
        given = type("Progress", (dict,), {"id": "q"})(progress(*sources))
        listener.onQueryProgress(SimpleNamespace(progress=given))
        return [lag.path for lag in listener.latest["q"]]

    listener = MessageStoreListener(*map(str, (copy, root, later) if copy_first else (root, copy, later)))
    assert paths(listener) == [str(root), str(copy)]
    assert paths(MessageStoreListener(str(copy))) == [str(copy)] * 2
    filled(later, 5)
    with MessageStore.open_read_only(later, SMALL) as store:
        ids[later] = store.store_id
    assert paths(listener) == [str(root), str(copy), str(later)]


def test_a_copy_of_the_whole_folder_is_the_store_that_is_named_first(tmp_path: Path) -> None:
    """It keeps the id of the original, also when a writer opens it, so the id cannot tell the two apart."""
    root, copy = tmp_path / "store", tmp_path / "copy"
    filled(root, 20)
    shutil.copytree(root, copy)
    filled(copy, 30)

    with MessageStore.open_read_only(root, SMALL) as store:
        store_id = store.store_id
    with MessageStore.open_read_only(copy, SMALL) as store:
        assert store.store_id == store_id

    ends = {"endOffset": offset(store_id, t=[1]), "latestOffset": offset(store_id, t=[3])}
    event = SimpleNamespace(progress=type("Progress", (dict,), {"id": "q"})(progress(ends)))
    for first, second in ((root, copy), (copy, root)):
        listener = MessageStoreListener(str(first), str(second))
        listener.onQueryProgress(event)
        assert [lag.path for lag in listener.latest["q"]] == [str(first)]


def test_messages_that_retention_took_have_no_bytes(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        store_id = store.store_id
        for _ in range(40):
            store.put_message(Message("t", b"x" * 1000, queue_id=0))
    (root / "commitlog" / ("0" * 20)).unlink()
    source = {"endOffset": offset(store_id, t=[0]), "latestOffset": offset(store_id, t=[40])}
    (lag,) = lags_of(progress(source), {store_id: str(root)})
    with MessageStore.open_read_only(root, SMALL) as store:
        low = store.min_offset("t", 0)
        size = store.get_message("t", 0, low, 1).messages[0].size
    assert low > 0
    assert (lag.records_behind, lag.bytes_behind) == (40, (40 - low) * size)


def test_a_store_that_is_gone_stops_no_query(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = {"endOffset": offset("s", t=[0]), "latestOffset": offset("s", t=[4])}
    (lag,) = lags_of(progress(source), {"s": str(tmp_path / "gone")})
    assert (lag.records_behind, lag.bytes_behind) == (4, None)
    assert "cannot be estimated" in caplog.text


def test_bytes_are_estimated_by_url(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the settings of the listener. What is wrong is said once; while the server is away, messages are counted."""
    from messagestore.serve.lifecycle import ServedStore  # cheroot is an extra

    cert, key = certificate(tmp_path, "server")
    token, wrong = replace(tmp_path / "token", "the-token"), replace(tmp_path / "wrong", "another")
    tokens = replace(tmp_path / "tokens", token_line("listener", "read", "the-token"))
    root = filled(tmp_path / "store", 10)
    with MessageStore.open_read_only(root, SMALL) as store:
        store_id = store.store_id
    source = {"endOffset": offset(store_id, t=[1, 5]), "latestOffset": offset(store_id, t=[5, 5])}
    event = SimpleNamespace(progress=type("Progress", (dict,), {"id": "q"})(progress(source)))

    def told(listener: MessageStoreListener) -> SourceLag:
        listener.onQueryProgress(event)
        return listener.latest["q"][0]

    served = ServedStore(str(root), SMALL, read_only=True, cert_file=cert, key_file=key, token_file=tokens)
    served.start()
    try:
        local = told(MessageStoreListener(str(root)))
        listener = MessageStoreListener(served.url, token_file=token, ca_file=cert, retry_timeout_s=0.1)
        by_url = told(listener)
        assert by_url.path == served.url and by_url.bytes_behind == local.bytes_behind
        assert local.bytes_behind
        stranger = MessageStoreListener(served.url, token_file=wrong, ca_file=cert)
        assert [told(stranger).bytes_behind for _ in range(2)] == [None, None]
        warnings = [record.message for record in caplog.records if record.name.endswith("listener")]
        assert len(warnings) == 1 and "does not know the token" in warnings[0]
    finally:
        served.stop(0)
    gone = told(listener)
    assert (gone.records_behind, gone.bytes_behind) == (4, None)
    assert "cannot be estimated" in caplog.text
