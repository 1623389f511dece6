"""A whole RocketMQ broker in a process of its own: `BrokerStartup` with a `broker.conf`, and without a name server.

with RealBroker("5.3.3", folder, root) as broker:    # "boot success"; a clean shutdown at the end
    ...
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

from interop import java_build
from interop.java_store import _FLAGS as FLAGS

START_S = 90
CONF = """\
brokerClusterName=DefaultCluster
brokerName=broker-a
brokerId=0
deleteWhen=04
fileReservedTime=48
brokerRole=ASYNC_MASTER
flushDiskType=ASYNC_FLUSH
namesrvAddr=127.0.0.1:1
brokerIP1=127.0.0.1
listenPort={port}
storePathRootDir={root}
storePathCommitLog={root}/commitlog
mappedFileSizeCommitLog=1048576
mappedFileSizeConsumeQueue=6000
maxHashSlotNum=1000
maxIndexNum=4000
mappedFileSizeTimerLog=1048576
timerWheelEnable=false
"""


def free_port() -> int:
    """Of three in a row that a broker takes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class RealBroker:
    """One start of a broker on a store."""

    def __init__(self, version: str, folder: Path, root: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.conf, self.log = folder / "broker.conf", folder / f"broker-{time.monotonic_ns()}.log"
        self.conf.write_text(CONF.format(port=free_port(), root=root))
        self._command = [
            "java", *_FLAGS_OF_A_BROKER, f"-Duser.home={folder}", "-cp", java_build.classpath(version),
            "org.apache.rocketmq.broker.BrokerStartup", "-c", str(self.conf),
        ]  # fmt: skip
        self._environment = {**os.environ, "HOME": str(folder), "ROCKETMQ_HOME": str(folder)}
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> RealBroker:
        """Start, and do not wait."""
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self._folder, env=self._environment
            )
        return self

    def wait(self) -> RealBroker:
        """Until it serves."""
        assert self.process is not None
        until_s = time.monotonic() + START_S
        while "boot success" not in (text := self.log.read_text(errors="replace")):
            assert self.process.poll() is None, f"the broker ended: {text[-2000:]}"
            assert time.monotonic() < until_s, f"the broker does not start: {text[-2000:]}"
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """SIGTERM: a clean shutdown."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise

    def __enter__(self) -> RealBroker:
        return self.begin().wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


_FLAGS_OF_A_BROKER = tuple(flag for flag in FLAGS if "LogFileName" not in flag)
