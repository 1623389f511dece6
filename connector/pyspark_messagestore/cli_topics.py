"""`messagestore topics`, `topic create`, `topic alter` and `offsets`: which topics there are, how far they reach."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import typer

from messagestore import ConfigError, MessageStore
from messagestore.spi import local_operator
from pyspark_messagestore import cli_output as out
from pyspark_messagestore.cli_app import (
    FOUND_NOTHING,
    ConfigFile,
    Json,
    Root,
    Wait,
    broker_named,
    config_of,
    existing,
    looking,
    path_of,
    time_ms,
)

_QUEUE_NUMS = 8
_MESSAGE_TYPE = "message.type"


class Perm(enum.StrEnum):
    """What clients may do with a topic."""

    WRITE = "2"
    READ = "4"
    READ_WRITE = "6"


class MessageType(enum.StrEnum):
    """What RocketMQ 5's clients may put into a topic."""

    UNSPECIFIED = "UNSPECIFIED"
    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    MIXED = "MIXED"


topic_app = typer.Typer(no_args_is_help=True, help="Create a topic, or change the settings of a topic.")

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)]
ReadQueues = Annotated[
    int | None,
    typer.Option(
        "--read-queues",
        metavar="N",
        min=1,
        help="The number of queues that consumers read (readQueueNums).",
        show_default=False,
    ),
]
PermOption = Annotated[
    Perm | None,
    typer.Option(
        "--perm",
        help="What clients may do: 2 is write, 4 is read, and 6 is both. Without 2, this project's writers are "
        "refused, too; its readers ignore it.",
        show_default=False,
    ),
]
Order = Annotated[
    bool | None,
    typer.Option("--order/--no-order", help="RocketMQ's flag for an ordered topic.", show_default=False),
]
TypeOption = Annotated[
    MessageType | None,
    typer.Option(
        "--message-type",
        help="The attribute message.type, which RocketMQ 5's proxy checks; its broker and this project do not.",
        show_default=False,
    ),
]


# ---- looking


def topics(root: Root, as_json: Json = False) -> None:
    """Show the topics of a store, with their settings and the number of their messages."""
    with out.waiting("looking through the queues"):
        rows, faults = local_operator.topics(path_of(root), looking())
    if as_json:
        for row in rows:
            out.json_line(row)
    elif rows:
        titles = [("topic", False), ("messages", True), ("queues", True), ("write", True), ("read", True)]
        out.table([*titles, ("perm", True), ("order", False), ("type", False)], map(_cells, rows))
    _end(rows, faults, "no topic found")


def _cells(row: dict[str, Any]) -> list[object]:
    settings = [row[name] for name in ("writeQueueNums", "readQueueNums", "perm", "order")]
    kind = _message_type(row["attributes"] or {})
    return [
        row["topic"],
        f"{row['messages']:,}",
        row["queues"],
        *("-" if value is None else str(value).lower() for value in settings),
        kind or "-",
    ]


def _message_type(attributes: dict[str, str]) -> str | None:
    return attributes.get(_MESSAGE_TYPE, attributes.get("+" + _MESSAGE_TYPE))


def offsets(
    root: Root,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC...", help="The topics; without one, all topics.", show_default=False),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="Also show the offset of the first message that was stored at this time or later: milliseconds since "
            "1970, a time such as 2026-01-31T12:00:00Z (UTC if it names no zone), or a time before now such as -10m.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the minimum and the maximum offset of each queue. The maximum is the offset that the next message gets."""
    at_ms = None if at is None else time_ms("--at", at)
    with out.waiting("looking through the queues"):
        rows, faults = local_operator.offsets(path_of(root), looking(), topics=names or [], at_ms=at_ms)
    if as_json:
        for row in rows:
            out.json_line(row)
    elif rows:
        titles = [("topic", False), ("queue", True), ("min", True), ("max", True), ("messages", True)]
        if at_ms is not None:
            titles += [(f"at {out.time_words(at_ms)}", True), ("stored", False)]
        out.table(titles, [_offset_cells(row) for row in rows])
    _end(rows, faults, "no queue found")


def _offset_cells(row: dict[str, Any]) -> list[object]:
    cells = list(row.values())
    if "storeTimestamp" in row:
        cells[-1] = "-" if row["storeTimestamp"] is None else out.time_words(row["storeTimestamp"])
    return cells


def _end(rows: list[dict[str, Any]], faults: list[str], nothing: str) -> None:
    for fault in faults:
        out.note(f"messagestore: {fault}")
    if not rows:
        out.note(nothing)
    if faults or not rows:
        raise typer.Exit(FOUND_NOTHING)


# ---- changing


@topic_app.command("create")
def topic_create(
    root: Root,
    topic: Topic,
    queues: Annotated[
        int, typer.Option("--queues", metavar="N", min=1, help="The number of queues that producers write.")
    ] = _QUEUE_NUMS,
    read_queues: ReadQueues = None,
    perm: PermOption = None,
    order: Order = None,
    message_type: TypeOption = None,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Create a topic in config/topics.json. Consumers read as many queues as producers write, unless --read-queues says
    otherwise. A missing or empty ROOT becomes a store. While a broker runs on the store, nothing is changed.
    """
    path = path_of(root)
    is_new = not local_operator.holds_store(path)
    with (
        broker_named("topics", f"mqadmin updateTopic -b HOST:PORT -t {topic} -w {queues} -r {read_queues or queues}"),
        MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store,
    ):
        if is_new:
            out.note(f"created a new store in {path}")
        found = store.topic_config(topic)
        if found is not None:
            raise ConfigError(
                f"{topic}: the topic exists already, with {found.write_queue_nums} queues to write and "
                f"{found.read_queue_nums} to read. Change it with `messagestore topic alter`",
                key="TOPIC",
                value=topic,
            )
        made = store.create_topic(
            topic,
            queues,
            read_queue_nums=read_queues,
            perm=int(perm or Perm.READ_WRITE),
            order=bool(order),
            attributes=_attributes(message_type),
        )
    _show(made.to_fields(), "created", as_json=as_json)
    _note_unread(made.to_fields())


@topic_app.command("alter")
def topic_alter(
    root: Root,
    topic: Topic,
    queues: Annotated[
        int | None,
        typer.Option(
            "--queues",
            metavar="N",
            min=1,
            help="The number of queues that producers write (writeQueueNums).",
            show_default=False,
        ),
    ] = None,
    read_queues: ReadQueues = None,
    perm: PermOption = None,
    order: Order = None,
    message_type: TypeOption = None,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Change settings of a topic in config/topics.json; what is not named stays as it is, also what this project does
    not know. No message is deleted or moved. While a broker runs on the store, nothing is changed.
    """
    asked = {"-w": queues, "-r": read_queues, "-p": perm and perm.value}
    if order is None and message_type is None and all(value is None for value in asked.values()):
        raise ConfigError(
            "topic alter: found nothing to change. Give --queues, --read-queues, --perm, --order or --message-type",
            key="topic alter",
        )
    path = existing(root)
    words = " ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
    with (
        broker_named("topics", f"mqadmin updateTopic -b HOST:PORT -t {topic} {words}"),
        MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store,
    ):
        made = store.alter_topic(
            topic,
            read_queue_nums=read_queues,
            write_queue_nums=queues,
            perm=None if perm is None else int(perm),
            order=order,
            attributes=_attributes(message_type),
        )
        unread = [queue_id for queue_id in store.topics().get(topic, []) if queue_id >= made.read_queue_nums]
    _show(made.to_fields(), "altered", as_json=as_json)
    if queues is not None:
        _note_unread(made.to_fields())
    if unread:
        out.note(
            f"RocketMQ's consumers do not read {out.count_words(len(unread), 'queue')} that hold messages "
            f"({', '.join(map(str, unread[:8]))}{', ...' if len(unread) > 8 else ''}). Give --read-queues "
            f"{max(unread) + 1} or more until they are read"
        )


def _note_unread(fields: dict[str, Any]) -> None:
    """Say it if producers write queues that consumers do not read."""
    read, write = fields["readQueueNums"], fields["writeQueueNums"]
    if read < write:
        out.note(
            f"RocketMQ's consumers read {read} of these {write} queues. Until `messagestore topic alter` sets "
            f"--read-queues {write}, they do not receive what is put to the others"
        )


def _attributes(message_type: MessageType | None) -> dict[str, str] | None:
    return None if message_type is None else {_MESSAGE_TYPE: message_type.value}


def _show(fields: dict[str, Any], what: str, *, as_json: bool) -> None:
    if as_json:
        out.json_line(fields)
        return
    kind = _message_type(fields["attributes"])
    words = [
        f"{what} topic {out.shown(fields['topicName'])}: {out.count_words(fields['writeQueueNums'], 'queue')} to write",
        f"{fields['readQueueNums']} to read",
        f"perm {fields['perm']}",
        *(["ordered"] if fields["order"] else []),
        *([f"message type {out.shown(kind)}"] if kind else []),
    ]
    out.line(", ".join(words))
