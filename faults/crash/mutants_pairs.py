"""Bugs planted where two faults coincide: the log and the proof of its length, the log and `spark/`, and full disks."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crash import full_disks, replays, surprises
from crash.flips import TINY
from crash.judge import Verdict
from crash.planting import Ground, Mutant, Search, patched, without
from messagestore.errors import StoreFullError
from messagestore.log import lost_end, store_identity
from messagestore.read.view import StoreView
from messagestore.recovery import examine, journal
from messagestore.writer.clean_end import CleanEnd
from messagestore.writer.log_writer import LogWriter


def pairs(kind: str, *parts: str) -> Search:
    """Run the cases of the mode `replays` of one kind whose keys have all of these words."""

    def search(ground: Ground) -> Iterator[Verdict]:
        if kind == "copies":
            found = replays.cases(ground.states, ground.root, True)
        elif kind == "spark/ of another copy":
            found = replays.swapped(ground.root, TINY)
        else:
            found = replays.lost_ends(ground.root, ground.states)
        for name, key, state, damage, must_open in found:
            if name == kind and all(part in key for part in parts):
                yield replays.look_any(name, state, ground.root, damage, must_open)[1]

    return search


def in_place(ground: Ground) -> Iterator[Verdict]:
    with tempfile.TemporaryDirectory(dir=ground.folder) as folder:
        yield surprises.restored_in_place(Path(folder))


def full(story: str) -> Search:
    def search(ground: Ground) -> Iterator[Verdict]:
        base = ground.bases["filled"]
        for _, _, steps, at, count, number in itertools.chain(
            case for case in full_disks.cases(base, ground.root, True) if case[0] == story
        ):
            yield full_disks.check(base, ground.root, steps, at, count, number)[1]

    return search


def poisoned_by_no_room(real: Any) -> Any:
    """There is no room to move the clean end, and the writer stops: the put is not acknowledged, but is in the log."""

    def move(clean: CleanEnd, *, closing: bool = False) -> None:
        try:
            real(clean, closing=closing)
        except StoreFullError as error:
            raise clean._standing.poison(f"the clean end could not be made durable ({error})") from error

    return move


def forgets_what_has_no_room(real: Any) -> Any:
    """Puts without room for their units count as dispatched."""

    def publish_puts(writer: LogWriter, puts: list[Any], later: list[Any], visible_end: int) -> StoreFullError | None:
        error: StoreFullError | None = real(writer, puts, later, visible_end)
        if error is not None:
            writer.pending, writer.half_dispatched = later, False
        return error

    return publish_puts


MUTANTS: tuple[Mutant, ...] = (
    Mutant("a full disk when the clean end moves stops the writer", patched(CleanEnd, "move", poisoned_by_no_room), "full disks", full("puts")),
    Mutant("puts without room for their units are taken for dispatched", patched(LogWriter, "_publish_puts", forgets_what_has_no_room), "full disks", full("puts")),
    Mutant("nothing proves that a closed log was longer", without(examine, "lost_end"), "replays", pairs(replays.LOST_END, "spark/state")),
    Mutant("a copy that lost its end gets an id first", without(store_identity, "_refuse_lost_end"), "replays", pairs(replays.LOST_END, "spark")),
    Mutant("units behind the end of a closed log prove nothing", without(lost_end, "units_behind", (0, 0, 0)), "replays", pairs(replays.LOST_END)),
    Mutant("the journal of another copy is believed", without(journal, "fault_of_pair", ""), "replays", pairs("spark/ of another copy")),
    Mutant("a log without a queue of BATCH records is not searched for them", without(store_identity, "_search", (set(), "")), "replays", pairs("copies", "spark+consumequeue/rmq_sys_spark_sink")),
    Mutant("files that are copied over in place are not noticed", without(StoreView, "_written_over", result=False), "a restore in place", in_place),
)  # fmt: skip
