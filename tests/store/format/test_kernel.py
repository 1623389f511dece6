"""The compiled kernel against what it replaces, function by function, and the ways to do without it."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import zlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crash.kernels import compiling
from messagestore.format import kernel
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host
from messagestore.format.javahash import index_hash, java_hash
from messagestore.format.message_columns import MessageColumns
from messagestore.format.record_encode import encode

needs_kernel = pytest.mark.skipif(kernel.lib is None, reason=f"no compiled kernel: {kernel.why_not}")


def ranges(pieces: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    return b"".join(pieces), ends - [len(piece) for piece in pieces], ends


def test_where_there_is_a_compiler_there_is_a_kernel():
    """Else the tests of the kernel would be skipped on the machine of whoever changes it."""
    if os.environ.get(kernel.VARIABLE) == kernel.OFF or compiling.why_not():
        assert kernel.lib is None and kernel.why_not
    else:
        assert kernel.lib is not None, f"{kernel.why_not} (make setup compiles it)"


def imported(choice: str) -> subprocess.CompletedProcess[str]:
    program = "from messagestore.format import kernel; print(kernel.lib is not None, kernel.why_not)"
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, kernel.VARIABLE: choice},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_environment_switches_the_kernel_off():
    assert imported("off").stdout == "False MESSAGESTORE_KERNEL=off\n"


def test_a_kernel_that_was_named_and_is_missing_is_an_error():
    done = imported("missing/kernel.so")
    assert done.returncode and "ImportError" in done.stderr and "missing/kernel.so" in done.stderr


def test_a_process_without_the_kernel_says_so_once(monkeypatch, caplog):
    """With the reason, and with what it costs."""
    monkeypatch.setattr(kernel, "lib", None)
    monkeypatch.setattr(kernel, "why_not", "there is no compiler")
    monkeypatch.setattr(kernel, "_untold", threading.Lock())
    columns = MessageColumns("T", np.zeros(1, np.int32), pa.array([b"x"]))
    for _ in range(2):
        encode(columns, limits=StoreConfig(), store_host=pack_host("1.2.3.4:5"), born_host=pack_host("1.2.3.4:5"))
    [told] = [one.getMessage() for one in caplog.records]
    assert "kernel of messagestore is missing: there is no compiler. " in told and "50 times" in told


def test_two_threads_that_begin_together_say_once_that_the_kernel_is_missing(monkeypatch, caplog):
    """A batch is encoded by a thread of its own while the caller reads another."""
    monkeypatch.setattr(kernel, "_untold", threading.Lock())

    def another_begins(record: logging.LogRecord) -> bool:
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=kernel.tell_without)
            other.start()
            other.join()
        return True

    logger = logging.getLogger(kernel.__name__)
    logger.addFilter(another_begins)
    try:
        kernel.tell_without()
    finally:
        logger.removeFilter(another_begins)
    assert len(caplog.records) == 1


@needs_kernel
def test_a_kernel_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setattr(kernel, "VERSION", kernel.VERSION + 1)
    with pytest.raises(ImportError, match=r"found version \d+; allowed is \d+\. Compile it again: make setup"):
        kernel.load(compiling.TARGET)


@needs_kernel
def test_crc32_by_every_method_of_this_processor():
    """Every size up to several rounds of each loop, at every alignment, after any CRC."""
    chance = random.Random(5)
    data = chance.randbytes(1200)
    for size in [*range(420), 1023, 1100]:
        at, before = chance.randrange(64), chance.getrandbits(32)
        piece = memoryview(data)[at : at + size]
        wanted = zlib.crc32(piece, before)
        assert set(kernel.lib.crc32_methods(piece, before).values()) == {wanted}
        assert kernel.lib.crc32(piece, before) == wanted


@needs_kernel
@given(st.lists(st.binary(max_size=300)))
def test_crcs_of_ranges(pieces):
    data, starts, ends = ranges(pieces)
    out = np.zeros(len(pieces), np.uint32)
    kernel.lib.crcs_of_ranges(data, starts, ends, out)
    assert out.tolist() == [zlib.crc32(piece) for piece in pieces]


texts = st.one_of(
    st.binary(max_size=40),  # mostly not UTF-8
    st.text(max_size=40).map(str.encode),
    st.text("\x00a\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff", max_size=20).map(str.encode),
    st.lists(st.sampled_from([b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90", b"\xe2\x28\xa1", b"a", b"\xff"])).map(b"".join),
)  # fmt: skip


@needs_kernel
@given(st.lists(texts), st.text(max_size=5))
def test_java_hashes_and_index_hashes(pieces, topic):
    """Surrogate pairs are two units, and bytes that are not UTF-8 count as U+FFFD, as `java_hash` counts them."""
    data, starts, ends = ranges(pieces)
    before = np.array([java_hash(f"{topic}#")], np.int32)
    out = np.zeros(len(pieces), np.int32)
    kernel.lib.java_hashes(data, starts, ends, np.zeros(1, np.int32), out)
    assert out.tolist() == [java_hash(piece.decode(errors="replace")) for piece in pieces]
    kernel.lib.index_hashes(data, starts, ends, before, out)
    assert out.tolist() == [index_hash(topic, piece.decode(errors="replace")) for piece in pieces]
    kernel.lib.index_hashes(data, starts, ends, np.repeat(before, len(pieces)), out)
    assert out.tolist() == [index_hash(topic, piece.decode(errors="replace")) for piece in pieces]


@needs_kernel
@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        ([0], [5], "range 0: found 0 to 5; allowed is 0 to 4"),
        ([0, 3], [1, 2], "range 1: found 3 to 2"),
        ([-1], [2], "range 0: found -1 to 2"),
        ([-(2**63)], [2**63 - 1], "range 0"),
        ([0, 1], [1], "ends: found 8 bytes; allowed are 2 items of 8 bytes"),
    ],
)
def test_a_range_outside_the_data_is_refused(starts, ends, message):
    starts, ends = np.array(starts, np.int64), np.array(ends, np.int64)
    for call in (
        lambda out: kernel.lib.crcs_of_ranges(b"abcd", starts, ends, out),
        lambda out: kernel.lib.java_hashes(b"abcd", starts, ends, np.zeros(1, np.int32), out),
        lambda out: kernel.lib.index_hashes(b"abcd", starts, ends, np.zeros(1, np.int32), out),
    ):
        with pytest.raises(ValueError, match=message):
            call(np.zeros(len(starts), np.uint32))


@needs_kernel
def test_an_array_of_results_that_is_too_small_is_refused():
    one = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="out: found 0 bytes; allowed are 1 items of 4 bytes"):
        kernel.lib.crcs_of_ranges(b"", one, one, np.zeros(0, np.uint32))
    with pytest.raises(ValueError, match="before: found 8 bytes; allowed are 1 items of 4 bytes"):
        kernel.lib.java_hashes(b"", one, one, np.zeros(2, np.int32), np.zeros(1, np.int32))
    with pytest.raises(BufferError if sys.version_info >= (3, 12) else (BufferError, ValueError, TypeError)):
        kernel.lib.crcs_of_ranges(b"", one, one, b"abcd")  # a result needs a buffer that may be written
