"""The Java driver, built once per version of RocketMQ with Maven, or the reason why it cannot be.

Built into `driver/.build/<version>` (git ignores it); the jars stay in Maven's own cache. A build that is up to date asks
Maven nothing.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
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
        jars = folder / "classpath"
        if not (stamp.exists() and stamp.read_text() == wanted and all_there(jars)):
            build(version)
            stamp.write_text(wanted)
        return f"{folder / 'classes'}:{jars.read_text().strip()}"


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
    jars = run([*command, "dependency:build-classpath"])
    if jars.returncode:
        raise CannotBuild(f"Maven cannot get RocketMQ {version}: {jars.stdout[-800:]}")
    made = run([*command, "compile"])
    if made.returncode and "COMPILATION ERROR" not in made.stdout:
        raise CannotBuild(f"Maven cannot compile: {made.stdout[-800:]}")
    if made.returncode:
        raise AssertionError(f"the driver does not compile against RocketMQ {version}:\n{made.stdout[-3000:]}")


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
        env={**os.environ, "MAVEN_OPTS": "-Djansi.mode=strip"},
    )
