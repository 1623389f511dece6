"""Messages that could not be processed: they come again, hold their queue, or are among the dead letters."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from messagestore import ConfigError, ConsumedMessage, Consumer, Message, MessageStore
from small import SMALL

CONFIG = SMALL.replace(message_delay_level="1s 1s 1s")
RETRY, DEAD = "%RETRY%g", "%DLQ%g"
LONG_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with MessageStore.open(tmp_path, CONFIG) as store:
        for queue_id in (0, 1):
            for number in range(3):
                body = b"%d.%d" % (queue_id, number)
                store.put_message(Message("t", body, queue_id=queue_id, tags="a", keys=["k"], properties={"own": "1"}))
    return tmp_path


def consumer(root: Path, **given: Any) -> Consumer:
    return Consumer(root, "g", "t", config=CONFIG, **given)


def polled(reader: Consumer, timeout: float = 0) -> list[ConsumedMessage]:
    return [message for messages in reader.poll(timeout).values() for message in messages]


def bodies(messages: list[ConsumedMessage]) -> set[bytes]:
    return {message.body for message in messages}


def delivered(root: Path, count: int) -> None:
    """Deliver until so many messages are in the retry topic."""
    end_s = time.monotonic() + LONG_S
    with MessageStore.open(root, CONFIG) as store:
        while store.max_offset(RETRY, 0) < count:
            assert time.monotonic() < end_s
            store.deliver_delayed()
            time.sleep(0.01)


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_message_that_is_retried_comes_again(root: Path, start: str) -> None:
    with consumer(root) as reader:
        failed = polled(reader)[1]
        failed.retry()
        reader.commit()
    delivered(root, 1)
    with consumer(root, start=start) as reader:
        (again,) = polled(reader, LONG_S)
        assert (again.topic, again.origin_topic, again.reconsume_times) == (RETRY, "t", 1)
        assert (again.body, again.tags, again.keys) == (failed.body, "a", ("k",))
        again.retry(delay_level=1)
        reader.commit()
        delivered(root, 2)
        (again,) = polled(reader, LONG_S)
        assert (again.topic, again.origin_topic, again.reconsume_times) == (RETRY, "t", 2)


def test_after_the_last_retry_it_is_a_dead_letter(root: Path) -> None:
    with MessageStore.open(root, CONFIG) as store:
        store.create_group("g", retry_max_times=0)
    with consumer(root) as reader:
        failed = polled(reader)[0]
        failed.retry()
    with MessageStore.open_read_only(root, CONFIG) as store:
        assert [message.body for message in store.get_message(DEAD, 0, 0).messages] == [failed.body]


@pytest.mark.parametrize("reason", [None, "no such order"])
def test_a_dead_letter_says_why(root: Path, reason: str | None) -> None:
    with consumer(root) as reader:
        polled(reader)[0].dead_letter(reason)
    with MessageStore.open_read_only(root, CONFIG) as store:
        (dead,) = store.get_message(DEAD, 0, 0).messages
    assert dead.properties == {"own": "1"} | ({} if reason is None else {"DEAD_LETTER_REASON": reason})
    assert dead.reconsume_times == 1


def test_a_wrong_return_has_its_sentence(root: Path) -> None:
    with consumer(root) as reader:
        message = polled(reader)[0]
        for level in ("1", 0, -1, 19):
            with pytest.raises(ConfigError, match=r"delay_level: found .*; allowed is a whole number from 1 to"):
                message.retry(level)  # type: ignore[arg-type]
        for reason in ("", 3):
            with pytest.raises(ConfigError, match="reason: found"):
                message.dead_letter(reason)  # type: ignore[arg-type]
    with consumer(root, orderly=True) as reader:
        (message, _) = polled(reader)
        for level in (0, "1", 19):
            with pytest.raises(ConfigError, match="delay_level: found"):
                message.retry(level)  # type: ignore[arg-type]
        reader.commit(message)
        with pytest.raises(ConfigError, match="allowed in an orderly consumer is the message that holds its queue"):
            message.retry()
    with pytest.raises(ConfigError, match="orderly: found 1; allowed is True or False"):
        consumer(root, orderly=1)


def test_orderly_hands_out_one_message_of_a_queue_at_a_time(root: Path) -> None:
    with consumer(root, orderly=True) as reader:
        first = polled(reader)
        assert bodies(first) == {b"0.0", b"1.0"}
        assert polled(reader) == []
        reader.commit(first[0])
        assert bodies(polled(reader)) == {b"%d.1" % first[0].queue_id}
        reader.commit()
        assert len(polled(reader)) == 2


@pytest.mark.parametrize("named", [False, True], ids=["commit all", "commit the messages"])
def test_a_message_that_failed_holds_its_queue_and_its_group(root: Path, named: bool) -> None:
    """Also if it is committed by name, as the loop of the guide does with each message."""
    with consumer(root, orderly=True) as reader:
        failed, done = polled(reader)
        failed.retry()
        reader.commit([failed, done] if named else None)
        assert reader.committed(failed.queue) == 0
        assert reader.committed(done.queue) == 1
        assert bodies(polled(reader)) == {b"%d.1" % done.queue_id}
        again = polled(reader, LONG_S)
        assert again == [failed]
        reader.commit()
        assert reader.committed(failed.queue) == 1
        assert bodies(polled(reader)) == {b"%d.1" % failed.queue_id, b"%d.2" % done.queue_id}


def test_a_dead_letter_lets_its_queue_go_on(root: Path) -> None:
    with consumer(root, orderly=True) as reader:
        failed, _ = polled(reader)
        failed.dead_letter()
        assert bodies(polled(reader)) == {b"%d.1" % failed.queue_id}


def test_an_orderly_iteration_goes_on_with_each_commit(root: Path) -> None:
    with consumer(root, orderly=True, consumer_timeout=0.2) as reader:
        found = []
        for message in reader:
            found.append(message.body)
            reader.commit(message)
    assert sorted(found) == [b"%d.%d" % (queue_id, number) for queue_id in (0, 1) for number in range(3)]


@pytest.mark.parametrize("interval_s", [0, 3600], ids=["each time", "at the end"])
def test_an_orderly_consumer_that_commits_by_itself_goes_on_with_each_call(root: Path, interval_s: float) -> None:
    """It handed out the first message of each queue, and waited for a commit for ever."""
    with consumer(root, orderly=True, auto_commit=True, auto_commit_interval=interval_s) as reader:
        first = polled(reader)
        first[0].retry()
        assert bodies(polled(reader)) == {b"%d.1" % first[1].queue_id}
        assert bodies(polled(reader)) == {b"%d.2" % first[1].queue_id}
        assert polled(reader, None) == [first[0]]
    with consumer(root) as reader:
        assert {queue: reader.committed(queue) for queue in reader.assignment()} == {
            first[0].queue: 1,
            first[1].queue: 3,
        }


def test_a_poll_without_a_time_ends_when_a_message_that_failed_comes_again(root: Path) -> None:
    with consumer(root, orderly=True) as reader:
        failed, _ = polled(reader)
        failed.retry()
        assert polled(reader, None) == [failed]


def test_an_orderly_consumer_counts_its_retries(root: Path) -> None:
    """The loop of the guide, which gives up after three, went on for ever with a message that always failed."""
    seen: dict[bytes, list[int]] = {}
    with consumer(root, orderly=True, consumer_timeout=3 * LONG_S) as reader:
        for message in reader:
            seen.setdefault(message.body, []).append(message.reconsume_times)
            if message.body == b"0.1" and message.reconsume_times < 3:
                message.retry(1)
            elif message.body == b"0.1":
                message.dead_letter("always")
            reader.commit(message)
            if len(seen) == 6:
                break
    assert seen[b"0.1"] == [0, 1, 2, 3]
    assert seen.keys() == {b"%d.%d" % (queue_id, number) for queue_id in (0, 1) for number in range(3)}
