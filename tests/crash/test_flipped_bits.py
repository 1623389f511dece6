"""Bits rot in what was acknowledged: it is reported as damage, and nothing behind it is cut or numbered again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from crash.harness import APP, no_thread_warnings, tree_hash
from crash.imitate import (
    Broker,
    flip,
    put,
    units,
    walk,
)
from messagestore import (
    CorruptionError,
    MessageColumns,
    MessageIllegalError,
    MessageStore,
)
from messagestore.format.message import BATCH_TOPIC
from sequences import CONFIG, SIZES, Start, filled, recovered, reopened

pytestmark = no_thread_warnings


def test_a_flipped_bit_in_an_acknowledged_put_is_damage(root: Path, process: Start) -> None:
    """A session with SYNC puts is killed, and one bit flips in an earlier put. The acknowledged puts behind it are not
    cut away.
    """
    store = process(root).session()
    places = [put(store, f"put/{n}/").physical_offset for n in range(100)]
    store._attached._drop()
    flip(root, places[90] + 90)
    before = tree_hash(root)
    with pytest.raises(CorruptionError) as error:
        reopened(root)
    assert error.value.physical_offset == places[90]
    assert tree_hash(root) == before


def test_a_flipped_bit_in_the_newest_batch_is_damage(root: Path, process: Start) -> None:
    """Its own BATCH record proves that its data were synced."""
    p = process(root)
    p.batch(version=0)
    batch = p.batch(version=1)
    p.die()
    flip(root, batch.end - 20)
    before = tree_hash(root)
    with pytest.raises(CorruptionError):
        reopened(root)
    assert tree_hash(root) == before


def flip_in_batch_record(root: Path, copy: Path, position: int) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root, copy)
    place = units(copy, BATCH_TOPIC, 0)[-1][0]
    flip(copy, place + position)
    before = tree_hash(copy)
    with pytest.raises(CorruptionError):
        reopened(copy)
    assert tree_hash(copy) == before, f"byte {position}"


@pytest.mark.parametrize("which", ["some", pytest.param("every", marks=pytest.mark.slow)])
def test_a_flipped_bit_anywhere_in_a_batch_record_is_damage(
    root: Path, scratch: Path, process: Start, which: str
) -> None:
    """A bit flips in the header, the topic, the keys or the body of a BATCH record. The batch is not taken for an
    unfinished one.
    """
    p = process(root)
    p.batch(version=0)
    p.batch(version=1)
    p.die()
    size = units(root, BATCH_TOPIC, 0)[-1][1]
    assert size > 300
    some = [0, 3, 4, 8, 12, 20, 28, 36, 40, 48, 56, 64, 72, 76, 84, 87, 88, 100, 300, size - 60, size - 20, size - 2]
    for position in some if which == "some" else range(size):
        flip_in_batch_record(root, scratch / "copy", position)


def test_users_cannot_put_to_the_batch_topic(root: Path) -> None:
    """Only the store itself writes records of that topic."""
    with reopened(root) as store:
        with pytest.raises(MessageIllegalError):
            put(store, "x", topic=BATCH_TOPIC)
        table = pa.record_batch({"body": pa.array([b"x"]), "topic": pa.array([BATCH_TOPIC])})
        with pytest.raises(MessageIllegalError):
            store.append_batch(MessageColumns.from_arrow(table, queue_id=0))


@pytest.mark.parametrize("where", ["in the middle", "last of its queue", "last of all"])
def test_rot_in_what_a_broker_closed_is_reported_and_not_cut(root: Path, process: Start, where: str) -> None:
    """The message is there, reading it is an error, and its queue offset is not used again."""
    filled(root, process)
    broker = Broker(root, CONFIG)
    places = [broker.put("java", f"j{n}".encode()) for n in range(5)]
    if where == "last of its queue":
        broker.put("else", b"e0")
    broker.close()
    row = 2 if where == "in the middle" else 4
    flip(root, places[row] + 89)
    before = units(root, "java", 0)
    with reopened(root) as store:
        assert store.max_offset("java", 0) == 5
        with pytest.raises(CorruptionError):
            store.get_message("java", 0, row, 1)
        assert put(store, "put/2/", topic="java").queue_offset == 5
    assert units(root, "java", 0)[:5] == before


@pytest.mark.parametrize("rows", [4, 7])
def test_rot_in_what_we_closed_is_reported_and_not_cut(root: Path, process: Start, rows: int) -> None:
    """A writer that goes on must not give the rotten message's queue offset to another message."""
    p = process(root)
    p.batch(version=0, rows=rows)
    p.detach()
    place = units(root, f"topic-{APP}", 0)[-1][0]
    flip(root, place + 90)
    before = units(root, f"topic-{APP}", 0)
    with MessageStore.open_read_only(root, CONFIG) as reader:
        assert reader.max_offset(f"topic-{APP}", 0) == len(before)
        with pytest.raises(CorruptionError):
            reader.get_message(f"topic-{APP}", 0, len(before) - 1, 1)
    q = process(root)
    q.batch(version=1, rows=rows)
    assert units(root, f"topic-{APP}", 0)[: len(before)] == before


@pytest.mark.parametrize("position", [0, 4, 28])
def test_a_head_that_rots_after_a_clean_close_is_not_taken_for_the_end_of_the_log(
    root: Path, process: Start, position: int
) -> None:
    """TOTALSIZE, the magic or the place of the last record rot: the store is refused and nothing is cut."""
    filled(root, process)
    last = walk(root)[0][-1]
    flip(root, last["physical_offset"] + position + 3)
    before = tree_hash(root)
    for _ in range(2):
        with pytest.raises(CorruptionError) as error:
            reopened(root)
        assert error.value.physical_offset == last["physical_offset"]
        assert tree_hash(root) == before


def test_a_missing_segment_in_a_sync_batch_is_damage(root: Path, process: Start) -> None:
    """The store is refused and nothing is cut."""
    p = process(root, **SIZES)
    p.batch(version=0, rows=20)
    p.batch(version=1, rows=250)
    p.die()
    paths = sorted((root / "commitlog").iterdir())
    assert len(paths) > 3
    paths[-1].unlink()
    before = tree_hash(root)
    with pytest.raises(CorruptionError):
        recovered(root)
    assert tree_hash(root) == before
