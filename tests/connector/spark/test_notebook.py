"""The notebook of the examples, run from top to bottom as its reader runs it."""

from __future__ import annotations

import json

import nbformat
import pytest
from nbclient import NotebookClient

import spark_runs

NOTEBOOK = spark_runs.ROOT / "examples" / "10_notebook" / "flights.ipynb"


def test_no_output_is_kept() -> None:
    """What a cell shows is made by whoever runs it, so it cannot become untrue."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_runs_and_shows_what_it_says(tmp_path, monkeypatch) -> None:
    for name, value in spark_runs.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
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
