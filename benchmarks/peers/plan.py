"""What the programs of the race are told, and what they answer; both are JSON files."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.peers.contestants import Contestant


@dataclass
class Plan:
    """What a program of the race does.

    Parameters
    ----------
    folder : str
        For data; it is deleted afterwards.
    rows, rounds : int
        Rows of a batch; rounds that count.
    batches : int
        Micro-batches that count, of each query of Spark's.
    puts : int
        Single puts with a sync; there are twenty times as many without one.
    parts, bodies : list of str
    classpaths : dict
        See `tools.Tools`.
    missing : dict
        The tools that cannot be had, and why.
    """

    folder: str
    rows: int
    rounds: int
    batches: int
    puts: int
    parts: list[str]
    bodies: list[str]
    classpaths: dict[str, str]
    missing: dict[str, str]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        return cls(**json.loads(path.read_text()))


@dataclass
class Series:
    """The rounds of one contestant with one kind of bodies: rows per second, and CPU seconds for a million rows."""

    rates: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


@dataclass
class Found:
    """What a program of the race has measured.

    Parameters
    ----------
    series : dict
        By `key(part, bodies, name)`.
    failed : dict
        What a contestant said when it failed, by `part/name`. It is in no table then.
    """

    series: dict[str, Series] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, contestant: Contestant, bodies: str, rows: int, wall_s: float, cpu_s: float) -> None:
        """Add one round."""
        series = self.series.setdefault(key(contestant.part, bodies, contestant.name), Series())
        series.rates.append(rows / wall_s)
        series.cpu_s.append(1e6 * cpu_s / rows)

    def take_turns(
        self,
        contestants: Iterable[Contestant],
        bodies: str,
        rounds: int,
        once: Callable[[Contestant], tuple[int, float, float]],
    ) -> None:
        """Let each contestant run once a round, first and last by turns. Round 0 warms up.

        `once` gives the rows, the time by the clock and the CPU time. A contestant that fails is left out, and it says
        why.
        """
        running = list(contestants)
        for number in range(rounds + 1):
            for contestant in running[number % max(1, len(running)) :] + running[: number % max(1, len(running))]:
                name = f"{contestant.part}/{contestant.name}"
                if name in self.failed:
                    continue
                try:
                    rows, wall_s, cpu_s = once(contestant)
                except Exception as error:  # noqa: BLE001 # the race goes on; the result says it, and the exit status
                    traceback.print_exc()
                    self.failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
                    continue
                if number:
                    self.add(contestant, bodies, rows, wall_s, cpu_s)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Found:
        found = json.loads(path.read_text())
        return cls({name: Series(**series) for name, series in found["series"].items()}, found["failed"])


def key(part: str, bodies: str, name: str) -> str:
    """The name of a series."""
    return f"{part}/{bodies}/{name}"
