"""What the dashboard reads in a second: what is counted, who waits, and for whom nobody waits."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from dashboard_client import Client
from messagestore import ConfigError, Message, MessageStore
from pyspark_messagestore.dashboard import app, application
from pyspark_messagestore.dashboard.guard import MOST_AT_ONCE
from pyspark_messagestore.dashboard.looks import SEARCH_SIZE
from pyspark_messagestore.dashboard.reads import KEPT_S, MOST_WAIT_S, MOST_WAITING, READ_LIMIT, Reads
from small import SMALL, filled

LONG_S = 120.0
BODY_SIZE, LIMIT = 1000, 100
LIST = "/s/store/messages?topic=t&queue=1"


class Clock:
    """A clock that stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Dashboard:
    """The application about a store, with a clock of the test, and what it may read."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        made: list[Reads] = []

        def reads(limit: int) -> Reads:
            made.append(Reads(limit, self.clock))
            return made[0]

        monkeypatch.setattr(application, "Reads", reads)
        self.client = Client(app([root], read_limit=LIMIT))
        (self.reads,) = made

    def asks(self, address: str) -> Asking:
        """A client that stays until it is told to leave."""
        return Asking(self.client, address)

    async def waits_for(self, count: int) -> None:
        """Go on when so many requests wait."""
        while self.reads.waiting != count:
            await asyncio.sleep(0.001)


class Asking:
    """A request under way."""

    def __init__(self, client: Client, address: str) -> None:
        self.left, self.sent = asyncio.Event(), list[dict[str, Any]]()
        self.task = asyncio.create_task(client.application(client.scope(address), self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def answer(self) -> tuple[int, dict[bytes, bytes]]:
        await self.task
        return self.sent[0]["status"], dict(self.sent[0]["headers"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten messages of a batch, and ten of a kilobyte in t/1, whose list is more than may be read at once."""
    root = filled(tmp_path / "store", 10)
    with MessageStore.open(root, SMALL) as store:
        for number in range(10):
            assert store.put_message(Message("t", bytes(BODY_SIZE), queue_id=1, keys=(f"k-{number}",))).is_ok
    return root


@pytest.fixture
def dashboard(root: Path, monkeypatch: pytest.MonkeyPatch) -> Dashboard:
    return Dashboard(root, monkeypatch)


def told(story: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LONG_S):
            await story

    asyncio.run(limited())


async def never() -> dict[str, Any]:
    raise AssertionError("nobody waits")


def test_room_grows_with_time_and_no_further_than_it_is_kept() -> None:
    clock = Clock()
    reads = Reads(LIMIT, clock)
    assert reads.wait_s == 0.0
    reads.read(LIMIT * KEPT_S)
    assert 0 < reads.wait_s <= 1 / LIMIT
    reads.read(LIMIT)
    assert 1 < reads.wait_s <= 1 + 1 / LIMIT
    clock.now_s += 1.5
    assert reads.wait_s == 0.0
    clock.now_s += 3600.0
    reads.read(LIMIT * KEPT_S - 1)
    assert reads.wait_s == 0.0
    reads.read(1)
    assert reads.wait_s > 0.0


def test_a_person_who_clicks_never_waits() -> None:
    """Four searches of as much as one may read at once, and then one every four seconds."""
    clock = Clock()
    reads = Reads(READ_LIMIT, clock)
    for number in range(100):
        assert asyncio.run(reads.begin(SEARCH_SIZE, never))
        reads.read(SEARCH_SIZE)
        reads.end(SEARCH_SIZE)
        clock.now_s += 0.0 if number < 3 else SEARCH_SIZE / READ_LIMIT + 0.001


def test_without_a_limit_nobody_waits() -> None:
    reads = Reads(0, Clock())
    reads.read(1 << 50)
    assert asyncio.run(reads.begin(1 << 50, never)) and reads.wait_s == 0.0


@pytest.mark.parametrize(
    ("address", "least"),
    [
        (LIST, 10 * BODY_SIZE),
        (f"/api/v1{LIST}", 10 * BODY_SIZE),
        ("/s/store/recent?topic=t", 10 * BODY_SIZE),
        ("/s/store/recent?topic=t&tag=none", 10 * BODY_SIZE),
        ("/s/store/recent?topic=t&queue=1&until=2100-01-01T00:00:00Z", 10 * BODY_SIZE),
        ("/s/store/download?topic=t", 10 * BODY_SIZE),
        ("/s/store/download?topic=t&queue=1&offset=3&format=parquet", 7 * BODY_SIZE),
        ("/s/store/search?q=k-3", BODY_SIZE),
        ("/s/store/message?topic=t&queue=1&offset=9", BODY_SIZE),
        ("/s/store/body?topic=t&queue=1&offset=9", BODY_SIZE),
    ],
)
def test_what_is_read_is_counted(dashboard: Dashboard, address: str, least: int) -> None:
    dashboard.reads.read(LIMIT * KEPT_S - 1)
    assert dashboard.client(address).status == 200
    assert dashboard.reads.wait_s >= (least - 1) / LIMIT
    assert dashboard.client(address).status == 503  # this client has gone when it has to wait


def test_a_search_counts_what_it_reads_without_an_index(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(root / "index")
    dashboard = Dashboard(root, monkeypatch)
    found = dashboard.client("/api/v1/s/store/search?q=no-such-key").json
    assert not found["messages"] and found["searchedSize"] > 10 * BODY_SIZE
    assert dashboard.reads.wait_s >= found["searchedSize"] / LIMIT - KEPT_S


@pytest.mark.parametrize(
    "address",
    [
        "/",
        "/healthz",
        "/metrics",
        "/api/v1/stores",
        *(f"/s/store/{look}" for look in ("status", "topics", "topic?topic=t", "readers", "log", "spark", "verify")),
    ],
)
def test_other_pages_read_no_message_and_never_wait(dashboard: Dashboard, address: str) -> None:
    before_s = dashboard.reads.wait_s
    assert dashboard.client(address).status == 200
    assert dashboard.reads.wait_s == before_s == 0.0
    dashboard.reads.read(1 << 40)
    assert dashboard.client(address).status == 200


def test_who_waits_takes_no_place_of_others(dashboard: Dashboard) -> None:
    """More requests wait than are answered at once, and each is answered when there is room."""

    async def story() -> None:
        assert (await dashboard.asks(LIST).answer())[0] == 200
        asking = [dashboard.asks(LIST) for _ in range(MOST_AT_ONCE + 1)]
        await dashboard.waits_for(len(asking))
        assert (await dashboard.client.ask("/")).status == 200
        assert not any(each.sent for each in asking)
        while dashboard.reads.waiting:
            dashboard.reads.end(1 << 40)  # as if another one had read less than it might
            await asyncio.sleep(0.001)
        assert {(await each.answer())[0] for each in asking} == {200}

    told(story())


def test_a_client_that_leaves_waits_no_more(dashboard: Dashboard) -> None:
    async def story() -> None:
        assert (await dashboard.asks(LIST).answer())[0] == 200
        wait_s = dashboard.reads.wait_s
        asking = dashboard.asks(LIST)
        await dashboard.waits_for(1)
        asking.left.set()
        await asking.task
        assert dashboard.reads.waiting == 0 and dashboard.reads.wait_s == wait_s

    told(story())


def test_who_has_waited_for_long_is_told_when_to_come_again(dashboard: Dashboard) -> None:
    async def story() -> None:
        assert (await dashboard.asks(LIST).answer())[0] == 200
        asking = dashboard.asks(LIST)
        await dashboard.waits_for(1)
        dashboard.clock.now_s += MOST_WAIT_S
        status, headers = await asking.answer()
        again_s = int(headers[b"retry-after"])
        assert status == 503 and again_s > 10 * BODY_SIZE / LIMIT - KEPT_S - MOST_WAIT_S
        dashboard.clock.now_s += again_s
        assert (await dashboard.asks(LIST).answer())[0] == 200

    told(story())


def test_so_many_wait_and_no_more(dashboard: Dashboard) -> None:
    async def story() -> None:
        assert (await dashboard.asks(LIST).answer())[0] == 200
        asking = [dashboard.asks(LIST) for _ in range(MOST_WAITING)]
        await dashboard.waits_for(MOST_WAITING)
        assert (await dashboard.asks(LIST).answer())[0] == 503
        for each in asking:
            each.left.set()
        await asyncio.gather(*(each.task for each in asking))
        assert dashboard.reads.waiting == 0

    told(story())


def test_a_limit_below_nothing_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="allowed is 0 or more"):
        app([root], read_limit=-1)
