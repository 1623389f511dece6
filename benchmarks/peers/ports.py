"""TCP ports for servers that are told their port, such as a broker's `listenPort`.

A port that the kernel hands out is not kept: until the server binds it, any connection of this host may be given it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import tempfile
from pathlib import Path

_LOWEST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_held: list[int] = []
"""The locks of this process, which the kernel releases when it ends."""


def reserve(count: int = 1) -> int:
    """The first of `count` free ports in a row, which no connection and no other caller of this host is given.

    They lie outside the kernel's own range. Each block has a lock file, which this process holds until it ends.

    Raises
    ------
    OSError
        No such block is left.
    """
    folder = Path(tempfile.gettempdir()) / f"messagestore-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    kernels_first, kernels_last = map(int, _EPHEMERAL.read_text().split())

    blocks = [*range(_LOWEST, kernels_first - count, count), *range(kernels_last + 1, 65_536 - count, count)]
    begin = os.getpid() * 97 % max(1, len(blocks))  # processes that begin together seldom ask for the same block
    for first in itertools.chain(blocks[begin:], blocks[:begin]):
        if all(_claim(folder / str(port), port) for port in range(first, first + count)):
            return first
    raise OSError(f"no {count} free ports in a row outside {kernels_first} to {kernels_last}")


def _claim(lock: Path, port: int) -> bool:
    """Whether the port is now this process's, and nobody listens on it."""
    file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0", port))
    except OSError:
        os.close(file)
        return False
    _held.append(file)
    return True
