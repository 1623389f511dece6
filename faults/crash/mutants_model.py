"""Bugs planted where two systems meet, which random histories of everything must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

from crash.judge import Verdict
from crash.model import History, run_history
from crash.planting import Case, Ground, Mutant, Search, patched, without
from messagestore import StoreConfig
from messagestore.broker import delivery, expired
from messagestore.broker.delivery import Delivery
from messagestore.broker.open_halves import OpenHalves
from messagestore.format import record_rows
from messagestore.format.delay_levels import DelayLevels
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.log.store_files import StoreFiles
from messagestore.puts import Puts
from messagestore.read.queue_ends import QueueEnds
from messagestore.recovery.apply import _Changes
from messagestore.session import AttachedStore
from messagestore.writer.queue_numbers import QueueNumbers

_SEED, _HISTORIES = 11, 200


def histories(*actions: str) -> Search:
    """Run the histories in which all of these actions come."""

    def judged(history: History, ground: Ground) -> Verdict:
        return run_history(history, ground.folder / "model", Counter()).verdict

    def search(ground: Ground) -> Iterator[Case]:
        for number in range(_HISTORIES):
            history = History(_SEED, number)
            if {act.__name__ for _, act, _ in history.actions()} >= set(actions):
                yield partial(judged, history, ground)

    return search


def _needs(*names: str) -> Any:
    """Retention looks for those only who are not named here."""

    def make(real: Any) -> Any:
        return lambda *given: [each for each in real(*given) if each.group not in names]

    return make


def _from_the_end(real: Any) -> Any:
    """A queue of which retention has left nothing begins at 0 again."""

    def next_offset(numbers: QueueNumbers, topic: str, queue_id: int) -> int:
        offset: int = real(numbers, topic, queue_id)
        files = numbers._files
        queue = files.queue(topic, queue_id)
        if offset and queue.search_physical(files.commit_log.min_offset) >= offset and not numbers._standing.pending:
            numbers.next_offsets[topic, queue_id] = 0
            return 0
        return offset

    return next_offset


def _due_at_once(real: Any) -> Any:
    """What is read back from the log is due at its store time."""
    return lambda data, starts, heads, place, _: real(data, starts, heads, place, DelayLevels(((0, "0s"),)))


def _levels_of_the_session(real: Any) -> Any:
    """A rebuild, and everybody who reads a record back, takes the delay levels of its session."""

    def set_levels(files: StoreFiles) -> None:
        real(files)
        files.commit_log.delay_levels = DelayLevels(((0, files.config.message_delay_level),))

    return set_levels


def _all_of_a_round(real: Any) -> Any:
    """The progress passes all that is due, though a round has room for less."""

    def append(delivery: Delivery, chunks: Any, after: dict[int, int]) -> Any:
        ends = {level: delivery._writer.numbers.next_offset("SCHEDULE_TOPIC_XXXX", level - 1) for level in after}
        return real(delivery, chunks, ends)

    return append


def _from_now_on(real: Any) -> Any:
    """A process knows only the half messages that were prepared since it opened the store."""

    def begin(halves: OpenHalves, half_end: int, op_end: int) -> None:
        real(halves, half_end, op_end)
        halves._half_end = max(halves._half_end, half_end - 1)

    return begin


def _not_after_retention(real: Any) -> Any:
    """A process knows only the half messages that were prepared since it opened a store without its first segments."""

    def begin(halves: OpenHalves, half_end: int, op_end: int) -> None:
        real(halves, half_end, op_end)
        if halves.view.files.commit_log.min_offset:
            halves._half_end = max(halves._half_end, half_end - 1)

    return begin


def _read_when_rebuilt(real: Any) -> Any:
    """A queue that was rebuilt after retention counts as read: its file begins with filler units."""

    def first_unread(files: StoreFiles, topic: str, queue_id: int, offset: int) -> list[tuple[int, int]]:
        queue = files.queue(topic, queue_id)
        first = queue.read(queue.first_file_queue_offset, 1)
        if len(first) and first["size"][0] == FILLER_UNIT_SIZE:
            return []
        found: list[tuple[int, int]] = real(files, topic, queue_id, offset)
        return found

    return first_unread


def _last_one_wins(real: Any) -> Any:
    """A second session changes the settings of the first one."""

    def take(store: AttachedStore, config: StoreConfig) -> None:
        store.config = config
        if store.writer is not None:
            files = store.writer.files
            files.config = files.config.replace(max_message_size=config.max_message_size)

    return take


def _always_committed(real: Any) -> Any:
    """A put in the pool says that it is committed."""
    return lambda store, *given: real(store, *given)._replace(committed=True)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("retention deletes delayed messages that wait", lambda: mock.patch.object(expired, "needed", _needs(expired.DELIVERY)(expired.needed)), "histories of the model", histories("expire")),
    Mutant("an empty queue begins at 0 again after retention", patched(QueueNumbers, "next_offset", _from_the_end), "histories of the model", histories("expire")),
    Mutant("a rebuilt queue without messages begins at 0 again", without(_Changes, "_keep_numbers"), "histories of the model", histories("rebuild", "expire")),
    Mutant("a rebuilt queue counts as read", lambda: mock.patch.object(expired, "_first_unread", _read_when_rebuilt(expired._first_unread)), "histories of the model", histories("publish", "expire", "rebuild")),
    Mutant("retention deletes half messages that are open", without(expired, "_needed_halves", []), "histories of the model", histories("prepare", "expire"), case=8),
    Mutant("after retention, half messages are forgotten by the next process", patched(OpenHalves, "_begin", _not_after_retention), "histories of the model", histories("prepare", "expire", "reopen")),
    Mutant("the progress of a delivery passes what had no room", patched(Delivery, "_append", _all_of_a_round), "histories of the model", histories("deliver")),
    Mutant("half messages are forgotten by the next process", patched(OpenHalves, "_begin", _from_now_on), "histories of the model", histories("prepare", "reopen")),
    Mutant("a delivery is known from delayOffset.json only", without(delivery, "delivered", {}), "histories of the model", histories("deliver", "dies_soon")),
    Mutant("the settings of the second session win", patched(AttachedStore, "_take_settings", _last_one_wins), "histories of the model", histories("second_session")),
    Mutant("a rebuilt queue of delayed messages is due at once", patched(record_rows, "rows_of", _due_at_once), "histories of the model", histories("rebuild", "deliver")),
    Mutant("a rebuild takes the delay levels of its session", patched(StoreFiles, "_set_levels", _levels_of_the_session), "histories of the model", histories("rebuild", "deliver")),
    Mutant("the levels of the first session count for good", patched(DelayLevels, "changed", lambda real: lambda levels, *given: levels), "histories of the model", histories("rebuild", "deliver")),
    Mutant("a consumer that stays open lists the queues once", patched(QueueEnds, "_is_listed", lambda _: lambda ends: ends._listed is not None), "histories of the model", histories("follow")),
    Mutant("a put in the pool says that it is committed", patched(Puts, "_result", _always_committed), "histories of the model", histories("dies")),
)  # fmt: skip
