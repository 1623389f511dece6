"""`messagestore run`: one process for what a store needs in production beside the programs that use it."""

from __future__ import annotations

import contextlib
import enum
import threading
from typing import Annotated, Any

import typer

from messagestore import (
    ConfigError,
    Delivered,
    LocalTransactionState,
    MessageExt,
    StoreConfig,
    check_halves,
    run_retention,
    stored_config,
)
from messagestore.spi import duration_s
from pyspark_messagestore.checkpoint.spark_checkpoint import read_progress
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import (
    FOUND_NOTHING,
    CheckpointFolders,
    ConfigFile,
    Json,
    Root,
    Wait,
    config_of,
    existing,
    looking,
    path_of,
)
from pyspark_messagestore.cli.checks import Ask, answered, check_by
from pyspark_messagestore.cli.endpoint import METRICS_ADDRESS, needed_figures
from pyspark_messagestore.cli.services import Delivery, Service, impatient, run_services, show_left_out, told_to_end

PLACE = 305
PANEL = "Care"


class Part(enum.StrEnum):
    """What `run` does."""

    DELIVERY = "delivery"
    RETENTION = "retention"
    METRICS = "metrics"


def run(
    root: Root,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where Prometheus finds the metrics, as /metrics.")
    ] = METRICS_ADDRESS,
    checkpoint: CheckpointFolders = None,
    check_command: Annotated[
        str | None,
        typer.Option(
            "--check-command",
            metavar="COMMAND",
            help="Ask this command how a half message ends. It gets the message on standard input, as one JSON object, "
            "and writes commit, rollback or unknown.",
            show_default=False,
        ),
    ] = None,
    check_url: Annotated[
        str | None,
        typer.Option(
            "--check-url",
            metavar="URL",
            help="Ask this URL how a half message ends. It gets the same JSON by POST, and answers with the same "
            "words.",
            show_default=False,
        ),
    ] = None,
    check_timeout: Annotated[
        str, typer.Option("--check-timeout", metavar="DURATION", help="How long one answer may take.")
    ] = "10s",
    without: Annotated[
        list[Part] | None,
        typer.Option(
            "--without",
            metavar="PART",
            help="Leave out delivery, retention or metrics, because another process does it. It may be given several "
            "times.",
            show_default=False,
        ),
    ] = None,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Do what a store needs in production beside the programs that use it, until Ctrl-C or SIGTERM.
    This delivers delayed messages, deletes expired segments by the store's own settings (fileReservedTime), asks how
    open half messages end, and gives the store's figures to Prometheus. It takes turns with other writers. If the disk
    is full, or another writer holds the store for long, it says so and tries again; whatever else fails ends it with an
    exit code, for systemd to start it again. A RocketMQ broker does all this by itself, and cannot start while this
    command runs.
    """
    path, config, left_out = existing(root), config_of(store_config, lock_timeout=wait), set(without or ())
    ask = check_by(check_command, check_url, duration_s("--check-timeout", check_timeout))
    settings = config.completed(stored_config(path))

    patience_s, config = settings.lock_timeout_s, impatient(settings, config)
    done = _Done(path, config, as_json=as_json)
    services = list[Service]()
    shown = list[tuple[str, str]]()
    if Part.DELIVERY not in left_out:
        services.append(Service("delivery", done.deliver, patience_s))
        shown.append(("delivery", "of delayed messages that are due"))
    if Part.RETENTION not in left_out:
        services.append(Service("retention", done.retain, patience_s))
        hours = out.count_words(settings.file_reserved_time, "hour")
        shown.append(
            (
                "retention",
                f"of {hours}"
                if settings.retention_enabled
                else f"waits for a setting: `messagestore config {root} set fileReservedTime=HOURS`",
            )
        )

    with told_to_end() as ends, contextlib.ExitStack() as stack:
        if ask is not None:
            checks = Service("half messages", lambda: done.check(ask, ends, checks.alive), patience_s)
            services.append(checks)
            shown.append(("half messages", f"are asked about: {check_command or check_url}"))

        url = None
        if Part.METRICS not in left_out:
            folders = [path_of(folder) for folder in checkpoint or ()]
            for folder in folders:
                read_progress(folder)  # what was mistyped is told now, and not to Prometheus
            url = stack.enter_context(needed_figures("run", path, folders, looking()).listening(listen))
            shown.append(("metrics", url))
        elif checkpoint:
            raise ConfigError(
                "--checkpoint: found together with --without metrics, which are all that show it. Leave one of them "
                "out",
                key="--checkpoint",
                value=checkpoint,
            )

        if as_json:
            out.json_line({"services": [service.name for service in services], "metrics": url})
        else:
            out.facts(shown)
        run_services(services, ends)

    if not as_json:
        out.line(done.words())
    if any(service.damage for service in services):
        raise typer.Exit(FOUND_NOTHING)


class _Done:
    """The rounds of the services, and what they have done so far."""

    def __init__(self, path: str, config: StoreConfig, *, as_json: bool) -> None:
        self._path, self._config, self._as_json = path, config, as_json
        self._delivery = Delivery(path, config, self._delivered)
        self._segments = self._committed = self._rolled_back = 0

    def _tell(self, service: str, fields: dict[str, Any], words: str) -> None:
        if self._as_json:
            out.json_line({"service": service, **fields})
        elif words:
            out.line(f"{service}: {words}")

    def _settings(self) -> StoreConfig:
        """The settings as they are now: those that live with the store may be changed meanwhile."""
        return self._config.completed(stored_config(self._path))

    def deliver(self) -> float:
        """One round of delivery."""
        return self._delivery.deliver() or 0.0

    def _delivered(self, done: Delivered) -> None:
        fields = {"delivered": done.count, "leftOut": done.left_out, "nextDue": done.next_due_ms}
        if self._as_json:
            self._tell("delivery", fields, "")
        show_left_out(done)

    def retain(self) -> float:
        """One round of retention."""
        settings = self._settings()
        expired = run_retention(self._path, self._config) if settings.retention_enabled else None
        if expired is not None and expired.segments:
            count = len(expired.segments)
            self._segments += count
            fields = {"segments": list(expired.segments), "size": expired.size, "minOffset": expired.min_offset}
            words = f"deleted {out.count_words(count, 'segment')}, the log begins at {expired.min_offset}"
            self._tell("retention", fields, words)
        return settings.clean_resource_interval / 1000

    def check(self, ask: Ask, ends: threading.Event, alive: Any) -> float:
        """One round of checks of half messages."""

        def checked(message: MessageExt) -> LocalTransactionState:
            alive()
            return LocalTransactionState.UNKNOW if ends.is_set() else answered(ask, message)

        report = check_halves(self._path, checked, self._config, stopping=ends.is_set)
        self._committed += report.committed
        self._rolled_back += report.rolled_back
        if report.checked or report.discarded:
            fields = {
                "checked": report.checked,
                "committed": report.committed,
                "rolledBack": report.rolled_back,
                "discarded": report.discarded,
                "open": report.open,
            }
            self._tell("half messages", fields, ", ".join(f"{count} {name}" for name, count in _named(fields)))
        if report.discarded:
            out.note(
                f"messagestore: {out.count_words(report.discarded, 'half message')} put aside, asked about "
                "transactionCheckMax times or older than fileReservedTime. They are in TRANS_CHECK_MAX_TIME_TOPIC now, "
                "and nobody asks about them again"
            )
        for message_id, error in report.failures:
            out.note(f"messagestore: half message {message_id}: {error}")
        return self._settings().transaction_check_interval / 1000

    def words(self) -> str:
        """All that was done, on one line."""
        return (
            f"{out.count_words(self._delivery.count, 'message')} delivered, "
            f"{out.count_words(self._segments, 'segment')} deleted, "
            f"{out.count_words(self._committed, 'half message')} committed and {self._rolled_back} rolled back"
        )


def _named(fields: dict[str, int]) -> list[tuple[str, int]]:
    return [(name.replace("rolledBack", "rolled back"), count) for name, count in fields.items()]
