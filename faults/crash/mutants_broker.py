"""Bugs planted where a writer and a starting broker meet, and where a writer is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

from crash import brokers
from crash.planting import Mutant, many, patched, without
from messagestore import session as attached_store
from messagestore.files.disk import Disk
from messagestore.files.writer_lock import Attachment
from messagestore.log import refusals
from messagestore.log.store_files import Paths
from messagestore.session import AttachedStore
from messagestore.writer.log_writer import LogWriter


def only_behind_its_own_folder(real: Any) -> Any:
    def refuse(disk: Disk, paths: Paths) -> None:
        if disk.is_folder(paths.spark):
            real(disk, paths)

    return refuse


def lets_go_at_once(real: Any) -> Any:
    def make_way(store: AttachedStore) -> None:
        with mock.patch.object(AttachedStore, "_tidy"):
            real(store)

    return make_way


MUTANTS: tuple[Mutant, ...] = (
    Mutant("a writer attaches though a broker has the lock file open", without(Attachment, "_lease", True), "brokers", many(brokers.starts)),
    Mutant("nobody looks whether a broker waits", without(Attachment, "broker_waits", False), "ways", many(brokers.ways)),
    Mutant("an append does not look whether a broker waits", without(LogWriter, "check_turn"), "ways", many(brokers.ways)),
    Mutant("a put into a store that was closed for a broker does not look", without(LogWriter, "watch_turn"), "ways", many(brokers.ways)),
    Mutant("a broker gets in before the store is closed", patched(AttachedStore, "_make_way", lets_go_at_once), "ways", many(brokers.ways)),
    Mutant("a lease that the kernel took away is believed", without(Attachment, "overrun", False), "stalls", many(brokers.stalls)),
    Mutant("a writer that is refused has made its folder", patched(refusals, "refuse_foreign_forms", only_behind_its_own_folder), "refusals", many(brokers.refusals)),
    Mutant("a broker that keeps its groups in RocksDB is taken for one without", without(refusals, "why_in_rocksdb", None), "refusals", many(brokers.refusals)),
    Mutant("the sizes of a broker's files are guessed", without(refusals, "refuse_to_guess_sizes"), "refusals", many(brokers.refusals)),
    Mutant("a worker that is told to end leaves the store open", without(attached_store._Ending, "install"), "ends", many(brokers.ends)),
    Mutant("a broker's settings forbid nothing", without(refusals, "refuse_broker_settings"), "refusals", many(brokers.refusals)),
)  # fmt: skip
