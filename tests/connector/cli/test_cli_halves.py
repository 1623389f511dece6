"""`messagestore halves`, `half commit` and `half rollback`, as a person types them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_runs import error, lines, objects, run
from messagestore import Message, MessageStore
from small import SMALL


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with two half messages, for queues 0 and 1 of topic orders."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        for queue_id in (0, 1):
            store.half_message(Message("orders", b"%d" % queue_id, queue_id=queue_id), "payments")
    return root


def test_half_messages_are_listed_and_ended(root: Path) -> None:
    """By message id or by UNIQ_KEY. Repeating a command changes nothing, and says the same."""
    first, second = objects(run("halves", root, "--json"))
    assert (first["topic"], first["queueId"], first["producerGroup"], first["checkTimes"]) == (
        "orders",
        0,
        "payments",
        0,
    )
    titles, *rows = lines(run("halves", root))
    assert titles.split()[:2] == ["message", "id"]
    assert [row.split()[0] for row in rows] == [first["messageId"], second["messageId"]]
    for _ in range(2):
        assert lines(run("half", "commit", root, first["uniqueKey"])) == ["committed: orders/0, message 0"]
        assert lines(run("half", "rollback", root, second["messageId"])) == ["rolled back: it was for orders/1"]
    (committed,) = objects(run("half", "commit", root, first["messageId"], "--json"))
    assert (committed["topic"], committed["queueId"], committed["queueOffset"]) == ("orders", 0, 0)
    assert objects(run("half", "rollback", root, second["messageId"], "--json")) == [
        {"rolledBack": second["messageId"]}
    ]
    with MessageStore.open_read_only(root, SMALL) as store:
        assert [store.max_offset("orders", queue_id) for queue_id in (0, 1)] == [1, 0]
        assert store.open_halves() == []
    assert "no open half message" in error("halves", root, code=1)
    assert "no open half message" in error("halves", root, "--json", code=1)


@pytest.mark.parametrize(
    ("verb", "number", "words"),
    [("rollback", 0, "it was committed"), ("commit", 1, "it was rolled back"), ("commit", 2, "no such half message")],
)
def test_what_has_ended_otherwise_is_refused(root: Path, verb: str, number: int, words: str) -> None:
    """In one line, with status 1."""
    ids = [*(half["messageId"] for half in objects(run("halves", root, "--json"))), "0" * 32]
    run("half", "commit", root, ids[0])
    run("half", "rollback", root, ids[1])
    assert words in error("half", verb, root, ids[number], code=1)


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    """And nothing is made there."""
    for command in (["halves", tmp_path / "no"], ["half", "commit", tmp_path / "no", "x"]):
        assert "no" in error(*command, code=2)
    assert list(tmp_path.iterdir()) == []
