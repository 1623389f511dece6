"""Makes checkpoints of streaming queries as Spark 4.3 writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUERY = "0ed0537a-3408-4ac4-ab09-c0d669b7cc3a"
CONF = {"spark.sql.shuffle.partitions": "2"}


def offset(store_id: str, *ends: int, topic: str = "t") -> dict[str, Any]:
    """The place of a query that has read so many messages of each queue, wherever they lie in the log."""
    queues = {topic: {str(queue_id): end for queue_id, end in enumerate(ends)}}
    return {"formatVersion": 1, "last": None, "physicalOffset": 1 << 40, "queues": queues, "storeId": store_id}


def write(path: Path, text: str) -> None:
    """A file of Spark's, with the checksum that Hadoop leaves beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.with_name(f".{path.name}.crc").write_bytes(b"crc\0")


def checkpoint(
    path: Path,
    offsets: list[list[dict[str, Any] | None]],
    *,
    committed: int | None = None,
    version: str = "v1",
    at_ms: int = 1_700_000_000_000,
    step_ms: int = 1,
) -> Path:
    """A checkpoint with one batch for each list of offsets; the first `committed` of them are done.

    The first was planned at a time in milliseconds since 1970, and each other `step_ms` after the one before it.
    """
    write(path / "metadata", json.dumps({"id": QUERY}))
    (path / "commits").mkdir()
    (path / "offsets").mkdir()
    for batch_id, sources in enumerate(offsets):
        planned_at_ms = at_ms + batch_id * step_ms
        planned = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": planned_at_ms, "conf": CONF})
        texts = ["-" if each is None else json.dumps(each) for each in sources]
        if version == "v2":
            texts = [f"{number}:{text}" for number, text in reversed(list(enumerate(texts)))]
        write(path / "offsets" / str(batch_id), "\n".join([version, planned, *texts]))
        if committed is None or batch_id < committed:
            write(path / "commits" / str(batch_id), 'v1\n{"nextBatchWatermarkMs":0}')
    return path
