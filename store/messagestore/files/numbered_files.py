"""A series of files of equal size, each named by the offset of its first byte.

The name has 20 digits (RocketMQ `MappedFileQueue.java`). A new file is created in the store's `spark` folder with its
first bytes in it and then renamed into place, so RocketMQ's folders never show a file of another size or an empty one.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import uuid

from messagestore.errors import CorruptionError
from messagestore.files.disk import Disk, File, FilePool, named_file, new_file, sync_errors
from messagestore.signal_handlers import pass_on

_NAME_DIGITS = 20
FILE_NAME = re.compile(f"[0-9]{{{_NAME_DIGITS}}}")
MAX_OFFSET = (1 << 63) - 1


def file_name(file_from_offset: int) -> str:
    """Return the name of a file: `0` -> `00000000000000000000`."""
    return f"{file_from_offset:0{_NAME_DIGITS}d}"


class MappedFileQueue:
    """The files of one CommitLog or ConsumeQueue. It has RocketMQ's name, and here nothing is mapped.

    Parameters
    ----------
    directory : str
        The folder of the files; it may be missing (no files).
    file_size : int
        Bytes of each file. 0: taken from the files that exist.
    pool : FilePool
        Holds the open files.
    staging : str
        A folder on the same file system, in which new files are created.

    Attributes
    ----------
    offsets : list of int
        file_from_offset of each file, ascending.
    min_offset, max_offset : int
        The first byte that a file holds, and the end of the last file; 0 without files.

    Threads: one writer; any number of readers that call `load` themselves.
    """

    missing_hint = ""
    """What to do if a file is missing; empty: as for other damage."""

    def __init__(self, directory: str, file_size: int, pool: FilePool, staging: str) -> None:
        self.directory = directory
        self.file_size = file_size
        self._size_is_known = file_size > 0
        self.pool = pool
        self.disk: Disk = pool.disk
        self.staging = staging
        self.set_offsets([])
        self._name_unsynced = False
        self._paths: dict[int, str] = {}

    def set_offsets(self, offsets: list[int]) -> None:
        """Note which files exist. The list is not changed later."""
        self.offsets = offsets
        self.min_offset = offsets[0] if offsets else 0
        self.max_offset = offsets[-1] + self.file_size if offsets else 0

    def load(self) -> None:
        """Read the names and sizes in the folder.

        Raises
        ------
        CorruptionError
            There is a file that RocketMQ would refuse (a stray name, another size), or a gap between files.
        """
        offsets: list[int] = []
        sizes: list[int] = []
        entries = self.disk.entries(self.directory)
        gone = False
        for name, is_folder in entries:
            if is_folder:
                continue  # RocketMQ skips folders, too
            path = os.path.join(self.directory, name)
            try:
                size = self.disk.size(path)
            except FileNotFoundError as error:  # retention has just deleted it, or recovery, which cuts the end
                pass_on(error)
                gone = True
                continue
            if gone:  # by retention, which had deleted the files before it, too
                offsets, sizes, gone = [], [], False
            if FILE_NAME.fullmatch(name) is None or int(name) > MAX_OFFSET - size:
                raise CorruptionError(
                    path,
                    0,
                    f"only files whose names are 20 digits and that end at {MAX_OFFSET} at most",
                    f"{name!r}",
                    hint="Move it out of the folder.",
                )
            if size == 0 and name == entries[-1][0]:
                continue  # a broker has just created it, or one that crashed left it: not a file yet
            offsets.append(int(name))
            sizes.append(size)
        if sizes and not self._size_is_known and not self.offsets:
            self.file_size = sizes[0]  # whatever was assumed while there was no file
        for offset, size in zip(offsets, sizes, strict=True):
            if size != self.file_size:
                raise CorruptionError(self.path(offset), 0, f"a file of {self.file_size} bytes", f"{size} bytes")
        for before, offset in itertools.pairwise(offsets):
            if offset != before + self.file_size:
                raise CorruptionError(
                    self.path(before + self.file_size),
                    before + self.file_size,
                    "this file",
                    f"{file_name(offset)} as the next one",
                    hint=self.missing_hint,
                )
        self._found(offsets)

    def _found(self, offsets: list[int]) -> None:
        """Note which files exist in the folder. Whoever made the last one may have died before its name was synced."""
        self._name_unsynced = bool(offsets)
        self.set_offsets(offsets)

    def remove_unmade(self) -> None:
        """Remove the last file if it is empty: a broker that was killed was about to make it.

        RocketMQ before 5.3 refuses a folder with such a file. The caller holds the writer lock, and no broker runs.
        """
        names = [name for name, is_folder in self.disk.entries(self.directory) if not is_folder]
        path = os.path.join(self.directory, names[-1]) if names else ""
        if names and FILE_NAME.fullmatch(names[-1]) is not None and not self.disk.size(path):
            self.disk.unlink(path)
            self.disk.fsync_dir(self.directory)

    def forget_deleted(self) -> bool:
        """Forget the first files if retention has deleted them; costs one system call if they still exist.

        Returns
        -------
        bool
            Whether a file was missing.
        """
        count = 0
        while count < len(self.offsets) and not self.disk.exists(self.path(self.offsets[count])):
            count += 1
        if count:
            self.forget_below(self.offsets[count - 1] + self.file_size)
        return count > 0

    def forget_below(self, offset: int) -> None:
        """Forget the files that end at or below an offset: retention deletes them, or has deleted them."""
        gone = [self.path(start) for start in self.offsets if start + self.file_size <= offset]
        self.set_offsets(self.offsets[len(gone) :])
        for path in gone:
            self.forget_file(path)

    def forget_file(self, path: str) -> None:
        """Drop what is kept of a file that has no name any more."""
        self.pool.forget(path)

    def refresh(self) -> None:
        """Add the files that follow the last one, and drop those at the beginning that retention has deleted.

        This is for callers that have called `load` before. It costs a few system calls, however many files there are.

        Raises
        ------
        CorruptionError
            The next file has another size.
        """
        self.forget_deleted()
        if not self.offsets:
            self.load()
            return
        while True:
            path = self.path(self.max_offset)
            try:
                size = self.disk.size(path)
            except FileNotFoundError as error:
                pass_on(error)
                return
            if size == 0:
                return  # a broker has just created it: not a file yet
            if size != self.file_size or self.max_offset > MAX_OFFSET - size:
                raise CorruptionError(path, 0, f"a file of {self.file_size} bytes", f"{size} bytes")
            self._found([*self.offsets, self.max_offset])

    def path(self, file_from_offset: int) -> str:
        """Return the path of the file that begins at an offset."""
        path = self._paths.get(file_from_offset)  # asked for with every read and write
        if path is None:
            path = self._paths[file_from_offset] = os.path.join(self.directory, file_name(file_from_offset))
        return path

    def holding(self, offset: int) -> int | None:
        """Return file_from_offset of the file that holds `offset`, or None."""
        if not self.min_offset <= offset < self.max_offset:
            return None
        return self.min_offset + (offset - self.min_offset) // self.file_size * self.file_size

    def file(self, file_from_offset: int, *, writable: bool = False) -> File:
        """Return the open file that begins at an offset."""
        return self.pool.get(self.path(file_from_offset), writable=writable)

    def pread(self, offset: int, size: int) -> bytes:
        """Read bytes from `offset` on, at most to the end of its file; empty if there is no file."""
        start = self.holding(offset)
        if start is None:
            return b""
        return self.disk.pread(self.file(start), min(size, start + self.file_size - offset), offset - start)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` on, at most to the end of its file.

        The result is the number of bytes that were read; 0 without a file.
        """
        start = self.holding(offset)
        if start is None:
            return 0
        return self.disk.pread_into(self.file(start), buffer[: start + self.file_size - offset], offset - start)

    def create(
        self,
        file_from_offset: int,
        data: bytes | memoryview = b"",
        position: int = 0,
        *,
        preallocate: bool = False,
        spare: File | None = None,
    ) -> File:
        """Create the next file with `data` at `position` already in it, and give it its name.

        `spare` is a file that was created ahead, with its size and blocks.

        At most one name in a folder is unsynced, so after a power cut the remaining files are the first ones, without a
        gap.

        Raises
        ------
        SyncFailedError
            The folder could not be synced; nothing was created.
        """
        path, temporary = self.path(file_from_offset), os.path.join(self.staging, f"new-{uuid.uuid4().hex}")
        if spare is None:
            naming = new_file(self.disk, path, self.file_size, via=temporary)
        else:
            naming = named_file(self.disk, spare, path)

        with naming as file:
            # One name at most is unsynced: a power cut must not take an earlier one and leave this one.
            if self._name_unsynced:
                with sync_errors(self.directory):
                    self.disk.fsync_dir(self.directory)

            if preallocate and spare is None:
                self.disk.fallocate(file, self.file_size)
            if len(data):
                self.disk.pwrite(file, data, position)

            self.disk.make_folders(self.directory)
            if self.disk.exists(path) and self.disk.size(path):
                text = "another process has created this file (was a broker started on this store?)"
                raise FileExistsError(errno.EEXIST, text, path)
            self._name_unsynced = True

        self.pool.put(file)
        self.set_offsets([*self.offsets, file_from_offset])
        return file

    @property
    def unsynced_name(self) -> int | None:
        """The last file, if its name is not known to be synced; the next file syncs it first."""
        return self.offsets[-1] if self._name_unsynced and self.offsets else None

    def name_synced(self, file_from_offset: int) -> None:
        """Note that the folder was synced while this was the last file."""
        if self.unsynced_name == file_from_offset:
            self._name_unsynced = False

    def remove(self, file_from_offset: int) -> None:
        """Unlink a file; whoever has it open can still use it."""
        path = self.path(file_from_offset)
        self.disk.unlink(path)
        self.pool.forget(path)
        self.set_offsets([offset for offset in self.offsets if offset != file_from_offset])
