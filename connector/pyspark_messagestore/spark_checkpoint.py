"""Reads the checkpoint of a streaming query while Spark is stopped, and copies it as it was before a batch.

    metadata            {"id": the query's id}
    offsets/<batch>     v1 or v2, the batch's settings, then one offset for each source: written before the batch runs
    commits/<batch>     written after the batch is done
    sources/, state/    what sources and stateful operators keep; state/<operator>/<partition>/[<store>/]<version>...

A batch whose file is in `offsets` and not in `commits` runs again when the query starts, with the offsets in its file.
Version n of the state is the state before batch n. A file may have a checksum beside it: `.<name>.crc`, and for some
also `<name>.crc`. Nothing of the original is ever changed.

Source: Spark's OffsetSeqLog, CommitLog, HDFSBackedStateStoreProvider and RocksDBFileManager, version 4.3.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from messagestore import ConfigError, CorruptionError
from pyspark_messagestore.offsets import StreamOffset

_MAX_SIZE = 64 * 1024 * 1024
_COPY_SIZE = 4 * 1024 * 1024
_STATE_FILE = re.compile(r"(\d+)(?:_([0-9a-fA-F-]{36}))?\.(delta|snapshot|zip|changelog)")
_WHOLE = ("snapshot", "zip")
"""The kinds of state files that need no earlier one."""


@dataclass(frozen=True)
class Batch:
    """What a checkpoint says of one batch.

    Parameters
    ----------
    batch_id : int
    committed : bool
        The batch is done.
    planned_at_ms : int | None
        When it was planned.
    offsets : tuple of (dict | None)
        How far each source is read when the batch is done; None: nothing was read of the source yet.
    fault : str
        What is wrong with its file; empty if it could be read.
    """

    batch_id: int
    committed: bool
    planned_at_ms: int | None = None
    offsets: tuple[dict[str, Any] | None, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class StateFolder:
    """The files of one state store: those of an operator, a partition, and often a name.

    Parameters
    ----------
    path : str
        The folder, relative to the checkpoint.
    whole, changes : dict of int to set of str
        The versions that are complete in themselves, and those that build on the version before them, each with its
        ids (empty text in files without ids).
    """

    path: str
    whole: dict[int, set[str]] = field(default_factory=dict)
    changes: dict[int, set[str]] = field(default_factory=dict)

    def lacks(self, version: int, ids: set[str]) -> str:
        """Why a version cannot be loaded; empty if it can.

        Parameters
        ----------
        ids : set of str
            The ids that the commit of the batch before names; empty if it names none.
        """
        if version == 0:
            return ""
        base = max((each for each in self.whole if each <= version), default=0)
        missing = [each for each in range(base + 1, version + 1) if each not in self.changes]
        if base != version and missing:
            return f"{self.path} has no version {missing[0]}"
        there = self.whole.get(version, set()) | self.changes.get(version, set())
        if ids and there - {""} and not there & ids:
            return f"{self.path} has version {version} of another attempt only"
        return ""


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of a query.

    Parameters
    ----------
    path : str
    query_id : str
    batches : tuple of Batch
        Those that the checkpoint still holds, in order.
    state : tuple of StateFolder
        Empty for a query without state.
    state_ids : dict of int to set of str
        The ids of state that the commit of a batch names.
    """

    path: str
    query_id: str
    batches: tuple[Batch, ...]
    state: tuple[StateFolder, ...]
    state_ids: dict[int, set[str]]

    @property
    def committed(self) -> Batch | None:
        """The newest batch that is done."""
        return next((batch for batch in reversed(self.batches) if batch.committed), None)

    @property
    def next_batch_id(self) -> int:
        """The batch that the query runs first when it starts."""
        return 0 if not self.batches else self.batches[-1].batch_id + self.batches[-1].committed

    def rewind_fault(self, batch_id: int) -> str:
        """Why the query cannot be rewound so that it runs a batch again; empty if it can."""
        by_id = {batch.batch_id: batch for batch in self.batches}
        if batch_id >= self.next_batch_id:
            return f"batch {batch_id} is not done: it runs without a rewind"
        if batch_id not in by_id or (batch_id and batch_id - 1 not in by_id):
            return f"the checkpoint no longer holds the offsets at which batch {batch_id} begins and ends"
        for each in (batch_id - 1, batch_id):
            if each >= 0 and by_id[each].fault:
                return by_id[each].fault
        if batch_id and not by_id[batch_id - 1].committed:
            return f"batch {batch_id - 1} before it is not done"
        ids = self.state_ids.get(batch_id - 1, set())
        faults = (folder.lacks(batch_id, ids) for folder in self.state)
        fault = next((fault for fault in faults if fault), "")
        return f"the state before batch {batch_id} is gone: {fault}" if fault else ""

    @property
    def rewindable(self) -> list[int]:
        """The batches from which the query can run again."""
        return [batch.batch_id for batch in self.batches if not self.rewind_fault(batch.batch_id)]


# ---- reading


def read_checkpoint(path: str) -> Checkpoint:
    """Read a checkpoint.

    Raises
    ------
    ConfigError
        The folder is no checkpoint of a streaming query.
    CorruptionError
        The file `metadata` is damaged.
    """
    path = os.path.abspath(path)
    metadata = os.path.join(path, "metadata")
    if not os.path.isfile(metadata) or not os.path.isdir(os.path.join(path, "offsets")):
        raise ConfigError(
            f"{path}: found no checkpoint of a streaming query (a file metadata and a folder offsets). Give the folder "
            "that is the query's checkpointLocation",
            key="CHECKPOINT",
            value=path,
        )
    try:
        query_id = str(json.loads(_read(metadata))["id"])
    except (ValueError, KeyError, TypeError) as error:
        hint = "Restore the file from a copy; without it the query gets a new id."
        raise CorruptionError(metadata, 0, "the id of a query", repr(error), hint=hint) from None
    committed, state_ids = {}, {}
    for batch_id in _numbered(os.path.join(path, "commits")):
        committed[batch_id], state_ids[batch_id] = _read_commit(os.path.join(path, "commits", str(batch_id)))
    batches = [
        _read_batch(os.path.join(path, "offsets", str(batch_id)), batch_id, committed=committed.get(batch_id, False))
        for batch_id in _numbered(os.path.join(path, "offsets"))
    ]
    return Checkpoint(path, query_id, tuple(batches), tuple(_state_folders(path)), state_ids)


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_MAX_SIZE).decode("utf-8")


def _numbered(folder: str) -> list[int]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name) for name in names if re.fullmatch(r"\d{1,18}", name))


def _read_batch(path: str, batch_id: int, *, committed: bool) -> Batch:
    try:
        version, settings, *lines = _read(path).split("\n")
        if version not in ("v1", "v2"):
            raise ValueError(f"version {version[:20]!r}")
        planned = json.loads(settings).get("batchTimestampMs") if settings else None
        if version == "v2":
            by_source = dict(line.split(":", 1) for line in lines if line)
            if set(by_source) != set(map(str, range(len(by_source)))):
                raise ValueError("sources with names")
            lines = [by_source[str(source)] for source in range(len(by_source))]
        offsets = tuple(_parsed(line) for line in lines)
        if not offsets:
            raise ValueError("no offset")
        return Batch(batch_id, committed, None if planned is None else int(planned), offsets)
    except (ValueError, TypeError, AttributeError) as error:
        return Batch(batch_id, committed, fault=f"{path} cannot be read ({error})")


def _parsed(line: str) -> dict[str, Any] | None:
    """An offset; one that is no JSON object, as of the rate source, has its text in the field `offset`."""
    if line == "-":
        return None
    value = json.loads(line)
    return value if isinstance(value, dict) else {"offset": value}


def _read_commit(path: str) -> tuple[bool, set[str]]:
    """Whether a commit file is whole, and the ids of state that it names."""
    try:
        version, _, text = _read(path).partition("\n")
        if not re.fullmatch(r"v\d+", version):
            return False, set()
        found: set[str] = set()
        waiting: list[Any] = [json.loads(text).get("stateUniqueIds") if text else None]
        while waiting:
            each = waiting.pop()
            if isinstance(each, str):
                found.add(each)
            elif isinstance(each, dict):
                waiting += each.values()
            elif isinstance(each, list):
                waiting += each
        return True, found
    except (ValueError, AttributeError):
        return False, set()


def _state_folders(path: str) -> Iterator[StateFolder]:
    """The folders of all state stores. A partition without any file is one that lacks every version."""
    for operator in _numbered(os.path.join(path, "state")):
        parts = os.path.join("state", str(operator))
        for partition in _numbered(os.path.join(path, parts)):
            own = os.path.join(parts, str(partition))
            inner = [
                os.path.join(own, name)
                for name in sorted(os.listdir(os.path.join(path, own)))
                if name not in ("_metadata", "SSTs") and os.path.isdir(os.path.join(path, own, name))
            ]
            for each in inner or [own]:
                folder = StateFolder(each)
                for name in os.listdir(os.path.join(path, each)):
                    match = _STATE_FILE.fullmatch(name)
                    if match is not None:
                        kind = folder.whole if match[3] in _WHOLE else folder.changes
                        kind.setdefault(int(match[1]), set()).add(match[2] or "")
                yield folder


def stream_offset(fields: dict[str, Any] | None) -> StreamOffset | None:
    """An offset of this project's source; None if it belongs to another one."""
    try:
        return None if fields is None or "queues" not in fields else StreamOffset.from_json(fields)
    except ConfigError:
        return None


# ---- a copy that is rewound


def left_out(path: str, name: str, batch_id: int) -> bool:
    """Whether a file is left out of a copy that is rewound so that a batch runs again.

    Parameters
    ----------
    path : str
        The folder of the file, relative to the checkpoint.
    name : str
        Its name; a checksum goes with its file.
    """
    while name.endswith(".crc"):
        name = name.removesuffix(".crc").removeprefix(".")
    parts = path.split(os.sep)
    if path in ("offsets", "commits"):
        return name.isdecimal() and int(name) >= batch_id + (path == "offsets")
    if parts[0] == "state" and len(parts) > 2 and parts[-1] not in ("_metadata", "SSTs"):
        match = _STATE_FILE.fullmatch(name)
        return match is not None and int(match[1]) > batch_id
    return False


def files_of(checkpoint: Checkpoint, batch_id: int) -> tuple[list[str], list[str]]:
    """The files of a checkpoint that a rewound copy takes over, and those that it leaves out, as relative paths.

    Raises
    ------
    ConfigError
        There is a link or another thing that is neither a file nor a folder.
    """
    kept: list[str] = []
    dropped: list[str] = []
    for folder, folders, names in os.walk(checkpoint.path):
        below = os.path.relpath(folder, checkpoint.path)
        for name in names:
            where = os.path.join(folder, name)
            if os.path.islink(where) or not os.path.isfile(where):
                raise _no_file(where)
            (dropped if left_out(below, name, batch_id) else kept).append(os.path.normpath(os.path.join(below, name)))
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                raise _no_file(os.path.join(folder, name))
    return sorted(kept), sorted(dropped)


def _no_file(where: str) -> ConfigError:
    return ConfigError(
        f"{where}: found a link, or something that is neither a file nor a folder; Spark does not make such things in "
        "a checkpoint. Put what it stands for in its place",
        key="CHECKPOINT",
        value=where,
    )


def copy_rewound(
    checkpoint: Checkpoint, batch_id: int, target: str, progress: Callable[[int, int], None] | None = None
) -> int:
    """Copy a checkpoint as it was before a batch, and return the number of bytes.

    The copy gets its name when it is complete and on the disk, so a copy that was killed is not taken for one.

    Parameters
    ----------
    target : str
        A folder that does not exist yet, or is empty.
    progress : function of (int, int), optional
        It is called with the bytes that are done, and all of them.

    Raises
    ------
    ConfigError
        The target exists, or lies within the checkpoint; or a query wrote to the checkpoint meanwhile.
    """
    target = os.path.abspath(target)
    if os.path.lexists(target) and (not os.path.isdir(target) or os.path.islink(target) or os.listdir(target)):
        raise ConfigError(f"--to: {target} exists already. Give a folder that does not exist", key="--to", value=target)
    if os.path.commonpath([os.path.realpath(target), os.path.realpath(checkpoint.path)]) == os.path.realpath(
        checkpoint.path
    ):
        raise ConfigError(f"--to: {target} lies within the checkpoint. Give another folder", key="--to", value=target)
    before = _standing(checkpoint.path)
    kept, _ = files_of(checkpoint, batch_id)
    total = sum(os.path.getsize(os.path.join(checkpoint.path, each)) for each in kept)
    parent, name = os.path.split(target)
    os.makedirs(parent, exist_ok=True)
    partial = tempfile.mkdtemp(prefix=f".{name}.partial-", dir=parent)
    try:
        done = 0
        for folder, _, _ in os.walk(checkpoint.path):  # Spark expects empty folders, too
            os.makedirs(os.path.join(partial, os.path.relpath(folder, checkpoint.path)), exist_ok=True)
        for each in kept:
            done = _copy(os.path.join(checkpoint.path, each), os.path.join(partial, each), done, total, progress)
        if _standing(checkpoint.path) != before:
            raise ConfigError(
                f"{checkpoint.path}: the checkpoint changed while it was copied: the query is running. Stop it, then "
                "try again",
                key="CHECKPOINT",
                value=checkpoint.path,
            )
        shutil.copystat(checkpoint.path, partial)
        for folder, _, _ in os.walk(partial, topdown=False):
            _sync(folder)
        os.rename(partial, target)
        _sync(parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return total


def _standing(path: str) -> list[tuple[str, int, int]]:
    """What changes in a checkpoint while its query runs."""
    found = []
    for name in ("offsets", "commits"):
        folder = os.path.join(path, name)
        for each in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            stat = os.stat(os.path.join(folder, each))
            found.append((f"{name}/{each}", stat.st_size, stat.st_mtime_ns))
    return found


def _copy(source: str, target: str, done: int, total: int, progress: Callable[[int, int], None] | None) -> int:
    with open(source, "rb") as read, open(target, "xb") as written:
        while data := read.read(_COPY_SIZE):
            written.write(data)
            done += len(data)
            if progress is not None:
                progress(done, total)
        written.flush()
        os.fsync(written.fileno())
    shutil.copystat(source, target)
    return done


def _sync(folder: str) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
