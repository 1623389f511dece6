"""Consumers and puts for asyncio: the loop goes on, and a coroutine that is cancelled loses and halves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from messagestore import Consumer, Message, MessageStore, StoreClosedError
from messagestore.aio import AsyncConsumer, AsyncMessageStore
from messagestore.batches.progress import Move
from small import SMALL, read_all

COUNT = 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with MessageStore.open(tmp_path, SMALL) as store:
        for number in range(COUNT):
            store.put_message(Message("t", b"%d" % number, queue_id=0))
    return tmp_path


def numbers(found: dict[tuple[str, int], list[object]]) -> list[int]:
    return [int(message.body) for messages in found.values() for message in messages]  # type: ignore[attr-defined]


def test_messages_come_one_after_the_other(root: Path) -> None:
    async def read() -> list[int]:
        async with AsyncConsumer(root, "g", "t", config=SMALL, consumer_timeout=0.1) as consumer:
            found = [int(message.body) async for message in consumer]
            await consumer.commit()
        return found

    assert asyncio.run(read()) == list(range(COUNT))
    with Consumer(root, "g", "t", config=SMALL) as consumer:
        assert consumer.committed(("t", 0)) == COUNT


def test_the_loop_goes_on_while_a_poll_waits(root: Path) -> None:
    async def wait() -> list[int]:
        async with (
            AsyncMessageStore(root, SMALL) as store,
            AsyncConsumer(root, "g", "t", config=SMALL, start="latest") as consumer,
        ):
            waiting = asyncio.create_task(consumer.poll(None))
            await store.put(Message("t", b"77", queue_id=0))
            return numbers(await waiting)  # type: ignore[arg-type]

    assert asyncio.run(wait()) == [77]


@pytest.mark.parametrize("before", [True, False])
def test_a_poll_that_is_cancelled_loses_no_message(root: Path, monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """Its messages counted as handed out, and the next commit covered them."""
    polled, go_on = threading.Event(), threading.Event()
    real = Consumer.poll

    def slow(consumer: Consumer, *given: object) -> object:
        found = None if before else real(consumer, *given)  # type: ignore[arg-type]
        polled.set()
        go_on.wait(60)
        return real(consumer, *given) if before else found  # type: ignore[arg-type]

    async def cancel() -> list[int]:
        async with AsyncConsumer(root, "g", "t", config=SMALL) as consumer:
            assert numbers(await consumer.poll(0, 3)) == [0, 1, 2]  # type: ignore[arg-type]
            monkeypatch.setattr(Consumer, "poll", slow)
            cancelled = asyncio.create_task(consumer.poll(0, 5))
            await asyncio.to_thread(polled.wait, 60)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            monkeypatch.undo()
            go_on.set()
            await consumer.commit()
            assert consumer.consumer.committed(("t", 0)) == 3
            return numbers(await consumer.poll(0, 5))  # type: ignore[arg-type]

    assert asyncio.run(cancel()) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("closes", [True, False], ids=["auto-commit-at-the-end", "commit"])
def test_a_poll_that_is_cancelled_and_not_awaited_loses_no_message(
    root: Path, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    """A commit right after `cancel()` came before the call that takes the messages back, and covered them."""
    polled, go_on = threading.Event(), threading.Event()
    real = Consumer.poll

    def slow(consumer: Consumer, *given: object) -> object:
        found = real(consumer, *given)  # type: ignore[arg-type]
        polled.set()
        go_on.wait(60)
        return found

    async def cancel() -> None:
        async with AsyncConsumer(root, "g", "t", config=SMALL, auto_commit=closes) as consumer:
            assert numbers(await consumer.poll(0, 3)) == [0, 1, 2]  # type: ignore[arg-type]
            monkeypatch.setattr(Consumer, "poll", slow)
            cancelled = asyncio.create_task(consumer.poll(0, 5))
            await asyncio.to_thread(polled.wait, 60)
            monkeypatch.undo()
            go_on.set()
            cancelled.cancel()
            if not closes:
                await consumer.commit()

    asyncio.run(cancel())
    with Consumer(root, "g", "t", config=SMALL) as consumer:
        assert numbers(consumer.poll(0, 5)) == [3, 4, 5, 6, 7]  # type: ignore[arg-type]


@pytest.mark.parametrize("begun", [True, False])
def test_a_put_that_is_cancelled_is_stored_whole_or_not_at_all(
    root: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    in_call, go_on = threading.Event(), threading.Event()
    real = MessageStore.put_message_async

    def slow(store: MessageStore, message: Message) -> object:
        in_call.set()
        go_on.wait(60)
        return real(store, message)

    async def cancel() -> None:
        async with AsyncMessageStore(root, SMALL) as store:
            monkeypatch.setattr(MessageStore, "put_message_async", slow)
            first = asyncio.create_task(store.put(Message("p", b"first", queue_id=0)))
            await asyncio.to_thread(in_call.wait, 60)
            second = asyncio.create_task(store.put(Message("p", b"second", queue_id=0)))
            await asyncio.sleep(0)
            (first if begun else second).cancel()
            with pytest.raises(asyncio.CancelledError):
                await (first if begun else second)
            go_on.set()
            assert (await (second if begun else first)).is_ok

    asyncio.run(cancel())
    with MessageStore.open(root, SMALL) as store:
        assert read_all(store, "p") == ([b"first", b"second"] if begun else [b"first"])


def test_many_puts_at_once(root: Path) -> None:
    async def put() -> list[int]:
        async with AsyncMessageStore(root, SMALL) as store:
            puts = [store.put(Message("p", b"%d" % number, queue_id=0)) for number in range(100)]
            return sorted(result.queue_offset for result in await asyncio.gather(*puts))

    assert asyncio.run(put()) == list(range(100))


def test_a_pipe_moves_its_group_with_its_results(root: Path) -> None:
    async def pipe() -> None:
        async with AsyncMessageStore(root, SMALL) as store, AsyncConsumer(root, "g", "t", config=SMALL) as consumer:
            while found := await consumer.poll(0, 7):
                rows = pa.table({"body": [message.body for messages in found.values() for message in messages]})
                await store.append_batch(rows, topic="out", queue_id=0, progress=await consumer.positions())

    asyncio.run(pipe())
    with MessageStore.open(root, SMALL) as store:
        assert len(read_all(store, "out")) == COUNT


def test_a_consumer_waits_for_a_batch_whose_caller_was_cancelled(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has the consumer until it is appended, and the next call said that another thread uses it."""
    begun, go_on = threading.Event(), threading.Event()
    real = Move.finish

    def slow(move: Move) -> None:
        begun.set()
        go_on.wait(60)
        real(move)

    async def cancel() -> list[int]:
        async with AsyncMessageStore(root, SMALL) as store, AsyncConsumer(root, "g", "t", config=SMALL) as consumer:
            await consumer.poll(0, 3)
            rows = pa.table({"body": [b"result"]})
            monkeypatch.setattr(Move, "finish", slow)
            batch = store.append_batch(rows, topic="out", queue_id=0, progress=await consumer.positions())
            appending = asyncio.create_task(batch)
            await asyncio.to_thread(begun.wait, 60)
            appending.cancel()
            polling = asyncio.create_task(consumer.poll(0, 2))
            await asyncio.wait([polling], timeout=0.2)
            go_on.set()
            found = numbers(await polling)  # type: ignore[arg-type]
            assert consumer.consumer.committed(("t", 0)) == 3
            return found

    assert asyncio.run(cancel()) == [3, 4]


async def put_unopened(root: Path) -> None:
    await AsyncMessageStore(root).put(Message("t", b".", queue_id=0))


@pytest.mark.parametrize("what", [lambda root: AsyncConsumer(root, "g", "t").poll(), put_unopened])
def test_what_is_not_open_says_so(root: Path, what: Callable[[Path], object]) -> None:
    with pytest.raises(StoreClosedError, match=r"is not open\. Use it in `async with"):
        asyncio.run(what(root))  # type: ignore[arg-type]


def test_what_is_closed_says_so(root: Path) -> None:
    async def use() -> None:
        async with AsyncConsumer(root, "g", "t", config=SMALL) as consumer:
            pass
        with pytest.raises(StoreClosedError, match=r"closed\. Open another one"):
            await consumer.poll()

    asyncio.run(use())
