"""Many requests on one connection: each gets its own answer, or an error that says what happened."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tls_files
from messagestore import ConfigError, ProtocolError, StoreUnavailableError
from messagestore.remoting import RemotingSettings, codes
from messagestore.remoting.connection import Connection
from messagestore.remoting.frames import ONEWAY_FLAG, Frame, packed
from messagestore.remoting.settings import SERIALIZATIONS, host_and_port
from remoting_peer import Peer, answer, answering, read_frame

PLAIN = RemotingSettings()


@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_answers_in_any_order_reach_their_requests(serialization: str) -> None:
    """All requests are read first, and answered in the reverse order."""

    def backwards(connection: socket.socket) -> None:
        requests = [read_frame(connection) for _ in range(20)]
        for request in reversed(requests):
            connection.sendall(answer(request, fields=request.fields, body=request.fields["n"].encode()))
        read_frame(connection)

    with Peer(backwards) as peer:
        connection = Connection(peer.address, RemotingSettings(serialization=serialization))
        calls = [connection.send(codes.PULL_MESSAGE, {"n": n}) for n in range(20)]
        for n, call in enumerate(calls):
            reply = call.answer()
            assert (reply.number("n"), bytes(reply.body)) == (n, str(n).encode())
        connection.close()


def test_several_threads_wait_on_one_connection() -> None:
    """A thread whose answer another one has read must not wait for its own time-out."""
    with Peer(answering(lambda request: answer(request, fields=request.fields))) as peer:
        connection = Connection(peer.address, PLAIN)
        wrong: list[object] = []

        def ask(first: int) -> None:
            for n in range(first, first + 50):
                reply = connection.send(codes.GET_MAX_OFFSET, {"n": n}).answer(600)
                if reply.number("n") != n:
                    wrong.append(reply)

        threads = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        connection.close()


def test_an_answer_that_arrives_in_pieces_is_whole() -> None:
    """Also if the caller gave up in the middle of it: the next answer is read from its beginning."""
    go_on = threading.Event()

    def slowly(connection: socket.socket) -> None:
        first = answer(read_frame(connection), body=b"x" * 1000)
        connection.sendall(first[:500])
        go_on.wait(60)
        connection.sendall(first[500:])
        connection.sendall(answer(read_frame(connection), body=b"second"))
        read_frame(connection)

    with Peer(slowly) as peer:
        connection = Connection(peer.address, PLAIN)
        with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.05 s"):
            connection.send(codes.PULL_MESSAGE, {}).answer(0.05)
        go_on.set()
        assert bytes(connection.send(codes.PULL_MESSAGE, {}).answer().body) == b"second"
        connection.close()


def test_all_requests_fail_when_the_connection_breaks() -> None:
    """None waits for its time-out."""

    def gone(connection: socket.socket) -> None:
        for _ in range(3):
            read_frame(connection)
        connection.sendall(b"\0\0\0\x20half")

    with Peer(gone) as peer:
        connection = Connection(peer.address, PLAIN)
        calls = [connection.send(codes.PULL_MESSAGE, {}) for _ in range(3)]
        for call in calls:
            with pytest.raises(StoreUnavailableError, match="the connection broke"):
                call.answer(600)
        assert connection.is_broken
        with pytest.raises(StoreUnavailableError, match="the connection broke"):
            connection.send(codes.PULL_MESSAGE, {})


def test_a_web_server_is_told_from_a_broker() -> None:
    def web(connection: socket.socket) -> None:
        read = connection.recv(4096)
        assert read
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with Peer(web) as peer:
        connection = Connection(peer.address, PLAIN)
        with pytest.raises(ProtocolError, match="Is this the address of a name server or a broker"):
            connection.send(codes.PULL_MESSAGE, {}).answer(600)


def test_requests_of_a_broker_are_refused_and_do_not_disturb() -> None:
    """A broker may ask its clients; without an answer it would wait."""
    refusals: list[Frame] = []

    def asking(connection: socket.socket) -> None:
        request = read_frame(connection)
        connection.sendall(b"".join(packed(Frame(40, 900, flag=ONEWAY_FLAG))))
        connection.sendall(b"".join(packed(Frame(307, 901))))
        connection.sendall(answer(request, body=b"mine"))
        refusals.append(read_frame(connection))

    with Peer(asking) as peer:
        connection = Connection(peer.address, PLAIN)
        assert bytes(connection.send(codes.PULL_MESSAGE, {}).answer().body) == b"mine"
        with pytest.raises(StoreUnavailableError):
            connection.send(codes.PULL_MESSAGE, {}).answer(600)  # the peer reads the refusal, and goes
    assert [(frame.code, frame.opaque, frame.is_answer) for frame in refusals] == [
        (codes.REQUEST_CODE_NOT_SUPPORTED, 901, True)
    ]


def test_a_oneway_request_waits_for_nobody() -> None:
    seen: list[Frame] = []

    def silent(connection: socket.socket) -> None:
        seen.append(read_frame(connection))
        connection.sendall(answer(read_frame(connection)))

    with Peer(silent) as peer:
        connection = Connection(peer.address, PLAIN)
        connection.send(codes.UPDATE_CONSUMER_OFFSET, {}, oneway=True).answer()
        connection.send(codes.GET_MAX_OFFSET, {}).answer()
        connection.close()
    assert seen[0].flag == ONEWAY_FLAG


def test_requests_are_signed(tmp_path: Path) -> None:
    secret = tmp_path / "tools.yml"
    secret.write_text("accessKey: rocketmq2\nsecretKey: 12345678\n")
    with Peer(answering(lambda request: answer(request, fields=request.fields))) as peer:
        connection = Connection(peer.address, RemotingSettings(credentials_file=str(secret)))
        reply = connection.send(codes.PULL_MESSAGE, {"topic": "flights", "queueId": 0}, b"body").answer()
        connection.close()
    assert reply.fields["AccessKey"] == "rocketmq2"
    assert reply.fields["Signature"] == "t+SbD98h41rEy45abx7tmSNCIO0="


def test_an_ipv6_address_is_reached() -> None:
    try:
        peer = Peer(answering(answer), host="::1")
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")
    with peer:
        connection = Connection(peer.address, PLAIN)
        assert connection.send(codes.GET_MAX_OFFSET, {}).answer().code == codes.SUCCESS
        connection.close()


@pytest.mark.parametrize(
    ("address", "parts"),
    [("ns1:9876", ("ns1", 9876)), ("[::1]:1", ("::1", 1)), ("fe80::1:10911", ("fe80::1", 10911)), (" a:1 ", ("a", 1))],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert host_and_port(address) == parts


@pytest.mark.parametrize("address", ["", "ns1", "ns1:", ":9876", "ns1:0", "ns1:65536", "ns1:x", "[]:1"])
def test_an_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="allowed is host:port"):
        host_and_port(address)


def test_nobody_listens() -> None:
    with Peer(answering(answer)) as peer:
        address = peer.address
    with pytest.raises(StoreUnavailableError, match="no connection"):
        Connection(address, PLAIN)


# ---- TLS


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    return tls_files.certificate(tmp_path, "broker")


def tls_of(certificate: tuple[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


def test_requests_are_encrypted(certificate: tuple[str, str]) -> None:
    with Peer(answering(lambda request: answer(request, body=b"x" * 300_000)), tls=tls_of(certificate)) as peer:
        connection = Connection(peer.address, RemotingSettings(use_tls=True, ca_file=certificate[0]))
        calls = [connection.send(codes.PULL_MESSAGE, {}) for _ in range(5)]
        assert [len(call.answer().body) for call in calls] == [300_000] * 5
        connection.close()


def test_a_certificate_that_nobody_signed_is_refused(certificate: tuple[str, str]) -> None:
    with (
        Peer(answering(answer), tls=tls_of(certificate)) as peer,
        pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        Connection(peer.address, RemotingSettings(use_tls=True))


def test_a_certificate_of_another_host_is_refused_unless_names_do_not_count(tmp_path: Path) -> None:
    """Brokers register an address, and their certificates often name something else."""
    other = tls_files.certificate(tmp_path, "other", "DNS:broker.example")
    settings = RemotingSettings(use_tls=True, ca_file=other[0])
    with Peer(answering(answer), tls=tls_of(other)) as peer:
        with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            Connection(peer.address, settings)
        connection = Connection(peer.address, replace(settings, check_host_name=False))
        assert connection.send(codes.GET_MAX_OFFSET, {}).answer().code == codes.SUCCESS
        connection.close()


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Lets a handler raise `TimeoutError` in the main thread, as a program does that bounds what it calls."""

    def raising(_number: int, _frame: object) -> None:
        raise TimeoutError("by the handler")

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR1, raising)
    yield lambda: signal.pthread_kill(main, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_a_request_of_which_a_part_was_sent_is_the_last_of_its_connection(interrupt: Callable[[], None]) -> None:
    """The bytes of the next one would be taken for the rest of this one's body."""
    received, closed = bytearray(), threading.Event()

    def half(connection: socket.socket) -> None:
        received.extend(connection.recv(4096))
        interrupt()
        while data := connection.recv(1 << 20):
            received.extend(data)
        closed.set()

    with Peer(half) as peer:
        connection = Connection(peer.address, PLAIN)
        with pytest.raises(TimeoutError, match="by the handler"):
            connection.send(codes.SEND_BATCH_MESSAGE, {}, b"first" * (10 << 20))
        with pytest.raises(StoreUnavailableError, match="the connection broke: by the handler"):
            connection.send(codes.SEND_BATCH_MESSAGE, {}, b"second")
        assert closed.wait(60)
        assert b"second" not in received


def test_an_exception_of_a_handler_is_no_silence_of_the_broker(interrupt: Callable[[], None]) -> None:
    """It is raised as it is, and what had arrived of the answer is no part of another one."""

    def half(connection: socket.socket) -> None:
        first = answer(read_frame(connection), body=b"x" * 1000)
        connection.sendall(first[:500])
        interrupt()
        request = read_frame(connection)
        if request is not None:
            connection.sendall(first[500:] + answer(request, body=b"second"))
            read_frame(connection)

    with Peer(half) as peer:
        connection = Connection(peer.address, PLAIN)
        with pytest.raises(TimeoutError, match="by the handler"):
            connection.send(codes.PULL_MESSAGE, {}).answer(600)
        with contextlib.suppress(StoreUnavailableError):  # it was interrupted while it read: how much is not known
            assert bytes(connection.send(codes.PULL_MESSAGE, {}).answer(600).body) == b"second"
        connection.close()
