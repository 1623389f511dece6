"""The time to open a store whose writer was killed.

A separate process appends SYNC_FLUSH batches and is killed. Only its batches lie above the clean end. The floor reads
the same bytes and computes one CRC-32 over them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from benchmarks import killed_writer
from benchmarks.measure import Rounds, Settings, settle, timed, title
from messagestore import MessageStore, StoreConfig
from messagestore.files.commit_log import CommitLog
from messagestore.format.record import crc32
from messagestore.read.view import StoreView

_BATCHES = 4
_GIB = 1 << 30


def run(settings: Settings) -> None:
    """Measure figure 6."""
    title(f"open after a kill, {_BATCHES} batches of {settings.rows:,} messages above the clean end")

    rounds = Rounds()
    for number in range(2 if settings.quick else 3):
        for index_on in (True, False):
            name = f"recovery.index_{'on' if index_on else 'off'}"
            root = settings.folder / f"{name}-{number}"
            _killed(root, settings.rows, index_on=index_on)
            size = _size_above_clean_end(root)
            settle(settings.folder, size)

            floor, _ = timed(_read_all, root)
            taken, store = timed(_open, root, index_on=index_on)
            store.close()
            rounds.add(f"{name}.floor", floor.wall_s / (size / _GIB))
            rounds.add(name, taken.wall_s / (size / _GIB))

    for name in ("recovery.index_on", "recovery.index_off"):
        rounds.report(f"{name}.floor", "s/GiB", lower_is_better=True)
        rounds.report(name, "s/GiB", floor=f"{name}.floor", lower_is_better=True)


def _killed(root: Path, rows: int, *, index_on: bool) -> None:
    command = [sys.executable, "-m", killed_writer.__name__, str(root), str(rows), str(_BATCHES), str(int(index_on))]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, check=False)
    if done.returncode != -signal.SIGKILL:
        raise AssertionError(f"the writer ended with {done.returncode}")


def _size_above_clean_end(root: Path) -> int:
    view = StoreView(root)
    visible = view.refresh()
    view.close()
    if visible.end is None:
        raise AssertionError(f"{root}: the store is not ours")
    return visible.end - visible.clean_end


def _open(root: Path, *, index_on: bool) -> MessageStore:
    return MessageStore.open(root, StoreConfig(message_index_enable=index_on))


def _read_all(root: Path) -> int:
    view = StoreView(root)
    log: CommitLog = view.files.commit_log
    crc, position, end = 0, log.min_offset, view.visible.end or 0
    while position < end:
        data = log.read_array(position, min(16 << 20, end - position))
        crc = crc32(data, crc)
        position += len(data)
    view.close()
    return crc
