"""A client of the dashboard without a server, and what its pages consist of."""

from __future__ import annotations

import asyncio
import html.parser
import json
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8")

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks an ASGI application, as a browser does that keeps one cookie."""

    def __init__(self, application: Any, host: str = "127.0.0.1:8097") -> None:
        self.application, self.host, self.cookie = application, host, ""

    def __call__(
        self, address: str, headers: Mapping[str, str] = {}, *, method: str = "GET", body: bytes = b""
    ) -> Answer:
        return asyncio.run(self.ask(address, headers, method=method, body=body))

    async def ask(
        self, address: str, headers: Mapping[str, str] = {}, *, method: str = "GET", body: bytes = b""
    ) -> Answer:
        waiting = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return waiting.pop(0) if waiting else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.application(self.scope(address, headers, method), receive, send)
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        if "set-cookie" in found:
            self.cookie = found["set-cookie"].partition(";")[0]
        return Answer(sent[0]["status"], found, b"".join(part.get("body", b"") for part in sent[1:]))

    def scope(self, address: str, headers: Mapping[str, str] = {}, method: str = "GET") -> dict[str, Any]:
        """A request, as a server gives it to an application."""
        path, _, query = address.partition("?")
        all_headers = {"host": self.host, **({"cookie": self.cookie} if self.cookie else {}), **headers}
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": urllib.parse.unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in all_headers.items()],
            "server": ("127.0.0.1", 8097),
            "client": ("127.0.0.1", 9),
        }


class Page(html.parser.HTMLParser):
    """The links, the elements and the text of a page."""

    def __init__(self, text: str, *, with_forms: bool = False) -> None:
        super().__init__()
        self.with_forms = with_forms
        self.links: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        self.links += [value for name, value in attrs if name in ("href", "src") and value]
        self.links += [value for name, value in attrs if name == "action" and value and self.with_forms]

    def handle_data(self, data: str) -> None:
        self.words += data


def page(client: Client, address: str, status: int = 200) -> Page:
    answer = client(address)
    assert answer.status == status, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    return Page(answer.text)


def crawl(client: Client) -> dict[str, Answer]:
    """Every address that can be reached from the overview by links."""
    found: dict[str, Answer] = {}
    waiting = ["/"]
    while waiting:
        address = waiting.pop()
        if address in found:
            continue
        found[address] = client(address)
        if found[address].headers["content-type"].startswith("text/html"):
            links = [link.partition("#")[0] for link in Page(found[address].text).links]
            waiting += [link for link in links if link and link not in found]
    return found
