"""What a recovery may believe, for each way a store can be left: the whole truth table."""

from __future__ import annotations

import pytest

from messagestore.log.condition import CONDITIONS, Left
from messagestore.recovery.trust import Trust

KILLED = (Left.IDLE, Left.IN_FLIGHT, Left.RECOVERING, Left.RESTARTED, Left.UNREADABLE)
CLOSED = (
    Left.CLOSED,
    Left.CLOSED_ODDLY,
    Left.CLOSED_UNTOLD,
    Left.CLOSED_BY_BROKER,
    Left.CLOSED_BY_SOMEBODY,
)
TABLE = {
    # anchored, only SYNC_FLUSH -> own, seals prove, parts of batches stay, the last record may be torn
    (KILLED, True, True): (True, True, False, True),
    (KILLED, True, False): (True, False, False, True),
    (KILLED, False, True): (False, True, False, True),
    (KILLED, False, False): (False, False, False, True),
    ((Left.BROKER,), True, True): (False, False, True, True),
    ((Left.BROKER,), False, False): (False, False, True, True),
    (CLOSED, True, True): (False, False, True, False),
    (CLOSED, False, False): (False, False, True, False),
}


def test_every_way_to_leave_a_store_is_in_the_table() -> None:
    assert {left for lefts, _, _ in TABLE for left in lefts} == set(Left)


@pytest.mark.parametrize("case", TABLE)
def test_what_may_be_believed(case: tuple[tuple[Left, ...], bool, bool]) -> None:
    lefts, anchored, only_synced = case
    for left in lefts:
        trust = Trust(CONDITIONS[left], anchored=anchored, only_synced=only_synced, units=True)
        found = (trust.own, trust.seals_prove, trust.partial_batches_stay, trust.last_record_may_be_torn)
        assert found == TABLE[case]
