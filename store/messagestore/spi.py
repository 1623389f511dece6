"""What the connector and the command line use beside the public API. No promise to users.

One module, so that what they rely on can be seen at a glance.
"""

from messagestore.attached_store import attached_store
from messagestore.batch_record import SOURCE_SPARK, SOURCE_USER, BatchRecord, read_batch
from messagestore.commit_log import CommitLog
from messagestore.consume_queue import list_queues
from messagestore.record_columns import COLUMNS, EncodedRecords, encode
from messagestore.recovery import batches_from
from messagestore.staging import StagedChunks, StagedFile, StagingWriter, remove, sweep
from messagestore.store_files import Identity, Paths, StoreFiles
from messagestore.transaction import APPENDED, KNOWN, SKIPPED, append_batch
from messagestore.verify import Finding, verify
from messagestore.view import StoreView, Visible
from messagestore.writer_lock import probe_java

__all__ = [
    "APPENDED",
    "COLUMNS",
    "KNOWN",
    "SKIPPED",
    "SOURCE_SPARK",
    "SOURCE_USER",
    "BatchRecord",
    "CommitLog",
    "EncodedRecords",
    "Finding",
    "Identity",
    "Paths",
    "StagedChunks",
    "StagedFile",
    "StagingWriter",
    "StoreFiles",
    "StoreView",
    "Visible",
    "append_batch",
    "attached_store",
    "batches_from",
    "encode",
    "list_queues",
    "probe_java",
    "read_batch",
    "remove",
    "sweep",
    "verify",
]
