"""The mode `deletions` of `make crash`: a process that deletes a topic dies at any operation.

    a topic with messages, read by a group, closed | open, delete it, make it again, put, close
                                                   ^ a kill, half of a write, or a power cut at every operation

What is left is judged as the next process would find it. The topic has all of its messages, or none of them; behind the
deletion, it has what was put to the new one and nothing else. The other topic, and what the group has read of it, are as
they were. Whatever the group had read of the deleted one, it skips nothing of the new one. The deletion can be done
again, and then `verify` finds nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crash.counts import Counts, again
from crash.faults import quiet_threads
from crash.harness import SMALL, die, scratch_folder
from crash.imitate import another_boot
from crash.judge import Verdict
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.points import Point, chosen, points
from crash.power_cut import Folder
from messagestore import ASYNC_FLUSH, Message, MessageStore, StoreConfig
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.inspect.verify import verify

EVERY = (3, 17)
"""How many quick runs take all kills between them, and all power cuts."""
GROUP, TOPIC, KEPT = "g", "t", "kept"
FIRST, NEW, OTHERS = 12, 5, 4
"""How many messages the topic has in two queues, how many are put to the new one, and how many another topic has."""
CONFIGS = {
    "sync": SMALL,
    "async": SMALL.replace(flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=20),
    "small segments": SMALL.replace(
        mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=20 * 4, max_message_size=2048
    ),
    "the only topic": SMALL,
}


def body(life: str, number: int) -> bytes:
    return b"%s/%03d" % (life.encode(), number)


def put(store: MessageStore, life: str, number: int, topic: str = TOPIC) -> None:
    store.put_message(Message(topic, body(life, number), queue_id=number % 2, keys=[f"{life}{number}"]))


def bodies(store: MessageStore, topic: str) -> list[bytes]:
    return [
        message.body
        for queue_id in store.topics().get(topic, ())
        for message in store.get_message(topic, queue_id, 0, 100).messages
    ]


@dataclass
class Story:
    """A process that was recorded.

    Parameters
    ----------
    name : str
    config : StoreConfig
    disk : MemRecordingDisk
    deleted : int
        How many operations had been done when the deletion returned.
    promised : list of (int, int)
        How many messages were on the disk in the new topic when so many operations had been done.
    """

    name: str
    config: StoreConfig
    disk: MemRecordingDisk
    deleted: int
    promised: list[tuple[int, int]]

    @classmethod
    def of(cls, name: str, root: Path) -> Story:
        config, disk = CONFIGS[name], MemDisk(root)
        with MessageStore.open(root, config, disk=disk) as store:
            for number in range(FIRST):
                put(store, "first", number)
            for number in range(OTHERS if name != "the only topic" else 0):
                put(store, "kept", number, KEPT)
            store.flush()
            places = {(TOPIC, 0): 5, (TOPIC, 1): 3, **({(KEPT, 0): 1} if KEPT in store.topics() else {})}
            publish_offsets(str(root), GROUP, places, disk)
        die(root)

        recording, promised = MemRecordingDisk(root, disk.content()), [(0, 0)]
        with MessageStore.open(root, config, disk=recording) as store:
            store.delete_topic(TOPIC)
            deleted = recording.position
            for number in range(NEW):
                put(store, "new", number)
                store.flush()
                promised.append((recording.position, number + 1))
        die(root)
        return cls(name, config, recording, deleted, promised)


def judge(point: Point[Story], content: Folder, root: Path) -> Verdict:
    """Let the next process look, delete again, and put."""
    verdict, story, disk = Verdict(), point.story, MemDisk(root, content)
    least = max(count for position, count in story.promised if position <= point.cut)
    with another_boot(101) if not point.is_kill else contextlib.nullcontext():
        with MessageStore.open(root, story.config, disk=disk) as store:
            found = bodies(store, TOPIC)
            first = {body("first", number) for number in range(FIRST)}
            if point.cut >= story.deleted and _offsets(root, disk, TOPIC):
                verdict.misread.append(f"the group has read {_offsets(root, disk, TOPIC)} of a topic that was deleted")
            if point.cut == story.deleted and f'"{TOPIC}":' in disk.read(f"{root}/config/topics.json").decode():
                verdict.misread.append("the deleted topic has settings")
            if point.cut >= story.deleted or set(found) != first or len(found) != FIRST:
                verdict.misread += [f"{each!r} is back" for each in found if each in first]
                verdict.lost += [
                    str(body("new", number)) for number in range(least) if body("new", number) not in found
                ]
                verdict.duplicated += [repr(each) for each in set(found) if found.count(each) > 1]
            _look_beside(store, disk, story, verdict)
        if TOPIC in _topics(root, story.config, disk):
            with MessageStore.open(root, story.config, disk=disk) as store:
                store.delete_topic(TOPIC)
        with MessageStore.open(root, story.config, disk=disk) as store:
            for number in range(2):
                put(store, "again", number)
            found = bodies(store, TOPIC)
            if found != [body("again", 0), body("again", 1)]:
                verdict.misread.append(f"deleted again, and made again: {found}")
            beyond = {queue_id: place for queue_id, place in _offsets(root, disk, TOPIC).items() if place}
            if beyond:
                verdict.misread.append(f"the group would skip new messages: {beyond}")
        with MessageStore.open(root, story.config, disk=disk) as store:
            rebuilt = store.check_queues() or (store.report.rebuilt if store.report is not None else None)
            if rebuilt or bodies(store, TOPIC) != [body("again", 0), body("again", 1)]:
                verdict.misread.append(f"opened once more: {bodies(store, TOPIC)}, {rebuilt}")
            _look_beside(store, disk, story, verdict)
        verdict.misread += [f"left in spark/: {name}" for name in disk.names(f"{root}/spark") if "deleted" in name]
        verdict.misread += [str(finding) for finding in verify(root, story.config, disk=disk).findings[:3]]
    return verdict


def judged(point: Point[Story], content: Folder, root: Path) -> Verdict:
    """As `judge`; a store that does not open is wrong, too."""
    try:
        return judge(point, content, root)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return Verdict(misread=[f"{type(error).__name__}: {error}"])
    finally:
        die(root)


def _look_beside(store: MessageStore, disk: MemDisk, story: Story, verdict: Verdict) -> None:
    if story.name == "the only topic":
        return
    wanted = sorted(body("kept", number) for number in range(OTHERS))
    if sorted(bodies(store, KEPT)) != wanted:
        verdict.lost.append(f"{KEPT}: {bodies(store, KEPT)}")
    if _offsets(Path(disk.root), disk, KEPT) != {0: 1}:
        verdict.lost.append(f"what the group has read of {KEPT}: {_offsets(Path(disk.root), disk, KEPT)}")


def _topics(root: Path, config: StoreConfig, disk: MemDisk) -> dict[str, list[int]]:
    with MessageStore.open_read_only(root, config, disk=disk) as reader:
        return reader.topics()


def _offsets(root: Path, disk: MemDisk, topic: str) -> dict[int, int]:
    table = ConsumerOffsets(disk, str(root))
    table.load()
    return table.get(topic, GROUP)


def cases(
    root: Path, seed: int, part: tuple[int, int], key: str = "", *, quick: bool = False
) -> Iterator[tuple[str, Verdict, str]]:
    """Yield (key, verdict, label) of this part of all cases, or of the one with this key.

    Endless, by other seeds, unless it is a quick run.
    """
    with quiet_threads():
        stories = [Story.of(name, root) for name in CONFIGS]
        turn = int(key.rpartition("/")[2]) if key else seed
        while True:
            for point in points(stories, turn) if key else chosen(stories, turn, part, every=EVERY if quick else None):
                if key and point.key != key:
                    continue
                image = point.left()
                if image is not None:
                    yield point.key, judged(point, image.folder, root), point.said(image)
            if key or quick:
                return
            turn += 1


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Judge some deaths; in deep mode, as many as fit into the given seconds."""
    counts, begin_s = Counts(), time.monotonic()
    with scratch_folder() as folder:
        for key, verdict, label in cases(folder / "store", seed, part, case, quick=quick):
            counts.take("killed deletions", verdict, f"{key}: {label}", again("deletions", seed, key))
            if not quick and time.monotonic() > begin_s + seconds:
                break
    return counts
