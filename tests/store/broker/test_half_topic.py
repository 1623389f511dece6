"""Transactions in the half topic: a half message is committed, rolled back, checked or discarded, once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from crash.harness import die
from crash.simdisk import KillDisk, Killed
from messagestore import (
    CheckReport,
    ConfigError,
    CorruptionError,
    HalfMessage,
    HalfMessageEndedError,
    LocalTransactionState,
    Message,
    MessageExt,
    MessageIllegalError,
    MessageStore,
    PutMessageStatus,
    StoreClosedError,
    StoreConfig,
    StorePoisonedError,
)
from messagestore.broker import half_progress
from messagestore.broker import halves as half_messages
from messagestore.files.disk import Disk
from messagestore.format import half_records
from messagestore.inspect import operator
from messagestore.inspect.verify import verify
from small import SMALL, SMALL_ASYNC, ClockDisk

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
HALF, OP, DISCARDED = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC"
COMMIT, ROLLBACK, UNKNOW = LocalTransactionState
NOW_MS = 1_800_000_000_000


def bodies(root: Path | MessageStore, topic: str) -> list[bytes]:
    if isinstance(root, MessageStore):
        return [message.body for message in root.get_message(topic, 0, 0, 1000).messages]
    with MessageStore.open_read_only(root, SMALL) as store:
        return [message.body for message in store.get_message(topic, 0, 0, 1000).messages]


def half(store: MessageStore, body: bytes = b"paid", **fields: object) -> HalfMessage:
    return store.half_message(Message("orders", body, queue_id=0, **fields), "payments")  # type: ignore[arg-type]


def saved(root: Path) -> tuple[int | None, int | None]:
    """The progress in `config/consumerOffset.json`, as a broker reads it."""
    path = root / "config" / "consumerOffset.json"
    text = path.read_text() if path.exists() else '{"offsetTable":{}}'
    table = json.loads(text.replace("{0:", '{"0":'))["offsetTable"]
    return tuple(table.get(f"{topic}@CID_RMQ_SYS_TRANS", {}).get("0") for topic in (HALF, OP))  # type: ignore[return-value]


def sound(root: Path, config: StoreConfig = SMALL) -> None:
    report = verify(root, config)
    assert report.ok, report.findings[:3]


@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC, SMALL.replace(enabled_append_prop_crc=True)])
def test_a_half_message_is_seen_when_it_is_committed(tmp_path: Path, config: StoreConfig) -> None:
    """Its record, the half record and the op record are a broker's."""
    root = tmp_path / "store"
    message = Message(
        "orders", b"paid", queue_id=3, keys=["42"], tags="eu", properties={"till": "7"}, flag=9, born_host="[::1]:5",
        reconsume_times=2,
    )  # fmt: skip
    with MessageStore.open(root, config) as store:
        prepared = store.half_message(message, "payments", check_immunity_s=30)
        assert store.max_offset("orders", 3) == 0
        found = store.look_message_by_id(prepared.message_id)
        assert found is not None
        unique = prepared.half.transaction_id
        assert len(unique) == 32
        assert (found.topic, found.queue_id, found.queue_offset, found.sys_flag & 0xC) == (HALF, 0, 0, 0)
        assert found.system_properties | {"__CRC32#": ""} == {
            "KEYS": "42", "TAGS": "eu", "UNIQ_KEY": unique, "TRAN_MSG": "true", "PGROUP": "payments",
            "CHECK_IMMUNITY_TIME_IN_SECONDS": "30", "__transactionId__": unique, "REAL_TOPIC": "orders",
            "REAL_QID": "3", "__CRC32#": "",
        }  # fmt: skip
        assert [m.body for m in store.query_message(HALF, unique)] == [b"paid"]
        result = prepared.commit()
        committed = store.get_message("orders", 3, 0).messages[0]
        assert (result.physical_offset, result.queue_id, result.queue_offset) == (committed.physical_offset, 3, 0)
        assert store.look_message_by_id(result.message_id) == committed
        assert committed.sys_flag & 0xC == 0x8
        assert committed.prepared_transaction_offset == found.physical_offset
        same = ("body", "properties", "flag", "born_timestamp_ms", "born_host", "store_host", "reconsume_times", "tags")
        assert [getattr(committed, name) for name in same] == [getattr(found, name) for name in same]
        assert {**committed.system_properties, "__CRC32#": ""} == {**found.system_properties, "__CRC32#": ""}
        assert [m.body for m in store.query_message("orders", unique)] == [b"paid"]
        assert [m.body for m in store.query_message("orders", "42")] == [b"paid"]
        op = store.get_message(OP, 0, 0).messages[0]
        assert (op.body, op.tags, op.sys_flag & 0xC, op.queue_id) == (b"0", "d", 0, 0)
        assert store.open_halves() == []
    sound(root, config)
    topics = json.loads((root / "config" / "topics.json").read_text())["topicConfigTable"]
    assert [topics[name]["writeQueueNums"] for name in (HALF, OP, DISCARDED)] == [1, 1, 1]


def test_a_block_commits_and_an_exception_leaves_the_half_message_open(tmp_path: Path) -> None:
    """Nobody knows whether the change has happened when an exception came."""
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        with half(store, b"1"):
            assert bodies(store, "orders") == []
        with half(store, b"2") as rolled_back:
            rolled_back.rollback()
        with pytest.raises(ZeroDivisionError), half(store, b"3"):
            raise ZeroDivisionError
        assert bodies(store, "orders") == [b"1"]
        (left,) = store.open_halves()
        assert (left.topic, left.queue_id, left.producer_group, left.check_times) == ("orders", 0, "payments", 0)
        store.find_half(left.transaction_id).commit()
        assert bodies(store, "orders") == [b"1", b"3"]


def test_a_half_message_ends_once(tmp_path: Path) -> None:
    """Repeating what happened gives the same result; anything else is an error, also in a new session."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        first, second, third = half(store, b"1"), half(store, b"2"), half(store, b"3")
        result = first.commit()
        second.rollback()
        assert first.commit() == result
        second.rollback()
        with pytest.raises(HalfMessageEndedError, match=r"was committed.*cannot be rolled back"):
            first.rollback()
        with pytest.raises(HalfMessageEndedError, match="was rolled back"):
            second.commit()
    for name in ("message_id", "transaction_id"):
        ids = [getattr(each.half, name) for each in (first, second, third)]
        with MessageStore.open(root, SMALL) as store:
            assert store.find_half(ids[0]).commit() == result
            store.find_half(ids[1]).rollback()
            with pytest.raises(HalfMessageEndedError) as error:
                store.find_half(ids[0]).rollback()
            assert error.value.outcome == "committed"
            with pytest.raises(HalfMessageEndedError) as error:
                store.find_half(ids[1]).commit()
            assert error.value.outcome == "rolled back"
            assert [each.message_id for each in store.open_halves()] == [third.message_id]
            with pytest.raises(HalfMessageEndedError, match="no such half message"):
                store.find_half("7F00000100002A9F0000000000000001")
    assert bodies(root, "orders") == [b"1"]
    assert len(bodies(root, OP)) == 2
    sound(root)


def test_two_sessions_and_many_threads_end_each_half_message_once(tmp_path: Path) -> None:
    """Each of 40 half messages is committed by two threads and rolled back by one."""
    root = tmp_path / "store"
    done: list[tuple[bytes, str]] = []

    def end(handle: HalfMessage, body: bytes, commit: bool) -> None:
        try:
            _ = handle.commit() if commit else handle.rollback()
        except HalfMessageEndedError:
            return
        done.append((body, "commit" if commit else "rollback"))

    with MessageStore.open(root, SMALL) as one, MessageStore.open(root, SMALL) as two:
        threads = []
        for number in range(40):
            body = b"%d" % number
            handle = half(one, body)
            for store, commit in ((one, True), (two, True), (two, False)):
                same = store.find_half(handle.message_id)
                threads.append(threading.Thread(target=end, args=(same, body, commit)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.open_halves() == two.open_halves() == []
    outcome = dict(done)
    assert len(set(done)) == len(outcome) == 40
    assert sorted(bodies(root, "orders")) == sorted(body for body, how in outcome.items() if how == "commit")
    with MessageStore.open_read_only(root, SMALL) as store:
        offsets = [m.body for m in store.get_message(OP, 0, 0, 1000).messages]
    assert sorted(map(int, offsets)) == list(range(40))  # one number each, also if one batch ends several
    sound(root)


def test_expired_half_messages_are_checked_at_most_so_often(tmp_path: Path) -> None:
    """After that they are discarded. The count is in the log before a check is made."""
    root, disk = tmp_path / "store", ClockDisk(NOW_MS)
    config = SMALL.replace(transaction_check_max=3)
    seen: list[tuple[bytes, str, int, str]] = []

    def check(message: MessageExt) -> LocalTransactionState:
        with MessageStore.open_read_only(root, SMALL) as reader:
            times = [each.check_times for each in reader.open_halves()]
        assert times[-1] == int(message.system_properties["TRANSACTION_CHECK_TIMES"])
        seen.append((message.body, message.topic, message.queue_id, message.system_properties["PGROUP"]))
        return {b"c": COMMIT, b"r": ROLLBACK}.get(message.body[:1], UNKNOW)

    with MessageStore.open(root, config, disk=disk) as store:
        for body in (b"c", b"r", b"u"):
            half(store, body)
        handle = store.find_half(store.open_halves()[2].message_id)
        disk.now_ms += 6000
        assert store.check_halves(check) == CheckReport(open=3)  # not due yet
        disk.now_ms += 1
        assert store.check_halves(check) == CheckReport(checked=3, committed=1, rolled_back=1, open=1)
        assert sorted(seen) == [(body, "orders", 0, "payments") for body in (b"c", b"r", b"u")]
        for _ in range(2):
            disk.now_ms += 1
            assert store.check_halves(check) == CheckReport(checked=1, open=1)
    assert len(seen) == 5
    with MessageStore.open(root, config, disk=disk) as store:
        assert store.check_halves(check) == CheckReport(discarded=1)
        assert store.check_halves(check) == CheckReport()
        with pytest.raises(HalfMessageEndedError) as error:
            store.find_half(handle.message_id).commit()
        assert error.value.outcome == "discarded"
        found = store.get_message(DISCARDED, 0, 0).messages[0]
        assert (found.body, found.system_properties["TRANSACTION_CHECK_TIMES"]) == (b"u", "3")
        assert store.max_offset(HALF, 0) == 3 + 5
    assert len(seen) == 5
    assert bodies(root, "orders") == [b"c"]
    assert saved(root) == (8, 8)  # op messages: five half messages put back, two ended, one discarded
    sound(root)


def test_a_handle_outlives_a_check(tmp_path: Path) -> None:
    """The producer commits with the id from before its half message was put back."""
    root, disk = tmp_path / "store", ClockDisk(NOW_MS)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        handle = half(store)
        disk.now_ms += 7000
        for _ in range(2):
            store.check_halves(lambda message: UNKNOW)
        assert store.open_halves()[0].message_id != handle.message_id
        result = handle.commit()
        assert store.find_half(handle.message_id).commit() == result
        committed = store.get_message("orders", 0, 0).messages[0]
        assert committed.system_properties["TRANSACTION_CHECK_TIMES"] == "2"
    assert bodies(root, "orders") == [b"paid"]


def test_a_producer_that_commits_during_its_check(tmp_path: Path) -> None:
    """Whoever is first decides."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path / "store", SMALL, disk=disk) as store:
        handle = half(store)
        disk.now_ms += 7000

        def check(message: MessageExt) -> LocalTransactionState:
            handle.commit()
            return ROLLBACK

        assert store.check_halves(check) == CheckReport(checked=1)
        assert bodies(store, "orders") == [b"paid"]


def test_a_check_that_fails_leaves_its_half_message_open(tmp_path: Path) -> None:
    """The others are checked all the same."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path / "store", SMALL, disk=disk) as store:
        for body in (b"1", b"2", b"3"):
            half(store, body)
        disk.now_ms += 7000

        def check(message: MessageExt) -> LocalTransactionState:
            if message.body == b"1":
                raise ZeroDivisionError
            return COMMIT if message.body == b"2" else "yes"  # type: ignore[return-value]

        report = store.check_halves(check)
        assert (report.checked, report.committed, report.open) == (3, 1, 2)
        assert [type(error) for _, error in report.failures] == [ZeroDivisionError, ConfigError]
        with pytest.raises(ConfigError, match="check"):
            store.check_halves(None)  # type: ignore[arg-type]


def test_a_thread_checks_until_the_session_is_closed(tmp_path: Path) -> None:
    """Every `transactionCheckInterval`. A check that is running when the session is closed is waited for."""
    root, begun, go = tmp_path / "store", threading.Event(), threading.Event()
    config = SMALL.replace(transaction_check_interval=5, transaction_check_max=1000)
    asked: list[bytes] = []

    def check(message: MessageExt) -> LocalTransactionState:
        asked.append(message.body)
        if message.body == b"slow":
            begun.set()
            assert go.wait(20)
        return COMMIT if asked.count(message.body) > 2 else UNKNOW

    store = MessageStore.open(root, config)
    store.start_checking_halves(lambda message: ROLLBACK)
    store.start_checking_halves(check)
    half(store, b"1", born_timestamp_ms=1)
    until_s = time.monotonic() + 20
    while bodies(root, "orders") != [b"1"]:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    half(store, b"slow", born_timestamp_ms=1)
    assert begun.wait(20)
    threading.Timer(0.2, go.set).start()
    store.close()
    count = len(asked)
    time.sleep(0.1)
    assert len(asked) == count
    assert not [thread for thread in threading.enumerate() if "half-message" in thread.name]
    with pytest.raises(StoreClosedError):
        store.start_checking_halves(check)
    with MessageStore.open(root, SMALL) as again:
        assert [each.check_times for each in again.open_halves()] == [asked.count(b"slow")]
    sound(root)


def test_a_child_that_is_forked_during_a_check_does_not_hang(tmp_path: Path) -> None:
    """Its calls raise, as all calls of a session that was opened before a fork."""
    held, go = threading.Event(), threading.Event()
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        handle = half(store, b"1")

        def hold() -> None:
            with store._half_messages._mutex:
                held.set()
                go.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(20)
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(StoreClosedError):
                handle.commit()
                status = 2
            store._half_messages.close()
            os._exit(0 if status == 1 else status)
        until_s = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < until_s, "the child hangs"
            time.sleep(0.01)
        go.set()
        holder.join()
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        handle.commit()


def test_a_half_message_with_its_own_immunity_is_checked_later(tmp_path: Path) -> None:
    """And one that was made in the future is checked at once, as by a broker."""
    root, disk = tmp_path / "store", ClockDisk(NOW_MS)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        store.half_message(Message("orders", b"immune", queue_id=0), "payments", check_immunity_s=60)
        half(store, b"of the future", born_timestamp_ms=NOW_MS + 60_002)
        asked: list[bytes] = []

        def check(message: MessageExt) -> LocalTransactionState:
            asked.append(message.body)
            return UNKNOW

        assert store.check_halves(check) == CheckReport(checked=1, open=2)
        disk.now_ms += 60_000
        assert store.check_halves(check).checked == 1
        disk.now_ms += 1
        assert store.check_halves(check).checked == 2
    assert asked == [b"of the future", b"of the future", b"immune", b"of the future"]


def test_a_half_message_that_is_older_than_files_become_is_discarded(tmp_path: Path) -> None:
    """It is not checked any more. A broker counts a check all the same."""
    root, disk = tmp_path / "store", ClockDisk(NOW_MS)
    asked: list[bytes] = []

    def check(message: MessageExt) -> LocalTransactionState:
        asked.append(message.body)
        return UNKNOW

    with MessageStore.open(root, SMALL.replace(file_reserved_time=1), disk=disk) as store:
        half(store, b"old", born_timestamp_ms=NOW_MS - 3_600_001)
        half(store, b"young", born_timestamp_ms=NOW_MS - 3_600_000)
        assert store.check_halves(check) == CheckReport(checked=1, discarded=1, open=1)
        found = store.get_message(DISCARDED, 0, 0).messages[0]
        assert (found.body, found.system_properties["TRANSACTION_CHECK_TIMES"]) == (b"old", "1")
    assert asked == [b"young"]
    disk.now_ms += 10 * 365 * 86_400_000
    with MessageStore.open(root, SMALL, disk=disk) as store:
        assert store.check_halves(check).checked == 1, "fileReservedTime is -1: nothing is too old"


def test_a_half_message_whose_segment_retention_deletes(tmp_path: Path) -> None:
    """It cannot be ended any more, and does not keep others from being ended or checked."""
    root, disk = tmp_path / "store", ClockDisk(NOW_MS)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        gone, ended = half(store, b"gone"), half(store, b"ended")
        ended.commit()
        for number in range(8):
            store.put_message(Message("filler", b"x" * 4000, queue_id=number))
        left = half(store, b"left")
        store.flush()
        store.writer.clean_end.move()
        assert store.delete_expired_files(at_once=True).segments
        assert store.view.files.commit_log.min_offset > ended.half.physical_offset
        assert [each.message_id for each in store.open_halves()] == [left.message_id]
        for end in (gone.commit, gone.rollback):
            with pytest.raises(HalfMessageEndedError, match="deleted by retention"):
                end()
        disk.now_ms += 7000
        assert store.check_halves(lambda message: COMMIT) == CheckReport(checked=1, committed=1)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        assert store.open_halves() == []
    sound(root)


def test_retention_keeps_an_open_half_message_and_no_ended_ones(tmp_path: Path) -> None:
    """It did not look at open ones before a first check, and then kept ended ones until the next check."""
    root, disk = tmp_path / "store", ClockDisk(NOW_MS)

    def fill(store: MessageStore) -> int:
        for number in range(8):
            store.put_message(Message("filler", b"x" * 4000, queue_id=number))
        return int(store.writer.end.physical_offset)

    with MessageStore.open(root, SMALL, disk=disk) as store:
        half(store, b"ended").commit()
        fill(store)
        waits = half(store, b"waits")
        fill(store)
        store.writer.clean_end.move()
        foreseen = operator.expired(str(root), SMALL, reserved_hours=0)
        deleted = store.delete_expired_files(reserved_hours=0)
        assert (foreseen.kept, foreseen.segments) == (deleted.kept, deleted.segments)
        assert deleted.kept == f"half message 1 of {HALF} is neither committed nor rolled back"
        assert 0 < deleted.min_offset <= waits.half.physical_offset
        assert saved(root) == (1, 1)
        waits.commit()
        end = fill(store)
        assert store.delete_expired_files(reserved_hours=0).kept == "it is the last one, to which the store writes"
        assert store.writer.log.min_offset > waits.half.physical_offset
        assert store.writer.log.min_offset > end - SMALL.mapped_file_size_commit_log
        assert saved(root) == (2, 2)
        lost = half(store, b"lost")
        fill(store)
        store.writer.clean_end.move()
        assert store.delete_expired_files(at_once=True).unread_groups == ("CID_RMQ_SYS_TRANS",)
        assert store.writer.log.min_offset > lost.half.physical_offset
    assert bodies(root, "orders") == []
    sound(root)


def test_a_damaged_table_of_offsets_does_not_stop_what_the_disk_forces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        for number in range(16):
            store.put_message(Message("filler", b"x" * 4000, queue_id=number % 8))
        store.writer.clean_end.move()
        (root / "config" / "consumerOffset.json").write_text('{"offsetTable":{"filler@g":{0:')
        with pytest.raises(CorruptionError, match=r"consumerOffset\.json"):
            store.delete_expired_files(reserved_hours=0)
        assert store.delete_expired_files(at_once=True).segments
    assert "it is not known which consumer groups need what is deleted" in caplog.text


def test_half_messages_stay_if_their_progress_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it, what retention leaves of op messages could open a half message again."""
    root = tmp_path / "store"

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with MessageStore.open(root, SMALL) as store:
        half(store, b"ended").commit()
        for number in range(16):
            store.put_message(Message("filler", b"x" * 4000, queue_id=number % 8))
        store.writer.clean_end.move()
        with monkeypatch.context() as patch:
            patch.setattr(half_progress, "publish_offsets", full)
            assert not store.delete_expired_files(reserved_hours=0).segments
            assert "the progress of half messages could not be saved" in caplog.text
        assert store.delete_expired_files(reserved_hours=0).segments


def test_a_half_message_that_a_killed_broker_had_put_back_is_one(tmp_path: Path) -> None:
    """A broker writes no op message when it puts one back, and its progress may be old when it is killed."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        first, other = half(store, b"1"), half(store, b"2")
        log, config = store.view.files.commit_log, store.writer.files.config
        for _ in range(2):
            found = store.open_halves()[-1] if store.max_offset(HALF, 0) > 2 else first.half
            data = half_records.put_back(log.exact(found.physical_offset, found.size), found, config)
            store._puts.put_encoded(data, HALF, 0, None, [found.transaction_id], wait=True)
        assert [(each.check_times, each.queue_offset) for each in store.open_halves()] == [(0, 1), (2, 3)]
        first.commit()
        other.commit()
        assert bodies(store, OP) == [b"3", b"1"]
    (root / "config" / "consumerOffset.json").unlink(missing_ok=True)
    with MessageStore.open(root, SMALL) as store:
        assert store.open_halves() == []
        assert store.find_half(first.message_id).commit().queue_offset == 0
    assert bodies(root, "orders") == [b"1", b"2"]


def test_half_messages_can_be_refused(tmp_path: Path) -> None:
    """As `rejectTransactionMessage` of a broker; what is open can be ended."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        left = half(store).message_id
    path = tmp_path / "broker.conf"
    path.write_text("brokerId=0\nrejectTransactionMessage=true\ntransactionTimeOut=100\ntransactionCheckMax=5\n")
    config = StoreConfig.load(path)
    assert (config.transaction_time_out, config.transaction_check_max) == (100, 5)
    refusing = SMALL.replace(reject_transaction_message=config.reject_transaction_message)
    with MessageStore.open(root, refusing) as store:
        with pytest.raises(ConfigError, match="rejectTransactionMessage"):
            half(store)
        store.find_half(left).commit()
    assert bodies(root, "orders") == [b"paid"]
    assert len(bodies(root, HALF)) == 1


@pytest.mark.parametrize(
    ("message", "group", "immunity", "field"),
    [
        (Message("orders", b"", sys_flag=0x4), "payments", None, "sys_flag"),
        (Message("orders", b"", prepared_transaction_offset=1), "payments", None, "sys_flag"),
        (Message("orders", b"", queue_id=8), "payments", None, "queue_id"),
        (Message(HALF, b""), "payments", None, "topic"),
        (Message("orders", b"", delay_time_level=3), "payments", None, "delay_time_level"),
        (Message("orders", b""), "CID_RMQ_SYS_TRANS", None, "producer_group"),
        (Message("orders", b""), "", None, "producer_group"),
        (Message("orders", b"", properties={"PGROUP": "x"}), "payments", None, "properties"),
        (Message("orders", b"", queue_id=0), "payments", -1, "check_immunity_s"),
        (Message("orders", b"", queue_id=0), "payments", "5s", "check_immunity_s"),
    ],
)
def test_what_cannot_be_prepared(tmp_path: Path, message: Message, group: str, immunity: object, field: str) -> None:
    """The error names the argument, and nothing is written."""
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        with pytest.raises((MessageIllegalError, ConfigError)) as error:
            store.half_message(message, group, check_immunity_s=immunity)  # type: ignore[arg-type]
        assert field in (getattr(error.value, "field", ""), getattr(error.value, "key", ""))
        assert store.max_offset(HALF, 0) == 0


def test_the_progress_that_brokers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved after a round and after many ends, never beyond an open half message, and corrected if it is ahead."""

    monkeypatch.setattr(half_messages, "SAVE_EVERY", 5)
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        first = [half(store, b"%d" % number) for number in range(5)]
        for each in first:
            each.commit()
        assert saved(root) == (None, None)
        left = half(store, b"open")
        half(store, b"5").commit()
        assert saved(root) == (5, 5)
        for number in range(6):
            half(store, b"%d" % (10 + number)).rollback()
        assert saved(root) == (5, 5)
        left.rollback()
        assert saved(root) == (5, 5)
        store.check_halves(lambda message: UNKNOW)
        assert saved(root) == (13, 13)
    path = root / "config" / "consumerOffset.json"
    path.write_text(path.read_text().replace(":13", ":99"))
    with MessageStore.open(root, SMALL) as store:
        handle = half(store, b"new")
        assert saved(root) == (13, 13)
        assert [each.message_id for each in store.open_halves()] == [handle.message_id]
    path.unlink()
    with MessageStore.open_read_only(root, SMALL) as reader:
        assert [each.message_id for each in reader.open_halves()] == [handle.message_id]


def test_a_half_message_that_does_not_say_where_it_belongs(tmp_path: Path) -> None:
    """It cannot be committed, and can be rolled back."""
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        half(store).rollback()
        record = bytearray(store.view.files.commit_log.exact(0, 10))  # the store is usable
        assert record
        from messagestore.format.half_records import HALF_TOPIC
        from messagestore.format.record import encode_message

        data = encode_message(
            Message(HALF_TOPIC, b"foreign"), queue_id=0, store_host=store.writer.files.store_host, limits=SMALL
        )
        store._puts.put_encoded(data, HALF_TOPIC, 0, None, [], wait=True)
        (found,) = store.open_halves()
        with pytest.raises(CorruptionError, match="REAL_TOPIC"):
            store.find_half(found.message_id).commit()
        store.find_half(found.message_id).rollback()
        assert store.open_halves() == []


def story(root: Path, config: StoreConfig, disk: Disk, told: list[tuple[str, bytes]]) -> None:
    """Half messages that are committed, rolled back, checked and discarded; `told` says what was acknowledged."""

    def check(message: MessageExt) -> LocalTransactionState:
        told.append(("asked", message.body))
        return {b"check and commit": COMMIT, b"check and roll back": ROLLBACK}.get(message.body, UNKNOW)

    def end(body: bytes, how: str) -> None:
        handle = half(store, body, born_timestamp_ms=NOW_MS)
        told.append(("prepared", body))
        getattr(handle, how)()
        told.append((how, body))

    with MessageStore.open(root, config, disk=disk) as store:
        for body in (b"check and commit", b"check and roll back", b"wear out"):
            half(store, body, born_timestamp_ms=NOW_MS - 100_000)
            told.append(("prepared", body))
        end(b"commit", "commit")
        end(b"roll back", "rollback")
        for number in range(3):
            store.check_halves(check)
            told.append(("round", b"%d" % number))


ALL = {b"check and commit", b"check and roll back", b"wear out", b"commit", b"roll back"}


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC], ids=["sync", "async"])
def test_a_kill_anywhere_loses_and_doubles_nothing(tmp_path: Path, config: StoreConfig) -> None:
    """After it, each half message has ended once or is open, and nobody was asked more often than allowed."""
    config = config.replace(transaction_check_max=2)
    at = 0
    while True:
        root = tmp_path / "store"
        shutil.rmtree(root, ignore_errors=True)
        disk = KillDisk(at)
        told: list[tuple[str, bytes]] = []
        try:
            story(root, config, disk, told)
        except (Killed, StorePoisonedError):
            pass
        die(root)
        if root.exists():
            check_story(root, config, told)
        if not disk.dead:
            break
        at += 13
    assert at > 60


def check_story(root: Path, config: StoreConfig, told: list[tuple[str, bytes]]) -> None:
    done = {(how, body) for how, body in told if how != "asked"}
    with MessageStore.open(root, config) as store:
        halves = [store.look_message_by_id(each.message_id) for each in store.open_halves()]
        is_open = [message.body for message in halves if message is not None]
        committed, discarded = bodies(store, "orders"), bodies(store, DISCARDED)
        for body in ALL:
            places = is_open.count(body) + committed.count(body) + discarded.count(body)
            assert places <= 1, (body, is_open, committed, discarded)
            ended = ("rollback", body) in done or body == b"check and roll back"
            assert places == 1 or ended or body == b"roll back" or ("prepared", body) not in done
        assert b"roll back" not in committed
        assert b"check and roll back" not in committed
        assert b"commit" in committed or ("commit", b"commit") not in done
        assert b"roll back" not in is_open or ("rollback", b"roll back") not in done
        for body in ALL:
            assert sum(each == ("asked", body) for each in told) <= config.transaction_check_max
        for _ in range(5):  # whoever comes next finishes everything
            store.check_halves(lambda message: COMMIT if b"commit" in message.body else ROLLBACK)
        late = [each for each in store.open_halves() if each.born_timestamp_ms < NOW_MS]
        assert late == []
        ends = bodies(store, "orders").count(b"check and commit")
        assert ends == 1 if ("prepared", b"check and commit") in done else ends <= 1
    sound(root, config)


def largest_half(store: MessageStore, topic: str, make: Callable[[int], Message], low: int, high: int) -> HalfMessage:
    """The half message of the largest size that is not refused."""
    while high - low > 1:
        middle = (low + high) // 2
        try:
            store.half_message(make(middle), "g").rollback()
            low = middle
        except MessageIllegalError:
            high = middle
    return store.half_message(make(low), "g")


@pytest.mark.parametrize("topic", ["o", "o" * 120])
@pytest.mark.parametrize("long", ["body", "properties"])
def test_the_largest_half_message_that_is_not_refused_can_be_checked_and_committed(
    tmp_path: Path, topic: str, long: str
) -> None:
    """A larger one could be stored, but not be put back for a check, or not be committed to a topic with a long name."""
    config = SMALL.replace(max_message_size=64 * 1024, transaction_time_out=0)
    if long == "properties":
        config = config.replace(mapped_file_size_commit_log=128 * 1024)

    def make(size: int) -> Message:
        if long == "body":
            return Message(topic, b"x" * size, queue_id=0, born_timestamp_ms=0)
        return Message(topic, b"", queue_id=0, born_timestamp_ms=0, properties={"p": "x" * size})

    with MessageStore.open(tmp_path / "s", config) as store:
        half = largest_half(store, topic, make, 1000, 40_000)
        for _ in range(2):
            report = store.check_halves(lambda _: UNKNOW)
            assert (report.checked, report.open, report.failures) == (1, 1, [])
        assert half.commit().status is PutMessageStatus.PUT_OK


def test_a_half_message_that_is_too_large_for_a_check_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may have stored it. One such message used to fail every round of checks."""
    config = SMALL.replace(mapped_file_size_commit_log=128 * 1024, transaction_time_out=0)
    with MessageStore.open(tmp_path / "s", config) as store:
        with monkeypatch.context() as patch:
            patch.setattr(half_records, "longest", lambda half, topic, config: half)
            large = Message("o", b"", queue_id=0, born_timestamp_ms=0, properties={"p": "x" * 32_600})
            stuck = store.half_message(large, "g")
        store.half_message(Message("o", b"small", queue_id=0, born_timestamp_ms=0), "g")
        report = store.check_halves(lambda _: LocalTransactionState.COMMIT_MESSAGE)
        assert (report.checked, report.committed, report.open) == (1, 1, 1)
        assert [message_id for message_id, _ in report.failures] == [stuck.message_id]
        assert isinstance(report.failures[0][1], MessageIllegalError)
        assert [message.body for message in store.get_message("o", 0, 0).messages] == [b"small"]
        stuck.rollback()
        assert store.open_halves() == []
