"""Who may look, in a browser: a token, pages of other hosts, paths, and more streams than there is room for."""

from __future__ import annotations

import http.server
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from browser.server import Server, served
from browser.shop import Shop, shop
from browser.visitor import FOREIGN, Visitor
from messagestore import Message, MessageStore
from pyspark_messagestore.dashboard.tail import MOST_STREAMS

Visit = Callable[..., Visitor]
TOKEN = "a-token-of-enough-length"
STREAMS = 1000


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shop, Server]]:
    """A server that asks for a token."""
    folder = tmp_path_factory.mktemp("access")
    token = folder / "token"
    token.write_text(TOKEN)
    made = shop(folder)
    with served(made.root, "--token-file", token) as server:
        yield made, server


def log_in(visitor: Visitor, token: str) -> Visitor:
    visitor.page.fill("input[name=token]", token)
    with visitor.page.expect_navigation():
        visitor.page.get_by_role("button", name="Log in").click()
    return visitor


@pytest.mark.parametrize("script", [True, False], ids=["with JavaScript", "without JavaScript"])
def test_a_token_opens_the_pages_for_one_browser(guarded: tuple[Shop, Server], visit: Visit, script: bool) -> None:
    _, server = guarded
    visitor = visit(server.address, java_script_enabled=script).open("/s/shop/topics")
    assert visitor.page.url.endswith("/login")
    log_in(visitor, "another-token-of-that-length")
    assert "This is not the token." in visitor.words
    log_in(visitor, TOKEN)
    assert visitor.page.url == server.address + "/"
    assert "orders" in visitor.open("/s/shop/topics").words
    (cookie,) = visitor.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and TOKEN not in str(cookie)
    assert visit(server.address).open("/s/shop/topics").page.url.endswith("/login")


PAGE = b"""<!doctype html><html lang="en"><head><title>elsewhere</title><link rel="icon" href="data:,"></head><body>
<a href="SERVER/s/shop/topics">shop</a>
<form method="post" action="SERVER/login"><input name="token" value="TOKEN"><button>Log in</button></form></body></html>"""


@contextmanager
def page_elsewhere(address: str) -> Iterator[str]:
    """The address of a page on another host, which knows the server's address and the token."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(PAGE.replace(b"SERVER", address.encode()).replace(b"TOKEN", TOKEN.encode()))

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        yield f"http://{FOREIGN}:{pages.server_port}"
        pages.shutdown()


ASK = """async address => {
  const found = [];
  for (const path of ["/", "/api/v1/stores", "/s/shop/topics", "/metrics", "/s/shop/body?topic=returns&queue=0&offset=0"]) {
    try { found.push((await (await fetch(address + path, {credentials: "include"})).text())); } catch { found.push(null); }
  }
  try { await fetch(address + "/s/shop/verify/start", {method: "POST", mode: "no-cors", credentials: "include"}); } catch { }
  const script = document.createElement("script");
  const loads = new Promise(done => { script.onload = () => done("loaded"); script.onerror = () => done(null); });
  script.src = address + "/api/v1/stores";
  document.body.append(script);
  found.push(await loads);
  const frame = document.createElement("iframe");
  frame.src = address + "/s/shop/topics";
  const shown = new Promise(done => { frame.onload = () => done(null); });
  document.body.append(frame);
  await shown;
  let inside = null;
  try { inside = frame.contentDocument && frame.contentDocument.body.textContent || null; } catch { }
  found.push(inside);
  return found;
}"""


def test_a_page_of_another_host_gets_nothing(guarded: tuple[Shop, Server], visit: Visit) -> None:
    """The browser is logged in, and the page elsewhere has it ask: by fetch, as a script, in a frame, by a form."""
    _, server = guarded
    visitor = log_in(visit(server.address).open(), TOKEN)
    with page_elsewhere(server.address) as address:
        visitor.page.goto(address)
        assert visitor.page.evaluate(ASK, server.address) == [None] * 7
        assert "No byte of this store was checked" in visitor.open("/s/shop/verify").words
        visitor.page.goto(address)
        visitor.complaints.clear()  # that nothing came of it, and that another host was asked: by the page elsewhere
        with visitor.page.expect_navigation():
            visitor.page.get_by_role("button", name="Log in").click()
        assert "The form belongs to another page" in visitor.page.inner_text("body")
        visitor.page.goto(address)  # the cookie does not go along with a link from elsewhere
        visitor.page.get_by_role("link", name="shop").click()
        visitor.page.wait_for_url("**/login")
    visitor.complaints.clear()


def test_another_name_for_the_server_gets_nothing(guarded: tuple[Shop, Server], visit: Visit) -> None:
    """As by DNS rebinding: the name of a page elsewhere leads to this machine."""
    _, server = guarded
    address = server.address.replace("127.0.0.1", FOREIGN)
    visitor = visit(address)
    for path in ("/", "/login", "/api/v1/stores", "/static/page.js", "/s/shop/topics"):
        visitor.open(path, 421)
        assert "The Host header names another host" in visitor.page.inner_text("body")
    visitor.complaints = [each for each in visitor.complaints if "untrustworthy" not in each]  # http, and not loopback


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shop, Server]]:
    """A server that asks for no token."""
    made = shop(tmp_path_factory.mktemp("open"))
    with served(made.root) as server:
        yield made, server


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2f..%2fguard.py",
        "/static/%2e%2e/guard.py",
        "/static//etc/passwd",
        "/s/shop/..%2f..%2f..%2fetc%2fpasswd",
        "/s/..%2f..%2fetc/topics",
        "/s/shop/body%00",
    ],
)
def test_paths_lead_nowhere_else(open_server: tuple[Shop, Server], visit: Visit, path: str) -> None:
    visitor = visit(open_server[1].address)
    visitor.open(path, 404)
    assert "root:" not in visitor.page.content() and "import" not in visitor.page.content()


def asked(address: str, path: str) -> socket.socket:
    """A connection that has asked for something, as it is; nothing was read."""
    host = urllib.parse.urlsplit(address)
    connection = socket.create_connection((host.hostname, host.port), timeout=60)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host.netloc}\r\n\r\n".encode())
    return connection


def test_a_thousand_streams_are_refused_and_harm_nobody(open_server: tuple[Shop, Server], visit: Visit) -> None:
    """As many as there is room for are live, the others are told to come again. Pages are answered and a writer writes
    meanwhile, and there is room again when somebody leaves.
    """
    made, server = open_server
    connections: list[socket.socket] = []
    try:
        connections += [asked(server.address, "/s/shop/events?topic=orders") for _ in range(STREAMS)]
        statuses = [each.recv(12).decode() for each in connections]
        assert statuses.count("HTTP/1.1 200") == MOST_STREAMS
        assert statuses.count("HTTP/1.1 503") == STREAMS - MOST_STREAMS

        with MessageStore.open(made.root) as store:
            begun = time.monotonic()
            for number in range(50):
                assert store.put_message(Message("orders", b"meanwhile", queue_id=number % 4)).is_ok
            written_s = time.monotonic() - begun
        visitor = visit(server.address).open("/s/shop/recent?topic=orders")
        assert "meanwhile" in visitor.words
        assert written_s < 30
        with visitor.refusal(503):
            visitor.page.get_by_role("button", name="Live").click()
            visitor.page.get_by_text("Ended: 32 live lists are open").wait_for()
        live = next(each for each, status in zip(connections, statuses, strict=True) if status.endswith("200"))
        live.close()
        until = time.monotonic() + 60
        while True:
            with closing(asked(server.address, "/s/shop/events?topic=orders")) as again:
                if again.recv(12) == b"HTTP/1.1 200":
                    break
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        for each in connections:
            each.close()
