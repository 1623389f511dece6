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
    kind.__name__: kind
    for kind in (
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
        return [to_json(item) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item) for item in value]}
    if isinstance(value, frozenset | set):
        return {"$set": [to_json(item) for item in sorted(value)]}
    if isinstance(value, Mapping):
        return _map_to_json(value)

    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return {"$int32": base64.b64encode(value.astype("<i4").tobytes()).decode("ascii")}

    name = type(value).__name__
    if CLASSES.get(name) is type(value):
        return {"$": name, **{key: to_json(field_value) for key, field_value in _fields_to_send(value)}}
    raise TypeError(f"a value of {name} does not travel")


def _map_to_json(items: Mapping[Any, Any]) -> _Json:
    if all(isinstance(key, str) and not key.startswith("$") for key in items):
        return {key: to_json(value) for key, value in items.items()}
    return {"$map": [[to_json(key), to_json(value)] for key, value in items.items()]}


def _fields_to_send(value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        field_value = getattr(value, field.name)
        if field_value != _default(field):
            yield field.name, field_value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def from_json(encoded: _Json, *, strict: bool) -> Any:
    """The value of what `json.loads` returned.

    Parameters
    ----------
    encoded : object
    strict : bool
        Refuse fields that a class does not have. A server does: it must not leave out what a caller asks for. A client
        passes over fields that a newer server added.

    Raises
    ------
    ProtocolError
        A tag or class is not in the table, or a field is missing or has a value of another type.
    """
    if isinstance(encoded, list):
        return [from_json(item, strict=strict) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded

    tag = next((key for key in encoded if key.startswith("$")), None)
    if tag is None:
        return {key: from_json(value, strict=strict) for key, value in encoded.items()}
    if tag == "$":
        return _instance(encoded, strict=strict)

    if len(encoded) != 1:
        raise ProtocolError(f"found {tag!r} beside other keys; allowed is a tag by itself")
    try:
        return _TAGS[tag](encoded[tag], strict)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ProtocolError(f"found a value with the tag {tag:.40}; allowed are {', '.join(_TAGS)}") from error


def _items(encoded: Any, strict: bool) -> list[Any]:
    if not isinstance(encoded, list):
        raise TypeError
    return [from_json(item, strict=strict) for item in encoded]


def _map(encoded: Any, strict: bool) -> dict[Any, Any]:
    return dict(_items(pair, strict) for pair in encoded)


def _bytes(encoded: Any, _: bool) -> bytes:
    return base64.b64decode(encoded, validate=True)


def _int32(encoded: Any, _: bool) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(encoded, validate=True), "<i4").astype(np.int32)


_TAGS = {
    "$tuple": lambda encoded, strict: tuple(_items(encoded, strict)),
    "$set": lambda encoded, strict: frozenset(_items(encoded, strict)),
    "$map": _map,
    "$bytes": _bytes,
    "$int32": _int32,
}


def _instance(encoded: dict[str, Any], *, strict: bool) -> Any:
    name = encoded["$"]
    kind = CLASSES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"found the class {name!r:.60}; allowed are {', '.join(sorted(CLASSES))}")

    hints, values = _hints(kind), {}
    for key, field_value in encoded.items():
        if key == "$":
            continue
        if key not in hints:
            if strict:
                raise ProtocolError(f"{name}: found the field {key!r:.60}; allowed are {', '.join(hints)}")
            continue
        values[key] = checked(from_json(field_value, strict=strict), hints[key], f"{name}.{key}")

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
    """Whether a value has the type of an annotation; the origin of `list[int]` is `list`, and its argument is `int`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return _fits_class(value, hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in arguments)

    if origin is tuple:
        return isinstance(value, tuple) and _fits_tuple(value, arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, dict) and all(
            _fits(key, arguments[0]) and _fits(item, arguments[1]) for key, item in value.items()
        )

    container = _CONTAINERS.get(origin)
    if container is not None:
        return isinstance(value, container) and all(_fits(item, arguments[0]) for item in value)
    return isinstance(value, np.ndarray) and origin is np.ndarray


def _fits_class(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an annotation without arguments. A bool is no number here."""
    if hint is Any or hint is object:
        return True
    if hint is None or hint is type(None):
        return value is None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and _LEAST <= value <= _MOST
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)


def _fits_tuple(values: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(_fits(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(map(_fits, values, hints))


_CONTAINERS: dict[Any, tuple[type[Iterable[Any]], ...]] = {
    list: (list, tuple),
    Sequence: (list, tuple),
    Iterable: (list, tuple),
    frozenset: (frozenset,),
}
"""What may arrive for an annotation with one argument, by its origin."""
