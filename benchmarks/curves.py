"""How the store scales, one axis at a time: rows of a batch, bodies, queues, batches in the journal, size, readers.

Each axis is a figure: a picture, and its numbers in `curves.json`. `--publish DIR` writes both, and a page with all
pictures, into a folder of the project. Without Spark: a batch is staged and committed as the sink does it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import machine, one_reader, store_journal
from benchmarks.measure import Floors, Rounds, Settings, settle, timed
from benchmarks.messages import QUEUE_COUNT, TOPIC, sliced, table
from benchmarks.store_append import commit, stage
from benchmarks.store_read import FOUR
from messagestore import BatchRequest, MessageColumns, MessageStore, StoreConfig
from messagestore.read_only_store import CHUNK_ROWS
from messagestore.session import attached_store

_GIB = 1 << 30
_SMALL = 100_000
_ALL_FILES = 1.25
"""The size of a store, with its queues and index, by the size of its log."""
RECORD_SIZE = 224
"""The approximate size of the record of a message of `benchmarks.messages`, in bytes."""


@dataclass
class Curve:
    """One axis, and what was measured along it.

    Parameters
    ----------
    title, x, y : str
        What the picture says.
    x_values : list of float
    series : dict
        Values by name, one for each of `x_values`.
    notes : str
        What was done, and what was not.
    """

    title: str
    x: str
    y: str
    x_values: list[float] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    notes: str = ""

    def add(self, x: float, **values: float) -> None:
        """Add the values at one place of the axis."""
        self.x_values.append(x)
        for name, value in values.items():
            self.series.setdefault(name.replace("_", " "), []).append(float(f"{value:.4g}"))


def _settle(settings: Settings) -> None:
    """Write what earlier figures left; a quick run only shows that everything runs."""
    if not settings.quick:
        settle(settings.folder)


def median_of(rounds: int, once: Callable[[int], float]) -> float:
    """The median of several rounds, after one that does not count."""
    return statistics.median([once(number) for number in range(rounds + 1)][1:])


def rows(settings: Settings) -> Curve:
    """Rows of a micro-batch: staged by two tasks, and committed."""
    curve = Curve(
        "Rows of a micro-batch", "rows", "rows/s", notes="Staged by two tasks and committed, SYNC_FLUSH, index on."
    )
    for count in (10**power for power in range(1, 5 if settings.quick else 8)):
        batch, root = table(count), settings.folder / f"rows-{count}"
        config = StoreConfig()
        floors = Floors(settings.folder, RECORD_SIZE * count)

        def once(number: int, batch: pa.RecordBatch = batch, root: Path = root, config: StoreConfig = config) -> float:
            _settle(settings)
            staged, files = timed(stage, root, config, batch)
            committed, _ = timed(commit, root, config, files, number)
            return staged.wall_s + committed.wall_s

        taken = median_of(settings.rounds, once)
        written = [floors.fdatasync().wall_s for _ in range(settings.rounds)]
        curve.add(count, staged_and_committed=count / taken, written_and_synced_once=count / statistics.median(written))
        attached_store(root).detach()
        shutil.rmtree(root)
    return curve


def bodies(settings: Settings) -> Curve:
    """Sizes of a body: appended until visible, and read."""
    size_of_all = (16 << 20) if settings.quick else (256 << 20)
    curve = Curve(
        "Size of a body",
        "bytes",
        "MB of bodies/s",
        notes=f"As many rows as have {size_of_all >> 20} MiB of bodies, and {settings.rows:,} at most. SYNC_FLUSH.",
    )
    for size in (16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10):
        count = min(settings.rows, size_of_all // size)
        root, batch = settings.folder / f"bodies-{size}", _with_bodies(table(count), size)
        appended, read = _append_and_read(root, batch, settings, 8)
        megabytes = count * size / 1e6
        curve.add(size, appended=megabytes / appended, read=megabytes / read)
    return curve


def queues(settings: Settings) -> Curve:
    """Numbers of queues: appended until visible, and read queue by queue."""
    curve = Curve(
        "Queues", "queues", "rows/s", notes=f"{settings.rows:,} rows go to all queues in turn. SYNC_FLUSH, index on."
    )
    for count in (1, 10, 100, 1_000) if settings.quick else (1, 10, 100, 1_000, 10_000):
        root, batch = settings.folder / f"queues-{count}", table(settings.rows, count)
        appended, read = _append_and_read(root, batch, settings, count)
        curve.add(count, appended=settings.rows / appended, read=settings.rows / read)
    return curve


def _append_and_read(root: Path, batch: pa.RecordBatch, settings: Settings, queue_count: int) -> tuple[float, float]:
    """The seconds for a batch until it is visible, and for reading one batch back, four columns."""
    with MessageStore.open(root) as store:

        def append(number: int) -> float:
            _settle(settings)
            return timed(_append, store, batch, number, queue_count)[0].wall_s

        appended = median_of(settings.rounds, append)
        share = batch.num_rows // queue_count

        def read(_: int) -> float:
            return timed(_read, store, queue_count, share)[0].wall_s

        taken = median_of(settings.rounds, read)
    shutil.rmtree(root)
    return appended, taken


def _append(store: MessageStore, batch: pa.RecordBatch, version: int, queue_count: int = 8, app: str = "bench") -> None:
    parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(batch, CHUNK_ROWS))
    store.append_batch(parts, BatchRequest(app_id=app, version=version, write_queue_nums=queue_count))


def _read(store: MessageStore, queue_count: int, share: int) -> int:
    count = 0
    for queue_id in range(queue_count):
        for found in store.read(TOPIC, queue_id, 0, share, columns=FOUR):
            count += found.num_rows
    if count < share * queue_count:
        raise AssertionError(f"read {count} messages of {share * queue_count}")
    return count


def _with_bodies(batch: pa.RecordBatch, size: int) -> pa.RecordBatch:
    count = batch.num_rows
    data = np.random.default_rng(4).integers(0, 256, count * size, np.uint8)
    offsets = np.arange(count + 1, dtype=np.int32) * size
    body = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return batch.set_column(0, "body", body)


def journal(settings: Settings) -> Curve:
    """Numbers of batches in the journal: open, commit ten rows, open read-only."""
    curve = Curve(
        "Batches in the journal",
        "batches",
        "ms of CPU",
        notes="All entries are kept (`journalRetention` above their number); the default limits what they cost.",
    )
    config = store_journal.SIZES.replace(journal_retention=store_journal.ALL)

    for count in (1, 10, 100, 1_000) if settings.quick else (1, 10, 100, 1_000, 10_000, 100_000):
        root, found = settings.folder / f"journal-{count}", Rounds()
        store_journal.make_journal(root, count)
        store_journal.rounds_of(root, "x", config, settings, found)

        curve.add(
            count,
            open=statistics.median(found.values["x.open"]),
            commit_of_ten_rows=statistics.median(found.values["x.commit"]),
            open_read_only=statistics.median(found.values["x.read_only"]),
        )
        shutil.rmtree(root)
    return curve


def size(settings: Settings) -> Curve:
    """Sizes of a store: open, the first batch, and recovery after a kill."""
    free = shutil.disk_usage(settings.folder).free
    wanted = [0.0625, 0.125] if settings.quick else [1, 2, 5, 10, 20, 50]
    sizes = [each for each in wanted if each * _GIB * _ALL_FILES <= free]
    curve = Curve("Size of the store", "GiB", "s")
    curve.notes = (
        f"Until {sizes[-1] if sizes else 0:g} GiB; {free / _GIB:.0f} GiB of the disk are free. The first batch has "
        f"{min(settings.rows, _SMALL):,} rows. The recovery follows a kill with two such batches above the clean end."
    )
    batch, small = table(settings.rows), table(min(settings.rows, _SMALL))
    root, version = settings.folder / "size", 0
    for wished in sizes:
        with MessageStore.open(root) as store:
            while _log_size(root) < wished * _GIB:
                _append(store, batch, version)
                version += 1
        figures: dict[str, list[float]] = {"open": [], "first_batch": [], "recovery_after_a_kill": []}
        for _ in range(settings.rounds):
            _settle(settings)
            opened, store = timed(MessageStore.open, root)
            appended, _ = timed(_append, store, small, version)
            wanted = store.max_offset(TOPIC, 0) + 2 * -(-small.num_rows // QUEUE_COUNT)
            store.close()
            _killed(root, small, version + 1)
            recovered, store = timed(MessageStore.open, root)
            if store.max_offset(TOPIC, 0) != wanted:  # a process that failed would be measured as one that was killed
                raise AssertionError(f"{root}: the process that was to be killed did not append its batches")
            store.close()
            version += 3
            for name, taken in zip(figures, (opened, appended, recovered), strict=True):
                figures[name].append(taken.wall_s)
        curve.add(wished, **{name: statistics.median(values) for name, values in figures.items()})
    shutil.rmtree(root, ignore_errors=True)
    return curve


def _log_size(root: Path) -> int:
    """What the segments hold, to a segment."""
    return (
        sum(file.stat().st_blocks * 512 for file in (root / "commitlog").iterdir())
        if (root / "commitlog").exists()
        else 0
    )


def _killed(root: Path, batch: pa.RecordBatch, version: int) -> None:
    """Let a process append two batches, and kill it."""
    pid = os.fork()
    if not pid:
        try:
            store = MessageStore.open(root, StoreConfig(clean_interval="1h"))
            _append(store, batch, version)
            _append(store, batch, version + 1)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def readers(settings: Settings) -> Curve:
    """Numbers of processes that read the same store at once."""
    curve = Curve("Readers at once", "processes", "rows/s, all together", notes="Four columns, from the page cache.")
    root = settings.folder / "readers"
    with MessageStore.open(root) as store:
        _append(store, table(settings.rows), 0)
    for count in (1, 2) if settings.quick else (1, 2, 3, 4, 6, 8):
        taken = median_of(settings.rounds, lambda _, count=count: _read_at_once(root, count, settings.rows))  # type: ignore[misc]
        curve.add(count, read=count * settings.rows / taken)
    curve.notes += f" {settings.rows:,} rows each, {os.cpu_count()} cores."
    return curve


def _read_at_once(root: Path, count: int, expected: int) -> float:
    """The seconds of the slowest of several readers that begin together."""
    command = [sys.executable, "-m", one_reader.__name__, str(root)]
    processes = [
        subprocess.Popen(command, cwd=machine.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]

    try:
        # Whoever is ready says so, and then all begin together.
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate()[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()

    if any(int(answer[0]) != expected for answer in answers):
        raise AssertionError(f"readers found {answers}, {expected} messages are there")
    return max(float(answer[1]) for answer in answers)


AXES: dict[str, Callable[[Settings], Curve]] = {
    "rows": rows,
    "bodies": bodies,
    "queues": queues,
    "journal": journal,
    "size": size,
    "readers": readers,
}


def run(name: str, settings: Settings) -> None:
    """Measure one axis, print its numbers, and draw its picture; `settings.publish` is the folder for both."""
    curve = AXES[name](settings)
    print(f"\n{curve.title} ({curve.y}). {curve.notes}", file=sys.stderr)
    for at, x in enumerate(curve.x_values):
        words = "  ".join(f"{label}: {values[at]:,.4g}" for label, values in curve.series.items())
        print(f"  {x:>12,g} {curve.x:<10} {words}", file=sys.stderr)
    print(json.dumps({"axis": name, **asdict(curve)}), flush=True)
    folder = Path(settings.publish) if settings.publish else settings.folder / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    draw(curve, folder / f"{name}.svg")
    publish(name, curve, settings, folder)


def draw(curve: Curve, path: Path) -> None:
    """Draw an axis; both scales are logarithmic. The same numbers make the same file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "curves",
        "font.size": 9,
        "font.family": "sans-serif",
    }
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.6, 2.8), layout="constrained")
    for label, values in curve.series.items():
        axes.plot(curve.x_values, values, marker="o", markersize=3, linewidth=1.2, label=label)
    axes.set(xscale="log", yscale="log", xlabel=curve.x, ylabel=curve.y, title=curve.title)
    axes.grid(visible=True, which="major", linewidth=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def publish(name: str, curve: Curve, settings: Settings, folder: Path) -> None:
    """Add an axis to `curves.json`, and write the page again; axes of earlier runs stay."""
    path = folder / "curves.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    facts = machine.facts(settings.folder, ("pyarrow", "numpy"))
    found[name] = {**asdict(curve), "machine": facts, "rounds": settings.rounds}
    found = {axis: found[axis] for axis in AXES if axis in found}
    path.write_text(json.dumps(found, indent=1) + "\n")
    (folder / "README.md").write_text(page(found))


def page(found: dict[str, Any]) -> str:
    """A page with the pictures and their numbers."""
    lines = [
        "# How the store scales",
        "",
        "One axis at a time, everything else as in [the benchmarks](../../benchmarks/README.md): bodies of 100 bytes,",
        "one key, 8 queues, without Spark. Made by `python -m benchmarks curves --publish docs/curves`; the numbers",
        "are in [curves.json](curves.json).",
    ]

    for name, curve in found.items():
        lines += ["", f"## {curve['title']}", "", f"![{curve['title']}]({name}.svg)", ""]
        series, unit = curve["series"], curve["y"]
        table_ = [[curve["x"], *(f"{label}, {unit}" for label in series)], ["--:"] * (len(series) + 1)]
        for at, x in enumerate(curve["x_values"]):
            table_.append([f"{x:,g}", *(f"{values[at]:,.4g}" for values in series.values())])
        lines += [f"| {' | '.join(cells)} |" for cells in table_]

        facts = curve["machine"]
        words = (
            f"{facts['processor']}, {facts['file system']}, commit {facts['commit']}, load {facts['load at the start']}"
        )
        lines += ["", f"{curve['notes']} Medians of {curve['rounds']} rounds. {words}."]

    return "\n".join(lines) + "\n"
