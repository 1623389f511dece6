"""Histories in which the numbers of a queue go back, one for each `WayBack`, for whatever remembers such a number."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from crash.imitate import Broker, walk
from messagestore import Message, MessageStore, StoreConfig
from messagestore.format.half_records import HALF_TOPIC, OP_TOPIC
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.log.remembered import WayBack
from small import SMALL, ClockDisk

NOW_MS = 1_795_170_401_381
CONFIG = SMALL.replace(
    mapped_file_size_commit_log=4096, max_message_size=2048, message_delay_level="1s 5s", flush_delay_offset_interval=1
)
READ, LEFT = 12, 5
"""How far the queue was read, and how many of these messages there are after it was cut or restored."""
EVERY_WAY = pytest.mark.parametrize("way", list(WayBack), ids=lambda way: way.name)
BEHIND_THE_GROUP = pytest.mark.parametrize(
    "way", [way for way in WayBack if way is not WayBack.DELETED], ids=lambda way: way.name
)
"""The ways in which what a consumer group has read, and a broker's own topics, are still remembered."""
MORE = 20
"""How many messages follow then: more than were read, so that the number alone shows nothing."""


@dataclass
class History:
    """A queue whose numbers go back.

    Parameters
    ----------
    root : Path
    kind : str
        "plain": topic t; "delayed": level 1; "half": half messages, which are committed when they are remembered.
    remember : callable of (History, MessageStore)
        Reads, delivers or commits all messages of the queue, and lets something remember that.
    newer : tuple of str
        The files that are not restored with an older copy, relative to the root.
    """

    root: Path
    kind: str
    remember: Callable[[History, MessageStore], None]
    newer: tuple[str, ...] = ("config/consumerOffset.json", "config/delayOffset.json")

    def __post_init__(self) -> None:
        self.disk = ClockDisk(NOW_MS)
        self.config: StoreConfig = CONFIG
        self.count = 0

    @property
    def queue(self) -> tuple[str, int]:
        return {"plain": ("t", 0), "delayed": (SCHEDULE_TOPIC, 0), "half": (HALF_TOPIC, 0)}[self.kind]

    def open(self, **how: bool) -> MessageStore:
        return MessageStore.open(self.root, self.config, disk=self.disk, **how)

    def put(self, store: MessageStore, count: int) -> list[bytes]:
        """Put messages into the queue; their bodies."""
        bodies = [b"%s %d" % (self.kind.encode(), self.count + number) for number in range(count)]
        self.count += count
        for body in bodies:
            self.disk.now_ms += 1
            if self.kind == "half":
                store.half_message(Message("t", body, queue_id=0), "p")
            else:
                level = 1 if self.kind == "delayed" else 0
                store.put_message(Message("t", body, queue_id=0, delay_time_level=level))
        return bodies

    def fill(self, store: MessageStore, segments: int) -> None:
        """Begin so many new segments of the log with messages of another topic."""
        log = store.writer.log
        end = log.segment_of(store.writer.end.physical_offset) + segments * log.segment_size
        while store.writer.end.physical_offset <= end:
            store.put_message(Message("fill", b"." * 500, queue_id=0))

    def back(self, way: WayBack) -> int:
        """Let the numbers go back; where the queue ends then."""
        {
            WayBack.REBUILT: self._rebuilt,
            WayBack.LOSS_ACCEPTED: self._loss_accepted,
            WayBack.MADE_AGAIN: self._made_again,
            WayBack.DELETED: self._deleted,
            WayBack.OLDER_COPY: self._older_copy,
            WayBack.BROKER_CRASHED: self._broker_crashed,
        }[way]()
        with MessageStore.open_read_only(self.root, self.config) as view:
            end = view.max_offset(*self.queue) if self.queue[1] in view.topics().get(self.queue[0], ()) else 0
        assert end < READ, "the history is none"
        return end

    def expire(self) -> None:
        """Put messages, let them be remembered, and let retention take them all."""
        with self.open() as store:
            self.put(store, READ)
            self.remember(self, store)
            self.fill(store, 3)
        with self.open() as store:
            store.flush()
            end = store.writer.log.segment_of(store.writer.end.physical_offset)
            store.delete_expired_files(before_offset=end)
            assert store.min_offset(*self.queue) == store.max_offset(*self.queue) == READ

    def _rebuilt(self) -> None:
        self.expire()
        shutil.rmtree(self.root / "consumequeue")
        (self.root / "spark" / "ends").unlink()  # it names the next number
        with self.open():
            pass

    def _loss_accepted(self) -> None:
        with self.open() as store:
            self.put(store, LEFT)
            self.fill(store, 1)
            first = store.writer.end.physical_offset
            self.fill(store, 1)
            self.put(store, READ - LEFT)
            self.remember(self, store)
        for path in (self.root / "commitlog").iterdir():
            if int(path.name) > first:
                path.unlink()
        with self.open(accept_loss=True):
            pass

    def _made_again(self) -> None:
        with self.open() as store:
            self.put(store, READ)
            self.remember(self, store)
        broker = Broker(self.root, self.config)
        broker.now_ms = self.disk.now_ms
        broker.delete_topic(self.queue[0])
        if self.kind == "half":
            broker.delete_topic(OP_TOPIC)
        for number in range(2):
            key, places = f"KEY{number}", [("REAL_TOPIC", "t"), ("REAL_QID", "0")]
            properties = {
                "plain": [],
                "delayed": [("DELAY", "1"), *places],
                "half": [("TRAN_MSG", "true"), ("PGROUP", "p"), ("UNIQ_KEY", key), *places],
            }[self.kind]
            broker.put(self.queue[0], b"again %d" % number, properties=properties, unit=self.kind != "delayed")
            if self.kind == "delayed":  # its unit says when it is due
                place = walk(self.root)[0][-1]
                broker.unit(*self.queue, number, place["physical_offset"], place["size"], broker.now_ms + 1_000)
        broker.close()

    def _deleted(self) -> None:
        with self.open() as store:
            self.put(store, READ)
            self.remember(self, store)
        with self.open() as store:
            store.delete_topic(self.queue[0])
            for number in range(2):
                store.put_message(Message(self.queue[0], b"again %d" % number, queue_id=self.queue[1]))

    def _older_copy(self) -> None:
        copy = self.root.with_name("copy")
        with self.open() as store:
            self.put(store, LEFT)
        shutil.copytree(self.root, copy)
        with self.open() as store:
            self.put(store, READ - LEFT)
            self.remember(self, store)
        kept = {name: (self.root / name).read_bytes() for name in self.newer if (self.root / name).exists()}
        shutil.rmtree(self.root)
        shutil.copytree(copy, self.root)
        for name, data in kept.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_bytes(data)

    def _broker_crashed(self) -> None:
        self._older_copy()
        Broker(self.root, self.config).start()  # nothing of what it wrote is on the disk but its small files
