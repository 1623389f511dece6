"""Bugs planted in the store's side of the interface between connector and store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crash import surprises
from crash.mutants_readers import changed_under_streams, story
from crash.planting import Mutant, patched
from messagestore.spi.interface import Ends, Place
from messagestore.spi.local import LocalReader


def without_restarts(real: Any) -> Any:
    """A queue that was created again is not reported."""

    def ends(reader: LocalReader, *given: Any, **more: Any) -> Ends:
        return replace(real(reader, *given, **more), restarts={})

    return ends


def nothing_lies_anywhere(_: Any) -> Any:
    """The places of a queue's messages are never reported."""

    def places(_reader: LocalReader, _offsets: Any) -> dict[tuple[str, int], Place]:
        return {}

    return places


def any_crc(real: Any) -> Any:
    """Any record in the last place counts as the last record, whatever its bytes are."""

    def prove(reader: LocalReader, position: int, size: int, *, with_time: bool = False) -> Any:
        found = real(reader, position, size, with_time=with_time)
        return None if found is None else replace(found, crc=0)

    return prove


MUTANTS = (
    Mutant("a store does not tell which queues were made again", patched(LocalReader, "ends", without_restarts), "a topic made again", story(surprises.made_again_as_long)),
    Mutant("a store does not tell where messages lie", patched(LocalReader, "places", nothing_lies_anywhere), "surprises", changed_under_streams),
    Mutant("a store takes any record for the last one that was read", patched(LocalReader, "prove_last", any_crc), "surprises", changed_under_streams),
)  # fmt: skip
