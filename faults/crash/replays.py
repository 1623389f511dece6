"""The mode `replays` of `make crash`: damages, deletes or swaps small files, after which Spark sends its batches again.

    store    closed; killed after the clean end; killed in ASYNC_FLUSH
    damage   bits of spark/journal, spark/store.json, spark/state and of the last BATCH record; small files missing,
             cut, or in their state of one session ago; topics, queues and whole folders missing, alone and together; a
             byte-equal copy without spark/; the folder spark/ of another copy that continued on its own; the end of the
             log missing, together with what proves it
    queues   of a store that was closed or killed: bits of units, units and files of zeros, files cut, missing, or in
             their state of one session ago; whole folders in their state of one session ago

After each damage, the next process opens the store, gets every batch again, and one more. It may refuse, and then it
changes no byte of RocketMQ's files. Otherwise every batch is known, the new one is appended, and each row is stored
once. If the end of the log is missing, the process must refuse, and must continue without it when told to. If queues
were damaged, a reader comes first, and shows all messages or reports what is wrong; and `recover` comes last.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from crash import checker
from crash.counts import Counts, again
from crash.faults import quiet_threads
from crash.flips import TINY, Damage, flip
from crash.harness import Promise, Step, append_encoded, die, payload, run_steps, scratch_folder
from crash.judge import Verdict, note_content, note_faults, read_queue
from crash.memdisk import MemDisk, Tree
from crash.power_cut import Folder
from crash.turns import taken_by_kind
from crash.workloads import batch, copy_of, put
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    CorruptionError,
    MessageStore,
    StoreConfig,
    StoreError,
)
from messagestore.errors import ChecksumError

APP = "app-1"
_SMALL_FILES = ("spark/journal", "spark/store.json", "spark/state", "checkpoint", "config/topics.json")
_FLIPPED = ("spark/journal", "spark/store.json", "spark/state")
_BATCH_QUEUE = "consumequeue/" + checker.BATCH_TOPIC
_TOPIC = "consumequeue/topic-" + APP
EVERY, EVERY_BIT = 3, 61
"""How many runs take all cases between them, and all flipped bits."""
_QUICK_STEP = 5
"""The quick profile flips one bit in each group of this many bytes."""


@dataclass(frozen=True)
class State:
    """A store as some process left it.

    Parameters
    ----------
    name : str
    config : StoreConfig
    content : Folder
    older : Tree
        The files as they were at the end of the previous session.
    promise : Promise
        The contents of the store.
    """

    name: str
    config: StoreConfig
    content: Folder
    older: Tree
    promise: Promise


def make_states(root: Path) -> dict[str, State]:
    """Run two sessions; the second one is closed, or killed."""
    first: list[Step] = [("open",), batch(0, 3), put(0), batch(0, 2, app="other"), ("close",)]
    second: list[Step] = [("open",), batch(1, 2), put(1, 1), batch(2, 3)]
    states = {
        "closed": _state("closed", root, TINY, first, [*second, ("close",)]),
        "killed": _state("killed", root, TINY, first, second),
    }
    unsynced = TINY.replace(flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=3_600_000)
    later: list[Step] = [("open",), batch(1, 2, ASYNC_FLUSH), put(1, 1), batch(2, 3, ASYNC_FLUSH)]
    states["async"] = _state("async", root, unsynced, first, later)
    return states


def _state(name: str, root: Path, config: StoreConfig, first: list[Step], second: list[Step], count: int = 12) -> State:
    promise = Promise()
    disk = MemDisk(root)
    run_steps(root, first, disk, promise, config)
    die(root)
    older = disk.tree()
    run_steps(root, second, disk, promise, config)
    disk = MemDisk(root, disk.content())  # a session that is not closed leaves it as a kill does
    die(root)
    found = checker.check(disk.tree(), settled=False)
    if found.faults or len(found.bodies) != count:
        raise AssertionError(f"{name}: {len(found.bodies)} messages, {found.faults}")
    promise.batches = set(promise.maybe_batches)
    promise.puts = list(promise.maybe_puts)
    return State(name, config, disk.content(), older, promise)


# ---- damage


def missing(*paths: str) -> Damage:
    def damage(disk: MemDisk) -> None:
        for path in paths:
            there = disk.tree()
            if path in there or path + "/" in there:
                disk.remove_tree(path)

    return damage


def both(first: Damage, second: Damage) -> Damage:
    def damage(disk: MemDisk) -> None:
        first(disk)
        second(disk)

    return damage


def as_before(older: Tree, *paths: str) -> Damage:
    """Restore files of the previous session, as if by mistake."""

    def damage(disk: MemDisk) -> None:
        for path in paths:
            disk.put_file(path, older[path])

    return damage


def cut(path: str, size: int) -> Damage:
    def damage(disk: MemDisk) -> None:
        del disk.node(path)[size:]

    return damage


Case = tuple[str, str, State, Damage, bool]
"""Kind, key, store, damage, and whether the next writer must open it."""
_TAIL = "bits of the last BATCH record"
LOST_END = "the end of the log lost"
QUEUES = "queues damaged"


def queue_cases(state: State, root: Path, quick: bool) -> Iterator[Case]:
    """Damage the files of ConsumeQueues: the log has everything, so the next writer must continue.

    After a kill, a unit proves that its record was synced. Therefore the store may be refused because of a unit with a
    flipped bit, or one in a file that cannot be read.
    """
    disk = MemDisk(root, state.content)
    tree = disk.tree()
    files = [path for path in sorted(tree) if path.startswith("consumequeue/") and not path.endswith("/")]
    folders = [path.rstrip("/") for path in sorted(tree) if path.startswith("consumequeue/") and path.endswith("/")]

    def case(what: str, damage: Damage, *, must: bool = True) -> Case:
        return QUEUES, f"{state.name}:{what}", state, damage, must

    for path in files:
        size, used = len(tree[path]), len(tree[path].rstrip(b"\0"))
        yield case(f"{path}:missing", missing(path))
        yield case(f"{path}:zeros", partial(fill, path, 0, size))
        for start in range(0, used, 20):
            yield case(f"{path}:{start}:unit of zeros", partial(fill, path, start, start + 20))
            yield case(f"{path}:{start}:zeros from here on", partial(fill, path, start, size))
        for length in (0, 1, used // 2 // 20 * 20, size - 1):
            yield case(f"{path}:{length} bytes", cut(path, length), must=state.name == "closed")
        step = 7 if quick else 1
        for bit in range(0, 8 * used, step):
            yield case(f"{path}:{bit // 8}.{bit % 8}:bit", flip(path, bit // 8, bit % 8), must=state.name == "closed")
    for folder in folders:
        yield case(f"{folder}:folder missing", missing(folder))
    for folder in [*folders, *files]:
        if folder != "consumequeue" and folder in {*state.older, *(path.rstrip("/") for path in state.older)}:
            yield case(f"{folder}:older", partial(as_older, state.older, folder))


def fill(path: str, start: int, end: int, disk: MemDisk) -> None:
    """Overwrite a range with zeros."""
    disk.node(path)[start:end] = bytes(end - start)


def as_older(older: Tree, top: str, disk: MemDisk) -> None:
    """Restore a folder or a file to its state of one session ago."""
    disk.remove_tree(top)
    for path, data in older.items():
        if path == top or (path.startswith(top + "/") and not path.endswith("/")):
            disk.put_file(path, data)


def cases(states: dict[str, State], root: Path, quick: bool) -> Iterator[Case]:
    """Yield all cases. If everything needed can be obtained from the log, refusing the store is a fault."""
    for name, state in states.items():
        if name in ("closed", "killed"):
            yield from queue_cases(state, root, quick)
        tree = MemDisk(root, state.content).tree()
        small = [path for path in _SMALL_FILES if path in tree]
        yield "small files lost", f"{name}:nothing", state, lambda disk: None, True
        for path in small:
            if path in state.older:
                yield "small files swapped", f"{name}:{path}:older", state, as_before(state.older, path), False
            for size in (0, 1, len(tree[path]) // 2, len(tree[path]) - 1):
                yield "small files cut", f"{name}:{path}:{size} bytes", state, cut(path, size), False
        lost = [*small[:-1], _BATCH_QUEUE, _TOPIC, f"{_TOPIC}/1", "consumequeue/single", "consumequeue", "index"]
        for some in itertools.chain(([path] for path in lost), itertools.combinations(lost, 2)):
            if "config/topics.json" in some and any(path.startswith("consumequeue") for path in some):
                continue  # a broker deletes a topic in this way
            # Without `state`, nobody knows how far an ASYNC log was synced; a queue is refused when it is used.
            must = "spark/state" not in some or state.name == "closed"
            must &= f"{_TOPIC}/1" not in some
            must &= "config/topics.json" not in some
            yield "small files lost", f"{name}:{'+'.join(some)}:missing", state, missing(*some), must
        for more in (
            (),
            (_BATCH_QUEUE,),
            (_BATCH_QUEUE, "checkpoint"),
            (_TOPIC,),
            ("consumequeue",),
            ("index",),
            ("consumequeue", "index", "checkpoint"),
        ):
            yield "copies", f"{name}:{'+'.join(('spark', *more))}:missing", state, missing("spark", *more), True
        step = _QUICK_STEP if quick else 1
        for path in _FLIPPED:
            size = len(tree.get(path, b"").rstrip(b"\0"))
            slots = (*range(64), *range(512, 576)) if path == "spark/state" else range(size)
            for position in slots[::step]:
                for bit in (position // step % 8,) if quick else range(8):
                    must = path == "spark/journal"
                    key = f"{name}:{path}:{position}.{bit}"
                    yield "bits of small files", key, state, flip(path, position, bit), must
        segment = max(path for path in tree if path.startswith("commitlog/0") and b'{"messagestore"' in tree[path])
        start = tree[segment].rfind(b'{"messagestore"') - 88
        end = start + int.from_bytes(tree[segment][start : start + 4], "big")
        for position in range(start, end, 8 * step):
            key = f"{name}:the last BATCH record:{position - start}, no journal"
            yield _TAIL, key, state, both(missing("spark/journal"), flip(segment, position, 0)), False
        for position in range(start, end, step):
            for bit in (position // step % 8,) if quick else range(8):
                key = f"{name}:the last BATCH record:{position - start}.{bit}"
                yield _TAIL, key, state, flip(segment, position, bit), False


def lost_ends(root: Path, states: dict[str, State]) -> Iterator[Case]:
    """Delete the last records of stores that were closed, together with the evidence of where the log ended."""
    first: list[Step] = [("open",), batch(0, 3), put(0), batch(0, 2, app="other"), batch(1, 12), ("close",)]
    second: list[Step] = [("open",), batch(2, 12), put(1, 1), batch(3, 12), put(2), ("close",)]
    long = _state("two segments", root, TINY, first, second, 44)
    for state in (states["closed"], long):
        yield from _lost_ends(state.name, state, MemDisk(root, state.content).tree())


def _lost_ends(name: str, state: State, tree: Tree) -> Iterator[Case]:
    segments = [path for path in tree if path.startswith("commitlog/0")]
    segment = max(path for path in segments if any(tree[path]))
    starts = _record_starts(tree[segment])
    with_it: list[tuple[str, ...]] = [(), ("spark/state",), ("spark",), ("spark/state", "checkpoint")]
    with_it += [("spark/state", "spark/journal"), ("spark", _BATCH_QUEUE), ("spark", "checkpoint")]
    for some in with_it:
        for start in starts[-1], starts[len(starts) // 2]:
            key = f"{name}:{'+'.join(some)}:missing:zeros from {start} on"
            yield LOST_END, key, state, both(missing(*some), zeroed(segment, start)), False
        if len(segments) > 1:
            key = f"{name}:{'+'.join(some)}:missing:no last segment"
            yield LOST_END, key, state, missing(*some, segment), False


def _record_starts(data: bytes) -> list[int]:
    starts, at = [], 0
    while (size := int.from_bytes(data[at : at + 4], "big")) and data[at + 4 : at + 8] == b"\xda\xa3\x20\xa7":
        starts.append(at)
        at += size
    return starts


def zeroed(path: str, start: int) -> Damage:
    def damage(disk: MemDisk) -> None:
        data = disk.node(path)
        data[start:] = bytes(len(data) - start)

    return damage


def spark_of(other: Tree) -> Damage:
    """Replace the folder `spark/` with that of another copy."""

    def damage(disk: MemDisk) -> None:
        disk.remove_tree("spark")
        for path, data in other.items():
            if path.startswith("spark/") and not path.endswith("/"):
                disk.put_file(path, data)

    return damage


def siblings(root: Path, config: StoreConfig, *, same_id: bool) -> list[State]:
    """Create copies of one store that continued on their own: two to the same length, and a longer one."""
    before: list[Step] = [("open",), batch(0, 3), put(0), batch(0, 2, app="other"), ("close",)]
    first: list[Step] = [("open",), batch(1, 2), put(1, 1), batch(2, 3), ("close",)]
    second: list[Step] = [("open",), batch(1, 2, app="other"), put(2, 1), batch(1, 3), ("close",)]
    made, origin, promised = [], MemDisk(root), Promise()
    run_steps(root, before, origin, promised, config)
    die(root)
    for name, steps in (("first", first), ("second", second), ("longer", [*first[:-1], batch(3, 2), ("close",)])):
        promise, disk = copy_of(promised), MemDisk(root, origin.content())
        if not same_id and name != "first":
            disk.remove_tree("spark")
        run_steps(root, steps, disk, promise, config)
        die(root)
        promise.puts, promise.batches = list(promise.maybe_puts), set(promise.maybe_batches)
        made.append(State(name, config, disk.content(), {}, promise))
    return made


def swapped(root: Path, config: StoreConfig) -> Iterator[Case]:
    """Combine the log of each copy with the folder `spark/` of each other one."""
    for same_id in (False, True):
        made = siblings(root, config, same_id=same_id)
        trees = {state.name: MemDisk(root, state.content).tree() for state in made}
        for state, other in itertools.permutations(made, 2):
            ids = "the same id" if same_id else "ids of their own"
            key = f"{ids}:log of the {state.name}, spark/ of the {other.name}"
            yield "spark/ of another copy", key, state, spark_of(trees[other.name]), False


# ---- examining damage


def look_any(kind: str, state: State, root: Path, damage: Damage, must_open: bool) -> tuple[str, Verdict]:
    """Examine a case of any kind."""
    if kind == LOST_END:
        return look_at_lost_end(state, root, damage)
    return look(state, root, damage, must_open, may_cut=state.name == "async" and kind == _TAIL, queues=kind == QUEUES)


def look(
    state: State,
    root: Path,
    damage: Damage,
    must_open: bool,
    *,
    may_cut: bool = False,
    queues: bool = False,
) -> tuple[str, Verdict]:
    """Damage a copy, open it, send every batch again and one more; return a word, and what is wrong.

    Parameters
    ----------
    state, root, damage : State, Path, callable
    must_open : bool
    may_cut : bool
        The damage is where an unsynced ASYNC_FLUSH batch may be torn: it is then cut, and its replay is appended.
    queues : bool
        The damage is in files of queues: a reader comes before, and `recover` comes last.
    """
    verdict = Verdict()
    disk = MemDisk(root, state.content)
    damage(disk)
    if queues and state.name == "closed":
        _read(state, root, disk, verdict)

    promise = replace(state.promise, rows={**state.promise.rows}, maybe_batches={*state.promise.maybe_batches})
    appended = 0
    try:
        with MessageStore.open(root, state.config, disk=disk) as store:
            for app, version in sorted(state.promise.rows):
                status = append_encoded(store, app, version, state.promise.rows[(app, version)], SYNC_FLUSH)
                if status != "known" and not may_cut:
                    verdict.duplicated.append(f"batch {(app, version)} was {status} again")

            for app in sorted({app for app, _ in state.promise.rows}):
                version = 1 + max(version for name, version in state.promise.rows if name == app)
                promise.rows[(app, version)] = 2
                promise.maybe_batches.add((app, version))
                append_encoded(store, app, version, 2, SYNC_FLUSH)
                appended += 1
    except (StoreError, OSError) as error:
        die(root)
        return _refused(disk, must_open, state.promise, verdict, error)
    die(root)

    if queues:
        try:
            with MessageStore.open(root, state.config, disk=disk) as store:
                store.check_queues()
        except (StoreError, OSError) as error:
            verdict.misread.append(f"refused after the replay: {type(error).__name__}: {error}")
        die(root)

    found = checker.check(disk.tree())
    note_faults(verdict, found, "after the replay")
    note_content(verdict, found.bodies, found.queues, promise, (), everything=True)
    return "known", verdict


def look_at_lost_end(state: State, root: Path, damage: Damage) -> tuple[str, Verdict]:
    """Open a store whose log has lost its end.

    A reader may refuse it, a writer must refuse it and changes nothing. With `accept_loss` the store continues, reports
    what is lost, and takes the lost batches again.
    """
    verdict, disk = Verdict(), MemDisk(root, state.content)
    damage(disk)
    before = {path: data for path, data in disk.tree().items() if not path.startswith("spark/")}
    for _ in range(2):
        try:
            with MessageStore.open(root, state.config, disk=disk):
                verdict.lost.append("the store was opened, and nothing was said")
        except CorruptionError as error:
            if "--accept-loss" not in str(error):
                verdict.misread.append(f"no way on: {error}")
        die(root)
        after = {path: data for path, data in disk.tree().items() if not path.startswith("spark/")}
        if after != before:
            verdict.misread.append(f"changed: {sorted(path for path in before if after.get(path) != before[path])}")
    if not verdict.ok:
        return "opened", verdict
    try:
        with MessageStore.open(root, state.config, disk=disk, accept_loss=True) as store:
            if store.report is None or store.report.lost is None:
                verdict.misread.append("what is lost was accepted, and not said")
            for app, version in sorted(state.promise.rows):
                append_encoded(store, app, version, state.promise.rows[(app, version)], SYNC_FLUSH)
    except ChecksumError:  # half a SYNC_FLUSH batch that is in no queue: it is still refused
        return "refused", verdict
    finally:
        die(root)
    found = checker.check(disk.tree())
    note_faults(verdict, found, "after what is lost was accepted")
    rows_only = replace(state.promise, puts=[])
    note_content(verdict, found.bodies, found.queues, rows_only, (), everything=True)
    return "refused", verdict


def _read(state: State, root: Path, disk: MemDisk, verdict: Verdict) -> None:
    """Check that a reader shows all messages, or reports that something is wrong."""
    wanted = checker.check(MemDisk(root, state.content).tree(), settled=False).queues
    found = {}
    try:
        with MessageStore.open_read_only(root, state.config, disk=disk) as reader:
            for topic, queue_ids in reader.topics().items():
                if topic != checker.BATCH_TOPIC:
                    found |= {(topic, queue_id): read_queue(reader, topic, queue_id) for queue_id in queue_ids}
    except (StoreError, OSError):
        return
    for key, bodies in wanted.items():
        if found.get(key) != bodies:
            verdict.lost.append(
                f"a reader showed {len(found.get(key, ()))} of {len(bodies)} messages of {key} in silence"
            )


def _refused(
    disk: MemDisk, must_open: bool, promise: Promise, verdict: Verdict, error: Exception
) -> tuple[str, Verdict]:
    """Check that nothing was lost or duplicated before the store or a batch was refused."""
    if must_open:
        verdict.misread.append(f"refused: {type(error).__name__}: {error}")
    log = b"".join(data for path, data in sorted(disk.tree().items()) if path.startswith("commitlog/"))
    bodies = [payload(app, version, row) for (app, version), rows in promise.rows.items() for row in range(rows)]
    for body in [*bodies, *(text.encode() for text in promise.puts)]:
        count = log.count(body)
        verdict.duplicated += [repr(body)] * (count > 1)
        verdict.lost += [repr(body)] * (count < 1)
    return "refused", verdict


def runs(case: Case) -> int:
    """How many runs take all cases of this kind between them."""
    kind, key, *_ = case
    return EVERY_BIT if kind.startswith("bits of") or key.endswith(":bit") else EVERY


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run all cases; the quick profile takes another one in `EVERY` for each seed, and one bit in `EVERY_BIT`."""
    counts, until_s = Counts(), time.monotonic() + seconds
    with scratch_folder() as folder, quiet_threads():
        root = folder / "store"
        states = make_states(root)
        every = itertools.chain(swapped(root, TINY), lost_ends(root, states), cases(states, root, False))
        whole = not quick or bool(case)
        chosen = taken_by_kind(every, lambda one: 1 if whole else runs(one), seed, (0, 1) if case else part)
        for kind, key, state, damage, must_open in chosen:
            if case and key != case:
                continue
            if not quick and time.monotonic() > until_s:
                break

            try:
                _, verdict = look_any(kind, state, root, damage, must_open)
            except (AssertionError, ArithmeticError, LookupError, ValueError, MemoryError, TypeError) as error:
                verdict = Verdict(misread=[f"{type(error).__name__}: {error}"])

            counts.take(kind, verdict, key, again("replays", seed, key))
            if case:
                break
    return counts
