"""Encodes the rows of a batch that a program has in memory; Spark's tasks encode theirs, and stage them.

    columns -> pieces of `PIECE_ROWS` rows -> queues for rows that have none -> records, made by two threads at a time

Threads: any; the threads that encode end before `encoded` returns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack

from messagestore.batches.plan import Chunks
from messagestore.format import record_columns
from messagestore.format.message_columns import ColumnTexts
from messagestore.format.queue_choice import give_queues
from messagestore.format.record_columns import MessageColumns
from messagestore.format.rows import Rows
from messagestore.log.store_files import StoreFiles
from messagestore.read.ahead import Ahead

PIECE_ROWS = 65_536
_ENCODERS = 2


def encoded(files: StoreFiles, parts: Sequence[MessageColumns], *, born_host: bytes, new_queue_nums: int) -> Chunks:
    """Encode rows, in their order. The chunks own the memory of their records.

    Parameters
    ----------
    files : StoreFiles
        The store's settings and topics.
    parts : sequence of MessageColumns
    born_host : bytes
        The host that the messages are from.
    new_queue_nums : int
        The number of queues of a topic that does not exist yet.

    Raises
    ------
    MessageIllegalError
        A row cannot be stored; the error names it.
    """
    pieces = [part.slice(start, PIECE_ROWS) for part in parts for start in range(0, part.row_count, PIECE_ROWS)]
    first_rows = list(itertools.accumulate((piece.row_count for piece in pieces), initial=0))

    config, multi_tags, first_turn = files.config, files.topics.with_multi_tags, time.time_ns()

    def queue_count(topic: str) -> int:
        created = files.topics.get(topic)
        return new_queue_nums if created is None else created.write_queue_nums

    def encode(piece: MessageColumns, first_row: int) -> Rows:
        texts = ColumnTexts(piece)
        give_queues(texts, queue_count, first_turn + first_row)
        return record_columns.encode(
            texts,
            limits=config,
            store_host=files.store_host,
            born_host=born_host,
            first_row=first_row,
            multi_tag_topics=multi_tags,
        )

    if len(pieces) <= 1:
        return Chunks(map(encode, pieces, first_rows))

    with ExitStack() as threads:  # most of encoding is Arrow's and numpy's, without the GIL
        shares = [slice(first, None, _ENCODERS) for first in range(_ENCODERS)]
        encoders = [map(encode, pieces[share], first_rows[share]) for share in shares]
        made = [threads.enter_context(Ahead(rows, len(pieces))) for rows in encoders]
        return Chunks(next(made[number % _ENCODERS]) for number in range(len(pieces)))
