"""Stores that are killed thousands of times live in memory, where that is possible: syncs cost nothing there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.flips import Sample, make_samples
from crash.harness import ROOMY, scratch_folder
from crash.imitate import Process
from messagestore import StoreConfig
from messagestore.files.disk import Disk


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


@pytest.fixture
def root(scratch: Path) -> Path:
    """Where the store of a test is, or will be."""
    return scratch / "store"


@pytest.fixture
def config() -> StoreConfig:
    """The sizes of the stores that `process` opens; a module may have others."""
    return ROOMY


@pytest.fixture
def process(config: StoreConfig) -> Iterator[Callable[..., Process]]:
    """Starts processes; those that are left are killed at the end."""
    started: list[Process] = []

    def start(root: Path, disk: Disk | None = None, **changes: object) -> Process:
        started.append(Process(root, config.replace(**changes), disk))
        return started[-1]

    yield start
    for one in started:
        one.die()
