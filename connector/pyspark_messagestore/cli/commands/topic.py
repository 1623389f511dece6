"""`messagestore topic create`, `topic alter` and `topic delete`: the settings of a topic, and its end."""

from __future__ import annotations

import enum
import sys
from typing import Annotated, Any

import typer

from messagestore import ConfigError, MessageStore
from messagestore.inspect import operator
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import (
    FOUND_NOTHING,
    ConfigFile,
    Json,
    Root,
    Wait,
    broker_named,
    config_of,
    existing,
    path_of,
)

PLACE = 410
PANEL = "Topics and groups"

_QUEUE_NUMS = 8


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


topic = typer.Typer(no_args_is_help=True, help="Create a topic, change its settings, or delete it.")

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
        metavar="TYPE",
        help="The attribute message.type, which RocketMQ 5's proxy checks; its broker and this project do not: "
        + ", ".join(MessageType)
        + ".",
        show_default=False,
    ),
]


@topic.command("create")
def create(
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
    is_new = not operator.holds_store(path)
    with (
        broker_named("topics", f"mqadmin updateTopic -b HOST:PORT -t {topic} -w {queues} -r {read_queues or queues}"),
        MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store,
    ):
        if is_new:
            out.note(f"created a new store in {path}")

        existing_topic = store.topic_config(topic)
        if existing_topic is not None:
            raise ConfigError(
                f"{topic}: the topic exists already, with {existing_topic.write_queue_nums} queues to write and "
                f"{existing_topic.read_queue_nums} to read. Change it with `messagestore topic alter`",
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


@topic.command("alter")
def alter(
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
    options = {"-w": queues, "-r": read_queues, "-p": perm and perm.value}
    if order is None and message_type is None and all(value is None for value in options.values()):
        raise ConfigError(
            "topic alter: found nothing to change. Give --queues, --read-queues, --perm, --order or --message-type",
            key="topic alter",
        )

    path = existing(root)
    words = " ".join(f"{name} {value}" for name, value in options.items() if value is not None)
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


@topic.command("delete")
def delete(
    root: Root,
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", help="The topics.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Delete topics: their settings, their queues, and what consumer groups have read of them, as a broker does.
    The command shows what would go, and asks. This frees no disk space: the records stay in the log until `gc` deletes
    their segments. A topic of the same name that is made later begins at offset 0, and a streaming query that has read
    the old one stops with an error. While a broker runs on the store, nothing is changed.
    """
    path, names = existing(root), list(dict.fromkeys(topics))
    rows = operator.deletions(path, names)
    if not as_json or not yes:
        for row in rows:
            _show_row(row, as_json=as_json)
    if not yes:
        _ask(names)

    with (
        broker_named("topics", f"mqadmin deleteTopic -n HOST:PORT -c CLUSTER -t {names[0]}"),
        MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store,
    ):
        for row in rows:
            store.delete_topic(row["topic"])
            if as_json:
                out.json_line(row)
            else:
                out.line(f"deleted topic {out.shown(row['topic'])}")


def _show_row(row: dict[str, Any], *, as_json: bool) -> None:
    queues = out.count_words(row["queues"], "queue")
    words = f"topic {row['topic']}: {out.count_words(row['messages'], 'message')} in {queues}"
    if row["groups"]:
        words += f"; progress of {out.count_words(len(row['groups']), 'group')}: {', '.join(row['groups'])}"
    if as_json:
        out.note(words)
    else:
        out.line(out.shown(words))


def _ask(names: list[str]) -> None:
    """Go on only if the user says so.

    Raises
    ------
    ConfigError
        Nobody can answer.
    typer.Exit
        The answer is no.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            "topic delete: found no terminal to ask on. Nothing was deleted. To delete without being asked, give --yes",
            key="--yes",
        )
    if not typer.confirm(f"Delete {out.count_words(len(names), 'topic')}?", err=True):
        out.note("nothing was deleted")
        raise typer.Exit(FOUND_NOTHING)


def _note_unread(fields: dict[str, Any]) -> None:
    """Say it if producers write queues that consumers do not read."""
    read, write = fields["readQueueNums"], fields["writeQueueNums"]
    if read < write:
        out.note(
            f"RocketMQ's consumers read {read} of these {write} queues. Until `messagestore topic alter` sets "
            f"--read-queues {write}, they do not receive what is put to the others"
        )


def _attributes(message_type: MessageType | None) -> dict[str, str] | None:
    return None if message_type is None else {out.MESSAGE_TYPE: message_type.value}


def _show(fields: dict[str, Any], what: str, *, as_json: bool) -> None:
    if as_json:
        out.json_line(fields)
        return

    kind = out.message_type(fields["attributes"])
    words = [
        f"{what} topic {out.shown(fields['topicName'])}: {out.count_words(fields['writeQueueNums'], 'queue')} to write",
        f"{fields['readQueueNums']} to read",
        f"perm {fields['perm']}",
        *(["ordered"] if fields["order"] else []),
        *([f"message type {out.shown(kind)}"] if kind else []),
    ]
    out.line(", ".join(words))
