"""Compiles the kernel: `python store/kernel/compile.py`, by the interpreter that will use it (or a newer one).

The result is one file for all CPython versions from 3.11 on (the limited API). The build hook of the package calls
this, and so do `make setup` and the fault harness, which compiles it with sanitizers and with planted bugs. `CC`,
`CFLAGS` and `LDFLAGS` of the environment are used. With a `CC` for another processor, Python's headers are still those
of this one: the limited API uses nothing in which they differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
TARGET = SOURCES.parent / "messagestore" / "format" / "_kernel.abi3.so"
"""Where the package looks for it."""
PLATFORMS = ("linux-x86_64", "linux-aarch64")
"""The platforms for each of which the other one can compile."""
FLAGS = ("-std=c11", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra")
HARDENED = ("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
LINKED = ("-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack")
"""What ends the process where a mistake of ours would write past a buffer, and what makes the table of addresses
read-only (full RELRO)."""


def compiler() -> list[str]:
    """The command of the C compiler: `CC`, or the one that Python was built with, or `cc`; empty if there is none."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"):
        words = shlex.split(command or "")
        if words and shutil.which(words[0]):
            return words
    return []


def platform() -> str:
    """The platform that the compiler makes code for: this one, or the other one of `PLATFORMS`."""
    own = sysconfig.get_platform()
    found = f"linux-{_machine().partition('-')[0]}"
    return found if own in PLATFORMS and found in PLATFORMS else own


def _machine() -> str:
    """What the compiler says it makes code for, such as `aarch64-linux-gnu`."""
    command = [*compiler(), "-dumpmachine"]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout.strip()


def why_not() -> str:
    """Why the kernel cannot be compiled here; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"it is made for Linux, and this is {sys.platform}"
    if sys.byteorder != "little":
        return "it is made for little-endian processors"
    if not compiler():
        return "there is no C compiler (Debian: apt-get install gcc)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "the headers of Python are missing (Debian: apt-get install python3-dev)"
    return ""


def compiled(
    target: Path = TARGET, *, sources: Path = SOURCES, flags: Sequence[str] = (), objects: Path | None = None
) -> Path:
    """Compile the kernel.

    Parameters
    ----------
    target : Path
        The file to make. It is replaced in one step, so that a process that has loaded the old one keeps it.
    sources : Path
        The folder with the `.c` files.
    flags : sequence of str
        More flags for the compiler.
    objects : Path | None
        A folder that keeps the object files for the next call, which compiles only what differs: the harness makes many
        kernels that differ in one line.

    Raises
    ------
    OSError
        There is no compiler, or it failed; the message has what it said.
    """
    new = target.with_name(f".{target.name}.{os.getpid()}")
    include = ["-I", str(sources), "-I", sysconfig.get_path("include")]
    own, linked = (shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS"))
    with tempfile.TemporaryDirectory() as folder:
        if platform() != sysconfig.get_platform():
            include += ["-I", _with_pyconfig(Path(folder))]
        words = [*compiler(), *FLAGS, *HARDENED, *own, *flags]
        files = sorted(sources.glob("*.c"))
        if objects is not None:
            files = [_object(path, words, include, objects) for path in files]
        _run([*words, *include, "-shared", "-o", str(new), *map(str, files), *LINKED, *linked], new, target)
    return target


def _object(source: Path, words: Sequence[str], include: Sequence[str], objects: Path) -> Path:
    """The object file of a source: the one that is there if it was made from the same texts with the same flags."""
    texts = [repr(words).encode(), *(path.read_bytes() for path in [source, *sorted(source.parent.glob("*.h"))])]
    target = objects / f"{source.stem}-{hashlib.sha256(b''.join(texts)).hexdigest()}.o"
    if not target.exists():
        new = target.with_name(f".{target.name}.{os.getpid()}")
        _run([*words, *include, "-c", "-o", str(new), str(source)], new, target)
    return target


def _with_pyconfig(folder: Path) -> str:
    """A folder where Debian's `pyconfig.h` looks for that of the other processor, and finds this one's."""
    include = Path(sysconfig.get_path("include"))
    link = folder / _machine() / include.name
    link.parent.mkdir()
    link.symlink_to(include.parent / (sysconfig.get_config_var("MULTIARCH") or "") / include.name)
    return str(folder)


def _run(command: Sequence[str], new: Path, target: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise OSError(f"{shlex.join(command)} failed:\n{done.stderr}")
        if done.stderr:
            sys.stderr.write(done.stderr)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def main() -> None:
    """Compile the kernel for this checkout, or say why it cannot be had; a compiler that fails is an error."""
    parser = argparse.ArgumentParser(description="Compiles the kernel of messagestore.")
    parser.add_argument("--target", type=Path, default=TARGET, help="the file to make")
    parser.add_argument("flags", nargs="*", help="more flags for the compiler, behind --")
    chosen = parser.parse_args()
    if reason := why_not():
        sys.stderr.write(f"==> the kernel is not compiled: {reason}. The store works without it, more slowly.\n")
        return
    compiled(chosen.target, flags=chosen.flags)


if __name__ == "__main__":
    main()
