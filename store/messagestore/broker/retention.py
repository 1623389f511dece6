"""Retention: deletes the oldest segments, then the queue and index files that lead only to them.

    restate batches -> clean end -> segments, one by one -> queue files -> index files

The order makes a kill at any place harmless. Before the first segment goes, the newest batch of each app is restated
above, and is on the disk. Each name is removed and its folder synced before the next one goes, because a power cut may
otherwise keep an earlier name and lose a later one, which would be a gap. The queues and the index come last: a unit or
an entry below the log's begin leads nowhere and is never followed, while a record without a unit would be damage.
Files that a kill leaves behind go with the next run.

No minimum of a queue is stored anywhere, in RocketMQ neither: it is the first unit at or above the log's begin. Readers
of this project search for it, and RocketMQ does the same in the first file of a queue.

Threads: an unlink of a large file takes its time, so it is done without the writer's mutex. What the writer knows is
changed before, under the mutex.

Source: RocketMQ `DefaultMessageStore.CleanCommitLogService`, `CleanConsumeQueueService`, `CorrectLogicOffsetService`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import replace

from messagestore.batches.append import newest_batches, restate_batches
from messagestore.batches.progress import first_pending, settle_progress
from messagestore.broker.expired import (
    DeliveryProgress,
    ExpiredFiles,
    ExpiredSegments,
    Expiry,
    HalfProgress,
    Needed,
    expired_segments,
    last_delete_time_ms,
    refuse_compaction,
)
from messagestore.broker.half_progress import save_half_progress
from messagestore.errors import CorruptionError, StoreError, StoreFullError, StoreLockedError
from messagestore.files.consume_queue import ConsumeQueue, list_queues, queue_directory
from messagestore.files.disk import FilePool
from messagestore.files.numbered_files import FILE_NAME
from messagestore.format.config import StoreConfig
from messagestore.format.layout import LEAST_TAGS_CODE, UNIT
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.periodic import Stopping

_HOUR_MS = 3_600_000
_EXTENSION_FOLDER = "consumequeue_ext"
_POOL_SIZE = 16
_log = logging.getLogger(__name__)


class _Clock:
    """Says when a run has to stop, and pauses between deletions."""

    def __init__(self, limit_s: float | None, stopping: Stopping) -> None:
        self._end_s = None if limit_s is None else time.monotonic() + limit_s
        self._stopping = stopping

    def stops(self, pause_ms: int = 0) -> bool:
        """Whether the run has to stop, after a pause."""
        return (self._end_s is not None and time.monotonic() >= self._end_s) or self._stopping(pause_ms / 1000)


def _paused(pause_s: float) -> bool:
    """Pause for a moment in which the disk serves others; never stop."""
    time.sleep(pause_s)
    return False


def _unpaused(pause_s: float) -> bool:  # noqa: ARG001 - as a service's
    return False


class Retention:
    """The retention of one writer's store. The caller holds the writer lock.

    Parameters
    ----------
    writer : LogWriter
    half_progress : callable
        From which half message and which op message on somebody has to look (`OpenHalves.progress`).
    delivered : callable
        Up to where delayed messages were delivered (`Delivery.saved`).
    """

    def __init__(self, writer: LogWriter, half_progress: HalfProgress, delivered: DeliveryProgress) -> None:
        self.writer = writer
        self._half_progress = half_progress
        self._delivered = delivered
        writer.look_at_disk = self.look_at_disk
        self._unbroken = writer.unbroken("a deletion was interrupted")
        """After an interrupt within a deletion, only the next opening of the store finds out what is left."""
        self._one_run = threading.RLock()  # a signal handler may begin one within another
        """One run at a time: another one would delete the files that this one has listed."""
        self._checked_s: float | None = None
        self._corrected_s = time.monotonic()
        self._told = ""

    # ---- by itself

    def run_if_due(self, *, limit_s: float | None = None, stopping: Stopping = _paused) -> ExpiredFiles | None:
        """Delete what has expired, if `cleanResourceInterval` has passed since the last look; None if it has not.

        Parameters
        ----------
        limit_s : float | None
            No further file is deleted after this time; the next run continues.
        stopping : callable
            Pauses for the given time; whether the run has to stop.
        """
        config, now_s = self.writer.files.config, time.monotonic()
        if not config.retention_enabled:
            return None
        if self._checked_s is not None and now_s < self._checked_s + config.clean_resource_interval / 1000:
            return None
        self._checked_s = now_s
        forced = now_s >= self._corrected_s + config.correct_logic_min_offset_force_interval / 1000
        deleted = self.run(self._due(config), limit_s=limit_s, stopping=stopping, correct=forced)
        if forced:
            self._corrected_s = now_s
        return deleted

    def _due(self, config: StoreConfig) -> Expiry:
        """What a broker that was always running would have deleted by now."""
        files = self.writer.files
        now_ms = files.disk.time_ns() // 1_000_000
        percent = self.look_at_disk()
        expiry = Expiry(most=config.delete_file_batch_max)
        if percent > min(config.forced_percent, config.warning_percent) and config.clean_file_forcibly_enable:
            return replace(expiry, at_once=True)
        until_ms = now_ms if percent > config.max_used_percent else last_delete_time_ms(config, now_ms)
        return replace(expiry, modified_ms=until_ms - config.file_reserved_time * _HOUR_MS)

    def look_at_disk(self) -> int:
        """How full the disk is, in percent; above the warning level, the writer refuses further writes."""
        files, config = self.writer.files, self.writer.files.config
        folders = [path for path in (files.paths.commit_log, files.paths.consume_queue) if files.disk.exists(path)]
        percent = max((files.disk.used_percent(path) for path in folders), default=0)
        full = config.retention_enabled and percent > config.warning_percent
        if full != (self.writer.disk_used_percent is not None):
            state = "no more is written" if full else "writes are accepted again"
            _log.warning("%s: the disk is %d %% full, so %s", files.paths.root, percent, state)
        self.writer.disk_used_percent = percent if full else None
        return percent

    # ---- a run

    def run(
        self,
        expiry: Expiry,
        *,
        limit_s: float | None = None,
        stopping: Stopping = _paused,
        correct: bool = True,
    ) -> ExpiredFiles:
        """Delete segments, and the queue and index files that lead only to them.

        Parameters
        ----------
        expiry : Expiry
        limit_s : float | None
        stopping : callable
        correct : bool
            Examine the queues' files even if no segment is deleted now.

        Raises
        ------
        ConfigError
            A topic is compacted.
        CorruptionError
            What must be read before anything is deleted is damaged.
        StorePoisonedError
            A sync failed.
        """
        with self._one_run:
            return self._run(expiry, _Clock(limit_s, stopping), correct=correct)

    def _run(self, expiry: Expiry, clock: _Clock, *, correct: bool) -> ExpiredFiles:
        writer = self.writer
        with writer.mutex:
            writer.check_turn()
            writer.check_usable()
            writer.check_locks()
            refuse_compaction(writer.files)
            if writer.files.config.retention_enabled:
                self.look_at_disk()
            expired = self._expired(expiry)

        # What the BATCH records say must be on the disk again before their segments go.
        restated: list[tuple[str, int]] = []
        if expired.offsets:
            expired, restated = self._restate(expired)
        deleted, size = self._delete_segments(expired, clock)
        self._tell_unread(expired.unread if deleted else ())

        # After the log: a unit below its begin is never followed, but a record without a unit would be damage.
        queue_files = index_files = 0
        if (deleted or correct) and writer.log.min_offset:
            queue_files = self._delete_queue_files(clock)
            self._delete_extensions(clock)
            index_files = self._delete_index_files()

        return ExpiredFiles(
            segments=tuple(deleted),
            size=size,
            queue_file_count=queue_files,
            index_file_count=index_files,
            min_offset=writer.log.min_offset,
            kept=expired.kept if len(deleted) == len(expired.offsets) else "the time for this run was over",
            restated=tuple(restated),
            unread_groups=tuple(group.group for group in expired.unread) if deleted else (),
        )

    def _expired(self, expiry: Expiry) -> ExpiredSegments:
        """What may be deleted. The clean end moves first if segments lie above it. Call under the mutex."""
        writer = self.writer
        writer.finish()
        try:
            settle_progress(writer)  # the BATCH record that carries it may be deleted
        except (CorruptionError, StoreLockedError, OSError) as error:
            if not expiry.at_once:
                raise
            expiry = replace(expiry, pending_progress=first_pending(writer))
            _log.warning(
                "%s: the disk is nearly full, and progress of batches cannot be written down: %s",
                writer.files.paths.root,
                error,
            )
        if writer.log.segment_of(max(writer.state.clean_end, writer.log.min_offset)) < writer.log.segment_of(
            writer.end.physical_offset
        ):
            with contextlib.suppress(StoreFullError):  # what lies below the clean end can be deleted, which makes room
                writer.clean_end.move()
        return expired_segments(writer.files, writer.state, expiry, self._saved_half_progress, self._delivered)

    def _saved_half_progress(self) -> tuple[int, int]:
        """The progress, saved: op messages below it may be deleted, and must not be looked for any more."""
        place = self._half_progress()
        try:
            save_half_progress(self.writer, place)
        except (StoreFullError, StoreLockedError, OSError) as error:
            _log.warning(
                "%s: the progress of half messages could not be saved, so all of them stay unless the disk is nearly "
                "full: %s",
                self.writer.files.paths.root,
                error,
            )
            return 0, 0
        return place

    def _restate(self, expired: ExpiredSegments) -> tuple[ExpiredSegments, list[tuple[str, int]]]:
        """Write down again what deleted BATCH records say, and sync it.

        If the disk has no room for that, only the segments below the first such record are deleted, which makes room.
        """
        writer, size = self.writer, self.writer.log.segment_size
        with writer.mutex:
            try:
                restated = restate_batches(writer, expired.offsets[-1] + size)
                if restated:
                    writer.clean_end.move()
                return expired, restated
            except StoreFullError as error:
                places = [entry.physical_offset for _, entry in newest_batches(writer.journal)]
                first = min((place for place in places if place >= writer.log.min_offset), default=0)
                offsets = tuple(start for start in expired.offsets if start + size <= first)
                if not offsets:
                    raise
                kept = f"the disk has no room for the BATCH records that must be written again first ({error})"
                return replace(expired, offsets=offsets, kept=kept), []

    def _delete_segments(self, expired: ExpiredSegments, clock: _Clock) -> tuple[list[str], int]:
        """Delete segments, the oldest first, each durably before the next one; returns their paths and size."""
        writer, log = self.writer, self.writer.log
        deleted: list[str] = []

        # One synced name at a time: if two were unsynced, a power cut could leave a gap, and no store opens with one.
        for start in expired.offsets:
            if clock.stops(writer.files.config.delete_commit_log_files_interval if deleted else 0):
                break

            path = log.path(start)
            with self._unbroken:
                with writer.mutex:
                    writer.check_turn()
                    writer.check_usable()
                    writer.check_locks()
                    log.forget_below(start + log.segment_size)
                self._unlink(path)
            deleted.append(path)
        return deleted, len(deleted) * log.segment_size

    def _unlink(self, path: str) -> None:
        """Delete a file, and make that durable.

        Raises
        ------
        StorePoisonedError
            The folder could not be synced, so the file may come back, between others that are gone.
        """
        disk, writer = self.writer.files.disk, self.writer
        writer.files.pool.forget(path)
        try:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(path)
        except OSError:
            with writer.mutex:
                writer.log.load()
                writer.files.forget_queues()
            raise

        try:
            disk.fsync_dir(os.path.dirname(path))
        except FileNotFoundError:
            return  # another thread has deleted the topic
        except OSError as error:
            raise writer.poison(f"{path}: its deletion could not be synced ({error})") from error

    def _delete_queue_files(self, clock: _Clock) -> int:
        """Delete the first files of queues that lead only to deleted messages; the last file of a queue stays.

        The last file with a unit that is on the disk says which number the queue's next message gets, also if no
        message is left.
        """
        writer, files = self.writer, self.writer.files
        begin, count = writer.log.min_offset, 0

        pool = FilePool(files.disk, _POOL_SIZE)
        try:
            for topic, queue_ids in list_queues(files.disk, files.paths.root)[0].items():
                for queue_id in queue_ids:
                    directory = queue_directory(files.paths.root, topic, queue_id)
                    if len(files.disk.names(directory)) <= 1:
                        continue
                    if clock.stops():
                        return count

                    queue = ConsumeQueue(
                        directory, files.config.mapped_file_size_consume_queue, pool, files.paths.spark
                    )
                    queue.load()

                    gone = self._without_next_number(queue, queue.offsets[: queue.count_below(begin)])
                    for start in gone:
                        with self._unbroken:
                            with writer.mutex:
                                writer.check_turn()
                                writer.check_usable()
                                files.forget_queue_files(topic, queue_id, start + queue.file_size)
                            self._unlink(queue.path(start))

                    count += len(gone)
                    if gone and clock.stops(files.config.delete_consume_queue_files_interval):
                        return count
        finally:
            pool.clear()
        return count

    def _without_next_number(self, queue: ConsumeQueue, starts: list[int]) -> list[int]:
        """The first files of a queue without the last of them if a power cut might take every unit of the next file.

        Recovery removes a file without units, and the queue would then have lost its next number.
        """
        if not starts:
            return starts
        units = queue.read((starts[-1] + queue.file_size) // UNIT.size, 1)
        end = int(units["physical_offset"][0]) + int(units["size"][0]) if len(units) else 0
        return starts if 0 < end <= self.writer.state.clean_end else starts[:-1]

    def _delete_extensions(self, clock: _Clock) -> None:
        """Delete the first files in a broker's `consumequeue_ext`, below the place that a queue's first unit names.

        As in RocketMQ, nothing is deleted if that unit names none, as a unit of this project.
        """
        files, begin = self.writer.files, self.writer.log.min_offset
        top = os.path.join(files.paths.root, _EXTENSION_FOLDER)
        if not files.disk.exists(top):
            return

        for topic, queue_ids in list_queues(files.disk, files.paths.root)[0].items():
            for queue_id in queue_ids:
                directory = os.path.join(top, topic, str(queue_id))
                if not files.disk.is_folder(directory):
                    continue

                with self.writer.mutex:
                    self.writer.check_turn()
                    self.writer.check_usable()
                    queue = files.queue(topic, queue_id)
                    units = queue.read(queue.search_physical(begin), 1)
                if not len(units) or int(units["tags_code"][0]) >= LEAST_TAGS_CODE:
                    continue

                place = int(units["tags_code"][0]) + (1 << 63)
                for name in sorted(filter(FILE_NAME.fullmatch, files.disk.names(directory))):
                    path = os.path.join(directory, name)
                    if int(name) + files.disk.size(path) >= place or clock.stops():
                        break
                    self._unlink(path)

    def _delete_index_files(self) -> int:
        writer, index = self.writer, self.writer.files.index
        if index is None:
            return 0
        with writer.mutex:
            writer.check_turn()
            writer.check_usable()
            gone = index.forget_below(writer.log.min_offset)
        for path in gone:
            self._unlink(path)
        return len(gone)

    def _tell_unread(self, unread: tuple[Needed, ...]) -> None:
        for group in unread:
            _log.warning(
                "%s: segments were deleted although %s, because the disk is nearly full or at_once was given",
                self.writer.files.paths.root,
                group.words,
            )

    def run_after_append(self, limit_s: float) -> None:
        """Run retention that is due after something was appended. A failure does not undo that, and is only logged."""
        try:
            self.run_if_due(limit_s=limit_s, stopping=_unpaused)  # nobody else appends meanwhile
            self._told = ""
        except (StoreError, OSError) as error:
            if str(error) != self._told:  # once for each reason
                self._told = str(error)
                _log.warning("%s: retention could not run: %s", self.writer.files.paths.root, error)
