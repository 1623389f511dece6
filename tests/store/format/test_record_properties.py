"""Properties of many records at once: as the oracle reads them, by the kernel and by the scalar codec."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
import strategies
from both_codecs import laid_out, raw
from messagestore.format import kernel
from messagestore.format.properties import RESERVED_PROPERTIES
from messagestore.format.record_decode import decode

COLUMNS = ["tags", "unique_key", "keys", "properties", "system_properties"]


def check(texts: list[bytes], between: bytes = b"") -> None:
    """Every column agrees with the oracle, row by row; alone, too, because fewer columns are read in another way."""
    data, starts, sizes = laid_out([raw(b"T", b"", text) for text in texts], between)
    wanted = [reference.properties_of(text) for text in texts]
    expected = {
        "tags": [row.get("TAGS") for row in wanted],
        "unique_key": [row.get("UNIQ_KEY") for row in wanted],
        "keys": [[key for key in row.get("KEYS", "").split(" ") if key] for row in wanted],
    }
    for name, reserved in (("properties", False), ("system_properties", True)):
        expected[name] = [[(k, v) for k, v in row.items() if (k in RESERVED_PROPERTIES) == reserved] for row in wanted]
    for lib in {kernel.lib, None}:
        with mock.patch.object(kernel, "lib", lib):
            for columns in (COLUMNS, *([name] for name in COLUMNS)):
                batch = decode(data, starts, sizes, columns)
                batch.validate(full=True)
                assert batch.to_pydict() == {name: expected[name] for name in columns}


COMMON = b"KEYS\x01k1 k2\x02TAGS\x01TagA\x02"


@pytest.mark.parametrize(
    "texts",
    [
        [],
        [b""],
        [b"", b"", b""],
        [COMMON],
        [COMMON] * 3,
        [b"", COMMON, b"", COMMON, b""],
        [b"a\x01b\x02"],
        [b"TAGS\x01TagA\x02KEYS\x01k\x02", COMMON, b"KEYS\x01 a  b \x02"],
        [b"KEYS\x01 \x02", b"KEYS\x01a\x02", b"KEYS\x01b c\x02"],
        [b"TAGS\x01a\x02TAGS\x01b\x02", COMMON],
        [b"a\x01b\x02c\x01d\x02a\x01e\x02", b"a\x01b\x02c\x01d\x02", b"c\x01d\x02a\x01b\x02"],
        [b"TAGSX\x01a\x02TAG\x01b\x02TAGS\0\x01c\x02"],
        [b"UNIQ_KEY\x01U1\x02", b"UNIQ_KEYS\x01U2\x02", b"UNIQ_KEZ\x01U3\x02"],
        [b"a_rather_long_name_of_a_property\x01v\x02INNER_MULTI_QUEUE_OFFSET\x011\x02__CRC32#\x01123\x02"],
        ["größe\x01中文\x02😀\x01x\x02".encode(), COMMON],
    ],
)
@pytest.mark.parametrize("between", [b"", b"\x01\x02 junk KEYS\x01"])
def test_well_formed(texts: list[bytes], between: bytes) -> None:
    """Usual and unusual orders, no properties, names that look alike; the bytes around the strings do not matter."""
    check(texts, between)


@pytest.mark.parametrize(
    "bad",
    [
        b"TAGS\x01a",
        b"TAGS",
        b"\x02",
        b"\x01",
        b"\x01\x02",
        b"TAGS\x01\x02",
        b"\x01v\x02",
        b"TAGS\x01a\x01b\x02",
        b"TAGS\x02a\x02",
        b"\x02\x02TAGS\x01a\x02",
        b"TAGS\x01a\x02\x02",
        b"TAGS\x01\xff\x02a\x01\xe4\xb8\x02",
        b"a\x01b\x02TAGS\x01c",
        b"a\xff\x01b\x02a\xfe\x01c\x02",
    ],
)
def test_what_only_java_understands(bad: bytes) -> None:
    """A malformed row among well-formed ones, first, last, twice: read as Java reads it, the others as ever."""
    for texts in ([bad], [bad, COMMON], [COMMON, bad], [COMMON, bad, b"", bad, COMMON]):
        check(texts)


def test_malformed_rows_that_together_look_well_formed() -> None:
    """The separators of two broken rows may alternate as if nothing were wrong."""
    check([b"TAGS\x01a", b"b\x02"])
    check([b"TAGS", b"\x01a\x02"])
    check([b"x\x01", b"y\x02"])
    check([b"KEYS\x01a\x02TA", b"GS\x01b\x02"])


@given(st.lists(strategies.property_bytes, max_size=6))
def test_any_bytes(texts: list[bytes]) -> None:
    check(texts)


@given(
    st.lists(
        st.lists(st.tuples(strategies.texts | st.sampled_from(["TAGS", "KEYS", "DELAY"]), strategies.texts), max_size=4)
    )
)
def test_any_properties(rows: list[list[tuple[str, str]]]) -> None:
    check([reference.properties_text(pairs) for pairs in rows])
