"""A store whose senders, apps, groups and folders try to become part of the page, as a browser sees it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from browser.server import Server, served
from browser.visitor import Visitor
from checkpoints import checkpoint, offset
from crash.imitate import Broker
from messagestore import BatchRequest, Message, MessageStore
from messagestore.files.consumer_offsets import publish_offsets
from small import SMALL, bodies, columns

Visit = Callable[..., Visitor]
CONFIG = SMALL.replace(
    mapped_file_size_commit_log=8 << 20, max_message_size=5 << 20, max_index_num=2000, stamp_uniq_key=False
)
HOSTILE = (
    "a</title></textarea></pre><script>document.title='hit'</script><img src=x onerror=alert(1)><svg/onload=alert(2)>",
    "a<base href=http://elsewhere.example/><a href=//elsewhere.example>a</a><iframe src=//elsewhere.example>",
    "a\"'><b onmouseover=alert(3) style=position:fixed>",
    "a{{ 7*7 }}{% include 'base.html' %}${7*7}<%= 7*7 %>",
    "a\u202ebackwards\u2066inside\u200f\ufeff\u2028line",
    "a&lt;script&gt;&#x3c;b&#x3e;<!--",
    "javascript:alert(4)//http://elsewhere.example/",
)
BODIES = (
    b"a\0b<script>alert(6)</script>",
    b"\xff\xfe<img src=x onerror=alert(7)>\xed\xa0\x80",
    b"[" * 10_000 + b"]" * 10_000,
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    b"<i>" * ((4 << 20) // 3),
    b"\x1b[31m\r\n\t\x7f" * 20,
    b"",
)


def harmless(text: str) -> str:
    """Text of the same length that nobody can take for anything else."""
    return re.sub(r"[^A-Za-z0-9 /=\0]", "x", text)


def store_with(root: Path, say: Callable[[str], str]) -> Path:
    """Everything that a sender, an app, a consumer or the owner of a folder can name, said in one way."""
    texts = [say(text) for text in HOSTILE]
    with MessageStore.open(root, CONFIG) as store:
        for number, text in enumerate(texts):
            names = {say(each.replace("javascript", f"p{place}")): text for place, each in enumerate(HOSTILE)}
            keys, body = (text.replace(" ", "_"),), json.dumps({text: [text, {"to": text}]}).encode()
            assert store.put_message(Message("t", body, 0, keys=keys, tags=text, properties=names)).is_ok
            assert store.put_message(Message("t", text.encode(), 1, keys=keys)).is_ok
            store.append_batch(columns(bodies(2)), BatchRequest(app_id=re.sub(r"\s", "_", text), version=number))
        for body in BODIES:
            assert store.put_message(Message("t", body, 1)).is_ok
        store_id = store.store_id
    for text in texts:
        publish_offsets(root, f"group-{text}", {("t", 0): 1}, own=True)
    broker = Broker(root, CONFIG)
    for text in texts:
        if "/" not in text:
            broker.put(text[:60], b"of a topic that a broker took")
    broker.close()
    checkpoint(root.parent / say(HOSTILE[2]), [[offset(store_id, 1, 1)]])
    return root


def opened(folder: Path, say: Callable[[str], str]) -> tuple[object, ...]:
    """The arguments of a server for such a store."""
    root = store_with(folder / say(HOSTILE[3]), say)
    return root, "--checkpoint", folder / say(HOSTILE[2])


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(*opened(tmp_path_factory.mktemp("hostile"), str)) as server:
        yield server


@pytest.fixture(scope="module")
def friendly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same store, but for what the texts consist of."""
    with served(*opened(tmp_path_factory.mktemp("friendly"), harmless)) as server:
        yield server


# Without the points of curves: how many there are is a matter of time.
SHAPE = """() => [...document.querySelectorAll("*:not(svg *, .points *)")].map(each =>
  [each.tagName, ...each.getAttributeNames().sort(), each.getAttribute("class")].join(" "))"""


OF_EACH_VIEW = 8


def shapes(visitor: Visitor) -> dict[str, list[str]]:
    """The elements of some pages of each view, in the order in which links lead to them."""
    found: dict[str, list[str]] = {}
    waiting, opened = ["/"], Counter[str]()
    while waiting:
        path = waiting.pop(0)
        view = path.partition("?")[0]
        if path in found or view.endswith(("/body", "/download")) or opened[view] == OF_EACH_VIEW:
            continue
        opened[view] += 1
        visitor.open(path)
        assert visitor.page.title() != "hit"
        found[path] = visitor.page.evaluate(SHAPE)
        waiting += visitor.links
    return found


def test_no_page_is_changed_by_what_it_shows(hostile: Server, friendly: Server, visit: Visit) -> None:
    """Each page has the elements that it has with harmless texts, and asks nobody else. The browser has no complaint."""
    other = visit(hostile.address)
    ours, theirs = shapes(visit(friendly.address)), shapes(other)
    assert len(ours) == len(theirs) > 40
    for mine, (path, shape) in zip(ours.values(), theirs.items(), strict=True):
        assert shape == mine, path
        assert not {each.partition(" ")[0] for each in shape} & {"IMG", "B", "I", "BASE", "IFRAME", "STYLE", "OBJECT"}


def test_a_page_of_each_text_shows_it_as_it_is(hostile: Server, visit: Visit) -> None:
    """Marks of direction and control characters are written out, so that what is read is what is there."""
    visitor = visit(hostile.address)
    for number, text in enumerate(HOSTILE):
        visitor.open(f"/s/store-1/message?topic=t&queue=1&offset={2 * number}")
        body = visitor.page.locator("pre").first.inner_text()
        plain = text
        for mark in "\u202e\u2066\u200f\ufeff\u2028":
            plain = plain.replace(mark, f"\\u{ord(mark):04x}")
        assert body.rstrip("\n") == plain


def test_a_body_is_cut_before_it_makes_the_page_heavy(hostile: Server, visit: Visit) -> None:
    visitor = visit(hostile.address).open("/s/store-1/messages?topic=t&queue=1")
    large = visitor.page.locator("tr", has_text="<i><i><i>")
    visitor.click(large.get_by_role("link"))
    assert "of which the first 262,144 characters are shown" in visitor.words
    assert len(visitor.page.content()) < 2_000_000


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_what_is_typed_is_text(hostile: Server, visit: Visit, number: int) -> None:
    """The search field, the filters and the address take it."""
    text = HOSTILE[number]
    visitor = visit(hostile.address).open()
    shape = visitor.page.evaluate(SHAPE)
    visitor.find(text.replace(" ", "_"))
    assert visitor.page.locator("main tbody tr").count() == 2
    visitor.open("/s/store-1/recent?topic=t")
    for name in ("tag", "text"):
        visitor.page.fill(f"input[name={name}]", text)
    with visitor.page.expect_navigation():
        visitor.page.get_by_role("button", name="Show").click()
    assert visitor.page.input_value("input[name=tag]") == text
    assert visitor.open().page.evaluate(SHAPE) == shape


def test_a_live_list_is_not_changed_by_what_comes(visit: Visit, tmp_path: Path) -> None:
    root = store_with(tmp_path / "live", harmless)
    with served(root) as server:
        visitor = visit(server.address).open("/s/live/recent?topic=t&columns=a")
        shape = visitor.page.evaluate(SHAPE)
        visitor.page.get_by_role("button", name="Live").click()
        visitor.page.get_by_text("Waiting for new messages").wait_for()
        with MessageStore.open(root) as store:
            for text in HOSTILE:
                body = json.dumps({"a": text, "b": text}).encode()
                assert store.put_message(Message("t", body, 0, keys=(text.replace(" ", "_"),), tags=text)).is_ok
        visitor.page.get_by_text(f"{len(HOSTILE)} new").wait_for()
        first = visitor.page.locator("main tbody tr").first
        assert "javascript:alert(4)" in first.inner_text()
        assert first.get_by_role("link").get_attribute("href").startswith("/s/live/message?")
        tags = {each.partition(" ")[0] for each in visitor.page.evaluate(SHAPE)}
        assert tags == {each.partition(" ")[0] for each in shape}
