"""No command and no Spark source shows a part of a log that lacks segments."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from messagestore import CorruptionError, NotAStoreError
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.spi import LOCAL_STORES
from messagestore.spi import STORES as OPENERS
from missing_segments import MISSING, STORES, prepared
from pyspark_messagestore.cli.main import app
from small import SMALL

READING: dict[str, list[str]] = {
    "status": [],
    "topics": [],
    "offsets": [],
    "get": ["t"],
    "tail": [],
    "find": ["--key", "k199"],
    "dump": [],
    "verify": [],
    "gc": [],
    "lag": ["--group", "g"],
    "halves": [],
    "groups": [],
    "copy": ["t,late", "{root}-archive"],
}
"""The commands that read a store, with their arguments behind ROOT."""
OTHERS = {
    "metrics", "put", "recover", "deliver", "doctor", "demo", "topic create", "topic alter", "topic delete", "group create",
    "group alter", "half commit", "half rollback", "batches list", "batches start", "checkpoint show",
    "checkpoint rewind", "serve", "backup take", "backup list", "backup prune", "restore", "config",
    "dashboard", "group reset-offset", "run",
}  # fmt: skip
"""Writers, which refuse the store when they open it, the servers `metrics`, `dashboard`, `serve` and `run`, commands that
show what small files say, and those of backups (`tests/store/backup`).
"""


def _names(command: Any, prefix: str = "") -> set[str]:
    if not hasattr(command, "commands"):
        return {prefix.strip()}
    return {name for key, each in command.commands.items() for name in _names(each, f"{prefix} {key}")}


def test_every_command_is_in_one_of_the_lists() -> None:
    """A new command that reads a store belongs into the matrix."""
    program: Any = typer.main.get_command(app)
    program.list_commands(None)  # commands are imported when they are asked for
    assert _names(program) == set(READING) | OTHERS


@pytest.mark.parametrize("missing", ["all", "the last one", "all but the first"])
@pytest.mark.parametrize("whose", STORES)
def test_no_command_shows_a_part_of_the_log(tmp_path: Path, whose: str, missing: str) -> None:
    """The exit code is 1, and a line says that segments are missing."""
    root = prepared(tmp_path, whose)
    publish_offsets(root, "g", {("t", 0): 50, ("late", 0): 0}, own=True)
    MISSING[missing](root)
    settings = tmp_path / "store.properties"
    settings.write_text(f"maxHashSlotNum={SMALL.max_hash_slot_num}\nmaxIndexNum={SMALL.max_index_num}\n")
    for name, arguments in READING.items():
        config = ["--store-config", str(settings)] if name == "find" else []
        result = CliRunner().invoke(app, [name, str(root), *(text.format(root=root) for text in arguments), *config])
        assert result.exit_code == 1, (name, result.output)
        words = ("segment", "last record of the log", "faults")
        assert any(word in result.output for word in words), (name, result.output)
    try:
        with contextlib.closing(LOCAL_STORES.reader(str(root))) as store:
            assert store.view("figures")[1]
    except CorruptionError as error:
        assert "segment" in str(error) or "last record of the log" in str(error)


@pytest.mark.parametrize("whose", STORES)
def test_spark_shows_no_part_of_the_log(tmp_path: Path, whose: str) -> None:
    """Neither a batch nor a stream, also with `failOnDataLoss=false`."""
    pytest.importorskip("pyspark")

    from pyspark.sql.streaming.datasource import ReadAllAvailable
    from pyspark.sql.types import StructType

    from pyspark_messagestore.options.table import source_options
    from pyspark_messagestore.source.readers import BatchReader, StreamReader
    from pyspark_messagestore.source.schema import Projection

    root = prepared(tmp_path, whose)
    columns = Projection.of(StructType().add("body", "binary"))
    options = {"path": str(root), "subscribe": "t,late", "startingOffsets": "earliest", "failOnDataLoss": "false"}

    def read() -> int:
        batch = BatchReader(source_options(options), columns, OPENERS)
        return sum(len(each) for part in batch.partitions() for each in batch.read(part))

    def stream() -> None:
        reader = StreamReader(source_options(options), columns, OPENERS)
        reader.latestOffset(reader.initialOffset(), ReadAllAvailable())

    assert read() == 205
    MISSING["the last one"](root)
    for look in (read, stream):
        with pytest.raises((CorruptionError, NotAStoreError), match=r"segment|last record of the log"):
            look()
