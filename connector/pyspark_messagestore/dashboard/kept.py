"""What was found in a store, kept until the store changes, so that many tabs cost one look.

A look at a store with many queues or groups takes long, and a writer at work changes the store all the time. For such a
store, a page shows the last look at once while a thread looks again, so no page is older than a minute. While nobody
asks for a page, nobody looks.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from messagestore.inspect import operator

T = TypeVar("T")
KEPT_S = 5.0
"""Ages and the room on the disk go on without a change of the store."""
LARGE_COUNT = 500
"""From so many rows on, a look takes so long that an older one is shown meanwhile."""
LARGE_KEPT_S = 60.0
"""How old the result of such a look may be."""
AGAIN_S, _SHARE = 2.0, 10
"""Somebody looks again after this time at the earliest, and after so many times as long as the last look took."""
_MOST_KEPT = 512


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: Any = None
        self.stamp: object = None
        self.place: object = None
        self.at_s = -LARGE_KEPT_S
        self.took_s = 0.0
        self.large = self.looking = False


class Kept:
    """What was found in one store, by name.

    Parameters
    ----------
    path : str
        The store's root folder.
    checkpoints : sequence of str
        Folders of checkpoints, whose changes count too.
    """

    def __init__(self, path: str, checkpoints: Sequence[str] = ()) -> None:
        self._path = path
        self._folders = [
            os.path.join(folder, name) for folder in checkpoints for name in ("metadata", "offsets", "commits")
        ]
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._of_thread = threading.local()

    def ask(self) -> None:
        """Begin a request, in this thread."""
        self._of_thread.age_s = 0.0

    @property
    def age_s(self) -> float:
        """The age of the oldest result that this thread got since `ask`, if the store has changed since then."""
        return float(getattr(self._of_thread, "age_s", 0.0))

    def get(self, name: str, look: Callable[[], tuple[T, int]]) -> T:
        """The result of a recent look, or of one that is made now. Callers that ask for the same at the same time share
        a look.

        Parameters
        ----------
        look : function
            What to show, and the number of rows that were looked at. What it raises is not kept.
        """
        with self._lock:
            entry = self._entries.setdefault(name, _Entry())
            self._entries.move_to_end(name)
            if len(self._entries) > _MOST_KEPT:
                self._entries.popitem(last=False)

        with entry.lock:
            stamp, place = self._stamp(), self._place()
            age_s = time.monotonic() - entry.at_s
            if stamp is not None and stamp == entry.stamp and age_s < KEPT_S:
                return cast("T", entry.value)

            if entry.large and place == entry.place and age_s < LARGE_KEPT_S:
                self._of_thread.age_s = max(self.age_s, age_s)
                if age_s >= min(max(AGAIN_S, _SHARE * entry.took_s), LARGE_KEPT_S / 2) and not entry.looking:
                    entry.looking = True
                    threading.Thread(target=self._again, args=(entry, look), name="dashboard-look", daemon=True).start()
                return cast("T", entry.value)

            entry.stamp, begin_s = None, time.monotonic()
            self._fill(entry, look(), stamp, place, begin_s)
            return cast("T", entry.value)

    def last(self, name: str) -> Any:
        """The result of the last look, however old, for a look that goes on from it. None: nobody has looked, or
        another folder is at the path now.
        """
        with self._lock:
            entry = self._entries.get(name)
        return entry.value if entry is not None and entry.place == self._place() else None

    def _again(self, entry: _Entry, look: Callable[[], tuple[Any, int]]) -> None:
        """Look again while pages show the last look. If this fails, whoever asks next looks, and gets the error."""
        stamp, place, begin_s = self._stamp(), self._place(), time.monotonic()
        try:
            found = look()
        except Exception:  # noqa: BLE001 - the next request finds the same, and says what it is
            found = None
        with entry.lock:
            entry.looking = False
            if found is None:
                entry.stamp, entry.large = None, False
            else:
                self._fill(entry, found, stamp, place, begin_s)

    def _fill(self, entry: _Entry, found: tuple[Any, int], stamp: object, place: object, begin_s: float) -> None:
        entry.value, count = found
        entry.stamp, entry.place, entry.large = stamp, place, count >= LARGE_COUNT
        entry.at_s, entry.took_s = begin_s, time.monotonic() - begin_s

    def _stamp(self) -> object:
        """A value that changes with the store and the checkpoints. It is taken before the look that it belongs to."""
        try:
            stamp = operator.stamp(self._path)
        except OSError:
            return None
        return None if stamp is None else (stamp, *map(_changed_ns, self._folders))

    def _place(self) -> object:
        """Which folder is at the path: a store that was replaced has nothing to do with the last look."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_dev, status.st_ino


def _changed_ns(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
