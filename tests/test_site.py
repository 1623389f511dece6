"""The site is whole: each link and anchor leads somewhere, nothing comes from another host, and search finds words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import messagestore
from readme_blocks import README

ROOT = README.parent


class Page(HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(given["href"])
        self.loads += [given["src"]] if "src" in given else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", target]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return target


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    assert len(found) >= 40
    return found


def target_of(page: Path, link: str) -> Path:
    there = page.parent / unquote(urlsplit(link).path) if urlsplit(link).path else page
    return (there / "index.html" if there.is_dir() else there).resolve()


def test_each_link_and_each_anchor_leads_somewhere(pages: dict[Path, Page], site: Path) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("mailto:"):
                continue
            there = target_of(path, link)
            known = pages.get(there)
            if not there.is_file() or (parts.fragment and known and unquote(parts.fragment) not in known.anchors):
                dead.append((str(path.relative_to(site)), link))
    assert dead == []


def test_nothing_is_loaded_from_another_host(pages: dict[Path, Page], site: Path) -> None:
    for path, page in pages.items():
        for address in page.loads:
            assert not urlsplit(address).netloc, (path, address)
            assert address.startswith("data:") or target_of(path, address).is_file(), (path, address)
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_search_finds_words_of_guides_and_of_the_reference(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    text = {entry["location"].partition("#")[0]: "" for entry in found["docs"]}
    for entry in found["docs"]:
        text[entry["location"].partition("#")[0]] += entry["title"] + " " + entry["text"]
    assert "sd_notify" not in text["guides/consume/"]
    assert "on_revoked" in text["guides/consume/"]
    assert "append_batch" in text["reference/library/"]


def test_the_reference_has_all_that_can_be_imported(pages: dict[Path, Page], site: Path) -> None:
    anchors = {
        name for page in ("library", "errors") for name in pages[site / "reference" / page / "index.html"].anchors
    }
    public = [name for name in messagestore.__all__ if callable(getattr(messagestore, name))]
    errors = "messagestore.errors"
    assert [name for name in public if not {f"messagestore.{name}", f"{errors}.{name}"} & anchors] == []


def test_the_reference_shows_no_internals(pages: dict[Path, Page], site: Path) -> None:
    anchors = pages[site / "reference" / "library" / "index.html"].anchors
    names = {name for name in anchors if name.startswith(("messagestore.", "pyspark_messagestore."))}
    assert "messagestore.MessageStore.put_message" in names
    assert not {name for name in names if re.search(r"\._(?!_)", name)}
    classes_call = {"MessageStore.view", "MessageStore.writer", "ReadOnlyStore.view", "RecoveryReport.note_queues"}
    consumers = ("take_back", "in_turn", "send_back", "bury", "held", "may_move", "moved")
    classes_call |= {f"Consumer.{name}" for name in consumers}
    assert not {name for name in classes_call if f"messagestore.{name}" in names}


def test_the_notebook_the_curves_and_the_race_are_shown(pages: dict[Path, Page], site: Path) -> None:
    """A reader sees the pictures without running anything."""
    drawn = [each for each in pages[site / "guides" / "notebook" / "index.html"].loads if each.startswith("data:")]
    assert len(drawn) == 3
    assert all(each.startswith("data:image/png;base64,iVBOR") and len(each) > 10_000 for each in drawn)
    curves = [each for each in pages[site / "curves" / "index.html"].loads if each.endswith(".svg")]
    assert len(curves) == len(list((ROOT / "docs" / "curves").glob("*.svg")))
    assert "SQLite" in (site / "race" / "index.html").read_text(encoding="utf-8")
