"""Where consumer groups are: their table of offsets, with what BATCH records of the log add to it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.group_progress import add_pending
from messagestore.read.view import StoreView

_TRIES = 3


def group_offsets(view: StoreView) -> ConsumerOffsets:
    """The table of offsets as it is now, with what is pending (`log.group_progress`). It is not to be saved.

    Raises
    ------
    CorruptionError
        The table, or a BATCH record that carries progress, cannot be read.
    ConfigError
        A broker keeps the offsets in RocksDB.
    """
    table = ConsumerOffsets(view.files.disk, view.files.paths.root)
    for _ in range(_TRIES):
        table.load()
        if add_progress(view, table):
            break  # otherwise the table is older than what the log has by now, or a broker has moved a group
    return table


def add_progress(view: StoreView, table: ConsumerOffsets) -> bool:
    """Add what is pending to a table that was loaded; whether each group was where its BATCH records expect it."""
    first = table.settled
    if first is None:
        return True
    view.refresh()
    end = view.max_offset(BATCH_TOPIC, 0)

    def read(start: int, count: int) -> NDArray[np.void]:
        return view.units(BATCH_TOPIC, 0, start, start + count)

    return not add_pending(table, view.files.commit_log, first, end, read)
