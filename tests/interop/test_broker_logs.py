"""What Java's own recovery keeps of a broker's log, ours keeps, whatever is in it and whichever derived files are gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from crash.imitate import walk
from interop.compare import check_messages
from interop.java_store import Driver, JavaStore, java_config, single
from messagestore import MessageStore, NotAStoreError
from messagestore.inspect.verify import verify
from small import SMALL

CONFIG = SMALL
PREPARED, COMMIT, ROLLBACK = 0x4, 0x8, 0xC
LONG = "L" * 200
Start = Callable[..., Driver]


def long_topics(theirs: JavaStore) -> None:
    """V2 records, between others."""
    for number in range(12):
        topic = LONG if number % 3 == 1 else "%RETRY%group+t" if number % 3 == 2 else "t"
        theirs.put([single(topic, b"%d" % number * 900, keys=[f"k{number}"])])


def topic_made_twice_again(theirs: JavaStore) -> None:
    """Numbers begin at 0 three times; another topic goes on between."""
    for run in range(3):
        theirs.put([single("d", b"%d/%d" % (run, n) * 100, keys=[f"d{run}-{n}"]) for n in range(8)])
        theirs.put([single("other", b"o%d/%d" % (run, n) * 100) for n in range(4)])
        theirs.dispatched()
        if run < 2:
            theirs.delete_topic("d")


def fewer_queues_than_before(theirs: JavaStore) -> None:
    """The topic is made again, and its second queue is not used any more."""
    theirs.put([single("d", b"old%d" % n, queue_id=n % 2) for n in range(8)])
    theirs.dispatched()
    theirs.delete_topic("d")
    theirs.put([single("d", b"new%d" % n) for n in range(3)])


def transactions(theirs: JavaStore) -> None:
    """PREPARED and ROLLBACK have no unit and number 0; there are more of them than one look takes."""
    flags = [0, PREPARED, ROLLBACK, COMMIT]
    theirs.put(
        [
            single("t", b"%d/" % n * 40, queue_id=n % 3, sysFlag=flags[n % 4], keys=[f"k{n}"], prepared=7)
            for n in range(200)
        ]
    )


FILLS = {f.__name__: f for f in (long_topics, topic_made_twice_again, fewer_queues_than_before, transactions)}


def queues_of(root: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for folder in sorted((root / "consumequeue").glob("*/*")):
        found.setdefault(folder.parent.name, []).append(int(folder.name))
    return found


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("fill", FILLS)
def test_what_java_keeps_is_kept(own_java: Start, root: Path, fill: str, closes: bool) -> None:
    """Java fills a store, closes it or is killed; queues, index, both or none are then taken away. No record goes; a
    broker that opens what we leave sees what we see."""
    java = own_java()
    theirs = JavaStore(java, root, java_config(CONFIG)).open()
    FILLS[fill](theirs)
    theirs.dispatched()
    if closes:
        theirs.close()
    java.kill()

    records, end = walk(root)

    java, closing = own_java(), []
    for missing in ((), ("consumequeue",), ("index",), ("consumequeue", "index")):
        copy, javas = (shutil.copytree(root, root.parent / f"{name}-without-{'-'.join(missing)}") for name in "oj")
        for folder in missing:
            shutil.rmtree(copy / folder)
            shutil.rmtree(javas / folder)
        theirs = JavaStore(java, javas, java_config(CONFIG)).open()
        assert theirs.log()["max"] == end, "the test is wrong about what Java keeps"
        closing.append(theirs.closing())

        before = queues_of(copy)
        with MessageStore.open(copy, CONFIG) as store:
            report = store.report
            assert report is not None
            assert (report.end, report.zeroed_bytes, report.cut) == (end, 0, None), (missing, report)
            assert walk(copy)[0] == records
            assert set(store.topics()) == {r["topic"] for r in records}
            if closes and not missing:
                assert store.topics() == before
            for topic, queue_ids in store.topics().items():
                for queue_id in queue_ids:
                    found = store.get_message(topic, queue_id, 0, 1000).messages
                    assert [m.body for m in found] == last_run(records, topic, queue_id), (missing, topic, queue_id)

        faults = verify(copy, CONFIG).findings
        assert not faults, (missing, faults)

        theirs = JavaStore(java, copy, java_config(CONFIG)).open()
        with MessageStore.open_read_only(copy, CONFIG) as view:
            check_messages(view, theirs)
            for topic, key in {
                (r["topic"], key) for r in records for key in r["all_properties"].get("KEYS", "").split()
            }:
                ours = {m.physical_offset for m in view.query_message(topic, key)}
                assert ours == set(theirs.query(topic, [key])[0]), (missing, topic, key)
        closing.append(theirs.closing())

    for answer in closing:
        answer.result(60)


def last_run(records: list[dict], topic: str, queue_id: int) -> list[bytes]:
    """Bodies of a queue, from where its numbers began last."""
    mine = [
        r for r in records if (r["topic"], r["queue_id"]) == (topic, queue_id) and r["sys_flag"] & 0xC in (0, COMMIT)
    ]
    begin = max(i for i, r in enumerate(mine) if r["queue_offset"] == 0)
    return [r["body"] for r in mine[begin:]]


def test_light_queues_whose_folder_is_gone_are_recognised(own_java: Start, root: Path) -> None:
    """`consumequeue` of an LMQ store was deleted: the records tell, and nothing is written into it."""
    config = java_config(CONFIG, enableLmq="true", enableMultiDispatch="true")
    with JavaStore(own_java(), root, config) as theirs:
        theirs.put([single("t", b"%d" % i, properties=[["INNER_MULTI_DISPATCH", "%LMQ%a"]]) for i in range(5)])
        theirs.dispatched()
    shutil.rmtree(root / "consumequeue")
    with pytest.raises(NotAStoreError, match="light queue"):
        MessageStore.open(root, CONFIG)
    assert not (root / "spark" / "store.json").exists()
    assert not (root / "consumequeue").exists()
