"""Logs that a broker left and that recovery must keep whole, although parts of them look torn or stale."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from crash.imitate import Broker, file_bytes, overwrite, seen, walk
from crash.strangers import tree_of
from messagestore import CorruptionError, Message, MessageStore, NotAStoreError
from messagestore.inspect.verify import verify
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
    for number in range(400):  # several segments, and several reads
        broker.put("t", b"%d/" % number, number % 2, sys_flag=(0, PREPARED, ROLLBACK, COMMIT)[number % 4])


FILLS: dict[str, Fill] = {f.__name__: f for f in (long_topics, made_again_twice, transactions)}
MISSING = {"nothing": (), "queues": ("consumequeue",), "index": ("index",), "both": ("consumequeue", "index")}


def left_by_a_broker(root: Path, fill: Fill, *, closes: bool, missing: tuple[str, ...] = ()) -> list[dict]:
    """Create a store that a broker filled; return its records."""
    broker = Broker(root, SMALL)
    fill(broker)
    if closes:
        broker.close()
    for name in missing:
        shutil.rmtree(root / name, ignore_errors=True)
    return walk(root)[0]


def last_runs(records: list[dict]) -> dict[tuple[str, int], list[str]]:
    """Return what each queue holds: the records since its numbers last started."""
    found: dict[tuple[str, int], list[str]] = {}
    for record in records:
        if record["sys_flag"] & 0xC in (0, COMMIT):
            key = (record["topic"], record["queue_id"])
            if not record["queue_offset"]:
                found[key] = []
            found[key].append(record["body"].decode())
    return found


def faults_of(root: Path, records: list[dict]) -> Iterator[str]:
    """Report what is wrong after a writer has taken over such a store."""
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


# ---- what a crash leaves at the end of a broker's log


def torn_in_a_name(folder: Path) -> None:
    """A power cut removed the end of the topic's name from the last record, whose lengths therefore add up.

    The record is cut at each byte of the name, and the store opens; where anything follows, nothing is cut.
    """
    name = "topic-name"
    for kept in range(len(name)):
        root = folder / f"torn-{kept}"
        root.mkdir(parents=True)
        broker = Broker(root, SMALL)
        for number in range(3):
            broker.put("whole", b"%d/" % number)

        at = broker.put(name, b"torn", unit=False)
        overwrite(root, broker.end - 2 - len(name) + kept, bytes(len(name) - kept + 2))
        before = file_bytes(root, 0, broker.end)
        behind = folder / f"behind-{kept}"
        shutil.copytree(root, behind)

        with MessageStore.open(root, SMALL) as store:
            report = store.report
            assert report is not None
            assert (report.end, report.cut_messages) == (at, 1), report
            assert report.saved is not None
            kept_bytes = Path(report.saved).read_bytes().rstrip(b"\0")
            assert kept_bytes == before[at:].rstrip(b"\0"), "what was cut is not kept"

            assert store.put_message(Message("whole", b"next", queue_id=0)).queue_offset == 3
        assert verify(root, SMALL).ok

        Broker(behind, SMALL, end=broker.end).put("whole", b"behind", unit=False)
        damaged = file_bytes(behind, 0, broker.end + 200)
        for closed in (False, True):
            if closed:
                (behind / "abort").unlink()

            try:
                MessageStore.open(behind, SMALL).close()
            except CorruptionError as error:
                assert error.physical_offset == at, error
            else:
                raise AssertionError("a record in the middle of a log was cut")
            assert file_bytes(behind, 0, broker.end + 200) == damaged


def light_queues_behind(folder: Path) -> None:
    """A broker was killed before it dispatched, so no light queue has a folder. The store is refused."""
    light = [("INNER_MULTI_DISPATCH", "%LMQ%a"), ("INNER_MULTI_QUEUE_OFFSET", "0")]
    for late in (False, True):
        root = folder / f"light-{late}"
        root.mkdir(parents=True)
        broker = Broker(root, SMALL)
        for _ in range(30 if late else 1):
            broker.now_ms += 10_000
            broker.put("plain", b"." * 1000)
        if late:  # its own recovery would begin in a later segment
            broker.checkpoint()
        broker.put("plain", b"light", unit=False, properties=light)
        before = tree_of(root)
        try:
            MessageStore.open(root, SMALL).close()
        except NotAStoreError as error:
            assert "light queue" in str(error), error
        else:
            raise AssertionError("a writer opened a store with light queues")
        assert tree_of(root) == before, "a writer that was refused changed the store"


CASES: dict[str, Callable[[Path], None]] = {
    "a broker's record torn inside its topic's name": torn_in_a_name,
    "light queues that a broker had not made when it was killed": light_queues_behind,
}
