"""What processes have used so far, from `/proc`: the CPU time of a program and of everything it started.

The numbers are the kernel's. CPU time counts in ticks of 10 ms, so a figure needs work of a second or more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Used:
    """What one process has used since it began.

    Parameters
    ----------
    parent : int
    name : str
        The name of the program, as the kernel keeps it.
    user_s, system_s : float
        The CPU time of all its threads.
    faults : int
        Page faults that needed no disk. A fresh page of memory costs one, and the kernel fills it with zeros.
    read_bytes, written_bytes : int
        The bytes that went through `read` and `write` calls: files and pipes, but no sockets read with `recv`.
    """

    parent: int
    name: str
    user_s: float
    system_s: float
    faults: int
    read_bytes: int
    written_bytes: int

    def since(self, before: Used | None) -> Used:
        """What was used after `before`; None: the process is new."""
        if before is None:
            return self
        return Used(
            self.parent,
            self.name,
            self.user_s - before.user_s,
            self.system_s - before.system_s,
            self.faults - before.faults,
            self.read_bytes - before.read_bytes,
            self.written_bytes - before.written_bytes,
        )


def used(pid: int) -> Used | None:
    """What a process has used; None: it is gone, or belongs to somebody else."""
    with suppress(OSError, ValueError):
        stat = Path("/proc", str(pid), "stat").read_text()
        name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        io = dict(line.split(": ") for line in Path("/proc", str(pid), "io").read_text().splitlines())
        return Used(
            int(fields[1]),
            name,
            int(fields[11]) * _TICK_S,
            int(fields[12]) * _TICK_S,
            int(fields[7]),
            int(io["rchar"]),
            int(io["wchar"]),
        )
    return None


def tree(roots: Iterable[int]) -> dict[int, Used]:
    """What the processes `roots` and all that descend from them have used, by process id."""
    everything = dict(_all())
    below = set(roots) & set(everything)
    while more := {pid for pid, process in everything.items() if process.parent in below} - below:
        below |= more
    return {pid: everything[pid] for pid in sorted(below)}


class Meter:
    """The CPU time that a program and everything below it use from now on.

    A process that ends counts with what it had used when it was seen last: what it leaves to its parent is lost when
    the parent has ended before it. So `sample` must be called while short-lived processes run.

    Parameters
    ----------
    roots : iterable of int
        Process ids.
    """

    def __init__(self, roots: Iterable[int]) -> None:
        self.roots = list(roots)
        self.first = tree(self.roots)
        self.last = dict(self.first)

    def sample(self) -> None:
        """Look at all processes again."""
        self.last |= tree(self.roots)

    @property
    def cpu_s(self) -> float:
        """User and system time until the last sample."""
        used_s = 0.0
        for pid, process in self.last.items():
            since = process.since(self.first.get(pid))
            used_s += since.user_s + since.system_s
        return used_s


def ancestor(pid: int, name: str) -> int:
    """The nearest process above `pid` whose program has this name.

    Raises
    ------
    LookupError
        There is none.
    """
    at = pid
    while at > 1:
        process = used(at)
        if process is None:
            break
        if at != pid and process.name == name:
            return at
        at = process.parent
    raise LookupError(f"no process {name!r} above {pid}")


def _all() -> Iterator[tuple[int, Used]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        process = used(int(name))
        if process is not None:
            yield int(name), process
