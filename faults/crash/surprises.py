"""The kind `surprises` of the mode `concurrency`: stores that change under the streams that read them.

A history is a random sequence of events. Between any two of them, a stream asks for the next micro-batch, plans it and
reads it. The events are batches and puts, retention, a backup that is restored (as another folder, or file by file), a
folder that is renamed and comes back, another store at the path, a topic that a broker deletes and creates again, a
writer that is killed, and a reboot. Two streams watch, one with failOnDataLoss=true and one with false.

Nothing may arrive twice. Whatever is in the store at the end has arrived, unless the stream has raised an error of the
store's, or skipped it while it was deleted (failOnDataLoss=false); and a stream with failOnDataLoss=true must have raised one if a message was deleted before it was read, or if
messages that it had read are missing from the log. Code that shares nothing with the store determines what is in the
log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from crash.harness import ROOMY, die
from crash.imitate import Broker, another_boot, overwrite, segments, walk
from crash.judge import Verdict
from messagestore import ASYNC_FLUSH, SYNC_FLUSH, BatchRequest, Message, MessageColumns, MessageStore, StoreError
from messagestore.read import queue_ends
from messagestore.read.view import StoreView
from messagestore.spi import STORES
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source.readers import StreamReader
from pyspark_messagestore.source.schema import Projection
from small import ClockDisk

CONFIG = ROOMY.replace(mapped_file_size_commit_log=16 * 1024, mapped_file_size_consume_queue=20 * 50)
_COLUMNS = Projection.of(StructType().add("body", "binary"))
_QUEUES = 3
_STEPS = 14


@dataclass
class Stream:
    """A query as Spark runs it: it continues where its last finished micro-batch ended."""

    root: Path
    lenient: bool
    start: dict[str, object] = field(default_factory=dict)
    planned: dict[str, object] | None = None
    delivered: list[bytes] = field(default_factory=list)
    stopped: str = ""

    def __post_init__(self) -> None:
        self.reader = self._new()
        self.start = _again(self.reader.initialOffset())

    def _new(self) -> StreamReader:
        options = {"path": str(self.root), "subscribe": "t,u", "startingOffsets": "earliest"}
        return StreamReader(
            source_options({**options, "failOnDataLoss": str(not self.lenient).lower()}), _COLUMNS, STORES
        )

    def restart(self) -> None:
        self.reader.stop()
        self.reader = self._new()

    def step(self, surprise: Callable[[], None], chance: random.Random) -> bool:
        """Run one micro-batch with surprises between its parts; return whether it brought something."""
        if self.planned is None:
            limit = ReadAllAvailable() if chance.random() < 0.7 else ReadMaxRows(chance.randint(1, 30))
            end = _again(self.reader.latestOffset(self.start, limit))
            if end == self.start:
                return False
            self.planned = end
            surprise()
        partitions = self.reader.partitions(self.start, self.planned)
        surprise()
        rows = [body for part in partitions for batch in self.reader.read(part) for body in batch["body"].to_pylist()]
        self.delivered += rows
        self.start, self.planned = self.planned, None
        return True


def _again(offset: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = json.loads(json.dumps(offset))
    return found


class World:
    """A store and what happens to it."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.root, self.chance = folder / "store", chance
        self.backup: Path | None = None
        self.numbers = iter(range(1 << 30))
        self.ever: set[bytes] = set()
        self.dropped: set[bytes] = set()  # still in the log, but their queue was created again
        self.dropped_in_backup: set[bytes] = set()
        self.boot = 101
        with MessageStore.open(self.root, CONFIG) as store:
            for topic in ("t", "u"):
                store.create_topic(topic, _QUEUES)
        self.append()

    def bodies(self, count: int) -> list[bytes]:
        found = [b"m/%d/" % next(self.numbers) + b"." * self.chance.randrange(10, 400) for _ in range(count)]
        self.ever |= set(found)
        return found

    def alive(self) -> set[bytes]:
        """Return the contents of the queues of the log at the path."""
        first = segments(self.root)
        records, _ = walk(self.root, int(first[0].name)) if first else ([], 0)
        return {record["body"] for record in records if record["topic"] in ("t", "u")} - self.dropped

    # ---- events

    def append(self, *, kill: bool = False) -> None:
        with contextlib.ExitStack() as stack:
            store = MessageStore.open(self.root, CONFIG)
            if not kill:
                stack.enter_context(store)
            for _ in range(self.chance.randint(1, 3)):
                topic, bodies = self.chance.choice(["t", "t", "u"]), self.bodies(self.chance.randint(1, 25))
                queue_ids = [self.chance.randrange(_QUEUES) for _ in bodies]
                batch = pa.record_batch({"body": bodies, "queue_id": pa.array(queue_ids, pa.int32())})
                request = BatchRequest("surprises", next(self.numbers), version_source="user")
                store.append_batch(MessageColumns.from_arrow(batch, topic=topic), request)
            if self.chance.random() < 0.4:
                for body in self.bodies(3):
                    store.put_message(Message("t", body, queue_id=self.chance.randrange(_QUEUES)))
        if kill:
            die(self.root)

    def killed(self) -> None:
        self.append(kill=True)

    def reboot(self) -> None:
        """Pretend that the machine was restarted; nothing is lost, but a reader does not know that."""
        from messagestore.files import state

        self.boot += 1
        state._boot_hash = self.boot

    def recover(self) -> None:
        with MessageStore.open(self.root, CONFIG):
            pass

    def retention(self) -> None:
        found = segments(self.root)
        for path in found[: self.chance.randint(0, len(found) - 1)]:
            path.unlink()

    def save(self) -> None:
        self.recover()
        if self.backup is not None:
            shutil.rmtree(self.backup)
        self.backup = self.root.with_name(f"backup-{next(self.numbers)}")
        shutil.copytree(self.root, self.backup)
        self.dropped_in_backup = set(self.dropped)

    def restore(self) -> None:
        """Restore the backup: as another folder, or file by file as rsync does.

        A backup from before a topic was created again is not used: a query that was restarted meanwhile cannot know
        that the queues have their old numbers again, and with failOnDataLoss=false messages may arrive twice
        (ARCHITECTURE.md, "Not promised").
        """
        if self.backup is None or self.dropped != self.dropped_in_backup:
            return
        time.sleep(0.003)  # later records have a later store time
        if self.chance.random() < 0.5:
            shutil.rmtree(self.root)
            shutil.copytree(self.backup, self.root)
        else:
            wanted = {path.relative_to(self.backup) for path in self.backup.rglob("*") if path.is_file()}
            for name in sorted(wanted):
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                part = self.root / "part"
                shutil.copyfile(self.backup / name, part)
                part.rename(self.root / name)
            for path in list(self.root.rglob("*")):
                if path.is_file() and path.relative_to(self.root) not in wanted:
                    path.unlink()
        self.dropped = set(self.dropped_in_backup)
        time.sleep(0.003)

    def remake(self) -> None:
        """Let a broker delete the topic t and create it again; its queues may become as long as before, or longer."""
        broker = self.remade(lambda before: max(0, before + self.chance.choice([-before, -1, 0, 0, 1, 20])))
        for body in self.bodies(self.chance.randint(0, 4)):
            broker.put("u", body, 0)
        broker.close()

    def remade(self, length: Callable[[int], int] = lambda before: before) -> Broker:
        """Return a live broker that has done so, and has also put one message into u."""
        self.recover()
        records, end = walk(self.root, int(segments(self.root)[0].name))
        broker = Broker(self.root, CONFIG, end)
        for folder in (self.root / "consumequeue").glob("*/*"):
            broker.next[folder.parent.name, int(folder.name)] = next_offset(folder)
        self.dropped |= {record["body"] for record in records if record["topic"] == "t"}
        shutil.rmtree(self.root / "consumequeue" / "t", ignore_errors=True)
        time.sleep(0.003)
        broker.now_ms = time.time_ns() // 1_000_000
        for queue_id in range(_QUEUES):
            before = broker.next.pop(("t", queue_id), 0)
            for body in self.bodies(length(before)):
                broker.put("t", body, queue_id)
        broker.put("u", self.bodies(1)[0], 0)
        return broker


def next_offset(folder: Path) -> int:
    """Return the queue offset after the last unit of a queue."""
    files = sorted(folder.iterdir())
    first = int(files[0].name) // 20 if files else 0
    data = b"".join(path.read_bytes() for path in files)
    return first + sum(1 for at in range(0, len(data), 20) if any(data[at + 8 : at + 12]))


def history(folder: Path, chance: random.Random) -> Verdict:
    """Run one history; return what is wrong with it."""
    from messagestore.files import state

    verdict, boot = Verdict(), state._boot_hash
    logging.disable(logging.WARNING)
    few = mock.patch.object(queue_ends, "FEW_QUEUES", chance.choice([0, 16]))
    try:
        with few, another_boot(100):
            _run(World(folder, chance), chance, verdict)
    finally:
        logging.disable(logging.NOTSET)
        state._boot_hash = boot
        die(folder / "store")
    return verdict


def _run(world: World, chance: random.Random, verdict: Verdict) -> None:
    streams = [Stream(world.root, lenient=False), Stream(world.root, lenient=True)]
    events = [world.append] * 5 + [world.killed, world.reboot, world.recover, world.retention, world.save]
    events += [world.restore, world.remake]
    told = {id(stream): set[bytes]() for stream in streams}  # deleted before it was read, or after

    def happen() -> None:
        before, event = world.alive(), chance.choice(events)
        event()
        gone = before - world.alive()
        for stream in streams:
            unread = gone - set(stream.delivered)
            # A query can know neither the old queues when it has read nothing, nor what came after its last record and
            # went with a backup that has this record.
            unseen = (event == world.remake and stream.start["last"] is None) or (
                event == world.restore and unread == gone
            )
            if stream.planned is not None or not unseen:
                told[id(stream)] |= unread

    def surprise() -> None:
        if chance.random() < 0.25:
            happen()

    for _ in range(_STEPS):
        happen()
        if chance.random() < 0.2:
            _elsewhere(world, streams, chance, verdict)
        for stream in streams:
            _step(stream, surprise, chance, verdict)
    world.append()
    world.recover()
    for stream in streams:
        for _ in range(200):
            if not _step(stream, lambda: None, chance, verdict):
                break
        _check(stream, world, told[id(stream)], verdict)
        stream.reader.stop()


def _step(stream: Stream, surprise: Callable[[], None], chance: random.Random, verdict: Verdict) -> bool:
    if stream.stopped:
        return False
    for _ in range(4):
        try:
            return stream.step(surprise, chance)
        except StoreError as error:
            if not stream.lenient:
                stream.stopped = f"{type(error).__name__}: {error}"
                return False
            if "messagestore recover" in str(error):
                with MessageStore.open(stream.root, CONFIG):
                    pass
            stream.restart()  # between planning and reading, Spark starts the query again
        except Exception as error:  # noqa: BLE001 - an error that is not the store's tells nobody what to do
            verdict.misread.append(f"{type(error).__name__}: {error}")
            stream.stopped = "misread"
            return False
    verdict.misread.append("with failOnDataLoss=false a stream cannot go on")
    stream.stopped = "misread"
    return False


def _elsewhere(world: World, streams: list[Stream], chance: random.Random, verdict: Verdict) -> None:
    """Rename the folder, or put another store there, and let the streams read; then restore it."""
    away, other = world.root.with_name("away"), chance.random() < 0.5
    world.root.rename(away)
    if other:
        with MessageStore.open(world.root, CONFIG) as store:
            store.put_message(Message("t", b"of another store", queue_id=0))

    for stream in streams:
        if not stream.stopped:
            try:
                stream.step(lambda: None, chance)
                verdict.misread.append(f"a step went well while {'another store' if other else 'nothing'} was there")
            except StoreError:
                pass
            except Exception as error:  # noqa: BLE001 - an error that is not the store's tells nobody what to do
                verdict.misread.append(f"{type(error).__name__}: {error}")

    if other:
        die(world.root)
        shutil.rmtree(world.root)
    away.rename(world.root)


def _check(stream: Stream, world: World, gone: set[bytes], verdict: Verdict) -> None:
    name = "failOnDataLoss=false" if stream.lenient else "failOnDataLoss=true"
    verdict.duplicated += [f"{name}: {body[:12]!r}" for body, n in Counter(stream.delivered).items() if n > 1]
    delivered = set(stream.delivered)
    verdict.misread += [f"{name}: {body[:20]!r}, that nobody put" for body in delivered - world.ever]
    if stream.stopped:
        return
    # What was deleted before it was read, and skipped with a warning, may come back with a backup.
    expected = world.alive() - gone if stream.lenient else world.alive()
    verdict.lost += sorted(f"{name}: {body[:12]!r} never arrived" for body in expected - delivered)
    if not stream.lenient and gone - delivered:
        verdict.lost.append(f"{name}: {len(gone - delivered)} messages went before they were read, in silence")


def histories(folder: Path, chance: random.Random, count: int) -> Iterator[Verdict]:
    for number in range(count):
        place = folder / f"history-{number}"
        place.mkdir(parents=True)
        yield history(place, chance)
        shutil.rmtree(place)


# ---- stories that random histories seldom produce


def made_again_as_long(folder: Path) -> Verdict:
    """A broker recreates a topic, each queue as long as before, while another topic grows; then all grow."""
    verdict = Verdict()
    logging.disable(logging.WARNING)
    try:
        world, chance = World(folder, random.Random(7)), random.Random(0)
        stream = Stream(world.root, lenient=True)
        world.append()

        for turn in range(3):
            while _step(stream, lambda: None, chance, verdict):
                pass

            broker = world.remade() if turn == 0 else Broker(world.root, CONFIG)
            for queue_id in range(_QUEUES if turn == 1 else 0):
                for body in world.bodies(2):
                    broker.put("t", body, queue_id)
            broker.close()

        _check(stream, world, set(), verdict)
    finally:
        logging.disable(logging.NOTSET)
        die(folder / "store")
    return verdict


def ends_over_a_topic_made_again(folder: Path) -> Verdict:
    """A broker recreates a topic and our writer follows, before anybody reads: the ends are the queues' own."""
    verdict = Verdict()
    with mock.patch.object(queue_ends, "FEW_QUEUES", 0):
        world = World(folder, random.Random(7))

        views = [StoreView(world.root, CONFIG) for _ in range(2)]
        followed, asked = (queue_ends.QueueEnds(view, ("t", "u")) for view in views)
        folder_of_topics = world.root / "consumequeue"
        before = folder_of_topics.stat()
        followed.look()

        world.remade().close()
        world.recover()
        os.utime(folder_of_topics, ns=(before.st_atime_ns, before.st_mtime_ns))  # within one step of its clock
        for view in views:
            view.refresh()

        if followed.look() != asked.look():
            verdict.misread.append(f"the ends are {asked.ends}, and were found to be {followed.ends}")
        for view in views:
            view.close()
    die(folder / "store")
    return verdict


def a_body_torn_by_a_power_cut(folder: Path) -> Verdict:
    """A sector within a body of an ASYNC_FLUSH batch is lost: recovery keeps what a reader then shows."""
    verdict, root = Verdict(), folder / "store"
    bodies = [b"m/%d/" % number + b"." * 3000 for number in range(4)]

    store = MessageStore.open(root, ROOMY)
    for version, flush in enumerate((SYNC_FLUSH, ASYNC_FLUSH)):
        batch = pa.record_batch({"body": bodies[2 * version :][:2], "queue_id": pa.array([0, 0], pa.int32())})
        request = BatchRequest("torn", version, version_source="user", flush_disk_type=flush)
        store.append_batch(MessageColumns.from_arrow(batch, topic="t"), request)
    die(root)

    records, _ = walk(root)
    last = next(record for record in records if record["body"] == bodies[2])
    overwrite(root, (last["physical_offset"] // 512 + 3) * 512, bytes(512))

    logging.disable(logging.WARNING)
    try:
        with another_boot():
            with MessageStore.open_read_only(root, ROOMY) as reader:
                seen = [
                    body for batch in reader.read("t", 0, 0, columns=("body",)) for body in batch["body"].to_pylist()
                ]
            with MessageStore.open(root, ROOMY) as store:
                kept = store.max_offset("t", 0)
    except StoreError as error:
        verdict.misread.append(f"{type(error).__name__}: {error}")
    else:
        if seen != bodies[:2] or kept != len(seen):
            verdict.misread.append(f"a reader saw {len(seen)} messages, and recovery kept {kept}")
    finally:
        logging.disable(logging.NOTSET)
    return verdict


def puts_before_a_kill(folder: Path) -> Verdict:
    """A writer with ASYNC_FLUSH is killed in the middle of a put: a reader sees what was acknowledged, and no more."""
    verdict, root = Verdict(), folder / "store"
    store = MessageStore.open(root, ROOMY.replace(flush_disk_type=ASYNC_FLUSH))
    store.writer.start_flushing = lambda: None  # no thread writes units
    bodies = [b"m/%d/" % number for number in range(50)]
    last = [store.put_message(Message("t", body, queue_id=0, keys=["k"])) for body in bodies][-1]
    die(root)
    overwrite(root, last.physical_offset + last.size - 5, bytes(5))  # of the last put only a beginning was written
    logging.disable(logging.WARNING)
    try:
        with MessageStore.open_read_only(root, ROOMY) as reader:
            seen = [body for batch in reader.read("t", 0, 0, columns=("body",)) for body in batch["body"].to_pylist()]
        with MessageStore.open(root, ROOMY) as store:
            kept = store.max_offset("t", 0)
    except StoreError as error:
        verdict.misread.append(f"{type(error).__name__}: {error}")
    else:
        if seen != bodies[:-1] or kept != len(seen):
            verdict.misread.append(f"a reader saw {len(seen)} messages, and recovery kept {kept}")
    finally:
        logging.disable(logging.NOTSET)
    return verdict


def a_segment_that_was_not_copied(folder: Path) -> Verdict:
    """The last segment is missing: no reader shows the rest as all, whoever left the store."""
    verdict = Verdict()
    for whose in ("closed", "killed", "a broker's"):
        root = folder / whose[0]
        store = MessageStore.open(root, CONFIG)
        for number in range(60):
            store.put_message(Message("t", b"%d" % number + bytes(500), queue_id=0))

        if whose == "killed":
            die(root)
        else:
            store.close()

        if whose == "closed":
            (root / "checkpoint").unlink()
        elif whose == "a broker's":
            shutil.rmtree(root / "spark")

        segments(root)[-1].unlink()
        try:
            with MessageStore.open_read_only(root, CONFIG) as reader:
                verdict.misread.append(f"{whose}: a reader shows {reader.max_offset('t', 0)} of 60 messages")
        except StoreError:
            continue
    return verdict


def a_new_queue_below_retention(folder: Path) -> Verdict:
    """Retention deletes the first messages of a queue that is new to the stream.

    The stream must not begin after them.
    """
    verdict, root = Verdict(), folder / "store"
    with MessageStore.open(root, CONFIG) as store:
        for topic in ("t", "u"):
            store.create_topic(topic, _QUEUES)
            store.put_message(Message(topic, b"first", queue_id=0))

    stream = Stream(root, lenient=False)
    while _step(stream, lambda: None, random.Random(0), verdict):
        pass

    with MessageStore.open(root, CONFIG) as store:
        for number in range(100):
            store.put_message(Message("t", b"m/%d/" % number + b"." * 400, queue_id=2))
    for path in segments(root)[:2]:
        path.unlink()

    while _step(stream, lambda: None, random.Random(0), verdict):
        pass
    if not stream.stopped:
        verdict.lost.append(f"{101 - len(stream.delivered)} messages went before they were read, in silence")
    die(root)
    return verdict


def restored_before_the_tasks(folder: Path) -> Verdict:
    """A backup is restored and grows between planning and reading.

    A task must not mistake its messages for the planned ones.
    """
    verdict = Verdict()
    world = World(folder, random.Random(7))
    stream = Stream(world.root, lenient=False)

    world.save()
    for _ in range(4):
        world.append()

    end = _again(stream.reader.latestOffset(stream.start, ReadAllAvailable()))
    partitions = stream.reader.partitions(stream.start, end)

    world.restore()
    while len(world.alive()) < 300:
        world.append()

    try:
        rows = [body for part in partitions for batch in stream.reader.read(part) for body in batch["body"].to_pylist()]
        verdict.misread.append(f"{len(rows)} messages of another log were read")
    except StoreError:
        pass
    stream.reader.stop()
    die(world.root)
    return verdict


def restored_and_grown_alike(folder: Path) -> Verdict:
    """A backup is restored, and what is put then has the places, sizes and store times of what went with the old store.

    Only the bytes differ, and the query must say so. The clock was set back, as with an image of a machine.
    """
    verdict, root, backup = Verdict(), folder / "store", folder / "backup"

    def puts(word: bytes) -> None:
        with MessageStore.open(root, CONFIG, disk=ClockDisk(1_700_000_000_000)) as store:
            store.create_topic("u", 1)
            for number in range(20):
                store.put_message(Message("t", b"%s/%d" % (word, number), queue_id=0))

    puts(b"kept")
    shutil.copytree(root, backup)
    puts(b"gone")
    stream, chance = Stream(root, lenient=False), random.Random(0)
    while _step(stream, lambda: None, chance, verdict):
        pass
    verdict.lost += [f"{len(stream.delivered)} of 40 messages were read"] * (len(stream.delivered) != 40)

    shutil.rmtree(root)
    shutil.copytree(backup, root)
    puts(b"come")
    while _step(stream, lambda: None, chance, verdict):
        pass
    stream.reader.stop()
    verdict.lost += ["20 messages never arrived, in silence"] * (not stream.stopped)
    die(root)
    return verdict


def copy_in_place(source: Path, target: Path) -> None:
    """Copy as `rsync --inplace --delete` does: existing files get the bytes of the others, and keep their inodes."""
    wanted = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    for name in sorted(wanted):
        with (target / name).open("r+b") as file:
            file.write((source / name).read_bytes())
    for path in list(target.rglob("*")):
        if path.is_file() and path.relative_to(target) not in wanted:
            path.unlink()


def restored_in_place(folder: Path) -> Verdict:
    """A backup is copied over the files of a store that a reader has open, and the store grows past its old end."""
    verdict, root, backup = Verdict(), folder / "store", folder / "backup"

    def puts(numbers: range, tag: bytes) -> list[bytes]:
        bodies = [b"m/%d/%s" % (number, tag) + b"." * 300 for number in numbers]
        with MessageStore.open(root, CONFIG) as store:
            for body in bodies:
                store.put_message(Message("t", body, queue_id=0))
        return bodies

    for grown in (0, 5, 150):
        first = puts(range(40), b"old")
        shutil.copytree(root, backup)
        puts(range(40, 140), b"gone")
        with MessageStore.open_read_only(root, CONFIG) as reader:
            for batch in reader.read("t", 0, 0, columns=("body",)):
                assert batch.num_rows
            copy_in_place(backup, root)
            wanted = first + (puts(range(200, 200 + grown), b"new") if grown else [])
            try:
                found = [b for batch in reader.read("t", 0, 0, columns=("body",)) for b in batch["body"].to_pylist()]
            except StoreError as error:
                verdict.misread.append(f"{grown} more: {type(error).__name__}: {error}")
                found = wanted
        verdict.lost += [f"{grown} more: {body[:12]!r}" for body in wanted if body not in found]
        verdict.misread += [f"{grown} more: {body[:12]!r} is gone, and shown" for body in found if body not in wanted]
        die(root)
        shutil.rmtree(root)
        shutil.rmtree(backup)
    return verdict
