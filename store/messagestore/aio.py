"""Consumers and puts for `asyncio`: `async for message in consumer`, `await store.put(message)`.

    coroutine --- a call ---> one thread for each object ---> Consumer, MessageStore
              <-- result ---

What a consumer and a store do is done in a thread of the object's own, one call after the other, so the event loop goes
on. A coroutine may be cancelled at any await:

- A poll that is cancelled loses no message: what it had got by then is handed out by the next one.
- A put, a batch or a commit that is cancelled has not begun, or is done to its end; it is never done by half.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from messagestore.batches.append import BatchRequest, BatchResult
from messagestore.consume.consumer import Consumer
from messagestore.consume.messages import ConsumedMessage
from messagestore.consume.positions import Positions
from messagestore.errors import StoreClosedError
from messagestore.format import arguments
from messagestore.format.message import Message, PutMessageResult
from messagestore.message_store import MessageStore

Queue = tuple[str, int]
T = TypeVar("T")
_SLICE_S = 0.1
"""How long one call waits in the thread: a poll that is cancelled keeps the thread for so long."""


class _Thread:
    """The thread of one object."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run a call. If the caller is cancelled meanwhile, `undo` gets the result that nobody got."""
        try:
            running: Future[T] = self._pool.submit(contextvars.copy_context().run, work)
        except RuntimeError:
            raise StoreClosedError("this object is closed. Open another one") from None
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if undo is not None:
                self._pool.submit(_undo, running, undo)
            raise

    async def end(self, work: Callable[[], object]) -> None:
        """Run the last call, also if the caller is cancelled."""
        last = self._pool.submit(work)
        self._pool.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(last))


def _undo(running: Future[T], undo: Callable[[T], object]) -> None:
    if not running.cancelled() and running.exception() is None:
        undo(running.result())


class AsyncConsumer:
    """A `Consumer` for `asyncio`. Its arguments are those of `Consumer`.

    `on_assigned` and `on_revoked` are called in the object's thread, with the `Consumer`.

    Examples
    --------
    >>> import asyncio
    >>> from messagestore import Message, MessageStore
    >>> from messagestore.aio import AsyncConsumer
    >>> with MessageStore.open("store") as store:
    ...     for gate in (b"B12", b"C3"):
    ...         _ = store.put_message(Message("gates", gate, queue_id=0))
    >>> async def read():
    ...     async with AsyncConsumer("store", "boards", "gates", consumer_timeout=0.1) as consumer:
    ...         async for message in consumer:
    ...             print(message.queue_offset, message.body)
    ...             await consumer.commit()
    >>> asyncio.run(read())
    0 b'B12'
    1 b'C3'
    """

    def __init__(
        self,
        root: Any,
        group: str,
        topics: str | Sequence[str] = (),
        *,
        consumer_timeout: float | None = None,
        **options: Any,
    ) -> None:
        self._idle_s = math.inf if consumer_timeout is None else arguments.seconds("consumer_timeout", consumer_timeout)
        self._open = lambda: Consumer(root, group, topics, **options)
        self._consumer: Consumer | None = None
        self._thread = _Thread("messagestore-consumer")
        self._turn = asyncio.Lock()
        """Held until the caller has what a call returned, or the call that takes it back is behind it."""

    @property
    def consumer(self) -> Consumer:
        """The consumer behind this one, for what needs no thread. Use it while no call of this object is under way."""
        if self._consumer is None:
            raise StoreClosedError("the consumer is not open. Use it in `async with AsyncConsumer(...) as consumer:`")
        return self._consumer

    async def __aenter__(self) -> Self:
        self._consumer = await self._thread.call(self._open, Consumer.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        consumer = self.consumer
        try:
            async with self._turn:
                pass
        finally:
            await self._thread.end(lambda: consumer.__exit__(kind, error, trace))

    async def _call(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run a call behind those before it, so that a commit covers only what their callers got.

        A batch of a store that moves the group, and whose caller was cancelled, ends first, too.
        """
        consumer = self.consumer
        async with self._turn:
            return await self._thread.call(lambda: consumer.in_turn(work), undo)

    async def poll(self, timeout: float | None = 0.0, max_records: int = 500) -> dict[Queue, list[ConsumedMessage]]:
        """Messages that were not handed out yet, as `Consumer.poll`. If it is cancelled, the next poll has them."""
        end_s = math.inf if timeout is None else time.monotonic() + arguments.seconds("timeout", timeout)
        return await self._poll(end_s, max_records)

    async def _poll(self, end_s: float, most: int) -> dict[Queue, list[ConsumedMessage]]:
        consumer = self.consumer

        def wait() -> dict[Queue, list[ConsumedMessage]]:
            return consumer.poll(max(0.0, min(_SLICE_S, end_s - time.monotonic())), most)

        while not (messages := await self._call(wait, consumer.take_back)):
            if time.monotonic() >= end_s:
                break
        return messages

    def __aiter__(self) -> AsyncIterator[ConsumedMessage]:
        return self

    async def __anext__(self) -> ConsumedMessage:
        for (message,) in (await self._poll(time.monotonic() + self._idle_s, 1)).values():
            return message
        raise StopAsyncIteration

    async def commit(self, messages: ConsumedMessage | Iterable[ConsumedMessage] | None = None) -> None:
        """Record how far the group has come, as `Consumer.commit`."""
        consumer = self.consumer
        await self._call(lambda: consumer.commit(messages))

    async def positions(self, messages: ConsumedMessage | Iterable[ConsumedMessage] | None = None) -> Positions:
        """The group's progress for `AsyncMessageStore.append_batch`, as `Consumer.positions`."""
        consumer = self.consumer
        return await self._call(lambda: consumer.positions(messages))


class AsyncMessageStore:
    """A `MessageStore` for `asyncio`. Its arguments are those of `MessageStore.open`.

    Examples
    --------
    >>> import asyncio
    >>> from messagestore import Message
    >>> from messagestore.aio import AsyncMessageStore
    >>> async def write():
    ...     async with AsyncMessageStore("store") as store:
    ...         results = await asyncio.gather(*(store.put(Message("gates", b"B12", queue_id=0)) for _ in range(3)))
    ...         print(sorted(result.queue_offset for result in results))
    >>> asyncio.run(write())
    [0, 1, 2]
    """

    def __init__(self, root: Any, *settings: Any, **options: Any) -> None:
        self._open = lambda: MessageStore.open(root, *settings, **options)
        self._store: MessageStore | None = None
        self._thread = _Thread("messagestore-puts")

    @property
    def store(self) -> MessageStore:
        """The store behind this one, for what needs no thread."""
        if self._store is None:
            raise StoreClosedError("the store is not open. Use it in `async with AsyncMessageStore(...) as store:`")
        return self._store

    async def __aenter__(self) -> Self:
        self._store = await self._thread.call(self._open, MessageStore.close)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._thread.end(self.store.close)

    async def put(self, message: Message) -> PutMessageResult:
        """Put a message, as `MessageStore.put_message`. Puts that are under way at the same time share a sync.

        If it is cancelled, the message is stored as a whole or not at all.
        """
        store = self.store
        put = await self._thread.call(lambda: store.put_message_async(message))
        return await asyncio.shield(asyncio.wrap_future(put))

    async def append_batch(
        self,
        columns: Any,
        request: BatchRequest | None = None,
        *,
        topic: str | None = None,
        queue_id: int | None = None,
        progress: Positions | Mapping[str, Mapping[Queue, int]] | None = None,
    ) -> BatchResult:
        """Append a batch, as `MessageStore.append_batch`. If it is cancelled, it is stored as a whole or not at all."""
        store = self.store
        return await self._thread.call(
            lambda: store.append_batch(columns, request, topic=topic, queue_id=queue_id, progress=progress)
        )
