"""What this host and a file system offer to a store: locks, leases, room, and a clock. Only `messagestore doctor` asks.

A probe makes one file in the folder, tries the kernel's calls on it as a writer does, and removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import tempfile
from dataclasses import dataclass

from messagestore.errors import StoreError, StoreLockedError
from messagestore.files.file_systems import MEMORY, is_network, mounted
from messagestore.files.writer_lock import WriterLock
from messagestore.format.kernel import lib, why_not  # it only says whether there is one, and calls nothing

_TRIED = frozenset(["ext4", "xfs"])
_UNSYNCHRONISED = 5
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class FolderProbe:
    """What a folder's file system does.

    Parameters
    ----------
    folder : str
        The folder that was tried: the one that was asked for, or the nearest one above it that exists.
    file_system : str
        Its kind, for example `ext4`.
    mount : str
        Where the file system begins.
    writable : str
        Why this user cannot write there; empty if he can.
    full : str
        Why a new file has no room there; empty if it has.
    locks, leases : str
        Why writers, and writers and brokers, are not kept apart; empty if they are.
    free_size : int
        The bytes that this user can still write.
    """

    folder: str
    file_system: str
    mount: str
    writable: str = ""
    locks: str = ""
    leases: str = ""
    free_size: int = 0
    full: str = ""

    @property
    def read_only(self) -> bool:
        """Whether nobody may write there."""
        return self.writable == os.strerror(errno.EROFS)

    @property
    def in_memory(self) -> bool:
        """Whether a reboot loses what is written."""
        return self.file_system in MEMORY

    @property
    def on_network(self) -> bool:
        """Whether other hosts may write to the same files."""
        return is_network(self.file_system)

    @property
    def tried(self) -> bool:
        """Whether power cuts are tried on this kind."""
        return self.file_system in _TRIED


def probe_folder(path: str) -> FolderProbe:
    """Find out what the file system of a folder does. A folder that does not exist is not created."""
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)

    kind, mount = mounted(os.path.realpath(folder))
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize

    try:
        number, name = tempfile.mkstemp(prefix=".messagestore-doctor-", dir=folder)
    except OSError as error:
        words = error.strerror or str(error)
        if error.errno in _FULL:
            return FolderProbe(folder, kind, mount, full=words, free_size=free)
        return FolderProbe(folder, kind, mount, writable=words, free_size=free)

    try:
        os.close(number)
        return FolderProbe(folder, kind, mount, locks=_locks(name), leases=_leases(name), free_size=free)
    finally:
        os.unlink(name)


def _locks(name: str) -> str:
    """Why a lock does not keep two writers apart; empty if it does."""
    first, second = WriterLock(name), WriterLock(name)
    try:
        first.acquire(0, description="messagestore doctor")
        second.acquire(0, description="messagestore doctor")
    except StoreLockedError:
        return ""
    except (StoreError, OSError) as error:
        return str(error)
    finally:
        first.close()
        second.close()
    return "two openers got the same lock"


def _leases(name: str) -> str:
    """Why a lease on a file is refused; empty if it is given."""
    with open(name, "rb") as file:
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def clock_is_synchronised() -> bool | None:
    """Whether the kernel says that a time service keeps this host's clock; None if it does not say."""
    try:
        return bool(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) != _UNSYNCHRONISED)
    except (OSError, AttributeError):
        return None


def kernel_missing() -> str | None:
    """Why the compiled part of this package does not do its work, and Python does it; None: it does."""
    return why_not if lib is None else None
