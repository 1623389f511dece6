"""Files of a running server that may be replaced: they are read again when they have changed.

Files that belong together are replaced one after the other, and a file may be read while it is written. So the values
that were read last stay in use until the new files are right. Until then, a line in the log says what is wrong.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

LOOK_S = 1.0
"""How many seconds lie between two looks at the files at least, however many requests there are."""
_log = logging.getLogger("messagestore.serve")
_Found = TypeVar("_Found")


class Reread(Generic[_Found]):
    """What some files mean. Thread-safe.

    Parameters
    ----------
    paths : sequence of str
    load : function
        Reads the files. It raises OSError or ValueError if they are wrong.
    """

    def __init__(self, paths: Sequence[str], load: Callable[[], _Found]) -> None:
        self._paths, self._load = tuple(paths), load
        self._mutex = threading.Lock()
        self._stamps = self._look()  # before the files are read: what changes meanwhile is read again
        self._value = load()
        self._looked_s = time.monotonic()

    def current(self) -> _Found:
        """What the files mean now, or meant when they were last right."""
        with self._mutex:
            if time.monotonic() - self._looked_s >= LOOK_S:
                self._refresh()
                self._looked_s = time.monotonic()
            return self._value

    def _look(self) -> tuple[object, ...]:
        return tuple(map(_stamp, self._paths))

    def _refresh(self) -> None:
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        names = ", ".join(self._paths)
        try:
            self._value = self._load()
        except (OSError, ValueError) as error:
            _log.warning("%s: changed, but cannot be used; what was there before stays in use: %s", names, error)
        else:
            _log.info("%s: read again, because of a change", names)


def _stamp(path: str) -> object:
    try:
        status = os.stat(path)
    except OSError as error:
        return error.errno
    return status.st_mtime_ns, status.st_ino, status.st_size
