"""The notebook of the examples, run from top to bottom as its reader runs it."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import spark_runs

NOTEBOOK = spark_runs.ROOT / "examples" / "10_notebook" / "flights.ipynb"


def printed(cell: dict[str, Any]) -> str:
    """What a cell prints, without the table of places in queues, which depends on the order of Spark's tasks."""
    text = "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")
    return re.sub(r"\| +\d+\| +\d+\|[A-Z]{3}\|", "", text)


def pictures(cell: dict[str, Any]) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_runs_and_shows_what_it_says(tmp_path, monkeypatch) -> None:
    """What it prints is what is kept in it, with as many pictures: `make notebook` keeps what another version prints."""
    for name, value in spark_runs.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = [(printed(cell), pictures(cell)) for cell in notebook.cells if cell.cell_type == "code"]
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    found = [(printed(cell), pictures(cell)) for cell in notebook.cells if cell.cell_type == "code"]
    assert found == kept

    said = "".join(text for text, _ in found)
    assert sum(count for _, count in found) == 3
    for expected in (
        "27004 flights on 31 days",
        "27004 flights in 8 micro-batches",
        "\n0 micro-batches",
        "31 flights of Hawaiian Airlines",
        "27004 flights counted",
        "flights-EWR 9893 messages in 4 queues",
        "messages of plane N14228",
    ):
        assert expected in said, said
    assert not list(tmp_path.glob("flights-*")), "the last cell deletes what the others made"
