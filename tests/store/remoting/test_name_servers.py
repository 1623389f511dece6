"""Name servers that an HTTP server lists: found, found again when the list changes, and named when there is none."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tls_files
from http_list import ListServer
from messagestore import StoreUnavailableError
from messagestore.remoting import Client, RemotingSettings, name_servers
from messagestore.remoting.frames import Frame
from messagestore.remoting.name_servers import NameServers
from remoting_peer import Peer, answer, answering

NO_ROUTE = b'{"brokerDatas":[],"queueDatas":[]}'
SHORT = RemotingSettings(retry_timeout_s=0.3)


@pytest.fixture
def lists() -> Iterator[ListServer]:
    with ListServer() as server:
        yield server


def test_a_list_is_read_as_rocketmqs_clients_read_it(lists: ListServer) -> None:
    """They take its first line; an operator's file ends with a line break, and may have spaces."""
    lists.text = " ns1:9876;[::1]:9876; ns3:9876;\r\n# the second data centre\r\nns4:9876\n"
    servers = NameServers(lists.url, SHORT)
    assert str(servers) == f"none (the list of {lists.url})"
    assert servers.addresses() == ("ns1:9876", "[::1]:9876", "ns3:9876")
    assert servers.addresses() is servers.addresses()
    assert str(servers) == f"ns1:9876;[::1]:9876;ns3:9876 (the list of {lists.url})"
    assert lists.asked == ["/rocketmq/nsaddr"], "a list is used for a while"


def test_a_list_that_changes_is_found(lists: ListServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_servers, "LIST_S", 0.0)
    servers = NameServers(lists.url, SHORT)
    for lists.text, wanted in (("a:1", ("a:1",)), ("b:1;c:2", ("b:1", "c:2"))):
        assert servers.addresses() == wanted


def test_a_list_is_asked_for_at_once_when_no_name_server_answers(lists: ListServer) -> None:
    """The cluster moved: nobody waits until the list is old."""
    with Peer(answering(lambda request: answer(request, body=NO_ROUTE))) as peer:
        lists.text = peer.address
        client = Client(lists.url, RemotingSettings(retry_timeout_s=30))
        client.route("t", fresh=True)
    client.close()
    with Peer(answering(lambda request: answer(request, body=NO_ROUTE))) as moved:
        lists.text = moved.address
        client.route("t", fresh=True)
        client.close()
    assert moved.connection_count == 1
    assert len(lists.asked) == 2


def test_without_the_http_server_the_last_list_is_used(
    lists: ListServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(name_servers, "LIST_S", 0.0)
    servers = NameServers(lists.url, SHORT)
    lists.text = "a:1"
    servers.addresses()
    with caplog.at_level(logging.WARNING):
        for lists.status, lists.text in ((500, "a:1"), (200, ""), (200, "<html>"), (404, "b:1")):
            assert servers.addresses() == ("a:1",)
        lists.close()
        assert servers.addresses() == ("a:1",)
    (record,) = caplog.records  # one outage is told once
    words = "the server answered 500 Internal Server Error. The name servers of its last list are asked: a:1"
    assert record.getMessage() == f"{lists.url}: no list of name servers: {words}"


@pytest.mark.parametrize(
    ("status", "text", "fault"),
    [
        (404, "a:1", r"no list of name servers: the server answered 404 Not Found"),
        (302, "a:1", r"no list of name servers: the server answered 302 Found"),
        (200, "", r"found the list of name servers ''; allowed is host:port;host:port"),
        (200, "<html>\n", r"found the list of name servers '<html>'.*ends with /rocketmq/nsaddr"),
        (200, "a:1;b", r"found the list of name servers 'a:1;b'"),
        (200, "a:1;" * 40_000, "found a list of name servers of more than 65,536 bytes"),
    ],
)
def test_what_is_no_list_is_named_when_the_time_is_over(lists: ListServer, status: int, text: str, fault: str) -> None:
    lists.status, lists.text = status, text
    client = Client(lists.url, SHORT)
    with pytest.raises(StoreUnavailableError, match=rf"no name server answers: .*{fault}"):
        client.topics()
    client.close()


def test_an_http_server_that_is_down_or_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_servers, "ANSWER_TIMEOUT_S", 0.1)
    with Peer(lambda connection: connection.recv(1 << 16) and connection.recv(1)) as silent:
        url = f"http://{silent.address}/rocketmq/nsaddr"
        with pytest.raises(StoreUnavailableError, match=rf"{url}: no list of name servers: no complete answer within"):
            NameServers(url, SHORT).addresses()
    with pytest.raises(StoreUnavailableError, match=rf"{url}: no list of name servers: .*refused"):
        NameServers(url, SHORT).addresses()


def test_an_http_server_that_answers_byte_by_byte(lists: ListServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the answer never ends."""
    monkeypatch.setattr(name_servers, "ANSWER_TIMEOUT_S", 0.2)
    lists.text, lists.is_slow = "a", True
    with pytest.raises(StoreUnavailableError, match=r"no complete answer within 0\.2 s"):
        NameServers(lists.url, SHORT).addresses()


def test_a_list_that_was_cut_is_not_used(lists: ListServer) -> None:
    """Its last address would be another one."""
    lists.text, lists.claims = "a:1;b:98", 2
    with pytest.raises(StoreUnavailableError, match=r"no list of name servers: IncompleteRead\(8 bytes read, 2 more"):
        NameServers(lists.url, SHORT).addresses()


def test_a_query_waits_for_its_http_server(lists: ListServer) -> None:
    """It is down when the query begins, and comes back within retryTimeout."""
    lists.status = 503
    asked: list[Frame] = []

    def reply(request: Frame) -> bytes:
        asked.append(request)
        return answer(request, body=NO_ROUTE)

    with Peer(answering(reply)) as peer:
        lists.text = peer.address
        client = Client(lists.url, RemotingSettings(retry_timeout_s=30))
        thread = threading.Thread(target=client.route, args=("t",))
        thread.start()
        lists.was_asked.wait(30)
        lists.status = 200
        thread.join(30)
        client.close()
    assert len(asked) == 1


def test_a_list_over_tls(tmp_path: Path) -> None:
    """The certificates are checked as those of brokers are."""
    cert, key = tls_files.certificate(tmp_path, "lists")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with ListServer(context) as lists:
        lists.text = "a:1"
        assert NameServers(lists.url, RemotingSettings(ca_file=cert)).addresses() == ("a:1",)
        with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            NameServers(lists.url, SHORT).addresses()
        missing = RemotingSettings(ca_file=str(tmp_path / "missing"), retry_timeout_s=0.1)
        with pytest.raises(StoreUnavailableError, match=r"no list of name servers: .*No such file"):
            NameServers(lists.url, missing).addresses()
