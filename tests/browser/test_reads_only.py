"""Whatever somebody follows, types and downloads: the store and the checkpoint stay as they are, byte by byte."""

from __future__ import annotations

import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from browser.server import protected, served, tree
from browser.shop import shop
from browser.visitor import Visitor
from dashboard_client import Page

IN_BROWSER = 3
"""So many pages of each view are opened in the browser; the others are only fetched."""


def fetched(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return bytes(answer.read())


def test_every_link_is_followed_and_nothing_is_changed(tmp_path: Path, visit: Callable[..., Visitor]) -> None:
    """Nobody may write to these folders, and the server has none of root's privileges. Each page is shown all the same."""
    made = shop(tmp_path)
    protected(made.root)
    protected(made.query)
    before = tree(tmp_path)
    with served(made.root, "--checkpoint", made.query) as server:
        visitor = visit(server.address, accept_downloads=True)
        waiting, seen, files, opened = ["/"], set[str](), 0, Counter[str]()
        while waiting:
            path = waiting.pop(0)
            if path in seen:
                continue
            seen.add(path)
            view = path.partition("?")[0]
            opened[view] += 1
            if view.endswith(("/body", "/download")):
                files += bool(fetched(server.address + path))
            elif opened[view] <= IN_BROWSER:
                visitor.open(path)
                waiting += visitor.links
                posts = visitor.page.eval_on_selector_all("form[method=post]", "all => all.map(each => each.action)")
                assert set(posts) <= {f"{server.address}/s/shop/verify/start"}
            else:
                links = Page(fetched(server.address + path).decode()).links
                waiting += [link for link in links if link.startswith("/")]

        for text in (made.key, made.unique_key, made.message_id, "orders/1 @2", "-1h", "nowhere"):
            visitor.open("/s/shop/search?" + urllib.parse.urlencode({"q": text}))
        visitor.open("/s/shop/recent?topic=orders&text=Oslo&columns=to.city")
        visitor.page.get_by_role("button", name="Live").click()
        visitor.page.get_by_text("Waiting for new messages").wait_for()
        visitor.open("/s/shop/log").page.get_by_role("button", name="Check every byte").click()
        visitor.page.get_by_text("No fault:").wait_for()
        for path in ("/metrics", "/healthz", "/api/v1/stores"):
            visitor.open(path)
        visitor.page.goto("about:blank")  # a page of JSON is asked for once more, maybe when the server has ended
    views = {view.rpartition("/")[2] for view in opened}
    assert {
        "status",
        "topics",
        "topic",
        "recent",
        "messages",
        "message",
        "readers",
        "group",
        "spark",
        "log",
        "verify",
    } <= views
    assert files > 40
    assert tree(tmp_path) == before
