"""The live list: what is new comes to each reader, what is too fast is counted, and streams end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from dashboard_client import Client
from messagestore import BatchRequest, Message, MessageStore
from pyspark_messagestore.dashboard import app, tail
from pyspark_messagestore.dashboard.reads import Reads
from small import SMALL, bodies, columns, filled

LONG_S = 120.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "store", 4)


class Stream:
    """One open stream, as a browser has it."""

    def __init__(self, sent: asyncio.Queue[dict[str, Any]]) -> None:
        self._sent, self._text = sent, ""
        self.left = asyncio.Event()

    async def status(self) -> int:
        return int((await self._sent.get())["status"])

    async def next(self, kind: str) -> Any:
        """The data of the next event, which must be of this kind."""
        found, data = await self.any()
        assert found == kind, (found, data)
        return data

    async def any(self) -> tuple[str, Any]:
        """The next event."""
        while True:
            while "\n\n" not in self._text:
                self._text += (await self._sent.get())["body"].decode()
            block, _, self._text = self._text.partition("\n\n")
            if block.startswith("event: "):
                kind, data = block.split("\n")
                return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def end(self) -> None:
        """Read until the server has ended the stream."""
        while (await self._sent.get()).get("more_body"):
            pass


@contextlib.asynccontextmanager
async def following(client: Client, address: str, status: int = 200) -> AsyncIterator[Stream]:
    """A reader that stays as long as the block."""
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    stream = Stream(sent)

    async def receive() -> dict[str, Any]:
        await stream.left.wait()
        return {"type": "http.disconnect"}

    task = asyncio.create_task(client.application(client.scope(address), receive, sent.put))
    try:
        assert await stream.status() == status
        yield stream
    finally:
        stream.left.set()
        await task


def told(story: Coroutine[Any, Any, None]) -> None:
    """Run a story to its end; nothing follows a store any more then."""

    async def limited() -> None:
        async with asyncio.timeout(LONG_S):
            await story

    asyncio.run(limited())
    for thread in threading.enumerate():
        if thread.name == "dashboard-tail":
            thread.join(LONG_S)
            assert not thread.is_alive()


def put(root: Path, body: bytes, key: str = "k", tags: str = "a") -> None:
    with MessageStore.open(root, SMALL) as store:
        assert store.put_message(Message("t", body, queue_id=1, keys=(key,), tags=tags)).is_ok


def test_two_readers_of_which_one_leaves_and_comes_back(root: Path) -> None:
    async def story() -> None:
        client = Client(app([root]))
        async with following(client, "/s/store/events?topic=t&columns=price") as all_of_them:
            await all_of_them.next("begin")
            for part in ("first", "second"):
                async with following(client, "/s/store/events?topic=t&queue=1&tag=b") as some:
                    await some.next("begin")
                    put(root, b"not for both", key=f"a-{part}")
                    put(root, b'{"price": 7}', key=f"b-{part}", tags="b")
                    assert (await some.next("message"))["keys"] == f"b-{part}"
                assert (await all_of_them.next("message"))["keys"] == f"a-{part}"
                row = await all_of_them.next("message")
                assert (row["keys"], row["cells"], row["body"]) == (f"b-{part}", ["7"], '{"price": 7}')
                put(root, b"nobody else", key=f"between-{part}", tags="b")
                assert (await all_of_them.next("message"))["keys"] == f"between-{part}"

    told(story())


def test_a_row_leads_to_its_message_and_is_text_that_shows_what_is_hidden_in_it(root: Path) -> None:
    async def story() -> None:
        client = Client(app([root]))
        async with following(client, "/s/store/events?topic=t&columns=a") as stream:
            await stream.next("begin")
            put(root, '{"a": "\u202e<b>"}'.encode(), key="\u202ekey", tags="\u2066")
            row = await stream.next("message")
        assert (row["topic"], row["queueId"], row["queueOffset"], row["place"]) == ("t", 1, 2, "t/1 @2")
        assert (row["cells"], row["keys"], row["tags"]) == (["\\u202e<b>"], "\\u202ekey", "\\u2066")
        assert row["body"] == '{"a": "\\u202e<b>"}'

    told(story())


@pytest.mark.parametrize(("limit", "most"), [("MOST_READ", 5), ("MOST_READ_SIZE", 1), ("MOST_WAITING", 3)])
def test_what_comes_too_fast_is_counted(root: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    monkeypatch.setattr(tail, limit, most)

    async def story() -> None:
        async with following(Client(app([root])), "/s/store/events?topic=t") as stream:
            await stream.next("begin")
            with MessageStore.open(root, SMALL) as store:
                store.append_batch(columns(bodies(50)), BatchRequest(app_id="fast", version=1))
            shown = dropped = 0
            while shown + dropped < 50:
                kind, data = await stream.any()
                shown, dropped = shown + (kind == "message"), dropped + data.get("count", 0)
        assert shown + dropped == 50 and shown and dropped

    told(story())


def test_all_streams_together_read_so_many_bytes_a_second(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were outside the limit. Whoever waits misses nothing, and pages do not wait for streams."""
    now_s = [0.0]
    monkeypatch.setattr(tail, "Reads", lambda limit: Reads(limit, lambda: now_s[0]))

    async def story() -> None:
        client = Client(app([root], read_limit=100))
        async with (
            following(client, "/s/store/events?topic=t") as one,
            following(client, "/s/store/events?topic=t") as other,
        ):
            for stream in (one, other):
                await stream.next("begin")
            with MessageStore.open(root, SMALL) as store:
                for number in range(2):
                    assert store.put_message(Message("t", b"%d" % number * 1000, queue_id=0)).is_ok
                    first = [asyncio.ensure_future(stream.next("message")) for stream in (one, other)]
                    _, waiting = await asyncio.wait(first, timeout=1.0)
                    while waiting:  # 25 bytes a second, of which 400 are kept
                        now_s[0] += 100.0
                        _, waiting = await asyncio.wait(first, timeout=1.0)
                    assert now_s[0] >= 100.0 * (number + 1)
                    assert [each.result()["body"][0] for each in first] == [str(number)] * 2
            assert (await client.ask("/s/store/recent?topic=t")).status == 200

    told(story())


def test_so_many_streams_and_no_more(root: Path) -> None:
    async def story() -> None:
        client, address = Client(app([root])), "/s/store/events?topic=t"
        async with contextlib.AsyncExitStack() as streams:
            for _ in range(tail.MOST_STREAMS - 1):
                await streams.enter_async_context(following(client, address))
            async with following(client, address):
                answer = await client.ask(address)
                assert (answer.status, answer.headers["retry-after"]) == (503, "10")
                assert "32 live lists are open" in answer.json["error"]
                assert (await client.ask("/s/store/topics")).status == 200
            head = await client.ask(address, method="HEAD")
            assert (head.status, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            async with following(client, address):
                pass

    told(story())


def test_a_server_that_ends_ends_the_streams(root: Path) -> None:
    async def story() -> None:
        application = app([root])
        client = Client(application)
        async with following(client, "/s/store/events?topic=t") as stream:
            await stream.next("begin")
            application.end_streams()
            await stream.end()
            assert (await client.ask("/s/store/events?topic=t")).status == 503

    told(story())


def test_a_store_that_is_not_there_yet_is_a_sentence(tmp_path: Path) -> None:
    async def story() -> None:
        async with following(Client(app([tmp_path / "store"])), "/s/store/events?topic=t") as stream:
            assert "store" in (await stream.next("fault"))["sentence"]
            root = filled(tmp_path / "store", 2)
            while (event := await stream.any())[0] == "fault":
                pass
            assert event[0] == "begin"
            put(root, b"new", key="new")
            assert (await stream.next("message"))["keys"] == "new"

    told(story())


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/s/store/events", 400),
        ("/s/store/events?topic=t&queue=x", 400),
        ("/s/store/events?topic=t&columns=" + "a," * 13, 400),
        ("/s/other/events?topic=t", 404),
    ],
)
def test_an_address_that_says_too_little(root: Path, address: str, status: int) -> None:
    answer = Client(app([root]))(address)
    assert answer.status == status and answer.json["error"]


def test_masks_and_hidden_bodies_count_for_the_live_list_too(root: Path) -> None:
    async def story() -> None:
        for hidden in (app([root], masks=["card", "KEYS"]), app([root], hide_bodies=True)):
            async with following(Client(hidden), "/s/store/events?topic=t&columns=card") as stream:
                await stream.next("begin")
                put(root, b'{"card": "4111"}', key="guess")
                put(root, b"4111")
                rows = [await stream.next("message") for _ in range(2)]
            assert "4111" not in str(rows)
            assert "guess" not in str(rows) or rows[0]["body"] == "hidden"

    told(story())
