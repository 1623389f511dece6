"""What a reader sees is one object for each way in which a store was left, and stays the same while nothing changes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from crash.imitate import another_boot
from messagestore import Message, MessageStore
from messagestore.read.sight import Sealed, Sight, Units, Unrecovered, UpTo
from messagestore.read.view import StoreView

LEFT: dict[str, type[Sight]] = {
    "closed by us": Sealed,
    "closed by a broker": Units,
    "a broker at work": Units,
    "open": UpTo,
    "open before a restart": Unrecovered,
}


def count(view: StoreView) -> int:
    return sum(view.max_offset("t", queue_id) for queue_id in view.queue_ids("t"))


@pytest.mark.parametrize("how", LEFT)
def test_each_way_to_leave_a_store_has_its_sight(tmp_path: Path, how: str) -> None:
    root = tmp_path / "s"
    with contextlib.ExitStack() as stack:
        store = MessageStore.open(root)
        store.put_message(Message("t", b"one"))
        if how.startswith("open"):
            stack.callback(store.close)
        else:
            store.close()
        if how == "a broker at work":
            (root / "abort").touch()
        if how == "closed by a broker":
            checkpoint = root / "checkpoint"
            checkpoint.write_bytes(b"\x00" * 7 + b"\x01" + checkpoint.read_bytes()[8:])
        with another_boot() if "restart" in how else contextlib.nullcontext():
            view = StoreView(root)
            stack.callback(view.close)
            sight = view.sight
            assert type(sight) is LEFT[how]
            assert count(view) == (0 if how == "open before a restart" else 1)
            assert (sight.end is None) == how.startswith(("closed", "a broker"))
            assert (sight.known_end is None) == ("broker" in how)
            view.refresh()
            assert view.sight is sight


def test_what_is_known_of_the_queues_of_a_closed_store_goes_with_the_next_writer(tmp_path: Path) -> None:
    """The seals of the old state say that a queue has one message; the view must not compare with them any more."""
    root = tmp_path / "s"
    with MessageStore.open(root) as store:
        store.put_message(Message("t", b"one"))
    view = StoreView(root)
    before = view.sight
    assert count(view) == 1
    with MessageStore.open(root) as store:
        store.put_message(Message("t", b"two"))
    view.refresh()
    assert isinstance(view.sight, Sealed)
    assert view.sight is not before
    assert count(view) == 2
    view.close()
