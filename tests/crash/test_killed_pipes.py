"""A pipe from topic to topic is killed, or power goes: each message has one result. `make crash` does it everywhere."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from crash import pipes
from crash.harness import no_thread_warnings

pytestmark = no_thread_warnings


@pytest.mark.parametrize("name", pipes.CONFIGS)
def test_each_message_has_one_result(name: str, scratch: Path) -> None:
    root = scratch / "store"
    every = list(pipes.deaths(pipes.Story.of(name, root), root, stride=10))
    chosen = random.Random(name).sample(every, 25)
    assert any(death.power_cut for death in chosen)
    found = [(death.label, str(verdict)) for death in chosen if not (verdict := pipes.judge(death, root)).ok]
    assert found == []


def test_a_result_too_many_is_noticed(scratch: Path) -> None:
    verdict = pipes.Verdict()
    pipes.note_results(verdict, pipes.Counter({b"0": 2}), 2)
    assert (len(verdict.lost), len(verdict.duplicated)) == (1, 1)
