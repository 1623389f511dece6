"""Bugs rewritten in the C source that reads records: sanitizers or a comparison with the scalar codec must find them."""

from __future__ import annotations

from crash.kernels import compiling, readings, rewritten
from crash.planting import Mutant


def _reading(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, rewritten(file, old, new), "fuzz: the kernel with sanitizers", readings)


_ALL = (
    _reading("the kernel believes BODYLEN", "frame.h", "if (f->body_size < 0 || f->body_size > left) return false;", ""),
    _reading("the kernel believes TOPICLEN", "frame.h", "if (f->topic_size < 0 || f->topic_size > left) return false;", "if (f->topic_size < 0) return false;"),
    _reading("the kernel believes a unit's place", "decode.c", "if (!inside(data, start, size)) break;", ""),
    _reading("the kernel believes its notes", "decode.c", "return inside(data, at, size) && put(out, data.bytes + at, size);", "return put(out, data.bytes + at, size);"),
    _reading("the kernel writes behind the end of a column", "decode.c", "if (size < 0 || size > out->size - out->at || out->count >= out->most_count) return NULL;", "if (size < 0 || out->count >= out->most_count) return NULL;"),
    _reading("the kernel reads a word behind the end of the data", "decode.c", "if (limit - at >= 8) return", "if (limit - at >= 0) return"),
    _reading("the kernel does not compare the CRC of a body", "frame.h", "& CRC_MASK) != f->body_crc) return false;", "& CRC_MASK) != f->body_crc) return true;"),
    _reading("the kernel does not compare the CRC of a record", "frame.h", "if (found[i] != '0' + crc % 10) return false;", "if (found[i] < '0') return false;"),
    _reading("the kernel takes a record of another topic", "decode.c", "memcmp(p + f->topic, promised->topic, (size_t)f->topic_size) == 0 &&", ""),
    _reading("the kernel takes fields from before an IPv6 host", "decode.c", "int extra = behind == 0 ? 0 : behind == 1 ? born_extra(flags) : hosts_extra(flags);", "int extra = behind == 0 ? 0 : born_extra(flags);"),
    _reading("the kernel takes the first of two properties with one name", "decode.c", "(count == MOST_PROPERTIES || has_twice(r.text, found, count))", "count == MOST_PROPERTIES"),
    _reading("the kernel gives bytes that are not UTF-8 as text", "decode.c", "if ((r.all & EACH_BYTE(0x80)) && !is_utf8(r.text, r.text + r.size)) return false;", ""),
    _reading("the kernel's scan does not look at the record's place", "scan.c", "if ((uint64_t)f.physical_offset != (uint64_t)physical_offset + (uint64_t)at) break;", ""),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = () if compiling.why_not() else _ALL
