"""What an operator asks about a store on this host. These functions open the store's files themselves.

The command line uses them for `status`, `groups`, `batches`, `dump`, `verify` and `recover`, which make sense only
where the files are. They are not a part of the interface to a store: a store on another host does not have them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from messagestore.files.mapped_file import Disk
from messagestore.format.config import StoreConfig
from messagestore.log.store_files import Paths, looks_like_store
from messagestore.read.view import StoreView
from messagestore.spi import local_status
from messagestore.spi.local_dump import dump
from messagestore.verify.verify import Finding, VerifyReport, verify

__all__ = ["Finding", "VerifyReport", "batches", "dump", "groups", "holds_store", "is_open", "status", "verify"]


def holds_store(path: str) -> bool:
    """Whether a folder holds a store, of this project or a broker's."""
    return looks_like_store(Disk(), Paths(path))


def is_open(path: str) -> bool:
    """Whether a writer is attached to a store, or was and has not closed it."""
    return Disk().exists(Paths(path).abort)


def status(path: str, config: StoreConfig | None = None) -> dict[str, Any]:
    """Who holds a store, how it was left and what it contains. `faults` lists what could not be read, in words.

    Raises
    ------
    NotAStoreError
        There is no store.
    """
    with _view(path, config) as view:
        return local_status.status_of(view)


def groups(path: str, config: StoreConfig | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """How far each consumer group has read each queue of its topics, and what could not be read, in words."""
    with _view(path, config) as view:
        return local_status.groups_of(view)


def batches(path: str, config: StoreConfig | None = None) -> list[dict[str, Any]]:
    """The versions that the store knows of each app, and which one comes next."""
    with _view(path, config) as view:
        return local_status.apps_of(view)


@contextlib.contextmanager
def _view(path: str, config: StoreConfig | None) -> Iterator[StoreView]:
    view = StoreView(path, config)
    try:
        yield view
    finally:
        view.close()
