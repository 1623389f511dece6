"""Bugs planted where sessions share a process, and where a store's folder is moved under them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from crash import interrupts, sessions, strangers
from crash.interrupts import Unknown
from crash.judge import Verdict
from crash.mutants_numbers import named
from crash.planting import Ground, Mutant, Search, patched, without
from messagestore import BatchRequest, MessageColumns, MessageStore, StoreConfig, StoreError, StorePoisonedError
from messagestore import session as attached_store
from messagestore.batches import append as transaction
from messagestore.files import disk as disk_module
from messagestore.files import store_root
from messagestore.files.disk import Disk, File
from messagestore.format import batch_record
from messagestore.session import AttachedStore
from messagestore.writer import standing

_ROWS = {"body": [b"1"], "topic": ["t"], "queue_id": [0]}


def the_last_one_counts(_: Any) -> Any:
    """Whoever comes brings his settings, and everybody has them."""

    def take_settings(store: AttachedStore, config: StoreConfig) -> None:
        store.config = config
        if store.writer is not None:
            store.writer.files.config = config

    return take_settings


def nothing_is_closed(real: Any) -> Any:
    """Another query's settings are taken over while the batch of the one before is not synced."""

    def take_settings(store: AttachedStore, config: StoreConfig) -> None:
        store.detach = lambda: None  # type: ignore[method-assign]
        try:
            real(store, config)
        finally:
            del store.detach

    return take_settings


def a_folder_that_moves(folder: Any) -> None:
    folder.mkdir()
    strangers.CASES["a folder moved under a session"](folder)


def takes_the_answer(_: Any) -> Any:
    """What a rename answers is what has happened."""

    def rename(disk: Disk, file: File, path: str) -> None:
        disk.rename(file.path, path)

    return rename


class Full(OSError):
    """An error with a number that a signal handler raises."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.ENOSPC, text)


def interrupted(story: str, *modules: str, error: type[BaseException] = TimeoutError) -> Search:
    """A story of the interrupts, with what a signal handler raises before each line of some modules."""

    def search(ground: Ground) -> Iterator[Verdict]:
        base = ground.bases["filled"]
        for line, hit, _ in interrupts.cases(interrupts.lines(story, base, ground.root)):
            if line[0] in modules:
                interrupter = interrupts.Interrupter(line, hit, error)
                yield interrupts.check(story, base, ground.root, interrupter, power_cut=False)

    return search


def sent_again(ground: Ground) -> Iterator[Verdict]:
    """A batch that the store holds is sent again, and a handler raises an error while its record is read."""
    request, rows = BatchRequest(app_id="app", version=0), MessageColumns.from_arrow(pa.table(_ROWS))
    root = ground.folder / "sent-again"

    def send(interrupter: interrupts.Interrupter) -> Verdict:
        with contextlib.suppress(Unknown, StorePoisonedError), MessageStore.open(root) as store, interrupter.armed():
            store.append_batch([rows], request)
        with MessageStore.open_read_only(root) as store:
            return Verdict(duplicated=["the batch"] * (store.max_offset("t", 0) > 1))

    send(interrupts.Interrupter())
    lines = interrupts.Interrupter()
    yield send(lines)
    for line in sorted(line for line in lines.hits if line[0] == "batch_record"):
        yield send(interrupts.Interrupter(line, 1, Unknown))


def knows_interrupts_by_class(_: Any) -> Any:
    """Whatever is an `Exception` is a failure that says what it has done."""
    return lambda error: isinstance(error, Exception) and not isinstance(error, MemoryError)


def knows_interrupts_by_number(_: Any) -> Any:
    """Every error with a number is one of the system."""
    return lambda error: isinstance(error, StoreError) or (isinstance(error, OSError) and error.errno is not None)


def lets_go_once(_: Any) -> Any:
    """Letting go that was interrupted is left as it is."""

    def drop(store: AttachedStore, why: Any = None) -> None:
        store._drop_once(why or store._closed)

    return drop


def keeps_sessions(_: Any) -> Any:
    """A session that nobody can close any more stays open."""
    return SimpleNamespace(ref=lambda session: lambda: session)


MUTANTS = (
    Mutant("an exception of a signal handler counts as a failed put", patched(standing, "is_failure", knows_interrupts_by_class), "interrupts", interrupted("puts", "log_writer")),
    Mutant("an error with a number of a signal handler counts as the disk's", patched(standing, "is_failure", knows_interrupts_by_number), "interrupts", interrupted("puts", "log_writer", error=Full)),
    Mutant("what a signal handler raises while a record is read counts as damage of the record", without(batch_record, "pass_on"), "a batch that is sent again", sent_again),
    Mutant("letting go of a store is not finished after an interrupt", patched(AttachedStore, "_drop", lets_go_once), "interrupts", interrupted("opened again", "session", "store_locks", "store_files")),
    Mutant("a session that an interrupt has lost stays open", patched(attached_store, "weakref", keeps_sessions), "interrupts", interrupted("opened again", "session", "message_store")),
    Mutant("a rename that answered with an error counts as failed", patched(disk_module, "_rename", takes_the_answer), "fuzz: renames that answer with an error", named(sessions.renames_that_answer_with_an_error)),
    Mutant("a batch is written whether or not its queues can be made", without(transaction, "_check_names"), "fuzz: few inodes", named(sessions.few_names)),
    Mutant("whoever may read a store may lock it", patched(store_root, "of_writers", lambda _: lambda mode: mode), "fuzz: locks of readers", named(sessions.locks_of_readers)),
    Mutant("a session acts in whatever folder is at its path", without(Disk, "hold_root"), "fuzz: a folder moved under a session", named(a_folder_that_moves)),
    Mutant("a second session changes the settings of the first", patched(AttachedStore, "_take_settings", the_last_one_counts), "fuzz: a second session", named(sessions.a_second_session)),
    Mutant("a commit takes over a store that waits to be synced for another one", patched(AttachedStore, "_take_settings", nothing_is_closed), "fuzz: commits by turns", named(sessions.commits_by_turns)),
)  # fmt: skip
