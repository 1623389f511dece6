"""Counts what one mode of `make crash` did and found."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from crash.judge import Verdict

_KEPT_FAILURES = 20


@dataclass
class Counts:
    """Counts cases by class, and what was wrong.

    Parameters
    ----------
    cases : Counter
        Class -> number of cases.
    lost, duplicated, misread : int
        Messages or batches that were promised and are missing; that are stored twice; everything else that is wrong.
    failures : list of str
        The failures, each with the command that repeats it.
    notes : list of str
        What could not be done on this machine: printed prominently.
    processor_s : float
        The seconds of processors that it took, with those of all processes that it started and waited for.
    """

    cases: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    duplicated: int = 0
    misread: int = 0
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    processor_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.misread)

    def take(self, kind: str, verdict: Verdict, label: str, command: str) -> None:
        """Count one more case."""
        self.cases[kind] += 1
        if not verdict.ok:
            self.fail(f"{label}: {verdict}", command, verdict)

    def fail(self, text: str, command: str, verdict: Verdict | None = None) -> None:
        """Record a failure."""
        verdict = verdict or Verdict(misread=[text])
        self.lost += len(verdict.lost)
        self.duplicated += len(verdict.duplicated)
        self.misread += len(verdict.misread)
        if len(self.failures) < _KEPT_FAILURES:
            self.failures.append(f"{text[:1500]}\n    again: {command}")

    def add(self, other: Counts) -> None:
        self.cases += other.cases
        self.lost += other.lost
        self.duplicated += other.duplicated
        self.misread += other.misread
        self.failures += other.failures
        self.processor_s += other.processor_s
        self.notes += [note for note in other.notes if note not in self.notes]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "cases": dict(self.cases)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Counts:
        return cls(**{**fields, "cases": Counter(fields["cases"])})

    @property
    def words(self) -> str:
        """Return the counts per class in words."""
        return ", ".join(f"{count:,} {kind}" for kind, count in self.cases.items()) or "nothing"


def again(mode: str, seed: int, case: str) -> str:
    """Return the command that repeats a case."""
    return f"make crash ARGS={shlex.quote(f'--only {mode} --seed {seed} --case {shlex.quote(case)}')}"
