"""`messagestore backup`, `backup list`, `backup prune` and `restore`, as an operator types them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cli_runs import error, lines, objects, run, start
from messagestore import MessageStore
from small import SMALL, bodies, columns, filled


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "store", 60)


def test_a_store_is_backed_up_listed_and_restored(root: Path, tmp_path: Path) -> None:
    target, restored = tmp_path / "backup", tmp_path / "restored"
    [line] = lines(run("backup", root, target))
    assert line.startswith("point 1: the log from 0 to ")
    assert line.endswith("copied and read back")
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(5)))
        [second] = objects(run("backup", root, target, "--json"))
    assert (second["point"], second["begin"], second["target"]) == (2, 0, str(target))
    assert second["messages"] == 66  # with the batch's own
    assert [point["point"] for point in objects(run("backup", "list", target, "--json"))] == [1, 2]
    titles, *rows = lines(run("backup", "list", target))
    assert titles.split() == ["point", "taken", "log", "from", "to", "messages", "ever", "put", "new", "store"]
    assert len(rows) == 2

    [line] = lines(run("restore", target, restored))
    assert line == f"restored point 2: the log from 0 to {second['end']}, every byte checked"
    assert "no fault found" in run("verify", restored).stdout
    [older] = objects(run("restore", target, tmp_path / "older", "--point", 1, "--json"))
    assert older["point"] == 1
    assert older["backedUp"] == second["storeId"]


def test_old_points_are_deleted_when_that_is_said(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    for _ in range(3):
        run("backup", root, target)
    said = lines(run("backup", "prune", target, "--keep", 1))
    assert said == ["would delete 2 points and 0 B of files", "--delete deletes them"]
    assert objects(run("backup", "prune", target, "--keep", 1, "--delete", "--json")) == [
        {"points": [1, 2], "bytes": 0, "deleted": True}
    ]
    assert lines(run("backup", "prune", target, "--keep", 1)) == ["nothing to delete"]


def test_a_stream_goes_through_a_pipe(root: Path, tmp_path: Path) -> None:
    process = start("backup", root, "-", text=False)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said.startswith(b"point 1: the log from 0 to ")
    (tmp_path / "b.tar").write_bytes(out)
    unpacked = tmp_path / "unpacked"
    with tarfile.open(tmp_path / "b.tar") as archive:
        archive.extractall(unpacked, filter="data")
    run("restore", unpacked, tmp_path / "restored")


def test_mistakes_have_one_line(root: Path, tmp_path: Path) -> None:
    assert "found no message store" in error("backup", tmp_path / "nothing", tmp_path / "b", code=2)
    assert "inside the store" in error("backup", root, root / "b", code=2)
    assert "found no backup" in error("backup", "list", tmp_path / "nothing", code=2)
    assert "found no backup" in error("restore", tmp_path / "nothing", tmp_path / "r", code=2)
    run("backup", root, tmp_path / "b")
    assert "found something there already" in error("restore", tmp_path / "b", root, code=2)
    assert "--point: found 9" in error("restore", tmp_path / "b", tmp_path / "r", "--point", 9, code=2)
    segment = tmp_path / "b" / "commitlog" / ("0" * 20)
    segment.write_bytes(segment.read_bytes()[:-10])
    assert "CRC-32" in error("restore", tmp_path / "b", tmp_path / "r", code=1)


def test_help_says_how_a_backup_is_taken() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pyspark_messagestore.cli.main", "backup", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "messagestore backup ROOT TARGET" in " ".join(found.split())
