"""What commands do beside a store's programs until they are told to end: services, each in a thread of its own.

A service works in rounds, and each round takes a turn among the store's writers. Some faults pass without a change to
this process: another writer holds the store, the disk is full, one place is damaged. They are reported once, and the
service tries again after ten seconds, while the others go on. Whatever else fails ends all services and the command:
who started it, such as systemd, starts it again, and the next start recovers the store.

    told to end          the rounds that run are finished, and the store is closed
    killed               the next writer recovers the store; whatever a round did is there completely or not at all
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from messagestore import (
    CorruptionError,
    Delivered,
    StoreConfig,
    StoreError,
    StoreFullError,
    StoreLockedError,
    deliver_delayed,
)
from pyspark_messagestore.cli import output as out

AGAIN_S = 10.0
"""How long after an error that passes the next round comes, as in RocketMQ."""
_TRY_S = 1.0
"""How long one try for the store lasts."""
_LOOK_S = 0.5
"""A signal may come to another thread while one for a lease waits for the main thread, which then nothing wakes."""
_STUCK_S = 3600.0
"""A round that takes longer is taken for one that does not end: the recovery of a large store takes minutes."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Service:
    """Something that is done again and again.

    Parameters
    ----------
    name : str
    work : callable
        One round. It returns the time until the next one, in seconds. It waits for other writers as `impatient` says,
        so that a service which is told to end does not wait for them.
    patience_s : float
        For how long rounds are tried while another writer holds the store, before somebody is told.
    """

    def __init__(self, name: str, work: Callable[[], float], patience_s: float) -> None:
        self.name = name
        self._work = work
        self._patience_s = patience_s
        self._locked_since_s: float | None = None
        self.error: BaseException | None = None
        """What ended it."""
        self.trouble = ""
        """Why its last round could not be done, in words."""
        self.damage: set[str] = set()
        self._told = ""
        self._since_s: float | None = None

    def begin(self, ends: threading.Event) -> threading.Thread:
        """Start the thread. It ends after a round in which `ends` is set, and sets it if the service fails."""
        thread = threading.Thread(target=self._run, args=(ends,), name=f"messagestore-{self.name}")
        thread.start()
        return thread

    def alive(self) -> None:
        """Note within a long round that it goes on."""
        self._since_s = time.monotonic()

    @property
    def stuck(self) -> bool:
        """Whether its round does not go on."""
        since_s = self._since_s
        return since_s is not None and time.monotonic() - since_s > _STUCK_S

    def _run(self, ends: threading.Event) -> None:
        try:
            while not ends.is_set():
                self.alive()
                pause_s = self._round()
                self._since_s = None
                ends.wait(pause_s)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it again
            self.error = error
            ends.set()

    def _round(self) -> float:
        begun_s = time.monotonic()
        try:
            pause_s = self._work()
        except (StoreError, OSError) as error:
            if not _passes(error):
                raise
            self.trouble = str(error)
            if isinstance(error, StoreLockedError):
                self._locked_since_s = self._locked_since_s or begun_s
                if time.monotonic() - self._locked_since_s < self._patience_s:
                    return 0.0
                self.trouble = (
                    f"{error.path}: still locked by {error.holder} after {self._patience_s:g} s. It is tried again. "
                    "Stop the process that holds it, or allow more time (lockTimeout; on the command line --wait)"
                )
            # The same damage is met in every round; the words for a full disk have numbers that change.
            reason = self.trouble if isinstance(error, CorruptionError) else type(error).__name__
            if reason != self._told and self.trouble not in self.damage:
                out.note(f"messagestore: {self.name}: {self.trouble}")
            if isinstance(error, CorruptionError):
                self.damage.add(self.trouble)
            self._told = reason
            return AGAIN_S
        if self._told and self.trouble not in self.damage:
            out.note(f"messagestore: {self.name}: goes on")
        self._told = self.trouble = ""
        self._locked_since_s = None
        return pause_s


def impatient(settings: StoreConfig, config: StoreConfig) -> StoreConfig:
    """What was given of the settings, for the rounds of services, which try again and again."""
    return config.replace(lock_timeout=f"{min(_TRY_S, settings.lock_timeout_s):g}s")


def _passes(error: StoreError | OSError) -> bool:
    """Whether another try may help. A broker that holds the store does by itself what these services do."""
    if isinstance(error, StoreLockedError):
        return "broker" not in error.holder
    return isinstance(error, (CorruptionError, StoreFullError)) or getattr(error, "errno", None) in _NO_ROOM


def run_services(services: Sequence[Service], ends: threading.Event) -> None:
    """Run services until `ends` is set or one of them fails. What they had begun is finished when this returns.

    Raises
    ------
    Exception
        What a service failed with, with a note that names the service.
    """
    supervisor = Supervisor()
    threads = [service.begin(ends) for service in services]
    try:
        supervisor.tell("READY=1")
        trouble = ""
        while not ends.wait(_LOOK_S):
            if not any(service.stuck for service in services):
                supervisor.alive()
            now = "; ".join(f"{service.name}: {service.trouble}" for service in services if service.trouble)
            if now != trouble:
                trouble = now
                supervisor.tell(f"STATUS={now}")
    finally:
        ends.set()
        supervisor.tell("STOPPING=1")
        for thread in threads:
            thread.join()

    for service in services:
        if service.error is not None:
            service.error.add_note(f"This ended {service.name}, and with it the command")
            raise service.error


@contextmanager
def told_to_end() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set: what was begun is finished, and the store is closed.

    Another thread sets it. The main thread holds the event's lock for a moment of each wait, and a handler that runs in
    this moment would wait for its own thread, for ever.
    """
    ends = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield ends
        return

    def told(*_: object) -> None:
        _thread.start_new_thread(ends.set, ())  # without a lock of Python's, which `Thread.start` takes

    usual = {number: signal.signal(number, told) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ends
    finally:
        for number, handler in usual.items():
            with contextlib.suppress(TypeError):  # a handler that was not set from Python
                signal.signal(number, handler)


class Supervisor:
    """systemd, if it started this process and wants to know how it is (sd_notify); otherwise, nobody."""

    def __init__(self) -> None:
        place = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + place[1:] if place.startswith("@") else place
        mine = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = os.environ.get("WATCHDOG_USEC", "") if mine else ""
        self._interval_s = int(microseconds) / 2_000_000 if microseconds.isdecimal() else None
        self._alive_s = 0.0

    def alive(self) -> None:
        """Keep the watchdog quiet, as often as it wants."""
        now_s = time.monotonic()
        if self._interval_s is not None and now_s >= self._alive_s + self._interval_s - _LOOK_S:
            self._alive_s = now_s
            self.tell("WATCHDOG=1")

    def tell(self, text: str) -> None:
        """Send one line."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.sendto(text.replace("\n", " ").encode(), self._address)
        except OSError as error:
            out.note(f"messagestore: NOTIFY_SOCKET: {text.partition('=')[0]} could not be told to systemd: {error}")


class Delivery:
    """Rounds of the delivery of delayed messages.

    Parameters
    ----------
    path : str
    config : StoreConfig
    show : callable
        Called after each round that delivered something, or left something out.
    """

    def __init__(self, path: str, config: StoreConfig, show: Callable[[Delivered], None]) -> None:
        self._path, self._config, self._show = path, config, show
        self.count = 0
        """The number of messages that were delivered."""

    def deliver(self) -> float | None:
        """Deliver one batch of what is due; returns the pause before the next round, None if more may be due now."""
        done = deliver_delayed(self._path, self._config)
        self.count += done.count
        if done.count or done.left_out:
            self._show(done)
            return None
        return done.pause_s(self._config)


def show_left_out(done: Delivered) -> None:
    """Say on standard error which messages have no place to be delivered to."""
    if done.left_out:
        out.note(
            f"{out.count_words(done.left_out, 'message')} that cannot be delivered: no topic and queue to go to. They "
            "stay in SCHEDULE_TOPIC_XXXX"
        )
