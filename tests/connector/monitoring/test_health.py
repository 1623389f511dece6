"""Each rule of `health`: the fault is made, and the sentence is read. The alerts and the dashboard name what there is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

pytest.importorskip("prometheus_client")

from checkpoints import checkpoint, offset
from cli_runs import objects, run
from crash.harness import die
from crash.imitate import Process, another_boot
from messagestore import ASYNC_FLUSH, BatchRequest, Message, MessageStore, StoreConfig
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.disk import Disk
from messagestore.files.state import StateFile
from messagestore.format.layout import STATE_POISONED
from messagestore.spi.local import LOCAL_STORES
from processes import starting_broker
from pyspark_messagestore.monitoring import alerts, health
from pyspark_messagestore.monitoring.health import FAULT, RULES, WARNING, Finding, facts_of, findings_of
from small import SMALL, SMALL_ASYNC, ClockDisk, bodies, columns, filled

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
QUIET = SMALL_ASYNC.replace(flush_interval_commit_log=HOUR_MS, flush_commit_log_thorough_interval=HOUR_MS)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with 10 messages in topic t, queues 0 and 1."""
    return filled(tmp_path / "store", 10)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def found(root: Path, *checkpoints: Path, config: StoreConfig = SMALL) -> dict[str, Finding]:
    """The findings, by their rules."""
    store = LOCAL_STORES.reader(str(root), config)
    try:
        findings = findings_of(facts_of(store, [str(each) for each in checkpoints]))
    finally:
        store.close()
    assert all("ROOT" not in each.remedy for each in findings), "a remedy can be copied"
    assert [each.severity for each in findings] == sorted(each.severity for each in findings), "faults come first"
    return {each.rule: each for each in findings}


def metric_names(root: Path, *checkpoints: Path) -> set[str]:
    """The names of all metrics of a scrape, with or without a sample."""
    given = [part for each in checkpoints for part in ("--checkpoint", each)]
    text = run("metrics", root, *given, "--once").stdout
    families = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    return families | set(re.findall(r"^([a-z_]+)\{", text, re.MULTILINE))


def test_a_store_that_is_well_has_no_finding(root: Path) -> None:
    assert found(root) == {}
    (report,) = objects(run("status", root, "--json"))
    assert report["findings"] == []


def unreadable(root: Path) -> None:
    (root / "config" / "consumerOffset.json").write_text("{")


def poisoned(root: Path) -> None:
    killed(root)
    change_state(root, flags=STATE_POISONED)


def killed(root: Path) -> None:
    store = MessageStore.open(root, SMALL)
    store.put_message(Message("t", b"x", queue_id=0))
    die(str(root))
    change_state(root, in_flight=1000)


def change_state(root: Path, **change: int) -> None:
    file = StateFile(Disk(), str(root / "spark" / "state"))
    state = file.read()
    assert state is not None
    file.write(replace(state, counter=state.counter + 1, **change))


def future(root: Path) -> None:
    with MessageStore.open(root, SMALL, disk=ClockDisk(now_ms() + 5 * DAY_MS)) as store:
        store.put_message(Message("t", b"x", queue_id=0))


def orphans(root: Path) -> None:
    folder = root / "spark" / "staging"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "0-0123456789abcdef.0-0-01234567.staged").write_bytes(b"rows")
    os.utime(folder / "0-0123456789abcdef.0-0-01234567.staged", (time.time() - 3 * 86_400,) * 2)


def overdue(root: Path) -> None:
    with MessageStore.open(root, SMALL, disk=ClockDisk(now_ms() - 2 * DAY_MS)) as store:
        for _ in range(3):
            store.put_message(Message("t", b"later", queue_id=0, delay_time_level=1))


def halves(root: Path) -> None:
    with MessageStore.open(root, SMALL, disk=ClockDisk(now_ms() - 2 * DAY_MS)) as store:
        store.half_message(Message("t", b"half", queue_id=0, born_timestamp_ms=now_ms() - 2 * DAY_MS), "payments")


def dead_letter(root: Path) -> None:
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("%DLQ%g", b"given up", queue_id=0))


def deleted(root: Path) -> None:
    publish_offsets(str(root), "slow", {("t", 0): 1, ("t", 1): 1})
    with MessageStore.open(root, SMALL) as store:
        for body in bodies(40, 1000):
            store.put_message(Message("t", body, queue_id=0))
        gone = store.delete_expired_files(before_offset=20_000, ignored_groups=["slow"])
        assert gone.segments


def beyond(root: Path) -> None:
    publish_offsets(str(root), "far", {("t", 0): 7})


def late(root: Path) -> None:
    with MessageStore.open(root.with_name("old"), SMALL, disk=ClockDisk(now_ms() - 3 * HOUR_MS)) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    os.rename(root, root.with_name("young"))
    os.rename(root.with_name("old"), root)
    publish_offsets(str(root), "lazy", {("t", 0): 0})


@pytest.mark.parametrize(
    ("rule", "make", "severity", "sentence", "remedy"),
    [
        ("unreadable", unreadable, FAULT, r"consumerOffset\.json", "messagestore verify"),
        ("sync-failed", poisoned, FAULT, "a sync failed, so the last writer stopped", "check the disk"),
        ("not-recovered", killed, WARNING, "a writer was killed in the middle of a write", "messagestore recover"),
        ("future", future, WARNING, "the last message was stored (4|5) days in the future", "check the clock"),
        ("staging-orphans", orphans, WARNING, r"1 staged file of 4 bytes, the oldest untouched for 3 days", "nothing"),
        (
            "delayed-overdue",
            overdue,
            WARNING,
            r"3 delayed messages wait, and the first was due 47 hours ago",
            "deliver",
        ),
        ("halves-overdue", halves, WARNING, r"1 half message wait.* the oldest for 2 days", "messagestore halves"),
        ("dead-letters", dead_letter, WARNING, r"%DLQ%g got 1 message in the last 24 hours", "messagestore get"),
        ("lost-messages", deleted, FAULT, r"group slow has not read \d+ messages of t that retention", "keep messages"),
        ("beyond-the-end", beyond, WARNING, r"group far is 2 messages beyond the end of t", "group reset-offset"),
        ("nothing-written", late, WARNING, "nothing was written for 3 hours", "look whether the writers run"),
        (
            "group-late",
            late,
            WARNING,
            r"group lazy is 1 message behind in t, .* has waited for 3 hours",
            "messagestore lag",
        ),
    ],
)
def test_a_store_that_is_not_well(
    root: Path, rule: str, make: Callable[[Path], None], severity: str, sentence: str, remedy: str
) -> None:
    """By the rules, and by `status`, whose text and JSON say the same."""
    make(root)
    finding = found(root)[rule]
    assert finding.severity == severity
    assert re.search(sentence, finding.sentence), finding.sentence
    assert remedy in finding.remedy

    code = 1 if rule == "unreadable" else 0
    (report,) = objects(run("status", root, "--json", code=code))
    assert rule in {each["rule"] for each in report["findings"]}
    if rule != "unreadable":  # `status` says what it cannot read on standard error, as ever
        assert finding.sentence[:40] in run("status", root).stdout


@pytest.mark.parametrize(
    ("percent", "rule", "severity"), [(86, "deletes-unread", WARNING), (91, "no-room", FAULT)], ids=["86 %", "91 %"]
)
def test_a_disk_that_is_full(
    root: Path, monkeypatch: pytest.MonkeyPatch, percent: int, rule: str, severity: str
) -> None:
    monkeypatch.setattr(Disk, "used_percent", lambda *_: percent)
    finding = found(root)[rule]
    assert finding.severity == severity and f"{percent} % full" in finding.sentence


def test_a_disk_that_is_full_soon(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By how fast the log has grown since its newest segment that is ten minutes old."""
    monkeypatch.setattr(Disk, "used_percent", lambda *_: 80)
    monkeypatch.setattr(Disk, "free", lambda *_: 2_000_000)
    clock = ClockDisk(now_ms() - 2 * HOUR_MS)
    with MessageStore.open(root.with_name("busy"), SMALL, disk=clock) as store:
        for body in bodies(120, 1000):
            clock.now_ms += 60_000
            store.put_message(Message("t", body, queue_id=0))
    finding = found(root.with_name("busy"))["full-soon"]  # 2 MB are free, 1 MB can be used, and 66 KB come an hour
    assert re.search("80 % full, and is at 90 % in about 1[3-6] hours", finding.sentence), finding.sentence

    monkeypatch.setattr(Disk, "free", lambda *_: 1 << 40)
    assert "full-soon" not in found(root.with_name("busy"))


def test_a_broker_that_waits_for_a_writer(root: Path) -> None:
    """The writer is stopped, so it does not let go, and the broker's `open` waits in the kernel."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(root)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        assert "broker-waits" not in found(root)
        writer.send_signal(signal.SIGSTOP)
        with starting_broker(root):
            until_s = time.monotonic() + 60
            while "broker-waits" not in (findings := found(root)):
                assert time.monotonic() < until_s
            assert "waits until the writers let the store go" in findings["broker-waits"].sentence
            assert "a broker that is starting" in run("status", root).output
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert "broker-waits" not in found(root)


_HOLDS = """
import sys, time
from messagestore import MessageStore
with MessageStore.open(sys.argv[1]) as store:
    print("open", flush=True)
    time.sleep(600)
"""


def test_what_readers_do_not_show(tmp_path: Path) -> None:
    """Messages behind the last sync, after a reboot."""
    root = tmp_path / "killed"
    root.mkdir()
    process = Process(root, QUIET)
    process.batch(version=0, rows=6)
    process.batch(version=1, rows=6, flush=ASYNC_FLUSH)
    process.die()
    with another_boot():
        findings = found(root, config=QUIET)
    assert re.search(r"readers do not see \d+ messages that no sync has proven", findings["unproven"].sentence)
    assert "the machine was restarted while the store was open" in findings["not-recovered"].sentence


def test_queries(root: Path, tmp_path: Path) -> None:
    """One that refuses the store, one that is late, one whose planned batch is not done; and one that is well."""
    with MessageStore.open_read_only(root) as store:
        store_id = store.store_id
    beyond_end = checkpoint(tmp_path / "beyond", [[offset(store_id, 9, 5)]])
    assert "the query of" in found(root, beyond_end)["query-refuses"].sentence
    assert "t/0 ends at 5, but this query has read up to 9" in found(root, beyond_end)["query-refuses"].sentence

    stuck = checkpoint(tmp_path / "stuck", [[offset(store_id, 1, 5)], [offset(store_id, 5, 5)]], committed=1)
    assert re.search(
        r"batch 1 of the query of .* was planned [\d,]+ days ago, and it is not done",
        found(root, stuck)["query-stuck"].sentence,
    )

    late(root)
    with MessageStore.open_read_only(root) as store:
        store_id = store.store_id
    behind = checkpoint(tmp_path / "behind", [[offset(store_id, 0)]])
    assert "1 message behind, and the oldest has waited for 3 hours" in found(root, behind)["query-late"].sentence
    publish_offsets(str(root), "lazy", {("t", 0): 1})
    done = checkpoint(tmp_path / "done", [[offset(store_id, 1)]])
    assert set(found(root, done)) == {"nothing-written"}
    (report,) = objects(run("status", root, "--checkpoint", behind, "--json"))
    assert [each["rule"] for each in report["findings"]] == ["query-late", "nothing-written"]


def test_a_query_that_falls_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches are twenty minutes apart and read two messages each, and ten come in between."""
    monkeypatch.setattr(health, "MANY", 10)
    root, clock = tmp_path / "busy", ClockDisk(now_ms() - HOUR_MS)
    places, planned = [], []
    with MessageStore.open(root, SMALL, disk=clock) as store:
        for _ in range(3):
            for body in bodies(10):
                assert store.put_message(Message("t", body, queue_id=0)).is_ok
            clock.now_ms += 20 * 60_000 - 1000
            places.append([offset(store.store_id, 2 * (len(places) + 1))])
            planned.append(clock.now_ms)
    folder = checkpoint(tmp_path / "slow", places)
    for batch_id, time_ms in enumerate(planned):
        file = folder / "offsets" / str(batch_id)
        file.write_text(re.sub(r'"batchTimestampMs": ?\d+', f'"batchTimestampMs":{time_ms}', file.read_text()))
    finding = found(root, folder)["lag-grows"]
    assert (finding.severity, finding.since_ms) == (WARNING, planned[1])
    assert re.search("24 messages wait; (19|20) minutes ago, 18 did", finding.sentence), finding.sentence
    monkeypatch.setattr(health, "MANY", 100)
    assert "lag-grows" not in found(root, folder)


def test_a_store_at_rest_needs_nobody(root: Path) -> None:
    """Nobody has written for days, or somebody has just written."""
    with MessageStore.open(root.with_name("old"), SMALL, disk=ClockDisk(now_ms() - 3 * DAY_MS)) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    assert found(root.with_name("old")) == found(root) == {}


def test_each_rule_has_a_test() -> None:
    text = Path(__file__).read_text()
    for rule in RULES:
        assert f'"{rule.name}"' in text, f"no test makes the fault of {rule.name}"
        assert rule.condition


# ---- for Prometheus and Grafana


def test_the_files_in_deploy_are_those_of_the_rules() -> None:
    for name, text in alerts.files().items():
        assert (ROOT / "deploy" / name).read_text() == text, (
            f"deploy/{name} is out of date: run `make docs`, which writes it"
        )


def names_in(expression: str) -> set[str]:
    """The metrics of a PromQL expression."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}', "", expression)
    return set(re.findall(r"\b(?:rocketmq|spark)_[a-z_]+", bare))


def test_prometheus_reads_the_alerts_and_finds_their_metrics(root: Path, tmp_path: Path) -> None:
    publish_offsets(str(root), "g", {("t", 0): 1})
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(3)), BatchRequest("app", 0))
        store_id = store.store_id
    query = checkpoint(tmp_path / "ck", [[offset(store_id, 1, 5)]])
    there = metric_names(root, query)

    (group,) = yaml.safe_load(alerts.rules_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [alerts.alert_name(rule) for rule in RULES]
    for rule in group["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+m", rule["for"]) and rule["labels"]["severity"] in ("warning", "critical")
        names = names_in(rule["expr"])
        assert names and names <= there, f"{rule['alert']}: a scrape has no {names - there}"

    dashboard = json.loads((ROOT / "deploy/grafana/messagestore.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = names_in(target["expr"])
            assert names and names <= there, f"{panel['title']}: a scrape has no {names - there}"
            assert '{store=~"$store"}' in target["expr"]
