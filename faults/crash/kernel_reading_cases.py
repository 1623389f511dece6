"""Records, segments and notes with which the kernel that reads records is attacked: a part of `kernel_cases`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

import both_codecs
from crash.mutations import mutated
from messagestore.format import kernel, record_decode
from messagestore.format.layout import IPV6_EXTRA_SIZE, RECORD_HEAD, TOPIC_LENGTH_SIZES


def _changed(data: bytes, chance: random.Random) -> np.ndarray:
    """A mutated form of the data, in a buffer that ends with them."""
    return np.frombuffer(bytearray(mutated(data, chance) if chance.random() < 0.8 else data), np.uint8).copy()


def _topic_beyond_the_end(record: bytes, chance: random.Random) -> bytes:
    """The record with a topic length by which the topic ends behind the record, by a few bytes: the sanitizer sees those."""
    magic, sys_flag = (int.from_bytes(record[at : at + 4], "big", signed=True) for at in (4, 36))
    body = RECORD_HEAD.size + IPV6_EXTRA_SIZE * ((sys_flag >> 4 & 1) + (sys_flag >> 5 & 1))
    at = body + int.from_bytes(record[body - 4 : body], "big")
    size = TOPIC_LENGTH_SIZES[magic]

    length = len(record) - (at + size) + chance.randrange(9)
    if length >= 1 << (8 * size - 1):
        return record
    return record[:at] + length.to_bytes(size, "big") + record[at + size :]


def _records(chance: random.Random) -> None:
    """Records among which some are changed, where units say that they are, or elsewhere; or none is changed."""
    queue = both_codecs.queue if chance.random() < 0.5 else both_codecs.chain
    pieces = queue(chance, chance.choice((1, 3, 9)))
    columns = chance.sample(both_codecs.ALL, chance.choice((1, 4, len(both_codecs.ALL))))
    if chance.random() < 0.3:
        both_codecs.both(*both_codecs.laid_out(pieces), columns)
        return
    if chance.random() < 0.3:
        pieces[-1] = _topic_beyond_the_end(pieces[-1], chance)
    data, starts, sizes = both_codecs.laid_out(pieces)
    expected = both_codecs.promised(pieces) if chance.random() < 0.5 else None
    if expected is not None and chance.random() < 0.1:
        expected = replace(expected, topic=expected.topic[:-1] + chr(ord(expected.topic[-1]) ^ 1))
    for _ in range(chance.choice((0, 0, 1, 3))):
        starts[chance.randrange(len(pieces))] = chance.choice((*both_codecs.INT64, len(data), len(data) - 91))
    for _ in range(chance.choice((0, 0, 1, 3))):
        sizes[chance.randrange(len(pieces))] = chance.choice((0, -1, 90, 91, 2**31 - 1, -(2**31)))
    verify = chance.random() < 0.3  # a CRC would refuse most of what else is looked for
    both_codecs.both(
        _changed(data.tobytes(), chance), starts, sizes, columns, expected=expected, verify_body_crc=verify
    )


def _segments(chance: random.Random) -> None:
    data = _changed(both_codecs.laid_out(both_codecs.chain(chance, 5))[0].tobytes(), chance)
    left = chance.choice((len(data), len(data) + 8, 0, 2**40))
    both_codecs.compare_scans(data, chance.choice((both_codecs.PLACE, 0, 2**62)), chance.random() < 0.5, left)


def abuse_notes(lib: kernel.Kernel, chance: random.Random) -> None:
    """The notes that the kernel keeps with its caller between two steps, with changed numbers."""
    none = np.empty(0, np.int64)
    data, starts, sizes = both_codecs.laid_out(both_codecs.chain(chance, 4))
    rows = np.empty(4, record_decode._ROW)
    texts, totals = np.empty((4, 8), np.int32), np.empty(15, np.int64)
    lib.frame(data, starts, sizes, rows, True, b"", 0, none, none, none)
    lib.measure(data, rows, texts, record_decode._RESERVED, 7, totals)
    for notes in (rows, texts):
        numbers = notes.view(np.int32).reshape(-1)
        for _ in range(chance.choice((0, 1, 3))):
            numbers[chance.randrange(len(numbers))] = chance.choice((0, 1, -1, 88, 2**31 - 1, -(2**31)))
    data = _changed(data.tobytes(), chance)

    def room(most: int) -> np.ndarray:
        return np.empty(chance.choice((0, 1, most // 2, most)), np.uint8)

    offsets = np.empty(5, np.int32)
    calls: list[Callable[[], object]] = [
        lambda: lib.measure(data, rows, texts, record_decode._RESERVED, chance.randrange(8), totals),
        lambda: lib.fill_values(data, rows, texts, chance.randrange(5, 8), offsets, room(400), np.zeros(1, np.uint8)),
        lambda: lib.fill_values(data, rows, none, chance.randrange(-1, 5), offsets, room(400), none),
        lambda: lib.fill_keys(data, rows, texts, offsets, np.empty(chance.randrange(9), np.int32), room(400)),
        lambda: lib.fill_map(
            data, rows, texts, record_decode._RESERVED, chance.randrange(2), offsets,
            np.empty(chance.randrange(40), np.int32), room(400), np.empty(chance.randrange(40), np.int32), room(400),
        ),
        lambda: lib.fill_numbers(data, rows, chance.choice((0, 84, -1, 2**31 - 1)), chance.randrange(3), 8, np.empty(4)),
    ]  # fmt: skip
    for call in chance.choices(calls, k=4):
        try:
            call()
        except ValueError:
            pass


def differences_in_reading(_: kernel.Kernel, chance: random.Random) -> None:
    """Compare what the kernel reads of hostile bytes with what the scalar codec reads."""
    try:
        chance.choice((_records, _segments))(chance)
    except ValueError as error:  # whatever the bytes are, the arguments fit
        raise AssertionError(f"{error}") from error
