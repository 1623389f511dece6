"""Follows a page of docs/start as a reader does: saves its programs under their names, and types its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import readme_blocks

START = readme_blocks.README.parent / "docs" / "start"
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"Save (?:this|it) as `([\w./]+)`")
_PRINTS = re.compile(r"(It|This) prints(, among Spark's own messages)?:\s*$")


@dataclass(frozen=True)
class Step:
    """A block of a page.

    Parameters
    ----------
    language : str
        `sh` installs, `python` is saved, `console` is typed, `py` and `text` are not run.
    text : str
    name : str | None
        The file in which a program is saved.
    printed : str | None
        What the page says that the commands print.
    """

    language: str
    text: str
    name: str | None = None
    printed: str | None = None

    @property
    def commands(self) -> list[str]:
        """What is typed; a line without a prompt continues the one before."""
        assert self.text.startswith("$ "), self.text
        return [command.strip() for command in self.text.removeprefix("$ ").split("\n$ ")]


def steps(page: Path) -> list[Step]:
    """All blocks of a page, in its order."""
    found: list[Step] = []
    before = 0
    text = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        said, before = text[before : fence.start()], fence.end()
        language, block = fence.groups()
        names = _SAVED.findall(said)
        if language == "text" and _PRINTS.search(said):
            found[-1] = Step("console", found[-1].text, None, block)
        else:
            found.append(Step(language, block, names[-1] if names else None))
    return found


def environment() -> dict[str, str]:
    """That of a shell in which the environment with the package is activated."""
    lost = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    kept = {name: value for name, value in os.environ.items() if name not in lost}
    programs = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    return {**kept, "PATH": programs, "VIRTUAL_ENV": sys.prefix}


def follow(page: Path, folder: Path, **more: str) -> None:
    """Do what a page says, in a folder; each command must succeed, and print what the page says."""
    given = {**environment(), **more}
    for step in steps(page):
        if step.language == "python":
            assert step.name is not None, step.text
            (folder / step.name).write_text(step.text, encoding="utf-8")
        elif step.language == "console":
            printed = "".join(_typed(command, folder, given) for command in step.commands)
            if step.printed is not None:
                lines = [line for line in printed.splitlines(keepends=True) if line.strip()]
                assert "".join(lines) == step.printed


def _typed(command: str, folder: Path, given: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, (command, done.stdout[-4000:], done.stderr[-4000:])
    return done.stdout
