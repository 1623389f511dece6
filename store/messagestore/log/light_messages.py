"""Finds messages of light queues in a log (a broker's enableLmq with enableMultiDispatch).

Such a message is in its own topic. Light queues, which have no records of their own, hold units for it. If the folder
of all queues is missing, or if the broker was killed before it had created the light queues, only the properties that
the broker added reveal these messages.
"""

from __future__ import annotations

import re

import numpy as np

from messagestore.files.commit_log import CommitLog
from messagestore.format import record_scan
from messagestore.format.properties import PROPERTY_SEPARATOR
from messagestore.log.walk import Depth, Run, Walk

_DISPATCHED = re.compile(rb"INNER_MULTI_QUEUE_OFFSET\x01")
"""The property in which a broker's store records the number of a message in each of its light queues."""


def first_light_message(log: CommitLog, start: int) -> int | None:
    """Return the physical offset of the first message of a light queue from `start` on, or None.

    Only framing is checked.
    """
    for run in Walk(log, start, depth=Depth.FRAMING):
        row = _first_in(run)
        if row is not None:
            return run.physical_offset + int(run.starts[row])
    return None


def _first_in(run: Run) -> int | None:
    hits = [hit.start() for hit in _DISPATCHED.finditer(run.data.data)]
    if not hits:
        return None
    _, where = record_scan.parts(run.data, run.starts, run.heads)
    for hit in hits:
        row = int(np.searchsorted(where.property_starts, hit, side="right")) - 1
        if row < 0 or hit >= int(where.ends[row]):
            continue  # the match is in a body
        if hit == int(where.property_starts[row]) or int(run.data[hit - 1]) == PROPERTY_SEPARATOR[0]:
            return row
    return None
