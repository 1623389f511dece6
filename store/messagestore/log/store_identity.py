"""Establishes the identity of a store that a writer takes over.

`spark/store.json` holds the identity. If it is missing, it is replaced from the journal, which has a copy of the whole
identity, or from `abort`, which has the id. If all of `spark/` is missing, the folder is a copy (a RocketMQ slave after
a failover), a store that lost `spark/`, or a store that only a broker wrote. The log is then searched for BATCH
records. The store gets a new id, and the ids in its BATCH records become its ancestors, so their batches are known
here, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from typing import NamedTuple

from messagestore.errors import CorruptionError
from messagestore.files.consume_queue import list_queues
from messagestore.files.disk import Disk
from messagestore.format.config import StoreConfig
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.batch_search import all_batches, batches_of_log, is_sealed_batch
from messagestore.log.condition import CONDITIONS, Left
from messagestore.log.lost_end import end_of_queues, lost_end
from messagestore.log.store_files import (
    ABORT_WORD,
    Identity,
    Paths,
    StoreFiles,
    new_identity,
    sizes_of_files,
    write_identity,
)
from messagestore.log.walk import Depth, Walk
from messagestore.signal_handlers import pass_on

SEARCHED_SIZE = 4 << 30
"""This much of the newest log is searched for BATCH records if nothing else says whether there are any."""
_TOLD_SIZE = 256 << 20
"""A search of more than this many bytes is announced."""
_log = logging.getLogger(__name__)


class Established(NamedTuple):
    """The identity that was established, and how.

    Parameters
    ----------
    identity : Identity
    notes : list of str
        Messages for an operator.
    first : bool
        This project has never written here.
    searched_whole : bool
        False: `first` holds only for the newest `SEARCHED_SIZE` of the log; older parts were not searched.
    """

    identity: Identity
    notes: list[str]
    first: bool = False
    searched_whole: bool = True


def establish(disk: Disk, paths: Paths, config: StoreConfig, *, accept_loss: bool = False) -> Established:
    """Return the identity of a store; it is created if there is none.

    Parameters
    ----------
    disk : Disk
    paths : Paths
        The caller is attached and holds the writer lock.
    config : StoreConfig
        Gives the sizes and index slots of a store that has no files yet, and the index slots of one whose `store.json`
        is lost.
    accept_loss : bool
        Accept a log whose end is lost as it is.

    Raises
    ------
    CorruptionError
        `store.json` is damaged, the log and the index contradict it, or the end of the log is lost. Nothing was
        written.
    """
    identity = Identity.read(disk, paths.identity)
    journal = BatchJournal.read(disk, paths.journal)
    copied = _copy_of(journal, paths)
    if identity is not None:
        return Established(identity, [])
    if copied is not None:
        write_identity(disk, paths, copied)
        return Established(copied, [f"{paths.identity} was missing and was rebuilt from {paths.journal}"])
    return _made_again(disk, paths, config, accept_loss=accept_loss)


def _copy_of(journal: BatchJournal, paths: Paths) -> Identity | None:
    """Return the journal's copy of the identity; None if it has none."""
    try:
        return Identity.from_fields(journal.identity) if journal.identity else None
    except (ValueError, KeyError, TypeError) as error:
        pass_on(error)
        raise CorruptionError(paths.journal, 0, "a copy of the store's identity", repr(error)) from error


def _made_again(disk: Disk, paths: Paths, config: StoreConfig, *, accept_loss: bool) -> Established:
    """Establish the identity without `store.json` and without a journal that has a copy of it."""
    config = sizes_of_files(disk, paths, config)

    with contextlib.closing(StoreFiles(paths, config, None, disk)) as files:
        files.commit_log.load()
        token = re.fullmatch(f"{ABORT_WORD} ([0-9a-f]{{32}})", files.read_abort() or "")
        left = disk.exists(paths.state) or disk.exists(paths.journal)
        ids, not_searched = _ids_in_log(files, was_here=bool(token or left), accept_loss=accept_loss)

    first = not (token or left or ids)
    store_id = token[1] if token and left else ""
    ancestors = ids | ({token[1]} if token else set())
    identity = new_identity(config, store_id, ancestors)

    _check_index(files, rebuild=not first)
    write_identity(disk, paths, identity)

    notes = [not_searched] if not_searched else []
    if first:
        return Established(identity, notes, first=True, searched_whole=not not_searched)
    how = f" with the id in `abort`, {store_id}" if store_id else f": {_new_id_words(identity)}"
    return Established(identity, [f"{paths.identity} was missing and was rebuilt{how}", *notes])


def _ids_in_log(files: StoreFiles, *, was_here: bool, accept_loss: bool) -> tuple[set[str], str]:
    """Return the store ids of the BATCH records in the log, and a note as `_search` does.

    `was_here` says that other files prove that this project has written here.

    Raises
    ------
    CorruptionError
        A BATCH record is damaged, or the end of the log is lost.
    """
    if not files.commit_log.offsets:
        return set(), ""
    if files.read_abort() is None and not accept_loss:
        _refuse_lost_end(files)
    queues = list_queues(files.disk, files.paths.root)[0]
    if was_here or not queues or BATCH_TOPIC in queues:
        return {batch.store_id for batch in all_batches(files, _end_of_log(files))}, ""
    return _search(files)


def _refuse_lost_end(files: StoreFiles) -> None:
    """Refuse a log whose end is lost before it gets an id, because the batches in the missing part have ids, too."""
    end = end_of_queues(files)
    lost = lost_end(
        files, end.physical_offset, end.last_store_timestamp_ms, BatchJournal(), CONDITIONS[Left.CLOSED_BY_SOMEBODY]
    )
    if lost is not None and _end_of_log(files) < lost.known_end:
        raise lost.error()


def _search(files: StoreFiles) -> tuple[set[str], str]:
    """Return the store ids of the BATCH records in the log of a store that has queues, but no queue of BATCH records.

    Either only a broker wrote it, or it has lost the folder spark/ and that queue; only the log can show which. If the
    log is longer than `SEARCHED_SIZE`, its newest part is searched, and all of it if a BATCH record is found there.

    Returns
    -------
    ids : set of str
    note : str
        What was not searched, and what follows from that; empty if everything was searched.

    Raises
    ------
    CorruptionError
        A BATCH record is damaged.
    """
    log, begun_s = files.commit_log, time.monotonic()
    end, start = _end_of_log(files), log.min_offset
    if end - start > SEARCHED_SIZE:
        start = log.segment_of(end - SEARCHED_SIZE)

    if end - start > _TOLD_SIZE:
        _log.warning(
            "%s: the store has no folder spark/ and no queue of %s, so its newest %d MiB of log are searched for "
            "batches, once",
            files.paths.root,
            BATCH_TOPIC,
            (end - start) >> 20,
        )

    ids: set[str] = set()
    why = f"only the newest {(end - start) >> 20} of {(end - log.min_offset) >> 20} MiB of log were searched"
    whole = start == log.min_offset

    try:
        for batch in batches_of_log(log, start, end):
            ids.add(batch.store_id)
        if ids and not whole:
            ids |= {batch.store_id for batch in batches_of_log(log, log.min_offset, start)}
            whole = True
    except CorruptionError as error:
        if ids or is_sealed_batch(log, error.physical_offset):
            raise
        whole, why = False, f"the search of the log ended at damage ({error.path}, offset {error.physical_offset})"

    if end - start > _TOLD_SIZE:
        took_s = time.monotonic() - begun_s
        result = "found BATCH records" if ids else "found no BATCH record"
        _log.warning("%s: the search took %.0f s and %s", files.paths.root, took_s, result)

    if whole:
        return ids, ""
    return ids, (
        f"no batch of this project was found, and {why}. An app whose batches are not known must begin with version 0, "
        "or with the version that was set with `messagestore batches start`"
    )


def _new_id_words(identity: Identity) -> str:
    if not identity.ancestors:
        return f"nothing proves the store's earlier id, so it got a new one, {identity.store_id}"
    return (
        f"the store is a copy and got a new id, {identity.store_id}; the batches of store "
        f"{', '.join(identity.ancestors)} in it stay known"
    )


def _end_of_log(files: StoreFiles) -> int:
    """Return where the records of the log end."""
    log = files.commit_log
    for segment in reversed(log.offsets):  # the last ones may be empty, because a broker makes them ahead
        walk = Walk(log, segment, depth=Depth.FRAMING)
        for _ in walk:
            pass
        if walk.position > segment:
            return walk.position
    return log.min_offset


def _check_index(files: StoreFiles, *, rebuild: bool) -> None:
    """Check that index files have the size that the settings give.

    If the settings of one of our own stores are lost, its index files are removed, and recovery rebuilds them.
    """
    disk, folder = files.disk, files.paths.index
    try:
        if files.index is not None:
            files.index.load()
    except CorruptionError:
        if not rebuild:
            raise
        for name in disk.names(folder):
            path = os.path.join(folder, name)
            if not disk.is_folder(path):
                disk.unlink(path)
        disk.fsync_dir(folder)
