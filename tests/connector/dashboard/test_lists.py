"""The newest messages of a topic, what masks hide, what a decoder shows, and what a reader takes along."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import urllib.parse
import zlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("starlette")

from cli_runs import objects, run
from dashboard_client import Client, crawl, page
from messagestore import Message, MessageExt, MessageStore
from messagestore.format import record
from pyspark_messagestore.dashboard import app, looks, newest
from pyspark_messagestore.words import quoted, shown
from small import SMALL, ClockDisk

RECENT = "/api/v1/s/store/recent?topic=orders"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Forty messages in four queues of `orders`, among others."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL.replace(stamp_uniq_key=True)) as store:
        for number in range(40):
            body = json.dumps({"number": number, "to": {"city": f"C{number % 7}"}}).encode()
            tags, colour = "even" if number % 2 == 0 else "odd", "red" if number % 5 else "blue"
            keys, properties = (f"o-{number}",), {"colour": colour}
            message = Message("orders", body, queue_id=number % 4, keys=keys, tags=tags, properties=properties)
            assert store.put_message(message).is_ok
            assert store.put_message(Message("noise", b"o-1" * 20, queue_id=0)).is_ok
    return root


@pytest.fixture
def client(root: Path) -> Client:
    return Client(app([root]))


def numbers(found: dict[str, Any]) -> list[int]:
    return [json.loads(each["body"])["number"] for each in found["messages"]]


# ---- the newest messages


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("", range(39, -1, -1)),
        ("&queue=1", range(37, 0, -4)),
        ("&tag=odd", range(39, 0, -2)),
        ("&key=o-7", [7]),
        ("&property=colour=blue", range(35, -1, -5)),
        ("&property=colour", range(39, -1, -1)),
        ("&property=size", []),
        ("&text=c3", range(38, 2, -7)),
        ("&tag=odd&text=C3", [31, 17, 3]),
    ],
)
def test_the_newest_come_first_and_pass_the_filter(client: Client, asked: str, expected: Any) -> None:
    found = client(RECENT + "&count=100" + asked).json
    assert numbers(found) == list(expected)
    assert (found["goOn"], found["searchedCount"]) == (None, 10 if "queue" in asked else 40)


@pytest.mark.parametrize("span", [1 << 12, 1 << 20])
@pytest.mark.parametrize("asked", ["&count=3", "&count=3&text=C3", "&tag=odd&count=7", "&queue=2&count=1"])
def test_going_on_misses_nothing_and_shows_nothing_twice(
    client: Client, monkeypatch: pytest.MonkeyPatch, asked: str, span: int
) -> None:
    """In parts of bytes, and in parts of messages; the place to go on from is in the link."""
    whole = numbers(client(RECENT + "&count=100" + asked.replace("&count", "&x")).json)
    monkeypatch.setattr(newest, "_FIRST_SPAN", span)
    monkeypatch.setattr(looks, "FILTER_SIZE", 1000)
    found, address = list[int](), "/s/store/recent?topic=orders" + asked
    while address:
        found += numbers(client(address.replace("/s/", "/api/v1/s/", 1)).json)
        links = [link for link in page(client, address).links if "/recent?" in link and "before=" in link]
        address = links[0] if links else ""
    assert found == whole


def test_a_list_decodes_what_it_shows(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A span of the log may hold a thousand small messages of a topic, of which a page shows fifty."""
    real, decoded = record.decode_message, list[object]()
    monkeypatch.setattr(record, "decode_message", lambda *args, **how: decoded.append(args) or real(*args, **how))
    found = client(f"{RECENT}&count=7").json
    assert (numbers(found), found["goOn"] is None) == (list(range(39, 32, -1)), False)
    assert len(decoded) == 7


@pytest.mark.parametrize("count", [1, 4, 6, 40])
def test_the_newest_of_many_queues(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the queues that have the newest messages are searched, and going on comes to those of all."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        for number in range(60):
            body = json.dumps({"number": number}).encode()
            store.put_message(Message("orders", body, queue_id=number * 3 % 8 if number < 50 else 3))
    client, seen, before = Client(app([root])), list[int](), ""
    searched = list[int]()
    real = newest._stood_at
    monkeypatch.setattr(newest, "_stood_at", lambda *args: searched.append(len(args[1])) or real(*args))
    while before is not None:
        found = client(f"{RECENT}&count={count}" + (f"&before={before}" if before else "")).json
        if not before:
            assert all(each <= min(count + 1, 8) for each in searched)
        seen, before = seen + numbers(found), found["goOn"]
    assert seen == list(range(59, -1, -1))


def test_how_much_was_searched_is_of_the_log_and_not_of_its_files(client: Client) -> None:
    """Segments are as large as they will become. This store was closed."""
    end = client("/api/v1/s/store/status").json["commitLog"]["maxOffset"]
    assert client(f"{RECENT}&text=nothing").json["searchedOf"] == end
    assert client("/api/v1/s/store/search?q=nothing").json["logSize"] == end


def test_up_to_a_time(client: Client) -> None:
    assert numbers(client(RECENT + "&count=2&until=2099-01-01").json) == [39, 38]
    at_ms = client(RECENT + "&count=1&key=o-20").json["messages"][0]["storeTimestamp"]
    stamps = [each["storeTimestamp"] for each in client(RECENT + f"&count=100&until={at_ms}").json["messages"]]
    assert stamps and max(stamps) <= at_ms
    early = client(RECENT + "&until=2020-01-01").json
    assert (early["messages"], early["empty"]) == ([], "There is no message this old.")


def test_columns_are_fields_of_json_bodies(client: Client) -> None:
    found = client(RECENT + "&count=1&columns=number,to.city,nothing").json
    assert found["messages"][0]["cells"] == ["39", "C4", ""]
    assert "to.city" in page(client, "/s/store/recent?topic=orders&columns=to.city").words
    assert client(RECENT + "&columns=" + "a," * 13).status == 400


@pytest.mark.parametrize("masks", [[], ["card"]])
def test_filters_and_columns_see_what_is_compressed_or_no_text(tmp_path: Path, masks: list[str]) -> None:
    """As the program to copy does. The list has each body as it is stored; what is masked is not found."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        for body, flag in (
            (zlib.compress(b'{"city": "Paris", "card": "4111"}'), 1),
            (b"\xff Paris 4111", 0),
            (b"no compression of Paris", 1),
        ):
            assert store.put_message(Message("orders", body, queue_id=0, sys_flag=flag)).is_ok
    client = Client(app([root], masks=masks))
    found = client(RECENT + "&text=paris&columns=city,card").json["messages"]
    asked = page(client, "/s/store/recent?topic=orders&text=paris&columns=city,card").words
    assert "Paris" in asked
    if masks:
        assert [(each["queueOffset"], each["cells"]) for each in found] == [(0, ["Paris", "***"])]
        assert client(RECENT + "&text=4111").json["messages"] == []
    else:
        cells = [(each["queueOffset"], each["cells"]) for each in found]
        assert cells == [(2, ["", ""]), (1, ["", ""]), (0, ["Paris", "4111"])]
        assert found[2]["body"] is None
    assert client(RECENT + "&text=london").json["messages"] == []


def test_an_empty_list_says_why(client: Client, root: Path) -> None:
    assert client(RECENT + "&text=nowhere").json["empty"] == "None of the messages passes the filter."
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("quiet")
    assert "No message was ever written" in client("/api/v1/s/store/recent?topic=quiet").json["empty"]
    assert client("/api/v1/s/store/recent?topic=nowhere").status == 404
    assert client(RECENT + "&queue=9").status == 400


# ---- masks and decoders

SECRET = b"4111-2222"


def decode(message: MessageExt) -> Any:
    if message.body.startswith(b"fault"):
        raise ValueError(message.body)
    if message.body.startswith(b"text"):
        return message.body.decode()
    return {"card": message.body.decode(), "kind": "packed"} if message.body.startswith(b"\x00") else None


@pytest.fixture
def personal(tmp_path: Path) -> Path:
    """What must not leave the server, in bodies of several kinds and in properties."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL.replace(stamp_uniq_key=True)) as store:
        for body, flag in (
            (b'{"card": "%s", "sum": 5}' % SECRET, 0),
            (b'[{"deep": {"card": ["%s"]}}]' % SECRET, 0),
            (zlib.compress(b'{"card": "%s", "sum": 6}' % SECRET), 1),
            (b"plain " + SECRET, 0),
            (b'"%s"' % SECRET, 0),
            (b'{"card": "%s"' % SECRET, 0),
            (b"\xff" + SECRET, 0),
            (b"fault " + SECRET, 0),
            (b"text " + SECRET, 0),
            (b"\x00" + SECRET, 0),
            (SECRET, 1),
        ):
            message = Message("t", body, queue_id=0, sys_flag=flag, keys=("k",), properties={"mail": SECRET.decode()})
            assert store.put_message(message).is_ok
    return root


def test_masked_values_leave_the_server_nowhere(personal: Path) -> None:
    client = Client(app([personal], masks=["card", "mail"], decoder=decode))
    found = crawl(client)
    assert any("/download" in address for address in found)
    for address in [*found, *(each.replace("/s/", "/api/v1/s/", 1) for each in found if each.startswith("/s/"))]:
        assert SECRET not in client(address).body, address
        assert SECRET not in client(address + ("&" if "?" in address else "?") + "plain=1").body
    shown = client("/api/v1/s/store/messages?topic=t").json["messages"]
    assert [each["body"] for each in shown[:3]] == [
        '{"card": "***", "sum": 5}',
        '[{"deep": {"card": "***"}}]',
        '{"card": "***", "sum": 6}',
    ]
    assert all("not JSON" in each["bodyHidden"] for each in shown[3:])
    assert shown[7]["bodyFault"] == "the decoder failed with ValueError"
    assert shown[9]["decoded"] == {"card": "***", "kind": "packed"}
    assert client("/s/store/body?topic=t&offset=0").body == b'{"card": "***", "sum": 5}'
    assert client("/s/store/body?topic=t&offset=3").status == 400
    for guess in ("text=4111", "property=mail=" + SECRET.decode()):
        assert client(f"/api/v1/s/store/recent?topic=t&{guess}").json["messages"] == []


@pytest.mark.parametrize("name", ["KEYS", "UNIQ_KEY"])
def test_a_masked_key_finds_nothing(personal: Path, name: str) -> None:
    """A hit would say that a guess is right. A place and a time lead to messages all the same."""
    (first, *_) = objects(run("get", personal, "t", "--json"))
    value = first["systemProperties"][name]
    client = Client(app([personal], masks=[name]))
    for address in ("message?topic=t&offset=0", "messages?topic=t", "recent?topic=t", "search?q=t/0@0"):
        answer = client(f"/api/v1/s/store/{address}")
        assert answer.status == 200 and f'"{value}"' not in answer.text
        assert f'"{name}":"***"' in answer.text
    assert client("/api/v1/s/store/search?q=2020-01-01").json["places"]
    for guess in (value, "another", "F" * 32):
        answer = client(f"/api/v1/s/store/search?q={guess}")
        assert answer.status == 400 and "keys are masked" in answer.json["error"]
    assert client(f"/api/v1/s/store/recent?topic=t&key={value}").json["messages"] == [] or name == "UNIQ_KEY"


@pytest.mark.parametrize(
    ("masks", "field", "reason", "origin"),
    [
        (["KEYS"], "keys", "keys: found '4111 '; allowed is text without blanks", '"keys": ["4111 "]'),
        (["TAGS"], "tags", "tags: found '4111\\x01'; allowed is text without U+0001", '"tags": "4111\\u0001"'),
        (
            ["mail"],
            "properties",
            "property 'mail': found '4111\\x01'; allowed is",
            '"properties": [["mail", "4111\\u0001"]]',
        ),
        (["mail"], "flag", "flag: found 1", '"properties": [{"key": "mail", "value": "4111"}]'),
        (["mail"], "flag", "flag: found 1", '"properties": "[[\\"mail\\", \\"4111"'),
        (["mail"], "flag", "flag: found 1", '"mail": "4111"'),
        (
            ["mail"],
            "flag",
            "flag: found 1",
            '"properties": [["4111"], {"key": ["4111"], "value": 1}, "4111", [["4111"], 2]]',
        ),
        (["mail"], "flag", "flag: found 1", '"keys": ["k"], "mail": "4111'),  # it is no JSON
    ],
)
def test_a_dead_letter_of_spark_does_not_repeat_what_is_masked(
    tmp_path: Path, masks: list[str], field: str, reason: str, origin: str
) -> None:
    """It has the columns of the row that the sink refused in its properties, and the reason has the value."""
    root = tmp_path / "store"
    properties = {"dlqReason": reason, "dlqField": field, "dlqOrigin": f'{{"batch": 3, "queueId": 7, {origin}}}'}
    with MessageStore.open(root, SMALL) as store:
        assert store.put_message(Message("dead", b"{}", queue_id=0, properties=properties)).is_ok
    client = Client(app([root], masks=masks))
    for address in ("message?topic=dead", "messages?topic=dead", "recent?topic=dead", "spark"):
        assert "4111" not in client(f"/api/v1/s/store/{address}").text + client(f"/s/store/{address}").text
    shown = client("/api/v1/s/store/message?topic=dead").json["message"]["properties"]
    assert shown["dlqField"] == field and shown["dlqReason"].startswith(reason.partition(":")[0])
    assert '"queueId": 7' in shown["dlqOrigin"] or shown["dlqOrigin"] == "***"
    assert (
        Client(app([root], masks=["else"]))("/api/v1/s/store/message?topic=dead").json["message"]["properties"][
            "dlqReason"
        ]
        == properties["dlqReason"]
    )


def test_the_id_of_a_transaction_is_a_unique_key(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL.replace(stamp_uniq_key=True)) as store:
        store.half_message(Message("t", b"{}", queue_id=0), "producers")
    address = "/api/v1/s/store/messages?topic=RMQ_SYS_TRANS_HALF_TOPIC"
    key = Client(app([root]))(address).json["messages"][0]["systemProperties"]["UNIQ_KEY"]
    assert key not in Client(app([root], masks=["UNIQ_KEY"]))(address).text


def test_a_decoder_shows_bodies_that_are_no_text(personal: Path) -> None:
    client = Client(app([personal], decoder=decode))
    assert "packed" in page(client, "/s/store/message?topic=t&offset=9").words
    words = page(client, "/s/store/message?topic=t&offset=7").words
    assert "the decoder failed with ValueError" in words and SECRET.decode() in words
    assert client("/api/v1/s/store/recent?topic=t&count=3&columns=kind").json["messages"][1]["cells"] == ["packed"]
    assert "decoded" not in client("/api/v1/s/store/message?topic=t&offset=0").json["message"]
    hidden = Client(app([personal], decoder=decode, hide_bodies=True))
    assert "packed" not in page(hidden, "/s/store/message?topic=t&offset=9").words


# ---- a message's retries


def test_retries_and_the_dead_letter_are_on_the_page_of_a_message(client: Client, root: Path) -> None:
    first = client(RECENT + "&key=o-3").json["messages"][0]
    disk = ClockDisk(first["storeTimestamp"])
    with MessageStore.open(root, SMALL, disk=disk) as store:
        (message,) = store.get_message("orders", first["queueId"], first["queueOffset"], 1).messages
        store.send_back(message, "billing", -1)
        store.send_back(message, "billing", 1)
        disk.now_ms += 60_000
        assert store.deliver_delayed().count == 1
    address = f"message?topic=orders&queue={first['queueId']}&offset={first['queueOffset']}"
    related = client(f"/api/v1/s/store/{address}").json["related"]
    assert [(each["topic"], each["kind"]) for each in related] == [
        ("%DLQ%billing", "dead letter"),
        ("SCHEDULE_TOPIC_XXXX", "same UNIQ_KEY"),
        ("%RETRY%billing", "retry"),
    ]
    assert any("%25DLQ%25billing" in link for link in page(client, f"/s/store/{address}").links)
    assert client("/api/v1/s/store/message?topic=orders&queue=0&offset=0").json["related"] == []


# ---- what a reader takes along


def test_the_offset_message_id_is_shown_and_found(client: Client) -> None:
    """Consumers and brokers log it, also where a message has a UNIQ_KEY."""
    found = client("/api/v1/s/store/message?topic=orders&queue=1&offset=2").json["message"]
    assert found["offsetMsgId"] != found["msgId"] == found["systemProperties"]["UNIQ_KEY"]
    assert found["offsetMsgId"] in page(client, "/s/store/message?topic=orders&queue=1&offset=2").words
    (hit,) = client(f"/api/v1/s/store/search?q={found['offsetMsgId']}").json["messages"]
    assert (hit["queueId"], hit["queueOffset"]) == (1, 2)


@pytest.mark.parametrize("look", ["message", "messages", "recent"])
def test_the_commands_to_copy_take_no_topic_for_an_option(client: Client, root: Path, look: str) -> None:
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("--offset", b"5", queue_id=0))
    words = page(client, f"/s/store/{look}?topic=--offset&queue=0&offset=0").words
    commands = [line for line in words.splitlines() if line.startswith("messagestore get ")]
    assert commands
    for command in commands:
        name, *others = shlex.split(command)[1:]
        (row,) = objects(run(name, "--json", *others))
        assert row["body"] == "5"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("message?topic=orders&queue=1&offset=2", [9]),
        ("messages?topic=orders&queue=1&offset=2&count=3", [9, 13, 17]),
        ("recent?topic=orders&queue=1", range(1, 40, 4)),
    ],
)
def test_the_commands_and_programs_to_copy_say_the_same(client: Client, address: str, expected: Any) -> None:
    words = page(client, f"/s/store/{address}").words
    command = next(line for line in words.splitlines() if line.startswith("messagestore get "))
    rows = objects(run(*shlex.split(command)[1:], "--json"))
    assert [json.loads(row["body"])["number"] for row in rows] == list(expected)

    begin = words.index("from messagestore import")
    program = words[begin : words.index("Spark\n", begin)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(program, {})
    for number in expected:
        assert f'"number": {number},' in said.getvalue()
    assert said.getvalue().count('"number"') == len(list(expected))


@pytest.mark.parametrize(
    "name", ["plain", "it's \\ two", "\u202egro.erots\u202c", "a\u200b1\n2", "\x1b[31m'red'", os.fsdecode(b"\xff7"), ""]
)
def test_a_word_to_copy_is_the_same_word_in_a_shell(name: str) -> None:
    """A page shows no mark of direction, and what it shows leads back to the name that has one."""
    text = quoted(name)
    assert shown(text) == text
    done = subprocess.run(["bash", "-c", f"printf %s {text}"], capture_output=True, check=True)
    assert done.stdout == os.fsencode(name)


def test_the_command_to_copy_finds_a_store_with_a_mark_of_direction_in_its_name(root: Path) -> None:
    odd = root.rename(root.with_name("to\u202erts"))
    words = page(Client(app([odd])), "/s/store-1/messages?topic=orders&queue=1&offset=3&count=2").words
    command = next(line for line in words.splitlines() if line.startswith("messagestore get "))
    assert "\u202e" not in command
    done = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, check=True, text=True)
    assert [row["queueOffset"] for row in objects(run(*done.stdout.splitlines()[1:], "--json"))] == [3, 4]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("&tag=odd", lambda n: n % 2 == 1),
        ("&key=o-7", lambda n: n == 7),
        ("&property=colour%3Dblue&queue=1", lambda n: n % 5 == 0 and n % 4 == 1),
        ("&property=colour", lambda n: True),
        ("&text=%22city%22:%20%22C3%22", lambda n: n % 7 == 3),
        ("&tag=even&text=c6&key=o-6", lambda n: n == 6),
        ("&until=-0s&tag=even", lambda n: n % 2 == 0),
        ("&text='%5C%27", lambda n: False),
    ],
)
def test_a_program_to_copy_has_the_filter_of_the_page(client: Client, asked: str, expected: Any) -> None:
    words = page(client, f"/s/store/recent?topic=orders{asked}").words
    assert "messagestore tail" not in words and "messagestore get" not in words, "the command line has no filters"
    begin = min(words.index(first) for first in ("from datetime import", "from messagestore import") if first in words)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(words[begin : words.index("Spark\n", begin)], {})
    found = [number for number in range(40) if f'"number": {number},' in said.getvalue()]
    assert found == [number for number in range(40) if expected(number)]


def test_the_command_to_copy_of_a_whole_topic_shows_its_newest_messages(client: Client) -> None:
    words = page(client, "/s/store/recent?topic=orders&count=3").words
    command = next(line for line in words.splitlines() if line.startswith("messagestore tail "))
    rows = objects(run(*shlex.split(command)[1:], "--json"))
    assert [json.loads(row["body"])["number"] for row in rows] == [37, 38, 39]


def test_the_command_below_a_search_finds_the_same(client: Client) -> None:
    one = client("/api/v1/s/store/message?topic=orders&queue=1&offset=2").json["message"]
    for text in (one["msgId"], one["offsetMsgId"], "o-9", "orders/1 @2"):
        found = client(f"/api/v1/s/store/search?q={urllib.parse.quote(text)}").json
        (hit,) = found["messages"]
        assert found["command"] in page(client, f"/s/store/search?q={urllib.parse.quote(text)}").words
        (row,) = objects(run(*shlex.split(found["command"])[1:], "--json"))
        assert (row["queueId"], row["queueOffset"]) == (hit["queueId"], hit["queueOffset"]) == (1, 2)


def test_a_search_with_more_hits_than_a_page_says_so(tmp_path: Path) -> None:
    """It showed 64 of 1,239 messages as if they were all."""
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        for number in range(looks.FOUND_COUNT + 1):
            store.put_message(Message("t", b"%d" % number, queue_id=0, keys=("k", f"k{number}")))
    client = Client(app([tmp_path / "store"]))
    found = client("/api/v1/s/store/search?q=k").json
    assert len(found["messages"]) == looks.FOUND_COUNT and "Older ones have this key, too" in found["note"]
    assert len(objects(run(*shlex.split(found["command"])[1:], "--json"))) == looks.FOUND_COUNT + 1
    assert client("/api/v1/s/store/search?q=k1").json["note"] == ""
    after = client(f"/api/v1/s/store/search?q=k1&after={found['messages'][-1]['physicalOffset']}").json
    assert after["note"] == "Nothing more was found."


@pytest.mark.parametrize("body", ['{"s": "\\ud800"}', '{"s": 1e999}', '{"s": NaN}'])
def test_what_is_no_json_is_shown_as_text(tmp_path: Path, body: str) -> None:
    """Half of a pair of surrogates, and what is no number, ended in a server error."""
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        store.put_message(Message("t", body.encode(), queue_id=0))

    def decoder(_: MessageExt) -> Any:
        return {"whole": json.loads(body), "none": float("nan")}

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    for client in (Client(app([tmp_path / "store"])), Client(app([tmp_path / "store"], decoder=decoder))):
        for look in ("recent?topic=t&columns=s,whole", "message?topic=t&queue=0&offset=0", "messages?topic=t&queue=0"):
            answer = client(f"/api/v1/s/store/{look}")
            assert answer.status == 200
            json.loads(answer.body, parse_constant=refuse)
            assert client(f"/s/store/{look}").status == 200
        for form in ("jsonl", "parquet"):
            assert client(f"/s/store/download?topic=t&format={form}").status == 200


def test_a_decoder_that_wants_to_end_the_program_is_a_fault_of_its_message(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))

    def decoder(_: MessageExt) -> Any:
        raise SystemExit(3)

    found = Client(app([tmp_path / "store"], decoder=decoder))("/api/v1/s/store/recent?topic=t").json
    assert "SystemExit" in found["messages"][0]["bodyFault"]


def test_an_address_that_says_too_little_or_too_much(client: Client) -> None:
    """An empty search says what can be asked; a store's own address leads to its first page."""
    assert "Type a key, a UNIQ_KEY" in page(client, "/s/store/search?q=").words
    assert client("/s/store/messages?topic=../../config").status == 400
    for address in ("/s/store", "/s/store/"):
        assert client(address).headers["location"] == "/s/store/status"
    assert client("/s/nowhere").status == 404
    missing = client("/api/v1/s/store/recent?topic=nowhere")
    assert (missing.status, "has no topics" in missing.text) == (404, False)
    assert "1970-01-01" in page(client, "/s/store/search?q=-99999999999d").words


def test_a_list_is_a_file_of_json_lines_or_parquet(client: Client) -> None:
    shown = client(RECENT + "&tag=odd&count=5").json["messages"]
    links = [
        link for link in page(client, "/s/store/recent?topic=orders&tag=odd&count=5").links if "/download?" in link
    ]
    lines, parquet = (client(link) for link in links)
    assert lines.headers["content-disposition"] == 'attachment; filename="messages.jsonl"'
    assert [json.loads(line)["body"] for line in lines.text.splitlines()] == [each["body"] for each in shown]
    table = pq.read_table(io.BytesIO(parquet.body)).to_pydict()
    assert table["queueOffset"] == [each["queueOffset"] for each in shown]
    assert [json.loads(text) for text in table["properties"]] == [each["properties"] for each in shown]
    assert client("/s/store/download?topic=orders&queue=1&offset=2&count=1").text.count("\n") == 1
    assert client("/s/store/download?topic=orders&format=xml").status == 400
