"""The command line `messagestore`: show a store, put and get messages, check and repair a store. It needs no Spark.

Exit codes: 0: done. 1: the command found a fault, or found nothing. 2: the command is wrong or cannot be done; one line
on standard error says why. 3: somebody else holds the store. 4: `recover` did its work and cut bytes off the log, or
rebuilt queues.

Commands that only read take no lock and write nothing. They work beside any writer, including a Java broker.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import re
import sys
from typing import Annotated, Any

import typer

from messagestore import ConfigError
from pyspark_messagestore.cli import commands
from pyspark_messagestore.cli.app import Commands
from pyspark_messagestore.cli.environment import Command
from pyspark_messagestore.cli.other_words import real_name
from pyspark_messagestore.cli.output import line, note
from pyspark_messagestore.cli.version import installed


class _Program(Commands):
    """The files of `commands`. One that runs is imported alone; the list of commands needs them all."""

    # The context is typer's own class or click's, by version.
    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override] # noqa: ARG002
        """All names, in the order of their places."""
        names = sorted(_names(), key=lambda name: _module(name).PLACE)
        self.commands = {name: self.commands.get(name) or _made(name) for name in names}
        return names

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """The command of this name, or None."""
        if cmd_name not in self.commands:
            if cmd_name in _names():
                self.commands[cmd_name] = _made(cmd_name)
            else:
                self.list_commands(ctx)  # a mistyped name is compared with all of them
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """The command that is meant. A word of another tool is told the name that it has here; where that command takes
        only a store and changes nothing, it runs.
        """
        other = None if ctx.resilient_parsing or not args else real_name(args)
        if other is not None and (" " in other[0] or args[0] not in _names()):
            name, *arguments = other[1].split()
            if arguments == ["ROOT"]:
                note(f"messagestore: {other[0]} is `messagestore {other[1]}` here")
                return super().resolve_command(ctx, [name, *args[len(other[0].split()) :]])
            raise ConfigError(
                f"there is no command {other[0]!r}. What it does elsewhere, `messagestore {other[1]}` does. "
                "`messagestore -h` lists all commands",
                key=other[0],
            )
        return super().resolve_command(ctx, args)


def _names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(commands.__path__)]


def _module(name: str) -> Any:
    return importlib.import_module(f"{commands.__name__}.{name}")


def _made(name: str) -> Any:
    """The command that a file defines: a function, or a `typer.Typer` with the words behind it."""
    module = _module(name)
    command = getattr(module, name)
    parent = typer.Typer(add_completion=False)
    parent.callback()(_nothing)  # so that it becomes a group even with one command

    if isinstance(command, typer.Typer):
        parent.add_typer(command, name=name, rich_help_panel=module.PANEL)
    else:
        parent.command(name, rich_help_panel=module.PANEL)(command)
    for info in (command if isinstance(command, typer.Typer) else parent).registered_commands:
        info.cls = Command
        info.short_help = _first_sentence(info.callback)  # lists of commands would break lines where docstrings do
    return typer.main.get_command(parent).commands[name]  # type: ignore[attr-defined] # it is a group


def _nothing() -> None:
    pass


def _first_sentence(command: Any) -> str:
    """The first sentence of a command's help, on one line."""
    return re.split(r"(?<=\.)\s", " ".join((inspect.getdoc(command) or "").split()), maxsplit=1)[0]


app = typer.Typer(
    cls=_Program,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Show a message store, put and get messages, and check or repair a store.",
    epilog="Exit codes: 0: done. 1: the command found a fault, or found nothing. 2: the command is wrong or cannot be "
    "done. 3: somebody else holds the store. 4: recover did its work, and had to cut bytes off the end of the log or "
    "to rebuild queues, or messages are lost.",
)


def _version(wanted: bool) -> None:
    if wanted:
        line(installed())
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show version, commit and kernel, and exit."),
    ] = False,
) -> None:
    pass


class _Notes(logging.Handler):
    """Shows what the store logs as lines on standard error, escaped: a path or a topic may hold anything."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one line."""
        note(self.format(record))


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Notes()], format="messagestore: %(message)s")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # for a terminal without UTF-8
    app(prog_name="messagestore")


if __name__ == "__main__":
    main()
