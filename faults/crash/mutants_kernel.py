"""Bugs planted in the C source of the kernel. Without a C compiler there is no kernel, and none of them."""

from __future__ import annotations

from crash.kernels import abuses, compiling, differences, differences_of_messages, planted, rewritten, unreadable_parts
from crash.planting import Mutant

_ALL = (
    Mutant(
        "the kernel does not compare ranges with the size of their buffer",
        rewritten("module.c", "start <= end && end <= size", "start <= end"),
        "fuzz: sanitizers",
        abuses,
    ),
    Mutant(
        "the kernel believes the offsets of a column",
        rewritten("encode.c", "0 <= *start && *start <= *end && *end <= column->limit", "*start <= *end"),
        "fuzz: sanitizers",
        abuses,
    ),
    Mutant(
        "the kernel stamps behind the end of the data",
        rewritten("encode.c", "end <= data.len && start <= end - MIN_RECORD_SIZE", "end <= data.len && start <= end"),
        "fuzz: sanitizers",
        abuses,
    ),
    Mutant(
        "the kernel believes where a page of slots is",
        rewritten("index.c", "return place < put->slots_there ? place : -1;", "return place;"),
        "fuzz: sanitizers",
        abuses,
    ),
    Mutant(
        "the kernel writes entries for keys that are not there",
        rewritten("index.c", "first < 0 || count > n || first > n - count", "first < 0"),
        "fuzz: sanitizers",
        abuses,
    ),
    Mutant(
        "a part of a file that cannot be read or written is passed over",
        planted("parts.c", "if (moved < 0 || (size_t)moved != size) break;", "(void)moved;"),
        "parts that a file does not have",
        unreadable_parts,
    ),
    Mutant(
        "the kernel looks for a slot behind those that were chosen",
        rewritten("index.c", "holds(&chosen, slots_there, 4, \"chosen\")", "true"),
        "fuzz: sanitizers",
        abuses,
    ),
    Mutant(
        "a single message has no room for its UNIQ_KEY",
        rewritten("message.c", "size += (int64_t)sizeof UNIQUE_KEY - 1 + m->unique_key.size + 1;", ";"),
        "fuzz: sanitizers",
        abuses,
    ),
    Mutant(
        "the kernel stamps a message that is shorter than a head",
        rewritten("message.c", "if (size < MIN_RECORD_SIZE) {", "if (size < 0) {"),
        "fuzz: sanitizers",
        abuses,
    ),
    Mutant(
        "the kernel notes more properties than it has room for",
        rewritten("message.c", "if (m->pair_count == MAX_PAIRS) return false;", ""),
        "fuzz: sanitizers",
        abuses,
    ),
    Mutant(
        "a single message may have a property that RocketMQ uses itself",
        planted("message.c", "        if (found) return false;\n", ""),
        "both codecs compared",
        differences_of_messages,
    ),
    Mutant(
        "the tags of a single message may have a separator",
        planted("message.c", "take_text(from, blanks, text);", "take_any_text(from, text);"),
        "both codecs compared",
        differences_of_messages,
    ),
    Mutant(
        "the store time of a single message from IPv6 is written into its born host",
        planted("message.c", "(v6 ? HOST_V6_SIZE - HOST_V4_SIZE : 0)", "0 * v6"),
        "both codecs compared",
        differences_of_messages,
    ),
    Mutant(
        "BODYCRC does not cover the last byte",
        planted("encode.c", "crc32_update(0, r.body.at, (size_t)r.body.size)", "crc32_update(0, r.body.at, (size_t)r.body.size - !!r.body.size)"),
        "both codecs compared",
        differences,
    ),
    Mutant(
        "the kernel stamps only records that have properties",
        planted("encode.c", "append(at, b->stamps.buf, b->stamps.len)", "append(at, b->stamps.buf, b->pair_lists.there ? b->stamps.len : 0)"),
        "both codecs compared",
        differences,
    ),
    Mutant(
        "__CRC32# covers its own name",
        planted("texts.h", "crc32_update(0, record, (size_t)size)", "crc32_update(0, record, (size_t)size + 9)"),
        "both codecs compared",
        differences,
    ),
    Mutant(
        "a surrogate pair is hashed as one unit",
        planted("javahash.c", "} else if (point >= 0x10000) {", "} else if (point >= 0x110000) {"),
        "both codecs compared",
        differences,
    ),
    Mutant(
        "CRC-32 by multiplication drops what is left of the last 16 bytes",
        planted("crc32.c", "if (size) { /* r = size", "if (size > 1) { /* r = size"),
        "both codecs compared",
        differences,
    ),
    Mutant(
        "a row without keys has those that its offsets name",
        planted("encode.c", "    if (*null) {\n        *start", "    if (*null && column->data.buf) {\n        *start"),
        "both codecs compared",
        differences,
    ),
    Mutant(
        "a property's name may come twice if the row before had it",
        planted("encode.c", "    if (!changed) return true;", "    if (!changed || known->count) return true;"),
        "both codecs compared",
        differences,
    ),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = () if compiling.why_not() else _ALL
