"""The second layer of the mode `model`: real processes on a real disk, beside the same plain model.

Several processes use a store at the same time, forked or started anew, each with settings of its own: sessions that put
in every way, prepare and end half messages and send messages back; turns that append batches; deliverers; readers that
follow. A process may be killed or stopped for a while at any moment, and another one takes its place. The store's
threads run: retention, delivery, the flush, the pool, and segments made ahead.

Each process tells its parent what it is about to do and what returned (`Said`). After a round all processes are dead,
the parent opens the store, and everything is compared as in the first layer (`crash.plain_model`). Where a signal falls
is chance, so a failure is not shrunk; it is printed with everything that the processes said.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from crash import checker
from crash.counts import Counts
from crash.judge import Verdict
from crash.model_world import GROUPS, PRODUCERS, QUEUES, RETRY_MAX, TOPICS, columns_of, message_of
from crash.plain_model import (
    COMMITTED,
    HALF_TOPIC,
    KILLED,
    LIVES,
    OP_TOPIC,
    ROLLED_BACK,
    SCHEDULE_TOPIC,
    Effect,
    Found,
    Half,
    Model,
    Operation,
    Queue,
    Wait,
)
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    BatchRequest,
    ConfigError,
    HalfMessageEndedError,
    MessageBatch,
    MessageIllegalError,
    MessageStore,
    ReadOnlyStore,
    StoreConfig,
    StoreLockedError,
    deliver_delayed,
)
from messagestore.batches.append import Chunks, append_batch
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.format import record_columns
from messagestore.inspect.verify import verify
from messagestore.session import attached_store
from small import SMALL

STORES, ROUNDS, ROUND_S = 2, 5, 2.0
SLOTS = 4
"""How many processes use a store at a time."""
_DELAY_LEVELS = ("1s 2s", "2s 1s 1m", "1s", "2s 2s 1m 2m")
_LEVELS, _LONGEST_DELAY_S = (1, 2), 2
"""The levels that messages ask for, and the longest delay that they have at any of them."""
_LEDGER = "ledger"
"""The consumer group that has read what the model knows, so that retention leaves what the model has not seen."""
_EVERY_HOUR = ";".join(f"{hour:02d}" for hour in range(24))
_COLUMNS = ("queue_offset", "body", "physical_offset", "store_timestamp_ms")
_ROLES = ("session", "session", "session", "turns", "turns", "delivers", "reads")
_LONGEST_S = 60.0


@dataclass(frozen=True)
class Part:
    """What a process is to do.

    Parameters
    ----------
    root : str
    role : str
        One of `_ROLES`.
    name : str
        Begins the bodies of its messages.
    slot : int
        Which app and which half messages are its own.
    seed : int
    halves : tuple of (str, str)
        The open half messages that it may end: body and message id.
    from_offsets : tuple of (str, int, int)
        Where a reader begins: topic, queue id, queue offset.
    """

    root: str
    role: str
    name: str
    slot: int
    seed: int
    halves: tuple[tuple[str, str], ...] = ()
    from_offsets: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of_text(cls, text: str) -> Part:
        fields = json.loads(text)
        for name in ("halves", "from_offsets"):
            fields[name] = tuple(map(tuple, fields[name]))
        return cls(**fields)


def settings(chance: random.Random, role: str) -> StoreConfig:
    """Settings of one process, which differ from those of the others."""
    flush = chance.choice([SYNC_FLUSH, ASYNC_FLUSH]) if role == "session" else SYNC_FLUSH
    return SMALL.replace(
        flush_disk_type=flush,
        transient_store_pool_enable=flush == ASYNC_FLUSH and chance.random() < 0.5,
        transient_store_pool_size=2,
        commit_interval_commit_log=chance.choice([1, 5, 1000]),
        commit_commit_log_least_pages=0,
        flush_interval_commit_log=chance.choice([5, 50, 1000]),
        clean_interval=chance.choice(["5ms", "100ms", "1h"]),
        preallocate=chance.random() < 0.3,
        deliver_delayed=chance.random() < 0.5,
        flush_delay_offset_interval=chance.choice([1, 1000]),
        message_delay_level=chance.choice(_DELAY_LEVELS),
        file_reserved_time=chance.choice([-1, 0, 0]),
        delete_when=_EVERY_HOUR,
        clean_resource_interval=chance.choice([20, 200]),
        transaction_time_out=0,
        transaction_check_max=chance.choice([2, 15]),
        enabled_append_prop_crc=chance.random() < 0.3,
        stamp_uniq_key=chance.random() < 0.3,
        attach_timeout=chance.choice(["20ms", "1h"]),
        lock_timeout="20s",
    )


# ---- in a process


@dataclass
class Said:
    """What a process tells its parent, line by line."""

    pipe: int
    count: int = 0

    def tell(self, **fields: Any) -> None:
        os.write(self.pipe, json.dumps(fields).encode() + b"\n")  # below PIPE_BUF or not: one thread writes

    def begin(self, what: str, effects: list[Effect], **fields: Any) -> int:
        """Tell about an operation that leaves these messages, before it is asked for; returns its number."""
        self.count += 1
        told = [
            (*effect.queue, effect.body.decode(), effect.wait and (*effect.wait.target, effect.wait.delay_ms, effect.wait.sent_back))
            for effect in effects
        ]  # fmt: skip
        self.tell(begin=self.count, what=what, effects=told, at_ms=_now_ms(), **fields)
        return self.count

    def done(self, number: int, *, committed: bool = True, **fields: Any) -> None:
        self.tell(done=number, committed=committed, **fields)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def play(part: Part, pipe: int) -> int:
    """Do a part until the process is killed, or has done enough; returns its status."""
    logging.disable()
    said, chance = Said(pipe), random.Random(part.seed)
    config = settings(chance, part.role)
    said.tell(part=asdict(part), settings=_differing(config))
    try:
        {"session": _session, "turns": _turns, "delivers": _delivers, "reads": _reads}[part.role](
            part, said, chance, config
        )
    except BaseException:  # noqa: BLE001 - whatever it was, the parent is told
        said.tell(wrong=traceback.format_exc())
        return 1
    return 0


def _differing(config: StoreConfig) -> str:
    names = [
        each.name for each in fields(config) if each.compare and getattr(config, each.name) != getattr(SMALL, each.name)
    ]
    return ", ".join(f"{name}={getattr(config, name)}" for name in names)


def _session(part: Part, said: Said, chance: random.Random, config: StoreConfig) -> None:
    """Open the store again and again, and do everything that a session can do."""
    halves, sent_back = dict(part.halves), set[str]()
    for number in range(1000):
        with MessageStore.open(part.root, config) as store:
            worker = _Worker(part, said, chance, config, store, halves, sent_back, number)
            for turn in range(chance.choice([1, 5, 30])):
                chance.choice(worker.ways)(f"{part.name}/{number}/{turn}")
                if chance.random() < 0.2:
                    time.sleep(chance.choice([0.001, 0.03]))
        config = config.replace(message_delay_level=chance.choice(_DELAY_LEVELS))


def _effect_of(config: StoreConfig, queue: Queue, body: bytes, level: int, sent_back: int = 0) -> Effect:
    """What a message leaves that is put with these settings: itself, or the delayed message."""
    if not level:
        return Effect(queue, body)
    level = min(level, len(config.delays_ms))
    return Effect((SCHEDULE_TOPIC, level - 1), body, Wait(queue, config.delays_ms[level - 1], 0, 0, sent_back))


@dataclass
class _Worker:
    """The things that an open session does; each takes the name of its messages."""

    part: Part
    said: Said
    chance: random.Random
    config: StoreConfig
    store: MessageStore
    halves: dict[str, str]
    sent_back: set[str]
    number: int
    ways: list[Callable[[str], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ways = [self.put, self.put, self.put, self.puts, self.several, self.batch, self.prepare, self.finish]
        self.ways += [self.send_back, self.deliver]

    def _queue(self) -> Queue:
        return self.chance.choice(TOPICS), self.chance.randrange(QUEUES)

    def _effect(self, queue: Queue, body: str, level: int = 0) -> Effect:
        return _effect_of(self.config, queue, body.encode(), level)

    def put(self, name: str) -> None:
        queue, body = self._queue(), f"m/{name}/" + "." * self.chance.choice([0, 100, 2000])
        body = _numbered(body)
        level = self.chance.choice([0, 0, *_LEVELS])
        number = self.said.begin("put", [self._effect(queue, body, level)])
        result = self.store.put_message(message_of(queue, body.encode(), level))
        self.said.done(number, committed=result.committed)

    def puts(self, name: str) -> None:
        queue = self._queue()
        bodies = [_numbered(f"m/{name}-{n}/") for n in range(3)]
        number = self.said.begin("puts", [self._effect(queue, body) for body in bodies])
        result = self.store.put_messages(
            MessageBatch.from_messages([message_of(queue, body.encode()) for body in bodies])
        )
        self.said.done(number, committed=result.committed)

    def several(self, name: str) -> None:
        started = []
        for n in range(self.chance.randint(2, 6)):
            queue, body = self._queue(), _numbered(f"m/{name}-{n}/")
            number = self.said.begin("put without waiting", [self._effect(queue, body)])
            started.append((number, self.store.put_message_async(message_of(queue, body.encode()))))
        for number, future in started:
            self.said.done(number, committed=future.result(_LONGEST_S).committed)

    def batch(self, name: str) -> None:
        app = f"app-{self.part.slot}"
        last = self.store.last_batch(app)
        version = 0 if last is None else last.version + 1
        rows = _rows(self.chance, name)
        effects = [self._effect(queue, body.decode(), level) for queue, body, level in rows]
        number = self.said.begin("batch", effects, batch=(app, version))
        request = BatchRequest(app_id=app, version=version, version_source="spark", flush_disk_type=SYNC_FLUSH)
        status = self.store.append_batch(columns_of(rows), request).status
        self.said.done(number)
        again = self.store.append_batch(columns_of(rows), request).status if self.chance.random() < 0.3 else "known"
        if (status, again) != ("appended", "known"):
            self.said.tell(wrong=f"batch {app} {version}: {status}, and then {again}")

    def prepare(self, name: str) -> None:
        queue, body = self._queue(), _numbered(f"m/{name}/")
        number = self.said.begin("prepare", [Effect((HALF_TOPIC, 0), body.encode())], prepares=(body, *queue))
        half = self.store.half_message(message_of(queue, body.encode()), PRODUCERS)
        self.said.done(number, committed=half.result.committed, half=(body, half.message_id))
        self.halves[body] = half.message_id

    def finish(self, name: str) -> None:
        if not self.halves:
            return
        body = self.chance.choice(sorted(self.halves))
        wish = self.chance.choice([COMMITTED, ROLLED_BACK])
        half = self.store.find_half(self.halves.pop(body))

        number = self.said.begin(f"{wish} {body}", [], half=(body, wish))
        if wish == COMMITTED:
            half.commit()
        else:
            half.rollback()
        self.said.done(number)

        try:
            half.rollback() if wish == COMMITTED else half.commit()
        except HalfMessageEndedError:
            return
        self.said.tell(wrong=f"half message {body} was {wish}, and ended in the other way, too")

    def send_back(self, name: str) -> None:
        topic, queue_id = self._queue()
        if topic not in self.store.topics() or queue_id not in self.store.topics()[topic]:
            return
        low, high = self.store.min_offset(topic, queue_id), self.store.max_offset(topic, queue_id)
        found = self.store.get_message(topic, queue_id, self.chance.randrange(low, high), 1) if low < high else None
        if found is None or not found.messages:
            return
        message, group, level = found.messages[0], GROUPS[0], _LEVELS[-1]
        body = message.body.decode()
        if body.split("/")[3] != self.part.name or body in self.sent_back:
            return  # two copies of one body cannot be told apart: each is sent back once, by who put it
        self.sent_back.add(body)
        effect = _effect_of(self.config, (f"%RETRY%{group}", 0), message.body, level, 1)
        number = self.said.begin("send back", [effect])
        try:
            result = self.store.send_back(message, group, level)
        except MessageIllegalError:
            if message.queue_offset >= self.store.min_offset(topic, queue_id):
                raise
            return  # retention has deleted it meanwhile
        self.said.done(number, committed=result.committed)

    def deliver(self, name: str) -> None:
        self.store.deliver_delayed()


def _numbered(body: str) -> str:
    """A body as `model_world.keys_of` wants it: two numbers come in front of its name."""
    _, rest = body.split("/", 1)
    number = sum(rest.encode()) % 1000
    return f"m/{number}/{number % 7}/{rest}"


def _rows(chance: random.Random, name: str) -> list[tuple[Queue, bytes, int]]:
    return [
        (
            (chance.choice(TOPICS), chance.randrange(QUEUES)),
            _numbered(f"m/{name}-{n}/").encode(),
            chance.choice([0, 0, 0, *_LEVELS]),
        )
        for n in range(chance.choice([1, 5, 20]))
    ]


def _turns(part: Part, said: Said, chance: random.Random, config: StoreConfig) -> None:
    """Take turns with other processes, as Spark queries do, without a session."""
    app = f"app-{part.slot}"
    for number in range(1000):
        store = attached_store(part.root, config)
        with store.writing("a turn") as writer:
            last = writer.journal.last(app)
            version = 0 if last is None else last.version + 1

            rows = _rows(chance, f"{part.name}/{number}")
            effects = [_effect_of(config, *row) for row in rows]
            told = said.begin("batch in a turn", effects, batch=(app, version))

            host = writer.files.store_host
            chunk = record_columns.encode(columns_of(rows), limits=writer.files.config, store_host=host, born_host=host)
            request = BatchRequest(app_id=app, version=version, version_source="spark", flush_disk_type=SYNC_FLUSH)
            status = append_batch(writer, Chunks([chunk]), request).status
            said.done(told)
            if status != "appended":
                said.tell(wrong=f"batch {app} {version} is new, and was {status}")

        time.sleep(chance.choice([0, 0.02]))
        if chance.random() < 0.2:
            store.detach()


def _delivers(part: Part, said: Said, chance: random.Random, config: StoreConfig) -> None:
    """Deliver with more or fewer levels than others, in turns."""
    while True:
        count = deliver_delayed(part.root, config).count
        if count:
            said.tell(delivered=count)
        time.sleep(0.02)


def _reads(part: Part, said: Said, chance: random.Random, config: StoreConfig) -> None:
    """Follow all queues: numbers without a gap, and the parent compares the bodies with what is left."""
    position = {(topic, queue_id): offset for topic, queue_id, offset in part.from_offsets}
    with MessageStore.open_read_only(part.root, config) as reader:
        while True:
            for queue, begin in list(position.items()):
                if queue[1] not in reader.topics().get(queue[0], ()):
                    continue

                for batch in reader.read(*queue, begin, columns=("queue_offset", "body")):
                    rows = batch.to_pydict()
                    numbers = rows["queue_offset"]
                    start = position[queue]
                    if numbers != [*range(start, start + len(numbers))]:
                        said.tell(wrong=f"{queue}: after {start} a reader sees {numbers[:5]}")

                    position[queue] += len(numbers)
                    for at in range(0, len(numbers), 10):
                        seen = list(zip(numbers, (body.decode() for body in rows["body"]), strict=True))[at : at + 10]
                        said.tell(seen=(*queue, seen))

            time.sleep(0.01)


# ---- the parent


class Child:
    """A process, and what it has said.

    Parameters
    ----------
    part : Part
    fresh : bool
        A new interpreter instead of a fork.
    """

    def __init__(self, part: Part, *, fresh: bool) -> None:
        self.part, self.data, self.continues_s = part, b"", 0.0
        self.pipe, write_end = os.pipe()
        self.process: subprocess.Popen[bytes] | None = None
        if fresh:
            command = [sys.executable, "-m", "crash.model_processes", json.dumps(asdict(part)), str(write_end)]
            modules = os.pathsep.join(each for each in sys.path if each)
            environment = {**os.environ, "PYTHONPATH": modules}
            self.process = subprocess.Popen(command, pass_fds=(write_end,), env=environment)
            self.pid = self.process.pid
        else:
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self.pipe)
                os._exit(play(part, write_end))
        os.close(write_end)

    def hear(self) -> bool:
        """Take in what it says; False at the end."""
        data = os.read(self.pipe, 1 << 16)
        self.data += data
        return bool(data)

    def stop(self, for_s: float) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.continues_s = time.monotonic() + for_s

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.continues_s = 0.0

    def kill(self) -> None:
        """End it, if it has not ended, and take in the rest."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        else:
            os.waitpid(self.pid, 0)
        while self.hear():
            pass
        os.close(self.pipe)

    def said(self) -> list[dict[str, Any]]:
        """Its lines, without the one in which it died."""
        *lines, _ = self.data.split(b"\n")
        return [json.loads(line) for line in lines]


class Abused:
    """A store that many processes use, and the model beside it.

    Parameters
    ----------
    root : Path
    chance : random.Random
    counts : Counts
        Kills, stops and operations are counted there.
    """

    def __init__(self, root: Path, chance: random.Random, counts: Counts) -> None:
        self.root, self.chance, self.cases = root, chance, counts.cases
        self.config = SMALL.replace(transaction_time_out=0, lock_timeout="20s")
        self.model, self.verdict = Model(), Verdict()
        self.half_ids: dict[str, str] = {}
        self.number = 0
        self.log: list[str] = []
        with MessageStore.open(root, self.config) as store:
            for topic in TOPICS:
                store.create_topic(topic, QUEUES)
            store.create_group(GROUPS[0], retry_max_times=RETRY_MAX)
        self._publish()

    # ---- a round

    def round(self) -> None:
        """Let processes use the store and die, and compare."""
        children = [self._start(slot, set()) for slot in range(SLOTS)]
        dead: list[Child] = []
        until_s, next_s = time.monotonic() + ROUND_S, 0.0
        while time.monotonic() < until_s:
            ready, _, _ = select.select([child.pipe for child in children], [], [], 0.01)
            ended = [child for child in children if child.pipe in ready and not child.hear()]
            now_s = time.monotonic()
            for child in children:
                if child.continues_s and now_s >= child.continues_s:
                    child.go_on()

            if now_s >= next_s:
                next_s = now_s + self.chance.random() * 0.6
                victim = self.chance.choice(children)
                if self.chance.random() < 0.3:
                    victim.stop(self.chance.random() * 0.25)
                    self.cases["stops of the model's processes"] += 1
                elif victim not in ended:
                    ended.append(victim)
                    self.cases["kills of the model's processes"] += 1

            for child in ended:
                child.kill()
                dead.append(child)
                tried = {line["half"][0] for each in dead for line in each.said() if "begin" in line and "half" in line}
                children[children.index(child)] = self._start(child.part.slot, tried)

        for child in children:
            child.kill()
        self._take_in([*dead, *children])
        self._compare([*dead, *children])

    def _start(self, slot: int, tried: set[str]) -> Child:
        """Start a process that may end the open half messages of its slot, but none whose end was tried."""
        self.number += 1
        bodies = sorted(body.decode() for body in self.model.open_halves())

        own = [
            (body, self.half_ids[body])
            for at, body in enumerate(bodies)
            if at % SLOTS == slot and body not in tried and body in self.half_ids
        ]
        ends = [
            (*queue, self._end(queue))
            for queue in ((topic, queue_id) for topic in TOPICS for queue_id in range(QUEUES))
        ]

        role = _ROLES[0] if slot == 0 else self.chance.choice(_ROLES)
        part = Part(
            str(self.root), role, f"{self.number}", slot, self.chance.randrange(1 << 30), tuple(own), tuple(ends)
        )
        return Child(part, fresh=self.chance.random() < 0.15)

    def _end(self, queue: Queue) -> int:
        slots = self.model.queues.get(queue)
        return slots[-1].found.number + 1 if slots else max(self.model.following.get(queue, {0}))

    # ---- what the processes said

    def _take_in(self, children: list[Child]) -> None:
        """Note in the model what was asked for, and what returned."""
        for child in children:
            operations: dict[int, Operation] = {}
            for line in child.said():
                if "wrong" in line and not _is_refusal(line["wrong"]):
                    self.verdict.misread.append(f"process {child.part.name}: {line['wrong']}")
                if "begin" in line:
                    operations[line["begin"]] = self.model.begins(self._operation(child, line))
                    self.cases["operations of the model's processes"] += 1
                elif "done" in line:
                    operations[line["done"]].done = True
                    if line["committed"]:  # with all that the process asked for before
                        for operation in operations.values():
                            operation.committed = operation.committed or operation.done
                    if "half" in line:
                        self.half_ids.update([line["half"]])

    def _operation(self, child: Child, line: dict[str, Any]) -> Operation:
        effects = []
        for topic, queue_id, body, waits in line["effects"]:
            wait = None
            if waits:
                wait = Wait((waits[0], waits[1]), waits[2], line["at_ms"], 0, waits[3])
            effects.append(Effect((topic, queue_id), body.encode(), wait))

        half = None
        if "prepares" in line:
            body, topic, queue_id = line["prepares"]
            self.model.halves[body.encode()] = Half((topic, queue_id))
        if "half" in line:
            half = (line["half"][0].encode(), line["half"][1])
            if half[1] == COMMITTED:
                effects.append(Effect(self.model.halves[half[0]].target, half[0]))

        what = f"{line['what']} of process {child.part.name}"
        batch = tuple(line["batch"]) if "batch" in line else None
        return Operation(what, tuple(effects), batch, half, int(child.part.name))

    # ---- what is there

    def _compare(self, children: list[Child]) -> None:
        with MessageStore.open_read_only(self.root, self.config) as reader:
            before = _contents(reader)

        with MessageStore.open(self.root, self.config) as store:
            found = checker.check(checker.read_tree(self.root))
            self.verdict.misread += [f"checker: {fault}" for fault in found.faults[:3]]
            contents, begin = _contents(store), store.writer.log.min_offset
            self._ended_before_it_was_deleted(contents, begin)
            self._take(self.model.deleted_below(begin))
            self._take(self.model.compare(contents, KILLED, self._open_halves(store, contents)))
            self._check_early(contents)
            self._check_readers(before, contents, children)
            if self.verdict.ok:
                self._end_some(store)

        report = verify(self.root, self.config)
        self.verdict.misread += [f"verify: {each}" for each in report.findings[:3]]

        self._publish()
        if not self.verdict.ok:
            for child in children:
                self.log += [f"process {child.part.name}: {line}" for line in child.data.decode().split("\n")]

    def _open_halves(self, store: MessageStore, contents: dict[Queue, list[Found]]) -> list[bytes]:
        """The bodies of the open half messages, whose ids are noted."""
        by_place = {found.place: found.body for found in contents.get((HALF_TOPIC, 0), ())}
        halves = store.open_halves()
        for half in halves:
            self.half_ids[by_place[half.physical_offset].decode()] = half.message_id
        return [by_place[half.physical_offset] for half in halves]

    def _take(self, verdict: Verdict) -> None:
        for kind, found in vars(verdict).items():
            getattr(self.verdict, kind).extend(found)

    def _ended_before_it_was_deleted(self, contents: dict[Queue, list[Found]], begin: int) -> None:
        """Note what was delivered or ended in this round, and whose first record retention has deleted since then."""
        model = self.model
        for _, slot, wait in [*model.waiting()]:
            known = sum(  # without those that went with it: a message may be sent back several times
                each.found.body == slot.found.body and each.found.place >= begin
                for each in model.queues.get(wait.target, ())
            )
            there = sum(each.body == slot.found.body for each in contents.get(wait.target, ()))
            if slot.found.place < begin and there > known:
                slot.delivered = True
                effect = Effect(wait.target, slot.found.body, sent_back=wait.sent_back)
                model.pending.append(Operation("a delivery", (effect,), process=-len(model.pending) - 1))
        places = {slot.found.body: slot.found.place for slot in model.queues.get((HALF_TOPIC, 0), ())}
        for operation in model.pending:
            if operation.half is not None and places.get(operation.half[0], begin) < begin:
                model.halves[operation.half[0]].state = operation.half[1]
                operation.done = operation.committed = True

    def _check_early(self, contents: dict[Queue, list[Found]]) -> None:
        for slot in self.model.arrived:
            assert slot.wait is not None
            due_ms = slot.found.store_ms + slot.wait.delay_ms
            copies = [each.store_ms for each in contents[slot.wait.target] if each.body == slot.found.body]
            if max(copies) < due_ms:
                self.verdict.misread.append(f"{slot.found} came {due_ms - max(copies)} ms too early: {slot.wait}")

    def _check_readers(
        self, before: dict[Queue, list[Found]], contents: dict[Queue, list[Found]], children: list[Child]
    ) -> None:
        """What readers saw stays: beside the processes that died, and before the next one recovered."""
        there = {queue: {each.number: each.body for each in found} for queue, found in contents.items()}
        for queue, found in before.items():
            for each in found:
                if there.get(queue, {}).get(each.number) != each.body:
                    self.verdict.misread.append(f"a reader saw {each} in {queue}, and recovery did not keep it")
        for child in children:
            for line in child.said():
                topic, queue_id, rows = line.get("seen", ("", 0, ()))
                for number, body in rows:
                    if there.get((topic, queue_id), {}).get(number) != body.encode():
                        self.verdict.misread.append(
                            f"reader {child.part.name} saw {body} at {topic}/{queue_id} {number}"
                        )
                self.cases["messages that the model's readers saw"] += len(rows)

    def _end_some(self, store: MessageStore) -> None:
        """Commit some of the half messages that are open."""
        for body in sorted(self.model.open_halves()):
            if body.decode() not in self.half_ids or self.chance.random() < 0.7:
                continue
            half = store.find_half(self.half_ids[body.decode()])
            operation = Operation("a commit", (Effect(self.model.halves[body].target, body),), half=(body, COMMITTED))
            self.model.begins(operation)
            half.commit()
            operation.done = operation.committed = True
        self.compare_open(store)

    def compare_open(self, store: MessageStore) -> None:
        """Compare while the parent has the store open."""
        store.flush()
        contents = _contents(store)
        self._take(self.model.compare(contents, LIVES, self._open_halves(store, contents)))

    def _publish(self) -> None:
        """Let retention delete what the model has seen, except for what still waits."""
        queues = {(topic, queue_id) for topic in TOPICS for queue_id in range(QUEUES)}
        queues |= {(SCHEDULE_TOPIC, level - 1) for level in _LEVELS} | {
            (HALF_TOPIC, 0),
            (OP_TOPIC, 0),
        }
        queues |= {(f"%RETRY%{GROUPS[0]}", 0)}
        ends = {queue: self._end(queue) for queue in queues}
        publish_offsets(str(self.root), _LEDGER, ends)
        self.model.read[_LEDGER] = ends

    def finish(self) -> None:
        """Deliver the rest: nothing may wait that is due."""
        time.sleep(_LONGEST_DELAY_S)
        with MessageStore.open(self.root, self.config) as store:
            while store.deliver_delayed().count:
                pass
            self.compare_open(store)
        self.verdict.lost += [
            f"delayed message {slot.found} of level {level} was not delivered"
            for level, slot, wait in self.model.waiting()
            if _now_ms() > slot.found.store_ms + wait.delay_ms + 1000
        ]
        report = verify(self.root, self.config)
        self.verdict.misread += [f"verify: {each}" for each in report.findings[:3]]
        gone = self.model.begin // self.config.mapped_file_size_commit_log
        self.cases["segments that went beside the model's processes"] += gone


def _is_refusal(text: str) -> bool:
    """Whether a process was told that its settings or its turn do not fit, which is an answer."""
    return (
        text.rstrip()
        .rsplit("\n", 1)[-1]
        .startswith((f"{StoreLockedError.__module__}.StoreLockedError", f"{ConfigError.__module__}.ConfigError"))
    )


def _contents(store: ReadOnlyStore) -> dict[Queue, list[Found]]:
    contents: dict[Queue, list[Found]] = {}
    for topic, queue_ids in store.topics().items():
        for queue_id in queue_ids if topic != checker.BATCH_TOPIC else ():
            contents[topic, queue_id] = [
                Found(*row)
                for batch in store.read(topic, queue_id, store.min_offset(topic, queue_id), columns=_COLUMNS)
                for row in zip(*batch.to_pydict().values(), strict=True)
            ]
    return contents


def one_store(root: Path, seed: str, counts: Counts, rounds: int = ROUNDS) -> tuple[Verdict, list[str]]:
    """Abuse one store for some rounds; returns what is wrong, and what the processes of the last round said."""
    abused = Abused(root, random.Random(seed), counts)
    for _ in range(rounds):
        abused.round()
        if not abused.verdict.ok:
            return abused.verdict, abused.log
    abused.finish()
    return abused.verdict, abused.log


if __name__ == "__main__":
    sys.exit(play(Part.of_text(sys.argv[1]), int(sys.argv[2])))
