"""Errors without a trace of Python: what a user must know is the first thing that Spark shows.

Spark puts the traceback of its own processes before the message of an exception. The faults that `StoreError` reports
are in options, columns, paths and files, so those lines say nothing; they only hide the sentence that does.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from messagestore import StoreError

_HIDE = "SPARK_HIDE_TRACEBACK"
"""The variable by which PySpark leaves the traceback out."""
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)


def in_sparks_process() -> bool:
    """Whether Spark started this process. Such a process ends with its first error, unlike a user's own program."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


def plain_errors(*names: str) -> Callable[[_Class], _Class]:
    """A decorator for a class that Spark calls: a `StoreError` that leaves one of its methods has no traceback.

    Parameters
    ----------
    names : str
        The methods of the class itself.
    """

    def decorate(cls: _Class) -> _Class:
        for name in names:
            setattr(cls, name, _plain(cls.__dict__[name]))
        return cls

    return decorate


def _plain(method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    @functools.wraps(method)
    def call(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        try:
            return method(*given, **named)
        except StoreError:
            if in_sparks_process():
                os.environ[_HIDE] = "1"
            raise

    return call
