"""The examples in the docstrings of the public names run, and print what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import messagestore

CLASSES = [kind for kind in (getattr(messagestore, name) for name in messagestore.__all__) if isinstance(kind, type)]
MODULES = sorted({"messagestore", *(kind.__module__ for kind in CLASSES)})
WITH_EXAMPLES = (
    "BatchRequest",
    "BatchResult",
    "GetMessageResult",
    "Message",
    "MessageBatch",
    "MessageColumns",
    "MessageExt",
    "MessageIllegalError",
    "MessageStore",
    "PutMessageResult",
    "ReadOnlyStore",
    "RecoveryReport",
    "StoreConfig",
)
"""What a user constructs or gets; the other public names are errors and statuses."""


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    return sorted(found, key=lambda test: test.name)


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name.removeprefix("messagestore."))
def test_an_example_prints_what_it_shows(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each docstring is pasted into a fresh Python, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    example.globs = {}
    shown: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=shown.append)
    assert results.failed == 0, "".join(shown)
    assert results.attempted


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_a_public_class_has_an_example(name: str) -> None:
    kind = getattr(messagestore, name)
    own = f"{kind.__module__}.{kind.__qualname__}"
    assert any(test.name == own or test.name.startswith(f"{own}.") for test in examples()), own
