"""A disk that loses or misplaces whole writes: an old page is there again, a page is where another belongs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from crash import checker
from crash.flips import Sample, _tree, look
from crash.harness import SMALL, Promise, Step, die, run_steps
from crash.memdisk import MemDisk
from crash.workloads import batch, put

PAGE_SIZE = 4096


_FIRST: list[Step] = [batch(0, 40), batch(1, 5), put(10)]
_SECOND: list[Step] = [batch(2, 40), put(20), ("big_put", 21, 3000), batch(3, 40)]


def closed_store(root: Path) -> tuple[Sample, dict[str, bytes]]:
    """A closed store of two sessions: as it is, and its files as they were after the first session."""
    disk, config = MemDisk(root), SMALL.replace(enabled_append_prop_crc=True)
    trees = []
    for part in (_FIRST, _SECOND):
        run_steps(root, [("open",), *part, ("close",)], disk, Promise(), config)
        die(root)
        trees.append(disk.tree())
    found = checker.check(disk.tree(), uninterrupted=True)
    assert not found.faults
    return Sample("two sessions", config, disk.content(), found.queues, found.end, closed=True), trees[0]


def page_of(path: str, at: int, data: bytes) -> Callable[[MemDisk], None]:
    def damage(disk: MemDisk) -> None:
        disk.node(path)[at : at + len(data)] = data

    return damage


def test_an_old_page_that_is_there_again_is_named(root: Path) -> None:
    """The write that put newer bytes over it was acknowledged, and lost: in each page of each file that changed."""
    sample, before = closed_store(root)
    tried = set()
    for path, data in sorted(_tree(sample).items()):
        old = before.get(path, b"")
        if not path.startswith(("commitlog/", "consumequeue/", "index/")):
            continue
        for at in range(0, len(data), PAGE_SIZE):
            page = old[at : at + PAGE_SIZE].ljust(len(data[at : at + PAGE_SIZE]), b"\0")
            if page == data[at : at + PAGE_SIZE]:
                continue
            word, verdict = look(sample, root, page_of(path, at, page), path)
            assert verdict.ok, f"{path}, {at}: {verdict}"
            assert word in ("named", "put right"), f"{path}, {at}: {word}"
            tried.add(path.partition("/")[0])
    assert tried == {"commitlog", "consumequeue", "index"}


def test_all_of_an_old_state_is_there_again(root: Path) -> None:
    """Both writes of `state` at the second close were lost: what the newer ConsumeQueues show is not forgotten."""
    sample, before = closed_store(root)
    path = "spark/state"
    word, verdict = look(sample, root, page_of(path, 0, before[path]), path)
    assert verdict.ok, str(verdict)
    assert word != "of no meaning"


def test_a_page_in_the_place_of_another_is_named(root: Path) -> None:
    """A misdirected write: records that are valid, and not where they say they are."""
    sample, _ = closed_store(root)
    tree, count = _tree(sample), 0
    for path, data in tree.items():
        if not path.startswith("commitlog/"):
            continue
        pages = [at for at in range(0, len(data), PAGE_SIZE) if data[at : at + PAGE_SIZE].strip(b"\0")]
        for at, other in zip(pages, pages[1:] + pages[:1], strict=True):
            if at != other:
                word, verdict = look(sample, root, page_of(path, at, data[other : other + PAGE_SIZE]), path)
                assert verdict.ok, f"{path}, {other} at {at}: {verdict}"
                assert word == "named"
                count += 1
    assert count > 4
