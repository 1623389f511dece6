"""Backups that are killed at every operation beside a writer: the part `backups` of `make crash`, in the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import backups
from crash.faults import quiet_threads
from crash.workloads import Bases


@pytest.mark.parametrize("name", ["roll-over", "retention"])
def test_a_backup_that_was_killed_is_run_again_and_restored(tmp_path: Path, name: str) -> None:
    places = backups.Places(tmp_path)
    with quiet_threads(), backups.Story.told(name, places, Bases(places.store)) as story:
        left = list(story.left(places, power_every=1 << 30))
        found = [(label, story.judged(places, content)) for label, content in left[::7]]
    assert len(found) > 15
    assert [f"{label}: {verdict}" for label, verdict in found if not verdict.ok] == []
