"""The server against clients that are silent, greedy, cut off, or no clients at all."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import ports

from crash.proxy import DOWN, UP, Fault, Proxy
from messagestore import (
    BatchRequest,
    CommitUnknownError,
    ConfigError,
    Message,
    MessageStore,
    NotAStoreError,
    ProtocolError,
    StoreConfig,
    StoreLockedError,
    StoreUnavailableError,
    StoreWentBackwardsError,
)
from messagestore.batches.staging import StagingWriter
from messagestore.files.writer_lock import WriterLock
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.log.store_files import Paths
from messagestore.read.view import StoreView
from messagestore.serve import hosted as hosting
from messagestore.serve import server as serving
from messagestore.serve import service as services
from messagestore.serve.exchange import Exchange
from messagestore.serve.hosted import Hosted
from messagestore.serve.limits import MIB, SPARE_THREADS, Budget, BusyError, Limits
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from messagestore.spi import ColumnTexts, PlannedWrite, Range, StagedFile, Write, encode, store_host_of
from messagestore.spi import remote as clients
from messagestore.spi.connections import Connection, Link, to_text
from messagestore.spi.interface import GATHERED_ROWS, MOST_NAMED, NOT_REACHED, PlannedRead
from messagestore.spi.local import LocalReader
from messagestore.spi.location import RemoteSettings
from messagestore.spi.remote import RemoteStores
from messagestore.spi.wire import frames, parts
from small import SMALL, bodies, columns, delayed, filled, read_all

LIMITS = Limits(connections=12, streams=4, memory=24 * MIB, body=MIB, frame=8 * MIB, idle_s=1.0)
HEADERS = "Host: x\r\nMessagestore-Protocol: 1-1\r\n"


@pytest.fixture
def root(tmp_path: Path) -> str:
    filled(tmp_path / "store", 60)
    return str(tmp_path / "store")


@pytest.fixture
def server(root: str) -> Iterator[Server]:
    started = Server(Service(Hosted(root, SMALL), LIMITS))
    started.start()
    yield started
    started.stop()


def settings(retry_timeout_s: float = 10.0) -> RemoteStores:
    return RemoteStores(RemoteSettings(retry_timeout_s=retry_timeout_s))


_sockets: list[socket.socket] = []


@pytest.fixture(autouse=True)
def sockets() -> Iterator[None]:
    yield
    while _sockets:
        _sockets.pop().close()


def connected(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    _sockets.append(sock)
    return sock


def said(sock: socket.socket) -> bytes:
    """All that the server says until it closes the connection."""
    found = b""
    while True:
        try:
            data = sock.recv(1 << 16)
        except ConnectionResetError:
            return found
        if not data:
            return found
        found += data


def until(fact: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def stays() -> bool:
    """A client that does not go away."""
    return False


def staged_names(root: str) -> list[str]:
    folder = Path(root, "spark", "staging")
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def rows_frame(count: int = 10) -> bytes:
    host = store_host_of(SMALL)
    rows = encode(ColumnTexts(columns(bodies(count))), limits=SMALL, store_host=host, born_host=host)
    return b"".join(parts.pack_rows(rows))


def stage_begin(store_id: str) -> bytes:
    return b"".join(
        frames.packed({"stage": {"write": {"$": "Write", "driver": "0", "key": "k"}, "store_id": store_id}})
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


# ---- silent clients


def test_clients_that_connect_and_say_nothing_cost_no_thread(server: Server):
    """They are closed after the idle time; requests are answered meanwhile."""
    silent = [connected(server) for _ in range(LIMITS.connections - 2)]
    until(lambda: len(server._http.open_connections) >= len(silent))
    assert settings().reader(server.url).describe().store_id
    for sock in silent:
        assert said(sock) == b""


def test_a_request_that_comes_byte_by_byte_is_ended(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Each byte restarts a socket's time-out, so the head as a whole has one, too."""
    monkeypatch.setattr(serving, "HEAD_S", 0.5)
    sock = connected(server)
    sock.sendall(b"POST /v1/hello HTTP/1.1\r\nX: ")
    begin_s, is_open = time.monotonic(), True
    while is_open:
        assert time.monotonic() - begin_s < 30
        time.sleep(0.05)
        try:
            sock.sendall(b"y")
        except OSError:
            is_open = False


def test_clients_that_do_not_end_their_heads_keep_no_probe_waiting(root: str, monkeypatch: pytest.MonkeyPatch):
    """Nobody asked them for a token, and each had a thread for as long as `HEAD_S`."""
    monkeypatch.setattr(serving, "HEAD_S", 600.0)
    server = Server(Service(Hosted(root, SMALL), replace(LIMITS, connections=64, idle_s=600.0)))
    server.start()
    try:
        slow = [connected(server) for _ in range(LIMITS.streams + SPARE_THREADS)]
        for sock in slow:
            sock.sendall(b"P")
        until(lambda: not server._http.requests.idle)
        probe = connected(server)
        probe.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert said(probe).endswith(b"alive\n")
    finally:
        server.stop()


def test_probes_are_answered_while_clients_send_slowly(root: str):
    """Each has a thread until its body is there. A server that does not answer its probe is killed, and begins again."""
    limits = replace(LIMITS, streams=1, connections=64, idle_s=30.0)
    server = Server(Service(Hosted(root, SMALL), limits))
    server.start()
    head = f"POST /v1/reader/describe HTTP/1.1\r\n{HEADERS}Content-Length: 9\r\n\r\n{{".encode()
    slow = [connected(server) for _ in range(limits.requests)]
    try:
        for sock in slow:
            sock.sendall(head)
        until(lambda: server.service._active == limits.requests)
        for _ in range(8):
            late = connected(server)
            late.sendall(head)
            answer = said(late)
            assert not answer or (answer.startswith(b"HTTP/1.1 503 ") and b"17 requests are being answered" in answer)
        probe = connected(server)
        probe.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert said(probe).endswith(b"alive\n")
        for sock in slow:
            sock.close()
        assert settings().reader(server.url).describe().store_id
    finally:
        server.stop()


def test_one_connection_too_many_is_closed(server: Server):
    """It is told so. The others stay, and a place that becomes free is given again."""
    held = [connected(server) for _ in range(LIMITS.connections)]
    until(lambda: len(server._http.open_connections) >= LIMITS.connections)
    answer = said(connected(server))
    assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 1\r\n" in answer
    assert b"12 connections are open, and no more are allowed (--connections)" in answer
    for sock in held:
        sock.close()
    assert settings().reader(server.url).describe().store_id


# ---- greedy clients


@pytest.mark.parametrize(
    "framing", [f"Content-Length: {1 << 40}", "Transfer-Encoding: chunked"], ids=["known", "unknown"]
)
def test_a_body_over_the_limit_takes_no_memory(server: Server, framing: str):
    sock = connected(server)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sock.sendall(f"POST /v1/reader/describe HTTP/1.1\r\n{HEADERS}{framing}\r\n\r\n".encode())
    sock.sendall(b"10000000000\r\n{" if "chunked" in framing else b"{")
    answer = said(sock)
    assert b"400 Bad Request" in answer.partition(b"\r\n")[0] and b"ProtocolError" in answer
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.parametrize("size", [LIMITS.frame + 1, 1 << 62])
def test_a_frame_over_the_limit_takes_no_memory(root: str, server: Server, size: int):
    store_id = settings().reader(server.url).describe().store_id
    sock = connected(server)
    sock.sendall(f"POST /v1/stage HTTP/1.1\r\n{HEADERS}Transfer-Encoding: chunked\r\n\r\n".encode())
    head = json.dumps({"rows": {}, "buffers": [["data", size]]}).encode()
    sock.sendall(chunk(stage_begin(store_id)) + chunk(len(head).to_bytes(4, "little") + head))
    assert b"allowed are" in said(sock)
    until(lambda: staged_names(root) == [])
    assert server.service.budget.memory == 0


def test_the_sizes_of_one_range_again_and_again_take_no_memory(server: Server):
    """A request of 8 MiB has room for a hundred thousand ranges, each of which may be a whole queue."""
    reader, budget = settings(0.5).reader(server.url), server.service.budget
    assert list(map(len, reader.sizes([Range("t", 0, 0, 30)] * 10_000))) == [30] * 10_000
    with pytest.raises(ProtocolError, match=r"found ranges of 700,000 messages; allowed are 629,145 \(--memory\)"):
        reader.sizes([Range("t", 0, 0, 7_000)] * 100)
    until(lambda: budget.memory == 0)
    with budget.room() as others:
        others.take(LIMITS.memory - 1_200)
        assert list(map(len, reader.sizes([Range("t", 0, 0, 30)]))) == [30]
        with pytest.raises(StoreUnavailableError, match=r"the server refused reader/sizes .*allowed"):
            reader.sizes([Range("t", 0, 0, 30)] * 2)


def test_a_request_that_names_too_much_is_refused(server: Server):
    """Each queue costs some calls of the system: one request kept a processor busy for a minute."""
    names = [str(number) for number in range(MOST_NAMED + 1)]
    body = json.dumps({"reader": "a", "arguments": {"topics": names}}).encode()
    sock = connected(server)
    sock.sendall(f"POST /v1/reader/describe HTTP/1.1\r\n{HEADERS}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    sock.shutdown(socket.SHUT_WR)
    answer = said(sock)
    assert b"400 Bad Request" in answer.partition(b"\r\n")[0]
    assert b"describe.topics: found 65,537 values; allowed are 65,536. Ask for parts of them" in answer


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_is_named_twice_is_looked_for_once(server: Server, monkeypatch: pytest.MonkeyPatch, kind: type):
    asked, min_offset = list[tuple[str, int]](), StoreView.min_offset

    def counted(view: StoreView, *queue: Any) -> int:
        asked.append(queue)
        return min_offset(view, *queue)

    reader = settings().reader(server.url)
    monkeypatch.setattr(StoreView, "min_offset", counted)
    named = kind([("t", 0), ("t", 1), ("t", 0)] * 1_000)
    assert reader._ask("begins", queues=named) == {("t", 0): 0, ("t", 1): 0}
    assert asked == [("t", 0), ("t", 1)]


def test_a_client_asks_in_parts_for_what_is_too_much_for_a_request(
    root: str, server: Server, monkeypatch: pytest.MonkeyPatch
):
    """A store may have more queues than a request names."""
    monkeypatch.setattr(clients, "_PART", 3)
    monkeypatch.setattr(hosting, "MOST_NAMED", 3)
    queues = [("t", number) for number in (4, 0, 7, 1, 5, 9, 8)]
    ranges = [Range("t", number % 2, number, number + 2) for number in range(10)]
    there = settings().reader(server.url)
    with contextlib.closing(LocalReader(root, SMALL)) as here:
        for ask in (
            lambda reader: reader.begins(queues),
            lambda reader: reader.places(dict.fromkeys(queues, 5)),
            lambda reader: reader.seek(dict.fromkeys(queues), physical_offset=0),
            lambda reader: reader.mean_sizes(ranges),
            lambda reader: [sizes.tolist() for sizes in reader.sizes(ranges)],
            lambda reader: [part.queue_offsets.tolist() for part in reader.gather(ranges)],
            lambda reader: reader.find(["t"], ["k1", "none", "k2", "k3", "nobody", "k1", "k4"]),
            lambda reader: (reader.begins([]), reader.sizes([]), reader.find(["t"], []), list(reader.gather([]))),
        ):
            assert ask(there) == ask(here)
    there.close()


def test_the_longest_topics_fit_into_the_parts_of_a_client(monkeypatch: pytest.MonkeyPatch):
    """A body may be as large as `--body`, however few things a request names."""
    sizes = list[int]()

    def noted(link: Link, verb: str, body: dict[str, Any]) -> Any:
        sizes.append(len(to_text(body)))
        given = next(iter(body["arguments"].values()))
        return {} if isinstance(given, dict) else [0.0] * len(given)

    monkeypatch.setattr(Link, "call", noted)
    reader, topic, most = settings().reader("http://nobody:1", to_gather=True), "t" * 127, (1 << 63) - 1
    assert len(reader.mean_sizes([Range(topic, number, most - 1, most) for number in range(MOST_NAMED)])) == MOST_NAMED
    reader.places({(topic, number): most for number in range(MOST_NAMED)})
    assert len(sizes) == 8
    assert max(sizes) <= Limits().body


def test_large_requests_wait_for_their_turn_and_small_ones_do_not():
    """One client cannot take all threads, processors and memory with them."""
    budget = Budget(Limits())
    with contextlib.ExitStack() as turns:
        for _ in range(2):
            turns.enter_context(budget.large_request(stays))
        later = [budget.large_request(stays) for _ in range(6)]
        for turn in later:
            threading.Thread(target=turn.__enter__, daemon=True).start()
        until(lambda: len(budget.large.waiting) == 6)
        with pytest.raises(BusyError, match="2 requests for many things are being answered, and 6 wait"):
            turns.enter_context(budget.large_request(stays))
    until(lambda: (budget.large.taken, len(budget.large.waiting)) == (2, 4))


def test_large_requests_are_answered_in_the_order_in_which_they_came():
    budget, order = Budget(Limits()), list[int]()

    def asks(number: int) -> None:
        with budget.large_request(stays):
            order.append(number)

    with contextlib.ExitStack() as turns:
        first = turns.enter_context(contextlib.ExitStack())
        first.enter_context(budget.large_request(stays))
        turns.enter_context(budget.large_request(stays))
        threads = [threading.Thread(target=asks, args=(number,)) for number in range(4)]
        for number, thread in enumerate(threads):
            thread.start()
            until(lambda count=number + 1: len(budget.large.waiting) == count)  # type: ignore[misc]
        budget.large.most_waiting = 4
        with budget._changed:  # nobody who waits looks before a newcomer does
            first.close()
            assert budget.large.taken == 1
            with pytest.raises(BusyError, match="1 requests for many things are being answered, and 4 wait"):
                turns.enter_context(budget.large_request(stays))
        for thread in threads:
            thread.join()
    assert order == [0, 1, 2, 3]


def test_a_large_request_waits_no_longer_than_its_client(monkeypatch: pytest.MonkeyPatch):
    """It kept its place among those that wait. Who comes behind it gets a turn."""
    monkeypatch.setattr("messagestore.serve.limits._LOOK_S", 0.05)
    over, gone = threading.Event(), threading.Event()
    budget, ends = Budget(Limits(), over), list[str]()

    def asks(is_gone: Callable[[], bool]) -> None:
        with pytest.raises(ConnectionError) as caught, budget.large_request(is_gone):
            pass
        ends.append(str(caught.value))

    with contextlib.ExitStack() as turns:
        for _ in range(2):
            turns.enter_context(budget.large_request(stays))
        threads = [threading.Thread(target=asks, args=(is_gone,)) for is_gone in (gone.is_set, stays)]
        for thread in threads:
            thread.start()
        until(lambda: len(budget.large.waiting) == 2)
        gone.set()
        until(lambda: len(budget.large.waiting) == 1)
        assert ends == ["the client is gone"]
        over.set()
        for thread in threads:
            thread.join()
    assert ends[1:] == ["the server ends"]
    assert (budget.large.taken, len(budget.large.waiting)) == (0, 0)


def test_a_large_request_whose_client_has_left_gives_its_place_back(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(services, "_MANY_VALUES", 1)
    monkeypatch.setattr("messagestore.serve.limits._LOOK_S", 0.05)
    budget = server.service.budget
    body = b'{"reader": "a", "arguments": {"queues": []}}'
    with contextlib.ExitStack() as turns:
        for _ in range(2):
            turns.enter_context(budget.large_request(stays))
        sock = connected(server)
        sock.sendall(f"POST /v1/reader/begins HTTP/1.1\r\n{HEADERS}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: len(budget.large.waiting) == 1)
        sock.close()
        until(lambda: not budget.large.waiting)


def test_a_large_commit_does_not_wait_for_those_who_read(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Its client hears nothing meanwhile, and gives up after 15 s."""
    commit, budget = commit_of(server, settings(0.3), None), server.service.budget
    monkeypatch.setattr(services, "_MANY_VALUES", 1)
    with contextlib.ExitStack() as turns:
        for _ in range(2):
            turns.enter_context(budget.large_request(stays))
        budget.large.most_waiting = 0
        assert commit().result.status == "appended"
        turns.enter_context(budget.large_request(stays, writes=True))
        budget.large_writes.most_waiting = 0
        with pytest.raises(StoreUnavailableError, match="1 requests for many things are being answered, and 0 wait"):
            commit()


def test_searches_wait_for_each_other_and_no_large_request_for_them(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Two clients that may only read kept commits and reads of all others waiting for as long as they searched."""
    monkeypatch.setattr(services, "_MANY_VALUES", 1)
    monkeypatch.setattr("messagestore.serve.limits._LOOK_S", 0.05)
    find, goes_on, searching = LocalReader.find, threading.Event(), list[int]()

    def slow(store: LocalReader, *arguments: Any, **options: Any) -> Any:
        searching.append(1)
        assert goes_on.wait(30)
        return find(store, *arguments, **options)

    monkeypatch.setattr(LocalReader, "find", slow)
    reader, budget, found = settings().reader(server.url), server.service.budget, list[Any]()
    finds = [
        threading.Thread(target=lambda: found.append(settings().reader(server.url).find(["t"], ["k1"])))
        for _ in range(LIMITS.reports + 1)
    ]
    try:
        for thread in finds:
            thread.start()
        until(lambda: budget.streams == len(finds) and len(searching) == LIMITS.reports)
        until(lambda: budget.large.taken == 0)
        assert reader.begins([("t", 0), ("t", 1)]) == {("t", 0): 0, ("t", 1): 0}
        assert (budget.reports, len(searching)) == (LIMITS.reports, LIMITS.reports)
    finally:
        goes_on.set()
        for thread in finds:
            thread.join()
    with contextlib.closing(LocalReader(server.service.hosted.root, SMALL)) as here:
        assert found == [here.find(["t"], ["k1"])] * len(finds)
    until(lambda: (budget.streams, budget.reports, budget.memory) == (0, 0, 0))


def test_a_large_request_takes_a_turn_and_gives_it_back(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(services, "_MANY_VALUES", 100)
    reader, budget = settings(0.3).reader(server.url), server.service.budget
    few, many = [("t", 0)], [("t", number) for number in range(100)]
    with contextlib.ExitStack() as turns:
        for _ in range(2):
            turns.enter_context(budget.large_request(stays))
        budget.large.most_waiting = 0
        assert len(reader.begins(few)) == 1
        assert reader.find(["t"], ["k"]) == {}
        for ask in (lambda: reader.begins(many), lambda: reader.find(["t"], [str(number) for number in range(100)])):
            with pytest.raises(StoreUnavailableError, match="2 requests for many things are being answered"):
                ask()
    assert len(reader.begins(many)) == 100
    ranges = [Range("t", 0, number % 30, number % 30 + 1) for number in range(100)]
    stream = reader.gather(ranges)
    next(stream)
    assert budget.large.taken == 0  # a stream has its own limit, and may last for long
    assert sum(len(part.sizes) for part in stream) == 99
    until(lambda: budget.memory == 0)


def test_a_key_of_too_many_messages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The server finds no more than it has room for, and than its client reads."""
    filled(tmp_path / "store", 4)
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        for number in range(40):
            store.put_message(Message("t", b"%d" % number, keys=["k"], queue_id=0))
    server = Server(Service(Hosted(str(tmp_path / "store"), SMALL), replace(LIMITS, memory=39 * 128)))
    server.start()
    try:
        reader = settings().reader(server.url)
        with pytest.raises(ConfigError, match="found more than 39 messages of topic 't' that may have them"):
            reader.find(["t"], ["k"])
        assert reader.find(["t"], ["none"]) == {}
        monkeypatch.setattr(frames, "MOST_VALUES", 70)
        with pytest.raises(ConfigError, match="found more than 35 messages of topic 't' that may have them"):
            reader.find(["t"], ["k"])
    finally:
        server.stop()


def test_a_search_whose_client_has_left_stops(server: Server, monkeypatch: pytest.MonkeyPatch):
    find, rounds = LocalReader.find, list[Any]()

    def endless(store: LocalReader, *arguments: Any, **options: Any) -> Any:
        while True:
            rounds.append(find(store, *arguments, **options))

    monkeypatch.setattr(LocalReader, "find", endless)
    body = b'{"reader": "a", "arguments": {"topics": ["t"], "keys": ["k"]}}'
    sock = connected(server)
    sock.sendall(f"POST /v1/reader/find HTTP/1.1\r\n{HEADERS}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    until(lambda: len(rounds) > 2)
    budget = server.service.budget
    assert (budget.streams, budget.reports) == (1, 1)
    sock.close()
    until(lambda: (budget.streams, budget.reports) == (0, 0))


def test_names_that_a_client_has_asked_about_do_not_add_up(root: str, monkeypatch: pytest.MonkeyPatch):
    """A reader stays for minutes, and follows what it was asked about last: 16 sets of any names were many megabytes."""
    monkeypatch.setattr("messagestore.spi.local._MOST_TOPICS", 4)
    with contextlib.closing(LocalReader(root, SMALL)) as reader:
        first = reader.ends(["t"])
        assert reader.ends(["a", "b", "c"]).queues == {}
        assert reader.ends(["t"], first) is first
        for number in range(10):
            reader.ends([f"{number}-{name}" for name in range(3)])
            assert sum(len(topics) for topics, _ in reader._followed) <= 4
        assert reader.ends(["t"]).queues == first.queues
        reader.ends([str(number) for number in range(9)])
        assert len(reader._followed) == 1


def test_what_is_larger_than_a_record_can_be_is_not_read(server: Server, monkeypatch: pytest.MonkeyPatch):
    def read(*_: object) -> int:
        raise AssertionError("it was read")

    reader = settings().reader(server.url)
    monkeypatch.setattr(StoreView, "record_crc", read)
    for size in (1 << 31, 1 << 40, -1):
        record = reader.prove_last(0, size)
        assert record is not None and record.crc == NOT_REACHED


def test_a_read_that_asks_for_all_messages_at_once_gets_parts(tmp_path: Path):
    """Their units would all be in memory, and be read again for each part."""
    with MessageStore.open(tmp_path / "store") as store:
        store.append_batch(columns([b"."] * (GATHERED_ROWS + 1), queues=1))
    server = Server(Service(Hosted(str(tmp_path / "store"), StoreConfig()), LIMITS))
    server.start()
    try:
        reader, range_ = settings().reader(server.url), Range("t", 0, 0, GATHERED_ROWS + 1)
        found = list(reader.gather([range_], max_rows=1 << 40, tags_codes=frozenset([7])))
    finally:
        server.stop()
    assert [(part.start, part.end) for part in found] == [(0, GATHERED_ROWS), (GATHERED_ROWS, GATHERED_ROWS + 1)]


def test_a_task_that_makes_its_next_rows_holds_no_memory(root: str, server: Server):
    """Otherwise a few slow tasks keep all others out for as long as they write."""
    begin = f"POST /v1/stage HTTP/1.1\r\n{HEADERS}Transfer-Encoding: chunked\r\n\r\n".encode()
    begin += chunk(stage_begin(settings().reader(server.url).describe().store_id)) + chunk(rows_frame())
    connected(server).sendall(begin)
    budget = server.service.budget
    until(lambda: max(server.service.staged.sums().values(), default=0) > 1)
    until(lambda: budget.memory == 0)
    assert budget.streams == 1


def test_more_streams_than_there_are_places_come_again_later(root: str, server: Server):
    """They are refused with 503, and the client tries again until there is a place."""
    budget = server.service.budget
    taken = [budget.stream() for _ in range(LIMITS.streams)]
    for each in taken:
        each.__enter__()
    reader = settings(0.5).reader(server.url)
    with pytest.raises(StoreUnavailableError, match=r"the server refused gather for .*4 streams are open"):
        list(reader.gather([Range("t", 0, 0, 30)]))
    threading.Timer(0.3, lambda: [each.__exit__(None, None, None) for each in taken]).start()
    found = list(settings().reader(server.url).gather([Range("t", 0, 0, 30)]))
    assert sum(len(part.sizes) for part in found) == 30


def test_a_client_that_was_refused_until_its_time_was_over_names_the_request(
    root: str, server: Server, caplog: pytest.LogCaptureFixture
):
    """The last refusal is a line in the server's log, which is found by the id that the client's error has."""
    with contextlib.ExitStack() as taken:
        for _ in range(LIMITS.streams):
            taken.enter_context(server.service.budget.stream())
        with pytest.raises(StoreUnavailableError) as caught:
            list(settings(0.5).reader(server.url).gather([Range("t", 0, 0, 30)]))
    (note,) = caught.value.__notes__
    refusal = [record.getMessage() for record in caplog.records if "refused with 503" in record.getMessage()][-1]
    assert note == f"request {refusal.split()[0]} in the log of the store's server"


def test_memory_is_waited_for_and_given_back():
    budget = Budget(Limits(memory=100, idle_s=0.05))
    with budget.stream() as one, budget.stream() as other:
        one.take(70)
        with pytest.raises(BusyError, match="70 bytes, and 40 more"):
            other.take(40)
        assert budget.memory == 70
        one.take(10)
        other.take(40)
        assert budget.memory == 50
    assert (budget.memory, budget.streams) == (0, 0)


def test_a_client_over_its_rate_is_slowed_down():
    budget = Budget(Limits(rate=1000))
    assert budget.pace("a", 900) == 0
    assert 0 < budget.pace("a", 200) < 1.0
    assert budget.pace("b", 900) == 0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take a server for dead that is silent for two seconds; one that is at work says so before."""
    monkeypatch.setattr("messagestore.spi.connections.ANSWER_TIMEOUT_S", 2.0)
    monkeypatch.setattr("messagestore.serve.limits._LOOK_S", 0.05)
    monkeypatch.setattr(services, "SIGN_OF_LIFE_S", 0.1)


def at_rate(root: str, rate: int) -> Server:
    server = Server(Service(Hosted(root, SMALL), Limits(rate=rate)))
    server.start()
    return server


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("size", "rate"), [(50, 10_000), (1_000, 4 * MIB)], ids=["slow", "large"])
def test_a_client_over_its_rate_may_stage(root: str, size: int, rate: int):
    """It is held up for longer than it waits for a server that is silent, while it sends and when it has sent all."""
    server = at_rate(root, rate)
    try:
        config = SMALL.replace(max_message_size=MIB)
        count, host = 5 * rate // (size + 150), store_host_of(config)
        rows = encode(ColumnTexts(columns(bodies(count, size))), limits=config, store_host=host, born_host=host)
        writer = settings(0.1).writer(server.url, config, staging_ttl_s=60)
        begin_s = time.monotonic()
        with writer.stage(Write("0", "k"), writer.describe().store_id) as staging:
            staging.write(rows)
            assert staging.finish().row_count == count
        assert time.monotonic() - begin_s > 2.5
    finally:
        server.stop()


def test_a_large_frame_that_is_taken_slowly_is_sent() -> None:
    """As long as some of it is taken, its time-out does not end it."""
    near, far = socket.socketpair()
    _sockets.extend((near, far))
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    near.settimeout(2.0)
    raw = http.client.HTTPConnection("nobody")
    raw.sock = near

    def take_slowly() -> None:
        while far.recv(1 << 16):
            time.sleep(0.02)

    thread = threading.Thread(target=take_slowly)
    thread.start()
    connection = Connection(Link("http://nobody:1", RemoteSettings()), raw, was_used=False)
    begin_s = time.monotonic()
    try:
        connection.send(frames.packed({}, [("data", bytes(8 * MIB))]))
        assert time.monotonic() - begin_s > 2.0
    finally:
        near.close()
        thread.join()


@pytest.mark.usefixtures("impatient")
def test_a_client_over_its_rate_may_read(root: str):
    server = at_rate(root, 1_000)
    try:
        begin_s = time.monotonic()
        parts_ = settings(0.1).reader(server.url).gather([Range("t", 0, 0, 30)])
        assert sum(len(part.sizes) for part in parts_) == 30
        assert time.monotonic() - begin_s > 2.5
    finally:
        server.stop()


# ---- clients that are none


def test_random_bytes_end_no_server(root: str, server: Server):
    """Requests and frames that are cut, changed and too large: each is answered or closed, and no file stays."""
    store_id = settings().reader(server.url).describe().store_id
    stage = f"POST /v1/stage HTTP/1.1\r\n{HEADERS}Transfer-Encoding: chunked\r\n\r\n".encode()
    stage += chunk(stage_begin(store_id)) + chunk(rows_frame()) + b"0\r\n\r\n"
    body = b'{"reader": "a", "arguments": {"topics": ["t"]}}'
    ends = f"POST /v1/reader/ends HTTP/1.1\r\n{HEADERS}Content-Length: {len(body)}\r\n\r\n".encode() + body
    randoms = random.Random(4)
    for number in range(150):
        data = bytearray(randoms.choice((stage, ends)))
        for _ in range(randoms.randrange(4)):
            data[randoms.randrange(len(data))] = randoms.randrange(256)
        data = data[: randoms.randrange(len(data) + 1)] if number % 2 else data
        with connected(server) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            said(sock)
    until(lambda: (server.service.budget.streams, server.service.budget.memory) == (0, 0))
    until(lambda: not any(name.endswith(".writing") for name in staged_names(root)))
    assert settings().reader(server.url).describe().store_id == store_id
    assert [path.name for path in Path(root).parent.iterdir()] == ["store"]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /v1/hello", 400),
        ("POST /v1/reader/_reader", 400),
        ("POST /v1/reader/close_all", 400),
        ("POST /v2/hello", 400),
        ("POST /../../etc/passwd", 400),
        ("GET /healthz", 200),
        ("GET /readyz", 200),
        ("GET /metrics", 200),
    ],
)
def test_only_the_paths_of_the_protocol_are_answered(server: Server, line: str, status: int):
    sock = connected(server)
    sock.sendall(f"{line} HTTP/1.1\r\n{HEADERS}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
    assert said(sock).split()[1] == b"%d" % status


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 2\r\nContent-Length: 20\r\n",
        "Content-Length: 20\r\nContent-Length: 2\r\n",
        "Content-Length: 20\r\n 2\r\n",
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Content-Length: +2\r\n",
        "Content-Length: 0_2\r\n",
        "Content-Length: 2\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n",
        "Content-Length : 2\r\n",
        "Content-Length\t: 2\r\n",
        "\x0bContent-Length: 2\r\n",
        "Transfer-Encoding : chunked\r\n",
    ],
)
def test_a_body_whose_size_is_said_in_two_ways_is_no_request(server: Server, head: str):
    """A proxy may believe the other one, and then gives clients the answers of others."""
    sock = connected(server)
    request = f"POST /v1/hello HTTP/1.1\r\n{HEADERS}{head}\r\n".encode()
    sock.sendall(request + b"{}")
    sock.shutdown(socket.SHUT_WR)
    assert said(sock).split()[1] in (b"400", b"501")


def test_transfer_encoding_of_http_1_0_is_no_request(server: Server):
    """It was passed over, and the body was taken for the next request."""
    sock = connected(server)
    sock.sendall(
        f"POST /v1/hello HTTP/1.0\r\n{HEADERS}Connection: Keep-Alive\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )
    assert said(sock).split()[1] == b"400"


@pytest.mark.parametrize("size", ["0x2", "+2", "-2", "0_2", "", " ", "2 2", "2h"])
def test_a_chunk_whose_size_is_no_hexadecimal_number_is_refused(server: Server, size: str):
    sock = connected(server)
    sock.sendall(
        f"POST /v1/hello HTTP/1.1\r\n{HEADERS}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        f"{size}\r\n{{}}\r\n0\r\n\r\n".encode()
    )
    assert b"found a chunk without a size" in said(sock)


def test_head_is_answered_without_a_body(server: Server):
    """Its length is that of GET's, and the connection is kept: what comes next is the next answer."""
    sock = connected(server)
    for line, more in (("HEAD /healthz", ""), ("GET /healthz", "Connection: close\r\n")):
        sock.sendall(f"{line} HTTP/1.1\r\n{HEADERS}Content-Length: 0\r\n{more}\r\n".encode())
    first, second, body = said(sock).split(b"\r\n\r\n")
    assert first.endswith(b"Content-Length: 6")
    assert second.startswith(b"HTTP/1.1 200")
    assert body == b"alive\n"


def test_another_version_is_told_both(server: Server):
    sock = connected(server)
    sock.sendall(
        b"POST /v1/hello HTTP/1.1\r\nMessagestore-Protocol: 7-9\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    )
    assert b"the client speaks protocol 7-9, and this side 1-1" in said(sock)


# ---- a server that goes away


def test_a_gather_goes_on_where_it_was_cut(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Each message once, though every part is followed by the end of the connection."""
    send, cuts = services._Request._send, []

    def cut(self: Any, pieces: Any) -> None:
        send(self, pieces)
        if self.verb == "gather" and len(cuts) < 5:
            cuts.append(self.id)
            raise ConnectionError("cut")

    monkeypatch.setattr(services._Request, "_send", cut)
    reader = settings().reader(server.url)
    ranges = [Range("t", 1, 3, 20), Range("t", 0, 0, 30), Range("t", 1, 25, 26)]
    found = [
        (part.queue_id, number) for part in reader.gather(ranges, max_rows=7) for number in part.queue_offsets.tolist()
    ]
    assert found == [(each.queue_id, number) for each in ranges for number in range(each.start, each.end)]
    assert len(cuts) == 5


def test_a_reader_does_not_go_on_with_another_store(tmp_path: Path):
    """A stream would make an offset of what two stores say, which neither of them accepts any more."""
    port = ports.reserve()
    hosts = [Hosted(str(filled(tmp_path / name, 10)), SMALL) for name in ("store", "other")]
    first = Server(Service(hosts[0]), port=port)
    first.start()
    reader = settings().reader(f"http://127.0.0.1:{port}")
    last = reader.prove_last(0, 100)
    first.stop()
    second = Server(Service(hosts[1]), port=port)
    second.start()
    for ask in (
        lambda: reader.prove_last(0, 100),
        lambda: reader.ends(["t"]),
        lambda: reader.publish_progress("g", {}),
    ):
        with pytest.raises(
            StoreWentBackwardsError, match=r"found store \w+ in place of store \w+, which was read until now"
        ):
            ask()
    second.stop()
    third = Server(Service(hosts[0]), port=port)
    third.start()
    assert reader.prove_last(0, 100) == last
    reader.close()
    third.stop()


def test_a_report_that_is_cut_is_asked_for_again(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Each row once, though the connection broke after the first rows."""
    send, cuts = services._Request._send, []

    def cut(self: Any, pieces: Any) -> None:
        send(self, pieces)
        if self.verb == "offsets" and len(cuts) < 2:
            cuts.append(self.id)
            raise ConnectionError("cut")

    monkeypatch.setattr(services._Request, "_send", cut)
    monkeypatch.setattr(services, "_ROWS_IN_FRAME", 1)
    rows, faults = settings().reader(server.url).offsets(["t"])
    assert ([row["queueId"] for row in rows], faults, len(cuts)) == ([0, 1], [], 2)


def test_reports_wait_for_their_turn_and_show_that_they_are_alive(server: Server, monkeypatch: pytest.MonkeyPatch):
    """One caller cannot keep all processors busy. Who goes away while he waits leaves no stream behind."""
    monkeypatch.setattr(services, "SIGN_OF_LIFE_S", 0.05)
    monkeypatch.setattr("messagestore.serve.limits._LOOK_S", 0.05)
    budget = server.service.budget
    with contextlib.ExitStack() as others:
        for _ in range(LIMITS.reports):
            others.enter_context(budget.report(lambda: False))
        sock = connected(server)
        body = b'{"arguments": {"name": "status"}}'
        head = f"POST /v1/view HTTP/1.1\r\n{HEADERS}Content-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        until(lambda: b"alive" in sock.recv(4096))
        assert budget.streams == 1
        sock.close()
        until(lambda: not budget.streams)

        rows: list[Any] = []
        asking = threading.Thread(target=lambda: rows.extend(settings().reader(server.url).view("topics")[0]))
        asking.start()
        until(lambda: budget.streams == 1)
        assert budget.reports == LIMITS.reports and not rows
    asking.join()
    assert [row["topic"] for row in rows] == ["t"]
    until(lambda: (budget.streams, budget.reports, budget.memory) == (0, 0, 0))


def test_a_report_whose_client_has_left_stops(server: Server, monkeypatch: pytest.MonkeyPatch):
    """It would go on to the end of a large store, and keep one of the few turns."""
    monkeypatch.setattr(services, "SIGN_OF_LIFE_S", 0.05)
    offsets, rounds = LocalReader.offsets, []

    def endless(store: LocalReader, *arguments: Any, **options: Any) -> Any:
        while True:
            rounds.append(offsets(store, *arguments, **options))

    monkeypatch.setattr(LocalReader, "offsets", endless)
    budget = server.service.budget
    sock = connected(server)
    body = b'{"arguments": {"topics": ["t"]}}'
    sock.sendall(f"POST /v1/offsets HTTP/1.1\r\n{HEADERS}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    until(lambda: b"alive" in sock.recv(4096))
    until(lambda: len(rounds) > 2)
    assert (budget.streams, budget.reports) == (1, 1)
    sock.close()
    until(lambda: (budget.streams, budget.reports) == (0, 0))


def commit_of(server: Server, stores: RemoteStores, planned: PlannedWrite | None, url: str = "") -> Callable[[], Any]:
    writer = stores.writer(url or server.url, SMALL, staging_ttl_s=60)
    found = writer.prepare()
    host = store_host_of(SMALL)
    with writer.stage(Write("0", "k"), found.store_id) as staging:
        staging.write(encode(ColumnTexts(columns(bodies(5))), limits=SMALL, store_host=host, born_host=host))
        staged = staging.finish()
    app_id = "app" if planned is None else None
    return lambda: writer.commit([staged], BatchRequest(app_id, 0), found.store_id, planned=planned)


@pytest.mark.parametrize("planned", [None, PlannedWrite("5" * 32, 0)], ids=["app", "no app"])
def test_a_commit_whose_answer_is_lost_is_sent_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, planned: PlannedWrite | None
):
    """The first one was carried out: the second is told that the batch is known."""
    end, lost = services._Request._end, []

    def lose(self: Any, done: Any) -> None:
        if self.verb == "commit" and not lost:
            lost.append(done)
            raise ConnectionError("lost")
        end(self, done)

    monkeypatch.setattr(services._Request, "_end", lose)
    assert commit_of(server, settings(), planned)().result.status == "known"
    assert len(lost) == 1


def test_a_commit_whose_connection_goes_dead_is_sent_again(server: Server, monkeypatch: pytest.MonkeyPatch):
    """The client hears nothing, as when the server's host has lost its power: time is left for another connection."""
    monkeypatch.setattr("messagestore.spi.connections.SILENCE_S", 0.5)
    host, port = server.url.removeprefix("http://").split(":")
    with Proxy((host, int(port))) as proxy:
        commit = commit_of(server, settings(), None, f"http://127.0.0.1:{proxy.port}")
        proxy.plan(Fault("blackhole", DOWN, 1))
        assert commit().result.status == "known"
        assert proxy.happened


def test_a_commit_that_never_gets_an_answer_is_unknown(server: Server, monkeypatch: pytest.MonkeyPatch):
    def lose(self: Any, done: Any) -> None:
        raise ConnectionError("lost")

    commit = commit_of(server, settings(0.3), None)
    monkeypatch.setattr(services._Request, "_end", lose)
    with pytest.raises(CommitUnknownError, match="may be in the log or not") as unknown:
        commit()
    assert "deleted" not in str(unknown.value)  # Spark gives the batch up, and then its staged files are


def test_a_commit_after_which_a_proxy_has_lost_the_server_is_unknown(server: Server, monkeypatch: pytest.MonkeyPatch):
    """It took 502 for a server that had not begun, and said that the batch was not in the log."""

    def gone(self: Any) -> None:
        self._body()
        self.exchange.answer(502, b"Bad Gateway")

    commit = commit_of(server, settings(0.3), None)
    with monkeypatch.context() as patch:
        patch.setattr(services._Request, "_commit", gone)
        with pytest.raises(CommitUnknownError, match=r"answered 502 Bad Gateway, .* may be in the log or not"):
            commit()
    assert commit().result.status == "appended"


@pytest.mark.parametrize(
    "refusal",
    [StoreLockedError("still locked by pid 7", path="lock", holder="pid 7"), OSError(5, "still locked, and no disk")],
    ids=["a lock", "a disk"],
)
def test_a_commit_whose_answer_is_lost_and_that_is_refused_then_is_unknown(
    server: Server, monkeypatch: pytest.MonkeyPatch, refusal: Exception
):
    """A local writer had the lock by then: the error said that the batch was not written, and it was."""
    ends = [ConnectionError("lost"), refusal]

    def fail(self: Any, done: Any) -> None:
        raise ends.pop(0)

    commit = commit_of(server, settings(), PlannedWrite("5" * 32, 0))
    with monkeypatch.context() as patch:
        patch.setattr(services._Request, "_end", fail)
        with pytest.raises(CommitUnknownError, match=r"still locked.* may be in the log or not") as unknown:
            commit()
    assert type(unknown.value.__cause__) is type(refusal)
    assert commit().result.status == "known"


def test_a_long_commit_shows_that_it_is_alive(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Otherwise the client would take the server for dead; here its patience is shorter than the commit."""
    monkeypatch.setattr(services, "SIGN_OF_LIFE_S", 0.05)
    monkeypatch.setattr("messagestore.spi.connections.ANSWER_TIMEOUT_S", 1.0)
    commit = commit_of(server, settings(0.1), None)
    writer = server.service.hosted.writer

    def slow() -> Any:
        made = writer()
        before = made.commit
        made.commit = lambda *given, **named: (time.sleep(3.0), before(*given, **named))[1]  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(server.service.hosted, "writer", slow)
    assert commit().result.status == "appended"


def test_one_thread_shows_signs_of_life_and_ends(monkeypatch: pytest.MonkeyPatch):
    """One for each request would cost as much as a small commit."""
    monkeypatch.setattr(services, "SIGN_OF_LIFE_S", 0.05)
    signs, shown = services.SignsOfLife(), [0] * 8

    def count(number: int) -> None:
        shown[number] += 1

    others = {*threading.enumerate()}  # those of earlier tests end meanwhile

    def running() -> int:
        return sum(thread.name == "signs of life" for thread in {*threading.enumerate()} - others)

    for _ in range(2):  # it is started again
        shown[:] = [0] * 8
        with contextlib.ExitStack() as requests:
            for number in range(8):
                requests.enter_context(signs.shown(partial(count, number)))
            assert running() == 1
            until(lambda: min(shown) >= 3)
        until(lambda: running() == 0)


def test_a_client_that_takes_nothing_does_not_hold_up_the_signs_for_others(server: Server, monkeypatch: Any):
    """One thread shows them all, so it must not wait for a client."""
    monkeypatch.setattr(services, "SIGN_OF_LIFE_S", 0.05)
    monkeypatch.setattr("messagestore.serve.limits._LOOK_S", 0.05)
    tried: list[bool] = []
    budget, has_room, first = server.service.budget, Exchange.has_room, list[Exchange]()

    def full(exchange: Exchange) -> bool:
        first.extend([] if first else [exchange])
        if exchange is not first[0]:
            return has_room(exchange)
        tried.append(has_room(exchange))
        return False

    monkeypatch.setattr(Exchange, "has_room", full)
    body = b'{"arguments": {"name": "status"}}'
    request = f"POST /v1/view HTTP/1.1\r\n{HEADERS}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with contextlib.ExitStack() as others:
        for _ in range(LIMITS.reports):
            others.enter_context(budget.report(lambda: False))
        stopped, served = connected(server), connected(server)
        stopped.sendall(request)
        until(lambda: len(tried) > 2)
        served.sendall(request)
        until(lambda: b"alive" in served.recv(4096))
    answer = b""
    while b'{"done":' not in answer:
        answer += stopped.recv(1 << 16)
    assert b"alive" not in answer
    assert all(tried)


def test_a_server_that_accepts_and_says_nothing_is_awaited_once(monkeypatch: pytest.MonkeyPatch):
    """As one that is stopped. The time in which it was silent counts, so the request is not sent a second time."""
    monkeypatch.setattr("messagestore.spi.connections.ANSWER_TIMEOUT_S", 1.0)
    awaited = pytest.raises(StoreUnavailableError, match=r"no answer to .* for 1 s \(retryTimeout is 0.5 s\)")
    with socket.create_server(("127.0.0.1", 0)) as silent, awaited:
        settings(0.5).reader(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_a_file_is_sent_again_to_a_server_that_was_restarted(root: str, monkeypatch: pytest.MonkeyPatch):
    """A task cannot make its rows again, so the client has kept them."""
    monkeypatch.setattr(clients, "_FIRST_SIZE", 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first = Server(Service(Hosted(root, SMALL), LIMITS), port=port)
    first.start()
    writer = settings().writer(first.url, SMALL, staging_ttl_s=60)
    found = writer.prepare()
    host = store_host_of(SMALL)
    with writer.stage(Write("0", "k"), found.store_id) as staging:
        for start in (0, 5):
            rows = encode(ColumnTexts(columns(bodies(5, start=start))), limits=SMALL, store_host=host, born_host=host)
            staging.write(rows)
            if not start:
                until(lambda: len(staged_names(root)) == 1)
                first.stop()
                second = Server(Service(Hosted(root, SMALL), LIMITS), port=port)
                second.start()
        staged = staging.finish()
    assert writer.commit([staged], BatchRequest("app", 0), found.store_id).result.row_count == 10
    assert staged_names(root) == []
    second.stop()


def test_delayed_rows_of_a_client_wait_and_go_to_their_queues(root: str, server: Server):
    writer = settings().writer(server.url, SMALL, staging_ttl_s=60)
    found, host = writer.prepare(), store_host_of(SMALL)
    rows = encode(ColumnTexts(delayed([1, 0, 2, 1], "late")), limits=SMALL, store_host=host, born_host=host)
    with writer.stage(Write("0", "k"), found.store_id) as staging:
        staging.write(rows)
        staged = staging.finish()
    assert writer.commit([staged], BatchRequest("app", 0), found.store_id).result.row_count == 4
    server.stop()

    with MessageStore.open(root, SMALL) as store:
        assert [store.max_offset(SCHEDULE_TOPIC, queue_id) for queue_id in range(3)] == [2, 1, 0]
        assert read_all(store, "late", 1) == bodies(1, start=1)
        end_s = time.monotonic() + 60
        while (due_ms := store.deliver_delayed().next_due_ms) is not None:
            assert time.monotonic() < end_s
            time.sleep(max(0.01, due_ms / 1000 - time.time()))
        assert [read_all(store, "late", queue_id) for queue_id in (0, 1)] == [
            [bodies(4)[number] for number in numbers] for numbers in ((0, 2), (1, 3))
        ]


def test_a_file_whose_end_takes_long_leaves_the_connection_for_other_requests(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    """No sign of life comes after the last frame, where the server takes it for the beginning of a request."""
    monkeypatch.setattr(clients, "_FIRST_SIZE", 1)
    monkeypatch.setattr(clients, "_ALIVE_S", 0.05)
    finish = StagingWriter.finish

    def finished_late(staging: StagingWriter) -> StagedFile:
        time.sleep(0.5)
        return finish(staging)

    monkeypatch.setattr(StagingWriter, "finish", finished_late)
    writer = settings().writer(server.url, SMALL, staging_ttl_s=60)
    found, host = writer.describe(), store_host_of(SMALL)
    with writer.stage(Write("0", "k"), found.store_id) as staging:
        staging.write(encode(ColumnTexts(columns(bodies(5))), limits=SMALL, store_host=host, born_host=host))
        staging.finish()
    time.sleep(0.5)  # an answer to what is no request would come now
    assert writer.describe() == found


@pytest.fixture
def small_frames(root: str) -> Iterator[Server]:
    started = Server(Service(Hosted(root, SMALL), replace(LIMITS, frame=6 * 1024)))
    started.start()
    yield started
    started.stop()


def test_a_chunk_with_more_bytes_than_a_frame_is_divided(
    root: str, small_frames: Server, monkeypatch: pytest.MonkeyPatch
):
    """Who writes through the seam may give a chunk of any size. Its rows and their digest are those of one frame."""
    monkeypatch.setattr(clients, "FRAME_SIZE", 4 * 1024)
    writer = settings().writer(small_frames.url, SMALL, staging_ttl_s=60)
    found = writer.prepare()
    host, texts = store_host_of(SMALL), [b"%04d" % number * 50 for number in range(100)]
    texts[50] = b"x" * 5 * 1024  # fits into a frame of the server, but not into what a piece usually has
    rows = encode(ColumnTexts(columns(texts)), limits=SMALL, store_host=host, born_host=host)
    with writer.stage(Write("0", "k"), found.store_id) as staging:
        staging.write(rows)
        staged = staging.finish()
    assert (staged.row_count, staged.digest) == (100, rows.digest)
    assert writer.commit([staged], BatchRequest("app", 0), found.store_id).result.row_count == 100
    with MessageStore.open_read_only(root) as store:
        stored = {queue_id: read_all(store, "t", queue_id)[30:] for queue_id in (0, 1)}
    assert stored == {0: texts[::2], 1: texts[1::2]}


def test_a_message_that_fits_into_no_frame_names_the_limit(small_frames: Server):
    writer = settings().writer(small_frames.url, SMALL, staging_ttl_s=60)
    found = writer.prepare()
    host = store_host_of(SMALL)
    rows = encode(ColumnTexts(columns([b"x" * 7 * 1024])), limits=SMALL, store_host=host, born_host=host)
    words = (
        r"found 7,\d{3} bytes; allowed are 6,144. If this is one large message, start the server with a larger --frame"
    )
    with writer.stage(Write("0", "k"), found.store_id) as staging:
        staging.write(rows)
        with pytest.raises(ProtocolError, match=words):
            staging.finish()


def test_a_server_that_is_being_stopped_refuses_and_waits(server: Server):
    """New requests get 503; the one that runs is answered."""
    reader = settings(0.2).reader(server.url)
    stream = reader.gather([Range("t", 0, 0, 30)], max_rows=10)
    next(stream)
    server.service.draining = True
    with pytest.raises(StoreUnavailableError, match="being stopped"):
        reader.describe()
    assert sum(len(part.sizes) for part in stream) == 20
    server.service.draining = False


def test_a_drain_ends_although_another_process_writes(root: str):
    """It took as long as `lockTimeout`. Commits that wait for their turn are not begun, and the next server makes them."""
    config, port = SMALL.replace(lock_timeout="60s"), ports.reserve()
    first = Server(Service(Hosted(root, config), LIMITS), port=port)
    first.start()
    commit = commit_of(first, settings(60), None)
    other, statuses = WriterLock(Paths(root).writer_lock), list[str]()
    other.acquire(5, description="a local job")
    commits = [threading.Thread(target=lambda: statuses.append(commit().result.status)) for _ in range(2)]
    for thread in commits:
        thread.start()
    until(lambda: first.service.budget.streams == 2)
    begin_s = time.monotonic()
    assert not first.stop(0.2)
    assert time.monotonic() - begin_s < config.lock_timeout_s / 2
    assert not statuses
    other.close()
    second = Server(Service(Hosted(root, config), LIMITS), port=port)
    second.start()
    try:
        for thread in commits:
            thread.join()
    finally:
        second.stop()
    assert sorted(statuses) == ["appended", "known"]
    with MessageStore.open_read_only(root) as store:
        assert sum(len(read_all(store, "t", queue_id)) for queue_id in (0, 1)) == 65


def test_nobody_waits_for_a_server_that_ends():
    """Neither for what a rate allows, nor for memory, nor for a turn to look through the store."""
    over = threading.Event()
    budget = Budget(Limits(rate=1, reports=1, memory=100), over)
    with budget.stream() as one, budget.stream() as other:
        one.take(70)
        other.take(20)
        threading.Timer(0.2, over.set).start()
        with pytest.raises(ConnectionError, match="the server ends"):
            other.take(40)
        assert (budget.memory, other._size) == (90, 20)
    assert budget.memory == 0
    with pytest.raises(ConnectionError, match="ends"):
        budget.pace("a", 1_000_000)
    with budget.report(stays), pytest.raises(ConnectionError, match="the server ends"), budget.report(stays):
        pass


def test_an_error_says_whose_files_and_processes_it_names(server: Server, monkeypatch: pytest.MonkeyPatch):
    """Who reads it on another host would look there, in vain."""
    reader = settings().reader(server.url)

    def refuse(*_: object) -> None:
        raise NotAStoreError("/data/store: found a file where a folder must be", path="/data/store")

    monkeypatch.setattr(Hosted, "read", refuse)
    with pytest.raises(NotAStoreError) as caught:
        reader.begins([])
    its = "files, processes, commands and settings that are named here are those of its host"
    assert caught.value.__notes__[-1] == f"store at {server.url}; {its}"


def test_a_read_that_was_planned_in_another_store_names_no_disk(server: Server):
    """A task with a URL has no disk to share with its driver."""
    words = (
        "but the driver planned to read store another. Let executors and driver see the same store, on one disk or by"
    )
    with pytest.raises(NotAStoreError, match=words):
        list(settings().reader(server.url).gather([Range("t", 0, 0, 3)], planned=PlannedRead("another")))


@contextlib.contextmanager
def somebody_else(*answers: bytes) -> Iterator[str]:
    """A proxy, or another service at the port: the URL of a server that gives each answer once and closes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            sock, _ = listening.accept()
            with sock, contextlib.suppress(ConnectionError):
                sock.recv(4096)
                sock.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread.join()
    listening.close()


def test_an_answer_of_somebody_else_is_no_answer():
    with (
        somebody_else(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello") as url,
        pytest.raises(ProtocolError, match="does not say which protocol"),
    ):
        settings().reader(url)


@pytest.mark.parametrize("status", ["200 OK", "409 Conflict", "503 Service Unavailable"])
@pytest.mark.parametrize("framing", ["Content-Length: 1000000000000", "Transfer-Encoding: chunked"])
def test_an_answer_without_an_end_is_not_read_to_its_end(status: str, framing: str, monkeypatch: pytest.MonkeyPatch):
    """It took memory until there was none left."""
    monkeypatch.setattr("messagestore.spi.connections.HEAD_LIMIT", 1000)
    body = chunk(bytes(5000)) if "chunked" in framing else bytes(5000)
    head = f"HTTP/1.1 {status}\r\nMessagestore-Protocol: 1-1\r\n{framing}\r\n\r\n".encode()
    with (
        somebody_else(head + body) as url,
        pytest.raises(
            ProtocolError, match=r"^http://[0-9.:]+: found an answer of more than 1,000 bytes.*Give the URL of one$"
        ),
    ):
        settings().reader(url)


def test_a_refusal_that_is_cut_is_asked_for_again():
    """It was taken for one of somebody else."""
    error = b'{"error": {"class": "ConfigError", "text": "no", "errno": null, "fields": {}}}'
    head = b"HTTP/1.1 409 Conflict\r\nMessagestore-Protocol: 1-1\r\nContent-Length: %d\r\n\r\n" % len(error)
    with somebody_else(head + error[:20], head + error) as url, pytest.raises(ConfigError, match="no"):
        settings().reader(url)


def test_an_error_that_is_nested_without_end_is_no_error():
    text = b"[" * 100_000
    head = b"HTTP/1.1 409 Conflict\r\nMessagestore-Protocol: 1-1\r\nContent-Length: %d\r\n\r\n" % len(text)
    with somebody_else(head + text) as url, pytest.raises(StoreUnavailableError, match="not as a store's server does"):
        settings().reader(url)


def test_an_answer_that_is_cut_at_any_byte_of_its_head_is_asked_for_again(server: Server):
    """A head without its last headers looks like one of somebody else."""
    host, port = server.url.removeprefix("http://").split(":")
    with Proxy((host, int(port))) as proxy:
        writer = settings().writer(f"http://127.0.0.1:{proxy.port}", SMALL, staging_ttl_s=60)
        expected = writer.describe()
        for at in range(0, 400, 3):
            proxy.plan(Fault("close", DOWN, at))
            assert writer.describe() == expected, at
            assert proxy.happened


@pytest.mark.parametrize("kind", ["close", "half-close"])
def test_a_request_that_is_cut_at_any_byte_is_sent_again(server: Server, kind: str):
    """The server does not answer a part of a head, which looks like a bad request: a query would end."""
    host, port = server.url.removeprefix("http://").split(":")
    with Proxy((host, int(port))) as proxy:
        writer = settings().writer(f"http://127.0.0.1:{proxy.port}", SMALL, staging_ttl_s=60)
        proxy.plan(None)
        expected = writer.describe()
        for at in range(proxy.passed[UP][-1]):
            proxy.plan(Fault(kind, UP, at))
            assert writer.describe() == expected, at
            assert proxy.happened


def test_the_name_of_a_server_is_resolved_at_each_connect(server: Server, monkeypatch: pytest.MonkeyPatch):
    """The address of a pod changes when it is started again, here from the proxy's to that of the server."""
    host, port = server.url.removeprefix("http://").split(":")
    asked, resolve = list[str](), socket.getaddrinfo

    def resolved(name: str, *rest: Any, **options: Any) -> Any:
        asked.append(name)
        return resolve(address if name == "store-0.example" else name, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with Proxy((host, int(port)), listens_on=("127.0.0.2", int(port))) as proxy:
        address = "127.0.0.2"
        reader = settings().reader(f"http://store-0.example:{port}")
        expected = reader.describe()
        assert proxy.passed[DOWN]
    address = host
    assert reader.describe() == expected
    assert asked.count("store-0.example") == 2


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Threads of Python take turns after each few instructions."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("many_switches")
def test_threads_that_lose_their_server_at_once_do_not_trip_over_each_other() -> None:
    """Each closes the connections that all of them have kept."""
    link, faults, end_s = Link("http://nobody:1", RemoteSettings()), list[Exception](), time.monotonic() + 3.0

    def repeat(what: Callable[[], object]) -> None:
        try:
            while time.monotonic() < end_s and not faults:
                what()
        except IndexError as fault:
            faults.append(fault)

    def keep() -> None:
        link.keep(http.client.HTTPConnection("nobody"))

    threads = [threading.Thread(target=repeat, args=(what,)) for what in (link.forget, link.connection, keep) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_an_exception_of_a_handler_is_no_silence_of_the_server() -> None:
    """A program that bounds a call with its own `TimeoutError` gets it at once: nothing is sent again."""

    heard = threading.Event()

    def raising(_number: int, _frame: object) -> None:
        if not heard.is_set():
            heard.set()
            raise TimeoutError("by the handler")

    main = threading.main_thread().ident
    assert main is not None

    def silent() -> None:
        sock, _ = listener.accept()
        _sockets.append(sock)
        assert sock.recv(1000)
        while not heard.wait(0.05):  # a signal just before a call that waits does not end it
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, raising)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=silent, daemon=True).start()
            with pytest.raises(TimeoutError, match="by the handler"):
                settings(20).reader(f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        signal.signal(signal.SIGUSR1, before)
