"""Mutants of what a store accepts and touches: topics of a broker, links, owners, clocks, and files left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from crash import fuzz
from crash.judge import Verdict
from crash.planting import Ground, Mutant, Search, without
from messagestore import StoreError, message


def hostile(*names: str) -> Search:
    """The named cases of the mode `fuzz`."""

    def search(ground: Ground) -> Iterator[Verdict]:
        for name in names:
            verdict = Verdict()
            try:
                fuzz.NAMED[name](Path(tempfile.mkdtemp(dir=ground.folder)))
            except (AssertionError, StoreError, OSError) as error:
                verdict.misread.append(f"{name}: {type(error).__name__}: {error}")
            yield verdict

    return search


MUTANTS = (
    Mutant(
        "users may put to a broker's topics",
        without(message, "_known_fault"),
        "fuzz: topics of a broker",
        hostile("topics of a broker"),
    ),
)
