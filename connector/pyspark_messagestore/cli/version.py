"""What is installed: the version, the commit that it was built from, and whether the kernel is compiled."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pyspark_messagestore
from messagestore.inspect import host

_SHOWN = 12


def installed() -> str:
    """One line for `messagestore --version`."""
    why_not = host.kernel_missing()
    kernel = "compiled" if why_not is None else f"not compiled ({why_not})"
    return f"messagestore {pyspark_messagestore.__version__}, commit {commit()}, kernel {kernel}"


def commit() -> str:
    """The commit that the build has written down, or that of the checkout that this is."""
    package = Path(pyspark_messagestore.__file__).parent
    built = package / "commit.txt"
    if built.exists():
        return _shown(built.read_text(encoding="utf-8"))

    checkout = package.parent.parent
    if not (checkout / ".git").exists() or not (checkout / "pyproject.toml").exists():
        return "unknown"
    git = ["git", "-C", str(checkout)]
    try:
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False).returncode
    except FileNotFoundError:
        return "unknown (no git)"
    except subprocess.CalledProcessError as error:
        return f"unknown ({error.stderr.strip().splitlines()[-1]})"
    return _shown(found) + (" with changes" if changed else "")


def _shown(text: str) -> str:
    name, _, rest = text.strip().partition(" ")
    return f"{name[:_SHOWN]} {rest}".strip()
