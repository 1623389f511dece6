"""Values as JSON, with tags from a fixed table of classes.

    text, numbers, true, false, null, lists     as they are
    a dict whose keys are text                  an object; no key begins with "$"
    {"$tuple": [...]}, {"$set": [...]}          a tuple; a frozenset
    {"$map": [[key, value], ...]}               a dict with other keys, such as queues
    {"$bytes": "base64"}                        bytes
    {"$int32": "base64"}                        an array of numbers, little-endian
    {"$": "Range", "topic": "t", ...}           a value of a class in `CLASSES`; a field with its default is left out

The receiver builds only what is in this table, and checks each value against the type that it expects.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from messagestore.batches.append import BatchRequest, BatchResult, PlannedWrite
from messagestore.batches.staging import StagedFile
from messagestore.errors import ProtocolError
from messagestore.files.staging_files import Write
from messagestore.format.config import StoreConfig
from messagestore.spi.interface import Committed, Description, Ends, LastRecord, Place, PlannedRead, Proven, Range

CLASSES: dict[str, type] = {
    each.__name__: each
    for each in (
        BatchRequest,
        BatchResult,
        Committed,
        Description,
        Ends,
        LastRecord,
        Place,
        PlannedRead,
        PlannedWrite,
        Proven,
        Range,
        StagedFile,
        StoreConfig,
        Write,
    )
}
"""The classes whose values travel. A name that is not here is refused."""

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_Json = Any


def to_json(value: Any) -> _Json:
    """A value as what `json.dumps` takes.

    Raises
    ------
    TypeError
        The value is of a class that does not travel.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, list):
        return [to_json(each) for each in value]
    if isinstance(value, tuple):
        return {"$tuple": [to_json(each) for each in value]}
    if isinstance(value, frozenset | set):
        return {"$set": [to_json(each) for each in sorted(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_json(each) for key, each in value.items()}
        return {"$map": [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return {"$int32": base64.b64encode(value.astype("<i4").tobytes()).decode("ascii")}
    name = type(value).__name__
    if CLASSES.get(name) is type(value):
        return {"$": name, **{key: to_json(each) for key, each in _fields_to_send(value)}}
    raise TypeError(f"a value of {type(value).__name__} does not travel")


def _fields_to_send(value: Any) -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(value):
        found = getattr(value, each.name)
        if found != _default(each):
            yield each.name, found


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def from_json(found: _Json, *, strict: bool) -> Any:
    """The value of what `json.loads` returned.

    Parameters
    ----------
    found : object
    strict : bool
        Refuse fields that a class does not have. A server does: it must not leave out what a caller asks for. A client
        passes over fields that a newer server added.

    Raises
    ------
    ProtocolError
        A tag or class is not in the table, or a field is missing or has a value of another type.
    """
    if isinstance(found, list):
        return [from_json(each, strict=strict) for each in found]
    if not isinstance(found, dict):
        return found
    tag = next((key for key in found if key.startswith("$")), None)
    if tag is None:
        return {key: from_json(each, strict=strict) for key, each in found.items()}
    if tag == "$":
        return _instance(found, strict=strict)
    if len(found) != 1:
        raise ProtocolError(f"found {tag!r} beside other keys; allowed is a tag by itself")
    try:
        return _TAGS[tag](found[tag], strict)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ProtocolError(f"found a value with the tag {tag:.40}; allowed are {', '.join(_TAGS)}") from error


def _items(found: Any, strict: bool) -> list[Any]:
    if not isinstance(found, list):
        raise TypeError
    return [from_json(each, strict=strict) for each in found]


def _map(found: Any, strict: bool) -> dict[Any, Any]:
    return dict(_items(pair, strict) for pair in found)


def _bytes(found: Any, _: bool) -> bytes:
    return base64.b64decode(found, validate=True)


def _int32(found: Any, _: bool) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(found, validate=True), "<i4").astype(np.int32)


_TAGS = {
    "$tuple": lambda found, strict: tuple(_items(found, strict)),
    "$set": lambda found, strict: frozenset(_items(found, strict)),
    "$map": _map,
    "$bytes": _bytes,
    "$int32": _int32,
}


def _instance(found: dict[str, Any], *, strict: bool) -> Any:
    name = found["$"]
    kind = CLASSES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"found the class {name!r:.60}; allowed are {', '.join(sorted(CLASSES))}")
    hints, values = _hints(kind), {}
    for key, each in found.items():
        if key == "$":
            continue
        if key not in hints:
            if strict:
                raise ProtocolError(f"{name}: found the field {key!r:.60}; allowed are {', '.join(hints)}")
            continue
        values[key] = checked(from_json(each, strict=strict), hints[key], f"{name}.{key}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ProtocolError(f"{name}: a field is missing: {error}") from error


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, vars(sys.modules[kind.__module__]))


# ---- types


def checked(value: Any, hint: Any, where: str) -> Any:
    """The value, after a check that it has the type of an annotation.

    Raises
    ------
    ProtocolError
        It has another type, or is a number of more than 64 bits.
    """
    if not _fits(value, hint):
        wanted = getattr(hint, "__name__", None) or str(hint)
        raise ProtocolError(f"{where}: found a value of type {type(value).__name__}; allowed is {wanted}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if hint is None or hint is type(None):
        return value is None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and _LEAST <= value <= _MOST
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if origin is None:
        return isinstance(hint, type) and isinstance(value, hint)
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return isinstance(value, tuple) and all(_fits(each, inner[0]) for each in value)
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, dict) and all(
            _fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items()
        )
    if origin in (list, Sequence, Iterable):
        return isinstance(value, list | tuple) and all(_fits(each, inner[0]) for each in value)
    if origin is frozenset:
        return isinstance(value, frozenset) and all(_fits(each, inner[0]) for each in value)
    return isinstance(value, np.ndarray) and origin is np.ndarray
