"""Stores that are killed thousands of times live in memory, where that is possible: syncs cost nothing there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory (`/dev/shm`), or a temporary one where there is none."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="messagestore-", dir=where))
    yield folder
    shutil.rmtree(folder)
