"""`messagestore run`: all that a store needs beside its programs, in one process that is stopped, killed and held up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli_runs import TIMEOUT_S, error, finish, lines, read_lines, run, start
from messagestore import LocalTransactionState, Message, MessageStore, stored_config
from messagestore.inspect.verify import verify
from processes import starting_broker
from pyspark_messagestore import command
from pyspark_messagestore.cli import checks, commands
from small import SMALL, bodies

pytest.importorskip("prometheus_client")

COMMIT, ROLLBACK, UNKNOW = LocalTransactionState
SETTINGS = SMALL.replace(message_delay_level="1s 2s", transaction_time_out=0, transaction_check_interval=200)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "store.properties"
    path.write_text(
        "mappedFileSizeCommitLog=16384\nmappedFileSizeConsumeQueue=320\nmaxHashSlotNum=64\nmaxIndexNum=200\n"
        "maxMessageSize=8192\nmessageDelayLevel=1s 2s\ntransactionTimeOut=0\ntransactionCheckInterval=200\n"
        "cleanResourceInterval=100\nlockTimeout=1s\n"
    )
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a delayed message, a half message, and segments that were written to four days ago."""
    root = tmp_path / "store"
    with MessageStore.open(root, SETTINGS) as store:
        for number in range(40):
            store.put_message(Message("flights", b"." * 1000, queue_id=0, keys=[f"f{number}"]))
        store.half_message(Message("orders", b"42", queue_id=0, born_timestamp_ms=0), "payments")
        store.put_message(Message("gates", b"B12", queue_id=0, delay_time_level=1))
    return root


def count(root: Path, topic: str) -> int:
    with MessageStore.open_read_only(root, SETTINGS) as store:
        return store.max_offset(topic, 0)


def told(process: subprocess.Popen[str], *wanted: tuple[str, str]) -> None:
    """Read what the command says until each of these services has done something."""
    missing = set(wanted)
    while missing:
        (line,) = read_lines(process, 1)
        row = json.loads(line)
        missing -= {(service, field) for service, field in missing if row.get("service") == service and row[field]}


DELIVERED, DELETED = ("delivery", "delivered"), ("retention", "segments")
CHECKED, COMMITTED, ROLLED_BACK = (("half messages", field) for field in ("checked", "committed", "rolledBack"))


@contextmanager
def running(*arguments: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = start("run", *arguments, "--json", "--listen", "127.0.0.1:0", **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_one_process_delivers_deletes_checks_and_is_looked_at(root: Path, config: Path) -> None:
    """Until SIGTERM, after which the store is closed. The setting of retention is the store's, and comes meanwhile."""
    for path in sorted((root / "commitlog").iterdir())[:2]:
        os.utime(path, (0, 0))
    with running(root, "--store-config", config, "--check-command", "echo commit") as process:
        (line,) = read_lines(process, 1)
        first = json.loads(line)
        assert first["services"] == ["delivery", "retention", "half messages"]
        told(process, COMMITTED, DELIVERED)
        assert (count(root, "orders"), count(root, "gates")) == (1, 1)
        finish(start("config", root, "set", "fileReservedTime=1"))
        told(process, DELETED)
        with urllib.request.urlopen(first["metrics"]) as response:
            assert b"spark_store_up" in response.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    assert not (root / "abort").exists()
    assert not (root / "commitlog" / f"{0:020d}").exists()
    assert verify(root, SETTINGS).ok


def test_for_a_person_it_says_what_runs_and_what_was_done(root: Path, config: Path) -> None:
    process = start("run", root, "--store-config", config, "--without", "metrics")
    try:
        shown = read_lines(process, 2)
        assert shown[0].split() == ["delivery", "of", "delayed", "messages", "that", "are", "due"]
        assert f"messagestore config {root} set fileReservedTime=HOURS" in shown[1]
        process.send_signal(signal.SIGINT)
        stdout, _ = finish(process)
    finally:
        process.kill()
    assert stdout.splitlines()[-1].endswith("0 segments deleted, 0 half messages committed and 0 rolled back")


def test_a_half_message_about_which_nobody_answers_is_put_aside_aloud(root: Path, config: Path) -> None:
    """Each question counts, also while the URL is down: the message was gone, and nothing said where."""
    config.write_text(config.read_text() + "transactionCheckMax=2\n")
    arguments = [root, "--store-config", config, "--without", "metrics", "--check-url", "http://127.0.0.1:1/"]
    process = start("run", *arguments, "--json")
    try:
        told(process, ("half messages", "discarded"))
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert "They are in TRANS_CHECK_MAX_TIME_TOPIC now" in stderr
    assert stderr.count("the URL cannot be asked") == 2
    assert count(root, "TRANS_CHECK_MAX_TIME_TOPIC") == 1


def test_kills_lose_and_double_nothing(root: Path, config: Path) -> None:
    """kill -9 while it delivers and checks; the next one goes on where the killed one was."""
    with MessageStore.open(root, SETTINGS) as store:
        for body in bodies(30):
            store.put_message(Message("late", body, queue_id=0, delay_time_level=1))
    for _ in range(3):
        with running(root, "--store-config", config, "--check-command", "echo unknown") as process:
            told(process, CHECKED)
            process.kill()
            process.wait(TIMEOUT_S)
    with running(root, "--store-config", config, "--check-command", "echo rollback") as process:
        told(process, ROLLED_BACK)
        while count(root, "late") < 30:
            read_lines(process, 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    with MessageStore.open_read_only(root, SETTINGS) as store:
        assert sorted(m.body for m in store.get_message("late", 0, 0, max_count=64).messages) == bodies(30)
        assert store.max_offset("orders", 0) == 0
        assert store.open_halves() == []
    assert verify(root, SETTINGS).ok


# ---- what holds it up

HELD_UP = """
import os, sys
from messagestore import StorePoisonedError
from messagestore.files.disk import Disk
from pyspark_messagestore.cli import services
from pyspark_messagestore.cli.main import main
services.AGAIN_S = 0.05
flag, arguments = sys.argv[1], sys.argv[2:]
free = Disk.free
Disk.free = lambda disk, path: 0 if os.path.exists(flag + ".full") else free(disk, path)
deliver = services.deliver_delayed
def failing(*given):
    if os.path.exists(flag + ".poisoned"):
        raise StorePoisonedError("a sync failed")
    return deliver(*given)
services.deliver_delayed = failing
sys.argv = ["messagestore", *arguments]
main()
"""
"""The command on a machine whose disk is full, or fails, while a file exists; it tries again soon."""


@contextmanager
def held_up(tmp_path: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HELD_UP, tmp_path / "flag", "run", *arguments, "--json", "--without", "metrics"]
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def has_open(process: subprocess.Popen[str], path: Path) -> bool:
    """Whether a process has a file open."""
    folder = Path(f"/proc/{process.pid}/fd")
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            if (folder / name).readlink() == path:
                return True
    return False


def complaint(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def test_a_full_disk_is_said_once_and_waited_for(root: Path, config: Path, tmp_path: Path) -> None:
    """The process must not end: retention makes room, and Prometheus wants to know."""
    full = tmp_path / "flag.full"
    full.touch()
    with held_up(tmp_path, root, "--store-config", config) as process:
        read_lines(process, 1)
        assert complaint(process).startswith("messagestore: delivery: ")
        assert process.poll() is None
        full.unlink()
        told(process, DELIVERED)
        assert complaint(process) == "messagestore: delivery: goes on\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    assert count(root, "gates") == 1


def test_a_writer_that_holds_the_store_for_long_is_said_once_and_waited_for(
    root: Path, config: Path, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        with MessageStore.open(root, SETTINGS):
            process = stack.enter_context(held_up(tmp_path, root, "--store-config", config, "--wait", "100ms"))
            read_lines(process, 1)
            said = complaint(process)
            assert said.startswith("messagestore: delivery: ") and f"pid {os.getpid()}" in said
        told(process, DELIVERED)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("command", [("run", "--without", "metrics"), ("deliver",)], ids=["run", "deliver"])
def test_it_ends_when_it_is_told_to_although_another_writer_holds_the_store(
    root: Path, config: Path, command: tuple[str, ...]
) -> None:
    """It ended only when its wait for the store was over: half a minute, and systemd kills what takes too long."""
    with MessageStore.open(root, SETTINGS):
        process = start(*command, root, "--store-config", config, "--wait", "1h")
        try:
            while not has_open(process, root / "spark" / "writer.lock"):
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()
            process.communicate()


def test_a_broker_ends_it(root: Path, config: Path) -> None:
    """A broker delivers, deletes and checks by itself, so there is nothing to wait for."""
    with starting_broker(root) as java:
        assert java.word() == "locked"
        process = start("run", root, "--store-config", config, "--without", "metrics")
        _, said = finish(process, code=3)
    assert "broker" in said
    assert said.endswith("This ended delivery, and with it the command\n")


def test_what_does_not_pass_ends_all_services(root: Path, config: Path, tmp_path: Path) -> None:
    """The exit code is not 0, so systemd starts it again; what was begun is finished, and the store is closed."""
    with held_up(tmp_path, root, "--store-config", config, "--check-command", "echo unknown") as process:
        told(process, DELIVERED)
        (tmp_path / "flag.poisoned").touch()
        _, said = finish(process, code=2)
    # On a busy machine, another service may have said before that it waits for the delivery.
    assert said.endswith("messagestore: a sync failed; This ended delivery, and with it the command\n")
    assert not (root / "abort").exists()


# ---- systemd


def test_systemd_learns_that_it_is_ready_alive_and_in_trouble(root: Path, config: Path, tmp_path: Path) -> None:
    """READY=1 as soon as it works, WATCHDOG=1 as often as systemd wants, STATUS= for what goes wrong, STOPPING=1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(TIMEOUT_S)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
        with running(root, "--store-config", config, "--wait", "100ms", env=environment) as process:
            assert notify.recv(4096) == b"READY=1"
            assert [notify.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            with MessageStore.open(root, SETTINGS):
                while not (said := notify.recv(4096)).startswith(b"STATUS="):
                    assert said == b"WATCHDOG=1"
            assert b"delivery: " in said
            process.send_signal(signal.SIGTERM)
            while (said := notify.recv(4096)) != b"STOPPING=1":
                assert said.startswith((b"WATCHDOG=1", b"STATUS="))
            assert process.wait(TIMEOUT_S) == 0


def test_a_socket_that_nobody_reads_is_said(root: Path, config: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "nobody")}
    with running(root, "--store-config", config, env=environment) as process:
        assert "NOTIFY_SOCKET: READY could not be told to systemd" in complaint(process)


# ---- checks


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler, bytes], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self, self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/paid"
        finally:
            server.shutdown()
            thread.join()


def half(root: Path) -> Any:
    """The half message of the fixture, as a check gets it."""
    found = []
    with MessageStore.open(root, SETTINGS) as store:
        store.check_halves(lambda message: found.append(message) or UNKNOW)  # type: ignore[func-returns-value]
    return found[0]


def test_a_command_gets_the_message_and_answers_with_a_word(root: Path, tmp_path: Path) -> None:
    message = half(root)
    for words, state in [("commit", COMMIT), ("ROLLBACK_MESSAGE", ROLLBACK), ("unknown", UNKNOW), ("UNKNOW", UNKNOW)]:
        ask = checks.check_by(f"sh -c 'cat > {tmp_path}/asked; echo {words}'", None, 60)
        assert ask is not None
        assert checks.answered(ask, message) is state
    asked = json.loads((tmp_path / "asked").read_text())
    assert (asked["topic"], asked["body"], asked["producerGroup"]) == ("orders", "42", "payments")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sh -c 'echo commit; exit 3'", "the command ended with exit code 3"),
        ("sh -c 'kill -9 $$'", "the command was ended by signal 9"),
        ("echo yes", "it answered 'yes'; allowed are commit, rollback and unknown"),
        ("true", "it answered ''"),
        ("sh -c 'sleep 600 & sleep 600'", "had not ended after 0.2 s"),
    ],
)
def test_a_command_that_does_not_answer_leaves_the_message_open(
    root: Path, command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it has said a word before it failed."""
    ask = checks.check_by(command, None, 0.2 if "sleep" in command else 60)
    assert ask is not None
    assert checks.answered(ask, half(root)) is UNKNOW
    said = capsys.readouterr().err
    assert words in said and "It stays open" in said


def test_a_url_gets_the_message_and_answers_with_a_word(root: Path) -> None:
    message = half(root)
    asked = []

    def answer(request: BaseHTTPRequestHandler, data: bytes) -> None:
        asked.append((request.headers["Content-Type"], json.loads(data)["body"]))
        request.send_response(200)
        request.end_headers()
        request.wfile.write(b"rollback\n")

    with answering(answer) as url:
        ask = checks.check_by(None, url, 60)
        assert ask is not None
        assert checks.answered(ask, message) is ROLLBACK
    assert asked == [("application/json", "42")]


@pytest.mark.parametrize("status", [204, 302, 500])
def test_a_url_that_does_not_answer_leaves_the_message_open(
    root: Path, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: BaseHTTPRequestHandler, data: bytes) -> None:
        request.send_response(status)
        request.send_header("Location", "/elsewhere")
        request.end_headers()

    message = half(root)
    with answering(answer) as url:
        ask = checks.check_by(None, url, 60)
        assert ask is not None
        assert checks.answered(ask, message) is UNKNOW
    assert checks.answered(ask, message) is UNKNOW  # nobody listens any more
    said = capsys.readouterr().err.splitlines()
    assert f"HTTP status {status}" in said[0]
    assert "refused" in said[1]


@pytest.mark.parametrize(
    ("answered", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncommit", "no whole answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ncommit", "no whole answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\ncommit\r\n", "no whole answer"),
        (b"\0 no HTTP\r\n\r\n", "no whole answer of HTTP (BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"." * 70_000 + b"\r\n\r\ncommit", "no whole answer of HTTP (LineTooLong"),
        (b"HTTP/1.1 200 OK\r\n\r\ncommit" + b" " * 5000 + b"ted to nothing", "it answered 'commit"),
    ],
)
def test_an_answer_that_is_cut_or_garbage_is_none(
    root: Path, answered: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that was killed within its answer had sent six bytes of it, and the message was committed."""

    def answer(request: BaseHTTPRequestHandler, data: bytes) -> None:
        request.wfile.write(answered)
        request.close_connection = True

    message = half(root)
    with answering(answer) as url:
        ask = checks.check_by(None, url, 60)
        assert ask is not None
        assert checks.answered(ask, message) is UNKNOW
    said = capsys.readouterr().err
    assert words in said and "It stays open" in said
    assert len(said) < 500


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_a_url_that_answers_a_byte_at_a_time_is_not_waited_for(
    root: Path, head: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each byte comes in time, and the answer does not."""
    given_up = threading.Event()

    def answer(request: BaseHTTPRequestHandler, data: bytes) -> None:
        request.close_connection = True
        with contextlib.suppress(OSError):
            request.wfile.write(head)
            while not given_up.wait(0.05):
                request.wfile.write(b" ")

    message = half(root)
    with answering(answer) as url:
        ask = checks.check_by(None, url, 0.5)
        assert ask is not None
        try:
            assert checks.answered(ask, message) is UNKNOW
        finally:
            given_up.set()
    assert "had not answered after 0.5 s (--check-timeout)" in capsys.readouterr().err


def test_other_writers_go_on_while_a_check_takes_its_time(root: Path, config: Path, tmp_path: Path) -> None:
    """The store is not held while the user's command runs."""
    (tmp_path / "go").touch()
    waits = f"sh -c 'touch {tmp_path}/asked; while [ -e {tmp_path}/go ]; do sleep 0.05; done; echo commit'"
    arguments = [root, "--store-config", config, "--check-command", waits, "--check-timeout", "10m"]
    with running(*arguments, "--without", "delivery") as process:
        read_lines(process, 1)
        while not (tmp_path / "asked").exists():
            assert process.poll() is None
        with MessageStore.open(root, SETTINGS) as store:
            store.put_message(Message("orders", b"another", queue_id=0))
        (tmp_path / "go").unlink()
        told(process, COMMITTED)
    assert count(root, "orders") == 2


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check-command", "echo", "--check-url", "http://x/"], "found both; allowed is one of them"),
        (["--check-command", "no-such-program a"], "found no program 'no-such-program'"),
        (["--check-command", "'"], "quoted as for a shell"),
        (["--check-command", ""], "found no program ''"),
        (["--check-url", "ftp://x/"], "begins with http:// or https://"),
        (["--check-url", "http://[::1/"], "well formed"),
        (["--check-url", "http://x:paid/"], "well formed"),
        (["--check-url", "http://x:99999/"], "well formed"),
        (["--check-url", "http://x/was paid"], "escaped, such as %20"),
        (["--check-url", "http://x/bezahlt-ü"], "escaped, such as %20"),
        (["--check-url", "http://me:word@x/"], "without a user and a password"),
        (["--check-timeout", "soon"], "--check-timeout"),
        (["--check-timeout", "0s", "--check-command", "true"], "--check-timeout: found 0 s"),
        (["--listen", "here"], "allowed is HOST:PORT"),
        (["--without", "metrics", "--checkpoint", "x"], "found together with --without metrics"),
        (["--checkpoint", "no-such-folder"], "no-such-folder"),
    ],
)
def test_what_was_mistyped_is_told_before_anything_runs(root: Path, arguments: list[str], words: str) -> None:
    assert words in error("run", root, *arguments, code=2)


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    assert "no message store" in error("run", tmp_path / "no", code=2)
    assert list(tmp_path.iterdir()) == []


def test_retention_is_off_until_the_store_has_a_setting(root: Path, config: Path) -> None:
    assert not stored_config(root).retention_enabled
    before = sorted((root / "commitlog").iterdir())
    for path in before:
        os.utime(path, (0, 0))
    with running(root, "--store-config", config) as process:
        told(process, DELIVERED)
    assert sorted((root / "commitlog").iterdir()) == before
    assert lines(run("deliver", root, "--once", "--store-config", config)) == ["0 messages delivered"]


SIGNALLED = """
import os, signal, sys
from pyspark_messagestore import command

class Told:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGTERM)

wanted, *sys.argv[1:] = sys.argv[1:]
sys.meta_path.insert(0, Told())
command.main()
"""
"""The command line, to which SIGTERM comes while it imports a module."""


@pytest.mark.parametrize(
    ("words", "imported", "code"),
    [
        (("run",), "typer", 0),
        (("run",), "pyspark_messagestore.cli.commands.run", 0),
        (("deliver",), "pyspark_messagestore.cli.commands.deliver", 0),
        (("serve",), "pyspark_messagestore.cli.commands.serve", 0),
        (("metrics",), "pyspark_messagestore.cli.commands.metrics", 0),
        (("metrics", "--once"), "pyspark_messagestore.cli.commands.metrics", -signal.SIGTERM),
        (("copy", "--follow"), "pyspark_messagestore.cli.commands.copy", 0),
        (("copy",), "pyspark_messagestore.cli.commands.copy", -signal.SIGTERM),
        (("verify",), "pyspark_messagestore.cli.commands.verify", -signal.SIGTERM),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_service_that_is_told_to_end_while_it_starts_ends_with_0(
    tmp_path: Path, words: tuple[str, ...], imported: str, code: int
) -> None:
    """systemd stops what it has just started; a command that was to do its work and end has failed then."""
    process = subprocess.run(
        [sys.executable, "-c", SIGNALLED, imported, *words, str(tmp_path)],
        timeout=TIMEOUT_S,
        capture_output=True,
        check=False,
    )
    assert process.returncode == code, process.stderr.decode()


def test_the_commands_that_end_with_0_while_they_start_are_those_that_are_told_to_end() -> None:
    """`command` knows their names before it imports anything; `dashboard` is uvicorn's to end."""
    folder = Path(commands.__file__).parent
    found = {path.stem for path in folder.glob("*.py") if "with told_to_end()" in path.read_text()}
    assert found == {*command._UNTIL_TOLD, "copy"}


WAITING = """
import os, signal, sys
from pyspark_messagestore.cli.services import told_to_end

with told_to_end() as ends:
    with ends._cond:  # as the main thread for a moment of each wait
        os.kill(os.getpid(), int(sys.argv[1]))
        sys.stdout.write("handled")
    sys.exit(0 if ends.wait(30) else 1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_wait_is_obeyed(number: signal.Signals) -> None:
    """The handler waited for the lock of the event, which its own thread had: `run` did not end any more."""
    done = subprocess.run(
        [sys.executable, "-c", WAITING, str(int(number))], timeout=TIMEOUT_S, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"handled"), done.stderr.decode()
