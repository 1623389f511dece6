"""Power cuts, failing disks and full disks: nothing acknowledged is lost, nothing is there in half.

Power cuts: a workload runs once on a disk that records it; the folder is then built as a power cut at any time may have
left it (`crash.power_cut`), and another boot looks at it (`crash.judge`). In ASYNC_FLUSH only the newest batches and puts
may be gone.

Failing disks: operation n fails, and the process lives on: it must not acknowledge what is not safe, not sync again what
failed to sync, and stay of use where the disk was only full (`crash.faults`).

Some cuts and operations of each workload here; `make crash` tries all of them.
"""

from __future__ import annotations

import errno
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from crash import images
from crash.faults import check_fault, fault_points, operations_of
from crash.harness import SMALL, Promise, all_messages, check_store, die, do_step, fresh, no_thread_warnings, spread
from crash.images import Death, Story
from crash.imitate import Process, another_boot, dispatch, overwrite, seal
from crash.judge import Crash, judge
from crash.memdisk import MemRecordingDisk
from crash.simdisk import RecordingDisk
from crash.workloads import ASYNC, BASIC, WORKLOADS, Bases, Workload, batch, check_prefix, record, record_in_memory
from messagestore import ASYNC_FLUSH, SYNC_FLUSH, Message, MessageStore
from messagestore.files.disk import Disk
from small import read_all

pytestmark = no_thread_warnings


@pytest.fixture
def bases(scratch: Path) -> Bases:
    return Bases(scratch / "store")


@pytest.mark.parametrize("name", BASIC)
def test_power_cuts(name: str, bases: Bases) -> None:
    """Power goes while a process is at work; whatever survives, the next boot finds what was promised."""
    story = Story.of(name, bases)
    count = 0
    for cut in spread(story.run.disk.position + 1, 3):
        for image in story.run.disk.images(
            max(cut, story.first_cut), ("strict", "one missing", "random"), limit=1, random_count=1
        ):
            verdict = judge(Death(story, image.cut, image).crash(bases.root), bases.root, thorough=count % 4 == 0)
            assert verdict.ok, f"{image}: {verdict}"
            count += 1
    assert count > 2


@pytest.mark.parametrize("name", ["async batches", "roll-over", "a new store"])
def test_power_cuts_twice(name: str, bases: Bases) -> None:
    """Power goes in a workload, and again in the recovery of what was left: as if it had gone once."""
    story, chance = Story.of(name, bases), random.Random(name)
    for death in chance.sample(list(images.power_cuts(story, limit=1)), 12):
        words, second = images.again(death.crash(bases.root), bases.root, chance)
        verdict = judge(second, bases.root)
        assert verdict.ok, f"{death.label}, {words}: {verdict}"


def test_a_kill_and_then_a_power_cut(bases: Bases) -> None:
    """What a killed process had not synced is in the page cache only: the next one makes durable what it keeps."""
    story, chance = Story.of("roll-over by puts", bases), random.Random(1)
    for death in list(images.kills(story))[::9]:
        words, second = images.again(death.crash(bases.root), bases.root, chance)
        verdict = judge(second, bases.root)
        assert verdict.ok, f"{death.label}, {words}: {verdict}"


# ---- what a lost sector does to one record


def many_puts(shape: str) -> list[Message]:
    """Records of ever other sizes, so that sectors end everywhere in them."""
    if shape == "keys and tags":
        return [
            Message(
                "topicname",
                b"b" * (i % 50),
                0,
                keys=[f"key{i}", "second"],
                tags="tag",
                properties={f"p{i}": "v" * (i + 1)},
            )
            for i in range(60)
        ]
    if shape == "no properties":
        return [Message("topicname" * (1 + i % 9), b"b" * (i % 50), 0) for i in range(90)]
    return [Message("topicname", b"b", 0, properties={"a": "x" * 1500, "b": "y" * (70 * i + 1)}) for i in range(12)]


@pytest.mark.parametrize("shape", ["keys and tags", "no properties", "large properties"])
def test_a_lost_sector_tears_no_message(shape: str, scratch: Path) -> None:
    """ASYNC puts, and one sector of the log is lost, wherever it ends: what is left are whole messages, not a byte of one.
    Only where the sector lay in the middle of long properties does nothing prove that it ever held something else: such a
    message is kept, and shows other properties (with `enabledAppendPropCRC` it is cut)."""
    config = ASYNC.replace(mapped_file_size_commit_log=1 << 18, flush_interval_commit_log=3_600_000)
    root, wanted = scratch / "store", many_puts(shape)
    store = MessageStore.open(root, config)
    ends = [0]
    for message in wanted:
        result = store.put_message(message)
        ends.append(result.physical_offset + result.size)
    store.writer.publish()
    die(root)
    for sector in range(ends[-1] // 512 + 1):
        copy = fresh(root, scratch / "copy")
        overwrite(copy, sector * 512, bytes(min(512, ends[-1] - sector * 512)))
        with another_boot():
            recovered = MessageStore.open(copy, config)
            found = [m for topic in recovered.topics() for m in recovered.get_message(topic, 0, 0, 1000).messages]
            found.sort(key=lambda m: m.physical_offset)
            recovered.close()
        whole = sum(end <= sector * 512 for end in ends[1:])
        unproven = in_properties(sector * 512, ends, wanted)
        assert whole <= len(found) <= (len(wanted) if unproven else whole + 1)  # what was zero before is not lost
        for row, (message, put_message) in enumerate(zip(found, wanted, strict=False)):
            if unproven and row == whole:
                assert (message.topic, message.body) == (put_message.topic, put_message.body)
                continue
            assert (message.topic, message.body, message.keys) == (
                put_message.topic,
                put_message.body,
                tuple(put_message.keys),
            )
            assert (message.tags, message.properties) == (put_message.tags, dict(put_message.properties))


def in_properties(position: int, ends: list[int], messages: list[Message]) -> bool:
    """Whether a sector lies within the properties of one message, and before the last byte of them."""
    for start, end, message in zip(ends, ends[1:], messages, strict=False):
        properties = start + 91 + len(message.body) + len(message.topic)
        if properties <= position and position + 512 < end:
            return True
    return False


def test_a_lost_sector_of_a_batch_record(scratch: Path) -> None:
    """ASYNC batches of ever other sizes, and one sector of the log is lost: whole batches are left, and nobody refuses."""
    config = ASYNC.replace(mapped_file_size_commit_log=1 << 18, flush_interval_commit_log=3_600_000)
    root, promise = scratch / "store", Promise()
    steps = [batch(version, 1 + version % 3, ASYNC_FLUSH, app="a" * (1 + version * 3)) for version in range(14)]
    store = MessageStore.open(root, config)
    for step in steps:
        do_step(store, (*step[:2], 0, *step[3:]), promise, config)
    end = store.writer.end.physical_offset
    die(root)
    for sector in range(end // 512 + 1):
        copy = fresh(root, scratch / "copy")
        overwrite(copy, sector * 512, bytes(min(512, end - sector * 512)))
        with another_boot(), MessageStore.open(copy, config) as recovered:
            bodies = {body for found in all_messages(recovered).values() for body in found}
            check_prefix(bodies, [(*step[:2], 0, *step[3:]) for step in steps], "recovery")


# ---- two processes on one store


def test_power_cuts_with_two_writers(scratch: Path) -> None:
    """Two processes take turns; one moves the clean end past what the other has not synced, then power goes."""
    root = scratch / "store"
    root.mkdir()
    disk = RecordingDisk(root)
    p, q = Process(root, SMALL, disk), Process(root, SMALL, disk)
    rows: dict[tuple[str, int], int] = {}
    done: list[tuple[int, dict[tuple[str, int], int]]] = []
    for version in range(3):
        for one, app, count in ((p, "p", 5), (q, "q", 8)):
            one.batch(app, version, count)
            rows[(app, version)] = count
            done.append((disk.position, dict(rows)))
        with (p if version % 2 else q).store.writing("clean") as writer:
            writer.clean_end.move()
        done.append((disk.position, dict(rows)))
    for position, acknowledged in done:
        for number, image in enumerate(
            disk.images(position, ("strict", "one missing", "random"), limit=2, random_count=2)
        ):
            target = image.build(scratch / f"{position}-{number}")
            with another_boot():
                check_store(target, Promise(batches=set(acknowledged), maybe_batches=set(rows), rows=rows), SMALL)
            shutil.rmtree(target)
    p.die()
    q.die()


# ---- disks that fail


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "EMFILE", "MemoryError"])
@pytest.mark.parametrize("name", ["single puts", "async, then sync", "roll-over"])
def test_faults(name: str, kind: str, bases: Bases) -> None:
    """The disk fails once, or is full once, in an operation; here some kinds of operations are tried."""
    workload = WORKLOADS[name]
    base = bases[workload.base]
    groups = list(fault_points(operations_of(base, workload, bases.root), kind).values())
    for number in spread(len(groups), 4):
        at = groups[number][len(groups[number]) // 2]
        ended, failed, verdict = check_fault(base, workload, bases.root, kind, at, tries=1 + number % 2)
        assert verdict.ok, f"operation {at} failed: {failed}; the process ended: {ended}; {verdict}"


def test_no_memory_for_a_sync_does_not_pass_for_a_sync(bases: Bases) -> None:
    """`abort`, or the ASYNC flag of `state`, was written and not synced for want of memory; the next put took it for
    synced, and a power cut took both.
    """
    for name in ("single puts", "async puts"):
        workload = WORKLOADS[name]
        base = bases[workload.base]
        points = fault_points(operations_of(base, workload, bases.root), "MemoryError")
        for at in [
            at for kind, group in points.items() if kind.startswith(("fsync_dir", "fdatasync")) for at in group[:2]
        ]:
            _, failed, verdict = check_fault(base, workload, bases.root, "MemoryError", at, sticky=True)
            assert verdict.ok, f"{failed}: {verdict}"


# ---- found by `make crash`


def fail_unless_ok(words: str, crash: Crash, root: Path) -> None:
    verdict = judge(crash, root, briefly=True)
    assert verdict.ok, f"{words}: {verdict}"


def test_names_that_a_killed_process_made_are_synced_by_the_next(bases: Bases) -> None:
    """A segment is made, and its maker killed before the folder is synced; the next process writes into it.

    Its recovery may cut all that the segment holds: then only a batch of the next process reaches it again.
    """
    stories = {"a new store": ("put", 900, "single", 0), "roll-over": ("batch", "later", 0, 60, SYNC_FLUSH)}
    for name, step in stories.items():
        tried = 0
        for death in list(images.kills(Story.of(name, bases)))[::2]:
            crash = death.crash(bases.root)
            if crash.left is not None:
                tried += 1
                fail_unless_ok(f"{name}: {death.label}", images.another_process(crash, bases.root, step), bases.root)
        assert tried > 5


def test_the_names_of_all_folders_above_a_store_are_synced(tmp_path: Path) -> None:
    """A process makes some of them and is killed before it syncs their names; the next one makes the rest."""
    disk = RecordingDisk(tmp_path)
    disk.mkdir(tmp_path / "made")
    root = tmp_path / "made" / "by others" / "store"
    with MessageStore.open(root, SMALL, disk=disk) as store:
        store.put_message(Message("t", b"acknowledged", queue_id=0))
        left = disk.image(disk.position, "strict").build(tmp_path.parent / f"{tmp_path.name}-left")
    with another_boot(), MessageStore.open(left / root.relative_to(tmp_path), SMALL) as store:
        assert read_all(store) == [b"acknowledged"]


def test_a_folder_above_that_may_not_be_read_is_synced_with_everything(tmp_path: Path) -> None:
    synced: list[str] = []

    class OfAnotherUser(Disk):
        def fsync_dir(self, path: str | Path) -> None:
            if str(path) == str(tmp_path.parent):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            super().fsync_dir(path)

        def _sync_all(self, folder: str) -> None:
            synced.append(folder)
            super()._sync_all(folder)

    with MessageStore.open(tmp_path / "store", SMALL, disk=OfAnotherUser()):
        assert synced == [str(tmp_path / "store")]


def test_queues_may_outlive_a_log_that_was_never_synced(bases: Bases) -> None:
    """ASYNC_FLUSH in a new store: power took the names of the log, and left those of queues. Nobody could open it."""
    workload = Workload((batch(0, 5, ASYNC_FLUSH), batch(1, 5, ASYNC_FLUSH)), base="empty")
    story = Story("a new ASYNC store", workload, bases["empty"], record_in_memory(bases["empty"], workload, bases.root))
    units = [i for i, o in enumerate(story.run.disk.operations) if o.name == "rename" and dispatch(o)]
    images_of_cut = list(story.run.disk.images(units[-1] + 1, ("one missing", "one file missing"), limit=100))
    assert len(images_of_cut) > 5
    for image in images_of_cut:
        fail_unless_ok(str(image), Death(story, image.cut, image).crash(bases.root), bases.root)


def test_units_behind_the_end_prove_nothing_until_they_are_gone(bases: Bases) -> None:
    """Power took ASYNC batches and left their units; recovery zeroed these, and `state` said that nothing ASYNC was left
    before the zeros were on the disk: after another power cut the units proved lost records synced.
    """
    story = Story.of("async batches", bases)
    disk = story.run.disk
    units = [i for i, operation in enumerate(disk.operations) if operation.name == "pwrite" and dispatch(operation)]
    cut = units[-1] + 1  # nothing is synced yet
    images_of_cut = disk.images(cut, ("one file missing",), limit=100)
    image = next(image for image in images_of_cut if "commitlog" in image.label)
    without_log = Death(story, cut, image).crash(bases.root)
    with another_boot(101):
        second = record(
            MemRecordingDisk(bases.root, without_log.content), without_log.promise, [("open",)], without_log.config
        )
    tried = 0
    for cut in range(second.disk.position):
        for image in second.disk.images(cut, ("one file missing",), limit=100):
            if "topic-app-1" in image.label:
                tried += 1
                crash = replace(without_log, content=image.folder, promise=second.promised(cut))
                fail_unless_ok(str(image), crash, bases.root)
    assert tried > 5


def test_queues_of_records_that_did_not_count_need_no_sync(bases: Bases) -> None:
    """The walk met a queue in a batch that was torn; its folder was never made, and syncing it failed: nobody could open
    the store any more.
    """
    workload = Workload((batch(0, 20, ASYNC_FLUSH, app="other"),))
    story = Story("an ASYNC batch", workload, bases["filled"], record_in_memory(bases["filled"], workload, bases.root))
    cut = next(i for i, operation in enumerate(story.run.disk.operations) if seal(operation)) + 1
    count = 0
    for image in story.run.disk.images(cut, ("one missing",), limit=100):
        fail_unless_ok(str(image), Death(story, image.cut, image).crash(bases.root), bases.root)
        count += "commitlog" in image.label
    assert count > 5
