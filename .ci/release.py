"""Checks what `make wheels` has built, and adds the list of parts and the checksums.

    make release     dist: source archive, wheels, their parts (CycloneDX), SHA256SUMS

Each Python from 3.11 to 3.14 that this machine has (below $PYENV_ROOT/versions, or on the PATH) gets a new environment
with the pinned requirements and the wheel for this machine, in which the command line puts, reads and verifies.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.contact import OrganizationalEntity
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parent.parent
NAME = "pyspark-messagestore"
PYTHONS = range(11, 15)


def main(folder: Path) -> None:
    """Do all steps; the first one that fails ends the run."""
    wheels = sorted(folder.glob("*.whl"))
    (archive,) = folder.glob("*.tar.gz")
    version = archive.name.removesuffix(".tar.gz").rpartition("-")[2]
    for path in wheels:
        if path.name.split("-")[1] != version:
            sys.exit(f"{path}: found another version than {version}. Run `make clean release`")

    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", archive, *wheels], check=True)

    found = dict(pythons())
    missing = [f"3.{minor}" for minor in PYTHONS if minor not in found]
    say("smoke test on " + (", ".join(f"{path} (3.{minor})" for minor, path in found.items()) or "no Python"))
    if missing:
        say("not on this machine: " + ", ".join(missing))
    if not found:
        sys.exit("found no Python from 3.11 to 3.14; at least one is needed. Install one, or set PYENV_ROOT")
    for minor, python in found.items():
        smoke(python, folder, version)
        say(f"3.{minor}: passed")

    parts = folder / f"{NAME}-{version}.cdx.json"
    parts.write_text(parts_of(version, [archive, *wheels]), encoding="utf-8")
    sums = [f"{sha256(path)}  {path.name}\n" for path in (*wheels, archive, parts)]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    for path in (*wheels, archive, parts, folder / "SHA256SUMS"):
        say(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def say(what: object) -> None:
    """Write a line at once: what pip and twine write comes in between."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def sha256(path: Path) -> str:
    """The checksum of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- the parts


def pins(title: str = "# extra: spark") -> list[str]:
    """The lines of constraints.txt up to a title, one for each requirement, with its hashes."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8").partition(f"{title}\n")[0]
    return [line for line in text.replace(" \\\n", "").splitlines() if line and not line.startswith("#")]


def parts_of(version: str, files: list[Path]) -> str:
    """The package, its files, what it brings of others, and what is installed with it and its extras for a cluster's
    host, as CycloneDX JSON.
    """
    bom = Bom()
    own = Component(
        name=NAME,
        version=version,
        type=ComponentType.LIBRARY,
        purl=PackageURL("pypi", None, NAME, version),
        bom_ref=NAME,
        supplier=OrganizationalEntity(name=NAME),
        licenses=[LicenseExpression("Apache-2.0")],
        components=list(map(file_part, files)),
    )
    bom.metadata.component = own
    for line in pins():
        name, _, pinned = line.split()[0].partition("==")
        expression = importlib.metadata.metadata(name).get("License-Expression")
        part = Component(
            name=name,
            version=pinned,
            type=ComponentType.LIBRARY,
            purl=PackageURL("pypi", None, re.sub(r"[-_.]+", "-", name.lower()), pinned),
            bom_ref=name,
            licenses=[LicenseExpression(expression)] if expression else [],
        )
        bom.components.add(part)
        bom.register_dependency(own, [part])
    brought = uplot()
    bom.components.add(brought)
    bom.register_dependency(own, [brought])
    return str(JsonV1Dot6(bom).output_as_string(indent=2)) + "\n"


def file_part(path: Path) -> Component:
    """A file with its hash."""
    digest = HashType(alg=HashAlgorithm.SHA_256, content=sha256(path))
    return Component(name=path.name, type=ComponentType.FILE, hashes=[digest])


def uplot() -> Component:
    """The charts of the dashboard, which are in the wheel: no requirement names them."""
    path = ROOT / "connector/pyspark_messagestore/dashboard/static/uplot/uPlot.iife.min.js"
    stated = re.match(r"/\*! \S+ \(v([\d.]+)\) \*/", path.read_text(encoding="utf-8"))
    if stated is None:
        sys.exit(f"{path}: found no version in its first line; allowed is one, for the list of parts")
    return Component(
        name="uplot",
        version=stated[1],
        type=ComponentType.LIBRARY,
        purl=PackageURL("npm", None, "uplot", stated[1]),
        bom_ref="uplot",
        licenses=[LicenseExpression("MIT")],
        components=[file_part(path)],
    )


# ---- the smoke test


def pythons() -> Iterator[tuple[int, Path]]:
    """The newest Python of each minor version that is here and can make environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for minor in PYTHONS:
        installed = [path for path in pyenv.glob(f"3.{minor}.*/bin/python") if re.fullmatch(r"[\d.]+", path.parts[-3])]
        installed.sort(key=lambda path: [int(part) for part in path.parts[-3].split(".")], reverse=True)
        on_path = shutil.which(f"python3.{minor}")
        for path in (*installed, *([Path(on_path)] if on_path else [])):
            code = "import ensurepip, sys, venv; print(sys.version_info[1])"
            done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
            if done.stdout.strip() == str(minor):
                yield minor, path
                break


def smoke(python: Path, folder: Path, version: str) -> None:
    """Install the wheel into a new environment, and use it in an empty folder."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as made:
        new, needed = Path(made, "new"), Path(made, "needed.txt")
        needed.write_text("\n".join(pins()) + "\n", encoding="utf-8")
        subprocess.run([python, "-m", "venv", new], check=True)
        pip = [new / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--require-hashes", "--requirement", needed], check=True)
        subprocess.run([*pip, "--no-index", "--find-links", folder, f"{NAME}=={version}"], check=True)

        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MESSAGE"))}

        def said(*words: str) -> str:
            command = [new / "bin" / words[0], *words[1:]]
            done = subprocess.run(command, cwd=made, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{python}: `{' '.join(words)}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
            return done.stdout

        said("python", "-m", "pip", "check")
        known = said("messagestore", "--version")
        for part in (version, commit[:12], "kernel compiled"):
            if part not in known:
                sys.exit(f"{python}: `messagestore --version` says {known.strip()!r}, without {part!r}")
        said("messagestore", "put", "store", "flights", "EWR to IAH", "--key", "N14228")
        for words in (("get", "store", "flights"), ("find", "store", "--key", "N14228")):
            if "EWR to IAH" not in said("messagestore", *words):
                sys.exit(f"{python}: `messagestore {words[0]}` does not show what was put")
        if "no fault found" not in said("messagestore", "verify", "store"):
            sys.exit(f"{python}: `messagestore verify` found a fault")
        if "rocketmq_messages_in_total" not in said("messagestore", "metrics", "store", "--once"):
            sys.exit(f"{python}: `messagestore metrics` does not show the store's figures")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
