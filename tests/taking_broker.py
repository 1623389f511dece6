"""A fake broker that takes batches of messages, and may lose its answers."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from fake_broker import CONFIG, Broker
from messagestore import MessageColumns
from messagestore.format.hosts import pack_host
from messagestore.format.record_columns import Rows, encode
from messagestore.remoting import codes
from messagestore.remoting.frames import Frame
from messagestore.spi import STORES, Location, Producer, Range
from remoting_peer import answer

HOST = pack_host("127.0.0.1:10911")
LOST = b""
"""What ends a connection, where an answer should be."""


def rows(bodies: list[bytes], topic: str = "t", **columns: object) -> Rows:
    """Encoded rows whose UNIQ_KEYs are their numbers."""
    keys = columns.pop("unique_key", pa.array([f"{number:032X}" for number in range(len(bodies))]))
    queue_id = columns.pop("queue_id", np.zeros(len(bodies), np.int32))
    messages = MessageColumns(topic, queue_id, pa.array(bodies, pa.binary()), unique_key=keys, **columns)  # type: ignore[arg-type]
    return encode(messages, limits=CONFIG, store_host=HOST, born_host=HOST)


def messages_of(body: bytes | memoryview) -> list[tuple[int, bytes, dict[str, str]]]:
    """Flag, body and properties of each message, as RocketMQ's MessageDecoder.decodeMessages reads them."""
    found, position = [], 0
    while position < len(body):
        size, magic, crc, flag, body_size = struct.unpack_from(">5i", body, position)
        assert (magic, crc) == (0, 0)
        text = bytes(body[position + 20 : position + 20 + body_size])
        (length,) = struct.unpack_from(">h", body, position + 20 + body_size)
        start = position + 22 + body_size
        assert start + length == position + size
        pairs = bytes(body[start : start + length]).decode().split("\x02")
        found.append((flag, text, dict(pair.split("\x01") for pair in pairs if pair)))
        position += size
    return found


class TakingBroker(Broker):
    """Takes the messages of a request into topic `t`, queue 0.

    Parameters
    ----------
    meets : function
        Called for each request. What it returns is sent instead of an answer; `LOST` ends the connection.
    """

    def __init__(self, meets: Callable[[TakingBroker, Frame], bytes | None] = lambda _broker, _request: None) -> None:
        super().__init__(queues={("t", 0): []}, fault=self._reply)
        self._meets = meets
        self.sends: list[list[bytes]] = []
        """The bodies of each request that came."""

    def _reply(self, request: Frame) -> bytes | None:
        if request.code == codes.SEND_BATCH_MESSAGE:
            self.sends.append([body for _, body, _ in messages_of(request.body)])
        met = self._meets(self, request)
        if met is not None or request.code != codes.SEND_BATCH_MESSAGE:
            return met
        return answer(request, fields={"queueOffset": str(self.take(request))})

    def take(self, request: Frame, count: int | None = None) -> int:
        """Store messages of a request; return the number of the first."""
        first = len(self.queues["t", 0])
        taken = messages_of(request.body)[:count]
        encoded = rows([body for _, body, _ in taken], unique_key=pa.array([own["UNIQ_KEY"] for _, _, own in taken]))
        for start, size in zip(encoded.starts[:-1].tolist(), encoded.sizes.tolist(), strict=True):
            self.put_record("t", 0, bytearray(encoded.data[start : start + size]), 1_700_000_000_000)
        return first

    @property
    def location(self) -> Location:
        return Location.of(f"rocketmq://{self.address}").reached_by(retry_timeout_s=5.0)

    def send(self, *bodies: bytes) -> int:
        """Send rows as a task does; return how many the producer says that the broker has."""
        with contextlib.closing(Producer(self.location, "group")) as producer:
            producer.send(rows([*bodies]), {"t": producer.target("t")})
            return producer.sent.rows

    def bodies(self) -> list[bytes]:
        """What is in the queue, in its order."""
        with contextlib.closing(STORES.reader(self.location)) as reader:
            parts = reader.gather([Range("t", 0, 0, len(self.queues["t", 0]))])
            return [body for part in parts for body in part.decoded(["body"])["body"].to_pylist()]
