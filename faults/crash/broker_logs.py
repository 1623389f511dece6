"""Logs of a broker that recovery must keep whole: what a crash checker takes for torn or stale, and is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from crash.imitate import Broker, seen, walk
from messagestore import MessageStore
from messagestore.verify.verify import verify
from small import SMALL

PREPARED, COMMIT, ROLLBACK = 0x4, 0x8, 0xC
LONG = "L" * 200
Fill = Callable[[Broker], None]


def long_topics(broker: Broker) -> None:
    for number in range(9):
        broker.put((LONG, "t", "%RETRY%group+t")[number % 3], b"%d/" % number)


def made_again_twice(broker: Broker) -> None:
    for run in range(3):
        for number in range(5):
            broker.put("d", b"%d-%d/" % (run, number))
        for number in range(4):
            broker.put("other", b"o%d-%d/" % (run, number))
        if run < 2:
            broker.delete_topic("d")


def transactions(broker: Broker) -> None:
    for number in range(400):  # several segments, and several looks
        broker.put("t", b"%d/" % number, number % 2, sys_flag=(0, PREPARED, ROLLBACK, COMMIT)[number % 4])


FILLS: dict[str, Fill] = {f.__name__: f for f in (long_topics, made_again_twice, transactions)}
MISSING = {"nothing": (), "queues": ("consumequeue",), "index": ("index",), "both": ("consumequeue", "index")}


def left_by_a_broker(root: Path, fill: Fill, *, closes: bool, missing: tuple[str, ...] = ()) -> list[dict]:
    """A store that a broker filled; its records."""
    broker = Broker(root, SMALL)
    fill(broker)
    if closes:
        broker.close()
    for name in missing:
        shutil.rmtree(root / name, ignore_errors=True)
    return walk(root)[0]


def last_runs(records: list[dict]) -> dict[tuple[str, int], list[str]]:
    """What the queues hold: of each, the records since its numbers began last."""
    found: dict[tuple[str, int], list[str]] = {}
    for record in records:
        if record["sys_flag"] & 0xC in (0, COMMIT):
            key = (record["topic"], record["queue_id"])
            if not record["queue_offset"]:
                found[key] = []
            found[key].append(record["body"].decode())
    return found


def faults_of(root: Path, records: list[dict]) -> Iterator[str]:
    """What is wrong after a writer has taken such a store over."""
    with MessageStore.open(root, SMALL) as store:
        report = store.report
        assert report is not None
        if report.cut is not None:
            yield f"cut: {report.cut}"
    if walk(root)[0] != records:
        yield f"{len(records)} records before, {len(walk(root)[0])} after"
    wanted, found = last_runs(records), seen(root, SMALL)
    if found != wanted:
        yield f"queues: wanted {wanted}, found {found}"
    checked = verify(root, SMALL)
    if not checked.ok:
        yield f"verify: {checked.findings[:2]}"
