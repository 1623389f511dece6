"""The mode `flips` of `make crash`: damaged bytes, each of which must be reported or repaired.

    bit flips   every bit of three small stores, one at a time, in every file: Spark batches, closed and left by a kill;
                plain puts with `enabledAppendPropCRC`
    damage      sectors of zeros, swapped pages, truncations, files missing, files too many, copied segments

After each change, `verify` must report it; a reader must read what was there, or report what is wrong; a writer must
refuse, or repair it, and must not drop anything. The quick profile takes another part of them for each seed. `verify`
examines all that it takes; one flip in seven is also read, and one in seven opened for writing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from crash import checker, turns
from crash.counts import Counts, again
from crash.faults import quiet_threads
from crash.harness import SMALL, Promise, Step, die, run_steps, scratch_folder
from crash.imitate import kill_when
from crash.judge import Verdict, read_queue
from crash.memdisk import MemDisk, MemKillDisk
from crash.power_cut import SECTOR_SIZE, Folder
from crash.simdisk import Killed
from crash.turns import taken_by_kind
from crash.workloads import batch, put
from messagestore import MessageStore, StoreConfig, StoreError, StorePoisonedError
from messagestore.inspect.verify import verify

TINY = SMALL.replace(
    mapped_file_size_commit_log=8 * 1024, mapped_file_size_consume_queue=20 * 4, max_hash_slot_num=8, max_index_num=12
)
TINY_CRC = TINY.replace(enabled_append_prop_crc=True)
_LAST_KILLED: list[Step] = [batch(2, 2), batch(3, 2)]
_CHECKED_LOOSELY = (
    "config/topics.json",
    "spark/store.json",
    "abort",
    "checkpoint",
    "spark/journal",
    "spark/state",
)
"""Files in which a bit may not concern messages, or which an older copy replaces: all messages must be there."""
_PAGE_SIZE = 4096
EVERY_BIT = 2
"""How many runs take all flipped bits between them; each takes all damage."""
Queues = dict[tuple[str, int], list[bytes]]
Damage = Callable[[MemDisk], None]


@dataclass
class Sample:
    """A store to be damaged."""

    name: str
    config: StoreConfig
    content: Folder
    queues: Queues
    end: int
    closed: bool


def make_samples(root: Path) -> dict[str, Sample]:
    """Create small stores, and larger ones over several segments."""
    spark: list[Step] = [("open",), batch(0, 2), batch(1, 1), ("close",)]
    puts: list[Step] = [("open",), put(0), put(1, 1), ("puts", 10, 2, "single", 0), ("close",)]
    large: list[Step] = [("open",), batch(0, 60), put(0), batch(1, 60), ("big_put", 5, 4000), put(1, 1), ("close",)]
    large_puts: list[Step] = [("open",), *(("big_put", i, 3000) for i in range(8)), put(20), ("close",)]
    samples = {
        "batches": _sample("batches", root, TINY, spark),
        "puts": _sample("puts", root, TINY_CRC, puts),
        "large": _sample("large", root, SMALL, large),
        "large puts": _sample("large puts", root, SMALL.replace(enabled_append_prop_crc=True), large_puts),
    }
    for name, base in (("killed", "batches"), ("large, killed", "large")):
        samples[name] = _killed(name, root, samples[base])
    return samples


def _sample(name: str, root: Path, config: StoreConfig, steps: list[Step]) -> Sample:
    disk = MemDisk(root)
    run_steps(root, steps, disk, Promise(), config)
    die(root)
    found = checker.check(disk.tree(), uninterrupted=True)
    if found.faults:
        raise AssertionError(f"{name}: {found.faults}")
    return Sample(name, config, disk.content(), found.queues, found.end, closed=True)


def _killed(name: str, root: Path, base: Sample) -> Sample:
    """Kill the process that added two batches when the second one was visible, before anything else was done."""
    disk = MemKillDisk(root, base.content)
    kill_when(disk, lambda operation: operation.path.endswith("/spark/state"), nth=5)
    with contextlib.suppress(Killed, StorePoisonedError):
        run_steps(root, [("open",), *_LAST_KILLED, ("close",)], disk, Promise(), base.config)
    die(root)
    found = checker.check(disk.tree(), settled=False)
    if found.faults or not disk.dead or len(found.bodies) != sum(map(len, base.queues.values())) + 4:
        raise AssertionError(f"{name}: {found.faults}")
    return Sample(name, base.config, disk.content(), found.queues, found.end, closed=False)


# ---- examining damage


def look(
    sample: Sample, root: Path, damage: Damage, path: str, ways: str = "vrw", *, derived: bool = False
) -> tuple[str, Verdict]:
    """Damage a copy and examine it (v: verify, r: a reader, w: a writer); return a word, and what is wrong.

    Parameters
    ----------
    path : str
        The file that is damaged; its kind decides what must be noticed.
    derived : bool
        Only what can be rebuilt from the log is missing: a reader that comes before the writer may see less.
    """
    verdict, named, rebuilt = Verdict(), False, False
    disk = damaged(sample, root, damage)
    # A reader knows only the units of a queue, so damaged ones may end it.
    loose = path.startswith((*_CHECKED_LOOSELY, "consumequeue/")) or derived
    try:
        if "v" in ways:
            named = not _verified(disk, root, verdict)
        if "r" in ways:
            named |= _read(disk, sample, root, verdict, loose)
        if "w" in ways or not named:
            rebuilt = _written(damaged(sample, root, damage), sample, root, verdict)
    finally:
        die(root)
    unnoticed = "v" in ways and not (named or rebuilt or path.startswith(_CHECKED_LOOSELY))
    if unnoticed and not (path.startswith("index/") and _keys_are_found(damaged(sample, root, damage), sample, root)):
        verdict.misread.append("nobody noticed")
    return "named" if named else "put right" if rebuilt else "of no meaning", verdict


def damaged(sample: Sample, root: Path, damage: Damage) -> MemDisk:
    """Return a damaged copy."""
    disk = MemDisk(root, sample.content)
    damage(disk)
    return disk


def _verified(disk: MemDisk, root: Path, verdict: Verdict) -> bool:
    before = disk.tree()
    try:
        ok = verify(root, disk=disk).ok
    except (StoreError, OSError):
        ok = False
    if disk.tree() != before:
        verdict.misread.append("verify changed bytes")
    return ok


def _read(disk: MemDisk, sample: Sample, root: Path, verdict: Verdict, loose: bool) -> bool:
    """Whether the reader reported that something is wrong; what it reads must be what was there."""
    found: Queues = {}
    try:
        with MessageStore.open_read_only(root, sample.config, disk=disk) as reader:
            for topic, queue_ids in reader.topics().items():
                if topic != checker.BATCH_TOPIC:
                    found |= {(topic, queue_id): read_queue(reader, topic, queue_id) for queue_id in queue_ids}
    except (StoreError, OSError):
        return True
    found = {key: bodies for key, bodies in found.items() if bodies}
    if loose and all(bodies == sample.queues.get(key, [])[: len(bodies)] for key, bodies in found.items()):
        return False
    _same(found, sample.queues, verdict, "a reader")
    return False


def _keys_are_found(disk: MemDisk, sample: Sample, root: Path) -> bool:
    """Check an empty slot that leads to entries of other keys: a search skips them and finds its own entries."""
    with MessageStore.open_read_only(root, sample.config, disk=disk) as reader:
        for record in checker.check(disk.tree(), settled=False).records:
            for key in dict(record.properties).get("KEYS", "").split():
                found = [message.physical_offset for message in reader.query_message(record.topic, key)]
                if record.physical_offset not in found:
                    return False
    return True


def _written(disk: MemDisk, sample: Sample, root: Path, verdict: Verdict) -> bool:
    """Whether a writer that opens and closes repaired the store. If it refuses, nothing is changed."""
    before = disk.tree()
    try:
        with MessageStore.open(root, sample.config, disk=disk):
            pass
    except (StoreError, OSError):
        changed = [p for p in before if not p.startswith("spark/") and disk.tree().get(p) != before[p]]
        if changed:
            verdict.misread.append(f"a writer refused the store, and changed {changed}")
        return False
    after = disk.tree()
    found = checker.check(after)
    if any(after.get(path) != before[path] for path in before if path.startswith("commitlog/")):
        _same(found.queues, sample.queues, verdict, "a writer")  # it cut the log, or rewrote it
    return not found.faults


def _same(found: Queues, wanted: Queues, verdict: Verdict, who: str) -> None:
    for key in found.keys() | wanted.keys():
        there, was = found.get(key, []), wanted.get(key, [])
        if there == was:
            continue
        if len(there) < len(was):
            verdict.lost.append(f"{who} kept {len(there)} of {len(was)} messages of {key}, and said nothing")
        else:
            verdict.misread.append(f"{who} found other messages in {key}, and said nothing")


# ---- flips


def used_ranges(sample: Sample) -> Iterator[tuple[str, int, int]]:
    """Yield (path, start, end) of the bytes that have a meaning, with some zeros after them."""
    disk_tree = _tree(sample)
    for path, data in sorted(disk_tree.items()):
        if path.startswith("commitlog/"):
            end = max(0, min(len(data), sample.end - int(path.rpartition("/")[2])))
        else:
            end = len(data.rstrip(b"\0"))
        if path == "spark/state":
            yield path, 0, 80
            yield path, 512, 592
        elif path.startswith("index/"):
            yield path, 0, 32  # the count of used slots follows, which nobody reads
            yield path, 36, min(len(data), end + 2)
        elif not path.endswith("/"):
            yield path, 0, min(len(data), end + 2)


def _tree(sample: Sample) -> dict[str, bytes]:
    found: dict[str, bytes] = {}

    def walk(folder: Folder, prefix: str) -> None:
        for name, entry in folder.items():
            if isinstance(entry, dict):
                walk(entry, f"{prefix}{name}/")
                continue
            data = bytearray(entry[0])
            for number, sector in entry[1].items():
                data[number * SECTOR_SIZE : number * SECTOR_SIZE + len(sector)] = sector
            found[prefix + name] = bytes(data[: entry[0]])

    walk(sample.content, "")
    return found


def flip(path: str, position: int, bit: int) -> Damage:
    def damage(disk: MemDisk) -> None:
        disk.node(path)[position] ^= 1 << bit

    return damage


Case = tuple[str, str, Sample, Damage, str, bool]
"""Kind, key, store, damage, file, whether only derived data are missing."""


def alias(path: str) -> str:
    """Return a name for keys, because index files are named by the time of their creation."""
    return re.sub(r"index/\d+", "index/first", path)


def flips(samples: dict[str, Sample]) -> Iterator[Case]:
    """Yield every bit of every file of the small stores."""
    first = samples["batches"].end
    for name in ("batches", "killed", "puts"):
        for path, start, end in used_ranges(samples[name]):
            if name != "batches" and path in ("config/topics.json", "spark/store.json"):
                continue  # the same in all stores
            own = first if name == "killed" and path.startswith("commitlog/") else start  # below, it is the first store
            for position, bit in itertools.product(range(own, end), range(8)):
                key = f"{name}:{alias(path)}:{position}.{bit}"
                yield "bit flips", key, samples[name], flip(path, position, bit), path, False


# ---- damage


def damages(samples: dict[str, Sample]) -> Iterator[Case]:
    """Yield damage to sectors, pages, lengths and files."""
    for name in ("large", "large puts", "large, killed", "batches"):
        sample = samples[name]
        tree = _tree(sample)

        for path, start, end in used_ranges(sample):
            for at in range(start - start % SECTOR_SIZE, end, SECTOR_SIZE):
                if tree[path][at : at + SECTOR_SIZE].strip(b"\0"):
                    yield "damage", f"{name}:{alias(path)}:zeros {at}", sample, partial(_zero, path, at), path, False
            for size in sorted({0, 1, end // 2, max(0, len(tree[path]) - 1), len(tree[path]) + 1}):
                yield "damage", f"{name}:{alias(path)}:length {size}", sample, partial(_resize, path, size), path, False
            yield "damage", f"{name}:{alias(path)}:missing", sample, partial(_remove, path), path, _is_derived(path)

        logs = [path for path in tree if path.startswith("commitlog/")]
        for path, other in itertools.product(logs, logs):
            if path < other:
                yield (
                    "damage",
                    f"{name}:{alias(path)}:swapped with {other}",
                    sample,
                    partial(_swap, path, other),
                    path,
                    False,
                )

        for path in logs:
            yield "damage", f"{name}:{alias(path)}:pages", sample, partial(_swap_pages, path), path, False
            yield "damage", f"{name}:{alias(path)}:copied", sample, partial(_copy_segment, samples, path), path, False

        for folder in ("consumequeue", "index", "commitlog"):
            yield "damage", f"{name}:{folder}:missing", sample, partial(_remove, folder), folder, folder != "commitlog"
            for extra, data in (("foo", b""), ("foo", b"x"), ("00000000000000999999", b"x")):
                key = f"{name}:{folder}:extra {extra} {len(data)}"
                yield "damage", key, sample, partial(_extra, f"{folder}/{extra}", data), folder, True


def _is_derived(path: str) -> bool:
    return path.startswith(("consumequeue", "index", "checkpoint", "config", "spark/journal"))


def _zero(path: str, at: int, disk: MemDisk) -> None:
    data = disk.node(path)
    data[at : at + SECTOR_SIZE] = bytes(len(data[at : at + SECTOR_SIZE]))


def _resize(path: str, size: int, disk: MemDisk) -> None:
    data = disk.node(path)
    del data[size:]
    data.extend(bytes(size - len(data)))


def _remove(path: str, disk: MemDisk) -> None:
    disk.remove_tree(path)


def _swap(path: str, other: str, disk: MemDisk) -> None:
    one, two = disk.node(path), disk.node(other)
    one[:], two[:] = bytes(two), bytes(one)


def _swap_pages(path: str, disk: MemDisk) -> None:
    data = disk.node(path)
    data[:] = data[_PAGE_SIZE : 2 * _PAGE_SIZE] + data[:_PAGE_SIZE] + data[2 * _PAGE_SIZE :]


def _copy_segment(samples: dict[str, Sample], path: str, disk: MemDisk) -> None:
    """Copy a segment of another store, with the same size and place."""
    size = len(disk.node(path))
    for sample in samples.values():
        data = _tree(sample).get(path, b"")
        store = json.loads(_tree(sample)["spark/store.json"])["storeId"]
        if len(data) == size and store.encode() not in bytes(disk.node("spark/store.json")):
            disk.node(path)[:] = data
            return


def _extra(path: str, data: bytes, disk: MemDisk) -> None:
    disk.put_file(path, data)


# ---- the mode of `make crash`


def runs(case: Case) -> int:
    """How many runs take all cases of this kind between them."""
    return turns.runs(EVERY_BIT) if case[0] == "bit flips" else 1


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run every bit and the list of damage; deep mode examines each in all three ways, as far as the time allows."""
    counts, until_s = Counts(), time.monotonic() + seconds
    with scratch_folder() as folder, quiet_threads():
        root = folder / "store"
        samples = make_samples(root)

        every, whole = itertools.chain(damages(samples), flips(samples)), not quick or bool(case)
        chosen = taken_by_kind(every, lambda one: 1 if whole else runs(one), seed, (0, 1) if case else part)
        for number, (kind, key, sample, damage, path, derived) in enumerate(chosen):
            if case and key != case:
                continue
            if not quick and time.monotonic() > until_s:
                break

            turn = (number + seed // EVERY_BIT) % 7
            ways = "vrw" if case or not quick or kind == "damage" else "vr" if turn == 1 else "vw" if turn == 5 else "v"
            try:
                _, verdict = look(sample, root, damage, path, ways, derived=derived)
            except (AssertionError, ArithmeticError, LookupError, ValueError, MemoryError, TypeError) as error:
                verdict = Verdict(misread=[f"{type(error).__name__}: {error}"])

            counts.take(kind, verdict, key, again("flips", seed, key))
            if case:
                break
    return counts
