"""What the race needs and the project does not have: a Python with its own Spark, and jars.

Everything is kept in `.venv/peers`, so that a second run asks nobody. What cannot be had is a reason, never an error:
the contestants that need it are listed as left out.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HOME = Path(sys.prefix, "peers")
TOOLS = ("spark", "kafka", "delta", "rocketmq", "kahadb", "rocksdb", "leveldb")
PACKAGES = {"rocksdb": "rocksdict", "leveldb": "plyvel"}
_PATIENCE_S = 900
_Given = ParamSpec("_Given")


class CannotHaveError(Exception):
    """A tool cannot be had; the message is the reason."""


@dataclass
class Tools:
    """What was found.

    Parameters
    ----------
    python : str
        The Python that runs the race.
    classpaths : dict
        The jars of `kafka` (Spark's connector), `broker`, `delta`, `rocketmq` and `kahadb`, joined by colons.
    missing : dict
        Why a tool cannot be had, by its name in `TOOLS`.
    """

    python: str
    classpaths: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def prepare(*, offline: bool, names: Sequence[str] = ("kafka", "delta", "rocketmq", "kahadb")) -> Tools:
    """Find, or get, the tools. `offline`: use what is installed, and get nothing.

    A Python of its own is made because Delta Lake and Spark's Kafka connector fit one version of Spark only.
    """
    found = Tools(sys.executable)

    if offline:
        found.missing |= dict.fromkeys(names, "the race ran with --offline")
        for tool, package in PACKAGES.items():
            if importlib.util.find_spec(package) is None:
                found.missing[tool] = f"the race ran with --offline, and {package} is not installed"
    else:
        try:
            found.python = spark_python()
        except CannotHaveError as error:
            found.missing |= dict.fromkeys(("kafka", "delta", *PACKAGES), str(error))

        for tool in names:
            if tool not in found.missing:
                jars = (tool, "broker") if tool == "kafka" else (tool,)
                try:
                    found.classpaths |= {name: _CLASSPATHS[name]() for name in jars}
                except CannotHaveError as error:
                    found.missing[tool] = str(error)

    reason = _tests().why_not()
    if reason is not None:
        found.missing |= {tool: reason for tool in ("spark", "kafka", "delta") if tool not in found.missing}
    return found


def _tests():  # noqa: ANN202 # a module
    """The tests know how to start Spark, and how to build against RocketMQ."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    import spark_runs

    return spark_runs


def _one_process(get: Callable[_Given, str]) -> Callable[_Given, str]:
    """One process gets something, and the others wait for it."""

    @functools.wraps(get)
    def alone(*args: _Given.args, **kwargs: _Given.kwargs) -> str:
        HOME.mkdir(parents=True, exist_ok=True)
        with open(HOME / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return get(*args, **kwargs)

    return alone


@_one_process
def spark_python() -> str:
    """The Python of the race: this project, and what `requirements.txt` names."""
    folder, asked = HOME / "venv", HERE / "requirements.txt"
    # Without hashes: pip would then ask for those of what `requirements.txt` names, too, and of the project.
    pins = re.findall(r"^(?!pyspark==)[\w.-]+==[\w.]+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    wanted = hashlib.sha256("\n".join([*pins, asked.read_text(), (ROOT / "pyproject.toml").read_text()]).encode())
    stamp, python = folder / "stamp", str(folder / "bin" / "python")
    if stamp.exists() and stamp.read_text() == wanted.hexdigest():
        return python
    constraints = HOME / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], "venv")
    command = [python, "-m", "pip", "install", "--quiet", "--no-input", "--editable", f"{ROOT}[compression,spark]"]
    environment = {
        "PIP_CONSTRAINT": str(constraints),
        "PIP_BUILD_CONSTRAINT": str(constraints),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    _run([*command, "--requirement", str(asked)], "pip", **environment)
    stamp.write_text(wanted.hexdigest())
    return python


@_one_process
def classpath_of(folder: str) -> str:
    """The jars of a pom, as a class path."""
    pom = HERE / folder / "pom.xml"
    kept = HOME / f"{folder}.classpath"
    wanted = hashlib.sha256(pom.read_bytes()).hexdigest()

    if kept.exists():
        stamp, _, jars = kept.read_text().partition("\n")
        if stamp == wanted and all(Path(jar).exists() for jar in jars.split(":")):
            return jars

    if shutil.which("mvn") is None:
        raise CannotHaveError("Maven is not installed (Debian: apt-get install maven)")

    made = HOME / f"{folder}.made"
    options = f"{os.environ.get('MAVEN_OPTS', '')} -Djansi.mode=strip".strip()
    command = ["mvn", "--batch-mode", "--quiet", "--file", str(pom), "dependency:build-classpath"]
    _run([*command, "-DincludeScope=runtime", f"-Dmdep.outputFile={made}"], "Maven", MAVEN_OPTS=options)

    jars = made.read_text().strip()
    kept.write_text(f"{wanted}\n{jars}")
    return jars


def rocketmq_classpath() -> str:
    """The jars and classes of the interop tests' driver.

    Raises
    ------
    CannotHaveError
    """
    _tests()
    from interop import java_build

    if shutil.which("javac") is None:
        raise CannotHaveError("there is no JDK (Debian: apt-get install default-jdk-headless)")
    try:
        return java_build.classpath(java_build.NEWEST)
    except java_build.CannotBuild as error:
        raise CannotHaveError(_last_line(str(error))) from None


_CLASSPATHS: dict[str, Callable[[], str]] = {
    "kafka": lambda: classpath_of("spark-kafka"),
    "broker": lambda: classpath_of("broker"),
    "delta": lambda: classpath_of("spark-delta"),
    "rocketmq": rocketmq_classpath,
    "kahadb": lambda: classpath_of("kahadb"),
}


def _run(command: list[str], name: str, **environment: str) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        raise CannotHaveError(f"{name} did not end within {_PATIENCE_S} s") from None
    if done.returncode:
        raise CannotHaveError(f"{name} failed: {_last_line(done.stdout)}")


def _last_line(text: str) -> str:
    """What a program said about its failure: its first line with an error, else its last.

    Addresses and paths are left out: the text is published, and they are the machine's business.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line]
    return re.sub(r"\(?(https?:)?/\S+", "...", (errors or lines[-1:] or ["it said nothing"])[0])[:300]


def versions(found: Tools) -> dict[str, str]:
    """The versions of the contestants that take part."""
    wanted = {"kafka": ("spark-sql-kafka", "kafka-clients"), "broker": ("kafka_2",), "delta": ("delta-spark",)}
    wanted |= {"rocketmq": ("rocketmq-store",), "kahadb": ("activemq-kahadb",)}
    names: dict[str, str] = {}
    for tool, starts in wanted.items():
        for jar in found.classpaths.get(tool, "").split(":"):
            name, _, version = Path(jar).stem.rpartition("-")
            if name.startswith(starts):
                names[f"{name} (broker)" if tool == "broker" else name] = version
    return names
