"""UNIQ_KEYs of single messages, as RocketMQ's clients and brokers make them: 16 bytes in hexadecimal.

    bytes 0-3    an address; here 4 random bytes for each process, which tell two machines apart
    bytes 4-5    the process id
    bytes 6-9    the hash of a class loader; here random, too
    bytes 10-13  ms since the beginning of the month, in local time
    bytes 14-15  a counter

RocketMQ's tools search for a message from the time in its key on.

Source: RocketMQ `common/message/MessageClientIDSetter.java`.
"""

from __future__ import annotations

import itertools
import os
import time

_counter = itertools.count()
_fixed: tuple[int, bytes] | None = None


def _fixed_part() -> bytes:
    """The first ten bytes of this process; a forked child gets others."""
    global _fixed  # noqa: PLW0603 - one per process
    pid = os.getpid()
    if _fixed is None or _fixed[0] != pid:
        _fixed = pid, os.urandom(4) + (pid & 0xFFFF).to_bytes(2, "big") + os.urandom(4)
    return _fixed[1]


def new_unique_key(now_ms: int) -> str:
    """A key that no other message has, for a message that is made now."""
    now = time.localtime(now_ms // 1000)
    month_ms = int(time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))) * 1000
    time_and_number = max(now_ms - month_ms, 0) << 16 | next(_counter) & 0xFFFF
    return (_fixed_part() + time_and_number.to_bytes(6, "big")).hex().upper()
