"""Half messages whose process is killed, or whose machine loses its power, while it prepares, ends and checks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import halves
from crash.faults import quiet_threads

EACH = 29


@pytest.mark.parametrize("name", halves.CONFIGS)
def test_a_half_message_has_ended_once_or_is_open(tmp_path: Path, name: str) -> None:
    """Some of the deaths of `make crash`; the next process ends everything, twice."""
    with quiet_threads():
        root = tmp_path / "store"
        judged = [
            (death.label, halves.Judge(death, root).judge())
            for number, death in enumerate(halves.deaths(halves.Story.of(name, root), stride=10))
            if number % EACH == 0
        ]
    assert [f"{label}: {verdict}" for label, verdict in judged if not verdict.ok] == []
    assert len(judged) > 10
