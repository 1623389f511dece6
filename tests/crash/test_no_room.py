"""A disk or a record has no room for a batch."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from crash.harness import APP, no_thread_warnings, tree_hash
from crash.imitate import (
    file_bytes,
    log_write,
    overwrite,
    put,
    read_slot,
    seen,
    walk,
)
from crash.simdisk import FailDisk, Operation
from messagestore import (
    BatchRequest,
    MessageColumns,
    MessageIllegalError,
    StoreFullError,
)
from sequences import SIZES, Start, filled

pytestmark = no_thread_warnings


def test_a_full_disk_in_a_batch_is_undone_in_place(root: Path, process: Start) -> None:
    """Nothing is left of the batch, the lock is free, and the process goes on as soon as there is room."""
    filled(root, process)
    _, end = walk(root)
    disk = FailDisk(error_number=errno.ENOSPC)
    p = process(root, disk)
    p.batch("other", 0)
    _, end = walk(root)

    def failing(operation: Operation) -> None:
        if log_write(operation) and disk.fail_at is None:
            disk.fail_at = len(disk.operations)
            disk.half_writes = True

    disk.before = failing
    with pytest.raises(StoreFullError):
        p.batch(version=1)
    assert not any(file_bytes(root, end, 1 << 20))
    assert read_slot(root)["in_flight"] == -1
    assert p.batch(version=1).status == "appended"


def test_torn_bytes_that_cannot_be_saved_do_not_keep_the_store_shut(root: Path, process: Start) -> None:
    """Recovery wants to save torn bytes on a disk that is full. It says that it could not, and the store opens."""
    filled(root, process)
    store = process(root).session()
    place = put(store, "put/2/", topic="single").physical_offset
    end = store.writer.end.physical_offset
    store._attached._drop()
    overwrite(root, end, b"torn" * 100)
    disk = FailDisk(error_number=errno.ENOSPC)

    def failing(operation: Operation) -> None:
        if operation.name == "open_new" and "cut" in operation.path:
            disk.fail_at = len(disk.operations)

    disk.before = failing
    p = process(root, disk)
    with p.session() as again:
        assert again.report is not None
        assert any("could not be saved" in note for note in again.report.notes)
        assert not any(file_bytes(root, end, 1 << 20))
        assert again.look_message_by_offset(place) is not None


@pytest.mark.parametrize("limit", [8192, 1 << 20], ids=["maxMessageSize", "a segment"])
def test_a_batch_record_that_cannot_fit_is_refused_before_the_first_byte(
    root: Path, process: Start, limit: int
) -> None:
    """A batch goes into so many queues that its BATCH record is too large."""
    with process(root, max_message_size=limit, **SIZES).session() as store:
        store.create_topic("wide", 3000)
        put(store, "put/0/")
        before = tree_hash(root)
        rows = np.arange(3000)
        table = pa.record_batch({"body": pa.array([b"x"] * 3000), "queue_id": pa.array(rows, pa.int32())})
        with pytest.raises(MessageIllegalError):
            store.append_batch(MessageColumns.from_arrow(table, topic="wide"), BatchRequest(app_id=APP, version=0))
        assert tree_hash(root) == before
        put(store, "put/1/")
    assert seen(root)[("single", 0)] == ["put/0/", "put/1/"]
