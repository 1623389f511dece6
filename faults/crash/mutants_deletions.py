"""Bugs planted in the deletion of topics."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from crash import deletions, points
from crash.planting import Case, Ground, Mutant, Search, no_sync, patched, without
from messagestore.broker import topic_deletion
from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.files.topics import Topics

_STRIDE = 5


def killed(stride: int = _STRIDE) -> Search:
    """A process that deletes a topic is killed, or its power is cut, in every `stride`th way."""

    def search(ground: Ground) -> Iterator[Case]:
        root = ground.folder / "deletions"
        stories = [deletions.Story.of(name, root) for name in deletions.CONFIGS]
        for point in points.chosen(stories, 1, (0, stride)):
            image = point.left()
            if image is not None:
                yield partial(deletions.judged, point, image.folder, root)

    return search


def _keeps_seals(real: Any) -> Any:
    """The queues stay in journal and seals, as those of a topic whose folder is gone by accident."""

    def forget(writer: Any, topics: tuple[str, ...]) -> None:
        for name in topics:
            for key in [key for key in writer.numbers.next_offsets if key[0] == name]:
                del writer.numbers.next_offsets[key]

    return forget


def _one_by_one(real: Any) -> Any:
    """The queues' folders are renamed one by one, and not all at once."""

    def take_away(writer: Any, topics: tuple[str, ...], queues: dict[str, list[int]]) -> list[str]:
        disk, paths = writer.files.disk, writer.files.paths
        for topic in topics:
            for queue_id in queues.get(topic, ()):
                topic_deletion.remove_folder(disk, f"{paths.consume_queue}/{topic}/{queue_id}")
                writer.files.drop_queue(topic, queue_id)
        return list(real(writer, topics, queues))

    return take_away


MUTANTS: tuple[Mutant, ...] = (
    Mutant("a deletion forgets neither seals nor journal", patched(topic_deletion, "_forget", _keeps_seals), "killed deletions", killed()),
    Mutant("a deletion leaves what groups have read", without(ConsumerOffsets, "forget_topic"), "killed deletions", killed()),
    Mutant("a deletion leaves the settings of a topic", without(Topics, "remove"), "killed deletions", killed(), case=86),
    Mutant("queues of a deleted topic go one by one", patched(topic_deletion, "_take_away", _one_by_one), "killed deletions", killed()),
    Mutant("the deletion of a topic is not synced", no_sync("/consumequeue", "fsync_dir"), "killed deletions", killed(), case=113),
)  # fmt: skip
