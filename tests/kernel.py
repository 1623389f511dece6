"""Answers of another kernel, or of another file system, to the calls that lock files."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Any

import pytest

FLOCK = struct.Struct("hhqqi4x")
"""`struct flock`: type, whence, start, length, pid."""


def refuse_leases(patch: pytest.MonkeyPatch, number: int = errno.EINVAL) -> None:
    """What a network file system answers."""
    real = fcntl.fcntl

    def refusing(fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_SETLEASE:
            raise OSError(number, os.strerror(number))
        return real(fd, command, argument)

    patch.setattr(fcntl, "fcntl", refusing)


def hide_pids(patch: pytest.MonkeyPatch) -> None:
    """What the kernel answers in another pid namespace: a lock is there, and its holder has pid 0."""
    real = fcntl.fcntl

    def hiding(fd: int, command: int, argument: Any = 0) -> Any:
        answer = real(fd, command, argument)
        if command != fcntl.F_OFD_GETLK:
            return answer
        kind, whence, start, length, _ = FLOCK.unpack(answer)
        return FLOCK.pack(kind, whence, start, length, 0)

    patch.setattr(fcntl, "fcntl", hiding)
