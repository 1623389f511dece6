"""spark/broker.json: the name of the broker whose store this is."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest

from messagestore import CorruptionError, Message, MessageStore
from messagestore.files.broker_name import read_broker_name, write_broker_name
from messagestore.files.disk import Disk, File
from messagestore.inspect import operator
from messagestore.inspect.verify import verify
from small import SMALL, filled

NAMED = SMALL.replace(broker_name="broker-a")


def name_of(root: Path) -> str:
    return read_broker_name(Disk(), str(root / "spark" / "broker.json"))


def named(root: Path, name: str) -> None:
    with MessageStore.open(root, SMALL.replace(broker_name=name)):
        pass


def test_a_new_store_and_an_existing_one_get_the_name(tmp_path: Path) -> None:
    for root in (tmp_path / "new", filled(tmp_path / "old", 4)):
        named(root, "broker-a")
        with MessageStore.open_read_only(root) as store:
            assert store.broker_name == "broker-a"
        status = operator.status(str(root))
        assert (status["brokerName"], status["faults"]) == ("broker-a", [])
        assert verify(root, SMALL).ok


def _written(root: Path) -> tuple[int, int]:
    """Which file it is, and when it was written; the time of the last look changes with each look."""
    status = (root / "spark" / "broker.json").stat()
    return status.st_ino, status.st_mtime_ns


def test_a_writer_without_a_name_keeps_it_and_the_last_name_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = filled(tmp_path / "s", 2)
    assert name_of(root) == ""
    named(root, "broker-a")
    before = _written(root)
    named(root, "")
    named(root, "broker-a")
    assert _written(root) == before  # it is not written again
    assert caplog.text == ""
    named(root, "broker-b")
    assert name_of(root) == "broker-b"
    assert "the name of the store's broker was 'broker-a' and is 'broker-b' now" in caplog.text


def test_names_in_other_letters(tmp_path: Path) -> None:
    """The longest name, and characters beyond ASCII, come back."""
    for name in ("b" * 255, "Broker Süd", "\U0001f4e8" * 255, 'a"\\b'):
        named(tmp_path / "s", name)
        assert name_of(tmp_path / "s") == name


def test_the_file_byte_by_byte(tmp_path: Path) -> None:
    named(tmp_path / "s", "broker-a")
    crc = zlib.crc32(b'{"brokerName": "broker-a", "formatVersion": 1}')
    wanted = b'{"brokerName": "broker-a", "crc": %d, "formatVersion": 1}' % crc
    assert (tmp_path / "s" / "spark" / "broker.json").read_bytes() == wanted


def test_every_flipped_bit_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "broker.json"
    write_broker_name(Disk(), str(path), "broker-a", via=str(tmp_path / "new"))
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert read_broker_name(Disk(), str(path)) == "broker-a"  # a blank that became another
        except CorruptionError as error:
            assert "delete it, and give `brokerName` again" in str(error)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"[" * 4000, b'{"brokerName": 5}', b"\xff", b'{"brokerName":"","crc":0,"formatVersion":1}'],
)
def test_a_damaged_file_is_told_and_replaced(tmp_path: Path, data: bytes) -> None:
    """Only who asks for the name sees the damage: reading and writing messages does not depend on it."""
    root = tmp_path / "s"
    named(root, "broker-a")
    path = root / "spark" / "broker.json"
    path.write_bytes(data)
    assert [finding.path for finding in verify(root, SMALL).findings] == [str(path)]
    status = operator.status(str(root))
    assert status["brokerName"] is None and str(path) in status["faults"][0]
    with MessageStore.open(root, SMALL) as store:
        assert store.put_message(Message("t", b"x", queue_id=0)).is_ok
        assert store.get_message("t", 0, 0).messages
        with pytest.raises(CorruptionError, match="give `brokerName` again"):
            _ = store.broker_name
    named(root, "broker-b")
    assert name_of(root) == "broker-b" and verify(root, SMALL).ok


class FullDisk(Disk):
    """A disk without room for the name, until there is some."""

    full = True

    def open_new(self, path: str | Path, size: int) -> File:
        if self.full and str(path).endswith("broker.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().open_new(path, size)


def test_a_name_that_cannot_be_written_refuses_the_writer(tmp_path: Path) -> None:
    """The store is free again afterwards, and the next writer writes the name."""
    root, disk = filled(tmp_path / "s", 2), FullDisk()
    for _ in range(2):  # the second time, the process is attached already
        with pytest.raises(OSError, match="No space left"):
            MessageStore.open(root, NAMED, disk=disk)
        assert name_of(root) == "" and verify(root, SMALL).ok
    disk.full = False
    with MessageStore.open(root, NAMED, disk=disk) as store:
        assert store.broker_name == "broker-a"
