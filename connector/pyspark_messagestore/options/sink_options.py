"""The sink's options: one line each, which says what users can give; the class holds what they gave."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from messagestore import ASYNC_FLUSH, SYNC_FLUSH, ConfigError, MessageIllegalError, StoreConfig
from messagestore.spi import Location, check_app_id, group_fault, put_topic_fault, topic_fault
from pyspark_messagestore.options.option import SINK, option, options_of
from pyspark_messagestore.options.server_options import BrokerOptions
from pyspark_messagestore.options.values import (
    BOOLEAN,
    BROKER_NAME,
    DURATION,
    KAFKA,
    LOCATION,
    MOST,
    PATH,
    ROCKETMQ,
    TEXT,
    Kind,
    choice,
    whole,
)


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
    return str(address), whole(0, 65535).parse(port)


_HOST = Kind(_host, "an IP address and a port, such as 10.0.0.7:10911 or [fe80::1]:10911")


def _group(text: str) -> str:
    if group_fault(text):
        raise ValueError
    return text


_GROUP = Kind(_group, "a group: letters, digits, and %|-_ , at most 120")


_APP_ID = Kind(_app_id, "1 to 255 bytes of text without blanks and control characters")


@dataclass(frozen=True, slots=True)
class SinkOptions(BrokerOptions):
    """The sink's options, typed; durations in seconds. Each line is an option."""

    path: Location = option(
        "path",
        LOCATION,
        None,
        "The store's root folder, or the URL of its server (`messagestore serve`). A missing or empty folder becomes a "
        "store.",
        required=True,
    )
    topic: str | None = option(
        "topic",
        _topic_of("topic"),
        None,
        "The topic of all rows; it takes precedence over a column `topic`. One of the two is required.",
    )
    auto_create_topic: bool = option(
        "autoCreateTopic",
        BOOLEAN,
        "true",
        "Whether to create a topic that is not in `config/topics.json`. `false` makes it an error.",
    )
    write_queue_nums: int = option(
        "writeQueueNums", whole(1, 65536), "8", "The number of queues of a topic that is created."
    )
    queue_selector: str = option(
        "queueSelector",
        choice("auto", "keys", "roundRobin"),
        "auto",
        "How rows without a queue are distributed. `auto`: by the column `queueId`; where it is null, by the hash of "
        "`shardingKey`, then by the hash of the first key, then in turn. `keys`: by the hash of the first key, then in "
        "turn. `roundRobin`: in turn.",
    )
    flush_disk_type: str | None = option(
        "flushDiskType",
        choice(SYNC_FLUSH, ASYNC_FLUSH),
        None,
        "`SYNC_FLUSH`: a commit returns when the batch is on the disk. `ASYNC_FLUSH`: a commit does not wait for the "
        "disk, and a power cut may take the last batches.",
        shown=f"that of `storeConfig`, else the store's own, else `{SYNC_FLUSH}`",
    )
    txn_app_id: str | None = option(
        "txnAppId",
        _APP_ID,
        None,
        "The app that the batches belong to. A stream uses its query id. A batch write without this option is not "
        "exactly-once.",
        shown="query id",
    )
    txn_version: int | None = option(
        "txnVersion",
        whole(0, MOST),
        None,
        "The number of the batch within its app, which must grow. For batch writes with `txnAppId` only (in "
        "`foreachBatch`, give the batch id).",
        shown="batch id",
    )
    txn_version_source: str | None = option(
        "txnVersionSource",
        choice("user", "spark"),
        None,
        "What `txnVersion` is. `spark`: Spark's batch id, so that a missing batch is an error; `MessageStoreSink` sets "
        "this. `user`: a number that only has to grow. For batch writes only.",
        shown="`user` (`MessageStoreSink`: `spark`)",
    )
    on_new_query: str = option(
        "onNewQuery",
        choice("fail", "continue"),
        "fail",
        "What to do if the store's batches of this `txnAppId` come from another query. `continue` hands the app over "
        "to this query for good: its batches count from 0 again, and the query that it replaces is refused from then "
        "on, whatever its options say.",
    )
    on_new_topic: str = option(
        "onNewTopic",
        choice("fail", "continue"),
        "fail",
        "What to do if the option `topic` is not that of the last batch of this `txnAppId`: the query has got the "
        "checkpoint of another query, or `topic` was changed. `continue` goes on with the new topic. Only where "
        "versions are Spark's batch ids.",
    )
    on_replay_mismatch: str = option(
        "onReplayMismatch",
        choice("fail", "skip"),
        "fail",
        "What to do if a batch that is in the store is sent again with other rows. `skip` drops the new rows. Rows for "
        "another topic are an error with both values.",
    )
    on_version_regression: str = option(
        "onVersionRegression",
        choice("fail", "skip"),
        "fail",
        "What to do if a batch is not in the store, but a later one is (an older checkpoint). `skip` drops its rows.",
    )
    on_lost_batches: str = option(
        "onLostBatches",
        choice("fail", "continue"),
        "fail",
        "What to do if batches between the last one in the store and this one are missing. `continue` continues "
        "without them, at every such gap; `messagestore batches start` does so once. A store without any batch of this "
        "`txnAppId` is an error with both values, unless the batch is the stream's first one.",
    )
    max_message_size: int | None = option(
        "maxMessageSize",
        whole(10, 1 << 30),
        None,
        "The largest body in bytes. A record may have 65 536 more.",
        shown="that of `storeConfig`, else the store's own, else `4194304`",
    )
    lock_timeout: float | None = option(
        "lockTimeout",
        DURATION,
        None,
        "How long a commit waits for another writer before it fails with that writer's name.",
        shown="that of `storeConfig`, else the store's own, else `30s`",
    )
    staging_ttl: float = option(
        "stagingTtl",
        DURATION,
        "24h",
        "The age at which staging files are deleted, counted from the last write. Files of a driver or task that is "
        "known to be dead are deleted at once, and so are those that failed attempts left of a committed batch.",
    )
    store_config: str | None = option(
        "storeConfig",
        TEXT,
        None,
        "The path of a `store.properties` file, or of a broker's own `broker.conf`. Its file sizes, its index slots, "
        "and `messageIndexEnable` take effect only if this write creates the store, or if a broker created it and put "
        "no messages into it.",
    )
    unknown_columns: str = option(
        "unknownColumns",
        choice("error", "ignore", "properties"),
        "error",
        "What to do with a column that the sink does not know. `ignore` leaves it out. `properties` makes it a "
        "property of the message, named as the column; a null has no property. Such a column has type string, boolean, "
        "date or a whole number.",
    )
    invalid_rows: str = option(
        "invalidRows",
        choice("fail", "deadLetter"),
        "fail",
        "What to do with a row that the store cannot hold (a null or too large body, an illegal topic, key, tag or "
        "property, a queue that does not exist). `fail` refuses the batch. `deadLetter` writes the row to "
        "`deadLetterTopic`, in the same batch.",
    )
    dead_letter_topic: str | None = option(
        "deadLetterTopic",
        _topic_of("deadLetterTopic"),
        None,
        "The topic of dead letters; required with `invalidRows=deadLetter`. A dead letter has the body of its row (up "
        "to `maxMessageSize`), and the properties `dlqReason`, `dlqField`, `dlqOrigin` (JSON: the row's other columns, "
        "times in UTC, and the number of the batch) and `dlqBodySize`.",
    )
    row_format: str = option(
        "rowFormat",
        choice(ROCKETMQ, KAFKA),
        ROCKETMQ,
        "`kafka`: only the columns that Spark's sink for Kafka writes are known: `key`, `value`, `headers`, `topic`, "
        "`partition`. Without it, RocketMQ's names are known, too.",
    )
    include_headers: bool = option(
        "includeHeaders",
        BOOLEAN,
        "false",
        "Has no effect, as with Spark's sink for Kafka: a column `headers` is always written.",
    )
    uniq_key: bool = option(
        "uniqKey",
        BOOLEAN,
        "false",
        "`true`: each message gets a `UNIQ_KEY`, as a RocketMQ client would stamp it, so that RocketMQ's tools find "
        "the message by its id. The key depends on app, version, partition and row. It costs 43 bytes and one index "
        "entry a message.",
    )
    broker_cluster_name: str | None = option(
        "brokerClusterName",
        TEXT,
        None,
        "The name of a cluster, which each message then has as its property `CLUSTER`, as a broker stamps it. "
        "RocketMQ's clients need it to answer a request. It costs 9 bytes and the name.",
        shown="none; with `stampCluster=true` in `storeConfig`, the name that is there",
    )
    broker_name: str | None = option(
        "brokerName",
        BROKER_NAME,
        None,
        "The name of the broker whose store this is. The store keeps it, also one that exists already: the source's "
        "column `brokerName`, `messagestore status` and the label `node_id` of the metrics show it. If writers give "
        "different names, the last one counts, and a warning says so.",
        shown="`brokerName` of `storeConfig`, else the store's name if it has one",
    )
    store_host: tuple[str, int] | None = option(
        "storeHost",
        _HOST,
        None,
        "The address (`host:port`) that is written into each record and is part of the message ids. Give the address "
        "of the broker whose store this is.",
        shown="that of the store's records; in a new store `brokerIP1` and `listenPort` of `storeConfig`",
    )
    staging_dir: str | None = option(
        "stagingDir",
        PATH,
        None,
        "The folder for the files in which tasks leave their rows until the commit. It must exist, and the driver and "
        "all executors must see it.",
        shown="`spark/staging` in the store",
    )
    preallocate: bool = option(
        "preallocate",
        BOOLEAN,
        "false",
        "`true`: a new segment gets all of its disk blocks at once, so that a full disk shows before rows are written.",
    )

    lookup_dir: str | None = option(
        "lookupDir",
        PATH,
        None,
        "With rocketmq:// as path: the folder in which tasks write, before their first row is sent, where the queues "
        "end. A repeated batch is looked up from there. The driver and all executors must see it, and it must be there "
        "for as long as the checkpoint.",
        shown="`messagestore-lookups` in the checkpoint, if that is on a mounted file system",
    )
    producer_group: str | None = option(
        "producerGroup",
        _GROUP,
        None,
        "With rocketmq:// as path: the producer group that requests name.",
        shown="`messagestore`",
    )
    on_unconfirmed: str | None = option(
        "onUnconfirmed",
        choice("count", "fail"),
        None,
        "With rocketmq:// as path: what to do if a broker has stored rows, but did not wait until its disk or its "
        "slave had them (FLUSH_DISK_TIMEOUT, FLUSH_SLAVE_TIMEOUT, SLAVE_NOT_AVAILABLE). `count`: they are written, and "
        "a warning says how many. `fail`: the batch fails, and is looked up when Spark sends it again.",
        shown="`count`",
    )

    @property
    def location(self) -> Location:
        """Where the store is, with how its server is reached."""
        return self.located(self.path)

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

        given = {
            "broker_name": self.broker_name,
            "flush_disk_type": self.flush_disk_type,
            "max_message_size": self.max_message_size,
            "lock_timeout": None if self.lock_timeout is None else f"{self.lock_timeout:.3f}s",
            "preallocate": self.preallocate or None,
        }
        return base.replace(**{name: value for name, value in given.items() if value is not None})

    def check_names(self, given: Iterable[str]) -> None:
        """Refuse options of a store where the path is the address of brokers, and the other way round; and settings of
        a store that has a server.

        Parameters
        ----------
        given : iterable of str
            The names of the options that the user gave.

        Raises
        ------
        ConfigError
        """
        for name in given:
            if self.path.is_cluster and name in _OF_STORES:
                raise ConfigError(
                    f"option {name}: found together with {self.path}. It is about the files or the batches of a store, "
                    f"and a broker decides about its files itself and has no batches. Leave the option out",
                    key=name,
                )

            if self.path.is_remote and not self.path.is_cluster and name in _OF_SERVERS:
                raise ConfigError(
                    f"option {name}: found together with {self.path}. Who serves that store decides about this "
                    "(messagestore serve --store-config). Leave the option out",
                    key=name,
                )

            if not self.path.is_cluster and name in _OF_BROKERS:
                raise ConfigError(
                    f"option {name}: found together with {self.path}; allowed is the address of RocketMQ's name "
                    f"servers, such as rocketmq://host:port. Give one as path, or leave the option out",
                    key=name,
                )

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises
        ------
        ConfigError
        """
        self.check_server(self.path)
        self.check_brokers(self.path)

        if self.txn_version is not None and self.txn_app_id is None:
            raise ConfigError("option txnVersion: found without txnAppId; allowed is both or neither", key="txnVersion")
        if self.txn_version_source == "spark" and self.txn_version is None:
            raise ConfigError(
                "option txnVersionSource: found spark without txnVersion. Give txnVersion, which is Spark's batch id "
                "in foreachBatch, or leave txnVersionSource out",
                key="txnVersionSource",
                value="spark",
            )

        if self.invalid_rows == "deadLetter" and self.dead_letter_topic is None:
            raise ConfigError(
                "option invalidRows: found deadLetter without deadLetterTopic. Give the topic of the dead letters",
                key="deadLetterTopic",
            )
        if self.dead_letter_topic is not None and self.invalid_rows != "deadLetter":
            raise ConfigError(
                "option deadLetterTopic: found without invalidRows=deadLetter. Give both or neither",
                key="deadLetterTopic",
            )


_OF_STORES = frozenset(
    {
        "autoCreateTopic",
        "writeQueueNums",
        "flushDiskType",
        "onNewQuery",
        "onNewTopic",
        "onReplayMismatch",
        "onVersionRegression",
        "onLostBatches",
        "lockTimeout",
        "stagingTtl",
        "storeConfig",
        "invalidRows",
        "deadLetterTopic",
        "uniqKey",
        "brokerClusterName",
        "brokerName",
        "storeHost",
        "stagingDir",
        "preallocate",
    }
)
_OF_SERVERS = frozenset(
    {
        "maxMessageSize",
        "lockTimeout",
        "stagingTtl",
        "storeConfig",
        "brokerClusterName",
        "brokerName",
        "storeHost",
        "stagingDir",
        "preallocate",
    }
)
_OF_BROKERS = frozenset({"lookupDir", "producerGroup", "onUnconfirmed"})

SINK_OPTIONS = options_of(SINK, SinkOptions)
