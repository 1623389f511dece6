"""What a person types first: -h, and the Tab key in bash, zsh and fish."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from cli_runs import commands, error, on_terminal, run
from pyspark_messagestore.cli import output
from pyspark_messagestore.cli.app import size_of
from pyspark_messagestore.cli.other_words import OTHER_WORDS
from pyspark_messagestore.cli.output import table
from readme_blocks import README
from small import filled

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


def test_the_help_fits_in_80_columns_and_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word in angle brackets is one that a line ended within."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in commands():
        for line in run(*name.split(), "-h").stdout.splitlines():
            assert len(line) <= 80, (name, line)
            assert "<" not in re.sub("<[^<>]*>", "", line), (name, line)


# ---- words of other tools


@pytest.mark.parametrize("words", OTHER_WORDS)
def test_a_word_of_another_tool_is_answered_with_a_command_that_exists(words: str) -> None:
    first, *rest = OTHER_WORDS[words].split()
    if rest != ["ROOT"]:
        assert f"`messagestore {OTHER_WORDS[words]}` does" in error(*words.split(), code=2)
    assert first.startswith("-") or first in commands()
    assert rest[:1] == ["ROOT"] or first.startswith("-") or f"{first} {rest[0]}" in commands() or first == "config"
    assert words.split(maxsplit=1)[0] not in commands() or " " in words


@pytest.mark.parametrize("words", [words for words, here in OTHER_WORDS.items() if here.split()[1:] == ["ROOT"]])
def test_a_word_for_a_command_that_only_looks_at_a_store_runs(tmp_path: Path, words: str) -> None:
    """With the options that follow it; the real name is told beside."""
    root = filled(tmp_path / "store")
    name = OTHER_WORDS[words].split()[0]
    code = 1 if name == "groups" else 0  # there is none
    ours, theirs = run(name, root, code=code), run(*words.split(), root, code=code)
    if name != "status":  # it says how long ago things were
        assert theirs.stdout == ours.stdout
    assert theirs.stderr == f"messagestore: {words} is `messagestore {name} ROOT` here\n{ours.stderr}"


def test_other_words_are_no_commands_in_the_help() -> None:
    assert "topicList" not in run("-h").stdout
    assert error("printMsg", "/data", code=2).startswith("messagestore: there is no command 'printMsg'")
    assert "No such command" in run("nonsense", code=2).stderr


def test_the_tables_of_the_guides_have_the_same_words() -> None:
    """mqadmin's commands that the guide translates are those that the program knows, and mean the same there."""
    text = (README.parent / "docs" / "guides" / "from-rocketmq.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"## mqadmin's commands\n\n((?:\|.*\n)+)", text)
    rows = [row.strip("|").split(" | ") for row in table.splitlines()[2:]]
    named = {name: right for left, right in rows for name in re.findall(r"`([a-z]\w+)[ `]", left)}
    all_of = {name: " ".join(right for left, right in rows if f"`{name}" in left) for name in named}
    for name, right in all_of.items():
        other = OTHER_WORDS.get(name.lower())
        assert other is None if "none" in right else f"`messagestore {str(other).split(' ROOT')[0]} ROOT" in right, name


# ---- numbers as people write them


@pytest.mark.parametrize(
    ("text", "size"), [("10MiB", 10 << 20), ("10m", 10 << 20), ("1 GiB", 1 << 30), ("64kb", 65536), ("7", 7), ("7b", 7)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert size_of("--rate", text) == size


def test_what_is_no_size_is_refused(tmp_path: Path) -> None:
    assert size_of("--memory", "16", unit=1 << 20) == 16 << 20
    for text in ("much", "-1", "1.5x", "", "1MiB"):
        assert "allowed is a size from 16.0 MiB, such as 64MiB" in error("serve", tmp_path, "--memory", text, code=2)


def test_a_table_has_colour_only_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And never with NO_COLOR."""
    root = filled(tmp_path / "store", 3)
    colour = re.compile(r"\x1b\[(?:\d+;)*3\d")
    assert "\x1b[" not in run("topics", root).stdout
    assert colour.search(on_terminal("topics", root))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3|4|9|10)\d", on_terminal("topics", root))


def test_a_terminal_that_is_too_narrow_shows_rows_as_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is broken; text is folded only if that is enough."""
    columns = [("topic", False), ("messages", True), ("begins", True), ("ends", True)]
    rows = [("a-topic-with-a-name", "1,234,567", "9,876,543,210", "9,877,777,777"), ("b", "1", "0", "1")]
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")

    monkeypatch.setenv("COLUMNS", "56")
    table(columns, rows)
    wide = sys.stdout.getvalue()
    assert [line.split()[-1] for line in wide.splitlines() if "9,877" in line] == ["9,877,777,777"]
    assert len(wide.splitlines()) == 4  # the name of the topic has two lines

    monkeypatch.setenv("COLUMNS", "40")
    table(columns, rows)
    narrow = re.sub(r"\x1b\[\d*m", "", sys.stdout.getvalue().removeprefix(wide))
    assert narrow.splitlines() == [
        "topic     a-topic-with-a-name",
        "messages  1,234,567",
        "begins    9,876,543,210",
        "ends      9,877,777,777",
        "",
        "topic     b",
        "messages  1",
        "begins    0",
        "ends      1",
    ]


def test_a_long_table_has_the_same_columns_without_the_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes nearly a millisecond for a row: the groups of 20,000 queues took 15 s of a processor."""
    columns = [("group", False), ("queue", True), ("lag", True)]
    rows = [(f"g-{number % 3}", number, 10 ** (number % 5)) for number in range(output._LONG + 1)]
    output.table(columns, rows)
    long = capsys.readouterr().out
    monkeypatch.setattr(output, "_LONG", len(rows))
    output.table(columns, rows)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == long.splitlines()


def test_a_long_table_takes_no_more_memory_than_its_texts(capsys: pytest.CaptureFixture[str]) -> None:
    """The groups of a table that names 1.5 million queues took 4 GB, and could end as an OOM kill."""
    rows = [(f"group-{number}", number, "2026-11-28 08:15:25.602Z") for number in range(20 * output._LONG)]
    columns = [("group", False), ("queue", True), ("oldest unread", False)]
    output.table(columns, rows[: output._LONG + 1])  # what is imported is not counted
    tracemalloc.start()
    try:
        output.table(columns, rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    printed = len(capsys.readouterr().out)
    assert peak < 8 * printed + (1 << 20)
