"""The command line, as a person and as a script meet it: what is printed, where, and with which exit code."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_runs import TIMEOUT_S, commands, error, finish, lines, objects, on_terminal, read_lines, run, start
from messagestore import BatchRequest, Message, MessageStore, StoreFullError
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.disk import Disk
from messagestore.files.state import StateFile
from messagestore.files.writer_lock import probe_writer
from messagestore.format.layout import STATE_POISONED, STATE_RECOVERING
from messagestore.inspect import standing
from messagestore.log.condition import CONDITIONS, Left
from messagestore.spi import LOCAL_STORES
from pyspark_messagestore.cli import output as cli_output
from pyspark_messagestore.cli.commands.status import status_lines
from pyspark_messagestore.cli.cursor import Cursor
from pyspark_messagestore.monitoring.health import facts_of, findings_of, status_report
from small import SMALL, SMALL_ASYNC, bodies, columns, filled

TESTS = Path(__file__).resolve().parents[2]
CONFIG = "mappedFileSizeCommitLog=16384\nmappedFileSizeConsumeQueue=320\nmaxHashSlotNum=64\nmaxIndexNum=200\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "store.properties"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with 10 messages in topic t, queues 0 and 1."""
    return filled(tmp_path / "store", 10)


@pytest.fixture
def follower(root: Path) -> Iterator[subprocess.Popen[str]]:
    process = start("tail", root, "--follow", "--json")
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


# ---- help and errors


def test_help_names_every_command() -> None:
    """A person in a hurry sees what there is."""
    text = run("--help").stdout
    for command in (
        "status",
        "topics",
        "offsets",
        "dump",
        "verify",
        "recover",
        "put",
        "get",
        "tail",
        "find",
        "lag",
        "metrics",
        "dashboard",
        "serve",
    ):
        assert f" {command} " in text
        assert "ROOT" in run(command, "--help").stdout
    for command in ("topic", "batches", "checkpoint", "doctor", "demo"):
        assert f" {command} " in text
    assert re.fullmatch(
        r"messagestore 0\.\S+, commit [^,]+, kernel (compiled|not compiled \(.+\))\n", run("--version").stdout
    )


def test_help_is_whole_sentences() -> None:
    """`put --help` said "waits for the disk.; it is what you get": an edit had cut a sentence, and no one looked."""
    for name, command in commands().items():
        texts = [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
        assert all(texts), f"{name}: an argument or option without help"
        for text in texts:
            assert text.endswith("."), f"{name}: {text}"
            assert not re.search(r"[.,;:][.,;:]|\s[.,;:]|\s\s", text), f"{name}: {text}"
            assert text[0].isupper() or text.startswith("earliest "), f"{name}: {text}"


def test_every_command_takes_json() -> None:
    """Scripts read objects, whatever they ask."""
    verbs = {name: command for name, command in commands().items() if not hasattr(command, "commands")}
    without = {name for name, verb in verbs.items() if "as_json" not in {each.name for each in verb.params}}
    assert len(verbs) > 25
    assert without == set()


@pytest.mark.parametrize("command", [["status"], ["dump"], ["verify"], ["recover"], ["get", "t"], ["tail"]])
def test_a_missing_store_is_one_line(tmp_path: Path, command: list[str]) -> None:
    """A mistyped path: no store, no traceback, and nothing is made there."""
    missing = tmp_path / "nowhere"
    text = error(command[0], missing, *command[1:], code=2)
    assert f"{missing}: found no message store" in text
    assert not missing.exists()


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "topics",
        "topic create",
        "topic alter",
        "offsets",
        "put",
        "get",
        "tail",
        "find",
        "dump",
        "verify",
        "recover",
        "lag",
        "groups",
        "group create",
        "group alter",
        "metrics",
        "batches list",
        "batches start",
        "checkpoint show",
        "checkpoint rewind",
        "doctor",
    ],
)
def test_a_path_at_or_below_a_file_is_one_line(tmp_path: Path, command: str) -> None:
    """The sentence names the file that is in the way."""
    (tmp_path / "file").write_text("x")
    more = {
        "topic create": ["t"],
        "topic alter": ["t", "--queues", 1],
        "group create": ["g"],
        "group alter": ["g", "--consume"],
        "put": ["t", "x"],
        "get": ["t"],
        "find": ["--key", "k"],
        "lag": ["--group", "g"],
        "batches start": ["a", 1],
        "checkpoint rewind": [1],
    }.get(command, [])
    for root in (tmp_path / "file", tmp_path / "file" / "below" / "it", (tmp_path / "file").as_uri()):
        text = error(*command.split(), root, *more, code=2)
        assert f"found a file at {tmp_path / 'file'}; allowed is the path of a folder" in text


def test_a_url_is_a_folder_of_this_machine(root: Path) -> None:
    """file: is taken, anything else refused."""
    assert len(lines(run("get", root.as_uri(), "t"))) == 10
    assert "found a URL of another kind; allowed are the path" in error("get", "s3://bucket/store", "t", code=2)
    assert "allowed is the path of a folder on this machine" in error("put", "dbfs:/store", "t", "x", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["get", "ROOT", "other"], "topic 'other' is not in the store. Its topics are: t"),
        (["get", "ROOT", "t", "9"], "has no queue 9. Its queues are 0, 1, 2, 3, 4, 5, 6, 7"),
        (["get", "ROOT", "t", "--offset", "soon"], "allowed is a number, earliest or latest"),
        (["tail", "ROOT", "other"], "topic 'other' is not in the store"),
        (["dump", "ROOT", "--from", "5"], "no whole record at 5"),
        (["put", "ROOT", "a topic", "x"], "found 'a topic'"),
        (["put", "ROOT", "t"], "give exactly one of BODY, --file FILE and --lines"),
        (["put", "ROOT", "t", "x", "--lines"], "give exactly one of BODY, --file FILE and --lines"),
        (["put", "ROOT", "t", "--lines", "--count", "3"], "--count repeats a single message"),
        (["put", "ROOT", "t", "x", "--property", "a"], "allowed is NAME=VALUE"),
        (["put", "ROOT", "t", "x", "--property", "TAGS=b"], "TAGS"),
        (["put", "ROOT", "t", "x", "--key", "a b"], "a b"),
        (["put", "ROOT", "t", "x", "--queue", "99"], "allowed is 0 to 7"),
        (["put", "ROOT", "t", "--file", "ROOT/none"], "No such file"),
        (["put", "ROOT", "t", "x", "--wait", "soon"], "lockTimeout"),
        (["put", "ROOT", "t", "x", "--store-config", "ROOT/lock"], "line 1: found a key that is n"),
    ],
)
def test_a_user_error_is_one_line(root: Path, arguments: list[str], words: str) -> None:
    """Each says what was found and what is allowed."""
    (root / "lock").write_text("someKey=1")
    assert words in error(*(argument.replace("ROOT", str(root)) for argument in arguments), code=2)


def test_topics_of_the_store_itself_are_not_suggested(root: Path) -> None:
    """The journal's topic, and RocketMQ's own, are no slip of the keyboard away."""
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns([b"row"]), BatchRequest(app_id="a", version=0))
        store.half_message(Message("t", b"half", queue_id=0), "p")
        assert len(store.topics()) > 1
    assert error("get", root, "flight", code=2).endswith("Its topics are: t\n")
    assert error("find", root, "--key", "k", "--topic", "flight", code=2).endswith("Its topics are: t\n")


def test_wrong_usage_is_2(root: Path) -> None:
    """Options that are not there, and values out of range."""
    for arguments in (["get", root], ["put", root, "t", "x", "--cout", "3"], ["put", root, "t", "x", "--count", "0"]):
        assert "Usage: " in run(*arguments, code=2).stderr
    assert "yesterday" in run("tail", root, "--from", "yesterday", code=2).stderr


def test_a_root_may_be_a_file_url(tmp_path: Path) -> None:
    """As Spark gives paths; another scheme is an error."""
    run("put", f"file://{tmp_path}/a%20store", "t", "x")
    assert "1 in 1 topic" in run("status", tmp_path / "a store").stdout
    assert "found a URL of another kind; allowed are the path" in error("status", "s3://bucket/store", code=2)


def test_a_folder_with_something_else_stays_as_it_is(tmp_path: Path) -> None:
    """`put` makes a store in an empty folder only."""
    (tmp_path / "letter.txt").write_text("x")
    assert "a new store needs a missing or empty folder" in error("put", tmp_path, "t", "x", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_one_line(tmp_path: Path) -> None:
    """The system's error, with the path."""
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "Permission denied" in error("put", tmp_path / "locked" / "store", "t", "x", code=2)


# ---- put and get


def test_what_is_put_is_got(tmp_path: Path, config: Path) -> None:
    """Keys, tag and properties; the store is made with the sizes of the file."""
    root = tmp_path / "store"
    result = run(
        "put", root, "flights", "hello", "--queue", 3, "--key", "N1", "--key", "N2", "--tags", "UA",
        "--property", "from=EWR", "--property", "note=a=b", "--store-config", config,
    )  # fmt: skip
    assert lines(result)[0].startswith("PUT_OK  flights/3 @0  at 0, ")
    assert f"created a new store in {root}" in result.stderr
    assert json.loads((root / "spark" / "store.json").read_text())["mappedFileSizeCommitLog"] == 16384
    (line,) = lines(run("get", root, "flights", 3))
    assert line.startswith("flights/3 @0  2")
    assert line.endswith("Z  tags=UA  keys=N1,N2  {from=EWR, note=a=b}  |  hello")
    (found,) = objects(run("get", root, "flights", "--json"))
    assert found["body"] == "hello"
    assert found["keys"] == ["N1", "N2"]
    assert found["tags"] == "UA"
    assert found["properties"] == {"from": "EWR", "note": "a=b"}
    assert (found["topic"], found["queueId"], found["queueOffset"], found["physicalOffset"]) == ("flights", 3, 0, 0)
    assert run("verify", root).stdout.endswith("no fault found\n")


def test_a_put_to_a_topic_of_a_broker_makes_nothing(tmp_path: Path) -> None:
    """No store is made for a message that is refused."""
    said = error("put", tmp_path / "store", "rmq_sys_wheel_timer", "x", code=2)
    assert "reserved for RocketMQ's broker" in said
    assert not (tmp_path / "store").exists()


def test_lines_of_standard_input_are_messages(root: Path) -> None:
    """Each line one, empty ones too; the last needs no end."""
    result = run("put", root, "t", "--lines", "--queue", 0, "--json", given=b"one\n\n\xff\xfe\nlast")
    assert [put["queueOffset"] for put in objects(result)] == [5, 6, 7, 8]
    found = objects(run("get", root, "t", 0, "--offset", 5, "--json"))
    assert [message["body"] for message in found] == ["one", "", None, "last"]
    assert base64.b64decode(found[2]["bodyBase64"]) == b"\xff\xfe"


def test_a_file_is_a_body(root: Path, tmp_path: Path) -> None:
    """Byte by byte, from a file and from standard input."""
    data = bytes(range(256))
    (tmp_path / "body").write_bytes(data)
    run("put", root, "t", "--file", tmp_path / "body", "--queue", 0)
    run("put", root, "t", "--file", "-", "--queue", 0, given=data)
    found = objects(run("get", root, "t", 0, "--offset", 5, "--json"))
    assert [base64.b64decode(message["bodyBase64"]) for message in found] == [data, data]
    assert lines(run("get", root, "t", 0, "--offset", 5))[0].endswith("|  0x" + data.hex())


def test_count_repeats_a_message(root: Path) -> None:
    """For trials; ASYNC_FLUSH too."""
    results = objects(run("put", root, "t", "again", "--count", 20, "--flush", "ASYNC_FLUSH", "--queue", 1, "--json"))
    assert [put["queueOffset"] for put in results] == list(range(5, 25))
    assert {put["status"] for put in results} == {"PUT_OK"}
    run("put", root, "t", "x", "--flush", "LATER", code=2)


def test_get_shows_each_queue(root: Path) -> None:
    """All queues without one, from an offset, the first ones and the last ones."""

    def offsets(*arguments: object) -> list[tuple[int, int]]:
        return [(m["queueId"], m["queueOffset"]) for m in objects(run("get", root, "t", *arguments, "--json"))]

    assert offsets() == [(q, i) for q in (0, 1) for i in range(5)]
    assert offsets(1) == [(1, i) for i in range(5)]
    assert offsets("--count", 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert offsets("--count", 2, "--offset", "latest") == [(0, 3), (0, 4), (1, 3), (1, 4)]
    assert offsets(0, "--offset", 4) == [(0, 4)]
    assert offsets(0, "--offset", "earliest", "--count", 1) == [(0, 0)]


def test_more_than_a_page_is_got(root: Path) -> None:
    """Pages of the store do not show."""
    run("put", root, "t", "x", "--queue", 0, "--count", 100)
    assert len(lines(run("get", root, "t", 0, "--count", 90))) == 90
    assert len(lines(run("get", root, "t", 0))) == 32


def test_nothing_there_is_1(root: Path) -> None:
    """The line says what there is."""
    result = run("get", root, "t", 0, "--offset", 5, code=1)
    assert result.stderr == "t/0: no message at 5. The queue holds 0 to 4\n"
    assert "no record found" in run("dump", root, "--topic", "other", code=1).stderr


def test_bytes_of_messages_are_not_trusted(tmp_path: Path) -> None:
    """Escape sequences, line ends, bidirectional controls, rich's markup: all shown, none of it acted upon."""
    root = tmp_path / "store"
    nasty = "\x1b]0;owned\x07\x1b[31m red\r\n\u202etxt.exe\u2028 [bold]x[/bold] :smile: \x7f\u0085 ä\U0001f600"
    shown = r"\x1b]0;owned\x07\x1b[31m red\r\n\u202etxt.exe\u2028 [bold]x[/bold] :smile: \x7f\x85 ä" + "\U0001f600"
    with MessageStore.open(root, SMALL) as store:
        message = Message(
            "t", nasty.encode(), queue_id=0, keys=["k\x1b[1m"], tags="t\x1bag", properties={"n\x07": "v\r"}
        )
        store.put_message(message)
    for command in (["get", root, "t"], ["dump", root], ["tail", root]):
        (line,) = lines(run(*command))
        assert line.endswith(f"tags=t\\x1bag  keys=k\\x1b[1m  {{n\\x07=v\\r}}  |  {shown}")
        (line,) = lines(run(*command, "--json"))
        assert line.isascii()
        assert line.isprintable()
        assert json.loads(line)["body"] == nasty


def test_error_lines_are_escaped(root: Path) -> None:
    """An argument comes back in the message, not on the terminal."""
    assert r"\x1b" in error("get", root, "\x1b[31m", code=2)
    assert "\x1b" not in error("put", root, "\x1b[31m", "x", code=2)


def test_a_long_body_is_cut_on_a_terminal(tmp_path: Path) -> None:
    """Whole into a pipe; on a terminal the first part, with its size."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        for body in (b"x" * 3000, "ä".encode() * 1500, b"\xff" * 3000):
            store.put_message(Message("t", body, queue_id=0))
    assert lines(run("get", root, "t"))[0].endswith("|  " + "x" * 3000)
    shown = on_terminal("get", root, "t")
    assert "x" * 500 + "... (3000 bytes; --json shows all)" in shown
    assert "ä" * 500 + "... (3000 bytes; --json shows all)" in shown
    assert "0x" + "ff" * 249 + "... (3000 bytes; --json shows all)" in shown


# ---- dump


def test_dump_shows_the_log_in_order(root: Path) -> None:
    """Physical offsets go up; from one of them on, of one topic, so many."""
    run("put", root, "other", "x")
    found = objects(run("dump", root, "--json"))
    places = [message["physicalOffset"] for message in found]
    assert places == sorted(places)
    assert [m["topic"] for m in found] == ["t"] * 10 + ["other"]
    assert [m["physicalOffset"] for m in objects(run("dump", root, "--from", places[4], "--json"))] == places[4:]
    assert len(lines(run("dump", root, "--topic", "other"))) == 1
    assert len(lines(run("dump", root, "--count", 3))) == 3
    assert lines(run("dump", root))[3].split()[:4] == [str(places[3]), str(found[3]["size"]), "B", "t/1"]


def test_dump_goes_over_segments(tmp_path: Path) -> None:
    """Also when it begins at the BLANK record of one."""
    root = filled(tmp_path / "store", 300)
    found = objects(run("dump", root, "--json"))
    assert len(found) == 300
    before = max(i for i, m in enumerate(found) if m["physicalOffset"] < 16384)
    blank = found[before]["physicalOffset"] + found[before]["size"]
    assert objects(run("dump", root, "--from", blank, "--json")) == found[before + 1 :]


def test_dump_shows_heads(root: Path) -> None:
    """88 bytes of hex for a record with IPv4 hosts, as on the disk."""
    disk = (root / "commitlog" / ("0" * 20)).read_bytes()
    first, *hex_lines = lines(run("dump", root, "--raw", "--count", 1))
    assert first.split()[0] == "0"
    assert bytes.fromhex("".join("".join(line.split()[1:]) for line in hex_lines)) == disk[:88]
    assert objects(run("dump", root, "--raw", "--count", 1, "--json"))[0]["head"] == disk[:88].hex()


def test_dump_stops_at_damage(root: Path) -> None:
    """What comes before is shown, the place is named, and the exit code says that a fault was found."""
    place = objects(run("dump", root, "--json"))[5]["physicalOffset"]
    flip(root / "commitlog" / ("0" * 20), place + 90)
    result = run("dump", root, code=1)
    assert len(lines(result)) == 5
    assert f"offset {place}: expected BODYCRC" in result.stderr


def deleted_at_the_first_line(monkeypatch: pytest.MonkeyPatch, segments: list[Path]) -> None:
    """Segments go, as retention takes them, as soon as a command has shown its first line."""
    show = cli_output.line

    def shown(text: str) -> None:
        show(text)
        for segment in segments:
            segment.unlink(missing_ok=True)

    monkeypatch.setattr(cli_output, "line", shown)


def test_dump_says_what_retention_took_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on at the first segment that is left, as the other commands that read do."""
    root = filled(tmp_path / "store", 300)
    places = [message["physicalOffset"] for message in objects(run("dump", root, "--json"))]
    deleted_at_the_first_line(monkeypatch, sorted((root / "commitlog").iterdir())[:2])
    result = run("dump", root)
    shown = [int(text.split()[0]) for text in lines(result)]
    assert shown == [place for place in places if place < 16384 or place >= 32768]
    before = max(place for place in places if place < 16384)
    gone = 32768 - (before + int(lines(result)[shown.index(before)].split()[1]))
    assert (
        f"{gone} bytes of the log from {32768 - gone} on are gone, because retention has deleted their segments"
        in result.stderr
    )
    assert "Continuing at 32768" in result.stderr


def test_dump_names_a_segment_that_is_gone_from_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention takes the first ones: this is damage."""
    root = filled(tmp_path / "store", 300)
    segment = sorted((root / "commitlog").iterdir())[1]
    deleted_at_the_first_line(monkeypatch, [segment])
    result = run("dump", root, code=1)
    assert f"{segment}" in result.stderr
    assert "expected this file" in result.stderr


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


# ---- status


def test_status_of_a_closed_store(root: Path) -> None:
    """Everything a person asks first."""
    text = run("status", root).stdout
    for words in (
        f"store     {root}",
        "held by   nobody",
        "left      closed cleanly",
        "1 segment of 16.0 KiB",
        "messages  10 in 1 topic",
        "t            10  0: 0-5  1: 0-5",
    ):
        assert words in text
    (found,) = objects(run("status", root, "--json"))
    assert found["storeId"] == json.loads((root / "spark" / "store.json").read_text())["storeId"]
    assert found["heldBy"] == {
        "broker": None, "brokerPid": None, "brokerWaits": False, "writer": None, "server": None, "attached": False
    }  # fmt: skip
    assert found["abort"] == {"present": False, "ours": False, "content": None}
    assert found["state"]["visibleEnd"] == found["state"]["cleanEnd"] == found["commitLog"]["maxOffset"]
    assert found["state"]["clean"] is True
    assert found["messages"] == 10
    assert found["topics"][0]["queues"] == {
        "0": {"minOffset": 0, "maxOffset": 5},
        "1": {"minOffset": 0, "maxOffset": 5},
    }
    assert 0 < found["commitLog"]["bytesOnDisk"] <= 16384


def test_status_names_the_writer(root: Path) -> None:
    """While a session holds the store: its pid, and `abort`."""
    with MessageStore.open(root) as store:
        store.append_batch(columns(bodies(4)), BatchRequest(app_id="app-7", version=3))
        (found,) = objects(run("status", root, "--json"))
        assert f"pid {os.getpid()} on " in found["heldBy"]["writer"]
        assert found["heldBy"]["attached"] is True
        assert found["abort"]["ours"] is True
        assert (found["batches"], found["lastBatch"]["app"], found["lastBatch"]["version"]) == (1, "app-7", 3)
        assert found["messages"] == 14
        text = run("status", root).stdout
        assert "held by   a writer, pid " in text
        assert "left      open" in text
        assert "batches   1, the last: app-7 version 3, 4 rows" in text


def committing(root: Path, count: int, then: str) -> subprocess.Popen[str]:
    """A process that commits batches as Spark's commit worker does; `then` is what it does afterwards."""
    code = (
        "import os, sys, time\n"
        "from crash.harness import encoded\n"
        "from messagestore import BatchRequest\n"
        "from messagestore.session import attached_store\n"
        "from messagestore.batches.append import append_batch\n"
        "from messagestore.batches.append import Chunks\n"
        "from small import SMALL\n"
        f"for version in range({count}):\n"
        "    with attached_store(sys.argv[1], SMALL).writing('a batch') as writer:\n"
        "        chunk = encoded('app', version, 5, SMALL, writer.files.store_host)\n"
        "        append_batch(writer, Chunks([chunk]), BatchRequest(app_id='app', version=version))\n"
        f"print('done', flush=True)\n{then}"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True, env=environment)


def test_status_after_a_spark_job_does_not_say_killed(root: Path) -> None:
    """Spark's worker ends without detaching. Nothing was in flight, so the store is idle, and the operator hears what to
    do before a broker starts."""
    finish(committing(root, 2, "os._exit(0)"))
    (found,) = objects(run("status", root, "--json"))
    assert (found["left"], found["heldBy"]["attached"], found["abort"]["ours"]) == ("idle", False, True)
    text = run("status", root).stdout
    assert "left      idle, nothing in flight: " in text
    assert "run `messagestore recover` before you start a broker" in text
    assert "killed" not in text
    assert "no fault found" in run("verify", root).stdout
    assert "found        not closed, nothing in flight" in run("recover", root).stdout
    assert objects(run("status", root, "--json"))[0]["left"] == "closed"


def test_status_beside_an_idle_query_says_so(root: Path) -> None:
    """Between two micro-batches the commit worker stays attached; when it is killed there, nothing was in flight."""
    process = committing(root, 1, "time.sleep(600)")
    try:
        read_lines(process, 1)
        (found,) = objects(run("status", root, "--json"))
        assert (found["left"], found["heldBy"]["attached"], found["heldBy"]["writer"]) == ("attached", True, None)
        assert "left      open, idle: nothing is in flight" in run("status", root).stdout
    finally:
        process.kill()
        process.communicate()
    assert objects(run("status", root, "--json"))[0]["left"] == "idle"


def change_state(root: Path, **changes: int) -> None:
    file = StateFile(Disk(), str(root / "spark" / "state"))
    state = file.read()
    assert state is not None
    file.write(replace(state, counter=state.counter + 1, **changes))


def test_status_never_takes_a_writer_at_work_for_a_dead_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that ends after `state` was read has let go of the lock when that is looked at: neither is wrong alone."""
    finish(committing(root, 1, "os._exit(0)"))
    change_state(root, in_flight=1000)
    ends = iter([lambda: change_state(root, in_flight=-1)])

    def probe(path: str) -> str | None:
        next(ends, lambda: None)()
        return probe_writer(path)

    monkeypatch.setattr(standing, "probe_writer", probe)
    assert objects(run("status", root, "--json"))[0]["left"] == "idle"
    assert next(ends, None) is None, "the commit has ended meanwhile"


def test_status_of_a_store_whose_writer_never_rests(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes `state` between any two looks. To look again and again would take seconds, and find the same."""
    looks = 0

    def probe(path: str) -> str | None:
        nonlocal looks
        looks += 1
        change_state(root, in_flight=1000 + looks)
        return probe_writer(path)

    monkeypatch.setattr(standing, "probe_writer", probe)
    at_work = (
        "with attached_store(sys.argv[1], SMALL).writing('more'):\n    print('more', flush=True)\n    time.sleep(600)"
    )
    process = committing(root, 1, at_work)
    try:
        read_lines(process, 2)
        assert objects(run("status", root, "--json"))[0]["left"] == "open"
    finally:
        process.kill()
        process.communicate()
    assert looks == 4, "for a writer and for a server, by the report and by the rules"


@pytest.mark.parametrize(
    ("change", "left", "words"),
    [
        ({"in_flight": 1000}, "killed", "by a writer that was killed in the middle of a write"),
        ({"flags": STATE_POISONED}, "poisoned", "check the disk"),
        ({"flags": STATE_RECOVERING, "in_flight": 0}, "recovering", "by a recovery that was killed"),
        ({"boot_hash": 1}, "restarted", "open when the machine stopped"),
    ],
)
def test_status_says_what_was_under_way(root: Path, change: dict[str, int], left: str, words: str) -> None:
    """Each thing that a dead writer may have been in the middle of, and what to do."""
    finish(committing(root, 1, "os._exit(0)"))
    change_state(root, **change)
    assert objects(run("status", root, "--json"))[0]["left"] == left
    assert words in run("status", root).stdout
    assert "recover" in run("status", root).stdout


def test_a_state_that_cannot_be_read_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` and the rules of health called it an unknown process. The file is damaged while `status` looks."""
    finish(committing(root, 1, "os._exit(0)"))
    first = standing.look

    def look(*arguments: Any) -> Any:
        left = Left.UNREADABLE
        return first(*arguments)._replace(state=None, left=left, condition=CONDITIONS[left])

    monkeypatch.setattr(standing, "look", look)
    with contextlib.closing(LOCAL_STORES.reader(str(root))) as store:
        facts = facts_of(store)
        report = status_report(store.view("status"), facts)
    assert report["left"] == "unreadable"
    status_lines(report)
    assert "`spark/state` cannot be read" in capsys.readouterr().out
    (sentence,) = (finding.sentence for finding in findings_of(facts) if finding.rule == "not-recovered")
    assert "`spark/state`, which says how far its writer came, cannot be read" in sentence


def test_status_of_a_broker_store(root: Path) -> None:
    """No `spark`, a lock as a broker holds it, its pid in the line; nothing needs a configuration."""
    shutil.rmtree(root / "spark")
    (root / "abort").write_text("4711")
    with open(root / "lock", "r+b") as lock:
        ready, done = os.pipe(), os.pipe()
        broker = os.fork()  # POSIX locks belong to a process: ours would not be in our own way
        if broker == 0:
            fcntl.lockf(lock, fcntl.LOCK_EX, 1)
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        try:
            (found,) = objects(run("status", root, "--json"))
            assert found["heldBy"]["brokerPid"] == broker
            assert f"a RocketMQ broker, pid {broker}" in run("status", root).stdout
            assert len(lines(run("get", root, "t"))) == 10
            assert len(lines(run("dump", root))) == 10
            assert len(lines(run("tail", root))) == 10
            assert not (root / "spark").exists()
            assert f"pid {broker}" in error("put", root, "t", "x", code=3)
            assert f"pid {broker}" in error("recover", root, code=3)
        finally:
            os.write(done[1], b"x")
            os.waitpid(broker, 0)
            for fd in (*ready, *done):
                os.close(fd)
    text = run("status", root).stdout
    assert "by a broker that was killed" in text
    assert "none: this project has never written to it" in text


def test_status_shows_what_it_can(root: Path) -> None:
    """One damaged queue: the rest is shown, the fault named, exit code 1."""
    os.truncate(root / "consumequeue" / "t" / "1" / ("0" * 20), 33)
    result = run("status", root, code=1)
    assert "messages  5 in 1 topic" in result.stdout
    assert "expected a file of 320 bytes, found 33 bytes" in result.stderr


# ---- verify


def test_verify_of_a_whole_store(root: Path) -> None:
    """A line of counts, and that there is no fault."""
    assert lines(run("verify", root))[0].endswith("10 records, 10 units, 10 keys, 0 batches")
    (found,) = objects(run("verify", root, "--json"))
    assert (found["ok"], found["record_count"], found["findings"]) == (True, 10, [])


def test_verify_lists_every_fault(root: Path) -> None:
    """File, offset, expected, found; exit code 1."""
    place = objects(run("dump", root, "--json"))[5]["physicalOffset"]
    flip(root / "commitlog" / ("0" * 20), place + 90)
    flip(root / "consumequeue" / "t" / "0" / ("0" * 20), 11)
    result = run("verify", root, code=1)
    assert lines(result)[-1] == "2 faults"
    rows = [line.split("  ") for line in lines(result)]
    assert any(row[0] == "commitlog/" + "0" * 20 and str(place) in row for row in rows)
    (found,) = objects(run("verify", root, "--json", code=1))
    assert [finding["path"] for finding in found["findings"]] == [
        str(root / "commitlog" / ("0" * 20)),
        str(root / "consumequeue" / "t" / "0" / ("0" * 20)),
    ]


def test_verify_of_a_broker_store_takes_a_configuration(root: Path, config: Path) -> None:
    """Index files do not say how large their parts are."""
    shutil.rmtree(root / "spark")
    assert "maxHashSlotNum 5000000" in run("verify", root, code=1).stdout
    assert "no fault found" in run("verify", root, "--store-config", config).stdout


def test_verify_on_a_terminal_shows_how_far_it_is(root: Path) -> None:
    """A bar that goes away; the result stays."""
    shown = on_terminal("verify", root)
    assert "checking" in shown
    assert "no fault found" in shown
    flip(root / "commitlog" / ("0" * 20), 90)
    assert "1 fault\n" in on_terminal("verify", root, code=1)


WAITING = """
import sys, time
from pyspark_messagestore.cli import output as cli_output
cli_output.WAITING_S = 0.2
with cli_output.waiting("at [red]work[/red] \\x1b[2J"):
    time.sleep(float(sys.argv[1]))
cli_output.line("done")
"""


def test_a_terminal_shows_that_long_work_goes_on() -> None:
    """Only after a second (here less), only on a terminal, without markup or escapes of its own, and gone at the end."""
    shown = on_terminal("1.5", program=WAITING)
    assert "at [red]work[/red] \\x1b[2J" in shown
    assert shown.endswith("done\n")
    assert on_terminal("0", program=WAITING) == "done\n"
    done = subprocess.run([sys.executable, "-c", WAITING, "0.5"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


# ---- processes


def test_a_lost_end_of_the_log_is_accepted_by_name_only(tmp_path: Path) -> None:
    root = filled(tmp_path / "s", 250)
    (root / "spark" / "state").unlink()
    max((root / "commitlog").iterdir()).unlink()
    assert "--accept-loss" in error("recover", root, code=1)
    text = run("recover", root, "--accept-loss", code=4).stdout
    assert re.search(r"lost +at least \d+ bytes from \d+ on, with \d+ messages of 2 queues", text)
    assert "found        clean" in run("recover", root).stdout
    assert "no fault found" in run("verify", root).stdout


def test_a_killed_put_is_recovered(tmp_path: Path, config: Path) -> None:
    """SIGKILL amid puts: all that was acknowledged is there after `recover`, whole, and the store is closed."""
    root = tmp_path / "store"
    process = start("put", root, "t", "payload", "--count", 100_000, "--key", "k", "--json", "--store-config", config)
    acknowledged = [json.loads(text) for text in read_lines(process, 200)]
    process.send_signal(signal.SIGKILL)
    rest, _ = finish(process, -signal.SIGKILL)
    acknowledged += [json.loads(text) for text in rest.splitlines(keepends=True) if text.endswith("}\n")]
    assert "by a writer that was killed" in run("status", root).stdout
    assert objects(run("status", root, "--json"))[0]["left"] == "killed"
    assert "was killed" in run("verify", root).stdout
    (report,) = objects(run("recover", root, "--json"))
    assert report["reason"] == "a writer crashed"
    assert report["closed"] is True
    assert not (root / "abort").exists()
    assert report["end"] >= acknowledged[-1]["physicalOffset"] + acknowledged[-1]["size"]
    there = {(m["topic"], m["queueId"], m["queueOffset"]): m for m in objects(run("dump", root, "--json"))}
    for put in acknowledged:
        message = there[(put["topic"], put["queueId"], put["queueOffset"])]
        assert message["physicalOffset"] == put["physicalOffset"]
        assert message["body"] == "payload"
    assert len(objects(run("get", root, "t", "--count", 100_000, "--json"))) == len(there)
    assert "no fault found" in run("verify", root).stdout
    text = run("recover", root).stdout
    assert "found        clean" in text
    assert "a Java broker can take over" in text


def test_the_rest_of_a_line_that_was_read_by_lines_is_not_lost() -> None:
    """The buffer behind `readline` had the beginning of the next line, and the end of it came alone."""
    text = "import sys; sys.stdout.write('first\\n' + 'x' * 100_000 + '\\n'); sys.stdout.flush(); sys.stderr.write('w' * 200_000)"
    process = subprocess.Popen([sys.executable, "-c", text], stdout=-1, stderr=-1, text=True)
    assert read_lines(process, 1) == ["first\n"]
    assert finish(process) == ("x" * 100_000 + "\n", "w" * 200_000)


def test_a_put_that_is_stored_is_no_failure_because_the_disk_is_full(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PUT_OK and exit code 2: `put || retry` stored the message twice. With ASYNC_FLUSH nothing is promised, so it stays 2."""
    close = MessageStore.close

    def full(store: MessageStore) -> None:
        close(store)
        raise StoreFullError("spark/new-journal: no room", path="spark/new-journal", needed=357, free=0)

    monkeypatch.setattr(MessageStore, "close", full)
    result = run("put", root, "t", "late")
    assert result.stdout.startswith("PUT_OK  t/")
    assert "every message that was shown is stored, but the store could not be closed" in result.stderr
    assert "Do not put them again. Make room" in result.stderr
    run("put", root, "t", "later", "--flush", "ASYNC_FLUSH", code=2)
    monkeypatch.undo()
    assert [text.rsplit("|  ")[1] for text in lines(run("tail", root, "t", "--count", 2))] == ["late", "later"]


def test_a_put_that_does_not_fit_says_so_although_the_store_cannot_be_closed_either(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the error of the close was shown: "nothing is lost", of a message that was not stored."""

    def full(*_: object) -> None:
        raise StoreFullError("commitlog: no room for the message", path="commitlog", needed=357, free=0)

    def fails(*_: object) -> None:
        raise StoreFullError("state: nothing is lost", path="state", needed=1, free=0)

    monkeypatch.setattr(MessageStore, "put_message", full)
    monkeypatch.setattr(MessageStore, "close", fails)
    words = error("put", root, "t", "x", code=2)
    assert words.index("no room for the message") < words.index("nothing is lost")


def test_a_put_that_does_not_fit_is_a_failure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StoreFullError("commitlog: no room", path="commitlog", needed=357, free=0)

    monkeypatch.setattr(MessageStore, "put_message", full)
    assert "no room" in error("put", root, "t", "x", code=2)


def test_a_topic_without_messages_is_there(tmp_path: Path) -> None:
    """Kafka's quickstart has this order: create the topic, begin to read it, and then put."""
    root = tmp_path / "store"
    run("topic", "create", root, "new", "--queues", 3)
    result = run("get", root, "new", code=1)
    assert (result.stdout, result.stderr) == ("", "new: the topic has 3 queues and no message yet\n")
    assert run("get", root, "new", 2, code=1).stderr == "new: the topic has 3 queues and no message yet\n"
    assert "has no queue 3. Its queues are 0, 1, 2" in error("get", root, "new", 3, code=2)
    rows = objects(run("offsets", root, "new", "--json", "--at", "0"))
    assert [(row["queueId"], row["minOffset"], row["maxOffset"], row["offset"]) for row in rows] == [
        (queue_id, 0, 0, 0) for queue_id in range(3)
    ]
    assert run("tail", root, "new", code=1).stderr == "no message found\n"
    process = start("tail", root, "new", "--follow", "--from", "earliest", "--count", 1)
    run("put", root, "new", "first", "--queue", 1)
    stdout, stderr = finish(process)
    assert stdout.endswith("first\n")
    assert stderr == ""
    assert "no message at 0. The queue holds none" in run("get", root, "new", 2, code=1).stderr
    assert len(lines(run("get", root, "new"))) == 1
    assert "topic 'other' is not in the store. Its topics are: new" in error("get", root, "other", code=2)


def test_two_writers_take_turns(root: Path) -> None:
    """The second waits as long as it is told, then says who holds the store: exit code 3."""
    first = start("put", root, "t", "--lines", stdin=subprocess.PIPE)
    assert first.stdin is not None
    try:
        first.stdin.write("one\n")
        first.stdin.flush()
        while run("status", root, "--json").stdout.find('"writer": "pid') < 0:
            assert first.poll() is None
            time.sleep(0.05)
        second = start("put", root, "t", "two", "--wait", "200ms")
        _, words = finish(second, 3)
        assert f"locked by pid {first.pid}" in words
        assert len(words.splitlines()) == 1
        assert len(lines(run("get", root, "t"))) >= 10, "reading waits for nobody"
        assert "no fault found" in run("verify", root).stdout
    finally:
        first.stdin.close()
        first.stdin = None
        finish(first)
    assert lines(run("tail", root, "--count", 1))[0].endswith("|  one")


def test_recover_beside_an_attached_writer_says_so(root: Path) -> None:
    """The other one is between two commits: `abort` stays, and a broker must wait."""
    code = (
        "import sys, time; from messagestore.session import attached_store\n"
        "with attached_store(sys.argv[1]).writing('query'): pass\n"
        "print('attached', flush=True); time.sleep(600)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True)
    try:
        read_lines(other, 1)
        assert "a writer is attached and keeps brokers out" in run("status", root).stdout
        run("put", root, "t", "x")
        assert "Do not start a broker" in run("recover", root).stdout
    finally:
        other.kill()
        other.communicate()
    assert "a Java broker can take over" in run("recover", root).stdout


def test_recover_reports_what_it_cut(root: Path) -> None:
    """Torn bytes behind the end of a store whose writer died."""
    with MessageStore.open(root) as store:
        store.put_message(Message("t", b"x", queue_id=0))
        copy = root.parent / "killed"
        shutil.copytree(root, copy)
        end = store.writer.end.physical_offset
    with open(copy / "commitlog" / ("0" * 20), "r+b") as file:
        file.seek(end)
        file.write(b"\0\0\0\x99torn")
    with_json = root.parent / "again"
    shutil.copytree(copy, with_json)
    result = run("recover", copy, code=4)
    assert "found        a writer crashed" in result.stdout
    assert "read         1 record from " in result.stdout
    cut = f"5 bytes behind {end}, where no record begins: 0 messages of 0 queues; the bytes are kept in "
    assert f"cut off      {cut}" in result.stdout
    assert not result.stderr
    (report,) = objects(run("recover", with_json, "--json", code=4))
    assert report["cut"].startswith(cut)
    assert (report["zeroed_bytes"], report["cut_messages"], report["cut_queues"]) == (5, 0, 0)
    assert "found        clean" in run("recover", copy).stdout


def test_recover_refuses_damage(root: Path) -> None:
    """What was proven to be on the disk is never cut: exit code 1, and the place."""
    with MessageStore.open(root) as store:
        store.put_message(Message("t", b"x", queue_id=0))
        store.writer.clean_end.move()
        store.put_message(Message("t", b"y", queue_id=0))
        place = store.put_message(Message("t", b"z", queue_id=1)).physical_offset
        copy = root.parent / "killed"
        shutil.copytree(root, copy)
    flip(copy / "commitlog" / ("0" * 20), place + 88)
    before = (copy / "commitlog" / ("0" * 20)).read_bytes()
    assert f"offset {place}: expected BODYCRC" in error("recover", copy, code=1)
    assert (copy / "commitlog" / ("0" * 20)).read_bytes() == before


# ---- tail


def test_tail_shows_the_last_in_order(root: Path) -> None:
    """Over all queues, in the order of the log."""

    def places(*arguments: object) -> list[int]:
        return [m["physicalOffset"] for m in objects(run("tail", root, *arguments, "--json"))]

    everything = [m["physicalOffset"] for m in objects(run("dump", root, "--json"))]
    assert places() == everything
    assert places("--count", 3) == everything[-3:]
    assert places("--from", "earliest", "--count", 4) == everything[:4]
    run("put", root, "other", "x", "--count", 15)
    everything = [m["physicalOffset"] for m in objects(run("dump", root, "--json"))]
    assert places() == everything[-10:]
    assert places("t") == everything[:10]
    assert places("t", "other", "--count", 18) == everything[-18:]
    assert places("--from", "earliest") == everything
    assert places("--from", "earliest", "--follow", "--count", 25) == everything


def test_tail_of_an_empty_store_is_1(tmp_path: Path) -> None:
    """Nothing where something was asked for."""
    MessageStore.open(tmp_path / "store", SMALL).close()
    assert "no message found" in run("tail", tmp_path / "store", code=1).stderr


def wait_until_followed(root: Path, follower: subprocess.Popen[str]) -> None:
    """Put until the follower shows something: then it has begun."""
    assert follower.stdout is not None
    while not select.select([follower.stdout], [], [], 0.2)[0]:
        assert follower.poll() is None
        with MessageStore.open(root) as store:
            store.put_message(Message("begin", b"", queue_id=0))


def test_tail_follows_a_live_store(root: Path, follower: subprocess.Popen[str]) -> None:
    """Puts and batches of other processes, new topics too, each once and in order; Ctrl-C ends it with 0."""
    wait_until_followed(root, follower)
    with MessageStore.open(root) as store:
        for body in bodies(20):
            store.put_message(Message("t", body, queue_id=1))
        store.append_batch(columns(bodies(30), topic="new"), BatchRequest(app_id="app", version=0))
    run("put", root, "t", "the last")
    found: list[dict[str, Any]] = []
    while not found or found[-1]["body"] != "the last":
        found += [json.loads(text) for text in read_lines(follower, 1)]
    follower.send_signal(signal.SIGINT)
    rest, words = finish(follower, 0)
    assert (rest, words) == ("", "")
    assert [m["body"] for m in found if m["topic"] == "t"] == [b.decode() for b in bodies(20)] + ["the last"]
    late = [m["body"] for m in found if m["topic"] == "new"]
    assert set(late) <= {b.decode() for b in bodies(30)}, "a topic that is new is looked for once a second"
    assert len(late) == len(set(late))
    begun = [m["queueOffset"] for m in found if m["topic"] == "begin"]
    assert begun == list(range(begun[0], begun[0] + len(begun)))


@pytest.mark.parametrize("in_place", [True, False], ids=["over the open files", "another folder"])
@pytest.mark.parametrize("count", [3, 25])
def test_tail_skips_nothing_when_a_backup_is_restored(tmp_path: Path, count: int, in_place: bool) -> None:
    """A store that had grown past its old end looked as if only the messages behind that end were new."""
    root, backup = tmp_path / "store", tmp_path / "backup"

    def put(name: str, some: range) -> None:
        with MessageStore.open(root, SMALL) as store:
            for number in some:
                store.put_message(Message("t", f"{name}{number}".encode(), queue_id=number % 2))

    put("old", range(10))
    shutil.copytree(root, backup)
    put("old", range(10, 20))
    with contextlib.closing(LOCAL_STORES.reader(str(root))) as reader:
        cursor = Cursor(reader, None)
        assert len(list(cursor.once())) == 20
        time.sleep(0.01)  # store times are in milliseconds
        if not in_place:
            shutil.rmtree(root)
        shutil.copytree(backup, root, dirs_exist_ok=True)
        put("new", range(10, 10 + count))
        put("new", range(10 + count, 10 + 2 * count))
        found = [message.body.decode() for message in cursor.once()]
        assert [body for body in found if body.startswith("new")] == [f"new{10 + n}" for n in range(2 * count)]
        put("last", range(2))
        assert [message.body for message in cursor.once()] == [b"last0", b"last1"]


def test_tail_follows_a_topic_that_is_not_there_yet(root: Path) -> None:
    """It says so, and shows the first message when it comes."""
    process = start("tail", root, "later", "--follow", "--count", 2)
    assert process.stderr is not None
    assert process.stderr.readline() == "these topics do not exist yet: later\n"
    run("put", root, "t", "not this")
    run("put", root, "later", "--lines", given="first\nsecond\n")
    stdout, _ = finish(process)
    assert [line.rsplit("|  ")[1] for line in stdout.splitlines()] == ["first", "second"]


def test_tail_follows_through_a_killed_writer(root: Path, follower: subprocess.Popen[str], tmp_path: Path) -> None:
    """The writer dies, the next one recovers and goes on: nothing is shown twice, nothing acknowledged is left out."""
    wait_until_followed(root, follower)
    writer = start("put", root, "t", "--queue", 0, "a", "--count", 100_000, "--json")
    acknowledged = [json.loads(text)["queueOffset"] for text in read_lines(writer, 50)]
    writer.kill()
    rest, _ = finish(writer, -signal.SIGKILL)
    acknowledged += [json.loads(text)["queueOffset"] for text in rest.splitlines() if text.endswith("}")]
    run("put", root, "t", "--queue", 0, "end")
    found: list[dict[str, Any]] = []
    while not found or found[-1]["body"] != "end":
        found += [m for m in map(json.loads, read_lines(follower, 1)) if m["topic"] == "t"]
    offsets = [m["queueOffset"] for m in found]
    assert offsets == list(range(5, 5 + len(offsets)))
    assert set(acknowledged) <= set(offsets)


def test_tail_follows_a_broker(root: Path, tmp_path: Path) -> None:
    """No `spark`, no state: what the queues show. A broker is played by files that are copied into place."""
    with MessageStore.open(root) as store:
        for body in bodies(5, start=100):
            store.put_message(Message("t", body, queue_id=0))
    after = tmp_path / "after"
    shutil.copytree(root, after)
    for path in (root, after):
        shutil.rmtree(path / "spark")
        (path / "abort").write_text("4711")
    units = root / "consumequeue" / "t" / "0" / ("0" * 20)
    with open(units, "r+b") as file:
        file.seek(5 * 20)
        file.write(bytes(5 * 20))
    process = start("tail", root, "--from", "earliest", "--follow", "--count", 15, "--json")
    found = read_lines(process, 10)
    data = (after / "consumequeue" / "t" / "0" / ("0" * 20)).read_bytes()
    for unit in range(5, 10):
        with open(units, "r+b") as file:
            file.seek(unit * 20)
            file.write(data[unit * 20 : unit * 20 + 20])
    rest, _ = finish(process)
    found += rest.splitlines()
    assert [json.loads(m)["body"] for m in found[10:]] == [b.decode() for b in bodies(5, start=100)]
    assert not (root / "spark").exists()


def test_a_pipe_that_closes_ends_a_command_quietly(tmp_path: Path) -> None:
    """`messagestore dump ROOT | head -1`."""
    root = filled(tmp_path / "store", 2000, SMALL_ASYNC)
    process = start("dump", root)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, words = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, words) == (0, "")


def test_a_terminal_without_utf_8_shows_escapes(root: Path) -> None:
    """Latin letters only: the rest is escaped rather than an error."""
    run("put", root, "t", "grüße \u4f60", "--queue", 0)
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    stdout, _ = finish(start("get", root, "t", 0, "--offset", 5, env=environment, encoding="latin-1"))
    assert stdout.endswith("|  grüße \\u4f60\n")


def test_reading_leaves_the_store_as_it_is(root: Path) -> None:
    """Not a byte, not a file, not a time."""

    def state() -> list[tuple[str, bytes, int]]:
        return [(str(p), p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(root.rglob("*")) if p.is_file()]

    before = state()
    for arguments in (["status"], ["dump"], ["verify"], ["get", "t"], ["tail"]):
        run(arguments[0], root, *arguments[1:])
    run("groups", root, code=1)
    assert state() == before


# ---- groups


def test_groups_show_how_far_they_are(tmp_path: Path) -> None:
    """A row for each queue: what is committed, where the queue ends, what lies between; a queue never read counts whole."""
    root = filled(tmp_path / "store", 10)
    publish_offsets(str(root), "delays", {("t", 0): 3})
    publish_offsets(str(root), "copy", {("t", 0): 5, ("t", 1): 5, ("gone", 2): 7})
    rows = [tuple(row.values()) for row in objects(run("groups", root, "--json"))]
    assert rows == [
        ("copy", "gone", 2, 7, 0, 0, 7),
        ("copy", "t", 0, 5, 5, 0, 0),
        ("copy", "t", 1, 5, 5, 0, 0),
        ("delays", "t", 0, 3, 5, 2, 0),
        ("delays", "t", 1, None, 5, 5, 0),
    ]
    shown = [line.split() for line in lines(run("groups", root))]
    assert shown[0] == ["group", "topic", "queue", "committed", "max", "lag", "beyond", "the", "end"]
    assert shown[1:] == [["-" if value is None else str(value) for value in row] for row in rows]


def test_groups_where_there_are_none(root: Path) -> None:
    """Nothing found is exit code 1; a file that cannot be read is named."""
    assert run("groups", root, code=1).stderr == "no consumer group found\n"
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "consumerOffset.json").write_text("{")
    assert "consumerOffset.json: offset 0: expected the broker's table" in error("groups", root, code=1)


def test_groups_of_topics_that_cannot_be_read(tmp_path: Path) -> None:
    """What can be is shown; the rest is named, and the exit code says so."""
    root = filled(tmp_path / "store", 4)
    publish_offsets(str(root), "g", {("%LMQ%x", 0): 1, ("t", 0): 1})
    result = run("groups", root, "--json", code=1)
    assert [row["topic"] for row in objects(result)] == ["t", "t"]
    assert "light queue" in result.stderr


def test_the_command_runs_without_spark() -> None:
    """Neither pyspark nor the data source is imported, whatever the command."""
    found = imported_by("import cli_runs; cli_runs.commands()")
    assert "pyspark_messagestore.cli.commands.serve" in found
    assert "pyspark_messagestore.datasource" not in found
    assert "pyspark" not in found


def test_a_command_does_not_wait_for_the_others_to_be_imported(root: Path) -> None:
    """A script starts thousands; half of the time of each went into what only other commands need."""
    found = imported_by(f"import cli_runs; cli_runs.run('offsets', {str(root)!r}, '--json')")
    assert {name for name in found if name.startswith("pyspark_messagestore.cli.commands.")} == {
        "pyspark_messagestore.cli.commands.offsets"
    }
    assert "rich.table" not in found


def imported_by(code: str) -> list[str]:
    """The modules that another Python has imported when it has run this."""
    code = f"import sys; sys.path.append({str(TESTS)!r}); {code}; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


# ---- words


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (1 << 60, "1048576.0 TiB")],
)
def test_sizes(size: int, words: str) -> None:
    """Units of 1 024."""
    assert cli_output.size_words(size) == words


@pytest.mark.parametrize("value", [-1, 1 << 62, -(1 << 63)])
def test_times_that_are_none(value: int) -> None:
    """A record may say anything."""
    assert cli_output.time_words(value) == str(value)


def test_a_body_cut_within_a_character_is_text() -> None:
    """Not hex because of where the cut fell."""
    body = b"a" + "€".encode() * 100
    assert cli_output.shown_bytes(body, 10) == "a" + "€" * 9 + "... (301 bytes; --json shows all)"
    assert cli_output.shown_bytes(b"\xff" + b"a" * 100, 10).startswith("0xff6161")


# ---- batches


def test_an_app_is_told_where_to_go_on(tmp_path: Path) -> None:
    """`batches start`, as the error of a refused batch names it: once; a second call changes nothing, a lower one fails."""
    root = tmp_path / "new"
    made = run("batches", "start", root, "late", 7)
    assert made.stdout == "app late continues with version 7\n"
    assert "created a new store in" in made.stderr
    assert run("batches", "start", root, "late", 7).stdout == "nothing to do: the next version of app late is 7\n"
    assert "found start version 3, but the store has its batches up to version 6" in error(
        "batches", "start", root, "late", 3, code=2
    )
    assert objects(run("batches", root, "--json")) == [
        {
            "app": "late",
            "queryId": None,
            "firstVersion": None,
            "lastVersion": None,
            "lastRows": None,
            "lastTopics": None,
            "nextVersion": 7,
            "replacedQueryIds": [],
        }
    ]
    with MessageStore.open(root) as store:
        store.append_batch(columns(bodies(4)), BatchRequest("late", 7, "spark", "q1"))
    assert objects(run("batches", "start", root, "late", 9, "--json")) == [
        {"app": "late", "version": 9, "status": "appended"}
    ]
    for command in (("batches", root), ("batches", "list", root)):
        assert lines(run(*command))[1].split() == ["late", "q1", "7", "to", "7", "4", "9"]


def test_batches_of_apps(tmp_path: Path) -> None:
    """One line for each app that has batches; a store without any says so."""
    root = filled(tmp_path / "s")
    assert run("batches", root, code=1).stderr == "no batch found\n"
    with MessageStore.open(root, SMALL) as store:
        for version in range(3):
            store.append_batch(columns(bodies(4, start=version)), BatchRequest("b", version, "spark", "q1"))
        store.append_batch(columns(bodies(5)), BatchRequest("b", 0, "spark", "q2", on_new_query="continue"))
        store.append_batch(columns(bodies(2)), BatchRequest("a", 20260101))
        store.append_batch(columns(bodies(2)))
    rows = objects(run("batches", root, "--json"))
    assert [(row["app"], row["queryId"], row["nextVersion"], row["replacedQueryIds"]) for row in rows] == [
        ("a", None, 20260102, []),
        ("b", "q2", 1, ["q1"]),
    ]
    assert "no message store" in error("batches", tmp_path / "nothing", code=2)


def delivered(process: subprocess.Popen[str], count: int) -> int:
    """How many messages were delivered when there are `count`; a slow machine delivers several at once."""
    found = 0
    while found < count:
        (line,) = read_lines(process, 1)
        found += json.loads(line)["delivered"]
    return found


def test_deliver_brings_delayed_messages_when_they_are_due(tmp_path: Path, config: Path) -> None:
    """It waits for what is not due yet, shares the store with a writer, and closes it when it is told to end."""
    root = tmp_path / "store"
    config.write_text(CONFIG + "messageDelayLevel=1s 2s\n")
    settings = SMALL.replace(message_delay_level="1s 2s")
    with MessageStore.open(root, settings) as store:
        store.put_message(Message("t", b"one", queue_id=0, delay_time_level=1))
        store.put_message(Message("t", b"two", queue_id=0, delay_time_level=2))
    assert lines(run("deliver", root, "--once", "--store-config", config)) == ["0 messages delivered"]
    process = start("deliver", root, "--json", "--store-config", config)
    try:
        assert delivered(process, 2) == 2
        with MessageStore.open(root, settings) as store:
            assert [m.body for m in store.get_message("t", 0, 0).messages] == [b"one", b"two"]
            store.put_message(Message("t", b"three", queue_id=0, delay_time_level=1))
        assert delivered(process, 1) == 1
        assert (root / "abort").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()
    assert not (root / "abort").exists()
    assert '"offsetTable":{1:2,2:1' in (root / "config" / "delayOffset.json").read_text()
    assert lines(run("deliver", root, "--once", "--store-config", config)) == ["0 messages delivered"]


def test_recover_and_deliver_without_settings_take_the_levels_of_the_store(tmp_path: Path) -> None:
    """A one-hour message was due after a second, when queues were made again by who did not know the levels."""
    root, settings = tmp_path / "store", SMALL.replace(message_delay_level="1h")
    with MessageStore.open(root, settings) as store:
        put = store.put_message(Message("t", b"later", queue_id=0, delay_time_level=1))
    shutil.rmtree(root / "consumequeue")
    run("recover", root, code=4)  # queues were made again
    assert lines(run("deliver", root, "--once")) == ["0 messages delivered"]
    run("verify", root)
    with MessageStore.open_read_only(root) as reader:
        (unit,) = reader.view.units("SCHEDULE_TOPIC_XXXX", 0, 0, 1)
        assert unit["tags_code"] == put.store_timestamp_ms + 3_600_000


def test_commands_that_change_a_store_say_in_json_what_is_there_then(tmp_path: Path) -> None:
    root = tmp_path / "store"
    (topic,) = objects(run("topic", "create", root, "flights", "--queues", 3, "--json"))
    assert (topic["topicName"], topic["writeQueueNums"], topic["readQueueNums"]) == ("flights", 3, 3)
    (group,) = objects(run("group", "create", root, "g", "--json"))
    assert (group["groupName"], group["retryMaxTimes"]) == ("g", 16)
    (recovered,) = objects(run("recover", root, "--json"))
    assert (recovered["reason"], recovered["cut"], recovered["closed"]) == ("clean", None, True)
