"""Runs `make crash`: injects faults into stores, judges the results, and counts.

    make crash                                    the quick profile: a part of each mode, some 8 minutes on 2 cores
    make crash-deep SECONDS=3600 SEED=7           all cases of each mode and random ones, for the given time
    make crash ARGS="--only images --seed 7 --case 'roll-over/31'"   repeats one case

The seed says which part of its cases a mode takes (`crash.turns`). Without one, it is the number of the commit, so that the
runs of a few commits take all. Each mode is a module with `run(seconds, seed, quick) -> counts`; modes that can be divided among processes also take
`part` (which, of how many) and `case`. Two more processes run than there are cores: two wait for disks, time-outs and
Spark while the others compute. The last line is computed from the results; any failure ends the run with status 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crash import turns
from crash.counts import Counts, again

_ROOT = Path(__file__).resolve().parents[2]
_MODULES = os.pathsep.join(str(_ROOT / name) for name in ("faults", "tests"))
_JOB_LIMIT_S = 1800.0
_WAITING = 2
"""So many jobs that wait run beside those that compute."""


@dataclass(frozen=True)
class Mode:
    """One kind of fault injection.

    Parameters
    ----------
    name : str
    module : str
        The module that contains `run`.
    parts : int
        The number of jobs into which the quick profile divides it; 0: it takes no `part`.
    share : float
        Its share of the seconds of `make crash-deep`; 0: it counts cases, and not seconds.
    what : str
        What the mode does, for `--help`.
    waits : bool
        It waits for disks, time-outs or Spark for most of its time.
    """

    name: str
    module: str
    parts: int
    share: float
    what: str
    waits: bool = False


MODES = (
    Mode("spark", "spark_faults", 0, 0.2, "random histories of a fake Spark, and kills of a real one", waits=True),
    Mode("images", "crash.images", 4, 0.35, "a kill or a power cut at every operation of every workload, in memory"),
    Mode("power", "crash.power", 1, 0.05, "power cuts of ext4 and XFS on loop devices (needs root)", waits=True),
    Mode("kills", "crash.kills", 1, 0.05, "SIGKILL of writers at any moment, on a real disk"),
    Mode("flips", "crash.flips", 2, 0.1, "flipped bits, and damaged sectors, pages, lengths and files"),
    Mode(
        "replays", "crash.replays", 2, 0.05, "small files damaged, lost or swapped before Spark sends its batches again"
    ),
    Mode("errors", "crash.errors", 2, 0.1, "operation n fails, for every n; full and dead disks; interrupts"),
    Mode("fuzz", "crash.fuzz", 2, 0.1, "hostile bytes, links, owners and clocks"),
    Mode("concurrency", "crash.concurrency", 2, 0.05, "many readers, writers, brokers and streams at once"),
    Mode("deliveries", "crash.deliveries", 2, 0.05, "deliverers of delayed messages die, and a broker takes over"),
    Mode("deletions", "crash.deletions", 1, 0.05, "processes that delete a topic die at every operation"),
    Mode("halves", "crash.halves", 1, 0.05, "transactions interrupted by a kill or a power cut at every operation"),
    Mode("pipes", "crash.pipes", 2, 0.05, "consumers and pipes from topic to topic are killed, stopped and rebalanced"),
    Mode(
        "afar",
        "crash.afar",
        3,
        0.0,
        "faults between Spark and a store on another host, of that host and of drivers",
        waits=True,
    ),
    Mode("model", "crash.model", 2, 0.2, "random histories of everything at once, beside a plain model"),
    Mode("mutants", "crash.mutants", 3, 0.0, "bugs planted in the store, each of which must be found"),
)


@dataclass
class Job:
    """A process that runs one part of one mode."""

    mode: Mode
    arguments: list[str]
    output: Path
    started_s: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": _MODULES, "PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "crash", *self.arguments, "--json", str(self.output)]
        self.started_s = time.monotonic()
        with self.output.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=log, stderr=log)

    def result(self) -> Counts:
        """Return what the job found; a job that did not end correctly is a failure."""
        try:
            return Counts.from_dict(json.loads(self.output.read_text()))
        except (OSError, ValueError):
            counts = Counts()
            said = self.output.with_suffix(".log").read_text(errors="replace")[-1500:]
            assert self.process is not None
            counts.fail(f"ended with status {self.process.returncode}: {said}", f"make crash ARGS='{self.words}'")
            return counts

    @property
    def words(self) -> str:
        return " ".join(self.arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    logger = logging.getLogger("messagestore")
    level = logger.level
    logger.setLevel(logging.ERROR)  # recovery warns of what it cuts, which is expected here
    try:
        return _main(arguments)
    finally:
        logger.setLevel(level)


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m crash",
        description="Injects faults into stores, judges what is left, and counts what was lost, duplicated or misread.\n"
        "The last line is computed from what was found; if anything was found, the status is 1.\n"
        "faults/README.md tells more.",
        epilog="modes:\n" + "\n".join(f"  {mode.name:12} {mode.what}" for mode in MODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    parser.add_argument("--only", metavar="MODES", help="run these modes only, with commas between them; otherwise all")
    parser.add_argument("--case", default="", help="run one case of one mode, by the key that a failure printed")
    parser.add_argument(
        "--seed",
        type=int,
        help="which part of all cases, and everything that is left to chance (default: the number of the commit)",
    )
    parser.add_argument(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="take one in N of the cases of the dearest kinds: all of them come to their turn in N times as many runs",
    )
    parser.add_argument(
        "--changed",
        metavar="COMMIT",
        help="run the mode `mutants` alone, with every planted bug of the files that differ from this commit",
    )
    parser.add_argument(
        "--deep", type=float, metavar="SECONDS", help="choose cases by chance for so long, instead of the quick profile"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(os.cpu_count() or 2, 8) + _WAITING,
        help=f"processes at a time (default: {_WAITING} more than there are cores)",
    )
    parser.add_argument("--part", default="", metavar="I/N", help="run one share of one mode, in this process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to a file")

    options = parser.parse_args(arguments)
    if options.changed:
        if options.only not in (None, "mutants"):
            parser.error(f"--changed works with the mode mutants only, found --only {options.only}")
        options.only = "mutants"
        try:
            turns.changed = turns.changed_since(_ROOT, options.changed)
        except ValueError as error:
            parser.error(f"--changed: {error}")
    modes = [mode for mode in MODES if not options.only or mode.name in options.only.split(",")]
    if not modes or (options.case and len(modes) != 1):
        parser.error(f"--only: found {options.only!r}; the modes are {', '.join(mode.name for mode in MODES)}")

    if options.share < 1:
        parser.error(f"--share: found {options.share}; allowed are 1 and more")
    turns.share = options.share

    if options.seed is None:
        options.seed = turns.of_commit(_ROOT)

    if options.case or options.part or options.json:
        counts = run_here(modes[0], options)
        counts.processor_s = processor_s(resource.RUSAGE_SELF) + processor_s(resource.RUSAGE_CHILDREN)
        if options.json is not None:
            options.json.write_text(json.dumps(counts.to_dict()))
            return 0
        return report({modes[0].name: counts})

    return run_all(modes, options)


def run_here(mode: Mode, options: argparse.Namespace) -> Counts:
    """Run one mode, or a share of it, in this process."""
    module = importlib.import_module(mode.module)
    gc.set_threshold(50_000)  # millions of short-lived objects, and almost no cycles
    quick, seconds = options.deep is None, options.deep or 0.0
    if mode.parts:
        index, _, count = (options.part or "0/1").partition("/")
        result: Counts = module.run(seconds, options.seed, quick, part=(int(index), int(count)), case=options.case)
        return result
    counts = Counts()
    try:
        cases = Counter(module.run(seconds, options.seed, quick))
        counts.notes = [kind for kind in cases if "NOT RUN" in kind]
        counts.cases = Counter({kind: count for kind, count in cases.items() if kind not in counts.notes})
    except AssertionError as error:
        counts.fail(str(error), again(mode.name, options.seed, ""))
    return counts


def run_all(modes: Sequence[Mode], options: argparse.Namespace) -> int:
    """Run all jobs, as many at a time as there are cores; return their report."""
    began_s = time.monotonic()
    total = sum(mode.share for mode in modes) or 1.0
    results = {mode.name: Counts() for mode in modes}

    with tempfile.TemporaryDirectory() as folder:
        waiting = []
        for mode in modes:
            parts = 1 if not mode.parts else mode.parts if options.deep is None else options.jobs
            for part in range(parts):
                arguments = ["--only", mode.name, "--seed", str(options.seed), "--share", str(options.share)]
                arguments += ["--part", f"{part}/{parts}"] if mode.parts else []
                arguments += ["--changed", options.changed] if options.changed else []
                if options.deep is not None:
                    arguments += ["--deep", f"{options.deep * mode.share / total * options.jobs / parts:.0f}"]
                waiting.append(Job(mode, arguments, Path(folder, f"{mode.name}-{part}.json")))

        running: list[Job] = []
        while waiting or running:
            for job in [job for job in running if is_over(job)]:
                running.remove(job)
                found = job.result()
                results[job.mode.name].add(found)
                took_s = time.monotonic() - job.started_s
                print(f"    {job.words}: {took_s:.0f} s, {found.processor_s:.0f} s of processors", flush=True)

            while waiting and len(running) < options.jobs:
                idle = sum(job.mode.waits for job in running) < _WAITING
                job = next((job for job in waiting if job.mode.waits == idle), waiting[0])
                waiting.remove(job)
                running.append(job)
                job.start()
            time.sleep(0.05)

    took_s, used_s = time.monotonic() - began_s, processor_s(resource.RUSAGE_CHILDREN)
    print(f"==> {took_s:.0f} s, {used_s:.0f} s of processors, seed {options.seed}")
    if options.deep is None:
        changed = f" CHANGED={options.changed}" if options.changed else ""
        command = f"make crash SHARE={options.share}{changed} ARGS='--seed {options.seed}'"
        print(f"==> the same again: {command}; other parts of all cases: other seeds")
    return report(results)


def processor_s(whose: int) -> float:
    """Return the seconds of processors of this process, or of its children that have ended."""
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def is_over(job: Job) -> bool:
    """Whether a job has ended; a job that hangs is killed."""
    assert job.process is not None
    if job.process.poll() is None and time.monotonic() - job.started_s > _JOB_LIMIT_S and "--deep" not in job.arguments:
        job.process.kill()
        job.process.wait()
    return job.process.poll() is not None


def report(results: dict[str, Counts]) -> int:
    """Print counts per mode, failures, what could not be done, and the last line."""
    everything = Counts()
    for name, counts in results.items():
        print(f"{name:12} {counts.words}")
        everything.add(counts)
    for failure in everything.failures:
        print(f"FAILED {failure}")
    for note in everything.notes:
        print(f"!!! NOT DONE HERE: {note}")
    done = re.sub(r"\s+", " ", everything.words)
    missing = f" (NOT DONE: {len(everything.notes)}, see above)" if everything.notes else ""
    print(
        f"{done}{missing}: lost {everything.lost}, duplicated {everything.duplicated}, misread {everything.misread}",
        flush=True,
    )
    return 0 if everything.ok else 1
