"""What all commands share: exit codes, common arguments, and how a store is found and opened."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from messagestore import (
    ConfigError,
    CorruptionError,
    NotAStoreError,
    StoreConfig,
    StoreError,
    StoreLockedError,
    UnknownTopicError,
)
from messagestore.inspect import operator
from messagestore.spi import OPENERS, STORES, Location, Report, StoreReader, brokers_of, duration_s
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.words import error_words

FOUND_NOTHING, CANNOT, LOCKED, CUT = 1, 2, 3, 4


class Commands(TyperGroup):
    """Commands whose errors become one line and an exit code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # typer's own class or click's, by version
        """Run a command, and turn what it raises into a line on standard error and an exit code."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `messagestore dump ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except StoreLockedError as error:
            out.note(f"messagestore: {_words(error)}")
            raise typer.Exit(LOCKED) from error
        except CorruptionError as error:
            out.note(f"messagestore: {_words(error)}")
            raise typer.Exit(FOUND_NOTHING) from error
        except (StoreError, OSError) as error:
            out.note(f"messagestore: {_words(error)}")
            raise typer.Exit(CANNOT) from error


def _words(error: Exception) -> str:
    return "; ".join([error_words(error), *getattr(error, "__notes__", [])])


_ROOT = "MESSAGESTORE_ROOT"
Root = Annotated[str, typer.Argument(metavar="ROOT", envvar=_ROOT, help="The store's root folder.", show_default=False)]
_Store = Annotated[
    str,
    typer.Argument(
        metavar="ROOT",
        envvar=_ROOT,
        help="The store's root folder, or the URL of its server, https://host:port.",
        show_default=False,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json/--table",
        help="Write JSON: one object, or one object per line; or text for a person. Without either: what "
        "MESSAGESTORE_OUTPUT says, json or table, else table.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--store-config",
        metavar="FILE",
        help="The settings of this run: a store.properties file, or a broker's own broker.conf. What the file does not "
        "set is as it is kept in the store (`messagestore config`), or has its default.",
        show_default=False,
    ),
]
Wait = Annotated[
    str | None,
    typer.Option(
        "--wait",
        metavar="DURATION",
        help="How long to wait for another writer, for example 500ms or 2m. The default is 30s.",
        show_default=False,
    ),
]

CheckpointFolders = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        help="Also show how far a query that reads the store is behind. Repeat the option for more.",
        show_default=False,
    ),
]


class From(enum.StrEnum):
    """Where to begin."""

    EARLIEST = "earliest"
    LATEST = "latest"


def size_of(option: str, text: str, *, unit: int = 1, least: int = 1) -> int:
    """A size that a user gave, in bytes: `10MiB`, `10m`, or a number alone, which counts `unit` bytes.

    Raises
    ------
    ConfigError
        The text is no size, or a smaller one than `least` bytes.
    """
    match = re.fullmatch(r"\s*(\d+)\s*(?:([kmgt]?)(?:i?b)?)?\s*", text.lower())
    size = -1
    if match is not None:
        is_bare = match[0].strip() == match[1]
        size = int(match[1]) * (unit if is_bare else 1 << 10 * " kmgt".index(match[2] or " "))
    if size < least:
        raise ConfigError(
            f"{option}: found {text!r}; allowed is a size from {out.size_words(least)}, such as 64MiB or 1GiB",
            key=option,
            value=text,
        )
    return size


# ---- ending


def end_of_rows(rows: list[dict[str, Any]], faults: list[str], nothing: str) -> None:
    """End a command that shows rows: name what was wrong, and say it if there are none.

    Raises
    ------
    typer.Exit
        There is a fault, or no row.
    """
    for fault in faults:
        out.note(f"messagestore: {fault}")
    if not rows:
        out.note(nothing)
    if faults or not rows:
        raise typer.Exit(FOUND_NOTHING)


# ---- opening


_URL = re.compile(r"[A-Za-z][\w+.-]*:")


def path_of(root: str) -> str:
    """A folder's path from a path or a file URL.

    Raises
    ------
    ConfigError
        It is a URL of another kind, or a file, or it lies below a file.
    """
    if root.startswith("file:"):
        return _below_folders(urllib.parse.unquote(urllib.parse.urlparse(root).path))
    if re.match(r"rocketmq(\+\w+)?:", root):
        raise ConfigError(
            f"{root}: found the address of RocketMQ's brokers; allowed is the path of a folder on this machine, "
            f"because this command needs the store's files. Brokers that run can be asked by copy, get, tail, find, "
            f"topics, offsets and lag; for the rest use RocketMQ's mqadmin",
            key="ROOT",
            value=root,
        )
    if _URL.match(root):
        raise ConfigError(
            f"{root}: found a URL; allowed is the path of a folder on this machine, because this command needs the "
            f"store's files. Run it on the host of the store",
            key="ROOT",
            value=root,
        )
    return _below_folders(root)


def location_of(root: str) -> Location:
    """The location of a store that a command asks through the interface, so that another host may serve it.

    Raises
    ------
    ConfigError
        It is a URL of another kind, or a file, or it lies below a file.
    """
    scheme = root.split(":", maxsplit=1)[0].lower()
    kind = scheme.partition("+")[0]  # rocketmq+http is RocketMQ's brokers, too
    if kind in OPENERS:
        return Location.of(root)
    if _URL.match(root) and kind != "file":
        raise ConfigError(
            f"{root}: found a URL of another kind; allowed are the path of a folder on this machine, http:// and "
            f"https:// for `messagestore serve`, and rocketmq:// for brokers that run",
            key="ROOT",
            value=root,
        )
    return Location(path_of(root))


def _reached(
    root: _Store,
    token_file: Annotated[
        str | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="With a URL: the file with the token for the server. Without it: that of MESSAGESTORE_TOKEN_FILE.",
            show_default=False,
        ),
    ] = None,
    ca_file: Annotated[
        str | None,
        typer.Option(
            "--ca-file",
            metavar="FILE",
            help="With a URL: the certificates (PEM) of the authorities that may have signed the server's. Without it: "
            "those of MESSAGESTORE_CA_FILE, else of the system.",
            show_default=False,
        ),
    ] = None,
    cert_file: Annotated[
        str | None,
        typer.Option(
            "--cert-file",
            metavar="FILE",
            help="With a URL: the client's own certificate (PEM). Without it: that of MESSAGESTORE_CERT_FILE.",
            show_default=False,
        ),
    ] = None,
    key_file: Annotated[
        str | None,
        typer.Option(
            "--key-file",
            metavar="FILE",
            help="Its key (PEM), if the certificate's file does not have it. Without --cert-file: that of "
            "MESSAGESTORE_KEY_FILE.",
            show_default=False,
        ),
    ] = None,
    retry_timeout: Annotated[
        str | None,
        typer.Option(
            "--retry-timeout",
            metavar="DURATION",
            help="With a URL: how long to try again if the server does not answer. Without it: "
            "MESSAGESTORE_RETRY_TIMEOUT, else 30s.",
            show_default=False,
        ),
    ] = None,
) -> Location:
    """Where a store is, and how its server is reached."""
    location = location_of(root)
    files = {"token_file": token_file, "ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}

    for name, value in {**files, "retry_timeout": retry_timeout}.items():
        if value is not None and not location.is_remote:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option}: found together with the folder {root}; allowed is the URL of a store that is served, such "
                f"as https://host:port. Give one as ROOT, or leave the option out",
                key=option,
                value=value,
            )
    if token_file is not None and location.is_cluster:
        raise ConfigError(
            f"--token-file: found together with {root}. Brokers know no tokens: name a file with credentials in "
            f"MESSAGESTORE_CREDENTIALS_FILE, or leave the option out",
            key="--token-file",
            value=token_file,
        )
    if key_file is not None and cert_file is None:
        raise ConfigError(
            "--key-file: found without --cert-file. Give the certificate of the key, too, or leave the key out",
            key="--key-file",
            value=key_file,
        )

    retry_timeout_s = None if retry_timeout is None else duration_s("--retry-timeout", retry_timeout)
    return location.reached(retry_timeout_s, **files)


def by_location(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose store may be served by another host, with the options that say how its server is reached.

    The command gets a `Location` as `root`.
    """
    own, reach = (inspect.signature(each, eval_str=True).parameters for each in (command, _reached))
    names = [name for name in reach if name != "root"]

    @functools.wraps(command)
    def run(*, root: str, **given: Any) -> None:
        location = _reached(root, **{name: given.pop(name) for name in names})
        command(root=location, **given)

    parameters = {**own, **reach}
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return run


def _below_folders(path: str) -> str:
    """The path, after a check that nothing on the way to it is a file."""
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if os.path.exists(nearest) and not os.path.isdir(nearest):
        raise ConfigError(
            f"{path}: found a file at {nearest}; allowed is the path of a folder, or of one that can be created there",
            key="ROOT",
            value=path,
        )
    return path


def config_of(file: Path | None, **changes: object) -> StoreConfig:
    """The settings of a file, or the defaults, with those changes that are not None."""
    config = StoreConfig.load(file) if file is not None else StoreConfig()
    return config.replace(**{name: value for name, value in changes.items() if value is not None})


@contextmanager
def opened(root: str | Location, file: Path | None = None) -> Iterator[StoreReader]:
    """The store, open for reading. Index files are not opened, so a broker's store needs no configuration."""
    location = root if isinstance(root, Location) else location_of(root)
    with contextlib.closing(STORES.reader(location, looking(file))) as store:
        yield store


@contextmanager
def opened_parts(root: Location, topics: Sequence[str] = ()) -> Iterator[dict[str, StoreReader]]:
    """The stores at a place, open for reading: each broker of a cluster by its name, or one store without a name.

    Parameters
    ----------
    topics : sequence of str
        Of a cluster, only the brokers that have one of these; without a topic, all.

    Raises
    ------
    UnknownTopicError
        No broker has one of the topics.
    ConfigError
        The name servers know no broker.
    """
    with contextlib.ExitStack() as stack:
        if not root.is_cluster:
            yield {"": stack.enter_context(opened(root))}
            return
        for topic in topics:
            if not brokers_of(root, [topic]):
                raise UnknownTopicError(
                    topic, None, f"No broker of {root} has it. `messagestore topics` shows them all"
                )
        parts = brokers_of(root, topics or None)
        if not parts:
            raise ConfigError(
                f"{root}: found no broker that the name servers know. Start one, or correct the address", key="ROOT"
            )
        yield {name: stack.enter_context(opened(part)) for name, part in parts.items()}


def named_report(reports: Iterable[tuple[str, Report]]) -> Report:
    """The reports of some brokers as one: each row and each fault names its broker, if the broker has a name."""
    rows, faults = list[dict[str, Any]](), list[str]()
    for name, (some, wrong) in reports:
        rows += [{"brokerName": name, **row} for row in some] if name else some
        faults += [f"{name}: {fault}" for fault in wrong] if name else wrong
    return rows, faults


def looking(file: Path | None = None) -> StoreConfig:
    """Settings for a command that only looks."""
    return config_of(file, message_index_enable=False)


def existing(root: str) -> str:
    """The path of a store that is there.

    Raises
    ------
    NotAStoreError
        There is no store.
    """
    path = path_of(root)
    if not operator.holds_store(path):
        raise NotAStoreError(
            f"{os.path.abspath(path)}: found no message store (no commitlog folder). Give the store's root folder",
            path=path,
        )
    return path


@contextmanager
def broker_named(what: str, command: str) -> Iterator[None]:
    """Add to the error that a broker holds the store what the user can run instead."""
    try:
        yield
    except StoreLockedError as error:
        if "broker" not in error.holder:
            raise
        raise StoreLockedError(
            f"{error}. Nothing was changed. While the broker runs, change its {what} through it: `{command}`",
            path=error.path,
            holder=error.holder,
        ) from None
