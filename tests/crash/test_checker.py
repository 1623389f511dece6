"""Does the second checker see? Each kind of damage by name; and it agrees with `verify`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from crash import checker, flips
from crash.checker import Checked
from crash.flips import Sample
from crash.memdisk import MemDisk
from messagestore.inspect.verify import verify
from messagestore.log.batch_journal import BatchJournal

LOG = "commitlog/" + "0" * 20
QUEUE = "consumequeue/topic-app-1/0/" + "0" * 20


@pytest.fixture
def sample(samples: dict[str, Sample]) -> Sample:
    return samples["batches"]


def faults(sample: Sample, root: Path, change: Callable[[MemDisk], object]) -> Checked:
    disk = MemDisk(root, sample.content)
    change(disk)
    return checker.check(disk.tree())


def add(path: str, position: int, value: int = 1) -> Callable[[MemDisk], None]:
    def change(disk: MemDisk) -> None:
        disk.node(path)[position] = (disk.node(path)[position] + value) % 256

    return change


def journal(**changes: object) -> Callable[[MemDisk], None]:
    def change(disk: MemDisk) -> None:
        journal = BatchJournal.from_bytes(bytes(disk.node("spark/journal")))
        for name, value in changes.items():
            setattr(journal, name, value)
        disk.node("spark/journal")[:] = journal.to_bytes()

    return change


def without_entries(disk: MemDisk) -> None:
    journal = BatchJournal.from_bytes(bytes(disk.node("spark/journal")))
    journal.check(lambda app_id, entry: False)
    disk.node("spark/journal")[:] = journal.to_bytes()


def twice_in_the_queue(disk: MemDisk) -> None:
    data = disk.node(QUEUE)
    data[40:60] = data[20:40]


def a_unit_without_record(disk: MemDisk) -> None:
    disk.put_file("consumequeue/ghost/0/" + "0" * 20, struct.pack(">qiq", 0, 100, 0).ljust(80, b"\0"))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (add(LOG, 20), LOG),
        (add(LOG, 31), LOG),
        (add(LOG, 700), LOG),
        (add(LOG, 3000), LOG),
        (add(QUEUE, 7), "consumequeue/topic-app-1/0"),
        (add(QUEUE, 19), "consumequeue/topic-app-1/0"),
        (add(QUEUE, 79), "consumequeue/topic-app-1/0"),
        (twice_in_the_queue, "consumequeue/topic-app-1/0"),
        (a_unit_without_record, "consumequeue/ghost/0"),
        (lambda disk: disk.remove_tree("consumequeue/topic-app-1"), "consumequeue/topic-app-1/0"),
        (lambda disk: disk.put_file("foo", b""), "foo"),
        (lambda disk: disk.put_file("commitlog/foo", b""), "commitlog/foo"),
        (lambda disk: disk.put_file("spark/foo", b""), "spark/foo"),
        (add("spark/state", 100), "spark/state"),
        (add("checkpoint", 1), "checkpoint"),
        (add("checkpoint", 4000), "checkpoint"),
        (journal(covered=7), "spark/journal"),
        (without_entries, "spark/journal"),
        (journal(checkpoint_crc=0), "spark/journal"),
        (journal(queues={}), "spark/journal"),
        (journal(identity={"storeId": "another"}), "spark/journal"),
        (add("spark/journal", 70), "spark/journal"),
        (add("spark/store.json", 30), "spark/store.json"),
        (lambda disk: disk.put_file("abort", b"messagestore somebody\n"), "abort"),
    ],
)
def test_damage_is_named(change: Callable[[MemDisk], object], path: str, sample: Sample, root: Path) -> None:
    found = faults(sample, root, change)
    assert any(path in fault.path for fault in found.faults), found.faults


def test_each_bit_of_the_index_that_a_search_uses(sample: Sample, root: Path) -> None:
    path = next(path for path in MemDisk(root, sample.content).tree() if path.startswith("index/2"))
    entries = 40 + 4 * sample.config.max_hash_slot_num
    for position in (7, 15, 23, 31, 39, *range(entries + 40, entries + 60)):
        assert faults(sample, root, add(path, position)).faults, position


def test_it_agrees_with_verify(samples: dict[str, Sample], root: Path) -> None:
    """Good stores are good to both; of damage that one names, the other one names all that matters to messages."""
    for sample in samples.values():
        disk = MemDisk(root, sample.content)
        assert verify(root, disk=disk).ok
        assert checker.check(disk.tree(), settled=sample.closed).faults == []
    cases = [
        case for case in flips.flips(samples) if case[2].closed and case[4].startswith(("commitlog/", "consumequeue/"))
    ]
    missed = []
    for _, key, sample, damage, _, _ in cases[:: len(cases) // 150]:
        disk = MemDisk(root, sample.content)
        damage(disk)
        if bool(checker.check(disk.tree(), settled=sample.closed).faults) != (not verify(root, disk=disk).ok):
            missed.append(key)
    assert missed == []


def test_a_digest_is_made_again_from_the_rows(sample: Sample, root: Path) -> None:
    """The guard of the digest's check: it is not true of other rows."""
    found = checker.check(MemDisk(root, sample.content).tree())
    _, body, rows = found.batches[0]
    assert checker.digest_holds(body["digestName"], body["digest"], rows)
    assert not checker.digest_holds(body["digestName"], body["digest"], rows[:1])
