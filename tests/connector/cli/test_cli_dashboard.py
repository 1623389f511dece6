"""`messagestore dashboard`: where it listens, what it asks for, and that it ends."""

from __future__ import annotations

import http.client
import signal
import socket
import sys
import time
import urllib.parse
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from cli_runs import error, start
from small import filled

TOKEN = "a-token-of-enough-length"


def test_a_missing_extra_is_one_sentence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = error("dashboard", root, code=2)
    assert "the package uvicorn is not installed" in said and "-m pip install" in said and "starlette" in said


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "store", 10)


def get(url: str, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_pages_are_served_until_a_signal(
    root: Path, tmp_path: Path, stop: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token comes from a file, or from the environment."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    given: list[object] = ["--token-file", tmp_path / "token"]
    if stop == signal.SIGTERM:
        given = []
        monkeypatch.setenv("MESSAGESTORE_DASHBOARD_TOKEN", TOKEN)
    with start("dashboard", root, "--listen", "127.0.0.1:0", *given) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = process.stdout.readline().strip()
            status, page = get(url, "/s/store/topics", Authorization=f"Bearer {TOKEN}")
            assert status == 200 and b"topic?topic=t" in page
            assert get(url, "/s/store/topics")[0] == 303
            assert get(url, "/", Host="evil.example")[0] == 421
            process.send_signal(stop)
            assert process.wait(60) in (0, -stop)
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_a_signal_ends_a_live_list_and_says_nothing(root: Path) -> None:
    with start("dashboard", root, "--listen", "127.0.0.1:0") as process:
        connection = None
        try:
            assert process.stdout is not None and process.stderr is not None
            connection = http.client.HTTPConnection(urllib.parse.urlsplit(process.stdout.readline()).netloc, timeout=60)
            connection.request("GET", "/s/store/events?topic=t")
            answer = connection.getresponse()
            while not answer.readline().startswith(b"event: begin"):
                pass
            process.send_signal(signal.SIGTERM)
            assert b"event: " not in answer.read()  # to its end
            assert process.wait(60) in (0, -signal.SIGTERM)
            assert process.stderr.read() == ""
        finally:
            process.kill()
            if connection is not None:
                connection.close()


def test_masks_and_a_decoder_in_the_current_folder(root: Path, tmp_path: Path) -> None:
    (tmp_path / "codec.py").write_text(
        "def decode(message):\n    return {'card': '4111', 'length': len(message.body)}\n"
    )
    options = ("--mask", "card", "--mask", "KEYS", "--decoder", "codec:decode")
    with start("dashboard", root, "--listen", "127.0.0.1:0", *options, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            status, page = get(process.stdout.readline().strip(), "/s/store/message?topic=t&queue=0&offset=0")
            assert status == 200 and b"length" in page and b"4111" not in page and b"***" in page
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("codec", "allowed is MODULE:FUNCTION"),
        ("no_such_module:decode", "cannot be imported: ModuleNotFoundError"),
        ("wrong_codec:decode", "cannot be imported: SyntaxError"),
        ("json:decode", "json has no function decode"),
    ],
)
def test_a_decoder_that_cannot_be_had_is_one_sentence(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    (tmp_path / "wrong_codec.py").write_text("def decode(:\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert why in error("dashboard", root, "--decoder", text, code=2)


@pytest.mark.parametrize("path", ["/stores", "stores", "/stores/"])
def test_below_the_path_of_a_proxy_every_link_has_it(root: Path, path: str) -> None:
    with start("dashboard", root, "--listen", "127.0.0.1:0", "--root-path", path) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.endswith("/stores/")
            status, page = get(url, "/s/store/topics")  # the proxy takes the path away
            assert status == 200 and b'href="/stores/s/store/topic?topic=t"' in page
            assert get(url, "/static/style.css")[0] == 200
        finally:
            process.kill()


def test_an_address_that_others_reach_needs_a_token(root: Path) -> None:
    said = error("dashboard", root, "--listen", "0.0.0.0:8097", code=2)
    assert "can be reached from other hosts, and there is no token" in said and "--token-file" in said
    assert "MESSAGESTORE_DASHBOARD_TOKEN" in said


@pytest.mark.parametrize("text", ["", "two words", "line\nline", "\u00fc" * 20, "x" * 5000])
def test_a_file_without_a_token_is_refused(
    root: Path, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(text)
    assert "does not hold one token" in error("dashboard", root, "--token-file", tmp_path / "token", code=2)
    if text and "\u00fc" not in text:
        monkeypatch.setenv("MESSAGESTORE_DASHBOARD_TOKEN", text)
        assert "MESSAGESTORE_DASHBOARD_TOKEN does not hold one token" in error("dashboard", root, code=2)


def test_what_cannot_be_done_is_one_sentence(root: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short")
    assert "allowed are 16 or more" in error("dashboard", root, "--token-file", tmp_path / "token", code=2)
    assert "No such file" in error("dashboard", root, "--token-file", tmp_path / "none", code=2)
    assert "allowed is HOST:PORT" in error("dashboard", root, "--listen", "8097", code=2)
    assert "--read-limit: found 'fast'" in error("dashboard", root, "--read-limit", "fast", code=2)
    assert "found no message store" in error("dashboard", tmp_path / "nothing", code=2)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        assert "cannot be listened on" in error("dashboard", root, "--listen", address, code=2)


def test_nobody_wakes_up_while_no_page_is_open(root: Path) -> None:
    with start("dashboard", root, "--listen", "127.0.0.1:0") as process:
        try:
            assert process.stdout is not None
            assert get(process.stdout.readline().strip(), "/")[0] == 200
            while wake_ups(process.pid) != wake_ups(process.pid, after_s=1.0):
                pass
        finally:
            process.kill()


def wake_ups(pid: int, after_s: float = 0.0) -> int:
    """How often threads of a process have waited for something."""
    time.sleep(after_s)
    tasks = Path("/proc", str(pid), "task").iterdir()
    texts = [(task / "status").read_text() for task in tasks]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)
