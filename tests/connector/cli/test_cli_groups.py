"""`messagestore groups`, `group create` and `group alter`, as a person types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli_runs import error, lines, objects, run
from messagestore.files.config_file import parsed
from messagestore.files.consumer_offsets import publish_offsets
from pyspark_messagestore.cli.main import app
from small import filled

HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold]x[/bold]\u202etxt"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J[bold]x[/bold]\\u202etxt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with 10 messages in topic t, queues 0 and 1."""
    return filled(tmp_path / "store", 10)


def table(root: Path) -> dict[str, dict[str, Any]]:
    return parsed((root / "config" / "subscriptionGroup.json").read_text())["subscriptionGroupTable"]


def write(root: Path, name: str, fields: object) -> Path:
    path = root / "config" / name
    path.write_text(json.dumps(fields))
    return path


def write_filters(root: Path, group: str, topic: str, expression: str, dead: int = 0) -> Path:
    data = {
        "bornTime": 1_000,
        "deadTime": dead,
        "clientVersion": 7,
        "expression": expression,
        "expressionType": "SQL92",
    }
    groups = {"topic": topic, "groupFilterData": {group: data}}
    return write(root, "consumerFilter.json", {"filterDataByTopic": {topic: groups}})


def test_a_group_is_created_and_altered_with_what_was_asked_for(root: Path) -> None:
    made = run("group", "create", root, "boards", "--retry-max-times", 3)
    assert made.stdout == "created group boards: 3 retries, 1 retry queue, consuming enabled\n"
    assert table(root) == {
        "boards": {"consumeEnable": True, "groupName": "boards", "retryMaxTimes": 3, "retryQueueNums": 1}
    }
    text = error("group", "create", root, "boards", code=2)
    assert "the group has settings already. Change them with `messagestore group alter`" in text
    altered = run("group", "alter", root, "boards", "--retry-queues", 4, "--no-consume")
    assert altered.stdout == "altered group boards: 3 retries, 4 retry queues, consuming disabled\n"
    shown = run("group", "alter", root, "boards", "--consume", "--json").stdout
    assert json.loads(shown) == table(root)["boards"]
    assert table(root)["boards"]["consumeEnable"] is True


def test_a_reset_takes_a_time_in_milliseconds_as_other_tools_do(root: Path) -> None:
    """It was taken as an offset, and the group went behind all messages."""
    for place, wanted in (("1700000000000", 0), ("2023-11-14T22:13:20Z", 0), ("99", 5), ("2", 2)):
        resets = objects(run("group", "reset-offset", root, "g", "--topic", "t", "--to", place, "--json"))
        assert [reset["newOffset"] for reset in resets] == [wanted, wanted]


def test_groups_shows_offsets_settings_and_filters(root: Path) -> None:
    """Three tables, of which each is left out that has no row; as JSON, a line says what it is."""
    publish_offsets(str(root), "delays", {("t", 0): 3})
    run("group", "create", root, "boards", "--retry-max-times", 3)
    write_filters(root, "alarms", "t", "delay > 15")
    assert [line.split() for line in lines(run("groups", root))] == [
        ["group", "topic", "queue", "committed", "max", "lag"],
        ["delays", "t", "0", "3", "5", "2"],
        ["delays", "t", "1", "-", "5", "5"],
        [],
        ["group", "consume", "retries", "retry", "queues"],
        ["boards", "yes", "3", "1"],
        [],
        ["group", "topic", "type", "filter", "since", "alive"],
        ["alarms", "t", "SQL92", "delay", ">", "15", "1970-01-01", "00:00:01.000Z", "yes"],
    ]
    rows = objects(run("groups", root, "--json"))
    assert [row["group"] for row in rows] == ["delays", "delays", "boards", "alarms"]
    assert rows[2] == {"group": "boards", "settings": table(root)["boards"]}
    times = {"bornTime": 1000, "deadTime": 0, "clientVersion": 7}
    assert rows[3] == {
        "group": "alarms",
        "topic": "t",
        "filter": {"expression": "delay > 15", "expressionType": "SQL92", **times},
    }
    (root / "config" / "consumerOffset.json").unlink()
    write_filters(root, "alarms", "t", "delay > 15", dead=2_000)
    shown = run("groups", root).stdout
    assert shown.startswith("group ") and "until 1970-01-01 00:00:02.000Z" in shown
    (root / "config" / "consumerFilter.json").unlink()
    assert lines(run("groups", root))[0].split() == ["group", "consume", "retries", "retry", "queues"]


@pytest.mark.parametrize("name", ["consumerOffset.json", "subscriptionGroup.json", "consumerFilter.json"])
def test_one_damaged_file_is_named_and_the_others_are_shown(root: Path, name: str) -> None:
    publish_offsets(str(root), "delays", {("t", 0): 3})
    run("group", "create", root, "boards")
    write_filters(root, "alarms", "t", "delay > 15")
    (root / "config" / name).write_text("{")
    result = run("groups", root, code=1)
    assert f"{name}: offset 0: expected the broker's table" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    shown = {"consumerOffset.json": "delays", "subscriptionGroup.json": "boards", "consumerFilter.json": "alarms"}
    for other, group in shown.items():
        assert (group in result.stdout) == (other != name)
    assert (root / "config" / name).read_text() == "{"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["alter", "ROOT", "nope", "--retry-queues", "2"], 2, "groups that have: 'boards'. Create it first"),
        (["alter", "ROOT", "boards"], 2, "found nothing to change. Give --retry-max-times"),
        (["alter", "ROOT", "boards", "--retry-queues", "70000"], 2, "allowed is 0 to 65536"),
        (["alter", "NOWHERE", "boards", "--consume"], 2, "found no message store"),
        (["create", "NOWHERE", "boards"], 2, "found no message store"),
        (["create", "ROOT", "CID_RMQ_SYS_x"], 2, "belong to the broker"),
        (["create", "ROOT", HOSTILE], 2, "\\x1b]0;owned"),
        (["alter", "ROOT", HOSTILE, "--consume"], 2, "\\x1b]0;owned"),
    ],
)
def test_a_user_error_is_one_line_and_changes_nothing(root: Path, arguments: list[str], code: int, words: str) -> None:
    run("group", "create", root, "boards")
    before = (root / "config" / "subscriptionGroup.json").read_bytes()
    given = [{"ROOT": str(root), "NOWHERE": str(root / "nowhere")}.get(word, word) for word in arguments]
    assert words in error("group", *given, code=code)
    assert (root / "config" / "subscriptionGroup.json").read_bytes() == before
    assert not (root / "nowhere").exists()


def test_a_damaged_file_is_not_overwritten(root: Path) -> None:
    """Also where a broker left a copy beside it, which is read."""
    path = write(root, "subscriptionGroup.json", {"subscriptionGroupTable": {"boards": 7}})
    before = path.read_bytes()
    for _ in range(2):
        for command in (["create", root, "others"], ["alter", root, "boards", "--consume"]):
            text = error("group", *command, code=1)
            assert "subscriptionGroup.json: offset 0: expected the broker's table of consumer groups" in text
            assert "Restore it from a copy" in text
            assert path.read_bytes() == before
        write(root, "subscriptionGroup.json.bak", {"subscriptionGroupTable": {"boards": {}}})


def test_beside_a_live_broker_nothing_changes(root: Path) -> None:
    """It keeps its groups in memory and writes the file over: the error names it, and the command that helps."""
    run("group", "create", root, "boards")
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
        before = (root / "config" / "subscriptionGroup.json").read_bytes()
        for verb, group in (("create", "gates"), ("alter", "boards")):
            text = error("group", verb, root, group, "--retry-queues", 3, "--no-consume", "--wait", "100ms", code=3)
            assert f"pid {broker.pid}" in text
            assert (
                "Nothing was changed. While the broker runs, change its groups through it: "
                f"`mqadmin updateSubGroup -b HOST:PORT -g {group} -q 3 -s false`"
            ) in text
        assert (root / "config" / "subscriptionGroup.json").read_bytes() == before
        assert "boards" in run("groups", root).stdout, "looking goes on"
    finally:
        broker.communicate("")


def test_what_is_shown_does_not_act_on_the_terminal(root: Path) -> None:
    """Names and filters come from a file that anybody may have written."""
    write(root, "subscriptionGroup.json", {"subscriptionGroupTable": {HOSTILE: {"groupName": HOSTILE}}})
    write_filters(root, "g" + HOSTILE, "t" + HOSTILE, HOSTILE)
    shown = run("groups", root).stdout
    assert shown.count(SHOWN) == 4
    assert all(c.isprintable() or c == "\n" for c in shown)
    altered = run("group", "alter", root, HOSTILE, "--consume").stdout
    assert altered == f"altered group {SHOWN}: 16 retries, 1 retry queue, consuming enabled\n"
    assert HOSTILE not in run("groups", root, "--json").stdout


@pytest.mark.parametrize("topic", ["\0", "\ud800", "x" * 300, "../commitlog", "..", "/etc", "\x1b[2J]"])
def test_an_offset_for_a_topic_that_cannot_be_hides_no_other(root: Path, topic: str) -> None:
    """A broker keeps the offsets that a client commits for any topic: the others are shown all the same."""
    write(root, "consumerOffset.json", {"offsetTable": {f"{topic}@g": {"0": 1}, "t@h": {"0": 2, "1": 5}}})
    for command in (["groups", root], ["lag", root, "--group", "g"]):
        result = CliRunner().invoke(app, [str(word) for word in command])
        assert isinstance(result.exception, SystemExit) or result.exception is None, result.exception
        assert all(c.isprintable() or c == "\n" for c in result.output)
    rows = objects(run("groups", root, "--json", code=0 if topic.startswith("\x1b") else 1))
    assert [row["lag"] for row in rows if row["group"] == "h"] == [3, 0]
