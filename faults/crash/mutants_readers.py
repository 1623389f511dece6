"""Bugs planted in what readers see: the end they prove after a reboot, a store that changes under them, retention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from crash import surprises
from crash.judge import Verdict
from crash.planting import Ground, Mutant, Search, patched, power_cuts, without
from messagestore.errors import OffsetOutOfRangeError
from messagestore.files.state import State
from messagestore.read import queue_ends
from messagestore.read.proven_tail import _Chain
from messagestore.read.queue_ends import QueueEnds
from messagestore.read.view import StoreView
from messagestore.write.standing import Standing
from pyspark_messagestore import reading
from pyspark_messagestore.follower import Follower

_HISTORIES = 60


def changed_under_streams(ground: Ground) -> Iterator[Verdict]:
    """Run the kind `surprises` of the mode `concurrency`."""
    yield from surprises.histories(ground.folder / "surprises", ground.chance, _HISTORIES)


def story(tell: Callable[[Path], Verdict]) -> Search:
    def search(ground: Ground) -> Iterator[Verdict]:
        folder = ground.folder / "story"
        folder.mkdir()
        yield tell(folder)

    return search


def on_the_first_plan_only(real: Any) -> Any:
    def check(follower: Follower, start: Any) -> None:
        if not follower.checked:
            real(follower, start)

    return check


def new_queues_begin_anywhere(real: Any) -> Any:
    def first_of(follower: Follower, queue: Any, start: Any, begin: int, end: int, *, tell: bool = False) -> int:
        try:
            found: int = real(follower, queue, start, begin, end, tell=tell)
        except OffsetOutOfRangeError as error:
            if queue in start.queues:
                raise
            return error.min
        return found

    return first_of


def numbers_are_not_compared(real: Any) -> Any:
    def take(walk: Any, topic: str, queue_id: int, first: int, count: int) -> bool:
        walk.ends[topic, queue_id] = walk.ends.get((topic, queue_id), 0) + count
        walk.grown.add((topic, queue_id))
        return True

    return take


def visible_in_another_boot(real: Any) -> Any:
    def end_of(view: StoreView, state: State) -> int:
        real(view, state)
        assert view.tail is not None
        view.tail = None
        return state.visible_end

    return end_of


def clean_end_only(real: Any) -> Any:
    def find(chain: _Chain) -> Any:
        chain.limit = 0
        return real(chain)

    return find


def every_batch_proves(real: Any) -> Any:
    def take(chain: _Chain, batch: Any) -> Any:
        return real(chain, replace(batch, flush_disk_type="SYNC_FLUSH", crcs=()))

    return take


def flushed_as_soon_as_written(real: Any) -> Any:
    """Whatever is in the log counts as flushed."""

    def changed(writer: Standing, changes: dict[str, int]) -> State:
        return replace(real(writer, changes), known_flushed_end=writer.end.physical_offset)

    return changed


_ASYNC = ("async batches", "async, then sync", "async roll-over")
MUTANTS = (
    Mutant("a stream checks the log on its first plan only", patched(Follower, "check_start", on_the_first_plan_only), "surprises", changed_under_streams),
    Mutant("a view does not look whose folder is at its path", without(StoreView, "check_place"), "surprises", changed_under_streams),
    Mutant("retention below a new queue is passed over", patched(Follower, "first_of", new_queues_begin_anywhere), "a new queue", story(surprises.a_new_queue_below_retention)),
    Mutant("a planned micro-batch is not compared with the log", without(Follower, "planned_faults", {}), "surprises", changed_under_streams),
    Mutant("the log is followed without a look at queue offsets", patched(queue_ends._Walk, "_take", numbers_are_not_compared), "a topic made again", story(surprises.ends_over_a_topic_made_again)),
    Mutant("where a queue's last message lies is not remembered", without(QueueEnds, "_place", (-1, 0)), "a topic made again", story(surprises.made_again_as_long)),
    Mutant("tasks read whatever is there", without(reading, "_check_planned"), "a restored backup", story(surprises.restored_before_the_tasks)),
    Mutant("a reader takes the visible end of another boot", patched(StoreView, "_proven_end_of", visible_in_another_boot), "power cuts", power_cuts(*_ASYNC)),
    Mutant("a reader of another boot stays at the clean end", patched(_Chain, "run", clean_end_only), "power cuts", power_cuts("batches", "roll-over")),
    Mutant("what was written counts as flushed", patched(Standing, "changed_state", flushed_as_soon_as_written), "power cuts", power_cuts(*_ASYNC, "async puts")),
    Mutant("any batch proves what is below it, whatever its CRCs say", patched(_Chain, "_take_batch", every_batch_proves), "a torn body", story(surprises.a_body_torn_by_a_power_cut)),
)  # fmt: skip
