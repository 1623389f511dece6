"""Opens a store wherever it is: the scheme of its location decides what opens it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from messagestore.errors import ConfigError
from messagestore.format.config import StoreConfig
from messagestore.spi.interface import Proven, StoreReader, Stores, StoreWriter
from messagestore.spi.local import LOCAL_STORES
from messagestore.spi.location import OPENERS, Location, location_words


class StoresByScheme:
    """The stores of this host and those that are served. It has no state, so a task receives only its name."""

    def reader(
        self,
        location: Location,
        config: StoreConfig | None = None,
        proven: Proven | None = None,
        *,
        to_gather: bool = False,
    ) -> StoreReader:
        """Open a store for reading."""
        return _stores_of(location).reader(location, config, proven, to_gather=to_gather)

    def writer(
        self,
        location: Location,
        config: StoreConfig,
        *,
        staging_ttl_s: float,
        staging_dir: str | None = None,
        ends_abruptly: bool = False,
    ) -> StoreWriter:
        """A writer for a store; nothing is opened yet."""
        return _stores_of(location).writer(
            location, config, staging_ttl_s=staging_ttl_s, staging_dir=staging_dir, ends_abruptly=ends_abruptly
        )


STORES: Stores = StoresByScheme()


def brokers_of(location: Location, topics: Iterable[str] | None = None, *, waits: bool = False) -> dict[str, Location]:
    """The stores of a cluster, by the names of their brokers; with topics, those that have one of them.

    Parameters
    ----------
    waits : bool
        Wait for a topic that the name servers do not know, for as long as the location's `retry_timeout_s`: they
        forget a topic while its brokers are down.

    Raises
    ------
    StoreUnavailableError
        No name server answers.
    """
    parts: dict[str, Location] = _opener(location).parts(location, topics, waits=waits)
    return parts


def _stores_of(location: Location) -> Stores:
    if not location.is_remote:
        return LOCAL_STORES
    if location.scheme not in OPENERS:
        raise ConfigError(f"{location}: nothing here opens it; allowed is {location_words()}", key="path")
    opener: Stores = _opener(location)
    return opener


def _opener(location: Location) -> Any:
    module, name = OPENERS[location.scheme].split(":")
    return getattr(importlib.import_module(module), name)
