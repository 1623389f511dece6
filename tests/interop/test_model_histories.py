"""What the random model of everything leaves is what Java shows: each queue, message by message.

make interop ARGS="-k model_histories"              10 of 20 histories, the others the day after
make interop-deep HISTORIES=500 SEED=1000           others, as many as wanted, beside other random stores
make interop-deep HISTORIES=1 SEED=17 ARGS="-k model_histories"     the one of seed 17
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from crash.model import History, run_history
from crash.model_world import LEVELS, PRODUCERS, TOPICS, World, keys_of, tag_of
from crash.plain_model import (
    BATCH_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    SCHEDULE_TOPIC,
    Queue,
    Slot,
)
from interop.compare import check_messages, of_java
from interop.java_store import ANSWER_S, Driver, JavaStore, java_config
from interop.share import part
from messagestore import MessageStore

HISTORIES = int(os.environ.get("INTEROP_HISTORIES", "20"))
FIRST_SEED = int(os.environ.get("INTEROP_SEED", "0"))
GROUP = 10
"""Histories of one test: Java closes their stores at once, because each takes it three seconds."""
_PREPARED, _COMMITTED = 4, 8
"""The kinds of transaction in a sysFlag."""
_INDEX_HEADER_SIZE, _INDEX_SLOT_SIZE, _INDEX_ENTRY_SIZE = 40, 4, 20


def groups() -> list[list[int]]:
    numbers = part(range(FIRST_SEED, FIRST_SEED + HISTORIES), 4)
    return [numbers[at : at + GROUP] for at in range(0, len(numbers), GROUP)]


@pytest.mark.parametrize("numbers", groups(), ids=lambda numbers: f"{numbers[0]}-{numbers[-1]}")
def test_java_shows_what_a_history_left(numbers: list[int], java: Driver, memory: Path) -> None:
    """Ordinary queues, delayed messages, half messages, retries and dead letters; and nothing changes below ours."""
    closing: list[tuple[int, Path, World, Future[Any]]] = []
    kinds: Counter[str] = Counter()
    for number in numbers:
        world = run_history(History(31, number), memory / f"simulated-{number}", Counter())
        assert world.verdict.ok, f"history {number}: {world.verdict}\n" + "\n".join(world.log)
        root = memory / f"history-{number}"
        world.disk.write_to(root)
        if not (root / "commitlog").exists():  # nothing was ever put
            continue
        theirs = JavaStore(java, root, settings_of(root, world)).open()
        try:
            check(f"history {number}", world, root, theirs, kinds)
        finally:
            closing.append((number, root, world, theirs.closing()))
    for number, root, world, closed in closing:
        closed.result(ANSWER_S)
        with MessageStore.open_read_only(root) as store:
            for queue, slots in world.model.queues.items():
                end = slots[-1].found.number + 1 if slots else store.min_offset(*queue)
                assert store.max_offset(*queue) == end, f"history {number}: {queue} after Java has closed the store"
        shutil.rmtree(root)
    if len(numbers) == GROUP:
        assert {"", SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC} <= set(kinds), f"a kind of message never comes: {kinds}"


def settings_of(root: Path, world: World) -> dict[str, object]:
    """The sizes that the files have: each session of a history asks for others, and gets those."""
    config = world.base
    (segment, *_) = sorted((root / "commitlog").iterdir())
    config = config.replace(mapped_file_size_commit_log=segment.stat().st_size)
    sizes = {path.stat().st_size for path in (root / "index").iterdir()} if (root / "index").exists() else set()
    if sizes:
        entries = max(sizes) - _INDEX_HEADER_SIZE - _INDEX_SLOT_SIZE * config.max_hash_slot_num
        config = config.replace(max_index_num=entries // _INDEX_ENTRY_SIZE)
    return java_config(config, messageDelayLevel=LEVELS[-1])


def check(name: str, world: World, root: Path, theirs: JavaStore, kinds: Counter[str]) -> None:
    """Compare Java with the model, and with our own reader in every field."""
    with MessageStore.open_read_only(root) as store:
        check_messages(store, theirs)
    queues = [queue for queue in world.model.queues if queue[0] != BATCH_TOPIC]
    for queue, found in theirs.dump_all(queues).items():
        where, slots = f"{name}: {queue}", world.model.queues[queue]
        messages = [of_java(message) for message in found["messages"]]
        wanted = [(slot.found.number, slot.found.body, slot.found.place, slot.found.store_ms) for slot in slots]
        shown = [(m["queue_offset"], m["body"], m["physical_offset"], m["store_timestamp_ms"]) for m in messages]
        assert shown == wanted, f"{where}: Java shows {shown}, the model has {wanted}\n" + "\n".join(world.log)
        for slot, message in zip(slots, messages, strict=True):
            wrong = differing(world, queue, slot, message)
            assert not wrong, f"{where}, number {slot.found.number}: (Java's, the model's) {wrong}"
            kinds[queue[0] if queue[0] not in TOPICS else ""] += 1


def differing(world: World, queue: Queue, slot: Slot, message: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields and properties in which a message differs from what was put, by name."""
    body, topic, properties = slot.found.body, queue[0], message["all_properties"]
    if topic == OP_TOPIC:
        wanted: dict[str, Any] = {"TAGS": "d"}
        said = {"TAGS": properties.get("TAGS")}
    else:
        wanted = {"KEYS": " ".join(keys_of(body)), "TAGS": tag_of(body)}
        said = {name: properties.get(name) for name in wanted}
    if topic == SCHEDULE_TOPIC:
        assert slot.wait is not None
        target, level = slot.wait.target, queue[1] + 1
        wanted |= {"DELAY": str(level), "REAL_TOPIC": target[0], "REAL_QID": str(target[1])}
    elif topic == HALF_TOPIC:
        target = world.model.halves[body].target
        wanted |= {"TRAN_MSG": "true", "PGROUP": PRODUCERS, "REAL_TOPIC": target[0], "REAL_QID": str(target[1])}
    said = {name: properties.get(name) for name in wanted}
    if topic == SCHEDULE_TOPIC or topic in TOPICS or topic.startswith("%RETRY%"):
        times = slot.sent_back if slot.wait is None else slot.wait.sent_back
        wanted["reconsumeTimes"], said["reconsumeTimes"] = times, message["reconsume_times"]
    if topic in (*TOPICS, HALF_TOPIC):
        kind = _COMMITTED if topic in TOPICS and body in world.model.halves else 0
        wanted["transaction"], said["transaction"] = kind, message["sys_flag"] & (_PREPARED | _COMMITTED)
    return {name: (said[name], wanted[name]) for name in wanted if said[name] != wanted[name]}
