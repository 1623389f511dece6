"""Mutants of recovery: it cuts what is whole, assigns the wrong units, or lets contents decide."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from crash import broker_logs
from crash.harness import die
from crash.imitate import Broker, overwrite, units
from crash.judge import Verdict
from crash.planting import Ground, Mutant, Search, kills, patched, power_cuts, without
from crash.simdisk import KillDisk, Killed
from messagestore import Message, MessageStore, StoreError, StorePoisonedError
from messagestore.format import batch_record, record, record_scan
from messagestore.format.message import BATCH_TOPIC, topic_fault
from messagestore.format.record_scan import leading
from messagestore.log import walk
from messagestore.log.dispatch import QueueRuns
from messagestore.recovery import examine, log_tail, survey
from messagestore.recovery.decide import Derived
from messagestore.recovery.survey import Surveyor
from small import SMALL


def logs_of_a_broker(*fills: str) -> Search:
    """Recover a broker's logs, closed and killed, whose derived files are missing."""

    def search(ground: Ground) -> Iterator[Verdict]:
        for fill in fills:
            for closes in (True, False):
                for missing in broker_logs.MISSING.values():
                    root, verdict = Path(tempfile.mkdtemp(dir=ground.folder)), Verdict()
                    records = broker_logs.left_by_a_broker(
                        root, broker_logs.FILLS[fill], closes=closes, missing=missing
                    )
                    try:
                        verdict.lost += broker_logs.faults_of(root, records)
                    except (StoreError, ValueError, AssertionError) as error:
                        verdict.misread.append(f"{type(error).__name__}: {error}")
                    yield verdict

    return search


def killed_rebuilds(ground: Ground) -> Iterator[Verdict]:
    """All queues that a killed broker left are rebuilt, and the process dies at each operation.

    The store checkpoint lets recovery start late in the log, where nothing shows that the queues below are not whole.
    """

    def fill(broker: Broker) -> None:
        for number in range(60):
            broker.now_ms += 10_000
            broker.put(f"t{number // 20}", b"%d/" % number + b"x" * 700, number % 2)

    whole = Path(tempfile.mkdtemp(dir=ground.folder))
    records = broker_logs.left_by_a_broker(whole, fill, closes=False, missing=("consumequeue",))
    Broker(whole, SMALL).checkpoint(records[-1]["store_timestamp_ms"] - 5000)
    for at in range(0, 200, 3):
        root, verdict = Path(tempfile.mkdtemp(dir=ground.folder)) / "store", Verdict()
        shutil.copytree(whole, root)
        try:
            MessageStore.open(root, SMALL, disk=KillDisk(at))
        except (Killed, StorePoisonedError):
            pass
        die(root)
        try:
            verdict.lost += broker_logs.faults_of(root, records)
        except (StoreError, ValueError) as error:
            verdict.misread.append(f"{type(error).__name__}: {error}")
        shutil.rmtree(root)
        yield verdict


def half_messages(ground: Ground) -> Iterator[Verdict]:
    """Put PREPARED and ROLLBACK live: the queue must be the same after a rebuild."""
    root, verdict = Path(tempfile.mkdtemp(dir=ground.folder)) / "store", Verdict()
    store = MessageStore.open(root, SMALL)
    for number, flag in enumerate((0, 0x4, 0x8, 0xC, 0)):
        store.put_message(Message("t", b"%d/" % number, queue_id=0, sys_flag=flag))
    store.writer.publish()
    die(root)
    live = units(root, "t", 0)
    shutil.rmtree(root / "consumequeue")
    with MessageStore.open(root, SMALL):
        pass
    if units(root, "t", 0) != live or len(live) != 3:
        verdict.misread.append(f"live {live}, made again {units(root, 't', 0)}")
    yield verdict


def torn_forgery(ground: Ground) -> Iterator[Verdict]:
    """Tear a put that has a whole BATCH record in its body."""
    root, verdict = Path(tempfile.mkdtemp(dir=ground.folder)) / "store", Verdict()
    store = MessageStore.open(root, SMALL)
    files, end = store.writer.files, store.writer.end.physical_offset

    batch = batch_record.BatchRecord(
        "app", 0, "spark", None, files.store_id, end + 88, 0, 0, "SYNC_FLUSH", 0, {}, (), 0
    )
    size = len(batch_record.encode(batch, 400, files.config, files.store_host, 1 << 42))
    batch = batch_record.replace(batch, end=end + 88 + size)
    forged = bytes(batch_record.encode(batch, 400, files.config, files.store_host, 1 << 42))

    put = store.put_message(Message("t", forged + b"." * 999, queue_id=0))
    die(root)
    shutil.rmtree(root / "consumequeue")
    overwrite(root, end + put.size - 600, bytes(600))

    try:
        with MessageStore.open(root, SMALL):
            pass
    except StoreError as error:
        verdict.misread.append(f"{type(error).__name__}: {error}")
    yield verdict


def numbers_decide(whole: Any) -> Any:
    """A record counts only if it has the next number of its queue."""

    def until_a_number_does_not_follow(surveyor: Surveyor, run: Any, rows: Any) -> int:
        count = int(whole(surveyor, run, rows))
        following: dict[tuple[str, int], int] = surveyor.__dict__.setdefault("following", {})
        for topic, queue_id, start, stop in rows.runs():
            for row in range(start, min(stop, count)):
                number = int(rows.queue_offsets[row])
                if following.get((topic, queue_id), number) != number:
                    return row
                following[(topic, queue_id)] = number + 1
        return count

    return until_a_number_does_not_follow


def zeros_are_torn(whole: Any) -> Any:
    """A sector of zeros in the properties counts as a lost one."""

    def until_a_sector_of_zeros(surveyor: Surveyor, run: Any, rows: Any) -> int:
        count = int(whole(surveyor, run, rows))
        _, where = record_scan.parts(run.data, run.starts, run.heads)
        bad = [
            bytes(512) in run.data[start:end].tobytes()
            for start, end in zip(where.property_starts.tolist(), where.ends.tolist(), strict=True)
        ]
        return min(count, leading(~np.array(bad, np.bool_)))

    return until_a_sector_of_zeros


def by_its_looks(_: Any) -> Any:
    """A record counts as a BATCH record if the topic's name is near its end."""

    def looks_like_one(log: Any, physical_offset: int) -> bool:
        data = log.read(physical_offset, 8192)
        return batch_record.BODY_BEGIN in data[:130] or BATCH_TOPIC.encode() in data

    return looks_like_one


def from_the_end_on(_: Any) -> Any:
    """The search for proofs begins within the record that was torn."""

    def search(files: Any, end: Any) -> Any:
        for at, _ in log_tail.heads_behind(files.commit_log, end.physical_offset):
            batch = log_tail._proof(files, at, end)
            if batch is not None:
                return batch
        return None

    return search


_BROKER = "fills of a broker's log"
MUTANTS = (
    Mutant(
        "a queue offset that does not follow ends the log",
        patched(Surveyor, "_whole", numbers_decide),
        _BROKER,
        logs_of_a_broker("made_again_twice", "transactions"),
    ),
    Mutant(
        "a sector of zeros in properties counts as torn",
        patched(Surveyor, "_whole", zeros_are_torn),
        "kills",
        kills("hostile puts", "hostile puts, async"),
    ),
    Mutant(
        "topics of more than 127 bytes are refused",
        patched(survey, "stored_topic_fault", lambda _: topic_fault),
        _BROKER,
        logs_of_a_broker("long_topics"),
    ),
    Mutant(
        "PREPARED and ROLLBACK get a unit when queues are made again",
        patched(walk, "_without_unit", lambda _: lambda run: np.zeros(len(run.starts), np.bool_)),
        _BROKER,
        logs_of_a_broker("transactions"),
    ),
    Mutant(
        "PREPARED and ROLLBACK take a queue offset live",
        without(record, "is_half", result=False),
        "half messages, live and rebuilt",
        half_messages,
    ),
    Mutant(
        "the later run of a topic does not win",
        without(QueueRuns, "_older", result=True),
        _BROKER,
        logs_of_a_broker("made_again_twice"),
    ),
    Mutant(
        "a torn put that looks like a BATCH record counts as one",
        patched(survey, "is_sealed_batch", by_its_looks),
        "kills and power cuts",
        lambda ground: (v for name in ("hostile puts",) for s in (kills, power_cuts) for v in s(name)(ground)),
    ),
    Mutant(
        "a BATCH record within a torn put proves that bytes were lost",
        patched(examine, "later_sync_batch", from_the_end_on),
        "a torn forgery",
        torn_forgery,
    ),
    Mutant(
        "a rebuild of all queues that was killed is believed",
        without(examine, "rebuild_begun", result=Derived.NOTHING),
        "killed rebuilds",
        killed_rebuilds,
    ),
)
