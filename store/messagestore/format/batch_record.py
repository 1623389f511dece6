"""BATCH records: their contents, and how they are written and read.

Each Spark batch begins with one ordinary record in topic `rmq_sys_spark_sink`, queue 0. Its body is JSON that says
where the batch ends, what it contains, and how to prove that it is complete. The size of the record is known before any
byte of the batch is written: numbers that are not known yet are counted at their largest width, and the body is padded
with blanks (which JSON allows). FORMAT.md describes the fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from messagestore.errors import ChecksumError, ConfigError, CorruptionError, MessageIllegalError
from messagestore.format import record
from messagestore.format.config import ASYNC_FLUSH, StoreConfig
from messagestore.format.layout import CRC_MASK, DIGEST_NAME, PROPERTY_CRC_SIZE
from messagestore.format.message import BATCH_TOPIC, Message
from messagestore.format.record_scan import PROPERTY_CRC_BEGIN
from messagestore.signal_handlers import pass_on

FORMAT = 1
BODY_BEGIN = b'{"messagestore":1,"app":'
CHUNK_SIZE = 16 * 1024 * 1024
"""Number of log bytes that one CRC covers."""
MAX_APP_ID_SIZE = 255
OWN_APP_PREFIX = "rmq_sys_"
"""Names of apps that the store keeps for itself begin with this."""
DELIVERY_APP = "rmq_sys_schedule"
"""The app whose batches are deliveries of delayed messages."""
MAX_ORIGIN_SIZE = 32 * 1024
"""Bytes of an origin's JSON text."""
PROGRESS_TAG = "progress"
"""The tag of BATCH records that move the progress of consumer groups: their units show it."""
_WIDEST = (1 << 63) - 1
Progress = Mapping[str, Mapping[str, list[tuple[int, int, int]]]]
"""Consumer group -> topic -> (queue id, next offset before the batch or -1, next offset after it)."""

SOURCE_SPARK = "spark"
SOURCE_USER = "user"
SOURCE_NONE = "none"


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The body of a BATCH record.

    Parameters
    ----------
    app_id, version, version_source : str, int, str
        Identify who wrote which batch; `version_source` is "spark" (Spark's batch id), "user" or "none" (no
        exactly-once).
    query_id : str | None
        The streaming query.
    store_id : str
    physical_offset, end : int
        S, where this record begins, and E, where the batch ends; the data lie in between.
    queue_offset : int
        Offset of this record in its own queue.
    flush_disk_type : str
    row_count : int
    ranges : dict of topic -> list of (queue id, first queue offset, count)
    crcs : tuple of int
        CRC-32 of the log from the end of this record to E, in pieces of `CHUNK_SIZE`.
    digest : int
        Digest of the rows, independent of their order, modulo 2^64.
    size : int
        Bytes of the whole record; not stored in the body.
    replaces : tuple of str
        Query ids of this app that are refused from this batch on, because another query has taken the app over.
    start : bool
        The record is not a batch but a mark without rows: the app continues with the version after this one.
    origin : dict | None
        Where the rows come from, in the words of the program that appended them.
    restated : bool
        The record has no rows. It repeats what an earlier BATCH record said, whose segment retention deletes: the app,
        the version, the query, the rows, the digest, the topics and the origin of the batch.
    refused : tuple of str
        With `restated`: the query ids of this app that are refused.
    topic : str | None
        The topic of all rows of the app, where its writer has only one. None: each row names its topic.
    progress : dict of group -> topic -> list of (queue id, before, after)
        The progress of consumer groups that the batch moves; -1: the group had none before.
    torn : bool
        A power cut removed the record's properties, `__CRC32#` among them, and a broker kept the rest. Not stored in
        the body.
    """

    app_id: str
    version: int
    version_source: str
    query_id: str | None
    store_id: str
    physical_offset: int
    queue_offset: int
    end: int
    flush_disk_type: str
    row_count: int
    ranges: Mapping[str, list[tuple[int, int, int]]]
    crcs: tuple[int, ...]
    digest: int
    size: int = 0
    replaces: tuple[str, ...] = ()
    start: bool = False
    origin: Mapping[str, Any] | None = None
    restated: bool = False
    refused: tuple[str, ...] = ()
    topic: str | None = None
    progress: Progress = field(default_factory=dict)
    torn: bool = False

    @property
    def data_offset(self) -> int:
        """Physical offset at which the batch's data begin."""
        return self.physical_offset + self.size


def check_app_id(app_id: object) -> None:
    """Refuse an app id that is not a single word, because it becomes the record's KEYS.

    Raises
    ------
    MessageIllegalError
    """
    if not isinstance(app_id, str):
        text = f"txnAppId: found {repr(app_id)[:80]}; allowed is text without blanks and control characters"
        raise MessageIllegalError(text, field="txnAppId")
    size = len(app_id.encode("utf-8", "surrogatepass"))
    if not app_id or size > MAX_APP_ID_SIZE or re.search(r"[\x00-\x20\x7f\ud800-\udfff]", app_id):
        raise MessageIllegalError(
            f"txnAppId: found {app_id[:80]!r} ({size} bytes); allowed are 1 to {MAX_APP_ID_SIZE} bytes of UTF-8 "
            "without blanks and control characters",
            field="txnAppId",
            size=size,
            limit=MAX_APP_ID_SIZE,
        )


def check_origin(origin: object) -> None:
    """Refuse an origin that JSON cannot hold and give back unchanged, or that is too large for a BATCH record.

    Raises
    ------
    ConfigError
    """
    allowed = f"allowed is a dict with text keys that JSON can hold, of at most {MAX_ORIGIN_SIZE} bytes"
    try:
        text = json.dumps(origin, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        pass_on(error)
        raise ConfigError(f"origin: cannot be stored as JSON ({error}); {allowed}", key="origin") from None
    if not isinstance(origin, dict) or json.loads(text) != origin:
        raise ConfigError(f"origin: found {origin!r:.200}; {allowed}", key="origin")
    if len(text) > MAX_ORIGIN_SIZE:
        raise ConfigError(f"origin: found {len(text)} bytes of JSON; {allowed}", key="origin")


def body(batch: BatchRecord, size: int = 0) -> bytes:
    """Return the JSON text, padded with blanks to `size` bytes."""
    optional: dict[str, object] = {"replaces": list(batch.replaces)} if batch.replaces else {}
    if batch.start:
        optional["start"] = True
    if batch.origin is not None:
        optional["origin"] = batch.origin
    if batch.topic is not None:
        optional["topic"] = batch.topic
    if batch.progress:
        optional["progress"] = batch.progress
    if batch.restated:
        optional |= {"restated": True, "refused": list(batch.refused)}

    text = json.dumps(
        {
            "messagestore": FORMAT,
            "app": batch.app_id,
            "version": batch.version,
            "versionSource": batch.version_source,
            "queryId": batch.query_id,
            "store": batch.store_id,
            "offset": batch.physical_offset,
            "queueOffset": batch.queue_offset,
            "end": batch.end,
            "flush": batch.flush_disk_type,
            "rows": batch.row_count,
            "ranges": batch.ranges,
            "chunkSize": CHUNK_SIZE,
            "crc": "".join(f"{crc:08x}" for crc in batch.crcs),
            "digest": f"{batch.digest:016x}",
            "digestName": DIGEST_NAME,
            **optional,
        },
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode()

    return text.ljust(size)


def widest_body_size(batch: BatchRecord, most_data_bytes: int) -> int:
    """Return the most bytes that the body can have, whatever S and E turn out to be.

    The data take `most_data_bytes` or less.
    """
    widest = replace(
        batch,
        physical_offset=_WIDEST,
        queue_offset=_WIDEST,
        end=_WIDEST,
        crcs=(0,) * (-(-most_data_bytes // CHUNK_SIZE)),
    )
    return len(body(widest))


def encode(
    batch: BatchRecord,
    body_size: int,
    config: StoreConfig,
    store_host: bytes,
    store_timestamp_ms: int,
    born_timestamp_ms: int | None = None,
) -> bytearray:
    """Return the whole record, stamped, including `__CRC32#`. None: the batch is born when it is stored."""
    message = Message(
        BATCH_TOPIC,
        body(batch, body_size),
        keys=(batch.app_id,),
        tags=PROGRESS_TAG if batch.progress else None,
        born_timestamp_ms=store_timestamp_ms if born_timestamp_ms is None else born_timestamp_ms,
    )
    limits = config
    if body_size > config.max_message_size:  # the user's limit is for messages
        limits = config.replace(max_message_size=body_size)
    data = record.encode_message(message, queue_id=0, store_host=store_host, limits=limits, property_crc=True)
    record.stamp_record(
        data,
        queue_offset=batch.queue_offset,
        physical_offset=batch.physical_offset,
        store_timestamp_ms=store_timestamp_ms,
        property_crc=True,
    )
    return data


def parse(data: bytes, physical_offset: int) -> BatchRecord | None:
    """Return the BATCH record whose bytes are `data`, or None if `data` is no valid BATCH record of this place.

    Everything that does not need the data after the record is checked: the record's CRCs and its own offsets.
    """
    if not data[-PROPERTY_CRC_SIZE:].startswith(PROPERTY_CRC_BEGIN):
        return None  # the property is always there: a flipped bit in its name must not switch the check off
    try:
        message = record.decode_message(data, physical_offset=physical_offset)
    except CorruptionError:
        return None
    if message.topic != BATCH_TOPIC or not message.body.startswith(BODY_BEGIN):
        return None
    batch = _of_body(message.body, physical_offset, len(data))
    return batch if batch is not None and batch.queue_offset == message.queue_offset else None


def _of_body(text: bytes, physical_offset: int, size: int) -> BatchRecord | None:
    """Return what the body of a BATCH record says, or None if the text cannot be such a body at this place."""
    try:
        fields = json.loads(text)
        crc = fields["crc"]
        batch = BatchRecord(
            app_id=fields["app"],
            version=fields["version"],
            version_source=fields["versionSource"],
            query_id=fields["queryId"],
            store_id=fields["store"],
            physical_offset=fields["offset"],
            queue_offset=fields["queueOffset"],
            end=fields["end"],
            flush_disk_type=fields["flush"],
            row_count=fields["rows"],
            ranges={t: [(q, first, count) for q, first, count in runs] for t, runs in fields["ranges"].items()},
            crcs=tuple(int(crc[i : i + 8], 16) for i in range(0, len(crc), 8)),
            digest=int(fields["digest"], 16),
            size=size,
            replaces=tuple(fields.get("replaces", ())),
            start=fields.get("start", False),
            origin=fields.get("origin"),
            restated=fields.get("restated", False),
            refused=tuple(fields.get("refused", ())),
            topic=fields.get("topic"),
            progress={
                group: {topic: [(q, before, after) for q, before, after in rows] for topic, rows in topics.items()}
                for group, topics in fields.get("progress", {}).items()
            },
        )
        if fields["digestName"] != DIGEST_NAME:
            return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        pass_on(error)
        return None

    if batch.physical_offset != physical_offset:
        return None
    if batch.end < batch.data_offset or len(batch.crcs) != -(-(batch.end - batch.data_offset) // CHUNK_SIZE):
        return None
    return batch


def parse_torn(data: bytes, physical_offset: int) -> BatchRecord | None:
    """Parse an ASYNC_FLUSH batch whose properties a power cut removed and which a broker kept.

    Only its body can be checked.
    """
    try:
        record.decode_message(data, physical_offset=physical_offset)
    except ChecksumError:
        return None  # the CRC is there but does not match: damage
    except CorruptionError:
        pass
    try:
        message = record.decode_message(data, verify=False, physical_offset=physical_offset)
    except CorruptionError:
        return None
    if record.crc32(message.body) & CRC_MASK != message.body_crc & CRC_MASK or not message.body.startswith(BODY_BEGIN):
        return None
    batch = _of_body(message.body, physical_offset, len(data))
    if batch is None or batch.flush_disk_type != ASYNC_FLUSH or batch.queue_offset != message.queue_offset:
        return None
    return replace(batch, torn=True)
