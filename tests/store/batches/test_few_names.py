"""A file system that can make only so many more files (inodes): a batch is refused before it is in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import sessions
from messagestore import BatchRequest, MessageStore, StoreFullError
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


def test_a_file_system_without_a_limit_is_asked_once(tmp_path: Path) -> None:
    """Btrfs says 0 of 0."""
    with MessageStore.open(tmp_path / "s", SMALL, disk=sessions.FewNames()) as store:
        assert store.append_batch(columns(bodies(10)), BatchRequest("app", 0)).status == "appended"
