"""A batch moves a group with its results: both count from one moment, and nobody else moves the group meanwhile."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from crash.harness import die
from messagestore import (
    ASYNC_FLUSH,
    BatchRequest,
    ConfigError,
    Consumer,
    Message,
    MessageIllegalError,
    MessageStore,
    NotAStoreError,
    OffsetOutOfRangeError,
    ProgressConflictError,
    StoreClosedError,
    StoreLockedError,
    StoreWentBackwardsError,
)
from messagestore.batches import append as batches
from messagestore.batches import progress as progress_of_batches
from messagestore.batches.progress import Move
from messagestore.files.consumer_offsets import PROGRESS_GROUP, ConsumerOffsets, offsets_locked, publish_offsets
from messagestore.files.disk import Disk
from messagestore.format.message import BATCH_TOPIC
from messagestore.inspect import operator
from messagestore.inspect.verify import verify
from messagestore.spi.local import LOCAL_STORES
from small import SMALL

COUNT = 6
IN = ("in", 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        fill(store)
    return root


def fill(store: MessageStore, count: int = COUNT) -> None:
    for number in range(count):
        store.put_message(Message("in", b"%d" % number, queue_id=0))


def results(count: int = 1) -> pa.Table:
    return pa.table({"body": [b"result"] * count})


def append(store: MessageStore, progress: object, **how: object) -> str:
    return store.append_batch(results(), topic="out", queue_id=0, progress=progress, **how).status  # type: ignore[arg-type]


def appended(root: Path) -> int:
    """How many results there are."""
    with MessageStore.open_read_only(root, SMALL) as store:
        return store.max_offset("out", 0) if "out" in store.topics() else 0


def table(root: Path) -> ConsumerOffsets:
    found = ConsumerOffsets(Disk(), str(root))
    found.load()
    return found


def place(root: Path, group: str = "g") -> int | None:
    """Where the group is for whoever asks."""
    with Consumer(root, group, "in", config=SMALL) as consumer:
        return consumer.committed(IN)


def left_pending(root: Path, to: int = 4) -> None:
    """Append a batch whose process is killed before the table is written."""
    copy = root.with_name("copy")
    with MessageStore.open(root, SMALL) as store:
        finish, Move.finish = Move.finish, lambda _: None  # type: ignore[method-assign]
        try:
            assert append(store, {"g": {IN: to}}) == "appended"
        finally:
            Move.finish = finish  # type: ignore[method-assign]
        store.flush()
        shutil.copytree(root, copy)
    shutil.rmtree(root)
    copy.rename(root)
    die(root)


def test_positions_behind_a_message_that_failed_since_are_refused(root: Path) -> None:
    """A batch would let the group go past it, and it would never come again."""
    with MessageStore.open(root, SMALL) as store, Consumer(root, "g", "in", config=SMALL, orderly=True) as consumer:
        ((message,),) = consumer.poll().values()
        positions = consumer.positions()
        message.retry()
        with pytest.raises(ConfigError, match=r"message 0 of in/0, which failed since they were taken"):
            append(store, positions)
    assert (place(root), appended(root)) == (None, 0)


def test_results_and_progress_are_there_together(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store, Consumer(root, "g", "in", config=SMALL) as consumer:
        consumer.poll(max_records=4)
        append(store, consumer.positions())
        assert consumer.committed(IN) == 4
        consumer.poll()
        append(store, consumer.positions())
    assert place(root) == COUNT
    assert appended(root) == 2
    assert verify(root, SMALL).findings == []


def test_a_kill_before_the_table_is_written_leaves_the_progress_in_the_log(root: Path) -> None:
    left_pending(root)
    assert table(root).get("in", "g") == {}
    assert place(root) == 4
    (row,), _ = operator.groups(str(root), SMALL)
    assert (row["group"], row["committedOffset"], row["lag"]) == ("g", 4, COUNT - 4)
    with contextlib.closing(LOCAL_STORES.reader(str(root), SMALL)) as reader:
        (of_lag,), _ = reader.group_lag("g")
        (figures,) = reader.view("figures")[0][0]["groups"]
    assert of_lag["lag"] == COUNT - 4
    assert figures["lag"] == COUNT - 4
    with MessageStore.open(root, SMALL):
        assert table(root).get("in", "g") == {0: 4}, "whoever opens the store writes it"
    assert place(root) == 4


def test_a_reset_after_a_batch_wins(root: Path) -> None:
    """Also over a batch that was pending: the reset comes after it."""
    left_pending(root)
    with Consumer(root, "g", "in", config=SMALL) as operator_:
        operator_.seek_to_beginning()
        operator_.commit()
    with MessageStore.open(root, SMALL):
        pass
    assert place(root) == 0


def test_a_broker_that_has_moved_the_group_wins(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It knows nothing of the pending batch, and writes its own place."""
    left_pending(root)
    publish_offsets(str(root), "g", {IN: 5})
    with caplog.at_level(logging.WARNING), MessageStore.open(root, SMALL):
        pass
    assert "a broker has moved it since" in caplog.text
    assert place(root) == 5


def test_a_copy_whose_table_is_older_than_its_log_takes_the_newest_batch(root: Path) -> None:
    """A backup copies the table first. The group had committed between, so it was not where the batch had found it."""
    with MessageStore.open(root, SMALL) as store:
        append(store, {"g": {IN: 1}})
        older = (root / "config" / "consumerOffset.json").read_bytes()
        with Consumer(root, "g", "in", config=SMALL) as consumer:
            consumer.poll(max_records=2)
            consumer.commit()
            consumer.poll(max_records=2)
            append(store, consumer.positions())
    (root / "config" / "consumerOffset.json").write_bytes(older)
    assert place(root) == 5
    with MessageStore.open(root, SMALL):
        pass
    assert table(root).get("in", "g") == {0: 5}


def test_a_group_that_a_pipe_has_sent_back_is_there_after_a_kill(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        append(store, {"g": {IN: COUNT}})
    left_pending(root, to=2)
    assert place(root) == 2


def test_several_pending_batches_count_one_after_the_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table could not be written: the batches are in the log, and move the group all the same."""

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    with MessageStore.open(root, SMALL) as store, Consumer(root, "g", "in", config=SMALL) as consumer:
        consumer.poll(max_records=1)
        append(store, consumer.positions())
        with monkeypatch.context() as patch:
            patch.setattr(ConsumerOffsets, "save", full)
            for _ in range(2):
                consumer.poll(max_records=2)
                assert append(store, consumer.positions()) == "appended"
        assert table(root).get("in", "g") == {0: 1}
        assert consumer.committed(IN) == 5
        consumer.poll()
        append(store, consumer.positions())
    assert table(root).get("in", "g") == {0: COUNT}


def test_a_known_batch_moves_nothing_a_second_time(root: Path) -> None:
    request = BatchRequest(app_id="pipe", version=0)
    with MessageStore.open(root, SMALL) as store:
        assert append(store, {"g": {IN: 4}}, request=request) == "appended"
        publish_offsets(str(root), "g", {IN: 1})
        assert append(store, {"g": {IN: 4}}, request=request) == "known"
    assert place(root) == 1


def test_a_group_that_was_reset_is_not_moved_by_a_worker_that_does_not_know_it(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store, Consumer(root, "g", "in", config=SMALL) as consumer:
        consumer.poll(max_records=2)
        append(store, consumer.positions())
        consumer.poll(max_records=2)
        publish_offsets(str(root), "g", {IN: 0})
        with pytest.raises(ProgressConflictError, match=r"group g is at 0, and this consumer began elsewhere") as error:
            append(store, consumer.positions())
        assert (error.value.group, error.value.topic, error.value.queue_id, error.value.offset) == ("g", *IN, 0)
        assert appended(root) == 1
    assert place(root) == 0


def test_a_worker_that_lost_its_queues_moves_nothing(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store, Consumer(root, "g", "in", config=SMALL) as consumer:
        consumer.poll(max_records=2)
        stale = consumer.positions()
        (root / "spark" / "consumers.lock").unlink()
        with Consumer(root, "g", "in", config=SMALL) as successor:
            assert successor.assignment() == {IN}
            with pytest.raises(StoreLockedError, match="another worker"):
                append(store, stale)
            successor.poll(max_records=3)
            append(store, successor.positions())
    with MessageStore.open(root, SMALL) as store, pytest.raises(StoreClosedError):
        append(store, stale)
    assert place(root) == 3
    assert appended(root) == 1


def test_whoever_names_offsets_may_not_move_a_queue_that_a_worker_has(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        with Consumer(root, "g", "in", config=SMALL) as consumer:
            assert consumer.assignment() == {IN}
            with pytest.raises(StoreLockedError, match=r"read by a worker of consumer group 'g'.*positions\(\)"):
                append(store, {"g": {IN: 4}})
            append(store, {"other": {IN: 4}})
        append(store, {"g": {IN: 2}})
    assert place(root) == 2


def test_messages_that_are_gone_move_nothing(root: Path) -> None:
    older = root.with_name("older")
    shutil.copytree(root, older)
    with MessageStore.open(root, SMALL) as store:
        fill(store)
    consumer = Consumer(root, "g", "in", config=SMALL)
    consumer.poll()
    positions = consumer.positions()
    shutil.rmtree(root)
    older.rename(root)
    with MessageStore.open(root, SMALL) as store, pytest.raises((StoreWentBackwardsError, NotAStoreError)):
        append(store, positions)
    consumer.close()
    assert appended(root) == 0


def lose_the_last_segment(root: Path) -> None:
    """Lose it, with what was put since it began, and go on without it."""
    last = max((root / "commitlog").iterdir())
    assert int(last.name), "all of the log"
    last.unlink()
    MessageStore.open(root, SMALL, accept_loss=True).close()


def next_segment(store: MessageStore) -> None:
    for _ in range(3):
        store.put_message(Message("fill", bytes(7000), queue_id=0))


def test_after_an_accepted_loss_a_group_is_where_the_results_that_are_left_end(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It went on at 0, and a pipe appended all of its results a second time."""
    with MessageStore.open(root, SMALL) as store:
        append(store, {"g": {IN: 3}})
        append(store, {"g": {IN: 5}})
        next_segment(store)
        fill(store)
        append(store, {"g": {IN: COUNT + 4}})
    lose_the_last_segment(root)
    assert appended(root) == 2
    assert place(root) == 5
    assert "group g had read in/0 up to 10, but the end of the log is gone. The group continues at 5" in caplog.text

    with MessageStore.open(root, SMALL) as store, Consumer(root, "g", "in", config=SMALL) as consumer:
        (messages,) = consumer.poll().values()
        assert [message.queue_offset for message in messages] == [5]
        append(store, consumer.positions())
    assert place(root) == COUNT


def test_after_an_accepted_loss_a_place_in_a_topic_that_was_deleted_does_not_count(root: Path) -> None:
    """The last batch that is left moved the group in the old topic: its number would pass over new messages."""
    with MessageStore.open(root, SMALL) as store:
        append(store, {"g": {IN: 4}})
        store.delete_topic("in")
        fill(store)
        next_segment(store)
        fill(store)
        append(store, {"g": {IN: COUNT + 4}})
    lose_the_last_segment(root)
    with MessageStore.open(root, SMALL), Consumer(root, "g", "in", config=SMALL) as consumer:
        assert len(consumer.poll()[IN]) == COUNT


@pytest.mark.parametrize("piped", [True, False], ids=["pipe", "commit"])
def test_after_an_accepted_loss_a_group_that_begins_again_can_be_moved(root: Path, piped: bool) -> None:
    """Its place beyond the queue's end stayed: `commit` wrote nothing, and each consumer got the same messages again."""
    with MessageStore.open(root, SMALL) as store:
        next_segment(store)
        fill(store)
    publish_offsets(str(root), "g", {IN: 2 * COUNT})
    lose_the_last_segment(root)
    with MessageStore.open(root, SMALL) as store, Consumer(root, "g", "in", config=SMALL) as consumer:
        assert len(consumer.poll(max_records=4)[IN]) == 4
        if piped:
            append(store, consumer.positions())
        else:
            consumer.commit()
    with Consumer(root, "g", "in", config=SMALL) as consumer:
        assert [message.queue_offset for message in consumer.poll()[IN]] == [4, 5]


def test_positions_count_for_one_batch(root: Path) -> None:
    """Two batches with the results of the same messages are not there together, and a repeated one doubles them."""
    with MessageStore.open(root, SMALL) as store, Consumer(root, "g", "in", config=SMALL) as consumer:
        consumer.poll(max_records=4)
        positions = consumer.positions()
        append(store, positions, request=BatchRequest("pipe", 0))
        assert append(store, positions, request=BatchRequest("pipe", 0)) == "known"
        with pytest.raises(
            ConfigError, match="progress: found positions to which consumer group 'g' was moved already"
        ):
            append(store, positions)
        consumer.seek(IN, 0)
        consumer.poll(max_records=4)
        assert append(store, consumer.positions()) == "appended"  # they were asked for once more
    assert appended(root) == 2
    assert place(root) == 4


def test_positions_of_another_store_are_refused(root: Path) -> None:
    """They moved the group of this store, and the group that was read stayed where it was."""
    other = root.with_name("other")
    shutil.copytree(root, other)
    with MessageStore.open(other, SMALL) as store, Consumer(root, "g", "in", config=SMALL) as consumer:
        consumer.poll()
        with pytest.raises(ConfigError, match=r"found positions of a consumer of .*/store; allowed are those"):
            append(store, consumer.positions())
    assert appended(other) == 0
    assert place(other) is None


def test_positions_of_the_same_store_by_a_link(root: Path) -> None:
    link = root.with_name("link")
    link.symlink_to(root)
    with MessageStore.open(root, SMALL) as store, Consumer(link, "g", "in", config=SMALL) as consumer:
        consumer.poll()
        assert append(store, consumer.positions()) == "appended"
    assert place(root) == COUNT


def test_a_batch_with_progress_is_synced(root: Path) -> None:
    """A power cut could take the results and leave the progress."""
    with MessageStore.open(root, SMALL.replace(flush_disk_type=ASYNC_FLUSH)) as store:
        append(store, {"g": {IN: 2}})
        assert store.writer.synced_end == store.writer.end.physical_offset
        with pytest.raises(ConfigError, match="found ASYNC_FLUSH in the request; allowed is SYNC_FLUSH"):
            append(store, {"g": {IN: 3}}, request=BatchRequest(flush_disk_type=ASYNC_FLUSH))
    assert place(root) == 2


def test_retention_writes_the_table_before_it_deletes_the_record(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SMALL.replace(mapped_file_size_commit_log=4096, max_message_size=2048)
    root = root.with_name("small")
    with MessageStore.open(root, config) as store:
        fill(store)
        monkeypatch.setattr(batches.Move, "finish", lambda _: None)
        append(store, {"g": {IN: COUNT}})
        monkeypatch.undo()
        while store.writer.end.physical_offset < 3 * 4096:
            store.put_message(Message("fill", b"." * 500, queue_id=0))
        store.flush()
        assert table(root).get("in", "g") == {}
        deleted = store.delete_expired_files(before_offset=2 * 4096)
        assert deleted.segments
        assert table(root).get("in", "g") == {0: COUNT}


@pytest.mark.parametrize("cause", ["no room for the table", "the table is locked"])
def test_a_full_disk_does_not_take_a_record_whose_progress_is_pending(
    root: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """What lies before it goes. Without it, the group would go back, and the pipe would append its results again."""
    config = SMALL.replace(mapped_file_size_commit_log=4096, max_message_size=2048)
    root = root.with_name("small")
    with MessageStore.open(root, config) as store:
        fill(store)

        def fill_up_to(end: int) -> None:
            while store.writer.end.physical_offset < end:
                store.put_message(Message("fill", b"." * 500, queue_id=0))
            store.flush()

        fill_up_to(2 * 4096)
        monkeypatch.setattr(batches.Move, "finish", lambda _: None)
        batch = store.append_batch(results(), topic="out", queue_id=0, progress={"g": {IN: COUNT}})
        monkeypatch.undo()
        fill_up_to(6 * 4096)

        def no_room(table: ConsumerOffsets) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), table.path)

        with monkeypatch.context() as patch, contextlib.ExitStack() as others:
            if cause == "no room for the table":
                patch.setattr(ConsumerOffsets, "save", no_room)
            else:
                patch.setattr(progress_of_batches, "_TIMEOUT_S", 0.0)
                others.enter_context(offsets_locked(Disk(), str(root), "another process", 0.0))
            deleted = store.delete_expired_files(at_once=True)
        assert len(deleted.segments) == 2
        assert "a batch there moves consumer groups, and their table cannot be written" in deleted.kept
        assert deleted.min_offset <= batch.physical_offset

        assert store.delete_expired_files(at_once=True).min_offset > batch.physical_offset, "there is room again"
        assert table(root).get("in", "g") == {0: COUNT}


@pytest.mark.parametrize("queue", [IN, ("in", 7), ("nowhere", 0)], ids=["a queue", "a new queue", "a new topic"])
def test_a_group_cannot_be_moved_behind_the_end_of_a_queue(root: Path, queue: tuple[str, int]) -> None:
    """It skipped what was put there later, without a word."""
    end = COUNT if queue == IN else 0
    with MessageStore.open(root, SMALL) as store:
        for offset in (end + 1, end + 300):
            with pytest.raises(
                OffsetOutOfRangeError, match=rf"found offset {offset} .* allowed is 0 to {end}"
            ) as caught:
                append(store, {"g": {queue: offset}})
            assert (caught.value.queue_offset, caught.value.max) == (offset, end)
        assert store.max_offset("out", 0) == 0
        append(store, {"g": {queue: end}})
    assert table(root).get(queue[0], "g") == {queue[1]: end}


def test_the_row_of_the_store_is_shown_to_nobody(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        append(store, {"g": {IN: 2}})
    found = table(root)
    assert found.get(BATCH_TOPIC, PROGRESS_GROUP) == {0: 1}
    assert found.groups == ["g"]
    rows, _ = operator.groups(str(root), SMALL)
    assert {row["group"] for row in rows} == {"g"}


def test_a_copy_that_has_only_the_files_of_a_broker_keeps_pending_progress(root: Path) -> None:
    left_pending(root)
    shutil.rmtree(root / "spark")
    with MessageStore.open(root, SMALL):
        pass
    assert place(root) == 4


@pytest.mark.parametrize(
    ("progress", "error", "sentence"),
    [
        ({}, ConfigError, "progress: found {}; allowed is a dict of consumer groups"),
        ({"g": {}}, ConfigError, "allowed is a dict of consumer groups"),
        ({"g": 4}, ConfigError, "allowed is a dict of consumer groups"),
        ({"g": {"in": 4}}, ConfigError, "allowed is a dict of consumer groups"),
        ({"g": {IN: -1}}, ConfigError, "progress: found -1"),
        ({"g": {IN: "4"}}, ConfigError, "progress: found '4'"),
        ({"no group": {IN: 1}}, MessageIllegalError, "group: found 'no group'"),
        ({"CID_RMQ_SYS_X": {IN: 1}}, MessageIllegalError, "belong to the broker"),
        (4, ConfigError, r"progress: found 4; allowed .* `consumer.positions\(\)`"),
    ],
)
def test_progress_that_is_none(root: Path, progress: object, error: type[Exception], sentence: str) -> None:
    with MessageStore.open(root, SMALL) as store, pytest.raises(error, match=sentence):
        append(store, progress)
    assert appended(root) == 0


def test_nothing_handed_out_is_nothing_to_move(root: Path) -> None:
    publish_offsets(str(root), "g", {IN: 2})
    with (
        Consumer(root, "g", "in", config=SMALL) as consumer,
        pytest.raises(ConfigError, match="positions: found no message that was handed out since the last commit"),
    ):
        consumer.positions()
