"""The mode `model` of `make crash`: random histories of everything, beside a plain model.

A history is a list of actions (`crash.model_actions`), each with a seed of its own. They put in every way, append and
replay batches, delay, deliver, prepare, commit, send back, delete, publish, rebuild and restore, while settings change,
clocks jump, disks fill up and fail, processes die, and the power is cut. Whenever a process opens the store,
everything in it is compared with the model (`crash.plain_model`), and the bytes with `crash.checker`.

A history that fails is shrunk to the actions that are needed, and its key repeats it: `17:0,4,9` is history 17 with
these actions only.

A second layer has real processes on a real disk (`crash.model_processes`); the keys of its stores are `processes-0` and
so on.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from crash import model_processes
from crash.counts import Counts, again
from crash.faults import quiet_threads
from crash.harness import die, scratch_folder
from crash.model_actions import ACTIONS, MEETINGS, Act
from crash.model_world import Died, World
from crash.shrink import smallest
from crash.simdisk import Killed
from messagestore import StoreError
from messagestore.files import state
from messagestore.format import unique_key
from messagestore.services import Services
from messagestore.writer.flush import FlushService
from messagestore.writer.segments_ahead import AllocateService

QUICK_COUNT = 50
LEAST, MOST = 15, 70
"""How many actions a history has."""
MEETING_SHARE = 0.3
"""How many histories consist of actions that rarely meet otherwise."""
PROCESSES = "processes-"
"""Begins the key of a store that real processes use."""
DEEP_SHARE = 50
"""In deep mode, real processes use a store after so many histories."""
MOST_FAILURES = 3
"""A search ends with so many: each of them is shrunk, which takes a while."""
_BOOT = 1


@dataclass(frozen=True)
class History:
    """One history.

    Parameters
    ----------
    seed, number : int
    only : tuple of int | None
        The actions that are done; None: all.
    """

    seed: int
    number: int
    only: tuple[int, ...] | None = None

    @classmethod
    def of_key(cls, seed: int, key: str) -> History:
        number, colon, only = key.partition(":")
        return cls(seed, int(number), tuple(map(int, only.split(","))) if only else () if colon else None)

    @property
    def key(self) -> str:
        return str(self.number) + ("" if self.only is None else ":" + ",".join(map(str, self.only)))

    def actions(self) -> list[tuple[int, Act, int]]:
        """The actions: number, function, seed."""
        chance = random.Random(f"{self.seed} {self.number}")
        if chance.random() < MEETING_SHARE:
            meeting = chance.choice(MEETINGS)
            found = [(at, chance.choice(meeting), chance.randrange(1 << 30)) for at in range(MOST)]
            return [each for each in found if self.only is None or each[0] in self.only]

        kinds, weights = list(ACTIONS), list(ACTIONS.values())
        some = chance.sample(range(len(kinds)), chance.randint(len(kinds) // 2, len(kinds)))
        for at in range(len(kinds)):  # each history leaves some kinds out, so that the others meet more often
            if at not in some and at > 3:
                weights[at] = 0
        count = chance.randint(LEAST, MOST)
        chosen = chance.choices(kinds, weights, k=count)
        found = [(at, act, chance.randrange(1 << 30)) for at, act in enumerate(chosen)]
        return [each for each in found if self.only is None or each[0] in self.only]


@contextlib.contextmanager
def simulated() -> Iterator[list[AllocateService]]:
    """Let the store's threads work when they are told to, so that a history has one course.

    Yields the services that want to make segments ahead.
    """
    asked: list[AllocateService] = []

    def wake(flush: FlushService) -> None:
        try:
            with flush._undispatched_logged():
                flush.writer.publish(move=False)
        except (StoreError, OSError) as error:
            flush.writer.poison(f"the flush thread failed ({error})")

    def ask(service: AllocateService) -> None:
        asked.append(service)

    numbers = random.Random(1)

    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=numbers.getrandbits(128), version=4)

    before = state._boot_hash
    state._boot_hash = _BOOT
    try:
        with (
            quiet_threads(),
            mock.patch.object(unique_key, "_counter", itertools.count()),
            mock.patch.object(unique_key, "_fixed_part", return_value=b"simulation"),
            mock.patch.object(AllocateService, "ask", ask),
            mock.patch.object(uuid, "uuid4", uuid4),
            mock.patch.object(FlushService, "wake", wake),
            mock.patch.object(Services, "_start_periodic"),
        ):
            yield asked
    finally:
        state._boot_hash = before


def run_history(history: History, root: Path, cases: Counter[str] | None = None) -> World:
    """Run one history; the world has the verdict, and says what was done."""
    with simulated() as asked:
        world = World(root, random.Random(f"world {history.seed} {history.number}"))

        try:
            for at, act, seed in history.actions():
                world.pass_time(1)
                _do(world, at, partial(_with_segments, act, asked), seed, cases)
                if not world.verdict.ok:
                    break
            if world.verdict.ok:
                _end(world)
        except Exception as error:
            world.wrong(f"{type(error).__name__}: {error}")
            if cases is None:
                raise
        finally:
            with contextlib.suppress(Killed, StoreError):
                world.drop_readers()
            for actor in world.actors:
                world.end(actor)
            die(root)
    return world


def _with_segments(act: Act, asked: list[AllocateService], world: World, at: int, chance: random.Random) -> None:
    """Do an action, and then make the segments that it asked for, as a thread would do it."""
    try:
        world.note(f"{at}: {act.__name__}")
        act(world, at, chance)
        with world.trying("segments"):
            for service in asked:
                service.writer.sync_segment_name()
                while service._may_make():
                    service._spares.append(service._make())
    finally:
        asked.clear()


def _do(world: World, at: int, act: Act, seed: int, cases: Counter[str] | None) -> None:
    try:
        act(world, at, random.Random(seed))
    except (Died, Killed) as error:
        world.note(f"  died: {error}")
        if cases is not None:
            cases["deaths of the model"] += 1
        world.died()


def _end(world: World) -> None:
    for _ in range(5):
        try:
            world.finish()
            return
        except Died as error:
            world.note(f"  died: {error}")
            world.died()
    world.wrong("the store cannot be closed")


def shrunk(history: History, root: Path) -> History:
    """The same history with the actions only that are needed."""

    def wrong(only: Sequence[int]) -> bool:
        return not run_history(History(history.seed, history.number, tuple(only)), root, Counter()).verdict.ok

    numbers = [at for at, _, _ in history.actions()]
    return History(history.seed, history.number, tuple(smallest(numbers, wrong)))


def failed(history: History, root: Path) -> tuple[History, World]:
    """A minimal history that fails, and what was found in it."""
    small = shrunk(history, root)
    world = run_history(small, root, Counter())
    return (small, world) if not world.verdict.ok else (history, run_history(history, root, Counter()))


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run `QUICK_COUNT` histories, or in deep mode for the given seconds."""
    counts, until_s = Counts(), time.monotonic() + seconds
    with scratch_folder() as folder:
        root = folder / "store"

        if case.startswith(PROCESSES):
            processes(folder, seed, int(case.removeprefix(PROCESSES)), counts)
            return counts

        if case:
            history = History.of_key(seed, case)
            world = run_history(history, root, counts.cases)
            print("\n".join(world.log))
            counts.take("histories of the model", world.verdict, history.key, again("model", seed, history.key))
            return counts

        number = part[0]
        while number < QUICK_COUNT if quick else time.monotonic() < until_s:
            history = History(seed, number)
            counts.cases["actions of the model"] += len(history.actions())
            world = run_history(history, root, counts.cases)
            if not world.verdict.ok:
                history, world = failed(history, root)

            text = f"{history.key}: {'; '.join(world.log[-12:])}"
            counts.take("histories of the model", world.verdict, text, again("model", seed, history.key))
            number += part[1]
            if len(counts.failures) == MOST_FAILURES:
                break
            if not quick and number % (DEEP_SHARE * part[1]) == part[0]:
                processes(folder, seed, number, counts)

        for number in range(part[0], model_processes.STORES if quick else 0, part[1]):
            processes(folder, seed, number, counts)
    return counts


def processes(folder: Path, seed: int, number: int, counts: Counts) -> None:
    """Let real processes use one store for some rounds; a failure says what each of them said."""
    key = f"{PROCESSES}{number}"
    verdict, said = model_processes.one_store(folder / key, f"{seed} {number}", counts)
    if not verdict.ok:
        print("\n".join([f"{key}: {verdict}", *said]), flush=True)
    counts.take("stores of the model's processes", verdict, key, again("model", seed, key))
