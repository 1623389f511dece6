"""A demo of Spark beside a RocketMQ cluster that runs: from topic to topic, while one of its two brokers is killed.

    make live-demo                        every 20th flight
    make live-demo ARGS="--every 1"       all 336,776 flights

RocketMQ's own name server and two of its brokers run on this machine, as the interop tests start them. RocketMQ's
Java producer sends flights to the topic `flights`. A Spark query (enrich.py) reads them from both brokers, adds the
airlines' names, and sends the result to the topic `flights-named`. RocketMQ's Java push consumer receives that topic.
When a quarter has arrived, one broker is killed with SIGKILL, and it comes back five seconds later; all clients wait
for it. At the end each message is counted, in both topics and at the consumer.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "01_flights"), str(ROOT / "tests"), str(ROOT)]
import enrich  # noqa: E402
import flights  # noqa: E402

from interop import java_build  # noqa: E402
from interop.cluster_clients import Client, Clients, message  # noqa: E402
from interop.java_store import Driver  # noqa: E402
from interop.live import broker, create_topic  # noqa: E402
from interop.real_broker import NameServer, RealBroker  # noqa: E402
from messagestore.spi import STORES, Location, Range  # noqa: E402

VERSION = java_build.NEWEST
BROKERS = ("broker-a", "broker-b")
SENT_TOGETHER = 100
DOWN_S = 5.0
PATIENCE_S = 600.0


def rows(months: Path) -> Iterator[dict[str, Any]]:
    """The flights of the CSV files."""
    for path in sorted(months.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                yield {"id": int(row[0]), "carrier": row[10], "dest": row[14]}


class Sending(threading.Thread):
    """Sends all flights with RocketMQ's producer."""

    def __init__(self, producer: Client, months: Path) -> None:
        super().__init__(daemon=True)
        self.producer, self.months = producer, months
        self.may_go_on = threading.Event()
        self.sent, self.failure = 0, ""

    def run(self) -> None:
        """Send half of them, and the rest when a broker has been killed."""
        together: list[dict[str, Any]] = []
        try:
            flown = [*rows(self.months)]
            for number, row in enumerate(flown, 1):
                together.append(message(json.dumps(row).encode(), keys=str(row["id"]), tags=row["carrier"]))
                if len(together) == SENT_TOGETHER or number == len(flown):
                    self.producer.send(enrich.SOURCE, together, batch=True)
                    self.sent += len(together)
                    together = []
                if number * 2 >= len(flown) and not together:
                    self.may_go_on.wait()
        except Exception as error:
            self.failure = repr(error)
            raise


def stored(names: NameServer, topic: str, *columns: str) -> list[dict[str, Any]]:
    """All messages of a topic on both brokers, with the place of each as `place`."""
    found: list[dict[str, Any]] = []
    for name in BROKERS:
        reader = STORES.reader(Location.of(f"rocketmq://{names}/{name}"))
        for (_, queue_id), end in reader.ends([topic]).queues.items():
            for block in reader.gather([Range(topic, queue_id, 0, end)]):
                rows_of_block = block.decoded(["queue_offset", *columns]).to_pylist()
                found += [{**row, "place": f"{name}/{queue_id}/{row['queue_offset']}"} for row in rows_of_block]
        reader.close()
    return found


def kill_and_restart(victim: RealBroker, clock: flights.Clock) -> None:
    """SIGKILL to a broker, and its next start."""
    victim.kill()
    clock.say(f"SIGKILL to {BROKERS[1]}; it stays down for {DOWN_S:g} s")
    time.sleep(DOWN_S)
    victim.begin().wait()
    clock.say(f"{BROKERS[1]} is back")


def run(root: Path, every: int) -> int:
    """Run the demo; returns the exit code."""
    clock = flights.Clock()
    count = flights.prepare(root / "months", every)
    clock.say(f"{count:,} flights are ready")
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(NameServer(VERSION, root / "names"))
        first, second = (stack.enter_context(broker(VERSION, root, names, name)) for name in BROKERS)
        machines = [Driver(VERSION, root / "java") for _ in range(2)]  # one works on one command at a time
        for machine in machines:
            stack.callback(machine.stop)
        with Clients(machines[0], names) as producers, Clients(machines[1], names) as consumers:
            for topic in (enrich.SOURCE, enrich.TARGET):
                create_topic(names, [first, second], topic, queues=4)
            clock.say(
                f"a name server and two brokers of RocketMQ {VERSION} run; each topic has 4 queues on each broker"
            )
            consumer = consumers.push(enrich.TARGET)
            sending = Sending(producers.producer(), root / "months")
            sending.start()
            with open(root / "spark.log", "wb") as log:
                job = subprocess.Popen(
                    [sys.executable, str(HERE / "enrich.py"), str(names), str(root)],
                    stdout=log,
                    stderr=log,
                    cwd=root,
                    start_new_session=True,
                )
            try:
                good = watch(clock, count, sending, consumer, job, second)
                return prove(clock, names, count, consumer) if good else 1
            finally:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
                if job.returncode != -signal.SIGKILL:
                    print((root / "spark.log").read_text(errors="replace")[-3000:])


def watch(
    clock: flights.Clock,
    count: int,
    sending: Sending,
    consumer: Client,
    job: subprocess.Popen[bytes],
    victim: RealBroker,
) -> bool:
    """Kill the broker when a quarter has arrived, and wait until the consumer has everything."""
    until_s, is_killed = time.monotonic() + PATIENCE_S, False
    while True:
        arrived = consumer.act("count")
        if not is_killed and arrived * 4 >= count:
            is_killed = True
            clock.say(f"the producer has sent {sending.sent:,}; the consumer has received {arrived:,}")
            sending.may_go_on.set()  # so that there is something to send, to read and to receive meanwhile
            kill_and_restart(victim, clock)
        if is_killed and not sending.is_alive() and arrived >= count:
            clock.say(f"the consumer has received {arrived:,}")
            return True
        fault = sending.failure or (f"Spark ended with {job.returncode}" if job.poll() is not None else "")
        if fault or time.monotonic() > until_s:
            print(f"NOT PROVED: {fault or 'it takes too long'}; the consumer has received {arrived:,} of {count:,}")
            return False
        time.sleep(0.1)


def prove(clock: flights.Clock, names: NameServer, count: int, consumer: Client) -> int:
    """Count what is in both topics, and what the consumer has received.

    A producer or a consumer of RocketMQ may repeat a message when a broker is killed, and then it is in the log twice,
    or received twice. What Spark did is told by the places: each message of the first topic once in the second.
    """
    incoming = stored(names, enrich.SOURCE, "body")
    until_s = time.monotonic() + 60
    while True:
        outgoing = stored(names, enrich.TARGET, "body", "properties")
        received = {(one["brokerName"], one["queueId"], one["queueOffset"]) for one in consumer.take()}
        if (len(outgoing) >= len(incoming) and len(received) >= len(outgoing)) or time.monotonic() > until_s:
            break
        time.sleep(0.5)

    flown = Counter(json.loads(row["body"])["id"] for row in incoming)
    origins = Counter(dict(row["properties"])["origin"] for row in outgoing)
    names_of = Counter(bool(json.loads(row["body"]).get("airline")) for row in outgoing)
    clock.say("counted")
    print(
        f"\n{count:,} flights sent by Java\n"
        f"topic {enrich.SOURCE}: {len(incoming):,} messages of {len(flown):,} flights\n"
        f"topic {enrich.TARGET}: {len(outgoing):,} messages, made of {len(origins):,} different ones; "
        f"{names_of[True]:,} have an airline's name\n"
        f"the Java consumer: {len(received):,} different messages in {len(consumer.messages):,} deliveries"
    )
    good = (
        flown.keys() == set(range(count))
        and origins == Counter(row["place"] for row in incoming)
        and names_of == Counter({True: len(outgoing)})
        and len(received) == len(outgoing)
    )
    print("PROVED: each message once, from topic to topic" if good else "NOT PROVED: the counts above do not agree")
    return 0 if good else 1


def main() -> int:
    """Parse the arguments and run the demo."""
    parser = argparse.ArgumentParser(description="From topic to topic of a RocketMQ cluster, while a broker is killed.")
    parser.add_argument("--every", type=int, default=20, metavar="N", help="only every N-th flight")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the brokers and the logs")
    arguments = parser.parse_args()
    try:
        java_build.classpath(VERSION), java_build.tools_classpath(VERSION)
    except java_build.CannotBuild as error:
        print(f"NOT SHOWN HERE: {error}")
        return 1

    root = Path(tempfile.mkdtemp(prefix="messagestore-live-"))
    try:
        return run(root, arguments.every)
    finally:
        if arguments.keep:
            print(f"the brokers and the logs: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
