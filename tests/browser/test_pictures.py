"""The pictures of the guide. `make docs-pictures` takes them; here their words are compared with those of the page.

A picture has the digest of the words that it shows, numbers aside, as a text chunk of its own. So a page that says
something else makes this test fail until the pictures are taken again.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from browser.server import served
from browser.shop import shop
from browser.visitor import Visitor
from checkpoints import checkpoint, offset
from messagestore import MessageStore
from readme_blocks import README
from small import filled

ASSETS = README.parent / "docs" / "assets"
PAGES = {"overview": "/", "message": "/s/shop/message?topic=orders&queue=0&offset=8"}
MOST_SIZE = 150_000
_DIGEST = b"tEXtwords\0"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A shop with a query that is stuck, beside a store in which nothing is wrong; and the folder of both."""
    folder = tmp_path_factory.mktemp("pictures")
    made = shop(folder)
    filled(folder / "archive", 6)
    with MessageStore.open_read_only(made.root) as store:
        ago_ms = int((time.time() - 90 * 60) * 1000)
        read = [offset(store.store_id, *ends, topic="orders") for ends in ((4, 4, 4, 4), (9, 9, 9, 9))]
    stuck = checkpoint(folder / "stuck-orders", [[each] for each in read], committed=1, at_ms=ago_ms)
    with served(made.root, folder / "archive", "--checkpoint", made.query, "--checkpoint", stuck) as server:
        yield server.address, folder


RENAME = """([from, to]) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(from, to);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_the_pictures_of_the_guide_show_the_pages(
    address: tuple[str, Path], visit: Callable[..., Visitor], page: str, scheme: str
) -> None:
    server, folder = address
    visitor = visit(server, viewport={"width": 1000, "height": 760}, color_scheme=scheme, timezone_id="UTC")
    visitor.open(PAGES[page])
    visitor.page.evaluate(RENAME, [str(folder), "/data"])
    words = re.sub(r"[0-9A-F]{16,}|[0-9][0-9.,:T-]*", "0", visitor.page.inner_text("body"))
    digest = hashlib.sha256(words.encode()).hexdigest()
    path = ASSETS / f"dashboard-{page}-{scheme}.png"
    if folder_of_pictures := os.environ.get("MESSAGESTORE_PICTURES"):
        path = Path(folder_of_pictures) / path.name
        path.write_bytes(with_digest(visitor.page.screenshot(), digest))
    data = path.read_bytes()
    assert _DIGEST + digest.encode() in data, f"{path.name} shows an older page: run `make docs-pictures`"
    assert len(data) < MOST_SIZE
    guide = (README.parent / "docs" / "guides" / "dashboard.md").read_text(encoding="utf-8")
    assert f"../assets/{path.name}" in guide


def with_digest(png: bytes, digest: str) -> bytes:
    """A picture with a text chunk before its last chunk, which has 12 bytes."""
    chunk = _DIGEST + digest.encode()
    return png[:-12] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + png[-12:]
