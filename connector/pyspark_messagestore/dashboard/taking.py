"""What a person takes along: the same look as a command line, in Python and in Spark, and messages as a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pyspark_messagestore.dashboard.stored import Stored, json_text
from pyspark_messagestore.words import command_line, time_ms, time_words

FORMATS = ("jsonl", "parquet")


def copies(stored: Stored, look: str, found: Mapping[str, Any]) -> dict[str, str]:
    """The ways to ask the same without the dashboard, by name; none if the look has no such way."""
    if look == "message":
        message = found["message"]
        return _of_messages(stored, message["topic"], message["queueId"], message["queueOffset"], 1)
    if look == "messages":
        return _of_messages(stored, found["topic"], found["queueId"], found["start"], found["count"])
    if look == "recent":
        return _of_filter(stored, found)
    return {}


def _of_filter(stored: Stored, found: Mapping[str, Any]) -> dict[str, str]:
    """The messages of a topic that pass a filter. The command line has no filters, so there is no command for one."""
    topic, queue_id, filter_, until = found["topic"], found["queueId"], found["filter"], found["until"]
    if until:
        until = time_words(time_ms("until", until))
    name, equals, value = filter_["property"].partition("=")
    text = filter_["text"].casefold()
    tests = {  # of a row in Python, and of a column in Spark
        f"row['queueId'] == {queue_id}": f"queueId = {queue_id}" if queue_id is not None else "",
        f"row['tags'] == {filter_['tag']!r}": f"tags = {_sql(filter_['tag'])}" if filter_["tag"] else "",
        f"{filter_['key']!r} in row['keys']": f"array_contains(keys, {_sql(filter_['key'])})" if filter_["key"] else "",
        f"dict(row['properties']).get({name!r}) == {value!r}": f"properties[{_sql(name)}] = {_sql(value)}"
        if equals
        else "",
        f"{name!r} in dict(row['properties'])": f"map_contains_key(properties, {_sql(name)})"
        if name and not equals
        else "",
        f"{text!r} in row['body'].decode(errors='replace').casefold()": (
            f"contains(lower(CAST(body AS STRING)), {_sql(text)})" if text else ""
        ),
        f"row['storeTimestamp'] <= datetime.fromisoformat({until!r})": (
            f"storeTimestamp <= TIMESTAMP {_sql(until)}" if until else ""
        ),
    }
    tests = {row: column for row, column in tests.items() if column}
    imports = "from datetime import datetime\n\n" if until else ""
    ways = {
        "Python": imports
        + _python(
            stored,
            f"for batch in store.scan({topic!r}):",
            "    for row in batch.to_pylist():",
            *([f"        if {' and '.join(tests)}:", "            print(row)"] if tests else ["        print(row)"]),
        ),
        "Spark": _spark(stored, topic, " AND ".join(tests.values())),
    }
    if found["filtered"] or until:
        return ways
    if queue_id is None:
        return {"Command line": command_line("tail", stored.path, topic, count=found["count"])} | ways
    command = command_line("get", stored.path, topic, queue_id, offset="latest", count=found["count"])
    return {"Command line": command} | ways


def _sql(text: str) -> str:
    """A text in Spark's SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


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
    rows = [{name: value for name, value in message.items() if name != "cells"} for message in messages]
    if form == "jsonl":
        text = "".join(json_text(row) + "\n" for row in rows)
        return text.encode("utf-8", "backslashreplace"), "application/x-ndjson"
    import pyarrow as pa
    import pyarrow.parquet as pq

    for row in rows:
        for name in ("properties", "systemProperties", "decoded"):
            if name in row:
                row[name] = json_text(row[name])
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [_storable(row.get(name)) for row in rows] for name in names})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes(), "application/vnd.apache.parquet"


def _storable(value: Any) -> Any:
    """Text as Arrow takes it: half of a pair of surrogates is written out."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
