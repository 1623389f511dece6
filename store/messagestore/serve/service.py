"""Answers requests: checks who asks, calls the verb, and sends its answer or its error.

The order of the checks is that of their cost, and all of them come before the body is read: is the server at work, is
the path one of ours, do both sides speak the same protocol, is the token valid, does its role allow the request, is
there a place for a stream, may the client stage more.

Threads: one per request that is being answered, and one that shows that the server is at work on long ones.
"""

from __future__ import annotations

import contextlib
import logging
import re
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from messagestore.errors import AccessDeniedError, ProtocolError, StoreError
from messagestore.files.staging_files import stem_of
from messagestore.format.json_text import bounded_json
from messagestore.serve.access import OPERATE, READ, WRITE, Access, Everybody, check_role
from messagestore.serve.counters import Counters, staged_text
from messagestore.serve.exchange import CutError, Exchange
from messagestore.serve.hosted import READS, REPORTS, Hosted, StoreReader, StoreWriter, bound
from messagestore.serve.limits import Budget, BusyError, Limits, StagedBytes
from messagestore.spi.interface import GATHERED_ROWS, MOST_NAMED, Range
from messagestore.spi.wire import failures, frames, parts, values, versions

PREFIX = "/v1/"
PART_SIZE = 4 * 1024 * 1024
"""The largest part of a `gather` on the wire, unless a single record is larger."""
SIGN_OF_LIFE_S = 5.0
UNKNOWN = "unknown"
"""The label of verbs that do not exist, and of clients without a valid token: neither can add rows to the figures."""
_ROWS_IN_FRAME = 1_000
_ROW_SIZE = 1_024
"""About what a row of a report takes in memory."""
_SIZE_SIZE = 40
"""About what the size of a record takes in memory: its unit, a number, and twice that in base64."""
_NUMBER_SIZE = 128
"""About what a number that `find` has found takes in memory."""
_SMALL_SIZE = 1024 * 1024
"""Less than this does not count towards `--memory`, which reads and writes may hold for long."""
_MANY_VALUES = 16_384
"""A body with more JSON values makes its request a large one; each takes some 170 bytes of memory until the answer."""
_MOST_VALUES = 16 * MOST_NAMED
_PLAIN_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_log = logging.getLogger("messagestore.serve")


class Service:
    """What a server does with a request.

    Parameters
    ----------
    hosted : Hosted
    limits : Limits
    access : Access, optional
    instance_id : str
        Which run of the server this is.
    not_ready : function, optional
        Why the server is not ready, in words; empty if it is.
    metrics : function, optional
        The figures of the store, in Prometheus' text format.
    spoken : (int, int), optional
        The oldest and the newest version of the protocol; None: those of this release.

    Attributes
    ----------
    recovering, draining : bool
        The server does not answer requests yet, or no more. Probes are answered.
    """

    def __init__(
        self,
        hosted: Hosted,
        limits: Limits | None = None,
        access: Access | None = None,
        *,
        instance_id: str = "",
        not_ready: Callable[[], str] = lambda: "",
        metrics: Callable[[], bytes] = lambda: b"",
        spoken: tuple[int, int] | None = None,
    ) -> None:
        self.hosted, self.limits = hosted, limits or Limits()
        self.budget, self.counters = Budget(self.limits, hosted.over), Counters()
        self.staged = StagedBytes(self.limits.staged, hosted.staged)
        self.signs_of_life = SignsOfLife()
        self.access: Access = access or Everybody()
        self.instance_id, self.spoken = instance_id or uuid.uuid4().hex, spoken
        self.recovering = self.draining = False
        self._not_ready, self._metrics = not_ready, metrics
        self._active = 0
        self._idle = threading.Condition()

    # ---- a request

    def handle(self, exchange: Exchange) -> None:
        """Answer a request. What cannot be answered any more ends the connection."""
        if exchange.path in ("/healthz", "/readyz"):
            self._health(exchange)
            return
        with self._idle:
            self._active += 1
            is_one_too_many = self._active > self.limits.requests
        try:
            _Request(self, exchange, is_one_too_many=is_one_too_many).answer()
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait for those that run; return whether all have ended."""
        self.draining = True
        with self._idle:
            return self._idle.wait_for(lambda: not self._active, timeout_s)

    def _health(self, exchange: Exchange) -> None:
        if exchange.path == "/healthz":
            exchange.answer(200, b"alive\n")
            return
        if self.draining:
            reason = "the server is draining"
        elif self.recovering:
            reason = "the store is being recovered"
        else:
            reason = self._not_ready()
        exchange.answer(503 if reason else 200, f"{reason or 'ready'}\n".encode())

    def figures(self) -> bytes:
        """The figures of the store and of this server."""
        return self._metrics() + self.counters.text() + staged_text(self.staged.sums())


class SignsOfLife:
    """Shows every few seconds that the server is at work on requests that take long.

    One thread does so for all of them: to start a thread, and to wait for its end, takes as long as a small commit. It
    ends when there was nothing to show for a while.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._due_s: dict[Callable[[], None], float] = {}
        self._runs = False

    @contextlib.contextmanager
    def shown(self, show: Callable[[], None]) -> Iterator[None]:
        """Call a function, which must not wait for a client, every few seconds; perhaps once more at the end."""
        with self._mutex:
            self._due_s[show] = time.monotonic() + SIGN_OF_LIFE_S
            if not self._runs:
                threading.Thread(target=self._show, name="signs of life", daemon=True).start()
                self._runs = True
        try:
            yield
        finally:
            with self._mutex:
                del self._due_s[show]

    def _show(self) -> None:
        wait_s = SIGN_OF_LIFE_S
        while True:
            time.sleep(wait_s)  # who comes meanwhile is due later
            with self._mutex:
                now_s = time.monotonic()
                due = [show for show, due_s in self._due_s.items() if due_s <= now_s]
                self._due_s.update(dict.fromkeys(due, now_s + SIGN_OF_LIFE_S))
                if not self._due_s:
                    self._runs = False
                    return
                wait_s = max(0.0, min(self._due_s.values()) - now_s)
            for show in due:
                show()


class _Request:
    """One request."""

    def __init__(self, service: Service, exchange: Exchange, *, is_one_too_many: bool = False) -> None:
        self.service, self.exchange, self._is_one_too_many = service, exchange, is_one_too_many
        self.hosted, self.limits = service.hosted, service.limits
        client_id = exchange.header(versions.REQUEST_ID)
        self.id = client_id if _PLAIN_ID.fullmatch(client_id) else uuid.uuid4().hex[:16]
        self.verb, self.client = UNKNOWN, exchange.client
        self.allowed: frozenset[str] = frozenset()
        self.throttled_s = 0.0
        self._alive_s = time.monotonic()
        self._streaming = False
        self._sending = threading.Lock()
        self._held = contextlib.ExitStack()
        self._writes = False

    def answer(self) -> None:
        """Answer, whatever happens."""
        begin_s, failed = time.monotonic(), True
        try:
            with self._held:
                self._checked()()
            failed = False
        except (CutError, TimeoutError, ConnectionError, ssl.SSLError) as error:
            self.exchange.drop()
            if isinstance(error, StoreError):
                self._fail(error)
            else:
                _log.info("%s %s of %s: ended without an answer: %s", self.id, self.verb, self.client, error)
        except Exception as error:  # noqa: BLE001 - a request must not end the server, and its client must be told
            self._fail(error)
        finally:
            exchange = self.exchange
            self.service.counters.add(
                self.verb,
                self.client if self.allowed else UNKNOWN,
                float(failed),
                exchange.received,
                exchange.sent,
                time.monotonic() - begin_s,
                self.throttled_s,
            )

    def _checked(self) -> Callable[[], None]:
        """What answers this request, after all checks that need no body."""
        exchange, service = self.exchange, self.service
        if self._is_one_too_many:
            exchange.lingers = False  # its thread is wanted by probes
            raise BusyError(
                f"{self.limits.requests} requests are being answered; no more are taken. Raise --streams, or come back "
                f"later"
            )
        if service.draining:
            raise BusyError("the server is being stopped; another one will take its place")
        if service.recovering:
            raise BusyError("the server has just been started, and recovers the store")

        if exchange.path == "/metrics":
            self.verb = "metrics"
            self._authorize(OPERATE)
            return lambda: exchange.answer(200, service.figures())

        verb = exchange.path.removeprefix(PREFIX)
        call, role = self._calls().get(verb, (None, ""))
        if not exchange.path.startswith(PREFIX) or call is None:
            raise ProtocolError(f"found the path {exchange.path!r:.80}; PROTOCOL.md lists those that are allowed")
        if exchange.method != "POST":
            raise ProtocolError(f"found the method {exchange.method:.10}; allowed is POST")

        self.verb, self._writes = verb, role == WRITE
        versions.check(exchange.header(versions.HEADER), "client", service.spoken)
        self._authorize(role)

        if role == WRITE and self.hosted.read_only:
            raise AccessDeniedError("this server was started with --read-only, so nothing can be written through it")
        if exchange.size is not None and exchange.size > self.limits.body:
            raise ProtocolError(f"found a body of {exchange.size:,} bytes; allowed are {self.limits.body:,}")
        return call

    def _calls(self) -> dict[str, tuple[Callable[[], None], str]]:
        calls: dict[str, tuple[Callable[[], None], str]] = {
            "hello": (self._hello, READ),
            "gather": (self._gather, READ),
            "reader/close": (self._close_reader, READ),
            "reader/publish_progress": (self._read, WRITE),
            "writer/describe": (self._write, READ),
            "writer/prepare": (self._write, WRITE),
            "writer/abort": (self._write, WRITE),
            "stage": (self._stage, WRITE),
            "commit": (self._commit, WRITE),
        }

        calls.update({f"reader/{verb}": (self._read, READ) for verb in READS})
        calls["reader/find"] = (self._find, READ)
        calls.update(dict.fromkeys(REPORTS, (self._report, READ)))
        return calls

    def _authorize(self, role: str) -> None:
        self.client, self.allowed = self.service.access.client_of(
            self.exchange.header("Authorization"), self.exchange.client
        )
        self.exchange.is_known = True
        check_role(self.client, self.allowed, role)

    # ---- small verbs

    def _hello(self) -> None:
        self._body()
        self._value({"instance": self.service.instance_id, "read_only": self.hosted.read_only})

    def _read(self) -> None:
        body = self._body()
        verb, arguments = self.verb.removeprefix("reader/"), body.get("arguments")
        with self.service.budget.room() as room:
            if verb == "sizes":
                room.take(self._size_of_sizes(arguments))
            self._value(self.hosted.read(_reader_id(body), verb, arguments, self._store_id(body)))

    def _store_id(self, body: dict[str, Any]) -> str:
        store_id: str = values.checked(body.get("store", ""), str, f"{self.verb}.store")
        return store_id

    def _find(self) -> None:
        """Look for keys. What the index does not cover is read, so this takes a place and a turn as a report does, and
        ends with its client.
        """
        most = min(self.limits.memory // _NUMBER_SIZE, frames.MOST_VALUES // 2)  # what the client reads, at most
        with self.service.budget.stream() as room:
            with self._held:  # a search may take minutes, which no other large request waits for
                body = self._body()
            arguments, store_id, is_gone = body.get("arguments"), self._store_id(body), self.exchange.is_gone
            with self.service.budget.report(is_gone):
                found = self.hosted.find(arguments, store_id, is_gone, most)
            size = _NUMBER_SIZE * sum(map(len, found.values()))
            room.take(size if size > _SMALL_SIZE else 0)
            self._value(found)

    def _size_of_sizes(self, arguments: Any) -> int:
        """What an answer of `sizes` takes in memory. A request may ask for the same range again and again."""
        ranges: list[Range] = bound(StoreReader, "sizes", arguments)["ranges"]
        count, most = sum(max(0, range_.count) for range_ in ranges), self.limits.memory // _SIZE_SIZE
        if count > most:
            raise ProtocolError(
                f"sizes: found ranges of {count:,} messages; allowed are {most:,} (--memory). Ask for parts of them"
            )
        return count * _SIZE_SIZE

    def _close_reader(self) -> None:
        self.hosted.forget(_reader_id(self._body()))
        self._value(None)

    def _write(self) -> None:
        verb = self.verb.removeprefix("writer/")
        arguments = bound(StoreWriter, verb, self._body().get("arguments"))
        self._value(getattr(self.hosted.writer(), verb)(**arguments))

    def _arguments(self, kind: type) -> dict[str, Any]:
        """The arguments of a stream, which is no large request any more once they have been read."""
        with self._held:
            return bound(kind, self.verb, self._body().get("arguments"))

    def _body(self) -> dict[str, Any]:
        """The body of a request other than `stage`. What it may ask for is bounded here, and in `bound`."""
        room = self._held.enter_context(self.service.budget.room())
        text = self.exchange.rest(self.limits.body, lambda size: room.take(size if size > _SMALL_SIZE else 0))
        if sum(map(text.count, (b",", b"{", b"["))) > _MANY_VALUES:
            self._held.enter_context(self.service.budget.large_request(self.exchange.is_gone, writes=self._writes))
        try:
            members = bounded_json(text.decode("utf-8"), _MOST_VALUES)
        except ValueError as error:
            raise ProtocolError(f"the body is not JSON that is read: {error}") from error
        if not isinstance(members, dict):
            raise ProtocolError("found a body that is not a JSON object")
        return {key: values.from_json(value, strict=True) for key, value in members.items()}

    def _value(self, value: Any) -> None:
        self.exchange.answer(200, {"value": values.to_json(value)}, self._headers())

    def _headers(self) -> list[tuple[str, str]]:
        return [(versions.HEADER, versions.words(self.service.spoken)), (versions.REQUEST_ID, self.id)]

    # ---- streams

    def _gather(self) -> None:
        with self.service.budget.stream() as room:
            arguments = self._arguments(StoreReader)
            size = min(PART_SIZE, arguments.pop("max_size", PART_SIZE))
            rows = min(GATHERED_ROWS, arguments.pop("max_rows", GATHERED_ROWS))  # their units are in memory, too
            with self.hosted.reading() as store:
                gathered = store.gather(**arguments, max_rows=max(1, rows), max_size=max(1, size))
                count = row_count = 0
                room.take(2 * PART_SIZE)
                self._begin()
                while (part := next(gathered, None)) is not None:
                    room.take(max(2 * PART_SIZE, part.data.nbytes))
                    self._send(parts.pack_gathered(part))
                    count, row_count = count + 1, row_count + len(part.sizes)
                    self._pace(part.data.nbytes)
                    del part  # so that the next one can use its memory
            self._end({"parts": count, "rows": row_count})

    def _report(self) -> None:
        """Look through the store. Few requests do so at a time, because one caller could otherwise keep all processors
        busy, and each ends with its client.
        """
        with self.service.budget.stream() as room:
            arguments = self._arguments(StoreReader)
            self._begin()
            with (
                self._signs_of_life() as gone,
                self.service.budget.report(gone.is_set),
                self.hosted.reading(gone.is_set) as store,
            ):
                rows, faults = getattr(store, self.verb)(**arguments)
            room.take(len(rows) * _ROW_SIZE)
            for start in range(0, len(rows), _ROWS_IN_FRAME):
                pieces = frames.packed({"rows": values.to_json(rows[start : start + _ROWS_IN_FRAME])})
                self._send(pieces)
                self._pace(sum(map(len, pieces)))
            self._end({"rows": len(rows), "faults": faults})

    def _stage(self) -> None:
        service = self.service
        with service.budget.stream() as room, service.staged.share(self.client) as share:
            exchange = self.exchange
            exchange.paced = self._pace  # in pieces: a client that cannot send for long takes the server for dead

            def take(size: int) -> None:
                share.take(size)
                room.take(size)

            first = self._frame(take)
            head = values.from_json(first.head, strict=True)
            arguments = bound(StoreWriter, "stage", head.get("stage"))
            with self.hosted.writer(self.client).stage(**arguments) as staging:
                share.stem = stem_of(staging.path)
                while True:
                    frame = self._frame(take)
                    if "rows" in frame.head:
                        staging.write(parts.unpack_rows(frame), frame.crcs["data"])
                    elif "finish" in frame.head:
                        break
                    elif "alive" not in frame.head:
                        raise ProtocolError(
                            "stage: found a frame that has neither rows nor a sign of life, nor the end"
                        )
                    del frame
                    room.take(0)  # others may use it until the client has its next rows
                exchange.end()
                staged = staging.finish()
                share.staged = staged.size
            self._value(staged)

    def _frame(self, room: Callable[[int], None]) -> frames.Frame:
        return frames.read(self.exchange.take, self.limits.body, self.limits.frame, room)

    def _commit(self) -> None:
        with self.service.budget.stream():
            arguments = self._arguments(StoreWriter)
            request = arguments["request"]
            what = f"version {request.version} of app {request.app_id}" if request.app_id else "a batch"
            self._begin()
            with self._signs_of_life():
                committed = self.hosted.writer().commit(**arguments)
            result = committed.result
            _log.info(
                "%s commit of %s: %s %s, %s rows at %s", self.id, self.client, what, result.status, result.row_count,
                result.physical_offset,
            )  # fmt: skip
            self._end(values.to_json(committed))

    @contextlib.contextmanager
    def _signs_of_life(self) -> Iterator[threading.Event]:
        """Send a frame every few seconds, so that nobody takes the connection for dead; set the event if it is."""
        gone, is_over = threading.Event(), False

        def show() -> None:
            with self._sending:
                if is_over or gone.is_set() or not self.exchange.has_room():
                    return
                try:
                    self.exchange.send(frames.packed({"alive": True}))
                except OSError:  # the client went away; a commit is done all the same
                    gone.set()

        try:
            with self.service.signs_of_life.shown(show):
                yield gone
        finally:
            with self._sending:
                is_over = True

    def _begin(self) -> None:
        self._streaming = True
        self.exchange.begin(self._headers())

    def _send(self, pieces: list[memoryview]) -> None:
        with self._sending:
            self.exchange.send(pieces)

    def _end(self, done: Any) -> None:
        with self._sending:
            self.exchange.finish(frames.packed({"done": done}))

    def _pace(self, size: int) -> None:
        self.throttled_s += self.service.budget.pace(self.client, size, self._show_life)

    def _show_life(self) -> None:
        """Let a client that is over its rate know every few seconds that it is not forgotten."""
        now_s = time.monotonic()
        if now_s - self._alive_s < SIGN_OF_LIFE_S:
            return
        self._alive_s = now_s
        if self._streaming:
            self._send(frames.packed({"alive": True}))
        else:
            self.exchange.go_on()

    # ---- errors

    def _fail(self, error: Exception) -> None:
        """Tell the client about an error; one line in the log says the same."""
        status, headers = _status(error), self._headers()
        if isinstance(error, BusyError):
            headers.append(("Retry-After", str(error.retry_after_s)))
        if status == 401:
            headers.append(("WWW-Authenticate", "Bearer"))

        error_json = failures.to_json(error, self.id)
        log = _log.exception if status == 500 else _log.warning
        log("%s %s of %s refused with %s: %s", self.id, self.verb, self.client, status, error)

        try:
            if self._streaming:
                with self._sending:
                    self.exchange.finish(frames.packed({"error": error_json}))
            else:
                self.exchange.answer(status, {"error": error_json}, headers)
        except OSError as gone:
            self.exchange.drop()
            _log.info("%s %s of %s: the client is gone: %s", self.id, self.verb, self.client, gone)


def _reader_id(body: dict[str, Any]) -> str:
    reader_id = body.get("reader")
    if not isinstance(reader_id, str) or not _PLAIN_ID.fullmatch(reader_id):
        raise ProtocolError("`reader` must be an id of letters and digits")
    return reader_id


def _status(error: Exception) -> int:
    if isinstance(error, BusyError):
        return error.status
    if isinstance(error, AccessDeniedError):
        return 401 if error.unknown else 403
    if isinstance(error, ProtocolError):
        return 400
    return 409 if isinstance(error, StoreError | OSError) else 500
