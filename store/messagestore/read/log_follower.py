"""Hands the records that are appended to a log to a function, in the order of the log (RocketMQ: CommitLogDispatcher
and MessageArrivingListener).

Each function has a thread and a view of its own, so it can neither delay nor fail an append: a function that is slow
falls behind, and one that fails is logged and gets the next records.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from messagestore.errors import StoreError
from messagestore.files.disk import Disk
from messagestore.format.arrow_bytes import array_of
from messagestore.format.config import StoreConfig
from messagestore.format.record_decode import decode
from messagestore.log.walk import Depth, Run, Walk, rows_of
from messagestore.read.view import StoreView

Listener = Callable[[str, int, int, int, int, dict[str, str]], None]
"""Called with topic, queue id, queue offset, tags code, store time in milliseconds, and properties."""
_LISTENED = ("topic", "queue_id", "queue_offset", "store_timestamp_ms", "properties", "system_properties")
_TAGS_CODE, _HAS_UNIT = "tags_code", "has_unit"
_PAUSE_S = 0.1
_END_TIMEOUT_S = 30.0
_NO_END = 1 << 63
_log = logging.getLogger(__name__)


class LogFollower:
    """A thread that hands over what is appended, from a place in the log on.

    Parameters
    ----------
    root : str
    config : StoreConfig
    disk : Disk
    start : int
        The physical offset of the first record to hand over.
    columns : sequence of str
        The columns of the batches, names in `record_columns.COLUMNS`.
    dispatch : callable
        Called in the thread, with one batch of records after the other.
    with_units : bool
        Also give the columns `tags_code` and `has_unit`: what the ConsumeQueue has of each record.

    Attributes
    ----------
    position : int
        Everything below this physical offset has been handed over.
    error : StoreError | OSError | None
        Why the thread ended before it was closed: the store was moved, or its log is damaged.

    Threads: `close` may be called by any thread, also from `dispatch`.
    """

    def __init__(
        self,
        root: str,
        config: StoreConfig,
        disk: Disk,
        start: int,
        *,
        columns: Sequence[str],
        dispatch: Callable[[pa.RecordBatch], None],
        with_units: bool = False,
    ) -> None:
        self.position = start
        self.error: StoreError | OSError | None = None
        self._root, self._config, self._disk = root, config, disk
        self._columns, self._dispatch, self._with_units = tuple(columns), dispatch, with_units
        self._last = _NO_END
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="messagestore-dispatch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the batch that is being handed over. A second call does nothing."""
        self._stopped = True
        self._join()

    def finish(self, end: int) -> None:
        """Stop when everything below `end` was handed over, and wait for that, but not for longer than 30 seconds."""
        self._last = end
        self._join()
        self._stopped = True

    def _join(self) -> None:
        if self._thread is threading.current_thread():
            return
        self._thread.join(_END_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning(
                "%s: a dispatcher or listener did not return within %.0f s; what lies above %d was not handed over",
                self._root,
                _END_TIMEOUT_S,
                self.position,
            )

    def _run(self) -> None:
        try:
            view = StoreView(self._root, self._config, self._disk)
            try:
                self._follow(view)
            finally:
                view.close()
        except (StoreError, OSError) as error:
            self.error = error
            _log.error("%s: a dispatcher or listener gets no more messages (%s)", self._root, error)

    def _follow(self, view: StoreView) -> None:
        view.await_change(0)
        while not self._stopped:
            view.refresh()
            end = view.known_end
            if end is not None and end > self.position:
                self._hand_over(view, end)
            if self.position >= self._last:
                return
            view.await_change(_PAUSE_S)

    def _hand_over(self, view: StoreView, end: int) -> None:
        """Hand over the records from the position to `end`, a read of the log at a time."""
        log = view.files.commit_log
        log.load()

        if self.position < log.min_offset:
            _log.warning(
                "%s: retention has deleted the records from %d to %d before a dispatcher or listener got them",
                self._root,
                self.position,
                log.min_offset,
            )
            self.position = log.min_offset

        try:
            for run in Walk(log, self.position, end, Depth.FRAMING).whole():
                self._call(self._decoded(run))
                self.position = run.end
                if self._stopped:
                    return
        except FileNotFoundError:
            log.load()  # retention may have deleted all segments that were known
            if log.min_offset <= self.position:
                raise

    def _decoded(self, run: Run) -> pa.RecordBatch:
        sizes = run.heads["total_size"].astype(np.int32)
        batch = decode(run.data, run.starts, sizes, self._columns, verify_body_crc=True)
        if self._with_units:
            rows = rows_of(run)
            batch = batch.append_column(_TAGS_CODE, array_of(rows.tags_codes))
            has_unit = np.ones(len(sizes), np.bool_) if rows.has_unit is None else rows.has_unit
            batch = batch.append_column(_HAS_UNIT, array_of(has_unit))
        return batch

    def _call(self, batch: pa.RecordBatch) -> None:
        try:
            self._dispatch(batch)
        except Exception:  # noqa: BLE001 # whatever a user's function does, the others go on
            _log.exception("%s: a dispatcher failed at %d; it gets the next records", self._root, self.position)


def follow_messages(root: str, config: StoreConfig, disk: Disk, start: int, *, listener: Listener) -> LogFollower:
    """Call a listener for each message that gets a unit in a ConsumeQueue."""

    def dispatch(batch: pa.RecordBatch) -> None:
        columns = [batch.column(name) for name in (*_LISTENED[:3], _TAGS_CODE, *_LISTENED[3:], _HAS_UNIT)]
        for topic, queue_id, offset, tags_code, stored_ms, own, system, has_unit in zip(
            *map(list, columns), strict=True
        ):
            if not has_unit.as_py():
                continue

            properties = dict(system.as_py()) | dict(own.as_py())
            arguments = (topic.as_py(), queue_id.as_py(), offset.as_py(), tags_code.as_py(), stored_ms.as_py())
            try:
                listener(*arguments, properties)
            except Exception:  # noqa: BLE001 # as above
                _log.exception(
                    "%s: a listener failed at %s/%d, offset %d; it gets the next message", root, *arguments[:3]
                )

    return LogFollower(root, config, disk, start, columns=_LISTENED, dispatch=dispatch, with_units=True)
