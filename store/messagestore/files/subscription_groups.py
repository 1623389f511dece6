"""`config/subscriptionGroup.json`: the broker's settings of its consumer groups.

The file is the broker's own (`SubscriptionGroupManager.java`). A group that is not in it has RocketMQ's defaults, and
gets an entry when its first consumer asks a broker. Of the settings, this project uses `retryMaxTimes` and
`retryQueueNums`, for messages that are sent back; it keeps all the others.

    "subscriptionGroupTable":{"flights":{"consumeEnable":true,"retryMaxTimes":16,"retryQueueNums":1,...}}

Threads: one. Processes: `save` is called under the writer lock, and `load` before it, so that what another process
changed stays.
Source: RocketMQ remoting/protocol/subscription/SubscriptionGroupConfig.java.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from messagestore.errors import ConfigError
from messagestore.files.config_file import ConfigFile
from messagestore.files.config_table import ConfigTable
from messagestore.files.disk import Disk
from messagestore.format import arguments
from messagestore.format.message import MAX_QUEUE_ID, check_group

_MOST_TIMES = (1 << 31) - 1
_NUMBERS = {"retry_max_times": ("retryMaxTimes", _MOST_TIMES), "retry_queue_nums": ("retryQueueNums", MAX_QUEUE_ID + 1)}


@dataclass(frozen=True, slots=True)
class SubscriptionGroupConfig:
    """The settings of a consumer group, as RocketMQ's SubscriptionGroupConfig.

    Parameters
    ----------
    group_name : str
    consume_enable : bool
        Whether a broker gives messages to the group. This project's own readers ignore it.
    retry_max_times : int
        A message that was sent back so many times goes to the group's dead-letter topic.
    retry_queue_nums : int
        The number of queues of the group's retry topic, when it is created. With 0, a broker drops what is sent back.
    others : dict
        Fields of the file that this project does not use; they are written back.
    """

    group_name: str
    consume_enable: bool = True
    retry_max_times: int = 16
    retry_queue_nums: int = 1
    others: dict[str, Any] = field(default_factory=dict)

    def to_fields(self) -> dict[str, Any]:
        """The fields as they are in the file."""
        own = {
            "consumeEnable": self.consume_enable,
            "groupName": self.group_name,
            "retryMaxTimes": self.retry_max_times,
            "retryQueueNums": self.retry_queue_nums,
        }
        return {**self.others, **own}

    @classmethod
    def from_fields(cls, name: str, fields: dict[str, Any]) -> SubscriptionGroupConfig:
        """Read the fields of the file. A wrong field is a `ValueError` or `AttributeError`."""
        default, others = cls(name), dict(fields.items())
        others.pop("groupName", None)  # as in RocketMQ, the name in the table decides
        enable = others.pop("consumeEnable", default.consume_enable)
        if type(enable) is not bool:
            raise ValueError(f"consumeEnable {enable!r} of group {name!r}")
        numbers = {attribute: others.pop(key, getattr(default, attribute)) for attribute, (key, _) in _NUMBERS.items()}
        for attribute, number in numbers.items():
            if type(number) is not int or not -(1 << 31) <= number < 1 << 31:
                raise ValueError(f"{_NUMBERS[attribute][0]} {number!r} of group {name!r}")
        return cls(name, consume_enable=enable, others=others, **numbers)


class SubscriptionGroups(ConfigTable[str, SubscriptionGroupConfig]):
    """`config/subscriptionGroup.json` of one store.

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
                "subscriptionGroup.json",
                "subscriptionGroupTable",
                via="new-subscription-group.json",
                meaning="the broker's table of consumer groups",
                hint="Restore it from a copy. If you move it away instead, all groups get the default settings.",
                only_in_files=True,
            )
        )

    def _parsed(self, table: dict[str, Any]) -> dict[str, SubscriptionGroupConfig]:
        return {name: SubscriptionGroupConfig.from_fields(name, fields) for name, fields in table.items()}

    def _fields(self, row: SubscriptionGroupConfig) -> dict[str, Any]:
        return row.to_fields()

    # ---- groups

    @property
    def names(self) -> list[str]:
        """All groups in the file, sorted."""
        return sorted(self._rows)

    def get(self, name: str) -> SubscriptionGroupConfig | None:
        """The group, or None if the file does not name it."""
        return self._rows.get(name)

    def create(self, name: str, **settings: int | bool | None) -> SubscriptionGroupConfig:
        """Add a group; `save` writes it. A setting that is None gets RocketMQ's default.

        Raises
        ------
        MessageIllegalError
            The name is not legal, or is one of the broker's own.
        ConfigError
            The group is there already, or a value is not allowed.
        """
        check_group(name)
        if name in self._rows:
            text = f"group {name!r} exists already. Alter it, or choose another name"
            raise ConfigError(text, key="group", value=name)
        return self._put(SubscriptionGroupConfig(name), settings)

    def alter(self, name: str, **settings: int | bool | None) -> SubscriptionGroupConfig:
        """Change the settings that are not None; `save` writes them.

        Raises
        ------
        ConfigError
            The file does not name the group, or a value is not allowed.
        """
        group = self._rows.get(name)
        if group is None:
            groups = ", ".join(map(repr, self.names[:8])) or "none"
            raise ConfigError(
                f"group {name!r} has no settings in config/subscriptionGroup.json; groups that have: {groups}"
                f"{', ...' if len(self._rows) > 8 else ''}. Create it first",
                key="group",
                value=name,
            )
        return self._put(group, settings)

    def _put(self, group: SubscriptionGroupConfig, settings: dict[str, int | bool | None]) -> SubscriptionGroupConfig:
        changes: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        what = f"group {group.group_name!r}"
        for name, value in changes.items():
            if name not in _NUMBERS:
                arguments.true_or_false(f"{what}: consumeEnable", value)
                continue
            key, most = _NUMBERS[name]
            if type(value) is not int or not 0 <= value <= most:
                raise ConfigError(f"{what}: {key}: found {value!r}; allowed is 0 to {most}", key=key, value=value)
        self._rows[group.group_name] = self._changed[group.group_name] = made = replace(group, **changes)
        return made
