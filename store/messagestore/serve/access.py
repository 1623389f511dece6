"""Who may ask for what: tokens with a role.

A server without tokens lets everybody do everything; the lifecycle allows that on loopback addresses only, unless it
is told otherwise. The token file has a line for each token, `name role sha256`, so whoever reads it does not have the
tokens.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Protocol

from messagestore.errors import AccessDeniedError, ConfigError
from messagestore.serve.rereading import Reread

READ, WRITE, OPERATE = "read", "write", "operate"
ROLES = {READ: frozenset([READ]), WRITE: frozenset([READ, WRITE]), OPERATE: frozenset([OPERATE])}
"""What each role may do. `operate` sees the figures of the store and its server, and no message."""


class Access(Protocol):
    """Decides who a client is."""

    def client_of(self, authorization: str, address: str) -> tuple[str, frozenset[str]]:
        """The name of a client, and what it may do.

        Raises
        ------
        AccessDeniedError
            The header has no valid token.
        """
        ...


class Everybody:
    """Everybody may do everything."""

    def client_of(self, authorization: str, address: str) -> tuple[str, frozenset[str]]:  # noqa: ARG002
        """The address, and everything."""
        return address, frozenset().union(*ROLES.values())


_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_SIZE = 1024 * 1024
_LINE_WORDS = "name role sha256, where role is read, write or operate, and sha256 has 64 hexadecimal digits"


@dataclass(frozen=True, slots=True)
class _Token:
    name: str
    role: str
    digest: bytes


class Tokens:
    """The tokens of a file, which may be replaced while the server runs.

    Parameters
    ----------
    path : str
        A line for each token: `name role sha256-hex`, and comments that begin with #. A name may have two tokens, so
        that one can be replaced: remove the old one when no client uses it any more.

    Raises
    ------
    ConfigError
        The file cannot be read, or a line is wrong, or there is no token.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = Reread([path], lambda: _tokens(path))

    def client_of(self, authorization: str, address: str) -> tuple[str, frozenset[str]]:
        """The name of a client, and what its token's role may do.

        Every token is compared, and each comparison takes the same time, whatever is found.
        """
        tokens = self._file.current()
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise _unknown(
                f"client at {address}: this server asks for a token, and the request has none. Give the file with one "
                f"as option tokenFile (--token-file), or in MESSAGESTORE_TOKEN_FILE"
            )

        digest = hashlib.sha256(secret.strip().encode("latin-1")).digest()

        # All tokens are compared, so that the time of an answer does not say which of them is nearly right.
        client = None
        for token in tokens:
            if hmac.compare_digest(token.digest, digest):
                client = token

        if client is None:
            raise _unknown(
                f"client at {address}: this server does not know the token of the request. Give a file with another "
                f"one as option tokenFile (--token-file), or add the token to the server's token file"
            )
        return client.name, ROLES[client.role]


def _unknown(message: str) -> AccessDeniedError:
    error = AccessDeniedError(message)
    error.unknown = True
    return error


def _tokens(path: str) -> tuple[_Token, ...]:
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_SIZE + 1)
    except OSError as error:
        raise _wrong(path, f"which cannot be read ({error.strerror})") from None
    if len(text) > _MOST_SIZE:
        raise _wrong(path, f"which has more than {_MOST_SIZE:,} bytes")

    tokens: list[_Token] = []
    for number, line in enumerate(text.decode("latin-1").split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, role, digest = words if len(words) == 3 else ("", "", "")
        if not _NAME.fullmatch(name) or role not in ROLES or not _DIGEST.fullmatch(digest.lower()):
            raise _wrong(path, f"whose line {number} is none")  # what is there may be a token, so it is not shown
        token = _Token(name, role, bytes.fromhex(digest))
        if any(token.digest == other.digest for other in tokens):
            raise _wrong(path, f"whose line {number} has the same token as another line")
        if sum(name == other.name for other in tokens) == 2:
            raise _wrong(path, f"whose line {number} is the third one of {name}; a name has two tokens at most")
        tokens.append(token)
    if not tokens:
        raise _wrong(path, "which has no token")
    return tuple(tokens)


def _wrong(path: str, what: str) -> ConfigError:
    return ConfigError(
        f"--token-file: found {path}, {what}; allowed are lines of {_LINE_WORDS}, and comments that begin with #",
        key="--token-file",
        value=path,
    )


def check_role(name: str, allowed: frozenset[str], needed: str) -> None:
    """Check that a client may do what it asks for.

    Raises
    ------
    AccessDeniedError
        It may not.
    """
    if needed not in allowed:
        raise AccessDeniedError(
            f"client {name}: this request needs the role {needed}, and its token allows {', '.join(sorted(allowed))}. "
            f"Use another token, or give this one another role in the server's token file"
        )
