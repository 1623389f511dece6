"""What the connector and the command line use beside the public API. No promise to users.

One module, so that what they rely on can be seen at a glance.
"""

from messagestore.files.commit_log import CommitLog
from messagestore.files.consume_queue import UNIT_DTYPE, list_queues
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.files.mapped_file import Disk
from messagestore.files.staging_files import Write, driver_token, remove, sweep, sweep_write
from messagestore.files.state import State, boot_hash
from messagestore.files.topics import Topics
from messagestore.files.writer_lock import probe_attached, probe_java, probe_writer
from messagestore.format.arrow_bytes import array_of, numpy_of, valid_of
from messagestore.format.config import duration_s
from messagestore.format.javahash import java_hashes, queue_of_hash
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.format.message import (
    BATCH_TOPIC,
    check_topic,
    group_fault,
    put_topic_fault,
    stored_topic_fault,
    topic_fault,
)
from messagestore.format.message_columns import ColumnTexts
from messagestore.format.record import decode_message
from messagestore.format.record_columns import COLUMNS, EncodedRecords, encode
from messagestore.format.record_scan import head_sizes
from messagestore.log.batch_record import SOURCE_SPARK, SOURCE_USER, BatchRecord, read_batch
from messagestore.log.batch_search import batches_from
from messagestore.log.store_files import (
    Identity,
    Paths,
    StoreFiles,
    check_root,
    config_of_records,
    looks_like_store,
    make_staging,
    refuse_to_write,
    store_host_of,
)
from messagestore.read.proven_tail import ProvenTail
from messagestore.read.queue_ends import QueueEnds
from messagestore.read.view import StoreView, Visible
from messagestore.session import AttachedStore, attached_store, detach_at_the_end
from messagestore.spi.interface import (
    Committed,
    Description,
    Ends,
    Gathered,
    LastRecord,
    Place,
    Proven,
    Queue,
    Queues,
    Range,
    Staging,
    StoreReader,
    Stores,
    StoreWriter,
)
from messagestore.spi.local import LOCAL_STORES, LocalStores
from messagestore.verify.verify import Finding, VerifyReport, verify
from messagestore.write.batch_rules import no_history
from messagestore.write.catching_up import journal_of
from messagestore.write.log_writer import LogWriter
from messagestore.write.staging import StagedChunks, StagedFile, StagingWriter
from messagestore.write.transaction import APPENDED, KNOWN, SKIPPED, append_batch

__all__ = [
    "APPENDED",
    "BATCH_TOPIC",
    "COLUMNS",
    "FILLER_UNIT_SIZE",
    "KNOWN",
    "LOCAL_STORES",
    "SKIPPED",
    "SOURCE_SPARK",
    "SOURCE_USER",
    "UNIT_DTYPE",
    "AttachedStore",
    "BatchRecord",
    "ColumnTexts",
    "CommitLog",
    "Committed",
    "ConsumerOffsets",
    "Description",
    "Disk",
    "EncodedRecords",
    "Ends",
    "Finding",
    "Gathered",
    "Identity",
    "LastRecord",
    "LocalStores",
    "LogWriter",
    "Paths",
    "Place",
    "Proven",
    "ProvenTail",
    "Queue",
    "QueueEnds",
    "Queues",
    "Range",
    "StagedChunks",
    "StagedFile",
    "Staging",
    "StagingWriter",
    "State",
    "StoreFiles",
    "StoreReader",
    "StoreView",
    "StoreWriter",
    "Stores",
    "Topics",
    "VerifyReport",
    "Visible",
    "Write",
    "append_batch",
    "array_of",
    "attached_store",
    "batches_from",
    "boot_hash",
    "check_root",
    "check_topic",
    "config_of_records",
    "decode_message",
    "detach_at_the_end",
    "driver_token",
    "duration_s",
    "encode",
    "group_fault",
    "head_sizes",
    "java_hashes",
    "journal_of",
    "list_queues",
    "looks_like_store",
    "make_staging",
    "no_history",
    "numpy_of",
    "probe_attached",
    "probe_java",
    "probe_writer",
    "publish_offsets",
    "put_topic_fault",
    "queue_of_hash",
    "read_batch",
    "refuse_to_write",
    "remove",
    "store_host_of",
    "stored_topic_fault",
    "sweep",
    "sweep_write",
    "topic_fault",
    "valid_of",
    "verify",
]
