"""Brings puts from the TransientStorePool to the log's files.

    the log    |---- in the files ----|---- in the pool, in memory ----|
                                      ^ `PoolDrain.end`                ^ the writer's end

Threads: any. One drains at a time (`TransientStorePool.drain`), and puts go on meanwhile.
"""

from __future__ import annotations

from messagestore.errors import PutMessageStatus, StoreFullError, note_statuses
from messagestore.writer.standing import Standing


class PoolDrain:
    """The way from a writer's pool to the files. Without a pool, everything is in the files.

    Parameters
    ----------
    standing : Standing

    Attributes
    ----------
    is_stuck : bool
        The disk had no room at the last try.
    """

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self.is_stuck = False

    @property
    def end(self) -> int:
        """Up to where the log is in its files. Call under the mutex, or take it for a hint."""
        pool = self._standing.pool
        return self._standing.end.physical_offset if pool is None or pool.begin >= pool.end else pool.begin

    def run(self, end: int | None = None) -> None:
        """Write the puts in the TransientStorePool that end at or below `end` to the log's files.

        Puts go on meanwhile, unless the caller holds the mutex.

        Raises
        ------
        StoreFullError
            The disk has no room. The puts stay in the pool, and nothing is appended before they are written.
        StorePoisonedError
            The write failed.
        """
        pool = self._standing.pool
        if pool is None or not pool.undrained:
            return
        with self._standing.mutex:
            self._standing.check_usable()
            self._standing.check_locks(often=True)
        end = pool.end if end is None else end
        try:
            while not pool.drain(end, create=False):
                with self._standing.mutex, self._standing.unbroken("a segment was being created"):
                    pool.drain(end, create=True)  # whoever syncs the log holds the mutex, and must not miss its name
        except StoreFullError as error:
            self.is_stuck = True
            full = self._standing.no_room(
                f"the disk has no room for {pool.undrained} bytes of the TransientStorePool ({error}). They "
                "are only in this process's memory: they are written when there is room, also by another close, and "
                "lost if the process ends before. Nothing more was appended",
                error,
            )
            note_statuses(full, PutMessageStatus.SERVICE_NOT_AVAILABLE, None)
            raise full from error
        except OSError as error:
            self._standing.stop(f"the TransientStorePool could not be drained ({error})")
            with self._standing.mutex:
                raise self._standing.poison(self._standing.poison_reason) from error
        self.is_stuck = False
