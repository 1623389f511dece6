"""The tables of bytes: checked when they are built, and equal to RocketMQ's."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from messagestore.format import layout
from messagestore.format.layout import (
    ALL,
    BATCH_UNIT,
    BLANK,
    CHECKPOINT,
    ENDS_ENTRY,
    ENDS_HEADER,
    INDEX_ENTRY,
    INDEX_HEADER,
    JOURNAL_ENTRY,
    JOURNAL_HEADER,
    RECORD_HEAD,
    SENT_HEAD,
    STATE_FLUSHED,
    STATE_SLOT,
    UNIT,
    Layout,
    markdown,
)

FORMATS = {  # written down a second time, from RocketMQ's sources
    RECORD_HEAD.name: ">iiiiiqqiqIiqIiiqi",
    SENT_HEAD.name: ">iiiii",
    BLANK.name: ">ii",
    UNIT.name: ">qiq",
    BATCH_UNIT.name: ">qiqqqhii",
    INDEX_HEADER.name: ">qqqqii",
    INDEX_ENTRY.name: ">iqii",
    CHECKPOINT.name: ">qqqqq",
    STATE_SLOT.name: ">qqqqqiIIIiI",
    STATE_FLUSHED.name: ">qII",
    JOURNAL_HEADER.name: ">qiIqqqqIIII",
    JOURNAL_ENTRY.name: ">qqqqQiiiI",
    ENDS_HEADER.name: ">qiIqqiIqqIqI",
    ENDS_ENTRY.name: ">qqqqiiiI",
}


@pytest.mark.parametrize("table", [*ALL, SENT_HEAD], ids=lambda table: table.name)
def test_a_dtype_is_the_table(table: Layout):
    """Big-endian, packed, as large as the table says, and the same bytes as `struct` makes."""
    form = FORMATS[table.name]
    assert table.dtype.itemsize == table.size == struct.calcsize(form)
    assert list(table.dtype.names or ()) == [f.name for f in table.fields]
    values = tuple(range(1, len(table.fields) + 1))
    assert np.array(values, table.dtype).tobytes() == struct.pack(form, *values)
    for field in table.fields:
        assert table.offset(field.name) == field.offset
        assert table.dtype.fields is not None
        assert table.dtype.fields[field.name][1] == field.offset


def test_every_table_has_its_format_here():
    """A new table is written down twice."""
    tables = {value.name for value in vars(layout).values() if isinstance(value, Layout)}
    assert tables == set(FORMATS) == {table.name for table in (*ALL, SENT_HEAD)}


@pytest.mark.parametrize(
    ("rows", "size", "message"),
    [
        ([(0, "a", "i4", ""), (5, "b", "i4", "")], 9, "t.b: offset 5, but the field before it ends at 4"),
        ([(0, "a", "i4", ""), (3, "b", "i4", "")], 7, "t.b: offset 3, but the field before it ends at 4"),
        ([(1, "a", "i4", "")], 5, "t.a: offset 1, but the field before it ends at 0"),
        ([(0, "a", "i4", "")], 5, "t: fields end at 4, but the size is 5"),
        ([(0, "a", "i8", "")], 4, "t: fields end at 8, but the size is 4"),
    ],
)
def test_a_gap_an_overlap_or_a_wrong_total_is_refused(rows: list, size: int, message: str):
    """At import, not when the first file is damaged."""
    with pytest.raises(ValueError, match=message):
        Layout("t", size, rows)


def test_raw_bytes_are_a_field_too():
    """S8 is eight bytes, whatever is in them."""
    table = Layout("t", 12, [(0, "raw", "S8", ""), (8, "number", "i4", "")])
    assert table.dtype.itemsize == 12
    assert bytes(np.frombuffer(b"\0a\0bcde\0\0\0\0\7", table.dtype)[0]["raw"]) == b"\0a\0bcde\0"


def test_the_magics_are_rocketmqs():
    """Signed, as Java compares them."""
    assert struct.pack(">i", layout.MAGIC_V1).hex() == "daa320a7"
    assert struct.pack(">i", layout.MAGIC_V2).hex() == "daa320ab"
    assert struct.pack(">i", layout.MAGIC_BLANK).hex() == "cbd43194"


def test_the_state_slots_share_no_sector():
    """A torn sector hits one of them; both are in the file."""
    first, second = layout.STATE_SLOT_POSITIONS
    assert first // 512 != second // 512
    size = STATE_SLOT.size + STATE_FLUSHED.size
    assert second % 512 + size <= 512
    assert second + size <= layout.STATE_FILE_SIZE


def test_the_tables_of_the_manual():
    """One row a field, in order."""
    lines = markdown(UNIT).splitlines()
    assert lines[0] == "**ConsumeQueue unit**, 20 bytes"
    assert lines[4].startswith("| 0 | 8 | `physical_offset` |")
    assert len(lines) == 4 + len(UNIT.fields)


def test_a_documents_tables_are_made_anew(tmp_path: Path):
    """`python -m messagestore.format.layout FILE` writes what stands between the marks, and nothing else."""
    document = tmp_path / "FORMAT.md"
    document.write_text(
        "# Title\n<!-- layout: UNIT -->\nold\n<!-- end -->\ntext\n<!-- layout: BLANK -->\n<!-- end -->\n"
    )
    command = [sys.executable, "-W", "ignore", "-m", "messagestore.format.layout", str(document)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert document.read_text() == (
            f"# Title\n<!-- layout: UNIT -->\n{markdown(UNIT)}\n<!-- end -->\ntext\n"
            f"<!-- layout: BLANK -->\n{markdown(BLANK)}\n<!-- end -->\n"
        )
