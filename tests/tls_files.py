"""Certificates and tokens for servers of the tests, made by the command `openssl`."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def certificate(folder: Path, name: str, host: str = "IP:127.0.0.1") -> tuple[str, str]:
    """A certificate that has signed itself, and its key. Those that are there under this name are replaced."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    arguments = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", 2]
    arguments += ["-subj", "/CN=test", "-addext", f"subjectAltName={host}"]
    openssl("req", *arguments, "-keyout", f"{key}.new", "-out", f"{cert}.new")
    os.replace(f"{key}.new", key)
    os.replace(f"{cert}.new", cert)
    return str(cert), str(key)


def expired(cert: str, key: str) -> str:
    """The same certificate, which was valid until yesterday."""
    openssl("x509", "-in", cert, "-signkey", key, "-days", "-1", "-out", f"{cert}.old")
    return f"{cert}.old"


def token_line(name: str, role: str, token: str) -> str:
    return f"{name} {role} {hashlib.sha256(token.encode()).hexdigest()}"


def replace(path: Path, *lines: str) -> str:
    """Replace a file by another one, as those do who rotate secrets."""
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(f"{line}\n" for line in lines))
    os.replace(new, path)
    return str(path)
