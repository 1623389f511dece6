"""The locks that decide who may write to a store: Python writers, one at a time, or a Java broker.

There are two locks. Both are open file description locks: they belong to a descriptor, not to a process, so closing
another descriptor of the same file does not drop them, as it would drop a POSIX lock; and they conflict with Java's
POSIX locks.

    <root>/lock         byte 0: shared by all Python writers (`Attachment`), exclusive for a Java broker
    spark/writer.lock   byte 0: one Python writer at a time (`WriterLock`)

A Java broker locks only after it has read and cut the files, so the lock alone does not keep the two apart. But a
broker opens `<root>/lock` for writing in its constructor, before it examines any other file, and keeps it open. An
attached writer therefore also holds a kernel lease on `<root>/lock`, through a read-only descriptor:

    the writer came first    the broker's `open` waits until the writer releases the lease (`Attachment.broker_waits`)
    the broker came first    the lease is refused, from the broker's constructor on, and so is the writer

Python writers never open `<root>/lock` for writing, so their leases do not disturb each other. The kernel breaks a
lease that is not released after `/proc/sys/fs/lease-break-time` (45 s); the lock still keeps that broker from starting.
The kernel notifies the holder by a signal; SIGURG is used because it is ignored unless somebody handles it. Leases need
a local file system, and the file's owner or CAP_LEASE; without leases, the lock alone must suffice, and a warning says
so.

Whoever may read a file can hold a shared lock on it, which keeps writers out of `spark/writer.lock`. Therefore only
those who may write the lock files may read them; others find out from `/proc/locks` who holds a lock.

In a forked child, the descriptors are closed but never unlocked, because an unlock would drop the parent's lock, too.
Lock files hold no data and do not go through `Disk`. Threads: the caller lets one thread at a time use a lock object;
`Attachment.broker_waits` may be called from any thread. Linux, 64 bit. Source: RocketMQ `DefaultMessageStore.java`
(constructor, load, start), fcntl(2) "Open file description locks" and "Leases".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from messagestore.errors import NotAStoreError, StoreClosedError, StoreLockedError
from messagestore.files.disk import Disk, File, allocate_behind_end
from messagestore.signal_handlers import pass_on

LOCK_NAME = "lock"
_BUSY = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_NOTE_SIZE = 512
_BLOCK_SIZE = 4096
_PLENTY = 64
"""Room is kept on a disk that has so many times as much."""
_TRIES = 20
_NO_LEASES = (errno.EACCES, errno.EPERM, *_NO_LOCKS)
"""The errors for a file of another owner, or a file system without leases."""
BREAK_MARGIN_S = 5.0
"""A writer considers itself overrun this long before the kernel lets a broker through."""

_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock`: type, whence, start, length, pid. Native order and alignment."""


_log = logging.getLogger(__name__)
_warned: set[str] = set()
"""Lock files for which this process has reported that they have no lease."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Identifies who holds an exclusive lock, as far as the kernel says.

    Parameters
    ----------
    pid : int
        0: a process of another pid namespace (a container); below 0: a process that the kernel does not name.
    """

    pid: int

    @property
    def words(self) -> str:
        """Return process, program and host, for messages."""
        host = socket.gethostname()
        if self.pid > 0:
            program = _program(self.pid)
            return f"a RocketMQ broker, pid {self.pid}" + (f" ({program})" if program else "") + f" on {host}"
        if self.pid == 0:
            return f"a RocketMQ broker in another pid namespace (a container) on {host}"
        return f"a process on {host} that the kernel does not name"

    def __str__(self) -> str:
        return self.words


def _program(pid: int) -> str:
    """Return the name of a process's program; empty if the process has ended or may not be examined."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


class LockFile:
    """A file that exists only to be locked; tracks the locks that live in this process."""

    _writable = True

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: File | None = None
        self._forked = False
        _live.add(self)

    def _open(self) -> File:
        """Open the file, created if absent; a link, FIFO, device or folder is refused."""
        if self._forked:
            raise StoreClosedError(f"{self.path}: opened before a fork. Open the store again in the child process")
        while self._file is None:
            try:
                self._file = Disk().open(self.path, writable=self._writable)
            except FileNotFoundError as error:
                pass_on(error)
                self._create()
        return self._file

    def _create(self) -> None:
        with contextlib.suppress(FileExistsError):  # another process was faster
            Disk().make_empty(self.path)

    def _set(self, kind: int, byte: int = 0) -> bool:
        """Lock or unlock a byte; return False if somebody else's lock is in the way."""
        file = self._open()
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise _without_locks(error, self.path) from error
        return True

    def _locked_by_others(self, start: int, size: int) -> list[int]:
        """The bytes in a range that somebody else has locked, in no order."""
        file, locked, left = self._open(), list[int](), [(start, start + size)]
        while left:
            low, high = left.pop()
            try:
                answer = fcntl.fcntl(
                    file.fileno(), fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, low, high - low, 0)
                )
            except OSError as error:
                raise _without_locks(error, self.path) from error
            kind, _, first, length, _ = _FLOCK.unpack(answer)
            if kind != fcntl.F_UNLCK:  # the kernel names one of the locks, not the lowest
                first, last = max(first, low), min(first + length, high) if length else high
                locked += range(first, last)
                left += [(begin, end) for begin, end in ((low, first), (last, high)) if begin < end]
        return locked

    def _at_path(self) -> bool:
        return self._file is not None and Disk().at_path(self._file)

    def _close(self) -> None:
        """Close the descriptor, which drops its lock unless a forked child also has the description open.

        An exception of a signal handler may come before it is closed. It may also be kept by whoever catches it, and
        with it what its frames refer to: so the file is not left to the interpreter.
        """
        file = self._file
        try:
            self._file = None  # first, for threads that meet a closed file
            if file is not None:
                file.close()
        except BaseException:
            self._file = None
            if file is not None:
                file.close()
            raise

    def _after_fork(self) -> None:
        self._forked = True
        self._close()


_live: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_live):
        lock._after_fork()


os.register_at_fork(after_in_child=_close_in_child)


def _kept(file: File) -> int:
    """How many bytes of the disk a file has."""
    return os.fstat(file.fileno()).st_blocks * 512


def _without_locks(error: OSError, path: str) -> Exception:
    """Return the error of a lock call, or one that says that the file system or the system has no such locks."""
    if error.errno not in _NO_LOCKS:
        error.filename = path
        return error
    return NotAStoreError(
        f"{path}: the file system gives no open file description locks ({error.strerror}), which keep two writers "
        f"apart. Put the store on a local file system (ext4, XFS, btrfs, tmpfs), or on NFS with a running lock "
        "service, and use Linux 3.15 or newer",
        path=path,
    )


def _in_the_way(fd: int, kind: int, path: str) -> Holder | None:
    """Return whose lock conflicts with one of `kind` on byte 0 through `fd`."""
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 1, 0))
    except OSError as error:
        raise _without_locks(error, path) from error
    holder_kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if holder_kind == fcntl.F_UNLCK else Holder(pid)


# ---- against a Java broker


class Attachment(LockFile):
    """The shared lock and the lease on `<root>/lock`: while they are held, no Java broker starts. `attach` makes it."""

    _writable = False  # a lease needs a read-only descriptor, and a writable one would break the leases of others

    def __init__(self, root: str, disk: Disk) -> None:
        super().__init__(os.path.join(root, LOCK_NAME))
        self.disk = disk
        self.leased = False
        """Whether the kernel makes a broker that opens the lock file wait."""
        self._undisturbed_s = 0.0

    @property
    def attached(self) -> bool:
        """Whether the lock is held; False after `detach`, and in a forked child."""
        return self._file is not None

    def intact(self) -> bool:
        """Whether the lock file at the path is still the one that is locked, and no broker can have passed the lease.

        The former is false if somebody removed or replaced the file, or renamed the store's folder.
        """
        file = self._file
        if file is None or not (self.disk.at_path(file) and self.disk.root_at_path(os.path.dirname(self.path))):
            return False
        return not self.overrun()

    def broker_waits(self) -> bool:
        """Whether somebody waits to open the lock file for writing, as a starting broker does.

        The call takes less than a microsecond.

        This is also True once the kernel has let it through. Without a lease it is always False.
        """
        file = self._file
        if file is None or not self.leased:
            return False
        try:
            undisturbed = fcntl.fcntl(file.fileno(), fcntl.F_GETLEASE) == fcntl.F_RDLCK
        except OSError:
            if self._file is file:
                raise
            return False  # another thread has detached meanwhile
        if undisturbed:
            self._undisturbed_s = time.monotonic()
        return not undisturbed

    def overrun(self) -> bool:
        """Whether a broker may have waited for so long that the kernel has let it through."""
        if not self.broker_waits():
            return False
        return time.monotonic() - self._undisturbed_s > self.disk.lease_break_time_s() - BREAK_MARGIN_S

    def alone(self) -> bool:
        """Whether no other Python writer is attached, in this process or another.

        Raises
        ------
        StoreClosedError
            The lock is not held.
        """
        if self._file is None:
            raise StoreClosedError(f"{self.path}: this process is not attached to the store any more. Open it again")
        return _in_the_way(self._file.fileno(), fcntl.F_WRLCK, self.path) is None

    def detach(self) -> None:
        """Let a Java broker start; a second call does nothing. In a forked child, nothing is unlocked."""
        if self._file is not None:
            try:
                # Closing alone leaves the lock to a child that forked without our hook. The lease is released last: a
                # broker that waits for it must not find the lock held.
                self._set(fcntl.F_UNLCK)
                if self.leased:
                    with contextlib.suppress(BlockingIOError):  # the kernel has taken it away already
                        fcntl.fcntl(self._file.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)
            finally:
                self._close()

    def _close(self) -> None:
        self.leased = False
        super()._close()

    def _take(self) -> Holder | None:
        for _ in range(_TRIES):
            if not self._lease():
                holder = _in_the_way(self._open().fileno(), fcntl.F_RDLCK, self.path)
                self._close()
                if holder is not None:
                    return holder
                time.sleep(_FIRST_PAUSE_S)  # a process may have it open only for a moment
            elif not self._set(fcntl.F_RDLCK):
                holder = _in_the_way(self._open().fileno(), fcntl.F_RDLCK, self.path)
                if holder is not None:
                    self._close()
                    return holder
                time.sleep(_FIRST_PAUSE_S)  # it was released between the two calls
            elif self._at_path():
                return None
            else:
                self._close()  # it was removed or replaced since it was opened: lock what is there now
        self._close()
        raise self._refused()

    def _lease(self) -> bool:
        """Take the lease; return False while somebody has the file open for writing, or waits to open it so."""
        fd = self._open().fileno()
        self.leased = False

        try:
            # Unlike the usual SIGIO, it is ignored unless somebody handles it.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return False
            if error.errno not in _NO_LEASES:
                error.filename = self.path
                raise
            if self.path not in _warned:
                _warned.add(self.path)
                _log.warning(
                    "%s: the kernel gives no lease on this file (%s), so a broker that starts is noticed only after it "
                    "has read the store. Do not start a broker while this process writes",
                    self.path,
                    error.strerror,
                )
            return True

        self.leased = True
        self._undisturbed_s = time.monotonic()
        return True

    def _refused(self) -> StoreLockedError:
        holder = opened_for_writing(self.path)
        return StoreLockedError(
            f"{self.path}: {holder} has it open for writing, or waits to open it, as a RocketMQ broker does when it "
            f"starts. Stop the broker and try again, or open the store read-only",
            path=self.path,
            holder=holder,
        )


def attach(root: str, disk: Disk) -> Attachment:
    """Keep Java brokers out. Call this before reading anything of the store that a write relies on.

    Parameters
    ----------
    root : str
        The store; the folder must exist.
    disk : Disk
        The disk through which `Attachment.intact` looks.

    Raises
    ------
    StoreLockedError
        A Java broker holds the store, or is starting on it.
    """
    attachment = Attachment(root, disk)
    try:
        holder = attachment._take()
    except BaseException:
        attachment._close()
        raise
    if holder is not None:
        raise StoreLockedError(
            f"{attachment.path}: locked by {holder.words}. Stop it and try again, or open the store read-only",
            path=attachment.path,
            holder=holder.words,
        )
    return attachment


def opened_for_writing(path: str) -> str:
    """Return in words which processes have a file open for writing, as far as this user may look."""
    try:
        wanted = os.stat(path, follow_symlinks=False)
    except OSError:
        return "a process"
    writers = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):  # it belongs to another user, or has ended
            if any(_writes(pid, fd, wanted) for fd in os.listdir(f"/proc/{pid}/fd")):
                writers.append(f"pid {pid} ({_program(int(pid))}) on {socket.gethostname()}")
    return " and ".join(writers) or "a process that this user cannot see"


def _writes(pid: str, fd: str, wanted: os.stat_result) -> bool:
    info = os.stat(f"/proc/{pid}/fd/{fd}")
    if (info.st_dev, info.st_ino) != (wanted.st_dev, wanted.st_ino):
        return False
    with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as file:
        flags = next(line for line in file if line.startswith("flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


def probe_java(root: str) -> Holder | None:
    """Return the live Java broker of a store, or None. Python's own locks are shared and never show here."""
    return _probe(os.path.join(root, LOCK_NAME), fcntl.F_RDLCK)


def probe_attached(root: str) -> bool:
    """Whether anybody is attached to a store: Python writers, who keep brokers out, or a broker."""
    return _probe(os.path.join(root, LOCK_NAME), fcntl.F_WRLCK) is not None


def probe_writer(path: str) -> str | None:
    """Return in words who holds `spark/writer.lock` at this moment, or None. Nothing is locked or created."""
    return WriterLock(path).holder() if _probe(path, fcntl.F_RDLCK) is not None else None


def is_writing(path: str, pid: int) -> bool:
    """Return whether a process may hold `spark/writer.lock` now: somebody holds it, and nothing names another one."""
    try:
        if _probe(path, fcntl.F_RDLCK) is None:
            return False
        return bool(_note(path)["pid"] == pid)
    except (OSError, NotAStoreError, ValueError, KeyError, TypeError, RecursionError) as error:
        pass_on(error)
        return True


def _note(path: str) -> dict[str, Any]:
    """Return what the holder of a lock has written into its file: its process, its host, and what the lock is for."""
    note: dict[str, Any] = json.loads(Disk().read_head(path, _NOTE_SIZE).decode("utf-8", "replace"))
    return note


def _probe(path: str, kind: int) -> Holder | None:
    """Return whose lock on a file would be in the way of one of `kind`."""
    try:
        file = Disk().open(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        pass_on(error)
        return None
    except PermissionError as error:  # a reader, who may not read a lock file
        pass_on(error)
        return _listed(path, kind)
    try:
        return _in_the_way(file.fileno(), kind, path)
    finally:
        file.close()


def _listed(path: str, kind: int) -> Holder | None:
    """Return the same as `_probe`, from the kernel's list of all locks, which everybody may read."""
    place = _place(path)
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as file:  # without it, nobody is known
        for line in file:
            words = line.replace("->", "").split()
            if "LEASE" not in words and place in words and (kind == fcntl.F_WRLCK or "WRITE" in words):
                return Holder(int(words[words.index(place) - 1]))
    return None


def broker_waits(root: str) -> bool:
    """Return whether a broker that is starting waits until a writer of this project lets the store go. Nothing is
    locked, and the broker is not let through: this is read from the kernel's list of all locks.
    """
    try:
        place = _place(os.path.join(root, LOCK_NAME))
        with open("/proc/locks", encoding="ascii") as file:
            return any("BREAKING" in line and place in line.split() for line in file)
    except OSError as error:  # there is no lock file, or no such list
        pass_on(error)
        return False


def _place(path: str) -> str:
    """Return a file as the kernel's list of locks names it."""
    info = os.stat(path, follow_symlinks=False)
    return f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"


def _lockers(path: str, pids: Iterable[int] | None = None) -> list[tuple[int, bool]]:
    """Return the processes that hold a lock on a file, as far as this user may look: their ids, and whether the lock is
    exclusive. With `pids`, only these are looked at: all files of all processes take milliseconds.
    """
    lockers: list[tuple[int, bool]] = []
    try:
        wanted = os.stat(path, follow_symlinks=False)
    except OSError:
        return lockers
    for pid in filter(str.isdigit, os.listdir("/proc")) if pids is None else pids:
        with contextlib.suppress(OSError, ValueError):  # it belongs to another user, or has ended
            for fd in os.listdir(f"/proc/{pid}/fd"):
                info = os.stat(f"/proc/{pid}/fd/{fd}")
                if (info.st_dev, info.st_ino) == (wanted.st_dev, wanted.st_ino):
                    with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as file:
                        lockers += [(int(pid), "WRITE" in line) for line in file if line.startswith("lock:")]
    return sorted(set(lockers))


# ---- among Python writers


_UNKNOWN = "an unknown process"


def _locker(pid: int, exclusive: bool) -> str:
    """Return in words who holds a lock for which no writer of this project has left its name."""
    kind = "" if exclusive else ", with a shared lock, which no writer of this project takes"
    return f"pid {pid} ({_program(pid) or 'ended'}) on {socket.gethostname()}{kind}"


class WriterLock(LockFile):
    """The exclusive lock on `spark/writer.lock`; the file contains its holder's name.

    Parameters
    ----------
    path : str
        The lock file; created if absent.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._held = False

    @property
    def held(self) -> bool:
        """Whether this object holds the lock; False in a forked child."""
        return self._held

    def intact(self) -> bool:
        """Whether the lock is held, and the file at the path is still the one that is locked.

        The latter is false if somebody removed or replaced the file.
        """
        return self._held and self._at_path()

    def acquire(self, timeout_s: float, *, description: str, waits: Callable[[], bool] = lambda: True) -> None:
        """Take the lock, waiting at most `timeout_s`; if it is already held, do nothing.

        Parameters
        ----------
        timeout_s : float
            0: one try.
        description : str
            What the lock is for ("query 3f2a..., batch 17"); others see it while they wait in vain.
        waits : function
            Whether to go on waiting.

        Raises
        ------
        StoreLockedError
            The time-out has expired, or `waits` says no; the error names the holder.
        """
        if self._held:
            return
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        while True:
            if self._set(fcntl.F_WRLCK):
                if self._at_path():
                    break
                self._close()  # it was removed or replaced since it was opened: lock what is there now
            left = deadline - time.monotonic()
            if left <= 0 or not waits():
                holder = self.holder()
                waited_s = timeout_s if left <= 0 else round(timeout_s - left, 1)
                raise StoreLockedError(
                    f"{self.path}: still locked by {holder} after {waited_s:g} s. Stop the process that holds it, or "
                    f"allow more time (lockTimeout; on the command line --wait)",
                    path=self.path,
                    holder=holder,
                )
            time.sleep(min(pause, left))
            pause = min(pause * 2, _LONGEST_PAUSE_S)
        self._held = True
        self._write_note(description)

    def keep_room(self, size: int) -> None:
        """Let the lock file have some bytes of the disk, which a recovery gets if there are no others: `give_room_up`.

        Recovery writes small files, and `gc` begins with a recovery: without any room, nobody could make room. The file
        is there in any case, and nobody reads its size. Nothing is kept on a disk that is nearly full.
        """
        file = self._open()
        disk = os.fstatvfs(file.fileno())
        if _kept(file) < size and disk.f_bavail * disk.f_frsize >= _PLENTY * size:
            allocate_behind_end(file.fileno(), size)

    def give_room_up(self) -> int:
        """Free the bytes that `keep_room` keeps. Returns how many there were; the file is not made for this."""
        if self._file is None and not Disk().exists(self.path):
            return 0
        file = self._open()
        kept = max(0, _kept(file) - _BLOCK_SIZE)
        if kept:
            try:
                os.ftruncate(file.fileno(), _NOTE_SIZE + kept)  # only what becomes shorter loses blocks behind its end
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                return 0  # this process may write no file of that size (RLIMIT_FSIZE), which more room does not help
            os.ftruncate(file.fileno(), _NOTE_SIZE)
        return kept

    def release(self) -> None:
        """Let the next writer in; the descriptor is kept. If the lock is not held, nothing happens."""
        if self._held:
            self._held = False
            self._set(fcntl.F_UNLCK)

    def close(self) -> None:
        """Release the lock and close the file."""
        self.release()
        self._close()

    def holder(self) -> str:
        """Return in words who holds the lock. The name in the file counts only if the kernel does not know better."""
        try:
            note = _note(self.path)
            pid, written = note["pid"], f"pid {note['pid']} on {note['host']} ({note['description']})"
        except (OSError, NotAStoreError, ValueError, KeyError, TypeError, RecursionError) as error:
            pass_on(error)
            pid, written = None, ""
        if isinstance(pid, int) and (pid, True) in _lockers(self.path, [pid]):
            return written
        lockers = _lockers(self.path)
        if not lockers:
            return f"a process that this user cannot see; the last writer was {written}" if written else _UNKNOWN
        return " and ".join(_locker(locker, exclusive) for locker, exclusive in lockers)

    def _write_note(self, description: str) -> None:
        """Write our name into the file, in one write of a fixed size."""
        length = len(description)
        while True:
            note = {"pid": os.getpid(), "host": socket.gethostname(), "description": description[:length]}
            line = json.dumps(note).encode("ascii")
            if len(line) < _NOTE_SIZE or not length:
                break
            length = min(length - 1, length * _NOTE_SIZE // len(line))
        with contextlib.suppress(OSError):  # on a full disk the lock holds, and only its holder's name is missing
            os.pwrite(self._open().fileno(), line[: _NOTE_SIZE - 1].ljust(_NOTE_SIZE - 1) + b"\n", 0)

    def _after_fork(self) -> None:
        self._held = False
        super()._after_fork()
