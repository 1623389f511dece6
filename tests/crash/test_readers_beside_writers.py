"""Readers look while writers commit, come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.harness import APP, no_thread_warnings
from crash.imitate import (
    put,
)
from messagestore import (
    MessageStore,
)
from messagestore.files.disk import Disk
from messagestore.read.view import StoreView
from sequences import CONFIG, Start, filled

pytestmark = no_thread_warnings


def test_a_busy_writer_starves_no_reader(root: Path, process: Start) -> None:
    """The state changes each time a reader looks. The reader loads the visible end once and is done."""
    p = process(root)
    store = p.session()
    put(store, "put/0/")

    class Busy(Disk):
        reads = 0

        def pread(self, file, size, position):  # type: ignore[no-untyped-def]
            if file.path.endswith("/state"):
                Busy.reads += 1
                put(store, f"put/{Busy.reads}/")
            return super().pread(file, size, position)

    with MessageStore.open_read_only(root, CONFIG, disk=Busy()) as reader:
        before = Busy.reads
        found = reader.max_offset("single", 0)
        assert Busy.reads == before + 1
        assert found == before + 2
    store.close()


@pytest.mark.parametrize("closes", [False, True], ids=["attached", "come and gone"])
def test_a_writer_that_comes_while_a_reader_collects_ends_shows_no_half_batch(
    root: Path, process: Start, closes: bool
) -> None:
    """The store is closed, a reader collects the ends of its queues, and in between a writer commits a batch."""
    filled(root, process)
    p = process(root)
    queues = [(f"topic-{APP}", queue_id) for queue_id in range(3)]

    class Slow(Disk):
        done = False

        def pread_into(self, file, buffer, position):  # type: ignore[no-untyped-def]
            if file.path.endswith(f"topic-{APP}/1/{0:020d}") and not Slow.done:
                Slow.done = True
                p.batch(version=1, rows=9)
                if closes:
                    p.detach()
            return super().pread_into(file, buffer, position)

    view = StoreView(root, CONFIG, Slow())
    ends = view.max_offsets(queues)
    assert Slow.done
    assert list(ends.values()) in ([2, 2, 1], [5, 5, 4])
    view.close()


def test_a_reader_finishes_beside_writers_that_come_and_go(root: Path, process: Start) -> None:
    """Each time the reader looks, a writer comes, commits and goes. The reader still sees whole batches, and it
    returns.
    """
    filled(root, process)
    queues = [(f"topic-{APP}", queue_id) for queue_id in range(3)]

    class Busy(Disk):
        versions = 0

        def pread_into(self, file, buffer, position):  # type: ignore[no-untyped-def]
            if file.path.endswith(f"topic-{APP}/1/{0:020d}"):
                Busy.versions += 1
                p = process(root)
                p.batch(version=Busy.versions, rows=3)
                p.detach()
            return super().pread_into(file, buffer, position)

    view = StoreView(root, CONFIG, Busy())
    for _ in range(3):
        ends = list(view.max_offsets(queues).values())
        assert ends[0] - 2 == ends[1] - 2 == ends[2] - 1 > 0
    assert Busy.versions < 60
    view.close()
