"""Which error tells whom to act?

Every error of the store is a `StoreError`; the second base says what kind of Python error it is. The first group is for
the caller (a bad setting, message or offset), the second for the operator (who holds the store, what to run), the third
for whoever looks after the disk (bytes that are not what they were). An `OSError` of the operating system passes
through with a note that names the file.

Every message says what was found, what is allowed, and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable


class StoreError(Exception):
    """Root of the store's errors; never raised itself."""

    def __reduce__(self) -> tuple[object, ...]:
        # Python's own way calls the class with the message alone: an error from a worker process would not arrive.
        return _restored, (type(self), self.args, getattr(self, "errno", None)), self.__dict__


def _restored(kind: type[StoreError], args: tuple[object, ...], errno: int | None) -> StoreError:
    error = kind.__new__(kind)
    error.args = args
    if isinstance(error, OSError):
        error.errno = errno
    return error


# ---- the caller must act


class ConfigError(StoreError, ValueError):
    """A setting is unknown or has a value that is not allowed.

    Attributes
    ----------
    key : str
        The setting, as the user wrote it.
    value : object
        What was given.
    """

    def __init__(self, message: str, *, key: str, value: object = None) -> None:
        super().__init__(message)
        self.key = key
        self.value = value


class MessageIllegalError(StoreError, ValueError):
    """A message cannot be stored as it is; nothing of its batch was written.

    Attributes
    ----------
    field : str
        Which part of the message ("topic", "body", "properties", ...).
    size, limit : int | None
        What was found and what is allowed, in bytes, where the fault is a size.
    row : int | None
        Index of the row in the batch the caller gave, from 0.
    """

    def __init__(
        self, message: str, *, field: str, size: int | None = None, limit: int | None = None, row: int | None = None
    ) -> None:
        super().__init__(message if row is None else f"row {row}: {message}")
        self.reason = message
        self.field = field
        self.size = size
        self.limit = limit
        self.row = row


class OffsetOutOfRangeError(StoreError, IndexError):
    """A queue does not hold the offset that was asked for."""

    def __init__(self, message: str, *, topic: str, queue_id: int, queue_offset: int, min: int, max: int) -> None:
        super().__init__(message)
        self.topic = topic
        self.queue_id = queue_id
        self.queue_offset = queue_offset
        self.min = min
        self.max = max


class UnknownTopicError(StoreError, LookupError):
    """The store has no such topic; `topics` lists those it has."""

    def __init__(self, topic: str, topics: Iterable[str]) -> None:
        self.topic = topic
        self.topics = sorted(topics)
        listed = ", ".join(self.topics[:20]) or "none"
        more = f" and {len(self.topics) - 20} more" if len(self.topics) > 20 else ""
        super().__init__(f"topic {topic!r} is not in the store; its topics: {listed}{more}")


class StoreClosedError(StoreError, RuntimeError):
    """The store object was closed; open it again."""


# ---- the operator must act


class NotAStoreError(StoreError, ValueError):
    """The path is no message store, or one this project must not write to."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StoreLockedError(StoreError, RuntimeError):
    """Another process holds the store.

    Attributes
    ----------
    path : str
        The lock file.
    holder : str
        Who holds it, in words ("a RocketMQ broker, pid 4711").
    """

    def __init__(self, message: str, *, path: str, holder: str) -> None:
        super().__init__(message)
        self.path = path
        self.holder = holder


class StorePermissionError(StoreError, PermissionError):
    """A file or folder of the store may not be used by this user; the message says whose it is and what to run."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StoreFullError(StoreError, OSError):
    """The disk has no room for what was to be written; nothing of it is in the log."""

    def __init__(self, message: str, *, path: str, needed: int, free: int) -> None:
        super().__init__(message)
        self.path = path
        self.needed = needed
        self.free = free


class SyncFailedError(StoreError, OSError):
    """A sync failed: what was written before it may not be on the disk, and a second sync would not tell."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StorePoisonedError(StoreError, RuntimeError):
    """A sync failed, or a file vanished under the writer: nothing more is written until the store is reopened."""


class StoreWentBackwardsError(StoreError, RuntimeError):
    """The log no longer holds what a reader has already read: it was cut, restored or made again."""


class NotRecoveredError(StoreError, RuntimeError):
    """No writer has recovered the store since the machine was started, and it holds more than a reader can prove."""


class BatchConflictError(StoreError, RuntimeError):
    """A batch that the store already holds came again with other rows, or for another topic."""

    def __init__(self, message: str, *, app_id: str, version: int) -> None:
        super().__init__(message)
        self.app_id = app_id
        self.version = version


class QueryConflictError(BatchConflictError):
    """A batch of another query than the one whose batches the store holds under this app id."""


class VersionRegressionError(StoreError, RuntimeError):
    """A batch version that is not known and not above the last one of its app."""

    def __init__(self, message: str, *, app_id: str, version: int) -> None:
        super().__init__(message)
        self.app_id = app_id
        self.version = version


class LostBatchesError(StoreError, RuntimeError):
    """Batches below this version are missing from the log: some, or all of them."""

    def __init__(self, message: str, *, app_id: str, version: int) -> None:
        super().__init__(message)
        self.app_id = app_id
        self.version = version


# ---- the disk must be looked at


class CorruptionError(StoreError):
    """Bytes that were stored are not there any more, or not as they were. Never cut, never skipped.

    Attributes
    ----------
    path : str
        The file.
    physical_offset : int
        Where, in bytes from the log's origin (for other files: the position in the file).
    expected, found : str
        What should be there and what is.
    """

    def __init__(self, path: str, physical_offset: int, expected: str, found: str, *, hint: str = "") -> None:
        super().__init__(
            f"{path}: offset {physical_offset}: expected {expected}, found {found}."
            + (f" {hint}" if hint else " Run `messagestore verify` on the store; restore this file from a copy.")
        )
        self.path = path
        self.physical_offset = physical_offset
        self.expected = expected
        self.found = found


class TornRecordError(CorruptionError):
    """A record that was not written whole (a crash): recovery may cut it, at the end of the log only."""


class ChecksumError(CorruptionError):
    """A CRC does not match (the disk): never cut silently."""


class MagicError(CorruptionError):
    """No record begins where one must."""
