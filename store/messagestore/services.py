"""The services of a writer: the threads that work for it, and the one order in which they start and stop.

A writer gets its services as soon as recovery has made it, and keeps them until the store lets the writer go. No thread
starts before it is needed:

    stop  start  service    its thread starts with                what it does
      1     5    retention  a session                             deletes the oldest segments
      2     4    delivery   a session                             brings delayed messages that are due to their topics
      3     3    flush      the first put or ASYNC_FLUSH batch    syncs, dispatches and publishes
      4     2    segments   a last segment that is nearly full    makes the next segments ahead
      5     1    pool       a session with a TransientStorePool   writes what the pool holds to the log

So the services that change the log of their own accord stop first, and those that serve appends stop after them. Each
stop waits for the end of the thread. Whoever closes the store then finishes what is still pending.

Two threads are not among them, because they do not belong to a writer. The thread that asks how half messages end calls
a function of the user, which may take any time and may put messages, so the session that started it ends it before it
closes. The thread that looks for waiting brokers belongs to the attachment, and closes the store itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from messagestore.broker.delivery import Delivery
from messagestore.broker.retention import Retention
from messagestore.errors import ConfigError
from messagestore.files.transient_store_pool import TransientStorePool
from messagestore.format.config import ASYNC_FLUSH, StoreConfig
from messagestore.writer.flush import FlushService
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.periodic import PeriodicService, Stopping
from messagestore.writer.pool_thread import PoolService
from messagestore.writer.segments_ahead import AllocateService
from messagestore.writer.service_thread import ServiceThread


class Services:
    """The services of one writer. They are stopped once, and for good.

    Parameters
    ----------
    writer : LogWriter
    half_progress : callable
        From which half message and which op message on somebody has to look; retention keeps these.
    """

    def __init__(self, writer: LogWriter, half_progress: Callable[[], tuple[int, int]]) -> None:
        self.writer = writer
        self.delivery = Delivery(writer)
        self.retention = Retention(writer, half_progress, self.delivery.saved)
        self.flush = FlushService(writer)
        self.segments = AllocateService(writer)
        self.pool: PoolService | None = None
        """Empties the TransientStorePool of the writer; None: it has none."""
        self.periodic: list[PeriodicService] = []
        """The threads of retention and delivery, while a session is open."""
        self.stopped = False
        """Whether the services end, or have ended."""

        writer.start_flushing = self.flush.start
        writer.allocate_ahead = self.segments.ask
        writer.log.take_spare = self.segments.take

    def start_session(self, config: StoreConfig) -> None:
        """Start what an open session needs besides; a second session of the process changes nothing.

        Raises
        ------
        ConfigError
            The settings ask for a TransientStorePool that cannot be.
        """
        self._start_pool(config)
        self._start_periodic(config)

    def _start_pool(self, config: StoreConfig) -> None:
        """Give the writer the TransientStorePool that the settings ask for, and the thread that empties it."""
        if not config.transient_store_pool_enable or self.pool is not None:
            return

        if config.flush_disk_type != ASYNC_FLUSH:
            raise ConfigError(
                f"transientStorePoolEnable: found true with flushDiskType={config.flush_disk_type}; allowed is true "
                f"with {ASYNC_FLUSH} only. A put with {config.flush_disk_type} is on the disk when it returns, and the "
                "pool keeps it in memory",
                key="transientStorePoolEnable",
                value=True,
            )

        pool = TransientStorePool(self.writer.log, config.transient_store_pool_size)
        self.pool = PoolService(self.writer, pool, self.flush.wake)
        self.pool.start()
        with self.writer.mutex:
            self.writer.pool = pool

    def _start_periodic(self, config: StoreConfig) -> None:
        if self.periodic:
            return

        def clean(stopping: Stopping) -> None:
            self.retention.run_if_due(stopping=stopping)

        if config.retention_enabled:
            interval_ms = config.clean_resource_interval
            self.periodic.append(PeriodicService("retention", lambda: interval_ms / 1000, clean))
        if config.deliver_delayed:
            self.periodic.append(PeriodicService("delivery", lambda: self.delivery.pause_s, self.delivery.deliver_all))
        for service in reversed(self.periodic):
            service.start()

    def _in_order(self) -> Iterator[ServiceThread]:
        """The services, in the order in which they stop."""
        yield from self.periodic
        yield self.flush
        yield self.segments
        if self.pool is not None:
            yield self.pool

    def stop(self) -> None:
        """End the threads, and wait for their ends. It may be called again, for example after Ctrl-C."""
        self.stopped = True
        for service in self._in_order():
            service.stop()

    def finished(self) -> None:
        """Note that everything is synced and visible: answer those who wait, and remove the segments made ahead.

        Call it after `stop`, while the writer lock is held.
        """
        self.flush.finished(self.writer.synced_end)
        self.segments.remove()

    def end(self) -> None:
        """Let everything go. Call it last: nothing more is synced, and puts whose callers do not wait end now."""
        self.flush.end()
        self.segments.forget()
        if self.pool is not None:
            self.pool.pool.close()

    def forget_threads(self) -> None:
        """Replace the locks in a forked child, where the threads that held them do not exist."""
        self.writer.forget_threads()
        for service in self._in_order():
            service.forget_threads()
