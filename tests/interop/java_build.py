"""The Java driver, built once per version of RocketMQ with Maven, or the reason why it cannot be.

Built into `driver/.build/<version>` (git ignores it); the jars stay in Maven's own cache. A build that is up to date asks
Maven nothing.

What starts most often, the newest version, also gets an archive of its classes there (`shared_classes`).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

DRIVER = Path(__file__).resolve().parent / "driver"
NEWEST, OLDER = "5.3.3", "5.1.4"
VERSIONS = (NEWEST, OLDER)
LEGACY = "4.9.7"
"""Its store has another constructor and API: a driver of its own (`src/legacy`), for random stores only."""
BUILD_TIMEOUT_S = 900


class CannotBuild(Exception):
    """There is no JDK, no Maven, or Maven cannot reach the jars: not the fault of what is tested."""


def sources() -> list[Path]:
    return sorted(path for path in [DRIVER / "pom.xml", *(DRIVER / "src").rglob("*")] if path.is_file())


@functools.cache
def classpath(version: str) -> str:
    """What to give to `java -cp`; one process builds, others wait for it."""
    folder = DRIVER / ".build" / version
    folder.mkdir(parents=True, exist_ok=True)
    stamp, wanted = folder / "stamp", hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jars, ours = folder / "classpath", folder / "driver.jar"
        if not (stamp.exists() and stamp.read_text() == wanted and ours.exists() and all_there(jars)):
            build(version)
            stamp.write_text(wanted)
        return f"{ours}:{jars.read_text().strip()}"


@functools.cache
def tools_classpath(version: str) -> str:
    """The jars of the name server, the broker and mqadmin; nothing of ours is compiled for them."""
    jars = DRIVER / ".build" / f"{version}-tools" / "classpath"
    jars.parent.mkdir(parents=True, exist_ok=True)
    with open(jars.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all_there(jars):
            pom = ["--file", str(DRIVER / "tools" / "pom.xml"), f"-Drocketmq.version={version}"]
            found = run(["mvn", "--batch-mode", "--quiet", *pom, "dependency:build-classpath"])
            if found.returncode:
                raise CannotBuild(f"Maven cannot get RocketMQ's tools {version}: {found.stdout[-800:]}")
        return jars.read_text().strip()


def all_there(jars: Path) -> bool:
    """Whether Maven's cache still has what the build was made with."""
    return jars.exists() and all(Path(jar).exists() for jar in jars.read_text().strip().split(":"))


def build(version: str) -> None:
    for program in ("mvn", "javac"):
        if shutil.which(program) is None:
            raise CannotBuild(f"{program} is not installed (Debian: apt-get install maven default-jdk-headless)")
    command = ["mvn", "--batch-mode", "--quiet", "--file", str(DRIVER / "pom.xml"), f"-Drocketmq.version={version}"]
    if version == LEGACY:
        command.append("-DsourceFolder=src/legacy/java")
    made = run([*command, "dependency:build-classpath", "compile"])
    if made.returncode and "COMPILATION ERROR" not in made.stdout:
        raise CannotBuild(f"Maven cannot get RocketMQ {version}, or cannot compile: {made.stdout[-800:]}")
    if made.returncode:
        raise AssertionError(f"the driver does not compile against RocketMQ {version}:\n{made.stdout[-3000:]}")
    folder = DRIVER / ".build" / version
    archive = shutil.make_archive(str(folder / "driver"), "zip", folder / "classes")
    Path(archive).rename(folder / "driver.jar")  # an archive of classes takes no folder


_SILENT = ("-Xlog:disable", "-Xlog:all=off")
"""A JVM that an archive does not fit says so among the answers of the program."""


@functools.cache
def shared_classes(name: str, jars: str, train: Callable[[Sequence[str]], None]) -> tuple[str, ...]:
    """The flags with which a program takes its classes from an archive (JDK class data sharing), and starts faster.

    The first process that asks makes it: `train` runs the program with the flags that it is given, and ends it cleanly.
    Others wait. Where that makes none, programs start without.
    """
    java = Path(shutil.which("java") or "java").resolve()
    (first, *_) = jars.split(":")
    key = f"{java} {java.stat().st_mtime_ns} {jars} {Path(first).stat().st_mtime_ns}"
    archive = DRIVER / ".build" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsa"
    with open(archive.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            made = archive.with_suffix(".new")
            train((f"-XX:ArchiveClassesAtExit={made}", *_SILENT))
            if made.exists():
                made.replace(archive)
    return (f"-XX:SharedArchiveFile={archive}", *_SILENT) if archive.exists() else ()


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
        cwd=DRIVER,
        env={**os.environ, "MAVEN_OPTS": "-Djansi.mode=strip -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"},
    )
