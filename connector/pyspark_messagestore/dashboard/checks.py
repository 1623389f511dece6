"""The check of every byte of a store (`messagestore verify`), started from a page. It reads only.

One check runs at a time, in a process of its own with the lowest priority for processor and disk, so that pages and
writers do not wait for it. That process writes lines of JSON, and ends with the dashboard:

    {"done": bytes of the log, "total": bytes}
    {"report": what was found} or {"error": why it cannot be checked}
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from messagestore import StoreError

_MODULE = "pyspark_messagestore.dashboard.checking"
_SHOWN_FINDINGS = 100


class BusyError(StoreError):
    """A check runs already."""


@dataclass
class _Check:
    """One check.

    Parameters
    ----------
    path : str
    begun_ms : int
    state : str
        `runs`, `done`, `stopped` or `failed`.
    """

    path: str
    begun_ms: int
    process: subprocess.Popen[bytes]
    state: str = "runs"
    done: int = 0
    total: int = 0
    ended_ms: int | None = None
    report: dict[str, Any] | None = None
    error: str = ""

    def shown(self) -> dict[str, Any]:
        """What a page says of it."""
        return {
            "state": self.state,
            "done": self.done,
            "total": self.total,
            "begun": self.begun_ms,
            "ended": self.ended_ms,
            "report": self.report,
            "error": self.error,
        }


NONE = {"state": "none", "done": 0, "total": 0, "begun": None, "ended": None, "report": None, "error": ""}


@dataclass
class Checks:
    """The newest check of each store. One of them may be running."""

    _known: dict[str, _Check] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: bool = False

    def of(self, path: str) -> dict[str, Any]:
        """How far the newest check of a store has come; `state` is `none` if there was none since the start."""
        with self._lock:
            check = self._known.get(path)
            return dict(NONE) if check is None else check.shown()

    def start(self, path: str) -> None:
        """Start the check of a store, unless it runs.

        Raises
        ------
        BusyError
            The check of another store runs, or the dashboard is ending.
        """
        with self._lock:
            running = next((each for each in self._known.values() if each.state == "runs"), None)
            if running is not None and running.path == path:
                return
            if running is not None or self._ended:
                busy = "The dashboard ends." if running is None else f"{running.path} is being checked."
                raise BusyError(f"{busy} One check runs at a time: stop that one, or wait for its end.")
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            check = _Check(path, _now_ms(), process)
            self._known[path] = check
        threading.Thread(target=self._follow, args=(check,), name="dashboard-check", daemon=True).start()

    def stop(self, path: str) -> None:
        """Stop the check of a store, if it runs."""
        with self._lock:
            check = self._known.get(path)
            if check is None or check.state != "runs":
                return
            check.state, check.ended_ms = "stopped", _now_ms()
            check.process.kill()

    def end(self) -> None:
        """Stop what runs, and start nothing more."""
        with self._lock:
            self._ended = True
            paths = list(self._known)
        for path in paths:
            self.stop(path)

    def _follow(self, check: _Check) -> None:
        """Take in what the process says until it ends."""
        assert check.process.stdout is not None
        with check.process:
            for line in check.process.stdout:
                found = json.loads(line)
                with self._lock:
                    check.done, check.total = found.get("done", check.done), found.get("total", check.total)
                    check.error = found.get("error", "")
                    if "report" in found:
                        check.report = found["report"]
        with self._lock:
            if check.state != "runs":
                return
            check.ended_ms = _now_ms()
            check.state = "failed" if check.report is None else "done"
            if check.report is None and not check.error:
                check.error = f"the process of the check ended with {check.process.returncode}"


def shortened(report: dict[str, Any]) -> dict[str, Any]:
    """A report with as many findings as a page shows."""
    return report | {"findings": report["findings"][:_SHOWN_FINDINGS]}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
