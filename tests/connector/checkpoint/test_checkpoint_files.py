"""Checkpoints of a user whom the process that reads or copies them does not trust: each file in each hostile form, under each
command; copies that root makes; files that are swapped meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from checkpoints import checkpoint, offset, write
from cli_runs import error, run
from crash.hostile_files import SECRET, forms, place, secret_file, within
from pyspark_messagestore.checkpoint import spark_checkpoint
from pyspark_messagestore.checkpoint.files import Folder
from pyspark_messagestore.checkpoint.spark_checkpoint import copy_rewound, read_checkpoint, read_progress
from pyspark_messagestore.cli.main import app
from small import filled

USER = 1234
HANGS_S = 60
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to somebody else")
TEXTS = ["metadata", "offsets/1", "commits/1"]
"""The files that are parsed, and that every command needs."""
OTHERS = ["offsets", "offsets/2", "offsets/999999999999999999", "commits", "state", "state/0/0", "state/0/0/1.delta"]
OTHERS += ["state/0/0/99999999999999999999.delta", "sources/0/0"]


def example(path: Path) -> Path:
    """A checkpoint of three batches, two of which are done, with state."""
    made = checkpoint(path, [[offset("s", number)] for number in range(3)], committed=2)
    write(made / "sources" / "0" / "0", "v1\n{}")
    for version in (1, 2):
        write(made / "state" / "0" / "0" / f"{version}.delta", "x")
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "store", 3)


@pytest.mark.slow
@pytest.mark.parametrize("file", [*TEXTS, *OTHERS])
def test_no_form_of_a_file_hangs_or_tells_or_breaks_a_command(tmp_path: Path, root: Path, file: str) -> None:
    """Each form in the place of one file: every command ends with an exit code of ours, soon, and without the secret."""
    secret = secret_file(tmp_path)
    tried = 0
    some = list(forms(texts=file in TEXTS))
    for number, form in enumerate(some):
        path = example(tmp_path / f"ck-{number}")
        place(form, path / file, secret)
        commands: list[list[object]] = [
            ["checkpoint", "show", path],
            ["checkpoint", "rewind", path, 1, "--to", tmp_path / f"copy-{number}"],
            ["metrics", root, "--once", "--checkpoint", path],
        ]
        if file in TEXTS:
            commands += [["checkpoint", "show", path, "--json"], ["lag", root, "--checkpoint", path]]
        for command in commands:
            what = f"{form}: {' '.join(map(str, command))}"
            with within(HANGS_S, what):
                result = CliRunner().invoke(app, [str(each) for each in command])
            assert result.exception is None or isinstance(result.exception, SystemExit), (what, result.exception)
            assert result.exit_code in (0, 1, 2), what
            assert SECRET not in result.output, what
            tried += 1
        copy = tmp_path / f"copy-{number}"
        for made in copy.rglob("*") if copy.exists() else ():
            theirs = form in (
                "a hard link to a secret",
                "a folder",
            )  # the first one stays root's, the second is the user's
            assert theirs or made.is_dir() or SECRET.encode() not in made.read_bytes(), what
        shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
    assert tried == len(some) * (5 if file in TEXTS else 3) >= 30
    assert not [each for each in tmp_path.iterdir() if ".partial-" in each.name]


def test_a_fault_of_a_batch_says_what_is_there(tmp_path: Path) -> None:
    """One line that names the file, what was found, and what is allowed; the batches around it are shown."""
    path = example(tmp_path / "ck")
    for name in ("offsets/2", "commits/1"):
        (path / name).unlink()
        os.mkfifo(path / name)
    result = run("checkpoint", "show", path, code=1)
    assert f"{path}/offsets/2: found a FIFO; allowed in a checkpoint is a file here" in result.stderr
    assert f"{path}/commits/1: found a FIFO; allowed in a checkpoint is a file here" in result.stderr
    (path / "offsets" / "2").unlink()
    (path / "offsets" / "2").write_bytes(bytes(spark_checkpoint._MOST_FILE + 1))
    assert "found 16,777,217 bytes; at most 16,777,216 are read" in run("checkpoint", "show", path, code=1).stderr


def test_the_lag_of_a_query_touches_its_newest_batches_only(tmp_path: Path) -> None:
    """Metrics are read again and again: what the query does not need to go on is left alone."""
    path = example(tmp_path / "ck")
    for name in ("offsets/0", "commits/0", "state/0/0/1.delta"):
        (path / name).unlink()
        os.mkfifo(path / name)
    found = read_progress(str(path))
    assert [batch.batch_id for batch in found.batches] == [1, 2]
    assert (found.committed and found.committed.batch_id, found.next_batch_id) == (1, 2)


def test_more_bytes_than_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = example(tmp_path / "ck")
    monkeypatch.setattr(spark_checkpoint, "_MOST_BYTES", 300)
    text = error("checkpoint", "show", path, code=2)
    assert "the files in offsets and commits have more than 300 bytes; at most that many are read" in text


def test_versions_of_state_far_apart_take_no_time(tmp_path: Path) -> None:
    """A rewind is refused for a gap of 10^17 versions as quickly as for one."""
    path = example(tmp_path / "ck")
    for batch_id in (10**17 - 1, 10**17, 10**17 + 1):
        write(path / "offsets" / str(batch_id), (path / "offsets" / "0").read_text())
        write(path / "commits" / str(batch_id), (path / "commits" / "0").read_text())
    with within(HANGS_S, "rewind"):
        assert "state/0/0 has no version 3" in error("checkpoint", "rewind", path, 10**17, code=2)


def test_many_topics_are_shown_up_to_a_number_of_rows(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "ck", [[offset("s", each)] for each in range(2)])
    queues = {f"t{each:04}": {"0": each} for each in range(600)}
    text = json.dumps({"formatVersion": 1, "last": None, "physicalOffset": 0, "queues": queues, "storeId": "s"})
    for batch_id in range(2, 12):
        write(path / "offsets" / str(batch_id), f"v1\n{{}}\n{text}")
        write(path / "commits" / str(batch_id), "v1\n{}")
    shown = run("checkpoint", "show", path).stdout
    assert "the newest 1,000 of 6,000 rows are shown; --json shows all" in shown
    assert shown.count("t0599") == 2


# ---- copies


def give(path: Path, uid: int) -> None:
    for each in [path, *path.rglob("*")]:
        os.chown(each, uid, uid, follow_symlinks=False)


@as_root
def test_a_copy_by_root_makes_no_program_of_roots(tmp_path: Path) -> None:
    """A user's program with mode 4755 in his checkpoint: root's copy of it was root's, and ran as root for everybody."""
    path = example(tmp_path / "ck")
    shutil.copy("/bin/true", path / "sources" / "program")
    (path / "sources" / "shared").mkdir()
    give(path, USER)
    (path / "sources" / "program").chmod(0o6755)
    (path / "sources" / "shared").chmod(0o7777)
    os.setxattr(path / "metadata", "user.note", b"mine")
    before = {each.relative_to(path): each.stat() for each in path.rglob("*")}
    run("checkpoint", "rewind", path, 1, "--to", tmp_path / "copy")
    for each in [tmp_path / "copy", *(tmp_path / "copy").rglob("*")]:
        found = each.stat()
        assert (found.st_uid, found.st_gid) == (USER, USER), each
        assert not found.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX), each
        assert each.is_dir() or not found.st_mode & 0o111, each
        assert os.listxattr(each) == []
        if each != tmp_path / "copy":
            original = before[each.relative_to(tmp_path / "copy")]
            assert found.st_mode & 0o777 == original.st_mode & (0o777 if each.is_dir() else 0o666)
            assert found.st_mtime_ns == original.st_mtime_ns


@as_root
def test_what_only_root_may_read_stays_roots_in_a_copy(tmp_path: Path) -> None:
    """A hard link to root's file, which a user could make: the copy is root's as well, with its mode."""
    path = example(tmp_path / "ck")
    give(path, USER)
    os.link(secret_file(tmp_path), path / "sources" / "mine")
    run("checkpoint", "rewind", path, 1, "--to", tmp_path / "copy")
    found = (tmp_path / "copy" / "sources" / "mine").stat()
    assert (found.st_uid, found.st_mode & 0o7777) == (0, 0o600)


def test_a_group_that_a_copy_cannot_be_given_to_is_no_other_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = example(tmp_path / "ck")
    (path / "metadata").chmod(0o664)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setattr(os, "getgroups", list)
    if os.getuid() == 0:
        os.chown(path / "metadata", -1, USER)
    copy_rewound(read_checkpoint(str(path)), 1, str(tmp_path / "copy"))
    found = (tmp_path / "copy" / "metadata").stat()
    same = found.st_gid == (path / "metadata").stat().st_gid
    assert found.st_mode & 0o777 == (0o664 if same else 0o604)


def swaps(path: Path, secret: Path) -> dict[str, Callable[[], Any]]:
    """What a user can put into the place of a file, or of a folder, that was looked at."""
    file, folder = path / "offsets" / "1", path / "sources"

    def over(target: Path, make: Callable[[Path], Any]) -> Callable[[], Any]:
        def swap() -> None:
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            make(target)

        return swap

    return {
        "file by link": over(file, lambda at: at.symlink_to(secret)),
        "file by hard link": over(file, lambda at: os.link(secret, at)),
        "file by FIFO": over(file, os.mkfifo),
        "file by another one": over(file, lambda at: at.write_text("v1\n{}\n{}")),
        "file by folder": over(file, Path.mkdir),
        "file that grows": lambda: file.write_text(file.read_text() + "\n"),
        "file that is cut": lambda: os.truncate(file, 1),
        "folder by link": over(folder, lambda at: at.symlink_to(secret.parent)),
        "folder by folder with a link": over(folder, lambda at: (at.mkdir(), (at / "0").symlink_to(secret.parent))),
        "a new file": lambda: (path / "sources" / "new").write_text("x"),
        "a new link": lambda: (path / "sources" / "new").symlink_to(secret),
    }


@pytest.mark.parametrize("what", swaps(Path("a"), Path("b")))
def test_a_user_who_swaps_files_during_the_copy_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Between the look and the open: another file than the one that was looked at is not copied, and there is no copy."""
    path = example(tmp_path / "ck")
    swap = swaps(path, secret_file(tmp_path))[what]
    copy, left = spark_checkpoint._copy, [1]

    def copied(*arguments: Any) -> None:
        if left:  # the first file is metadata, so all others are still to come
            left.pop()
            swap()
        copy(*arguments)

    monkeypatch.setattr(spark_checkpoint, "_copy", copied)
    with within(HANGS_S, what):
        text = error("checkpoint", "rewind", path, 1, "--to", tmp_path / "copy", code=2)
    assert "changed while it was copied" in text or "found a" in text, text
    assert SECRET not in text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ck", "outside"]


def test_a_copy_that_has_no_room_is_not_begun(tmp_path: Path) -> None:
    path = example(tmp_path / "ck")
    with (path / "state" / "0" / "0" / "1.snapshot").open("wb") as file:
        file.truncate(1 << 42)
    began_s = time.monotonic()
    text = error("checkpoint", "rewind", path, 1, "--to", tmp_path / "copy", code=2)
    assert "the copy takes 4,398,04" in text
    assert time.monotonic() - began_s < HANGS_S
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ck"]


def test_nobody_else_enters_a_copy_before_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = example(tmp_path / "ck")
    copy, modes = spark_checkpoint._copy, []

    def copied(source: Folder, target: Folder, *more: Any) -> None:
        modes.append(os.fstat(target.fd).st_mode & 0o777)
        copy(source, target, *more)

    monkeypatch.setattr(spark_checkpoint, "_copy", copied)
    run("checkpoint", "rewind", path, 1, "--to", tmp_path / "copy")
    assert modes
    assert set(modes) == {0o700}
