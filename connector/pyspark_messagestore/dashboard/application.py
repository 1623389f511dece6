"""The addresses of the dashboard, and what becomes of a request.

    /                          all stores, the worst first        /api/v1/stores
    /s/STORE/LOOK?...          a page about one store             /api/v1/s/STORE/LOOK?...    the same as JSON
    /s/STORE/body?...          a body as a file
    /s/STORE/download?...      a list as a file
    /s/STORE/events?...        what is new, as a stream of events
    /metrics, /healthz         for Prometheus; 200, or 503 if a store has a fault

Paths of stores and checkpoints come from whoever starts the application, never from a request.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import json
import os
import re
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from messagestore import (
    ConfigError,
    MessageIllegalError,
    OffsetOutOfRangeError,
    StoreConfig,
    StoreError,
    UnknownTopicError,
)
from pyspark_messagestore.dashboard import looks, tail
from pyspark_messagestore.dashboard.checks import BusyError, Checks
from pyspark_messagestore.dashboard.curves import HEIGHT, STRIP_HEIGHT, WIDTH, bars, stacked
from pyspark_messagestore.dashboard.guard import LEAST_TOKEN_LENGTH, Guard
from pyspark_messagestore.dashboard.looks import LOOKS, MOST_READ
from pyspark_messagestore.dashboard.reads import READ_LIMIT, Reads
from pyspark_messagestore.dashboard.room import OTHERS
from pyspark_messagestore.dashboard.stored import Decoder, Stored, json_text, json_value
from pyspark_messagestore.dashboard.taking import FORMATS, as_file, copies
from pyspark_messagestore.dashboard.trends import span_words
from pyspark_messagestore.monitoring.health import belongs
from pyspark_messagestore.words import command_line, count_words, error_words, quoted, shown, size_words, time_words

BODY_SHOWN = 256 << 10
"""The most characters of a body on a page; the file has all of it."""
_HEX_SHOWN, _HEX_LENGTH = 4096, 16
_PIECE_SIZE = 64 << 10
_FAULT = "fault"
_TABS = {
    "verify": "log",
    "topic": "topics",
    "recent": "topics",
    "messages": "topics",
    "message": "topics",
    "group": "readers",
}
"""The tab to which a page without one of its own belongs."""


def app(
    roots: Sequence[str | os.PathLike[str]],
    checkpoints: Sequence[str | os.PathLike[str]] = (),
    *,
    token: str = "",
    hosts: Sequence[str] = (),
    hide_bodies: bool = False,
    masks: Sequence[str] = (),
    decoder: Decoder | None = None,
    read_limit: int = READ_LIMIT,
) -> Guard:
    """Make the dashboard as an ASGI application.

    Parameters
    ----------
    roots : sequence of path
        The root folders of stores on this host. A folder that holds no store yet is shown as such.
    checkpoints : sequence of path
        The checkpointLocations of streaming queries; each is shown with the store that it reads.
    token : str
        What a client must know; empty: everybody who reaches the application may ask, for example because it stands
        behind a login of your own.
    hosts : sequence of str
        Names besides localhost and this machine's own by which clients reach it. Addresses are always allowed.
    hide_bodies : bool
        Show no body of any message.
    masks : sequence of str
        Names of properties, and of fields of JSON bodies at any depth, whose values are not shown. Bodies that are not
        JSON are hidden then. With `KEYS` or `UNIQ_KEY` among them, nothing is found by a key.
    decoder : callable | None
        Called with a `MessageExt` whose body is decompressed; returns the body as a value for JSON, or None if it is
        not of its kind.
    read_limit : int
        How many bytes of messages are read in a second for searches, lists and downloads, of all stores and for all
        clients; 0: as many as they ask for. What was not read in the last 16 seconds can be read at once. All live
        lists together may read a quarter of the limit on top of it.

    Returns
    -------
    Guard
        The application. A server that ends calls its `end_streams()` before it waits for its requests; otherwise it
        has to break off live lists that are open.

    Raises
    ------
    ConfigError
        There is no root, the token is too short, or the limit is below 0.

    Examples
    --------
    >>> from pyspark_messagestore.dashboard import app
    >>> application = app(["store"])  # for any ASGI server, as in `uvicorn module:application`
    """
    if not roots:
        raise ConfigError("dashboard: found no store; give the root folder of at least one", key="ROOT")
    if token and len(token) < LEAST_TOKEN_LENGTH:
        raise ConfigError(
            f"dashboard: found a token of {len(token)} characters; allowed are {LEAST_TOKEN_LENGTH} or more",
            key="token",
        )
    if read_limit < 0:
        raise ConfigError(f"dashboard: found a limit of {read_limit}; allowed is 0 or more", key="read_limit")

    folders = tuple(os.path.abspath(folder) for folder in checkpoints)
    stores: dict[str, Stored] = {}
    checks, reads = Checks(), Reads(read_limit)

    paths = list(dict.fromkeys(map(os.path.abspath, roots)))
    own_names = {os.path.basename(path) for path in paths}
    for number, path in enumerate(paths, 1):
        name = os.path.basename(path)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name in stores:
            others = (f"store-{candidate}" for candidate in itertools.count(number))
            name = next(candidate for candidate in others if candidate not in own_names and candidate not in stores)
        stores[name] = Stored(
            name,
            path,
            folders,
            hide_bodies,
            frozenset(masks),
            decoder,
            others=partial(_ids, stores, name),
            originals=partial(_originals, stores, name),
            checks=checks,
            reads=reads,
        )

    pages = _Pages(stores, checks, read_limit)
    return Guard(pages.application(), token, hosts, pages.end, reads, _most_read)


def _most_read(path: str) -> int:
    match = re.fullmatch(r"(?:/api/v1)?/s/[^/]+/([^/]+)", path)
    return 0 if match is None else MOST_READ.get(match[1], 0)


def _ids(stores: Mapping[str, Stored], but: str) -> set[str] | None:
    """The ids of all stores but one. None: one of them cannot be read, and any query may belong to it."""
    ids_of_others = [stored.ids() for name, stored in stores.items() if name != but]
    return None if None in ids_of_others else set().union(*(ids for ids in ids_of_others if ids is not None))


def _originals(stores: Mapping[str, Stored], but: str) -> set[str]:
    """The ids that all stores but one have themselves, as far as they can be read."""
    return {stored.id() for name, stored in stores.items() if name != but} - {""}


class _Pages:
    """Answers requests about some stores. Starlette calls the methods in threads of its own."""

    def __init__(self, stores: dict[str, Stored], checks: Checks, read_limit: int) -> None:
        self._stores = stores
        self.tails, self.checks = tail.Tails(read_limit), checks
        # Every value is text, also where it was made by this package: `shown` leaves no control or format character.
        self._templates = Environment(
            loader=PackageLoader("pyspark_messagestore.dashboard"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_final,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "size": lambda value: "-" if value is None else size_words(value),
            "time": lambda value: "-" if value is None else time_words(value),
            "when": _when,
            "iso": lambda value: time_words(value).replace(" ", "T"),
            "n": lambda value: "-" if value is None else f"{value:,}",
            "count": count_words,
            "span": lambda value: "-" if value is None else span_words(value),
            "quoted": quoted,
            "typed": escape,  # as it is: what a form sends again
        }
        self._templates.globals |= {
            "width": WIDTH,
            "height": HEIGHT,
            "strip_height": STRIP_HEIGHT,
            "others": OTHERS,
            "command": command_line,
            "body_lines": _body_lines,
            "json_lines": _json_lines,
            "value_lines": _value_lines,
            "body_shown": BODY_SHOWN,
            "group_bars": _group_bars,
            "lines": _lines,
            "rate_bars": _rate_bars,
            "lag_bars": _lag_bars,
            "part_bars": _part_bars,
        }

    def end(self) -> None:
        """End what goes on without a request."""
        self.tails.end()
        self.checks.end()

    def application(self) -> Starlette:
        """The routes."""
        static = os.path.join(os.path.dirname(__file__), "static")
        return Starlette(
            routes=[
                Route("/", self.overview),
                Route("/favicon.ico", self.icon),
                Route("/login", self.login),
                Route("/healthz", self.health),
                Route("/metrics", self.metrics),
                Route("/search", self.search),
                Route("/s/{store}/body", self.body),
                Route("/s/{store}/download", self.download),
                Route("/s/{store}/events", self.events),
                Route("/s/{store}/verify/{action}", self.check, methods=["POST"]),
                Route("/s/{store}/{look}", self.page),
                Route("/s/{store}/", self.store),
                Route("/s/{store}", self.store),
                Route("/api/v1/stores", self.api_stores),
                Route("/api/v1/s/{store}/{look}", self.api),
                Mount("/static", StaticFiles(directory=static)),
            ]
        )

    # ---- pages

    def overview(self, request: Request) -> Response:
        """All stores, the worst first."""
        return self._html(request, "overview.html", {"reports": self._reports()})

    def page(self, request: Request) -> Response:
        """A page about one store."""
        stored, look = self._stored(request), request.path_params["look"]
        try:
            if stored is None or look not in LOOKS:
                raise _NoPageError("There is no such page.")
            asked = dict(request.query_params)
            stored.kept.ask()
            found = LOOKS[look](stored, asked)
        except (StoreError, OSError, _NoPageError) as error:
            return self._error(request, stored, error)
        values = {
            "store": stored,
            "asked": asked,
            "found": found,
            "copies": copies(stored, look, found),
            "tab": _TABS.get(look, look),
            "age_s": int(stored.kept.age_s),
        }
        return self._html(request, f"{look}.html", values)

    def store(self, request: Request) -> Response:
        """Lead to the first page about a store."""
        stored = self._stored(request)
        if stored is None:
            return self._error(request, None, _NoPageError("There is no such store."))
        return RedirectResponse(f"{_base(request)}/s/{stored.name}/status", 307)

    def body(self, request: Request) -> Response:
        """A body as a file that a browser does not open."""
        stored = self._stored(request)
        try:
            if stored is None:
                raise _NoPageError("There is no such store.")
            data = looks.body(stored, request.query_params)
        except (StoreError, OSError, _NoPageError) as error:
            return self._error(request, stored, error)
        headers = {"Content-Disposition": 'attachment; filename="body.bin"'}
        return StreamingResponse(_pieces(data), media_type="application/octet-stream", headers=headers)

    def download(self, request: Request) -> Response:
        """The messages of a list as a file."""
        stored, asked = self._stored(request), dict(request.query_params)
        form = asked.get("format", "jsonl")
        try:
            if stored is None:
                raise _NoPageError("There is no such store.")
            if form not in FORMATS:
                raise ConfigError(f"format: found {form!r:.60}; allowed are {', '.join(FORMATS)}", key="format")
            page = LOOKS["messages" if asked.get("offset") else "recent"](stored, asked)
        except (StoreError, OSError, _NoPageError) as error:
            return self._error(request, stored, error)
        data, kind = as_file(form, page["messages"])
        headers = {"Content-Disposition": f'attachment; filename="messages.{form}"'}
        return StreamingResponse(_pieces(data), media_type=kind, headers=headers)

    def check(self, request: Request) -> Response:
        """Start or stop the check of a store, and lead back to its page."""
        stored = self._stored(request)
        if stored is None:
            return self._error(request, None, _NoPageError("There is no such store."))
        try:
            if request.path_params["action"] == "start":
                self.checks.start(stored.path)
            else:
                self.checks.stop(stored.path)
        except BusyError as error:
            return self._error(request, stored, error)
        return RedirectResponse(f"{_base(request)}/s/{stored.name}/verify", 303)

    async def events(self, request: Request) -> Response:
        """New messages of a topic as they come, as a stream of events."""
        stored = self._stored(request)
        if stored is None:
            return JSONResponse({"error": "There is no such store."}, 404)
        try:
            return self.tails.stream(stored, dict(request.query_params), empty=request.method == "HEAD")
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 400)
        except tail.FullError as error:
            return JSONResponse({"error": str(error)}, 503, {"Retry-After": "10"})

    def search(self, request: Request) -> Response:
        """Lead the search field of the overview to the store that was chosen."""
        name = request.query_params.get("store", "")
        if name not in self._stores:
            return self._error(request, None, _NoPageError("There is no such store."))
        text = urllib.parse.urlencode({"q": request.query_params.get("q", "")})
        return RedirectResponse(f"{_base(request)}/s/{name}/search?{text}", 303)

    def icon(self, request: Request) -> Response:
        """Lead to the icon, for answers that cannot name it: browsers show JSON as a page."""
        return RedirectResponse(f"{_base(request)}/static/icon.svg", 308)

    def login(self, request: Request) -> Response:
        """The form for the token."""
        return self._html(request, "login.html", {"wrong": "wrong" in request.query_params})

    # ---- for programs

    def api_stores(self, request: Request) -> Response:  # noqa: ARG002
        """The stores and their findings."""
        return _Json({"stores": self._reports()})

    def api(self, request: Request) -> Response:
        """What a page says."""
        stored, look = self._stored(request), request.path_params["look"]
        try:
            if stored is None or look not in LOOKS:
                raise _NoPageError(f"There is no such page; there are {', '.join(LOOKS)}.")
            return _Json(LOOKS[look](stored, dict(request.query_params)))
        except (StoreError, OSError, _NoPageError) as error:
            return _Json({"error": error_words(error)}, _status_of(error))

    def health(self, request: Request) -> Response:  # noqa: ARG002
        """200 if no store has a fault, otherwise 503; with the findings."""
        reports = self._reports()
        findings = [{"store": report["name"], **finding} for report in reports for finding in report["findings"]]
        ill = any(finding["severity"] == _FAULT for finding in findings)
        return _Json({"ok": not ill, "findings": findings}, 503 if ill else 200)

    def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """The metrics of all stores, for Prometheus."""
        library = importlib.import_module("prometheus_client")
        from pyspark_messagestore.monitoring.metrics import StoreCollector

        families: dict[str, Any] = {}
        for stored in self._stores.values():
            own, others = (stored.ids() or set()) - (stored.originals() - {stored.id()}), cache(stored.others)
            readable = [progress.path for progress in stored.progress()[0] if belongs(progress, own, others)]
            for family in StoreCollector(stored.path, readable, StoreConfig(message_index_enable=False)).collect():
                family_so_far = families.setdefault(family.name, family)
                if family_so_far is not family:
                    family_so_far.samples += family.samples

        class Families:
            def collect(self) -> Iterator[Any]:
                yield from families.values()

        return Response(library.generate_latest(Families()), media_type=library.CONTENT_TYPE_LATEST)

    # ---- parts

    def _stored(self, request: Request) -> Stored | None:
        return self._stores.get(request.path_params["store"])

    def _reports(self) -> list[dict[str, Any]]:
        """The name, the path and the findings of each store, the worst first. One that cannot be read has a fault."""
        reports = []
        for stored in self._stores.values():
            try:
                status = looks.status(stored, {})
            except (StoreError, OSError) as error:
                finding = {
                    "rule": "unreadable",
                    "severity": _FAULT,
                    "sentence": error_words(error),
                    "remedy": f"run `messagestore status {quoted(stored.path)}` on this host",
                    "sinceMs": None,
                }
                status = {"findings": [finding], "messages": None, "topics": [], "left": None}

            reports.append(
                {
                    "name": stored.name,
                    "root": stored.path,
                    "left": status["left"],
                    "messages": status["messages"],
                    "topics": len(status["topics"]),
                    "findings": status["findings"],
                }
            )

        return sorted(
            reports,
            key=lambda report: (
                -sum(each["severity"] == _FAULT for each in report["findings"]),
                -len(report["findings"]),
                report["name"],
            ),
        )

    def _html(self, request: Request, template: str, values: dict[str, Any], status: int = 200) -> Response:
        base = _base(request)

        def to(look: str, stored: Stored | str, **asked: object) -> str:
            name = stored if isinstance(stored, str) else stored.name
            parameters = {key: str(value) for key, value in asked.items() if value not in (None, "")}
            return f"{base}/s/{name}/{look}" + (f"?{urllib.parse.urlencode(parameters)}" if parameters else "")

        common = {
            "base": base,
            "to": to,
            "stores": list(self._stores.values()),
            "store": None,
            "asked": {},
            "copies": {},
            "tab": "",
            "age_s": 0,
        }
        text = self._templates.get_template(template).render(common | values)
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)

    def _error(self, request: Request, stored: Stored | None, error: Exception) -> Response:
        return self._html(request, "error.html", {"store": stored, "error": error_words(error)}, _status_of(error))


class _Json(JSONResponse):
    """JSON that every parser accepts, although a body may not be text, and a decoder may return NaN."""

    def render(self, content: Any) -> bytes:
        """The bytes."""
        return json_text(content).encode("utf-8", "backslashreplace")


class _NoPageError(Exception):
    """The address leads nowhere."""


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    """A file in pieces. The request of a client that reads slowly counts as being answered until it has all of them."""
    for start in range(0, len(data), _PIECE_SIZE):
        yield data[start : start + _PIECE_SIZE]


def _base(request: Request) -> str:
    return str(request.scope.get("root_path", ""))


def _status_of(error: Exception) -> int:
    if isinstance(error, UnknownTopicError | OffsetOutOfRangeError | _NoPageError):
        return 404
    return 400 if isinstance(error, ConfigError | MessageIllegalError) else 503


# ---- values on pages


def _final(value: Any) -> Any:
    if value is None:
        return "none"
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _when(value: int | None) -> Any:
    """A time in UTC, beside which a script may write the reader's own time."""
    if value is None:
        return "-"
    words = time_words(value)
    return Markup('<time datetime="{}">{}</time>').format(words.replace(" ", "T"), words)


def _body_lines(message: dict[str, Any]) -> list[str]:
    """The lines of a body: its text, or bytes as hex."""
    if message["body"] is not None:
        return str(message["body"])[:BODY_SHOWN].replace("\r\n", "\n").replace("\t", "    ").split("\n")
    data = base64.b64decode(message["bodyBase64"])[:_HEX_SHOWN]
    return [
        f"{start:>6}  {data[start : start + _HEX_LENGTH].hex(' ', 4)}" for start in range(0, len(data), _HEX_LENGTH)
    ]


def _json_lines(text: str | None) -> list[str]:
    """A body as JSON with a value on each line; none if it is not JSON, or too large for that."""
    value = json_value(text) if text and len(text) <= BODY_SHOWN else None
    return [] if value is None else json.dumps(value, indent=2, ensure_ascii=False).split("\n")


def _lines(text: str) -> Markup:
    """Text of several lines, each of which is shown as text."""
    return Markup("\n").join(shown(line) for line in text.split("\n"))


def _value_lines(value: Any) -> list[str]:
    """A value for JSON with a value on each line, as far as a page shows it."""
    return json.dumps(value, indent=2, ensure_ascii=False)[:BODY_SHOWN].split("\n")


def _rate_bars(rate: dict[str, Any]) -> Any:
    words = [
        f"{time_words(time_ms)}: {count_words(count, 'message')}"
        for time_ms, count in zip(rate["timesMs"], rate["counts"], strict=False)
    ]
    return bars(rate["counts"], words)


def _lag_bars(history: list[dict[str, Any]]) -> Any:
    words = [
        f"{'now' if point['batchId'] is None else 'batch ' + str(point['batchId'])}, {time_words(point['timeMs'])}: "
        f"{count_words(point['lag'], 'message')} behind"
        for point in history
    ]
    return bars([point["lag"] for point in history], words)


def _group_bars(history: list[dict[str, int]]) -> Any:
    words = [f"{time_words(point['timeMs'])}: {count_words(point['lag'], 'message')} behind" for point in history]
    return bars([point["lag"] for point in history], words)


def _part_bars(found: dict[str, Any]) -> Any:
    """The parts of the log, each as wide as its bytes and divided by topic; what the next `gc` takes is marked."""
    parts, names = found["parts"]["parts"], [*(row["topic"] for row in found["parts"]["topics"]), OTHERS]
    expired = found["expired"]
    expired_end = expired["minOffset"] if expired and expired["segments"] else 0
    columns, words, marked = [], [], []
    for part in parts:
        sizes = [*part["sizes"], part["others"]]
        size_of_part, goes = max(1, sum(sizes)), part["end"] <= expired_end
        most = sorted(zip(sizes, names, strict=True), reverse=True)[:3]
        shares = ", ".join(f"{name} {100 * size // size_of_part} %" for size, name in most if size)
        columns.append(sizes)
        marked.append(goes)
        words.append(
            f"{part['begin']} to {part['end']}: {shares or 'no messages'}" + ("; the next gc takes it" if goes else "")
        )
    return stacked([part["end"] - part["begin"] for part in parts], columns, words, marked)
