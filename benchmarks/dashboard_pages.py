"""What the pages of `messagestore dashboard` cost, at three stores.

    large     100 topics and a writer at work, in so many bytes as `--size` says
    queues    10,000 queues
    groups    700 topics, which 25 groups read

The dashboard runs in a process of its own and is asked over HTTP. A page counts when its last byte is here; what a
browser needs to paint it is not measured. Processor time and memory are those of that process, as the kernel counts
them.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import dashboard_stores as stores
from benchmarks.measure import Rounds, Settings, title
from messagestore import ASYNC_FLUSH, Message, MessageStore, StoreConfig

_LOOKS, _QUICK_LOOKS = 200, 20
_TABS = 20
_STATIC = ("style.css", "page.js")
"""What the first view loads; a view with a curve also loads `_CURVES`."""
_CURVES = ("uplot/uPlot.iife.min.js", "uplot/uPlot.min.css")
_TOPICS, _QUEUES, _GROUP_TOPICS, _GROUPS = 100, 10_000, 700, 25


_COMMAND = (sys.executable, "-m", "pyspark_messagestore.command", "dashboard")


def _environment() -> dict[str, str]:
    """The variables of a process that finds its modules compiled, as pip leaves them."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Dashboard:
    """A dashboard that runs, and how long it took until its first page was here.

    Parameters
    ----------
    root : Path
    """

    def __init__(self, root: Path) -> None:
        command = [*_COMMAND, str(root), "--listen", "127.0.0.1:0"]
        begin = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment())
        assert self._process.stdout is not None
        self.port = urllib.parse.urlsplit(self._process.stdout.readline().strip()).port or 0
        self.name = root.name
        self.get("/")
        for name in _STATIC:
            self.get(f"/static/{name}")
        self.first_view_s = time.perf_counter() - begin

    @property
    def pid(self) -> int:
        """The process that answers."""
        return self._process.pid

    def get(self, address: str) -> bytes:
        """The body of an answer; another status than 200 is an error."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("GET", address)
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise AssertionError(f"{address}: {answer.status} {body[:300]!r}")
            return body
        finally:
            connection.close()

    def page(self, look: str, **asked: object) -> bytes:
        """A page about the store."""
        return self.get(f"/s/{self.name}/{look}?{urllib.parse.urlencode(asked)}")

    @contextlib.contextmanager
    def live(self, topic: str) -> Iterator[http.client.HTTPResponse]:
        """A live list, which has begun."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", f"/s/{self.name}/events?topic={topic}")
        answer = connection.getresponse()
        while answer.readline() != b"event: begin\n":
            pass
        try:
            yield answer
        finally:
            answer.close()
            connection.close()

    def cpu_s(self) -> float:
        """The processor time that its threads have used which are there."""
        total_ns = 0
        for task in Path("/proc", str(self.pid), "task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                total_ns += int((task / "schedstat").read_text().split()[0])
        return total_ns / 1e9

    def switches(self) -> int:
        """How often its threads have been woken up."""
        total = 0
        for task in Path("/proc", str(self.pid), "task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                text = (task / "status").read_text()
                total += int(text.partition("voluntary_ctxt_switches:")[2].split()[0])
        return total

    def memory_mib(self) -> float:
        """The most memory that it has had."""
        text = Path("/proc", str(self.pid), "status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) / 1024

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(60)


@contextlib.contextmanager
def _running(root: Path) -> Iterator[Dashboard]:
    dashboard = Dashboard(root)
    try:
        yield dashboard
    finally:
        dashboard.end()


def run(settings: Settings) -> None:
    """Make the stores, and take all figures."""
    scale = 50 if settings.quick else 1
    size = settings.size or ((64 << 20) if settings.quick else (10 << 30))
    count = _QUICK_LOOKS if settings.quick else _LOOKS
    seconds = 1.0 if settings.quick else 10.0
    large, queues, groups = (settings.folder / name for name in ("large", "queues", "groups"))
    stores.large(large, size, _TOPICS)
    stores.many_queues(queues, _QUEUES // scale)
    stores.many_groups(groups, _GROUP_TOPICS // scale, _GROUPS)

    subprocess.run([*_COMMAND, "--help"], stdout=subprocess.DEVNULL, env=_environment(), check=True)  # compiles modules
    title(f"pages of a store of {size / 2**30:,.1f} GiB in {_TOPICS} topics, beside a writer at work")
    rounds = Rounds()
    with stores.writing(large, rate=20):
        for _ in range(settings.rounds):
            with _running(large) as dashboard:
                rounds.add("dashboard.large.first_view", dashboard.first_view_s)
                _look(rounds, "large", dashboard, _views("t-", _TOPICS, 8), count)
                _look(rounds, "large.message", dashboard, _messages(), count)
                _tabs(rounds, dashboard)
    rounds.report("dashboard.large.first_view", "s", goal=1.5, lower_is_better=True)
    rounds.report("dashboard.large.p95", "ms", goal=100, lower_is_better=True)
    for name in ("large.p50", "large.cpu_p95", "large.cpu_p50", "large.message.cpu_p95"):
        rounds.report(f"dashboard.{name}", "ms", lower_is_better=True)
    rounds.report("dashboard.large.message.p95", "ms", goal=100, lower_is_better=True)
    rounds.report("dashboard.memory", "MiB", goal=150, lower_is_better=True)

    for name, root, topics, each in (
        ("queues", queues, 10, _QUEUES // scale // 10),
        ("groups", groups, _GROUP_TOPICS // scale, 4),
    ):
        title(f"pages of the store with many {name}")
        for _ in range(settings.rounds):
            with _running(root) as dashboard:
                rounds.add(f"dashboard.{name}.first_view", dashboard.first_view_s)
                _look(rounds, name, dashboard, _views("t-", topics, each), count)
        rounds.report(f"dashboard.{name}.first_view", "s", lower_is_better=True)
        rounds.report(f"dashboard.{name}.p95", "ms", goal=400, lower_is_better=True)
        for figure in ("p50", "cpu_p95", "cpu_p50"):
            rounds.report(f"dashboard.{name}.{figure}", "ms", lower_is_better=True)

    title("what goes on without a click")
    for _ in range(settings.rounds):
        with _running(large) as dashboard:
            _idle(rounds, dashboard, seconds)
            _arrivals(rounds, dashboard, large, count)
            _with_writer(rounds, dashboard, large, seconds)
    rounds.report("dashboard.idle.wake_ups", "a second", goal=0, lower_is_better=True)
    rounds.report("dashboard.live.cpu", "% of a core", goal=2, lower_is_better=True)
    rounds.report("dashboard.live.p99", "ms", goal=250, lower_is_better=True)
    rounds.report("dashboard.live.p50", "ms", lower_is_better=True)
    rounds.report("dashboard.writer.alone", "messages/s")
    rounds.report("dashboard.writer.watched", "messages/s", floor="dashboard.writer.alone", goal_ratio=0.98)

    rounds.add("dashboard.first_view.size", _compressed_size() / 1000)
    rounds.report("dashboard.first_view.size", "KB", goal=80, lower_is_better=True)


Ask = Callable[[Dashboard, random.Random], bytes]


def _views(prefix: str, topic_count: int, queue_count: int) -> list[Ask]:
    """Each view, of a topic and queue by chance."""

    def of(look: str, **asked: object) -> Ask:
        return lambda dashboard, _: dashboard.page(look, **asked)

    def of_topic(look: str, *, queue: bool = False) -> Ask:
        def ask(dashboard: Dashboard, chance: random.Random) -> bytes:
            asked: dict[str, object] = {"topic": f"{prefix}{chance.randrange(topic_count)}"}
            return dashboard.page(look, **asked, **({"queue": chance.randrange(queue_count)} if queue else {}))

        return ask

    return [
        lambda dashboard, _: dashboard.get("/"),
        of("status"),
        of("topics"),
        of("topics", sort="messages"),
        of_topic("topic"),
        of_topic("recent"),
        of_topic("messages", queue=True),
        of("readers"),
        of("spark"),
        of("log"),
    ]


def _messages() -> list[Ask]:
    """A message by its place, by its key, and its own page."""
    return [
        lambda dashboard, chance: dashboard.page(
            "search", q=f"t-{chance.randrange(_TOPICS)}/0 @{chance.randrange(10)}"
        ),
        lambda dashboard, chance: dashboard.page("search", q=f"order-{chance.randrange(50)}"),
        lambda dashboard, chance: dashboard.page(
            "message", topic=f"t-{chance.randrange(_TOPICS)}", queue=0, offset=chance.randrange(10)
        ),
    ]


def _look(rounds: Rounds, name: str, dashboard: Dashboard, asks: list[Ask], count: int) -> None:
    """Ask in turn, and add the median and the 95th percentile in milliseconds, also of the processor time."""
    chance, times_ms, cpus_ms = random.Random(1), [], []
    for number in range(count):
        begin, begin_cpu_s = time.perf_counter(), dashboard.cpu_s()
        asks[number % len(asks)](dashboard, chance)
        times_ms.append(1000 * (time.perf_counter() - begin))
        cpus_ms.append(1000 * (dashboard.cpu_s() - begin_cpu_s))
    for percentile in (50, 95):
        rounds.add(f"dashboard.{name}.p{percentile}", float(np.percentile(times_ms, percentile)))
        rounds.add(f"dashboard.{name}.cpu_p{percentile}", float(np.percentile(cpus_ms, percentile)))


def _tabs(rounds: Rounds, dashboard: Dashboard) -> None:
    """The memory with so many tabs, each with a live list and each of which has shown all views."""
    with contextlib.ExitStack() as tabs:
        for number in range(_TABS):
            tabs.enter_context(dashboard.live(f"t-{number}"))
            for ask in _views("t-", _TOPICS, 8):
                ask(dashboard, random.Random(number))
        rounds.add("dashboard.memory", dashboard.memory_mib())


def _idle(rounds: Rounds, dashboard: Dashboard, seconds: float) -> None:
    """Wake-ups without a tab, and the processor with one that is live at a store at rest."""
    time.sleep(6.0)  # connections that are kept alive have ended
    before = dashboard.switches()
    time.sleep(seconds)
    rounds.add("dashboard.idle.wake_ups", (dashboard.switches() - before) / seconds)
    with dashboard.live("t-0"):
        before_s = dashboard.cpu_s()
        time.sleep(seconds)
        rounds.add("dashboard.live.cpu", 100 * (dashboard.cpu_s() - before_s) / seconds)


def _arrivals(rounds: Rounds, dashboard: Dashboard, root: Path, count: int) -> None:
    """From the begin of a put until its event is here."""
    delays_ms: list[float] = []
    with (
        dashboard.live("arrivals") as answer,
        MessageStore.open(root, StoreConfig(flush_disk_type=ASYNC_FLUSH)) as store,
    ):

        def put() -> None:
            for _ in range(count):
                time.sleep(0.05)
                store.put_message(Message("arrivals", repr(time.perf_counter()).encode(), queue_id=0))

        thread = threading.Thread(target=put)
        thread.start()
        while len(delays_ms) < count:
            line = answer.readline()
            if line.startswith(b"data: ") and b'"body"' in line:
                sent_s = float(json.loads(line[6:])["body"])
                delays_ms.append(1000 * (time.perf_counter() - sent_s))
        thread.join()
    for percentile in (50, 99):
        rounds.add(f"dashboard.live.p{percentile}", float(np.percentile(delays_ms, percentile)))


def _with_writer(rounds: Rounds, dashboard: Dashboard, root: Path, seconds: float) -> None:
    """The rate of a writer alone, and with a live list and a page every second; by turns, three times each."""
    rates: dict[str, list[float]] = {"alone": [], "watched": []}
    for number in range(6):
        kind = "alone" if number % 2 == 0 else "watched"
        writer = stores.Writer(root)
        if kind == "alone":
            time.sleep(seconds / 2)
        else:
            with dashboard.live("t-0") as answer:
                ended = threading.Event()
                reading = threading.Thread(target=_read_on, args=(answer, ended))
                reading.start()
                until_s = time.perf_counter() + seconds / 2
                while time.perf_counter() < until_s:
                    dashboard.page("recent", topic="t-0")
                    time.sleep(1.0)
                ended.set()
                reading.join()
        rates[kind].append(writer.end())
    for kind, values in rates.items():
        rounds.add(f"dashboard.writer.{kind}", statistics.median(values))


def _read_on(answer: http.client.HTTPResponse, ended: threading.Event) -> None:
    while not ended.is_set() and answer.readline():
        pass


def _compressed_size() -> int:
    """The bytes of all script and style, as a proxy that compresses sends them."""
    import pyspark_messagestore.dashboard as package

    folder = os.path.join(os.path.dirname(package.__file__), "static")
    return sum(len(gzip.compress(Path(folder, name).read_bytes(), 9)) for name in (*_STATIC, *_CURVES))
