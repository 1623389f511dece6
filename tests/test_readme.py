"""What the README shows is run here as it stands, on a store in a temporary folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_library_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person in a hurry pastes the README's Python: it stores three messages and finds them again."""
    (code,) = blocks("python")
    exec(compile(code.replace("/data/store", str(tmp_path / "store")), "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "PUT_OK 2"
    assert lines[1:4] == ["0 UA b'UA0'", "1 UA b'UA1'", "2 UA b'UA2'"]
    assert lines[4] == "3 messages with that key"
