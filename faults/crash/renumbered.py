"""Brokers that die and restore deleted topics: queues whose units have other numbers than their records.

Each history has two parts. In the first part a broker puts, deletes topics, creates them again and is killed; its own
recovery gives units to the records of all lives of a topic, by RocketMQ's rules (`Broker.recover`). Between its
sessions, our writers put and commit. In the second part no topic is deleted, and a stream reads along. After each
session, the queues must hold what RocketMQ's rules say, each message once, in order and at its place, for every way of
reading.

This is the kind `brought back` of the mode `fuzz`: named cases.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from crash.harness import SMALL, die
from crash.imitate import Broker, units, walk
from crash.judge import Verdict
from crash.surprises import Stream
from messagestore import BatchRequest, Message, MessageStore, StoreError
from messagestore.inspect.verify import verify
from small import columns

TOPICS = ("t", "u")
HISTORIES = 12
Queue = tuple[str, int]
Queues = dict[Queue, list[bytes]]


def on_disk(root: Path) -> Queues:
    """Return the records to which the units of the queues point, read without the store's code."""
    bodies = {record["physical_offset"]: record["body"] for record in walk(root)[0]}
    return {
        (topic, queue_id): [bodies[place] for place, _, _ in found]
        for topic in TOPICS
        for queue_id in (0, 1)
        if (found := units(root, topic, queue_id))
    }


def in_log(root: Path, key: Queue) -> list[bytes]:
    """Return the records of a queue, from all lives of its topic."""
    return [record["body"] for record in walk(root)[0] if (record["topic"], record["queue_id"]) == key]


def shown(store: MessageStore, fault: Callable[[str], None]) -> Queues:
    """Return what a reader shows of the queues; each way of reading must show the same."""
    found: Queues = {}
    for topic, queue_ids in store.topics().items():
        for queue_id in queue_ids if topic in TOPICS else ():
            low, high = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
            if low == high:
                continue

            messages = store.get_message(topic, queue_id, low, high).messages
            rows = [
                (row["queue_offset"], row["body"])
                for batch in store.read(topic, queue_id, low, columns=("queue_offset", "body"))
                for row in batch.to_pylist()
            ]

            if [(m.queue_offset, bytes(m.body)) for m in messages] != rows:
                fault(f"{topic}/{queue_id}: get_message and read differ")
            if [number for number, _ in rows] != list(range(low, high)):
                fault(f"{topic}/{queue_id}: {low} to {high} is numbered {[number for number, _ in rows]}")
            if any(store.get_message(topic, queue_id, number, 1).messages[0].body != body for number, body in rows):
                fault(f"{topic}/{queue_id}: a message is not at its number")

            found[topic, queue_id] = [body for _, body in rows]
    return found


class World:
    """A store, what its queues must hold, and what was wrong so far."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.root, self.chance, self.verdict = folder / "store", chance, Verdict()
        self.root.mkdir(parents=True)
        self.numbers = iter(range(1 << 30))
        self.wanted: Queues = {}
        self.now_ms = 0
        self.versions = iter(range(1 << 30))

    def body(self) -> bytes:
        return b"%d/" % next(self.numbers) + b"." * self.chance.randrange(300)

    def fault(self, text: str) -> None:
        self.verdict.misread.append(text)

    def compare(self, who: str, found: Queues) -> None:
        """Check that each queue holds what it must.

        A deleted queue, which may come back, must hold records of the log in their order.
        """
        for key in sorted(found.keys() | self.wanted.keys()):
            have = found.get(key, [])
            wanted = self.wanted.get(key)
            if wanted is None:
                there = set(have)
                wanted = [body for body in in_log(self.root, key) if body in there]
            if have == wanted:
                continue
            self.verdict.lost += [f"{who}: {key}: {body[:8]!r}" for body in wanted if body not in have]
            self.verdict.duplicated += [f"{who}: {key}: {body[:8]!r}" for body in set(have) if have.count(body) > 1]
            self.fault(f"{who}: {key}: {[b[:6] for b in have]}, wanted {[b[:6] for b in wanted]}")

    # ---- sessions

    def broker(self, *, deletes: bool, end: str) -> None:
        """Run a session of a broker, which ends `closed`, `killed`, or killed with its queues `behind`."""
        chance = self.chance
        broker = Broker(self.root, SMALL)
        broker.now_ms = self.now_ms = max(self.now_ms, broker.now_ms) + 10_000
        broker.recover()
        self.wanted = on_disk(self.root)

        steps = chance.randrange(1, 25)
        behind = max(1, steps - chance.randrange(1, 6)) if end == "behind" else steps
        for number in range(steps):
            there = sorted({topic for topic, _ in self.wanted})
            if deletes and there and 0 < number < behind and chance.random() < 0.15:
                topic = chance.choice(there)
                self.forget_name(topic)
                broker.delete_topic(topic)
                self.wanted = {key: bodies for key, bodies in self.wanted.items() if key[0] != topic}
                continue

            key = (chance.choice(TOPICS), chance.randrange(2))
            if number >= behind and key not in self.wanted:
                continue

            body = self.body()
            broker.now_ms = self.now_ms = self.now_ms + 5000
            broker.put(key[0], body, key[1], unit=number < behind)
            self.wanted.setdefault(key, []).append(body)

        if not deletes and chance.random() < 0.5:
            broker.checkpoint()
        if end == "closed":
            broker.close()

    def forget_name(self, topic: str) -> None:
        """Remove a topic's name, as a broker does before it deletes the folder."""
        path = self.root / "config" / "topics.json"
        if path.exists():
            table = json.loads(path.read_text())
            table["topicConfigTable"].pop(topic, None)
            path.write_text(json.dumps(table))

    def ours(self, *, end: str) -> None:
        """Let a writer take over, put, commit and end; readers read before, meanwhile and after."""
        root = self.root
        if (root / "commitlog").exists() and not (root / "abort").exists():
            with MessageStore.open_read_only(root, SMALL) as store:
                self.compare("before", shown(store, self.fault))

        store = MessageStore.open(root, SMALL)
        found = shown(store, self.fault)
        self.compare("taken over", found)
        self.wanted = {key: found[key] for key in found}

        for _ in range(self.chance.randrange(1, 6)):
            topic = self.chance.choice(TOPICS)
            if self.chance.random() < 0.6:
                key, body = (topic, self.chance.randrange(2)), self.body()
                result = store.put_message(Message(topic, body, queue_id=key[1]))
                if result.queue_offset != len(self.wanted.get(key, [])):
                    self.fault(f"{key}: put at {result.queue_offset}")
                self.wanted.setdefault(key, []).append(body)
            else:
                bodies = [self.body() for _ in range(4)]
                store.append_batch(columns(bodies, topic=topic), BatchRequest("app", next(self.versions)))
                for number, body in enumerate(bodies):
                    self.wanted.setdefault((topic, number % 2), []).append(body)

            if self.chance.random() < 0.3:
                store.writer.publish()

        if end == "closed":
            store.close()
        else:
            store.writer.publish()
            die(root)

        with MessageStore.open_read_only(root, SMALL) as view:
            self.compare("read", shown(view, self.fault))

        report = verify(root, SMALL)
        if not report.ok:
            self.fault(f"verify: {report.findings[:2]}")
        self.now_ms = max(self.now_ms, *(record["store_timestamp_ms"] for record in walk(root)[0]))


def history(folder: Path, chance: random.Random) -> Verdict:
    """Run one random history."""
    world = World(folder, chance)
    try:
        if chance.random() < 0.5:
            world.ours(end=chance.choice(["closed", "killed"]))

        for _ in range(chance.randrange(1, 4)):
            for _ in range(chance.randrange(1, 5)):
                world.broker(deletes=True, end=chance.choice(["killed", "killed", "behind", "closed"]))
            world.ours(end=chance.choice(["closed", "killed"]))

        with MessageStore.open(world.root, SMALL) as store:
            for topic in TOPICS:
                body = world.body()
                store.put_message(Message(topic, body, queue_id=0))
                world.wanted.setdefault((topic, 0), []).append(body)

        stream = Stream(world.root, lenient=False)
        for _ in range(chance.randrange(1, 5)):
            if chance.random() < 0.5:
                world.broker(deletes=False, end=chance.choice(["killed", "behind", "closed"]))
                world.ours(end="closed")
            else:
                world.ours(end=chance.choice(["closed", "killed"]))
            while stream.step(lambda: None, chance):
                pass

        world.ours(end="closed")
        while stream.step(lambda: None, chance):
            pass
        check_stream(world, stream)
    except (StoreError, ValueError, AssertionError) as error:
        world.fault(f"{type(error).__name__}: {error}")
    return world.verdict


def check_stream(world: World, stream: Stream) -> None:
    """Check that a stream delivers each message of the queues once, and the messages of a queue in order."""
    wanted = [body for bodies in world.wanted.values() for body in bodies]
    world.verdict.lost += [f"stream: {body[:8]!r}" for body in set(wanted) - set(stream.delivered)]
    world.verdict.duplicated += [f"stream: {b[:8]!r}" for b in set(stream.delivered) if stream.delivered.count(b) > 1]
    for key, bodies in world.wanted.items():
        there = set(bodies)
        if [body for body in stream.delivered if body in there] != bodies:
            world.fault(f"stream: {key} is out of order")


def histories(folder: Path, chance: random.Random, count: int) -> Iterator[Verdict]:
    for number in range(count):
        yield history(folder / f"history-{number}", chance)


def many(folder: Path) -> None:
    """Run the named case: `HISTORIES` histories."""
    for number in range(HISTORIES):
        verdict = history(folder / f"history-{number}", random.Random(number))
        assert verdict.ok, f"history {number}: {verdict}"


CASES: dict[str, Callable[[Path], None]] = {"deleted topics that a broker brought back": many}
