"""A broker's crash leaves any of the files that are made from the log, old or not at all: the log gives them back."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from messagestore import Message, MessageStore
from messagestore.format.layout import UNIT
from messagestore.inspect.verify import verify
from small import SMALL

DERIVED = ("consumequeue", "index", "checkpoint")
Queue = tuple[str, int]


class Case:
    """One random store: what was put and deleted, and what is left of its files."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.root = folder / "store"
        self.earlier = folder / "earlier"
        self.chance = Random(seed)
        self.config = SMALL.replace(
            mapped_file_size_commit_log=self.chance.choice([16, 64]) * 1024,
            mapped_file_size_consume_queue=self.chance.choice([2, 3, 10]) * UNIT.size,
            max_index_num=self.chance.choice([20, 200]),
        )
        self.bodies: dict[Queue, list[bytes]] = {}
        self.gone: list[str] = []

    def fill(self) -> None:
        with MessageStore.open(self.root, self.config) as store:
            for number in range(self.chance.randrange(5, 80)):
                topic, queue_id = self.chance.choice("AB"), self.chance.choice([0, 1])
                if self.chance.random() < 0.08 and any(name == topic for name, _ in self.bodies):
                    store.delete_topic(topic)
                    self.bodies = {key: bodies for key, bodies in self.bodies.items() if key[0] != topic}
                elif self.chance.random() < 0.08:
                    self.keep(store)
                else:
                    body = b"%d" % number * self.chance.randrange(0, 300)
                    store.put_message(Message(topic, body, queue_id=queue_id, keys=[f"k{number}"]))
                    self.bodies.setdefault((topic, queue_id), []).append(body)

    def keep(self, store: MessageStore) -> None:
        """Keep the derived files as they are now: after a crash, some of them may be as old as that."""
        store.writer.finish()
        shutil.rmtree(self.earlier, ignore_errors=True)
        shutil.copytree(self.root, self.earlier, ignore=shutil.ignore_patterns("spark", "commitlog"))

    def crash(self) -> None:
        """Leave the folder as a broker that was killed, perhaps while it deleted a topic, and a power cut might."""
        shutil.rmtree(self.root / "spark")
        (self.root / "abort").touch()
        for name in DERIVED:
            if self.earlier.exists() and self.chance.random() < 0.3:
                self.remove(self.root / name)
                if (self.earlier / name).exists():
                    (self.earlier / name).rename(self.root / name)
        if self.chance.random() < 0.3:
            self.remove(self.root / "checkpoint")

        for queue in sorted(self.root.glob("consumequeue/*/*")):
            files, way = sorted(queue.iterdir()), self.chance.random()
            count = self.chance.randrange(len(files) + 1)
            if way < 0.25:
                doomed = files[:count]  # RocketMQ unlinks the first one first
            elif way < 0.4:
                doomed = files[len(files) - count :]
            else:
                doomed = [queue] if way < 0.45 else []
            for path in doomed:
                self.remove(path)

    def remove(self, path: Path) -> None:
        self.gone.append(str(path.relative_to(self.root)))
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def shown(self, store: MessageStore) -> dict[Queue, list[bytes]]:
        bodies: dict[Queue, list[bytes]] = {}
        for topic, queue_ids in store.topics().items():
            for queue_id in queue_ids:
                low, high = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
                messages = store.get_message(topic, queue_id, low, high - low).messages if high > low else ()
                bodies[topic, queue_id] = [message.body for message in messages]
        return {key: of_queue for key, of_queue in bodies.items() if of_queue}


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 1000))]
)
def test_whatever_files_are_gone_the_log_gives_the_queues_back(tmp_path: Path, seed: int) -> None:
    """Each queue has its topic's last life, or an earlier one if the topic was deleted last."""
    case = Case(tmp_path, seed)
    case.fill()
    case.crash()
    with MessageStore.open(case.root, case.config) as store:
        shown = case.shown(store)
    assert {key: shown.get(key) for key in case.bodies} == case.bodies, case.gone
    assert verify(case.root, case.config).ok, case.gone
    with MessageStore.open(case.root, case.config) as store:
        assert store.report is not None and store.report.reason == "clean"
        assert case.shown(store) == shown
