"""The client of a cluster: what it repeats, what it refuses, and what name servers tell it."""

from __future__ import annotations

import os

import pytest

from messagestore import BrokerError, ConfigError, ProtocolError, StoreUnavailableError, UnknownTopicError
from messagestore.remoting import Client, RemotingSettings, codes
from messagestore.remoting.frames import Frame
from remoting_peer import Peer, answer, answering

ROUTE = (
    b'{"brokerDatas":[{"brokerAddrs":{0:"127.0.0.1:10911",2:"127.0.0.1:20911"},"brokerName":"broker-a",'
    b'"cluster":"DefaultCluster","enableActingMaster":false},{"brokerAddrs":{1:"[::1]:7"},"brokerName":"b,1:{2:3",'
    b'"cluster":"DefaultCluster"}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,'
    b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":8},{"brokerName":"b,1:{2:3","perm":4,"readQueueNums":1,'
    b'"topicSysFlag":0,"writeQueueNums":1}]}'
)
"""As a name server 5.3.3 writes it, except for the second broker's odd name."""
SHORT = RemotingSettings(retry_timeout_s=0.3)


def test_a_busy_broker_is_asked_again() -> None:
    asked: list[Frame] = []

    def busy(request: Frame) -> bytes:
        asked.append(request)
        return answer(
            request, codes.SUCCESS if len(asked) > 3 else codes.SYSTEM_BUSY, {"offset": "7"}, remark="[PCBUSY]"
        )

    with Peer(answering(busy)) as peer:
        client = Client("ns:1")
        assert client.request(peer.address, codes.GET_MAX_OFFSET, {}).number("offset") == 7
        client.close()
    assert len(asked) == 4
    assert peer.connection_count == 1


def test_a_request_that_must_not_be_repeated_is_sent_once() -> None:
    asked: list[Frame] = []

    def busy(request: Frame) -> bytes:
        asked.append(request)
        return answer(request, codes.SYSTEM_BUSY, remark="[PCBUSY] full")

    with Peer(answering(busy)) as peer:
        client = Client("ns:1")
        with pytest.raises(
            BrokerError, match=r"broker broker-a \(.*\) answered 2 SYSTEM_BUSY: \[PCBUSY\] full"
        ) as caught:
            client.request(peer.address, codes.SEND_MESSAGE_V2, {}, broker="broker-a", repeats=False)
        client.close()
    assert len(asked) == 1
    assert (caught.value.broker, caught.value.address, caught.value.code) == ("broker-a", peer.address, 2)


def test_a_refusal_is_not_repeated() -> None:
    asked: list[Frame] = []

    def refusing(request: Frame) -> bytes:
        asked.append(request)
        return answer(request, codes.NO_PERMISSION, remark="the topic is write only")

    with Peer(answering(refusing)) as peer:
        client = Client("ns:1")
        with pytest.raises(BrokerError, match="16 NO_PERMISSION: the topic is write only"):
            client.request(peer.address, codes.PULL_MESSAGE, {})
        assert client.request(peer.address, codes.PULL_MESSAGE, {}, accepts={codes.NO_PERMISSION}).code == 16
        client.close()
    assert len(asked) == 2


def test_a_broken_connection_is_made_again() -> None:
    asked: list[Frame] = []

    def breaking(request: Frame) -> bytes | None:
        asked.append(request)
        return None if len(asked) == 1 else answer(request)

    with Peer(answering(breaking)) as peer:
        client = Client("ns:1")
        assert client.request(peer.address, codes.GET_MAX_OFFSET, {}).code == codes.SUCCESS
        client.close()
    assert peer.connection_count == 2


@pytest.mark.parametrize("repeats", [True, False])
def test_a_connection_that_gives_no_answer_is_made_again(repeats: bool) -> None:
    """It may be dead without a word: the next request would wait in vain, too."""
    asked: list[Frame] = []

    def silent_at_first(request: Frame) -> bytes:
        asked.append(request)
        return answer(request, fields={"offset": "7"}) if peer.connection_count > 1 else b""

    with Peer(answering(silent_at_first)) as peer:
        client = Client("ns:1", RemotingSettings(retry_timeout_s=60))
        if not repeats:
            with pytest.raises(StoreUnavailableError, match="no answer within"):
                client.request(peer.address, codes.GET_MAX_OFFSET, {}, repeats=False, timeout_s=0.2)
        assert client.request(peer.address, codes.GET_MAX_OFFSET, {}, timeout_s=0.2).number("offset") == 7
        client.close()
    assert len(asked) >= 2
    assert peer.connection_count >= 2


def test_a_broker_that_says_go_away_is_connected_anew() -> None:
    asked: list[Frame] = []

    def going(request: Frame) -> bytes:
        asked.append(request)
        return answer(request, codes.GO_AWAY if len(asked) == 1 else codes.SUCCESS)

    with Peer(answering(going)) as peer:
        client = Client("ns:1")
        assert client.request(peer.address, codes.GET_MAX_OFFSET, {}).code == codes.SUCCESS
        client.close()
    assert peer.connection_count == 2


def test_the_time_for_repeating_ends() -> None:
    with Peer(answering(lambda request: answer(request, codes.SYSTEM_BUSY))) as peer:
        client = Client("ns:1", SHORT)
        with pytest.raises(BrokerError, match="2 SYSTEM_BUSY"):
            client.request(peer.address, codes.GET_MAX_OFFSET, {})
        client.close()


def test_a_route_with_numbers_as_keys_is_read() -> None:
    with Peer(answering(lambda request: answer(request, body=ROUTE))) as peer:
        client = Client(peer.address)
        route = client.route("flights")
        assert client.route("flights") is route, "it is asked for once in a while only"
        client.close()
    broker = route.brokers["broker-a"]
    assert (broker.master, broker.slaves, broker.cluster) == ("127.0.0.1:10911", ["127.0.0.1:20911"], "DefaultCluster")
    assert route.brokers["b,1:{2:3"].master is None
    queues = route.queues["broker-a"]
    assert (queues.read_queue_nums, queues.write_queue_nums, queues.is_writable) == (4, 8, True)
    assert not route.queues["b,1:{2:3"].is_writable


def test_a_second_name_server_answers_for_the_first() -> None:
    with Peer(answering(answer)) as gone:
        pass
    with Peer(answering(lambda request: answer(request, body=ROUTE))) as peer:
        client = Client(f"{gone.address};{peer.address}")
        assert set(client.route("flights").brokers) == {"broker-a", "b,1:{2:3"}
        client.close()


def test_no_name_server_answers() -> None:
    with Peer(answering(answer)) as gone:
        pass
    with pytest.raises(StoreUnavailableError, match=r"no name server answers: .*Connection refused.* Start one"):
        Client(gone.address, SHORT).route("flights")


def test_a_topic_without_a_broker_is_unknown() -> None:
    def unknown(request: Frame) -> bytes:
        return answer(request, codes.TOPIC_NOT_EXIST, remark="No topic route info in name server for the topic: x")

    with Peer(answering(unknown)) as peer:
        client = Client(peer.address)
        with pytest.raises(UnknownTopicError, match="know no broker with it"):
            client.route("x")
        client.close()


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"brokerDatas":null,"queueDatas":[]}', b"\xff", ROUTE[:-1]])
def test_a_route_that_cannot_be_read_is_an_error(body: bytes) -> None:
    with Peer(answering(lambda request: answer(request, body=body))) as peer:
        client = Client(peer.address)
        with pytest.raises(ProtocolError, match=peer.address):
            client.route("flights")
        client.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_connects_anew() -> None:
    """Two processes that read from one socket would take each other's answers."""
    with Peer(answering(lambda request: answer(request, fields=request.fields))) as peer:
        client = Client("ns:1")
        client.request(peer.address, codes.GET_MAX_OFFSET, {})
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if client.request(peer.address, codes.GET_MAX_OFFSET, {"n": 5}).number("n") == 5 else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.request(peer.address, codes.GET_MAX_OFFSET, {"n": 6}).number("n") == 6
        client.close()
    assert peer.connection_count == 2


@pytest.mark.parametrize("name_servers", ["", " ; ", "ns1", "ns1:9876;ns2"])
def test_name_servers_without_a_port_are_refused(name_servers: str) -> None:
    with pytest.raises(ConfigError):
        Client(name_servers)
