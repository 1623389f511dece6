"""Which versions of the protocol this release speaks, and what both sides say about it."""

from __future__ import annotations

import re

from messagestore.errors import ProtocolError

SPOKEN = (1, 1)
"""The oldest and the newest version that this release speaks. One release back is always among them."""
HEADER = "Messagestore-Protocol"
"""Each request and each answer says with this header what its sender speaks, as in `1-1`."""
REQUEST_ID = "X-Request-Id"


def words(spoken: tuple[int, int] | None = None) -> str:
    """The value of the header; None: of `SPOKEN`."""
    oldest, newest = spoken or SPOKEN
    return f"{oldest}-{newest}"


def check(theirs: str, whose: str, spoken: tuple[int, int] | None = None) -> int:
    """The newest version that both sides speak.

    Parameters
    ----------
    theirs : str
        The header of the other side.
    whose : str
        The other side, for the error.
    spoken : (int, int), optional
        What this side speaks; None: `SPOKEN`.

    Raises
    ------
    ProtocolError
        There is none. The message names both ranges.
    """
    ours = spoken or SPOKEN
    match = re.fullmatch(r"(\d{1,4})-(\d{1,4})", theirs)
    if match is None:
        raise ProtocolError(f"the {whose} does not say which protocol it speaks; allowed is one of {words(ours)}")
    newest = min(ours[1], int(match[2]))
    if newest < max(ours[0], int(match[1])):
        raise ProtocolError(
            f"the {whose} speaks protocol {theirs}, and this side {words(ours)}. Client and server may be one minor "
            f"release apart: upgrade the older side"
        )
    return newest
