"""The services of a writer start and stop in one order, also if Ctrl-C comes in between."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from messagestore import ASYNC_FLUSH, Message, MessageStore
from messagestore.services import Services
from messagestore.writer.service_thread import ServiceThread
from messagestore.writer.standing import Standing
from small import SMALL, read_all

EVERY_SERVICE = SMALL.replace(
    flush_disk_type=ASYNC_FLUSH,
    transient_store_pool_enable=True,
    transient_store_pool_size=2,
    file_reserved_time=24,
    deliver_delayed=True,
    clean_resource_interval=86_400_000,
)
STOP_ORDER = ["retention", "delivery", "flush", "allocate", "pool"]


def name_of(service: ServiceThread) -> str:
    return service._name.removeprefix("messagestore-")


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """What is called, in order: "start x", "stop x" for each service, "end" and "retire"."""
    called: list[str] = []
    real = {"start": ServiceThread.start, "stop": ServiceThread.stop, "end": Services.end, "retire": Standing.retire}

    def start(service: ServiceThread) -> bool:
        called.append(f"start {name_of(service)}")
        return bool(real["start"](service))  # type: ignore[operator]

    def stop(service: ServiceThread) -> None:
        called.append(f"stop {name_of(service)}")
        real["stop"](service)  # type: ignore[operator]

    def end(services: Services) -> None:
        called.append("end")
        real["end"](services)  # type: ignore[operator]

    def retire(writer: Standing, why: object) -> None:
        called.append("retire")
        real["retire"](writer, why)  # type: ignore[operator]

    with (
        mock.patch.object(ServiceThread, "start", start),
        mock.patch.object(ServiceThread, "stop", stop),
        mock.patch.object(Services, "end", end),
        mock.patch.object(Standing, "retire", retire),
    ):
        yield called


def threads() -> list[str]:
    """The services that run in this process."""
    names = {thread.name.removeprefix("messagestore-") for thread in threading.enumerate()}
    return [name for name in STOP_ORDER if name in names]


def test_services_stop_in_one_order_and_start_in_the_reverse(tmp_path: Path, calls: list[str]) -> None:
    """What appends of its own accord stops first; puts are answered, and the writer is retired, when all have stopped."""
    store = MessageStore.open(tmp_path / "s", EVERY_SERVICE)
    store.put_message(Message("t", b"x", queue_id=0))
    store.close()

    started = list(dict.fromkeys(call.removeprefix("start ") for call in calls if call.startswith("start ")))
    assert [name for name in started if name in ("pool", "delivery", "retention")] == [
        "pool",
        "delivery",
        "retention",
    ]
    ended = calls[next(at for at, call in enumerate(calls) if call.startswith("stop")) :]
    stops = [f"stop {name}" for name in STOP_ORDER]
    assert ended[: len(stops)] == stops
    assert ended[-2:] == ["end", "retire"]
    assert not threads()


def test_a_close_that_is_interrupted_leaves_no_service_behind(tmp_path: Path) -> None:
    """Ctrl-C comes while the first service is stopped: the others are stopped in any case, and nothing is lost."""
    store, real = MessageStore.open(tmp_path / "s", EVERY_SERVICE), ServiceThread.stop
    store.put_message(Message("t", b"x", queue_id=0))
    interrupts = iter([KeyboardInterrupt()])

    def stop(service: ServiceThread) -> None:
        for interrupt in interrupts:
            raise interrupt
        real(service)

    with mock.patch.object(ServiceThread, "stop", stop), pytest.raises(KeyboardInterrupt):
        store.close()
    assert not threads()
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        assert read_all(store) in ([], [b"x"])  # the put was in memory, and nobody had waited for it


def test_a_second_session_shares_the_services(tmp_path: Path, calls: list[str]) -> None:
    """They stop with the last session."""
    first = MessageStore.open(tmp_path / "s", EVERY_SERVICE)
    services, count = first._attached.services, len(calls)
    second = MessageStore.open(tmp_path / "s", EVERY_SERVICE)
    assert second._attached.services is services
    assert calls[count:] == []
    first.close()
    assert services is not None
    assert not services.stopped
    second.close()
    assert services.stopped


def test_a_stop_that_was_interrupted_waits_for_the_thread_the_second_time() -> None:
    """Up to Python 3.12, a thread whose `join` was interrupted counts as ended: it wrote `spark/journal` after the lock
    was another process's.
    """
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow(ServiceThread):
        def run(self) -> None:
            begun.set()
            may_end.wait(30)
            time.sleep(0.2)
            ended.set()

    class InterruptError(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise InterruptError

    def send() -> None:
        while not service._stopped:
            time.sleep(0.001)
        time.sleep(0.1)  # by now, `stop` waits for the thread
        os.kill(os.getpid(), signal.SIGALRM)

    service = Slow("slow")
    service.start()
    assert begun.wait(30)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        sender = threading.Thread(target=send)
        sender.start()
        with pytest.raises(InterruptError):
            service.stop()
        sender.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not ended.is_set()

    may_end.set()
    service.stop()
    assert ended.is_set()
