"""The cost of history: the time to open a store, and to commit, by the number of batches in its journal.

`journalRetention` limits the entries that a store keeps. The figures `kept` have a limit above all entries, and show
the slope; the figures `bounded` have the default limit. A reader reads only the journal's header. The floor is the
store whose journal has one entry.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import Rounds, Settings, timed, title
from benchmarks.messages import TOPIC, table
from messagestore import BatchRequest, MessageColumns, MessageStore, StoreConfig
from messagestore.files.disk import Disk
from messagestore.log.batch_journal import BatchJournal, JournalEntry
from messagestore.log.store_files import Paths

_APPS = 100
ALL = 1_000_000
SIZES = StoreConfig(mapped_file_size_commit_log=64 << 20, max_hash_slot_num=1000, max_index_num=4000)


def run(settings: Settings) -> None:
    """Measure figure 8."""
    title("open, and commit to, a store by the number of batches in its journal (CPU time)")
    rounds = Rounds()
    counts = [0, 1_000, 10_000] if settings.quick else [0, 1_000, 10_000, 100_000]
    for count in counts:
        for name, retention in (("kept", ALL), ("bounded", StoreConfig().journal_retention)):
            root = settings.folder / f"{count}-{name}"
            make_journal(root, count)
            rounds_of(root, f"journal.{count}.{name}", SIZES.replace(journal_retention=retention), settings, rounds)

    for count in counts:
        for name in ("kept", "bounded"):
            for figure in ("open", "commit", "read_only"):
                floor = f"journal.0.{name}.{figure}" if count else None
                rounds.report(f"journal.{count}.{name}.{figure}", "ms", floor=floor, lower_is_better=True)

    most = counts[-1]
    for number, first in zip(
        rounds.values[f"journal.{most}.kept.commit"], rounds.values["journal.0.kept.commit"], strict=True
    ):
        rounds.add("journal.slope", 1e6 * (number - first) / most)
    rounds.report("journal.slope", "ns of a commit for each batch kept", lower_is_better=True)


def make_journal(root: Path, count: int) -> None:
    """Create a store with one batch, and add the entries of `count` batches to its journal."""
    with MessageStore.open(root, SIZES) as store:
        _append(store, 0)
    path = Paths(root).journal
    journal = BatchJournal.read(Disk(), path)
    for number in range(count):
        version, app = divmod(number, _APPS)
        journal.remember(f"app-{app}", JournalEntry(version, "spark", f"query-{app}", 0, 0, 1, number, (TOPIC,)))
    Path(path).write_bytes(journal.to_bytes())


def _append(store: MessageStore, version: int) -> None:
    rows = MessageColumns.from_arrow(table(10), topic=TOPIC)
    store.append_batch(rows, BatchRequest("bench", version, "spark", "query"))


def rounds_of(root: Path, name: str, config: StoreConfig, settings: Settings, into: Rounds) -> None:
    for number in range(1, 2 * settings.rounds + 2):
        taken, reader = timed(MessageStore.open_read_only, root, config)
        reader.close()
        opened, store = timed(MessageStore.open, root, config)
        append, _ = timed(_append, store, number)
        closed, _ = timed(store.close)
        if number > 1:
            into.add(f"{name}.read_only", 1000 * taken.cpu_s)
            into.add(f"{name}.open", 1000 * opened.cpu_s)
            into.add(f"{name}.commit", 1000 * (append + closed).cpu_s)
