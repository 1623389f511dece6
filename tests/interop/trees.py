"""What of a store's files must be equal, byte by byte, and how they differ when they do not."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("commitlog", "consumequeue", "index")
"""What holds messages, or is derived from them."""


def tree(root: Path, *, index_by_order: bool = False) -> dict[str, bytes]:
    """Path -> bytes of each file in RocketMQ's folders.

    With `index_by_order` index files are called by their number: their names are the moments they were made.
    """
    found = {}
    for folder in FOLDERS:
        paths = sorted(path for path in (root / folder).rglob("*") if path.is_file())
        for number, path in enumerate(paths):
            name = f"index/{number}" if folder == "index" and index_by_order else str(path.relative_to(root))
            found[name] = path.read_bytes()
    return found


def difference(one: dict[str, bytes], other: dict[str, bytes]) -> str:
    """The first difference of two trees, or nothing."""
    if one.keys() != other.keys():
        return (
            f"files only in the first: {sorted(one.keys() - other.keys())}, second: {sorted(other.keys() - one.keys())}"
        )
    for name, data in one.items():
        theirs = other[name]
        if data != theirs:
            if len(data) != len(theirs):
                return f"{name}: {len(data)} bytes, {len(theirs)} bytes"
            at = next(i for i, (a, b) in enumerate(zip(data, theirs, strict=True)) if a != b)
            low = max(0, at - 16)
            return f"{name}: byte {at}: {data[low : at + 24].hex()} != {theirs[low : at + 24].hex()}"
    return ""
