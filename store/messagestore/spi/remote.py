"""Stores on other hosts: the implementations of `Stores`, `StoreReader` and `StoreWriter` that ask a server.

`messagestore.serve` is the server, and `store/PROTOCOL.md` describes what the two say to each other. Records travel as
the bytes of the log, and this side decodes and checks them, as a reader on the store's host does.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from messagestore.batches.append import BatchRequest, PlannedWrite
from messagestore.batches.staging import StagedFile
from messagestore.errors import ProtocolError, StoreClosedError, StoreUnavailableError
from messagestore.files.staging_files import Write
from messagestore.format.config import StoreConfig
from messagestore.format.gathered import Gathered
from messagestore.format.rows import Rows, divided
from messagestore.spi.connections import Attempt, Connection, Deadline, Link, link_to, to_text
from messagestore.spi.interface import (
    GATHERED_ROWS,
    GATHERED_SIZE,
    MOST_NAMED,
    Committed,
    Description,
    Ends,
    LastRecord,
    Place,
    PlannedRead,
    Proven,
    Queue,
    Queues,
    Range,
    Report,
)
from messagestore.spi.location import Location, RemoteSettings
from messagestore.spi.wire import frames, parts, values

LOOK_S = 0.05
"""For how long an answer about the ends counts as the newest."""
FRAME_SIZE = 16 * 1024 * 1024
"""Rows with more bytes are sent as several frames. A server takes 64 MiB unless `--frame` says otherwise."""
KEPT_SIZE = 64 * 1024 * 1024
"""How many bytes of a file that is being staged are kept here, to be sent again if the server is restarted."""
_FIRST_SIZE = 4 * 1024 * 1024
"""How many bytes are collected before a file is begun: most tasks write less, and need one request."""
_ALIVE_S = 8.0
_PART = MOST_NAMED // 4
"""How many things a request names. With as many as a server takes, the longest topics would make a body of 12 MiB, and
a server takes 8 unless `--body` says otherwise."""
_Item = TypeVar("_Item")


class RemoteStores:
    """The stores behind URLs. It holds plain values, so that a task receives them.

    Parameters
    ----------
    settings : RemoteSettings
        How a server is reached whose URL is given as text; a `Location` has its own settings.
    """

    def __init__(self, settings: RemoteSettings = RemoteSettings()) -> None:  # noqa: B008 - frozen
        self.settings = settings

    def _link(self, location: Location | str) -> Link:
        return link_to(str(location), location.settings if isinstance(location, Location) else self.settings)

    def reader(
        self,
        location: Location | str,
        config: StoreConfig | None = None,  # noqa: ARG002
        proven: Proven | None = None,  # noqa: ARG002
        *,
        to_gather: bool = False,
    ) -> RemoteReader:
        """Open a store for reading. The settings are those of the server, which also knows what is proven."""
        return RemoteReader(self._link(location), to_gather=to_gather)

    def writer(
        self,
        location: Location | str,
        config: StoreConfig,  # noqa: ARG002
        *,
        staging_ttl_s: float,  # noqa: ARG002
        staging_dir: str | None = None,  # noqa: ARG002
        ends_abruptly: bool = False,  # noqa: ARG002
    ) -> RemoteWriter:
        """A writer for a store. The settings are those of the server; nothing is sent yet."""
        return RemoteWriter(self._link(location))


REMOTE_STORES = RemoteStores()


class RemoteReader:
    """A store on another host, opened for reading.

    Parameters
    ----------
    link : Link
    to_gather : bool
        Only `gather` will be called, for which the server needs to keep no reader: nothing is asked before.

    Raises
    ------
    NotAStoreError
        There is no store, or its queues cannot be read.
    StoreUnavailableError
        The server does not answer.
    """

    def __init__(self, link: Link, *, to_gather: bool = False) -> None:
        self._link, self._id = link, uuid.uuid4().hex
        self._ends: Ends | None = None
        self._asked: tuple[tuple[str, ...], bool] = ((), False)
        self._looked_s = 0.0
        self._closed = self._has_asked = False
        self._store_id = ""
        if not to_gather:
            self._store_id = self.describe().store_id

    def _ask(self, verb: str, **arguments: Any) -> Any:
        self._check_open()
        body = {"reader": self._id, "arguments": arguments, "store": self._store_id}
        self._has_asked = True
        return self._link.call(f"reader/{verb}", body)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self._link.url}: this reader is closed. Open another one")

    def describe(self, topics: Iterable[str] | None = None, *, queues: bool = False) -> Description:
        """Which store this is."""
        description: Description = self._ask("describe", topics=None if topics is None else list(topics), queues=queues)
        return description

    def broker_name(self) -> str:
        """The name of the store's broker."""
        return str(self._ask("broker_name"))

    def ends(self, topics: Sequence[str], since: Ends | None = None, *, names: bool = False) -> Ends:
        """How far the queues of some topics reach. The server is asked at most twenty times a second."""
        question = (tuple(topics), names)
        now_s = time.monotonic()
        if since is not None and since is self._ends and question == self._asked and now_s - self._looked_s < LOOK_S:
            return since
        token = "" if since is None else since.token
        ends: Ends | None = self._ask("ends", topics=list(topics), names=names, token=token)
        if since is not None:
            if ends is None:
                ends = since
            else:  # what has not changed stays the caller's own object
                kept = {name: getattr(since, name) for name in ("queues", "topic_names")}
                ends = replace(ends, **{name: value for name, value in kept.items() if value == getattr(ends, name)})
        if ends is None:
            raise ProtocolError(f"{self._link.url}: ends: nothing has changed since no answer")
        self._ends, self._asked, self._looked_s = ends, question, now_s
        self._store_id = self._store_id or ends.store_id
        return ends

    def await_change(self, timeout_s: float) -> None:
        """Wait until `ends` would ask the server again."""
        time.sleep(max(0.0, min(timeout_s, LOOK_S)))

    def begins(self, queues: Iterable[Queue]) -> Queues:
        """The number of the first message of each queue that is still in the log."""
        begins: Queues = {}
        for some in _in_parts(list(queues)):
            begins |= self._ask("begins", queues=some)
        return begins

    def places(self, offsets: Mapping[Queue, int]) -> dict[Queue, Place]:
        """Where the message before each offset lies."""
        places: dict[Queue, Place] = {}
        for some in _in_parts(list(offsets.items())):
            places |= self._ask("places", offsets=dict(some))
        return places

    def seek(self, times_ms: Mapping[Queue, int | None], *, physical_offset: int | None = None) -> Queues:
        """The number of each queue's first message at or above a physical offset, or stored after a time."""
        offsets: Queues = {}
        for some in _in_parts(list(times_ms.items())):
            offsets |= self._ask("seek", times_ms=dict(some), physical_offset=physical_offset)
        return offsets

    def prove_last(self, position: int, size: int, *, with_time: bool = False) -> LastRecord | None:
        """The bytes at a place, as a record."""
        record: LastRecord | None = self._ask("prove_last", position=position, size=size, with_time=with_time)
        return record

    def mean_sizes(self, ranges: Sequence[Range]) -> list[float]:
        """The mean record size of each range."""
        return [size for some in _in_parts(list(ranges)) for size in self._ask("mean_sizes", ranges=some)]

    def sizes(self, ranges: Sequence[Range]) -> list[NDArray[np.int32]]:
        """The sizes in the units of some ranges."""
        return [sizes for some in _in_parts(list(ranges)) for sizes in self._ask("sizes", ranges=some)]

    def find(self, topics: Sequence[str], keys: Sequence[str]) -> dict[Queue, list[int]]:
        """The numbers of all messages with one of some keys."""
        found: dict[Queue, set[int]] = {}
        for some in _in_parts(list(keys)):
            for queue, numbers in self._ask("find", topics=list(topics), keys=some).items():
                found.setdefault(queue, set()).update(numbers)
        return {queue: sorted(numbers) for queue, numbers in found.items()}

    def proven(self, parts: Sequence[Sequence[Range]]) -> list[Proven | None]:
        """Nothing: the server itself knows what is proven, and tasks ask the same server."""
        return [None] * len(parts)

    def gather(
        self,
        ranges: Sequence[Range],
        *,
        planned: PlannedRead | None = None,
        max_rows: int = GATHERED_ROWS,
        max_size: int = GATHERED_SIZE,
        tags_codes: frozenset[int] | None = None,
    ) -> Iterator[Gathered]:
        """The bytes of the records of some ranges. A stream that is cut is continued behind its last whole part."""
        _keep_memory()
        for some in _in_parts(list(ranges)):
            yield from self._gathered(deque(some), planned, max_rows, max_size, tags_codes)

    def _gathered(
        self,
        left: deque[Range],
        planned: PlannedRead | None,
        max_rows: int,
        max_size: int,
        tags_codes: frozenset[int] | None,
    ) -> Iterator[Gathered]:
        """The same for ranges of one request."""
        deadline = Deadline(self._link)
        while True:
            arguments: dict[str, Any] = {
                "ranges": list(left),
                "planned": planned,
                "max_rows": max_rows,
                "max_size": max_size,
            }
            arguments["tags_codes"] = tags_codes
            with self._link.attempt("gather", deadline) as connection:
                for count, frame in enumerate(connection.stream("gather", to_text({"arguments": arguments}))):
                    if "done" in frame.head:
                        if frame.head["done"].get("parts") != count:
                            raise ProtocolError(f"{self._link.url}: gather ended after {count} parts: {frame.head}")
                        return
                    part = parts.unpack_gathered(frame)
                    _advance(left, part)
                    deadline.answered()
                    yield part
                    del part, frame  # so that the next one can use its memory

    # ---- others

    def publish_progress(self, group: str, offsets: Mapping[Queue, int]) -> None:
        """Write how far a query has read, as the offsets of a consumer group."""
        self._ask("publish_progress", group=group, offsets=dict(offsets))

    def view(self, name: str) -> Report:
        """Rows that say what the store contains."""
        return self._report("view", name=name)

    def offsets(self, topics: Sequence[str] = (), at_ms: int | None = None) -> Report:
        """How far the queues of some topics reach, and where they were at a time."""
        return self._report("offsets", topics=list(topics), at_ms=at_ms)

    def lag(self, offsets: Mapping[Queue, int], topics: Iterable[str] = ()) -> Report:
        """How far a reader is behind the end of each queue."""
        return self._report("lag", offsets=dict(offsets), topics=list(topics))

    def group_lag(self, group: str) -> Report:
        """How far a consumer group is behind the end of each queue."""
        return self._report("group_lag", group=group)

    def _report(self, verb: str, **arguments: Any) -> Report:
        """Rows, which arrive as a stream; one that is cut is asked for again."""
        self._check_open()
        text = to_text({"arguments": arguments})

        def once(connection: Connection) -> Report:
            rows: list[dict[str, Any]] = []
            *pieces, last = connection.stream(verb, text)
            for frame in pieces:
                some = values.from_json(frame.head.get("rows"), strict=False)
                rows += values.checked(some, list[dict[str, Any]], f"the rows of {verb}")
            done = values.from_json(last.head["done"], strict=False)
            if not isinstance(done, dict) or done.get("rows") != len(rows):
                raise ProtocolError(f"{self._link.url}: {verb} ended after {len(rows)} rows: {last.head!r:.200}")
            return rows, values.checked(done.get("faults"), list[str], f"the faults of {verb}")

        return self._link.retried(verb, once)

    def published_progress(self, group: str) -> Queues:
        """How far a consumer group has read."""
        progress: Queues = self._ask("published_progress", group=group)
        return progress

    def close(self) -> None:
        """Let the server close its reader, if it has one; if it does not answer, it does so by itself later."""
        is_open, self._closed = not self._closed, True
        if is_open and self._has_asked:
            with contextlib.suppress(Exception):
                self._link.connection().last("reader/close", to_text({"reader": self._id}))


def _in_parts(items: list[_Item]) -> Iterator[list[_Item]]:
    """What a request names, as lists that a server takes; one list if there is nothing."""
    for start in range(0, max(1, len(items)), _PART):
        yield items[start : start + _PART]


def _keep_memory() -> None:
    """Let the C library keep the memory of a part for the next one, as it does when a folder is read.

    glibc gives back what is free beyond twice the largest piece that was ever freed. Parts from a server are smaller
    than those from a folder, so it would give back the memory of each, and new pages cost as much as the bytes in them.
    """
    np.empty(GATHERED_SIZE, np.uint8)


def _advance(left: deque[Range], part: Gathered) -> None:
    """Take off the ranges what a part has given."""
    while left:
        first = left.popleft()
        if (first.topic, first.queue_id) == (part.topic, part.queue_id) and first.start <= part.start < first.end:
            if part.end < first.end:
                left.appendleft(Range(first.topic, first.queue_id, part.end, first.end))
            return
    raise ProtocolError(f"gather: found {part.topic}/{part.queue_id} from {part.start} on, which was not asked for")


class RemoteWriter:
    """Writes to a store on another host.

    Parameters
    ----------
    link : Link
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def _ask(self, verb: str, **arguments: Any) -> Any:
        return self._link.call(f"writer/{verb}", {"arguments": arguments})

    def describe(self, topics: Iterable[str] | None = None) -> Description:
        """What is there now."""
        description: Description = self._ask("describe", topics=None if topics is None else list(topics))
        return description

    def prepare(self) -> Description:
        """What is there, after a check that it may be written."""
        description: Description = self._ask("prepare")
        return description

    def stage(self, write: Write, store_id: str) -> RemoteStaging:
        """A new staged file on the store's host."""
        return RemoteStaging(self._link, write, store_id)

    def commit(
        self,
        files: Sequence[StagedFile],
        request: BatchRequest,
        store_id: str,
        *,
        planned: PlannedWrite | None = None,
        closing: bool = False,
        dead_letter_topic: str = "",
    ) -> Committed:
        """Append staged files as one batch.

        Raises
        ------
        CommitUnknownError
            There was no answer in time. The batch may be in the log or not.
        """
        arguments = {"files": list(files), "request": request, "store_id": store_id, "planned": planned}
        if dead_letter_topic:
            arguments["dead_letter_topic"] = dead_letter_topic
        text = to_text({"arguments": arguments | {"closing": closing}})
        is_known_again = request.app_id is not None or planned is not None

        def once(connection: Connection) -> Committed:
            *_, last = connection.stream("commit", text, shows_life=True)
            committed: Committed = values.checked(
                values.from_json(last.head["done"], strict=False), Committed, "the answer of commit"
            )
            return committed

        return self._link.retried("commit", once, unknown=True, is_repeatable=is_known_again)

    def abort(self, names: Sequence[str], store_id: str) -> None:
        """Delete staged files."""
        self._ask("abort", names=list(names), store_id=store_id)


class RemoteStaging:
    """A staged file on another host while a task writes it.

    The first rows are collected, and the file is begun when there are many, or with the end. What was sent is kept
    up to `KEPT_SIZE`, so that all of it can be sent again to a server that was restarted. Beyond that the task fails if
    the connection breaks, and Spark tries it again. While the caller has no rows, a thread tells the server that it is
    alive.

    Parameters
    ----------
    link : Link
    write : Write
    store_id : str
    """

    def __init__(self, link: Link, write: Write, store_id: str) -> None:
        self._link = link
        self._first = frames.packed({"stage": values.to_json({"write": write, "store_id": store_id})})
        self._kept: list[list[memoryview]] = []
        self._is_whole = True
        """Whether `_kept` has all that was written."""
        self._size = self._sent = 0
        self._deadline = Deadline(link)
        self._attempt: Attempt | None = None
        self._connection: Connection | None = None
        self._staged: StagedFile | None = None
        self._sending = threading.Lock()
        self._over = threading.Event()
        self._alive: threading.Thread | None = None

    def write(self, chunk: Rows) -> None:
        """Append encoded records, divided into frames that a server takes."""
        for part in divided(chunk, FRAME_SIZE):
            pieces = parts.pack_rows(part)
            self._size += sum(map(len, pieces))
            self._kept.append(pieces)
            if self._size < _FIRST_SIZE:
                continue
            self._send(None)
            if self._size > KEPT_SIZE:
                self._kept, self._sent, self._is_whole = [], 0, False

    def finish(self) -> StagedFile:
        """Complete the file."""
        self._stop()  # a sign of life behind the last frame would be in front of the connection's next request
        self._send(frames.packed({"finish": True}))
        assert self._staged is not None
        return self._staged

    def _send(self, last: list[memoryview] | None) -> None:
        """Send what was not sent yet, on a new connection everything; with the last frame, also receive the answer."""
        while True:
            attempt = self._attempt or self._link.attempt("stage", self._deadline)
            try:
                with self._sending:
                    connection = self._connection
                    if connection is None:
                        self._attempt, connection = attempt, attempt.__enter__()
                        self._sent = 0
                        with connection.together():
                            connection.begin("stage")
                            self._send_on(connection, self._first, last)
                        self._connection = connection
                    else:
                        self._send_on(connection, None, last)

                    if last is not None:
                        connection.receive()
                        self._staged = values.checked(connection.answered_value(), StagedFile, "the answer of stage")
            except Exception as error:  # noqa: BLE001 - it is raised again unless it asks for another try
                self._failed(attempt, error)
                continue

            if last is not None:
                attempt.__exit__(None, None, None)
            elif self._alive is None:
                self._alive = threading.Thread(target=self._show_life, name="signs of life", daemon=True)
                self._alive.start()
            return

    def _send_on(self, connection: Connection, first: list[memoryview] | None, last: list[memoryview] | None) -> None:
        """Send what was not sent yet, between the frames that begin and end the body."""
        waiting = [frame for frame in (first, *self._kept[self._sent :], last) if frame is not None]
        connection.send(*waiting, ends=last is not None)
        self._sent = len(self._kept)

    def _failed(self, attempt: Attempt, error: Exception) -> None:
        """Prepare another try, or raise what the server said, or what broke the connection."""
        connection, self._connection, self._attempt = attempt.connection, None, None
        if connection is None:
            raise error
        said = connection.said_before() if isinstance(error, OSError) and error is not connection.refusal else None
        cause = said or error
        if not attempt.__exit__(type(cause), cause, cause.__traceback__):
            raise cause
        if not self._is_whole:
            raise StoreUnavailableError(
                f"{self._link.url}: the stream broke off ({cause}) after {self._size:,} bytes of a staged file. More "
                f"than {KEPT_SIZE:,} bytes are not sent again, so the task has to be run again"
            ) from cause

    def _show_life(self) -> None:
        """Send a frame now and then while the task has no rows, so that the server does not give it up."""
        while not self._over.wait(_ALIVE_S):
            with self._sending, contextlib.suppress(OSError):  # the next frame of rows meets the same fault
                if self._connection is not None:
                    self._connection.send(frames.packed({"alive": True}))

    def _stop(self) -> None:
        self._over.set()
        if self._alive is not None:
            self._alive.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._staged is None and self._connection is not None:
            self._connection.close()  # the server deletes what it has
