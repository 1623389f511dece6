"""What README shows runs as it stands: the blocks without Spark here, those with it in connector/spark."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import readme_blocks
from readme_blocks import Block

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_SPARK = [b for b in readme_blocks.blocks() if b.language in ("python", "console") and not b.needs_spark]


def name_of(block: Block) -> str:
    return block.language


def test_every_block_is_run_somewhere() -> None:
    """A block of a kind that no test knows would rot."""
    kinds = [(block.language, block.needs_spark) for block in readme_blocks.blocks()]
    assert kinds == [
        ("sh", False),  # install without Spark
        ("python", False),
        ("console", False),
        ("sh", False),  # install for Spark: tests/connector/spark/test_readme_spark.py
        ("python", True),
        ("sh", False),  # make demo: tests/examples
    ]


@pytest.mark.parametrize("block", WITHOUT_SPARK, ids=name_of)
def test_a_block_pasted_twice_runs_twice(tmp_path: Path, block: Block) -> None:
    """A person in a hurry pastes a block into an empty folder, and again a minute later."""
    first = readme_blocks.run(block, tmp_path)
    if block.printed is not None:
        assert first == block.printed
    if block.language == "console":
        assert first.count("UA1545 is late") == 4, "get, tail, find and dump"
        assert "no fault found" in first
        assert first.endswith("closed cleanly: a Java broker can take over\n")
    assert readme_blocks.run(block, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != "block.py"] == ["tour"], "rm -r tour removes all"


def test_the_commands_of_readme_are_one_of_each_kind() -> None:
    (block,) = [block for block in WITHOUT_SPARK if block.language == "console"]
    verbs = [line.split()[2] for line in block.text.splitlines()]
    shown = ["put", "get", "tail", "find", "topics", "offsets", "dump", "status", "verify", "gc", "backup", "recover"]
    assert verbs == shown


def test_the_install_commands_name_what_there_is() -> None:
    """The extras that README names exist, and its versions are those of pyproject.toml and of the data source."""
    from pyspark_messagestore.requirements import OLDEST_PYSPARK, OLDEST_PYTHON

    text = readme_blocks.README.read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(re.findall(r"'\.\[(\w+)\]'", text))
    assert extras == {"cli", "metrics", "spark", "connect"}
    assert extras <= set(project["optional-dependencies"])
    assert project["requires-python"] == f">={OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]}"
    assert project["optional-dependencies"]["spark"] == [f"pyspark>={OLDEST_PYSPARK[0]}.{OLDEST_PYSPARK[1]}"]
    versions = "Python 3.11 or newer, and PySpark 4.2 or newer"
    assert versions in text
    assert text.index(versions) < text.index("```"), "versions come before the first thing to type"


def test_the_library_comes_before_anything_that_needs_java() -> None:
    """A reader who wants the library only must not be made to install a JVM first."""
    text = readme_blocks.README.read_text(encoding="utf-8")
    assert text.index("from messagestore import Message") < text.index("default-jre")
    assert text.index("pip install '.[cli]'\n") < text.index("pip install '.[spark]'")


def test_no_block_puts_a_store_where_the_checkout_has_a_package() -> None:
    """Run from a checkout, a store in `./store` would be written into the package's folder."""
    for block in readme_blocks.blocks():
        assert not re.search(r"""["'](\./)?store["'/]| (\./)?store/""", block.text), block.text
