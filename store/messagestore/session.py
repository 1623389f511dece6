"""The sharing of a store among the writers of one process, which takes turns with others (`store_locks`).

There is one `AttachedStore` per process and store. Before it reads anything that it relies on, it attaches: it takes a
shared lock and a lease, which keep Java brokers out. It takes the writer lock for a session or for one commit, and
recovers or catches up. Some time after the last append it detaches: it makes everything durable, moves the clean end,
and removes `abort` if no other writer is attached. Because `abort` is removed last, a detach that is killed does no
harm.

    attached without interruption, counter as cached   -> continue
    attached without interruption, counter is newer    -> catch up
    anything else                                      -> recover, as on open

While it is attached, it holds its root folder open and acts in that folder only. The settings are those of the sessions
that are open, which all ask for the same ones; between sessions, each commit brings its own (`shared_settings`).

A broker that starts meanwhile waits in the kernel, and a thread watches for such a broker. The store then finishes what
was begun and closes as in a detach, even under an open session, and the broker continues. The session's next append
raises `StoreLockedError`.

Threads: this module is thread-safe. A forked child starts from scratch: it closes the locks and never unlocks them.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping

from messagestore.batches.progress import settle_if_possible
from messagestore.broker.open_halves import progress_of
from messagestore.errors import (
    ConfigError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StorePermissionError,
)
from messagestore.files.broker_name import keep_broker_name
from messagestore.files.disk import Disk
from messagestore.files.file_systems import warn_of_network
from messagestore.files.store_root import known_root, other_names, writable_by_others
from messagestore.files.store_settings import read_settings, write_settings
from messagestore.files.writer_lock import Attachment
from messagestore.format.config import StoreConfig
from messagestore.log.refusals import refuse_to_write
from messagestore.log.store_files import Paths, StoreFiles, make_own_folders, make_root
from messagestore.log.store_identity import establish
from messagestore.recovery.recover import recover
from messagestore.recovery.report import RecoveryReport
from messagestore.services import Services
from messagestore.shared_settings import LOOKED_AT, differing_settings, other_settings, stored_with, warn_of_differences
from messagestore.store_locks import StoreLocks, ThreadTurns
from messagestore.watcher import Watcher
from messagestore.writer.catching_up import catch_up
from messagestore.writer.flush import FlushService
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.standing import broker_comes
from messagestore.writer.states import Health, Presence
from messagestore.writer.statistics import Statistics

_stores: dict[str, AttachedStore] = {}
_stores_mutex = threading.Lock()
_ROOM = 256 * 1024
"""So many bytes of the disk are kept for the recovery that a full disk will need."""
_BRIEFLY_S = 1.0
_warned: set[str] = set()
_looked_for_links: set[str] = set()
_log = logging.getLogger(__name__)
_LOOK_S = 0.2
"""The interval at which the store checks whether a broker waits."""
_LONGEST_PAUSE_S = 3600.0
_NOT_WRITABLE = (
    "this user may not create files there, as a writer must. Make the folder writable for this user, or open the store "
    "read-only"
)
_READ_ONLY_MOUNT = "its file system is mounted read-only. Mount it writable, or open the store read-only"


def attached_store(
    root: str | os.PathLike[str], config: StoreConfig | None = None, disk: Disk | None = None
) -> AttachedStore:
    """The store of this process at a root, created at the first call. This call locks and reads nothing.

    `config` is for a store that is created here. `writing` and `open_session` take the settings that count.
    """
    path = os.path.realpath(os.fspath(root))
    with _stores_mutex:
        store = _stores.get(path)
        if store is not None and store.pid != os.getpid():
            store = None  # a forked child starts from scratch
        if store is not None and disk is not store.disk and (disk is not None or type(store.disk) is not Disk):
            if store.attached:
                raise ConfigError(
                    f"{path}: this process has the store open through another disk. Pass that one", key="disk"
                )
            store = None
        if store is None:
            store = _stores[path] = AttachedStore(path, config or StoreConfig(), disk or Disk())
    return store


class Session:
    """What a caller of `AttachedStore.open_session` has until `close_session`.

    A session also ends when nobody refers to it any more: an exception of a signal handler may come between any two
    steps, such as the opening and the assignment of what was opened.
    """

    __slots__ = ("__weakref__", "writer")

    def __init__(self, writer: LogWriter) -> None:
        self.writer = writer


class AttachedStore:
    """The writer side of one store in one process. Use `attached_store`."""

    def __init__(self, root: str, config: StoreConfig, disk: Disk) -> None:
        self.paths = Paths(root, config.file_mode_bits)
        self.config = config
        self.disk = disk
        self.pid = os.getpid()

        self.services: Services | None = None
        """The writer of this process, and the threads that work for it; None: there is no writer now."""
        self.report: RecoveryReport | None = None

        self.statistics = Statistics()
        """What this process has put and read."""
        self.locks = StoreLocks(self.paths, disk)
        """What this process holds of the store, among processes."""

        self._threads = ThreadTurns(self.paths)
        self._stored = StoreConfig()
        """The settings that lived with the store when the first of the open sessions began, or at the last append."""
        self._sessions: tuple[weakref.ref[Session], ...] = ()
        """The sessions, of which some may be gone. It is replaced and never changed."""
        self._last_used_s = 0.0
        self._waits = True
        self._watcher = Watcher(self._look)

    def forget_threads(self) -> None:
        """Replace the locks in a forked child, where the threads that held them do not exist."""
        self._threads = ThreadTurns(self.paths)
        self._watcher.forget_threads()
        self.statistics.forget_threads()
        if self.services is not None:
            self.services.forget_threads()

    @property
    def mutex(self) -> threading.RLock:
        """What the threads of this process take in turns."""
        return self._threads.mutex

    @property
    def attached(self) -> bool:
        """Whether this process keeps brokers out of the store."""
        return self.locks.attached

    @property
    def writer(self) -> LogWriter | None:
        """The store's writer in this process; None: it has none now."""
        services = self.services
        return None if services is None else services.writer

    @property
    def flush(self) -> FlushService | None:
        """Syncs for groups of puts; None: the store is closed, or is being closed."""
        services = self.services
        return None if services is None or services.stopped else services.flush

    @property
    def _in_session(self) -> bool:
        """Whether a session is open; while one is, this process is HOLDING."""
        return any(session() is not None for session in self._sessions)

    # ---- settings

    def settings(self, config: StoreConfig | None) -> StoreConfig:
        """The settings for a caller: those that he gave, or those of the open sessions, or the defaults."""
        if config is not None:
            return config
        return self.config if self._in_session else StoreConfig()  # no lock: this does not wait for a commit

    def alter(self, **changes: int) -> StoreConfig:
        """Change settings that are looked at anew each time, for all open sessions; return all settings."""
        with self.mutex:
            self.config = self.config.replace(**changes)
            if self.writer is not None:
                files = self.writer.files
                files.config = files.config.replace(**changes)
            return self.config

    def alter_stored(self, changes: Mapping[str, object], timeout_s: float | None = None) -> StoreConfig:
        """Change the settings that live with the store, in a turn among its writers; returns them as they are now.

        Open sessions keep the settings with which they were opened. The file is replaced whole, in one step.

        Parameters
        ----------
        changes : mapping of str to object
            RocketMQ's keys; None takes a setting away.
        timeout_s : float | None
            How long to wait for another writer; None: the setting `lockTimeout`.
        """
        words = "changing the store's settings"
        with self.writing(words, timeout_s, config=self.settings(None)) as writer, writer.mutex:
            writer.check_turn()
            writer.check_usable()
            writer.check_locks()

            before = read_settings(self.disk, self.paths.settings)
            config = stored_with(before, changes)
            if config.to_mapping() != before.to_mapping():
                via = self.paths.temporary("settings.json")
                write_settings(self.disk, self.paths.settings, config.to_mapping(), via=via)
            return config

    def _take_settings(self, config: StoreConfig) -> None:
        """Work with the settings of the caller who comes. Call it under the mutex, before he does anything.

        What the callers before him have asked for is kept: open sessions cannot be given other settings, and a store
        that is attached without a session is closed first, unless the settings are looked at anew each time.

        Raises
        ------
        ConfigError
            Sessions are open with other settings.
        CorruptionError
            The settings that live with the store are damaged.
        """
        if not self._in_session:
            warn_of_differences(self.paths.root, config, self._stored)
        config = config.completed(self._stored)
        files = None if self.writer is None else self.writer.files
        differing = differing_settings(config, self.config, self.config if files is None else files.config)
        if self._in_session:
            if differing:
                raise other_settings(self.paths.root, differing, self.config, config)
            return
        if any(name not in LOOKED_AT for name in differing):
            with contextlib.suppress(StoreError, OSError):  # the next opening of the store finds what is wrong
                self.detach()
        elif files is not None:
            files.config = files.config.replace(**{name: getattr(config, name) for name in differing})
        if self.writer is not None:
            self.writer.files.ask(config)
        self.config = config
        known_root(self.paths.root, config.file_mode_bits, only=True)

    # ---- taking turns

    @contextlib.contextmanager
    def writing(
        self, description: str, timeout_s: float | None = None, *, config: StoreConfig | None = None
    ) -> Iterator[LogWriter]:
        """Hold the store for one append: `with store.writing("query 7") as writer: ...`.

        `config` has the settings of this append; None: those of the last one.

        Raises
        ------
        ConfigError
            A session of this process is open with other settings.
        StoreLockedError
            Another process, or another thread of this one, holds the store for longer than `timeout_s` (default
            `lockTimeout`); the error names it.
        """
        with self._turn(description, timeout_s, config) as left_s:
            writer = self._enter(description, left_s, config)
            try:
                yield writer
            finally:
                self._leave()

    @contextlib.contextmanager
    def _turn(self, description: str, timeout_s: float | None, config: StoreConfig | None) -> Iterator[float]:
        """Hold the store among the threads of this process; yields what is left of the time for the other processes.

        Raises
        ------
        StoreLockedError
            Another thread holds it for longer than `timeout_s`; the error says what for.
        """
        stored = self._stored if self._in_session else read_settings(self.disk, self.paths.settings)
        limit_s = (config or self.config).completed(stored).lock_timeout_s if timeout_s is None else timeout_s
        with self._threads.turn(description, limit_s) as (left_s, waited):
            if not self._waits:
                raise StoreLockedError(
                    f"{self.paths.root}: this process is ending, and begins nothing more ({description}). Try again "
                    f"when another one has taken its place",
                    path=self.paths.writer_lock,
                    holder=f"pid {os.getpid()}, which is ending",
                )
            if not self._in_session:
                self._stored = read_settings(self.disk, self.paths.settings) if waited else stored
            yield left_s

    @contextlib.contextmanager
    def nobody_waits(self) -> Iterator[None]:
        """Until the block ends, no thread of this process waits for another process, or begins anything: it gets a
        `StoreLockedError` instead. An append that has begun is finished, and other threads wait for it.
        """
        self._waits = False
        try:
            yield
        finally:
            self._waits = True

    def open_session(
        self,
        description: str,
        timeout_s: float | None = None,
        *,
        config: StoreConfig | None = None,
        accept_loss: bool = False,
    ) -> Session:
        """Hold the store until `close_session`, with the settings of `config`; None: those of the last user.

        With `accept_loss`, the store is opened even if the end of the log is provably lost, and continues without it.
        """
        with self._turn(description, timeout_s, config) as left_s:
            writer, session = self._enter(description, left_s, config, accept_loss=accept_loss), None
            try:
                assert self.services is not None
                self.services.start_session(self.config)
                session = Session(writer)
                self._sessions = (*self._sessions, weakref.ref(session))
            except BaseException:
                self._end_session(session)
                raise
            return session

    def empty_pool(self, session: Session) -> None:
        """Write to the log what only the memory of this process has, before the last session is closed.

        Afterwards the writer has no pool: a put that comes before the session ends is written at once.

        Raises
        ------
        StoreFullError
            The disk has no room. The session stays as it is.
        StorePoisonedError
            The write failed. What waits is lost.
        """
        with self.mutex:
            services = self.services
            others_open = any(other() not in (None, session) for other in self._sessions)
            if services is None or others_open or session.writer is not services.writer:
                return
            writer = services.writer
            if writer.pid != os.getpid():  # a forked child, which has none of the parent's memory
                return
            with writer.mutex:
                if writer.pool is not None and writer.health is Health.SOUND:
                    writer.pool_drain.run()
                    writer.pool = None

    def close_session(self, session: Session) -> None:
        """Release the store; the last session of the process detaches at once.

        A session that ended before (a broker came) has nothing to release.
        """
        with self.mutex:
            if any(other() is session for other in self._sessions):
                self._end_session(session)

    def _end_session(self, session: Session | None) -> None:
        self._sessions = tuple(other for other in self._sessions if other() not in (None, session))
        if not self._sessions:
            self.detach()

    def _enter(
        self, description: str, timeout_s: float, config: StoreConfig | None, *, accept_loss: bool = False
    ) -> LogWriter:
        """Attach, and hold the store. On a full disk, what was kept for this is used."""
        try:
            return self._entered(description, timeout_s, config, accept_loss=accept_loss)
        except StoreFullError as error:
            kept = 0 if self._in_session else self.locks.writer_lock.give_room_up()
            if not kept:
                raise
            _log.warning(
                "%s: the disk is full (%s). What the store had kept for a recovery, %d bytes, is used now. Make room",
                self.paths.root,
                str(error),  # a record that is kept would keep the files that its frames have open
                kept,
            )
        return self._entered(description, timeout_s, config, accept_loss=accept_loss)

    def _entered(
        self, description: str, timeout_s: float, config: StoreConfig | None, *, accept_loss: bool = False
    ) -> LogWriter:
        self._drop_if_unsound()
        if self.locks.broker_waits():
            with contextlib.suppress(StoreError, OSError):  # the next opening of the store finds what is wrong
                self._make_way()

        if config is not None:
            self._take_settings(config)

        try:
            if self.locks.presence is Presence.DETACHED:
                self._attach()
            if not self._in_session:
                self._take_turn(timeout_s, description, accept_loss=accept_loss)

            assert self.writer is not None
            self.writer.check_usable()
            if self.config.broker_name:
                via = self.paths.temporary("broker.json")
                keep_broker_name(self.disk, self.paths.broker_name, self.config.broker_name, via=via)
        except BaseException as error:
            _note_remedy(self.paths.root, error)
            if not self._in_session:
                self._give_back()
            raise
        return self.writer

    def _drop_if_unsound(self) -> None:
        """Let go of a store that was lost, of one whose writer has failed, and of one whose release was interrupted."""
        is_unsound = self.writer is not None and self.writer.health is not Health.SOUND  # also under open sessions
        if self.locks.presence is Presence.LEAVING or self.locks.lost or is_unsound:
            self._drop()

    def _take_turn(self, timeout_s: float, description: str, *, accept_loss: bool) -> None:
        """Take the writer lock, and bring the writer to where the log ends now: it catches up, or recovery makes it."""
        self.locks.take(timeout_s, description, self.writer, lambda: self._waits)
        self.locks.check_place()
        if self.writer is None or not catch_up(self.writer):
            settle_if_possible(self._recover(accept_loss=accept_loss).writer)
            self.locks.writer_lock.keep_room(min(_ROOM, self.config.mapped_file_size_commit_log // 16))

    def _give_back(self) -> None:
        """Let go of the store after a failed attempt to hold it.

        Unless another process holds the store, the writer may have taken in a part of what it had to.
        """
        if self.writer is None or self.locks.presence is Presence.HOLDING:
            self._drop()
        else:
            self.locks.release(self.writer)

    def _attach(self) -> None:
        """Create what is missing, and become one of the processes that are at work on the store."""
        held = self.locks.hold_root(self.config.file_mode_bits)
        refuse_to_write(self.disk, self.paths, self.config)  # before anything is created
        make_root(self.disk, self.paths)
        if not held:
            self.locks.hold_root(self.config.file_mode_bits)

        _warn_of_others(self.paths.root)
        warn_of_network(self.paths.root)
        _warn_of_hard_links(self.disk, self.paths)

        self.locks.attach()
        self._last_used_s = time.monotonic()
        self._watch()
        make_own_folders(self.disk, self.paths)

    def _recover(self, *, accept_loss: bool = False) -> Services:
        """Recover the store, and give it the writer that this makes, with its services."""
        self._let_go(self._closed)

        refuse_to_write(self.disk, self.paths, self.config)
        established = establish(self.disk, self.paths, self.config, accept_loss=accept_loss)
        files = StoreFiles(self.paths, self.config, established.identity, self.disk)
        files.first_writer, files.searched_whole = established.first, established.searched_whole
        try:
            files.load()
            writer, self.report = recover(files, accept_loss=accept_loss)
        except BaseException:
            files.close()  # a writer that failed refers to itself, so its files would stay open for a while
            raise
        self.report.notes[:0] = established.notes
        self.report.notes += [files.other_levels] if files.other_levels else []

        with writer.mutex:
            writer.clock.load()
        writer.topics_put = self.statistics.topics_of_writer()
        writer.locks_intact = self.locks.intact
        writer.broker_waits = self.locks.broker_waits

        services = Services(writer, lambda: progress_of(self.paths.root, self.config, self.disk))
        services.delivery.follow()
        self.services = services
        return services

    def _let_go(self, why: Callable[[], StoreError]) -> None:
        """Stop what works for the writer, and retire it. Callers that still use it get the error of `why`."""
        services = self.services
        if services is None:
            return
        services.stop()
        services.end()
        services.writer.retire(why)  # before the lease is released: see `Standing.check_turn`
        services.writer.files.close()
        self.services = None

    def _leave(self) -> None:
        self._last_used_s = time.monotonic()
        if self._in_session:
            return
        try:
            if self.writer is not None:
                self.writer.finish()
        finally:
            self.locks.release(self.writer)
            if self.writer is not None and self.writer.health is not Health.SOUND:
                self._drop()
            self._watch()

    # ---- detaching

    def _watch(self) -> None:
        """Have a thread look for waiting brokers, and detach `attachTimeout` after the last append.

        Spark kills an idle worker soon after that.
        """
        attachment = self.locks.attachment
        if attachment is None or (self._in_session and not attachment.leased):
            return  # without a lease, no broker waits, and an open session ends by itself
        self._watcher.start()

    def _look(self) -> float | None:
        """Leave the store if it is time, and say when the watcher looks next."""
        self.statistics.sample()
        attachment = self.locks.attachment
        if attachment is not None and not self._is_due(attachment):
            return self._pause_s(attachment)
        if not self.mutex.acquire(timeout=_LOOK_S):
            _ending.end_if_late()
            return 0  # an append is running; meanwhile this checks how long a broker has waited
        try:
            if self.locks.attachment is None or not self._watcher.is_mine():
                return None
            try:
                if self.locks.attachment.broker_waits():
                    self._make_way()
                elif self._is_due(self.locks.attachment):
                    self.detach()
            except (StoreError, OSError) as error:  # the next writer recovers what is in the log
                _log.warning("%s: the store could not be closed properly: %s", self.paths.root, error)
        finally:
            self.mutex.release()
            _ending.end_if_detached()
        return 0

    def wake_watcher(self) -> None:
        """Make the thread look now; a signal handler may call this."""
        self._watcher.wake()

    def _pause_s(self, attachment: Attachment) -> float:
        """The time until the thread has to look again."""
        longest_s = _LOOK_S if attachment.leased else _LONGEST_PAUSE_S
        if self._in_session:
            return longest_s
        return min(max(self._last_used_s + self.config.attach_timeout_s - time.monotonic(), 0.001), longest_s)

    def _is_due(self, attachment: Attachment) -> bool:
        """Whether it is time to detach."""
        idle_s = time.monotonic() - self._last_used_s
        return (
            bool(_ending.signal_number)
            or attachment.broker_waits()
            or (not self._in_session and idle_s >= self.config.attach_timeout_s)
        )

    def _make_way(self) -> None:
        """Let in a broker that waits to open the store: finish what was begun, and close the store as in a detach.

        A broker that waited for longer than the kernel allows has read the store, and may have cut it. Nothing is
        finished in that case; the next writer recovers.
        """
        with self.mutex:
            paths = self.paths
            try:
                self._tidy()
            finally:
                self._drop(lambda: broker_comes(paths))

    def detach(self) -> None:
        """Make everything durable, move the clean end, remove `abort` if nobody else is attached, and allow a broker
        to start.
        """
        with self.mutex:
            if self.locks.attachment is None:
                return
            try:
                self._tidy()
            finally:
                self._drop()

    def _tidy(self) -> None:
        services, attachment = self.services, self.locks.attachment
        if services is None or attachment is None or not attachment.intact():
            return
        services.stop()
        self._make_durable(services, attachment)

    def _make_durable(self, services: Services, attachment: Attachment) -> None:
        """Publish and sync what is pending, move the clean end, and remove `abort`, as far as this is ours to do."""
        writer = services.writer
        if writer.health is not Health.SOUND:
            return

        if self.locks.presence is not Presence.HOLDING:
            try:
                self.locks.take(_BRIEFLY_S, "detach", writer, lambda: self._waits)
            except StoreLockedError:
                return  # the process that holds it is attached, and closes the store itself
            if not catch_up(writer):
                if attachment.broker_waits() or not attachment.alone():
                    return  # a broker recovers by itself, and another process closes the store
                services = self._recover()  # others went on, and retention may have deleted what was the end here
                writer = services.writer

        with writer.mutex:
            writer.watch_turn()  # what is appended now would come after the store was closed for a broker
            if not attachment.intact():  # it may have changed since the check above
                return
            writer.sync_to_end()  # first: what was put is on the disk, even if it has no room for the rest
            writer.finish()
            writer.pool = None  # a put that comes now, before the writer is retired, is written at once

            services.finished()

            services.delivery.follow()
            alone = attachment.alone()
            if writer.state.clean_end != writer.end.physical_offset or writer.state.clean != alone:
                writer.clean_end.move(closing=alone)

            # Last, because a broker that finds no `abort` trusts the files as they are.
            files = writer.files
            if alone and files.abort_is_ours:
                self.disk.unlink(files.paths.abort)
                self.disk.fsync_dir(files.paths.root)

    def _drop(self, why: Callable[[], StoreError] | None = None) -> None:
        """Forget everything cached and release the locks. Callers that still use the writer get the error of `why`."""
        try:
            self._drop_once(why or self._closed)
        except BaseException:
            self._drop_once(why or self._closed)  # an exception of a signal handler leaves no lock behind
            raise

    def _drop_once(self, why: Callable[[], StoreError]) -> None:
        """Do what `_drop` does, as far as it is not done yet."""
        self._let_go(why)
        self._sessions = ()
        self.locks.let_go()
        self._watcher.end()

    def _closed(self) -> StoreClosedError:
        return StoreClosedError(
            f"{self.paths.root}: another thread of this process has closed the store. Open it again"
        )


def _note_remedy(root: str, error: BaseException) -> None:
    """Add to an error of the system what its user can do; a `StorePermissionError` says so already."""
    if not isinstance(error, OSError) or isinstance(error, StorePermissionError):
        return
    if error.errno in (errno.EACCES, errno.EPERM):
        error.add_note(f"{root}: {_NOT_WRITABLE}")
    elif error.errno == errno.EROFS:
        error.add_note(f"{root}: {_READ_ONLY_MOUNT}")


class _Ending:
    """Detaches the stores of a process that does not end as a Python program does, and then lets it end.

    A worker of Spark's daemon ends by `os._exit` when the JVM closes its socket: after it was idle for a minute, when
    the application ends, or when the JVM has ended. In the last two cases the daemon also sends SIGHUP to its process
    group, a millisecond later, and it resets a worker's signal handlers before each task. So a worker that has a store
    leaves the group: it sees the end of its socket in any case.

    A worker without a daemon gets SIGTERM. The signal handler only notes the signal, and wakes the threads that watch
    the stores, because the thread that it interrupts may hold any lock. These threads detach the stores in which no
    append is running. A process that is appending ends soon in any case, and the next writer recovers.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._signalled_s = 0.0
        self._exit = os._exit
        self._installed = False

    def install(self) -> None:
        """Take over `os._exit`, and SIGTERM and SIGHUP unless they have other handlers; leave the daemon's process
        group. This works in the main thread only.
        """
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = True
        if os.getpgrp() == os.getppid():  # a daemon's group, which the daemon ends as a whole
            os.setpgid(0, 0)
        self._exit, os._exit = os._exit, self._detach_and_exit  # type: ignore[assignment]
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._note_signal)

    def _detach_and_exit(self, status: int) -> None:
        try:
            for store in list(_stores.values()):
                if store.pid == os.getpid() and store.mutex.acquire(timeout=_BRIEFLY_S):
                    try:
                        store.detach()
                    finally:
                        store.mutex.release()
        finally:
            self._exit(status)  # also after a failure: the next writer recovers

    def _note_signal(self, number: int, frame: object) -> None:  # noqa: ARG002 - the signature of a signal handler
        self._signalled_s = time.monotonic()
        self.signal_number = number
        watched = [store for store in list(_stores.values()) if store.attached and store.pid == os.getpid()]
        for store in watched:
            store.wake_watcher()
        if not watched:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def end_if_detached(self) -> None:
        """End the process if a signal came, unless another store is still attached."""
        if self.signal_number and not any(
            store.attached and store.pid == os.getpid() for store in list(_stores.values())
        ):
            self._end()

    def end_if_late(self) -> None:
        """End the process if a signal came a while ago and an append is still running."""
        if self.signal_number and time.monotonic() - self._signalled_s > _BRIEFLY_S:
            self._end()

    def _end(self) -> None:
        self._exit(128 + self.signal_number)  # only the main thread could restore the default handler


_ending = _Ending()


def detach_at_the_end() -> None:
    """Close the stores of this process before it ends by SIGTERM, SIGHUP or `os._exit`, as a worker of Spark does.

    The user's own signal handlers stay.
    """
    _ending.install()


def _warn_of_others(root: str) -> None:
    """Warn once per process if every user may write in the root folder, and so replace the store's files."""
    if root not in _warned and writable_by_others(root):
        _warned.add(root)
        _log.warning(
            "%s: every user may write in this folder, and could replace the store's files or put links there. Take "
            "this permission away (chmod o-w)",
            root,
        )


def _warn_of_hard_links(disk: Disk, paths: Paths) -> None:
    """Warn once per process about hard links: a copy made with them (`cp -al`) changes whenever the store does."""
    if paths.root in _looked_for_links:
        return
    _looked_for_links.add(paths.root)
    segments = disk.names(paths.commit_log)
    for path in (os.path.join(paths.commit_log, segments[-1]) if segments else "", paths.state):
        if path and other_names(path):
            _log.warning(
                "%s: this file has a second name (a hard link). A backup that shares the store's files changes with "
                "them, and so is no backup. Copy the files instead",
                path,
            )


def _detach_all() -> None:
    for store in list(_stores.values()):
        if store.pid == os.getpid():
            flush = store.flush
            try:
                store.detach()
            except (StoreError, OSError) as error:
                _log.warning("%s: the process ends, and could not close the store: %s", store.paths.root, error)
            if flush is not None:
                flush.promised.join()


def _forget_threads() -> None:
    global _stores_mutex  # noqa: PLW0603 - one per process
    _stores_mutex = threading.Lock()
    for store in _stores.values():
        store.forget_threads()


atexit.register(_detach_all)
os.register_at_fork(after_in_child=_forget_threads)  # so that a call in a child raises an error and does not hang
