"""FORMAT.md says what layout.py says."""

from __future__ import annotations

import re
from pathlib import Path

from messagestore.format import layout

ROOT = Path(__file__).parents[2]
FORMAT = ROOT / "store" / "FORMAT.md"


def test_tables_are_up_to_date() -> None:
    """`make docs` would change nothing."""
    text = FORMAT.read_text(encoding="utf-8")
    assert layout.refreshed(text) == text


def test_every_layout_is_described() -> None:
    """No structure on disk without its table."""
    text = FORMAT.read_text(encoding="utf-8")
    for one in layout.ALL:
        assert f"**{one.name}**" in text


def test_each_proof_is_there() -> None:
    """Every test that FORMAT.md names as proof exists, and no structure is without one."""
    text = FORMAT.read_text(encoding="utf-8")
    proofs = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(proofs) > 20
    for path, name in proofs:
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"
    rows = text.partition("## Proven by")[2]
    structures = re.findall(r"^## (?:spark/)?([\w.]+)", text.partition("## Proven by")[0], re.MULTILINE)
    known = {"CommitLog": "BLANK", "writer.lock": "lock"}
    assert [name for name in structures if known.get(name, name) not in rows] == []
