"""The Spark code of README and of the guide to Spark, run as it stands: by the path of the interpreter, nothing activated, each block twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import readme_blocks
import spark_runs
from readme_blocks import Block

PASTED = [*readme_blocks.blocks(), *readme_blocks.blocks(readme_blocks.SPARK_GUIDE)]
SPARK_BLOCKS = [block for block in PASTED if block.needs_spark]
OTHER_BLOCKS = [b for b in readme_blocks.blocks() if b.language in ("python", "console") and not b.needs_spark]
ONLY_FASTER = ("SPARK_HOME", "JDK_JAVA_OPTIONS", "SPARK_LOCAL_IP")
"""Of the tests' environment; nothing that says which Python is to be used."""


def environment() -> dict[str, str]:
    return {name: value for name, value in spark_runs.environment().items() if name in ONLY_FASTER}


def run(block: Block, folder: Path) -> str:
    shown = readme_blocks.run(block, folder, **environment())
    return "\n".join(line for line in shown.splitlines() if line) + "\n"


# The quick form pastes again what a newcomer does: the first block that writes with Spark. Each block is read twice in the other.
@pytest.mark.parametrize("again", ["first", pytest.param("all", marks=pytest.mark.slow)])
def test_every_block_pasted_in_order_and_again_in_reverse(tmp_path: Path, again: str) -> None:
    """One folder, all of README and then the guide, then back to the top: the tables stay as the pages show them."""
    ordered = [block for block in PASTED if block.language != "sh"]
    for block in ordered:
        shown = run(block, tmp_path)
        assert block.printed is None or shown == block.printed
    for block in reversed(ordered) if again == "all" else SPARK_BLOCKS[:1]:
        shown = run(block, tmp_path)
        assert not block.needs_spark or shown == block.printed
    names = {path.name for path in tmp_path.iterdir()} - {"block.py"}
    assert names == {"tour"}, "rm -r tour removes everything"
    assert "no fault found" in readme_blocks.run(OTHER_BLOCKS[-1], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", SPARK_BLOCKS, ids=("first", "foreachBatch"))
def test_a_spark_block_alone_runs_twice(tmp_path: Path, block: Block) -> None:
    """Nothing of the other blocks has been there before."""
    assert run(block, tmp_path) == block.printed
    assert run(block, tmp_path) == block.printed


@pytest.mark.slow
def test_the_built_package_is_found_by_spark(tmp_path: Path) -> None:
    """An ordinary install, not an editable one, into an environment of its own: both packages are in the wheel.

    What the package requires is lent by the environment of the tests, since installing it takes minutes.
    """
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    build = [sys.executable, "-m", "pip", "wheel", *options, "--no-build-isolation", "--wheel-dir", tmp_path / "dist"]
    subprocess.run([*build, spark_runs.ROOT], check=True)
    subprocess.run([python, "-m", "pip", "install", *options, *(tmp_path / "dist").iterdir()], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = [
        subprocess.run([p, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
        for p in (python, sys.executable)
    ]
    Path(found[0], "lent.pth").write_text(found[1] + "\n")  # a .pth file in that folder is not followed
    folder = tmp_path / "work"
    folder.mkdir()
    block = Block("python", "import pyspark_messagestore; print(pyspark_messagestore.__file__)", None)
    assert readme_blocks.run(block, folder, str(python)).startswith(str(tmp_path / "venv"))
    shown = readme_blocks.run(SPARK_BLOCKS[0], folder, str(python), **environment())
    assert shown.strip() == (SPARK_BLOCKS[0].printed or "").strip()
