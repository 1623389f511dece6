"""Publishes how far a query has read as a consumer group's offsets.

With the option `consumerGroup` each finished micro-batch is published as the offsets of a RocketMQ consumer group.
It is information: nothing is recovered from it, and what cannot be published is told once and tried again, while the
query goes on.

Published is the `start` that Spark hands to `latestOffset`: it does so as soon as a micro-batch is done, also for the
last one and while idle. `commit` comes only with the batch after it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from messagestore import StoreError
from messagestore.spi import StoreReader
from pyspark_messagestore.offsets import StreamOffset

RETRY_S = 5.0
"""As often as a broker writes its own."""

_log = logging.getLogger(__name__)


class GroupProgress:
    """A query's progress as a consumer group's. On the driver; one thread.

    Parameters
    ----------
    group : str
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self._published: dict[str, Any] | None = None
        self._failed: dict[str, Any] | None = None
        self._again_s = 0.0
        self._told: set[tuple[type, int | None]] = set()

    def publish(self, store: StoreReader, start: dict[str, Any]) -> None:
        """Publish a stream offset whose messages are done with. Microseconds when it is published already."""
        if start == self._published or (start == self._failed and time.monotonic() < self._again_s):
            return
        try:
            store.publish_progress(self.group, StreamOffset.from_json(start).queues)
        except (StoreError, OSError) as error:
            self._failed, self._again_s = start, time.monotonic() + RETRY_S
            self._tell(error)
        else:
            self._published = start
            self._told.clear()

    def _tell(self, error: Exception) -> None:
        """A warning, once for each kind of error until it goes well again."""
        kind = (type(error), getattr(error, "errno", None))
        if kind not in self._told:
            self._told.add(kind)
            _log.warning(
                "consumer group %s: progress is not published: %s; the query goes on and tries again: put that right, "
                "or leave out the option consumerGroup",
                self.group,
                error,
            )
