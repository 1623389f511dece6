"""Runs the notebook of the examples, and keeps in it what its cells print and draw: `make notebook`.

A reader of the repository and of the site sees the pictures without running it. A test compares what is kept with what
a run prints (`tests/connector/spark/test_notebook.py`). What is written to stderr is not kept.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "10_notebook" / "flights.ipynb"


def main() -> None:
    """Run all cells, and write the notebook anew."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()

    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of this run
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}  # not the version of this Python
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
