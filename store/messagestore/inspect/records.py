"""The records of the log, one after the other, as far as a reader may see."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from messagestore.errors import ConfigError, CorruptionError
from messagestore.files.commit_log import CommitLog
from messagestore.format.message import MessageExt
from messagestore.format.record import decode_message
from messagestore.format.record_scan import head_sizes
from messagestore.log.condition import look
from messagestore.log.walk import Walk
from messagestore.read.view import StoreView
from messagestore.signal_handlers import pass_on


def records(view: StoreView, start: int | None, tell: Callable[[str], None]) -> Iterator[tuple[bytes, MessageExt]]:
    """The bytes and the message of each record from a place on. `operator.dump` has the parameters."""
    log, end = view.files.commit_log, view.refresh().end
    position = log.min_offset if start is None else start
    if start is not None and (end is None or start < end) and not view.healed(lambda: begins(log, start)):
        raise ConfigError(
            f"--from: found no whole record at {start}; allowed is the first byte of a record from {log.min_offset} to "
            f"{end if end is not None else log.max_offset}",
            key="--from",
            value=start,
        )

    while end is None or position < end:
        walk = Walk(log, position, end)
        try:
            for run in walk:
                for at, size in zip(run.starts.tolist(), head_sizes(run.heads).tolist(), strict=True):
                    message = decode_message(run.data.data, at, physical_offset=run.physical_offset + at)
                    yield run.data[at : at + size].tobytes(), message
                position = run.end
        except FileNotFoundError as error:
            pass_on(error)
            position = _behind_deleted(view, position, error, tell)
            continue
        _check_end(view, walk, tell)
        return


def begins(log: CommitLog, position: int) -> bool:
    """Whether a record or a BLANK begins at a position."""
    return log.head(position) is not None or _is_blank(log, position)


def _behind_deleted(view: StoreView, position: int, error: FileNotFoundError, tell: Callable[[str], None]) -> int:
    """Where to continue if retention has deleted the segment at a position: at the first segment that is left.

    Raises
    ------
    CorruptionError
        There are segments before it, so retention did not delete it.
    """
    view.refresh()
    first = view.files.commit_log.min_offset
    if first <= position:
        raise CorruptionError(str(error.filename), 0, "this file", "none") from error
    tell(
        f"{first - position} bytes of the log from {position} on are gone, because retention has deleted their "
        f"segments. Continuing at {first}"
    )
    return first


def _check_end(view: StoreView, walk: Walk, tell: Callable[[str], None]) -> None:
    """Check that the records ended where the log ends.

    Raises
    ------
    CorruptionError
        They ended before it.
    """
    at, stop, end = walk.position, walk.stop, walk.end
    state = view.files.state_file.read() if view.store_id else None
    least = end if end is not None else state.clean_end if state is not None else 0
    torn = stop.reason not in ("zero", "blank", "end")
    if at < least or (torn and end is None and look(view.files).condition.closed):
        raise walk.broken()
    if end is None:
        view.check_units_in_log()
    if torn and end is None:
        tell(
            f"a broker is at work or was killed, and the log ends at {at}: expected {stop.expected}, found {stop.found}"
        )


def _is_blank(log: CommitLog, position: int) -> bool:
    if log.holding(position) is None or log.left(position) < len(log.blank(position)):
        return False
    return log.read(position, len(log.blank(position))) == log.blank(position)
