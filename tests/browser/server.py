"""`messagestore dashboard` as a process of its own, which may do no more than its permissions say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cli_runs import finish, read_lines

# Root may read and write whatever it likes, unless it gives up these. What a test takes away from others is then
# taken away from the server, too.
PLAIN = (
    ["setpriv", "--inh-caps=-dac_override,-dac_read_search", "--bounding-set=-dac_override,-dac_read_search"]
    if os.geteuid() == 0
    else []
)


class Server(NamedTuple):
    """A server that runs.

    Parameters
    ----------
    address : str
        Of the overview, without the last slash.
    process : Popen
    """

    address: str
    process: subprocess.Popen[str]


@contextmanager
def served(*arguments: object, listen: str = "127.0.0.1:0") -> Iterator[Server]:
    """The dashboard with these arguments. It must not have complained when it ends."""
    command = [*PLAIN, sys.executable, "-m", "pyspark_messagestore.cli.main", "dashboard"]
    command += [*map(str, arguments), "--listen", listen, "--json"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        (line,) = read_lines(process, 1)
        yield Server(json.loads(line)["url"].rstrip("/"), process)
    finally:
        process.send_signal(signal.SIGTERM)
        said = finish(process, code=-signal.SIGTERM)
    assert said == ("", ""), said


def protected(root: Path) -> None:
    """Take the permission to write away from everybody."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)


def tree(root: Path) -> dict[str, tuple[bytes | None, int, int]]:
    """Each file of a folder: its bytes, the time of its last change in nanoseconds, its permissions."""
    return {
        str(path): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns, path.stat().st_mode)
        for path in (root, *root.rglob("*"))
    }
