"""What each page of the dashboard says, as values for JSON. The pages and `/api/v1` show the same.

A look opens the store, asks, and closes it, so it finds whatever folder is at the path then. It takes no lock and
writes nothing. What is read per look has a limit: the place to go on from is in the answer.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from messagestore import ConfigError, MessageExt, OffsetOutOfRangeError, StoreConfig, StoreError, UnknownTopicError
from messagestore.inspect import operator
from messagestore.spi import LOCAL_STORES, SYS_FLAG_COMPRESSED, Range, StoreReader, plain_body
from pyspark_messagestore.checkpoint.spark_checkpoint import Progress, read_progress
from pyspark_messagestore.monitoring.health import Facts, facts_of, query_of, status_report
from pyspark_messagestore.monitoring.history import LagPoint, lag_history, rate_of
from pyspark_messagestore.words import count_words, message_fields, time_ms, time_words

PAGE_COUNT, MOST_COUNT = 50, 500
LIST_SIZE = 32 << 20
"""The most bytes of records that a list reads."""
SEARCH_SIZE = 256 << 20
"""The most bytes of the log that one search reads; the answer says where to go on."""
FOUND_COUNT = 64
DAY_MS, POINTS, BATCHES = 86_400_000, 96, 100
_PLACE = re.compile(r"(?P<topic>\S+)/(?P<queue>[0-9]{1,10}) *@ *(?P<offset>[0-9]{1,18})")
_TIME = re.compile(r"-[0-9.]+(ms|s|m|h|d)|[0-9]{4}-[0-9]{2}-[0-9]{2}\S*|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+Z?")
_MESSAGE_ID = re.compile(r"[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56}")

Asked = Mapping[str, str]
"""What stands behind the question mark of an address."""


@dataclass(frozen=True)
class Stored:
    """A store that the dashboard shows.

    Parameters
    ----------
    name : str
        In addresses.
    path : str
        Its root folder.
    checkpoints : tuple of str
        The checkpointLocations of queries, some of which read this store.
    hides_bodies : bool
        No body leaves the server.
    """

    name: str
    path: str
    checkpoints: tuple[str, ...] = ()
    hides_bodies: bool = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[StoreReader]:
        """The store, open for reading without its index, so that a broker's store needs no settings."""
        config = StoreConfig(message_index_enable=False)
        with contextlib.closing(LOCAL_STORES.reader(self.path, config)) as store:
            yield store

    def progress(self, least: int = 1) -> tuple[list[Progress], list[str]]:
        """What the checkpoints say, and those that cannot be read, in words."""
        found, faults = list[Progress](), list[str]()
        for folder in self.checkpoints:
            try:
                found.append(read_progress(folder, least))
            except (StoreError, OSError) as error:
                faults.append(str(error))
        return found, faults

    def facts(self, store: StoreReader) -> Facts:
        """What the rules of `health` look at; a checkpoint that cannot be read is a fault."""
        readable, faults = self.progress()
        facts = facts_of(store, [each.path for each in readable])
        return replace(facts, faults=[*facts.faults, *faults])

    def fields(self, message: MessageExt, queue_offset: int | None = None) -> dict[str, Any]:
        """A message for JSON, without its body if bodies are hidden.

        Parameters
        ----------
        queue_offset : int | None
            Its number in its queue, if it is known: a broker that restored a topic left others in the records.
        """
        fields = message_fields(message)
        if queue_offset is not None:
            fields["queueOffset"] = queue_offset
        fields["bodySize"] = len(message.body)
        if self.hides_bodies:
            fields.pop("bodyBase64", None)
            fields |= {"body": None, "bodyCrc": None, "bodyHidden": True}
        return fields


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
        "faults": list(dict.fromkeys(faults)),
    }


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


def message(stored: Stored, asked: Asked) -> dict[str, Any]:
    """One message: all fields, its neighbours, the batch that brought it, and who has read it."""
    name, queue_id, offset = _given(asked, "topic"), _number(asked, "queue", 0), _number(asked, "offset", 0)
    with stored.opened() as store:
        low, high = _ends(store, name, queue_id)
        if not low <= offset < high:
            raise _out_of_range(name, queue_id, offset, low, high)
        raw = _raw(store, name, queue_id, offset)
        fields = stored.fields(raw, offset)
        at = raw.physical_offset
        batches = [row for row in store.view("batches")[0] if row["physicalOffset"] <= at < row["endPhysicalOffset"]]
        readers, faults = _readers_of(stored, store, name, queue_id, offset)
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
    if found["compressed"] and "plain" in asked and not stored.hides_bodies:
        try:
            found["plain"] = plain_body(raw.body, raw.sys_flag).decode("utf-8", "backslashreplace")
        except ValueError as error:
            faults.append(f"the body cannot be decompressed: {error}")
    return found


def body(stored: Stored, asked: Asked) -> bytes:
    """The body of one message as it is stored.

    Raises
    ------
    ConfigError
        Bodies are hidden.
    """
    if stored.hides_bodies:
        raise ConfigError("bodies are hidden: the dashboard was started with --hide-bodies", key="--hide-bodies")
    name, queue_id, offset = _given(asked, "topic"), _number(asked, "queue", 0), _number(asked, "offset", 0)
    with stored.opened() as store:
        low, high = _ends(store, name, queue_id)
        if not low <= offset < high:
            raise _out_of_range(name, queue_id, offset, low, high)
        return _raw(store, name, queue_id, offset).body


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
    return {"queries": queries, "groups": figures["groups"], "faults": list(dict.fromkeys([*faults, *more]))}


def group(stored: Stored, asked: Asked) -> dict[str, Any]:
    """One consumer group, queue by queue, as `messagestore lag --group`."""
    name = _given(asked, "group")
    with stored.opened() as store:
        rows, faults = store.group_lag(name)
    if not rows and not faults:
        raise ConfigError(f"consumer group {name!r:.300} has no offsets in this store", key="group", value=name)
    return {"group": name, "rows": rows, "faults": faults}


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
    "messages": messages,
    "message": message,
    "search": search,
    "readers": readers,
    "group": group,
    "spark": spark,
    "log": log,
}
"""What can be asked of a store, by the last part of the address."""
