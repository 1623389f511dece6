"""Which cases run: `make interop` takes a part of the histories, Kafka jobs and older brokers, another one each day, and
`make interop-deep` all. With SHARE=4, as in CI, it takes a quarter of the random stores, kills and power cuts, too.

A failure is repeated by the day that the first lines of the run name: make interop INTEROP_DAY=739581
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TypeVar

IS_WHOLE = os.environ.get("INTEROP_WHOLE") == "1"
SHARE = int(os.environ.get("INTEROP_SHARE", "1"))
# It is set for the processes of xdist, which must agree on the tests also at midnight.
DAY = int(os.environ.setdefault("INTEROP_DAY", str(datetime.now(UTC).toordinal())))
_Case = TypeVar("_Case")


def part(cases: Iterable[_Case], parts: int = SHARE) -> list[_Case]:
    """Every `parts`-th case, from one that the day chooses: as many days as there are parts take all."""
    found = [*cases]
    return found if IS_WHOLE else found[DAY % parts :: parts]


def in_words() -> str:
    """For the first lines of a run."""
    share = "" if SHARE == 1 else f" SHARE={SHARE}"
    return "all cases" if IS_WHOLE else f"the cases of day {DAY} (make interop INTEROP_DAY={DAY}{share})"
