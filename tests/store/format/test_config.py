"""The settings: RocketMQ's names, checked before anything is opened."""

from __future__ import annotations

import dataclasses
import pickle
import traceback
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from messagestore.errors import ConfigError
from messagestore.format.broker_keys import RELEVANT
from messagestore.format.config import ASYNC_FLUSH, SYNC_FLUSH, StoreConfig, duration_s, java_key, settings

SHIPPED = Path(__file__).resolve().parents[3] / "conf" / "store.properties"


def test_the_defaults_are_rocketmqs():
    """Sizes as a broker makes them; only the flush mode is the careful one."""
    config = StoreConfig()
    assert config.mapped_file_size_commit_log == 1073741824
    assert config.mapped_file_size_consume_queue == 6000000
    assert (config.max_hash_slot_num, config.max_index_num) == (5_000_000, 20_000_000)
    assert config.max_message_size == 4194304
    assert config.flush_disk_type == SYNC_FLUSH
    assert config.enabled_append_prop_crc is False


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("mapped_file_size_commit_log", "mappedFileSizeCommitLog"),
        ("enabled_append_prop_crc", "enabledAppendPropCRC"),
        ("check_crc_on_recover", "checkCRCOnRecover"),
        ("broker_ip1", "brokerIP1"),
        ("preallocate", "preallocate"),
    ],
)
def test_a_field_has_rocketmqs_spelling(name: str, key: str):
    """As it stands in a broker's file."""
    assert java_key(name) == key


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30), ("1.5m", 90), ("1h", 3600), ("2d", 172800), ("7", 7), (7, 7), (" 2 s ", 2), ("0", 0)],
)
def test_a_duration(text: object, seconds: float):
    """With a unit, or in seconds."""
    assert duration_s("k", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 week", "1e3", "inf", "nan", None, "1s2"])
def test_what_is_no_duration(text: object):
    """The error names the key, what was found, and examples."""
    with pytest.raises(ConfigError, match=r"lockTimeout: found .*; allowed is a duration such as 500ms") as caught:
        duration_s("lockTimeout", text)
    assert (caught.value.key, caught.value.value) == ("lockTimeout", text)


def test_durations_of_a_config():
    """Seconds, for those who wait."""
    config = StoreConfig(clean_interval="2m", attach_timeout="500ms", lock_timeout="3")
    assert (config.clean_interval_s, config.attach_timeout_s, config.lock_timeout_s) == (120, 0.5, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mapped_file_size_commit_log", 4095),
        ("mapped_file_size_commit_log", 1 << 31),
        ("mapped_file_size_commit_log", "1024"),
        ("mapped_file_size_commit_log", True),
        ("mapped_file_size_consume_queue", 19),
        ("mapped_file_size_consume_queue", 20),  # one unit: a broker would load for ever
        ("mapped_file_size_consume_queue", (1 << 31) - 1),
        ("max_hash_slot_num", 0),
        ("max_index_num", 1),
        ("max_message_size", 9),
        ("max_msgs_num_batch", 0),
        ("sync_flush_timeout", 0),
        ("flush_interval_commit_log", 0),
        ("flush_commit_log_least_pages", -1),
        ("flush_commit_log_thorough_interval", 0),
        ("listen_port", 65536),
        ("flush_disk_type", "sync"),
        ("broker_ip1", "broker.example"),
        ("broker_ip1", "fe80::1%eth0"),
        ("clean_interval", "soon"),
        ("attach_timeout", 20),
        ("message_index_enable", 1),
    ],
)
def test_a_bad_value_is_refused(name: str, value: object):
    """With RocketMQ's key, what was found, and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        StoreConfig(**{name: value})
    assert caught.value.key == java_key(name)
    assert caught.value.value == value
    assert f"found {value!r}; allowed is " in str(caught.value)


def test_a_queue_file_holds_whole_units():
    """RocketMQ rounds up, too; the largest that may be asked for stays an int32."""
    assert StoreConfig(mapped_file_size_consume_queue=21).mapped_file_size_consume_queue == 40
    assert StoreConfig(mapped_file_size_consume_queue=2147483630).mapped_file_size_consume_queue == 2147483640


def test_both_kinds_of_address():
    """They are written into every record."""
    assert StoreConfig(broker_ip1="::1").broker_ip1 == "::1"
    assert StoreConfig(broker_ip1="10.0.0.1").broker_ip1 == "10.0.0.1"


def test_a_config_does_not_change():
    """A changed copy is another one, and is checked as well."""
    config = StoreConfig()
    with pytest.raises(FrozenInstanceError):
        config.listen_port = 1  # type: ignore[misc]
    assert config.replace(listen_port=1).listen_port == 1
    assert config.listen_port == 10911
    with pytest.raises(ConfigError):
        config.replace(listen_port=-1)


# ---- from text


def test_from_a_mapping_of_text():
    """As a properties file or Spark's options give it; keys in any case."""
    config = StoreConfig.from_mapping(
        {
            "mappedFileSizeCommitLog": "65536",
            "FLUSHDISKTYPE": ASYNC_FLUSH,
            "enabledappendpropcrc": "True",
            "messageIndexEnable": False,
            "brokerIP1": "10.0.0.1",
            "lockTimeout": "5s",
        }
    )
    assert config == StoreConfig(
        mapped_file_size_commit_log=65536,
        flush_disk_type=ASYNC_FLUSH,
        enabled_append_prop_crc=True,
        message_index_enable=False,
        broker_ip1="10.0.0.1",
        lock_timeout="5s",
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("maxMessageSize", "4M", "allowed is a whole number"),
        ("maxMessageSize", 1.5, "allowed is a whole number"),
        ("preallocate", "yes", "allowed is true or false"),
        ("preallocate", "", "allowed is true or false"),
        ("flushDiskTyp", SYNC_FLUSH, "Did you mean flushDiskType?"),
        ("storePathRootDir", "/x", "no such setting"),
    ],
)
def test_text_that_is_refused(key: str, value: object, message: str):
    """A typing error in a key is answered with the key that was meant."""
    with pytest.raises(ConfigError, match=message) as caught:
        StoreConfig.from_mapping({key: value})
    assert caught.value.key == key


def test_from_a_file(tmp_path: Path):
    """Comments, blank lines, blanks around `=`, and `=` in a value."""
    path = tmp_path / "store.properties"
    path.write_text("# a comment\n\n! another\n listenPort = 1234 \nflushDiskType=ASYNC_FLUSH\n")
    assert StoreConfig.load(path) == StoreConfig(listen_port=1234, flush_disk_type=ASYNC_FLUSH)


def test_a_line_that_is_none(tmp_path: Path):
    """The error names file and line."""
    path = tmp_path / "store.properties"
    path.write_text("listenPort=1\nflushDiskType\n")
    with pytest.raises(ConfigError, match=r"store\.properties: line 2: found no `=`; allowed is key=value"):
        StoreConfig.load(path)
    path.write_text("listenPort=1\n\nflushDiskTyp=SYNC_FLUSH\n")
    with pytest.raises(ConfigError, match=r"line 3: flushDiskTyp: no such setting\. Did you mean flushDiskType\?"):
        StoreConfig.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"root:$6$secret$hash:19000:0:99999:7:::\n",
        b"listenPort=1\nsecret\n",
        b"aws_secret=secret\n",
        b"c2VjcmV0secret==\n",
        b"secret\xff\xfe",
        b"secret" * 200_000,
    ],
)
def test_a_file_that_is_no_settings_file_is_not_shown(tmp_path: Path, content: bytes):
    """Whoever gives the path of another file learns nothing of what is in it, neither from the text nor by pickle."""
    path = tmp_path / "shadow"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"shadow: (line \d+: found|found)") as caught:
        StoreConfig.load(path)
    assert b"secret" not in pickle.dumps(caught.value)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


BROKER_CONF = """
# as in RocketMQ's distribution
brokerClusterName=DefaultCluster
brokerName=broker-a
brokerId=0
deleteWhen=04
fileReservedTime=48
brokerRole=ASYNC_MASTER
flushDiskType=ASYNC_FLUSH
namesrvAddr=10.0.0.1:9876;10.0.0.2:9876
innerClientAuthenticationCredentials={"accessKey":"secret"}
mappedFileSizeConsumeQueueExt=50331648
mappedFileSizeCommitLog=65536
autoCreateTopicEnable=true
"""


def test_a_brokers_own_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """What a store has is taken; the rest is listed, once, without values, and passed over."""
    path = tmp_path / "broker.conf"
    path.write_text(BROKER_CONF + "addedInRocketMQ6=1\n")
    config = StoreConfig.load(path)
    wanted = StoreConfig(
        flush_disk_type=ASYNC_FLUSH, mapped_file_size_commit_log=65536, file_reserved_time=48, broker_name="broker-a"
    )
    assert config == wanted
    assert config.broker_settings == (("brokerRole", "ASYNC_MASTER"),)
    assert StoreConfig.load(path) == config
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert "5 of its settings do not concern a store and were ignored: autoCreateTopicEnable, brokerId" in said
    assert "RocketMQ 5.5 does not know the settings in lines 15" in said
    assert "secret" not in said and "10.0.0.1" not in said and "addedIn" not in said


@pytest.mark.parametrize("key", RELEVANT)
def test_a_setting_for_which_a_store_is_refused_does_not_count_as_ignored(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
):
    """`configManagerVersion=v2` was said to concern no store, and the next line refused the store for it."""
    path = tmp_path / "broker.conf"
    path.write_text(f"brokerId=0\n{key}=v2\n")
    StoreConfig.load(path)
    said = caplog.records[0].getMessage()
    assert "1 of its settings do not concern a store and were ignored: brokerId" in said
    assert key not in said


@pytest.mark.parametrize("line", ["flushDiskTyp=SYNC_FLUSH", "mappedFileSizeCommitlogs=1", "brokerIP=10.0.0.1"])
def test_a_typing_error_in_a_brokers_file(tmp_path: Path, line: str):
    """A key that looks like one of ours, and that RocketMQ does not know, is not passed over."""
    path = tmp_path / "broker.conf"
    path.write_text(BROKER_CONF + line)
    with pytest.raises(ConfigError, match=r"line 15: .*: no such setting\. Did you mean"):
        StoreConfig.load(path)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("fileReservedTime=1 ", "file_reserved_time", 72),
        ("fileReservedTime=1\t", "file_reserved_time", 72),
        ("fileReservedTime=1h", "file_reserved_time", 72),
        ("fileReservedTime=4294967297", "file_reserved_time", 72),
        ("fileReservedTime=1\nfileReservedTime=2 ", "file_reserved_time", 72),
        ("fileReservedTime=2 \nfileReservedTime=1", "file_reserved_time", 1),
        ("fileReservedTime= +1", "file_reserved_time", 1),
        ("fileReservedTime: 1", "file_reserved_time", 1),
        ("mappedFileSizeCommitLog=1048576 ", "mapped_file_size_commit_log", 1 << 30),
        ("cleanFileForciblyEnable=true ", "clean_file_forcibly_enable", False),
        ("cleanFileForciblyEnable=yes", "clean_file_forcibly_enable", False),
        ("cleanFileForciblyEnable=True", "clean_file_forcibly_enable", True),
        ("deleteWhen=05 ", "delete_when", "05"),
        ("deleteWhen=0\\\n   5", "delete_when", "05"),
        ("cleanInterval=2s ", "clean_interval", "2s"),
    ],
)
def test_a_blank_in_a_brokers_file_means_what_it_means_to_the_broker(
    tmp_path: Path, line: str, name: str, value: object, caplog: pytest.LogCaptureFixture
):
    """`fileReservedTime=1 ` deletes after 72 hours in RocketMQ. Here it was one hour. `interop/test_names.py` asks Java."""
    path = tmp_path / "broker.conf"
    path.write_text(f"brokerId=0\n{line}\n")
    assert getattr(StoreConfig.load(path), name) == value
    misread = value == 72 or value is False or value == 1 << 30
    assert ("RocketMQ does not read the value of" in caplog.text) == misread
    path.write_text(line.replace(":", "="))
    if misread and line.endswith((" ", "\t")) and "\n" not in line:  # our own file has no such traps
        own = getattr(StoreConfig.load(path), name)
        assert own == (True if value is False else int(line.partition("=")[2]))


@pytest.mark.parametrize(
    ("line", "value", "is_told"),
    [
        ("fileReservedTime=1 ", 1, True),
        ("fileReservedTime=1", 1, False),
        ("fileReservedTime=1\ndeleteWhen=05 ", 1, False),
        ("fileReservedTime=1\nlockTimeout=30s ", 1, False),
        ("fileReservedTime=1\nmessageIndexEnable=true ", 1, True),
    ],
)
def test_a_blank_where_it_is_not_known_whose_file_it_is(
    tmp_path: Path, line: str, value: int, is_told: bool, caplog: pytest.LogCaptureFixture
):
    """A broker's file may have only keys that are ours, too. The value counts, and the log says that a broker differs."""
    path = tmp_path / "broker.conf"
    path.write_text(f"brokerClusterName=DefaultCluster\nbrokerName=broker-a\n{line}\n")
    for _ in range(2):
        assert StoreConfig.load(path).file_reserved_time == value
    assert caplog.text.count("If this is a broker's file, remove the blank") == is_told


@pytest.mark.parametrize("line", ["flushdisktype=SYNC_FLUSH", "brokerrole=SLAVE", "FileReservedTime=1"])
def test_a_key_that_a_broker_does_not_know_in_this_spelling(tmp_path: Path, line: str):
    path = tmp_path / "broker.conf"
    path.write_text(f"brokerId=0\n{line}\n")
    with pytest.raises(ConfigError, match=r"line 2: .*: no such setting\. Did you mean (flush|broker|file)[A-Z]"):
        StoreConfig.load(path)


def test_a_brokers_file_need_not_be_utf_8(tmp_path: Path):
    """Java takes each byte for a character; comments may be in any encoding."""
    path = tmp_path / "broker.conf"
    path.write_bytes("brokerId=0\n# 刷盘\nflushDiskType=ASYNC_FLUSH\n".encode("gbk"))
    assert StoreConfig.load(path).flush_disk_type == ASYNC_FLUSH


def test_a_brokers_file_gives_every_setting(tmp_path: Path):
    """What it leaves out has RocketMQ's default, and that is known; a file of ours gives what is in it."""
    path = tmp_path / "conf"
    path.write_text("brokerId=0\n")
    assert StoreConfig.load(path).is_given("mapped_file_size_commit_log")
    assert StoreConfig.load(path).file_reserved_time == 72
    path.write_text("listenPort=10911\n")
    config = StoreConfig.load(path)
    assert config.is_given("listen_port") and not config.is_given("mapped_file_size_commit_log")
    assert config.replace(mapped_file_size_commit_log=8192).is_given("mapped_file_size_commit_log")


def test_a_default_that_somebody_names_is_given():
    """In whatever way it is named. A copy, and a configuration from another process, know it too."""
    default = {java_key(each.name): getattr(StoreConfig(), each.name) for each in settings()}
    for each in settings():
        named = StoreConfig(**{each.name: each.default})
        for config in (
            named,
            named.replace(),
            dataclasses.replace(named),
            pickle.loads(pickle.dumps(named)),
            StoreConfig().replace(**{each.name: each.default}),
            StoreConfig.from_mapping({java_key(each.name): default[java_key(each.name)]}),
        ):
            assert [other.name for other in settings() if config.is_given(other.name)] == [each.name]
            assert config == StoreConfig()
    assert StoreConfig(1 << 30).is_given("mapped_file_size_commit_log")
    assert dataclasses.replace(StoreConfig(), listen_port=1).is_given("listen_port")
    assert not any(StoreConfig().is_given(each.name) for each in settings())


def test_a_name_alone_is_no_brokers_file(tmp_path: Path):
    """Retention must not begin to delete because somebody gave the store a name."""
    path = tmp_path / "store.properties"
    path.write_text("brokerName=broker-a\nmappedFileSizeCommitLog=65536\n")
    config = StoreConfig.load(path)
    assert (config.broker_name, config.file_reserved_time) == ("broker-a", -1)
    assert config.is_given("broker_name") and not config.is_given("mapped_file_size_consume_queue")


@pytest.mark.parametrize("name", [" broker-a", "broker-a ", "a\nb", "a\x1b[2J", "\u200b", "\ud800", "b" * 256])
def test_a_name_that_no_broker_can_have(name: str):
    with pytest.raises(ConfigError, match=r"brokerName: found .*; allowed is 1 to 255 printable characters"):
        StoreConfig(broker_name=name)


def test_an_endless_file_is_not_read_to_its_end():
    """A device that never ends."""
    with pytest.raises(ConfigError, match="found more than 1048576 bytes"):
        StoreConfig.load("/dev/zero")


def test_the_file_that_is_shipped():
    """conf/store.properties holds every setting, with its default."""
    assert StoreConfig.load(SHIPPED) == StoreConfig()
    text = SHIPPED.read_text(encoding="utf-8")
    assert [f.name for f in settings() if java_key(f.name) not in text] == []
