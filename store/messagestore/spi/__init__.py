"""What the Spark connector and the command line use besides the public API. It makes no promises to users.

`interface` defines the methods of a store. `local` implements them with the files of this host, `remote` by a server on
another host, and `rocketmq` by running brokers. The functions here need no store: they turn columns into records and
back, and check names. What only operators ask about the files of a store on this host is `messagestore.inspect`.
"""

from messagestore.batches.append import APPENDED, PlannedWrite
from messagestore.batches.refusals import no_history
from messagestore.batches.staging import StagedFile
from messagestore.files.staging_files import Write, driver_token
from messagestore.format.arrow_bytes import array_of, numpy_of, valid_of
from messagestore.format.batch_record import SOURCE_SPARK, SOURCE_USER, check_app_id
from messagestore.format.compression import plain_body
from messagestore.format.config import BROKER_NAME_WORDS, duration_s, is_broker_name
from messagestore.format.frame_columns import ERROR, FRAME_COLUMNS, MOST_MS, TIME, FrameColumn, FrameProjection
from messagestore.format.gathered import Gathered
from messagestore.format.json_text import bounded_json
from messagestore.format.layout import SYS_FLAG_COMPRESSED
from messagestore.format.message import (
    BATCH_TOPIC,
    check_topic,
    group_fault,
    is_ordinary_topic,
    put_topic_fault,
    stored_topic_fault,
    topic_fault,
)
from messagestore.format.message_checks import all_faults
from messagestore.format.message_columns import ColumnTexts
from messagestore.format.properties import check_properties
from messagestore.format.queue_choice import choose_queues, queue_counts
from messagestore.format.record_columns import COLUMNS, Rows, encode
from messagestore.log.store_files import store_host_of
from messagestore.read.decoding import Decoder
from messagestore.read.query import runs_of
from messagestore.spi.copies import append_copies
from messagestore.spi.interface import (
    Committed,
    Description,
    Ends,
    LastRecord,
    Place,
    PlannedRead,
    Proven,
    Queue,
    Queues,
    Range,
    Report,
    Staging,
    StoreReader,
    Stores,
    StoreWriter,
)
from messagestore.spi.local import LOCAL_STORES, LocalStores, planned_elsewhere
from messagestore.spi.location import OPENERS, Location, location_words
from messagestore.spi.queries import query_brokers
from messagestore.spi.sends import Producer, SendQueue, Target, keys_and_crcs
from messagestore.spi.stores import STORES, brokers_of

__all__ = [
    "APPENDED",
    "BATCH_TOPIC",
    "BROKER_NAME_WORDS",
    "COLUMNS",
    "ERROR",
    "FRAME_COLUMNS",
    "LOCAL_STORES",
    "MOST_MS",
    "OPENERS",
    "SOURCE_SPARK",
    "SOURCE_USER",
    "STORES",
    "SYS_FLAG_COMPRESSED",
    "TIME",
    "ColumnTexts",
    "Committed",
    "Decoder",
    "Description",
    "Ends",
    "FrameColumn",
    "FrameProjection",
    "Gathered",
    "LastRecord",
    "LocalStores",
    "Location",
    "Place",
    "PlannedRead",
    "PlannedWrite",
    "Producer",
    "Proven",
    "Queue",
    "Queues",
    "Range",
    "Report",
    "Rows",
    "SendQueue",
    "StagedFile",
    "Staging",
    "StoreReader",
    "StoreWriter",
    "Stores",
    "Target",
    "Write",
    "all_faults",
    "append_copies",
    "array_of",
    "bounded_json",
    "brokers_of",
    "check_app_id",
    "check_properties",
    "check_topic",
    "choose_queues",
    "driver_token",
    "duration_s",
    "encode",
    "group_fault",
    "is_broker_name",
    "is_ordinary_topic",
    "keys_and_crcs",
    "location_words",
    "no_history",
    "numpy_of",
    "plain_body",
    "planned_elsewhere",
    "put_topic_fault",
    "query_brokers",
    "queue_counts",
    "runs_of",
    "store_host_of",
    "stored_topic_fault",
    "topic_fault",
    "valid_of",
]
