"""`config/topics.json`: the topics of a store and their queues.

The file is the broker's own (`TopicConfigManager.java`). A name in it says nothing about messages: a topic may be in
the file without a queue, and a queue may exist without being in the file.

Threads: one. Processes: `save` is called under the writer lock; it reads the file again, so that what another process
added stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from messagestore.errors import ConfigError, MessageIllegalError, UnknownTopicError
from messagestore.files.config_file import ConfigFile
from messagestore.files.config_table import ConfigTable
from messagestore.files.disk import Disk
from messagestore.format import arguments
from messagestore.format.layout import SYS_FLAG_MULTI_TAGS
from messagestore.format.message import GROUP_TOPIC_PREFIXES, MAX_QUEUE_ID, Message, topic_fault

PERM_WRITE = 2
PERM_READ_WRITE = 6
SINGLE_TAG = "SINGLE_TAG"
MULTI_TAG = "MULTI_TAG"
QUEUE_TYPE = "queue.type"
CLEANUP_POLICY, COMPACTION = "cleanup.policy", "COMPACTION"
SIMPLE_QUEUE = "SimpleCQ"
MAX_QUEUE_COUNT = MAX_QUEUE_ID + 1
DEFAULT_QUEUE_NUMS = 8
_MAX_PERM = 15


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic, as RocketMQ's TopicConfig.

    Parameters
    ----------
    topic_name : str
    read_queue_nums, write_queue_nums : int
        The numbers of queues that consumers read and producers write.
    perm : int
        4 read, 2 write, 1 inherit, 8 priority; added up.
    topic_sys_flag : int
    order : bool
    topic_filter_type : str
        SINGLE_TAG or MULTI_TAG.
    attributes : dict of str to str
        RocketMQ's topic attributes (`queue.type`, ...), names as they are in the file.
    others : dict
        Fields of the file that this project does not know; they are written back.
    """

    topic_name: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = PERM_READ_WRITE
    topic_sys_flag: int = 0
    order: bool = False
    topic_filter_type: str = SINGLE_TAG
    attributes: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def has_multi_tags(self) -> bool:
        """Whether a broker sets the flag MULTI_TAGS in the records of this topic."""
        return self.topic_filter_type == MULTI_TAG

    def flagged(self, message: Message) -> Message:
        """The message as a broker stores it in this topic: with the flag MULTI_TAGS if the topic has multi tags."""
        if not self.has_multi_tags or not isinstance(message.sys_flag, int):  # what is no number is refused later
            return message
        return replace(message, sys_flag=message.sys_flag | SYS_FLAG_MULTI_TAGS)

    def attribute(self, name: str) -> str | None:
        """An attribute by its name, with or without the `+` that RocketMQ's tools put before it."""
        return self.attributes.get(name, self.attributes.get("+" + name))

    def altered(self, attributes: Mapping[str, str]) -> dict[str, str]:
        """The attributes of the topic with changes; a name keeps the spelling, with or without `+`, that it has."""
        attributes_now = dict(self.attributes)
        for name, value in attributes.items():
            attributes_now["+" + name if "+" + name in attributes_now else name] = value
        return attributes_now

    def to_fields(self) -> dict[str, Any]:
        """The fields as they are in the file."""
        own = {
            "attributes": dict(self.attributes),
            "order": self.order,
            "perm": self.perm,
            "readQueueNums": self.read_queue_nums,
            "topicFilterType": self.topic_filter_type,
            "topicName": self.topic_name,
            "topicSysFlag": self.topic_sys_flag,
            "writeQueueNums": self.write_queue_nums,
        }
        return {**self.others, **own}

    @classmethod
    def from_fields(cls, name: str, fields: dict[str, Any]) -> TopicConfig:
        """Read the fields of the file. A wrong field is a `ValueError`, `TypeError` or `AttributeError`."""
        others = dict(fields)
        topic = cls(name)
        attributes = others.pop("attributes", None) or {}
        others.pop("topicName", None)  # as in RocketMQ, the name in the table decides
        return cls(
            topic_name=name,
            read_queue_nums=int(others.pop("readQueueNums", topic.read_queue_nums)),
            write_queue_nums=int(others.pop("writeQueueNums", topic.write_queue_nums)),
            perm=int(others.pop("perm", topic.perm)),
            topic_sys_flag=int(others.pop("topicSysFlag", topic.topic_sys_flag)),
            order=str(others.pop("order", topic.order)).lower() == "true",
            topic_filter_type=str(others.pop("topicFilterType", topic.topic_filter_type)),
            attributes={str(key): str(value) for key, value in attributes.items()},
            others=others,
        )


class Topics(ConfigTable[str, TopicConfig]):
    """`config/topics.json` of one store.

    Parameters
    ----------
    disk : Disk
    root : str
        The store.
    """

    def __init__(self, disk: Disk, root: str) -> None:
        super().__init__(
            ConfigFile(
                disk,
                root,
                "topics.json",
                "topicConfigTable",
                via="new-topics.json",
                meaning="the broker's table of topics",
                hint="Restore it from a copy. If you move it away instead, all topics get the default settings.",
            )
        )

    def _parsed(self, table: dict[str, Any]) -> dict[str, TopicConfig]:
        return {name: TopicConfig.from_fields(name, fields) for name, fields in table.items()}

    def _fields(self, row: TopicConfig) -> dict[str, Any]:
        return row.to_fields()

    # ---- topics

    @property
    def names(self) -> list[str]:
        """All topics, sorted."""
        return sorted(self._rows)

    @property
    def with_multi_tags(self) -> frozenset[str]:
        """The topics whose messages have the flag MULTI_TAGS."""
        return frozenset(name for name, topic in self._rows.items() if topic.has_multi_tags)

    def get(self, name: str) -> TopicConfig | None:
        """The topic, or None."""
        return self._rows.get(name)

    def create(
        self,
        name: str,
        queue_nums: int,
        *,
        read_queue_nums: int | None = None,
        perm: int = PERM_READ_WRITE,
        order: bool = False,
        attributes: Mapping[str, str] | None = None,
    ) -> TopicConfig:
        """Add a topic; `save` writes it. Without `read_queue_nums`, it has as many queues to read as to write.

        Raises
        ------
        MessageIllegalError
            The name is not legal.
        ConfigError
            The topic exists, or the count is not allowed.
        """
        fault = topic_fault(name)
        if fault is not None:
            raise MessageIllegalError(f"topic: {fault}", field="topic")
        if name in self._rows:
            raise ConfigError(
                f"topic {name!r} exists already. Alter it, or choose another name", key="topic", value=name
            )

        return self._put(
            TopicConfig(
                name,
                read_queue_nums=queue_nums if read_queue_nums is None else read_queue_nums,
                write_queue_nums=queue_nums,
                perm=perm,
                order=order,
                attributes={} if attributes is None else dict(_checked(name, attributes)),
            )
        )

    def alter(
        self,
        name: str,
        *,
        read_queue_nums: int | None = None,
        write_queue_nums: int | None = None,
        perm: int | None = None,
        order: bool | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> TopicConfig:
        """Change the given fields and attributes of a topic; `save` writes them.

        Raises
        ------
        UnknownTopicError
        ConfigError
            A value is not allowed.
        """
        topic = self._rows.get(name)
        if topic is None:
            raise UnknownTopicError(name, self._rows)

        return self._put(
            replace(
                topic,
                read_queue_nums=topic.read_queue_nums if read_queue_nums is None else read_queue_nums,
                write_queue_nums=topic.write_queue_nums if write_queue_nums is None else write_queue_nums,
                perm=topic.perm if perm is None else perm,
                order=topic.order if order is None else order,
                attributes=topic.attributes if attributes is None else topic.altered(_checked(name, attributes)),
            )
        )

    def remove(self, name: str) -> None:
        """Take a topic away, which need not be there; `save` writes the file without it."""
        self._remove(name)

    def _put(self, topic: TopicConfig) -> TopicConfig:
        for key, value, least, most in (
            ("writeQueueNums", topic.write_queue_nums, 1, MAX_QUEUE_COUNT),
            ("readQueueNums", topic.read_queue_nums, 1, MAX_QUEUE_COUNT),
            ("perm", topic.perm, 0, _MAX_PERM),
        ):
            if type(value) is not int or not least <= value <= most:
                message = f"topic {topic.topic_name!r}: {key}: found {value!r}; allowed is {least} to {most}"
                raise ConfigError(message, key=key, value=value)
        arguments.true_or_false(f"topic {topic.topic_name!r}: order", topic.order)
        self._rows[topic.topic_name] = topic
        self._changed[topic.topic_name] = topic
        return topic

    def is_simple_queue(self, name: str) -> bool:
        """Whether the topic has RocketMQ's simple queues, with one unit per message; an unknown topic has."""
        topic = self._rows.get(name)
        if topic is None or not topic.attributes:
            return True
        return topic.attribute(QUEUE_TYPE) in (None, SIMPLE_QUEUE)

    def is_compacted(self, name: str) -> bool:
        """Whether a broker keeps the topic's last message of each key in files of its own, which consumers read."""
        topic = self._rows.get(name)
        if topic is None or not topic.attributes:
            return False
        return (topic.attribute(CLEANUP_POLICY) or "").upper() == COMPACTION


def queue_nums_again(topic: str, queue_id: int) -> int:
    """How many queues a topic gets that was deleted, and is made again for a message of this queue."""
    return max(1 if topic.startswith(GROUP_TOPIC_PREFIXES) else DEFAULT_QUEUE_NUMS, queue_id + 1)


def _checked(topic: str, attributes: object) -> Mapping[str, str]:
    """Return attributes, after a check that all names and values are text."""
    name = f"topic {topic!r}: attributes"
    if not isinstance(attributes, Mapping):
        raise arguments.refused(name, attributes, "a mapping of text to text")
    for key, value in attributes.items():
        if not isinstance(key, str) or not key or not isinstance(value, str):
            raise arguments.refused(name, {key: value}, "a mapping of text to text")
    return attributes
