"""RocketMQ's own store, driven from Python: `Driver` is a JVM, `JavaStore` one store in it.

    driver = Driver("5.3.3", folder)
    with JavaStore(driver, root, config) as java:        # load and start; shutdown at the end
        java.put([single("t", b"body")])
        java.dump("t", 0)["messages"]

Many stores may be open in one JVM; `close(wait=False)` lets RocketMQ take its three seconds while others go on.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from interop import java_build
from messagestore import Message, StoreConfig

ANSWER_S = 120
_FLAGS = (
    "-Xmx512m",
    "-Xss512k",
    "-XX:+UseSerialGC",  # two cores, shared with the reader that is tested
    "-XX:TieredStopAtLevel=1",
    "-XX:MaxDirectMemorySize=768m",
    "-Duser.timezone=UTC",
    "-Dcom.rocketmq.remoting.client.logFileName=none",
    "-Dtls.server.mode=disabled",  # else each server that starts makes a certificate: two thirds of its processor time
    "-Drocketmq.client.rebalance.waitInterval=1000",  # consumers divide the queues anew each second, not each 20 s
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",  # TransientStorePool locks its buffers in memory
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",  # RocketMQ 4.9 lets go of its mappings there
)


class JavaError(AssertionError):
    """What the Java side threw, with the end of its log."""


class JavaGoneError(JavaError):
    """The JVM is no longer there."""


@dataclass
class Counts:
    """What the closing line of `make interop` says."""

    recipes: int = 0
    stores: int = 0
    messages: int = 0
    keys: int = 0
    renumbered: int = 0

    def add(self, other: Mapping[str, int]) -> None:
        for name, value in other.items():
            setattr(self, name, getattr(self, name) + value)


COUNTS = Counts()
VERSIONS_USED: set[str] = set()


class Driver:
    """One JVM.

    Parameters
    ----------
    version : str
        Of RocketMQ.
    folder : Path
        For its log.
    flags : sequence of str, optional
        More for its JVM.
    """

    def __init__(self, version: str, folder: Path, flags: Sequence[str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"java-{version}-{os.getpid()}-{next(_NUMBERS)}.log"
        classpath = java_build.classpath(version)
        if flags is None:
            is_newest = version == java_build.NEWEST
            flags = java_build.shared_classes("driver", classpath, _train) if is_newest else ()
        environment = {**os.environ, "HOME": str(folder)}  # RocketMQ's logs and defaults go below the home folder
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                ["java", *_FLAGS, *flags, f"-Duser.home={folder}", "-cp", classpath, "interop.Driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env=environment,
            )
        self._waiting: dict[int, Future[Any]] = {}
        self._mutex = threading.Lock()
        self._ids = itertools.count()
        self._reader = threading.Thread(target=self._read, name="java answers", daemon=True)
        self._reader.start()
        self.hello = self.call("hello")
        assert self.hello["rocketmq"] == version
        self.version = version
        VERSIONS_USED.add(f"{version} on Java {self.hello['java']}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, op: str, store: str | None = None, **arguments: Any) -> Future[Any]:
        """A command; the answer comes when it comes."""
        number, answer = next(self._ids), Future[Any]()
        command = {"id": number, "op": op, **arguments}
        if store is not None:
            command["store"] = store
        assert self.process.stdin is not None
        with self._mutex:
            self._waiting[number] = answer
            try:
                self.process.stdin.write(json.dumps(command).encode() + b"\n")
                self.process.stdin.flush()
            except OSError:  # the JVM is gone: the reader says so
                self._fail_all()
        return answer

    def call(self, op: str, store: str | None = None, **arguments: Any) -> Any:
        return self.send(op, store, **arguments).result(ANSWER_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            with self._mutex:
                future = self._waiting.pop(answer["id"])
            if "error" in answer:
                future.set_exception(JavaError(f"{answer['error']}\n--- end of {self.log}:\n{self.log_end()}"))
            else:
                future.set_result(answer["result"])
        with self._mutex:
            self._fail_all()

    def _fail_all(self) -> None:
        for future in self._waiting.values():
            future.set_exception(JavaGoneError(f"the JVM is gone; end of {self.log}:\n{self.log_end()}"))
        self._waiting.clear()

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """SIGKILL: the process is gone, with its lock; nothing is tidied up."""
        os.kill(self.pid, signal.SIGKILL)
        self._gone()

    def stop(self, wait_s: float = 20) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._gone()

    def _gone(self) -> None:
        self.process.wait(20)
        self._reader.join(20)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass


_NUMBERS = itertools.count()
_SMALL = StoreConfig(mapped_file_size_commit_log=1 << 20, max_hash_slot_num=100, max_index_num=400)


def _train(flags: Sequence[str]) -> None:
    """Have the classes loaded that most tests need."""
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(java_build.NEWEST, Path(folder), flags)
        with JavaStore(driver, Path(folder) / "store", java_config(_SMALL)) as store:
            store.put([single("t", b"x", keys=["k"]), batch("t", [single("t", b"y")])])
            store.dispatched()
            store.dump("t", 0)
            store.query("t", ["k"])
        driver.stop(ANSWER_S)


def java_config(config: StoreConfig, **settings: object) -> dict[str, object]:
    """The settings of a store of ours under Java's names, and more of them."""
    return {
        "mappedFileSizeCommitLog": config.mapped_file_size_commit_log,
        "mappedFileSizeConsumeQueue": config.mapped_file_size_consume_queue,
        "maxHashSlotNum": config.max_hash_slot_num,
        "maxIndexNum": config.max_index_num,
        "maxMessageSize": config.max_message_size,
        "messageIndexEnable": str(config.message_index_enable).lower(),
        "enabledAppendPropCRC": str(config.enabled_append_prop_crc).lower(),
        "flushDiskType": config.flush_disk_type,
        **settings,
    }


class JavaStore:
    """One DefaultMessageStore; see driver/src/main/java/interop/OpenStore.java for the commands."""

    def __init__(
        self,
        driver: Driver,
        root: Path | str,
        config: Mapping[str, object],
        topics: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.driver = driver
        self.root = Path(root)
        self.name = f"{self.root.name}-{next(_NUMBERS)}"
        self._arguments = {"root": str(root), "config": dict(config), "topics": dict(topics or {})}

    def _call(self, op: str, **arguments: Any) -> Any:
        return self.driver.call(op, self.name, **arguments)

    # ---- its life

    def open(self) -> JavaStore:
        self._call("open", **self._arguments)
        COUNTS.stores += 1
        return self

    def opening(self) -> Future[Any]:
        """Begin to open; the answer comes when it is open, or refused."""
        COUNTS.stores += 1
        return self.driver.send("open", self.name, **self._arguments)

    def make(self) -> JavaStore:
        """The constructor alone: `load` and `start` follow."""
        self._call("make", **self._arguments)
        return self

    def load(self) -> None:
        self._call("load")
        COUNTS.stores += 1

    def start(self) -> None:
        self._call("start")

    def close(self) -> None:
        self._call("close")

    def closing(self) -> Future[Any]:
        """Begin to close; the answer comes when all is done."""
        return self.driver.send("close", self.name)

    def forget(self) -> None:
        """Drop a store that was never started."""
        self._call("forget")

    def __enter__(self) -> JavaStore:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.driver.process.poll() is None:
            self.close()

    # ---- in

    def put(self, messages: Iterable[Mapping[str, Any]], pause_ms: int = 0) -> list[dict[str, Any]]:
        """Put singles and batches (`single`, `batch`), one after the other; with a pause each is dispatched before the
        next, and no two index files are made in one millisecond."""
        return self._call("put", messages=list(messages), pauseMs=pause_ms)

    def clock(self, ms: int) -> None:
        """Stop Java's clock at a time; -1 lets it run."""
        self._call("clock", ms=ms)

    def delete_topic(self, topic: str) -> int:
        return self._call("delete", topic=topic)

    def clean(self) -> int:
        """Let its retention run now: segments whose files are old enough go; where the log begins then."""
        return int(self._call("clean"))

    def dispatched(self) -> None:
        assert self._call("dispatched"), "what was put is not dispatched"

    def pump(self, **arguments: Any) -> None:
        self._call("pump", **arguments)

    def stop_pump(self) -> dict[str, Any]:
        """No more puts; what was put."""
        self._call("stop")
        return self.pumped(wait_ms=20_000)

    def pumped(self, wait_ms: int = 0) -> dict[str, Any]:
        return self._call("pumped", waitMs=wait_ms)

    # ---- out

    def get(self, topic: str, queue_id: int, queue_offset: int, count: int = 32) -> dict[str, Any]:
        return self.get_each(topic, queue_id, [(queue_offset, count)])[0]

    def get_each(self, topic: str, queue_id: int, at: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """One `getMessage` per (queue offset, count)."""
        return self._call("get", topic=topic, queueId=queue_id, at=list(at))

    def dump(self, topic: str, queue_id: int) -> dict[str, Any]:
        """Every message of a queue, with its ends."""
        found = self._call("dump", topic=topic, queueId=queue_id)
        COUNTS.messages += len(found["messages"])
        return found

    def dump_all(self, queues: Iterable[tuple[str, int]]) -> dict[tuple[str, int], dict[str, Any]]:
        """As `dump`, of many queues with one wait."""
        answers = {
            (topic, queue_id): self.driver.send("dump", self.name, topic=topic, queueId=queue_id)
            for topic, queue_id in queues
        }
        found = {key: answer.result(ANSWER_S) for key, answer in answers.items()}
        COUNTS.messages += sum(len(each["messages"]) for each in found.values())
        return found

    def bodies(self, topic: str, queue_id: int) -> list[bytes]:
        return [base64.b64decode(message["body"]) for message in self.dump(topic, queue_id)["messages"]]

    def look(self, physical_offset: int) -> dict[str, Any] | None:
        return self._call("look", physicalOffset=physical_offset)

    def looks(self, physical_offsets: Iterable[int]) -> list[dict[str, Any] | None]:
        """As `look`, for many offsets at once."""
        return self._call("looks", physicalOffsets=list(physical_offsets))

    def query(self, topic: str, keys: Sequence[str], count: int = 64) -> list[list[int]]:
        """Physical offsets per key, as Java finds them (it compares hashes only)."""
        COUNTS.keys += len(keys)
        return self._call("query", topic=topic, keys=list(keys), count=count)

    def times(self, topic: str, queue_id: int, times: Sequence[int]) -> list[list[int]]:
        """`[lower, upper]` queue offset per store time."""
        return self._call("times", topic=topic, queueId=queue_id, times=list(times))

    def ends(self, topic: str, queue_id: int) -> tuple[int, int]:
        found = self._call("ends", topic=topic, queueId=queue_id)
        return found["min"], found["max"]

    def log(self) -> dict[str, Any]:
        return self._call("log")


def pairs_of(message: Message, unique_key: str | None = None) -> list[list[str]]:
    """The properties of a message in the order in which this project writes them."""
    found = []
    if message.keys:
        found.append(["KEYS", " ".join(message.keys)])
    if unique_key:
        found.append(["UNIQ_KEY", unique_key])
    if message.tags:
        found.append(["TAGS", message.tags])
    if not message.wait_store_msg_ok:
        found.append(["WAIT", "false"])
    return [*found, *([name, value] for name, value in message.properties.items())]


def single(
    topic: str,
    body: bytes = b"",
    *,
    queue_id: int = 0,
    keys: Sequence[str] = (),
    tags: str | None = None,
    properties: Sequence[Sequence[str]] = (),
    **fields: Any,
) -> dict[str, Any]:
    """A message for `JavaStore.put`. `fields`: flag, sysFlag, born, bornHost, storeHost, reconsume, prepared, clock."""
    named = pairs_of(Message(topic, body, keys=keys, tags=tags))
    return {
        "topic": topic,
        "queueId": queue_id,
        "body": base64.b64encode(body).decode(),
        "properties": [*named, *(list(pair) for pair in properties)],
        "storeHost": "127.0.0.1:10911",
        **fields,
    }


def batch(topic: str, messages: Sequence[Mapping[str, Any]], *, queue_id: int = 0, **fields: Any) -> dict[str, Any]:
    """A MessageExtBatch of `single`s for `JavaStore.put`; topic, queue, hosts and times are the batch's own."""
    return {
        "topic": topic,
        "queueId": queue_id,
        "messages": list(messages),
        "storeHost": "127.0.0.1:10911",
        **fields,
    }


def of_message(
    message: Message, queue_id: int, store_host: str, unique_key: str | None = None, **fields: Any
) -> dict[str, Any]:
    """What our `put_message` would store, for Java."""
    return {
        **single(message.topic, message.body, queue_id=queue_id, properties=pairs_of(message, unique_key)),
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "born": message.born_timestamp_ms,
        "bornHost": message.born_host,
        "storeHost": store_host,
        "reconsume": message.reconsume_times,
        **fields,
    }
