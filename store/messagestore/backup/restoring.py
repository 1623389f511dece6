"""Makes a store of a point of a backup.

    copy what counts of each file, and compare its CRC-32 -> the small files, with a new id
        -> open the store as its next writer, which checks the end and makes the index -> verify -> rename

The store is made beside its place, in `<root>.restoring`, and gets its name when it is whole. A run that was killed
leaves that folder, which the next one makes anew.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace

from messagestore.backup.copying import Progress
from messagestore.backup.points import Point, Target, point_of, target_of
from messagestore.backup.snapshot import JOURNAL
from messagestore.broker.topic_deletion import delete_topic
from messagestore.errors import CorruptionError, NotAStoreError
from messagestore.files.disk import Disk
from messagestore.format.config import StoreConfig
from messagestore.format.record import crc32
from messagestore.inspect.verify import verify
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.store_files import Identity, Paths, new_identity, write_identity
from messagestore.session import attached_store

RESTORING = ".restoring"
_PIECE_SIZE = 4 << 20


def restore(
    target: str,
    root: str,
    *,
    number: int | None = None,
    config: StoreConfig | None = None,
    progress: Progress | None = None,
) -> Point:
    """Make a store of a point, at a path where nothing is.

    The store gets a new id, and the id of the store that was backed up becomes one of its ancestors: batches that are
    in it stay known, and a stream goes on if it has read no further than this point.

    Parameters
    ----------
    target : str
        The folder with the backup.
    root : str
        A missing or empty folder.
    number : int | None
        The number of the point; None: the newest.
    config : StoreConfig | None
        With which the store is opened once, for its index.
    progress : function
        Called with the bytes that were copied and the bytes in total.

    Raises
    ------
    NotAStoreError
        There is no backup, or something is at the path.
    ConfigError
        There is no such point.
    CorruptionError
        A file of the backup is damaged, or the store that was made is not whole. Nothing is at the path then.
    """
    disk = Disk()
    backup = target_of(target, disk)
    point = point_of(backup, number)
    root = os.path.abspath(root)
    if disk.names(root) or (disk.exists(root) and not disk.is_folder(root)):
        raise _taken(root, "already")

    folder = root + RESTORING
    if disk.exists(folder):
        shutil.rmtree(folder)
    disk.make_folders(folder)
    fill(backup, point, folder, disk, progress)
    _finish(folder, point, config or StoreConfig(), disk)
    with disk.open(Paths(folder).identity) as file:
        disk.syncfs(file)  # the names in all of its folders
    try:
        if disk.exists(root):
            disk.rmdir(root)
        disk.rename(folder, root)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise _taken(root, f"that was made since the restore began (the store that it made is in {folder})") from error
    disk.sync_names_above(root)
    return point


def _taken(root: str, since: str) -> NotAStoreError:
    """The error for a path at which there is something."""
    return NotAStoreError(
        f"{root}: found something there {since}; a store is restored to a missing or empty folder. Give another path",
        path=root,
    )


def fill(target: Target, point: Point, root: str, disk: Disk, progress: Progress | None = None) -> None:
    """Write the files of a point into an empty folder.

    Raises
    ------
    CorruptionError
        A file of the backup is not what it was.
    """
    total, done = sum(size for size, _ in point.files.values()), 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    sizes = {
        f"{topic}/{queue_id}": size
        for topic, queues in point.queues.items()
        for queue_id, (_, _, size) in queues.items()
    }
    for name, (size, crc) in sorted(point.files.items()):
        path = re.sub(r"^consumequeue@\d+/", "consumequeue/", name)
        folder, _, _ = path.rpartition("/")
        whole = point.segment_size if folder == "commitlog" else sizes[folder.removeprefix("consumequeue/")]
        _copy(target, name, size, crc, os.path.join(root, path), whole, disk, tell)

    for path, data in point.small_files().items():
        if path != JOURNAL:
            _write(disk, os.path.join(root, path), data)
    _identify(point, Paths(root), disk)


def _copy(
    target: Target, name: str, size: int, crc: int, path: str, file_size: int, disk: Disk, tell: Callable[[int], None]
) -> None:
    disk.make_folders(os.path.dirname(path))
    crc_so_far = position = 0
    source = target.place(name)
    with target.disk.open(source) as old, disk.open_new(path, file_size) as new:
        while position < size:
            piece = target.disk.pread(old, min(_PIECE_SIZE, size - position), position)
            if not piece:
                break
            disk.pwrite(new, piece, position)
            crc_so_far, position = crc32(piece, crc_so_far), position + len(piece)
            tell(len(piece))
        disk.fdatasync(new)
    if (position, crc_so_far) != (size, crc):
        raise CorruptionError(
            source, 0, f"{size} bytes with the CRC-32 {crc:08x}", f"{position} bytes with {crc_so_far:08x}",
            hint="Restore an earlier point, or use another copy of the backup.",
        )  # fmt: skip


def _write(disk: Disk, path: str, data: bytes) -> None:
    disk.make_folders(os.path.dirname(path))
    with disk.open_new(path, 0) as file:
        disk.pwrite(file, data, 0)
        disk.fdatasync(file)


def _identify(point: Point, paths: Paths, disk: Disk) -> None:
    """Give the store an id of its own, of which the old ones are ancestors."""
    disk.make_folders(paths.spark)
    if not point.identity:
        return
    old = Identity.from_fields(point.identity)
    made = new_identity(StoreConfig(), ancestors=point.known_ids)
    identity = replace(old, store_id=made.store_id, ancestors=made.ancestors)
    write_identity(disk, paths, identity)

    data = point.small_files().get(JOURNAL)
    if data is not None:
        journal = BatchJournal.from_bytes(data, JOURNAL)
        journal.identity, journal.checkpoint_crc = identity.to_fields(), None
        journal.write(disk, paths.journal, paths.temporary("journal"), retention=max(1, len(journal)))


def _finish(root: str, point: Point, config: StoreConfig, disk: Disk) -> None:
    """Open the store once, so that its next user finds a closed one, and check it.

    The recovery gives records behind the last unit of any queue their units. If these are the records of a topic that
    was deleted before the backup, and nothing was put afterwards, the topic is back then, or a part of it.
    """
    store = attached_store(root, config, disk)
    with store.writing("restore", config=config) as writer:
        for topic in sorted(writer.files.queue_names().keys() - point.queues.keys()):
            delete_topic(writer, topic)
    store.detach()
    recoveries = Paths(root).recoveries
    if disk.exists(recoveries):
        disk.unlink(recoveries)  # nothing went wrong: the index and `state` are not in a backup
    report = verify(root, config, disk=disk)
    if not report.ok:
        first = report.findings[0]
        raise CorruptionError(
            first.path, first.offset, first.expected, first.found,
            hint=f"`messagestore verify {root}` lists everything. Restore an earlier point.",
        )  # fmt: skip
