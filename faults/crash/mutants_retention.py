"""Bugs planted in retention."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from crash.harness import SMALL, append_encoded, die
from crash.imitate import Broker, another_boot
from crash.judge import Verdict
from crash.planting import Ground, Mutant, kills, no_sync, patched, power_cuts, without
from messagestore import ConfigError, Message, MessageStore, StoreConfig
from messagestore.broker import expired, retention
from messagestore.broker.retention import Retention
from messagestore.files.consume_queue import ConsumeQueue
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.files.index_file import IndexService
from messagestore.files.timer_progress import TIMER_TOPIC
from messagestore.files.topics import Topics
from messagestore.format import config
from small import ClockDisk


def queues_first(real: Any) -> Any:
    """The files of queues go before the segments."""

    def delete(self: Retention, found: Any, clock: Any) -> Any:
        log = self.writer.log
        offsets = log.offsets
        log.set_offsets(offsets[len(found.offsets) :])
        self._delete_queue_files(clock)
        log.set_offsets(offsets)
        return real(self, found, clock)

    return delete


def all_but_the_last(_: Any) -> Any:
    """All files of a queue but the last one count as expired."""
    return lambda queue, _physical_offset: max(len(queue.offsets) - 1, 0)


def newest_index_only(_: Any) -> Any:
    """All index files but the newest one count as expired."""

    def forget(index: IndexService, _physical_offset: int) -> list[str]:
        gone = [file.path for file in index.files[:-1]]
        index.files = index.files[-1:]
        return gone

    return forget


# ---- stores whose first segments are gone


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "store")


def _filled(root: Path) -> None:
    """A batch, and then some segments of puts."""
    with MessageStore.open(root, SMALL) as store:
        append_encoded(store, "app-1", 0, 5, "SYNC_FLUSH")
        append_encoded(store, "app-1", 1, 5, "SYNC_FLUSH")
        for number in range(60):
            store.put_message(Message("single", b"put/%d/" % number + b"." * 1000, queue_id=0))


def copies_without_spark(_: Ground) -> Iterator[Verdict]:
    """The newest batch is sent again to a copy without `spark/`, after its segment was deleted."""
    with _scratch() as root:
        _filled(root)
        with MessageStore.open(root, SMALL) as store:
            store.delete_expired_files(at_once=True)
        shutil.rmtree(root / "spark")
        with MessageStore.open(root, SMALL) as store:
            status = append_encoded(store, "app-1", 1, 5, "SYNC_FLUSH")
            yield Verdict(duplicated=[f"batch 1 was {status}"] * (status != "known"))


def groups_that_read(_: Ground) -> Iterator[Verdict]:
    """A consumer group has not read all."""
    with _scratch() as root:
        _filled(root)
        publish_offsets(str(root), "delays", {("single", 0): 20})
        with MessageStore.open(root, SMALL) as store:
            store.delete_expired_files(reserved_hours=0)
            begin = store.min_offset("single", 0)
            yield Verdict(lost=[f"messages 20 to {begin - 1}, which a group had not read"] * (begin > 20))


def retries_that_wait(_: Ground) -> Iterator[Verdict]:
    """A message was sent back to a group, which has no place in its retry topic."""
    with _scratch() as root, MessageStore.open(root, SMALL) as store:
        store.put_message(Message("%RETRY%delays", b"again", queue_id=0))
        for number in range(60):
            store.put_message(Message("single", b"put/%d/" % number + b"." * 1000, queue_id=0))
        publish_offsets(str(root), "delays", {("single", 0): 60})
        store.delete_expired_files(reserved_hours=0)
        yield Verdict(lost=["a message that was sent back"] * store.min_offset("%RETRY%delays", 0))


def half_messages_that_wait(_: Ground) -> Iterator[Verdict]:
    """A half message is open, and was never checked."""
    with _scratch() as root, MessageStore.open(root, SMALL) as store:
        store.half_message(Message("single", b"half", queue_id=0), "producers")
        for number in range(60):
            store.put_message(Message("single", b"put/%d/" % number + b"." * 1000, queue_id=0))
        store.delete_expired_files(reserved_hours=0)
        yield Verdict(lost=["a half message that was open"] * (not store.open_halves()))


def delayed_messages_that_wait(_: Ground) -> Iterator[Verdict]:
    """A delayed message is not due for hours."""
    with _scratch() as root, MessageStore.open(root, SMALL) as store:
        store.put_message(Message("single", b"late", queue_id=0, delay_time_level=18))
        for number in range(60):
            store.put_message(Message("single", b"put/%d/" % number + b"." * 1000, queue_id=0))
        store.delete_expired_files(reserved_hours=0)
        yield Verdict(lost=["a delayed message that waits"] * store.min_offset("SCHEDULE_TOPIC_XXXX", 17))


def numbers_after_a_cut(_: Ground) -> Iterator[Verdict]:
    """A power cut takes every unit of a queue's last file, and their records; the file before it and the seals are gone."""
    with _scratch() as root:
        config = SMALL.replace(flush_disk_type="ASYNC_FLUSH")
        store, count = MessageStore.open(root, config), config.mapped_file_size_consume_queue // 20
        for number in range(count):
            store.put_message(Message("edge", b"%d" % number, queue_id=0))
        for number in range(60):
            store.put_message(Message("single", b"put/%d/" % number + b"." * 1000, queue_id=0))
        store.flush()
        with store.writer.mutex:
            store.writer.finish()
            store.writer.clean_end.move()
        last = store.put_message(Message("edge", b"last", queue_id=0))
        store.delete_expired_files(reserved_hours=0)
        die(root)

        newest = max((root / "consumequeue" / "edge" / "0").iterdir())
        newest.write_bytes(bytes(newest.stat().st_size))
        segment = max((root / "commitlog").iterdir())
        data = bytearray(segment.read_bytes())
        position = last.physical_offset - int(segment.name)
        data[position : position + last.size] = bytes(last.size)
        segment.write_bytes(data)
        (root / "spark" / "ends").unlink()

        with another_boot(), MessageStore.open(root, config) as store:
            end = store.max_offset("edge", 0)
            yield Verdict(lost=[f"the queue ends at {end} instead of {count}"] * (end != count))


def timers_that_wait(_: Ground) -> Iterator[Verdict]:
    """A broker has taken ten timer messages into its wheel, and delivered the first one."""
    with _scratch() as root:
        root.mkdir(parents=True)
        broker, due_ms = Broker(root, SMALL), 1_795_170_000_000
        for number in range(10):
            broker.put(TIMER_TOPIC, b"timer", properties=[("TIMER_OUT_MS", f"{due_ms + number * 1000}")])
            for _ in range(10):
                broker.put("single", b"." * 1000)
        (root / "abort").unlink()
        (root / "config").mkdir()
        (root / "config" / "timercheck").write_bytes(struct.pack(">qqq", due_ms + 1000, 0, 10))
        with MessageStore.open(root, SMALL) as store:
            store.writer.clean_end.move()
            store.delete_expired_files(reserved_hours=0)
            begin = store.min_offset(TIMER_TOPIC, 0)
            yield Verdict(lost=[f"timer messages 1 to {begin - 1}"] * (begin > 1))


def times_that_went_back(_: Ground) -> Iterator[Verdict]:
    """The clock was two hours ahead when the first segment began: what is before an hour from now is deleted."""
    with _scratch() as root:
        disk = ClockDisk(1_795_170_000_000)
        for now_ms, count in ((disk.now_ms + 2 * 3_600_000, 5), (disk.now_ms, 60)):
            disk.now_ms = now_ms
            with MessageStore.open(root, SMALL, disk=disk) as store:
                for number in range(count):
                    store.put_message(Message("single", b"put/%d/" % number + b"." * 1000, queue_id=0))
        with MessageStore.open(root, SMALL, disk=disk) as store:
            gone = store.delete_expired_files(before_ms=disk.now_ms + 3_600_000).segments
            yield Verdict(lost=[f"{len(gone)} segments with messages that were stored later"] * bool(gone))


def of_the_next_segment(_: Any) -> Any:
    """What follows a segment is taken for later than what is in it."""
    return lambda files, start: int(files.commit_log.head(start + files.commit_log.segment_size)["store_timestamp_ms"])


def blanks_in_a_brokers_file(_: Ground) -> Iterator[Verdict]:
    """A broker's file says `fileReservedTime=1 `, which means 72 hours; the segments are two hours old."""
    with _scratch() as root:
        _filled(root)
        then_s = time.time() - 7200
        for path in (root / "commitlog").iterdir():
            os.utime(path, (then_s, then_s))
        conf = root.with_name("broker.conf")
        conf.write_text("brokerId=0\nfileReservedTime=1 \nmappedFileSizeCommitLog=16384\n")
        with mock.patch("messagestore.format.config._log"):
            given = StoreConfig.load(conf)
        with MessageStore.open(root, SMALL.replace(file_reserved_time=given.file_reserved_time)) as store:
            gone = store.delete_expired_files().segments
            yield Verdict(lost=[f"{len(gone)} segments, which a broker would have kept"] * bool(gone))


def puts_into_compacted_topics(_: Ground) -> Iterator[Verdict]:
    """A topic is compacted: consumers read other files, which only a broker writes."""
    with _scratch() as root, MessageStore.open(root, SMALL) as store:
        store.create_topic("latest", 1, attributes={"cleanup.policy": "COMPACTION"})
        with contextlib.suppress(ConfigError):
            store.put_message(Message("latest", b"put", queue_id=0, keys=["k"]))
        yield Verdict(lost=["a message in a compacted topic"] * store.max_offset("latest", 0))


def without_wheel(_: Any) -> Any:
    """What a broker has taken into its timer wheel counts as delivered."""
    return lambda _files, units: np.full(len(units), -1, np.int64)


MUTANTS = (
    Mutant("retention deletes the files of queues before the segments", patched(Retention, "_delete_segments", queues_first), "kills", kills("retention")),
    Mutant("retention does not sync the folder of the log between two deletions", no_sync("commitlog/", "fsync_dir"), "power cuts", power_cuts("retention")),
    Mutant("retention does not sync the folder of a queue between two deletions", no_sync("consumequeue/single/0/", "fsync_dir"), "power cuts", power_cuts("retention")),
    Mutant("retention deletes every file of a queue but the last", patched(ConsumeQueue, "count_below", all_but_the_last), "kills", kills("retention of a part"), case=393),
    Mutant("retention deletes every index file but the newest", patched(IndexService, "forget_below", newest_index_only), "kills", kills("retention of a part"), case=393),
    Mutant("retention restates no batch", without(retention, "restate_batches", []), "copies without spark/", copies_without_spark),
    Mutant("retention deletes the last file of a queue whose units are on the disk", patched(Retention, "_without_next_number", lambda _: lambda _self, _queue, gone: gone), "numbers of queues after a power cut", numbers_after_a_cut),
    Mutant("retention does not look at consumer groups", without(expired, "needed", []), "a group that has not read all", groups_that_read),
    Mutant("retention does not look at the retry topic of a group", patched(ConsumerOffsets, "topics_read", lambda _: lambda table, _exists: table.topics_of_groups()), "a message that was sent back", retries_that_wait),
    Mutant("retention does not look at open half messages", without(expired, "_needed_halves", []), "a half message that waits", half_messages_that_wait),
    Mutant("retention does not look at delayed messages", lambda: mock.patch.object(expired, "SCHEDULE_TOPIC", "none"), "a delayed message that waits", delayed_messages_that_wait),
    Mutant("retention does not look at timer messages", without(expired, "waiting_in", []), "timer messages that wait", timers_that_wait),
    Mutant("retention takes a timer wheel for deliveries", patched(expired, "_due_ms", without_wheel), "timer messages that wait", timers_that_wait),
    Mutant("retention takes a segment to end before the next one begins", patched(expired, "_last_time", of_the_next_segment), "store times that went back", times_that_went_back),
    Mutant("a number of a broker's file is read without its blanks", patched(config, "value_of", lambda _: lambda _kind, text: text.strip()), "blanks in a broker's file", blanks_in_a_brokers_file),
    Mutant("a compacted topic is written", without(Topics, "is_compacted", False), "puts into compacted topics", puts_into_compacted_topics),
)  # fmt: skip
