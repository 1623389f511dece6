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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from messagestore import ConfigError, CorruptionError
from messagestore.spi import bounded_json
from pyspark_messagestore.checkpoint.files import Folder, Standing
from pyspark_messagestore.source.offsets import StreamOffset

_MOST_METADATA = 64 * 1024
_MOST_FILE = 16 * 1024 * 1024
_MOST_BYTES = 128 * 1024 * 1024
"""The most bytes of one file of a batch, and of all of them. Offsets of 32 000 queues take half a megabyte, and
are some 100 000 values where a query ends by itself."""
_MOST_VALUES = 500_000
_LATEST_MS = (1 << 63) - 1
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_STATE_FILE = re.compile(r"([0-9]+)(?:_([0-9a-fA-F-]{36}))?\.(delta|snapshot|zip|changelog)")
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
    fault, commit_fault : str
        What is wrong with its file in `offsets`, and in `commits`; empty if it could be read, or is not there.
    """

    batch_id: int
    committed: bool
    planned_at_ms: int | None = None
    offsets: tuple[dict[str, Any] | None, ...] = ()
    fault: str = ""
    commit_fault: str = ""


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

    @cached_property
    def loadable(self) -> set[int]:
        """The versions that can be loaded: whole ones, and changes without a gap behind one of these or behind 0."""
        loadable = {0}
        for version in sorted({*self.whole, *self.changes}):
            if version in self.whole or version - 1 in loadable:
                loadable.add(version)
        return loadable

    def lacks(self, version: int, ids: set[str]) -> str:
        """Why a version cannot be loaded; empty if it can.

        Parameters
        ----------
        ids : set of str
            The ids that the commit of the batch before names; empty if it names none.
        """
        if version == 0:
            return ""
        if version not in self.loadable:
            missing = max(loaded for loaded in self.loadable if loaded < version) + 1
            return f"{self.path} has no version {missing}"
        ids_here = self.whole.get(version, set()) | self.changes.get(version, set())
        if ids and ids_here - {""} and not ids_here & ids:
            return f"{self.path} has version {version} of another attempt only"
        return ""


@dataclass(frozen=True)
class Progress:
    """How far a query has come.

    Parameters
    ----------
    path : str
    query_id : str
    batches : tuple of Batch
        In order: those that were read of the checkpoint.
    """

    path: str
    query_id: str
    batches: tuple[Batch, ...]

    @property
    def committed(self) -> Batch | None:
        """The newest batch that is done."""
        return next((batch for batch in reversed(self.batches) if batch.committed), None)

    @property
    def next_batch_id(self) -> int:
        """The batch that the query runs first when it starts."""
        return 0 if not self.batches else self.batches[-1].batch_id + self.batches[-1].committed


@dataclass(frozen=True)
class Checkpoint(Progress):
    """The checkpoint of a query: all batches that it still holds, and their state.

    Parameters
    ----------
    state : tuple of StateFolder
        Empty for a query without state.
    state_ids : dict of int to set of str
        The ids of state that the commit of a batch names.
    """

    state: tuple[StateFolder, ...]
    state_ids: dict[int, set[str]]

    @cached_property
    def _by_id(self) -> dict[int, Batch]:
        return {batch.batch_id: batch for batch in self.batches}

    def rewind_fault(self, batch_id: int) -> str:
        """Why the query cannot be rewound so that it runs a batch again; empty if it can."""
        by_id = self._by_id
        if batch_id >= self.next_batch_id:
            return f"batch {batch_id} is not done: it runs without a rewind"
        if batch_id not in by_id or (batch_id and batch_id - 1 not in by_id):
            return f"the checkpoint no longer holds the offsets at which batch {batch_id} begins and ends"

        for number in (batch_id - 1, batch_id):
            if number >= 0 and by_id[number].fault:
                return by_id[number].fault
        if batch_id and not by_id[batch_id - 1].committed:
            return f"batch {batch_id - 1} before it is not done"

        ids = self.state_ids.get(batch_id - 1, set())
        faults = (folder.lacks(batch_id, ids) for folder in self.state)
        fault = next((fault for fault in faults if fault), "")
        return f"the state before batch {batch_id} is gone: {fault}" if fault else ""

    @cached_property
    def rewindable(self) -> list[int]:
        """The batches from which the query can run again."""
        held = set(self._by_id)
        for folder in self.state:  # this keeps what follows in proportion to the files that there are
            held &= folder.loadable
        return [batch_id for batch_id in sorted(held) if not self.rewind_fault(batch_id)]


# ---- reading


def read_checkpoint(path: str) -> Checkpoint:
    """Read a checkpoint.

    Raises
    ------
    ConfigError
        The folder is no checkpoint of a streaming query, or there is something in it that Spark does not make.
    CorruptionError
        The file `metadata` is damaged.
    """
    with _opened(path) as folder:
        reader = _Reader(folder, _query_id(folder))
        batches = [reader.batch(batch_id) for batch_id in reader.planned]
        return Checkpoint(folder.path, reader.query_id, tuple(batches), tuple(_state_folders(folder)), reader.state_ids)


def read_progress(path: str, least: int = 1) -> Progress:
    """Read the newest batch of a checkpoint that is done, and those behind it. Whatever else it holds is not touched.

    Parameters
    ----------
    least : int
        Read so many batches if the checkpoint has them, also older ones.

    Raises
    ------
    ConfigError
        The folder is no checkpoint of a streaming query, or there is something in it that Spark does not make.
    CorruptionError
        The file `metadata` is damaged.
    """
    with _opened(path) as folder:
        reader = _Reader(folder, _query_id(folder))
        batches: list[Batch] = []
        for batch_id in reversed(reader.planned):
            batches.append(reader.batch(batch_id))
            if len(batches) >= least and any(batch.committed for batch in batches):
                break
        return Progress(folder.path, reader.query_id, tuple(reversed(batches)))


def _opened(path: str) -> Folder:
    path = os.path.abspath(path)
    if os.path.isdir(path):
        folder = Folder.open(path)
        if folder.holds("metadata") and folder.holds("offsets"):
            return folder
        folder.close()

    raise ConfigError(
        f"{path}: found no checkpoint of a streaming query (a file metadata and a folder offsets). Give the folder "
        "that is the query's checkpointLocation",
        key="CHECKPOINT",
        value=path,
    )


def _query_id(folder: Folder) -> str:
    data = folder.read("metadata", _MOST_METADATA)
    try:
        query_id = _json(data)["id"]
        if not isinstance(query_id, str):
            raise TypeError("an id that is no text")
        return query_id
    except (ValueError, KeyError, TypeError) as error:
        metadata = os.path.join(folder.path, "metadata")
        hint = "Restore the file from a copy; without it the query gets a new id."
        raise CorruptionError(metadata, 0, "the id of a query", _reason(error), hint=hint) from None


class _Reader:
    """Reads the files of batches, and no more of them than fits into memory.

    Parameters
    ----------
    folder : Folder
        The checkpoint.
    """

    def __init__(self, folder: Folder, query_id: str) -> None:
        self.query_id = query_id
        self.state_ids: dict[int, set[str]] = {}
        self._folder = folder
        self._left = _MOST_BYTES
        self.planned = _numbered(folder, "offsets")
        self._done = set(_numbered(folder, "commits"))

    def batch(self, batch_id: int) -> Batch:
        """Read the two files of a batch.

        Raises
        ------
        ConfigError
            Those that were read have more bytes than fit into memory.
        """
        if self._left < 0:
            raise ConfigError(
                f"{self._folder.path}: the files in offsets and commits have more than {_MOST_BYTES:,} bytes; at most "
                "that many are read, as Spark writes less. Give the folder that is the query's checkpointLocation",
                key="CHECKPOINT",
                value=self._folder.path,
            )

        committed, fault = False, ""
        if batch_id in self._done:
            committed, fault = self._commit(batch_id)

        try:
            planned_at_ms, offsets = _planned(self._read("offsets", batch_id))
            return Batch(batch_id, committed, planned_at_ms, offsets, commit_fault=fault)
        except _UNREADABLE as error:
            return Batch(batch_id, committed, fault=self._fault("offsets", batch_id, error), commit_fault=fault)

    def _commit(self, batch_id: int) -> tuple[bool, str]:
        try:
            self.state_ids[batch_id] = _ids_of(self._read("commits", batch_id))
        except _UNREADABLE as error:
            return False, self._fault("commits", batch_id, error)
        return True, ""

    def _read(self, name: str, batch_id: int) -> bytes:
        with self._folder.below(name) as folder:
            data = folder.read(str(batch_id), _MOST_FILE)
        self._left -= len(data)
        return data

    def _fault(self, name: str, batch_id: int, error: Exception) -> str:
        if isinstance(error, ConfigError):
            return str(error)
        return f"{os.path.join(self._folder.path, name, str(batch_id))} cannot be read ({_reason(error)})"


_UNREADABLE = (ConfigError, ValueError, TypeError, AttributeError)


def _reason(error: Exception) -> str:
    """What is wrong with a text, without a word of it: the file may be somebody else's by a name of its own."""
    if isinstance(error, UnicodeError):
        return "not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error.msg}"
    if isinstance(error, KeyError):
        return f"no field {error}"
    return str(error)


def _json(data: bytes | str) -> Any:
    return bounded_json(data if isinstance(data, str) else data.decode("utf-8"), _MOST_VALUES)


def _numbered(folder: Folder, *names: str) -> list[int]:
    """The numbers that are names in a folder below another one; none if there is no such folder."""
    name, *further = names
    if not folder.holds(name):
        return []
    with folder.below(name) as inner:
        if further:
            return _numbered(inner, *further)
        return sorted(int(number) for number in inner.names() if _NUMBER.fullmatch(number))


def _planned(data: bytes) -> tuple[int | None, tuple[dict[str, Any] | None, ...]]:
    """When a batch was planned, and the offset of each source."""
    version, settings, *lines = data.decode("utf-8").split("\n")
    if version not in ("v1", "v2"):
        raise ValueError("its first line is neither v1 nor v2")

    planned = _json(settings).get("batchTimestampMs") if settings else None
    if planned is not None and (type(planned) is not int or not 0 <= planned <= _LATEST_MS):
        raise ValueError("batchTimestampMs is no time")

    if version == "v2":
        by_source = dict(line.split(":", 1) for line in lines if line)
        if set(by_source) != set(map(str, range(len(by_source)))):
            raise ValueError("sources with names")
        lines = [by_source[str(source)] for source in range(len(by_source))]

    offsets = tuple(_parsed(line) for line in lines)
    if not offsets:
        raise ValueError("no offset")
    return planned, offsets


def _parsed(line: str) -> dict[str, Any] | None:
    """An offset; one that is no JSON object, as of the rate source, has its text in the field `offset`."""
    if line == "-":
        return None
    value = _json(line)
    return value if isinstance(value, dict) else {"offset": value}


def _ids_of(data: bytes) -> set[str]:
    """The ids of state that a commit file names."""
    version, _, text = data.decode("utf-8").partition("\n")
    if not re.fullmatch(r"v[0-9]+", version):
        raise ValueError("its first line is no version")

    ids: set[str] = set()
    waiting: list[Any] = [_json(text).get("stateUniqueIds") if text else None]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            ids.add(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return ids


def _state_folders(checkpoint: Folder) -> Iterator[StateFolder]:
    """The folders of all state stores. A partition without any file is one that lacks every version."""
    for operator in _numbered(checkpoint, "state"):
        with checkpoint.below("state") as state, state.below(str(operator)) as stores:
            for partition in _numbered(state, str(operator)):
                own = os.path.join("state", str(operator), str(partition))
                with stores.below(str(partition)) as folder:
                    inner = [name for name in folder.entries()[0] if name not in ("_metadata", "SSTs")]
                    for name in inner:
                        with folder.below(name) as store:
                            yield _state_folder(os.path.join(own, name), store)
                    if not inner:
                        yield _state_folder(own, folder)


def _state_folder(path: str, files: Folder) -> StateFolder:
    folder = StateFolder(path)
    for name in files.names():
        match = _STATE_FILE.fullmatch(name)
        if match is not None:
            kind = folder.whole if match[3] in _WHOLE else folder.changes
            kind.setdefault(int(match[1]), set()).add(match[2] or "")
    return folder


def stream_offset(fields: dict[str, Any] | None) -> StreamOffset | None:
    """An offset of this project's source; None if it belongs to another one."""
    try:
        return None if fields is None or "queues" not in fields else StreamOffset.from_json(fields)
    except ConfigError:
        return None


# ---- a copy that is rewound


def left_out(path: str, name: str, batch_id: int) -> bool:
    """Whether a rewound copy leaves out a file, so that a batch runs again.

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


@dataclass(frozen=True)
class _Survey:
    """What a rewound copy consists of: the files that it takes over and those that it leaves out, by relative paths."""

    kept: dict[str, Standing] = field(default_factory=dict)
    dropped: dict[str, Standing] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


def _survey(folder: Folder, batch_id: int) -> _Survey:
    survey = _Survey()

    def look(here: Folder, path: str) -> None:
        folders, files = here.entries()
        for name in files:
            side = survey.dropped if left_out(path, name, batch_id) else survey.kept
            side[os.path.normpath(os.path.join(path, name))] = here.standing(name)
        for name in folders:
            inner = os.path.normpath(os.path.join(path, name))
            survey.folders.append(inner)
            with here.below(name) as below:
                look(below, inner)

    look(folder, ".")
    return survey


def files_of(checkpoint: Checkpoint, batch_id: int) -> tuple[list[str], list[str]]:
    """The files of a checkpoint that a rewound copy takes over, and those that it leaves out, as relative paths.

    Raises
    ------
    ConfigError
        There is a link or another thing that is neither a file nor a folder.
    """
    with Folder.open(checkpoint.path) as folder:
        survey = _survey(folder, batch_id)
    return sorted(survey.kept), sorted(survey.dropped)


def copy_rewound(
    checkpoint: Checkpoint, batch_id: int, target: str, progress: Callable[[int, int], None] | None = None
) -> int:
    """Copy a checkpoint as it was before a batch, and return the number of bytes.

    The copy gets its name when it is complete and on the disk, so a copy that was killed is not taken for one. Until
    then only this user may enter it; then it belongs to whom the original belongs, and gives nobody more than that.

    Parameters
    ----------
    target : str
        A folder that does not exist yet, or is empty.
    progress : function of (int, int), optional
        It is called with the bytes that are done, and all of them.

    Raises
    ------
    ConfigError
        The target exists, or lies within the checkpoint, or has no room; somebody wrote to the checkpoint meanwhile;
        there is a link or another thing that is neither a file nor a folder.
    """
    target = os.path.abspath(target)
    if os.path.lexists(target) and (not os.path.isdir(target) or os.path.islink(target) or os.listdir(target)):
        raise ConfigError(f"--to: {target} exists already. Give a folder that does not exist", key="--to", value=target)

    # The target may lie within the checkpoint by way of a link.
    if os.path.commonpath([os.path.realpath(target), os.path.realpath(checkpoint.path)]) == os.path.realpath(
        checkpoint.path
    ):
        raise ConfigError(f"--to: {target} lies within the checkpoint. Give another folder", key="--to", value=target)

    with Folder.open(checkpoint.path) as source:
        plan = _survey(source, batch_id)
        total = sum(standing.size for standing in plan.kept.values())

        parent, name = os.path.split(target)
        os.makedirs(parent, exist_ok=True)
        with Folder.open(parent) as above:
            _check_room(above, total)
            with above.new_copy(name) as copy:
                _copy_folder(source, copy, plan, "", _Counter(total, progress))
                # What changed in a folder after it was copied shows only now.
                if _survey(source, batch_id) != plan:
                    raise _changed(source.path)
    return total


def _check_room(folder: Folder, size: int) -> None:
    file_system = os.statvfs(folder.fd)
    free = file_system.f_bavail * file_system.f_frsize
    if size > free:
        raise ConfigError(
            f"--to: the copy takes {size:,} bytes, and {folder.path} has {free:,} free. Give a folder with more room",
            key="--to",
            value=folder.path,
        )


def _changed(path: str) -> ConfigError:
    return ConfigError(
        f"{path}: the checkpoint changed while it was copied: the query is running. Stop it, then try again",
        key="CHECKPOINT",
        value=path,
    )


class _Counter:
    """Tells how much of a copy is done."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def add(self, size: int) -> None:
        self._done += size
        if size and self._progress is not None:
            self._progress(self._done, self._total)


def _copy_folder(source: Folder, target: Folder, plan: _Survey, path: str, counter: _Counter) -> None:
    """Copy what the plan keeps. Spark expects empty folders, too."""
    folders, files = source.entries()
    for name in files:
        own = os.path.join(path, name)
        if own in plan.kept:
            _copy(source, target, name, plan.kept[own], counter)
        elif own not in plan.dropped:
            raise _changed(source.path)

    for name in folders:
        with source.below(name) as inner, target.new_folder(name) as made:
            _copy_folder(inner, made, plan, os.path.join(path, name), counter)
    target.finish(source)


def _copy(source: Folder, target: Folder, name: str, planned: Standing, counter: _Counter) -> None:
    """Copy a file, if it is the one that was planned."""
    for size, standing in source.copy_file(name, target):
        if standing != planned:
            raise _changed(source.path)
        counter.add(size)
