"""What the guides show runs as it stands, block by block in one folder, as a reader follows a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import readme_blocks
from cli_runs import commands
from readme_blocks import GUIDES, README, SPARK_GUIDE

MKDOCS = README.parent / "mkdocs.yml"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_blocks_of_a_page_run_in_their_order(tmp_path: Path, guide: Path) -> None:
    """Blocks of `py` are parts of a program with Spark, and are compiled; blocks of `text` need a machine of their own."""
    for language, text in re.findall(
        r"^```(\w+)\n(.*?)^```$", guide.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        assert language in ("python", "console", "py", "text"), language
        block = readme_blocks.Block(language, text, None)
        if block.needs_spark:
            assert guide == SPARK_GUIDE, "connector/spark/test_readme_spark.py runs what this page shows"
        elif language in ("python", "console"):
            readme_blocks.run(block, tmp_path)
        elif language == "py":
            compile(text, guide.name, "exec")


def test_what_the_guide_to_exactly_once_shows(tmp_path: Path) -> None:
    blocks = [b for b in readme_blocks.blocks(README.parent / "docs/guides/exactly-once.md") if b.language == "python"]
    first, second = (readme_blocks.run(block, tmp_path) for block in blocks)
    assert first.startswith("appended\nknown\nrefused: app 'gates-of-the-day': version 0 is in the store")
    assert second == "{'line': 4} 4\n"


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", MKDOCS.read_text(encoding="utf-8")))
    pages = {str(path.relative_to(README.parent / "docs")) for path in (README.parent / "docs").rglob("*.md")}
    assert named == pages


def test_the_commands_of_the_guides_exist() -> None:
    """A command in a block of `text` is not run, but its verb and options are real."""
    verbs = commands()
    for guide in GUIDES:
        for line in re.findall(r"^(?:\$ )?messagestore (.*)$", guide.read_text(encoding="utf-8"), re.MULTILINE):
            words = [word for word in line.split() if not word.startswith("-")]
            command = verbs.get(" ".join(words[:2]), verbs[words[0]])
            options = {option for each in command.params for option in each.opts}
            assert {word for word in line.split() if word.startswith("--")} <= options, line


def test_what_a_busy_machine_makes_of_spark_has_its_line() -> None:
    """PySpark gives its own worker ten seconds, and its error names neither the cause nor the cure."""
    lines = (README.parent / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if "Python worker failed to connect back" in line)
    assert "CANNOT_OPEN_SOCKET" in line and "so busy" in line and "Start the query again" in line
