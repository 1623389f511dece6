"""What a person takes along: the same look as a command line, in Python and in Spark, and messages as a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pyspark_messagestore.dashboard.stored import Stored
from pyspark_messagestore.words import command_line

FORMATS = ("jsonl", "parquet")


def copies(stored: Stored, look: str, found: Mapping[str, Any]) -> dict[str, str]:
    """The ways to ask the same without the dashboard, by name; none if the look has no such way."""
    if look == "message":
        message = found["message"]
        return _of_messages(stored, message["topic"], message["queueId"], message["queueOffset"], 1)
    if look == "messages":
        return _of_messages(stored, found["topic"], found["queueId"], found["start"], found["count"])
    if look == "recent":
        topic, queue_id = found["topic"], found["queueId"]
        return {
            "Command line": command_line("get", stored.path, topic, *(() if queue_id is None else (queue_id,))),
            "Python": _python(
                stored,
                f"for queue_id in {found['queues'] if queue_id is None else [queue_id]}:",
                f"    for batch in store.read({topic!r}, queue_id, 0):",
                "        print(batch.to_pydict())",
            ),
            "Spark": _spark(stored, topic, "" if queue_id is None else f"queueId = {queue_id}"),
        }
    return {}


def _of_messages(stored: Stored, topic: str, queue_id: int, offset: int, count: int) -> dict[str, str]:
    return {
        "Command line": command_line("get", stored.path, topic, queue_id, offset=offset, count=count),
        "Python": _python(
            stored,
            f"result = store.get_message({topic!r}, {queue_id}, {offset}, {count})",
            "for message in result.messages:",
            "    print(message.queue_offset, message.body)",
        ),
        "Spark": _spark(
            stored, topic, f"queueId = {queue_id} AND queueOffset >= {offset} AND queueOffset < {offset + count}"
        ),
    }


def _python(stored: Stored, *lines: str) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    opened = f"with MessageStore.open_read_only({stored.path!r}) as store:"
    return f"from messagestore import MessageStore\n\n{opened}\n{body}"


def _spark(stored: Stored, topic: str, where: str = "") -> str:
    asked = f'\n    .option("subscribe", {topic!r})\n    .load({stored.path!r})'
    return f'messages = (\n    spark.read.format("messagestore"){asked}' + (
        f"\n    .where({where!r})\n)" if where else "\n)"
    )


def as_file(form: str, messages: Iterable[Mapping[str, Any]]) -> tuple[bytes, str]:
    """Messages as JSON lines or as a Parquet file, and the type of the file."""
    rows = [{name: value for name, value in each.items() if name != "cells"} for each in messages]
    if form == "jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return text.encode("utf-8", "backslashreplace"), "application/x-ndjson"
    import pyarrow as pa
    import pyarrow.parquet as pq

    for row in rows:
        for name in ("properties", "systemProperties", "decoded"):
            if name in row:
                row[name] = json.dumps(row[name], ensure_ascii=False)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes(), "application/vnd.apache.parquet"
