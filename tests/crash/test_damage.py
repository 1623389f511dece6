"""Damaged bytes are named, or put right; never is a log shorter in silence. `make crash` flips every bit; here is what was
found on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from crash import flips
from crash.flips import Sample, alias
from crash.harness import SMALL, die
from crash.memdisk import MemDisk
from messagestore import CorruptionError, Message, MessageStore
from messagestore.inspect.verify import verify


def damaged(sample: Sample, root: Path, damage: Callable[[MemDisk], None]) -> MemDisk:
    disk = MemDisk(root, sample.content)
    damage(disk)
    return disk


def read_all(root: Path, sample: Sample, disk: MemDisk) -> None:
    with MessageStore.open_read_only(root, sample.config, disk=disk) as reader:
        for topic, queue_ids in reader.topics().items():
            for queue_id in queue_ids:
                list(reader.read(topic, queue_id, 0))


@pytest.mark.parametrize("damage", ["missing", "length 0", "pages", "zeros 0", "copied"])
def test_a_closed_store_with_a_damaged_segment_does_not_look_shorter(
    damage: str, samples: dict[str, Sample], root: Path
) -> None:
    """A reader took units that point to damage for a broker's leftovers, and ended the queue before them."""
    sample = samples["large"]
    change = next(
        change
        for _, key, of, change, path, _ in flips.damages(samples)
        if of is sample and key == f"large:{path}:{damage}" and path == "commitlog/00000000000000016384"
    )
    with pytest.raises(CorruptionError):
        read_all(root, sample, damaged(sample, root, change))


def test_a_lost_queue_file_does_not_take_a_committed_batch_with_it(samples: dict[str, Sample], root: Path) -> None:
    """The file of a queue's newest units is gone when a writer comes after a kill: the records behind the clean end passed
    for a stale tail, and were cut. The queue is made again from the log.
    """
    sample = samples["large, killed"]
    disk = damaged(sample, root, lambda disk: disk.remove_tree("consumequeue/topic-app-1/1/00000000000000000640"))
    with MessageStore.open(root, sample.config, disk=disk) as store:
        found = [body for table in store.read("topic-app-1", 1, 0) for body in table.column("body").to_pylist()]
    assert found == sample.queues[("topic-app-1", 1)]
    assert verify(root, disk=disk).ok


@pytest.mark.parametrize("folder", ["consumequeue", "index"])
def test_a_folder_that_is_gone_from_a_closed_store_is_made_again(
    folder: str, samples: dict[str, Sample], root: Path
) -> None:
    """A writer that came next numbered messages from 0, where others were."""
    sample = samples["large"]
    disk = damaged(sample, root, lambda disk: disk.remove_tree(folder))
    with MessageStore.open(root, sample.config, disk=disk) as store:
        put = store.put_message(Message("topic-app-1", b"next", queue_id=0, keys=["next"]))
        assert put.queue_offset == len(sample.queues[("topic-app-1", 0)])
        assert [message.body for message in store.query_message("topic-app-1", "k1-59")] != []
    assert verify(root, disk=disk).ok


def test_a_store_without_keys_has_no_index_and_opens_at_once(root: Path) -> None:
    """No index file is no sign of damage when no message has a key."""
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None
        assert store.report.reason == "clean"


def test_an_empty_queue_file_after_a_kill_is_no_error(samples: dict[str, Sample], root: Path) -> None:
    """A queue file of no bytes (a broker makes such, and dies) was taken for another writer's."""
    sample = samples["killed"]
    disk = damaged(sample, root, lambda disk: disk.node("consumequeue/rmq_sys_spark_sink/0/" + "0" * 20).clear())
    with MessageStore.open(root, sample.config, disk=disk):
        pass
    assert verify(root, disk=disk).ok


@pytest.mark.parametrize(
    ("position", "what"),
    [(1, "begin time"), (13, "end time"), (20, "first record"), (28, "last record"), (40 + 32 + 40 + 13, "seconds")],
)
def test_verify_names_wrong_times_in_an_index_file(
    position: int, what: str, samples: dict[str, Sample], root: Path
) -> None:
    """A search within a time would pass over the keys."""
    sample = samples["batches"]
    path = next(path for path in MemDisk(root, sample.content).tree() if alias(path) == "index/first")
    report = verify(root, disk=damaged(sample, root, flips.flip(path, position, 6)))
    assert any(path in finding.path for finding in report.findings), what


def test_verify_names_a_crc_property_whose_name_is_damaged(samples: dict[str, Sample], root: Path) -> None:
    """One bit in the name of `__CRC32#` switched the check off."""
    sample = samples["puts"]
    log = MemDisk(root, sample.content).node("commitlog/" + "0" * 20)
    at = log.find(b"__CRC32#")
    report = verify(root, disk=damaged(sample, root, flips.flip("commitlog/" + "0" * 20, at + 3, 4)))
    assert [finding.offset for finding in report.findings] == [0]


def test_a_reader_follows_from_a_closed_store_to_a_broker(root: Path) -> None:
    """What is known of a store that was closed does not hold any more when a broker has written."""
    from crash.imitate import Broker

    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"one", queue_id=0))
    with MessageStore.open_read_only(root, SMALL) as reader:
        assert reader.max_offset("t", 0) == 1
        broker = Broker(root)
        broker.put("t", b"two")
        assert reader.max_offset("t", 0) == 2
        broker.put("t", b"three")
        broker.close()
        assert reader.max_offset("t", 0) == 3
    die(root)


def test_half_of_a_header_in_an_index_file_is_written_again(samples: dict[str, Sample], root: Path) -> None:
    """The disk was full in the middle of a header: the end time was new, the counts were old, and stayed so; the store
    checkpoint then said more than the log held.
    """
    sample = samples["killed"]
    path = next(path for path in MemDisk(root, sample.content).tree() if alias(path) == "index/first")
    disk = damaged(sample, root, flips.flip(path, 14, 0))
    with MessageStore.open(root, sample.config, disk=disk):
        pass
    assert flips.checker.check(disk.tree()).faults == []


def test_infinity_in_a_small_file_is_damage(samples: dict[str, Sample], root: Path) -> None:
    """JSON knows numbers that are no integers, and lists in lists without end."""
    sample = samples["batches"]
    deep = b"[" * 100_000
    for data in (b'{"formatVersion":1,"storeId":"x","mappedFileSizeCommitLog":1e999}', deep):
        disk = damaged(sample, root, lambda disk, data=data: disk.put_file("spark/store.json", data))  # type: ignore[misc]
        with pytest.raises(CorruptionError):
            MessageStore.open(root, sample.config, disk=disk)
        die(root)


def test_verify_goes_on_when_a_queue_offset_is_damaged(samples: dict[str, Sample], root: Path) -> None:
    """A flipped sign in QUEUEOFFSET ended `verify` with an IndexError."""
    sample = samples["batches"]
    log = "commitlog/" + "0" * 20
    at = next(
        r.physical_offset for r in flips.checker.check(MemDisk(root, sample.content).tree()).records if r.size < 300
    )
    assert not verify(root, disk=damaged(sample, root, flips.flip(log, at + 20, 7))).ok
