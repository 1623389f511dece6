"""Loads the compiled kernel (`store/kernel/`), which does the work of the codec on whole batches.

`lib` is the extension module, or None where it cannot be had; `why_not` then says why. Code that calls it asks `lib`
each time, so that a test can put another one there.

The environment variable `MESSAGESTORE_KERNEL` chooses: `off` does without the kernel, a path loads the kernel from that
file (the fault harness does so, for a kernel with a planted bug), and empty loads the one of the package.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from numpy.typing import NDArray

_log = logging.getLogger(__name__)

VERSION = 7
"""The version of the functions that this code calls. A kernel of another version is not used."""
VARIABLE = "MESSAGESTORE_KERNEL"
OFF = "off"
FILE = "_kernel.abi3.so"

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
Column: TypeAlias = tuple[Any, ...]
"""An array of Arrow: its data, offsets, validity (or None), offset, length, and whether its offsets have 64 bits. For
lists and maps the data are None, and the number of items of the child follows."""
Batch: TypeAlias = tuple[Any, ...]
"""The columns and settings of `encode`, as `record_encode` gathers them and `take_batch` in encode.c takes them."""


class Kernel(Protocol):
    """The functions of the kernel.

    Arrays are contiguous and in native byte order; `out` is filled. A size or a position that does not fit its buffer
    raises ValueError before a byte is touched; what does not fit only in the end (notes and bytes that changed since)
    raises it, too.
    """

    VERSION: int
    CRC32_METHOD: str

    def crc32(self, data: Buffer, crc: int = 0, /) -> int:
        """CRC-32 of the data, as zlib computes it."""

    def crc32_methods(self, data: Buffer, crc: int = 0, /) -> dict[str, int]:
        """The CRC-32 by each method that this processor has; for tests."""

    def crcs_of_ranges(self, data: Buffer, starts: Buffer, ends: Buffer, out: Buffer, /) -> None:
        """CRC-32 of each range of `data`: int64[n], int64[n], uint32[n]."""

    def xxh3_of_ranges(self, data: Buffer, starts: Buffer, ends: Buffer, out: Buffer, /) -> None:
        """XXH3 of each range of `data`: int64[n], int64[n], uint64[n]."""

    def java_hashes(self, data: Buffer, starts: Buffer, ends: Buffer, before: Buffer, out: Buffer, /) -> None:
        """`String.hashCode` of the UTF-8 text in each range: int64[n], int64[n], int32[1 or n], int32[n]."""

    def index_hashes(self, data: Buffer, starts: Buffer, ends: Buffer, before: Buffer, out: Buffer, /) -> None:
        """The index hash of the text in each range, which comes behind a text with the hash `before`."""

    def encode_size(self, batch: Batch, /) -> tuple[int, int] | None:
        """The bytes of all records, and the number of their index hashes; None if a row cannot be stored."""

    def encode(
        self,
        batch: Batch,
        order: Buffer | None,
        data: Buffer,
        starts: Buffer,
        tags_codes: Buffer,
        key_hashes: Buffer,
        key_counts: Buffer,
        /,
    ) -> int | None:
        """Write the records of the rows in this order (int64[n]; None: as they are), and what goes with them.

        Returns the sum of the row hashes mod 2**64 (0 if the batch has None in place of the fields of the digest), or
        None if a row cannot be stored.
        """

    def stamp(
        self,
        data: Buffer,
        starts: Buffer,
        queue_offsets: Buffer,
        physical_offsets: Buffer,
        store_timestamp_ms: int,
        store_timestamp_position: int,
        property_crc: bool,
        /,
    ) -> None:
        """Write the places, the store time and the `__CRC32#` into records that lie back to back (int64[n] each)."""

    def encode_message(
        self,
        body: Buffer,
        topic: bytes,
        magic: int,
        topic_hash: int,
        queue_id: int,
        flag: int,
        sys_flag: int,
        born_timestamp_ms: int,
        born_host: bytes,
        store_host: bytes,
        reconsume_times: int,
        prepared_transaction_offset: int,
        keys: Sequence[str],
        unique_key: str | None,
        tags: str | None,
        wait: bool,
        properties: Mapping[str, str],
        extra: Sequence[tuple[str, str]],
        reserved: frozenset[str] | None,
        max_body_size: int,
        property_crc: bool,
        /,
    ) -> tuple[bytearray, int, tuple[int, ...]] | None:
        """The record of one message, its tags code, and the index hashes of its UNIQ_KEY and keys.

        `topic` begins with TOPICLEN; `topic_hash` is that of `topic#`. Without `reserved` names, the message
        has no properties. None: it is unusual, or cannot be stored.
        """

    def stamp_message(
        self,
        record: bytearray,
        queue_offset: int,
        physical_offset: int,
        store_timestamp_ms: int,
        property_crc: bool,
        /,
    ) -> None:
        """Write the place, the store time and the `__CRC32#` into one record."""

    def frame(
        self,
        data: Buffer,
        starts: Buffer,
        sizes: Buffer,
        rows: Buffer,
        verify: bool,
        topic: Buffer,
        queue_id: int,
        queue_offsets: Buffer,
        physical_offsets: Buffer,
        renumbered: Buffer,
        /,
    ) -> tuple[int, int, int]:
        """Check n records: int64[n], int32[n], notes[n]; and int64[n], int64[n], bool[n] or empty.

        It stops at the first bad record and returns how many there are before it, and the bytes of their bodies and of
        their topics.
        """

    def measure(
        self, data: Buffer, rows: Buffer, texts: Buffer, reserved: Buffer, wanted: int, totals: Buffer, /
    ) -> int:
        """Read the texts of n records: notes[n], notes[n], int64[15]. It returns how many records have texts that it
        leaves to the scalar codec, and marks them in `rows`; the totals hold if there are none.
        """

    def fill_values(
        self, data: Buffer, rows: Buffer, texts: Buffer, which: int, offsets: Buffer, values: Buffer, valid: Buffer, /
    ) -> None:
        """One value of each record: offsets int32[n+1]; `valid` is a bitmap of zeros, or empty."""

    def fill_keys(
        self, data: Buffer, rows: Buffer, texts: Buffer, lists: Buffer, offsets: Buffer, values: Buffer, /
    ) -> None:
        """The keys of each record: int32[n+1], int32[k+1], bytes."""

    def fill_map(
        self,
        data: Buffer,
        rows: Buffer,
        texts: Buffer,
        reserved: Buffer,
        kind: int,
        maps: Buffer,
        name_offsets: Buffer,
        names: Buffer,
        value_offsets: Buffer,
        values: Buffer,
        /,
    ) -> None:
        """The user's own properties of each record (`kind` 0), or RocketMQ's (1): int32[n+1], then names and values."""

    def fill_numbers(self, data: Buffer, rows: Buffer, position: int, behind: int, width: int, out: Buffer, /) -> None:
        """One field of each head, of 4 or 8 bytes, behind 0, 1 or 2 hosts."""

    def scan(self, data: Buffer, usable: int, physical_offset: int, verify: bool, starts: Buffer, /) -> int:
        """The chain of good records from the first byte on, in the first `usable` bytes: how many there are."""

    def heads(self, data: Buffer, starts: Buffer, out: Buffer, /) -> None:
        """The heads of n records: int64[n], HEAD_DTYPE[n]."""

    def index_pages(self, key_hashes: Buffer, slot_count: int, touched: Buffer, /) -> None:
        """Set the flag of each page that holds the slot of a key: int32[n], bool[pages]."""

    def index_put(
        self,
        key_hashes: Buffer,
        first: int,
        physical_offsets: Buffer,
        timestamps_ms: Buffer,
        slot_count: int,
        first_number: int,
        begin_ms: int,
        bases: Buffer | None,
        chosen: Buffer | None,
        slots: Buffer,
        entries: Buffer,
        /,
    ) -> int:
        """Write the entries of keys `first` and following, as many as `entries` has room for, and change their slots.

        The keys of one put are int32[n], int64[n], int64[1 or n]; the first of them gets `first_number`. They are put
        in turns, each key once, in their order. `bases` (int64[pages]) says where in `slots` the first slot of each
        page is; or `slots` has only those slots that `chosen` (int32[m], ascending) names. It returns how many slots
        had no entry before.
        """

    def pread_parts(self, fd: int, out: Buffer, positions: Buffer, starts: Buffer, ends: Buffer, /) -> int:
        """Fill ranges of `out` from positions of a file, one system call each: int64[n] each.

        It stops at the first part that fails or is short, and returns how many parts there are before it.
        """

    def pwrite_parts(self, fd: int, data: Buffer, positions: Buffer, starts: Buffer, ends: Buffer, /) -> int:
        """Write ranges of `data` to positions of a file, as `pread_parts` reads them."""


def load(path: str | Path) -> Kernel:
    """The kernel in a file.

    Raises
    ------
    ImportError
        The file is missing, is no kernel, or is one of another version.
    """
    name = "messagestore.format._kernel"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, str(path), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    version = getattr(module, "VERSION", None)
    if version != VERSION:
        raise ImportError(f"{path}: found version {version}; allowed is {VERSION}. Compile it again: make setup")
    return cast(Kernel, module)


def _chosen() -> tuple[Kernel | None, str]:
    choice = os.environ.get(VARIABLE, "")
    if choice == OFF:
        return None, f"{VARIABLE}={OFF}"
    own = Path(__file__).with_name(FILE)
    if choice:
        return load(choice), ""  # whoever names a file wants that one, and no other
    if not own.is_file():
        return None, "it was not compiled when the package was installed (a C compiler and Python's headers are needed)"
    try:
        return load(own), ""
    except ImportError as error:
        return None, f"{error}"


lib, why_not = _chosen()


_untold = threading.Lock()
"""Taken, and never given back, by the first thread that tells."""


def tell_without() -> None:
    """Log once per process that batches are encoded or decoded without the kernel."""
    if not _untold.acquire(blocking=False):
        return
    _log.warning(
        "the compiled kernel of messagestore is missing: %s. Batches are encoded and decoded record by record in "
        "Python, which takes some 50 times as long",
        why_not,
    )
