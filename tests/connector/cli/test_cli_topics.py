"""`messagestore topics`, `topic create`, `topic alter`, `offsets` and `find`, as a person types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cli_runs import error, lines, objects, on_terminal, run
from messagestore import Message, MessageStore
from messagestore.files.config_file import parsed
from messagestore.files.consumer_offsets import publish_offsets
from small import SMALL, ClockDisk, filled

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold]x[/bold]\u202etxt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with 10 messages in topic t, queues 0 and 1."""
    return filled(tmp_path / "store", 10)


def table(root: Path) -> dict[str, dict[str, object]]:
    return parsed((root / "config" / "topics.json").read_text())["topicConfigTable"]


# ---- topics


def test_a_topic_is_created_with_what_was_asked_for(tmp_path: Path) -> None:
    """In RocketMQ's words; a second time is refused, with the command that changes it."""
    root = tmp_path / "new"
    made = run("topic", "create", root, "flights", "--queues", 4, "--read-queues", 6, "--message-type", "FIFO")
    assert made.stdout == "created topic flights: 4 queues to write, 6 to read, perm 6, message type FIFO\n"
    assert "created a new store in" in made.stderr
    assert table(root) == {
        "flights": {
            "attributes": {"message.type": "FIFO"},
            "order": False,
            "perm": 6,
            "readQueueNums": 6,
            "topicFilterType": "SINGLE_TAG",
            "topicName": "flights",
            "topicSysFlag": 0,
            "writeQueueNums": 4,
        }
    }
    text = error("topic", "create", root, "flights", "--queues", 9, code=2)
    assert "the topic exists already, with 4 queues to write and 6 to read" in text
    assert "`messagestore topic alter`" in text
    assert table(root)["flights"]["writeQueueNums"] == 4


def test_what_is_created_is_listed(root: Path) -> None:
    """Topics with settings, and topics that only have queues; JSON has the same."""
    run("topic", "create", root, "gates", "--queues", 3, "--perm", 4, "--order")
    assert [line.split() for line in lines(run("topics", root))] == [
        ["topic", "messages", "queues", "write", "read", "perm", "order", "type"],
        ["gates", "0", "0", "3", "3", "4", "true", "-"],
        ["t", "10", "2", "8", "8", "6", "false", "-"],
    ]
    (root / "config" / "topics.json").unlink()
    assert objects(run("topics", root, "--json")) == [
        {
            "topic": "t",
            "writeQueueNums": None,
            "readQueueNums": None,
            "perm": None,
            "order": None,
            "topicFilterType": None,
            "topicSysFlag": None,
            "attributes": None,
            "queues": 2,
            "messages": 10,
        }
    ]
    assert lines(run("topics", root))[1].split() == ["t", "10", "2", "-", "-", "-", "-", "-"]


def test_altering_keeps_what_is_not_named(root: Path) -> None:
    """Fields of a newer RocketMQ, other topics, other attributes: all stay; the version goes up."""
    path = root / "config" / "topics.json"
    fields = parsed(path.read_text())
    fields["topicConfigTable"]["t"] |= {"newField": [1], "attributes": {"+message.type": "NORMAL", "a": "b"}}
    fields["rootField"] = "kept"
    path.write_text(json.dumps(fields))
    shown = run("topic", "alter", root, "t", "--queues", 2, "--message-type", "MIXED", "--json").stdout
    now = parsed(path.read_text())
    assert json.loads(shown) == now["topicConfigTable"]["t"]
    assert now["rootField"] == "kept"
    assert now["dataVersion"]["counter"] == fields["dataVersion"]["counter"] + 1
    assert now["topicConfigTable"]["t"] == fields["topicConfigTable"]["t"] | {
        "writeQueueNums": 2,
        "attributes": {"+message.type": "MIXED", "a": "b"},
    }


def test_queues_that_consumers_leave_unread_are_named(root: Path) -> None:
    """Fewer queues to read than hold messages: done, as RocketMQ does, and told."""
    result = run("topic", "alter", root, "t", "--read-queues", 1)
    assert "consumers do not read 1 queue that hold messages (1). Give --read-queues 2 or more" in result.stderr
    assert run("topic", "alter", root, "t", "--read-queues", 2).stderr == ""


def test_queues_that_producers_write_and_nobody_reads_are_named(root: Path) -> None:
    """`--queues` alone leaves readQueueNums lower: done, as RocketMQ does, and told in one line."""
    told = "consumers read 8 of these 12 queues. Until `messagestore topic alter` sets --read-queues 12, they"
    result = run("topic", "alter", root, "t", "--queues", 12, "--json")
    assert told in result.stderr and len(result.stderr.splitlines()) == 1
    assert json.loads(result.stdout)["readQueueNums"] == 8
    assert run("topic", "alter", root, "t", "--perm", 4).stderr == "", "nobody asked about queues"
    assert run("topic", "alter", root, "t", "--queues", 16, "--read-queues", 16).stderr == ""
    assert run("topic", "alter", root, "t", "--queues", 4).stderr == "", "more to read than to write retires queues"
    result = run("topic", "create", root, "gates", "--queues", 4, "--read-queues", 2)
    assert "consumers read 2 of these 4 queues" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["topic", "alter", "ROOT", "nope", "--queues", "2"], 2, "topic 'nope' is not in the store"),
        (["topic", "alter", "ROOT", "t"], 2, "found nothing to change. Give --queues"),
        (["topic", "alter", "ROOT", "t", "--queues", "70000"], 2, "allowed is 1 to 65536"),
        (["topic", "alter", "NOWHERE", "t", "--queues", "1"], 2, "found no message store"),
        (["topic", "create", "ROOT", "rmq_sys_x"], 2, "rmq_sys_x"),
        (["topic", "create", "ROOT", HOSTILE], 2, "\\x1b]0;owned"),
        (["topics", "NOWHERE"], 2, "found no message store"),
        (["offsets", "ROOT", "nope"], 2, "topic 'nope' is not in the store"),
        (["offsets", "ROOT", "--at", "soon"], 2, "--at: found 'soon'; allowed are milliseconds"),
        (["offsets", "ROOT", "--at", "-1x"], 2, "and a time before now such as -10m"),
        (["find", "ROOT", "--key", "a", "--unique-key", "b"], 2, "give exactly one of --key"),
        (["find", "ROOT"], 2, "give exactly one of --key"),
        (["find", "ROOT", "--msg-id", "xyz"], 2, "allowed are 32 (IPv4) or 56 (IPv6) hex characters"),
        (["find", "ROOT", "--msg-id", "00", "--topic", "t"], 2, "Leave out --topic"),
        (["find", "ROOT", "--key", "k1", "--topic", "nope"], 2, "topic 'nope' is not in the store"),
    ],
)
def test_a_user_error_is_one_line_and_changes_nothing(root: Path, arguments: list[str], code: int, words: str) -> None:
    before = (root / "config" / "topics.json").read_bytes()
    given = [{"ROOT": str(root), "NOWHERE": str(root / "nowhere")}.get(word, word) for word in arguments]
    assert words in error(*given, code=code)
    assert (root / "config" / "topics.json").read_bytes() == before
    assert not (root / "nowhere").exists()


def test_beside_a_live_broker_nothing_changes(root: Path) -> None:
    """It keeps its topics in memory and writes the file over: the error names it, and the command that helps."""
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
        before = (root / "config" / "topics.json").read_bytes()
        for command, instead in (
            (["create", root, "gates", "--queues", 3], "updateTopic -b HOST:PORT -t gates -w 3"),
            (["alter", root, "t", "--queues", 3], "updateTopic -b HOST:PORT -t t -w 3"),
            (["delete", root, "t", "--yes", "--json"], "deleteTopic -n HOST:PORT -c CLUSTER -t t`"),
        ):
            text = error("topic", *command, "--wait", "100ms", code=3)
            assert f"pid {broker.pid}" in text
            words = "Nothing was changed. While the broker runs, change its topics through it: `mqadmin "
            assert words + instead in text
        assert (root / "config" / "topics.json").read_bytes() == before
    finally:
        broker.communicate("")


def test_a_killed_alter_leaves_the_old_settings_or_the_new_ones(root: Path) -> None:
    """kill -9 while the file is replaced: never half of it."""
    code = (
        "import os, sys\n"
        "real = os.rename if sys.argv[1] == 'before' else None\n"
        "def rename(a, b, **k):\n"
        "    if str(b).endswith('topics.json') and sys.argv[1] == 'before': os.kill(os.getpid(), 9)\n"
        "    done(a, b, **k)\n"
        "    if str(b).endswith('topics.json'): os.kill(os.getpid(), 9)\n"
        "done = os.replace\n"
        "os.replace = os.rename = rename\n"
        "from messagestore import MessageStore\n"
        "with MessageStore.open(sys.argv[2]) as store: store.alter_topic('t', write_queue_nums=3)\n"
    )
    for when, expected in (("before", 8), ("after", 3)):
        done = subprocess.run([sys.executable, "-c", code, when, str(root)], check=False)
        assert done.returncode == -9
        assert table(root)["t"]["writeQueueNums"] == expected
        with MessageStore.open(root, SMALL) as store:
            config = store.topic_config("t")
            assert config is not None
            assert config.write_queue_nums == expected


# ---- offsets


def test_offsets_show_each_queue(root: Path) -> None:
    """Minimum, maximum, how many; all topics, or those that are named."""
    assert objects(run("offsets", root, "--json")) == [
        {"topic": "t", "queueId": queue_id, "minOffset": 0, "maxOffset": 5, "messages": 5} for queue_id in (0, 1)
    ]
    assert [line.split() for line in lines(run("offsets", root, "t"))] == [
        ["topic", "queue", "min", "max", "messages"],
        ["t", "0", "0", "5", "5"],
        ["t", "1", "0", "5", "5"],
    ]


def test_offsets_at_a_time(tmp_path: Path) -> None:
    """The first message that was stored then or later; the queue's end where there is none."""
    root, disk = tmp_path / "s", ClockDisk(1_000_000_000_000)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        for _ in range(4):
            store.put_message(Message("t", b"x", queue_id=0))
            disk.now_ms += 60_000
    for at, offset, stored in (
        ("1000000060000", 1, 1_000_000_060_000),
        ("2001-09-09T01:47:41Z", 2, 1_000_000_120_000),
        ("2001-09-09T03:47:41+02:00", 2, 1_000_000_120_000),
        ("2001-09-09 01:47:40", 1, 1_000_000_060_000),
        ("-1m", 4, None),
    ):
        (row,) = objects(run("offsets", root, "--at", at, "--json"))
        assert (row["offset"], row["storeTimestamp"]) == (offset, stored), at
    shown = lines(run("offsets", root, "--at", 1_000_000_060_000))
    assert shown[0].split() == [
        "topic",
        "queue",
        "min",
        "max",
        "messages",
        "at",
        "2001-09-09",
        "01:47:40.000Z",
        "stored",
    ]
    assert shown[1].split() == ["t", "0", "0", "4", "4", "1", "2001-09-09", "01:47:40.000Z"]


def test_offsets_of_a_store_without_messages(tmp_path: Path) -> None:
    run("topic", "create", tmp_path / "s", "t")
    assert [row["maxOffset"] for row in objects(run("offsets", tmp_path / "s", "t", "--json"))] == [0] * 8
    assert run("offsets", tmp_path / "s", "--json").stdout == run("offsets", tmp_path / "s", "t", "--json").stdout


# ---- find


def test_find_by_key_in_all_topics(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("other", b"there", keys=["k3"], queue_id=0))
    assert [(row["topic"], row["keys"]) for row in objects(run("find", root, "--key", "k3", "--json"))] == [
        ("other", ["k3"]),
        ("t", ["k3"]),
    ]
    assert len(lines(run("find", root, "--key", "k3", "--topic", "t"))) == 1
    assert run("find", root, "--key", "k3", "--topic", "t", "--to", 5, code=1).stderr == "no message found\n"
    assert len(lines(run("find", root, "--key", "k3", "--from", "-1h"))) == 2
    assert run("find", root, "--key", "no such key", code=1).stdout == ""


def test_find_shows_the_newest(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        for number in range(9):
            store.put_message(Message("t", str(number).encode(), keys=["same"], queue_id=0))
    assert [row["body"] for row in objects(run("find", root, "--key", "same", "--count", 3, "--json"))] == list("678")


def test_find_by_the_senders_id_is_not_fooled_by_a_key(tmp_path: Path) -> None:
    """The index holds both under the same hash: `--unique-key` shows only the message that has it as its id."""
    root, config = tmp_path / "s", tmp_path / "store.properties"
    with zipfile.ZipFile(ROOT / "tests" / "golden" / "plain-5.3.3.zip") as archive:
        archive.extractall(root)
    config.write_text("maxHashSlotNum=64\nmaxIndexNum=200\n")
    with MessageStore.open_read_only(root, SMALL) as store:
        ids = [
            (topic, message.unique_key)
            for topic, queues in store.topics().items()
            for queue_id in queues
            for message in store.get_message(topic, queue_id, 0, 1000).messages
            if message.unique_key
        ]
    topic, unique_key = ids[0]
    with MessageStore.open(root, SMALL) as store:
        for _ in range(9):
            store.put_message(Message(topic, b"a key", queue_id=0, keys=[unique_key]))
    command = ["find", root, "--topic", topic, "--store-config", config, "--count", 1, "--json"]
    (mine,) = objects(run(*command, "--unique-key", unique_key))
    assert mine["systemProperties"]["UNIQ_KEY"] == unique_key
    assert mine["body"] != "a key"
    (other,) = objects(run(*command, "--key", unique_key))
    assert other["body"] == "a key"


def test_find_by_the_id_that_put_shows(root: Path) -> None:
    put = json.loads(run("put", root, "t", "hello", "--json").stdout)
    (found,) = objects(run("find", root, "--msg-id", put["msgId"], "--json"))
    assert (found["body"], found["physicalOffset"]) == ("hello", put["physicalOffset"])
    beyond = put["msgId"][:16] + f"{1 << 40:016X}"
    assert run("find", root, "--msg-id", beyond, code=1).stderr == "no message found\n"


def test_what_is_found_does_not_act_on_the_terminal(tmp_path: Path) -> None:
    """Escape sequences, markup and bidirectional controls in a body, a key and an attribute are shown as text."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("t", attributes={"message.type": HOSTILE})
        store.put_message(Message("t", HOSTILE.encode(), queue_id=0, keys=["k" + HOSTILE]))
    for command in (
        ["find", root, "--key", "k" + HOSTILE],
        ["topics", root],
        ["topic", "alter", root, "t", "--perm", 6],
    ):
        shown = run(*command).stdout
        assert "\\x1b]0;owned\\x07\\x1b[2J[bold]x[/bold]\\u202etxt" in shown
        assert all(c.isprintable() or c == "\n" for c in shown)


def test_looking_leaves_the_store_as_it_is(root: Path) -> None:
    """Not a byte, not a file, not a time."""

    def state() -> list[tuple[str, bytes, int]]:
        return [(str(p), p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(root.rglob("*")) if p.is_file()]

    before = state()
    for command in (["topics", root], ["offsets", root, "--at", "-1h"], ["find", root, "--key", "k1"]):
        run(*command)
    assert state() == before
    assert os.path.isdir(root)


# ---- topic delete


def test_a_topic_is_deleted_after_what_goes_was_shown(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("kept", b"x", queue_id=0))
        store.flush()
    publish_offsets(str(root), "boards", {("t", 0): 3})
    shown = on_terminal("topic", "delete", root, "t", typed="n\n", code=1)
    assert "topic t: 10 messages in 2 queues; progress of 1 group: boards" in shown
    assert "nothing was deleted" in shown
    assert "t" in table(root)
    shown = on_terminal("topic", "delete", root, "t", typed="y\n")
    assert "deleted topic t" in shown
    assert list(table(root)) == ["kept"]
    assert lines(run("topics", root))[1].split()[0] == "kept"


def test_without_a_terminal_nothing_is_deleted_unless_it_is_said(root: Path) -> None:
    made = run("topic", "delete", root, "t", code=2)
    assert "found no terminal to ask on. Nothing was deleted. To delete without being asked, give --yes" in made.stderr
    assert "t" in table(root)
    (row,) = objects(run("topic", "delete", root, "t", "--yes", "--json"))
    assert row == {"topic": "t", "messages": 10, "queues": 2, "groups": []}
    assert table(root) == {}


def test_of_several_topics_none_is_deleted_if_one_is_not_there(root: Path) -> None:
    assert "Nothing was deleted" in error("topic", "delete", root, "t", "nowhere", "--yes", code=2)
    assert "reserved for RocketMQ's broker" in error("topic", "delete", root, "t", "SCHEDULE_TOPIC_XXXX", "-y", code=2)
    assert "t" in table(root)
