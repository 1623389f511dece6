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

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MODIFY, _IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_IN_DELETE_SELF, _IN_MOVE_SELF, _IN_ONLYDIR = 0x400, 0x800, 0x1000000
_EVENTS = _IN_MODIFY | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
_READ_SIZE = 64 * 1024


class FolderWatch:
    """The changes of one folder, from now on. Subfolders are not watched.

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
        self._fd = -1
        try:
            init, add = _libc.inotify_init1, _libc.inotify_add_watch
        except AttributeError:
            raise OSError(errno.ENOSYS, "this system has no inotify", path) from None
        self._fd = _checked(init(os.O_NONBLOCK | os.O_CLOEXEC), path)
        try:
            _checked(add(self._fd, os.fsencode(path), _EVENTS | _IN_ONLYDIR), path)
        except OSError:
            self.close()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Wait until something changes; whether it did since the last call.

        Parameters
        ----------
        timeout_s : float
            The longest wait; 0 only looks.
        """
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(math.ceil(max(0.0, timeout_s) * 1000)):
            return False
        try:
            os.read(self._fd, _READ_SIZE)  # what is left makes the next call return at once
        except BlockingIOError:
            return False  # a forked child has read it
        return True

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


def _checked(result: int, path: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result
