"""The browser of these tests, why they cannot run where they cannot, and the server with the pages."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser.visitor import FOREIGN, Visitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HERE = Path(__file__).resolve().parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are marked `browser`."""
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.browser)


def _missing() -> str:
    for package in ("playwright", "starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed; run `make setup`"
    return "" if CHROMIUM else "there is no Chromium; run `make chromium` as root, or install Debian's package chromium"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The browser: one for all tests. It knows one name of another host, which leads to this machine."""
    why = _missing()
    if why:
        if os.environ.get("CI") == "true":
            pytest.fail(f"in CI the browser must run: {why}", pytrace=False)
        pytest.skip(f"no browser: {why}")
    from playwright.sync_api import sync_playwright

    options = [f"--host-resolver-rules=MAP {FOREIGN} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Callable[..., Visitor]]:
    """Open a browser's window at an address. At the end, none of the pages may have complained of anything."""
    visitors: list[Visitor] = []

    def visitor(address: str, **options: Any) -> Visitor:
        visitors.append(Visitor(chromium.new_context(**options), address))
        return visitors[-1]

    yield visitor
    for each in visitors:
        each.close()
    assert [each.complaints for each in visitors if each.complaints] == []
