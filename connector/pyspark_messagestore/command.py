"""The program `messagestore`. It starts the command line, or says what to install where the extra `cli` is missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from pyspark_messagestore import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click", "shellingham"):
            raise
        sys.stderr.write(
            f"messagestore: the package {error.name} is not installed, which the command line needs. Run "
            f"`{sys.executable} -m pip install 'pyspark-messagestore[cli]'`\n"
        )
        raise SystemExit(2) from None
    cli.main()


if __name__ == "__main__":
    main()
