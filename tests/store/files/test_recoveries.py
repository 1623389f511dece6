"""spark/recoveries.json: what the last recoveries cut, rebuilt or gave up."""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from messagestore import CorruptionError, MessageStore
from messagestore.files.disk import Disk, File
from messagestore.files.recoveries import MAX_SIZE, MOST_KEPT, keep_recovery, read_recoveries
from messagestore.inspect import operator
from messagestore.inspect.verify import verify
from small import SMALL, filled


def keep(path: Path, report: dict[str, Any]) -> None:
    keep_recovery(Disk(), str(path), report, via=str(path.parent / "new"))


def kept(path: Path) -> list[dict[str, Any]]:
    return read_recoveries(Disk(), str(path))


def torn(root: Path) -> Path:
    """A store whose writer was killed within a put: bytes lie behind the log's end, and nobody has closed it."""
    filled(root, 4)
    status = operator.status(str(root), SMALL)
    end = status["commitLog"]["maxOffset"]
    (segment,) = (root / "commitlog").iterdir()
    with segment.open("r+b") as file:
        file.seek(end)
        file.write(b"\0\0\0\x63torn")
    (root / "abort").write_bytes(b"")
    return root


def test_the_file_byte_by_byte(tmp_path: Path) -> None:
    keep(tmp_path / "r", {"recoveredTime": 5, "reason": "a writer crashed", "cut": None})
    reports = b'"recoveries": [{"cut": null, "reason": "a writer crashed", "recoveredTime": 5}]'
    crc = zlib.crc32(b'{"formatVersion": 1, ' + reports + b"}")
    assert (tmp_path / "r").read_bytes() == b'{"crc": %d, "formatVersion": 1, ' % crc + reports + b"}"


def test_every_flipped_bit_is_damage(tmp_path: Path) -> None:
    path, report = tmp_path / "r", {"recoveredTime": 5, "cut": "3 bytes"}
    keep(path, report)
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert kept(path) == [report]  # a blank that became another
        except CorruptionError as error:
            assert "delete it" in str(error)


@pytest.mark.parametrize(
    "recoveries", [5, {}, [5], [{}], [{"recoveredTime": "now"}]], ids=["number", "object", "numbers", "empty", "text"]
)
def test_a_right_crc_over_something_else_is_damage(tmp_path: Path, recoveries: object) -> None:
    crc = zlib.crc32(json.dumps({"formatVersion": 1, "recoveries": recoveries}).encode())
    (tmp_path / "r").write_text(json.dumps({"crc": crc, "formatVersion": 1, "recoveries": recoveries}))
    with pytest.raises(CorruptionError, match="reports of recoveries"):
        kept(tmp_path / "r")


def test_the_oldest_report_goes_and_the_same_recovery_has_one(tmp_path: Path) -> None:
    path = tmp_path / "r"
    assert kept(path) == []
    for number in range(MOST_KEPT + 3):
        keep(path, {"recoveredTime": number, "cut": "first words"})
        keep(path, {"recoveredTime": number, "cut": "last words"})
    assert [(each["recoveredTime"], each["cut"]) for each in kept(path)] == [
        (number, "last words") for number in range(3, MOST_KEPT + 3)
    ]
    assert [name.name for name in tmp_path.iterdir()] == ["r"]


def test_long_reports_are_cut_off_and_fit(tmp_path: Path) -> None:
    """Whatever the names of queues and files are, the file can be read again."""
    path, long = tmp_path / "r", "\U0001f4e8" * 100_000
    for number in range(MOST_KEPT):
        keep(path, {"recoveredTime": number, "notes": [long] * 100, **dict.fromkeys("abcde", long)})
        assert path.stat().st_size <= MAX_SIZE
        last = kept(path)[-1]
        assert last["recoveredTime"] == number
        assert last["a"].startswith("\U0001f4e8") and last["a"].endswith("...")


def test_a_cut_is_kept_and_a_clean_start_changes_nothing(tmp_path: Path) -> None:
    root = torn(tmp_path / "s")
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None
        cut = store.report.cut
    assert cut is not None
    (report,) = operator.status(str(root), SMALL)["recoveries"]
    assert report["cut"] == cut and report["reason"] == store.report.reason
    assert abs(report["recoveredTime"] - (root / "spark" / "recoveries.json").stat().st_mtime * 1000) < 60_000

    before = (root / "spark" / "recoveries.json").stat()
    with MessageStore.open(root, SMALL):
        pass
    assert (root / "spark" / "recoveries.json").stat() == before
    assert verify(root, SMALL).ok


def test_a_store_that_never_needed_mending_has_no_file(tmp_path: Path) -> None:
    root = filled(tmp_path / "s", 4)
    with MessageStore.open(root, SMALL):
        pass
    assert not (root / "spark" / "recoveries.json").exists()
    assert operator.status(str(root), SMALL)["recoveries"] == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"[" * 4000, b"\xff", b"9" * (MAX_SIZE + 9)])
def test_a_damaged_file_is_told_and_begins_anew(tmp_path: Path, data: bytes) -> None:
    """It stops nobody: the store is opened, read and recovered as without it."""
    root = torn(tmp_path / "s")
    path = root / "spark" / "recoveries.json"
    path.write_bytes(data)
    status = operator.status(str(root), SMALL)
    assert status["recoveries"] == [] and str(path) in status["faults"][0]
    assert str(path) in [finding.path for finding in verify(root, SMALL).findings]
    with MessageStore.open(root, SMALL):
        pass
    assert len(operator.status(str(root), SMALL)["recoveries"]) == 1
    assert verify(root, SMALL).ok


class FullDisk(Disk):
    """A disk without room for the report."""

    def open_new(self, path: str | Path, size: int) -> File:
        if str(path).endswith("recoveries.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().open_new(path, size)


def test_a_disk_without_room_stops_no_recovery(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = torn(tmp_path / "s")
    with MessageStore.open(root, SMALL, disk=FullDisk()) as store:
        assert store.report is not None and store.report.cut is not None
    assert "the report of this recovery could not be kept" in caplog.text
    assert not (root / "spark" / "recoveries.json").exists() and verify(root, SMALL).ok
