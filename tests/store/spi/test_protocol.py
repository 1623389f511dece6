"""What client and server say to each other: the examples of PROTOCOL.md, values, errors, frames, and what is refused."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import typing
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from messagestore import (
    BatchRequest,
    MessageIllegalError,
    ProtocolError,
    StoreConfig,
    StoreFullError,
    StoreLockedError,
)
from messagestore.errors import StoreUnavailableError
from messagestore.format.gathered import Gathered
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.serve.hosted import REPORTS, Hosted, bound
from messagestore.serve.server import Server
from messagestore.serve.service import Service, _Request
from messagestore.spi import ColumnTexts, Description, Ends, Range, StagedFile, Write, encode, store_host_of
from messagestore.spi.connections import Connection
from messagestore.spi.interface import PlannedRead, Report, StoreReader, StoreWriter
from messagestore.spi.location import RemoteSettings
from messagestore.spi.remote import RemoteStores
from messagestore.spi.wire import failures, frames, parts, values, versions
from small import SMALL, bodies, columns, delayed, filled

PROTOCOL = (Path(__file__).resolve().parents[3] / "store" / "PROTOCOL.md").read_text(encoding="utf-8")


def examples() -> list[tuple[str, str, Any]]:
    """Verb, kind and JSON of each example; the verb is the last heading."""
    found, verb = [], ""
    for heading, kind, text in re.findall(
        r"^### `(.*?)`$|^```json (\w+)\n(.*?)^```$", PROTOCOL, re.MULTILINE | re.DOTALL
    ):
        verb = heading or verb
        if kind:
            found.append((verb, kind, json.loads(text)))
    return found


def of_seam(verb: str) -> tuple[type, str] | None:
    kind, _, name = verb.rpartition("/")
    if verb in ("hello", "reader/close"):
        return None
    return (StoreReader, name) if kind == "reader" or verb in ("gather", *REPORTS) else (StoreWriter, name)


class _Asked:
    """The least of an exchange that a request looks at before it is answered."""

    path, method, client, size = "", "POST", "here", 0

    def header(self, name: str) -> str:
        return ""


# ---- the document


def test_each_verb_has_its_examples():
    service = Service(Hosted("nowhere", SMALL))
    verbs = set(_Request(service, _Asked())._calls())  # type: ignore[arg-type]
    assert verbs == {verb for verb, _, _ in examples() if verb}
    for verb in verbs:
        kinds = [kind for each, kind, _ in examples() if each == verb]
        assert ("request" in kinds or kinds[0] == "frame") and len(kinds) >= 2


@pytest.mark.parametrize(("verb", "kind", "found"), examples(), ids=lambda each: each if isinstance(each, str) else "")
def test_the_examples_are_what_is_spoken(verb: str, kind: str, found: Any):
    """Each is read by the code of its receiver, and has the types of the seam."""
    seam = of_seam(verb)
    if kind == "error":
        error = failures.from_json(found["error"])
        assert isinstance(error, StoreLockedError) and error.holder == "pid 7"
    elif kind == "request" and seam is not None:
        arguments = values.from_json(found, strict=True)["arguments"]
        arguments.pop("token", None)
        assert bound(*seam, arguments) == arguments
    elif kind == "answer" and seam is not None:
        wanted = StagedFile if verb == "stage" else typing.get_type_hints(getattr(*seam))["return"]
        values.checked(values.from_json(found["value"], strict=False), wanted, verb)
    elif kind == "frame" and verb in REPORTS:
        assert found.keys() <= {"rows", "done"}
        some = values.from_json(found.get("rows", []), strict=False)
        values.checked((some, found.get("done", {"faults": []})["faults"]), Report, verb)
    elif kind == "frame":
        text = json.dumps(found).encode()
        head, buffers = frames.parsed_head(text)
        assert head.keys() & {"part", "rows", "stage", "finish", "alive", "done"}
        said = [[name, size] if crc is None else [name, size, crc] for name, (size, crc) in buffers.items()]
        assert said == found.get("buffers", [])
        if "stage" in head:
            bound(StoreWriter, "stage", values.from_json(head["stage"], strict=True))


def test_the_examples_have_all_that_a_client_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Who writes another client or server from this page would miss what is not there."""
    sent, send = dict[str, set[str]](), Connection._send

    def noted(connection: Connection, verb: str, text: bytes) -> None:
        sent.setdefault(verb, set()).update(json.loads(text).get("arguments", {}))
        send(connection, verb, text)

    monkeypatch.setattr(Connection, "_send", noted)
    server = Server(Service(Hosted(str(filled(tmp_path / "store", 10)), SMALL)))
    server.start()
    try:
        stores, range_ = RemoteStores(RemoteSettings()), Range("t", 0, 0, 5)
        reader, writer = stores.reader(server.url), stores.writer(server.url, SMALL, staging_ttl_s=60)
        reader.ends(["t"], reader.ends(["t"]), names=True)
        reader.broker_name()
        reader.begins([("t", 0)])
        reader.places({("t", 0): 5})
        reader.seek({("t", 0): 5}, physical_offset=0)
        reader.prove_last(0, 100, with_time=True)
        reader.mean_sizes([range_])
        reader.sizes([range_])
        reader.find(["t"], ["k1"])
        reader.publish_progress("g", {("t", 0): 1})
        reader.published_progress("g")
        list(reader.gather([range_], planned=PlannedRead(reader.describe().store_id), tags_codes=frozenset([1])))
        reader.view("topics")
        reader.offsets(["t"], 0)
        reader.lag({("t", 0): 1}, ["t"])
        reader.group_lag("g")
        reader.close()

        writer.describe(["t"])
        found, host = writer.prepare(), store_host_of(SMALL)
        with writer.stage(Write("0", "k"), found.store_id) as staging:
            staging.write(encode(ColumnTexts(columns(bodies(2))), limits=SMALL, store_host=host, born_host=host))
            staged = staging.finish()
        writer.commit([staged], BatchRequest("app", 0), found.store_id, dead_letter_topic="dead-letters")
        writer.abort([staged.name], found.store_id)
    finally:
        server.stop()

    written = {verb: set(request.get("arguments", {})) for verb, kind, request in examples() if kind == "request"}
    assert sent == {verb: written[verb] for verb in sent}
    assert written.keys() - sent.keys() == {"hello"}


# ---- values


def test_values_arrive_as_they_were():
    for value in (
        Description("5", frozenset(["a", "b"]), queue_counts={"t": 8}, config=SMALL),
        Ends("5", {("t", 0): 3}, frozenset(["t"]), {("t", 0): 1}, instance="i", serial=1 << 33),
        BatchRequest("app", 3, version_source="spark", origin={"a": [1, None, 2.5]}),
        StagedFile("n", 1, 2, 3, (1 << 64) - 1, ("t",)),
        Range("t", 0, 1, 2),
        {"a": (1, "x", b"\x00\xff"), "b": [None, True]},
    ):
        assert values.from_json(json.loads(json.dumps(values.to_json(value))), strict=True) == value
    sizes = np.array([1, -5, 7], np.int32)
    again = values.from_json(values.to_json(sizes), strict=True)
    assert again.dtype == np.int32 and again.tolist() == [1, -5, 7]
    with pytest.raises(TypeError, match="does not travel"):
        values.to_json(Path("x"))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"$": "Path", "x": 1}, "found the class 'Path'"),
        ({"$": ["Range"]}, "found the class"),
        ({"$pickle": "gASV"}, "allowed are"),
        ({"$tuple": [1], "b": 1}, "beside other keys"),
        ({"$bytes": "%%%"}, r"tag \$bytes"),
        ({"$map": [[1, 2, 3]]}, r"tag \$map"),
        ({"$map": [[{"a": 1}, 2]]}, r"tag \$map"),
        ({"$int32": "AAA="}, r"tag \$int32"),
        ({"$": "Range", "topic": 5, "queue_id": 0, "start": 0, "end": 1}, "Range.topic: found a value of type int"),
        ({"$": "Range", "topic": "t", "queue_id": True, "start": 0, "end": 1}, "Range.queue_id"),
        ({"$": "Range", "topic": "t", "queue_id": 1 << 70, "start": 0, "end": 1}, "Range.queue_id"),
        ({"$": "Range", "topic": "t"}, "a field is missing"),
        ({"$": "Range", "topic": "t", "queue_id": 0, "start": 0, "end": 1, "more": 1}, "found the field 'more'"),
    ],
)
def test_what_is_not_in_the_table_is_refused(found: Any, words: str):
    with pytest.raises(ProtocolError, match=words):
        values.from_json(found, strict=True)


def test_a_client_passes_over_what_a_newer_server_adds():
    found = {"$": "StoreConfig", "max_message_size": 8192, "of_the_next_release": True}
    assert values.from_json(found, strict=False) == StoreConfig(max_message_size=8192)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "'ranges' is missing"),
        ({"ranges": [], "path": "x"}, "found the argument 'path'"),
        ({"ranges": ["t"]}, "gather.ranges"),
        (None, "must be an object"),
    ],
)
def test_arguments_that_the_seam_does_not_have(arguments: Any, words: str):
    with pytest.raises(ProtocolError, match=words):
        bound(StoreReader, "gather", arguments)


# ---- errors


def test_an_error_of_the_server_arrives():
    full = StoreFullError("no room", path="/p", needed=9, free=8)
    full.errno = 28
    full.add_note("in the log")
    again = failures.from_json(json.loads(json.dumps(failures.to_json(full, "42"))))
    assert isinstance(again, StoreFullError)
    assert (str(again), again.needed, again.free, again.errno) == (str(full), 9, 8, 28)
    assert again.__notes__ == ["in the log", "request 42 in the log of the store's server"]
    denied = failures.from_json(failures.to_json(PermissionError(13, "Permission denied", "/p")))
    assert isinstance(denied, PermissionError) and (denied.errno, denied.filename) == (13, "/p")


def test_an_error_of_no_known_class_does_not_tell_what_is_inside_the_server():
    found = failures.to_json(KeyError("secret"), "42")
    assert "secret" not in json.dumps(found)
    assert isinstance(failures.from_json(found), StoreUnavailableError)
    for nonsense in (
        None,
        [],
        {},
        {"class": "os.system", "text": "x", "fields": []},
        {"class": "X", "text": "", "fields": {}},
    ):
        assert isinstance(failures.from_json(nonsense), StoreUnavailableError)


def test_versions_that_have_nothing_in_common_are_both_named():
    assert versions.check("1-3", "client") == 1
    with pytest.raises(ProtocolError, match=r"the server speaks protocol 2-3, and this side 1-1"):
        versions.check("2-3", "server")
    for nothing in ("", "1", "x-y", "99999-1"):
        with pytest.raises(ProtocolError, match="does not say"):
            versions.check(nothing, "client")


# ---- frames


def read(data: bytes, head_limit: int = 4096, limit: int = 1 << 20) -> frames.Frame:
    left = memoryview(data)

    def take(view: memoryview) -> None:
        nonlocal left
        if len(view) > len(left):
            raise EOFError
        view[:] = left[: len(view)]
        left = left[len(view) :]

    return frames.read(take, head_limit, limit, lambda _: None)


def test_a_frame_arrives_whole():
    data = b"".join(frames.packed({"a": 1}, [("x", np.arange(3, dtype="<i4")), ("empty", b""), ("y", b"abc")]))
    found = read(data)
    assert found.head == {"a": 1}
    assert frames.numbers(found, "x", "<i4").tolist() == [0, 1, 2]
    assert (len(found.buffers["empty"]), found.buffers["y"].tobytes()) == (0, b"abc")
    for length in range(len(data)):
        with pytest.raises(EOFError):
            read(data[:length])


def test_no_memory_is_taken_for_a_frame_over_the_limit():
    """Only its head has been read when it is refused."""
    asked = []
    data = b"".join(frames.packed({"buffers": [["x", 1 << 40]]}))
    for limit in (1 << 20, 1 << 39):
        with pytest.raises(ProtocolError, match="allowed are"):
            frames.read(_filled_from(data), 4096, limit, asked.append)
    with pytest.raises(ProtocolError, match="found a head of"):
        read(b"\xff\xff\xff\x7f" + data)
    assert asked == []


def _filled_from(data: bytes) -> Any:
    at = 0

    def take(view: memoryview) -> None:
        nonlocal at
        view[:] = data[at : at + len(view)]
        at += len(view)

    return take


@pytest.mark.parametrize(
    "head",
    [b"[]", b"{", b"\xff\xff", b'{"buffers": 5}', b'{"buffers": [["a", -1]]}', b'{"buffers": [["a", 1], ["a", 1]]}',
     b'{"buffers": [[["a"], 1]]}', b'{"buffers": [["a", 1, "2"]]}', b'{"buffers": [["a", 1, 2, 3]]}', b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}"],
)  # fmt: skip
def test_a_head_that_is_none(head: bytes):
    with pytest.raises(ProtocolError, match="frame:"):
        read(len(head).to_bytes(4, "little") + head)


# ---- rows and gathered records


def rows_frame(count: int = 10) -> bytes:
    host = store_host_of(SMALL)
    rows = encode(ColumnTexts(columns(bodies(count))), limits=SMALL, store_host=host, born_host=host)
    return b"".join(parts.pack_rows(rows))


def test_rows_arrive_as_they_were():
    host = store_host_of(SMALL)
    rows = encode(ColumnTexts(columns(bodies(10))), limits=SMALL, store_host=host, born_host=host)
    again = parts.unpack_rows(read(b"".join(parts.pack_rows(rows))))
    assert (again.run_topics, again.digest, again.property_crc) == (rows.run_topics, rows.digest, rows.property_crc)
    for name in (
        "run_queue_ids",
        "run_counts",
        "sizes",
        "physical_offsets",
        "tags_codes",
        "key_hashes",
        "key_counts",
        "data",
    ):
        assert np.array_equal(getattr(again, name), getattr(rows, name))


@pytest.mark.parametrize(
    ("real_queues", "fault"),
    [
        ([["t", 0], ["t", 1]], ""),
        ([], "delayed messages wait there"),
        ([[SCHEDULE_TOPIC, 0]], "delayed messages wait there"),
        ([["t", -1]], "queue"),
        ([["t", 1 << 40]], "queue"),
    ],
)
def test_rows_may_wait_in_the_topic_of_delayed_messages_if_they_go_to_another_one(
    real_queues: list[list[Any]], fault: str
):
    host = store_host_of(SMALL)
    rows = encode(ColumnTexts(delayed([1, 2])), limits=SMALL, store_host=host, born_host=host)
    frame = read(b"".join(parts.pack_rows(rows)))
    frame.head["rows"]["real_queues"] = real_queues
    if not fault:
        again = parts.unpack_rows(frame)
        assert (again.run_topics, again.real_queues) == (rows.run_topics, rows.real_queues)
    else:
        with pytest.raises(MessageIllegalError, match=fault):
            parts.unpack_rows(frame)


def changed(name: str, change: Any) -> frames.Frame:
    """A frame of rows with one buffer changed, and a CRC that is right all the same: a client that lies."""
    frame = read(rows_frame())
    frame.buffers[name] = change(frame.buffers[name].copy())
    return frame


def with_number(index: int, value: int, kind: str) -> Any:
    def change(buffer: Any) -> Any:
        size = np.dtype(kind).itemsize
        buffer[index * size : (index + 1) * size] = np.array([value], kind).view(np.uint8)
        return buffer

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sizes", with_number(0, -1, "<i4")),
        ("sizes", with_number(0, 1 << 30, "<i4")),
        ("sizes", with_number(0, 95, "<i4")),
        ("sizes", lambda buffer: buffer[:-4]),
        ("data", lambda buffer: buffer[:-1]),
        ("data", with_number(0, 7, "<i4")),
        ("data", with_number(1, 7, "<i4")),
        ("data", with_number(3, 7, "<i4")),
        ("run_counts", with_number(0, 1 << 20, "<i4")),
        ("run_counts", with_number(0, -3, "<i4")),
        ("run_queue_ids", with_number(0, 3, "<i4")),
        ("run_queue_ids", lambda buffer: buffer[:-4]),
        ("key_counts", with_number(0, -1, "<i4")),
        ("key_counts", with_number(0, 1 << 30, "<i4")),
        ("key_hashes", lambda buffer: buffer[:-4]),
        ("tags_codes", lambda buffer: buffer[:-3]),
    ],
)
def test_rows_that_lie_are_refused(name: str, change: Any):
    """What is staged is believed by the writer, so a client cannot stage arrays that lead out of their data."""
    with pytest.raises(ProtocolError):
        parts.unpack_rows(changed(name, change))


def test_rows_that_were_changed_on_their_way():
    data = bytearray(rows_frame())
    data[-1] ^= 1
    with pytest.raises(ProtocolError, match=r"the CRC of the buffer 'key_counts' is [0-9a-f]{8}, and its head says"):
        read(bytes(data))


def test_rows_without_a_crc_are_refused():
    frame = read(rows_frame())
    del frame.crcs["sizes"]
    with pytest.raises(ProtocolError, match="must have a CRC"):
        parts.unpack_rows(frame)


@pytest.mark.parametrize("size", [0, 1, frames.BLOCK, 2 * frames.BLOCK + 1])
def test_a_buffer_has_the_crc_of_all_its_blocks(size: int):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    found = read(b"".join(frames.packed({"a": 1}, [("x", data)], with_crcs=True)))
    assert np.array_equal(found.buffers["x"], data) and found.crcs == {"x": zlib.crc32(data)}


def test_a_frame_arrives_whole_if_it_is_taken_in_small_pieces():
    sender, receiver = socket.socketpair()
    data = np.random.default_rng(1).integers(0, 256, 3 * frames.BLOCK + 1, np.uint8)
    pieces = frames.packed({"a": 1}, [("y", data[:9]), ("x", data)])

    def send() -> None:
        with sender:
            sender.settimeout(60.0)
            frames.send(sender, pieces)

    with receiver:
        sending = threading.Thread(target=send)
        sending.start()
        assert b"".join(iter(lambda: receiver.recv(1000), b"")) == b"".join(pieces)
        sending.join()


def test_who_takes_a_block_too_slowly_is_not_served():
    """Each byte that is taken would let a client keep a stream for another time-out."""
    sender, receiver = socket.socketpair()
    ended = threading.Event()

    def take() -> None:
        while not ended.wait(0.01) and receiver.recv(2048):
            pass

    with sender, receiver:
        sender.settimeout(0.5)
        taking = threading.Thread(target=take)
        taking.start()
        with pytest.raises(TimeoutError):
            frames.send(sender, [memoryview(bytes(64 * frames.BLOCK))])
        ended.set()
        taking.join()


def test_random_damage_of_a_frame_is_refused_or_harmless():
    """Never another exception, and never rows that do not fit."""
    whole, randoms = bytearray(rows_frame()), random.Random(1)
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(randoms.randrange(1, 4)):
            data[randoms.randrange(len(data))] = randoms.randrange(256)
        try:
            found = parts.unpack_rows(read(bytes(data)))
        except (ProtocolError, EOFError, KeyError):
            refused += 1
        except Exception as error:
            if type(error).__name__ != "MessageIllegalError":
                raise
            refused += 1
        else:
            assert found.row_count == 10
    assert refused > 300


def gathered(*, gaps: bool, some: bool, renumbered: bool) -> Gathered:
    sizes = np.array([100, 120, 90], np.int32)
    places = np.array([1000, 1100 + 30 * gaps, 1220 + 30 * gaps], np.int64)
    start = places[0]
    numbers = np.array([5, 7, 8], np.int64) if some else np.arange(5, 8)
    data = np.random.default_rng(1).integers(0, 256, int(places[-1] - start) + 90, np.uint8)
    marks = np.array([False, True, False]) if renumbered else None
    return Gathered("t", 3, 5, 9 if some else 8, numbers, places, sizes, data, places - start, "p", marks)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("renumbered", [False, True])
def test_gathered_records_arrive_as_they_were(gaps: bool, some: bool, renumbered: bool):
    part = gathered(gaps=gaps, some=some, renumbered=renumbered)
    again = parts.unpack_gathered(read(b"".join(parts.pack_gathered(part))))
    assert (again.topic, again.queue_id, again.start, again.end, again.path) == ("t", 3, 5, part.end, "p")
    for name in ("queue_offsets", "physical_offsets", "sizes"):
        assert np.array_equal(getattr(again, name), getattr(part, name))
    for one, other in zip(again.positions, part.positions, strict=True):
        assert np.array_equal(again.data[one : one + 90], part.data[other : other + 90])
    assert (again.renumbered is None) == (not renumbered)


def test_gathered_records_outside_their_data_are_refused():
    """A server that lies cannot make its client read beyond a buffer."""
    frame = read(b"".join(parts.pack_gathered(gathered(gaps=True, some=False, renumbered=False))))
    frame.buffers["positions"].view("<i8")[2] = 1 << 40
    with pytest.raises(ProtocolError, match="outside its data"):
        parts.unpack_gathered(frame)


def test_a_write_is_what_a_task_gets():
    assert values.from_json(values.to_json(Write("0", "k", 3)), strict=True) == Write("0", "k", 3)
