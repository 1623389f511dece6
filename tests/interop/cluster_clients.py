"""RocketMQ's own producers and consumers of a cluster, in a JVM: what they send and receive, every field of it.

with Clients(driver, names) as clients:
    producer = clients.producer()
    producer.send("flights", [message(b"UA1545", tags="UA", keys="N14228")])
    consumer = clients.push("flights")
    consumer.received(1)                             # waits until there is one; dicts with all fields
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from interop.java_store import Driver
from interop.real_broker import NameServer

WAIT_S = 120
_NUMBERS = itertools.count(1)


def message(body: bytes, **fields: Any) -> dict[str, Any]:
    """A message to send; other fields are tags, keys, flag, delay and properties."""
    return {"body": base64.b64encode(body).decode(), **fields}


@dataclass
class Client:
    """One producer or consumer."""

    driver: Driver
    name: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    """What a consumer has received."""

    def act(self, action: str, **arguments: Any) -> Any:
        return self.driver.call("cluster", action=action, name=self.name, **arguments)

    def send(self, topic: str, messages: Sequence[dict[str, Any]], **how: Any) -> list[dict[str, Any]]:
        """Send messages one by one; with `batch=True` as one batch, with `order="key"` all to the key's queue, and with
        `state="COMMIT_MESSAGE"` each in a transaction."""
        answers: list[dict[str, Any]] = self.act("send", topic=topic, messages=list(messages), **how)
        return answers

    def take(self) -> list[dict[str, Any]]:
        """All that a push consumer has received until now."""
        while some := self.act("received", **{"from": len(self.messages)}):
            self.messages += [_with_bytes(one) for one in some]
        return self.messages

    def received(self, count: int) -> list[dict[str, Any]]:
        """Wait until a push consumer has received as many."""
        until_s = time.monotonic() + WAIT_S
        while self.act("count") < count:
            assert time.monotonic() < until_s, f"{self.act('count')} of {count} messages"
            time.sleep(0.1)
        return self.take()

    def polled(self, count: int) -> list[dict[str, Any]]:
        """Poll with a lite-pull consumer until it has received as many."""
        until_s = time.monotonic() + WAIT_S
        while len(self.messages) < count:
            assert time.monotonic() < until_s, f"{len(self.messages)} of {count} messages"
            self.messages += [_with_bytes(one) for one in self.act("poll", ms=500)]
        return self.messages


def _with_bytes(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "body": base64.b64decode(one["body"])}


class Clients:
    """All clients of a test, which are stopped at its end."""

    def __init__(self, driver: Driver, names: NameServer, **credentials: str) -> None:
        self._driver, self._names, self._credentials = driver, names, credentials
        self._started: list[Client] = []

    def _start(self, kind: str, group: str, **arguments: Any) -> Client:
        client = Client(self._driver, f"{kind}-{next(_NUMBERS)}")
        self._started.append(client)
        client.act("start", kind=kind, group=group, names=str(self._names), **self._credentials, **arguments)
        return client

    def producer(self, group: str = "producers") -> Client:
        return self._start("producer", group)

    def push(self, topic: str, group: str = "pushed") -> Client:
        return self._start("push", group, topic=topic)

    def lite_pull(self, topic: str, group: str = "pulled") -> Client:
        return self._start("litePull", group, topic=topic)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in reversed(self._started):
            if self._driver.process.poll() is None:
                client.act("stop")
