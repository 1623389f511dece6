"""The ledger of written files: records what is not synced yet, and checks that it is still the file at its path.

The CommitLog, each ConsumeQueue, the index and `spark/state` have one ledger each. It notes a file when it is written,
and a folder when a name in it changes; `sync` forces both to disk. A Java broker that is started by mistake deletes and
recreates files before it asks for the lock, and somebody may restore a copy while a writer runs. Therefore a file is
looked at before it is written again, before its contents are published, and before it is synced. Either its path is
compared with the open file, or, for a while after that, the open file is asked whether it still has a name.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Iterable

from messagestore.files.disk import Disk, File, FilePool, sync_errors
from messagestore.signal_handlers import pass_on

PATH_CHECK_S = 0.02
"""After a file was found at its path, only its link count is looked at for this time, unless the caller wants more."""


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
        self._at_path_s: dict[str, float] = {}
        """When each file was last found at its path."""

    def opened(self, path: str, *, often: bool = False) -> File:
        """Return the file, open for writing, if the file at its path is the one that was written before.

        With `often`, the path is looked at once every `PATH_CHECK_S`; in between, a file that still has a name is taken
        for the one at its path.

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
        except FileNotFoundError as error:
            pass_on(error)
            raise self._replaced(path) from None

        identity, now_s = (file.device, file.inode), time.monotonic()
        if self.files.get(path, identity) != identity:
            raise self._replaced(path)

        if often and now_s < self._at_path_s.get(path, -math.inf) + PATH_CHECK_S:
            in_place = self.disk.linked(file)
        else:
            in_place = self.disk.at_path(file)
            self._at_path_s[path] = now_s

        if not in_place:
            raise self._replaced(path)
        return file

    def writable(self, path: str) -> File:
        """Return the same file as `opened` does with `often`, and note it as written."""
        return self.note(self.opened(path, often=True))

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
        self._at_path_s.pop(path, None)

    def removed(self, path: str) -> None:
        """Note that a file was unlinked."""
        self.forget(path)
        self.folders.add(os.path.dirname(path))

    def clear(self) -> None:
        """Release everything, because the whole file system was synced or the store is closed."""
        self.files.clear()
        self.folders.clear()
        self.held.clear()
        self._at_path_s.clear()

    def check(self, paths: Iterable[str] | None = None, *, often: bool = False) -> None:
        """Check that every file that was written, or each of `paths`, is still the file at its path, as `opened` does.

        A file that the pool has closed since is not opened again for this: its path is compared with what was noted.

        Raises
        ------
        FileReplaced
            A file was replaced; the error is for the first one.
        """
        for path in list(self.files if paths is None else paths):
            identity = self.files.get(path)
            if identity is None:
                continue
            if self.pool is None or path in self.held or self.pool.has_open(path):
                self.opened(path, often=often)
            elif self.disk.identity_at(path) != identity:
                raise self._replaced(path)

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
