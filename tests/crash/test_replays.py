"""The mode `replays`, a sample of it; and that it is not blind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from crash import replays
from crash.harness import scratch_folder


@pytest.fixture(scope="module")
def states() -> dict[str, replays.State]:
    with scratch_folder() as folder:
        return replays.make_states(folder / "store")


@pytest.mark.parametrize("count", [60, pytest.param(150, marks=pytest.mark.slow)])
def test_small_files_are_damaged_and_every_batch_comes_again(states: dict[str, replays.State], count: int) -> None:
    """No row twice, none lost, whatever is damaged; and where the log has everything the store opens."""
    words: Counter[str] = Counter()
    with scratch_folder() as folder:
        cases = list(replays.cases(states, folder / "store", True))
        for kind, key, state, damage, must_open in cases[:: len(cases) // count]:
            word, verdict = replays.look_any(kind, state, folder / "store", damage, must_open)
            assert verdict.ok, f"{key}: {verdict}"
            words[f"{kind}: {word}"] += 1
    assert words["bits of small files: known"] > count // 8
    assert words["bits of small files: refused"] > count // 30
    assert words["bits of the last BATCH record: refused"] > count // 30
    assert words["small files lost: known"] > count // 30


def test_a_row_that_is_there_twice_is_found(states: dict[str, replays.State]) -> None:
    """The verdict does not rely on what the store says."""
    state = states["closed"]
    forgotten = replays.Promise(rows={("app-1", 0): 3}, maybe_batches={("app-1", 0)})
    with scratch_folder() as folder:
        shorter = replays.State(state.name, state.config, state.content, state.older, forgotten)
        assert not replays.look(shorter, Path(folder, "store"), lambda disk: None, True)[1].ok
