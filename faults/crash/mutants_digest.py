"""Bugs planted in the digest by which a batch is recognised that comes again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from crash.digests import changed_settings, lookalikes
from crash.kernels import compiling, planted
from crash.planting import Mutant, Planted, patched
from messagestore.batches import append as transaction
from messagestore.batches import plan as batch_plan
from messagestore.format import record_encode, row_digest
from messagestore.format.record import stamps

_FOUND_BY = "replays with other rows"
_CHANGED = "replays under other settings"


def without_field(number: int) -> Planted:
    """Leave one field out, with the kernel and without it."""

    @contextlib.contextmanager
    def use() -> Iterator[None]:
        real = row_digest.digest_fields

        def fewer(texts: Any) -> Any:
            return [field for field in real(texts) if field[0] != number]

        with (
            mock.patch.object(record_encode, "digest_fields", fewer),
            mock.patch.object(row_digest, "digest_fields", fewer),
        ):
            yield

    return use


def with_stamps(real: Any) -> Any:
    """The digest covers what the store stamps."""

    def encode(*arguments: Any, limits: Any, **options: Any) -> Any:
        rows = real(*arguments, limits=limits, **options)
        return replace(rows, digest=rows.digest + len(stamps(limits)))

    return encode


def topics_first(real: Any) -> Any:
    """Whether the topics may be written is asked before whether the batch is known."""

    def check(writer: Any, source: Any, request: Any, planned: Any) -> Any:
        for index in range(len(source)):
            for run in source.read(index, with_data=False).runs():
                batch_plan.check_writable_topic(writer.files, run.topic)
        return real(writer, source, request, planned)

    return check


def asks_no_topic(_: Any) -> Any:
    return lambda *arguments: None


_IN_C = (
    Mutant("the digest leaves out the body", planted("encode.c", "BODY_FIELD, xxh3(r.body.at, (size_t)r.body.size)", "BODY_FIELD, 0"), _FOUND_BY, lookalikes),
    Mutant("the digest does not say which field a text is of", planted("encode.c", "put_native_64(items->bytes + items->size, number);", "put_native_64(items->bytes + items->size, 0 * number);"), _FOUND_BY, lookalikes),
    Mutant("the digest has the last key of a row only", planted("encode.c", "if (i > r.first_key) *at++ = ' ';", "if (i > r.first_key) *at++ = ' ', joined = at;"), _FOUND_BY, lookalikes),
    Mutant("the digest does not say which value a property has", planted("encode.c", "sum += xxh3(pair, (size_t)(at - pair));", "sum += xxh3(text.at, (size_t)text.size) + xxh3(value.at, (size_t)value.size);"), _FOUND_BY, lookalikes),
    Mutant("row hashes cancel each other out", planted("encode.c", "out->hash_sum += ", "out->hash_sum ^= "), _FOUND_BY, lookalikes),
    Mutant("the digest has Java's hash of the tag", planted("encode.c", "TAGS_FIELD, xxh3(r.tags.at, (size_t)r.tags.size)", "TAGS_FIELD, (uint64_t)tags_code"), _FOUND_BY, lookalikes),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = (
    Mutant("the digest leaves out the queue", without_field(row_digest.QUEUE_ID), _FOUND_BY, lookalikes),
    Mutant("the digest leaves out the flag", without_field(row_digest.FLAG), _FOUND_BY, lookalikes),
    Mutant("the digest leaves out the sharding key", without_field(row_digest.SHARDING_KEY), _FOUND_BY, lookalikes),
    Mutant("the digest leaves out the born time", without_field(row_digest.BORN_TIMESTAMP), _FOUND_BY, lookalikes),
    Mutant("the digest leaves out the delay level", without_field(row_digest.DELAY_TIME_LEVEL), _FOUND_BY, lookalikes),
    Mutant("the digest leaves out the unique key", without_field(row_digest.UNIQUE_KEY), _FOUND_BY, lookalikes),
    Mutant("the digest covers what the store stamps", patched(record_encode, "encode", with_stamps), _CHANGED, changed_settings),
    Mutant("a batch that comes again for a closed topic is refused", patched(transaction, "_check_journal", topics_first), _CHANGED, changed_settings),
    Mutant("a closed topic takes a batch", patched(batch_plan, "check_writable_topic", asks_no_topic), _CHANGED, changed_settings),
    *(() if compiling.why_not() else _IN_C),
)  # fmt: skip
