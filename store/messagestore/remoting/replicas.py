"""The master and the slaves of one broker: whom to ask, and whom to ask next when it does not answer."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from messagestore.errors import BrokerError, StoreError, StoreUnavailableError
from messagestore.remoting import codes
from messagestore.remoting.client import Client, refused
from messagestore.remoting.connection import Answer, Call
from messagestore.remoting.routes import MASTER_ID

STAY_S = 15.0
"""How long a broker that is not the first choice is asked before the first choice is tried again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_TOLD_AFTER_S = 1.0
_MOST_UNDER_WAY = 256
"""How many requests are sent before their answers are read: so many, and their small answers, fit into buffers."""
_SUCCESS = frozenset({codes.SUCCESS})
_NO_OTHERS: Mapping[int, Collection[int]] = {}
_log = logging.getLogger(__name__)

Request = tuple[int, Mapping[str, object]]
"""A code and the fields of the header."""


class Patience:
    """How long to go on without an answer: growing, random pauses, until a time is over.

    Parameters
    ----------
    timeout_s : float
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.progressed()

    def progressed(self) -> None:
        """Begin to count anew: somebody has answered."""
        self._until_s, self._pause_s, self._told = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S, False

    def wait(self, error: StoreError) -> None:
        """Pause after a failure; raise it if the time is over."""
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        if time.monotonic() + pause_s >= self._until_s:
            raise error
        if not self._told and pause_s >= _TOLD_AFTER_S:
            self._told = True
            _log.warning("a request is sent again for up to %g s: %s", self._timeout_s, error)
        time.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class Replicas:
    """The master and the slaves of one broker, as one that is asked.

    The master is asked first, or with `slaves_first` a slave. If it does not answer, the others are, and after
    `STAY_S` the first choice is tried again.

    Parameters
    ----------
    client : Client
    name : str
        `brokerName`.
    slaves_first : bool
    """

    def __init__(self, client: Client, name: str, *, slaves_first: bool = False) -> None:
        self.client, self.name = client, name
        self._slaves_first = slaves_first
        self._address = ""
        self._is_slave = False
        self._chosen_s = 0.0
        self._silent: set[str] = set()

    @property
    def is_slave(self) -> bool:
        """Whether the one that was asked last is a slave, which may not have all that the master has."""
        return self._is_slave

    def patience(self) -> Patience:
        """How long to go on without an answer."""
        return Patience(self.client.settings.retry_timeout_s)

    # ---- whom to ask

    def address(self) -> str:
        """Whom to ask now.

        Raises
        ------
        StoreUnavailableError
            The name servers do not know the broker, or none of them answers.
        """
        if self._address and time.monotonic() - self._chosen_s < STAY_S:
            return self._address

        if not self._address or time.monotonic() - self._chosen_s >= STAY_S:
            self._silent.clear()
        self._choose()
        return self._address

    def _choose(self) -> None:
        broker = self.client.brokers(within_s=STAY_S).get(self.name)
        if broker is None or not broker.addresses:  # a name server may keep the name of a broker that has gone
            broker = self.client.brokers().get(self.name)
        if broker is None or not broker.addresses:
            self.client.forget_brokers()
            raise StoreUnavailableError(
                f"broker {self.name}: the name servers {self.client.name_servers} do not know it. Is it down?"
            )

        choices = sorted(broker.addresses.items(), key=lambda item: (item[0] == MASTER_ID) == self._slaves_first)
        awake = [choice for choice in choices if choice[1] not in self._silent]
        if not awake:
            self._silent.clear()
        broker_id, self._address = (awake or choices)[0]
        self._is_slave, self._chosen_s = broker_id != MASTER_ID, time.monotonic()

    def gave_no_answer(self, address: str) -> bool:
        """Ask somebody else from now on. Returns whether there is somebody who was not asked in vain."""
        self._silent.add(address)
        self.client.drop(address)
        self._address = ""
        try:
            self.client.forget_brokers()
            silent = set(self._silent)
            self._choose()
        except StoreUnavailableError:
            return False
        return self._address not in silent

    def may_answer_later(self, code: int) -> bool:
        """Whether an answer says nothing about the request. A slave learns of a topic a minute after its master."""
        return code in codes.BUSY or (self._is_slave and code == codes.TOPIC_NOT_EXIST)

    # ---- requests

    def send(self, address: str, request: Request) -> Call:
        """Send one request, and do not wait for its answer."""
        return self.client.send(address, *request)

    def asked(self, requests: Sequence[Request], accepts: Mapping[int, Collection[int]] = _NO_OTHERS) -> list[Answer]:
        """Send requests, all under way at once, and return their answers in their order.

        All answers are of the same broker. What is asked for must change nothing, since it may be asked for twice.

        Parameters
        ----------
        accepts : mapping of int to collection of int
            For the codes of requests, the codes of answers that are returned; for others, it is `SUCCESS` alone.

        Raises
        ------
        BrokerError
            An answer has a code that is not accepted.
        StoreUnavailableError
            Nobody answers.
        """
        patience = self.patience()
        while True:
            address = ""
            failure: StoreError
            try:
                address = self.address()
                return list(self._answers(address, requests, accepts))
            except StoreUnavailableError as error:
                failure = error
                if address and self.gave_no_answer(address):
                    continue
            except BrokerError as error:
                if not self.may_answer_later(error.code):
                    raise
                failure = error
                if error.code == codes.GO_AWAY:
                    self.client.drop(address)
                # A slave without slaveReadEnable is always busy.
                if self._is_slave and self.gave_no_answer(address):
                    continue
            patience.wait(failure)

    def _answers(
        self, address: str, requests: Sequence[Request], accepts: Mapping[int, Collection[int]]
    ) -> Iterator[Answer]:
        for first in range(0, len(requests), _MOST_UNDER_WAY):
            some = requests[first : first + _MOST_UNDER_WAY]
            calls = [self.send(address, request) for request in some]
            for (code, _), call in zip(some, calls, strict=True):
                answer = call.answer()
                if answer.code not in accepts.get(code, _SUCCESS):
                    raise refused(answer, self.name)
                yield answer
