"""config/*.json as fastjson writes it: numbers as keys, a version, a backup. More of it is in test_topics.py."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore.errors import CorruptionError
from messagestore.files.config_file import ConfigFile, parsed, written
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.disk import Disk, File

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


# ---- whoever may write the file


@pytest.mark.parametrize(
    "text",
    [
        '{"table":{"' + '\\"' * 1_000_000,
        '{"table":{"' + "\\\\" * 1_000_000 + "\\",
        '{"' * 1_000_000,
        "{" + " " * 2_000_000,
        "{" + "1" * 2_000_000,
        "{1" + " " * 2_000_000,
        "," * 1_000_000 + "1" * 1_000_000,
    ],
    ids=["escaped quotes", "backslashes", "open strings", "blanks", "digits", "blanks behind a key", "commas"],
)
def test_a_text_without_an_end_is_refused_in_time_that_is_in_proportion(file: ConfigFile, text: str) -> None:
    """64 KB of escaped quotes took half a minute, in nearly every command, and the time grew with the square."""
    Path(file.path).write_text(text)
    began_s = time.process_time()
    with pytest.raises(CorruptionError, match=r"x\.json: offset 0: expected a table.*Mend it\."):
        file.load(dict)
    assert time.process_time() - began_s < 10


def test_a_long_string_takes_a_few_times_its_size() -> None:
    """It took 120 times its size: 64 MiB of it ended the process."""
    text = '{"x":"' + "a" * 4_000_000 + '"}'
    tracemalloc.start()
    assert len(parsed(text)["x"]) == 4_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(text)


def test_more_bytes_or_values_than_are_read_are_named_with_the_limit(file: ConfigFile) -> None:
    Path(file.path).write_text('{"table":{"a@g":{' + ",".join(f"{number}:1" for number in range(2_000_001)) + "}}}")
    with pytest.raises(CorruptionError, match=r"x\.json: .* found some 2,000,00. values; at most 2,000,000 are read"):
        file.load(dict)
    with Path(file.path).open("wb") as made:
        made.truncate(1 << 40)
    with pytest.raises(CorruptionError, match=r"x\.json: .*33554432"):
        file.load(dict)


@pytest.mark.parametrize("levels", [63, 70, 400, 100_000])
def test_what_is_read_can_be_written_again(file: ConfigFile, levels: int) -> None:
    """A field that we do not know was kept, however deep, and then the file could not be saved."""
    Path(file.path).write_text('{"table":{},"theirs":' + "[" * levels + "]" * levels + "}")
    if levels > 63:
        with pytest.raises(CorruptionError, match="nested too deeply; at most 64 levels are read"):
            file.load(dict)
    else:
        file.load(dict)
        file.save({})
        assert parsed(Path(file.path).read_text())["theirs"]


def test_the_name_of_a_folder_that_another_process_made_is_synced(tmp_path: Path) -> None:
    """A process that dies between `mkdir` and the sync leaves `config/` to the next one, whose file needs its name."""
    calls: list[tuple[str, str]] = []

    class Told(Disk):
        def fsync_dir(self, path: str | Path) -> None:
            calls.append(("sync", str(path)))
            super().fsync_dir(path)

        def open_new(self, path: str | Path, size: int) -> File:
            calls.append(("write", str(path)))
            return super().open_new(path, size)

    root = tmp_path / "store"
    (root / "spark").mkdir(parents=True)
    (root / "config").mkdir()
    publish_offsets(str(root), "g", {("t", 0): 1}, Told(), durable=True)
    synced = calls.index(("sync", str(root)))
    assert synced < next(at for at, (verb, path) in enumerate(calls) if verb == "write" and "consumer" in path)
    assert ("sync", str(root / "config")) in calls[synced:]

    calls.clear()
    publish_offsets(str(root), "g", {("t", 0): 2}, Told(), durable=True)
    assert ("sync", str(root)) not in calls  # once: the file would not be there without the folder's name
