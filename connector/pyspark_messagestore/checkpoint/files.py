"""Opens, reads and copies the files of a Spark checkpoint, whoever may write to them.

A checkpoint may belong to somebody else than the process that shows or copies it, for example where root rewinds the
query of a user. Therefore everything below its folder is opened relative to the open folder above it, and no link is
followed: what was checked is what is used, even if somebody replaces a name meanwhile. What is neither a regular file
nor a folder is refused by name, and opening it never waits. A file is read up to a limit. No error quotes what is in a
file.

    the checkpoint itself        may be reached through links: whoever runs the command chose them
    everything below it          a folder or a regular file, at most 32 folders deep

A copy gives nobody more than the original does. It belongs to the owner and the group of the original, as far as this
process may give it to them; its mode has none but the plain bits for reading, writing and entering; it takes over no
extended attribute.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

from messagestore import ConfigError

_MOST_DEPTH = 32
_COPY_SIZE = 4 * 1024 * 1024
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_THE_KIND = (errno.ELOOP, errno.ENXIO, errno.ENOTDIR, errno.ENODEV)
_ENTER = 0o777
_USE = 0o666
"""The bits of a mode that a copy of a folder, and of a file, may take over."""
_GROUP = 0o070


class Standing(NamedTuple):
    """What tells a file apart from another one, and from itself after a write.

    Parameters
    ----------
    device, inode : int
    size : int
        Bytes.
    modified_ns : int
    """

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the standing of a file that was looked at."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Folder:
    """An open folder; the names in it are used relative to it. Close it, or use it in a `with`.

    Parameters
    ----------
    path : str
        For errors.
    fd : int
        Its descriptor, which now belongs to this object.
    depth : int
        How many folders it lies below the one that was opened by its path.
    """

    def __init__(self, path: str, fd: int, depth: int = 0) -> None:
        self.path = path
        self.fd = fd
        self._depth = depth

    @classmethod
    def open(cls, path: str) -> Folder:
        """Open a folder by its path; links are followed."""
        return cls(path, os.open(path, _FOLDER_FLAGS))

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder."""
        os.close(self.fd)

    def below(self, name: str) -> Folder:
        """Open a folder in this one.

        Raises
        ------
        ConfigError
            The name is a link or no folder, or it lies too deep.
        """
        path = os.path.join(self.path, name)
        if self._depth == _MOST_DEPTH:
            raise ConfigError(
                f"{path}: found a folder more than {_MOST_DEPTH} folders deep; Spark makes no such checkpoint. Give "
                "the folder that is the query's checkpointLocation",
                key="CHECKPOINT",
                value=path,
            )

        try:
            fd = os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=self.fd)
        except OSError as error:
            raise self._refusal(name, error, "a folder") from error
        return Folder(path, fd, self._depth + 1)

    def entries(self) -> tuple[list[str], list[str]]:
        """Return the sorted names of the folders and of the regular files in this folder.

        Raises
        ------
        ConfigError
            There is a link, or something that is neither.
        """
        folders: list[str] = []
        files: list[str] = []
        with os.scandir(self.fd) as children:
            for entry in children:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    files.append(entry.name)
                else:
                    raise self._wrong_kind(entry.name, "a file or a folder")
        return sorted(folders), sorted(files)

    def names(self) -> list[str]:
        """Return all names in this folder, whatever they are."""
        return os.listdir(self.fd)

    def standing(self, name: str) -> Standing:
        """Look at a file without opening it."""
        return Standing.of(os.stat(name, dir_fd=self.fd, follow_symlinks=False))

    def holds(self, name: str) -> bool:
        """Whether there is this name, whatever it is."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """Open a regular file in this folder: its descriptor, and what the system says of it.

        Raises
        ------
        ConfigError
            It is a link, or no regular file.
        """
        try:
            fd = os.open(name, _FILE_FLAGS, dir_fd=self.fd)
        except OSError as error:
            raise self._refusal(name, error, "a file") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise self._wrong_kind(name, "a file", status)
            yield fd, status
        finally:
            os.close(fd)

    def read(self, name: str, limit: int) -> bytes:
        """Return what is in a file.

        Raises
        ------
        ConfigError
            It is a link, or no regular file, or has more than `limit` bytes.
        """
        with self.opened(name) as (fd, status):
            parts: list[bytes] = []
            # One byte more than the limit: a file that has grown since it was opened is refused, too.
            left = limit + 1
            if status.st_size <= limit:
                while left and (data := os.read(fd, left)):
                    parts.append(data)
                    left -= len(data)
                if left:
                    return b"".join(parts)

        path = os.path.join(self.path, name)
        raise ConfigError(
            f"{path}: found {max(status.st_size, limit + 1):,} bytes; at most {limit:,} are read, as Spark writes "
            "less. Restore the file from a copy",
            key="CHECKPOINT",
            value=path,
        )

    def _refusal(self, name: str, error: OSError, wanted: str) -> ConfigError | OSError:
        if error.errno in _NOT_THE_KIND:
            return self._wrong_kind(name, wanted)
        return OSError(error.errno, error.strerror, os.path.join(self.path, name))

    def _wrong_kind(self, name: str, wanted: str, status: os.stat_result | None = None) -> ConfigError:
        status = status or os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        path = os.path.join(self.path, name)
        return ConfigError(
            f"{path}: found {_kind(status.st_mode)}; allowed in a checkpoint is {wanted} here, as Spark makes it. Put "
            "what it stands for in its place",
            key="CHECKPOINT",
            value=path,
        )

    # ---- a copy

    @contextmanager
    def new_folder(self, name: str) -> Iterator[Folder]:
        """Make a folder that only this user may enter, and open it."""
        os.mkdir(name, 0o700, dir_fd=self.fd)
        with self.below(name) as made:
            yield made

    @contextmanager
    def new_copy(self, name: str) -> Iterator[Folder]:
        """Make a folder that gets its name here when it is complete and on the disk; otherwise it is removed."""
        partial = f".{name}.partial-{secrets.token_hex(4)}"
        os.mkdir(partial, 0o700, dir_fd=self.fd)
        try:
            with self.below(partial) as made:
                yield made
            os.rename(partial, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            os.fsync(self.fd)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True, dir_fd=self.fd)
            raise

    def copy_file(self, name: str, target: Folder) -> Iterator[tuple[int, Standing]]:
        """Copy a file of this folder into another one, and force it to the disk.

        Yields
        ------
        (int, Standing)
            First 0 and the file that is open, before anything is copied of it; then after each part its bytes. No more
            is copied than the file had when it was opened.
        """
        with self.opened(name) as (source, status):
            standing = Standing.of(status)
            yield 0, standing

            copy = os.open(name, _NEW_FILE_FLAGS, 0o600, dir_fd=target.fd)
            try:
                left = status.st_size
                while left and (data := os.read(source, min(left, _COPY_SIZE))):
                    view = memoryview(data)
                    while view:
                        view = view[os.write(copy, view) :]
                    left -= len(data)
                    yield len(data), standing

                # Until here only this user may read the copy. Others may not see a part of it.
                _give(copy, status, _USE)
                os.fsync(copy)
            finally:
                os.close(copy)

    def finish(self, original: Folder) -> None:
        """Give this folder, which is complete, to whom the original belongs, and force its names to the disk."""
        _give(self.fd, os.fstat(original.fd), _ENTER)
        os.fsync(self.fd)


def _give(copy: int, original: os.stat_result, bits: int) -> None:
    """Give a copy the owner, the group, the times and the plain mode of its original."""
    if os.geteuid() == 0:
        os.fchown(copy, original.st_uid, original.st_gid)
    elif original.st_gid in os.getgroups():
        os.fchown(copy, -1, original.st_gid)
    mode = original.st_mode & bits
    if os.fstat(copy).st_gid != original.st_gid:
        mode &= ~_GROUP  # what was for the original's group is not for another one
    os.fchmod(copy, mode)
    os.utime(copy, ns=(original.st_atime_ns, original.st_mtime_ns))


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a folder",
        stat.S_IFREG: "a file",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")
