"""What the dashboard gives to copy for Spark runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark_messagestore.dashboard.stored import Stored
from pyspark_messagestore.dashboard.taking import copies
from small import filled


def test_a_program_to_copy_finds_the_messages_of_the_page(spark: Any, tmp_path: Path) -> None:
    stored = Stored("s", str(filled(tmp_path / "it's a store", 10)))
    nothing = dict.fromkeys(("tag", "key", "property", "text"), "")
    page = {"topic": "t", "queueId": 1, "start": 2, "count": 2, "filter": nothing, "filtered": False, "until": ""}

    def filtered(**wanted: str) -> dict[str, Any]:
        return page | {"filter": nothing | wanted, "filtered": True}

    for look, found, expected in (
        ("messages", page, [(1, 2), (1, 3)]),
        ("message", {"message": {"topic": "t", "queueId": 0, "queueOffset": 4}}, [(0, 4)]),
        ("recent", page, [(1, number) for number in range(5)]),
        ("recent", page | {"queueId": None}, [(queue, number) for queue in (0, 1) for number in range(5)]),
        ("recent", filtered(text="000003"), [(1, 1)]),
        ("recent", filtered(text="'\\\"%"), []),
        ("recent", filtered(tag="none"), []),
        ("recent", filtered(key="it's"), []),
        ("recent", filtered(property="colour"), []),
        ("recent", filtered(property="colour=red\\"), []),
        ("recent", page | {"until": "-0s"}, [(1, number) for number in range(5)]),
        ("recent", page | {"until": "2001-01-01"}, []),
    ):
        names = {"spark": spark}
        exec(copies(stored, look, found)["Spark"], names)
        rows = names["messages"].select("queueId", "queueOffset").collect()
        assert sorted(map(tuple, rows)) == expected
