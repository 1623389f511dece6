"""Makes an archive of the classes that Spark loads (JDK class data sharing), beside this Python: `.venv/spark.jsa`.

    python tests/class_archive.py

The tests start dozens of JVMs with Spark; with the archive each needs about half of the processor time until its first
query runs (measured: 5.6 s instead of 10). A JVM that the archive does not fit (another Java, another Spark) goes on
without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import spark_runs

_PROGRAM = """
import sys
import job
from pyspark_messagestore import MessageStoreDataSource
spark = job.session("local[2]")
spark.dataSource.register(MessageStoreDataSource)
job.copy(spark, sys.argv[1], sys.argv[2])
jvm = spark.sparkContext._gateway.proc
spark.stop()
jvm.stdin.close()  # it ends, and writes the archive
sys.exit(jvm.wait())
"""


def main() -> int:
    """Make the archive; the exit status."""
    reason = spark_runs.why_not()
    if reason is not None:
        print(f"==> no archive of Spark's classes: {reason}", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory(dir=spark_runs.CLASSES.parent) as folder:
        spark_runs.fill(f"{folder}/store", 500)
        made = Path(folder, "classes")
        options = f"{spark_runs.JAVA_OPTIONS} -XX:ArchiveClassesAtExit={made} {spark_runs.QUIET}"
        command = [sys.executable, "-c", _PROGRAM, f"{folder}/store", f"{folder}/checkpoint"]
        environment = {**os.environ, **spark_runs.environment(), "JDK_JAVA_OPTIONS": options}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode or not made.exists():
            print(f"==> no archive of Spark's classes: {done.stderr[-2000:]}", file=sys.stderr)
            return 0
        made.replace(spark_runs.CLASSES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
