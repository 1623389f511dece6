"""How half messages are checked by a command or a URL of the user's: it is asked about one, and answers with a word.

Both get the message as `messagestore get --json` shows it, with its producer's group besides. They answer `commit`,
`rollback` or `unknown`, or RocketMQ's COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW. Whatever else they do says nothing
about the change that the message belongs to, so the half message stays open, and the next round asks again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from messagestore import ConfigError, LocalTransactionState, MessageExt
from pyspark_messagestore.cli import output as out

_ANSWERS = {
    "commit": LocalTransactionState.COMMIT_MESSAGE,
    "rollback": LocalTransactionState.ROLLBACK_MESSAGE,
    "unknown": LocalTransactionState.UNKNOW,
    **{state.value.lower(): state for state in LocalTransactionState},
}
_ANSWER_SIZE = 1024
_SHOWN_COUNT = 100
"""How many characters of a wrong answer an error repeats: the page of a proxy is long."""
_GROUP = "PGROUP"

Ask = Callable[[bytes], bytes]
"""Gets a half message as JSON, and returns the answer."""


def check_by(command: str | None, url: str | None, timeout_s: float) -> Ask | None:
    """The check that the user has given; None: he has given none.

    Raises
    ------
    ConfigError
        Both were given, there is no such program, the URL is not one of HTTP, or there is no time to answer.
    """
    if command is not None and url is not None:
        raise ConfigError(
            "--check-command and --check-url: found both; allowed is one of them. Leave one out", key="--check-url"
        )
    if timeout_s <= 0 and (command is not None or url is not None):
        raise ConfigError(
            f"--check-timeout: found {timeout_s:g} s; allowed is a time above 0",
            key="--check-timeout",
            value=timeout_s,
        )
    if command is not None:
        return _by_command(command, timeout_s)
    return None if url is None else _by_url(url, timeout_s)


def answered(ask: Ask, message: MessageExt) -> LocalTransactionState:
    """What a check says about a half message. Anything but an answer is reported, and counts as UNKNOW."""
    asked = {**out.message_fields(message), "producerGroup": message.system_properties.get(_GROUP)}
    try:
        answer = ask(json.dumps(asked).encode())
        return _ANSWERS[answer.decode("utf-8", "replace").strip().lower()]
    except KeyError as error:
        words = f"it answered {error.args[0][:_SHOWN_COUNT]!r}; allowed are commit, rollback and unknown"
    except subprocess.CalledProcessError as error:
        code = error.returncode
        words = f"the command was ended by signal {-code}" if code < 0 else f"the command ended with exit code {code}"
    except subprocess.TimeoutExpired as error:
        words = f"the command had not ended after {error.timeout:g} s (--check-timeout), and was killed"
    except urllib.error.HTTPError as error:
        error.close()
        words = f"the URL answered with HTTP status {error.code}; allowed is 200"
    except urllib.error.URLError as error:
        words = f"the URL cannot be asked: {error.reason}"
    except http.client.HTTPException as error:
        words = f"the URL gave no whole answer of HTTP ({type(error).__name__}: {str(error)[:_SHOWN_COUNT]!r})"
    except OSError as error:
        words = str(error)

    out.note(
        f"messagestore: check of half message {message.message_id}: {words}. It stays open, and is asked about again"
    )
    return LocalTransactionState.UNKNOW


def _by_command(command: str, timeout_s: float) -> Ask:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"--check-command: found {command!r}; allowed is a command with its arguments, quoted as for a shell "
            f"({error})",
            key="--check-command",
            value=command,
        ) from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"--check-command: found no program {words[0] if words else ''!r}; allowed is the path of one that can be "
            "run, or its name if it is on the PATH",
            key="--check-command",
            value=command,
        )

    def ask(data: bytes) -> bytes:
        # A session of its own, so that what the command has started is killed with it.
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
            try:
                answer, _ = process.communicate(data, timeout=timeout_s)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words)
        return answer

    return ask


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would turn the question into a GET without the message."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


def _by_url(url: str, timeout_s: float) -> Ask:
    _check_url(url)
    opener = urllib.request.build_opener(_NoRedirects)

    def fetched(data: bytes, deadline_s: float) -> bytes:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with opener.open(request, timeout=timeout_s) as response:
            if response.status != 200:
                raise urllib.error.HTTPError(url, response.status, "", response.headers, None)
            answer = b""
            while part := response.read1(_ANSWER_SIZE):
                answer += part
                if len(answer) > _ANSWER_SIZE:
                    return bytes(answer) + b"..."  # no word is so long, not even one with spaces behind it
                if time.monotonic() > deadline_s:
                    raise TimeoutError
            if response.length:  # the connection ended too early: what came is not the answer, even if it is a word
                raise http.client.IncompleteRead(answer, response.length)
            return bytes(answer)

    def ask(data: bytes) -> bytes:
        # The time limit of a socket is one for each of its reads: a server that sends a byte from time to time would
        # never reach it. So a thread asks, and is left alone after the time for the whole.
        answer: Future[bytes] = Future()

        def fetch() -> None:
            try:
                answer.set_result(fetched(data, time.monotonic() + timeout_s))
            except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
                answer.set_exception(error)

        threading.Thread(target=fetch, name="messagestore-check-url", daemon=True).start()
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"the URL had not answered after {timeout_s:g} s (--check-timeout)") from None

    return ask


def _check_url(url: str) -> None:
    """Refuse a URL that takes no questions: each try counts, and after `transactionCheckMax` the message goes."""
    allowed = ""
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            allowed = "a URL that begins with http:// or https://"
        elif parts.username is not None:
            allowed = "a URL without a user and a password"
        elif not url.isascii() or not url.isprintable() or " " in url:
            allowed = "a URL in which spaces and characters beyond ASCII are escaped, such as %20"
        elif parts.port == 0:
            allowed = "a port from 1 to 65535"
    except ValueError as error:  # brackets without an address, or a port that is none
        allowed = f"a URL that is well formed ({error})"
    if allowed:
        raise ConfigError(f"--check-url: found {url!r}; allowed is {allowed}", key="--check-url", value=url)
