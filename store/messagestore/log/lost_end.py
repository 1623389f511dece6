"""Proves that the log of a store was once longer than it is now.

A log that lost its last segment, or whose last records became zeros, looks like a shorter log. `spark/state` reveals
the loss. If `state` is lost as well, or is older than the log, this module looks for other evidence:

- `spark/journal` says where the log ended when a writer of this project last moved the clean end;
- the store checkpoint contains the place of the last record, and the store time up to which the log was synced;
- ConsumeQueue units point to records that are missing. A writer of this project leaves no such unit in a store that
  it closes, but a broker that crashed does. In a broker's store, such a unit therefore counts only if the store
  checkpoint says that something later than the last record was synced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from messagestore.errors import CorruptionError
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.commit_log import CommitLog
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.condition import Condition, Writer
from messagestore.log.log_end import LogEnd
from messagestore.log.queue_proof import proven_queue_end
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import leads_to


@dataclass(frozen=True, slots=True)
class LostEnd:
    """Describes what is missing after a log's end.

    Parameters
    ----------
    path : str
        The segment that is missing, or that ends too early.
    are_segments : bool
        Whole segments are missing.
    end : int
        Physical offset at which the log ends now.
    known_end : int
        The log once reached at least this far.
    proof : str
        The evidence for that.
    message_count, queue_count : int
        Number of units whose record ends after `end`, and the number of queues that hold them.
    """

    path: str
    are_segments: bool
    end: int
    known_end: int
    proof: str
    message_count: int
    queue_count: int

    @classmethod
    def of(
        cls, log: CommitLog, end: int, known_end: int, proof: str, message_count: int = 0, queue_count: int = 0
    ) -> LostEnd:
        """What is missing after `end`: whole segments, or the rest of one."""
        gone = known_end > log.max_offset
        path = log.path(log.max_offset if gone else log.segment_of(end))
        return cls(path, gone, end, known_end, proof, message_count, queue_count)

    @property
    def words(self) -> str:
        """Return a phrase that says what is missing."""
        lost = f"at least {self.known_end - self.end} bytes from {self.end} on"
        if not self.message_count:
            return f"{lost} (no ConsumeQueue says how many messages were in them)"

        messages = f"{self.message_count} message" + ("" if self.message_count == 1 else "s")
        queues = f"{self.queue_count} queue" + ("" if self.queue_count == 1 else "s")
        return f"{lost}, with {messages} of {queues}"

    @property
    def summary(self) -> str:
        """Return what is missing, and the proof."""
        return f"{self.words} ({self.proof})"

    def error(self) -> CorruptionError:
        """Return the error that refuses the store."""
        return CorruptionError(
            self.path,
            self.end,
            f"{'segments' if self.are_segments else 'records'} up to {self.known_end} at least ({self.proof})",
            f"the end of the log; missing are {self.words}",
            hint=f"Nothing was changed. Restore {os.path.basename(self.path)} and the segments behind it from a copy. "
            "To continue without these messages, run `messagestore recover --accept-loss`. New messages then get the "
            "numbers of the lost ones.",
        )


def lost_end(
    files: StoreFiles, end: int, last_timestamp_ms: int, journal: BatchJournal, condition: Condition
) -> LostEnd | None:
    """Return the proof that records lay after `end`; None if there is no such proof.

    Parameters
    ----------
    files : StoreFiles
    end, last_timestamp_ms : int
        Where the log ends according to its records, and the store time of the last record.
    journal : BatchJournal
        The journal as it was read from the file.
    condition : Condition
        How the store was left.
    """
    checkpoint = store_checkpoint.read(files.disk, files.paths.checkpoint)
    last = checkpoint.confirm_physical_offset
    ours = condition.wrote is Writer.OURS

    known_end, proof = 0, ""
    if condition.wrote is not Writer.BROKER:
        # In a broker's store with replication, the offset in the checkpoint may be the log's end itself.
        if last > end or (ours and 0 < last == end):
            known_end, proof = last + 1, f"the checkpoint names a record at {last}"
        if journal.end > max(end, known_end):
            known_end, proof = journal.end, f"spark/journal says that the log was synced up to {journal.end}"
    if not condition.closed:
        return LostEnd.of(files.commit_log, end, known_end, proof) if proof else None

    message_count, queue_count, units_end = units_behind(files, end)
    if message_count and not proof:
        # If our journal describes exactly this end, a unit that points past it is damaged.
        is_undescribed = ours and journal.end != end
        has_later_times = checkpoint.physic_timestamp_ms > last_timestamp_ms
        # Where nothing shows who wrote, a lost checkpoint, or one that names the place behind the last record, agrees
        # with a log that was longer.
        may_be_longer = not files.disk.exists(files.paths.checkpoint) or 0 < last == end
        if is_undescribed or has_later_times or (condition.wrote is Writer.UNKNOWN and may_be_longer):
            proof = "units of ConsumeQueues point to them, and the store was closed"
    if not proof:
        return None
    return LostEnd.of(files.commit_log, end, max(known_end, units_end), proof, message_count, queue_count)


def units_behind(files: StoreFiles, end: int) -> tuple[int, int, int]:
    """Return how many units of how many queues point to records that end above a physical offset.

    The third number is the place where the last of these records ends.
    """
    message_count = queue_count = furthest = 0
    for key in files.queue_keys():
        queue = files.queue(*key)
        stop = queue.end()
        count = stop - queue.end(hint=stop, limit=end)
        if count <= 0:
            continue

        unit = queue.read(stop - 1, 1)[0]
        message_count, queue_count = message_count + count, queue_count + 1
        furthest = max(furthest, int(unit["physical_offset"]) + int(unit["size"]))
    return message_count, queue_count, furthest


def lost_segments(log: CommitLog, proven: str) -> CorruptionError:
    """Return the error for a log that ends before a place that it had reached; `proven` names the place and the proof.

    It is for readers, who need not know how much is missing.
    """
    return CorruptionError(
        log.path(log.max_offset),
        log.max_offset,
        f"segments up to {proven}",
        f"none from {log.max_offset} on" if log.offsets else "units, but no segments",
        hint=f"If the log is in several folders (storePathCommitLog), or this is a copy of a part of the store, bring "
        f"all segments together in {log.directory}. If a broker or its disk crashed, let the broker start. If the "
        "segments are lost, `messagestore recover` says what was in them.",
    )


def end_of_queues(files: StoreFiles) -> LogEnd:
    """Return the place after the last record to which a unit of any queue points.

    A record whose end is lost with the end of the log, as in a truncated copy, does not count.
    """
    log, limit = files.commit_log, files.commit_log.max_offset
    while True:
        position, size = _last_record(files, limit)
        head = log.head(position) if size else None
        if head is None:
            return LogEnd(log.min_offset, 0, 0, 0)
        if not _is_cut(log, position, size):
            return LogEnd(position + size, position, size, int(head["store_timestamp_ms"]))
        limit = position


def _last_record(files: StoreFiles, limit: int) -> tuple[int, int]:
    """Where the last record that ends at or below `limit` and has a unit is, and its size; (0, 0): there is none."""
    last_position, last_size = 0, 0
    for key in files.queue_keys():
        end = proven_queue_end(files, *key, limit, crc=False)
        units = files.queue(*key).read(end - 1, 1)
        if len(units) and int(units["physical_offset"][0]) >= max(last_position, files.commit_log.min_offset):
            last_position, last_size = int(units["physical_offset"][0]), int(units["size"][0])
    return last_position, last_size


def _is_cut(log: CommitLog, position: int, size: int) -> bool:
    """Whether a record ends in zeros with which its lengths do not add up. One with other bytes there is damaged."""
    end = position + size
    return not any(log.read(end - 1, 1)) and not leads_to(log, position, end)
