"""Small Kafka jobs, each about one thing: with a real broker and with a store they find the same, or a known difference.

`kafka_jobs.py` has the jobs. The tables below say what each finds, and docs/guides/from-kafka.md lists the differences.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import kafka_broker, tools

pytest.importorskip("pyspark")

import spark_runs
from interop import kafka_jobs
from interop.share import part
from messagestore import MessageStore

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]
JOBS = Path(__file__).with_name("kafka_jobs.py")
CONNECTOR = ("spark-sql-kafka-", "spark-token-provider-kafka-", "kafka-clients-", "commons-pool2-")
LOST = "Some data may have been lost"

SAME: dict[str, Any] = {
    "pattern_without_a_match_in_a_batch": [],
    "pattern_without_a_match_in_a_stream": [[], [[0, 1, 2, 3, 4]]],
    "pattern_gets_a_topic": [[[0, 1, 2]], [[0, 1, 2, 3, 4]]],
    "names_with_blanks_and_twice": [0, 1, 2],
    "assign_a_missing_partition_in_a_batch": [0, 3],
    "assign_a_missing_partition_in_a_stream": [[0, 3]],
    "assign_an_empty_list": [[], []],
    "assign_an_empty_list_beside_another": [0, 1],
    "assign_nothing": [],
    "assign_a_partition_that_comes_later": [[[0, 3]], [[6]]],
    "a_topic_that_joins": [[], [[0, 1, 2, 3, 4]]],
    "a_topic_that_leaves_without_failOnDataLoss": [[[0, 0, 1, 1, 2, 2, 3, 4]], [[3, 4, 5]]],
    "a_topic_gets_partitions": [[], [[*range(10)]]],
    "words_in_capitals": [[*range(6)], [[*range(6)]]],
    "a_stream_from_beyond_the_end_without_failOnDataLoss": [[], [[*range(6, 21)]]],
    "a_time_with_an_empty_partition_and_the_latest": [[0, 1], [[0, 1]]],
    "a_time_of_minus_one": [[], [[6, 7, 8]], []],
    "a_time_of_minus_two": [[[*range(6)]], [*range(6)]],
    "a_time_of_minus_one_by_partition": [],
    "the_first_batch_does_not_wait_for_others": [[[0, 1, 2]], [[3, 4, 5]]],
    "enough_messages_do_not_wait": [[0, 1, 2], [3, 4, 5, 6]],
    "available_now_does_not_wait": [[[0, 1, 2]], None, [[3, 4, 5]]],
    "as_many_as_the_partitions": [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
    "an_option_in_other_letters": [],
    "a_large_key": [["32000", "v", "None"]],
    "partitions_that_are_null_for_some_rows": [["1", "v", "None"], ["1", "w", "None"]],
    "a_join_of_two_streams": [0, 1, 2, 3],
    "windows_with_a_watermark": 6,
    "a_trigger_once": [6],
}
"""Jobs that find the same, and what it is."""

REFUSED: dict[str, tuple[str, str]] = {
    "a_topic_that_is_not_there_in_a_batch": ("UnknownTopicOrPartitionException", "Create it with `messagestore topic"),
    "two_ways_to_subscribe": ("Only one of the following options", "option subscribePattern: found beside subscribe"),
    "no_way_to_subscribe": ("One of the following options must be", "option subscribe (or topic): is missing"),
    "a_topic_that_leaves": (LOST, "option subscribe: leaves out a-topic-that-leaves"),
    "a_partition_that_leaves_assign": (LOST, "option assign: leaves out a-partition-that-leaves"),
    "checkpoints_that_were_swapped": (LOST, "Is this the checkpoint of another query?"),
    "a_batch_from_the_latest": ("starting offset can't be latest", "option startingOffsets: found latest"),
    "a_batch_to_the_earliest": ("ending offset can't be earliest", "option endingOffsets: found 'earliest'"),
    "a_partition_that_is_not_listed": ("don't match what are assigned", "is not listed. List it"),
    "a_partition_that_is_listed_and_not_there": ("don't match what are assigned", "queue 7 of a-partition"),
    "a_topic_that_is_listed_and_not_read": ("don't match what are assigned", "is not subscribed"),
    "a_batch_from_beyond_the_end": ("is greater than the resolved end offset", "offset 5 was requested"),
    "a_stream_from_beyond_the_end": (LOST, "offset 5 was requested"),
    "a_batch_that_ends_before_it_begins": (
        "is greater than the end offset",
        "would end at 1, but the read begins at 2",
    ),
    "more_at_least_than_at_most": ("is higher than the maxOffsetsPerTrigger", "which is more than maxOffsetsPerTr"),
    "a_partition_below_zero": ("should always be non-negative", "queueId: found -1; allowed is 0 to 2"),
    "a_topic_that_is_null": ("contains a null topic", "topic: found null"),
}
"""Jobs that both refuse, and parts of the errors."""

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "pattern_of_a_part_of_a_name": ([0, 1, 2], []),
    "a_batch_from_beyond_the_end_without_failOnDataLoss": ("is greater than the resolved end offset", []),
    "a_stream_with_an_end": ("ending offset not valid in streaming queries", [[0, 1, 2]]),
    "a_time_with_an_empty_partition": ("No offset matched from request", [[0, 1], [[0, 1]]]),
    "fewer_than_the_partitions": ([[3, 3, 3], [*range(9)]], [[1] * 9, [*range(9)]]),
    "a_limit_of_zero": ([], "option maxOffsetsPerTrigger: found '0'; allowed is a whole number from 1"),
    "an_option_that_is_unknown": ([0, 1, 2], "option failondatalos: no such option. Did you mean failOnDataLoss?"),
    "limits_in_a_batch": ([0, 1, 2], "option maxOffsetsPerTrigger: is for streams"),
    "options_of_the_source_in_the_sink": ([0], "option subscribe: is for reading, but this is writing"),
    "a_schema_of_the_user": ("schema doesn't match the actual schema", ["0", "1", "2"]),
    "a_table_in_sql": ([[3], [3]], "Spark does not pass on the options of a CREATE TABLE"),
    "a_larger_key": ([["32768", "v", "None"]], "properties: found"),
    "a_large_header": ([["1", "v", "1"]], "properties: found"),
    "large_headers_together": ([["1", "v", "2"]], "properties: found"),
    "a_key_with_a_separator": ([["3", "v", "None"]], "allowed is text without"),
    "a_header_without_a_name": ([["1", "v", "1"]], "property name: found empty text"),
    "a_value_above_the_limit": ("RecordTooLargeException", [[1, 2_000_000, 4]]),
    "metrics_of_a_source": ([f"{each}OffsetsBehindLatest" for each in ("avg", "max", "min")], []),
}
"""What Kafka's connector finds and what this one finds; texts are parts of errors."""
REST = ("delays_as_spark_writes_them", "columns_of_other_types")
ALL_JOBS = (*SAME, *REFUSED, *DIFFERENT, *REST)
DAYS = 3
"""In which all jobs come to their turn."""
JOBS_NOW = part(ALL_JOBS, DAYS)


def now(jobs: Iterable[str]) -> list[str]:
    """Those of them that run."""
    return [job for job in jobs if job in JOBS_NOW]


def runs(folder: Path) -> dict[str, Any]:
    """What each job found, by target: with a broker, then with a store, in one session of Spark."""
    reason = spark_runs.why_not()
    try:
        python, classpath = tools.spark_python(), tools.classpath_of("broker")
        jars = [jar for jar in tools.classpath_of("spark-kafka").split(":") if Path(jar).name.startswith(CONNECTOR)]
    except tools.CannotHaveError as error:
        reason = str(error)
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"in CI the Kafka broker must run: {reason}", pytrace=False)
        pytest.skip(f"no Kafka broker: {reason}")
    with kafka_broker.running(classpath, folder / "broker") as broker:
        patience = {**kafka_broker.PATIENCE, "kafka.delivery.timeout.ms": "300000"}  # each of three tries
        servers = {"kafka.bootstrap.servers": broker.servers, **patience}
        targets: dict[str, dict[str, Any]] = {
            "kafka": {"format": "kafka", "options": servers},
            "store": {"format": "messagestore", "options": {"path": f"{folder}/store", "rowFormat": "kafka"}},
        }
        MessageStore.open(folder / "store").close()
        for name, target in targets.items():
            target["folder"] = f"{folder}/{name}-checkpoints"
        settings = {
            **spark_runs.SESSION,
            "spark.jars": ",".join(jars),
            "spark.sql.warehouse.dir": f"{folder}/warehouse",
        }
        plan = {"settings": settings, "targets": targets, "jobs": JOBS_NOW, "result": f"{folder}/result.json"}
        (folder / "plan.json").write_text(json.dumps(plan))
        environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "JDK_JAVA_OPTIONS": spark_runs.JAVA_OPTIONS}
        environment.pop("SPARK_HOME", None)
        done = subprocess.run(
            [python, str(JOBS), str(folder / "plan.json")],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory, worker_id) -> dict[str, Any]:
    """What the jobs found: by target, by job. The processes of xdist share it."""
    folder = tmp_path_factory.mktemp("kafka-jobs")
    if worker_id == "master":
        return runs(folder)
    kept = tmp_path_factory.getbasetemp().parent / "kafka-jobs.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(runs(folder)))
        return json.loads(kept.read_text())


def errors_of(result: Any) -> list[str]:
    """The errors in what a job found: it failed, or a part of it did."""
    if isinstance(result, dict):
        return (
            [result["error"]] if "error" in result else [text for each in result.values() for text in errors_of(each)]
        )
    return [text for each in result for text in errors_of(each)] if isinstance(result, list) else []


def test_every_job_is_in_one_table() -> None:
    assert sorted(kafka_jobs.JOBS) == sorted(ALL_JOBS)


def test_all_jobs_ran(found) -> None:
    assert sorted(found["kafka"]) == sorted(found["store"]) == sorted(JOBS_NOW)


@pytest.mark.parametrize("target", ["kafka", "store"])
@pytest.mark.parametrize("job", now(SAME))
def test_a_job_finds_the_same(found, job: str, target: str) -> None:
    assert found[target][job] == SAME[job]


@pytest.mark.parametrize("job", now(REFUSED))
def test_a_job_is_refused_by_both(found, job: str) -> None:
    for target, text in zip(("kafka", "store"), REFUSED[job], strict=True):
        errors = errors_of(found[target][job])
        assert errors
        assert text in errors[0]


@pytest.mark.parametrize("job", now(DIFFERENT))
def test_a_difference_is_known(found, job: str) -> None:
    for target, expected in zip(("kafka", "store"), DIFFERENT[job], strict=True):
        result = found[target][job]
        if isinstance(expected, str):
            errors = errors_of(result)
            assert errors
            assert expected in errors[0]
        else:
            assert result == expected


def delays_are_read_as_kafkas_connector_reads_them(found: dict[str, Any]) -> None:
    for target in ("kafka", "store"):
        delays, wrong = found[target]["delays_as_spark_writes_them"]
        assert delays == [[[0, 1, 2]]] * 4
        assert errors_of(wrong)


def columns_of_some_more_types_are_taken(found: dict[str, Any]) -> None:
    theirs, ours = (found[target]["columns_of_other_types"] for target in ("kafka", "store"))
    assert len(errors_of(theirs)) == 4
    assert {name for name, result in ours.items() if errors_of(result)} == {"value", "partition"}


def test_what_is_in_no_table(found) -> None:
    checks = (delays_are_read_as_kafkas_connector_reads_them, columns_of_some_more_types_are_taken)
    for job, check in zip(REST, checks, strict=True):
        if job in JOBS_NOW:
            check(found)
