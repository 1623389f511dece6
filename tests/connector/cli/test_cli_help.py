"""What a person types first: -h, and the Tab key in bash, zsh and fish."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cli_runs import run

PROGRAM = [sys.executable, "-m", "pyspark_messagestore.command"]


@pytest.mark.parametrize("words", [[], ["put"], ["topic"], ["topic", "create"], ["config"], ["group", "reset-offset"]])
def test_h_is_help(words: list[str]) -> None:
    assert run(*words, "-h").stdout == run(*words, "--help").stdout


def test_the_list_of_commands_has_groups() -> None:
    text = run("-h").stdout
    for panel in ("Messages", "Topics and groups", "Spark", "Care"):
        assert f" {panel} " in text
    assert " Commands " not in text


def completed(shell: str, **variables: str) -> str:
    environment = {**os.environ, "_MESSAGESTORE_COMPLETE": shell, **variables}
    return subprocess.run(PROGRAM, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str) -> None:
    script = completed(f"source_{shell}")
    assert "messagestore" in script and "_MESSAGESTORE_COMPLETE" in script


def test_commands_and_options_are_completed() -> None:
    words = completed("complete_bash", COMP_WORDS="messagestore top", COMP_CWORD="1").split()
    assert words == ["topics", "topic"]
    words = completed("complete_bash", COMP_WORDS="messagestore group reset-offset --e", COMP_CWORD="3").split()
    assert words == ["--execute"]
    words = completed("complete_bash", COMP_WORDS="messagestore config s s", COMP_CWORD="3").split()
    assert words == ["show", "set"]
