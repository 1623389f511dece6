"""A thread that looks after a store for as long as this process has it attached.

It is started and ended again and again with the store that it looks after. Between two looks it sleeps, and anybody,
also a signal handler, may wake it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from messagestore.writer.service_thread import held_lock

_END_S = 1.0
"""How long `end` waits for the thread, which may be in the middle of a look."""


class Watcher:
    """The thread of one store.

    Parameters
    ----------
    look : callable
        Looks once, and returns the seconds until the next look, or None if there is nothing left to look after.

    Threads: the caller's mutex for `start` and `end`; any thread for the rest.
    """

    def __init__(self, look: Callable[[], float | None]) -> None:
        self._look = look
        self._thread: threading.Thread | None = None
        self._awake = held_lock()

    def forget_threads(self) -> None:
        """Replace the lock in a forked child, where the thread does not exist."""
        self._awake = held_lock()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._run, name="messagestore-detach", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter ends, and closes the store
            self._thread = None

    def is_mine(self) -> bool:
        """Whether the caller is the thread, and goes on."""
        return self._thread is threading.current_thread()

    def wake(self) -> None:
        """Make the thread look now; a signal handler may call this."""
        with contextlib.suppress(RuntimeError):  # the thread is awake
            self._awake.release()

    def end(self) -> None:
        """End the thread, and wait for it, but for itself."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self.wake()
            if thread.ident is not None:  # None: an interrupt came before the thread was started
                thread.join(_END_S)

    def _run(self) -> None:
        while self.is_mine():
            pause_s = self._look()
            if pause_s is None:
                return
            if pause_s:
                self._awake.acquire(timeout=pause_s)
