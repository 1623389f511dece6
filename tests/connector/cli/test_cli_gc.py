"""`messagestore gc`: what it says before, that it changes nothing without --delete, and what it says afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from cli_runs import error, lines, objects, run
from messagestore import BatchRequest, Message, MessageStore
from messagestore.files.consumer_offsets import publish_offsets
from small import SMALL, bodies, columns

PROPERTIES = (
    "mappedFileSizeCommitLog=16384\nmappedFileSizeConsumeQueue=320\nmaxHashSlotNum=64\nmaxIndexNum=200\n"
    "maxMessageSize=8192\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five segments, the first two of which were written to four days ago."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(5)), BatchRequest(app_id="app", version=3))
        for number in range(60):
            store.put_message(Message("flights", b"." * 1000, queue_id=0, keys=[f"f{number}"]))
    then = time.time() - 96 * 3600
    for path in sorted((root / "commitlog").iterdir())[:2]:
        os.utime(path, (then, then))
    return root


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and path.name not in ("writer.lock", "lock")
    }


def test_a_look_changes_nothing_and_says_what_goes_and_why_the_rest_stays(root: Path) -> None:
    before = tree(root)
    shown = lines(run("gc", root))
    assert shown[0].startswith("would delete 2 segments of the log, 32,768 bytes, with ")
    assert shown[1:3] == [f"  {root}/commitlog/{start:020d}" for start in (0, 16384)]
    assert shown[-1] == "nothing was changed. To delete, give --delete"
    assert any(line.startswith("the rest stays  because of the next segment: it was written to at ") for line in shown)
    (found,) = objects(run("gc", root, "--json"))
    assert (found["deleted"], len(found["segments"]), found["size"], found["minOffset"]) == (False, 2, 32768, 32768)
    assert tree(root) == before


def test_what_was_shown_is_what_is_deleted(root: Path, tmp_path: Path) -> None:
    config = tmp_path / "store.properties"
    config.write_text(PROPERTIES)
    (seen,) = objects(run("gc", root, "--json"))
    (done,) = objects(run("gc", root, "--delete", "--store-config", config, "--json"))
    assert (done["segments"], done["queueFiles"], done["minOffset"]) == (
        seen["segments"],
        seen["queueFiles"],
        seen["minOffset"],
    )
    assert done["restated"] == [{"app": "app", "version": 3}]
    assert not any(Path(path).exists() for path in seen["segments"])
    (row,) = objects(run("offsets", root, "flights", "--json"))
    assert 60 - row["messages"] == row["minOffset"] == seen["messages"] - 5
    assert "no fault found" in run("verify", root, "--store-config", config).stdout
    assert lines(run("gc", root))[0] == "there is nothing to delete"
    assert lines(run("gc", root, "--delete", "--store-config", config))[0] == "nothing was deleted"


def test_the_hours_of_a_settings_file_count(root: Path, tmp_path: Path) -> None:
    config = tmp_path / "store.properties"
    config.write_text(PROPERTIES + "fileReservedTime=120\n")
    assert lines(run("gc", root, "--store-config", config))[0] == "there is nothing to delete"
    assert lines(run("gc", root, "--store-config", config, "--delete"))[0] == "nothing was deleted"
    assert lines(run("gc", root, "--store-config", config, "--before-offset", 20000, "--delete"))[0].startswith(
        "deleted 1 segment of the log, 16,384 bytes"
    )


def test_a_group_that_has_not_read_is_named_and_can_be_left_out(root: Path) -> None:
    publish_offsets(str(root), "delays", {("flights", 0): 10})
    shown = run("gc", root, "--reserved", 0).stdout
    assert "consumer group delays has not read flights/0 from message 10 on" in shown
    assert "would delete 4 segments" in run("gc", root, "--reserved", 0, "--ignore-group", "delays").stdout
    assert "not read by     delays" in run("gc", root, "--at-once").stdout


def test_mistakes_are_one_line(root: Path, tmp_path: Path) -> None:
    assert "found no message store" in error("gc", tmp_path / "nowhere", code=2)
    assert "--before: found 'yesterday'" in error("gc", root, "--before", "yesterday", code=2)
    assert "--reserved: found '-2'; allowed is a duration" in error("gc", root, "--reserved", "-2", code=2)


@pytest.mark.parametrize("topic", ["\0", "\ud800", "x" * 300, "../commitlog", "..", "/etc", "", "\x1b[2J"])
def test_an_offset_for_a_topic_that_cannot_be_stops_no_retention(root: Path, topic: str) -> None:
    """A broker keeps the offsets that a client commits for any topic. Such a topic has no messages to wait for."""
    table = {"offsetTable": {f"{topic}@g": {"0": 1}}}
    (root / "config" / "consumerOffset.json").write_text(json.dumps(table))
    assert lines(run("gc", root))[0].startswith("would delete 2 segments of the log, 32,768 bytes, with ")
    with MessageStore.open(root, SMALL) as store:
        assert store.delete_expired_files().size == 32768
