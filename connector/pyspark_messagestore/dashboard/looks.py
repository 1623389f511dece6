"""What each page of the dashboard says, as values for JSON. The pages and `/api/v1` show the same.

A look opens the store, asks, and closes it, so it finds whatever folder is at the path then. It takes no lock and
writes nothing. What is read per look has a limit: the place to go on from is in the answer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from messagestore import (
    ConfigError,
    CorruptionError,
    MessageExt,
    MessageIllegalError,
    OffsetOutOfRangeError,
    StoreError,
    UnknownTopicError,
)
from messagestore.inspect import operator
from messagestore.spi import SYS_FLAG_COMPRESSED, Queue, Range, Report, StoreReader
from pyspark_messagestore.checkpoint.spark_checkpoint import Progress
from pyspark_messagestore.dashboard.asked import MOST_COUNT, Asked, given, number
from pyspark_messagestore.dashboard.newest import Filter, columns_of, newest
from pyspark_messagestore.dashboard.room import log
from pyspark_messagestore.dashboard.stored import CONFIG, Stored
from pyspark_messagestore.dashboard.trends import outlook
from pyspark_messagestore.dashboard.work import spark
from pyspark_messagestore.monitoring.health import deleted_unread, query_of, topics_of
from pyspark_messagestore.monitoring.history import lag_history, spans
from pyspark_messagestore.words import command_line, count_words, error_words, quoted, time_ms, time_words

PAGE_COUNT = 50
LIST_SIZE = 32 << 20
"""The most bytes of records that a list reads."""
SEARCH_SIZE = 256 << 20
"""The most bytes of the log that one search reads; the answer says where to go on."""
FOUND_COUNT = 64
FILTER_SIZE = 64 << 20
"""The most bytes of records that one look through a topic reads; the answer says where to go on."""
RELATED_SIZE = 8 << 20
"""The most bytes of the log without an index that are searched for a message's retries, and for the one before it."""
DAY_MS, POINTS, BATCHES = 86_400_000, 96, 100
_LEAST_POINTS, _MOST_SEEKS = 12, 20_000
"""A topic with very many queues has fewer points, as each is a search in each queue."""
_PLACE = re.compile(r"(?P<topic>\S+)/(?P<queue>[0-9]{1,10}) *@ *(?P<offset>[0-9]{1,18})")
_TIME = re.compile(r"-[0-9.]+(ms|s|m|h|d)|[0-9]{4}-[0-9]{2}-[0-9]{2}\S*|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+Z?")
_MESSAGE_ID = re.compile(r"[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56}")

_RETRY_TOPICS = {"%RETRY%": "retry", "%DLQ%": "dead letter"}

# ---- the store


def status(stored: Stored, asked: Asked) -> dict[str, Any]:  # noqa: ARG001
    """As `messagestore status --json`."""
    return stored.report()


def verify(stored: Stored, asked: Asked) -> dict[str, Any]:  # noqa: ARG001
    """How far the check of every byte has come, or what the last one found."""
    return stored.checks.of(stored.path)


# ---- topics


def topics(stored: Stored, asked: Asked) -> dict[str, Any]:
    """The topics, sorted and page by page."""
    rows, faults = stored.rows("topics")
    sort, start = asked.get("sort", "topic"), number(asked, "start", 0)
    keys: dict[str, Callable[[dict[str, Any]], Any]] = {
        "topic": lambda row: row["topic"],
        "messages": lambda row: (-row["messages"], row["topic"]),
        "queues": lambda row: (-row["queues"], row["topic"]),
    }
    if sort not in keys:
        raise ConfigError(f"sort: found {sort!r:.60}; allowed are {', '.join(keys)}", key="sort", value=sort)

    wanted = asked.get("contains", "").lower()
    rows = sorted((row for row in rows if wanted in row["topic"].lower()), key=keys[sort])
    shown = rows[start : start + MOST_COUNT]

    return {
        "rows": shown,
        "count": len(rows),
        "start": start,
        "sort": sort,
        "contains": asked.get("contains", ""),
        "next": start + MOST_COUNT if start + MOST_COUNT < len(rows) else None,
        "faults": faults,
    }


def topic(stored: Stored, asked: Asked) -> dict[str, Any]:
    """One topic: its queues, its settings, its groups, and its messages over the last 24 hours."""
    name, start = given(asked, "topic"), number(asked, "start", 0)

    settings = next((row for row in stored.rows("topics")[0] if row["topic"] == name), None)

    def look() -> tuple[dict[str, Any], int]:
        now_ms = time.time_ns() // 1_000_000
        queue_count = settings["queues"] if settings else 0
        points = max(_LEAST_POINTS, min(POINTS, _MOST_SEEKS // max(1, queue_count)))
        times_ms = spans(now_ms - DAY_MS, now_ms, points)
        looked = operator.look_at_topic(stored.path, name, times_ms, CONFIG)
        shown = {
            "queues": looked.queues,
            "groups": looked.groups,
            "rate": {"topic": name, "timesMs": times_ms, "counts": [max(0, b - a) for a, b in pairwise(looked.stored)]},
            "faults": looked.faults,
        }
        return shown, len(looked.queues) + len(looked.groups)

    shown = stored.kept.get(f"topic {name}", look)
    rows, groups = shown["queues"], shown["groups"]
    return shown | {
        "topic": name,
        "queues": rows[start : start + MOST_COUNT],
        "queueCount": len(rows),
        "start": start,
        "next": start + MOST_COUNT if start + MOST_COUNT < max(len(rows), len(groups)) else None,
        "settings": settings,
        "groups": groups[start : start + MOST_COUNT],
        "groupRowCount": len(groups),
        "messages": sum(row["messages"] for row in rows),
        "empty": why_empty(stored, rows),
    }


def why_empty(stored: Stored, rows: Sequence[Mapping[str, Any]]) -> str:
    """Why a topic has no message; empty text if it has some."""
    if any(row["messages"] for row in rows):
        return ""
    ever = sum(row["maxOffset"] for row in rows)
    return _deleted(stored, ever, "topic") if ever else _never(stored, "topic")


def _never(stored: Stored, what: str) -> str:
    """Why there never was a message, or why nobody may see one yet."""
    figures = stored.facts().figures
    hidden = figures["unproven"]
    if hidden is not None:
        more = " and more" if hidden["more"] else ""
        return (
            f"No message of this {what} can be shown. The store was not closed before the machine was restarted, and "
            f"{count_words(hidden['records'], 'record')}{more} of all topics are not proven to be durable: "
            f"run `messagestore recover {quoted(stored.path)}`."
        )
    if figures["left"] in ("broker", "unreadable"):
        return (
            f"No message was ever written to this {what}, or only some at the end of the log, which a broker has not "
            "proven to be durable yet."
        )
    return f"No message was ever written to this {what}.{_waiting(figures)}"


def _waiting(figures: Mapping[str, Any]) -> str:
    """What will be in a topic or queue of the store later, in a sentence; empty if nothing waits."""
    counts = ((figures[part] or {}).get("messages", 0) for part in ("delayed", "openHalves"))
    kinds = zip(counts, ("delayed message", "half message"), strict=True)
    waiting = " and ".join(count_words(count, kind) for count, kind in kinds if count)
    return f" Waiting, and in no topic yet: {waiting}, of all topics." if waiting else ""


def _deleted(stored: Stored, count: int, what: str) -> str:
    """What retention has deleted, and up to when."""
    reserved_ms, now_ms = stored.facts().figures["reserveTimeMs"], stored.facts().now_ms
    until = "" if reserved_ms is None else f", those stored before {time_words(now_ms - reserved_ms)}"
    return f"Retention has deleted all {count_words(count, 'message')} of this {what}{until}."


# ---- messages


def messages(stored: Stored, asked: Asked) -> dict[str, Any]:
    """Messages of one queue, from a place on; without a place, the newest ones."""
    name, queue_id = given(asked, "topic"), number(asked, "queue", 0)
    count = number(asked, "count", PAGE_COUNT, least=1, most=MOST_COUNT)

    with stored.opened() as store:
        low, high = _ends(store, name, queue_id)
        asked_start = number(asked, "offset", max(low, high - count))
        start = min(max(low, asked_start), high)

        end, size = start, 0
        for record_size in store.sizes([Range(name, queue_id, start, min(high, start + count))])[0].tolist():
            if end > start and size + record_size > LIST_SIZE:
                break
            end, size = end + 1, size + record_size
        stored.reads.read(size)

        rows = list(_read(stored, store, name, queue_id, start, end))
        queues = sorted(store.describe([name], queues=True).queue_ids.get(name, []))

    return {
        "topic": name,
        "queueId": queue_id,
        "queues": queues,
        "minOffset": low,
        "maxOffset": high,
        "start": start,
        "end": end,
        "count": count,
        "previous": max(low, start - count) if start > low else None,
        "next": end if end < high else None,
        "messages": rows,
        "empty": _why_none(stored, low, high, asked_start, rows),
    }


def _why_none(stored: Stored, low: int, high: int, start: int, rows: Sequence[object]) -> str:
    if rows:
        return "" if start >= low else f"Retention has deleted the messages below {low:,}."
    if not high:
        return _never(stored, "queue")
    if low == high:
        return _deleted(stored, high, "queue")
    return f"The queue ends at {high:,}."


def _read(
    stored: Stored, store: StoreReader, name: str, queue_id: int, start: int, end: int
) -> Iterator[dict[str, Any]]:
    if start >= end:
        return
    for page in store.gather([Range(name, queue_id, start, end)]):
        for queue_offset, message in zip(page.queue_offsets.tolist(), page.messages(), strict=True):
            yield stored.fields(message, queue_offset)


def recent(stored: Stored, asked: Asked) -> dict[str, Any]:
    """Messages of a topic, the newest first, that pass a filter; from a time or a place in the log backwards."""
    name, wanted, names = given(asked, "topic"), Filter.of(asked), columns_of(asked)
    count = number(asked, "count", PAGE_COUNT, least=1, most=MOST_COUNT)
    before = number(asked, "before", 0) if asked.get("before") else None
    until = asked.get("until", "").strip()
    only_queue = number(asked, "queue", 0) if asked.get("queue") else None

    with stored.opened() as store:
        ends = store.ends([name]).queues
        queue_ids = sorted(queue_id for _, queue_id in ends)
        if only_queue is not None or not ends:
            _ends(store, name, only_queue or 0)  # an error if there is no such queue
        queues = [(name, queue_id) for queue_id in queue_ids if only_queue in (None, queue_id)]
        low, high = operator.log_range(stored.path)
        if until and before is None:
            before = _first_after(stored, store, queues, time_ms("until", until))

        most_size = LIST_SIZE if not wanted else FILTER_SIZE
        result = newest(
            stored, store, queues, wanted, names, before=before, low=low, high=high, most=count, most_size=most_size
        )
        begins = {} if result.messages else store.begins(queues)

    return {
        "topic": name,
        "queueId": only_queue,
        "queues": queue_ids,
        "filter": asdict(wanted),
        "filtered": bool(wanted),
        "columns": names,
        "until": until,
        "count": count,
        "before": before,
        "messages": result.messages,
        "searchedSize": result.searched,
        "searchedCount": result.count,
        "backTo": result.back_to_ms,
        "goOn": result.go_on,
        "searchedOf": high - low,
        "searchedFrom": high if before is None else min(before, high),
        "logBegin": low,
        "empty": _why_not_recent(stored, result.messages, result.go_on, wanted, before, ends, begins),
    }


def _first_after(stored: Stored, store: StoreReader, queues: Sequence[Queue], at_ms: int) -> int | None:
    """The place in the log of the first message of some queues that was stored after a time; None: there is none."""
    ends = store.ends([name for name, _ in queues[:1]]).queues
    after = store.seek(dict.fromkeys(queues, at_ms))
    later = [Range(*queue, first, first + 1) for queue, first in after.items() if first < ends[queue]]
    stored.reads.read(sum(int(sizes.sum()) for sizes in store.sizes(later)) if later else 0)
    return min((int(page.physical_offsets[0]) for page in store.gather(later)), default=None) if later else None


def _why_not_recent(
    stored: Stored,
    rows: Sequence[object],
    go_on: int | None,
    wanted: Filter,
    before: int | None,
    ends: Mapping[Queue, int],
    begins: Mapping[Queue, int],
) -> str:
    if rows:
        return ""
    if go_on is not None:
        return "No message passes the filter so far."
    if not any(ends.values()):
        return _never(stored, "topic")
    if all(begins[queue] >= ends[queue] for queue in begins):
        return _deleted(stored, sum(ends.values()), "topic")
    # The whole topic was searched, and it has messages.
    if wanted:
        return "None of the messages passes the filter."
    return "There is no message this old." if before is not None else "There is no message."


def message(stored: Stored, asked: Asked) -> dict[str, Any]:
    """One message: all fields, its neighbours, the batch that brought it, and who has read it."""
    name, queue_id, offset = given(asked, "topic"), number(asked, "queue", 0), number(asked, "offset", 0)

    with stored.opened() as store:
        low, high = _ends(store, name, queue_id)
        if not low <= offset < high:
            raise _out_of_range(name, queue_id, offset, low, high)
        raw = _raw(stored, store, name, queue_id, offset)
        at = raw.physical_offset
        batches = [row for row in stored.rows("batches")[0] if row["physicalOffset"] <= at < row["endPhysicalOffset"]]
        readers, faults = _readers_of(stored, store, (name, queue_id), offset, low, high)
        # Where the search for the message before it in the log begins: at the one before it in its queue.
        near = store.places({(name, queue_id): offset})[name, queue_id].physical_offset if offset > low else None

    fields = stored.fields(raw, offset, plain="plain" in asked)
    try:
        behind = operator.message_at(stored.path, raw.physical_offset + raw.size)
        if near is None:
            near = operator.log_range(stored.path)[0]
        ahead = None
        if near < at <= near + RELATED_SIZE:
            ahead = operator.message_before(stored.path, at, near)
            stored.reads.read(at - near)
    except (StoreError, OSError) as error:
        ahead = behind = None
        faults.append(f"its neighbours in the log cannot be read: {error_words(error)}")

    page = {
        "message": fields,
        "compressed": bool(raw.sys_flag & SYS_FLAG_COMPRESSED),
        "previous": offset - 1 if offset > low else None,
        "next": offset + 1 if offset + 1 < high else None,
        "previousInLog": _neighbour(stored, ahead),
        "nextInLog": _neighbour(stored, behind),
        "batch": batches[0] if batches else None,
        "readers": readers,
        "faults": faults,
    }

    related, related_faults, page["relatedGoOn"] = _related(stored, raw)
    page["related"] = related
    faults += related_faults
    return page


def _neighbour(stored: Stored, message: MessageExt | None) -> dict[str, Any] | None:
    if message is None:
        return None
    return {
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "inQueue": message.physical_offset in _in_queues(stored, [message]),
    }


def _related(stored: Stored, raw: MessageExt) -> tuple[list[dict[str, Any]], list[str], int | None]:
    """The other messages with the UNIQ_KEY of a message: its retries, its dead letter, copies and replays."""
    key = raw.unique_key
    if not key or stored.hides_keys:
        return [], [], None
    try:
        hits, faults = _hits(stored, key, RELATED_SIZE)
    except (StoreError, OSError) as error:
        return [], [f"whether the message was retried is not known: {error_words(error)}"], None
    others = [other for other in hits.messages if other.physical_offset != raw.physical_offset]
    rows, placed = [], _in_queues(stored, others)
    for other in sorted(others, key=lambda other: other.physical_offset):
        kind = next((words for begin, words in _RETRY_TOPICS.items() if other.topic.startswith(begin)), "same UNIQ_KEY")
        rows.append(stored.fields(other) | {"kind": kind, "inQueue": other.physical_offset in placed})
    return rows, faults, hits.go_on


def _in_queues(stored: Stored, messages: Sequence[MessageExt]) -> set[int]:
    """The physical offsets of those messages that are in their queues, at the numbers that their records have.

    The log keeps the records of a topic that was deleted, and the index leads to them. A topic of that name that was
    made again has other messages at their numbers.
    """
    placed = set[int]()
    with stored.opened() as store:
        for message in messages:
            queue = (message.topic, message.queue_id)
            try:
                place = store.places({queue: message.queue_offset + 1}).get(queue)
                if place is None:
                    store.seek({queue: None})  # which says so if a file of the queue is missing, and not the message
            except (ConfigError, MessageIllegalError):  # no topic that could have queues
                continue
            except StoreError:  # its queue cannot be read: its page says why
                placed.add(message.physical_offset)
                continue
            if place is not None and place.size and place.physical_offset == message.physical_offset:
                placed.add(message.physical_offset)
    return placed


def body(stored: Stored, asked: Asked) -> bytes:
    """The body of one message as it is stored; without the values that are masked.

    Raises
    ------
    ConfigError
        The body is hidden.
    """
    name, queue_id, offset = given(asked, "topic"), number(asked, "queue", 0), number(asked, "offset", 0)
    with stored.opened() as store:
        low, high = _ends(store, name, queue_id)
        if not low <= offset < high:
            raise _out_of_range(name, queue_id, offset, low, high)
        return stored.body(_raw(stored, store, name, queue_id, offset))


def _out_of_range(name: str, queue_id: int, offset: int, low: int, high: int) -> OffsetOutOfRangeError:
    if offset >= high:
        why = f"the queue ends at {high}" if high else "no message was ever written to this queue"
    else:
        why = f"retention has deleted the messages below {low}"
    return OffsetOutOfRangeError(
        f"{name}/{queue_id} @{offset}: {why}", topic=name, queue_id=queue_id, queue_offset=offset, min=low, max=high
    )


def _raw(stored: Stored, store: StoreReader, name: str, queue_id: int, offset: int) -> MessageExt:
    for page in store.gather([Range(name, queue_id, offset, offset + 1)]):
        for message in page.messages():
            stored.reads.read(message.size)
            return message
    raise ConfigError(f"{name}/{queue_id} @{offset}: found a placeholder of a broker's; it is no message", key="offset")


def search(stored: Stored, asked: Asked) -> dict[str, Any]:
    """The messages that a text leads to: a place, a time, an offset message id, a UNIQ_KEY or a key. A text that is a
    time is searched for as a key, too, in the index and in a little of the log that it does not cover.
    """
    text = asked.get("q", "").strip()
    page: dict[str, Any] = {
        "q": text,
        "kind": "key",
        "messages": [],
        "searchedSize": 0,
        "goOn": None,
        "note": "",
        "command": "",
        "faults": [],
    }
    if not text:
        return page | {"note": "Type a key, a UNIQ_KEY, a message id, a place such as orders/1 @42, or a time."}

    place = _PLACE.fullmatch(text)
    if place is not None:
        return page | _at_place(stored, place["topic"], place["queue"], place["offset"])

    at_ms = None if "after" in asked else _time_of(text)
    if at_ms is None:
        return page | _with_key(stored, asked, text, SEARCH_SIZE)

    at_time = page | _at_time(stored, asked, at_ms)
    if stored.hides_keys or at_time["start"]:
        return at_time
    try:
        with_key = _with_key(stored, asked, text, RELATED_SIZE)
    except (StoreError, OSError) as error:
        return at_time | {"faults": [*at_time["faults"], f"whether it is a key is not known: {error_words(error)}"]}

    if not with_key["messages"] and with_key["goOn"] is None:
        return at_time
    faults = [*at_time["faults"], *with_key["faults"]]
    return (
        at_time
        | with_key
        | {"kind": "time", "note": at_time["note"], "keyNote": with_key.get("note", ""), "faults": faults}
    )


def _time_of(text: str) -> int | None:
    """A text read as a time, in milliseconds since 1970; None: it is none. A text that is a time may be a key, too."""
    if not _TIME.fullmatch(text):
        return None
    try:
        return time_ms("time", text)
    except ConfigError:
        return None


def _at_place(stored: Stored, name: str, queue_id: str, offset: str) -> dict[str, Any]:
    shown = message(stored, {"topic": name, "queue": queue_id, "offset": offset})["message"]
    command = command_line("get", stored.path, name, queue_id, offset=offset, count=1)
    return {"kind": "place", "messages": [shown], "command": command}


def _with_key(stored: Stored, asked: Asked, text: str, size: int) -> dict[str, Any]:
    """The newest messages with a key, a UNIQ_KEY or a message id, as far as one search has come."""
    if stored.hides_keys:  # a hit would say that a guess is right
        raise ConfigError(
            "keys are masked: the dashboard was started with --mask KEYS or UNIQ_KEY, so it finds messages by a place "
            "such as orders/1 @42 and by a time only",
            key="--mask",
        )
    most = number(asked, "most", size, least=1, most=SEARCH_SIZE)
    start = number(asked, "after", 0) if "after" in asked else None

    messages = list[MessageExt]()
    if _MESSAGE_ID.fullmatch(text) and start is None:  # a UNIQ_KEY has the same form
        by_id = operator.message_at(stored.path, int(text[-16:], 16))
        messages += [by_id] if by_id is not None and by_id.offset_message_id.upper() == text.upper() else []
    hits, faults = _hits(stored, text, most, start)
    places = {message.physical_offset for message in messages}
    messages += [message for message in hits.messages if message.physical_offset not in places]

    option, placed = _option_of(text, messages), _in_queues(stored, messages)
    done_at = hits.end if hits.go_on is None else hits.go_on
    result = {
        "command": command_line("find", stored.path, **{option: text}),
        "messages": [stored.fields(message) | {"inQueue": message.physical_offset in placed} for message in messages],
        "searchedSize": hits.searched_size,
        "goOn": hits.go_on,
        "logSize": hits.end - hits.begin,
        "doneSize": max(0, done_at - hits.begin),
        "faults": faults,
    }
    if not messages:
        none = "No message has this key, UNIQ_KEY or message id."
        further = none if start is None else "Nothing more was found."
        return result | {"note": further if hits.go_on is None else "Nothing was found so far."}
    if hits.more:
        return result | {
            "command": command_line("find", stored.path, **{option: text}, count=10 * FOUND_COUNT),
            "note": f"The newest {FOUND_COUNT} messages. Older ones have this key, too: the command below shows more.",
        }
    return result


def _option_of(text: str, messages: Sequence[MessageExt]) -> str:
    """The option of `messagestore find` by which a text leads to these messages."""
    if not messages or any(text in message.keys for message in messages):
        return "key"
    return "unique_key" if any(message.unique_key == text for message in messages) else "msg_id"


def _hits(stored: Stored, key: str, most: int, start: int | None = None) -> tuple[operator.KeySearch, list[str]]:
    """The messages with a key, and why the index was not asked. The index is derived from the log, which is searched
    without it: nobody can tell the dashboard the settings of a broker whose index files have another size.
    """
    faults = []
    try:
        hits = operator.search(stored.path, key, max_count=FOUND_COUNT, max_size=most, start=start)
    except CorruptionError as error:
        if os.path.basename(os.path.dirname(error.path)) != "index":
            raise
        faults.append(f"the log was searched without the index, which cannot be read: {error}")
        hits = operator.search(stored.path, key, max_count=FOUND_COUNT, max_size=most, start=start, config=CONFIG)
    stored.reads.read(hits.searched_size + sum(message.size for message in hits.messages))
    return hits, faults


def _at_time(stored: Stored, asked: Asked, at_ms: int) -> dict[str, Any]:
    """The first message of each queue that was stored at a time or later, as rows."""
    start = number(asked, "start", 0)
    with stored.opened() as store:
        rows, faults = store.offsets((), at_ms)
    rows = [row for row in rows if row["storeTimestamp"] is not None]
    rows.sort(key=lambda row: (row["storeTimestamp"], row["topic"], row["queueId"]))

    places, note = rows[start : start + MOST_COUNT], ""
    if not rows:
        note = f"No message was stored at {time_words(at_ms)} or later."
    elif len(rows) > MOST_COUNT:
        note = (
            f"{start + 1:,} to {start + len(places):,} of {len(rows):,} queues, first those that got a message first."
        )

    return {
        "kind": "time",
        "timestamp": at_ms,
        "places": places,
        "start": start,
        "next": start + MOST_COUNT if start + MOST_COUNT < len(rows) else None,
        "keyNote": "",
        "note": note,
        "faults": faults,
    }


def _ends(store: StoreReader, name: str, queue_id: int) -> tuple[int, int]:
    """The first number of a queue whose message is there, and its end.

    Raises
    ------
    UnknownTopicError, ConfigError
        There is no such topic, or it has no such queue.
    """
    queue = (name, queue_id)
    high = store.seek({queue: None})[queue]
    if not high:
        description = store.describe([name], queues=True)
        count = description.queue_counts.get(name, 0)
        if not count and not description.queue_ids.get(name):
            raise UnknownTopicError(name, None, hint="The page `Topics` shows those that there are")
        known = sorted({*range(min(count, MOST_COUNT)), *description.queue_ids.get(name, [])})
        if queue_id not in known:
            raise ConfigError(
                f"{name}: the topic has no queue {queue_id}. Its queues are {', '.join(map(str, known))}", key="queue"
            )
        return 0, 0
    return store.begins([queue])[queue], high


# ---- readers


def readers(stored: Stored, asked: Asked) -> dict[str, Any]:
    """The queries and groups of a store: how far each is behind, and whether it catches up."""
    facts = stored.facts()
    now_ms, groups = facts.now_ms, facts.figures["groups"]

    def look() -> tuple[tuple[list[dict[str, Any]], list[str]], int]:
        progress, faults = stored.progress(BATCHES)
        with stored.opened() as store:
            rows_or_none = [_query(stored, store, query_progress, now_ms) for query_progress in progress]
        queries = [row for row in rows_or_none if row is not None]
        return (queries, faults), sum(len(query["rows"]) for query in queries)

    queries, faults = stored.kept.get("queries", look)
    start, sort = number(asked, "start", 0), asked.get("sort", "lag")
    keys: dict[str, Callable[[dict[str, Any]], Any]] = {
        "lag": lambda row: (-row["lag"], row["group"], row["topic"]),
        "bytes": lambda row: (-row["lagBytes"], row["group"], row["topic"]),
        "oldest": lambda row: (-row["latencyMs"], row["group"], row["topic"]),
        "group": lambda row: (row["group"], row["topic"]),
    }
    if sort not in keys:
        raise ConfigError(f"sort: found {sort!r:.60}; allowed are {', '.join(keys)}", key="sort", value=sort)
    rows = sorted(groups, key=keys[sort])[start : start + MOST_COUNT]
    return {
        "queries": queries,
        "groups": [row | {"outlook": stored.samples.outlook(row["group"])} for row in rows],
        "groupCount": len(groups),
        "sort": sort,
        "start": start,
        "next": start + MOST_COUNT if start + MOST_COUNT < len(groups) else None,
        "nowMs": now_ms,
        "faults": list(dict.fromkeys([*faults, *facts.faults])),
    }


def _query(stored: Stored, store: StoreReader, progress: Progress, now_ms: int) -> dict[str, Any] | None:
    """How far a query is behind and was behind; None if it reads another store."""
    query = query_of(store, progress, others=stored.others, originals=stored.originals)
    planned = topics_of(progress)  # its first batch may not be done yet
    if not query.rows and not query.refused and (query.elsewhere or not planned):
        return None
    unknown = bool(query.refused) and not query.rows  # it reads another store, or its topics cannot be read
    points = [] if unknown else lag_history(store, progress, now_ms)
    oldest = min((row["oldestUnread"] for row in query.rows if row["oldestUnread"] is not None), default=None)
    return {
        "checkpoint": progress.path,
        "queryId": progress.query_id,
        "batchId": None if progress.committed is None else progress.committed.batch_id,
        "lag": sum(row["lag"] for row in query.rows),
        "lagBytes": sum(row["lagBytes"] for row in query.rows),
        "deleted": sum(map(deleted_unread, query.rows)),
        "latencyMs": 0 if oldest is None else max(0, now_ms - oldest),
        "topics": sorted({row["topic"] for row in query.rows}) or planned,
        "refused": query.refused,
        "history": [{"batchId": point.batch_id, "timeMs": point.time_ms, "lag": point.lag} for point in points],
        "outlook": "" if unknown else outlook(points),
        "rows": query.rows,
    }


def group(stored: Stored, asked: Asked) -> dict[str, Any]:
    """One consumer group, queue by queue, as `messagestore lag --group`."""
    name, start = given(asked, "group"), number(asked, "start", 0)

    def look() -> tuple[Report, int]:
        with stored.opened() as store:
            rows, faults = store.group_lag(name)
        return (rows, faults), len(rows)

    rows, faults = stored.kept.get(f"group {name}", look)
    if not rows and not faults:
        raise ConfigError(f"consumer group {name!r:.300} has no offsets in this store", key="group", value=name)
    if rows:
        stored.facts()  # takes a sample
    shown = sorted(rows, key=lambda row: (-row["lag"], row["topic"], row["queueId"]))[start : start + MOST_COUNT]
    return {
        "group": name,
        "rows": shown,
        "rowCount": len(rows),
        "start": start,
        "next": start + MOST_COUNT if start + MOST_COUNT < len(rows) else None,
        "lag": sum(row["lag"] for row in rows),
        "lagBytes": sum(row["lagBytes"] for row in rows),
        "deleted": sum(map(deleted_unread, rows)),
        "history": stored.samples.of(name),
        "outlook": stored.samples.outlook(name),
        "faults": faults,
    }


def _readers_of(
    stored: Stored, store: StoreReader, queue: Queue, offset: int, low: int, high: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Who reads a queue: whether the reader is past a message, and how many messages are before it otherwise.

    Nothing here is kept from an earlier look. Messages that retention has deleted do not count as unread. If a place
    lies beyond the end of the queue, the numbers began again, and the place says nothing about the messages.
    """
    progress, faults = stored.progress()
    places: list[tuple[str, str, int | None]] = []
    try:
        places += [("group", *place) for place in operator.group_places(stored.path, *queue).items()]
    except (StoreError, OSError) as error:
        faults.append(error_words(error))
    for query_progress in progress:
        query = query_of(store, query_progress, only=queue, originals=stored.originals)
        faults += query.refused
        places += [("query", query_progress.path, row["committedOffset"]) for row in query.rows]
    rows = []
    for kind, reader, committed in places:
        place = operator.corrected(committed or 0, low, high)
        before = max(0, offset - max(place, low))
        rows.append({"kind": kind, "reader": reader, "read": place > offset, "before": before, "at": place})
    return rows, list(dict.fromkeys(faults))


LOOKS: dict[str, Callable[[Stored, Asked], dict[str, Any]]] = {
    "status": status,
    "topics": topics,
    "topic": topic,
    "recent": recent,
    "messages": messages,
    "message": message,
    "search": search,
    "readers": readers,
    "group": group,
    "spark": spark,
    "log": log,
    "verify": verify,
}
"""What can be asked of a store, by the last part of the address."""
MOST_READ = {
    "search": SEARCH_SIZE,
    "recent": FILTER_SIZE,
    "messages": LIST_SIZE,
    "download": FILTER_SIZE,
    "message": 2 * RELATED_SIZE,
    "body": RELATED_SIZE,
}
"""About how many bytes of messages a look reads at most, by the last part of the address. Looks that are not here read
none.
"""
