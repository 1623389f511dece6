"""Bugs planted in consumers, and in batches that move the progress of their groups."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from crash import pipes
from crash.harness import SMALL, die
from crash.judge import Verdict
from crash.planting import Case, Ground, Mutant, Search, patched, without
from messagestore import Consumer, Message, MessageStore, ProgressConflictError, StoreError, StoreLockedError
from messagestore.batches.progress import Move
from messagestore.broker import retention
from messagestore.consume.assignment import Assignment
from messagestore.consume.beginning import Beginning
from messagestore.consume.commits import Commits
from messagestore.consume.cursor import Cursor
from messagestore.consume.progress import GroupProgress
from messagestore.files.consume_queue import ConsumeQueue
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.files.group_locks import GroupLocks
from messagestore.log import group_progress

_STRIDE = 3
_QUEUE = (pipes.IN, 0)


def killed(*names: str, power_every: int = 1 << 30) -> Search:
    """A pipe that is killed, or whose power is cut, in every `_STRIDE`th way."""

    def search(ground: Ground) -> Iterator[Case]:
        root = ground.folder / "pipe"
        for name in names:
            story = pipes.Story.of(name, root)
            for number, death in enumerate(pipes.deaths(story, root, stride=power_every)):
                if number % _STRIDE == 0:
                    yield partial(pipes.judge, death, root)

    return search


def scene(play: Callable[[Path, Verdict], None]) -> Search:
    """One scene in a store that has six messages in one queue."""

    def search(ground: Ground) -> Iterator[Verdict]:
        root, verdict = ground.folder / "scene", Verdict()
        shutil.rmtree(root, ignore_errors=True)
        pipes.fill(root, SMALL, queues=1, count=6)
        play(root, verdict)
        yield verdict

    return search


def append(store: MessageStore, progress: Any) -> None:
    store.append_batch(pa.table({"body": [b"result"]}), topic=pipes.OUT, queue_id=0, progress=progress)


def left_pending(root: Path, to: int) -> None:
    """What a process leaves that is killed between a batch and the table."""
    copy = root.with_name("killed")
    with MessageStore.open(root, SMALL) as store:
        finish, Move.finish = Move.finish, lambda _: None  # type: ignore[method-assign]
        try:
            append(store, {pipes.GROUP: {_QUEUE: to}})
        finally:
            Move.finish = finish  # type: ignore[method-assign]
        shutil.copytree(root, copy)
    shutil.rmtree(root)
    copy.rename(root)
    die(root)


def place(root: Path) -> int | None:
    with Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as consumer:
        return consumer.committed(_QUEUE)


def expect(verdict: Verdict, root: Path, wanted: int) -> None:
    if (offset := place(root)) != wanted:
        verdict.misread.append(f"the group is at {offset}, and not at {wanted}")


def reset_while_pending(root: Path, verdict: Verdict) -> None:
    publish_offsets(str(root), pipes.GROUP, {_QUEUE: 2})
    left_pending(root, 4)
    with Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as consumer:
        consumer.seek(_QUEUE, 2)
        consumer.commit()
    with MessageStore.open(root, SMALL):
        pass
    expect(verdict, root, 2)


def read_while_pending(root: Path, verdict: Verdict) -> None:
    left_pending(root, 4)
    expect(verdict, root, 4)


def older_table(root: Path, verdict: Verdict) -> None:
    table = root / "config" / "consumerOffset.json"
    with MessageStore.open(root, SMALL) as store:
        append(store, {pipes.GROUP: {_QUEUE: 1}})
        older = table.read_bytes()
        publish_offsets(str(root), pipes.GROUP, {_QUEUE: 2})
        append(store, {pipes.GROUP: {_QUEUE: 4}})
    table.write_bytes(older)
    expect(verdict, root, 4)


def broker_moved_on(root: Path, verdict: Verdict) -> None:
    left_pending(root, 4)
    publish_offsets(str(root), pipes.GROUP, {_QUEUE: 5})
    with MessageStore.open(root, SMALL):
        pass
    expect(verdict, root, 5)


def reset_under_a_pipe(root: Path, verdict: Verdict) -> None:
    with MessageStore.open(root, SMALL) as store, Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as consumer:
        consumer.poll(max_records=2)
        append(store, consumer.positions())
        consumer.poll(max_records=2)
        publish_offsets(str(root), pipes.GROUP, {_QUEUE: 0})
        with contextlib.suppress(ProgressConflictError):
            append(store, consumer.positions())
    expect(verdict, root, 0)


def replaced_worker(root: Path, verdict: Verdict) -> None:
    with MessageStore.open(root, SMALL) as store, Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as consumer:
        consumer.poll(max_records=2)
        (root / "spark" / "consumers.lock").unlink()
        with Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as successor:
            assert successor.assignment() == {_QUEUE}
            with contextlib.suppress(StoreLockedError):
                append(store, consumer.positions())
                verdict.duplicated.append("a worker appended the results of a queue that another one has")


def named_offsets(root: Path, verdict: Verdict) -> None:
    with MessageStore.open(root, SMALL) as store, Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as consumer:
        assert consumer.assignment() == {_QUEUE}
        with contextlib.suppress(StoreLockedError):
            append(store, {pipes.GROUP: {_QUEUE: 3}})
            verdict.misread.append("a program moved a group in a queue that a worker has")


def two_workers(root: Path, verdict: Verdict) -> None:
    with (
        Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as first,
        Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as second,
    ):
        for _ in range(3):
            handed = [message.body for worker in (first, second) for of in worker.poll(0, 1).values() for message in of]
            verdict.duplicated += [f"message {body!r}" for body in {*handed} if handed.count(body) > 1]


def deleted_while_pending(root: Path, verdict: Verdict) -> None:
    config = SMALL.replace(mapped_file_size_commit_log=4096, max_message_size=2048)
    shutil.rmtree(root)
    pipes.fill(root, config, queues=1, count=6)
    finish, Move.finish = Move.finish, lambda _: None  # type: ignore[method-assign]
    try:
        with MessageStore.open(root, config) as store:
            append(store, {pipes.GROUP: {_QUEUE: 6}})
            while store.writer.end.physical_offset < 3 * 4096:
                store.put_message(Message("fill", b"." * 500, queue_id=0))
            store.flush()
            store.delete_expired_files(before_offset=2 * 4096)
    except StoreError as error:
        verdict.misread.append(str(error))
    finally:
        Move.finish = finish  # type: ignore[method-assign]
    expect(verdict, root, 6)


def deleted_on_a_full_disk(root: Path, verdict: Verdict) -> None:
    """The table has no room, so the progress is pending, and retention takes what it can."""
    config = SMALL.replace(mapped_file_size_commit_log=4096, max_message_size=2048)
    shutil.rmtree(root)
    pipes.fill(root, config, queues=1, count=6)

    def no_room(table: ConsumerOffsets) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), table.path)

    with MessageStore.open(root, config) as store:
        append(store, {pipes.GROUP: {_QUEUE: 3}})  # the table says from now on which records are pending
        with mock.patch.object(ConsumerOffsets, "save", no_room):
            append(store, {pipes.GROUP: {_QUEUE: 6}})
            while store.writer.end.physical_offset < 3 * 4096:
                store.put_message(Message("fill", b"." * 500, queue_id=0))
            store.flush()
            store.delete_expired_files(at_once=True)
    expect(verdict, root, 6)


def taken_away(root: Path, verdict: Verdict) -> None:
    with Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as consumer:
        cancelled = consumer.poll(0, 2)
        consumer.take_back(cancelled)
        handed = [message.body for messages in consumer.poll().values() for message in messages]
        verdict.lost += [f"message {number}" for number in range(6) if b"%d" % number not in handed]


def failed_poll(root: Path, verdict: Verdict) -> None:
    """Ctrl-C comes when a poll has taken its messages and nobody has them yet."""
    take_turns = Consumer._take_turns

    def interrupted(*arguments: Any) -> None:
        take_turns(*arguments)
        raise KeyboardInterrupt

    with Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as consumer:
        with mock.patch.object(Consumer, "_take_turns", interrupted), contextlib.suppress(KeyboardInterrupt):
            consumer.poll()
        handed = [message.body for messages in consumer.poll().values() for message in messages]
        verdict.lost += [f"message {number}" for number in range(6) if b"%d" % number not in handed]


def retried_and_committed(root: Path, verdict: Verdict) -> None:
    """An orderly worker commits each message, also the one that it has retried, and ends."""
    with Consumer(root, pipes.GROUP, pipes.IN, config=SMALL, orderly=True) as consumer:
        for messages in consumer.poll().values():
            messages[0].retry()
            consumer.commit(messages[0])
    expect(verdict, root, 0)


def made_while_away(root: Path, verdict: Verdict) -> None:
    """A group begins with "latest", and ends. The first message of another queue comes, and one of another topic."""

    def handed(pattern: str) -> set[bytes]:
        with Consumer(root, f"latest-{len(pattern)}", pattern=pattern, start="latest", config=SMALL) as consumer:
            return {message.body for messages in consumer.poll().values() for message in messages}

    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("wide", b"old", queue_id=0))
    if handed("wide") or handed("wide|later"):
        verdict.misread.append('"latest" begins before the end')
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("wide", b"queue", queue_id=3))
        store.put_message(Message("later", b"topic", queue_id=0))
    verdict.lost += [f"message {body!r}" for body in {b"queue"} - handed("wide")]
    verdict.lost += [f"message {body!r}" for body in {b"queue", b"topic"} - handed("wide|later")]


def orderly_by_itself(root: Path, verdict: Verdict) -> None:
    """An orderly worker commits by itself, at its end: the next message of a queue comes with the next call."""
    with Consumer(root, pipes.GROUP, pipes.IN, config=SMALL, orderly=True, auto_commit=True) as consumer:
        handed = [message.body for _ in range(6) for found in consumer.poll().values() for message in found]
    verdict.lost += [f"message {number}" for number in range(6) if b"%d" % number not in handed]


def beyond_the_end(root: Path, verdict: Verdict) -> None:
    """A batch names an offset that the queue does not have yet."""
    with MessageStore.open(root, SMALL) as store:
        with contextlib.suppress(StoreError):
            append(store, {pipes.GROUP: {_QUEUE: 8}})
        for number in range(6, 10):
            store.put_message(Message(pipes.IN, b"%d" % number, queue_id=0))
    with Consumer(root, pipes.GROUP, pipes.IN, config=SMALL) as consumer:
        handed = [message.body for found in consumer.poll().values() for message in found]
    verdict.lost += [f"message {number}" for number in range(6, 10) if b"%d" % number not in handed]


# ---- the bugs


def _at_the_end(_: Any) -> Any:
    """A queue that was made later is read from its end, as those that were there."""

    def first(beginning: Beginning, queue: tuple[str, int]) -> int:
        return beginning._view.max_offset(*queue)

    return first


def _any_offset(real: Any) -> Any:
    """Where a queue ends is not asked for."""

    def moved_on(move: Move, group: str, offsets: Any) -> Any:
        with mock.patch.object(ConsumeQueue, "end", return_value=1 << 40):
            return real(move, group, offsets)

    return moved_on


def _carries_nothing(real: Any) -> Any:
    """The table follows the batch, and the BATCH record says nothing of it."""

    def begin(move: Move, number: int) -> Any:
        real(move, number)
        return {}

    return begin


def _table_first(real: Any) -> Any:
    """The table is written before the results are in the log."""

    def begin(move: Move, number: int) -> Any:
        rows = real(move, number)
        move.finish()
        return rows

    return begin


def _no_mark_before(real: Any) -> Any:
    """The first batch does not say beforehand that progress may be pending."""

    def settle(table: ConsumerOffsets, number: int) -> None:
        if table.settled is None and not hasattr(table, "was_asked"):
            table.was_asked = True  # type: ignore[attr-defined]
        else:
            real(table, number)

    return settle


def _only_from_before(real: Any) -> Any:
    """A table that is older than the log is taken for one that a broker has moved."""

    def add(table: ConsumerOffsets, batch: Any) -> Any:
        for group, topics in batch.progress.items():
            for topic, rows in topics.items():
                if any(table.get(topic, group).get(queue_id, -1) < before for queue_id, before, _ in rows):
                    return []
        return real(table, batch)

    return add


def _over_a_broker(_: Any) -> Any:
    """What is pending counts, wherever a broker has moved the group."""

    def add(table: ConsumerOffsets, batch: Any) -> Any:
        for group, topics in batch.progress.items():
            for topic, rows in topics.items():
                table.update(topic, group, {queue_id: after for queue_id, _, after in rows})
        return []

    return add


def _before_what_is_pending(_: Any) -> Any:
    """A commit is written without what is pending, which then comes over it."""

    def commit(progress: GroupProgress, offsets: Any) -> None:
        files = progress._view.files
        publish_offsets(files.paths.root, progress.group, offsets, files.disk, durable=True)

    return commit


def _read_ahead(_: Any) -> Any:
    """What was read counts as handed out."""
    return property(lambda cursor: cursor.end if cursor.ready else cursor.position)


MUTANTS = (
    Mutant(
        "a BATCH record does not carry the progress",
        patched(Move, "begin", _carries_nothing),
        "kills of pipes",
        killed("sync"),
    ),
    Mutant(
        "the table of progress is written before the batch",
        patched(Move, "begin", _table_first),
        "kills of pipes",
        killed("sync"),
    ),
    Mutant(
        "the first batch with progress leaves no mark before it",
        patched(ConsumerOffsets, "settle", _no_mark_before),
        "kills of pipes",
        killed("sync"),
    ),
    Mutant(
        "what was read counts as handed out", patched(Cursor, "done", _read_ahead), "kills of pipes", killed("sync")
    ),
    Mutant(
        "readers overlook pending progress",
        without(group_progress, "_add", []),
        "scenes of pipes",
        scene(read_while_pending),
    ),
    Mutant(
        "an older table counts as moved by a broker",
        patched(group_progress, "_add", _only_from_before),
        "scenes of pipes",
        scene(older_table),
    ),
    Mutant(
        "pending progress counts over a broker's",
        patched(group_progress, "_add", _over_a_broker),
        "scenes of pipes",
        scene(broker_moved_on),
    ),
    Mutant(
        "a commit leaves progress pending before it",
        patched(GroupProgress, "commit", _before_what_is_pending),
        "scenes of pipes",
        scene(reset_while_pending),
    ),
    Mutant(
        "a pipe goes on over a reset",
        without(Commits, "may_move", True),
        "scenes of pipes",
        scene(reset_under_a_pipe),
    ),
    Mutant(
        "a replaced worker appends its results",
        without(Assignment, "check_kept"),
        "scenes of pipes",
        scene(replaced_worker),
    ),
    Mutant(
        "named offsets need no lock",
        without(GroupLocks, "claim", True),
        "scenes of pipes",
        scene(named_offsets),
    ),
    Mutant(
        "two workers have a queue",
        without(GroupLocks, "claim", True),
        "scenes of pipes",
        scene(two_workers),
    ),
    Mutant(
        "retention deletes a record whose progress is pending",
        without(retention, "settle_progress"),
        "scenes of pipes",
        scene(deleted_while_pending),
    ),
    Mutant(
        "a full disk takes a record whose progress is pending",
        without(retention, "first_pending"),
        "scenes of pipes",
        scene(deleted_on_a_full_disk),
    ),
    Mutant(
        "a poll that fails keeps its messages",
        without(Cursor, "go_back"),
        "scenes of pipes",
        scene(failed_poll),
    ),
    Mutant(
        "a commit goes past a message that holds its queue",
        patched(Cursor, "done", lambda _: property(lambda cursor: cursor.position)),
        "scenes of pipes",
        scene(retried_and_committed),
    ),
    Mutant(
        "a queue that is made later is read from its end",
        patched(Beginning, "_first", _at_the_end),
        "scenes of pipes",
        scene(made_while_away),
    ),
    Mutant(
        "a group begins anew in a topic that is made later",
        patched(GroupProgress, "topics", lambda _: lambda progress: set()),
        "scenes of pipes",
        scene(made_while_away),
    ),
    Mutant(
        "an orderly consumer that commits by itself keeps its message",
        without(Cursor, "let_go"),
        "scenes of pipes",
        scene(orderly_by_itself),
    ),
    Mutant(
        "a batch moves a group behind the end of a queue",
        patched(Move, "_moved_on", _any_offset),
        "scenes of pipes",
        scene(beyond_the_end),
    ),
    Mutant(
        "a cancelled poll keeps its messages",
        without(Consumer, "take_back"),
        "scenes of pipes",
        scene(taken_away),
    ),
)
