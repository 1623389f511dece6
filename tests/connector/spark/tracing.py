"""A data source that writes down how it is called: one line a call, `<name> <pid>`, in the file MESSAGESTORE_TRACE.

It reads and writes nothing: three batches of one row each. Its commit fails as long as MESSAGESTORE_TRACE.fail exists.
"""

from __future__ import annotations

import os

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

TRACE = "MESSAGESTORE_TRACE"
LAST = 3


def note(name: str) -> None:
    with open(os.environ[TRACE], "a", encoding="ascii") as trace:
        trace.write(f"{name} {os.getpid()}\n")


class Writer(DataSourceStreamArrowWriter, DataSourceArrowWriter):
    def write(self, iterator):
        for _ in iterator:
            pass
        note("write")
        return WriterCommitMessage()

    def commit(self, messages, batchId=None):  # noqa: N803
        note(f"commit {batchId}")
        if os.path.exists(os.environ[TRACE] + ".fail"):
            raise RuntimeError("as asked for")

    def abort(self, messages, batchId=None):  # noqa: N803
        note(f"abort {batchId}")


class Reader(DataSourceStreamReader, DataSourceReader, SupportsTriggerAvailableNow):
    def prepareForTriggerAvailableNow(self):  # noqa: N802
        pass

    def initialOffset(self):  # noqa: N802
        note("initialOffset")
        return {"o": 0}

    def latestOffset(self, start, limit):  # noqa: N802
        note("latestOffset")
        return {"o": min(start["o"] + 1, LAST)}

    def partitions(self, start=None, end=None):
        note("partitions")
        return [InputPartition(0)]

    def read(self, partition):
        yield (b"x",)

    def commit(self, end):
        note("commit-source")


class TracingSource(DataSource):
    """Format `tracing`."""

    @classmethod
    def name(cls):
        return "tracing"

    def schema(self):
        return "body binary"

    def streamReader(self, schema):  # noqa: N802
        return Reader()

    def streamWriter(self, schema, overwrite):  # noqa: N802
        note("streamWriter")
        return Writer()

    def writer(self, schema, overwrite):
        note("writer")
        return Writer()
