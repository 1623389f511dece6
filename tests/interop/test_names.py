"""The tables of RocketMQ's names in the package against the jars: settings, reserved properties and topics, and how a
broker's file is read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from interop import names
from interop.conftest import need
from interop.java_build import NEWEST, tools_classpath
from interop.real_broker import BROKERS
from interop.share import part
from messagestore import StoreConfig
from messagestore.format.broker_keys import KINDS
from messagestore.format.java_properties import properties_of, value_of
from messagestore.format.message import GROUP_TOPIC_PREFIXES, put_topic_fault
from messagestore.format.properties import RESERVED_PROPERTIES

LATEST = "5.5.0"


@pytest.fixture(params=BROKERS)
def version(request: pytest.FixtureRequest) -> str:
    need(request.param, tools_classpath)
    return str(request.param)


def test_every_setting_of_a_broker_is_known_with_its_type(version: str) -> None:
    found = names.settings(version)
    assert len(found) > 150
    assert {key: kind for key, kind in found.items() if KINDS.get(key, "").lower() not in kind.split("|")} == {}


def test_no_setting_is_known_that_no_broker_has() -> None:
    """A typing error in the table would pass for a setting."""
    known: set[str] = set()
    for version in BROKERS:
        need(version, tools_classpath)
        known |= names.settings(version).keys()
    assert KINDS.keys() - known == set()


# ---- names

NO_PROPERTIES = {
    "KEY_SEPARATOR", "PROPERTY_TRANSIENT_PREFIX",
    "TIMER_ENGINE_TYPE", "INDEX_KEY_TYPE", "INDEX_UNIQUE_TYPE", "INDEX_TAG_TYPE", "TIMER_ENGINE_ROCKSDB_TIMELINE", "TIMER_ENGINE_FILE_TIME_WHEEL",
}  # fmt: skip
"""Constants of `MessageConst` that name no property: a separator, a prefix, and arguments of requests with their values."""
OF_CLIENTS = {"PROPERTY_TRANSIENT_TOPIC_CONFIG", "PROPERTY_TRANSIENT_GROUP_CONFIG"}
"""Properties that a client adds to what it got; they are in no record."""
SENT_TO = {"BenchmarkTest", "RMQ_SYS_TRACE_TOPIC", "CHECKPOINT_TOPIC"}
"""System topics to which RocketMQ's producers may send."""


def test_every_property_with_a_meaning_is_reserved(version: str) -> None:
    """Java's clients refuse those in `STRING_HASH_SET`. The others are written by clients and brokers themselves."""
    assert names.members(version, "MessageConst.STRING_HASH_SET") - RESERVED_PROPERTIES == set()
    found = names.constants(version, "MessageConst")
    left = {name: text for name, text in found.items() if name not in NO_PROPERTIES | OF_CLIENTS}
    assert {name: text for name, text in left.items() if text not in RESERVED_PROPERTIES} == {}


def test_every_topic_of_a_broker_is_refused(version: str) -> None:
    """But for those to which producers may send."""
    system = names.members(version, "TopicValidator.SYSTEM_TOPIC_SET")
    refused = names.members(version, "TopicValidator.NOT_ALLOWED_SEND_TOPIC_SET")
    assert refused <= system
    assert len(refused) >= 6
    assert {topic for topic in system if put_topic_fault(topic) is None} == system & SENT_TO
    assert not refused & SENT_TO
    prefix = names.constants(version, "TopicValidator")["SYSTEM_TOPIC_PREFIX"]
    assert put_topic_fault(prefix + "x") is not None
    assert not any(topic.startswith(GROUP_TOPIC_PREFIXES) for topic in system)


# ---- a broker's file

TEXTS = (
    "7", "7 ", "7\\t", "7\t", " 7", "+7", "-7", "007", "0x7", "7L", "7.0", "1_0", "", "2147483647", "2147483648",
    "-2147483648", "-2147483649", "9223372036854775807", "9223372036854775808", "true", "TRUE", "True ", "true\t", "false",
    "false ", "yes", "1", "on", "a b", "a b ", "a\\u0020", "\\u0037", "7\\", "v2 ", "SLAVE", "SLAVE ", "slave", "04;05 ",
)  # fmt: skip
"""Values as they stand in a line."""


@pytest.mark.parametrize("version", part([LATEST, NEWEST], 2))
def test_a_setting_is_what_a_broker_takes_it_for(tmp_path: Path, version: str) -> None:
    """Each setting with each text: the broker with this file is the broker with what we take it for."""
    need(version, tools_classpath)
    theirs, ours = (
        [tmp_path / f"{n}.conf" for n in range(len(TEXTS))],
        [tmp_path / f"{n}.ours" for n in range(len(TEXTS))],
    )
    plain = tmp_path / "plain"
    plain.write_text("")
    for text, path, other in zip(TEXTS, theirs, ours, strict=True):
        path.write_text("".join(f"{key}={text}\n\n" for key in KINDS))
        values = {key: value_of(KINDS[key], value) for _, key, value, _ in properties_of(path.read_text())}
        assert values.keys() == KINDS.keys()
        other.write_text("".join(f"{key}={value}\n" for key, value in values.items() if value is not None))
    found = names.read(version, [plain, *theirs, *ours])
    for text, path, other in zip(TEXTS, theirs, ours, strict=True):
        assert found[path][1] == found[other][1], text
    changed = {text: sum(found[path][1][key] != value for key, value in found[plain][1].items())
               for text, path in zip(TEXTS, theirs, strict=True)}  # fmt: skip
    assert changed["7"] > 300
    assert changed["7 "] < changed["7"] - 200  # texts, and booleans that are true by default


SYNTAX = r"""
# comment = 1
! comment = 2
   # comment = 3
a=1
b = 2
  c:3
d 4
e=
f
g==5
h = = 6
i=one \
    two
j=one \\
k=x # no comment
l\=m=7
n\ o = 8
p=\u00e9\t\q
q=é
r=1
r=2
s=# 9
t=1\
# goes on
"""


def test_the_lines_of_a_file_are_javas(tmp_path: Path) -> None:
    """Comments, separators, escapes, lines that go on, bytes that are no ASCII, and ends of lines."""
    need(NEWEST, tools_classpath)
    paths = []
    for number, end in enumerate(("\n", "\r\n", "\r")):
        paths.append(tmp_path / f"{number}")
        paths[-1].write_bytes((SYNTAX.replace("\n", end) + "last=1\\").encode())
    found = names.read(NEWEST, paths)
    for path in paths:
        mine = {key: value for _, key, value, _ in properties_of(path.read_bytes().decode("latin-1"))}
        assert mine == found[path][0]
        assert len(mine) == 19


def test_a_blank_at_the_end_of_a_line(tmp_path: Path) -> None:
    """The whole way: RocketMQ keeps its files for 72 hours, and so do we."""
    need(LATEST, tools_classpath)
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerId=0\nfileReservedTime=1 \ndeleteWhen=05 \nduplicationEnable=true \nbrokerRole=SLAVE \n")
    config, java = StoreConfig.load(conf), names.read(LATEST, [conf])[conf][1]
    assert (
        (config.file_reserved_time, config.delete_when)
        == (int(java["fileReservedTime"]), java["deleteWhen"])
        == (72, "05")
    )
    told = dict(config.broker_settings)
    assert (told["duplicationEnable"], told["brokerRole"]) == (java["duplicationEnable"], java["brokerRole"])
    assert told == {"duplicationEnable": "false", "brokerRole": "SLAVE"}
