"""The process that checks a store for the dashboard: `python -m pyspark_messagestore.dashboard.checking ROOT`.

It reads only, runs when nobody else wants the processor or the disk, and ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from messagestore import StoreError
from messagestore.inspect import operator
from pyspark_messagestore.dashboard.checks import shortened

_TELL_S = 0.5
_IDLE_NICENESS = 19


def be_idle() -> None:
    """Let every other process go first. For the disk, Linux derives the class from that of the processor."""
    os.nice(_IDLE_NICENESS)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """Check a store, and say how far it has come."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    be_idle()
    told_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _TELL_S:
            told_s = time.monotonic()
            _tell({"done": done, "total": total})

    try:
        report = operator.verify(sys.argv[1], progress=progress)
    except (StoreError, OSError) as error:
        _tell({"error": str(error)})
        return
    size = report.end - report.start
    _tell({"done": size, "total": size, "report": shortened(report.to_dict())})


def _end_with_input() -> None:
    """The dashboard holds the other end of the pipe, whatever ends it."""
    while os.read(0, 1024):
        pass
    os._exit(1)


def _tell(found: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
