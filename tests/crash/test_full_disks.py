"""A disk without room, and then with room again: what is acknowledged is there once, and a full disk is told as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import full_disks
from crash.harness import SMALL, die, scratch_folder
from crash.simdisk import FailDisk
from crash.workloads import Bases
from messagestore import Message, MessageStore, StoreFullError, StorePoisonedError

MOVING = full_disks.MOVING


class NoRoom(FailDisk):
    """Writes of files whose path has a certain part fail while `full`."""

    part, full = "", False

    def pwrite(self, file, data, position):  # type: ignore[no-untyped-def] # as the disk's
        if self.full and self.part in file.path:
            raise self._translated(OSError(28, "No space left on device"), file.path, len(data))
        super().pwrite(file, data, position)


@pytest.mark.parametrize("story", full_disks.STORIES)
def test_a_caller_who_tries_again_doubles_nothing(story: str) -> None:
    count = 0
    with scratch_folder() as folder:
        base = Bases(folder / "store")["filled"]
        for name, key, steps, at, errors, number in full_disks.cases(base, folder / "store", True):
            if name == story:
                hit, verdict = full_disks.check(base, folder / "store", steps, at, errors, number)
                assert verdict.ok, f"{key}: {verdict}"
                count += hit
    assert count > 40


@pytest.mark.parametrize("part", ["spark/state", "checkpoint", "spark/new-journal"])
def test_a_put_is_acknowledged_when_there_is_no_room_for_the_clean_end(tmp_path: Path, part: str) -> None:
    disk = NoRoom()
    disk.part = part
    with MessageStore.open(tmp_path / "s", MOVING, disk=disk) as store:
        store.put_message(Message("t", b"0", queue_id=0))
        disk.full = True
        assert store.put_message(Message("t", b"1", queue_id=0)).is_ok
        disk.full = False
        assert store.put_message(Message("t", b"2", queue_id=0)).queue_offset == 2
        assert [m.body for m in store.get_message("t", 0, 0).messages] == [b"0", b"1", b"2"]


def test_a_put_whose_unit_has_no_room_is_visible_later(tmp_path: Path) -> None:
    disk = NoRoom()
    disk.part = "consumequeue"
    with MessageStore.open(tmp_path / "s", MOVING, disk=disk) as store:
        store.put_message(Message("t", b"0", queue_id=0))
        disk.full = True
        assert store.put_message(Message("t", b"1", queue_id=0)).is_ok  # it is synced
        for _ in range(2):
            with pytest.raises(StoreFullError, match=r"earlier puts are in the log.*put now is not in the log"):
                store.put_message(Message("t", b"2", queue_id=0))
        with pytest.raises(StoreFullError, match="1 puts"):
            store.flush()
        disk.full = False
        assert store.put_message(Message("t", b"2", queue_id=0)).queue_offset == 2
        assert [m.body for m in store.get_message("t", 0, 0).messages] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("part", ["consumequeue", "spark/new-journal"])
def test_a_close_on_a_full_disk_says_so_and_loses_nothing(tmp_path: Path, part: str) -> None:
    disk = NoRoom()
    disk.part = part
    store = MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    store.put_message(Message("t", b"0", queue_id=0))
    disk.full = True
    assert store.put_message(Message("t", b"1", queue_id=0)).is_ok
    with pytest.raises(StoreFullError, match="Make room"):
        store.close()
    with pytest.raises(StoreFullError, match="room"):
        MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    disk.full = False
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        assert [m.body for m in store.get_message("t", 0, 0).messages] == [b"0", b"1"]


def test_a_put_whose_sync_failed_says_where_its_record_is(tmp_path: Path) -> None:
    disk = FailDisk()
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL, disk=disk)
    store.put_message(Message("t", b"0", queue_id=0))
    disk.fail_at = len(disk.operations) + 1  # the sync behind the write
    with pytest.raises(StorePoisonedError, match="appended at physical offset") as caught:
        store.put_message(Message("t", b"1", queue_id=0))
    at = caught.value.physical_offset
    assert at is not None
    die(root)
    with MessageStore.open(root, SMALL) as store:
        found = store.look_message_by_offset(at)
        assert found is not None
        assert found.body == b"1"
