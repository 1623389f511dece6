"""RocketMQ's other forms: what we do not decode is shown raw, or refused by name; never misread, never written over."""

from __future__ import annotations

import base64
import shutil
import time
import zlib
from pathlib import Path

import lz4.frame
import pytest
import zstandard

from interop.compare import check_messages, check_statuses
from interop.java_store import Driver, JavaStore, batch, java_config, of_message, single
from interop.trees import difference, tree
from messagestore import ConfigError, Message, MessageStore, NotAStoreError, ReadOnlyStore
from messagestore.format import javahash
from messagestore.inspect.verify import verify
from small import SMALL, columns

LZ4, ZSTD, ZLIB = 1, 2, 3
PREPARED, COMMIT, ROLLBACK = 0x4, 0x8, 0xC


def compressed(java: Driver, kind: str, code: int, body: bytes) -> dict[str, object]:
    """A message whose body Java's own compressor made."""
    packed = java.call("compress", type=kind, level=5, body=base64.b64encode(body).decode())
    return {**single("t", keys=[kind]), "body": packed, "sysFlag": 1 | code << 8}


def unpack(kind: str, body: bytes) -> bytes:
    return {"ZLIB": zlib.decompress, "LZ4": lz4.frame.decompress, "ZSTD": decompress_zstd}[kind](body)


def decompress_zstd(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(body)


def take_over(java: Driver, root: Path, config: dict[str, object]) -> None:
    """Closed by Java: our open and close change no byte; what we append Java reads, with all that was there."""
    before = tree(root)
    with MessageStore.open(root, SMALL):
        pass
    assert not difference(before, tree(root))
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"ours", queue_id=0, keys=["ours"]))
        store.append_batch(columns([b"batch"] * 5))
    assert verify(root).ok, verify(root).findings
    with JavaStore(java, root, config) as theirs, MessageStore.open_read_only(root, SMALL) as store:
        check_messages(store, theirs)
        check_statuses(store, theirs, "t", 0)
        assert theirs.query("t", ["ours"]) == [[store.query_message("t", "ours")[0].physical_offset]]


@pytest.mark.parametrize("property_crc", [False, True])
def test_compressed_bodies_are_shown_as_they_are_stored(java: Driver, root: Path, property_crc: bool) -> None:
    """zlib, lz4 and zstd: the raw bytes, with the flags that say so; a program unpacks them."""
    body = b"hello, " * 200
    config = java_config(SMALL, enabledAppendPropCRC=str(property_crc).lower())
    with JavaStore(java, root, config) as theirs:
        kinds = {"ZLIB": ZLIB, "LZ4": LZ4, "ZSTD": ZSTD}
        theirs.put([compressed(java, kind, code, body) for kind, code in kinds.items()])
        theirs.dispatched()
        with MessageStore.open_read_only(root, SMALL) as store:
            check_messages(store, theirs)
            for kind, code in kinds.items():
                (message,) = store.query_message("t", kind)
                assert message.sys_flag & 0x701 == 1 | code << 8
                assert unpack(kind, message.body) == body
    take_over(java, root, config)


def test_transactions_are_shown_raw(java: Driver, root: Path) -> None:
    """PREPARED and ROLLBACK are in the log, and in no queue; COMMIT is, and names its half. Half and op messages lie in
    topics of their own."""
    with JavaStore(java, root, java_config(SMALL)) as theirs:
        half = [["REAL_TOPIC", "t"], ["REAL_QID", "0"], ["TRAN_MSG", "true"], ["PGROUP", "g"]]
        prepared, rollback, commit, *_ = theirs.put(
            [
                single("t", b"prepared", sysFlag=PREPARED, keys=["prepared"]),
                single("t", b"rolled back", sysFlag=ROLLBACK, prepared=77, keys=["rolled"]),
                single("t", b"committed", sysFlag=COMMIT, prepared=123, keys=["committed"]),
                single("RMQ_SYS_TRANS_HALF_TOPIC", b"half", properties=half),
                single("RMQ_SYS_TRANS_OP_HALF_TOPIC", b"0,", tags="d"),
            ]
        )
        theirs.dispatched()
        with MessageStore.open_read_only(root, SMALL) as store:
            check_messages(store, theirs)
            assert [m.body for m in store.get_message("t", 0, 0).messages] == [b"committed"]
            assert store.look_message_by_offset(rollback["physicalOffset"]).body == b"rolled back"
            found = {key: [m.physical_offset for m in store.query_message("t", key)] for key in ("prepared", "rolled")}
            assert theirs.query("t", ["prepared", "rolled"]) == [found["prepared"], found["rolled"]]
            assert found == {"prepared": [prepared["physicalOffset"]], "rolled": []}
            (message,) = store.query_message("t", "committed")
            assert (message.physical_offset, message.prepared_transaction_offset) == (commit["physicalOffset"], 123)
    take_over(java, root, java_config(SMALL))


def test_our_half_messages_are_java_s(java: Driver, root: Path) -> None:
    """PREPARED, COMMIT and ROLLBACK put by us: records, queues and keys are those that Java makes of the same puts, and so
    are queues and index that are made again, by us and by Java."""
    flags = [0, PREPARED, COMMIT, ROLLBACK, PREPARED, 0]
    messages = [
        Message(
            "t",
            b"%d" % n,
            queue_id=0,
            keys=[f"k{n}"],
            sys_flag=flag,
            born_timestamp_ms=1_700_000_000_000,
            prepared_transaction_offset=100 + n if flag in (COMMIT, ROLLBACK) else 0,
        )
        for n, flag in enumerate(flags)
    ]
    with MessageStore.open(root, SMALL) as store:
        ours = [store.put_message(message) for message in messages]
    with JavaStore(java, root.parent / "java", java_config(SMALL)) as theirs:
        host = "127.0.0.1:10911"
        puts = theirs.put([of_message(m, 0, host, prepared=m.prepared_transaction_offset) for m in messages])
        theirs.dispatched()
        assert [(p.physical_offset, p.queue_offset) for p in ours] == [
            (p["physicalOffset"], p["queueOffset"]) for p in puts
        ]
        wanted = theirs.query("t", [f"k{n}" for n in range(len(flags))])
    for missing in ((), ("consumequeue", "index")):
        for name in missing:
            shutil.rmtree(root / name)
        if missing:
            with MessageStore.open(root, SMALL):
                pass
        with JavaStore(java, root, java_config(SMALL)) as theirs, MessageStore.open_read_only(root, SMALL) as store:
            check_messages(store, theirs)
            assert [m.body for m in store.get_message("t", 0, 0).messages] == [b"0", b"2", b"5"]
            keys = [f"k{n}" for n in range(len(flags))]
            assert theirs.query("t", keys) == wanted
            assert [[m.physical_offset for m in store.query_message("t", key)] for key in keys] == wanted


def test_scheduled_messages_are_shown_raw(java: Driver, root: Path) -> None:
    """A delayed message lies in SCHEDULE_TOPIC_XXXX; its unit holds the time it is due instead of a hash of its tag."""
    with JavaStore(java, root, java_config(SMALL)) as theirs:
        names = [["REAL_TOPIC", "t"], ["REAL_QID", "0"]]
        for level in (1, 3, 18, 19):
            theirs.put(
                [
                    single("SCHEDULE_TOPIC_XXXX", b"late", queue_id=min(level, 18) - 1, tags="T", properties=[["DELAY", str(level)], *names]),
                    single("t", b"delay means nothing here", properties=[["DELAY", str(level)]]),
                ]
            )  # fmt: skip
        theirs.dispatched()
        with MessageStore.open_read_only(root, SMALL) as store:
            check_messages(store, theirs)
            (message,) = store.get_message("SCHEDULE_TOPIC_XXXX", 2, 0).messages
            (unit,) = store.view.units("SCHEDULE_TOPIC_XXXX", 2, 0, 1)
            assert int(unit["tags_code"]) == message.store_timestamp_ms + 10_000
            assert message.tags == "T"
    take_over(java, root, java_config(SMALL))


def test_queues_with_an_extension_are_read(java: Driver, root: Path) -> None:
    """With enableConsumeQueueExt a unit holds an address instead of a hash: tags come from the records."""
    config = java_config(SMALL, enableConsumeQueueExt="true", mappedFileSizeConsumeQueueExt=4096)
    with JavaStore(java, root, config) as theirs:
        theirs.put([single("t", b"%d" % i, tags=f"tag{i % 3}", keys=[f"k{i}"]) for i in range(40)])
        theirs.dispatched()
        with MessageStore.open_read_only(root, SMALL) as store:
            check_messages(store, theirs)
            (unit,) = store.view.units("t", 0, 0, 1)
            assert int(unit["tags_code"]) == -(2**63)
            assert [m.tags for m in store.get_message("t", 0, 0, 3).messages] == ["tag0", "tag1", "tag2"]
    take_over(java, root, config)
    with MessageStore.open_read_only(root, SMALL) as store:
        (unit,) = store.view.units("t", 0, 40, 41)
        assert int(unit["tags_code"]) == 0  # ours is a plain one, which Java takes as it is


def test_retention_deletes_the_files_of_an_extension_that_java_would_delete(java: Driver, root: Path) -> None:
    """The next Java store opens, reads what is left, and writes on."""
    config = java_config(SMALL, enableConsumeQueueExt="true", mappedFileSizeConsumeQueueExt=4096)
    with JavaStore(java, root, config) as theirs:
        theirs.put([single("t", b"%04d" % i + b"." * 200, tags=f"tag{i % 3}") for i in range(600)])
        theirs.dispatched()
    files = root / "consumequeue_ext" / "t" / "0"
    before = len(list(files.iterdir()))
    with MessageStore.open(root, SMALL) as store:
        assert store.delete_expired_files(at_once=True).segments
        (unit,) = store.view.units("t", 0, store.min_offset("t", 0), store.min_offset("t", 0) + 1)
        place = int(unit["tags_code"]) + (1 << 63)
    left = sorted(int(path.name) for path in files.iterdir())
    assert before - len(left) >= 2
    assert left[0] <= place < left[-1] + 4096
    with JavaStore(java, root, config) as theirs:
        theirs.put([single("t", b"after", tags="tag1")])
        theirs.dispatched()
        with MessageStore.open_read_only(root, SMALL) as store:
            check_messages(store, theirs)


def shown_empty_by_nobody(root: Path, topics: list[str], named: str) -> None:
    """Each topic is refused by name, and is not among those that can be read."""
    with MessageStore.open_read_only(root, SMALL) as store:
        assert not set(topics) & set(store.topics())
        for topic in topics:
            for read in (
                lambda topic=topic: store.get_message(topic, 0, 0),
                lambda topic=topic: store.max_offset(topic, 0),
                lambda topic=topic: list(store.read(topic, 0, 0)),
                lambda topic=topic: store.query_message(topic, "k"),
                lambda topic=topic: store.view.queue_ids(topic),
            ):
                with pytest.raises(ConfigError, match=named) as caught:
                    read()
                assert topic in str(caught.value)


def no_writer(root: Path, named: str) -> None:
    """A writer is refused, and has made nothing: no folder of ours, and no lock file that was not there."""
    before, names = tree(root), {path.name for path in root.iterdir()}
    with pytest.raises(NotAStoreError, match=named):
        MessageStore.open(root, SMALL)
    assert not difference(before, tree(root))
    assert {path.name for path in root.iterdir()} == names


def test_batch_queues_are_read_message_by_message(java: Driver, root: Path) -> None:
    """An inner batch is one record for several messages, in BatchConsumeQueues of many small files; a store with such
    queues has no writer of ours."""
    inner = {"inner": {"queue.type": "BatchCQ"}}
    sent: list[tuple[bytes, str]] = []
    with (
        JavaStore(java, root, java_config(SMALL, mapperFileSizeBatchConsumeQueue="460"), inner) as theirs,
        MessageStore.open_read_only(root, SMALL) as store,
    ):
        for number in range(60):
            texts = [b"%d/%d" % (number, i) for i in range(1 + number % 5)]
            messages = [single("inner", text, keys=[f"k{number}-{i}"]) for i, text in enumerate(texts)]
            (put, _) = theirs.put(
                [
                    batch("inner", messages, inner=True, properties=[["UNIQ_KEY", f"U{number}"]]),
                    single("t", b"an ordinary one", keys=["k"]),
                ]
            )
            assert (put["ok"], put["count"]) == (True, len(texts))
            sent += [(text, f"k{number}-{i}") for i, text in enumerate(texts)]
        theirs.dispatched()
        assert (store.min_offset("inner", 0), store.max_offset("inner", 0)) == theirs.ends("inner", 0) == (0, len(sent))
        check_inner(store, sent)
        raw = store.look_message_by_offset(put["physicalOffset"])
        assert raw is not None
        assert (raw.sys_flag & 0xC0, raw.system_properties["INNER_NUM"]) == (0xC0, "5")
        assert [message.body for message in store.get_message("t", 0, 0, 100).messages] == [b"an ordinary one"] * 60
    with MessageStore.open_read_only(root, SMALL) as store:
        check_inner(store, sent)
    no_writer(root, "batch queues")


def check_inner(store: ReadOnlyStore, sent: list[tuple[bytes, str]]) -> None:
    """Each message of the topic `inner` once, from the start and from within a record."""
    for start in (0, 1, 2, len(sent) // 2, len(sent) - 1):
        batches = store.read("inner", 0, start, columns=["queue_offset", "body", "keys"])
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert [(row["body"], *row["keys"]) for row in rows] == sent[start:]
        assert [row["queue_offset"] for row in rows] == list(range(start, len(sent)))


def test_light_queues_are_refused_by_name(java: Driver, root: Path) -> None:
    """With multi-dispatch a message is in its own queue, and a unit for it in each light queue, without a record there."""
    config = java_config(SMALL, enableLmq="true", enableMultiDispatch="true")
    with JavaStore(java, root, config) as theirs:
        theirs.put([single("t", b"%d" % i, properties=[["INNER_MULTI_DISPATCH", "%LMQ%a,%LMQ%b"]]) for i in range(5)])
        theirs.dispatched()
        assert theirs.ends("%LMQ%a", 0) == (0, 5)
        shown_empty_by_nobody(root, ["%LMQ%a", "%LMQ%b"], "light queue")
        with MessageStore.open_read_only(root, SMALL) as store:
            check_messages(store, theirs)
            assert len(store.get_message("t", 0, 0).messages) == 5
    shown_empty_by_nobody(root, ["%LMQ%a"], "light queue")
    no_writer(root, "light queue")
    assert verify(root, SMALL).ok, verify(root, SMALL).findings


def test_rocksdb_queues_are_refused_by_name(java: Driver, root: Path) -> None:
    """With storeType=defaultRocksDB there are no queue files: without a word the store would look empty."""
    with JavaStore(java, root, java_config(SMALL, storeType="defaultRocksDB")) as theirs:
        theirs.put([single("t", b"in RocksDB")])
        for _ in range(100):  # a thread of its own writes the queues
            if theirs.bodies("t", 0):
                break
            time.sleep(0.1)
        assert theirs.bodies("t", 0) == [b"in RocksDB"]
        with pytest.raises(NotAStoreError, match="RocksDB"):
            MessageStore.open_read_only(root, SMALL)
    with pytest.raises(NotAStoreError, match="RocksDB"):
        MessageStore.open_read_only(root, SMALL)
    no_writer(root, "RocksDB")


def test_a_topic_that_is_not_there_is_not_called_a_form(java: Driver, root: Path) -> None:
    """The errors above are for what is there."""
    with JavaStore(java, root, java_config(SMALL)) as theirs:
        theirs.put([single("t", b"x")])
        theirs.dispatched()
        with MessageStore.open_read_only(root, SMALL) as store:
            assert store.get_message("nope", 0, 0).status.name == theirs.get("nope", 0, 0)["status"]
            assert store.query_message("nope", "k") == []
            assert theirs.query("nope", ["k"]) == [[]]


def test_tags_with_negative_hashes_in_units(java: Driver, root: Path) -> None:
    """A unit's tags code is the hash with its sign: what Java filters by."""
    tags = ["polygenelubricants", "zzzzzz", "中文", "é"]
    with MessageStore.open(root, SMALL) as store:
        for tag in tags:
            store.put_message(Message("t", b"x", queue_id=0, tags=tag))
    with JavaStore(java, root, java_config(SMALL)) as theirs, MessageStore.open_read_only(root, SMALL) as store:
        check_messages(store, theirs)
        found = [int(unit["tags_code"]) for unit in store.view.units("t", 0, 0, 4)]
    assert found == [javahash.java_hash(tag) for tag in tags]
    assert min(found) == -(2**31)
