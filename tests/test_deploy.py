"""What deploy/ ships is consistent: commands parse, files exist, units pass systemd's own checks where it is installed."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from pyspark_messagestore.cli.main import app
from readme_blocks import README

ROOT = README.parent
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
CONTAINER = ROOT / "deploy" / "container"
PROGRAM = "/opt/messagestore/bin/messagestore"
LOOSEST = 20
"""Tenths: the exposure that `systemd-analyze security` may find, of 100."""


def parsed(words: list[str]) -> str:
    """Let the program's own parser read a command, without running it; its name."""
    group = typer.main.get_command(app)
    with group.make_context("messagestore", list(words), resilient_parsing=False) as context:
        name, command, rest = group.resolve_command(context, context._protected_args + context.args)  # type: ignore[attr-defined]
        while hasattr(command, "commands"):
            inner = command.make_context(name, rest, parent=context)
            name, command, rest = command.resolve_command(inner, inner._protected_args + inner.args)
        command.make_context(name, rest, parent=context).close()
    return str(name)


def started(unit: Path) -> list[list[str]]:
    text = unit.read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_exists(unit: Path) -> None:
    for program, *words in started(unit):
        assert program == PROGRAM
        parsed([word.replace("%i", "orders") for word in words if word != "$OPTIONS"])


def test_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed(["deliver", "/data", "--no-such-option"])


def test_what_is_added_to_the_unit_is_options_of_the_command() -> None:
    """systemd splits $OPTIONS at blanks outside of quotes."""
    (unit,) = (unit for unit in UNITS if "run@" in unit.name)
    ((_, *words),) = started(unit)
    assert words[-1] == "$OPTIONS"
    parsed([*words[:-1], "--check-command", "/usr/local/bin/was-paid", "--check-timeout", "5s"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_a_unit_and_finds_it_hardened(unit: Path, tmp_path: Path) -> None:
    """`verify` wants the program to exist, so another one stands for it."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze (Debian: apt-get install systemd)")
    there = tmp_path / unit.name
    there.write_text(unit.read_text(encoding="utf-8").replace(PROGRAM, sys.executable), encoding="utf-8")
    timer = unit.with_suffix(".timer")
    if timer.exists():
        shutil.copy(timer, tmp_path)
    for path in sorted(tmp_path.iterdir()):
        done = subprocess.run([analyze, "verify", "--man=no", path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    command = [analyze, "security", "--offline=true", f"--threshold={LOOSEST}", there]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_hides_nothing_of_proc(unit: Path) -> None:
    """A process that the store cannot see counts as dead: its staged files would be deleted while it writes them."""
    text = unit.read_text(encoding="utf-8")
    assert not re.search(r"^(ProtectProc|ProcSubset|PrivateUsers|PrivatePIDs)=", text, re.MULTILINE)


def instructions() -> list[tuple[str, str]]:
    text = (CONTAINER / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_what_the_containerfile_copies_exists() -> None:
    found = instructions()
    assert {word for word, _ in found} == {
        "FROM",
        "RUN",
        "COPY",
        "ARG",
        "WORKDIR",
        "ENV",
        "USER",
        "VOLUME",
        "ENTRYPOINT",
        "CMD",
    }
    copies = [rest.split()[:-1] for word, rest in found if word == "COPY" and not rest.startswith("--from=")]
    copied = {name for names in copies for name in names}
    for name in copied:
        assert (ROOT / name).exists(), name
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "store", "connector"} <= copied
    assert [rest for word, rest in found if word == "USER"] == ["messagestore"]


def test_the_containerfile_finds_its_sections_of_the_pins() -> None:
    """It cuts constraints.txt at two titles."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    needed = lines[: lines.index("# extra: spark")]
    names = {line.partition("==")[0] for line in needed if re.match(r"[\w.-]+==", line)}
    assert {"numpy", "pyarrow", "isal", "typer", "rich", "prometheus_client", "cheroot"} <= {
        name.lower().replace("-", "_") for name in names
    }
    assert "pyspark" not in names

    (title,) = (number for number, line in enumerate(lines) if line.startswith("# to build"))
    there = {line.partition("==")[0] for line in lines[title:] if re.match(r"[\w.-]+==", line)}
    builds = (importlib.metadata.requires("hatchling") or []) + ["hatchling"]
    wanted = {re.split(r"[^\w.-]", each)[0] for each in builds if "python_version" not in each}
    assert wanted <= there, "pip builds the wheel with nothing else"


def test_an_image_may_know_its_commit() -> None:
    """`messagestore --version` in a container said that the commit is unknown: there is no git where it is built."""
    (step,) = [rest for word, rest in instructions() if word == "RUN" and "pip wheel" in rest]
    written = step.index("connector/pyspark_messagestore/commit.txt")
    assert step.index('"$COMMIT"') < written < step.index("pip wheel")
    compose = yaml.safe_load((CONTAINER / "compose.yaml").read_text(encoding="utf-8"))
    assert compose["services"]["store"]["build"]["args"] == {"COMMIT": "${COMMIT:-}"}


def test_the_services_of_the_compose_file_start_commands_that_exist() -> None:
    compose = yaml.safe_load((CONTAINER / "compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    assert set(services) == {"store", "run", "job"}
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert (CONTAINER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        if name == "job":
            continue
        parsed(service["command"])
        _, program, *words = service.get("healthcheck", {}).get("test", ["CMD", "messagestore", "--help"])
        if words != ["--help"]:
            assert program == "messagestore"
            parsed(words)
    for volume in services["job"]["volumes"]:
        source = volume.partition(":")[0]
        assert source in compose["volumes"] or (CONTAINER / source).is_file()


def test_the_demo_job_works_through_what_it_puts(tmp_path: Path) -> None:
    """Twice: the second run has only what is new."""
    command = [sys.executable, CONTAINER / "job.py", tmp_path / "store"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert sorted(line.split(maxsplit=2)[2] for line in done.stdout.splitlines()) == [
            f"order {number}" for number in range(10)
        ]
