"""A name server and a broker in one, with messages in memory and faults as a test says. It answers what readers ask."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host
from messagestore.format.message import Message
from messagestore.format.record import decode_message, encode_message, stamp_record
from messagestore.remoting import codes
from messagestore.remoting.frames import Frame
from remoting_peer import Peer, answer, read_frame

NAME = "broker-a"
CONFIG = StoreConfig()
MOST_MESSAGES = 32


@dataclass
class Broker:
    """What a broker has. Its queues hold `(queue offset in the record, bytes)`, from offset 0 on."""

    queues: dict[tuple[str, int], list[bytes]] = field(default_factory=dict)
    begins: dict[tuple[str, int], int] = field(default_factory=dict)
    log_size: int = 0
    log: dict[int, bytes] = field(default_factory=dict)
    asked: list[Frame] = field(default_factory=list)
    fault: Callable[[Frame], bytes | None] | None = None
    """Called for each request; what it returns is sent instead of the answer."""
    groups: dict[tuple[str, str, int], int] = field(default_factory=dict)
    name: str = NAME
    others: list[Broker] = field(default_factory=list)
    """More brokers, which this one knows as a name server."""
    slave: Broker | None = None
    keeps: bool = True
    """Whether it keeps pulls that may be kept until there is a message."""
    kept: list[tuple[socket.socket, Frame]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def put(
        self,
        topic: str,
        queue_id: int,
        body: bytes,
        time_ms: int = 1_700_000_000_000,
        number: int | None = None,
        unique_key: str | None = None,
        **more: object,
    ) -> None:
        message = Message(topic, body, born_timestamp_ms=time_ms, **more)
        host = pack_host("127.0.0.1:10911")
        record = encode_message(message, queue_id=queue_id, store_host=host, limits=CONFIG, unique_key=unique_key)
        self.put_record(topic, queue_id, record, time_ms, number)

    def put_record(self, topic: str, queue_id: int, record: bytearray, time_ms: int, number: int | None = None) -> None:
        queue = self.queues.setdefault((topic, queue_id), [])
        stamp_record(record, len(queue) if number is None else number, self.log_size, time_ms)
        with self.lock:
            queue.append(bytes(record))
            self.log[self.log_size] = bytes(record)
            self.log_size += len(record)
            self.answer_kept(lambda request: int(request.fields["queueOffset"]) < len(queue), topic, queue_id)

    def answer_kept(self, is_due: Callable[[Frame], bool], topic: str, queue_id: int) -> None:
        """Answer the pulls of a queue that were kept, and that are due."""
        for connection, request in list(self.kept):
            if (request.fields["topic"], int(request.fields["queueId"])) == (topic, queue_id) and is_due(request):
                self.kept.remove((connection, request))
                with contextlib.suppress(OSError):  # the client went
                    connection.sendall(self._pulled(request, self.queues[topic, queue_id], 0))

    def _serve(self, connection: socket.socket) -> None:
        while (request := read_frame(connection)) is not None:
            data = self.reply(request, connection)
            if data is None:
                return
            with self.lock:
                connection.sendall(data)

    def _is_kept(self, request: Frame) -> bool:
        fields = request.fields
        if not self.keeps or request.code != codes.PULL_MESSAGE or not int(fields["sysFlag"]) & 2:
            return False
        return int(fields["queueOffset"]) == len(self.queues.get((fields["topic"], int(fields["queueId"])), []))

    def reply(self, request: Frame, connection: socket.socket | None = None) -> bytes | None:
        self.asked.append(request)
        if self.fault is not None:
            data = self.fault(request)
            if data is not None:
                return data or None
        with self.lock:
            if connection is not None and self._is_kept(request):
                self.kept.append((connection, request))
                return b""
        fields = request.fields
        queue = (fields.get("topic", ""), int(fields.get("queueId", 0)))
        records, begin = self.queues.get(queue, []), self.begins.get(queue, 0)
        if request.code == codes.PULL_MESSAGE:
            return self._pulled(request, records, begin)
        if request.code == codes.GET_MAX_OFFSET:
            return answer(request, fields={"offset": str(len(records))})
        if request.code == codes.GET_MIN_OFFSET:
            return answer(request, fields={"offset": str(begin)})
        if request.code == codes.SEARCH_OFFSET_BY_TIMESTAMP:
            return answer(request, fields={"offset": str(max(0, len(records) - 1))})  # as odd as a broker may be
        if request.code == codes.VIEW_MESSAGE_BY_ID:
            record = self.log.get(int(fields["offset"]))
            return answer(request, codes.SYSTEM_ERROR) if record is None else answer(request, body=record)
        if request.code == codes.QUERY_MESSAGE:
            return self._queried(request)
        if request.code == codes.UPDATE_CONSUMER_OFFSET:
            self.groups[fields["consumerGroup"], *queue] = int(fields["commitOffset"])
            return answer(request)
        if request.code == codes.QUERY_CONSUMER_OFFSET:
            offset = self.groups.get((fields["consumerGroup"], *queue))
            if offset is None:
                return answer(request, codes.QUERY_NOT_FOUND)
            return answer(request, fields={"offset": str(offset)})
        if request.code == codes.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            names = {topic for broker in (self, *self.others) for topic, _ in broker.queues}
            return answer(request, body=json.dumps({"topicList": sorted(names)}).encode())
        if request.code == codes.GET_BROKER_CLUSTER_INFO:
            rows = {broker.name: broker.row() for broker in (self, *self.others)}
            return answer(request, body=json.dumps({"brokerAddrTable": rows}).encode())
        if request.code == codes.GET_ROUTEINFO_BY_TOPIC:
            owners = [broker for broker in (self, *self.others) if broker.queue_count(queue[0])]
            if not owners:
                return answer(request, codes.TOPIC_NOT_EXIST)
            rows = [broker.queue_row(queue[0]) for broker in owners]
            route = {"brokerDatas": [broker.row() for broker in owners], "queueDatas": rows}
            return answer(request, body=json.dumps(route).encode())
        return answer(request, codes.REQUEST_CODE_NOT_SUPPORTED)

    def queue_count(self, topic: str) -> int:
        return len([1 for name, _ in self.queues if name == topic])

    def queue_row(self, topic: str) -> dict[str, object]:
        count = self.queue_count(topic)
        return {"brokerName": self.name, "perm": 6, "readQueueNums": count, "writeQueueNums": count}

    def row(self) -> dict[str, object]:
        addresses = {"0": self.address} | ({} if self.slave is None else {"1": self.slave.address})
        return {"brokerName": self.name, "cluster": "c", "brokerAddrs": addresses}

    def _pulled(self, request: Frame, records: list[bytes], begin: int) -> bytes:
        start, most = int(request.fields["queueOffset"]), int(request.fields["maxMsgNums"])
        bounds = {"minOffset": str(begin), "maxOffset": str(len(records))}
        if start < begin:
            return answer(request, codes.PULL_OFFSET_MOVED, {**bounds, "nextBeginOffset": str(begin)})
        if start >= len(records):
            return answer(request, codes.PULL_OFFSET_MOVED, {**bounds, "nextBeginOffset": str(len(records))})
        part = records[start : start + min(most, MOST_MESSAGES)]
        fields = {**bounds, "nextBeginOffset": str(start + len(part)), "suggestWhichBrokerId": "0"}
        return answer(request, codes.SUCCESS, fields, b"".join(part))

    def _queried(self, request: Frame) -> bytes:
        """As an index: the newest first, by whole seconds, and all whose key has the hash, which is its first letter."""
        fields, found = request.fields, list[bytes]()
        unique, bounds = (
            fields["_UNIQUE_KEY_QUERY"] == "true",
            (int(fields["beginTimestamp"]), int(fields["endTimestamp"])),
        )
        for _, record in sorted(self.log.items(), reverse=True):
            message = decode_message(record)
            keys = [message.unique_key or ""] if unique else message.keys
            is_hit = message.topic == fields["topic"] and any(key[:1] == fields["key"][:1] for key in keys)
            if is_hit and bounds[0] <= message.store_timestamp_ms // 1000 * 1000 <= bounds[1]:
                found.append(record)
        if not found:
            return answer(request, codes.QUERY_NOT_FOUND)
        return answer(request, body=b"".join(reversed(found[: min(64, int(fields["maxNum"]))])))

    def serve(self, tls: ssl.SSLContext | None = None) -> Peer:
        """A server on a free port; `address` is its own from then on."""
        peer = Peer(self._serve, tls=tls)
        self.address = peer.address
        return peer
