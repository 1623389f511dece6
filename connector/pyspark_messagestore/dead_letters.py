"""Dead letters: rows that the store cannot hold, as messages of another topic in the same batch.

A dead letter has the body of its row, cut at `maxMessageSize`, and the properties

    dlqReason    why the row cannot be stored, as the error says it
    dlqField     the field that is wrong: body, topic, queueId, keys, ...
    dlqOrigin    JSON: batch, partition, row, and the row's other columns; of a long value, the beginning as text
    dlqBodySize  the size of the row's body; left out where the body is null

It is staged with the other rows of its task, so the commit appends both or neither.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from messagestore import MessageColumns, MessageIllegalError, StoreConfig
from messagestore.spi import ColumnTexts, Rows, array_of
from pyspark_messagestore.columns import Mapper

_MAX_VALUE = 2048
"""The longest value in `dlqOrigin`, in characters. All of them fit into a record, whose properties have 32 KiB."""
_COLUMNS = {"delay_time_level": "delayTimeLevel", "queue_id": "queueId", "born_timestamp_ms": "bornTimestamp"}
"""Fields of an error -> columns of a row, where the names differ."""
_SEPARATORS = str.maketrans({"\x01": "\\x01", "\x02": "\\x02"})


class DeadLetters:
    """Encodes the rows of one task, and puts those that cannot be stored into a topic of their own.

    Parameters
    ----------
    mapper : Mapper
    topic : str
        The topic of the dead letters.
    limits : StoreConfig
    encoding : callable
        Encodes messages with these limits.
    batch : str | None
        The number of Spark's batch, for `dlqOrigin`.
    partition_id : int

    Attributes
    ----------
    count : int
        The number of dead letters so far.
    first : MessageIllegalError | None
        The error of the first one.
    """

    def __init__(
        self,
        mapper: Mapper,
        topic: str,
        limits: StoreConfig,
        encoding: Callable[[ColumnTexts], Rows],
        *,
        batch: str | None,
        partition_id: int,
    ) -> None:
        self.mapper, self.topic, self.limits = mapper, topic, limits
        self.encoding, self.batch, self.partition_id = encoding, batch, partition_id
        self.count = 0
        self.first: MessageIllegalError | None = None

    def encoded(self, batch: pa.RecordBatch, first_row: int) -> Iterator[Rows]:
        """The records of a batch, and then those of its dead letters.

        Parameters
        ----------
        batch : pa.RecordBatch
        first_row : int
            The number of its first row in the task.

        Raises
        ------
        MessageIllegalError
            The whole batch is wrong, not one of its rows.
        """
        bad = self.mapper.faults(batch, first_row, self.limits)
        numbers = np.arange(first_row, first_row + batch.num_rows)
        good = np.setdiff1d(np.arange(batch.num_rows), np.fromiter(bad, np.int64, len(bad)), assume_unique=True)
        while len(good):
            try:
                yield self.encoding(self.mapper.messages(batch.take(array_of(good)), first_row, numbers[good]))
                break
            except MessageIllegalError as error:  # properties that are too large show when a record is encoded
                if error.row is None:
                    raise
                index = error.row - first_row
                error.row = int(numbers[good[index]])
                bad[int(good[index])] = error
                good = np.delete(good, index)
        if bad:
            if self.first is None:
                self.first = bad[min(bad)]
            yield self.encoding(ColumnTexts(self._letters(batch, first_row, bad)))
            self.count += len(bad)

    def _letters(self, batch: pa.RecordBatch, first_row: int, bad: dict[int, MessageIllegalError]) -> MessageColumns:
        """The dead letters as columns. This is a loop per row, because each has a reason of its own."""
        columns = self.mapper.columns(batch)
        bodies: list[bytes] = []
        properties: list[list[tuple[str, str]]] = []
        for row, error in sorted(bad.items()):
            values = {name: column[row].as_py() for name, column in columns.items()}
            body = values.pop("body")
            body = body.encode() if isinstance(body, str) else body
            origin: dict[str, object] = {"batch": self.batch, "partition": self.partition_id, "row": first_row + row}
            origin |= {name: _shortened(value) for name, value in values.items()}
            pairs = [
                ("dlqReason", _legal(error.reason)),
                ("dlqField", _COLUMNS.get(error.field or "row", error.field or "row")),
                ("dlqOrigin", json.dumps(origin)),
            ]
            if body is not None:
                pairs.append(("dlqBodySize", str(len(body))))
            bodies.append((body or b"")[: self.limits.max_message_size])
            properties.append(pairs)
        count = len(bodies)
        rows = {
            "body": pa.array(bodies, pa.binary()),
            "properties": pa.array(properties, pa.map_(pa.string(), pa.string())),
        }
        letters = MessageColumns.from_arrow(pa.RecordBatch.from_pydict(rows), topic=self.topic)
        letters.queue_id = ((self.count + np.arange(count)) % self.mapper.queue_count(self.topic)).astype(np.int32)
        return letters


def _legal(text: str) -> str:
    """A text without the characters that no property can hold."""
    return text.translate(_SEPARATORS).encode("utf-8", "backslashreplace").decode()


def _shortened(value: object) -> object:
    """A value that JSON can hold, or the beginning of its text if it is long."""
    text = json.dumps(value, default=_as_json)
    return json.loads(text) if len(text) <= _MAX_VALUE else text[:_MAX_VALUE]


def _as_json(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return str(value)
