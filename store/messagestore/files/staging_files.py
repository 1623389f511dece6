"""Staging files: defines to whom a file belongs, and when it may be deleted.

A name says which process wrote the file, which driver will commit it, and to which write it belongs:

    <driver>-<write>.<batch>-<writer>-<random>.writing               not finished
                                              .staged                finished: its name is on its way to the driver
                                              -<client>.writing      staged through a server, which counts by client

    process   <pid>.<start>.<boot>.<pid namespace>; 0: unknown
    write     SHA-256 of the writer's identity (a streaming run, or one batch write), 16 hex digits
    client    SHA-256 of the name of a server's client, 16 hex digits

A commit reads only finished files of its own write. Therefore these files are deleted without a wait:

- a file of a write and batch that this driver has committed or aborted, whoever wrote it (`sweep_write`);
- an unfinished file whose writer is dead, and any file whose driver is dead (`sweep`).

Every other file is deleted when nobody has written to it for `stagingTtl`. A process counts as dead only if this kernel
proves it: same boot, same pid namespace, and no process with this pid and start time. A process of another machine,
container or boot is not known to be dead.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from messagestore.errors import ConfigError
from messagestore.files.disk import Disk
from messagestore.files.state import boot_hash
from messagestore.signal_handlers import pass_on

STAGED = ".staged"
WRITING = ".writing"
UNKNOWN = "0"
_MOST_ANCESTORS = 16
_MOST_DIGITS = 9
"""Of a pid: Linux has at most 2^22 of them."""
PROCESS = r"0|\d+\.\d+\.[0-9a-f]{8}\.[0-9a-f]{8}"
"""A token, as a regular expression."""
_NAME = re.compile(
    rf"({PROCESS})-([0-9a-f]{{16}})\.(\d+)-({PROCESS})-[0-9a-f]{{8}}(?:-([0-9a-f]{{16}}))?({STAGED}|{WRITING})"
)
_log = logging.getLogger(__name__)
_warned_s: dict[str, float] = {}
_WARN_AGAIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Write:
    """Identifies what a staging file is for, in plain values that are pickled into tasks.

    Parameters
    ----------
    driver : str
        The process whose death ends the write; `UNKNOWN` if it cannot be determined.
    key : str
        The same in all tasks and in the commit of one write, and in no other write.
    batch : int
        The batch of a stream; commits of one key come in this order.
    """

    driver: str
    key: str
    batch: int = 0

    def path(self, folder: str, client: str = "") -> str:
        """Return a fresh path for a file that is being written; `client` names whose it is, if a server writes it.

        Raises
        ------
        ConfigError
            The write comes from another host and would not make the name of a staging file.
        """
        tag = f"-{_digits(client)}" if client else ""
        start = f"{self.driver}-{_digits(self.key)}.{self.batch}-{own_token()}-{uuid.uuid4().hex[:8]}{tag}"
        name = start + WRITING
        if _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"staged file: found the driver {self.driver!r:.100} and the batch {self.batch}; allowed are the token "
                f"of a process, or {UNKNOWN}, and a number from 0 on. Nothing was written",
                key="write",
            )
        return os.path.join(folder, name)


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def no_write() -> Write:
    """Return a write for callers that stage without a driver; nobody else knows it."""
    return Write(UNKNOWN, uuid.uuid4().hex)


def finished(path: str) -> str:
    """Return the name that a file gets when it is whole."""
    return path.removesuffix(WRITING) + STAGED


def path_of(folder: str, name: str) -> str:
    """Return where a finished file lies. The name may come from another host, so it must be a staging file's.

    Raises
    ------
    ConfigError
        It is another name; a path never is a name.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[6] != STAGED:
        raise ConfigError(
            f"staged file: found the name {name!r:.200}; allowed is a name as `stage` gives it, without a folder. "
            f"Nothing was read or deleted",
            key="name",
            value=name,
        )
    return os.path.join(folder, name)


# ---- processes


def process_token(pid: int) -> str:
    """Return what distinguishes a process from all others of this machine, even if its pid is reused."""
    start = _start_of(pid)
    if start is None:
        return UNKNOWN
    return f"{pid}.{start}.{boot_hash():08x}.{_namespace():08x}"


@lru_cache(1)
def own_token() -> str:
    """Return the token of this process."""
    return process_token(os.getpid())


os.register_at_fork(after_in_child=own_token.cache_clear)


@lru_cache(1)
def _namespace() -> int:
    return zlib.crc32(os.readlink("/proc/self/ns/pid").encode())


def _stat_of(pid: int) -> list[str] | None:
    """Return name, state, parent, ... of a process; None if it cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return [text[text.index("(") + 1 : text.rindex(")")], *text[text.rindex(")") + 2 :].split()]


def _start_of(pid: int) -> str | None:
    fields = _stat_of(pid)
    return None if fields is None else fields[20]


def is_dead(token: str) -> bool:
    """Whether a process is known to be dead."""
    if token == UNKNOWN:
        return False
    pid, start, boot, namespace = token.split(".")
    if (int(boot, 16), int(namespace, 16)) != (boot_hash(), _namespace()):
        return False
    if len(pid) > _MOST_DIGITS:
        return True  # this kernel has no such process; a name like this was made up
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to another user, so it exists
        pass
    start_now = _start_of(int(pid))
    return start_now is not None and start_now != start


def is_alive(token: str) -> bool:
    """Whether a process is known to be alive: it runs on this kernel, in this pid namespace."""
    pid, _, _ = token.partition(".")
    return token != UNKNOWN and len(pid) <= _MOST_DIGITS and process_token(int(pid)) == token


def driver_token() -> str:
    """Return the token of Spark's driver: in a Python worker that it started, the nearest JVM above this process."""
    pid = os.getpid()
    for _ in range(_MOST_ANCESTORS):
        fields = _stat_of(pid)
        if fields is None or pid <= 1:
            return UNKNOWN
        if fields[0] == "java":
            return process_token(pid)
        pid = int(fields[2])
    return UNKNOWN


# ---- sweeping


def remove(paths: Iterable[str], disk: Disk | None = None) -> None:
    """Delete staging files; it does not matter if some were deleted already."""
    disk = disk or Disk()
    for path in paths:
        try:
            disk.unlink(path)
        except FileNotFoundError as error:
            pass_on(error)
            continue


def sweep(folder: str, older_than_s: float, disk: Disk | None = None) -> list[str]:
    """Delete files that nobody will commit, and those to which nobody has written for `older_than_s` seconds.

    Warns if the remaining files take more space than is free on the disk.

    Returns
    -------
    list of str
        Paths of the deleted files.
    """
    disk = disk or Disk()
    limit_s = time.time() - older_than_s
    gone, left = [], 0
    dead = lru_cache(None)(is_dead)  # many files, few processes

    for name in disk.names(folder):
        if not name.endswith((STAGED, WRITING)):
            continue
        path = os.path.join(folder, name)
        match = _NAME.fullmatch(name)
        orphan = match is not None and (dead(match[1]) or (match[6] == WRITING and dead(match[4])))
        if orphan or disk.modified_s(path) < limit_s:
            gone.append(path)
        else:
            left += _size_of(disk, path)

    remove(gone, disk)
    if left:
        _warn_if_large(disk, folder, left)
    return gone


def sweep_write(folder: str, names: Iterable[str], disk: Disk | None = None) -> list[str]:
    """Delete what failed attempts left of the writes of some files, up to the batches of these files.

    This is called when the write is committed or aborted: nobody reads these files any more, nor those of earlier
    batches.
    """
    disk = disk or Disk()
    last: dict[tuple[str, str], int] = {}
    for match in map(_NAME.fullmatch, names):
        if match is not None:
            key = (match[1], match[2])
            last[key] = max(last.get(key, 0), int(match[3]))

    gone = []
    for name in disk.names(folder) if last else ():
        match = _NAME.fullmatch(name)
        if match is not None and int(match[3]) <= last.get((match[1], match[2]), -1):
            gone.append(os.path.join(folder, name))

    remove(gone, disk)
    return gone


def sizes_of(folder: str, client: str, disk: Disk) -> dict[str, int]:
    """Return the size of each file that a server has staged for a client and that is still there.

    The keys are names without their ending, which stay when a file is finished.
    """
    sizes, tag = {}, _digits(client)
    for name in disk.names(folder):
        match = _NAME.fullmatch(name)
        if match is not None and match[5] == tag:
            sizes[stem_of(name)] = _size_of(disk, os.path.join(folder, name))
    return sizes


def stem_of(path: str) -> str:
    """Return what the name of a file keeps when the file is finished."""
    return os.path.basename(path).removesuffix(WRITING).removesuffix(STAGED)


def _size_of(disk: Disk, path: str) -> int:
    try:
        return disk.size(path)
    except FileNotFoundError as error:
        pass_on(error)
        return 0


def _warn_if_large(disk: Disk, folder: str, size: int) -> None:
    free = disk.free(folder)
    now_s = time.monotonic()
    if size > free and now_s - _warned_s.get(folder, -_WARN_AGAIN_S) >= _WARN_AGAIN_S:
        _warned_s[folder] = now_s
        _log.warning(
            "%s: this folder holds %d bytes of staging files that are not committed, and the disk has %d bytes free. "
            "You may delete the files while no write is running. A shorter stagingTtl deletes them sooner",
            folder,
            size,
            free,
        )
