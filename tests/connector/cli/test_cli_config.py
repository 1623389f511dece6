"""`messagestore config`: the settings that live with a store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_runs import error, objects, run
from messagestore import stored_config
from small import filled


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "s", 2)


def rows(root: Path, *words: object) -> dict[str, tuple[object, str]]:
    return {row["name"]: (row["value"], row["from"]) for row in objects(run("config", root, *words, "--json"))}


def test_set_show_and_unset(root: Path) -> None:
    assert rows(root, "set", "filereservedtime=168", "deleteWhen=04;16") == {
        "deleteWhen": ("04;16", "store"),
        "fileReservedTime": (168, "store"),
    }
    assert rows(root)["fileReservedTime"] == (168, "store")
    assert rows(root)["maxIndexNum"][1] == "fixed"
    assert rows(root, "show", "flushDiskType") == {"flushDiskType": ("SYNC_FLUSH", "default")}
    assert "flushDiskType" in rows(root, "--all")
    assert "set in the store" in run("config", root).stdout
    assert "fileReservedTime" not in rows(root, "unset", "fileReservedTime")
    assert stored_config(root).to_mapping() == {"deleteWhen": "04;16"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["set"], "found no setting. Give one, such as fileReservedTime=168"),
        (["set", "fileReservedTime"], "allowed is NAME=VALUE"),
        (["unset", "fileReservedTime=1"], "allowed is the name of a setting"),
        (["set", "fileReservdTime=1"], "Did you mean fileReservedTime?"),
        (["unset", "fileReservdTime"], "Did you mean fileReservedTime?"),
        (["show", "fileReservdTime"], "Did you mean fileReservedTime?"),
        (["set", "fileReservedTime=1", "FileReservedTime=2"], "twice"),
        (["set", "maxIndexNum=7"], "fixed when a store is made"),
        (["set", "fileReservedTime=soon"], "allowed is a whole number"),
    ],
)
def test_a_mistake_has_its_sentence_and_changes_nothing(root: Path, words: list[str], message: str) -> None:
    assert message in error("config", root, *words, code=2)
    assert stored_config(root).to_mapping() == {}


def test_gc_deletes_by_the_hours_of_the_store(tmp_path: Path) -> None:
    """Without stored settings, gc would delete after 72 hours what writers keep for longer."""
    root = filled(tmp_path / "long", 400)
    segments = sorted((root / "commitlog").iterdir())
    assert len(segments) > 1
    hours_ago_s = time.time() - 100 * 3600
    for segment in segments:
        os.utime(segment, (hours_ago_s, hours_ago_s))
    assert objects(run("gc", root, "--json"))[0]["segments"]
    run("config", root, "set", "fileReservedTime=168")
    for command in (["gc", root], ["gc", root, "--delete"]):
        assert not objects(run(*command, "--json"))[0]["segments"]
    assert sorted((root / "commitlog").iterdir()) == segments


def test_beside_a_session_of_another_process_set_waits_and_names_it(root: Path) -> None:
    hold = (
        "import sys; from messagestore import MessageStore\n"
        f"store = MessageStore.open({str(root)!r})\n"
        "print('held', flush=True); sys.stdin.read(); store.close()\n"
    )
    held = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert held.stdout is not None
        assert held.stdout.readline() == "held\n"
        assert f"pid {held.pid}" in error("config", root, "set", "deleteWhen=05", "--wait", "100ms", code=3)
    finally:
        held.communicate("")
    assert stored_config(root).to_mapping() == {}


def test_beside_a_live_broker_nothing_changes(root: Path) -> None:
    hold = (
        "import fcntl, sys\n"
        f"f = open({str(root / 'lock')!r}, 'r+b')\n"
        "fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, 0)\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    broker = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert broker.stdout is not None
        assert broker.stdout.readline() == "held\n"
        text = error("config", root, "set", "deleteWhen=05", "--wait", "100ms", code=3)
        assert f"pid {broker.pid}" in text and "mqadmin updateBrokerConfig" in text
    finally:
        broker.communicate("")
    assert stored_config(root).to_mapping() == {}
