"""Recovery: finds out where the log ends, and mends what depends on that.

Recovery runs under both locks. If it runs twice, or again after a crash within it, it leaves the same bytes. It has
three phases, each a module:

    examine    reads: how the store was left (`log.condition`), the log, its tail, queues and journal. `survey` walks
               over the log from where `decide` says, and finds the end
    decide     from that, where the walk begins, whether its end is accepted, and what is cut, rebuilt and sealed
    apply      changes the files, and publishes the end

How the store was left decides which rules apply:

    closed by us    no walk: the log ends at C, unless something speaks against that (`Examination.objection`)
    else closed     walk from behind the last record that a ConsumeQueue unit points to, or from C if records lead from
                    there to C; if the queues are missing, walk over the whole log. Nothing in it is torn
    open, a broker  it crashed: walk from where its own recovery starts, or from C if that is higher
    open, ours      walk from C, if the record before C is there; otherwise from an earlier segment

If bytes are missing that were provably synced, recovery raises `CorruptionError`. Anything else after the last record
that counts is the torn end of the log: it is saved (unless a replay of a batch contains it), zeroed and synced, and
reported in one line. What is kept above C is rewritten and synced before anything is dispatched or published.
"""

from __future__ import annotations

import contextlib
import logging
import os

from messagestore.errors import CorruptionError, StoreFullError
from messagestore.log.store_files import StoreFiles, as_record
from messagestore.recovery import decide
from messagestore.recovery.apply import apply, take_away
from messagestore.recovery.examine import Examination
from messagestore.recovery.journal import extend_to_end
from messagestore.recovery.report import RecoveryReport
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.segments_ahead import remove_orphans

_LOGGER = logging.getLogger(__name__)


def recover(files: StoreFiles, *, accept_loss: bool = False) -> tuple[LogWriter, RecoveryReport]:
    """Bring a store into a state that can be appended to.

    Parameters
    ----------
    files : StoreFiles
        The loaded files of the store; the caller is attached and holds the writer lock.
    accept_loss : bool
        True: if the end of the log is provably lost, continue without it; the report says what is missing.

    Raises
    ------
    CorruptionError
        Bytes that were provably on the disk are missing; nothing was changed.
    """
    while True:
        examined = Examination(files)
        try:
            writer, report = _recovered(examined, accept_loss=accept_loss)
            break
        except CorruptionError as error:
            if take_away(examined, error):
                continue
            if type(error) is CorruptionError and error.path.startswith(files.paths.consume_queue + os.sep):
                raise CorruptionError(
                    error.path,
                    error.physical_offset,
                    error.expected,
                    error.found,
                    hint=f"Restore this file from a copy. If there is none, run `messagestore verify`. If it finds no "
                    f"fault in the log, remove the folder {files.paths.consume_queue} and run `messagestore recover`, "
                    "which rebuilds all queues from the log.",
                ) from error
            raise

    end = writer.end
    with contextlib.suppress(StoreFullError):  # the next delayed message replaces what counts from the log's end on
        files.keep_levels(files.commit_log.delay_levels.below(end.physical_offset))
    if end.last_size:
        files.configure(as_record(files.commit_log.read(end.last_position, end.last_size), files.config))
    return writer, report


def _recovered(examined: Examination, *, accept_loss: bool) -> tuple[LogWriter, RecoveryReport]:
    """Examine, decide and apply; a store that a writer of ours closed is only continued."""
    files, state, clean_end = examined.files, examined.state, examined.anchored
    objection = examined.objection()
    if not objection and state is not None and clean_end is not None:
        remove_orphans(files)
        extend_to_end(files, examined.journal, clean_end.physical_offset)
        report = RecoveryReport("clean", start=clean_end.physical_offset, end=clean_end.physical_offset)
        return LogWriter(files, state, clean_end, examined.journal), report

    inventory = examined.inventory()
    begin = decide.walk_start(inventory, accept_loss=accept_loss)
    evidence = examined.walk(begin, accept_loss=accept_loss, already_lost=inventory.segments_lost is not None)
    plan = decide.make_plan(inventory, begin, evidence, accept_loss=accept_loss)

    report = plan.report
    if report.lost is not None:
        _LOGGER.warning("%s: recovery continues without what is lost: %s", files.paths.root, report.lost)
    writer = apply(examined, plan)
    if report.changed is not None:
        _LOGGER.error("%s: %s", files.paths.root, report.changed)
    if report.cut is not None:
        _LOGGER.warning("%s: cut off %s", files.paths.root, report.cut)
    if plan.short:
        _LOGGER.warning("%s: %s", files.paths.root, report.rebuilt)
    return writer, report
