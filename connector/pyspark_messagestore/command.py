"""The program `messagestore`. It starts the command line, or says what to install where the extra `cli` is missing."""

from __future__ import annotations

import importlib
import os
import signal
import sys

from pyspark_messagestore.requirements import install_extra

_UNTIL_TOLD = ("run", "deliver", "serve", "metrics")
_FOLLOWS = ("--follow", "-f")


def main() -> None:
    """Run the command line."""
    if _runs_until_told(sys.argv[1:]):
        # Importing the command line takes some tenths of a second, in which nothing is begun that had to be finished.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        from pyspark_messagestore.cli import main as cli

        importlib.import_module("rich")  # commands import it with their first table: what is missing is said now
    except ModuleNotFoundError as error:
        # These come with the extra `cli`. Where another module is missing, the program itself is broken.
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click", "shellingham"):
            raise
        sys.stderr.write(
            f"messagestore: the package {error.name} is not installed, which the command line needs. Run "
            f"{install_extra('cli')}\n"
        )
        raise SystemExit(2) from None
    cli.main()


def _runs_until_told(words: list[str]) -> bool:
    """Whether a command runs until SIGTERM, and then ends with 0 (`cli.services.told_to_end`)."""
    command = words[0] if words else ""
    if command == "copy":
        return any(word in _FOLLOWS for word in words)
    return command in _UNTIL_TOLD and "--once" not in words


if __name__ == "__main__":
    main()
