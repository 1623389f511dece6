"""Random messages, hosts, topics and texts, legal ones and others."""

from __future__ import annotations

import ipaddress
import string

from hypothesis import strategies as st

from messagestore.format import properties
from messagestore.format.message import Message

int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
offsets = st.integers(0, 2**63 - 1)

_TOPIC = string.ascii_letters + string.digits + "%|_-"
topics = st.one_of(
    st.text(_TOPIC, min_size=1, max_size=20),
    st.text(_TOPIC, min_size=120, max_size=127),
    st.text(_TOPIC, min_size=120, max_size=240).map(lambda text: "%RETRY%" + text),
)
bad_topics = st.one_of(
    st.sampled_from(["", "a/b", "..", "a b", "a\0", "täg", "topic\n", "rmq_sys_spark_sink", "x" * 128]),
    st.text(min_size=1, max_size=8).filter(lambda text: not set(text) <= set(_TOPIC)),
)

ports = st.integers(0, 65535)
hosts_v4 = st.builds("{}:{}".format, st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address), ports)
hosts_v6 = st.builds("[{}]:{}".format, st.integers(0, 2**128 - 1).map(ipaddress.IPv6Address), ports)
hosts = st.one_of(hosts_v4, hosts_v6)

# Any text that can be stored: astral and other planes, NUL and line ends included, no separators, no lone surrogates.
_CHARACTERS = st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"])
_ALPHABET = st.one_of(st.sampled_from("abcXYZ019_-é中😀\x7f\0"), _CHARACTERS)
texts = st.text(_ALPHABET, min_size=1, max_size=12)
keys = texts.map(lambda text: text.replace(" ", "_"))
names = texts.filter(lambda name: name not in properties.RESERVED_PROPERTIES)
property_maps = st.dictionaries(names, texts, max_size=5)
bodies = st.one_of(st.binary(max_size=40), st.binary(min_size=120, max_size=300))
any_text = st.text(st.characters(), max_size=12)
"""Lone surrogates and separators too."""

messages = st.builds(
    Message,
    topic=topics,
    body=bodies,
    keys=st.lists(keys, max_size=3).map(tuple),
    tags=st.none() | texts,
    properties=property_maps,
    flag=int32s,
    born_timestamp_ms=int64s,
    born_host=hosts,
    sys_flag=st.sampled_from([0, 1, 0x8, 0x301]),
    reconsume_times=st.integers(0, 100),
    wait_store_msg_ok=st.booleans(),
)

# What a broken or foreign writer may leave as property string.
property_bytes = st.lists(
    st.one_of(
        st.sampled_from(
            [b"\x01", b"\x02", b"\x01\x02", b"\x02\x01", b"TAGS", b"KEYS", b"a", b"=\xff", b"\xe4\xb8", b"k1 k2"]
        ),
        texts.map(str.encode),
        st.builds(
            lambda n, v: n.encode() + b"\x01" + v.encode() + b"\x02",
            names | st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY"]),
            texts,
        ),
    ),
    max_size=8,
).map(b"".join)
