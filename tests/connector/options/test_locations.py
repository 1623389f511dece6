"""Where a store is: what a URL opens, what goes with it, and what does not."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import StringType, StructField, StructType

from cli_runs import error, run
from messagestore import ConfigError, StoreConfig, UnknownTopicError
from messagestore.spi import LOCAL_STORES, STORES, Location, Stores
from messagestore.spi.location import OPENERS, RemoteSettings, location_words
from pyspark_messagestore import MessageStoreSink
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.options.table import sink_options, source_options
from pyspark_messagestore.source.readers import BatchReader, StreamReader
from stream_steps import BODY, add, rows

URL = "http://store.example:8080"


class ServedStores:
    """Stands for a client of a served store: it opens one folder of this host, whatever the URL."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.opened: list[Location] = []

    def reader(self, location: Location, *arguments: Any, **options: Any) -> Any:
        self.opened.append(location)
        return LOCAL_STORES.reader(self.root, *arguments, **options)

    def writer(self, location: Location, config: StoreConfig, **options: Any) -> Any:
        self.opened.append(location)
        return LOCAL_STORES.writer(self.root, config, **options)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServedStores:
    stores = ServedStores(str(tmp_path / "store"))
    module = ModuleType("served_stores")
    module.STORES = stores  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "served_stores", module)
    monkeypatch.setitem(OPENERS, "http", "served_stores:STORES")
    for name in ("TOKEN", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"MESSAGESTORE_{name}_FILE", raising=False)
    return stores


def test_the_scheme_decides_what_opens_a_store(served: ServedStores) -> None:
    """One line in a table plugs in what opens URLs; tasks, planning and the command line ask the same object."""
    add(served.root, 40)
    stores: Stores = STORES
    reader = BatchReader(source_options({"path": f"{URL}/", "subscribe": "t"}), BODY, stores)
    assert len(rows(reader, reader.partitions())) == 40
    assert {str(each) for each in served.opened} == {URL}
    stores.reader(Location.of(served.root)).close()
    assert {str(each) for each in served.opened} == {URL}
    assert run("get", f"{URL}/", "t", "0").stdout


def test_a_missing_topic_of_a_served_store_is_made_on_its_host(served: ServedStores) -> None:
    """`topic create` takes no URL, so the error must not tell the user to type one."""
    add(served.root, 1)
    with pytest.raises(
        UnknownTopicError, match=f"Create it on the host of {URL} with `messagestore topic create ROOT no`"
    ):
        BatchReader(source_options({"path": URL, "subscribe": "no"}), BODY, STORES).partitions()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "~/store",
        "s3://b/x",
        "dbfs:/x",
        "http:",
        "http://",
        "http://user@host/",
        "http://user:word@host/",
        "http://host/?token=x",
        "http://host/#x",
        "http://host:x/",
        "http://host:0",
        "http://ho st",
        "a\0b",
    ],
)
def test_what_is_no_location(served: ServedStores, text: str) -> None:
    """A URL with a secret in it would be shown in Spark's plans."""
    with pytest.raises(ConfigError, match=r"option path: found .* allowed is the path of a folder"):
        source_options({"path": text, "subscribe": "t"})
    with pytest.raises(
        ConfigError, match=r"path: found .* or the URL of a store that is served \(http://host:port or https"
    ):
        Location.of(text)
    assert not served.opened


def test_a_url_that_nothing_opens_is_refused_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("http", "https"):
        monkeypatch.delitem(OPENERS, scheme)
    with pytest.raises(ConfigError, match=f"found '{URL}'; allowed is the path of a folder"):
        source_options({"path": URL, "subscribe": "t"})
    with pytest.raises(ConfigError, match="nothing here opens it"):
        STORES.reader(Location(URL, "http"))
    assert "URL" not in location_words()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("storeConfig", "store.properties"),
        ("stagingDir", "/staging"),
        ("preallocate", "true"),
        ("maxMessageSize", "10"),
        ("lockTimeout", "1s"),
        ("stagingTtl", "1h"),
        ("brokerClusterName", "north"),
        ("brokerName", "broker-a"),
        ("storeHost", "10.0.0.7:10911"),
    ],
)
def test_settings_of_the_server_do_not_go_with_a_url(option: str, value: str) -> None:
    """The server has its own settings; a client that thinks it has given some would be wrong."""
    given = {"path": URL, "topic": "t", option: value}
    with pytest.raises(ConfigError, match=rf"option {option}: found together with {URL}\. Who serves that store"):
        sink_options(given)
    with pytest.raises(ConfigError, match=option):
        MessageStoreSink(URL, app_id="a", **{name: value for name, value in given.items() if name != "path"})


SERVER = {"tokenFile": "t", "caFile": "a", "certFile": "c", "keyFile": "k", "retryTimeout": "2m"}
SETTINGS = RemoteSettings("t", "a", "c", "k", 120.0)


@pytest.mark.parametrize("kind", ["batch", "stream", "view"])
def test_how_a_server_is_reached_goes_with_a_read(served: ServedStores, kind: str) -> None:
    """Planning and tasks alike open the store with these settings; they are names of files, so they may be shown."""
    add(served.root, 4)
    given = {"path": URL, "subscribe": "t", **SERVER}
    if kind == "batch":
        reader = BatchReader(source_options(given), BODY, STORES)
        assert len(rows(reader, pickle.loads(pickle.dumps(reader.partitions())))) == 4
    elif kind == "stream":
        StreamReader(source_options(given), BODY, STORES).initialOffset()
    else:
        options = {"path": URL, "view": "topics", **SERVER}
        source = MessageStoreDataSource(options)
        view = source.reader(source.schema())
        assert list(view.read(view.partitions()[0]))
    assert served.opened and {each.settings for each in served.opened} == {SETTINGS}
    assert pickle.loads(pickle.dumps(served.opened[0])) == served.opened[0]


def test_how_a_server_is_reached_goes_with_a_write(served: ServedStores) -> None:
    schema = StructType([StructField("body", StringType())])
    MessageStoreDataSource({"path": URL, "topic": "t", **SERVER}).writer(schema, overwrite=False)
    assert served.opened and {each.settings for each in served.opened} == {SETTINGS}


def reached(side: str, **given: str) -> RemoteSettings:
    """How Spark's reader or writer would reach brokers. No broker is asked yet: a row names its topic."""
    of_reads = {"subscribe": "t"} if side != "write" else {}
    source = MessageStoreDataSource({"path": "rocketmq://127.0.0.1:9876", **of_reads, **given})
    schema = StructType().add("topic", "string").add("body", "binary")
    if side == "write":
        options = source.writer(schema, overwrite=False).sink.options
    else:
        options = (source.reader(schema) if side == "batch" else source.streamReader(schema)).options
    return options.location.settings


@pytest.mark.parametrize("side", ["batch", "stream", "write"])
def test_how_brokers_are_reached(side: str) -> None:
    found = reached(side)
    assert (found.credentials_file, found.use_tls, found.check_host_name) == ("", False, True)
    assert reached(side, credentialsFile="keys.yml").credentials_file == "keys.yml"
    for word, value in (("true", True), ("false", False)):
        assert reached(side, useTLS=word).use_tls is value
        assert reached(side, checkHostName=word).check_host_name is value


@pytest.mark.parametrize("side", ["batch", "stream"])
def test_which_broker_of_a_pair_is_read(side: str) -> None:
    assert [reached(side, readFrom=word).read_from for word in ("master", "slave")] == ["master", "slave"]


def test_without_options_the_environment_says_how_a_server_is_reached(
    served: ServedStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the command line, which has no options for it. A certificate and its key come from the same place."""
    add(served.root, 4)
    for name in ("TOKEN", "CA", "CERT", "KEY"):
        monkeypatch.setenv(f"MESSAGESTORE_{name}_FILE", name)
    assert Location.of(URL).settings == RemoteSettings("TOKEN", "CA", "CERT", "KEY", 30.0)
    options = source_options({"path": URL, "subscribe": "t", "certFile": "mine"})
    assert options.location.settings == RemoteSettings("TOKEN", "CA", "mine", "", 30.0)
    assert (
        Location.of(served.root).settings == source_options({"path": served.root, "subscribe": "t"}).location.settings
    )
    assert run("get", URL, "t", "0").stdout
    assert served.opened[-1].settings.token_file == "TOKEN"


def test_without_the_option_the_environment_says_how_long_a_server_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option comes first. A time that is none is refused, and not taken for the default."""
    monkeypatch.setenv("MESSAGESTORE_RETRY_TIMEOUT", "5m")
    given = {"path": URL, "subscribe": "t"}
    assert Location.of(URL).settings.retry_timeout_s == 300.0
    assert source_options(given).location.settings.retry_timeout_s == 300.0
    assert source_options(given | {"retryTimeout": "2s"}).location.settings.retry_timeout_s == 2.0
    monkeypatch.setenv("MESSAGESTORE_RETRY_TIMEOUT", "")
    assert Location.of(URL).settings.retry_timeout_s == 30.0
    monkeypatch.setenv("MESSAGESTORE_RETRY_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="MESSAGESTORE_RETRY_TIMEOUT: found 'soon'; allowed is a duration"):
        source_options(given)


@pytest.mark.parametrize("option", SERVER)
def test_options_about_a_server_do_not_go_with_a_folder(option: str, tmp_path: Path) -> None:
    given = {"path": str(tmp_path), option: SERVER[option]}
    for parse, more in ((source_options, {"subscribe": "t"}), (sink_options, {"topic": "t"})):
        with pytest.raises(ConfigError, match=f"option {option}: found together with the folder {tmp_path};"):
            parse({**given, **more})
    with pytest.raises(ConfigError, match=f"option {option}: found together"):
        MessageStoreSink(tmp_path, app_id="a", **{option: SERVER[option]})


@pytest.mark.usefixtures("served")
def test_a_key_needs_its_certificate() -> None:
    with pytest.raises(ConfigError, match="option keyFile: found without certFile"):
        source_options({"path": URL, "subscribe": "t", "keyFile": "k"})


@pytest.mark.usefixtures("served")
def test_what_needs_the_files_says_so() -> None:
    """A URL is never taken for a relative path."""
    for command in (["verify"], ["recover"], ["dump"], ["groups"]):
        assert "this command needs the store's files" in error(*command, URL, code=2)
    with pytest.raises(ConfigError, match="needs the store's files"):
        LOCAL_STORES.reader(Location.of(URL))


def test_a_url_of_another_kind_says_which_a_command_takes() -> None:
    for command in (["offsets"], ["topics"], ["status"]):
        said = error(*command, "ftp://shop", code=2)
        assert "allowed are the path of a folder on this machine, http:// and https://" in said
        assert "needs the store's files" not in said


def test_the_partitions_of_a_served_store_do_not_follow_the_drivers_processors(
    served: ServedStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tasks run elsewhere: only sizes count, and what the user asks for."""
    add(served.root, 4000, size=1000)
    monkeypatch.setattr("pyspark_messagestore.source.planning.SMALL_WEIGHT", 1)

    def count(path: str, processors: int, **options: str) -> int:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
        reader = BatchReader(source_options({"path": path, "subscribe": "t", **options}), BODY, STORES)
        return len(reader.partitions())

    assert [count(served.root, number) for number in (1, 4)] == [1, 4]
    assert [count(URL, number) for number in (1, 4)] == [1, 1]
    assert count(URL, 1, minPartitions="8") == 8
