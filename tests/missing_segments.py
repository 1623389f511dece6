"""Stores whose log lacks segments, for tests of everything that reads: who left them, and what is missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from crash.harness import die
from messagestore import BatchRequest, Message, MessageStore, ReadOnlyStore
from small import SMALL, bodies, columns

end = 0
"""Where the last segment of the whole store ends; the test that removes it notes it here."""


def last_record(store: ReadOnlyStore) -> int:
    """A place in the last segment of the whole store."""
    return end - SMALL.mapped_file_size_commit_log


def _fill(root: Path, *, batches: bool = True) -> MessageStore:
    """Seven segments. Topic `early` is in the first one only, topic `late` in the last one only."""
    store = MessageStore.open(root, SMALL)
    for i in range(5):
        store.put_message(Message("early", b"%d" % i, queue_id=0))
    if batches:
        store.append_batch(columns(bodies(10), queues=1, topic="b"), BatchRequest("app", 0))
    for i, body in enumerate(bodies(200, 400)):
        store.put_message(Message("t", body, queue_id=i % 2, keys=[f"k{i}"], tags="tag"))
    for i in range(5):
        store.put_message(Message("late", b"%d" % i, queue_id=0))
    store.half_message(Message("late", b"half", queue_id=0), "group")
    return store


def _closed(root: Path) -> None:
    _fill(root).close()


def _without(*names: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        _closed(root)
        for name in names:
            (root / name).unlink()

    return make


def _damaged_checkpoint(root: Path) -> None:
    _closed(root)
    data = bytearray((root / "checkpoint").read_bytes())
    data[3] ^= 1
    (root / "checkpoint").write_bytes(data)


def _killed(root: Path) -> None:
    _fill(root)
    die(root)


def _of_a_broker(abort: str | None) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        _fill(root, batches=False).close()
        shutil.rmtree(root / "spark")
        if abort is not None:
            (root / "abort").write_text(abort)

    return make


def _copy(root: Path) -> None:
    _closed(root)
    shutil.rmtree(root / "spark")


STORES: dict[str, Callable[[Path], None]] = {
    "closed": _closed,
    "closed, no checkpoint": _without("checkpoint"),
    "closed, a damaged checkpoint": _damaged_checkpoint,
    "closed, no journal": _without("spark/journal"),
    "closed, no journal and no checkpoint": _without("spark/journal", "checkpoint"),
    "closed, no state": _without("spark/state"),
    "closed, no state and no checkpoint": _without("spark/state", "checkpoint"),
    "killed": _killed,
    "a copy without our folder": _copy,
    "closed by a broker": _of_a_broker(None),
    "a broker at work": _of_a_broker("4711"),
}


def segments(root: Path) -> list[Path]:
    return sorted((root / "commitlog").iterdir())


def _remove(choose: Callable[[list[Path]], list[Path]]) -> Callable[[Path], None]:
    def remove(root: Path) -> None:
        for path in choose(segments(root)):
            path.unlink()

    return remove


MISSING: dict[str, Callable[[Path], None]] = {
    "the folder": lambda root: shutil.rmtree(root / "commitlog"),
    "all": _remove(lambda found: found),
    "the last one": _remove(lambda found: found[-1:]),
    "the last two": _remove(lambda found: found[-2:]),
    "all but the first": _remove(lambda found: found[1:]),
    "one in the middle": _remove(lambda found: found[2:3]),
    "every second one": _remove(lambda found: found[1::2]),
}


def prepared(folder: Path, whose: str) -> Path:
    """A whole store that somebody left."""
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / "store"
    STORES[whose](root)
    return root
