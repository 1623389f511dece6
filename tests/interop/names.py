"""RocketMQ's own names, from the jars of any version, and what it makes of a broker's file (`driver/tools/Names.java`)."""

from __future__ import annotations

import base64
import functools
import subprocess
from collections.abc import Iterable
from pathlib import Path

from interop import java_build

_SOURCE = java_build.DRIVER / "tools" / "Names.java"
_WHATS = ("setting", "constant", "member", "property", "value")


@functools.cache
def _lines(version: str, *files: str) -> list[list[str]]:
    command = ["java", "-Xmx256m", "-cp", java_build.tools_classpath(version), str(_SOURCE), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    words = [line.split(" ", 3) for line in done.stdout.splitlines()]
    return [each for each in words if len(each) == 4 and each[0] in _WHATS]  # it logs on the same stream


def settings(version: str) -> dict[str, str]:
    """The settings that a broker reads from its file, each with its Java type."""
    return {name: kind for what, _, name, kind in _lines(version) if what == "setting"}


def constants(version: str, of: str) -> dict[str, str]:
    """The texts of a class, by the names of their constants."""
    return {name: value for what, where, name, value in _lines(version) if (what, where) == ("constant", of)}


def members(version: str, of: str) -> set[str]:
    """The texts in a set of a class, such as `TopicValidator.SYSTEM_TOPIC_SET`."""
    return {value for what, *where, value in _lines(version) if what == "member" and ".".join(where) == of}


def read(version: str, files: Iterable[Path]) -> dict[Path, tuple[dict[str, str], dict[str, str]]]:
    """For each file: its properties as Java reads them, and all settings of a broker that is started with it."""
    found: dict[Path, tuple[dict[str, str], dict[str, str]]] = {path: ({}, {}) for path in files}
    for what, path, name, value in _lines(version, *map(str, found)):
        if what == "property":
            found[Path(path)][0][_text(name)] = _text(value)
        else:
            found[Path(path)][1][name] = _text(value)
    return found


def _text(word: str) -> str:
    return base64.b64decode(word[1:]).decode()
