"""The proxy of the mode `afar`."""

from __future__ import annotations

import socket

import pytest

from crash.proxy import Proxy


@pytest.mark.parametrize("kind", ["half-open", "blackhole", "reset", "close", "half-close"])
def test_a_fault_of_a_connection_that_has_ended_does_not_end_the_proxy(kind: str) -> None:
    """A piece cannot be sent, and the rest of it has the byte of the fault: no client got through after that."""
    with socket.create_server(("127.0.0.1", 0)) as server, Proxy(server.getsockname()) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), 10) as client, server.accept()[0] as served:
            client.sendall(b"x")
            assert served.recv(1) == b"x"
            (pair,) = proxy._pairs
            proxy._end(pair)
            if kind == "half-close":
                proxy._end_direction(pair, pair.client)
            else:
                proxy._disturb(pair, kind)

        with socket.create_connection(("127.0.0.1", proxy.port), 10) as client, server.accept()[0] as served:
            client.sendall(b"y")
            assert served.recv(1) == b"y"
