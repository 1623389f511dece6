"""The command line `messagestore`: show a store, put and get messages, check and repair a store. It needs no Spark.

Exit codes: 0: done. 1: the command found a fault, or found nothing. 2: the command is wrong or cannot be done; one line
on standard error says why. 3: somebody else holds the store. 4: `recover` did its work and cut bytes off the log, or
rebuilt queues.

Commands that only read take no lock and write nothing. They work beside any writer, including a Java broker.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys

import typer

from pyspark_messagestore.cli import commands
from pyspark_messagestore.cli.app import app, first_sentence
from pyspark_messagestore.cli.output import note


def _add_commands() -> None:
    """Add each file of `commands`, in the order of their places."""
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    modules = {name: importlib.import_module(f"{commands.__name__}.{name}") for name in names}
    for name in sorted(names, key=lambda name: modules[name].PLACE):
        command = getattr(modules[name], name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=modules[name].PANEL)
        else:
            app.command(name, rich_help_panel=modules[name].PANEL)(command)
    for typer_app in (app, *(group.typer_instance for group in app.registered_groups)):
        for info in typer_app.registered_commands if typer_app is not None else ():
            info.short_help = first_sentence(info.callback)  # lists of commands would break lines where docstrings do


_add_commands()


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
