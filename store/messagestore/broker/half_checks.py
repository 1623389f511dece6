"""Asks how open half messages end, and discards those about which it has asked too often.

    due -> put back with one more check -> asked -> committed, rolled back, or open for another round
     |---> discarded, after `transactionCheckMax` checks or `fileReservedTime` hours

A half message is put back before it is handed to the check, so that no number of kills makes it one check more. A
process that takes turns with other writers holds the store for the first arrow and for the last, and not in between.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from messagestore.broker.halves import ROUND_COUNT, ROUND_SIZE, End, HalfMessages, ended_by_broker
from messagestore.errors import ConfigError, CorruptionError, HalfMessageEndedError, MessageIllegalError
from messagestore.format import arguments, half_records, record
from messagestore.format.half_records import OpenHalf
from messagestore.format.hosts import offset_message_id, pack_host
from messagestore.format.message import MessageExt
from messagestore.format.rows import Row
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.periodic import PeriodicService, Stopping

_log = logging.getLogger(__name__)


class LocalTransactionState(enum.Enum):
    """What a check says about the change that a half message belongs to (RocketMQ's LocalTransactionState)."""

    COMMIT_MESSAGE = "COMMIT_MESSAGE"
    ROLLBACK_MESSAGE = "ROLLBACK_MESSAGE"
    UNKNOW = "UNKNOW"


Check = Callable[[MessageExt], LocalTransactionState]


@dataclass(slots=True)
class CheckReport:
    """What a round of checks did.

    Parameters
    ----------
    checked : int
        The number of half messages that were handed to the check.
    committed, rolled_back : int
        How many of them were committed and rolled back after that.
    discarded : int
        The number of half messages that were moved to `TRANS_CHECK_MAX_TIME_TOPIC` without another check.
    open : int
        The number of half messages that are open after the round, those included that are not due yet.
    failures : list of (str, Exception)
        The message ids of half messages whose check raised an exception, and of those that cannot be put back or
        committed, since they are damaged or too large, or since their topic cannot be written. They stay open, as if
        the answer was UNKNOW.
    """

    checked: int = 0
    committed: int = 0
    rolled_back: int = 0
    discarded: int = 0
    open: int = 0
    failures: list[tuple[str, Exception]] = field(default_factory=list)


class HalfChecks:
    """The checks of one session, by a caller or by a thread of their own, or those of a process that takes turns.

    Parameters
    ----------
    halves : callable
        The half messages, as a context: what is read or written in it is read and written by one writer. No context is
        open while a check runs, so a process that takes turns lets other writers in.
    """

    def __init__(self, halves: Callable[[], AbstractContextManager[HalfMessages]]) -> None:
        self._halves = halves
        self._service: PeriodicService | None = None
        self._pid = os.getpid()

    def close(self) -> None:
        """End the thread that checks."""
        if self._service is not None and self._pid == os.getpid():  # a forked child does not have the thread
            self._service.stop()

    def start(self, check: Check) -> None:
        """Check by a thread from now on; see `MessageStore.start_checking_halves`."""
        arguments.function("check", check)
        with self._halves() as halves:
            halves.session.writer.check_usable()
            config = halves.session.writer.files.config
        if self._service is not None:
            self._service.stop()
        self._service = PeriodicService(
            "half-message check",
            lambda: config.transaction_check_interval / 1000,
            lambda stopping: self._check_now(check, stopping),
        )
        self._service.start()

    def _check_now(self, check: Check, stopping: Stopping) -> None:
        report = self.check(check, stopping)
        if report.checked or report.discarded:
            _log.info(
                "half messages: %d checked, %d committed, %d rolled back, %d discarded, %d open",
                report.checked,
                report.committed,
                report.rolled_back,
                report.discarded,
                report.open,
            )

    def check(self, check: Check, stopping: Stopping = lambda pause_s: False) -> CheckReport:  # noqa: ARG005
        """Hand the half messages that are due to `check`, each once; see `MessageStore.check_halves`."""
        arguments.function("check", check)
        report = CheckReport()
        with self._halves() as halves, halves.current() as current:
            config, now_ms = halves.session.writer.files.config, _now_ms(halves)
            limits = (now_ms, config.transaction_check_max, config.file_reserved_time)
            due = [
                half
                for half in current.by_offset.values()
                if half.is_worn_out(*limits) or half.is_due(now_ms, config.transaction_time_out)
            ]

        for part in _parts(due):
            if stopping(0):
                return report
            with self._halves() as halves:
                asked_halves = _put_back(halves, part, now_ms, report)
            answers = [end for half, message in asked_halves if (end := _ask(check, half, message, report)) is not None]
            if answers:
                with self._halves() as halves:
                    halves.end_all(answers)

            for end in answers:
                if end.error is None:
                    report.committed += end.commit
                    report.rolled_back += not end.commit
                elif isinstance(end.error, (ConfigError, MessageIllegalError, CorruptionError)):
                    report.failures.append((end.half.message_id, end.error))
                elif not isinstance(end.error, HalfMessageEndedError):  # its producer has ended it meanwhile
                    raise end.error

        with self._halves() as halves, halves.current() as current:
            halves.save_progress(current)
            report.open = len(current.by_offset)
        return report


def _now_ms(halves: HalfMessages) -> int:
    return halves.session.writer.files.disk.time_ns() // 1_000_000


def _put_back(
    halves: HalfMessages, part: Sequence[OpenHalf], now_ms: int, report: CheckReport
) -> list[tuple[OpenHalf, MessageExt]]:
    """Append half messages again, with one more check, or discard them; returns those that are to be checked.

    They count a check before it is made, so that no number of kills makes it one more than `transactionCheckMax`.
    """
    with halves.current() as current:
        config, log = halves.session.writer.files.config, current.view.files.commit_log
        records: list[bytearray] = []
        kept: list[OpenHalf | None] = []
        ended: list[int] = []
        still_open = [current.by_offset[due.queue_offset] for due in part if due.queue_offset in current.by_offset]
        for half in still_open:
            if ended_by_broker(current.view, half):
                ended.append(half.queue_offset)  # only its op message was missing
                continue
            worn_out = half.is_worn_out(now_ms, config.transaction_check_max, config.file_reserved_time)
            try:
                again = _again(
                    halves.session.writer, log.exact(half.physical_offset, half.size), half, worn_out=worn_out
                )
            except (MessageIllegalError, CorruptionError) as error:
                report.failures.append((half.message_id, error))  # it does not hold up the others
                continue
            ended.append(half.queue_offset)
            records.append(again)
            kept.append(None if worn_out else half)
            report.discarded += worn_out
        if not ended:
            return []
        rows = halves.append(records, ended)
        asked_halves = [
            _asked(data, row, half) for data, row, half in zip(records, rows, kept, strict=False) if half is not None
        ]
        report.checked += len(asked_halves)
        return asked_halves


def _again(writer: LogWriter, data: bytes, half: OpenHalf, *, worn_out: bool) -> bytearray:
    """The record of a half message that is put back or discarded; an error if it is too large for that."""
    config = writer.files.config
    again = (
        half_records.discarded(data, half, config.transaction_check_max, config)
        if worn_out
        else half_records.put_back(data, half, config)
    )
    writer.check_fits(len(again))
    return again


def _parts(halves: Sequence[OpenHalf]) -> Iterator[list[OpenHalf]]:
    """The half messages in parts of a limited count and size."""
    part: list[OpenHalf] = []
    size = 0
    for half in halves:
        if part and (len(part) == ROUND_COUNT or size + half.size > ROUND_SIZE):
            yield part
            part, size = [], 0
        part.append(half)
        size += half.size
    if part:
        yield part


def _asked(data: bytearray, row: Row, half: OpenHalf) -> tuple[OpenHalf, MessageExt]:
    """A half message that was put back, as it is now, and as a check sees it: with its own topic and queue."""
    message = record.decode_message(data, verify=False)
    message = replace(
        message,
        queue_offset=row.queue_offset,
        physical_offset=row.physical_offset,
        store_timestamp_ms=row.store_timestamp_ms,
        offset_message_id=offset_message_id(pack_host(message.store_host), row.physical_offset),
    )
    return OpenHalf.of(message), replace(message, topic=half.topic, queue_id=half.queue_id)


def _ask(check: Check, half: OpenHalf, message: MessageExt, report: CheckReport) -> End | None:
    """What a check answers; None: it does not know."""
    try:
        state = check(message)
        if not isinstance(state, LocalTransactionState):
            raise arguments.refused("check", state, "a LocalTransactionState as its result")
    except Exception as error:  # noqa: BLE001 - the user's own code; the others are checked all the same
        _log.warning("half message %s: its check failed, and it stays open", half.message_id, exc_info=True)
        report.failures.append((half.message_id, error))
        return None
    if state is LocalTransactionState.UNKNOW:
        return None
    return End(half, state is LocalTransactionState.COMMIT_MESSAGE)
