"""Messages, results and statuses, and the checks of topics, groups and queue ids.

`Message` is what a user puts; `MessageExt` is what a reader gets; the statuses are RocketMQ's. The checks need no
store, so a message that cannot be stored is refused before anything is written.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from messagestore.errors import AppendMessageStatus, ConfigError, MessageIllegalError, PutMessageStatus
from messagestore.format import arguments
from messagestore.format.rows import SCHEDULE_TOPIC

BATCH_TOPIC = "rmq_sys_spark_sink"
"""The topic of BATCH records. Users cannot put messages to it."""
LMQ_PREFIX = "%LMQ%"
"""Names of light queues begin with this. Their units point to records of other topics (a broker's enableLmq)."""
MAX_TOPIC_SIZE = 127
MAX_GROUP_TOPIC_SIZE = 255
RETRY_PREFIX, DLQ_PREFIX = GROUP_TOPIC_PREFIXES = ("%RETRY%", "%DLQ%")
MAX_GROUP_SIZE = 255
SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
"""Names of consumer groups that a broker keeps for itself begin with this."""
MAX_QUEUE_ID = 65535
ANY_QUEUE = -1
"""The queue id of a single put for which chance chooses a queue (RocketMQ's SendMessageProcessor)."""
SYSTEM_TOPIC_PREFIX = "rmq_sys_"
"""Names of topics that a broker keeps for itself (timers, revived POP messages, ...) begin with this."""

_BROKER_TOPICS = {
    SCHEDULE_TOPIC: "delayed messages wait there until they are due",
    "RMQ_SYS_TRANS_HALF_TOPIC": "messages of open transactions wait there",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC": "the broker notes there which transactions have ended",
    "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC": "messages of open transactions wait there (transRocksDBEnable)",
    "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC": "the broker notes there which transactions have ended (transRocksDBEnable)",
    "TRANS_CHECK_MAX_TIME_TOPIC": "transactions that were checked too often end there",
    "SELF_TEST_TOPIC": "brokers test themselves with it",
    "OFFSET_MOVED_EVENT": "the broker notes offsets there that it had to correct",
    "TBW102": "it is the template for topics that a broker creates",
}
"""The topics that RocketMQ does not let producers send to, and TBW102, each with what the broker uses it for."""

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")


class GetMessageStatus(enum.Enum):
    """What a read found (RocketMQ's GetMessageStatus).

    `FOUND`: at least one message. `NO_MESSAGE_IN_QUEUE`: the queue is empty or does not exist. `OFFSET_TOO_SMALL`: the
    offset is below the queue's first message. `OFFSET_OVERFLOW_ONE`: the offset is the next one to be written, so the
    reader has read everything. `OFFSET_OVERFLOW_BADLY`: the offset is beyond that. `MESSAGE_WAS_REMOVING`: retention
    has deleted the messages. This store does not return the other values.
    """

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})
"""The properties of a message that has none of its own."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message to put into a store.

    Parameters
    ----------
    topic : str
        1 to 127 characters of `%|a-zA-Z0-9_-`; 255 after `%RETRY%` or `%DLQ%`.
    body : bytes
        At most `maxMessageSize` bytes (4 MiB by default). It may be empty.
    queue_id : int | None
        The queue. None: the hash of the first key chooses it; without keys the queues take turns. -1: chance chooses
        it, as in a broker. A batch has no such queue.
    keys : sequence of str
        The keys by which `query_message` finds the message. A key contains no blanks.
    tags : str | None
        One tag.
    properties : mapping of str to str
        The user's own properties. Names and values are not empty; RocketMQ's reserved names are refused.
    flag : int
        A number for the user's own purposes, int32.
    born_timestamp_ms : int | None
        When the message was made, in milliseconds since 1970. None: now.
    born_host : str
        Where the message was made: `ip:port`, or `[ip]:port` for IPv6.
    sys_flag : int
        RocketMQ's SYSFLAG bits; the store sets those of the two hosts itself. A message whose transaction bits say
        PREPARED or ROLLBACK gets queue offset 0 and is in no queue, as in RocketMQ; `look_message_by_offset` finds it.
    reconsume_times : int
        How often consumers have already returned the message, int32.
    wait_store_msg_ok : bool
        False: with SYNC_FLUSH, the put returns before the sync (RocketMQ's property WAIT).
    prepared_transaction_offset : int
        For a COMMIT or ROLLBACK: the physical offset of the message that was prepared.
    delay_time_level : int
        0: the message is not delayed. From 1 on: it waits in SCHEDULE_TOPIC_XXXX for as long as this level of
        `messageDelayLevel` says (1: 1 s, 18: 2 h by default; a level above the last one counts as the last one). A
        broker, or `MessageStore.deliver_delayed`, then delivers it to its topic and queue.

    Examples
    --------
    >>> from messagestore import Message
    >>> message = Message("flights", b"EWR to IAH", keys=["N14228"], tags="UA", properties={"gate": "C3"})
    >>> message.topic, message.queue_id, message.properties["gate"]
    ('flights', None, 'C3')
    """

    topic: str
    body: bytes
    queue_id: int | None = None
    keys: Sequence[str] = ()
    tags: str | None = None
    properties: Mapping[str, str] = field(default_factory=lambda: NO_PROPERTIES)
    flag: int = 0
    born_timestamp_ms: int | None = None
    born_host: str = "127.0.0.1:0"
    sys_flag: int = 0
    reconsume_times: int = 0
    wait_store_msg_ok: bool = True
    prepared_transaction_offset: int = 0
    delay_time_level: int = 0

    def __reduce__(self) -> tuple[object, ...]:
        # Not every mapping can be pickled, and the one that stands for no properties is known by its identity.
        values = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        own = values.pop("properties")
        return _message, (values if own is NO_PROPERTIES else values | {"properties": dict(own)},)


def _message(values: dict[str, Any]) -> Message:
    """A message that was pickled or copied."""
    return Message(**values)


@dataclass(frozen=True, slots=True)
class MessageExt:
    """A message as it was read from a store (RocketMQ's MessageExt).

    Parameters
    ----------
    topic : str
    queue_id : int
    queue_offset : int
        The number of the message in its queue, from 0, by which it can be asked for again. A message that was found by
        its place or by a key has the number that is in its record; where a broker brought back a topic that had been
        deleted, its queue may have it at another number.
    physical_offset : int
        The place of its record, in bytes from the log's origin.
    size : int
        The size of its record in bytes.
    body : bytes
        The body as it is stored: compressed, if `sys_flag` says so.
    keys : tuple of str
    tags : str | None
    properties : dict of str to str
        The user's own properties.
    system_properties : dict of str to str
        The properties with RocketMQ's reserved names (TAGS, KEYS, UNIQ_KEY, ...).
    flag, sys_flag : int
    born_timestamp_ms : int
        When the message was made, in milliseconds since 1970.
    store_timestamp_ms : int
        When the message was appended, in milliseconds since 1970.
    born_host, store_host : str
        `ip:port`, or `[ip]:port` for IPv6.
    reconsume_times : int
    prepared_transaction_offset : int
    body_crc : int
        The CRC-32 of the body, as it is stored.
    unique_key : str | None
        The id that the sender gave the message (UNIQ_KEY).
    offset_message_id : str
        The id that the store gives the message: its host, port and physical offset in hex.

    Examples
    --------
    >>> from messagestore import Message, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     _ = store.put_message(Message("flights", b"EWR to IAH", queue_id=0, tags="UA", properties={"gate": "C3"}))
    ...     message = store.get_message("flights", 0, 0).messages[0]
    >>> message.queue_offset, message.properties, message.system_properties["TAGS"]
    (0, {'gate': 'C3'}, 'UA')
    >>> message.message_id == message.offset_message_id
    True
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
        """The unique key if the message has one; otherwise the offset message id."""
        return self.unique_key or self.offset_message_id


class PutMessageResult(NamedTuple):
    """The result of a put: where the message is.

    Parameters
    ----------
    status : PutMessageStatus
        `FLUSH_DISK_TIMEOUT`: stored, but the sync takes longer than `syncFlushTimeout`.
    append_status : AppendMessageStatus
        Always `PUT_OK`: what cannot be appended raises an error, which has RocketMQ's statuses as attributes.
    physical_offset : int
        The place of the first record, in bytes from the log's origin.
    size : int
        The size of all records of the put, in bytes.
    queue_offset : int
        The number of the first message in its queue, from 0.
    message_id : str
        The offset message id; for a batch, the ids of all messages, joined by commas as in RocketMQ.
    message_count : int
    store_timestamp_ms : int
        When the messages were appended, in milliseconds since 1970.
    queue_id : int
    page_cache_ms : float
        How long the put held the writer's lock, to write its records to the page cache, in milliseconds (RocketMQ's
        pagecacheRT). The wait for the lock and the sync is not in it.
    committed : bool
        False: the message is only in the memory of this process (`transientStorePoolEnable`). Readers see it, and a
        killed process leaves it, when it is committed to the log a moment later. If the process is killed before, the
        next message gets the queue offset, and another one the message id.

    Examples
    --------
    >>> from messagestore import Message, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     result = store.put_message(Message("flights", b"EWR to IAH", queue_id=0))
    ...     store.look_message_by_id(result.message_id).body, result.message_count
    (b'EWR to IAH', 1)
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
    page_cache_ms: float = 0.0
    committed: bool = True

    @property
    def is_ok(self) -> bool:
        """Whether the message is stored. As RocketMQ's isOk, it is also true after FLUSH_DISK_TIMEOUT."""
        return self.append_status is AppendMessageStatus.PUT_OK


@dataclass(frozen=True, slots=True)
class GetMessageResult:
    """The result of a read.

    Parameters
    ----------
    status : GetMessageStatus
    messages : list of MessageExt
        In the order of their queue offsets; empty unless the status is `FOUND`.
    next_begin_offset : int
        The queue offset to read from next. After an offset that the queue does not hold, this is the nearest one that
        it does hold, or the queue's end.
    min_offset, max_offset : int
        The queue's first offset, and one past its last one.

    Examples
    --------
    >>> from messagestore import Message, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     _ = store.put_message(Message("flights", b"EWR to IAH", queue_id=0))
    ...     result = store.get_message("flights", 0, queue_offset=7)
    >>> result.status.name, result.next_begin_offset, result.max_offset
    ('OFFSET_OVERFLOW_BADLY', 1, 1)
    """

    status: GetMessageStatus
    messages: list[MessageExt]
    next_begin_offset: int
    min_offset: int
    max_offset: int


def topic_fault(topic: object) -> str | None:
    """Why a topic is not legal, or None if it is.

    Source: RocketMQ common/topic/TopicValidator.java, broker/util/HookUtils.java.
    """
    of_group = isinstance(topic, str) and topic.startswith(GROUP_TOPIC_PREFIXES)
    return _name_fault(topic, MAX_GROUP_TOPIC_SIZE if of_group else MAX_TOPIC_SIZE)


def stored_topic_fault(topic: object) -> str | None:
    """Why a topic that was read from a record or a folder cannot have queues, or None if it can.

    The topic only has to be a possible name of a folder. A broker's store holds more topics than users may put to:
    names of up to 255 bytes, `%RETRY%group+topic` of pop consumers, and whatever a program passed to RocketMQ's store
    without a broker.
    """
    if not isinstance(topic, str):
        return f"found {type(topic).__name__}; allowed is text"
    if not topic:
        return "found empty text; allowed is a name of at least one character"

    try:
        size = len(topic.encode())
    except UnicodeEncodeError:
        size = -1
    if size < 0 or "/" in topic or "\0" in topic or "\ufffd" in topic or topic in (".", ".."):
        return f"found {topic[:80]!r}; allowed is what can be the name of a folder, in UTF-8"
    if size > MAX_GROUP_TOPIC_SIZE:
        return f"found {size} bytes; allowed are at most {MAX_GROUP_TOPIC_SIZE}, as in the name of a folder"
    return None


def group_fault(group: object) -> str | None:
    """Why users may not have a consumer group of this name, or None if they may.

    Source: RocketMQ client/Validators.java (checkGroup), common/MixAll.java (isSysConsumerGroup).
    """
    if isinstance(group, str) and group.startswith(SYSTEM_GROUP_PREFIX):
        return f"found {group[:80]!r}; names that begin with {SYSTEM_GROUP_PREFIX} belong to the broker. Choose another"
    return _name_fault(group, MAX_GROUP_SIZE)


def check_group(group: object) -> None:
    """Check that users may have a consumer group of this name.

    Raises
    ------
    MessageIllegalError
    """
    fault = group_fault(group)
    if fault is not None:
        raise MessageIllegalError(f"group: {fault}", field="group")


def check_retrying_group(group: object) -> None:
    """Check that a consumer group of this name has a retry topic: `%RETRY%` and the name are the name of a folder, too.

    Raises
    ------
    MessageIllegalError
    """
    check_group(group)
    longest = MAX_GROUP_TOPIC_SIZE - len(RETRY_PREFIX)
    if len(str(group)) > longest:
        raise MessageIllegalError(
            f"group: found {len(str(group))} bytes; allowed are at most {longest} for a group that consumes, because "
            f"the topic of its retries, {RETRY_PREFIX} and its name, has at most {MAX_GROUP_TOPIC_SIZE} bytes",
            field="group",
        )


def _name_fault(name: object, limit: int) -> str | None:
    if not isinstance(name, str):
        return f"found {type(name).__name__}; allowed is text"
    if not name:
        return "found empty text; allowed is a name of at least one character"
    if _NAME.fullmatch(name) is None:
        return f"found {name[:80]!r}; allowed are the characters % | a-z A-Z 0-9 _ -"
    if len(name) > limit:
        return f"found {len(name)} bytes; allowed are at most {limit}"
    return None


def put_topic_fault(topic: object) -> str | None:
    """Why users may not put messages to a topic, or None if they may.

    Apart from illegal names, these are the topics whose messages a broker acts on: one foreign message in
    `rmq_sys_wheel_timer` stops the timers of all topics. All of these topics may be read.

    Source: RocketMQ common/topic/TopicValidator.java.
    """
    fault = topic_fault(topic)
    if fault is not None:
        return fault
    assert isinstance(topic, str)

    if topic == BATCH_TOPIC:
        return f"found {BATCH_TOPIC}, which the store uses itself. Choose another topic"

    why = _BROKER_TOPICS.get(topic)
    if topic.startswith(SYSTEM_TOPIC_PREFIX):
        why = f"names that begin with {SYSTEM_TOPIC_PREFIX} belong to the broker"
    elif topic.startswith(LMQ_PREFIX):
        why = f"names that begin with {LMQ_PREFIX} are light queues, which have no messages of their own"

    if why is not None:
        return f"found {topic!r}, which is reserved for RocketMQ's broker: {why}. Choose another topic"
    return None


def is_own_topic(topic: str) -> bool:
    """Whether a topic is this project's or a broker's own. Nobody can delete it, so a missing folder is an accident.

    Not all of these topics are in `topics.json`. Source: RocketMQ TopicValidator.isSystemTopic, which deleteTopic and
    cleanUnusedTopic ask.
    """
    return put_topic_fault(topic) is not None


def is_ordinary_topic(topic: str) -> bool:
    """Whether a topic is one that users choose: neither a broker's own, nor of a group's retries and dead letters."""
    return put_topic_fault(topic) is None and not topic.startswith(GROUP_TOPIC_PREFIXES)


_known_fault = functools.lru_cache(4096)(put_topic_fault)  # a store has few topics, and every put names one of them


def check_topic(topic: object, row: int | None = None) -> str:
    """Return the topic if users may put messages to it.

    Every message of a user passes this check: single puts, batches, and each topic of a Spark batch. What the store
    writes itself (BATCH records) does not.

    Raises
    ------
    MessageIllegalError
        The name is illegal, or it is the topic of BATCH records or one that a broker keeps for itself.
    """
    fault = _known_fault(topic) if isinstance(topic, str) else put_topic_fault(topic)
    if fault is not None:
        raise MessageIllegalError(f"topic: {fault}", field="topic", row=row)
    assert isinstance(topic, str)
    return topic


def check_readable_queue(topic: object, queue_id: object) -> None:
    """Refuse a topic or queue id that no queue of a store can have.

    Raises
    ------
    MessageIllegalError
    """
    fault = stored_topic_fault(topic)
    if fault is not None:
        raise MessageIllegalError(f"topic: {fault}. `topics()` lists the topics of a store", field="topic")
    try:
        arguments.whole_number("queue id", queue_id, 0)
    except ConfigError as error:
        raise MessageIllegalError(str(error), field="queue_id") from None


def check_queue_id(
    queue_id: object, row: int | None = None, queue_count: int | None = None, topic: str | None = None
) -> int:
    """Return the queue id if it is an int from 0 to `queue_count - 1`; without a count, to 65535.

    Raises
    ------
    MessageIllegalError
        It is not.
    """
    most = MAX_QUEUE_ID if queue_count is None else queue_count - 1
    if not isinstance(queue_id, int) or isinstance(queue_id, bool) or not 0 <= queue_id <= most:
        place = "" if topic is None else f" (writeQueueNums of topic {topic!r} is {queue_count})"
        text = f"queue id: found {queue_id!r}; allowed is 0 to {most}{place}"
        raise MessageIllegalError(text, field="queue_id", row=row)
    return queue_id


def check_delay_level(level: object, row: int | None = None) -> int:
    """Return the delay level if it is an int of 32 bits that is 0 or more.

    Raises
    ------
    MessageIllegalError
        It is not.
    """
    if not isinstance(level, int) or isinstance(level, bool) or not 0 <= level < 1 << 31:
        text = (
            f"delay level: found {level!r}; allowed is 0 for a message that is not delayed, or a level of "
            "messageDelayLevel from 1 on (a level above the last one counts as the last one)"
        )
        raise MessageIllegalError(text, field="delay_time_level", row=row)
    return level
