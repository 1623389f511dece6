"""Somebody with a browser: what they click and read, and what the browser complains of."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Locator, Response

FOREIGN = "elsewhere.example"
"""A name that is not the server's, and leads to it all the same, as by DNS rebinding."""


class Visitor:
    """A window of its own: nothing is kept from other visitors.

    Parameters
    ----------
    context : BrowserContext
    address : str
        The address of the overview. Whatever asks another host is a complaint.
    """

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.context, self.address = context, address.rstrip("/")
        self.page = context.new_page()
        self.clicks = 0
        self.complaints: list[str] = []
        self._expected = set[str]()
        self._host = urllib.parse.urlsplit(address).netloc
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        self.page.on("dialog", self._asked)
        context.on("request", self._requested)

    # ---- what somebody does

    def open(self, path: str = "/", status: int = 200) -> Visitor:
        """Open an address of the server."""
        with self.refusal(status):
            answer = self.page.goto(self.address + path)
        return self._arrived(answer, status)

    def click(self, where: str | Locator, status: int = 200) -> Visitor:
        """Follow a link, by its words."""
        link = self.page.get_by_role("link", name=where, exact=True) if isinstance(where, str) else where
        with self.refusal(status), self.page.expect_navigation() as navigation:
            link.first.click()
        self.clicks += 1
        return self._arrived(navigation.value, status)

    def find(self, text: str, status: int = 200, **more: str) -> Visitor:
        """Type something into the search field and press Enter, which counts as a click."""
        self.page.fill("input[name=q]", text)
        if "store" in more:
            self.page.select_option("select[name=store]", more["store"])
        with self.refusal(status), self.page.expect_navigation() as navigation:
            self.page.press("input[name=q]", "Enter")
        self.clicks += 1
        return self._arrived(navigation.value, status)

    # ---- what they read

    @property
    def words(self) -> str:
        """What the page says below its head."""
        return str(self.page.inner_text("main"))

    def rows(self, table: int = 0) -> list[list[str]]:
        """The rows of one of the tables, cell by cell."""
        body = self.page.locator("main table").nth(table).locator("tbody tr")
        return [line.locator("td").all_inner_texts() for line in body.all()]

    @property
    def links(self) -> list[str]:
        """The addresses of this server to which the page links, without the host."""
        found = self.page.eval_on_selector_all("a[href]", "all => all.map(each => each.href)")
        return [each.removeprefix(self.address).partition("#")[0] for each in found if each.startswith(self.address)]

    # ---- what must not happen

    @contextmanager
    def refusal(self, status: int) -> Iterator[None]:
        """An answer with this status is expected. The browser logs one that is an error, some time later."""
        self._expected.add(f"the server responded with a status of {status} ")
        yield

    def close(self) -> None:
        """Leave."""
        self.context.close()

    def _arrived(self, answer: Response | None, status: int) -> Visitor:
        assert answer is not None
        assert answer.status == status, (answer.status, answer.url, self.page.inner_text("body")[:2000])
        return self

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(each in message.text for each in self._expected):
            self.complaints.append(f"{message.type} at {self.page.url}: {message.text}")

    def _asked(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _requested(self, request: Any) -> None:
        if urllib.parse.urlsplit(request.url).netloc != self._host:
            self.complaints.append(f"request to {request.url}")
