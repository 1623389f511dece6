"""A thread that works for a writer (RocketMQ's ServiceThread).

The thread is started by the first caller who needs it, sleeps until there is work or until a time that it chooses, and
ends with the store.
"""

from __future__ import annotations

import contextlib
import threading
from _thread import LockType, allocate_lock
from abc import ABC, abstractmethod

STOP_TIMEOUT_S = 30.0


def held_lock() -> LockType:
    """A lock that is taken. Releasing it wakes the thread that waits for it, and a signal handler may do that."""
    lock = allocate_lock()
    lock.acquire()
    return lock


_own = threading.local()


def is_service_thread() -> bool:
    """Whether the calling thread is a service's: an error that is raised in it reaches no caller of the store."""
    return getattr(_own, "serves", False)


class ServiceThread(ABC):
    """A thread that serves one writer. A subclass says in `run` what it does.

    Parameters
    ----------
    name : str
        The name of the thread.

    Threads: any thread may call every method.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._mutex = threading.Lock()
        self._work = held_lock()
        """Released whenever there may be something to do. The thread takes it again, or after an interval."""
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        """Set unless the thread runs."""
        self._idle.set()

    @abstractmethod
    def run(self) -> None:
        """The work of the thread, until `_stopped`."""

    def start(self) -> bool:
        """Start the thread, unless it was started; False if no thread is started any more.

        From Python 3.12 on, the interpreter refuses threads once the main thread has ended, although other threads and
        functions of `atexit` may still put messages.
        """
        if self._thread is None:
            with contextlib.suppress(RuntimeError):
                self._start_once()
        return self._thread is not None

    def _start_once(self) -> None:
        with self._mutex:  # the thread waits for this, and ends if it is not the thread that was started here
            if self._thread is not None or self._stopped:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                self._thread = thread
                thread.start()
            except BaseException:  # Ctrl-C may have come before or after the thread was created
                self._thread = None
                raise

    def _run(self) -> None:
        with self._mutex:
            if self._thread is not threading.current_thread():
                return
            self._idle.clear()
        _own.serves = True
        try:
            self.run()
        finally:
            self._idle.set()

    def wake_thread(self) -> None:
        """Wake the thread, because there may be something to do."""
        with contextlib.suppress(RuntimeError):  # it is awake, or will be at once
            self._work.release()

    @property
    def stopped(self) -> bool:
        """Whether the thread ends, or has ended."""
        return self._stopped

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._stopped = True
        self.wake_thread()
        self.join()

    def join(self) -> None:
        """Wait until the thread has ended. It does not wait for itself."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.ident is not None:
            thread.join(STOP_TIMEOUT_S)  # without a number, it was interrupted before it was started, and never runs
            self._idle.wait(STOP_TIMEOUT_S)  # up to Python 3.12, a thread whose `join` was interrupted counts as ended

    def forget_threads(self) -> None:
        """Replace the locks in a forked child, where the threads that held them do not exist."""
        self._mutex, self._work = threading.Lock(), held_lock()
        self._idle = threading.Event()
        self._idle.set()
