"""Each option and each column has a test that fails without it.

`make test` checks that every one names its test, and that the test is there. `make test-deep` takes them away one at a
time (`planted_options.py`), and each of these tests must fail.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from planted_options import ROWS, WITHOUT_EFFECT
from pyspark_messagestore.options.table import OPTIONS
from spark_runs import ROOT, environment

HERE = "tests/connector"
EACH = f"{HERE}/options/test_each_option.py::"
SINK = f"{HERE}/options/test_each_sink_option.py::"
POSITIONS = (f"{EACH}test_where_a_read_begins_and_ends",)
BEGINNINGS = (*POSITIONS, f"{EACH}test_where_a_read_begins_that_does_not_say_it")
PARTITIONS = (f"{EACH}test_partitions_as_small_as_they_are_asked_for",)
LIMITS = (f"{EACH}test_a_micro_batch_is_limited",)
DAMAGED = (f"{EACH}test_damaged_records",)
FORMATS = (f"{EACH}test_row_formats",)
BATCHES = (f"{SINK}test_the_app_and_the_version_of_a_batch",)
DOES_NOT_FOLLOW = (f"{SINK}test_what_happens_to_a_batch_that_does_not_follow",)
ROWS_OF_KAFKA = (f"{SINK}test_row_formats",)
DEAD_LETTERS = (f"{SINK}test_rows_that_the_store_cannot_hold",)
GROUPS = (f"{EACH}test_a_stream_begins_where_its_group_has_read_to",)
TAGS = (f"{EACH}test_tags",)
TOPICS = (f"{EACH}test_a_list_of_topics_and_a_pattern_of_several",)
SINK_COLUMNS = (f"{SINK}test_each_column_of_each_type_is_in_the_message",)
SERVED_READS = (f"{HERE}/options/test_locations.py::test_how_a_server_is_reached_goes_with_a_read",)
SERVED_WRITES = (f"{HERE}/options/test_locations.py::test_how_a_server_is_reached_goes_with_a_write",)
REACHED = (f"{HERE}/options/test_locations.py::test_how_brokers_are_reached",)
SENT = (f"{HERE}/sink/test_broker_options.py::test_what_the_options_of_brokers_say",)
COLUMNS = (
    f"{EACH}test_each_column_has_what_the_record_has",
    f"{EACH}test_the_time_of_a_message_is_not_the_time_of_its_record",
)

TESTS: dict[str, tuple[str, ...]] = {
    "alias storePathRootDir": (f"{EACH}test_the_path_by_its_name_in_rocketmq",),
    "alias topic": POSITIONS,
    "alias group": GROUPS,
    "alias subExpression": TAGS,
    "source subscribe": TOPICS,
    "source subscribePattern": TOPICS,
    "source assign": POSITIONS,
    "source startingOffsets": BEGINNINGS,
    "source startingTimestamp": POSITIONS,
    "source startingOffsetsByTimestamp": POSITIONS,
    "source startingOffsetsByTimestampStrategy": (
        *POSITIONS,
        f"{EACH}test_no_message_is_as_young_and_that_is_an_error",
    ),
    "source endingOffsets": POSITIONS,
    "source endingTimestamp": POSITIONS,
    "source endingOffsetsByTimestamp": POSITIONS,
    "source maxOffsetsPerTrigger": LIMITS,
    "source maxBytesPerTrigger": LIMITS,
    "source minOffsetsPerTrigger": LIMITS,
    "source maxTriggerDelay": (f"{EACH}test_messages_wait_for_others_as_long_as_it_says",),
    "source minPartitions": PARTITIONS,
    "source maxRecordsPerPartition": PARTITIONS,
    "source maxBytesPerPartition": PARTITIONS,
    "source failOnDataLoss": (
        f"{HERE}/source/test_rows.py::test_retention_between_planning_and_reading_a_tag",
        f"{HERE}/source/test_first_batch.py::test_messages_of_the_first_batch_that_retention_deleted_are_told",
    ),
    "source failOnUnproven": (f"{EACH}test_a_reader_that_shall_fail_where_something_is_not_proven",),
    "source readUpTo": (
        f"{HERE}/source/test_read_up_to.py::test_a_stream_reads_messages_when_they_are_synced",
        f"{HERE}/source/test_read_up_to.py::test_a_batch_read",
    ),
    "source onMissingTopic": (
        f"{HERE}/options/test_subscriptions.py::test_a_query_begins_before_its_store",
        f"{HERE}/options/test_subscriptions.py::test_a_missing_topic_says_how_to_create_it",
    ),
    "source consumerGroup": GROUPS,
    "source tags": TAGS,
    "source keys": (f"{HERE}/source/test_rows.py::test_only_messages_with_a_key",),
    "source filterPushdown": (
        f"{HERE}/source/test_pushdown.py::test_filters_come_only_when_asked_for",
        f"{HERE}/source/test_pushdown.py::test_a_column_that_is_made_from_another_one_narrows_nothing",
    ),
    "source brokerName": (f"{EACH}test_the_name_of_the_broker",),
    "source rowFormat": FORMATS,
    "source includeHeaders": FORMATS,
    "source badRecords": DAMAGED,
    "source verifyBodyCrc": DAMAGED,
    "source decompress": (f"{EACH}test_compressed_bodies",),
    "source view": (
        *POSITIONS,
        *(
            f"{HERE}/source/test_views.py::test_{name}"
            for name in ("topics", "queues", "segments", "groups", "batches")
        ),
    ),
    "source tokenFile": SERVED_READS,
    "source caFile": SERVED_READS,
    "source certFile": SERVED_READS,
    "source keyFile": SERVED_READS,
    "source retryTimeout": SERVED_READS,
    "source credentialsFile": REACHED,
    "source useTLS": REACHED,
    "source checkHostName": REACHED,
    "source readFrom": (f"{HERE}/options/test_locations.py::test_which_broker_of_a_pair_is_read",),
    "sink topic": (f"{SINK}test_the_option_topic_counts_more_than_the_column",),
    "sink autoCreateTopic": (f"{SINK}test_a_topic_is_created_with_so_many_queues",),
    "sink writeQueueNums": (f"{SINK}test_a_topic_is_created_with_so_many_queues",),
    "sink queueSelector": (f"{SINK}test_which_queues_the_rows_get",),
    "sink flushDiskType": (f"{SINK}test_what_is_on_the_disk_when_a_commit_returns",),
    "sink txnAppId": BATCHES,
    "sink txnVersion": BATCHES,
    "sink txnVersionSource": BATCHES,
    "sink onNewQuery": DOES_NOT_FOLLOW,
    "sink onNewTopic": DOES_NOT_FOLLOW,
    "sink onReplayMismatch": DOES_NOT_FOLLOW,
    "sink onVersionRegression": DOES_NOT_FOLLOW,
    "sink onLostBatches": DOES_NOT_FOLLOW,
    "sink maxMessageSize": (f"{SINK}test_the_largest_body",),
    "sink lockTimeout": (f"{SINK}test_a_commit_waits_for_another_writer_as_long_as_it_says",),
    "sink stagingTtl": (f"{SINK}test_staging_files_are_deleted_at_an_age",),
    "sink storeConfig": (f"{SINK}test_the_settings_of_a_store_that_is_created",),
    "sink unknownColumns": (f"{SINK}test_columns_that_the_sink_does_not_know",),
    "sink invalidRows": DEAD_LETTERS,
    "sink deadLetterTopic": DEAD_LETTERS,
    "sink rowFormat": ROWS_OF_KAFKA,
    "sink uniqKey": (f"{SINK}test_unique_keys",),
    "sink brokerClusterName": (f"{SINK}test_the_names_of_broker_and_cluster",),
    "sink brokerName": (f"{SINK}test_the_names_of_broker_and_cluster",),
    "sink storeHost": (f"{SINK}test_the_host_in_the_records",),
    "sink stagingDir": (f"{SINK}test_a_staging_folder",),
    "sink preallocate": (f"{SINK}test_whether_a_segment_gets_its_blocks_at_once",),
    "sink tokenFile": SERVED_WRITES,
    "sink caFile": SERVED_WRITES,
    "sink certFile": SERVED_WRITES,
    "sink keyFile": SERVED_WRITES,
    "sink retryTimeout": SERVED_WRITES,
    "sink credentialsFile": REACHED,
    "sink useTLS": REACHED,
    "sink checkHostName": REACHED,
    "sink lookupDir": SENT,
    "sink producerGroup": SENT,
    "sink onUnconfirmed": SENT,
    "rocketmq column": COLUMNS,
    "kafka column": (f"{EACH}test_each_of_kafkas_columns_has_what_the_record_has",),
    "sink column": SINK_COLUMNS,
    "columns that are left out": (f"{SINK}test_what_was_read_is_written_back_unchanged",),
}
"""What a row is about, and the tests of which one fails without it."""


def test_every_option_and_column_names_a_test_that_is_there() -> None:
    assert {row.about for row in ROWS} == set(TESTS)
    options = {f"{option.side} {option.name}" for option in OPTIONS if (option.side, option.name) not in WITHOUT_EFFECT}
    assert options == {about for about in TESTS if re.match(r"(source|sink) (?!column$)", about)}
    for test in {test for tests in TESTS.values() for test in tests}:
        file, name = test.split("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


@pytest.mark.slow
def test_each_of_them_fails_without_its_option_or_column(tmp_path: Path) -> None:
    asked = tmp_path / "tests.json"
    asked.write_text(json.dumps(TESTS))
    command = [sys.executable, str(ROOT / "tests" / "planted_options.py"), str(asked)]
    env = {**environment(), "PYTHONPATH": f"{ROOT / 'faults'}:{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, env={**env}, capture_output=True, text=True, check=False)
    caught = json.loads(done.stdout.splitlines()[-1])
    assert len(caught) == len(ROWS) >= 250
    assert [name for name, test in caught.items() if test is None] == []
