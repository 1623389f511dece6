"""Which delay levels count where in the log.

A store has its delay levels, as it has its file sizes, but they may change: then the new ones count for the records
from a place in the log on. What a message waits for thus depends on its record's place only, whoever reads it back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messagestore.format.config import ROCKETMQS_LEVELS, delays_of

MOST_ENTRIES = 1000
"""The most delay levels that a store has, each from its place in the log on. Each change writes all of them."""


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """The delay levels of a store.

    Parameters
    ----------
    entries : tuple of (int, str)
        At least one: the physical offset from which on they count, ascending, and the levels, as `messageDelayLevel`
        names them. The first entry also counts below its offset.

    Examples
    --------
    >>> from messagestore.format.delay_levels import DelayLevels
    >>> levels = DelayLevels(((0, "1s 5s"),)).changed(4096, "1h")
    >>> levels.at(4095), levels.at(4096)
    ((1000, 5000), (3600000,))
    """

    entries: tuple[tuple[int, str], ...] = ((0, ROCKETMQS_LEVELS),)

    @property
    def last(self) -> str:
        """The levels of a record that is appended now."""
        return self.entries[-1][1]

    @property
    def longest_ms(self) -> int:
        """The longest delay of any of these levels, in milliseconds."""
        return max(max(delays_of(levels)) for _, levels in self.entries)

    def at(self, physical_offset: int) -> tuple[int, ...]:
        """The delays of a message whose record begins at a physical offset, in milliseconds; level 1 comes first."""
        after = bisect_right(self.entries, physical_offset, key=lambda entry: entry[0])
        return delays_of(self.entries[max(after - 1, 0)][1])

    def of(self, physical_offsets: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], tuple[int, ...]]]:
        """The records that have the same levels: their numbers, int64[k], and the delays as `at` gives them.

        Parameters
        ----------
        physical_offsets : int64[n]
            Where each record begins.
        """
        begins = np.array([begin for begin, _ in self.entries[1:]], np.int64)
        numbers = np.searchsorted(begins, physical_offsets, side="right")
        for number in np.unique(numbers).tolist():
            yield np.flatnonzero(numbers == number), delays_of(self.entries[number][1])

    def changed(self, physical_offset: int, levels: str, log_begin: int = 0) -> DelayLevels:
        """These levels, with other ones from a place on; the same object if they count there and behind it already.

        What was to count from there on or behind it does not any more, and what counts only below the begin of the log
        is left out.
        """
        begin, last = self.entries[-1]
        if begin <= physical_offset and delays_of(last) == delays_of(levels):
            return self
        entries = [entry for entry in self.entries if entry[0] < physical_offset]
        if not entries or delays_of(entries[-1][1]) != delays_of(levels):
            entries.append((physical_offset, levels))
        while len(entries) > 1 and entries[1][0] <= log_begin:
            del entries[0]
        return DelayLevels(tuple(entries))

    def below(self, end: int) -> DelayLevels:
        """These levels without those that count for no record of a log that ends at `end`."""
        return DelayLevels((self.entries[0], *(entry for entry in self.entries[1:] if entry[0] < end)))


ROCKETMQS = DelayLevels()
"""RocketMQ's own levels, from the first record on."""
