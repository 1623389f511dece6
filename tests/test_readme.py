"""What the README shows is run here as it stands, on a store in a temporary folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_library_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person in a hurry pastes the README's Python: it stores three messages and finds them again."""
    (code,) = [block for block in blocks("python") if "import Message," in block]
    exec(compile(code.replace("/data/store", str(tmp_path / "store")), "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "PUT_OK 2"
    assert lines[1:4] == ["0 UA b'UA0'", "1 UA b'UA1'", "2 UA b'UA2'"]
    assert lines[4] == "3 messages with that key"


def test_the_commands_run(tmp_path: Path) -> None:
    """The commands, one after another, each with exit code 0; what was put is what is shown."""
    (text,) = blocks("console")
    shown = {}
    for line in text.splitlines():
        command, *arguments = shlex.split(
            line.removeprefix("$ ").replace("/data/store", str(tmp_path / "store")), comments=True
        )
        assert command == "messagestore"
        program = Path(sys.executable).with_name(command)
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, line + done.stderr
        shown[arguments[0]] = done.stdout
    assert list(shown) == ["put", "get", "tail", "dump", "status", "verify", "recover"]
    assert all("UA 1545 late" in shown[name] for name in ("get", "tail", "dump"))
