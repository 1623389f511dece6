"""A standalone Spark cluster on one machine, whose processes cannot see a folder of that machine.

Each of its hosts is a network namespace with an address of its own, and a mount namespace in which an empty tmpfs
covers the hidden folder. `in_namespaces` puts the calling program into a namespace that contains them all, so nothing
is left behind when that program ends, however it ends.

    why_not = spark_cluster.in_namespaces()         # first: starts this program again, as root of its own namespaces
    with Cluster(folder, hidden=folder / "server", apart=why_not is None) as cluster:
        cluster.popen(["python", "job.py", cluster.master])     # on the driver's host

Where namespaces are not allowed, all hosts are this one, and nothing is hidden.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NETWORK = "10.77.0"
_INSIDE = "MESSAGESTORE_CLUSTER_INSIDE"
_PORT = 7077
_START_S = 120.0


def why_not() -> str | None:
    """Why namespaces cannot be used here; None if they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2")):
        if shutil.which(tool) is None:
            return f"there is no {tool}: apt-get install {package}"
    done = subprocess.run([*_UNSHARE, *_PROBE], check=False, capture_output=True, text=True)
    return None if done.returncode == 0 else f"namespaces are not allowed here: {done.stderr.strip()}"


_UNSHARE = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
_PROBE = ["ip", "link", "add", "br0", "type", "bridge"]


def in_namespaces() -> str | None:
    """Start this program again in namespaces of its own, unless it is in them; it returns None there.

    Where that cannot be done, it returns the reason.
    """
    reason = None
    if _INSIDE not in os.environ:
        reason = why_not()
        if reason is None:
            sys.stdout.flush()
            command = [*_UNSHARE, sys.executable, *sys.argv]
            os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})
    return reason


def outer_address(*, apart: bool) -> str:
    """The address of the host that sees everything, where a store's server listens."""
    return f"{_NETWORK}.1" if apart else "127.0.0.1"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace of the network and of mounts."""

    name: str
    address: str


class Cluster:
    """A master, some workers with one core each, and the driver's host.

    Parameters
    ----------
    folder : Path
        Where the processes keep their logs and their work; every host sees it.
    hidden : Path
        The folder in whose place the hosts of the cluster see an empty one.
    workers : int
    apart : bool
        False: all hosts are this one, and nothing is hidden.

    Attributes
    ----------
    outer : str
        The address of the host that sees everything.
    """

    def __init__(self, folder: Path, hidden: Path, workers: int = 2, *, apart: bool = True) -> None:
        self.folder, self.hidden, self.apart = folder, hidden, apart
        self.outer = outer_address(apart=apart)
        names = ["driver", "master", *(f"worker-{i + 1}" for i in range(workers))]
        addresses = [f"{_NETWORK}.{i + 2}" if apart else self.outer for i in range(len(names))]
        self.hosts = {name: Host(name, address) for name, address in zip(names, addresses, strict=True)}
        self.master = f"spark://{self.hosts['master'].address}:{_PORT}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.apart:
            self._connect()
        try:
            master = self.hosts["master"].address
            self._daemon("master", "Master", "--host", master, "--port", str(_PORT), "--webui-port", "0")
            self._await_port(master, _PORT)
            for name in [name for name in self.hosts if name.startswith("worker")]:
                work = self.folder / name
                options = ["--host", self.hosts[name].address, "--cores", "1", "--memory", "1g"]
                self._daemon(name, "Worker", *options, "--work-dir", str(work), self.master)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _connect(self) -> None:
        """A bridge, and each host on it."""
        _run("mount", "--make-rprivate", "/")
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")
        Path("/run/netns").mkdir()
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "br0", "type", "bridge")
        _run("ip", "address", "add", f"{self.outer}/24", "dev", "br0")
        _run("ip", "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts.values()):
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _run("ip", "link", "set", f"v{number}", "master", "br0", "up")
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", host.name, "link", "set", "eth0", "up")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")

    def popen(self, command: Sequence[str], host: str = "driver", **settings: Any) -> subprocess.Popen[bytes]:
        """A process on a host, which sees an empty folder in place of the hidden one."""
        if not self.apart:
            return subprocess.Popen(command, **settings)
        cover = f'mount -t tmpfs -o ro tmpfs "{self.hidden}" && exec "$@"'
        return subprocess.Popen(["ip", "netns", "exec", host, "sh", "-c", cover, "sh", *command], **settings)

    def environment(self, host: str) -> Mapping[str, str]:
        """What Spark's processes on a host must know."""
        return {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": self.hosts[host].address,
            "SPARK_LOCAL_HOSTNAME": self.hosts[host].address,
        }

    def _daemon(self, host: str, kind: str, *arguments: str) -> None:
        import pyspark

        start = Path(pyspark.__path__[0], "bin", "spark-class")
        command = ["bash", str(start), f"org.apache.spark.deploy.{kind.lower()}.{kind}", *arguments]
        environment = {**self.environment(host), "SPARK_DAEMON_MEMORY": "384m"}
        with open(self.folder / f"{host}.log", "ab") as log:
            self._processes.append(self.popen(command, host, stdout=log, stderr=log, env=environment))

    def _await_port(self, address: str, port: int) -> None:
        until_s = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection((address, port), 1).close()
            except OSError:
                if time.monotonic() > until_s or any(process.poll() is not None for process in self._processes):
                    raise RuntimeError(f"Spark's master does not start: see {self.folder}/master.log") from None
                time.sleep(0.1)
            else:
                return

    def stop(self) -> None:
        """End the processes of the cluster."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
