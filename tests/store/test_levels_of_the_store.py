"""The delay levels belong to the store: who reads a record back takes them from there, whatever its own settings say."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from crash.deliveries import ClockedDisk, ClockedRecordingDisk
from crash.harness import die
from crash.imitate import Broker, another_boot
from messagestore import BatchRequest, ConfigError, Message, MessageStore, StoreConfig, StoreFullError, deliver_delayed
from messagestore.batches.append import Chunks, append_batch
from messagestore.files.disk import Disk, File
from messagestore.format.config import ROCKETMQS_LEVELS, SYNC_FLUSH
from messagestore.format.delay_levels import MOST_ENTRIES, DelayLevels
from messagestore.format.record_columns import encode
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.inspect.verify import verify
from messagestore.log.store_files import Identity, Paths, write_identity
from messagestore.session import AttachedStore, attached_store
from small import SMALL, SMALL_ASYNC, SMALL_POOL, ClockDisk, delayed, read_all

HOUR = SMALL.replace(message_delay_level="1h")
HOUR_MS = 3_600_000
NOW_MS = 1_795_170_401_381


def entries(root: Path, disk: Disk | None = None) -> list[tuple[int, str]]:
    """The delay levels in `store.json`."""
    identity = Identity.read(disk or Disk(), Paths(root).identity)
    assert identity is not None
    return list(identity.delay_levels.entries)


def due_times(root: Path, disk: Disk | None = None) -> dict[bytes, int]:
    """How long after its store time each delayed message is due, by its body."""
    found = {}
    with MessageStore.open_read_only(root, disk=disk) as store:
        for queue_id in store.topics().get(SCHEDULE_TOPIC, ()):
            messages = store.get_message(SCHEDULE_TOPIC, queue_id, 0, max_count=1000).messages
            codes = store.view.units(SCHEDULE_TOPIC, queue_id, 0, len(messages))["tags_code"]
            for message, code in zip(messages, codes.tolist(), strict=True):
                found[message.body] = code - message.store_timestamp_ms
    return found


def rebuild(root: Path, config: StoreConfig | None) -> None:
    """Remove the queues, and let a process with these settings make them again."""
    shutil.rmtree(root / "consumequeue")
    (root / "abort").write_bytes(b"1")
    MessageStore.open(root, config).close()


def put(store: MessageStore, body: bytes, level: int = 1) -> None:
    assert store.put_message(Message("t", body, queue_id=0, delay_time_level=level)).is_ok


@pytest.mark.parametrize("killed", [False, True])
def test_a_one_hour_message_is_not_delivered_by_who_does_not_know_the_levels(tmp_path: Path, killed: bool) -> None:
    """`recover` and `deliver` without the store's settings took the first level for a second."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, HOUR, disk=disk) as store:
        put(store, b"later")
        if killed:
            store.flush()
            die(tmp_path)
            shutil.rmtree(tmp_path / "consumequeue")
    MessageStore.open(tmp_path, disk=disk).close()  # messagestore recover
    disk.now_ms += 42_000
    assert deliver_delayed(tmp_path, disk=disk).count == 0
    disk.now_ms += HOUR_MS - 42_001
    assert deliver_delayed(tmp_path, StoreConfig(), disk=disk).count == 0
    disk.now_ms += 1
    assert deliver_delayed(tmp_path, StoreConfig(), disk=disk).count == 1
    attached_store(tmp_path, disk=disk).detach()
    assert verify(tmp_path).ok


@pytest.mark.parametrize(
    "config", [None, SMALL.replace(message_delay_level="1s"), SMALL.replace(message_delay_level="9m")]
)
def test_a_rebuild_by_a_process_with_other_levels_keeps_the_due_times(
    tmp_path: Path, config: StoreConfig | None
) -> None:
    with MessageStore.open(tmp_path, SMALL.replace(message_delay_level="7s 2m 1d")) as store:
        for level in (1, 2, 3, 9):
            put(store, b"put at %d" % level, level)
        store.append_batch(delayed([1, 2] * 40))
    wanted = due_times(tmp_path)
    assert sorted(set(wanted.values())) == [7_000, 120_000, 86_400_000]
    rebuild(tmp_path, config)
    assert due_times(tmp_path) == wanted
    assert verify(tmp_path, config).ok
    assert entries(tmp_path) == [(0, "7s 2m 1d")]


@pytest.mark.parametrize(
    "of_sizes", [SMALL.replace, lambda **given: StoreConfig(mapped_file_size_commit_log=4096, **given)]
)
def test_a_two_hour_message_is_delivered_after_a_second_though_rocketmqs_levels_were_given(
    tmp_path: Path, of_sizes: Callable[..., StoreConfig]
) -> None:
    """Levels that are the default count as chosen if somebody names them."""
    with MessageStore.open(tmp_path, SMALL.replace(message_delay_level="1s")) as store:
        put(store, b"a second", level=18)
    with MessageStore.open(tmp_path, of_sizes(message_delay_level=ROCKETMQS_LEVELS)) as store:
        put(store, b"two hours", level=18)
    assert due_times(tmp_path) == {b"a second": 1000, b"two hours": 2 * HOUR_MS}


def test_levels_that_change_count_for_what_is_put_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MessageStore.open(tmp_path, HOUR) as store:
        put(store, b"an hour")
    with (
        caplog.at_level(logging.WARNING),
        MessageStore.open(tmp_path, SMALL.replace(message_delay_level="7s")) as store,
    ):
        store.put_message(Message("t", b"now", queue_id=0))
        assert not caplog.records
        end = store.writer.end.physical_offset
        put(store, b"7 s")
        store.append_batch(delayed([1] * 60))
        put(store, b"again")
    assert [
        record.message for record in caplog.records if "delay levels were '1h', and are '7s'" in record.message
    ] == [caplog.records[0].message]
    assert entries(tmp_path) == [(0, "1h"), (end, "7s")]
    with MessageStore.open(tmp_path) as store:  # no levels were chosen: the store's count
        put(store, b"as before")
    wanted = due_times(tmp_path)
    assert (wanted.pop(b"an hour"), len(wanted), set(wanted.values())) == (HOUR_MS, 63, {7_000})
    rebuild(tmp_path, SMALL)
    assert due_times(tmp_path) == {b"an hour": HOUR_MS, **wanted}
    assert verify(tmp_path, HOUR).ok


def test_the_first_levels_are_those_of_the_first_delayed_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that was made by `topic create`, without settings, says nothing when its first messages come."""
    with MessageStore.open(tmp_path, SMALL) as store:
        store.create_topic("t")
    with caplog.at_level(logging.WARNING), MessageStore.open(tmp_path, HOUR) as store:
        put(store, b"an hour")
    assert not caplog.records
    assert entries(tmp_path) == [(0, "1h")]


def test_a_process_that_stays_attached_takes_over_the_levels_of_another_one(tmp_path: Path) -> None:
    """Spark's workers stay attached between commits, and others put meanwhile."""
    first, second = (AttachedStore(str(tmp_path), SMALL, Disk()) for _ in range(2))
    with first.writing("one", config=SMALL) as writer:
        append(writer, b"a second")
    with second.writing("two", config=HOUR) as writer:
        append(writer, b"an hour")
    with first.writing("one again", config=SMALL) as writer:
        assert writer.files.config.delays_ms == (HOUR_MS,)
        append(writer, b"as long")
    with second.writing("two again", config=SMALL.replace(message_delay_level="7s")) as writer:
        append(writer, b"7 s")
    with first.writing("one again", config=HOUR) as writer:
        append(writer, b"an hour again")
    first.detach()
    second.detach()
    wanted = {b"a second": 1000, b"an hour": HOUR_MS, b"as long": HOUR_MS, b"7 s": 7000, b"an hour again": HOUR_MS}
    assert due_times(tmp_path) == wanted
    rebuild(tmp_path, None)
    assert due_times(tmp_path) == wanted


def test_a_process_that_stays_attached_restores_a_lost_file_of_the_store(tmp_path: Path) -> None:
    """It rereads the file when others wrote, and the journal has a copy."""
    first, second = (AttachedStore(str(tmp_path), SMALL, Disk()) for _ in range(2))
    for store, body in ((first, b"1"), (second, b"2")):
        with store.writing("a turn", config=HOUR) as writer:
            append(writer, body)
            writer.clean_end.move()
    (tmp_path / "spark" / "store.json").unlink()
    with first.writing("a turn", config=SMALL) as writer:
        append(writer, b"3")
    first.detach()
    second.detach()
    assert due_times(tmp_path) == dict.fromkeys((b"1", b"2", b"3"), HOUR_MS)
    assert entries(tmp_path) == [(0, "1h")]


def append(writer, body: bytes, *, limits: StoreConfig | None = None) -> None:  # type: ignore[no-untyped-def]
    """Commit one delayed row, which was encoded with some settings."""
    host = writer.files.store_host
    chunk = encode(delayed([1], body=[body]), limits=limits or writer.files.config, store_host=host, born_host=host)
    append_batch(writer, Chunks([chunk]), BatchRequest(app_id="a-" + body.hex()))


def test_rows_that_were_staged_before_the_levels_changed_have_those_of_their_commit(tmp_path: Path) -> None:
    store = attached_store(tmp_path, SMALL)
    with store.writing("one", config=HOUR) as writer:
        append(writer, b"x", limits=SMALL)
    store.detach()
    assert due_times(tmp_path) == {b"x": HOUR_MS}
    rebuild(tmp_path, SMALL)
    assert due_times(tmp_path) == {b"x": HOUR_MS}


def test_a_reader_that_is_open_knows_levels_that_change(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        put(store, b"a second")
    with MessageStore.open_read_only(tmp_path) as reader:
        assert reader.topics()[SCHEDULE_TOPIC] == [0]
        with MessageStore.open(tmp_path, HOUR) as store:
            put(store, b"an hour")
        reader.view.refresh()
        assert reader.view.files.commit_log.delay_levels.last == "1h"


def test_levels_are_restored_with_the_stores_file(tmp_path: Path) -> None:
    """The journal has a copy, which is written soon after the levels have changed."""
    with MessageStore.open(tmp_path, HOUR) as store:
        put(store, b"an hour")
    with MessageStore.open(tmp_path, SMALL.replace(message_delay_level="7s")) as store:
        put(store, b"7 s")
        store.flush()
        store.writer.publish()
        die(tmp_path)
    known = entries(tmp_path)
    assert len(known) == 2
    (tmp_path / "spark" / "store.json").unlink()
    rebuild(tmp_path, None)
    assert entries(tmp_path) == known
    assert due_times(tmp_path) == {b"an hour": HOUR_MS, b"7 s": 7000}


@pytest.mark.parametrize("levels", [None, [], [[0, "1x"]], [[5, "1s"], [0, "1h"]], [[-1, "1s"]], [[0]], "1s"])
def test_levels_that_cannot_be_are_damage(tmp_path: Path, levels: object) -> None:
    MessageStore.open(tmp_path, SMALL).close()
    identity = Identity.read(Disk(), Paths(tmp_path).identity)
    assert identity is not None
    with pytest.raises((ValueError, KeyError, TypeError)):
        Identity.from_fields({**identity.to_fields(), "delayLevels": levels})


@pytest.mark.parametrize("how", ["put", "batch"])
def test_two_sessions_with_other_levels_make_store_json_grow_without_end(tmp_path: Path, how: str) -> None:
    """The file, which is written whole at each change, had a line for each turn. Nobody needs a thousand."""
    with MessageStore.open(tmp_path, SMALL) as store:
        for _ in range(10):
            store.put_message(Message("t", b"x" * 400, queue_id=0))
    paths = Paths(tmp_path)
    identity = Identity.read(Disk(), paths.identity)
    assert identity is not None
    turns = tuple((begin, f"{1 + begin % 2}h") for begin in range(MOST_ENTRIES - 1))
    write_identity(Disk(), paths, replace(identity, delay_levels=DelayLevels(turns)))

    def put_as(store: MessageStore) -> None:
        if how == "put":
            put(store, b"delayed")
        else:
            store.append_batch(delayed([1] * 3))

    with MessageStore.open(tmp_path, SMALL.replace(message_delay_level="7s")) as store:
        put_as(store)
    full = entries(tmp_path)
    assert len(full) == MOST_ENTRIES
    with MessageStore.open(tmp_path, SMALL.replace(message_delay_level="8s")) as store:
        end = store.writer.end.physical_offset
        with pytest.raises(ConfigError, match=r"found '8s', and the store has '7s'.* have changed 1000 times"):
            put_as(store)
        assert store.writer.end.physical_offset == end
        assert store.put_message(Message("t", b"now", queue_id=0)).is_ok
    with MessageStore.open(tmp_path, SMALL.replace(message_delay_level="7s")) as store:
        put_as(store)
    with MessageStore.open(tmp_path) as store:
        put_as(store)
    assert entries(tmp_path) == full
    assert set(due_times(tmp_path).values()) == {7000}
    with MessageStore.open(tmp_path, SMALL.replace(message_delay_level="8s")) as store:
        while store.writer.end.physical_offset < 2 * store.writer.log.segment_size:
            store.put_message(Message("t", b"x" * 1000, queue_id=0))
        store.flush()
        assert store.delete_expired_files(at_once=True).min_offset > full[-1][0]  # nothing is left for most of them
        put_as(store)
    assert [levels for _, levels in entries(tmp_path)] == ["7s", "8s"]
    assert verify(tmp_path).ok


# ---- crashes


STORY = (b"1 s", b"now", b"an hour", b"an hour more")


def story(root: Path, config: StoreConfig) -> ClockedRecordingDisk:
    """A session changes the levels, and is recorded."""
    disk = ClockedDisk(root)
    with MessageStore.open(root, SMALL.replace(message_delay_level="1s 5s"), disk=disk) as store:
        put(store, STORY[0])
    recording = ClockedRecordingDisk(root, disk.content())
    with MessageStore.open(root, config.replace(message_delay_level="1h"), disk=recording) as store:
        store.put_message(Message("t", STORY[1], queue_id=0))
        put(store, STORY[2])
        put(store, STORY[3], 2)
        store.flush()
        die(root)
    return recording


@pytest.mark.parametrize("mode", ["all", "strict", "random"])
@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC, SMALL_POOL], ids=["sync", "async", "pool"])
def test_a_change_of_levels_that_dies_leaves_no_message_with_other_levels(
    tmp_path: Path, config: StoreConfig, mode: str
) -> None:
    """At each operation: before the new levels are in the store, between them and the first message, and behind it."""
    root = tmp_path / "store"
    recording = story(root, config)
    states = set()
    for cut in range(recording.position + 1):
        if mode == "all":
            folders = [recording.image(cut, "all").folder]
        else:
            folders = [each.folder for each in recording.images(cut, (mode,), limit=1, random_count=1, seed=cut)]
        for folder in folders:
            with another_boot() if mode != "all" else contextlib.nullcontext():
                states.add(check(root, folder, cut))
    assert {(1, False), (2, True)} <= states
    if mode == "all":
        assert {state for state in states if state[0] == 1} == {(1, False)}, "levels stay for which there is no record"


def check(root: Path, folder: object, cut: int) -> tuple[int, bool]:
    """Go on with a store that a change of levels has left, with third levels; returns how many levels it has had."""
    disk = ClockedDisk(root, folder)  # type: ignore[arg-type]
    with MessageStore.open(root, SMALL, disk=disk) as store:
        left, end = entries(root, disk), store.writer.end.physical_offset
        assert all(begin < end or not begin for begin, _ in left), f"{cut}: {left}, and the log ends at {end}"
        waiting = bool(due_times_of(store).keys() & set(STORY[2:]))
        store.put_message(Message("t", b"." * 300, queue_id=0))
        delay_ms = store.writer.files.config.delays_ms[0]
        put(store, b"as the store")
    with MessageStore.open(root, SMALL.replace(message_delay_level="7s"), disk=disk) as store:
        put(store, b"7 s")
    with MessageStore.open(root, disk=disk) as store:
        wanted = due_times_of(store)
    expected = {STORY[0]: 1000, STORY[2]: HOUR_MS, STORY[3]: HOUR_MS, b"as the store": delay_ms, b"7 s": 7000}
    assert wanted == {body: due for body, due in expected.items() if body in wanted}, f"{cut}: {left}"
    assert {STORY[0], b"as the store", b"7 s"} <= wanted.keys()
    assert verify(root, disk=disk).ok, f"{cut}: {verify(root, disk=disk).findings}"
    disk.remove_tree("consumequeue")
    with MessageStore.open(root, SMALL.replace(message_delay_level="9m"), disk=disk) as store:
        assert due_times_of(store) == wanted, f"{cut}: {left}"
    return len(left), waiting


def due_times_of(store: MessageStore) -> dict[bytes, int]:
    found = {}
    for queue_id in store.topics().get(SCHEDULE_TOPIC, ()):
        messages = store.get_message(SCHEDULE_TOPIC, queue_id, 0, max_count=1000).messages
        codes = store.view.units(SCHEDULE_TOPIC, queue_id, 0, len(messages))["tags_code"]
        for message, code in zip(messages, codes.tolist(), strict=True):
            found[message.body] = code - message.store_timestamp_ms
    return found


class NoRoom(Disk):
    """A disk without room for another `store.json`."""

    full = True

    def open_new(self, path: str | Path, size: int) -> File:
        if self.full and str(path).endswith("new-store.json"):
            raise StoreFullError(f"{path}: no room", path=str(path), needed=1, free=0)
        return super().open_new(path, size)


def test_a_disk_without_room_for_the_levels_takes_no_delayed_message(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        put(store, b"a second")
    disk = NoRoom()
    with MessageStore.open(tmp_path, HOUR, disk=disk) as store:
        end = store.writer.end
        with pytest.raises(StoreFullError):
            put(store, b"an hour")
        with pytest.raises(StoreFullError):
            store.append_batch(delayed([1, 1]))
        assert store.writer.end == end
        store.put_message(Message("t", b"now", queue_id=0))
        disk.full = False
        put(store, b"an hour")
        assert read_all(store) == [b"now"]
    assert due_times(tmp_path) == {b"a second": 1000, b"an hour": HOUR_MS}
    assert verify(tmp_path).ok


# ---- beside a broker


def broker_puts(root: Path, body: bytes) -> None:
    properties = [("DELAY", "1"), ("REAL_TOPIC", "t"), ("REAL_QID", "0")]
    Broker(root, SMALL).put(SCHEDULE_TOPIC, body, 0, properties=properties)


def test_a_brokers_store_has_the_levels_that_are_given(tmp_path: Path) -> None:
    """Nothing in it says which ones it has; from its first writer on, the store says it."""
    root = tmp_path / "store"
    root.mkdir()
    broker_puts(root, b"an hour")
    shutil.rmtree(root / "consumequeue")
    MessageStore.open(root, HOUR).close()
    assert due_times(root) == {b"an hour": HOUR_MS}
    rebuild(root, SMALL)
    assert due_times(root) == {b"an hour": HOUR_MS}


def test_a_broker_that_wrote_last_has_the_levels_of_its_file(tmp_path: Path) -> None:
    """Its file is given to the next session, which says that its levels are others than the store's."""
    root, file = tmp_path / "store", tmp_path / "broker.conf"
    root.mkdir()
    with MessageStore.open(root, SMALL.replace(message_delay_level="7s")) as store:
        put(store, b"7 s")
        end = store.writer.end.physical_offset
    broker_puts(root, b"an hour")
    (root / "abort").write_bytes(b"1")
    shutil.rmtree(root / "consumequeue")
    file.write_text("brokerClusterName=c\nbrokerRole=ASYNC_MASTER\nmessageDelayLevel=1h\n")
    config = StoreConfig.load(file)
    with MessageStore.open(root, config) as store:
        assert store.report is not None
        (note,) = [note for note in store.report.notes if "delay levels" in note]
        assert "given, '1h'" in note
        assert "'7s'" in note
    assert entries(root) == [(0, "7s"), (end, "1h")]
    assert due_times(root) == {b"7 s": 7000, b"an hour": HOUR_MS}
    assert verify(root).ok


def test_a_brokers_file_that_says_otherwise_is_said(tmp_path: Path) -> None:
    """By `recover` and `verify`: a broker that makes the queues again takes its own levels for all messages."""
    root, file = tmp_path / "store", tmp_path / "broker.conf"
    with MessageStore.open(root, HOUR) as store:
        put(store, b"an hour")
        assert store.report is not None
        assert store.report.notes == []
    file.write_text("brokerRole=ASYNC_MASTER\n")  # and RocketMQ's own levels
    with MessageStore.open(root, StoreConfig.load(file)) as store:
        assert store.report is not None
        (note,) = store.report.notes
        assert "the store's delay levels are '1h'" in note
    report = verify(root, StoreConfig.load(file))
    assert report.ok
    assert [note] == report.notes
    assert verify(root, HOUR).notes == verify(root).notes == []


# ---- levels above the last one


def test_a_batch_with_a_level_above_the_last_one_is_known_with_more_levels(tmp_path: Path) -> None:
    """Its digest is of the level that the row asked for: that does not change when the store's levels do."""
    request = BatchRequest(app_id="a", version=0, flush_disk_type=SYNC_FLUSH)
    with MessageStore.open(tmp_path, SMALL.replace(message_delay_level="1s 5s")) as store:
        assert store.append_batch(delayed([3, 40, 1]), request).status == "appended"
        assert store.max_offset(SCHEDULE_TOPIC, 1) == 2
    with MessageStore.open(tmp_path, SMALL.replace(message_delay_level="1s 5s 1h")) as store:
        assert store.append_batch(delayed([3, 40, 1]), request).status == "known"


def test_the_levels_are_in_the_stores_file(tmp_path: Path) -> None:
    MessageStore.open(tmp_path, HOUR).close()
    fields = json.loads((tmp_path / "spark" / "store.json").read_text())
    assert fields["delayLevels"] == [[0, "1h"]]
