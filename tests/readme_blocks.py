"""The fenced blocks of README.md and of the guides, and how a person runs them: each as it stands, in a folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
SPARK_GUIDE = README.parent / "docs" / "guides" / "spark.md"
GUIDES = sorted((README.parent / "docs" / "guides").glob("*.md"))
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block of README.md.

    Parameters
    ----------
    language : str
        `python`, `console` or `sh`; blocks of `text` are what the block before them prints.
    text : str
    printed : str | None
        What README says that it prints, on its first run.
    """

    language: str
    text: str
    printed: str | None

    @property
    def needs_spark(self) -> bool:
        return "pyspark" in self.text and self.language == "python"


def blocks(document: Path = README) -> list[Block]:
    """All blocks, in the document's order."""
    found: list[Block] = []
    for language, text in _FENCE.findall(document.read_text(encoding="utf-8")):
        if language == "text":
            found[-1] = Block(found[-1].language, found[-1].text, text)
        else:
            found.append(Block(language, text, None))
    return found


def newcomers_environment() -> dict[str, str]:
    """Nothing is activated: `python3` on the PATH is the system's, and a shell profile has set Spark's Python to it."""
    lost = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in lost}
    other = {"PYSPARK_PYTHON": "/usr/bin/python3", "PYSPARK_DRIVER_PYTHON": "/usr/bin/python3"}
    return {**kept, **other, "PATH": "/usr/local/bin:/usr/bin:/bin"}


def run(block: Block, folder: Path, python: str = sys.executable, **environment: str) -> str:
    """Run a block of `python` or `console` in a folder; what it wrote to standard output.

    A python block is saved to a file and run by the path of an interpreter; a command is looked for beside it.
    """
    given = {**newcomers_environment(), **environment}
    if block.language == "python":
        script = folder / "block.py"
        script.write_text(block.text, encoding="utf-8")
        return _output([python, script.name], folder, given)
    assert block.language == "console"
    shown = ""
    for line in block.text.splitlines():
        command, *arguments = shlex.split(line.removeprefix("$ "), comments=True)
        assert line.startswith("$ messagestore "), line
        shown += _output([str(Path(python).with_name(command)), *arguments], folder, given)
    return shown


def _output(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr[-4000:])
    return done.stdout
