"""Dead letters: rows that the store cannot hold, as messages of another topic in the same batch.

A dead letter has the body of its row, cut at `maxMessageSize`, and the properties

    dlqReason    why the row cannot be stored, as the error says it
    dlqField     the field that is wrong: body, topic, queueId, keys, ...
    dlqOrigin    JSON: batch and the row's other columns, times in UTC; of a long value, the beginning as text
    dlqBodySize  the size of the row's body; left out where the body is null

It is staged with the other rows of its task, so the commit appends both or neither.

A replay may find the row in another partition, in a session with another time zone, or with other options. So a dead
letter does not say where its task found the row, and the digest by which a replay is recognised covers the user's row,
not the words about it: these have sizes and limits in them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore import MessageColumns, MessageIllegalError, StoreConfig
from messagestore.spi import ColumnTexts, Rows, array_of
from pyspark_messagestore.sink.columns import Mapper

_MAX_VALUE = 2048
"""The longest value in `dlqOrigin`, in characters. All of them fit into a record, whose properties have 32 KiB."""
_COLUMNS = {"delay_time_level": "delayTimeLevel", "queue_id": "queueId", "born_timestamp_ms": "bornTimestamp"}
"""Fields of an error -> columns of a row, where the names differ."""
_PROPERTIES = pa.map_(pa.string(), pa.string())
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
    version : int | None
        The version of the batch, for `dlqOrigin`.

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
        version: int | None,
    ) -> None:
        self.mapper, self.topic, self.limits = mapper, topic, limits
        self.encoding, self.version = encoding, version
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
            letters, users = self._letters(batch, bad)
            yield replace(self.encoding(ColumnTexts(letters)), digest=self.encoding(ColumnTexts(users)).digest)
            self.count += len(bad)

    def _letters(
        self, batch: pa.RecordBatch, bad: dict[int, MessageIllegalError]
    ) -> tuple[MessageColumns, MessageColumns]:
        """The dead letters, and rows that are the same exactly if the user's rows are, for the digest.

        This is a loop per row, because each has a reason of its own.
        """
        columns = {name: _in_utc(column) for name, column in self.mapper.columns(batch).items()}
        bodies: list[bytes] = []
        properties: list[list[tuple[str, str]]] = []
        keys: list[str] = []
        for row, error in sorted(bad.items()):
            values = {name: column[row].as_py() for name, column in sorted(columns.items())}
            if values.get("properties"):
                values["properties"] = sorted(values["properties"], key=repr)  # a map has no order
            keys.append(hashlib.sha256(repr(values).encode("utf-8", "backslashreplace")).hexdigest())

            body = values.pop("body")
            body = body.encode() if isinstance(body, str) else body
            origin = {"batch": self.version} | {name: _shortened(value) for name, value in values.items()}
            pairs = [
                ("dlqReason", _legal(error.reason)),
                ("dlqField", _COLUMNS.get(error.field or "row", error.field or "row")),
                ("dlqOrigin", json.dumps(origin)),
            ]
            if body is not None:
                pairs.append(("dlqBodySize", str(len(body))))
            bodies.append((body or b"")[: self.limits.max_message_size])
            properties.append(pairs)

        of_queues = ((self.count + np.arange(len(bad))) % self.mapper.queue_count(self.topic)).astype(np.int32)
        letters = {"body": pa.array(bodies, pa.binary()), "properties": pa.array(properties, _PROPERTIES)}
        users = {"body": pa.array([b""] * len(keys), pa.binary()), "keys": pa.array(keys, pa.string())}
        return self._columns(letters, of_queues), self._columns(users, of_queues)

    def _columns(self, columns: dict[str, pa.Array], queue_ids: NDArray[np.int32]) -> MessageColumns:
        messages = MessageColumns.from_arrow(pa.RecordBatch.from_pydict(columns), topic=self.topic)
        messages.queue_id = queue_ids
        return messages


def _in_utc(column: pa.Array) -> pa.Array:
    """Times with a time zone as text in UTC, which has each of them whatever the session's time zone is."""
    if not pa.types.is_timestamp(column.type) or column.type.tz is None:
        return column
    return column.cast(pa.timestamp(column.type.unit, "UTC")).cast(pa.string())


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
    return str(value)
