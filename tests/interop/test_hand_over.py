"""One store, by turns: ours, Java, ours, Java. Ten rounds of random appends with clean closes; and rounds in which whoever
writes is killed with SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from interop.compare import check_keys, check_messages
from interop.java_store import ANSWER_S, COUNTS, Driver, JavaStore, batch, java_config, single
from interop.share import part
from messagestore import ASYNC_FLUSH, SYNC_FLUSH, BatchRequest, Message, MessageBatch, MessageStore
from messagestore.inspect.verify import verify
from messagestore.read_only_store import ReadOnlyStore
from small import SMALL, columns

ROUNDS = 10
STORES = 8
KILL_ROUNDS, MOST_KILL_ROUNDS = 6, 40
TOPICS = ("a", "b")


@dataclass
class Ledger:
    """What was acknowledged, by whom, in which order; each body once."""

    root: Path
    rng: Random
    queues: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    keys: dict[str, set[str]] = field(default_factory=dict)
    versions: int = 0
    number: int = 0

    def body(self, who: str) -> str:
        self.number += 1
        return f"{who}/{self.number}/" + "." * self.rng.choice([0, 10, 400, 3000])

    def note(self, topic: str, queue_id: int, body: str, key: str) -> None:
        self.queues.setdefault((topic, queue_id), []).append(body)
        self.keys.setdefault(topic, set()).add(key)

    def check(self, store: ReadOnlyStore) -> None:
        """All of it is there, in order, and nothing else."""
        for (topic, queue_id), wanted in self.queues.items():
            found = [m.body.decode() for m in store.get_message(topic, queue_id, 0, 100_000).messages]
            assert found == wanted, f"{self.root.name} {topic}/{queue_id}: {len(found)} found, {len(wanted)} wanted"
            COUNTS.messages += len(wanted)
        there = {(t, q) for t, ids in store.topics().items() for q in ids if not t.startswith("rmq_sys")}
        assert {key for key in there if store.max_offset(*key)} == set(self.queues)


def our_turn(ledger: Ledger, root: Path) -> None:
    """Puts, batches of puts and Spark batches."""
    rng = ledger.rng
    config = SMALL.replace(flush_disk_type=rng.choice([SYNC_FLUSH, ASYNC_FLUSH]))
    with MessageStore.open(root, config) as store:
        ledger.check(store)
        for _ in range(rng.randint(1, 6)):
            topic, queue_id = rng.choice(TOPICS), rng.randint(0, 2)
            kind = rng.randint(0, 2)
            count = 1 if kind == 0 else rng.randint(1, 12)
            bodies = [ledger.body("ours")[:600] for _ in range(count)]
            keys = [f"o{ledger.number}-{i}" for i in range(count)]
            if kind == 0:
                store.put_message(Message(topic, bodies[0].encode(), queue_id=queue_id, keys=keys))
            elif kind == 1:
                messages = [
                    Message(topic, body.encode(), queue_id=queue_id, keys=[key])
                    for body, key in zip(bodies, keys, strict=True)
                ]
                store.put_messages(MessageBatch.from_messages(messages))
            else:
                key = keys[0][:-1]
                request = BatchRequest(app_id="app", version=ledger.versions, flush_disk_type=SYNC_FLUSH)
                store.append_batch(
                    columns([body.encode() for body in bodies], topic=topic, key=key, queue_ids=[queue_id] * count),
                    request,
                )
                keys = [f"{key}{i}" for i in range(count)]
                ledger.versions += 1
            for body, key in zip(bodies, keys, strict=True):
                ledger.note(topic, queue_id, body, key)


def java_turn(ledger: Ledger, java: JavaStore) -> None:
    rng = ledger.rng
    for _ in range(rng.randint(1, 6)):
        topic, queue_id = rng.choice(TOPICS), rng.randint(0, 2)
        bodies = [ledger.body("java") for _ in range(rng.choice([1, 1, 5]))]
        keys = [f"j{ledger.number}-{i}" for i in range(len(bodies))]
        each = [single(topic, b.encode()[:600], queue_id=queue_id, keys=[k]) for b, k in zip(bodies, keys, strict=True)]
        (put,) = java.put([each[0] if len(each) == 1 else batch(topic, each, queue_id=queue_id)])
        assert put["ok"], put
        for body, key in zip(bodies, keys, strict=True):
            ledger.note(topic, queue_id, body[:600], key)
    java.dispatched()


def check_with_java(ledger: Ledger, java: JavaStore) -> None:
    """Both see the same; every key written so far, by whom and in which round ever, is found by both."""
    with MessageStore.open_read_only(java.root, SMALL) as store:
        ledger.check(store)
        check_messages(store, java)
        for topic, keys in ledger.keys.items():
            check_keys(store, java, topic, sorted(keys))


def test_ten_rounds(java: Driver, root: Path) -> None:
    """Java, ours, Java, ours: after each clean close the other goes on where the first ended. Keys of all rounds are found."""
    ledgers = [Ledger(root / f"store-{seed}", Random(seed)) for seed in part(range(STORES))]
    for _ in range(ROUNDS):
        closing = []
        for ledger in ledgers:
            theirs = JavaStore(java, ledger.root, java_config(SMALL)).open()
            java_turn(ledger, theirs)
            check_with_java(ledger, theirs)
            closing.append(theirs.closing())
        for ledger, closed in zip(ledgers, closing, strict=True):
            closed.result(ANSWER_S)
            our_turn(ledger, ledger.root)
            report = verify(ledger.root)
            assert report.ok, report.findings[:3]
    java.call("gc")


# ---- killed


WRITER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from interop.test_hand_over import write_until_killed
write_until_killed(Path({root!r}), {seed}, {number}, {version})
"""


def write_until_killed(root: Path, seed: int, number: int, version: int) -> None:
    """The process that is killed: says on stdout what it is about to append, and what is acknowledged."""
    rng = Random(seed)
    config = SMALL.replace(flush_disk_type=rng.choice([SYNC_FLUSH, ASYNC_FLUSH]))
    with MessageStore.open(root, config) as store:
        print(json.dumps(["open"]), flush=True)
        while True:
            number += 1
            if rng.randint(0, 1):
                body = f"put/{number}/"
                print(json.dumps(["put", body]), flush=True)
                store.put_message(Message("kill", body.encode(), queue_id=number % 2, keys=[f"p{number}"]))
            else:
                count = rng.choice([3, 60, 400])
                bodies = [f"batch/{version}/{i}/" for i in range(count)]
                print(json.dumps(["batch", version, count]), flush=True)
                request = BatchRequest(
                    app_id="killed", version=version, version_source="user", flush_disk_type=SYNC_FLUSH
                )
                store.append_batch(columns([b.encode() for b in bodies], topic="kill", key=f"b{version}-"), request)
                version += 1
            print(json.dumps(["done"]), flush=True)


@dataclass
class Killed:
    """What a writer said before it was killed."""

    puts: list[str] = field(default_factory=list)
    maybe_put: str | None = None
    batches: dict[int, int] = field(default_factory=dict)
    maybe_batch: tuple[int, int] | None = None


def kill_ours(root: Path, rng: Random, number: int, version: int) -> Killed:
    """Start a writer of ours, kill it at a random moment; what it had been told is done."""
    code = WRITER.format(path=sys.path, root=str(root), seed=rng.getrandbits(30), number=number, version=version)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == ["open"]
        time.sleep(rng.random() * 0.12)
        os.kill(process.pid, signal.SIGKILL)
        lines = process.stdout.read().splitlines()
    said, last = Killed(), None
    for line in lines:
        try:
            what = json.loads(line)
        except ValueError:
            break  # half a line
        if what == ["done"] and last is not None:
            if last[0] == "put":
                said.puts.append(last[1])
            else:
                said.batches[last[1]] = last[2]
            last = None
        else:
            last = what
    if last is not None and last[0] == "put":
        said.maybe_put = last[1]
    elif last is not None:
        said.maybe_batch = last[1], last[2]
    return said


class Survivor:
    """One store that is killed again and again; pumped by Java into topic `pump`, by us into topic `kill`."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.rng = Random(seed)
        self.puts: set[str] = set()
        self.maybe: set[str] = set()
        self.batches: dict[int, int] = {}
        self.pumped = [0, 0]
        self.number = self.version = 0

    def kill_ours(self) -> None:
        said = kill_ours(self.root, self.rng, self.number, self.version)
        self.number += 10_000
        self.puts.update(said.puts)
        if said.maybe_put:
            self.maybe.add(said.maybe_put)
        self.batches.update(said.batches)
        if said.maybe_batch:
            self.batches.setdefault(said.maybe_batch[0], -said.maybe_batch[1])
        self.version = max(self.batches, default=-1) + 1

    def check(self, store: ReadOnlyStore, *, dispatched: bool = True) -> None:
        """What was acknowledged is there once; batches are whole; what Java pumped is what its number says.

        A broker acknowledges before it dispatches: what it had not dispatched when it was killed shows after recovery.
        """
        found: Counter[str] = Counter()
        for queue_id in store.topics().get("kill", []):
            found.update(m.body.decode() for m in store.get_message("kill", queue_id, 0, 1_000_000).messages)
        assert max(found.values(), default=1) == 1, f"{self.root.name}: twice: {found.most_common(2)}"
        puts = {body for body in found if body.startswith("put/")}
        assert self.puts <= puts, f"{self.root.name}: lost {sorted(self.puts - puts)[:3]}"
        assert puts <= self.puts | self.maybe, f"{self.root.name}: {sorted(puts - self.puts - self.maybe)[:3]}"
        for version, count in self.batches.items():
            rows = sum(found[f"batch/{version}/{i}/"] for i in range(abs(count)))
            assert rows == count or (count < 0 and rows in (0, -count)), (
                f"{self.root.name}: batch {version}: {rows} of {count}"
            )
        COUNTS.messages += sum(found.values())
        for queue_id, least in enumerate(self.pumped):
            bodies = [m.body for m in store.get_message("pump", queue_id, 0, 1_000_000).messages]
            assert len(bodies) >= least or not dispatched, (
                f"{self.root.name}: pump/{queue_id}: {len(bodies)} of {least}"
            )
            assert [int.from_bytes(body[:8], "big") for body in bodies] == list(range(len(bodies)))
            assert all(set(body[8:]) <= {number & 0xFF} for number, body in enumerate(bodies))
            COUNTS.messages += len(bodies)


def has_hit_a_batch(stores: list[Survivor]) -> bool:
    """Whether a writer of ours was killed amid a batch."""
    return any(count < 0 for each in stores for count in each.batches.values())


def test_rounds_with_kills(own_java: Callable[..., Driver], root: Path) -> None:
    """Both sides die by SIGKILL at random moments, ours often amid a batch; the other side takes over: what either had
    acknowledged is there once, in order; no batch is there in part."""
    stores = [Survivor(root / f"store-{seed}", seed) for seed in part(range(STORES))]
    for round_number in range(MOST_KILL_ROUNDS):
        if round_number >= KILL_ROUNDS and has_hit_a_batch(stores):
            break
        for each in stores:
            each.kill_ours()
        java = own_java()
        opened = [JavaStore(java, each.root, java_config(SMALL)).open() for each in stores]
        for each, theirs in zip(stores, opened, strict=True):
            with MessageStore.open_read_only(each.root, SMALL) as store:
                each.check(store)
                check_messages(store, theirs)
        # Not before the last one is checked: what a slow machine puts meanwhile takes all the files Java may open
        for each, theirs in zip(stores, opened, strict=True):
            settings = {"padding": 300, "largestBatch": each.rng.choice([1, 8]), "pauseMicros": 1000}
            theirs.pump(topic="pump", queues=2, count=10**7, seed=round_number, **settings)
        time.sleep(0.3 * stores[0].rng.random())
        for each, theirs in zip(stores, opened, strict=True):
            told = theirs.pumped()
            assert told["failure"] is None
            each.pumped = told["ends"]
        java.kill()
        for each in stores:
            with MessageStore.open_read_only(each.root, SMALL) as store:
                each.check(store, dispatched=False)
            with MessageStore.open(each.root, SMALL) as store:
                each.check(store)
            report = verify(each.root)
            assert report.ok, (each.root.name, report.findings[:3])
    assert min(len(each.puts) for each in stores) > 0
    assert has_hit_a_batch(stores), "no kill hit a batch"
