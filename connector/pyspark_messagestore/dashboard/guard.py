"""Who may ask the dashboard, and how much at once: an ASGI application around another one.

A page on another host can make a browser send requests to a server on loopback. Such a request has that page's host
name, so `Host` must be an address or a name that this server goes by. Nothing is allowed to other origins, a page
runs no script but the one file of this package, and whoever has a token proves it by a header or by a cookie that
other sites cannot make a browser send.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import secrets
import socket
import urllib.parse
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyspark_messagestore.dashboard.reads import Reads

MOST_AT_ONCE = 8
"""Requests that are answered at the same time; the next one is asked to come again."""
MOST_QUERY_SIZE, MOST_LOGIN_SIZE = 8 * 1024, 4 * 1024
_EVENTS = re.compile(r"/s/[^/]+/events")
_CHECKS = re.compile(r"/s/[^/]+/verify/(start|stop)")
"""The only addresses that accept POST, besides the form for the token. They write nothing."""
COOKIE = "messagestore"
LEAST_TOKEN_LENGTH = 16
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers call the origin of our own form `null`
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Refuses what the inner application must not see, and adds the headers that keep a browser careful.

    Parameters
    ----------
    inner : ASGI application
    token : str
        What a client must know; empty: everybody may ask.
    hosts : iterable of str
        Names besides this machine's own that `Host` may have. Addresses are always allowed: no other page has one.
    end_streams : callable
        Ends the streams of events that are open.
    reads : Reads
        What the inner application may read.
    most_read : callable
        How many bytes of messages the answer at a path reads at most; 0: it reads none, and does not wait.
    """

    def __init__(
        self,
        inner: ASGIApp,
        token: str = "",
        hosts: Iterable[str] = (),
        end_streams: Callable[[], None] = lambda: None,
        reads: Reads | None = None,
        most_read: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self._inner = inner
        self.end_streams = end_streams
        self._token = token.encode()
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self._session = hmac.digest(secrets.token_bytes(32), self._token, hashlib.sha256).hex()
        self._at_once = 0
        self._reads, self._most_read = reads or Reads(0), most_read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._inner(scope, receive, send)
            return

        async def careful(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = await self._answer(scope, receive)
        if answer is not None:
            await answer(scope, receive, careful)
            return
        if _EVENTS.fullmatch(_path(scope)):  # a live list has a limit of its own, and stays open
            await self._inner(scope, receive, careful)
            return
        size = self._most_read(_path(scope))
        if size and not await self._reads.begin(size, receive):
            again_s = math.ceil(max(1.0, self._reads.wait_s))
            why = "The pages read as many bytes a second as they may. Try again."
            await _refused(503, why, {"Retry-After": str(again_s)})(scope, receive, careful)
            return

        async def has_read(message: Message) -> None:
            nonlocal size
            self._reads.end(size)  # the look is over when its answer begins; the client may take long
            size = 0
            await careful(message)

        self._at_once += 1
        try:
            await self._inner(scope, receive, has_read)
        finally:
            self._at_once -= 1
            self._reads.end(size)

    async def _answer(self, scope: Scope, receive: Receive) -> Response | None:
        """The answer that the guard gives itself. None: the inner application is asked."""
        headers, path = Headers(scope=scope), _path(scope)
        host = headers.getlist("host")
        if len(host) != 1 or not self._is_own(host[0]):
            return _refused(
                421,
                "The Host header names another host. Open the page by an address of this machine, by localhost, or by "
                "a name that was given with --allow-host.",
            )

        if len(scope["query_string"]) > MOST_QUERY_SIZE:
            return _refused(414, f"The address has more than {MOST_QUERY_SIZE:,} bytes behind the question mark.")
        if path == "/login" and scope["method"] == "POST":
            return await self._login(scope, receive, headers)
        if scope["method"] == "POST" and _is_foreign(headers):
            return _refused(403, "The request comes from another page. Open the page of this server, and ask there.")
        if scope["method"] not in ("GET", "HEAD") and not (scope["method"] == "POST" and _CHECKS.fullmatch(path)):
            return _refused(405, "This page only reads: allowed are GET and HEAD.", {"Allow": "GET, HEAD"})

        if path != "/login" and not path.startswith("/static/") and not self._may_ask(headers):
            if path.startswith(("/api/", "/metrics", "/healthz")):
                return _refused(
                    401, "Send the token: `Authorization: Bearer TOKEN`.", {"WWW-Authenticate": 'Bearer realm="store"'}
                )
            return RedirectResponse(scope.get("root_path", "") + "/login", 303)

        if self._at_once >= MOST_AT_ONCE and not path.startswith("/static/"):
            return _refused(503, f"{MOST_AT_ONCE} requests are being answered. Try again.", {"Retry-After": "1"})
        return None

    def _is_own(self, host: str) -> bool:
        """Whether a Host header names this machine."""
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts
        return True

    def _may_ask(self, headers: Headers) -> bool:
        if not self._token:
            return True
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(secret.strip()):
            return True
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        return hmac.compare_digest(cookie.encode(), self._session.encode())

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token)

    async def _login(self, scope: Scope, receive: Receive, headers: Headers) -> Response:
        """Exchange the token of a form for a cookie that ends with this process."""
        if _is_foreign(headers):
            return _refused(403, "The form belongs to another page. Open the page of this server, and log in there.")
        body = b""
        async for part in Request(scope, receive).stream():
            body += part
            if len(body) > MOST_LOGIN_SIZE:
                return _refused(413, f"The form has more than {MOST_LOGIN_SIZE:,} bytes.")

        given = urllib.parse.parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        root_path = scope.get("root_path", "")
        if not self._token or not self._is_token(given.strip()):
            return RedirectResponse(root_path + "/login?wrong=1", 303)

        answer = RedirectResponse(root_path + "/", 303)
        answer.set_cookie(
            COOKIE,
            self._session,
            path=root_path or "/",
            secure=scope.get("scheme") == "https",
            httponly=True,
            samesite="strict",
        )
        return answer


def _is_foreign(headers: Headers) -> bool:
    """Whether a browser sends a request for a page of another origin."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    if origin is not None and urllib.parse.urlsplit(origin).netloc != headers["host"]:
        return True
    return site not in ("same-origin", "none")


def _path(scope: Scope) -> str:
    return str(scope["path"].removeprefix(scope.get("root_path", "")))


def _refused(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": why}, status, headers)
