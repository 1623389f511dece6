"""Random stores: a recipe says which messages go in, in which order and at which times; ours and Java cook it alike.

Sizes are small, so that segments, queue files and index files end often, and at every alignment.
"""

from __future__ import annotations

import ipaddress
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from interop import java_build, java_store
from interop.java_store import JavaStore
from messagestore import Message, MessageBatch, MessageColumns, MessageStore, StoreConfig
from messagestore.format.config import ASYNC_FLUSH, SYNC_FLUSH
from messagestore.format.properties import RESERVED_PROPERTIES
from messagestore.writer.store_clock import StoreClock

T0_MS = 1_700_000_000_000
QUEUES = 3
MOST_KEYS = 20
"""Of one step. Java names an index file by the millisecond in which it makes it, and two of one name are one file; so a
step fills at most one file, and where files are small Java takes its time."""


@dataclass(frozen=True)
class Put:
    """One message."""

    message: Message
    clock_ms: int


@dataclass(frozen=True)
class PutBatch:
    """Messages for one topic and queue, side by side (MessageExtBatch); hosts and times are the batch's."""

    messages: tuple[Message, ...]
    unique_keys: tuple[str | None, ...]
    clock_ms: int


@dataclass(frozen=True)
class Recipe:
    config: StoreConfig
    steps: tuple[Put | PutBatch, ...]

    @property
    def store_host(self) -> str:
        ip = self.config.broker_ip1
        return f"[{ip}]:{self.config.listen_port}" if ":" in ip else f"{ip}:{self.config.listen_port}"

    @property
    def born_host(self) -> str:
        """Of batches: the store's own address."""
        return self.store_host.rpartition(":")[0] + ":0"

    def messages(self) -> list[Message]:
        found: list[Message] = []
        for step in self.steps:
            found += [step.message] if isinstance(step, Put) else step.messages
        return found

    def keys_by_topic(self) -> dict[str, list[str]]:
        """Topic -> its keys."""
        found: dict[str, list[str]] = {}
        for step in self.steps:
            if isinstance(step, Put):
                found.setdefault(step.message.topic, []).extend(step.message.keys)
                continue
            for message, unique_key in zip(step.messages, step.unique_keys, strict=True):
                found.setdefault(message.topic, []).extend([*message.keys, *([unique_key] if unique_key else [])])
        return {topic: sorted(set(keys)) for topic, keys in found.items()}


# ---- random ones
#
# One function of a `random.Random`: thousands of stores come from seeds, and Hypothesis, which can make a failure small,
# gives its own kind of Random (`st.randoms`).

_TOPIC = string.ascii_letters + string.digits + "%|_-"
_CHARACTERS = "abcXYZ019_-=.\t\n é中😀\x7f\0\x03\xa0\u2028\ufeff\uffff"
TAGS = (None, None, "polygenelubricants", "Aa", "BB", "中文", "zzzzzz", "é")
"""Hashes: the smallest int, a collision, negative ones."""
KEYS = ("Aa", "BB", "k1", "k2", "polygenelubricants", "é😀")


def text(rng: Random, most: int = 8) -> str:
    return "".join(rng.choice(_CHARACTERS) for _ in range(rng.randint(1, most)))


def topic(rng: Random) -> str:
    kind = rng.randint(0, 9)
    if kind < 7:
        return "".join(rng.choice(_TOPIC) for _ in range(rng.randint(1, 12)))
    if kind == 7:
        return "".join(rng.choice(_TOPIC) for _ in range(rng.randint(1, 9))).ljust(rng.randint(120, 127), "x")
    return rng.choice(["%RETRY%", "%DLQ%"]).ljust(rng.choice([128, 129, 200, 255]), rng.choice(_TOPIC))


def host(rng: Random) -> str:
    port = rng.choice([0, 1, 10911, 65535])
    if rng.randint(0, 1):
        return f"{ipaddress.IPv4Address(rng.choice([0, 1, 0x7F000001, 0xFFFFFFFF, rng.getrandbits(32)]))}:{port}"
    number = rng.choice(
        [0, 1, 0x20010DB8 << 96, rng.getrandbits(128)]
    )  # never ::ffff:a.b.c.d, which Java reads as IPv4
    return f"[{ipaddress.IPv6Address(number)}]:{port}"


def integer(rng: Random, bits: int) -> int:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    return rng.choice([0, 1, -1, low, high, rng.randint(low, high)])


def body(rng: Random, most: int) -> bytes:
    size = rng.choice([0, 1, rng.randint(0, min(40, most)), rng.randint(0, min(300, most)), rng.randint(0, most)])
    return rng.getrandbits(64).to_bytes(8, "big")[: min(8, size)].ljust(size, b"b")


def properties(rng: Random) -> dict[str, str]:
    pairs = ((text(rng), text(rng)) for _ in range(rng.choice([0, 0, 1, 2, 5])))
    return {name: value for name, value in pairs if name not in RESERVED_PROPERTIES}


def message(rng: Random, topic: str, queue_id: int, most: int = 2500) -> Message:
    return Message(
        topic=topic,
        body=body(rng, most),
        queue_id=queue_id,
        keys=tuple(rng.choice([*KEYS, text(rng).replace(" ", "_")]) for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))),
        tags=rng.choice([*TAGS, text(rng)]),
        properties=properties(rng),
        flag=integer(rng, 32),
        born_timestamp_ms=integer(rng, 64),
        born_host=host(rng),
        sys_flag=rng.choice([0, 0, 0, 1, 2, 0x8, 0x301]),
        reconsume_times=integer(rng, 32),
    )


def config(rng: Random) -> StoreConfig:
    """Settings; with ASYNC_FLUSH, every second store is put through a TransientStorePool."""
    flush_disk_type = rng.choice([SYNC_FLUSH, ASYNC_FLUSH, ASYNC_FLUSH])
    return StoreConfig(
        mapped_file_size_commit_log=rng.choice([4096, 4099, 6000, 8192, 16384, 65536]),
        mapped_file_size_consume_queue=20 * rng.choice([2, 3, 16, 100]),
        max_hash_slot_num=rng.choice([1, 7, 64]),
        max_index_num=rng.choice([MOST_KEYS + 2, 20, 50, 400, 400]),
        max_message_size=4096,
        enabled_append_prop_crc=rng.randint(0, 1) == 1,
        flush_disk_type=flush_disk_type,
        transient_store_pool_enable=flush_disk_type == ASYNC_FLUSH and rng.randint(0, 1) == 1,
        transient_store_pool_size=rng.choice([1, 2, 5]),
        commit_interval_commit_log=rng.choice([1, 200]),
        broker_ip1=rng.choice(["127.0.0.1", "10.1.2.3", "255.255.255.255", "2001:db8::2", "::1"]),
        listen_port=rng.choice([0, 10911, 65535]),
        lock_timeout="1s",
    )


def recipe(rng: Random, *, most_steps: int = 12) -> Recipe:
    """A store of up to a dozen puts and batches."""
    made = Recipe(config(rng), ())
    steps = more_steps(rng, made, topics(rng), rng.randint(1, most_steps))
    return replace(made, steps=tuple(each for step in steps for each in _as_a_broker_takes_it(step)))


def _as_a_broker_takes_it(step: Put | PutBatch) -> Sequence[Put | PutBatch]:
    """The step without what only Java's bare store takes: a retry topic takes no batches, and no message after its
    group's last retry, which becomes a dead letter."""
    if isinstance(step, Put) and step.message.topic.startswith("%RETRY%"):
        return [replace(step, message=replace(step.message, reconsume_times=min(step.message.reconsume_times, 16)))]
    if isinstance(step, PutBatch) and step.messages[0].topic.startswith("%RETRY%"):
        return [Put(message, step.clock_ms) for message in step.messages]
    return [step]


def topics(rng: Random) -> list[str]:
    return [topic(rng) for _ in range(rng.randint(1, 3))]


def more_steps(
    rng: Random, made: Recipe, topics: list[str], count: int, clock_ms: int = T0_MS
) -> tuple[Put | PutBatch, ...]:
    """Steps for the store of a recipe, by a clock that stands still, steps, or jumps."""
    steps: list[Put | PutBatch] = []
    for _ in range(count):
        clock_ms += rng.choice([0, 0, 1, 999, 1000, 70_000])
        where = rng.choice(topics), rng.randint(0, QUEUES - 1)
        if rng.randint(0, 2):
            steps.append(Put(message(rng, *where), clock_ms))
            continue
        found = [message(rng, *where, 300) for _ in range(rng.randint(1, 5))]
        born_ms = integer(rng, 64)
        unique_keys = tuple(rng.choice([None, f"U{rng.getrandbits(32):X}"]) for _ in found)
        steps.append(PutBatch(tuple(_uniform(each, born_ms, made.born_host) for each in found), unique_keys, clock_ms))
    return tuple(steps)


def _uniform(each: Message, born_ms: int, born_host: str) -> Message:
    """What a batch keeps of a message: the batch has one time, one host, no flags."""
    return replace(each, born_timestamp_ms=born_ms, born_host=born_host, sys_flag=0, reconsume_times=0)


# ---- cooking


@contextmanager
def our_clock() -> Iterator[list[int]]:
    """The store time of what we append: the number in the list, but never below the last one."""
    now = [T0_MS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreClock, "put_ms", lambda clock: max(clock._standing.end.last_store_timestamp_ms, now[0]))
        yield now


def put_ours(store: MessageStore, recipe: Recipe) -> None:
    with our_clock() as now:
        for step in recipe.steps:
            now[0] = step.clock_ms
            if isinstance(step, Put):
                assert store.put_message(step.message).is_ok
            else:
                assert store.put_messages(batch_of(step)).is_ok


def batch_of(step: PutBatch) -> MessageBatch:
    table = pa.record_batch(
        {
            "body": pa.array([m.body for m in step.messages], pa.binary()),
            "tags": pa.array([m.tags for m in step.messages], pa.string()),
            "keys": pa.array([list(m.keys) or None for m in step.messages], pa.list_(pa.string())),
            "properties": pa.array(
                [list(m.properties.items()) or None for m in step.messages], pa.map_(pa.string(), pa.string())
            ),
            "flag": pa.array([m.flag for m in step.messages], pa.int32()),
            "unique_key": pa.array(step.unique_keys, pa.string()),
            "born_timestamp_ms": pa.array([m.born_timestamp_ms for m in step.messages], pa.int64()),
        }
    )
    first = step.messages[0]
    return MessageBatch(MessageColumns.from_arrow(table, topic=first.topic, queue_id=first.queue_id))


def cook_ours(root: Path, recipe: Recipe) -> None:
    with MessageStore.open(root, recipe.config) as store:
        put_ours(store, recipe)


def for_java(recipe: Recipe) -> list[dict[str, Any]]:
    """The steps as `JavaStore.put` takes them."""
    host = recipe.store_host
    found = []
    for step in recipe.steps:
        if isinstance(step, Put):
            queue_id = step.message.queue_id
            assert queue_id is not None
            found.append(java_store.of_message(step.message, queue_id, host, clock=step.clock_ms))
        else:
            first = step.messages[0]
            each = [
                java_store.of_message(message, 0, host, key)
                for message, key in zip(step.messages, step.unique_keys, strict=True)
            ]
            fields = {"born": first.born_timestamp_ms, "bornHost": recipe.born_host, "storeHost": host}
            found.append(
                java_store.batch(first.topic, each, queue_id=first.queue_id or 0, clock=step.clock_ms, **fields)
            )
    return found


def put_java(java: JavaStore, recipe: Recipe) -> None:
    steps = for_java(recipe)
    if java.driver.version != java_build.NEWEST:  # its own text lacks the last separator
        for step in (step for step in steps if "messages" not in step):
            step["propertiesText"] = "".join(f"{name}\x01{value}\x02" for name, value in step["properties"])
    results = java.put(steps, pause_ms=2 if recipe.config.max_index_num < 100 else 0)
    assert all(result["ok"] for result in results), [result for result in results if not result["ok"]]
    java.dispatched()
    java.clock(-1)
