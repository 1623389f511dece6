"""Encoded rows as what a broker is sent, and what becomes of a request without an answer."""

from __future__ import annotations

import contextlib

import numpy as np
import pyarrow as pa
import pytest

from fake_broker import NAME, Broker
from messagestore import UnknownTopicError
from messagestore.remoting import codes
from messagestore.remoting.frames import Frame
from messagestore.spi import Location, Producer, SendQueue, keys_and_crcs, sends
from remoting_peer import answer
from taking_broker import LOST, TakingBroker, messages_of, rows


@pytest.mark.parametrize("topic", ["t", "t" * 127])
def test_a_request_has_flag_body_and_properties_of_each_row(topic: str) -> None:
    bodies = [b"", b"one", b"x" * 300]
    encoded = rows(bodies, topic, tags=pa.array(["a", None, "ü"]), flag=np.array([7, -1, 0], np.int32))
    wire = sends._Wire.of(encoded)
    assert wire.keys(0, 3).to_pylist() == [f"{number:032X}" for number in range(3)]
    assert messages_of(wire.body(0, 3)) == [
        (7, b"", {"UNIQ_KEY": f"{0:032X}", "TAGS": "a"}),
        (-1, b"one", {"UNIQ_KEY": f"{1:032X}"}),
        (0, b"x" * 300, {"UNIQ_KEY": f"{2:032X}", "TAGS": "ü"}),
    ]
    assert messages_of(wire.body(1, 2)) == messages_of(wire.body(0, 3))[1:2]


def test_a_request_is_cut_where_it_becomes_too_large_or_the_time_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch has one time at which it was made, and a message that is larger than a request goes alone."""
    monkeypatch.setattr(sends, "REQUEST_SIZE", 1000)
    times = np.array([5, 5, 5, 5, 6, 6, 6], np.int64)
    encoded = rows([b"x" * 300] * 4 + [b"x" * 3000, b"y", b"z"], born_timestamp_ms=times)
    (run,) = encoded.runs()
    cuts = [tuple(request) for request in sends._Wire.of(encoded).requests(run)]
    assert cuts == [(0, 2), (2, 4), (4, 5), (5, 7)]


def test_keys_and_crcs_are_those_of_the_records() -> None:
    found = keys_and_crcs(rows([b"one", b""]))
    assert found["unique_key"].to_pylist() == [f"{0:032X}", f"{1:032X}"]
    assert found["body_crc"].to_pylist() == [0x7A6C86F1 & 0x7FFFFFFF, 0]
    assert keys_and_crcs(None).num_rows == 0


@pytest.mark.parametrize("answers", [1, 3])
def test_a_producer_waits_for_a_topic_that_no_name_server_knows_for_a_moment(answers: int) -> None:
    """Its brokers were killed, or the name server was started again. A topic that does not come is refused."""
    broker = Broker()
    broker.put("t", 0, b"x")
    left = [answers]

    def forgets(request: Frame) -> bytes | None:
        if request.code != codes.GET_ROUTEINFO_BY_TOPIC or not left[0]:
            return None
        left[0] -= 1
        return answer(request, codes.TOPIC_NOT_EXIST)

    broker.fault = forgets
    with broker.serve():
        location = Location.of(f"rocketmq://{broker.address}").reached_by(retry_timeout_s=5.0)
        with contextlib.closing(Producer(location, "group")) as producer:
            assert producer.target("t").places == {(NAME, 0): 1}
            left[0] = answers
            assert producer.begin("t", SendQueue(NAME, 0)) == 0
        impatient = contextlib.closing(Producer(location.reached_by(retry_timeout_s=0.3), "group"))
        with impatient as producer, pytest.raises(UnknownTopicError, match="missing"):
            producer.target("missing")


# ---- a request without an answer


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sends, "SETTLE_S", 0.05)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("stored", [0, 2, 3])
def test_what_was_stored_of_a_request_without_an_answer_is_not_sent_again(stored: int) -> None:
    def loses_the_first(broker: TakingBroker, request: Frame) -> bytes | None:
        if request.code != codes.SEND_BATCH_MESSAGE or len(broker.sends) > 1:
            return None
        if stored:
            broker.take(request, stored)
        return LOST

    broker = TakingBroker(loses_the_first)
    with broker.serve():
        assert broker.send(b"one", b"two", b"three") == 3
        assert broker.bodies() == [b"one", b"two", b"three"]
    assert broker.sends[1:] == ([[b"one", b"two", b"three"][stored:]] if stored < 3 else [])


@pytest.mark.usefixtures("hurry")
def test_a_broker_that_stood_still_stores_a_request_while_it_is_asked_what_it_has() -> None:
    """It was stopped and goes on: it answers the look-up beside the request that waited for it all the time."""
    waiting: list[Frame] = []

    def stands_still(broker: TakingBroker, request: Frame) -> bytes | None:
        if request.code == codes.SEND_BATCH_MESSAGE and len(broker.sends) == 1:
            waiting.append(request)
            return LOST
        if request.code == codes.GET_MAX_OFFSET and waiting:
            said = answer(request, fields={"offset": str(len(broker.queues["t", 0]))})
            broker.take(waiting.pop())
            return said
        return None

    broker = TakingBroker(stands_still)
    with broker.serve():
        assert broker.send(b"one", b"two") == 2
        assert broker.bodies() == [b"one", b"two"]
