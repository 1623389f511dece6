"""The Spark code of the README, run as it stands: both queries copy what the last line writes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from spark_runs import ROOT, bodies, fill


def test_the_spark_code_runs(spark, tmp_path: Path, capsys) -> None:
    """A person in a hurry pastes it: a query by format, one by foreachBatch, a batch read, a batch write."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = [b for b in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if "readStream" in b]
    root = str(tmp_path / "store")
    fill(root, 20)
    given = spark.range(100, 150).selectExpr("cast(id as string) body", "array('k') keys", "'UA' tags")
    try:
        exec(
            compile(code.replace("/data/", f"{tmp_path}/"), "README.md", "exec"), {"spark": spark, "flights_df": given}
        )
        assert len(spark.streams.active) == 2
        for query in spark.streams.active:
            query.processAllAvailable()
    finally:
        for query in spark.streams.active:
            query.stop()
    new = Counter(map(str, range(100, 150)))
    assert bodies(root, "flights") == Counter(map(str, range(20))) + new
    for topic in ("flights-copy", "late"):
        assert new <= bodies(root, topic) <= bodies(root, "flights")
        assert set(bodies(root, topic).values()) == {1}
    assert "queueOffset" in capsys.readouterr().out
