"""The mode `halves` of `make crash`: transactions that a kill or a power cut interrupts.

A story prepares half messages, commits and rolls them back, and checks those that are left, on a disk that records
every operation. For each operation there are images of a kill and of power cuts. The next process must find that each
half message is open, or has ended once and in the way that its story wants, and that what was acknowledged still holds;
it then ends everything, a second time as well, and no half message may be checked more often than allowed.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from crash import checker
from crash.counts import Counts
from crash.counts import again as again_command
from crash.faults import quiet_threads
from crash.harness import SMALL, die, scratch_folder
from crash.imitate import another_boot
from crash.judge import Verdict, note_faults
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.power_cut import POWER_MODES, Folder
from crash.simdisk import Killed
from crash.turns import taken
from crash.workloads import ASYNC, SEGMENTS
from messagestore import (
    ASYNC_FLUSH,
    HalfMessageEndedError,
    LocalTransactionState,
    Message,
    MessageExt,
    MessageStore,
    StoreConfig,
    StoreError,
    StorePoisonedError,
)

EVERY = 17
"""How many runs take all deaths between them."""
CHECK_MAX = 2
TOPIC, OP, DISCARDED = "orders", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC"
COMMIT, ROLLBACK, UNKNOW = LocalTransactionState
LONG_AGO_MS = 1_000_000_000_000
"""When the half messages that are to be checked were made."""
PLANS = {b"commit": COMMIT, b"roll": ROLLBACK, b"wear": UNKNOW}
"""What a body begins with says how its half message is to end; one that wears out is discarded."""


def plan(body: bytes) -> LocalTransactionState:
    return PLANS[body.split(b"/")[0]]


@dataclass
class Told:
    """What the process had been told, or had told, until it died.

    Parameters
    ----------
    events : list of (int, str, bytes)
        How many operations had been done, what, and for which half message: "prepared", "ended", "asked".
    ids : dict of bytes -> str
        The message ids of the half messages.
    """

    events: list[tuple[int, str, bytes]] = field(default_factory=list)
    ids: dict[bytes, str] = field(default_factory=dict)

    def until(self, cut: int, what: str) -> set[bytes]:
        return {body for position, kind, body in self.events if position <= cut and kind == what}

    def asked(self, cut: int) -> Counter[bytes]:
        return Counter(body for position, kind, body in self.events if position <= cut and kind == "asked")


Note = Callable[[str, bytes], None]


def tell(store: MessageStore, note: Note, ids: dict[bytes, str]) -> None:
    """The story: half messages that end by their producer, and others that end by checks."""

    def prepare(body: bytes, born_ms: int | None = None) -> str:
        message = Message(TOPIC, body, queue_id=0, keys=["k"], born_timestamp_ms=born_ms)
        half = store.half_message(message, "payments")
        ids[body] = half.message_id
        note("prepared", body)
        return half.message_id

    def end(message_id: str, body: bytes) -> None:
        half = store.find_half(message_id)
        _ = half.commit() if plan(body) is COMMIT else half.rollback()
        note("ended", body)

    def check(message: MessageExt) -> LocalTransactionState:
        note("asked", message.body)
        return plan(message.body)

    for body in (b"commit/checked", b"roll/checked", b"wear/out"):
        prepare(body, LONG_AGO_MS)
    for body in (b"commit/at once", b"roll/at once"):
        end(prepare(body), body)
    store.put_message(Message(TOPIC, b"plain", queue_id=0))
    store.check_halves(check)
    end(prepare(b"commit/late"), b"commit/late")
    for _ in range(CHECK_MAX):
        store.check_halves(check)
    prepare(b"commit/left open")


CONFIGS = {
    "sync": SMALL.replace(transaction_check_max=CHECK_MAX),
    "async": ASYNC.replace(transaction_check_max=CHECK_MAX),
    "over segments": SEGMENTS.replace(transaction_check_max=CHECK_MAX),
}


@dataclass
class Story:
    """One recorded story."""

    name: str
    config: StoreConfig
    disk: MemRecordingDisk
    told: Told

    @classmethod
    def of(cls, name: str, root: Path) -> Story:
        config, told = CONFIGS[name], Told()
        disk = MemRecordingDisk(root)
        with contextlib.suppress(Killed, StorePoisonedError):
            try:
                with MessageStore.open(root, config, disk=disk) as store:
                    tell(store, lambda what, body: told.events.append((disk.position, what, body)), told.ids)
            finally:
                die(root)
        return cls(name, config, disk, told)


@dataclass(frozen=True)
class Death:
    """Where a story ended, and what was left.

    Parameters
    ----------
    key : str
        `sync/17`, which repeats it.
    story : Story
    cut : int
        How many operations had been done.
    content : Folder
    label : str
    power_cut : bool
    """

    key: str
    story: Story
    cut: int
    content: Folder
    label: str
    power_cut: bool

    @property
    def durable(self) -> bool:
        """Whether what was acknowledged must be there."""
        return not self.power_cut or self.story.config.flush_disk_type != ASYNC_FLUSH


def deaths(story: Story, *, stride: int) -> Iterator[Death]:
    """Yield a kill at every operation, and power cuts at every `stride`th."""
    disk, number = story.disk, 0
    for cut in range(1, disk.position + 1):
        yield Death(f"{story.name}/{number}", story, cut, disk.image(cut, "all").folder, f"kill {cut}", False)
        number += 1
        for image in disk.images(cut, POWER_MODES, limit=1, random_count=1, seed=cut) if cut % stride == 0 else ():
            yield Death(f"{story.name}/{number}", story, cut, image.folder, f"power cut {cut}, {image.label}", True)
            number += 1


class Judge:
    """Examines what one death left."""

    def __init__(self, death: Death, root: Path) -> None:
        self.death, self.root = death, root
        self.told = death.story.told
        self.verdict = Verdict()
        self.asked = self.told.asked(death.cut)
        if not death.durable:
            self.asked = Counter()  # a power cut takes what ASYNC_FLUSH had counted

    def judge(self) -> Verdict:
        """Do everything that the next process does."""
        disk = MemDisk(self.root, self.death.content)
        with another_boot() if self.death.power_cut else contextlib.nullcontext():
            try:
                if "commitlog/" in disk.tree():
                    with MessageStore.open(self.root, self.death.story.config, disk=disk) as store:
                        self._look(store, self.told.until(self.death.cut, "ended"))
                        self._end_all(store)
                    note_faults(self.verdict, checker.check(disk.tree()), "after close")
            except (StoreError, OSError, AssertionError) as error:
                self.verdict.misread.append(f"{type(error).__name__}: {error}")
            finally:
                die(self.root)
        return self.verdict

    def _bodies(self, store: MessageStore, topic: str) -> list[bytes]:
        return [message.body for message in store.get_message(topic, 0, 0, 1000).messages]

    def _open(self, store: MessageStore) -> list[bytes]:
        found = [store.look_message_by_id(half.message_id) for half in store.open_halves()]
        return [message.body for message in found if message is not None]

    def _look(self, store: MessageStore, ended: set[bytes]) -> None:
        """Check that each half message is open or has ended once, and that what was acknowledged holds."""
        places = {"open": self._open(store), "committed": self._bodies(store, TOPIC)}
        places["discarded"] = self._bodies(store, DISCARDED)
        prepared = self.told.until(self.death.cut, "prepared")

        for body in self.told.ids:
            where = [place for place, bodies in places.items() for found in bodies if found == body]
            wanted = {COMMIT: "committed", ROLLBACK: "", UNKNOW: "discarded"}[plan(body)]

            if len(where) > 1:
                self.verdict.duplicated.append(f"{body!r} is {' and '.join(where)}")
            elif where and where[0] not in ("open", wanted):
                self.verdict.misread.append(f"{body!r} is {where[0]}")
            elif not self.death.durable:
                continue
            elif not where and body in prepared and (wanted or not self._may_be_rolled_back(body)):
                self.verdict.lost.append(f"{body!r} was prepared, and is nowhere")
            elif body in ended and where == ["open"]:
                self.verdict.lost.append(f"{body!r} had ended, and is open")

    def _may_be_rolled_back(self, body: bytes) -> bool:
        """Whether the process may have been rolling it back when it died: then it had asked, or was not checking."""
        return self.asked[body] > 0 or body != b"roll/checked"

    def _end_all(self, store: MessageStore) -> None:
        """End every half message, twice; then no one is open, and each is where its story wants it."""

        def check(message: MessageExt) -> LocalTransactionState:
            self.asked[message.body] += 1
            return plan(message.body)

        for _ in range(CHECK_MAX + 2):
            store.check_halves(check)
        left = set(self._open(store))
        for body, message_id in self.told.ids.items():
            if plan(body) is UNKNOW:
                continue
            for _ in range(2):
                with contextlib.suppress(HalfMessageEndedError):  # it never came into the log
                    half = store.find_half(message_id)
                    _ = half.commit() if plan(body) is COMMIT else half.rollback()
            left.discard(body)
        if left or store.open_halves():
            self.verdict.misread.append(f"still open: {left or store.open_halves()}")
        for body, count in self.asked.items():
            if count > CHECK_MAX:
                self.verdict.misread.append(f"{body!r} was checked {count} times")
        committed = Counter(self._bodies(store, TOPIC))
        self.verdict.duplicated += [f"{body!r}: {count} times" for body, count in committed.items() if count > 1]
        self.verdict.misread += [f"{b!r} was committed" for b in committed if b != b"plain" and plan(b) is not COMMIT]
        for body in self.told.until(self.death.cut, "prepared") if self.death.durable else ():
            if plan(body) is COMMIT and not committed[body]:
                self.verdict.lost.append(f"{body!r} is not committed")
        ops = self._bodies(store, OP)
        self.verdict.misread += [
            f"op message {op!r}: brokers before 5.1 cannot read it" for op in ops if not op.isdigit()
        ]
        ends = Counter(ops)
        self.verdict.duplicated += [
            f"half message {at!r} ended {count} times" for at, count in ends.items() if count > 1
        ]


def verdicts(
    root: Path, names: tuple[str, ...] = tuple(CONFIGS), *, stride: int = 4
) -> Iterator[tuple[Death, Verdict]]:
    """Judge every death of some stories."""
    for name in names:
        for death in deaths(Story.of(name, root), stride=stride):
            yield death, Judge(death, root).judge()


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run a kill and power cuts at every operation; the quick profile takes another one in `EVERY` for each seed."""
    counts, until_s = Counts(), time.monotonic() + seconds
    with scratch_folder() as folder, quiet_threads():
        root = folder / "store"
        for name in CONFIGS if not case else (case.rpartition("/")[0],):
            every, runs = deaths(Story.of(name, root), stride=1), EVERY if quick and not case else 1
            for _, death in taken(every, runs, seed, (0, 1) if case else part):
                if case and death.key != case:
                    continue
                if not quick and not case and time.monotonic() > until_s:
                    return counts
                verdict = Judge(death, root).judge()
                label = f"{death.key}: {death.label}"
                counts.take("half messages", verdict, label, again_command("halves", seed, death.key))
    return counts
