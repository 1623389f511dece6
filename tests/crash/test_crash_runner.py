"""`make crash` itself: its last line is computed, what is wrong ends it with status 1 and the command that does it again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from crash import concurrency, errors, images, kills, mutants, planting, power, runner
from crash.counts import Counts, again
from crash.harness import no_thread_warnings
from crash.judge import Verdict
from crash.planting import Ground, Mutant, Planted, Search
from messagestore import MessageStore

pytestmark = no_thread_warnings


def test_one_case_again(capfd: pytest.CaptureFixture[str]) -> None:
    """The command that a failure prints."""
    assert runner.main(["--only", "images", "--seed", "3", "--case", "batches/40"]) == 0
    assert capfd.readouterr().out.endswith("1 crash images: lost 0, duplicated 0, misread 0\n")
    assert again("images", 3, "batches/40") == "make crash ARGS='--only images --seed 3 --case batches/40'"


def test_what_is_wrong_is_counted(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Lost, duplicated, misread; the command; status 1."""

    def judged(case: images.Case, _: object) -> tuple[str, Verdict]:
        return case.death.label, Verdict(lost=["put/1/", "put/2/"], duplicated=["put/3/"])

    monkeypatch.setattr(images.Case, "judged", judged)
    assert runner.main(["--only", "images", "--case", "single puts/3"]) == 1
    said = capfd.readouterr().out
    assert "again: make crash ARGS=" in said
    assert said.endswith("1 crash images: lost 2, duplicated 1, misread 0\n")


def test_a_job_that_dies_is_a_failure(tmp_path: Path) -> None:
    """A process that leaves no counts has not found nothing."""
    job = runner.Job(runner.MODES[1], ["--only", "nothing"], tmp_path / "out.json")
    job.start()
    assert job.process is not None
    job.process.wait()
    assert runner.is_over(job)
    assert job.result().misread == 1


def test_counts_travel() -> None:
    """From the process of a job to the runner, and add up."""
    one = Counts(notes=["no XFS"])
    one.take("images", Verdict(), "a", "b")
    one.take("images", Verdict(misread=["x"]), "a", "b")
    two = Counts.from_dict(json.loads(json.dumps(one.to_dict())))
    two.add(one)
    assert (two.cases["images"], two.misread, two.notes, len(two.failures)) == (4, 2, ["no XFS"], 2)


def test_what_cannot_be_done_is_said_loudly(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root there are no power cuts, and the last line says so."""
    monkeypatch.setattr(power.os, "geteuid", lambda: 1000)
    assert runner.main(["--only", "power", "--case", "ext4/0"]) == 0
    said = capfd.readouterr().out
    assert "!!! NOT DONE HERE: power cuts on ext4: needs root" in said
    assert "NOT DONE: 1" in said.splitlines()[-1]


@pytest.mark.parametrize("kind", ["threads/0", "processes/0"])
def test_many_at_once(kind: str) -> None:
    """16 threads on one session; 4 processes in turn."""
    counts = concurrency.run(0.0, 1, True, case=kind)
    assert counts.cases.total() > 50
    assert counts.ok, counts.failures


def test_a_few_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers at once: one wins, the other changes no byte."""
    monkeypatch.setattr(concurrency, "RACES", 10)
    counts = concurrency.run(0.0, 1, True, case="races/0")
    assert counts.cases["races of two writers"] == 10
    assert counts.ok, counts.failures


def test_a_few_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real SIGKILLs, piled up in one store."""
    monkeypatch.setattr(kills, "KILLS_OF_A_STORE", 12)
    counts = kills.run(0.0, 1, True, case="0")
    assert counts.cases["SIGKILLs"] == 12
    assert counts.ok, counts.failures


@pytest.mark.parametrize("case", ["short/7", "nothing written/8", "ulimit"])
def test_a_few_errors(case: str) -> None:
    """Writes in pieces, a write of nothing, 64 descriptors."""
    counts = errors.run(0.0, 1, True, case=case)
    assert counts.cases.total() == 1
    assert counts.ok, counts.failures


@pytest.mark.parametrize(
    "name",
    ["no sync of a batch's head", "a failed sync is tried again"],
)
def test_planted_bugs_are_found(name: str) -> None:
    """Two of the mutants; `make crash` plants all of them."""
    counts = mutants.run(0.0, 1, True, case=name)
    assert counts.cases["mutants caught"] == 1
    assert counts.ok, counts.failures


def searched(monkeypatch: pytest.MonkeyPatch, search: Search, planted: Planted = contextlib.nullcontext) -> str:
    """What `make crash` says of one planted bug."""
    monkeypatch.setattr(mutants, "_passed", {})
    [failure] = mutants.together([Mutant("a bug", planted, "a search", search)]).failures
    return failure


def test_a_search_that_fails_without_the_bug_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ground: Ground) -> Iterator[Verdict]:
        yield Verdict()
        raise AssertionError("the search itself is wrong")

    assert "NOT PROVEN: a bug: its search fails without the bug, too" in searched(monkeypatch, wrong)


def _of_other_arguments() -> None:
    """Take the place of a function that has arguments."""


def test_a_patch_that_does_not_fit_the_code_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a TypeError or an AttributeError, which a search may take for something wrong with a store."""

    def told(ground: Ground) -> Iterator[Verdict]:
        try:
            MessageStore.open(ground.root).close()
            yield Verdict()
        except Exception as error:  # noqa: BLE001 - as the histories of the mode `model` do it
            yield Verdict(misread=[f"{type(error).__name__}: {error}"])

    def raised(ground: Ground) -> Iterator[Verdict]:
        MessageStore.open(ground.root).close()
        yield Verdict()

    def planted() -> AbstractContextManager[object]:
        return mock.patch.object(MessageStore, "open", _of_other_arguments)

    assert "BROKEN: a bug: it was found by an error of the patch or the search" in searched(monkeypatch, told, planted)
    assert "BROKEN: a bug: TypeError" in searched(monkeypatch, raised, planted)


def test_searches_made_by_the_same_call_are_tried_once_without_a_bug() -> None:
    one, same, other = planting.kills("batches"), planting.kills("batches"), planting.kills("single puts")
    assert mutants.identity(one) == mutants.identity(same) != mutants.identity(other)


class Tries:
    """What a search does; its text stays the same, for a search is known by what it was made of."""

    def __init__(self) -> None:
        self.cases: list[int] = []
        self.bug = 0
        """The case that finds the bug that is planted now; 0: none is planted."""

    @contextlib.contextmanager
    def planted(self, found_after: int) -> Iterator[None]:
        self.bug = found_after
        yield
        self.bug = 0


def test_a_search_is_tried_once_for_all_bugs_that_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bug, the longest of the searches is enough."""
    tries = Tries()
    monkeypatch.setattr(mutants, "_passed", {})

    def search(ground: Ground) -> Iterator[Verdict]:
        tries.cases.append(0)
        for case in range(1, 10):
            tries.cases[-1] = case
            yield Verdict(lost=["a message"] if case == tries.bug else [])

    bugs = [Mutant(f"after {n}", partial(tries.planted, n), "a search", search) for n in (2, 5, 3)]
    [same] = mutants.by_search(bugs)
    counts = mutants.together(same)
    assert counts.ok, counts.failures
    assert counts.cases["mutants caught"] == 3
    assert tries.cases == [2, 5, 3, 5]


def test_each_bug_is_in_one_share() -> None:
    shares = mutants.by_search(mutants.MUTANTS)
    assert sorted(mutant.name for share in shares for mutant in share) == sorted(each.name for each in mutants.MUTANTS)
    assert len({mutants.identity(share[0].search) for share in shares}) == len(shares)


def test_a_change_touches_the_bugs_that_are_planted_in_it() -> None:
    names = {mutant.name for mutant in mutants.touched(["store/messagestore/broker/delivery.py"])}
    assert "a delivery holds the progress before it" in names
    assert "no directory sync of the CommitLog" in names, "it is planted below every file of the store"
    assert "the digest leaves out the body" not in names
    assert "the digest leaves out the body" in {mutant.name for mutant in mutants.touched(["store/kernel/encode.c"])}
    assert "masked values are shown" in {
        mutant.name for mutant in mutants.touched(["connector/pyspark_messagestore/dashboard/stored.py"])
    }


def test_few_bugs_are_in_no_file_of_their_own() -> None:
    """Those are searched after every change."""
    assert len(mutants.touched([])) < len(mutants.MUTANTS) // 10


def test_other_modes_do_not_know_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["--changed", "HEAD", "--only", "images"])
    assert "--changed works with the mode mutants only, found --only images" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        runner.main(["--changed", "no-such-commit"])
    assert "git knows no commit 'no-such-commit'" in capsys.readouterr().err


def test_enough_bugs_are_planted() -> None:
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(names) == len(set(names)) >= 25
