"""`config/subscriptionGroup.json`: changes that are killed, files that are damaged, sessions that have lost the store.
And `spark/broker.json` and `spark/settings.json`, the broker's name and the store's settings: changes that are killed.

These are named cases of the mode `fuzz`. A case fails with an `AssertionError`.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from crash import checker
from crash.harness import SMALL, die
from crash.images import POWER_MODES, half_write, with_half_write
from crash.imitate import another_boot
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.workloads import Bases
from messagestore import (
    CorruptionError,
    Message,
    MessageStore,
    StoreConfig,
    StoreError,
    alter_stored_config,
    stored_config,
)
from messagestore.files.broker_name import read_broker_name
from messagestore.files.config_file import parsed, written
from messagestore.files.disk import Disk
from messagestore.files.store_settings import read_settings
from messagestore.files.subscription_groups import SubscriptionGroups
from messagestore.session import attached_store

_NAME = "subscriptionGroup.json"
_DAMAGES = 300
_KEPT = {"newField": {"1": [2]}, "attributes": {"+a": "b"}}


def settings(disk: Disk, root: Path) -> dict[str, int]:
    """Group -> its `retryMaxTimes`."""
    groups = SubscriptionGroups(disk, str(root))
    groups.load()
    return {name: config.retry_max_times for name in groups.names if (config := groups.get(name)) is not None}


def killed(folder: Path) -> None:
    """`alter_group` is killed at every operation, or power goes: the table is the one before or the one after."""
    root = folder / "store"
    disk = MemDisk(root, Bases(root)["filled"].content)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        store.create_group("other", retry_max_times=1)
        store.create_group("mine", retry_max_times=2)
    die(root)

    first, last = {"mine": 2, "other": 1}, {"mine": 3, "other": 1}
    recording = MemRecordingDisk(root, disk.content())
    with MessageStore.open(root, SMALL, disk=recording) as store:
        begin = recording.position
        store.alter_group("mine", retry_max_times=3)
        end = recording.position
        die(root)

    found = [0, 0]
    for words, after, power, cut in _deaths(recording, root, begin, end):
        now = settings(after, root)
        assert now in (first, last), f"{words}: {now}"
        assert now == last or cut < end, f"{words}: was altered, and is not"
        found[now == last] += 1

        with another_boot() if power else contextlib.nullcontext():
            try:
                with MessageStore.open(root, SMALL, disk=after) as store:
                    store.alter_group("mine", retry_max_times=4)
            finally:
                die(root)

        assert settings(after, root) == {"mine": 4, "other": 1}, words
        faults = checker.check(after.tree()).faults
        assert not faults, f"{words}: {faults[:3]}"
    assert min(found) > 0, found


def _deaths(recording: MemRecordingDisk, root: Path, begin: int, end: int) -> Iterator[tuple[str, MemDisk, bool, int]]:
    """What a kill or a power cut leaves, between any two of some operations: words, disk, whether power went, where."""
    for cut in range(begin, end + 1):
        content = recording.image(cut, "all").folder
        left = [(f"kill {cut}", content, False)]
        if half_write(recording, cut) is not None:
            left.append((f"kill {cut} half", with_half_write(recording, cut, content, root), False))
        left += [(str(image), image.folder, True) for image in recording.images(cut, POWER_MODES, limit=20)]
        for words, each, power in left:
            yield words, MemDisk(root, each), power, cut


def named(folder: Path) -> None:
    """A writer that renames the broker is killed: the name is the one before or the one after, and stays it."""
    root = folder / "store"
    disk = MemDisk(root, Bases(root)["filled"].content)
    with MessageStore.open(root, SMALL.replace(broker_name="broker-a"), disk=disk):
        pass

    recording = MemRecordingDisk(root, disk.content())
    with MessageStore.open(root, SMALL.replace(broker_name="broker-b"), disk=recording):
        end = recording.position
        die(root)

    found = {"broker-a": 0, "broker-b": 0}
    for words, after, power, cut in _deaths(recording, root, 0, end):
        name = _broker_name(after, root)
        assert name in found, f"{words}: {name!r}"
        assert name == "broker-b" or cut < end, f"{words}: was renamed, and is not"
        found[name] += 1

        with another_boot() if power else contextlib.nullcontext():
            try:
                with MessageStore.open(root, SMALL, disk=after):
                    pass
            finally:
                die(root)

        assert _broker_name(after, root) == name, words
        faults = checker.check(after.tree()).faults
        assert not faults, f"{words}: {faults[:3]}"
    assert min(found.values()) > 0, found


def stored(folder: Path) -> None:
    """`alter_stored_config` is killed at every operation: the settings are those before or those after, both of them.

    What was acknowledged counts for the next writer and the next reader, and a setting that a caller gives wins.
    """
    root = folder / "store"
    disk = MemDisk(root, Bases(root)["filled"].content)
    first = {"fileReservedTime": "168", "maxMessageSize": "2048"}
    alter_stored_config(root, first, disk=disk)
    die(root)

    changes = {"fileReservedTime": "24", "maxMessageSize": None, "deleteWhen": "05"}
    last = {"fileReservedTime": "24", "deleteWhen": "05"}
    recording = MemRecordingDisk(root, disk.content())
    alter_stored_config(root, changes, disk=recording)
    end = recording.position
    die(root)

    counts = [0, 0]
    for words, after, power, cut in _deaths(recording, root, 0, end):
        now = read_settings(after, str(root / "spark" / "settings.json")).to_mapping()
        assert now in (first, last), f"{words}: {now}"
        assert now == last or cut < end, f"{words}: was changed, and is not"
        counts[now == last] += 1

        with another_boot() if power else contextlib.nullcontext():
            try:
                with MessageStore.open(root, _given(SMALL, lock_timeout="9s"), disk=after) as store:
                    config = store.writer.files.config
                    assert config.file_reserved_time == int(now["fileReservedTime"]), words
                    assert config.lock_timeout == "9s", words
                alter_stored_config(root, {"fileReservedTime": 72}, disk=after)
            finally:
                die(root)

        changed = read_settings(after, str(root / "spark" / "settings.json")).to_mapping()
        assert changed == now | {"fileReservedTime": "72"}, words
        faults = checker.check(after.tree()).faults
        assert not faults, f"{words}: {faults[:3]}"
    assert min(counts) > 0, counts


def _given(config: StoreConfig, **changes: object) -> StoreConfig:
    """The settings of a caller who gives only those of a small store that are not stored here."""
    names = config.given - {"file_reserved_time", "max_message_size", "delete_when"}
    return StoreConfig(**{name: getattr(config, name) for name in names}).replace(**changes)


def set_side_by_side(folder: Path) -> None:
    """Two processes set settings while a third stays attached: none is lost, and the third takes them at its next turn.

    The second begins when the first has read the settings, so whoever reads them without the lock loses one.
    """
    root = folder / "store"
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    attached = attached_store(root)
    own = _given(SMALL)
    with attached.writing("a query", config=own) as writer:
        assert writer.files.config.file_reserved_time == -1

    codes = [
        f"from messagestore import alter_stored_config; alter_stored_config({str(root)!r}, {{{name!r}: {value}}})"
        for name, value in (("fileReservedTime", 168), ("maxMessageSize", 4096), ("journalRetention", 77))
    ]
    children = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert stored_config(root).to_mapping() == {
        "fileReservedTime": "168", "maxMessageSize": "4096", "journalRetention": "77",
    }  # fmt: skip
    with attached.writing("the query again", config=own) as writer:
        assert writer.files.config.file_reserved_time == 168
        assert writer.files.config.max_message_size == 4096
    attached.detach()


def _broker_name(disk: Disk, root: Path) -> str:
    return read_broker_name(disk, str(root / "spark" / "broker.json"))


def damaged(folder: Path) -> None:
    """Random bytes: the table is read or named as damaged; nobody writes over a damaged one, even beside a `.bak`."""
    chance, root = random.Random(7), folder / "store"
    with MessageStore.open(root, SMALL) as store:
        store.create_group("boards", retry_max_times=3)

        path = root / "config" / _NAME
        fields = parsed(path.read_text())
        fields["subscriptionGroupTable"]["boards"] |= _KEPT
        whole = written(fields | {"forbiddenTable": {"boards": {"t": 2}}}).encode()
        path.write_bytes(whole)

        store.alter_group("boards", retry_max_times=4)
        after = parsed(path.read_text())
        assert after["forbiddenTable"] == {"boards": {"t": 2}}, "what a group may not read is gone"
        assert after["subscriptionGroupTable"]["boards"].items() >= _KEPT.items(), "settings of RocketMQ's are gone"

        for number in range(_DAMAGES):
            path.with_name(_NAME + ".bak").unlink(missing_ok=True)
            if number % 2:
                path.with_name(_NAME + ".bak").write_bytes(whole)

            data = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            del data[chance.choice([len(data), chance.randrange(len(data))]) :]
            path.write_bytes(data)

            with contextlib.suppress(StoreError):
                store.alter_group("boards", retry_max_times=5)
            if path.read_bytes() != data:
                _check_readable(root, bytes(data))


def _check_readable(root: Path, data: bytes) -> None:
    """Bytes that were written over must have been a table, or no bytes at all."""
    if not data.strip():
        return
    (root / "config" / (_NAME + ".bak")).unlink(missing_ok=True)
    (root / "config" / _NAME).write_bytes(data)
    try:
        settings(Disk(), root)
    except CorruptionError as error:
        raise AssertionError(f"written over although it is damaged: {error}") from error


def lost(folder: Path) -> None:
    """A session that has lost the store writes no file of `config/`: a broker may have them in memory."""
    root = folder / "store"
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("t")
        store.create_group("boards")

        before = {path.name: path.read_bytes() for path in (root / "config").iterdir()}
        (root / "lock").rename(root / "old")

        changes: tuple[Callable[[], Any], ...] = (
            lambda: store.alter_group("boards", retry_max_times=1),
            lambda: store.create_group("others"),
            lambda: store.create_topic("others"),
            lambda: store.alter_topic("t", write_queue_nums=1),
        )

        for change in changes:
            with contextlib.suppress(StoreError):
                change()

        after = {path.name: path.read_bytes() for path in (root / "config").iterdir()}
        (root / "old").rename(root / "lock")
    assert after == before, "a session without the lock changed a file that a broker keeps"


GROUP_SETTINGS: dict[str, Callable[[Path], None]] = {
    "settings of a group, killed": killed,
    "the name of a broker, killed": named,
    "settings of a store, killed": stored,
    "settings of a store, by several processes": set_side_by_side,
    "settings of groups, damaged": damaged,
    "settings changed without the lock": lost,
}
