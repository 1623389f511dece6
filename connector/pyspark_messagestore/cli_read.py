"""Which messages does a command show, and in which order?

Records come in the order of the log (`records`), messages of one queue in its order (`messages`), those of many queues
as they were stored (`Cursor`). Everything is read as a reader may see it, and read again while it grows.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator

from messagestore import ConfigError, CorruptionError, GetMessageStatus, MessageExt, ReadOnlyStore, UnknownTopicError
from messagestore.spi import BATCH_TOPIC, CommitLog, Visible, decode_message, head_sizes
from pyspark_messagestore import cli_output as out

_PAGE_COUNT = 32
_POLL_S = 0.1
_TOPICS_POLL_S = 1.0


def records(store: ReadOnlyStore, start: int | None) -> Iterator[tuple[bytes, MessageExt]]:
    """Head and message of each record from a physical offset on, in log order, as far as a reader may see; a gap that
    retention makes meanwhile is told.
    """
    log, end = store.view.files.commit_log, store.view.refresh().end
    position = log.min_offset if start is None else start
    if start is not None and (end is None or start < end) and not store.view.healed(lambda: _begins(log, start)):
        raise ConfigError(
            f"--from: at {start} no record begins, or it is damaged; the log has {log.min_offset} to "
            f"{end if end is not None else log.files.max_offset}",
            key="--from",
            value=start,
        )
    while end is None or position < end:
        try:
            for run in log.scan(position, end):
                for at, size in zip(run.starts.tolist(), head_sizes(run.heads).tolist(), strict=True):
                    message = decode_message(run.data.data, at, physical_offset=run.physical_offset + at)
                    yield run.data[at : at + size].tobytes(), message
                position = run.end
        except FileNotFoundError as error:
            position = _behind_deleted(store, log, position, error)
            continue
        _check_end(store, log, end)
        return


def _begins(log: CommitLog, position: int) -> bool:
    """Whether a record begins there, or a BLANK."""
    return log.head(position) is not None or _is_blank(log, position)


def _behind_deleted(store: ReadOnlyStore, log: CommitLog, position: int, error: FileNotFoundError) -> int:
    """Where to go on when the segment at a position was deleted (retention): at the first one that is there.

    Raises
    ------
    CorruptionError
        There are segments before it: somebody else has deleted it.
    """
    store.view.refresh()
    first = log.min_offset
    if first <= position:
        raise CorruptionError(str(error.filename), 0, "this file", "none") from error
    out.note(
        f"{first - position} bytes of the log from {position} on are gone: their segments were deleted (retention); "
        f"going on at {first}"
    )
    return first


def _check_end(store: ReadOnlyStore, log: CommitLog, end: int | None) -> None:
    """Whether the records ended where the log ends.

    Raises
    ------
    CorruptionError
    """
    at, stop = log.scan_offset, log.scan_end
    state = store.view.files.state_file.read() if store.store_id else None
    least = end if end is not None else state.clean_end if state is not None else 0
    torn = stop.reason not in ("zero", "blank", "end")
    if at < least or (torn and end is None and store.view.files.read_abort() is None):
        raise CorruptionError(log.files.path(log.segment_of(at)), at, stop.expected or "a record", stop.found)
    if torn and end is None:
        out.note(
            f"a broker is at work, or was killed: the log ends at {at}: expected {stop.expected}, found {stop.found}"
        )


def _is_blank(log: CommitLog, position: int) -> bool:
    if log.files.holding(position) is None or log.left(position) < len(log.blank(position)):
        return False
    return log.read(position, len(log.blank(position))) == log.blank(position)


def queue_ids(store: ReadOnlyStore, topic: str) -> list[int]:
    """The queues of a topic, which must be there."""
    topics = store.topics()
    if topic not in topics:
        raise UnknownTopicError(topic, topics)
    return topics[topic]


def messages(store: ReadOnlyStore, topic: str, queue_id: int, start: int, end: int) -> Iterator[MessageExt]:
    """Messages `start..end` of a queue, read a page at a time; a gap that retention made is told."""
    while start < end:
        page = store.get_message(topic, queue_id, start, min(_PAGE_COUNT, end - start))
        yield from page.messages
        if page.status is GetMessageStatus.OFFSET_TOO_SMALL:
            out.note(
                f"{topic}/{queue_id}: {page.next_begin_offset - start} messages from {start} on are gone (retention)"
            )
        if page.next_begin_offset <= start:
            out.note(f"{topic}/{queue_id}: went back to {page.max_offset}: deleted, or the store was restored")
            return
        start = page.next_begin_offset


class Cursor:
    """A place in each queue of some topics (None: all but the store's own).

    In a store of ours messages come in the order of the log, whatever queue they are in. In a live broker's store those
    of one look do; what another queue got meanwhile comes with the next.
    """

    def __init__(self, store: ReadOnlyStore, topics: list[str] | None) -> None:
        self.store = store
        self.topics = topics
        self.places: dict[tuple[str, int], int] = {}
        self._look_at_s = 0.0
        self._seen: Visible | None = None
        self._find_queues()
        missing = [topic for topic in topics or () if not any(key[0] == topic for key in self.places)]
        if missing:
            out.note(f"not there yet: {', '.join(missing)}")

    def _find_queues(self) -> None:
        """Take in queues that are new, from their first message on."""
        self._look_at_s = time.monotonic() + _TOPICS_POLL_S
        for topic, ids in self.store.topics().items():
            if topic in self.topics if self.topics is not None else topic != BATCH_TOPIC:
                for queue_id in ids:
                    if (topic, queue_id) not in self.places:
                        self.places[(topic, queue_id)] = self.store.min_offset(topic, queue_id)
                        self._seen = None

    def skip_to(self, count: int) -> None:
        """Leave out all but the last `count` messages of all queues together."""
        ends = self._ends()
        newest = heapq.nlargest(
            count,
            (
                (message.physical_offset, key, message.queue_offset)
                for key, end in ends.items()
                for message in messages(self.store, *key, max(self.places[key], end - count), end)
            ),
        )
        self.places = ends
        for _, key, queue_offset in newest:
            self.places[key] = min(self.places[key], queue_offset)

    def once(self) -> Iterator[MessageExt]:
        """What has come since the last time, in the order of the log."""
        visible = self.store.view.refresh()
        if visible.end is not None and visible == self._seen:
            return
        ends = self._ends()
        parts = [self._part(key, ends[key]) for key, place in self.places.items() if place < ends[key]]
        for key, end in ends.items():
            if end < self.places[key]:
                out.note(
                    f"{key[0]}/{key[1]}: went back from {self.places[key]} to {end}: deleted, or the store was restored"
                )
                self.places[key] = end
        for key, message in heapq.merge(*parts, key=lambda pair: pair[1].physical_offset):
            self.places[key] = max(self.places[key], min(message.queue_offset + 1, ends[key]))
            yield message
        self.places.update(ends)
        self._seen = visible

    def _ends(self) -> dict[tuple[str, int], int]:
        """Max offsets at one moment."""
        view = self.store.view
        view.refresh()
        return {key: view.max_offset(*key) for key in self.places}

    def _part(self, key: tuple[str, int], end: int) -> Iterator[tuple[tuple[str, int], MessageExt]]:
        for message in messages(self.store, *key, self.places[key], end):
            yield key, message

    def follow(self, interrupted: Callable[[], bool]) -> Iterator[MessageExt]:
        """What is there and what comes, until `interrupted` says so."""
        while not interrupted():
            begin_s = time.monotonic()
            try:
                yield from self.once()
                if begin_s >= self._look_at_s:
                    self._find_queues()
            except FileNotFoundError:
                pass  # retention, or a topic that was deleted, took a file while it was read: look again
            time.sleep(max(_POLL_S, 2 * (time.monotonic() - begin_s)))
