"""Clients that stop in the middle of a stream: what they hold meanwhile, and what is left of them after the idle time."""

from __future__ import annotations

import ctypes
import json
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_runs import read_lines, start
from messagestore import BatchRequest, MessageStore, StoreConfig
from messagestore.serve import service as services
from messagestore.serve.hosted import Hosted
from messagestore.serve.limits import MIB, SPARE_THREADS, Budget, Limits
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from messagestore.spi import ColumnTexts, Range, Write, encode, store_host_of
from messagestore.spi.location import RemoteSettings
from messagestore.spi.remote import RemoteStores
from messagestore.spi.wire import frames, parts, values
from small import bodies, columns

STORES = RemoteStores(RemoteSettings(retry_timeout_s=60.0))
HEADERS = "Host: x\r\nMessagestore-Protocol: 1-1\r\n"
CONFIG = StoreConfig(mapped_file_size_commit_log=256 * MIB)
COUNT, BODY_SIZE = 400, 60_000
"""24 MB: more than a part, and more than the buffers between the server and a client that does not read."""
EIGHT = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("stopped") / "store")
    with MessageStore.open(path, CONFIG) as store:
        store.append_batch(columns(bodies(COUNT, BODY_SIZE), queues=1), BatchRequest("filled", 0))
    return path


class Clients:
    """Connections of clients that say only what a test lets them say."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self.sockets: list[socket.socket] = []

    def send(self, verb: str, framing: str, data: bytes) -> socket.socket:
        """Begin a request, and read nothing."""
        sock = socket.socket()
        self.sockets.append(sock)
        sock.settimeout(60)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(self._address)
        sock.sendall(f"POST /v1/{verb} HTTP/1.1\r\n{HEADERS}{framing}\r\n\r\n".encode() + data)
        return sock

    def gather(self) -> socket.socket:
        """Ask for all messages."""
        arguments = {"arguments": {"ranges": [Range("t", 0, 0, COUNT)]}}
        body = json.dumps(values.to_json(arguments)).encode()
        return self.send("gather", f"Content-Length: {len(body)}", body)

    def stage(self, store_id: str) -> socket.socket:
        """Begin a file, and send half of a frame of rows."""
        host = store_host_of(CONFIG)
        rows = encode(ColumnTexts(columns(bodies(10))), limits=CONFIG, store_host=host, born_host=host)
        begin = b"".join(frames.packed({"stage": {"write": values.to_json(Write("0", "k")), "store_id": store_id}}))
        frame = b"".join(parts.pack_rows(rows))
        data = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (begin, frame))
        return self.send("stage", "Transfer-Encoding: chunked", data[:-100])

    def close(self) -> None:
        while self.sockets:
            self.sockets.pop().close()


def until(fact: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def files(root: str) -> list[str]:
    folder = Path(root, "spark", "staging")
    return [path.name for path in folder.iterdir()] if folder.exists() else []


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The verb of each stream that has begun to send or to receive rows."""
    begun: list[str] = []
    send, frame = services._Request._send, services._Request._frame

    def noted_send(self: Any, pieces: Any) -> None:
        if self.verb == "gather":
            begun.append(self.id)
        send(self, pieces)

    def noted_frame(self: Any, room: Any) -> Any:
        begun.append(self.id)
        return frame(self, room)

    monkeypatch.setattr(services._Request, "_send", noted_send)
    monkeypatch.setattr(services._Request, "_frame", noted_frame)
    return begun


def test_clients_that_stop_in_stage_and_in_gather_leave_nothing(root: str, stuck: list[str]) -> None:
    """Eight of each. Others write and read meanwhile; after the idle time there is no thread, file or memory of them."""
    limits = Limits(streams=2 * EIGHT + 4, memory=256 * MIB, idle_s=12.0)
    server = Server(Service(Hosted(root, CONFIG), limits))
    server.start()
    clients = Clients(server.url)
    try:
        writer = STORES.writer(server.url, CONFIG, staging_ttl_s=60)
        store_id = writer.prepare().store_id
        for _ in range(EIGHT):
            clients.stage(store_id)
            clients.gather()
        until(lambda: len(set(stuck)) == 2 * EIGHT)
        budget, pool = server.service.budget, server._http.requests

        host = store_host_of(CONFIG)
        with writer.stage(Write("0", "other"), store_id) as staging:
            staging.write(encode(ColumnTexts(columns(bodies(5))), limits=CONFIG, store_host=host, born_host=host))
            staged = staging.finish()
        version = sum(name.endswith(".staged") for name in files(root))
        assert writer.commit([staged], BatchRequest("other", version - 1), store_id).result.status == "appended"
        reader = STORES.reader(server.url)
        assert sum(len(part.sizes) for part in reader.gather([Range("t", 0, COUNT - 5, COUNT)])) == 5
        reader.close()

        until(lambda: (budget.streams, budget.memory, files(root)) == (0, 0, []))
        until(lambda: pool.idle == limits.streams + SPARE_THREADS)
        until(lambda: len(server._http.open_connections) < EIGHT)  # those that others keep
    finally:
        clients.close()
        server.stop()


def test_64_streams_stay_within_the_budget(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clients take the first bytes and stop, so each keeps what it holds; whoever finds nothing left waits."""
    limits = Limits(memory=64 * MIB, idle_s=60.0)
    peaks, change = [0], Budget.change

    def noted(self: Budget, by: int) -> None:
        change(self, by)
        peaks.append(self.memory)

    monkeypatch.setattr(Budget, "change", noted)
    others = {thread.name for thread in threading.enumerate()}  # of servers that other tests use
    server = Server(Service(Hosted(root, CONFIG), limits))
    server.start()
    clients = Clients(server.url)
    try:
        for _ in range(limits.streams):
            clients.gather()
        budget = server.service.budget
        until(lambda: budget.streams == limits.streams)
        until(lambda: budget.memory > limits.memory - 2 * services.PART_SIZE)
        assert max(peaks) <= limits.memory
        names = {thread.name for thread in threading.enumerate()} - others
        assert sum(name.startswith("CP Server") for name in names) <= limits.streams + SPARE_THREADS
    finally:
        clients.close()
        server.stop()
    until(lambda: (budget.streams, budget.memory) == (0, 0))
    assert max(peaks) <= limits.memory


def test_64_readers_that_stop_take_no_more_memory_than_the_server_may(root: str) -> None:
    """The whole process, as the kernel counts it: 450 MB with 256 MiB for streams."""
    process = start("serve", root, "--read-only", "--idle", "600s", "--listen", "127.0.0.1:0", "--json")
    try:
        (line,) = read_lines(process, 1)
        clients = Clients(json.loads(line)["url"])
        waiting = [clients.gather() for _ in range(64)]
        begun = 256 * MIB // (2 * services.PART_SIZE)  # the others wait for memory that these hold
        until(lambda: len(select.select(waiting, [], [], 0.1)[0]) >= begun)
        status = Path(f"/proc/{process.pid}/status").read_text()
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
        assert int(peak) * 1024 < 450_000_000
        clients.close()
    finally:
        process.kill()
        process.communicate()


_HEAPS_OF_THREADS = """
import ctypes, re, sys, threading
from messagestore.serve.limits import keep_few_heaps

if sys.argv[1] == "few":
    keep_few_heaps()
met, held = threading.Barrier(12), []

def take():
    held.append([bytearray(3000) for _ in range(100)])
    met.wait(60)

threads = [threading.Thread(target=take) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(len(re.findall("<heap ", open(sys.argv[2]).read())))
"""


def test_the_threads_of_a_server_share_few_heaps(tmp_path: Path) -> None:
    """Each heap keeps what is freed in it: a server that had appended large batches kept 270 MB with 64 readers."""
    if not hasattr(ctypes.CDLL(None), "malloc_info"):
        pytest.skip("the C library is not glibc")

    def heaps(word: str) -> int:
        program = [sys.executable, "-c", _HEAPS_OF_THREADS, word, str(tmp_path / word)]
        return int(subprocess.run(program, check=True, capture_output=True, text=True, timeout=120).stdout)

    assert heaps("few") <= 2 < heaps("many")
