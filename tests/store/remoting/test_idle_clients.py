"""Connections that outlive their user: the next one in the process gets them while they work, and nobody else's."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from messagestore import StoreUnavailableError
from messagestore.remoting import Client, RemotingSettings, codes, idle_clients
from messagestore.remoting.idle_clients import close_idle, given_back, taken
from remoting_peer import Peer, answer, answering, read_frame

SETTINGS = RemotingSettings(retry_timeout_s=5.0)


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    close_idle()
    yield
    close_idle()


def ask(client: Client, peer: Peer) -> None:
    client.request(peer.address, codes.GET_MAX_OFFSET, {}, repeats=False)


def test_the_next_user_gets_the_connections() -> None:
    with Peer(answering(answer)) as peer:
        for _ in range(3):
            client = taken("ns:1", SETTINGS)
            ask(client, peer)
            given_back(client)
        assert peer.connection_count == 1


def test_two_users_at_a_time_have_a_client_each() -> None:
    with Peer(answering(answer)) as peer:
        one, other = taken("ns:1", SETTINGS), taken("ns:1", SETTINGS)
        for client in (one, other):
            ask(client, peer)
        given_back(one)
        ask(other, peer)
        given_back(other)
        assert peer.connection_count == 2


def test_a_user_with_other_settings_gets_another_client(tmp_path: Path) -> None:
    """A secret that was changed is another one, too."""
    file = tmp_path / "key.yml"
    file.write_text("accessKey: a\nsecretKey: 1\n")
    signed = RemotingSettings(retry_timeout_s=5.0, credentials_file=str(file))
    with Peer(answering(answer)) as peer:
        for settings in (SETTINGS, signed, signed):
            client = taken("ns:1", settings)
            ask(client, peer)
            given_back(client)
        assert peer.connection_count == 2

        file.write_text("accessKey: a\nsecretKey: 22\n")
        client = taken("ns:1", signed)
        ask(client, peer)
        given_back(client)
        assert peer.connection_count == 3


def test_a_connection_that_the_broker_closed_is_not_used() -> None:
    """Otherwise the first request would fail, and a reader would turn to a slave."""
    go = threading.Event()

    def serve(connection: socket.socket) -> None:
        while (request := read_frame(connection)) is not None:
            connection.sendall(answer(request))
            if peer.connection_count == 1:
                go.wait(10)
                return

    with Peer(serve) as peer:
        client = taken("ns:1", SETTINGS)
        ask(client, peer)
        connection = client.connection(peer.address)
        given_back(client)
        go.set()
        until_s = time.monotonic() + 10
        while connection.is_idle():
            assert time.monotonic() < until_s
            time.sleep(0.01)
        client = taken("ns:1", SETTINGS)
        ask(client, peer)
        given_back(client)
        assert peer.connection_count == 2


def test_a_connection_with_requests_under_way_is_closed() -> None:
    """Their answers may be large, and would come before those of the next user."""
    with Peer(answering(lambda _request: b"")) as peer:
        client = taken("ns:1", SETTINGS)
        call = client.send(peer.address, codes.PULL_MESSAGE, {})
        given_back(client)
        with pytest.raises(StoreUnavailableError, match="closed here"):
            call.answer()
        assert taken("ns:1", SETTINGS) is not client


def test_idle_connections_are_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_clients, "MOST_IDLE", 2)
    with Peer(answering(answer)) as peer:
        clients = [taken("ns:1", SETTINGS) for _ in range(3)]
        for client in clients:
            ask(client, peer)
        connections = [client.connection(peer.address) for client in clients]
        for client in clients:
            given_back(client)
        assert [connection.is_broken for connection in connections] == [True, False, False]
        monkeypatch.setattr(idle_clients, "IDLE_S", 0.0)
        assert taken("ns:1", SETTINGS) not in clients
        assert all(connection.is_broken for connection in connections)


def test_a_forked_process_has_none_of_them() -> None:
    with Peer(answering(answer)) as peer:
        client = taken("ns:1", SETTINGS)
        ask(client, peer)
        given_back(client)
        child = os.fork()
        if not child:
            mine = taken("ns:1", SETTINGS)
            try:
                ask(mine, peer)
                os._exit(0 if mine is not client else 1)
            except BaseException:  # noqa: BLE001 - the parent looks at the code
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        again = taken("ns:1", SETTINGS)
        ask(again, peer)
        assert again is client
        assert peer.connection_count == 2
        given_back(again)


def test_the_next_user_asks_the_name_servers_himself() -> None:
    """A topic that came, or went, is seen by a reader that is opened behind that."""
    route = b'{"brokerDatas":[],"queueDatas":[]}'
    asked = []

    def reply(request: object) -> bytes:
        asked.append(request)
        return answer(request, body=route)  # type: ignore[arg-type]

    with Peer(answering(reply)) as peer:
        for count in (1, 2):
            client = taken(peer.address, SETTINGS)
            client.route("t")
            client.route("t")
            given_back(client)
            assert len(asked) == count
        assert peer.connection_count == 1
