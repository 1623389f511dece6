"""Publishes how far a query has read as a consumer group's offsets.

With the option `consumerGroup`, each finished micro-batch is published as the offsets of a RocketMQ consumer group. The
offsets are only information, and nothing is recovered from them. If they cannot be published, a warning says so once,
and the query continues and tries again.

The published offset is the `start` that Spark passes to `latestOffset`. Spark passes it as soon as a micro-batch is
done, also for the last one and while idle; it calls `commit` only with the next batch.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from messagestore import StoreError
from messagestore.spi import StoreReader
from pyspark_messagestore.source.offsets import StreamOffset

RETRY_S = 5.0
"""The interval at which a broker writes its own offsets."""

_log = logging.getLogger(__name__)


class GroupProgress:
    """Publishes the progress of a query as a consumer group's. It runs on the driver, in one thread.

    Parameters
    ----------
    group : str
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self._published: dict[str, Any] | None = None
        self._failed: dict[str, Any] | None = None
        self._again_s = 0.0
        self._warned: set[tuple[type, int | None]] = set()

    def publish(self, store: StoreReader, start: dict[str, Any]) -> None:
        """Publish a stream offset whose messages are finished. It takes microseconds if that is published already."""
        if start == self._published or (start == self._failed and time.monotonic() < self._again_s):
            return
        try:
            store.publish_progress(self.group, StreamOffset.from_json(start).queues)
        except (StoreError, OSError) as error:
            self._failed, self._again_s = start, time.monotonic() + RETRY_S
            self._warn_once(error)
        else:
            self._published = start
            self._warned.clear()

    def _warn_once(self, error: Exception) -> None:
        """Log a warning, once for each kind of error until publishing succeeds again."""
        kind = (type(error), getattr(error, "errno", None))
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning(
                "consumer group %s: its progress cannot be published. The query continues and tries again later. "
                "Remove the cause, or leave out the option consumerGroup. The cause: %s",
                self.group,
                error,
            )
