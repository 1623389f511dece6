"""The dashboard: each page answers its question, nothing on a page is markup of a message's, and nothing is written."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
import urllib.parse
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from checkpoints import checkpoint, offset
from cli_runs import objects, run
from dashboard_client import Client, Page, crawl, page
from messagestore import BatchRequest, ConfigError, Message, MessageStore
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.disk import Disk
from messagestore.files.store_root import no_access
from pyspark_messagestore.checkpoint import spark_checkpoint
from pyspark_messagestore.dashboard import app, kept, looks, room, stored
from pyspark_messagestore.dashboard.guard import MOST_AT_ONCE, Guard
from pyspark_messagestore.dashboard.looks import LOOKS, outlook
from pyspark_messagestore.monitoring import health
from pyspark_messagestore.monitoring.history import LagPoint
from small import SMALL, bodies, columns, filled

TOKEN = "a-token-of-enough-length"
HOSTILE = "<script>alert(1)</script>{{ 7*7 }}\u202e\0\"'><img src=x onerror=alert(2)>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten messages of a batch in t/0 and t/1, one of a put in t/0, and a group that has read three of queue 0."""
    root = filled(tmp_path / "store", 10)
    with MessageStore.open(root, SMALL.replace(stamp_uniq_key=True)) as store:
        store.append_batch(columns(bodies(4), key="late"), BatchRequest(app_id="job", version=7))
        put = Message("orders", b'{"price": 12, "to": ["a"]}', queue_id=0, keys=("o-1",), properties={"colour": "red"})
        assert store.put_message(put).is_ok
    publish_offsets(root, "billing", {("t", 0): 3}, own=True)
    return root


@pytest.fixture
def client(root: Path, tmp_path: Path) -> Client:
    with stored.Stored("s", str(root)).opened() as store:
        store_id = store.describe([]).store_id
    folder = checkpoint(tmp_path / "query", [[offset(store_id, 1, 1)], [offset(store_id, 5, 2)]])
    return Client(app([root], [folder]))


# ---- the questions


def test_is_it_well(client: Client, root: Path) -> None:
    assert "Nothing is wrong." in page(client, "/").words
    (root / "config" / "consumerOffset.json").write_text("{")
    words = page(client, "/").words
    assert "consumerOffset.json" in words and "messagestore verify" in words
    assert client("/healthz").status == 503
    findings = client("/healthz").json["findings"]
    assert [each["rule"] for each in findings if each["severity"] == "fault"] == ["unreadable"]


def test_health_is_200_for_a_store_that_is_well(root: Path) -> None:
    answer = Client(app([root]))("/healthz")
    assert (answer.status, answer.json) == (200, {"ok": True, "findings": []})


def test_the_worst_store_comes_first(root: Path, tmp_path: Path) -> None:
    ill = filled(tmp_path / "ill", 3)
    (ill / "config" / "consumerOffset.json").write_text("{")
    reports = Client(app([root, ill, tmp_path / "gone"]))("/api/v1/stores").json["stores"]
    assert [report["name"] for report in reports] == ["gone", "ill", "store"]
    assert (
        "found no message store" in reports[0]["findings"][0]["sentence"].lower()
        or "no" in reports[0]["findings"][0]["sentence"]
    )


def test_stores_of_one_name_take_no_name_of_another_store(tmp_path: Path) -> None:
    names = ["one/store-3", "one/shop", "two/shop", "three/shop", "one/store-4"]
    roots = [filled(tmp_path / name, number) for number, name in enumerate(names, 1)]
    reports = Client(app(roots))("/api/v1/stores").json["stores"]
    assert {report["name"]: report["root"] for report in reports} == {
        "store-3": str(roots[0]),
        "shop": str(roots[1]),
        "store-5": str(roots[2]),
        "store-6": str(roots[3]),
        "store-4": str(roots[4]),
    }


def test_a_store_that_is_given_twice_is_shown_once(root: Path) -> None:
    client = Client(app([root, f"{root}/"]))
    assert [report["root"] for report in client("/api/v1/stores").json["stores"]] == [str(root)]
    samples = [line for line in client("/metrics").text.splitlines() if line.startswith("spark_store_up{")]
    assert len(samples) == 1


def test_staged_files_are_told_in_words(root: Path) -> None:
    page = f"/s/{root.name}/spark"
    assert "<dt>Staged files</dt><dd>0</dd>" in Client(app([root]))(page).text
    left = root / "spark" / "staging"
    left.mkdir(parents=True, exist_ok=True)
    (left / "left-behind").write_bytes(bytes(3000))
    assert "<dt>Staged files</dt><dd>1 with 2.9 KiB, the oldest of <time" in Client(app([root]))(page).text


def test_a_checkpoint_that_cannot_be_read_is_no_damage_of_the_store(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy was to check every byte of the store. Root may read everything, so the system's refusal is made up."""
    missing, secret = tmp_path / "missing", checkpoint(tmp_path / "secret", [[offset("", 1)]])
    opened = spark_checkpoint.Folder.open

    def refuse(path: str) -> Any:
        if path == str(secret):
            raise PermissionError(13, "Permission denied", path)
        return opened(path)

    monkeypatch.setattr(spark_checkpoint.Folder, "open", refuse)
    client = Client(app([root], [missing, secret]))
    faults = [each for each in client("/api/v1/s/store/status").json["findings"] if each["severity"] == "fault"]
    assert [each["sentence"].partition(" (")[0] for each in faults] == [
        f"{missing}: found no checkpoint of a streaming query",
        f"{secret}: Permission denied",
    ]
    for each in faults:
        assert "--checkpoint" in each["remedy"] and "verify" not in each["remedy"]
    assert str(secret) in page(client, "/s/store/readers").words
    assert str(secret) not in page(client, "/s/store/spark").words


def test_a_queue_that_may_not_be_read_is_missing_where_it_is_needed_only(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly every page was refused. Root may read everything, so the system's refusal is made up."""
    with MessageStore.open(root, SMALL) as store:
        assert store.put_message(Message("u", b"late", queue_id=1, keys=("k9",))).is_ok
        folder = checkpoint(tmp_path / "query", [[offset(store.store_id, 2, 0, topic="u")]])
    publish_offsets(root, "of-u", {("u", 1): 0}, own=True)
    opened, secret = Disk.open, str(root / "consumequeue" / "u" / "1" / "")

    def refuse(disk: Disk, path: str | Path, *, writable: bool = False) -> Any:
        if str(path).startswith(secret):
            raise no_access(PermissionError(13, "Permission denied", str(path)), str(path))
        return opened(disk, path, writable=writable)

    monkeypatch.setattr(Disk, "open", refuse)
    client = Client(app([root], [folder]))
    for look in ("status", "topics", "topic?topic=u", "readers", "group?group=of-u", "log", "search?q=-1h"):
        assert f"{secret}/00000000000000000000: Permission denied" in page(client, f"/s/store/{look}").words, look
    for look in (
        "topic?topic=t",
        "recent?topic=t",
        "message?topic=t&queue=1&offset=1",
        "search?q=k9",
        "search?q=o-1",
        "spark",
    ):
        page(client, f"/s/store/{look}")
    assert "u/1 @0" in page(client, "/s/store/search?q=k9").words
    assert "topic was deleted" not in page(client, "/s/store/search?q=k9").words
    for look in ("recent?topic=u", "messages?topic=u&queue=1", "message?topic=u&queue=1"):
        assert "Permission denied" in page(client, f"/s/store/{look}", 503).words
    (fault,) = [each for each in client("/healthz").json["findings"] if each["severity"] == "fault"]
    assert fault["rule"] == "unreadable" and "Permission denied" in fault["sentence"]
    assert client("/api/v1/s/store/topics").json["rows"] != []


def test_a_query_that_is_stuck_is_a_fault_of_the_store_that_it_reads(root: Path, tmp_path: Path) -> None:
    with stored.Stored("s", str(root)).opened() as store:
        store_id = store.describe([]).store_id
    stuck = checkpoint(tmp_path / "stuck", [[offset(store_id, 1, 1)], [offset(store_id, 2, 2)]], committed=1)
    reports = Client(app([filled(tmp_path / "other", 3), root], [stuck]))("/api/v1/stores").json["stores"]
    rules = [(report["name"], [each["rule"] for each in report["findings"]]) for report in reports]
    assert rules[1] == ("other", []) and "query-stuck" in rules[0][1]


@pytest.mark.parametrize(
    "text",
    ["o-1", "orders/0 @0", "orders/0@0", "the message id", "the unique key", "the offset message id"],
    ids=lambda text: text.replace("/", "-"),
)
def test_where_is_my_message(client: Client, root: Path, text: str) -> None:
    """One field takes what people have at hand. The hit leads to the message: two clicks from the overview."""
    (message,) = objects(run("get", root, "orders", "--json"))
    if text == "the message id":
        text = message["msgId"]
    elif text == "the unique key":
        text = message["systemProperties"]["UNIQ_KEY"]
    elif text == "the offset message id":
        with MessageStore.open_read_only(root) as store:
            text = store.get_message("orders", 0, 0).messages[0].offset_message_id
    to = client("/search?" + urllib.parse.urlencode({"store": "store", "q": text}))
    assert to.status == 303
    found = page(client, to.headers["location"])
    (link,) = {link for link in found.links if "/message?" in link}
    words = page(client, link).words
    assert "price" in words and "red" in words and "o-1" in words and message["msgId"] in words


def test_a_time_leads_to_the_first_messages_behind_it(client: Client, root: Path) -> None:
    found = client("/api/v1/s/store/search?q=2020-01-01T00:00:00Z").json
    assert [(row["topic"], row["queueId"], row["offset"]) for row in found["places"]] == [
        ("t", 0, 0),
        ("t", 1, 0),
        ("orders", 0, 0),
    ]
    assert "No message was stored at" in page(client, "/s/store/search?q=2099-01-01").words


@pytest.mark.parametrize("text", ["-10m", "2026-11-28", "2026-11-28-0007", "2026-13-45", "12:30"])
def test_a_key_that_looks_like_a_time_is_found(client: Client, root: Path, text: str) -> None:
    """It was taken for a time only, or refused as a wrong one: no search found its messages."""
    with MessageStore.open(root, SMALL) as store:
        assert store.put_message(Message("dated", b"x", queue_id=0, keys=(text,))).is_ok
    found = client(f"/api/v1/s/store/search?q={text}").json
    assert [each["topic"] for each in found["messages"]] == ["dated"]
    (row,) = objects(run(*shlex.split(found["command"])[1:], "--json"))
    assert row["keys"] == [text]
    assert "/s/store/message?topic=dated&queue=0&offset=0" in page(client, f"/s/store/search?q={text}").links
    if found["kind"] == "time" and text != "2026-11-28":
        assert found["places"] or found["note"]
    masked = Client(app([root], masks=["KEYS"]))(f"/api/v1/s/store/search?q={text}")
    assert masked.status == 400 or not masked.json["messages"]


def test_a_search_by_time_looks_for_a_key_in_little_of_the_log(
    client: Client, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(200, 200)), BatchRequest("more", 0))
        assert store.put_message(Message("dated", b"x", queue_id=0, keys=("-10m",))).is_ok
    for file in (root / "index").iterdir():
        file.unlink()
    monkeypatch.setattr(looks, "RELATED_SIZE", 4096)
    found = client("/api/v1/s/store/search?q=-10m").json
    assert (found["kind"], found["messages"]) == ("time", []) and found["places"] and found["goOn"]
    (link,) = {link for link in page(client, "/s/store/search?q=-10m").links if "after=" in link}
    assert "dated/0 @0" in page(client, link).words


def test_a_search_by_time_in_very_many_queues_goes_on(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It showed the first 500, and there was no way to the others."""
    monkeypatch.setattr(looks, "MOST_COUNT", 2)
    first = page(client, "/s/store/search?q=-1h")
    assert "1 to 2 of 3 queues" in first.words and "t/0 @0" in first.words and "orders/0 @0" not in first.words
    (link,) = {link for link in first.links if "start=2" in link}
    second = page(client, link)
    assert "3 to 3 of 3 queues" in second.words and "orders/0 @0" in second.words and "t/0 @0" not in second.words
    assert not [link for link in second.links if "start=4" in link]


def test_a_search_that_finds_nothing_says_so(client: Client) -> None:
    assert "No message has this key" in page(client, "/s/store/search?q=nowhere").words


def test_a_search_without_an_index_stops_and_goes_on(
    client: Client, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a log that no index covers, each click reads a part; the address has the place to go on from."""
    with MessageStore.open(root, SMALL) as store:
        for number in range(12):
            store.append_batch(
                columns(bodies(50, 200), key=f"more{number}-"), BatchRequest(app_id="more", version=number)
            )
        last = Message("orders", b"x", queue_id=0, keys=("needle",))
        assert store.put_message(last).is_ok
    for file in (root / "index").iterdir():
        file.unlink()
    monkeypatch.setattr(looks, "SEARCH_SIZE", 20_000)
    address, clicks = "/s/store/search?q=needle", 0
    while True:
        found, clicks = page(client, address), clicks + 1
        if any("/message?" in link for link in found.links):
            break
        assert "so far" in found.words
        (address,) = {link for link in found.links if "after=" in link}
    assert clicks > 3
    assert page(client, "/s/store/search?q=needle&after=5", 400).words.count("no record begins at 5") == 1


def test_a_search_in_the_store_of_a_broker_with_other_settings(tmp_path: Path) -> None:
    """Its index files have another size, and the dashboard cannot be told the settings: the log is searched instead."""
    root = tmp_path / "store"
    with zipfile.ZipFile(Path(__file__).parents[2] / "golden" / "plain-5.3.3.zip") as archive:
        archive.extractall(root)
    client = Client(app([root]))
    listed = client("/api/v1/s/store/recent?topic=plain").json["messages"]
    key = next(each["systemProperties"]["UNIQ_KEY"] for each in listed if "UNIQ_KEY" in each["systemProperties"])
    shown = page(client, f"/s/store/search?q={key}")
    assert "without the index" in shown.words and "Searched" in shown.words
    (link,) = {each for each in shown.links if "/message?" in each}
    words = page(client, link).words
    assert "without the index" in words and "is not known" not in words
    assert client("/api/v1/s/store/search?q=nowhere").json["goOn"] is None


def test_who_has_read_a_message(client: Client) -> None:
    """The group has read up to 3 of t/0, and the query up to 5."""
    readers = {
        each["kind"]: each for each in client("/api/v1/s/store/message?topic=t&queue=0&offset=2").json["readers"]
    }
    assert (readers["group"]["read"], readers["query"]["read"]) == (True, True)
    readers = {
        each["kind"]: each for each in client("/api/v1/s/store/message?topic=t&queue=0&offset=3").json["readers"]
    }
    assert (readers["group"]["read"], readers["group"]["before"], readers["query"]["read"]) == (False, 0, True)
    readers = {
        each["kind"]: each for each in client("/api/v1/s/store/message?topic=t&queue=0&offset=6").json["readers"]
    }
    assert [(readers[kind]["read"], readers[kind]["before"]) for kind in ("group", "query")] == [(False, 3), (False, 1)]
    assert "no; 3 messages before it" in page(client, "/s/store/message?topic=t&queue=0&offset=6").words


def test_a_message_knows_its_neighbours_and_its_batch(client: Client) -> None:
    found = client("/api/v1/s/store/message?topic=t&queue=0&offset=5").json
    assert (found["previous"], found["next"]) == (4, 6)
    assert (found["batch"]["app"], found["batch"]["version"]) == ("job", 7)
    assert found["nextInLog"] == {"topic": "t", "queueId": 0, "queueOffset": 6, "inQueue": True}
    assert "Before it in the log: t/1 @3" in page(client, "/s/store/message?topic=t&queue=0&offset=4").words

    # Ten puts in two queues by turns.
    places = [(number % 2, number // 2) for number in range(10)]
    for (before, place), behind in zip(pairwise([None, *places]), [*places[1:], None], strict=True):
        queue_id, offset = place or (0, 0)
        found = client(f"/api/v1/s/store/message?topic=t&queue={queue_id}&offset={offset}").json
        for name, neighbour in (("previousInLog", before), ("nextInLog", behind)):
            if neighbour is not None:
                assert (found[name]["queueId"], found[name]["queueOffset"]) == neighbour
        assert before is not None or found["previousInLog"] is None
    last = client("/api/v1/s/store/message?topic=orders&queue=0&offset=0").json
    assert (last["previous"], last["next"], last["nextInLog"], last["batch"]) == (None, None, None, None)


def test_a_hit_of_a_deleted_topic_leads_to_no_message_of_the_one_that_was_made_again(tmp_path: Path) -> None:
    root = tmp_path / "again"
    with MessageStore.open(root, SMALL.replace(stamp_uniq_key=True)) as store:
        assert store.put_message(Message("stays", b"before", queue_id=0)).is_ok
        old = store.put_message(Message("t", b"old", queue_id=0, keys=("k",)))
        unique = store.get_message("t", 0, 0).messages[0].unique_key
        store.delete_topic("t")
        assert store.put_message(Message("t", b"new", queue_id=0, keys=("other",))).is_ok
        assert store.put_message(Message("t", b"newer", queue_id=0, keys=("k",))).is_ok
    client = Client(app([root]))

    def hits(text: str) -> list[tuple[str, bool]]:
        found = client("/api/v1/s/again/search?" + urllib.parse.urlencode({"q": text})).json["messages"]
        return [(each["body"], each["inQueue"]) for each in found]

    assert sorted(hits("k")) == [("newer", True), ("old", False)]
    assert hits(unique) == hits(old.message_id) == [("old", False)]
    shown = page(client, f"/s/again/search?q={old.message_id}")
    assert "t/0 @0, in its queue no more" in shown.words
    assert not any("offset=0" in link for link in shown.links)
    before = page(client, "/s/again/message?topic=stays&queue=0&offset=0")
    assert "After it in the log: t/0 @0, in its queue no more" in before.words
    assert not any("topic=t&" in link for link in before.links)


def test_a_hit_in_a_queue_whose_file_is_missing_is_of_no_deleted_topic(client: Client, root: Path) -> None:
    (file,) = (root / "consumequeue" / "orders" / "0").iterdir()
    file.unlink()
    found = page(client, "/s/store/search?q=o-1")
    assert "topic was deleted" not in found.words
    assert "found no file" in page(client, "/s/store/message?topic=orders&queue=0&offset=0", 503).words


def test_a_message_is_shown_though_the_one_behind_it_is_damaged(client: Client, root: Path) -> None:
    last = client("/api/v1/s/store/message?topic=orders&queue=0&offset=0").json["message"]["physicalOffset"]
    log = root / "commitlog" / "00000000000000000000"
    with log.open("r+b") as file:
        file.seek(last + 84 + 4 + len(b'{"price": 12, "to": ["a"]}'))
        file.write(b"\1")  # the size of its topic
    found = client("/api/v1/s/store/message?topic=t&queue=1&offset=6").json
    assert (found["message"]["keys"], found["nextInLog"]) == (["late3"], None)
    assert f"its neighbours in the log cannot be read: {log}: offset {last}" in str(found["faults"])


def test_a_form_keeps_what_was_typed_as_it_is(client: Client) -> None:
    """Elsewhere marks of direction are written out. A form that sent that again would ask for another text."""
    text = "\u202e<b>\"'"
    address = "/s/store/recent?" + urllib.parse.urlencode({"topic": "t", "tag": text, "text": text})
    values = [value for name, value in page(client, address).attributes if name == "value"]
    assert values.count(text) == 2


def test_who_is_behind(client: Client) -> None:
    found = client("/api/v1/s/store/readers").json
    (query,) = found["queries"]
    assert (query["lag"], query["batchId"]) == ((7 - 5) + (7 - 2), 1)
    assert [(point["batchId"], point["lag"]) for point in query["history"]] == [(1, 0), (None, 7)]
    words = page(client, "/s/store/readers").words
    assert "billing" in words and "7 messages" in words
    assert "3" in page(client, "/s/store/group?group=billing").words
    assert "has no offsets" in page(client, "/s/store/group?group=nobody", 400).words


def test_the_lag_of_a_group_is_sampled_whenever_somebody_looks(
    client: Client, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "SAMPLE_MS", 0)
    assert client("/api/v1/s/store/readers").status == 200
    publish_offsets(root, "billing", {("t", 0): 5}, own=True)
    history = client("/api/v1/s/store/group?group=billing").json["history"]
    assert [point["lag"] for point in history][-2:] == [7 + 7 - 3, 7 + 7 - 5]
    assert "since" in page(client, "/s/store/group?group=billing").words


def test_a_group_that_falls_behind_while_somebody_looks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets of a group have no past; the dashboard has what it saw. There is no finding while the group catches up."""
    monkeypatch.setattr(health, "MANY", 5)
    monkeypatch.setattr(health, "GROWS_MS", 1)
    monkeypatch.setattr(stored, "SAMPLE_MS", 0)
    monkeypatch.setattr(kept, "KEPT_S", 0.0)
    client = Client(app([root]))

    def sentences() -> list[str]:
        begin_ns = time.time_ns()
        while time.time_ns() - begin_ns < 2_000_000:  # points of the curve are a millisecond apart
            time.sleep(0.001)
        findings = client("/api/v1/s/store/status").json["findings"]
        return [each["sentence"] for each in findings if each["rule"] == "lag-grows"]

    publish_offsets(root, "billing", {("t", 0): 0, ("t", 1): 0}, own=True)
    assert sentences() == sentences() == []
    with MessageStore.open(root, SMALL) as store:
        assert store.put_message(Message("t", b"more", queue_id=0)).is_ok
    (sentence,) = sentences()
    assert re.search(r"group billing falls behind: 15 messages wait; .* ago, 14 did", sentence), sentence
    publish_offsets(root, "billing", {("t", 0): 3, ("t", 1): 0}, own=True)
    assert sentences() == []


def test_the_day_on_which_the_disk_is_full(client: Client) -> None:
    figures = {"nowMs": 1_000_000, "diskFree": 5_000, "growth": {"bytes": 1_000, "ms": 600_000}}
    assert room.full_at(figures) == 1_000_000 + 5 * 600_000
    assert room.full_at(figures | {"growth": {"bytes": 100, "ms": 59_000}}) is None  # a store that was made just now
    assert room.full_at(figures | {"growth": None}) is None
    assert room.full_at(figures | {"growth": {"bytes": 0, "ms": 600_000}}) is None
    assert room.full_at(figures | {"diskFree": 10**14}) is None  # in centuries
    assert "are free" in page(client, "/s/store/log").words


@pytest.mark.parametrize(
    ("lags", "words"),
    [
        ([], "unknown: no batch of this query is done yet"),
        ([5, 0], "caught up"),
        ([5], "5 messages behind"),
        ([100, 90, 80], "caught up in about 8 s"),
        ([0, 1200], "falls behind by 1,200 a second"),
        ([7, 7, 7], "stays 7 messages behind"),
        ([1_000_000, 999_000], "caught up in about 17 min"),
    ],
)
def test_a_reader_catches_up_or_falls_behind(lags: list[int], words: str) -> None:
    assert outlook([LagPoint(number, number * 1000, lag) for number, lag in enumerate(lags)]) == words


def test_what_did_spark_do(client: Client) -> None:
    words = page(client, "/s/store/spark").words
    assert "job" in words and "7" in words and "Replays recognised" in words


def test_what_takes_the_room_and_what_went_wrong(client: Client, root: Path) -> None:
    assert "No recovery had anything to mend." in page(client, "/s/store/log").words
    end = client("/api/v1/s/store/log").json["commitLog"]["maxOffset"]
    with (root / "commitlog" / "00000000000000000000").open("r+b") as file:
        file.seek(end)
        file.write(b"\0\0\0\x63torn")
    (root / "abort").write_bytes(b"")
    run("recover", root, code=4)
    words = page(client, "/s/store/log").words
    assert "bytes behind" in words and "spark/cut" in words


# ---- empty pages say why


def test_a_topic_whose_only_message_waits_says_that_one_waits(client: Client, root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("later")
        store.put_message(Message("later", b"x", queue_id=0, delay_time_level=9))
        store.half_message(Message("later", b"y", queue_id=0), "p")
    words = page(client, "/s/store/topic?topic=later").words
    assert "Waiting, and in no topic yet: 1 delayed message and 1 half message, of all topics." in words


def test_no_messages_and_everybody_knows_why(client: Client, root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("quiet")
    assert "No message was ever written" in page(client, "/s/store/topic?topic=quiet").words
    assert "No message was ever written" in page(client, "/s/store/messages?topic=quiet").words
    assert "The queue ends at 7." in page(client, "/s/store/messages?topic=t&offset=99").words
    assert "nowhere" in page(client, "/s/store/topic?topic=nowhere", 404).words
    assert "t/0 @99: the queue ends at 7" in page(client, "/s/store/message?topic=t&queue=0&offset=99", 404).words
    assert "no queue 99" in page(client, "/s/store/message?topic=t&queue=99&offset=0", 400).words
    assert "must say which one" in page(client, "/s/store/topic", 400).words
    assert "There is no such page." in page(client, "/s/store/nothing", 404).words
    assert "There is no such page." in page(client, "/s/other/status", 404).words
    for wrong in ("-1", "1e3", "9" * 19, "x", "\u0661"):
        address = "/s/store/messages?" + urllib.parse.urlencode({"topic": "t", "offset": wrong})
        assert "allowed is a number" in page(client, address, 400).words


def test_a_list_is_read_page_by_page(client: Client) -> None:
    first = client("/api/v1/s/store/messages?topic=t&queue=0&offset=0&count=3").json
    assert [each["queueOffset"] for each in first["messages"]] == [0, 1, 2]
    assert (first["previous"], first["next"]) == (None, 3)
    newest = client("/api/v1/s/store/messages?topic=t&queue=0&count=3").json
    assert [each["queueOffset"] for each in newest["messages"]] == [4, 5, 6]
    assert (newest["previous"], newest["next"]) == (1, None)


def test_a_list_reads_no_more_bytes_than_it_may(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "LIST_SIZE", 400)
    found = client("/api/v1/s/store/messages?topic=t&queue=0&offset=0").json
    assert 1 <= len(found["messages"]) < 7 and found["next"] == len(found["messages"])


def test_topics_are_sorted_and_filtered_on_the_server(client: Client) -> None:
    found = client("/api/v1/s/store/topics?sort=messages").json
    assert [row["topic"] for row in found["rows"]] == ["t", "orders"]
    assert [row["topic"] for row in client("/api/v1/s/store/topics?contains=ORD").json["rows"]] == ["orders"]
    assert "No topic has such a name." in page(client, "/s/store/topics?contains=xyz").words
    assert client("/api/v1/s/store/topics?sort=price").status == 400


def test_status_is_what_the_command_line_prints(client: Client, root: Path) -> None:
    (printed,) = objects(run("status", root, "--json"))
    shown = Client(app([root]))("/api/v1/s/store/status").json
    assert shown == printed


def test_metrics_of_several_stores_are_one_answer(root: Path, tmp_path: Path) -> None:
    other = filled(tmp_path / "other", 3)
    text = Client(app([root, other]))("/metrics").text
    assert re.findall(r"^spark_store_up\{store=\"(.*)\"\} 1", text, re.MULTILINE) == [str(root), str(other)]
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types))


def test_a_store_that_goes_and_comes_back(client: Client, root: Path) -> None:
    root.rename(root.with_name("away"))
    assert str(root) in page(client, "/").words
    assert page(client, "/s/store/topics", 503).words
    root.with_name("away").rename(root)
    assert "Nothing is wrong." in page(client, "/").words


# ---- bodies are text


@pytest.fixture
def hostile(tmp_path: Path) -> Client:
    """Markup, template syntax, control characters and broken UTF-8 wherever a sender can put them."""
    root = tmp_path / "hostile"
    text = HOSTILE.replace("\0", "")
    with MessageStore.open(root, SMALL) as store:
        for body in (
            HOSTILE.encode(),
            b"\xff\xfe<script>",
            b"[" * 3000,
            b'{"a": "</pre><script>alert(3)</script>"}',
            b"\xed\xa0\x80",
            b"",
            b"\r\n\t" * 50,
        ):
            message = Message("t", body, queue_id=0, keys=(text.replace(" ", "_"),), tags=text, properties={text: text})
            assert store.put_message(message).is_ok
        store.append_batch(columns(bodies(2)), BatchRequest(app_id="<script>alert(4)</script>", version=0))
    publish_offsets(root, "<b>group", {("t", 0): 1}, own=True)
    return Client(app([root]))


def test_nothing_in_a_message_becomes_markup(hostile: Client) -> None:
    found = crawl(hostile)
    assert len(found) > 20
    for address, answer in found.items():
        assert answer.status == 200, (address, answer.body[:500])
        if not answer.headers["content-type"].startswith("text/html"):
            continue
        parsed = Page(answer.text, with_forms=True)
        assert not {"img", "b", "iframe", "style", "object"} & set(parsed.elements), address
        assert parsed.elements.count("script") == 1 and "/static/page.js" in parsed.links, address
        assert not [name for name, _ in parsed.attributes if name.startswith("on") or name == "style"], address
        assert not [link for link in parsed.links if not link.startswith("/") and link != "#main"], address
        assert "\u202e" not in answer.text and "\0" not in answer.text
    first = Page(found["/s/hostile/message?topic=t&queue=0&offset=0"].text)
    assert "<script>alert(1)</script>{{ 7*7 }}\\u202e\\x00" in first.words


def test_a_search_for_markup_is_text(hostile: Client) -> None:
    parsed = page(hostile, "/s/hostile/search?" + urllib.parse.urlencode({"q": "<script>alert(1)</script>"}))
    assert parsed.elements.count("script") == 1 and "<script>alert(1)</script>" in parsed.words
    parsed = page(hostile, "/s/hostile/topic?" + urllib.parse.urlencode({"topic": "<script>x</script>"}), 404)
    assert parsed.elements.count("script") == 1


def test_a_body_is_a_file_that_no_browser_opens(client: Client) -> None:
    answer = client("/s/store/body?topic=orders&queue=0&offset=0")
    assert answer.body == b'{"price": 12, "to": ["a"]}'
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_body_of_one_byte_is_one_byte(client: Client, root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        assert store.put_message(Message("one", b"\xff", queue_id=0)).is_ok
    for look in ("message", "messages", "recent"):
        words = page(client, f"/s/store/{look}?topic=one").words
        assert "1 byte" in words and "1 bytes" not in words


def test_a_long_body_is_cut_on_the_page_only(tmp_path: Path) -> None:
    root = tmp_path / "long"
    with MessageStore.open(root, SMALL.replace(mapped_file_size_commit_log=4 << 20, max_message_size=2 << 20)) as store:
        assert store.put_message(Message("t", b"y" * 1_000_000, queue_id=0)).is_ok
    client = Client(app([root]))
    answer = client("/s/long/message?topic=t&queue=0&offset=0")
    assert answer.text.count("y") < 300_000 and "of which the first 262,144 characters are shown" in answer.text
    assert len(client("/s/long/body?topic=t&queue=0&offset=0").body) == 1_000_000


def test_what_a_decoder_makes_of_a_body_is_cut_on_the_page_only(root: Path) -> None:
    client = Client(app([root], decoder=lambda message: ["y" * 1000] * (1000 if message.queue_offset == 0 else 1)))
    answer = client("/s/store/message?topic=t&queue=0&offset=0")
    assert 200_000 < answer.text.count("y") < 300_000
    assert "The first 262,144 characters are shown" in page(client, "/s/store/message?topic=t&queue=0&offset=0").words
    assert "characters are shown" not in page(client, "/s/store/message?topic=t&queue=0&offset=1").words
    assert client("/api/v1/s/store/message?topic=t&queue=0&offset=0").text.count("y") > 1_000_000


def test_hidden_bodies_leave_the_server_nowhere(root: Path) -> None:
    client = Client(app([root], hide_bodies=True))
    found = crawl(client)
    for address in [*found, *(each.replace("/s/", "/api/v1/s/", 1) for each in found if each.startswith("/s/"))]:
        assert b"price" not in client(address).body, address
    assert client("/s/store/body?topic=orders&queue=0&offset=0").status == 400
    assert client("/api/v1/s/store/message?topic=orders&queue=0&offset=0&plain=1").json["message"]["body"] is None


# ---- it only reads


def tree(root: Path) -> dict[str, tuple[bytes | None, int, int]]:
    return {
        str(path): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns, path.stat().st_mode)
        for path in [root, *root.rglob("*")]
    }


def test_a_crawl_of_every_link_changes_nothing(client: Client, root: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    found = crawl(client)
    for address, answer in found.items():
        assert answer.status == 200, (address, answer.body[:500])
        forms = re.findall(r"<form[^>]*method=.?post[^>]*", answer.body.decode("latin-1"), re.IGNORECASE)
        assert all(re.search(r'action="/s/store/verify/(start|stop)"', form) for form in forms), forms
    seen = {address.partition("?")[0].rpartition("/")[2] for address in found}
    assert set(LOOKS) - {"search"} <= seen
    for look in LOOKS:
        client(f"/api/v1/s/store/{look}?topic=t&queue=0&offset=0&q=k1&group=billing")
    assert client("/metrics").status == client("/healthz").status == 200 or client("/healthz").status == 503
    assert tree(tmp_path) == before


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_there_is_no_verb_that_writes(client: Client, method: str) -> None:
    answer = client("/s/store/topics", method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    assert "access-control-allow-origin" not in answer.headers


# ---- who may ask


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8097", "", "127.0.0.1.evil.example", "localhost.evil.example", "[::1", "a b"]
)
def test_another_host_name_is_refused(client: Client, host: str) -> None:
    """Otherwise a page elsewhere could read the store by DNS rebinding."""
    client.host = host
    for address in ("/", "/api/v1/stores", "/metrics", "/static/style.css"):
        assert client(address).status == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8097", "127.0.0.1", "[::1]:8097", "192.0.2.7:8097"])
def test_own_names_and_addresses_are_served(client: Client, host: str) -> None:
    client.host = host
    assert client("/").status == 200


def test_a_name_that_was_given_is_served(root: Path) -> None:
    assert Client(app([root], hosts=["stores.example"]), "stores.example").__call__("/").status == 200


def test_a_token_is_asked_for_and_exchanged_for_a_cookie(root: Path) -> None:
    client = Client(app([root], token=TOKEN))
    assert client("/").headers["location"] == "/login"
    for address in ("/api/v1/stores", "/metrics", "/healthz"):
        answer = client(address)
        assert (answer.status, answer.headers["www-authenticate"][:6]) == (401, "Bearer")
        for wrong in ("Bearer wrong", "Basic " + TOKEN, "Bearer", "Bearer \xe9", TOKEN):
            assert client(address, {"authorization": wrong}).status == 401
        assert client(address, {"authorization": f"Bearer {TOKEN}"}).status == 200
    for address in ("/s/store/topics", "/s/store/body?topic=t&queue=0&offset=0", "/search?q=k1"):
        assert client(address).status == 303

    assert "wrong" in client("/login", method="POST", body=b"token=another").headers["location"]
    assert not client.cookie
    forged = client("/login", {"origin": "http://evil.example"}, method="POST", body=f"token={TOKEN}".encode())
    assert forged.status == 403 and not client.cookie
    own = {"origin": "http://127.0.0.1:8097", "content-type": "application/x-www-form-urlencoded"}
    assert client("/login").headers["referrer-policy"] == "same-origin"  # or else browsers send `Origin: null`
    answer = client("/login", own, method="POST", body=f"token={TOKEN}".encode())
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=strict" in answer.headers["set-cookie"]
    assert TOKEN not in answer.headers["set-cookie"]
    assert client("/").status == 200
    client.cookie += "0"
    assert client("/").status == 303


def test_a_short_token_and_no_store_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="allowed are 16 or more"):
        app([root], token="short")
    with pytest.raises(ConfigError, match="at least one"):
        app([])


def test_every_answer_forbids_foreign_scripts_and_frames(client: Client) -> None:
    client_with_token = Client(app(["x"], token=TOKEN))
    for answer in (
        client("/"),
        client("/nothing"),
        client("/s/store/x"),
        client_with_token("/"),
        client("/", method="PUT"),
    ):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self';" in policy
        assert answer.headers["x-frame-options"] == "DENY" and answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "address",
    [
        "/static/../guard.py",
        "/static/%2e%2e/guard.py",
        "/static//etc/passwd",
        "/s/../../etc/passwd",
        "/s/store/../../x",
    ],
)
def test_paths_lead_nowhere_else(client: Client, address: str) -> None:
    assert client(address).status == 404


def test_addresses_and_forms_have_a_limit(root: Path) -> None:
    client = Client(app([root], token=TOKEN))
    assert client("/login?" + "x" * 9000).status == 414
    assert client("/login", method="POST", body=b"token=" + b"x" * 5000).status == 413


def test_so_many_requests_at_once_and_no_more() -> None:
    """The next one is asked to come again, and is answered when there is room."""
    release, running = asyncio.Event(), 0

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running
        running += 1
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def story() -> None:
        client = Client(Guard(inner))
        busy = [asyncio.create_task(client.ask("/")) for _ in range(MOST_AT_ONCE)]
        while running < MOST_AT_ONCE:
            await asyncio.sleep(0)
        assert (await client.ask("/")).status == 503
        release.set()
        assert {answer.status for answer in await asyncio.gather(*busy)} == {200}
        assert (await client.ask("/")).status == 200

    asyncio.run(story())
