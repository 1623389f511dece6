"""The ledger of written files: records what is not synced yet, and checks that it is still the file at its path.

The CommitLog, each ConsumeQueue, the index and `spark/state` have one ledger each. It notes a file when it is written,
and a folder when a name in it changes; `sync` forces both to disk. A Java broker that is started by mistake deletes and
recreates files before it asks for the lock, and somebody may restore a copy while a writer runs. Therefore a file is
compared with its path before it is written again, before its contents are published, and before it is synced.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from messagestore.files.mapped_file import Disk, File, FilePool, sync_errors


class FileReplaced(FileNotFoundError):
    """A file that was written is no longer the file at its path.

    ConsumeQueues and the index are rebuilt from the log (`Dispatcher.repair`). The log and `spark/state` cannot be
    rebuilt, so the writer stops.
    """

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOENT, "was deleted or replaced while this process wrote it", path)
        self.path = path


class WrittenFiles:
    """Files and folders that were written and are not synced yet.

    Parameters
    ----------
    disk : Disk
    pool : FilePool | None
        Opens and keeps the files; None: each is opened on its own, and held.
    hold : bool
        Hold each file open until it is forgotten, whatever the pool does, because a failed write-back is reported to
        the descriptors that were open when it failed.

    Attributes
    ----------
    files : dict of str to (int, int)
        Paths that were written, each with device and inode of the file.
    folders : set of str
        Folders in which a name was added or removed.
    held : dict of str to File

    Threads: those of the writer, which takes its mutex.
    """

    def __init__(self, disk: Disk, pool: FilePool | None = None, *, hold: bool = False) -> None:
        self.disk = disk
        self.pool = pool
        self.hold = hold or pool is None
        self.files: dict[str, tuple[int, int]] = {}
        self.folders: set[str] = set()
        self.held: dict[str, File] = {}

    def opened(self, path: str) -> File:
        """Return the file, open for writing, if the file at its path is the one that was written before.

        Raises
        ------
        FileReplaced
        """
        file = self.held.get(path)
        try:
            if file is None and self.pool is not None:
                file = self.pool.get(path, writable=True)
            elif file is None:
                file = self.disk.open(path, writable=True)
        except FileNotFoundError:
            raise self._replaced(path) from None
        identity = (file.device, file.inode)
        if not self.disk.at_path(file) or self.files.get(path, identity) != identity:
            raise self._replaced(path)
        return file

    def writable(self, path: str) -> File:
        """Return the same file as `opened`, and note it as written."""
        return self.note(self.opened(path))

    def note(self, file: File) -> File:
        """Note that a file is written, and return the file."""
        self.files[file.path] = (file.device, file.inode)
        if self.hold:
            self.held[file.path] = file
        return file

    def note_folders(self, folder: str) -> None:
        """Note that a name in this folder changes, and also in its first existing parent if the folder is missing."""
        self.folders.add(folder)
        while not self.disk.exists(folder):
            folder = os.path.dirname(folder)
            self.folders.add(folder)

    def _replaced(self, path: str) -> FileReplaced:
        if (
            self.pool is not None and not self.hold
        ):  # the caller loads again and rebuilds; where files are held, it stops
            self.pool.forget(path)
            self.forget(path)
        return FileReplaced(path)

    def forget(self, path: str) -> None:
        """Release a file because it was synced, or no longer belongs to us."""
        self.files.pop(path, None)
        self.held.pop(path, None)

    def removed(self, path: str) -> None:
        """Note that a file was unlinked."""
        self.forget(path)
        self.folders.add(os.path.dirname(path))

    def clear(self) -> None:
        """Release everything, because the whole file system was synced or the store is closed."""
        self.files.clear()
        self.folders.clear()
        self.held.clear()

    def check(self, paths: Iterable[str] | None = None) -> None:
        """Check that every file that was written, or each of `paths`, is still the file at its path.

        Raises
        ------
        FileReplaced
            A file was replaced; the error is for the first one.
        """
        for path in list(self.files if paths is None else paths):
            if path in self.files:
                self.opened(path)

    def sync_file(self, path: str) -> None:
        """Sync one file, whether this process wrote it or not.

        Raises
        ------
        FileReplaced
        SyncFailedError
            The sync failed; it must not be called again.
        """
        file = self.opened(path)
        with sync_errors(path):
            self.disk.fdatasync(file)
        self.forget(path)

    def sync_folders(self) -> None:
        """Sync the folders in which names changed, each before its parent."""
        for folder in sorted(self.folders, reverse=True):
            with sync_errors(folder):
                self.disk.fsync_dir(folder)
        self.folders.clear()

    def sync(self) -> None:
        """Sync the files, then the folders."""
        for path in list(self.files):
            self.sync_file(path)
        self.sync_folders()
