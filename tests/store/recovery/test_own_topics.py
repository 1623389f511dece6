"""The topics that nobody can delete: their queues come back from the log, whoever removed the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from messagestore import Message, MessageStore
from messagestore.format.half_records import HALF_TOPIC, OP_TOPIC
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.inspect.verify import verify
from small import SMALL, ClockDisk

OWN = (SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC)
NOW_MS = 1_795_170_401_381


def filled(root: Path, disk: ClockDisk) -> None:
    """Delayed messages that wait, a half message that is open and one that has ended; closed cleanly."""
    with MessageStore.open(root, SMALL, disk=disk) as store:
        for number in range(5):
            store.put_message(Message("t", b"%d" % number, queue_id=0, delay_time_level=1))
        store.half_message(Message("t", b"open", queue_id=0), "g")
        store.half_message(Message("t", b"done", queue_id=0), "g").commit()


@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
@pytest.mark.parametrize("topic", OWN)
def test_a_folder_that_is_gone_is_no_deleted_topic(tmp_path: Path, topic: str, journal: bool) -> None:
    """These topics are not in topics.json, so they counted as deleted: acknowledged messages were never delivered."""
    disk = ClockDisk(NOW_MS)
    filled(tmp_path, disk)
    with MessageStore.open_read_only(tmp_path, SMALL) as reader:
        ends = {name: reader.max_offset(name, 0) for name in OWN}
    shutil.rmtree(tmp_path / "consumequeue" / topic)
    if journal:
        assert not verify(tmp_path, SMALL).ok
    else:
        (tmp_path / "spark" / "journal").unlink()
    disk.now_ms += 10_000
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        assert store.report.rebuilt is not None, store.report.notes
        assert {name: store.max_offset(name, 0) for name in ends} == ends
        assert len(store.open_halves()) == 1
        assert store.deliver_delayed().count == 5
    assert verify(tmp_path, SMALL).ok
