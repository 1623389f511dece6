"""Bugs planted in the source and the sink of running brokers.

The searches talk to a broker that is played here (`fake_broker`, `taking_broker`), so they need no Java. The kills beside
RocketMQ's own brokers are in `interop.kills`.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa

from crash.judge import Verdict
from crash.mutants_sink import in_module
from crash.planting import Ground, Mutant, patched, without
from fake_broker import Broker
from messagestore import CorruptionError, StoreError
from messagestore.remoting import Client, RemotingSettings, codes
from messagestore.remoting.frames import Frame
from messagestore.spi import STORES, Location, Producer, Range, keys_and_crcs, sends
from messagestore.spi.pulls import Pull
from remoting_peer import Peer, answer, answering
from taking_broker import LOST, TakingBroker

_BODIES = [b"one", b"two", b"three", b"four"]


def _judged(search: Callable[[Path], list[bytes]]) -> Callable[[Ground], Iterator[Verdict]]:
    """A search of one case. It returns the bodies that are there, which must be `_BODIES`."""

    def cases(ground: Ground) -> Iterator[Verdict]:
        verdict = Verdict()
        with mock.patch.object(sends, "SETTLE_S", 0.05):
            try:
                found = search(ground.folder / uuid.uuid4().hex)
                verdict.lost += [f"{body!r}" for body in _BODIES if body not in found]
                verdict.duplicated += [f"{body!r}" for body in set(found) if found.count(body) > 1]
                if sorted(found) == sorted(_BODIES) and found != _BODIES:
                    verdict.misread.append(f"out of order: {found}")
            except (StoreError, AssertionError) as error:
                verdict.misread.append(f"{type(error).__name__}: {error}")
        yield verdict

    return cases


def lost_answers(_folder: Path) -> list[bytes]:
    """The broker stores the first rows of a request, and its answer is lost."""

    def meets(broker: TakingBroker, request: Frame) -> bytes | None:
        if request.code != codes.SEND_BATCH_MESSAGE or len(broker.sends) > 1:
            return None
        broker.take(request, 2)
        return LOST

    broker = TakingBroker(meets)
    with broker.serve():
        broker.send(*_BODIES)
        return broker.bodies()


def broken_connections(_folder: Path) -> list[bytes]:
    """The connection breaks before the broker has read the request."""

    def meets(broker: TakingBroker, request: Frame) -> bytes | None:
        return LOST if request.code == codes.SEND_BATCH_MESSAGE and len(broker.sends) == 1 else None

    broker = TakingBroker(meets)
    with broker.serve():
        broker.send(*_BODIES)
        return broker.bodies()


def a_broker_that_stood_still(_folder: Path) -> list[bytes]:
    """It goes on, and stores the request that waited while it answers what it has."""
    waiting: list[Frame] = []

    def meets(broker: TakingBroker, request: Frame) -> bytes | None:
        if request.code == codes.SEND_BATCH_MESSAGE and len(broker.sends) == 1:
            waiting.append(request)
            return LOST
        if request.code == codes.GET_MAX_OFFSET and waiting:
            said = answer(request, fields={"offset": str(len(broker.queues["t", 0]))})
            broker.take(waiting.pop())
            return said
        return None

    broker = TakingBroker(meets)
    with broker.serve():
        broker.send(*_BODIES)
        return broker.bodies()


def repeated_tasks(folder: Path) -> list[bytes]:
    """A task sends its first rows and dies; Spark tries it again."""
    from pyspark_messagestore.options.table import sink_options
    from pyspark_messagestore.sink.brokers import BrokerSink, TaskContext
    from pyspark_messagestore.sink.columns import prepare

    def rights(_broker: TakingBroker, request: Frame) -> bytes | None:
        is_probe = request.code == codes.SEND_MESSAGE_V2
        return answer(request, codes.MESSAGE_ILLEGAL) if is_probe else None

    def rows(count: int) -> Iterator[pa.RecordBatch]:
        yield from (pa.record_batch({"body": [body]}) for body in _BODIES[:count])
        if count < len(_BODIES):
            raise InterruptedError

    ids = {"sql.streaming.queryId": "query", "streaming.sql.batchId": "3"}
    task = SimpleNamespace(partitionId=lambda: 0, getLocalProperty=ids.get)
    broker = TakingBroker(rights)
    with broker.serve(), mock.patch.object(TaskContext, "get", staticmethod(lambda: task)):
        options = sink_options({"path": str(broker.location), "topic": "t", "lookupDir": str(folder)})
        sink = BrokerSink.plan(options, prepare([("body", "binary")], "t"), None, streaming=True)
        with contextlib.suppress(InterruptedError):
            sink.stage(rows(2), streaming=True)
        sink.stage(rows(len(_BODIES)), streaming=True)
        return broker.bodies()


def silent_connections(_folder: Path) -> list[bytes]:
    """The first connection never answers, and nobody says that it is dead."""
    with Peer(answering(lambda request: answer(request) if peer.connection_count > 1 else b"")) as peer:
        client = Client("ns:1", RemotingSettings(retry_timeout_s=4.0))
        with contextlib.closing(client):
            client.request(peer.address, codes.GET_MAX_OFFSET, {}, timeout_s=0.5)
    return _BODIES


def _read(broker: Broker, end: int) -> list[bytes]:
    with broker.serve():
        location = Location.of(f"rocketmq://{broker.address}").reached_by(retry_timeout_s=10.0)
        with contextlib.closing(STORES.reader(location)) as reader:
            parts = reader.gather([Range("t", 0, 0, end)])
            return [body for part in parts for body in part.decoded(["body"])["body"].to_pylist()]


def holes(_folder: Path) -> list[bytes]:
    """A queue without one of its messages: that is an error."""
    broker = Broker()
    for number, body in enumerate([*_BODIES, b"behind"]):
        broker.put("t", 0, body, number=number + (number == len(_BODIES)))
    with contextlib.suppress(CorruptionError):
        _read(broker, len(_BODIES) + 1)
        raise AssertionError("the hole was read over")
    return _BODIES


def cut_pulls(_folder: Path) -> list[bytes]:
    """Connections break while several requests are under way."""
    broker = Broker()
    for body in [*_BODIES[:1], *([b"-"] * 300), *_BODIES[1:]]:
        broker.put("t", 0, body)
    pulls = [0]

    def meets(request: Frame) -> bytes | None:
        pulls[0] += request.code == codes.PULL_MESSAGE
        return b"" if request.code == codes.PULL_MESSAGE and pulls[0] % 5 == 0 else None

    broker.fault = meets
    found = _read(broker, 300 + len(_BODIES))
    assert found.count(b"-") == 300, f"{found.count(b'-')} of 300 rows were read"
    return [body for body in found if body != b"-"]


def _taken_for_stored(_real: Any) -> Any:
    """A request without an answer was stored."""

    def look_up(producer: Producer, line: Any, _wire: Any, _places: Any) -> None:
        producer._client.drop(line.address)
        del line.requests[0]

    return look_up


def _at_once(_real: Any) -> Any:
    """Look without an answer of the broker before."""

    def stored(producer: Producer, topic: str, places: Any, prefix: str) -> pa.Table:
        parts = [part for queue, place in places.items() for part in producer._stored(topic, queue, place, prefix)]
        return pa.concat_tables([keys_and_crcs(None), *parts])

    return stored


def _goes_on(_real: Any) -> Any:
    """After a connection broke, go on behind what was asked for last."""

    def fill(pull: Pull, address: str, position: int) -> None:
        while len(pull._asked) < 4 and pull._next < pull._span.end:
            end = min(pull._span.end, pull._next + pull._most)
            pull._asked.append(pull._sent(address, pull._next + (not pull._asked and position > 0), end))
            pull._next = end

    return fill


@contextlib.contextmanager
def _forgetful() -> Iterator[None]:
    """No attempt leaves a file with the queues' ends, and none finds one."""
    from pyspark_messagestore.sink.brokers import Ends

    with (
        mock.patch.object(Ends, "of", return_value=None),
        mock.patch.object(Ends, "write", return_value=None),
    ):
        yield


@contextlib.contextmanager
def _other_keys() -> Iterator[None]:
    """The keys of rows are other ones in each attempt."""
    from pyspark_messagestore.sink.unique_keys import UniqueKeys

    def made(_app: str, version: int, partition: int) -> UniqueKeys:
        return UniqueKeys(uuid.uuid4().hex, version, partition)

    with in_module("sink.brokers", "UniqueKeys", made)():
        yield


def _silenced(real: Any) -> Any:
    """What a broker does not have is left out without a word."""

    def checked(pull: Pull, first: int, end: int, bodies: Any) -> Any:
        with contextlib.suppress(CorruptionError):
            yield from real(pull, first, end, bodies)

    return checked


MUTANTS = (
    Mutant("a request without an answer is sent again unseen", without(Producer, "stored", keys_and_crcs(None)), "lost answers", _judged(lost_answers)),
    Mutant("a request without an answer counts as stored", patched(Producer, "_look_up", _taken_for_stored), "broken connections", _judged(broken_connections)),
    Mutant("a broker that stood still is not waited for", patched(Producer, "stored", _at_once), "brokers that stood still", _judged(a_broker_that_stood_still)),
    Mutant("a repeated task does not look for what it has sent", _forgetful, "repeated tasks", _judged(repeated_tasks)),
    Mutant("each attempt of a task gives its rows other keys", _other_keys, "repeated tasks", _judged(repeated_tasks)),
    Mutant("a connection that is silent is kept", without(Client, "drop"), "silent connections", _judged(silent_connections)),
    Mutant("a hole in a queue is left out silently", patched(Pull, "_checked", _silenced), "holes", _judged(holes)),
    Mutant("the source goes on behind the message that it missed", patched(Pull, "_fill", _goes_on), "cut pulls", _judged(cut_pulls)),
)  # fmt: skip
