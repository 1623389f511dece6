"""Kills between Spark and brokers that run, the short form: `make live-deep` goes on until there were 500."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from interop import java_build, kills
from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS

FAULTS, SEED = 40, 20261126


def test_no_row_is_lost_or_doubled_whatever_is_killed(memory: Path) -> None:
    need(NEWEST, java_build.tools_classpath)
    counts = kills.run(memory, FAULTS, SEED)
    COUNTS.stores += len(kills.BROKERS)
    COUNTS.messages += (counts.cases[kills.QUERIES] + counts.cases[kills.ARCHIVES]) * sum(
        map(len, kills.EXPECTED.values())
    )
    assert counts.ok, "\n".join(counts.failures)
    assert kills.count_faults(counts) >= FAULTS
