"""Makes a home of Spark's for the tests, beside this Python: `.venv/spark`, in which everything starts in half of the time.

    python tests/spark_home.py

What is in it:

bin, jars, sbin
    Links into pyspark. There is no `python/lib/pyspark.zip`: Spark puts that in front of each worker's path, where no
    bytecode is kept, so that each would compile pyspark anew (measured: 1.1 s instead of 0.3 until it runs).
classes.jsa
    The classes that Spark loads (JDK class data sharing): a JVM needs about half of the processor time until its first
    query runs (measured: 5.6 s instead of 10). One that the archive does not fit (another Java) goes on without it.
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
    """Make the home, then the archive; the exit status."""
    reason = spark_runs.why_not()
    if reason is not None:
        print(f"==> no home of Spark's for the tests: {reason}", file=sys.stderr)
        return 0
    make_links(spark_runs.HOME)
    with tempfile.TemporaryDirectory(dir=spark_runs.HOME) as folder:
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


def make_links(home: Path) -> None:
    """What Spark needs of pyspark, without its zip."""
    import pyspark

    home.mkdir(exist_ok=True)
    for name in ("bin", "jars", "sbin"):
        link = home / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path(pyspark.__file__).with_name(name))


if __name__ == "__main__":
    sys.exit(main())
