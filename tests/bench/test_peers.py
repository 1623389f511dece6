"""The race beside other stores: everybody who takes part is in a table, and everybody else is left out aloud."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.peers import results, tools
from benchmarks.peers.contestants import BODIES, CONTESTANTS, PADDED, RANDOM, SPARK_PARTS, STORE_PARTS, Contestant, of
from benchmarks.peers.plan import Found, Plan, key
from benchmarks.peers.rows import table

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = [*SPARK_PARTS, *STORE_PARTS]


def plan(**changes: object) -> Plan:
    given = {"folder": "", "rows": 10, "rounds": 3, "batches": 1, "puts": 1, "parts": PARTS, "bodies": [PADDED]}
    return Plan(**{**given, "classpaths": {}, "missing": {}, **changes})


def measured(told: Plan, *, without: str = "") -> Found:
    """A race in which each contestant is a little faster than the one before it."""
    found, speed = Found(), itertools.count(1)
    for contestant in CONTESTANTS:
        for bodies in told.bodies:
            for _ in range(told.rounds):
                if contestant.name != without:
                    found.add(contestant, bodies, 1000 * next(speed), 1.0, 0.5)
    return found


def race(folder: Path, *arguments: str) -> tuple[dict, str]:
    """A real race that downloads nothing; what it wrote."""
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--offline", "--results", str(folder / "results")]
    done = subprocess.run(
        [*command, "--folder", str(folder), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert [path.name for path in folder.iterdir()] == ["results"], "data were left behind"
    text = (folder / "results" / "RESULTS.md").read_text()
    assert text in done.stdout
    return json.loads((folder / "results" / "RESULTS.json").read_text()), text


def complete(made: dict, text: str, parts: tuple[str, ...]) -> None:
    """Each contestant of these parts is in its table with every kind of bodies, or left out with a reason."""
    figures = {(each["part"], each["name"], each["bodies"]) for each in made["figures"]}
    for contestant in (each for part in parts for each in of(part)):
        name = f"{contestant.part}/{contestant.name}"
        if name in made["left_out"]:
            assert name in text.partition("## Left out")[2]
        else:
            assert all((contestant.part, contestant.name, bodies) in figures for bodies in BODIES), name
            assert f"| {contestant.words} |" in text
    assert all(each["rows_per_s"] > 0 for each in made["figures"])


def test_a_race_without_network_has_our_stores_sqlite_and_the_floors(tmp_path: Path) -> None:
    """What needs a download is left out by name; the rest is measured, and its data are removed."""
    made, text = race(tmp_path, "--rows", "2000", "--only", *STORE_PARTS)
    complete(made, text, STORE_PARTS)
    out = set(made["left_out"])
    assert {"append/java_500", "append/java_10000", "read/java", "put/java_sync_64"} <= out
    assert {each["name"] for each in made["figures"] if each["part"] == "append"} >= {"ours_sync", "sqlite", "memory"}
    assert not {name for name in out if "ours" in name or "sqlite" in name or name.startswith("floors")}
    assert "Parts that were not asked for: sink, source." in text
    assert made["machine"]["commit"] in text


@pytest.mark.slow
@pytest.mark.spark
def test_a_race_without_network_has_spark_with_parquet_beside_ours(tmp_path: Path) -> None:
    """The Spark that is installed runs the floors, Parquet and this project; Kafka and Delta Lake are left out."""
    made, text = race(tmp_path, "--rows", "5000", "--only", *SPARK_PARTS)
    complete(made, text, SPARK_PARTS)
    assert {name.partition("/")[2].partition("_")[0] for name in made["left_out"]} == {"kafka", "delta"}


def test_a_contestant_that_is_lost_is_an_error() -> None:
    """A contestant with no figure and no reason would vanish from the table."""
    told = plan()
    with pytest.raises(AssertionError, match="append/sqlite was neither measured nor left out"):
        results.document(told, measured(told, without="sqlite"), {}, "")


def test_a_contestant_that_fails_is_left_out_with_what_it_said() -> None:
    """The others go on; no round of the failed one is in the result."""
    told, found, rounds = plan(parts=["append"]), Found(), []

    def once(contestant: Contestant) -> tuple[int, float, float]:
        rounds.append(contestant.name)
        if contestant.name == "sqlite" and rounds.count("sqlite") == 2:
            raise OSError("disk I/O error\nand more")
        return 1000, 1.0, 0.1

    found.take_turns(of("append"), PADDED, 3, once)
    made = results.document(told, found, {}, "")
    assert made["left_out"] == {"append/sqlite": "it failed: OSError: disk I/O error"}
    assert "sqlite" not in {each["name"] for each in made["figures"]}
    assert rounds.count("sqlite") == 2 and rounds.count("ours_sync") == 4
    assert "append/sqlite: it failed: OSError: disk I/O error" in results.markdown(made)


def test_the_first_round_warms_up_and_nobody_is_always_first() -> None:
    """Three rounds count of four; the order changes with each."""
    found, order = Found(), []

    def once(contestant: Contestant) -> tuple[int, float, float]:
        order.append(contestant.name)
        return 1, float(len(order)), 0.0

    contestants = of("floors")
    found.take_turns(contestants, PADDED, 3, once)
    assert len(order) == 4 * len(contestants)
    assert {order[at] for at in range(0, len(order), len(contestants))} == {each.name for each in contestants}
    assert [len(series.rates) for series in found.series.values()] == [3, 3, 3]
    assert 1.0 not in found.series[key("floors", PADDED, "memcpy")].rates


def test_ratios_are_of_the_same_round() -> None:
    """A round in which the machine was ten times slower changes no ratio."""
    told, found = plan(parts=["sink"]), Found()
    for contestant in of("sink"):
        for slowness in (1.0, 10.0, 2.0):
            speed = {"dropping": 4000, "ours_index_on": 2000}.get(contestant.name, 1000)
            found.add(contestant, PADDED, speed, slowness, 0.0)
    made = results.document(told, found, {}, "")
    figures = {each["name"]: each for each in made["figures"]}
    assert figures["ours_index_on"]["of_base"] == 0.5
    assert figures["kafka_tuned"]["ours_over_it"] == 2.0
    assert figures["dropping"]["ours_over_it"] is None


def test_what_a_tool_cannot_do_is_named_for_everybody_who_needs_it() -> None:
    """One missing tool leaves out all its contestants, with its reason, and nobody else."""
    told = plan(missing={"kafka": "Maven is not installed"})
    made = results.document(told, measured(told), {}, "")
    assert set(made["left_out"]) == {f"{each.part}/{each.name}" for each in CONTESTANTS if "kafka" in each.needs}
    assert set(made["left_out"].values()) == {"Maven is not installed"}


def test_a_missing_tool_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without Maven, and with a pip that fails, the race still has tools to run with, and reasons that name no place."""
    failing = tmp_path / "bin" / "python3"
    failing.parent.mkdir()
    monkeypatch.setenv("PATH", str(failing.parent))
    monkeypatch.setattr(tools, "HOME", tmp_path / "peers")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    found = tools.prepare(offline=False)
    assert set(found.missing) == set(tools.TOOLS)
    assert found.python == sys.executable
    assert found.missing["kafka"].startswith("pip failed: ")
    assert str(tmp_path) not in "".join(found.missing.values())


@pytest.mark.parametrize("bodies", BODIES)
def test_bodies_have_100_bytes_and_compress_as_their_name_says(bodies: str) -> None:
    """Padded ones are all different, too."""
    import zlib

    found = table(3000, bodies).column("body").to_pylist()
    assert {len(body) for body in found} == {100} and len(set(found)) == 3000
    ratio = len(zlib.compress(b"".join(found))) / 300_000
    assert ratio > 0.99 if bodies == RANDOM else ratio < 0.2
