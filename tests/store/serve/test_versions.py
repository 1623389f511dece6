"""Clients and servers of other releases: one release apart they work together, otherwise both ranges are named."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from messagestore import BatchRequest, ProtocolError
from messagestore.serve.hosted import Hosted
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from messagestore.spi import ColumnTexts, Range, Write, encode, store_host_of
from messagestore.spi.location import RemoteSettings
from messagestore.spi.remote import RemoteStores
from messagestore.spi.wire import versions
from small import SMALL, bodies, columns, filled

STORES = RemoteStores(RemoteSettings(retry_timeout_s=10.0))
BEFORE, NOW, AFTER = (1, 1), (1, 2), (2, 3)
"""What three releases speak, one after the other."""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[[tuple[int, int]], str]]:
    """Serves a store of 10 messages as a release that speaks a range."""
    root, started = str(filled(tmp_path / "store", 10)), list[Server]()

    def serve(spoken: tuple[int, int]) -> str:
        server = Server(Service(Hosted(root, SMALL), spoken=spoken))
        started.append(server)
        server.start()
        return server.url

    yield serve
    for server in started:
        server.stop()


def use(url: str) -> int:
    """Write five messages through each kind of verb, and read all; how many there are."""
    writer = STORES.writer(url, SMALL, staging_ttl_s=60)
    described, host = writer.prepare(), store_host_of(SMALL)
    with writer.stage(Write("0", "k"), described.store_id) as staging:
        staging.write(encode(ColumnTexts(columns(bodies(5))), limits=SMALL, store_host=host, born_host=host))
        staged = staging.finish()
    writer.commit([staged], BatchRequest("app", 0), described.store_id)
    reader = STORES.reader(url)
    ends = reader.ends(["t"]).queues
    parts = reader.gather([Range(*queue, 0, end) for queue, end in sorted(ends.items())])
    count = sum(len(part.sizes) for part in parts)
    reader.close()
    return count


@pytest.mark.parametrize(("client", "server"), [(BEFORE, NOW), (NOW, BEFORE), (NOW, AFTER), (AFTER, NOW), (NOW, NOW)])
def test_one_release_apart_everything_works(
    serving: Callable[[tuple[int, int]], str],
    monkeypatch: pytest.MonkeyPatch,
    client: tuple[int, int],
    server: tuple[int, int],
) -> None:
    url = serving(server)
    monkeypatch.setattr(versions, "SPOKEN", client)
    assert use(url) == 15


@pytest.mark.parametrize(("client", "server"), [(BEFORE, AFTER), (AFTER, BEFORE)])
def test_two_releases_apart_both_ranges_are_named(
    serving: Callable[[tuple[int, int]], str],
    monkeypatch: pytest.MonkeyPatch,
    client: tuple[int, int],
    server: tuple[int, int],
) -> None:
    """Each kind of request is refused, before it does anything."""
    url = serving(server)
    monkeypatch.setattr(versions, "SPOKEN", client)
    words = f"speaks protocol {versions.words(client)}, and this side {versions.words(server)}.* upgrade the older side"
    writer = STORES.writer(url, SMALL, staging_ttl_s=60)
    with pytest.raises(ProtocolError, match=words):
        STORES.reader(url)
    with pytest.raises(ProtocolError, match=words):
        writer.prepare()
    with pytest.raises(ProtocolError, match=words):
        writer.commit([], BatchRequest("app", 0), "")
    with writer.stage(Write("0", "k"), "") as staging, pytest.raises(ProtocolError, match=words):
        staging.finish()


def test_a_server_that_does_not_ask_is_refused_by_the_client() -> None:
    """It answers as one of a later release, whatever the client says that it speaks."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.recv(1 << 16)
                body = b'{"value": {"$": "Description"}}'
                head = b"HTTP/1.1 200 OK\r\nMessagestore-Protocol: 8-9\r\nContent-Length: %d\r\n\r\n" % len(body)
                sock.sendall(head + body)
                sock.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        own = versions.words()
        with pytest.raises(ProtocolError, match=f"the server at {url} speaks protocol 8-9, and this side {own}"):
            STORES.reader(url)
        thread.join(30)
