"""The questions, each asked from the overview: what was done to the store is found in two clicks or fewer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from browser.server import Server, served
from browser.shop import DEAD, Shop, order, rejecting, shop
from browser.visitor import Visitor
from cli_runs import objects, run
from messagestore import Message, MessageStore
from messagestore.files.consumer_offsets import publish_offsets
from small import SMALL, filled

Visit = Callable[..., Visitor]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """The shop, and beside it a store in which nothing is wrong."""
    folder = tmp_path_factory.mktemp("questions")
    filled(folder / "archive", 6)
    return shop(folder)


@pytest.fixture(scope="module")
def server(both: Shop) -> Iterator[Server]:
    with served(both.root.parent / "archive", both.root, "--checkpoint", both.query) as server:
        yield server


@pytest.fixture(params=[True, False], ids=["with JavaScript", "without JavaScript"])
def visitor(request: pytest.FixtureRequest, server: Server, visit: Visit) -> Visitor:
    """Somebody who has just opened the overview."""
    return visit(server.address, java_script_enabled=request.param).open()


def done(visitor: Visitor, clicks: int) -> str:
    """What the last page says, after so many clicks."""
    assert visitor.clicks == clicks <= 2
    return visitor.words


def rows_below(visitor: Visitor, title: str) -> list[list[str]]:
    """The rows of the first table below a title, cell by cell."""
    table = visitor.page.locator(f"main h2:has-text('{title}') ~ .wide").first
    return [line.locator("td").all_inner_texts() for line in table.locator("tbody tr").all()]


def test_is_it_well(visitor: Visitor, both: Shop) -> None:
    """A file of the healthy store is damaged: it comes first, with the command that helps, without any click."""
    first = visitor.page.locator("main section").first
    assert "shop" in first.inner_text() and f"{DEAD} got 1 message" in first.inner_text()
    assert "Nothing is wrong." in visitor.page.locator("main section").nth(1).inner_text()
    file = both.root.parent / "archive" / "config" / "consumerOffset.json"
    file.write_text("{")
    try:
        visitor.open()
        assert "archive" in first.inner_text() and "consumerOffset.json" in first.inner_text()
        assert "messagestore verify" in first.inner_text()
        done(visitor, clicks=0)
    finally:
        file.unlink()


@pytest.mark.parametrize("by", ["key", "unique_key", "message_id", "returns/0 @0"])
def test_where_is_my_message_and_who_has_read_it(visitor: Visitor, both: Shop, by: str) -> None:
    """One field takes what people have at hand."""
    visitor.find(getattr(both, by, by), store="shop").click("returns/0 @0")
    words = done(visitor, clicks=2)
    assert order(4).decode() in words and "Ines" in words and both.message_id in words
    assert "no query of a given checkpoint has done a batch of it" in words


def test_where_is_my_message_of_some_minutes_ago(visitor: Visitor) -> None:
    visitor.find("-10m", store="shop").click("orders/3 @0")
    assert '"order": 3' in done(visitor, clicks=2)


def test_has_anybody_read_it(visitor: Visitor) -> None:
    """The group has read up to 9 of orders/0, and the query up to 8."""
    visitor.find("order-32", store="shop").click("orders/0 @8")
    readers = {row[1]: row[2] for row in visitor.rows()}
    assert readers == {"group": "yes; it has read up to 9", "query": "no; 0 messages before it"}
    assert "orders-etl version 2" in done(visitor, clicks=2)


def test_who_is_behind(visitor: Visitor, both: Shop) -> None:
    """The group reads on while somebody looks, and the query does not: its curve ends higher than it was."""
    publish_offsets(both.root, "billing", {("orders", 1): 5}, own=True)
    visitor.click(visitor.page.locator("section", has_text="shop").get_by_role("link", name="readers"))
    assert re.search(r"(falls behind by|caught up in about|stays) .*: 10 messages", visitor.words)
    assert rows_below(visitor, "Consumer groups")[0][:3] == ["billing", "orders", "6"]
    visitor.click("billing")
    assert re.search(r"orders\t1\t5\t10\t5", visitor.words)
    assert "Sampled whenever somebody looked" in done(visitor, clicks=2)


def test_what_did_spark_do(visitor: Visitor, both: Shop) -> None:
    """A micro-batch comes twice, as after a lost commit, and has a row that the store cannot hold."""
    before = replays(visitor)
    rejecting(both.root, range(3), times=2)
    assert replays(visitor) > before
    apps, batches = rows_below(visitor, "Apps"), rows_below(visitor, "Newest batches")
    assert ["rejecting", "0", "4"] in [[cells[0], *cells[2:4]] for cells in apps]
    assert ["rejecting", "0", "4", "orders orders-rejected"] in [cells[:4] for cells in batches]
    visitor.click(DEAD)
    assert DEAD in done(visitor, clicks=2)


def replays(visitor: Visitor) -> int:
    """How many replays the page of Spark counts, from the overview."""
    visitor.clicks = 0
    visitor.open().click(visitor.page.locator("section", has_text="shop").get_by_role("link", name="Spark"))
    found = re.search(r"Replays recognised\s+([0-9]+)", visitor.words)
    assert found is not None
    return int(found[1])


def test_why_did_my_row_not_arrive(visitor: Visitor, both: Shop) -> None:
    """The sink put it among the dead letters, which are counted by field and reason, and lead to the row."""
    rejecting(both.root, range(3))
    visitor.click(visitor.page.locator("section", has_text="shop").get_by_role("link", name="Spark"))
    letters = {cells[0]: cells for cells in rows_below(visitor, "Dead letters")}
    assert letters["orders-rejected"][1] == "body"
    visitor.click(visitor.page.locator("tr", has_text="orders-rejected").locator("td:last-child a"))
    words = done(visitor, clicks=2)
    assert re.search(r"dlqField\s+body", words) and "no-body" in words


def test_what_takes_the_room(visitor: Visitor, both: Shop) -> None:
    """The log grows by a segment; the page counts it, and says why the next gc leaves everything."""
    address = visitor.page.locator("section", has_text="shop").get_by_role("link", name="log")
    visitor.click(address)
    before = len(rows_below(visitor, "Segments"))
    with MessageStore.open(both.root) as store:
        for number in range(40):
            assert store.put_message(Message("returns", b"." * 1000, queue_id=0, keys=(f"more-{number}",))).is_ok
    visitor.clicks = 0
    visitor.open().click(address)
    assert before < len(rows_below(visitor, "Segments"))
    assert re.search(r"returns, [0-9.]+ KiB", visitor.page.locator("ul.legend").inner_text())
    words = done(visitor, clicks=1)
    assert re.search(r"What the next gc takes\s+Nothing\. The rest stays because", words) and "are free" in words


def test_what_went_wrong(visitor: Visitor, both: Shop) -> None:
    """A broker is killed and leaves a torn record; a recovery cuts it, and the page says what was cut and why."""
    (status,) = objects(run("status", both.root, "--json"))
    end = status["commitLog"]["maxOffset"]
    segment = end - end % SMALL.mapped_file_size_commit_log
    with (both.root / "commitlog" / f"{segment:020}").open("r+b") as file:
        file.seek(end - segment)
        file.write(b"\0\0\0\x63torn")
    (both.root / "abort").write_bytes(b"")
    visitor.open()
    section = visitor.page.locator("section", has_text="shop")
    assert "a broker was killed, and nobody has recovered the store since" in section.inner_text()
    assert "messagestore recover" in section.inner_text()
    run("recover", both.root, code=4)
    visitor.open().click(section.get_by_role("link", name="log"))
    words = done(visitor, clicks=1).partition("Recoveries")[2]
    assert f"bytes behind {end}" in words and "spark/cut" in words
    visitor.click("Store")
    assert re.search(r"Left\s+closed", done(visitor, clicks=2))


def test_is_every_byte_as_it_was_written(visitor: Visitor, both: Shop) -> None:
    """A bit of a body flips. The page checks all bytes when somebody asks, and names the file and the place."""
    log = both.root.parent / "archive" / "commitlog" / f"{0:020}"
    with log.open("r+b") as file:
        file.seek(84 + 4 + 5)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    visitor.click(visitor.page.locator("section", has_text="archive").get_by_role("link", name="log"))
    with visitor.page.expect_navigation():
        visitor.page.get_by_role("button", name="Check every byte").click()
    visitor.clicks += 1
    found = visitor.page.locator("main", has_text="messagestore recover mends what can be mended")
    for _ in range(600):
        if found.count():
            break
        visitor.page.wait_for_timeout(100)
        visitor.page.reload()
    assert f"{0:020}" in done(visitor, clicks=2)
    with log.open("r+b") as file:
        file.seek(84 + 4 + 5)
        file.write(bytes([byte]))
