"""What recovery may trust in the log and the queues that it finds, for each way in which a store can be left.

| Left by | whose records | a seal proves the data | parts of batches stay | last record may be torn |
|---|---|---|---|---|
| a writer of ours, killed; C is anchored | ours | where only SYNC_FLUSH wrote | no | yes |
| a writer of ours, killed; no anchor | anybody's | where only SYNC_FLUSH wrote | no | yes |
| a broker, crashed | anybody's | no | yes | yes |
| closed, by anybody; or not written yet | anybody's | no | yes | no |
"""

from __future__ import annotations

from dataclasses import dataclass

from messagestore.log.condition import Condition


@dataclass(frozen=True, slots=True)
class Trust:
    """What recovery may trust.

    Parameters
    ----------
    condition : Condition
        How the store was left.
    anchored : bool
        The survey begins at the clean end, and the record before it is the one that `state` names.
    only_synced : bool
        Nobody wrote with ASYNC_FLUSH after the clean end.
    units : bool
        The queue files can be used. False: all queues are rebuilt.
    """

    condition: Condition
    anchored: bool
    only_synced: bool
    units: bool

    @property
    def own(self) -> bool:
        """Whether this project wrote all records from the start of the survey on."""
        return self.condition.ours_open and self.anchored

    @property
    def seals_prove(self) -> bool:
        """Whether each BATCH record was sealed after its data were synced, unless it says ASYNC_FLUSH itself."""
        return self.condition.ours_open and self.only_synced

    @property
    def partial_batches_stay(self) -> bool:
        """Whether a broker may have kept a part of an ASYNC_FLUSH batch and appended after it."""
        return not self.condition.ours_open

    @property
    def last_record_may_be_torn(self) -> bool:
        """Whether the last record may be torn, because the store was not closed."""
        return not self.condition.closed
