"""Executors need neither typer nor rich: only the command line does, and it says so where they are missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        blocked = ("typer", "rich", "click", "shellingham", "prometheus_client", "starlette", "uvicorn")
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_data_source_does_without(tmp_path: Path) -> None:
    """Discovery, the sink for foreachBatch, the listener, a store that is written and read."""
    pytest.importorskip("pyspark")
    done = run(
        "import pyspark_messagestore as p\n"
        "assert p.DefaultSource.name() == 'messagestore'\n"
        "assert p.MessageStoreDataSource.__module__ == 'pyspark_messagestore.datasource'\n"
        "p.MessageStoreSink(sys.argv[1], app_id='a')\n"
        "from messagestore import Message, MessageStore\n"
        "with MessageStore.open(sys.argv[1]) as store: store.put_message(Message('t', b'x', queue_id=0))\n"
        "with MessageStore.open_read_only(sys.argv[1]) as store: print(store.max_offset('t', 0))\n",
        tmp_path / "store",
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_every_module_but_the_command_lines_does_without() -> None:
    """Nothing that Spark's processes import reaches for them."""
    pytest.importorskip("pyspark")
    done = run(
        "import importlib, pkgutil, messagestore, pyspark_messagestore\n"
        "for package in (messagestore, pyspark_messagestore):\n"
        "    for info in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        served = ('cli', 'dashboard', 'monitoring.metrics')\n"
        "        if not info.name.startswith(tuple(f'pyspark_messagestore.{name}' for name in served)):\n"
        "            importlib.import_module(info.name)\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_program_says_what_to_install() -> None:
    done = run("from pyspark_messagestore.command import main\nmain()")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("messagestore: the package typer is not installed")
    assert re.search(r"-m pip install 'rich>=[\d.]+' 'typer>=[\d.]+'`$", line)


def test_the_program_says_at_its_start_that_rich_is_missing() -> None:
    """It is imported when a table is drawn: some commands would run, and others would end half-way."""
    code = "import sys\nsys.modules['rich'] = None\nfrom pyspark_messagestore.command import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("messagestore: the package rich is not installed")


def test_another_missing_package_is_not_taken_for_it() -> None:
    """Without numpy, the advice to install the extra would mislead."""
    code = "import sys\nsys.modules['numpy'] = None\nfrom pyspark_messagestore.command import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in done.stderr
    assert "pyspark-messagestore[cli]" not in done.stderr
