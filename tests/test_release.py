"""`make release`: what stands in the list of parts, and that a smoke test that cannot run is a failure."""

from __future__ import annotations

import importlib.util
import json
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def release() -> types.ModuleType:
    pytest.importorskip("cyclonedx")
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_of_parts_has_every_requirement_and_every_file(release: types.ModuleType, tmp_path: Path) -> None:
    built = tmp_path / "a.whl"
    built.write_bytes(b"123")
    parts = json.loads(release.parts_of("1.2.3", [built]))
    assert (parts["bomFormat"], parts["specVersion"]) == ("CycloneDX", "1.6")
    own = parts["metadata"]["component"]
    assert (own["name"], own["version"]) == ("pyspark-messagestore", "1.2.3")
    assert own["components"][0]["hashes"] == [
        {"alg": "SHA-256", "content": "a665a45920422f9d417e4867efdc4fb8a04a1f3fff1fa07e998e86f7f7a27ae3"}
    ]
    names = {part["name"] for part in parts["components"]}
    assert {"numpy", "pyarrow", "isal", "typer", "prometheus-client", "cheroot", "zstandard"} <= names
    assert "pyspark" not in names
    others = [part["purl"] for part in parts["components"] if not part["purl"].startswith("pkg:pypi/")]
    assert others == ["pkg:npm/uplot@1.6.32"]  # in the wheel itself: a scanner of the list did not know it
    assert "pkg:pypi/jaraco-functools@" in json.dumps(parts)


def test_the_pins_of_the_command_line_are_complete(release: types.ModuleType) -> None:
    """A container and the smoke test install them without asking what else is needed."""
    import importlib.metadata
    import re

    pinned = {re.sub(r"[-_.]+", "-", pin.partition("==")[0].lower()) for pin in release.pins()}
    needed = set()
    for name in pinned:
        for text in importlib.metadata.requires(name) or ():
            requirement, _, marker = text.partition(";")
            if not marker:
                needed.add(re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0].lower()))
    assert needed - pinned == set()


def test_a_machine_without_a_python_to_try_it_on_fails(
    release: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody has installed is no release."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(release.pythons()) == []
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: None)
    (tmp_path / "pyspark_messagestore-1.2.3.tar.gz").touch()
    with pytest.raises(SystemExit, match=r"found no Python from 3\.11 to 3\.14; at least one is needed"):
        release.main(tmp_path)
    assert not list(tmp_path.glob("*.json")) and not (tmp_path / "SHA256SUMS").exists()


def test_a_wheel_of_another_version_is_refused(release: types.ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pyspark_messagestore-1.2.3.tar.gz").touch()
    (tmp_path / "pyspark_messagestore-1.2.2-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match=r"found another version than 1\.2\.3"):
        release.main(tmp_path)
