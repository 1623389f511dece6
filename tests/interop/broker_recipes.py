"""Random stores of a broker: what is put, deleted and made again, how the store ends, and what is taken away from it.

`recipe(seed)` is a pure function of its seed. It knows RocketMQ's rules and nothing of our recovery: `broker_stores.py`
carries a recipe out with the real Java store and compares what both stores make of the result.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from interop.java_build import LEGACY, VERSIONS

NOT_YET = frozenset({"topic taken", "queue taken", "file taken"})
"""Features of stores that our recovery does not treat as Java does so far."""
PREPARED, COMMIT, ROLLBACK, TRANSACTION_MASK = 0x4, 0x8, 0xC, 0xC
T0_MS = 1_700_000_000_000
LONG = 300
"""Steps of a session that is killed, if it lives that long."""
NEEDLE = b'{"messagestore":1,"app":'
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
STORE_HOSTS = ("127.0.0.1:10911", "10.1.2.3:10911", "[2001:db8::2]:10911")
KEYS = ("Aa", "BB", "AaAa", "BBBB", "k1", "k2", "polygenelubricants", "é😀", "a#b", "k\0z")
TAGS = ("Aa", "BB", "polygenelubricants", "中文", "zzzzzz", "A || B", "t\0t")

CLEAN = "clean"
DISPATCHED = "dispatched"
BEHIND = "behind"
TORN = "torn"
POWER = "power"
KILLED = "killed"
ENDS = (CLEAN, CLEAN, CLEAN, DISPATCHED, DISPATCHED, BEHIND, TORN, TORN, POWER)
"""How the last session ends: closed; dead after dispatch; dead with its queues behind; dead in the middle of a put;
without power in the middle of asynchronous puts."""


@dataclass(frozen=True)
class Put:
    """One message, in the words of `JavaStore.put`."""

    topic: str
    queue_id: int
    body: bytes
    properties: tuple[tuple[str, str], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()

    def for_java(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "queueId": self.queue_id,
            "body": base64.b64encode(self.body).decode(),
            "properties": [list(pair) for pair in self.properties],
            **dict(self.fields),
        }


@dataclass(frozen=True)
class PutBatch:
    """A MessageExtBatch."""

    topic: str
    queue_id: int
    messages: tuple[Put, ...]
    fields: tuple[tuple[str, Any], ...] = ()

    def for_java(self) -> dict[str, Any]:
        messages = [message.for_java() for message in self.messages]
        return {"topic": self.topic, "queueId": self.queue_id, "messages": messages, **dict(self.fields)}


@dataclass(frozen=True)
class Delete:
    """The broker's deleteTopic, once everything is dispatched."""

    topic: str


@dataclass(frozen=True)
class Session:
    """What happens between one start of the broker and its end."""

    steps: tuple[Put | PutBatch | Delete, ...]
    end: str
    behind: int = 0
    """With BEHIND and POWER: the step before which the queues and the index that are left were written."""
    cut: float = 0.0
    """With TORN and POWER: where, between the last acknowledged byte and the end, the bytes stop."""
    hole: bool = False
    """With POWER: what follows a hole of some pages did reach the disk."""


@dataclass(frozen=True)
class Recipe:
    seed: int
    version: str
    config: dict[str, object]
    sessions: tuple[Session, ...]
    taken: tuple[str, ...] = ()
    """What is taken away at the end: consumequeue, topic, queue, file, index, checkpoint."""
    abort: bool = False
    """A cleanly closed store gets an `abort` file, as after a start that was killed at once."""
    pick: float = 0.0
    """Which topic, queue or file is taken."""
    features: frozenset[str] = field(default=frozenset())

    @property
    def last(self) -> Session:
        return self.sessions[-1]


def recipe(seed: int, without: frozenset[str] = NOT_YET, *, killed: bool = False) -> Recipe:
    """The store of a seed: the first one of its generator that has none of the features in `without`.

    With `killed` its last session is long, and ends by SIGKILL at some moment.
    """
    rng = Random(seed)
    while True:
        made = _recipe(rng, seed, killed)
        if not made.features & without:
            return made


def light_recipe(seed: int) -> Recipe:
    """A store with multi-dispatch: some messages are in light queues, too. RocketMQ 5 only; nothing of it is torn."""
    made = recipe(3 * seed + seed % 2, NOT_YET | {POWER, TORN, BEHIND, "cut before"})
    light = (("INNER_MULTI_DISPATCH", "%LMQ%a,%LMQ%b"),)
    sessions = []
    for session in made.sessions:
        steps = [
            replace(step, properties=(*step.properties, *light))
            if isinstance(step, Put) and len(step.topic) <= 127 and number % 2
            else step
            for number, step in enumerate(session.steps)
        ]
        steps.append(Put("with light queues", 0, b"one at least", light))
        sessions.append(replace(session, steps=tuple(steps)))
    config = {**made.config, "enableLmq": "true", "enableMultiDispatch": "true"}
    return replace(made, config=config, sessions=tuple(sessions))


def _recipe(rng: Random, seed: int, killed: bool) -> Recipe:
    version = (*VERSIONS, LEGACY)[seed % 3]
    config = settings(rng, version)
    topics = topic_names(rng)
    if version == LEGACY:  # no V2 records; its store sends delayed messages by itself
        topics = sorted({topic[:127].replace(SCHEDULE_TOPIC, "%RETRY%group") for topic in topics})
    writer = _Writer(rng, topics, int(str(config["mappedFileSizeCommitLog"])), config["flushDiskType"] == "ASYNC_FLUSH")
    earlier = range(rng.choice([0, 0, 0, 1, 1, 2]))
    sessions = [writer.session(rng.choice([CLEAN, CLEAN, DISPATCHED, POWER])) for _ in earlier]
    if version == LEGACY:  # after a cut, 4.9 goes on behind its stale units, and dispatches nothing until it is there
        sessions = [replace(each, end=DISPATCHED) if each.end == POWER else each for each in sessions]
    sessions.append(writer.session(KILLED) if killed else writer.session(rng.choice(ENDS)))
    made = Recipe(seed, version, config, tuple(sessions), pick=rng.random())
    if rng.randint(0, 1):
        choices = ["consumequeue"] * 3 + ["topic", "topic", "queue", "queue", "index", "index", "checkpoint", "file"]
        made = replace(made, taken=tuple(sorted({rng.choice(choices) for _ in range(rng.choice([1, 1, 1, 2, 3]))})))
    made = replace(made, abort=made.last.end == CLEAN and rng.random() < 0.3)
    return replace(made, features=frozenset(features_of(made)))


def features_of(made: Recipe) -> Iterator[str]:
    """Names of what makes a recipe hard."""
    yield from (f"{what} taken" for what in made.taken)
    lives = set[str]()
    gone = set[str]()
    for session in made.sessions:
        for step in session.steps:
            if isinstance(step, Delete):
                yield "deleted"
                gone.add(step.topic)
                continue
            if step.topic in gone:
                yield "remade"
                if step.topic in lives:
                    yield "remade twice"
                gone.discard(step.topic)
                lives.add(step.topic)
            if len(step.topic) > 127:
                yield "V2"
            if isinstance(step, Put) and dict(step.fields).get("sysFlag", 0) & TRANSACTION_MASK in (PREPARED, ROLLBACK):
                yield "no unit"
            for message in step.messages if isinstance(step, PutBatch) else (step,):
                if step.topic == SCHEDULE_TOPIC and ("DELAY", "19") in message.properties:
                    yield "delay above 18"
                if any("\0" * 64 in value for _, value in message.properties):
                    yield "NULs"
    yield made.last.end
    if any(session.end == POWER for session in made.sessions[:-1]):
        yield "cut before"
    if made.last.end != CLEAN or made.abort:
        yield "killed"
        if "consumequeue" in made.taken:
            yield "consumequeue taken after a kill"


def settings(rng: Random, version: str) -> dict[str, object]:
    segment = rng.choice([16384, 16384, 20000, 32768, 65536, 131072])
    found: dict[str, object] = {
        "mappedFileSizeCommitLog": segment,
        "mappedFileSizeConsumeQueue": 20 * rng.choice([2, 3, 5, 16, 100, 1000]),
        "maxHashSlotNum": rng.choice([1, 7, 64, 500]),
        "maxIndexNum": rng.choice([400, 1000, 4000]),
        "maxMessageSize": 65536,
        "enabledAppendPropCRC": rng.choice(["false", "false", "true"]),
        "flushDiskType": rng.choice(["ASYNC_FLUSH", "ASYNC_FLUSH", "SYNC_FLUSH"]),
    }
    by_channel = rng.choice(["true", "false"])
    if version == LEGACY:
        del found["enabledAppendPropCRC"]
    if version.startswith("5.3"):  # others write queues through a mapping, always
        found["putConsumeQueueDataByFileChannel"] = by_channel
    return found


def topic_names(rng: Random) -> list[str]:
    """Two to five topics; one pair has the same hash, one may be long, one may be the broker's own."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_%|"
    found = {"".join(rng.choice(letters) for _ in range(rng.randint(1, 10))).replace("%LMQ%", "x") for _ in range(2)}
    if rng.randint(0, 2) == 0:
        found |= {"AaBB", "BBAa"}
    if rng.randint(0, 2) == 0:
        found.add("".join(rng.choice(letters[:-2]) for _ in range(8)).ljust(rng.choice([126, 127]), "x"))
    if rng.randint(0, 1) == 0:
        begin = rng.choice(["%RETRY%", "%DLQ%", "long-", "x"])
        found.add(begin.ljust(rng.choice([128, 129, 200, 254, 255]), rng.choice(letters[:-2])))
    if rng.randint(0, 2) == 0:
        found.add(rng.choice([SCHEDULE_TOPIC, "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer", "%RETRY%group"]))
    return sorted(found)


class _Writer:
    """Draws the steps; remembers which topics there are, and the time."""

    def __init__(self, rng: Random, topics: list[str], segment: int, asynchronous: bool) -> None:
        self.rng = rng
        self.topics = topics
        self.segment = segment
        self.asynchronous = asynchronous
        self.queue_ids = {topic: rng.sample([0, 1, 2, 3, 7, 1023], rng.randint(1, 4)) for topic in topics}
        self.there: set[str] = set()
        self.clock_ms = T0_MS
        self.numbers = 0
        self.transactions = rng.choice([0.0, 0.0, 0.2])
        self.hostile = rng.choice([0.0, 0.2, 0.5])
        self.store_host = rng.choice(STORE_HOSTS)

    def session(self, end: str) -> Session:
        rng = self.rng
        if end == POWER and not self.asynchronous:
            end = DISPATCHED
        steps: list[Put | PutBatch | Delete] = []
        count = LONG if end == KILLED else rng.choice([1, 4, 12, 25, 60])
        deletes = rng.choice([0.0, 0.0, 0.1])
        for _ in range(count):
            if self.there and rng.random() < deletes:
                topic = rng.choice(sorted(self.there))
                self.there.discard(topic)
                self.queue_ids[topic] = rng.sample([0, 1, 2, 3, 7, 1023], rng.randint(1, 4))
                steps.append(Delete(topic))
            else:
                steps.append(self.put())
        steps.append(self.put())  # a session ends with a put: the one that may be torn
        last_delete = max((i for i, step in enumerate(steps) if isinstance(step, Delete)), default=-1)
        behind = rng.randint(last_delete + 1, len(steps) - 1)
        return Session(tuple(steps), end, behind, rng.random(), rng.random() < 0.5)

    def put(self) -> Put | PutBatch:
        rng = self.rng
        self.clock_ms += rng.choice([0, 0, 1, 7, 999, 1000, 5000])
        topic = rng.choice(self.topics)
        self.there.add(topic)
        queue_id = rng.choice(self.queue_ids[topic])
        common: dict[str, Any] = {
            "storeHost": self.store_host,
            "born": rng.choice([0, T0_MS, rng.getrandbits(62), -1]),
            "bornHost": rng.choice(["127.0.0.1:0", "255.255.255.255:65535", "[::1]:7", "[2001:db8::ffff]:65535"]),
            "reconsume": rng.choice([0, 0, 1, 16, -1]),
            "clock": self.clock_ms,
        }
        if len(topic) <= 127 and topic != SCHEDULE_TOPIC and rng.random() < 0.25:
            elements = tuple(self.message(topic, queue_id, 400) for _ in range(rng.choice([1, 2, 3, 5])))
            return PutBatch(topic, queue_id, elements, tuple(common.items()))
        flags = [0, 0, 0, 1, 2, COMMIT, 0x301]
        if rng.random() < self.transactions:
            flags = [PREPARED, PREPARED, ROLLBACK, COMMIT]
        common["sysFlag"] = rng.choice(flags)
        if common["sysFlag"] & TRANSACTION_MASK:
            common["prepared"] = rng.choice([0, 77, rng.getrandbits(40)])
        made = self.message(topic, queue_id, 4000)
        if rng.random() < 0.1 and made.properties:  # as some client sent it: the text counts, not the map
            common["propertiesText"] = self.form("".join(f"{name}\x01{value}\x02" for name, value in made.properties))
        return replace(made, fields=(*made.fields, *common.items()))

    def form(self, text: str) -> str:
        rng = self.rng
        return rng.choice([text[:-1], text, f"{text}twice\x01a\x02twice\x01b\x02", f"{text}empty\x01\x02"])

    def message(self, topic: str, queue_id: int, most: int) -> Put:
        rng = self.rng
        self.numbers += 1
        properties = dict[str, str]()
        keys = [rng.choice([*KEYS, f"n{self.numbers}"]) for _ in range(rng.choice([0, 0, 1, 1, 2, 3, 30]))]
        if keys:
            properties["KEYS"] = rng.choice([" ", " ", "  "]).join(keys)
        if rng.random() < 0.3:
            properties["UNIQ_KEY"] = rng.choice([f"U{rng.getrandbits(32):X}", f"U{self.numbers % 5}"])
        if rng.random() < 0.5:
            properties["TAGS"] = rng.choice(TAGS)
        if topic == SCHEDULE_TOPIC:
            properties |= {"DELAY": rng.choice(["1", "3", "18", "19"]), "REAL_TOPIC": "real", "REAL_QID": "0"}
        for _ in range(rng.choice([0, 0, 1, 3])):
            properties[self.text(12)] = self.text(40)
        if rng.random() < self.hostile:
            big = "v" * (3000 if most > 1000 else 300)
            properties["hostile"] = rng.choice(
                ["\0" * 64, "\0" * 512, "\0" * 1023, NEEDLE.decode() * 5, "rmq_sys_spark_sink", big, "\0"]
            )
        flag = rng.choice([0, 1, -1, 2**31 - 1, -(2**31)])
        return Put(topic, queue_id, self.body(most), tuple(properties.items()), (("flag", flag),))

    def text(self, most: int) -> str:
        rng = self.rng
        alphabet = "abcXYZ019_-=.\t\n é中😀\x7f\0\x03\xa0\u2028\ufeff\uffff"
        return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, most)))

    def body(self, most: int) -> bytes:
        rng = self.rng
        mark = b"%d|" % self.numbers  # no two bodies are the same, but for the empty ones
        if rng.random() < self.hostile:
            kind = rng.randint(0, 5)
            magic = rng.choice(["daa320a7", "daa320ab", "cbd43194", "00000000"])
            head = rng.randint(0, 300).to_bytes(4, "big") + bytes.fromhex(magic)
            return [
                b"",
                bytes(rng.choice([1, 8, 91, 512, 2000])),
                mark + head * rng.randint(1, 20),
                mark + NEEDLE * rng.randint(1, 30),
                head + bytes(rng.randint(0, 200)),
                mark + bytes(rng.randint(0, most)),
            ][kind][:most]
        return (mark + b"." * rng.choice([0, 0, 10, 100, rng.randint(0, most)]))[:most]
