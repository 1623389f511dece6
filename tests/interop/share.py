"""Which cases run: `make interop` takes a part of the histories, Kafka jobs and older brokers, another one each day, and
`make interop-deep` all. With SHARE=4, as in CI, it takes a quarter of the random stores, kills and power cuts, too.

A failure is repeated by the day that the first lines of the run name: make interop INTEROP_DAY=739581

`make interop CHANGED=main` runs the tests that are about what differs from that commit.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from crash.turns import changed_since

IS_WHOLE = os.environ.get("INTEROP_WHOLE") == "1"
SHARE = int(os.environ.get("INTEROP_SHARE", "1"))
# It is set for the processes of xdist, which must agree on the tests also at midnight.
DAY = int(os.environ.setdefault("INTEROP_DAY", str(datetime.now(UTC).toordinal())))
CHANGED = os.environ.get("INTEROP_CHANGED", "")
_KAFKA, _LIVE = "test_kafka_*", "test_live_*"
_ABOUT: dict[str, tuple[str, ...]] = {
    "tests/interop/test_*": (),  # a test is about itself
    "store/messagestore/remoting/*": (_LIVE, "test_topic_deletion.py"),
    "store/messagestore/spi/*": (_LIVE, _KAFKA),
    "store/messagestore/backup/*": (),
    "store/messagestore/serve/*": (),
    "store/messagestore/consume/*": ("test_consumer_groups.py", "test_mqadmin.py", "test_model_histories.py"),
    "store/messagestore/broker/*": (
        "test_broker_*",
        "test_delayed_messages.py",
        "test_model_histories.py",
        "test_real_broker.py",
        "test_retention.py",
        "test_sent_back.py",
        "test_t*",
    ),
    "connector/pyspark_messagestore/dashboard/*": (),
    "connector/pyspark_messagestore/monitoring/*": (),
    "connector/*": (_KAFKA, _LIVE),
    "examples/*": ("test_kafka_bridges.py", "test_live_job.py"),
    **dict.fromkeys(("*.md", "docs/*", "deploy/*", "benchmarks/*", "tests/browser/*", "tests/connector/*"), ()),
    **dict.fromkeys(("tests/store/*", "tests/crash/*", "tests/bench/*"), ()),
}
"""A changed file -> the tests that are about it; the first pattern that fits it counts. One that none fits touches all tests."""
_Case = TypeVar("_Case")


def part(cases: Iterable[_Case], parts: int = SHARE) -> list[_Case]:
    """Every `parts`-th case, from one that the day chooses: as many days as there are parts take all."""
    found = [*cases]
    return found if IS_WHOLE else found[DAY % parts :: parts]


def touched(tests: Collection[str], changed: Iterable[str]) -> set[str]:
    """Choose the files of tests that are about one of the changed files."""
    found = set[str]()
    for path in changed:
        about = next((names for pattern, names in _ABOUT.items() if fnmatch(path, pattern)), ("*",))
        found |= {name for name in tests if path.endswith(f"/{name}") or any(fnmatch(name, each) for each in about)}
    return found


def left_out(tests: Collection[str]) -> set[str]:
    """Choose the files of tests that do not run, since nothing that they are about differs from the commit CHANGED."""
    if not CHANGED:
        return set()
    return {*tests} - touched(tests, changed_since(Path(__file__).resolve().parents[2], CHANGED))


def in_words() -> str:
    """For the first lines of a run."""
    share = "" if SHARE == 1 else f" SHARE={SHARE}"
    return "all cases" if IS_WHOLE else f"the cases of day {DAY} (make interop INTEROP_DAY={DAY}{share})"
