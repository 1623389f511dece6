"""The fault map in faults/README.md and the attacks in docs/commit-protocol.md name tests and cases that exist."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from crash import runner

TESTS = Path(__file__).resolve().parent.parent
FAULTS = TESTS.parent / "faults"
MAP = FAULTS / "README.md"
ROW_COUNTS = {"C": 22, "D": 24, "E": 22, "L": 21, "S": 25, "H": 18}
ATTACKS = TESTS.parent / "docs" / "commit-protocol.md"
ATTACK_COUNT = 45
ALSO = {
    "images": ["workloads", "judge", "backups"],
    "errors": ["faults", "workloads", "interrupts", "dead_disks", "many_queues"],
    "power": ["kills", "retentions"],
    "fuzz": ["flips", "strangers", "sessions", "clocks", "renumbered", "broker_logs", "group_settings"],
    "concurrency": ["brokers", "retentions"],
    "mutants": [path.stem for path in (FAULTS / "crash").glob("mutants_*.py")],
}
"""Modules beside its own that a mode of `make crash` takes its cases from."""


def table(text: str) -> dict[str, str]:
    """First cell -> last cell."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[-1] for cells in rows if cells[0] not in ("Row", "No.") and "---" not in cells[0]}


@lru_cache
def names_in(path: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


@lru_cache
def text_of(mode: str) -> str:
    """The code of a mode: kinds, workloads and places are literals in it."""
    package, _, module = {each.name: each.module for each in runner.MODES}[mode].partition(".")
    paths = (FAULTS / package).glob("*.py") if not module else [FAULTS / package / f"{module}.py"]
    more = [FAULTS / "crash" / f"{name}.py" for name in ALSO.get(mode, [])]
    return "\n".join(path.read_text(encoding="utf-8") for path in [*paths, *more])


def missing(reference: str) -> bool:
    """Whether a test, or a case of a mode, is not there."""
    path, _, name = reference.partition("::")
    if name:
        return not (TESTS / path).exists() or name not in names_in(TESTS / path)
    mode, _, words = reference.partition(": ")
    return mode not in {each.name for each in runner.MODES} or words not in text_of(mode)


ROWS = table(MAP.read_text(encoding="utf-8").partition("# The fault map\n")[2])


def test_no_row_is_missing() -> None:
    wanted = [f"{part}{number:02d}" for part, count in ROW_COUNTS.items() for number in range(1, count + 1)]
    assert list(ROWS) == wanted
    assert len(wanted) == 132


@pytest.mark.parametrize("part", ROW_COUNTS)
def test_what_the_map_names_is_there(part: str) -> None:
    """A test that was renamed, or a workload that is gone, would leave a fault that nobody injects."""
    for row, where in ROWS.items():
        if row[0] == part:
            references = re.findall(r"`([^`]+)`", where)
            assert references or "does not apply" in where, f"{row}: nothing injects it"
            assert [reference for reference in references if missing(reference)] == [], row


def test_each_attack_on_the_protocol_has_its_tests() -> None:
    _, *attacks = ATTACKS.read_text(encoding="utf-8").split("\n### ")
    assert len(attacks) >= ATTACK_COUNT
    for attack in attacks:
        title, _, text = attack.partition("\n")
        named = text.partition("\nTests: ")[2].partition("\n\n")[0]
        references = re.findall(r"`([^`]+)`", " ".join(named.split()))
        assert any("::" in reference for reference in references), title
        assert [reference for reference in references if missing(reference)] == [], title


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert missing("crash/test_fault_map.py::test_nothing")
    assert missing("crash/no_such_file.py::test_nothing")
    assert missing("images: no such workload")
    assert missing("no such mode: batches")
    assert not missing("crash/test_fault_map.py::test_no_row_is_missing")
    assert not missing("images: roll-over by puts")
