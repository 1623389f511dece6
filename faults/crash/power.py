"""The mode `power` of `make crash`: real power cuts of ext4 and XFS on loop devices.

`FS_IOC_SHUTDOWN` with "no log flush" drops every page and every part of the journal that is not on disk; mounting again
replays the journal, as after a power cut. The writers are those of `crash.kills`; they are killed just before or just
after the cut, so that some see the errors of a dead disk. Another writer deletes the oldest segments meanwhile
(`crash.retentions`). Each cut begins another boot.

The mode needs root, loop devices, and mkfs of the two file systems; if something is missing, the result says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from crash.children import in_child
from crash.counts import Counts, again
from crash.harness import Promise, scratch_folder
from crash.imitate import another_boot
from crash.kills import Child, judged, some_config, some_contents
from crash.retentions import judge_cut, write_and_delete

QUICK_COUNT = 500
CUTS_OF_A_STORE, CUTS_OF_RETENTION = 25, 10
FILE_SYSTEMS = {"ext4": ("64M", ["mkfs.ext4", "-q", "-F"]), "xfs": ("320M", ["mkfs.xfs", "-q", "-f"])}
_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_UNMOUNT_S = 60.0


class CannotMountError(Exception):
    """The machine does not permit this."""


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run `QUICK_COUNT` cuts, half of them on each file system; in deep mode, run as many as the seconds allow."""
    counts, until_s = Counts(), time.monotonic() + seconds
    with scratch_folder() as folder:
        for kind in FILE_SYSTEMS:
            if case and not case.startswith(kind):
                continue
            half_s = until_s if kind == "xfs" else time.monotonic() + seconds / 2
            try:
                with loop_mount(kind, folder) as disk:
                    for number in range(part[0], 1 << 30, part[1]):
                        if case == f"{kind}/retention":
                            break
                        if case and case != f"{kind}/{number}":
                            if number > int(case.rpartition("/")[2]):
                                break
                            continue

                        done = counts.cases[f"power cuts ({kind})"]
                        if done * part[1] >= QUICK_COUNT / 2 if quick else time.monotonic() > half_s:
                            break
                        key = f"{kind}/{number}"
                        one_store(disk, random.Random(f"{seed} {key}"), counts, again("power", seed, key))

                    if part[0] == 0 and case in ("", f"{kind}/retention"):
                        store_with_retention(
                            disk,
                            random.Random(f"{seed} {kind}/retention"),
                            counts,
                            again("power", seed, f"{kind}/retention"),
                        )
            except CannotMountError as error:
                counts.cases[f"power cuts ({kind})"] += 0
                counts.notes.append(f"power cuts on {kind}: {error}")
    return counts


class LoopDisk:
    """A mounted file system in a file."""

    def __init__(self, kind: str, image: Path, mount: Path) -> None:
        self.kind, self.image, self.folder = kind, image, mount

    def mount(self) -> None:
        run_command(["mount", "-o", "loop", str(self.image), str(self.folder)])

    def unmount(self) -> None:
        """Unmount it as soon as nobody holds it: files that a killed process had open are released a moment later.

        Never use `umount -l`: the next mount would show the same file system, which is still active and shut down.
        """
        until_s = time.monotonic() + _UNMOUNT_S
        while True:
            done = subprocess.run(["umount", self.folder], capture_output=True, text=True, check=False)
            if not done.returncode:
                return
            if time.monotonic() > until_s:
                raise AssertionError(f"{done.stderr.strip()} for {_UNMOUNT_S:.0f} s; held by {_holders(self.folder)}")
            time.sleep(0.02)

    def cut(self) -> None:
        """Cut the power."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)


def _holders(folder: Path) -> list[str]:
    """Return what is open below a folder, and in which processes."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith(str(folder)):
                found.append(f"{link} -> {link.readlink()}")
    return found


def run_command(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMountError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


@contextlib.contextmanager
def loop_mount(kind: str, folder: Path, size: str = "") -> Iterator[LoopDisk]:
    usual, make = FILE_SYSTEMS[kind]
    if os.geteuid() != 0:
        raise CannotMountError("needs root")
    if shutil.which(make[0], path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin") is None:
        raise CannotMountError(f"{make[0]} is not installed")

    image, mount = folder / f"{kind}.img", folder / kind
    run_command(["truncate", "-s", size or usual, str(image)])
    run_command(["env", f"PATH={os.environ.get('PATH', '')}:/sbin:/usr/sbin", *make, str(image)])
    mount.mkdir()
    disk = LoopDisk(kind, image, mount)
    disk.mount()

    try:
        yield disk
    finally:
        disk.unmount()
        image.unlink()


def one_store(disk: LoopDisk, chance: random.Random, counts: Counts, command: str) -> None:
    """Cut the power of one store again and again."""
    root = disk.folder / f"store-{chance.randrange(1 << 30)}"
    promise, config = Promise(), some_config(chance)
    first = some_contents(chance)
    for number in range(CUTS_OF_A_STORE):
        with another_boot(1000 + number):
            child = Child(root, config, first + number, chance.randrange(1 << 30), promise)
            wait_s = 0.004 + chance.random() * chance.choice((0.01, 0.03, 0.06))
            time.sleep(wait_s)
            disk.cut()
            if chance.random() < 0.5:
                time.sleep(0.003)  # the writer sees the errors of a dead disk: nothing may be acknowledged any more
            steps = child.kill(power_cut=True)
            disk.unmount()
            disk.mount()
        with another_boot(5000 + number):
            verdict = judged(root, promise, config, steps)
        counts.take(f"power cuts ({disk.kind})", verdict, f"cut {number} after {wait_s:.4f} s", command)
        if not verdict.ok:
            return
    shutil.rmtree(root, ignore_errors=True)


def store_with_retention(disk: LoopDisk, chance: random.Random, counts: Counts, command: str) -> None:
    """Cut the power of one store again and again while its oldest segments are deleted."""
    root, acknowledged = disk.folder / "retention", -1
    for number in range(CUTS_OF_RETENTION):
        with another_boot(1000 + number):
            read_end, write_end = os.pipe()
            pid = in_child(partial(write_and_delete, root, write_end))
            os.close(write_end)
            said = os.read(read_end, 4096)  # the store is open
            wait_s = chance.random() * 0.15
            time.sleep(wait_s)
            disk.cut()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            with os.fdopen(read_end, "rb") as pipe:
                said += pipe.read()
            disk.unmount()
            disk.mount()
        acknowledged = max([acknowledged, *map(int, said.split())])
        with another_boot(5000 + number):
            verdict = judge_cut(root, acknowledged, counts)
            verdict.misread += ["the writer did not begin"] * (not said)
        key = f"power cuts beside retention ({disk.kind})"
        counts.take(key, verdict, f"cut {number} after {wait_s:.4f} s", command)
        if not verdict.ok:
            return
    shutil.rmtree(root, ignore_errors=True)
