"""Which files make a store: identity, folders, cached queues."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from messagestore import ConfigError, CorruptionError, Message, MessageStore, NotAStoreError, StoreConfig
from messagestore.files.disk import Disk
from messagestore.format.hosts import pack_host
from messagestore.format.layout import RECORD_HEAD
from messagestore.format.record import encode_message, stamp_record
from messagestore.log.store_files import Identity, Paths, as_record, is_free, looks_like_store
from small import SMALL, filled, read_all


def test_identity_is_made_once(tmp_path: Path) -> None:
    """Id and sizes survive every reopening, whatever the configuration says."""
    root = filled(tmp_path / "s", 4)
    first = (root / "spark" / "store.json").read_bytes()
    filled(root, 4, StoreConfig())
    assert (root / "spark" / "store.json").read_bytes() == first
    assert json.loads(first)["mappedFileSizeCommitLog"] == SMALL.mapped_file_size_commit_log


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"formatVersion": 1}', b"\xff\xfe"])
def test_a_broken_identity_is_refused(tmp_path: Path, text: bytes) -> None:
    """Its sizes are needed: it is not guessed."""
    root = filled(tmp_path / "s", 4)
    (root / "spark" / "store.json").write_bytes(text)
    with pytest.raises(CorruptionError, match=r"store\.json"):
        MessageStore.open(root, SMALL)
    with pytest.raises(CorruptionError, match=r"store\.json"):
        MessageStore.open_read_only(root)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """A store of a later release says so."""
    root = filled(tmp_path / "s", 4)
    path = root / "spark" / "store.json"
    path.write_text(path.read_text().replace('"formatVersion": 1', '"formatVersion": 3'))
    with pytest.raises(NotAStoreError, match="found format version 3; this release reads 1"):
        MessageStore.open(root, SMALL)


def test_a_brokers_store_gets_an_identity(tmp_path: Path) -> None:
    """Sizes are those of the broker's files, not the configured ones."""
    root = filled(tmp_path / "s", 40)
    for path in (root / "spark").rglob("*"):
        if path.is_file():
            path.unlink()
    config = StoreConfig(max_hash_slot_num=SMALL.max_hash_slot_num, max_index_num=SMALL.max_index_num)
    with MessageStore.open(root, config) as store:
        assert len(read_all(store)) == 20
        store.put_message(Message("t", b"more", queue_id=0))
    identity = Identity.read(Disk(), Paths(root).identity)
    assert identity is not None
    assert identity.mapped_file_size_commit_log == SMALL.mapped_file_size_commit_log
    assert identity.mapped_file_size_consume_queue == SMALL.mapped_file_size_consume_queue


def test_what_is_free_and_what_is_a_store(tmp_path: Path) -> None:
    """A missing or empty folder, and what a killed creation left, may become a store."""
    disk, paths = Disk(), Paths(tmp_path / "x")
    assert is_free(disk, paths) and not looks_like_store(disk, paths)
    (tmp_path / "x" / "spark").mkdir(parents=True)
    (tmp_path / "x" / "spark" / "writer.lock").touch()
    assert is_free(disk, paths)
    (tmp_path / "x" / "mine").touch()
    assert not is_free(disk, paths)
    (tmp_path / "x" / "commitlog").mkdir()
    assert looks_like_store(disk, paths)


def test_modes(tmp_path: Path) -> None:
    """Folders 0700, files 0600: messages are nobody else's business."""
    root = filled(tmp_path / "s", 10)
    for path in root.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_nothing_of_ours_is_in_rocketmqs_folders(tmp_path: Path) -> None:
    """A stray file there stops a broker: names are 20 digits, sizes exact, and no temporary file is left."""
    root = filled(tmp_path / "s", 100)
    for folder, size in (
        ("commitlog", SMALL.mapped_file_size_commit_log),
        ("consumequeue", SMALL.mapped_file_size_consume_queue),
    ):
        files = [p for p in (root / folder).rglob("*") if p.is_file()]
        assert files
        assert all(len(p.name) == 20 and p.name.isdigit() and p.stat().st_size == size for p in files)
    assert not [p for p in (root / "spark").iterdir() if p.name.startswith("new-")]


def test_few_descriptors(tmp_path: Path) -> None:
    """`ulimit -n 64`: hundreds of queues are written and read all the same."""
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from messagestore import Message, MessageStore, StoreConfig
config = StoreConfig(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=2000, max_hash_slot_num=64,
max_index_num=2000)
with MessageStore.open({str(tmp_path / "s")!r}, config) as store:
    store.create_topic("t", 300)
    for i in range(900):
        store.put_message(Message("t", b"%d" % i, queue_id=i % 300, wait_store_msg_ok=False))
    store.flush()
    assert all(store.get_message("t", q, 2).messages[0].body == b"%d" % (600 + q) for q in range(300))
print("good")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert process.stdout.strip() == "good", process.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64


@pytest.mark.parametrize("victim", ["commitlog", "consumequeue/t/0"])
def test_links_are_not_followed(tmp_path: Path, victim: str) -> None:
    """A segment or queue file that is a link to somewhere else is refused, not written through."""
    root = filled(tmp_path / "s", 10)
    path = root / victim / f"{0:020d}"
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises((NotAStoreError, CorruptionError, RuntimeError)), MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    assert outside.read_bytes() == before


# ---- forms of queues that this project does not read


def with_queue(root: Path, folder: str) -> Path:
    filled(root)
    (root / folder).mkdir(parents=True)
    return root


def test_light_queues_look_empty(tmp_path: Path) -> None:
    """A topic with light queues was shown as one without messages: it is refused by name."""
    root = with_queue(tmp_path / "store", "consumequeue/%LMQ%a/0")
    with MessageStore.open_read_only(root) as store:
        assert store.topics() == {"t": [0, 1]}
        for read in (lambda: store.get_message("%LMQ%a", 0, 0), lambda: store.query_message("%LMQ%a", "k")):
            with pytest.raises(ConfigError, match="light queue"):
                read()
    with pytest.raises(NotAStoreError, match="light queue"):
        MessageStore.open(root, SMALL)


def test_rocksdb_queues_look_empty(tmp_path: Path) -> None:
    """A store with storeType=defaultRocksDB was shown without messages, and got an identity of ours before a writer was
    refused."""
    root = tmp_path / "store"
    (root / "commitlog").mkdir(parents=True)
    (root / "commitlog" / ("0" * 20)).write_bytes(bytes(4096))
    (root / "consumequeue").mkdir()
    (root / "consumequeue" / "CURRENT").write_text("MANIFEST-000004\n")
    for opening in (MessageStore.open_read_only, MessageStore.open):
        with pytest.raises(NotAStoreError, match="RocksDB"):
            opening(root, SMALL)
    assert not (root / "spark" / "store.json").exists()


@pytest.mark.parametrize("property_crc", [False, True])
def test_a_damaged_record_does_not_name_the_stores_address(property_crc: bool) -> None:
    """A flipped bit in STOREHOST made a port that no configuration may have, and the store could not be opened."""
    config, message = StoreConfig(), Message("t", b"body", born_timestamp_ms=1)
    data = encode_message(
        message, queue_id=0, store_host=pack_host("10.0.0.7:10911"), limits=config, property_crc=property_crc
    )
    stamp_record(data, queue_offset=0, physical_offset=0, store_timestamp_ms=1, property_crc=property_crc)
    found = as_record(bytes(data), config)
    assert (found.broker_ip1, found.listen_port) == ("10.0.0.7", 10911)
    data[RECORD_HEAD.offset("store_port")] ^= 4
    damaged = as_record(bytes(data), config)
    assert (damaged.broker_ip1, damaged.listen_port) == (config.broker_ip1, config.listen_port)
    assert damaged.enabled_append_prop_crc == property_crc
