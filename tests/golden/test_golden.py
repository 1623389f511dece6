"""Stores that RocketMQ's own Java store wrote, read without Java. PROVENANCE.md says how they were made."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path

import pytest

from interop.compare import ALL_COLUMNS, of_java, of_ours, of_row, same
from messagestore import ConfigError, Message, MessageStore, NotAStoreError
from messagestore.format.message import put_topic_fault
from messagestore.inspect.verify import verify
from small import SMALL

HERE = Path(__file__).resolve().parent
STORES = sorted(path.stem for path in HERE.glob("*.zip"))
WRITABLE = [name for name in STORES if not name.startswith("foreign")]
ROW = re.compile(r"^\| `([\w.-]+)\.zip` \| ([\d.]+) \| (\d+) \| `([0-9a-f]{64})` \|$", re.MULTILINE)


def unpack(name: str, folder: Path) -> tuple[Path, dict]:
    root = folder / "store"
    with zipfile.ZipFile(HERE / f"{name}.zip") as archive:
        archive.extractall(root)
    expected = json.loads((root / "expected.json").read_text(encoding="utf-8"))
    (root / "expected.json").unlink()
    return root, expected


def check(root: Path, expected: dict) -> int:
    """Every message, every field, one by one and as columns; how many there were."""
    count = 0
    with MessageStore.open_read_only(root, SMALL) as store:
        wanted = {(topic, queue_id): found for topic, queue_id, found in expected["queues"]}
        queues = {(topic, queue_id) for topic, ids in store.topics().items() for queue_id in ids}
        assert queues - {("inner", 0)} == set(wanted)  # Java's dump does not take inner batches apart
        for (topic, queue_id), found in wanted.items():
            assert (store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)) == (
                found["min"],
                found["max"],
            )
            theirs = [of_java(message) for message in found["messages"]]
            messages = store.get_message(topic, queue_id, 0, len(theirs)).messages
            same((topic, queue_id), [of_ours(message) for message in messages], theirs)
            rows = [row for batch in store.read(topic, queue_id, 0, columns=ALL_COLUMNS) for row in batch.to_pylist()]
            same((topic, queue_id), [of_row(row) for row in rows], theirs)
            for message in theirs:
                for key in message["keys"]:
                    hits = [hit.physical_offset for hit in store.query_message(topic, key, 1000)]
                    assert message["physical_offset"] in hits
            count += len(theirs)
    return count


def test_provenance() -> None:
    """Each file is listed, with the hash it has: nothing was changed by hand."""
    rows = {name: (int(size), sha) for name, _, size, sha in ROW.findall((HERE / "PROVENANCE.md").read_text("utf-8"))}
    found = {path.stem: path.read_bytes() for path in HERE.glob("*.zip")}
    assert rows == {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in found.items()}


def test_the_stores_are_not_empty(tmp_path: Path) -> None:
    """The guard of all tests here."""
    assert len(STORES) >= 6
    counts = {name: check(*unpack(name, tmp_path / name)) for name in STORES}
    assert min(counts.values()) >= 1
    assert sum(counts.values()) > 300
    assert counts["crashed-5.3.3"] == 200


@pytest.mark.parametrize("name", STORES)
def test_every_message_is_what_java_read(name: str, tmp_path: Path) -> None:
    """Statuses are Java's, too: at, before and behind the ends."""
    root, expected = unpack(name, tmp_path)
    check(root, expected)
    assert verify(root, SMALL).findings == []


@pytest.mark.parametrize("name", WRITABLE)
def test_we_take_over(name: str, tmp_path: Path) -> None:
    """A writer of ours opens it, closes it, and appends: what was there reads as before."""
    root, expected = unpack(name, tmp_path)
    with MessageStore.open(root, SMALL):
        pass
    check(root, expected)
    topic, queue_id, found = next(queue for queue in expected["queues"] if put_topic_fault(queue[0]) is None)
    with MessageStore.open(root, SMALL) as store:
        put = store.put_message(Message(topic, b"ours", queue_id=queue_id, keys=["ours"]))
        assert put.queue_offset == found["max"]
        assert [message.body for message in store.query_message(topic, "ours")] == [b"ours"]
    assert verify(root, SMALL).findings == []


def test_foreign_queues_are_read_or_refused_by_name(tmp_path: Path) -> None:
    """Inner batches are read message by message; light queues are never shown empty; nobody writes here."""
    root, _ = unpack("foreign-5.3.3", tmp_path)
    with MessageStore.open_read_only(root, SMALL) as store:
        assert [message.body for message in store.get_message("inner", 0, 0).messages] == [b"0", b"1", b"2"]
        with pytest.raises(ConfigError, match=re.escape("%LMQ%a")):
            store.get_message("%LMQ%a", 0, 0)
    with pytest.raises(NotAStoreError, match="batch queues"):
        MessageStore.open(root, SMALL)


def test_an_older_version_leaves_out_the_last_separator(tmp_path: Path) -> None:
    """RocketMQ 5.1 ends the properties of a batch's messages without 0x02: they are whole all the same."""
    root, expected = unpack("plain-5.1.4", tmp_path)
    log = b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))
    without = 0
    for _, _, found in expected["queues"]:
        for message in found["messages"]:
            end = message["physicalOffset"] + message["size"]
            without += bool(message["properties"]) and log[end - 1] != 2
    assert without > 5
