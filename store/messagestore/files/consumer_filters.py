"""`config/consumerFilter.json`: the expressions by which consumer groups choose messages of a topic, for reading only.

The file is the broker's own (`ConsumerFilterManager.java`). A consumer registers an expression (SQL92) when it
subscribes; tags are not in the file. `deadTime` is 0 while the consumer lives, otherwise the time of its end; a broker
forgets a filter a day later. `bloomFilterData` says which bits of `consumequeue_ext` stand for the group and the topic.

    "filterDataByTopic":{"flights":{"topic":"flights","groupFilterData":{"delays":{
        "bloomFilterData":{"bitNum":..,"bitPos":[..]},"bornTime":..,"clientVersion":..,"consumerGroup":"delays",
        "deadTime":..,"expression":"a > 1","expressionType":"SQL92","topic":"flights"}}}}

Threads: one. Processes: it takes no lock and writes nothing.
Source: RocketMQ broker/filter/ConsumerFilterManager.java, ConsumerFilterData.java.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from messagestore.files.config_file import ConfigFile
from messagestore.files.disk import Disk

_NUMBERS = ("bornTime", "deadTime", "clientVersion")


@dataclass(frozen=True, slots=True)
class ConsumerFilterData:
    """One filter, as RocketMQ's ConsumerFilterData.

    Parameters
    ----------
    consumer_group, topic : str
    expression, expression_type : str
        For example `a > 1`, in SQL92.
    born_time_ms, dead_time_ms : int
        When a consumer registered it; when the last consumer with it ended, or 0.
    client_version : int
        The consumer's version of its subscription.
    """

    consumer_group: str
    topic: str
    expression: str
    expression_type: str
    born_time_ms: int = 0
    dead_time_ms: int = 0
    client_version: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether RocketMQ takes the filter for dead, because no consumer uses it. A broker that starts takes all for
        dead.
        """
        return self.dead_time_ms >= self.born_time_ms


def consumer_filters(disk: Disk, root: str) -> list[ConsumerFilterData]:
    """All filters of a store, sorted by group and topic; none, if there is no file.

    Raises
    ------
    CorruptionError
        There is a file, but none that can be read.
    """
    file = ConfigFile(
        disk,
        root,
        "consumerFilter.json",
        "filterDataByTopic",
        via="new-consumer-filter.json",
        meaning="the broker's table of consumer filters",
        hint="Restore it from a copy, or move it away: consumers register their filters again when they start.",
    )
    return sorted(file.load(_filters), key=lambda filter_data: (filter_data.consumer_group, filter_data.topic))


def _filters(table: dict[str, Any]) -> list[ConsumerFilterData]:
    return [
        _filter(topic, group, fields)
        for topic, of_topic in table.items()
        for group, fields in (of_topic.get("groupFilterData") or {}).items()
    ]


def _filter(topic: str, group: str, fields: dict[str, Any]) -> ConsumerFilterData:
    expression, expression_type = (fields.get(name) or "" for name in ("expression", "expressionType"))
    born_time_ms, dead_time_ms, client_version = (fields.get(name, 0) for name in _NUMBERS)
    if not isinstance(expression, str) or not isinstance(expression_type, str):
        raise ValueError(f"expression {expression!r} of type {expression_type!r}")
    for number in (born_time_ms, dead_time_ms, client_version):
        if type(number) is not int:
            raise ValueError(f"number {number!r}")
    return ConsumerFilterData(group, topic, expression, expression_type, born_time_ms, dead_time_ms, client_version)
