"""Bugs planted in the dashboard: who may ask, what leaves the server, what is shown as what, and what is kept.

Each search asks an application about a small store, without a server. The dashboard is imported when a bug is planted,
because what it needs may not be installed.
"""

from __future__ import annotations

import contextlib
import os
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from crash.judge import Verdict
from crash.planting import Ground, Mutant, Planted, Search
from messagestore import Message, MessageStore
from messagestore.files.consumer_offsets import publish_offsets
from small import SMALL, filled

_TOKEN = "a-token-of-enough-length"
_MARKUP = "<script>alert(1)</script>"
_MESSAGE = "topic=t&queue=0&offset="
_STORE = "store"


class _Asked:
    """A store with five messages in t/0, of which a group has read three, and what is wrong with the answers about it."""

    def __init__(self, folder: Path) -> None:
        self.root = filled(folder / _STORE, 10)
        publish_offsets(str(self.root), "billing", {("t", 0): 3})
        self.wrong: list[str] = []

    def client(self, **settings: Any) -> Any:
        """A client of a new application."""
        from dashboard_client import Client
        from pyspark_messagestore.dashboard import app

        return Client(app([self.root], **settings))

    def put(self, body: str, **fields: Any) -> int:
        """Put a message into t/0, and return its number."""
        with MessageStore.open(self.root, SMALL) as store:
            return store.put_message(Message("t", body.encode(), queue_id=0, **fields)).queue_offset

    def expect(self, what: str, found: object, *expected: object) -> None:
        """Note what is not as it must be."""
        if found not in expected:
            self.wrong.append(f"{what}: found {found!r:.200}, expected {expected[0]!r:.200}")


def asks(story: Callable[[_Asked], None]) -> Search:
    """A search of one case."""

    def cases(ground: Ground) -> Iterator[Verdict]:
        asked = _Asked(ground.folder / uuid.uuid4().hex)
        story(asked)
        yield Verdict(misread=asked.wrong)

    return cases


def markup(asked: _Asked) -> None:
    """A body with markup and a mark of direction."""
    number = asked.put(_MARKUP + "\u202e")
    text = asked.client()(f"/s/store/message?{_MESSAGE}{number}").text
    asked.expect("markup of a body in the page", _MARKUP in text, False)
    asked.expect("a mark of direction in the page", "\u202e" in text, False)


def hosts(asked: _Asked) -> None:
    """A page elsewhere, whose name leads here."""
    client = asked.client()
    for host in ("evil.example", "127.0.0.1.evil.example"):
        client.host = host
        asked.expect(f"an answer for the host {host}", client("/").status, 421)


def origins(asked: _Asked) -> None:
    """A form of a page elsewhere."""
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        answer = asked.client()("/s/store/verify/stop", headers, method="POST")
        asked.expect(f"a form with {headers}", answer.status, 403)


def tokens(asked: _Asked) -> None:
    """Texts and cookies that are not the token."""
    client = asked.client(token=_TOKEN)
    for text in ("", "a", _TOKEN[:-1], _TOKEN + "x", _TOKEN.upper()):
        asked.expect(f"the token {text!r}", client("/api/v1/stores", {"authorization": f"Bearer {text}"}).status, 401)
    for cookie in ("messagestore=", "messagestore=x", f"messagestore={_TOKEN}"):
        asked.expect(f"the cookie {cookie!r}", client("/api/v1/stores", {"cookie": cookie}).status, 401)


def paths(asked: _Asked) -> None:
    """Files beside the pages' own, and a store that was not given."""
    filled(asked.root.parent / "other", 1)
    for address in ("/static/../guard.py", "/static/%2e%2e/guard.py", "/s/other/status", "/s/other/topics"):
        asked.expect(address, asked.client()(address).status, 404)


def readers(asked: _Asked) -> None:
    """Who has read the messages around the place of a group."""
    for offset, read, before in ((2, True, 0), (3, False, 0), (4, False, 1)):
        (found,) = asked.client()(f"/api/v1/s/store/message?{_MESSAGE}{offset}").json["readers"]
        asked.expect(f"message {offset} read, and messages before it", (found["read"], found["before"]), (read, before))


def growth(asked: _Asked) -> None:
    """A page that is loaded again after a put, and after a consumer has gone on."""
    client = asked.client()

    def seen() -> tuple[int, int]:
        (topic,) = client("/api/v1/s/store/topics").json["rows"]
        (group,) = client("/api/v1/s/store/readers").json["groups"]
        return topic["messages"], group["lag"]

    asked.expect("messages and lag", seen(), (10, 7))
    asked.put("one more")
    asked.expect("messages and lag after a put", seen(), (11, 8))
    publish_offsets(str(asked.root), "billing", {("t", 0): 4})
    asked.expect("messages and lag after a consumer went on", seen(), (11, 7))


def replacements(asked: _Asked) -> None:
    """Another store is at the path. With very many rows, what was found is shown while somebody looks again."""
    from pyspark_messagestore.dashboard import kept

    with mock.patch.object(kept, "LARGE_COUNT", 0), mock.patch.object(kept, "AGAIN_S", 3600.0):
        client = asked.client()
        asked.expect("messages", client("/api/v1/s/store/topics").json["rows"][0]["messages"], 10)
        asked.root.rename(asked.root.with_name("away"))
        filled(asked.root, 3)
        asked.expect("messages of the other store", client("/api/v1/s/store/topics").json["rows"][0]["messages"], 3)


def times(asked: _Asked) -> None:
    """The time of a message, as the page has it for readers and for scripts."""
    from pyspark_messagestore.words import time_words

    client = asked.client()
    stored_ms = client(f"/api/v1/s/store/message?{_MESSAGE}0").json["message"]["storeTimestamp"]
    text = client(f"/s/store/message?{_MESSAGE}0").text
    asked.expect("the time in UTC on the page", f">{time_words(stored_ms)}</time>" in text, True)


def secrets(asked: _Asked) -> None:
    """Names that are masked, wherever a page, a file or a filter has them; and bodies that are hidden."""
    number = asked.put('{"card": "4111"}', properties={"card": "4111"})
    client = asked.client(masks=["card"])
    wanted = urllib.parse.quote("card=4111")
    for address in (
        f"/s/store/message?{_MESSAGE}{number}",
        f"/api/v1/s/store/messages?topic=t&queue=0&offset={number}",
        f"/s/store/body?{_MESSAGE}{number}",
        "/s/store/download?topic=t&format=jsonl",
    ):
        asked.expect(f"the value in {address}", "4111" in client(address).text, False)
    hits = client(f"/api/v1/s/store/recent?topic=t&property={wanted}").json["messages"]
    asked.expect("hits of a filter that guesses the value", len(hits), 0)
    hiding = asked.client(hide_bodies=True)
    asked.expect("the hidden body", "4111" in hiding(f"/s/store/messages?topic=t&offset={number}").text, False)


def limits(asked: _Asked) -> None:
    """More than a request may ask for."""
    client = asked.client()
    asked.expect("an address of 9,000 bytes", client("/?" + "x" * 9000).status, 414)
    asked.expect("a search of a GiB", client(f"/api/v1/s/store/search?q=x&most={1 << 30}").status, 400)
    asked.expect("a list of 10,000", client("/api/v1/s/store/messages?topic=t&count=10000").status, 400)
    asked.expect(
        "a form of 5,000 bytes",
        asked.client(token=_TOKEN)("/login", method="POST", body=b"token=" + b"x" * 5000).status,
        413,
    )


def reading(asked: _Asked) -> None:
    """Downloads of more than may be read, and many lists of less. A client here has gone if it is not answered at once."""
    client = asked.client(read_limit=1)
    asked.expect("a download", client("/s/store/download?topic=t").status, 200)
    asked.expect("the next download", client("/s/store/download?topic=t").status, 503)
    asked.expect("the overview beside it", client("/").status, 200)
    client = asked.client(read_limit=4 << 20)
    asked.expect("lists", {client("/s/store/messages?topic=t").status for _ in range(10)}, {200})


# ---- the bugs


def _in(module: str, name: str, make: Callable[[Any], Any]) -> Planted:
    """Replace what a module of the dashboard has, or a class of it (`module.Class`), by something made from it."""

    def planted() -> AbstractContextManager[object]:
        import importlib

        path, _, of_class = module.partition(".")
        target: Any = importlib.import_module(f"pyspark_messagestore.dashboard.{path}")
        target = getattr(target, of_class) if of_class else target
        return mock.patch.object(target, name, make(getattr(target, name)))

    return planted


def _without_escapes(real: Any) -> Any:
    return lambda **settings: real(**(settings | {"autoescape": False}))


def _one_further(real: Any) -> Any:
    """The place of a reader is the last message that it has read, not the next one."""

    def readers_of(stored: Any, store: Any, queue: Any, offset: int, low: int, high: int) -> Any:
        found, faults = real(stored, store, queue, offset, low, high)
        return [each | {"read": each["at"] >= offset} for each in found], faults

    return readers_of


def _prefixes(_: Any) -> Any:
    """As many characters are compared as were given."""
    return lambda guard, text: guard._token.startswith(text.encode())


def _any_cookie(real: Any) -> Any:
    return lambda guard, headers: "messagestore=" in headers.get("cookie", "") or real(guard, headers)


def _any_store(real: Any) -> Any:
    """The name in the address is a folder beside the stores that were given."""

    def stored(pages: Any, request: Any) -> Any:
        from pyspark_messagestore.dashboard.stored import Stored

        known = real(pages, request)
        name = request.path_params["store"]
        first = next(iter(pages._stores.values()))
        return known or Stored(name, os.path.join(os.path.dirname(first.path), name))

    return stored


@contextlib.contextmanager
def _any_file() -> Iterator[None]:
    """The path of a file is joined with the folder, and nobody looks where that leads."""
    from starlette.staticfiles import StaticFiles

    def look(files: Any, path: str) -> tuple[str, os.stat_result | None]:
        full = os.path.join(files.all_directories[0], path)
        return (full, os.stat(full)) if os.path.exists(full) else ("", None)

    def path(_: Any, scope: Any) -> str:
        return str(scope["path"].partition("/static/")[2])

    with mock.patch.object(StaticFiles, "get_path", path), mock.patch.object(StaticFiles, "lookup_path", look):
        yield


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *_arguments, **_more: value


MUTANTS = (
    Mutant("the dashboard's templates escape nothing", _in("application", "Environment", _without_escapes), "pages", asks(markup)),
    Mutant("marks of direction reach the page", _in("application", "shown", lambda _: str), "pages", asks(markup)),
    Mutant("the dashboard answers for any host", _in("guard.Guard", "_is_own", _always(True)), "pages", asks(hosts)),
    Mutant("a form of another page counts", _in("guard", "_is_foreign", _always(False)), "pages", asks(origins)),
    Mutant("the beginning of a token is enough", _in("guard.Guard", "_is_token", _prefixes), "pages", asks(tokens)),
    Mutant("any cookie is a session", _in("guard.Guard", "_may_ask", _any_cookie), "pages", asks(tokens)),
    Mutant("an address names a store that was not given", _in("application._Pages", "_stored", _any_store), "pages", asks(paths)),
    Mutant("an address names a file outside the folder", _any_file, "pages", asks(paths)),
    Mutant("a reader has read one message more", _in("looks", "_readers_of", _one_further), "pages", asks(readers)),
    Mutant("what was found is kept when the store changes", _in("kept.Kept", "_stamp", _always(("the same",))), "pages", asks(growth)),
    Mutant("what was found is shown of another store", _in("kept.Kept", "_place", _always(1)), "pages", asks(replacements)),
    Mutant("a time of another zone is shown as UTC", _in("application", "time_words", lambda real: lambda time_ms: real(time_ms + 9 * 3_600_000)), "pages", asks(times)),
    Mutant("masked values are shown", _in("stored.Stored", "_mask", _always(None)), "pages", asks(secrets)),
    Mutant("hidden bodies are shown", _in("stored.Stored", "_hide", _always(None)), "pages", asks(secrets)),
    Mutant("a filter of the list lets everything pass", _in("newest.Filter", "passes", _always(True)), "pages", asks(secrets)),
    Mutant("an address may be as long as it likes", _in("guard", "MOST_QUERY_SIZE", lambda size: size << 20), "pages", asks(limits)),
    Mutant("a search reads as much as it is asked to", _in("looks", "SEARCH_SIZE", lambda size: size << 20), "pages", asks(limits)),
    Mutant("what a click reads is not counted", _in("reads.Reads", "read", _always(None)), "pages", asks(reading)),
    Mutant("a click counts for all that it might have read", _in("reads.Reads", "end", _always(None)), "pages", asks(reading)),
)  # fmt: skip
