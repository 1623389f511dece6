"""What a recovery may believe, for each way a store can be left: the whole truth table."""

from __future__ import annotations

import pytest

from messagestore.recovery.trust import Trust

TABLE = {
    # anchored, only SYNC_FLUSH -> own, seals prove, parts of batches stay, the last record may be torn
    ("killed", True, True): (True, True, False, True),
    ("killed", True, False): (True, False, False, True),
    ("killed", False, True): (False, True, False, True),
    ("killed", False, False): (False, False, False, True),
    ("crashed", None, None): (False, False, True, True),
    ("closed", None, None): (False, False, True, False),
}


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("case", TABLE)
def test_what_may_be_believed(case: tuple[str, bool | None, bool | None], units: bool) -> None:
    left, anchored, only_synced = case
    if left == "killed":
        trust = Trust.killed_writer(anchored=bool(anchored), only_synced=bool(only_synced), units=units)
    else:
        trust = (Trust.crashed_broker if left == "crashed" else Trust.closed_by_a_broker)(units=units)
    found = (trust.own, trust.seals_prove, trust.partial_batches_stay, trust.last_record_may_be_torn)
    assert (found, trust.units) == (TABLE[case], units)
