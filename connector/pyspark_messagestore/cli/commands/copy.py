"""`messagestore copy`: topics of brokers that run, as an archive on this machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from threading import Event
from typing import Annotated

import typer

from messagestore import ConfigError, MessageStore, UnknownTopicError
from messagestore.inspect import operator
from messagestore.spi import STORES, Location, brokers_of, check_topic
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import (
    ConfigFile,
    From,
    Json,
    Wait,
    by_location,
    config_of,
    looking,
    path_of,
)
from pyspark_messagestore.cli.copying import Origin, Step, TopicCopy, copied_topics, names_of
from pyspark_messagestore.cli.cursor import queue_ids
from pyspark_messagestore.cli.services import told_to_end
from pyspark_messagestore.words import time_ms

PLACE = 345
PANEL = "Care"

_LOOK_S = 5.0
"""How often a copy that follows looks for new brokers, and for topics on them."""
_WAIT_S = 0.2
"""How long all brokers together are waited for before a look at all of them."""


@by_location
def copy(
    root: Location,
    topics: Annotated[str, typer.Argument(metavar="TOPIC[,TOPIC...]", help="The topics to copy.", show_default=False)],
    archive: Annotated[
        str,
        typer.Argument(
            metavar="ARCHIVE",
            help="The root folder of the archive. A missing or empty folder becomes a store.",
            show_default=False,
        ),
    ],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="Where a topic begins that was not copied before: earliest, latest, or a time of storing such as "
            "2026-01-31T12:00:00Z, -2h, or milliseconds since 1970.",
        ),
    ] = From.EARLIEST,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Copy new messages as they arrive, until Ctrl-C or SIGTERM.")
    ] = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="If messages are gone that were not copied, or the other log was cut or made again, say so and go on. "
            "Without it, that is an error.",
        ),
    ] = False,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Copy topics of RocketMQ's brokers into an archive, each message once, with the broker, queue and offset that it
    had. ROOT is the address of name servers, as in rocketmq://ns1:9876, or another store. Without --follow, the copy
    ends where the queues end when it begins. One that was stopped or killed goes on where it was when it is run again.
    """
    names = list(dict.fromkeys(name for name in topics.split(",") if name))
    for name in names or [topics]:
        check_topic(name)
    begin = From(start) if start in tuple(From) else time_ms("--from", start)
    path = path_of(archive)
    if not root.is_remote and os.path.realpath(root) == os.path.realpath(path):
        raise ConfigError(
            f"ARCHIVE: found {path}, which is the store that is copied; allowed is another folder", key="ARCHIVE"
        )

    config = config_of(store_config, lock_timeout=wait)
    totals: dict[tuple[str, str], Step] = defaultdict(Step)
    with told_to_end() as ends, contextlib.ExitStack() as stack:
        _check_topics(root, names)
        is_new = not operator.holds_store(path)
        store = stack.enter_context(MessageStore.open(path, config))
        if is_new:
            out.note(f"created a new store in {os.path.abspath(path)}")
        copying = _Copying(root, names, store, path, begin, stack, follow=follow, accept_loss=accept_loss)
        copying.look()
        show_progress = stack.enter_context(out.progress_bar("copying"))
        for origin, topic_copy, step in copying.steps(ends):
            totals[origin.name, topic_copy.topic].add(step)
            if as_json:
                _show(topic_copy, step)
            if show_progress is not None:
                size = sum(total.size for total in totals.values())
                mean_size = size / max(1, sum(total.messages for total in totals.values()))
                count_left = sum(source.left for source in copying.origins.values())
                show_progress(size, size + int(count_left * mean_size))

    if not as_json:
        _table(copying, totals)


class _Copying:
    """The brokers that are copied, and the topics on them."""

    def __init__(
        self,
        root: Location,
        topics: list[str],
        archive: MessageStore,
        path: str,
        start: From | int,
        stack: contextlib.ExitStack,
        *,
        follow: bool,
        accept_loss: bool,
    ) -> None:
        self.root, self.topics, self.archive, self.start = root, topics, archive, start
        self.follow, self.accept_loss = follow, accept_loss
        self.origins: dict[str, Origin] = {}
        self.look_at_s = 0.0
        self._stack, self._path = stack, path

    def steps(self, ends: Event) -> Iterator[tuple[Origin, TopicCopy, Step]]:
        """Copy step by step: until all is copied, or with `follow` until somebody wants it to end."""
        while not ends.is_set():
            is_idle = True
            for origin in self.origins.values():
                for topic_copy, step in origin.round():
                    is_idle = False
                    yield origin, topic_copy, step
                    if ends.is_set():
                        break
            if is_idle and not self.follow:
                return
            if is_idle:
                self.await_change()
            if self.follow and time.monotonic() >= self.look_at_s:
                self.look()

    def look(self) -> None:
        """Add the brokers, and topics on them, that were not there before."""
        self.look_at_s = time.monotonic() + _LOOK_S
        begun = copied_topics(self._path)
        parts = brokers_of(self.root, self.topics) if self.root.is_cluster else {"": self.root}
        for name, location in parts.items():
            if name not in self.origins:
                reader = self._stack.enter_context(contextlib.closing(STORES.reader(location, looking())))
                names = [name] if name else names_of(reader)
                origin = Origin(self.archive, reader, names, accept_loss=self.accept_loss)
                self.origins[name] = origin
            for fresh in self.origins[name].add(self.topics, self.start, begun, follow=self.follow):
                queues = {queue_id: offset for (_, queue_id), offset in sorted(fresh.place.queues.items())}
                out.note(f"{fresh.name}: {fresh.topic} is copied from {_words(queues)} on")

    def await_change(self) -> None:
        """Wait until there may be something new."""
        for origin in self.origins.values():
            origin.reader.await_change(_WAIT_S / len(self.origins))


def _words(queues: dict[int, int]) -> str:
    offsets = set(queues.values())
    if len(offsets) <= 1:
        return f"message {max(offsets, default=0)}"
    return "messages " + ", ".join(f"{offset} (queue {queue_id})" for queue_id, offset in queues.items())


def _check_topics(root: Location, topics: list[str]) -> None:
    """Refuse a topic that the origin does not have, before an archive is made.

    Raises
    ------
    UnknownTopicError
        No broker has it.
    """
    if not root.is_cluster:
        with contextlib.closing(STORES.reader(root, looking())) as reader:
            for topic in topics:
                queue_ids(reader, topic)
        return
    for topic in topics:
        if not brokers_of(root, [topic]):
            raise UnknownTopicError(topic, None, f"No broker of {root} has it. `messagestore topics` shows them all")


def _show(copy: TopicCopy, step: Step) -> None:
    out.json_line(
        {
            "brokerName": copy.name,
            "topic": copy.topic,
            "messages": step.messages,
            "bytes": step.size,
            "lost": step.lost,
        }
    )


def _table(copying: _Copying, totals: dict[tuple[str, str], Step]) -> None:
    rows = []
    for origin in copying.origins.values():
        for topic in origin.copies:
            total = totals[origin.name, topic]
            rows.append((origin.name, topic, f"{total.messages:,}", out.size_words(total.size), f"{total.lost:,}"))
    titles = (("broker", False), ("topic", False), ("messages copied", True), ("size", True), ("lost", True))
    out.table(titles, rows)
