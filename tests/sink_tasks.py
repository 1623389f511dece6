"""The sink's tasks without Spark: what they leave for the driver, and the settings of a small store."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa


def settings(root: str) -> Path:
    small = Path(root).parent / "small.properties"
    small.write_text("mappedFileSizeCommitLog=65536\nmaxHashSlotNum=100\nmaxIndexNum=400\n")
    return small


def staged(sink, context, batch_id: int, *partitions: pa.RecordBatch) -> list:
    """What the tasks of a micro-batch leave, as it arrives at the driver."""
    context.properties["streaming.sql.batchId"] = str(batch_id)
    messages = []
    for partition, batch in enumerate(partitions):
        context.partition = partition
        messages.append(pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(sink)).stage(iter([batch])))))
    return messages
