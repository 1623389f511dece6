"""Processes of the harness that are forked, and tell whether they ended as they should."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Run work in a forked process and return its pid. Its status is 0 if the work ended as it should."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it was, the parent is told
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)
    return pid


def ended(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
