"""`messagestore metrics`: what Prometheus gets, whichever process wrote the store, and however it ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from checkpoints import checkpoint, offset
from cli_runs import error, finish, objects, on_terminal, read_lines, run, start
from messagestore import BatchRequest, Message, MessageStore
from messagestore.files import consumer_offsets
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.counters import count
from messagestore.files.disk import Disk
from messagestore.read.view import StoreView
from small import SMALL, SMALL_ASYNC, SMALL_POOL, ClockDisk, bodies, columns, filled

pytest.importorskip("prometheus_client")

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pyspark_messagestore.monitoring.metrics import StoreCollector, registry_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with 10 messages in topic t, queues 0 and 1."""
    return filled(tmp_path / "store", 10)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Name and label values without the store, to the value; the text must be what Prometheus can parse."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "store"]
            found[sample.name, *labels] = sample.value
    return found


def once(*arguments: object, code: int = 0) -> dict[tuple[str, ...], float]:
    return samples(run("metrics", *arguments, "--once", code=code).stdout)


def test_a_store_has_rocketmqs_figures(root: Path) -> None:
    publish_offsets(str(root), "delays", {("t", 0): 3, ("t", 1): 5})
    found = once(root)
    assert found["spark_store_up",] == 1
    assert found["rocketmq_messages_in_total", "false", "t"] == 10
    assert found["rocketmq_topic_number",] == 1
    assert found["rocketmq_consumer_group_number",] == 1
    assert found["rocketmq_consumer_lag_messages", "delays", "t"] == 2
    assert 0 <= found["rocketmq_consumer_lag_latency", "delays", "t"] < 600_000
    assert 0 <= found["rocketmq_storage_message_reserve_time",] < 600_000
    assert found["rocketmq_storage_size",] >= 4096
    assert found["rocketmq_storage_flush_behind_bytes",] == 0
    assert found["rocketmq_storage_dispatch_behind_bytes",] == 0
    used = Disk().used_percent(root) / 100
    for folder in ("commitlog", "consumequeue"):
        assert found["spark_disk_used_ratio", folder] == pytest.approx(used, abs=0.011)  # others use the disk, too
    publish_offsets(str(root), "delays", {("t", 0): 5})
    found = once(root)
    assert found["rocketmq_consumer_lag_messages", "delays", "t"] == 0
    assert found["rocketmq_consumer_lag_latency", "delays", "t"] == 0


def test_rocketmqs_figures_name_the_node_of_a_store_with_a_name(root: Path) -> None:
    """RocketMQ's dashboards tell brokers apart by these labels; a store without a name has none of them."""
    with MessageStore.open(root, SMALL.replace(broker_name="broker-a")):
        pass
    (told,) = objects(run("status", root, "--json"))
    assert told["brokerName"] == "broker-a"
    assert "broker  broker-a" in re.sub(" +", "  ", run("status", root).stdout)
    rows = objects(run("metrics", root, "--json"))
    node = {"node_type": "broker", "node_id": "broker-a"}
    assert {"name": "rocketmq_topic_number", "labels": {"store": str(root), **node}, "value": 1} in rows
    for row in rows:
        assert (node.items() <= row["labels"].items()) is row["name"].startswith("rocketmq_")
    (root / "spark" / "broker.json").write_text("{")
    found = once(root, code=1)
    assert found["spark_store_up",] == 0 and found["rocketmq_topic_number",] == 1


def test_a_group_that_has_read_a_topic_that_was_deleted_is_no_fault_of_the_store(root: Path) -> None:
    """Brokers keep such offsets for a while; a store that is whole must not look as if it were damaged."""
    publish_offsets(str(root), "delays", {("t", 0): 3, ("t", 1): 5})
    publish_offsets(str(root), "old", {("gone", 0): 7})
    found = once(root)
    assert found["spark_store_up",] == 1
    assert found["rocketmq_consumer_lag_messages", "delays", "t"] == 2
    assert found["rocketmq_consumer_lag_messages", "old", "gone"] == 0
    assert found["spark_consumer_beyond_messages", "old", "gone"] == 7
    assert found["spark_consumer_beyond_messages", "delays", "t"] == 0
    assert "gone/0: the reader is at 7, but the queue ends at 0" in run("lag", root, "--group", "old", code=1).stderr


def test_names_of_groups_cannot_move_a_terminals_cursor(root: Path) -> None:
    """A pipe or a file gets them as they are, as Prometheus's format asks for."""
    (root / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": {"t@g\x1b[2J": {"0": 3}}}))
    assert found_group(run("metrics", root, "--once").stdout) == "g\x1b[2J"
    assert found_group(on_terminal("metrics", root, "--once")) == r"g\x1b[2J"


def found_group(text: str) -> str:
    (found,) = re.findall('rocketmq_consumer_lag_messages{consumer_group="(.*?)"', text)
    return found


def test_the_same_figures_as_json(root: Path) -> None:
    """One object for each figure, whole numbers as such, and the same exit code."""
    publish_offsets(str(root), "delays", {("t", 0): 3, ("t", 1): 5})
    rows = objects(run("metrics", root, "--json"))
    assert {"name": "spark_store_up", "labels": {"store": str(root)}, "value": 1} in rows
    labels = {"store": str(root), "consumer_group": "delays", "topic": "t"}
    assert {"name": "rocketmq_consumer_lag_messages", "labels": labels, "value": 2} in rows
    assert {row["name"] for row in rows} == {name for name, *_ in once(root)}
    (root / "config" / "consumerOffset.json").write_text("{")
    rows = objects(run("metrics", root, "--json", code=1))
    assert {"name": "spark_store_up", "labels": {"store": str(root)}, "value": 0} in rows


def test_what_is_behind_is_read_from_the_files_of_a_live_session(tmp_path: Path) -> None:
    """Another process sees what is in the log and not dispatched, and what was dispatched and not synced."""
    root = tmp_path / "s"
    names = ("rocketmq_storage_dispatch_behind_bytes",), ("rocketmq_storage_flush_behind_bytes",)
    with MessageStore.open(root, SMALL_ASYNC.replace(flush_interval_commit_log=3_600_000)) as store:
        with store.writer.mutex:  # so that nothing is dispatched meanwhile
            size = sum(store.put_message(Message("t", b"x" * 900, queue_id=0)).size for _ in range(30))
            behind = store.stats().dispatch_behind
            found = once(root)
            assert [found[name] for name in names] == [behind, behind]
            assert behind is not None
            assert size < behind < 2 * size  # with the ends of two segments
            (told,) = objects(run("status", root, "--json"))
            assert (told["dispatchBehind"], told["flushBehind"]) == (behind, behind)
        assert store.get_message("t", 0, 29).messages
        found = once(root)
        assert [found[name] for name in names] == [0, store.stats().flush_behind]
        store.flush()
        assert [once(root)[name] for name in names] == [0, 0]
    (told,) = objects(run("status", root, "--json"))
    assert (told["dispatchBehind"], told["flushBehind"]) == (0, 0)
    assert set(told["diskUsed"]) == {"commitlog", "consumequeue"}


def test_nothing_is_behind_after_puts_that_were_synced(tmp_path: Path) -> None:
    """The clean end may be far behind; what was acknowledged is on the disk all the same."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        for number in range(5):
            store.put_message(Message("t", b"%d" % number, queue_id=0))
        assert store.writer.state.clean_end < store.writer.end.physical_offset
        assert once(tmp_path / "s")["rocketmq_storage_flush_behind_bytes",] == 0


def test_a_session_adds_what_it_has_counted(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as store:
        registry = registry_of(str(root), session=store)
        size = store.put_message(Message("t", b"x", queue_id=0)).size
        store.put_message_oneway(Message("no blanks", b"x"))
        store.get_message("t", 0, 0)
        store.get_message("t", 0, 1)
        found = samples(generate_latest(registry).decode())
        assert found["rocketmq_throughput_in_total", "false", "t"] == size
        assert found["rocketmq_messages_in_total", "false", "t"] == 1
        assert found["spark_puts_total", "PUT_OK"] == found["spark_puts_total", "MESSAGE_ILLEGAL"] == 1
        assert sum(value for name, value in found.items() if name[0] == "spark_put_times") == 2
        assert found["spark_put_tps", "600"] > 0
        assert (found["spark_gets_total", "true"], found["spark_gets_total", "false"]) == (1, 1)
        assert found["spark_messages_got_total",] == 1
        assert found["rocketmq_storage_flush_behind_bytes",] == 0
    assert samples(generate_latest(registry).decode())["spark_puts_total", "PUT_OK"] == 1


def test_a_session_says_what_it_has_in_memory(tmp_path: Path) -> None:
    """Only the session knows it: its files do not hold what is not committed."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL_POOL) as store:
        registry = registry_of(str(root), session=store)
        size = store.put_message(Message("t", b"x", queue_id=0)).size
        found = samples(generate_latest(registry).decode())
        assert found["spark_pool_behind_bytes",] == size
        assert found["rocketmq_storage_dispatch_behind_bytes",] == 0
        assert objects(run("status", root, "--json"))[0]["poolBehind"] is None
        store.flush()
        assert samples(generate_latest(registry).decode())["spark_pool_behind_bytes",] == 0
    assert ("spark_pool_behind_bytes",) not in once(root)
    assert objects(run("status", root, "--json"))[0]["poolBehind"] == 0


def test_a_fault_does_not_act_on_the_terminal(tmp_path: Path) -> None:
    """Neither the store's path nor a topic in a file that anybody may have written; what else there is, is shown."""
    root = filled(tmp_path / "\x1b[2Js", 10)
    offsets = {"\x1b[2J@g": {"0": 1}, "..@g": {"0": 1}, "t@h": {"0": 2, "1": 5}}
    (root / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": offsets}))
    logged = start("metrics", root, "--once")
    text, words = finish(logged, 1)
    assert "\\x1b[2Js: topic: found '..'" in words
    behind = run("lag", root, "--group", "g", code=1).stderr
    assert "\\x1b[2J/0: the reader is at 1" in behind
    assert all(c.isprintable() or c == "\n" for c in words + behind)
    assert samples(text)["rocketmq_consumer_lag_messages", "h", "t"] == 3


def test_batches_are_counted_from_the_log(tmp_path: Path) -> None:
    """Two processes that wrote one batch each, and are gone: nothing has to have survived but the log."""
    root, disk = tmp_path / "s", ClockDisk(1_700_000_000_000)
    for version in range(3):
        with MessageStore.open(root, SMALL, disk=disk) as store:
            store.append_batch(columns(bodies(4, start=4 * version)), BatchRequest("copy", version, "spark", "q1"))
            disk.now_ms += 1000
    (root / "spark" / "staging").mkdir(exist_ok=True)
    (root / "spark" / "staging" / "left.staged").write_bytes(b"x" * 100)
    count(Disk(), str(root / "spark"), knownBatches=2, orphansDeleted=5)
    found = once(root)
    assert found["spark_known_batches_total",] == 2
    assert found["spark_skipped_batches_total",] == 0
    assert found["spark_orphans_deleted_total",] == 5
    assert found["spark_batches_total",] == 3
    assert found["spark_batch_last_version", "copy"] == 2
    assert found["spark_batch_last_rows", "copy"] == 4
    assert found["spark_batch_published_timestamp_seconds", "copy"] == 1_700_000_002
    assert (found["spark_staging_files",], found["spark_staging_bytes",]) == (1, 100)
    assert found["rocketmq_messages_in_total", "false", "t"] == 12


def test_a_counter_does_not_go_back_when_retention_deletes(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as store:
        for _ in range(40):
            store.put_message(Message("t", b"x" * 1000, queue_id=0))
    before = once(root)
    (root / "commitlog" / ("0" * 20)).unlink()
    after = once(root)
    assert after["rocketmq_messages_in_total", "false", "t"] == before["rocketmq_messages_in_total", "false", "t"] == 40
    assert after["rocketmq_storage_size",] < before["rocketmq_storage_size",]


def test_queries_by_their_checkpoints(tmp_path: Path, root: Path) -> None:
    with MessageStore.open_read_only(root) as store:
        store_id = store.store_id
        size = store.get_message("t", 0, 4, 1).messages[0].size
    path = checkpoint(tmp_path / "ck", [[offset(store_id, 4, 5)]])
    found = once(root, "--checkpoint", path)
    (query,) = [key for key in found if key[0] == "spark_query_lag_messages"]
    assert query[2:] == ("0", "t")
    assert found[query] == 1
    assert found["spark_query_lag_bytes", *query[1:]] == size
    assert found["spark_query_last_batch", query[1]] == 0
    assert "found no checkpoint" in error("metrics", root, "--once", "--checkpoint", tmp_path, code=2)


def test_a_damaged_store_is_down_and_says_why(root: Path) -> None:
    """Prometheus must not take silence for health."""
    (root / "config" / "consumerOffset.json").write_text("{")
    found = once(root, code=1)
    assert found["spark_store_up",] == 0


def test_labels_are_escaped(tmp_path: Path) -> None:
    """An app id may hold quotes and braces: it stays a label."""
    root = tmp_path / "s"
    hostile = 'a"b\\c}1,spark_store_up=7'
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(4)), BatchRequest(hostile, 0))
    found = once(root)
    assert found["spark_batch_last_version", hostile] == 0
    assert found["spark_store_up",] == 1


def test_an_endpoint_follows_a_store_that_others_write(root: Path) -> None:
    process = start("metrics", root, "--listen", "127.0.0.1:0")
    try:
        (url,) = read_lines(process, 1)

        def got() -> dict[tuple[str, ...], float]:
            with urllib.request.urlopen(url.strip()) as answer:
                return samples(answer.read().decode())

        assert got()["rocketmq_messages_in_total", "false", "t"] == 10
        run("put", root, "t", "more", "--count", 5)
        assert got()["rocketmq_messages_in_total", "false", "t"] == 15
        code = (
            "import os, sys\n"
            "from messagestore import Message, MessageStore\n"
            "store = MessageStore.open(sys.argv[1])\n"
            "for _ in range(5): store.put_message(Message('t', b'x', queue_id=0))\n"
            "os.kill(os.getpid(), 9)\n"
        )
        assert subprocess.run([sys.executable, "-c", code, str(root)], check=False).returncode == -9
        assert got()["rocketmq_messages_in_total", "false", "t"] == 20
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_be_done_is_one_line(root: Path, tmp_path: Path) -> None:
    for listen in ("9557", "127.0.0.1:", ":80", "host:99999", "host:x"):
        assert "allowed is HOST:PORT" in error("metrics", root, "--listen", listen, code=2)
    assert "found no message store" in error("metrics", tmp_path / "none", "--once", code=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for listen in (f"127.0.0.1:{taken.getsockname()[1]}", "no-such-host.invalid:9557"):
            assert f"--listen: {listen} cannot be listened on" in error("metrics", root, "--listen", listen, code=2)


def test_without_the_extra_it_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "pyspark_messagestore.monitoring.metrics", raising=False)
    assert "-m pip install 'prometheus-client>=" in error("metrics", root, "--once", code=2)


# ---- tables that somebody else wrote


def table(root: Path, text: str) -> None:
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "consumerOffset.json").write_text('{"offsetTable":{' + text + "}}")


def test_queues_that_do_not_exist_are_not_looked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 000 of them in a group's table kept a scrape for half a minute: each was looked for on the disk, twice."""
    table(root, '"t@g":{0:3,1:5,' + ",".join(f"{number}:1" for number in range(1000, 3000)) + "}")
    looked, real = [], StoreView.max_offset
    monkeypatch.setattr(StoreView, "max_offset", lambda *queue: looked.append(queue) or real(*queue))
    found = once(root)
    assert found["rocketmq_consumer_lag_messages", "g", "t"] == 2
    assert found["spark_consumer_beyond_messages", "g", "t"] == 2000
    rows = objects(run("groups", root, "--json"))
    assert (len(rows), rows[-1]["maxOffset"], rows[-1]["lag"], rows[-1]["beyond"]) == (2002, 0, 0, 1)
    assert len(objects(run("lag", root, "--group", "g", "--json", code=1))) == 2002
    assert len(looked) < 100


@pytest.mark.parametrize("form", ["--once", "--json"])
def test_one_look_gives_the_figures_and_the_exit_code(root: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """All was read twice, and the second look could find what the first one had not shown."""
    looks, real = [], StoreCollector.collect
    monkeypatch.setattr(StoreCollector, "collect", lambda collector: looks.append(collector) or real(collector))
    run("metrics", root, form)
    assert len(looks) == 1


def test_many_groups_take_time_in_proportion(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole table was searched for each group: 3000 groups took a quarter of a minute."""
    table(root, ",".join(f'"t@g{number}":{{0:1}}' for number in range(200)))
    looked, real = [], consumer_offsets._topic_and_group
    monkeypatch.setattr(consumer_offsets, "_topic_and_group", lambda name: looked.append(name) or real(name))
    assert once(root)["rocketmq_consumer_group_number",] == 200
    assert len(objects(run("groups", root, "--json"))) == 400
    assert len(looked) <= 5 * 200
    run("gc", root, "--reserved", "0", code=0)
    assert len(looked) <= 10 * 200
