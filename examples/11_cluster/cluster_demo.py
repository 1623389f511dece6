"""A demo of a store on another host: a Spark cluster that cannot see the store's disk writes to it, and reads from it.

    make cluster-demo                     all 336,776 flights
    make cluster-demo ARGS="--every 20"   every twentieth

A standalone master, two workers and the driver run on hosts of their own (network and mount namespaces), where an
empty folder covers the store. `messagestore serve` runs on the store's host, with a certificate and a file of tokens.
While two queries put flights into the store and read them back, the server is killed with SIGKILL and started again,
and later drained with SIGTERM and started again. At the end the store is read on its own host, and each flight is
counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "01_flights")]
import flights  # noqa: E402
import flights_afar  # noqa: E402
import spark_cluster  # noqa: E402

from messagestore import MessageStore  # noqa: E402

PORT = 18_556
DRAIN_S = 20


def make_certificate(server: Path, shared: Path, address: str) -> None:
    """A self-signed certificate for the server's address; clients trust it by its file."""
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 7 -subj /CN=messagestore"
    words += f" -addext subjectAltName=IP:{address}"
    subprocess.run(
        [*words.split(), "-keyout", str(server / "key.pem"), "-out", str(server / "cert.pem")],
        check=True,
        capture_output=True,
    )
    shutil.copy(server / "cert.pem", shared / "ca.pem")


def make_token(server: Path, shared: Path) -> None:
    """A token that may write; the server knows only its SHA-256."""
    token = secrets.token_urlsafe(32)
    (shared / "token").write_text(token)
    (server / "tokens").write_text(f"spark write {hashlib.sha256(token.encode()).hexdigest()}\n")


class Server:
    """`messagestore serve` on the store's host."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.store, self.address = folder, folder / "store", address
        self.url = f"https://{address}:{PORT}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; clients wait until it is ready."""
        command = [sys.executable, "-m", "pyspark_messagestore.command", "serve", str(self.store), "--create"]
        command += ["--listen", f"{self.address}:{PORT}", "--drain", f"{DRAIN_S}s"]
        command += ["--cert-file", str(self.folder / "cert.pem"), "--key-file", str(self.folder / "key.pem")]
        command += ["--token-file", str(self.folder / "tokens")]
        with open(self.folder / "serve.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def end(self, how: signal.Signals) -> int:
        """End it; returns its exit code."""
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait()


def stored(store: Path, topics: tuple[str, ...] = flights.TOPICS) -> int:
    """How many messages of some topics a reader on the store's host sees."""
    if not (store / "spark" / "store.json").exists():
        return 0
    with MessageStore.open_read_only(store) as view:
        return sum(view.max_offset(topic, queue) for topic in topics for queue in view.topics().get(topic, []))


def ids(store: Path, topics: tuple[str, ...]) -> Counter[int]:
    """The number of each flight in some topics, and how often it is there."""
    with MessageStore.open_read_only(store) as view:
        bodies = view.scan(topics, columns=["body"]).read_all().column("body")
        return Counter(json.loads(body)["id"] for body in bodies.to_pylist())


def run(root: Path, every: int, *, apart: bool) -> int:
    """Run the demo; returns the exit code."""
    address = spark_cluster.outer_address(apart=apart)
    clock = flights.Clock()
    server_folder, shared = root / "server", root / "shared"
    for folder in (server_folder, shared):
        folder.mkdir(parents=True)
    count = flights.prepare(shared / "months", every)
    make_certificate(server_folder, shared, address)
    make_token(server_folder, shared)
    clock.say(f"{count:,} flights are ready")

    server = Server(server_folder, address)
    with spark_cluster.Cluster(root / "spark", hidden=server_folder, apart=apart) as cluster:
        seen = cluster.popen(["ls", "-A", str(server_folder)], stdout=subprocess.PIPE)
        listing, _ = seen.communicate()
        clock.say(f"the cluster is up; on the driver's host the store's folder holds {len(listing.split())} files")

        server.start()
        with open(root / "spark" / "driver.log", "ab") as log:
            job = cluster.popen(
                [sys.executable, str(HERE / "flights_afar.py"), cluster.master, server.url, str(shared)],
                stdout=log,
                stderr=log,
                env=cluster.environment("driver"),
            )
        try:
            for share, how in ((1 / 4, signal.SIGKILL), (1 / 2, signal.SIGTERM)):
                while (visible := stored(server.store)) < count * share and job.poll() is None:
                    time.sleep(0.05)
                code = server.end(how)
                clock.say(f"{visible:,} flights are stored; {how.name} to the server, which ended with {code}")
                time.sleep(1)  # clients meet a closed port
                server.start()
            code = job.wait()
        finally:
            job.kill()
            job.wait()
        clock.say(f"the job ended with {code}")
        drained = server.end(signal.SIGTERM)
    clock.say(f"SIGTERM to the server, which ended with {drained}; the store is read on its own host")

    if code != 0:
        print((root / "spark" / "driver.log").read_text(errors="replace")[-3000:])
        return 1
    flown = ids(server.store, flights.TOPICS)
    late = ids(server.store, (flights_afar.LATE,))
    expected = late_flights(shared / "months")
    print(
        f"\n{count:,} flights in, {flown.total():,} in the store, {len(flown):,} different ones; {len(expected):,} "
        f"late flights, {late.total():,} in the topic {flights_afar.LATE}, {len(late):,} different ones"
    )
    good = flown == Counter(range(count)) and late == Counter(expected) and drained == 0
    print("PROVED: each flight once, in and out" if good else "NOT PROVED: the counts above do not agree")
    return 0 if good else 1


def late_flights(months: Path) -> list[int]:
    """The numbers of the flights that left over an hour late, from the CSV files."""
    import csv

    numbers = []
    for path in sorted(months.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            numbers += [int(row[0]) for row in csv.reader(file) if row[6] and int(row[6]) > flights_afar.MINUTES]
    return numbers


def main() -> int:
    """Parse the arguments and run the demo."""
    parser = argparse.ArgumentParser(description="Flights into a store on another host, and out of it, by a cluster.")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th flight")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the store and the logs")
    arguments = parser.parse_args()
    reason = spark_cluster.in_namespaces()
    if reason is not None:
        print(f"NOT SHOWN HERE: that no process of Spark sees the store's disk, for {reason}")

    root = Path(tempfile.mkdtemp(prefix="messagestore-cluster-"))
    try:
        return run(root, arguments.every, apart=reason is None)
    finally:
        if arguments.keep:
            print(f"the store and the logs: {root}")
        else:
            shutil.rmtree(root)


if __name__ == "__main__":
    sys.exit(main())
