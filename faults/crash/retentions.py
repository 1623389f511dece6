"""Retention beside everything else: writers, a deliverer of delayed messages, readers and a group, each a process.

The processes that write, that deliver and that delete are killed again and again, at any moment. Readers check every
message that they see, and count what they are told is gone. Retention may never take what the group has not read, nor
a delayed message that was not delivered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

from crash.children import ended, in_child
from crash.counts import Counts
from crash.harness import SMALL, batch_columns, payload
from crash.judge import Verdict
from messagestore import (
    BatchRequest,
    Message,
    MessageColumns,
    MessageStore,
    OffsetOutOfRangeError,
    ReadOnlyStore,
    StoreError,
    deliver_delayed,
)
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.inspect.verify import verify

_SECONDS = 4.0
_QUEUES, _ROWS, _LATE = 3, 30, 6
_MANY, _SINGLE, _LATER = "topic-many", "single", "later"
_GROUP = "slow"
_CONFIG = SMALL.replace(
    clean_interval="20ms", attach_timeout="50ms", lock_timeout="60s", message_delay_level="1s", delete_commit_log_files_interval=0
)  # fmt: skip


def retentions(root: Path, chance: random.Random, counts: Counts) -> Verdict:
    """Run all of it for some seconds, and check what is left."""
    verdict = Verdict()
    with MessageStore.open(root, _CONFIG) as store:
        for topic in (_MANY, _SINGLE, _LATER):
            store.create_topic(topic, _QUEUES)
        _append(store, 0)

    publish_offsets(str(root), _GROUP, {(_MANY, queue_id): 0 for queue_id in range(_QUEUES)})

    until_s = time.monotonic() + _SECONDS
    read_end, write_end = os.pipe()
    readers = [
        in_child(partial(_follow, root, until_s, write_end, _MANY, queue_id, lags=queue_id > 0))
        for queue_id in range(_QUEUES)
    ]
    readers += [
        in_child(partial(_follow, root, until_s, write_end, _SINGLE, 0, lags=True)),
        in_child(partial(_get, root, until_s, write_end, _SINGLE, 1)),
        in_child(partial(_read_as_group, root, until_s, write_end)),
    ]
    os.close(write_end)

    killed: list[Callable[[], object]] = [
        partial(_write, root, chance.randrange(1 << 30)),
        partial(_delete, root),
        partial(_deliver, root),
    ]
    pids = [in_child(work) for work in killed]

    while time.monotonic() < until_s:
        time.sleep(chance.random() * 0.3)
        number = chance.choice((0, 1, 1, 2))
        if os.waitpid(pids[number], os.WNOHANG)[0]:
            verdict.misread.append("a process that writes, deletes or delivers failed (see the log)")
        else:
            _kill(pids[number])
            counts.cases["kills of processes beside retention"] += 1
        pids[number] = in_child(killed[number])

    for pid in pids:
        _kill(pid)
    with os.fdopen(read_end) as said:
        told = [tuple(map(int, line.split())) for line in said]

    failed = sum(not ended(pid) for pid in readers)
    if failed:
        verdict.misread.append(
            f"{failed} of {len(readers)} readers saw something torn, missing, or twice (see the log)"
        )

    counts.cases["messages read beside retention"] += sum(seen for seen, _ in told)
    counts.cases["messages that retention took from readers"] += sum(gone for _, gone in told)
    _check(root, verdict, counts)
    return verdict


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# ---- the power is cut


def write_and_delete(root: Path, pipe: int) -> None:
    """Append, report and delete until the disk is dead."""
    logging.disable()
    with contextlib.suppress(StoreError, OSError), MessageStore.open(root, _CONFIG) as store:
        while True:
            last = store.last_batch("late")
            version = 0 if last is None else last.version + 1
            _append(store, version)
            os.write(pipe, b"%d " % version)
            if version % 3 == 2:
                store.delete_expired_files(reserved_hours=0, ignored_groups=["SCHEDULE_TOPIC_XXXX"])


def judge_cut(root: Path, acknowledged: int, counts: Counts) -> Verdict:
    """What a reader shows before recovery, and what the next writer knows; `acknowledged` is a version, or -1."""
    verdict, per_queue = Verdict(), _ROWS // _QUEUES
    with MessageStore.open_read_only(root, _CONFIG) as reader:
        _check_contents(reader, verdict)
        seen = min(reader.max_offset(_MANY, queue_id) for queue_id in range(_QUEUES))
        if seen < (acknowledged + 1) * per_queue:
            verdict.lost.append(
                f"a reader sees {seen} messages in a queue, {acknowledged + 1} batches were acknowledged"
            )

    with MessageStore.open(root, _CONFIG) as store:
        _check_contents(store, verdict)
        ends = {store.max_offset(_MANY, queue_id) for queue_id in range(_QUEUES)}
        last = store.last_batch("many")
        if ends != {0 if last is None else (last.version + 1) * per_queue}:
            verdict.misread.append(f"the queues end at {ends}, and the last batch is {last}")

        if acknowledged >= 0:
            request = BatchRequest(app_id="many", version=acknowledged, version_source="user")
            status = store.append_batch(batch_columns("many", acknowledged, _ROWS, _QUEUES), request).status
            if status != "known":
                verdict.duplicated.append(f"batch {acknowledged} was {status} again")

        counts.cases["segments that went before a power cut"] += (
            len(os.listdir(root / "commitlog"))
            < store.writer.end.physical_offset // _CONFIG.mapped_file_size_commit_log
        )

    report = verify(root, _CONFIG)
    verdict.misread += [str(each) for each in report.findings]
    return verdict


def _check_contents(store: ReadOnlyStore, verdict: Verdict) -> None:
    """Every message that is left is the one that was put."""
    for queue_id in range(_QUEUES) if _MANY in store.topics() else ():
        start = store.min_offset(_MANY, queue_id)
        for batch in store.read(_MANY, queue_id, start, columns=["body"]):
            wanted = [_wanted(_MANY, queue_id, start + number) for number in range(batch.num_rows)]
            if batch["body"].to_pylist() != wanted:
                verdict.misread.append(f"{_MANY}/{queue_id}: other messages from {start} on")
            start += batch.num_rows
        if start != store.max_offset(_MANY, queue_id):
            verdict.lost.append(f"{_MANY}/{queue_id} ends at {start} instead of {store.max_offset(_MANY, queue_id)}")


# ---- who writes


def _append(store: MessageStore, version: int) -> None:
    store.append_batch(
        batch_columns("many", version, _ROWS, _QUEUES), BatchRequest(app_id="many", version=version, version_source="user")
    )  # fmt: skip
    rows = range(version * _LATE, (version + 1) * _LATE)
    late = pa.record_batch(
        {
            "body": [b"%d" % row for row in rows],
            "queueId": pa.array([row % _QUEUES for row in rows], pa.int32()),
            "delayTimeLevel": pa.array([1] * _LATE, pa.int32()),
        }
    )
    request = BatchRequest(app_id="late", version=version, version_source="user")
    store.append_batch(MessageColumns.from_arrow(late, topic=_LATER), request)


def _write(root: Path, seed: int) -> None:
    chance = random.Random(seed)
    while True:
        with MessageStore.open(root, _CONFIG) as store:
            for _ in range(chance.randrange(1, 4)):
                last = store.last_batch("late")
                _append(store, 0 if last is None else last.version + 1)  # the batch before it may come again
            for number in range(chance.randrange(20)):
                store.put_message(Message(_SINGLE, b"%d/" % number + b"." * 500, queue_id=number % _QUEUES))


def _delete(root: Path) -> None:
    while True:
        with MessageStore.open(root, _CONFIG) as store:
            store.delete_expired_files(reserved_hours=0)
        time.sleep(0.02)


def _deliver(root: Path) -> None:
    while True:
        if not deliver_delayed(root, _CONFIG).count:
            time.sleep(0.05)


# ---- who reads


def _wanted(topic: str, queue_id: int, queue_offset: int) -> bytes | None:
    per_queue = _ROWS // _QUEUES
    if topic != _MANY:
        return None
    return payload("many", queue_offset // per_queue, queue_offset % per_queue * _QUEUES + queue_id)


def _follow(root: Path, until_s: float, pipe: int, topic: str, queue_id: int, *, lags: bool) -> None:
    """Follow a queue; a reader that lags waits until the next message is gone. Every gap must be told exactly."""
    start = seen = gone = 0
    with MessageStore.open_read_only(root, _CONFIG) as reader:
        while time.monotonic() < until_s:
            try:
                for batch in reader.follow(topic, queue_id, start, ["queue_offset", "body"], timeout=0.1):
                    offsets = batch["queue_offset"].to_pylist()
                    assert offsets == list(range(start, start + len(offsets))), "a gap, or a repeat"
                    for offset, body in zip(offsets, batch["body"].to_pylist(), strict=True):
                        assert _wanted(topic, queue_id, offset) in (None, body), "torn, or another message"
                    start, seen = start + len(offsets), seen + len(offsets)

                    while lags and reader.min_offset(topic, queue_id) <= start and time.monotonic() < until_s:
                        time.sleep(0.02)
                    if time.monotonic() > until_s:
                        break
            except OffsetOutOfRangeError as error:
                assert error.queue_offset == start < error.min <= error.max, vars(error)
                gone, start = gone + error.min - start, error.min

    assert seen + gone == start
    os.write(pipe, f"{seen} {gone}\n".encode())


def _get(root: Path, until_s: float, pipe: int, topic: str, queue_id: int) -> None:
    """Read as RocketMQ's consumers do, by status and next offset."""
    start = seen = gone = 0
    with MessageStore.open_read_only(root, _CONFIG) as reader:
        while time.monotonic() < until_s:
            found = reader.get_message(topic, queue_id, start)
            offsets = [message.queue_offset for message in found.messages]
            assert offsets == list(range(start, start + len(offsets))), "a gap, or a repeat"
            assert found.next_begin_offset >= start + len(offsets), "back, or the same again"
            seen, gone = seen + len(offsets), gone + found.next_begin_offset - start - len(offsets)
            start = found.next_begin_offset
            time.sleep(0.2)
    os.write(pipe, f"{seen} {gone}\n".encode())


def _read_as_group(root: Path, until_s: float, pipe: int) -> None:
    """Read what is kept for a group; an error that something is gone is a loss."""
    start = seen = 0
    with MessageStore.open_read_only(root, _CONFIG) as reader:
        while time.monotonic() < until_s:
            end = reader.max_offset(_MANY, 0)
            for batch in reader.read(_MANY, 0, start, min(end, start + 200)):
                start, seen = start + batch.num_rows, seen + batch.num_rows
            publish_offsets(str(root), _GROUP, {(_MANY, queue_id): start for queue_id in range(_QUEUES)})
            time.sleep(0.1)
    os.write(pipe, f"{seen} 0\n".encode())


# ---- what is left


def _check(root: Path, verdict: Verdict, counts: Counts) -> None:
    report = verify(root, _CONFIG)
    verdict.misread += [str(each) for each in report.findings]
    with MessageStore.open(root, _CONFIG) as store:
        last = store.last_batch("late")
        assert last is not None
        status = store.append_batch(
            batch_columns("many", last.version, _ROWS, _QUEUES),
            BatchRequest(app_id="many", version=last.version, version_source="user"),
        ).status
        if status != "known":
            verdict.duplicated.append(f"the newest batch was {status} again")
        many = store.last_batch("many")
        assert many is not None
        for queue_id in range(_QUEUES):
            wanted, found = (many.version + 1) * _ROWS // _QUEUES, store.max_offset(_MANY, queue_id)
            if found != wanted:
                verdict.lost.append(f"{_MANY}/{queue_id} ends at {found} instead of {wanted}")
        time.sleep(1.1)
        while store.deliver_delayed().count:
            pass
        for queue_id in range(_QUEUES):
            wanted, end = (last.version + 1) * _LATE // _QUEUES, store.max_offset(_LATER, queue_id)
            begin = store.min_offset(_LATER, queue_id)
            bodies = Counter(
                body for batch in store.read(_LATER, queue_id, begin, columns=["body"]) for body in batch["body"].to_pylist()
            )  # fmt: skip
            if end < wanted:
                verdict.lost.append(f"{_LATER}/{queue_id}: {end} of {wanted} delayed messages were delivered")
            if end > wanted or (bodies and max(bodies.values()) > 1):
                verdict.duplicated.append(f"{_LATER}/{queue_id}: {wanted} delayed messages became {end}")
        counts.cases["segments that went beside everything else"] += (
            store.writer.log.min_offset // _CONFIG.mapped_file_size_commit_log
        )
