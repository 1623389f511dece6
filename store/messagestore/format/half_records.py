"""Half messages: the records of a transaction that is not committed yet, and of how it ends.

    prepare     RMQ_SYS_TRANS_HALF_TOPIC/0      the message, with its own topic and queue in REAL_TOPIC and REAL_QID
    commit      REAL_TOPIC/REAL_QID             the message, with the transaction bits of COMMIT
    any end     RMQ_SYS_TRANS_OP_HALF_TOPIC/0   "17": the half message with queue offset 17 has ended
    check       RMQ_SYS_TRANS_HALF_TOPIC/0      the half message again, with one more in TRANSACTION_CHECK_TIMES
    discard     TRANS_CHECK_MAX_TIME_TOPIC/0    a half message that was checked too often, or is too old

An op message of a broker since RocketMQ 5.1 ends any number of half messages ("17,18,"). An earlier broker reads one
number and takes anything else for an error: it would commit such half messages a second time. Both read "17".

A half message has a unit in its queue, so its transaction bits are 0. The functions make records from records, and keep
every byte that a broker keeps.

Source: RocketMQ broker/transaction/queue/TransactionalMessageBridge.java, TransactionalMessageUtil.java,
DefaultTransactionalMessageCheckListener.java, processor/EndTransactionProcessor.java.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from messagestore.errors import CorruptionError
from messagestore.format import record
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import unpack_host
from messagestore.format.layout import SYS_FLAG_TRANSACTION_COMMIT, SYS_FLAG_TRANSACTION_MASK
from messagestore.format.message import Message, MessageExt
from messagestore.format.properties import REAL_QID, REAL_TOPIC

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
DISCARD_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
OWN_TOPICS = (HALF_TOPIC, OP_TOPIC, DISCARD_TOPIC)
"""Each of them has one queue."""
GROUP = "CID_RMQ_SYS_TRANS"
"""The consumer group in whose name a broker notes how far it has checked."""
QUEUE_ID = 0

_PREPARED, _GROUP, _TRANSACTION_ID = "TRAN_MSG", "PGROUP", "__transactionId__"
_CHECK_TIMES, _IMMUNITY = "TRANSACTION_CHECK_TIMES", "CHECK_IMMUNITY_TIME_IN_SECONDS"
_MOST_CHECKS = str((1 << 31) - 1)
_FIRST_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
_ENDED_TAG = "d"
_INT = re.compile(r"[+-]?\d{1,10}", re.ASCII)
_LONG = re.compile(r"[+-]?\d{1,19}", re.ASCII)


@dataclass(frozen=True, slots=True)
class OpenHalf:
    """A half message that has neither been committed nor rolled back.

    Parameters
    ----------
    message_id : str
        The offset message id of the half message, by which it can be committed and rolled back. It changes when the
        half message is put back for a check.
    transaction_id : str
        The UNIQ_KEY of the message, which does not change; empty if it has none.
    producer_group : str
        The group of producers that a broker asks whether the transaction was committed.
    topic, queue_id : str, int
        Where the message goes when it is committed. The queue id is -1 if the half message does not say so.
    born_timestamp_ms, store_timestamp_ms : int
        When the message was made, and when its half message was appended last.
    check_times : int
        How often it has been checked.
    check_immunity_s : int | None
        How long after it was made it is not checked. None: `transactionTimeOut`.
    queue_offset, physical_offset, size : int
        Where the record of the half message is.
    first_queue_offset : int | None
        The queue offset that the half message had before a broker put it back during its immunity.
    """

    message_id: str
    transaction_id: str
    producer_group: str
    topic: str
    queue_id: int
    born_timestamp_ms: int
    store_timestamp_ms: int
    check_times: int
    check_immunity_s: int | None
    queue_offset: int
    physical_offset: int
    size: int
    first_queue_offset: int | None = None

    @classmethod
    def of(cls, message: MessageExt) -> OpenHalf:
        """What the record of a half message says."""
        values = message.system_properties
        immunity, first = values.get(_IMMUNITY), values.get(_FIRST_OFFSET)
        queue_id = values.get(REAL_QID, "")

        return cls(
            message_id=message.offset_message_id,
            transaction_id=message.unique_key or "",
            producer_group=values.get(_GROUP, ""),
            topic=values.get(REAL_TOPIC, ""),
            queue_id=int(queue_id) if queue_id.isascii() and queue_id.isdigit() else -1,
            born_timestamp_ms=message.born_timestamp_ms,
            store_timestamp_ms=message.store_timestamp_ms,
            check_times=_number(_INT, values.get(_CHECK_TIMES, "0")),
            check_immunity_s=None if immunity is None or _number(_LONG, immunity) == -1 else _number(_LONG, immunity),
            queue_offset=message.queue_offset,
            physical_offset=message.physical_offset,
            size=message.size,
            first_queue_offset=None if first is None or _number(_LONG, first) == -1 else _number(_LONG, first),
        )

    def is_worn_out(self, now_ms: int, check_max: int, reserved_hours: int) -> bool:
        """Whether the half message is discarded: it was checked often enough, or is older than files become.

        With -1 `reserved_hours`, files become as old as they like.
        """
        too_old = reserved_hours >= 0 and now_ms - self.born_timestamp_ms > reserved_hours * 3_600_000
        return self.check_times >= check_max or too_old

    def is_due(self, now_ms: int, timeout_ms: int) -> bool:
        """Whether it is time to check the half message. One that was made in the future is always due."""
        age_ms = now_ms - self.born_timestamp_ms
        immunity_ms = timeout_ms if self.check_immunity_s is None else self.check_immunity_s * 1000
        return age_ms < 0 or age_ms > immunity_ms


def _number(form: re.Pattern[str], text: str) -> int:
    """A number as a broker reads it: -1 for what is none."""
    return int(text) if form.fullmatch(text) else -1


def half_properties(
    message: Message, queue_id: int, producer_group: str, transaction_id: str, check_immunity_s: int | None
) -> list[tuple[str, str]]:
    """The reserved properties of a new half message, besides its UNIQ_KEY."""
    pairs = [(_PREPARED, "true"), (_GROUP, producer_group)]
    if check_immunity_s is not None:
        pairs.append((_IMMUNITY, str(check_immunity_s)))
    pairs += [(_TRANSACTION_ID, transaction_id), (REAL_TOPIC, message.topic), (REAL_QID, str(queue_id))]
    return pairs


def committed(half: bytes, of: OpenHalf, config: StoreConfig) -> bytearray:
    """The record of a message that was committed. It keeps all properties of the half message, as a broker's does."""
    sys_flag = record.sys_flag_of(half) & ~SYS_FLAG_TRANSACTION_MASK | SYS_FLAG_TRANSACTION_COMMIT
    return record.encode_again(
        half,
        topic=of.topic,
        queue_id=of.queue_id,
        sys_flag=sys_flag,
        prepared_transaction_offset=of.physical_offset,
        limits=config,
    )


def longest(half: bytes, topic: str, config: StoreConfig) -> bytearray:
    """The longest record that a new half message can become: after checks, it goes to `topic` or is discarded.

    Raises
    ------
    MessageIllegalError
        Its properties would have too many bytes.
    """
    topic = max(topic, DISCARD_TOPIC, key=len)
    times = {_CHECK_TIMES: _MOST_CHECKS}
    return record.encode_again(half, topic=topic, queue_id=QUEUE_ID, limits=config, properties=times)


def put_back(half: bytes, of: OpenHalf, config: StoreConfig) -> bytearray:
    """The record of a half message that is about to be checked once more."""
    return record.encode_again(half, topic=HALF_TOPIC, queue_id=QUEUE_ID, limits=config, properties=_checked_again(of))


def _checked_again(of: OpenHalf) -> dict[str, str]:
    return {_CHECK_TIMES: str(of.check_times + 1)}


def discarded(half: bytes, of: OpenHalf, check_max: int, config: StoreConfig) -> bytearray:
    """The record of a half message that is discarded. A broker counts one check more if it is merely too old."""
    times = {} if of.check_times >= check_max else _checked_again(of)
    return record.encode_again(half, topic=DISCARD_TOPIC, queue_id=QUEUE_ID, limits=config, properties=times)


def ended(queue_offset: int, born_ms: int, store_host: bytes, config: StoreConfig) -> bytearray:
    """The record of an op message, which says that a half message has ended."""
    message = Message(
        OP_TOPIC,
        b"%d" % queue_offset,
        tags=_ENDED_TAG,
        born_timestamp_ms=born_ms,
        born_host=unpack_host(store_host),
    )
    return record.encode_message(message, queue_id=QUEUE_ID, store_host=store_host, limits=config)


def ended_offsets(op: MessageExt) -> list[int]:
    """The queue offsets of the half messages that an op message ends."""
    if op.tags != _ENDED_TAG:
        return []  # a broker logs an error, and goes on
    return [int(text) for text in op.body.decode("utf-8", "replace").split(",") if _LONG.fullmatch(text)]


def check_committable(of: OpenHalf, path: str) -> None:
    """Refuse to commit a half message that does not say where it belongs.

    Raises
    ------
    CorruptionError
    """
    if not of.topic or of.queue_id < 0:
        raise CorruptionError(
            path,
            of.physical_offset,
            f"a half message with {REAL_TOPIC} and {REAL_QID}",
            f"topic {of.topic!r}, queue {of.queue_id}",
            hint="It cannot be committed. Roll it back, or wait until it is discarded.",
        )
