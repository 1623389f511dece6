"""`messagestore doctor`: whether this machine can run the store and the Spark connector, and what to do if not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

import pyspark_messagestore
from messagestore import NotAStoreError, StorePermissionError
from messagestore.inspect import operator
from messagestore.inspect.host import FolderProbe, clock_is_synchronised, probe_folder
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, Json, looking, opened, path_of
from pyspark_messagestore.monitoring.health import FAULT, WARNING, facts_of, findings_of
from pyspark_messagestore.requirements import OLDEST_PYSPARK, OLDEST_PYTHON, installed_from
from pyspark_messagestore.words import quoted

PLACE = 360
PANEL = "Care"

OK = "ok"
_PACKAGES = ("numpy", "pyarrow", "isal")
_OLDEST_JAVA = 17
_TIMEOUT_S = 120.0
_FIRST_MS = 1_600_000_000_000  # a clock before 2020 was never set
_LOW_SIZE = 1 << 30

# What a worker of Spark does when it looks for data sources (pyspark/sql/worker/lookup_data_sources.py), and what it
# found. One package that cannot be imported hides the sources of all.
_LOOKUP = """
import importlib, json, pkgutil, sys
found = {"python": list(sys.version_info[:3]), "executable": sys.executable, "broken": {}, "sources": {}}
try:
    import pyspark
    found["pyspark"] = pyspark.__version__
    from pyspark.sql.datasource import DataSource
    for info in pkgutil.iter_modules():
        if info.name.startswith("pyspark_"):
            try:
                module = importlib.import_module(info.name)
                if hasattr(module, "DefaultSource") and issubclass(module.DefaultSource, DataSource):
                    found["sources"][module.DefaultSource.name()] = getattr(module, "__version__", None)
            except Exception as error:
                found["broken"][info.name] = type(error).__name__ + ": " + str(error)
    if "messagestore" in found["sources"]:
        try:
            importlib.import_module("pyspark_messagestore").MessageStoreDataSource
        except Exception as error:
            found["unusable"] = str(error)
except ImportError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Parameters
    ----------
    name : str
    result : str
        `ok`, `warning` or `fault`.
    found : str
        What is there.
    remedy : str
        What to do; empty if there is nothing to do.
    """

    name: str
    result: str
    found: str
    remedy: str = ""


def doctor(
    root: Annotated[
        str | None,
        typer.Argument(
            metavar="[ROOT]",
            envvar="MESSAGESTORE_ROOT",
            help="The store's root folder, or where it is to be. Its file system is examined.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check what the store and Spark need here: Python, packages, PySpark, Java, whether Spark's workers find the data
    source, the clock, and with ROOT its file system and locks. One file is made in the folder and removed again.
    """
    faults = 0
    for check in _checks(None if root is None else path_of(root)):
        faults += check.result == FAULT
        if as_json:
            out.json_line(asdict(check))
        else:
            out.line(f"{check.result:<8} {check.name:<15} {out.shown(check.found)}")
            if check.remedy:
                out.line(f"{'':<24} {out.shown(check.remedy)}")

    if faults:
        out.note(out.count_words(faults, "fault"))
        raise typer.Exit(FOUND_NOTHING)


def _checks(root: str | None) -> Iterator[Check]:
    yield _python()
    yield _packages()

    with out.waiting("asking Spark's Python and Java"):
        looked, java = _looked_up(), _java()

    yield _pyspark(looked)
    yield java
    yield _discovery(looked)
    yield _clock()

    if root is not None:
        yield from _folder(root)
        yield from _store(root)


# ---- this machine


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info < OLDEST_PYTHON:
        return Check("Python", FAULT, f"{version}, {sys.executable}", f"Python {oldest} or newer is needed.")
    return Check("Python", OK, f"{version}, {sys.executable}")


def _packages() -> Check:
    versions = {"pyspark-messagestore": pyspark_messagestore.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            command = f"Run `{sys.executable} -m pip install {name}`."
            return Check("packages", FAULT, f"{name} is not installed", command)
    return Check("packages", OK, ", ".join(f"{name} {version}" for name, version in versions.items()))


def _looked_up() -> dict[str, object]:
    """What the Python that Spark's workers would be finds."""
    python = os.environ.get("PYSPARK_PYTHON", "python3")
    path = shutil.which(python)
    if path is None:
        return {"executable": python, "error": "there is no such program"}
    try:
        done = subprocess.run([path, "-c", _LOOKUP], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return {"executable": path, "error": f"it could not be asked ({error})"}
    return dict(answer)


def _pyspark(looked: dict[str, object]) -> Check:
    name, oldest = "PySpark", ".".join(map(str, OLDEST_PYSPARK))
    version = looked.get("pyspark")
    if not isinstance(version, str):
        return Check(
            name,
            WARNING,
            f"none in {looked['executable']}; the store and this command line do without",
            "For Spark: activate the environment that has it, or set PYSPARK_PYTHON to its python; or run `pip install "
            f"'pyspark>={oldest}'`.",
        )

    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_PYSPARK:
        return Check(name, FAULT, version, f"The connector needs PySpark {oldest} or newer.")
    return Check(name, OK, version)


def _java() -> Check:
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")

    install = f"For Spark: install a full JRE {_OLDEST_JAVA} or newer (Debian: apt-get install default-jre-headless)"
    if not java or not os.access(java, os.X_OK):
        where = f"JAVA_HOME is {home}, and {java} cannot be run" if home else "none on the PATH"
        return Check("Java", WARNING, where, f"{install}, or set JAVA_HOME.")

    try:
        text, modules = _asked(java, "-version"), _asked(java, "--list-modules")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("Java", FAULT, f"{java} cannot be run ({error})", f"{install}.")

    match = re.search(r'version "(?:1\.)?(\d+)([^"]*)"', text)
    version = f"{match[1]}{match[2]}" if match else "unknown"
    if match is None or int(match[1]) < _OLDEST_JAVA:
        return Check("Java", FAULT, f"{version}, {java}", f"{install}.")

    # A runtime that was made with jlink may lack this module, without which Spark fails.
    if "jdk.incubator.vector" not in modules:
        return Check("Java", FAULT, f"{version}, {java}, without the module jdk.incubator.vector", f"{install}.")
    return Check("Java", OK, f"{version}, {java}")


def _asked(java: str, option: str) -> str:
    done = subprocess.run([java, option], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    return done.stdout + done.stderr


def _discovery(looked: dict[str, object]) -> Check:
    name, where = "discovery", f"{looked['executable']}"
    broken, sources = looked.get("broken"), looked.get("sources")

    if looked.get("error") or not isinstance(sources, dict) or not isinstance(broken, dict):
        return Check(
            name,
            WARNING,
            f"Spark's workers would run {where}: {looked.get('error') or 'no answer'}",
            "Set PYSPARK_PYTHON to the python of the environment that has PySpark and this package.",
        )

    if broken:
        package, error = next(iter(broken.items()))
        return Check(
            name,
            FAULT,
            f"{where} cannot import {package} ({error}), so Spark finds no Python data source at all",
            f"Repair or remove the package {package}.",
        )

    if "messagestore" not in sources:
        return Check(
            name,
            FAULT,
            f"{where} does not find the format messagestore",
            f"Run `{where} -m pip install {installed_from()}`, or set PYSPARK_PYTHON to {sys.executable}.",
        )

    # Discovery does not import what the format needs. Without this check, the first query would fail.
    if looked.get("unusable"):
        fault = f"{where} finds the format messagestore, but cannot import it"
        return Check(name, FAULT, fault, str(looked["unusable"]))

    if sources["messagestore"] != pyspark_messagestore.__version__:
        return Check(
            name,
            WARNING,
            f"{where} has version {sources['messagestore']}, and this is {pyspark_messagestore.__version__}",
            "Install the same version everywhere.",
        )
    return Check(name, OK, f"{where} finds the format messagestore")


def _clock() -> Check:
    now_ms = time.time_ns() // 1_000_000
    words = out.time_words(now_ms)
    if now_ms < _FIRST_MS:
        return Check("clock", FAULT, words, "Set the clock: store times and retention depend on it.")
    if clock_is_synchronised() is False:
        return Check(
            "clock",
            WARNING,
            f"{words}; the kernel says that no time service keeps it",
            "Run one (chrony, systemd-timesyncd): messages are found by their store time.",
        )
    return Check("clock", OK, words)


# ---- the store's folder


def _folder(root: str) -> Iterator[Check]:
    probe = probe_folder(root)
    where = f"{probe.file_system}, mounted on {probe.mount}"

    if probe.in_memory:
        yield Check(
            "file system", WARNING, f"{where}: it is in memory", "Everything there is gone after a reboot. Use a disk."
        )
    elif probe.on_network:
        yield Check(
            "file system",
            WARNING,
            f"{where}: it is on the network",
            "Only one host may write, and no broker may start while it does. A local disk is safer and faster.",
        )
    elif not probe.tried:
        yield Check("file system", WARNING, where, "Power cuts are tried on ext4 and XFS.")
    else:
        yield Check("file system", OK, where)

    # Locks and leases are tried with a file, and none can be made here.
    if probe.writable:
        yield Check(
            "permission",
            FAULT,
            f"{probe.folder} cannot be written by uid {os.geteuid()}: {probe.writable}",
            _remedy(root, probe),
        )
        return

    if probe.full or not probe.free_size:
        room = f"{out.size_words(probe.free_size)}{': ' if probe.full else ''}{probe.full}"
        yield Check("room", FAULT, room, f"Nothing can be put. Make room on {probe.mount}.")
        if probe.full:
            return
    elif probe.free_size < _LOW_SIZE:
        yield Check("room", WARNING, out.size_words(probe.free_size), "A segment has 1 GiB by default. Make room.")
    else:
        yield Check("room", OK, out.size_words(probe.free_size))

    if probe.locks:
        yield Check("locks", FAULT, probe.locks, "Two writers are not kept apart there. Use ext4, XFS, btrfs or tmpfs.")
    else:
        yield Check("locks", OK, "two writers are kept apart")

    if probe.leases:
        yield Check(
            "leases",
            WARNING,
            f"not given: {probe.leases}",
            "Do not start a broker while writers may run: RocketMQ reads the store before it takes its lock.",
        )
    else:
        yield Check("leases", OK, "a broker that starts waits for writers")


def _remedy(root: str, probe: FolderProbe) -> str:
    """What makes the store's folder writable. Nothing that it says changes a folder that is not the store's."""
    path, user = os.path.abspath(root), os.geteuid()
    words = quoted(path)
    if probe.read_only:
        return f"{probe.mount} is mounted read-only. Mount it for writing, or choose a folder elsewhere."
    if probe.folder != path:
        return f"Run `sudo install -d -o {user} -m 700 {words}`, which makes the folder, or choose one elsewhere."
    try:
        holds_store = operator.holds_store(path)
    except StorePermissionError:
        return "This user may not look into it. Work as its owner, or give a folder elsewhere."
    if holds_store:
        return f"Run `sudo chown -R {user} {words}`, or work as its owner. Reading may still be possible."
    return "It is no store. Give a folder for the store alone, which its user owns, or work as the owner of this one."


def _store(root: str) -> Iterator[Check]:
    try:
        if not operator.holds_store(root):
            yield Check("store", OK, f"none at {os.path.abspath(root)} yet")
            return

        status = operator.status(root, looking())
        with opened(root) as store:
            findings = findings_of(facts_of(store))
    except (NotAStoreError, StorePermissionError) as error:
        yield Check("store", FAULT, str(error))
        return

    held = status["heldBy"]
    holder = held["broker"] or (f"a writer, {held['writer']}" if held["writer"] else "nobody")
    yield Check("store", OK, f"held by {holder}, left {status['left']}, {status['messages']:,} messages")
    for finding in findings:
        yield Check(finding.rule, finding.severity, finding.sentence, finding.remedy)
