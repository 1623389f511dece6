"""The walks of docs/start: a reader who types what a page shows gets to its end. Those with Spark are in connector/spark."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import walks
from cli_runs import commands
from readme_blocks import README

ROOT = README.parent
PAGES = sorted(path for path in walks.START.glob("*.md"))
IN_THE_CHECKOUT = {"broker-folder", "contribute"}
WITH_SPARK = {"kafka-job", "delta-job"}


def tracked(target: Path) -> None:
    """Copy what a checkout has, and lend it this environment."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist"), dirs_exist_ok=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@pytest.mark.parametrize("name", sorted({page.stem for page in PAGES} - WITH_SPARK))
def test_a_reader_gets_to_the_end(tmp_path: Path, name: str) -> None:
    """In an empty folder or, where the page says so, in a checkout of which the packages are imported."""
    if name in IN_THE_CHECKOUT:
        tracked(tmp_path)
        paths = f"{tmp_path / 'store'}:{tmp_path / 'connector'}"
        walks.follow(walks.START / f"{name}.md", tmp_path, PYTHONPATH=paths)
    else:
        walks.follow(walks.START / f"{name}.md", tmp_path)


def test_there_are_the_seven_walks() -> None:
    assert {page.stem for page in PAGES} == {
        "queue",
        "frames",
        "kafka-job",
        "delta-job",
        "broker-folder",
        "production",
        "contribute",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_walk_is_short_and_begins_with_an_install_that_works(page: Path) -> None:
    """What is installed exists: extras of the project, and packages that the tests have; each block is of a known kind."""
    text = page.read_text(encoding="utf-8")
    assert 40 <= len(text.splitlines()) <= 110
    found = walks.steps(page)
    assert found[0].language == "sh"
    assert {step.language for step in found} <= {"sh", "python", "console", "py", "text"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in (line for step in found if step.language == "sh" for line in step.text.splitlines()):
        if line.startswith("pip install"):
            asked, *packages = line.removeprefix("pip install ").split()
            assert set(asked.removeprefix("'.[").removesuffix("]'").split(",")) <= set(extras)
            assert all(importlib.util.find_spec(package) for package in packages)
        else:
            assert line in ("python3 -m venv .venv", ". .venv/bin/activate", "make setup")
    for step in found:
        if step.language == "py":
            compile(step.text, page.name, "exec")
        for target in re.findall(r"^make ([\w-]+)", step.text, re.MULTILINE):
            assert target in targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_named_but_not_run_exists(page: Path) -> None:
    """Commands and files of the checkout in a sentence, or in a block that needs root."""
    text = page.read_text(encoding="utf-8")
    for verb in re.findall(
        r"\bmessagestore ([a-z]+)\b", re.sub(r"(?s)^```python.*?^```$", "", text, flags=re.MULTILINE)
    ):
        assert verb in commands(), verb
    for name in re.findall(r"\b((?:deploy|tests|store/messagestore)/[\w./@-]*\w)", text):
        assert (ROOT / name).exists(), name
