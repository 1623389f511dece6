"""The part of all cases that a run of `make crash` takes: other cases for each seed, and all of them in a few runs."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from crash import turns
from spark_faults import cells


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("every", [1, 2, 3, 8, 17])
def test_each_case_is_taken_once_in_so_many_runs(every: int, parts: int) -> None:
    found = Counter(
        case
        for seed in range(100, 100 + every)
        for part in range(parts)
        for _, case in turns.taken(range(1000), every, seed, (part, parts))
    )
    assert found == Counter(range(1000))


def test_the_parts_of_a_run_are_of_one_size() -> None:
    sizes = [len(list(turns.taken(range(1000), 5, 3, (part, 4)))) for part in range(4)]
    assert sizes == [50, 50, 50, 50]


@pytest.mark.parametrize("every", [2, 3, 4, 8, 17])
def test_each_run_takes_some_of_each_bit_of_a_byte(every: int) -> None:
    assert {number % 8 for number, _ in turns.taken(range(5000), every, 1)} == set(range(8))


def test_a_case_keeps_its_number() -> None:
    assert list(turns.taken("abcdefg", 3, 4)) == [(1, "b"), (4, "e")]


def test_kinds_have_numbers_of_their_own() -> None:
    """Otherwise a kind with few cases would be left out by chance."""
    cases = [("kill", n) for n in range(2)] + [("cut", n) for n in range(6)]
    taken = list(turns.taken_by_kind(cases, _every, 1))
    assert taken == [("kill", 1), ("cut", 1), ("cut", 4)]


def _every(case: tuple[str, int]) -> int:
    return 2 if case[0] == "kill" else 3


def test_the_seed_is_the_number_of_the_commit(tmp_path: Path) -> None:
    """Its time, where a clone has no history; and 1 where there is no repository."""

    def git(*words: str) -> str:
        words = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path / "one"), *words)
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    assert turns.of_commit(tmp_path) == 1
    (tmp_path / "one").mkdir()
    git("init", "-q")
    for number in range(1, 4):
        git("commit", "-q", "--allow-empty", "-m", "a commit")
        assert turns.of_commit(tmp_path / "one") == number
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{tmp_path}/one", tmp_path / "two"], check=True)
    assert turns.of_commit(tmp_path / "two") == int(git("show", "-s", "--format=%ct", "HEAD"))


def test_what_differs_from_a_commit(tmp_path: Path) -> None:
    """Also what is not committed, and what git has not been told of."""

    def git(*words: str) -> None:
        words = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *words)
        subprocess.run(words, capture_output=True, check=True)

    git("init", "-q")
    for name in ("same", "committed", "edited"):
        (tmp_path / name).write_text("one")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("tag", "first")
    (tmp_path / "committed").write_text("two")
    git("commit", "-q", "-a", "-m", "second")
    (tmp_path / "edited").write_text("three")
    (tmp_path / "new").write_text("four")
    assert turns.changed_since(tmp_path, "first") == {"committed", "edited", "new"}
    with pytest.raises(ValueError, match="git knows no commit 'none'"):
        turns.changed_since(tmp_path, "none")


def test_a_few_runs_take_all_cells_of_a_real_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cells.in_turn(7) == cells.QUICK
    monkeypatch.setattr(turns, "share", 4)
    runs = [cells.in_turn(seed) for seed in range(turns.runs(1))]
    for master, names in cells.QUICK.items():
        assert {cell for run in runs for cell in run[master]} == set(names)
        assert all({cell for cell in names if cell.endswith(":self")} <= set(run[master]) for run in runs)
