"""Everybody can use the pages: axe-core finds nothing in any view, and the keyboard is enough."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Callable, Iterator

import pytest

from browser.server import Server, served
from browser.shop import DEAD, Shop, shop
from browser.visitor import Visitor
from cli_runs import run

Visit = Callable[..., Visitor]
VIEWS = {
    "overview": "/",
    "store": "/s/shop/status",
    "topics": "/s/shop/topics",
    "topic": "/s/shop/topic?topic=orders",
    "newest messages": "/s/shop/recent?topic=orders&columns=to.city,price",
    "messages of a queue": "/s/shop/messages?topic=orders&queue=1",
    "message": "/s/shop/message?topic=returns&queue=0&offset=0",
    "search": "/s/shop/search?q=return-4",
    "search by time": "/s/shop/search?q=-1h",
    "readers": "/s/shop/readers",
    "group": "/s/shop/group?group=billing",
    "Spark": "/s/shop/spark",
    "log": "/s/shop/log",
    "check": "/s/shop/verify",
    "error": "/s/shop/topic?topic=nowhere",
    "login": "/login",
}
FINDINGS = """async () => {
  const found = await axe.run(document, {resultTypes: ["violations"]});
  return found.violations.map(each => `${each.id}: ${each.help}: ${each.nodes.map(node => node.html).slice(0, 3).join(" ")}`);
}"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """The shop, once a recovery had something to mend."""
    made = shop(tmp_path_factory.mktemp("accessible"))
    (made.root / "abort").write_bytes(b"")
    run("recover", made.root)
    return made


@pytest.fixture(scope="module")
def server(made: Shop) -> Iterator[Server]:
    with served(made.root, "--checkpoint", made.query) as server:
        yield server


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(server: Server, visit: Visit, view: str) -> None:
    """On a wide screen and on a phone, light and dark, with every part unfolded."""
    visitor = visit(server.address)
    visitor.open(VIEWS[view], 404 if view == "error" else 200)
    visitor.page.evaluate("() => document.querySelectorAll('details').forEach(each => { each.open = true; })")
    axe = importlib.resources.files("axe_playwright_python") / "axe.min.js"
    visitor.page.evaluate(axe.read_text(encoding="utf-8"))
    for width in (1440, 360):
        visitor.page.set_viewport_size({"width": width, "height": 900})
        wide = visitor.page.evaluate("() => document.documentElement.scrollWidth")
        assert wide <= width, f"{view} is {wide} pixels wide on a screen of {width}"
        for scheme in ("light", "dark"):
            visitor.page.emulate_media(color_scheme=scheme)
            assert visitor.page.evaluate(FINDINGS) == [], f"{view} at {width} pixels, {scheme}"


def test_the_keyboard_is_enough(server: Server, visit: Visit) -> None:
    """From the overview to a message and who has read it, without a mouse."""
    visitor = visit(server.address).open()
    page = visitor.page
    page.keyboard.press("/")
    page.keyboard.type("order-32")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    page.keyboard.press("j")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert page.inner_text("h1") == "orders/0 @8"

    visitor.open("/s/shop/topics")
    names = [row[0] for row in visitor.rows()]
    focused = "() => document.activeElement.textContent"
    for key, name in (("j", names[0]), ("j", names[1]), ("k", names[0]), ("k", names[0])):
        page.keyboard.press(key)
        assert page.evaluate(focused) == name
    assert DEAD in names

    page.keyboard.press("?")
    assert page.get_by_role("dialog").inner_text().startswith("Keys")
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()
    page.keyboard.press("/")
    page.keyboard.type("j?/")
    assert page.input_value("input[name=q]") == "j?/"


def test_the_first_tab_leads_past_the_head(server: Server, visit: Visit) -> None:
    visitor = visit(server.address).open("/s/shop/topics")
    visitor.page.keyboard.press("Tab")
    assert visitor.page.evaluate("() => document.activeElement.textContent") == "To the content"
    visitor.page.keyboard.press("Enter")
    visitor.page.keyboard.press("Tab")
    assert visitor.page.evaluate("() => document.activeElement.closest('main') !== null")


@pytest.mark.parametrize(("zone", "words"), [("Asia/Kolkata", "+05:30"), ("UTC", "Z")])
def test_times_are_in_the_zone_of_the_reader_with_utc_beside_them(
    server: Server, visit: Visit, zone: str, words: str
) -> None:
    visitor = visit(server.address, timezone_id=zone).open("/s/shop/message?topic=returns&queue=0&offset=0")
    utc = visitor.page.locator("dl time").first.get_attribute("datetime")
    shown = visitor.page.locator("dl time").first.inner_text()
    assert utc is not None and utc.endswith("Z") and words in shown
    assert zone == "UTC" or utc[11:19] + "Z" in shown
    hours, minutes = (int(part) for part in re.findall(r"([0-9]{2}):([0-9]{2})", shown)[0])
    utc_minutes = int(utc[11:13]) * 60 + int(utc[14:16])
    assert (hours * 60 + minutes - utc_minutes) % 1440 == (330 if zone == "Asia/Kolkata" else 0)


def test_a_command_is_copied_by_a_click(server: Server, made: Shop, visit: Visit) -> None:
    visitor = visit(server.address, permissions=["clipboard-read", "clipboard-write"])
    visitor.open("/s/shop/recent?topic=orders")
    visitor.page.locator("details summary").click()
    visitor.page.get_by_role("button", name="Copy").first.click()
    visitor.page.get_by_role("button", name="Copied").wait_for()
    assert str(made.root) in visitor.page.evaluate("() => navigator.clipboard.readText()")
