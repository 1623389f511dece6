"""Every public value can be pickled and copied, empty and full; what cannot says why."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import messagestore
from messagestore import Message, MessageBatch, MessageStore, StoreConfig, spi
from messagestore.format.message import NO_PROPERTIES
from messagestore.spi.location import RemoteSettings
from messagestore.spi.sends import SendQueue
from processes import CONTEXT
from small import SMALL, bodies, columns, filled

_SESSIONS = {"MessageStore", "ReadOnlyStore", "HalfMessage", "Consumer", "ConsumedMessage"}
"""What belongs to an open store."""
_PROGRAMS = {"ColumnTexts", "Decoder", "LocalStores", "Producer", "Staging", "StoreReader", "StoreWriter", "Stores"}
"""What does something, and what only describes it."""

CLASSES: dict[str, type[Any]] = {
    name: value
    for package in (messagestore, spi)
    for name in package.__all__
    if inspect.isclass(value := getattr(package, name))
    and not issubclass(value, (BaseException, enum.Enum))
    and name not in _SESSIONS | _PROGRAMS
}

_BY_TYPE: list[tuple[str, object, object]] = [
    ("NDArray", np.empty(0, np.int64), np.arange(3)),
    ("pa.", pa.array([], pa.string()), pa.array(["\u00e4"])),
    ("frozenset", frozenset(), frozenset({"\u00e4"})),
    ("dict", {}, {"\u00e4": 1}),
    ("Mapping", {}, {"\u00e4": 1}),
    ("Queues", {}, {("\u00e4", 1): (2, 3)}),
    ("list[MessageExt]", [], []),
    ("list", [], [("\u00e4", ValueError("m"))]),
    ("tuple", (), ("\u00e4", "\u00f6")),
    ("Sequence", (), ["\u00e4"]),
    ("bytes", b"", b"\0\xff"),
    ("str", "", "\u00e4"),
    ("bool", False, True),
    ("float", 0.0, 0.5),
    ("int", 0, 1 << 40),
    ("BatchResult", messagestore.BatchResult("known", 0, 0, 0, 0), messagestore.BatchResult("known", 1, 2, 3, 4)),
    ("StoreConfig", StoreConfig(), SMALL),
    ("MessageColumns", columns([]), columns(bodies(3))),
    ("GetMessageStatus", *[messagestore.GetMessageStatus.FOUND] * 2),
    ("PutMessageStatus", *[messagestore.PutMessageStatus.PUT_OK] * 2),
    ("AppendMessageStatus", *[messagestore.AppendMessageStatus.PUT_OK] * 2),
    ("Stored", None, None),
]


def value_of(annotation: object, *, full: bool) -> object:
    """A value for a field, by the beginning of its type."""
    words = getattr(annotation, "__forward_arg__", annotation)
    for word, empty, filling in _BY_TYPE:
        if str(words).startswith(word):
            return filling if full else None if "None" in str(words) else empty
    raise AssertionError(f"no example of {words}")


_CHECKED: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "StoreConfig": (
        StoreConfig,
        lambda: StoreConfig.from_mapping({"flushDiskType": "ASYNC_FLUSH"}).replace(broker_settings=(("a", "b"),)),
    ),
    "BatchRequest": (
        messagestore.BatchRequest,
        lambda: messagestore.BatchRequest("app", 7, "spark", query_id="q", origin={"line": 1}),
    ),
    "Location": (
        lambda: spi.Location("/a"),
        lambda: spi.Location("https://h:1", "https", RemoteSettings(token_file="/token", retry_timeout_s=1.5)),
    ),
    "PlannedRead": (
        lambda: spi.PlannedRead(""),
        lambda: spi.PlannedRead("1" * 32, 7, spi.LastRecord(1, 2, 3, 4)),
    ),
    "PlannedWrite": (lambda: spi.PlannedWrite("0" * 32, 0), lambda: spi.PlannedWrite("f" * 32, 1 << 40)),
    "Target": (
        lambda: spi.Target([], {}),
        lambda: spi.Target([SendQueue("broker-a", 3)], {SendQueue("broker-a", 3): 1 << 40}),
    ),
    "FrameColumn": (
        lambda: spi.FrameColumn("a", pa.string(), "a"),
        lambda: spi.FrameColumn("a", pa.list_(pa.string()), "b", core=False, may_be_null=True),
    ),
    "MessageColumns": (lambda: columns([]), lambda: columns(bodies(3))),
    "MessageBatch": (
        lambda: MessageBatch(columns([])),
        lambda: MessageBatch.from_messages([Message("t", b"x", keys=["k"], properties={"a": "b"})]),
    ),
    "Message": (
        lambda: Message("t", b""),
        lambda: Message("t", b"x", 3, ("k",), "tag", MappingProxyType({"a": "b"}), 1, 2, delay_time_level=4),
    ),
}
"""Values whose classes check what they are given."""


def example(name: str, *, full: bool) -> object:
    if name in _CHECKED:
        return _CHECKED[name][full]()
    kind = CLASSES[name]
    if dataclasses.is_dataclass(kind):
        annotations = {each.name: each.type for each in dataclasses.fields(kind) if each.init}
    else:
        annotations = dict(kind.__annotations__)
    return kind(**{key: value_of(words, full=full) for key, words in annotations.items()})


def same(left: object, right: object) -> bool:
    """Whether two values are equal, arrays and errors included."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and bool(np.array_equal(left, right))
    if isinstance(left, BaseException):
        return type(left) is type(right) and left.args == right.args  # type: ignore[attr-defined]
    if isinstance(left, MappingProxyType):
        left = dict(left)
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, each.name), getattr(right, each.name)) for each in dataclasses.fields(left)
        )
    if isinstance(left, (list, tuple)):
        return (
            type(left) is type(right)
            and len(left) == len(right)  # type: ignore[arg-type]
            and all(map(same, left, right))  # type: ignore[call-overload]
        )
    return left == right


@pytest.mark.parametrize("full", [False, True], ids=["empty", "full"])
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_public_value_can_be_pickled_and_copied(name: str, full: bool) -> None:
    """With every protocol; a copy is equal."""
    value = example(name, full=full)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert same(value, pickle.loads(pickle.dumps(value, protocol)))
    assert same(value, copy.copy(value))
    assert same(value, copy.deepcopy(value))


def test_a_message_without_properties_can_be_sent_to_a_process() -> None:
    """It still has the object that stands for no properties, which the encoder knows."""
    message = Message("t", b"x")
    assert pickle.loads(pickle.dumps(message)).properties is NO_PROPERTIES
    assert copy.deepcopy(message).properties is NO_PROPERTIES
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_echo, args=(theirs, message))
    process.start()
    assert mine.poll(240)
    assert mine.recv() == message
    process.join()


def _echo(pipe: multiprocessing.connection.Connection, message: Message) -> None:
    pipe.send(message)


@pytest.mark.parametrize("call", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("writing", [False, True])
def test_an_open_store_says_that_it_cannot_be_sent(
    tmp_path: Path, call: Callable[[object], object], writing: bool
) -> None:
    """Nor copied: a copy would close it twice."""
    root = filled(tmp_path / "s")
    opened = MessageStore.open(root) if writing else MessageStore.open_read_only(root)
    with opened as store, pytest.raises(TypeError, match=r"an open store cannot be pickled or copied\. Send its path"):
        call(store)
