"""The tables of states: every move that is allowed, and that no other is."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from messagestore import MessageStore, StoreClosedError, StorePoisonedError
from messagestore.session import attached_store
from messagestore.writer.states import (
    HEALTHS,
    PRESENCES,
    TURNS,
    ForbiddenMove,
    Health,
    HealthEvent,
    Presence,
    PresenceEvent,
    Turn,
    TurnEvent,
    moved,
)

TABLES: dict[str, tuple[type[Enum], type[Enum], Mapping[Any, Enum], str]] = {
    "turn": (
        Turn,
        TurnEvent,
        TURNS,
        """
                  TAKE    GIVE    LOSE    RETIRE
        HELD      HELD    AWAY    LOST    RETIRED
        AWAY      HELD    AWAY    LOST    RETIRED
        LOST      LOST    LOST    LOST    RETIRED
        RETIRED   -       -       RETIRED RETIRED
        """,
    ),
    "health": (
        Health,
        HealthEvent,
        HEALTHS,
        """
                  POISON    TELL
        SOUND     POISONED  -
        POISONED  POISONED  TOLD
        TOLD      TOLD      TOLD
        """,
    ),
    "presence": (
        Presence,
        PresenceEvent,
        PRESENCES,
        """
                  ATTACH    TAKE     DETACH    GIVE
        DETACHED  ATTACHED  -        DETACHED  DETACHED
        ATTACHED  -         HOLDING  DETACHED  ATTACHED
        HOLDING   -         HOLDING  LEAVING   ATTACHED
        LEAVING   -         -        LEAVING   DETACHED
        """,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_move_is_in_the_table_or_refused(name: str) -> None:
    states, events, table, picture = TABLES[name]
    heads, *rows = [line.split() for line in picture.strip().splitlines()]
    assert heads == [event.name for event in events]
    assert [row[0] for row in rows] == [state.name for state in states]
    for state, row in zip(states, rows, strict=True):
        for event, after in zip(events, row[1:], strict=True):
            if after == "-":
                with pytest.raises(ForbiddenMove, match=f"{state.name}.*{event.name}"):
                    moved(table, state, event)
            else:
                assert moved(table, state, event) is states[after], (state, event)


@pytest.mark.parametrize("name", TABLES)
def test_every_state_can_be_reached_from_the_first(name: str) -> None:
    states, _, table, _ = TABLES[name]
    first = next(iter(states))
    reached = {first}
    for _ in states:
        reached |= {after for (state, _), after in table.items() if state in reached}
    assert reached == set(states)


def test_a_turn_of_a_process(tmp_path: Path) -> None:
    """What a process holds, and what its writer may do, from the first commit to the end."""
    store = attached_store(tmp_path / "s")
    assert store.locks.presence is Presence.DETACHED
    with store.writing("a commit") as writer:
        assert (store.locks.presence, writer.turn) == (Presence.HOLDING, Turn.HELD)
    assert (store.locks.presence, writer.turn) == (Presence.ATTACHED, Turn.AWAY)
    with pytest.raises(AssertionError, match="another process may write"):
        writer.write_state(visible_end=0)
    with store.writing("another") as again:
        assert (store.locks.presence, again.turn) == (Presence.HOLDING, Turn.HELD)
    store.detach()
    assert (store.locks.presence, again.turn) == (Presence.DETACHED, Turn.RETIRED)
    with pytest.raises(StoreClosedError):
        again.write_state(visible_end=0)


def test_an_error_that_the_flush_thread_has_seen_is_not_told(tmp_path: Path) -> None:
    store = MessageStore.open(tmp_path / "s")
    writer = store.writer
    writer.stop("a sync failed (test)")
    assert writer.health is Health.POISONED
    assert not writer.state.poisoned
    writer.poison_untold("another reason")
    assert writer.health is Health.POISONED
    assert writer.state.poisoned
    with pytest.raises(StorePoisonedError, match=r"a sync failed \(test\)"):
        store.close()
    assert writer.health is Health.TOLD
    assert attached_store(tmp_path / "s").locks.presence is Presence.DETACHED


def test_what_was_interrupted_while_it_was_let_go_is_let_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = attached_store(tmp_path / "s")
    with store.writing("a commit"):
        pass

    def interrupt() -> None:
        raise KeyboardInterrupt

    store.locks.take(1.0, "detach", store.writer)
    with monkeypatch.context() as patched:
        patched.setattr(store.locks, "release", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store._drop()
    assert store.locks.presence is Presence.LEAVING
    with store.writing("the next commit") as writer:
        assert (store.locks.presence, writer.turn) == (Presence.HOLDING, Turn.HELD)
    store.detach()
