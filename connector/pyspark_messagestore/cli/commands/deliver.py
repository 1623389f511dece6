"""`messagestore deliver`: a process that delivers the delayed messages of a store, in turns with its writers."""

from __future__ import annotations

from typing import Annotated

import typer

from messagestore import CorruptionError, Delivered, stored_config
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, ConfigFile, Json, Root, Wait, config_of, existing
from pyspark_messagestore.cli.services import Delivery, Service, impatient, run_services, show_left_out, told_to_end

PLACE = 350
PANEL = "Care"


def deliver(
    root: Root,
    once: Annotated[bool, typer.Option("--once", help="Deliver what is due now, and end.")] = False,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Deliver delayed messages to their topics and queues when they are due, until Ctrl-C or SIGTERM.
    Each message is delivered once, also if this command is killed, or runs several times. Other writers take turns with
    it. A RocketMQ broker delivers by itself, and cannot start while this command runs. `messagestore run` does this and
    the other work that a store needs.
    """
    path, config, damage = existing(root), config_of(store_config, lock_timeout=wait), set[str]()
    settings = config.completed(stored_config(path))
    if not once:
        config = impatient(settings, config)
    delivery = Delivery(path, config, lambda done: _show(done, as_json=as_json))
    with told_to_end() as ends:
        if once:
            try:
                while not ends.is_set() and delivery.deliver() is None:
                    pass
            except CorruptionError as error:
                damage.add(str(error))
                out.note(f"messagestore: {error}")
        else:
            service = Service("delivery", lambda: delivery.deliver() or 0.0, settings.lock_timeout_s)
            damage = service.damage
            run_services([service], ends)

    if not as_json:
        out.line(f"{out.count_words(delivery.count, 'message')} delivered")
    if damage:
        raise typer.Exit(FOUND_NOTHING)


def _show(done: Delivered, *, as_json: bool) -> None:
    if as_json:
        out.json_line({"delivered": done.count, "leftOut": done.left_out, "nextDue": done.next_due_ms})
    else:
        show_left_out(done)
