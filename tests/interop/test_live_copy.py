"""`messagestore copy` beside brokers that run: each message is in the archive once, whatever is killed and when."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from cli_runs import finish, read_lines, run
from interop import java_build
from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS
from interop.live import await_route, broker, create_topic, put
from interop.real_broker import NameServer
from messagestore import MessageExt, MessageStore
from messagestore.spi import STORES, Location, Range

BROKERS = ("broker-a", "broker-b")
QUEUES, SEED, KILLS = 3, 20261126, 12
FIRST_ROWS, ROWS = 600, 60
"""How many messages each broker has at first, and how many more come before each kill."""
PROGRAM = (
    "import sys; from pyspark_messagestore.cli import copying; copying.BATCH_SIZE = 16_000; "
    "from pyspark_messagestore.cli.main import app; app(sys.argv[1:])"
)
PLACE = {"queue_offset", "physical_offset", "size", "store_timestamp_ms", "store_host", "offset_message_id"}
"""What the copy has of its own."""


def copying(*arguments: object) -> subprocess.Popen[str]:
    """The command in a process of its own, with small batches, so that a kill meets one of many."""
    command = [sys.executable, "-c", PROGRAM, "copy", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def messages_of(names: NameServer, name: str) -> dict[tuple[str, int], list[MessageExt]]:
    """What a broker has, by its queues."""
    found: dict[tuple[str, int], list[MessageExt]] = {}
    with contextlib.closing(STORES.reader(Location.of(f"rocketmq://{names}/{name}"))) as reader:
        for (topic, queue_id), end in reader.ends(["t"]).queues.items():
            found[name, queue_id] = [
                message for block in reader.gather([Range(topic, queue_id, 0, end)]) for message in block.messages()
            ]
    return found


def copies_of(root: Path) -> dict[tuple[str, int], list[MessageExt]]:
    """What the archive has, by the queues in which it was."""
    found: dict[tuple[str, int], list[MessageExt]] = defaultdict(list)
    with MessageStore.open_read_only(root) as store:
        for queue_id in range(QUEUES):
            offset, end = 0, store.max_offset("t", queue_id)
            while offset < end:
                for message in store.get_message("t", queue_id, offset, 32).messages:
                    assert message.properties["originQueueId"] == str(queue_id)
                    found[message.properties["originBroker"], queue_id].append(message)
                    offset += 1
    return dict(found)


def compare(copies: list[MessageExt], originals: list[MessageExt]) -> None:
    """Each message once, in the order of its queue, with all that it had."""
    assert [copy.properties["originQueueOffset"] for copy in copies] == [str(n) for n in range(len(originals))]
    for copy, there in zip(copies, originals, strict=True):
        own = {name: text for name, text in copy.properties.items() if not name.startswith("origin")}
        assert own == there.properties
        assert copy.properties["originOffsetMsgId"] == there.offset_message_id
        assert copy.properties["originStoreTimestamp"] == str(there.store_timestamp_ms)
        for name in set(there.__slots__) - PLACE - {"properties"}:
            assert getattr(copy, name) == getattr(there, name), name


def test_a_copy_whose_process_and_whose_broker_are_killed(memory: Path) -> None:
    """With kill -9 at random moments, while messages come. One broker is killed, too, and comes back: the copy waits."""
    need(NEWEST, java_build.tools_classpath)
    rng, root = random.Random(SEED), memory / "archive"
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(NameServer(NEWEST, memory / "names"))
        brokers = {name: broker(NEWEST, memory, names, name) for name in BROKERS}
        for one in brokers.values():
            one.begin()
            stack.callback(one.kill)
        for one in brokers.values():
            one.wait()
        create_topic(names, [*brokers.values()], "t", QUEUES)

        def send(label: str, count: int) -> None:
            for name in BROKERS:
                bodies = [f"{name} {label} {number} ".encode() + rng.randbytes(200) for number in range(count)]
                put(names, "t", bodies, name, queues=QUEUES, properties={"KEYS": f"k{label}", "TAGS": "x", "p": label})

        send("first", FIRST_ROWS)
        for turn in range(KILLS):
            process = copying(f"rocketmq://{names}", "t", root, "--follow", "--json", "--retry-timeout", "90s")
            sender = threading.Thread(target=send, args=(str(turn), ROWS))
            sender.start()
            read_lines(process, rng.randrange(1, 4))
            if turn == KILLS // 2:
                sender.join()
                brokers[BROKERS[0]].kill()
                brokers[BROKERS[0]].begin().wait()
                await_route(names, [*brokers.values()], "t")
                put(names, "t", [b"after the kill"] * QUEUES, BROKERS[0], queues=QUEUES)
            time.sleep(rng.random() / 20)
            process.kill()
            finish(process, -9)
            sender.join()

        done = run("copy", f"rocketmq://{names}", "t", root, "--json")
        assert all(json.loads(line)["lost"] == 0 for line in done.stdout.splitlines())
        originals: dict[tuple[str, int], Any] = {}
        for name in BROKERS:
            originals |= messages_of(names, name)
    copies = copies_of(root)
    assert copies.keys() == originals.keys()
    for queue, there in originals.items():
        compare(copies[queue], there)
    count = sum(map(len, originals.values()))
    assert count == 2 * (FIRST_ROWS + KILLS * ROWS) + QUEUES
    run("verify", root)
    COUNTS.stores += len(BROKERS)
    COUNTS.messages += count
