"""A broker that starts while we are attached deletes files before it is refused; here each kind of file is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.harness import APP, Promise, check_store, no_thread_warnings
from crash.imitate import (
    put,
    rows_seen,
    seen,
)
from messagestore import (
    StorePoisonedError,
)
from messagestore.inspect.verify import verify
from sequences import CONFIG, Start

pytestmark = no_thread_warnings


@pytest.mark.parametrize("what", ["index", "consumequeue", "both"])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_files_that_a_broker_deleted_are_made_again(root: Path, process: Start, what: str, how: str) -> None:
    """A broker deletes files before it asks for the lock. They are made again from the log, and the writer goes on."""
    p = process(root)
    p.batch(version=0)
    for folder in ("index", "consumequeue") if what == "both" else (what,):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file():
                size = path.stat().st_size
                path.unlink()
                if how == "replaced":
                    path.write_bytes(bytes(size))
    assert p.batch(version=1).status == "appended"
    assert p.batch("other", 0).status == "appended"
    p.detach()
    report = verify(root)
    assert report.ok, report.findings[:3]
    check_store(root, Promise(rows={(APP, 0): 5, (APP, 1): 5}, batches={(APP, 0), (APP, 1)}), CONFIG)


def test_a_segment_that_is_not_at_its_path_poisons_a_commit(root: Path, process: Start) -> None:
    """Nothing is acknowledged into an unlinked file."""
    p = process(root)
    p.batch(version=0)
    (path,) = (root / "commitlog").iterdir()
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(StorePoisonedError):
        p.batch(version=1)
    assert p.batch(version=1).status == "appended", "the next commit opens the store again"
    assert rows_seen(root) == {0: 5, 1: 5}


def test_a_segment_that_is_not_at_its_path_poisons_a_session(root: Path, process: Start) -> None:
    """Nothing is acknowledged into an unlinked file, and what was acknowledged before is found again."""
    store = process(root).session()
    put(store, "put/0/")
    (path,) = (root / "commitlog").iterdir()
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(StorePoisonedError):
        put(store, "put/1/")
    store.close()
    assert seen(root)[("single", 0)] == ["put/0/"]
