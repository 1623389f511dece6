"""Bugs planted in what readers see: the end they prove after a reboot, a store that changes under them, retention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from crash import surprises
from crash.harness import ROOMY
from crash.imitate import Broker, flip
from crash.judge import Verdict
from crash.kernels import planted
from crash.planting import Ground, Mutant, Search, patched, power_cuts, without
from messagestore import Message, MessageStore
from messagestore.errors import ChecksumError, OffsetOutOfRangeError
from messagestore.files.state import State
from messagestore.format.layout import PROPERTY_CRC_SIZE
from messagestore.format.record_scan import PROPERTY_CRC_BEGIN
from messagestore.read import proven_tail, query, queue_ends
from messagestore.read.proven_tail import _Chain
from messagestore.read.queue_ends import QueueEnds
from messagestore.read.sight import Sights, Units, UpTo
from messagestore.read.view import StoreView
from messagestore.spi.local import LocalReader
from messagestore.writer.standing import Standing
from pyspark_messagestore.source.follower import Follower

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
    def first_of(follower: Follower, queue: Any, start: Any, begin: int, end: int, *, warn: bool = False) -> int:
        try:
            found: int = real(follower, queue, start, begin, end, warn=warn)
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
    def sight(sights: Sights, state: State, now: Any, **how: Any) -> UpTo:
        real(sights, state, now, **how)
        return sights.up_to(state, state.visible_end)

    return sight


def clean_end_only(real: Any) -> Any:
    def find(chain: _Chain) -> Any:
        chain.limit = 0
        return real(chain)

    return find


def every_batch_proves(real: Any) -> Any:
    def take(chain: _Chain, batch: Any) -> Any:
        return real(chain, replace(batch, flush_disk_type="SYNC_FLUSH", crcs=()))

    return take


def every_row_is_whole(real: Any) -> Any:
    def whole(run: Any, rows: Any) -> Any:
        return real(run, rows) | True

    return whole


def flushed_as_soon_as_written(real: Any) -> Any:
    """Whatever is in the log counts as flushed."""

    def changed(writer: Standing, changes: dict[str, int]) -> State:
        return replace(real(writer, changes), known_flushed_end=writer.end.physical_offset)

    return changed


def times_that_go_back(ground: Ground) -> Iterator[Verdict]:
    """Search a broker's store by time, whose clock was set back by 3 s, and compare with a plain scan."""
    root, verdict, times = ground.folder / "times", Verdict(), []
    root.mkdir()
    broker = Broker(root, ROOMY)
    for number in range(60):
        times.append(1_700_000_000_000 + 200 * number - 3000 * (number >= 30))
        broker.put("t", b"%d" % number, store_ms=times[-1])
    reader = StoreView(root, ROOMY)
    for time_ms in times:
        found = query.offset_behind_time(reader, "t", 0, time_ms - 1)
        if found != next(number for number, each in enumerate(times) if each >= time_ms):
            verdict.misread.append(f"a search for {time_ms} finds message {found}")
    reader.close()
    yield verdict


def a_name_with_a_flipped_bit(ground: Ground) -> Iterator[Verdict]:
    """Flip each bit of the name `__CRC32#` in a put, and read it."""
    root, verdict = ground.folder / "names", Verdict()
    with MessageStore.open(root, ROOMY.replace(enabled_append_prop_crc=True)) as store:
        result = store.put_message(Message("t", b"body", queue_id=0))
    begin = result.physical_offset + result.size - PROPERTY_CRC_SIZE
    for bit in range(8 * len(PROPERTY_CRC_BEGIN)):
        flip(root, begin + bit // 8, 1 << bit % 8)
        with MessageStore.open_read_only(root, ROOMY) as reader:
            try:
                list(reader.read("t", 0, 0))
                verdict.misread.append(f"bit {bit} of the name was not noticed")
            except ChecksumError:
                pass
        flip(root, begin + bit // 8, 1 << bit % 8)
    yield verdict


_ASYNC = ("async batches", "async, then sync", "async roll-over")
MUTANTS = (
    Mutant("a stream checks the log on its first plan only", patched(Follower, "check_start", on_the_first_plan_only), "surprises", changed_under_streams),
    Mutant("a view does not look whose folder is at its path", without(StoreView, "check_place"), "surprises", changed_under_streams),
    Mutant("retention below a new queue is passed over", patched(Follower, "first_of", new_queues_begin_anywhere), "a new queue", story(surprises.a_new_queue_below_retention)),
    Mutant("a planned micro-batch is not compared with the log", without(Follower, "planned_faults", {}), "surprises", changed_under_streams),
    Mutant("the log is followed without a look at queue offsets", patched(queue_ends._Walk, "_take", numbers_are_not_compared), "a topic made again", story(surprises.ends_over_a_topic_made_again)),
    Mutant("where a queue's last message lies is not remembered", without(QueueEnds, "_place", (-1, 0)), "a topic made again", story(surprises.made_again_as_long)),
    Mutant("tasks read whatever is there", without(LocalReader, "_check_planned"), "a restored backup", story(surprises.restored_before_the_tasks)),
    Mutant("a reader takes the visible end of another boot", patched(Sights, "_unrecovered", visible_in_another_boot), "power cuts", power_cuts(*_ASYNC)),
    Mutant("a reader of another boot stays at the clean end", patched(_Chain, "run", clean_end_only), "power cuts", power_cuts("batches", "roll-over")),
    Mutant("what was written counts as flushed", patched(Standing, "changed_state", flushed_as_soon_as_written), "power cuts", power_cuts(*_ASYNC, "async puts")),
    Mutant("a reader stays at the visible end of a killed writer", without(Sights, "_was_killed", result=False), "a kill", story(surprises.puts_before_a_kill)),
    Mutant("a reader shows the put in whose middle a writer was killed", patched(proven_tail, "whole_rows", every_row_is_whole), "a kill", story(surprises.puts_before_a_kill)),
    Mutant("a reader does not compare the log with what state says", without(StoreView, "_check_segments"), "a copy of a part", story(surprises.a_segment_that_was_not_copied)),
    Mutant("a reader does not look at units behind the last segment", without(Units, "_check_unit_behind"), "a copy of a part", story(surprises.a_segment_that_was_not_copied)),
    Mutant("the kernel does not look at the name of the property CRC", planted("decode.c", " || crc_name_is_damaged(p, &f)", ""), "flips: the name of the CRC", a_name_with_a_flipped_bit),
    Mutant("a search by time trusts a broker's clock", lambda: mock.patch.object(query, "_SET_BACK_MS", 0), "a clock", times_that_go_back),
    Mutant("any batch proves what is below it, whatever its CRCs say", patched(_Chain, "_take_batch", every_batch_proves), "a torn body", story(surprises.a_body_torn_by_a_power_cut)),
)  # fmt: skip
