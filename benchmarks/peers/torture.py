"""Who loses rows, who doubles them, and who says so: `python -m benchmarks.peers.torture`.

Several sinks of Spark get the same micro-batches, and the same things go wrong for each of them: a driver that dies, a
checkpoint that is rolled back or deleted, a second query. Afterwards each row of the input is counted in the target.

The table has counts and no times, so it is the same on every machine: docs/guides/exactly-once.md publishes it, and a
test makes it again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import machine
from benchmarks.peers import kafka_broker, tools

TARGETS = {
    "ours": "messagestore",
    "ours_app": "messagestore, `txnAppId`",
    "delta": "Delta",
    "delta_app": "Delta, `txnAppId` in foreachBatch",
    "kafka": "Kafka",
    "parquet": "Parquet files",
}
"""The sinks, and how the table calls them."""
NEEDS = {"delta": "delta", "delta_app": "delta", "kafka": "kafka"}
"""The tool (`tools.TOOLS`) that a sink needs."""
STORIES = {
    "killed_in_a_task": "the driver is killed while tasks write",
    "killed_before_spark_notes": "the driver is killed between the sink's commit and Spark's",
    "other_rows": "the same, and the batch comes again with other rows",
    "rolled_back": "the checkpoint is rolled back",
    "rolled_back_cut_otherwise": "the checkpoint is rolled back, and batches have other limits",
    "new_checkpoint": "the checkpoint is deleted",
    "new_checkpoint_cut_otherwise": "the checkpoint is deleted, and batches have other limits",
    "two_queries": "a second query with its own rows has the same target",
    "older_target": "the target is restored from an older backup",
}
"""What goes wrong, and how the table says it."""


def main() -> int:
    """Run all stories and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.torture", description=__doc__)
    parser.add_argument("--offline", action="store_true", help="download nothing; who needs it is left out")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON instead of the table")
    parser.add_argument("--folder", type=Path, help="where data are made, and removed; default: the system's")
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    tool = tools.prepare(offline=arguments.offline, names=("kafka", "delta"))
    if "spark" in tool.missing:
        print(f"Spark cannot run: {tool.missing['spark']}", file=sys.stderr)
        return 1

    left_out = {name: tool.missing[need] for name, need in NEEDS.items() if need in tool.missing}
    for name, reason in left_out.items():
        print(f"==> without {TARGETS[name]}: {reason}", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="messagestore-torture-", dir=arguments.folder) as made:
        found = _stories(Path(made), tool, [name for name in TARGETS if name not in left_out])
    print(json.dumps(found) if arguments.json else table(found))
    return 0


def _stories(folder: Path, tool: tools.Tools, targets: list[str]) -> dict[str, dict[str, str]]:
    plan = {"folder": str(folder / "data"), "targets": targets, "classpaths": tool.classpaths, "servers": ""}
    told, answered = folder / "plan.json", folder / "found.json"

    with _broker(folder, tool, targets) as servers:
        told.write_text(json.dumps({**plan, "servers": servers}))
        for part in ("killed", "all"):
            command = [tool.python, "-m", "benchmarks.peers.torture_stories", part, str(told), str(answered)]
            process = subprocess.Popen(command, cwd=machine.ROOT, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})

            try:
                status = process.wait()
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            if status != (-signal.SIGKILL if part == "killed" else 0):
                raise SystemExit(f"the stories ended with {status}; what they said is above")

    found: dict[str, dict[str, str]] = json.loads(answered.read_text())
    return found


@contextmanager
def _broker(folder: Path, tool: tools.Tools, targets: list[str]) -> Iterator[str]:
    if "kafka" not in targets:
        yield ""
        return
    with kafka_broker.running(tool.classpaths["broker"], folder / "broker") as broker:
        yield broker.servers


def table(found: dict[str, dict[str, str]]) -> str:
    """What was found, as Markdown: by story, by target."""
    targets = [name for name in TARGETS if name in next(iter(found.values()))]
    lines = [f"| | {' | '.join(TARGETS[name] for name in targets)} |", "|---" * (len(targets) + 1) + "|"]
    lines += [f"| {words} | {' | '.join(found[story][name] for name in targets)} |" for story, words in STORIES.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
