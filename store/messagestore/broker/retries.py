"""Messages that a consumer could not process: what a broker makes of them.

    sent back            to %RETRY%group, at level 3 + reconsume_times, which go up by one
                         to %DLQ%group at once, after `retryMaxTimes` times or with a level below 0
    put to %RETRY%group  it stays there
                         to %DLQ%group instead, above `retryMaxTimes`

Source: RocketMQ broker/processor/AbstractSendMessageProcessor.java (consumerSendMsgBack), SendMessageProcessor.java
(handleRetryAndDLQ).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from messagestore.errors import ConfigError
from messagestore.files.subscription_groups import SubscriptionGroupConfig
from messagestore.format.message import DLQ_PREFIX, RETRY_PREFIX, Message, MessageExt
from messagestore.format.properties import (
    DELAY,
    KEYS,
    ORIGIN_MESSAGE_ID,
    PROPERTY_CRC,
    REAL_QID,
    REAL_TOPIC,
    RETRY_TOPIC,
    TAGS,
    UNIQUE_KEY,
    WAIT,
)

REASON = "DEAD_LETTER_REASON"
"""The user's property that says why a message is among the dead letters."""
_OF_A_PUT = frozenset((KEYS, TAGS, UNIQUE_KEY, WAIT, PROPERTY_CRC))
"""The reserved properties that every put writes itself, from what it is given."""
_OF_WAITING = frozenset((DELAY, REAL_TOPIC, REAL_QID))
"""Those that a put writes if the message waits."""


class Retry(NamedTuple):
    """What is put instead of a message.

    Parameters
    ----------
    message : Message
    queue_nums : int | None
        The number of queues of its topic, if the topic is missing; None: as for any other topic.
    properties : sequence of (str, str)
        Its reserved properties, besides those that a put writes itself.
    """

    message: Message
    queue_nums: int | None
    properties: Sequence[tuple[str, str]]


def sent_back(
    stored: MessageExt, settings: SubscriptionGroupConfig, delay_level: int | None, reason: str | None = None
) -> Retry:
    """What a message becomes that a group sends back. Its queue is not chosen yet.

    Raises
    ------
    ConfigError
        The group has no retry queues, so RocketMQ would drop the message.
    """
    group = settings.group_name
    if settings.retry_queue_nums < 1:
        raise ConfigError(
            f"group {group!r}: found retryQueueNums {settings.retry_queue_nums} in config/subscriptionGroup.json; "
            "allowed is 1 or more, since RocketMQ drops what such a group sends back. Nothing was written",
            key="retryQueueNums",
            value=settings.retry_queue_nums,
        )
    level = delay_level or 3 + stored.reconsume_times
    dead = level < 0 or stored.reconsume_times >= settings.retry_max_times
    system = stored.system_properties
    properties = {
        **system,
        RETRY_TOPIC: system.get(RETRY_TOPIC, stored.topic),
        ORIGIN_MESSAGE_ID: system.get(ORIGIN_MESSAGE_ID) or stored.offset_message_id,
    }
    if dead:
        properties[DELAY] = "0"  # a dead letter also keeps where it has waited
    written = _OF_A_PUT if dead else _OF_A_PUT | _OF_WAITING
    message = Message(
        f"{DLQ_PREFIX if dead else RETRY_PREFIX}{group}",
        stored.body,
        keys=stored.keys,
        tags=stored.tags,
        properties=stored.properties if reason is None or not dead else stored.properties | {REASON: reason},
        flag=stored.flag,
        born_timestamp_ms=stored.born_timestamp_ms,
        born_host=stored.born_host,
        sys_flag=stored.sys_flag,
        reconsume_times=stored.reconsume_times + 1,
        wait_store_msg_ok=False,  # RocketMQ keeps it so in the record; whoever sends back waits as for every put
        delay_time_level=0 if dead else level,
    )
    kept = [(name, value) for name, value in properties.items() if name not in written]
    return Retry(message, 1 if dead else settings.retry_queue_nums, kept)


def put_to_retry_topic(message: Message, settings: SubscriptionGroupConfig, stamps: Sequence[tuple[str, str]]) -> Retry:
    """What a message becomes that is put to the retry topic of a group; `stamps` are what it gets in any case."""
    times: object = message.reconsume_times
    if not isinstance(times, int) or times <= settings.retry_max_times:  # what is no number is refused later
        return Retry(message, None, stamps)
    dead = replace(message, topic=f"{DLQ_PREFIX}{settings.group_name}", queue_id=0, delay_time_level=0)
    return Retry(dead, 1, [*stamps, (DELAY, "-1")])
