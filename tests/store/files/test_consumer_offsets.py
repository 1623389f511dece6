"""config/consumerOffset.json: how far groups have read, as a broker keeps it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from messagestore import (
    ConfigError,
    CorruptionError,
    MessageIllegalError,
    MessageStore,
    StoreFullError,
    StoreLockedError,
)
from messagestore.files.config_file import parsed
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.files.disk import Disk
from messagestore.files.writer_lock import WriterLock
from messagestore.format.message import group_fault
from processes import CONTEXT
from small import SMALL, ClockDisk, filled

# As a broker writes it.
JAVA = """{
\t"dataVersion":{
\t\t"counter":41,
\t\t"stateVersion":3,
\t\t"timestamp":1600000000000
\t},
\t"futureField":{0:250
\t},
\t"groupTopicMap":{
\t\t"delays":["flights"]
\t},
\t"offsetTable":{
\t\t"flights@delays":{0:250,1:1099511627776,15:0
\t\t},
\t\t"%RETRY%delays@delays":{0:3
\t\t},
\t\t"no group":{0:1
\t\t}
\t}
}"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "spark").mkdir()
    (tmp_path / "config").mkdir()
    return tmp_path


@pytest.fixture
def offsets(root: Path) -> ConsumerOffsets:
    return ConsumerOffsets(Disk(), str(root))


def file_of(root: Path) -> Path:
    return root / "config" / "consumerOffset.json"


def table(root: Path) -> dict:
    return parsed(file_of(root).read_text(encoding="utf-8"))["offsetTable"]


# ---- reading


def test_a_brokers_file_is_read(root: Path, offsets: ConsumerOffsets) -> None:
    """Groups, their topics, and the next offset of each queue; an entry without a group is nobody's."""
    file_of(root).write_text(JAVA)
    offsets.load()
    assert offsets.groups == ["delays"]
    assert offsets.topics("delays") == ["%RETRY%delays", "flights"]
    assert offsets.get("flights", "delays") == {0: 250, 1: 1 << 40, 15: 0}
    assert offsets.get("flights", "nobody") == {}
    assert offsets.topics("nobody") == []


def test_a_store_without_the_file_has_no_groups(tmp_path: Path) -> None:
    offsets = ConsumerOffsets(Disk(), str(tmp_path / "missing"))
    offsets.load()
    assert offsets.groups == []


@pytest.mark.parametrize(
    "main", [None, b"", b"{", b"[]", b'{"offsetTable":3}', b'{"offsetTable":[]}', b'{"offsetTable":{"a@b":{0:1.5}}}']
)
def test_the_backup_counts_when_the_file_does_not(root: Path, offsets: ConsumerOffsets, main: bytes | None) -> None:
    """A broker rewrites the file in place: who reads it meanwhile finds a part of it, and the `.bak` whole."""
    if main is not None:
        file_of(root).write_bytes(main)
    (root / "config" / "consumerOffset.json.bak").write_text(JAVA)
    offsets.load()
    assert offsets.get("flights", "delays")[0] == 250


@pytest.mark.parametrize(
    "entry", ['"a@b":3', '"a@b":{"x":1}', '"a@b":{0:"7"}', '"a@b":{0:9223372036854775808}', '"a@b":{0:1e999}']
)
def test_an_offset_that_is_none_is_an_unreadable_file(root: Path, offsets: ConsumerOffsets, entry: str) -> None:
    """No half-read table; a broker would refuse it, too."""
    file_of(root).write_text('{"offsetTable":{"c@d":{0:1},' + entry + "}}")
    with pytest.raises(CorruptionError, match="the broker's table of consumer offsets"):
        offsets.load()
    assert offsets.groups == []


@pytest.mark.parametrize("table", ["[]", "0", '""', "false"])
def test_a_table_that_is_none_is_an_unreadable_file(root: Path, offsets: ConsumerOffsets, table: str) -> None:
    """It counted as empty, so that no group had read anything."""
    file_of(root).write_text('{"offsetTable":' + table + "}")
    with pytest.raises(CorruptionError, match="offsetTable is no JSON object"):
        offsets.load()
    file_of(root).write_text('{"offsetTable":null}')
    offsets.load()
    assert offsets.groups == []


# ---- writing


@pytest.mark.parametrize("main", [b"{", b'{"offsetTable":[]}', JAVA.encode()[:-20]])
def test_a_damaged_file_is_not_replaced_by_its_older_backup(root: Path, offsets: ConsumerOffsets, main: bytes) -> None:
    """It may hold what the backup does not. Whoever restores it needs it as it is."""
    file_of(root).write_bytes(main)
    (root / "config" / "consumerOffset.json.bak").write_text(JAVA)
    offsets.load()
    offsets.update("flights", "delays", {1: 7})
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"its \.bak counts, which may be older"):
            offsets.save()
    with pytest.raises(CorruptionError, match=r"consumerOffset\.json"):
        publish_offsets(str(root), "g", {("t", 0): 1})
    assert file_of(root).read_bytes() == main
    file_of(root).unlink()
    offsets.save()
    assert offsets.get("flights", "delays")[1] == 7


def test_the_file_is_a_brokers(root: Path) -> None:
    """Tabs, queue ids without quotes, the groups' topics beside the table: the same text as a broker's."""
    offsets = ConsumerOffsets(ClockDisk(1_700_000_000_123), str(root))
    offsets.update("flights", "delays", {1: 1 << 40, 0: 250})
    offsets.save()
    assert file_of(root).read_text() == (
        '{\n\t"dataVersion":{\n\t\t"counter":1,\n\t\t"stateVersion":0,\n\t\t"timestamp":1700000000123\n\t},\n'
        '\t"groupTopicMap":{\n\t\t"delays":["flights"]\n\t},\n'
        '\t"offsetTable":{\n\t\t"flights@delays":{0:250,1:1099511627776\n\t\t}\n\t}\n}'
    )
    assert not list((root / "spark").iterdir())


def test_what_we_do_not_know_is_kept(root: Path, offsets: ConsumerOffsets) -> None:
    """Other groups, other queues, other fields; the version goes up as a broker's."""
    file_of(root).write_text(JAVA)
    offsets.load()
    offsets.update("flights", "delays", {1: 7, 2: 8})
    offsets.update("trains", "mine", {0: 9})
    offsets.save()
    fields = parsed(file_of(root).read_text())
    assert fields["offsetTable"] == {
        "flights@delays": {"0": 250, "1": 7, "2": 8, "15": 0},
        "%RETRY%delays@delays": {"0": 3},
        "no group": {"0": 1},
        "trains@mine": {"0": 9},
    }
    assert fields["futureField"] == {"0": 250}
    assert fields["groupTopicMap"] == {"delays": ["%RETRY%delays", "flights"], "mine": ["trains"]}
    assert (fields["dataVersion"]["counter"], fields["dataVersion"]["stateVersion"]) == (42, 3)
    assert fields["dataVersion"]["timestamp"] > 1_600_000_000_000


def test_two_who_loaded_both_save(root: Path, offsets: ConsumerOffsets) -> None:
    """Saving reads the file again: the other one's group stays, and one's own other queue."""
    other = ConsumerOffsets(Disk(), str(root))
    offsets.load()
    other.load()
    offsets.update("t", "mine", {0: 1})
    other.update("t", "theirs", {0: 2})
    other.update("t", "mine", {1: 3})
    offsets.save()
    other.save()
    assert table(root) == {"t@mine": {"0": 1, "1": 3}, "t@theirs": {"0": 2}}


def test_nothing_new_nothing_written(root: Path, offsets: ConsumerOffsets) -> None:
    """A query that starts again says what is there already."""
    offsets.save()
    assert not file_of(root).exists()
    for _ in range(2):
        offsets.update("t", "g", {0: 1})
        offsets.save()
    assert parsed(file_of(root).read_text())["dataVersion"]["counter"] == 1


def test_a_group_may_go_back(root: Path, offsets: ConsumerOffsets) -> None:
    """A query from an older checkpoint: its offsets are what it says now, as with a broker."""
    for offset in (9, 4):
        offsets.update("t", "g", {0: offset})
        offsets.save()
    assert table(root) == {"t@g": {"0": 4}}


@pytest.mark.parametrize("group", ["g", "a-b_c%|9", "x" * 255])
def test_groups_that_are_allowed(group: str) -> None:
    assert group_fault(group) is None


@pytest.mark.parametrize(
    ("group", "fault"),
    [
        ("", "empty"),
        ("a b", "allowed are the characters"),
        ("a@b", "allowed are the characters"),
        ("grüße", "allowed are the characters"),
        ("g\n", "allowed are the characters"),
        ("x" * 256, "found 256 bytes; allowed are at most 255"),
        ("CID_RMQ_SYS_TRANS", "belong to the broker"),
        (7, "found int"),
    ],
)
def test_groups_that_are_not(offsets: ConsumerOffsets, root: Path, group: object, fault: str) -> None:
    """RocketMQ's rule, and what a broker keeps for itself; nothing is written."""
    with pytest.raises(ConfigError, match=fault) as caught:
        offsets.update("t", group, {0: 1})  # type: ignore[arg-type]
    assert caught.value.key == "consumerGroup"
    offsets.save()
    assert not file_of(root).exists()


@pytest.mark.parametrize("wrong", [{-1: 0}, {65536: 0}, {0: -1}, {0: 1 << 63}, {0: True}, {0: 1.0}])
def test_offsets_out_of_range(offsets: ConsumerOffsets, wrong: dict) -> None:
    with pytest.raises(ConfigError, match="allowed is 0 to"):
        offsets.update("t", "g", wrong)
    with pytest.raises(MessageIllegalError):
        offsets.update("a/b", "g", {0: 1})


class FullDisk(Disk):
    """No room, as long as it is said."""

    full = True

    def pwrite(self, file, data, position):
        if self.full:
            raise self._translated(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), file.path, len(data))
        super().pwrite(file, data, position)


def test_a_failed_save_can_be_tried_again(root: Path) -> None:
    """A full disk: the file is as before, and what was updated is not forgotten."""
    file_of(root).write_text(JAVA)
    disk = FullDisk()
    offsets = ConsumerOffsets(disk, str(root))
    offsets.load()
    offsets.update("t", "g", {0: 1})
    with pytest.raises(StoreFullError):
        offsets.save()
    assert file_of(root).read_text() == JAVA
    disk.full = False
    offsets.save()
    assert table(root)["t@g"] == {"0": 1}
    assert not list((root / "spark").iterdir())


# ---- publishing


def _publish_some(root: str, group: str, count: int) -> None:
    for offset in range(count):
        publish_offsets(root, group, {("t", 0): offset + 1, ("u", 3): 2 * offset}, timeout_s=30)


def test_many_who_publish_lose_nothing(tmp_path: Path) -> None:
    """Processes by turns: each group is there, with its last offsets; each change has a version of its own."""
    root = str(filled(tmp_path / "store"))
    groups = [f"g{i}" for i in range(3)]
    processes = [CONTEXT.Process(target=_publish_some, args=(root, group, 30)) for group in groups]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    found = parsed(file_of(Path(root)).read_text())
    assert found["offsetTable"] == {f"t@{g}": {"0": 30} for g in groups} | {f"u@{g}": {"3": 58} for g in groups}
    assert found["dataVersion"]["counter"] == 90


def test_a_writer_s_session_is_not_in_the_way(tmp_path: Path) -> None:
    """A producer may hold the store for days; its close finds nobody attached, and leaves the store clean."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL):
        publish_offsets(str(root), "g", {("t", 0): 1})
    assert table(root) == {"t@g": {"0": 1}}
    assert not (root / "abort").exists()


def test_another_who_publishes_is_waited_for_and_named(tmp_path: Path) -> None:
    root = filled(tmp_path / "store")
    lock = WriterLock(str(root / "spark" / "consumer-offsets.lock"))
    lock.acquire(0, description="consumer group other")
    with pytest.raises(StoreLockedError, match="consumer group other"):
        publish_offsets(str(root), "g", {("t", 0): 1}, timeout_s=0.05)
    lock.close()
    publish_offsets(str(root), "g", {("t", 0): 1})
    assert table(root) == {"t@g": {"0": 1}}


BROKER = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX, 1); print(1, flush=True); sys.stdin.read()"


def test_the_file_of_a_live_broker_is_left_alone(tmp_path: Path) -> None:
    """It has the offsets in memory and would overwrite ours; in its store nothing at all is made."""
    root = tmp_path / "store"
    (root / "commitlog").mkdir(parents=True)
    (root / "lock").touch()
    command = [sys.executable, "-c", BROKER, str(root / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline()
        with pytest.raises(
            StoreLockedError,
            match=rf"a RocketMQ broker, pid {broker.pid} \(.*\) on .*, which keeps the consumer offsets in memory .*\. Stop it first",
        ):
            publish_offsets(str(root), "g", {("t", 0): 1})
        assert sorted(path.name for path in root.iterdir()) == ["commitlog", "lock"]
        broker.communicate()
    publish_offsets(str(root), "g", {("t", 0): 1})
    assert table(root) == {"t@g": {"0": 1}}


def test_an_unreadable_file_is_not_overwritten(tmp_path: Path) -> None:
    """Groups of others may be in it."""
    root = filled(tmp_path / "store")
    (root / "config").mkdir(exist_ok=True)
    file_of(root).write_bytes(b'{"offsetTable":{"a@b":{0:1')
    with pytest.raises(CorruptionError):
        publish_offsets(str(root), "g", {("t", 0): 1})
    assert file_of(root).read_bytes() == b'{"offsetTable":{"a@b":{0:1'
