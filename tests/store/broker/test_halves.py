"""A message of a transaction that was not committed (PREPARED, ROLLBACK) is in the log and in no queue, live and rebuilt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from crash.harness import die
from crash.imitate import units, walk
from crash.simdisk import KillDisk, Killed
from messagestore import Message, MessageBatch, MessageIllegalError, MessageStore, StorePoisonedError
from messagestore.inspect.operator import status
from messagestore.inspect.verify import verify
from small import SMALL, SMALL_ASYNC

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
PREPARED, COMMIT, ROLLBACK = 0x4, 0x8, 0xC
FLAGS = (0, PREPARED, COMMIT, ROLLBACK, PREPARED, 0)


def message(number: int, flag: int) -> Message:
    return Message(
        "t",
        b"%d/" % number,
        queue_id=0,
        keys=[f"k{number}"],
        sys_flag=flag,
        prepared_transaction_offset=100 + number if flag in (COMMIT, ROLLBACK) else 0,
    )


def check(root: Path, count: int = len(FLAGS)) -> None:
    """What the store must show of the first `count` messages."""
    flags = FLAGS[:count]
    queued = [b"%d/" % n for n, flag in enumerate(flags) if flag in (0, COMMIT)]
    with MessageStore.open_read_only(root, SMALL) as store:
        found = store.get_message("t", 0, 0).messages
        assert [m.body for m in found] == queued
        assert [m.queue_offset for m in found] == list(range(len(queued)))
        for number, flag in enumerate(flags):
            hits = [m.body for m in store.query_message("t", f"k{number}")]
            assert hits == ([] if flag == ROLLBACK else [b"%d/" % number])
        for record in walk(root)[0]:
            shown = store.look_message_by_offset(record["physical_offset"])
            assert shown is not None
            number = int(shown.body[:-1])
            assert shown.sys_flag & 0xC == flags[number]
            assert shown.prepared_transaction_offset == (100 + number if flags[number] in (COMMIT, ROLLBACK) else 0)
            if flags[number] in (PREPARED, ROLLBACK):
                assert shown.queue_offset == 0
    report = verify(root, SMALL)
    assert report.ok, report.findings[:3]


@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("missing", [(), ("consumequeue",), ("index",), ("consumequeue", "index")])
def test_half_messages_are_in_no_queue_live_and_rebuilt(
    tmp_path: Path, config: object, missing: tuple[str, ...]
) -> None:
    """Put, read, killed, rebuilt: the queue is the same each time, and goes on where it was."""
    root = tmp_path / "store"
    store = MessageStore.open(root, config)
    results = [store.put_message(message(number, flag)) for number, flag in enumerate(FLAGS)]
    assert [r.queue_offset for r in results] == [0, 0, 1, 0, 0, 2]
    store.writer.publish()
    before = units(root, "t", 0)
    assert len(before) == 3
    die(root)
    for name in missing:
        shutil.rmtree(root / name)
    with MessageStore.open(root, config) as store:
        assert store.report is not None
        assert store.report.cut is None
    assert units(root, "t", 0) == before
    check(root)
    with MessageStore.open(root, config) as store:
        assert store.put_message(Message("t", b"next", queue_id=0)).queue_offset == 3


def test_a_kill_between_half_messages_leaves_the_same_queue(tmp_path: Path) -> None:
    """The writer dies at each operation."""
    at = 0
    while True:
        root = tmp_path / "store"
        shutil.rmtree(root, ignore_errors=True)
        disk = KillDisk(at)
        count = 0
        try:
            with MessageStore.open(root, SMALL, disk=disk) as store:
                for number, flag in enumerate(FLAGS):
                    store.put_message(message(number, flag))
                    count = number + 1
        except (Killed, StorePoisonedError):
            pass
        die(root)
        if root.exists():
            with MessageStore.open(root, SMALL):
                pass
            there = len(walk(root)[0])
            assert there >= count
            if there:
                check(root, there)
        if not disk.dead:
            break
        at += 5
    assert at > 30


@pytest.mark.parametrize("flag", [PREPARED, COMMIT, ROLLBACK])
def test_a_batch_has_no_transaction(flag: int) -> None:
    """As in RocketMQ: refused by name, before anything is written."""
    with pytest.raises(MessageIllegalError, match="sys_flag"):
        MessageBatch.from_messages([Message("t", b"x"), Message("t", b"y", sys_flag=flag)])
    with pytest.raises(MessageIllegalError, match="prepared_transaction_offset"):
        MessageBatch.from_messages([Message("t", b"x", prepared_transaction_offset=1)])


def test_a_number_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """The offset of the prepared message is an int of 64 bits."""
    wrong = pytest.raises(MessageIllegalError, match="prepared_transaction_offset")
    with MessageStore.open(tmp_path / "store", SMALL) as store, wrong:
        store.put_message(Message("t", b"x", prepared_transaction_offset=1 << 63))


@pytest.mark.parametrize("bits", [PREPARED, ROLLBACK])
@pytest.mark.parametrize("killed", [False, True])
def test_a_log_without_any_unit_is_opened_as_it_was_closed(tmp_path: Path, bits: int, *, killed: bool) -> None:
    """No queue was ever made, so none is missing: nothing is rebuilt, and `status` says where the log ends."""
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL)
    results = [store.put_message(Message("t", b"half", queue_id=0, sys_flag=bits)) for _ in range(3)]
    if killed:
        die(root)
        with MessageStore.open(root, SMALL) as store:
            assert store.report is not None
            assert (store.report.reason, store.report.rebuilt) == ("a writer crashed", None)
    store.close()
    for _ in range(2):
        with MessageStore.open(root, SMALL) as store:
            assert store.report is not None
            assert (store.report.reason, store.report.rebuilt, store.report.notes) == ("clean", None, [])
    assert status(str(root))["commitLog"]["maxOffset"] == results[-1].physical_offset + results[-1].size
    assert verify(root, SMALL).ok
