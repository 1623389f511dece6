"""The source's options: a table of what users can give, and the class that holds what they gave."""

from __future__ import annotations

from dataclasses import dataclass

from messagestore import ConfigError, StoreConfig
from messagestore.spi import group_fault
from pyspark_messagestore.kinds import (
    BOOLEAN,
    BROKER_NAME,
    DURATION,
    MOST,
    PATH,
    SIZE,
    SOURCE,
    Kind,
    Option,
    choice,
    whole,
)
from pyspark_messagestore.positions import (
    ENDING_OFFSETS,
    LATEST,
    OFFSETS_BY_TIMESTAMP,
    STARTING_OFFSETS,
    TIMESTAMP,
    Asked,
    ByQueue,
    Committed,
    Moment,
    Position,
)
from pyspark_messagestore.subscription import ASSIGNED, PATTERN, TOPICS, Assigned, Subscription


def _group(text: str) -> str:
    if group_fault(text):
        raise ValueError
    return text


_GROUP = Kind(_group, "a consumer group: letters, digits, and %|-_ , at most 255, not beginning with CID_RMQ_SYS_")

ROCKETMQ, KAFKA = "rocketmq", "kafka"
"""The row formats."""
MESSAGES = "messages"
DEFAULT_TRIGGER_DELAY_S = 15 * 60
"""The view that most reads have."""


def _tags(text: str) -> tuple[str, ...] | None:
    """RocketMQ's subscription expression of tags; None for all messages."""
    if text.strip() == "*":
        return None
    found = tuple(dict.fromkeys(part.strip() for part in text.split("||") if part.strip()))
    if not found or "*" in found:
        raise ValueError
    return found


def _keys(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(text.split()))
    if not found:
        raise ValueError
    return found


_KEYS = Kind(_keys, "keys with blanks between them; no key of a message has a blank")
_TAGS = Kind(_tags, "* for all messages, or tags with || between them, such as UA || AA")

SOURCE_OPTIONS: tuple[Option, ...] = (
    Option(SOURCE, "path", PATH, None, "The store's root folder.", ("storePathRootDir",), "required"),
    Option(
        SOURCE,
        "subscribe",
        TOPICS,
        None,
        "The topics to read, with commas between them. Exactly one of `subscribe`, `subscribePattern` and `assign` is "
        "required.",
        ("topic",),
    ),
    Option(
        SOURCE,
        "subscribePattern",
        PATTERN,
        None,
        "A regular expression (Python's), which is compared with whole names of topics. A topic that is created later "
        "is read from its first message. Retry, dead letter and system topics are read only if `subscribe` or `assign` "
        "names them.",
    ),
    Option(
        SOURCE,
        "assign",
        ASSIGNED,
        None,
        'The queues to read: JSON topic -> queue ids, such as `{"flights": [0, 1]}`.',
    ),
    Option(
        SOURCE,
        "startingOffsets",
        STARTING_OFFSETS,
        None,
        "Where a new query begins: `earliest`, `latest`, or JSON topic -> queue -> offset (-2 earliest, -1 latest; "
        '`"*"`: the queues that are not listed). `committed` begins where the `consumerGroup` has read to; '
        "`committed:earliest` and `committed:latest` say where to begin in a queue that the group has not read. A "
        "restarted query continues from its checkpoint, and warns once if this option was changed.",
        shown="`latest` (stream), `earliest` (batch)",
    ),
    Option(
        SOURCE,
        "startingTimestamp",
        TIMESTAMP,
        None,
        "A new query begins at the first message that was stored at this time or later. A time is written as "
        "milliseconds since 1970, as ISO 8601 with a time zone, or as a time ago (`-10m`). It takes precedence over "
        "`startingOffsetsByTimestamp`, which takes precedence over `startingOffsets`.",
    ),
    Option(
        SOURCE,
        "startingOffsetsByTimestamp",
        OFFSETS_BY_TIMESTAMP,
        None,
        "The same with a time for each queue: JSON topic -> queue -> time.",
    ),
    Option(
        SOURCE,
        "startingOffsetsByTimestampStrategy",
        choice("latest", "earliest", "error"),
        "latest",
        "Where to begin in a queue without a message at or after the starting time.",
    ),
    Option(
        SOURCE,
        "endingOffsets",
        ENDING_OFFSETS,
        None,
        "Where the read ends: `latest`, or JSON topic -> queue -> offset, which is the offset after the last message "
        "(-1 latest). A stream reads no further; with the trigger AvailableNow the query ends there. The end is fixed "
        "when the stream reads its first messages, and stays the same after a restart with the same options.",
        shown="`latest` (batch)",
    ),
    Option(
        SOURCE,
        "endingTimestamp",
        TIMESTAMP,
        None,
        "The read ends before the first message that was stored at this time or later. It takes precedence over "
        "`endingOffsetsByTimestamp`, which takes precedence over `endingOffsets`.",
    ),
    Option(
        SOURCE,
        "endingOffsetsByTimestamp",
        OFFSETS_BY_TIMESTAMP,
        None,
        "The same with a time for each queue: JSON topic -> queue -> time.",
    ),
    Option(
        SOURCE,
        "maxOffsetsPerTrigger",
        whole(1, MOST),
        None,
        "The largest number of messages in a micro-batch. The queues share it in proportion to what they hold. "
        "Streams only.",
    ),
    Option(
        SOURCE,
        "maxBytesPerTrigger",
        SIZE,
        None,
        "The largest number of bytes of records in a micro-batch; a larger single message is read alone. It may be "
        "given together with `maxOffsetsPerTrigger`. Streams only.",
    ),
    Option(
        SOURCE,
        "minOffsetsPerTrigger",
        whole(1, MOST),
        None,
        "A micro-batch begins when there are this many messages, or when one has waited for `maxTriggerDelay`. The "
        "trigger AvailableNow ignores it. Streams only.",
    ),
    Option(
        SOURCE,
        "maxTriggerDelay",
        DURATION,
        f"{DEFAULT_TRIGGER_DELAY_S // 60}m",
        "The longest time that messages wait for `minOffsetsPerTrigger`. After a restart the time counts anew. Streams "
        "only.",
    ),
    Option(
        SOURCE,
        "minPartitions",
        whole(1, 100_000),
        None,
        "The smallest number of Spark partitions; a read of fewer rows has fewer.",
    ),
    Option(
        SOURCE,
        "maxRecordsPerPartition",
        whole(1, MOST),
        None,
        "The largest number of messages in a Spark partition.",
        shown="about 262 144",
    ),
    Option(
        SOURCE,
        "maxBytesPerPartition",
        SIZE,
        None,
        "The largest number of bytes of records in a Spark partition; a larger single message has one of its own.",
        shown="about `128m`",
    ),
    Option(
        SOURCE,
        "failOnDataLoss",
        BOOLEAN,
        "true",
        "What to do if messages are gone (retention has deleted them, or the log was cut). `true` raises an error. "
        "`false` skips them and logs how many they are.",
    ),
    Option(
        SOURCE,
        "failOnUnproven",
        BOOLEAN,
        "false",
        "After a reboot, and before a writer has opened the store, a reader shows only what is proven to be on the "
        "disk. If the store holds more, `true` raises an error, and `false` logs a warning.",
    ),
    Option(
        SOURCE,
        "readUpTo",
        choice("visible", "flushed"),
        "visible",
        "`flushed`: only messages that survive a power cut. SYNC_FLUSH messages are on the disk when they become "
        "visible. ASYNC_FLUSH messages are read when they have been synced: after half a second under load "
        "(`flushIntervalCommitLog`), otherwise after 10 s (`flushCommitLogThoroughInterval`), or when a writer of "
        "Spark detaches (`attachTimeout`, 20 s). A store that a Java broker wrote last is refused, since its files do "
        "not say what has been synced.",
    ),
    Option(
        SOURCE,
        "onMissingTopic",
        choice("fail", "wait"),
        "fail",
        "What to do if a topic, or the whole store, does not exist. `wait`: the query begins before them, and reads "
        "them from their first message as soon as they are there. Streams only.",
    ),
    Option(
        SOURCE,
        "consumerGroup",
        _GROUP,
        None,
        "After each micro-batch, the query publishes how far it has read as this group's offsets in RocketMQ's "
        "`config/consumerOffset.json` (`messagestore groups` shows them). Give each query a group of its own. The "
        "offsets are never used for recovery. If they cannot be published (a Java broker holds the store and keeps "
        "the file itself; the folder is read-only; the disk is full), the query logs a warning, continues, and tries "
        "again later. Streams only.",
        ("group",),
    ),
    Option(
        SOURCE,
        "tags",
        _TAGS,
        "*",
        "Only messages with one of these tags: `UA || AA`; `*` for all messages. Other messages are left out by the "
        "hashes in the queues, mostly without being read. Limits count all messages.",
        ("subExpression",),
    ),
    Option(
        SOURCE,
        "keys",
        _KEYS,
        None,
        "Only messages with one of these keys, or with one of them as unique key; blanks between them. The index finds "
        "them. All are found, however many there are. Batch reads only.",
    ),
    Option(
        SOURCE,
        "filterPushdown",
        BOOLEAN,
        "false",
        "`true`: filters on topic, queue, offset, store time and tags leave out what they can before it is read. "
        "Spark's setting `spark.sql.python.filterPushdown.enabled` must be true, too. After a clock was set back by "
        "more than an hour, a filter on the store time may miss messages. Batch reads only.",
    ),
    Option(
        SOURCE,
        "brokerName",
        BROKER_NAME,
        None,
        "The value of the column `brokerName`. Without this option, it is the name that the store keeps (the sink's "
        "option `brokerName`, or this key of `storeConfig`), and null if the store has none. If each store of a "
        "cluster has its own name, a union of their frames says which store a message is from. Positions in JSON may "
        "have the form topic -> broker -> queue, with one broker, whatever its name.",
        shown="the store's name if it has one",
    ),
    Option(
        SOURCE,
        "rowFormat",
        choice(ROCKETMQ, KAFKA),
        ROCKETMQ,
        "`kafka`: the columns of Spark's source for Kafka. `key` is the first key, `value` the body, `partition` the "
        "queue, and `timestamp` the store time.",
    ),
    Option(
        SOURCE,
        "includeHeaders",
        BOOLEAN,
        "false",
        "`true`: with `rowFormat=kafka`, also a column `headers` with the user's properties.",
    ),
    Option(
        SOURCE,
        "badRecords",
        choice("fail", "skip", "keep"),
        "fail",
        "What to do with a damaged record. `skip` leaves it out, and a warning counts how many. `keep` gives a row "
        "that has only topic, queue and offset, and says what is wrong in a column `_error`.",
    ),
    Option(
        SOURCE,
        "verifyBodyCrc",
        BOOLEAN,
        "true",
        "`false`: the CRCs of bodies are not checked.",
    ),
    Option(
        SOURCE,
        "decompress",
        BOOLEAN,
        "true",
        "Bodies that a RocketMQ client compressed (zlib, lz4, zstd) are decompressed, up to 64 MiB each. `false`: "
        "bodies as they are stored.",
    ),
    Option(
        SOURCE,
        "view",
        choice(MESSAGES, "topics", "queues", "segments", "groups", "batches"),
        MESSAGES,
        "What to read instead of messages, as a frame: the topics with their settings, how far the queues reach, the "
        "files of the log, how far consumer groups have read, or the batches that the journal knows. It takes no "
        "topics and no positions. Batch reads only.",
        attribute="contents",
    ),
)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The source's options, typed. Fields and options have the same order."""

    path: str
    subscribe: tuple[str, ...] | None
    subscribe_pattern: str | None
    assign: Assigned | None
    starting_offsets: Position | ByQueue | None
    starting_timestamp: Moment | None
    starting_offsets_by_timestamp: ByQueue | None
    starting_offsets_by_timestamp_strategy: str
    ending_offsets: Position | ByQueue | None
    ending_timestamp: Moment | None
    ending_offsets_by_timestamp: ByQueue | None
    max_offsets_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay: float
    min_partitions: int | None
    max_records_per_partition: int | None
    max_bytes_per_partition: int | None
    fail_on_data_loss: bool
    fail_on_unproven: bool
    read_up_to: str
    on_missing_topic: str
    consumer_group: str | None
    tags: tuple[str, ...] | None
    keys: tuple[str, ...] | None
    filter_pushdown: bool
    broker_name: str | None
    row_format: str
    include_headers: bool
    bad_records: str
    verify_body_crc: bool
    decompress: bool
    contents: str

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
        given = [
            name
            for name, value in (
                ("subscribe", self.subscribe),
                ("subscribePattern", self.subscribe_pattern),
                ("assign", self.assign),
            )
            if value is not None
        ]
        if self.contents != MESSAGES:
            self._check_view(given)
            return
        if not given:
            raise ConfigError(
                "option subscribe (or topic): is missing. Give exactly one of subscribe, subscribePattern and assign, "
                'as in .option("subscribe", "flights")',
                key="subscribe",
            )
        if len(given) > 1:
            raise ConfigError(
                f"option {given[1]}: found beside {given[0]}. Give exactly one of subscribe, subscribePattern and "
                f"assign",
                key=given[1],
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
        if isinstance(self.starting_offsets, Committed) and self.consumer_group is None:
            raise ConfigError(
                "option startingOffsets: found committed without consumerGroup. Give the group whose offsets to begin "
                "with",
                key="startingOffsets",
            )

    def _check_view(self, given: list[str]) -> None:
        for asked in (self.starting, self.ending):
            given += [asked.option] if asked is not None else []
        given += [name for name, value in (("keys", self.keys), ("tags", self.tags)) if value is not None]
        if given:
            raise ConfigError(
                f"option {given[0]}: is for messages, but this reads view={self.contents}; leave it out", key=given[0]
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
        if self.filter_pushdown:
            raise ConfigError(
                "option filterPushdown: is for batch reads, but this is a stream; leave it out",
                key="filterPushdown",
                value=True,
            )
        if self.keys is not None:
            raise ConfigError(
                "option keys: is for batch reads, but this is a stream. Filter its rows instead, as in "
                ".where(\"array_contains(keys, 'N14228')\")",
                key="keys",
                value=" ".join(self.keys),
            )

    def check_batch(self) -> None:
        """Refuse options that a batch read cannot have.

        Raises
        ------
        ConfigError
        """
        for name, value in (
            ("maxOffsetsPerTrigger", self.max_offsets_per_trigger),
            ("maxBytesPerTrigger", self.max_bytes_per_trigger),
            ("minOffsetsPerTrigger", self.min_offsets_per_trigger),
            ("maxTriggerDelay", None if self.max_trigger_delay == DEFAULT_TRIGGER_DELAY_S else self.max_trigger_delay),
            ("onMissingTopic", None if self.on_missing_topic == "fail" else self.on_missing_topic),
            ("consumerGroup", self.consumer_group),
        ):
            if value is not None:
                raise ConfigError(
                    f"option {name}: is for streams, but this is a batch read. Leave it out", key=name, value=value
                )
        starting = self.starting
        if starting is not None and starting.is_offsets and starting.has_latest:
            found = "latest" if starting.wanted == LATEST else "-1 (latest)"
            raise ConfigError(
                f"option startingOffsets: found {found}, but a batch read that begins at the latest message reads "
                f"nothing. Leave it out, or give earliest, offsets, or a startingTimestamp",
                key="startingOffsets",
                value=found,
            )


def _first_of(*given: tuple[str, Position | ByQueue | None]) -> Asked | None:
    return next((Asked(name, wanted) for name, wanted in given if wanted is not None), None)
