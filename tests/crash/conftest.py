"""Stores that are killed thousands of times live in memory, where that is possible: syncs cost nothing there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.flips import Sample, make_samples
from crash.harness import scratch_folder


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory (`/dev/shm`), or a temporary one where there is none."""
    with scratch_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def samples() -> dict[str, Sample]:
    """The stores that are damaged, made once: nobody changes them."""
    with scratch_folder() as folder:
        return make_samples(folder / "store")
