"""Bugs planted where puts wait in memory for a commit."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

from crash.harness import die
from crash.mutants_numbers import named
from crash.planting import Mutant, kills, patched, without
from crash.workloads import POOL
from messagestore import Message, MessageStore, StoreFullError
from messagestore.files.disk import Disk
from messagestore.files.transient_store_pool import TransientStorePool
from messagestore.puts import Puts
from messagestore.services import Services
from messagestore.session import AttachedStore, attached_store
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.pool_drain import PoolDrain


def put(store: MessageStore, number: int, size: int = 10) -> bool:
    """Put a message, and say whether it is committed."""
    return store.put_message(Message("t", b"%d/" % number + b"x" * size, queue_id=0)).committed


def seen(root: Path) -> list[int]:
    """The numbers of the messages that another process sees."""
    with MessageStore.open_read_only(root, POOL) as reader:
        count = reader.max_offset("t", 0)
        messages = reader.get_message("t", 0, 0, count).messages if count else []
    assert len(messages) == count, f"{count} messages are visible, and {len(messages)} can be read"
    return [int(message.body.split(b"/")[0]) for message in messages]


def nothing_is_committed(root: Path) -> None:
    """Nobody sees puts that exist in memory only: a kill would take back what was seen."""
    store = MessageStore.open(root, POOL)
    for number in range(3):
        put(store, number)
    store.writer.publish()
    found = seen(root)
    die(root)
    assert not found, f"puts that are in memory only are visible: {found}"


def a_kill(root: Path) -> None:
    """What a result called committed is there after a kill."""
    store = MessageStore.open(root, POOL)
    committed = [number for number in range(3) if put(store, number)]
    die(root)
    with MessageStore.open(root, POOL):
        pass
    assert seen(root) == committed, f"committed: {committed}; there: {seen(root)}"


def an_end(root: Path) -> None:
    """A process that ends without a close leaves everything in the log."""
    store = MessageStore.open(root, POOL)
    for number in range(3):
        put(store, number)
    try:
        attached_store(root).detach()
    finally:
        die(root)
    del store
    assert seen(root) == [0, 1, 2], f"after the end: {seen(root)}"


def a_close_without_room(root: Path) -> None:
    """A close that finds no room can be called again."""
    disk = FullDisk()
    store = MessageStore.open(root, POOL, disk=disk)
    put(store, 0)
    store.flush()
    put(store, 1)
    disk.full = True
    try:
        store.close()
    except StoreFullError:
        disk.full = False
        store.close()
    finally:
        die(root)
    assert seen(root) == [0, 1], f"after two closes: {seen(root)}"


def many_segments(root: Path) -> None:
    """Each buffer is used for many segments, one after the other."""
    with MessageStore.open(root, POOL) as store:
        for number in range(20):
            put(store, number, 1200)
    assert seen(root) == list(range(20)), f"after a close: {seen(root)}"


class FullDisk(Disk):
    """The log has no room while `full`."""

    full = False

    def _pwrite(self, fd: int, view: bytearray | memoryview, position: int) -> int:
        if self.full and "/commitlog/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super()._pwrite(fd, view, position)


def a_full_disk(root: Path) -> None:
    """What could not be committed is committed later, and nothing is appended behind it meanwhile."""
    disk = FullDisk()
    with MessageStore.open(root, POOL, disk=disk) as store:
        put(store, 0)
        store.flush()
        put(store, 1)
        disk.full = True
        for again in (store.flush, lambda: put(store, 2)):
            try:
                again()
            except StoreFullError:
                continue
            raise AssertionError("the disk has no room for what is in memory, and nobody was told")
        disk.full = False
        put(store, 3)
    assert seen(root) == [0, 1, 3], f"after a full disk: {seen(root)}"


def without_drain(real: Any) -> Any:
    """What should commit first does not."""

    def call(writer: LogWriter, *given: Any) -> Any:
        with mock.patch.object(writer.pool_drain, "run"):
            return real(writer, *given)

    return call


def goes_on(real: Any) -> Any:
    """The next put forgets that the last commit failed."""

    def is_buffered(writer: LogWriter, *given: Any) -> Any:
        writer.pool_drain.is_stuck = False
        return real(writer, *given)

    return is_buffered


def closed_without_drain(real: Any) -> Any:
    def make_durable(store: AttachedStore, services: Services, attachment: Any) -> None:
        writer = services.writer
        writer.pending = [each for each in writer.pending if each.end <= writer.pool_drain.end]
        writer.end = writer.end._replace(physical_offset=writer.pool_drain.end)
        with mock.patch.object(writer.pool_drain, "run"):
            real(store, services, attachment)

    return make_durable


def returned_when_full(real: Any) -> Any:
    """A buffer returns to the pool as soon as its segment is full."""

    def copy(pool: TransientStorePool, physical_offset: int, data: Any) -> None:
        count = len(pool._used)
        real(pool, physical_offset, data)
        if count and len(pool._used) > count:
            pool._free.append(pool._used[-2].memory)

    return copy


def noted_before_written(real: Any) -> Any:
    """What a failed write leaves counts as committed."""

    def drain(pool: TransientStorePool, end: int, *, create: bool) -> bool:
        done: bool
        try:
            done = real(pool, end, create=create)
        except OSError:
            pool.begin = pool.end
            raise
        return done

    return drain


def says_committed(real: Any) -> Any:
    return lambda *given: real(*given)._replace(committed=True)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("puts are dispatched before they are committed", lambda: mock.patch.object(PoolDrain, "end", property(lambda drain: drain._standing.end.physical_offset)), "a reader beside", named(nothing_is_committed)),
    Mutant("a batch does not wait for the pool", patched(LogWriter, "finish", without_drain), "kills", kills("puts in a pool")),
    Mutant("the end of a process forgets the pool", patched(AttachedStore, "_make_durable", closed_without_drain), "the end of a process", named(an_end)),
    Mutant("a close that finds no room gives the pool up", without(AttachedStore, "empty_pool"), "two closes", named(a_close_without_room)),
    Mutant("a buffer returns before its segment is committed", patched(TransientStorePool, "_copy", returned_when_full), "many segments", named(many_segments)),
    Mutant("what could not be committed counts as committed", patched(TransientStorePool, "drain", noted_before_written), "a full disk", named(a_full_disk)),
    Mutant("puts go on although nothing can be committed", patched(LogWriter, "_is_buffered", goes_on), "a full disk", named(a_full_disk)),
    Mutant("a put in memory says that it is committed", patched(Puts, "_result", says_committed), "a kill", named(a_kill)),
    Mutant("messages side by side do not wait for the pool", patched(LogWriter, "append_side_by_side", without_drain), "kills", kills("puts in a pool")),
)  # fmt: skip
