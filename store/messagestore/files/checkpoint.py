"""The store checkpoint: the store times up to which a RocketMQ store is known to be synced.

The file `<root>/checkpoint` is RocketMQ's own (`StoreCheckpoint.java`). A broker that crashed starts its recovery at
the segment that is older than the smaller of the first two times. A time that is newer than what is on disk would make
it trust ConsumeQueues that a power cut removed. Therefore the file is written after the syncs that it reports, and
never before.

Threads: written only under the writer lock.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import numpy as np

from messagestore.files.disk import Disk, replace_file, sync_errors
from messagestore.format.layout import CHECKPOINT, CHECKPOINT_SIZE
from messagestore.signal_handlers import pass_on

_SAFETY_MS = 3000
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True)
class StoreCheckpoint:
    """The five numbers of the file. Times are in ms since 1970; 0: unknown.

    Parameters
    ----------
    physic_timestamp_ms : int
        The store time up to which the CommitLog is synced.
    logics_timestamp_ms : int
        The store time up to which the ConsumeQueues are synced.
    index_timestamp_ms : int
        The store time up to which the index is synced.
    master_flushed_offset : int
        For HA; it is kept as it was found.
    confirm_physical_offset : int
        Where the last valid record begins.
    """

    physic_timestamp_ms: int = 0
    logics_timestamp_ms: int = 0
    index_timestamp_ms: int = 0
    master_flushed_offset: int = 0
    confirm_physical_offset: int = 0

    @property
    def min_timestamp_ms(self) -> int:
        """Records older than this need no check: the smaller time of CommitLog and ConsumeQueues, less 3 s."""
        return max(0, min(self.physic_timestamp_ms, self.logics_timestamp_ms) - _SAFETY_MS)

    def to_bytes(self) -> bytes:
        """Return the bytes of the fields.

        Raises
        ------
        ValueError
            A number does not fit into an int64.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not _INT64.min <= value <= _INT64.max:
                raise ValueError(f"checkpoint: {field.name}: found {value}; allowed is an int64")
        return np.array(astuple(self), CHECKPOINT.dtype).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> StoreCheckpoint:
        """Read the first bytes of the file.

        All numbers are zero if there are too few (a broker killed in its first second).
        """
        if len(data) < CHECKPOINT.size:
            return cls()
        return cls(*np.frombuffer(data, CHECKPOINT.dtype, count=1)[0].item())


def read(disk: Disk, path: str) -> StoreCheckpoint:
    """Read the store checkpoint. All numbers are zero if the file is missing or too short."""
    try:
        return StoreCheckpoint.from_bytes(disk.read_head(path, CHECKPOINT_SIZE))
    except FileNotFoundError as error:
        pass_on(error)
        return StoreCheckpoint()


def write(disk: Disk, path: str, checkpoint: StoreCheckpoint, *, via: str) -> None:
    """Write and sync the store checkpoint.

    Parameters
    ----------
    disk : Disk
    path : str
        A file of RocketMQ's size is written in place: its 40 bytes are in one sector, so they are all old or all new.
        Any other file is replaced.
    checkpoint : StoreCheckpoint
    via : str
        Where a new file is created before it gets its name.
    """
    data = checkpoint.to_bytes()
    if not disk.exists(path) or disk.size(path) != CHECKPOINT_SIZE:
        replace_file(disk, path, data.ljust(CHECKPOINT_SIZE, b"\0"), via=via)
        return
    with disk.open(path, writable=True) as file:
        disk.pwrite(file, data, 0)
        with sync_errors(path):
            disk.fdatasync(file)
