"""The mode `mutants` of `make crash`: plants bugs in the store, one at a time, each of which a search must find.

Each mutant is a patch of the store's code and the search that must find it: kills, power cuts, second deaths, errors,
damage, or many processes at once. The code without the bug creates the initial store; the code with the bug does the
rest. The search stops at the first case that is judged wrong.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np

from crash import concurrency, turns
from crash.counts import Counts, again
from crash.faults import quiet_threads
from crash.harness import SMALL, Promise, batch_columns, run_steps, scratch_folder
from crash.judge import Verdict
from crash.kernels import planted
from crash.memdisk import MemDisk
from crash.planting import (
    MOST_CASES,
    Ground,
    Mutant,
    Planted,
    damage,
    faults,
    kills,
    many,
    next_batches,
    no_sync,
    patched,
    power_cuts,
    second_deaths,
    short_writes,
    sources_of,
    sync_log,
    without,
)
from messagestore import BatchConflictError, BatchRequest, MessageStore, StoreError, StorePoisonedError
from messagestore.batches import append as transaction
from messagestore.batches import rules as batch_rules
from messagestore.batches.append import BatchResult
from messagestore.batches.rules import Decision
from messagestore.files.commit_log import CommitLog
from messagestore.files.consume_queue import ConsumeQueue
from messagestore.files.disk import Disk
from messagestore.files.index_file import IndexService
from messagestore.files.numbered_files import MappedFileQueue
from messagestore.files.state import StateFile
from messagestore.files.writer_lock import WriterLock
from messagestore.format import kernel, record_scan
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.dispatch import Dispatcher
from messagestore.log.store_files import StoreFiles
from messagestore.read.sight import Seals, UpTo
from messagestore.read.view import StoreView
from messagestore.recovery import apply, examine, survey
from messagestore.recovery import journal as recovered_journal
from messagestore.session import AttachedStore
from messagestore.writer import catching_up, whole_batch
from messagestore.writer.clean_end import CleanEnd
from messagestore.writer.flush import FlushService
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.queue_numbers import QueueNumbers


def without_mutex(real: Any) -> Any:
    def init(writer: LogWriter, *arguments: Any) -> None:
        real(writer, *arguments)
        writer.mutex = _NoLock()  # type: ignore[assignment]

    return init


def head_first(real: Any) -> Any:
    def write(writer: LogWriter, plan: Any) -> Any:
        head, timestamp_ms = real(writer, plan)
        writer.log.write(plan.batch.physical_offset, head)
        return head, timestamp_ms

    return write


def retried(real: Any) -> Any:
    def run(plan: Any) -> None:
        try:
            real(plan)
        except OSError:
            real(plan)

    return run


def swallowed(real: Any) -> Any:
    def run(plan: Any) -> None:
        with contextlib.suppress(OSError):
            real(plan)

    return run


def state_before_dispatch(real: Any) -> Any:
    def publish(writer: LogWriter, plan: Any, timestamp_ms: int) -> None:
        writer.write_state(visible_end=plan.batch.end)
        real(writer, plan, timestamp_ms)

    return publish


def visible_before_head(real: Any) -> Any:
    def seal(writer: LogWriter, plan: Any, head: bytes) -> None:
        writer.write_state(visible_end=plan.batch.end)
        real(writer, plan, head)

    return seal


def abort_first(real: Any) -> Any:
    def tidy(store: AttachedStore) -> None:
        if store.writer is not None and store.disk.exists(store.paths.abort):
            store.disk.unlink(store.paths.abort)
        real(store)

    return tidy


def recovers_before_it_locks(real: Any) -> Any:
    def take_turn(store: AttachedStore, *given: Any, **options: Any) -> None:
        if store.writer is None:
            store._recover()
        real(store, *given, **options)

    return take_turn


def same_slot(real: Any) -> Any:
    def write(file: StateFile, state: Any) -> Any:
        last = file._last or file.read()
        if last is not None and state.counter % 2:
            state = replace(state, counter=state.counter + 1)
            file._last = replace(last, counter=state.counter - 1)
        return real(file, state)

    return write


def forgets_nothing(real: Any) -> Any:
    def catch_up(writer: LogWriter) -> bool:
        before = dict(writer.numbers.next_offsets)
        done: bool = real(writer)
        writer.numbers.next_offsets.update(before)
        return done

    return catch_up


def late_clock(real: Any) -> Any:
    def write(clean: CleanEnd, end: Any) -> None:
        real(clean, end._replace(last_store_timestamp_ms=end.last_store_timestamp_ms + 1000))

    return write


def known_anyway(writer: Any, entry: Any, source: Any, request: Any) -> BatchResult:
    return BatchResult(transaction.KNOWN, entry.physical_offset, entry.end, entry.row_count)


def never_known(real: Any) -> Any:
    def check(writer: LogWriter, source: Any, request: Any, planned: Any) -> Any:
        return Decision()

    return check


def one_write(disk: Disk, file: Any, data: Any, position: int) -> None:
    disk._pwrite(file.fileno(), memoryview(data).cast("B"), position)


def first_unit_torn(real: Any) -> Any:
    def append(queue: ConsumeQueue, queue_offset: int, units: bytes) -> None:
        real(queue, queue_offset, units[:-1] + bytes([(units[-1] + 1) % 256]))

    return append


def other_offsets(real: Any) -> Any:
    def next_offset(numbers: QueueNumbers, topic: str, queue_id: int) -> int:
        offset: int = real(numbers, topic, queue_id)
        return offset + (topic == "new" and offset == 1)

    return next_offset


def blind(real: Any) -> Any:
    def refresh(view: StoreView) -> Any:
        real(view)
        if view.visible.end is not None:
            view.visible = view._seen = replace(view.visible, end=1 << 40)
            view.sight = UpTo(view.files, 1 << 40, Seals(view.files, 0))
        return view.visible

    return refresh


def other_rows(ground: Ground) -> Iterator[Verdict]:
    """A known batch comes again with other rows: it is refused, and nothing is written."""
    disk, verdict = MemDisk(ground.root, ground.bases["filled"].content), Verdict()
    run_steps(ground.root, [("open",), ("close",)], disk, Promise())
    with MessageStore.open(ground.root, SMALL, disk=disk) as store:
        request = BatchRequest(app_id="app-1", version=0, version_source="spark")
        try:
            store.append_batch(batch_columns("app-1", 7, 30), request)
            verdict.lost.append("other rows under a known version were dropped")
        except BatchConflictError:
            pass
    yield verdict


def vanished_batch(ground: Ground) -> Iterator[Verdict]:
    """The journal, a cache, contains a batch that the log does not hold: the batch is appended when it comes."""
    disk, verdict = MemDisk(ground.root, ground.bases["filled"].content), Verdict()
    journal = BatchJournal.from_bytes(bytes(disk.node("spark/journal")))
    [first] = journal.entries("app-1")
    journal.remember("app-1", replace(first, version=1))
    disk.node("spark/journal")[:] = journal.to_bytes()
    with MessageStore.open(ground.root, SMALL, disk=disk) as store:
        request = BatchRequest(app_id="app-1", version=1, version_source="spark")
        if store.append_batch(batch_columns("app-1", 0, first.row_count), request).status != transaction.APPENDED:
            verdict.lost.append("batch 1 is known, and nowhere")
    yield verdict


def _forget_names(real: Any) -> Any:
    def create(queue: MappedFileQueue, *arguments: Any, **options: Any) -> Any:
        queue._name_unsynced = False
        return real(queue, *arguments, **options)

    return create


def _forget_names_made(real: Any) -> Any:
    def make_durable(changes: apply._Changes) -> None:
        real(changes)
        changes.log.written.folders.clear()

    return make_durable


def _no_property_crc() -> AbstractContextManager[object]:
    if kernel.lib is not None:
        return planted("frame.h", "if (f->properties_size < PROPERTY_CRC_SIZE) return true;", "return true;")()
    return mock.patch.object(
        record_scan, "bad_property_crcs", lambda data, starts, where: np.zeros(len(starts), np.bool_)
    )


def _sync_plan(make: Callable[[Any], Any]) -> AbstractContextManager[object]:
    from messagestore.files.commit_log import SyncPlan

    return mock.patch.object(SyncPlan, "run", make(SyncPlan.run))


def _load_anything(queue: MappedFileQueue) -> None:
    offsets = [int(name) for name in queue.disk.names(queue.directory) if name.isdigit()]
    if offsets and not queue.file_size:
        queue.file_size = queue.disk.size(queue.path(offsets[0]))
    queue.set_offsets(offsets)


def _pretend(lock: WriterLock, timeout_s: float, *, description: str, waits: Callable[[], bool]) -> None:
    lock._held = True
    lock._open()


class _NoLock:
    """A lock that excludes nobody."""

    def acquire(self, *_: object, **__: object) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _both(*managers: AbstractContextManager[object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


_ASYNC = ("async batches", "async roll-over", "clean end moves, async")
_LOG_AND_LOCKS = (
    Mutant("no sync of the log before a put is acknowledged", no_sync("/commitlog/"), "power cuts", power_cuts("single puts")),
    Mutant("no sync of a batch's data", sync_log(data=False, head=True), "power cuts", power_cuts("batches"), case=37),
    Mutant("no sync of a batch's head", sync_log(data=True, head=False), "power cuts", power_cuts("batches")),
    Mutant("the head is written before the data is synced", patched(whole_batch, "_write", head_first), "power cuts", power_cuts("batches", "roll-over"), case=284),
    Mutant("acknowledged before the group's sync", without(FlushService, "wait", True), "power cuts", power_cuts("single puts", "group commit")),
    Mutant("no directory sync of the CommitLog", no_sync("/commitlog/", "fsync_dir"), "power cuts", power_cuts("roll-over", "roll-over by puts")),
    Mutant("no directory sync of ConsumeQueues", no_sync("/consumequeue/", "fsync_dir"), "power cuts", power_cuts("first batch of a topic", "clean end moves", "single puts")),
    Mutant("no sync of ConsumeQueues before the clean end", no_sync("/consumequeue/"), "power cuts", power_cuts("clean end moves", "batches")),
    Mutant("no sync of the index before the clean end", without(IndexService, "sync"), "power cuts", power_cuts("clean end moves", "batches")),
    Mutant("abort is not made", without(LogWriter, "ensure_abort"), "kills and power cuts", kills("batches")),
    Mutant("the clean end moves before queues and index are synced", without(StoreFiles, "sync_derived"), "power cuts", power_cuts("clean end moves")),
    Mutant("two new names of a folder are not synced", patched(MappedFileQueue, "create", _forget_names), "power cuts", power_cuts("roll-over", "async roll-over")),
    Mutant("recovery does not make durable what it keeps", without(apply._Changes, "_make_durable"), "second deaths", second_deaths("roll-over", "async roll-over", "roll-over by puts"), case=87),
    Mutant("recovery does not sync the names that a dead writer made", patched(apply._Changes, "_make_durable", _forget_names_made), "a batch of the next process", next_batches("roll-over")),
    Mutant("the ASYNC flag is not synced before the first ASYNC byte", no_sync("/spark/state/"), "power cuts", power_cuts(*_ASYNC)),
    Mutant("the CRCs of a batch are not checked in recovery", without(survey, "bad_chunk"), "power cuts", power_cuts(*_ASYNC)),
    Mutant("the journal is believed without a look at the log", lambda: _both(mock.patch.object(transaction, "batch_is_there", return_value=True), mock.patch.object(BatchJournal, "check"), mock.patch.object(recovered_journal, "fault_of_pair", return_value="")), "an entry without its batch", vanished_batch),
    Mutant("the tail is not zeroed", without(CommitLog, "zero_behind", 0), "kills", kills("batches", "recovery: not sealed")),
    Mutant("a batch is visible before it is dispatched", patched(whole_batch, "_publish", state_before_dispatch), "kills", kills("batches")),
    Mutant("a batch is visible before its head is written", patched(whole_batch, "_seal", visible_before_head), "kills", kills("batches")),
    Mutant("index entries are forgotten", without(Dispatcher, "_put_index"), "kills", kills("single puts")),
    Mutant("a wrong tags code in the last unit", patched(ConsumeQueue, "append", first_unit_torn), "kills", kills("single puts")),
    Mutant("a queue offset is left out", patched(QueueNumbers, "next_offset", other_offsets), "kills", kills("group commit"), case=51),
    Mutant("abort goes before the clean end has moved", patched(AttachedStore, "_tidy", abort_first), "kills and power cuts", power_cuts("batches", "single puts")),
    Mutant("state has one slot", patched(StateFile, "write", same_slot), "kills", kills("batches", "single puts")),
    Mutant("a replay is not recognised", patched(transaction, "_check_journal", never_known), "kills", kills("batches")),
    Mutant("the digest is not compared", lambda: mock.patch.object(batch_rules, "_known", known_anyway), "replay with other rows", other_rows),
    Mutant("the store checkpoint is newer than the data", patched(CleanEnd, "_write_checkpoint", late_clock), "kills", kills("single puts")),
    Mutant("recovery does not repair queues and index", without(apply._Changes, "_repair_derived"), "kills", kills("batches")),
    Mutant("a failed sync is tried again", lambda: _sync_plan(retried), "errors", faults("single puts", "EIO"), case=14),
    Mutant("a failed sync is passed over", lambda: _sync_plan(swallowed), "errors", faults("single puts", "EIO"), case=14),
    Mutant("a failed append is not undone", without(LogWriter, "undo"), "errors", faults("roll-over", "ENOSPC", "EIO", tries=1)),
    Mutant("a writer is not poisoned", lambda: mock.patch.object(LogWriter, "poison", lambda _, reason: StorePoisonedError(reason)), "errors", faults("batches", "EIO")),
    Mutant("a short write is taken for a whole one", lambda: mock.patch.object(Disk, "pwrite", one_write), "short writes", short_writes),
    Mutant("what lies behind the end proves nothing", lambda: _both(mock.patch.object(examine, "later_sync_batch", return_value=None), mock.patch.object(examine.Examination, "_unit_behind", return_value=None)), "damage", damage("killed", "commitlog/", ways="w")),
    Mutant("__CRC32# is not checked", _no_property_crc, "bit flips", damage("puts", "commitlog/", ways="v")),
    Mutant("a gap between segments is passed over", lambda: mock.patch.object(MappedFileQueue, "load", _load_anything), "damage", damage("large", "commitlog/")),
    Mutant("a reader does not look at the visible end", patched(StoreView, "refresh", blind), "kills", kills("batches", "roll-over")),
    Mutant("the lock among writers is not taken", lambda: mock.patch.object(WriterLock, "acquire", _pretend), "races", many(concurrency._races, tries=200, count=20)),
    Mutant("recovery before the lock", patched(AttachedStore, "_take_turn", recovers_before_it_locks), "races", many(concurrency._races, tries=200, count=20)),
    Mutant("queue offsets are cached over another's turn", patched(catching_up, "_catch_up", forgets_nothing), "processes", many(concurrency._processes)),
    Mutant("appends of threads are not one at a time", patched(LogWriter, "__init__", without_mutex), "threads", many(concurrency._threads)),
)  # fmt: skip

_AREAS = [importlib.import_module(f"crash.{path.stem}") for path in sorted(Path(__file__).parent.glob("mutants_*.py"))]
MUTANTS: tuple[Mutant, ...] = (*_LOG_AND_LOCKS, *(mutant for area in _AREAS for mutant in area.MUTANTS))
EVERY = 2
"""How many quick runs take all of them between them."""
CHANCE = 1
"""The chance in a search stays the same: each bug names the case that found it, and those met by chance have been tried."""


# ---- the mode of `make crash`


def hunt(
    mutant: Mutant, ground: Ground, planted: Planted | None = None, most: int = MOST_CASES, first: int = 1
) -> tuple[int, Verdict | None]:
    """Return how many cases it took, and the verdict that found it; None if all cases were judged correct.

    Parameters
    ----------
    planted : callable | None
        What is planted instead of the mutant's own bug.
    first, most : int
        The search begins with this case, counted from 1, and ends with that one.
    """
    count = 0
    with (planted or mutant.planted)(), contextlib.redirect_stderr(io.StringIO()):
        try:
            for case in mutant.search(ground):
                count += 1
                if count < first and callable(case):
                    continue
                verdict = case() if callable(case) else case
                if not verdict.ok:
                    return count, verdict
                if count >= most:
                    break
        except (StoreError, AssertionError, ValueError) as error:
            return count + 1, Verdict(misread=[f"{type(error).__name__}: {error}"])
    return count, None


_PROGRAMMING_ERROR = re.compile(r"\b(?:TypeError|AttributeError|NameError|UnboundLocalError|ImportError): ")
"""What no fault of a store looks like: the patch calls what the code does not have any more."""
_passed: dict[object, int] = {}
"""Search -> how many of its first cases were right without a bug, in this process."""


@dataclass(frozen=True)
class Hunted:
    """A mutant, and what its search came to.

    Parameters
    ----------
    mutant : Mutant
    count : int
        The number of the last case.
    verdict : Verdict | None
        What it found; None: nothing is wrong, and no case is left.
    first : int
        The number of the first case that was tried.
    """

    mutant: Mutant
    count: int
    verdict: Verdict | None
    first: int = 1


def identity(value: object) -> object:
    """What two searches have in common that were made by the same call."""
    if isinstance(value, FunctionType):
        return value.__code__, tuple(identity(cell.cell_contents) for cell in value.__closure__ or ())
    if isinstance(value, tuple):
        return tuple(identity(each) for each in value)
    return repr(value)


def fault_of_search(hunted: Hunted, ground: Callable[[], Ground]) -> str:
    """What the search finds without a bug, in the cases of which the last found the bug; empty: nothing, as it should.

    Searches that were made by the same call are tried once.
    """
    search = identity(hunted.mutant.search)
    if hunted.first == 1 and _passed.get(search, 0) >= hunted.count:
        return ""
    count, verdict = hunt(hunted.mutant, ground(), contextlib.nullcontext, hunted.count, hunted.first)
    if count < hunted.first:  # the search has fewer cases without the bug: all of them must be right
        _, verdict = hunt(hunted.mutant, ground(), contextlib.nullcontext)
    if verdict is None and hunted.first == 1:
        _passed[search] = hunted.count
    return "" if verdict is None else str(verdict)


def by_search(mutants: Sequence[Mutant]) -> list[list[Mutant]]:
    """Put those together whose searches were made by the same call, so that one process tries that search without a bug."""
    found: dict[object, list[Mutant]] = {}
    for mutant in mutants:
        found.setdefault(identity(mutant.search), []).append(mutant)
    return list(found.values())


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run all mutants, or a quick run's part; a case is a mutant's name, and the number of what found it is printed."""
    counts = Counts()
    if case:
        named = [mutant for mutant in MUTANTS if mutant.name == case]
        if not named:
            counts.fail(f"no planted bug has the name {case!r}", again("mutants", CHANCE, case))
        counts.add(together(named, say=True))
        return counts

    mutants = MUTANTS if turns.changed is None else touched(turns.changed)
    every = EVERY if quick and turns.changed is None else 1
    for _, alike in turns.taken(by_search(mutants), every, seed, part):
        counts.add(together(alike))
    return counts


def touched(files: Collection[str]) -> list[Mutant]:
    """Choose the bugs that are planted in these files, or that may be in any."""
    sources = [(mutant, sources_of(mutant.planted)) for mutant in MUTANTS]
    return [mutant for mutant, names in sources if not names or not names.isdisjoint(files)]


def together(mutants: Sequence[Mutant], *, say: bool = False) -> Counts:
    """Search for mutants of the same search; what finds them must be content with the code as it is."""
    counts, found = Counts(), list[Hunted]()
    for mutant in mutants:
        try:
            found.append(hunted(mutant))
        except Exception as error:  # noqa: BLE001 - a patch or a search that does not fit the code is told with its name
            counts.fail(
                f"BROKEN: {mutant.name}: {type(error).__name__}: {error}", again("mutants", CHANCE, mutant.name)
            )

    # The longest of these searches comes first: without a bug, it has the cases of all others in it.
    for each in found if say else ():
        print(f"{each.mutant.name}: case {each.count} of {each.mutant.found_by}: {each.verdict or 'not found'}")
    for each in sorted(found, key=lambda each: -each.count):
        counts.add(proven(each))
    return counts


def hunted(mutant: Mutant) -> Hunted:
    """Search for a mutant: the case that found it before comes first, and if it does not find it now, all do."""
    for first, most in ((mutant.case, mutant.case), (1, MOST_CASES)):
        if first:
            with place_for(mutant) as ground:
                found = Hunted(mutant, *hunt(mutant, ground(), most=most, first=first), first)
            if found.verdict is not None:
                break
    return found


def proven(found: Hunted) -> Counts:
    """Judge what the search for a mutant has found."""
    counts, mutant, verdict = Counts(), found.mutant, found.verdict
    command = again("mutants", CHANCE, mutant.name)
    if verdict is None:
        counts.fail(f"MISSED after {found.count} cases of {mutant.found_by}: {mutant.name}", command)
        return counts
    try:
        with place_for(mutant) as ground:
            fault = fault_of_search(found, ground)
    except Exception as error:  # noqa: BLE001 - as above
        counts.fail(f"BROKEN: {mutant.name}: {type(error).__name__}: {error}", command)
        return counts

    if fault:
        counts.fail(f"NOT PROVEN: {mutant.name}: its search fails without the bug, too: {fault}", command)
    elif _PROGRAMMING_ERROR.search(str(verdict)):
        counts.fail(f"BROKEN: {mutant.name}: it was found by an error of the patch or the search: {verdict}", command)
    else:
        counts.cases["mutants caught"] += 1
    return counts


@contextlib.contextmanager
def place_for(mutant: Mutant) -> Iterator[Callable[[], Ground]]:
    """Make an empty ground for a search, whose chance is that of the mutant's name."""
    with scratch_folder() as folder, quiet_threads():
        yield lambda: Ground(folder, random.Random(f"{CHANCE} {mutant.name}"))
