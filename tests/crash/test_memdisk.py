"""Is the disk in memory a disk? The same operations, and the same store, on both."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from crash import checker
from crash.harness import Promise, die, run_steps
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.power_cut import Folder
from crash.workloads import FILLED, WORKLOADS, Bases, record_in_memory
from messagestore.files.disk import Disk


def something(disk: Disk, root: Path, chance: random.Random, names: list[str]) -> object:
    """One operation by chance, and what came of it."""
    path, other = (str(root / chance.choice(names)) for _ in range(2))
    size, position = chance.randrange(6000), chance.choice((0, 1, 511, 512, 4095, 5000))
    try:
        match chance.randrange(16):
            case 0:
                return disk.mkdir(path)
            case 1 | 2:
                return disk.open_new(path, chance.choice((0, size))).path
            case 3 | 4:
                return disk.pwrite(disk.open(path, writable=True), chance.randbytes(size), position)
            case 5 | 6:
                return disk.pread(disk.open(path), size, position)
            case 7:
                buffer = bytearray(size)
                count = disk.pread_into(disk.open(path), memoryview(buffer), position)
                return count, bytes(buffer)
            case 8:
                return disk.rename(path, other) if not disk.is_folder(path) else None
            case 9:
                return disk.unlink(path)
            case 10:
                return disk.punch(disk.open(path, writable=True), position, size)
            case 11:
                return disk.names(path), disk.exists(path), disk.is_folder(path)
            case 12:
                file = disk.open(path)
                disk.rename(path, other)
                return disk.at_path(file)
            case 13:
                return disk.rmdir(path)
            case 14:
                free = not disk.exists(other) and not other.startswith(path)
                return disk.rename(path, other) if free and disk.is_folder(path) else None
            case _:
                return disk.size(path) if not disk.is_folder(path) else None
    except OSError as error:
        return type(error), error.errno
    except Exception as error:  # noqa: BLE001 - what comes is compared
        return type(error)


@pytest.mark.parametrize("seed", range(6))
def test_it_does_what_the_real_disk_does(seed: int, tmp_path: Path) -> None:
    """Hundreds of operations on both: the same answers, the same errors, and the same files at the end."""
    names = ["a", "b", "dir", "dir/a", "dir/b", "dir/sub", "dir/sub/a", "nowhere/a"]
    real, memory = tmp_path / "real", tmp_path / "memory"
    real.mkdir()
    disk = MemDisk(memory)
    answers = []
    for which, root in ((Disk(), real), (disk, memory)):
        chance = random.Random(seed)
        answers.append([text_of(something(which, root, chance, names), root) for _ in range(400)])
    assert answers[0] == answers[1]
    assert {k: v for k, v in checker.read_tree(real).items() if k != "spark/"} == disk.tree()


def text_of(answer: object, root: Path) -> str:
    return repr(answer).replace(str(root), "")


def test_a_store_in_memory_is_the_store_on_the_disk(tmp_path: Path) -> None:
    """The same steps leave the same files: but for names, times and ids, the same bytes."""
    trees = []
    for root in (tmp_path / "real", tmp_path / "memory"):
        disk = Disk() if root.name == "real" else MemDisk(root)
        run_steps(root, FILLED, disk, Promise())
        die(root)
        found = checker.check(checker.read_tree(root) if root.name == "real" else disk.tree())  # type: ignore[attr-defined]
        assert found.faults == []
        trees.append((found.queues, found.end, [record.key_hashes for record in found.records]))
    assert trees[0] == trees[1]


def test_content_goes_out_and_in_again(tmp_path: Path) -> None:
    """An image of a disk makes the same disk."""
    disk = MemDisk(tmp_path / "store")
    run_steps(tmp_path / "store", FILLED, disk, Promise())
    die(tmp_path / "store")
    assert MemDisk(tmp_path / "store", disk.content()).tree() == disk.tree()
    disk.write_to(tmp_path / "written")
    assert checker.read_tree(tmp_path / "written") == disk.tree()


def test_what_a_killed_process_did_not_sync_is_not_safe(tmp_path: Path) -> None:
    """The next process sees it, and a power cut takes it, unless the next process syncs it."""
    disk = MemRecordingDisk(tmp_path / "store", {})
    file = disk.open_new(disk.root + "/a", 0)
    disk.fsync_dir(disk.root)
    disk.pwrite(file, b"x" * 600, 0)
    disk.open_new(disk.root + "/b", 10)
    after = MemRecordingDisk.after_kill(tmp_path / "store", disk, disk.position)
    assert after.tree() == {"a": b"x" * 600, "b": bytes(10)}
    assert files(after.image(0).folder) == {"a"}
    assert MemDisk(tmp_path / "store", after.image(0).folder).tree()["a"] == b""
    after.fdatasync(after.open(after.root + "/a"))
    assert MemDisk(tmp_path / "store", after.image(1).folder).tree() == {"a": b"x" * 600}
    after.fsync_dir(after.root)
    assert files(after.image(2).folder) == {"a", "b"}


def files(folder: Folder) -> set[str]:
    return set(folder)


def test_the_image_of_everything_is_the_disk(tmp_path: Path) -> None:
    """At the end of a workload, with all that was not synced: what the process itself sees."""
    bases = Bases(tmp_path / "store")
    for name in ("roll-over", "close and open"):
        workload = WORKLOADS[name]
        run = record_in_memory(bases[workload.base], workload, bases.root)
        image = run.disk.image(run.disk.position, "all")
        assert MemDisk(bases.root, image.folder).tree() == run.disk.tree()  # type: ignore[attr-defined]
