"""What CONTRIBUTING shows about options and commands works as it stands, in a copy of the connector."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from messagestore import Message, MessageStore
from readme_blocks import README

ROOT = README.parent
GIVEN = {"path": "/data/store", "subscribe": "flights", "firstRows": "5"}


@pytest.fixture
def connector(tmp_path: Path) -> Path:
    copy = tmp_path / "pyspark_messagestore"
    shutil.copytree(ROOT / "connector" / "pyspark_messagestore", copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def shown(title: str) -> str:
    """The block of code below a title of CONTRIBUTING.md."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    block = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1]


def printed(connector: Path, *arguments: str) -> str:
    """What Python prints that finds the copy first."""
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(connector.parent), "COLUMNS": "100"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_option_is_one_line(connector: Path) -> None:
    """With the line, it is parsed, refused where it does not belong, suggested, and in the documents."""
    file = connector / "options" / "source_options.py"
    before, found, behind = file.read_text(encoding="utf-8").partition("\n    def config(self)")
    assert found
    file.write_text(f"{before}{shown('Add an option')}{found}{behind}", encoding="utf-8")
    program = f"""
from messagestore import ConfigError
from pyspark_messagestore.options import table

def refused(call, *given):
    try:
        call(*given)
    except ConfigError as error:
        print(error)

given = {GIVEN}
print(table.__file__)
print(table.source_options(given).first_rows)
refused(table.source_options(given).check_stream)
refused(table.source_options, {{**given, "firstRows": "0"}})
refused(table.check_names, {{"fistRows": "1"}})
print(*(line for line in table.table("source").splitlines() if "firstRows" in line))
"""
    where, *lines = printed(connector, "-c", program).splitlines()
    assert where == str(connector / "options" / "table.py")
    assert lines == [
        "5",
        "option firstRows: is for batch reads, but this is a stream; leave it out",
        f"option firstRows: found '0'; allowed is a whole number from 1 to {(1 << 63) - 1}",
        "option fistRows: no such option. Did you mean firstRows?",
        "| `firstRows` | none | The most rows of a read. Batch reads only. |",
    ]


def test_a_command_is_one_file(connector: Path, tmp_path: Path) -> None:
    """With the file, it is in the help at its place, and runs."""
    (connector / "cli" / "commands" / "count.py").write_text(shown("Add a command"), encoding="utf-8")
    with MessageStore.open(tmp_path / "store") as store:
        for body in (b"one", b"two", b"three"):
            store.put_message(Message("t", body))
    program = ("-m", "pyspark_messagestore.cli.main")
    assert re.search(
        r" offsets .*\n.* count +Show how many messages a store holds\. .*\n.* groups ",
        printed(connector, *program, "--help"),
    )
    assert "Show how many messages a store holds." in printed(connector, *program, "count", "--help")
    assert printed(connector, *program, "count", str(tmp_path / "store")) == "3 messages\n"
    assert printed(connector, *program, "count", str(tmp_path / "store"), "--json") == '{"messages": 3}\n'
