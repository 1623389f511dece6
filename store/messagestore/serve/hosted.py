"""The verbs of the seam, carried out on a store of this host for clients of other hosts.

A client's reader has a reader here, which is found by the id that the client made up, and made again when it is not
there: readers that nobody has used for a while are closed, and there are never more than `MOST_READERS`. A `gather`
or a report gets a reader of its own, so that it does not keep others waiting.

The settings are those of the server. What a client sends about them is not looked at.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sized
from functools import lru_cache
from pathlib import Path
from typing import Any

from messagestore.errors import ProtocolError
from messagestore.files.disk import Disk, File
from messagestore.files.staging_files import sizes_of
from messagestore.format.config import StoreConfig
from messagestore.log.store_files import Paths
from messagestore.session import attached_store
from messagestore.spi.interface import MOST_NAMED, StoreReader, StoreWriter
from messagestore.spi.local import LocalReader, LocalWriter, replaced
from messagestore.spi.wire.values import checked

READS = (
    "describe",
    "broker_name",
    "ends",
    "begins",
    "places",
    "seek",
    "prove_last",
    "mean_sizes",
    "sizes",
    "find",
    "published_progress",
)
"""What a role that reads may ask for."""
REPORTS = ("view", "offsets", "lag", "group_lag")
"""The same for calls that look through a whole store."""
MOST_READERS = 64
_IDLE_READER_S = 300.0


class Hosted:
    """A store that is served.

    Parameters
    ----------
    root : str
    config : StoreConfig
        The server's settings, with which the store is read and written.
    staging_ttl_s : float
    read_only : bool
    """

    def __init__(
        self, root: str, config: StoreConfig, *, staging_ttl_s: float = 86_400.0, read_only: bool = False
    ) -> None:
        self.root, self.config, self.read_only = root, config, read_only
        self._staging_ttl_s = staging_ttl_s
        self._readers: OrderedDict[str, _Reader] = OrderedDict()
        self._mutex = threading.Lock()
        self.over = threading.Event()
        """Set while the server ends."""

    # ---- reading

    def read(self, reader_id: str, verb: str, arguments: Any, store_id: str = "") -> Any:
        """The answer of a verb in `READS`, or of `publish_progress`.

        `ends` has the token of the caller's last answer in place of that answer, and None as the result if nothing has
        changed since.

        Parameters
        ----------
        reader_id, verb, arguments
            Of the request.
        store_id : str
            The store that the client reads; empty: it does not know yet.

        Raises
        ------
        StoreWentBackwardsError
            This server, which may have been started since the client's last request, serves another store.
        """
        if verb == "ends" and isinstance(arguments, dict):
            token = checked(arguments.pop("token", ""), str, "ends.token")
        checked_arguments = bound(StoreReader, verb, arguments)
        with self._reader(reader_id) as reader:
            self._check_store(reader.store, store_id)
            answer = getattr(reader.store, verb)(**checked_arguments)
        return None if verb == "ends" and answer.token == token else answer

    def find(
        self, arguments: Any, store_id: str, is_gone: Callable[[], bool], most: int
    ) -> dict[tuple[str, int], list[int]]:
        """The numbers of all messages with one of some keys, by a reader of its own, which may look through the whole
        store: for as long as the client is there, and at most this many numbers.
        """
        checked_arguments = bound(StoreReader, "find", arguments)
        with self.reading(is_gone) as store:
            self._check_store(store, store_id)
            return store.find(**checked_arguments, most=most)

    def _check_store(self, store: LocalReader, store_id: str) -> None:
        if store_id and store.store_id != store_id:
            raise replaced(self.root, store_id, store.store_id)

    @contextlib.contextmanager
    def reading(self, is_gone: Callable[[], bool] | None = None) -> Iterator[LocalReader]:
        """A reader for one stream.

        Parameters
        ----------
        is_gone : function, optional
            Whether nobody waits for what is read any more: then the next look at a file raises
            `ConnectionAbortedError`, as it does when the server ends.
        """
        disk = None if is_gone is None else _WatchedDisk(lambda: is_gone() or self.over.is_set())
        with contextlib.closing(LocalReader(self.root, self.config, disk=disk)) as store:
            yield store

    @contextlib.contextmanager
    def _reader(self, reader_id: str) -> Iterator[_Reader]:
        with self._mutex:
            reader = self._readers.pop(reader_id, None)
            if reader is None:
                reader = _Reader()
            self._readers[reader_id] = reader
            reader.users += 1
            old = self._too_old()

        for old_reader in old:
            old_reader.close()

        try:
            with reader.mutex:
                if reader.opened is None:
                    reader.opened = LocalReader(self.root, self.config)
                reader.used_s = time.monotonic()
                yield reader
        finally:
            with self._mutex:
                reader.users -= 1
                if reader.opened is None:
                    self._readers.pop(reader_id, None)

    def _too_old(self) -> list[_Reader]:
        """Readers to close, which are forgotten here."""
        before_s, gone = time.monotonic() - _IDLE_READER_S, []
        for reader_id, reader in list(self._readers.items()):
            if not reader.users and (len(self._readers) > MOST_READERS or reader.used_s < before_s):
                gone.append(self._readers.pop(reader_id))
        return gone

    def forget(self, reader_id: str) -> None:
        """Close a reader whose client has closed it."""
        with self._mutex:
            reader = self._readers.get(reader_id)
            if reader is None or reader.users:
                return
            del self._readers[reader_id]
        reader.close()

    # ---- writing

    def writer(self, client: str = "") -> LocalWriter:
        """A writer for a client; it holds nothing between two calls."""
        return LocalWriter(self.root, self.config, staging_ttl_s=self._staging_ttl_s, client=client)

    def staged(self, client: str) -> dict[str, int]:
        """The sizes of the files that a client has staged and that were not committed, by `stem_of` their names."""
        return sizes_of(Paths(self.root).staging, client, Disk())

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """End what is being read, until the block ends. What is being appended is finished; a commit that waits for
        another process is not begun.
        """
        self.over.set()
        try:
            with contextlib.ExitStack() as stack:
                if not self.read_only:
                    stack.enter_context(attached_store(self.root, self.config).nobody_waits())
                yield
        finally:
            self.over.clear()

    def close(self) -> None:
        """Close all readers."""
        with self._mutex:
            readers = list(self._readers.values())
            self._readers.clear()
        for reader in readers:
            reader.close()


class _WatchedDisk(Disk):
    """A disk that is read for a client, as long as the client is there.

    A report looks at each queue of the store and its files, and has no other place where it could ask whether the
    client has gone.
    """

    def __init__(self, is_gone: Callable[[], bool]) -> None:
        self._is_gone = is_gone

    def _check(self) -> None:
        if self._is_gone():
            raise ConnectionAbortedError("the client went away before its report was ready")

    def open(self, path: str | Path, *, writable: bool = False) -> File:
        self._check()
        return super().open(path, writable=writable)

    def pread(self, file: File, size: int, position: int) -> bytes:
        self._check()
        return super().pread(file, size, position)

    def pread_into(self, file: File, buffer: memoryview, position: int) -> int:
        self._check()
        return super().pread_into(file, buffer, position)

    def at_path(self, file: File) -> bool:
        self._check()
        return super().at_path(file)


class _Reader:
    """The reader of one client."""

    def __init__(self) -> None:
        self.users = 0
        self.used_s = time.monotonic()
        self.opened: LocalReader | None = None
        self.mutex = threading.Lock()

    @property
    def store(self) -> LocalReader:
        assert self.opened is not None
        return self.opened

    def close(self) -> None:
        with self.mutex:
            if self.opened is not None:
                self.opened.close()
                self.opened = None


def bound(kind: type, verb: str, arguments: Any) -> dict[str, Any]:
    """The arguments of a verb, after a check against its signature in the seam.

    Raises
    ------
    ProtocolError
        One is missing, unknown or of another type.
    """
    signature, hints = _signature(kind, verb)
    if not isinstance(arguments, dict):
        raise ProtocolError(f"{verb}: `arguments` must be an object")
    for name, value in arguments.items():
        if name not in hints:
            raise ProtocolError(f"{verb}: found the argument {name!r:.60}; allowed are {', '.join(hints) or 'none'}")
        checked(value, hints[name], f"{verb}.{name}")

    missing = [
        name
        for name, parameter in signature.parameters.items()
        if name in hints and parameter.default is inspect.Parameter.empty and name not in arguments
    ]
    if missing:
        raise ProtocolError(f"{verb}: the argument {missing[0]!r} is missing")
    return {name: _bounded(value, f"{verb}.{name}") for name, value in arguments.items()}


def _bounded(value: Any, where: str) -> Any:
    """An argument, if it does not name more than a request may; what it names twice, it names once.

    Each queue, range, topic or key costs the store some calls of the system, however short it is in the request.
    """
    if not isinstance(value, Sized) or isinstance(value, str | bytes):
        return value
    if len(value) > MOST_NAMED:
        raise ProtocolError(f"{where}: found {len(value):,} values; allowed are {MOST_NAMED:,}. Ask for parts of them")
    if isinstance(value, list | tuple) and all(isinstance(item, str | tuple) for item in value):
        return list(dict.fromkeys(value))  # ranges stay: each has its own place in the answer
    return value


@lru_cache
def _signature(kind: type, verb: str) -> tuple[inspect.Signature, dict[str, Any]]:
    method = getattr(kind, verb)
    hints = {name: hint for name, hint in typing.get_type_hints(method).items() if name != "return"}
    return inspect.signature(method), hints


__all__ = ["READS", "REPORTS", "Hosted", "StoreReader", "StoreWriter", "bound"]
