"""What every implementation of `Stores` must do, asked through the interface alone.

`IMPLEMENTATIONS` runs the same tests for each: the stores of this host, and the same behind a wire, where every argument
and every answer is turned into bytes and back. A store on another host is added there.
"""

from __future__ import annotations

import itertools
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from crash.digests import append_as_earlier
from crash.imitate import Broker, Process, another_boot
from messagestore import (
    BatchConflictError,
    BatchRequest,
    ChecksumError,
    ConfigError,
    CorruptionError,
    LostBatchesError,
    Message,
    MessageStore,
    NotAStoreError,
    OffsetOutOfRangeError,
    StoreLockedError,
    StoreWentBackwardsError,
)
from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.files.mapped_file import Disk
from messagestore.format.layout import DIGEST_NAME
from messagestore.session import attached_store
from messagestore.spi import (
    LOCAL_STORES,
    ColumnTexts,
    Description,
    Ends,
    Place,
    Range,
    StagedFile,
    StoreReader,
    Stores,
    StoreWriter,
    Write,
    encode,
    java_hashes,
    store_host_of,
)
from small import SMALL, bodies, columns, filled

Q0, Q1 = ("t", 0), ("t", 1)
APP = "app"


class Wire:
    """Something behind a wire: what goes in and what comes out is copied through bytes."""

    def __init__(self, there: Any) -> None:
        self._there = there
        self._ends: Ends | None = None

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object, **options: object) -> Any:
            arguments, options = travelled((arguments, options))
            found = getattr(self._there, name)(*arguments, **options)
            if isinstance(found, Iterator):
                return map(travelled, found)
            if name in ("reader", "writer", "stage"):
                return Wire(found)
            return self._kept(travelled(found))

        return call

    def _kept(self, found: Any) -> Any:
        """The client of a store far away promises what `Ends` says, too: the same object while nothing changes."""
        if isinstance(found, Ends):
            found = self._ends = self._ends if found == self._ends and not found.restarted else found
        return found

    def __enter__(self) -> Wire:
        self._there.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._there.__exit__(*error)


def travelled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


IMPLEMENTATIONS: dict[str, Callable[[], Stores]] = {
    "local": lambda: LOCAL_STORES,
    "behind a wire": lambda: Wire(LOCAL_STORES),  # type: ignore[dict-item,return-value]
}


@pytest.fixture(params=IMPLEMENTATIONS)
def stores(request: pytest.FixtureRequest) -> Stores:
    return IMPLEMENTATIONS[request.param]()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "store")
    yield path
    attached_store(path).detach()


@pytest.fixture
def reader(stores: Stores, root: str) -> Iterator[StoreReader]:
    """Of a store with 60 messages in two queues; some segments are full."""
    filled(Path(root), 60)
    opened = stores.reader(root)
    yield opened
    opened.close()


def add(root: str, count: int, **given: Any) -> None:
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(count), **given))


def numbers(reader: StoreReader, *ranges: Range, **most: int) -> list[tuple[int, int]]:
    """Queue and number of each message, after its records were decoded."""
    found = []
    for part in reader.gather(ranges, **most):
        batch = part.decoded(("queue_id", "queue_offset", "body"))
        found += zip(batch["queue_id"].to_pylist(), batch["queue_offset"].to_pylist(), strict=True)
    return found


# ---- which store


def test_it_says_which_store_it_is(stores: Stores, root: str, reader: StoreReader) -> None:
    found = reader.describe()
    assert len(found.store_id) == 32
    assert (found.exists, found.queue_counts, found.queue_ids) == (True, {"t": 8}, {})
    assert reader.describe(queues=True).queue_ids["t"] == [0, 1]
    writer = stores.writer(root, SMALL, staging_ttl_s=60.0)
    assert writer.describe().store_id == found.store_id == writer.prepare().store_id
    assert writer.describe().queue_counts == {"t": 8}


def test_a_copy_knows_its_ancestors(stores: Stores, root: str, tmp_path: Path) -> None:
    """A copy without our folder gets an id of its own from its first writer."""
    filled(Path(root), 1)
    add(root, 2)
    origin = stores.reader(root).describe().store_id
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    shutil.rmtree(copy / "spark")
    add(str(copy), 1)
    found = stores.reader(str(copy)).describe()
    assert found.store_id != origin
    assert found.ancestors == {origin}


def test_where_there_is_no_store(stores: Stores, root: str) -> None:
    """Reading is refused, and looking makes nothing."""
    with pytest.raises(NotAStoreError, match="found no message store"):
        stores.reader(root)
    writer = stores.writer(root, SMALL, staging_ttl_s=60.0)
    for found in (writer.describe(), writer.prepare()):
        assert (found.exists, found.store_id, found.ancestors, found.queue_counts) == (False, "", frozenset(), {})
    assert not Path(root).exists()


def test_the_opener_travels_to_tasks(stores: Stores, root: str) -> None:
    """It is pickled into each task."""
    if stores is LOCAL_STORES:
        assert travelled(stores).writer(root, SMALL, staging_ttl_s=1.0).describe() == Description(
            exists=False, config=SMALL
        )


# ---- ends


def test_ends_grow_and_stay_the_same_object(root: str, reader: StoreReader) -> None:
    before = reader.ends(["t"])
    assert before.queues == {Q0: 30, Q1: 30}
    assert (before.store_id, before.recovered) == (reader.describe().store_id, True)
    assert reader.ends(["t"]).queues is before.queues
    add(root, 8, queues=4)
    after = reader.ends(["t"])
    assert after.queues == {Q0: 32, Q1: 32, ("t", 2): 2, ("t", 3): 2}
    assert (after.generation, after.restarted) == (before.generation, frozenset())
    assert reader.ends(["other"]).queues == {}
    assert reader.ends(["t"]).queues == after.queues


def test_a_change_ends_a_wait(root: str, reader: StoreReader) -> None:
    """Also one that came before the wait, after the last call; without a change, a wait ends in time."""
    reader.await_change(0)
    before = reader.ends(["t"]).queues[Q0]
    reader.await_change(0.01)
    assert reader.ends(["t"]).queues[Q0] == before
    add(root, 2)
    begin_s = time.monotonic()
    while reader.ends(["t"]).queues[Q0] == before:
        reader.await_change(60.0)
    assert time.monotonic() - begin_s < 30


def test_ends_of_the_topics_that_match_a_pattern(root: str, reader: StoreReader) -> None:
    """Whole names, as topics come and go; never those of a broker or of a group's retries."""
    assert reader.ends([], "t|u.*").queues == {Q0: 30, Q1: 30}
    before = reader.ends([], "t|u.*")
    assert reader.ends([], "t|u.*").queues is before.queues
    for topic in ("u1", "tt", "%RETRY%u"):
        add(root, 2, topic=topic)
    after = reader.ends([], "t|u.*")
    assert after.queues == {Q0: 30, Q1: 30, ("u1", 0): 1, ("u1", 1): 1}
    assert reader.ends([], ".*RETRY.*").queues == {}
    assert reader.ends(["%RETRY%u"]).queues == {("%RETRY%u", 0): 1, ("%RETRY%u", 1): 1}
    assert reader.ends([], "none").queues == {}


def test_a_queue_that_was_made_again_is_reported_once(root: str, reader: StoreReader) -> None:
    """It is as long as before: only where its messages lie tells."""
    reader.ends(["t"])
    broker = Broker(Path(root), SMALL)
    shutil.rmtree(Path(root) / "consumequeue" / "t" / "0")
    broker.next[Q0] = 0
    for number in range(30):
        broker.put("t", b"again %d" % number, 0)
    broker.close()
    looks = []
    deadline_s = time.monotonic() + 30
    while not any(looks) and time.monotonic() < deadline_s:
        looks.append(reader.ends(["t"]).restarted)
    assert looks[-1] == {Q0}
    assert not any(reader.ends(["t"]).restarted for _ in range(3))


def test_the_same_store_in_another_folder_is_another_generation(root: str, reader: StoreReader) -> None:
    """A backup was restored: the reader goes on with it and says so; another store is refused."""
    before = reader.ends(["t"])
    shutil.copytree(root, root + "-backup")
    add(root, 8)
    assert reader.ends(["t"]).queues[Q0] == 34
    shutil.rmtree(root)
    shutil.move(root + "-backup", root)
    after = reader.ends(["t"])
    assert after.queues == before.queues
    assert after.generation > before.generation
    assert reader.ends(["t"]).generation == after.generation
    shutil.rmtree(root)
    with pytest.raises(NotAStoreError):
        reader.ends(["t"])
    filled(Path(root), 2)
    for _ in range(2):
        with pytest.raises(StoreWentBackwardsError, match=r"found store \w+ in place of store"):
            reader.ends(["t"])


# ---- single messages


def test_begins_follow_retention(root: str, reader: StoreReader) -> None:
    assert reader.begins([Q0, Q1]) == {Q0: 0, Q1: 0}
    add(root, 200)
    ends = reader.ends(["t"]).queues
    for segment in sorted((Path(root) / "commitlog").iterdir())[:-1]:
        segment.unlink()
    begins = reader.begins(ends)
    assert begins.keys() == ends.keys()
    assert all(0 < begins[queue] <= ends[queue] for queue in ends)
    assert begins != ends


def test_places_are_where_the_records_lie(reader: StoreReader) -> None:
    (gathered,) = reader.gather([Range(*Q0, 0, 30)])
    places = reader.places({Q0: 30, Q1: 7, ("t", 9): 3})
    assert places[Q0] == Place(int(gathered.physical_offsets[-1]), int(gathered.sizes[-1]))
    assert places[Q0].end > places[Q1].end
    assert ("t", 9) not in places
    assert reader.places({}) == {}
    assert reader.places({Q0: 1})[Q0].physical_offset == gathered.physical_offsets[0]


def test_seek_by_place_and_by_time(root: str, reader: StoreReader) -> None:
    times = [message.store_timestamp_ms for part in reader.gather([Range(*Q0, 0, 30)]) for message in part.messages()]
    places = [reader.places({Q0: number + 1})[Q0].physical_offset for number in range(30)]
    assert [reader.seek(Q0, physical_offset=place) for place in places] == list(range(30))
    assert reader.seek(Q0, physical_offset=places[-1] + 1) == 30
    assert reader.seek(Q0, after_ms=times[0] - 1) == 0
    assert reader.seek(Q0, after_ms=times[-1]) == 30
    later = sum(time_ms <= times[9] for time_ms in times)
    assert reader.seek(Q0, after_ms=times[9]) == later
    assert reader.seek(Q0, physical_offset=places[5], after_ms=times[-1]) == 5
    assert reader.seek(Q0, physical_offset=places[-1], after_ms=times[0] - 1) == 0
    assert reader.seek(Q0) == 30


def test_the_last_record_proves_the_log(root: str, reader: StoreReader) -> None:
    """The same bytes have the same CRC; behind the log it is -1; below the first segment nothing can be told."""
    place = reader.places({Q0: 30})[Q0]
    known = reader.prove_last(place.physical_offset, place.size, with_time=True)
    assert known is not None
    assert (known.position, known.size) == (place.physical_offset, place.size)
    assert known.store_timestamp_ms is not None
    assert reader.prove_last(place.physical_offset, place.size) == replace(known, store_timestamp_ms=None)
    other = reader.prove_last(place.physical_offset + 1, place.size, with_time=True)
    assert other is not None
    assert other.crc != known.crc
    assert other.store_timestamp_ms is None
    beyond = reader.prove_last(1 << 40, 100)
    assert beyond is not None
    assert beyond.crc == -1
    add(root, 200)
    for segment in sorted((Path(root) / "commitlog").iterdir())[:-1]:
        segment.unlink()
    assert reader.prove_last(place.physical_offset, place.size) is None


# ---- ranges


def test_ranges_are_gathered_in_order(reader: StoreReader) -> None:
    """Each message once, whatever the limits are."""
    ranges = [Range(*Q1, 3, 20), Range(*Q0, 0, 30), Range(*Q1, 25, 26)]
    wanted = [(each.queue_id, number) for each in ranges for number in range(each.start, each.end)]
    assert numbers(reader, *ranges) == wanted
    assert numbers(reader, *ranges, max_rows=7) == wanted
    assert numbers(reader, *ranges, max_size=1) == wanted
    assert max(len(part.sizes) for part in reader.gather(ranges, max_rows=7)) == 7
    assert {len(part.sizes) for part in reader.gather(ranges, max_size=1)} == {1}
    assert numbers(reader) == []


def test_gathered_bytes_are_decoded_by_the_caller(reader: StoreReader) -> None:
    (part,) = reader.gather([Range(*Q0, 10, 13)])
    assert (part.topic, part.queue_id, part.start, part.end) == ("t", 0, 10, 13)
    batch = part.decoded(("body", "physical_offset", "keys"))
    assert batch.schema.names == ["body", "physical_offset", "keys"]
    assert batch["body"].to_pylist() == [bodies(60)[number] for number in (20, 22, 24)]
    messages = list(part.messages())
    assert [message.body for message in messages] == batch["body"].to_pylist()
    assert [message.physical_offset for message in messages] == batch["physical_offset"].to_pylist()
    assert [message.queue_offset for message in messages] == [10, 11, 12]


def test_only_messages_with_some_tags_are_gathered(root: str, reader: StoreReader) -> None:
    """By the hashes in the queue: whole stretches without a hit are looked at, and nothing of them is returned."""
    codes = {tag: int(java_hashes(pa.array([tag]))[0]) for tag in ("tag", "other")}
    with MessageStore.open(root, SMALL) as store:
        for number in range(12):
            store.put_message(Message("t", b"%d" % number, queue_id=0, tags="other" if number % 5 == 0 else "tag"))
    everything = [Range(*Q0, 0, 42)]
    parts = list(reader.gather(everything, max_rows=8, tags_codes=frozenset([codes["other"]])))
    assert [part.start for part in parts] == [0, 8, 16, 24, 32, 40]
    assert parts[-1].end == 42
    assert [number for part in parts for number in part.queue_offsets.tolist()] == [30, 35, 40]
    assert [message.body for part in parts for message in part.messages()] == [b"0", b"5", b"10"]
    both = reader.gather(everything, tags_codes=frozenset(codes.values()))
    assert sum(len(part.sizes) for part in both) == 42
    one = [part.decoded(("queue_offset",)) for part in reader.gather(everything, max_size=1, tags_codes=frozenset([5]))]
    assert sum(each.num_rows for each in one) == 0


def test_messages_are_found_by_their_keys(root: str, reader: StoreReader) -> None:
    """All of them, and none with another key of the same hash; also those that no index file covers yet."""
    assert reader.find("t", ["k8"]) == {Q0: [4]}
    assert reader.find("t", ["k8", "k9", "k8", "none"]) == {Q0: [4], Q1: [4]}
    add(root, 300, key="same")
    with MessageStore.open(root, SMALL) as store:
        for _ in range(200):
            store.put_message(Message("t", b"x", queue_id=1, keys=["many", "k8"]))
    found = reader.find("t", ["many"])
    assert found == {Q1: list(range(180, 380))}
    assert reader.find("t", ["k8"]) == {Q0: [4], Q1: list(range(180, 380))}
    for file in Path(root, "index").iterdir():
        file.unlink()
    assert reader.find("t", ["many"]) == found


def test_some_of_the_gathered_messages(reader: StoreReader) -> None:
    (part,) = reader.gather([Range(*Q0, 10, 20)])
    some = part.rows(3, 5)
    assert [message.queue_offset for message in some.messages()] == [13, 14]
    assert some.decoded(("queue_offset", "body"))["queue_offset"].to_pylist() == [13, 14]


def test_what_retention_has_taken_is_counted(root: str, reader: StoreReader) -> None:
    """All before the gap is given; the error says where to go on."""
    add(root, 400, queues=1)
    ends = reader.ends(["t"]).queues
    parts = reader.gather([Range(*Q1, 29, 30), Range(*Q0, 0, ends[Q0])], max_rows=10)
    assert next(parts).queue_id == 1
    for segment in sorted((Path(root) / "commitlog").iterdir())[:3]:
        segment.unlink()
    given: list[int] = []
    with pytest.raises(OffsetOutOfRangeError) as caught:
        given.extend(number for part in parts for number in range(part.start, part.end))
    error = caught.value
    assert (error.topic, error.queue_id) == ("t", 0)
    assert given == list(range(error.queue_offset))
    assert (error.min, error.max) == (reader.begins([Q0])[Q0], ends[Q0])
    assert numbers(reader, Range(*Q0, error.min, error.max)) == [(0, n) for n in range(error.min, error.max)]


def test_a_damaged_record_is_named_when_it_is_decoded(root: str, reader: StoreReader) -> None:
    place = reader.places({Q0: 5})[Q0]
    with open(Path(root, "commitlog", "0" * 20), "r+b") as file:
        file.seek(place.physical_offset + place.size - 60)
        file.write(b"\xff\xfe\xfd")
    (part,) = reader.gather([Range(*Q0, 0, 10)])
    with pytest.raises(CorruptionError, match=str(place.physical_offset)):
        part.decoded(("body",))
    with pytest.raises(CorruptionError, match=str(place.physical_offset)):
        list(part.messages())


def test_sizes_are_about_right(reader: StoreReader) -> None:
    ranges = [Range(*Q0, 0, 30), Range(*Q1, 5, 6)]
    means = reader.mean_sizes(ranges)
    real = [sum(int(part.sizes.sum()) for part in reader.gather([each])) / each.count for each in ranges]
    assert means == pytest.approx(real, rel=0.2)
    assert reader.mean_sizes([]) == []


def test_the_sizes_of_the_records_of_a_range(reader: StoreReader) -> None:
    (part,) = reader.gather([Range(*Q0, 3, 30)])
    assert reader.sizes(Range(*Q0, 3, 30)).tolist() == part.sizes.tolist()
    assert len(reader.sizes(Range("t", 9, 0, 3))) == 0


def test_tasks_read_by_what_the_driver_has_proven(stores: Stores, root: str) -> None:
    """Nobody has recovered the store since the machine was started: a task need not look again."""
    Path(root).mkdir()
    process = Process(Path(root), SMALL)
    process.batch(APP, 0, rows=20)
    process.die()
    topic = f"topic-{APP}"
    with another_boot():
        reader = stores.reader(root)
        found = reader.ends([topic])
        assert not found.recovered
        ranges = [Range(*queue, 0, end) for queue, end in found.queues.items() if end]
        proven = reader.proven(ranges)
        assert sum(each.count for each in ranges) == 20
        task = stores.reader(root, proven=proven)
        assert len(numbers(task, *ranges)) == 20
        assert task.places(found.queues) == reader.places(found.queues)
    filled(Path(root + "-2"), 4)
    assert stores.reader(root + "-2").proven([Range(*Q0, 0, 2)]) is None


# ---- views


def test_views_say_what_the_store_contains(root: str, reader: StoreReader) -> None:
    """Rows of text and numbers, as they are now."""
    reader.publish_progress("g", {Q0: 7})
    add(root, 4, queues=4)
    found = {name: reader.view(name) for name in ("topics", "queues", "segments", "groups", "batches")}
    assert all(faults == [] for _, faults in found.values())
    assert [(row["topic"], row["messages"]) for row in found["topics"][0]] == [("t", 64)]
    assert [row["maxOffset"] for row in found["queues"][0]] == [31, 31, 1, 1]
    assert found["segments"][0][0]["firstPhysicalOffset"] == 0
    assert [row["committedOffset"] for row in found["groups"][0]][:1] == [7]
    assert found["batches"][0] == []


# ---- progress


def test_progress_is_published_as_a_consumer_groups(root: str, reader: StoreReader) -> None:
    reader.publish_progress("g", {Q0: 7, Q1: 9})
    offsets = ConsumerOffsets(Disk(), root)
    offsets.load()
    assert offsets.get("t", "g") == {0: 7, 1: 9}
    with pytest.raises(ConfigError):
        reader.publish_progress("not a group", {Q0: 7})
    assert reader.published_progress("g") == {Q0: 7, Q1: 9}
    assert reader.published_progress("another") == {}


# ---- writing


_writes = itertools.count()


def writer_of(stores: Stores, root: str) -> tuple[StoreWriter, str]:
    """As a sink plans a write: the writer, and the id of the store."""
    writer = stores.writer(root, SMALL, staging_ttl_s=3600.0)
    return writer, writer.prepare().store_id


def stage(writer: StoreWriter, store_id: str, texts: list[bytes], write: Write | None = None) -> StagedFile:
    host = store_host_of(SMALL)
    with writer.stage(write or Write("0", f"write {next(_writes)}"), store_id) as staging:
        for part in (texts[: len(texts) // 2], texts[len(texts) // 2 :]):
            staging.write(encode(ColumnTexts(columns(part)), limits=SMALL, store_host=host, born_host=host))
        return staging.finish()


def batch(version: int, app_id: str | None = APP) -> BatchRequest:
    return BatchRequest(app_id, version, version_source="spark")


def bodies_in(stores: Stores, root: str) -> list[bytes]:
    reader = stores.reader(root)
    try:
        ends = reader.ends(["t"]).queues
        parts = reader.gather([Range(*queue, 0, end) for queue, end in sorted(ends.items())])
        return sorted(message.body for part in parts for message in part.messages())
    finally:
        reader.close()


def staged_names(root: str) -> list[str]:
    return sorted(path.name for path in Path(root, "spark", "staging").iterdir())


def test_a_batch_is_staged_and_committed(stores: Stores, root: str) -> None:
    """The first commit makes the store; a file that was staged says what is in it."""
    writer, store_id = writer_of(stores, root)
    assert store_id == ""
    files = [stage(writer, store_id, bodies(count, start=start)) for start, count in ((0, 10), (10, 7))]
    assert [file.row_count for file in files] == [10, 7]
    assert not Path(root, "commitlog").exists()
    committed = writer.commit(files, batch(0), store_id)
    assert (committed.result.status, committed.result.row_count) == ("appended", 17)
    assert writer.describe().store_id == committed.store_id != ""
    assert bodies_in(stores, root) == bodies(17)
    assert staged_names(root) == []


def test_tasks_learn_which_digests_a_batch_needs(stores: Stores, root: str) -> None:
    """Without a store, and for what this release appended, its own; a batch of an earlier release needs that one's."""
    writer, store_id = writer_of(stores, root)
    assert list(writer.digests_of(APP, 0)) == [DIGEST_NAME]
    assert not Path(root, "spark", "store.json").exists()
    committed = writer.commit([stage(writer, store_id, bodies(3))], batch(0), store_id, closing=True)
    assert list(writer.digests_of(APP, 0)) == list(writer.digests_of(APP, 1)) == [DIGEST_NAME]
    with MessageStore.open(root, SMALL) as store:
        append_as_earlier(store, columns(bodies(3)), batch(1))
    assert [len(writer.digests_of(APP, version)) for version in range(3)] == [1, 2, 2]
    assert list(writer.digests_of(None, 0)) == [DIGEST_NAME]
    files = [stage(writer, committed.store_id, bodies(3, start=9))]
    assert writer.commit(files, batch(2), committed.store_id, closing=True).result.status == "appended"
    assert [len(writer.digests_of(APP, version)) for version in range(4)] == [1, 2, 1, 1]


def test_files_go_into_the_log_in_their_order(stores: Stores, root: str) -> None:
    writer, store_id = writer_of(stores, root)
    first, second = (stage(writer, store_id, bodies(4, start=start)) for start in (0, 4))
    writer.commit([second, first], batch(0), store_id)
    (part,) = stores.reader(root).gather([Range(*Q0, 0, 4)])
    assert [message.body for message in part.messages()] == [bodies(8)[number] for number in (4, 6, 0, 2)]


def test_an_answer_that_was_lost(stores: Stores, root: str) -> None:
    """The rows are staged and committed again: the batch is known. With other rows it is refused."""
    writer, store_id = writer_of(stores, root)
    first = writer.commit([stage(writer, store_id, bodies(6))], batch(0), store_id)
    again = writer.commit([stage(writer, first.store_id, bodies(6))], batch(0), first.store_id)
    assert again.result.status == "known"
    assert again.result.physical_offset == first.result.physical_offset
    with pytest.raises(BatchConflictError):
        writer.commit([stage(writer, first.store_id, bodies(6, start=50))], batch(0), first.store_id)
    with pytest.raises(LostBatchesError):
        writer.commit([stage(writer, first.store_id, bodies(1))], batch(2), first.store_id)
    assert bodies_in(stores, root) == bodies(6)


def test_a_staged_file_that_is_not_what_was_staged(stores: Stores, root: str) -> None:
    """A power cut, or another hand: nothing of the batch is written."""
    filled(Path(root), 2)
    writer, store_id = writer_of(stores, root)
    good, bad = stage(writer, store_id, bodies(4)), stage(writer, store_id, bodies(4, start=4))
    path = Path(bad.path)
    path.write_bytes(path.read_bytes()[:-9] + b"something")
    with pytest.raises(ChecksumError):
        writer.commit([good, bad], batch(0), store_id)
    path.unlink()
    with pytest.raises(CorruptionError):
        writer.commit([good, bad], batch(0), store_id)
    assert len(bodies_in(stores, root)) == 2


def test_a_file_that_is_not_finished_goes(stores: Stores, root: str) -> None:
    writer, store_id = writer_of(stores, root)
    with writer.stage(Write("0", "w"), store_id):
        assert len(staged_names(root)) == 1
    assert staged_names(root) == []


def test_abort_deletes_what_was_staged(stores: Stores, root: str) -> None:
    """And what failed attempts of the same write left. A batch that is in the log stays there."""
    for exists in (False, True):
        writer, store_id = writer_of(stores, root)
        write = Write("0", f"aborted {exists}")
        failed, good = (stage(writer, store_id, bodies(4), write) for _ in range(2))
        other = stage(writer, store_id, bodies(4))
        assert len(staged_names(root)) == 3
        writer.abort([good.path], store_id)
        assert staged_names(root) == [Path(other.path).name]
        assert failed.path != good.path
        writer.abort([good.path], store_id)
        committed = writer.commit([other], batch(0), store_id)
        writer.abort([other.path], committed.store_id)
    assert bodies_in(stores, root) == bodies(4)


def test_abort_waits_for_a_commit_and_gives_up(stores: Stores, root: str) -> None:
    """The files are left for the sweep."""
    filled(Path(root), 2)
    writer, store_id = writer_of(stores, root)
    staged = stage(writer, store_id, bodies(2))
    process = Process(Path(root), SMALL)
    process.store.open_session("a commit")
    try:
        with pytest.raises(StoreLockedError, match="a commit"):
            writer.abort([staged.path], store_id)
    finally:
        process.die()
    assert len(staged_names(root)) == 1


def test_another_store_at_the_path(stores: Stores, root: str) -> None:
    """Planned for a store that was replaced, or is gone: everything is refused, and nothing is made."""
    filled(Path(root), 2)
    writer, store_id = writer_of(stores, root)
    staged = stage(writer, store_id, bodies(2))
    shutil.rmtree(root)
    for exists in (False, True):
        if exists:
            filled(Path(root), 1)
        with pytest.raises(NotAStoreError):
            stage(writer, store_id, bodies(2))
        with pytest.raises(NotAStoreError):
            writer.commit([staged], batch(0), store_id)
        with pytest.raises(NotAStoreError):
            writer.abort([staged.path], store_id)
        assert Path(root).exists() is exists
    assert len(bodies_in(stores, root)) == 1


def test_something_else_at_the_path(stores: Stores, root: str) -> None:
    Path(root, "letters").mkdir(parents=True)
    with pytest.raises(NotAStoreError, match="a new store needs a missing or empty folder"):
        writer_of(stores, root)
    assert [path.name for path in Path(root).iterdir()] == ["letters"]


def test_a_store_that_only_a_broker_has_written_gets_an_id(stores: Stores, root: str) -> None:
    filled(Path(root), 4)
    shutil.rmtree(Path(root, "spark"))
    writer = stores.writer(root, SMALL, staging_ttl_s=60.0)
    assert (writer.describe().exists, writer.describe().store_id) == (True, "")
    assert len(writer.prepare().store_id) == 32


def test_a_last_commit_leaves_a_closed_store(stores: Stores, root: str) -> None:
    """With `closing` nothing stays attached; without it the process keeps the store for its next commit."""
    writer, store_id = writer_of(stores, root)
    committed = writer.commit([stage(writer, store_id, bodies(2))], batch(0), store_id)
    assert Path(root, "abort").exists()
    files = [stage(writer, committed.store_id, bodies(2, start=2))]
    writer.commit(files, batch(0, app_id=None), committed.store_id, closing=True)
    assert not Path(root, "abort").exists()
    assert bodies_in(stores, root) == bodies(4)
