"""Anything a user may do to a store, in any order, against plain lists of messages."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from crash.harness import die
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    BatchConflictError,
    BatchRequest,
    GetMessageStatus,
    Message,
    MessageBatch,
    MessageIllegalError,
    MessageStore,
    ReadOnlyStore,
    StoreConfig,
)
from messagestore.inspect.verify import verify
from small import SMALL, columns

TOPICS = ("t", "u")
QUEUES = 3
BODY = st.binary(max_size=400)


class StoreMachine(RuleBasedStateMachine):
    """`model` holds what each queue must hold; `keys` where each key must lead."""

    @initialize(flush=st.sampled_from([SYNC_FLUSH, ASYNC_FLUSH]), index=st.booleans(), crc=st.booleans())
    def make(self, flush: str, index: bool, crc: bool) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="messagestore-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        self.root = self.folder / "s"
        self.config: StoreConfig = SMALL.replace(
            flush_disk_type=flush, message_index_enable=index, enabled_append_prop_crc=crc
        )
        self.model: dict[tuple[str, int], list[bytes]] = {}
        self.keys: dict[tuple[str, str], list[bytes]] = {}
        self.batches: dict[int, list[bytes]] = {}
        self.number = 0
        self.store: MessageStore | None = MessageStore.open(self.root, self.config)
        self.reader: ReadOnlyStore = MessageStore.open_read_only(self.root)

    def writer(self) -> MessageStore:
        if self.store is None:
            self.store = MessageStore.open(self.root, self.config)
        return self.store

    def add(self, topic: str, queue_id: int, body: bytes, key: str | None = None) -> None:
        self.model.setdefault((topic, queue_id), []).append(body)
        if key is not None:
            self.keys.setdefault((topic, key), []).append(body)

    @rule(
        topic=st.sampled_from(TOPICS),
        queue=st.integers(0, QUEUES - 1),
        body=BODY,
        key=st.sampled_from(["a", "b", None]),
    )
    def put(self, topic: str, queue: int, body: bytes, key: str | None) -> None:
        result = self.writer().put_message(Message(topic, body, queue_id=queue, keys=[key] if key else ()))
        assert result.queue_offset == len(self.model.get((topic, queue), []))
        self.add(topic, queue, body, key)

    @rule(
        topic=st.sampled_from(TOPICS), queue=st.integers(0, QUEUES - 1), bodies=st.lists(BODY, min_size=1, max_size=8)
    )
    def put_batch(self, topic: str, queue: int, bodies: list[bytes]) -> None:
        batch = MessageBatch.from_messages([Message(topic, body, queue_id=queue) for body in bodies])
        assert self.writer().put_messages(batch).queue_offset == len(self.model.get((topic, queue), []))
        for body in bodies:
            self.add(topic, queue, body)

    @rule(topic=st.sampled_from(TOPICS), bodies=st.lists(BODY, max_size=40), sync=st.booleans())
    def append_batch(self, topic: str, bodies: list[bytes], sync: bool) -> None:
        version = len(self.batches)
        flush = SYNC_FLUSH if sync else ASYNC_FLUSH
        request = BatchRequest("app", version, "spark", flush_disk_type=flush)
        assert (
            self.writer().append_batch(columns(bodies, topic=topic, queues=QUEUES, key="c"), request).status
            == "appended"
        )
        self.batches[version] = [topic.encode(), *bodies]
        for i, body in enumerate(bodies):
            self.add(topic, i % QUEUES, body, f"c{i}")

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), changed=st.booleans())
    def replay(self, data: st.DataObject, changed: bool) -> None:
        version = data.draw(st.sampled_from(sorted(self.batches)))
        topic, *bodies = self.batches[version]
        rows = [*bodies, b"one more"] if changed else bodies
        request = BatchRequest("app", version, "spark")
        replayed = columns(rows, topic=topic.decode(), queues=QUEUES, key="c")
        if changed:
            with pytest.raises(BatchConflictError):
                self.writer().append_batch(replayed, request)
        else:
            assert self.writer().append_batch(replayed, request).status == "known"

    @rule(body=st.binary(min_size=8193, max_size=9000))
    def refused(self, body: bytes) -> None:
        with pytest.raises(MessageIllegalError):
            self.writer().put_message(Message("t", body, queue_id=0))
        with pytest.raises(MessageIllegalError):
            self.writer().append_batch(columns([b"good", body]), BatchRequest("bad", 0))

    @rule()
    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None
            assert not (self.root / "abort").exists()

    @rule()
    def kill(self) -> None:
        """Kill the process; what an ASYNC session had not dispatched yet is in the page cache and is found."""
        if self.store is not None:
            die(self.root)
            self.store = None
            self.writer()

    @rule()
    def clean(self) -> None:
        store = self.writer()
        store.flush()
        store.writer.finish()
        store.writer.clean_end.move()

    @rule()
    def new_reader(self) -> None:
        self.reader.close()
        self.reader = MessageStore.open_read_only(self.root)

    def published(self) -> None:
        if self.store is not None:
            self.store.flush()

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        self.published()
        topic, key = data.draw(st.sampled_from(sorted(self.keys)))
        assert [m.body for m in self.reader.query_message(topic, key, max_count=1000)] == self.keys[(topic, key)]

    @invariant()
    def everything_is_there(self) -> None:
        if not hasattr(self, "model"):
            return
        self.published()
        for (topic, queue), expected in self.model.items():
            found: list[bytes] = []
            for batch in self.reader.read(topic, queue, 0, columns=("body",)):
                found += batch.column("body").to_pylist()
            assert found == expected
            result = self.reader.get_message(topic, queue, len(expected))
            assert result.status is GetMessageStatus.OFFSET_OVERFLOW_ONE

    def teardown(self) -> None:
        if not hasattr(self, "root"):
            return
        self.reader.close()
        if self.store is not None:
            self.store.close()
        report = verify(self.root)
        shutil.rmtree(self.folder)
        assert report.ok, report.findings[:3]


StoreMachine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestStoreMachine = StoreMachine.TestCase


@pytest.mark.slow
class TestStoreMachineDeep(StoreMachine.TestCase):  # type: ignore[misc, name-defined]
    """The same, longer and with other random numbers each time."""

    settings = settings(
        max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
