"""TLS and tokens: who gets in, who does not and what they are told, and what happens when secrets are replaced."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from messagestore import AccessDeniedError, BatchRequest, ConfigError, ProtocolError, StoreUnavailableError
from messagestore.serve import rereading
from messagestore.serve import server as serving
from messagestore.serve.access import Tokens
from messagestore.serve.certificates import Certificates
from messagestore.serve.hosted import Hosted
from messagestore.serve.lifecycle import ServedStore
from messagestore.serve.limits import MIB, Limits
from messagestore.serve.server import Server
from messagestore.serve.service import Service
from messagestore.spi import STORES, ColumnTexts, Location, Range, Write, connections, encode, store_host_of
from messagestore.spi.connections import link_to
from messagestore.spi.location import RemoteSettings
from small import SMALL, bodies, columns, filled
from tls_files import certificate, expired, openssl, replace, token_line

LIMITS = Limits(connections=24, streams=4, memory=24 * MIB, body=MIB, frame=8 * MIB, idle_s=15.0)
HEADERS = "Host: x\r\nMessagestore-Protocol: 1-1\r\n"


class Setting:
    """A store with 60 messages, its server, and the files of both sides."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = str(filled(folder / "store", 60))
        self.cert, self.key = certificate(folder, "server")
        self.tokens = folder / "tokens"
        lines = (token_line(name, role, f"token-of-{role}") for name, role in (("s", "write"), ("r", "read")))
        replace(self.tokens, "# who reads and writes", "", *lines, token_line("o", "operate", "token-of-operate"))
        self.token = folder / "token"
        replace(self.token, "token-of-write")
        self.server: Server | None = None

    def start(self, *, client_ca: str = "", cert: str = "", key: str = "") -> Server:
        certificates = Certificates(cert or self.cert, key or self.key, client_ca)
        self.server = Server(
            Service(Hosted(self.root, SMALL), LIMITS, Tokens(str(self.tokens))), certificates=certificates
        )
        self.server.start()
        return self.server

    def location(self, **other: Any) -> Location:
        assert self.server is not None
        url = str(other.pop("url", self.server.url))
        known = RemoteSettings(str(self.token), self.cert, retry_timeout_s=30.0)
        return changed(Location.of(url), settings=changed(known, **other))

    def describe(self, **other: Any) -> Any:
        reader = STORES.reader(self.location(**other))
        try:
            return reader.describe()
        finally:
            reader.close()


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setattr(rereading, "LOOK_S", 0.0)
    made = Setting(tmp_path)
    yield made
    if made.server is not None:
        made.server.stop()


def until(fact: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def written(location: Location, version: int, count: int = 5) -> Any:
    writer = STORES.writer(location, SMALL, staging_ttl_s=60)
    found = writer.prepare()
    host = store_host_of(SMALL)
    with writer.stage(Write("0", f"w {version}"), found.store_id) as staging:
        staging.write(encode(ColumnTexts(columns(bodies(count))), limits=SMALL, store_host=host, born_host=host))
        staged = staging.finish()
    return writer.commit([staged], BatchRequest("app", version), found.store_id).result


# ---- who gets in


def test_a_store_is_read_and_written_over_https_with_a_token(setting: Setting) -> None:
    """Rows of many TLS records, in both directions; the client counts under the name of its token."""
    server = setting.start()
    assert server.url.startswith("https://")
    assert written(setting.location(), 0, 2000).row_count == 2000
    assert written(setting.location(), 0, 2000).status == "known"
    reader = STORES.reader(setting.location())
    ends = reader.ends(["t"]).queues
    parts = reader.gather([Range(*queue, 0, end) for queue, end in sorted(ends.items())])
    assert sum(len(part.sizes) for part in parts) == 2060
    reader.close()
    assert server.service.drain(20)  # a request is counted after its answer
    assert 'verb="commit",client="s"} 2' in server.service.counters.text().decode()


def test_a_missing_or_wrong_token_is_refused_with_a_sentence(setting: Setting) -> None:
    """The error has neither the token nor its digest, and the server's log has neither."""
    setting.start()
    with pytest.raises(AccessDeniedError, match=r"asks for a token, and the request has none\. Give the file with one"):
        setting.describe(token_file="")
    replace(setting.token, "wrong-token")
    with pytest.raises(AccessDeniedError, match="does not know the token of the request") as refused:
        written(setting.location(), 0)
    assert refused.value.unknown and "wrong-token" not in str(refused.value)


def test_strangers_have_no_figures_of_their_own(setting: Setting) -> None:
    """Whoever has many addresses could fill the server's memory with them, and Prometheus."""
    server = setting.start()
    host, port = server.url.removeprefix("https://").split(":")
    trusting = ssl.create_default_context(cafile=setting.cert)
    for number in range(2, 6):
        address = f"127.0.0.{number}", 0
        connection = http.client.HTTPSConnection(host, int(port), timeout=20, source_address=address, context=trusting)
        connection.request("POST", "/v1/hello", b"{}", {"Messagestore-Protocol": "1-1"})
        assert connection.getresponse().status == 401
        connection.close()
    assert server.service.drain(20)  # a request is counted after its answer
    text = server.service.counters.text().decode()
    assert 'messagestore_serve_errors_total{verb="hello",client="unknown"} 4' in text
    assert "127.0.0" not in text


def test_what_a_header_gives(setting: Setting) -> None:
    """401 asks for a token; 403 does not, since another try with the same one is no use."""
    cases = {
        None: 401,
        "": 401,
        "Bearer": 401,
        "Bearer ": 401,
        "Basic token-of-write": 401,
        "Bearer token-of-writ": 401,
        "Bearer token-of-write token-of-write": 401,
        "Bearer \xff\xfe": 401,
        "Bearer token-of-operate": 403,
        "Bearer token-of-read": 200,
        "bearer token-of-write": 200,
    }
    for header, status in cases.items():
        connection = _connected(setting)
        headers = {"Messagestore-Protocol": "1-1"} | ({} if header is None else {"Authorization": header})
        connection.request("POST", "/v1/hello", b"{}", headers)
        answer = connection.getresponse()
        text = answer.read()
        assert (header, answer.status) == (header, status)
        assert answer.headers.get("WWW-Authenticate") == ("Bearer" if status == 401 else None)
        assert b"token-of" not in text
        connection.close()


def _connected(setting: Setting) -> http.client.HTTPSConnection:
    server = setting.server or setting.start()
    context = ssl.create_default_context(cafile=setting.cert)
    return http.client.HTTPSConnection(server.url.removeprefix("https://"), timeout=30, context=context)


def _handshake(setting: Setting) -> None:
    connection = _connected(setting)
    connection.connect()
    connection.close()


def test_a_role_allows_what_it_says(setting: Setting) -> None:
    """A reader cannot write, and who operates reads no message."""
    setting.start()
    replace(setting.token, "token-of-read")
    assert setting.describe().store_id
    with pytest.raises(
        AccessDeniedError, match="client r: this request needs the role write, and its token allows read"
    ):
        written(setting.location(), 0)
    replace(setting.token, "token-of-operate")
    with pytest.raises(AccessDeniedError, match="client o: this request needs the role read"):
        setting.describe()
    for token, status in (("operate", 200), ("write", 403)):
        connection = _connected(setting)
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer token-of-{token}"})
        assert connection.getresponse().status == status
        connection.close()


@pytest.mark.parametrize("framing", [("Transfer-Encoding", "chunked"), ("Content-Length", "1000")])
@pytest.mark.parametrize(("path", "status"), [("/v1/stage", 401), ("/v1/no", 400)])
def test_a_body_is_not_read_before_the_token(
    setting: Setting, framing: tuple[str, str], path: str, status: int
) -> None:
    """The answer comes although the client has sent nothing of the body."""
    connection = _connected(setting)
    connection.putrequest("POST", path)
    connection.putheader("Messagestore-Protocol", "1-1")
    connection.putheader(*framing)
    connection.endheaders()
    assert connection.getresponse().status == status
    assert setting.server is not None and setting.server.service.budget.memory == 0
    connection.close()


# ---- certificates


def test_an_expired_certificate_is_not_trusted(setting: Setting) -> None:
    """The client says so at once; another try would be no use."""
    setting.start(cert=expired(setting.cert, setting.key))
    with pytest.raises(StoreUnavailableError, match=r"is not trusted \(certificate has expired\)\. Replace"):
        setting.describe(ca_file=f"{setting.cert}.old", retry_timeout_s=600.0)


def test_a_certificate_of_an_unknown_authority_is_not_trusted(setting: Setting) -> None:
    setting.start()
    other, _ = certificate(setting.folder, "other")
    for ca_file in (other, ""):
        with pytest.raises(StoreUnavailableError, match=r"is not trusted \(self-signed certificate\). Give the"):
            setting.describe(ca_file=ca_file, retry_timeout_s=600.0)
    with pytest.raises(StoreUnavailableError, match="is not trusted"):
        written(setting.location(ca_file=other, retry_timeout_s=600.0), 0)


def test_a_certificate_of_another_host_is_not_trusted(setting: Setting) -> None:
    server = setting.start()
    url = server.url.replace("127.0.0.1", "localhost")
    with pytest.raises(StoreUnavailableError, match=r"Hostname mismatch.* ask for the host by the name"):
        setting.describe(url=url, retry_timeout_s=600.0)


def test_plain_http_at_a_port_of_tls_is_told_what_to_do(setting: Setting) -> None:
    server = setting.start()
    with pytest.raises(ProtocolError, match=r"speaks only TLS at this port\. Use https:// in the path"):
        setting.describe(url=server.url.replace("https:", "http:"))


def test_tls_at_a_port_of_plain_http_is_told_what_to_do(setting: Setting) -> None:
    setting.server = Server(Service(Hosted(setting.root, SMALL), LIMITS))
    setting.server.start()
    with pytest.raises(StoreUnavailableError, match="does not speak TLS"):
        setting.describe(url=setting.server.url.replace("http:", "https:"), retry_timeout_s=600.0)


def test_an_old_version_of_tls_is_refused(setting: Setting) -> None:
    server = setting.start()
    context = ssl.create_default_context(cafile=setting.cert)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    host, port = server.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock, server_hostname=host)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_without_the_certificate_that_is_asked_for(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, newest: ssl.TLSVersion
) -> None:
    """With TLS 1.3 it learns that only after its request. Neither way does it try for ten minutes."""
    mine, my_key = certificate(setting.folder, "client")
    other, other_key = certificate(setting.folder, "other")
    setting.start(client_ca=mine)
    made = ssl.create_default_context

    def old(*given: Any, **named: Any) -> ssl.SSLContext:
        context = made(*given, **named)
        context.maximum_version = newest
        return context

    monkeypatch.setattr(ssl, "create_default_context", old)
    monkeypatch.setattr("messagestore.spi.connections._contexts", {})
    assert setting.describe(cert_file=mine, key_file=my_key).store_id
    assert written(setting.location(cert_file=mine, key_file=my_key), 0).row_count == 5
    for cert, key in (("", ""), (other, other_key)):
        with pytest.raises(AccessDeniedError, match="does not accept the certificate of this client"):
            setting.describe(cert_file=cert, key_file=key, retry_timeout_s=600.0)
        refused = STORES.writer(setting.location(cert_file=cert, key_file=key), SMALL, staging_ttl_s=60)
        with pytest.raises(AccessDeniedError, match="does not accept"):  # not that the batch may be in the log
            refused.commit([], BatchRequest("app", 1), "5" * 32)


def test_a_client_that_stops_in_the_handshake_keeps_nobody_out(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has as long as for a request's head, and is disconnected."""
    server = setting.start()
    host, port = server.url.removeprefix("https://").split(":")
    silent = [socket.create_connection((host, int(port)), timeout=30) for _ in range(8)]
    for sock in silent:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
    assert setting.describe().store_id
    monkeypatch.setattr(serving, "HEAD_S", 0.5)
    last = socket.create_connection((host, int(port)), timeout=30)
    last.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
    assert last.recv(100) == b""
    for sock in (last, *silent):
        sock.close()


# ---- secrets that are replaced


def test_tokens_are_replaced_under_a_running_client(setting: Setting) -> None:
    """Two lines for a name: the new token is added, clients take it, the old one is taken away."""
    setting.start()
    reader = STORES.reader(setting.location())
    old, new = token_line("s", "write", "token-of-write"), token_line("s", "write", "new-token")
    replace(setting.tokens, old, new)
    assert reader.describe().store_id
    replace(setting.token, "new-token")
    assert reader.describe().store_id
    replace(setting.tokens, new)
    assert reader.describe().store_id
    replace(setting.token, "token-of-write")
    with pytest.raises(AccessDeniedError, match="does not know the token"):
        reader.describe()
    reader.close()


def test_certificates_are_replaced_under_a_running_client(setting: Setting) -> None:
    """The connection that is open goes on. A new one shows the new certificate, which the client's new file trusts."""
    setting.start()
    reader = STORES.reader(setting.location())
    stream = reader.gather([Range("t", 0, 0, 30)], max_rows=10)
    next(stream)
    kept = _connected(setting)
    kept.connect()
    certificate(setting.folder, "server")  # the client's caFile is the same file
    assert sum(len(part.sizes) for part in stream) == 20
    kept.request("GET", "/healthz")
    assert kept.getresponse().read() == b"alive\n"
    assert setting.describe().store_id and reader.describe().store_id
    shown = ssl.get_server_certificate(("127.0.0.1", int(setting.server.url.rpartition(":")[2])))  # type: ignore[union-attr]
    assert shown.split() == Path(setting.cert).read_text().split()
    kept.close()
    reader.close()


def test_the_files_of_a_client_may_be_empty_for_a_moment(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cp` empties a file before it writes it; a process that has never read it waits, as Spark's new ones do."""
    setting.start()
    token, trusted = setting.token, Path(setting.location().settings.ca_file)
    for path in (token, trusted):
        text = path.read_text()
        waited: list[float] = []

        def write(pause_s: float, path: Path = path, text: str = text, waited: list[float] = waited) -> None:
            waited.append(pause_s)
            path.write_text(text)

        monkeypatch.setattr(connections, "_contexts", {})
        monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=time.monotonic, sleep=write))
        path.write_text("")
        link_to(setting.server.url, setting.location().settings).forget()  # type: ignore[union-attr]
        assert setting.describe().store_id
        assert waited == [connections._SETTLING_S]


def test_wrong_new_files_leave_the_old_ones_in_use(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    """One line says so, and not one for each request; when they are right, they are used."""
    setting.start()
    caplog.set_level(logging.WARNING, "messagestore.serve")
    replace(setting.tokens, "s write token-of-write")
    for _ in range(3):
        assert setting.describe().store_id
    said = [record.message for record in caplog.records if "cannot be used" in record.message]
    assert len(said) == 1 and "whose line 1 is none" in said[0] and "token-of-write" not in said[0]
    setting.tokens.unlink()
    assert setting.describe().store_id

    _, other_key = certificate(setting.folder, "other")
    before = Path(setting.key).read_text()
    replace(Path(setting.key), *Path(other_key).read_text().splitlines())
    _handshake(setting)
    assert any("--cert-file, --key-file" in record.message for record in caplog.records)
    replace(Path(setting.key), *before.splitlines())
    _handshake(setting)

    replace(setting.tokens, token_line("new", "read", "other"))
    with pytest.raises(AccessDeniedError):
        setting.describe()


def test_files_are_looked_at_once_a_second_at_most(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rereading, "LOOK_S", 3600.0)
    tokens = Tokens(str(setting.tokens))
    setting.tokens.unlink()
    monkeypatch.setattr(rereading, "_stamp", None)
    assert tokens.client_of("Bearer token-of-read", "a") == ("r", {"read"})


def test_new_files_of_a_client_that_are_wrong_leave_the_old_ones_in_use(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    setting.start()
    assert setting.describe().store_id
    trusted = Path(setting.cert).read_text()
    replace(Path(setting.cert), "-----BEGIN CERTIFICATE-----", "half")
    assert setting.server is not None
    STORES.reader(setting.location()).close()
    link_to(setting.server.url, setting.location().settings).forget()
    assert setting.describe().store_id
    assert any("of before stay in use" in record.message for record in caplog.records)
    replace(Path(setting.cert), *trusted.splitlines())
    assert setting.describe().store_id


# ---- wrong settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "which has no token"),
        ("# nobody\n", "which has no token"),
        ("a read\n", "whose line 1 is none"),
        ("\na admin " + "0" * 64, "whose line 2 is none"),
        ("a read " + "0" * 63, "whose line 1 is none"),
        ("a/b read " + "0" * 64, "whose line 1 is none"),
        ("a read " + "0" * 64 + "\nb read " + "0" * 64, "line 2 has the same token as another"),
        ("".join(f"a read {n:064x}\n" for n in range(3)), "line 3 is the third one of a"),
        ("#" * (1 << 20) + "\n", "more than 1,048,576 bytes"),
    ],
)
def test_a_token_file_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    """A line that is wrong may be a token, so it is not shown."""
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(ConfigError, match=f"--token-file: found .*tokens, .*{said}.*; allowed are lines of name role"):
        Tokens(str(tmp_path / "tokens"))


def test_files_that_cannot_be_used(setting: Setting) -> None:
    _, other_key = certificate(setting.folder, "other")
    missing = str(setting.folder / "missing")
    with pytest.raises(ConfigError, match=r"--token-file: found .*missing, which cannot be read \(No such file"):
        Tokens(missing)
    for cert, key in ((missing, ""), (setting.cert, missing), (setting.cert, ""), (setting.cert, other_key)):
        with pytest.raises(ConfigError, match=r"--cert-file, --key-file: found .* cannot be used"):
            Certificates(cert, key)
    for ca in (missing, setting.key):
        with pytest.raises(ConfigError, match=r"--client-ca-file: found .* cannot be used"):
            Certificates(setting.cert, setting.key, ca)

    setting.start()
    with pytest.raises(ConfigError, match=r"option tokenFile: found .*missing', which cannot be read"):
        setting.describe(token_file=missing)
    replace(setting.token, "two words")
    with pytest.raises(ConfigError, match=r"option tokenFile: found .*, which has no token") as wrong:
        setting.describe()
    assert "two words" not in str(wrong.value)
    for other in ({"ca_file": missing}, {"cert_file": missing}, {"cert_file": setting.cert, "key_file": other_key}):
        with pytest.raises(ConfigError, match=r"options caFile, certFile, keyFile: found .*cannot be used"):
            setting.describe(**other)


def test_an_encrypted_key_is_refused_without_a_question(setting: Setting) -> None:
    openssl("ec", "-in", setting.key, "-aes256", "-passout", "pass:word", "-out", f"{setting.key}.locked")
    with pytest.raises(ConfigError, match="without a password"):
        Certificates(setting.cert, f"{setting.key}.locked")


def test_an_address_that_others_reach_needs_a_certificate_and_tokens(setting: Setting) -> None:
    tls = {"cert_file": setting.cert, "key_file": setting.key}
    tokens = {"token_file": str(setting.tokens)}
    for given, missing in (({}, "--cert-file and --token-file"), (tls, "--token-file"), (tokens, "--cert-file")):
        with pytest.raises(ConfigError, match=rf"--listen: found 0\.0\.0\.0, .* without {missing};.*--insecure"):
            ServedStore(setting.root, SMALL, host="0.0.0.0", **given)  # type: ignore[arg-type]
        ServedStore(setting.root, SMALL, host="0.0.0.0", insecure=True, **given)  # type: ignore[arg-type]
    ServedStore(setting.root, SMALL, host="0.0.0.0", **tls, **tokens)
    for name in ("key_file", "client_ca_file"):
        with pytest.raises(ConfigError, match="found without --cert-file"):
            ServedStore(setting.root, SMALL, **{name: setting.key})  # type: ignore[arg-type]


# ---- clients that are none


@pytest.mark.parametrize("token", ["token-of-write", "token-of-nobody"])
def test_random_bytes_over_tls_end_no_server(setting: Setting, token: str) -> None:
    """Frames that are cut, changed and too large, inside TLS, and bytes of TLS that are changed: no file stays."""
    server = setting.start()
    store_id = setting.describe().store_id
    host, port = server.url.removeprefix("https://").split(":")
    context = ssl.create_default_context(cafile=setting.cert)
    stage = json.dumps({"stage": {"write": {"$": "Write", "driver": "0", "key": "k"}, "store_id": store_id}}).encode()
    rows = json.dumps({"rows": {}, "buffers": [["data", 1 << 40]]}).encode()
    frames = b"".join(
        b"%x\r\n%s\r\n" % (len(data) + 4, len(data).to_bytes(4, "little") + data) for data in (stage, rows)
    )
    head = f"{HEADERS}Authorization: Bearer {token}\r\nTransfer-Encoding: chunked\r\n\r\n"
    whole = f"POST /v1/stage HTTP/1.1\r\n{head}".encode() + frames + b"0\r\n\r\n"
    randoms = random.Random(7)
    for number in range(60):
        data = bytearray(whole)
        for _ in range(randoms.randrange(4)):
            data[randoms.randrange(len(data))] = randoms.randrange(256)
        data = data[: randoms.randrange(len(data) + 1)] if number % 2 else data
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            if number % 10 == 9:
                with contextlib.suppress(OSError):
                    sock.sendall(randoms.randbytes(300))
                    sock.shutdown(socket.SHUT_WR)
                _all(sock)
                continue
            with context.wrap_socket(sock, server_hostname=host) as wrapped:
                garbage = b"\x17\x03\x03\x00\x20" + randoms.randbytes(32) if number % 10 == 8 else b""
                with contextlib.suppress(OSError):  # the server may have answered and gone
                    wrapped.sendall(data)
                    socket.socket.sendall(wrapped, garbage)
                    socket.socket.shutdown(wrapped, socket.SHUT_WR)
                answer = _all(wrapped)
                if token == "token-of-nobody":
                    assert b" 200 " not in answer.partition(b"\r\n")[0]
    until(lambda: (server.service.budget.streams, server.service.budget.memory) == (0, 0))
    staging = Path(setting.root, "spark", "staging")
    until(lambda: not staging.exists() or not list(staging.iterdir()))
    assert setting.describe().store_id == store_id
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("signs of life")])


def _all(sock: socket.socket) -> bytes:
    found = b""
    try:
        while data := sock.recv(1 << 16):
            found += data
    except OSError:
        pass
    return found
