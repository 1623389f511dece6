"""Saves up to where half messages need no second look, as a broker does (`config/consumerOffset.json`)."""

from __future__ import annotations

from messagestore.files.consumer_offsets import publish_offsets
from messagestore.format.half_records import GROUP, HALF_TOPIC, OP_TOPIC, QUEUE_ID
from messagestore.writer.log_writer import LogWriter


def save_half_progress(writer: LogWriter, place: tuple[int, int]) -> None:
    """Write from which half message and which op message on a broker has to look. Call under the writer's mutex.

    Everything below is made durable first: otherwise a power cut might take half messages that the file counts, and
    new ones with their numbers would be overlooked.
    """
    if writer.synced_end < writer.end.physical_offset:
        writer.sync_to_end()
    offsets = {(HALF_TOPIC, QUEUE_ID): place[0], (OP_TOPIC, QUEUE_ID): place[1]}
    publish_offsets(writer.files.paths.root, GROUP, offsets, writer.files.disk, own=True)
