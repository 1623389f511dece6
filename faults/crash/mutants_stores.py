"""Bugs planted in the store's side of the interface between connector and store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from crash import surprises
from crash.harness import SMALL
from crash.judge import Verdict
from crash.mutants_readers import changed_under_streams, story
from crash.planting import Ground, Mutant, patched, without
from messagestore import Message, MessageStore, StoreError
from messagestore.spi.interface import Ends, Place
from messagestore.spi.local import LOCAL_STORES, LocalReader
from messagestore.spi.location import Location


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


def put_in_the_place_of_its_own(ground: Ground) -> Iterator[Verdict]:
    """A newer copy of the store is put at the path of an open reader."""
    with MessageStore.open(ground.root, SMALL) as store:
        store.put_message(Message("single", b"first", queue_id=0))
    reader = LOCAL_STORES.reader(Location.of(str(ground.root)), SMALL)
    reader.ends(["single"])

    copy, old = ground.folder / "copy", ground.folder / "old"
    shutil.copytree(ground.root, copy)
    with MessageStore.open(copy, SMALL) as store:
        store.put_message(Message("single", b"second", queue_id=0))
    ground.root.rename(old)
    copy.rename(ground.root)
    try:
        end = reader.ends(["single"]).queues["single", 0]
        yield Verdict(lost=[f"the reader sees {end} of 2 messages"] * (end != 2))
    except StoreError as error:
        yield Verdict(misread=[f"the copy is not read: {error}"])
    finally:
        reader.close()


MUTANTS = (
    Mutant("a store does not tell which queues were made again", patched(LocalReader, "ends", without_restarts), "a topic made again", story(surprises.made_again_as_long)),
    Mutant("a store does not tell where messages lie", patched(LocalReader, "places", nothing_lies_anywhere), "surprises", changed_under_streams),
    Mutant("a store takes any record for the last one that was read", patched(LocalReader, "prove_last", any_crc), "a backup that grows alike", story(surprises.restored_and_grown_alike)),
    Mutant("a reader does not open the folder that was put in the place of its own", without(LocalReader, "_reopen"), "a copy at the path", put_in_the_place_of_its_own),
)  # fmt: skip
