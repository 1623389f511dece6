"""`python -m benchmarks SUITE`: which figures are taken?"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks import (
    curves,
    dashboard_pages,
    store_append,
    store_backup,
    store_consume,
    store_delivery,
    store_halves,
    store_history,
    store_journal,
    store_open,
    store_pool,
    store_put,
    store_read,
    store_recovery,
    store_retention,
    store_scan,
    store_syncs,
    store_wait,
)
from benchmarks.measure import MEMORY, Settings, room_in_memory

STORE: dict[str, Callable[[Settings], None]] = {
    "append": store_append.run,
    "read": store_read.run,
    "scan": store_scan.run,
    "put": store_put.run,
    "delivery": store_delivery.run,
    "halves": store_halves.run,
    "wait": store_wait.run,
    "consume": store_consume.run,
    "open": store_open.run,
    "syncs": store_syncs.run,
    "recovery": store_recovery.run,
    "journal": store_journal.run,
    "history": store_history.run,
    "retention": store_retention.run,
    "pool": store_pool.run,
    "backup": store_backup.run,
}

_QUICK_ROOM = 4 << 30
"""More bytes than a quick run has at once."""
_QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Short programs take half of the CPU so."""

CURVES = tuple(curves.AXES)
LIVE = ("source", "sink", "copy", "arrivals")

SUITES: dict[str, tuple[str, list[str]]] = {
    "store": ("the store alone, without Spark", list(STORE)),
    "sink": ("Spark writes", ["sink", "small"]),
    "source": ("Spark reads", ["source", "steps"]),
    "afar": ("what a store on another host costs, beside a local one", ["afar", "calls"]),
    "live": ("source and sink beside RocketMQ's own Java clients, at a broker that runs", list(LIVE)),
    "queues": ("what one step of a stream costs the driver, without Spark", ["queues"]),
    "profile": ("where the time of a micro-batch goes, by process and by step", ["profile"]),
    "curves": ("how the store scales, one axis at a time, as pictures", list(CURVES)),
    "first": ("the first query of a session: time and Python processes until its first micro-batch", ["first"]),
    "dashboard": ("what the pages of the dashboard cost, at three stores", ["pages"]),
    "memory": ("peak memory of Spark's Python processes, writing and reading 4 GiB", ["memory"]),
}
PUBLISHED = {
    "profile": "also write the profile into benchmarks/profiles, as PUBLISH.md and PUBLISH.json",
    "curves": "write pictures, numbers and a page into this folder: docs/curves",
}
"""The suites with a document in the project."""


def group(suite: str, name: str) -> Callable[[Settings], None]:
    """The function that measures a group of figures. Spark is imported only for a group that needs it."""
    if suite == "store":
        return STORE[name]
    if suite == "curves":
        return partial(curves.run, name)
    if suite == "dashboard":
        return dashboard_pages.run
    if suite == "live":
        from benchmarks import live_brokers

        return partial(live_brokers.run, name)
    if name == "queues":
        from benchmarks import stream_queues

        return stream_queues.run
    from benchmarks import (
        afar_calls,
        first_query,
        source_steps,
        spark_afar,
        spark_memory,
        spark_profile,
        spark_small,
        spark_streams,
    )

    return {
        "afar": spark_afar.run,
        "calls": afar_calls.run,
        "sink": spark_streams.run_sink,
        "small": spark_small.run,
        "source": spark_streams.run_source,
        "steps": source_steps.run,
        "profile": spark_profile.run,
        "first": first_query.run,
        "memory": spark_memory.run,
    }[name]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    for suite, (words, groups) in SUITES.items():
        store = suites.add_parser(suite, help=words)
        store.add_argument(
            "--quick", action="store_true", help="20 000 rows, one round, in memory: does everything run?"
        )
        store.add_argument("--rows", type=int, help="messages in a batch (1 000 000; quick: 20 000)")
        store.add_argument("--rounds", type=int, help="rounds of each figure (5; quick: 1)")
        store.add_argument("--only", nargs="+", choices=groups, default=groups, help="some groups of figures")
        if suite == "dashboard":
            store.add_argument("--size", type=float, help="GiB of the large store (10; quick: 1/16)")
        if suite in PUBLISHED:
            store.add_argument("--publish", help=PUBLISHED[suite])
        store.add_argument(
            "--folder",
            type=Path,
            help="where data roots are made, and removed; default: the system's, or memory when quick",
        )

    arguments = parser.parse_args()

    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, pyarrow {pa.__version__}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians over rounds, best beside them",
        file=sys.stderr,
    )

    if arguments.quick:
        os.environ.setdefault("JDK_JAVA_OPTIONS", _QUICK_JAVA)
        if arguments.folder is None and room_in_memory(_QUICK_ROOM):
            arguments.folder = MEMORY

    for name in arguments.only:
        with tempfile.TemporaryDirectory(prefix="messagestore-bench-", dir=arguments.folder) as folder:
            group(arguments.suite, name)(
                Settings(
                    folder=Path(folder),
                    rows=arguments.rows or (20_000 if arguments.quick else 1_000_000),
                    rounds=arguments.rounds or (1 if arguments.quick else 5),
                    quick=arguments.quick,
                    publish=getattr(arguments, "publish", None),
                    size=int(2**30 * size) if (size := getattr(arguments, "size", None)) else None,
                )
            )


if __name__ == "__main__":
    main()
