"""What every implementation of `Stores` must do, asked through the interface alone.

`IMPLEMENTATIONS` runs the same tests for each: the stores of this host, and the same behind a wire, where every argument
and every answer is turned into bytes and back. A store on another host is added there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

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
    StoreConfig,
    StoreError,
    StoreLockedError,
    StoreWentBackwardsError,
    UnknownTopicError,
)
from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.files.disk import Disk
from messagestore.format.javahash import java_hashes
from messagestore.serve.hosted import Hosted
from messagestore.serve.limits import Budget, Limits
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from messagestore.session import attached_store
from messagestore.spi import (
    LOCAL_STORES,
    ColumnTexts,
    Description,
    Ends,
    Place,
    PlannedRead,
    PlannedWrite,
    Proven,
    Range,
    StagedFile,
    StoreReader,
    Stores,
    StoreWriter,
    Write,
    encode,
    remote,
    store_host_of,
)
from messagestore.spi.remote import RemoteReader, RemoteStaging
from messagestore.spi.wire import failures
from small import SMALL, bodies, columns, filled

Q0, Q1 = ("t", 0), ("t", 1)
APP = "app"


class Wire:
    """Something behind a wire: what goes in and what comes out is copied through bytes, errors by the table of the
    real one.
    """

    def __init__(self, there: Any) -> None:
        self._there = there

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object, **options: object) -> Any:
            arguments, options = travelled((arguments, options))
            with errors_travel():
                found = getattr(self._there, name)(*arguments, **options)
            if isinstance(found, Iterator):
                return self._elements(found)
            if name in ("reader", "writer", "stage"):
                return Wire(found)
            return travelled(found)

        return call

    def ends(self, topics: list[str], since: Ends | None = None, *, names: bool = False) -> Ends:
        """The answer that the caller has stays here; only its token would travel."""
        with errors_travel():
            found: Ends = travelled(self._there.ends(travelled(topics), names=names))
        if since is None:
            return found
        if found.token == since.token:
            return since
        kept = {name: getattr(since, name) for name in ("queues", "topic_names")}
        return replace(found, **{name: value for name, value in kept.items() if value == getattr(found, name)})

    def _elements(self, there: Iterator[Any]) -> Iterator[Any]:
        while True:
            with errors_travel():
                part = next(there, None)
            if part is None:
                return
            yield travelled(part)

    def __enter__(self) -> Wire:
        self._there.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._there.__exit__(*error)


@contextlib.contextmanager
def errors_travel() -> Iterator[None]:
    """An error becomes bytes, and is raised again from these."""
    try:
        yield
    except (StoreError, OSError) as error:
        text = json.dumps(failures.to_json(error))
    else:
        return
    raise failures.from_json(json.loads(text))


def travelled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Served:
    """Stores behind servers of this process: one for each path, from the first question about it on."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}
        self._look_s, remote.LOOK_S = remote.LOOK_S, 0.0  # the tests look again at once
        self._stores = remote.RemoteStores()

    def _url(self, path: str) -> str:
        if path not in self._servers:
            server = self._servers[path] = Server(Service(Hosted(path, SMALL), Limits(streams=4)))
            server.start()
        return self._servers[path].url

    def reader(
        self, path: str, config: StoreConfig | None = None, proven: Proven | None = None, **options: Any
    ) -> StoreReader:
        return self._stores.reader(self._url(path), config, proven, **options)

    def writer(self, path: str, config: StoreConfig, **options: Any) -> StoreWriter:
        return self._stores.writer(self._url(path), config, **options)

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()
        remote.LOOK_S = self._look_s


IMPLEMENTATIONS: dict[str, Callable[[], Stores]] = {
    "local": lambda: LOCAL_STORES,
    "behind a wire": lambda: Wire(LOCAL_STORES),  # type: ignore[dict-item,return-value]
    "served": Served,
}


@pytest.fixture(params=IMPLEMENTATIONS)
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    made = IMPLEMENTATIONS[request.param]()
    yield made
    if isinstance(made, Served):
        made.stop()


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


def numbers(reader: StoreReader, *ranges: Range, **given: Any) -> list[tuple[int, int]]:
    """Queue and number of each message, after its records were decoded."""
    found = []
    for part in reader.gather(ranges, **given):
        batch = part.decoded(("queue_id", "queue_offset", "body"))
        found += zip(batch["queue_id"].to_pylist(), batch["queue_offset"].to_pylist(), strict=True)
    return found


# ---- which store


def test_it_says_which_store_it_is(stores: Stores, root: str, reader: StoreReader) -> None:
    found = reader.describe()
    assert len(found.store_id) == 32
    assert (found.exists, found.queue_counts, found.queue_ids) == (True, {"t": 8}, {})
    assert reader.describe(queues=True).queue_ids["t"] == [0, 1]
    assert reader.describe(["t", "none"], queues=True).queue_ids == {"t": [0, 1]}
    assert reader.describe(["t", "none"]).queue_counts == {"t": 8}
    assert reader.describe([]).queue_counts == {}
    writer = stores.writer(root, SMALL, staging_ttl_s=60.0)
    assert writer.describe().store_id == found.store_id == writer.prepare().store_id
    assert writer.describe().queue_counts == writer.describe(["t", "u"]).queue_counts == {"t": 8}
    assert writer.describe(["u"]).queue_counts == {}


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
    assert reader.ends(["t"], before).queues is before.queues
    add(root, 8, queues=4)
    after = reader.ends(["t"], before)
    assert after.queues == {Q0: 32, Q1: 32, ("t", 2): 2, ("t", 3): 2}
    assert (after.instance, after.restarts, after.shrinks) == (before.instance, {}, {})
    assert reader.ends(["other"]).queues == {}
    assert reader.ends(["t"]).queues == after.queues


def test_an_answer_is_compared_with_the_callers_last_one(root: str, reader: StoreReader) -> None:
    """A caller gets his own object again while nothing has changed, whoever else asks for whatever; the token says so
    to one on another host. A change of another topic is none.
    """
    before = reader.ends(["t"])
    assert reader.ends(["t"], before) is before
    reader.ends(["u"])
    reader.ends(["t"], names=True)
    assert reader.ends(["t"], before) is before
    add(root, 2, topic="u")
    assert reader.ends(["t"], before) is before
    add(root, 2)
    after = reader.ends(["t"], before)
    assert after.token != before.token
    assert (after.queues[Q0], before.queues[Q0]) == (31, 30)
    assert reader.ends(["t"], before).token == after.token


def test_a_reader_keeps_nothing_that_a_caller_needs(reader: StoreReader) -> None:
    """It follows a few sets of topics. One that it has dropped begins anew, and its answers say so."""
    before = reader.ends(["t"])
    for number in range(40):
        reader.ends([f"u{number}"])
    after = reader.ends(["t"], before)
    assert after.instance != before.instance
    assert after.queues == before.queues


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


def test_the_names_of_topics_for_whoever_compares_them_with_a_pattern(root: str, reader: StoreReader) -> None:
    """As topics come and go; never those of a broker or of a group's retries. No pattern is sent."""
    before = reader.ends([], names=True)
    assert (before.topic_names, before.queues) == ({"t"}, {})
    assert reader.ends(["t"]).topic_names is None
    assert reader.ends([], before, names=True) is before
    add(root, 2)
    assert reader.ends([], names=True).topic_names == {"t"}
    for topic in ("u1", "%RETRY%u"):
        add(root, 2, topic=topic)
    after = reader.ends([], before, names=True)
    assert after.topic_names == {"t", "u1"}
    assert reader.ends(["u1"], names=True).queues == {("u1", 0): 1, ("u1", 1): 1}
    assert reader.ends(["%RETRY%u"]).queues == {("%RETRY%u", 0): 1, ("%RETRY%u", 1): 1}


def test_names_are_found_while_many_queues_are_followed_in_the_log(
    root: str, reader: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queues themselves are not asked then: single messages and batches of new topics tell of them."""
    monkeypatch.setattr("messagestore.read.queue_ends.FEW_QUEUES", 0)
    assert reader.ends(["t"], names=True).topic_names == {"t"}
    add(root, 2, topic="u1")
    assert reader.ends(["t"], names=True).topic_names == {"t", "u1"}
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("u2", b"x"))
    assert reader.ends(["t"], names=True).topic_names == {"t", "u1", "u2"}


def test_a_queue_that_was_made_again_is_told_to_each_caller(root: str, reader: StoreReader) -> None:
    """It is as long as before: only where its messages lie tells. Each caller compares with his own last answer."""
    first = reader.ends(["t"])
    remake(root, 30)
    looks = []
    deadline_s = time.monotonic() + 30
    while not any(looks) and time.monotonic() < deadline_s:
        looks.append(reader.ends(["t"]).restarted_since(first))
    assert looks[-1] == {Q0}
    after = reader.ends(["t"])
    assert after.restarted_since(first) == {Q0}
    assert after.restarted_since(after) == set()
    assert after.shrunk_since(first) == set()


def test_a_queue_that_was_shorter_meanwhile_is_told_to_each_caller(root: str, reader: StoreReader) -> None:
    """One caller has seen that it was made again; to another it is as long as ever."""
    first = reader.ends(["t"])
    broker = remake(root, 3, close=False)
    deadline_s = time.monotonic() + 30
    while reader.ends(["t"]).queues[Q0] != 3 and time.monotonic() < deadline_s:
        reader.await_change(0.01)
    for number in range(27):
        broker.put("t", b"more %d" % number, 0)
    broker.close()
    while (after := reader.ends(["t"], first)).queues[Q0] != 30 and time.monotonic() < deadline_s:
        reader.await_change(0.01)
    assert after.queues == first.queues
    assert after.shrunk_since(first) == {Q0}
    assert after.shrunk_since(after) == set()


def remake(root: str, count: int, *, close: bool = True) -> Broker:
    """A broker deletes a queue, and makes it again."""
    broker = Broker(Path(root), SMALL)
    shutil.rmtree(Path(root) / "consumequeue" / "t" / "0")
    broker.next[Q0] = 0
    for number in range(count):
        broker.put("t", b"again %d" % number, 0)
    if close:
        broker.close()
    return broker


def test_the_same_store_in_another_folder_is_another_instance(root: str, reader: StoreReader) -> None:
    """A backup was restored: the reader goes on with it and says so; another store is refused."""
    before = reader.ends(["t"])
    shutil.copytree(root, root + "-backup")
    add(root, 8)
    assert reader.ends(["t"]).queues[Q0] == 34
    shutil.rmtree(root)
    shutil.move(root + "-backup", root)
    after = reader.ends(["t"], before)
    assert after.queues == before.queues
    assert after.instance != before.instance
    assert reader.ends(["t"], after) is after
    shutil.rmtree(root)
    with pytest.raises(NotAStoreError):
        reader.ends(["t"])
    filled(Path(root), 2)
    for _ in range(2):
        with pytest.raises(StoreWentBackwardsError, match=r"found store \w+ in place of store"):
            reader.ends(["t"])


def test_readers_of_the_same_store_are_two_instances(stores: Stores, root: str, reader: StoreReader) -> None:
    """As after a restart of a server: what was compared with one says nothing about the other."""
    another = stores.reader(root)
    assert another.ends(["t"]).queues == reader.ends(["t"]).queues
    assert another.ends(["t"]).instance != reader.ends(["t"]).instance
    another.close()


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

    def seek(after_ms: int | None = None, physical_offset: int | None = None) -> int:
        return reader.seek({Q0: after_ms}, physical_offset=physical_offset)[Q0]

    assert [seek(physical_offset=place) for place in places] == list(range(30))
    assert seek(physical_offset=places[-1] + 1) == 30
    assert seek(times[0] - 1) == 0
    assert seek(times[-1]) == 30
    later = sum(time_ms <= times[9] for time_ms in times)
    assert seek(times[9]) == later
    assert seek(times[-1], places[5]) == 5
    assert seek(times[0] - 1, places[-1]) == 0
    assert seek() == 30
    assert reader.seek({Q0: times[0] - 1, Q1: times[-1] + 60_000, ("t", 9): None}) == {Q0: 0, Q1: 30, ("t", 9): 0}
    assert reader.seek({}) == {}


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
    assert reader.find(["t"], ["k8"]) == {Q0: [4]}
    assert reader.find(["t"], ["k8", "k9", "k8", "none"]) == {Q0: [4], Q1: [4]}
    add(root, 300, key="same")
    with MessageStore.open(root, SMALL) as store:
        for _ in range(200):
            store.put_message(Message("t", b"x", queue_id=1, keys=["many", "k8"]))
    found = reader.find(["t"], ["many"])
    assert found == {Q1: list(range(180, 380))}
    assert reader.find(["t"], ["k8"]) == {Q0: [4], Q1: list(range(180, 380))}
    for file in Path(root, "index").iterdir():
        file.unlink()
    assert reader.find(["t"], ["many"]) == found


def test_some_of_the_gathered_messages(reader: StoreReader) -> None:
    (part,) = reader.gather([Range(*Q0, 10, 20)])
    some = part.rows(3, 5)
    assert [message.queue_offset for message in some.messages()] == [13, 14]
    assert some.decoded(("queue_offset", "body"))["queue_offset"].to_pylist() == [13, 14]


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A server is ahead of its client: it sends one part, and goes on when the test says so."""
    event = threading.Event()
    monkeypatch.setattr(Budget, "pace", lambda *_: float(not event.wait(60)))
    yield event
    event.set()


def test_what_retention_has_taken_is_counted(root: str, reader: StoreReader, go_on: threading.Event) -> None:
    """All before the gap is given; the error says where to go on."""
    add(root, 400, queues=1)
    ends = reader.ends(["t"]).queues
    parts = reader.gather([Range(*Q1, 29, 30), Range(*Q0, 0, ends[Q0])], max_rows=10)
    assert next(parts).queue_id == 1
    for segment in sorted((Path(root) / "commitlog").iterdir())[:3]:
        segment.unlink()
    go_on.set()
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
    found, missing, one = reader.sizes([Range(*Q0, 3, 30), Range("t", 9, 0, 3), Range(*Q0, 4, 5)])
    assert found.tolist() == part.sizes.tolist()
    assert (missing.tolist(), one.tolist()) == ([], part.sizes[1:2].tolist())
    assert reader.sizes([]) == []


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
        proven, nothing = reader.proven([ranges, []])
        if isinstance(reader, RemoteReader):
            assert nothing is proven is None  # its server knows
        else:
            assert nothing is not None and proven is not None and len(nothing.units) < len(proven.units)
        assert sum(each.count for each in ranges) == 20
        task = stores.reader(root, proven=proven)
        assert len(numbers(task, *ranges)) == 20
        assert task.places(found.queues) == reader.places(found.queues)
    filled(Path(root + "-2"), 4)
    assert stores.reader(root + "-2").proven([[Range(*Q0, 0, 2)], []]) == [None, None]


def planned_at(reader: StoreReader, *ranges: Range) -> PlannedRead:
    """As a source plans a read of these ranges."""
    places = reader.places({(each.topic, each.queue_id): each.end for each in ranges})
    last = max(places.values(), key=lambda place: place.end)
    return PlannedRead(reader.describe().store_id, last.end, reader.prove_last(last.physical_offset, last.size))


def test_a_read_is_compared_with_its_plan(stores: Stores, root: str, reader: StoreReader) -> None:
    """In the store and the log in which it was planned, nothing else is asked; in others it is refused."""
    ranges = [Range(*Q0, 0, 30), Range(*Q1, 0, 30)]
    planned = planned_at(reader, *ranges)
    add(root, 8)
    assert len(numbers(reader, *ranges, planned=planned)) == 60
    assert len(numbers(reader, *ranges, planned=PlannedRead("", 0, None))) == 60
    assert numbers(reader, planned=planned) == []
    with pytest.raises(NotAStoreError, match=f"found another store, {planned.store_id}"):
        numbers(reader, *ranges, planned=replace(planned, store_id="0" * 32))
    assert planned.last is not None
    with pytest.raises(StoreWentBackwardsError, match=r"the record at physical offset .* has changed"):
        numbers(reader, *ranges, planned=replace(planned, last=replace(planned.last, crc=1)))
    with pytest.raises(StoreWentBackwardsError, match="message 29 of t/1 has changed"):
        numbers(reader, *ranges, planned=replace(planned, physical_offset=planned.physical_offset - 1, last=None))


def test_a_log_that_changes_during_a_read_is_noticed_at_its_end(
    root: str, reader: StoreReader, go_on: threading.Event
) -> None:
    """What was read until then may belong to another log: the last answer is an error, also after a gap."""
    add(root, 300)
    ends = reader.ends(["t"]).queues
    for gap in (False, True):
        go_on.clear()
        ranges = [Range(*Q0, 0, ends[Q0])]
        planned = planned_at(reader, *ranges)
        parts = reader.gather(ranges, planned=planned, max_rows=10)
        next(parts)
        assert planned.last is not None
        first, at = divmod(planned.last.position, SMALL.mapped_file_size_commit_log)
        last = Path(root, "commitlog", f"{first * SMALL.mapped_file_size_commit_log:020d}")
        if gap:
            for segment in sorted((Path(root) / "commitlog").iterdir())[:2]:
                segment.unlink()
        with last.open("r+b") as file:
            file.seek(at + 30)
            before = file.read(3)
            file.seek(at + 30)
            file.write(bytes(byte ^ 1 for byte in before))
            file.flush()
            go_on.set()
            with pytest.raises(StoreWentBackwardsError, match="since this micro-batch was planned"):
                list(parts)
            file.seek(at + 30)
            file.write(before)


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


def test_a_view_that_there_is_not(reader: StoreReader) -> None:
    with pytest.raises(ConfigError, match="found 'secrets'; allowed are topics, queues"):
        reader.view("secrets")


def test_views_for_people_and_monitoring_systems(stores: Stores, root: str, reader: StoreReader) -> None:
    """The apps with their next versions, and one row each for the status and for the figures."""
    writer, store_id = writer_of(stores, root)
    writer.commit([stage(writer, store_id, [b"1", b"2"])], batch(0), store_id, dead_letter_topic="t")
    (figures,), _ = reader.view("figures")
    assert figures["counters"]["deadLetters:t"] == 1
    (app,), faults = reader.view("apps")
    assert (app["app"], app["lastVersion"], app["lastRows"], app["nextVersion"], faults) == (APP, 0, 2, 1, [])
    (status,), faults = reader.view("status")
    assert (status["storeId"], status["messages"], status["batches"], faults) == (store_id, 62, 1, [])
    assert status["topics"][0]["queues"]["1"]["maxOffset"] >= 30
    (figures,), faults = reader.view("figures")
    assert (figures["storeId"], figures["batches"], figures["apps"][0]["lastRows"], faults) == (store_id, 1, 2, [])
    assert list(figures["topics"][0]) == ["topic", "messagesIn", "messages", "end"]


def test_how_far_queues_reach_and_where_they_were_at_a_time(root: str, reader: StoreReader) -> None:
    rows, faults = reader.offsets()
    assert [(row["topic"], row["queueId"], row["minOffset"], row["maxOffset"]) for row in rows] == [
        ("t", 0, 0, 30),
        ("t", 1, 0, 30),
    ]
    assert faults == []
    (middle,) = (part.decoded(("store_timestamp_ms",)) for part in reader.gather([Range("t", 0, 20, 21)]))
    at_ms = middle["store_timestamp_ms"][0].as_py()
    rows, _ = reader.offsets(["t", "t"], at_ms)
    assert [row["queueId"] for row in rows] == [0, 1]  # each queue once, however often its topic is named
    assert rows[0]["offset"] <= 20 and rows[0]["storeTimestamp"] >= at_ms
    for outside_ms, wanted in ((1 << 62, (30, None)), (-(1 << 62), (0, rows[0]["storeTimestamp"]))):
        row = reader.offsets(["t"], outside_ms)[0][0]
        assert row["offset"] == wanted[0] and (row["storeTimestamp"] is None) == (wanted[1] is None)
    with pytest.raises(UnknownTopicError, match=r"topic 'other' is not in the store. Its topics are: t"):
        reader.offsets(["t", "other"])


def test_how_far_a_reader_is_behind(root: str, reader: StoreReader) -> None:
    """Bytes are those of the records; what is wrong with the reader's place is said in words."""
    (sizes,) = reader.sizes([Range("t", 0, 10, 30)])
    rows, faults = reader.lag({Q0: 10, Q1: 40}, ["t"])
    assert [(row["queueId"], row["lag"], row["beyond"]) for row in rows] == [(0, 20, 0), (1, 30, 10)]
    assert rows[0]["lagBytes"] == sizes.sum()
    assert rows[0]["oldestUnread"] >= rows[1]["oldestUnread"] > 1_600_000_000_000
    assert len(faults) == 1 and faults[0].startswith("t/1: the reader is at 40, but the queue ends at 30")
    assert [row["lag"] for row in reader.lag({}, ["t"])[0]] == [30, 30]
    assert reader.lag({}, []) == ([], [])


def test_a_place_that_no_queue_can_have(reader: StoreReader) -> None:
    """It comes from a file that somebody may have edited, or from a client that lies."""
    rows, faults = reader.lag({Q0: (1 << 63) - 1, Q1: -5, ("no such topic", 0): 3, ("t", 1 << 40): 2})
    assert {(row["topic"], row["queueId"]) for row in rows} >= {Q0, Q1}
    assert faults


def test_how_far_a_group_is_behind(root: str, reader: StoreReader) -> None:
    reader.publish_progress("g", {Q0: 7, Q1: 30})
    rows, faults = reader.group_lag("g")
    assert [(row["committedOffset"], row["lag"]) for row in rows] == [(7, 23), (30, 0)]
    assert (faults, reader.group_lag("another")) == ([], ([], []))


def test_a_store_without_a_message(stores: Stores, tmp_path: Path) -> None:
    path = str(tmp_path / "empty")
    MessageStore.open(path, SMALL).close()
    with contextlib.closing(stores.reader(path)) as store:
        for name in ("topics", "queues", "groups", "batches", "apps"):
            assert store.view(name) == ([], [])
        (status,), faults = store.view("status")
        assert (status["messages"], status["left"], faults) == (0, "closed", [])
        assert store.view("figures")[1] == []
        assert (store.offsets(), store.lag({}), store.group_lag("g")) == (([], []),) * 3
    attached_store(path).detach()


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


@pytest.mark.parametrize("app_id", [APP, None])
def test_the_same_commit_is_sent_twice(stores: Stores, root: str, app_id: str | None) -> None:
    """An answer was lost: the same request with the same files, which are gone by then, is known, also after an abort,
    after the store was closed, after a later batch, and for a process that has never seen the store.
    """
    for number in range(2):  # the first batch creates the store
        writer = stores.writer(root, SMALL, staging_ttl_s=3600.0)
        found = writer.prepare()
        planned = PlannedWrite(f"{number:032x}", found.log_end)
        files = [stage(writer, found.store_id, bodies(6, start=10 * number)), stage(writer, found.store_id, bodies(3))]
        request = batch(number if app_id else 0, app_id)
        first = writer.commit(files, request, found.store_id, planned=planned)
        assert (first.result.status, first.result.row_count) == ("appended", 9)
        assert staged_names(root) == []

        known = replace(first, result=replace(first.result, status="known", appended_bytes=0))
        assert writer.commit(files, request, found.store_id, planned=planned) == known
        writer.abort([file.name for file in files], found.store_id)
        assert writer.commit(files, request, found.store_id, planned=planned) == known
        attached_store(root).detach()
        another = stores.writer(root, SMALL, staging_ttl_s=3600.0)
        assert another.commit(files, request, found.store_id, planned=planned) == known
        another.commit([stage(writer, first.store_id, bodies(1))], batch(number, "another"), first.store_id)
        assert another.commit(files, request, found.store_id, planned=planned) == known
    assert bodies_in(stores, root) == sorted(
        [*bodies(6), *bodies(3), *bodies(6, start=10), *bodies(3), *bodies(1), *bodies(1)]
    )


def test_a_batch_without_an_app_id_that_comes_with_other_rows(stores: Stores, root: str) -> None:
    """Its random id is known: nothing is written. Another id is another batch, also with the same rows."""
    writer, store_id = writer_of(stores, root)
    planned = PlannedWrite("5" * 32, 0)
    store_id = writer.commit([stage(writer, store_id, bodies(6))], batch(0, None), store_id, planned=planned).store_id
    with pytest.raises(BatchConflictError, match=r"with 6 rows .* again with 5 rows"):
        writer.commit([stage(writer, store_id, bodies(5))], batch(0, None), store_id, planned=planned)
    other = replace(planned, batch_id="6" * 32, log_end=writer.prepare().log_end)
    files = [stage(writer, store_id, bodies(6))]
    assert writer.commit(files, batch(0, None), store_id, planned=other).result.status == "appended"
    assert bodies_in(stores, root) == sorted(2 * bodies(6))
    with pytest.raises(ConfigError, match="32 hex digits"):
        PlannedWrite("app", 0)


def test_a_store_was_restored_after_a_write_was_planned(stores: Stores, root: str) -> None:
    """The copy ends before the place where the write was planned: the batch may have been in what is lost."""
    filled(Path(root), 2)
    writer, store_id = writer_of(stores, root)
    shutil.copytree(root, root + "-backup")
    add(root, 20)
    planned = PlannedWrite("7" * 32, writer.prepare().log_end)
    files = [stage(writer, store_id, bodies(6))]
    attached_store(root).detach()
    shutil.move(Path(root, "spark", "staging", files[0].name), root + "-backup/spark/staging")
    shutil.rmtree(root)
    shutil.move(root + "-backup", root)
    with pytest.raises(StoreWentBackwardsError, match="when this write was planned"):
        writer.commit(files, batch(0, None), store_id, planned=planned)
    assert len(bodies_in(stores, root)) == 2


@pytest.mark.parametrize("exists", [False, True])
def test_no_name_leads_to_another_file(stores: Stores, root: str, tmp_path: Path, exists: bool) -> None:
    """A path, a parent, a file that is not staged: nothing is read or deleted, neither it nor what else was named."""
    if exists:
        filled(Path(root), 2)
    writer, store_id = writer_of(stores, root)
    good = stage(writer, store_id, bodies(2))
    letter, half = tmp_path / "letter", Path(root, "spark", "staging", good.name.replace(".staged", ".writing"))
    letter.write_text("dear")
    half.write_text("half")
    (tmp_path / good.name).write_text("the same name elsewhere")
    for name in (str(letter), "../../../letter", f"{tmp_path}/{good.name}", f"../../../{good.name}", half.name, ""):
        with pytest.raises(ConfigError, match="found the name"):
            writer.abort([good.name, name], store_id)
        with pytest.raises(ConfigError, match="found the name"):
            writer.commit([good, replace(good, name=name)], batch(0), store_id)
    assert staged_names(root) == sorted([good.name, half.name])
    assert letter.exists() and (tmp_path / good.name).exists()
    assert Path(root, "commitlog").exists() is exists


def test_a_file_that_holds_other_rows_than_its_task_said(stores: Stores, root: str) -> None:
    """What a batch is recognised by is compared before anything of it is written."""
    filled(Path(root), 2)
    writer, store_id = writer_of(stores, root)
    staged = stage(writer, store_id, bodies(4))
    for wrong in (replace(staged, row_count=5), replace(staged, digest=1), replace(staged, topics=("u",))):
        with pytest.raises(CorruptionError, match="rows with digest"):
            writer.commit([wrong], batch(0), store_id)
    assert writer.commit([staged], batch(0), store_id).result.status == "appended"


def test_a_staged_file_that_is_not_what_was_staged(stores: Stores, root: str) -> None:
    """A power cut, or another hand: nothing of the batch is written."""
    filled(Path(root), 2)
    writer, store_id = writer_of(stores, root)
    good, bad = stage(writer, store_id, bodies(4)), stage(writer, store_id, bodies(4, start=4))
    path = Path(root, "spark", "staging", bad.name)
    path.write_bytes(path.read_bytes()[:-9] + b"something")
    with pytest.raises(ChecksumError):
        writer.commit([good, bad], batch(0), store_id)
    path.unlink()
    with pytest.raises(CorruptionError):
        writer.commit([good, bad], batch(0), store_id)
    assert len(bodies_in(stores, root)) == 2


def test_a_file_that_is_not_finished_goes(stores: Stores, root: str) -> None:
    writer, store_id = writer_of(stores, root)
    with writer.stage(Write("0", "w"), store_id) as staging:
        assert isinstance(staging, RemoteStaging) or len(staged_names(root)) == 1
    Path(root, "spark", "staging").mkdir(parents=True, exist_ok=True)  # this one has sent nothing yet
    assert staged_names(root) == []


def test_abort_deletes_what_was_staged(stores: Stores, root: str) -> None:
    """And what failed attempts of the same write left. A batch that is in the log stays there."""
    for exists in (False, True):
        writer, store_id = writer_of(stores, root)
        write = Write("0", f"aborted {exists}")
        failed, good = (stage(writer, store_id, bodies(4), write) for _ in range(2))
        other = stage(writer, store_id, bodies(4))
        assert len(staged_names(root)) == 3
        writer.abort([good.name], store_id)
        assert staged_names(root) == [other.name]
        assert failed.name != good.name
        writer.abort([good.name], store_id)
        committed = writer.commit([other], batch(0), store_id)
        writer.abort([other.name], committed.store_id)
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
            writer.abort([staged.name], store_id)
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
            writer.abort([staged.name], store_id)
        assert Path(root).exists() is exists
    assert len(bodies_in(stores, root)) == 1


def test_errors_of_a_batch_name_it(stores: Stores, root: str) -> None:
    """Their fields come, too: by them a caller decides what to do."""
    writer, store_id = writer_of(stores, root)
    store_id = writer.commit([stage(writer, store_id, bodies(3))], batch(0), store_id).store_id
    with pytest.raises(BatchConflictError) as conflict:
        writer.commit([stage(writer, store_id, bodies(4))], batch(0), store_id)
    with pytest.raises(LostBatchesError) as lost:
        writer.commit([stage(writer, store_id, bodies(4))], batch(5), store_id)
    assert [(error.value.app_id, error.value.version) for error in (conflict, lost)] == [(APP, 0), (APP, 5)]
    files = [stage(writer, store_id, bodies(4))]
    Path(root, "spark", "staging", files[0].name).unlink()
    with pytest.raises(CorruptionError, match="no file") as gone:
        writer.commit(files, batch(1), store_id)
    assert gone.value.path.endswith(files[0].name)


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
