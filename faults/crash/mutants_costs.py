"""Bugs planted in what keeps the costs of a store low: how its workers end, and what recovery leaves out."""

from __future__ import annotations

import os
from unittest import mock

from crash import brokers
from crash.planting import Mutant, many
from pyspark_commits import STAYS

MUTANTS = (
    Mutant(
        "a worker stays in the process group that Spark's daemon ends",
        lambda: mock.patch.dict(os.environ, {STAYS: "1"}),
        "concurrency: ends",
        many(brokers.daemon_ends),
    ),
)
