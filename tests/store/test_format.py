"""FORMAT.md says what layout.py says."""

from __future__ import annotations

from pathlib import Path

from messagestore import layout

FORMAT = Path(__file__).parents[2] / "store" / "FORMAT.md"


def test_tables_are_up_to_date() -> None:
    """`make docs` would change nothing."""
    text = FORMAT.read_text(encoding="utf-8")
    assert layout.refreshed(text) == text


def test_every_layout_is_described() -> None:
    """No structure on disk without its table."""
    text = FORMAT.read_text(encoding="utf-8")
    for one in layout.ALL:
        assert f"**{one.name}**" in text
