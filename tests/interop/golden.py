"""Makes the golden stores of tests/golden with the Java store: `python -m interop.golden` with tests/ on the path.

    cd tests && ../.venv/bin/python -m interop.golden

Each is a zip of a store's files and `expected.json`: what Java said was in it, and with which settings.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from interop import java_build, recipes
from interop.java_store import Driver, JavaStore, batch, java_config, single
from small import SMALL

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
_DATE = (2026, 1, 1, 0, 0, 0)
NAMES = [["REAL_TOPIC", "t"], ["REAL_QID", "0"]]


def plain(java: JavaStore) -> None:
    """Singles and batches of all shapes, at fixed times."""
    rng = Random(99)
    made = recipes.Recipe(SMALL, ())
    steps = recipes.more_steps(rng, made, ["plain", "%RETRY%group".ljust(140, "x")], 25)
    recipes.put_java(java, recipes.Recipe(SMALL, steps))


def forms(java: JavaStore) -> None:
    """Compressed bodies, transactions, delays; queues with an extension."""
    body = b"hello, " * 100
    kinds = {"ZLIB": 3, "LZ4": 1, "ZSTD": 2}
    for kind, code in kinds.items():
        packed = java.driver.call("compress", type=kind, level=5, body=base64.b64encode(body).decode())
        java.put([{**single("t", keys=[kind]), "body": packed, "sysFlag": 1 | code << 8}])
    java.put(
        [
            single("t", b"prepared", sysFlag=4, keys=["prepared"]),
            single("t", b"rolled back", sysFlag=12, prepared=77),
            single("t", b"committed", sysFlag=8, prepared=123, tags="T"),
            single("SCHEDULE_TOPIC_XXXX", b"late", queue_id=2, properties=[["DELAY", "3"], *NAMES]),
            single("RMQ_SYS_TRANS_HALF_TOPIC", b"half", properties=[*NAMES, ["TRAN_MSG", "true"], ["PGROUP", "g"]]),
            single("RMQ_SYS_TRANS_OP_HALF_TOPIC", b"0,", tags="d"),
        ]
    )


def crashed(java: JavaStore) -> None:
    """Some hundred messages over several segments; then the process is killed."""
    each = [
        single("t", b"%d" % n + b"." * (n % 300), queue_id=n % 3, keys=[f"k{n}"], tags=f"t{n % 5}") for n in range(200)
    ]
    java.put(each)


def foreign(java: JavaStore) -> None:
    """Inner batches and light queues beside an ordinary topic."""
    inner = [single("inner", b"%d" % n) for n in range(3)]
    java.put(
        [
            batch("inner", inner, inner=True, properties=[["UNIQ_KEY", "U1"]]),
            single("t", b"ordinary", properties=[["INNER_MULTI_DISPATCH", "%LMQ%a"]]),
        ]
    )


EXTENDED = {"enableConsumeQueueExt": "true", "mappedFileSizeConsumeQueueExt": 4096}
LIGHT = {"enableLmq": "true", "enableMultiDispatch": "true"}
STORES: dict[str, tuple[str, Callable[[JavaStore], None], dict[str, object], bool]] = {
    "plain-5.3.3": (java_build.NEWEST, plain, {}, True),
    "property-crc-5.3.3": (java_build.NEWEST, plain, {"enabledAppendPropCRC": "true"}, True),
    "plain-5.1.4": (java_build.OLDER, plain, {}, True),
    "forms-5.3.3": (java_build.NEWEST, forms, EXTENDED, True),
    "crashed-5.3.3": (java_build.NEWEST, crashed, {}, False),
    "foreign-5.3.3": (java_build.NEWEST, foreign, LIGHT, True),
}
"""Name -> version, what is put, settings besides `SMALL`, whether it is closed."""


def make(name: str, folder: Path) -> bytes:
    """One store, as a zip."""
    version, fill, settings, closes = STORES[name]
    java = Driver(version, folder / "java")
    root = folder / name
    store = JavaStore(java, root, java_config(SMALL, **settings), {"inner": {"queue.type": "BatchCQ"}}).open()
    fill(store)
    store.dispatched()
    queues = sorted(
        (path.parent.name, int(path.name))
        for path in (root / "consumequeue").glob("*/*")
        if not path.parent.name.startswith("%LMQ%")
    )
    expected = {
        "rocketmq": version,
        "java": java.hello["java"],
        "settings": settings,
        "closed": closes,
        "queues": [[*key, store.dump(*key)] for key in queues],
    }
    if closes:
        store.close()
    java.kill()
    target = folder / f"{name}.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        texts = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        for path, data in {**texts, "expected.json": json.dumps(expected, indent=1).encode()}.items():
            archive.writestr(zipfile.ZipInfo(path, _DATE), data, zipfile.ZIP_DEFLATED)
    return target.read_bytes()


def main(names: list[str]) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names or STORES:
            data = make(name, Path(folder))
            (GOLDEN / f"{name}.zip").write_bytes(data)
            rows.append(f"| `{name}.zip` | {STORES[name][0]} | {len(data)} | `{hashlib.sha256(data).hexdigest()}` |")
    print("\n".join(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
