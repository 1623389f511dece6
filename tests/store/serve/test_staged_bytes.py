"""What one client may have staged and not committed: counted over all its files, and before anything is taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from messagestore import BatchRequest, ConfigError, ProtocolError, StoreUnavailableError
from messagestore.files.staging_files import process_token, sweep
from messagestore.serve.access import Tokens
from messagestore.serve.hosted import Hosted
from messagestore.serve.limits import BusyError, Limits, StagedBytes
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from messagestore.spi import ColumnTexts, Write, encode, store_host_of
from messagestore.spi import remote as clients
from messagestore.spi.location import RemoteSettings
from messagestore.spi.remote import RemoteStores, RemoteWriter
from messagestore.spi.wire import frames, parts
from small import SMALL, bodies, columns, filled
from tls_files import replace, token_line

LIMIT = 25_000
"""Two files of `ROWS` rows fit, and three do not."""
ROWS = 50


class Setting:
    """A store, its server, and two clients with tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = str(filled(folder / "store", 10))
        lines = [token_line(name, "write", f"token-of-{name}") for name in ("a", "b")]
        self.tokens = replace(folder / "tokens", *lines)
        for name in ("a", "b"):
            replace(folder / name, f"token-of-{name}")
        self.server: Server | None = None
        self.start()

    def start(self) -> None:
        """Start the server, or another one in its place."""
        self.stop()
        self.server = Server(Service(Hosted(self.root, SMALL), Limits(staged=LIMIT), Tokens(self.tokens)))
        self.server.start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()

    @property
    def service(self) -> Service:
        assert self.server is not None
        return self.server.service

    def writer(self, name: str = "a") -> RemoteWriter:
        assert self.server is not None
        stores = RemoteStores(RemoteSettings(str(self.folder / name), retry_timeout_s=0.2))
        return stores.writer(self.server.url, SMALL, staging_ttl_s=60)

    def files(self) -> list[str]:
        folder = Path(self.root, "spark", "staging")
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    made.stop()


def rows(count: int = ROWS) -> Any:
    host = store_host_of(SMALL)
    return encode(ColumnTexts(columns(bodies(count))), limits=SMALL, store_host=host, born_host=host)


def staged(writer: RemoteWriter, batch: int, driver: str = "0") -> Any:
    with writer.stage(Write(driver, "k", batch), writer.prepare().store_id) as staging:
        staging.write(rows())
        return staging.finish()


def full(setting: Setting) -> list[Any]:
    """The files with which client a has no room for another one."""
    files = [staged(setting.writer(), batch) for batch in range(2)]
    total = sum(file.size for file in files)
    assert total <= LIMIT < total + files[0].size
    with pytest.raises(StoreUnavailableError, match=r"client a has staged [0-9,]+ bytes .* over the 25,000 .*--staged"):
        staged(setting.writer(), 9)
    return files


def test_several_files_of_a_client_are_over_the_limit_together(setting: Setting) -> None:
    """Each by itself is far below it. Another client is not concerned, and the figures name both."""
    files = full(setting)
    assert staged(setting.writer("b"), 0).row_count == ROWS
    assert len(setting.files()) == 3
    text = setting.service.figures().decode()
    assert f'messagestore_serve_staged_bytes{{client="a"}} {sum(file.size for file in files)}\n' in text


def test_a_commit_makes_room(setting: Setting) -> None:
    files, writer = full(setting), setting.writer()
    store_id = writer.prepare().store_id
    assert writer.commit(files[:1], BatchRequest("app", 0), store_id).result.status == "appended"
    assert staged(setting.writer(), 2).row_count == ROWS
    assert len(setting.files()) == 2


def test_an_abort_makes_room(setting: Setting) -> None:
    files, writer = full(setting), setting.writer()
    writer.abort([file.name for file in files], writer.prepare().store_id)
    assert [staged(setting.writer(), batch).row_count for batch in (2, 3)] == [ROWS, ROWS]


def test_the_sweep_makes_room(setting: Setting) -> None:
    """It deletes the files of a driver that has died."""
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    driver = process_token(ended.pid)
    for batch in range(2):
        staged(setting.writer(), batch, driver)
    ended.communicate(b"\n")
    with pytest.raises(StoreUnavailableError, match="--staged"):
        staged(setting.writer(), 2)
    assert len(sweep(os.path.join(setting.root, "spark", "staging"), 3600.0)) == 2
    assert staged(setting.writer(), 2).row_count == ROWS


def test_a_server_that_was_restarted_has_not_forgotten(setting: Setting) -> None:
    """The names of the files say whose they are."""
    full(setting)
    setting.start()
    with pytest.raises(StoreUnavailableError, match="client a has staged"):
        staged(setting.writer(), 3)
    assert staged(setting.writer("b"), 0).row_count == ROWS


def test_a_client_over_its_limit_is_refused_before_its_rows_are_read(setting: Setting) -> None:
    """With 429 and a time to come again; no memory is taken, and no file is made."""
    full(setting)
    before = setting.files()
    frame = b"".join(parts.pack_rows(rows()))
    begin = b"".join(frames.packed({"stage": {"write": {"$": "Write", "driver": "0", "key": "k"}, "store_id": ""}}))
    assert setting.server is not None
    host, port = setting.server.url.removeprefix("http://").split(":")
    head = "POST /v1/stage HTTP/1.1\r\nHost: x\r\nMessagestore-Protocol: 1-1\r\nAuthorization: Bearer token-of-a\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        sock.sendall(b"%x\r\n%s\r\n" % (len(begin), begin))
        sock.sendall(b"%x\r\n%s" % (len(frame), frame[:-100]))  # the rest is never sent
        answer = sock.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 429 ") and b"\r\nRetry-After: 1\r\n" in answer
    assert setting.files() == before
    assert setting.service.budget.memory == 0


def test_files_that_are_being_written_count(setting: Setting) -> None:
    """Two streams, each of which would fit: the second one is ended, and leaves nothing."""
    writer = setting.writer()
    store_id = writer.prepare().store_id
    counts = setting.service.staged
    with counts.share("a") as other:
        other.take(LIMIT - 5_000)
        with writer.stage(Write("0", "k"), store_id) as staging:
            staging.write(rows())
            with pytest.raises(StoreUnavailableError, match="--staged"):
                staging.finish()
        assert setting.files() == []
        assert counts.sums() == {"a": other.size}
    assert counts.sums() == {"a": 0}
    assert staged(writer, 0).row_count == ROWS


def test_a_file_is_counted_once_while_it_gets_its_last_name() -> None:
    """Between the rename and the end of its stream it is in the folder, and being written."""
    folder: dict[str, int] = {}
    counts = StagedBytes(100, lambda client: folder)
    with counts.share("a") as share:
        share.take(39)
        share.stem = "f"
        folder["f"] = 60
        assert counts.sums() == {"a": 40}
        share.staged = 60
    with counts.share("a") as other:
        other.take(39)
        with pytest.raises(BusyError) as refused:
            other.take(1)
        assert refused.value.status == 429
        assert counts.sums() == {"a": 100}
    assert counts.sums() == {"a": 60}


@pytest.mark.parametrize("driver", ["../../../escaped", "../topics", "a\nb", "", "0-0"])
def test_a_write_whose_driver_is_no_process_makes_no_file(setting: Setting, driver: str) -> None:
    """A client chooses this text, and it becomes part of a file's name."""
    before = set(setting.folder.rglob("*"))
    with pytest.raises(ConfigError, match="allowed are the token of a process, or 0"):
        staged(setting.writer(), 0, driver)
    with pytest.raises(ConfigError, match="and the batch -1"):
        staged(setting.writer(), -1)
    after = set(setting.folder.rglob("*")) - before
    assert {path.name for path in after} <= {"staging"}


def test_a_large_file_that_is_over_the_limit_says_so(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not kept to be sent again, so the task fails; with the words of the server, not of a broken connection."""
    monkeypatch.setattr(clients, "KEPT_SIZE", 1)
    monkeypatch.setattr(clients, "_FIRST_SIZE", 1)
    with setting.service.staged.share("a") as other:
        other.take(LIMIT - 5_000)
        refused(setting, StoreUnavailableError, "client a has staged .*--staged.* has to be run again")


def test_a_file_that_can_never_fit_is_refused_at_once(setting: Setting) -> None:
    """It was sent again until `retryTimeout` was over, and then said that there was no answer."""
    refused(setting, ProtocolError, r"a staged file of at least \d\d,\d+ bytes; allowed are 25,000 .*--staged")


def refused(setting: Setting, kind: type[Exception], words: str) -> None:
    """Write rows until they are refused: what is on its way hides that for some megabytes. No file is left."""
    writer, some = setting.writer(), rows()
    with writer.stage(Write("0", "k"), writer.prepare().store_id) as staging, pytest.raises(kind, match=words):  # noqa: PT012
        for _ in range(5000):
            staging.write(some)
        staging.finish()
    assert setting.files() == []
