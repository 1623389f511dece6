"""The options of the source and the sink: their names, their meaning, and how a user's values are parsed.

To add an option, add a row to the table `OPTIONS`. Everything else follows from it: what is parsed, what is refused
(with a did-you-mean), and the tables of connector/README.md (`make docs`). `tests/connector/test_planted_options.py`
then asks for a test that fails without it. Names are case-insensitive, as everywhere in Spark.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from messagestore import ASYNC_FLUSH, SYNC_FLUSH, ConfigError, MessageIllegalError, StoreConfig
from messagestore.spi import check_app_id, put_topic_fault, topic_fault
from pyspark_messagestore.kinds import BOOLEAN as _BOOLEAN
from pyspark_messagestore.kinds import BROKER_NAME as _BROKER_NAME
from pyspark_messagestore.kinds import DURATION as _DURATION
from pyspark_messagestore.kinds import MOST as _MOST
from pyspark_messagestore.kinds import PATH as _PATH
from pyspark_messagestore.kinds import SINK, SOURCE, Kind, Option
from pyspark_messagestore.kinds import TEXT as _TEXT
from pyspark_messagestore.kinds import choice as _choice
from pyspark_messagestore.kinds import whole as _whole
from pyspark_messagestore.source_options import KAFKA, ROCKETMQ, SOURCE_OPTIONS, SourceOptions

_DOING = {SOURCE: "reading", SINK: "writing"}

_SPARK_KEYS = frozenset(
    {
        "checkpointlocation",
        "path",
        "paths",
        "owner",
        "location",
        "provider",
        "comment",
        "external",
        "is_managed_location",
        "queryname",
    }
)
"""Keys that Spark itself adds to the options; only `path` has a meaning for the store."""
_SPARK_PREFIXES = ("option.", "spark.", "__")
_KAFKA_PREFIXES = ("kafka.", "kafkaconsumer.", "fetchoffset.", "groupidprefix")
"""The options of Spark's connector for Kafka that concern the client of a Kafka broker."""


# ---- kinds of values


def _topic(text: str) -> str:
    if topic_fault(text):
        raise ValueError
    return text


def _topic_of(option: str) -> Kind:
    """A topic to write to. A name that is legal but reserved is refused with the reason."""

    def parse(text: str) -> str:
        fault = put_topic_fault(_topic(text))
        if fault is not None:
            raise ConfigError(f"option {option}: {fault}", key=option, value=text)
        return text

    return Kind(parse, "a topic: letters, digits, and %|-_ , at most 127")


def _app_id(text: str) -> str:
    try:
        check_app_id(text)
    except MessageIllegalError:
        raise ValueError from None
    return text


def _host(text: str) -> tuple[str, int]:
    """An address without its brackets, and a port."""
    host, colon, port = text.strip().rpartition(":")
    address = ipaddress.ip_address(host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host)
    if not colon or (address.version == 6) != (host[:1] == "["):
        raise ValueError
    return str(address), _whole(0, 65535).parse(port)


_HOST = Kind(_host, "an IP address and a port, such as 10.0.0.7:10911 or [fe80::1]:10911")


_APP_ID = Kind(_app_id, "1 to 255 bytes of text without blanks and control characters")


# ---- the table


OPTIONS: tuple[Option, ...] = (
    *SOURCE_OPTIONS,
    Option(
        SINK, "path", _PATH, None, "The store's root folder; a missing or empty one becomes a store.", (), "required"
    ),
    Option(
        SINK,
        "topic",
        _topic_of("topic"),
        None,
        "The topic of all rows; it takes precedence over a column `topic`. One of the two is required.",
    ),
    Option(
        SINK,
        "autoCreateTopic",
        _BOOLEAN,
        "true",
        "Whether to create a topic that is not in `config/topics.json`. `false` makes it an error.",
    ),
    Option(SINK, "writeQueueNums", _whole(1, 65536), "8", "The number of queues of a topic that is created."),
    Option(
        SINK,
        "queueSelector",
        _choice("auto", "keys", "roundRobin"),
        "auto",
        "How rows without a queue are distributed. `auto`: by the column `queueId`; where it is null, by the hash of "
        "`shardingKey`, then by the hash of the first key, then in turn. `keys`: by the hash of the first key, then in "
        "turn. `roundRobin`: in turn.",
    ),
    Option(
        SINK,
        "flushDiskType",
        _choice(SYNC_FLUSH, ASYNC_FLUSH),
        SYNC_FLUSH,
        "`SYNC_FLUSH`: a commit returns when the batch is on the disk. `ASYNC_FLUSH`: a commit does not wait for the "
        "disk, and a power cut may take the last batches.",
    ),
    Option(
        SINK,
        "txnAppId",
        _APP_ID,
        None,
        "The app that the batches belong to. A stream uses its query id. A batch write without this option is not "
        "exactly-once.",
        shown="query id",
    ),
    Option(
        SINK,
        "txnVersion",
        _whole(0, _MOST),
        None,
        "The number of the batch within its app, which must grow. For batch writes with `txnAppId` only (in "
        "`foreachBatch`, give the batch id).",
        shown="batch id",
    ),
    Option(
        SINK,
        "txnVersionSource",
        _choice("user", "spark"),
        None,
        "What `txnVersion` is. `spark`: Spark's batch id, so that a missing batch is an error; `MessageStoreSink` sets "
        "this. `user`: a number that only has to grow. For batch writes only.",
        shown="`user` (`MessageStoreSink`: `spark`)",
    ),
    Option(
        SINK,
        "onNewQuery",
        _choice("fail", "continue"),
        "fail",
        "What to do if the store's batches of this `txnAppId` come from another query. `continue` hands the app over "
        "to this query for good: its batches count from 0 again, and the query that it replaces is refused from then "
        "on, whatever its options say.",
    ),
    Option(
        SINK,
        "onReplayMismatch",
        _choice("fail", "skip"),
        "fail",
        "What to do if a batch that is in the store is sent again with other rows. `skip` drops the new rows. Rows for "
        "another topic are an error with both values.",
    ),
    Option(
        SINK,
        "onVersionRegression",
        _choice("fail", "skip"),
        "fail",
        "What to do if a batch is not in the store, but a later one is (an older checkpoint). `skip` drops its rows.",
    ),
    Option(
        SINK,
        "onLostBatches",
        _choice("fail", "continue"),
        "fail",
        "What to do if batches between the last one in the store and this one are missing. `continue` continues "
        "without them, at every such gap; `messagestore batches start` does so once. A store without any batch of this "
        "`txnAppId` is an error with both values, unless the batch is the stream's first one.",
    ),
    Option(
        SINK,
        "maxMessageSize",
        _whole(10, 1 << 30),
        "4194304",
        "The largest body in bytes. A record may have 65 536 more.",
    ),
    Option(
        SINK,
        "lockTimeout",
        _DURATION,
        "30s",
        "How long a commit waits for another writer before it fails with that writer's name.",
    ),
    Option(
        SINK,
        "stagingTtl",
        _DURATION,
        "24h",
        "The age at which staging files are deleted, counted from the last write. Files of a driver or task that is "
        "known to be dead are deleted at once, and so are those that failed attempts left of a committed batch.",
    ),
    Option(
        SINK,
        "storeConfig",
        _TEXT,
        None,
        "The path of a `store.properties` file, or of a broker's own `broker.conf`. Its file sizes, its index slots, "
        "and `messageIndexEnable` take effect only if this write creates the store, or if a broker created it and put "
        "no messages into it.",
    ),
    Option(
        SINK,
        "unknownColumns",
        _choice("error", "ignore", "properties"),
        "error",
        "What to do with a column that the sink does not know. `ignore` leaves it out. `properties` makes it a "
        "property of the message, named as the column; a null has no property. Such a column has type string, boolean, "
        "date or a whole number.",
    ),
    Option(
        SINK,
        "invalidRows",
        _choice("fail", "deadLetter"),
        "fail",
        "What to do with a row that the store cannot hold (a null or too large body, an illegal topic, key, tag or "
        "property, a queue that does not exist). `fail` refuses the batch. `deadLetter` writes the row to "
        "`deadLetterTopic`, in the same batch.",
    ),
    Option(
        SINK,
        "deadLetterTopic",
        _topic_of("deadLetterTopic"),
        None,
        "The topic of dead letters; required with `invalidRows=deadLetter`. A dead letter has the body of its row (up "
        "to `maxMessageSize`), and the properties `dlqReason`, `dlqField`, `dlqOrigin` (JSON: the row's other columns, "
        "partition and number) and `dlqBodySize`.",
    ),
    Option(
        SINK,
        "rowFormat",
        _choice(ROCKETMQ, KAFKA),
        ROCKETMQ,
        "`kafka`: only the columns that Spark's sink for Kafka writes are known: `key`, `value`, `headers`, `topic`, "
        "`partition`. Without it, RocketMQ's names are known, too, and take precedence.",
    ),
    Option(
        SINK,
        "includeHeaders",
        _BOOLEAN,
        "false",
        "Has no effect, as with Spark's sink for Kafka: a column `headers` is always written.",
    ),
    Option(
        SINK,
        "uniqKey",
        _BOOLEAN,
        "false",
        "`true`: each message gets a `UNIQ_KEY`, as a RocketMQ client would stamp it, so that RocketMQ's tools find "
        "the message by its id. The key depends on app, version, partition and row. It costs 43 bytes and one index "
        "entry a message.",
    ),
    Option(
        SINK,
        "brokerClusterName",
        _TEXT,
        None,
        "The name of a cluster, which each message then has as its property `CLUSTER`, as a broker stamps it. "
        "RocketMQ's clients need it to answer a request. It costs 9 bytes and the name.",
        shown="none; with `stampCluster=true` in `storeConfig`, the name that is there",
    ),
    Option(
        SINK,
        "brokerName",
        _BROKER_NAME,
        None,
        "The name of the broker whose store this is. The store keeps it, also one that exists already: the source's "
        "column `brokerName`, `messagestore status` and the label `node_id` of the metrics show it. If writers give "
        "different names, the last one counts, and a warning says so.",
        shown="`brokerName` of `storeConfig`, else the store's name if it has one",
    ),
    Option(
        SINK,
        "storeHost",
        _HOST,
        None,
        "The address (`host:port`) that is written into each record and is part of the message ids. Give the address "
        "of the broker whose store this is.",
        shown="that of the store's records; in a new store `brokerIP1` and `listenPort` of `storeConfig`",
    ),
    Option(
        SINK,
        "stagingDir",
        _PATH,
        None,
        "The folder for the files in which tasks leave their rows until the commit. It must exist, and the driver and "
        "all executors must see it.",
        shown="`spark/staging` in the store",
    ),
    Option(
        SINK,
        "preallocate",
        _BOOLEAN,
        "false",
        "`true`: a new segment gets all of its disk blocks at once, so that a full disk shows before rows are written.",
    ),
)


def _by_name(side: str) -> dict[str, Option]:
    return {
        name.lower(): option for option in OPTIONS if option.side == side for name in (option.name, *option.aliases)
    }


_NAMES = {side: _by_name(side) for side in (SOURCE, SINK)}


# ---- what the user gave


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The sink's options, typed; durations in seconds."""

    path: str
    topic: str | None
    auto_create_topic: bool
    write_queue_nums: int
    queue_selector: str
    flush_disk_type: str
    txn_app_id: str | None
    txn_version: int | None
    txn_version_source: str | None
    on_new_query: str
    on_replay_mismatch: str
    on_version_regression: str
    on_lost_batches: str
    max_message_size: int
    lock_timeout: float
    staging_ttl: float
    store_config: str | None
    unknown_columns: str
    invalid_rows: str
    dead_letter_topic: str | None
    row_format: str
    include_headers: bool
    uniq_key: bool
    broker_cluster_name: str | None
    broker_name: str | None
    store_host: tuple[str, int] | None
    staging_dir: str | None
    preallocate: bool

    def config(self) -> StoreConfig:
        """The settings with which the store is written: those of `storeConfig`, overridden by the options.

        Raises
        ------
        ConfigError
            The file cannot be read, or has an unknown setting.
        """
        base = StoreConfig()
        if self.store_config is not None:
            try:
                base = StoreConfig.load(re.sub(r"^file:(//(?=/))?", "", self.store_config))
            except OSError as error:
                raise ConfigError(
                    f"option storeConfig: found {self.store_config!r}, which cannot be read ({error.strerror}); "
                    f"allowed is a store.properties file that the driver can read",
                    key="storeConfig",
                    value=self.store_config,
                ) from None
        if self.store_host is not None:
            base = base.replace(broker_ip1=self.store_host[0], listen_port=self.store_host[1])
        if self.broker_cluster_name is not None:
            base = base.replace(stamp_cluster=True, broker_cluster_name=self.broker_cluster_name)
        return base.replace(
            broker_name=self.broker_name or base.broker_name,
            flush_disk_type=self.flush_disk_type,
            max_message_size=self.max_message_size,
            lock_timeout=f"{self.lock_timeout:.3f}s",
            preallocate=self.preallocate or base.preallocate,
        )


def check_names(options: Iterable[str]) -> None:
    """Refuse names that are options of neither the source nor the sink.

    Raises
    ------
    ConfigError
        For the first such name. The message suggests a similar option.
    """
    for key in options:
        if not _is_sparks(key) and all(key.lower() not in names for names in _NAMES.values()):
            raise _unknown(key, [option.name for option in OPTIONS])


def source_options(options: Mapping[str, str]) -> SourceOptions:
    """Parse the options of the source.

    Raises
    ------
    ConfigError
        For the first option that is missing, unknown or wrong, or does not go with another one.
    """
    parsed = SourceOptions(**_parsed(SOURCE, options))
    parsed.check()
    return parsed


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Parse the options of the sink.

    Raises
    ------
    ConfigError
        For the first option that is missing, unknown or wrong.
    """
    parsed = SinkOptions(**_parsed(SINK, options))
    if parsed.txn_version is not None and parsed.txn_app_id is None:
        raise ConfigError("option txnVersion: found without txnAppId; allowed is both or neither", key="txnVersion")
    if parsed.txn_version_source == "spark" and parsed.txn_version is None:
        raise ConfigError(
            "option txnVersionSource: found spark without txnVersion. Give txnVersion, which is Spark's batch id in "
            "foreachBatch, or leave txnVersionSource out",
            key="txnVersionSource",
            value="spark",
        )
    if parsed.invalid_rows == "deadLetter" and parsed.dead_letter_topic is None:
        raise ConfigError(
            "option invalidRows: found deadLetter without deadLetterTopic. Give the topic of the dead letters",
            key="deadLetterTopic",
        )
    if parsed.dead_letter_topic is not None and parsed.invalid_rows != "deadLetter":
        raise ConfigError(
            "option deadLetterTopic: found without invalidRows=deadLetter. Give both or neither", key="deadLetterTopic"
        )
    return parsed


def _parsed(side: str, options: Mapping[str, str]) -> dict[str, Any]:
    given: dict[str, tuple[str, str]] = {}
    for key, value in options.items():
        option = _NAMES[side].get(key.lower())
        if option is None:
            if not _is_sparks(key):
                raise _misplaced(side, key)
            continue
        if option.name in given and given[option.name][1] != value:
            raise ConfigError(
                f"option {option.name}: found twice, as {given[option.name][0]} and as {key}. Give one of them",
                key=option.name,
                value=value,
            )
        given[option.name] = (key, value)
    for key, value in options.items():
        if key.lower() == "location":  # Spark's SQL passes the path of a table under this name
            given.setdefault("path", (key, value))
    values: dict[str, Any] = {}
    for option in OPTIONS:
        if option.side == side:
            values[option.field] = _value(option, given)
    return values


def _value(option: Option, given: Mapping[str, tuple[str, str]]) -> Any:
    _key, text = given.get(option.name, (option.name, option.default))
    if text is None:
        if option.shown == "required":
            also = f" (or {', '.join(option.aliases)})" if option.aliases else ""
            hint = _REQUIRED[option.name] + ("" if given else _NO_TABLE)
            raise ConfigError(f"option {option.name}{also}: is missing. {hint}", key=option.name, value=None)
        return None
    try:
        return option.kind.parse(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError) and error.key == option.name:
            raise  # its message says more than the one below
        raise ConfigError(
            f"option {option.name}: found {text!r}; allowed is {option.kind.allowed}", key=option.name, value=text
        ) from None


_NO_TABLE = (
    ". Spark does not pass on the options of a CREATE TABLE: give them with each use, as in SELECT * FROM t WITH "
    "('path' = '/data/store', 'subscribe' = 'flights'), or create a TEMPORARY VIEW"
)
_REQUIRED = {
    "path": 'Give the store\'s root folder, as in .load("/data/store") or .start("/data/store")',
    "subscribe": 'give topics, as in .option("subscribe", "flights"), or subscribePattern or assign',
}


def _is_sparks(key: str) -> bool:
    return key.lower() in _SPARK_KEYS or key.lower().startswith(_SPARK_PREFIXES)


def _misplaced(side: str, key: str) -> ConfigError:
    other = SINK if side == SOURCE else SOURCE
    if key.lower() in _NAMES[other]:
        return ConfigError(
            f"option {key}: is for {_DOING[other]}, but this is {_DOING[side]}. Leave it out", key=key, value=None
        )
    return _unknown(key, [option.name for option in OPTIONS if option.side == side])


def _unknown(key: str, names: list[str]) -> ConfigError:
    if key.lower().startswith(_KAFKA_PREFIXES):
        return ConfigError(
            f"option {key}: is for a Kafka broker, but a message store is a folder; leave out all kafka.* options, "
            f"and kafkaConsumer.*, fetchOffset.* and groupIdPrefix with them. "
            f'Give the path, as in .load("/data/store") or .start("/data/store")',
            key=key,
            value=None,
        )
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(key.lower(), list(by_lower), 1)
    hint = f"Did you mean {by_lower[near[0]]}?" if near else f"The options are {', '.join(sorted(by_lower.values()))}"
    return ConfigError(f"option {key}: no such option. {hint}", key=key, value=None)


# ---- the documents


def table(side: str) -> str:
    """The options of one side as a Markdown table."""
    lines = ["| Option | Default | Meaning |", "|---|---|---|"]
    for option in OPTIONS:
        if option.side == side:
            names = ", ".join(f"`{alias}`" for alias in option.aliases)
            default = option.shown or (f"`{option.default}`" if option.default is not None else "none")
            meaning = option.meaning.replace("|", "\\|")
            lines.append(f"| `{option.name}`{f' ({names})' if names else ''} | {default} | {meaning} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """A document with the tables between its `<!-- options: side -->` and `<!-- end -->` marks renewed."""
    return re.sub(
        r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{table(match[2])}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


for _kind, _side in ((SourceOptions, SOURCE), (SinkOptions, SINK)):
    if [f.name for f in dataclasses.fields(_kind)] != [o.field for o in OPTIONS if o.side == _side]:
        raise TypeError(f"{_kind.__name__} and the table of options do not have the same fields")


if __name__ == "__main__":
    import sys
    from pathlib import Path

    readme = Path(sys.argv[1])
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")
