"""What `/readyz` says, and why; and who is told that a store is on the network."""

from __future__ import annotations

import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from messagestore import ConfigError, MessageStore, NotAStoreError, StoreLockedError, StoreUnavailableError
from messagestore.files import file_systems
from messagestore.files.disk import Disk
from messagestore.serve import lifecycle
from messagestore.serve.lifecycle import ServedStore
from messagestore.serve.limits import MIB, Limits
from messagestore.spi import LOCAL_STORES
from messagestore.spi.location import RemoteSettings
from messagestore.spi.remote import RemoteStores
from processes import starting_broker
from small import SMALL, filled


class FullDisk(Disk):
    """A disk whose room is what the test says."""

    room: int | None = None
    names_left: int | None = None

    def free(self, path: str | Path) -> int:
        return super().free(path) if self.room is None else self.room

    def free_names(self, path: str | Path) -> int | None:
        return super().free_names(path) if self.names_left is None else self.names_left


def probed(url: str, path: str = "readyz") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{url}/{path}", timeout=30) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode().strip()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(filled(tmp_path / "store", 10))


@pytest.fixture
def serving(root: str) -> Iterator[Callable[..., ServedStore]]:
    started: list[ServedStore] = []

    def serve(**settings: Any) -> ServedStore:
        served = ServedStore(root, SMALL, **settings)
        started.append(served)
        served.start()
        return served

    yield serve
    for server in started:
        server.stop(0.0)


def test_a_body_needs_room_in_the_memory(root: str) -> None:
    """One that has none waited for it as long as `--idle`, got 503, and was sent again."""
    with pytest.raises(ConfigError, match="--body: found 33,554,432 bytes, and 16,777,216 for --memory; allowed is"):
        ServedStore(root, SMALL, limits=Limits(body=32 * MIB, memory=16 * MIB))
    ServedStore(root, SMALL, limits=Limits(body=16 * MIB, memory=16 * MIB))


def test_a_full_disk_is_not_ready_until_there_is_room(serving: Callable[..., ServedStore]) -> None:
    """In bytes, where a client's largest frame has to fit, or in names. It stays alive."""
    disk = FullDisk()
    url = serving(disk=disk, limits=Limits(frame=MIB)).url
    assert probed(url) == (200, "ready")
    disk.room = MIB - 1
    assert probed(url) == (
        503,
        "the disk is full: 1,048,575 bytes are free, and one frame of a client may have 1,048,576",
    )
    assert probed(url, "healthz") == (200, "alive")
    disk.room = MIB
    assert probed(url) == (200, "ready")
    disk.names_left = 0
    status, words = probed(url)
    assert status == 503 and words.startswith("the disk is full: its file system cannot make another file")
    disk.names_left = 1
    assert probed(url) == (200, "ready")


def test_a_server_that_only_reads_needs_no_room(serving: Callable[..., ServedStore]) -> None:
    disk = FullDisk()
    disk.room = 0
    assert probed(serving(disk=disk, read_only=True).url) == (200, "ready")


def test_a_store_that_a_broker_holds_is_not_ready(root: str, serving: Callable[..., ServedStore]) -> None:
    """It is still read; with --read-only, nothing else is wanted."""
    url, reading = serving().url, serving(read_only=True).url
    with starting_broker(Path(root)) as broker:
        assert broker.word() == "locked"
        status, words = probed(url)
        assert status == 503 and "a RocketMQ broker" in words and words.endswith("holds the store")
        assert probed(reading) == (200, "ready")
        assert RemoteStores(RemoteSettings()).reader(url).ends(["t"]).queues == {("t", 0): 5, ("t", 1): 5}
    assert probed(url) == (200, "ready")


def test_a_store_whose_folder_is_gone_is_not_ready(root: str, serving: Callable[..., ServedStore]) -> None:
    url = serving().url
    os.rename(root, f"{root}.gone")
    assert probed(url) == (503, "spark/serve was removed or replaced")
    os.rename(f"{root}.gone", root)
    assert probed(url) == (200, "ready")


def test_a_draining_server_is_not_ready(serving: Callable[..., ServedStore]) -> None:
    served = serving()
    served.server.service.drain(0.0)
    assert probed(served.url) == (503, "the server is draining")


def test_probes_are_answered_while_the_store_is_recovered(
    serving: Callable[..., ServedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that says nothing meanwhile would be killed by its liveness probe, and begin again each time."""
    begun, go_on = threading.Event(), threading.Event()
    prepare = ServedStore._prepare
    urls: list[str] = []

    def slow(served: ServedStore) -> None:
        urls.append(served.url)
        begun.set()
        assert go_on.wait(60)
        prepare(served)

    monkeypatch.setattr(ServedStore, "_prepare", slow)
    thread = threading.Thread(target=serving)
    thread.start()
    assert begun.wait(60)
    (url,) = urls
    assert probed(url, "healthz") == (200, "alive")
    assert probed(url) == (503, "the store is being recovered")
    with pytest.raises(StoreUnavailableError, match="has just been started, and recovers the store"):
        RemoteStores(RemoteSettings(retry_timeout_s=0.2)).reader(url)
    go_on.set()
    reader = RemoteStores(RemoteSettings(retry_timeout_s=60)).reader(url)
    assert reader.ends(["t"]).queues == {("t", 0): 5, ("t", 1): 5}
    thread.join(60)
    assert probed(url) == (200, "ready")


def test_a_store_that_cannot_be_recovered_ends_its_server(root: str, serving: Callable[..., ServedStore]) -> None:
    """Nobody can connect any more, and the lock is free."""
    with starting_broker(Path(root)) as broker:
        assert broker.word() == "locked"
        with pytest.raises(StoreLockedError):
            serving()
    assert lifecycle.server_of(root) is None
    first = serving()
    with pytest.raises(StoreLockedError, match="a server of this store runs already"):
        serving()
    assert probed(first.url) == (200, "ready")
    with pytest.raises(NotAStoreError):
        ServedStore(f"{root}/nothing", SMALL).start()


# ---- file systems of the network


@pytest.fixture
def mounts(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The kernel's list of mounts, in which the store's folder is on a file system of some kind."""
    path = tmp_path / "mountinfo"
    monkeypatch.setattr(file_systems, "_MOUNTS", str(path))
    monkeypatch.setattr(file_systems, "_warned", set())

    def write(kind: str) -> None:
        lines = ["22 1 8:1 / / rw - ext4 /dev/sda1 rw", f"90 22 0:40 / {root} rw,relatime shared:1 - {kind} nas:/a rw"]
        path.write_text("".join(f"{line}\n" for line in lines))

    return write


WARNED = "this store is on a file system of the network"


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "cifs"])
def test_a_session_on_the_network_is_warned_once(
    root: str, mounts: Callable[[str], None], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    mounts(kind)
    for _ in range(2):
        MessageStore.open(root, SMALL).close()
    assert caplog.text.count(f"{root}: {WARNED} ({kind}, mounted on {root})") == 1


def test_a_server_on_the_network_is_warned(
    mounts: Callable[[str], None], serving: Callable[..., ServedStore], caplog: pytest.LogCaptureFixture
) -> None:
    """One that only reads is not: it writes nothing that could be lost."""
    mounts("nfs")
    serving(read_only=True)
    assert WARNED not in caplog.text
    serving()
    assert caplog.text.count(WARNED) == 1


def test_a_sink_on_the_network_is_warned_when_it_is_planned(
    root: str, mounts: Callable[[str], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark commits each batch in another process, which does not say it again."""
    mounts("ceph")
    writer = LOCAL_STORES.writer(root, SMALL, staging_ttl_s=60)
    writer.prepare()
    assert caplog.text.count(WARNED) == 1
    monkeypatch.setattr(file_systems, "_warned", set())  # as in another process
    monkeypatch.setattr("messagestore.spi.local.detach_at_the_end", lambda: None)
    committing = LOCAL_STORES.writer(root, SMALL, staging_ttl_s=60, ends_abruptly=True)
    committing.abort([], writer.describe().store_id)
    assert caplog.text.count(WARNED) == 1


def test_a_store_on_a_disk_is_not_warned(
    root: str, mounts: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    mounts("xfs")
    MessageStore.open(root, SMALL).close()
    assert WARNED not in caplog.text
