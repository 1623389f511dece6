"""A Kafka broker of its own: one node in KRaft mode on loopback, in a folder that is given."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import ports

_START_S = 120
_STOP_S = 60
_FLAGS = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
"""As Kafka's own start script has them."""
QUEUE_COUNT = 8
PATIENCE = {"kafka.max.block.ms": "5000", "kafka.delivery.timeout.ms": "900000"}
"""For tests: a topic that does not exist is told soon, and a broker that this machine has no time for is waited for."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker that runs."""

    servers: str
    pid: int


def _properties(folder: Path, port: int, controller_port: int) -> dict[str, object]:
    return {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": folder / "data",
        "num.partitions": QUEUE_COUNT,
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "log.segment.delete.delay.ms": 1000,
    }


@contextmanager
def running(classpath: str, folder: Path) -> Iterator[Broker]:
    """A broker, until the block ends; its data stay in the folder.

    Raises
    ------
    RuntimeError
        It cannot be started; the message has the end of its log.
    """
    folder.mkdir(parents=True)
    port = ports.reserve(2)
    controller_port = port + 1
    settings, log = folder / "server.properties", folder / "broker.log"
    lines = (f"{name}={value}" for name, value in _properties(folder, port, controller_port).items())
    settings.write_text("\n".join(lines) + "\n")
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    environment = {**os.environ, "HOME": str(folder)}
    environment.pop("JDK_JAVA_OPTIONS", None)  # flags for another JVM, as the tests of Spark set them
    java = ["java", "-cp", classpath]
    format_ = [*java, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "--config", str(settings)]
    done = subprocess.run(format_, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    if done.returncode:
        raise RuntimeError(f"the Kafka broker's storage cannot be made: {(done.stdout + done.stderr)[-1000:]}")
    with open(log, "wb") as output:
        process = subprocess.Popen(
            ["java", *_FLAGS, "-cp", classpath, "kafka.Kafka", str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment,
        )
    try:
        _wait(process, port, log)
        yield Broker(f"127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def create_topic(jvm: Any, servers: str, name: str) -> None:
    """Create a topic with the broker's number of partitions, through a JVM with Kafka's client."""
    empty = jvm.java.util.Optional.empty()
    topics = jvm.java.util.Collections.singleton(jvm.org.apache.kafka.clients.admin.NewTopic(name, empty, empty))
    with _admin(jvm, servers) as admin:
        admin.createTopics(topics).all().get()


def delete_topic(jvm: Any, servers: str, name: str) -> None:
    """Delete a topic; the broker deletes its files a second later."""
    with _admin(jvm, servers) as admin:
        admin.deleteTopics(jvm.java.util.Collections.singleton(name)).all().get()


@contextmanager
def _admin(jvm: Any, servers: str) -> Iterator[Any]:
    properties = jvm.java.util.Properties()
    properties.put("bootstrap.servers", servers)
    admin = jvm.org.apache.kafka.clients.admin.Admin.create(properties)
    try:
        yield admin
    finally:
        admin.close()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"the Kafka broker does not answer: {log.read_text(errors='replace')[-1000:]}")
