"""MESSAGESTORE_ROOT and MESSAGESTORE_OUTPUT: what need not be typed, and that what is typed counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_runs import commands, error, lines, objects, run
from messagestore import Message, MessageStore
from small import SMALL, filled


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with 10 messages in topic t, which the variable names. The working directory is an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    root = filled(tmp_path / "store", 10)
    monkeypatch.setenv("MESSAGESTORE_ROOT", str(root))
    return root


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another store, with one message in topic other."""
    with MessageStore.open(tmp_path / "other", SMALL) as store:
        store.put_message(Message("other", b"1", queue_id=0))
    return tmp_path / "other"


@pytest.mark.parametrize(
    "words",
    [
        ["topics"], ["status"], ["offsets"], ["offsets", "t"], ["get", "t"], ["get", "t", "1"], ["get", "--", "t"],
        ["find", "--key", "k1"], ["tail", "t"], ["tail"], ["config"], ["config", "show"], ["verify"], ["gc"],
    ],
)  # fmt: skip
def test_root_need_not_be_typed(root: Path, words: list[str]) -> None:
    found = run(*words).stdout
    assert found == run(words[0], root, *[word for word in words[1:] if word != "--"]).stdout


def test_commands_with_optional_words_behind_root_understand_what_is_left_out(root: Path) -> None:
    assert lines(run("put", "t", "hello"))[0].startswith("PUT_OK  t/")
    assert lines(run("put", "t", "a/b"))[0].startswith("PUT_OK  t/")
    run("config", "set", "fileReservedTime=168")
    assert "168" in run("config").stdout
    run("topic", "create", "new")
    run("group", "create", "g")
    run("backup", root.parent / "backup")
    run("backup", "take", root.parent / "backup")


def test_what_is_typed_counts(root: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row["topic"] for row in objects(run("topics", other, "--json"))] == ["other"]
    assert len(objects(run("get", other, "other", "--json"))) == 1
    assert len(objects(run("tail", other, "--json"))) == 1
    run("put", other, "other", "2")
    monkeypatch.chdir(other.parent)
    assert [row["topic"] for row in objects(run("topics", "other", "--json"))] == ["other"]
    assert len(objects(run("tail", "./other", "--json"))) == 2


def test_a_word_that_may_be_a_folder_or_a_topic_is_not_guessed(
    root: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before something is deleted."""
    monkeypatch.chdir(other.parent)
    said = error("topic", "delete", "other", "t", "--yes", code=2)
    assert "found a folder of this name here, and MESSAGESTORE_ROOT names the store" in said
    assert "./other" in said
    assert len(objects(run("topics", root, "--json"))) == 1


def test_an_error_about_root_names_the_variable(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESSAGESTORE_ROOT", str(tmp_path / "nothing"))
    for words in (["topics"], ["get", "t"], ["gc"], ["run"], ["verify"]):
        assert "is the value of MESSAGESTORE_ROOT. Correct the variable" in error(*words, code=2)
    assert "MESSAGESTORE_ROOT" not in error("topics", tmp_path / "nowhere", code=2)
    monkeypatch.setenv("MESSAGESTORE_ROOT", "ftp://x/")
    assert "found a URL" in (said := error("topics", code=2)) and "is the value of MESSAGESTORE_ROOT" in said
    monkeypatch.setenv("MESSAGESTORE_ROOT", "-x")
    assert error("topics", code=2).startswith("messagestore: MESSAGESTORE_ROOT: found '-x'; allowed is the path")


def test_an_empty_variable_is_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESSAGESTORE_ROOT", "")
    monkeypatch.setenv("MESSAGESTORE_OUTPUT", "")
    assert "Missing argument 'ROOT'" in run("topics", code=2).stderr
    assert lines(run("topics", root))[0].split()[0] == "topic"


def test_where_a_backup_is_restored_is_always_typed(root: Path, tmp_path: Path) -> None:
    """A variable that names a store in use must not become the place that is written to."""
    run("backup", tmp_path / "backup")
    assert "Missing argument 'ROOT'" in run("restore", tmp_path / "backup", code=2).stderr


def test_the_form_of_the_output(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESSAGESTORE_OUTPUT", "json")
    assert objects(run("topics"))[0]["topic"] == "t"
    assert lines(run("topics", "--table"))[0].split()[0] == "topic"
    monkeypatch.setenv("MESSAGESTORE_OUTPUT", "table")
    assert lines(run("topics"))[0].split()[0] == "topic"
    assert objects(run("topics", "--json"))[0]["topic"] == "t"
    monkeypatch.setenv("MESSAGESTORE_OUTPUT", "yaml")
    assert error("topics", code=2).startswith(
        "messagestore: MESSAGESTORE_OUTPUT: found 'yaml'; allowed are table and json. Correct or unset the variable"
    )
    assert objects(run("topics", "--json"))[0]["topic"] == "t"


def test_a_command_that_listens_goes_on_listening(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`metrics --json` writes all figures and ends; the variable must not turn the server into that."""
    monkeypatch.setenv("MESSAGESTORE_OUTPUT", "json")
    (metrics,) = (command for name, command in commands().items() if name == "metrics")
    context = metrics.make_context("metrics", [])
    assert context.params["as_json"] is False


def test_every_command_about_a_store_takes_the_variable() -> None:
    """`restore` makes a store, `checkpoint` and `backup list` are about other folders, `dashboard` shows several."""
    without = {
        name
        for name, command in commands().items()
        if not hasattr(command, "commands") and not any(param.envvar == "MESSAGESTORE_ROOT" for param in command.params)
    }
    others = {"backup list", "backup prune", "checkpoint show", "checkpoint rewind"}
    assert without == {"demo", "restore", "dashboard", *others}
