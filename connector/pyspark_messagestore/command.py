"""The program `messagestore`. It starts the command line, or says what to install where the extra `cli` is missing."""

from __future__ import annotations

import importlib
import sys

from pyspark_messagestore.requirements import install_extra


def main() -> None:
    """Run the command line."""
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


if __name__ == "__main__":
    main()
