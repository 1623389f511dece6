"""A file system that can make only so many more files (inodes): a batch is refused before it is in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import sessions
from messagestore import BatchRequest, Message, MessageStore, StoreFullError, StorePoisonedError
from messagestore.inspect.verify import verify
from small import SMALL, bodies, columns, filled


@pytest.mark.parametrize("queues", [1, 5, 40])
def test_a_batch_that_runs_out_of_inodes_can_be_sent_again(tmp_path: Path, queues: int) -> None:
    """With any number of names left, the batch is appended or refused; the store is never poisoned."""
    root, disk = filled(tmp_path / "s"), sessions.FewNames()
    rows, refused, version = columns(bodies(3 * queues + 30), queues=queues, topic="many"), 0, 0
    with MessageStore.open(root, SMALL, disk=disk) as store:
        store.create_topic("many", 64)
        for left in range(12 + 3 * queues):
            disk.left = left
            try:
                store.append_batch(rows, BatchRequest("app", version))
                version += 1
            except StoreFullError as error:
                refused += 1
                assert "new files and folders" in str(error) and "Nothing of it was written" in str(error)
        disk.left = 1 << 20
        assert store.append_batch(rows, BatchRequest("app", version)).status == "appended"
        assert store.append_batch(rows, BatchRequest("app", version)).status == "known"
    assert refused > 5
    report = verify(root)
    assert report.ok, report.findings[:3]
    assert report.batch_count == version + 1


@pytest.mark.parametrize("left", [0, 1, 3])
def test_names_that_others_take_while_a_batch_is_published_do_not_lose_it(tmp_path: Path, left: int) -> None:
    """The batch was checked, and is in the log: the error says to open the store again, which finishes the batch."""

    class Taken(sessions.FewNames):
        """Others take all names but `left` right after a batch has asked how many there are."""

        def free_names(self, path: str | Path) -> int | None:
            possible = super().free_names(path)
            if self.left is not None:
                self.left = left
            return possible

    root, disk = filled(tmp_path / "s"), Taken()
    rows = columns(bodies(10), queues=5, topic="many")
    with MessageStore.open(root, SMALL, disk=disk) as store:
        store.create_topic("many", 8)
        store.put_message(Message("one", b"the session has the files of its own", queue_id=0))
        disk.left = 1000
        with pytest.raises(StorePoisonedError, match=r"could not be published.*close the store and open it again"):
            store.append_batch(rows, BatchRequest("app", 0))
        disk.left = None
    with MessageStore.open(root, SMALL) as store:
        assert store.append_batch(rows, BatchRequest("app", 0)).status == "known"
        assert sum(store.max_offset("many", queue_id) for queue_id in range(8)) == 10
    assert verify(root).ok


def test_a_file_system_without_a_limit_is_asked_once(tmp_path: Path) -> None:
    """Btrfs says 0 of 0."""
    with MessageStore.open(tmp_path / "s", SMALL, disk=sessions.FewNames()) as store:
        assert store.append_batch(columns(bodies(10)), BatchRequest("app", 0)).status == "appended"
