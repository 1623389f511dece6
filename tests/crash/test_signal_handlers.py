"""Exceptions of signal handlers, such as KeyboardInterrupt, at random moments while a store is opened, used and closed."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from crash.interrupts import Interrupter, cases
from messagestore import (
    BatchRequest,
    HalfMessage,
    LocalTransactionState,
    Message,
    MessageColumns,
    MessageStore,
    StoreConfig,
    StorePoisonedError,
)

PROGRAM = """
import builtins, errno, json, random, signal, sys, time
from messagestore import Message, MessageStore, StoreConfig, StoreError

class Interrupt(getattr(builtins, sys.argv[4])):
    pass

armed = False

def interrupt(number, frame):
    if armed:
        raise Interrupt(errno.ENOSPC, 'by the handler')

def put():
    global number
    number += 1
    store.put_message(Message("t", b"%d" % number, queue_id=0))
    acknowledged.append(number)

signal.signal(signal.SIGALRM, interrupt)
root, rounds, rng = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))
config = StoreConfig(mapped_file_size_commit_log=1 << 20)
number, acknowledged, interrupts, longest_s = 0, [], 0, 0.01
for _ in range(rounds):
    begin_s = time.monotonic()
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest_s))
        with MessageStore.open(root, config) as store:
            for _ in range(rng.randrange(4)):
                put()
        longest_s = 0.7 * longest_s + 0.4 * (time.monotonic() - begin_s)
        armed = False
    except (Interrupt, StoreError, KeyError):  # KeyError: Python's own Thread.start, which an Exception has interrupted
        interrupts += 1
    armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    store = None
    with MessageStore.open(root, config) as store:
        put()
print(json.dumps([number, acknowledged, interrupts]))
sys.stdout.flush()
sys.stdin.read()
"""
ROUNDS = 150


@pytest.mark.parametrize("kind", ["BaseException", "OSError"])
def test_a_store_is_opened_again_after_each_interrupt(root: Path, kind: str) -> None:
    """The same process opens it again, another one as soon as it was closed; what was acknowledged is there once."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(root), str(ROUNDS), "1", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        last, acknowledged, interrupts = json.loads(process.stdout.readline() or "[0, [], 0]")
        assert interrupts > ROUNDS // 4
        with MessageStore.open(root, StoreConfig(lock_timeout="10s")) as store:
            numbers = [int(message.body) for message in store.get_message("t", 0, 0, last).messages]
        process.stdin.close()
    assert process.returncode == 0
    assert numbers == sorted(set(numbers))
    assert set(acknowledged) <= set(numbers) <= {*range(1, last + 1)}


@pytest.mark.parametrize("kind", [KeyError, ValueError, AttributeError, FileNotFoundError])
def test_a_batch_that_the_store_holds_is_known_whatever_a_handler_raises(root: Path, kind: type[Exception]) -> None:
    """What a handler raises while the record of the batch is read says nothing about that record."""
    request = BatchRequest(app_id="gates", version=0)
    rows = MessageColumns.from_arrow(pa.table({"body": [b"B12", b"C3"]}), topic="gates", queue_id=0)

    def append() -> str:
        with MessageStore.open(root) as store, interrupter.armed():
            return store.append_batch([rows], request).status

    interrupter = Interrupter()
    assert append() == "appended"
    lines = interrupter = Interrupter()
    assert append() == "known"

    for line in sorted(lines.hits):
        interrupter = Interrupter(line, 1, kind)
        with contextlib.suppress(kind, StorePoisonedError):
            assert append() == "known"
        assert interrupter.raised
    with MessageStore.open_read_only(root) as store:
        assert store.max_offset("gates", 0) == 2


def test_what_a_handler_raises_leaves_no_list_of_half_messages_in_parts(root: Path) -> None:
    """The session goes on: each half message that was not committed is open, and no other one."""
    lines = Interrupter()
    with MessageStore.open(root, StoreConfig(transaction_time_out=0, transaction_check_max=10_000)) as store:

        def put() -> HalfMessage:
            return store.half_message(Message("t", b"1", queue_id=0), "producers")

        halves = [put(), put()]
        with lines.armed():
            halves[0].commit()
            store.check_halves(lambda _: LocalTransactionState.UNKNOW)

        for line, hit in ((line, hit) for line, hit, _ in cases(lines.hits) if line[0] == "open_halves"):
            half, left = put(), put()
            interrupter = Interrupter(line, hit, KeyError)
            with contextlib.suppress(KeyError), interrupter.armed():
                half.commit()
                store.check_halves(lambda _: LocalTransactionState.UNKNOW)
            half.commit()
            left.rollback()
            assert len(store.open_halves()) == 1
        halves[1].commit()
        assert store.open_halves() == []


def test_an_error_that_the_caller_handles_is_not_taken_for_the_cause(root: Path) -> None:
    """The store says what has stopped it, also in an `except` of its caller."""
    store = MessageStore.open(root, StoreConfig(mapped_file_size_commit_log=1 << 20))
    store.put_message(Message("t", b"1"))
    (root / "lock").unlink()
    try:
        raise TimeoutError("of the caller")
    except TimeoutError:
        with pytest.raises(StorePoisonedError, match="a lock file was removed or replaced"):
            store.append_batch([MessageColumns.from_arrow(pa.table({"body": [b"2"], "topic": ["t"], "queue_id": [0]}))])
    with contextlib.suppress(StorePoisonedError):
        store.close()
