"""`messagestore checkpoint show`, `checkpoint rewind` and `lag`, on checkpoints as Spark 4.3 writes them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import QUERY, checkpoint, offset, write
from cli_runs import error, lines, objects, on_terminal, run
from messagestore import Message, MessageStore
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.serve.hosted import Hosted
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from pyspark_messagestore.checkpoint import spark_checkpoint
from pyspark_messagestore.checkpoint.spark_checkpoint import read_checkpoint
from small import SMALL, ClockDisk, filled


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with 10 messages in topic t, queues 0 and 1."""
    return filled(tmp_path / "store", 10)


@pytest.fixture
def store_id(root: Path) -> str:
    with MessageStore.open_read_only(root) as store:
        return store.store_id


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# ---- show


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_show_names_batches_sources_and_places(tmp_path: Path, version: str) -> None:
    """A query with three sources, one of which has read nothing and one of which is not ours."""
    other = {"logOffset": 7}
    path = checkpoint(
        tmp_path / "ck",
        [[offset("s", 2, 1), None, other], [offset("s", 4, 3), offset("s", 1, topic="u"), other]],
        committed=1,
        version=version,
    )
    shown = lines(run("checkpoint", "show", path))
    assert shown[:5] == [
        f"checkpoint  {path}",
        f"query       {QUERY}",
        "done        up to batch 0",
        "next        batch 1",
        "rewind      possible to batch 0",
    ]
    rows = [line.split() for line in shown[5:]]
    assert rows[0] == ["batch", "done", "planned", "source", "topic", "read", "up", "to", "messages"]
    when = ["2023-11-14", "22:13:20.000Z"]
    assert rows[1:4] == [
        ["0", "yes", *when, "0", "t", "3", "-"],
        ["0", "yes", *when, "1", "(nothing", "read", "yet)", "-", "-"],
        ["0", "yes", *when, "2", "(another", "source)", "-", "-"],
    ]
    assert rows[4][-4:] == ["0", "t", "7", "4"]
    assert rows[5][-4:] == ["1", "u", "1", "-"]
    found = json.loads(run("checkpoint", "show", path, "--json").stdout)
    assert found["queryId"] == QUERY
    assert (found["lastCommittedBatch"], found["nextBatch"], found["rewindable"]) == (0, 1, [0])
    assert found["batches"][1] == {
        "batchId": 1,
        "committed": False,
        "plannedAt": 1_700_000_000_001,
        "offsets": [offset("s", 4, 3), offset("s", 1, topic="u"), other],
        "fault": None,
    }


def test_show_leaves_old_batches_to_those_who_ask(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(30)])
    shown = lines(run("checkpoint", "show", path))
    assert [line.split()[0] for line in shown[6:-1]] == [str(number) for number in range(20, 30)]
    assert shown[-1] == "20 earlier batches not shown; --count and --json show them"
    assert len(lines(run("checkpoint", "show", path, "--count", 99))) == 36


@pytest.mark.parametrize(
    "text", ["", "v1", "v3\n{}\n{}", "v1\n{}", "v1\n{}\n{", "v2\n{}\nname:{}", "v1\n[]\n{}", "\xff"]
)
def test_a_torn_batch_is_named_and_can_be_rewound_over(tmp_path: Path, text: str) -> None:
    """Spark does not sync its files: after a power cut the newest may be empty. What is before it still serves."""
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(4)])
    (path / "offsets" / "3").write_bytes(text.encode("latin-1"))
    result = run("checkpoint", "show", path, code=1)
    assert f"{path}/offsets/3 cannot be read" in result.stderr
    assert "possible to batches 0 to 2" in result.stdout
    assert "cannot be read" in error("checkpoint", "rewind", path, 3, code=2)
    run("checkpoint", "rewind", path, 2, "--to", tmp_path / "copy")
    assert read_checkpoint(str(tmp_path / "copy")).next_batch_id == 2


def test_a_folder_that_is_no_checkpoint_is_one_line(tmp_path: Path, root: Path) -> None:
    for command in (["checkpoint", "show", tmp_path], ["checkpoint", "rewind", root, 1]):
        assert "found no checkpoint of a streaming query" in error(*command, code=2)
    assert "found no checkpoint" in error("lag", root, "--checkpoint", tmp_path / "none", code=2)
    path = checkpoint(tmp_path / "ck", [])
    assert run("checkpoint", "show", path, code=1).stderr == "no batch found\n"
    (path / "metadata").write_text("[")
    assert "expected the id of a query" in error("checkpoint", "show", path, code=1)


def test_names_in_a_checkpoint_do_not_act_on_the_terminal(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "ck", [[offset("s", 1, topic="\x1b[2J[bold]x\u202e")]])
    shown = run("checkpoint", "show", path).stdout
    assert "\\x1b[2J[bold]x\\u202e" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


# ---- rewind


def test_a_rewind_is_tried_first_and_then_made_as_a_copy(tmp_path: Path) -> None:
    """Without --to nothing is written; the original never changes; the copy has no trace of what came later."""
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(6)])
    write(path / "sources" / "0" / "0", "v1\n{}")
    before = files(path)
    shown = run("checkpoint", "rewind", path, 3).stdout
    assert "run again   3 batches: 3 to 5" in shown
    assert "Nothing was written" in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck"]
    report = json.loads(run("checkpoint", "rewind", path, 3, "--to", tmp_path / "copy", "--json").stdout)
    assert (report["nextBatch"], report["runAgain"], report["dryRun"]) == (3, [3, 4, 5], False)
    assert files(path) == before
    dropped = {"offsets/4", "offsets/5", "commits/3", "commits/4", "commits/5"}
    dropped |= {f"{each[:8].rpartition('/')[0]}/.{each.rpartition('/')[2]}.crc" for each in dropped}
    assert set(report["leftOut"]) == dropped
    assert files(tmp_path / "copy") == {name: data for name, data in before.items() if name not in dropped}
    again = read_checkpoint(str(tmp_path / "copy"))
    assert (again.next_batch_id, again.committed and again.committed.batch_id) == (3, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "copy"]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (6, "batch 6 is not done: it runs without a rewind"),
        (60, "batch 60 is not done"),
        (2, "the checkpoint no longer holds the offsets at which batch 2 begins and ends"),
        (1, "Possible are the batches 3 to 5"),
    ],
)
def test_a_batch_that_cannot_run_again_is_refused(tmp_path: Path, batch: int, words: str) -> None:
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(6)])
    for folder in ("offsets", "commits"):
        for number in (0, 1):
            (path / folder / str(number)).unlink()
    assert words in error("checkpoint", "rewind", path, batch, "--to", tmp_path / "copy", code=2)
    assert not (tmp_path / "copy").exists()


def state(path: Path, kind: str, versions: range, *, store: str = "", ids: bool = False) -> None:
    for partition in (0, 1):
        folder = path / "state" / "0" / str(partition) / store
        for version in versions:
            own = f"_{version:08d}-0000-0000-0000-00000000000{partition}" if ids else ""
            write(folder / f"{version}{own}.{kind}", "x")
        write(folder / "_metadata" / "schema", "v3")
    write(path / "state" / "0" / "_metadata" / "metadata", "v1")


@pytest.mark.parametrize("store", ["", "left-keyToNumValues"])
@pytest.mark.parametrize("kind", ["delta", "changelog", "zip"])
def test_state_goes_back_with_the_query(tmp_path: Path, kind: str, store: str) -> None:
    """Version n is the state before batch n. A later one must not stay: the provider would take it for the new one."""
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(6)])
    state(path, kind, range(1, 7), store=store)
    run("checkpoint", "rewind", path, 3, "--to", tmp_path / "copy")
    kept = sorted(name for name in files(tmp_path / "copy") if name.endswith(f".{kind}"))
    assert kept == sorted(
        os.path.join("state", "0", str(partition), store, f"{version}.{kind}")
        for partition in (0, 1)
        for version in (1, 2, 3)
    )
    left = files(tmp_path / "copy")
    assert not [name for name in left if name.endswith(f"4.{kind}.crc")]
    assert os.path.join("state", "0", "0", store, "_metadata", "schema") in left


@pytest.mark.parametrize("lost", ["3.delta", "2.delta", "1.delta"])
def test_a_rewind_is_refused_where_the_state_lacks_that_version(tmp_path: Path, lost: str) -> None:
    """Spark deletes old versions; a snapshot at or below the version serves, a gap behind it does not."""
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(6)])
    state(path, "delta", range(1, 7))
    (path / "state" / "0" / "1" / lost).unlink()
    text = error("checkpoint", "rewind", path, 3, "--to", tmp_path / "copy", code=2)
    assert f"the state before batch 3 is gone: state/0/1 has no version {lost[0]}" in text
    assert not (tmp_path / "copy").exists()
    write(path / "state" / "0" / "1" / "3.snapshot", "x")
    run("checkpoint", "rewind", path, 3, "--to", tmp_path / "copy")


def test_the_first_batch_keeps_its_beginning_when_it_is_rewound(tmp_path: Path) -> None:
    """Its end says where it begins, so `show` counts its messages, and the copy needs no answer from the source."""
    first = {**offset("s", 7, 5), "begin": offset("s", 4, 3)}
    path = checkpoint(tmp_path / "ck", [[first], [offset("s", 9, 9)]])
    assert lines(run("checkpoint", "show", path))[-2].split()[-3:] == ["t", "12", "5"]
    text = run("checkpoint", "rewind", path, 0, "--to", tmp_path / "copy").output
    assert "where batch 0 begins" not in text
    assert "where it begins" not in text
    (kept,) = read_checkpoint(str(tmp_path / "copy")).batches
    assert kept.offsets == (first,)


def test_a_partition_without_state_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(3)])
    state(path, "zip", range(1, 4))
    shutil.rmtree(path / "state" / "0" / "1")
    (path / "state" / "0" / "1").mkdir()
    assert "state/0/1 has no version 1" in error("checkpoint", "rewind", path, 1, code=2)
    assert run("checkpoint", "rewind", path, 0).exit_code == 0


def test_state_of_another_attempt_does_not_serve(tmp_path: Path) -> None:
    """With ids in the names, only the version counts that the commit before names."""
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(6)])
    state(path, "changelog", range(1, 7), ids=True)
    own = [[f"00000003-0000-0000-0000-00000000000{partition}"] for partition in (0, 1)]
    write(path / "commits" / "2", "v2\n" + json.dumps({"nextBatchWatermarkMs": 0, "stateUniqueIds": {"0": own}}))
    assert run("checkpoint", "rewind", path, 3).exit_code == 0
    own[1] = ["99999999-0000-0000-0000-000000000001"]
    write(path / "commits" / "2", "v2\n" + json.dumps({"nextBatchWatermarkMs": 0, "stateUniqueIds": {"0": own}}))
    assert "state/0/1 has version 3 of another attempt only" in error("checkpoint", "rewind", path, 3, code=2)


def test_a_copy_does_not_go_where_something_is(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(3)])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = files(tmp_path)
    for target, words in (
        ("full", "exists already"),
        ("link", "exists already"),
        ("ck/copy", "lies within the checkpoint"),
    ):
        assert words in error("checkpoint", "rewind", path, 1, "--to", tmp_path / target, code=2)
    assert files(tmp_path) == before
    (path / "sources").symlink_to(tmp_path / "full")
    assert "found a link" in error("checkpoint", "rewind", path, 1, code=2)


def test_a_query_that_runs_meanwhile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a checkpoint in motion fits nothing: it is thrown away, and the error says what to do."""
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(3)])
    copy = spark_checkpoint._copy

    def copied(*arguments: Any) -> int:
        write(path / "offsets" / "3", "v1\n{}\n{}")
        return copy(*arguments)

    monkeypatch.setattr(spark_checkpoint, "_copy", copied)
    assert "the query is running. Stop it" in error("checkpoint", "rewind", path, 1, "--to", tmp_path / "copy", code=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck"]


def test_a_killed_copy_is_not_taken_for_one(tmp_path: Path) -> None:
    """kill -9 in the middle: the name is not there, and the next try succeeds."""
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(3)])
    code = (
        "import os, sys\n"
        "from pyspark_messagestore.checkpoint import spark_checkpoint as s\n"
        "copy, left = s._copy, [3]\n"
        "def some(*a):\n"
        "    left[0] -= 1\n"
        "    if not left[0]: os.kill(os.getpid(), 9)\n"
        "    return copy(*a)\n"
        "s._copy = some\n"
        "s.copy_rewound(s.read_checkpoint(sys.argv[1]), 1, sys.argv[2])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "copy")], check=False)
    assert done.returncode == -9
    assert not (tmp_path / "copy").exists()
    run("checkpoint", "rewind", path, 1, "--to", tmp_path / "copy")
    assert read_checkpoint(str(tmp_path / "copy")).next_batch_id == 1


def test_copying_shows_how_far_it_is(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "ck", [[offset("s", number)] for number in range(3)])
    shown = on_terminal("checkpoint", "rewind", path, 1, "--to", tmp_path / "copy")
    assert "The copy is" in shown


# ---- lag


@pytest.fixture(params=["in its folder", "behind its URL"])
def place(request: pytest.FixtureRequest, root: Path) -> Iterator[str]:
    """What stands for the store in a command."""
    if request.param == "in its folder":
        yield str(root)
        return
    server = Server(Service(Hosted(str(root), SMALL)))
    server.start()
    yield server.url
    server.stop()


def test_lag_of_a_query_that_is_stopped(tmp_path: Path, root: Path, place: str, store_id: str) -> None:
    """Messages, bytes and since when, for each queue; a batch that is planned and not done counts as lag."""
    path = checkpoint(tmp_path / "ck", [[offset(store_id, 1, 5)], [offset(store_id, 5, 5)]], committed=1)
    result = run("lag", place, "--checkpoint", path, "--json")
    rows = objects(result)
    with MessageStore.open_read_only(root) as store:
        waiting = store.get_message("t", 0, 1, 10).messages
    assert rows[0] == {
        "queryId": QUERY,
        "batchId": 0,
        "source": 0,
        "topic": "t",
        "queueId": 0,
        "committedOffset": 1,
        "minOffset": 0,
        "maxOffset": 5,
        "lag": 4,
        "beyond": 0,
        "lagBytes": sum(message.size for message in waiting),
        "oldestUnread": waiting[0].store_timestamp_ms,
    }
    assert (rows[1]["lag"], rows[1]["lagBytes"], rows[1]["oldestUnread"]) == (0, 0, None)
    assert "batch 1 is planned and not done; its messages count as lag" in result.stderr
    shown = lines(run("lag", place, "--checkpoint", path))
    assert shown[0].split() == ["topic", "queue", "read", "up", "to", "min", "max", "lag", "bytes", "oldest", "unread"]
    assert shown[1].split()[:6] == ["t", "0", "1", "0", "5", "4"]
    assert shown[-1].startswith("4 messages, ")


def test_lag_of_a_group_and_of_queues_never_read(root: Path) -> None:
    """A queue without an offset counts whole, as in `groups`."""
    publish_offsets(str(root), "delays", {("t", 0): 3})
    rows = objects(run("lag", root, "--group", "delays", "--json"))
    assert [(r["group"], r["queueId"], r["committedOffset"], r["lag"]) for r in rows] == [
        ("delays", 0, 3, 2),
        ("delays", 1, None, 5),
    ]
    assert [r["lag"] for r in rows] == [r["lag"] for r in objects(run("groups", root, "--json"))]
    assert "consumer group 'nobody' has no offsets in" in error("lag", root, "--group", "nobody", code=2)


def test_lag_of_several_sources(tmp_path: Path, root: Path, store_id: str) -> None:
    """Only the sources that read this store; each by its number."""
    path = checkpoint(tmp_path / "ck", [[offset("other", 9), offset(store_id, 5, 5), {"logOffset": 1}]])
    rows = objects(run("lag", root, "--checkpoint", path, "--json"))
    assert [(row["source"], row["lag"]) for row in rows] == [(1, 0), (1, 0)]
    assert lines(run("lag", root, "--checkpoint", path))[0].split()[0] == "source"


def test_lag_says_what_is_wrong(tmp_path: Path, root: Path, store_id: str) -> None:
    """A reader beyond the end, messages that retention took unread, another store: named, with exit code 1 or 2."""
    path = checkpoint(tmp_path / "ck", [[offset(store_id, 9, 5)]])
    told = run("lag", root, "--checkpoint", path, code=1).stderr
    assert "t/0 ends at 5, but this query has read up to 9. The query refuses this store" in told
    other = checkpoint(tmp_path / "other", [[offset("0" * 32, 1)]])
    text = error("lag", root, "--checkpoint", other, code=2)
    assert f"this query reads store {'0' * 32}, but {root} is store {store_id}" in text
    none = checkpoint(tmp_path / "none", [[offset(store_id, 1)]], committed=0)
    assert "no batch of this query is done yet" in error("lag", root, "--checkpoint", none, code=2)
    assert "give exactly one of --checkpoint and --group" in error("lag", root, code=2)
    assert "exactly one" in error("lag", root, "--checkpoint", path, "--group", "g", code=2)


def test_lag_counts_what_retention_took(tmp_path: Path) -> None:
    root, disk = tmp_path / "s", ClockDisk(1_000_000_000_000)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        store_id = store.store_id
        for _ in range(40):
            store.put_message(Message("t", b"x" * 1000, queue_id=0))
            disk.now_ms += 1000
    (root / "commitlog" / ("0" * 20)).unlink()
    path = checkpoint(tmp_path / "ck", [[offset(store_id, 2)]])
    result = run("lag", root, "--checkpoint", path, "--json", code=1)
    (row,) = objects(result)
    assert row["minOffset"] > 2
    assert row["lag"] == 38
    assert row["oldestUnread"] == 1_000_000_000_000 + row["minOffset"] * 1000
    assert f"t/0: retention has deleted {row['minOffset'] - 2} messages that were not read" in result.stderr
