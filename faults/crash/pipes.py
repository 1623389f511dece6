"""The mode `pipes` of `make crash`: consumers and pipes from topic to topic that are killed, stopped and rebalanced.

A pipe polls a topic and appends a result for each message, with its group's progress in the same batch. A story of one
pipe, and of another group that commits without a batch, runs on a disk that records every operation. For each operation there
are images of a kill, whole and with half of a write, and of power cuts. The next process goes on with the pipe to its
end, and each message must have one result. What `append_batch` and `commit` had returned for must hold.

Beside it, workers in processes of their own share the queues of a topic on a real disk. They are killed and stopped
(SIGSTOP) at any moment of a rebalance, and others come. At the end, each message has one result.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from crash import checker
from crash.counts import Counts
from crash.counts import again as again_command
from crash.faults import quiet_threads
from crash.harness import SMALL, die, scratch_folder
from crash.images import POWER_MODES, half_write, with_half_write
from crash.imitate import another_boot
from crash.judge import Verdict, note_faults
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.power_cut import Folder
from crash.turns import taken
from crash.workloads import ASYNC, SEGMENTS
from messagestore import Consumer, Message, MessageStore, StoreConfig, StoreError
from messagestore.files.consumer_offsets import ConsumerOffsets

EVERY = 17
"""How many runs take all deaths between them."""
IN, OUT, GROUP, WATCHER = "in", "out", "pipe", "watcher"
QUEUES, COUNT, MOST = 2, 18, 2
CONFIGS = {"sync": SMALL, "async": ASYNC, "over segments": SEGMENTS}


def fill(
    root: Path, config: StoreConfig, disk: MemDisk | None = None, queues: int = QUEUES, count: int = COUNT
) -> None:
    """Put the messages that are to be read."""
    with MessageStore.open(root, config, disk=disk) as store:
        store.create_topic(IN, queues)
        for number in range(count):
            store.put_message(Message(IN, b"%d" % number, queue_id=number % queues))
        store.flush()


def step(store: MessageStore, consumer: Consumer, most: int = MOST) -> int:
    """Read some messages, and append their results with the group's progress; how many there were."""
    bodies = [message.body for messages in consumer.poll(0, most).values() for message in messages]
    if bodies:
        store.append_batch(pa.table({"body": bodies}), topic=OUT, queue_id=0, progress=consumer.positions())
    return len(bodies)


def results(store: MessageStore) -> Counter[bytes]:
    """How often each message has a result."""
    counts: Counter[bytes] = Counter()
    while messages := store.get_message(OUT, 0, counts.total(), 1000).messages:
        counts.update(message.body for message in messages)
    return counts


# ---- a kill at every operation


@dataclass
class Story:
    """One recorded pipe, and what had returned until each operation.

    Parameters
    ----------
    done : list of (int, int)
        How many operations had been done, and how many messages had results then.
    watched : list of (int, int)
        The same for the place of a group that commits without a batch.
    """

    name: str
    config: StoreConfig
    disk: MemRecordingDisk
    done: list[tuple[int, int]] = field(default_factory=list)
    watched: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, root: Path) -> Story:
        config = CONFIGS[name]
        before = MemDisk(root)
        fill(root, config, before)
        story = cls(name, config, MemRecordingDisk(root, before.content()))
        try:
            story._tell(root)
        finally:
            die(root)
        return story

    def _tell(self, root: Path) -> None:
        disk, count = self.disk, 0
        with (
            MessageStore.open(root, self.config, disk=disk) as store,
            Consumer(root, GROUP, IN, config=self.config, disk=disk) as pipe,
            Consumer(root, WATCHER, IN, config=self.config, disk=disk) as watcher,
        ):
            while some := step(store, pipe):
                count += some
                self.done.append((disk.position, count))
                watcher.poll(0, 2)
                watcher.commit()
                self.watched.append((disk.position, sum(watcher.position(queue) for queue in watcher.assignment())))

    def until(self, cut: int, said: list[tuple[int, int]]) -> int:
        return max((count for position, count in said if position <= cut), default=0)


@dataclass(frozen=True)
class Death:
    """Where a story ended, and what was left."""

    key: str
    story: Story
    cut: int
    content: Folder
    label: str
    power_cut: bool


def deaths(story: Story, root: Path, *, stride: int) -> Iterator[Death]:
    """Yield kills at every operation, also with half a write, and power cuts at every `stride`th."""
    disk, number = story.disk, 0
    for cut in range(disk.position + 1):
        whole = disk.image(cut, "all").folder
        images = [(whole, f"kill {cut}", False)]
        if half_write(disk, cut) is not None:
            images.append((with_half_write(disk, cut, whole, root), f"kill {cut} in a write", False))
        if cut % stride == 0:
            power = disk.images(cut, POWER_MODES, limit=1, random_count=1, seed=cut)
            images += [(image.folder, f"power cut {cut}, {image.label}", True) for image in power]
        for content, label, power_cut in images:
            yield Death(f"{story.name}/{number}", story, cut, content, label, power_cut)
            number += 1


def judge(death: Death, root: Path) -> Verdict:
    """Go on as the next process does: each message must have one result."""
    verdict, config, story = Verdict(), death.story.config, death.story
    disk = MemDisk(root, death.content)
    with another_boot() if death.power_cut else contextlib.nullcontext():
        try:
            with MessageStore.open(root, config, disk=disk) as store:
                with Consumer(root, GROUP, IN, config=config, disk=disk) as pipe:
                    at, count = sum(pipe.position(queue) for queue in pipe.assignment()), results(store).total()
                    if at != count or at < story.until(death.cut, story.done):
                        verdict.misread.append(f"the group is at {at}, and there are {count} results")
                    while step(store, pipe, COUNT):
                        pass
                note_results(verdict, results(store), COUNT)
            watched = sum(table_of(disk).get(IN, WATCHER).values())
            if watched < story.until(death.cut, story.watched):
                verdict.lost.append(f"a commit is forgotten: the group is at {watched}")
            note_faults(verdict, checker.check(disk.tree()), "after close")
        except (StoreError, OSError, AssertionError) as error:
            verdict.misread.append(f"{type(error).__name__}: {error}")
        finally:
            die(root)
    return verdict


def table_of(disk: MemDisk) -> ConsumerOffsets:
    table = ConsumerOffsets(disk, disk.root)
    table.load()
    return table


def note_results(verdict: Verdict, counts: Counter[bytes], count: int) -> None:
    verdict.lost += [f"message {number}" for number in range(count) if not counts[b"%d" % number]]
    verdict.duplicated += [f"message {body!r}: {times} results" for body, times in counts.items() if times > 1]


# ---- workers that are killed and stopped

WORKER = """
import sys
from crash.pipes import work
work(sys.argv[1])
"""
WORKERS, SHARED_QUEUES, SHARED = 3, 6, 240


def work(root: str) -> None:
    """A worker of the pipe: a process that is killed at any moment, and says how far it has come."""
    with Consumer(root, GROUP, IN, config=SMALL) as consumer:
        while True:
            bodies = [message.body for messages in consumer.poll(0.05, MOST).values() for message in messages]
            if bodies:
                with MessageStore.open(root, SMALL.replace(lock_timeout="60s")) as store:
                    store.append_batch(pa.table({"body": bodies}), topic=OUT, queue_id=0, progress=consumer.positions())
            print(len(bodies), flush=True)


class Workers:
    """Processes that share the queues of a pipe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        command = [sys.executable, "-c", WORKER, str(self.root)]
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths}
        self.processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        )

    def hear(self, process: subprocess.Popen[bytes], count: int) -> str:
        """Wait until a worker has said something so many times; what it complained of if it ended."""
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(count):
            if not process.stdout.readline():
                return process.stderr.read().decode()[-500:]
        return ""

    def end(self, process: subprocess.Popen[bytes]) -> None:
        self.processes.remove(process)
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def stopped_workers(root: Path, chance: random.Random, rounds: int) -> Verdict:
    """Kill and stop workers while others come, and then let one worker finish."""
    verdict = Verdict()
    fill(root, SMALL, queues=SHARED_QUEUES, count=SHARED)
    workers = Workers(root)
    try:
        for _ in range(WORKERS):
            workers.start()
        for _ in range(rounds):
            one = chance.choice(workers.processes)
            said = workers.hear(one, chance.randrange(1, 6))
            if said:
                verdict.misread.append(f"a worker ended: {said}")
                workers.end(one)
                workers.start()
                continue
            if chance.random() < 0.5:
                one.send_signal(signal.SIGSTOP)
                workers.start()  # a rebalance begins while this worker cannot take part
                other = workers.processes[0] if workers.processes[0] is not one else workers.processes[1]
                workers.end(other)
                one.send_signal(signal.SIGCONT)
            else:
                workers.end(one)
                workers.start()
        while workers.processes:
            workers.end(workers.processes[0])
        with MessageStore.open(root, SMALL) as store, Consumer(root, GROUP, IN, config=SMALL) as consumer:
            while step(store, consumer, 100):
                pass
            note_results(verdict, results(store), SHARED)
    except (StoreError, OSError) as error:
        verdict.misread.append(f"{type(error).__name__}: {error}")
    finally:
        while workers.processes:
            workers.end(workers.processes[0])
    return verdict


# ---- the mode


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run kills and power cuts at every operation; then stopped workers.

    The quick profile takes another one in `EVERY` of the deaths for each seed.
    """
    counts, until_s = Counts(), time.monotonic() + seconds
    with scratch_folder() as folder, quiet_threads():
        root = folder / "store"
        for name in CONFIGS if not case else [each for each in CONFIGS if case.startswith(f"{each}/")]:
            every, runs = deaths(Story.of(name, root), root, stride=1), EVERY if quick and not case else 1
            for _, death in taken(every, runs, seed, (0, 1) if case else part):
                if case and death.key != case:
                    continue
                if not quick and not case and time.monotonic() > until_s:
                    return counts
                counts.take(
                    "killed pipes",
                    judge(death, root),
                    f"{death.key}: {death.label}",
                    again_command("pipes", seed, death.key),
                )
        for number in range(1 if quick else 1000):
            key = f"stopped workers/{number}"
            if (case and key != case) or (not case and number % part[1] != part[0]):
                continue
            if not quick and not case and time.monotonic() > until_s:
                break
            verdict = stopped_workers(folder / f"workers-{number}", random.Random(f"{seed}/{number}"), 8)
            counts.take("stopped workers", verdict, key, again_command("pipes", seed, key))
    return counts
