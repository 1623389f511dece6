"""What becomes of a remembered queue offset when the numbers of its queue go back.

Several files, and users, remember how far a queue was read or delivered, by a number. The numbers of a queue may begin
again below that number:

    |<---------- read up to 12 ---------->|
    0 1 2 3 4 5 6 7 8 9 10 11                  then the queue is rebuilt, cut, restored or made again:
    0 1 2 3 4                                  the next message gets number 5, and a 12 would skip seven of them

`Memory` lists what remembers, `WayBack` the ways in which numbers go back, and `ANSWERS` what happens for each pair
that there can be.
The rules behind it:

- A place in the log never goes back. What this project writes itself is checked by its place (PLACE).
- A number beyond the end of its queue says that the numbers went back. It is lowered before the queue gives its next
  number (LOWERED), because afterwards nothing shows that it means other messages.
- A reader that finds its place gone says so (REFUSED).
- A consumer that is opened begins where a queue bears its group out (CORRECTED), because nobody may be there to decide.
- Where somebody only asks, the number counts as it will when it has been lowered, with a remark (COUNTED, KEPT).

`tests/store/test_numbers_go_back.py` and `tests/connector/source/test_numbers_go_back.py` have a test for each pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Memory(Enum):
    """What remembers a queue offset outside the queue."""

    DELIVERY = "the BATCH record of the newest delivery of delayed messages"
    DELAY_OFFSETS = "config/delayOffset.json: what a broker has delivered"
    HALVES = "config/consumerOffset.json: half messages that nobody need look at again"
    GROUP = "config/consumerOffset.json: what a consumer group has read"
    SETTLED = "config/consumerOffset.json: which BATCH records have their progress of groups in it"
    COMMITTED = "startingOffsets=committed: a new query that begins where a group is"
    CONSUMER = "the position of a consumer that is open, and of one that is opened"
    CHECKPOINT = "the Spark checkpoint of a query"
    PUBLISHED = "what a query publishes as its consumer group's progress"
    GROUP_LAG = "`lag --group`, `groups` and `metrics`"
    CHECKPOINT_LAG = "`lag --checkpoint`"
    RETENTION = "which messages retention takes for read or delivered"


class WayBack(Enum):
    """How the numbers of a queue go back."""

    REBUILT = "retention took all messages of the queue; consumequeue and spark/ends were removed, and rebuilt"
    LOSS_ACCEPTED = "the end of the log was lost, and `recover --accept-loss` went on without it"
    MADE_AGAIN = "a broker deleted a topic and made it again, and the offsets of groups in it are there"
    DELETED = "`MessageStore.delete_topic` deleted a topic, and it was made again"
    OLDER_COPY = "an older copy of the log and the queues was put in place; what remembers is newer"
    BROKER_CRASHED = "a broker wrote its small files, and a crash took the end of its log"


class Answer(Enum):
    """What becomes of the number."""

    PLACE = "it counts as far as the place in the log bears it out"
    LOWERED = "it is lowered before the queue gives its next number, and a warning says so"
    READ_AGAIN = "both queues are read again from their beginning"
    REFUSED = "an error names the queue, the number and the queue's end; failOnDataLoss=false goes on with a warning"
    CORRECTED = (
        "an open one raises an error and commits nothing; one that is opened begins where the group is, as far as the "
        "queue bears it out, and a warning says so"
    )
    NOT_PUBLISHED = "nothing is published before the query has compared its place with the log"
    COUNTED = (
        "the lag counts from where reading goes on and is never below 0; a remark says that the number is too large"
    )
    FORGOTTEN = "it is removed together with the topic, so nothing of the new one counts as read"
    KEPT = "what is behind the place where reading goes on counts as unread, and stays"


_SAME_FOR_ALL: Mapping[Memory, Answer] = {
    Memory.DELIVERY: Answer.PLACE,
    Memory.DELAY_OFFSETS: Answer.LOWERED,
    Memory.HALVES: Answer.READ_AGAIN,
    Memory.GROUP: Answer.LOWERED,
    Memory.SETTLED: Answer.LOWERED,
    Memory.COMMITTED: Answer.REFUSED,
    Memory.CONSUMER: Answer.CORRECTED,
    Memory.CHECKPOINT: Answer.REFUSED,
    Memory.PUBLISHED: Answer.NOT_PUBLISHED,
    Memory.GROUP_LAG: Answer.COUNTED,
    Memory.CHECKPOINT_LAG: Answer.COUNTED,
    Memory.RETENTION: Answer.KEPT,
}

_OF_BROKERS_TOPICS = frozenset({Memory.DELIVERY, Memory.DELAY_OFFSETS, Memory.HALVES, Memory.SETTLED})
"""What remembers a number of a topic that is a broker's or the store's own, which `delete_topic` refuses."""
_FORGOTTEN = frozenset({Memory.GROUP, Memory.COMMITTED, Memory.GROUP_LAG, Memory.RETENTION})
"""What reads the numbers of consumer groups in `config/consumerOffset.json`."""

ANSWERS: Mapping[tuple[Memory, WayBack], Answer] = {
    (memory, way): Answer.FORGOTTEN if way is WayBack.DELETED and memory in _FORGOTTEN else answer
    for memory, answer in _SAME_FOR_ALL.items()
    for way in WayBack
    if way is not WayBack.DELETED or memory not in _OF_BROKERS_TOPICS
}


def corrected(offset: int, begin: int, end: int) -> int:
    """Where reading goes on for somebody who has read up to `offset`.

    Parameters
    ----------
    offset : int
        The number of the first message that was not read.
    begin, end : int
        The number of the queue's first message that is left, and one past its last.

    Returns
    -------
    int
        `offset`, if the queue has come so far. Otherwise, as for a consumer of RocketMQ 4: 0 if the queue has all its
        messages since 0, since it is probably another queue than the one that was read; and else its end.
    """
    if offset <= end:
        return offset
    return 0 if begin == 0 else end
