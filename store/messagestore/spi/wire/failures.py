"""Errors as JSON: the class by name from a fixed table, the text, and the fields that the class documents.

The receiver raises an error of the same class with the same text, so a caller acts on it as on an error of a store on
its own host. A class that is not in the table arrives as `StoreUnavailableError`: something failed inside the server,
whose log has the details, and nobody else is told them.
"""

from __future__ import annotations

from typing import Any

from messagestore import errors
from messagestore.errors import StoreError, StoreUnavailableError

CLASSES: dict[str, type[StoreError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, StoreError) and kind is not StoreError
}
"""The errors that arrive as what they are, by name."""
_OS_ERROR = "OSError"


def to_json(error: BaseException, request_id: str = "") -> dict[str, Any]:
    """An error as what `json.dumps` takes. The request id is added to the text, so that the server's log is found."""
    error_json: dict[str, Any] = {"request": request_id}
    notes = [str(note) for note in getattr(error, "__notes__", [])]
    if notes:
        error_json["notes"] = notes

    if isinstance(error, StoreError) and CLASSES.get(type(error).__name__) is type(error):
        fields = {name: value for name, value in vars(error).items() if not name.startswith("_") and _is_plain(value)}
        return error_json | {
            "class": type(error).__name__,
            "text": str(error),
            "errno": _errno(error),
            "fields": fields,
        }

    if isinstance(error, OSError):
        fields = {"filename": error.filename if isinstance(error.filename, str) else None}
        return error_json | {
            "class": _OS_ERROR,
            "text": error.strerror or str(error),
            "errno": _errno(error),
            "fields": fields,
        }

    hidden = f"the server failed with {type(error).__name__}; its log has more under this request"
    return error_json | {
        "class": StoreUnavailableError.__name__,
        "text": str(error) if isinstance(error, StoreError) else hidden,
        "errno": None,
        "fields": {},
    }


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def from_json(error_json: Any) -> Exception:
    """The error of a server's answer; if the answer is none, an error that says so."""
    try:
        name, text, fields = error_json["class"], str(error_json["text"]), dict(error_json["fields"])
        number = error_json.get("errno")
        request_id = str(error_json.get("request") or "")
        notes = [str(note) for note in error_json.get("notes", [])]
    except (TypeError, KeyError, ValueError):
        return StoreUnavailableError(f"the answer is not one of a store's server: {error_json!r:.200}")

    error: Exception
    kind = CLASSES.get(name)
    if name == _OS_ERROR:
        filename = fields.get("filename")
        error = OSError(number, text, filename) if isinstance(number, int) else OSError(text)
    elif kind is None:
        error = StoreUnavailableError(f"{name}: {text}")
    else:
        error = kind.__new__(kind)
        error.args = (text,)
        if isinstance(error, OSError) and isinstance(number, int):
            error.errno = number
        for key, value in fields.items():
            if key.isidentifier() and not key.startswith("_") and _is_plain(value):
                setattr(error, key, value)
    for note in notes:
        error.add_note(note)
    if request_id:
        error.add_note(f"request {request_id} in the log of the store's server")
    return error
