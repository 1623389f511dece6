"""Proof that the log of a store was longer than it is.

A log that lost its last segment, or whose last records became zeros, looks like a shorter log. `spark/state` reveals
the loss. This module finds what else reveals it if `state` is lost as well, or is older than the log:

- `spark/journal` says where the log ended when a writer of this project moved the clean end last;
- the store checkpoint names the place of the last record, and the store time up to which the log was synced;
- ConsumeQueue units point to records that are not there. A writer of this project leaves no such unit in a store that
  it closes. A broker that crashed does, so in a broker's store a unit counts only when the store checkpoint says that
  something later than the last record was synced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from messagestore.errors import CorruptionError
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.commit_log import CommitLog
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.queue_proof import proven_queue_end
from messagestore.log.store_files import StoreFiles


@dataclass(frozen=True, slots=True)
class LostEnd:
    """What is missing behind a log's end.

    Parameters
    ----------
    end : int
        Physical offset where the log ends now.
    known_end : int
        The log reached at least this far.
    proof : str
        What says so.
    message_count, queue_count : int
        Units that point behind `end`, and in how many queues.
    """

    end: int
    known_end: int
    proof: str
    message_count: int
    queue_count: int

    @property
    def words(self) -> str:
        """What is missing, for a sentence."""
        messages = f"{self.message_count} message" + ("" if self.message_count == 1 else "s")
        queues = f"{self.queue_count} queue" + ("" if self.queue_count == 1 else "s")
        return f"at least {self.known_end - self.end} bytes from {self.end} on, with {messages} of {queues}"

    def error(self, log: CommitLog) -> CorruptionError:
        """The error that refuses the store."""
        gone = self.known_end > log.files.max_offset  # whole segments are
        path = log.files.path(log.files.max_offset if gone else log.segment_of(self.end))
        return CorruptionError(
            path,
            self.end,
            f"{'segments' if gone else 'records'} up to {self.known_end} at least ({self.proof})",
            f"the end of the log; missing are {self.words}",
            hint=f"Nothing was changed. Restore {os.path.basename(path)} and the segments behind it from a copy. To go "
            "on without these messages, run `messagestore recover --accept-loss`: new messages get their numbers.",
        )


def lost_end(
    files: StoreFiles, end: int, last_timestamp_ms: int, journal: BatchJournal, *, ours: bool | None, closed: bool
) -> LostEnd | None:
    """What proves that records lay behind `end`; None when nothing does.

    Parameters
    ----------
    files : StoreFiles
    end, last_timestamp_ms : int
        Where the log ends, by its records, and the store time of the last of them.
    journal : BatchJournal
        As the file has it.
    ours : bool | None
        Whether this project wrote last; None: not known, since the journal or the store checkpoint is lost.
    closed : bool
        There was no `abort`: nothing was being written.
    """
    checkpoint = store_checkpoint.read(files.disk, files.paths.checkpoint)
    last = checkpoint.confirm_physical_offset
    known_end, proof = 0, ""
    if ours is not False:
        # In a broker's store with replication the offset in the checkpoint may be the log's end itself.
        if last > end or (ours and 0 < last == end):
            known_end, proof = last + 1, f"the checkpoint names a record at {last}"
        if journal.end > max(end, known_end):
            known_end, proof = journal.end, f"spark/journal says that the log was synced up to {journal.end}"
    if not closed:
        return LostEnd(end, known_end, proof, 0, 0) if proof else None
    message_count, queue_count, units_end = units_behind(files, end)
    if message_count and not proof:
        later = checkpoint.physic_timestamp_ms > last_timestamp_ms
        unsaid = not files.disk.exists(files.paths.checkpoint)
        # Where the journal is of this very end, a unit that points behind it is damaged.
        if (ours and journal.end != end) or later or (ours is None and (unsaid or 0 < last == end)):
            proof = "units of ConsumeQueues point to them, and the store was closed"
    if not proof:
        return None
    return LostEnd(end, max(known_end, units_end), proof, message_count, queue_count)


def units_behind(files: StoreFiles, end: int) -> tuple[int, int, int]:
    """How many units point to records that end above a physical offset, of how many queues, and where the last of these
    records ends.
    """
    message_count = queue_count = furthest = 0
    for topic, queue_ids in files.queue_names().items():
        for queue_id in queue_ids:
            queue = files.queue(topic, queue_id)
            stop = queue.end()
            count = stop - queue.end(hint=stop, limit=end)
            if count <= 0:
                continue
            unit = queue.read(stop - 1, 1)[0]
            message_count, queue_count = message_count + count, queue_count + 1
            furthest = max(furthest, int(unit["physical_offset"]) + int(unit["size"]))
    return message_count, queue_count, furthest


class LastRecord(NamedTuple):
    """Where the log ends behind a record, and that record (`size` 0: there is none)."""

    physical_offset: int
    position: int
    size: int
    store_timestamp_ms: int


def end_of_queues(files: StoreFiles) -> LastRecord:
    """Behind the last record that a unit of any queue points to."""
    log, last_position, last_size = files.commit_log, 0, 0
    for topic, queue_ids in files.queue_names().items():
        for queue_id in queue_ids:
            end = proven_queue_end(files, topic, queue_id, log.files.max_offset, crc=False)
            if end:
                unit = files.queue(topic, queue_id).read(end - 1, 1)[0]
                if int(unit["physical_offset"]) >= max(last_position, log.min_offset):
                    last_position, last_size = int(unit["physical_offset"]), int(unit["size"])
    head = log.head(last_position) if last_size else None
    if head is None:
        return LastRecord(log.min_offset, 0, 0, 0)
    return LastRecord(last_position + last_size, last_position, last_size, int(head["store_timestamp_ms"]))
