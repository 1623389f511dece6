"""The walk over the records of the log: which of them count, and where the log ends.

The walk goes from a start point to the first bytes that do not count. As in RocketMQ's own recovery, a record counts
if its framing, its position and its CRCs agree (`record_scan.scan`); its queue offset and its store time do not matter.
A BATCH record counts if the CRCs of all its data match. In a part of the log that only this project wrote, two more
signs reveal a torn record: its last byte, and a topic to which nobody can put messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from messagestore.errors import ChecksumError, CorruptionError
from messagestore.format import record_scan
from messagestore.format.config import SYNC_FLUSH
from messagestore.format.message import BATCH_TOPIC, stored_topic_fault
from messagestore.format.record_scan import ScanEnd
from messagestore.format.rows import Rows
from messagestore.log.batch_search import bad_chunk, is_sealed_batch, read_batch
from messagestore.log.dispatch import QueueRuns
from messagestore.log.log_end import LogEnd
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Run, Walk, rows_of, whole_rows
from messagestore.recovery.trust import Trust

_KEPT_RECORDS = 1_000_000  # about 50 bytes each
_DAMAGED = ("body_crc", "property_crc", "length", "position", "torn")


@dataclass
class Survey:
    """What the walk found.

    Parameters
    ----------
    start : int
        The physical offset at which the walk began.
    end : LogEnd
        Where the log ends according to the walk.
    queues : QueueRuns
        The queue offsets of the records.
    stop : ScanEnd
        Why the walk stopped there.
    in_batch : bool
        The walk stopped at a BATCH record whose data do not match their CRCs (ASYNC_FLUSH). A replay contains these
        bytes.
    record_count : int
        The number of records that count.
    kept : list of Rows
        The records from `start` to `kept_end`: all that count, or the first 1,000,000. They are not decoded again when
        they are dispatched after the survey.
    kept_end : int
        The physical offset at which `kept` ends.
    """

    start: int
    end: LogEnd
    queues: QueueRuns
    stop: ScanEnd = field(default_factory=lambda: ScanEnd("end", 0, "", ""))
    in_batch: bool = False
    record_count: int = 0
    kept: list[Rows] = field(default_factory=list)
    kept_end: int = field(init=False)

    def __post_init__(self) -> None:
        self.kept_end = self.start


class Surveyor:
    """Finds out which records of one store's log count.

    Parameters
    ----------
    files : StoreFiles
    before : LogEnd
        Where to start, and the last record before that.
    queues : QueueRuns
        The object that collects the records' queue offsets.
    trust : Trust
        What may be trusted.
    """

    def __init__(
        self,
        files: StoreFiles,
        before: LogEnd,
        queues: QueueRuns,
        trust: Trust,
    ) -> None:
        self.files = files
        self.log = files.commit_log
        self.trust = trust
        self.survey = Survey(before.physical_offset, before, queues)
        self._batches_end = 0

    def run(self) -> Survey:
        """Walk over the records up to the end."""
        survey, log = self.survey, self.log
        depth = Depth.CHECKSUMS if self.files.config.check_crc_on_recover else Depth.FRAMING
        records = Walk(log, survey.start, depth=depth)
        for run in records:
            if not self._take(run):
                return survey
        survey.stop = records.stop
        survey.end = survey.end._replace(physical_offset=max(records.position, survey.end.physical_offset))
        self._check_sealed_batch(survey.end.physical_offset)
        return survey

    def _take(self, run: Run) -> bool:
        """Take in the records of a run that count; False if one of them does not count."""
        survey, rows = self.survey, rows_of(run)
        count = self._check_batches(rows, self._whole(run, rows))

        all_count = count == rows.row_count
        if not all_count:
            torn = int(rows.physical_offsets[count])
            rows = rows.slice(0, count)

        survey.queues.take(rows)
        if count:
            end, last, size = rows.end, int(rows.physical_offsets[-1]), int(rows.sizes[-1])
            survey.end = LogEnd(end, last, size, int(rows.store_timestamps_ms[-1]))
            survey.record_count += count
            if survey.record_count <= _KEPT_RECORDS and survey.kept_end == rows.physical_offset:
                survey.kept.append(rows)
                survey.kept_end = end

        if all_count:
            return True
        survey.end = survey.end._replace(physical_offset=torn)
        if not survey.in_batch:
            survey.stop = ScanEnd("torn", 0, "a record", "a part of one")
            self._check_sealed_batch(torn)
        return False

    def _whole(self, run: Run, rows: Rows) -> int:
        """How many records of a run, from its first on, are whole behind the body, where no CRC covers them.

        In a part of the log that only this project wrote, `whole_rows` tells. In a broker's part only the very last
        record may be torn, and only if the name of its topic shows that (`_torn_in_topic`).

        Raises
        ------
        CorruptionError
            A record in a broker's part of the log has any other topic that cannot have a queue.
        """
        if self.trust.own:
            return record_scan.leading(whole_rows(run, rows))

        bad_runs = np.array(
            [stored_topic_fault(topic) is not None or queue_id < 0 for topic, queue_id, _, _ in rows.runs()], np.bool_
        )
        bad = np.repeat(bad_runs, rows.run_counts)

        if bad.any():
            row, number = int(bad.argmax()), int(bad_runs.argmax())
            if self._torn_in_topic(run, row):
                return row
            at = int(rows.physical_offsets[row])
            place_of_record = f"topic {rows.run_topics[number][:80]!r}, queue {int(rows.run_queue_ids[number])}"
            path = self.log.path_of(at)
            raise CorruptionError(path, at, "a topic and a queue id that can have a queue", place_of_record)
        return record_scan.leading(~bad)

    def _torn_in_topic(self, run: Run, row: int) -> bool:
        """Whether a broker's crash tore a record inside the name of its topic.

        A record without properties ends with its topic's name and two zero bytes. If a power cut loses the end of the
        name, all lengths still add up. The record is torn if only zeros follow the beginning of the name, up to the end
        of the log: no folder can have such a name, so no queue can have had the record, and RocketMQ cannot continue
        after it.
        """
        if not self.trust.last_record_may_be_torn or row < len(run.starts) - 1:
            return False
        _, where = record_scan.parts(run.data, run.starts[row:], run.heads[row:])
        name = run.data[int(where.topic_starts[0]) : int(where.topic_ends[0])]
        zeros = np.flatnonzero(name == 0)
        if not len(zeros) or run.data[int(where.topic_starts[0] + zeros[0]) : int(where.ends[0])].any():
            return False
        return not self.log.nonzero_ranges(run.physical_offset + int(where.ends[0]))

    def _check_batches(self, rows: Rows, count: int) -> int:
        """The number of rows before the first BATCH record whose data do not match their CRCs, at most `count`."""
        for row in rows.of_topic(BATCH_TOPIC):
            if row < count and not self._batch_holds(int(rows.physical_offsets[row])):
                self.survey.in_batch = True
                self.survey.stop = ScanEnd("batch", 0, "the data of the BATCH record", "other bytes")
                return row
        return count

    def _batch_holds(self, physical_offset: int) -> bool:
        """Whether all data of a BATCH record are in the log.

        Raises
        ------
        CorruptionError
            Data are missing although they were synced before the record was sealed, or the record is another store's.
        """
        if physical_offset < self._batches_end:
            return True  # within the data of a batch: a client sent it to this topic, and it is no BATCH record of ours
        batch = read_batch(self.log, physical_offset)
        path = self.log.path_of(physical_offset)
        if batch is None and self.trust.seals_prove:
            raise CorruptionError(path, physical_offset, "a BATCH record that can be read", "one that cannot")
        if batch is None:
            return self.trust.partial_batches_stay  # torn, and a broker does not check its `__CRC32#`
        if batch.store_id not in self.files.known_ids:
            raise CorruptionError(
                path,
                physical_offset,
                f"a BATCH record of store {self.files.store_id}",
                f"one of store {batch.store_id} (a copied segment?)",
            )
        bad = bad_chunk(self.log, batch)
        if bad is None:
            self._batches_end = batch.end
            return True
        if batch.flush_disk_type == SYNC_FLUSH:
            raise ChecksumError(
                self.log.path_of(bad),
                bad,
                f"the data of the batch at {physical_offset} (CRC-32)",
                "other bytes",
            )
        return self.trust.partial_batches_stay

    def _check_sealed_batch(self, physical_offset: int) -> None:
        """Raise `ChecksumError` if the walk stopped at a BATCH record that was sealed and is damaged.

        Where only SYNC_FLUSH wrote, such a record is not a torn tail.
        """
        if (
            self.trust.seals_prove
            and self.survey.stop.reason in _DAMAGED
            and is_sealed_batch(self.log, physical_offset)
        ):
            path = self.log.path_of(physical_offset)
            raise ChecksumError(
                path, physical_offset, f"a BATCH record ({self.survey.stop.expected})", self.survey.stop.found
            )
