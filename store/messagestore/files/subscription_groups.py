"""`config/subscriptionGroup.json`: the broker's settings of its consumer groups, as far as a store needs them.

    "subscriptionGroupTable":{"flights":{"retryMaxTimes":16,"retryQueueNums":1,...}}

Source: RocketMQ remoting/protocol/subscription/SubscriptionGroupConfig.java.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from messagestore.files.config_file import ConfigFile
from messagestore.files.mapped_file import Disk


@dataclass(frozen=True, slots=True)
class SubscriptionGroup:
    """How messages that a consumer group sends back are retried.

    Parameters
    ----------
    retry_max_times : int
        After so many retries, a message goes to the group's dead-letter topic.
    retry_queue_nums : int
        The number of queues of the group's retry topic.
    """

    retry_max_times: int = 16
    retry_queue_nums: int = 1


def subscription_group(disk: Disk, root: str, group: str) -> SubscriptionGroup:
    """The settings of a group; RocketMQ's defaults, if the file does not name it or is missing.

    Raises
    ------
    CorruptionError
        There is a file, but none that can be read.
    """
    file = ConfigFile(
        disk,
        root,
        "subscriptionGroup.json",
        "subscriptionGroupTable",
        via="new-subscription-group.json",
        meaning="the broker's table of consumer groups",
        hint="Restore it from a copy. If you move it away instead, all groups get the default settings.",
    )
    return file.load(_table).get(group, SubscriptionGroup())


def _table(fields: dict[str, Any]) -> dict[str, SubscriptionGroup]:
    return {name: _group(settings) for name, settings in fields.items()}


def _group(settings: dict[str, Any]) -> SubscriptionGroup:
    default = SubscriptionGroup()
    numbers = (
        settings.get("retryMaxTimes", default.retry_max_times),
        settings.get("retryQueueNums", default.retry_queue_nums),
    )
    for number in numbers:
        if type(number) is not int or not -(1 << 31) <= number < 1 << 31:
            raise ValueError(f"number {number!r}")
    return SubscriptionGroup(*numbers)
