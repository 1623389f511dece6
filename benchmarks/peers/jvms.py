"""What has a JVM of its own in a race: the stores of RocketMQ (`StoreRace.java`) and of ActiveMQ (`KahaRace.java`), and
RocketMQ's clients beside a broker that runs (`LiveRace.java`).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.measure import Taken
from benchmarks.peers.databases import GROUP


class _Jvm:
    """One Java program that reads commands and answers them, a line each."""

    SOURCE: ClassVar[str]
    FLAGS: ClassVar[tuple[str, ...]] = ("-Xms1g", "-Xmx3g")

    def __init__(self, folder: Path, classpath: str, bodies: str) -> None:
        folder.mkdir(parents=True)
        self.folder, self.bodies, self.opened = folder, bodies, set[str]()
        self.log = folder / "java.log"
        source = str(Path(__file__).with_name(self.SOURCE))
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                ["java", *self.FLAGS, f"-Duser.home={folder}", "-cp", classpath, source],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                text=True,
                env={**os.environ, "HOME": str(folder)},
            )

    def call(self, op: str, **arguments: Any) -> Taken:
        answer = self.ask(op, **arguments)
        return Taken(answer.get("wall_s", 0.0), answer.get("cpu_s", 0.0))

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The whole answer to a command."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the JVM ended"}
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}; end of its log: {self.log.read_text(errors='replace')[-1500:]}")
        return answer

    def close(self) -> None:
        try:
            for name in self.opened:
                self.call("close", store=name)
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()


class RocketMq(_Jvm):
    """RocketMQ's store."""

    SOURCE = "StoreRace.java"
    FLAGS = (
        *_Jvm.FLAGS,
        "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
        "--add-opens=java.base/java.nio=ALL-UNNAMED",
        "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    )

    def store(self, name: str, flush: str) -> str:
        if name not in self.opened:
            self.call("open", store=name, root=str(self.folder / name), flush=flush)
            self.opened.add(name)
        return name

    def append(self, name: str, flush: str, count: int, batch: int) -> Taken:
        self.store(name, flush)
        return self.call("append", store=name, count=count, batch=batch, bodies=self.bodies)

    def read(self, count: int) -> Taken:
        if "read" not in self.opened:
            self.append("read", "ASYNC_FLUSH", count, GROUP)
        return self.call("read", store="read", count=count)

    def put(self, name: str, flush: str, count: int, threads: int) -> Taken:
        self.store(name, flush)
        return self.call("put", store=name, count=count, threads=threads, bodies=self.bodies)


class KahaDb(_Jvm):
    """ActiveMQ's store: a journal, and a B-tree of message ids."""

    SOURCE = "KahaRace.java"

    def store(self, name: str, sync: str) -> str:
        if name not in self.opened:
            self.call("open", store=name, root=str(self.folder / name), sync=sync)
            self.opened.add(name)
        return name

    def append(self, name: str, count: int) -> Taken:
        return self.call("append", store=self.store(name, "always"), count=count, batch=GROUP, bodies=self.bodies)

    def read(self, count: int) -> Taken:
        if "read" not in self.opened:
            self.append("read", count)
        return self.call("read", store="read", count=count)

    def put(self, name: str, sync: str, count: int) -> Taken:
        return self.call("put", store=self.store(name, sync), count=count, bodies=self.bodies)


class RocketMqClients(_Jvm):
    """RocketMQ's own producer and consumer of brokers that run."""

    SOURCE = "LiveRace.java"

    def __init__(self, folder: Path, classpath: str, names: str) -> None:
        super().__init__(folder, classpath, "")
        self.call("open", names=names)

    def close(self) -> None:
        self.opened.add("clients")  # the one thing that is closed before the end
        super().close()
