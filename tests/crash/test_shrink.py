"""A failure is told as small as it goes, with the command that does it again."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crash import fuzz, images, mutants
from crash.harness import no_thread_warnings
from crash.shrink import smallest

pytestmark = no_thread_warnings


@given(st.integers(0, 40), st.data())
def test_no_part_more_than_needed(count: int, data: st.DataObject) -> None:
    """What is needed together is found among the rest."""
    needed = data.draw(st.sets(st.sampled_from(range(count)), max_size=4)) if count else set()
    assert smallest(range(count), lambda some: needed <= set(some)) == sorted(needed)


def test_it_gives_up_after_so_many_tries() -> None:
    """A case that takes long is told larger than it might be."""
    tries = itertools.count()

    def wrong(some: Sequence[int]) -> bool:
        next(tries)
        return {3, 70} <= set(some)

    assert {3, 70} < set(smallest(range(100), wrong, most_tries=5))
    assert next(tries) == 5


def test_a_power_cut_takes_no_more_than_it_takes(tmp_path: Path) -> None:
    """A batch's head is not synced: of all that the power cut took the head is told, and the command does it again."""
    bug = next(mutant for mutant in mutants.MUTANTS if mutant.name == "no sync of a batch's head")
    root = tmp_path / "store"
    with bug.planted():
        story = images.Story.of("batches", images.Bases(root))
        cuts = [death for death in images.power_cuts(story, limit=1) if death.image and "strict" in death.image.label]
        cases = (images.Case(f"batches/{2 * number + 1}", 1, death) for number, death in enumerate(cuts))
        wrong = next(case for case in cases if not case.judged(root)[1].ok)
        small = wrong.shrunk(root)
        _, verdict = small.judged(root)
    assert not verdict.ok
    assert small.once
    assert small.lost is not None
    assert len(small.lost) == 1 < len(wrong.death.image.lost)  # type: ignore[union-attr]
    assert wrong.with_words(str(small).split(";")[1:]) == small
    assert re.fullmatch(r"batches/\d+;once;lost \d+", str(small))


def test_words_that_no_case_has() -> None:
    """A command that was typed by hand."""
    case = images.Case("batches/1", 1, None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="allowed are `once` and `lost 1,2,3`"):
        case.with_words(["twice"])


def test_a_hostile_input_has_no_more_edits_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first edits of an input are enough to break a reader: only these are told."""
    seen: list[bytes] = []

    def read(data: bytes) -> None:
        seen.append(data)
        if data != b"seed" * 30:
            raise KeyError("broken")

    monkeypatch.setattr(fuzz, "targets", lambda *_: [fuzz.Target("a", [b"seed" * 30], read, 1)])
    monkeypatch.setattr(fuzz, "_read_staged", lambda *_: None)
    number = next(n for n in range(1, 1000) if _edits(n) == fuzz.MOST_EDITS)
    counts = fuzz.run(0.0, 1, True, case=str(number))
    assert counts.misread == 1
    again = re.search(r"--case '\"'\"'(\d+;edits (\d))'\"'\"'", counts.failures[0])
    assert again is not None, counts.failures[0]
    assert 1 <= int(again[2]) < fuzz.MOST_EDITS
    last = seen[-1]
    assert fuzz.run(0.0, 1, True, case=again[1]).misread == 1
    assert seen[-1] == last


def _edits(number: int) -> int:
    """How many edits an input of seed 1 gets."""
    chance = random.Random(f"1 {number}")
    chance.choices([0], [1])
    chance.random()
    chance.choice([b""])
    return chance.choice((1, 1, 1, 2, 3, fuzz.MOST_EDITS))
