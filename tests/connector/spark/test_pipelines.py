"""A declarative pipeline whose sink is a store: `create_sink(format="messagestore")`, run by Spark's own program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spark_runs
from spark_runs import ROOT, bodies, fill

pytest.importorskip("pyspark.pipelines")
pytest.importorskip("yaml", reason="Spark reads the pipeline's definition with PyYAML (extra `pipelines` of pyspark)")


def block_of_the_readme() -> str:
    """The flow that connector/README.md shows."""
    text = (ROOT / "connector" / "README.md").read_text(encoding="utf-8")
    found = [
        code for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if "create_sink" in code
    ]
    assert len(found) == 1
    return found[0]


def run(folder: Path) -> None:
    program = Path(sys.executable).with_name("spark-pipelines")
    done = subprocess.run(
        [str(program), "run", "--spec", str(folder / "spark-pipeline.yml")],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        cwd=folder,
        env={**os.environ, **spark_runs.environment()},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_pipeline_writes_each_message_once(tmp_path: Path, connect_port: None) -> None:
    """The second run continues at the pipeline's checkpoint, and writes only what is new."""
    root = str(tmp_path / "store")
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "copy.py").write_text(block_of_the_readme().replace("/data/store", root))
    (tmp_path / "spark-pipeline.yml").write_text(
        f"name: copies\nstorage: file://{tmp_path}/storage\nlibraries:\n  - glob:\n      include: flows/**\n"
    )
    for first, count in ((0, 500), (500, 100)):
        fill(root, count, first=first)
        run(tmp_path)
        assert bodies(root, "flights-copy") == bodies(root, "flights")
