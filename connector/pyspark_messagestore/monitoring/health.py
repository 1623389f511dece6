"""What is wrong with a store, or soon will be, in words, and what to do about it.

Each rule of `RULES` looks at the figures of a store (`StoreReader.view("figures")`) and at the queries that read it.
`messagestore status` and `doctor` show what the rules find. For a monitoring system, a rule has a condition on the
metrics of `messagestore metrics`; the files in `deploy/prometheus` and `deploy/grafana` are made from them:

    python -m pyspark_messagestore.monitoring.alerts deploy
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from messagestore import StoreError
from messagestore.spi import Queue, Report, StoreReader
from pyspark_messagestore.checkpoint.spark_checkpoint import Progress, read_progress, stream_offset
from pyspark_messagestore.monitoring.history import LagPoint, lag_history
from pyspark_messagestore.source.offsets import StreamOffset
from pyspark_messagestore.source.same_log import place_now
from pyspark_messagestore.words import quoted

WARNING, FAULT = "warning", "fault"
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
LATE_MS = HOUR_MS
"""A reader whose oldest unread message has waited for so long is late."""
STUCK_MS = 15 * MINUTE_MS
"""A batch that was planned so long ago, or a half message that is so old, needs somebody to look."""
OVERDUE_MS = MINUTE_MS
STAGED_MS = 24 * HOUR_MS
"""`stagingTtl`, by default: a staged file that is older will not be committed."""
SOON_MS = 24 * HOUR_MS
GROWS_MS, MANY, _BATCHES = 10 * MINUTE_MS, 10_000, 100
"""A reader falls behind if it has more unread messages than `MANY`, and more than it had `GROWS_MS` ago."""
SILENT_MS = 25 * HOUR_MS
"""A store to which nobody has written for longer is at rest."""
LEAST_GROWTH_MS = 10 * MINUTE_MS
"""For how long the log must have grown before anybody says when the disk is full."""
FULL_PERCENT, FORCED_PERCENT = 90, 85
"""From here on nothing is written, or the oldest segments are deleted in any case (RocketMQ's defaults)."""
CLOCK_MS = MINUTE_MS


class Seen(NamedTuple):
    """What a rule sees: the sentence, what to do, and since when in milliseconds since 1970, if that is known."""

    sentence: str
    remedy: str
    since_ms: int | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or soon will be.

    Parameters
    ----------
    rule : str
        The name of the rule that found it.
    severity : str
        `fault`: something does not work, or is lost. `warning`: somebody should look.
    sentence : str
        What was found.
    remedy : str
        What to do.
    since_ms : int | None
        Since when, in milliseconds since 1970, if that is known.
    """

    rule: str
    severity: str
    sentence: str
    remedy: str
    since_ms: int | None = None

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "sentence": self.sentence,
            "remedy": self.remedy,
            "sinceMs": self.since_ms,
        }


@dataclass(frozen=True)
class Query:
    """A streaming query that reads the store.

    Parameters
    ----------
    progress : Progress
        What its checkpoint says.
    rows : list of dict
        How far it is behind the end of each queue, as `StoreReader.lag`.
    refused : list of str
        Why it would refuse this store.
    history : list of LagPoint
        How far it was behind at its last batches, if it is far behind now; the oldest comes first.
    elsewhere : bool
        It reads another store.
    """

    progress: Progress
    rows: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    history: list[LagPoint] = field(default_factory=list)
    elsewhere: bool = False


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Parameters
    ----------
    figures : dict
        Of the store.
    faults : list of str
        What could not be read of it.
    queries : list of Query
    dead_letters : dict of str to int
        How many messages each dead-letter topic got in the last 24 hours.
    group_histories : dict of str to list of LagPoint
        How far each consumer group was behind, the oldest point first. The store has no past of groups: a process that
        looks repeatedly, such as the dashboard, has kept this.
    unread_checkpoints : list of str
        Which checkpoints cannot be read, and why, in words.
    """

    figures: dict[str, Any]
    faults: list[str]
    queries: list[Query] = field(default_factory=list)
    dead_letters: dict[str, int] = field(default_factory=dict)
    group_histories: dict[str, list[LagPoint]] = field(default_factory=dict)
    unread_checkpoints: list[str] = field(default_factory=list)

    @property
    def now_ms(self) -> int:
        """The time on the store's host."""
        return int(self.figures["nowMs"])

    @property
    def used_percent(self) -> int:
        """How full the fullest disk of the store is."""
        return max(self.figures["diskUsed"].values(), default=0)


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong.

    Parameters
    ----------
    name, severity : str
    meaning : str
        When it applies, in one sentence.
    look : function
        What it finds in the facts: sentence, remedy, and since when if that is known.
    condition : str
        The same for Prometheus: an expression over the metrics of a store.
    lasts : str
        For how long the condition must hold before somebody is told.
    """

    name: str
    severity: str
    meaning: str
    look: Callable[[Facts], Iterator[Seen]]
    condition: str
    lasts: str = "5m"


def facts_of(
    store: StoreReader,
    checkpoints: Sequence[str] = (),
    looked: Report | None = None,
    others: Callable[[], set[str] | None] = set,
    originals: Callable[[], set[str]] = set,
) -> Facts:
    """Look at a store, and at the queries whose checkpoints are given.

    Parameters
    ----------
    looked : Report | None
        The view `figures`, if somebody has just looked at it.
    others, originals : callable
        As for `query_of`.

    Raises
    ------
    ConfigError
        A checkpoint cannot be read.
    """
    (figures,), faults = store.view("figures") if looked is None else looked
    queries = [
        _with_history(
            store, query_of(store, read_progress(folder), others=others, originals=originals), figures["nowMs"]
        )
        for folder in checkpoints
    ]

    of_spark = dead_letter_topics(figures["counters"])
    topics = [
        row["topic"]
        for row in figures["topics"]
        if row["messages"] and (row["topic"].startswith("%DLQ%") or row["topic"] in of_spark)
    ]
    rows = store.offsets(topics, figures["nowMs"] - 24 * HOUR_MS)[0] if topics else []
    dead: dict[str, int] = {}
    for row in rows:
        dead[row["topic"]] = dead.get(row["topic"], 0) + row["maxOffset"] - row["offset"]

    return Facts(figures, faults, queries, dead)


def dead_letter_topics(counters: Mapping[str, int]) -> set[str]:
    """The topics into which Spark has put rows that the store cannot hold, as far as its commits have counted them."""
    return {name.removeprefix("deadLetters:") for name in counters if name.startswith("deadLetters:")}


def _with_history(store: StoreReader, query: Query, now_ms: int) -> Query:
    """A query with its past, which takes searches in the log, if it is far behind."""
    if sum(row["lag"] for row in query.rows) <= MANY:
        return query
    return replace(query, history=lag_history(store, read_progress(query.progress.path, _BATCHES), now_ms))


def status_report(status: Report, facts: Facts) -> dict[str, Any]:
    """What `messagestore status --json` shows: who holds the store, how it was left, what is in it, and the findings.

    `faults` lists what could not be read, in words.

    Parameters
    ----------
    status : Report
        The view `status`.
    """
    (report,), faults = status
    findings = [finding.fields() for finding in findings_of(facts)]
    faults = [*faults, *facts.faults, *facts.unread_checkpoints]
    return {**report, "faults": list(dict.fromkeys(faults)), "findings": findings}


def ids_of(store: StoreReader) -> set[str]:
    """The ids by which queries may know a store: its own, those of the stores that it is a copy of, and none."""
    here = store.describe([])
    return {here.store_id, *here.ancestors, ""}


def stores_of(progress: Progress) -> set[str]:
    """The ids of the stores that a query reads."""
    return {offset.store_id for offset in _planned(progress)}


def topics_of(progress: Progress) -> list[str]:
    """The topics that a query reads, even if none of its batches is done."""
    return sorted({topic for offset in _planned(progress) for topic in offset.topics})


def _planned(progress: Progress) -> list[StreamOffset]:
    planned = [stream_offset(fields) for batch in progress.batches if not batch.fault for fields in batch.offsets]
    return [offset for offset in planned if offset is not None]


def belongs(progress: Progress, own: set[str], others: Callable[[], set[str] | None]) -> bool:
    """Whether a query reads the store with these ids, or reads no store that we know (see `query_of`): this store may
    have replaced the one that it read.
    """
    stores = stores_of(progress)
    if not stores or not stores.isdisjoint(own):
        return True
    known = others()
    return known is not None and stores.isdisjoint(known)


def query_of(
    store: StoreReader,
    progress: Progress,
    only: Queue | None = None,
    others: Callable[[], set[str] | None] = set,
    originals: Callable[[], set[str]] = set,
) -> Query:
    """How far a query is behind in a store; no row if it reads another one.

    Parameters
    ----------
    only : (str, int) | None
        Look at one queue: its row, if the query reads it, has `topic`, `queueId` and `committedOffset`.
    others : callable
        The ids of other stores that somebody looks at. If a query reads none of them either, this store may have
        replaced the one that it read, and refuses it. None: not all ids are known.
    originals : callable
        Of these, the ids that stores got when they were made. A query of one of them does not read this store, even
        if this store is a copy of that one.
    """
    rows: list[dict[str, Any]] = []
    refused: list[str] = []
    batch, own_ids, read_ids = progress.committed, ids_of(store), stores_of(progress)
    if store.describe([]).store_id not in read_ids and not read_ids.isdisjoint(own_ids):
        own_ids -= originals()  # the query knows an ancestor of this store: if that is still there, it reads that one

    offsets = () if batch is None or batch.fault else batch.offsets
    for fields in offsets:
        offset = stream_offset(fields)
        if offset is None:
            continue
        if offset.store_id not in own_ids:
            continue
        try:
            place, faults = place_now(store, offset)
            if only is None:
                rows += store.lag(place, offset.topics)[0]
            elif only in place or only[0] in offset.topics:
                rows.append({"topic": only[0], "queueId": only[1], "committedOffset": place.get(only)})
        except StoreError as error:
            faults = [str(error)]
        refused += faults

    elsewhere = bool(read_ids) and read_ids.isdisjoint(own_ids)
    if elsewhere and belongs(progress, own_ids, others):
        names = ", ".join(sorted(read_ids))
        refused.append(f"it reads store {names}, and this is another one")
    return Query(progress, rows, refused, elsewhere=elsewhere)


def findings_of(facts: Facts) -> list[Finding]:
    """What all rules find, the faults first."""
    root = quoted(facts.figures["root"])
    findings = [
        Finding(rule.name, rule.severity, sentence, remedy.replace("ROOT", root, 1), since_ms)
        for rule in RULES
        for sentence, remedy, since_ms in rule.look(facts)
    ]
    return sorted(findings, key=lambda finding: finding.severity != FAULT)


# ---- the store


def _unreadable(facts: Facts) -> Iterator[Seen]:
    for fault in facts.faults:
        yield Seen(fault, "run `messagestore verify ROOT`, which says what it is and what mends it")
    for fault in facts.unread_checkpoints:
        yield Seen(
            fault,
            "give `--checkpoint` the folder that is the query's checkpointLocation, let this user read it, or leave it "
            "out; nothing is wrong with the store",
        )


_LEFT_WORDS = {
    "killed": "a writer was killed in the middle of a write",
    "recovering": "a recovery was killed",
    "restarted": "the machine was restarted while the store was open",
    "broker": "a broker was killed",
    "unreadable": "the store was left open, and `spark/state`, which says how far its writer came, cannot be read",
}
UNRECOVERED = ("poisoned", *_LEFT_WORDS)
"""How a store is left that somebody has to recover."""


def _sync_failed(facts: Facts) -> Iterator[Seen]:
    if facts.figures["left"] == "poisoned":
        yield Seen(
            "a sync failed, so the last writer stopped: what it was writing may not be on the disk",
            "check the disk (`dmesg`), then run `messagestore recover ROOT`",
        )


def _not_recovered(facts: Facts) -> Iterator[Seen]:
    words = _LEFT_WORDS.get(facts.figures["left"])
    if words is not None:
        yield Seen(
            f"{words}, and nobody has recovered the store since",
            "run `messagestore recover ROOT`, or let the next writer do it; what was acknowledged is safe",
        )


def _unproven(facts: Facts) -> Iterator[Seen]:
    hidden = facts.figures["unproven"]
    if hidden is not None:
        more = " and more" if hidden["more"] else ""
        yield Seen(
            f"readers do not see {_count(hidden['records'], 'message')}{more} that no sync has proven",
            "run `messagestore recover ROOT`",
        )


def _broker_waits(facts: Facts) -> Iterator[Seen]:
    if facts.figures["brokerWaits"]:
        yield Seen(
            "a RocketMQ broker that is starting waits until the writers let the store go",
            "stop the writers, such as Spark's queries and `messagestore run`, and start the broker again if it has "
            "given up, which it does after 45 s",
        )


def _no_room(facts: Facts) -> Iterator[Seen]:
    if facts.used_percent >= FULL_PERCENT:
        yield Seen(
            f"the disk is {facts.used_percent} % full, and from {FULL_PERCENT} % on nothing is written",
            "make room: `messagestore gc ROOT` shows what can be deleted",
        )


def _deletes(facts: Facts) -> Iterator[Seen]:
    if FORCED_PERCENT <= facts.used_percent < FULL_PERCENT:
        yield Seen(
            f"the disk is {facts.used_percent} % full: with `fileReservedTime`, writers delete the oldest segments "
            f"from {FORCED_PERCENT} % on, read or not",
            "make room, or keep messages for a shorter time",
        )


def _full_soon(facts: Facts) -> Iterator[Seen]:
    growth, percent = facts.figures["growth"], facts.used_percent
    if growth is None or percent >= FULL_PERCENT or not growth["bytes"] or not growth["ms"]:
        return
    room = facts.figures["diskFree"] * (FULL_PERCENT - percent) / (100 - percent)
    left_ms = room * growth["ms"] / growth["bytes"]
    if growth["ms"] >= LEAST_GROWTH_MS and left_ms < SOON_MS:
        yield Seen(
            f"the disk is {percent} % full, and is at {FULL_PERCENT} % in about {_span(int(left_ms))} if the log "
            f"goes on to grow by {growth['bytes'] * HOUR_MS / growth['ms'] / 2**30:,.1f} GiB an hour",
            "make room, or keep messages for a shorter time (`messagestore config ROOT set fileReservedTime=HOURS`)",
        )


def _clock(facts: Facts) -> Iterator[Seen]:
    newest_ms = facts.figures["newestMs"]
    if newest_ms is not None and newest_ms > facts.now_ms + CLOCK_MS:
        yield Seen(
            f"the last message was stored {_span(newest_ms - facts.now_ms)} in the future",
            "check the clock of the host that wrote it, and of this one: searches by time and retention depend on it",
        )


def _staged(facts: Facts) -> Iterator[Seen]:
    staging = facts.figures["staging"]
    oldest_ms = staging["oldestMs"]
    if oldest_ms is not None and oldest_ms < facts.now_ms - STAGED_MS:
        yield Seen(
            f"{_count(staging['files'], 'staged file')} of {staging['bytes']:,} bytes, the oldest untouched for "
            f"{_span(facts.now_ms - oldest_ms)}: a driver died before it committed or deleted them",
            "nothing: the next commit deletes those that are older than the sink's stagingTtl",
            oldest_ms,
        )


# ---- what waits


def _delayed(facts: Facts) -> Iterator[Seen]:
    delayed = facts.figures["delayed"]
    due_ms = None if delayed is None else delayed["nextDueMs"]
    if due_ms is not None and due_ms < facts.now_ms - OVERDUE_MS:
        yield Seen(
            f"{_count(delayed['messages'], 'delayed message')} {_wait(delayed['messages'])}, and the first was due "
            f"{_span(facts.now_ms - due_ms)} ago: nobody delivers",
            "run `messagestore deliver ROOT`",
            due_ms,
        )


def _halves(facts: Facts) -> Iterator[Seen]:
    halves = facts.figures["openHalves"]
    oldest_ms = None if halves is None else halves["oldestMs"]
    if oldest_ms is not None and oldest_ms < facts.now_ms - STUCK_MS:
        yield Seen(
            f"{_count(halves['messages'], 'half message')} {_wait(halves['messages'])} for a commit or a rollback, the "
            f"oldest for {_span(facts.now_ms - oldest_ms)}",
            "ask their producers (`messagestore halves ROOT` names them), then `half commit` or `half rollback`",
            oldest_ms,
        )


def _dead_letters(facts: Facts) -> Iterator[Seen]:
    for topic, count in sorted(facts.dead_letters.items()):
        if count:
            why = "a consumer has given them up" if topic.startswith("%DLQ%") else "rows that the store cannot hold"
            yield Seen(
                f"{topic} got {_count(count, 'message')} in the last 24 hours: {why}",
                f"look at them with `messagestore get ROOT {quoted(topic)}`",
            )


# ---- readers


def _lost_messages(facts: Facts) -> Iterator[Seen]:
    for row in facts.figures["groups"]:
        if row["deleted"]:
            yield Seen(
                f"consumer group {row['group']} has not read {_count(row['deleted'], 'message')} of {row['topic']} "
                "that retention has deleted",
                "keep messages for longer, or let the group read faster; it goes on at the first message that is left",
            )
    for query in facts.queries:
        lost = sum(deleted_unread(row) for row in query.rows)
        if lost:
            yield Seen(
                f"the query of {query.progress.path} has not read {_count(lost, 'message')} that retention has deleted",
                "keep messages for longer, or let the query read faster; it fails when it comes to them, or with "
                "failOnDataLoss=false goes on at the first message that is left",
            )


def deleted_unread(row: Mapping[str, Any]) -> int:
    """How many unread messages of a queue retention has deleted. The reader's lag counts them."""
    return max(0, int(row["lag"]) - (int(row["maxOffset"]) - int(row["minOffset"])))


def _beyond(facts: Facts) -> Iterator[Seen]:
    for row in facts.figures["groups"]:
        if row["beyond"]:
            yield Seen(
                f"consumer group {row['group']} is {_count(row['beyond'], 'message')} beyond the end of "
                f"{row['topic']}: the topic was deleted, or the store was cut, rebuilt or restored",
                "open the store with a writer, which corrects the group's place, or run "
                f"`messagestore group reset-offset ROOT {quoted(row['group'])}`",
            )


def _late_groups(facts: Facts) -> Iterator[Seen]:
    for row in facts.figures["groups"]:
        if row["latencyMs"] >= LATE_MS:
            yield Seen(
                f"consumer group {row['group']} is {_count(row['lag'], 'message')} behind in {row['topic']}, and the "
                f"oldest has waited for {_span(row['latencyMs'])}",
                f"look whether its consumers run; `messagestore lag ROOT --group {quoted(row['group'])}` "
                "shows each queue",
                facts.now_ms - row["latencyMs"],
            )


def _refused(facts: Facts) -> Iterator[Seen]:
    for query in facts.queries:
        for reason in query.refused:
            if reason in facts.faults:
                continue  # it would refuse nothing, but its topic cannot be read
            yield Seen(
                f"the query of {query.progress.path} refuses this store: {reason}",
                "restore the store that it has read, or start it with a new checkpoint, or with failOnDataLoss=false",
            )


def _stuck(facts: Facts) -> Iterator[Seen]:
    for query in facts.queries:
        planned = next((batch for batch in query.progress.batches if not batch.committed), None)
        if query.elsewhere:
            continue
        since_ms = None if planned is None else planned.planned_at_ms
        if planned is not None and since_ms is not None and since_ms < facts.now_ms - STUCK_MS:
            yield Seen(
                f"batch {planned.batch_id} of the query of {query.progress.path} was planned "
                f"{_span(facts.now_ms - since_ms)} ago, and it is not done",
                "look whether the query runs, and in Spark's log why it fails",
                since_ms,
            )


def _late_queries(facts: Facts) -> Iterator[Seen]:
    for query in facts.queries:
        oldest_ms = min((row["oldestUnread"] for row in query.rows if row["oldestUnread"] is not None), default=None)
        if oldest_ms is not None and oldest_ms <= facts.now_ms - LATE_MS:
            behind = sum(row["lag"] for row in query.rows)
            yield Seen(
                f"the query of {query.progress.path} is {_count(behind, 'message')} behind, and the oldest has waited "
                f"for {_span(facts.now_ms - oldest_ms)}",
                f"look whether the query runs; `messagestore lag ROOT --checkpoint {quoted(query.progress.path)}` "
                "shows each queue",
                oldest_ms,
            )


def _lag_grows(facts: Facts) -> Iterator[Seen]:
    """The past of a query is in its checkpoint. That of a group is known only to a process that looks repeatedly."""
    for query in facts.queries:
        if len(query.history) < 2:
            continue
        first, last = query.history[0], query.history[-1]
        if last.time_ms - first.time_ms >= GROWS_MS and last.lag > max(MANY, first.lag):
            yield Seen(
                f"the query of {query.progress.path} falls behind: {_count(last.lag, 'message')} {_wait(last.lag)}; "
                f"{_span(last.time_ms - first.time_ms)} ago, {first.lag:,} did",
                "give the query more of the machine, or larger micro-batches; "
                f"`messagestore lag ROOT --checkpoint {quoted(query.progress.path)}` shows each queue",
                first.time_ms,
            )

    lags: dict[str, int] = {}
    for row in facts.figures["groups"]:
        lags[row["group"]] = lags.get(row["group"], 0) + row["lag"] - row["deleted"]
    for group, points in facts.group_histories.items():
        before = [point for point in points if point.time_ms <= facts.now_ms - GROWS_MS]
        if before and lags.get(group, 0) > max(MANY, before[-1].lag):
            yield Seen(
                f"consumer group {group} falls behind: {_count(lags[group], 'message')} {_wait(lags[group])}; "
                f"{_span(facts.now_ms - before[-1].time_ms)} ago, {before[-1].lag:,} did",
                f"start more consumers, or look what slows them; `messagestore lag ROOT --group {quoted(group)}` "
                "shows each queue",
                before[-1].time_ms,
            )


def _nothing_written(facts: Facts) -> Iterator[Seen]:
    newest_ms = facts.figures["newestMs"]
    if newest_ms is not None and HOUR_MS <= facts.now_ms - newest_ms < SILENT_MS:
        yield Seen(
            f"nothing was written for {_span(facts.now_ms - newest_ms)}",
            "look whether the writers run, unless they write less often than every hour",
            newest_ms,
        )


def _count(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"


def _span(span_ms: int) -> str:
    """A time span as people say it."""
    for unit_ms, unit in ((24 * HOUR_MS, "day"), (HOUR_MS, "hour"), (MINUTE_MS, "minute")):
        if span_ms >= 2 * unit_ms or (unit == "minute" and span_ms >= unit_ms):
            return _count(span_ms // unit_ms, unit)
    return _count(span_ms // 1000, "second")


RULES = (
    Rule("unreadable", FAULT, "a file of the store is damaged or cannot be read", _unreadable, "spark_store_up == 0"),
    Rule("sync-failed", FAULT, "a sync failed", _sync_failed, 'spark_store_left{left="poisoned"} == 1', "0m"),
    Rule(
        "not-recovered",
        WARNING,
        "a writer, a broker or the machine died, and nobody has recovered the store",
        _not_recovered,
        f'spark_store_left{{left=~"{"|".join(_LEFT_WORDS)}"}} == 1',
    ),
    Rule(
        "broker-waits",
        WARNING,
        "a broker cannot start, because a writer has the store open",
        _broker_waits,
        "spark_broker_waits == 1",
        "0m",
    ),
    Rule("unproven", WARNING, "readers hide messages until a recovery", _unproven, "spark_unproven_messages > 0"),
    Rule(
        "no-room", FAULT, "the disk is so full that nothing is written", _no_room, "spark_disk_used_ratio >= 0.9", "0m"
    ),
    Rule(
        "deletes-unread",
        WARNING,
        "the disk is so full that the oldest segments are deleted, read or not",
        _deletes,
        "spark_disk_used_ratio >= 0.85 and spark_disk_used_ratio < 0.9",
    ),
    Rule(
        "full-soon",
        WARNING,
        "the disk is full within a day if the log goes on to grow as it does",
        _full_soon,
        "predict_linear(spark_disk_used_ratio[6h], 86400) >= 0.9 and spark_disk_used_ratio < 0.9",
        "30m",
    ),
    Rule(
        "future",
        WARNING,
        "messages were stored in the future",
        _clock,
        "spark_newest_message_timestamp_seconds > time() + 60",
    ),
    Rule(
        "staging-orphans",
        WARNING,
        "staged files of a driver that died",
        _staged,
        "spark_staging_oldest_seconds > 86400",
    ),
    Rule(
        "delayed-overdue",
        WARNING,
        "delayed messages are due, and nobody delivers them",
        _delayed,
        "spark_delayed_overdue_seconds > 60",
    ),
    Rule(
        "halves-overdue", WARNING, "half messages that nobody ends", _halves, "spark_open_halves_oldest_seconds > 900"
    ),
    Rule(
        "dead-letters",
        WARNING,
        "a consumer has given messages up, or Spark has written rows that the store cannot hold as dead letters",
        _dead_letters,
        'increase(rocketmq_messages_in_total{topic=~"%DLQ%.*"}[24h]) > 0 '
        "or increase(spark_dead_letters_total[24h]) > 0",
        "0m",
    ),
    Rule(
        "lost-messages",
        FAULT,
        "retention has deleted messages that a reader had not read",
        _lost_messages,
        "spark_consumer_deleted_messages > 0 or spark_query_deleted_messages > 0",
        "0m",
    ),
    Rule(
        "beyond-the-end",
        WARNING,
        "a group's place is beyond the end of its queue",
        _beyond,
        "spark_consumer_beyond_messages > 0",
    ),
    Rule(
        "group-late",
        WARNING,
        "a message has waited for a group for an hour",
        _late_groups,
        "rocketmq_consumer_lag_latency >= 3600000",
    ),
    Rule("query-refuses", FAULT, "a query refuses the store", _refused, "spark_query_refused > 0", "0m"),
    Rule(
        "query-stuck",
        FAULT,
        "a batch of a query was planned, and is not done",
        _stuck,
        "spark_query_planned_seconds > 900",
    ),
    Rule(
        "query-late",
        WARNING,
        "a message has waited for a query for an hour",
        _late_queries,
        "spark_query_lag_latency_seconds >= 3600",
    ),
    Rule(
        "lag-grows",
        WARNING,
        "a reader falls behind",
        _lag_grows,
        "deriv(rocketmq_consumer_lag_messages[30m]) > 0 and rocketmq_consumer_lag_messages > 10000"
        " or deriv(spark_query_lag_messages[30m]) > 0 and spark_query_lag_messages > 10000",
        "30m",
    ),
    Rule(
        "nothing-written",
        WARNING,
        "nothing was written for an hour, although something was in the day before",
        _nothing_written,
        "sum by (store) (increase(rocketmq_messages_in_total[1h])) == 0"
        " and sum by (store) (increase(rocketmq_messages_in_total[1d] offset 1h)) > 0",
        "10m",
    ),
)
