"""Bugs planted in the server of a store and in its clients."""

from __future__ import annotations

import http.client
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from crash import afar, proxy
from crash.judge import Verdict
from crash.planting import Ground, Mutant, patched, without
from crash.proxy import Fault
from messagestore import BatchRequest, ConfigError, ProtocolError, StoreUnavailableError
from messagestore.files import staging_files
from messagestore.files.disk import Disk
from messagestore.files.staging_files import Write
from messagestore.serve.hosted import Hosted
from messagestore.serve.lifecycle import ServedStore
from messagestore.serve.limits import Limits, Share, StagedBytes
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from messagestore.spi import ColumnTexts, connections, encode, store_host_of
from messagestore.spi.connections import Connection
from messagestore.spi.location import RemoteSettings
from messagestore.spi.remote import RemoteStores
from messagestore.spi.wire import versions
from small import SMALL, bodies, columns, filled
from spark_faults.processes import connect

_STORES = RemoteStores(RemoteSettings(retry_timeout_s=0.1))
_LIMIT = 25_000
"""Two files of the client fit, and three do not."""
_CUTS = 40


class _Served:
    """A store, and a server with a limit that is started again at will."""

    def __init__(self, folder: Path) -> None:
        self.root = str(filled(folder / "served", 4))
        self._server: Server | None = None
        self.restart()

    def restart(self) -> None:
        self.stop()
        self._server = Server(Service(Hosted(self.root, SMALL), Limits(staged=_LIMIT), spoken=versions.SPOKEN))
        self._server.start()
        self.writer = _STORES.writer(self._server.url, SMALL, staging_ttl_s=60)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()

    def stage(self, batch: int, driver: str = "0") -> Any:
        store_id, host = self.writer.prepare().store_id, store_host_of(SMALL)
        with self.writer.stage(Write(driver, "k", batch), store_id) as staging:
            staging.write(encode(ColumnTexts(columns(bodies(50))), limits=SMALL, store_host=host, born_host=host))
            return staging.finish()

    def refused(self, batch: int, expected: bool) -> Verdict:
        """Whether the limit acts as it should; a file that is accepted is given up."""
        try:
            staged = self.stage(batch)
        except StoreUnavailableError as error:
            return Verdict(misread=[] if expected else [f"refused: {error}"])
        self.writer.abort([staged.name], self.writer.prepare().store_id)
        return Verdict(misread=["a client over its limit was not refused"] if expected else [])


def staged_bytes(ground: Ground) -> Iterator[Verdict]:
    """A client up to its limit and over it, before and after a restart, a commit and an abort."""
    served = _Served(ground.folder)
    try:
        files = [served.stage(batch) for batch in range(2)]
        yield served.refused(2, expected=True)
        served.restart()
        yield served.refused(2, expected=True)
        store_id = served.writer.prepare().store_id
        served.writer.commit(files[:1], BatchRequest("app", 0), store_id)
        yield served.refused(2, expected=False)
        served.writer.abort([files[1].name], store_id)
        files = [served.stage(batch) for batch in (3, 4)]
        yield served.refused(5, expected=True)
    finally:
        served.stop()


def names_from_outside(ground: Ground) -> Iterator[Verdict]:
    """A client that chooses what becomes part of a file's name."""
    served = _Served(ground.folder)
    try:
        for driver in ("../../../escaped", "a/b", "a"):
            try:
                served.stage(0, driver)
                yield Verdict(misread=[f"the driver {driver!r} was accepted"])
            except ConfigError:
                yield Verdict()
    finally:
        served.stop()


class _Full(Disk):
    """A disk without room, or without names."""

    def __init__(self, free: int, names: int) -> None:
        self._room, self._names = free, names

    def free(self, path: str | Path) -> int:
        return self._room

    def free_names(self, path: str | Path) -> int:
        return self._names


def full_disks(ground: Ground) -> Iterator[Verdict]:
    """What a server says of itself whose disk has room for a frame and a name, or not."""
    root = str(filled(ground.folder / "served", 4))
    frame = Limits().frame
    for free, names, full in ((frame, 1, False), (frame - 1, 1, True), (frame, 0, True)):
        served = ServedStore(root, SMALL, disk=_Full(free, names))
        served.start()
        words = served._not_ready()
        served.stop(0.0)
        yield Verdict(misread=[] if bool(words) == full else [f"{free} bytes and {names} names: {words or 'ready'}"])


def other_releases(ground: Ground) -> Iterator[Verdict]:
    """A client two releases later."""
    served = _Served(ground.folder)
    try:
        with mock.patch.object(versions, "SPOKEN", (8, 9)):
            try:
                served.writer.describe()
                yield Verdict(misread=["a client of another protocol was answered"])
            except ProtocolError:
                yield Verdict()
    finally:
        served.stop()


def cut_answers(ground: Ground) -> Iterator[Verdict]:
    """Connections that end between a server and its clients, in the middle of answers."""
    host = afar.Afar(ground.folder)
    with pytest.MonkeyPatch.context() as patch:
        connect(patch)
        patch.setattr(connections, "ANSWER_TIMEOUT_S", 1.0)
        with host.running():
            yield host.case(1_000_000, None, named=True)
            passed = host.passed
            for number in range(_CUTS):
                fault = afar.chosen(passed, random.Random(number))
                yield host.case(number, Fault("close", proxy.DOWN, fault.at), named=number % 2 > 0)


def _any_end(real: Any) -> Any:
    """The end of the connection is the end of the stream."""

    def stream(connection: Connection, verb: str, text: bytes, **how: bool) -> Iterator[Any]:
        count = 0
        try:
            for frame in real(connection, verb, text, **how):
                yield frame
                count += 1
        except (http.client.IncompleteRead, ConnectionError):
            if verb != "gather" or not count:
                raise
            yield mock.Mock(head={"done": {"parts": count}})

    return stream


def _unchecked(_: Any) -> Any:
    def path(write: Write, folder: str, client: str = "") -> str:
        return (
            f"{folder}/{write.driver}-{staging_files._digits(write.key)}.{write.batch}-0-01234567.writing" + client[:0]
        )

    return path


MUTANTS = (
    Mutant("a server that was restarted forgets what clients have staged", without(Hosted, "staged", {}), "staged bytes", staged_bytes),
    Mutant("what was committed still counts as staged", patched(StagedBytes, "_counted", lambda real: lambda counts, client: max(counts._counts.get(client, 0), real(counts, client))), "staged bytes", staged_bytes),
    Mutant("what a client sends is not counted", without(Share, "take"), "staged bytes", staged_bytes),
    Mutant("a client names a file outside the staging folder", patched(Write, "path", _unchecked), "names from outside", names_from_outside),
    Mutant("a server with a full disk is ready", without(ServedStore, "_no_room", ""), "full disks", full_disks),
    Mutant("every version of the protocol is understood", without(versions, "check", 1), "other releases", other_releases),
    Mutant("a stream that was cut is taken for a whole one", patched(Connection, "stream", _any_end), "cut answers", cut_answers),
)  # fmt: skip
