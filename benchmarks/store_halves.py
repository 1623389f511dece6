"""How many half messages are prepared and committed in a second, with SYNC_FLUSH.

Each is synced when it is prepared, and again when it is committed. The floor is single puts to the same store, by as
many threads, each of which is synced once. Threads that commit at the same time share a batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from benchmarks.measure import Rounds, Settings, settle, timed, title
from benchmarks.messages import TOPIC
from messagestore import Message, MessageStore

_COUNT, _QUICK_COUNT = 1600, 160
_THREADS = (1, 16)
_BODY = bytes(range(100))


def run(settings: Settings) -> None:
    """Measure the rates."""
    count = _QUICK_COUNT if settings.quick else _COUNT
    title(f"{count:,} half messages, prepared and committed, in SYNC_FLUSH")
    rounds = Rounds()
    root = settings.folder / "halves"
    with MessageStore.open(root) as store:

        def put() -> None:
            store.put_message(Message(TOPIC, _BODY, queue_id=0))

        def prepare_and_commit() -> None:
            store.half_message(Message(TOPIC, _BODY, queue_id=0), "producers").commit()

        for number in range(settings.rounds + 1):
            into = rounds if number else Rounds()
            settle(settings.folder)
            for threads in _THREADS:
                for name, work in (("halves.floor.put", put), ("halves", prepare_and_commit)):
                    taken, _ = timed(_by_threads, work, count, threads)
                    into.add_rate(f"{name}.{_words(threads)}", count, taken)
        open_count, seen = len(store.open_halves()), store.max_offset(TOPIC, 0)
    if open_count or seen != 2 * len(_THREADS) * count * (settings.rounds + 1):
        raise AssertionError(f"{root}: {open_count} half messages are open, and {seen} messages are in the topic")
    for threads in _THREADS:
        floor = f"halves.floor.put.{_words(threads)}"
        rounds.report(floor, "messages/s")
        rounds.report(f"halves.{_words(threads)}", "messages/s", floor=floor)


def _words(threads: int) -> str:
    return f"{threads}_thread{'s' * (threads > 1)}"


def _by_threads(work: Callable[[], None], count: int, thread_count: int) -> None:
    def share() -> None:
        for _ in range(count // thread_count):
            work()

    threads = [threading.Thread(target=share) for _ in range(thread_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
