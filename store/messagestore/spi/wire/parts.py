"""Rows and gathered records as frames.

Whatever can be computed is left out: queue offsets that follow one another, and the places of records that lie back to
back. The server does no work for a single record when it sends. What a client stages is checked before it is written to
a file, because the writer that appends the file believes what it says: the arrays must fit each other, and a record of
the stated size and queue must begin at each place. What is inside a record is the client's responsibility.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import ProtocolError
from messagestore.format.gathered import Gathered
from messagestore.format.layout import MAGIC_V1, MAGIC_V2, RECORD_HEAD
from messagestore.format.message import check_queue_id, check_topic
from messagestore.format.rows import SCHEDULE_TOPIC, Rows
from messagestore.spi.wire.frames import Frame, numbers, packed
from messagestore.spi.wire.values import checked

# ---- gathered records


def pack_gathered(part: Gathered) -> list[memoryview]:
    """The frame of some messages of a queue."""
    head: dict[str, Any] = {
        "topic": part.topic,
        "queue": part.queue_id,
        "start": part.start,
        "end": part.end,
        "path": part.path,
    }

    buffers: list[tuple[str, Any]] = [("sizes", part.sizes.astype("<i4", copy=False))]
    if len(part.sizes) != part.end - part.start:
        buffers.append(("queue_offsets", part.queue_offsets.astype("<i8", copy=False)))
    places = part.physical_offsets
    if len(places) and _back_to_back(places, part.sizes):
        head["first"] = int(places[0])
    else:
        buffers.append(("physical_offsets", places.astype("<i8", copy=False)))

    if len(places) and not _back_to_back(part.positions, part.sizes):
        buffers.append(("positions", part.positions.astype("<i8", copy=False)))
    if part.renumbered is not None:
        buffers.append(("renumbered", part.renumbered.view(np.uint8)))

    first = int(part.positions[0]) if len(part.positions) else 0
    data = part.data if any(name == "positions" for name, _ in buffers) else part.data[first:]
    buffers.append(("data", data))
    return packed({"part": head}, buffers)


def _back_to_back(places: NDArray[np.int64], sizes: NDArray[np.int32]) -> bool:
    return bool(np.array_equal(places[1:], places[:-1] + sizes[:-1]))


def unpack_gathered(frame: Frame) -> Gathered:
    """The messages in a frame.

    Raises
    ------
    ProtocolError
        The frame is not that of a part.
    """
    head = frame.head["part"]
    topic, queue_id = _field(head, "topic", str), _field(head, "queue", int)
    start, end = _field(head, "start", int), _field(head, "end", int)

    sizes = numbers(frame, "sizes", "<i4")
    count = len(sizes)
    ends = np.cumsum(sizes, dtype=np.int64)
    relative = ends - sizes

    # A buffer is left out when its numbers follow from the others.
    offsets = (
        numbers(frame, "queue_offsets", "<i8")
        if "queue_offsets" in frame.buffers
        else np.arange(start, end, dtype=np.int64)
    )
    places = (
        numbers(frame, "physical_offsets", "<i8")
        if "physical_offsets" in frame.buffers
        else relative + _field(head, "first", int)
    )
    positions = numbers(frame, "positions", "<i8") if "positions" in frame.buffers else relative
    renumbered = frame.buffers["renumbered"].view(np.bool_) if "renumbered" in frame.buffers else None

    data = frame.buffers.get("data")
    lengths = {len(offsets), len(places), len(positions), count if renumbered is None else len(renumbered)}
    if data is None or lengths != {count}:
        raise ProtocolError("gather: the buffers of a part do not fit each other")
    if count and (int(sizes.min()) < 0 or int(positions.min()) < 0 or int((positions + sizes).max()) > len(data)):
        raise ProtocolError("gather: a record of a part lies outside its data")

    path = _field(head, "path", str)
    return Gathered(topic, queue_id, start, end, offsets, places, sizes, data, positions, path, renumbered)


def _field(head: Any, name: str, kind: Any) -> Any:
    if not isinstance(head, dict) or name not in head:
        raise ProtocolError(f"frame: the field {name!r} is missing")
    return checked(head[name], kind, name)


# ---- rows that are staged

_BUFFERS = (("data", "u1"), ("run_queue_ids", "<i4"), ("run_counts", "<i4"), ("sizes", "<i4"), ("tags_codes", "<i8"))
_KEYS = (("key_hashes", "<i4"), ("key_counts", "<i4"))


def pack_rows(rows: Rows) -> list[memoryview]:
    """The frame of encoded rows; each buffer has a CRC-32."""
    arrays = {
        name: np.ascontiguousarray(getattr(rows, name)).astype(kind, copy=False) for name, kind in _BUFFERS + _KEYS
    }
    head = {
        "topics": rows.run_topics,
        "real_queues": [list(queue) for queue in rows.real_queues],
        "time_at": rows.store_timestamp_position,
        "property_crc": rows.property_crc,
        "digest": rows.digest,
    }
    return packed({"rows": head}, list(arrays.items()), with_crcs=True)


def unpack_rows(frame: Frame) -> Rows:
    """The rows in a frame, after all checks.

    Raises
    ------
    ProtocolError
        The rows of the frame cannot be rows.
    MessageIllegalError
        A topic or queue id is not allowed.
    """
    head = frame.head["rows"]
    arrays = {name: numbers(frame, name, kind) for name, kind in _BUFFERS + _KEYS}
    if frame.crcs.keys() != arrays.keys():
        raise ProtocolError("stage: each buffer of rows must have a CRC")

    topics = _field(head, "topics", list[str])
    real_queues = [tuple(queue) for queue in _field(head, "real_queues", list[list[Any]])]
    checked(real_queues, list[tuple[str, int]], "real_queues")

    sizes = arrays["sizes"]
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    _check_arrays(arrays, starts, topics)

    # Delayed rows wait in a topic of the broker's, and say to which topics they go when they are due.
    waits_in = {SCHEDULE_TOPIC} if real_queues else set()
    for topic in ({*topics} - waits_in) | {topic for topic, _ in real_queues}:
        check_topic(topic)
    queue_ids = arrays["run_queue_ids"]
    for queue_id in (int(queue_ids.min(initial=0)), int(queue_ids.max(initial=0)), *(last for _, last in real_queues)):
        check_queue_id(queue_id)

    _check_records(arrays, starts)
    time_at, digest = _field(head, "time_at", int), _field(head, "digest", int)
    if not 0 <= time_at <= 255 or not 0 <= digest < 1 << 64:
        raise ProtocolError("stage: the place of the store time, or the digest, cannot be one")

    return Rows.unplaced(
        starts,
        run_topics=topics,
        run_queue_ids=arrays["run_queue_ids"],
        run_counts=arrays["run_counts"],
        tags_codes=arrays["tags_codes"],
        key_hashes=arrays["key_hashes"],
        key_counts=arrays["key_counts"],
        data=arrays["data"],
        store_timestamp_position=time_at,
        property_crc=_field(head, "property_crc", bool),
        digest=digest,
        real_queues=tuple(real_queues),
    )


def _check_arrays(arrays: dict[str, NDArray[Any]], starts: NDArray[np.int64], topics: list[str]) -> None:
    rows, runs = len(arrays["sizes"]), len(topics)
    lengths = (
        len(arrays["tags_codes"]),
        len(arrays["key_counts"]),
        len(arrays["run_queue_ids"]),
        len(arrays["run_counts"]),
    )
    if lengths != (rows, rows, runs, runs):
        raise ProtocolError("stage: the buffers of a frame do not fit each other")

    counts, key_counts = arrays["run_counts"].astype(np.int64), arrays["key_counts"].astype(np.int64)
    if (runs and int(counts.min()) < 1) or int(counts.sum()) != rows:
        raise ProtocolError("stage: the runs of a frame do not cover its rows")
    if (rows and int(key_counts.min()) < 0) or int(key_counts.sum()) != len(arrays["key_hashes"]):
        raise ProtocolError("stage: the keys of a frame do not fit its rows")
    if (rows and int(arrays["sizes"].min()) < RECORD_HEAD.size) or int(starts[-1]) != len(arrays["data"]):
        raise ProtocolError("stage: the records of a frame do not fill its data")


def _check_records(arrays: dict[str, NDArray[Any]], starts: NDArray[np.int64]) -> None:
    """Each record says the size, the magic and the queue that the columns say."""
    data, begins = arrays["data"], starts[:-1]
    if not len(begins):
        return

    # The four numbers at the beginning of each record, which are all gathered in one step.
    every_place = np.ndarray(len(data) - 15, "V16", data, strides=(1,))
    total_sizes, magics, _, queue_ids = every_place[begins].view(">i4").reshape(-1, 4).T
    if not (
        np.array_equal(total_sizes, arrays["sizes"])
        and ((magics == MAGIC_V1) | (magics == MAGIC_V2)).all()
        and np.array_equal(queue_ids, np.repeat(arrays["run_queue_ids"], arrays["run_counts"]))
    ):
        raise ProtocolError("stage: a record of a frame is not the one that its columns describe")
