"""config/*.json as fastjson writes it: numbers as keys, a version, a backup. More of it is in test_topics.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore.errors import CorruptionError
from messagestore.files.config_file import ConfigFile, parsed, written
from messagestore.files.mapped_file import Disk

WORDS = st.text(alphabet='a{,:1"\\ é😀\n', max_size=4)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(WORDS, inner, max_size=3),
        st.dictionaries(st.integers(-99, 99), inner, max_size=3),
    ),
    max_leaves=12,
)


def text_keys(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): text_keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [text_keys(item) for item in value]
    return value


@pytest.fixture
def file(tmp_path: Path) -> ConfigFile:
    (tmp_path / "spark").mkdir()
    (tmp_path / "config").mkdir()
    return ConfigFile(Disk(), str(tmp_path), "x.json", "table", via="new-x", meaning="a table", hint="Mend it.")


def test_numbers_as_keys_are_written_as_java_does() -> None:
    """Without quotes, sorted as numbers, on the line of the brace; the elements of a set on one line, too."""
    assert written({"g": ("a", "b"), "h": ()}) == '{\n\t"g":["a","b"],\n\t"h":[]\n}'
    assert written({"a@g": {10: 1, 2: -7}, "b": {}}) == '{\n\t"a@g":{2:-7,10:1\n\t},\n\t"b":{}\n}'


@given(st.dictionaries(WORDS, VALUES, max_size=3))
def test_what_is_written_is_read(fields: dict) -> None:
    """Numbers as keys come back as text; everything else as it was."""
    assert parsed(written(fields)) == text_keys(fields)


@pytest.mark.parametrize("version", ['{"counter":1e999}', '{"counter":[]}', "3", '{"counter":"x"}'])
def test_a_version_that_is_none_is_an_unreadable_file(file: ConfigFile, version: str) -> None:
    """An error that names the file, not one of Python's."""
    Path(file.path).write_text('{"dataVersion":' + version + ',"table":{}}')
    with pytest.raises(CorruptionError, match=r"x\.json: offset 0: expected a table.*Mend it\."):
        file.load(dict)


def test_what_the_table_is_parsed_with_may_refuse_it(file: ConfigFile) -> None:
    """Then the backup counts, and nothing of the file itself."""
    Path(file.path).write_text('{"dataVersion":{"counter":9},"more":1,"table":{"a":1e999}}')
    Path(file.path + ".bak").write_text('{"dataVersion":{"counter":3},"table":{"a":4}}')
    assert file.load(lambda table: {name: int(value) for name, value in table.items()}) == {"a": 4}
    file.save({"a": 5}, derived=[1])
    fields = parsed(Path(file.path).read_text())
    assert (fields["dataVersion"]["counter"], fields["table"], fields["derived"]) == (4, {"a": 5}, [1])
    assert "more" not in fields


def test_without_a_file_the_table_is_empty(file: ConfigFile) -> None:
    assert file.load(dict) == {}
