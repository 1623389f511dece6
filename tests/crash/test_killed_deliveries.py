"""Deliverers of delayed messages that die at some operation; `make crash` takes every operation."""

from __future__ import annotations

import itertools
from pathlib import Path

from crash import deliveries


def test_a_killed_delivery_loses_and_doubles_nothing(tmp_path: Path) -> None:
    labels = set()
    for key, verdict, label in itertools.islice(deliveries.cases(tmp_path / "store", 7, (3, 61)), 60):
        assert verdict.ok, f"{key}: {label}: {verdict}"
        labels.add(label.split()[0])
    assert labels == {"kill", "power"}
