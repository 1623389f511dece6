"""A message store in Apache RocketMQ's file format, for Python. No broker has to run.

`MessageStore` writes and reads a store, `ReadOnlyStore` only reads one, `Consumer` reads topics as a member of a group,
`Message` is what is put, and `StoreConfig` holds the settings. Every error is a `StoreError`. The names in `__all__`
are the public interface; everything else may change.

Examples
--------
>>> from messagestore import Message, MessageStore
>>> with MessageStore.open("store") as store:
...     result = store.put_message(Message("flights", b"EWR to IAH", queue_id=0, keys=["N14228"], tags="UA"))
...     store.get_message("flights", 0, queue_offset=0).messages[0].body
b'EWR to IAH'
"""

from messagestore.batches.append import BatchRequest, BatchResult, StoredBatch
from messagestore.broker.delivery import Delivered
from messagestore.broker.expired import ExpiredFiles
from messagestore.broker.half_checks import CheckReport, LocalTransactionState
from messagestore.broker.halves import HalfMessage
from messagestore.broker.topic_deletion import DeletedTopic
from messagestore.consume.consumer import Consumer
from messagestore.consume.messages import ConsumedMessage
from messagestore.consume.progress import OffsetReset, reset_offsets
from messagestore.errors import (
    AccessDeniedError,
    AppendMessageStatus,
    BatchConflictError,
    BrokerError,
    ChecksumError,
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    HalfMessageEndedError,
    LostBatchesError,
    MagicError,
    MessageIllegalError,
    NotAStoreError,
    NotRecoveredError,
    OffsetOutOfRangeError,
    ProgressConflictError,
    ProtocolError,
    PutMessageStatus,
    QueryConflictError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StorePermissionError,
    StorePoisonedError,
    StoreUnavailableError,
    StoreWentBackwardsError,
    TornRecordError,
    UnknownTopicError,
    VersionRegressionError,
)
from messagestore.format.config import ASYNC_FLUSH, SYNC_FLUSH, StoreConfig
from messagestore.format.half_records import OpenHalf
from messagestore.format.message import (
    GetMessageResult,
    GetMessageStatus,
    Message,
    MessageExt,
    PutMessageResult,
)
from messagestore.format.record_columns import MessageColumns
from messagestore.message_batch import MessageBatch
from messagestore.message_store import (
    MessageStore,
    alter_stored_config,
    check_halves,
    delete_expired_files,
    deliver_delayed,
    run_retention,
    stored_config,
)
from messagestore.read_only_store import ReadOnlyStore
from messagestore.recovery.report import RecoveryReport
from messagestore.writer.statistics import StoreStats, TopicStats

__all__ = [
    "ASYNC_FLUSH",
    "SYNC_FLUSH",
    "AccessDeniedError",
    "AppendMessageStatus",
    "BatchConflictError",
    "BatchRequest",
    "BatchResult",
    "BrokerError",
    "CheckReport",
    "ChecksumError",
    "CommitUnknownError",
    "ConfigError",
    "ConsumedMessage",
    "Consumer",
    "CorruptionError",
    "DeletedTopic",
    "Delivered",
    "ExpiredFiles",
    "GetMessageResult",
    "GetMessageStatus",
    "HalfMessage",
    "HalfMessageEndedError",
    "LocalTransactionState",
    "LostBatchesError",
    "MagicError",
    "Message",
    "MessageBatch",
    "MessageColumns",
    "MessageExt",
    "MessageIllegalError",
    "MessageStore",
    "NotAStoreError",
    "NotRecoveredError",
    "OffsetOutOfRangeError",
    "OffsetReset",
    "OpenHalf",
    "ProgressConflictError",
    "ProtocolError",
    "PutMessageResult",
    "PutMessageStatus",
    "QueryConflictError",
    "ReadOnlyStore",
    "RecoveryReport",
    "StoreClosedError",
    "StoreConfig",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "StorePermissionError",
    "StorePoisonedError",
    "StoreStats",
    "StoreUnavailableError",
    "StoreWentBackwardsError",
    "StoredBatch",
    "TopicStats",
    "TornRecordError",
    "UnknownTopicError",
    "VersionRegressionError",
    "alter_stored_config",
    "check_halves",
    "delete_expired_files",
    "deliver_delayed",
    "reset_offsets",
    "run_retention",
    "stored_config",
]
