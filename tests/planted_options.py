"""Takes the effect of each option and each column of the connector away, one at a time, and runs the test that must
fail then. `tests/connector/options/test_planted_options.py` says which test that is.

    python tests/planted_options.py FILE [WORD...]

The file says, as JSON, which tests a row has. The last line that is printed is a JSON object: row -> the test that
failed, or null. With words, only the rows whose names have all of them are taken away. Each row has a fork of this
process, which has collected the tests once.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from _pytest.runner import runtestprotocol

from pyspark_messagestore import datasource
from pyspark_messagestore.options import table as options
from pyspark_messagestore.options.option import BATCHES, SINK, SOURCE, STREAMS, Option
from pyspark_messagestore.options.table import OPTIONS
from pyspark_messagestore.options.values import KAFKA, ROCKETMQ
from pyspark_messagestore.sink import columns
from pyspark_messagestore.source import readers as source
from pyspark_messagestore.source import schema
from pyspark_messagestore.source.schema import COLUMNS as ROCKETMQ_COLUMNS
from pyspark_messagestore.source.schema import KAFKA_COLUMNS, Column

BATCH, STREAM = "batch", "stream"
Plant = Callable[[], None]
WITHOUT_EFFECT = frozenset({(SOURCE, "path"), (SINK, "path"), (SINK, "includeHeaders")})
"""Nothing works without a path; the sink takes `includeHeaders` as Kafka's does, and it changes nothing."""


@dataclass(frozen=True)
class Row:
    """One thing that users can give, or get.

    Parameters
    ----------
    name : str
    about : str
        What a test is named for: `source tags`, `sink topic`, `column body`.
    plant : callable
        Takes its effect away in this process, for good.
    """

    name: str
    about: str
    plant: Plant


# ---- options


def _reading(kind: str, changed: Callable[[Any], Any]) -> Plant:
    """Readers get other options than the user gave."""

    def plant() -> None:
        reader: Any = source.BatchReader if kind == BATCH else source.StreamReader
        real = reader.__init__

        @functools.wraps(real)
        def init(self: Any, given: Any, *rest: Any, **named: Any) -> None:
            real(self, changed(given), *rest, **named)

        reader.__init__ = init
        for name in ("reader" if kind == BATCH else "streamReader", "schema"):
            _with_options(name, changed)

    return plant


def _with_options(name: str, changed: Callable[[Any], Any]) -> None:
    """A method of the data source that sees other options."""
    method = getattr(datasource.MessageStoreDataSource, name)

    @functools.wraps(method)
    def call(self: Any, *given: Any) -> Any:
        parse = datasource.source_options
        datasource.source_options = lambda found: changed(parse(found))  # type: ignore[assignment]
        try:
            return method(self, *given)
        finally:
            datasource.source_options = parse

    setattr(datasource.MessageStoreDataSource, name, call)


def _writing(changed: Callable[[Any], Any]) -> Plant:
    """The sink gets other options than the user gave."""

    def plant() -> None:
        parse = datasource.sink_options
        datasource.sink_options = lambda given: changed(parse(given))  # type: ignore[assignment]

    return plant


def _planted(option: Option, kind: str, changed: Callable[[Any], Any]) -> Plant:
    def change(given: Any) -> Any:
        value = getattr(given, option.field)
        other = changed(value)
        return given if other is value else _together(replace(given, **{option.field: other}))

    return _writing(change) if option.side == SINK else _reading(kind, change)


def _together(given: Any) -> Any:
    """Options that only go together with the one that was taken away go with it."""
    if getattr(given, "row_format", KAFKA) == ROCKETMQ and given.include_headers and hasattr(given, "contents"):
        given = replace(given, include_headers=False)
    if hasattr(given, "dead_letter_topic"):
        topic = None if given.invalid_rows == "fail" else given.dead_letter_topic or "dead"
        given = replace(given, dead_letter_topic=topic)
    if hasattr(given, "assign") and (given.subscribe, given.subscribe_pattern, given.assign) == (None, None, None):
        given = replace(given, subscribe_pattern=".*")
    return given


def values_of(option: Option) -> list[Any]:
    """The values of an option that has a few of them; none of an option with others."""
    return [option.kind.parse(word) for word in option.kind.values]


def _of_option(option: Option, kind: str) -> Iterator[Row]:
    about = f"{option.side} {option.name}"
    name = f"{about} ({kind})" if kind else about
    default = option.parsed_default
    values = values_of(option)
    for value, other in zip(values, [*values[1:], *values[:1]], strict=True):
        shown = f"{name}: {value} is {other}"
        yield Row(shown, about, _planted(option, kind, lambda v, a=value, b=other: b if v == a else v))
    if values and default is None:
        words = option.kind.values
        *_, other = (value for word, value in zip(words, values, strict=True) if option.shown != f"`{word}`")
        yield Row(f"{name}: none is {other}", about, _planted(option, kind, lambda v: other if v is None else v))
    if not values:
        yield Row(f"{name}: ignored", about, _planted(option, kind, lambda v: v if v == default else default))
    if isinstance(default, int | float) and not values:
        yield Row(
            f"{name}: another default",
            about,
            _planted(option, kind, lambda v: type(default)(default * 1.5) if v == default else v),
        )


def _without_alias(side: str, alias: str) -> Plant:
    return lambda: options._NAMES[side].pop(alias.lower()) and None


def of_options() -> Iterator[Row]:
    """Every option, each of its values and its default, in batch reads and in streams; and the aliases."""
    for option in OPTIONS:
        for alias in option.aliases:
            yield Row(f"{option.side} {option.name}: no {alias}", f"alias {alias}", _without_alias(option.side, alias))
        if (option.side, option.name) in WITHOUT_EFFECT:
            continue
        if option.side == SINK:
            yield from _of_option(option, "")
            continue
        if option.only != STREAMS:
            yield from _of_option(option, BATCH)
        if option.only != BATCHES:
            yield from _of_option(option, STREAM)


# ---- columns


def _column(row_format: str, column: Column, changed: Callable[[pa.Array], pa.Array]) -> Plant:
    def plant() -> None:
        made = column.made or (lambda stored: stored)
        by_name = schema._BY_NAME[row_format]
        by_name[column.name] = replace(column, made=lambda stored: changed(made(stored)))

    return plant


def _nulls(column: pa.Array) -> pa.Array:
    return pa.nulls(len(column), column.type)


def _first(column: pa.Array) -> pa.Array:
    return column.take(pa.array(np.zeros(len(column), np.int64)))


def _left_out(name: str) -> Plant:
    return _of_assigned(lambda found, given: found | {i for i, (each, _) in enumerate(given) if each.lower() == name})


def _refused(name: str) -> Plant:
    return _of_assigned(lambda found, given: {i for i in found if given[i][0] != name})


def _of_assigned(changed: Callable[[set[int], Any], set[int]]) -> Plant:
    """Other columns are left out of what is written than the store assigns."""

    def plant() -> None:
        real = columns.assigned
        columns.assigned = lambda given: changed(real(given), given)

    return plant


def _without_type(name: str, kind: str) -> Plant:
    def plant() -> None:
        stored, kinds, allowed = columns.ACCEPTED[name]
        columns.ACCEPTED[name] = (stored, tuple(each for each in kinds if each != kind), allowed)

    return plant


def of_columns() -> Iterator[Row]:
    """Every column of the source, and every column of the sink with each of its types."""
    for row_format, found in ((ROCKETMQ, ROCKETMQ_COLUMNS), (KAFKA, KAFKA_COLUMNS)):
        for column in found:
            about, name = f"{row_format} column", f"{row_format} column {column.name}"
            yield Row(f"{name}: null", about, _column(row_format, column, _nulls))
            if column.name not in ("topic", "queueId", "partition", "timestampType", "brokerName"):
                yield Row(f"{name}: that of the first row", about, _column(row_format, column, _first))
    for name, (_, kinds, _) in columns.ACCEPTED.items():
        yield Row(f"sink column {name}: left out", "sink column", _left_out(name))
        for kind in kinds:
            yield Row(f"sink column {name}: no {kind}", "sink column", _without_type(name, kind))
    for name in sorted({name for kinds in columns.ASSIGNED.values() for name in kinds}):
        yield Row(f"sink column {name}: refused", "columns that are left out", _refused(name))


ROWS = (*of_options(), *of_columns())


# ---- the tests


class Planting:
    """Runs, for each row, the tests that are named for it, until one of them fails."""

    def __init__(self, rows: list[Row], tests: dict[str, list[str]]) -> None:
        self.rows, self.tests = rows, tests
        self.caught: dict[str, str | None] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Take the place of pytest's own loop."""
        for row in self.rows:
            named = tuple(self.tests[row.about])
            items = [item for item in session.items if item.nodeid.split("[")[0].endswith(named)]
            self.caught[row.name] = _in_a_fork(row, items)
            sys.stderr.write(f"{row.name}: {self.caught[row.name]}\n")
        return True


def _in_a_fork(row: Row, items: list[pytest.Item]) -> str | None:
    """The first test that fails without the row; None if all of them pass."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(ours)
            row.plant()
            os.write(theirs, (_first_failed(items) or "").encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(child, 0)
    return found or None


def _first_failed(items: list[pytest.Item]) -> str | None:
    for item in items:
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=None)):
            return item.nodeid
    return None


def main() -> None:
    """Take every row away, and print the tests that failed."""
    with open(sys.argv[1], encoding="utf-8") as file:
        tests: dict[str, list[str]] = json.load(file)
    planting = Planting([row for row in ROWS if all(word in row.name for word in sys.argv[2:])], tests)
    files = sorted({test.split("::")[0] for named in tests.values() for test in named})
    code = pytest.main(["-q", "-n0", "-p", "no:cacheprovider", *files], plugins=[planting])
    sys.stdout.write(f"\n{json.dumps(planting.caught)}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
