"""What the build makes of the kernel: a wheel with it, a wheel without it, an editable install that is plain paths."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import types
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import readme_blocks
from messagestore.format import kernel

ROOT = Path(__file__).resolve().parent.parent
BUILT = "messagestore/format/_kernel.abi3.so"

needs_kernel = pytest.mark.skipif(kernel.lib is None, reason=f"no compiled kernel: {kernel.why_not}")


GLIBC = (2, 17)
"""The oldest glibc on which a wheel runs."""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the checkout's files of this moment."""
    target = tmp_path_factory.mktemp("sdist")
    hatch(ROOT, target, "-t", "sdist")
    [path] = target.iterdir()
    return path


def unpacked(archive: Path, target: Path) -> Path:
    """The folder that an sdist holds; no compiled kernel is in it."""
    with tarfile.open(archive) as packed:
        packed.extractall(target, filter="data")
    [folder] = target.glob("pyspark_messagestore-*")
    assert not list(folder.rglob("*.so"))
    return folder


@pytest.fixture
def checkout(archive: Path, tmp_path: Path) -> Path:
    """What an sdist holds, to be changed and built in."""
    return unpacked(archive, tmp_path)


@dataclass(frozen=True)
class Built:
    """A wheel, and how it came about."""

    path: Path
    tag: str
    files: set[str]
    said: str


@pytest.fixture(scope="module")
def with_kernel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel of an sdist, with its compiled kernel."""
    folder = tmp_path_factory.mktemp("with-kernel")
    found = wheel(unpacked(archive, folder), folder / "wheel")
    return Built(next((folder / "wheel").iterdir()), *found)


@pytest.fixture(scope="module")
def without_kernel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel of an sdist, without the kernel on purpose."""
    folder = tmp_path_factory.mktemp("without-kernel")
    found = wheel(unpacked(archive, folder), folder / "wheel", **{kernel.VARIABLE: kernel.OFF})
    return Built(next((folder / "wheel").iterdir()), *found)


def test_an_older_python_is_refused_in_one_sentence_before_the_compiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install .` with Python 3.10 ended in 836 lines of the compiler's errors."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == ">=" + ".".join(
        map(str, hook.OLDEST_PYTHON)
    )
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    monkeypatch.setattr(importlib.util, "spec_from_file_location", lambda *_: pytest.fail("the compiler is asked for"))
    said = []

    def abort(text: str) -> None:
        said.append(text)
        raise SystemExit(1)

    app = types.SimpleNamespace(abort=abort)
    with pytest.raises(SystemExit):
        hook.KernelBuildHook.initialize(
            types.SimpleNamespace(target_name="wheel", root=str(ROOT), app=app), "standard", {}
        )
    (text,) = said
    assert text.startswith("pyspark-messagestore needs Python 3.11 or newer, and ")
    assert "is Python 3.10.13. Run pip with a newer one." in text


@needs_kernel
def test_the_kernel_is_hardened() -> None:
    """A stack protector, FORTIFY, full RELRO (the table of addresses is bound at once and then read-only), no executable stack."""
    path = Path(kernel.lib.__file__)
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"  # 64 bits, little-endian
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", data, table + number * size) for number in range(count)]
    segments = {header[0]: header for header in headers}
    assert 0x6474E552 in segments  # PT_GNU_RELRO
    assert not segments[0x6474E551][1] & 1  # PT_GNU_STACK, executable
    _, _, start, _, _, length, _, _ = segments[2]  # PT_DYNAMIC
    dynamic = dict(struct.iter_unpack("<QQ", data[start : start + length]))
    assert dynamic.get(30, 0) & 8  # DT_FLAGS: DF_BIND_NOW
    assert dynamic.get(0x6FFFFFFB, 0) & 1  # DT_FLAGS_1: DF_1_NOW
    assert b"\0__stack_chk_fail\0" in data
    assert b"_chk\0" in data.replace(b"__stack_chk_fail", b"")


COMMIT = "pyspark_messagestore/commit.txt"


def test_a_checkout_hands_its_commit_on_to_what_is_built(checkout: Path, without_kernel: Built) -> None:
    """Through a source archive, which has no .git, into a wheel; nothing is left behind in the checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: there is no commit to hand on")
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    packed = (checkout / "connector" / COMMIT).read_text()
    assert packed.split()[0] == git.stdout.strip()
    assert not (ROOT / "connector" / COMMIT).exists()
    assert COMMIT in without_kernel.files


def test_a_folder_without_a_commit_is_built_without_one(checkout: Path, tmp_path: Path) -> None:
    (checkout / "connector" / COMMIT).unlink(missing_ok=True)
    _, files, _ = wheel(checkout, tmp_path / "wheel", MESSAGESTORE_KERNEL="off")
    assert COMMIT not in files
    code = "from pyspark_messagestore.cli import version; print(version.commit())"
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'connector'}{os.pathsep}{checkout / 'store'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "unknown\n"


def hatch(folder: Path, target: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", target, *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != kernel.VARIABLE} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def wheel(folder: Path, target: Path, **environment: str) -> tuple[str, set[str], str]:
    """The tag of the wheel, its files, and what the build said."""
    said = hatch(folder, target, "-t", "wheel", **environment)
    [path] = target.glob("*.whl")
    with zipfile.ZipFile(path) as packed:
        return path.name.split("-", 2)[2], set(packed.namelist()), said


@needs_kernel
def test_an_sdist_builds_a_wheel_with_the_kernel_for_every_python_from_3_11(with_kernel, checkout, tmp_path):
    assert with_kernel.tag.startswith("cp311-abi3-linux_") and BUILT in with_kernel.files
    with zipfile.ZipFile(with_kernel.path) as packed:
        built = packed.extract(BUILT, tmp_path)
    assert kernel.load(built).crc32(b"123456789") == 0xCBF43926
    assert not any(name.endswith((".c", ".h", ".md")) for name in with_kernel.files)
    assert (checkout / "store" / "messagestore" / "writer" / "README.md").is_file()


def test_without_a_compiler_the_wheel_is_one_without_the_kernel(checkout, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sh", "uname"):
        (programs / name).symlink_to(shutil.which(name))
    tag, files, said = wheel(checkout, tmp_path / "wheel", PATH=str(programs), CC="")
    assert tag == "py3-none-any.whl" and BUILT not in files
    assert "The kernel is not compiled: there is no C compiler" in said


def installed(path: Path, folder: Path) -> Path:
    """The Python of a new environment with a wheel in it. It finds what the wheel requires where this Python has it."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    done = subprocess.run([*pip, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")  # no .pth file below it counts
    return python


def first_commands(python: Path, folder: Path) -> str:
    """Run what README shows without Spark, in an empty folder, and check what it prints; where the package lies."""
    folder.mkdir()
    shown = [block for block in readme_blocks.blocks() if block.language in ("python", "console")]
    for block in (each for each in shown if not each.needs_spark):
        said = readme_blocks.run(block, folder, str(python))
        assert block.printed in (None, said)
    where = "import messagestore, pyspark_messagestore; print(messagestore.__file__, pyspark_messagestore.__file__)"
    return subprocess.run([python, "-c", where], cwd=folder, capture_output=True, text=True, check=True).stdout


def repaired(made: Path, target: Path) -> Path:
    """A wheel with the tag of the oldest glibc that it runs on, which must be old enough."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(target), str(made)]
    done = subprocess.run(command, env={**os.environ, "PATH": programs}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = target.iterdir()
    tags = [tuple(map(int, found)) for found in re.findall(r"manylinux_(\d+)_(\d+)_", path.name)]
    assert tags
    assert min(tags) <= GLIBC, path.name
    return path


@needs_kernel
def test_a_wheel_with_the_kernel_fits_every_linux_and_does_what_readme_says(with_kernel, tmp_path):
    """auditwheel finds no library but glibc, and no symbol that an old one lacks."""
    path = repaired(with_kernel.path, tmp_path / "dist")
    where = first_commands(installed(path, tmp_path / "venv"), tmp_path / "empty")
    assert where.count(str(tmp_path / "venv")) == 2


def test_a_wheel_without_the_kernel_does_what_readme_says(without_kernel, tmp_path):
    where = first_commands(installed(without_kernel.path, tmp_path / "venv"), tmp_path / "empty")
    assert where.count(str(tmp_path / "venv")) == 2


ARM = "aarch64-linux-gnu-gcc"
needs_arm = pytest.mark.skipif(
    shutil.which(ARM) is None, reason=f"no {ARM} (Debian: apt-get install gcc-aarch64-linux-gnu)"
)


def processor_of(path: Path) -> int:
    """The number that an ELF file gives its processor: 62 is x86-64, 183 is AArch64."""
    head = path.read_bytes()[:20]
    assert head[:4] == b"\x7fELF"
    return int.from_bytes(head[18:20], "little")


@needs_arm
def test_the_kernel_compiles_for_arm(tmp_path):
    """Without a warning. The headers are this Python's, which the limited API and equal sizes of types allow."""
    command = [sys.executable, str(ROOT / "store" / "kernel" / "compile.py"), "--target", str(tmp_path / "kernel.so")]
    done = subprocess.run(
        [*command, "--", "-Werror"], env={**os.environ, "CC": ARM}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert processor_of(tmp_path / "kernel.so") == 183


@needs_arm
def test_a_compiler_for_another_processor_makes_a_wheel_for_it(checkout, tmp_path):
    """It had the tag of this processor, and pip installed a kernel that could not be loaded."""
    tag, files, _ = wheel(checkout, tmp_path / "wheel", CC=ARM)
    assert tag == "cp311-abi3-linux_aarch64.whl" and BUILT in files
    [made] = (tmp_path / "wheel").iterdir()
    path = repaired(made, tmp_path / "dist")
    assert path.name.endswith("_aarch64.whl")
    with zipfile.ZipFile(path) as packed:
        assert processor_of(Path(packed.extract(BUILT, tmp_path))) == 183


def test_the_kernel_can_be_left_out_on_purpose(without_kernel):
    assert without_kernel.tag == "py3-none-any.whl" and BUILT not in without_kernel.files
    assert "MESSAGESTORE_KERNEL=off" in without_kernel.said


@needs_kernel
def test_a_compiler_that_fails_fails_the_build_with_its_words(checkout, tmp_path):
    with open(checkout / "store" / "kernel" / "module.c", "a") as source:
        source.write("#error planted\n")
    with pytest.raises(AssertionError, match="error: #error planted"):
        wheel(checkout, tmp_path / "wheel")
    assert not list(checkout.rglob("*.so*"))


def test_an_editable_install_is_plain_paths(checkout, tmp_path):
    """Spark's discovery lists the folders of `sys.path`; an import hook it cannot list."""
    hatch(checkout, tmp_path / "wheel", "-t", "wheel:editable")
    with zipfile.ZipFile(next((tmp_path / "wheel").iterdir())) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".pth")]
        lines = packed.read(name).decode().split()
    assert {Path(line).name for line in lines} == {"store", "connector"}
    assert (checkout / "store" / BUILT).is_file() == bool(shutil.which("cc"))
