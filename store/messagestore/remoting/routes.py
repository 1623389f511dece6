"""What name servers know: on which brokers a topic lies, and which topics there are.

RocketMQ's servers write maps with whole numbers as keys (`{0:"10.0.0.1:10911"}`), which is no JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from messagestore.errors import ProtocolError
from messagestore.format.json_text import bounded_json
from messagestore.remoting.connection import Answer

MASTER_ID = 0
PERM_READ, PERM_WRITE = 4, 2
_MOST_VALUES = 4_000_000
_TEXT_OR_KEY = re.compile(r'("(?:[^"\\]|\\.)*")|([{,]\s*)(-?\d+)(?=\s*:)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Broker:
    """A master and its slaves.

    Parameters
    ----------
    name : str
        `brokerName`, which they share.
    addresses : dict of int to str
        `host:port` by broker id.
    cluster : str
    """

    name: str
    addresses: dict[int, str]
    cluster: str = ""

    @property
    def master(self) -> str | None:
        """The address of the master; None: it is down, or not registered."""
        return self.addresses.get(MASTER_ID)

    @property
    def slaves(self) -> list[str]:
        """The addresses of the slaves, by their ids."""
        return [address for broker_id, address in sorted(self.addresses.items()) if broker_id != MASTER_ID]


@dataclass(frozen=True, slots=True)
class QueueData:
    """What a broker has of a topic.

    Parameters
    ----------
    broker_name : str
    read_queue_nums, write_queue_nums : int
        Queues 0 to n - 1 are read, and written.
    perm : int
        `PERM_READ`, `PERM_WRITE`.
    topic_sys_flag : int
    """

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_sys_flag: int = 0

    @property
    def is_readable(self) -> bool:
        """Whether consumers may read it."""
        return bool(self.perm & PERM_READ)

    @property
    def is_writable(self) -> bool:
        """Whether producers may write it."""
        return bool(self.perm & PERM_WRITE)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a topic lies (RocketMQ's TopicRouteData).

    Parameters
    ----------
    brokers : dict of str to Broker
        By their names.
    queues : dict of str to QueueData
        By the names of the brokers.
    """

    brokers: dict[str, Broker] = field(default_factory=dict)
    queues: dict[str, QueueData] = field(default_factory=dict)


def json_of(answer: Answer) -> Any:
    """The body of an answer that RocketMQ's servers have written as JSON, with numbers as keys where they like.

    Raises
    ------
    ProtocolError
        It cannot be read.
    """
    try:
        text = _TEXT_OR_KEY.sub(_quoted, str(answer.body, "utf-8"))
        return bounded_json(text, _MOST_VALUES)
    except ValueError as error:
        raise ProtocolError(f"{answer.address}: found an answer whose body is no JSON: {error}") from None


def _quoted(match: re.Match[str]) -> str:
    return match[1] or f'{match[2]}"{match[3]}"'


def route_of(answer: Answer) -> Route:
    """The route in an answer to GET_ROUTEINFO_BY_TOPIC.

    Raises
    ------
    ProtocolError
        It cannot be read.
    """
    data = json_of(answer)
    try:
        return Route(
            brokers_of(data["brokerDatas"]),
            {
                str(row["brokerName"]): QueueData(
                    str(row["brokerName"]),
                    int(row["readQueueNums"]),
                    int(row["writeQueueNums"]),
                    int(row["perm"]),
                    int(row.get("topicSysFlag", 0)),
                )
                for row in data["queueDatas"]
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"{answer.address}: found a route that cannot be read: {error!r}") from None


def brokers_of(rows: list[dict[str, Any]]) -> dict[str, Broker]:
    """Brokers by their names, from the rows of an answer."""
    return {
        str(row["brokerName"]): Broker(
            str(row["brokerName"]),
            {int(broker_id): str(address) for broker_id, address in row["brokerAddrs"].items()},
            str(row.get("cluster", "")),
        )
        for row in rows
    }
