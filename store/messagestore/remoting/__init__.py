"""RocketMQ's remoting protocol: what a client says to name servers and brokers. Nothing of a store is known here.

    client = Client("ns1:9876;ns2:9876", RemotingSettings(credentials_file="..."))
    route = client.route("flights")                       # Route; UnknownTopicError if no broker has the topic
    broker = route.brokers["broker-a"]                    # Broker: its name, and its addresses by broker id
    answer = client.request(broker.master, codes.GET_MAX_OFFSET, {"topic": "flights", "queueId": 0})
    answer.fields["offset"], answer.body                  # the answer's header, and its body as a memoryview

`request` sends one request and returns its answer. It repeats the request while the broker is busy or the connection
breaks, until `retry_timeout_s` is over. With `repeats=False` it sends once, as a put must.

    calls = [client.send(broker.master, codes.PULL_MESSAGE, fields) for fields in many]   # all are under way
    answers = [call.answer() for call in calls]

`send` returns at once, and never repeats. `Call.answer(timeout_s)` waits for the answer, whatever its order.

`Call.answer` returns any answer. `request` returns those with the codes in `accepts` (`codes.SUCCESS` alone unless
others are named), and raises `BrokerError` for others, with the broker, its address, the code and the remark.
`StoreUnavailableError` says that nobody answered: the request may have been carried out, or not.

    client.close()

A client belongs to one process (a forked one connects again), and its methods may be called by several threads.

`frames` and `codes` are the bytes, `signing` the ACL, `connection` one socket, `routes` what name servers know, and
`client` puts them together.
"""

from messagestore.remoting import codes
from messagestore.remoting.client import Client
from messagestore.remoting.connection import Answer, Call
from messagestore.remoting.routes import Broker, QueueData, Route
from messagestore.remoting.settings import RemotingSettings

__all__ = ["Answer", "Broker", "Call", "Client", "QueueData", "RemotingSettings", "Route", "codes"]
