"""Deliverers of delayed messages that die at some operation; `make crash` takes every operation."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from crash import deliveries
from messagestore import BatchRequest, MessageStore, StoreConfig
from messagestore.batches.append import Chunks, append_batch
from messagestore.format.batch_record import DELIVERY_APP
from messagestore.format.record_columns import encode
from messagestore.inspect.verify import verify
from messagestore.session import attached_store
from small import delayed, read_all


def test_a_killed_delivery_loses_and_doubles_nothing(tmp_path: Path) -> None:
    labels = set()
    for key, verdict, label in itertools.islice(deliveries.cases(tmp_path / "store", 7, (3, 61)), 50):
        assert verdict.ok, f"{key}: {label}: {verdict}"
        labels.add(label.split()[0])
    assert labels == {"kill", "power"}


DELIVERER = """
import sys, time
from messagestore import StoreConfig, StoreLockedError, deliver_delayed
config = StoreConfig.load(sys.argv[2])
print("ready", flush=True)
while True:
    try:
        deliver_delayed(sys.argv[1], config)
    except StoreLockedError:
        pass
    time.sleep(0.02)
"""


@pytest.mark.parametrize("kills", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_two_deliverers_that_are_killed_beside_a_writer(tmp_path: Path, kills: int) -> None:
    """Processes deliver in turns with a writer, and die by SIGKILL at any moment; each message comes once."""
    settings = tmp_path / "store.properties"
    settings.write_text("mappedFileSizeCommitLog=65536\nmessageDelayLevel=1s\nlockTimeout=60s\n")
    root, config = tmp_path / "store", StoreConfig.load(settings)
    chance, count, processes = random.Random(3), 0, []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", DELIVERER, str(root), str(settings)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    def put(rows: int) -> None:
        nonlocal count
        store = attached_store(root, config)
        with store.writing("test") as writer:
            columns = delayed([1] * rows, body=[b"%06d" % number for number in range(count, count + rows)])
            chunk = encode(columns, limits=config, store_host=writer.files.store_host, born_host=bytes(8))
            append_batch(writer, Chunks([chunk]), BatchRequest(app_id="a", version=count))
        count += rows

    try:
        put(10)
        processes = [start(), start()]
        for _ in range(kills):
            for _ in range(3):
                put(chance.randint(1, 20))
                time.sleep(0.4 * chance.random())
            victim = chance.randrange(2)
            processes[victim].kill()
            processes[victim].communicate()
            processes[victim] = start()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        attached_store(root).detach()
    time.sleep(1.1)
    with MessageStore.open(root, config) as store:
        while store.deliver_delayed().count:
            pass
        found = Counter(body for queue_id in store.topics()["t"] for body in read_all(store, "t", queue_id))
        last = store.last_batch(DELIVERY_APP)
    assert found == Counter(b"%06d" % number for number in range(count))
    assert last is not None and last.version > kills // 2
    assert verify(root, config).ok
