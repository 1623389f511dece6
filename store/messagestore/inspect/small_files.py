"""Checks a store's small files against its log.

At the start of a check, the condition of the store decides how far the log must be complete (`log.condition`).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from messagestore.errors import CorruptionError
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.broker_name import read_broker_name
from messagestore.files.checkpoint import StoreCheckpoint
from messagestore.files.recoveries import read_recoveries
from messagestore.files.state import NOTHING_IN_FLIGHT, State
from messagestore.files.store_settings import read_settings
from messagestore.format import record
from messagestore.format.layout import CHECKPOINT, CHECKPOINT_SIZE, STATE_FILE_SIZE
from messagestore.inspect.report import VerifyReport
from messagestore.log.batch_journal import MISSING, BatchJournal
from messagestore.log.batch_search import read_batch
from messagestore.log.condition import Checked, Condition, Left, Traces, look
from messagestore.log.log_end import Anchor
from messagestore.log.queue_proof import proven_queue_end
from messagestore.log.sealed_ends import SealedEnds
from messagestore.log.store_files import StoreFiles
from messagestore.writer.put_times import read_put_times

_KNOWN_NAMES = {
    "commitlog", "consumequeue", "index", "config", "abort", "abort.bak", "checkpoint", "lock", "spark",
    "batchconsumequeue", "consumequeue_ext", "compaction", "timerwheel", "timerlog", "timercheck",
    "epochFileCheckpoint", "brokerIdentity", "lost+found",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rules:
    """What must hold, by how the store was left when the check began.

    Parameters
    ----------
    traces : Traces
    limit : int
        Everything below it must be complete.
    at_rest : bool
        False: leave out the checks that need a store to which nobody begins to write.
    zeros_behind : bool
        The log and the queues must contain only zeros after the limit.
    """

    traces: Traces
    limit: int
    at_rest: bool
    zeros_behind: bool = False

    @property
    def condition(self) -> Condition:
        """What follows from how the store was left."""
        return self.traces.condition

    @property
    def state(self) -> State | None:
        """What `state` said."""
        return self.traces.state

    @property
    def all_units(self) -> bool:
        """There are no units of records above the limit."""
        return self.condition.all_units and self.at_rest

    def hold(self, files: StoreFiles) -> bool:
        """Whether nobody has begun to write since then.

        Otherwise, findings may be what the writer was about to change.
        """
        if files.read_abort() != self.traces.abort:
            return False
        return not self.all_units or files.state_file.read() == self.state


def rules_of(files: StoreFiles, report: VerifyReport, *, at_rest: bool) -> Rules:
    """Determine the rules that hold now.

    Parameters
    ----------
    files : StoreFiles
        Its log is loaded.
    report : VerifyReport
    at_rest : bool
        False: leave out the checks that need a store to which nobody begins to write.
    """
    traces = look(files)
    condition, state = traces.condition, traces.state
    _note_left(traces, report, files)
    if state is not None and condition.checked is Checked.TO_C:
        return Rules(traces, state.clean_end, at_rest)
    if state is not None and condition.checked is Checked.TO_V:
        return Rules(traces, state.visible_end, at_rest, zeros_behind=condition.all_units and at_rest)

    proven = condition.checked is Checked.TO_PROVEN
    end = _shown_end(files, proven=proven)
    if proven or state is None:
        return Rules(traces, end, at_rest)
    end = max(end, state.clean_end)
    return Rules(traces, end, at_rest, zeros_behind=state.closed and state.clean_end == end and at_rest)


def _note_left(traces: Traces, report: VerifyReport, files: StoreFiles) -> None:
    """Report how a store was left that nobody has closed, and what is therefore not checked."""
    left, state = traces.left, traces.state
    if left is Left.UNREADABLE:
        report.find(files.paths.state, 0, "a valid slot", "none")
    if left is Left.BROKER:
        report.note("a broker is at work, or was killed; records to which no unit points were not checked")

    if state is None or not traces.condition.ours_open:
        return
    if state.poisoned:
        report.note("a sync failed in the process that wrote last. Run `messagestore recover`")

    if left is Left.RESTARTED:
        report.note(
            f"the machine was restarted after the last write, so only what is known to be on the disk, below "
            f"{state.clean_end}, was checked. Run `messagestore recover`"
        )
    elif not traces.condition.all_units:
        report.note(f"a writer is at work, or was killed; what lies behind {state.visible_end} was not checked")


def _shown_end(files: StoreFiles, *, proven: bool) -> int:
    """Return the end of the last record that a unit of any queue points to, and that exists if it must be proven."""
    log = files.commit_log
    shown = log.min_offset
    for key in files.queue_keys():
        try:
            queue = files.queue(*key)
            end = queue.end(limit=log.max_offset)
            if proven:
                end = proven_queue_end(files, *key, log.max_offset, end)
            unit = queue.read(end - 1, 1)
        except CorruptionError:
            continue  # the check of the queues reports it
        if len(unit) and log.min_offset <= int(unit["physical_offset"][0]) < log.max_offset:
            shown = max(shown, int(unit["physical_offset"][0]) + int(unit["size"][0]))
    return shown


class SmallFiles:
    """Checks the journal, the store checkpoint, `state`, and names.

    It is created before the rules are determined: what it reads was published earlier, so the log below the limit must
    contain it.
    """

    def __init__(self, files: StoreFiles, report: VerifyReport) -> None:
        self.files = files
        self.report = report
        self.checkpoint: StoreCheckpoint = store_checkpoint.read(files.disk, files.paths.checkpoint)
        self.journal = self._read_journal()

    def _read_journal(self) -> BatchJournal:
        """Return the journal. A damaged one is a fault, although a writer rebuilds it."""
        paths = self.files.paths
        journal = BatchJournal.read(self.files.disk, paths.journal)
        if journal.fault and journal.fault != MISSING:
            self.report.find(paths.journal, 0, "a journal that can be read", journal.fault)
        other = journal.identity.get("storeId", self.files.store_id)
        if self.files.store_id and other != self.files.store_id:
            self.report.find(paths.journal, 0, f"the journal of store {self.files.store_id}", f"that of store {other}")
        return journal

    def had_queue(self, topic: str, queue_id: int) -> bool | None:
        """Whether a queue had messages at the end of the last Python writer; None: unknown, as after a broker."""
        if not self.unchanged or self.journal.queues is None:
            return None
        return self.journal.had_queue(topic, queue_id) or (topic, queue_id) in self._seals

    @cached_property
    def _seals(self) -> Collection[tuple[str, int]]:
        return SealedEnds.read(self.files.disk, self.files.paths.ends, self.files.commit_log.max_offset).seals

    @property
    def unchanged(self) -> bool:
        """Whether the store checkpoint is the one that a Python writer left."""
        return self.journal.checkpoint_crc == record.crc32(self.checkpoint.to_bytes())

    def _check_identity(self, rules: Rules) -> None:
        """Check that the files that hold the identity of the store are there."""
        files, report = self.files, self.report
        paths, ours = files.paths, files.disk.exists(files.paths.state)
        if not files.store_id:
            if ours or not self.journal.fault:
                report.find(paths.identity, 0, "the store's identity", "no file")
            elif report.batch_count:
                report.note(
                    f"{paths.identity} is missing, so this is a copy of a store, or a store that lost its folder "
                    "spark/. The next writer gives it a new id and takes its batches over"
                )
            return
        if self.journal.fault == MISSING and ours and rules.state is not None and rules.state.clean_end:
            self._note_missing_journal(rules)
        if not ours and rules.condition.ours_open:
            return  # it was reported already
        if not ours and report.batch_count:
            report.find(paths.state, 0, "the store's state", "no file")

    def _note_missing_journal(self, rules: Rules) -> None:
        """Note a missing journal that may be legitimate.

        A writer creates the first journal after the clean end has moved. It may be about to, or was killed before that.
        """
        no_file = "no file. The next writer rebuilds it from the log"
        if rules.condition.ours_open:
            self.report.note(f"{self.files.paths.journal}: {no_file}")
        elif not self.files.disk.exists(self.files.paths.journal):  # the file was read before somebody closed the store
            self.report.find(self.files.paths.journal, 0, "a journal", no_file)

    def check(self, rules: Rules, last_time_ms: int | None) -> None:
        """Compare the files with the log.

        Parameters
        ----------
        rules : Rules
        last_time_ms : int | None
            The highest store time of a record below the limit; None: not all records could be read.
        """
        self._check_identity(rules)
        self._check_journal(rules)
        self._check_state(rules)
        self._check_checkpoint(rules, last_time_ms)
        self._check_names()

        try:
            read_broker_name(self.files.disk, self.files.paths.broker_name)
        except CorruptionError as error:
            self.report.find(error.path, 0, error.expected, error.found)

        try:
            read_settings(self.files.disk, self.files.paths.settings)
        except CorruptionError as error:
            self.report.find(error.path, 0, error.expected, error.found)
        try:
            read_recoveries(self.files.disk, self.files.paths.recoveries)
        except CorruptionError as error:
            self.report.find(error.path, 0, error.expected, error.found)
        try:
            read_put_times(self.files.disk, self.files.paths.put_times)
        except CorruptionError as error:
            self.report.find(error.path, 0, error.expected, error.found)

    def _check_journal(self, rules: Rules) -> None:
        """Check that the batch of each entry is in the log."""
        log, path = self.files.commit_log, self.files.paths.journal
        for app_id, entry in self.journal.newest_first(log.min_offset):
            at = entry.physical_offset
            batch = read_batch(log, at) if at < rules.limit else None
            if batch is None or (batch.app_id, batch.version, batch.digest) != (app_id, entry.version, entry.digest):
                expected = f"version {entry.version} of app {app_id!r} in the log at {at}"
                self.report.find(path, 0, expected, "no batch" if batch is None else "another batch")

    def _check_state(self, rules: Rules) -> None:
        files, report, state = self.files, self.report, rules.state
        path = files.paths.state
        if not files.store_id or not files.disk.exists(path):
            return

        if files.disk.size(path) != STATE_FILE_SIZE:
            report.find(path, 0, f"{STATE_FILE_SIZE} bytes", f"{files.disk.size(path)}")
        if state is None:
            if not rules.condition.ours_open:  # otherwise it was found already
                report.find(path, 0, "a valid slot", "none")
            return

        if state.clean_end > state.visible_end:
            report.find(path, 0, f"a clean end up to {state.visible_end}, the visible end", f"{state.clean_end}")
        if state.in_flight != NOTHING_IN_FLIGHT and state.in_flight < state.visible_end:
            report.find(path, 0, f"bytes in flight from {state.visible_end} on or later", f"{state.in_flight}")
        if state.clean and (state.visible_end, state.in_flight) != (state.clean_end, NOTHING_IN_FLIGHT):
            both_ends = f"{state.visible_end}, in flight {state.in_flight}"
            report.find(path, 0, f"a visible end of {state.clean_end}, because the store was closed", both_ends)

        if state.anchor_size and state.anchor_position >= files.commit_log.min_offset:
            at = state.anchor_position
            log = files.commit_log
            ends = at + state.anchor_size, log.segment_of(at) + log.segment_size  # or a BLANK lies in between
            if not Anchor.of(state).is_in(log) or state.clean_end not in ends:
                report.find(path, 0, f"the record at {at}, the last one below the clean end", "other bytes")

    def _check_checkpoint(self, rules: Rules, last_time_ms: int | None) -> None:
        """Check that the times are not newer than the log, because a broker trusts its queues up to these times."""
        path, checkpoint, disk = self.files.paths.checkpoint, self.checkpoint, self.files.disk
        if not disk.exists(path):
            return
        if disk.size(path) != CHECKPOINT_SIZE:
            self.report.find(path, 0, f"{CHECKPOINT_SIZE} bytes", f"{disk.size(path)}")
        ours = rules.condition.ours_open or rules.zeros_behind
        if not ours or last_time_ms is None:
            return  # a broker may leave a checkpoint that covers more than it kept
        for name in ("physic_timestamp_ms", "logics_timestamp_ms", "index_timestamp_ms"):
            if getattr(checkpoint, name) > last_time_ms:
                expected = f"a time up to {last_time_ms}, that of the last record"
                self.report.find(path, CHECKPOINT.offset(name), expected, f"{getattr(checkpoint, name)}")
        name = "confirm_physical_offset"
        if getattr(checkpoint, name) >= max(rules.limit, 1):
            expected = f"an offset below {rules.limit}"
            self.report.find(path, CHECKPOINT.offset(name), expected, f"{getattr(checkpoint, name)}")

    def _check_names(self) -> None:
        paths, disk, log = self.files.paths, self.files.disk, self.files.commit_log
        for name in disk.names(paths.root):
            if name not in _KNOWN_NAMES:
                self.report.note(f"{os.path.join(paths.root, name)} does not belong to a message store")

        for name in disk.names(paths.index):
            if not (name.isascii() and name.isdigit()):
                self.report.find(os.path.join(paths.index, name), 0, "index files only", f"{name!r}")

        identity = self.files.identity
        size = identity.mapped_file_size_commit_log if identity is not None else log.segment_size
        if log.offsets and size != log.segment_size:
            expected = f"mappedFileSizeCommitLog {log.segment_size}, the size of the files"
            self.report.find(paths.identity, 0, expected, str(size))
