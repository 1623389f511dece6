"""A recipe, carried out: Java makes the store, it ends, files go; then both recover a copy each, and are compared.

    python -m interop.broker_stores 17        # from tests/: the store of seed 17, with what it consists of
    python -m interop.broker_stores --all 17  # with what our recovery is not up to so far

What counts as right, for each queue of the recovered store:

    the log      ends where Java's own recovery ends, and no byte below that end has changed
    a queue      holds what it held before the end (`live`); or what Java's recovery makes of the same folder; or what
                 Java makes of the log alone; or the last life of the topic
    lost         nothing that was live, except where Java's rebuild loses it too: messages of a topic that was made again
    fields       each one as Java decodes it, message by message, as objects and as Arrow columns
    units        byte by byte those of the store they are compared with
    keys         every key of every record that Java indexes (PREPARED too, ROLLBACK not) is found
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interop import broker_disk
from interop.broker_recipes import (
    BEHIND,
    CLEAN,
    KILLED,
    NOT_YET,
    POWER,
    TORN,
    Delete,
    Put,
    PutBatch,
    Recipe,
    Session,
    recipe,
)
from interop.compare import ALL_COLUMNS, Fields, check_messages, numbered, of_java, of_ours, of_row, same
from interop.java_build import NEWEST
from interop.java_store import ANSWER_S, COUNTS, Driver, JavaError, JavaGoneError, JavaStore, single
from interop.trees import difference, tree
from messagestore import BatchRequest, Message, MessageStore, NotAStoreError, StoreConfig, StoreError
from messagestore.inspect.verify import Finding, verify
from messagestore.read_only_store import ReadOnlyStore
from small import columns

Queue = tuple[str, int]
DERIVED = ("consumequeue", "index", "checkpoint")
NOTHING = -1
"""A unit of Java's whose record cannot be decoded."""


@dataclass(frozen=True)
class Content:
    """A queue: its first offset, and the physical offsets of its messages."""

    begin: int
    physical_offsets: tuple[int, ...]

    def below(self, end: int) -> Content:
        return Content(self.begin, tuple(at for at in self.physical_offsets if at < end))

    @property
    def without_phantoms(self) -> Content:
        """Without units of zeros at the end: 5.3.3 takes some for messages after a kill, and shows nothing for them."""
        places = [*self.physical_offsets]
        while places and places[-1] == NOTHING:
            places.pop()
        return Content(self.begin, tuple(places)) if places else EMPTY


EMPTY = Content(0, ())


@dataclass
class Cooked:
    """A store as its last session left it."""

    root: Path
    live: dict[Queue, list[int]]
    begins: dict[Queue, int]
    acknowledged: int
    """Physical offset behind the last put that was answered and cannot be lost."""
    closing: list[Future[Any]] = field(default_factory=list)
    java: JavaStore | None = None
    """The open store, of a recipe whose last session will be killed."""


@dataclass
class Recovered:
    """What Java's own recovery makes of a folder."""

    root: Path
    end: int
    queues: dict[Queue, Content]
    truth: dict[int, Fields]
    """Every record of the log, as Java decodes it."""
    closing: Future[Any] | None = None


class Kitchen:
    """Carries out one recipe in a folder of its own."""

    def __init__(self, made: Recipe, driver: Driver, folder: Path) -> None:
        self.made = made
        self.driver = driver
        self.folder = folder
        self.copies = 0

    # ---- the store

    def cook(self) -> Cooked:
        cooked = Cooked(self.folder / "store", {}, {}, 0)
        before = CLEAN
        for session in self.made.sessions:
            if session.end != KILLED:
                cooked = self.session(cooked, session, learn=before != CLEAN)
                before = session.end
            else:
                cooked.java = self.open(cooked, learn=before != CLEAN)
        return cooked

    def put_until_killed(self, cooked: Cooked) -> None:
        """The steps of the last session, until the JVM is gone; what was answered is acknowledged."""
        assert cooked.java is not None
        for step in self.made.last.steps:
            try:
                self.carry_out(cooked.java, step, cooked)
            except JavaGoneError:
                return

    def open(self, cooked: Cooked, *, learn: bool) -> JavaStore:
        java = JavaStore(self.driver, cooked.root, self.made.config).open()
        if learn:
            cooked.live, cooked.begins = {}, {}
            for queue, content in contents(cooked.root, java).items():
                cooked.live[queue], cooked.begins[queue] = list(content.physical_offsets), content.begin
        return java

    def session(self, cooked: Cooked, session: Session, *, learn: bool) -> Cooked:
        root = cooked.root
        old_checkpoint = (root / "checkpoint").read_bytes() if (root / "checkpoint").exists() else None
        java = self.open(cooked, learn=learn)
        began, last = java.log()["max"], len(session.steps) - 1

        snapshot: Path | None = None
        for number, step in enumerate(session.steps):
            wanted = {BEHIND: session.behind, POWER: session.behind, TORN: last}.get(session.end)
            if number == wanted:
                java.dispatched()
                snapshot = self.copy(root, only=DERIVED)
                if session.end == POWER:
                    self.set_checkpoint(snapshot, old_checkpoint)
            if number == last:
                cooked.acknowledged = java.log()["max"]
            self.carry_out(java, step, cooked)

        end = java.log()["max"]
        if session.end not in (TORN, POWER):
            cooked.acknowledged = end
        java.dispatched()
        self.check_live(java, cooked)

        java.clock(-1)
        if session.end == CLEAN:
            java.close()
            return cooked

        image = self.copy(root)
        cooked.closing.append(java.closing())
        if snapshot is not None:
            if session.end != POWER or session.hole:
                self.replace_derived(image, snapshot)
            else:
                self.set_checkpoint(image, old_checkpoint)

        if session.end == TORN:
            cut = cooked.acknowledged + int(session.cut * (end - cooked.acknowledged))
            broker_disk.zero(image, cut, end)
        elif session.end == POWER:
            cut = began + int(session.cut * (end - began))
            behind = min(end, (cut // 4096 + 1 + int(session.cut * 1000) % 3) * 4096) if session.hole else end
            broker_disk.zero(image, cut, behind)
            cooked.acknowledged = began

        cooked.root = image
        return cooked

    def carry_out(self, java: JavaStore, step: Put | PutBatch | Delete, cooked: Cooked) -> None:
        if isinstance(step, Delete):
            java.dispatched()
            for queue in [queue for queue in cooked.live if queue[0] == step.topic]:
                del cooked.live[queue]  # a topic that is half deleted when Java dies is not missed
                cooked.begins.pop(queue, None)
            java.delete_topic(step.topic)
            return
        (put,) = java.put([step.for_java()])
        assert put["ok"], (put, step)
        cooked.acknowledged = put["physicalOffset"] + put["size"]
        if isinstance(step, Put) and dict(step.fields).get("sysFlag", 0) & 0xC in (0x4, 0xC):
            return
        places = [int(each[-16:], 16) for each in put["messageId"].split(",")]
        cooked.live.setdefault((step.topic, step.queue_id), []).extend(places)

    def check_live(self, java: JavaStore, cooked: Cooked) -> None:
        """The expectation itself: what Java answered to the puts is what its queues hold."""
        for (topic, queue_id), found in java.dump_all(sorted(cooked.live)).items():
            if topic.startswith("%LMQ%"):
                continue
            there = [message["physicalOffset"] if message else NOTHING for message in found["messages"]]
            wanted = cooked.live[topic, queue_id]
            assert there == wanted, f"the test's own expectation of {topic[:40]}/{queue_id}: {wanted}, in Java {there}"

    # ---- files

    def copy(self, root: Path, only: Sequence[str] = ()) -> Path:
        self.copies += 1
        target = self.folder / f"copy-{self.copies}"
        if not only:
            shutil.copytree(root, target, symlinks=True)
            return target
        target.mkdir()
        for name in only:
            if (root / name).is_dir():
                shutil.copytree(root / name, target / name)
            elif (root / name).exists():
                shutil.copy(root / name, target / name)
        return target

    def replace_derived(self, image: Path, snapshot: Path) -> None:
        for name in DERIVED:
            remove(image / name)
            if (snapshot / name).exists():
                (snapshot / name).rename(image / name)

    def set_checkpoint(self, root: Path, data: bytes | None) -> None:
        remove(root / "checkpoint")
        if data is not None:
            (root / "checkpoint").write_bytes(data)

    def take_away(self, root: Path) -> list[str]:
        """Remove what the recipe says; the names of what went."""
        made, gone = self.made, list[str]()
        if made.abort:
            (root / "abort").write_text("1")
        for what in made.taken:
            if what in ("consumequeue", "index", "checkpoint"):
                found = [root / what] if (root / what).exists() else []
            elif what == "topic":
                found = sorted({folder.parent for folder in broker_disk.queue_folders(root)})
            elif what == "queue":
                found = broker_disk.queue_folders(root)
            else:
                found = sorted(p for folder in broker_disk.queue_folders(root) for p in folder.iterdir())
            if found:
                path = found[int(made.pick * len(found))]
                remove(path)
                gone.append(str(path.relative_to(root)))
        return gone

    # ---- Java's recovery

    def recovered(self, root: Path) -> Recovered:
        if self.made.version != NEWEST:  # they refuse a store with a file that was being made; 5.3 deletes it
            for path in (*root.glob("commitlog/*"), *root.glob("consumequeue/*/*/*")):
                if path.stat().st_size == 0:
                    path.unlink()
        java = JavaStore(self.driver, root, self.made.config).open()
        end = java.log()["max"]
        java.dispatched()
        found, walked = broker_disk.records(root)
        assert walked >= end or not found, f"the test's own walk ends at {walked}, Java's at {end}"
        places = [record.physical_offset for record in found if record.physical_offset < end]
        truth = {at: of_java(message) for at, message in zip(places, java.looks(places), strict=True) if message}
        result = Recovered(root, end, contents(root, java), truth)
        result.closing = java.closing()
        return result


def contents(root: Path, java: JavaStore) -> dict[Queue, Content]:
    """Every queue of an open Java store."""
    queues = [(folder.parent.name, int(folder.name)) for folder in broker_disk.queue_folders(root)]
    found = {}
    for queue, dump in java.dump_all(queues).items():
        if dump["messages"]:
            places = tuple(message["physicalOffset"] if message else NOTHING for message in dump["messages"])
            found[queue] = Content(dump["max"] - len(places), places)
    return found


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- what is right


class Judge:
    """Compares one recovered store of ours with Java's."""

    def __init__(self, made: Recipe, driver: Driver, folder: Path) -> None:
        self.made = made
        self.kitchen = Kitchen(made, driver, folder)
        self.driver = driver
        self.gone: list[str] = []
        self.log: list[str] = []
        self._full: Recovered | None = None

    def run(self, cooked: Cooked | None = None) -> None:
        """Compare; with `cooked`, a store that was made before."""
        if cooked is None:
            cooked = self.kitchen.cook()
        self.whole = cooked.root
        self.image = self.kitchen.copy(cooked.root)
        self.gone = self.kitchen.take_away(self.image)
        try:
            self.java = self.kitchen.recovered(self.kitchen.copy(self.image))
        except JavaError as error:
            if self.made.last.end not in (POWER, KILLED) or "load refused" not in str(error):
                raise
            return  # older ones trip over what was left, and say nothing about where the log ends
        end = self.java.end
        assert end >= cooked.acknowledged, f"Java itself keeps {end} of {cooked.acknowledged}: the test is wrong"
        self.live = {
            queue: Content(cooked.begins.get(queue, 0), tuple(places)).below(end)
            for queue, places in cooked.live.items()
            if any(place < end for place in places)
        }
        self.records = [each for each in broker_disk.records(self.java.root)[0] if each.physical_offset < end]
        self.lives = broker_disk.lives(self.records)
        COUNTS.renumbered += len(self.renumbered())
        ours = self.kitchen.copy(self.image)
        self.before_recovery(ours)
        self.recovery(ours)
        self.hand_back(ours)
        if self.made.last.end == KILLED:
            cooked.closing.clear()  # they died with the JVM
        for closing in [*cooked.closing, self.java.closing, self._full.closing if self._full else None]:
            if closing is not None:
                closing.result(ANSWER_S)

    def renumbered(self) -> set[Queue]:
        """Queues in which Java shows a message at another offset than its record says: after a kill Java brings a deleted
        life of a topic back, and the next life goes on behind.
        """
        numbers = {record.physical_offset: record.queue_offset for record in self.records}
        return {
            queue
            for queue, content in self.java.queues.items()
            if any(numbers.get(place) != number for number, place in enumerate(content.physical_offsets, content.begin))
        }

    def run_light(self) -> None:
        """A store with light queues is refused for writing, by name, and nothing in it changes."""
        cooked = self.kitchen.cook()
        self.gone = self.kitchen.take_away(cooked.root)
        before = tree(cooked.root)
        try:
            MessageStore.open(cooked.root, self.config).close()
        except NotAStoreError as error:
            assert "light queue" in str(error), error
        else:
            raise AssertionError("a writer may open a store with light queues")
        changed = difference(before, tree(cooked.root))
        assert not changed, f"a writer that was refused changed the store: {changed}"
        with MessageStore.open_read_only(cooked.root, self.config) as store:
            assert not [topic for topic in store.topics() if topic.startswith("%LMQ%")]
        for closing in cooked.closing:
            closing.result(ANSWER_S)

    @property
    def config(self) -> StoreConfig:
        config = self.made.config
        return StoreConfig(
            mapped_file_size_commit_log=int(str(config["mappedFileSizeCommitLog"])),
            mapped_file_size_consume_queue=int(str(config["mappedFileSizeConsumeQueue"])),
            max_hash_slot_num=int(str(config["maxHashSlotNum"])),
            max_index_num=int(str(config["maxIndexNum"])),
            max_message_size=int(str(config["maxMessageSize"])),
            enabled_append_prop_crc=config.get("enabledAppendPropCRC") == "true",
            flush_disk_type=str(config["flushDiskType"]),
            lock_timeout="1s",
        )

    @property
    def full(self) -> Recovered:
        """What Java makes of the log alone."""
        if self._full is None:
            root = self.kitchen.copy(self.image)
            for name in DERIVED:
                remove(root / name)
            (root / "abort").write_text("1")  # 5.1 makes no queues again after a clean end
            self._full = self.kitchen.recovered(root)
        return self._full

    @property
    def untouched(self) -> bool:
        """Nothing was taken, and the session ended with its queues complete."""
        return not self.gone and self.made.last.end not in (BEHIND, TORN, POWER, KILLED)

    @property
    def cut_before(self) -> bool:
        """Java cut the log of an earlier session."""
        return "cut before" in self.made.features

    # ---- a reader, before anybody recovers

    def before_recovery(self, root: Path) -> None:
        """A reader shows no message that is not there, and all of them where nothing is missing."""
        with MessageStore.open_read_only(root, self.config) as store:
            shown = dict[Queue, Content]()
            for topic, queue_ids in store.topics().items():
                for queue_id in queue_ids:
                    try:
                        content, messages = our_content(store, topic, queue_id)
                    except StoreError as error:
                        # old units behind a queue's end that Java keeps in memory may point anywhere
                        excused = not self.untouched or self.cut_before
                        assert excused, f"reader: {topic[:40]}/{queue_id}: {error}"
                        continue
                    for message in messages:
                        theirs = self.java.truth.get(message["physical_offset"])
                        if theirs is not None:
                            same(
                                ("reader", topic[:40], queue_id), [message], numbered([theirs], message["queue_offset"])
                            )
                    if content.physical_offsets:
                        shown[topic, queue_id] = content
            if self.untouched and not self.cut_before:
                self.equal("reader before recovery", shown, self.live)

    @staticmethod
    def equal(what: str, ours: dict[Queue, Content], wanted: dict[Queue, Content]) -> None:
        for queue in sorted(ours.keys() | wanted.keys()):
            one, other = ours.get(queue, EMPTY), wanted.get(queue, EMPTY)
            assert one == other, f"{what}: {queue[0][:40]}/{queue[1]}: we show {brief(one)}, wanted {brief(other)}"

    # ---- our recovery

    def recovery(self, root: Path) -> None:
        end = self.java.end
        before = broker_disk.log_bytes(root, end)
        with MessageStore.open(root, self.config) as store:
            report = store.report
            assert report is not None
            self.log.append(f"report: {report}")
            assert report.end == end, f"our log ends at {report.end}, Java's at {end} ({report.reason}, {report.stop})"
            after = broker_disk.log_bytes(root, end)
            assert len(before) == len(after), f"the log below {end} had {len(before)} bytes, has {len(after)}"
            changed = next((i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b), None)
            assert changed is None, f"byte {changed} of the log below Java's end {end} has changed"
            queues = self.check_queues(store, root)
            self.check_keys(store)
            self.check_records(store)
        faults = self.faults(root)
        assert not faults, f"verify after recovery: {faults[:3]}"
        COUNTS.messages += sum(len(content.physical_offsets) for content in queues.values())

    def faults(self, root: Path) -> list[Finding]:
        """What `verify` finds. Of a topic that was deleted, a kill brings back what Java's recovery walks over: parts of
        queues, of which `verify` may miss the rest.
        """
        found = verify(root, self.config).findings
        if "killed" not in self.made.features:
            return found
        steps = [step for session in self.made.sessions for step in session.steps]
        deleted = [f"/consumequeue/{step.topic}/" for step in steps if isinstance(step, Delete)]
        return [each for each in found if each.found != "no file" or not any(name in each.path for name in deleted)]

    def check_queues(self, store: ReadOnlyStore, root: Path) -> dict[Queue, Content]:
        shown = dict[Queue, Content]()
        for topic, queue_ids in store.topics().items():
            for queue_id in queue_ids:
                content, messages = our_content(store, topic, queue_id)
                truth = numbered([self.java.truth[at] for at in content.physical_offsets], content.begin)
                same((topic[:40], queue_id), messages, truth)
                low = store.min_offset(topic, queue_id)
                rows = [
                    of_row(row)
                    for batch in store.read(topic, queue_id, low, columns=ALL_COLUMNS)
                    for row in batch.to_pylist()
                ]
                same((topic[:40], queue_id, "columns"), rows, truth)
                if content.physical_offsets:
                    shown[topic, queue_id] = content
        known = shown.keys() | self.live.keys() | self.java.queues.keys() | self.lives.keys()
        for queue in sorted(known):
            self.check_queue(queue, shown.get(queue, EMPTY), root)
        return shown

    def check_queue(self, queue: Queue, ours: Content, root: Path) -> None:
        """One of the contents that are right; nothing live is lost; the units are the same bytes."""
        live, java = (all_of.get(queue, EMPTY).without_phantoms for all_of in (self.live, self.java.queues))
        where = f"{queue[0][:40]}/{queue[1]}"
        candidates: list[tuple[str, Content, Path | None]] = []
        if self.made.last.end != POWER or live == java:
            complete = self.made.last.end not in (BEHIND, TORN, POWER, KILLED)
            candidates.append(("live", live, self.whole if complete else None))
        candidates.append(("Java's recovery", java, self.java.root))
        parts = self.lives.get(queue, [[]])
        last = Content(parts[-1][0].queue_offset, tuple(r.physical_offset for r in parts[-1])) if parts[-1] else EMPTY
        candidates.append(("the last life", last, None))
        if ours not in [content for _, content, _ in candidates]:  # asked last: some versions do not open what it takes
            rebuilt = self.full.queues.get(queue, EMPTY).without_phantoms
            candidates.append(("Java's rebuild", rebuilt, self.full.root))
        matching = [(name, its_root) for name, content, its_root in candidates if content == ours]
        listed = "; ".join(f"{name}: {brief(content)}" for name, content, _ in candidates)
        assert matching, f"{where}: ours {brief(ours)}; {listed}"
        lost = set(live.physical_offsets) - set(ours.physical_offsets) - {NOTHING}
        if lost:
            made_again = len(parts) > 1 and self.gone
            assert made_again, f"{where}: {len(lost)} live messages are lost ({matching[0][0]}): {sorted(lost)[:5]}"
        begin, count = ours.begin, len(ours.physical_offsets)
        if not count:
            return
        mine = broker_disk.units(root, *queue, begin, begin + count)
        for name, its_root in matching:
            theirs = broker_disk.units(its_root, *queue, begin, begin + count) if its_root is not None else mine
            if mine == theirs:
                continue
            # a unit may be older than the properties that it was made of, when these did not reach the disk
            again = broker_disk.units(self.full.root, *queue, begin, begin + count)
            assert mine == again, f"{where}: units differ from {name}: {first_difference(mine, theirs)}"

    def check_keys(self, store: ReadOnlyStore) -> None:
        """Every key of every record that Java indexes, and nothing else."""
        wanted: dict[tuple[str, str], set[int]] = {}
        for at, message in self.java.truth.items():
            if message["sys_flag"] & 0xC != 0xC:
                for key in {*message["keys"], message["unique_key"] or ""} - {""}:
                    wanted.setdefault((message["topic"], key), set()).add(at)
        there = store.topics()
        for (topic, key), places in wanted.items():
            if topic in there:
                found = [message.physical_offset for message in store.query_message(topic, key, 10_000)]
                assert len(found) == len(set(found)), f"{topic[:40]} {key!r}: found twice: {found}"
                assert set(found) == places, (
                    f"{topic[:40]} {key!r}: we find {sorted(found)}, there are {sorted(places)}"
                )
                COUNTS.keys += 1

    def check_records(self, store: ReadOnlyStore) -> None:
        """Each record by its place, with a unit or without."""
        for at, theirs in self.java.truth.items():
            ours = store.look_message_by_offset(at)
            assert ours is not None, f"the record at {at} is not found"
            same(("by place", at), [of_ours(ours)], [theirs])

    # ---- and back

    def hand_back(self, root: Path) -> None:
        """We put, Java reads; Java puts, we read."""
        reserved = ("rmq_", "RMQ_", "SCHED")
        queues = sorted(
            queue for queue in self.live if len(queue[0]) < 128 and queue[1] < 8 and not queue[0].startswith(reserved)
        )
        targets = [*queues[:2], ("new", 0)]

        with MessageStore.open(root, self.config) as store:
            for number, (topic, queue_id) in enumerate(targets):
                there = store.topics().get(topic, [])
                before = store.max_offset(topic, queue_id) if queue_id in there else 0
                result = store.put_message(Message(topic, b"ours %d" % number, queue_id=queue_id, keys=["ours"]))
                assert result.is_ok
                assert result.queue_offset == before, (topic[:40], result.queue_offset, before)
            store.append_batch(columns([b"batch"] * 3, topic="batches"), BatchRequest(app_id="app", version=0))

        faults = self.faults(root)
        assert not faults, f"verify after our puts: {faults[:3]}"

        _, end = broker_disk.records(root)
        java = JavaStore(self.driver, root, self.made.config).open()
        assert java.log()["max"] == end, f"after our puts Java's log ends at {java.log()['max']}, ours at {end}"
        with MessageStore.open_read_only(root, self.config) as store:
            check_messages_in_order(store, java)
            for topic, _ in targets:
                ours = {message.physical_offset for message in store.query_message(topic, "ours")}
                assert ours, topic
                assert ours <= set(java.query(topic, ["ours"])[0]), f"{topic[:40]}: Java does not find our keys"

        puts = java.put([single(topic, b"theirs", queue_id=queue_id, keys=["theirs"]) for topic, queue_id in targets])
        assert all(put["ok"] for put in puts), puts
        java.dispatched()
        with MessageStore.open_read_only(root, self.config) as store:
            check_messages_in_order(store, java)

        java.close()
        with MessageStore.open(root, self.config) as store:
            for topic, queue_id in targets:
                end_of_queue = store.max_offset(topic, queue_id)
                (message,) = store.get_message(topic, queue_id, end_of_queue - 1).messages
                assert message.body == b"theirs", (topic[:40], queue_id, message.body)
            for topic, _ in targets:
                assert store.query_message(topic, "theirs"), f"{topic[:40]}: Java's key is not found"
        faults = self.faults(root)
        assert not faults, f"verify after Java's puts: {faults[:3]}"


def check_messages_in_order(store: ReadOnlyStore, java: JavaStore) -> None:
    check_messages(store, java, renumbered=True)


def our_content(store: ReadOnlyStore, topic: str, queue_id: int) -> tuple[Content, list[Fields]]:
    """A queue as `get_message` shows it."""
    low, high = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
    messages = list(store.get_message(topic, queue_id, low, max(1, high - low)).messages) if high > low else []
    return Content(low, tuple(m.physical_offset for m in messages)), [of_ours(m) for m in messages]


def brief(content: Content) -> str:
    places = content.physical_offsets
    listed = ", ".join(map(str, places[:6])) + (f" ... {places[-1]}" if len(places) > 6 else "")
    return f"{len(places)} from {content.begin} [{listed}]"


def first_difference(one: Sequence[object], other: Sequence[object]) -> str:
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"unit {number} from the first: {a}, {b}"
    return f"{len(one)} and {len(other)} units"


def story(made: Recipe) -> str:
    """A recipe in words."""
    lines = [f"seed {made.seed}: RocketMQ {made.version}, {made.config}"]
    for session in made.sessions:
        lines.append(
            f"  session, end {session.end} (behind {session.behind}, cut {session.cut:.3f}, hole {session.hole})"
        )
        for step in session.steps:
            if isinstance(step, Delete):
                lines.append(f"    delete {step.topic[:40]}")
            elif isinstance(step, PutBatch):
                lines.append(f"    batch of {len(step.messages)} to {step.topic[:40]}/{step.queue_id}")
            else:
                flags = dict(step.fields).get("sysFlag", 0)
                lines.append(
                    f"    put {step.topic[:40]}({len(step.topic)})/{step.queue_id} sysFlag {flags:#x}, body {len(step.body)}"
                )
    lines.append(f"  taken: {made.taken}, abort put there: {made.abort}; features: {sorted(made.features)}")
    return "\n".join(lines)


def try_one(
    made: Recipe, driver: Driver, folder: Path, cooked: Cooked | None = None, *, light: bool = False
) -> str | None:
    """None, or what is wrong, in full."""
    judge = Judge(made, driver, folder)
    try:
        if light:
            judge.run_light()
        else:
            judge.run(cooked)
    except Exception as error:  # noqa: BLE001 - whatever is wrong, it belongs to a seed
        trace = "".join(traceback.format_exception(error)[-6:])
        return f"{type(error).__name__}: {error}\n  gone: {judge.gone}\n  {judge.log}\n{story(made)}\n{trace}"
    else:
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Iterable[str]) -> int:
    """Repeat seeds, and say what each store consists of."""
    failed = 0
    write: Callable[[str], object] = sys.stdout.write
    with tempfile.TemporaryDirectory() as folder:
        drivers: dict[str, Driver] = {}
        given = list(arguments)
        without = frozenset[str]() if "--all" in given else NOT_YET
        for text in (text for text in given if text != "--all"):
            made = recipe(int(text), without)
            write(story(made) + "\n")
            if made.version not in drivers:
                drivers[made.version] = Driver(made.version, Path(folder) / "java")
            wrong = try_one(made, drivers[made.version], Path(folder) / f"seed-{made.seed}")
            write(f"seed {made.seed}: {wrong or 'right'}\n")
            failed += wrong is not None
        for driver in drivers.values():
            driver.stop()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
