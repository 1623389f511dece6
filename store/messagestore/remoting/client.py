"""A client of a RocketMQ cluster: its connections, the routes of topics, and what is repeated."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from messagestore.errors import BrokerError, ProtocolError, StoreUnavailableError, UnknownTopicError
from messagestore.remoting import codes
from messagestore.remoting.connection import ANSWER_TIMEOUT_S, Answer, Call, Connection
from messagestore.remoting.name_servers import NameServers
from messagestore.remoting.routes import Broker, Route, brokers_of, json_of, route_of
from messagestore.remoting.settings import RemotingSettings

ROUTE_S = 5.0
"""For how long a route is used before the name servers are asked again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_TOLD_AFTER_S = 1.0
_SUCCESS = frozenset({codes.SUCCESS})
_log = logging.getLogger(__name__)


class Client:
    """A client of the brokers that some name servers know.

    Parameters
    ----------
    name_servers : str
        `host:port`, several with semicolons between them; or the URL of a server that lists them.
    settings : RemotingSettings, optional

    Raises
    ------
    ConfigError
        An address is not `host:port`.
    """

    def __init__(self, name_servers: str, settings: RemotingSettings | None = None) -> None:
        self.settings = settings or RemotingSettings()
        self.name_servers = NameServers(name_servers, self.settings)
        self.key = (self.name_servers.text, self.settings, self.settings.file_states())
        """Clients with the same key connect to the same servers as the same user."""

        self._connections: dict[str, Connection] = {}
        self._routes: dict[str, tuple[float, Route]] = {}
        self._brokers: tuple[float, dict[str, Broker]] | None = None
        self._begun_s = 0.0
        self.connect_count = 0
        """How many connections were made."""
        self._lock = threading.Lock()
        self._pid = os.getpid()

    # ---- requests

    def connection(self, address: str) -> Connection:
        """The connection of this process to an address; a new one if there is none that works.

        Raises
        ------
        StoreUnavailableError
        """
        with self._lock:
            if self._pid != os.getpid():  # a forked process must not use the sockets of its parent
                self._connections, self._routes, self._brokers, self._pid = {}, {}, None, os.getpid()
            connection = self._connections.get(address)
            if connection is None or connection.is_broken:
                connection = self._connections[address] = Connection(address, self.settings)
                self.connect_count += 1
            return connection

    def send(
        self,
        address: str,
        code: int,
        fields: Mapping[str, object],
        body: bytes | memoryview = b"",
        *,
        oneway: bool = False,
    ) -> Call:
        """Send a request once, and do not wait for its answer.

        Parameters
        ----------
        address : str
            `host:port` of a broker or a name server.
        code : int
            One of `codes`.
        fields : mapping of str to object
            The header. Whole numbers, booleans and texts become texts; fields that are None are left out.
        body : bytes or memoryview
        oneway : bool
            Nobody answers.

        Raises
        ------
        StoreUnavailableError
            There is no connection, or it broke while the request was sent.
        """
        return self.connection(address).send(code, fields, body, oneway=oneway)

    def request(
        self,
        address: str,
        code: int,
        fields: Mapping[str, object],
        body: bytes | memoryview = b"",
        *,
        accepts: Collection[int] = _SUCCESS,
        broker: str = "",
        repeats: bool = True,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Answer:
        """Send a request, and wait for its answer.

        Parameters
        ----------
        accepts : collection of int
            The codes of answers that are returned.
        broker : str
            The broker's name, for errors.
        repeats : bool
            Send it again after a growing, random pause if the broker is busy or gives no answer, for as long as
            `retry_timeout_s` allows. False: the request is sent once, because it must not be carried out twice.
        timeout_s : float
            How long an answer is waited for.

        Raises
        ------
        BrokerError
            The answer has another code.
        StoreUnavailableError
            There was no answer. The request may have been carried out, or not.
        """
        until_s, told = time.monotonic() + (self.settings.retry_timeout_s if repeats else 0.0), False
        pauses = _pauses()
        while True:
            failure: StoreUnavailableError | BrokerError
            try:
                answer = self.send(address, code, fields, body).answer(timeout_s)
                if answer.code in accepts:
                    return answer
                failure = refused(answer, broker)
                if answer.code not in codes.BUSY:
                    raise failure
                if answer.code == codes.GO_AWAY:
                    self.drop(address)
            except StoreUnavailableError as error:
                failure = error
                self.drop(address)  # a connection that is silent may be dead without a word, and stay so

            pause_s = next(pauses)
            if not repeats or time.monotonic() + pause_s >= until_s:
                raise failure
            if not told and pause_s >= _TOLD_AFTER_S:
                told = True
                _log.warning("a request is sent again for up to %g s: %s", self.settings.retry_timeout_s, failure)
            time.sleep(pause_s)

    def drop(self, address: str) -> None:
        """Close the connection to an address; the next request makes another one."""
        with self._lock:
            connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()

    # ---- name servers

    def route(self, topic: str, *, fresh: bool = False) -> Route:
        """Where a topic lies, as the name servers said within the last seconds.

        Parameters
        ----------
        fresh : bool
            Ask them now.

        Raises
        ------
        UnknownTopicError
            No broker has the topic.
        StoreUnavailableError
            No name server answers.
        """
        now_s = time.monotonic()
        kept = self._routes.get(topic) if self._pid == os.getpid() else None
        if kept is not None and not fresh and now_s - kept[0] < ROUTE_S:
            return kept[1]

        answer = self._ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}, {codes.SUCCESS, codes.TOPIC_NOT_EXIST})
        if answer.code == codes.TOPIC_NOT_EXIST:
            self._routes.pop(topic, None)
            raise UnknownTopicError(topic, None, f"The name servers {self.name_servers} know no broker with it")
        route = route_of(answer)
        self._routes[topic] = now_s, route
        return route

    def awaited_route(self, topic: str, is_good: Callable[[Route], bool] = bool) -> Route:
        """Where a topic lies, asked for until it is known. Name servers forget a topic while its brokers are down.

        Parameters
        ----------
        is_good : function
            Whether a route is enough.

        Raises
        ------
        UnknownTopicError
            No broker has the topic after `retry_timeout_s`.

        Returns
        -------
        Route
            The last one, whether it is good or not.
        """
        until_s, pauses, told = time.monotonic() + self.settings.retry_timeout_s, _pauses(), False
        while True:
            route: Route | None = None
            failure: UnknownTopicError | None = None
            try:
                route = self.route(topic, fresh=True)
                if is_good(route):
                    return route
            except UnknownTopicError as error:
                failure = error

            pause_s = next(pauses)
            if time.monotonic() + pause_s >= until_s:
                if route is not None:
                    return route
                assert failure is not None
                raise failure
            if not told and pause_s >= _TOLD_AFTER_S:
                told = True
                words = "that can be used" if failure is None else "at all"
                _log.warning(
                    "topic %s: the name servers %s know no broker with it %s. They are asked again for up to %g s",
                    topic,
                    self.name_servers,
                    words,
                    self.settings.retry_timeout_s,
                )
            time.sleep(pause_s)

    def topics(self) -> list[str]:
        """The names of all topics that the name servers know, with those that RocketMQ itself uses."""
        answer = self._ask(codes.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {}, _SUCCESS)
        try:
            return sorted(map(str, json_of(answer)["topicList"]))
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"{answer.address}: found a list of topics that cannot be read: {error!r}") from None

    def brokers(self, *, within_s: float | None = None) -> dict[str, Broker]:
        """All brokers that the name servers know, by their names, as these said within the last seconds.

        Parameters
        ----------
        within_s : float
            What they said to an earlier user of this client counts, too, if it is not older than this.
        """
        now_s = time.monotonic()
        since_s = max(now_s - ROUTE_S, self._begun_s) if within_s is None else now_s - within_s
        if self._brokers is not None and self._pid == os.getpid() and self._brokers[0] > since_s:
            return self._brokers[1]
        answer = self._ask(codes.GET_BROKER_CLUSTER_INFO, {}, _SUCCESS)
        try:
            brokers = brokers_of([*(json_of(answer).get("brokerAddrTable") or {}).values()])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"{answer.address}: found a list of brokers that cannot be read: {error!r}") from None
        self._brokers = now_s, brokers
        return brokers

    def forget_brokers(self) -> None:
        """Let the next `brokers` ask the name servers."""
        self._brokers = None

    def _ask(self, code: int, fields: Mapping[str, object], accepts: Collection[int]) -> Answer:
        """The answer of any name server: all of them are tried, again and again until the time is over."""
        until_s = time.monotonic() + self.settings.retry_timeout_s
        pauses = _pauses()
        while True:
            failures = list[StoreUnavailableError]()
            for address in self._name_servers_now(failures):
                try:
                    return self.request(address, code, fields, accepts=accepts, broker="name server", repeats=False)
                except StoreUnavailableError as error:
                    failures.append(error)
                except BrokerError as error:
                    if error.code not in codes.BUSY:
                        raise
                    failures.append(StoreUnavailableError(str(error)))
            self.name_servers.gave_no_answer()

            pause_s = next(pauses)
            if time.monotonic() + pause_s >= until_s:
                raise StoreUnavailableError(
                    f"no name server answers: {'; '.join(map(str, failures))}. Start one, or correct the addresses"
                ) from failures[-1]
            time.sleep(pause_s)

    def _name_servers_now(self, failures: list[StoreUnavailableError]) -> tuple[str, ...]:
        """The name servers to ask; none, and one more failure, if they cannot be found."""
        try:
            return self.name_servers.addresses()
        except StoreUnavailableError as error:
            failures.append(error)
            return ()

    def begin(self) -> None:
        """Serve another user, who asks the name servers himself."""
        self._routes.clear()
        self._begun_s = time.monotonic()

    def keep_idle(self) -> bool:
        """Close the connections that cannot be used by somebody else later. Returns whether one is left.

        A connection is closed if requests are under way on it: their answers may be large, and nobody wants them. What
        has arrived on the others is read, and so the end of a connection is noticed.
        """
        if self._pid != os.getpid():
            return False
        with self._lock:
            connections = list(self._connections.items())
        for address, connection in connections:
            if not connection.is_idle():
                self.drop(address)
        return bool(self._connections)

    def close(self) -> None:
        """Close all connections. A later request makes new ones."""
        with self._lock:
            connections, self._connections = self._connections, {}
        if self._pid == os.getpid():
            for connection in connections.values():
                connection.close()


def refused(answer: Answer, broker: str = "") -> BrokerError:
    """The error for an answer with a code that was not expected."""
    name = f"broker {broker} ({answer.address})" if broker else answer.address
    return BrokerError(
        f"{name} answered {codes.answer_name(answer.code)}: {answer.remark or 'no remark'}",
        broker=broker,
        address=answer.address,
        code=answer.code,
        remark=answer.remark,
    )


def _pauses() -> Iterator[float]:
    """Growing pauses, each at random between a half and the whole."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
