"""A store that the dashboard shows: how it is opened, and what of a message leaves the server."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from messagestore import ConfigError, MessageExt, StoreConfig, StoreError
from messagestore.inspect import operator
from messagestore.spi import LOCAL_STORES, SYS_FLAG_COMPRESSED, Report, StoreReader, bounded_json, plain_body
from pyspark_messagestore.checkpoint.spark_checkpoint import Progress, read_progress
from pyspark_messagestore.dashboard.checks import Checks
from pyspark_messagestore.dashboard.kept import Kept
from pyspark_messagestore.dashboard.reads import Reads
from pyspark_messagestore.dashboard.trends import trend
from pyspark_messagestore.monitoring.health import Facts, facts_of, ids_of, status_report
from pyspark_messagestore.monitoring.history import LagPoint
from pyspark_messagestore.words import error_words, message_fields

CONFIG = StoreConfig(message_index_enable=False)
"""Stores are opened without their index, so that a broker's store needs no settings."""
MASKED = "***"
MOST_JSON_VALUES = 50_000
_TRANSACTION_ID = "__transactionId__"
_COLUMNS = {"KEYS": "keys", "TAGS": "tags", "__SHARDINGKEY": "shardingKey"}
"""Columns of Spark's rows, by the property that a message has of each."""
SAMPLES, SAMPLE_MS = 360, 10_000
"""How many points the curve of a consumer group has, and the least milliseconds between two of them."""

Decoder = Callable[[MessageExt], Any]
"""Gives the body of a message as a value for JSON; None: the body is not of its kind. The body is decompressed."""


@dataclass
class Samples:
    """How far consumer groups were behind whenever somebody looked, since the dashboard was started."""

    _points: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, time_ms: int, groups: list[dict[str, Any]]) -> None:
        """Keep how many messages each group has not read, unless the newest point is too young."""
        lags: dict[str, int] = {}
        for row in groups:
            lags[row["group"]] = lags.get(row["group"], 0) + row["lag"] - row["deleted"]
        with self._lock:
            for group, lag in lags.items():
                points = self._points.setdefault(group, deque(maxlen=SAMPLES))
                if not points or time_ms - points[-1][0] >= max(SAMPLE_MS, 1):
                    points.append((time_ms, lag))

    def of(self, group: str) -> list[dict[str, int]]:
        """The points of a group, the oldest first."""
        with self._lock:
            return [{"timeMs": time_ms, "lag": lag} for time_ms, lag in self._points.get(group, ())]

    def histories(self) -> dict[str, list[LagPoint]]:
        """The points of all groups."""
        with self._lock:
            return {group: [LagPoint(None, *point) for point in points] for group, points in self._points.items()}

    def outlook(self, group: str) -> str:
        """Whether a group catches up, as far as somebody has looked; empty if nobody has."""
        points = self.histories().get(group, [])
        return trend(points) if points else ""


@dataclass(frozen=True)
class _Overall:
    """What one look at all queues of a store has found.

    Parameters
    ----------
    facts : Facts
    report : dict
        As `messagestore status --json`.
    rows : dict of str to Report
        The views `topics` and `queues`, among others.
    """

    facts: Facts
    report: dict[str, Any]
    rows: dict[str, Report]


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
    masks : frozenset of str
        Names of properties, and of fields of JSON bodies at any depth, whose values do not leave the server.
    decoder : Decoder | None
        Shows bodies that are not text.
    others : callable
        The ids of the other stores, to which a query may belong; None: not all are known.
    originals : callable
        The ids among these that were made for their stores. A copy also has the ids of the store that was copied.
    samples : Samples
    checks : Checks
        The checks of every byte that were started from a page, of all stores.
    reads : Reads
        How many bytes of messages may be read, of all stores.
    """

    name: str
    path: str
    checkpoints: tuple[str, ...] = ()
    hides_bodies: bool = False
    masks: frozenset[str] = frozenset()
    decoder: Decoder | None = None
    others: Callable[[], set[str] | None] = set
    originals: Callable[[], set[str]] = set
    samples: Samples = field(default_factory=Samples)
    checks: Checks = field(default_factory=Checks)
    reads: Reads = field(default_factory=lambda: Reads(0))

    @property
    def hides_keys(self) -> bool:
        """Whether what a message is found by is masked."""
        return not self.masks.isdisjoint(("KEYS", "UNIQ_KEY"))

    @contextlib.contextmanager
    def opened(self) -> Iterator[StoreReader]:
        """The store, open for reading without its index, so that a broker's store needs no settings."""
        with contextlib.closing(LOCAL_STORES.reader(self.path, CONFIG)) as store:
            yield store

    def progress(self, least: int = 1) -> tuple[list[Progress], list[str]]:
        """What the checkpoints say, and those that cannot be read, in words."""
        queries, faults = list[Progress](), list[str]()
        for folder in self.checkpoints:
            try:
                queries.append(read_progress(folder, least))
            except (StoreError, OSError) as error:
                faults.append(error_words(error))
        return queries, faults

    # ---- what is kept until the store changes

    @functools.cached_property
    def kept(self) -> Kept:
        """What was found lately."""
        return Kept(self.path, self.checkpoints)

    def ids(self) -> set[str] | None:
        """The ids by which queries may know the store; None: it cannot be read."""
        try:
            with self.opened() as store:
                return ids_of(store)
        except (StoreError, OSError):
            return None

    def id(self) -> str:
        """The id that the store has itself; empty: it has none, or cannot be read."""
        try:
            with self.opened() as store:
                return store.describe([]).store_id
        except (StoreError, OSError):
            return ""

    def facts(self) -> Facts:
        """What the rules of `health` look at; a checkpoint that cannot be read is a fault."""
        return self._overall().facts

    def report(self) -> dict[str, Any]:
        """As `messagestore status --json`."""
        return self._overall().report

    def rows(self, name: str) -> Report:
        """The rows of a view of `StoreReader.view`."""
        if name in ("topics", "queues"):
            return self._overall().rows[name]

        def look() -> tuple[Report, int]:
            with self.opened() as store:
                rows, faults = store.view(name)
            return (rows, faults), len(rows)

        return self.kept.get(f"rows {name}", look)

    def _overall(self) -> _Overall:
        """Everything that needs a look at all queues: one look serves all pages."""

        def look() -> tuple[_Overall, int]:
            readable, faults = self.progress()
            rows = operator.overall(self.path, CONFIG)
            with self.opened() as store:
                facts = facts_of(
                    store, [progress.path for progress in readable], rows["figures"], self.others, self.originals
                )
            groups = facts.figures["groups"]
            self.samples.add(facts.now_ms, groups)
            facts = replace(facts, unread_checkpoints=faults, group_histories=self.samples.histories())
            overall = _Overall(facts, status_report(rows["status"], facts), rows)
            return overall, len(rows["queues"][0]) + len(groups)

        return self.kept.get("overall", look)

    # ---- what leaves the server

    def fields(self, message: MessageExt, queue_offset: int | None = None, *, plain: bool = False) -> dict[str, Any]:
        """A message for JSON, without what is hidden.

        Parameters
        ----------
        queue_offset : int | None
            Its number in its queue, if it is known: a broker that restored a topic left others in the records.
        plain : bool
            Decompress the body.

        Returns
        -------
        dict
            The fields of `--json`, `offsetMsgId`, and `bodySize` as it is stored, in bytes; `decoded` if the decoder
            knows the body, `bodyFault` if a body cannot be decompressed or decoded, `bodyHidden` with the reason why
            there is no body.
        """
        size, fault, decoded = len(message.body), "", None
        if not self.hides_bodies and message.sys_flag & SYS_FLAG_COMPRESSED and (plain or self.decoder or self.masks):
            try:
                message = replace(message, body=plain_body(message.body, message.sys_flag))
            except ValueError as error:
                fault = f"the body cannot be decompressed: {error}"
        if self.decoder is not None and not self.hides_bodies and not fault:
            decoded, fault = _decoded(self.decoder, message)

        fields = message_fields(message)
        fields["offsetMsgId"] = message.offset_message_id  # `msgId` is the UNIQ_KEY where there is one
        if queue_offset is not None:
            fields["queueOffset"] = queue_offset
        fields["bodySize"] = size
        if fault:
            fields["bodyFault"] = fault
        if decoded is not None:
            fields["decoded"] = decoded
        if self.hides_bodies:
            self._hide(fields, "--hide-bodies")
        elif self.masks:
            self._mask(fields)
        return fields

    def body(self, message: MessageExt) -> bytes:
        """The body of a message as a file.

        Raises
        ------
        ConfigError
            The body is hidden.
        """
        if self.hides_bodies:
            raise ConfigError("bodies are hidden: the dashboard was started with --hide-bodies", key="--hide-bodies")
        if not self.masks:
            return message.body
        text = self.fields(message)["body"]
        if text is None:
            raise ConfigError(
                "this body is hidden: it is not JSON, so --mask cannot find the fields in it", key="--mask"
            )
        return str(text).encode("utf-8", "backslashreplace")

    def _mask(self, fields: dict[str, Any]) -> None:
        """Replace the values of the names that are masked. A body in which they cannot be found is hidden."""
        for part in ("properties", "systemProperties"):
            fields[part] = {name: MASKED if name in self.masks else value for name, value in fields[part].items()}
        if "UNIQ_KEY" in self.masks and fields["systemProperties"].get("UNIQ_KEY"):
            fields["msgId"] = MASKED  # the same text
            if _TRANSACTION_ID in fields["systemProperties"]:
                fields["systemProperties"][_TRANSACTION_ID] = MASKED  # as well
        fields["properties"] |= _masked_letter(fields["properties"], self.masks)
        if "KEYS" in self.masks:
            fields["keys"] = [MASKED for _ in fields["keys"]]
        if "TAGS" in self.masks and fields["tags"]:
            fields["tags"] = MASKED
        if "bodyFault" in fields:  # a decoder's own words may repeat what it was given
            fields["bodyFault"] = fields["bodyFault"].partition(":")[0]
        decoded = fields.pop("decoded", None)
        if isinstance(decoded, dict | list):  # in anything else, no field has a name
            fields["decoded"] = masked(decoded, self.masks)
        value = json_value(fields["body"])
        if value is None and fields["body"] != "":
            self._hide(fields, "--mask: the body is not JSON, so its fields are not known", decoded=True)
            return
        if value is not None:
            fields["body"] = json.dumps(masked(value, self.masks), ensure_ascii=False)
        fields["bodyCrc"] = None

    def _hide(self, fields: dict[str, Any], why: str, *, decoded: bool = False) -> None:
        fields.pop("bodyBase64", None)
        fields |= {"body": None, "bodyCrc": None, "bodyHidden": why}
        if not decoded:
            fields.pop("decoded", None)


def json_value(text: str | None) -> Any:
    """The object or array that a body is; None if it is none, or too large."""
    if not text or text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return bounded_json(text, MOST_JSON_VALUES)
    except (ValueError, RecursionError):
        return None


def masked(value: Any, names: Collection[str]) -> Any:
    """A value for JSON without the values of some fields, however deep they lie."""
    if isinstance(value, dict):
        return {name: MASKED if name in names else masked(item, names) for name, item in value.items()}
    return [masked(item, names) for item in value] if isinstance(value, list) else value


def _masked_letter(properties: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """What a dead letter of Spark's says of its row, without the values that are masked: its reason may repeat one, and
    its origin has the row's columns. None, if it is no dead letter.
    """
    shown = {}
    column, reason = properties.get("dlqField"), properties.get("dlqReason", "")
    names_it = column == "properties" and any(reason.startswith(f"property {name!r}") for name in names)
    if column is not None and (names_it or any(_COLUMNS.get(name) == column for name in names)):
        shown["dlqReason"] = reason.partition(":")[0]
    if "dlqOrigin" in properties and properties["dlqOrigin"] != MASKED:
        origin = json_value(properties["dlqOrigin"])
        if not isinstance(origin, dict):
            return shown | {"dlqOrigin": MASKED}
        origin = masked(origin, {*names, *(_COLUMNS[name] for name in names if name in _COLUMNS)})
        pairs = origin.get("properties")
        if pairs is not None:
            origin["properties"] = [_masked_pair(pair, names) for pair in pairs] if isinstance(pairs, list) else MASKED
        shown["dlqOrigin"] = json.dumps(origin, ensure_ascii=False)
    return shown


def _masked_pair(pair: Any, names: Collection[str]) -> Any:
    """A property of a row, as Spark has it: name and value, or `key` and `value`; whatever else somebody wrote there
    is hidden.
    """
    match pair:
        case [str(name), _]:
            return [name, MASKED] if name in names else pair
        case {"key": str(name), "value": _}:
            return {"key": name, "value": MASKED} if name in names else pair
    return MASKED


def json_text(value: Any) -> str:
    """A value as JSON. What is no number is text: `NaN` and `Infinity` are no JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_with_numbers(value), ensure_ascii=False, separators=(",", ":"))


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decoded(decoder: Decoder, message: MessageExt) -> tuple[Any, str]:
    """What a decoder makes of a message, as a value for JSON, and what went wrong."""
    try:
        value = decoder(message)
        return None if value is None else json.loads(json.dumps(value, default=str)), ""
    except BaseException as error:  # noqa: BLE001 - it is the user's, and any of its faults belongs to this message only
        return None, f"the decoder failed with {type(error).__name__}: {error}"
