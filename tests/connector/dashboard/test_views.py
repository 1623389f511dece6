"""The dashboard's views of a store: what takes the room, what Spark did, and the check of every byte. What was found
is kept until the store changes.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import re
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("starlette")

from checkpoints import checkpoint, offset
from crash.imitate import Process, another_boot
from dashboard_client import Client, page
from messagestore import ASYNC_FLUSH, BatchRequest, Message, MessageColumns, MessageStore
from messagestore.backup import back_up, restore
from messagestore.files.commit_log import CommitLog
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.counters import DEAD_LETTERS, count
from messagestore.inspect import operator
from messagestore.spi.local import LOCAL_STORES
from pyspark_messagestore.dashboard import app, kept, room, work
from pyspark_messagestore.dashboard.asked import MOST_COUNT
from pyspark_messagestore.dashboard.stored import Samples, Stored
from small import SMALL, SMALL_ASYNC, ClockDisk, bodies, columns, filled

HOUR_MS = 3_600_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "store", 10)


@pytest.fixture
def client(root: Path) -> Client:
    return Client(app([root]))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# ---- the check of every byte


def checked(client: Client, name: str = "store") -> Any:
    """The check of a store when it has ended."""
    while (found := client(f"/api/v1/s/{name}/verify").json)["state"] == "runs":
        time.sleep(0.02)
    return found


def test_every_byte_is_checked_from_the_page(client: Client, root: Path) -> None:
    assert "No byte of this store was checked" in page(client, "/s/store/log").words
    answer = client("/s/store/verify/start", method="POST")
    assert (answer.status, answer.headers["location"]) == (303, "/s/store/verify")
    found = checked(client)
    assert (found["state"], found["report"]["ok"], found["report"]["record_count"]) == ("done", True, 10)
    assert found["done"] == found["total"] > 0
    assert "No fault: 10 records" in page(client, "/s/store/log").words

    log = root / "commitlog" / "00000000000000000000"
    data = log.read_bytes()
    log.write_bytes(data.replace(b"000004.", b"damaged", 1))
    client("/s/store/verify/start", method="POST")
    assert not checked(client)["report"]["ok"]
    words = page(client, "/s/store/verify").words
    assert "Findings" in words and "00000000000000000000" in words


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that says how far it is and then waits for its end."""
    code = 'import sys; print(\'{"done": 1048576, "total": 4194304}\', flush=True); sys.stdin.read()'
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **pipes: start([sys.executable, "-c", code], **pipes))


@pytest.mark.usefixtures("held")
def test_one_check_runs_at_a_time_and_can_be_stopped(root: Path, tmp_path: Path) -> None:
    other = filled(tmp_path / "other", 3)
    application = app([root, other])
    client = Client(application)
    client("/s/store/verify/start", method="POST")
    while client("/api/v1/s/store/verify").json["done"] == 0:
        time.sleep(0.02)
    words = page(client, "/s/store/verify").words
    assert "1.0 MiB of 4.0 MiB" in words and "Stop" in words
    busy = client("/s/other/verify/start", method="POST")
    assert busy.status == 503 and "One check runs at a time" in busy.text
    assert client("/s/store/verify/start", method="POST").status == 303  # it runs: nothing more is started

    assert client("/s/store/verify/stop", method="POST").status == 303
    assert client("/api/v1/s/store/verify").json["state"] == "stopped"
    assert "was stopped" in page(client, "/s/store/log").words
    client("/s/other/verify/start", method="POST")
    assert client("/api/v1/s/other/verify").json["state"] == "runs"
    application.end_streams()
    assert client("/api/v1/s/other/verify").json["state"] == "stopped"
    assert client("/s/other/verify/start", method="POST").status == 503


@pytest.mark.usefixtures("held")
def test_another_page_cannot_start_a_check(root: Path) -> None:
    client = Client(app([root]))
    foreign: tuple[dict[str, str], ...] = (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
    )
    for headers in foreign:
        assert client("/s/store/verify/start", headers, method="POST").status == 403
    assert client("/api/v1/s/store/verify").json["state"] == "none"
    assert client("/s/store/verify/start").status == 405
    assert client("/s/store/verify/delete", method="POST").status == 405
    with_token = Client(app([root], token="a-token-of-enough-length"))
    assert with_token("/s/store/verify/start", method="POST").status == 303
    bearer = {"authorization": "Bearer a-token-of-enough-length"}
    assert with_token("/api/v1/s/store/verify", bearer).json["state"] == "none"


def test_the_process_of_a_check_lets_every_other_one_go_first() -> None:
    code = (
        "import os; from pyspark_messagestore.dashboard.checking import be_idle; be_idle(); "
        "print(os.sched_getscheduler(0) == os.SCHED_IDLE, os.nice(0))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True", "19"]


# ---- what takes the room


def test_the_log_by_topic_and_what_gc_takes(tmp_path: Path) -> None:
    """Segments of 16 KiB; nobody wrote to the first ones for long, and a group keeps those that it has not read."""
    root = tmp_path / "room"
    with MessageStore.open(root, SMALL) as store:
        for topic, count in (("old", 60), ("new", 30)):
            for body in bodies(count, 1000):
                assert store.put_message(Message(topic, body, queue_id=0)).is_ok
    for segment in sorted((root / "commitlog").iterdir())[:3]:
        os.utime(segment, (time.time() - 100 * 3600,) * 2)
    client = Client(app([root]))
    found = client("/api/v1/s/room/log").json
    topics = {row["topic"]: row["size"] for row in found["parts"]["topics"]}
    assert list(topics) == ["old", "new"] and 60_000 < topics["old"] < 75_000 and 30_000 < topics["new"] < 38_000
    first, *_, last = found["parts"]["parts"]
    assert first["sizes"][1] == 0 < first["sizes"][0] and last["sizes"][0] == 0 < last["sizes"][1]
    taken = found["expired"]["minOffset"]
    assert found["expired"]["segments"] and 0 < taken < found["commitLog"]["maxOffset"]
    text = client("/s/room/log").text
    assert f"0 to {first['end']}: old 100 %; the next gc takes it" in text
    assert text.count("the next gc takes it</title>") == sum(part["end"] <= taken for part in found["parts"]["parts"])

    publish_offsets(str(root), "slow", {("old", 0): 1})
    words = page(client, "/s/room/log").words
    assert "Nothing." in words and "slow" in words


def test_an_empty_log_is_no_picture(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "new", SMALL) as store:
        store.create_topic("t")
    assert "The log is empty." in page(Client(app([tmp_path / "new"])), "/s/new/log").words


def test_the_strip_of_a_long_log_with_some_queues_is_a_large_look(tmp_path: Path) -> None:
    """It searches for each limit of a part in each queue, so the number of queues alone does not say what it costs."""
    root = tmp_path / "long"
    with MessageStore.open(root, SMALL) as store:
        for version in range(30):
            many = columns(bodies(40, 400), queue_ids=list(range(20)) * 2)
            store.append_batch(many, BatchRequest("job", version, write_queue_nums=20))
    stored = Stored("long", str(root))
    segments = stored.rows("segments")[0]
    assert kept.LARGE_COUNT / 20 < len(segments) < 64
    assert room._parts(stored, segments, stored.report())[1] >= 20 * len(segments) >= kept.LARGE_COUNT


def test_full_segments_are_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not change while the log grows; what the page shows is what a new dashboard finds."""
    root, found = tmp_path / "long", list[int]()

    def append(version: int) -> None:
        with MessageStore.open(root, SMALL) as store:
            many = columns(bodies(40, 400), queue_ids=list(range(20)) * 2)
            store.append_batch(many, BatchRequest("job", version, write_queue_nums=20))

    def stood_at(path: str, queues: object, places: list[int], *more: object) -> object:
        found[:] = places
        return real(path, queues, places, *more)  # type: ignore[arg-type]

    for version in range(10):
        append(version)
    real = operator.stood_at
    monkeypatch.setattr(operator, "stood_at", stood_at)
    stored = Stored("long", str(root))
    before = room.log(stored, {})["parts"]["parts"]
    assert len(found) == len(before) + 1
    append(10)
    after = room.log(stored, {})["parts"]["parts"]
    assert len(found) <= len(after) - len(before) + 3 < len(after)
    assert after == room.log(Stored("long", str(root)), {})["parts"]["parts"]


# ---- what Spark did


def letters(reasons: list[tuple[str, str]]) -> MessageColumns:
    """Dead letters as Spark's sink writes them."""
    rows = {
        "body": pa.array(bodies(len(reasons)), pa.binary()),
        "queue_id": pa.array([0] * len(reasons), pa.int32()),
        "properties": pa.array(
            [[("dlqReason", reason), ("dlqField", name)] for name, reason in reasons], pa.map_(pa.string(), pa.string())
        ),
    }
    return MessageColumns.from_arrow(pa.record_batch(rows), topic="refused")


def test_dead_letters_by_reason_and_field_lead_to_their_rows(client: Client, root: Path) -> None:
    long, bad = ("keys", "keys are longer than allowed"), ("topic", "<b>the topic</b> has a blank")
    with MessageStore.open(root, SMALL) as store:
        store.append_batch([columns(bodies(3)), letters([long, bad, long])], BatchRequest("job", 0))
        assert store.put_message(Message("%DLQ%g", b"x", queue_id=0)).is_ok
    found = client("/api/v1/s/store/spark").json["letters"]
    assert [(row["topic"], row["field"], row["count"]) for row in found] == [
        ("%DLQ%g", "", 1),
        ("refused", "keys", 2),
        ("refused", "topic", 1),
    ]
    assert [place["queueOffset"] for place in found[2]["places"]] == [1]
    shown = page(client, "/s/store/spark")
    assert "<b>the topic</b> has a blank" in shown.words
    assert "/s/store/message?topic=refused&queue=0&offset=1" in shown.links


def test_dead_letters_of_a_batch_without_an_app_are_shown_too(client: Client, root: Path) -> None:
    """As `df.write` leaves them: the journal of batches does not name their topic, but the commit has counted it."""
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(letters([("keys", "keys are longer than allowed")]))
    count(ClockDisk(now_ms()), str(root / "spark"), **{f"{DEAD_LETTERS}refused": 1})
    shown = page(client, "/s/store/spark")
    assert "refused got 1 message in the last 24 hours" in shown.words
    assert "No dead letter is in the store" not in shown.words
    assert "/s/store/message?topic=refused&queue=0&offset=0" in shown.links


def test_dead_letters_are_read_again_only_where_something_has_changed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, bad = ("keys", "keys are longer than allowed"), ("topic", "the topic has a blank")
    client, read, really = Client(app([root])), list[str](), work._letters_of

    def letters_of(stored: Stored, store: Any, queues: list[dict[str, Any]], *rest: Any, **given: Any) -> Any:
        read.append(queues[0]["topic"])
        return really(stored, store, queues, *rest, **given)

    def found() -> dict[str, int]:
        read.clear()
        return {row["field"]: row["count"] for row in client("/api/v1/s/store/spark").json["letters"]}

    monkeypatch.setattr(work, "_letters_of", letters_of)
    with MessageStore.open(root, SMALL) as store:
        store.append_batch([columns(bodies(3)), letters([long, long])], BatchRequest("job", 0))
        assert (found(), sorted(read)) == ({"keys": 2}, ["refused", "t"])
        assert store.put_message(Message("other", b"x", queue_id=0)).is_ok
        assert (found(), read) == ({"keys": 2}, [])
        store.append_batch([letters([bad])], BatchRequest("job", 1))
        assert (found(), read) == ({"keys": 2, "topic": 1}, ["refused"])
        store.delete_topic("refused")
        store.append_batch([letters([bad, bad, bad])], BatchRequest("job", 2))
        assert (found(), read) == ({"topic": 3}, ["refused"]), "as many messages, and others"


def test_gaps_in_time_between_batches() -> None:
    times = [0, 1000, 2000, 3000, 400_000, 401_000]
    rows = [{"app": "job", "version": n, "storeTimestamp": at} for n, at in enumerate(times)]
    rows += [{"app": "slow", "version": n, "storeTimestamp": n * 100_000} for n in range(5)]
    rows += [{"app": "once", "version": 0, "storeTimestamp": 5}, {"app": "gone", "version": 0, "storeTimestamp": None}]
    (gap,) = work.gaps(rows[::-1])
    assert gap == {"app": "job", "fromVersion": 3, "toVersion": 4, "begin": 3000, "end": 400_000}


def test_a_gap_is_on_the_page(tmp_path: Path) -> None:
    root, clock = tmp_path / "gap", ClockDisk(now_ms() - 5 * HOUR_MS)
    with MessageStore.open(root, SMALL, disk=clock) as store:
        for version in range(6):
            store.append_batch(columns(bodies(2)), BatchRequest("job", version))
            clock.now_ms += 2 * HOUR_MS if version == 2 else 1000
    shown = page(Client(app([root])), "/s/gap/spark")
    assert "2 h" in shown.words and "Usually every" in shown.words
    (gap,) = Client(app([root]))("/api/v1/s/gap/spark").json["gaps"]
    assert (gap["fromVersion"], gap["toVersion"]) == (2, 3)


# ---- empty states


def test_what_is_not_proven_since_the_reboot_is_no_empty_topic(tmp_path: Path) -> None:
    root = tmp_path / "killed"
    root.mkdir()
    quiet = SMALL_ASYNC.replace(flush_interval_commit_log=HOUR_MS, flush_commit_log_thorough_interval=HOUR_MS)
    process = Process(root, quiet)
    process.batch(version=0, rows=6)
    process.batch(version=1, rows=6, flush=ASYNC_FLUSH)
    process.die()
    with another_boot():
        client = Client(app([root]))
        assert client("/api/v1/s/killed/status").json["unproven"] is not None
        stored = Stored("killed", str(root))
        from pyspark_messagestore.dashboard.looks import why_empty

        sentence = why_empty(stored, [{"messages": 0, "maxOffset": 0}])
    assert "not proven to be durable" in sentence and "messagestore recover" in sentence


def test_what_retention_deleted_is_said_with_its_time(tmp_path: Path) -> None:
    root, clock = tmp_path / "kept", ClockDisk(now_ms() - 3 * HOUR_MS)
    with MessageStore.open(root, SMALL, disk=clock) as store:
        for topic in ("gone", "there"):
            for body in bodies(40, 1000):
                assert store.put_message(Message(topic, body, queue_id=0)).is_ok
        assert store.delete_expired_files(before_offset=60_000).segments
    client = Client(app([root]))
    for address in ("topic?topic=gone", "messages?topic=gone", "recent?topic=gone"):
        words = page(client, f"/s/kept/{address}").words
        assert "Retention has deleted all 40 messages" in words and "those stored before 20" in words
    filtered = page(client, "/s/kept/recent?topic=there&tag=none").words
    assert "None of the messages passes the filter." in filtered and "of the log" in filtered


def test_a_folder_that_may_not_be_read_is_named(client: Client, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the answer of the system is made up."""

    def refuse(*_: object, **__: object) -> Any:
        raise PermissionError(13, "Permission denied", str(root / "spark" / "state"))

    monkeypatch.setattr(Stored, "opened", refuse)
    words = page(client, "/s/store/topics", 503).words
    assert f"{root}/spark/state: Permission denied" in words
    assert "Permission denied" in page(client, "/").words


def test_a_search_says_how_much_of_the_log_it_has_seen(client: Client, root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        for version in range(8):
            store.append_batch(columns(bodies(50, 200)), BatchRequest("more", version))
    for file in (root / "index").iterdir():
        file.unlink()
    found = client("/api/v1/s/store/search?q=nowhere&most=20000").json
    assert 0 < found["doneSize"] < found["logSize"] and found["goOn"] == found["doneSize"]
    further = client(f"/api/v1/s/store/search?q=nowhere&after={found['goOn']}").json
    assert further["doneSize"] == further["logSize"] and further["goOn"] is None
    assert client(f"/api/v1/s/store/search?q=x&most={257 << 20}").status == 400
    assert "Searched" in page(client, "/s/store/search?q=nowhere&most=20000").words


# ---- readers


def test_what_retention_has_deleted_is_before_no_message(tmp_path: Path) -> None:
    """It counts as lag, as in RocketMQ, and the pages say so; nobody can read it any more."""
    root = tmp_path / "kept"
    with MessageStore.open(root, SMALL) as store:
        for body in bodies(40, 1000):
            assert store.put_message(Message("t", body, queue_id=0)).is_ok
        publish_offsets(str(root), "g", {("t", 0): 3})
        folder = checkpoint(tmp_path / "query", [[offset(store.store_id, 2)], [offset(store.store_id, 5)]])
        assert store.delete_expired_files(before_offset=30_000, ignored_groups=["g"]).segments
        low = store.min_offset("t", 0)
    client = Client(app([root], [folder]))
    (row,) = client("/api/v1/s/kept/readers").json["groups"]
    found = client("/api/v1/s/kept/group?group=g").json
    (query,) = client("/api/v1/s/kept/readers").json["queries"]
    assert (row["lag"], row["deleted"]) == (found["lag"], found["deleted"]) == (37, low - 3)
    assert (query["lag"], query["deleted"]) == (35, low - 5)
    assert f"retention has deleted {low - 3} that were not read" in page(client, "/s/kept/group?group=g").words
    assert f"retention has deleted {low - 5} that were not read" in page(client, "/s/kept/readers").words
    assert f"37 ({low - 3} deleted)" in page(client, "/s/kept/readers").words
    readers = client(f"/api/v1/s/kept/message?topic=t&queue=0&offset={low + 2}").json["readers"]
    assert [(each["kind"], each["read"], each["before"]) for each in readers] == [
        ("group", False, 2),
        ("query", False, 2),
    ]


def test_a_group_for_which_nothing_waits_has_no_oldest_message(root: Path) -> None:
    """It had waited for 0 ms, also if retention had deleted all that the group had not read."""
    publish_offsets(str(root), "done", {("t", 0): 5, ("t", 1): 5})
    words = page(Client(app([root])), "/s/store/readers").words
    assert "done" in words and "0 ms" not in words


@pytest.mark.parametrize(
    ("view", "before"),
    [*(("figures", before) for before in range(4)), *(("segments", before) for before in range(3)), ("status", 0)],
)
def test_retention_beside_a_look_is_no_fault(
    root: Path, monkeypatch: pytest.MonkeyPatch, view: str, before: int
) -> None:
    """The first segment went between the look at the folder and one of the looks into files: /healthz said 503."""
    with MessageStore.open(root, SMALL) as store:
        for body in bodies(60, 1000):
            assert store.put_message(Message("t", body, queue_id=0)).is_ok
    head, late = CommitLog.head, [True, *[False] * before]

    def delete_first(log: CommitLog, physical_offset: int) -> Any:
        if late and late.pop():
            (root / "commitlog" / f"{log.min_offset:020d}").unlink()
            raise FileNotFoundError(2, "No such file or directory", str(root / "commitlog"))
        return head(log, physical_offset)

    monkeypatch.setattr(CommitLog, "head", delete_first)
    with contextlib.closing(LOCAL_STORES.reader(str(root), SMALL)) as reader:
        assert reader.view(view)[1] == []


def test_a_query_that_lost_messages_to_retention_is_a_finding(tmp_path: Path) -> None:
    """Only groups were: the page said "caught up" of a query that had lost all it had not read."""
    root = tmp_path / "kept"
    with MessageStore.open(root, SMALL) as store:
        for body in bodies(40, 1000):
            assert store.put_message(Message("t", body, queue_id=0)).is_ok
        folder = checkpoint(tmp_path / "query", [[offset(store.store_id, 5)]])
        assert store.delete_expired_files(before_offset=30_000).segments
        lost = store.min_offset("t", 0) - 5
    client = Client(app([root], [folder]))
    (finding,) = (each for each in client("/healthz").json["findings"] if each["rule"] == "lost-messages")
    assert f"the query of {folder} has not read {lost} messages that retention has deleted" in finding["sentence"]
    assert client("/healthz").status == 503
    assert f'topic="t"}} {float(lost)}' in "".join(
        line for line in client("/metrics").text.splitlines() if line.startswith("spark_query_deleted_messages")
    )


def test_the_curve_of_a_query_ends_with_its_lag(root: Path, tmp_path: Path) -> None:
    """It left out queues that came after the last plan; the sentence above it did not."""
    with MessageStore.open(root, SMALL) as store:
        folder = checkpoint(tmp_path / "query", [[offset(store.store_id, 2)], [offset(store.store_id, 4)]])
    (query,) = Client(app([root], [folder]))("/api/v1/s/store/readers").json["queries"]
    assert query["history"][-1]["lag"] == query["lag"] == 1 + 5


def test_both_sources_of_a_query_that_reads_a_topic_twice_are_behind(root: Path, tmp_path: Path) -> None:
    """As a join of a topic with itself does. The curve had one of them, and the sentence beside it both."""
    with MessageStore.open_read_only(root) as store:
        both = [offset(store.store_id, 2, 4), offset(store.store_id, 3, 5)]
        folder = checkpoint(tmp_path / "query", [both])
    (query,) = Client(app([root], [folder]))("/api/v1/s/store/readers").json["queries"]
    assert query["lag"] == query["history"][-1]["lag"] == 3 + 1 + 2


def test_a_query_whose_first_batch_is_not_done_is_a_reader(root: Path, tmp_path: Path) -> None:
    """The overview said that it is stuck, and the page of readers that no checkpoint was given."""
    with MessageStore.open_read_only(root) as store:
        folder = checkpoint(tmp_path / "query", [[offset(store.store_id, 2)]], committed=0)
    other = filled(tmp_path / "other", 4)
    client = Client(app([root, other], [folder]))
    assert "query-stuck" in [each["rule"] for each in client("/healthz").json["findings"]]
    words = page(client, "/s/store/readers").words
    assert str(folder) in words and "unknown: no batch of this query is done yet" in words
    assert "last batch that is done: none. Topics: t" in words and "0 messages, 0 B" not in words
    assert "has done a batch of it" in page(client, "/s/store/message?topic=t&queue=0&offset=1").words
    assert "No checkpoint of a query that reads this store" in page(client, "/s/other/readers").words


def test_a_query_is_asked_about_the_store_that_it_reads(root: Path, tmp_path: Path) -> None:
    """The metrics of two stores said that each query refuses the other store, which rings at night."""
    other = filled(tmp_path / "other", 4)
    with MessageStore.open_read_only(other) as store:
        folder = checkpoint(tmp_path / "query", [[offset(store.store_id, 1, 2)]])

    def refused(*roots: Path) -> dict[str, str]:
        text = Client(app(roots, [folder]))("/metrics").text
        return dict(re.findall(r'spark_query_refused\{.*store="([^"]*)"\} (\S+)', text))

    assert refused(root, other) == {str(other): "0.0"}
    assert refused(root) == {str(root): "1.0"}, "the store that it reads is not there: this one is in its place"
    found = Client(app([root], [folder]))
    assert [each["rule"] for each in found("/healthz").json["findings"]] == ["query-refuses"]
    assert f"{folder}" in page(found, "/s/store/readers").words and "it reads store" in page(found, "/").words
    assert "caught up" not in page(found, "/s/store/readers").words
    both = Client(app([root, other], [folder]))
    assert both("/healthz").json["findings"] == []
    assert "No checkpoint of a query that reads this store" in page(both, "/s/store/readers").words

    other.rename(other.with_name("away"))  # nobody knows whether the query reads it
    assert refused(root, other) == {}
    assert [each["store"] for each in Client(app([root, other], [folder]))("/healthz").json["findings"]] == ["other"]


def test_a_query_does_not_read_the_copy_of_its_store_that_is_shown_beside_it(root: Path, tmp_path: Path) -> None:
    """The copy, restored from a backup, has the id of the store as an ancestor. That the query would refuse it, as it
    has read more than the copy has, was a fault of both; and messages of the copy were read by it.
    """
    back_up(str(root), str(tmp_path / "backup"))
    restore(str(tmp_path / "backup"), str(tmp_path / "copy"), config=SMALL)
    with MessageStore.open(root, SMALL) as store:
        for number in range(3):
            assert store.put_message(Message("t", b"%d" % number, queue_id=0)).is_ok
        folder = checkpoint(tmp_path / "query", [[offset(store.store_id, 7, 5)]])

    both = Client(app([tmp_path / "copy", root], [folder]))
    assert both("/healthz").json == {"ok": True, "findings": []}
    readers = {
        name: both(f"/api/v1/s/{name}/message?topic=t&queue=0&offset=4").json["readers"] for name in ("store", "copy")
    }
    assert [each["read"] for each in readers["store"]] == [True] and readers["copy"] == []
    assert [len(both(f"/api/v1/s/{name}/readers").json["queries"]) for name in ("store", "copy")] == [1, 0]
    refused = re.findall(r'spark_query_refused\{.*store="([^"]*)"\} (\S+)', both("/metrics").text)
    assert refused == [(str(root), "0.0")]

    alone = Client(app([tmp_path / "copy"], [folder]))
    assert [each["rule"] for each in alone("/healthz").json["findings"]] == ["query-refuses"]


def test_a_place_beyond_the_end_of_its_queue_says_nothing_of_the_messages_there(root: Path) -> None:
    """The topic was deleted and made again, or the store is an older copy."""
    publish_offsets(str(root), "g", {("t", 0): 100}, own=True)
    client = Client(app([root]))
    (reader,) = client("/api/v1/s/store/message?topic=t&queue=0&offset=2").json["readers"]
    assert (reader["reader"], reader["read"], reader["before"]) == ("g", False, 2)


def test_groups_are_sorted_and_paged_on_the_server(root: Path) -> None:
    for number in range(3):
        publish_offsets(str(root), f"group-{number}", {("t", 0): number, ("t", 1): 0})
    client = Client(app([root]))
    found = client("/api/v1/s/store/readers").json
    assert [(row["group"], row["lag"]) for row in found["groups"]] == [("group-0", 10), ("group-1", 9), ("group-2", 8)]
    assert all(row["lagBytes"] > 0 and row["latencyMs"] >= 0 for row in found["groups"])
    by_name = client("/api/v1/s/store/readers?sort=group&start=1").json
    assert [row["group"] for row in by_name["groups"]] == ["group-1", "group-2"]
    assert (by_name["groupCount"], by_name["next"]) == (3, None)
    assert client("/api/v1/s/store/readers?sort=colour").status == 400


def test_a_table_of_very_many_queues_goes_on(tmp_path: Path) -> None:
    root, count = tmp_path / "many", MOST_COUNT + 20
    with MessageStore.open(root, SMALL) as store:
        many = columns(bodies(count), queue_ids=list(range(count)))
        store.append_batch(many, BatchRequest("job", 0, write_queue_nums=count))
    client = Client(app([root]))
    first = client("/api/v1/s/many/topic?topic=t").json
    assert (len(first["queues"]), first["queueCount"], first["next"]) == (MOST_COUNT, count, MOST_COUNT)
    rest = client(f"/api/v1/s/many/topic?topic=t&start={MOST_COUNT}").json
    assert [row["queueId"] for row in rest["queues"]] == list(range(MOST_COUNT, count))


def test_whether_a_group_catches_up_is_seen_from_when_somebody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Samples()
    assert samples.outlook("g") == ""
    for number, lag in enumerate((100, 80, 60)):
        samples.add(number * 10_000, [{"group": "g", "lag": lag, "deleted": 0}])
    assert samples.outlook("g") == "caught up in about 30 s"


# ---- curves

STATIC = Path(kept.__file__).parent / "static"


def test_the_script_for_curves_is_the_one_that_was_published() -> None:
    """`SHA256SUMS` has what the package of uPlot 1.6.32 contains; its licence is beside it."""
    folder = STATIC / "uplot"
    sums = dict(line.split()[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() | {"SHA256SUMS"} == {path.name for path in folder.iterdir()}
    for name, expected in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected, name
    assert sums["uPlot.iife.min.js"].startswith("19c8d4c6ad88929a") and "MIT" in (folder / "LICENSE").read_text()


def test_script_and_style_stay_small(client: Client) -> None:
    """Compressed, as a proxy sends them, they have 80 KB at most."""
    files = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".css")]
    assert {path.name for path in files} == {"page.js", "style.css", "uPlot.iife.min.js", "uPlot.min.css"}
    assert sum(len(gzip.compress(path.read_bytes(), 9)) for path in files) < 80_000
    for path in files:
        assert client(f"/static/{path.relative_to(STATIC)}").headers["content-length"] == str(path.stat().st_size)


def test_a_curve_is_a_table_too(client: Client) -> None:
    """Bars that the server draws, and a table with the same values: without a script both stay."""
    text = client("/s/store/topic?topic=t").text
    rate = client("/api/v1/s/store/topic?topic=t").json["rate"]
    assert text.count("<tr data-time=") == len(rate["counts"]) == 96 and sum(rate["counts"]) == 10
    assert text.count('<svg class="curve"') == 1


# ---- what is kept


def test_a_page_shows_what_was_written_since_the_last_one(client: Client, root: Path, tmp_path: Path) -> None:
    """Whatever a look keeps, it is dropped when the store or a checkpoint changes."""
    with MessageStore.open_read_only(root) as store:
        store_id = store.store_id
    query = checkpoint(tmp_path / "query", [[offset(store_id, 1, 1)]])
    client = Client(app([root], [query]))

    def seen() -> tuple[int, int, int, int]:
        topics = client("/api/v1/s/store/topics").json["rows"]
        readers = client("/api/v1/s/store/readers").json
        batches = client("/api/v1/s/store/spark").json["batchCount"]
        messages = sum(row["messages"] for row in topics)
        return messages, readers["queries"][0]["lag"], len(readers["groups"]), batches

    assert seen() == seen() == (10, 8, 0, 0)
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(4)), BatchRequest("job", 0))
        assert seen() == (14, 12, 0, 1)
        assert store.put_message(Message("t", b"x", queue_id=0)).is_ok
        assert seen() == (15, 13, 0, 1)
    publish_offsets(str(root), "g", {("t", 0): 1})
    assert seen() == (15, 13, 1, 1)
    checkpoint(tmp_path / "later", [[offset(store_id, 1, 1)], [offset(store_id, 5, 5)]])
    for name in ("offsets", "commits"):
        (tmp_path / "later" / name / "1").rename(query / name / "1")
    assert seen() == (15, 5, 1, 1)


def test_nothing_is_looked_for_twice_while_nothing_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, opened = Client(app([root])), 0
    really = Stored.opened

    def count(stored: Stored) -> Any:
        nonlocal opened
        opened += 1
        return really(stored)

    monkeypatch.setattr(Stored, "opened", count)
    for look in ("status", "topics", "readers", "log"):
        client(f"/s/store/{look}")
    before = opened
    monkeypatch.setattr(kept, "KEPT_S", 3600.0)
    for look in ("status", "topics", "readers", "log"):
        client(f"/s/store/{look}")
    assert opened == before


def test_a_very_large_look_is_shown_while_the_next_one_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "AGAIN_S", 0.0)
    found, store = iter(range(100)), kept.Kept(str(root))

    def look() -> tuple[int, int]:
        return next(found), kept.LARGE_COUNT

    assert (store.get("x", look), store.age_s) == (0, 0)
    with MessageStore.open(root, SMALL) as written:
        assert written.put_message(Message("t", b"x", queue_id=0)).is_ok
    assert store.get("x", look) == 0  # and a thread looks again
    assert store.age_s > 0
    while store.get("x", look) == 0:
        time.sleep(0.01)
    root.rename(root.with_name("away"))
    filled(root, 3)
    store.ask()
    now = store.get("x", look)
    assert store.age_s == 0
    assert now == next(found) - 1, "another store at the path has nothing to do with the last look"


def test_a_broker_at_work_is_asked_every_time(root: Path) -> None:
    """Its writes leave no trace in small files."""
    (root / "abort").write_bytes(b"")
    found, store = iter(range(10)), kept.Kept(str(root))
    assert [store.get("x", lambda: (next(found), 1)) for _ in range(3)] == [0, 1, 2]


def test_a_filter_of_an_address_is_text(client: Client) -> None:
    """`urllib` and the templates agree on what a link means."""
    name = "a&b=c <i>"
    shown = page(client, "/s/store/topics?" + urllib.parse.urlencode({"contains": name}))
    assert "No topic has such a name." in shown.words and "i" not in shown.elements
