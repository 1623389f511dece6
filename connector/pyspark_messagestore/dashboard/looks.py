"""What each page of the dashboard says, as values for JSON. The pages and `/api/v1` show the same.

A look opens the store, asks, and closes it, so it finds whatever folder is at the path then. It takes no lock and
writes nothing. What is read per look has a limit: the place to go on from is in the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from messagestore import ConfigError, MessageExt, OffsetOutOfRangeError, StoreConfig, StoreError, UnknownTopicError
from messagestore.inspect import operator
from messagestore.spi import SYS_FLAG_COMPRESSED, Queue, Range, StoreReader
from pyspark_messagestore.dashboard.newest import Filter, cells, columns_of, newest
from pyspark_messagestore.dashboard.stored import Stored
from pyspark_messagestore.monitoring.health import query_of, status_report
from pyspark_messagestore.monitoring.history import LagPoint, lag_history, rate_of
from pyspark_messagestore.words import count_words, time_ms, time_words

PAGE_COUNT, MOST_COUNT = 50, 500
LIST_SIZE = 32 << 20
"""The most bytes of records that a list reads."""
SEARCH_SIZE = 256 << 20
"""The most bytes of the log that one search reads; the answer says where to go on."""
FOUND_COUNT = 64
FILTER_SIZE = 64 << 20
"""The most bytes of records that one look through a topic reads; the answer says where to go on."""
RELATED_SIZE = 8 << 20
"""The most bytes of the log without an index that are searched for a message's retries."""
DAY_MS, POINTS, BATCHES = 86_400_000, 96, 100
_PLACE = re.compile(r"(?P<topic>\S+)/(?P<queue>[0-9]{1,10}) *@ *(?P<offset>[0-9]{1,18})")
_TIME = re.compile(r"-[0-9.]+(ms|s|m|h|d)|[0-9]{4}-[0-9]{2}-[0-9]{2}\S*|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+Z?")
_MESSAGE_ID = re.compile(r"[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56}")

_RETRY_TOPICS = {"%RETRY%": "retry", "%DLQ%": "dead letter"}

Asked = Mapping[str, str]
"""What stands behind the question mark of an address."""


# ---- the store


def status(stored: Stored, asked: Asked) -> dict[str, Any]:  # noqa: ARG001
    """As `messagestore status --json`."""
    with stored.opened() as store:
        return status_report(store, stored.facts(store))


def log(stored: Stored, asked: Asked) -> dict[str, Any]:  # noqa: ARG001
    """The segments, what the next retention would take, who keeps the rest, and what recoveries did."""
    faults = list[str]()
    with stored.opened() as store:
        segments, wrong = store.view("segments")
        (report,), more = store.view("status")
        (figures,), _ = store.view("figures")
    faults += [*wrong, *more]
    try:
        expired: dict[str, Any] | None = asdict(operator.expired(stored.path, StoreConfig(message_index_enable=False)))
    except (StoreError, OSError) as error:
        expired = None
        faults.append(f"what gc would delete is not known: {error}")
    return {
        "segments": segments,
        "expired": expired,
        "recoveries": report["recoveries"],
        "commitLog": report["commitLog"],
        "diskUsed": report["diskUsed"],
        "diskFree": figures["diskFree"],
        "growth": figures["growth"],
        "fullAt": _full_at(figures),
        "faults": list(dict.fromkeys(faults)),
    }


def _full_at(figures: Mapping[str, Any]) -> int | None:
    """When the disk is full if the log goes on to grow as it did, in milliseconds; None: not within ten years."""
    growth = figures["growth"]
    if growth is None or not growth["bytes"] or not growth["ms"]:
        return None
    left_ms = int(figures["diskFree"]) * int(growth["ms"]) // int(growth["bytes"])
    return int(figures["nowMs"]) + left_ms if left_ms < 3650 * DAY_MS else None


def spark(stored: Stored, asked: Asked) -> dict[str, Any]:
    """The apps and their newest batches, what was replayed or left behind, and dead letters."""
    with stored.opened() as store:
        apps, faults = store.view("apps")
        batches, more = store.view("batches")
        facts = stored.facts(store)
    newest = sorted(batches, key=lambda row: -row["physicalOffset"])
    return {
        "apps": apps,
        "batches": newest[: _number(asked, "count", BATCHES, most=MOST_COUNT)],
        "batchCount": len(batches),
        "counters": facts.figures["counters"],
        "staging": facts.figures["staging"],
        "deadLetters": facts.dead_letters,
        "faults": list(dict.fromkeys([*faults, *more, *facts.faults])),
    }


# ---- topics


def topics(stored: Stored, asked: Asked) -> dict[str, Any]:
    """The topics, sorted and page by page."""
    with stored.opened() as store:
        rows, faults = store.view("topics")
    sort, start = asked.get("sort", "topic"), _number(asked, "start", 0)
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
    name = _given(asked, "topic")
    with stored.opened() as store:
        rows, faults = store.offsets([name])
        settings = next((row for row in store.view("topics")[0] if row["topic"] == name), None)
        groups, more = store.view("groups")
        now_ms = _now_ms(store)
        rate = rate_of(store, name, now_ms - DAY_MS, now_ms, POINTS)
    return {
        "topic": name,
        "queues": rows,
        "settings": settings,
        "groups": [row for row in groups if row["topic"] == name],
        "rate": asdict(rate),
        "empty": _why_empty(rows),
        "faults": list(dict.fromkeys([*faults, *more])),
    }


def _why_empty(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why a topic has no message; empty text if it has some."""
    if any(row["messages"] for row in rows):
        return ""
    ever = sum(row["maxOffset"] for row in rows)
    if not ever:
        return "No message was ever written to this topic, or a broker's latest ones are not proven to be durable yet."
    return f"Retention has deleted all {count_words(ever, 'message')} of this topic."


# ---- messages


def messages(stored: Stored, asked: Asked) -> dict[str, Any]:
    """Messages of one queue, from a place on; without a place, the newest ones."""
    name, queue_id = _given(asked, "topic"), _number(asked, "queue", 0)
    count = _number(asked, "count", PAGE_COUNT, least=1, most=MOST_COUNT)
    with stored.opened() as store:
        low, high = _ends(store, name, queue_id)
        asked_start = _number(asked, "offset", max(low, high - count))
        start = min(max(low, asked_start), high)
        end, size = start, 0
        for each in store.sizes([Range(name, queue_id, start, min(high, start + count))])[0].tolist():
            if end > start and size + each > LIST_SIZE:
                break
            end, size = end + 1, size + each
        found = list(_read(stored, store, name, queue_id, start, end))
        queues = sorted(queue for topic_name, queue in store.ends([name]).queues if topic_name == name)
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
        "messages": found,
        "empty": _why_none(low, high, asked_start, found),
    }


def _why_none(low: int, high: int, start: int, found: Sequence[object]) -> str:
    if found:
        return "" if start >= low else f"Retention has deleted the messages below {low:,}."
    if not high:
        return "No message was ever written to this queue."
    if low == high:
        return f"Retention has deleted all {count_words(high, 'message')} of this queue."
    return f"The queue ends at {high:,}."


def _read(
    stored: Stored, store: StoreReader, name: str, queue_id: int, start: int, end: int
) -> Iterator[dict[str, Any]]:
    if start >= end:
        return
    for page in store.gather([Range(name, queue_id, start, end)]):
        for number, message in zip(page.queue_offsets.tolist(), page.messages(), strict=True):
            yield stored.fields(message, number)


def recent(stored: Stored, asked: Asked) -> dict[str, Any]:
    """Messages of a topic, the newest first, that pass a filter; from a time or a place in the log backwards."""
    name, wanted, names = _given(asked, "topic"), Filter.of(asked), columns_of(asked)
    count = _number(asked, "count", PAGE_COUNT, least=1, most=MOST_COUNT)
    before = _number(asked, "before", 0) if asked.get("before") else None
    until = asked.get("until", "").strip()
    with stored.opened() as store:
        ends = store.ends([name]).queues
        all_queues = sorted(queue_id for _, queue_id in ends)
        one = _number(asked, "queue", 0) if asked.get("queue") else None
        if one is not None or not ends:
            _ends(store, name, one or 0)
        queues = [(name, each) for each in all_queues if one in (None, each)]
        log = store.view("status")[0][0]["commitLog"]
        if until and before is None:
            before = _first_after(store, queues, time_ms("until", until))
        found = newest(
            stored,
            store,
            queues,
            wanted,
            before=before,
            low=log["minOffset"],
            high=log["maxOffset"],
            most=count,
            most_size=LIST_SIZE if not wanted else FILTER_SIZE,
        )
        begins = store.begins(queues)
    return {
        "topic": name,
        "queueId": one,
        "queues": all_queues,
        "filter": asdict(wanted),
        "filtered": bool(wanted),
        "columns": names,
        "until": until,
        "count": count,
        "before": before,
        "messages": [each | {"cells": cells(each, names)} for each in found.messages],
        "searchedSize": found.searched,
        "searchedCount": found.count,
        "backTo": found.back_to_ms,
        "goOn": found.go_on,
        "empty": _why_not_recent(found.messages, found.go_on, wanted, before, ends, begins),
    }


def _first_after(store: StoreReader, queues: Sequence[Queue], at_ms: int) -> int | None:
    """Where in the log the first message of some queues lies that was stored after a time; None: there is none."""
    ends = store.ends([name for name, _ in queues[:1]]).queues
    after = store.seek(dict.fromkeys(queues, at_ms))
    later = [Range(*queue, first, first + 1) for queue, first in after.items() if first < ends[queue]]
    return min((int(page.physical_offsets[0]) for page in store.gather(later)), default=None) if later else None


def _why_not_recent(
    found: Sequence[object],
    go_on: int | None,
    wanted: Filter,
    before: int | None,
    ends: Mapping[Queue, int],
    begins: Mapping[Queue, int],
) -> str:
    if found:
        return ""
    if go_on is not None:
        return "No message passes the filter so far."
    if not any(ends.values()):
        return "No message was ever written to this topic, or a broker's latest ones are not proven to be durable yet."
    if all(begins[queue] >= ends[queue] for queue in begins):
        return f"Retention has deleted all {count_words(sum(ends.values()), 'message')} of this topic."
    if wanted:
        return "No message that is there passes the filter."
    return "No message is there that is so old." if before is not None else "There is no message."


def message(stored: Stored, asked: Asked) -> dict[str, Any]:
    """One message: all fields, its neighbours, the batch that brought it, and who has read it."""
    name, queue_id, offset = _given(asked, "topic"), _number(asked, "queue", 0), _number(asked, "offset", 0)
    with stored.opened() as store:
        low, high = _ends(store, name, queue_id)
        if not low <= offset < high:
            raise _out_of_range(name, queue_id, offset, low, high)
        raw = _raw(store, name, queue_id, offset)
        at = raw.physical_offset
        batches = [row for row in store.view("batches")[0] if row["physicalOffset"] <= at < row["endPhysicalOffset"]]
        readers, faults = _readers_of(stored, store, name, queue_id, offset)
    fields = stored.fields(raw, offset, plain="plain" in asked)
    behind = operator.message_at(stored.path, raw.physical_offset + raw.size)
    found = {
        "message": fields,
        "compressed": bool(raw.sys_flag & SYS_FLAG_COMPRESSED),
        "previous": offset - 1 if offset > low else None,
        "next": offset + 1 if offset + 1 < high else None,
        "nextInLog": None
        if behind is None
        else {"topic": behind.topic, "queueId": behind.queue_id, "queueOffset": behind.queue_offset},
        "batch": batches[0] if batches else None,
        "readers": readers,
        "faults": faults,
    }
    related, more, found["relatedGoOn"] = _related(stored, raw)
    found["related"] = related
    faults += more
    return found


def _related(stored: Stored, raw: MessageExt) -> tuple[list[dict[str, Any]], list[str], int | None]:
    """The other messages with the UNIQ_KEY of a message: its retries, its dead letter, copies and replays."""
    key = raw.unique_key
    if not key or stored.hides_keys:
        return [], [], None
    try:
        hits = operator.search(stored.path, key, max_count=FOUND_COUNT, max_size=RELATED_SIZE)
    except (StoreError, OSError) as error:
        return [], [f"whether the message was retried is not known: {error}"], None
    found = []
    for each in sorted(hits.messages, key=lambda each: each.physical_offset):
        if each.physical_offset == raw.physical_offset:
            continue
        kind = next((words for begin, words in _RETRY_TOPICS.items() if each.topic.startswith(begin)), "same UNIQ_KEY")
        found.append(stored.fields(each) | {"kind": kind})
    return found, [], hits.go_on


def body(stored: Stored, asked: Asked) -> bytes:
    """The body of one message as it is stored; without the values that are masked.

    Raises
    ------
    ConfigError
        The body is hidden.
    """
    name, queue_id, offset = _given(asked, "topic"), _number(asked, "queue", 0), _number(asked, "offset", 0)
    with stored.opened() as store:
        low, high = _ends(store, name, queue_id)
        if not low <= offset < high:
            raise _out_of_range(name, queue_id, offset, low, high)
        return stored.body(_raw(store, name, queue_id, offset))


def _out_of_range(name: str, queue_id: int, offset: int, low: int, high: int) -> OffsetOutOfRangeError:
    if offset >= high:
        why = f"the queue ends at {high}" if high else "no message was ever written to this queue"
    else:
        why = f"retention has deleted the messages below {low}"
    return OffsetOutOfRangeError(
        f"{name}/{queue_id} @{offset}: {why}", topic=name, queue_id=queue_id, queue_offset=offset, min=low, max=high
    )


def _raw(store: StoreReader, name: str, queue_id: int, offset: int) -> MessageExt:
    for page in store.gather([Range(name, queue_id, offset, offset + 1)]):
        for found in page.messages():
            return found
    raise ConfigError(f"{name}/{queue_id} @{offset}: found a placeholder of a broker's; it is no message", key="offset")


def search(stored: Stored, asked: Asked) -> dict[str, Any]:
    """The messages that a text leads to: a place, a time, an offset message id, a UNIQ_KEY or a key."""
    text = _given(asked, "q").strip()
    found: dict[str, Any] = {"q": text, "kind": "key", "messages": [], "searchedSize": 0, "goOn": None, "note": ""}
    place = _PLACE.fullmatch(text)
    if place is not None:
        where = {"topic": place["topic"], "queue": place["queue"], "offset": place["offset"]}
        return found | {"kind": "place", "messages": [message(stored, where)["message"]]}
    if _TIME.fullmatch(text):
        return found | _at_time(stored, time_ms("time", text))

    if stored.hides_keys:  # a hit would say that a guess is right
        raise ConfigError(
            "keys are masked: the dashboard was started with --mask KEYS or UNIQ_KEY, so it finds messages by a place "
            "such as orders/1 @42 and by a time only",
            key="--mask",
        )
    start = _number(asked, "after", 0) if "after" in asked else None
    several = list[MessageExt]()
    if _MESSAGE_ID.fullmatch(text) and start is None:  # a UNIQ_KEY has the same form
        by_id = operator.message_at(stored.path, int(text[-16:], 16))
        several += [by_id] if by_id is not None and by_id.message_id.upper() == text.upper() else []
    hits = operator.search(stored.path, text, max_count=FOUND_COUNT, max_size=SEARCH_SIZE, start=start)
    several += hits.messages
    found["messages"] = [stored.fields(each) for each in several]
    found |= {"searchedSize": hits.searched_size, "goOn": hits.go_on}
    if not several:
        nothing = "No message has this key, UNIQ_KEY or message id."
        found["note"] = nothing if hits.go_on is None else "Nothing was found so far."
    return found


def _at_time(stored: Stored, at_ms: int) -> dict[str, Any]:
    """The first message of each queue that was stored at a time or later, as rows."""
    with stored.opened() as store:
        rows, faults = store.offsets((), at_ms)
    rows = [row for row in rows if row["storeTimestamp"] is not None]
    rows.sort(key=lambda row: (row["storeTimestamp"], row["topic"], row["queueId"]))
    note = "" if rows else f"No message was stored at {time_words(at_ms)} or later."
    return {"kind": "time", "timestamp": at_ms, "places": rows[:MOST_COUNT], "note": note, "faults": faults}


def _ends(store: StoreReader, name: str, queue_id: int) -> tuple[int, int]:
    """The first number of a queue whose message is there, and its end.

    Raises
    ------
    UnknownTopicError, ConfigError
        There is no such topic, or it has no such queue.
    """
    queue = (name, queue_id)
    ends = store.ends([name]).queues
    if queue not in ends:
        description = store.describe([name], queues=True)
        count = description.queue_counts.get(name, 0)
        if not count and not description.queue_ids.get(name):
            raise UnknownTopicError(name, (), hint="The page `Topics` shows those that there are")
        known = sorted({*range(min(count, MOST_COUNT)), *(queue_id for _, queue_id in ends)})
        if queue_id not in known:
            raise ConfigError(
                f"{name}: the topic has no queue {queue_id}. Its queues are {', '.join(map(str, known))}", key="queue"
            )
        return 0, 0
    return store.begins([queue])[queue], ends[queue]


# ---- readers


def readers(stored: Stored, asked: Asked) -> dict[str, Any]:  # noqa: ARG001
    """The queries and groups of a store: how far each is behind, and whether it catches up."""
    progress, faults = stored.progress(BATCHES)
    queries = []
    with stored.opened() as store:
        (figures,), more = store.view("figures")
        now_ms = int(figures["nowMs"])
        for each in progress:
            query = query_of(store, each)
            if not query.rows and not query.refused:
                continue
            points = lag_history(store, each, now_ms)
            oldest = min((r["oldestUnread"] for r in query.rows if r["oldestUnread"] is not None), default=None)
            queries.append(
                {
                    "checkpoint": each.path,
                    "queryId": each.query_id,
                    "batchId": None if each.committed is None else each.committed.batch_id,
                    "lag": sum(row["lag"] for row in query.rows),
                    "lagBytes": sum(row["lagBytes"] for row in query.rows),
                    "latencyMs": 0 if oldest is None else max(0, now_ms - oldest),
                    "topics": sorted({row["topic"] for row in query.rows}),
                    "refused": query.refused,
                    "history": [asdict(point) for point in points],
                    "outlook": outlook(points),
                    "rows": query.rows,
                }
            )
    stored.samples.add(now_ms, figures["groups"])
    return {"queries": queries, "groups": figures["groups"], "faults": list(dict.fromkeys([*faults, *more]))}


def group(stored: Stored, asked: Asked) -> dict[str, Any]:
    """One consumer group, queue by queue, as `messagestore lag --group`."""
    name = _given(asked, "group")
    with stored.opened() as store:
        rows, faults = store.group_lag(name)
        if rows:
            (figures,), _ = store.view("figures")
            stored.samples.add(int(figures["nowMs"]), figures["groups"])
    if not rows and not faults:
        raise ConfigError(f"consumer group {name!r:.300} has no offsets in this store", key="group", value=name)
    return {"group": name, "rows": rows, "history": stored.samples.of(name), "faults": faults}


def outlook(points: Sequence[LagPoint]) -> str:
    """Whether a reader catches up, from its last batches, in words."""
    if not points or not points[-1].lag:
        return "caught up" if points else "unknown: no batch of this query is done yet"
    last, before = points[-1], [point for point in points[-10:] if point.time_ms < points[-1].time_ms]
    if not before:
        return f"{count_words(last.lag, 'message')} behind"
    per_s = (last.lag - before[0].lag) * 1000 / (last.time_ms - before[0].time_ms)
    if per_s > 0:
        return f"falls behind by {_amount(per_s)} a second"
    if per_s < 0:
        return f"caught up in about {_duration(last.lag / -per_s)}"
    return f"stays {count_words(last.lag, 'message')} behind"


def _amount(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}" if per_s >= 0.1 else "less than 0.1"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(1, seconds):.0f} s"


def _readers_of(
    stored: Stored, store: StoreReader, name: str, queue_id: int, offset: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Who reads a queue: whether the reader is past a message, and how many messages before it otherwise."""
    progress, faults = stored.progress()
    groups, more = store.view("groups")
    places = [("group", row["group"], row) for row in groups]
    for each in progress:
        query = query_of(store, each)
        faults += query.refused
        places += [("query", each.path, row) for row in query.rows]
    found = []
    for kind, reader, row in places:
        if (row["topic"], row["queueId"]) == (name, queue_id):
            place = row["committedOffset"] or 0
            found.append(
                {"kind": kind, "reader": reader, "read": place > offset, "before": max(0, offset - place), "at": place}
            )
    return found, list(dict.fromkeys([*faults, *more]))


# ---- what was asked


def _now_ms(store: StoreReader) -> int:
    return int(store.view("figures")[0][0]["nowMs"])


def _given(asked: Asked, name: str) -> str:
    value = asked.get(name, "")
    if not value.strip():
        raise ConfigError(f"{name}: found nothing; the address must say which one, as in ?{name}=...", key=name)
    return value


def _number(asked: Asked, name: str, default: int, *, least: int = 0, most: int = (1 << 63) - 1) -> int:
    text = asked.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigError(
            f"{name}: found {text!r:.60}; allowed is a number from {least} to {most}", key=name, value=text
        )
    return int(text)


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
}
"""What can be asked of a store, by the last part of the address."""
