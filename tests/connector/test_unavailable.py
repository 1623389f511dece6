"""What Spark's discovery finds: a class that imports nothing, and says why where the data source cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOOKUP = """
import sys
LOST = {lost!r}
for name in LOST:
    sys.modules[name] = None
import pyspark_messagestore as found
from pyspark.sql.datasource import DataSource
assert hasattr(found, "DefaultSource") and issubclass(found.DefaultSource, DataSource)
assert found.DefaultSource.name() == "messagestore"
module, _, name = found.DefaultSource.__module__, None, found.DefaultSource.__qualname__
__import__(module)
assert getattr(sys.modules[module], name) is found.DefaultSource, "it is pickled by its name"
for make in (lambda: found.DefaultSource(options={{}}), lambda: found.MessageStoreSink, lambda: found.MessageStoreDataSource):
    try:
        make()
    except ImportError as error:
        print(error)
"""


def said(lost: tuple[str, ...] = (), path: Path | None = None) -> str:
    """What is raised, three times the same: by the stub, for MessageStoreSink, for MessageStoreDataSource."""
    code = (f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else "") + LOOKUP.format(lost=lost)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert len(set(lines)) == 1
    assert lines[0].startswith("format messagestore: ")
    return lines[0]


def old_pyspark(folder: Path, version: str) -> Path:
    """A PySpark with data sources in Python and without the Arrow writer of streams, as 4.0 is."""
    package = folder / "pyspark"
    (package / "sql").mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\nclass TaskContext: pass\n")
    (package / "sql" / "__init__.py").write_text("")
    names = (
        "DataSource DataSourceReader DataSourceStreamReader DataSourceStreamWriter DataSourceWriter WriterCommitMessage"
    )
    classes = "".join(f"class {name}:\n    def __init__(self, options): pass\n" for name in names.split())
    (package / "sql" / "datasource.py").write_text(classes)
    (package / "sql" / "types.py").write_text("class StructType: pass\n")
    return folder


def test_discovery_imports_neither_arrow_nor_the_store() -> None:
    """It runs before the first query of every session, also of those that never use the store."""
    pytest.importorskip("pyspark")
    code = (
        "import sys, pyspark.sql.datasource; before = set(sys.modules)\n"
        "from pyspark_messagestore import DefaultSource\n"
        "print(DefaultSource.name(), *sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "messagestore",
        "pyspark_messagestore",
        "pyspark_messagestore.discovery",
        "pyspark_messagestore.requirements",
    ]


@pytest.mark.parametrize("version", ["4.0.5", "4.1.0", "4.1.0.dev3"])
def test_an_old_pyspark_is_named_instead_of_no_data_source_found(tmp_path: Path, version: str) -> None:
    """Discovery failed, and the user saw DATA_SOURCE_NOT_FOUND under a page of Java."""
    words = said(path=old_pyspark(tmp_path, version))
    assert words.startswith(f"format messagestore: found PySpark {version}, but it needs PySpark 4.2 or newer. Run ")
    assert f"`{sys.executable} -m pip install --upgrade 'pyspark>=4.2'`" in words


@pytest.mark.parametrize("package", ["numpy", "pyarrow", "isal"])
def test_a_package_that_is_missing_is_named(package: str) -> None:
    """Copied to a cluster without what it requires."""
    pytest.importorskip("pyspark")
    words = said(lost=(package,))
    assert words.endswith(
        f"the package {package} is not installed. Run `{sys.executable} -m pip install --upgrade '{package}'`"
    )


def test_the_store_that_is_missing_is_named() -> None:
    """Only the folder of the connector was copied. Nothing of that name is to be installed from elsewhere."""
    pytest.importorskip("pyspark")
    words = said(lost=("messagestore",))
    assert "Install pyspark-messagestore again" in words
    assert "pip" not in words


def test_packages_that_do_not_fit_together_are_reported(tmp_path: Path) -> None:
    """A binary package that was built for another numpy raises what it likes while it is imported."""
    pytest.importorskip("pyspark")
    (tmp_path / "pyarrow.py").write_text("raise ValueError('numpy.dtype size changed')\n")
    assert "do not work together (ValueError: numpy.dtype size changed)" in said(path=tmp_path)


@pytest.mark.parametrize("package", ["lz4", "zstandard"])
def test_the_compression_extra_is_not_needed(package: str) -> None:
    """Bodies are given as they are stored: nothing of ours imports a compressor."""
    pytest.importorskip("pyspark")
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from pyspark_messagestore import DefaultSource, MessageStoreSink\n"
        "print(type(DefaultSource(options={})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "MessageStoreDataSource\n"


def test_the_sink_without_pyspark_says_so() -> None:
    code = "import sys; sys.modules['pyspark'] = None\nfrom pyspark_messagestore import MessageStoreSink"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"format messagestore: found no PySpark in {sys.executable}. Run `" in done.stderr.splitlines()[-1]
