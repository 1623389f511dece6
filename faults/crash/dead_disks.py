"""File systems that become read-only during writes or are shut down during reads (ext4 and XFS on loop devices).

    read-only   `mount -o remount,abort`: what ext4 does to itself when it finds an error; writes give EROFS, reads work
    shut down   `FS_IOC_SHUTDOWN`: everything gives EIO, even what is in the page cache

Needs root, as the power cuts do.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import time
from pathlib import Path

from crash.harness import SMALL, Promise, Step, check_content, die, do_step
from crash.judge import Verdict
from crash.power import LoopDisk, loop_mount, run_command
from messagestore import MessageStore, ReadOnlyStore, StoreError, StorePoisonedError
from messagestore.inspect.verify import verify

_HANGS_S = 10.0
_FIRST: tuple[Step, ...] = (
    ("put", 0, "single", 0),
    ("batch", "app-1", 0, 12, "SYNC_FLUSH"),
    ("put", 1, "single", 0),
)
_LATER: tuple[Step, ...] = (("put", 10, "single", 0), ("batch", "app-1", 1, 5, "SYNC_FLUSH"), ("clean",))


def turned_read_only(folder: Path) -> Verdict:
    """Writers get errors and stop; readers, old and new, continue.

    After a new mount, all that was promised is there.
    """
    verdict = Verdict()
    with loop_mount("ext4", folder) as disk:
        root, promise = disk.folder / "store", Promise()
        with _written(root, promise) as (store, reader):
            run_command(["mount", "-o", "remount,abort", str(disk.folder)])
            _must_refuse(store, promise, verdict)
            for one in (reader, MessageStore.open_read_only(root, SMALL)):
                check_content(one, promise)  # type: ignore[arg-type]
                one.close()
        _after(disk, root, promise, verdict)
    return verdict


def shut_down(folder: Path, kind: str) -> Verdict:
    """Writers and readers soon get errors: the errors must not look like the end of a queue or like damage."""
    verdict = Verdict()
    with loop_mount(kind, folder) as disk:
        root, promise = disk.folder / "store", Promise()
        with _written(root, promise) as (store, reader):
            disk.cut()
            for read in (
                lambda: reader.get_message("single", 0, 0, 10),
                lambda: reader.max_offset("single", 0),
                lambda: list(reader.read("topic-app-1", 0, 0)),
                lambda: MessageStore.open_read_only(root, SMALL).max_offset("single", 0),
                lambda: verify(root),
            ):
                began_s = time.monotonic()
                try:
                    verdict.misread.append(f"a reader of a dead disk got {read()}")
                except OSError as error:
                    if error.errno != errno.EIO or isinstance(error, StoreError):
                        verdict.misread.append(f"a reader was told {error!r}")
                if time.monotonic() - began_s > _HANGS_S:
                    verdict.misread.append("a reader hung")

            _must_refuse(store, promise, verdict)
        _after(disk, root, promise, verdict)
    return verdict


@contextlib.contextmanager
def _written(root: Path, promise: Promise):  # type: ignore[no-untyped-def]
    """Yield a session and a reader of a store with contents; they die at the end."""
    store = MessageStore.open(root, SMALL)
    reader: ReadOnlyStore = MessageStore.open_read_only(root, SMALL)
    try:
        for step in _FIRST:
            do_step(store, step, promise)
        check_content(reader, promise)  # type: ignore[arg-type]
        yield store, reader
    finally:
        with contextlib.suppress(StoreError, OSError):
            store.close()
        reader.close()
        die(root)


def _must_refuse(store: MessageStore, promise: Promise, verdict: Verdict) -> None:
    for step in _LATER:
        try:
            do_step(store, step, promise)
            verdict.misread.append(f"{step} was acknowledged on a dead disk")
        except StorePoisonedError:
            continue
        except (StoreError, OSError) as error:
            verdict.misread.append(f"{step}: the writer is not stopped ({error!r})")


def _after(disk: LoopDisk, root: Path, promise: Promise, verdict: Verdict) -> None:
    gc.collect()  # what is still open would keep the file system mounted
    disk.unmount()
    disk.mount()
    with MessageStore.open(root, SMALL) as store:
        check_content(store, promise)
    if not verify(root).ok:
        verdict.misread.append("verify finds something after a new mount")
