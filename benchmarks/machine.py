"""The machine, the versions and the commit that a result was measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def facts(folder: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """What a reader of a result needs to know; `folder` is where the data were."""
    found = {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": _file_system(folder),
        "load at the start": f"{os.getloadavg()[0]:.1f}",
        "Java": java_version() or "none",
        "Python": platform.python_version(),
    }
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "commit": _commit()}


def java_version() -> str | None:
    """The version of the Java that is found first; None: there is none."""
    java = shutil.which("java")
    if java is None:
        return None
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    return said.split('"')[1] if '"' in said else None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    command = ["df", "--output=fstype", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return said[-1] if said else "unknown"


def _commit() -> str:
    """The last commit that changed what is measured."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words, "--", "store", "connector"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    name = git("log", "-1", "--format=%h")
    return f"{name}, with changes" if name and git("status", "--porcelain") else name or "unknown"
