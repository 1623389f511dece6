"""Random edits of bytes, as a fuzzer makes them."""

from __future__ import annotations

import random

MOST_EDITS = 8
_NASTY = (0, 1, -1, 2**15, 2**15 - 1, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 0x7FFFFFFF, 91, 8)


def mutated(data: bytes, chance: random.Random, most_edits: int = MOST_EDITS) -> bytes:
    """Return a mutated form of `data`."""
    changed = bytearray(data)
    for _ in range(min(most_edits, chance.choice((1, 1, 1, 2, 3, MOST_EDITS)))):
        size = len(changed)
        at = chance.randrange(size) if size else 0

        match chance.randrange(8):
            case 0 | 1 if size:
                changed[at] ^= 1 << chance.randrange(8)
            case 2 if size:
                changed[at] = chance.randrange(256)
            case 3:
                width = chance.choice((2, 4, 8))
                value = chance.choice(_NASTY) % (1 << 8 * width)
                at -= at % chance.choice((1, 2, 4))
                changed[at : at + width] = value.to_bytes(width, "big")
            case 4:
                del changed[at : at + chance.choice((1, 4, 20, 100))]
            case 5:
                part = changed[at : at + chance.choice((1, 4, 20, 100))]
                other = chance.randrange(size) if size else 0
                changed[other:other] = part
            case 6:
                changed[at : at + 20] = chance.randbytes(chance.choice((0, 1, 20)))
            case _:
                changed[at : at + 64] = bytes(chance.choice((0, 64)))

    return bytes(changed)
