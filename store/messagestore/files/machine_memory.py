"""How much memory this process can have: what the machine has left, and what the limits of its control groups leave.

In a container the machine may have much more than the container: whoever takes it is killed by the kernel. A limit may
be set for any group on the way from the process's own group to the root, and each of them holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ReadText = Callable[[str], str | None]
"""The text of a file of the kernel; None if it is not there, or cannot be read."""


@dataclass(frozen=True)
class _Version:
    """The files of a version of control groups.

    Parameters
    ----------
    mount : str
        Where the groups are mounted.
    limit, used : str
        The files with the limit of a group, and with what its processes and their page cache take.
    cached : tuple of str
        In `memory.stat`: the page cache of files, which the kernel gives back when memory is asked for.
    """

    mount: str
    limit: str
    used: str
    cached: tuple[str, ...]


_VERSION_2 = _Version("/sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))
_VERSION_1 = _Version(
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def available_bytes(read: ReadText) -> int | None:
    """Return how many bytes of memory can be had without swapping; None if the kernel does not say.

    Parameters
    ----------
    read : function
    """
    left = [*_of_machine(read), *_of_groups(read)]
    return max(0, min(left)) if left else None


def _of_machine(read: ReadText) -> Iterator[int]:
    for line in (read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_groups(read: ReadText) -> Iterator[int]:
    """What each limit leaves."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _number, controllers, path = line.split(":", 2)
        if not controllers:
            version = _VERSION_2
        elif "memory" in controllers.split(","):
            version = _VERSION_1
        else:
            continue

        # In a container, the path may be the one that the host sees, and its group the root of the mount.
        path = os.path.normpath("/" + path.lstrip("/"))
        while True:
            yield from _of_group(read, version, f"{version.mount}{path.rstrip('/')}")
            if path == "/":
                break
            path = os.path.dirname(path)


def _of_group(read: ReadText, version: _Version, folder: str) -> Iterator[int]:
    limit, used = read(f"{folder}/{version.limit}"), read(f"{folder}/{version.used}")
    if limit is None or used is None or limit.strip() == "max":
        return
    pairs = (line.split() for line in (read(f"{folder}/memory.stat") or "").splitlines())
    cached = sum(int(value) for name, value in pairs if name in version.cached)
    yield int(limit) - int(used) + cached
