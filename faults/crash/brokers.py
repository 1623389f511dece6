"""Imitated brokers that start, write and stop beside processes that write occasionally.

A broker is a process that does what RocketMQ's does, in its order, with random pauses: it opens `lock` for writing,
finds where the log ends, takes the lock, and appends at that end. A writer opens a session for a put or two, commits
and stays attached, or commits and detaches. At the end, whatever either side acknowledged must be in the store once.

    starts      brokers beside writers
    ways        one broker meets a session into which four threads put; it must get in soon, to a store that was closed
    stalls      a broker meets a writer that stands still for longer than the kernel's patience
    refusals    writers that are refused leave no file
    ends        Spark workers that are told to end close the store
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from crash import checker
from crash.children import ended, in_child
from crash.counts import Counts
from crash.harness import SMALL, Promise
from crash.imitate import Broker, commit
from crash.judge import Verdict, differing, note_content, note_faults
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    ConfigError,
    Message,
    MessageStore,
    NotAStoreError,
    StoreConfig,
    StoreLockedError,
)
from messagestore.files.disk import Disk
from messagestore.files.state import StateFile
from messagestore.session import AttachedStore, attached_store, detach_at_the_end
from messagestore.writer import standing
from processes import PatienceDisk, starting_broker
from pyspark_commits import Daemon

WRITERS, BROKERS = 3, 8
_ROWS = 6
FORBIDDING = (
    "brokerRole=SLAVE", "duplicationEnable=true", "enableDLegerCommitLog=true", "enableControllerMode=true",
    "storeType=defaultRocksDB", "rocksdbCQDoubleWriteEnable=true", "forceVerifyPropCRC=true",
    "storePathCommitLog=/nowhere/commitlog", "configManagerVersion=v2", "transRocksDBEnable=true", "messageStorePlugIn=x",
)  # fmt: skip
DAEMON_ENDS = ("application_ends", "jvm_is_killed", "idles")
_SIZES = SMALL.replace(mapped_file_size_commit_log=64 * 1024, lock_timeout="30s", attach_timeout="150ms")


def starts(root: Path, chance: random.Random, counts: Counts, *, brokers: int = BROKERS) -> Verdict:
    """Start a broker `brokers` times beside `WRITERS` processes."""
    with MessageStore.open(root, _SIZES) as store:
        store.put_message(Message("single", b"put/0/", queue_id=0))
    stop, said = root.with_name(root.name + ".stop"), root.with_name(root.name + ".said")
    pids = [in_child(partial(_write, root, name, chance.randrange(1 << 30), stop, said)) for name in range(WRITERS)]
    started = 0
    for number in range(brokers):
        time.sleep(chance.random() * 0.2)
        started += ended(in_child(partial(_broker, root, number, chance.randrange(1 << 30), said)))
    stop.touch()
    good = [ended(pid) for pid in pids]
    promise, refused = Promise(puts=["put/0/"], maybe_puts=["put/0/"]), 0
    java = list[str]()
    for line in said.read_text().splitlines():
        kind, *what = json.loads(line)
        if kind == "put":
            promise.maybe_puts.append(what[0])
            if what[1]:
                promise.puts.append(what[0])
        elif kind == "batch":
            promise.rows[what[0], what[1]] = _ROWS
            promise.maybe_batches.add((what[0], what[1]))
        elif kind == "java":
            java += what
        else:
            refused += 1
    counts.cases["brokers that started beside writers"] += started
    counts.cases["appends beside brokers that start"] += len(promise.puts) + len(promise.rows)
    counts.cases["writers that a broker kept out"] += refused
    verdict = _all_there(root, promise, java)
    if not all(good):
        verdict.misread.append(f"{good.count(False)} of {WRITERS} writers failed (see the log)")
    if started != brokers:
        verdict.misread.append(f"{brokers - started} of {brokers} brokers could not start")
    return verdict


def _all_there(root: Path, promise: Promise, java: list[str]) -> Verdict:
    verdict = Verdict()
    with MessageStore.open(root, _SIZES):  # opens what the last broker left
        pass
    found = checker.check(checker.read_tree(root))
    note_faults(verdict, found, "closed")
    note_content(verdict, found.bodies, found.queues, promise, (), everything=True)
    bodies = {body.decode() for body in found.bodies}
    verdict.lost += [body for body in java if body not in bodies]
    return verdict


def _say(said: Path, *what: object) -> None:
    fd = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(what).encode() + b"\n")
    os.close(fd)


def _write(root: Path, name: int, seed: int, stop: Path, said: Path) -> None:
    """Run a process that puts and commits until it is told to stop."""
    chance, number, version = random.Random(seed), 1000 * (name + 1), 0
    store = attached_store(root, _SIZES)

    while not stop.exists():
        try:
            if chance.random() < 0.5:
                flush = chance.choice([SYNC_FLUSH, ASYNC_FLUSH])
                bodies = [f"put/{number + i}/" for i in range(chance.randint(1, 3))]
                number += len(bodies)
                _puts(root, flush, bodies, chance, said)
            else:
                with store.writing("a commit") as writer:
                    commit(writer, f"app{name}", version, _ROWS)
                _say(said, "batch", f"app{name}", version)
                version += 1
                if chance.random() < 0.5:
                    store.detach()
        except StoreLockedError:
            _say(said, "refused")
            time.sleep(0.01)

        time.sleep(chance.random() * 0.03)
    store.detach()


def _puts(root: Path, flush: str, bodies: list[str], chance: random.Random, said: Path) -> None:
    """Run one session; what was put is promised when the session is closed."""
    done = 0
    try:
        with MessageStore.open(root, _SIZES.replace(flush_disk_type=flush)) as session:
            for body in bodies:
                session.put_message(Message("single", body.encode(), queue_id=0))
                done += 1
                time.sleep(chance.random() * 0.02)
    finally:
        for place, body in enumerate(bodies):
            _say(said, "put", body, place < done)


def _broker(root: Path, number: int, seed: int, said: Path) -> None:
    """Run a broker's life: constructor, load, start, appends, shutdown."""
    chance = random.Random(seed)
    with open(root / "lock", "r+b") as lock:
        time.sleep(chance.random() * 0.05)
        broker = Broker(root, _SIZES, starts=False)
        time.sleep(chance.random() * 0.2)
        with contextlib.suppress(BlockingIOError):
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, 0)
            broker.start()
            for place in range(3):
                body = f"java/{number}/{place}"
                broker.put("java", body.encode())
                _say(said, "java", body)
            broker.close()
            return
        raise AssertionError("the lock is held by a writer that did not make way")


# ---- one broker


def ways(root: Path, chance: random.Random, counts: Counts) -> Verdict:
    """A session makes way: each put is acknowledged and stored, or refused and not stored; the store was closed.

    Puts look for a broker by themselves only once, so that those after the store was closed must be told to look.
    """
    verdict, acknowledged, refused = Verdict(), list[str](), list[str]()
    config = _SIZES.replace(flush_disk_type=chance.choice([SYNC_FLUSH, ASYNC_FLUSH]))

    def put(name: int) -> None:
        for number in range(10_000):
            body = f"put/{name * 10_000 + number}/"
            try:
                store.put_message(Message("single", body.encode(), queue_id=name))
            except StoreLockedError:
                refused.append(body)
                return
            acknowledged.append(body)

    def slowly(store: AttachedStore, *arguments: Any) -> None:
        time.sleep(0.02)  # other threads that would put get their chance
        drop(store, *arguments)

    drop = AttachedStore._drop
    store = MessageStore.open(root, config)
    threads = [threading.Thread(target=put, args=(name,)) for name in range(4)]
    rarely = mock.patch.object(standing, "TURN_CHECK_S", 3600.0)
    with mock.patch.object(AttachedStore, "_drop", slowly), rarely:
        for thread in threads:
            thread.start()
        time.sleep(0.05 + 0.1 * chance.random())
        with starting_broker(root) as java:
            if java.word(10) != "locked":
                verdict.misread.append("the broker did not get in within 10 s")
                _end(root)
            for thread in threads:
                thread.join()
            state = StateFile(Disk(), str(root / "spark" / "state")).read()
            if (root / "abort").exists() or state is None or not state.clean:
                verdict.misread.append("the store was not closed when the broker got in")
            note_faults(verdict, checker.check(checker.read_tree(root)), "the broker is in")
    store.close()
    found = checker.check(checker.read_tree(root))
    note_faults(verdict, found, "closed")
    promise = Promise(puts=acknowledged, maybe_puts=acknowledged)
    note_content(verdict, found.bodies, found.queues, promise, (), everything=True)
    counts.cases["sessions that made way for a broker"] += 1
    return verdict


def stalls(root: Path, chance: random.Random, counts: Counts) -> Verdict:
    """A writer that let a broker wait for too long writes nothing more.

    The broker has then read the store, and may write.
    """
    verdict = Verdict()
    disk = PatienceDisk()
    store = attached_store(root, _SIZES.replace(attach_timeout="1h"), disk)
    with store.writing("a commit") as writer:
        commit(writer, "app", 0, _ROWS)

    disk.overrun_s = 0.3
    with store.mutex, starting_broker(root) as java:
        if java.word(0.7) != "waits":
            verdict.misread.append("the broker did not wait")

    # The broker may write by now. Whatever this writer changes from here on is a fault.
    before = checker.read_tree(root)
    until_s = time.monotonic() + 10
    while store.attached and time.monotonic() < until_s:
        time.sleep(0.01)

    verdict.misread += [f"{path} was written" for path in differing(before, checker.read_tree(root))]
    _end(root)
    counts.cases["writers that let a broker wait for too long"] += 1
    return verdict


def refusals(root: Path, chance: random.Random, counts: Counts) -> Verdict:
    """Refuse stores of a form that cannot be written, and settings of brokers that forbid writing."""
    verdict = Verdict()
    forms = (
        "consumequeue/CURRENT", "batchconsumequeue/t/0/0", "consumequeue/%LMQ%x/0/0", "epochFileCheckpoint",
        "brokerIdentity", "dledger-n0/data/00000000000000000000", "config/rdb/CURRENT", "consumequeue_rocksdb/CURRENT",
    )  # fmt: skip
    stores = {form: (form, SMALL) for form in forms}
    stores["a broker's store without messages"] = ("config/topics.json", StoreConfig())
    conf = root.with_name("broker.conf")
    for line in FORBIDDING:
        conf.write_text(f"brokerId=0\nmappedFileSizeCommitLog={SMALL.mapped_file_size_commit_log}\n{line}\n")
        with mock.patch("messagestore.format.config._log"):
            stores[line] = ("config/topics.json", StoreConfig.load(conf))
    for number, (name, (path, config)) in enumerate(stores.items()):
        target = root / str(number)
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(b"{}")
        (target / "commitlog").mkdir()
        before = set(target.rglob("*"))
        try:
            MessageStore.open(target, config).close()
            verdict.misread.append(f"{name}: was not refused")
        except (NotAStoreError, ConfigError):
            made = sorted(str(path) for path in set(target.rglob("*")) - before)
            verdict.misread += [f"{name}: the writer that was refused made {path}" for path in made]
        counts.cases["writers refused by a store's form or settings"] += 1
    return verdict


def ends(root: Path, chance: random.Random, counts: Counts) -> Verdict:
    """Spark workers are ended in each way that leaves them some time: the store is closed."""
    verdict = Verdict()
    ways: dict[str, Callable[[], None]] = {
        "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "SIGHUP": lambda: os.kill(os.getpid(), signal.SIGHUP),
        "_exit": lambda: os._exit(0),
    }
    for version, (name, end) in enumerate(ways.items()):

        def work(version: int = version, end: Callable[[], None] = end) -> None:
            detach_at_the_end()
            with attached_store(root, _SIZES.replace(attach_timeout="1h")).writing("a commit") as writer:
                commit(writer, "app", version, _ROWS)
            end()
            time.sleep(10)

        os.waitpid(in_child(work), 0)
        if (root / "abort").exists():
            verdict.misread.append(f"a worker that ended by {name} left the store open")
        counts.cases["workers of Spark that were ended"] += 1
    for name in DAEMON_ENDS:
        _end_of_daemon(root.with_name(f"{root.name}-{name}"), name, verdict)
        counts.cases["workers of Spark that were ended"] += 1
    return verdict


def _end_of_daemon(root: Path, name: str, verdict: Verdict) -> None:
    """End a worker of Spark's own daemon just after its last commit."""
    with Daemon() as daemon:
        for _ in range(2):
            daemon.commit(root)
        getattr(daemon, name)()
        if (root / "abort").exists():
            verdict.misread.append(f"a worker of Spark's daemon left the store open: {name}")
    note_faults(verdict, checker.check(checker.read_tree(root)), f"a worker of Spark's daemon: {name}")


def daemon_ends(root: Path, chance: random.Random, counts: Counts) -> Verdict:
    """Run only the ends of Spark's own daemon."""
    verdict = Verdict()
    for name in DAEMON_ENDS:
        _end_of_daemon(root / name, name, verdict)
    return verdict


def _end(root: Path) -> None:
    """Mark the process as dead."""
    store = attached_store(root)
    store._drop()
