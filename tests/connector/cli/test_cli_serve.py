"""`messagestore serve`: a store that other hosts read and write, with its start, its end and its lock."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import checkpoint, offset
from cli_runs import error, finish, objects, read_lines, run, start
from messagestore import (
    AccessDeniedError,
    BatchRequest,
    Message,
    MessageStore,
    StoreUnavailableError,
)
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.spi import LOCAL_STORES, ColumnTexts, Range, Write, encode, store_host_of
from messagestore.spi.location import Location, RemoteSettings
from messagestore.spi.remote import RemoteStores
from small import SMALL, bodies, columns, filled
from tls_files import certificate, replace, token_line

STORES = RemoteStores(RemoteSettings(retry_timeout_s=20))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "store", 10)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def serving(processes: list[subprocess.Popen[str]], *arguments: object) -> dict[str, Any]:
    process = start("serve", *arguments, "--listen", "127.0.0.1:0", "--json")
    processes.append(process)
    (line,) = read_lines(process, 1)
    found: dict[str, Any] = json.loads(line)
    return found


def got(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def commit(url: str, version: int, count: int = 5) -> Any:
    writer = STORES.writer(url, SMALL, staging_ttl_s=60)
    found = writer.prepare()
    host = store_host_of(found.config)
    with writer.stage(Write("0", f"w {version}"), found.store_id) as staging:
        rows = encode(ColumnTexts(columns(bodies(count))), limits=found.config, store_host=host, born_host=host)
        staging.write(rows)
        staged = staging.finish()
    return writer.commit([staged], BatchRequest("app", version), found.store_id)


def test_a_store_is_read_and_written_through_its_server(root: Path, processes: list[subprocess.Popen[str]]) -> None:
    """Beside a writer of this host; at its end the store is closed, and everything is there."""
    url = serving(processes, root)["url"]
    assert commit(url, 0).result.status == "appended"
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"of this host", queue_id=0))
    assert commit(url, 1).result.status == "appended"
    assert commit(url, 1).result.status == "known"
    reader = STORES.reader(url)
    ends = reader.ends(["t"]).queues
    parts = reader.gather([Range(*queue, 0, end) for queue, end in sorted(ends.items())])
    assert sum(len(part.sizes) for part in parts) == 10 + 5 + 1 + 5
    assert got(f"{url}/healthz") == (200, "alive\n")
    assert got(f"{url}/readyz") == (200, "ready\n")
    status, figures = got(f"{url}/metrics")
    assert status == 200 and "rocketmq_messages_in_total" in figures
    assert 'messagestore_serve_requests_total{verb="commit",client="127.0.0.1"} 3' in figures
    processes[0].send_signal(signal.SIGTERM)
    _, log = finish(processes[0])
    assert log.count("version 1 of app app known") == 1
    assert not (root / "abort").exists()
    run("verify", root)


def test_a_server_ends_if_another_thread_gets_the_signal(root: Path, processes: list[subprocess.Popen[str]]) -> None:
    """The kernel gives SIGTERM to any thread while a signal of a lease waits for the first one, which nothing woke."""
    serving(processes, root)
    process = processes[0]
    threads = [int(name) for name in os.listdir(f"/proc/{process.pid}/task") if int(name) != process.pid]
    assert ctypes.CDLL(None).tgkill(process.pid, threads[-1], signal.SIGTERM) == 0
    assert process.wait(60) == 0


def test_one_server_a_store(root: Path, processes: list[subprocess.Popen[str]]) -> None:
    """`status` says where it listens. One that only reads may run beside it, and a killed one leaves nothing."""
    found = serving(processes, root)
    (shown,) = objects(run("status", root, "--json"))
    assert f"serves {found['url']}, instance {found['instance']}" in shown["heldBy"]["server"]
    assert f"serves {found['url']}" in run("status", root).stdout
    refused = start("serve", root, "--listen", "127.0.0.1:0")
    processes.append(refused)
    _, words = refused.communicate(timeout=120)
    assert refused.returncode == 3
    assert f"a server of this store runs already: pid {processes[0].pid}" in words and "Traceback" not in words
    url = serving(processes, root, "--read-only")["url"]
    assert STORES.reader(url).ends(["t"]).queues == {("t", 0): 5, ("t", 1): 5}
    with pytest.raises(AccessDeniedError, match="--read-only"):
        STORES.writer(url, SMALL, staging_ttl_s=60).prepare()
    processes[0].kill()
    processes[0].wait()
    assert objects(run("status", root, "--json"))[0]["heldBy"]["server"] is None
    assert commit(serving(processes, root)["url"], 0).result.status == "appended"


def test_a_missing_store_needs_create(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    missing = tmp_path / "new"
    text = error("serve", missing, "--listen", "127.0.0.1:0", code=2)
    assert "found no message store" in text and "--create" in text
    assert "found no message store" in error("serve", missing, "--create", "--read-only", code=2)
    assert not missing.exists()
    url = serving(processes, missing, "--create")["url"]
    assert commit(url, 0).result.status == "appended"


def test_an_address_that_others_reach_needs_a_word_more(root: Path) -> None:
    """Without a certificate and tokens, strangers could read what is sent, or the store."""
    for host in ("0.0.0.0", "[::]", "192.0.2.1", "example"):
        assert "--insecure" in error("serve", root, "--listen", f"{host}:0", code=2)
    assert "allowed is HOST:PORT" in error("serve", root, "--listen", "9556", code=2)


def test_https_with_tokens(tmp_path: Path, processes: list[subprocess.Popen[str]], monkeypatch: Any) -> None:
    """The command line finds the token and the certificate in its environment."""
    cert, key = certificate(tmp_path, "server")
    tokens = replace(tmp_path / "tokens", token_line("cli", "write", "the-token"))
    secrets = ["--cert-file", cert, "--key-file", key, "--token-file", tokens]
    url = serving(processes, tmp_path / "store", "--create", "--drain", "20s", *secrets)["url"]
    assert url.startswith("https://127.0.0.1:")
    assert "found without --cert-file" in error("serve", tmp_path / "store", "--key-file", key, code=2)
    monkeypatch.setenv("MESSAGESTORE_CA_FILE", cert)
    assert "asks for a token" in error("get", url, "t", "0", code=2)
    monkeypatch.setenv("MESSAGESTORE_TOKEN_FILE", replace(tmp_path / "token", "the-token"))
    writer = STORES.writer(Location.of(url), SMALL, staging_ttl_s=60)
    found = writer.prepare()
    host = store_host_of(found.config)
    with writer.stage(Write("0", "w"), found.store_id) as staging:
        staging.write(encode(ColumnTexts(columns(bodies(4))), limits=found.config, store_host=host, born_host=host))
        staged = staging.finish()
    assert writer.commit([staged], BatchRequest("app", 0), found.store_id).result.status == "appended"
    assert run("get", url, "t", "0").stdout
    processes[0].send_signal(signal.SIGTERM)
    _, log = finish(processes[0])
    assert "commit of cli: version 0 of app app appended" in log and "the-token" not in log


def test_a_port_that_is_taken_leaves_the_store_alone(root: Path, processes: list[subprocess.Popen[str]]) -> None:
    url = serving(processes, root)["url"]
    other = filled(root.parent / "other", 2)
    refused = start("serve", other, "--listen", url.removeprefix("http://"))
    processes.append(refused)
    _, words = refused.communicate(timeout=120)
    assert refused.returncode == 2
    assert "Address already in use" in words and "Traceback" not in words
    assert not (other / "spark" / "serve").exists()


def test_a_server_that_is_gone_is_named(root: Path, processes: list[subprocess.Popen[str]]) -> None:
    url = serving(processes, root)["url"]
    processes[0].kill()
    processes[0].wait()
    stores = RemoteStores(RemoteSettings(retry_timeout_s=0.2))
    with pytest.raises(StoreUnavailableError, match=r"no answer to reader/describe .*Connection refused"):
        stores.reader(url)


# ---- commands by URL


LOOKING = ("offsets", "topics", "status", "batches", "metrics")


def looked(command: str, where: object, *options: object) -> list[dict[str, Any]]:
    """What a command shows as JSON, apart from what changes from call to call."""
    shown = objects(run(command, where, *options, "--json"))
    names = ("rocketmq_storage_message_reserve_time", "rocketmq_consumer_lag_latency", "spark_disk_used_ratio")
    rows = [row for row in shown if row.get("name") not in names]
    rows = [row for row in rows if not re.search("(latency|planned|overdue|oldest)_seconds$", row.get("name", ""))]
    for row in rows:
        row.get("labels", {}).pop("store", None)
        row.pop("diskUsed", None)
    return rows


def test_commands_that_look_say_the_same_by_url(root: Path, processes: list[subprocess.Popen[str]]) -> None:
    """Also of a server that only reads."""
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(3)), BatchRequest("app", 4, version_source="user"))
        store.create_topic("empty", 3)
    publish_offsets(str(root), "g", {("t", 0): 3})
    with contextlib.closing(LOCAL_STORES.reader(str(root))) as reader:
        store_id = reader.describe([]).store_id
    folder = checkpoint(root.parent / "checkpoint", [[offset(store_id, 2, 1)]])
    url = serving(processes, root, "--read-only")["url"]
    for command in LOOKING:
        assert looked(command, url) == looked(command, root) != []
    archives = [root.parent / name for name in ("by-url", "by-folder")]
    for where, archive in zip((url, root), archives, strict=True):
        (copied,) = objects(run("copy", where, "t", archive, "--json"))
        assert (copied["brokerName"], copied["topic"]) == (store_id, "t")
    rows, same = (objects(run("get", archive, "t", "--count", 100, "--json")) for archive in archives)
    assert (
        [(row["body"], row["properties"]) for row in rows] == [(row["body"], row["properties"]) for row in same] != []
    )
    for options in (["t", "empty"], ["--at", "2026-01-01"], ["t", "--at", "2100-01-01"]):
        assert looked("offsets", url, *options) == looked("offsets", root, *options) != []
    for options in (["--group", "g"], ["--checkpoint", folder]):
        rows = looked("lag", url, *options)
        assert rows == looked("lag", root, *options)
        assert sum(row["lag"] for row in rows) > 0
    options = ["--checkpoint", folder]
    assert looked("metrics", url, *options) == looked("metrics", root, *options)
    assert run("status", url).stdout == run("status", root).stdout
    assert "topic 'no' is not in the store. Its topics are: empty, t" in error("offsets", url, "no", code=2)
    assert "has no offsets in http" in error("lag", url, "--group", "no", code=2)


def test_a_command_by_url_has_options_for_its_server(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    cert, key = certificate(tmp_path, "server")
    tokens = replace(tmp_path / "tokens", token_line("reader", "read", "the-token"))
    secrets = ["--cert-file", cert, "--key-file", key, "--token-file", tokens]
    filled(tmp_path / "store", 10)
    url = serving(processes, tmp_path / "store", *secrets)["url"]
    token, wrong = replace(tmp_path / "token", "the-token"), replace(tmp_path / "wrong", "another")
    reached = ["--ca-file", cert, "--token-file", token]
    for command in (*LOOKING, "tail"):
        arguments = ["--json"] if command != "batches" else []
        run(command, url, *reached, *arguments, code=1 if command == "batches" else 0)
    assert run("get", url, "t", *reached).stdout
    assert "is not trusted" in error("topics", url, "--token-file", token, code=2)
    assert "asks for a token" in error("status", url, "--ca-file", cert, code=2)
    assert "does not know the token" in error("metrics", url, "--ca-file", cert, "--token-file", wrong, code=2)
    assert "found together with the folder" in error("topics", tmp_path / "store", "--token-file", token, code=2)
    assert "--key-file: found without --cert-file" in error("offsets", url, "--key-file", key, code=2)
    assert "allowed is a duration" in error("batches", url, "--retry-timeout", "soon", code=2)


def test_a_command_by_url_whose_server_is_gone(root: Path, processes: list[subprocess.Popen[str]]) -> None:
    """It says so after `--retry-timeout`; a server that is started again meanwhile answers."""
    url = serving(processes, root)["url"]
    processes[0].kill()
    processes[0].wait()
    assert "no answer to reader/describe" in error("lag", url, "--group", "g", "--retry-timeout", "100ms", code=2)
    waiting = start("topics", url, "--retry-timeout", "10m", "--json")
    processes.append(waiting)
    listen = ["--listen", url.removeprefix("http://")]
    processes.append(start("serve", root, *listen, "--json"))
    shown, _ = finish(waiting)
    assert [row["topic"] for row in map(json.loads, shown.splitlines())] == ["t"]


def test_commands_that_need_the_files_say_where_to_run_them(root: Path) -> None:
    url = "https://store.example:8443"
    for arguments in (["verify", url], ["recover", url], ["groups", url], ["topic", "create", url, "t"],
                      ["batches", "start", url, "app", 3], ["put", url, "t", "body"], ["dump", url]):  # fmt: skip
        assert "needs the store's files. Run it on the host of the store" in error(*arguments, code=2)
