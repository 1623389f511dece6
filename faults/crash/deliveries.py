"""The mode `deliveries` of `make crash`: a deliverer of delayed messages dies at any operation, and another one goes on.

    put delayed messages, close | open, deliver round by round, also while more are put, close
                                   ^ a kill, half of a write, or a power cut at every operation

What is left is judged as the next processes would find it: a writer recovers, delivers what is due, and closes; then a
broker would start. Every message must be in its topic and queue once, no message may be there twice, and
`config/delayOffset.json` must say what was delivered. In every third image, the next deliverer dies as well; in every
third, a broker has delivered in between: it read `delayOffset.json`, and wrote how far it came.

A second kind of cases are histories in which the numbers of the delayed messages' queues go back:

    put | wait | deliver, with one to three levels | retention | the queues are removed and rebuilt | an older copy
    | the clock is set back, once

in any order, with closes and kills between them. In the end, every message that is in this log's history must have
been delivered once, whatever numbers the log and `delayOffset.json` remember, and no later than its level has passed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from crash.counts import Counts, again
from crash.faults import quiet_threads
from crash.harness import SMALL, die, scratch_folder
from crash.imitate import another_boot
from crash.judge import Verdict
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.points import Point, chosen, points
from crash.power_cut import Folder
from crash.simdisk import Killed
from messagestore import (
    ASYNC_FLUSH,
    Message,
    MessageColumns,
    MessageStore,
    StoreConfig,
    StorePoisonedError,
    deliver_delayed,
)
from messagestore.files.delay_offsets import DelayOffsets
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.inspect.verify import verify
from messagestore.session import attached_store

NOW_MS = 1_795_170_401_381
LATER_MS = NOW_MS + 60_000
EVERY = (5, 23)
"""How many quick runs take all kills between them, and all power cuts."""
QUICK_HISTORIES = 60
CONFIG = SMALL.replace(message_delay_level="1s 5s 10s", flush_delay_offset_interval=1)
CONFIGS = {
    "sync": CONFIG,
    "async": CONFIG.replace(flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=20),
    "small segments": CONFIG.replace(
        mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=20 * 8, max_message_size=2048
    ),
}
_OTHER_LEVELS = {1: "7s", 2: "1s 2s", 3: CONFIG.message_delay_level}
"""Levels of those who put nothing, by how many they are."""
_BEFORE, _DURING = 24, 6
_MOST_ROUNDS = 200


class _Clocked:
    """A disk whose clock shows what the mode wants."""

    _now_ms, uptime_ms = NOW_MS, 0

    @property
    def now_ms(self) -> int:
        return self._now_ms

    @now_ms.setter
    def now_ms(self, now_ms: int) -> None:
        self.uptime_ms += max(0, now_ms - self._now_ms)  # no time passes when the clock is set back
        self._now_ms = now_ms

    def time_ns(self) -> int:
        return self.now_ms * 1_000_000

    def uptime_ns(self) -> int:
        return self.uptime_ms * 1_000_000


class ClockedDisk(_Clocked, MemDisk):
    pass


class ClockedRecordingDisk(_Clocked, MemRecordingDisk):
    pass


def body(number: int) -> bytes:
    return b"delayed/%d" % number


def columns(begin: int, count: int) -> MessageColumns:
    """Messages for two topics with two queues each, at the three levels."""
    numbers = range(begin, begin + count)
    rows = {
        "body": pa.array([body(n) for n in numbers], pa.binary()),
        "topic": [f"t{n % 2}" for n in numbers],
        "queue_id": pa.array(np.array([n // 2 % 2 for n in numbers], np.int32)),
        "keys": [f"k{n}" for n in numbers],
        "delay_time_level": pa.array([1 + n % 3 for n in numbers], pa.int32()),
    }
    return MessageColumns.from_arrow(pa.record_batch(rows))


def deliver_all(store: MessageStore, rows: int) -> None:
    """Round by round."""
    services = store._attached.services
    assert services is not None
    for _ in range(_MOST_ROUNDS):
        if not services.delivery.deliver(rows).count:
            return
    raise AssertionError(f"more than {_MOST_ROUNDS} rounds deliver something")


@dataclass
class Story:
    """A deliverer that was recorded.

    Parameters
    ----------
    name : str
    config : StoreConfig
    disk : MemRecordingDisk
    promised : list of (int, int)
        How many of the messages of `_DURING` were acknowledged when so many operations had been done.
    """

    name: str
    config: StoreConfig
    disk: MemRecordingDisk
    promised: list[tuple[int, int]]

    @classmethod
    def of(cls, name: str, root: Path) -> Story:
        config = CONFIGS[name]
        disk = ClockedDisk(root)
        with MessageStore.open(root, config, disk=disk) as store:
            store.append_batch(columns(0, _BEFORE))
        die(root)

        recording = ClockedRecordingDisk(root, disk.content())
        recording.now_ms = LATER_MS
        promised = [(0, 0)]
        with MessageStore.open(root, config, disk=recording) as store:
            for number in range(_DURING):
                services = store._attached.services
                assert services is not None
                services.delivery.deliver(5)

                level = 1 + number % 3
                message = Message("t0", body(_BEFORE + number), queue_id=0, delay_time_level=level)
                store.put_message(message)
                store.flush()
                promised.append((recording.position, number + 1))

            recording.now_ms += 10_000
            deliver_all(store, 7)
        die(root)
        return cls(name, config, recording, promised)

    def least(self, cut: int) -> int:
        """How many messages must be there after so many operations."""
        return _BEFORE + max(count for position, count in self.promised if position <= cut)


@dataclass(frozen=True)
class Left:
    """What a death left.

    Parameters
    ----------
    content : Folder
    least : int
        How many messages must be there.
    label : str
    power_cut : bool
    """

    content: Folder
    least: int
    label: str
    power_cut: bool


def left_at(point: Point[Story]) -> Left | None:
    """What a deliverer that dies there leaves; None: nothing that a power cut of this kind could change."""
    image = point.left()
    if image is None:
        return None
    return Left(image.folder, point.story.least(point.cut), point.said(image), power_cut=not point.is_kill)


def broker_delivers(root: Path, disk: MemDisk, config: StoreConfig, count: int) -> None:
    """A broker takes the recovered store over, and delivers: it begins where `delayOffset.json` says.

    A writer of ours stands in for it that knows no BATCH record of a delivery, and leaves none: it puts the messages.
    """
    file = DelayOffsets(disk, str(root))
    offsets = file.load()
    with MessageStore.open(root, config, disk=disk) as store:
        for level in range(1, len(config.delays_ms) + 1):
            first = offsets.get(level, 0)
            for message in store.get_message(SCHEDULE_TOPIC, level - 1, first, count).messages:
                real = message.system_properties
                store.put_message(Message(real["REAL_TOPIC"], message.body, queue_id=int(real["REAL_QID"])))
                offsets[level] = message.queue_offset + 1
    file.save(offsets)


def judge(left: Left, root: Path, config: StoreConfig, chance: random.Random) -> Verdict:
    """Let the next processes deliver what is left, and count."""
    verdict = Verdict()
    disk = ClockedDisk(root, left.content)
    disk.now_ms = LATER_MS + 20_000
    boot = another_boot(101) if left.power_cut else contextlib.nullcontext()
    with boot:
        if chance.random() < 0.3:
            dying = ClockedRecordingDisk(root, disk.content())
            dying.now_ms, dying.kill_at = disk.now_ms, chance.randint(0, 80)
            with contextlib.suppress(Killed, StorePoisonedError):
                try:
                    with MessageStore.open(root, config, disk=dying) as store:
                        deliver_all(store, 4)
                finally:
                    die(root)
            disk = ClockedDisk(root, dying.image(dying.position, "all").folder)
            disk.now_ms = LATER_MS + 20_000
        if chance.random() < 0.3:
            with MessageStore.open(root, config, disk=disk):  # messagestore recover
                pass
            broker_delivers(root, disk, config, chance.randint(1, 9))
        for _ in range(2):  # the second one finds nothing to do
            with MessageStore.open(root, config, disk=disk) as store:
                deliver_all(store, 6)
        with MessageStore.open(root, config, disk=disk) as store:
            found = Counter(
                message.body
                for topic in ("t0", "t1")
                for queue_id in range(2)
                for message in store.get_message(topic, queue_id, 0, 1000).messages
            )
            waiting = {level: store.max_offset(SCHEDULE_TOPIC, level - 1) for level in (1, 2, 3)}
        offsets = DelayOffsets(disk, str(root)).load()
        report = verify(root, config, disk=disk)
    wanted = {body(number) for number in range(left.least)}
    verdict.lost += [str(each) for each in sorted(wanted - found.keys())]
    verdict.duplicated += [f"{each!r} {count} times" for each, count in found.items() if count > 1]
    if offsets != {level: end for level, end in waiting.items() if end}:
        verdict.misread.append(f"delayOffset.json says {offsets}, the queues end at {waiting}")
    verdict.misread += [str(finding) for finding in report.findings[:3]]
    return verdict


# ---- numbers that go back


@dataclass
class Lineage:
    """What is known of the store that is at the path now.

    Parameters
    ----------
    content : Folder
    promised, gone : set of bytes
        The messages that were put, and those that were delivered and then deleted by retention.
    """

    content: Folder
    promised: set[bytes]
    gone: set[bytes]


class Backwards:
    """One history in which the numbers of queues go back."""

    ACTIONS = ("put", "put", "wait", "deliver", "turns", "retire", "rebuild", "copy", "restore", "set_back")

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.root, self.chance = root, chance
        self.disk = ClockedDisk(root)
        self.promised: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.copies: list[Lineage] = []
        self.count = 0
        self.verdict = Verdict()
        self.done: list[str] = []

    @contextlib.contextmanager
    def store(self, levels: int = 3) -> Iterator[MessageStore]:
        """A session with one to three levels, which is closed or killed."""
        config = CONFIGS["small segments"]
        if levels < 3:
            config = config.replace(message_delay_level=_OTHER_LEVELS[levels])
        with MessageStore.open(self.root, config, disk=self.disk) as store:
            yield store
            if self.chance.random() < 0.3:
                store.flush()
                die(self.root)

    def bodies(self, store: MessageStore) -> Counter[bytes]:
        return Counter(m.body for m in store.get_message("t0", 0, store.min_offset("t0", 0), 1000).messages)

    def put(self) -> None:
        with self.store() as store:
            for _ in range(self.chance.randint(1, 8)):
                self.disk.now_ms += 1
                text = body(self.count)
                self.count += 1
                store.put_message(Message("t0", text, queue_id=0, delay_time_level=self.chance.randint(1, 3)))
                self.promised.add(text)

    def wait(self) -> None:
        self.disk.now_ms += self.chance.choice((500, 1_000, 5_000))

    def deliver(self) -> None:
        with self.store(self.chance.randint(1, 3)) as store:
            deliver_all(store, self.chance.randint(1, 9))

    def turns(self) -> None:
        """Deliverers with one to three levels take turns, and nobody closes the store in between."""
        config = CONFIGS["small segments"].replace(flush_delay_offset_interval=3_600_000)
        for _ in range(self.chance.randint(2, 6)):
            levels = config.replace(message_delay_level=_OTHER_LEVELS[self.chance.randint(1, 3)])
            while deliver_delayed(self.root, levels, disk=self.disk).count:
                pass
            self.wait()
        attached_store(self.root, config, self.disk).detach()

    def retire(self) -> None:
        """Retention deletes what it may."""
        with self.store() as store:
            if "t0" not in store.topics():
                return
            before = self.bodies(store).keys()
            for _ in range(self.chance.randint(1, 16)):
                store.put_message(Message("fill", b"." * 900, queue_id=0))
            store.flush()
            store.delete_expired_files(before_offset=1 << 40)
            self.gone |= before - self.bodies(store).keys()

    def rebuild(self) -> None:
        die(self.root)
        content = self.disk.content()
        content.pop("consumequeue", None)
        self._becomes(content)
        with self.store(self.chance.randint(1, 3)):
            pass

    def set_back(self) -> None:
        """By half an hour at most, and once: more would let store times go back."""
        if "set_back" not in self.done[:-1]:
            self.disk.now_ms -= self.chance.choice((1, 1_000, 60_000, 1_800_000))

    def copy(self) -> None:
        """A copy in which nothing is due: what was due and not delivered, a newer delayOffset.json may call delivered."""
        self.disk.now_ms += 1
        self.deliver()
        die(self.root)
        self.copies.append(Lineage(self.disk.content(), set(self.promised), set(self.gone)))

    def restore(self) -> None:
        """An older copy is put in place, sometimes without `delayOffset.json`."""
        if not self.copies:
            return
        die(self.root)
        newer, old = self.disk.content(), self.chance.choice(self.copies)
        content = copy.deepcopy(old.content)
        file = newer.get("config", {}).get("delayOffset.json")
        if file is not None and self.chance.random() < 0.5:
            content.setdefault("config", {})["delayOffset.json"] = file
        self.promised, self.gone = set(old.promised), set(old.gone)
        self._becomes(content)

    def _becomes(self, content: Folder) -> None:
        before = self.disk
        self.disk = ClockedDisk(self.root, content)
        self.disk.now_ms, self.disk.uptime_ms = before.now_ms, before.uptime_ms

    def run(self) -> Verdict:
        self.put()
        for _ in range(self.chance.randint(4, 14)):
            self.done.append(self.chance.choice(self.ACTIONS))
            getattr(self, self.done[-1])()
        self.put()
        with MessageStore.open(self.root, CONFIGS["small segments"], disk=self.disk) as store:
            deliver_all(store, 50)
        self.disk.now_ms += 10_000  # the longest level
        with MessageStore.open(self.root, CONFIGS["small segments"], disk=self.disk) as store:
            deliver_all(store, 50)
            found = self.bodies(store)
        self.verdict.lost += [str(each) for each in sorted(self.promised - self.gone - found.keys())]
        self.verdict.duplicated += [f"{each!r} {count} times" for each, count in found.items() if count > 1]
        self.verdict.duplicated += [f"{each!r}, after retention" for each in sorted(self.gone & found.keys())]
        report = verify(self.root, CONFIGS["small segments"], disk=self.disk)
        self.verdict.misread += [str(finding) for finding in report.findings[:3]]
        return self.verdict


def histories(root: Path, seed: int, part: tuple[int, int], key: str = "") -> Iterator[tuple[str, Verdict, str]]:
    """Yield (key, verdict, label) of this part of all histories, or of the one with this key; endless."""
    with quiet_threads():
        for number in itertools.count():
            name = key or f"back/{seed}/{number}"
            if not key and number % part[1] != part[0]:
                continue
            history = Backwards(root, random.Random(name))
            try:
                verdict = history.run()
            except Exception as error:  # noqa: BLE001 - a store that does not open is a failure, too
                verdict = Verdict(misread=[f"{type(error).__name__}: {error}"])
            finally:
                die(root)
            yield name, verdict, " ".join(history.done)
            if key:
                return


def cases(
    root: Path, seed: int, part: tuple[int, int], key: str = "", *, quick: bool = False
) -> Iterator[tuple[str, Verdict, str]]:
    """Yield (key, verdict, label) of this part of all cases, or of the one with this key.

    Endless, by other seeds, unless it is a quick run.
    """
    with quiet_threads():
        stories = [Story.of(name, root) for name in CONFIGS]
        turn = int(key.rpartition("/")[2]) if key else seed

        while True:
            for point in points(stories, turn) if key else chosen(stories, turn, part, every=EVERY if quick else None):
                if key and point.key != key:
                    continue

                left = left_at(point)
                if left is None:
                    continue

                try:
                    verdict = judge(left, root, point.story.config, random.Random(point.key))
                except Exception as error:  # noqa: BLE001 - a store that does not open is a failure, too
                    verdict = Verdict(misread=[f"{type(error).__name__}: {error}"])
                finally:
                    die(root)
                yield point.key, verdict, left.label
            if key or quick:
                return
            turn += 1


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Judge some deaths and `QUICK_HISTORIES`; in deep mode, as many as fit into the given seconds."""
    counts, begin_s = Counts(), time.monotonic()
    with scratch_folder() as folder:
        root = folder / "store"
        back = histories(root, seed, part, case)
        if quick:
            back = itertools.islice(back, -(-QUICK_HISTORIES // part[1]))
        kinds = (
            ("numbers that go back", back, 0.3),
            ("killed deliveries", cases(root, seed, part, case, quick=quick), 1.0),
        )
        for kind, search, share in kinds:
            if case and case.startswith("back/") != (search is back):
                continue
            for key, verdict, label in search:
                counts.take(kind, verdict, f"{key}: {label}", again("deliveries", seed, key))
                if not quick and time.monotonic() > begin_s + seconds * share:
                    break
    return counts
