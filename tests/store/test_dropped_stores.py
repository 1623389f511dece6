"""A session that nobody closes: others can write again, and a warning names the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from small import filled

_PROGRAM = """
import gc, os, subprocess, sys, threading, warnings
warnings.simplefilter("always")
from messagestore import Message, MessageStore, LocalTransactionState
root = {root!r}
other = "from messagestore import MessageStore, StoreConfig; MessageStore.open(%r, StoreConfig(lock_timeout='100s')).close()" % root

def drop():
    store = MessageStore.open(root)
    store.put_message(Message("t", b"x", queue_id=0))
    {work}

drop()
gc.collect()
print(subprocess.run([sys.executable, "-c", other]).returncode)
"""

WORK = {
    "a put": "",
    "a read": "next(store.read('t', 0, 0))",
    "half messages": "store.half_message(Message('t', b'half'), 'group').commit()",
    "a listener": "store.add_arriving_listener(print)",
    "an iteration that was not ended": "batches = store.read('t', 0, 0); next(batches)",
}


@pytest.mark.parametrize("work", list(WORK))
def test_a_store_that_is_dropped_without_close_does_not_stay_locked(tmp_path: Path, work: str) -> None:
    """Another process opens it while this one lives on; what was put is there, and nothing had to be recovered."""
    root = filled(tmp_path / "s", 2)
    program = _PROGRAM.format(root=str(root), work=WORK[work] or "pass")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert ran.stdout.splitlines()[-1:] == ["0"], ran.stderr
    assert f"ResourceWarning: {root}: a MessageStore was dropped and not closed" in ran.stderr
    assert ran.stderr.count("dropped and not closed") == 1
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    "end",
    ["store.close()", "os.fork() or os._exit(0); os.wait(); store.close()", "keep = store"],
    ids=["closed", "dropped in a forked child", "open at the end of the process"],
)
def test_a_store_that_is_closed_or_lives_as_long_as_the_process_is_no_warning(tmp_path: Path, end: str) -> None:
    """The end of the process closes what is open."""
    root = tmp_path / "s"
    program = (
        "import gc, os, warnings\nwarnings.simplefilter('always')\nfrom messagestore import Message, MessageStore\n"
        f"store = MessageStore.open({str(root)!r})\nstore.put_message(Message('t', b'x', queue_id=0))\n"
        f"{end}\ndel store\ngc.collect()\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert not (root / "abort").exists()
