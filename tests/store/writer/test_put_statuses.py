"""Every error of a put has RocketMQ's statuses, as the table in `messagestore.errors` says."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import messagestore.errors
from messagestore import (
    ConfigError,
    CorruptionError,
    Message,
    MessageBatch,
    MessageIllegalError,
    MessageStore,
    StoreClosedError,
    StoreConfig,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StorePoisonedError,
)
from messagestore.files.disk import Disk, File
from messagestore.writer.queue_numbers import QueueNumbers
from messagestore.writer.standing import broker_comes
from small import SMALL

SEGMENTS = SMALL.replace(mapped_file_size_commit_log=4096, max_message_size=2048)
Row = tuple[str, str, str]
"""The error, RocketMQ's put status and append status."""


def table() -> set[Row]:
    lines = (messagestore.errors.__doc__ or "").splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {(name.strip(" `"), put, append) for names, _, put, append in cells for name in names.split(",")}


class FailingDisk(Disk):
    """Refuses what it is told to, with an error number."""

    def __init__(self) -> None:
        self.refused: tuple[str, str] = ("", "")
        self.number = errno.EIO

    def _check(self, operation: str, path: str) -> None:
        if self.refused[0] == operation and self.refused[1] in path:
            error = OSError(self.number, "refused", path)
            raise self._translated(error, path, 1)

    def pwrite(self, file: File, data: Any, position: int) -> None:
        self._check("pwrite", file.path)
        super().pwrite(file, data, position)

    def open_new(self, path: str | Path, size: int) -> File:
        if size == SEGMENTS.mapped_file_size_commit_log:
            self._check("open_new", str(path))
        return super().open_new(path, size)

    def fdatasync(self, file: File) -> None:
        self._check("fdatasync", file.path)
        super().fdatasync(file)


def message(size: int = 1, **more: Any) -> Message:
    return Message("t", b"x" * size, queue_id=0, **more)


def fill(store: MessageStore) -> None:
    """Put until the next put of 1,500 bytes needs a segment."""
    for _ in range(2):
        store.put_message(message(1500))


def refuse(disk: FailingDisk, operation: str, path: str, number: int) -> None:
    disk.refused, disk.number = (operation, path), number


def too_large(store: MessageStore, disk: FailingDisk) -> Any:
    return message(SEGMENTS.max_message_size + 1)


def too_many_properties(store: MessageStore, disk: FailingDisk) -> Any:
    return message(properties={"a": "b" * 40_000})


def illegal(store: MessageStore, disk: FailingDisk) -> Any:
    return message(tags="a|b\x01")


def wrong_type(store: MessageStore, disk: FailingDisk) -> Any:
    return "a text"


def no_segment(store: MessageStore, disk: FailingDisk) -> Any:
    fill(store)
    refuse(disk, "open_new", "", errno.ENOSPC)
    return message(1500)


def no_descriptor(store: MessageStore, disk: FailingDisk) -> Any:
    fill(store)
    refuse(disk, "open_new", "", errno.EMFILE)
    return message(1500)


def no_room_for_units(store: MessageStore, disk: FailingDisk) -> Any:
    store.put_message(message())
    refuse(disk, "pwrite", "consumequeue", errno.ENOSPC)
    store.put_message(message())
    return message()


def no_room(store: MessageStore, disk: FailingDisk) -> Any:
    store.put_message(message())
    refuse(disk, "pwrite", "commitlog", errno.ENOSPC)
    return message()


def write_error(store: MessageStore, disk: FailingDisk) -> Any:
    store.put_message(message())
    refuse(disk, "pwrite", "commitlog", errno.EIO)
    return message()


def poisoned(store: MessageStore, disk: FailingDisk) -> Any:
    refuse(disk, "fdatasync", "commitlog", errno.EIO)
    with contextlib.suppress(StorePoisonedError):
        store.put_message(message())
    return message()


def sync_error(store: MessageStore, disk: FailingDisk) -> Any:
    refuse(disk, "fdatasync", "commitlog", errno.EIO)
    return message()


def closed(store: MessageStore, disk: FailingDisk) -> Any:
    store.close()
    return message()


def locked(store: MessageStore, disk: FailingDisk) -> Any:
    store.put_message(message())
    paths = store.writer.files.paths
    store._attached.detach()
    store.writer.retire(lambda: broker_comes(paths))
    return message()


def damaged(store: MessageStore, disk: FailingDisk) -> Any:
    def refused(_: QueueNumbers, topic: str, queue_id: int) -> int:
        raise CorruptionError("a queue", 0, "a unit", "none")

    store.writer.numbers.next_offset = refused.__get__(store.writer.numbers)  # type: ignore[method-assign]
    return message()


CASES: dict[Callable[[MessageStore, FailingDisk], Any], tuple[type[Exception], str, str]] = {
    too_large: (MessageIllegalError, "MESSAGE_ILLEGAL", "MESSAGE_SIZE_EXCEEDED"),
    too_many_properties: (MessageIllegalError, "MESSAGE_ILLEGAL", "PROPERTIES_SIZE_EXCEEDED"),
    illegal: (MessageIllegalError, "MESSAGE_ILLEGAL", "none"),
    wrong_type: (ConfigError, "MESSAGE_ILLEGAL", "none"),
    no_segment: (StoreFullError, "CREATE_MAPPED_FILE_FAILED", "none"),
    no_descriptor: (OSError, "CREATE_MAPPED_FILE_FAILED", "none"),
    no_room_for_units: (StoreFullError, "SERVICE_NOT_AVAILABLE", "none"),
    no_room: (StoreFullError, "UNKNOWN_ERROR", "UNKNOWN_ERROR"),
    write_error: (OSError, "UNKNOWN_ERROR", "UNKNOWN_ERROR"),
    poisoned: (StorePoisonedError, "SERVICE_NOT_AVAILABLE", "none"),
    sync_error: (StorePoisonedError, "UNKNOWN_ERROR", "PUT_OK"),
    closed: (StoreClosedError, "SERVICE_NOT_AVAILABLE", "none"),
    locked: (StoreLockedError, "SERVICE_NOT_AVAILABLE", "none"),
    damaged: (CorruptionError, "UNKNOWN_ERROR", "none"),
}
ELSEWHERE = {("StoreClosedError", "UNKNOWN_ERROR", "PUT_OK")}
"""A store that was closed before a sync: `test_a_store_that_lost_its_locks_fails_what_is_in_flight`."""


@pytest.mark.parametrize("form", ["sync", "async"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_an_error_of_a_put_has_rocketmqs_statuses(tmp_path: Path, case: Any, form: str) -> None:
    """Raised, or in the Future."""
    kind, put_status, append_status = CASES[case]
    disk = FailingDisk()
    config: StoreConfig = SEGMENTS
    store = MessageStore.open(tmp_path / "s", config, disk=disk)
    try:
        what = case(store, disk)
        if form == "sync":
            with pytest.raises(kind) as caught:
                store.put_message(what)
            error: Any = caught.value
        else:
            error = store.put_message_async(what).exception(60)
        assert type(error) is kind
        assert (error.put_status.name, getattr(error.append_status, "name", "none")) == (put_status, append_status)
    finally:
        disk.refused = ("", "")
        with contextlib.suppress(StoreError, OSError):
            store.close()


def test_the_table_says_so() -> None:
    """Each row of the table is a case here, and the other way round."""
    assert table() == {(kind.__name__, put, append) for kind, put, append in CASES.values()} | ELSEWHERE


def test_a_batch_that_is_too_large_has_the_status_of_its_size(tmp_path: Path) -> None:
    """The records of a batch together are limited."""
    with MessageStore.open(tmp_path / "s", SEGMENTS) as store:
        error: Any = store.put_messages_async(MessageBatch.from_messages([message(1500)] * 2)).exception()
        assert error.append_status.name == "MESSAGE_SIZE_EXCEEDED"


def test_a_store_that_lost_its_locks_fails_what_is_in_flight(tmp_path: Path) -> None:
    """It is closed without a sync; each error says where its record is."""
    store = MessageStore.open(tmp_path / "s", SEGMENTS)
    store.put_message(message())
    flush = store._attached.flush
    assert flush is not None
    flush.stop()  # nothing is synced any more
    future = store.put_message_async(message())
    (tmp_path / "s" / "lock").unlink()
    store.close()
    error: Any = future.exception(60)
    assert isinstance(error, StoreClosedError)
    assert error.physical_offset
    assert (error.put_status.name, error.append_status.name) == ("UNKNOWN_ERROR", "PUT_OK")


def test_max_message_size_changes_on_an_open_store(tmp_path: Path) -> None:
    """The next put follows it; other settings are refused by name."""
    with MessageStore.open(tmp_path / "s", SEGMENTS) as store:
        store.alter_config(max_message_size=10)
        with pytest.raises(MessageIllegalError, match="allowed are 10 "):
            store.put_message(message(11))
        store.alter_config(max_message_size=2000)
        assert store.put_message(message(11)).is_ok
        with pytest.raises(ConfigError, match="cannot be changed while the store is open"):
            store.alter_config(mapped_file_size_commit_log=1 << 20)
        with pytest.raises(ConfigError, match="allowed is 10 to"):
            store.alter_config(max_message_size=1)
        assert store.alter_config().max_message_size == 2000
