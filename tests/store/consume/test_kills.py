"""A consumer is killed between any two steps: nothing that was not processed is committed, and the rest comes again."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

from messagestore import Message, MessageStore
from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.files.disk import Disk
from small import SMALL

COUNT, KILLS = 4000, 12
WORKER = """
import json, sys
from messagestore import Consumer
with Consumer(sys.argv[1], "g", "t") as consumer:
    while True:
        found = consumer.poll(None, 7)
        for (topic, queue_id), messages in found.items():
            print(json.dumps([queue_id, [message.queue_offset for message in messages]]), flush=True)
        consumer.commit()
        for (topic, queue_id), messages in found.items():
            print(json.dumps([queue_id, messages[-1].queue_offset + 1, "committed"]), flush=True)
"""


def test_whatever_kills_it_no_message_is_lost_and_no_commit_is_forgotten(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        futures = [store.put_message_async(Message("t", b".", queue_id=number % 2)) for number in range(COUNT)]
        assert all(future.result().is_ok for future in futures)

    chance = random.Random(20_260)
    processed: dict[int, int] = {0: 0, 1: 0}
    """Up to where each queue was handed out without a gap."""
    for _ in range(KILLS):
        command = [sys.executable, "-c", WORKER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            lines = [worker.stdout.readline() for _ in range(chance.randrange(1, 60))]
            worker.send_signal(signal.SIGKILL)
            lines += worker.stdout.readlines()
        committed = {0: 0, 1: 0}
        for line in lines:
            if not line.endswith(b"\n"):
                continue  # the kill came while it was written
            queue_id, what, *said = json.loads(line)
            if said:
                committed[queue_id] = what
            else:
                assert what == list(range(what[0], what[-1] + 1))
                assert what[0] <= processed[queue_id]
                processed[queue_id] = max(processed[queue_id], what[-1] + 1)
        table = ConsumerOffsets(Disk(), str(tmp_path))
        table.load()
        found = table.get("t", "g")
        for queue_id in (0, 1):
            assert committed[queue_id] <= found.get(queue_id, 0) <= processed[queue_id]
    assert sum(processed.values()) > KILLS
