"""Where the time of a micro-batch goes: by process, by step, and in bytes.

Two streams of the same rows are profiled: into the store (SYNC_FLUSH), and into a Python sink that drops every row.
What the store costs is the difference. The first batches of a stream are left out. The figures are medians; the steps
by the clock and by CPU time come from different batches (`profiled_sink`).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.measure import Settings

WARM_UP = 3
RESULTS = Path(__file__).parent / "profiles"
SINKS = ("dropping", "messagestore")


def run(settings: Settings) -> None:
    """Profile both sinks, and print the tables; `--publish NAME` also writes them into `benchmarks/profiles`."""
    from benchmarks.spark_streams import MESSAGES, session

    facts = machine.facts(settings.folder, ("pyspark", "pyarrow", "numpy"))
    spark = session()
    from benchmarks.profiled_sink import MODES, ProfiledSink

    spark.dataSource.register(ProfiledSink)
    found: dict[str, Any] = {"rows": settings.rows, "rounds": settings.rounds, "machine": facts, "sinks": {}}
    for name in SINKS:
        folder = settings.folder / f"profile-{name}"
        folder.mkdir()
        rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", settings.rows)
        made = rows.option("numPartitions", 2).load().selectExpr(*MESSAGES).writeStream.format("profiled")
        made = made.option("profiled", name).option("profileFolder", str(folder))
        made = made.option("checkpointLocation", str(folder / "checkpoint"))
        if name == "messagestore":
            made = made.option("topic", "flights")
        _wait(made.start(str(folder / "store")), folder, WARM_UP + len(MODES) * settings.rounds)
        found["sinks"][name] = summary([json.loads(path.read_text()) for path in folder.glob("*.json")], os.getpid())
    spark.stop()
    print(text := markdown(found))
    if settings.publish:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{settings.publish}.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / f"{settings.publish}.md").write_text(text)
        print(f"written: {RESULTS / settings.publish}.md and .json", file=sys.stderr)


def _wait(query: Any, folder: Path, batches: int) -> None:
    """Let a stream run until so many batches are committed."""
    try:
        while len(list(folder.glob("commit-*.json"))) < batches:
            if not query.isActive:
                raise RuntimeError(str(query.exception()))
            time.sleep(0.2)
    finally:
        query.stop()


def summary(calls: list[dict[str, Any]], driver: int) -> dict[str, Any]:
    """The medians of what the calls of one stream left: by process, by step, and the bytes."""
    commits = {call["batch"]: call for call in calls if call["kind"] == "commit"}
    tasks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for call in calls:
        if call["kind"] == "task" and call["rows"]:
            tasks[call["batch"]].append(call)

    kept = [batch for batch in sorted(commits) if batch >= WARM_UP and batch - 1 in commits]
    plain = [batch for batch in kept if commits[batch]["mode"] == "plain"]

    result: dict[str, Any] = {
        "batch_s": _median(commits[batch]["at_s"] - commits[batch - 1]["at_s"] for batch in plain),
        "processes": _by_process([_processes(commits, tasks, batch, driver) for batch in plain]),
        "steps": {},
        "bytes": {},
    }

    for kind in ("task", "commit"):
        of = {batch: tasks[batch] if kind == "task" else [commits[batch]] for batch in kept}

        steps: dict[str, dict[str, float]] = defaultdict(dict)
        for mode in ("wall", "cpu"):
            batches = [of[batch] for batch in kept if commits[batch]["mode"] == mode]
            for name in sorted({name for calls_ in batches for call in calls_ for name in call["steps"]}):
                steps[name][mode] = _median(sum(c["steps"].get(name, 0) for c in calls_) for calls_ in batches)

        whole = {
            name: _median(sum(call[key] for call in of[batch]) for batch in plain)
            for name, key in (("wall", "wall_s"), ("cpu", "thread_s"), ("other_threads", "other_threads_s"))
        }
        whole |= {
            key: _median(sum(call[f"{key}_s"] for call in of[batch]) for batch in plain) for key in ("user", "system")
        }
        result["steps"][kind] = {"whole": whole, "steps": steps}

        names = {name for batch in plain for call in of[batch] for name in call["bytes"]}
        result["bytes"][kind] = {
            name: _median(sum(call["bytes"].get(name, 0) for call in of[batch]) for batch in plain)
            for name in sorted(names)
        }

    return result


def _processes(
    commits: dict[int, Any], tasks: dict[int, list[dict[str, Any]]], batch: int, driver: int
) -> dict[str, dict[str, float]]:
    """What each kind of process used between the commit before and the commit of a batch."""
    after, before = commits[batch]["processes"], commits[batch - 1]["processes"]
    writers = sorted({str(call["pid"]) for call in tasks[batch]})
    names = {pid: f"Python worker {number + 1} (task)" for number, pid in enumerate(writers)}
    names[str(commits[batch]["jvm"])] = "JVM"
    names[str(commits[batch]["pid"])] = "Python worker (commit)"
    names[str(driver)] = "Python of the driver"
    found: dict[str, dict[str, float]] = {}
    for pid, now in after.items():
        past = before.get(pid, dict.fromkeys(now, 0))
        row = found.setdefault(names.get(pid, "other Python processes"), defaultdict(float))
        for key in ("user_s", "system_s", "faults", "read_bytes", "written_bytes"):
            row[key] += now[key] - past[key]
    return found


def _by_process(batches: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    names = sorted({name for batch in batches for name in batch}, key=lambda name: (name != "JVM", name))
    return {
        name: {key: _median(batch.get(name, {}).get(key, 0) for batch in batches) for key in _KEYS} for name in names
    }


_KEYS = ("user_s", "system_s", "faults", "read_bytes", "written_bytes")


def _median(values: Iterable[float]) -> float:
    kept = list(values)
    return statistics.median(kept) if kept else 0.0


def markdown(found: dict[str, Any]) -> str:
    """The tables, as they are published."""
    count = found["rows"]
    lines = [
        f"# Where a micro-batch of {count:,} rows goes",
        "",
        f"Made by `{_command(found)}`: medians of {found['rounds']} batches, after {WARM_UP} that are left out. CPU",
        "time is comparable between runs; the clock says how busy the machine was with other work.",
        "",
        *(f"- {name}: {value}" for name, value in found["machine"].items()),
    ]

    for sink, words in (
        ("messagestore", "Into the store, SYNC_FLUSH"),
        ("dropping", "Into a sink that drops every row"),
    ):
        each = found["sinks"][sink]
        lines += ["", f"## {words}", "", f"A batch took {each['batch_s']:.2f} s, from commit to commit.", ""]
        lines += _processes_table(each["processes"])
        for kind, title in (("task", "The tasks, added up"), ("commit", "The commit")):
            lines += ["", f"### {title}", "", *_steps_table(each["steps"][kind], count)]
            if each["bytes"][kind]:
                sizes = (f"{size / 1e6:,.1f} MB {name}" for name, size in each["bytes"][kind].items())
                lines += ["", f"Bytes: {'; '.join(sizes)}."]

    return "\n".join(lines) + "\n"


def _command(found: dict[str, Any]) -> str:
    return f"python -m benchmarks profile --rows {found['rows']} --rounds {found['rounds']}"


def _processes_table(processes: dict[str, dict[str, float]]) -> list[str]:
    lines = [
        "| process | CPU s | user s | system s | page faults | MB read | MB written |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    total = {key: sum(row[key] for row in processes.values()) for key in _KEYS}
    for name, row in [*processes.items(), ("all", total)]:
        lines.append(
            f"| {name} | {row['user_s'] + row['system_s']:.2f} | {row['user_s']:.2f} | {row['system_s']:.2f} "
            f"| {row['faults']:,.0f} | {row['read_bytes'] / 1e6:,.1f} | {row['written_bytes'] / 1e6:,.1f} |"
        )
    return lines


def _steps_table(found: dict[str, Any], count: int) -> list[str]:
    whole, steps = found["whole"], found["steps"]
    ns: Callable[[float], str] = lambda time_s: f"{1e9 * time_s / count:,.0f}"  # noqa: E731
    lines = ["| step | wall s | CPU s | CPU ns a row |", "|---|--:|--:|--:|"]
    for name, row in sorted(steps.items(), key=lambda item: -item[1].get("cpu", 0)):
        wall, cpu = row.get("wall", 0.0), row.get("cpu", 0.0)
        if max(wall, cpu) >= 0.0005:
            lines.append(f"| {name} | {wall:.3f} | {cpu:.3f} | {ns(cpu)} |")
    lines.append(f"| all, without the profiler | {whole['wall']:.3f} | {whole['cpu']:.3f} | {ns(whole['cpu'])} |")
    lines += ["", f"Of the CPU time, {whole['user']:.3f} s were user and {whole['system']:.3f} s system time."]
    if whole["other_threads"] >= 0.005:
        lines[-1] += f" Other threads of these processes took {whole['other_threads']:.3f} s more."
    return lines
