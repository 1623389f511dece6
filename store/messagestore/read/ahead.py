"""Items that a thread makes before they are asked for: records that are read or encoded while the caller works.

Where no thread can be started, because the interpreter is shutting down or the system gives no more of them, the items
are made when they are asked for. The standard library's pools refuse that: they end with the main thread, although
other threads, and functions of `atexit`, may still read and write.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - pyarrow imports it late, and cannot when the main thread has ended
import os
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

from messagestore.errors import StoreClosedError

T = TypeVar("T")


class Ahead(Generic[T]):
    """An iterator over `items` whose next items are being made by a thread: `with Ahead(items, 2) as made: ...`.

    Parameters
    ----------
    items : iterator
        Only the thread uses it from now on.
    most : int
        How many items are made, or being made, before they are asked for.

    Raises
    ------
    StoreClosedError
        On the next item in a forked child, where the thread does not exist.

    Threads: one thread at a time.
    """

    def __init__(self, items: Iterator[T], most: int) -> None:
        self._items = items
        self._pid = os.getpid()
        self._room = threading.Semaphore(most)
        self._made: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._stopped = False
        thread = threading.Thread(target=self._make, name="messagestore-ahead", daemon=True)
        self._thread: threading.Thread | None = thread
        try:
            thread.start()
        except RuntimeError:  # no thread is started any more
            self._thread = None

    def _make(self) -> None:
        try:
            while True:
                self._room.acquire()
                if self._stopped:
                    return
                self._made.put((next(self._items), None))
        except BaseException as error:  # noqa: BLE001 - the caller gets it, also the end of the items
            self._made.put((None, error))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if os.getpid() != self._pid:
            raise StoreClosedError(
                "this iteration was begun before a fork, and the thread that reads for it is in the parent process. "
                "Open the store in the child process, and begin a new one"
            )
        if self._thread is None:
            return next(self._items)
        item, error = self._made.get()
        if error is not None:
            self._made.put((None, error))  # for whoever asks again
            raise error
        self._room.release()
        assert item is not None
        return item

    def close(self) -> None:
        """End the thread, and wait for its end. A second call does nothing."""
        self._stopped = True
        if self._thread is not None and self._pid == os.getpid():
            self._room.release()
            if not sys.is_finalizing():  # then it never ends
                self._thread.join()

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
