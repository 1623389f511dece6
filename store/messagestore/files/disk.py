"""One file as bytes, and `Disk`: every system call that the store makes on files.

Every file operation of the store goes through a method of `Disk`, so that a test can record, fail or interrupt any of
them. Writes use `pwrite`: a full disk is an error, and never a SIGBUS. Reads use `pread` into our own memory: the bytes
that are checked are the bytes that are used, and an I/O error is an exception. Whatever is created, renamed or deleted
below a store's root, and everything in `spark/`, is reached without following links, and belongs to the owner of the
root folder (`store_root`). A session lets its `Disk` hold the root: paths below it then lead into the folder that was
opened, also if another one is at the path by now.

Two functions give files their names: `new_file` creates a file under a temporary name and renames it when it is
complete (`named_file` does so with a file that was created before), and `replace_file` does the same with a small file
and makes it durable.

A `File` is one open descriptor. It closes with the last reference to it, so a pool may forget a file that another
thread is still reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import (
    CorruptionError,
    NotAStoreError,
    StoreError,
    StoreFullError,
    SyncFailedError,
)
from messagestore.files.folder_watch import FolderWatch
from messagestore.files.machine_memory import available_bytes
from messagestore.files.store_root import HeldRoots, is_owners_link, no_access
from messagestore.format import kernel
from messagestore.signal_handlers import is_of_handler, pass_on

SMALL_FILE_SIZE = 64 * 1024
"""The largest size of a small file that is read as a whole, unless the caller allows more."""
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_ZEROS = bytes(1 << 20)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.syncfs.argtypes = (ctypes.c_int,)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_SYNC_FILE_RANGE_WRITE = 2

LEASE_BREAK_TIME = "/proc/sys/fs/lease-break-time"
_USUAL_BREAK_TIME_S = 45

T = TypeVar("T")


class File:
    """An open regular file. `path` is where it was opened; `inode` shows whether it is still there."""

    __slots__ = ("_fd", "device", "inode", "path", "writable")

    def __init__(self, fd: int, path: str, writable: bool) -> None:
        self._fd = fd
        self.path = path
        self.writable = writable
        info = os.fstat(fd)
        self.inode = info.st_ino
        self.device = info.st_dev

    def fileno(self) -> int:
        """Return the descriptor; raises `OSError` (EBADF) if the file is closed."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "file is closed", self.path)
        return self._fd

    def close(self) -> None:
        """Close the file now. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):  # false if `__init__` was interrupted
            self.close()


class Disk:
    """The real disk. Methods raise `OSError` with the path in it; a full disk raises `StoreFullError`.

    Threads: every method may be called from any thread.
    """

    top = "/"
    """The uppermost folder whose names are synced."""

    _roots = HeldRoots()
    """The roots that are held. It is replaced and never changed."""

    # ---- roots that are held

    def hold_root(self, root: str, file_mode: int | None = None) -> None:
        """Act in the folder that is at `root` now, for all paths below it, until `release_root`.

        Only `folder_at_path`, `open_folder` and `root_at_path` still look at the path. The mode is that of new files.
        """
        self._roots = self._roots.holding(root, file_mode)

    def release_root(self, root: str) -> None:
        """Look at the path `root` again, and let the folder go. A root that is not held is left alone."""
        self._roots = self._roots.without(root)

    def root_at_path(self, root: str) -> bool:
        """Whether the folder that is held for `root` is still the one at this path; True if none is held."""
        return self._roots.at_path(root)

    # ---- what the machine reports

    def time_ns(self) -> int:
        """Return nanoseconds since 1970 by the machine's clock."""
        return time.time_ns()

    def uptime_ns(self) -> int:
        """Return nanoseconds since the machine was started, which no setting of its clock changes."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def lease_break_time_s(self, path: str = LEASE_BREAK_TIME) -> float:
        """Return after how many seconds the kernel breaks a lease that holds up another process; 0 means never."""
        try:
            with open(path, encoding="ascii") as file:
                return float(file.read()) or math.inf
        except (OSError, ValueError):
            return _USUAL_BREAK_TIME_S

    def available_memory(self) -> int | None:
        """Return how many bytes of memory can be had without swapping; None if the kernel does not say.

        The limits of the control groups of this process count as well as the machine's memory.
        """
        with contextlib.suppress(ValueError):  # the kernel wrote something else than it does today
            return available_bytes(self._kernels_text)
        return None

    def _kernels_text(self, path: str) -> str | None:
        try:
            with open(path, encoding="ascii") as file:
                return file.read()
        except OSError:
            return None

    def locked_memory(self, size: int) -> mmap.mmap:
        """Return `size` zero bytes of memory that stay in memory until they are closed.

        They are shared with a forked child, so a fork neither copies them nor makes the next writes slow.
        """
        memory = mmap.mmap(-1, size)
        with memoryview(memory) as view:
            first = ctypes.c_char.from_buffer(view)
            failed = _libc.mlock(ctypes.addressof(first), size) != 0
            number = ctypes.get_errno()
            del first
        if failed:
            raise OSError(number, os.strerror(number))
        return memory

    # ---- files

    def open(self, path: str | Path, *, writable: bool = False) -> File:
        """Open an existing regular file; a symbolic link, FIFO or device is refused."""
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            with self._roots.opening(path, checked=writable) as place:
                fd = os.open(place.name, flags, dir_fd=place.folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise NotAStoreError(
                    f"{path}: found a link, FIFO or folder where a file must be", path=str(path)
                ) from error
            raise

        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotAStoreError(f"{path}: found a FIFO, device or folder where a file must be", path=str(path))
        return File(fd, str(path), writable)

    def open_new(self, path: str | Path, size: int) -> File:
        """Create a file of `size` zero bytes (sparse); raises `FileExistsError` if the name is taken.

        Its owner, group and mode are set as `store_root` says before anything is in it.
        """
        with self._roots.opening(path) as place:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                fd = os.open(place.name, flags, _FILE_MODE, dir_fd=place.folder)
            except OSError as error:  # a full disk may have no room for the name itself, or no inode
                raise (self._translated(error, str(path), size) if error.errno in _FULL else error) from None
            try:
                place.take_file(fd)
                if size:
                    os.ftruncate(fd, size)
            except OSError as error:
                os.close(fd)
                os.unlink(place.name, dir_fd=place.folder)
                raise self._translated(error, str(path), size) from error
        return File(fd, str(path), True)

    def make_empty(self, path: str | Path) -> None:
        """Create an empty file for a lock, with read permission only where there is write permission; raises
        `FileExistsError`.

        It is never open for writing here: an exception of a signal handler could leave it so until the process ends,
        and that is the mark of a broker that starts.
        """
        with self._roots.opening(path) as place:
            try:
                os.mknod(place.name, stat.S_IFREG | _FILE_MODE, dir_fd=place.folder)
            except OSError as error:  # a full disk may have no room for the name itself, or no inode
                raise (self._translated(error, str(path), 1) if error.errno in _FULL else error) from None
            fd = os.open(place.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.folder)
            try:
                place.take_file(fd, writers_only=True)
            finally:
                os.close(fd)

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write all of `data` at `position`. A short write is continued; a write of no bytes is an error."""
        view = data if type(data) is bytearray else memoryview(data).cast("B")  # a single put needs no view
        fd = file.fileno()
        done = 0
        while done < len(view):
            try:
                count = self._pwrite(fd, memoryview(view)[done:] if done else view, position + done)
            except OSError as error:
                raise self._translated(error, file.path, len(view) - done) from error
            if count == 0:
                raise OSError(errno.EIO, f"wrote 0 of {len(view) - done} bytes at {position + done}", file.path)
            done += count

    def _pwrite(self, fd: int, view: bytearray | memoryview, position: int) -> int:
        return os.pwrite(fd, view, position)

    def pread(self, file: File, size: int, position: int) -> bytes:
        """Read at most `size` bytes at `position`; fewer only at the end of the file."""
        data = self._named(lambda: os.pread(file.fileno(), size, position), file.path)
        if len(data) == size or not data:
            return data
        buffer = bytearray(size)
        return bytes(buffer[: self.pread_into(file, memoryview(buffer), position)])

    def pread_into(self, file: File, buffer: memoryview, position: int) -> int:
        """Fill `buffer` from `position`; return the number of bytes read, smaller only at the end of the file."""
        buffer = buffer.cast("B")
        fd = file.fileno()
        done = 0
        while done < len(buffer):
            target = buffer[done:]
            count = self._named(lambda: os.preadv(fd, [target], position + done), file.path)  # noqa: B023 - called at once
            if count == 0:
                break
            done += count
        return done

    def pread_parts(
        self,
        file: File,
        buffer: memoryview,
        positions: NDArray[np.int64],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        """Fill n ranges of `buffer`, each from its position in the file: int64[n] each.

        Raises
        ------
        CorruptionError
            The file ends before the end of a part.
        """
        done = 0
        if kernel.lib is not None and type(self) is Disk:  # a test's disk has each part in its hands
            done = kernel.lib.pread_parts(file.fileno(), buffer, positions, starts, ends)
        parts = zip(positions[done:].tolist(), starts[done:].tolist(), ends[done:].tolist(), strict=True)
        for position, start, end in parts:
            read_size = self.pread_into(file, buffer[start:end], position)
            if read_size != end - start:
                raise CorruptionError(file.path, position, f"{end - start} bytes", f"{read_size} bytes")

    def pwrite_parts(
        self,
        file: File,
        buffer: memoryview,
        positions: NDArray[np.int64],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        """Write n ranges of `buffer`, each to its position in the file, in their order: int64[n] each."""
        done = 0
        if kernel.lib is not None and type(self) is Disk:
            done = kernel.lib.pwrite_parts(file.fileno(), buffer, positions, starts, ends)
        parts = zip(positions[done:].tolist(), starts[done:].tolist(), ends[done:].tolist(), strict=True)
        for position, start, end in parts:  # this one also says what is wrong
            self.pwrite(file, buffer[start:end], position)

    def fdatasync(self, file: File) -> None:
        """Force the file's data to disk. After an error, the caller must never sync it again (fsyncgate)."""
        self._named(lambda: os.fdatasync(file.fileno()), file.path)

    def start_writeback(self, file: File, position: int, size: int) -> None:
        """Tell the system to start writing a range to disk without waiting, so that a later sync has less to do.

        It is only a hint: it makes nothing durable, and the later sync reports its errors.
        """
        _libc.sync_file_range(file.fileno(), position, size, _SYNC_FILE_RANGE_WRITE)

    def fsync_dir(self, path: str | Path) -> None:
        """Force a folder's names to disk."""
        with self._roots.opening(path, checked=False) as place:
            fd = os.open(place.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place.folder)
        try:
            self._named(lambda: os.fsync(fd), str(path))
        finally:
            os.close(fd)

    def sync_names_above(self, path: str | Path) -> None:
        """Force the name of a folder to disk, and the names of those above it, up to the root of its file system.

        That a folder exists does not say that its name is on the disk: whoever made it may have been killed.
        """
        folder = path = os.path.realpath(path)
        device = self._device(path)
        while folder != self.top:
            folder = os.path.dirname(folder)
            if self._device(folder) != device:
                return
            try:
                self.fsync_dir(folder)
            except PermissionError as error:  # a folder that may not be read cannot be synced alone
                pass_on(error)
                self._sync_all(path)
                return

    def _device(self, folder: str) -> int:
        return os.stat(folder).st_dev

    def _sync_all(self, folder: str) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync_file_system(fd, folder)
        finally:
            os.close(fd)

    def syncfs(self, file: File) -> None:
        """Force everything on the file system of `file` to disk (one call instead of thousands)."""
        _sync_file_system(file.fileno(), file.path)

    def rename(self, source: str | Path, target: str | Path) -> None:
        """Give a file or folder another name; a file at `target` is replaced."""
        with self._roots.opening(source) as old, self._roots.opening(target) as new:
            try:
                os.rename(old.name, new.name, src_dir_fd=old.folder, dst_dir_fd=new.folder)
            except OSError as error:
                error.filename, error.filename2 = str(source), str(target)
                if error.errno == errno.EXDEV:
                    text = (
                        "is on another file system than the store's folder spark. New files are made in spark and then "
                        "renamed, so both must be on one file system"
                    )
                    raise OSError(error.errno, text, str(target)) from error
                if error.errno in _FULL:
                    raise self._translated(error, str(target), 1) from error
                raise

    def unlink(self, path: str | Path) -> None:
        """Remove a name; for a link, this removes the link itself."""
        with self._roots.opening(path) as place:
            os.unlink(place.name, dir_fd=place.folder)

    def rmdir(self, path: str | Path) -> None:
        """Remove an empty folder; raises `OSError` if there is something in it."""
        with self._roots.opening(path) as place:
            os.rmdir(place.name, dir_fd=place.folder)

    def mkdir(self, path: str | Path) -> None:
        """Create a folder, or leave an existing one as it is; refuse a link unless `store_root` allows it."""
        with self._roots.opening(path) as place:
            try:
                os.mkdir(place.name, _DIRECTORY_MODE, dir_fd=place.folder)
            except OSError as error:
                if error.errno in _FULL:
                    raise self._translated(error, str(path), 1) from error
                if not isinstance(error, FileExistsError):
                    raise
                if not self.is_folder(path):
                    kind = "a symbolic link" if stat.S_ISLNK(self._roots.stat(path).st_mode) else "a file"
                    text = f"{path}: found {kind} where a folder must be"
                    raise NotAStoreError(text, path=str(path)) from None
                return

            fd = os.open(place.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.folder)
            try:
                place.take_folder(fd)
            finally:
                os.close(fd)

    def fallocate(self, file: File, size: int) -> None:
        """Reserve the file's first `size` bytes on disk."""
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise self._translated(error, file.path, size) from error

    def punch(self, file: File, position: int, size: int) -> None:
        """Zero a range without changing the file's size: with a hole, or with zeros where holes are not supported."""
        if size <= 0:
            return  # the kernel refuses an empty range
        fd = file.fileno()
        number = errno.EINTR
        while number == errno.EINTR:  # after a signal, Python repeats its own calls, but not those through ctypes
            if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, position, size) == 0:
                return
            number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number), file.path)
        for start, end in self.data_ranges(file, position, position + size):
            for at in range(start, end, len(_ZEROS)):
                self.pwrite(file, _ZEROS[: min(len(_ZEROS), end - at)], at)

    def size(self, path: str | Path) -> int:
        """Return the size in bytes of the file at `path`; raises `FileNotFoundError` if there is none."""
        return self._roots.stat(path).st_size

    def modified_s(self, path: str | Path) -> float:
        """Return when the file at `path` was last written, in seconds since 1970; now if it was deleted."""
        try:
            return self._roots.stat(path).st_mtime
        except FileNotFoundError as error:
            pass_on(error)
            return time.time()

    def watch(self, path: str | Path) -> FolderWatch:
        """Watch a folder for changes; raises `OSError` if it is missing or cannot be watched."""
        with self._roots.folder(path) as folder:
            return FolderWatch(folder if isinstance(folder, str) else f"/proc/self/fd/{folder}")

    def exists(self, path: str | Path) -> bool:
        """Whether the name exists (a dangling link does)."""
        try:
            self._roots.stat(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            pass_on(error)
            return False
        except PermissionError as error:
            pass_on(error)
            raise no_access(error, str(path)) from error
        return True

    def names(self, path: str | Path) -> list[str]:
        """Return the sorted names in a folder; none if there is no folder."""
        try:
            with self._roots.folder(path) as folder:
                return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError) as error:
            pass_on(error)
            return []
        except PermissionError as error:
            pass_on(error)
            raise no_access(error, str(path)) from error

    def entries(self, path: str | Path) -> list[tuple[str, bool]]:
        """Return the sorted names in a folder, each with whether it is a folder itself; none if there is no folder.

        This reads the folder once, however many names it has.
        """
        try:
            with self._roots.folder(path) as folder, os.scandir(folder) as children:
                return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in children)
        except (FileNotFoundError, NotADirectoryError) as error:
            pass_on(error)
            return []
        except PermissionError as error:
            pass_on(error)
            raise no_access(error, str(path)) from error

    def is_folder(self, path: str | Path) -> bool:
        """Whether a folder exists there; a link to one counts only where `store_root` allows it."""
        try:
            mode = self._roots.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError) as error:
            pass_on(error)
            return False
        except PermissionError as error:
            pass_on(error)
            raise no_access(error, str(path)) from error
        return stat.S_ISDIR(mode) or (stat.S_ISLNK(mode) and is_owners_link(str(path), self._roots.above(str(path))))

    def open_folder(self, path: str | Path) -> File:
        """Hold a folder open, to tell it apart from another one that is put at its path later (`folder_at_path`).

        While it is held, no other folder can get its inode number. A link to a folder is followed.
        """
        return File(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), str(path), False)

    def folder_at_path(self, folder: File) -> bool:
        """Whether a folder from `open_folder` is still the one at its path."""
        try:
            info = os.stat(folder.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            pass_on(error)
            return False
        return info.st_ino == folder.inode and info.st_dev == folder.device

    def at_path(self, file: File) -> bool:
        """Whether `file` is still the file at its path (nobody deleted or replaced it)."""
        try:
            info = self._roots.stat(file.path)
        except FileNotFoundError as error:
            pass_on(error)
            return False
        return info.st_ino == file.inode and info.st_dev == file.device

    def identity_at(self, path: str | Path) -> tuple[int, int] | None:
        """Return device and inode of the file at `path` without opening it; None if there is none."""
        try:
            info = self._roots.stat(path)
        except FileNotFoundError as error:
            pass_on(error)
            return None
        return info.st_dev, info.st_ino

    def linked(self, file: File) -> bool:
        """Whether `file` still has a name: False once it was deleted, or another file was renamed to its path.

        This asks the open descriptor, which costs a fraction of `at_path`, and does not notice that a file was moved.
        """
        return os.fstat(file.fileno()).st_nlink > 0

    def check_folders(self, path: str | Path) -> None:
        """Refuse a file's path that leads elsewhere through a link; folders may be missing.

        This is called before an append, because by the time the file is created, the data are already in the log.

        Raises
        ------
        NotAStoreError
        """
        with contextlib.suppress(FileNotFoundError), self._roots.opening(path):
            pass

    def data_ranges(self, file: File, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of `start..end` that are not holes (they may still be zeros), as (start, end)."""
        fd = file.fileno()
        position = start
        while position < end:
            try:
                begin = os.lseek(fd, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise

            if begin >= end:
                return
            position = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
            yield begin, position

    def free(self, path: str | Path) -> int:
        """Return how many bytes can still be written on the file system of `path`."""
        with self._roots.folder(path) as folder:
            info = os.statvfs(folder)
        return info.f_bavail * info.f_frsize

    def free_names(self, path: str | Path) -> int | None:
        """Return how many files and folders the file system of `path` can still make; None: it sets no limit."""
        with self._roots.folder(path) as folder:
            info = os.statvfs(folder)
        return info.f_favail if info.f_files else None

    def used_percent(self, path: str | Path) -> int:
        """Return how full the file system of `path` is, rounded up to whole percent, as RocketMQ and df do."""
        with self._roots.folder(path) as folder:
            info = os.statvfs(folder)
        used = info.f_blocks - info.f_bfree
        entire = used + info.f_bavail
        return -(-100 * used // entire) if entire > 0 else 0

    def length(self, file: File) -> int:
        """Return the size of an open file in bytes."""
        return os.fstat(file.fileno()).st_size

    # ---- built from the methods above

    def read(self, path: str | Path, limit: int = SMALL_FILE_SIZE) -> bytes:
        """Read a whole small file.

        Raises
        ------
        CorruptionError
            The file has more than `limit` bytes, so it is not what it should be, and is not read.
        """
        with self.open(path) as file:
            size = self.length(file)
            if size > limit:
                raise CorruptionError(str(path), limit, f"a file of at most {limit} bytes", f"{size} bytes")
            return self.pread(file, size, 0)

    def read_head(self, path: str | Path, size: int) -> bytes:
        """Read at most the first `size` bytes of a file, however large it is."""
        with self.open(path) as file:
            return self.pread(file, min(self.length(file), size), 0)

    def make_folders(self, path: str) -> list[str]:
        """Create a folder and its missing parents; return those that were created, the uppermost first."""
        missing: list[str] = []
        while not self.exists(path):
            missing.insert(0, path)
            path = os.path.dirname(path)
        for folder in missing:
            self.mkdir(folder)
        return missing

    def _translated(self, error: OSError, path: str, needed: int) -> OSError:
        if not is_failure(error):
            return error
        if error.errno in _FULL:
            free, names = self.free(os.path.dirname(path)), self.free_names(os.path.dirname(path))
            what = f"{needed} bytes" if needed > 1 and names != 0 else "another file"
            left = f"{free} bytes" + ("" if names is None else f" and {names} inodes") + " free"
            text = f"{path}: no room for {what} ({error.strerror}, {left}). Make room, or raise the limit"
            full = StoreFullError(text, path=path, needed=needed, free=free)
            full.errno = error.errno
            return full
        error.filename = path
        return error

    @staticmethod
    def _named(call: Callable[[], T], path: str) -> T:
        try:
            return call()
        except OSError as error:
            error.filename = path
            raise


def is_failure(error: BaseException) -> bool:
    """Whether a call failed, and so says what it has done; any other exception may have come between any two steps.

    A signal handler may raise a TimeoutError, which is an OSError, or one with a number, as those of the system have.
    """
    if isinstance(error, StoreError):
        return True
    return isinstance(error, OSError) and error.errno is not None and not is_of_handler(error)


@contextlib.contextmanager
def sync_errors(path: str) -> Iterator[None]:
    """Turn an `OSError` of a sync into a `SyncFailedError`, after which nobody may retry."""
    try:
        yield
    except SyncFailedError:
        raise
    except OSError as error:
        if not is_failure(error):
            raise
        failed = SyncFailedError(f"{path}: a sync failed ({error.strerror or error})", path=path)
        failed.errno = error.errno
        raise failed from error


class FilePool:
    """Open files by path, at most `limit` of them. The least recently used one is forgotten first.

    Threads: safe. A forgotten file stays open for whoever still holds it.
    """

    def __init__(self, disk: Disk, limit: int | None = None) -> None:
        self.disk = disk
        self.limit = limit if limit is not None else pool_limit()
        self._files: OrderedDict[tuple[str, bool], File] = OrderedDict()
        self._lock = threading.Lock()
        _pools.add(self)

    def get(self, path: str, *, writable: bool = False) -> File:
        """Return the file at `path`, opened now or earlier."""
        key = (path, writable)
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                self._files.move_to_end(key)
                return file
        file = self.disk.open(path, writable=writable)
        with self._lock:
            if self.disk.at_path(file):  # otherwise it was unlinked meanwhile, and is already forgotten
                self._keep(file)
        return file

    def has_open(self, path: str) -> bool:
        """Whether the file at `path` is open for writing here."""
        with self._lock:
            return (path, True) in self._files

    def put(self, file: File) -> None:
        """Add a file that was opened elsewhere."""
        with self._lock:
            self._keep(file)

    def _keep(self, file: File) -> None:
        self._files[(file.path, file.writable)] = file
        while len(self._files) > self.limit:
            self._files.popitem(last=False)

    def has_replaced(self) -> bool:
        """Whether another file is at the path of one of the open ones; one system call for each."""
        with self._lock:
            files = list(self._files.values())
        return any(not self.disk.at_path(file) and self.disk.exists(file.path) for file in files)

    def forget(self, path: str) -> None:
        """Drop a path that was unlinked or replaced."""
        with self._lock:
            for writable in (False, True):
                self._files.pop((path, writable), None)

    def clear(self) -> None:
        """Drop all files."""
        with self._lock:
            self._files.clear()

    def forget_threads(self) -> None:
        """In a forked child, replace the locks, because no other thread is there to release them."""
        self._lock = threading.Lock()


_pools: weakref.WeakSet[FilePool] = weakref.WeakSet()


def _forget_threads() -> None:
    for pool in list(_pools):
        pool.forget_threads()


os.register_at_fork(after_in_child=_forget_threads)  # a reader's thread may have held a lock


def pool_limit() -> int:
    """Return how many files a pool may hold: a quarter of the process's descriptors, 8 to 512."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(512, soft // 4))


def read_exactly(disk: Disk, file: File, size: int, position: int) -> bytes:
    """Read `size` bytes at `position`.

    Raises
    ------
    CorruptionError
        The file ends before that.
    """
    data = disk.pread(file, size, position)
    if len(data) != size:
        raise CorruptionError(file.path, position, f"{size} bytes", f"{len(data)} bytes, then the end of the file")
    return data


@contextlib.contextmanager
def new_file(disk: Disk, path: str, size: int, *, via: str) -> Iterator[File]:
    """Create a file of `size` zero bytes under the name `via`, which is renamed to `path` when the block ends.

    If the block fails, nothing is left, and nothing either if a signal handler raises before it begins. Nothing is
    synced.
    """
    try:
        with named_file(disk, disk.open_new(via, size), path) as file:
            yield file
    except BaseException:
        if disk.exists(via):
            disk.unlink(via)
        raise


@contextlib.contextmanager
def named_file(disk: Disk, file: File, path: str) -> Iterator[File]:
    """Give a file that has a temporary name the name `path` when the block ends; if the block fails, it is removed."""
    try:
        yield file
        _rename(disk, file, path)
    except BaseException:
        file.close()
        if disk.exists(file.path):
            disk.unlink(file.path)
        raise
    file.path = path


def _rename(disk: Disk, file: File, path: str) -> None:
    """Give an open file another name. A rename that happened, and then answered with an error, counts as done.

    NFS and FUSE do that: the server renames the file, and its answer is lost. Whoever takes it for a failure leaves a
    file behind that nobody knows of.
    """
    try:
        disk.rename(file.path, path)
    except OSError:
        if disk.identity_at(path) != (file.device, file.inode) or disk.exists(file.path):
            raise


def _sync_file_system(fd: int, path: str) -> None:
    if _libc.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def remove_folder(disk: Disk, path: str) -> None:
    """Remove a folder with everything in it; nothing is synced. It need not exist."""
    for name, is_folder in disk.entries(path):
        child = os.path.join(path, name)
        if is_folder:
            remove_folder(disk, child)
        else:
            disk.unlink(child)
    if disk.exists(path):
        disk.rmdir(path)


def allocate_behind_end(fd: int, size: int) -> None:
    """Let a file have so many bytes of the disk, whatever its own size is, where the file system can do that."""
    _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, 0, size)


def replace_file(disk: Disk, path: str | Path, data: bytes, *, via: str | Path) -> None:
    """Make `path` hold `data`, whole or not at all: write at `via`, sync, rename, and sync the folder."""
    path, via = os.fspath(path), os.fspath(via)
    if disk.exists(via):
        disk.unlink(via)
    with disk.open_new(via, 0) as file:
        disk.pwrite(file, data, 0)
        with sync_errors(path):
            disk.fdatasync(file)
        _rename(disk, file, path)
    with sync_errors(path):
        disk.fsync_dir(os.path.dirname(path))
