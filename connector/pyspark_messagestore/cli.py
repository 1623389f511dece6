"""The command line `messagestore`: show a store, put and get messages, check and repair a store. It needs no Spark.

Exit codes: 0: done. 1: the command found a fault, or found nothing. 2: the command is wrong or cannot be done; one line
on standard error says why. 3: somebody else holds the store. 4: `recover` did its work and cut bytes off the log, or
rebuilt queues.

Commands that only read take no lock and write nothing. They work beside any writer, including a Java broker.
"""

from __future__ import annotations

import logging
import sys

from pyspark_messagestore.cli_app import app, first_sentence
from pyspark_messagestore.cli_batches import batches_app
from pyspark_messagestore.cli_checkpoint import checkpoint_app
from pyspark_messagestore.cli_deliver import deliver
from pyspark_messagestore.cli_demo import demo
from pyspark_messagestore.cli_doctor import doctor
from pyspark_messagestore.cli_gc import gc
from pyspark_messagestore.cli_groups import group_app, groups
from pyspark_messagestore.cli_halves import half_app, halves
from pyspark_messagestore.cli_lag import lag
from pyspark_messagestore.cli_messages import find, get, put, tail
from pyspark_messagestore.cli_metrics import metrics
from pyspark_messagestore.cli_output import note
from pyspark_messagestore.cli_store import dump, recover, status, verify
from pyspark_messagestore.cli_topics import offsets, topic_app, topics

_SHOWING = (status, topics, offsets, groups, lag, halves, metrics)
for _command in (*_SHOWING, put, get, tail, find, dump, verify, recover, gc, deliver, doctor, demo):
    app.command()(_command)
app.add_typer(topic_app, name="topic")
app.add_typer(group_app, name="group")
app.add_typer(half_app, name="half")
app.add_typer(batches_app, name="batches")
app.add_typer(checkpoint_app, name="checkpoint")
for _each in (app, topic_app, group_app, half_app, batches_app, checkpoint_app):
    for _info in _each.registered_commands:
        _info.short_help = first_sentence(_info.callback)  # lists of commands would break lines where docstrings do


class _Notes(logging.Handler):
    """Shows what the store logs as lines on standard error, escaped: a path or a topic may hold anything."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one line."""
        note(self.format(record))


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Notes()])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # for a terminal without UTF-8
    app(prog_name="messagestore")


if __name__ == "__main__":
    main()
