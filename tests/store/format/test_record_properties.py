"""Properties of many records at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
import strategies
from messagestore.format.properties import RESERVED_PROPERTIES
from messagestore.format.record_properties import PropertyTexts


def parsed(texts: list[bytes], between: bytes = b"") -> PropertyTexts:
    data, starts = b"", []
    for text in texts:
        data += between
        starts.append(len(data))
        data += text
    begins = np.array(starts, np.int64)
    return PropertyTexts(np.frombuffer(data, np.uint8), begins, begins + np.array([len(t) for t in texts], np.int64))


def check(texts: list[bytes], between: bytes = b"") -> None:
    """Every column agrees with the oracle, row by row."""
    rows = parsed(texts, between)
    wanted = [reference.properties_of(text) for text in texts]
    for name in ("TAGS", "UNIQ_KEY", "KEYS"):
        assert rows.column(name).to_pylist() == [row.get(name) for row in wanted]
    assert rows.keys().to_pylist() == [[key for key in row.get("KEYS", "").split(" ") if key] for row in wanted]
    for reserved in (False, True):
        found = rows.map(reserved=reserved)
        found.validate(full=True)
        pairs = found.to_pylist()
        assert [dict(row) for row in pairs] == [
            {name: value for name, value in row.items() if (name in RESERVED_PROPERTIES) == reserved} for row in wanted
        ]
        assert [len(dict(row)) for row in pairs] == [len(row) for row in pairs]
    for array in (rows.column("TAGS"), rows.keys()):
        array.validate(full=True)


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


def test_types() -> None:
    rows = parsed([COMMON])
    assert rows.column("TAGS").type == pa.string()
    assert rows.keys().type == pa.list_(pa.string())
    assert rows.map(reserved=True).type == pa.map_(pa.string(), pa.string())
