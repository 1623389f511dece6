"""Waits for messages of many queues of a broker, by PULL_MESSAGE with its suspend flag.

The broker keeps such a request until its queue has a message at the offset that is asked for, and answers then. One
request for each queue stays under way between two looks, so nobody asks again and again whether there is something new.

    arm(ends)          a request for each queue, from its end on
    is_quiet(ends)     whether all of them are still under way; no broker is asked
    wait(timeout_s)    until one of them is answered, or the connection breaks
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from messagestore.errors import StoreUnavailableError
from messagestore.remoting import Call, codes
from messagestore.remoting.connection import read_any
from messagestore.remoting.replicas import Replicas
from messagestore.spi.interface import Queue, Queues
from messagestore.spi.pulls import SUBSCRIPTION_FLAG, pull_fields

SUSPEND_FLAG = 2
"""`sysFlag`: the broker may keep the request for `suspendTimeoutMillis` (RocketMQ common/sysflag/PullSysFlag.java)."""
SUSPEND_S = 15.0
"""How long a broker may keep a request. RocketMQ's consumers say the same."""
_LATE_S = 30.0
"""A request that is not answered so long after it should be is given up, and sent again."""
_SHORT_S = 0.1
"""A broker that answers sooner than this, and without a message, keeps no requests."""
_REFUSED_S = 5.0
"""For how long such a broker gets none."""


@dataclass(slots=True)
class _Kept:
    """A request that the broker keeps."""

    offset: int
    call: Call
    sent_s: float


class Waits:
    """The requests that one broker keeps for a reader.

    Parameters
    ----------
    replicas : Replicas
    group : str
        The consumer group that requests name.
    """

    def __init__(self, replicas: Replicas, group: str) -> None:
        self._replicas, self._group = replicas, group
        self._kept: dict[Queue, _Kept] = {}
        self._answered: set[Queue] = set()
        """The queues whose requests had been answered when `is_quiet` was called last."""
        self._refused_until_s = 0.0

    def arm(self, ends: Queues) -> None:
        """Let the broker keep a request for each queue, from its end on. Those that fit are left under way.

        A slave gets none, because it looks at the requests that it keeps only every five seconds. If a request cannot
        be sent, the next look at the ends says why.
        """
        now_s = time.monotonic()
        self._look_at_answers(ends, now_s)
        for queue in self._kept.keys() - ends.keys():
            self._kept.pop(queue).call.give_up()
        if self._replicas.is_slave or now_s < self._refused_until_s:
            self._forget()
            return

        try:
            address = self._replicas.address()
            for queue, end in ends.items():
                request = self._kept.get(queue)
                if request is not None:
                    if request.offset == end and request.call.address == address:
                        continue
                    request.call.give_up()
                self._kept[queue] = _Kept(end, self._sent(address, queue, end), now_s)
        except StoreUnavailableError:
            self._forget()

    def _look_at_answers(self, ends: Queues, now_s: float) -> None:
        """Note that a broker keeps no requests, and give up what is late.

        An answer that came while the ends were asked for may be newer than these, and is left for the next look.
        """
        for queue in self._answered & self._kept.keys():
            request = self._kept.pop(queue)
            is_short = now_s - request.sent_s < _SHORT_S and not request.call.has_failed
            # A refusal is no error here: a pull that is for a message says what it means.
            if is_short and ends.get(queue) == request.offset:
                self._refused_until_s = now_s + _REFUSED_S
        self._answered.clear()

        for queue, request in list(self._kept.items()):
            if not request.call.is_done and now_s - request.sent_s > SUSPEND_S + _LATE_S:
                self._kept.pop(queue).call.give_up()

    def _sent(self, address: str, queue: Queue, end: int) -> Call:
        fields = pull_fields(*queue, end, 1, self._group)
        fields |= {"sysFlag": SUBSCRIPTION_FLAG | SUSPEND_FLAG, "suspendTimeoutMillis": int(SUSPEND_S * 1000)}
        return self._replicas.send(address, (codes.PULL_MESSAGE, fields))

    def _forget(self) -> None:
        for request in self._kept.values():
            request.call.give_up()
        self._kept.clear()

    # ---- what came

    @property
    def is_armed(self) -> bool:
        """Whether the broker keeps a request."""
        return bool(self._kept)

    def news(self, queues: Collection[Queue]) -> Queues | None:
        """The queues to which a message has come, and the ends from which on the broker was asked for it.

        None: something else may have happened, because there is no request for one of `queues`, its connection broke,
        or it was answered without a message.
        """
        if self._kept.keys() != {*queues}:
            return None
        answered = {queue: request for queue, request in self._kept.items() if request.call.is_done}
        if any(request.call.has_failed or request.call.answer().code != codes.SUCCESS for request in answered.values()):
            return None
        return {queue: request.offset for queue, request in answered.items()}

    @property
    def woken(self) -> set[Queue]:
        """The queues whose requests were answered, as they are when a message comes."""
        return {queue for queue, request in self._kept.items() if request.call.is_done}

    def is_quiet(self, ends: Queues) -> bool:
        """Whether the broker keeps a request for each of some queues, from its end on, and has answered none."""
        is_done = True
        while is_done:  # all that has arrived: one look at the ends serves it
            waiting = [request.call for request in self._kept.values() if not request.call.is_done]
            read_any(waiting, 0)
            is_done = any(call.is_done for call in waiting)
        self._answered, kept = self.woken, self._kept
        return not self._answered and all(
            (request := kept.get(queue)) is not None and request.offset == end for queue, end in ends.items()
        )

    def wait(self, timeout_s: float) -> None:
        """Wait until the broker has answered a request, or the connection broke."""
        read_any([request.call for request in self._kept.values()], timeout_s)
