"""A broker of RocketMQ 4.9, with ACL 1.0 and without long polling; and bodies that clients compressed.

All of it is one cluster, so that it starts two JVMs only.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from interop import java_build
from interop.conftest import need
from interop.java_build import LEGACY
from interop.java_store import COUNTS
from interop.live import broker, create_topic, put, soon
from interop.real_broker import _LOGBACK, NameServer, RealBroker
from interop.sender import rows, sent, sink_of
from interop.test_live_source import Query, bodies
from messagestore import BrokerError
from messagestore.remoting import Client, RemotingSettings, codes
from messagestore.spi import STORES, Location

ACL = """\
accounts:
- accessKey: rocketmqadmin
  secretKey: 12345678
  admin: true
- accessKey: sparkreads
  secretKey: 87654321
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: DENY
  topicPerms:
  - t=SUB
  groupPerms:
  - TOOLS_CONSUMER=SUB
- accessKey: sparkwrites
  secretKey: 87654321
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: DENY
  topicPerms:
  - t=PUB|SUB
  groupPerms:
  - TOOLS_CONSUMER=SUB
"""
COMPRESSED, LZ4, ZSTD, ZLIB = 1, 1 << 8, 2 << 8, 3 << 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NameServer, RealBroker, Path]]:
    """A name server, a broker with the topics `t` and `plain`, and the folder with the keys of users."""
    need(LEGACY, java_build.tools_classpath)
    folder = tmp_path_factory.mktemp("old-brokers")
    for name, secret in (("rocketmqadmin", 12345678), ("sparkreads", 87654321), ("sparkwrites", 87654321)):
        (folder / f"{name}.yml").write_text(f"accessKey: {name}\nsecretKey: {secret}\n")
    (folder / "wrong.yml").write_text("accessKey: sparkreads\nsecretKey: 11111111\n")
    (folder / "names" / "conf").mkdir(parents=True)
    (folder / "names" / "conf" / "logback_namesrv.xml").write_text(_LOGBACK)
    with NameServer(LEGACY, folder / "names") as names:
        one = broker(LEGACY, folder, names, more="aclEnable=true\nlongPollingEnable=false\n")
        (folder / "broker-a-0" / "conf" / "plain_acl.yml").write_text(ACL)
        with one:
            for topic in ("t", "plain", "packed"):
                create_topic(names, [one], topic, credentials=folder / "rocketmqadmin.yml")
            yield names, one, folder
    COUNTS.stores += 1


def await_shown(names: NameServer, folder: Path, topic: str, count: int) -> None:
    """Wait until the queues of a topic show so many messages: a broker answers a put before they do."""
    location = Location.of(f"rocketmq://{names}/broker-a").reached_by(
        credentials_file=str(folder / "rocketmqadmin.yml")
    )
    with contextlib.closing(STORES.reader(location)) as store:
        soon(lambda: sum(store.ends([topic]).queues.values()), lambda shown: shown == count)


def test_a_users_permission_of_acl_1_is_enough(cluster: tuple[NameServer, RealBroker, Path]) -> None:
    """Who may subscribe reads, who may publish writes, and all others are told why not."""
    names, _, folder = cluster
    put(names, "t", bodies("x", 40), credentials=folder / "rocketmqadmin.yml")
    await_shown(names, folder, "t", 40)
    query = Query(names, credentialsFile=str(folder / "sparkreads.yml"))
    assert query.run() == 40
    query.check(*bodies("x", 40))
    assert query.run() == 0

    for options in ({}, {"credentialsFile": str(folder / "wrong.yml")}):
        with pytest.raises(BrokerError, match=r"broker-a.*AclException"):
            Query(names, **options).run()
    put(names, "plain", [b"not for all"], credentials=folder / "rocketmqadmin.yml")
    await_shown(names, folder, "plain", 1)
    with pytest.raises(BrokerError, match=r"broker-a.*(AclException|NO_PERMISSION)"):
        Query(names, subscribe="plain", credentialsFile=str(folder / "sparkreads.yml")).run()

    batches = rows(0, 700)
    wanted = [body for batch in batches for body in batch["body"].to_pylist()]
    options = {"path": f"rocketmq://{names}", "topic": "t", "lookupDir": str(folder / "lookups")}
    with pytest.raises(BrokerError, match=r"broker-a.*(AclException|NO_PERMISSION)"):
        sent(sink_of({**options, "credentialsFile": str(folder / "sparkreads.yml")}), 0, *batches)
    sink = sink_of({**options, "credentialsFile": str(folder / "sparkwrites.yml")})
    assert sent(sink, 0, *batches).rows == 700
    assert sent(sink, 0, *batches).repeated == 700, "the rows were there already"
    await_shown(names, folder, "t", 740)
    assert query.run() == 700
    query.check(*bodies("x", 40), *wanted)


def test_a_broker_that_keeps_no_requests(cluster: tuple[NameServer, RealBroker, Path]) -> None:
    """With longPollingEnable=false a reader that waits is told of a message all the same."""
    names, _, folder = cluster
    location = Location.of(f"rocketmq://{names}/broker-a")
    with contextlib.closing(
        STORES.reader(location.reached_by(credentials_file=str(folder / "rocketmqadmin.yml")))
    ) as store:
        before = store.ends(["plain"])
        before = store.ends(["plain"], before)
        put(names, "plain", [b"new"], credentials=folder / "rocketmqadmin.yml")
        until_s = time.monotonic() + 60
        while (found := store.ends(["plain"], before)) is before:
            assert time.monotonic() < until_s
            store.await_change(1)
        assert sum(found.queues.values()) == sum(before.queues.values()) + 1


def test_bodies_that_clients_compressed(cluster: tuple[NameServer, RealBroker, Path]) -> None:
    """Clients compress, and brokers keep what they get; so a broker of any version has bodies of any kind."""
    names, one, folder = cluster
    plain = [b"%d " % number + b"words " * 2000 for number in range(4)]
    kinds = {
        COMPRESSED: zlib.compress,
        COMPRESSED | LZ4: lambda body: pa.compress(body, "lz4", asbytes=True),
        COMPRESSED | ZSTD: lambda body: pa.compress(body, "zstd", asbytes=True),
        COMPRESSED | ZLIB: zlib.compress,
    }
    settings = RemotingSettings(credentials_file=str(folder / "rocketmqadmin.yml"))
    with contextlib.closing(Client(str(names), settings)) as client:
        for body, (sys_flag, packed) in zip(plain, kinds.items(), strict=True):
            fields = {"a": "tests", "b": "packed", "c": "TBW102", "d": 2, "e": 0, "f": sys_flag, "i": ""}
            fields |= {"g": time.time_ns() // 1_000_000, "h": 0, "j": 0, "k": False, "m": False}
            client.request(f"127.0.0.1:{one.port}", codes.SEND_MESSAGE_V2, fields, packed(body))
    await_shown(names, folder, "packed", 4)
    credentials = str(folder / "rocketmqadmin.yml")
    query = Query(names, subscribe="packed", credentialsFile=credentials)
    assert query.run() == 4
    assert [body for *_, body in query.rows] == plain
    stored = Query(names, subscribe="packed", credentialsFile=credentials, decompress="false")
    assert stored.run() == 4
    assert [body for *_, body in stored.rows] == [
        packed(body) for body, packed in zip(plain, kinds.values(), strict=True)
    ]
