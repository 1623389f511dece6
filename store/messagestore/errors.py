"""Exceptions, grouped by who must act.

Every exception of the store is a `StoreError`. Its second base class is the built-in exception that fits best, so that
`except ValueError` and `except OSError` work as usual.

1. The caller must act: a setting, a message or an offset is wrong.
2. The operator must act: another process holds the store, a sync failed, or batches are missing.
3. Somebody must look at the disk: stored bytes have changed or are gone.

Every message says what was found, what is allowed, and what to do next. An `OSError` that the operating system raises
passes through unchanged, with a note that names the file.

An error of a put, whether it is raised or is in a Future, has RocketMQ's statuses as `put_status` and `append_status`,
also if the operating system raised it:

| The error | When | `put_status` | `append_status` |
|---|---|---|---|
| `MessageIllegalError` | the body, the record or the batch is too large | `MESSAGE_ILLEGAL` | `MESSAGE_SIZE_EXCEEDED` |
| `MessageIllegalError` | the properties are too large | `MESSAGE_ILLEGAL` | `PROPERTIES_SIZE_EXCEEDED` |
| `MessageIllegalError` | anything else about the message is wrong | `MESSAGE_ILLEGAL` | none |
| `MessageIllegalError` | the topic, or the broker, may not be written | `MESSAGE_ILLEGAL` | none |
| `ConfigError` | an argument has the wrong type | `MESSAGE_ILLEGAL` | none |
| `StoreFullError`, `OSError` | the next segment could not be created | `CREATE_MAPPED_FILE_FAILED` | none |
| `StoreFullError` | the queues have no room for earlier puts | `SERVICE_NOT_AVAILABLE` | none |
| `StoreFullError`, `OSError` | another write failed, and was undone | `UNKNOWN_ERROR` | `UNKNOWN_ERROR` |
| `StorePoisonedError` | a sync had failed before | `SERVICE_NOT_AVAILABLE` | none |
| `StorePoisonedError` | its sync failed; `physical_offset` is its record's place | `UNKNOWN_ERROR` | `PUT_OK` |
| `StoreClosedError` | the store was closed before, or by a fork | `SERVICE_NOT_AVAILABLE` | none |
| `StoreClosedError` | the store was closed before the sync of this put | `UNKNOWN_ERROR` | `PUT_OK` |
| `StoreLockedError` | a broker was started on the store | `SERVICE_NOT_AVAILABLE` | none |
| `CorruptionError` | the queue is damaged and cannot be rebuilt | `UNKNOWN_ERROR` | none |
"""

from __future__ import annotations

import enum
from collections.abc import Iterable


class AppendMessageStatus(enum.Enum):
    """The outcome of an append to the CommitLog (RocketMQ's AppendMessageStatus).

    A result of this store has `PUT_OK`. Errors have the others, except `END_OF_FILE` and `ROCKSDB_ERROR`, which do not
    occur: a put continues in the next segment, and there is no RocksDB.
    """

    PUT_OK = "PUT_OK"
    END_OF_FILE = "END_OF_FILE"
    MESSAGE_SIZE_EXCEEDED = "MESSAGE_SIZE_EXCEEDED"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    UNKNOWN_ERROR = "UNKNOWN_ERROR"
    ROCKSDB_ERROR = "ROCKSDB_ERROR"


class PutMessageStatus(enum.Enum):
    """The outcome of a put (RocketMQ's PutMessageStatus).

    A result of this store has `PUT_OK`, when the message is stored as durably as `flushDiskType` says, or
    `FLUSH_DISK_TIMEOUT`, when it is stored but the sync that the put waits for takes longer than `syncFlushTimeout`.
    An error has one of the statuses in the table of `messagestore.errors`. The others do not occur, because the store
    has no slave, no controller, no light queues of its own and no timer wheel. `OS_PAGE_CACHE_BUSY` does not occur,
    either: a put waits for the lock while another append holds it, however long that takes.
    """

    PUT_OK = "PUT_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    SERVICE_NOT_AVAILABLE = "SERVICE_NOT_AVAILABLE"
    CREATE_MAPPED_FILE_FAILED = "CREATE_MAPPED_FILE_FAILED"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    OS_PAGE_CACHE_BUSY = "OS_PAGE_CACHE_BUSY"
    UNKNOWN_ERROR = "UNKNOWN_ERROR"
    IN_SYNC_REPLICAS_NOT_ENOUGH = "IN_SYNC_REPLICAS_NOT_ENOUGH"
    PUT_TO_REMOTE_BROKER_FAIL = "PUT_TO_REMOTE_BROKER_FAIL"
    LMQ_CONSUME_QUEUE_NUM_EXCEEDED = "LMQ_CONSUME_QUEUE_NUM_EXCEEDED"
    WHEEL_TIMER_FLOW_CONTROL = "WHEEL_TIMER_FLOW_CONTROL"
    WHEEL_TIMER_MSG_ILLEGAL = "WHEEL_TIMER_MSG_ILLEGAL"
    WHEEL_TIMER_NOT_ENABLE = "WHEEL_TIMER_NOT_ENABLE"


class StoreError(Exception):
    """The base class of all exceptions of the store. It is never raised itself.

    Attributes
    ----------
    put_status : PutMessageStatus
        Of an error of a put: what RocketMQ's store returns for it.
    append_status : AppendMessageStatus | None
        Of an error of a put: the status of RocketMQ's append; None if nothing was to be appended.
    """

    put_status: PutMessageStatus = PutMessageStatus.UNKNOWN_ERROR
    append_status: AppendMessageStatus | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # By default Python calls the class with the message alone, which fails for our keyword arguments: an exception
        # from a worker process would not arrive.
        return _restored, (type(self), self.args, getattr(self, "errno", None)), self.__dict__


def _restored(kind: type[StoreError], args: tuple[object, ...], errno: int | None) -> StoreError:
    error = kind.__new__(kind)
    error.args = args
    if isinstance(error, OSError):
        error.errno = errno
    return error


def note_statuses(error: Exception, put_status: PutMessageStatus, append_status: AppendMessageStatus | None) -> None:
    """Give an error of a put RocketMQ's statuses, also if the operating system raised it."""
    error.put_status, error.append_status = put_status, append_status  # type: ignore[attr-defined]


# ---- the caller must act


class ConfigError(StoreError, ValueError):
    """A setting is unknown, or its value is not allowed.

    Attributes
    ----------
    key : str
        The name of the setting, as the caller spelled it.
    value : object
        The value that was given.
    """

    put_status = PutMessageStatus.MESSAGE_ILLEGAL

    def __init__(self, message: str, *, key: str, value: object = None) -> None:
        super().__init__(message)
        self.key = key
        self.value = value


class MessageIllegalError(StoreError, ValueError):
    """A message cannot be stored as it is. Neither it nor any other message of its batch was written.

    Attributes
    ----------
    field : str
        The part of the message that is wrong ("topic", "body", "properties", ...).
    size, limit : int | None
        The size that was found and the largest one allowed, in bytes; None if the fault is not a size.
    row : int | None
        The index of the message in the caller's batch, from 0; None for a single message.
    reason : str
        The error message without the row.

    Examples
    --------
    >>> from messagestore import Message, MessageIllegalError, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     try:
    ...         store.put_message(Message("no blanks, please", b""))
    ...     except MessageIllegalError as error:
    ...         print(error.field, "|", error)
    topic | topic: found 'no blanks, please'; allowed are the characters % | a-z A-Z 0-9 _ -
    """

    put_status = PutMessageStatus.MESSAGE_ILLEGAL

    def __init__(
        self, message: str, *, field: str, size: int | None = None, limit: int | None = None, row: int | None = None
    ) -> None:
        super().__init__(message if row is None else f"row {row}: {message}")
        self.reason = message
        self.field = field
        self.size = size
        self.limit = limit
        self.row = row
        if limit is not None and field == "properties":
            self.append_status = AppendMessageStatus.PROPERTIES_SIZE_EXCEEDED
        elif limit is not None and field in ("body", "record", "batch"):
            self.append_status = AppendMessageStatus.MESSAGE_SIZE_EXCEEDED


class OffsetOutOfRangeError(StoreError, IndexError):
    """A queue does not hold the requested offset, usually because retention has deleted the message.

    Attributes
    ----------
    topic : str
    queue_id : int
    queue_offset : int
        The offset that was requested.
    min, max : int
        The queue's first offset, and one past its last offset.
    """

    def __init__(self, message: str, *, topic: str, queue_id: int, queue_offset: int, min: int, max: int) -> None:
        super().__init__(message)
        self.topic = topic
        self.queue_id = queue_id
        self.queue_offset = queue_offset
        self.min = min
        self.max = max


class UnknownTopicError(StoreError, LookupError):
    """The store has no topic of this name.

    Parameters
    ----------
    topic : str
    topics : iterable of str | None
        The topics that the store has; None: the message does not name them, and speaks of no store.
    hint : str
        What to do; it is appended to the message.

    Attributes
    ----------
    topic : str
        The name that was requested.
    topics : list of str
        The topics that the store has, in alphabetical order. Readers leave out those of the store itself.
    """

    def __init__(self, topic: str, topics: Iterable[str] | None, hint: str = "") -> None:
        self.topic = topic
        self.topics = sorted(topics or ())
        more = f" and {len(self.topics) - 20} more" if len(self.topics) > 20 else ""
        named = f"Its topics are: {', '.join(self.topics[:20])}{more}" if self.topics else "It has no topics"
        found = [f"there is no topic {topic!r}"] if topics is None else [f"topic {topic!r} is not in the store", named]
        sentences = [*found, hint]
        super().__init__(". ".join(filter(None, sentences)))


class HalfMessageEndedError(StoreError, RuntimeError):
    """A half message is not open (any more), so it cannot be committed or rolled back.

    Attributes
    ----------
    message_id : str
        As the caller gave it.
    outcome : str
        "committed", "rolled back", "discarded", "deleted by retention" (with or without having been rolled back),
        "ended" if it has no UNIQ_KEY by which its end can be found, or "unknown" if the store has no such half message.
    """

    def __init__(self, message: str, *, message_id: str, outcome: str) -> None:
        super().__init__(message)
        self.message_id = message_id
        self.outcome = outcome


class StoreClosedError(StoreError, RuntimeError):
    """The store object is closed. Open the store again to use it.

    Attributes
    ----------
    physical_offset : int | None
        Of a put that was appended before: where its record is. Recovery decides whether it counts.
    """

    put_status = PutMessageStatus.SERVICE_NOT_AVAILABLE
    physical_offset: int | None = None


# ---- the operator must act


class NotAStoreError(StoreError, ValueError):
    """The path does not hold a message store, or it holds one that this project must not write to.

    Attributes
    ----------
    path : str
        The folder, or the file that does not fit.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path

    @classmethod
    def of_version(cls, path: str, found: object, allowed: int) -> NotAStoreError:
        """For a file of another format version."""
        words = f"found format version {found!r:.60}; this release reads {allowed}. Use the release that wrote it"
        return cls(f"{path}: {words}", path=path)


class StoreLockedError(StoreError, RuntimeError):
    """Another process holds the store.

    Attributes
    ----------
    path : str
        The lock file.
    holder : str
        The process that holds the lock, in words ("a RocketMQ broker, pid 4711").
    """

    put_status = PutMessageStatus.SERVICE_NOT_AVAILABLE

    def __init__(self, message: str, *, path: str, holder: str) -> None:
        super().__init__(message)
        self.path = path
        self.holder = holder


class StorePermissionError(StoreError, PermissionError):
    """The user may not use a file or folder of the store. The message names its owner and the command to run.

    Attributes
    ----------
    path : str
        The file or folder.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StoreFullError(StoreError, OSError):
    """The disk does not have enough room. Nothing of the append is in the log, and the store can still be used.

    Attributes
    ----------
    path : str
        The file or folder that was written to.
    needed, free : int
        The bytes that the append needs, and the bytes that the file system has left.
    """

    def __init__(self, message: str, *, path: str, needed: int, free: int) -> None:
        super().__init__(message)
        self.path = path
        self.needed = needed
        self.free = free


class SyncFailedError(StoreError, OSError):
    """A sync failed. What was written before it may not be on the disk, and a second sync would not report that.

    Attributes
    ----------
    path : str
        The file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StorePoisonedError(StoreError, RuntimeError):
    """The writer has stopped, because a sync failed or a file disappeared. Reopen the store: recovery checks it.

    Attributes
    ----------
    physical_offset : int | None
        Of a put: where its record was appended. Recovery decides whether it counts: look there
        (`look_message_by_offset`) after you have reopened the store, and before you put the message again.
    """

    put_status = PutMessageStatus.SERVICE_NOT_AVAILABLE
    physical_offset: int | None = None


class StoreWentBackwardsError(StoreError, RuntimeError):
    """The log no longer holds messages that this reader has already read: it was cut, restored or created anew."""


class NotRecoveredError(StoreError, RuntimeError):
    """The machine has been restarted, no writer has recovered the store yet, and it holds messages that a reader cannot
    prove to be durable. Raised only with `failOnUnproven=true`; otherwise this is a warning.
    """


class BatchConflictError(StoreError, RuntimeError):
    """A batch that the store already holds was sent again with other rows, or for another topic.

    Attributes
    ----------
    app_id : str
    version : int
        The version of the batch within its app.
    """

    def __init__(self, message: str, *, app_id: str, version: int) -> None:
        super().__init__(message)
        self.app_id = app_id
        self.version = version


class QueryConflictError(BatchConflictError):
    """A batch comes from another query than the one that wrote the earlier batches of this app id."""


class ProgressConflictError(StoreError, RuntimeError):
    """A batch was to move a consumer group that is elsewhere than where its consumer began. Nothing was appended.

    Attributes
    ----------
    group, topic : str
    queue_id : int
    offset : int
        Where the group is; -1: it has no progress in the queue.
    """

    def __init__(self, message: str, *, group: str, topic: str, queue_id: int, offset: int) -> None:
        super().__init__(message)
        self.group = group
        self.topic = topic
        self.queue_id = queue_id
        self.offset = offset


class VersionRegressionError(StoreError, RuntimeError):
    """A batch has a version below the last one of its app, and the store does not know it.

    Attributes
    ----------
    app_id : str
    version : int
        The version that was refused.
    """

    def __init__(self, message: str, *, app_id: str, version: int) -> None:
        super().__init__(message)
        self.app_id = app_id
        self.version = version


class LostBatchesError(StoreError, RuntimeError):
    """Some or all of the app's batches below this version are missing from the log.

    Attributes
    ----------
    app_id : str
    version : int
        The version of the batch that was refused.
    """

    def __init__(self, message: str, *, app_id: str, version: int) -> None:
        super().__init__(message)
        self.app_id = app_id
        self.version = version


class StoreUnavailableError(StoreError, ConnectionError):
    """The server of a store on another host gave no answer, or no answer that counts, within `retryTimeout`."""


class CommitUnknownError(StoreUnavailableError):
    """A commit got no answer. The batch may be in the log or not, so commit it again: it is recognised if it is there.

    Nothing that was staged is deleted.
    """


class AccessDeniedError(StoreError, PermissionError):
    """The server of a store refuses the token or the certificate of this client, or the token's role does not allow the
    request.

    Attributes
    ----------
    unknown : bool
        The server does not know who asks: the token is missing or wrong.
    """

    unknown = False


class BrokerError(StoreError, RuntimeError):
    """A RocketMQ broker or name server refuses a request.

    Attributes
    ----------
    broker : str
        The broker's name; empty if the request did not name it.
    address : str
    code : int
        RocketMQ's ResponseCode.
    remark : str
        The broker's words.
    """

    def __init__(self, message: str, *, broker: str, address: str, code: int, remark: str) -> None:
        super().__init__(message)
        self.broker, self.address, self.code, self.remark = broker, address, code, remark


class ProtocolError(StoreError, ValueError):
    """A message between client and server of a store is not one that the receiver knows: the versions differ, or the
    message was damaged or cut.
    """


# ---- the disk must be looked at


class CorruptionError(StoreError):
    """Stored bytes are gone or have changed. The store neither cuts them off nor skips them.

    Attributes
    ----------
    path : str
        The file.
    physical_offset : int
        The place of the damage: bytes from the log's origin, or the position within any other file.
    expected, found : str
        What should be there, and what is there instead.
    """

    def __init__(self, path: str, physical_offset: int, expected: str, found: str, *, hint: str = "") -> None:
        super().__init__(
            f"{path}: offset {physical_offset}: expected {expected}, found {found}."
            + (f" {hint}" if hint else " Run `messagestore verify` on the store, and restore this file from a copy.")
        )
        self.path = path
        self.physical_offset = physical_offset
        self.expected = expected
        self.found = found


class TornRecordError(CorruptionError):
    """A record is incomplete because of a crash. Recovery may cut it off, but only at the end of the log."""


class ChecksumError(CorruptionError):
    """A CRC does not match the bytes. Recovery never cuts such a record off silently."""


class MagicError(CorruptionError):
    """No record begins at a place where one must begin."""
