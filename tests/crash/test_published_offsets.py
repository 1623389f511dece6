"""Whoever publishes how far a group has read is killed, or power goes: the table is the one before or the one after.

`config/consumerOffset.json` is made anew under another name and put in place: every operation of that is a place to die
(`crash.power_cut` has what a power cut may leave). What is there must be read whole, the other groups in it, too; what
`publish_offsets` had returned for must be the new one; the next one who publishes goes on, and the store opens as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash import checker
from crash.group_settings import GROUP_SETTINGS
from crash.harness import SMALL, die, no_thread_warnings
from crash.images import POWER_MODES, half_write, with_half_write
from crash.imitate import another_boot
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.power_cut import Folder
from crash.workloads import Bases
from messagestore import MessageStore
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.inspect.verify import verify

pytestmark = no_thread_warnings

Table = dict[str, dict[str, dict[int, int]]]
BEFORE: Table = {"other": {"single": {0: 7}}, "mine": {"single": {0: 1, 1: 1}}}
AFTER: Table = {"other": {"single": {0: 7}}, "mine": {"single": {0: 2, 1: 3}, "app-1": {0: 4}}}
NEW = {("single", 0): 2, ("single", 1): 3, ("app-1", 0): 4}


def table(disk: MemDisk) -> Table:
    offsets = ConsumerOffsets(disk, disk.root)
    offsets.load()
    return {g: {topic: offsets.get(topic, g) for topic in offsets.topics(g)} for g in offsets.groups}


def before(root: Path, whose: str) -> Folder:
    """A closed store, in which two groups have read something; a broker's has no `spark` folder."""
    disk = MemDisk(root, Bases(root)["filled"].content)
    for group, topics in BEFORE.items():
        publish_offsets(
            str(root),
            group,
            {(topic, queue): at for topic, queues in topics.items() for queue, at in queues.items()},
            disk,
        )
    assert table(disk) == BEFORE
    if whose == "a broker's":
        disk.remove_tree("spark")
    if whose == "nobody's":
        disk.remove_tree("config")
    return disk.content()


def crashes(disk: MemRecordingDisk, root: Path) -> Iterator[tuple[str, int, Folder, bool]]:
    """What it is, after how many operations, what is left, and whether power was cut."""
    for cut in range(disk.position + 1):
        content = disk.image(cut, "all").folder
        yield f"kill {cut}", cut, content, False
        if half_write(disk, cut) is not None:
            yield f"kill {cut} half", cut, with_half_write(disk, cut, content, root), False
        for image in disk.images(cut, POWER_MODES, limit=20):
            yield str(image), cut, image.folder, True


@pytest.mark.parametrize("whose", ["ours", "a broker's", "nobody's"])
def test_the_table_is_the_one_before_or_the_one_after(whose: str, scratch: Path) -> None:
    root = scratch / "store"
    content = before(root, whose)
    first: Table = {} if whose == "nobody's" else BEFORE
    last: Table = {"mine": AFTER["mine"]} if whose == "nobody's" else AFTER
    disk = MemRecordingDisk(root, content)
    publish_offsets(str(root), "mine", NEW, disk)
    found = {"before": 0, "after": 0}
    for words, cut, left, power in crashes(disk, root):
        after = MemDisk(root, left)
        now = table(after)
        assert now in (first, last), words
        assert now == last or cut < disk.position, f"{words}: was published, and is gone"
        found["after" if now == last else "before"] += 1
        if whose == "ours":
            check_store(root, after, words, power=power)
            assert table(after) == now, words
        publish_offsets(str(root), "mine", NEW, after)
        assert table(after) == last, words
    assert min(found.values()) > 3, found


def check_store(root: Path, disk: MemDisk, words: str, *, power: bool) -> None:
    """What was left behind is in nobody's way."""
    with another_boot() if power else contextlib.nullcontext():
        try:
            report = verify(root, disk=disk)
            assert report.ok, f"{words}: {report.findings[:3]}"
            with MessageStore.open(root, SMALL, disk=disk):
                pass
        finally:
            die(root)
    found = checker.check(disk.tree())
    assert not found.faults, f"{words}: {found.faults[:3]}"


@pytest.mark.parametrize("name", GROUP_SETTINGS)
def test_settings_of_groups(name: str, scratch: Path) -> None:
    """Changes that are killed, files that are damaged, sessions that have lost the store."""
    GROUP_SETTINGS[name](scratch)
