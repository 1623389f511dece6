"""How far the next micro-batch reads, so that it stays within the limits that the user has set.

The functions are pure and work on numbers; nothing here opens a store.
"""

from __future__ import annotations

from messagestore.spi import Queues


def limited(starts: Queues, ends: Queues, most: int) -> Queues:
    """The ends of a step that takes exactly `most` messages (or all, if there are fewer).

    The share of each queue is in proportion to the messages that it holds, and at least one message. If there are more
    queues with messages than `most`, the queues take turns. The turns begin at another queue each time, as the start
    offsets move, so that every queue is read.
    """
    waiting = {queue: end - starts.get(queue, 0) for queue, end in sorted(ends.items()) if end > starts.get(queue, 0)}
    if sum(waiting.values()) <= most:
        return dict(ends)
    result = {queue: min(starts.get(queue, 0), end) for queue, end in ends.items()}
    queues = list(waiting)
    if most <= len(queues):
        first = sum(starts.get(queue, 0) for queue in ends) % len(queues)
        for queue in (queues + queues)[first : first + most]:
            result[queue] += 1
        return result
    rest, more = most - len(queues), sum(waiting.values()) - len(queues)
    shares = {queue: divmod((count - 1) * rest, more) for queue, count in waiting.items()}
    left = rest - sum(whole for whole, _ in shares.values())
    by_remainder = sorted(queues, key=lambda queue: -shares[queue][1])
    rounded_up = set(by_remainder[:left])
    for queue in queues:
        result[queue] += 1 + shares[queue][0] + (queue in rounded_up)
    return result
