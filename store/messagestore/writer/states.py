"""The states of a writer, and of a process at a store, and the moves between them.

`Turn` says whether a `LogWriter` may write the small files that all writers share, and `Health` whether its syncs can
be trusted. The two are independent of each other. `Presence` says what a process holds (`StoreLocks`).

    Turn        HELD <-> AWAY                   a process takes the writer lock and gives it back
                HELD, AWAY -> LOST              somebody removed the lock file: it is unknown who writes now
                any -> RETIRED                  the process has closed the store, or made another writer for it

    Health      SOUND -> POISONED -> TOLD       a sync failed; a caller has seen the error

    Presence    DETACHED -> ATTACHED <-> HOLDING
                ATTACHED -> DETACHED
                HOLDING -> LEAVING -> DETACHED  the attachment is released before the writer lock

Events that release something are allowed in every state, because Ctrl-C may have come between two of them. Events that
acquire something are not. A move that is not in its table raises `ForbiddenMove` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class Turn(Enum):
    """Whether a writer may write `state`, the journal and the store checkpoint."""

    HELD = "its process holds the writer lock"
    AWAY = "its process has given the writer lock back, and another process may write"
    LOST = "the lock file is not the one that was locked: another writer may be at work"
    RETIRED = "it is not the store's writer any more"


class TurnEvent(Enum):
    """What changes a `Turn`."""

    TAKE = "the writer lock was taken"
    GIVE = "the writer lock is about to be given back"
    LOSE = "the lock file was found removed or replaced"
    RETIRE = "the store is closed, or gets another writer"


class Health(Enum):
    """Whether what a writer has synced can be trusted."""

    SOUND = "no sync has failed"
    POISONED = "a sync failed, or an append was interrupted, and no caller has seen it yet"
    TOLD = "a caller has seen `StorePoisonedError`"


class HealthEvent(Enum):
    """What changes a `Health`."""

    POISON = "a sync failed, or an append was interrupted"
    TELL = "a caller gets `StorePoisonedError`"


class Presence(Enum):
    """What a process holds of a store."""

    DETACHED = "nothing"
    ATTACHED = "the lock that keeps brokers out; another process may write"
    HOLDING = "that, and the writer lock: only this process writes"
    LEAVING = "the writer lock only, for as long as it takes to let it go"


class PresenceEvent(Enum):
    """What changes a `Presence`."""

    ATTACH = "the process keeps brokers out from now on"
    TAKE = "the writer lock was taken"
    DETACH = "the process is about to let brokers in"
    GIVE = "the writer lock was given back"


TURNS: Mapping[tuple[Turn, TurnEvent], Turn] = {
    (Turn.HELD, TurnEvent.TAKE): Turn.HELD,  # the release was interrupted
    (Turn.HELD, TurnEvent.GIVE): Turn.AWAY,
    (Turn.HELD, TurnEvent.LOSE): Turn.LOST,
    (Turn.HELD, TurnEvent.RETIRE): Turn.RETIRED,
    (Turn.AWAY, TurnEvent.TAKE): Turn.HELD,
    (Turn.AWAY, TurnEvent.GIVE): Turn.AWAY,
    (Turn.AWAY, TurnEvent.LOSE): Turn.LOST,  # an append by a caller that kept the writer for longer than its turn
    (Turn.AWAY, TurnEvent.RETIRE): Turn.RETIRED,
    (Turn.LOST, TurnEvent.TAKE): Turn.LOST,  # another writer may have written meanwhile: only recovery makes a new one
    (Turn.LOST, TurnEvent.GIVE): Turn.LOST,
    (Turn.LOST, TurnEvent.LOSE): Turn.LOST,
    (Turn.LOST, TurnEvent.RETIRE): Turn.RETIRED,
    (Turn.RETIRED, TurnEvent.LOSE): Turn.RETIRED,  # an append was running when the store was closed
    (Turn.RETIRED, TurnEvent.RETIRE): Turn.RETIRED,
}

HEALTHS: Mapping[tuple[Health, HealthEvent], Health] = {
    (Health.SOUND, HealthEvent.POISON): Health.POISONED,
    (Health.POISONED, HealthEvent.POISON): Health.POISONED,
    (Health.POISONED, HealthEvent.TELL): Health.TOLD,
    (Health.TOLD, HealthEvent.POISON): Health.TOLD,
    (Health.TOLD, HealthEvent.TELL): Health.TOLD,
}

PRESENCES: Mapping[tuple[Presence, PresenceEvent], Presence] = {
    (Presence.DETACHED, PresenceEvent.ATTACH): Presence.ATTACHED,
    (Presence.DETACHED, PresenceEvent.DETACH): Presence.DETACHED,
    (Presence.DETACHED, PresenceEvent.GIVE): Presence.DETACHED,
    (Presence.ATTACHED, PresenceEvent.TAKE): Presence.HOLDING,
    (Presence.ATTACHED, PresenceEvent.DETACH): Presence.DETACHED,
    (Presence.ATTACHED, PresenceEvent.GIVE): Presence.ATTACHED,
    (Presence.HOLDING, PresenceEvent.TAKE): Presence.HOLDING,  # the release was interrupted
    (Presence.HOLDING, PresenceEvent.DETACH): Presence.LEAVING,
    (Presence.HOLDING, PresenceEvent.GIVE): Presence.ATTACHED,
    (Presence.LEAVING, PresenceEvent.DETACH): Presence.LEAVING,
    (Presence.LEAVING, PresenceEvent.GIVE): Presence.DETACHED,
}

_State = TypeVar("_State", bound=Enum)
_Event = TypeVar("_Event", bound=Enum)


class ForbiddenMove(AssertionError):
    """An event came in a state that does not allow it, which is a bug in the program."""


def moved(table: Mapping[tuple[_State, _Event], _State], state: _State, event: _Event) -> _State:
    """The state after an event.

    Raises
    ------
    ForbiddenMove
        The table has no such move.
    """
    after = table.get((state, event))
    if after is None:
        raise ForbiddenMove(f"{type(state).__name__}.{state.name}: {type(event).__name__}.{event.name} cannot come now")
    return after
