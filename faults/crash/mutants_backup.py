"""Bugs planted in backups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from crash import backups
from crash.planting import Case, Ground, Mutant, Search, patched, without
from crash.workloads import Bases
from messagestore.backup import restoring
from messagestore.backup.copying import _Backup
from messagestore.backup.points import Point

_STRIDE = 3


def interrupted(*names: str, power_every: int = 1 << 30) -> Search:
    """Stories of backups, each with some of its kills and power cuts."""

    def search(ground: Ground) -> Iterator[Case]:
        for name in names:
            places = backups.Places(ground.folder / "backups")
            with backups.Story.told(name, places, Bases(places.store)) as story:
                for _, content in list(story.left(places, power_every=power_every))[::_STRIDE]:
                    yield partial(story.judged, places, content)

    return search


def _whole_files(real: Any) -> Any:
    """A segment of which something was copied counts as copied."""
    return lambda backup: (part for part in real(backup) if not part.start)


def _points_that_forget(real: Any) -> Any:
    """What a killed backup left counts with the sizes that it meant to reach, before it is there."""

    def note(backup: _Backup) -> None:
        sizes = {path: (size, 0) for _, path, size in backup._snapshot.log_files()}
        backup._files |= {path: found for path, found in sizes.items() if path not in backup._files}
        real(backup)

    return note


def _no_ancestors(real: Any) -> Any:
    """The restored store does not know whose copy it is."""

    def identify(point: Point, *arguments: Any) -> None:
        object.__setattr__(point, "known_ids", [])
        real(point, *arguments)

    return identify


def _whole_queues(real: Any) -> Any:
    """A queue file of which something was copied counts as copied."""

    def queues(backup: _Backup) -> Any:
        found, parts = real(backup)
        return found, [part for part in parts if not part.start]

    return queues


MUTANTS = (
    Mutant(
        "a backup takes a tail for the whole file",
        patched(_Backup, "_log_parts", _whole_files),
        "kills of backups",
        interrupted("roll-over"),
        case=23,
    ),
    Mutant(
        "a backup notes segments that are not copied yet",
        patched(_Backup, "_note", _points_that_forget),
        "kills of backups",
        interrupted("roll-over"),
        case=28,
    ),
    Mutant(
        "a backup makes a point before its files are synced",
        without(_Backup, "_sync"),
        "power cuts in backups",
        interrupted("async puts", "Spark commits", power_every=1),
        case=103,
    ),
    Mutant(
        "a restored store has no ancestors",
        patched(restoring, "_identify", _no_ancestors),
        "kills of backups",
        interrupted("Spark commits"),
    ),
    Mutant(
        "a backup takes the tail of a queue for the whole queue",
        patched(_Backup, "_queues", _whole_queues),
        "kills of backups",
        interrupted("async puts"),
        case=23,
    ),
)
