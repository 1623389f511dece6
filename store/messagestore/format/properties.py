"""The property string of a record, and which properties are the user's own.

    name 0x01 value 0x02 name 0x01 value 0x02 ...

There is no escaping, so names and values that contain a separator are refused. Empty names and values are refused, too,
because Java drops them when it reads the string back.

Source: RocketMQ `common/message/MessageDecoder.java`, `MessageConst.java`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from messagestore.errors import MessageIllegalError

NAME_VALUE_SEPARATOR = b"\x01"
PROPERTY_SEPARATOR = b"\x02"
KEY_SEPARATOR = " "
"""Separates the keys in KEYS."""

KEYS = "KEYS"
TAGS = "TAGS"
UNIQUE_KEY = "UNIQ_KEY"
CLUSTER = "CLUSTER"
WAIT = "WAIT"
DELAY = "DELAY"
REAL_TOPIC = "REAL_TOPIC"
REAL_QID = "REAL_QID"
RETRY_TOPIC = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
SHARDING_KEY = "__SHARDINGKEY"
PROPERTY_CRC = "__CRC32#"

_RESERVED_NAMES = """
    KEYS TAGS WAIT DELAY ORIGIN_GROUP DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID TRANS_OFFSET _SYS_MSG_PRIORITY_
    __LITE_TOPIC TIMER_ROLL_LABEL RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET BUYER_ID
    ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME MSG_REGION TRACE_ON TRACE_CONTEXT UNIQ_KEY
    EXTEND_UNIQ_INFO MAX_RECONSUME_TIMES CONSUME_START_TIME INNER_NUM INNER_BASE INNER_MULTI_DISPATCH
    INNER_MULTI_QUEUE_OFFSET DUP_INFO TRAN_PREPARED_QUEUE_OFFSET TRANSACTION_CHECK_TIMES
    CHECK_IMMUNITY_TIME_IN_SECONDS INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER
    MSG_TYPE POP_CK POP_CK_OFFSET 1ST_POP_TIME PROPERTY_FORWARD_QUEUE_ID REDIRECT BORN_TIMESTAMP
    TIMER_DELAY_SEC TIMER_DELAY_MS TIMER_DELIVER_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_ROLL_TIMES TIMER_OUT_MS
    TIMER_DEL_UNIQKEY TIMER_DELAY_LEVEL __SHARDINGKEY __CRC32# __transactionId__ __BORNHOST
"""
RESERVED_PROPERTIES: frozenset[str] = frozenset(_RESERVED_NAMES.split())
"""The names that have a meaning for RocketMQ. Properties with any other name are the user's own."""

TIMERS = frozenset(name for name in RESERVED_PROPERTIES if name.startswith("TIMER_"))
"""The properties of RocketMQ's timer messages, which a broker keeps in a timer wheel (`rmq_sys_wheel_timer`)."""

_SEPARATORS = ("\x01", "\x02")


def encode_properties(pairs: Iterable[tuple[str, str]]) -> bytes:
    """The property string of pairs of name and value, in their order. It checks nothing."""
    return "".join([f"{name}\x01{value}\x02" for name, value in pairs]).encode()


def decode_properties(data: bytes) -> dict[str, str]:
    """Names and values as Java reads them.

    The last separator may be missing. A part without a name or with an empty value is dropped. If a name occurs twice,
    its later value counts. Bytes that are not UTF-8 become U+FFFD.
    """
    properties: dict[str, str] = {}
    for segment in data.split(PROPERTY_SEPARATOR):
        name, _, value = segment.partition(NAME_VALUE_SEPARATOR)
        if name and value:
            properties[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return properties


def text_fault(text: object) -> str | None:
    """Why a name or value cannot be stored as text, or None if it can."""
    if not isinstance(text, str):
        return f"found {'null' if text is None else type(text).__name__}; allowed is text"
    if not text:
        return "found empty text, which RocketMQ drops. Leave it out"
    if _SEPARATORS[0] in text or _SEPARATORS[1] in text:
        return f"found {text[:80]!r}; allowed is text without U+0001 and U+0002, which separate properties"

    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            if re.search("[\ud800-\udbff]|[\udc00-\udc7f]|[\udd00-\udfff]", text):
                return f"found {text[:80]!r}; allowed is text that can be stored as UTF-8, without a lone surrogate"
            return f"found {text[:80]!r}, which is not UTF-8. Encode bytes as text first, for example with base64"
    return None


def check_properties(properties: Mapping[str, str], row: int | None = None) -> None:
    """Refuse a user's properties that Java would lose, or would treat as its own.

    Raises
    ------
    MessageIllegalError
        The properties are no mapping, a name is reserved, or a name or value is not text, is empty, or contains a
        separator or a lone surrogate.
    """
    try:
        items = properties.items()
    except AttributeError:
        words = f"properties: found {type(properties).__name__}; allowed is a mapping of text to text"
        raise MessageIllegalError(words, field="properties", row=row) from None

    for name, value in items:
        fault = text_fault(name)
        if fault is not None:
            raise MessageIllegalError(f"property name: {fault}", field="properties", row=row)
        if name in RESERVED_PROPERTIES:
            raise MessageIllegalError(reserved_fault(name), field="properties", row=row)
        fault = text_fault(value)
        if fault is not None:
            raise MessageIllegalError(f"property {name!r}: {fault}", field="properties", row=row)


def reserved_fault(name: str) -> str:
    """The error text for a user's property that has one of RocketMQ's names."""
    instead = {
        KEYS: "Use `keys`",
        TAGS: "Use `tags`",
        SHARDING_KEY: "Use the sharding key column",
        DELAY: "Use `delay_time_level` (column delayTimeLevel)",
    }

    if name in TIMERS:
        return (
            f"property {name!r}: RocketMQ uses this name for timer messages, which this store does not support. "
            "Delayed messages wait for one of the times in messageDelayLevel: use `delay_time_level` (column "
            "delayTimeLevel)"
        )
    return f"property {name!r}: RocketMQ uses this name itself. {instead.get(name, 'Choose another name')}"


def check_keys(keys: Sequence[str], row: int | None = None) -> None:
    """Refuse keys that Java would not find again, because it splits KEYS at single blanks.

    Raises
    ------
    MessageIllegalError
        A key is not text, is empty, or contains a blank, a separator or a lone surrogate.
    """
    if isinstance(keys, str):
        raise MessageIllegalError(f"keys: found text {keys[:80]!r}; allowed is a list of text", field="keys", row=row)

    try:
        iterator = iter(keys)
    except TypeError:
        words = f"keys: found {type(keys).__name__}; allowed is a list of text"
        raise MessageIllegalError(words, field="keys", row=row) from None

    for key in iterator:
        fault = text_fault(key)
        if fault is None and KEY_SEPARATOR in key:
            fault = f"found {key[:80]!r}; allowed is text without blanks, which separate keys"
        if fault is not None:
            raise MessageIllegalError(f"keys: {fault}", field="keys", row=row)


def check_tags(tags: str | None, row: int | None = None) -> None:
    """Refuse a tag that is not text, is empty, or contains a separator or a lone surrogate. None means no tag.

    Raises
    ------
    MessageIllegalError
    """
    fault = None if tags is None else text_fault(tags)
    if fault is not None:
        raise MessageIllegalError(f"tags: {fault}", field="tags", row=row)
