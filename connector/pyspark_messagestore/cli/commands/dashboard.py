"""`messagestore dashboard`: pages about stores on this host, for a browser."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import os
import socket
import sys
import webbrowser
from typing import TYPE_CHECKING, Annotated, Any

import typer

from messagestore import ConfigError
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import Json, existing, path_of, size_of
from pyspark_messagestore.requirements import install_extra

if TYPE_CHECKING:
    from pyspark_messagestore.dashboard.guard import Guard

PLACE = 172
PANEL = "Care"

_ADDRESS = "127.0.0.1:8097"
_TOKEN = "MESSAGESTORE_DASHBOARD_TOKEN"
_MOST_TOKEN_SIZE = 4096


def dashboard(
    roots: Annotated[
        list[str], typer.Argument(metavar="ROOT...", help="The root folders of the stores.", show_default=False)
    ],
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="FOLDER",
            help="Also show how far a query that reads one of the stores is behind. Repeat the option for more.",
            show_default=False,
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where browsers find the pages.")
    ] = _ADDRESS,
    token_file: Annotated[
        str,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="The file with the token that a browser must give once, and a program with each request as "
            "`Authorization: Bearer TOKEN`.",
        ),
    ] = "",
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token",
            help="Listen on an address that other hosts reach also without a token, so that whoever reaches it reads "
            "all messages.",
        ),
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A name by which browsers reach this server, besides localhost, this machine's name and its "
            "addresses. Repeat the option for more.",
            show_default=False,
        ),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            "--root-path",
            metavar="PATH",
            help="The path under which a proxy shows the pages, such as /stores. The proxy takes it off the addresses "
            "that it passes on.",
        ),
    ] = "",
    hide_bodies: Annotated[bool, typer.Option("--hide-bodies", help="Show no body of any message.")] = False,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            "--mask",
            metavar="NAME",
            help="Show no value of this property, and of this field of JSON bodies at any depth. Bodies that are not "
            "JSON are hidden then; with KEYS or UNIQ_KEY, nothing is found by a key. Repeat the option for more.",
            show_default=False,
        ),
    ] = None,
    decoder: Annotated[
        str,
        typer.Option(
            "--decoder",
            metavar="MODULE:FUNCTION",
            help="Your function that turns a message with an Avro, Protobuf or other body into a value for JSON, or "
            "None if the body is of another kind.",
        ),
    ] = "",
    read_limit: Annotated[
        str,
        typer.Option(
            "--read-limit",
            metavar="SIZE",
            help="What searches, lists and downloads may read of the stores in a second, for all clients together, "
            "such as 100MiB; 0 for no limit.",
        ),
    ] = "64MiB",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the pages in this machine's browser.")] = False,
    as_json: Json = False,
) -> None:
    """Show pages that answer questions about stores: what is wrong, where a message is and who has read it, who is
    behind, what Spark did, and what takes the room. It reads only, takes no lock, and works beside any writer,
    including a Java broker. Until Ctrl-C.
    """
    try:
        uvicorn = importlib.import_module("uvicorn")
        from pyspark_messagestore.dashboard import app
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette", "jinja2", "markupsafe"):
            raise
        raise ConfigError(
            f"the package {error.name} is not installed, which `messagestore dashboard` needs; run "
            f"{install_extra('dashboard')}",
            key="dashboard",
        ) from None

    host, port = _address(listen)
    root_path = f"/{root_path.strip('/')}" if root_path.strip("/") else ""
    token = _token(token_file)
    if not token and not no_token and not _is_loopback(host):
        raise ConfigError(
            f"--listen: {listen} can be reached from other hosts, and there is no token. Give the file with one as "
            f"--token-file, or the token as {_TOKEN} in the environment, listen on {_ADDRESS}, or say --no-token if "
            "whoever reaches it may read all messages",
            key="--listen",
            value=listen,
        )
    application = app(
        [existing(root) for root in roots],
        [path_of(folder) for folder in checkpoint or ()],
        token=token,
        hosts=allow_host or (),
        hide_bodies=hide_bodies,
        masks=mask or (),
        decoder=_decoder(decoder) if decoder else None,
        read_limit=size_of("--read-limit", read_limit, least=0),
    )

    listening = _listening(host, port, listen)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}{root_path}/"
    config = uvicorn.Config(
        application,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,  # it is the time of the last look, and nobody looks
        root_path=root_path,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=5,
        lifespan="off",
    )
    if as_json:
        out.json_line({"url": address})
    else:
        out.line(address)
    if open_browser:
        webbrowser.open(address)
    _run(_ending(uvicorn.Server(config), application), listening)


def _decoder(text: str) -> Any:
    """The function that a user named; modules in the current folder count."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise ConfigError(
            f"--decoder: found {text!r}; allowed is MODULE:FUNCTION, for example orders.codec:decode", key="--decoder"
        )
    sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--decoder: the module {module} cannot be imported: {why}", key="--decoder") from error
    if not callable(function):
        raise ConfigError(f"--decoder: {module} has no function {name}", key="--decoder", value=text)
    return function


def _ending(server: Any, application: Guard) -> Any:
    """A server that ends open live lists before it waits for its requests, and sleeps while nobody asks.

    By itself, uvicorn looks ten times a second whether it was told to end.
    """
    shutdown, handle_exit = server.shutdown, server.handle_exit
    loops: list[asyncio.AbstractEventLoop] = []
    told = asyncio.Event()

    async def main_loop() -> None:
        loops.append(asyncio.get_running_loop())
        if not server.should_exit:
            await told.wait()

    def told_to_end(*signalled: Any) -> None:
        handle_exit(*signalled)
        for loop in loops:
            loop.call_soon_threadsafe(told.set)

    async def ended(sockets: list[socket.socket] | None = None) -> None:
        application.end_streams()
        await shutdown(sockets)

    server.shutdown, server.main_loop, server.handle_exit = ended, main_loop, told_to_end
    return server


def _run(server: Any, listening: socket.socket) -> None:
    """Answer requests until a signal comes."""
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()


def _listening(host: str, port: int, text: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"--listen: {text} cannot be listened on: {error.strerror or error}. Give an address of this host and a "
            "port that is free",
            key="--listen",
            value=text,
        ) from None


def _token(path: str) -> str:
    """The token in a file, or else in the environment; empty if there is none."""
    if path:
        with open(path, "rb") as file:
            data, where = file.read(_MOST_TOKEN_SIZE + 1), f"--token-file: {os.path.abspath(path)}"
    else:
        data, where = os.environb.get(_TOKEN.encode(), b""), _TOKEN
        if not data:
            return ""
    token = data.decode("ascii", "replace").strip()
    if len(data) > _MOST_TOKEN_SIZE or not token.isascii() or not token.isprintable() or " " in token or not token:
        raise ConfigError(
            f"{where} does not hold one token; allowed is one line of ASCII characters without blanks, such as "
            "`openssl rand -hex 32` writes",
            key="--token-file",
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--listen: found {text!r}; allowed is HOST:PORT, for example {_ADDRESS}", key="--listen", value=text
        )
    return host.strip("[]"), int(port)
