"""Mutants of what a store accepts and touches: a broker's topics, links, owners, clocks, and leftover files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crash import fuzz
from crash.judge import Verdict
from crash.planting import Ground, Mutant, Search, patched, power_cuts, without
from messagestore import StoreError
from messagestore.batches import staging
from messagestore.files import disk as disk_module
from messagestore.files import index_file, staging_files
from messagestore.files.store_root import Place
from messagestore.format import message
from messagestore.log import store_files
from messagestore.recovery import examine
from messagestore.writer import store_clock
from messagestore.writer.store_clock import StoreClock


def hostile(*names: str) -> Search:
    """Run the named cases of the mode `fuzz`."""

    def search(ground: Ground) -> Iterator[Verdict]:
        for name in names:
            verdict = Verdict()
            try:
                fuzz.NAMED[name](Path(tempfile.mkdtemp(dir=ground.folder)))
            except (AssertionError, StoreError, OSError) as error:
                verdict.misread.append(f"{name}: {type(error).__name__}: {error}")
            yield verdict

    return search


def unchecked(_: Any) -> Any:
    """Names are used as whole paths: links on the way are followed."""
    return lambda place: place


def any_link(_: Any) -> Any:
    """A link of the first level is followed wherever it leads."""
    return lambda _place, fd, name, _path: os.open(name, os.O_PATH | os.O_DIRECTORY, dir_fd=fd)


MUTANTS = (
    Mutant(
        "users may put to a broker's topics",
        without(message, "_known_fault"),
        "fuzz: topics of a broker",
        hostile("topics of a broker"),
    ),
    Mutant(
        "links below the root are followed",
        patched(Place, "__enter__", unchecked),
        "fuzz: links to a victim",
        hostile("links to a victim"),
    ),
    Mutant(
        "a link to another user's folder is followed",
        patched(Place, "_linked", any_link),
        "fuzz: links to a victim",
        hostile("links to a victim"),
    ),
    Mutant(
        "files that root makes stay root's",
        without(Place, "take_file"),
        "fuzz: root works for the owner",
        hostile("root works for the owner"),
    ),
    Mutant(
        "folders that root makes stay root's",
        without(Place, "take_folder"),
        "fuzz: root works for the owner",
        hostile("root works for the owner"),
    ),
    Mutant(
        "a driver that lives is taken for dead",
        patched(staging_files, "is_dead", lambda _: lambda token: token != staging_files.UNKNOWN),
        "fuzz: orphans in staging",
        hostile("orphans in staging"),
    ),
    Mutant(
        "the data of large staging files are not compared with their CRC",
        patched(staging._Data, "take", lambda _: lambda *_: None),
        "fuzz: damaged staging files",
        hostile("damaged staging files"),
    ),
    Mutant(
        "the columns of staging files are not compared with their CRC",
        without(staging, "_compare"),
        "fuzz: damaged staging files",
        hostile("damaged staging files"),
    ),
    Mutant(
        "files of dead drivers wait for stagingTtl",
        without(staging_files, "is_dead", result=False),
        "fuzz: orphans in staging",
        hostile("orphans in staging"),
    ),
    Mutant(
        "the newest torn bytes are deleted",
        patched(store_files, "CUT_DAYS", lambda _: -1),
        "fuzz: torn bytes of years",
        hostile("torn bytes of years"),
    ),
    Mutant(
        "store times stay where a clock was far ahead",
        patched(store_clock, "MOST_AHEAD_MS", lambda _: 1 << 62),
        "fuzz: a clock that was far ahead",
        hostile("a clock that was far ahead"),
    ),
    Mutant(
        "the store checkpoint stays ahead of records to come",
        without(StoreClock, "_go_back_to"),
        "fuzz: a clock that was far ahead",
        hostile("a clock that was far ahead"),
    ),
    Mutant(
        "entries of an earlier time go into the index file of a later one",
        patched(index_file, "_MOST_BACK_MS", lambda _: 1 << 62),
        "fuzz: a clock that was far ahead",
        hostile("a clock that was far ahead"),
    ),
    Mutant(
        "a queue counts as settled whatever lies in it",
        patched(examine, "is_settled", lambda _: lambda *_arguments: True),
        "power cuts",
        power_cuts("async puts", "async batches", "first batch of a topic"),
    ),
    Mutant(
        "a queue counts as settled though units lie behind the clean end",
        patched(
            examine, "is_settled", lambda real: lambda files, topic, queue, end: real(files, topic, queue, 1 << 62)
        ),
        "power cuts",
        power_cuts("async puts", "async batches", "first batch of a topic"),
    ),
    Mutant(
        "the owner's own links are refused",
        without(disk_module, "is_owners_link", result=False),
        "fuzz: folders elsewhere",
        hostile("folders elsewhere"),
    ),
)
