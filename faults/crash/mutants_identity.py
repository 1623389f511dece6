"""Bugs planted where a store records its identity, and which batches it holds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from crash import replays
from crash.flips import Damage
from crash.harness import SMALL, Promise, append_encoded, die, run_steps
from crash.judge import Verdict
from crash.memdisk import MemDisk
from crash.planting import Case, Ground, Mutant, Search, patched, without
from crash.workloads import batch
from messagestore import SYNC_FLUSH, MessageStore
from messagestore.format.layout import JOURNAL_HEADER
from messagestore.format.record import crc32
from messagestore.log import batch_search, store_identity
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.batch_search import read_batch
from messagestore.log.store_files import Identity
from messagestore.recovery import apply, journal
from messagestore.recovery.examine import Examination


def replayed(*parts: str, anew: bool = False) -> Search:
    """Run the cases of the mode `replays` whose keys have some of these words.

    With `anew`, run them in stores that were written with the bug.
    """

    def judged(ground: Ground, kind: str, state: replays.State, damage: Damage, must_open: bool) -> Verdict:
        try:
            return replays.look_any(kind, state, ground.root, damage, must_open)[1]
        except (ArithmeticError, LookupError, TypeError) as error:
            return Verdict(misread=[repr(error)])

    def search(ground: Ground) -> Iterator[Case]:
        states = replays.make_states(ground.root) if anew else ground.states
        chosen = [case for case in replays.cases(states, ground.root, False) if any(part in case[1] for part in parts)]
        ground.chance.shuffle(chosen)
        for kind, _, state, damage, must_open in chosen:
            yield partial(judged, ground, kind, state, damage, must_open)

    return search


def small_journal(ground: Ground) -> Iterator[Verdict]:
    """The last batch of an app that has not written for a long time must still be known."""
    config, verdict = SMALL.replace(journal_retention=2), Verdict()
    disk = MemDisk(ground.root)
    steps = [("open",), batch(0, 2, app="old"), *(batch(version, 2) for version in range(4)), ("close",)]
    run_steps(ground.root, steps, disk, Promise(), config)
    die(ground.root)
    with MessageStore.open(ground.root, config, disk=disk) as store:
        if append_encoded(store, "old", 0, 2, SYNC_FLUSH) != "known":
            verdict.duplicated.append("the last batch of an old app was appended again")
    die(ground.root)
    yield verdict


def without_checksums(real: Any) -> Any:
    """The bytes are trusted as they are."""

    def from_bytes(data: bytes, path: str = "") -> BatchJournal:
        body = data[JOURNAL_HEADER.size :]
        at = JOURNAL_HEADER.offset("body_crc")
        head = data[:at] + crc32(body).to_bytes(4, "big") + data[at + 4 : JOURNAL_HEADER.offset("crc")]
        return real(head + crc32(head).to_bytes(4, "big") + body, path)  # type: ignore[no-any-return]

    return from_bytes


def newest_only(journal: BatchJournal, retention: int) -> None:
    journal._tidy()
    journal._keep(np.arange(max(0, len(journal) - retention), len(journal)))


def folders_that_are_there_are_whole(real: Any) -> Any:
    """A topic whose folder the repair has created counts as one that was never lost."""

    def rebuild_named(self: Any, end: int) -> None:
        there = self.files.queue_names()
        self.without_folder = [topic for topic in self.without_folder if topic not in there]
        real(self, end)

    return rebuild_named


MUTANTS: tuple[Mutant, ...] = (
    Mutant("the siblings of a queue with new records are not made again", patched(apply._Changes, "_rebuild_named", folders_that_are_there_are_whole), "replays", replayed("spark/journal+consumequeue/single")),
    Mutant("a BATCH record that cannot be read counts as gone", without(batch_search, "is_gone", True), "replays", replayed("the last BATCH record")),
    Mutant("a BATCH record that a unit names and that cannot be read is passed over", lambda: mock.patch.object(batch_search, "known_batch", read_batch), "replays", replayed(", no journal")),
    Mutant("the checksums of the journal are not compared", patched(BatchJournal, "from_bytes", without_checksums), "replays", replayed("spark/journal:")),
    Mutant("a journal that is missing or damaged is an empty one", without(journal, "all_batches", []), "replays", replayed("spark/journal")),
    Mutant("the batches of a copy are not looked for", without(store_identity, "all_batches", []), "replays", replayed("spark:missing")),
    Mutant("the batches of an ancestor are another store's", lambda: mock.patch.object(Identity, "known_ids", property(lambda identity: frozenset((identity.store_id,)))), "replays", replayed("spark:missing")),
    Mutant("a queue without a folder counts as deleted", without(Examination, "_lost_queues", []), "replays", replayed("consumequeue/single:missing")),
    Mutant("the journal forgets an app's last version", lambda: mock.patch.object(BatchJournal, "trim", newest_only), "a small journal", small_journal),
)  # fmt: skip
