"""The examples, run as their readers run them. The Kafka bridges are in tests/interop, since they need a broker."""

from __future__ import annotations

import runpy
from collections import Counter

import pytest

from spark_runs import ROOT, bodies, run_job

EXAMPLES = ROOT / "examples"


def run(spark, name: str, folder) -> None:
    runpy.run_path(str(EXAMPLES / name))["run"](spark, str(folder))


def test_join_topics(spark, tmp_path) -> None:
    run(spark, "02_join_topics/join_topics.py", tmp_path)
    flights = Counter({'{"from":"JFK","to":"MIA"}': 1, '{"from":"EWR","to":"IAH"}': 1})
    flights.update({'{"from":"LGA","to":"IAH"}': 1, '{"from":"JFK","to":"BQN"}': 1})
    assert bodies(f"{tmp_path}/store", "flights") == flights


def test_replay_into_a_second_store(spark, tmp_path) -> None:
    run(spark, "03_replay_into_store/replay.py", tmp_path)
    assert bodies(f"{tmp_path}/copy", "gates") == bodies(f"{tmp_path}/store", "gates") == Counter(["B12", "C3", "D7"])


def test_several_topics(spark, tmp_path) -> None:
    run(spark, "04_several_topics/several_topics.py", tmp_path)
    assert bodies(f"{tmp_path}/late", "late") == Counter(["45", "120", "16"])
    assert bodies(f"{tmp_path}/punctual", "punctual") == Counter(["2", "-3", "0"])


def test_dead_letters(spark, tmp_path, capsys) -> None:
    run(spark, "05_dead_letters/dead_letters.py", tmp_path)
    assert bodies(f"{tmp_path}/store", "gates") == Counter(["B12", "C3", "D7"])
    assert bodies(f"{tmp_path}/store", "gates-dead") == Counter(["B12", ""])
    assert "UA1" in capsys.readouterr().out


def test_kafka_drop_in(spark, tmp_path, capsys) -> None:
    run(spark, "09_kafka_drop_in/drop_in.py", tmp_path)
    late = Counter({'{"flight":"UA 1545","delay":11}': 1, '{"flight":"AA 1141","delay":33}': 1})
    late.update({'{"flight":"UA 1714","delay":20}': 1})
    assert bodies(f"{tmp_path}/store", "late") == late
    assert "|N619AA|{" in capsys.readouterr().out


@pytest.mark.usefixtures("connect_port")
def test_connect_client(tmp_path) -> None:
    """`local[2]` starts a server beside the client; the client speaks to it as to any other."""
    script = EXAMPLES / "08_connect" / "connect_client.py"
    done = run_job(str(script), "local[2]", tmp_path / "store", tmp_path / "checkpoint", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert bodies(f"{tmp_path}/store", "gates-copy") == Counter(["B12", "C3", "D7"])
