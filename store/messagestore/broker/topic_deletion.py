"""Deletes a topic as a broker does: its settings, its queues, and what consumer groups have read of it.

The records stay in the log until retention takes their segments. A queue of the topic that is made again begins at 0.

    1   everything is synced, and the clean end moves to the log's end: no recovery starts below it
    2   `state` says that queues may have other numbers than records; journal and seals forget the queues
    3   `config/topics.json` loses the topic
    4   the folder of its queues is renamed into `spark/`: all of them are gone, or none
    5   `config/consumerOffset.json` loses what groups have read
    6   the renamed folder is removed

A process that is killed up to 3 leaves the topic with all its messages, perhaps without its settings; behind 4, the
topic is gone. Offsets that remain then are beyond the ends of new queues, and are lowered (`log/remembered.py`). Who
removes the folder `consumequeue`, or loses it, gets back a topic that was not made again, because the queues are then
made from the log. A broker does the same, and after a crash also with a topic whose records its recovery reads again.

Source: RocketMQ AdminBrokerProcessor.deleteTopic, DefaultMessageStore.deleteTopics.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from messagestore.batches.progress import settle_progress
from messagestore.errors import UnknownTopicError
from messagestore.files.consume_queue import CONSUME_QUEUE_FOLDER
from messagestore.files.consumer_offsets import ConsumerOffsets, offsets_locked
from messagestore.files.disk import remove_folder
from messagestore.format.layout import STATE_CLEAN, STATE_OWN
from messagestore.format.message import RETRY_PREFIX
from messagestore.log.store_files import DELETED_FOLDER
from messagestore.writer.log_writer import LogWriter

_FOLDERS = (CONSUME_QUEUE_FOLDER, "consumequeue_ext")
_TIMEOUT_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeletedTopic:
    """What went with a topic.

    Parameters
    ----------
    topics : tuple of str
        The topic itself, and the retry topics that a broker had made for consumers that pop its messages.
    queue_count : int
        How many queues they had.
    groups : tuple of str
        The consumer groups that had read some of them.
    """

    topics: tuple[str, ...]
    queue_count: int
    groups: tuple[str, ...]


def delete_topic(writer: LogWriter, topic: str) -> DeletedTopic:
    """Delete a topic. Call under the mutex, with a name that users may have.

    Raises
    ------
    UnknownTopicError
        The store has nothing of the topic.
    StoreLockedError
        Another process writes the offsets of consumer groups for too long. Nothing was changed.
    CorruptionError
        A file that has to be changed is damaged. Nothing was changed.
    StoreFullError
        The disk has no room for the small files. Make room, and delete the topic again.
    StorePoisonedError
        A sync failed, or the deletion was interrupted.
    """
    files = writer.files
    table = ConsumerOffsets(files.disk, files.paths.root)
    table.load()
    groups = table.groups_of(topic)
    writer.finish()  # first, since queues whose units are still to be written have no folders
    topics = (topic, *(name for group in groups for name in _pop_topics(topic, group) if name in files.topics.names))
    queues = files.queue_names()
    if topic not in queues and topic not in files.topics.names and not groups:
        raise UnknownTopicError(topic, {*queues, *files.topics.names})

    settle_progress(writer)
    writer.clean_end.move()
    with offsets_locked(files.disk, files.paths.root, f"deleting topic {topic}", _TIMEOUT_S):
        table.load_to_save()
        _forget(writer, topics)
        for name in topics:
            files.topics.remove(name)
            table.forget_topic(name)
        files.topics.save_or_drop()

        made = _take_away(writer, topics, queues)
        writer.write_state()  # for readers that have seen the queues since it was last written
        table.save()

    for path in made:
        try:
            remove_folder(files.disk, path)
        except OSError as error:
            _log.warning(
                "%s: topic %s is deleted, but %s could not be removed, and the next recovery removes it: %s",
                files.paths.root,
                topic,
                path,
                error,
            )
    return DeletedTopic(topics, sum(len(queues.get(name, ())) for name in topics), tuple(groups))


def _pop_topics(topic: str, group: str) -> tuple[str, str]:
    """The names that a broker gives to the retry topic of a group that pops a topic's messages."""
    return f"{RETRY_PREFIX}{group}_{topic}", f"{RETRY_PREFIX}{group}+{topic}"


def _forget(writer: LogWriter, topics: tuple[str, ...]) -> None:
    """Let journal and seals know nothing of the topics' queues, and say that records may repeat numbers."""
    ends, journal = writer.numbers.sealed_ends(), writer.journal
    for key in [key for key in {*ends.seals, *ends.unsealed, *writer.numbers.next_offsets} if key[0] in topics]:
        ends.answer(key, None)
        writer.numbers.next_offsets.pop(key, None)
    for topic in topics:
        (journal.queues or {}).pop(topic, None)
    writer.ensure_abort()  # so that recovery removes what a killed process leaves
    writer.write_state(flags=writer.state.flags & ~(STATE_OWN | STATE_CLEAN))
    writer.clean_end.move()


def _take_away(writer: LogWriter, topics: tuple[str, ...], queues: dict[str, list[int]]) -> list[str]:
    """Rename the folders of the topics' queues, durably; returns where they are now."""
    files, disk = writer.files, writer.files.disk
    folders = [os.path.join(files.paths.root, name) for name in _FOLDERS]
    paths = [path for folder in folders for topic in topics if disk.exists(path := os.path.join(folder, topic))]
    made = [files.paths.temporary(f"{DELETED_FOLDER}{number}") for number in range(len(paths))]
    for path in made:
        remove_folder(disk, path)  # an earlier deletion could not remove it

    with writer.unbroken(f"the deletion of topic {topics[0]} was interrupted"):
        try:
            for path, target in zip(paths, made, strict=True):
                disk.rename(path, target)
        finally:
            for topic in topics:
                for queue_id in queues.get(topic, ()):
                    files.drop_queue(topic, queue_id)
            files.pool.clear()
        try:
            for folder in {os.path.dirname(path) for path in (*paths, *made)}:
                disk.fsync_dir(folder)
        except OSError as error:
            raise writer.poison(f"the deletion of topic {topics[0]} could not be synced ({error})") from error
    return made
