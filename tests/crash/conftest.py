"""Stores that are killed thousands of times live in memory, where that is possible: syncs cost nothing there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.harness import scratch_folder


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory (`/dev/shm`), or a temporary one where there is none."""
    with scratch_folder() as folder:
        yield folder
