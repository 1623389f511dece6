"""Is what Java says the same as what we say?"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Sequence
from typing import Any

from interop.java_store import COUNTS, JavaStore
from interop.recipes import Recipe
from messagestore import GetMessageStatus, MessageExt
from messagestore.read import query
from messagestore.read_only_store import ReadOnlyStore

ALL_COLUMNS = (
    "topic", "queue_id", "queue_offset", "body", "tags", "keys", "properties", "born_timestamp_ms", "store_timestamp_ms",
    "unique_key", "offset_message_id", "physical_offset", "size", "flag", "sys_flag", "body_crc", "reconsume_times",
    "born_host", "store_host", "prepared_transaction_offset", "system_properties",
)  # fmt: skip
Fields = dict[str, Any]


def host(text: str) -> tuple[str, int]:
    """A host in one form: Java writes `0:0:0:0:0:0:0:1 10911`, we `[::1]:10911`."""
    address, _, port = text.replace(" ", ":").rpartition(":") if " " in text else text.rpartition(":")
    return ipaddress.ip_address(address.strip("[]").partition("%")[0]).compressed, int(port)


def of_java(message: Fields) -> Fields:
    """A message as the driver gives it (Messages.java), under our names."""
    properties = dict(message["properties"] or {})  # Java has none where the text is empty
    return {
        "topic": message["topic"],
        "queue_id": message["queueId"],
        "queue_offset": message["queueOffset"],
        "physical_offset": message["physicalOffset"],
        "size": message["size"],
        "body": base64.b64decode(message["body"]),
        "body_crc": message["bodyCrc"],
        "flag": message["flag"],
        "sys_flag": message["sysFlag"],
        "born_timestamp_ms": message["born"],
        "born_host": host(message["bornHost"]),
        "store_timestamp_ms": message["stored"],
        "store_host": host(message["storeHost"]),
        "reconsume_times": message["reconsume"],
        "prepared_transaction_offset": message["prepared"],
        "offset_message_id": message["messageId"],
        "all_properties": properties,
        "tags": properties.get("TAGS"),
        "keys": [key for key in properties.get("KEYS", "").split(" ") if key],
        "unique_key": properties.get("UNIQ_KEY"),
    }


def of_ours(message: MessageExt) -> Fields:
    names = (
        "topic", "queue_id", "queue_offset", "physical_offset", "size", "body", "body_crc", "flag", "sys_flag",
        "born_timestamp_ms", "store_timestamp_ms", "reconsume_times", "prepared_transaction_offset",
        "offset_message_id", "tags", "unique_key",
    )  # fmt: skip
    found = {name: getattr(message, name) for name in names}
    found["born_host"], found["store_host"] = host(message.born_host), host(message.store_host)
    found["all_properties"] = {**message.properties, **message.system_properties}
    found["keys"] = list(message.keys)
    return found


def of_row(row: Fields) -> Fields:
    """A row of a record batch with `ALL_COLUMNS`."""
    found = {name: row[name] for name in ALL_COLUMNS if name not in ("properties", "system_properties")}
    found["born_host"], found["store_host"] = host(row["born_host"]), host(row["store_host"])
    found["all_properties"] = dict(row["properties"]) | dict(row["system_properties"])
    return found


def same(where: object, ours: Sequence[Fields], theirs: Sequence[Fields]) -> None:
    assert len(ours) == len(theirs), f"{where}: we see {len(ours)} messages, Java {len(theirs)}"
    for one, other in zip(ours, theirs, strict=True):
        if one != other:
            wrong = {name: (one[name], other[name]) for name in one if one[name] != other.get(name)}
            raise AssertionError(f"{where}: message {other['queue_offset']}: (ours, Java's) {wrong}")


def numbered(messages: Sequence[Fields], first: int) -> list[Fields]:
    """Java's messages of a queue with the numbers of their units; Java shows those of their records."""
    return [{**message, "queue_offset": number} for number, message in enumerate(messages, first)]


def check_messages(store: ReadOnlyStore, java: JavaStore, *, renumbered: bool = False) -> None:
    """Every message of every queue, every field: Java's, ours one by one, and ours as Arrow columns.

    With `renumbered` units may have other numbers than their records.
    """
    queues = [(topic, queue_id) for topic, ids in store.topics().items() for queue_id in ids]
    for (topic, queue_id), found in java.dump_all(queues).items():
        where = (topic[:40], queue_id)
        assert "stopped" not in found, (where, found["stopped"])
        low, high = found["min"], found["max"]
        if renumbered:  # in a queue that begins in the middle Java may count a unit before the first message
            low = high - len(found["messages"])
        ours = (store.min_offset(topic, queue_id), store.max_offset(topic, queue_id))
        assert ours == (low, high), (where, ours, (low, high))
        theirs = [of_java(message) for message in found["messages"]]
        if renumbered:
            theirs = numbered(theirs, low)
        result = store.get_message(topic, queue_id, low, max(1, high - low))
        same(where, [of_ours(message) for message in result.messages], theirs)
        rows = [row for batch in store.read(topic, queue_id, low, columns=ALL_COLUMNS) for row in batch.to_pylist()]
        same(where, [of_row(row) for row in rows], theirs)


def check_statuses(store: ReadOnlyStore, java: JavaStore, topic: str, queue_id: int) -> None:
    """Status and next offset for an offset of each class; what is found begins with what Java finds (Java stops at the end
    of a queue file, and after 32 messages)."""
    low, high = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
    middle = (low + high) // 2
    offsets = sorted({-1, 0, 1, low - 1, low, low + 1, middle, high - 1, high, high + 1, high + 1000, 2**40})
    at = [(offset, count) for offset in offsets for count in (1, 32)]
    for (offset, count), theirs in zip(at, java.get_each(topic, queue_id, at), strict=True):
        ours = store.get_message(topic, queue_id, offset, count)
        where = (topic[:40], queue_id, offset, count)
        assert ours.status.name == theirs["status"], (*where, theirs)
        assert (ours.min_offset, ours.max_offset) == (theirs["min"], theirs["max"]), (*where, theirs)
        messages = [of_java(message) for message in theirs["messages"]]
        same(where, [of_ours(message) for message in ours.messages][: len(messages)], messages)
        if count == 1 or ours.status is not GetMessageStatus.FOUND:
            assert ours.next_begin_offset == theirs["next"], (*where, theirs)
        else:
            assert offset < theirs["next"] <= ours.next_begin_offset, (*where, theirs)


def check_keys(store: ReadOnlyStore, java: JavaStore, topic: str, keys: Sequence[str]) -> None:
    """Java finds what we find, for every key; what it finds besides has the same hash, and is not ours to show."""
    if not keys:
        return
    for key, theirs in zip(keys, java.query(topic, keys), strict=True):
        ours = [message.physical_offset for message in store.query_message(topic, key, 64)]
        assert ours, f"{topic[:40]} {key!r}: not found by us"
        if len(theirs) < 64:
            assert set(ours) <= set(theirs), f"{topic[:40]} {key!r}: we find {ours}, Java {theirs}"
        for physical_offset in set(theirs) - set(ours):
            message = store.look_message_by_offset(physical_offset)
            assert message is not None
            assert message.topic != topic or key not in (*message.keys, message.unique_key), (topic[:40], key)


def check_times(store: ReadOnlyStore, java: JavaStore, topic: str, queue_id: int) -> None:
    """getOffsetInQueueByTime, before, at, between and behind the messages' times."""
    messages = store.get_message(topic, queue_id, store.min_offset(topic, queue_id), 200).messages
    times = sorted({message.store_timestamp_ms + delta for message in messages for delta in (-1, 0, 1)} | {0, 1 << 45})
    found = java.times(topic, queue_id, times)
    for time_ms, (lower, upper) in zip(times, found, strict=True):
        where = (topic[:40], queue_id, time_ms)
        assert store.queue_offset_by_time(topic, queue_id, time_ms) == lower, (*where, "lower", lower)
        assert store.queue_offset_by_time(topic, queue_id, time_ms, query.UPPER) == upper, (*where, "upper", upper)
    COUNTS.keys += len(times)


def keys_left(store: ReadOnlyStore) -> dict[str, list[str]]:
    """Topic -> keys of the messages that are still there."""
    found: dict[str, set[str]] = {}
    for topic, ids in store.topics().items():
        for queue_id in ids:
            low = store.min_offset(topic, queue_id)
            for batch in store.read(topic, queue_id, low, columns=("keys", "unique_key")):
                for row in batch.to_pylist():
                    found.setdefault(topic, set()).update(key for key in [*row["keys"], row["unique_key"]] if key)
    return {topic: sorted(keys) for topic, keys in found.items()}


def check_all(store: ReadOnlyStore, java: JavaStore, recipe: Recipe, *, expired: bool = False) -> None:
    """Everything Java can be asked; with `expired` segments only keys of what is left must be found."""
    check_messages(store, java)
    for topic, keys in (keys_left(store) if expired else recipe.keys_by_topic()).items():
        check_keys(store, java, topic, keys)
    queues = [(topic, queue_id) for topic, ids in store.topics().items() for queue_id in ids]
    for topic, queue_id in queues[:3]:
        check_statuses(store, java, topic, queue_id)
        check_times(store, java, topic, queue_id)
