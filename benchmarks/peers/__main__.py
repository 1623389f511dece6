"""`python -m benchmarks.peers`, or `make bench-peers`: the whole race, then the tables."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import benchmarks.peers
from benchmarks import machine
from benchmarks.peers import results, tools
from benchmarks.peers.contestants import BODIES, SPARK_PARTS, STORE_PARTS
from benchmarks.peers.plan import Found, Plan

PARTS = (*SPARK_PARTS, *STORE_PARTS)
RESULTS = Path(__file__).resolve().parent.parent


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=benchmarks.peers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="50 000 rows, one round: does everybody run?")
    parser.add_argument("--rows", type=int, help="rows of a batch (1 000 000; quick: 50 000)")
    parser.add_argument("--rounds", type=int, help="rounds that count (3; quick: 1)")
    parser.add_argument("--batches", type=int, help="micro-batches that count in a query (4; quick: 2)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts")
    parser.add_argument("--bodies", nargs="+", choices=BODIES, default=list(BODIES))
    parser.add_argument("--offline", action="store_true", help="download nothing; who needs it is left out")
    parser.add_argument("--folder", type=Path, help="where data are made, and removed; default: the system's")
    parser.add_argument(
        "--results", type=Path, help="where RESULTS.md and RESULTS.json go (benchmarks; quick: they are only printed)"
    )

    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    quick = arguments.quick
    # `kill` ends the race as an interrupt does: the broker and the JVMs are stopped, the data removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found_tools = tools.prepare(offline=arguments.offline)
    for tool, reason in found_tools.missing.items():
        print(f"==> without {tool}: {reason}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="messagestore-race-", dir=arguments.folder) as made:
        folder = Path(made)
        plan = Plan(
            folder=str(folder / "data"),
            rows=arguments.rows or (50_000 if quick else 1_000_000),
            rounds=arguments.rounds or (1 if quick else 3),
            batches=arguments.batches or (2 if quick else 4),
            puts=100 if quick else 2_000,
            parts=[part for part in PARTS if part in arguments.only],
            bodies=[bodies for bodies in BODIES if bodies in arguments.bodies],
            classpaths=found_tools.classpaths,
            missing=found_tools.missing,
        )
        facts = _facts(folder, found_tools)
        found = Found()
        for name, parts in (("spark_race", SPARK_PARTS), ("store_race", STORE_PARTS)):
            mine = [part for part in plan.parts if part in parts]
            if mine and not (name == "spark_race" and "spark" in plan.missing):
                each = _run(name, plan, mine, folder, found_tools.python)
                found.series |= each.series
                found.failed |= each.failed
    words = sys.argv[1:]
    result = results.document(plan, found, facts, shlex.join(["python", "-m", "benchmarks.peers", *words]))
    print(results.markdown(result))
    if arguments.results or not quick:
        results.write(result, arguments.results or RESULTS)
    for contestant, reason in found.failed.items():
        print(f"==> {contestant} failed: {reason}", file=sys.stderr)
    return 1 if found.failed else 0


def _facts(folder: Path, found: tools.Tools) -> dict[str, str]:
    """The machine and the versions, as the Python of the race has them."""
    program = (
        "import json, sys; from pathlib import Path; from benchmarks import machine;"
        "print(json.dumps(machine.facts(Path(sys.argv[1]), tuple(sys.argv[2:]))))"
    )
    packages = ["pyspark", "pyarrow", "numpy", *(p for tool, p in tools.PACKAGES.items() if tool not in found.missing)]
    command = [found.python, "-c", program, str(folder), *packages]
    said = subprocess.run(command, cwd=machine.ROOT, check=True, capture_output=True, text=True).stdout
    facts: dict[str, str] = json.loads(said)
    return facts | tools.versions(found)


def _run(name: str, plan: Plan, parts: list[str], folder: Path, python: str) -> Found:
    """Run one program of the race to its end."""
    told, answered = folder / f"{name}.plan", folder / f"{name}.found"
    data = folder / name
    data.mkdir()
    Plan(**{**vars(plan), "parts": parts, "folder": str(data)}).write(told)
    process = subprocess.Popen(
        [python, "-m", f"benchmarks.peers.{name}", str(told), str(answered)],
        cwd=machine.ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        if process.wait():
            raise SystemExit(f"{name} ended with {process.returncode}; what it said is above")
    finally:
        if process.poll() is None:
            process.terminate()  # it stops what it has started
            process.wait()
    return Found.read(answered)


if __name__ == "__main__":
    sys.exit(main())
