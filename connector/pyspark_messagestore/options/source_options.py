"""The source's options: one line each, which says what users can give; the class holds what they gave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from messagestore import ConfigError, StoreConfig
from messagestore.spi import Location, group_fault
from pyspark_messagestore.options.option import BATCHES, SOURCE, STREAMS, Option, option, options_of
from pyspark_messagestore.options.positions import (
    ENDING_OFFSETS,
    ENDING_OFFSETS_BY_TIMESTAMP,
    ENDING_TIMESTAMP,
    LATEST,
    STARTING_OFFSETS,
    STARTING_OFFSETS_BY_TIMESTAMP,
    STARTING_TIMESTAMP,
    Asked,
    ByQueue,
    Committed,
    Moment,
    Position,
)
from pyspark_messagestore.options.server_options import BrokerOptions
from pyspark_messagestore.options.subscription import ASSIGNED, PATTERN, TOPICS, Assigned, Subscription
from pyspark_messagestore.options.values import (
    BOOLEAN,
    BROKER_NAME,
    KAFKA,
    LOCATION,
    MOST,
    ROCKETMQ,
    SIZE,
    SPARK_DURATION,
    Kind,
    choice,
    whole,
)


def _group(text: str) -> str:
    if group_fault(text):
        raise ValueError
    return text


_GROUP = Kind(_group, "a consumer group: letters, digits, and %|-_ , at most 255, not beginning with CID_RMQ_SYS_")

MESSAGES = "messages"
"""The value of option view with which a query reads messages; the others show what the store contains besides them."""


def _tags(text: str) -> tuple[str, ...] | None:
    """RocketMQ's subscription expression of tags; None for all messages."""
    if text.strip() == "*":
        return None
    tags = tuple(dict.fromkeys(part.strip() for part in text.split("||") if part.strip()))
    if not tags or "*" in tags:
        raise ValueError
    return tags


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(dict.fromkeys(text.split()))
    if not keys:
        raise ValueError
    return keys


_KEYS = Kind(_keys, "keys with blanks between them; no key of a message has a blank")
_TAGS = Kind(_tags, "* for all messages, or tags with || between them, such as UA || AA")


@dataclass(frozen=True, slots=True)
class SourceOptions(BrokerOptions):
    """The source's options, typed; durations in seconds. Each line is an option."""

    path: Location = option(
        "path",
        LOCATION,
        None,
        "The store's root folder, or the URL of its server (`messagestore serve`), or "
        "`rocketmq://ns1:9876;ns2:9876` with the name servers of RocketMQ's brokers, or "
        "`rocketmq+http://host:8080/rocketmq/nsaddr` with a server that lists them.",
        required=True,
        aliases=("storePathRootDir",),
    )
    subscribe: tuple[str, ...] | None = option(
        "subscribe",
        TOPICS,
        None,
        "The topics to read, with commas between them. Exactly one of `subscribe`, `subscribePattern` and `assign` is "
        "required.",
        aliases=("topic",),
    )
    subscribe_pattern: str | None = option(
        "subscribePattern",
        PATTERN,
        None,
        "A regular expression (Python's), which is compared with whole names of topics; it need not match any "
        "yet. A topic that is created later is read from its first message. Retry, dead letter and system topics "
        "are read only if `subscribe` or `assign` names them.",
    )
    assign: Assigned | None = option(
        "assign",
        ASSIGNED,
        None,
        'The queues to read: JSON topic -> queue ids, such as `{"flights": [0, 1]}`. A queue that does not exist '
        "is read when it comes.",
    )
    starting_offsets: Position | ByQueue | None = option(
        "startingOffsets",
        STARTING_OFFSETS,
        None,
        "Where a new query begins: `earliest`, `latest`, or JSON topic -> queue -> offset (-2 earliest, -1 latest; "
        '`"*"`: the queues that are not listed). `committed` begins where the `consumerGroup` has read to; '
        "`committed:earliest` and `committed:latest` say where to begin in a queue that the group has not read. A "
        "restarted query continues from its checkpoint, and warns once if this option was changed.",
        shown="`latest` (stream), `earliest` (batch)",
    )
    starting_timestamp: int | Moment | None = option(
        "startingTimestamp",
        STARTING_TIMESTAMP,
        None,
        "A new query begins at the first message that was stored at this time or later. A time is written as "
        "milliseconds since 1970, as ISO 8601 with a time zone, or as a time ago (`-10m`); `-1` is the latest "
        "message, and `-2` the earliest, as with Kafka. It takes precedence over `startingOffsetsByTimestamp`, "
        "which takes precedence over `startingOffsets`.",
    )
    starting_offsets_by_timestamp: ByQueue | None = option(
        "startingOffsetsByTimestamp",
        STARTING_OFFSETS_BY_TIMESTAMP,
        None,
        "The same with a time for each queue: JSON topic -> queue -> time.",
    )
    starting_offsets_by_timestamp_strategy: str = option(
        "startingOffsetsByTimestampStrategy",
        choice("latest", "earliest", "error"),
        "latest",
        "Where to begin in a queue without a message at or after the starting time.",
    )
    ending_offsets: Position | ByQueue | None = option(
        "endingOffsets",
        ENDING_OFFSETS,
        None,
        "Where the read ends: `latest`, or JSON topic -> queue -> offset, which is the offset after the last message "
        "(-1 latest). A stream reads no further; with the trigger AvailableNow the query ends there. The end is fixed "
        "when the stream reads its first messages, and stays the same after a restart with the same options. A queue "
        "that has its first message later, and is not listed, is not read.",
        shown="`latest` (batch)",
    )
    ending_timestamp: int | Moment | None = option(
        "endingTimestamp",
        ENDING_TIMESTAMP,
        None,
        "The read ends before the first message that was stored at this time or later. It takes precedence over "
        "`endingOffsetsByTimestamp`, which takes precedence over `endingOffsets`.",
    )
    ending_offsets_by_timestamp: ByQueue | None = option(
        "endingOffsetsByTimestamp",
        ENDING_OFFSETS_BY_TIMESTAMP,
        None,
        "The same with a time for each queue: JSON topic -> queue -> time.",
    )
    max_offsets_per_trigger: int | None = option(
        "maxOffsetsPerTrigger",
        whole(1, MOST),
        None,
        "The largest number of messages in a micro-batch. The queues share it in proportion to what they hold.",
        only=STREAMS,
    )
    max_bytes_per_trigger: int | None = option(
        "maxBytesPerTrigger",
        SIZE,
        None,
        "The largest number of bytes of records in a micro-batch; a larger single message is read alone. It may be "
        "given together with `maxOffsetsPerTrigger`.",
        only=STREAMS,
    )
    min_offsets_per_trigger: int | None = option(
        "minOffsetsPerTrigger",
        whole(1, MOST),
        None,
        "A micro-batch begins when there are this many messages, or when one has waited for `maxTriggerDelay`. What is "
        "there when the query is started, or started again, is read at once, as by Kafka's connector. The trigger "
        "AvailableNow ignores the option.",
        only=STREAMS,
    )
    max_trigger_delay: float = option(
        "maxTriggerDelay",
        SPARK_DURATION,
        "15m",
        "The longest time that messages wait for `minOffsetsPerTrigger`; a number without a unit is in "
        "milliseconds, as in Kafka's connector.",
        only=STREAMS,
    )
    min_partitions: int | None = option(
        "minPartitions",
        whole(1, 100_000),
        None,
        "The smallest number of Spark partitions; a read of fewer rows has fewer.",
    )
    max_records_per_partition: int | None = option(
        "maxRecordsPerPartition",
        whole(1, MOST),
        None,
        "The largest number of messages in a Spark partition.",
        shown="about 262 144",
    )
    max_bytes_per_partition: int | None = option(
        "maxBytesPerPartition",
        SIZE,
        None,
        "The largest number of bytes of records in a Spark partition; a larger single message has one of its own.",
        shown="about `128m`",
    )
    fail_on_data_loss: bool = option(
        "failOnDataLoss",
        BOOLEAN,
        "true",
        "What to do if messages are gone (retention has deleted them, or the log was cut), or if a topic or queue that "
        "the query has read before is no longer named. `true` raises an error. `false` skips them and logs how many "
        "they are.",
    )
    fail_on_unproven: bool = option(
        "failOnUnproven",
        BOOLEAN,
        "false",
        "After a reboot, and before a writer has opened the store, a reader shows only what is proven to be on the "
        "disk. If the store holds more, `true` raises an error, and `false` logs a warning.",
    )
    read_up_to: str = option(
        "readUpTo",
        choice("visible", "flushed"),
        "visible",
        "`flushed`: only messages that survive a power cut. SYNC_FLUSH messages are on the disk when they become "
        "visible. ASYNC_FLUSH messages are read when they have been synced: after half a second under load "
        "(`flushIntervalCommitLog`), otherwise after 10 s (`flushCommitLogThoroughInterval`), or when a writer of "
        "Spark detaches (`attachTimeout`, 20 s). A store that a Java broker wrote last is refused, since its files do "
        "not say what has been synced.",
    )
    on_missing_topic: str = option(
        "onMissingTopic",
        choice("fail", "wait"),
        "fail",
        "What to do if a topic, or the whole store, does not exist. `wait`: the query begins before them, and reads "
        "them from their first message as soon as they are there.",
        only=STREAMS,
    )
    consumer_group: str | None = option(
        "consumerGroup",
        _GROUP,
        None,
        "After each micro-batch, the query publishes how far it has read as this group's offsets in RocketMQ's "
        "`config/consumerOffset.json` (`messagestore groups` shows them). Give each query a group of its own. The "
        "offsets are never used for recovery. With rocketmq:// as path, the brokers are told, and pulls name the "
        "group. A broker that holds the store keeps this file in memory, so it is told, too, where the newest message "
        "that was read says that it listens (with `MESSAGESTORE_CREDENTIALS_FILE`, if it checks permissions). If they "
        "cannot be published (that broker does not answer; the folder is read-only; the disk is full), the query logs "
        "a warning, continues, and tries again later.",
        aliases=("group",),
        only=STREAMS,
    )
    read_from: str = option(
        "readFrom",
        choice("master", "slave"),
        "master",
        "With rocketmq:// as path: which of a broker's replicas is read. With `slave`, the master is read only if no "
        "slave answers, and messages come when the slave has them. With `master`, a slave is read while the master "
        "does not answer.",
    )
    tags: tuple[str, ...] | None = option(
        "tags",
        _TAGS,
        "*",
        "Only messages with one of these tags: `UA || AA`; `*` for all messages. Other messages are left out by the "
        "hashes in the queues, mostly without being read. Limits count all messages.",
        aliases=("subExpression",),
    )
    keys: tuple[str, ...] | None = option(
        "keys",
        _KEYS,
        None,
        "Only messages with one of these keys, or with one of them as unique key; blanks between them. The index finds "
        "them. All are found, however many there are.",
        only=BATCHES,
    )
    filter_pushdown: bool = option(
        "filterPushdown",
        BOOLEAN,
        "false",
        "`true`: filters on topic, queue, offset, store time and tags leave out what they can before it is read. "
        "Spark's setting `spark.sql.python.filterPushdown.enabled` must be true, too. After a clock was set back by "
        "more than an hour, a filter on the store time may miss messages.",
        only=BATCHES,
    )
    broker_name: str | None = option(
        "brokerName",
        BROKER_NAME,
        None,
        "The value of the column `brokerName`. Without this option, it is the name that the store keeps (the sink's "
        "option `brokerName`, or this key of `storeConfig`), and null if the store has none. If each store of a "
        "cluster has its own name, a union of their frames says which store a message is from. Positions in JSON may "
        "have the form topic -> broker -> queue, with one broker, whatever its name.",
        shown="the store's name if it has one",
    )
    row_format: str = option(
        "rowFormat",
        choice(ROCKETMQ, KAFKA),
        ROCKETMQ,
        "`kafka`: the columns of Spark's source for Kafka. `key` is the first key, `value` the body, `partition` the "
        "queue, and `timestamp` the store time.",
    )
    include_headers: bool = option(
        "includeHeaders",
        BOOLEAN,
        "false",
        "`true`: with `rowFormat=kafka`, also a column `headers` with the user's properties.",
    )
    bad_records: str = option(
        "badRecords",
        choice("fail", "skip", "keep"),
        "fail",
        "What to do with a damaged record. `skip` leaves it out, and a warning counts how many. `keep` gives a row "
        "that has only topic, queue and offset, and says what is wrong in a column `_error`.",
    )
    verify_body_crc: bool = option("verifyBodyCrc", BOOLEAN, "true", "`false`: the CRCs of bodies are not checked.")
    decompress: bool = option(
        "decompress",
        BOOLEAN,
        "true",
        "Bodies that a RocketMQ client compressed (zlib, lz4, zstd) are decompressed, up to 64 MiB each. `false`: "
        "bodies as they are stored, and a column `sysFlag`, whose lowest bit says which of them are compressed. The "
        "sink refuses such rows, since nobody could read them, as long as they have this column. Not with "
        "`rowFormat=kafka`, which has no such column.",
    )
    contents: str = option(
        "view",
        choice(MESSAGES, "topics", "queues", "segments", "groups", "batches"),
        MESSAGES,
        "What to read instead of messages, as a frame: the topics with their settings, how far the queues reach, the "
        "files of the log, how far consumer groups have read, or the batches that the journal knows. It takes no "
        "topics and no positions.",
        only=BATCHES,
    )

    @property
    def location(self) -> Location:
        """Where the store is, with how its server is reached."""
        located = self.located(self.path)
        if located.is_cluster:
            located = located.reached_by(read_from=self.read_from, group=self.consumer_group or "")
        return located

    def config(self) -> StoreConfig:
        """The settings with which the store is read."""
        return StoreConfig(fail_on_unproven=self.fail_on_unproven, read_up_to=self.read_up_to)

    @property
    def subscription(self) -> Subscription:
        """Which queues are read."""
        return Subscription(self.subscribe or (), self.subscribe_pattern, self.assign)

    @property
    def starting(self) -> Asked | None:
        """Where a new query begins: the option that takes precedence, as in Kafka's connector."""
        return _first_of(
            ("startingTimestamp", self.starting_timestamp),
            ("startingOffsetsByTimestamp", self.starting_offsets_by_timestamp),
            ("startingOffsets", self.starting_offsets),
        )

    @property
    def ending(self) -> Asked | None:
        """Where the read ends: the option that takes precedence. None: what is there, or for a stream, never."""
        return _first_of(
            ("endingTimestamp", self.ending_timestamp),
            ("endingOffsetsByTimestamp", self.ending_offsets_by_timestamp),
            ("endingOffsets", self.ending_offsets),
        )

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises
        ------
        ConfigError
        """
        self.check_server(self.path)
        self.check_brokers(self.path)
        self._check_cluster()
        names = [
            name
            for name, value in (
                ("subscribe", self.subscribe),
                ("subscribePattern", self.subscribe_pattern),
                ("assign", self.assign),
            )
            if value is not None
        ]

        if self.contents != MESSAGES:
            self._check_view(names)
            return

        if not names:
            raise ConfigError(
                "option subscribe (or topic): is missing. Give exactly one of subscribe, subscribePattern and assign, "
                'as in .option("subscribe", "flights")',
                key="subscribe",
            )
        if len(names) > 1:
            raise ConfigError(
                f"option {names[1]}: found beside {names[0]}. Give exactly one of subscribe, subscribePattern and "
                f"assign",
                key=names[1],
            )

        least, most = self.min_offsets_per_trigger, self.max_offsets_per_trigger
        if least is not None and most is not None and least > most:
            raise ConfigError(
                f"option minOffsetsPerTrigger: found {least}, which is more than maxOffsetsPerTrigger, {most}. Give "
                f"at most as many",
                key="minOffsetsPerTrigger",
                value=least,
            )

        if self.include_headers and self.row_format != KAFKA:
            raise ConfigError(
                "option includeHeaders: is for rowFormat=kafka; the column properties has what headers are in Kafka",
                key="includeHeaders",
                value=True,
            )
        if not self.decompress and self.row_format == KAFKA:
            raise ConfigError(
                "option decompress: found false with rowFormat=kafka, in which no column says which bodies are "
                "compressed. Leave one of the two out",
                key="decompress",
                value=False,
            )

        if isinstance(self.starting_offsets, Committed) and self.consumer_group is None:
            raise ConfigError(
                "option startingOffsets: found committed without consumerGroup. Give the group whose offsets to begin "
                "with",
                key="startingOffsets",
            )

    def _check_cluster(self) -> None:
        """Refuse what brokers cannot be asked for."""
        path = self.path
        if not path.is_cluster:
            if self.read_from != "master":
                raise ConfigError(
                    f"option readFrom: found together with {path}; it is for rocketmq:// paths. Leave it out",
                    key="readFrom",
                    value=self.read_from,
                )
            return

        of_files = (
            ("view", None if self.contents == MESSAGES else self.contents),
            ("keys", self.keys),
            ("failOnUnproven", self.fail_on_unproven or None),
            ("readUpTo", None if self.read_up_to == "visible" else self.read_up_to),
        )
        for name, value in of_files:
            if value is not None:
                raise ConfigError(
                    f"option {name}: found together with {path}; it needs the files of a store. Leave it out",
                    key=name,
                    value=value,
                )

        by_queue = [name for name, value in (("assign", self.assign),) if value is not None]
        positions = [asked for asked in (self.starting, self.ending) if asked is not None]
        by_queue += [asked.option for asked in positions if isinstance(asked.wanted, dict)]
        if by_queue and not path.broker:
            raise ConfigError(
                f"option {by_queue[0]}: found positions by queue together with {path}, whose brokers have queues with "
                f"the same ids. Read one broker, as in {path.of_broker('broker-a')}, or give one position for all "
                f"queues",
                key=by_queue[0],
            )

    def _check_view(self, names: list[str]) -> None:
        for asked in (self.starting, self.ending):
            names += [asked.option] if asked is not None else []
        names += [name for name, value in (("keys", self.keys), ("tags", self.tags)) if value is not None]
        if names:
            raise ConfigError(
                f"option {names[0]}: is for messages, but this reads view={self.contents}; leave it out", key=names[0]
            )

    def check_stream(self) -> None:
        """Refuse options that a stream cannot have.

        Raises
        ------
        ConfigError
        """
        if self.contents != MESSAGES:
            raise ConfigError(
                f"option view: found {self.contents}, but this is a stream; a stream reads messages",
                key="view",
                value=self.contents,
            )

        if self.keys is not None:
            raise ConfigError(
                "option keys: is for batch reads, but this is a stream. Filter its rows instead, as in "
                ".where(\"array_contains(keys, 'N14228')\")",
                key="keys",
                value=" ".join(self.keys),
            )

        for refused, value in self._only_for(BATCHES):
            raise ConfigError(
                f"option {refused.name}: is for batch reads, but this is a stream; leave it out",
                key=refused.name,
                value=value,
            )

    def check_batch(self) -> None:
        """Refuse options that a batch read cannot have.

        Raises
        ------
        ConfigError
        """
        for refused, value in self._only_for(STREAMS):
            raise ConfigError(
                f"option {refused.name}: is for streams, but this is a batch read. Leave it out",
                key=refused.name,
                value=value,
            )

        starting = self.starting
        if starting is not None and starting.is_offsets and starting.has_latest:
            words = "latest" if starting.wanted == LATEST else "-1 (latest)"
            raise ConfigError(
                f"option startingOffsets: found {words}, but a batch read that begins at the latest message reads "
                f"nothing. Leave it out, or give earliest, offsets, or a startingTimestamp",
                key="startingOffsets",
                value=words,
            )

    def _only_for(self, reads: str) -> Iterator[tuple[Option, Any]]:
        """The options with their values that were given, and that only such reads have."""
        for row in SOURCE_OPTIONS:
            value = getattr(self, row.field)
            if row.only == reads and value != row.parsed_default:
                yield row, value


SOURCE_OPTIONS = options_of(SOURCE, SourceOptions)


def _first_of(*named_positions: tuple[str, Position | ByQueue | None]) -> Asked | None:
    return next((Asked(name, wanted) for name, wanted in named_positions if wanted is not None), None)
