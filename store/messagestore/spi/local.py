"""Opens stores on this host: the implementation of `Stores` that reads and writes files."""

from __future__ import annotations

from messagestore.format.config import StoreConfig
from messagestore.spi.interface import Proven
from messagestore.spi.local_reader import LocalReader
from messagestore.spi.local_writer import LocalWriter


class LocalStores:
    """The stores in folders of this host. It has no state, so a task receives only its name."""

    def reader(self, path: str, config: StoreConfig | None = None, proven: Proven | None = None) -> LocalReader:
        """Open a store for reading."""
        return LocalReader(path, config, proven)

    def writer(
        self, path: str, config: StoreConfig, *, staging_ttl_s: float, ends_abruptly: bool = False
    ) -> LocalWriter:
        """A writer for a store; nothing is opened yet."""
        return LocalWriter(path, config, staging_ttl_s=staging_ttl_s, ends_abruptly=ends_abruptly)


LOCAL_STORES = LocalStores()
