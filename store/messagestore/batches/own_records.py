"""Records that the store makes itself, as the chunks of a batch.

These are the records with which a broker's services answer: the message of a transaction that was committed, the note
that it has ended, a half message that is put back. There are few of them, so they are taken one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from messagestore.batches.plan import Chunks
from messagestore.format import javahash, record
from messagestore.format.rows import Row, Rows


def chunks_of(records: Sequence[bytearray], *, property_crc: bool) -> Chunks:
    """Encoded records as chunks of a batch, in their order.

    Parameters
    ----------
    records : sequence of bytearray
        As `record.encode_message` gives them. Their topics and queues are those to which they go.
    property_crc : bool
        Whether each of them ends in `__CRC32#`.
    """
    rows = [(_row(data), data) for data in records]
    chunks = Chunks()

    for position, same in itertools.groupby(rows, lambda row_and_data: _position(row_and_data[1])):
        part = list(same)
        columns = Rows.of([row for row, _ in part])
        starts = np.cumsum([0, *(row.size for row, _ in part)])
        chunks.append(
            Rows.unplaced(
                starts,
                run_topics=columns.run_topics,
                run_queue_ids=columns.run_queue_ids,
                run_counts=columns.run_counts,
                tags_codes=columns.tags_codes,
                key_hashes=columns.key_hashes,
                key_counts=columns.key_counts,
                data=np.frombuffer(bytearray().join(data for _, data in part), np.uint8),
                store_timestamp_position=position,
                property_crc=property_crc,
            )
        )
    return chunks


def _row(data: bytearray) -> Row:
    message = record.decode_message(data, verify=False)
    keys = message.keys if message.unique_key is None else (message.unique_key, *message.keys)
    hashes = [javahash.index_hash(message.topic, key) for key in keys]
    return Row(message.topic, message.queue_id, 0, 0, len(data), javahash.tags_code(message.tags or ""), 0, hashes)


def _position(data: bytearray) -> int:
    return record.store_timestamp_position(record.sys_flag_of(data))
