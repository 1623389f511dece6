"""What the data source requires of the Python that Spark runs, and one sentence that says which part is missing.

This module imports neither PySpark nor the store, so that it can say what is wrong wherever Python runs.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterator

OLDEST_PYTHON = (3, 11)
OLDEST_PYSPARK = (4, 2)
_NAME = "pyspark-messagestore"


def missing() -> str:
    """Why the data source cannot be imported in this process, and what to do about it.

    Python is checked first, then PySpark, then our own modules and the packages that they need.
    """
    return "format messagestore: " + next(
        _faults(), "it was installed after this process began. Start the process again"
    )


def _faults() -> Iterator[str]:
    if sys.version_info < OLDEST_PYTHON:
        yield (
            f"found Python {_dotted(sys.version_info[:3])} ({sys.executable}), but it needs Python "
            f"{_dotted(OLDEST_PYTHON)} or newer. Set PYSPARK_PYTHON to the path of a newer one"
        )

    try:
        pyspark = importlib.import_module("pyspark")
    except ImportError:
        yield f"found no PySpark in {sys.executable}. Run {_pip('pyspark>=' + _dotted(OLDEST_PYSPARK))}"
        return

    version = pyspark.__version__
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST_PYSPARK:
        yield (
            f"found PySpark {version}, but it needs PySpark {_dotted(OLDEST_PYSPARK)} or newer. Run "
            f"{_pip('pyspark>=' + _dotted(OLDEST_PYSPARK))}, or choose a newer Spark where a cluster brings its own"
        )

    for name in ("messagestore", "pyspark_messagestore.datasource", "pyspark_messagestore.sink.writers"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            lost = (error.name or name).partition(".")[0]
            if lost in ("messagestore", "pyspark_messagestore"):
                yield f"a part of it is missing ({error}). Install pyspark-messagestore again for {sys.executable}"
            else:
                yield f"the package {lost} is not installed. Run {_pip(lost)}"
        except Exception as error:  # noqa: BLE001 # a broken package may raise anything; this is where it is reported
            yield (
                f"the packages of {sys.executable} do not work together ({type(error).__name__}: {error}). Install "
                "pyspark-messagestore into a new virtual environment"
            )


def installed_from() -> str:
    """The argument by which pip installs this package again: the checkout or the wheel that it came from.

    No index has the package. Whoever took its name there could run any code, so no command has the name alone.
    """
    import importlib.metadata
    import json
    import urllib.parse

    try:
        origin = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
        url = str(json.loads(origin or "{}").get("url", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        url = ""
    if not url.startswith("file:"):
        return "PATH (of the checkout or the wheel)"
    return shlex.quote(urllib.parse.unquote(urllib.parse.urlparse(url).path))


def install_extra(extra: str) -> str:
    """The command that installs what an extra of this package consists of."""
    import importlib.metadata
    import re

    try:
        requirements = importlib.metadata.requires(_NAME) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    own = [each.partition(";") for each in requirements]
    names = [name.strip() for name, _, marker in own if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    words = " ".join(map(shlex.quote, names or [f"{installed_from()}[{extra}]"]))
    return f"`{sys.executable} -m pip install {words}`"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _pip(requirement: str) -> str:
    return f"`{sys.executable} -m pip install --upgrade '{requirement}'`"
