"""config/topics.json: the broker's table of topics, as fastjson writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore import Message, MessageStore
from messagestore.errors import ConfigError, CorruptionError, MessageIllegalError, UnknownTopicError
from messagestore.files.config_file import _UNQUOTED_KEY, _quoted_key
from messagestore.files.disk import Disk
from messagestore.files.topics import MAX_QUEUE_COUNT, TopicConfig, Topics
from small import ClockDisk

# As a broker writes it: tabs, sorted fields, numbers as keys without quotes.
JAVA = """{
\t"dataVersion":{
\t\t"counter":41,
\t\t"stateVersion":3,
\t\t"timestamp":1600000000000
\t},
\t"futureField":{0:250,1:-7
\t},
\t"topicConfigTable":{
\t\t"flights":{
\t\t\t"attributes":{},
\t\t\t"futureList":["a,1:2",3],
\t\t\t"order":true,
\t\t\t"perm":6,
\t\t\t"readQueueNums":4,
\t\t\t"topicFilterType":"MULTI_TAG",
\t\t\t"topicName":"flights",
\t\t\t"topicSysFlag":2,
\t\t\t"writeQueueNums":5
\t\t},
\t\t"batches":{
\t\t\t"attributes":{
\t\t\t\t"+queue.type":"BatchCQ"
\t\t\t},
\t\t\t"topicName":"batches"
\t\t}
\t}
}"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "spark").mkdir()
    (tmp_path / "config").mkdir()
    return tmp_path


@pytest.fixture
def topics(root: Path) -> Topics:
    return Topics(Disk(), str(root))


def file_of(root: Path) -> Path:
    return root / "config" / "topics.json"


def written(root: Path) -> dict:
    return json.loads(file_of(root).read_text(encoding="utf-8"))


# ---- reading


def test_a_brokers_file_is_read(root: Path, topics: Topics):
    """Every field of a topic; what is not given has RocketMQ's default."""
    file_of(root).write_text(JAVA)
    topics.load()
    assert topics.names == ["batches", "flights"]
    assert topics.get("flights") == TopicConfig(
        "flights", 4, 5, 6, 2, True, "MULTI_TAG", {}, {"futureList": ["a,1:2", 3]}
    )
    assert topics.get("batches") == TopicConfig("batches", 16, 16, attributes={"+queue.type": "BatchCQ"})
    assert topics.get("nowhere") is None


def test_a_store_without_config_has_no_topics(tmp_path: Path):
    """DefaultMessageStore itself never makes this file."""
    topics = Topics(Disk(), str(tmp_path / "missing"))
    topics.load()
    assert topics.names == []


@pytest.mark.parametrize(
    "main", [None, b"", b" \n", b"{", b"[]", b'"x"', b'{"topicConfigTable":3}', b"\xff", b"[" * 100_000]
)
def test_the_backup_counts_when_the_file_does_not(root: Path, topics: Topics, main: bytes | None):
    """Missing, empty or not readable: RocketMQ goes to the .bak, and so do we."""
    if main is not None:
        file_of(root).write_bytes(main)
    (root / "config" / "topics.json.bak").write_text(JAVA)
    topics.load()
    assert topics.names == ["batches", "flights"]


@pytest.mark.parametrize("backup", [None, b"", b"{"])
def test_unreadable_without_a_backup_is_an_error_that_names_the_file(root: Path, topics: Topics, backup: bytes | None):
    """Taking it for empty would let the next save destroy every topic's settings."""
    file_of(root).write_bytes(b'{"topicConfigTable":{"a":')
    if backup is not None:
        (root / "config" / "topics.json.bak").write_bytes(backup)
    with pytest.raises(CorruptionError) as caught:
        topics.load()
    assert caught.value.path == str(file_of(root))


def test_an_unreadable_backup_alone_is_an_error(root: Path, topics: Topics):
    """There were settings once."""
    backup = root / "config" / "topics.json.bak"
    backup.write_bytes(b"{")
    with pytest.raises(CorruptionError) as caught:
        topics.load()
    assert caught.value.path == str(backup)


@pytest.mark.parametrize("field", ['"perm":"six"', '"readQueueNums":[]', '"attributes":3'])
def test_a_field_of_the_wrong_kind_is_an_unreadable_file(root: Path, topics: Topics, field: str):
    """No half-read table."""
    file_of(root).write_text('{"topicConfigTable":{"a":{' + field + "}}}")
    with pytest.raises(CorruptionError):
        topics.load()
    assert topics.names == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{0:1}", '{"0":1}'),
        ("{ -12 : 1,\n\t3:{4:5}}", '{ "-12" : 1,\n\t"3":{"4":5}}'),
        ('{"a":"{0:1,2:3"}', '{"a":"{0:1,2:3"}'),
        ('{"a\\"{":"\\",1:2"}', '{"a\\"{":"\\",1:2"}'),
        ("[1,2,3]", "[1,2,3]"),
    ],
)
def test_numbers_as_keys_get_quotes_and_text_is_left_alone(text: str, expected: str):
    """fastjson writes `{0:250}`; a string that looks like it is still that string."""
    assert _UNQUOTED_KEY.sub(_quoted_key, text) == expected


class IntegerKeys(dict):
    """A Java map whose keys are numbers."""


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(alphabet='ab,{:"1\\ 2}[é😀\n', max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(alphabet='a{,:1"\\', max_size=4), inner, max_size=3),
        st.dictionaries(st.integers(-99, 99), inner, max_size=3).map(IntegerKeys),
    ),
    max_leaves=12,
)


def as_java(value: object) -> str:
    """JSON with numbers as keys unquoted, and blanks here and there."""
    if isinstance(value, IntegerKeys):
        return "{" + ",\n".join(f"{key} :{as_java(item)}" for key, item in value.items()) + "}"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)}: {as_java(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_java(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


@given(VALUES)
def test_any_text_of_fastjson_is_read(value: object):
    """Whatever the strings hold: braces, colons, quotes, digits."""
    assert json.loads(_UNQUOTED_KEY.sub(_quoted_key, as_java(value))) == plain(value)


# ---- writing


def test_the_layout_is_fastjsons(root: Path):
    """Tabs, no blanks, sorted keys, `{}` for an empty object: as a broker would write it."""
    topics = Topics(ClockDisk(1_700_000_000_123), str(root))
    topics.load()
    topics.create("flights", 8)
    topics.save()
    assert file_of(root).read_text() == (
        '{\n\t"dataVersion":{\n\t\t"counter":1,\n\t\t"stateVersion":0,\n\t\t"timestamp":1700000000123\n\t},\n'
        '\t"topicConfigTable":{\n\t\t"flights":{\n\t\t\t"attributes":{},\n\t\t\t"order":false,\n\t\t\t"perm":6,\n'
        '\t\t\t"readQueueNums":8,\n\t\t\t"topicFilterType":"SINGLE_TAG",\n\t\t\t"topicName":"flights",\n'
        '\t\t\t"topicSysFlag":0,\n\t\t\t"writeQueueNums":8\n\t\t}\n\t}\n}'
    )


def test_what_we_do_not_know_is_kept(root: Path, topics: Topics):
    """Fields of a newer RocketMQ, in the root and in topics, come out as they went in; the version goes up."""
    file_of(root).write_text(JAVA)
    topics.load()
    topics.create("new", 1)
    topics.save()
    found = written(root)
    assert found["futureField"] == {"0": 250, "1": -7}
    assert found["topicConfigTable"]["flights"]["futureList"] == ["a,1:2", 3]
    assert found["topicConfigTable"]["batches"]["attributes"] == {"+queue.type": "BatchCQ"}
    assert found["dataVersion"]["counter"] == 42
    assert found["dataVersion"]["stateVersion"] == 3
    assert found["dataVersion"]["timestamp"] > 1_600_000_000_000
    again = Topics(Disk(), str(root))
    again.load()
    assert again.names == ["batches", "flights", "new"]
    assert again.get("flights") == topics.get("flights")


def test_an_empty_file_is_saved_from_its_backup(root: Path, topics: Topics):
    """Saving writes a whole file from the backup's topics."""
    file_of(root).write_bytes(b" ")
    (root / "config" / "topics.json.bak").write_text(JAVA)
    topics.load()
    topics.create("new", 1)
    topics.save()
    assert set(written(root)["topicConfigTable"]) == {"batches", "flights", "new"}


def test_a_damaged_file_is_not_replaced_by_an_older_backup(root: Path, topics: Topics):
    """Somebody may still read its topics; those of the backup count meanwhile. RocketMQ replaces it."""
    file_of(root).write_bytes(damaged := b'{"topicConfigTable":{"newer":{"writeQueueNums":16')
    (root / "config" / "topics.json.bak").write_text(JAVA)
    topics.load()
    for _ in range(2):
        topics.create("new", 1)
        with pytest.raises(CorruptionError, match=r"topics\.json.*If you move it away instead, its \.bak counts"):
            topics.save()
        assert file_of(root).read_bytes() == damaged
        assert topics.names == ["batches", "flights"]
    file_of(root).unlink()
    topics.create("new", 1)
    topics.save()
    assert set(written(root)["topicConfigTable"]) == {"batches", "flights", "new"}


def test_nothing_changed_nothing_written(root: Path, topics: Topics):
    """save() is free to be called."""
    topics.load()
    topics.save()
    assert not file_of(root).exists()
    topics.create("a", 1)
    topics.save()
    before = file_of(root).stat().st_mtime_ns
    topics.save()
    assert file_of(root).stat().st_mtime_ns == before


def test_two_writers_lose_nothing(root: Path, topics: Topics):
    """Both loaded, then both saved: each topic is there."""
    other = Topics(Disk(), str(root))
    topics.load()
    other.load()
    topics.create("mine", 1)
    other.create("theirs", 2)
    topics.save()
    other.save()
    assert set(written(root)["topicConfigTable"]) == {"mine", "theirs"}
    assert other.names == ["mine", "theirs"]


def test_the_folder_is_made(tmp_path: Path):
    """A new store has no config/ yet."""
    (tmp_path / "spark").mkdir()
    topics = Topics(Disk(), str(tmp_path))
    topics.load()
    topics.create("a", 1)
    topics.save()
    assert set(written(tmp_path)["topicConfigTable"]) == {"a"}
    assert [p.name for p in (tmp_path / "config").iterdir()] == ["topics.json"]
    assert not list((tmp_path / "spark").iterdir())


def test_a_failed_save_can_be_tried_again(root: Path):
    """A full disk: the file is as before, and the change is not forgotten."""

    class FullDisk(Disk):
        full = True

        def pwrite(self, file, data, position):
            if self.full:
                raise OSError(28, "No space left on device")
            super().pwrite(file, data, position)

    file_of(root).write_text(JAVA)
    disk = FullDisk()
    topics = Topics(disk, str(root))
    topics.load()
    topics.create("new", 1)
    with pytest.raises(OSError, match="No space"):
        topics.save()
    assert file_of(root).read_text() == JAVA
    disk.full = False
    topics.save()
    assert "new" in written(root)["topicConfigTable"]


def test_text_that_is_no_unicode_stays_an_escape(root: Path, topics: Topics):
    """A lone surrogate somebody's Java wrote does not stop a save."""
    file_of(root).write_text('{"topicConfigTable":{},"x":"\\ud800 é"}')
    topics.load()
    topics.create("a", 1)
    topics.save()
    assert written(root)["x"] == "\ud800 é"


# ---- topics


def test_create_then_alter(root: Path, topics: Topics):
    """As many queues to read as to write; then each thing by itself."""
    topics.load()
    assert topics.create("a", 8) == TopicConfig("a", 8, 8) == topics.get("a")
    assert topics.alter("a", write_queue_nums=4) == TopicConfig("a", 8, 4)
    assert topics.alter("a", read_queue_nums=9, perm=4, order=True) == TopicConfig("a", 9, 4, perm=4, order=True)
    topics.save()
    again = Topics(Disk(), str(root))
    again.load()
    assert again.get("a") == TopicConfig("a", 9, 4, perm=4, order=True)


def test_a_topic_that_is_there_is_not_created(topics: Topics):
    """It would lose its settings."""
    topics.create("a", 8)
    with pytest.raises(ConfigError, match="exists already"):
        topics.create("a", 4)
    assert topics.get("a") == TopicConfig("a", 8, 8)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "é", "x" * 128])
def test_a_bad_name_is_refused(topics: Topics, name: str):
    """A topic becomes a path."""
    with pytest.raises(MessageIllegalError):
        topics.create(name, 1)
    assert topics.names == []


@pytest.mark.parametrize("count", [0, -1, MAX_QUEUE_COUNT + 1, True, 1.0])
def test_a_bad_number_of_queues_is_refused(topics: Topics, count: int):
    """1 to 65 536, said in the error."""
    with pytest.raises(ConfigError, match="allowed is 1 to 65536") as caught:
        topics.create("a", count)
    assert caught.value.value == count
    assert topics.get("a") is None


def test_a_bad_perm_is_refused(topics: Topics):
    """The topic stays as it was."""
    topics.create("a", 1)
    with pytest.raises(ConfigError, match="perm: found 16"):
        topics.alter("a", perm=16)
    assert topics.get("a") == TopicConfig("a", 1, 1)


def test_altering_an_unknown_topic_lists_the_known_ones(topics: Topics):
    """A typing error shows at once."""
    topics.create("flights", 1)
    with pytest.raises(UnknownTopicError, match="flights"):
        topics.alter("fligths", perm=6)


@pytest.mark.parametrize(
    ("attributes", "simple"),
    [
        ({}, True),
        ({"queue.type": "SimpleCQ"}, True),
        ({"+queue.type": "SimpleCQ"}, True),
        ({"queue.type": "BatchCQ"}, False),
        ({"+queue.type": "BatchCQ"}, False),
        ({"queue.type": "something new"}, False),
        ({"message.type": "DELAY"}, True),
    ],
)
def test_which_topics_have_simple_queues(root: Path, topics: Topics, attributes: dict, simple: bool):
    """With and without RocketMQ's `+`; a type that is not known is not simple."""
    file_of(root).write_text(json.dumps({"topicConfigTable": {"a": {"attributes": attributes}}}))
    topics.load()
    assert topics.is_simple_queue("a") is simple
    assert topics.is_simple_queue("unknown")


def test_a_topic_that_could_not_be_saved_is_not_there(tmp_path: Path):
    """A full disk refused the topic; when there was room, creating it again found it in memory and saved nothing."""

    class FullDisk(Disk):
        full = False

        def pwrite(self, file, data, position):
            if self.full and "topics" in file.path:
                raise OSError(28, "No space left on device")
            super().pwrite(file, data, position)

    disk = FullDisk()
    root = tmp_path / "store"
    with MessageStore.open(root, disk=disk) as store:
        disk.full = True
        with pytest.raises(OSError, match="No space"):
            store.create_topic("new", 3)
        disk.full = False
        assert store.create_topic("new", 3).write_queue_nums == 3
    assert "new" in written(root)["topicConfigTable"]


def test_topics_of_puts_that_found_a_full_disk_are_not_saved_with_the_next_one(tmp_path: Path):
    """The next topic brought them along, with default queues, and creating them said nothing about other wishes."""

    class FullDisk(Disk):
        full = False

        def pwrite(self, file, data, position):
            if self.full and "topics" in file.path:
                raise OSError(28, "No space left on device")
            super().pwrite(file, data, position)

    disk = FullDisk()
    with MessageStore.open(tmp_path / "store", disk=disk) as store:
        disk.full = True
        for topic in ("a", "b"):
            with pytest.raises(OSError, match="No space"):
                store.put_message(Message(topic, b"x", queue_id=0))
        disk.full = False
        assert [store.create_topic(topic, 3).write_queue_nums for topic in ("a", "b")] == [3, 3]
