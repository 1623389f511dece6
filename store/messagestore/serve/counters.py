"""What a server has done since it was started, by verb and client, as Prometheus reads it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

_FAMILIES = (
    ("messagestore_serve_requests_total", "Requests that were answered."),
    ("messagestore_serve_errors_total", "Requests that ended in an error."),
    ("messagestore_serve_received_bytes_total", "Bytes of bodies that clients sent."),
    ("messagestore_serve_sent_bytes_total", "Bytes of bodies that clients were sent."),
    ("messagestore_serve_seconds_total", "Seconds from the head of a request to the end of its answer."),
    ("messagestore_serve_throttled_seconds_total", "Seconds in which the rate limit held requests back."),
)


class Counters:
    """Sums, by verb and client. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(_FAMILIES))

    def add(self, verb: str, client: str, *values: float) -> None:
        """Add one request: errors, bytes in, bytes out, seconds, throttled seconds."""
        with self._mutex:
            sums = self._sums[verb, client]
            for index, value in enumerate((1.0, *values)):
                sums[index] += value

    def text(self) -> bytes:
        """All sums in Prometheus' text format."""
        with self._mutex:
            rows = sorted((key, list(sums)) for key, sums in self._sums.items())
        lines = []
        for index, (name, meaning) in enumerate(_FAMILIES):
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} counter"]
            for (verb, client), sums in rows:
                lines.append(f'{name}{{verb="{verb}",client="{_label(client)}"}} {sums[index]:.9g}')
        return _text(lines)


def staged_text(sizes: Mapping[str, int]) -> bytes:
    """What clients have staged, in Prometheus' text format."""
    name = "messagestore_serve_staged_bytes"
    lines = [f"# HELP {name} Bytes that were staged and not committed.", f"# TYPE {name} gauge"]
    return _text(lines + [f'{name}{{client="{_label(client)}"}} {size}' for client, size in sorted(sizes.items())])


def _label(client: str) -> str:
    return client.replace("\\", "").replace('"', "").replace("\n", "")


def _text(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode("utf-8")
