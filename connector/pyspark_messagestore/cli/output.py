"""The output of the command line: text for a person, and JSON.

With `--json`, a command that shows many things prints one object per line. A terminal must not trust the bytes of
messages: every character that is not plain text is escaped, and nothing is interpreted as markup.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import typer

from messagestore import MessageExt
from messagestore.inspect.operator import VerifyReport
from pyspark_messagestore.words import count_words, message_fields, shown, shown_bytes, size_words, time_words

if TYPE_CHECKING:
    from rich.console import Console

# Commands say `out.shown` and the like, wherever a function is.
__all__ = ["count_words", "message_fields", "shown", "shown_bytes", "size_words", "time_words"]

SHOWN_BODY_LENGTH = 500
"""The number of characters of a body that a terminal shows; a pipe or a file gets all of it."""
WAITING_S = 1.0
"""After this many seconds, a terminal shows that work goes on."""
MESSAGE_TYPE = "message.type"
"""The attribute of a topic that says what RocketMQ 5 clients may put into it."""
_HEX_LENGTH = 16
_PIPE_WIDTH = 1000
_FOLDED_WIDTH, _GAP = 12, 2
"""In a table: text is folded down to this width, and columns have this distance."""
_TITLE = "bold cyan"
_LONG = 1000
"""A table with more rows is laid out without the library."""


# ---- messages


def message_line(message: MessageExt, *, physical: bool = False) -> str:
    """A message on one line."""
    parts = [f"{message.physical_offset:>12} {message.size:>6} B"] if physical else []
    parts += [
        f"{shown(message.topic)}/{message.queue_id} @{message.queue_offset}",
        time_words(message.store_timestamp_ms),
    ]

    if message.tags:
        parts.append(f"tags={shown(message.tags)}")
    if message.keys:
        parts.append(f"keys={','.join(shown(key) for key in message.keys)}")
    if message.properties:
        parts.append(
            "{" + ", ".join(f"{shown(name)}={shown(value)}" for name, value in message.properties.items()) + "}"
        )
    # Without the two bits that only say that a host's address is IPv6.
    if message.sys_flag & ~0x30:
        parts.append(f"sysFlag={message.sys_flag:#x}")

    most = SHOWN_BODY_LENGTH if sys.stdout.isatty() else None
    return "  ".join([*parts, "|", shown_bytes(message.body, most)])


def show_message(message: MessageExt, *, as_json: bool, broker: str = "") -> None:
    """Show one message, as a line or as JSON, perhaps with the name of the broker that has it."""
    if as_json:
        json_line(({"brokerName": broker} if broker else {}) | message_fields(message))
    else:
        line((f"{shown(broker)}  " if broker else "") + message_line(message))


def message_type(attributes: dict[str, str]) -> str | None:
    """What a topic's attributes say about its messages. A broker's tools write the name with a plus sign."""
    return attributes.get(MESSAGE_TYPE, attributes.get("+" + MESSAGE_TYPE))


def hex_lines(data: bytes) -> Iterable[str]:
    """`data` as hex, 16 bytes per line, each line with its position."""
    for start in range(0, len(data), _HEX_LENGTH):
        yield f"    {start:>4}  {data[start : start + _HEX_LENGTH].hex(' ', 4)}"


# ---- output


def line(text: str = "") -> None:
    """Print one line that is already escaped: text for a person, or JSON. The output is flushed at once."""
    typer.echo(text)


def block(text: str) -> None:
    """Print lines that a program reads. They are escaped on a terminal; a pipe or a file gets every byte."""
    if sys.stdout.isatty():
        text = "\n".join(map(shown, text.split("\n")))
    typer.echo(text, color=True)  # otherwise, typer leaves out what looks like a colour


def note(text: str) -> None:
    """Print one line to standard error; it is escaped here."""
    typer.echo(shown(text), err=True)


def json_line(value: Any) -> None:
    """Print one JSON value on one line, ASCII only."""
    typer.echo(json.dumps(value))


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair per line, in columns."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        line(f"{name:<{width}}  {shown(value)}")


def table(columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[object]], *, err: bool = False) -> None:
    """Print a table. Each column has a title, and says whether it holds numbers.

    A terminal that is too narrow shows each row as lines of names and values: a number is never broken.
    """
    from rich.cells import cell_len
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
    cells = [[shown(str(value)) for value in row] for row in rows]
    titles = [title for title, _ in columns]

    widest = [max(cell_len(row[number]) for row in (titles, *cells)) for number in range(len(columns))]
    least = sum(
        (width if is_number else min(width, _FOLDED_WIDTH)) + _GAP
        for width, (_, is_number) in zip(widest, columns, strict=True)
    )
    numbers = [is_number for _, is_number in columns]
    if least > console.width:
        _print_upright(console, titles, cells)
    elif len(cells) > _LONG:
        _write_plain(stream, [titles, *cells], widest, numbers)
    else:
        _print_grid(console, titles, cells, numbers)


def _print_upright(console: Console, titles: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print each row as lines of names and values."""
    from rich.cells import cell_len
    from rich.text import Text

    name_width = max(map(cell_len, titles)) + _GAP
    for number, row in enumerate(cells):
        if number:
            console.print()
        for title, cell in zip(titles, row, strict=True):
            console.print(Text(title, style=_TITLE), " " * (name_width - cell_len(title)), Text(cell), sep="")


def _write_plain(stream: TextIO, rows: Sequence[Sequence[str]], widths: Sequence[int], numbers: Sequence[bool]) -> None:
    """Write the rows of a long table. The library would take nearly a millisecond and 300 bytes for each."""
    from rich.cells import cell_len

    for row in rows:
        parts = []
        for text, width, is_number in zip(row, widths, numbers, strict=True):
            room = " " * (width - cell_len(text))
            parts.append(room + text if is_number else text + room)
        stream.write((" " * _GAP).join(parts).rstrip() + "\n")


def _print_grid(
    console: Console, titles: Sequence[str], cells: Sequence[Sequence[str]], numbers: Sequence[bool]
) -> None:
    """Print a table in columns, whose texts are folded where they are too wide."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="")
    for title, is_number in zip(titles, numbers, strict=True):
        header = Text(title, style=_TITLE)
        grid.add_column(header, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for row in cells:
        grid.add_row(*map(Text, row))
    console.print(grid)


def report_lines(report: VerifyReport, root: str) -> None:
    """Print what `verify` checked and found; paths below `root` are printed relative to it."""
    counts = [
        count_words(count, name)
        for count, name in (
            (report.record_count, "record"),
            (report.unit_count, "unit"),
            (report.key_count, "key"),
            (report.batch_count, "batch"),
        )
    ]

    line(f"checked the log from {report.start} to {report.end}: {', '.join(counts)}")
    if 0 < report.without_property_crc < report.record_count:  # without any, a broker's settings are the question
        records = count_words(report.without_property_crc, "record")
        line(
            f"{records} without a property CRC, the first at {report.first_without_property_crc}. A broker with "
            f"forceVerifyPropCRC=true would cut the log at the first one that its recovery reads"
        )
    for text in report.notes:
        line(f"note: {shown(text)}")
    if report.ok:
        line("no fault found")
        return

    rows = [
        (os.path.relpath(f.path, root) if f.path.startswith(root) else f.path, f.offset, f.expected, f.found)
        for f in report.findings
    ]
    table([("file", False), ("offset", True), ("expected", False), ("found", False)], rows)
    more = report.finding_count - len(rows)
    line(count_words(report.finding_count, "fault") + (f", of which {len(rows)} are shown" if more else ""))


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what, markup=False), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on standard error, if that is a terminal, that work of unknown length goes on, once it has taken a second.

    Nothing may be printed meanwhile.
    """
    if not sys.stderr.isatty():
        yield
        return

    from rich.console import Console
    from rich.text import Text

    status = Console(stderr=True).status(Text(shown(what)))
    timer = threading.Timer(WAITING_S, status.start)
    timer.start()

    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
