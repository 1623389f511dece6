"""Bugs planted where half messages are prepared, ended, checked and found again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from crash import halves
from crash.planting import Case, Ground, Mutant, Search, patched
from messagestore import Message, ReadOnlyStore
from messagestore.batches.append import append_own
from messagestore.batches.own_records import chunks_of
from messagestore.broker import halves as half_messages
from messagestore.broker.half_checks import HalfChecks
from messagestore.broker.halves import HalfMessages
from messagestore.broker.open_halves import OpenHalves
from messagestore.format import half_records, record
from messagestore.format.rows import Row
from messagestore.puts import Puts


def interrupted(*names: str, power_cuts: bool = False) -> Search:
    """Kill the story of half messages at each of its operations, or cut the power."""

    def search(ground: Ground) -> Iterator[Case]:
        for name in names:
            cases = list(halves.deaths(halves.Story.of(name, ground.root), stride=1 if power_cuts else 1 << 30))
            ground.chance.shuffle(cases)
            for death in cases:
                if death.power_cut == power_cuts:
                    yield halves.Judge(death, ground.root).judge

    return search


def alone(own: HalfMessages, records: Sequence[bytearray]) -> list[Row]:
    """Append records without an op message."""
    writer = own.session.writer
    config = writer.files.config
    chunks = chunks_of(records, property_crc=config.enabled_append_prop_crc)
    return append_own(writer, chunks, config.flush_disk_type) if records else []


def in_two_appends(real: Any) -> Any:
    """What a half message becomes is one batch, and its op message is another."""
    return lambda own, records, ended: [*alone(own, records), *real(own, [], ended)]


def op_first(real: Any) -> Any:
    """As `in_two_appends`, but the op message comes first."""

    def append(own: HalfMessages, records: Sequence[bytearray], ended: Sequence[int]) -> Any:
        op = real(own, [], ended)
        return [*alone(own, records), *op]

    return append


def without_op(real: Any) -> Any:
    """Half messages that are discarded have not ended."""

    def append(own: HalfMessages, records: Sequence[bytearray], ended: Sequence[int]) -> Any:
        discards = any(halves.DISCARDED.encode() in data for data in records)
        return alone(own, records) if discards else real(own, records, ended)

    return append


def like_newest(real: Any) -> Any:
    """An op message ends with a comma, as a broker's does since RocketMQ 5.1."""

    def ended(queue_offset: int, *given: Any) -> bytearray:
        data = record.decode_message(bytes(real(queue_offset, *given)), verify=False)
        message = Message(data.topic, data.body + b",", tags=data.tags, born_timestamp_ms=data.born_timestamp_ms)
        return record.encode_message(message, queue_id=0, store_host=given[1], limits=given[2])

    return ended


def always_open(real: Any) -> Any:
    """Whoever has a half message may end it, also if it has ended."""
    return lambda _, half: half


def reads_ops_once(real: Any) -> Any:
    """Op messages that were appended since the first look are not read."""

    def refresh(own: OpenHalves) -> None:
        if own._generation != -1:
            own.view.refresh()
            own._op_end = own.view.max_offset(halves.OP, 0)
        real(own)

    return refresh


def passes_open_ones(real: Any) -> Any:
    """The progress says that everything was looked at."""
    return lambda own: (own._half_end, own._op_end)


def counts_nothing(real: Any) -> Any:
    """A half message that is put back has as many checks as before."""
    return lambda half: {half_records._CHECK_TIMES: str(half.check_times)}


def does_not_wait(real: Any) -> Any:
    """A half message is acknowledged before it is synced."""
    return lambda own, *given, wait: real(own, *given, wait=False)


def asks_first(real: Any) -> Any:
    """Half messages are handed to the check before they are put back."""

    def check(own: HalfChecks, ask: Any) -> Any:
        with own._halves() as current:
            for half in current.open_halves():
                message = ReadOnlyStore(current.session.create_view()).look_message_by_id(half.message_id)
                if message is not None and half.born_timestamp_ms == halves.LONG_AGO_MS:
                    ask(message)
        return real(own, lambda message: halves.plan(message.body))

    return check


MUTANTS: tuple[Mutant, ...] = (
    Mutant("a commit and its op message are two appends", patched(HalfMessages, "append", in_two_appends), "kills", interrupted("sync")),
    Mutant("a half message has ended before its message is committed", patched(HalfMessages, "append", op_first), "kills", interrupted("sync")),
    Mutant("a discarded half message stays open", patched(HalfMessages, "append", without_op), "kills", interrupted("sync")),
    Mutant("a broker before 5.1 cannot read an op message", patched(half_records, "ended", like_newest), "kills", interrupted("sync")),
    Mutant("a half message that has ended is ended again", patched(half_messages, "_now", always_open), "kills", interrupted("sync")),
    Mutant("what is open is what the process remembers", patched(OpenHalves, "refresh", reads_ops_once), "kills", interrupted("sync")),
    Mutant("the progress passes open half messages", patched(OpenHalves, "progress", passes_open_ones), "kills", interrupted("sync")),
    Mutant("a check is not counted", patched(half_records, "_checked_again", counts_nothing), "kills", interrupted("sync")),
    Mutant("a check is counted after it is made", patched(HalfChecks, "check", asks_first), "kills", interrupted("sync")),
    Mutant("a half message is acknowledged before its sync", patched(Puts, "put_encoded", does_not_wait), "power cuts", interrupted("sync", power_cuts=True)),
)  # fmt: skip
