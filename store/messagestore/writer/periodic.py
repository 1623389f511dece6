"""A thread of the writer session that does something at an interval, as RocketMQ's scheduled services do.

A session starts its services when it is opened, and stops them before the store is closed or given to a broker. What a
service does may take the writer's mutex, but it must call `stopping` between any two steps that take long, because
whoever closes the store waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from messagestore.errors import StoreError
from messagestore.writer.service_thread import ServiceThread

_log = logging.getLogger(__name__)
Stopping = Callable[[float], bool]
"""Pauses for some seconds, and says whether to stop."""


class PeriodicService(ServiceThread):
    """One such thread.

    Parameters
    ----------
    name : str
        The name of the service, for the thread and for messages.
    interval_s : callable
        Returns the time until the task runs again.
    task : callable
        What is done. It receives `stopping`.
    """

    def __init__(self, name: str, interval_s: Callable[[], float], task: Callable[[Stopping], None]) -> None:
        super().__init__(f"messagestore-{name}")
        self.name = name
        self._interval_s = interval_s
        self._task = task
        self._logged = ""

    def stopping(self, pause_s: float) -> bool:
        """Whether the service has to end, after a pause."""
        if pause_s > 0 and not self._stopped:
            self._work.acquire(timeout=pause_s)
        return self._stopped

    def run(self) -> None:
        """Run the task at its interval until the service is stopped. What fails is logged, once for each reason."""
        while not self._stopped:
            try:
                self._task(self.stopping)
                self._logged = ""
            except (StoreError, OSError) as error:
                if not self.stopping(0) and str(error) != self._logged:
                    self._logged = str(error)
                    _log.warning("the %s service could not do its work: %s", self.name, error)
            if self.stopping(self._interval_s()):
                return
