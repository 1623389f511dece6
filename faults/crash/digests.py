"""Batches that come again: with other rows that are hard to tell apart, and under other settings.

`LOOKALIKES` are pairs of batches with as many rows each. Most of them have one sum of CRCs and Java hashes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from crash.judge import Verdict
from crash.planting import Ground
from messagestore import (
    BatchConflictError,
    BatchRequest,
    MessageColumns,
    MessageIllegalError,
    MessageStore,
    StoreConfig,
    StoreError,
)
from messagestore.batches.append import APPENDED, KNOWN
from messagestore.format.hosts import pack_host

APP = "app"
HOST = pack_host("10.1.2.3:10911")
POLYNOMIAL = (0x1DB710641).to_bytes(9, "little")
"""Texts that differ by it have one CRC-32."""
EQUAL_CRC = bytes(range(65, 74)), bytes(a ^ b for a, b in zip(range(65, 74), POLYNOMIAL, strict=True))

KINDS: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "keys": pa.list_(pa.string()),
    "tags": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "flag": pa.int32(),
    "sharding_key": pa.string(),
    "queue_id": pa.int32(),
    "born_timestamp": pa.int64(),
    "delay_time_level": pa.int32(),
    "unique_key": pa.string(),
}
Row = dict[str, Any]

LOOKALIKES: dict[str, tuple[list[Row], list[Row]]] = {
    "tags of one Java hash": ([{"tags": "Aa"}], [{"tags": "BB"}]),
    "keys of one Java hash": ([{"keys": ["AaAa"]}], [{"keys": ["BBBB"]}]),
    "bodies of one CRC": ([{"body": EQUAL_CRC[0]}], [{"body": EQUAL_CRC[1]}]),
    "names of properties of one Java hash": ([{"properties": {"Aa": "v"}}], [{"properties": {"BB": "v"}}]),
    "values of properties of one Java hash": ([{"properties": {"n": "Aa"}}], [{"properties": {"n": "BB"}}]),
    "sharding keys of one Java hash": ([{"sharding_key": "Aa"}], [{"sharding_key": "BB"}]),
    "unique keys": ([{"unique_key": "u1"}], [{"unique_key": "u2"}]),
    "times whose halves are swapped": ([{"born_timestamp": 1}], [{"born_timestamp": 1 << 32}]),
    "delay levels": ([{"delay_time_level": 1}], [{"delay_time_level": 2}]),
    "a delay level, and none": ([{"delay_time_level": 0}], [{"delay_time_level": None}]),
    "a flag, and none": ([{"flag": 0}], [{"flag": None}]),
    "a flag as a queue": ([{"flag": 1, "queue_id": 0}], [{"flag": 0, "queue_id": 1}]),
    "a tag with a blank, and two keys": ([{"tags": "a b"}], [{"keys": ["a", "b"]}]),
    "a key as a tag": ([{"keys": ["a", "b"]}], [{"keys": ["a"], "tags": "b"}]),
    "a tag as a sharding key": ([{"tags": "a"}], [{"sharding_key": "a"}]),
    "two keys as one": ([{"keys": ["ab"]}], [{"keys": ["a", "b"]}]),
    "keys in another order": ([{"keys": ["a", "b"]}], [{"keys": ["b", "a"]}]),
    "a key that is there twice": ([{"keys": ["a"]}], [{"keys": ["a", "a"]}]),
    "a letter from a property's name to its value": ([{"properties": {"ab": "c"}}], [{"properties": {"a": "bc"}}]),
    "values of properties swapped": ([{"properties": {"a": "1", "b": "2"}}], [{"properties": {"a": "2", "b": "1"}}]),
    "a property as a tag": ([{"properties": {"TAG": "x"}}], [{"tags": "x"}]),
    "the end of a body as a tag": ([{"body": b"xy"}], [{"body": b"x", "tags": "y"}]),
    "tags swapped between rows": (
        [{"body": b"1", "tags": "x"}, {"body": b"2", "tags": "y"}],
        [{"body": b"1", "tags": "y"}, {"body": b"2", "tags": "x"}],
    ),
    "rows swapped between queues": (
        [{"body": b"1", "queue_id": 0}, {"body": b"2", "queue_id": 1}],
        [{"body": b"1", "queue_id": 1}, {"body": b"2", "queue_id": 0}],
    ),
    "a row twice, and another one dropped": ([{"tags": "Aa"}, {"tags": "Aa"}, {"tags": "BB"}], [{"tags": "Aa"}, {"tags": "BB"}, {"tags": "BB"}]),
    "rows twice": ([{"body": b"1"}] * 1024, [{"body": b"2"}] * 1024),
}  # fmt: skip


def columns_of(rows: list[Row], *, kinds: dict[str, pa.DataType] = KINDS) -> MessageColumns:
    """The rows as a batch, with the columns that one of them has; without queues all go to queue 0."""
    used = [name for name in kinds if any(name in row for row in rows)]
    arrays = {name: pa.array([row.get(name) for row in rows], kinds[name]) for name in used}
    arrays["body"] = pa.array([row.get("body", b"x") for row in rows], pa.binary())
    found = MessageColumns.from_arrow(pa.table(arrays), topic=None if "topic" in used else "t")
    if found.queue_id is None:
        found.queue_id = np.zeros(len(rows), np.int32)
    return found


def request(version: int) -> BatchRequest:
    return BatchRequest(app_id=APP, version=version, version_source="spark")


def accepted(root: Path, config: StoreConfig) -> Iterator[str]:
    """Append one batch of each pair, and then the other one under the same version: the pairs that pass as one."""
    with MessageStore.open(root, config) as store:
        for version, (name, pair) in enumerate(LOOKALIKES.items()):
            rows, others = map(columns_of, pair)
            assert store.append_batch(rows, request(version)).status == APPENDED
            again = [rows.slice(start, 1) for start in reversed(range(rows.row_count))]
            if store.append_batch(again, request(version)).status != KNOWN:
                yield f"{name}: its own replay"
            try:
                yield f"{name}: {store.append_batch(others, request(version)).status}"
            except BatchConflictError:
                pass


def lookalikes(ground: Ground) -> Iterator[Verdict]:
    """Rows that come under a known version, and are other rows, must not be dropped."""
    yield Verdict(lost=list(accepted(ground.folder / "lookalikes", StoreConfig())))


# ---- settings that change between a batch and its replay

_CLOSED = (("brokerPermission", "4"),)
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "stamps": ({"stamp_cluster": True}, {}),
    "property CRCs": ({"enabled_append_prop_crc": True}, {}),
    "the topic's filter type": ({}, {"topicFilterType": "MULTI_TAG"}),
    "the topic's permission": ({}, {"perm": 4}),
    "the broker's permission": ({"broker_settings": _CLOSED}, {}),
}
"""What changes: settings of the store, and of its topic."""


def changed_settings(ground: Ground) -> Iterator[Verdict]:
    """A batch comes again under other settings, and is known; a new one is refused where nobody may write."""
    yield after_changes(ground.folder / "settings")


def after_changes(root: Path) -> Verdict:
    """Append a batch of its own for each of `CHANGES`, and again after the change."""
    verdict, version = Verdict(), -1
    rows = columns_of([{"body": b"%d" % i, "tags": "Aa", "keys": [f"k{i}"]} for i in range(4)])
    with MessageStore.open(root, StoreConfig()) as store:
        store.create_topic("t", 1)

    def append(settings: dict[str, Any], number: int) -> str:
        with MessageStore.open(root, StoreConfig(**settings)) as store:
            end = store.writer.end.physical_offset
            try:
                found = store.append_batch(rows, request(number)).status
            except MessageIllegalError:
                found = "refused"
            except StoreError as error:
                found = f"refused: {error}"
            if found != APPENDED and store.writer.end.physical_offset != end:
                verdict.duplicated.append(f"version {number}: {found}, and the log has grown")
            return found

    for name, (settings, topic) in CHANGES.items():
        _set_topic(root, {"perm": 6, "topicFilterType": "SINGLE_TAG"})
        found = [append({}, version + 1)]
        _set_topic(root, topic)
        found += [append(settings, version + 1), append(settings, version + 2)]
        _set_topic(root, {"perm": 6, "topicFilterType": "SINGLE_TAG"})
        found.append(append({}, version + 2))
        closed = settings.get("broker_settings") == _CLOSED or topic.get("perm") == 4
        wanted = [APPENDED, KNOWN, *(["refused", APPENDED] if closed else [APPENDED, KNOWN])]
        if found != wanted:
            verdict.misread.append(f"{name} changed: {found} instead of {wanted}")
        version += 2
    return verdict


def _set_topic(root: Path, settings: dict[str, Any]) -> None:
    path = root / "config" / "topics.json"
    table = json.loads(path.read_text())
    table["topicConfigTable"]["t"].update(settings)
    path.write_text(json.dumps(table))
