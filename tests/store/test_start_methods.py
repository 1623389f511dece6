"""Worker pools: each process opens the store itself, however it was started."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from messagestore import BatchRequest, Message, MessageStore
from messagestore.inspect.verify import verify
from small import SMALL, bodies, columns

CONFIG = SMALL.replace(lock_timeout="10m")
TURNS = 4


def work(given: tuple[str, int]) -> int:
    """Some sessions of one process of a pool: single puts, and a batch."""
    root, worker = given
    for turn in range(TURNS):
        with MessageStore.open(root, CONFIG) as store:
            store.put_message(Message("single", b"%d-%d" % (worker, turn), queue_id=0))
            store.append_batch(columns(bodies(5)), BatchRequest(f"app-{worker}", turn))
    return worker


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_pool_of_processes_writes_one_store(tmp_path: Path, method: str) -> None:
    root = str(tmp_path / "store")
    MessageStore.open(root, CONFIG).close()
    with multiprocessing.get_context(method).Pool(3) as pool:
        assert pool.map(work, [(root, worker) for worker in range(3)]) == [0, 1, 2]
    with MessageStore.open_read_only(root, CONFIG) as store:
        single = [message.body for message in store.get_message("single", 0, 0, max_count=64).messages]
        assert sorted(single) == sorted(b"%d-%d" % (worker, turn) for worker in range(3) for turn in range(TURNS))
        assert sum(store.max_offset("t", queue_id) for queue_id in store.topics()["t"]) == 3 * TURNS * 5
    assert verify(root, CONFIG).ok


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_open_store_cannot_be_sent_to_a_process(tmp_path: Path, method: str) -> None:
    with (
        MessageStore.open(tmp_path / "store", CONFIG) as store,
        multiprocessing.get_context(method).Pool(1) as pool,
        pytest.raises(TypeError, match="open the store"),
    ):
        pool.apply(repr, (store,))
