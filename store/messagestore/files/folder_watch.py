"""Waits until something in a folder changes, instead of looking again and again.

Linux tells a process about writes, renames and deletions in a folder (inotify). It tells nothing about memory-mapped
writes, which is how a Java broker writes its files.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
from contextlib import suppress

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MODIFY, _IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_IN_DELETE_SELF, _IN_MOVE_SELF, _IN_ONLYDIR = 0x400, 0x800, 0x1000000
_EVENTS = _IN_MODIFY | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
_READ_SIZE = 64 * 1024


class FolderWatch:
    """The changes of one folder, from now on. Subfolders are not watched.

    Threads: one at a time, but any thread may call `close`. If another thread waits, the descriptor is closed when its
    wait ends. The number must not become that of another file meanwhile, from which the wait would read.

    Parameters
    ----------
    path : str
        An existing folder.

    Raises
    ------
    OSError
        The folder is missing, or this system cannot watch it: it has no inotify (ENOSYS), or all of the user's watches
        are in use (EMFILE, ENOSPC).
    """

    def __init__(self, path: str) -> None:
        self._descriptors: list[int] = []
        self._waiting = self._closed = False

        try:
            init, add = _libc.inotify_init1, _libc.inotify_add_watch
        except AttributeError:
            raise OSError(errno.ENOSYS, "this system has no inotify", path) from None

        fd = _checked(init(os.O_NONBLOCK | os.O_CLOEXEC), path)
        self._descriptors.append(fd)
        try:
            _checked(add(fd, os.fsencode(path), _EVENTS | _IN_ONLYDIR), path)
        except OSError:
            self.close()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Wait until something changes; whether it did since the last call. True, too, once the watch is closed.

        Parameters
        ----------
        timeout_s : float
            The longest wait; 0 only looks.
        """
        self._waiting = True
        try:
            return self._closed or self._wait(self._descriptors[0], timeout_s)
        finally:
            self._waiting = False
            if self._closed:
                self._release()

    @staticmethod
    def _wait(fd: int, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(math.ceil(max(0.0, timeout_s) * 1000)):
            return False
        try:
            os.read(fd, _READ_SIZE)  # what is left makes the next call return at once
        except BlockingIOError:
            return False  # a forked child has read it
        return True

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        self._closed = True
        if not self._waiting:
            self._release()

    def _release(self) -> None:
        """Close the descriptor, once."""
        with suppress(IndexError):
            os.close(self._descriptors.pop())

    def __del__(self) -> None:
        self._release()


def _checked(result: int, path: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result
