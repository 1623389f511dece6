"""`messagestore demo`: puts messages, follows them, kills the writer, recovers the store, and counts what is there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import pyarrow as pa
import typer

from messagestore import BatchRequest, ConfigError, Message, MessageColumns, MessageStore, StoreConfig
from messagestore.inspect import operator
from messagestore.spi import STORES, Location
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, Json, looking, path_of
from pyspark_messagestore.cli.cursor import Cursor

PLACE = 370
PANEL = "Care"

TOPIC = "flights"
APP = "demo"
BATCH_ROWS = 50
CONFIG = StoreConfig(
    mapped_file_size_commit_log=4 * 1024 * 1024,
    mapped_file_size_consume_queue=20 * 4096,
    max_hash_slot_num=4096,
    max_index_num=16384,
)
"""Files of a few MiB, so that the demo leaves little behind."""
_ACKNOWLEDGED = 600
"""The number of acknowledged messages after which the writer is killed."""
_SHOWN = 3
_PATIENCE_S = 60.0


def demo(
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="Make the store here and keep it. Without it, the store is in a temporary folder and is deleted.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show in a few seconds what a store promises. A process puts messages and batches, and is killed with kill -9 in
    the middle. Then the store is recovered, and every message that was acknowledged is counted.
    """
    with _root(folder) as root:
        counts = _Story(root, quiet=as_json).told()
    if as_json:
        out.json_line(counts)
    if counts["lost"] or counts["duplicated"] or counts["partialBatches"] or counts["faults"]:
        raise typer.Exit(FOUND_NOTHING)


@contextlib.contextmanager
def _root(folder: str | None) -> Iterator[str]:
    if folder is not None:
        path = os.path.abspath(path_of(folder))
        if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
            raise ConfigError(
                f"--folder: {path} exists already. Give a folder that does not exist", key="--folder", value=path
            )
        yield path
        return

    temporary = tempfile.mkdtemp(prefix="messagestore-demo-")
    try:
        yield os.path.join(temporary, "store")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write(root: str) -> None:
    """Put messages and batches until somebody kills this process; one line for each that is acknowledged.

    The numbers of the messages are their bodies: no two are equal.
    """
    number = version = 0
    with MessageStore.open(root, CONFIG) as store:
        store.create_topic(TOPIC, 4)

        while True:
            for _ in range(BATCH_ROWS):
                store.put_message(Message(TOPIC, b"put %d" % number, keys=[f"UA{number % 40}"], tags="UA"))
                os.write(1, b"put %d\n" % number)
                number += 1

            rows = {
                "body": [b"batch %d row %d" % (version, row) for row in range(BATCH_ROWS)],
                "queue_id": pa.array([row % 4 for row in range(BATCH_ROWS)], pa.int32()),
            }
            columns = MessageColumns.from_arrow(pa.record_batch(rows), topic=TOPIC)
            store.append_batch(columns, BatchRequest(APP, version))
            os.write(1, b"batch %d\n" % version)
            version += 1


class _Story:
    """The demo, step by step."""

    def __init__(self, root: str, *, quiet: bool) -> None:
        self.root = root
        self.quiet = quiet
        self.puts: list[bytes] = []
        self.versions: list[int] = []

    def told(self) -> dict[str, Any]:
        """Run all steps and return what was found."""
        began_s = time.monotonic()
        self._say(f"A process puts messages into {out.shown(self.root)}; this is what `messagestore tail` sees:")

        writer = self._started()
        pid = writer.pid
        try:
            self._follow(writer)
        finally:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()

        acknowledged = len(self.puts) + len(self.versions) * BATCH_ROWS
        self._say(
            f"kill -9 {pid}: the process is dead (exit code {writer.returncode}). It had acknowledged "
            f"{len(self.puts):,} messages and {out.count_words(len(self.versions), 'batch')} of {BATCH_ROWS} rows."
        )

        left = operator.status(self.root, looking())["left"]
        self._say(f"`messagestore status` says how the store was left: {left}.")

        with MessageStore.open(self.root, CONFIG) as store:
            report = store.report
        assert report is not None
        cut = "There was nothing to cut off"
        if report.cut:
            cut = f"It cut off what was begun and not acknowledged: {report.cut}"
        self._say(f"`messagestore recover` examined {out.count_words(report.record_count, 'record')}. {cut}.")

        checked = operator.verify(self.root, CONFIG)
        verified = "no fault" if checked.ok else out.count_words(checked.finding_count, "fault")
        self._say(f"`messagestore verify` checked {out.count_words(checked.record_count, 'record')}: {verified}.")

        counts = self._counted()
        self._say(
            f"Of {acknowledged:,} acknowledged messages: lost {counts['lost']}, duplicated {counts['duplicated']}; "
            f"batches in part: {counts['partialBatches']}. It took {time.monotonic() - began_s:.1f} s."
        )

        return {
            "root": self.root,
            "writerPid": pid,
            "exitCode": writer.returncode,
            "acknowledged": acknowledged,
            "left": left,
            "recovered": report.reason,
            "cut": report.cut,
            "faults": checked.finding_count,
            **counts,
        }

    def _say(self, text: str) -> None:
        if not self.quiet:
            out.line(text)

    def _started(self) -> subprocess.Popen[bytes]:
        code = "import sys; from pyspark_messagestore.cli.commands.demo import write; write(sys.argv[1])"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return subprocess.Popen([sys.executable, "-c", code, self.root], stdout=subprocess.PIPE, env=environment)

    def _follow(self, writer: subprocess.Popen[bytes]) -> None:
        """Show the first messages as they arrive, and return when enough of them are acknowledged."""
        reader = threading.Thread(target=self._read, args=(writer,), daemon=True)
        reader.start()

        deadline_s = time.monotonic() + _PATIENCE_S
        shown = 0
        while len(self.puts) + len(self.versions) * BATCH_ROWS < _ACKNOWLEDGED or shown < _SHOWN:
            if writer.poll() is not None or time.monotonic() > deadline_s:
                raise ConfigError(
                    f"demo: the process that writes ended with exit code {writer.poll()}. Run `messagestore doctor`",
                    key="demo",
                )

            if shown < _SHOWN and self.puts:
                with contextlib.closing(STORES.reader(Location(self.root), looking())) as store:
                    cursor = Cursor(store, [TOPIC])
                    for message in list(cursor.once())[shown:_SHOWN]:
                        self._say("  " + out.message_line(message))
                        shown += 1
            time.sleep(0.01)

        os.kill(writer.pid, signal.SIGKILL)
        # The pipe still holds what was acknowledged just before the kill.
        reader.join(_PATIENCE_S)

    def _read(self, writer: subprocess.Popen[bytes]) -> None:
        assert writer.stdout is not None
        for line in writer.stdout:
            self._acknowledge(line)

    def _acknowledge(self, line: bytes) -> None:
        if not line.endswith(b"\n"):
            return  # the process was killed while it wrote the line
        kind, number = line.split()
        if kind == b"put":
            self.puts.append(line.strip())
        else:
            self.versions.append(int(number))

    def _counted(self) -> dict[str, int]:
        """What is in the store, compared with what was acknowledged."""
        bodies: Counter[bytes] = Counter()
        with MessageStore.open_read_only(self.root, CONFIG) as store:
            for queue_id in store.topics().get(TOPIC, []):
                for batch in store.read(TOPIC, queue_id, 0, columns=("body",)):
                    bodies.update(batch.column("body").to_pylist())

        rows = [b"batch %d row %d" % (version, row) for version in self.versions for row in range(BATCH_ROWS)]
        by_version = Counter(body.split()[1] for body in bodies if body.startswith(b"batch"))

        return {
            "messages": sum(bodies.values()),
            "lost": sum(body not in bodies for body in [*self.puts, *rows]),
            "duplicated": sum(count - 1 for count in bodies.values()),
            "partialBatches": sum(count != BATCH_ROWS for count in by_version.values()),
        }
