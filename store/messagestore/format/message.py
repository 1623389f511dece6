"""What does a user put in, and what comes back?

`Message` is what is put; `MessageExt` is what is read; the statuses are RocketMQ's. Checks that need no store are here,
so that a message is refused before anything is written.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from messagestore.errors import MessageIllegalError

BATCH_TOPIC = "rmq_sys_spark_sink"
"""The topic of BATCH records; users cannot put to it."""
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
LMQ_PREFIX = "%LMQ%"
"""Of a light queue: its units point to records of other topics (a broker's enableLmq)."""
MAX_TOPIC_SIZE = 127
MAX_GROUP_TOPIC_SIZE = 255
GROUP_TOPIC_PREFIXES = ("%RETRY%", "%DLQ%")
MAX_GROUP_SIZE = 255
SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
"""Of consumer groups that a broker keeps for itself."""
MAX_QUEUE_ID = 65535
SYSTEM_TOPIC_PREFIX = "rmq_sys_"
"""Of topics that a broker keeps for itself (timers, revived POP messages, ...)."""

_BROKER_TOPICS = {
    SCHEDULE_TOPIC: "delayed messages wait there until they are due",
    "RMQ_SYS_TRANS_HALF_TOPIC": "messages of open transactions wait there",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC": "the broker notes there which transactions have ended",
    "TRANS_CHECK_MAX_TIME_TOPIC": "transactions that were checked too often end there",
    "SELF_TEST_TOPIC": "brokers test themselves with it",
    "OFFSET_MOVED_EVENT": "the broker notes offsets there that it had to correct",
    "TBW102": "it is the template for topics that a broker creates",
}
"""RocketMQ's topics that producers may not send to, and TBW102; each with what the broker does with it."""

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")


class AppendMessageStatus(enum.Enum):
    """How an append to the CommitLog ended (RocketMQ AppendMessageStatus)."""

    PUT_OK = "PUT_OK"
    END_OF_FILE = "END_OF_FILE"
    MESSAGE_SIZE_EXCEEDED = "MESSAGE_SIZE_EXCEEDED"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    UNKNOWN_ERROR = "UNKNOWN_ERROR"


class PutMessageStatus(enum.Enum):
    """How a put ended (RocketMQ PutMessageStatus, those this store gives)."""

    PUT_OK = "PUT_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"


class GetMessageStatus(enum.Enum):
    """What a read found (RocketMQ GetMessageStatus)."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


@dataclass(frozen=True, slots=True)
class Message:
    """A message to put.

    Parameters
    ----------
    topic : str
        1 to 127 characters of `%|a-zA-Z0-9_-` (255 bytes after `%RETRY%` or `%DLQ%`).
    body : bytes
        At most `maxMessageSize` bytes; may be empty.
    queue_id : int | None
        The queue; None: by the hash of the first key, else round robin.
    keys : sequence of str
        No blanks within a key; each is found by `query_message`.
    tags : str | None
        One tag.
    properties : mapping of str to str
        The user's own; RocketMQ's reserved names are refused.
    flag : int
        The user's own, int32.
    born_timestamp_ms : int | None
        None: now.
    born_host : str
        `ip:port`, or `[ip]:port` for IPv6.
    sys_flag : int
        SYSFLAG bits; the store sets those of the hosts. A message of a transaction that is PREPARED or ROLLBACK gets
        queue offset 0 and is in no queue, as in RocketMQ: `look_message_by_offset` finds it.
    wait_store_msg_ok : bool
        False: in SYNC_FLUSH return before the sync (RocketMQ's WAIT property).
    prepared_transaction_offset : int
        Of a COMMIT or ROLLBACK: physical offset of the message that was prepared.
    """

    topic: str
    body: bytes
    queue_id: int | None = None
    keys: Sequence[str] = ()
    tags: str | None = None
    properties: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    flag: int = 0
    born_timestamp_ms: int | None = None
    born_host: str = "127.0.0.1:0"
    sys_flag: int = 0
    reconsume_times: int = 0
    wait_store_msg_ok: bool = True
    prepared_transaction_offset: int = 0


@dataclass(frozen=True, slots=True)
class MessageExt:
    """A message as it was read (RocketMQ MessageExt).

    `properties` holds the user's own; `system_properties` the reserved ones (TAGS, KEYS, UNIQ_KEY, ...). `body` is as
    stored (compressed where `sys_flag` says so). `body_crc` is the stored one.
    """

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    body: bytes
    keys: tuple[str, ...]
    tags: str | None
    properties: dict[str, str]
    system_properties: dict[str, str]
    flag: int
    sys_flag: int
    born_timestamp_ms: int
    store_timestamp_ms: int
    born_host: str
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    body_crc: int
    unique_key: str | None
    offset_message_id: str

    @property
    def message_id(self) -> str:
        """UNIQ_KEY where there is one, else the offset message id."""
        return self.unique_key or self.offset_message_id


class PutMessageResult(NamedTuple):
    """Where a put went.

    Parameters
    ----------
    status : PutMessageStatus
        `FLUSH_DISK_TIMEOUT`: stored, but the sync took longer than `syncFlushTimeout`.
    append_status : AppendMessageStatus
        Always `PUT_OK` here: what cannot be appended raises.
    physical_offset : int
        Of the first record, bytes.
    size : int
        Bytes of all records of the put.
    queue_offset : int
        Of the first message.
    message_id : str
        Offset message id; for a batch, of all messages, joined by commas as RocketMQ does.
    message_count : int
    store_timestamp_ms : int
    queue_id : int
    """

    status: PutMessageStatus
    append_status: AppendMessageStatus
    physical_offset: int
    size: int
    queue_offset: int
    message_id: str
    message_count: int
    store_timestamp_ms: int
    queue_id: int

    @property
    def is_ok(self) -> bool:
        """True when the message is stored (as RocketMQ's isOk, so also after FLUSH_DISK_TIMEOUT)."""
        return self.append_status is AppendMessageStatus.PUT_OK


@dataclass(frozen=True, slots=True)
class GetMessageResult:
    """What a read gave: RocketMQ's status, the messages, and where to go on."""

    status: GetMessageStatus
    messages: list[MessageExt]
    next_begin_offset: int
    min_offset: int
    max_offset: int


def topic_fault(topic: object) -> str | None:
    """Why a topic is not legal, or None. The same rule on write and on read: a topic becomes a path.

    Source: RocketMQ common/topic/TopicValidator.java, broker/util/HookUtils.java.
    """
    of_group = isinstance(topic, str) and topic.startswith(GROUP_TOPIC_PREFIXES)
    return _name_fault("topic", topic, MAX_GROUP_TOPIC_SIZE if of_group else MAX_TOPIC_SIZE)


def stored_topic_fault(topic: str) -> str | None:
    """Why a topic that was read from a record or a folder cannot have queues, or None: it must be the name of a folder.

    A broker's store holds more than users may put: topics of up to 255 bytes, `%RETRY%group+topic` of pop consumers,
    and whatever a program gave to RocketMQ's store without a broker.
    """
    if not topic:
        return "found an empty topic"
    if "/" in topic or "\0" in topic or "\ufffd" in topic or topic in (".", ".."):
        return f"found {topic[:80]!r}; a topic is the name of a folder, in UTF-8"
    size = len(topic.encode("utf-8", "surrogatepass"))
    if size > MAX_GROUP_TOPIC_SIZE:
        return f"found {size} bytes; the name of a folder has at most {MAX_GROUP_TOPIC_SIZE}"
    return None


def group_fault(group: object) -> str | None:
    """Why a consumer group is not one that users may have, or None.

    Source: RocketMQ client/Validators.java (checkGroup), common/MixAll.java (isSysConsumerGroup).
    """
    if isinstance(group, str) and group.startswith(SYSTEM_GROUP_PREFIX):
        return f"found {group[:80]!r}; names that begin with {SYSTEM_GROUP_PREFIX} are a broker's own"
    return _name_fault("group", group, MAX_GROUP_SIZE)


def _name_fault(kind: str, name: object, limit: int) -> str | None:
    if not isinstance(name, str):
        return f"found {type(name).__name__}; a {kind} is text"
    if not name:
        return f"found an empty {kind}"
    if _NAME.fullmatch(name) is None:
        return f"found {name[:80]!r}; allowed are the characters % | a-z A-Z 0-9 _ -"
    if len(name) > limit:
        return f"found {len(name)} bytes; allowed are at most {limit}"
    return None


def put_topic_fault(topic: object) -> str | None:
    """Why users may not put to a topic, or None.

    Beside illegal names these are the topics whose messages a broker acts on: one foreign message in
    `rmq_sys_wheel_timer` stops the timers of all topics. All of them may be read.

    Source: RocketMQ common/topic/TopicValidator.java.
    """
    fault = topic_fault(topic)
    if fault is not None:
        return fault
    assert isinstance(topic, str)
    if topic == BATCH_TOPIC:
        return f"{BATCH_TOPIC} is the store's own; choose another"
    why = _BROKER_TOPICS.get(topic)
    if topic.startswith(SYSTEM_TOPIC_PREFIX):
        why = f"names that begin with {SYSTEM_TOPIC_PREFIX} are a broker's own"
    elif topic.startswith(LMQ_PREFIX):
        why = f"names that begin with {LMQ_PREFIX} are a broker's light queues, which have no messages of their own"
    if why is not None:
        return f"found {topic!r}, which is reserved for RocketMQ's broker: {why}; choose another"
    return None


_known_fault = functools.lru_cache(4096)(put_topic_fault)  # a store has few topics, and each put names one


def check_topic(topic: object, row: int | None = None) -> str:
    """The topic, when users may put to it.

    Every message of a user passes here: single puts, batches and each topic of a Spark batch. What the store writes
    itself (BATCH records) does not.

    Raises
    ------
    MessageIllegalError
        For a bad name, the topic of BATCH records, and the topics that a broker keeps for itself.
    """
    fault = _known_fault(topic) if isinstance(topic, str) else put_topic_fault(topic)
    if fault is not None:
        raise MessageIllegalError(f"topic: {fault}", field="topic", row=row)
    assert isinstance(topic, str)
    return topic


def check_queue_id(
    queue_id: object, row: int | None = None, queue_count: int | None = None, topic: str | None = None
) -> int:
    """The queue id, when it is an int from 0 to `queue_count - 1` (without a count, to 65535)."""
    most = MAX_QUEUE_ID if queue_count is None else queue_count - 1
    if not isinstance(queue_id, int) or isinstance(queue_id, bool) or not 0 <= queue_id <= most:
        place = "" if topic is None else f" (writeQueueNums of topic {topic!r} is {queue_count})"
        text = f"queue id: found {queue_id!r}; allowed is 0 to {most}{place}"
        raise MessageIllegalError(text, field="queue_id", row=row)
    return queue_id
