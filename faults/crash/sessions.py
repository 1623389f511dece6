"""Sessions that share a process: what one of them does must not change what another has been promised.

Also a server that forgets its answers, and somebody who may only read. These are named cases of the mode `fuzz`. A case fails with an `AssertionError`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from crash.harness import SMALL, batch_columns
from crash.imitate import commit
from messagestore import (
    ASYNC_FLUSH,
    BatchRequest,
    ConfigError,
    Message,
    MessageStore,
    StoreConfig,
    StoreFullError,
    StorePoisonedError,
)
from messagestore.files.disk import Disk, File
from messagestore.inspect.verify import verify
from messagestore.session import attached_store

_ASYNC = SMALL.replace(flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=3_600_000)


def a_second_session(folder: Path) -> None:
    """Open a store twice: the puts of the first session are synced as it asked, whatever the second one asks for."""
    root = folder / "store"
    with MessageStore.open(root, SMALL) as store:
        for config in (_ASYNC, SMALL.replace(message_delay_level="1h"), StoreConfig(), None):
            before = store.writer.files.config
            try:
                MessageStore.open(root, config).close()
                assert config is None, f"a session was opened with {config}"
            except ConfigError as error:
                assert config is not None and "open with other settings" in f"{error}", f"{error}"
            assert store.writer.files.config == before, "the settings of an open session have changed"
            result = store.put_message(Message("t", b"x", queue_id=0))
            assert store.writer.synced_end >= result.physical_offset + result.size, "a put is not on the disk"


def commits_by_turns(folder: Path) -> None:
    """Let two queries commit in one process: what the first has written is synced when the second one begins."""
    store = attached_store(folder / "store", _ASYNC)
    with store.writing("the first query", config=_ASYNC) as writer:
        commit(writer, "app-1", 0, 10, ASYNC_FLUSH)
        end = writer.end.physical_offset
    with store.writing("the second query", config=SMALL.replace(message_delay_level="1h")) as writer:
        assert writer.synced_end >= end, "the batch of the first query waits for the intervals of the second one"
        assert writer.files.config.delays_ms == (3_600_000,), "the second query has the levels of the first one"
    store.detach()


class DeafDisk(Disk):
    """A disk on which every rename happens and answers with an error, as NFS and FUSE do when an answer is lost."""

    def __init__(self, number: int) -> None:
        self.number, self.renamed = number, 0

    def rename(self, source: str | Path, target: str | Path) -> None:
        super().rename(source, target)
        self.renamed += 1
        raise OSError(self.number, os.strerror(self.number), str(source))


def renames_that_answer_with_an_error(folder: Path) -> None:
    """Fill segments, queue files and index files: each has its name, and the store goes on and is sound."""
    for number in (errno.EIO, errno.ENOENT, errno.ESTALE):
        root, disk = folder / str(number), DeafDisk(number)
        try:
            with MessageStore.open(root, SMALL.replace(broker_name="broker-a"), disk=disk) as store:
                for count in range(120):
                    store.put_message(Message("t", b"x" * 400, queue_id=0, keys=[f"{kind}{count}" for kind in "abc"]))
                assert store.max_offset("t", 0) == 120
        except OSError as error:
            raise AssertionError(f"a rename that happened counts as failed: {error}") from error
        assert disk.renamed > 20, "the store made no files"
        report = verify(root)
        assert report.ok, f"{report.findings[0]}"
        assert not [path.name for path in (root / "spark").iterdir() if path.name.startswith("new-")]


class FewNames(Disk):
    """A disk that can make only `left` more files and folders (inodes); None: any number."""

    def __init__(self, left: int | None = None) -> None:
        self.left = left

    def free_names(self, path: str | Path) -> int | None:
        return self.left

    def open_new(self, path: str | Path, size: int) -> File:
        self._make(path)
        return super().open_new(path, size)

    def mkdir(self, path: str | Path) -> None:
        if not self.exists(path):
            self._make(path)
        super().mkdir(path)

    def rename(self, source: str | Path, target: str | Path) -> None:
        self._give(self.exists(target))
        super().rename(source, target)

    def unlink(self, path: str | Path) -> None:
        super().unlink(path)
        self._give(True)

    def _give(self, gone: bool) -> None:
        if self.left is not None:
            self.left += gone

    def _make(self, path: str | Path) -> None:
        if self.left is not None:
            if not self.left:
                raise self._translated(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)), str(path), 0)
            self.left -= 1


def few_names(folder: Path) -> None:
    """Append batches while there are too few inodes for their queues: they are refused, and accepted later."""
    disk, version = FewNames(), 0
    with MessageStore.open(folder / "store", SMALL, disk=disk) as store:
        store.create_topic("topic-app-1", 30)
        for left in (*range(0, 120, 7), 1 << 20):
            disk.left = left
            rows = batch_columns("app-1", version, 60, 30)
            try:
                store.append_batch(rows, BatchRequest("app-1", version))
                version += 1
            except StoreFullError as error:
                assert left < 1 << 20, f"{error}"
            except StorePoisonedError as error:
                raise AssertionError(f"with {left} inodes left: {error}") from error
        assert version > 1
    assert verify(folder / "store").ok


def locks_of_readers(folder: Path) -> None:
    """Make a store that a group or everybody may read: only who may write a lock file may read it."""
    for mode, wanted in ((0o644, 0o600), (0o640, 0o600), (0o664, 0o660), (0o666, 0o666)):
        root = folder / f"{mode:o}"
        with MessageStore.open(root, SMALL.replace(file_mode=f"{mode:04o}")) as store:
            store.put_message(Message("t", b"x", queue_id=0))
            for path in (root / "lock", root / "spark" / "writer.lock"):
                found = path.stat().st_mode & 0o777
                assert found == wanted, f"{path.name}: mode {found:o} where files have {mode:o}"
            assert (root / "spark" / "state").stat().st_mode & 0o777 == mode


CASES: dict[str, Callable[[Path], None]] = {
    "a second session": a_second_session,
    "commits by turns": commits_by_turns,
    "renames that answer with an error": renames_that_answer_with_an_error,
    "locks of readers": locks_of_readers,
    "few inodes": few_names,
}
