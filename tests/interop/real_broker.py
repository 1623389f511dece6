"""A whole RocketMQ broker in a process of its own: `BrokerStartup` with a `broker.conf`; a name server, and mqadmin.

A broker needs no driver of ours, so any version that Maven has can run (`need_broker`).

with RealBroker("5.3.3", folder, root) as broker:    # "boot success"; a clean shutdown at the end
    ...
with NameServer("5.3.3", folder) as names, RealBroker("5.3.3", folder, root, names):
    names.mqadmin("topicList")                       # what it prints
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.peers import ports

from interop import java_build
from interop.java_store import _FLAGS as FLAGS

START_S = 90
BROKERS = ("5.5.0", java_build.NEWEST, java_build.OLDER, "5.0.0", java_build.LEGACY)
"""The brokers that take stores over from us, and give them back."""
_LOGBACK = '<configuration><root level="ERROR"/></configuration>'
"""RocketMQ 4.9 and 5.0 do not start without a file that says what to log."""
CONF = """\
brokerClusterName=DefaultCluster
brokerName=broker-a
brokerId=0
deleteWhen=04
fileReservedTime=48
brokerRole=ASYNC_MASTER
flushDiskType=ASYNC_FLUSH
namesrvAddr={name_server}
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


_FLAGS_OF_A_BROKER = tuple(flag for flag in FLAGS if "LogFileName" not in flag)


def flags_of(version: str) -> tuple[str, ...]:
    """Of the JVM of a server or mqadmin."""
    if version != java_build.NEWEST:
        return _FLAGS_OF_A_BROKER
    return (*_FLAGS_OF_A_BROKER, *java_build.shared_classes("server", java_build.tools_classpath(version), _train))


def _train(flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RealBroker(java_build.NEWEST, folder, folder / "store", flags=(*_FLAGS_OF_A_BROKER, *flags)):
            pass


class Server:
    """A program of RocketMQ in a process of its own."""

    WORDS = "boot success"
    is_killed = False
    """How a `with` ends it, for what leaves nothing that is read: a broker takes ten seconds for a clean shutdown."""

    def __init__(self, folder: Path, log: str, *command: str, flags: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{log}-{time.monotonic_ns()}.log"
        self._folder = folder
        self._environment = {**os.environ, "HOME": str(folder), "ROCKETMQ_HOME": str(folder)}
        self._command = ["java", *flags, f"-Duser.home={folder}", *command]
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> Self:
        """Start, and do not wait."""
        with open(self.log, "wb") as log:  # what an earlier start has said is no answer to `wait`
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self._folder, env=self._environment
            )
        return self

    def wait(self) -> Self:
        """Until it serves."""
        assert self.process is not None
        until_s = time.monotonic() + START_S
        while self.WORDS not in (text := self.log.read_text(errors="replace")):
            assert self.process.poll() is None, f"the program ended: {text[-2000:]}"
            assert time.monotonic() < until_s, f"the program does not start: {text[-2000:]}"
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

    def kill(self) -> None:
        """SIGKILL: it ends without notice. `begin` starts it again, on its store and its port."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        try:
            return self.begin().wait()
        except BaseException:  # nobody else would end it
            self.kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_killed:
            self.kill()
        else:
            self.stop()


class NameServer(Server):
    """A name server, and mqadmin that asks it."""

    WORDS = "The Name Server boot success"
    is_killed = True

    def __init__(self, version: str, folder: Path, *, more: str = "") -> None:
        """`more` has further lines for its configuration."""
        self._address = f"127.0.0.1:{ports.reserve()}"
        self._jars = java_build.tools_classpath(version)
        folder.mkdir(parents=True, exist_ok=True)
        conf = folder / "namesrv.conf"
        conf.write_text(f"listenPort={self._address.rpartition(':')[2]}\n{more}")
        self._flags = flags_of(version)
        start = "org.apache.rocketmq.namesrv.NamesrvStartup"
        super().__init__(folder, "namesrv", "-cp", self._jars, start, "-c", str(conf), flags=self._flags)

    def __str__(self) -> str:
        return self._address

    def mqadmin(self, command: str, *args: str) -> str:
        """What a command prints, its errors included."""
        program = ["-cp", self._jars, "org.apache.rocketmq.tools.command.MQAdminStartup"]
        done = subprocess.run(
            ["java", *self._flags, *program, command, "-n", str(self), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
            check=False,
            cwd=self._folder,
            env=self._environment,
        )
        return done.stdout


class RealBroker(Server):
    """One start of a broker on a store, known to a name server if one is given."""

    def __init__(
        self,
        version: str,
        folder: Path,
        root: Path,
        name_server: NameServer | None = None,
        *,
        more: str = "",
        flags: Sequence[str] | None = None,
    ) -> None:
        """`more` has further lines for its `broker.conf`; `flags` are those of its JVM."""
        folder.mkdir(parents=True, exist_ok=True)
        self.conf = folder / "broker.conf"
        self.port = ports.reserve(4) + 2  # a broker also listens on the second port below it, and on the one above
        conf = CONF.format(port=self.port, root=root, name_server=name_server or "127.0.0.1:1")
        self.conf.write_text(conf + more)
        (folder / "conf").mkdir(exist_ok=True)
        (folder / "conf" / "logback_broker.xml").write_text(_LOGBACK)
        jars = java_build.tools_classpath(version)
        start = "org.apache.rocketmq.broker.BrokerStartup"
        given = flags_of(version) if flags is None else flags
        super().__init__(folder, "broker", "-cp", jars, start, "-c", str(self.conf), flags=given)
