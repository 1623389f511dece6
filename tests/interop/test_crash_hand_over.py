"""We die at every single operation, or the power goes; Java opens what is left, appends and closes; we go on.

What was acknowledged is there for Java and for us, a batch is whole or absent for both, a replayed batch is there once.
"""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

from crash.harness import (
    APP,
    SMALL,
    Promise,
    Step,
    check_store,
    count_operations,
    do_step,
    fresh,
    make_base,
    payload,
    run_until_killed,
    spread,
)
from crash.imitate import another_boot
from crash.simdisk import KillDisk, RecordingDisk
from interop.compare import check_messages
from interop.java_store import ANSWER_S, Driver, JavaStore, java_config, single
from interop.share import part
from messagestore import MessageStore, StoreConfig

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

BASE: list[Step] = [("open",), ("put", 0, "single", 0), ("batch", APP, 0, 20, "SYNC_FLUSH"), ("close",)]
STEPS: list[Step] = [
    ("open",),
    ("put", 1, "single", 0),
    ("batch", APP, 1, 40, "SYNC_FLUSH"),
    ("puts", 10, 5, "single", 1),
    ("batch", "new", 0, 60, "SYNC_FLUSH"),  # a new topic, and more than a segment holds
    ("batch", APP, 2, 3, "SYNC_FLUSH"),
    ("close",),
]
GROUP = 80
JAVA_BODIES = [b"java/0", b"java/1", b"java/2"]


class Takeover:
    """Stores that Java takes over together."""

    def __init__(self, java: Driver, config: StoreConfig) -> None:
        self.java = java
        self.config = config
        self.taken: list[tuple[Path, Promise, str, Future[bool]]] = []

    def add(self, root: Path, promise: Promise, name: str) -> None:
        java = JavaStore(self.java, root, java_config(self.config))
        try:
            java.open()
            try:
                self.check(java, promise, name)
                puts = java.put([single("java", body, queue_id=0, keys=["from-java"]) for body in JAVA_BODIES])
                assert all(put["ok"] for put in puts)
                java.dispatched()
                assert java.bodies("java", 0) == JAVA_BODIES
            finally:
                self.taken.append((root, promise, name, java.closing()))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        if len(self.taken) >= GROUP:
            self.finish()

    def check(self, java: JavaStore, promise: Promise, name: str) -> None:
        """What Java sees: no half batch, nothing lost, no phantom; and a reader of ours sees the same beside it."""
        with MessageStore.open_read_only(java.root, self.config) as store:
            check_messages(store, java)
            queues = [(topic, queue_id) for topic, ids in store.topics().items() for queue_id in ids]
        found: Counter[bytes] = Counter()
        for (topic, queue_id), dump in java.dump_all(queues).items():
            assert dump["max"] == dump["min"] + len(dump["messages"]), f"{topic}/{queue_id}: a phantom message"
            found.update(java.bodies(topic, queue_id))
        assert max(found.values(), default=1) == 1, "a message is there twice"
        missing = [text for text in promise.puts if text.encode() not in found]
        assert not missing, f"lost: {missing[:3]}"
        for (app, version), row_count in promise.rows.items():
            count = sum(found[payload(app, version, row)] for row in range(row_count))
            assert count in (0, row_count), f"batch {app} {version}: {count} of {row_count} rows"
            assert count == row_count or (app, version) not in promise.batches, f"batch {app} {version} is lost"

    def finish(self) -> None:
        taken, self.taken = self.taken, []
        for *_, closed in taken:
            closed.result(ANSWER_S)
        for root, promise, name, _ in taken:
            try:
                with another_boot():
                    check_store(root, promise, self.config)
                    with MessageStore.open_read_only(root, self.config) as store:
                        assert [m.body for m in store.get_message("java", 0, 0).messages] == JAVA_BODIES
                        assert [m.body for m in store.query_message("java", "from-java")] == JAVA_BODIES
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
            shutil.rmtree(root)
        self.java.call("gc")


@pytest.mark.parametrize("half_writes", [False, True], ids=["whole writes", "half writes"])
def test_killed_at_every_operation(java: Driver, root: Path, half_writes: bool) -> None:
    """Recovery on open, puts, batches over a segment's end, a topic's first files, the close: killed before, or half-way
    through, each operation."""
    base_promise = make_base(root, BASE)
    count = count_operations(lambda _: KillDisk(), root, root.parent / "count", STEPS)
    takeover = Takeover(java, SMALL)
    for kill_at in part(range(count)):
        store = fresh(root, root.parent / f"killed-{kill_at}")
        disk = KillDisk(kill_at, half_writes=half_writes)
        promise = run_until_killed(store, STEPS, disk, SMALL, copy.deepcopy(base_promise))
        takeover.add(store, promise, f"killed in operation {kill_at} of {count}: {disk.killed_in}")
    takeover.finish()
    assert count > 60


def test_power_cuts(java: Driver, root: Path) -> None:
    """SYNC_FLUSH, and the power goes: whatever subset of what was not synced survives, and though Java opens it first,
    what was acknowledged is there and no batch is there in part."""
    promise = make_base(root, BASE)
    disk = RecordingDisk(root)
    known = [(0, copy.deepcopy(promise))]
    store = MessageStore.open(root, SMALL, disk=disk)
    for step in STEPS[1:]:
        do_step(store, step, promise)
        known.append((disk.position, copy.deepcopy(promise)))
    takeover = Takeover(java, SMALL)
    built, cuts = 0, part(spread(disk.position + 1, 40))
    for cut in cuts:
        acknowledged = [each for position, each in known if position <= cut][-1]
        expected = copy.deepcopy(promise)  # what may be there is all that was ever tried
        expected.puts, expected.batches = acknowledged.puts, acknowledged.batches
        modes = ("strict", "all", "one file missing", "one file present", "random")
        for image in disk.images(cut, modes, limit=2, random_count=2, seed=7):
            target = image.build(root.parent / f"image-{built}")
            takeover.add(target, copy.deepcopy(expected), f"power cut after {cut}: {image.label}")
            built += 1
    takeover.finish()
    assert built > 2.5 * len(cuts) > 10
