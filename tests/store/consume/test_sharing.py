"""Workers of a group share the queues: each queue has one worker, whoever comes, ends, stops or dies."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from messagestore import Consumer, Message, MessageStore, StoreLockedError
from messagestore.files.disk import Disk
from messagestore.files.group_locks import GroupLocks
from small import SMALL

QUEUES = 8
LONG_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with MessageStore.open(tmp_path, SMALL) as store:
        store.create_topic("t", QUEUES)
        for number in range(QUEUES * 10):
            store.put_message(Message("t", b"%d" % number, queue_id=number % QUEUES))
    return tmp_path


def worker(root: Path, **given: Any) -> Consumer:
    return Consumer(root, "g", given.pop("topics", "t"), config=SMALL, **given)


def balanced(*workers: Consumer, until: Callable[[], bool]) -> None:
    """Let the workers poll in turn until they have what they should."""
    end_s = time.monotonic() + LONG_S
    while not until():
        assert time.monotonic() < end_s, [sorted(each.assignment()) for each in workers]
        for each in workers:
            each.poll(0.01, 1)


def shares(*workers: Consumer) -> list[int]:
    return sorted(len(each.assignment()) for each in workers)


def test_each_queue_has_one_worker_and_all_have_about_the_same_number(root: Path) -> None:
    with ExitStack() as stack:
        workers = []
        for count, wanted in ((1, [8]), (2, [4, 4]), (3, [2, 3, 3]), (4, [2, 2, 2, 2])):
            workers.append(stack.enter_context(worker(root)))
            balanced(*workers, until=lambda wanted=wanted: shares(*workers) == wanted)  # type: ignore[misc]
            queues = Counter(queue for each in workers for queue in each.assignment())
            assert len(workers) == count
            assert queues == {("t", queue_id): 1 for queue_id in range(QUEUES)}
        kept = workers[1].assignment()
        workers.pop(0).close()
        balanced(*workers, until=lambda: shares(*workers) == [2, 3, 3])
        assert kept <= workers[0].assignment()


def test_more_workers_than_queues_wait_for_one(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        store.put_message(Message("t", b"0", queue_id=0))
    with worker(tmp_path) as first, worker(tmp_path) as second:
        balanced(first, second, until=lambda: shares(first, second) == [0, 1])
        busy, idle = (first, second) if first.assignment() else (second, first)
        busy.close()
        balanced(idle, until=lambda: shares(idle) == [1])
        idle.seek_to_beginning()
        assert [message.body for message in idle.poll(LONG_S)["t", 0]] == [b"0"]


def test_topics_with_one_queue_are_shared_too(tmp_path: Path) -> None:
    """The first worker would have had all of them."""
    topics = [f"t{number}" for number in range(32)]
    with MessageStore.open(tmp_path, SMALL) as store:
        for topic in topics:
            store.put_message(Message(topic, b"0", queue_id=0))
    with worker(tmp_path, topics=topics) as first, worker(tmp_path, topics=topics) as second:
        balanced(first, second, until=lambda: sum(shares(first, second)) == 32 and min(shares(first, second)) > 0)
        assert min(shares(first, second)) >= 8


def test_groups_do_not_share(root: Path) -> None:
    with worker(root) as one, Consumer(root, "other", "t", config=SMALL) as other:
        one.poll()
        assert shares(one, other) == [QUEUES, QUEUES]


def test_callbacks_say_what_comes_and_goes_and_may_commit(root: Path) -> None:
    said: list[tuple[str, int]] = []
    places: dict[tuple[str, int], int] = {}

    def revoked(consumer: Consumer, queues: list[tuple[str, int]]) -> None:
        consumer.commit()
        places.update({queue: consumer.position(queue) for queue in queues})
        said.append(("revoked", len(queues)))

    with worker(
        root, on_assigned=lambda _, queues: said.append(("assigned", len(queues))), on_revoked=revoked
    ) as first:
        assert said == [("assigned", QUEUES)]
        first.poll(max_records=QUEUES * 5)
        with worker(root) as second:
            balanced(first, second, until=lambda: shares(first, second) == [4, 4])
            assert said[1] == ("revoked", 4)
            for queue in second.assignment():
                assert second.committed(queue) == places[queue]
    assert said[-1][0] == "revoked"


def test_a_callback_that_fails_keeps_the_queue(root: Path) -> None:
    fails = True

    def revoked(consumer: Consumer, queues: list[tuple[str, int]]) -> None:
        if fails:
            raise ZeroDivisionError

    with worker(root, on_revoked=revoked) as first, worker(root) as second:
        end_s = time.monotonic() + LONG_S
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            while time.monotonic() < end_s:
                first.poll(0.01)
        assert shares(first, second) == [0, QUEUES]
        fails = False
        balanced(first, second, until=lambda: shares(first, second) == [4, 4])


def test_a_worker_cannot_commit_messages_of_a_queue_that_it_has_lost(root: Path) -> None:
    with worker(root) as first:
        messages = [message for found in first.poll().values() for message in found]
        with worker(root) as second:
            balanced(first, second, until=lambda: shares(first, second) == [4, 4])
            for message in messages:
                if message.queue in second.assignment():
                    with pytest.raises(StoreLockedError, match="another worker of consumer group 'g' has it now"):
                        first.commit(message)
                    assert second.committed(message.queue) is None
                else:
                    first.commit(message)


def test_an_iteration_leaves_a_queue_that_was_given_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was in the middle of a block of that queue, whose messages another worker hands out now."""
    monkeypatch.setattr("messagestore.consume.consumer._LOOK_S", math.inf)  # only a poll without messages looks
    with MessageStore.open(tmp_path, SMALL) as store:
        for number in range(10):
            store.put_message(Message("t", b"%d" % number, queue_id=number % 2))
    with worker(tmp_path, consumer_timeout=LONG_S, on_revoked=lambda own, queues: own.resume(*queues)) as first:
        first.pause(("t", 0))
        assert next(first).queue == ("t", 1)
        first.pause()
        with worker(tmp_path) as second:
            balanced(first, second, until=lambda: shares(first, second) == [1, 1])
            assert first.assignment() == {("t", 0)}
            first.resume()
            assert next(first).queue == ("t", 0)


def test_a_worker_whose_look_is_old_continues_where_its_predecessor_committed(root: Path) -> None:
    """It took the newer place for one beyond the end of the queue, and handed out everything again."""
    begun: dict[tuple[str, int], int] = {}

    def assigned(consumer: Consumer, queues: list[tuple[str, int]]) -> None:
        begun.update({queue: consumer.position(queue) for queue in queues})

    with ExitStack() as stack:
        store = stack.enter_context(MessageStore.open(root, SMALL))
        store.put_message(Message("other", b"0"))  # from now on, a reader sees what there was at its last look
        first = stack.enter_context(worker(root, on_revoked=lambda consumer, _: consumer.commit()))
        second = stack.enter_context(worker(root, on_assigned=assigned))
        first.poll()
        claim = second._locks.claim

        def claimed_late(topic: str, queue_id: int) -> bool:
            if not first._closed:
                for number in range(QUEUES):
                    store.put_message(Message("t", b"late", queue_id=number))
                first.poll(LONG_S)
                first.close()
            return claim(topic, queue_id)

        second._locks.claim = claimed_late  # type: ignore[method-assign]
        balanced(second, until=lambda: shares(second) == [QUEUES])
        assert len(begun) == QUEUES
        assert {11} <= {*begun.values()} <= {10, 11}  # some queues may have been given away before the late messages


def test_a_lock_file_that_was_removed_is_noticed_and_nothing_is_committed_over_another(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new worker makes the file again, and locks what the old one has."""
    with worker(root) as first:
        first.poll()
        (root / "spark" / "consumers.lock").unlink()
        with worker(root) as second:
            assert shares(second) == [QUEUES]
            with pytest.raises(StoreLockedError, match="the queues of this worker: not committed"):
                first.commit()
            balanced(first, second, until=lambda: shares(first, second) == [4, 4])
    assert "was removed or replaced" in caplog.text


def test_a_group_on_a_read_only_mount_says_what_to_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an `OSError` without a path."""
    refused = mock.Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr(Disk, "make_empty", refused)
    with pytest.raises(OSError, match="Read-only") as raised, worker(root) as consumer:
        consumer.poll()
    assert re.search(r"spark/consumers\.lock.*Mount it writable, or read without a group", raised.value.__notes__[0])


def test_the_kernel_names_every_lock_of_others(tmp_path: Path) -> None:
    with ExitStack() as stack:
        locks = []
        for count in range(1, 40):
            locks.append(stack.enter_context(_closing(GroupLocks(Disk(), str(tmp_path), "g"))))
            locks[-1].place("t")
            assert [each.place("t") for each in locks] == [(rank, count) for rank in range(count)]
        locks.pop(7).close()
        assert locks[0].place("t") == (0, 38)
        assert locks[-1].place("t") == (37, 38)
        assert locks[0].place("u") == (0, 1)
        assert locks[0].claim("t", 5)
        assert locks[0].claim("t", 5)
        assert not locks[1].claim("t", 5)
        assert locks[1].claim("t", 6)
        locks[0].release("t", 5)
        assert locks[1].claim("t", 5)


@contextmanager
def _closing(locks: GroupLocks) -> Iterator[GroupLocks]:
    try:
        yield locks
    finally:
        locks.close()


# ---- processes

WORKER = """
import sys
from messagestore import Consumer
with Consumer(sys.argv[1], "g", "t") as consumer:
    while True:
        for (topic, queue_id), messages in consumer.poll(0.05).items():
            print(queue_id, *(int(message.body) for message in messages), flush=True)
            consumer.commit()
"""


@contextmanager
def process(root: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WORKER, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def held(root: Path) -> Counter[int]:
    """Which queues have a worker."""
    locks = GroupLocks(Disk(), str(root), "g")
    try:
        return Counter(queue_id for queue_id in range(QUEUES) if not locks.claim("t", queue_id))
    finally:
        locks.close()


def test_four_workers_and_one_is_killed(root: Path) -> None:
    """The others have its queues within a second; this test waits longer only for a machine that is busy."""
    with ExitStack() as stack:
        workers = [stack.enter_context(process(root)) for _ in range(3)]
        with worker(root) as own:
            balanced(own, until=lambda: len(own.assignment()) == 2)
            balanced(own, until=lambda: len(held(root)) == QUEUES)
            workers[0].kill()
            workers[0].wait()
            balanced(own, until=lambda: len(own.assignment()) >= 2 and len(held(root)) == QUEUES)
            workers[1].kill()
            workers[1].wait()
            balanced(own, until=lambda: len(own.assignment()) == 4)
            balanced(own, until=lambda: len(held(root)) == QUEUES)


def test_a_stopped_worker_keeps_its_queues_and_nobody_commits_over_it(root: Path) -> None:
    with process(root) as other, worker(root) as own:
        balanced(own, until=lambda: len(own.assignment()) == 4 and len(held(root)) == QUEUES)
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            own.poll(0.05)
        assert len(own.assignment()) == 4
        other.send_signal(signal.SIGCONT)
        other.kill()
        balanced(own, until=lambda: len(own.assignment()) == QUEUES)


def test_threads_that_commit_before_they_give_queues_away_get_each_message_once(root: Path) -> None:
    """Workers come and go while messages arrive. Whoever commits what it was handed out leaves no second time."""
    found: list[bytes] = []
    ended = threading.Event()
    failed: list[Exception] = []

    def work(polls: int) -> None:
        try:
            while not ended.is_set():
                with worker(root, on_revoked=lambda consumer, _: consumer.commit()) as consumer:
                    for _ in range(polls):
                        for messages in consumer.poll(0.02, 3).values():
                            found.extend(message.body for message in messages)
        except Exception as error:  # noqa: BLE001 # the test shows it
            failed.append(error)

    threads = [threading.Thread(target=work, args=(polls,)) for polls in (5, 20, 60)]
    for thread in threads:
        thread.start()
    with MessageStore.open(root, SMALL) as store:
        for number in range(QUEUES * 10, QUEUES * 40):
            store.put_message(Message("t", b"%d" % number, queue_id=number % QUEUES))
        end_s = time.monotonic() + LONG_S
        while len(set(found)) < QUEUES * 40 and time.monotonic() < end_s and not failed:
            time.sleep(0.01)
    ended.set()
    for thread in threads:
        thread.join(LONG_S)
    assert not failed
    assert Counter(found) == {b"%d" % number: 1 for number in range(QUEUES * 40)}
